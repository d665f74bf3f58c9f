"""Reads of tables whose rows are sharded over devices, and their gradients.

The oracle is dense JAX: the same program with a plain array in place of the table.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sparsejax as sj
from helpers import all_eqns, dense_rows, whole
from one_device import assert_at_owners, assert_close, mesh_of, place, table_of


pytestmark = pytest.mark.usefixtures("eight_devices")

V, D = 101, 4
TABLE = table_of(V, D)
IDS = np.random.default_rng(3).integers(-2, V + 2, (3, 8)).astype(np.int32)
BOTH_KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def sharded(
    shape=(4,), names=("x",), axis: Any = "x", kind=AxisType.Auto, **options
) -> Any:
    table = options.pop("table", TABLE)
    return sj.parallel.shard_rows(table, mesh_of(shape, names, kind), axis, **options)


def lookup(table, ids, capacity, **options):
    """`sj.lookup` of the table with another capacity."""
    return sj.lookup(dataclasses.replace(table, capacity=capacity), ids, **options)


# ------------------------------------------------------------------ lookup


@pytest.mark.window
@pytest.mark.parametrize(
    "mesh, layout, n, capacity, mode",
    [
        ((4,), "mod", 64, 1, "fill"),
        ((4,), "block", 61, None, "clip"),
        (((2, 4), ("d", "x")), "mod", 50, 2, "zero"),
        (((2, 2), ("d", "x"), ("d", "x")), "block", 3, None, "fill"),
    ],
)
def test_lookup_is_exact(mesh, layout, n, capacity, mode):
    table = sharded(*mesh, layout=layout, capacity=capacity)
    # The padding id requests no row.
    asked = lambda ids: jnp.clip(ids, 0, V - 1) if mode == "clip" else ids
    asked_for = lambda ids: jnp.where(ids == 3, np.int32(-1), asked(ids))
    read = lambda t, ids: sj.lookup(t, ids, mode=mode, padding_id=3)
    count = lambda ids: sj.parallel.exchange_metrics(table, asked_for(ids))
    look, plain = jax.jit(lambda ids: (read(table, ids), count(ids))), jax.jit(read)
    rng = np.random.default_rng(1)
    for ids in (
        rng.zipf(1.3, n) % V,
        rng.integers(-3, V + 3, n),  # some out of range
        8 * rng.integers(0, V // 8, n),  # of one owner, by remainder
        rng.integers(0, V // 8, n),  # of one owner, in blocks
        np.full(n, 5),
    ):
        rows, metrics = look(ids.astype(np.int32))
        np.testing.assert_array_equal(rows, plain(TABLE, ids.astype(np.int32)))
        if capacity is not None:
            assert int(metrics.rounds) == -(-int(metrics.largest) // capacity)
        assert (int(metrics.overflow) > 0) == (int(metrics.rounds) > 1)


@pytest.mark.slow
def test_measured_capacity_is_one_round():
    table, ids = sharded(), np.random.default_rng(1).zipf(1.3, 64) % V
    with_capacity = lambda n: dataclasses.replace(table, capacity=n)
    metrics_of = jax.jit(sj.parallel.exchange_metrics)
    enough = sj.parallel.measure_capacity(table, ids, margin=1)
    assert sj.parallel.measure_capacity(table, [ids, ids[:8]]) >= enough
    abstract = sharded(table=jax.ShapeDtypeStruct((V, D), jnp.float32))
    assert sj.parallel.measure_capacity(abstract, ids, margin=1) == enough
    metrics = metrics_of(with_capacity(enough), ids)
    assert (int(metrics.rounds), int(metrics.largest)) == (1, enough)
    # ids and rows to and from the three other devices
    assert float(metrics.bytes) == 3 * enough * (4 + 4 * D)
    narrow = sharded(wire_dtype=jnp.bfloat16, capacity=enough)
    assert float(metrics_of(narrow, ids).bytes) == 3 * enough * (4 + 2 * D)
    assert int(metrics_of(with_capacity(enough - 1), ids).rounds) == 2
    none = metrics_of(table, np.zeros(0, np.int32))
    assert int(none.rounds) == int(none.bytes) == 0
    bags = sj.SegmentTensor.from_lists([[3, 5, 3], [], [7]])
    assert int(metrics_of(table, bags).rows) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, 2), (3, 2), (V, 0)])
def test_few_rows_no_columns_and_no_ids(shape):
    table, ids = table_of(*shape), np.arange(-2, 7)
    look = functools.partial(sj.lookup, mode="zero")

    @jax.jit
    def run(t):
        total = lambda t, ids: jnp.sum(look(t, ids))
        grad = functools.partial(sj.grad(total, tables=True), t)
        moved = optax.apply_updates(t, -grad(ids))
        return look(t, ids), moved, look(t, ids[:0].reshape(0, 5)), grad(ids[:0])

    held = sharded(table=table)
    rows, moved, none, grad = run(held)
    np.testing.assert_array_equal(whole(held), table)
    np.testing.assert_array_equal(rows, dense_rows(table, ids))
    read = (np.arange(shape[0]) < 7).astype("f")
    np.testing.assert_array_equal(whole(moved), table - read[:, None])
    assert none.shape == (0, 5, shape[1]) and grad.values.capacity == 0


@pytest.mark.slow
def test_ids_of_any_kind(x64):
    all_ids = [
        np.array([[2**40, -1], [5, 100]]),
        np.array([200, 7], np.uint8),
        jnp.array(100),
        [3, 3],
    ]
    read = jax.jit(lambda t: [sj.lookup(t, ids) for ids in all_ids])
    for rows, want in zip(read(sharded()), read(TABLE)):
        assert rows.dtype == want.dtype == jnp.float32
        np.testing.assert_array_equal(rows, want)
    table = sharded(kind=AxisType.Explicit)
    ids = np.array([3, -3, 2**32 + 3, -(2**32) - 3, V])
    nearest = np.clip(ids + V * (ids < 0), 0, V - 1)  # as JAX indexes
    np.testing.assert_array_equal(jax.jit(lambda t: t[ids])(table), TABLE[nearest])


@pytest.mark.window
@BOTH_KINDS
def test_jit_finds_the_devices_of_the_mesh(kind):
    """Although neither table nor ids are on them, without jax.set_mesh."""
    loose = sharded(kind=kind).map(lambda x: jnp.asarray(np.asarray(x)))
    assert len(loose.values.sharding.device_set) == 1
    look = jax.jit(functools.partial(sj.lookup, mode="zero"))
    np.testing.assert_array_equal(look(loose, IDS), dense_rows(TABLE, IDS))


@pytest.mark.window
def test_ids_on_other_devices():
    devices, ids, table = jax.devices(), IDS[:, :2].clip(0), sharded()
    got = sj.lookup(table, jax.device_put(ids[0], devices[1]))
    np.testing.assert_array_equal(got, TABLE[ids[0]])
    elsewhere = jax.device_put(ids, devices[5]), place(mesh_of(2), ids, None, "x")
    for read in (sj.lookup, sj.embedding_bag):
        for wrong in elsewhere:
            with pytest.raises(ValueError, match="device"):
                read(table, wrong)


@pytest.mark.slow
def test_explicit_axes_lay_rows_out_as_ids():
    table = sharded(kind=AxisType.Explicit)  # and no jax.set_mesh

    @jax.jit
    def both(ids):
        bags = sj.embedding_bag(table, ids, mode="zero")
        return sj.lookup(table, ids, mode="zero"), bags

    want = dense_rows(TABLE, IDS.reshape(8, 3))
    for part in ("x", None):
        ids = place(table.mesh, IDS.reshape(8, 3), part, None)
        program = both.lower(ids).compile()
        rows, bags = program(ids)
        np.testing.assert_array_equal(rows, want)
        np.testing.assert_allclose(bags, want.sum(1), rtol=1e-5, atol=1e-6)
        assert rows.sharding.spec == P(part, None, None)
        assert bags.sharding.spec == P(part, None)
        # Sharded ids: nothing is gathered on the way.
        assert ("all-gather" in str(program.as_text())) == (part is None)


# ------------------------------------------------------------------ gradients


def every_lookup(look, t, ids):
    """A loss of lookups in a scan, a branch, `checkpoint`, `jit`, `vmap`, and more."""
    rows = jnp.sin(look(t, ids[0])) * jnp.cos(look(t, ids[1]))
    step = lambda total, i: (total + jnp.sum(jnp.sin(look(t, i))), None)
    yes = lambda: jnp.sum(look(t, ids[0]) ** 2) + jnp.sum(look(t, ids[1]))
    again = jax.checkpoint(jax.jit(lambda i: jnp.sin(look(t, i))))(ids)
    half = lambda x: (2 * x).astype(jnp.float16)
    view = t.map(half) if isinstance(t, sj.parallel.ShardedTable) else half(t)
    return (
        jnp.sum(rows)
        + jnp.sum(look(t, ids[2, :6]) ** 2)
        + lax.scan(step, jnp.zeros(()), ids)[0]
        + lax.cond(ids[0, 0] > -9, yes, lambda: jnp.sum(look(t, ids[2])))
        + jnp.sum(again**2)
        + jnp.sum(jnp.sin(jax.vmap(lambda i: look(t, i))(ids)))
        + jnp.sum(jnp.sin(look(view, ids)).astype(jnp.float32))
    )


@functools.cache
def gradient_of_every_lookup():
    plain = functools.partial(every_lookup, functools.partial(sj.lookup, mode="zero"))
    return jax.jit(jax.grad(plain))(jnp.asarray(TABLE), IDS)


@pytest.mark.window
@pytest.mark.parametrize(
    "mesh, kind",
    [(((2, 4), ("d", "x")), AxisType.Auto), (((4,),), AxisType.Explicit)],
)
def test_gradient(mesh, kind):
    want = gradient_of_every_lookup()
    look = functools.partial(lookup, mode="zero", capacity=2)
    table = sharded(*mesh, kind=kind)

    @jax.jit
    def both(table, ids):
        g = sj.grad(functools.partial(every_lookup, look))(table, ids)
        return g, g.map(lambda rows: rows.coalesce()), table.values + g.values

    with jax.set_mesh(table.mesh):
        g, merged, moved = both(table, IDS)
        assert not g.values.is_merged
        assert_at_owners(merged.values, table)
        found = whole((g, merged, table.map(lambda _: moved)))
    assert_close(found, (want, want, TABLE + want))


@pytest.mark.slow
def test_vmap_over_ids_and_tables():
    table = sharded()
    values = jnp.stack([table.values, 2 * table.values])
    look = functools.partial(lookup, mode="zero", capacity=2)

    def loss(values, look, table_of):
        rows = jax.vmap(lambda v, ids: look(table_of(v), ids))(values, IDS[:2])
        return jnp.sum(jnp.sin(rows))

    of = lambda v: table.map(lambda _: v)
    grad = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    plain = functools.partial(sj.lookup, mode="zero")
    assert_close(
        grad(values, look, of), grad(values, plain, lambda v: of(v).to_dense())
    )


@pytest.mark.window
def test_tangents_dense_gradient_and_second_derivative():
    ids, table = IDS.clip(0, 9), sharded()  # many duplicates
    look = functools.partial(lookup, capacity=3)

    def norm_of_gradient(read, t):
        loss = lambda t: jnp.sum(jnp.sin(read(t, ids)) ** 2)
        leaf = jax.tree.leaves(jax.grad(loss)(t))[0]
        return jnp.sum(leaf**2) + loss(t)

    second = lambda read: jax.jit(jax.grad(functools.partial(norm_of_gradient, read)))
    got, want = second(look)(table), second(sj.lookup)(jnp.asarray(TABLE))
    assert isinstance(got.values, jax.Array)
    np.testing.assert_allclose(whole(got), want, rtol=1e-4, atol=1e-4)
    # The tangents of rows are rows of the tangents.
    tangents = (table,), (table.map(lambda x: 2 * x),)
    rows, found = jax.jit(functools.partial(jax.jvp, lambda t: look(t, ids)))(*tangents)
    np.testing.assert_array_equal(found, 2 * np.asarray(rows))


# ------------------------------------------------------------------ bags


@pytest.mark.parametrize(
    "layout, combiner, weighted, kind",
    [
        pytest.param(
            *("segments", "sqrtn", True, AxisType.Explicit), marks=pytest.mark.window
        ),
        ("padded", "max", False, AxisType.Explicit),
        ("segments", "logsumexp", False, AxisType.Auto),
        ("segments", "none", False, AxisType.Auto),
    ],
)
def test_embedding_bag(layout, combiner, weighted, kind):
    rng = np.random.default_rng(4)
    shape = (6, 3) if layout == "padded" else (10,)
    ids = rng.integers(-1, V, shape).astype(np.int32)
    ids.flat[:3] = -1  # a bag of padding
    bags: Any = () if layout == "padded" else (np.sort(rng.integers(-1, 4, 10)), 4)
    w = jnp.asarray(rng.normal(size=shape).astype(np.float32)) if weighted else None
    options: dict[str, Any] = dict(combiner=combiner, padding_id=-1, mode="zero")

    def loss(t, w):
        return jnp.sum(jnp.sin(sj.embedding_bag(t, ids, *bags, weights=w, **options)))

    which = (0, 1) if weighted else (0,)
    want, want_g = jax.jit(jax.value_and_grad(loss, which))(jnp.asarray(TABLE), w)
    table = sharded(kind=kind)
    with jax.set_mesh(table.mesh):
        got, g = jax.jit(sj.value_and_grad(loss, which))(table, w)
        assert_close((got, whole(g)), (want, want_g), rtol=1e-4)


def test_sqrtn_of_any_weights():
    # Bag 1 lies on three devices, and its largest weight is not on the first one.
    ids, bags = np.arange(8, dtype=np.int32), np.array([0, 1, 1, 1, 1, 1, 4, 2])
    w = jnp.array([1.0, 1e-3, 2.0, 0.5, 3.0, 1.0, 9.0, 0.0])

    def loss(t, w, size):
        x = sj.embedding_bag(t, ids, bags, 4, weights=size * w, combiner="sqrtn")
        return jnp.sum(jnp.sin(x))

    want = jax.jit(jax.value_and_grad(loss, (0, 1)))(jnp.asarray(TABLE), w, 1.0)
    find = jax.jit(sj.value_and_grad(loss, (0, 1)))
    for size in (1e-20, 1e20):
        assert_close(whole(find(sharded(), w, size)), want, rtol=1e-4)


def test_bags_of_complex_rows():
    table = (TABLE + 1j * table_of(V, D, seed=1)).astype(np.complex64)
    ids, bags, w = np.arange(8), np.arange(8) // 3, np.arange(8.0, dtype="f")
    sums = np.stack([w[bags == k] @ table[:8][bags == k] for k in range(3)])
    by = np.array([[w[bags == k].sum(), (w[bags == k] ** 2).sum()] for k in range(3)])
    want = {"mean": sums / by[:, :1], "sqrtn": sums / np.sqrt(by[:, 1:])}
    bag = functools.partial(sj.embedding_bag, weights=w)
    read = lambda t: {c: bag(t, ids, bags, 3, combiner=c) for c in want}
    for t in (sharded(table=table), table):
        assert_close(jax.jit(read)(t), want)


@pytest.mark.slow
@BOTH_KINDS
def test_bags_without_elements(kind):
    shapes, table = [(8, 0), (3, 0), (0, 4)], sharded(kind=kind)
    combiners = "sum", "mean", "max", "none"
    bags = lambda t: [
        sj.embedding_bag(t, np.zeros(shape, np.int32), combiner=combiner)
        for shape, combiner in itertools.product(shapes, combiners)
    ]
    total = lambda found: (sum(jnp.sum(x) for x in found), found)
    loss = lambda t: total(bags(t))
    find = sj.value_and_grad(loss, has_aux=True, tables=True)
    with jax.set_mesh(table.mesh):
        (_, found), grad = jax.jit(find)(table)
        assert_close(found, jax.jit(bags)(jnp.asarray(TABLE)))
    assert not np.asarray(whole(grad)).any()


# ------------------------------------------------------------------ models


def make_ids():
    ids = np.random.default_rng(1).integers(0, V, 16).astype(np.int32)
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


# How models read tables that they take for arrays. The result has rows of D numbers.
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
    "bag of an array": lambda t, i: sj.embedding_bag(jnp.asarray(t), i.reshape(8, 2)),
    "dot of an array": lambda t, i: sj.dot(csr(i), jnp.asarray(t)),
}


def all_reads(params, ids):
    """A loss that depends on every number that is read, each in another way."""
    rng, total = np.random.default_rng(2), 0.0
    for read in READS.values():
        rows = read(params["table"], ids)
        weights = rng.normal(size=rows.shape).astype(np.float32)
        total += jnp.sum(jnp.tanh(rows) * weights * params["w"])
    return total


@pytest.mark.slow
def test_models_read_as_of_an_array():
    params: Any = {"table": jnp.asarray(TABLE), "w": jnp.ones(())}
    expected = jax.jit(jax.value_and_grad(all_reads))(params, make_ids())
    params["table"] = sharded(8)
    value, grads = jax.jit(sj.value_and_grad(all_reads))(params, make_ids())
    assert isinstance(grads["table"].values, sj.parallel.ShardedRows)
    assert_close((value, whole(grads)), expected)
    # Ids out of range read as from an array, but are not in the gradient.
    out = lambda table: jnp.sum(table[jnp.array([V + 5, -V - 5, 3])])
    found, grad = jax.jit(sj.value_and_grad(out))(params["table"])
    assert int(grad.values.num_rows()) == 1
    np.testing.assert_allclose(found, TABLE[[-1, 0, 3]].sum(), 1e-5)


@pytest.mark.slow
def test_without_a_gradient():
    table, ids = sharded(8), make_ids()
    np.testing.assert_array_equal(table[ids], TABLE[ids])
    first = jax.jit(lambda t, i: t[i][0])(table, ids)
    np.testing.assert_array_equal(first, TABLE[ids[0]])
    # The table may be closed over, arguments and results may be anything.
    run = sj.parallel.forward(lambda name, i: {name: take(table, i), "n": 3})
    found = jax.jit(run, static_argnums=0)("rows", ids)
    np.testing.assert_array_equal(found["rows"], TABLE[ids])
    assert run("a", ids)["n"] == found["n"] == 3
    # A table that JAX differentiates has the gradient of an array.
    dense = jax.jit(jax.grad(lambda t: jnp.sum(t[ids] ** 2)))(jnp.asarray(TABLE))
    loss = lambda t: jnp.sum(sj.parallel.forward(take)(t, ids) ** 2)
    np.testing.assert_allclose(whole(jax.jit(jax.grad(loss))(table)), dense, rtol=1e-6)
    # Sparse, over Explicit axes and with ids that are sharded.
    table = sharded(8, kind=AxisType.Explicit)
    split = place(table.mesh, V - ids, "x")
    grad = jax.jit(sj.grad(lambda t, ids: jnp.sum(t[-ids] ** 2)))(table, split)
    np.testing.assert_allclose(whole(grad), dense, rtol=1e-6)


def test_a_frozen_table_and_a_trainable_one():
    def loss(train, frozen, ids):
        return jnp.sum(take(train, ids) * jax.jit(take)(frozen, ids)), take(frozen, 0)

    run, ids = jax.jit(sj.value_and_grad(loss, has_aux=True)), make_ids()
    (value, row), grad = run(sharded(8), sharded(8, table=2 * TABLE), ids)
    np.testing.assert_allclose(value, np.sum(2 * TABLE[ids] ** 2), rtol=1e-5)
    np.testing.assert_array_equal(row, 2 * TABLE[0])
    expected = np.zeros_like(TABLE)
    np.add.at(expected, np.asarray(ids), 2 * TABLE[ids])
    np.testing.assert_allclose(whole(grad), expected, rtol=1e-5)


@pytest.mark.window
def test_uses_of_a_whole_table_name_the_line():
    table, ids = sharded(8), make_ids()
    for wrong in [
        lambda t: jnp.sum(jnp.asarray(t) ** 2),
        lambda t: jnp.sum(t @ jnp.ones(D)),
        lambda t: jnp.sum(take(t, ids)) + jnp.max(lax.stop_gradient(jnp.asarray(t))),
        lambda t: jnp.sum(jnp.transpose(t)),
        lambda t: jnp.sum(jnp.take(t, jnp.array([1]), axis=1)),
    ]:
        for run in (sj.grad(wrong), sj.parallel.forward(wrong), sj.explain(wrong)):
            with pytest.raises(sj.DensifyError, match=r"test_read.py:\d"):
                run(table)
    with pytest.raises(TypeError, match="sparsejax.parallel.forward"):
        jax.jit(take)(table, ids)


def test_programs_of_a_walk_are_not_taken_for_others():
    """JAX keeps its traces for `jit`, with a walk and without."""
    table, rows = sharded(8), jax.jit(lambda t, i: t[i])
    loss = lambda t, i: jnp.sum(rows(t, i))
    for _ in range(2):
        sj.grad(loss)(table, make_ids())
        np.testing.assert_array_equal(rows(table, make_ids()), TABLE[make_ids()])
    program = jax.make_jaxpr(jax.jit(sj.grad(loss)))(table, make_ids())
    assert "sharded_table" not in {e.primitive.name for e in all_eqns(program.jaxpr)}
