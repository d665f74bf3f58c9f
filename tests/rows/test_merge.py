"""Sums of many 16-bit rows: wherever rows meet, they are added in float32."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnusedExpression=false

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import slow_but


N = 4000  # ones; added one at a time, bfloat16 stops at 256 and float16 at 2,048
D = 2
IDS = jnp.full((N,), 3)
ZEROS = jnp.zeros((N,), jnp.int32)  # the segments of the ids: all in one


def ones(dtype, *shape):
    return jnp.ones(shape, dtype)


def rows(dtype):
    """The row 3, N times."""
    return sj.SelectedRows(IDS, ones(dtype, N, D), height=20_000)


def pulled(dtype):
    """Some rows of a table, once each."""
    return sj.SelectedRows(jnp.array([1, 3, 8]), ones(dtype, 3, D), height=20_000)


def table(dtype):
    return ones(dtype, 20_000, D)


CSR = sj.SegmentTensor.from_csr(np.arange(N + 1), np.full(N, 3), np.ones(N, np.float32))


def bag(t, **options):
    return sj.embedding_bag(t, IDS, ZEROS, 1, **options)


READS = {
    "lookup": lambda t: sj.lookup(t, IDS),
    "clipped lookup": lambda t: sj.lookup(t, IDS, mode="clip"),
    "index": lambda t: t[IDS],
    "bag": bag,
    "padded bag": lambda t: sj.embedding_bag(t, IDS.reshape(40, 100)),
    "weighted bag": lambda t: bag(t, weights=jnp.ones(N)),
    "unreduced bag": lambda t: bag(t, combiner="none"),
    "dot": lambda t: sj.dot(CSR, t, num_columns=20_000),
}


def gradient(read, grad, of):
    """The gradient of row 3, of a loss that adds up all that is read."""
    loss = lambda t: jnp.sum(read(t).astype(jnp.float32))

    def run(dtype):
        g = grad(loss)(of(dtype))
        return (g.to_dense() if isinstance(g, sj.SelectedRows) else g)[3]

    return run


SUMS = {
    "to_dense": lambda dtype: rows(dtype).to_dense()[3],
    "coalesce": lambda dtype: rows(dtype).coalesce().values[0],
    "get": lambda dtype: rows(dtype).get(3),
    "retain": lambda dtype: rows(dtype).retain([3]).to_dense()[3],
    "a + b": lambda dtype: (rows(dtype) + 0 * rows(dtype)).to_dense()[3],
    "product": lambda dtype: (rows(dtype) * pulled(dtype)).to_dense()[3],
    "array + rows": lambda dtype: (table(dtype) * 0 + rows(dtype))[3],
    "scatter_weighted_sum": lambda dtype: sj.scatter_weighted_sum(
        table(dtype), 0.0, IDS, ones(dtype, N, D), 1.0
    )[3],
    "lazy": lambda dtype: (
        -sj.optim.lazy(optax.sgd(1.0))
        .update(rows(dtype), optax.sgd(1.0).init(table(dtype)))[0]
        .to_dense()[3]
    ),
    "segment_sum": lambda dtype: sj.segment_sum(ones(dtype, N, D), ZEROS, 1)[0],
    "embedding_bag of rows": lambda dtype: bag(pulled(dtype))[0],
    **{f"{name} of rows": gradient(f, sj.grad, pulled) for name, f in READS.items()},
    **{f"{name} of a table": gradient(f, sj.grad, table) for name, f in READS.items()},
    **{
        f"dense gradient of {name}": gradient(READS[name], jax.grad, table)
        for name in ("bag", "padded bag", "dot")
    },
}


_DTYPES = dict(zip(SUMS, itertools.cycle(["bfloat16", "float16"])))


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize(
    "name",
    slow_but(SUMS, "lookup of rows", "bag of rows", "coalesce"),
)
def test_sums_of_16_bits(name):
    dtype = _DTYPES[name]
    got = jax.jit(SUMS[name], static_argnums=0)(jnp.dtype(dtype))
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.full(D, N))


def test_a_push_of_16_bits():
    store = sj.store.KVStore()
    store.init("t", (20, D), optax.sgd(1.0), dtype="bfloat16")
    grads = sj.SelectedRows(IDS, ones("bfloat16", N, D), height=20)
    store.push("t", grads)
    np.testing.assert_array_equal(np.asarray(store.pull_all("t"), np.float32)[3], -N)
