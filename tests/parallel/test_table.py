"""A ShardedTable in Python: sums and scalings by hand, copies, indexing, refusals."""

import copy
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import sparsejax as sj
from helpers import assert_same_bits, whole
from one_device import assert_close, mesh_of, table_of


pytestmark = pytest.mark.usefixtures("eight_devices")

V, D = 13, 3
TABLE = table_of(V, D)
IDS = np.array([[0, 5, 5, 12, 1, 0, 7, -1], [12, 12, 3, 2, 5, 99, 0, 4]], np.int32)


def sharded(table=TABLE, kind=AxisType.Auto, **options) -> Any:
    return sj.parallel.shard_rows(table, mesh_of(kind=kind), "x", **options)


def loss_fn(table, ids):
    return jnp.sum(jnp.sin(sj.lookup(table, ids, mode="zero")))


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
def test_gradients_are_summed_by_hand():
    params = {"t": sharded(), "b": jnp.ones(D)}
    both = lambda p, ids: loss_fn(p["t"], ids) + jnp.sum(p["b"] ** 2)
    find, find_dense = jax.jit(sj.grad(both)), jax.jit(jax.grad(both))
    a, b = (find(params, ids) for ids in IDS)
    oracle = {"t": TABLE, "b": params["b"]}
    want_a, want_b = (jax.tree.map(np.asarray, find_dense(oracle, ids)) for ids in IDS)
    is_leaf = lambda x: isinstance(x, sj.parallel.ShardedTable)
    add = functools.partial(jax.tree.map, operator.add, is_leaf=is_leaf)
    halve = lambda g: jax.tree.map(lambda g: g / 2, g, is_leaf=is_leaf)
    got = jax.jit(lambda a, b: halve(add(a, b)))(a, b)
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
    assert_close(whole([found for _, found in pairs]), [want for want, _ in pairs])
    assert_close(got["b"], want_a["b"])
    # One step of the sum is one step of the dense sum.
    tx = optax.sgd(0.1)
    updates, _ = sj.optim.lazy(tx).update(got, tx.init(params), params)
    new: Any = optax.apply_updates(params, updates)
    want = TABLE - 0.1 * (want_a["t"] + want_b["t"]) / 2
    assert_close(whole(new["t"]), want)
    for wrong in (lambda a, b: a.coalesce() + b, lambda a, b: a.coalesce(3)):
        with pytest.raises(ValueError):
            wrong(a["t"].values, b["t"].values)


def test_arithmetic_is_of_tables_that_are_sharded_alike():
    table = sharded()
    half = table.map(lambda v: v.astype(jnp.bfloat16)) * jnp.float32(0.5)
    assert half.dtype == jnp.bfloat16
    for wrong in (sharded(layout="block"), sharded(TABLE[:, :1])):
        with pytest.raises(ValueError, match="differ"):
            print(table + wrong)
    for refused in (
        # Rows of padding are zero.
        lambda: table + 1,
        lambda: 1.5 - table,
        lambda: table * np.ones(D),
        lambda: table + "a",
        # The whole table.
        lambda: jnp.ones((V, D)) + table,
        lambda: jnp.ones(D) @ table,
        lambda: table @ jnp.ones(D),
        lambda: float(table),
        # Without an end.
        lambda: list(table),
        lambda: 3 in table,
    ):
        with pytest.raises(TypeError):
            refused()
    assert not hasattr(table, "T")


def test_copies():
    table = sharded(kind=AxisType.Explicit)
    shallow, deep = copy.copy(table), copy.deepcopy(table)
    assert shallow.values is table.values and deep.values is not table.values
    assert jax.tree.structure(deep) == jax.tree.structure(table)
    assert_same_bits(deep.values, table.values)


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
def test_rows_without_columns():
    table, tx = sharded(TABLE[:, :0]), sj.optim.lazy(optax.sgd(0.1))
    step: Any = lambda table: tx.update(
        sj.grad(loss_fn)(table, IDS), tx.init(table), table
    )
    for updates, _ in step(table), jax.jit(step)(table):
        assert updates.to_dense().shape == (V, 0)


def test_index(x64):
    table = sharded(kind=AxisType.Explicit)
    ids = np.array([3, -3, 2**32 + 3, -(2**32) - 3, V])
    nearest = np.clip(ids + V * (ids < 0), 0, V - 1)
    np.testing.assert_array_equal(table[ids], TABLE[nearest])
    assert table[...] is table
