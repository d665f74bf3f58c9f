"""lookup, against a loop over Python ints in NumPy and against `jax.grad`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.test_util import check_grads

import sparsejax as sj
from cases import ID_CASES, names
from helpers import (
    assert_no_dense,
    assert_same_bits,
    assert_trees_close,
    dense,
    run_jitted,
)


V, D = 7, 3


# ------------------------------------------------------------------ the oracle


@functools.cache
def fill_of(dtype):
    return np.asarray(jnp.take(jnp.zeros((1,), dtype), 9, mode="fill"))


def oracle(table, ids, mode="fill", padding_id=None, max_norm=None, stored=None):
    """One id after the other, as Python ints, which neither wrap nor overflow."""
    table, ids = np.asarray(table), np.asarray(ids)
    height = table.shape[0]
    out = np.zeros((ids.size, *table.shape[1:]), table.dtype)
    for i, id_ in enumerate(ids.reshape(-1).tolist()):
        if padding_id is not None and id_ == padding_id:
            continue
        if mode == "clip":
            id_ = min(max(id_, 0), height - 1)
        if 0 <= id_ < height and (stored is None or id_ in stored):
            out[i] = table[id_]
            norm = 0 if max_norm is None else np.sqrt(np.sum(np.float64(out[i]) ** 2))
            if max_norm is not None and norm > max_norm:
                out[i] = out[i] * (max_norm / norm)
        elif mode != "zero":
            out[i] = fill_of(table.dtype)
    return out.reshape(*ids.shape, *table.shape[1:])


def table_of(height, row_shape=(D,), dtype: Any = np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(height, *row_shape)) * 4).astype(dtype)


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"mode": "fill"},
    {"mode": "clip"},
    {"mode": "zero"},
    {"padding_id": -1},
    {"padding_id": 4},
    {"padding_id": 4, "mode": "clip"},
    {"padding_id": -1, "mode": "clip"},
    {"padding_id": 2**31, "mode": "clip"},
    {"padding_id": 7, "mode": "zero"},
    {"padding_id": 255},
    {"padding_id": 256},
    {"padding_id": 2**63 - 1},
    {"padding_id": -(2**70)},
    {"max_norm": 2.0},
    {"max_norm": 2, "padding_id": 2, "mode": "zero"},
)


# ------------------------------------------------------------------ values


def every_option(ids, table):
    return [sj.lookup(table, ids, **options) for options in OPTIONS]


(MATRIX,) = [case for case in ID_CASES if case.name == "matrix"]
RANKS = [(), (2, 3), (0,)]


@pytest.mark.parametrize(
    "case, row_shape",
    [*((case, (D,)) for case in ID_CASES), *((MATRIX, shape) for shape in RANKS)],
    ids=[*names(ID_CASES), *map(str, RANKS)],
)
def test_every_option_on_every_case(case, row_shape):
    table, ids = table_of(case.height, row_shape), case.padded
    for options, got in zip(OPTIONS, run_jitted(every_option, ids, table)):
        want = oracle(table, ids, **options)
        np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=str(options))
        assert got.dtype == table.dtype and got.shape == want.shape
        if "max_norm" not in options:  # then nothing is computed
            assert_same_bits(np.nan_to_num(got), np.nan_to_num(want))


HUGE = {"int32": -1, "uint32": 2**32 - 1, "int64": 2**32 + 2, "uint64": 2**64 - 1}


@pytest.mark.parametrize(
    "dtype, ids_dtype",
    [("bfloat16", "int32"), ("float32", "int64"), ("float64", "uint64")]
    + [("complex64", "uint32"), ("int8", "int64"), ("uint8", "int32")]
    + [("bool", "int64")],
)
def test_every_option_of_other_types(dtype, ids_dtype, x64):
    table = (np.arange(V * D).reshape(V, D) % 5).astype(jnp.dtype(dtype))
    ids = np.array([4, 0, 4, HUGE[ids_dtype], 7, 2], ids_dtype)
    is_float = jnp.issubdtype(table.dtype, jnp.floating)
    kept = [o for o in OPTIONS if is_float or "max_norm" not in o]
    found = jax.jit(lambda t, i: [sj.lookup(t, i, **o) for o in kept])(table, ids)
    for options, got in zip(kept, found, strict=True):
        assert got.dtype == dtype
        rtol = 1e-2 if dtype == "bfloat16" else 1e-6
        want = oracle(table, ids, **options)
        assert_trees_close(got, want, rtol=rtol * ("max_norm" in options), atol=0)


@pytest.mark.parametrize("ids", [[], [[], []], np.zeros((0, 3)), ()])
@pytest.mark.parametrize("height", [V, 0])
def test_no_ids(ids, height):
    table = jax.ShapeDtypeStruct((height, D), jnp.float32)
    error: dict[str, Any] = {"mode": "error"}
    for options in (*OPTIONS, error):
        out = jax.eval_shape(lambda t, o=options: sj.lookup(t, ids, **o), table)
        assert out.shape == (*np.shape(ids), D)


def test_ids_as_python_ints_and_lists():
    table = table_of(V)
    rows = np.asarray(table)
    for ids, read in (
        (4, 4),
        ([[4], [0]], [[4], [0]]),
        ([2**40 + 4, np.int64(-(2**40))], [6, 0]),
        (np.int64(2**40 + 4), 6),
    ):
        got = jax.jit(lambda t, ids=ids: sj.lookup(t, ids, mode="clip"))(table)
        assert_same_bits(got, rows[np.array(read)])
    inside = jax.jit(lambda t, i: sj.lookup(t, [i, i + 1]))(table, 2)
    assert_same_bits(inside, rows[2:4])


def test_ids_of_another_library():
    """Its dtype is not NumPy's, as in a column of polars or a tensor of PyTorch."""

    class Column:
        dtype = "Int64 of another library"

        def __array__(self, dtype=None, copy=None):
            return np.array([4, 0], dtype)

    column: Any = Column()
    rows = np.asarray(table_of(V))[[4, 0]]
    assert_same_bits(sj.lookup(table_of(V), column), rows)
    bag = sj.embedding_bag(table_of(V), column, jnp.zeros(2, int), 1, combiner="max")
    assert_same_bits(bag, rows.max(0, keepdims=True))


def test_a_table_without_rows():
    empty = jnp.zeros((0, D))
    ids = jnp.array([0, -1])
    assert np.isnan(sj.lookup(empty, ids)).all()
    assert not sj.lookup(empty, ids, mode="zero").any()
    assert sj.lookup(empty, ids, padding_id=-1)[1].tolist() == [0] * D


# ------------------------------------------------------------------ the program


@pytest.mark.window
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_gather_of_the_table_itself(options):
    table, ids = jnp.ones((1009, 4)), jnp.array([1, 2])
    f = functools.partial(sj.lookup, **options)
    for some in table, sj.SelectedRows(ids, jnp.ones((2, 4)), 1009):
        assert_no_dense(f, some, ids)
        assert_no_dense(functools.partial(f, mode="error"), some, ids)
    for t, i in ((table, ids), (table[:, 0], ids), (table, ids[0]), (table, ids[None])):
        jaxpr = jax.make_jaxpr(f)(t, i)
        argument = jaxpr.jaxpr.invars[0]
        readers = [e for e in jaxpr.jaxpr.eqns if argument in e.invars]
        assert [e.primitive.name for e in readers] == ["gather"]
        assert readers[0].invars[0] is argument
        # Ids that were clipped are in range: there is nothing to fill or to drop.
        clipped = i.ndim and options == {"mode": "clip"}
        mode = "CLIP" if clipped else "FILL_OR_DROP"
        assert str(readers[0].params["mode"]).endswith(mode)


@pytest.mark.window
def test_vmap_and_scan():
    table, ids = table_of(V), jnp.array([[4, 0, 9], [-1, 4, 2]])
    f = functools.partial(sj.lookup, padding_id=2, max_norm=3.0)
    want = oracle(table, ids, padding_id=2, max_norm=3.0)
    rows = jax.jit(jax.vmap(f, (None, 0)))(table, ids)
    np.testing.assert_allclose(rows, want, rtol=1e-6)
    tables = np.stack([table, 2 * np.asarray(table)])
    both = jax.jit(jax.vmap(f))(tables, ids)
    for got, t, i in zip(both, tables, ids):
        wanted = oracle(t, i, padding_id=2, max_norm=3.0)
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    scan = lambda t, ids: jax.lax.scan(lambda c, i: (c, f(t, i)), 0, ids)[1]
    np.testing.assert_allclose(jax.jit(scan)(table, ids), want, rtol=1e-6)


# ------------------------------------------------------------------ gradients


def natural(table, ids, mode, padding_id):
    """The same, written by hand."""
    inside = (ids >= 0) & (ids < table.shape[0]) | (mode == "clip")
    ok = inside & (ids != padding_id)
    rows = table[jnp.where(ok, jnp.clip(ids, 0, table.shape[0] - 1), 0)]
    return jnp.where(ok.reshape(ok.shape + (1,) * (rows.ndim - ok.ndim)), rows, 0.0)


@pytest.mark.parametrize(
    "mode, row_shape", [("fill", (2, 2)), ("clip", ()), ("zero", ()), ("clip", (2, 2))]
)
def test_gradients_are_those_of_the_natural_expression(mode, row_shape):
    """The row of the padding is not read: it may hold NaN."""
    table = table_of(V, row_shape)
    table[2] = np.nan
    ids = jnp.array([[4, 0, 4, 2], [9, -1, 2, 6]])
    weights = table_of(8, row_shape, seed=1).reshape(ids.shape + row_shape)
    options = {"mode": mode, "padding_id": 2}

    @jax.jit
    def run(table):
        loss = lambda read, t: jnp.nansum(jnp.sin(read(t, ids, **options)) * weights)
        losses = [functools.partial(loss, read) for read in (sj.lookup, natural)]
        return [jax.value_and_grad(f)(table) for f in losses]

    got, want = run(table)
    assert_trees_close(got, want)
    of_natural = np.asarray(want[1])
    assert not of_natural[2].any() and np.isfinite(of_natural).all()


@pytest.mark.slow
def test_check_grads(x64):
    table, ids = table_of(V, dtype=np.float64), jnp.array([[4, 0, 4], [2, 6, 9]])
    clip = lambda t: sj.lookup(t, ids, mode="clip", padding_id=0, max_norm=3.0)
    check_grads(jax.jit(clip), (table,), order=2)
    pull = lambda v: sj.SelectedRows(jnp.array([4, 0, 4, V]), v, V)
    g = lambda v: sj.lookup(pull(v), ids, mode="zero", max_norm=3.0, padding_id=6)
    check_grads(jax.jit(g), (table[:4],), order=1)


# ------------------------------------------------------------------ max_norm


def test_max_norm():
    """Long rows are scaled; the others keep their bits. Squares may overflow."""
    short = [[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [-0.0, 0.0], [3e-30, 4e-30]]
    table = np.array([*short, [6.0, -8.0], [3e30, 4e30]], np.float32)
    got = np.asarray(sj.lookup(table, np.arange(8), max_norm=5))
    assert_same_bits(got[:5], table[:5])  # a norm of 5 is not more than 5
    assert_trees_close(got[5:7], np.array([[3, -4], [3, 4]], np.float32))
    assert np.isnan(got[7]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_max_norm_of_narrow_rows_is_taken_in_float32(dtype):
    # The sum of squares is beyond float16, and 1 is lost beside it in bfloat16.
    table = np.full((1, 1024), 16, jnp.dtype(dtype))
    read = lambda t: [sj.lookup(t, [0], max_norm=n) for n in (512.0, 256.0)]
    same, got = jax.jit(read)(table)
    assert_same_bits(same, table)
    assert got.dtype == dtype and (np.asarray(got) == 8).all()


def test_gradients_of_max_norm_are_finite():
    table = jnp.array([[3.0, 4.0], [0.0, 0.0], [jnp.nan, 0.0], [jnp.inf, 1.0]])
    ids = jnp.array([0, 1, 9, 1])

    def loss(t, ids):
        rows = sj.lookup(t, ids, max_norm=1.0)
        return jnp.sum(jnp.where(jnp.isnan(rows), 0, rows))

    grad = jax.jit(jax.grad(loss))(table, ids)
    # The gradient of x / |x| is (g - u (u.g)) / |x|, with u = (0.6, 0.8), g = (1, 1).
    want = np.array([[0.16 / 5, -0.12 / 5], [2, 2], [0, 0], [0, 0]], np.float32)
    np.testing.assert_allclose(grad, want, atol=1e-7)
    along = lambda t, v: jax.jvp(lambda t: jax.grad(loss)(t, ids), (t,), (v,))[1]
    second = jax.jit(along)(table, jnp.ones_like(table))
    assert np.isfinite(second[:2]).all()


# ------------------------------------------------------------------ errors in ids


@pytest.mark.window
def test_error_mode_made_a_value():
    table, read = table_of(V), functools.partial(sj.lookup, mode="error", padding_id=-1)
    pulled = sj.SelectedRows(jnp.array([4, 0]), jnp.ones((2, D)), V)
    checked = jax.jit(checkify.checkify(read))
    wrong, right = jnp.array([[4, 9], [-2, 0]]), jnp.array([[4, 0], [-1, 0]])
    out_of_range = "2 of 4 ids are out of range; the first is 9 and the table has 7"
    not_stored = "2 of 4 ids are rows that the SelectedRows does not store; the first "
    for some, whole, ids, message in (
        (table, table, wrong, out_of_range),
        (pulled, pulled.to_dense(), wrong.at[0, 1].set(3), not_stored + "is 3"),
    ):
        with pytest.raises(checkify.JaxRuntimeError, match=message):
            checked(some, ids)[0].throw()
        error, rows = checked(some, right)
        assert error.get() is None
        np.testing.assert_array_equal(rows, oracle(whole, right, padding_id=-1))
    np.testing.assert_array_equal(checked(table, wrong)[1], oracle(table, wrong))


@pytest.mark.window
def test_error_mode_under_grad_vmap_and_scan():
    """Under checkify the error is of this call; without it, it names checkify."""
    table, ids = table_of(V), jnp.array([[4, 9], [-1, 0]])
    read = functools.partial(sj.lookup, table, mode="raise")
    scan = lambda ids: jax.lax.scan(lambda c, i: (c, read(i)), 0, ids)
    bag = lambda ids: sj.embedding_bag(table, ids, mode="raise")
    loss = lambda t: jnp.nansum(sj.lookup(t, ids, mode="raise"))
    grad = lambda ids: jax.grad(loss)(table)
    for call, message in (
        (read, "2 of 4 ids are out of range"),
        (jax.vmap(read), "1 of 2 ids are out of range"),
        (scan, "the first is 9"),
        (bag, "2 of 4 ids are out of range"),
        (grad, "2 of 4 ids are out of range"),
    ):
        error, out = jax.jit(checkify.checkify(call))(ids)
        assert message in str(error.get())
        with pytest.raises(ValueError, match="checkify.checkify"):
            jax.jit(call)(ids)
    assert out[:, 0].tolist() == [1, 0, 0, 0, 1, 0, 0]
    with pytest.raises(ValueError, match="checkify.checkify"):
        jax.jit(sj.grad(loss))(table)


# ------------------------------------------------------------------ SelectedRows


@pytest.mark.slow
@pytest.mark.parametrize("row_shape", [(), (2, 2)])
def test_a_pulled_part_of_a_table(row_shape):
    rows = jnp.array([4, 0, 4, V, 6])
    values = table_of(5, row_shape)
    values[3] = np.nan  # an empty slot's
    pulled = sj.SelectedRows(rows, values, V)
    whole = dense(rows, values, V).astype(np.float32)
    ids = np.array([[4, 0, 2], [9, -1, 7]], np.int32)
    for options, got in zip(OPTIONS, run_jitted(every_option, ids, pulled)):
        want = oracle(whole, ids, stored={0, 4, 6}, **options)
        np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=str(options))
    values = np.nan_to_num(values).astype(np.int16)
    integers = sj.SelectedRows(rows, jnp.asarray(values), V)
    want = oracle(dense(rows, values, V), ids, stored={0, 4, 6})
    got = jax.jit(sj.lookup)(integers, ids)
    assert got.dtype == jnp.int16
    np.testing.assert_array_equal(got, want)


@pytest.mark.window
def test_gradient_of_a_pulled_part():
    rows = jnp.array([4, 0, 4, V])
    ids = jnp.array([4, 4, 0, 2, -1])

    def loss(pulled):
        return jnp.nansum(sj.lookup(pulled, ids) * 2.0)

    pulled = sj.SelectedRows(rows, jnp.ones((4, D)), V)
    grad = jax.jit(jax.grad(loss, allow_int=True))(pulled)
    assert grad.values[:, 0].tolist() == [4, 2, 4, 0]


# ------------------------------------------------------------------ wrong arguments


def test_static_numbers_of_any_kind():
    table, ids = table_of(V), jnp.array([1, 2])
    want = sj.lookup(table, ids, padding_id=2, max_norm=2.0)
    for padding_id in (np.int64(2), np.uint8(2), jnp.int32(2)):
        for max_norm in (2, np.float32(2), jnp.float32(2), np.float64(2)):
            options: Any = {"padding_id": padding_id, "max_norm": max_norm}
            assert_same_bits(sj.lookup(table, ids, **options), want)


@pytest.mark.window
def test_a_variable_of_a_framework():
    nnx = pytest.importorskip("flax.nnx")
    table = table_of(V)
    assert_same_bits(sj.lookup(nnx.Param(table), [1, 2]), table[1:3])
