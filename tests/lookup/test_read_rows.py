"""Reading rows: every lowering equals the reference, in every transform."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import sparsejax as sj
from helpers import eqns_of
from sparsejax._lookup.lookup import read_rows
from sparsejax._lookup.lowerings import cpu, xla


DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32]
IDS = [[3], [0, 5, 5, 2], [6, 7, 100, -1, -100], [-1], []]


def _table(dtype, shape=(7, 3)):
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        values[2] = np.array([np.nan, np.inf, -0.0], dtype)
    return jnp.asarray(values)


def _same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.signbit(a), np.signbit(b))


@pytest.mark.window
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", IDS)
def test_equals_the_reference(ids, dtype):
    table, ids = _table(dtype), jnp.asarray(ids, jnp.int32)
    reads = read_rows, cpu.read_rows, xla.read_rows
    *both, want = jax.jit(lambda *args: [read(*args) for read in reads])(table, ids)
    for got in (read_rows(table, ids), *both):
        _same(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", IDS)
def test_equals_the_reference_with_a_fill(ids, dtype):
    table, ids = _table(dtype), jnp.asarray(ids, jnp.int32)
    fill = np.array(5, dtype).tobytes()
    reads = [partial(f.read_rows, fill=fill) for f in (xla, cpu)]
    reads.append(partial(read_rows, fill=fill))
    want, *both = jax.jit(lambda *args: [read(*args) for read in reads])(table, ids)
    for got in both:
        _same(got, want)


@pytest.mark.window
def test_a_fill_is_a_key_of_a_compiled_program():
    """NaN equals itself there, and a zero no zero of another type."""
    ids = jnp.array([1, 9])

    def programs():
        loss = lambda t: jnp.nansum(jnp.take(t, ids, axis=0))
        eqns = eqns_of(sj.grad(loss), jnp.ones((7, 2)))
        return [e.params["fill"] for e in eqns if e.primitive.name == "read_rows"]

    assert programs() == programs() and programs()[0]
    for dtype in (jnp.float16, jnp.bfloat16):
        read = lambda t: jnp.sum(sj.lookup(t, ids, mode="zero").astype(float))
        g = sj.grad(read)(jnp.ones((7, 2), dtype))
        assert g.dtype == dtype and g.capacity == 2


@pytest.mark.window
@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 3)])
def test_ranks(shape):
    table, ids = (
        jnp.arange(np.prod(shape, dtype=float)).reshape(shape),
        jnp.array([6, 1]),
    )
    _same(jax.jit(read_rows)(table, ids), xla.read_rows(table, ids))


@pytest.mark.slow
def test_under_vmap_and_derivatives(x64):
    table, ids = np.sin(np.arange(21.0)).reshape(7, 3), jnp.array([[4, 4], [0, 6]])
    for axes in ((None, 0), (0, 0), (0, None)):
        t = np.stack([table, -table]) if axes[0] == 0 else table
        i = ids if axes[1] == 0 else ids[0]
        both = [jax.vmap(read, axes) for read in (read_rows, xla.read_rows)]
        _same(*jax.jit(lambda t, i, both=both: [f(t, i) for f in both])(t, i))
    fun = lambda t: jnp.sum(jnp.sin(read_rows(t, ids[0])))
    want = lambda t: jnp.sum(jnp.sin(xla.read_rows(jnp.asarray(t), ids[0])))
    both = jax.jit(lambda t: (jax.grad(fun)(t), jax.grad(want)(t)))
    np.testing.assert_allclose(*both(table))
    check_grads(jax.jit(fun), (table,), 2)


@pytest.mark.window
def test_no_branch_and_no_table_shows_in_the_jaxpr():
    jaxpr = jax.make_jaxpr(lambda t, i: read_rows(t, i))(
        jnp.ones((50, 3)), jnp.arange(4)
    )
    assert "cond" not in str(jaxpr) and "read_rows" in str(jaxpr)
