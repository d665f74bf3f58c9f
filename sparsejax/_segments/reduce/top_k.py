"""segment_top_k: the k largest elements of each segment."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor
from sparsejax._segments.reduce.cumulative import in_order
from sparsejax._segments.reduce.extremes import identity, is_extreme
from sparsejax._segments.reduce.segments import (
    Segments,
    fill,
    over_segments,
)


def segment_top_k(
    data: ArrayLike | SegmentTensor,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    *,
    k: int,
    empty: ArrayLike | None = None,
) -> Any:
    """The k largest elements of each segment, and their positions inside it.

    `values[s, 0] >= values[s, 1] >= ...` are the largest elements of
    `{data[i]: segment_ids[i] == s}`. Equal elements keep their order, and NaN counts as
    the largest. The cost is k passes over the data.

    Args:
      data: `[n, ...]`, any dtype; or a SegmentTensor, which has its own segments.
      segment_ids: integers `[n]`; see `segment_sum` for this and the next two.
      num_segments: int.
      indices_are_sorted: bool; saves a sort of the ids.
      k: int, the number of elements.
      empty: scalar, the value for slots beyond the last element; 0 by default.

    Returns:
      `(values, positions)`, both `[num_segments, k, ...]`. `values` are of data's dtype
      and differentiable; `positions` are int32, counted from 0 in each segment, and -1
      beyond its last element. For a SegmentTensor with a tree of values, a tree of such
      pairs.

    Raises:
      TypeError, ValueError: as `segment_sum`; TypeError also if `k` is not a static
        int, ValueError if `k` is negative.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> values, positions = sj.segment_top_k(
      ...     jnp.array([1.0, 5.0, 3.0, 2.0]), jnp.array([0, 0, 0, 1]), k=2
      ... )
      >>> values
      Array([[5., 3.],
             [2., 0.]], dtype=float32)
      >>> positions
      Array([[ 1,  2],
             [ 0, -1]], dtype=int32)

    References:
      Caffe2, `LengthsTopK`; `jax.lax.top_k`.
    """
    k = _arguments.static_int("k", k)

    def top_k(x: jax.Array, segments: Segments) -> tuple[jax.Array, jax.Array]:
        return _top_k(x, segments, k, empty)

    return over_segments(data, segment_ids, num_segments, indices_are_sorted, top_k)


def _top_k(
    x: jax.Array, segments: Segments, k: int, empty: Any
) -> tuple[jax.Array, jax.Array]:
    n, rest = x.shape[0], x.shape[1:]
    columns = x.reshape(n, math.prod(rest))
    fixed = lax.stop_gradient(columns)
    lowest = jnp.array(identity("max", x.dtype), x.dtype)
    place = lax.iota(jnp.int32, n)
    none = _arguments.scalar(n, place)

    def take(remaining, _):
        """Takes the first of the largest remaining elements of each segment."""
        top = segments.scatter("max", lowest, jnp.where(remaining, fixed, lowest))
        largest = remaining & is_extreme(fixed, top, segments)
        found = jnp.where(largest, place[:, None], none)
        found = segments.scatter("min", none, found)
        return remaining & (place[:, None] != segments.broadcast(found)), found

    # Computed from the data: inside `shard_map` it must vary over the same axes.
    members = segments.mask(jnp.ones_like(fixed, bool))
    _, found = lax.scan(take, members, length=k)
    found = jnp.moveaxis(found, 0, 1)  # [count, k, columns]
    is_there = found < n

    values = jnp.zeros(found.shape, x.dtype)
    if n:  # JAX cannot gather from an empty axis
        column = lax.iota(jnp.int32, columns.shape[1])[None, None, :]
        values = columns.at[found, column].get(mode="clip")
        values = jnp.where(is_there, values, jnp.zeros((), x.dtype))
    if empty is not None:
        values = fill(values, ~is_there, empty)

    # From positions in the data to positions in the segment.
    order = in_order(segments)
    ids = lax.iota(order.segments.ids.dtype, segments.count)
    begin = indexing.search_sorted(order.segments.ids, ids)
    inside = order.back(place - order.segments.broadcast(begin))
    positions = jnp.where(is_there, indexing.take_rows(inside, found), -1)
    shape = (segments.count, k, *rest)
    return values.reshape(shape), positions.reshape(shape)
