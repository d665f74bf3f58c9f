"""The largest and smallest elements of each segment, and their positions.

NaN propagates as in `jnp.max` and `jnp.min`: a segment that contains a NaN gives NaN,
and its NaN elements share the gradient.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import _arguments
from sparsejax._rows import indexing
from sparsejax._segments.reduce.cumulative import in_order
from sparsejax._segments.reduce.segments import Segments, fill, segment_reduction


# ------------------------------------------------------------------ public


@segment_reduction(
    empty="the smallest of data's dtype: `-inf`, the lowest integer, or False",
)
def segment_max(x: jax.Array, segments: Segments) -> jax.Array:
    """Returns the largest element of each segment.

    `out[s] = max_{i: segment_ids[i] == s} data[i]`. Equal largest elements share the
    gradient evenly, as in `jnp.max`.

    Returns:
      `[num_segments, ...]`, of data's dtype.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> ids = jnp.array([0, 2, 0])
      >>> sj.segment_max(jnp.array([3.0, 1.0, 5.0]), ids, empty=0.0)
      Array([5., 0., 1.], dtype=float32)

    References:
      `jax.ops.segment_max`; Caffe2, `LengthsMax` (0 without elements; each of several
      equal largest elements gets the whole gradient).
    """
    return _extreme(x, "max", segments)


@segment_reduction(
    empty="the largest of data's dtype: `inf`, the highest integer, or True",
)
def segment_min(x: jax.Array, segments: Segments) -> jax.Array:
    """Returns the smallest element of each segment.

    `out[s] = min_{i: segment_ids[i] == s} data[i]`. Equal smallest elements share the
    gradient evenly, as in `jnp.min`.

    Returns:
      `[num_segments, ...]`, of data's dtype.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> ids = jnp.array([0, 2, 0])
      >>> sj.segment_min(jnp.array([3.0, 1.0, 5.0]), ids, empty=0.0)
      Array([3., 0., 1.], dtype=float32)

    References:
      `jax.ops.segment_min`.
    """
    return _extreme(x, "min", segments)


@segment_reduction(empty="n")
def segment_argmax(x: jax.Array, segments: Segments) -> jax.Array:
    """Returns the position of the first largest element of each segment.

    `out[s] = min {i: segment_ids[i] == s and data[i] == max[s]}`, a position along
    data's first axis. NaN counts as the largest.

    Returns:
      int32 `[num_segments, ...]`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_argmax(jnp.array([3.0, 1.0, 5.0, 5.0]), jnp.array([0, 2, 0, 0]))
      Array([2, 4, 1], dtype=int32)

    References:
      torch-scatter, `scatter_max` (its second result); NumPy, `argmax`.
    """
    return _position(x, "max", segments)


@segment_reduction(empty="n")
def segment_argmin(x: jax.Array, segments: Segments) -> jax.Array:
    """Returns the position of the first smallest element of each segment.

    `out[s] = min {i: segment_ids[i] == s and data[i] == min[s]}`, a position along
    data's first axis. NaN counts as the smallest.

    Returns:
      int32 `[num_segments, ...]`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_argmin(jnp.array([3.0, 1.0, 5.0, 3.0]), jnp.array([0, 2, 0, 0]))
      Array([0, 4, 1], dtype=int32)

    References:
      torch-scatter, `scatter_min` (its second result); NumPy, `argmin`.
    """
    return _position(x, "min", segments)


@segment_reduction(empty="0, for slots beyond the last element")
def segment_top_k(
    x: jax.Array, segments: Segments, *, k: int, empty: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest elements of each segment, and their positions inside it.

    `values[s, 0] >= values[s, 1] >= ...` are the largest elements of
    `{data[i]: segment_ids[i] == s}`. Equal elements keep their order, and NaN counts as
    the largest. The cost is k passes over the data.

    Args:
      k: int, the number of elements.

    Returns:
      `(values, positions)`, both `[num_segments, k, ...]`. `values` are of data's dtype
      and differentiable; `positions` are int32, counted from 0 in each segment, and -1
      beyond its last element. For a SegmentTensor with a tree of values, a tree of such
      pairs.

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
    n, row_shape = x.shape[0], x.shape[1:]
    columns = x.reshape(n, math.prod(row_shape))
    fixed = lax.stop_gradient(columns)
    lowest = jnp.array(identity("max", x.dtype), x.dtype)
    place = lax.iota(jnp.int32, n)
    none = _arguments.scalar(n, place)

    def take(remaining, _):
        """Takes the first of the largest remaining elements of each segment."""
        top = segments.scatter("max", lowest, jnp.where(remaining, fixed, lowest))
        largest = remaining & is_extreme(fixed, top, segments)
        winners = jnp.where(largest, place[:, None], none)
        winners = segments.scatter("min", none, winners)
        return remaining & (place[:, None] != segments.broadcast(winners)), winners

    # Computed from the data: inside `shard_map` it must vary over the same axes.
    members = segments.mask(jnp.ones_like(fixed, bool))
    _, winners = lax.scan(take, members, length=k)
    winners = jnp.moveaxis(winners, 0, 1)  # [count, k, columns]
    is_there = winners < n

    values = jnp.zeros(winners.shape, x.dtype)
    if n:  # JAX cannot gather from an empty axis
        column = lax.iota(jnp.int32, columns.shape[1])[None, None, :]
        values = columns.at[winners, column].get(mode="clip")
        values = jnp.where(is_there, values, jnp.zeros((), x.dtype))
    if empty is not None:
        values = fill(values, ~is_there, empty)

    # From positions in the data to positions in the segment.
    order = in_order(segments)
    ids = lax.iota(order.segments.ids.dtype, segments.count)
    begin = indexing.search_sorted(order.segments.ids, ids)
    inside = order.back(place - order.segments.broadcast(begin))
    positions = jnp.where(is_there, indexing.take_rows(inside, winners), -1)
    shape = (segments.count, k, *row_shape)
    return values.reshape(shape), positions.reshape(shape)


# ------------------------------------------------------------------ private


def identity(method: str, dtype: Any) -> Any:
    """Returns the identity element of "max" or "min"."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return method == "min"
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return limits.max if method == "min" else limits.min
    return jnp.inf if method == "min" else -jnp.inf


def _extreme(x: jax.Array, method: str, segments: Segments) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return segments.scatter(method, identity(method, x.dtype), x)
    return _extreme_of_floats(x, method, segments)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _extreme_of_floats(x: jax.Array, method: str, segments: Segments) -> jax.Array:
    return segments.scatter(method, identity(method, x.dtype), x)


@_extreme_of_floats.defjvp
def _extreme_jvp(method, primals, tangents):
    x, segments = primals
    out = _extreme_of_floats(x, method, segments)
    # Linear in the tangent: the choice of extreme elements is constant.
    chosen = is_extreme(lax.stop_gradient(x), lax.stop_gradient(out), segments)
    wide = indexing.accumulator_dtype(x.dtype)
    t = jnp.where(chosen, tangents[0].astype(wide), jnp.zeros((), wide))
    ties = jnp.maximum(segments.sum(chosen.astype(jnp.float32)), 1)
    return out, (segments.sum(t) / ties.astype(wide)).astype(x.dtype)


def is_extreme(x: jax.Array, out: jax.Array, segments: Segments) -> jax.Array:
    """Returns bool `[n, ...]`: True where an element is the extreme of its segment.

    NaN counts as extreme. `out` is NaN in such a segment, and comparisons with NaN are
    false.
    """
    equal = (x == segments.broadcast(out)) | (x != x)
    return segments.mask(equal)


def _position(x: jax.Array, method: str, segments: Segments) -> jax.Array:
    """Returns the first position of the extreme of each segment."""
    n = _arguments.scalar(x.shape[0], jnp.int32)
    x = lax.stop_gradient(x)
    equal = is_extreme(x, _extreme(x, method, segments), segments)
    place = indexing.append_axes(lax.iota(jnp.int32, x.shape[0]), x.ndim)
    return segments.scatter("min", n, jnp.where(equal, place, n))
