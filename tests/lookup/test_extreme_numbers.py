"""Squares under a root neither overflow nor vanish; no search goes on for ever."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj


SIZES = pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
IDS = np.array([0, 0, 1])


@SIZES
def test_sqrtn_of_any_weights(size):
    weights = size * jnp.array([1.0, 1.0, 2.0])
    x, padded = jnp.array([[1.0], [3.0], [5.0]]), jnp.array([[0, 1], [2, -1]])
    bag = functools.partial(sj.embedding_bag, x, combiner="sqrtn")

    @jax.jit
    def run(w):
        functions = (
            lambda w: bag(jnp.arange(3), IDS, 2, weights=w),
            lambda w: bag(
                padded, weights=jnp.append(w, 7.0).reshape(2, 2), padding_id=-1
            ),
            lambda w: sj.segment_sqrtn(x, IDS, 2, weights=w),
        )
        return [(f(w), jax.grad(lambda w, f=f: f(w).sum())(w)) for f in functions]

    half = 1 / np.sqrt(2)
    for out, slope in run(weights):
        np.testing.assert_allclose(out, [[4 * half], [5.0]], rtol=1e-6)
        np.testing.assert_allclose(size * slope, [-half, half, 0], atol=1e-6)


@SIZES
def test_max_norm_of_any_rows(size):
    table = np.float32(size) * np.array([[3, 4], [0, 0]], np.float32)
    read = lambda table: sj.lookup(table, jnp.arange(2), max_norm=size / 2)
    slope_of = jax.grad(lambda table: read(table)[0, 0])
    rows, slope = jax.jit(lambda table: (read(table), slope_of(table)))(table)
    np.testing.assert_allclose(rows / size, [[0.3, 0.4], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(slope, [[0.064, -0.048], [0, 0]], atol=1e-6)


@jax.jit
def std_and_normalize(x):
    std = lambda x: sj.segment_std(x, IDS, 2)
    return std(x), jax.grad(lambda x: std(x).sum())(x), sj.segment_normalize(x, IDS, 2)


@SIZES
def test_std_and_normalize_of_any_numbers(size):
    x = np.float32(size) * np.array([1, 3, 7], np.float32)
    std, slope, normal = std_and_normalize(x)
    np.testing.assert_allclose(std / size, [1, 0], rtol=1e-6)
    np.testing.assert_allclose(slope, [-0.5, 0.5, 0], atol=1e-6)
    unit = size if size >= 1 else np.sqrt(1e-5)  # eps bounds the variance from below
    np.testing.assert_allclose(normal, size / unit * np.array([-1, 1, 0]), rtol=1e-6)


@SIZES
def test_cosine_of_any_vectors(size):
    table = jnp.array([[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    scores, ids = sj.top_k(size * table, jnp.array([[1e25, 0.0]]), 3, score="cosine")
    np.testing.assert_allclose(scores, [[1, 0.6, 0]], rtol=1e-6)
    assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_greedy_search_ends(bits):
    wide_offset, tiny = 1000 + 1e-3 * np.arange(4), 1e-38 * np.arange(4)
    few_steps_of_float32 = 1 + 1e-6 * np.arange(4)
    rows = np.array([wide_offset, few_steps_of_float32, tiny], np.float32)
    error = jax.jit(lambda table: jnp.abs(table.dequantize() - rows).max(axis=1))
    greedy, plain = (error(sj.quantize(rows, bits, search=s)) for s in ("greedy", None))
    assert np.all(np.asarray(greedy) <= 1.2 * np.asarray(plain) + 1e-37)
