"""A ShardedTable among the parameters of a model that knows nothing of it.

The oracle is dense JAX: the same program with a plain array in place of the table.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import sparsejax as sj
from helpers import all_eqns, whole
from one_device import mesh_of, place, table_of


pytestmark = pytest.mark.usefixtures("eight_devices")
V, D, LENGTH = 101, 4, 16
TABLE = table_of(V, D)


def make_ids():
    ids = np.random.default_rng(1).integers(0, V, LENGTH).astype(np.int32)
    ids[3:5] = ids[0], 7
    return jnp.asarray(ids)


def take(table, ids):
    return jnp.take(table, ids, axis=0)


def through_scan(table, ids):
    step = lambda total, some: (total + table[some[0]], take(table, some))
    total, rows = lax.scan(step, jnp.zeros(D), ids.reshape(2, 8))
    return jnp.concatenate([total[None], rows.reshape(-1, D)])


def csr(ids):
    values = {"index": ids, "value": jnp.sin(ids.astype(jnp.float32))}
    return sj.SegmentTensor.from_lengths(values, jnp.array([3, 0, 9, 4]))


def collection(table, ids):
    tables = {"a": (50, D), "b": sj.nn.EmbeddingBag(51, D, combiner="mean")}
    layer = sj.nn.EmbeddingCollection(
        tables, {"a": "a", "c": "a", "b": ("b", "mean"), "d": ("b", "sum")}
    )
    some = ids[:4]
    bags = ids.reshape(4, 4) % 51
    read = {"a": some % 50, "c": some % 7, "b": bags, "d": bags[:, :2]}
    return jnp.concatenate(list(layer({"stack_width4_float32": table}, read).values()))


# How models read tables. The result has rows of D numbers.
READS = {
    "negative ids": lambda t, i: t[-i],
    "out of range": lambda t, i: t[i + 90],
    "slice and scalar": lambda t, i: jnp.stack([*t[3:5], t[i[0]], t[-1]]),
    "take, out of range": lambda t, i: jnp.nan_to_num(take(t, i + 90)),
    "cast first": lambda t, i: take(jnp.asarray(t) * 2.0, i),
    "vmap": lambda t, i: jax.vmap(lambda k: take(t, k))(i),
    "jit": lambda t, i: jax.jit(take)(t, i),
    "checkpoint": lambda t, i: jax.checkpoint(take)(t, i),
    "cond": lambda t, i: lax.cond(i[0] > 0, lambda: take(t, i), lambda: t[i] * 2),
    "scan": through_scan,
    "lookup": lambda t, i: sj.lookup(t, i, padding_id=7, max_norm=1.0),
    "segments": lambda t, i: sj.embedding_bag(t, i, i % 5, 4, combiner="sqrtn"),
    "bag of an array": lambda t, i: sj.embedding_bag(jnp.asarray(t), i.reshape(8, 2)),
    "dot": lambda t, i: sj.dot(csr(i), t),
    "dot of an array": lambda t, i: sj.dot(csr(i), jnp.asarray(t)),
    "collection": collection,
}


def all_reads(params, ids):
    """A loss that depends on every number that is read, each in another way."""
    rng, total = np.random.default_rng(2), 0.0
    for read in READS.values():
        rows = read(params["table"], ids)
        weights = rng.normal(size=rows.shape).astype(np.float32)
        total += jnp.sum(jnp.tanh(rows) * weights * params["w"])
    return total


def test_reads_as_of_an_array():
    params: Any = {"table": jnp.asarray(TABLE), "w": jnp.ones(())}
    value, grads = jax.jit(jax.value_and_grad(all_reads))(params, make_ids())

    params["table"] = sj.parallel.shard_rows(TABLE, mesh_of(8), "x")
    run = jax.jit(sj.value_and_grad(all_reads))
    found, sharded = run(params, make_ids())
    np.testing.assert_allclose(found, value, rtol=1e-5)
    rows = sharded["table"].values
    assert isinstance(rows, sj.parallel.ShardedRows)
    dense = whole(sharded["table"])
    np.testing.assert_allclose(dense, grads["table"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sharded["w"], grads["w"], rtol=1e-5, atol=1e-5)
    # Ids out of range read as from an array, but are not in the gradient.
    out = lambda table: jnp.sum(table[jnp.array([V + 5, 3])])
    found, grad = jax.jit(sj.value_and_grad(out))(params["table"])
    assert int(grad.values.num_rows()) == 1
    np.testing.assert_allclose(found, TABLE[[-1, 3]].sum(), 1e-5)


@pytest.mark.window
def test_without_a_gradient():
    table, ids = TABLE, make_ids()
    sharded = sj.parallel.shard_rows(table, mesh_of(8), "x")
    np.testing.assert_array_equal(sharded[ids], table[ids])
    np.testing.assert_array_equal(
        jax.jit(lambda t, i: t[i][0])(sharded, ids), table[ids[0]]
    )
    # The table may be closed over, arguments and results may be anything.
    run = sj.parallel.forward(lambda name, i: {name: take(sharded, i), "n": 3})
    found = jax.jit(run, static_argnums=0)("rows", ids)
    np.testing.assert_array_equal(found["rows"], table[ids])
    assert run("a", ids)["n"] == found["n"] == 3
    # A table that JAX differentiates has the gradient of an array.
    dense = jax.jit(jax.grad(lambda t: jnp.sum(t[ids] ** 2)))(jnp.asarray(table))
    loss = lambda t: jnp.sum(sj.parallel.forward(take)(t, ids) ** 2)
    grad = jax.jit(jax.grad(loss))(sharded)
    np.testing.assert_allclose(whole(grad), dense, rtol=1e-6)


@pytest.mark.window
def test_over_explicit_axes():
    mesh = mesh_of(8, kind=AxisType.Explicit)
    sharded = sj.parallel.shard_rows(TABLE, mesh, "x")
    split = place(mesh, make_ids(), "x")
    loss = lambda table, ids: jnp.sum(table[-ids] ** 2)
    grad = jax.jit(sj.grad(loss))(sharded, split)
    dense = jax.jit(jax.grad(loss))(jnp.asarray(TABLE), make_ids())
    np.testing.assert_allclose(whole(grad), dense, rtol=1e-6)


def test_a_frozen_table_and_a_trainable_one():
    table, ids, mesh = TABLE, make_ids(), mesh_of(8)
    shard = lambda x: sj.parallel.shard_rows(x, mesh, "x")

    def loss(train, frozen, ids):
        return jnp.sum(take(train, ids) * jax.jit(take)(frozen, ids)), take(frozen, 0)

    run = jax.jit(sj.value_and_grad(loss, has_aux=True))
    (value, row), grad = run(shard(table), shard(2 * table), ids)
    np.testing.assert_allclose(value, np.sum(2 * table[ids] ** 2), rtol=1e-5)
    np.testing.assert_array_equal(row, 2 * table[0])
    expected = np.zeros_like(table)
    np.add.at(expected, np.asarray(ids), 2 * table[ids])
    np.testing.assert_allclose(whole(grad), expected, rtol=1e-5)


@pytest.mark.window
def test_whole_table_uses_name_the_line():
    sharded = sj.parallel.shard_rows(TABLE, mesh_of(8), "x")
    ids = make_ids()
    for wrong in [
        lambda t: jnp.sum(jnp.asarray(t) ** 2),
        lambda t: jnp.sum(t @ jnp.ones(D)),
        lambda t: jnp.sum(take(t, ids)) + jnp.max(lax.stop_gradient(jnp.asarray(t))),
        lambda t: jnp.sum(jnp.transpose(t)),
        lambda t: jnp.sum(jnp.take(t, jnp.array([1]), axis=1)),
    ]:
        for run in (sj.grad(wrong), sj.parallel.forward(wrong), sj.explain(wrong)):
            with pytest.raises(sj.DensifyError, match=r"test_forward.py:\d"):
                run(sharded)
    with pytest.raises(sj.DensifyError, match="returns a table"):
        sj.parallel.forward(lambda t: jnp.asarray(t))(sharded)
    with pytest.raises(TypeError, match="sparsejax.parallel.forward"):
        jax.jit(take)(sharded, ids)


def test_programs_of_a_walk_are_not_taken_for_others():
    """JAX keeps its traces for `jit`, with a walk and without."""
    sharded = sj.parallel.shard_rows(TABLE, mesh_of(8), "x")
    rows = jax.jit(lambda t, i: t[i])
    loss = lambda t, i: jnp.sum(rows(t, i))
    for _ in range(2):
        sj.grad(loss)(sharded, make_ids())
        np.testing.assert_array_equal(rows(sharded, make_ids()), TABLE[make_ids()])
    program = jax.make_jaxpr(jax.jit(sj.grad(loss)))(sharded, make_ids())
    assert "sharded_table" not in {e.primitive.name for e in all_eqns(program.jaxpr)}
