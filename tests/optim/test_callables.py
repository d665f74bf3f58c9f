"""Masks and labels that are functions of the parameters, under lazy and exact.

They may decide by path, dtype and rank. The oracle is optax on the same trees with
dense gradients. Each step reads the same rows, so the rows read are equal under `lazy`
as well as under `exact`. A function that decides by the number of rows would freeze or
train other tables on few rows than on all: it is refused.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_trees_close, slow_but, to_dense
from sparsejax.optim import exact, lazy


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D, ROWS = 40, 3, (3, 1)
SHAPES = {"bias": (D,), "in": {"large": (V, D), "small": (9, D)}, "vector": (V,)}
IS_SHAPE = lambda x: isinstance(x, tuple)


def _params():
    fill = lambda shape: jnp.linspace(-1, 1, np.prod(shape)).reshape(shape)
    params = jax.tree.map(fill, SHAPES, is_leaf=IS_SHAPE)
    params["vector"] = params["vector"].astype(jnp.bfloat16)
    return params


def _grads():
    """The large and the small table are read at two rows, with duplicates."""
    grads = jax.tree.map(lambda p: jnp.full_like(p, 0.25), _params())
    for name, table in grads["in"].items():
        rows = jnp.array([*ROWS, ROWS[0]], jnp.int32)
        values = 0.1 + jnp.arange(3.0 * D).reshape(3, D)
        grads["in"][name] = sj.SelectedRows(rows, values, len(table))
    return grads


def _train(tx, grads, jit, steps=2):
    params = _params()

    def step(params, state):
        if hasattr(tx, "catch_up"):  # of exact
            rows = jnp.array(ROWS)
            ids = {"in": {"large": rows, "small": rows}}
            params, state = tx.catch_up(params, state, ids)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, step = tx.init(params), jax.jit(step) if jit else step
    for _ in range(steps):
        params, state = step(params, state)
    return params


def _assert_as_dense(tx, lift=lazy, jit=True):
    found = _train(lift(tx), _grads(), jit)
    # A GPU's programs round fewer numbers of 16 bits than operations by themselves.
    wanted = _train(tx, to_dense(_grads()), jit)
    for tree in (found, wanted):
        tree["in"] = jax.tree.map(lambda t: t[np.array(ROWS)], tree["in"])
    assert_trees_close(found, wanted, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ rules


def _mask(rule):
    return lambda tree: jax.tree.map(rule, tree)


def _labels(rule, a="a", b="b"):
    return lambda tree: jax.tree.map(lambda x: a if rule(x) else b, tree)


def _by_path(tree):
    is_large = lambda path, x: "large" in jax.tree_util.keystr(path)
    return jax.tree_util.tree_map_with_path(is_large, tree)


ACCEPTED = {
    "by rank": _mask(lambda x: x.ndim > 1),
    "by jnp": _mask(lambda x: jnp.ndim(x) == 1),
    "by dtype": _mask(lambda x: jnp.issubdtype(x.dtype, jnp.bfloat16)),
    "constant": _mask(lambda x: True),
    "by path": _by_path,
    "prefix": lambda tree: {"bias": True, "in": "in" in tree, "vector": False},
    "partial": functools.partial(jax.tree.map, lambda x: x.shape[1:] == (D,)),
}
BY_ROWS = {
    "by rows": lambda x: x.shape[0] > 20,
    "this shape": lambda x: x.shape == (V, D),
    "by size": lambda x: x.size >= 9 * D,
    "by len": lambda x: len(x) == 9,
}
SGD, ADAM = optax.sgd(1.0), optax.adam(0.1)
MOMENTUM = optax.sgd(0.5, momentum=0.9)


@pytest.mark.parametrize("lift, jit", [(lazy, True), (lazy, False), (exact, True)])
def test_rules(lift, jit):
    """Each rule scales the leaves that it chooses by another number.

    They are masks and labels by turns.
    """
    chain = [MOMENTUM]
    for k, function in enumerate(ACCEPTED.values()):
        scale = optax.scale(1 + 1 / (3 + 2 * k))
        labels = lambda p, f=function: jax.tree.map(lambda m: "ab"[m], f(p))
        parts = {"a": optax.identity(), "b": scale}
        by_labels = optax.partition(parts, labels)
        chain.append(optax.masked(scale, function) if k % 2 else by_labels)
    _assert_as_dense(optax.chain(*chain), lift, jit)


MESSAGE = "number of rows|cannot run on rows|cannot be kept exact"


@pytest.mark.parametrize("lift", [lazy, functools.partial(lazy, check=False), exact])
@pytest.mark.parametrize("rule", BY_ROWS)
def test_decisions_by_the_number_of_rows_are_refused(rule, lift):
    rule = BY_ROWS[rule]
    frozen = optax.partition({"a": MOMENTUM, "b": optax.set_to_zero()}, _labels(rule))
    for tx in (optax.masked(SGD, _mask(rule)), frozen):
        for jit in (True, False):
            with pytest.raises(ValueError, match=MESSAGE):
                _train(lift(tx), _grads(), jit, steps=1)
    # The way out that the message names.
    tree = _mask(rule)(_params())
    _assert_as_dense(optax.masked(SGD, tree), lift)


# ------------------------------------------------------------------ where they are

LARGE = _by_path


def LARGE_OR(a="a", b="b"):
    return lambda tree: jax.tree.map(lambda x: a if x else b, _by_path(tree))


_frozen = lambda trained: optax.partition(
    {"a": trained, "b": optax.set_to_zero()}, LARGE_OR("b", "a")
)
PLACES = {
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.5, mask=LARGE),
    "decay": lambda: optax.chain(optax.add_decayed_weights(0.5, LARGE), SGD),
    "selective": lambda: optax.selective_transform(
        MOMENTUM, freeze_mask=LARGE(_params())
    ),
    "two": lambda: optax.partition({"a": ADAM, "b": MOMENTUM}, LARGE_OR()),
    "partition in partition": lambda: optax.partition(
        {"a": _frozen(MOMENTUM), "b": SGD}, _labels(lambda x: x.ndim > 1)
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adamw, static_args="mask")(
        0.1, weight_decay=0.5, mask=LARGE
    ),
    "in another": lambda: optax.apply_if_finite(optax.masked(MOMENTUM, LARGE), 2),
    "our own": lambda: optax.chain(
        SGD, optax.masked(sj.optim.weight_decay(0.5, 1.0), LARGE)
    ),
}


@pytest.mark.parametrize("name", slow_but(PLACES, "two", "partition in partition"))
def test_places(name):
    _assert_as_dense(PLACES[name](), lazy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, lift, jit",
    [("selective", lazy, False), ("decay", exact, True), ("selective", exact, True)],
)
def test_places_eagerly_and_under_exact(name, lift, jit):
    _assert_as_dense(PLACES[name](), lift, jit)


@pytest.mark.parametrize("lift, jit", [(lazy, True), (lazy, False), (exact, True)])
def test_a_frozen_table_stays_or_is_refused(lift, jit):
    """Frozen by its number of rows, it would be trained if its rows were looked at."""
    labels = lambda p: jax.tree.map(lambda x: "t" if x.shape[0] >= 1000 else "d", p)
    params = {"table": jnp.ones((5000, D)), "bias": jnp.ones(D)}
    grads = jax.tree.map(jnp.ones_like, params)
    grads["table"] = sj.SelectedRows([3], jnp.ones((1, D)), 5000)
    parts = {"t": optax.set_to_zero(), "d": optax.sgd(1.0)}

    def train(labels):
        tx = lift(optax.partition(parts, labels))
        update = jax.jit(tx.update) if jit else tx.update
        return update(grads, tx.init(params), params)[0]

    with pytest.raises(ValueError, match="number of rows"):
        train(labels)
    updates = train(labels(params))
    assert not np.any(updates["table"].to_dense())
    assert np.all(updates["bias"] == -1)


@pytest.mark.parametrize("jit", [True, False])
def test_stacks(jit):
    """A row of a stack has one axis less: a rule `ndim == 3` is refused."""
    params = {"stack": np.ones((2, 7, D), np.float32), "w": np.ones(D, np.float32)}
    loss = lambda p: jnp.sum(jax.vmap(lambda t: t[jnp.array([1, 4])])(p["stack"]))

    def run(params, labels):
        tx = optax.partition({"a": MOMENTUM, "b": optax.set_to_zero()}, labels)
        lifted = lazy(tx)
        grads = sj.grad(loss)(params)
        updates, _ = lifted.update(grads, lifted.init(params), params)
        wanted, _ = tx.update(to_dense(grads), tx.init(params), params)
        return to_dense(updates), wanted

    of = lambda labels: functools.partial(run, labels=labels)
    wrap = jax.jit if jit else lambda f: f
    assert_trees_close(*wrap(of(_labels(lambda x: x.ndim > 1)))(params))
    for rule in (lambda x: x.ndim == 3, lambda x: x.shape[:2] == (2, 7)):
        with pytest.raises(ValueError, match="number of rows"):
            wrap(of(_labels(rule)))(params)
        assert_trees_close(*wrap(of(_labels(rule)(params)))(params))


@pytest.mark.parametrize("rule", [lambda x: x.shape[0] > 20, lambda x: x.ndim > 1])
def test_reset_rows(rule):
    tx = optax.partition({"a": ADAM, "b": MOMENTUM}, _labels(rule))
    params = _params()
    _, state = tx.update(to_dense(_grads()), tx.init(params), params)
    rows = {"in": {"large": jnp.array(ROWS)}}
    reset = functools.partial(sj.optim.reset_rows, tx, state, params, rows)
    if rule(np.ones((2, D))):
        mu = optax.tree.get(reset()[1].inner_states["a"], "mu")["in"]["large"]
        assert not np.any(mu[np.array(ROWS)])
    else:
        with pytest.raises(ValueError, match="number of rows"):
            reset()


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("lift", [lazy, functools.partial(lazy, check=False), exact])
@pytest.mark.parametrize(
    "rule", [lambda x: bool(jnp.any(x != 0)), lambda x: jnp.any(x != 0)]
)
def test_functions_of_numbers(rule, lift):
    tx = lift(optax.masked(SGD, _mask(rule)))
    with pytest.raises(ValueError, match="BoolConversion"):
        tx.update(_grads(), tx.init(_params()), _params())


@pytest.mark.parametrize("lift", [lazy, exact])
@pytest.mark.parametrize(
    "make",
    [
        lambda tree: optax.masked(SGD, tree),
        lambda tree: optax.adamw(0.1, mask=tree),
        lambda tree: optax.partition({True: SGD}, tree),
    ],
)
def test_a_tree_that_does_not_fit_is_named(make, lift):
    """Optax would raise as well; it is not the fault of a row."""
    tx = lift(make({"in": {"large": True}, "bias": True, "vector": True}))
    with pytest.raises(ValueError) as error:
        tx.init(_params())
    message = str(error.value)
    assert "cannot be lifted" not in message
    assert "large" in message and "structure of the parameters" in message
    assert "small" in message


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
    "a number if even": lambda: _a_number_or_the_state(0),
    "a number if odd": lambda: _a_number_or_the_state(1),
    "by rows": lambda: _hidden(BY_ROWS["by rows"]),
    "made in update": lambda: optax.GradientTransformation(
        lambda p: optax.masked(ADAM, LARGE).init(p),
        lambda g, s, p=None: optax.masked(
            ADAM, lambda tree: jax.tree.map(lambda x: x.shape == (V, D), tree)
        ).update(g, s, p),
    ),
    "a number": lambda: optax.chain(
        optax.stateless_with_tree_map(lambda g, p: g * (2.0 if len(g) > 20 else 1.0)),
        SGD,
    ),
}
UNCHECKED = functools.partial(lazy, check=False)


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("lift", [lazy, UNCHECKED, exact])
def test_hidden_rules_are_refused(name, lift):
    message = "depends on the number of rows"
    for jit in (True, False):
        with pytest.raises(ValueError, match=message):
            _train(lift(HIDDEN[name]()), _grads(), jit, steps=1)


@pytest.mark.parametrize("lift", [lazy, UNCHECKED, exact])
def test_a_rule_that_is_true_only_for_the_rows_read(lift):
    """`exact`, and `lazy` outside of jit, run on as many rows as a gradient has."""
    tx = _hidden(lambda x: x.shape[0] == 3)
    with pytest.raises(ValueError, match="number of rows"):
        _train(lift(tx), _grads(), False, steps=1)
    _assert_as_dense(tx)  # inside of jit it runs on one row
