"""Reads of tables whose rows are sharded over devices: lookups and their gradients.

The oracle is a plain array on one device.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sparsejax as sj
from helpers import dense_rows, slow_but, whole
from one_device import assert_at_owners, assert_close, mesh_of, place, table_of


pytestmark = pytest.mark.usefixtures("eight_devices")

V, D, N_IDS = 101, 4, 64
TABLE = table_of(V, D)
IDS = np.random.default_rng(3).integers(-2, V + 2, (3, 8)).astype(np.int32)


def sharded(
    shape=(4,), names=("x",), axis: Any = "x", kind=AxisType.Auto, **options
) -> Any:
    return sj.parallel.shard_rows(TABLE, mesh_of(shape, names, kind), axis, **options)


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
        text = str(program.as_text())
        assert ("all-gather" in text) == (part is None)


@pytest.mark.slow
@pytest.mark.parametrize("height", [0, 3])
def test_few_rows_and_no_ids(height):
    table = table_of(height, 2)
    held = sj.parallel.shard_rows(table, mesh_of(), "x")
    assert held.shape == (height, 2)
    np.testing.assert_array_equal(whole(held), table)
    ids, no_ids = np.arange(-2, 7), np.zeros((0, 5), np.int32)
    loss = lambda t: jnp.sum(sj.lookup(t, no_ids[:, 0]))

    @jax.jit
    def run(t):
        rows = sj.lookup(t, ids, mode="zero")
        return rows, sj.lookup(t, no_ids), sj.grad(loss, tables=True)(t)

    rows, none, grad = run(held)
    np.testing.assert_array_equal(rows, dense_rows(table, ids))
    assert none.shape == (0, 5, 2)
    assert grad.values.capacity == 0


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


@pytest.mark.slow
def test_measured_capacity_is_one_round():
    table, ids = sharded(), np.random.default_rng(1).zipf(1.3, N_IDS) % V
    metrics_of = jax.jit(sj.parallel.exchange_metrics)
    enough = sj.parallel.measure_capacity(table, ids, margin=1)
    assert sj.parallel.measure_capacity(table, [ids, ids[:8]]) >= enough
    metrics = metrics_of(dataclasses.replace(table, capacity=enough), ids)
    assert int(metrics.rounds) == 1
    assert int(metrics.largest) == enough
    # ids and rows to and from the three other devices
    assert float(metrics.bytes) == 3 * enough * (4 + 4 * D)
    less = dataclasses.replace(table, capacity=enough - 1)
    assert int(metrics_of(less, ids).rounds) == 2
    none = metrics_of(table, np.zeros(0, np.int32))
    assert int(none.rounds) == int(none.bytes) == 0


@pytest.mark.window
def test_ids_on_other_devices():
    devices, ids = jax.devices(), IDS[:, :2].clip(0)
    bag = functools.partial(sj.embedding_bag, sharded())
    read = functools.partial(sj.lookup, sharded())
    got = read(jax.device_put(ids[0], devices[1]))
    np.testing.assert_array_equal(got, TABLE[ids[0]])
    for here in (read, bag):
        for wrong in (
            jax.device_put(ids, devices[5]),
            place(mesh_of(2), ids, None, "x"),
        ):
            with pytest.raises(ValueError, match="device"):
                here(wrong)


@pytest.mark.window
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_jit_finds_the_devices_of_the_mesh(kind):
    """Although neither table nor ids are on them, without jax.set_mesh."""
    loose = sharded(kind=kind).map(lambda x: jnp.asarray(np.asarray(x)))
    assert len(loose.values.sharding.device_set) == 1
    look = jax.jit(functools.partial(sj.lookup, mode="zero"))
    np.testing.assert_array_equal(look(loose, IDS), dense_rows(TABLE, IDS))


# ------------------------------------------------------------------ gradients


def _several(look, t, ids):
    rows = jnp.sin(look(t, ids[0])) * jnp.cos(look(t, ids[1]))
    return jnp.sum(rows) + jnp.sum(look(t, ids[2, :6]) ** 2)


def _in_scan(look, t, ids):
    step = lambda total, i: (total + jnp.sum(jnp.sin(look(t, i))), None)
    return lax.scan(step, jnp.zeros(()), ids)[0]


def _in_branch(look, t, ids):
    yes = lambda: jnp.sum(look(t, ids[0]) ** 2) + jnp.sum(look(t, ids[1]))
    return lax.cond(ids[0, 0] > -9, yes, lambda: jnp.sum(look(t, ids[2])))


def _in_checkpoint_and_jit(look, t, ids):
    rows = jax.checkpoint(jax.jit(lambda i: jnp.sin(look(t, i))))(ids)
    return jnp.sum(rows**2)


def _under_vmap(look, t, ids):
    return jnp.sum(jnp.sin(jax.vmap(lambda i: look(t, i))(ids)))


def _of_a_view(look, t, ids):
    half = lambda x: (2 * x).astype(jnp.float16)
    t = t.map(half) if isinstance(t, sj.parallel.ShardedTable) else half(t)
    return jnp.sum(jnp.sin(look(t, ids)).astype(jnp.float32))


PROGRAMS = [
    _several, _in_scan, _in_branch, _in_checkpoint_and_jit, _under_vmap, _of_a_view
]  # fmt: skip


@pytest.mark.window
@pytest.mark.parametrize("program", slow_but(PROGRAMS, _under_vmap))
def test_gradient(program):
    kind = AxisType.Explicit if program in (_several, _in_branch) else AxisType.Auto
    mesh = ((2, 4), ("d", "x")) if program is _in_scan else (4,)
    plain = functools.partial(program, functools.partial(sj.lookup, mode="zero"))
    want = jax.jit(jax.grad(plain))(jnp.asarray(TABLE), IDS)
    loss = functools.partial(
        program, functools.partial(lookup, mode="zero", capacity=2)
    )
    table = sharded(*mesh, kind=kind)

    @jax.jit
    def both(table, ids):
        g = sj.grad(loss)(table, ids)
        return g, g.map(lambda rows: rows.coalesce()), table.values + g.values

    with jax.set_mesh(table.mesh):
        g, merged, moved = both(table, IDS)
        assert not g.values.is_merged
        assert_at_owners(merged.values, table)
        found = whole((g, merged, table.map(lambda _: moved)))
    assert_close(found, (want, want, TABLE + want))


@pytest.mark.window
def test_a_read_is_one_primitive():
    """Its parameters are static: no rule hangs on a name, nothing is kept for each."""
    table = sharded()
    for capacity in (2, 3):
        look = functools.partial(lookup, mode="zero", capacity=capacity)
        eqns = jax.make_jaxpr(look)(table, IDS).jaxpr.eqns
        (read,) = (e for e in eqns if e.primitive.name == "read_sharded_rows")
        assert read.params["slots"] == capacity
    # Linear in the table: the tangents of rows are rows of the tangents.
    tangents = table.map(lambda x: 2 * x)
    rows, found = jax.jit(lambda t, d: jax.jvp(lambda t: look(t, IDS), (t,), (d,)))(
        table, tangents
    )
    np.testing.assert_array_equal(found, 2 * rows)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_vmap_over_ids_and_over_tables(shared):
    table = sharded()
    look = functools.partial(lookup, mode="zero", capacity=2)
    read = lambda values, ids: look(table.map(lambda _: values), ids)
    values = table.values if shared else jnp.stack([table.values, 2 * table.values])
    f = jax.vmap(read, in_axes=(None if shared else 0, 0))
    grad = jax.jit(jax.grad(lambda values, ids: jnp.sum(jnp.sin(f(values, ids)))))

    def want(values):
        dense = lambda v: table.map(lambda _: v).to_dense()
        tables = [values] * 2 if shared else values
        pairs = zip(tables, IDS)
        rows = [sj.lookup(dense(v), i, mode="zero") for v, i in pairs]
        return jnp.sum(jnp.sin(jnp.stack(rows)))

    got = grad(values, IDS[:2])
    expected = jax.jit(jax.grad(want))(values)
    assert_close(got, expected)


@pytest.mark.slow
def test_dense_gradient_and_second_derivative():
    table = sharded()
    ids = IDS.clip(0, 9)  # many duplicates

    def norm_of_gradient(read, grad, t):
        loss = lambda t: jnp.sum(jnp.sin(read(t, ids)) ** 2)
        leaf = jax.tree.leaves(grad(loss)(t))[0]
        return jnp.sum(leaf**2) + loss(t)

    look = functools.partial(lookup, capacity=3)
    second = lambda read: jax.grad(functools.partial(norm_of_gradient, read, jax.grad))
    got = jax.jit(second(look))(table)
    want = jax.jit(second(sj.lookup))(jnp.asarray(TABLE))
    assert isinstance(got.values, jax.Array)
    np.testing.assert_allclose(got.to_dense(), want, rtol=1e-4, atol=1e-4)
