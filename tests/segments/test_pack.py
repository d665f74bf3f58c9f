"""pack_segments and unpack_segments, against a loop."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import sparsejax as sj
from helpers import assert_same_bits, assert_trees_close


LENGTHS = np.array([2, 0, 4, 1])
DATA = np.arange(1, 15, dtype=np.float32).reshape(7, 2)


def packed(data, lengths, max_length):
    """The operation as a loop."""
    out = np.zeros((len(lengths), max_length, *data.shape[1:]), data.dtype)
    starts = np.cumsum(lengths) - lengths
    for s, (start, length) in enumerate(zip(starts, lengths)):
        kept = data[start : start + length][:max_length]
        out[s, : len(kept)] = kept
    return out


def make(data: Any = DATA, lengths=LENGTHS):
    return sj.SegmentTensor.from_lengths(data, lengths)


@pytest.mark.parametrize("max_length", [3, 0, 6])
def test_pack(max_length):
    got, mask = sj.pack_segments(make(), max_length, return_mask=True)
    assert_trees_close(got, packed(DATA, LENGTHS, max_length))
    assert_trees_close(mask, np.arange(max_length) < LENGTHS[:, None])
    assert_same_bits(sj.pack_segments(make(), max_length), got)


@pytest.mark.parametrize(
    "row_shape, dtype", [((), "bfloat16"), ((2, 3), "int8"), ((0,), "bool")]
)
def test_pack_keeps_rank_and_dtype(row_shape, dtype):
    data = np.arange(7 * int(np.prod(row_shape))).reshape(7, *row_shape)
    data = data.astype(jnp.dtype(dtype))
    got = jax.jit(lambda data: sj.pack_segments(make(data), 3))(data)
    assert_same_bits(got, packed(data, LENGTHS, 3))


def test_pack_of_elements_in_any_order_and_of_empty_ones():
    ids = np.array([2, 4, 0, -1, 2, 0, 3])
    data = np.array([1, np.nan, 2, np.nan, 3, 4, 5], np.float32)
    st = sj.SegmentTensor.from_segment_ids(data, ids, 4)
    want = np.array([[2, 4], [0, 0], [1, 3], [5, 0]], np.float32)
    assert_trees_close(sj.pack_segments(st, 2), want)


def test_pack_of_a_tree():
    tree = {"a": DATA, "b": (DATA[:, 0].astype(np.int32),)}
    got = sj.pack_segments(make(tree), 3)
    want = {"a": packed(DATA, LENGTHS, 3), "b": (packed(tree["b"][0], LENGTHS, 3),)}
    assert_trees_close(got, want)
    back = sj.unpack_segments(got, np.minimum(LENGTHS, 3))
    assert back.values["a"].shape == (6, 2) and back.values["b"][0].dtype == np.int32


def test_unpack_is_the_inverse():
    for max_length in (4, 6):
        st = sj.unpack_segments(packed(DATA, LENGTHS, max_length), LENGTHS)
        assert_same_bits(st.values, DATA)
        assert st.lengths.tolist() == LENGTHS.tolist() and st.is_sorted
    assert sj.unpack_segments([[1, 2], [3, 0]], [2, 1]).values.tolist() == [1, 2, 3]
    # Cut elements do not count: a length is at most the width, and not negative.
    st = sj.unpack_segments(packed(DATA, LENGTHS, 3), np.array([2, -1, 2**30, 1]))
    assert_same_bits(st.values, DATA[[0, 1, 2, 3, 4, 6]])
    assert st.lengths.tolist() == [2, 0, 3, 1]


def test_unpack_inside_jit():
    f = lambda padded, lengths: sj.unpack_segments(padded, lengths)
    jitted = jax.jit(chex.assert_max_traces(f, 1))
    padded = jnp.asarray(packed(DATA, LENGTHS, 4)).at[1].set(jnp.nan)
    st = jitted(padded, LENGTHS)
    assert st.values.shape == (16, 2)
    assert_same_bits(st.values[:7], DATA)
    assert st.segment_ids[7:].tolist() == [4] * 9
    assert np.all(np.asarray(st.values[7:]) == 0)
    assert jitted(padded, LENGTHS[::-1].copy()).lengths.tolist() == [1, 4, 0, 2]


def test_nothing_to_pack():
    empty = make(DATA[:0], np.zeros(3, int))
    assert_trees_close(sj.pack_segments(empty, 2), np.zeros((3, 2, 2), np.float32))
    none = make(DATA[:0], np.zeros(0, int))
    assert sj.pack_segments(none, 2).shape == (0, 2, 2)
    for shape in [(0, 3, 2), (3, 0, 2), (0, 0)]:
        st = sj.unpack_segments(np.zeros(shape, np.float32), np.zeros(shape[0], int))
        assert st.values.shape == (0, *shape[2:]) and st.num_segments == shape[0]
        st = jax.jit(sj.unpack_segments)(jnp.zeros(shape), jnp.zeros(shape[0], int))
        assert st.capacity == 0


@pytest.mark.slow
def test_differentiates(x64):
    data = DATA.astype(np.float64)
    check_grads(jax.jit(lambda x: sj.pack_segments(make(x), 3) ** 2), (data,), order=1)
    padded = packed(data, LENGTHS, 3)
    f = lambda x: sj.unpack_segments(x, LENGTHS).values ** 2
    check_grads(jax.jit(f), (padded,), order=1)
    assert jax.eval_shape(f, padded.astype(np.float32)).dtype == jnp.float32
    # Cut elements and unused slots have gradient zero.
    grad = jax.jit(jax.grad(lambda x: jnp.sum(sj.pack_segments(make(x), 3))))(data)
    assert np.asarray(grad)[:, 0].tolist() == [1, 1, 1, 1, 1, 0, 1]
    total = lambda x: jnp.sum(sj.unpack_segments(x, LENGTHS).values)
    grad = np.asarray(jax.jit(jax.grad(total))(padded))
    assert grad[..., 0].tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0]]


@pytest.mark.slow
def test_vmap():
    data = np.stack([DATA, -DATA])
    got = jax.jit(jax.vmap(lambda x: sj.pack_segments(make(x), 3)))(data)
    want = packed(DATA, LENGTHS, 3)
    assert_trees_close(got, np.stack([want, -want]))
    lengths = np.stack([LENGTHS, LENGTHS[::-1]])
    f = lambda padded, n: sj.unpack_segments(padded, n).values
    got = np.asarray(jax.jit(jax.vmap(f))(np.stack([want, want]), lengths))
    assert_trees_close(got[0, :6], DATA[[0, 1, 2, 3, 4, 6]])
    assert_trees_close(got[1, :2], np.array([DATA[0], 0 * DATA[0]]))
