"""dot, against NumPy's product of the dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCSR
from jax.test_util import check_grads

import sparsejax as sj
from helpers import assert_no_dense, assert_trees_close, eqns_of, to_dense


S, C, D = 4, 97, 3
LENGTHS = np.array([3, 0, 5, 2])
# A duplicate in a row, and one across rows.
INDEX = np.array([5, 96, 5, 0, 1, 2, 96, 7, 5, 50])


def integers(shape, dtype=np.float32, seed=0):
    """Values whose products and sums float32 holds exactly."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(dtype)


VALUE = integers(10, seed=1)
DENSE = integers((C, D), seed=2)
LEFT = integers((S, D), seed=3)


def matrix(index=INDEX, value=VALUE, lengths=LENGTHS, columns=C):
    """The matrix as a NumPy array."""
    out = np.zeros((len(lengths), columns), np.result_type(value, np.float32))
    rows = np.repeat(np.arange(len(lengths)), lengths)
    ok = (index >= 0) & (index < columns)
    np.add.at(out, (rows[ok], index[ok]), value[ok])
    return out


def make_csr(index=INDEX, value=VALUE, lengths=LENGTHS):
    elements = {"index": index, "value": value}
    return sj.SegmentTensor.from_lengths(elements, lengths)


def transposed(csr, dense, columns=C):
    return sj.dot(csr, dense, transpose=True, num_columns=columns)


def assert_products(csr, matrix, dense=DENSE, left=LEFT):
    """Both products are NumPy's; returns the one of the transpose."""
    run = jax.jit(lambda *args: (sj.dot(csr, args[0]), transposed(csr, args[1])))
    got, of_left = run(dense, left)
    assert isinstance(of_left, sj.SelectedRows)
    whole, whole_left, whole_of_left = jax.jit(to_dense)((dense, left, of_left))
    assert_trees_close(got, np.tensordot(matrix, whole, 1))
    assert_trees_close(whole_of_left, np.tensordot(matrix.T, whole_left, 1))
    return of_left


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("row_shape", [(), (D,), (2, 2), (0,)])
def test_dense_of_any_rank(row_shape):
    dense, left = integers((C, *row_shape)), integers((S, *row_shape))
    got = assert_products(make_csr(), matrix(), dense, left)
    assert got.rows.tolist() == INDEX.tolist()  # a slot each, not merged
    like = jax.eval_shape(transposed, make_csr(), left)  # before data
    assert (like.shape, like.capacity) == ((C, *row_shape), 10)


@pytest.mark.slow
def test_scipy_and_bcsr():
    """tests/error_messages.md has other matrices."""
    sparse, want = pytest.importorskip("scipy.sparse"), matrix()
    bcsr = jax.jit(BCSR.fromdense, static_argnames="nse")(want, nse=20)
    for csr in (sparse.csr_matrix(want), sparse.csr_array(want), bcsr):
        assert_products(csr, want)
        of_left = jax.jit(lambda x, csr=csr: sj.dot(csr, x, transpose=True))(LEFT)
        assert_trees_close(of_left.to_dense(), want.T @ LEFT)
    assert_trees_close(jax.jit(sj.dot)(bcsr, DENSE), want @ DENSE)


def test_elements_in_any_order():
    order = np.random.default_rng(0).permutation(10)
    segments = np.repeat(np.arange(S), LENGTHS)[order]
    elements = {"index": INDEX[order], "value": VALUE[order]}
    csr = sj.SegmentTensor.from_segment_ids(elements, segments, S)
    assert_products(csr, matrix())


@pytest.mark.slow
def test_dense_may_be_selected_rows():
    values = integers((5, D), seed=4)
    values[2] = np.nan
    part = sj.SelectedRows(np.array([96, 5, C, 5, 7]), values, C)
    left = sj.SelectedRows(np.array([2, 0, 2, S]), integers((4, D), seed=5), S)
    assert_products(make_csr(), matrix(), part, left)
    whole = np.asarray(jax.jit(to_dense)(part))
    assert_trees_close(jax.jit(sj.dot)(make_csr(), part), matrix() @ whole)


def test_columns_out_of_range_and_empty_elements_count_nothing():
    """Whatever they hold, in values and in gradients."""
    index = np.array([5, -1, C, 2**31 - 1, 0, 3, -7, 3])
    value = np.array([2, np.nan, np.inf, 1, 3, np.nan, np.nan, np.nan], np.float32)
    lengths = np.array([2, 3, 0])  # the last three elements belong to no segment
    dense, left = np.full((C, D), np.nan, np.float32), integers((3, D))
    dense[[0, 5]] = [[1, 2, 3], [4, 5, 6]]

    @jax.jit
    def run(dense, value):
        product = lambda *args: sj.dot(make_csr(index, args[1], lengths), args[0])
        grads = jax.grad(lambda *args: jnp.sum(product(*args)), (0, 1))(dense, value)
        of_left = transposed(make_csr(index, value, lengths), left)
        return product(dense, value), grads, of_left, of_left.to_dense()

    def rows(of_five, of_zero):
        out = np.zeros((C, D), np.float32)
        out[5], out[0] = of_five, of_zero
        return out

    got, grads, of_left, whole = run(dense, value)
    assert_trees_close(got, np.array([[8, 10, 12], [3, 6, 9], [0, 0, 0]], np.float32))
    assert_trees_close(grads[0], rows(2, 3))
    assert_trees_close(grads[1], np.array([15, 0, 0, 0, 6, 0, 0, 0], np.float32))
    assert_trees_close(whole, rows(2 * left[0], 3 * left[1]))
    assert of_left.rows.tolist() == [5, C, C, C, 0, C, C, C]


def test_a_matrix_without_elements_or_rows():
    nothing = make_csr(INDEX[:0], VALUE[:0], np.zeros(S, int))
    assert_trees_close(sj.dot(nothing, DENSE), np.zeros((S, D), np.float32))
    assert transposed(nothing, LEFT).capacity == 0
    empty = make_csr(INDEX[:0], VALUE[:0], np.zeros(0, int))
    for columns in C, 0:
        product = jax.jit(lambda csr, x, n=columns: sj.dot(csr, x, num_columns=n))
        assert product(empty, DENSE[:columns]).shape == (0, D)
    no_rows = lambda value: make_csr(INDEX, value, np.zeros(0, int))  # with elements
    loss = lambda value, dense: sj.dot(no_rows(value), dense).sum()
    for g in jax.jit(jax.grad(loss, (0, 1)))(VALUE, DENSE):
        assert not g.any()
    of_dense = jax.jit(sj.grad(loss, 1, tables=True))(VALUE, DENSE)
    for rows in of_dense, transposed(no_rows(VALUE), LEFT[:0]):
        assert not rows.to_dense().any()


@pytest.mark.parametrize(
    ("value", "dense", "result"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "float32", "float32"),
        ("int8", "float16", "float16"),
        ("int32", "int8", "int32"),
        ("float32", "bool", "float32"),
    ],
)
def test_dtypes(value, dense, result):
    csr = make_csr(value=VALUE.astype(value))
    dense = DENSE.astype(jnp.dtype(dense))
    want = matrix() @ dense.astype(np.float32)
    run = jax.jit(lambda csr, dense: (sj.dot(csr, dense), transposed(csr, dense[:S])))
    got, of_left = run(csr, dense)
    assert got.dtype == result
    assert_trees_close(got, want.astype(jnp.dtype(result)))
    assert of_left.dtype == result


def test_narrow_types_are_summed_wide():
    n = 600
    value = jnp.full((n,), 1 / 256, jnp.bfloat16)
    csr = make_csr(np.zeros(n, int), value, np.array([n]))
    got = sj.dot(csr, jnp.ones((1,), jnp.bfloat16))
    assert float(got[0]) == float(jnp.bfloat16(n / 256))


# ------------------------------------------------------------------ gradients


def test_differentiates(x64):
    value, dense, left = (x.astype(np.float64) for x in (VALUE, DENSE, LEFT))
    csr = make_csr(INDEX.astype(np.int64))
    for x in DENSE, dense:
        assert_trees_close(jax.jit(sj.dot)(csr, x), (matrix() @ DENSE).astype(x.dtype))
    f = lambda v, d: sj.dot(make_csr(value=v), d)
    check_grads(jax.jit(f), (value, dense), order=1)
    f = lambda v, d: transposed(make_csr(value=v), d).values
    check_grads(jax.jit(f), (value, left), order=1)


@pytest.mark.window
def test_gradient_is_row_sparse():
    """And the dense matrix is read once, as a bag."""
    product = lambda dense: sj.dot(make_csr(), dense)
    loss = lambda dense: jnp.sum(LEFT * product(dense) ** 2)

    @jax.jit
    def run(dense):
        value, grad = sj.value_and_grad(loss)(dense)
        return grad, (value, grad.to_dense()), jax.value_and_grad(loss)(dense)

    grad, got, want = run(DENSE)
    assert grad.rows.tolist() == INDEX.tolist()
    assert_trees_close(got, want)
    for f in (product, sj.grad(loss)):
        assert_no_dense(f, DENSE)
    of_dense = lambda eqn: DENSE.shape in [v.aval.shape for v in eqn.invars]
    reads = [eqn.primitive.name for eqn in eqns_of(product, DENSE) if of_dense(eqn)]
    assert reads == ["bag_sum"]


@pytest.mark.slow
def test_vmap_and_scan():
    batch, values = np.stack([DENSE, -2 * DENSE]), np.stack([VALUE, VALUE * 3])

    @jax.jit
    def run(batch, values):
        csrs = jax.vmap(lambda v: make_csr(value=v))(values)
        _, scanned = jax.lax.scan(lambda carry, c: (carry, sj.dot(c, DENSE)), 0, csrs)
        of_batch = jax.vmap(lambda d: sj.dot(make_csr(), d))(batch)
        return of_batch, jax.vmap(lambda c: sj.dot(c, DENSE))(csrs), scanned

    of_batch, of_csrs, scanned = run(batch, values)
    assert_trees_close(of_batch, np.stack([matrix() @ d for d in batch]))
    want = np.stack([matrix() @ DENSE, 3 * matrix() @ DENSE])
    assert_trees_close(of_csrs, want)
    assert_trees_close(scanned, want)
