"""unique and partition, against NumPy."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import sparsejax as sj
from helpers import assert_same_bits


N = 12  # ids of one shape compile once
ids_of = st.lists(
    st.integers(-4, 5) | st.sampled_from([-(2**31), 2**31 - 1]), min_size=N, max_size=N
)


def check_unique(ids, capacity, got):
    """All that `unique` promises, from NumPy's."""
    ids = np.asarray(ids)
    largest = np.iinfo(ids.dtype).max
    want = np.unique(ids)
    kept = want[:capacity]
    out, inverse, count = (np.asarray(x) for x in got)
    assert (out.dtype, inverse.dtype, count.dtype) == (ids.dtype, np.int32, np.int32)
    assert int(count) == len(want)
    padding = [largest] * (capacity - len(kept))
    assert out.tolist() == [*kept.tolist(), *padding]
    assert inverse.shape == ids.shape
    slots = {value: i for i, value in enumerate(kept.tolist())}
    want_inverse = [slots.get(value, capacity) for value in ids.reshape(-1).tolist()]
    assert inverse.reshape(-1).tolist() == want_inverse


jitted_unique = jax.jit(sj.unique, static_argnums=1)


# ------------------------------------------------------------------ unique


@hypothesis.settings(max_examples=40)
@hypothesis.given(ids=ids_of, capacity=st.sampled_from([0, 4, N, 20]))
def test_unique(ids, capacity):
    ids = np.array(ids, np.int32)
    check_unique(ids, capacity, jitted_unique(ids, capacity))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_types_stay(dtype, x64):
    limits = np.iinfo(dtype)
    ids = np.array([[3, limits.max, 3], [limits.min, 7, limits.max]], dtype)
    for capacity in (2, 9):
        check_unique(ids, capacity, jitted_unique(ids, capacity))
    # Also parts more than the type holds.
    for num_parts in (7, 300):
        check_partition(ids, num_parts, jitted_partition(ids, num_parts))


def test_64_bit_ids_are_never_cut():
    ids = np.array([5, 2**31 - 1, 5, -(2**31)])
    assert ids.dtype == np.int64
    out, inverse, _ = sj.unique(ids, 4)
    assert np.array_equal(np.asarray(out)[np.asarray(inverse)], ids)
    for bad in (np.array([0, 2**31]), [2**40], np.array([2**33], np.uint64)):
        for f in sj.unique, sj.partition:
            with pytest.raises(ValueError, match="jax_enable_x64"):
                f(bad, 2)


def test_of_none():
    for ids in ([], np.zeros((2, 0), int)):
        out, inverse, count = sj.unique(ids, 2)
        assert out.tolist() == [2**31 - 1] * 2 and int(count) == 0
        assert inverse.shape == np.shape(ids)
    assert sj.partition([], 3).lengths.tolist() == [0, 0, 0]


def test_unique_maps_over_a_batch():
    ids = np.array([[3, 3, 1], [2, 9, 2]], np.int32)
    got = jax.jit(jax.vmap(lambda x: sj.unique(x, 4)))(ids)
    for i in range(2):
        check_unique(ids[i], 4, [np.asarray(x)[i] for x in got])


# ------------------------------------------------------------------ partition


def check_partition(ids, num_parts, got):
    ids = np.asarray(ids).reshape(-1)
    assert got.num_segments == num_parts and got.capacity == ids.size and got.is_sorted
    part = ids.astype(object) % num_parts  # Python's integers and Python's remainder
    position = np.concatenate([np.flatnonzero(part == p) for p in range(num_parts)])
    assert got.lengths.tolist() == [int(np.sum(part == p)) for p in range(num_parts)]
    assert got.values["position"].dtype == np.int32
    assert got.values["position"].tolist() == position.tolist()
    assert_same_bits(got.values["id"], ids[position.astype(int)])


@hypothesis.settings(max_examples=40)
@hypothesis.given(ids=ids_of, num_parts=st.sampled_from([1, 3, 8]))
def test_partition(ids, num_parts):
    ids = np.array(ids, np.int32)
    check_partition(ids, num_parts, jitted_partition(ids, num_parts))


jitted_partition = jax.jit(sj.partition, static_argnums=1)


def test_partition_into_very_many_parts():
    """More parts times ids than 32 bits count."""
    ids = np.array([2**30, 5, -1, 0, 5, 2**29], np.int32)
    got = sj.partition(ids, 2**29)
    assert got.values["position"].tolist() == [0, 3, 5, 1, 4, 2]
    assert got.values["id"].tolist() == [2**30, 0, 2**29, 5, 5, -1]
    assert got.segment_ids.tolist() == [0, 0, 0, 5, 5, 2**29 - 1]
