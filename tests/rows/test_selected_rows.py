"""SelectedRows and concatenate, against the dense array that they stand for."""

import operator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import sparsejax as sj
from cases import ROW_CASES, IdCase, names
from helpers import (
    assert_same_bits,
    assert_trees_close,
    dense,
    dense_rows,
    in_range,
    make_rows,
    to_dense,
)
from sparsejax import _compat


V = 7


def ones(*shape, dtype: Any = np.float32):
    """An array on the device, for which nothing is compiled."""
    return jnp.asarray(np.ones(shape, dtype))


NOTHING = (
    IdCase("no_slots", np.zeros(0, np.int32), V),
    IdCase("no_slots_and_no_rows", np.zeros(0, np.int32), 0),
    IdCase("no_rows", np.zeros(3, np.int32), 0),
)
CASES = [*ROW_CASES, *NOTHING]


# ------------------------------------------------------------------ every operation

SOME_IDS = (3, 0, 0, 6, 260, -1, 2)  # 260 is 4 to an int8 or uint8


def arithmetic(a: Any, b: Any, array: Any) -> Any:
    """What is written alike for SelectedRows and for arrays."""
    sums = [a + b, a - b * 3, sum([a, a, b]) - 0, 0 - a]
    products = [-a, a * 2, np.float32(2) * a, a / 2, a * (a + b)]
    return [*sums, *products, array + a, a + array, array - a, a - array]


def every_operation(a: Any, b: Any, array: Any) -> Any:
    """All that a SelectedRows can do, as one program."""
    ids = jnp.array(SOME_IDS)
    merged, overflow = a.coalesce(capacity=2, return_overflow=True)
    return {
        "to_dense": a.to_dense(),
        "arithmetic": to_dense(arithmetic(a, b, array)),
        "coalesce": a.coalesce().to_dense(),
        "coalesced rows": a.coalesce().rows,
        "coalesced values": a.coalesce().values,
        "coalesce twice": a.coalesce().coalesce().values,
        "coalesce wide": a.coalesce(capacity=a.capacity + 3).to_dense(),
        "coalesce short": merged.get(merged.rows),
        "overflow": overflow,
        "get": a.get(ids),
        "get matrix": a.get(ids[:6].reshape(3, 2)),
        "get scalar": a.get(3),
        "get none": a.get([]),
        "find": a.find(ids)[1],
        "retain": a.retain(ids).to_dense(),
        "retain one": a.retain(np.array(3)).to_dense(),
        "retain none": a.retain([]).to_dense(),
        "map": a.map(lambda v: v * 2).to_dense(),
        "astype": a.astype(jnp.float16).to_dense(),
        "concatenate": sj.concatenate([a, b, -a]).to_dense(),
        "num_rows": a.num_rows(),
    }


jitted: Any = jax.jit(every_operation)


def every_operation_dense(rows, values, others, height, array):
    """The same of the rows, and of `others` at the rows in reverse, by NumPy."""
    d, e = dense(rows, values, height), dense(rows[::-1], others, height)
    ids = np.array(SOME_IDS)
    keep = in_range(rows, height)
    named = np.unique(np.asarray(rows)[keep].astype(np.int64))
    padded = np.append(named, [height] * len(rows))
    distinct = padded[: min(len(rows), height)]
    wanted = np.arange(height).reshape(-1, *[1] * (d.ndim - 1))
    return {
        "to_dense": d,
        "arithmetic": arithmetic(d, e, array),
        "coalesce": d,
        "coalesced rows": distinct,
        "coalesced values": dense_rows(d, distinct),
        "coalesce twice": dense_rows(d, distinct),
        "coalesce wide": d,
        "coalesce short": dense_rows(d, np.append(named, [height] * 2)[:2]),
        "overflow": np.int32(max(len(named) - 2, 0)),
        "get": dense_rows(d, ids),
        "get matrix": dense_rows(d, ids[:6].reshape(3, 2)),
        "get scalar": dense_rows(d, 3),
        "get none": d[:0],
        "find": np.isin(ids, named),
        "retain": np.where(np.isin(wanted, ids), d, 0),
        "retain one": np.where(wanted == 3, d, 0),
        "retain none": 0 * d,
        "map": 2 * d,
        "astype": d.astype(np.float16),
        "concatenate": e,
        "num_rows": np.int32(keep.sum()),
    }


def check_every_operation(rows, height, row_shape=(3,), seed=0, run=jitted):
    """On the rows, and on them in reverse; empty slots may hold anything."""
    garbage = (np.nan, np.inf, 3e38)[seed % 3]
    a, values = make_rows(rows, height, row_shape, seed=seed, garbage=garbage)
    b, others = make_rows(rows[::-1], height, row_shape, seed=seed + 1)
    array = np.arange(np.prod(a.shape)).reshape(a.shape).astype(np.float32)
    found = run(a, b, jnp.asarray(array))
    expected = every_operation_dense(rows, values, others, height, array)

    def compare(path, got, want):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(got, want.astype(got.dtype), err_msg=name)
        assert got.shape == want.shape, name

    jax.tree_util.tree_map_with_path(compare, found, expected)
    return a, found


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_every_operation(case):
    rows = case.ids if case in NOTHING else case.padded
    check_every_operation(rows, case.height)


@pytest.mark.slow
@pytest.mark.parametrize("row_shape", [(), (2, 3), (0,)])
def test_every_operation_on_rows_of_any_rank(row_shape):
    a, _ = check_every_operation(np.array([4, 0, 4, 7, -1, 2]), V, row_shape)
    assert a.shape == (V, *row_shape) and a.ndim == 1 + len(row_shape)


@pytest.mark.slow
def test_every_operation_outside_of_jit():
    _, found = check_every_operation(np.array([4, 0, 4, 7]), V, run=every_operation)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(found))


@pytest.mark.slow
def test_every_operation_with_64_bit_ids(x64):
    rows = np.array([4, 0, 4, 7, -1, 2**32 + 2], np.int64)
    a, found = check_every_operation(rows, V)
    assert a.rows.dtype == np.int64 and a.dtype == np.float32
    kinds = {"find": "bool", "astype": "float16", "coalesced rows": "int64"}
    kinds |= {"num_rows": "int32", "overflow": "int32"}
    dtypes = {k: {x.dtype for x in jax.tree.leaves(v)} for k, v in found.items()}
    assert all(x == {jnp.dtype(kinds.get(k, "float32"))} for k, x in dtypes.items())


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.lists(st.integers(-2, V + 2), min_size=9, max_size=9), st.integers(0, 2**16)
)
def test_every_operation_of_any_rows(rows, seed):
    check_every_operation(np.array(rows, np.int32), V, seed=seed)


def test_ids_too_narrow_for_the_height_are_widened():
    merged = jax.jit(sj.SelectedRows.coalesce, static_argnums=1)
    a = sj.SelectedRows(np.array([255, 3], np.uint8), ones(2), 300)
    assert a.rows.dtype == jnp.int32
    assert merged(a).rows.tolist() == [3, 255]
    kept = sj.SelectedRows(np.array([254, 3], np.uint8), ones(2), 255)
    assert kept.rows.dtype == jnp.uint8
    assert merged(kept, 4).rows.tolist() == [3, 254, 255, 255]


def test_numpy_ids_of_64_bits_are_never_cut():
    rows = np.array([2**40 + 1, 2, -(2**40) + 3], np.int64)
    a = sj.SelectedRows(rows, ones(3, 2), V)
    assert a.num_rows() == 1
    assert a.get(np.array([2**40 + 2, 2])).tolist() == [[0, 0], [1, 1]]
    assert sj.SelectedRows([], ones(0, 2), V).rows.dtype == jnp.int32


def test_a_height_beyond_32_bits(x64):
    ids = [2**33, 2**33 + 1, 2**33 + 2]
    a = sj.SelectedRows(jnp.array([2**33, 2**33, 5]), ones(3, 1), 2**33 + 2)
    merged, got = jax.jit(lambda a: (a.coalesce(), a.get(ids)))(a)
    assert merged.rows.tolist() == [5, 2**33, 2**33 + 2]
    assert got.tolist() == [[2], [0], [0]]
    small = sj.SelectedRows(jnp.array([5], jnp.int32), ones(1, 1), 2**33)
    assert small.rows.dtype == jnp.int64


@pytest.mark.slow
def test_every_operation_under_vmap():
    parts = [
        make_rows(rows, V, seed=i)[0] for i, rows in enumerate(([4, 0, 4], [V] * 3))
    ]
    batch, array = jax.tree.map(lambda *x: jnp.stack(x), *parts), ones(V, 3)
    every = lambda a, x: (every_operation(a, a, x), a.coalesce(capacity=1).values)
    got, cut = jax.jit(jax.vmap(every, (0, None)))(batch, array)
    got = jax.tree.map(np.asarray, got)
    for i, part in enumerate(parts):
        found = jax.tree.map(operator.itemgetter(i), got)
        assert_trees_close(found, jitted(part, part, array))
    # Overflow in one of a batch is that one's.
    assert np.isnan(cut[0]).all() and np.isfinite(cut[1]).all()


# ------------------------------------------------------------------ coalesce


def test_coalesce_gives_equal_bits():
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 5, 200).astype(np.int32)
    values = rng.normal(size=(200, 3)).astype(np.float32)
    a = sj.SelectedRows(rows, values, 5)
    first, again = (jax.jit(lambda a: a.coalesce())(a) for _ in range(2))
    assert_same_bits(again.values, first.values)
    if jax.default_backend() == "cpu":  # summed in the order of the slots
        expected = np.zeros((5, 3), np.float32)
        np.add.at(expected, rows, values)
        assert_same_bits(first.values, expected)


def test_float32_updates_of_a_bfloat16_table_round_once():
    table = ones(3, 2, dtype=jnp.bfloat16)
    values = np.full((4, 2), 2.0**-9, np.float32)
    a = sj.SelectedRows(jnp.array([1, 1, 1, 3]), values, 3)
    out = table + a
    assert out.dtype == jnp.bfloat16
    exact = 1 + np.float32(dense(a.rows, values, 3))
    assert_same_bits(out, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["int8", "bool", "uint8", "float64", "complex64"])
def test_other_dtypes_stay(dtype, x64):
    """Booleans, as those of `x.map(jnp.isfinite)`, add up to whether any is true."""
    values = np.array([[1], [2], [3], [0]]).astype(dtype)
    a = sj.SelectedRows(np.array([1, 0, 1, 2]), values, 3)
    want = dense(a.rows, values, 3).astype(dtype)
    every = lambda a: (
        a.to_dense(),
        jnp.zeros((3, 1), dtype) + a,
        a.coalesce().to_dense(),
        a.get(jnp.arange(3)),
    )
    for got in (a.to_dense(), *jax.jit(every)(a)):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, want)
    assert dtype == "bool" or jax.eval_shape(lambda a: a * 2, a).dtype == dtype


def test_coalesce_overflow():
    rows = jnp.array([4, 0, 6, 4, V])
    a = sj.SelectedRows(rows, ones(5, 2), V)

    @jax.jit
    def run(a):
        told = [a.coalesce(capacity=c, return_overflow=True) for c in (2, 3, 0)]
        return a.coalesce(capacity=2), a.coalesce(capacity=3), told

    inside, enough, ((left, overflow), (_, none), (empty, all_of_them)) = run(a)
    assert np.isnan(inside.values).all() and inside.rows.tolist() == [0, 4]
    assert np.isfinite(enough.values).all()
    assert overflow.dtype == jnp.int32 and overflow == 1
    assert left.rows.tolist() == [0, 4]
    assert left.values.tolist() == [[1, 1], [2, 2]]
    assert none == 0
    assert all_of_them == 3 and empty.capacity == 0
    # Integers cannot tell it inside jit, so they need `return_overflow`.
    counts = jax.jit(lambda a: a.astype(int).coalesce(1, return_overflow=True))(a)
    assert counts[0].rows.tolist() == [0] and counts[1] == 2


def test_from_dense():
    x = np.array([[0, 0], [0, 2], [0, 0], [np.nan, 0]], np.float32)
    make = sj.SelectedRows.from_dense
    outside = make(x)
    inside, wide, short = jax.jit(lambda x: [make(x), make(x, 3), make(x, 1)])(x)
    for a, rows in (outside, [1, 3]), (inside, [1, 3, 4, 4]), (wide, [1, 3, 4]):
        assert a.rows.tolist() == rows and a.height == 4
        assert_trees_close(jax.jit(sj.SelectedRows.to_dense)(a), x)
    assert wide.values.tolist()[2] == [0, 0]
    assert np.isnan(short.values).all()


@pytest.mark.parametrize("shape", [(5,), (5, 2, 3), (0, 3), (5, 0)])
def test_from_dense_of_other_shapes(shape):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 3
    a = sj.SelectedRows.from_dense(x)
    assert a.shape == shape
    np.testing.assert_array_equal(jax.jit(sj.SelectedRows.to_dense)(a), x)


def test_empty_slots_get_no_gradient():
    a, _ = make_rows(np.array([4, V, 0, -1, 4]), V)
    x = np.arange(V * 3, dtype=np.float32).reshape(V, 3)

    def loss(values):
        b = sj.SelectedRows(a.rows, values, V)
        parts = (
            (x + b) * x,
            b.coalesce().map(jnp.sin).to_dense(),
            b.get(jnp.array([4, 9])),
            b.retain([4]).to_dense(),
        )
        return sum(jnp.sum(part) for part in parts)

    grad = np.asarray(jax.jit(jax.grad(loss))(a.values))
    assert np.isfinite(grad).all()
    assert (grad[np.array([1, 3])] == 0).all() and (grad[0] != 0).all()


# ------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize(
    "scalar", [3, 2.0, np.float32(3), np.int32(3), jnp.float32(3), np.array(3.0)]
)
def test_scalars_do_not_widen(scalar, x64):
    dtype = jnp.dtype("bfloat16")
    values = np.array([1.0, 2.0, 4.0])
    a = sj.SelectedRows(jnp.array([1, 0, 1]), values.astype(dtype), V)
    assert_same_bits((a * scalar).values, (values * float(scalar)).astype(dtype))
    assert_same_bits((a / scalar).values, (values / float(scalar)).astype(dtype))
    assert (scalar * a).dtype == jax.jit(operator.mul)(a, scalar).dtype == dtype


def test_sums_and_products_promote():
    a = sj.SelectedRows(jnp.array([1, 1]), ones(2, 1, dtype=jnp.bfloat16), 3)
    b = sj.SelectedRows(np.array([1], np.int8), ones(1, 1), 3)
    narrow, wide = ones(3, 1, dtype=jnp.bfloat16), ones(3, 1)
    run = jax.jit(lambda a, b, x, y: ((a + b, a * b, b - a), (x + b, y - a)))
    sums, arrays = run(a, b, narrow, wide)
    for got, want in zip(sums, (3, 2, -1), strict=True):
        assert got.dtype == jnp.float32
        assert dense(got.rows, got.values, 3)[:, 0].tolist() == [0, want, 0]
    assert sj.concatenate([a, b]).dtype == jnp.float32 and sj.concatenate([a]) is a
    # An array keeps its type, as with array.at[...].add.
    assert [x.dtype for x in arrays] == [jnp.bfloat16, jnp.float32]


# ------------------------------------------------------------------ in Python


def test_nothing_densifies_silently():
    a: Any = make_rows([4, 0], V)[0]
    refused = np.array, np.ravel, np.sin, jnp.sum, jnp.sin, operator.abs
    for f in (*refused, lambda a: 4 in a):
        with pytest.raises(TypeError):
            f(a)


@pytest.mark.parametrize("key", [..., True, np.array([True]), 1.5, "tea"])
def test_index_refuses(key):
    a: Any = make_rows([4, 0], V)[0]
    for table in (a, sj.quantize(a.to_dense())):
        with pytest.raises(TypeError, match="must be"):
            table[key]


_INDICES = [
    *(4, -3, 99, -99, np.int64(2**32 + 4), np.int64(-(2**32) - 3), np.uint8(255)),
    np.array([[4, -3], [V, -V - 1]]),
    np.array([-3, 4, 127, -128], np.int8),
    np.array([255, 4, 0, 6], np.uint8),
    np.array([2**32 - 1, 4, 2**31, 0], np.uint32),
    np.array([-3, 2**32 + 4, -(2**32), 2**31]),
    np.array([2**63 + 4, 4, 2**32 + 1, 0], np.uint64),
    np.zeros(0, int),
]


@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "x64"])
def test_index(wide):
    """They are read as the arrays that they stand for."""
    with _compat.enable_x64(wide):
        a, _ = make_rows([4, 0, 4, V, V - 1], V)
        array = jax.jit(sj.SelectedRows.to_dense)(a)
        quantized = jax.jit(sj.quantize)(array)
        arrays = array, jax.jit(sj.QuantizedTable.dequantize)(quantized)
        read = lambda tables, indices: [[t[ids] for ids in indices] for t in tables]
        # Without x64, jit itself cuts ids to 32 bits.
        constants = jax.jit(lambda tables: read(tables, _INDICES))
        tables = a, quantized
        both = jax.jit(read)(tables, _INDICES) if wide else constants(tables)
        for array, found in zip(arrays, both, strict=True):
            for ids, got in zip(_INDICES, found, strict=True):
                given = np.asarray(ids, object)
                places = np.clip(given + V * (given < 0), 0, V - 1).astype(int)
                np.testing.assert_array_equal(got, np.asarray(array)[places])


def test_repr():
    a = sj.SelectedRows(jnp.array([4, V, 0]), ones(3, 2), V)
    assert repr(a) == (
        "SelectedRows(rows=[4 - 0], values=float32[3,2], height=7, num_rows=2)"
    )
    long = sj.SelectedRows(np.arange(20, dtype=np.int32), ones(20), 99)
    assert "rows=[0 1 2 3 4 5 6 7 ...]" in repr(long)
    spec = jax.eval_shape(lambda a: a, a)
    assert repr(spec) == ("SelectedRows(rows=int32[3], values=float32[3,2], height=7)")
    seen = []
    jax.jit(lambda a: seen.append(repr(a)))(a)
    assert seen == [repr(spec)]
    placeholders = jax.tree.map(lambda _: None, a)
    assert repr(placeholders) == "SelectedRows(rows=None, values=None, height=7)"


# ------------------------------------------------------------------ gradients


@pytest.mark.slow
def test_gradients(x64):
    rng = np.random.default_rng(0)
    rows, ids = jnp.array([4, 0, 4, V, 2, -1]), jnp.array([[4, 2], [9, 4]])

    def everything(array, v):
        a, b = sj.SelectedRows(rows, v, V), sj.SelectedRows(rows, 2 * v, V)
        return (
            a.to_dense(),
            a.coalesce().values,
            a.coalesce(4, return_overflow=True)[0].values,
            a.coalesce(4).values,
            a.get(ids),
            a.retain(ids).values,
            array - a * 3,
            (array + a * b) ** 2,
            sj.concatenate([a, b]).coalesce().values,
            sj.SelectedRows.from_dense(v + 5, capacity=6).values,
        )

    args = rng.normal(size=(V, 2)), jnp.asarray(rng.normal(size=(6, 2)))
    check_grads(jax.jit(everything), args, order=1, modes=("fwd", "rev"))


def test_equality_is_refused_where_it_would_compare_identity():
    rows: Any = sj.SelectedRows(jnp.array([1]), ones(1, 2), 3)
    others = rows, rows.map(lambda v: v), rows.to_dense(), np.ones((3, 2)), 0.0
    calls = [(f, x) for f in (operator.eq, operator.ne) for x in others]
    calls += [(f, rows) for f in (jnp.array_equal, np.array_equal, np.allclose)]
    for compare, other in calls:
        for pair in (rows, other), (other, rows):
            with pytest.raises(TypeError, match="to_dense"):
                compare(*pair)
    assert rows != "rows" and rows is not None
    assert len({rows, rows.map(lambda v: v)}) == 2
