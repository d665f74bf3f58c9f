"""Reductions that add or multiply the elements of each segment.

The other reductions are in the files beside this one, by idea: `counts.py`,
`extremes.py`, `exponentials.py`, `moments.py`, `cumulative.py` and
`top_k.py`. What they share is in `common.py`.

The rule for ids is the house's: an id outside `[0, num_segments)` names no segment, and
its element drops, NaN or not.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._rows import indexing
from sparsejax._segments.reduce import common as args
from sparsejax._segments.reduce.common import Segments
from sparsejax._segments.reduce.cumulative import in_order


_SUM = "sparsejax.segment_sum"
_MEAN = "sparsejax.segment_mean"
_SQRTN = "sparsejax.segment_sqrtn"
_PROD = "sparsejax.segment_prod"


# ------------------------------------------------------------------ sums


def segment_sum(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    weights: Any = None,
    empty: Any = None,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    out_sharding: Any = None,
) -> Any:
    """Sum of each segment.

    `out[s] = sum_{i: segment_ids[i] == s} weights[i] * data[i]`, where weights that are
    left out are 1.

    Args:
      data: `[n, ...]`, integers or floats; or a SegmentTensor, which brings its own
        segments, and of whose tree of values each array is reduced.
      segment_ids: integers `[n]`, the segment of each element of data's first axis, in
        any order. An id outside `[0, num_segments)`, a negative one too, is no segment:
        its element drops.
      num_segments: int, static. If left out, one more than the largest id, and 0 if
        there are no ids; inside `jit` it must be given.
      indices_are_sorted: bool, a promise that ids never decrease.
      weights: real numbers `[n]`, or None.
      empty: scalar, the result of a segment without elements; 0 if left out.
      unique_indices: bool, a promise that no two elements share a segment.
      bucket_size: for calls of `jax.ops.segment_sum`; it has no effect. Sums of floats
        of 16 bits are formed in float32.
      mode: as `jax.ops.segment_sum` has it: with "clip", ids out of range go to the
        first and the last segment; with anything else they drop.
      out_sharding: how the result is laid out over a mesh whose axes types carry
        (`AxisType.Explicit`); needed there if `data` or ids are laid out.

    Returns:
      `[num_segments, ...]`, of data's dtype; of integers with weights that are floats,
      the weights' dtype. Differentiable in `data` and `weights`.

    Raises:
      TypeError: `data` is no array or boolean, ids are no integers, weights no real
        numbers, or `empty` is no scalar of the result's kind.
      ValueError: shapes do not go together, `num_segments` is missing inside `jit`, or
        ids are given beside a SegmentTensor, or are missing without one.

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
        args.check_kind(_SUM, x, False)
        dtype = x.dtype
        if weights:
            w = args.as_weights(_SUM, weights[0], x)
            if not jnp.issubdtype(dtype, jnp.inexact):
                dtype = indexing.promote(dtype, w.dtype)
            wide = indexing.accumulator_dtype(dtype)
            x = _weighted(x, args.members_only(w.astype(wide), segments), segments)
        wide = indexing.accumulator_dtype(dtype)
        out = args.add_up(x.astype(wide), segments).astype(dtype)
        return args.fill_empty(_SUM, out, segments, empty)

    return args.over_segments(
        _SUM,
        data,
        segment_ids,
        num_segments,
        indices_are_sorted,
        total,
        *(() if weights is None else (_arguments.to_array(_SUM, weights, "weights"),)),
        mode=mode,
        unique_indices=unique_indices,
        out_sharding=out_sharding,
    )


def segment_mean(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    weights: Any = None,
    empty: Any = None,
) -> Any:
    """Mean of each segment, weighted or not.

    `out[s] = sum_i w[i] * data[i] / sum_i w[i]`, over all i with `segment_ids[i] == s`.

    Args:
      data: `[n, ...]`, numbers; or a SegmentTensor, which brings its own segments.
      segment_ids: integers `[n]`, as `segment_sum` has them, like the next two.
      num_segments: int.
      indices_are_sorted: bool.
      weights: real numbers `[n]`, or None for ones.
      empty: scalar, the result of a segment without elements, or whose weights sum to
        0; 0 if left out.

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 of integers. Differentiable in
      `data` and `weights`.

    Raises:
      TypeError, ValueError: as `segment_sum` does.

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
            count = args.count_elements(segments)
            return _quotient(_MEAN, x, None, count, segments, empty)
        w = _members_weights(_MEAN, x, segments, weights)
        return _quotient(_MEAN, x, w, args.add_up(w, segments), segments, empty)

    return args.over_segments(
        _MEAN, data, segment_ids, num_segments, indices_are_sorted, mean
    )


def segment_sqrtn(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    weights: Any = None,
    empty: Any = None,
) -> Any:
    """Sum of each segment over the root of its length, weighted or not.

    `out[s] = sum_i w[i] * data[i] / sqrt(sum_i w[i]**2)`, over all i with
    `segment_ids[i] == s`.

    Args:
      data: `[n, ...]`, numbers; or a SegmentTensor, which brings its own segments.
      segment_ids: integers `[n]`, as `segment_sum` has them, like the next two.
      num_segments: int.
      indices_are_sorted: bool.
      weights: real numbers `[n]`, or None for ones.
      empty: scalar, the result of a segment without elements, or whose weights are all
        0; 0 if left out.

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 of integers. Differentiable in
      `data` and `weights`.

    Raises:
      TypeError, ValueError: as `segment_sum` does.

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
            w, squares = None, args.count_elements(segments)
            squares = squares.astype(_sum_dtype(x.dtype))
        else:
            w = _members_weights(_SQRTN, x, segments, weights)
            squares = args.add_up(w * w, segments)
        # The root of a safe number: the gradient of `where` is 0 * that of the root.
        none = squares == 0
        root = jnp.sqrt(jnp.where(none, jnp.ones((), squares.dtype), squares))
        by = indexing.zero_unless(~none, root)
        return _quotient(_SQRTN, x, w, by, segments, empty)

    return args.over_segments(
        _SQRTN, data, segment_ids, num_segments, indices_are_sorted, sqrtn
    )


def _sum_dtype(dtype: Any) -> Any:
    """The type that means of `dtype` are summed in."""
    return indexing.accumulator_dtype(args.float_dtype(dtype))


def _members_weights(
    call: str, x: jax.Array, segments: Segments, weights: Any
) -> jax.Array:
    """Weights in the type that `x` is summed in, 0 for elements of no segment."""
    w = args.as_weights(call, weights, x)
    return args.members_only(w.astype(_sum_dtype(x.dtype)), segments)


def _weighted(x: jax.Array, w: jax.Array, segments: Segments) -> jax.Array:
    """`w * x`, `x` in the type of `w`; 0 where an element is of no segment."""
    x = args.members_only(x, segments).astype(w.dtype)
    return x * args.beside(w, x.ndim)


def _quotient(
    call: str,
    x: jax.Array,
    w: jax.Array | None,
    by: jax.Array,
    segments: Segments,
    empty: Any,
) -> jax.Array:
    """Sums of `x`, or of `w * x`, over `by`; `empty` where that is 0."""
    dtype = args.float_dtype(x.dtype)
    if w is None:
        x = x.astype(_sum_dtype(dtype))
    else:
        x = _weighted(x, w, segments)
    out = args.divide(args.add_up(x, segments), by).astype(dtype)
    return out if empty is None else args.fill(call, out, by == 0, empty)


# ------------------------------------------------------------------ products


def segment_prod(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    empty: Any = None,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    out_sharding: Any = None,
) -> Any:
    """Product of each segment.

    `out[s] = prod_{i: segment_ids[i] == s} data[i]`

    Args:
      data: `[n, ...]`, numbers; or a SegmentTensor, which brings its own segments.
      segment_ids: integers `[n]`, as `segment_sum` has them, like the next two.
      num_segments: int.
      indices_are_sorted: bool.
      empty: scalar, the result of a segment without elements; 1 if left out.
      unique_indices: bool, as `segment_sum` has it, like the next two.
      bucket_size: int.
      mode: as `jax.ops.segment_prod` has it, like the next one.
      out_sharding: how the result is laid out over a mesh of explicit axes.

    Returns:
      `[num_segments, ...]`, of data's dtype. Differentiable, zeros among the data and
      ids that repeat included, of which `jax.ops.segment_prod` does neither.

    Raises:
      TypeError, ValueError: as `segment_sum` does.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_prod(jnp.array([2.0, 3.0, 4.0]), jnp.array([0, 0, 2]))
      Array([6., 1., 4.], dtype=float32)

    References:
      `jax.ops.segment_prod`.
    """
    del bucket_size

    def prod(x: jax.Array, segments: Segments) -> jax.Array:
        args.check_kind(_PROD, x, False)
        out = _product(x.astype(indexing.accumulator_dtype(x.dtype)), segments)
        return args.fill_empty(_PROD, out.astype(x.dtype), segments, empty)

    return args.over_segments(
        _PROD,
        data,
        segment_ids,
        num_segments,
        indices_are_sorted,
        prod,
        mode=mode,
        unique_indices=unique_indices,
        out_sharding=out_sharding,
    )


def _product(x: jax.Array, segments: Segments) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return args.scatter("mul", 1, x, segments)
    return _product_of_floats(x, segments.ids, segments.static)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _product_of_floats(x: jax.Array, ids: jax.Array, static: Any) -> jax.Array:
    return args.scatter("mul", 1, x, Segments(ids, *static))


@_product_of_floats.defjvp
def _product_jvp(static, primals, tangents):
    # The derivative by an element is the product of all others: of those before it and
    # those after it, so that nothing is divided by and a zero is like any number.
    x, ids = primals
    segments = Segments(ids, *static)
    order = in_order(segments)
    keep = args.beside(segments.inside, x.ndim)
    factors = order.rows(jnp.where(keep, x, jnp.ones((), x.dtype)))
    before = order.running(jnp.multiply, 1, factors, exclusive=True)
    after = order.running(jnp.multiply, 1, factors, exclusive=True, reverse=True)
    t = order.rows(args.members_only(tangents[0], segments))
    out = _product_of_floats(x, ids, static)
    return out, args.add_up(before * after * t, order.segments)
