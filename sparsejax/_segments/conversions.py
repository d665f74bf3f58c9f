"""Segments told by lengths, offsets, segment ids or ranges, and each from the other.

All of these cut one axis of n elements into K segments:

- lengths, `[K]`: how many elements each segment has;
- offsets, `[K + 1]`: where each segment begins, and where the last one ends;
- segment ids, `[n]`: the segment of each element; an id outside `[0, K)` is none;
- ranges, `[K, 2]`: where each segment begins, and its length.

Numbers that are known are checked, and computed with NumPy: in a loader, where shapes
change from batch to batch, nothing compiles. Under `jit` all of it is JAX.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._segments import numbers as _segment_numbers


_SORT_FIRST = "Sort them first: the elements of a range stand side by side."


# ------------------------------------------------------------------ public


def lengths_to_segment_ids(lengths: Any, total: int | None = None) -> jax.Array:
    """The segment of each element, of segments that follow one another.

    `ids = [0] * lengths[0] + [1] * lengths[1] + ...`

    Args:
      lengths: integers `[K]`, not negative.
      total: int, the size of the result, needed inside `jit`; the sum of `lengths` if
        left out. Elements beyond that sum get the id K, which is no segment.

    Returns:
      int32 `[total]`, ascending.

    Raises:
      TypeError: `lengths` are not integers.
      ValueError: not one axis, a negative length, or `total` is left out inside `jit`
        or less than the sum. (Inside `jit`, where the sum is not known, elements for
        which there is no room are left out: compare `total` with it there.)

    Example:
      >>> import sparsejax as sj
      >>> sj.lengths_to_segment_ids([1, 3, 0, 2])
      Array([0, 1, 1, 1, 3, 3], dtype=int32)
      >>> sj.lengths_to_segment_ids([1, 0, 2], total=5)
      Array([0, 2, 2, 3, 3], dtype=int32)

    References:
      Caffe2, `LengthsToSegmentIds`.
    """
    call = "sparsejax.lengths_to_segment_ids"
    lengths = _segment_numbers.as_lengths(call, lengths)
    if total is not None:
        total = _arguments.static_int(call, "total", total, not_an_int=TypeError)
    if isinstance(lengths, np.ndarray):
        need = int(lengths.sum())
        if total is not None and total < need:
            raise ValueError(
                f"{call}: the lengths sum to {need}, more than total={total}. Give at "
                f"least {need}, or leave total out."
            )
        total = need if total is None else total
    elif total is None:
        raise ValueError(
            f"{call}: inside jit the sum of lengths is not known, and the result needs "
            "a static size. Pass total=, a static int of at least that sum."
        )
    return jnp.asarray(_segment_numbers.ids_of_lengths(lengths, total))


def segment_ids_to_lengths(
    segment_ids: Any, num_segments: int | None = None
) -> jax.Array:
    """How many elements each segment has.

    `lengths[k] = sum_{i: segment_ids[i] == k} 1`

    Args:
      segment_ids: integers `[n]` in any order; ids out of range count nowhere.
      num_segments: int K, needed inside `jit`; the largest id + 1 if left out.

    Returns:
      int32 `[K]`.

    Raises:
      TypeError: `segment_ids` are not integers, or `num_segments` is no static int.
      ValueError: not one axis, or `num_segments` is left out inside `jit`.

    Example:
      >>> import sparsejax as sj
      >>> sj.segment_ids_to_lengths([0, 1, 1, 1, 3, 3])
      Array([1, 3, 0, 2], dtype=int32)

    References:
      Caffe2, `SegmentIdsToLengths`, which takes sorted ids only.
    """
    call = "sparsejax.segment_ids_to_lengths"
    ids, num_segments = _segment_numbers.ids_and_number(call, segment_ids, num_segments)
    return _segment_numbers.count_ids(ids, num_segments)


def lengths_to_offsets(lengths: Any) -> jax.Array:
    """Where each segment begins, and where the last one ends.

    `offsets[k] = lengths[0] + ... + lengths[k - 1]`

    Args:
      lengths: integers `[K]`, not negative.

    Returns:
      int32 `[K + 1]`, or int64 where `lengths` are.

    Raises:
      TypeError: `lengths` are not integers.
      ValueError: not one axis, a negative length, or a sum that the type cannot hold.

    Example:
      >>> import sparsejax as sj
      >>> sj.lengths_to_offsets([1, 3, 0, 2])
      Array([0, 1, 4, 4, 6], dtype=int32)

    References:
      Caffe2, `LengthsToOffsets` with `include_last_offset`; the row pointers of CSR.
    """
    call = "sparsejax.lengths_to_offsets"
    known = _segment_numbers.as_lengths(call, lengths)
    return _segment_numbers.offsets_of(call, known, _segment_numbers.width(lengths))


def offsets_to_lengths(offsets: Any) -> jax.Array:
    """How many elements each segment has.

    `lengths[k] = offsets[k + 1] - offsets[k]`

    Args:
      offsets: integers `[K + 1]` that never decrease.

    Returns:
      int32 `[K]`, or int64 where `offsets` are.

    Raises:
      TypeError: `offsets` are not integers.
      ValueError: not one axis, no entry at all, or a decreasing one.

    Example:
      >>> import sparsejax as sj
      >>> sj.offsets_to_lengths([0, 1, 4, 4, 6])
      Array([1, 3, 0, 2], dtype=int32)
    """
    call = "sparsejax.offsets_to_lengths"
    known = _segment_numbers.as_offsets(call, offsets, from_zero=False)
    if isinstance(known, np.ndarray):
        return jnp.asarray(np.diff(known).astype(_segment_numbers.width(offsets)))
    return jnp.diff(known)


def lengths_to_ranges(lengths: Any) -> jax.Array:
    """Where each segment begins, and its length.

    Args:
      lengths: integers `[K]`, not negative.

    Returns:
      int32 `[K, 2]` of (offset, length), or int64 where `lengths` are.

    Raises:
      TypeError: `lengths` are not integers.
      ValueError: not one axis, a negative length, or a sum that the type cannot hold.

    Example:
      >>> import sparsejax as sj
      >>> sj.lengths_to_ranges([1, 0, 2]).tolist()
      [[0, 1], [1, 0], [1, 2]]

    References:
      Caffe2, `LengthsToRanges`.
    """
    call = "sparsejax.lengths_to_ranges"
    known, dtype = (
        _segment_numbers.as_lengths(call, lengths),
        _segment_numbers.width(lengths),
    )
    offsets = _segment_numbers.offsets_of(call, known, dtype)
    return jnp.stack([offsets[:-1], jnp.asarray(known.astype(dtype))], axis=1)


def segment_ids_to_ranges(
    segment_ids: Any, num_segments: int | None = None
) -> jax.Array:
    """Where each segment begins, and its length.

    A segment without elements begins where the next one that has some does, and at 0
    where none follows.

    Args:
      segment_ids: integers `[n]`, ascending; ids out of range count nowhere, but they
        do take their places.
      num_segments: int K, needed inside `jit`; the largest id + 1 if left out.

    Returns:
      int32 `[K, 2]` of (offset, length). Inside `jit`, where ids that are not sorted
      cannot be refused, they make all of it -1.

    Raises:
      TypeError: `segment_ids` are not integers, or `num_segments` is no static int.
      ValueError: not one axis, ids that are not sorted, or `num_segments` is left out
        inside `jit`.

    Example:
      >>> import sparsejax as sj
      >>> sj.segment_ids_to_ranges([0, 0, 2]).tolist()
      [[0, 2], [2, 0], [2, 1]]

    References:
      Caffe2, `SegmentIdsToRanges`.
    """
    call = "sparsejax.segment_ids_to_ranges"
    ids, num_segments = _segment_numbers.ids_and_number(call, segment_ids, num_segments)
    if isinstance(ids, np.ndarray):
        _segment_numbers.check_sorted(call, ids, _SORT_FIRST)
        offsets = np.searchsorted(ids, np.arange(num_segments + 1))
        lengths = np.diff(offsets)
        begins = np.where(offsets[:-1] == offsets[-1], 0, offsets[:-1])
        return jnp.asarray(np.stack([begins, lengths], axis=1).astype(np.int32))
    numbers = jnp.arange(num_segments + 1, dtype=_arguments.index_dtype(num_segments))
    offsets = jnp.searchsorted(ids, numbers.astype(ids.dtype)).astype(jnp.int32)
    begins = jnp.where(offsets[:-1] == offsets[-1], np.int32(0), offsets[:-1])
    ranges = jnp.stack([begins, jnp.diff(offsets)], axis=1)
    return jnp.where(jnp.all(ids[1:] >= ids[:-1]), ranges, np.int32(-1))
