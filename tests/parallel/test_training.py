"""Training steps over sharded tables equal the plain optimizer on one device.

A step is compiled once and run on batches of every kind of ids.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import sparsejax as sj
from helpers import whole
from one_device import (
    assert_at_owners,
    assert_close,
    dense_step_of,
    mesh_of,
    place,
    run,
    step_of,
    table_of,
)


# Optax's Adam needs loose promotion.
pytestmark = pytest.mark.usefixtures("eight_devices", "loose_promotion")

V, D, N_IDS = 101, 4, 64
WEIGHTS = table_of(N_IDS, D, seed=2)
TXS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "clip, adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "rowwise_adagrad": sj.optim.rowwise_adagrad(0.1),
}


def batches():
    """Ids in every kind of order in which rows can reach their owners."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, V + 1)
    ids = rng.integers(0, V, N_IDS)
    kinds = {
        "zipf": rng.choice(V, N_IDS, p=weights / weights.sum()),
        "uniform": ids,
        # Each device has its own range: the others wait for its rows.
        "apart": np.sort(ids),
        "one owner, mod": 8 * (ids // 8),
        "one owner, block": ids % (V // 8),
        "one id": np.full(N_IDS, 5),
        "out of range": ids * 2 - V // 2,
        "of one device": np.where(np.arange(N_IDS) < N_IDS // 8, ids, -1),
    }
    return [(ids.astype(np.int32),) for ids in kinds.values()]


def loss_fn(params, ids):
    read = functools.partial(sj.lookup, ids=ids, mode="zero")
    rows = sum(jnp.tanh(read(table)) for table in params["tables"])
    return jnp.sum(rows * WEIGHTS * params["b"][None, :])


@functools.cache
def trained_on_one_device(name):
    tables = [jnp.asarray(table_of(V, D, seed=k)) for k in range(2)]
    params = {"tables": tables, "b": jnp.ones(D)}
    step = dense_step_of(loss_fn, TXS[name], V)
    return run(step, params, TXS[name].init(params), batches())


@pytest.mark.window
@pytest.mark.parametrize(
    "name, shape, axis, capacity, kind",
    [
        ("clip, adam", (8,), "x", 3, AxisType.Auto),  # merged and held
        ("adam", (8,), "x", 3, AxisType.Explicit),
        ("sgd", (2, 4), "x", 2, AxisType.Auto),  # over one of two axes
        ("momentum", (2, 2), ("d", "x"), 3, AxisType.Auto),
        ("clip, adam", (1, 2), "x", 1, AxisType.Explicit),  # sent twice
        pytest.param(
            *("rowwise_adagrad", (2, 4), "x", 3, AxisType.Explicit),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_equals_one_device(name, shape, axis, capacity, kind):
    mesh = mesh_of(shape, ("d", "x")[-len(shape) :], kind)
    tx = TXS[name] if name == "rowwise_adagrad" else sj.optim.lazy(TXS[name])
    with jax.set_mesh(mesh):
        # One table of each layout; no number of devices here divides V.
        tables = [
            sj.parallel.shard_rows(
                table_of(V, D, seed=k), mesh, axis, layout=layout, capacity=capacity
            )
            for k, layout in enumerate(("mod", "block"))
        ]
        params = {"tables": tables, "b": place(mesh, np.ones(D, np.float32), None)}
        step: Any = jax.jit(step_of(loss_fn, tx), donate_argnums=(0, 1))
        split = [(place(mesh, ids, mesh.axis_names),) for (ids,) in batches()]
        found, state, losses = run(step, params, tx.init(params), split)
        assert step._cache_size() == 1
    expected, _, dense_losses = trained_on_one_device(name)
    assert_close(losses, dense_losses)
    assert_close(whole(found["tables"]), expected["tables"])


@pytest.mark.parametrize("name", ["adam", "clip, adam"])
def test_updates_are_at_their_owners(name):
    """If somebody looks at them: each row once, ascending at its owner."""
    mesh, tx = mesh_of(2), sj.optim.lazy(TXS[name])
    table = sj.parallel.shard_rows(table_of(V, D), mesh, "x", capacity=1)
    params = {"tables": [table], "b": place(mesh, np.ones(D, np.float32))}

    @jax.jit
    def update(params, ids):
        grads = sj.grad(loss_fn)(params, ids)
        return tx.update(grads, tx.init(params), params)[0]

    (ids,) = batches()[1]
    updates = update(params, ids)["tables"][0]
    assert_at_owners(updates.values, table)
    before = {"tables": [jnp.asarray(table_of(V, D))], "b": jnp.ones(D)}
    step = dense_step_of(loss_fn, TXS[name], V)
    after, *_ = step(before, TXS[name].init(before), ids)
    assert_close(whole(updates), after["tables"][0] - before["tables"][0])


@pytest.mark.window
def test_bfloat16_parts_are_summed_in_float32():
    zeros = np.zeros((V, 1), jnp.bfloat16)
    table = sj.parallel.shard_rows(zeros, mesh_of(), "x", capacity=1)
    tx: Any = sj.optim.lazy(optax.sgd(1.0))

    def loss(table, ids):
        rows = sj.lookup(table, ids)
        return -jnp.sum(rows.astype(jnp.float32)) * jnp.float32(1.0078125)

    ids = np.full(256, 7, np.int32)  # 64 on each device
    after, *_ = jax.jit(step_of(loss, tx))(table, tx.init(table), ids)
    # Added one by one in bfloat16, 256 of them stop growing at half of that.
    assert float(after.to_dense()[7, 0]) == 258.0


@pytest.mark.slow
def test_a_scaled_loss_and_the_norm_of_a_gradient():
    params: Any = {"t": sj.parallel.shard_rows(table_of(V, D), mesh_of(), "x")}
    tx: Any = sj.optim.dynamic_loss_scale(sj.optim.lazy(optax.sgd(0.1)))
    (ids,) = batches()[0]
    loss = lambda t: jnp.sum(sj.lookup(t, ids, mode="zero") ** 2)

    @jax.jit
    def step(params, state):
        grads = sj.grad(lambda p: loss(p["t"]) * state.scale)(params)
        norm = sj.optim.global_norm(grads) / state.scale
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), norm

    new, norm = step(params, tx.init(params))
    want = np.asarray(jax.jit(jax.grad(loss))(table_of(V, D)))
    assert_close(whole(new)["t"], table_of(V, D) - 0.1 * want)
    assert_close(norm, np.linalg.norm(want))


# ------------------------------------------------------------------ state


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_state_made_inside_jit(kind):
    mesh = mesh_of(kind=kind)
    # JAX writes arrays on every device in types with a part for each axis.
    everywhere = [None] if kind == AxisType.Explicit else []
    dense = place(mesh, np.ones(D, np.float32), *everywhere)
    table = sj.parallel.shard_rows(table_of(V, D), mesh, "x")
    params: Any = {"tables": [table], "b": dense}
    tx = sj.optim.lazy(TXS["clip, adam"])
    start = jax.jit(tx.init)(params)
    same = tx.init(params)
    assert jax.tree.structure(start) == jax.tree.structure(same)
    for made, eager in zip(jax.tree.leaves(start), jax.tree.leaves(same)):
        assert made.sharding.is_equivalent_to(eager.sharding, made.ndim)
        assert made.committed
        np.testing.assert_array_equal(made, eager)

    step: Any = jax.jit(step_of(loss_fn, tx), donate_argnums=(0, 1))
    donated = [x for x in jax.tree.leaves(start) if x.ndim == 2]
    run(step, params, start, [(place(mesh, *batches()[0], "x"),)] * 3)
    assert step._cache_size() == 1
    assert donated and all(x.is_deleted() for x in donated)


def test_state_of_nested_optimizers_inside_jit():
    table = sj.parallel.shard_rows(table_of(V, D), mesh_of(kind=AxisType.Explicit), "x")
    params = {"t": table, "b": jnp.ones(D)}
    rows = optax.chain(optax.scale(0.5), sj.optim.lazy(optax.adagrad(0.1)))
    parts: Any = {"rows": rows, "dense": optax.adam(0.1)}
    both = optax.partition(parts, {"t": "rows", "b": "dense"})
    own = sj.optim.rowwise_adagrad(0.1)  # a number a row
    for tx, tree in ((both, params), (own, table)):
        state = jax.jit(tx.init)(tree)
        stored = table.values.shape[:1]
        sharded = [x for x in jax.tree.leaves(state) if x.shape[:1] == stored]
        assert sharded
        for leaf in sharded:
            assert leaf.sharding.is_equivalent_to(table.values.sharding, leaf.ndim)
