"""Owners that apply rows range by range, as they arrive, without holding them all.

The oracle is the optimizer on plain arrays; the order of its sums does not matter.
test_exchange.py checks the memory of the programs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from helpers import whole


# Optax's Adam needs loose promotion.
pytestmark = [
    pytest.mark.usefixtures("eight_devices", "loose_promotion"),
]

V, D, N_IDS = 101, 2, 64
TXS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(0.1),
    "clip, adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
}
WEIGHTS = np.random.default_rng(1).normal(size=(N_IDS, D)).astype(np.float32)


def _batches():
    """Ids in every kind of order in which rows can reach their owners."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, V, N_IDS)
    return {
        "uniform": ids,
        # Each device has its own range: the others wait for its rows.
        "apart": np.sort(ids),
        "one owner": 8 * (ids // 8),
        "one id": np.full(N_IDS, 5),
        "out of range": ids * 2 - V // 2,
        "of one device": np.where(np.arange(N_IDS) < N_IDS // 8, ids, -1),
    }


def _table():
    return np.random.default_rng(2).normal(size=(V, D)).astype(np.float32)


def _loss(look, params, ids):
    rows = look(params["t"], ids, mode="zero")
    return jnp.sum(jnp.tanh(rows) * WEIGHTS * params["b"][None, :])


def _step(tx, look, params, state, ids):
    grads = sj.grad(functools.partial(_loss, look))(params, ids)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, updates


def _dense_step(tx, params, state, ids):
    """The plain optimizer on plain arrays; rows not read are put back."""
    grads = jax.grad(functools.partial(_loss, sj.lookup))(params, ids)
    updates, new_state = tx.update(grads, state, params)
    touched = jnp.any(ids[None, :] == jnp.arange(V)[:, None], axis=1)

    def keep(old, new):
        return jnp.where(touched[:, None], new, old) if new.shape == (V, D) else new

    zeros = jax.tree.map(jnp.zeros_like, updates)
    updates, state = jax.tree.map(keep, (zeros, state), (updates, new_state))
    return optax.apply_updates(params, updates), state, updates


def _run(tx, table, b, step):
    """The table after each batch, and the last update of it."""
    step, params, found, updates = jax.jit(step), {"t": table, "b": b}, [], {}
    state = tx.init(params)
    for ids in _batches().values():
        params, state, updates = step(params, state, ids.astype(np.int32))
        found.append(params["t"])
    return found, updates["t"]


@functools.cache
def _want(name):
    step = functools.partial(_dense_step, TXS[name])
    return _run(TXS[name], jnp.asarray(_table()), jnp.ones(D), step)


@pytest.mark.window
@pytest.mark.parametrize(
    "name, shape, slots, kind",
    [
        ("sgd", (2, 4), 2, AxisType.Auto),
        ("adam", (8,), 3, AxisType.Explicit),
        ("clip, adam", (8,), 3, AxisType.Auto),  # merged and held
        ("clip, adam", (1, 2), 1, AxisType.Explicit),  # sent twice
    ],
)
def test_equals_one_device(name, shape, slots, kind):
    devices = jax.devices()[: int(np.prod(shape))]
    names = ("d", "x")[-len(shape) :]
    kinds = (kind,) * len(shape)
    mesh = jax.make_mesh(shape, names, devices=devices, axis_types=kinds)
    with jax.set_mesh(mesh):
        table = sj.parallel.shard_rows(_table(), mesh, "x", capacity=slots)
        b = jax.device_put(np.ones(D, np.float32), NamedSharding(mesh, P()))
        tx = sj.optim.lazy(TXS[name])
        found, update = _run(tx, table, b, functools.partial(_step, tx, sj.lookup))
    want, wanted_update = _want(name)
    tables, dense_update = whole((found, update))
    for got, expected, batch in zip(tables, want, _batches()):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6, err_msg=batch)
    # The update, if somebody looks at it: each row once, at its owner, ascending there.
    np.testing.assert_allclose(dense_update, wanted_update, rtol=1e-5, atol=1e-6)
    rows, per_shard = np.asarray(update.values.rows), table.rows_per_shard
    for owner, part in enumerate(np.split(rows, shape[-1])):
        named = part[part < update.values.height]
        assert (np.diff(named) > 0).all()
        assert (named // per_shard == owner).all()


@pytest.mark.parametrize(
    "name, shards, exchanges",
    [
        # Ids and rows to read them, ids and rows of the gradient.
        ("adam", 2, 4),
        # A norm first, and few rows: they are held.
        ("clip, adam", 4, 4),
        # A norm first, and many rows: sent for the norm, and sent to be applied.
        ("clip, adam", 2, 6),
    ],
)
def test_how_often_rows_are_sent(name, shards, exchanges):
    mesh = jax.make_mesh((shards,), ("x",), devices=jax.devices()[:shards])
    b = jax.device_put(np.ones(D, np.float32), NamedSharding(mesh, P()))
    table = sj.parallel.shard_rows(_table(), mesh, "x", capacity=1)
    params = {"t": table, "b": b}
    tx = sj.optim.lazy(TXS[name])
    step = lambda *args: _step(tx, sj.lookup, *args)[:2]
    ids = jnp.zeros(N_IDS, jnp.int32)
    text = str(jax.jit(step).lower(params, tx.init(params), ids).as_text())
    assert text.count("stablehlo.all_to_all") == exchanges


@pytest.mark.window
def test_bfloat16_parts_are_summed_in_float32():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    zeros = np.zeros((V, 1), jnp.bfloat16)
    table = sj.parallel.shard_rows(zeros, mesh, "x", capacity=1)
    tx = sj.optim.lazy(optax.sgd(1.0))

    @jax.jit
    def step(table, ids):
        def loss(table):
            rows = sj.lookup(table, ids)
            return -jnp.sum(rows.astype(jnp.float32)) * jnp.float32(1.0078125)

        updates, _ = tx.update(sj.grad(loss)(table), tx.init(table), table)
        return optax.apply_updates(table, updates)

    # Added one by one in bfloat16, 256 of them stop growing at half of that.
    assert float(step(table, np.full(256, 7, np.int32)).to_dense()[7, 0]) == 258.0
