"""ShardedTable: which device stores which row, and how it acts in Python."""

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from helpers import assert_same_bits, whole
from one_device import assert_close, mesh_of, place, table_of


pytestmark = pytest.mark.usefixtures("eight_devices")

V, D = 101, 4
TABLE = table_of(V, D)
BOTH = ("d", "x")
shard_rows, shard_columns = sj.parallel.shard_rows, sj.parallel.shard_columns


def by_table(num_groups, heights=(50, 1, 0, 50)):
    """A layout in which table k is on group `5 * k % num_groups`."""
    groups = tuple(5 * k % num_groups for k in range(len(heights)))
    return sj.parallel.TableWise(heights, groups, num_groups)


# ------------------------------------------------------------------ layouts


@pytest.mark.parametrize(
    "shape, axis, layout, kind",
    [
        ((4,), "x", "mod", AxisType.Auto),
        ((4,), "x", "block", AxisType.Explicit),
        ((2, 2), BOTH, "mod", AxisType.Explicit),
        ((2, 2), BOTH, "block", AxisType.Auto),
        ((8,), "x", by_table(8), AxisType.Auto),
        ((2, 4), "x", by_table(4), AxisType.Explicit),
        ((8,), "x", by_table(8, (7, 0, 3, 11, 2, 1)), AxisType.Auto),
        ((2, 4), BOTH, by_table(2, (9, 4, 10, 0, 6)), AxisType.Auto),
        ((2,), "x", by_table(2, (3, 0, 8)), AxisType.Auto),
        ((4,), "x", by_table(4, (0, 0)), AxisType.Auto),
    ],
)
def test_tables_of_arrays_of_functions_and_in_jit(shape, axis, layout, kind):
    mesh = mesh_of(shape, BOTH[-len(shape) :], kind)
    by_group = isinstance(layout, sj.parallel.TableWise)
    array = TABLE[: layout.height] if by_group else TABLE
    height = len(array)
    with jax.set_mesh(mesh):
        table = shard_rows(array, mesh, axis, layout=layout)
        made = [jax.jit(lambda t: shard_rows(t, mesh, axis, layout=layout))(array)]
        if height:
            rows = array.__getitem__
            made += [shard_rows(rows, mesh, axis, layout=layout, height=height)]
        for other in made:
            np.testing.assert_array_equal(other.values, table.values)
            assert other.values.sharding == table.values.sharding
        np.testing.assert_array_equal(whole(table), array)
        ids = place(mesh, np.arange(-2, 110), mesh.axis_names)
        position = jax.jit(lambda t, ids: t.position(ids))(table, ids)
        back = np.asarray(jax.jit(lambda t, x: t.ids_at(x))(table, position))
        ids, position = np.asarray(ids), np.asarray(position)
        named = (ids >= 0) & (ids < height)
        stored = np.asarray(table.values)
        np.testing.assert_array_equal(stored[position[named]], array)
        assert len({*position[named]}) == height
        assert (position[~named] == len(stored)).all()
        np.testing.assert_array_equal(back, np.where(named, ids, height))
    # No device holds more than its own rows.
    for shard in table.values.addressable_shards:
        assert shard.data.shape == (table.rows_per_shard, D)
    if by_group:  # The rows of a table are on the devices of its group.
        devices = position[named] // max(table.rows_per_shard, 1)
        group = devices // (table.num_shards // layout.num_groups)
        np.testing.assert_array_equal(group, np.repeat(layout.groups, layout.heights))


@pytest.mark.window
def test_abstract_table():
    spec = jax.ShapeDtypeStruct((V, D), jnp.float32)
    table = shard_rows(spec, mesh_of(), "x")
    assert (table.shape, table.dtype, table.ndim) == ((V, D), jnp.float32, 2)
    assert table.values.shape == (104, D)
    assert "4 x 26 rows over 'x'" in repr(table)
    loss = lambda t: jnp.sum(sj.lookup(t, np.arange(24)))
    g = jax.eval_shape(sj.grad(loss), table)
    assert isinstance(g.values, sj.parallel.ShardedRows)
    assert (g.shape, g.values.capacity) == ((V, D), 24)


@pytest.mark.window
@pytest.mark.parametrize("layout", ["mod", "block"])
def test_a_function_of_ids_is_asked_for_each_row_once(layout):
    asked = []

    def rows(ids):
        asked.append(list(ids))
        return np.stack([TABLE[k] for k in ids])  # fails for no ids

    make: Any = functools.partial(shard_rows, mesh=mesh_of(), axis="x")
    made = make(rows, layout=layout, height=5)
    np.testing.assert_array_equal(whole(made), TABLE[:5])
    # The first call is for the shape and the dtype.
    assert asked[0] == [0] and sorted(sum(asked[1:], [])) == [0, 1, 2, 3, 4]
    assert all(asked)
    words = np.full((3, 2), "a")
    for wrong, error in (
        (lambda ids: np.ones((len(ids), 1 + int(ids[0] > 0))), ValueError),
        (lambda ids: np.float32(1), ValueError),
        (lambda ids: words[ids % 3], TypeError),
    ):
        with pytest.raises(error):
            make(wrong, layout=layout, height=9)


def test_columns():
    mesh, sharding = mesh_of(), NamedSharding(mesh_of(), P(None, "x"))
    for x in (TABLE, jnp.asarray(TABLE)):
        found = shard_columns(x, mesh, "x")
        assert found.sharding == sharding
        assert {s.data.shape for s in found.addressable_shards} == {(V, 1)}
        np.testing.assert_array_equal(found, x)
    made = jax.jit(lambda: shard_columns(jnp.ones((3, 5, D)), mesh, ["x"]))
    assert made().sharding.spec == P(None, None, "x")
    spec = jax.ShapeDtypeStruct((V, D), jnp.bfloat16)
    found = shard_columns(spec, mesh, "x")
    assert (found.shape, found.dtype, found.sharding) == ((V, D), spec.dtype, sharding)
    with pytest.raises(ValueError, match="AbstractMesh"):
        shard_columns(np.ones((8, 4)), AbstractMesh((4,), ("x",)), "x")


# ------------------------------------------------------------------ in Python


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
def test_gradients_are_summed_by_hand():
    table: Any = shard_rows(TABLE, mesh_of(), "x")
    all_ids = np.array([[0, 5, 5, 12, 1, 0, 7, -1], [12, 12, 3, 2, 5, 999, 0, 4]])
    loss = lambda table, ids: jnp.sum(jnp.sin(sj.lookup(table, ids, mode="zero")))
    find, find_dense = (jax.jit(grad(loss)) for grad in (sj.grad, jax.grad))
    a, b = (find(table, ids) for ids in all_ids)
    want_a, want_b = (np.asarray(find_dense(TABLE, ids)) for ids in all_ids)
    mean = jax.jit(lambda a, b: (a + b) / 2)(a, b)
    assert isinstance(mean.values, sj.parallel.ShardedRows)
    tx = sj.optim.lazy(optax.sgd(0.1))

    @jax.jit
    def by_hand(table, a, b, mean):
        # One step of the sum is one step of the dense sum.
        updates, _ = tx.update(mean, tx.init(table), table)
        sums = a - b, -(np.float32(3) * a), table + a, a - table, table * table
        return *sums, optax.apply_updates(table, updates), sj.optim.global_norm(a)

    *found, norm = by_hand(table, a, b, mean)
    want_mean = (want_a + want_b) / 2
    want = [want_mean, want_a + want_b, want_a - want_b, -3 * want_a, TABLE + want_a]
    want += [want_a - TABLE, TABLE * TABLE, TABLE - 0.1 * want_mean]
    assert_close(whole([mean, sum([a, b]), *found]), want)
    assert_close(norm, np.linalg.norm(want_a))


def test_arithmetic_is_of_tables_that_are_sharded_alike():
    table: Any = shard_rows(TABLE, mesh_of(), "x")
    half = table.map(lambda v: v.astype(jnp.bfloat16)) * jnp.float32(0.5)
    assert half.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="differ"):
        print(table + shard_rows(TABLE, mesh_of(), "x", layout="block"))
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
    table = shard_rows(TABLE, mesh_of(kind=AxisType.Explicit), "x")
    shallow, deep = copy.copy(table), copy.deepcopy(table)
    assert shallow.values is table.values and deep.values is not table.values
    assert jax.tree.structure(deep) == jax.tree.structure(table)
    assert_same_bits(deep.values, table.values)
    assert table[...] is table
