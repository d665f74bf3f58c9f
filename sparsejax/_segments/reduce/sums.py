"""Reductions that add or multiply the elements of each segment.

An id outside `[0, num_segments)` is out of range: its element is dropped, even a NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike
from sparsejax._rows import arithmetic, indexing
from sparsejax._segments import SegmentTensor
from sparsejax._segments.reduce.cumulative import in_order
from sparsejax._segments.reduce.reduction import jax_segment_reduction
from sparsejax._segments.reduce.segments import (
    Segments,
    check_numbers,
    fill,
    fill_empty,
    over_segments,
)


_MEAN = "sparsejax.segment_mean"


# ------------------------------------------------------------------ sums


def segment_sum(
    data: ArrayLike | SegmentTensor,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    *,
    weights: ArrayLike | None = None,
    empty: ArrayLike | None = None,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: str | jax.lax.GatherScatterMode | None = None,
    out_sharding: jax.sharding.Sharding | jax.sharding.PartitionSpec | None = None,
) -> Any:
    """Sum of each segment.

    `out[s] = sum_{i: segment_ids[i] == s} weights[i] * data[i]`; by default all weights
    are 1.

    Args:
      data: `[n, ...]`, integers or floats; or a SegmentTensor, which has its own
        segments. Each array in its tree of values is reduced.
      segment_ids: integers `[n]`, the segment of each element along data's first axis,
        in any order. Elements whose id is outside `[0, num_segments)`, even negative,
        are dropped.
      num_segments: int, static. By default the largest id + 1, or 0 without ids;
        required inside `jit`.
      indices_are_sorted: bool, a promise that ids never decrease.
      weights: real numbers `[n]`, or None.
      empty: scalar, the result for an empty segment; 0 by default.
      unique_indices: bool, a promise that no two elements share a segment.
      bucket_size: accepted for compatibility with `jax.ops.segment_sum`, ignored.
      mode: as in `jax.ops.segment_sum`: with "clip", elements whose id is out of range
        go to the first or the last segment; otherwise they are dropped.
      out_sharding: the sharding of the result over a mesh of explicit axes
        (`AxisType.Explicit`); required there if `data` or ids are sharded.

    Returns:
      `[num_segments, ...]`, of data's dtype, or of the weights' dtype for integer data
      with float weights. Differentiable in `data` and `weights`.

    Raises:
      TypeError: `data` is not an array or is boolean, ids are not integers, weights
        are not real numbers, or `empty` is not a scalar of the result's kind.
      ValueError: shapes do not match, `num_segments` is missing inside `jit`, or ids
        are given together with a SegmentTensor, or are missing without one.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> data = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
      >>> sj.segment_sum(data, jnp.array([0, 2, 0]), 3)
      Array([[6., 8.],
             [0., 0.],
             [3., 4.]], dtype=float32)
      >>> st = sj.SegmentTensor.from_lengths(jnp.array([1, 2, 3]), [2, 1])
      >>> sj.segment_sum(st, weights=jnp.array([2, 1, 1]))
      Array([4, 3], dtype=int32)

    References:
      `jax.ops.segment_sum`; Caffe2, `SortedSegmentSum`, `UnsortedSegmentSum`,
      `LengthsSum` and `LengthsWeightedSum`.
    """
    del bucket_size

    def total(x: jax.Array, segments: Segments, *weights: jax.Array) -> jax.Array:
        check_numbers(x)
        dtype = x.dtype
        if weights:
            w = _as_weights(weights[0], x)
            if not jnp.issubdtype(dtype, jnp.inexact):
                dtype = indexing.promote(dtype, w.dtype)
            wide = indexing.accumulator_dtype(dtype)
            x = _weighted(x, segments.mask(w.astype(wide)), segments)
        wide = indexing.accumulator_dtype(dtype)
        out = segments.sum(x.astype(wide)).astype(dtype)
        return fill_empty(out, segments, empty)

    return over_segments(
        data,
        segment_ids,
        num_segments,
        indices_are_sorted,
        total,
        *(() if weights is None else (_arguments.to_array(weights, "weights"),)),
        mode=mode,
        unique_indices=unique_indices,
        out_sharding=out_sharding,
    )


def segment_mean(
    data: ArrayLike | SegmentTensor,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    *,
    weights: ArrayLike | None = None,
    empty: ArrayLike | None = None,
) -> Any:
    """Mean of each segment, optionally weighted.

    `out[s] = sum_i w[i] * data[i] / sum_i w[i]`, over all i with `segment_ids[i] == s`.

    Args:
      data: `[n, ...]`, numbers; or a SegmentTensor, which has its own segments.
      segment_ids: integers `[n]`; see `segment_sum` for this and the next two.
      num_segments: int.
      indices_are_sorted: bool.
      weights: real numbers `[n]`, or None for ones.
      empty: scalar, the result for a segment that is empty or whose weights sum to 0;
        0 by default.

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 for integers. Differentiable in
      `data` and `weights`.

    Raises:
      TypeError, ValueError: as `segment_sum`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_mean(jnp.array([1.0, 2.0, 5.0]), jnp.array([0, 0, 2]), empty=-1.0)
      Array([ 1.5, -1. ,  5. ], dtype=float32)

    References:
      Caffe2, `SortedSegmentMean`, `LengthsMean`; TensorFlow,
      `tf.nn.embedding_lookup_sparse` (its weighted combiners).
    """

    def mean(x: jax.Array, segments: Segments) -> jax.Array:
        if weights is None:
            count = segments.lengths()
            return _sum_over(x, None, count, segments, empty)
        w = _masked_weights(x, segments, weights)
        return _sum_over(x, w, segments.sum(w), segments, empty)

    return over_segments(data, segment_ids, num_segments, indices_are_sorted, mean)


def segment_sqrtn(
    data: ArrayLike | SegmentTensor,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    *,
    weights: ArrayLike | None = None,
    empty: ArrayLike | None = None,
) -> Any:
    """Sum of each segment over the square root of its length, optionally weighted.

    `out[s] = sum_i w[i] * data[i] / sqrt(sum_i w[i]**2)`, over all i with
    `segment_ids[i] == s`.

    Args:
      data: `[n, ...]`, numbers; or a SegmentTensor, which has its own segments.
      segment_ids: integers `[n]`; see `segment_sum` for this and the next two.
      num_segments: int.
      indices_are_sorted: bool.
      weights: real numbers `[n]`, or None for ones.
      empty: scalar, the result for a segment that is empty or whose weights are all 0;
        0 by default.

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 for integers. Differentiable in
      `data` and `weights`.

    Raises:
      TypeError, ValueError: as `segment_sum`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_sqrtn(jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([1, 1, 1, 1]))
      Array([0., 5.], dtype=float32)

    References:
      TensorFlow, `tf.math.unsorted_segment_sqrt_n`, and `combiner="sqrtn"` of
      `tf.nn.embedding_lookup_sparse`.
    """

    def sqrtn(x: jax.Array, segments: Segments) -> jax.Array:
        if weights is None:
            w, squares = None, segments.lengths()
            squares = squares.astype(indexing.float_accumulator_dtype(x.dtype))
        else:
            w = _masked_weights(x, segments, weights)
            w, _ = segments.in_units(w)
            squares = segments.sum(w * w)
        by = arithmetic.root(squares)
        return _sum_over(x, w, by, segments, empty)

    return over_segments(data, segment_ids, num_segments, indices_are_sorted, sqrtn)


def _as_weights(weights: Any, data: jax.Array) -> jax.Array:
    """Returns `weights`, one for each element of `data`, as an array `[n]`."""
    weights = _arguments.to_array(weights, "weights")
    if weights.shape != data.shape[:1]:
        raise ValueError(
            f"weights must have one entry per element of data, shape {data.shape[:1]}, "
            f"got {weights.shape}."
        )
    if weights.dtype == jnp.bool_ or jnp.issubdtype(weights.dtype, jnp.complexfloating):
        raise TypeError(
            f"weights must be real numbers (integers or floats), got {weights.dtype}. "
            "Cast them with .astype(jnp.float32)."
        )
    return weights


def _masked_weights(x: jax.Array, segments: Segments, weights: Any) -> jax.Array:
    """Returns weights in the dtype of sums of `x`, 0 outside segments."""
    w = _as_weights(weights, x)
    return segments.mask(w.astype(indexing.float_accumulator_dtype(x.dtype)))


def _weighted(x: jax.Array, w: jax.Array, segments: Segments) -> jax.Array:
    """Returns `w * x` in the dtype of `w`, 0 outside segments."""
    x = segments.mask(x).astype(w.dtype)
    return x * indexing.append_axes(w, x.ndim)


def _sum_over(
    x: jax.Array,
    w: jax.Array | None,
    by: jax.Array,
    segments: Segments,
    empty: Any,
) -> jax.Array:
    """Returns sums of `x` or `w * x`, divided by `by`; `empty` if `by` is 0."""
    dtype = indexing.float_dtype(x.dtype)
    if w is None:
        x = x.astype(indexing.float_accumulator_dtype(dtype))
    else:
        x = _weighted(x, w, segments)
    out = arithmetic.safe_divide(segments.sum(x), by).astype(dtype)
    return out if empty is None else fill(out, by == 0, empty)


# ------------------------------------------------------------------ products


@jax_segment_reduction(kind="number", empty="1")
def segment_prod(x: jax.Array, segments: Segments) -> jax.Array:
    """Product of each segment.

    `out[s] = prod_{i: segment_ids[i] == s} data[i]`

    Returns:
      `[num_segments, ...]`, of data's dtype. Unlike `jax.ops.segment_prod`,
      differentiable even with zeros in the data and repeated ids.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_prod(jnp.array([2.0, 3.0, 4.0]), jnp.array([0, 0, 2]))
      Array([6., 1., 4.], dtype=float32)

    References:
      `jax.ops.segment_prod`.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return segments.scatter("mul", 1, x)
    return _product_of_floats(x, segments)


@jax.custom_jvp
def _product_of_floats(x: jax.Array, segments: Segments) -> jax.Array:
    return segments.scatter("mul", 1, x)


@_product_of_floats.defjvp
def _product_jvp(primals, tangents):
    # The derivative with respect to an element is the product of all elements before it
    # and all after it. Nothing is divided, so zeros need no special case.
    x, segments = primals
    order = in_order(segments)
    keep = indexing.append_axes(segments.inside, x.ndim)
    factors = order.rows(jnp.where(keep, x, jnp.ones((), x.dtype)))
    before = order.running(jnp.multiply, 1, factors, exclusive=True)
    after = order.running(jnp.multiply, 1, factors, exclusive=True, reverse=True)
    t = order.rows(segments.mask(tangents[0]))
    out = _product_of_floats(x, segments)
    return out, order.segments.sum(before * after * t)
