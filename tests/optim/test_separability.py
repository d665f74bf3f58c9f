"""Which transformations may be lifted, which are exact, and the names in refusals.

The verdict is read from the program. Its oracle, `tests/tools/probe.py`, runs the
transformation on random numbers. `tests/docs/optax_table.md` has all of optax's.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_table
import probe
from helpers import assert_trees_close, slow_but, to_dense
from optimizers import (
    CLIPPED_LAST,
    LR,
    QUICK_REFUSED,
    REFUSED,
    SCHEDULE,
    SEPARABLE,
    make_grads,
    make_params,
)
from sparsejax import SelectedRows
from sparsejax.optim import is_lazy_exact, is_row_separable, lazy, rowwise_adagrad
from sparsejax.optim._lazy import separability


def _refusal(tx):
    """The message with which `lazy` refuses a transformation of one table, or ""."""
    try:
        jax.eval_shape(lazy(tx).init, jax.ShapeDtypeStruct((160, 130), jnp.float32))
    except ValueError as error:
        return str(error)
    return ""


PARAMS = {"table": jnp.zeros((50, 6)), "bias": jnp.zeros(6)}


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", slow_but(REFUSED, *QUICK_REFUSED))
def test_refused_by_name_at_init(name):
    make, named = REFUSED[name]
    tx = make()
    assert not is_row_separable(tx)
    # Wide enough to factor second moments; lookahead wants its own parameters.
    params = jnp.zeros((300, 130))
    with pytest.raises(ValueError, match=f"sparsejax.optim.lazy: .*{named}"):
        lazy(tx).init({"table": params, "bias": jnp.zeros(130)})


def test_a_release_of_optax_keeps_the_names_that_we_refuse_by():
    words = " ".join(named for _, named in REFUSED.values())
    parts = [*separability.KNOWN_AS, *(x for x, _ in separability.NOT_LIFTED.values())]
    assert not [x for x in parts if x not in words and "sparsejax" not in x]


# Here the oracle and `lazy` differ, as intended: True if `lazy` refuses.
INTENDED = {
    # A dense run clips by the norm of all rows, a lifted one by the read rows' norm.
    "adamw_clip": False,
    "injected_adamw_clip": False,
    # The oracle compares leaves; lazy needs a state whose structure stays.
    "optax.monitor": True,
}
# test_lazy.py trains the entries of SEPARABLE against optax.
ALL = {**CLIPPED_LAST, **{name: make for name, (make, _) in REFUSED.items()}}
ALL |= {
    f"{prefix}.{name}": entry.make
    for _, module, prefix, entries in optax_table.SECTIONS
    for name, entry in entries.items()
    if hasattr(module, name) and entry.make not in [*ALL.values(), *SEPARABLE.values()]
}


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    slow_but(ALL, "sm3", "lamb", "optax.clip_by_global_norm", "optax.scale_by_adam"),
)
def test_the_verdict_agrees_with_its_oracle(name):
    tx = ALL[name]()
    refused = not is_row_separable(tx)
    found = probe.of_one_table(tx)
    assert refused == INTENDED.get(name, found is not None), found


@pytest.mark.parametrize("junk", [None, 5, "adam", lambda x: x, optax.adam, optax])
@pytest.mark.parametrize("ask", [is_row_separable, is_lazy_exact])
def test_questions_never_raise(ask, junk):
    assert not ask(junk)
    assert not ask(junk, {"table": jnp.zeros((3, 2))})


def test_transformations_that_raise_are_not_separable():
    def update(updates, state, params=None):
        raise RuntimeError("no such thing")

    tx = optax.GradientTransformation(lambda params: (), update)
    assert not is_row_separable(tx)
    with pytest.raises(ValueError, match="cannot run on rows.*no such thing"):
        lazy(tx).init(PARAMS)


def _user(update, init=lambda params: ()):
    return optax.GradientTransformation(init, update)


def test_an_error_of_no_part_is_an_error_of_the_transformation():
    def counted_once(updates, state, params=None):
        return updates, (*state, 1)

    message = "because of test_an_error_of_no_part.*cannot run.*another structure"
    with pytest.raises(ValueError, match=message):
        lazy(_user(counted_once)).init(PARAMS)


def test_a_dense_leaf_that_is_moved_by_rows_of_the_table():
    def update(updates, state, params=None):
        return updates | {"heights": updates["table"][:, 0]}, state

    params = PARAMS | {"heights": jnp.zeros(50)}
    with pytest.raises(ValueError, match="dense leaf has rows of the table"):
        lazy(_user(update)).init(params)


def mean_over_rows(updates, state, params=None):
    return jax.tree.map(lambda g: g - jnp.mean(g, axis=0), updates), state


def largest_row(updates, state, params=None):
    largest = [jnp.max(jnp.abs(p)) for p in jax.tree.leaves(params)]
    return updates, jnp.maximum(state, jnp.max(jnp.stack(largest)))


def test_users_own_transformations_are_judged_and_named():
    tx = optax.chain(optax.adam(LR), _user(mean_over_rows))
    words = (
        r"mean_over_rows: div by a number that depends on .*test_separability.py:\d+"
    )
    with pytest.raises(ValueError, match=words):
        lazy(tx).init(PARAMS)
    tx = _user(largest_row, lambda params: jnp.zeros(()))
    with pytest.raises(
        ValueError, match="largest_row: reduce_max of weights over all rows"
    ):
        lazy(tx).init(PARAMS)


def _of_leaf(f, init=lambda w: None):
    """A transformation `f(gradient, weights, state) -> (update, state)` of a leaf."""

    def update(updates, state, params):
        leaves, treedef = jax.tree.flatten(updates)
        args = leaves, jax.tree.leaves(params), state
        found = [f(*x) for x in zip(*args)]
        return treedef.unflatten([u for u, _ in found]), [s for _, s in found]

    return _user(update, lambda params: [init(w) for w in jax.tree.leaves(params)])


# `(update, state)` of one table, all with state of its shape.
BY_ROWS = {
    "norm of each row": lambda g, w, s: (g * jnp.sum(w * w, axis=1)[:, None], s),
    "softmax in a row": lambda g, w, s: (g * jax.nn.softmax(w, axis=1), s),
    "matrix": lambda g, w, s: (g @ jnp.eye(g.shape[1]), s + g),
    "order in a row": lambda g, w, s: (jnp.sort(g, axis=1)[:, ::-1], s),
    "sum with weights": lambda g, w, s: (g * jnp.sum(g * w), s),
    "rows with a gradient": lambda g, w, s: (g / jnp.sum(jnp.any(g != 0, axis=1)), s),
    "largest": lambda g, w, s: (g / (1 + jnp.max(jnp.abs(g))), s),
    "vector": lambda g, w, s: (g * jnp.arange(1.0, g.shape[1] + 1), s),
    "halves": lambda g, w, s: (jnp.concatenate(jnp.split(g, 2, axis=1)[::-1], 1), s),
    # It counts the rows read, as a clip after momentum does.
    "norm of momentum": lambda g, w, s: (g / jnp.linalg.norm(s + g), s + g),
    "where": lambda g, w, s: (jnp.where(s > 0, g, 0.5 * g), jnp.maximum(s, g)),
    "norm of zeros": lambda g, w, s: (g + jnp.linalg.norm(jnp.zeros_like(g)), s),
}
NOT_BY_ROWS = {
    "norm of new weights": lambda g, w, s: (g / jnp.linalg.norm(w - g), s),
    "largest weight": lambda g, w, s: (g / jnp.max(jnp.abs(w)), s),
    "any weight": lambda g, w, s: (jnp.where(jnp.any(w > 9), 0, g), s),
    "mean": lambda g, w, s: (g - jnp.mean(g, axis=0), s),
    "variance": lambda g, w, s: (g / (1 + jnp.var(g)), s),
    "largest, of either sign": lambda g, w, s: (g / (9 + jnp.max(g)), s),
    "smallest": lambda g, w, s: (g * (1 + jnp.min(jnp.abs(g))), s),
    "number of rows": lambda g, w, s: (g / jnp.sum(jnp.ones_like(g)), s),
    "a number in each": lambda g, w, s: (g / (1 + jnp.sum(jnp.cos(g))), s),
    "position": lambda g, w, s: (g * jnp.arange(g.shape[0])[:, None], s),
    "first row": lambda g, w, s: (g - g[:1], s),
    "row before": lambda g, w, s: (g - jnp.roll(g, 1, axis=0), s),
    "running sum": lambda g, w, s: (jnp.cumsum(g, axis=0), s),
    "softmax over rows": lambda g, w, s: (g * jax.nn.softmax(g, axis=0), s),
    "largest row": lambda g, w, s: (g * jnp.argmax(jnp.sum(g, axis=1)), s),
    "products of rows": lambda g, w, s: (g @ (g.T @ g), s),
    "loop over rows": lambda g, w, s: (jax.lax.map(lambda x: x * 2, g), s),
    "noise": lambda g, w, s: (g * jax.random.normal(jax.random.key(0), g.shape), s),
    "state of all rows": lambda g, w, s: (g, s + jnp.sum(jnp.abs(g + 1))),
}


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", [*BY_ROWS, *NOT_BY_ROWS])
def test_what_a_user_may_write(name):
    tx = _of_leaf({**BY_ROWS, **NOT_BY_ROWS}[name], jnp.zeros_like)
    refused = _refusal(tx)
    assert bool(refused) == (name in NOT_BY_ROWS), refused
    if refused:
        assert "test_separability.py:" in refused and "check=False" in refused
    # After adam, a sum over rows counts only the rows read, but not their weights.
    after_adam = _refusal(optax.chain(optax.scale_by_adam(), tx))
    expected = name in NOT_BY_ROWS or name == "sum with weights"
    assert bool(after_adam) == expected, after_adam


def test_a_norm_must_not_count_empty_slots():
    """Yogi's moments start above zero, so it moves rows that were never read.

    A sign makes those steps as large as any. A norm would count the empty slots of a
    gradient, so that its padding would decide.
    """
    norm = optax.normalize_by_update_norm
    yogi, sign = optax.scale_by_yogi(), optax.scale_by_sign()
    shift = optax.stateless(lambda g, _: jax.tree.map(lambda x: x + 1, g))
    for parts in ((yogi, sign, norm()), (shift, optax.clip_by_global_norm(1.0))):
        assert not is_row_separable(optax.chain(*parts))
        init = jax.jit(lazy(optax.chain(*parts)).init)
        with pytest.raises(ValueError, match="moves rows that were never read"):
            init({"t": jnp.ones((50, 2))})
    for parts in ((norm(), yogi, sign), (optax.adamw(0.1), norm()), (sign, norm())):
        assert is_row_separable(optax.chain(*parts))
    # It clips by the count from below: a number that is negative at every step.
    clipped = optax.chain(optax.contrib.scale_by_adopt(), norm())
    assert is_row_separable(optax.apply_if_finite(clipped, 3))


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize(
    "norm", [optax.contrib.normalize, optax.normalize_by_update_norm]
)
def test_a_norm_over_all_leaves_hides_nothing(norm):
    """For a single leaf, it divides by whatever that leaf was multiplied by."""
    tx = optax.chain(optax.scale_by_trust_ratio(), norm())
    params = {"t": jnp.ones((50, 6)), "w": jnp.ones((6, 2))}
    assert not is_row_separable(tx) and not is_row_separable(tx, params)
    with pytest.raises(ValueError, match="because of scale_by_trust_ratio"):
        lazy(tx).init(params)
    assert is_row_separable(optax.chain(norm(), optax.adam(LR)))


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("make", [optax.contrib.dog, optax.contrib.dowg])
def test_a_large_dense_leaf_hides_nothing(make):
    """A table of few rows may be a small part of a sum over all leaves."""
    params = {"t": jnp.ones((50, 6)), "w": jnp.ones((300, 70))}
    even = lambda step, **extra_args: step % 2 == 0
    for tx in (make(), optax.conditionally_mask(make(), even)):
        with pytest.raises(ValueError, match="because of scale_by_dow?g"):
            lazy(tx).init(params)


def _later(step, **extra_args):
    return step > 100


def _zero_at_first(step):
    return jnp.where(step < 100, 0.0, 1.0)


LATE = optax.conditionally_transform(optax.scale_by_trust_ratio(), _later)


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.adam(LR), optax.clip_by_block_rms(1e5)),
        optax.chain(optax.clip_by_block_rms(1e5), optax.adam(LR)),
        optax.adaptive_grad_clip(1e4),
        optax.chain(optax.scale_by_trust_ratio(), optax.scale(0.0)),
        optax.chain(optax.scale_by_trust_ratio(), optax.scale_by_sign()),
        optax.chain(optax.lamb(LR), optax.scale_by_schedule(_zero_at_first)),
        LATE,
        optax.contrib.split_real_and_imaginary(LATE),
        optax.contrib.schedule_free(optax.chain(LATE, optax.sgd(LR)), LR),
        optax.chain(optax.clip(0.1), optax.masked(optax.lars(LR), True), optax.clip(0)),
    ],
)
def test_a_part_that_does_nothing_at_first_is_refused(tx):
    """Clips that do not clip yet, and effects that are undone or come later."""
    assert not is_row_separable(tx)
    with pytest.raises(ValueError, match="because of (scale_by|clip_by|adaptive)_"):
        lazy(tx).init(PARAMS)


@pytest.mark.usefixtures("loose_promotion")
def test_what_is_for_dense_leaves_alone_is_accepted():
    dense, table = {"table": False, "bias": True}, {"table": True, "bias": False}
    lars, adam, norm = optax.lars(LR), optax.adam(LR), optax.clip_by_global_norm(1.0)
    labels = {"table": "adam", "bias": "lars"}
    of_dense = lambda params: jax.tree.map(lambda x: x.ndim < 2, params)
    for tx in (
        optax.masked(lars, dense),
        optax.masked(lars, of_dense),
        optax.masked(optax.masked(lars, dense), True),
        optax.masked(optax.masked(lars, of_dense), {"table": True, "bias": True}),
        optax.partition({"adam": adam, "lars": lars}, labels),
        optax.partition({"a": optax.masked(lars, dense)}, "a"),
    ):
        assert is_row_separable(optax.chain(norm, tx, norm), PARAMS)
    for tx in (optax.masked(lars, table), optax.masked(optax.masked(lars, True), True)):
        assert not is_row_separable(optax.chain(norm, tx, optax.scale(0.0)), PARAMS)


def test_what_a_user_does_to_a_dense_leaf_alone_is_accepted():
    """By a part that it holds, beside a norm over all leaves."""
    lamb, norm = optax.lamb(LR), optax.clip_by_global_norm(1.0)

    def update(updates, state, params):
        of_bias, state = lamb.update(updates["bias"], state, params["bias"])
        return norm.update({**updates, "bias": of_bias}, ())[0], state

    tx = optax.GradientTransformation(lambda params: lamb.init(params["bias"]), update)
    assert is_row_separable(tx, PARAMS)
    assert is_row_separable(optax.chain(tx, norm, optax.adam(LR)), PARAMS)


def center_table(updates, params):
    return {**updates, "table": updates["table"] - jnp.mean(updates["table"], 0)}


def center(g, p):
    return g - jnp.mean(g)


@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, lambda tx: optax.chain(tx, optax.sgd(LR))]
)
def test_functions_that_optax_calls_are_named_and_given_the_tree(wrap):
    """The function of `optax.stateless` may treat leaves differently."""

    def scale(updates, params):
        return {**updates, "bias": updates["bias"] * jnp.linalg.norm(updates["bias"])}

    rows = SelectedRows(jnp.array([3, 5]), jnp.ones((2, 6)), 50)
    grads, tx = {**PARAMS, "table": rows}, lazy(wrap(optax.stateless(scale)))
    tx.update(grads, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="because of center_table: div by a number"):
        lazy(wrap(optax.stateless(center_table))).init(PARAMS)
    with pytest.raises(ValueError, match="because of center: .*test_separability.py:"):
        lazy(wrap(optax.stateless_with_tree_map(center))).init(PARAMS)


def test_extra_arguments_are_filled_in():
    def update(updates, state, params=None, *, loss, **extra_args):
        return jax.tree.map(lambda g: -loss * g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    assert is_row_separable(optax.chain(optax.clip(1.0), tx))
    assert is_row_separable(optax.polyak_sgd())
    assert is_row_separable(
        optax.chain(optax.adam(LR), optax.contrib.reduce_on_plateau())
    )


LABELS = {"table": "sparse", "kernel": "dense"}
TREE = {"table": jnp.zeros((50, 6)), "kernel": jnp.zeros((80, 6))}


def _partition(sparse, dense, labels=None):
    return optax.partition({"sparse": sparse, "dense": dense}, labels or LABELS)


@pytest.mark.slow
def test_judged_leaf_by_leaf():
    tx = _partition(optax.adam(LR), optax.lamb(LR))
    assert is_row_separable(tx, TREE)
    assert not is_row_separable(tx)  # needs this tree
    assert not is_row_separable(_partition(optax.lamb(LR), optax.lars(LR)), TREE)
    # The kernel has more rows, and the next part sees both.
    clipped = optax.chain(tx, optax.clip_by_global_norm(1.0))
    assert is_row_separable(clipped, TREE)
    # A dense gradient may be held back.
    assert is_row_separable(_partition(optax.adam(LR), optax.apply_every(2)), TREE)
    # Shapes are enough.
    shapes = jax.eval_shape(lambda: TREE)
    assert is_row_separable(tx, shapes)
    assert not is_row_separable(optax.lamb(LR), shapes)


@pytest.mark.slow
def test_the_partition_to_blame_is_the_tables():
    tx = _partition(optax.lamb(LR), optax.sm3(LR))
    params = {"table": jnp.zeros((90, 6)), "kernel": jnp.zeros((80, 6))}
    with pytest.raises(ValueError, match="because of scale_by_trust_ratio"):
        lazy(tx).init(params)


def test_each_tree_is_judged_by_itself():
    """The verdict on one is remembered, and does not apply to another."""
    is_bad: Any = lambda params: {k: k == "bad" for k in params}
    tx = lazy(optax.masked(optax.scale_by_trust_ratio(), is_bad))
    good, bad = {"good": jnp.ones((50, 6))}, {"bad": jnp.ones((50, 6))}
    tx.init(good)
    with pytest.raises(ValueError, match="because of scale_by_trust_ratio"):
        tx.init(bad)
    tx.init(good)


@jax.tree_util.register_pytree_node_class
class _Labelled:
    """A node of a tree whose static data cannot be hashed."""

    def __init__(self, table, labels):
        self.table, self.labels = table, labels

    def tree_flatten(self):
        return (self.table,), self.labels

    @classmethod
    def tree_unflatten(cls, labels, leaves):
        return cls(*leaves, labels)


@pytest.mark.usefixtures("loose_promotion")  # optax's adam
def test_trees_with_static_data_that_cannot_be_hashed():
    tx = lazy(optax.adam(LR))
    for labels in (["a"], ["a", "b"]):
        tree = _Labelled(jnp.ones((50, 6)), labels)
        state = tx.init(tree)
        assert state[0].mu.labels == labels
        grads = _Labelled(SelectedRows(jnp.array([3]), jnp.ones((1, 6)), 50), labels)
        updates, _ = tx.update(grads, state, tree)
        assert updates.labels == labels and isinstance(updates.table, SelectedRows)
    with pytest.raises(ValueError, match="because of scale_by_trust_ratio"):
        lazy(optax.lamb(LR)).init(tree)


@pytest.mark.slow
def test_rank_one_counts_only_where_nothing_has_more():
    # The bias could be lifted, the table could not: no one reads a bias by rows.
    tx = optax.partition(
        {"no": optax.lamb(LR), "yes": optax.adam(LR)}, {"table": "no", "bias": "yes"}
    )
    assert not is_row_separable(tx, PARAMS)
    assert is_row_separable(optax.adam(LR), {"bias": jnp.zeros(7)})
    assert not is_row_separable(optax.lamb(LR), {"bias": jnp.zeros(7)})


def _in_shard_map(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    spec = jax.P("x")

    def trace(f):
        x = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, spec))
        mapped = jax.shard_map(lambda x: f(x) * x, in_specs=spec, out_specs=spec)
        with jax.set_mesh(mesh):
            jax.jit(mapped)(x)
            f(x)

    return trace


TRACES = {
    "jit": lambda f: jax.jit(f)(jnp.ones(3)),
    "vmap": lambda f: jax.vmap(f)(jnp.ones((2, 3))),
    "grad": lambda f: jax.grad(f)(jnp.ones(3)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, jnp.ones((2, 3))),
    "auto": _in_shard_map(jax.sharding.AxisType.Auto),
    "explicit": _in_shard_map(jax.sharding.AxisType.Explicit),
}


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("trace", TRACES)
def test_judged_the_same_in_any_trace(trace):
    seen = set()

    def f(x):
        adam, lamb, sgd = optax.adam(2.0), optax.lamb(2.0), optax.sgd(2.0)
        exact = is_lazy_exact(sgd), is_lazy_exact(adam)
        seen.add((is_row_separable(adam), is_row_separable(lamb), *exact))
        return jnp.sum(x)

    TRACES[trace](f)
    assert seen == {(True, False, True, False)}


@pytest.mark.usefixtures("loose_promotion")
def test_random_keys_in_the_state_are_compared_in_any_trace():
    """Only the dense leaves get noise, which needs the tree."""
    noise = optax.add_noise(0.1, 0.5, key=jax.random.key(0))
    tx = lazy(optax.chain(optax.masked(noise, {"t": False, "w": True}), optax.sgd(LR)))
    params = {"t": jnp.ones((50, 6)), "w": jnp.ones(6)}
    assert jax.tree.structure(jax.jit(tx.init)(params)) == jax.tree.structure(
        tx.init(params)
    )


@pytest.mark.parametrize("promotion", ["standard", "strict"])
@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap])
def test_schedules_are_numbers_in_a_trace(wrap, promotion):
    """Otherwise its holder counts as made in the trace, which cannot be tested."""
    injected = optax.inject_hyperparams(optax.sgd)(optax.cosine_decay_schedule(LR, 9))
    tx = lazy(optax.chain(injected, optax.scale_by_trust_ratio()))
    with jax.numpy_dtype_promotion(promotion):
        with pytest.raises(ValueError, match="because of scale_by_trust_ratio"):
            wrap(tx.init)(jnp.ones((3, 50, 6)))


# ------------------------------------------------------------------ is_lazy_exact

EXACT = {
    "clip": lambda: optax.chain(optax.clip(0.5), optax.sgd(LR)),
    "adagrad": lambda: optax.adagrad(SCHEDULE, initial_accumulator_value=0.0),
    "clip_by_global_norm": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adagrad(LR)
    ),
    "rowwise_adagrad": lambda: rowwise_adagrad(LR),
}


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", EXACT)
def test_exact_means_equal_to_dense_training(name):
    tx = EXACT[name]()
    assert is_lazy_exact(tx)

    def train(tx, form):
        params, update = make_params(), jax.jit(tx.update)
        state = tx.init(params)
        for step in range(4):  # with duplicates, and other rows each time
            updates, state = update(form(make_grads(step)), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    found, want = train(lazy(tx), lambda g: g), train(tx, to_dense)
    assert_trees_close(found, want, rtol=2e-6, atol=1e-7)


def _state_moves(move):
    """It updates by the gradient alone, but its state goes on without one."""
    return _of_leaf(lambda g, w, s: (-g, move(s, g)), jnp.zeros_like)


NOT_EXACT = {
    "momentum": lambda: optax.sgd(LR, momentum=0.9),
    "adam": lambda: optax.adam(LR),
    "rmsprop": lambda: optax.rmsprop(LR),  # the second moment fades
    "decay": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(LR)),
    # Nothing moves at the first step, nor ever in a row that was not read.
    "later": lambda: _state_moves(lambda s, g: jnp.where(g != 0, g, 0.5 * s)),
    "reversed": lambda: _state_moves(lambda s, g: jnp.flip(s, axis=1) + g),
    "rotated": lambda: _state_moves(lambda s, g: jnp.roll(s, 1, axis=1) + g),
    "sorted": lambda: _state_moves(lambda s, g: jnp.sort(s, axis=1) + g),
    "rounded": lambda: _state_moves(
        lambda s, g: s.astype(jnp.bfloat16).astype(s.dtype) + g
    ),
    "as integers": lambda: _state_moves(
        lambda s, g: s.astype(jnp.int32).astype(s.dtype) + g
    ),
}


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", NOT_EXACT)
def test_not_exact(name):
    tx = NOT_EXACT[name]()
    assert is_row_separable(tx)
    assert not is_lazy_exact(tx)


def test_exact_for_a_tree():
    assert not is_lazy_exact(optax.lamb(LR))  # not by rows at all
    assert is_lazy_exact(_partition(optax.sgd(LR), optax.lamb(LR)), TREE)
    tree = jax.eval_shape(lambda: {**TREE, "none": None})
    assert is_lazy_exact(optax.sgd(LR), tree)
    assert not is_lazy_exact(optax.sgd(LR, momentum=0.9), tree)


# ------------------------------------------------------------------ the page

IN_PAGE = dict(
    re.findall(r"^\| `([\w.]+)` \| (.*) \|$", optax_table.PAGE.read_text(), re.M)
)


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # but there
@pytest.mark.parametrize("section", optax_table.SECTIONS, ids=lambda s: s[0])
def test_the_page_is_what_is_found(section):
    found = optax_table.rows([section])
    page = {name: IN_PAGE.get(name, "is not in it") for name in found}
    assert {k: v.rstrip(" |") for k, v in found.items()} == {
        k: v.rstrip(" |") for k, v in page.items()
    }, "make it again: python tests/optax_table.py"


def test_the_page_of_optimizers_agrees():
    short = optax_table.SHORT.read_text()
    shown = re.findall(r"^\| (`.*`) \| (\*\*\w+\*\*|as what .*?) \|", short, re.M)
    named = [
        (f"optax.{x}", kind) for cell, kind in shown for x in cell.split("`")[1::2]
    ]
    assert len(named) > 40
    for name, kind in named:
        assert IN_PAGE[name].startswith(kind.replace("they hold", "it holds")), name


def test_nothing_is_missing():
    made_with = re.search(r"\(optax ([\w.]+)\)", optax_table.PAGE.read_text())
    if made_with is None or made_with[1] != optax.__version__:
        pytest.skip("the page was made with another optax")
    missing = set(optax_table.makers()) - IN_PAGE.keys() - optax_table.NOT_ONE
    assert not missing
    assert "optax.adam" in optax_table.makers()
