"""scatter_assign and scatter_weighted_sum, against a loop.

The recorded answers of Caffe2: tests/docs/test_caffe2_mapping.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import sparsejax as sj
from cases import ID_CASES, names
from helpers import (
    assert_in_place,
    assert_no_dense,
    assert_same_bits,
    assert_trees_close,
    eqns_of,
    in_range,
    run_jitted,
)


V, D = 7, 3
(MATRIX,) = [case for case in ID_CASES if case.name == "matrix"]
RANKS = [(), (2, 3), (0,)]
each_case = pytest.mark.parametrize(
    "case, row_shape",
    [*((case, (D,)) for case in ID_CASES), *((MATRIX, shape) for shape in RANKS)],
    ids=[*names(ID_CASES), *map(str, RANKS)],
)


def integers(shape, dtype: Any = np.float32, seed=0):
    """Values that float32 sums exactly."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(dtype)


def given(case, row_shape):
    """A table, rows, and two arrays of values, which are NaN for rows out of range."""
    rows = case.padded
    values = [integers((*rows.shape, *row_shape), seed=s) for s in (1, 2)]
    for v in values:
        v[~in_range(rows, case.height)] = np.nan
    return integers((case.height, *row_shape)), rows, *values


# ------------------------------------------------------------------ the oracles


def flat(table, rows, values):
    """Pairs of a row in range, as a Python int, and its values."""
    rows = np.asarray(rows).reshape(-1).tolist()
    values = np.asarray(values).reshape(len(rows), *table.shape[1:])
    return [(r, v) for r, v in zip(rows, values) if 0 <= r < table.shape[0]]


def assigned(table, rows, values):
    """For each row of `table`, all that it may be afterwards."""
    pairs = flat(table, rows, values)
    return [[v for r, v in pairs if r == k] or [row] for k, row in enumerate(table)]


def weighted_sum(table, w0, rows, *pairs):
    out = np.asarray(table, np.float64).copy()
    for r in {r for r, _ in flat(table, rows, np.zeros((*rows.shape, *out.shape[1:])))}:
        out[r] *= w0
    for values, weight in zip(pairs[::2], pairs[1::2]):
        for r, v in flat(table, rows, np.asarray(values, np.float64)):
            out[r] += weight * v
    return out.astype(np.asarray(table).dtype)


# ------------------------------------------------------------------ values


def every_scatter(rows, table, v1, v2, w0, w1):
    add = lambda *args: sj.scatter_weighted_sum(table, args[0], rows, *args[1:])
    return sj.scatter_assign(table, rows, v1), (
        add(0.5, v1, 2.0, v2, -3.0),
        add(1, v1, 2.0),
        add(1.0, v1, -1),
        add(0, v2, 1),
        add(2),
        add(w0, v1, w1, v2, w0),
    )


@each_case
def test_assign_and_weighted_sum(case, row_shape):
    table, rows, v1, v2 = given(case, row_shape)
    w0, w1 = np.float32(3), np.float32(-2)
    want = (
        weighted_sum(table, 0.5, rows, v1, 2, v2, -3),
        weighted_sum(table, 1, rows, v1, 2),
        weighted_sum(table, 1, rows, v1, -1),
        weighted_sum(table, 0, rows, v2, 1),
        weighted_sum(table, 2, rows),
        weighted_sum(table, w0, rows, v1, w1, v2, w0),
    )
    first, sums = run_jitted(every_scatter, rows, table, v1, v2, w0, w1)
    for row, may_be in zip(np.asarray(first), assigned(table, rows, v1)):
        assert any(np.array_equal(row, x) for x in may_be)
    for got, expected in zip(sums, want, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert {x.dtype for x in (first, *sums)} == {np.dtype(np.float32)}


def test_other_rows_stay_bit_by_bit():
    table = np.array([[-0.0, np.nan], [np.inf, 1e-45], [1.0, 2.0]], np.float32)
    values = np.array([[-0.0, np.nan], [np.nan, np.nan]], np.float32)
    args = np.array([2, -1]), values
    got = np.asarray(sj.scatter_assign(table, *args))
    assert_same_bits(got[2], values[0])
    for out in got, np.asarray(sj.scatter_weighted_sum(table, 0.1, *args, 1.0)):
        assert_same_bits(out[:2], table[:2])


@pytest.mark.parametrize(
    "one", [1, 1.0, True, np.float32(1), np.ones((1,)), jnp.ones(()), jnp.int32(1)]
)
def test_weights_of_any_kind(one):
    table, values = integers((V, D)), integers((3, D), seed=1)
    rows = np.array([4, 0, 4])
    got = sj.scatter_weighted_sum(table, one, rows, values, one)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, weighted_sum(table, 1, rows, values, 1))


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "int8", "bool", "complex64", "float64"]
)
def test_the_tables_dtype_stays(dtype, x64):
    table = np.full((V, D), 3).astype(jnp.dtype(dtype))
    rows, zeros = np.array([4, 0, 4, V]), np.zeros((2, D), np.int8)
    assign = jax.jit(lambda t: sj.scatter_assign(t, [4, V], zeros))
    of_ints = np.asarray(assign(table))
    assert of_ints.dtype == dtype and not of_ints[4].any()
    assert_same_bits(np.delete(of_ints, 4, 0), np.delete(table, 4, 0))
    if dtype == "bool":
        return
    sums = lambda t, v: [sj.scatter_weighted_sum(t, w, rows, v, 4) for w in (1, 2)]
    for w0, got in zip((1, 2), jax.jit(sums)(table, np.ones((4, D), table.dtype))):
        assert got.dtype == dtype
        want = [3 * w0 + 4, 3, 3, 3, 3 * w0 + 8, 3, 3]
        assert np.asarray(got)[:, 0].tolist() == want
    if dtype == "float64":
        v = np.ones((4, D))
        single = lambda t: sj.scatter_weighted_sum(t, 0.5, rows, v, v[0, 0])
        assert jax.jit(single)(table.astype(np.float32)).dtype == jnp.float32


@pytest.mark.parametrize("w0, values_dtype", [(1, "bfloat16"), (0.5, "float32")])
def test_sums_of_bfloat16_are_rounded_once(w0, values_dtype):
    # One by one, 256 + 1 is 256 in bfloat16.
    table = np.full((2, 1), 256, jnp.bfloat16)
    values = np.ones((256, 1), jnp.dtype(values_dtype))
    rows = np.zeros((256,), np.int32)
    run = jax.jit(lambda t, v: sj.scatter_weighted_sum(t, w0, rows, v, 1.0))
    got = run(table, values)
    assert got.dtype == jnp.bfloat16
    assert np.asarray(got)[:, 0].tolist() == [256 * w0 + 256, 256]


# ------------------------------------------------------------------ derivatives


def test_assign_differentiates(x64):
    table, values = integers((V, D), np.float64), integers((4, D), np.float64)
    rows = jnp.array([4, 0, V, 2])
    f = lambda t, v: sj.scatter_assign(t, rows, v) ** 2
    check_grads(jax.jit(f), (table, values), order=2)
    # The duplicate that won has the gradient.
    rows = jnp.array([4, 4, 0, -1])

    @jax.jit
    def run(values):
        got, vjp = jax.vjp(lambda v: sj.scatter_assign(table, rows, v), values)
        return got, *vjp(jnp.ones_like(got))

    got, grad = map(np.asarray, run(values))
    assert sorted(grad[:2, 0].tolist()) == [0, 1] and grad[2:, 0].tolist() == [1, 0]
    assert_same_bits(got[4], values[np.argmax(grad[:2, 0])])


def test_weighted_sum_differentiates(x64):
    rng = np.random.default_rng(0)
    table, v1, v2 = (rng.normal(size=(n, 2)) for n in (V, 4, 4))
    rows = np.array([4, 0, 4, V])

    def f(t, w0, v1, w1, v2, w2):
        return (
            sj.scatter_weighted_sum(t, w0, rows, v1, w1, v2, w2) ** 2,
            sj.scatter_weighted_sum(t, 1, rows, v1, w1) ** 2,
        )

    w = np.float64(1.5)
    check_grads(jax.jit(f), (table, 0.5 * w, v1, w, v2, -w), order=1)
    grad = jax.jit(jax.grad(lambda t: jnp.sum(f(t, 0.5, v1, w, v2, -w)[0])))(table)
    natural = lambda t: jnp.sum(
        (t.at[rows[:2]].multiply(0.5).at[rows].add(w * v1 - w * v2)) ** 2
    )
    assert_trees_close(grad, jax.jit(jax.grad(natural))(table))


# ------------------------------------------------------------------ the program


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_in_place(dtype):
    height = 1009
    table, values = np.ones((height, 4), dtype), np.ones((4, 4), dtype)
    rows = np.array([4, 0, 4, height], np.int32)
    programs = (
        sj.scatter_assign,
        lambda t, r, v: sj.scatter_weighted_sum(t, 0.5, r, v, 2, v, 3),
        lambda t, r, v: sj.scatter_weighted_sum(t, 1, r, v, 2),
    )
    for f in programs:
        assert_no_dense(f, table, rows, values, allow=("scatter", "scatter-add"))
        eqns = eqns_of(f, table, rows, values)
        scatters = [e for e in eqns if e.primitive.name.startswith("scatter")]
        assert sum(e.outvars[0].aval.shape == table.shape for e in scatters) == 1
        assert_in_place(f, table, rows, values)


def test_vmap_and_scan():
    table = integers((V, D))
    rows = np.array([[4, 0], [4, 4], [V, 2]], np.int32)
    values = integers((3, 2, D), seed=1)
    f = jax.jit(lambda t, r, v: sj.scatter_weighted_sum(t, 0.5, r, v, 2.0))
    want = np.stack([f(table, r, v) for r, v in zip(rows, values)])
    got = jax.jit(jax.vmap(f, (None, 0, 0)))(table, rows, values)
    assert_trees_close(got, want)
    tables = np.stack([table, table + 1, table + 2])
    want = np.stack([f(t, r, v) for t, r, v in zip(tables, rows, values)])
    assert_trees_close(jax.jit(jax.vmap(f))(tables, rows, values), want)

    def body(t, x):
        return sj.scatter_assign(f(t, *x), x[0][:1], x[1][:1]), None

    scan = jax.jit(lambda t, r, v: jax.lax.scan(body, t, (r, v)))
    looped, step = table, jax.jit(body)
    for r, v in zip(rows, values):
        looped, _ = step(looped, (r, v))
    assert_trees_close(scan(table, rows, values)[0], looped)
