"""segment_count, segment_any and segment_all."""

from __future__ import annotations

import jax

from sparsejax._arguments import ArrayLike
from sparsejax._segments import SegmentTensor
from sparsejax._segments.reduce.reduction import segment_reduction
from sparsejax._segments.reduce.segments import Segments, check_arguments, fill_empty


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
    _, segments = check_arguments(data, segment_ids, num_segments, indices_are_sorted)
    return fill_empty(segments.lengths(), segments, empty)


@segment_reduction(kind="bool", empty="False")
def segment_any(x: jax.Array, segments: Segments) -> jax.Array:
    """Logical or of the elements of each segment.

    `out[s] = or_{i: segment_ids[i] == s} data[i]`

    Returns:
      bool `[num_segments, ...]`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_any(jnp.array([False, True, False]), jnp.array([0, 0, 2]))
      Array([ True, False, False], dtype=bool)

    References:
      NumPy, `any`.
    """
    return segments.scatter("max", False, x)


@segment_reduction(kind="bool", empty="True")
def segment_all(x: jax.Array, segments: Segments) -> jax.Array:
    """Logical and of the elements of each segment.

    `out[s] = and_{i: segment_ids[i] == s} data[i]`

    Returns:
      bool `[num_segments, ...]`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_all(jnp.array([False, True, True]), jnp.array([0, 0, 2]))
      Array([False,  True,  True], dtype=bool)

    References:
      NumPy, `all`.
    """
    return segments.scatter("min", True, x)
