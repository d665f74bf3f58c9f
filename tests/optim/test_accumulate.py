"""accumulate: one step on the mean of k gradients, held by rows."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_same_bits, assert_trees_close, is_rows, to_dense
from optimizers import LR, D, V, make_grads, make_params, row_gradient, step
from sparsejax.optim import accumulate, lazy


pytestmark = pytest.mark.usefixtures("loose_promotion")

# One object each, so that it is judged once.
ADAM, SGD = lazy(optax.adam(LR)), lazy(optax.sgd(1.0))


def _rows(*rows, values=1.0):
    """A gradient of these rows and an empty slot, in a table of one column."""
    values = np.full((len(rows) + 1, 1), values, np.float32)
    values[-1] = np.nan
    return sj.SelectedRows(np.array([*rows, V]), values, V)


@jax.jit
def step_on_the_mean(params, state, grads):
    """One step of Adam on the mean of gradients of `make_grads`."""
    k, table = len(grads), sj.concatenate([g["table"] for g in grads])
    mean = {"bias": sum(g["bias"] for g in grads) / k, "table": table / k}
    return step(ADAM, params, state, mean)


@pytest.mark.parametrize(
    "capacity", [20, {"table": 20, "bias": None}, {"table": V, "bias": D}]
)
def test_equals_one_large_batch(capacity):
    tx, k = accumulate(ADAM, 3, capacity), 3
    update = jax.jit(chex.assert_max_traces(tx.update, 1))
    params = expected = make_params()
    state, inner = tx.init(params), ADAM.init(params)
    for first in range(0, 9, k):
        grads = [make_grads(first + i) for i in range(k)]
        for i, g in enumerate(grads):
            old = params, state.inner_opt_state
            updates, state = update(g, state, params)
            params = optax.apply_updates(params, updates)
            if i < k - 1:  # nothing has moved, not by a bit
                assert updates["table"].num_rows() == 0
                jax.tree.map(assert_same_bits, (params, state.inner_opt_state), old)
        expected, inner = step_on_the_mean(expected, inner, grads)
        assert_trees_close((params, state.inner_opt_state), (expected, inner))
    assert state.mini_step == state.overflow == 0 and state.gradient_step == 3


def test_k_may_follow_a_schedule():
    tx = accumulate(SGD, lambda step: jnp.where(step == 0, 1, 2), 4)
    params = np.zeros((V, 1), np.float32)
    state, moved, run = tx.init(params), [], jax.jit(functools.partial(step, tx))
    for row in range(5):
        params, state = run(params, state, _rows(row))
        moved.append(np.asarray(params)[:5, 0].tolist())
    assert moved[0] == [-1, 0, 0, 0, 0] == moved[1]
    assert moved[2] == [-1, -0.5, -0.5, 0, 0] == moved[3]
    assert moved[4] == [-1, -0.5, -0.5, -0.5, -0.5]


def test_sums_are_held_in_float32():
    """In bfloat16, 1 + 2^-9 is 1, and 2^-9 a hundred times over is not seen."""
    tx = accumulate(SGD, 4, 8)
    zeros = lambda *shape: np.zeros(shape, jnp.bfloat16)
    params = {"table": zeros(V, 1), "b": zeros(1)}
    state, update = tx.init(params), jax.jit(tx.update)
    for value in (1.0, 2**-9, 2**-9, 2**-8):
        value = np.full((1, 1), value, jnp.bfloat16)
        grads = {"table": sj.SelectedRows(np.array([2]), value, V), "b": value[0]}
        updates, state = update(grads, state, params)
    row = np.asarray(updates["table"].values)[0]
    assert row == updates["b"] == -(1 + 2**-7) / 4


def test_dense_and_sparse_gradients_of_one_leaf():
    """A leaf with a slot for each row takes both."""
    tx, params = accumulate(SGD, 3, V), np.zeros((V, D), np.float32)
    sparse, dense = row_gradient(0, (D,)), np.ones((V, D), np.float32)
    expected = -(2 * np.asarray(sparse.to_dense()) + dense) / 3
    update = jax.jit(tx.update)
    for order in ((dense, sparse, sparse), (sparse, sparse, dense)):
        state = tx.init(params)
        for grad in order:
            updates, state = update(grad, state, params)
        assert is_rows(updates) == is_rows(order[-1])
        assert_trees_close(to_dense(updates), expected)


def test_overflow_is_counted_and_rows_held_are_right():
    tx, params = accumulate(SGD, 2, 3), np.zeros((V, 1), np.float32)
    state, update = tx.init(params), jax.jit(tx.update)
    _, state = update(_rows(9, 5, 9, 9), state, params)
    assert state.overflow == 0
    updates, state = update(_rows(9, 1, 2, 3), state, params)
    # One slot was free: 1 has it, 2 and 3 are left out, 9 and 5 have their whole sums.
    assert state.overflow == 2 and updates.num_rows() == 3
    moved = -2 * np.asarray(updates.to_dense())[:, 0]
    assert [moved[r] for r in (9, 5, 1, 2, 3)] == [4, 1, 1, 0, 0]
    # The next round begins with all slots free.
    _, state = update(_rows(20, 21, 22, 22), state, params)
    assert state.overflow == 2
    _, state = update(_rows(0, 1, 2, 3), state, params)
    assert state.overflow == 6


@pytest.mark.slow
def test_what_a_slot_held_before_does_not_come_back():
    tx, params = accumulate(SGD, 2, 3), np.zeros((V, 1), np.float32)
    state, update = tx.init(params), jax.jit(tx.update)
    bad, good = _rows(4, values=jnp.nan), _rows(7)
    for grad in (bad, bad, good, good):
        updates, state = update(grad, state, params)
    updates = np.asarray(updates.to_dense())
    assert_same_bits(updates[7], np.float32([-1]))
    assert np.all(np.isfinite(updates))


# ------------------------------------------------------------------ under JAX


@pytest.mark.slow
def test_in_scan_and_from_a_checkpoint():
    tx, params = accumulate(ADAM, 2, 20), make_params()
    grads = [make_grads(i) for i in range(4)]

    def body(carry, grads):
        return step(tx, *carry, grads), None

    carry = params, tx.init(params)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *grads)
    scanned, _ = jax.jit(lambda c, g: jax.lax.scan(body, c, g))(carry, stacked)
    # Numbers of NumPy at the first step: outside of jit nothing makes arrays of them.
    carry, _ = body(jax.device_get(carry), grads[0])
    run = jax.jit(body)
    for g in grads[1:]:
        carry, _ = run(jax.device_get(carry), g)
    assert_trees_close(scanned, carry)


def test_shapes_are_known_before_data_and_ids_may_be_wide(x64):
    tx = accumulate(ADAM, 2, 4)
    params = {"table": jnp.ones((V, D), jnp.float32), "none": None}
    rows = sj.SelectedRows(jnp.array([3, V, 3]), jnp.ones((3, D), jnp.float32), V)
    assert rows.rows.dtype == jnp.int64
    args = {"table": rows, "none": None}, tx.init(params), params
    shapes = jax.eval_shape(tx.update, *args)
    assert shapes[0]["table"].shape == (V, D) and shapes[0]["table"].capacity == 4
    updates, state = jax.jit(tx.update)(*args)
    known = [(s.shape, s.dtype) for s in jax.tree.leaves(shapes)]
    assert [(x.shape, x.dtype) for x in jax.tree.leaves((updates, state))] == known
    assert updates["table"].dtype == state.acc_grads["table"].dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_in_shard_map(kind):
    """Each device accumulates for its part of the table, by rows of its own."""
    kind, spec = getattr(jax.sharding.AxisType, kind), jax.P("x")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    tx = accumulate(lazy(optax.adagrad(1.0, 0.0)), 2, 2)

    def run(table, rows, values):
        state = tx.init(table)
        for _ in range(2):
            grad = sj.SelectedRows(rows, values, len(table))
            table, state = step(tx, table, state, grad)
        return table

    put = lambda x: jax.device_put(x, jax.NamedSharding(mesh, spec))
    zeros, ones = np.zeros((24, 1), np.float32), np.ones((8, 1), np.float32)
    args = put((zeros, np.arange(8, dtype=np.int32) % 2, ones))
    with jax.set_mesh(mesh):
        table = jax.jit(jax.shard_map(run, in_specs=spec, out_specs=spec))(*args)
    moved = np.asarray(table).reshape(8, 3)
    np.testing.assert_allclose(moved, -np.eye(3)[np.arange(8) % 2], rtol=1e-5)


def test_vectors_have_slots_if_a_tree_says_so():
    """One int gives slots to leaves of rank 2."""
    params = {"a": np.zeros(V, np.float32)}
    grads = {"a": sj.SelectedRows(np.array([2]), np.ones(1, np.float32), V)}
    tx = accumulate(ADAM, 1, 4)
    with pytest.raises(ValueError, match="no slots"):
        tx.update(grads, tx.init(params), params)
    tx = accumulate(ADAM, 1, {"a": 4})
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert updates["a"].num_rows() == 1
