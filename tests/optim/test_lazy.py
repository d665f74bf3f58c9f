"""lazy(tx) on rows equals tx on the whole table with the other rows put back."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

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
    dense as dense_of,
    is_rows,
    slow_but,
    to_dense,
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


# optax itself relies on implicit promotion; the last test is about our own code.
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
