"""Bags of the rows of sharded tables. The oracle is a plain array on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import sparsejax as sj
from helpers import whole
from one_device import assert_close, mesh_of, table_of


pytestmark = pytest.mark.usefixtures("eight_devices")

V, D = 101, 4
TABLE = table_of(V, D)


def sharded(kind=AxisType.Auto, table: Any = TABLE) -> Any:
    return sj.parallel.shard_rows(table, mesh_of(kind=kind), "x")


@pytest.mark.parametrize(
    "layout, combiner, weighted, kind",
    [
        pytest.param(
            *("segments", "sqrtn", True, AxisType.Explicit), marks=pytest.mark.window
        ),
        ("padded", "max", False, AxisType.Explicit),
        ("segments", "logsumexp", False, AxisType.Auto),
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
    table = sharded(kind)
    with jax.set_mesh(table.mesh):
        got, g = jax.jit(sj.value_and_grad(loss, which))(table, w)
        assert_close((got, whole(g)), (want, want_g), rtol=1e-4)


@pytest.mark.window
@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_sqrtn_of_any_weights(size):
    # Bag 1 lies on three devices, and its largest weight is not on the first one.
    ids, bags = np.arange(8, dtype=np.int32), np.array([0, 1, 1, 1, 1, 1, 4, 2])
    w = jnp.array([1.0, 1e-3, 2.0, 0.5, 3.0, 1.0, 9.0, 0.0])

    def loss(size, t, w):
        x = sj.embedding_bag(t, ids, bags, 4, weights=size * w, combiner="sqrtn")
        return jnp.sum(jnp.sin(x))

    want = jax.jit(jax.value_and_grad(functools.partial(loss, 1.0), (0, 1)))
    value_and_grad = sj.value_and_grad(functools.partial(loss, size), (0, 1))
    got = whole(jax.jit(value_and_grad)(sharded(), w))
    assert_close(got, want(jnp.asarray(TABLE), w), rtol=1e-4)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_bags_of_complex_rows(combiner):
    table = (TABLE + 1j * table_of(V, D, seed=1)).astype(np.complex64)
    ids, bags, w = np.arange(8), np.arange(8) // 3, np.arange(8.0, dtype="f")
    bag = lambda t: sj.embedding_bag(t, ids, bags, 3, weights=w, combiner=combiner)
    want = np.stack([w[bags == k] @ table[:8][bags == k] for k in range(3)])
    by = w if combiner == "mean" else w * w
    by = np.array([by[bags == k].sum() for k in range(3)])
    want = want / (by if combiner == "mean" else np.sqrt(by))[:, None]
    assert_close(jax.jit(bag)(sharded(table=table)), want)
    assert_close(bag(table), want)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 0), (3, 0), (0, 4)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_bags_without_elements(kind, shape):
    ids, table = np.zeros(shape, np.int32), sharded(kind)
    every = ("sum", "mean", "max", "none")
    bags = lambda t: {c: sj.embedding_bag(t, ids, combiner=c) for c in every}
    with jax.set_mesh(table.mesh):
        assert_close(jax.jit(bags)(table), bags(jnp.asarray(TABLE)))
        total = lambda t: sum(jnp.sum(x) for x in bags(t).values())
        grad = jax.jit(sj.grad(total, tables=True))(table)
    np.testing.assert_array_equal(whole(grad), np.zeros_like(TABLE))


@pytest.mark.slow
def test_embedding_bag_of_segment_tensor():
    bags = sj.SegmentTensor.from_lists([[3, 5, 3], [], [7]])
    out, metrics = jax.jit(
        lambda t: (sj.embedding_bag(t, bags), sj.parallel.exchange_metrics(t, bags))
    )(sharded())
    assert_close(out, np.stack([2 * TABLE[3] + TABLE[5], np.zeros(D), TABLE[7]]))
    assert int(metrics.rows) <= 4
