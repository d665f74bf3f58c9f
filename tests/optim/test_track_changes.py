"""track_changes and take_changes: the rows that changed, against the tables."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import sparsejax as sj
from helpers import assert_same_bits, assert_written_in_place, compile_as_users_do


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D = 50, 3
ADAM = optax.adam(0.1)


def tracked(tx, **options) -> Any:
    return sj.optim.track_changes(tx, **options)


def model(seed=0) -> Any:
    table = np.random.default_rng(seed).normal(size=(V, D)).astype(np.float32)
    return {"items": jnp.asarray(table), "bias": jnp.ones(D), "w": jnp.ones((D, 2))}


def loss(params, ids):
    rows = sj.lookup(params["items"], ids)
    return jnp.sum(rows**3) + jnp.sum((rows @ params["w"]) ** 2) + params["bias"].sum()


def step_of(tx) -> Any:
    def step(carry, ids):
        params, state = carry
        grads = sj.grad(loss, tables={"items": True, "bias": False, "w": False})(
            params, ids
        )
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), ids

    return step


def differing(before, after):
    return np.flatnonzero((np.asarray(before) != np.asarray(after)).any(axis=1))


def batches(count, seed=0):
    return np.random.default_rng(seed).integers(0, V, (count, 6), np.int32)


# ------------------------------------------------------------------ which rows


@pytest.mark.parametrize(
    "inner", [optax.sgd(0.1), optax.chain(optax.clip_by_global_norm(1.0), ADAM)]
)
def test_ids_are_the_rows_that_differ(inner):
    """Jitted and eager, with duplicates, over several calls of take_changes."""
    tx = tracked(sj.optim.lazy(inner))
    params = model()
    state = tx.init(params)
    plain_tx = sj.optim.lazy(inner)
    plain = params, plain_tx.init(params)
    eager, plain_step = step_of(tx), step_of(plain_tx)
    run, plain_run = jax.jit(eager), jax.jit(plain_step)
    for number in range(3):
        before = params
        for ids in batches(2, number):
            (params, state), _ = (run if number else eager)((params, state), ids)
            plain, _ = (plain_run if number else plain_step)(plain, ids)
        found, state = sj.optim.take_changes(params, state)
        assert found["bias"] is None  # of rank 1
        assert found["items"].dtype == np.int32
        for name in ("items", "w"):
            assert (
                found[name].tolist() == differing(before[name], params[name]).tolist()
            )
        assert 0 < found["items"].size < V
        found, state = sj.optim.take_changes(params, state)
        assert not found["items"].size
    jax.tree.map(assert_same_bits, (params, state.inner_state), plain)


def test_in_a_scan_in_place():
    tx = tracked(sj.optim.lazy(ADAM))
    table = jnp.ones((1_000_000, 2))

    def run(table, state, ids):
        def step(carry, ids):
            table, state = carry
            grads = sj.grad(lambda t: jnp.sum(t[ids] ** 2), tables=True)(table)
            updates, state = tx.update(grads, state, table)
            return (optax.apply_updates(table, updates), state), None

        return jax.lax.scan(step, (table, state), ids)[0]

    ids = jnp.array([[3, 999_999, 3], [7, 3, 0]])
    state = tx.init(table)
    lowered = jax.jit(run, donate_argnums=(0, 1)).lower(table, state, ids)
    compiled = compile_as_users_do(lowered)
    written = [table] * 3 + [state.changed]
    assert_written_in_place(compiled, written, state.changed.nbytes)  # a byte a row
    found, _ = sj.optim.take_changes(*jax.jit(run)(table, state, ids))
    assert found.tolist() == [0, 3, 7, 999_999]


def test_rows_that_accumulate_are_marked_when_they_are_applied():
    tx = sj.optim.accumulate(sj.optim.lazy(optax.sgd(0.1)), 2, capacity=20)
    tx = tracked(tx)
    params = model()["items"]
    state = tx.init(params)
    seen = []
    for row in (3, 5, 7, 9):
        grads = sj.SelectedRows(jnp.array([row]), jnp.ones((1, D)), V)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        found, state = sj.optim.take_changes(params, state)
        seen.append(found.tolist())
    assert seen == [[], [3, 5], [], [7, 9]]


def test_rows_of_rank_one_and_quantized_tables():
    tx = tracked(sj.optim.lazy(optax.sgd(0.1)), tables=True)
    weights = jnp.zeros(V)
    grads = sj.SelectedRows(jnp.array([4, V, 2]), jnp.ones(3), V)
    updates, state = tx.update(grads, tx.init(weights), weights)
    weights = optax.apply_updates(weights, updates)
    assert sj.optim.take_changes(weights, state)[0].tolist() == [2, 4]

    table = sj.quantize(model()["items"])
    tx = sj.optim.rounding(sj.optim.lazy(optax.sgd(0.1)), key=0)
    tx = tracked(tx)
    grads = sj.SelectedRows(jnp.array([4, 2]), jnp.ones((2, D)), V)
    updates, state = jax.jit(tx.update)(grads, tx.init(table), table)
    table = jax.jit(optax.apply_updates)(table, updates)
    assert sj.optim.take_changes(table, state)[0].tolist() == [2, 4]


def test_complex_tables():
    params = {"t": jnp.ones((V, D), jnp.complex64)}
    tx = tracked(sj.optim.lazy(optax.sgd(0.1)))
    grads = {"t": jnp.zeros((V, D), jnp.complex64).at[3].set(1j)}
    updates, state = tx.update(grads, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    assert sj.optim.take_changes(params, state)[0]["t"].tolist() == [3]


def test_rows_that_are_reset_have_changed():
    tx = tracked(sj.optim.lazy(ADAM))
    params = model()
    state = tx.init(params)
    params, state = sj.optim.reset_rows(tx, state, params, {"items": jnp.array([3, V])})
    found, state = sj.optim.take_changes(params, state)
    assert found["items"].tolist() == [3] and not found["w"].size


def test_a_state_inside_of_another(tmp_path):
    tx: Any = optax.chain(tracked(sj.optim.lazy(optax.sgd(0.1))))
    params = model()["items"]
    grads = sj.SelectedRows(jnp.array([4]), jnp.ones((1, D)), V)
    _, state = tx.update(grads, tx.init(params), params)
    sj.parallel.save(tmp_path / "run", state)
    state = sj.parallel.restore(tmp_path / "run", tx.init(params))
    found, state = sj.optim.take_changes(params, state)
    assert found.tolist() == [4] and isinstance(state, tuple)


# ------------------------------------------------------------------ over devices


@pytest.mark.parametrize("layout", ["mod", "block"])
@pytest.mark.usefixtures("eight_devices")
def test_sharded_tables_give_the_same_ids(layout):
    kind = AxisType.Auto if layout == "mod" else AxisType.Explicit
    devices = jax.devices()[:8]
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=devices, axis_types=(kind,) * 2)
    tx = tracked(sj.optim.lazy(ADAM))
    plain = model()
    sharded = plain | {
        "items": sj.parallel.shard_rows(plain["items"], mesh, "x", layout=layout)
    }
    found = []
    for params in (plain, sharded):
        state = tx.init(params)
        run: Any = jax.jit(step_of(tx), donate_argnums=0)
        params = jax.tree.map(jnp.copy, params)
        carry = params, state
        ids = np.random.default_rng(1).integers(0, V, (3, 8), np.int32)
        for batch in ids:
            carry, _ = run(carry, batch)
        first, state = sj.optim.take_changes(*carry)
        carry, _ = run((carry[0], state), ids[0])  # the cleared state fits the step
        second, state = sj.optim.take_changes(carry[0], state=carry[1])
        assert run._cache_size() <= 2
        assert first["items"].tolist() == np.unique(ids).tolist()
        assert second["items"].tolist() == np.unique(ids[0]).tolist()
        found.append(first["w"].tolist())
    assert found[0] == found[1] == [0, 1, 2]
    flags = state.changed["items"].values
    assert flags.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("x")), 1)
    if kind == AxisType.Auto:  # outside of jit
        tx = tracked(sj.optim.lazy(optax.sgd(0.1)))
        grads = jax.jit(sj.grad(loss))(sharded, ids[0])
        _, state = tx.update(grads, tx.init(sharded), sharded)
        found, _ = sj.optim.take_changes(sharded, state)
        assert found["items"].tolist() == np.unique(ids[0]).tolist()
