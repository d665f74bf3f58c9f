"""Masks and labels that are functions of the parameters, under lazy and exact.

They may decide by path, dtype and rank. A function that decides by the number of rows
would freeze or train other tables on few rows than on all: it is refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_trees_close, slow_but, to_dense
from optimizers import step
from sparsejax.optim import exact, lazy


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D, ROWS = 40, 3, np.array([3, 1])
SHAPES = {"bias": (D,), "in": {"large": (V, D), "small": (9, D)}, "vector": (V,)}
SGD, ADAM = optax.sgd(1.0), optax.adam(0.1)
MOMENTUM, FREEZE = optax.sgd(0.5, momentum=0.9), optax.set_to_zero()
UNCHECKED = functools.partial(lazy, check=False)
lifts = pytest.mark.parametrize("lift", [lazy, UNCHECKED, exact])


def _params():
    fill = lambda shape: np.linspace(-1, 1, np.prod(shape), dtype="f").reshape(shape)
    params = jax.tree.map(fill, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    return {**params, "vector": params["vector"].astype(jnp.bfloat16)}


def _grads():
    """The large and the small table are read at two rows, with duplicates."""
    grads = jax.tree.map(lambda p: np.full_like(p, 0.25), _params())
    for name, table in grads["in"].items():
        values = np.arange(0.1, 3 * D, dtype="f").reshape(3, D)
        rows = np.array([*ROWS, ROWS[0]], np.int32)
        grads["in"][name] = sj.SelectedRows(rows, values, len(table))
    return grads


def _train(tx, grads, jit, steps=2):
    def run(params, state):
        if hasattr(tx, "catch_up"):  # of exact
            ids = {"in": dict.fromkeys(("large", "small"), jnp.asarray(ROWS))}
            params, state = tx.catch_up(params, state, ids)
        return step(tx, params, state, grads)

    carry, run = (_params(), tx.init(_params())), jax.jit(run) if jit else run
    for _ in range(steps):
        carry = run(*carry)
    return carry[0]


def _assert_as_dense(tx, lift=lazy, jit=True):
    """The rows read, which are the same in each step, train as with dense gradients."""
    # A GPU's programs round fewer numbers of 16 bits than operations by themselves.
    both = _train(lift(tx), _grads(), jit), _train(tx, to_dense(_grads()), jit)
    for tree in both:
        tree["in"] = jax.tree.map(lambda t: np.asarray(t)[ROWS], tree["in"])
    assert_trees_close(*both, rtol=1e-5, atol=1e-6)


def _mask(rule):
    return lambda tree: jax.tree.map(rule, tree)


def _labels(mask, a="a", b="b"):
    return lambda tree: jax.tree.map(lambda x: a if x else b, mask(tree))


def _is_large(tree):
    is_large = lambda path, x: "large" in jax.tree_util.keystr(path)
    return jax.tree_util.tree_map_with_path(is_large, tree)


# ------------------------------------------------------------------ rules

ACCEPTED = [
    _mask(lambda x: x.ndim > 1),
    _mask(lambda x: jnp.ndim(x) == 1),
    _mask(lambda x: jnp.issubdtype(x.dtype, jnp.bfloat16)),
    _mask(lambda x: True),
    _is_large,
    lambda tree: {"bias": True, "in": "in" in tree, "vector": False},  # a prefix
    functools.partial(jax.tree.map, lambda x: x.shape[1:] == (D,)),
]
BY_ROWS = {
    "by rows": lambda x: x.shape[0] > 20,
    "this shape": lambda x: x.shape == (V, D),
    "by size": lambda x: x.size >= 9 * D,
    "by len": lambda x: len(x) == 9,
}


@pytest.mark.parametrize("lift, jit", [(lazy, True), (lazy, False), (exact, True)])
def test_rules(lift, jit):
    """Each scales the leaves that it chooses by another number.

    They are masks and labels by turns.
    """
    chain = [MOMENTUM]
    for k, mask in enumerate(ACCEPTED):
        scale = optax.scale(1 + 1 / (3 + 2 * k))
        parts = {"a": scale, "b": optax.identity()}
        labelled = optax.partition(parts, _labels(mask))
        chain.append(optax.masked(scale, mask) if k % 2 else labelled)
    _assert_as_dense(optax.chain(*chain), lift, jit)


def _masked(mask):
    return optax.masked(SGD, mask)


def _frozen(mask):
    labels = _labels(mask) if callable(mask) else _labels(lambda tree: tree)(mask)
    return optax.partition({"a": MOMENTUM, "b": FREEZE}, labels)


@lifts
@pytest.mark.parametrize("make", [_masked, _frozen])
def test_decisions_by_the_number_of_rows_are_refused(make, lift):
    message = "number of rows|cannot run on rows|cannot be kept exact"
    for rule in BY_ROWS.values():
        for jit in (True, False):
            with pytest.raises(ValueError, match=message):
                _train(lift(make(_mask(rule))), _grads(), jit, steps=1)
    # The way out that the message names.
    _assert_as_dense(make(_mask(rule)(_params())), lift)


PLACES = {
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.5, mask=_is_large),
    "decay": lambda: optax.chain(optax.add_decayed_weights(0.5, _is_large), SGD),
    "selective": lambda: optax.selective_transform(
        MOMENTUM, freeze_mask=_is_large(_params())
    ),
    "two": lambda: optax.partition({"a": ADAM, "b": MOMENTUM}, _labels(_is_large)),
    "partition in partition": lambda: optax.partition(
        {
            "a": optax.partition(
                {"a": MOMENTUM, "b": FREEZE}, _labels(_is_large, "b", "a")
            ),
            "b": SGD,
        },
        _labels(_mask(lambda x: x.ndim > 1)),
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adamw, static_args="mask")(
        0.1, weight_decay=0.5, mask=_is_large
    ),
    "in another": lambda: optax.apply_if_finite(optax.masked(MOMENTUM, _is_large), 2),
    "our own": lambda: optax.chain(
        SGD, optax.masked(sj.optim.weight_decay(0.5, 1.0), _is_large)
    ),
}


@pytest.mark.parametrize(
    "name, lift",
    slow_but(
        [*((name, lazy) for name in PLACES), ("decay", exact), ("selective", exact)],
        ("two", lazy),
        ("partition in partition", lazy),
    ),
)
def test_places(name, lift):
    _assert_as_dense(PLACES[name](), lift)


@pytest.mark.parametrize("jit", [True, False])
def test_stacks(jit):
    """A row of a stack has one axis less: a rule `ndim == 3` is refused."""
    params = {"stack": np.ones((2, 7, D), np.float32), "w": np.ones(D, np.float32)}
    loss = lambda p: jnp.sum(jax.vmap(lambda t: t[np.array([1, 4])])(p["stack"]))
    grad = jax.jit(sj.grad(loss))

    def run(labels):
        def both(params):
            tx = optax.partition({"a": MOMENTUM, "b": FREEZE}, labels)
            lifted, grads = lazy(tx), grad(params)
            updates, _ = lifted.update(grads, lifted.init(params), params)
            wanted, _ = tx.update(to_dense(grads), tx.init(params), params)
            return to_dense(updates), wanted

        return (jax.jit(both) if jit else both)(params)

    assert_trees_close(*run(_labels(_mask(lambda x: x.ndim > 1))))
    for rule in (lambda x: x.ndim == 3, lambda x: x.shape[:2] == (2, 7)):
        with pytest.raises(ValueError, match="number of rows"):
            run(_labels(_mask(rule)))
        assert_trees_close(*run(_labels(_mask(rule))(params)))


def test_reset_rows():
    params, rows = _params(), {"in": {"large": ROWS}}

    def reset(rule):
        tx = optax.partition({"a": ADAM, "b": MOMENTUM}, _labels(_mask(rule)))
        _, state = jax.jit(tx.update)(params, tx.init(params), params)
        return sj.optim.reset_rows(tx, state, params, rows)[1]

    mu = optax.tree.get(reset(lambda x: x.ndim > 1).inner_states["a"], "mu")
    assert not np.any(np.asarray(mu["in"]["large"])[ROWS])
    with pytest.raises(ValueError, match="number of rows"):
        reset(BY_ROWS["by rows"])


# ------------------------------------------------------------------ what is refused


@lifts
def test_functions_of_numbers(lift):
    for rule in (lambda x: bool(jnp.any(x != 0)), lambda x: jnp.any(x != 0)):
        with pytest.raises(ValueError, match="BoolConversion"):
            _train(lift(optax.masked(SGD, _mask(rule))), _grads(), False)


@pytest.mark.parametrize("lift", [lazy, exact])
def test_a_tree_that_does_not_fit_is_named(lift):
    """Optax would raise as well; it is not the fault of a row."""
    tree = {"in": {"large": True}, "bias": True, "vector": True}
    for tx in (
        optax.masked(SGD, tree),
        optax.adamw(0.1, mask=tree),
        optax.partition({True: SGD}, tree),
    ):
        with pytest.raises(ValueError) as error:
            lift(tx).init(_params())
        message = str(error.value)
        assert "cannot be lifted" not in message and "small" in message
        assert "large" in message and "structure of the parameters" in message


def _hidden(rule, inner=SGD):
    """A rule inside of an update function, where nothing can replace it."""

    def update(updates, state, params=None):
        new, state = inner.update(updates, state, params)
        return jax.tree.map(lambda a, b: a if rule(b) else b, new, updates), state

    return optax.GradientTransformation(inner.init, update)


def _a_number_or_the_state(rows):
    """Scales by a number in the program, or by the state, as rows are even or odd."""

    def update(updates, state, params=None):
        scale = lambda g: g * (2.0 if len(g) % 2 == rows else state)
        return jax.tree.map(scale, updates), state

    return optax.GradientTransformation(lambda params: jnp.ones(()), update)


HIDDEN = {
    "a number if even": _a_number_or_the_state(0),
    "a number if odd": _a_number_or_the_state(1),
    "by rows": _hidden(BY_ROWS["by rows"]),
    "made in update": optax.GradientTransformation(
        lambda p: optax.masked(ADAM, _is_large).init(p),
        lambda *args: optax.masked(ADAM, _mask(BY_ROWS["this shape"])).update(*args),
    ),
    "a number": optax.chain(
        optax.stateless_with_tree_map(lambda g, p: g * (2.0 if len(g) > 20 else 1.0)),
        SGD,
    ),
}


@lifts
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_rules_are_refused(name, lift):
    for jit in (True, False):
        with pytest.raises(ValueError, match="depends on the number of rows"):
            _train(lift(HIDDEN[name]), _grads(), jit, steps=1)


@lifts
def test_a_rule_that_is_true_only_for_the_rows_read(lift):
    """`exact`, and `lazy` outside of jit, run on as many rows as a gradient has."""
    tx = _hidden(lambda x: x.shape[0] == 3)
    with pytest.raises(ValueError, match="number of rows"):
        _train(lift(tx), _grads(), False, steps=1)
    _assert_as_dense(tx)  # inside of jit it runs on one row
