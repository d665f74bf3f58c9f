"""lazy(tx) on rows equals tx on the whole table with the other rows put back.

Also inside of other transformations, under JAX's, on stacks of tables, and refused.
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
from helpers import (
    assert_lazy_step,
    assert_same_bits,
    assert_trees_close,
    compile_as_users_do,
    dense as dense_of,
    is_rows,
    slow_but,
    to_dense,
    with_ids_as,
)
from optimizers import (
    CLIPPED_LAST,
    LR,
    QUICK_SEPARABLE,
    SEPARABLE,
    D,
    V,
    make_grads,
    make_params,
    row_gradient,
)
from sparsejax.optim import global_norm, lazy


# optax itself relies on implicit promotion; one test is about our own code.
pytestmark = pytest.mark.usefixtures("loose_promotion")

ADAM = lazy(optax.adam(LR))  # one object, so that it is judged once


def ones(*shape):
    return np.ones(shape, np.float32)


def _steps(tx, count=None):
    @jax.jit
    def sparse(params, state, grads):
        if count is not None:
            count.append(1)
        updates, state = lifted.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def dense(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    lifted = lazy(tx)
    return lifted, sparse, dense


@pytest.mark.window
@pytest.mark.parametrize("name", slow_but(SEPARABLE, *QUICK_SEPARABLE))
def test_equals_the_dense_run_with_other_rows_put_back(name):
    tx, traces = SEPARABLE[name](), []
    lifted, sparse, dense = _steps(tx, traces)
    cube = name in ("adam", "adagrad", "named_chain", "user_written")
    params = make_params(cube=cube)
    state = lifted.init(params)
    assert_trees_close(state, tx.init(params), rtol=0, atol=0)
    for step in range(3):
        grads = make_grads(step, cube=cube)
        found = sparse(params, state, grads)
        assert_lazy_step(tx, dense, (params, state), grads, found)
        params, state = found
    assert len(traces) == 1
    assert all(jnp.all(jnp.isfinite(p)) for p in jax.tree.leaves(params))


@pytest.mark.slow
def test_a_clip_after_momentum_sees_the_rows_read():
    tx = lazy(CLIPPED_LAST["injected_adamw_clip"]())
    params = make_params()
    state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(3):
        updates, state = update(make_grads(step), state, params)
        assert np.isclose(global_norm(updates), 0.1, rtol=1e-5)


def test_empty_slots_take_no_part():
    """Neither in a later clip, nor as NaN if all numbers are zero."""
    values = np.full((4, D), np.nan, np.float32)
    values[0] = 1.0
    grads = sj.SelectedRows(jnp.array([3, V, V, V]), values, V)
    one = sj.SelectedRows(jnp.array([3]), ones(1, D), V)
    for inner in (
        optax.chain(optax.adagrad(LR), optax.clip_by_global_norm(0.01)),
        optax.adam(LR, eps=0.0),
    ):
        # With eps = 0 an empty slot is 0 / 0 inside: nothing of it may come out.
        tx = lazy(inner)

        @jax.jit
        def run(grads, one, params, tx=tx):
            found = []
            for g in (grads, one):
                updates, state = tx.update(g, tx.init(params), params)
                found.append((updates.to_dense(), state))
            return found

        assert_trees_close(*run(grads, one, ones(V, D)))


def test_counts_advance_without_rows():
    tx = ADAM
    params = {"table": ones(V, D), "bias": ones(D)}
    none = sj.SelectedRows(np.zeros((0,), np.int32), ones(0, D), V)
    grads = {"table": none, "bias": ones(D)}
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert updates["table"].capacity == 0
    assert optax.tree_utils.tree_get(state, "count") == 1
    assert_same_bits(optax.apply_updates(params, updates)["table"], params["table"])
    assert not np.allclose(updates["bias"], 0)


def test_a_table_read_as_a_whole():
    """More slots than rows, all rows touched: the dense update."""
    tx = optax.adam(LR)
    rows = np.arange(3 * V, dtype=np.int32) % V
    grads, params = sj.SelectedRows(rows, ones(3 * V, D), V), ones(V, D)

    @jax.jit
    def run(grads, params):
        state = tx.init(params)
        updates, new = ADAM.update(grads, state, params)
        assert updates.capacity == V
        expected = tx.update(grads.to_dense(), state, params)
        return (updates.to_dense(), new), expected

    assert_trees_close(*run(grads, params))


def test_dense_gradients_are_updated_densely():
    tx, params = optax.adam(LR), make_params()
    grads = jax.tree.map(lambda p: ones(*p.shape), params)
    rows = np.arange(V, dtype=np.int32)
    mixed = {**grads, "table": sj.SelectedRows(rows, grads["table"], V)}

    @jax.jit
    def run(grads, mixed, params):
        state = tx.init(params)
        found = [f.update(grads, state, params) for f in (ADAM, tx)]
        return found, ADAM.update(mixed, state, params)

    (updates, expected), (mixed_updates, state) = run(grads, mixed, params)
    assert_trees_close(updates, expected)
    assert_trees_close(to_dense(mixed_updates), updates[0])
    assert_trees_close(state, updates[1])


@pytest.mark.window
def test_clips_by_the_norm_of_merged_rows():
    tx = lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    grads = {
        "bias": jnp.array([4.0]),
        "table": sj.SelectedRows(jnp.array([1, 1, V]), jnp.array([1.0, 2.0, 9.0]), V),
    }
    params = {"bias": 0 * ones(1), "table": 0 * ones(V)}
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert np.isclose(np.asarray(updates["bias"])[0], -4 / 5)
    table = updates["table"]
    assert np.isclose(dense_of(table.rows, table.values, V)[1], -3 / 5)


@pytest.mark.parametrize("complex_leaf", ["table", "w"])
def test_complex_leaves_are_clipped_as_optax_does(complex_leaf):
    params = {"table": jnp.ones((40, 2)), "w": jnp.full((2, 3), 0.5)}
    params[complex_leaf] = params[complex_leaf] * (1 + 2j)
    ids = jnp.array([1, 7, 7])
    squares = lambda x: jnp.sum(jnp.abs(x) ** 2)
    loss = lambda p: squares(p["table"][ids]) + squares(p["w"])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    want, _ = tx.update(jax.grad(loss)(params), tx.init(params), params)
    want = optax.apply_updates(params, want)
    lifted = sj.optim.lazy(tx)
    grads = jax.jit(sj.grad(loss))(params)
    updates, _ = jax.jit(lifted.update)(grads, lifted.init(params), params)
    assert_trees_close(optax.apply_updates(params, updates), want, rtol=1e-6)


def test_bfloat16_duplicates_are_summed_in_float32():
    values = np.array([1.0, *([2**-9] * 16)], jnp.bfloat16)[:, None]
    grads = sj.SelectedRows(np.full(17, 2, np.int32), values, V)
    params = np.zeros((V, 1), jnp.bfloat16)
    tx = lazy(optax.sgd(1.0))

    @jax.jit
    def run(grads, params):
        updates, _ = tx.update(grads, tx.init(params), params)
        return updates, updates.to_dense()

    updates, got = run(grads, params)
    assert updates.dtype == got.dtype == jnp.bfloat16
    # One by one they would vanish.
    assert np.asarray(got)[2, 0] == -(1 + 2**-5)


@pytest.mark.window
def test_bfloat16_tables_keep_their_type():
    tx = optax.adamw(LR)
    params = make_params(jnp.bfloat16)
    lifted, sparse, dense = _steps(tx)
    state = lifted.init(params)
    grads = make_grads(0, jnp.bfloat16)
    new_params, new_state = sparse(params, state, grads)
    assert jax.tree.map(lambda x: x.dtype, new_state) == jax.tree.map(
        lambda x: x.dtype, state
    )
    found = new_params, new_state
    assert_lazy_step(tx, dense, (params, state), grads, found, rtol=2e-2)


def test_without_params():
    tx = lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LR)))
    params, grads = make_params(), make_grads(0)
    state = tx.init(params)
    with_params = tx.update(grads, state, params)
    assert_trees_close(to_dense(tx.update(grads, state)), to_dense(with_params))


@pytest.mark.window
def test_none_and_masked_leaves():
    params = {"table": ones(V, D), "frozen": ones(V, D), "none": None}
    grads = {"table": row_gradient(0, (D,)), "frozen": optax.MaskedNode(), "none": None}
    tx = lazy(
        optax.masked(optax.adam(LR), {"table": True, "frozen": False, "none": True})
    )
    state = tx.init(params)
    params["frozen"] = optax.MaskedNode()
    for weights in (params, None):
        updates, _ = tx.update(grads, state, weights)
        assert updates["frozen"] == optax.MaskedNode()
        assert updates["none"] is None
        assert is_rows(updates["table"])


def test_two_tables_of_one_height_and_a_square_one():
    """Shapes do not decide which state leaf follows which table."""
    params = {"a": ones(D, D), "b": ones(D, D), "c": ones(D)}
    tx = ADAM
    state = tx.init(params)
    one = lambda r: sj.SelectedRows(jnp.array([r]), ones(1, D), D)
    grads = {"a": one(1), "b": one(3), "c": ones(D)}
    _, new = jax.jit(tx.update)(grads, state, params)
    moved = lambda x: np.flatnonzero(np.any(np.atleast_2d(x) != 0, axis=-1)).tolist()
    assert moved(new[0].mu["a"]) == [1]
    assert moved(new[0].mu["b"]) == [3]
    assert np.all(new[0].mu["c"] != 0)


def test_extra_arguments_are_passed_on():
    tx = lazy(optax.polyak_sgd())
    params, grads = make_params(), make_grads(0)
    state = tx.init(params)
    updates, _ = tx.update(grads, state, params, value=1.0)
    expected, _ = optax.polyak_sgd().update(to_dense(grads), state, params, value=1.0)
    assert_trees_close(to_dense(updates), expected)
    # Transformations without extra arguments ignore them.
    tx = lazy(optax.sgd(LR))
    tx.update(grads, tx.init(params), params, value=1.0)


@pytest.mark.parametrize("name", ["adagrad", "clip_by_global_norm"])
def test_own_code_promotes_nothing(name):
    """Only optax runs with implicit promotion here."""
    tx = SEPARABLE[name]()

    def loosely(f):
        def g(*args):
            with (
                jax.numpy_dtype_promotion("standard"),
                jax.numpy_rank_promotion("allow"),
            ):
                return f(*args)

        return g

    tx = lazy(optax.GradientTransformation(loosely(tx.init), loosely(tx.update)))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for dtype in (jnp.float32, jnp.bfloat16):
            params = make_params(dtype)

            @jax.jit
            def step(grads, state, params):
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            # All of it is Python: nothing more could raise in XLA.
            step.lower(make_grads(0, dtype), tx.init(params), params)


def test_int64_ids(x64):
    params = {"table": jnp.asarray(ones(V, D))}
    rows = sj.SelectedRows(jnp.array([3, V, 3]), jnp.asarray(ones(3, D)), V)
    assert rows.rows.dtype == jnp.int64
    assert rows.dtype == jnp.float32
    state = ADAM.init(params)
    updates, state = jax.jit(ADAM.update)({"table": rows}, state, params)
    assert updates["table"].rows.dtype == jnp.int64
    assert updates["table"].dtype == state[0].mu["table"].dtype == jnp.float32


def test_unsigned_row_ids():
    @jax.jit
    def step(rows, table):
        grad = sj.SelectedRows(rows, ones(3, 2), 9)
        updates, _ = ADAM.update(grad, ADAM.init(table), table)
        return optax.apply_updates(table, updates)

    unsigned, signed = np.array([4, 2**32 - 1, 0], np.uint32), np.array([4, -1, 0])
    updated = np.asarray(step(unsigned, ones(9, 2)))
    np.testing.assert_array_equal(updated, step(signed, ones(9, 2)))
    assert (updated != 1).any(axis=1).tolist() == [k in (0, 4) for k in range(9)]


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
    "adam_after": lambda tx: optax.chain(tx, optax.scale_by_adam()),
    "lamb_after": lambda tx: optax.chain(tx, optax.scale_by_trust_ratio()),
    "clip_before": lambda tx: optax.chain(optax.clip(1.0), tx),
    "noise": lambda tx: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), tx),
    "another": lambda tx: optax.partition(
        {"a": tx, "b": optax.adam(LR)}, {"bias": "a", "table": "b"}
    ),
    "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
}


@pytest.mark.parametrize("outer", OUTSIDE.values(), ids=OUTSIDE)
def test_errors_of_transformations_outside_of_lazy_say_what_to_write(outer):
    """JAX raises them, in the middle of optax."""
    tx, params = outer(lazy(optax.sgd(LR))), make_params()
    grads = make_grads(0)
    if "lookahead" in str(tx.update):
        params = optax.LookaheadParams.init_synced(params)
    with pytest.raises((TypeError, ValueError), match="lazy"):
        tx.update(grads, tx.init(params), params)


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


# ------------------------------------------------------------------ stacks [K, H, W]

K, H, W = 3, 29, 4
IDS = np.array([[3, 1, 3], [28, 1, 0], [7, 7, 7]])
TOUCHED = np.zeros((K, H), bool)
TOUCHED[np.arange(K)[:, None], IDS] = True


def stacked_params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "stack": jax.random.normal(keys[0], (K, H, W)),
        "w": jax.random.normal(keys[1], (W,)),
    }


def stacked_loss(params, ids=IDS):
    rows = jax.vmap(lambda table, ids: table[ids])(params["stack"], ids)
    return jnp.sum(jnp.sin(rows @ params["w"]))


def _flat(tree):
    """The same parameters, gradients or state with one table in place of the stack."""

    def one(x):
        if isinstance(x, sj.SelectedRows):
            return x.unstacked()
        return x.reshape(K * H, *x.shape[2:]) if x.shape[:2] == (K, H) else x

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, sj.SelectedRows))


def stacked_step(tx, grad):
    def step(params, state):
        updates, state = tx.update(grad(stacked_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step


def train_stack(tx, grad, jitted=True, steps=2):
    params = stacked_params()
    step, state = stacked_step(tx, grad), tx.init(params)
    step = jax.jit(step) if jitted else step
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


OPTIMIZERS = {
    "adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)),
    "sgd": optax.sgd(0.1),
    "adagrad": optax.adagrad(0.1),
    "masked": optax.partition(
        {"a": optax.rmsprop(0.1), "b": optax.lamb(0.1)}, {"stack": "a", "w": "b"}
    ),
}
EXACT = ("sgd", "adagrad")  # these do not move a row without a gradient


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n == "adam" else pytest.mark.slow)
        for n in OPTIMIZERS
    ],
)
def test_a_step_of_a_stack_is_one_of_one_table(name):
    """Bit for bit; rows that were not read keep theirs, and so does their state."""
    tx = OPTIMIZERS[name]
    lifted, old = lazy(tx), stacked_params()

    def on_one_table(loss):
        def grad(params):
            g = sj.grad(loss)(params)
            assert g["stack"].stack == (K,)
            return _flat(g)

        return grad

    params, state = train_stack(lifted, sj.grad)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(state) == shapes(tx.init(old))

    flat, flat_state = _flat(old), lifted.init(_flat(old))

    @jax.jit
    def flat_step(flat, state):
        stacked = {**flat, "stack": flat["stack"].reshape(K, H, W)}
        updates, state = lifted.update(on_one_table(stacked_loss)(stacked), state, flat)
        return optax.apply_updates(flat, updates), state

    for _ in range(2):
        flat, flat_state = flat_step(flat, flat_state)
    jax.tree.map(assert_same_bits, _flat(params), flat)
    jax.tree.map(assert_same_bits, _flat(state), flat_state)

    assert_same_bits(params["stack"][~TOUCHED], old["stack"][~TOUCHED])
    assert np.all(params["stack"][TOUCHED] != old["stack"][TOUCHED])
    before, after = jax.tree.leaves(tx.init(old)), jax.tree.leaves(state)
    for a, b in zip(before, after):
        if a.shape == (K, H, W):
            assert_same_bits(b[~TOUCHED], a[~TOUCHED])

    dense, dense_state = train_stack(tx, jax.grad, steps=2 if name in EXACT else 1)
    if name not in EXACT:
        params, state = train_stack(lifted, sj.grad, steps=1)
    keep = (lambda x: x) if name in EXACT else (lambda x: x[TOUCHED])
    assert_trees_close(keep(params["stack"]), keep(dense["stack"]))
    assert_trees_close(params["w"], dense["w"])
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(dense_state)):
        assert_trees_close(
            *((keep(x) if x.shape == (K, H, W) else x) for x in (a, b)), atol=1e-6
        )


@pytest.mark.slow
def test_stack_outside_of_jit_and_without_params():
    tx = lazy(OPTIMIZERS["adam"])
    assert_trees_close(train_stack(tx, sj.grad, jitted=False), train_stack(tx, sj.grad))
    params = stacked_params()
    tx = lazy(optax.adam(0.1))
    g = sj.grad(stacked_loss)(params)
    updates, _ = tx.update(g, tx.init(params))
    assert updates["stack"].shape == (K, H, W)
    dense, _ = optax.adam(0.1).update(jax.grad(stacked_loss)(params), tx.init(params))
    assert_trees_close(updates["stack"].to_dense(), dense["stack"], atol=1e-6)


@pytest.mark.slow
def test_a_step_of_a_stack_is_in_place():
    shape = (4, 50_000, 16)
    tx = lazy(optax.adam(0.1))

    def step(stack, state, ids):
        loss = lambda t: jnp.sum(jnp.sin(jax.vmap(lambda one, i: one[i])(t, ids)))
        updates, state = tx.update(sj.grad(loss)(stack), state, stack)
        return optax.apply_updates(stack, updates), state

    stack = jnp.ones(shape)
    args = stack, tx.init(stack), jnp.zeros((4, 64), int)
    compiled = compile_as_users_do(jax.jit(step, donate_argnums=(0, 1)).lower(*args))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    assert memory.alias_size_in_bytes >= 3 * stack.nbytes  # with both moments
    assert memory.temp_size_in_bytes < stack.nbytes / 8
    sizes = ("[4,50000,16]", "[200000,16]")
    for line in text.splitlines():
        made = line.split("(")[0]
        assert " copy(" not in line or not any(size in made for size in sizes), line


@pytest.mark.slow
def test_refused_for_a_stack():
    """A part that treats the first axis as the rows would see whole tables."""
    params = stacked_params()
    g = sj.grad(stacked_loss)(params)
    for tx, named in (
        (sj.optim.rowwise_adagrad(0.1), "sum_of_squares"),
        (optax.chain(optax.centralize(), optax.sgd(0.1)), "centralize"),
    ):
        lifted = lazy(tx)
        state = lifted.init(params)
        with pytest.raises(ValueError, match=f"a stack of tables.*{named}"):
            lifted.update(g, state, params)
        flat = _flat(params)
        lifted.update(_flat(g), lifted.init(flat), flat)
    with pytest.raises(ValueError, match="does not match these gradients"):
        tx = lazy(optax.adam(0.1))
        tx.update(g, tx.init(_flat(params)), params)


@pytest.mark.slow
def test_exact_takes_dense_gradients_of_a_stack():
    tx = sj.optim.exact(optax.sgd(0.1, momentum=0.9))
    params = stacked_params()
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"grads\['stack'\] has rows of a stack"):
        tx.update(sj.grad(stacked_loss)(params), state, params)
    step = sj.optim.exact_value_and_grad(stacked_loss, tx)
    (_, grads), params, state = step(params, state)
    assert_trees_close(grads, jax.grad(stacked_loss)(params))
    tx.update(grads, state, params)


@pytest.mark.slow
def test_global_norm_of_a_stack():
    g = sj.grad(stacked_loss)(stacked_params())
    assert g["stack"].capacity == IDS.size
    dense = jax.grad(stacked_loss)(stacked_params())
    assert_trees_close(sj.optim.global_norm(g), optax.tree.norm(dense))


@pytest.mark.slow
def test_accumulated_stack():
    tx = sj.optim.accumulate(lazy(optax.sgd(0.1)), 2, capacity=16, stacked=True)
    params = dense = stacked_params()
    state = tx.init(params)
    assert state.acc_grads["stack"].shape == (16, W)
    reference = optax.MultiSteps(optax.sgd(0.1), 2)
    dense_state = reference.init(dense)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, state, ids):
        updates, state = tx.update(sj.grad(stacked_loss)(params, ids), state, params)
        return optax.apply_updates(params, updates), state

    for k in range(4):
        params, state = step(params, state, IDS + k % 2)
        updates, dense_state = reference.update(
            jax.grad(stacked_loss)(dense, IDS + k % 2), dense_state, dense
        )
        dense = optax.apply_updates(dense, updates)
    assert_trees_close(params, dense, atol=1e-6)
    assert state.overflow == 0
    # A dense gradient goes into the same kind of slots if there are enough.
    tx = sj.optim.accumulate(lazy(optax.sgd(1.0)), 1, capacity=K * H, stacked=True)
    grads = jax.grad(stacked_loss)(params)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert_trees_close(updates, jax.tree.map(jnp.negative, grads))


@pytest.mark.slow
def test_rounding_and_loss_scale_of_a_stack():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), stacked_params())
    tx = sj.optim.rounding(lazy(optax.sgd(0.1)), master=True)
    flat = _flat(params)
    g = sj.grad(stacked_loss)(params)
    updates, state = tx.update(g, tx.init(params), params)
    flat_updates, flat_state = tx.update(_flat(g), tx.init(flat), flat)
    new = optax.apply_updates(params, updates)
    jax.tree.map(assert_same_bits, _flat(new), optax.apply_updates(flat, flat_updates))
    jax.tree.map(assert_same_bits, _flat(state.master), flat_state.master)

    params = stacked_params()
    tx = sj.optim.dynamic_loss_scale(lazy(optax.sgd(0.1)), 4.0)
    g = sj.grad(lambda p: 4.0 * stacked_loss(p))(params)
    updates, _ = tx.update(g, tx.init(params), params)
    want = jax.tree.map(lambda x: -0.1 * x, jax.grad(stacked_loss)(params))
    assert_trees_close(updates["stack"].to_dense(), want["stack"], atol=1e-6)


# ------------------------------------------------------------------ refusals

CAUGHT_UP = sj.optim.exact(optax.sgd(LR, momentum=0.9))  # one, so that it is read once
NESTED = {"bias": jnp.zeros(D), "emb": {"table": jnp.ones((V, D))}}


def nested_grads(rows=None):
    if rows is None:
        rows = sj.SelectedRows(jnp.array([1, 2]), jnp.ones((2, D)), V)
    return {"bias": jnp.ones(D), "emb": {"table": rows}}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.partition({"t": tx, "d": optax.sgd(LR)}, lambda p: "t"),
        lambda tx: optax.chain(optax.masked(optax.chain(tx, optax.clip(1.0)), True)),
    ],
)
def test_exact_is_not_lifted(wrap):
    """It would train on, but wrongly: nothing would catch rows up."""
    tx = wrap(CAUGHT_UP)
    with pytest.raises(ValueError, match="caught up"):
        lazy(tx).init(NESTED)
    assert not sj.optim.is_row_separable(tx)
    assert not sj.optim.is_row_separable(tx, NESTED)


@pytest.mark.parametrize(
    "change",
    [
        functools.partial(with_ids_as, np.float32),
        functools.partial(with_ids_as, jnp.bfloat16),
        lambda g: jax.tree.map(lambda x: optax.MaskedNode(), g),
    ],
)
def test_changed_ids(change):
    """By code that rebuilds trees; `jax.tree.map` cannot (rows/test_row_ids.py)."""
    changed = nested_grads(change(nested_grads()["emb"]["table"]))
    for update in (ADAM.update, jax.jit(ADAM.update)):
        with pytest.raises(TypeError, match="ids"):
            update(changed, ADAM.init(NESTED), NESTED)


LABELS = {"kernel": "dense", "table": "sparse"}


@pytest.mark.slow
def test_a_leaf_that_cannot_be_lifted():
    transforms = {"sparse": optax.adam(LR), "dense": optax.lamb(LR)}
    tx = lazy(optax.partition(transforms, LABELS))
    params = {"kernel": jnp.ones((9, 4)), "table": jnp.ones((V, D))}
    state = tx.init(params)
    rows = lambda p: sj.SelectedRows(jnp.array([1]), jnp.ones((1, p.shape[1])), len(p))
    good = {"kernel": jnp.ones((9, 4)), "table": rows(params["table"])}
    tx.update(good, state, params)
    message = r"grads\['kernel'\], which has a SelectedRows gradient.*trust_ratio.*lamb"
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=message):
            update({**good, "kernel": rows(params["kernel"])}, state, params)


def test_a_state_that_follows_in_another_way():
    """Rows in the second axis, and a structure that depends on their number."""

    def transposed(params):
        return jax.tree.map(lambda p: jnp.zeros(p.shape[::-1]), params)

    def one_leaf_a_row(params):
        return [jnp.zeros(D) for _ in range(params["table"].shape[0])]

    update = lambda updates, state, params=None: (updates, state)
    for init, why in [
        (transposed, r"state leaf \['table'\] of shape .* does not have one row per"),
        (
            one_leaf_a_row,
            "the structure of its state depends on the number of rows",
        ),
    ]:
        tx = lazy(optax.GradientTransformation(init, update))
        with pytest.raises(ValueError, match=why):
            tx.init({"table": jnp.ones((V, D))})


def test_refused_under_tracing_too():
    tx = lazy(optax.lamb(LR))
    for init in (jax.jit(tx.init), lambda p: jax.eval_shape(tx.init, p)):
        with pytest.raises(ValueError, match="scale_by_trust_ratio"):
            init(NESTED)
    with pytest.raises(ValueError, match="optax.partition"):
        tx.update(nested_grads(), optax.lamb(LR).init(NESTED), NESTED)


# ------------------------------------------------------------------ check=False


def scale_by_table(updates, state, params=None, *, rates):
    """Row by row, but it cannot be tried: `rates` is a dict, not a number."""
    del params
    new = jax.tree.map(lambda g, s: 0.9 * s + g, updates, state)
    step = {
        "bias": -new["bias"],
        "emb": {"table": -rates["table"] * new["emb"]["table"]},
    }
    return step, new


def momentum_by_table():
    init = lambda params: jax.tree.map(jnp.zeros_like, params)
    return optax.GradientTransformationExtraArgs(init, scale_by_table)


@pytest.mark.slow
def test_a_wrong_refusal_can_be_overruled():
    tx = optax.chain(optax.clip_by_global_norm(1.0), momentum_by_table())
    assert not sj.optim.is_row_separable(tx, NESTED)
    with pytest.raises(
        ValueError, match=r"scale_by_table: it cannot run.*lazy\(tx, check=False\)"
    ):
        lazy(tx).init(NESTED)

    lifted, rates = lazy(tx, check=False), {"table": 0.5}
    state, params = lifted.init(NESTED), NESTED
    dense_state, dense = tx.init(NESTED), NESTED
    update = jax.jit(lifted.update)
    rows = sj.SelectedRows(jnp.array([7, 2, 7, V]), jnp.ones((4, D)), V)
    for _ in range(3):
        grads = nested_grads(rows)
        updates, state = update(grads, state, params, rates=rates)
        assert isinstance(updates["emb"]["table"], sj.SelectedRows)
        params = optax.apply_updates(params, updates)
        grads = nested_grads(rows.to_dense())
        updates, dense_state = tx.update(grads, dense_state, dense, rates=rates)
        dense = optax.apply_updates(dense, updates)
    assert jnp.allclose(params["emb"]["table"], dense["emb"]["table"], rtol=1e-6)
    assert jnp.allclose(params["bias"], dense["bias"], rtol=1e-6)
    untouched = jnp.delete(params["emb"]["table"], jnp.array([2, 7]), axis=0)
    assert jnp.all(untouched == 1)


@pytest.mark.slow
def test_the_way_out_is_named_only_where_it_is_one():
    """Not for optax's own: the verdicts on these are known to be right."""
    table = {"table": jnp.ones((V, D))}
    mean = lambda g, s, p=None: (jax.tree.map(lambda x: x - jnp.mean(x, 0), g), s)
    transposed = lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape[::-1]), params)
    for tx, is_one in [
        (optax.GradientTransformation(lambda p: (), mean), True),
        (optax.stateless(lambda g, p: mean(g, ())[0]), True),
        (optax.GradientTransformation(transposed, lambda g, s, p=None: (g, s)), False),
        (optax.lamb(LR), False),
        (optax.chain(optax.adam(LR), optax.adaptive_grad_clip(0.1)), False),
        (optax.MultiSteps(optax.adam(LR), 2), False),
    ]:
        with pytest.raises(ValueError, match="cannot be lifted") as error:
            lazy(tx).init(table)
        assert ("check=False" in str(error.value)) == is_one


def test_nothing_overrules_what_cannot_be_done():
    """exact is not lifted, and state without a row for each row cannot be cut."""
    tx = lazy(sj.optim.exact(optax.sgd(LR)), check=False)
    with pytest.raises(ValueError, match="caught up"):
        tx.update(nested_grads(), tx.init(NESTED), NESTED)
    transposed = lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape[::-1]), params)
    tx = optax.GradientTransformation(transposed, lambda g, s, p=None: (g, s))
    tx, rows = lazy(tx, check=False), nested_grads()["emb"]["table"]
    table = jnp.ones((V, D))
    with pytest.raises(ValueError, match="grads, which has.* one row per row"):
        tx.update(rows, tx.init(table), table)
