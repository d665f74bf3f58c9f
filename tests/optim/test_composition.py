"""lazy inside of other transformations, and under JAX's."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_trees_close, is_rows, to_dense
from optimizers import LR, D, V, make_grads, make_params, row_gradient
from sparsejax.optim import lazy


pytestmark = pytest.mark.usefixtures("loose_promotion")

ADAM = lazy(optax.adam(LR))


# ------------------------------------------------------------------ composition


def test_chains_of_lazies():
    clip, adam = optax.clip_by_global_norm(0.1), optax.adam(LR)
    chained = optax.chain(lazy(clip), lazy(adam))
    whole = lazy(optax.chain(clip, adam))
    params, grads = make_params(), make_grads(0)

    @jax.jit
    def run(grads, params):
        found = [tx.update(grads, tx.init(params), params) for tx in (chained, whole)]
        return [(to_dense(updates), state) for updates, state in found]

    assert_trees_close(*run(grads, params))


@pytest.mark.slow
@pytest.mark.parametrize(
    "outer",
    [
        lambda tx: optax.chain(tx),
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: optax.partition(
            {"rows": tx, "rest": optax.sgd(LR)},
            {"bias": "rest", "table": "rows"},
        ),
        lambda tx: optax.masked(tx, True),
        lambda tx: lazy(tx),
        lambda tx: optax.inject_hyperparams(lambda lr: lazy(optax.adam(lr)))(LR),
        lambda tx: optax.conditionally_transform(tx, lambda step, **_: step < 1),
        lambda tx: optax.conditionally_mask(tx, lambda step, **_: step < 1),
    ],
    ids="chain apply_if_finite partition masked lazy inject if_step mask_if".split(),
)
def test_lazy_inside_of_other_transformations(outer):
    outside, inside = outer(lazy(optax.adam(LR))), outer(optax.adam(LR))
    # apply_if_finite looks at every number, including the numbers of empty slots.
    params, grads = make_params(), jax.tree.map(jnp.nan_to_num, make_grads(0))
    state = outside.init(params)
    updates, new_state = jax.jit(outside.update)(grads, state, params)
    dense = to_dense(grads)
    expected, _ = jax.jit(inside.update)(dense, inside.init(params), params)
    # One step from a fresh state: untouched rows do not move in the dense run either.
    for name in params:
        got = updates[name].to_dense() if is_rows(updates[name]) else updates[name]
        assert_trees_close(got, expected[name])
    assert jax.tree.structure(new_state) == jax.tree.structure(state)


OUTSIDE = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "apply_every": lambda tx: optax.chain(tx, optax.apply_every(2)),
    "decay_after": lambda tx: optax.chain(tx, optax.add_decayed_weights(0.1)),
    "decay_before": lambda tx: optax.chain(optax.add_decayed_weights(0.1), tx),
    "named": lambda tx: optax.named_chain(("a", tx), ("b", optax.trace(0.9))),
    "adam_after": lambda tx: optax.chain(tx, optax.scale_by_adam()),
    "lamb_after": lambda tx: optax.chain(tx, optax.scale_by_trust_ratio()),
    "scale_after": lambda tx: optax.chain(tx, optax.scale(-1.0)),
    "clip_after": lambda tx: optax.chain(tx, optax.clip(1.0)),
    "clip_before": lambda tx: optax.chain(optax.clip(1.0), tx),
    "schedule": lambda tx: optax.chain(tx, optax.scale_by_schedule(lambda _: 1.0)),
    "noise": lambda tx: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), tx),
    "non_negative": lambda tx: optax.chain(tx, optax.keep_params_nonnegative()),
    "accumulate": lambda tx: sj.optim.accumulate(
        optax.chain(tx, optax.trace(0.9)), 2, 9
    ),
    "another": lambda tx: optax.partition(
        {"a": tx, "b": optax.adam(LR)}, {"bias": "a", "table": "b"}
    ),
    "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
}


@pytest.mark.parametrize("outer", OUTSIDE.values(), ids=OUTSIDE)
def test_errors_of_transformations_outside_of_lazy_say_what_to_write(outer):
    """JAX raises them, in the middle of optax."""
    tx, params = outer(lazy(optax.sgd(LR))), make_params()
    grads = {name: g for name, g in make_grads(0).items() if name in params}
    if "lookahead" in str(tx.update):
        params = optax.LookaheadParams.init_synced(params)
    state = tx.init(params)
    write = r"sparsejax\.optim\.lazy\(optax\.chain\(\.\.\.\)"
    if isinstance(tx, optax.MultiSteps):
        write += r".*sparsejax\.optim\.accumulate\(lazy\(tx\), k, capacity\)"
    with pytest.raises((TypeError, ValueError), match=write):
        tx.update(grads, state, params)
    assert "optim" not in repr(sj.SelectedRows)


def test_partition_runs_tables_and_dense_leaves_differently():
    labels = {"bias": "dense", "cube": "dense", "table": "sparse"}
    tx = optax.partition({"sparse": optax.adagrad(LR), "dense": optax.lamb(LR)}, labels)
    params, grads = make_params(cube=True), make_grads(0, cube=True)
    grads["cube"] = grads["cube"].to_dense()
    lifted = lazy(tx)
    state = lifted.init(params)

    @jax.jit
    def run(grads, state, params):
        updates, new = lifted.update(grads, state, params)
        return (to_dense(updates), new), tx.update(to_dense(grads), state, params)

    assert_trees_close(*run(grads, state, params))


def python_numbers():
    """State that is numbers of Python's, as optax's `is_initial_step`."""

    def update(updates, state, params=None):
        del state, params
        return jax.tree.map(jnp.negative, updates), {"first": False, "scale": 2.0}

    init = lambda params: {"first": True, "scale": 1.0}
    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: sj.optim.accumulate(tx, 2, {"bias": None, "table": 9}),
        sj.optim.dynamic_loss_scale,
        lambda tx: sj.optim.rounding(tx, 0),
    ],
    ids=["accumulate", "dynamic_loss_scale", "rounding"],
)
def test_state_of_python_numbers(wrap):
    tx, params = wrap(lazy(python_numbers())), make_params()

    @jax.jit
    def step(state, grads):
        return tx.update(grads, state, params)[1]

    state, grads = tx.init(params), jax.tree.map(jnp.nan_to_num, make_grads(0))
    for _ in range(2):
        state = step(state, grads)
    assert not optax.tree_utils.tree_get(state, "first")


# ------------------------------------------------------------------ transformations


@pytest.mark.slow
def test_init_is_the_transformations_own():
    tx, params = optax.adam(LR), make_params()
    expected = tx.init(params)
    assert_trees_close(jax.jit(lazy(tx).init)(params), expected)
    shapes = jax.eval_shape(lazy(tx).init, params)
    assert shapes == jax.eval_shape(tx.init, params)
    state = lazy(tx).init(params)
    assert optax.tree_utils.tree_get(state, "mu")["table"].shape == (V, D)
    state = optax.tree_utils.tree_set(state, count=jnp.asarray(7, jnp.int32))
    _, state = lazy(tx).update(make_grads(0), state, params)
    assert optax.tree_utils.tree_get(state, "count") == 8


def test_tree_map_params():
    tx = ADAM
    state = tx.init(make_params())
    doubled = optax.tree_utils.tree_map_params(tx, lambda x: x + 1, state)
    assert np.all(doubled[0].mu["table"] == 1) and doubled[0].count == 0


def test_shapes_are_known_before_data():
    tx, params = ADAM, make_params()
    update = lambda g, s, p: tx.update(g, s, p)
    updates, state = jax.eval_shape(update, make_grads(0), tx.init(params), params)
    assert is_rows(updates["table"])
    assert updates["table"].shape == (V, D) and updates["table"].capacity == 9
    assert isinstance(updates["table"].values, jax.ShapeDtypeStruct)
    assert state[0].mu["table"].shape == (V, D)


def test_in_scan():
    tx, params = ADAM, make_params()
    grads = [make_grads(step) for step in range(3)]
    state = tx.init(params)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *grads)

    def body(carry, grads):
        updates, state = tx.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    scanned, _ = jax.jit(lambda c, g: jax.lax.scan(body, c, g))(
        (params, state), stacked
    )
    carry, step = (params, state), jax.jit(body)
    for g in grads:
        carry, _ = step(carry, g)
    assert_trees_close(scanned, carry)


def test_under_vmap():
    """Several models at once, each with rows of its own."""
    tx, params = ADAM, make_params()["table"]
    grads = [row_gradient(seed, (D,)) for seed in range(3)]
    state = tx.init(params)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *grads)
    step = lambda g: optax.apply_updates(params, tx.update(g, state, params)[0])
    together, alone = jax.jit(jax.vmap(step))(stacked), jax.jit(step)
    for one, g in zip(np.asarray(together), grads, strict=True):
        assert_trees_close(one, alone(g))


@pytest.mark.slow
def test_numpy_state_from_a_checkpoint():
    tx, params, grads = ADAM, make_params(), make_grads(0)
    state = tx.init(params)
    restored = jax.tree.map(np.asarray, state)
    expected = tx.update(grads, state, params)
    got = tx.update(grads, restored, jax.tree.map(np.asarray, params))
    assert_trees_close(to_dense(got), to_dense(expected))


def test_learning_rate_may_change_between_transformations():
    params, grads = make_params(), make_grads(0)
    state = lazy(optax.adam(LR)).init(params)
    _, state = lazy(optax.adam(LR)).update(grads, state, params)
    updates, _ = lazy(optax.adam(LR / 2)).update(grads, state, params)
    expected, _ = lazy(optax.adam(LR)).update(grads, state, params)
    assert_trees_close(to_dense(updates)["table"] * 2, to_dense(expected)["table"])


@pytest.mark.slow
@pytest.mark.parametrize("make", [jax.disable_jit, jax.checking_leaks, jax.debug_nans])
def test_under_jaxs_settings(make):
    """A fresh transformation each time, so that the judge runs under them."""
    tx, params = lazy(optax.rmsprop(LR, eps=0.0)), jnp.ones((V, D))
    values = jnp.asarray(np.ones((3, D), np.float32))
    grads = sj.SelectedRows(jnp.array([1, 1, V]), values, V)
    with make(True) if make is not jax.checking_leaks else make():
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        assert updates.num_rows() == 1 and jnp.all(updates.to_dense()[1] < 0)


def test_a_table_without_rows():
    ones = np.ones((2, D), np.float32)
    params = {"table": ones[:0], "bias": ones[0]}
    rows = sj.SelectedRows(jnp.array([0, 1]), ones, 0)
    grads = {"table": rows, "bias": ones[0]}
    updates, state = jax.jit(ADAM.update)(grads, ADAM.init(params), params)
    assert updates["table"].shape == (0, D) and state[0].count == 1
