"""Lengths, offsets, segment ids and ranges, each from the others, against NumPy."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from helpers import assert_trees_close


lengths_of_five = st.lists(st.integers(0, 4), min_size=5, max_size=5)


@functools.cache
def traced(f, *static):
    """`f` under jit, compiled once."""
    return jax.jit(lambda x: f(x, *static))


def test_of_nothing():
    for f, shape in (
        (sj.lengths_to_segment_ids, (0,)),
        (sj.segment_ids_to_lengths, (0,)),
        (sj.lengths_to_offsets, (1,)),
        (sj.lengths_to_ranges, (0, 2)),
        (sj.segment_ids_to_ranges, (0, 2)),
    ):
        got = f([])
        assert got.shape == shape and got.dtype == jnp.int32 and not got.any()
    assert sj.offsets_to_lengths([0]).shape == (0,)


# ------------------------------------------------------------------ against NumPy


@hypothesis.given(lengths_of_five)
def test_each_from_the_others(lengths):
    """Outside of jit and inside."""
    ids, offsets = np.repeat(np.arange(5), lengths), np.cumsum([0, *lengths])
    ranges = np.stack([offsets[:-1], lengths], axis=1)
    # Only the starts of empty segments at the end differ, as in Caffe2.
    of_ids = np.where(ranges[:, :1] == sum(lengths), 0, ranges)
    padded = np.append(ids, [5] * (20 - len(ids)))
    np.testing.assert_array_equal(sj.lengths_to_segment_ids(lengths), ids)
    for f, x, want, *static in (
        (sj.lengths_to_segment_ids, lengths, padded, 20),
        (sj.lengths_to_offsets, lengths, offsets),
        (sj.lengths_to_ranges, lengths, ranges),
        (sj.offsets_to_lengths, offsets, lengths),
        (sj.segment_ids_to_lengths, padded, lengths, 5),
        (sj.segment_ids_to_ranges, padded, of_ids, 5),
    ):
        x = np.asarray(x, np.int32)
        for got in f(x, *static), traced(f, *static)(x):
            np.testing.assert_array_equal(got, want)
            assert got.dtype == jnp.int32


@hypothesis.given(st.lists(st.integers(-2, 7), min_size=9, max_size=9))
def test_ids_out_of_range_count_nowhere(ids):
    ids = np.array(ids, np.int32)
    want = [int((ids == k).sum()) for k in range(5)]
    assert sj.segment_ids_to_lengths(ids, 5).tolist() == want
    count = traced(sj.segment_ids_to_lengths, 5)
    assert count(ids).tolist() == want
    # In ranges they count nowhere either, but take their places.
    ids.sort()
    ranges = sj.segment_ids_to_ranges(ids, 5)
    assert ranges[:, 1].tolist() == want
    for k, (begin, length) in enumerate(ranges.tolist()):
        assert (ids[begin : begin + length] == k).all()
    assert_trees_close(traced(sj.segment_ids_to_ranges, 5)(ids), ranges)


@pytest.mark.slow
def test_vmap():
    lengths = np.array([[2, 0, 1], [0, 0, 0], [1, 1, 4]], np.int32)
    to_ids = traced(sj.lengths_to_segment_ids, 6)
    ids = np.asarray(jax.vmap(to_ids)(lengths))
    for row, of_one in zip(ids, lengths):
        assert_trees_close(row, to_ids(of_one))
    views = lambda x: (sj.segment_ids_to_lengths(x, 3), sj.segment_ids_to_ranges(x, 3))
    back, ranges = jax.jit(jax.vmap(views))(ids)
    assert_trees_close(back, lengths)
    assert ranges.tolist()[2] == [[0, 1], [1, 1], [2, 4]]


def test_errors_under_jit_show_in_the_result():
    unsorted = traced(sj.segment_ids_to_ranges, 3)(jnp.array([1, 0, 2]))
    assert (unsorted == -1).all()
    cut = traced(sj.lengths_to_segment_ids, 3)(jnp.array([2, 2, 1], jnp.int32))
    assert cut.tolist() == [0, 0, 1]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint32])
def test_types_of_integers(dtype):
    lengths, ids = np.array([1, 0, 2], dtype), np.array([0, 0, 1, 5, 5], dtype)
    for f in sj.lengths_to_offsets, sj.lengths_to_ranges, sj.lengths_to_segment_ids:
        assert f(lengths).dtype == jnp.int32
        assert_trees_close(f(lengths), f(lengths.astype(np.int32)))
    assert sj.segment_ids_to_lengths(ids).tolist() == [2, 1, 0, 0, 0, 2]
    assert sj.segment_ids_to_ranges(ids, 7)[:, 1].tolist() == [2, 1, 0, 0, 0, 2, 0]
    # A small type must not overflow in its sums, or its ids.
    many = np.full(200, 100, dtype)
    for offsets in sj.lengths_to_offsets, traced(sj.lengths_to_offsets):
        assert offsets(many)[-1] == 20_000
    assert traced(sj.lengths_to_segment_ids, 20_000)(many)[-1] == 199


def test_x64(x64):
    lengths = jnp.array([1, 0, 2])
    assert lengths.dtype == jnp.int64
    wide = [sj.lengths_to_offsets, sj.lengths_to_ranges, sj.offsets_to_lengths]
    for f in wide:
        for g in f, jax.jit(f):
            assert g(jnp.array([0, 1, 3])).dtype == jnp.int64
            assert g(jnp.array([0, 1, 3], jnp.int32)).dtype == jnp.int32
    offsets = sj.lengths_to_offsets(jnp.array([2**31, 1]))
    assert offsets.tolist() == [0, 2**31, 2**31 + 1]
    ids = sj.lengths_to_segment_ids(lengths)
    assert ids.dtype == sj.segment_ids_to_lengths(ids).dtype == jnp.int32
    assert sj.segment_ids_to_ranges(jnp.array([0, 2])).dtype == jnp.int32
    # Ids beyond 32 bits are out of range and must not wrap into it.
    for f in sj.segment_ids_to_lengths, traced(sj.segment_ids_to_lengths, 2):
        more = () if f is not sj.segment_ids_to_lengths else (2,)
        assert f(jnp.array([0, 2**32, 1, -(2**32)]), *more).tolist() == [1, 1]
