"""Reductions that count, add or multiply the elements of each segment.

An id outside `[0, num_segments)` is out of range: its element is dropped, even a NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax._arguments import ArrayLike
from sparsejax._rows import arithmetic, indexing
from sparsejax._segments.reduce.cumulative import in_order
from sparsejax._segments.reduce.segments import (
    Segments,
    check_numbers,
    check_weights,
    fill,
    segment_reduction,
)


@segment_reduction(empty="0")
def segment_sum(
    x: jax.Array, segments: Segments, *, weights: ArrayLike | None = None
) -> jax.Array:
    """Computes the sum of each segment.

    `out[s] = sum_{i: segment_ids[i] == s} weights[i] * data[i]`; by default all weights
    are 1.

    Args:
      weights: real numbers `[n]`, or None.

    Returns:
      `[num_segments, ...]`, of data's dtype, or of the weights' dtype for integer data
      with float weights. Differentiable in `data` and `weights`.

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
    check_numbers(x)
    dtype = x.dtype
    if weights is not None:
        w = check_weights(weights, x.shape[:1])
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = indexing.promote(dtype, w.dtype)
        w = segments.mask(w.astype(indexing.accumulator_dtype(dtype)))
        x = _weighted(segments.mask(x), w)
    return segments.sum(x.astype(indexing.accumulator_dtype(dtype))).astype(dtype)


@segment_reduction(empty="0, also if the weights of a segment sum to 0")
def segment_mean(
    x: jax.Array,
    segments: Segments,
    *,
    weights: ArrayLike | None = None,
    empty: Any = None,
) -> jax.Array:
    """Computes the mean of each segment, optionally weighted.

    `out[s] = sum_i w[i] * data[i] / sum_i w[i]`, over all i with `segment_ids[i] == s`.

    Args:
      weights: real numbers `[n]`, or None for ones.

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 for integers. Differentiable in
      `data` and `weights`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_mean(jnp.array([1.0, 2.0, 5.0]), jnp.array([0, 0, 2]), empty=-1.0)
      Array([ 1.5, -1. ,  5. ], dtype=float32)

    References:
      Caffe2, `SortedSegmentMean`, `LengthsMean`; TensorFlow,
      `tf.nn.embedding_lookup_sparse` (its weighted combiners).
    """
    if weights is None:
        return _sum_over(x, None, segments.lengths(), segments, empty)
    w = _masked_weights(x, segments, weights)
    return _sum_over(x, w, segments.sum(w), segments, empty)


@segment_reduction(empty="0, also if all weights of a segment are 0")
def segment_sqrtn(
    x: jax.Array,
    segments: Segments,
    *,
    weights: ArrayLike | None = None,
    empty: Any = None,
) -> jax.Array:
    """Divides each segment's (weighted) sum by the square root of its length.

    `out[s] = sum_i w[i] * data[i] / sqrt(sum_i w[i]**2)`, over all i with
    `segment_ids[i] == s`.

    Args:
      weights: real numbers `[n]`, or None for ones.

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 for integers. Differentiable in
      `data` and `weights`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_sqrtn(jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([1, 1, 1, 1]))
      Array([0., 5.], dtype=float32)

    References:
      TensorFlow, `tf.math.unsorted_segment_sqrt_n`, and `combiner="sqrtn"` of
      `tf.nn.embedding_lookup_sparse`.
    """
    if weights is None:
        w, squares = None, segments.lengths()
        squares = squares.astype(indexing.float_accumulator_dtype(x.dtype))
    else:
        w, _ = segments.in_units(_masked_weights(x, segments, weights))
        squares = segments.sum(w * w)
    return _sum_over(x, w, arithmetic.root(squares), segments, empty)


def _masked_weights(x: jax.Array, segments: Segments, weights: Any) -> jax.Array:
    """Returns weights in the dtype of sums of `x`, 0 outside segments."""
    w = check_weights(weights, x.shape[:1])
    return segments.mask(w.astype(indexing.float_accumulator_dtype(x.dtype)))


def _weighted(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns `w * x` in the dtype of `w`."""
    return x.astype(w.dtype) * indexing.append_axes(w, x.ndim)


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
        x = _weighted(segments.mask(x), w)
    out = arithmetic.safe_divide(segments.sum(x), by).astype(dtype)
    return out if empty is None else fill(out, by == 0, empty)


# ------------------------------------------------------------------ products


@segment_reduction(kind="number", empty="1")
def segment_prod(x: jax.Array, segments: Segments) -> jax.Array:
    """Computes the product of each segment.

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


# ------------------------------------------------------------------ counts


@segment_reduction(empty="0", maps=False)
def segment_count(x: None, segments: Segments) -> jax.Array:
    """Counts the elements in each segment.

    `out[s] = |{i: segment_ids[i] == s}|`

    Returns:
      int32 `[num_segments]`, one number per segment, even if `data` has more axes.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_count(jnp.array([5.0, 6.0, 7.0]), jnp.array([0, 2, 0]))
      Array([2, 0, 1], dtype=int32)

    References:
      Caffe2, `SegmentIdsToLengths`.
    """
    del x
    return segments.lengths()


@segment_reduction(kind="bool", empty="False")
def segment_any(x: jax.Array, segments: Segments) -> jax.Array:
    """Computes the logical or of the elements of each segment.

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
    """Computes the logical and of the elements of each segment.

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
