"""segment_count, segment_any and segment_all."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax._arguments import ArrayLike
from sparsejax._segments import SegmentTensor
from sparsejax._segments.reduce.segments import (
    Segments,
    check_arguments,
    fill_empty,
    over_segments,
)


_COUNT = "sparsejax.segment_count"
_ANY = "sparsejax.segment_any"
_ALL = "sparsejax.segment_all"


def segment_count(
    data: ArrayLike | SegmentTensor,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    *,
    empty: ArrayLike | None = None,
) -> jax.Array:
    """Number of elements in each segment.

    `out[s] = |{i: segment_ids[i] == s}|`

    Args:
      data: `[n, ...]`, any dtype; only n is used; or a SegmentTensor.
      segment_ids: integers `[n]`; see `segment_sum` for this and the next two.
      num_segments: int.
      indices_are_sorted: bool.
      empty: int, the result for an empty segment; 0 by default.

    Returns:
      int32 `[num_segments]`, one number per segment, even if `data` has more axes.

    Raises:
      TypeError, ValueError: as `segment_sum`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_count(jnp.array([5.0, 6.0, 7.0]), jnp.array([0, 2, 0]))
      Array([2, 0, 1], dtype=int32)

    References:
      Caffe2, `SegmentIdsToLengths`.
    """
    _, segments = check_arguments(
        _COUNT, data, segment_ids, num_segments, indices_are_sorted
    )
    return fill_empty(_COUNT, segments.lengths(), segments, empty)


def segment_any(
    data: ArrayLike | SegmentTensor,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    *,
    empty: ArrayLike | None = None,
) -> Any:
    """Whether any element of each segment is true.

    `out[s] = or_{i: segment_ids[i] == s} data[i]`

    Args:
      data: bool `[n, ...]`; or a SegmentTensor, which has its own segments.
      segment_ids: integers `[n]`; see `segment_sum` for this and the next two.
      num_segments: int.
      indices_are_sorted: bool.
      empty: bool, the result for an empty segment; False by default.

    Returns:
      bool `[num_segments, ...]`.

    Raises:
      TypeError, ValueError: as `segment_sum`; TypeError also if `data` are not
        booleans.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_any(jnp.array([False, True, False]), jnp.array([0, 0, 2]))
      Array([ True, False, False], dtype=bool)

    References:
      NumPy, `any`.
    """
    reduce = functools.partial(_reduce_bool, _ANY, "max", empty)
    return over_segments(
        _ANY, data, segment_ids, num_segments, indices_are_sorted, reduce
    )


def segment_all(
    data: ArrayLike | SegmentTensor,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    *,
    empty: ArrayLike | None = None,
) -> Any:
    """Whether all elements of each segment are true.

    `out[s] = and_{i: segment_ids[i] == s} data[i]`

    Args:
      data: bool `[n, ...]`; or a SegmentTensor, which has its own segments.
      segment_ids: integers `[n]`; see `segment_sum` for this and the next two.
      num_segments: int.
      indices_are_sorted: bool.
      empty: bool, the result for an empty segment; True by default.

    Returns:
      bool `[num_segments, ...]`.

    Raises:
      TypeError, ValueError: as `segment_sum`; TypeError also if `data` are not
        booleans.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_all(jnp.array([False, True, True]), jnp.array([0, 0, 2]))
      Array([False,  True,  True], dtype=bool)

    References:
      NumPy, `all`.
    """
    reduce = functools.partial(_reduce_bool, _ALL, "min", empty)
    return over_segments(
        _ALL, data, segment_ids, num_segments, indices_are_sorted, reduce
    )


def _reduce_bool(
    call: str, method: str, empty: Any, x: jax.Array, segments: Segments
) -> jax.Array:
    if x.dtype != jnp.bool_:
        raise TypeError(
            f"{call}: data must be boolean, got {x.dtype}. Compare first, as in "
            "data != 0."
        )
    out = segments.scatter(method, method == "min", x)
    return fill_empty(call, out, segments, empty)
