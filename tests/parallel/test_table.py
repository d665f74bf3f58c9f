"""Tables whose rows are spread over devices: their optimizer state, sums by hand, and
the tables that are made of functions."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from helpers import whole


pytestmark = pytest.mark.usefixtures("eight_devices")

V, D = 13, 3
TABLE = np.random.default_rng(0).normal(size=(V, D)).astype(np.float32)
IDS = np.array([[0, 5, 5, 12, 1, 0, 7, -1], [12, 12, 3, 2, 5, 99, 0, 4]], np.int32)


def _mesh(kind=AxisType.Auto, shards=4):
    return jax.make_mesh(
        (shards,), ("x",), devices=jax.devices()[:shards], axis_types=(kind,)
    )


def _loss(read, table, ids):
    return jnp.sum(jnp.sin(read(table, ids, mode="zero")))


# ------------------------------------------------------------------ state


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_state_made_inside_jit(kind):
    mesh = _mesh(kind)
    # JAX writes arrays on every device in types with a part for each axis.
    everywhere = P(None) if kind == AxisType.Explicit else P()
    dense = jax.device_put(np.ones(D, np.float32), NamedSharding(mesh, everywhere))
    params = {"table": sj.parallel.shard_rows(TABLE, mesh, "x"), "b": dense}
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    tx = sj.optim.lazy(adam)
    start = jax.jit(tx.init)(params)
    same = tx.init(params)
    assert jax.tree.structure(start) == jax.tree.structure(same)
    for made, eager in zip(jax.tree.leaves(start), jax.tree.leaves(same)):
        assert made.sharding.is_equivalent_to(eager.sharding, made.ndim)
        assert made.committed
        np.testing.assert_array_equal(made, eager)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        def loss(p):
            rows = sj.lookup(p["table"], ids, mode="zero")
            return jnp.sum(jnp.sin(rows * p["b"][None, :]))

        grads = sj.grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    ids = jax.device_put(IDS[0], NamedSharding(mesh, P("x")))
    donated = [x for x in jax.tree.leaves(start) if x.ndim == 2]
    state = start
    for _ in range(3):
        params, state = step(params, state, ids)
    compiled: Any = step
    assert compiled._cache_size() == 1
    assert donated and all(x.is_deleted() for x in donated)


@pytest.mark.usefixtures("loose_promotion")
def test_state_of_nested_optimizers_inside_jit():
    table = sj.parallel.shard_rows(TABLE, _mesh(AxisType.Explicit), "x")
    params = {"t": table, "b": jnp.ones(D)}
    labels = {"t": "rows", "b": "dense"}
    rows = optax.chain(optax.scale(0.5), sj.optim.lazy(optax.adagrad(0.1)))
    tx = optax.partition({"rows": rows, "dense": optax.adam(0.1)}, labels)
    own = sj.optim.rowwise_adagrad(0.1)  # a number a row
    for tx, tree in ((tx, params), (own, table)):
        state = jax.jit(tx.init)(tree)
        spread = [x for x in jax.tree.leaves(state) if x.shape[:1] == (16,)]
        assert spread
        for leaf in spread:
            assert leaf.sharding.is_equivalent_to(table.values.sharding, leaf.ndim)


@pytest.mark.window
@pytest.mark.usefixtures("loose_promotion")
def test_gradients_and_state_must_be_the_tables():
    mesh = _mesh()
    table = sj.parallel.shard_rows(TABLE, mesh, "x")
    other = sj.parallel.shard_rows(TABLE, mesh, "x", layout="block")
    tx: Any = sj.optim.lazy(optax.adam(0.1))
    state = tx.init(table)
    gradient = jax.jit(sj.grad(lambda t: _loss(sj.lookup, t, IDS[0])))(table)
    rows = sj.SelectedRows([1], jnp.ones((1, D)), V)
    for wrong in (jnp.ones((V, D)), rows):
        with pytest.raises(TypeError, match="of a ShardedTable must be a Sharded"):
            tx.update(wrong, state, table)
    with pytest.raises(TypeError, match="layout='mod'.* for .*layout='block'"):
        tx.update(gradient, state, other)
    with pytest.raises(ValueError, match="The state is for .*layout='block'"):
        tx.update(gradient, tx.init(other), table)
    refusing: Any = (
        sj.optim.exact(optax.adam(0.1)),
        sj.optim.accumulate(tx, 2, capacity=4),
    )
    for wrong in refusing:
        with pytest.raises(TypeError, match="A ShardedTable, whose rows are shar"):
            wrong.init({"t": table})


# ------------------------------------------------------------------ sums by hand


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
def test_gradients_are_summed_by_hand():
    mesh = _mesh()
    params = {"t": sj.parallel.shard_rows(TABLE, mesh, "x"), "b": jnp.ones(D)}

    def both(p, ids):
        return _loss(sj.lookup, p["t"], ids) + jnp.sum(p["b"] ** 2)

    find, find_dense = jax.jit(sj.grad(both)), jax.jit(jax.grad(both))
    a, b = (find(params, ids) for ids in IDS)
    oracle = {"t": TABLE, "b": params["b"]}
    want_a, want_b = (jax.tree.map(np.asarray, find_dense(oracle, ids)) for ids in IDS)
    is_leaf = lambda x: isinstance(x, sj.parallel.ShardedTable)
    add = functools.partial(jax.tree.map, operator.add, is_leaf=is_leaf)
    mean = jax.jit(
        lambda a, b: jax.tree.map(lambda g: g / 2, add(a, b), is_leaf=is_leaf)
    )
    got = mean(a, b)
    assert isinstance(got["t"].values, sj.parallel.ShardedRows)
    total: Any = sum([a["t"], b["t"]])
    pairs = [
        ((want_a["t"] + want_b["t"]) / 2, got["t"]),
        (want_a["t"] - want_b["t"], a["t"] - b["t"]),
        (-3 * want_a["t"], -(np.float32(3) * a["t"])),
        (want_a["t"] + want_b["t"], total),
        (TABLE + want_a["t"], params["t"] + a["t"]),
        (want_a["t"] - TABLE, a["t"] - params["t"]),
        (TABLE * TABLE, params["t"] * params["t"]),
    ]
    for (want, _), found in zip(pairs, whole([found for _, found in pairs])):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["b"], want_a["b"])
    # One step of the sum is one step of the dense sum.
    tx = optax.sgd(0.1)
    updates, _ = sj.optim.lazy(tx).update(got, tx.init(params), params)
    new: Any = optax.apply_updates(params, updates)
    want = TABLE - 0.1 * (want_a["t"] + want_b["t"]) / 2
    np.testing.assert_allclose(whole(new["t"]), want, rtol=1e-5, atol=1e-6)


def test_arithmetic_is_of_tables_that_lie_alike():
    mesh = _mesh(shards=2)
    table: Any = sj.parallel.shard_rows(TABLE, mesh, "x")
    half = table.map(lambda v: v.astype(jnp.bfloat16)) * jnp.float32(0.5)
    assert half.dtype == jnp.bfloat16
    other = sj.parallel.shard_rows(TABLE, mesh, "x", layout="block")
    narrow = sj.parallel.shard_rows(TABLE[:, :1], mesh, "x")
    for wrong in (other, narrow):
        with pytest.raises(ValueError, match="differ in shape, mesh or layout"):
            print(table + wrong)
    lie: Any = "Its rows lie on 2 devices"
    for wrong, error, message in [
        (lambda: table + 1, TypeError, lie),
        (lambda: 1.5 - table, TypeError, lie),
        (lambda: jnp.ones((V, D)) + table, TypeError, lie),
        (lambda: np.asarray(table), TypeError, lie),
        (lambda: jnp.ones(D) @ table, TypeError, lie),
        (lambda: table @ jnp.ones(D), TypeError, lie),
        (lambda: float(table), TypeError, "not 'ShardedTable'"),
        (lambda: table * np.ones(D), TypeError, "must be a scalar"),
        (lambda: table / table, TypeError, "cannot divide by a ShardedTable"),
        (lambda: 1 / table, TypeError, "cannot divide by a ShardedTable"),
    ]:
        with pytest.raises(error, match=message):
            wrong()
    assert not hasattr(table, "T")


# ------------------------------------------------------------------ made of functions


@pytest.mark.window
@pytest.mark.parametrize("layout", ["mod", "block"])
def test_function_of_ids(layout):
    asked = []

    def rows(ids):
        asked.append(list(ids))
        return np.stack([TABLE[k] for k in ids])  # fails for no ids

    make = functools.partial(sj.parallel.shard_rows, layout=layout)
    table = make(rows, _mesh(), "x", height=5)
    np.testing.assert_array_equal(table.to_dense(), TABLE[:5])
    # The first call is for the shape and the dtype.
    assert asked[0] == [0] and sorted(sum(asked[1:], [])) == [0, 1, 2, 3, 4]
    assert all(asked)


def test_function_of_ids_gives_a_row_for_each():
    make = functools.partial(sj.parallel.shard_rows, mesh=_mesh(), axis="x", height=9)
    uneven = lambda ids: np.ones((len(ids), 1 + int(ids[0] > 0)))
    for wrong, message in [
        (lambda ids: np.float32(1), r"\(3,\), got shape \(\)"),
        (lambda ids: np.ones((1, 2)), r"\(3, 2\), got shape \(1, 2\)"),
        (uneven, r"\(2, 1\), got shape \(2, 2\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(wrong)
    words = np.full((3, 2), "a")
    for table in (words, lambda ids: words[ids % 3]):
        height = 9 if callable(table) else None
        with pytest.raises(TypeError):
            sj.parallel.shard_rows(table, _mesh(), "x", height=height)
    for shard in (sj.parallel.shard_rows, sj.parallel.shard_columns):
        with pytest.raises(ValueError, match="an AbstractMesh has none"):
            shard(np.ones((8, 4)), AbstractMesh((4,), ("x",)), "x")


# ------------------------------------------------------------------ reading


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
def test_rows_without_columns():
    table = sj.parallel.shard_rows(TABLE[:, :0], _mesh(), "x")
    tx: Any = sj.optim.lazy(optax.sgd(0.1))
    loss = lambda t: _loss(sj.lookup, t, IDS)
    step = lambda table: tx.update(sj.grad(loss)(table), tx.init(table), table)[0]
    for updates in step(table), jax.jit(step)(table):
        assert updates.to_dense().shape == (V, 0)


@pytest.mark.window
def test_ids_on_other_devices():
    table = sj.parallel.shard_rows(TABLE, _mesh(), "x")
    devices = jax.devices()
    read = functools.partial(sj.lookup, table)
    bag = functools.partial(sj.embedding_bag, table)
    ids = IDS[:, :2]
    got = read(jax.device_put(ids[0], devices[1]))
    np.testing.assert_array_equal(got, TABLE[ids[0]])
    for here in (read, bag):
        with pytest.raises(
            ValueError, match="ids are on .*, but the ShardedTable is on"
        ):
            here(jax.device_put(ids, devices[5]))
        with pytest.raises(
            ValueError, match="ids are on .*, but the ShardedTable is on"
        ):
            split = NamedSharding(_mesh(shards=2), P("x"))
            here(jax.device_put(ids, split))


def test_index_and_iteration(x64):
    table = sj.parallel.shard_rows(TABLE, _mesh(AxisType.Explicit), "x")
    ids = np.array([3, -3, 2**32 + 3, -(2**32) - 3, len(TABLE)])
    nearest = np.clip(ids + len(TABLE) * (ids < 0), 0, len(TABLE) - 1)
    np.testing.assert_array_equal(table[ids], np.asarray(TABLE)[nearest])
    as_any: Any = table
    for f in (list, lambda table: 3 in table):  # without an end, once
        with pytest.raises(TypeError, match="not iterable|not a container"):
            f(as_any)
