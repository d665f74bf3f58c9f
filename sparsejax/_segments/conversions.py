"""Lengths, offsets, segment ids and ranges: checks and conversions.

All of these describe how one axis of n elements is split into K segments:

- lengths, `[K]`: the number of elements in each segment;
- offsets, `[K + 1]`: the start of each segment, and the end of the last one;
- segment ids, `[n]`: the segment of each element, out of range if outside `[0, K)`;
- ranges, `[K, 2]`: the start and the length of each segment.

Concrete values are checked, and converted by NumPy in int64: in a data loader, shapes
change from batch to batch, and JAX would compile for each. Under `jit` everything is
JAX. `isinstance(x, np.ndarray)` distinguishes the two.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike
from sparsejax._rows import indexing


# ------------------------------------------------------------------ public


def lengths_to_segment_ids(lengths: ArrayLike, total: int | None = None) -> jax.Array:
    """Returns segment ids of consecutive segments, from their lengths.

    `ids = [0] * lengths[0] + [1] * lengths[1] + ...`

    Args:
      lengths: integers `[K]`, not negative.
      total: int, the size of the result; by default the sum of `lengths`, and required
        inside `jit`. Elements beyond that sum get the id K, which is out of range.

    Returns:
      int32 `[total]`, ascending.

    Raises:
      TypeError: `lengths` are not integers.
      ValueError: `lengths` is not one-dimensional or has a negative entry, or `total`
        is less than the sum, or missing inside `jit`. Inside `jit`, where the sum is
        unknown, elements beyond `total` are cut without an error.

    Example:
      >>> import sparsejax as sj
      >>> sj.lengths_to_segment_ids([1, 3, 0, 2])
      Array([0, 1, 1, 1, 3, 3], dtype=int32)
      >>> sj.lengths_to_segment_ids([1, 0, 2], total=5)
      Array([0, 2, 2, 3, 3], dtype=int32)

    References:
      Caffe2, `LengthsToSegmentIds`.
    """
    lengths = as_lengths(lengths)
    if total is not None:
        total = _arguments.static_int("total", total)
    if isinstance(lengths, np.ndarray):
        need = int(lengths.sum())
        total = need if total is None else total
        if total < need:
            raise ValueError(
                f"The lengths sum to {need}, so total={total} is too small. Omit it."
            )
    elif total is None:
        raise ValueError(
            "Inside jit the sum of lengths is unknown. Pass total, a static int."
        )
    return jnp.asarray(segment_ids_of(lengths, total))


def segment_ids_to_lengths(
    segment_ids: ArrayLike, num_segments: int | None = None
) -> jax.Array:
    """Returns the number of elements in each segment.

    `lengths[k] = sum_{i: segment_ids[i] == k} 1`

    Args:
      segment_ids: integers `[n]` in any order; ids out of range are not counted.
      num_segments: int K, required inside `jit`; by default the largest id + 1.

    Returns:
      int32 `[K]`.

    Raises:
      TypeError: `segment_ids` are not integers, or `num_segments` is not a static int.
      ValueError: `segment_ids` is not one-dimensional, or `num_segments` is missing
        inside `jit`.

    Example:
      >>> import sparsejax as sj
      >>> sj.segment_ids_to_lengths([0, 1, 1, 1, 3, 3])
      Array([1, 3, 0, 2], dtype=int32)

    References:
      Caffe2, `SegmentIdsToLengths`, which takes sorted ids only.
    """
    ids, num_segments = _ids_and_count(segment_ids, num_segments)
    if isinstance(ids, np.ndarray):
        ids = ids[(ids >= 0) & (ids < num_segments)]
        counts = np.bincount(ids, minlength=num_segments)
        return jnp.asarray(counts.astype(np.int32))
    counts = jnp.zeros((num_segments,), jnp.int32)
    return indexing.add_rows(counts, ids, jnp.ones(ids.shape, jnp.int32))


def lengths_to_offsets(lengths: ArrayLike) -> jax.Array:
    """Returns the start of each segment, and the end of the last one.

    `offsets[k] = lengths[0] + ... + lengths[k - 1]`

    Args:
      lengths: integers `[K]`, not negative.

    Returns:
      int32 `[K + 1]`; int64 if `lengths` are int64.

    Raises:
      TypeError: `lengths` are not integers.
      ValueError: `lengths` is not one-dimensional or has a negative entry, or its sum
        overflows the dtype.

    Example:
      >>> import sparsejax as sj
      >>> sj.lengths_to_offsets([1, 3, 0, 2])
      Array([0, 1, 4, 4, 6], dtype=int32)

    References:
      Caffe2, `LengthsToOffsets` with `include_last_offset`; the row pointers of CSR.
    """
    return jnp.asarray(_offsets_of(as_lengths(lengths), _index_dtype(lengths)))


def offsets_to_lengths(offsets: ArrayLike) -> jax.Array:
    """Returns the number of elements in each segment.

    `lengths[k] = offsets[k + 1] - offsets[k]`

    Args:
      offsets: integers `[K + 1]` that never decrease.

    Returns:
      int32 `[K]`; int64 if `offsets` are int64.

    Raises:
      TypeError: `offsets` are not integers.
      ValueError: `offsets` is not one-dimensional, is empty, or decreases.

    Example:
      >>> import sparsejax as sj
      >>> sj.offsets_to_lengths([0, 1, 4, 4, 6])
      Array([1, 3, 0, 2], dtype=int32)
    """
    checked = as_offsets(offsets, from_zero=False)
    return jnp.asarray((checked[1:] - checked[:-1]).astype(_index_dtype(offsets)))


def lengths_to_ranges(lengths: ArrayLike) -> jax.Array:
    """Returns the start and the length of each segment, from the lengths.

    Args:
      lengths: integers `[K]`, not negative.

    Returns:
      int32 `[K, 2]` of (offset, length); int64 if `lengths` are int64.

    Raises:
      TypeError, ValueError: as `lengths_to_offsets`.

    Example:
      >>> import sparsejax as sj
      >>> sj.lengths_to_ranges([1, 0, 2]).tolist()
      [[0, 1], [1, 0], [1, 2]]

    References:
      Caffe2, `LengthsToRanges`.
    """
    checked, dtype = as_lengths(lengths), _index_dtype(lengths)
    begins = _offsets_of(checked, dtype)[:-1]
    return jnp.stack([jnp.asarray(begins), jnp.asarray(checked.astype(dtype))], axis=1)


def segment_ids_to_ranges(
    segment_ids: ArrayLike, num_segments: int | None = None
) -> jax.Array:
    """Returns the start and the length of each segment, from sorted segment ids.

    An empty segment begins with the next non-empty segment, or at 0 if all later
    segments are empty.

    Args:
      segment_ids: integers `[n]`, ascending; ids out of range are not counted, but
        take up positions.
      num_segments: int K, required inside `jit`; by default the largest id + 1.

    Returns:
      int32 `[K, 2]` of (offset, length). Inside `jit`, unsorted ids cannot raise an
      error; they make the whole result -1.

    Raises:
      TypeError: `segment_ids` are not integers, or `num_segments` is not a static int.
      ValueError: `segment_ids` is not one-dimensional or not sorted, or `num_segments`
        is missing inside `jit`.

    Example:
      >>> import sparsejax as sj
      >>> sj.segment_ids_to_ranges([0, 0, 2]).tolist()
      [[0, 2], [2, 0], [2, 1]]

    References:
      Caffe2, `SegmentIdsToRanges`.
    """
    ids, num_segments = _ids_and_count(segment_ids, num_segments)
    numbers = np.arange(num_segments + 1, dtype=_arguments.index_dtype(num_segments))
    xp: Any = np if is_known(ids) else jnp
    if xp is np:
        check_ascending("segment_ids", ids, "Sort them: ranges are contiguous.")
        offsets = np.searchsorted(ids, numbers).astype(np.int32)
    else:
        offsets = indexing.search_sorted(ids, jnp.asarray(numbers.astype(ids.dtype)))
    begins = xp.where(offsets[:-1] == offsets[-1], np.int32(0), offsets[:-1])
    ranges = xp.stack([begins, offsets[1:] - offsets[:-1]], axis=1)
    if xp is jnp:
        ranges = jnp.where(jnp.all(ids[1:] >= ids[:-1]), ranges, np.int32(-1))
    return jnp.asarray(ranges)


# ------------------------------------------------------------------ checks


def is_known(x: Any) -> bool:
    """Returns True if the values of `x` are concrete and readable on this host."""
    return _arguments.is_concrete(x) and getattr(x, "is_fully_addressable", True)


def as_lengths(lengths: Any) -> Any:
    """Returns lengths `[K]`: checked NumPy int64 if known, else a JAX array."""
    lengths = _as_vector(lengths, "lengths", "K")
    if isinstance(lengths, np.ndarray) and lengths.min(initial=0) < 0:
        at = int(np.argmax(lengths < 0))
        raise ValueError(
            f"lengths must be non-negative, got {lengths[at]} for segment {at}."
        )
    return lengths


def as_offsets(offsets: Any, *, from_zero: bool = True) -> Any:
    """Returns offsets `[K + 1]`: checked NumPy int64 if known, else a JAX array."""
    offsets = _as_vector(offsets, "offsets", "K + 1")
    if offsets.shape[0] == 0:
        raise ValueError(
            "offsets must have K + 1 entries, got none. For K = 0 pass [0]."
        )
    if isinstance(offsets, np.ndarray):
        if from_zero and offsets[0] != 0:
            raise ValueError(
                f"offsets must be 0, then running sums, got {offsets[0]} first."
            )
        way_out = "Offsets are 0, then the cumulative lengths."
        check_ascending("offsets", offsets, way_out)
    return offsets


def as_segment_ids(segment_ids: Any, num_segments: int) -> Any:
    """Returns segment ids `[n]`, ids out of range as `num_segments`, NumPy as NumPy."""
    ids = _arguments.as_integers(segment_ids, "segment_ids")
    _check_one_axis(ids, "segment_ids", "n")
    dtype = _arguments.index_dtype(num_segments)
    if isinstance(ids, np.ndarray):
        outside = (ids < 0) | (ids >= num_segments)
        return np.where(outside, num_segments, ids.astype(np.int64)).astype(dtype)
    ids = _arguments.as_ids(ids, num_segments, "segment_ids")
    inside = indexing.in_range(ids, num_segments)
    return jnp.where(inside, ids, _arguments.scalar(num_segments, ids))


def check_ascending(name: str, x: np.ndarray, way_out: str) -> None:
    """Raises a ValueError if known numbers decrease."""
    decreases = x[1:] < x[:-1]
    if decreases.any():
        at = int(np.argmax(decreases)) + 1
        raise ValueError(
            f"{name} must be sorted, got {x[at]} after {x[at - 1]} at position {at}. "
            f"{way_out}"
        )


def _check_one_axis(x: Any, name: str, axis: str) -> None:
    if x.ndim != 1:
        raise ValueError(
            f"{name} must be [{axis}], got shape {x.shape}. For a batch use jax.vmap."
        )


def _as_vector(x: Any, name: str, axis: str) -> Any:
    """Returns integers `[axis]`: NumPy int64 if known, else a JAX array."""
    x = _arguments.as_integers(x, name)
    _check_one_axis(x, name, axis)
    if is_known(x):
        return np.asarray(x).astype(np.int64)
    return x.astype(_index_dtype(x))


def _ids_and_count(ids: Any, num_segments: int | None) -> tuple[Any, int]:
    """Returns segment ids, as a NumPy array if known, and the number of segments."""
    ids = _as_vector(ids, "segment_ids", "n")
    is_numpy = isinstance(ids, np.ndarray)
    if num_segments is None:
        if not is_numpy:
            raise ValueError(
                "Inside jit the largest id is unknown. Pass num_segments, a static int."
            )
        return ids, int(ids.max(initial=-1)) + 1
    num_segments = _arguments.static_int("num_segments", num_segments)
    # 64-bit ids would wrap if JAX indexes with 32 bits.
    return ids if is_numpy else _arguments.as_ids(ids, num_segments), num_segments


# ------------------------------------------------------------------ computing


def segment_ids_of(lengths: Any, size: int) -> Any:
    """Returns segment ids `[size]` from checked lengths; K after the last segment.

    The result is a NumPy array if the lengths are one.
    """
    k = lengths.shape[0]
    dtype = _arguments.index_dtype(k)
    if isinstance(lengths, np.ndarray):
        ids = np.repeat(np.arange(k, dtype=dtype), lengths)
        return np.pad(ids, (0, size - ids.size), constant_values=k)
    # The id of an element is the number of segments that end before it.
    ends = jnp.cumsum(lengths, dtype=lengths.dtype)
    steps = indexing.add_rows(jnp.zeros((size,), dtype), ends, jnp.ones((k,), dtype))
    return jnp.cumsum(steps, dtype=dtype)


def _index_dtype(x: Any) -> Any:
    """Returns int64 for 64-bit integers if x64 is enabled, else int32."""
    itemsize = getattr(x, "dtype", np.dtype("int32")).itemsize
    return np.dtype(np.int64 if itemsize > 4 and _arguments.x64_enabled() else np.int32)


def _offsets_of(lengths: Any, dtype: Any) -> Any:
    """Returns offsets `[K + 1]`, a NumPy array if the lengths are one."""
    is_numpy = isinstance(lengths, np.ndarray)
    if is_numpy and lengths.sum() > np.iinfo(dtype).max:
        raise ValueError(
            f"The lengths sum to {lengths.sum()}, over int32. Set jax_enable_x64."
        )
    xp = np if is_numpy else jnp
    return xp.pad(xp.cumsum(lengths, dtype=dtype), (1, 0))
