"""scatter_assign and scatter_weighted_sum, against a loop.

The recorded answers of Caffe2: tests/docs/test_caffe2_mapping.py.
"""

from typing import Any

import hypothesis
import hypothesis.strategies as st
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
    run_jitted,
)


V, D = 7, 3
each_case = pytest.mark.parametrize("case", ID_CASES, ids=names(ID_CASES))


# ------------------------------------------------------------------ the oracles


def flat(table, rows, values):
    """Pairs of a row in range, as a Python int, and its values."""
    rows = np.asarray(rows).reshape(-1).tolist()
    values = np.asarray(values).reshape(len(rows), *table.shape[1:])
    return [(r, v) for r, v in zip(rows, values) if 0 <= r < table.shape[0]]


def assigned(table, rows, values):
    """For each row of `table`, all that it may be afterwards."""
    may_be = [[row] for row in np.asarray(table)]
    for seen in range(len(may_be)):
        named = [v for r, v in flat(table, rows, values) if r == seen]
        may_be[seen] = named or may_be[seen]
    return may_be


def weighted_sum(table, w0, rows, *pairs):
    out = np.asarray(table, np.float64).copy()
    named = {r for r, _ in flat(table, rows, np.zeros((*rows.shape, *out.shape[1:])))}
    for r in named:
        out[r] *= w0
    for values, weight in zip(pairs[::2], pairs[1::2]):
        for r, v in flat(table, rows, np.asarray(values, np.float64)):
            out[r] += weight * v
    return out.astype(np.asarray(table).dtype)


def integers(shape, dtype: Any = np.float32, seed=0):
    """Values that float32 sums exactly."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(dtype)


# ------------------------------------------------------------------ scatter_assign


def assign(rows, table, values):
    return sj.scatter_assign(table, rows, values)


@each_case
def test_assign(case):
    table, rows = integers((case.height, D)), case.padded
    values = integers((*rows.shape, D), seed=1)
    got = run_jitted(assign, rows, table, values)
    assert got.dtype == np.float32
    for row, may_be in zip(np.asarray(got), assigned(table, rows, values)):
        assert any(np.array_equal(row, x) for x in may_be)


@pytest.mark.parametrize("row_shape", [(), (2, 3), (0,)])
def test_assign_rows_of_any_rank(row_shape):
    table, values = integers((V, *row_shape)), integers((2, 2, *row_shape), seed=1)
    rows = np.array([[4, 0], [7, 2]])
    want = table.copy()
    want[[4, 0, 2]] = values.reshape(4, *row_shape)[[0, 1, 3]]
    assert_same_bits(sj.scatter_assign(table, rows, values), want)
    assert_same_bits(sj.scatter_assign(table, 4, values[0, 0])[4], values[0, 0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "bool", "complex64"])
def test_assign_keeps_the_tables_dtype(dtype):
    table = np.zeros((V, D), jnp.dtype(dtype))
    values = jnp.asarray(np.ones((2, D), np.int32))
    got = sj.scatter_assign(jnp.asarray(table), [4, V], values)
    assert got.dtype == dtype
    table[4] = 1
    assert_same_bits(got, table)


def test_assign_takes_what_is_there_bit_by_bit():
    table = jnp.array([[-0.0, jnp.nan], [jnp.inf, 1e-45], [1.0, 2.0]])
    values = jnp.array([[-0.0, jnp.nan], [jnp.nan, jnp.nan]])
    got = sj.scatter_assign(table, jnp.array([2, -1]), values)
    assert_same_bits(got[:2], table[:2])
    assert_same_bits(got[2], values[0])


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


# ------------------------------------------------------------------ weighted sum


def weighted_sums(rows, t, v1, v2):
    return (
        sj.scatter_weighted_sum(t, 0.5, rows, v1, 2.0, v2, -3.0),
        sj.scatter_weighted_sum(t, 1, rows, v1, 2.0),
        sj.scatter_weighted_sum(t, 1.0, rows, v1, -1),
        sj.scatter_weighted_sum(t, 0, rows, v2, 1),
        sj.scatter_weighted_sum(t, 2, rows),
    )


@each_case
def test_weighted_sum(case):
    table, rows = integers((case.height, D)), case.padded
    v1, v2 = (integers((*rows.shape, D), seed=s) for s in (1, 2))
    want = (
        weighted_sum(table, 0.5, rows, v1, 2, v2, -3),
        weighted_sum(table, 1, rows, v1, 2),
        weighted_sum(table, 1, rows, v1, -1),
        weighted_sum(table, 0, rows, v2, 1),
        weighted_sum(table, 2, rows),
    )
    for got, expected in zip(run_jitted(weighted_sums, rows, table, v1, v2), want):
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == np.float32


@pytest.mark.parametrize("row_shape", [(), (2, 3), (0,)])
def test_weighted_sum_rows_of_any_rank(row_shape):
    table, values = integers((V, *row_shape)), integers((2, 2, *row_shape), seed=1)
    rows = np.array([[4, 0], [7, 4]])
    run = jax.jit(sj.scatter_weighted_sum)
    got = run(table, 0.5, rows, values, 2.0)
    np.testing.assert_array_equal(got, weighted_sum(table, 0.5, rows, values, 2))
    got = run(table, 2.0, np.array(4), values[0, 0], 2.0)
    want = weighted_sum(table, 2, np.array(4), values[0, 0], 2)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "one", [1, 1.0, True, np.float32(1), np.ones((1,)), jnp.ones(()), jnp.int32(1)]
)
def test_weights_of_any_kind(one):
    table, values = integers((V, D)), integers((3, D), seed=1)
    rows = np.array([4, 0, 4])
    want = weighted_sum(table, 1, rows, values, 1)
    got = sj.scatter_weighted_sum(table, one, rows, values, one)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64"])
def test_weighted_sum_keeps_the_tables_dtype(dtype, x64):
    table = np.full((V, D), 3, dtype)
    rows = jnp.array([4, 0, 4])
    values = np.ones((3, D), dtype)

    @jax.jit
    def run(table, values):
        return [sj.scatter_weighted_sum(table, w0, rows, values, 4) for w0 in (1, 2)]

    for w0, got in zip((1, 2), run(table, values), strict=True):
        assert got.dtype == dtype
        want = [3 * w0 + 4, 3, 3, 3, 3 * w0 + 8, 3, 3]
        assert np.asarray(got)[:, 0].tolist() == want
    if dtype == "float64":
        single = sj.scatter_weighted_sum(
            np.ones((V, D), np.float32), 0.5, rows, values, np.float64(2)
        )
        assert single.dtype == jnp.float32


def test_dropped_rows_may_hold_anything():
    table = np.ones((V, D), np.float32)
    values = np.full((4, D), np.nan, np.float32)
    values[0] = 1.0
    rows = jnp.array([4, V, -1, 2**31 - 1])
    for w0 in (1, 0.5):
        want = table.copy()
        want[4] = w0 + 2
        run = jax.jit(lambda t, v, w0=w0: sj.scatter_weighted_sum(t, w0, rows, v, 2.0))
        assert_trees_close(run(table, values), want)


def test_other_rows_stay_bit_by_bit():
    table = np.array([[-0.0], [np.nan], [1e-45], [3.0]], np.float32)
    one = np.ones((1, 1), np.float32)
    got = sj.scatter_weighted_sum(jnp.asarray(table), 0.1, jnp.array([3]), one, 1.0)
    assert_same_bits(np.asarray(got)[:3], table[:3])


ids = st.lists(st.integers(-2, V + 2), min_size=5, max_size=5)
weights = st.integers(-4, 4)
run_weighted_sum = jax.jit(sj.scatter_weighted_sum)


@hypothesis.settings(max_examples=50)
@hypothesis.given(ids, weights, weights, weights, st.integers(0, 2**16))
def test_weighted_sum_of_any_rows(rows, w0, w1, w2, seed):
    rows = np.array(rows, np.int32)
    table = integers((V, D), seed=seed)
    v1, v2 = (integers((5, D), seed=seed + s) for s in (1, 2))
    args = rows, v1, np.float32(w1), v2, np.float32(w2)
    got = run_weighted_sum(table, np.float32(w0), *args)
    np.testing.assert_array_equal(got, weighted_sum(table, w0, *args))


def test_weighted_sum_differentiates(x64):
    rng = np.random.default_rng(0)
    table, v1, v2 = (jnp.asarray(rng.normal(size=(n, 2))) for n in (V, 4, 4))
    rows = jnp.array([4, 0, 4, V])

    def f(t, w0, v1, w1, v2, w2):
        return (
            sj.scatter_weighted_sum(t, w0, rows, v1, w1, v2, w2) ** 2,
            sj.scatter_weighted_sum(t, 1, rows, v1, w1) ** 2,
        )

    w = jnp.float64(1.5)
    check_grads(jax.jit(f), (table, 0.5 * w, v1, w, v2, -w), order=1)
    grad = jax.jit(jax.grad(lambda t: jnp.sum(f(t, 0.5, v1, w, v2, -w)[0])))(table)
    natural = lambda t: jnp.sum(
        (t.at[jnp.array([4, 0])].multiply(0.5).at[rows].add(w * v1 - w * v2)) ** 2
    )
    assert_trees_close(grad, jax.jit(jax.grad(natural))(table))


# ------------------------------------------------------------------ the program

BIG = 1009


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_in_place(dtype):
    table = jnp.ones((BIG, 4), dtype)
    rows, values = jnp.array([4, 0, 4, BIG]), jnp.ones((4, 4), dtype)
    programs = (
        sj.scatter_assign,
        lambda t, r, v: sj.scatter_weighted_sum(t, 0.5, r, v, 2, v, 3),
        lambda t, r, v: sj.scatter_weighted_sum(t, 1, r, v, 2),
    )
    for f in programs:
        assert_no_dense(f, table, rows, values, allow=("scatter", "scatter-add"))
        big = [
            e
            for e in eqns_of(f, table, rows, values)
            if any(getattr(v.aval, "shape", ()) == table.shape for v in e.outvars)
        ]
        assert len([e for e in big if e.primitive.name.startswith("scatter")]) == 1
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

    scanned, _ = jax.jit(lambda t, r, v: jax.lax.scan(body, t, (r, v)))(
        table, rows, values
    )
    looped, step = table, jax.jit(body)
    for r, v in zip(rows, values):
        looped, _ = step(looped, (r, v))
    assert_trees_close(scanned, looped)
