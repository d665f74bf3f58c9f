"""Segment logsumexp, logmeanexp, softmax and log_softmax.

Each segment is shifted by its maximum, so nothing overflows. In a segment that contains
only `-inf`, the logsumexp is `-inf`, and the softmax and all gradients are 0, where
`jax.nn.softmax` gives NaN. `+inf` behaves as in `jax.nn`: the logsumexp is `+inf`, and
the softmax NaN.

The derivatives are custom: they need only the softmax, not the maximum.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax._arguments import ArrayLike
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor
from sparsejax._segments.reduce.segments import (
    Segments,
    as_floats,
    fill,
    fill_empty,
    fill_outside,
    over_segments,
)


_LOGSUMEXP = "sparsejax.segment_logsumexp"
_LOGMEANEXP = "sparsejax.segment_logmeanexp"
_SOFTMAX = "sparsejax.segment_softmax"
_LOG_SOFTMAX = "sparsejax.segment_log_softmax"


# ------------------------------------------------------------------ public


def segment_logsumexp(
    data: ArrayLike | SegmentTensor,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    *,
    empty: ArrayLike | None = None,
) -> Any:
    """Logarithm of the sum of exponentials of each segment.

    `out[s] = log(sum_{i: segment_ids[i] == s} exp(data[i]))`

    Args:
      data: `[n, ...]`, real numbers; or a SegmentTensor, which has its own segments.
      segment_ids: integers `[n]`; see `segment_sum` for this and the next two.
      num_segments: int.
      indices_are_sorted: bool.
      empty: scalar, the result for an empty segment; `-inf` by default.

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 for integers. Its gradient is the
      segment's softmax, or 0 in a segment that contains only `-inf`.

    Raises:
      TypeError, ValueError: as `segment_sum`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_logsumexp(jnp.array([0.0, 0.0, 500.0]), jnp.array([0, 0, 1]))
      Array([  0.6931472, 500.       ], dtype=float32)

    References:
      Caffe2, `SortedSegmentRangeLogSumExp`; `jax.nn.logsumexp`.
    """

    def logsumexp(x: jax.Array, segments: Segments) -> jax.Array:
        out = _logsumexp(as_floats(_LOGSUMEXP, x), segments.ids, segments.static)
        out = out.astype(indexing.float_dtype(x.dtype))
        return fill_empty(_LOGSUMEXP, out, segments, empty)

    return over_segments(
        _LOGSUMEXP, data, segment_ids, num_segments, indices_are_sorted, logsumexp
    )


def segment_logmeanexp(
    data: ArrayLike | SegmentTensor,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    *,
    empty: ArrayLike | None = None,
) -> Any:
    """Logarithm of the mean of exponentials of each segment.

    `out[s] = log(mean_{i: segment_ids[i] == s} exp(data[i]))`

    Args:
      data: `[n, ...]`, real numbers; or a SegmentTensor, which has its own segments.
      segment_ids: integers `[n]`; see `segment_sum` for this and the next two.
      num_segments: int.
      indices_are_sorted: bool.
      empty: scalar, the result for an empty segment; `-inf` by default.

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 for integers.

    Raises:
      TypeError, ValueError: as `segment_sum`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_logmeanexp(jnp.array([100.0, 100.0, 1.0]), jnp.array([0, 0, 1]))
      Array([100.,   1.], dtype=float32)

    References:
      Caffe2, `SortedSegmentRangeLogMeanExp`.
    """

    def logmeanexp(x: jax.Array, segments: Segments) -> jax.Array:
        out = _logsumexp(as_floats(_LOGMEANEXP, x), segments.ids, segments.static)
        count = segments.lengths()
        log_count = jnp.log(jnp.maximum(count, 1).astype(out.dtype))
        out -= indexing.append_axes(log_count, out.ndim)
        out = out.astype(indexing.float_dtype(x.dtype))
        return out if empty is None else fill(_LOGMEANEXP, out, count == 0, empty)

    return over_segments(
        _LOGMEANEXP, data, segment_ids, num_segments, indices_are_sorted, logmeanexp
    )


def segment_softmax(
    data: ArrayLike | SegmentTensor,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    *,
    empty: ArrayLike | None = None,
) -> Any:
    """Softmax over the elements of each segment.

    `out[i] = exp(data[i]) / sum_{j: segment_ids[j] == segment_ids[i]} exp(data[j])`

    Args:
      data: `[n, ...]`, real numbers; or a SegmentTensor, which has its own segments.
      segment_ids: integers `[n]`; see `segment_sum` for this and the next two.
      num_segments: int.
      indices_are_sorted: bool.
      empty: scalar, the result for elements outside all segments; 0 by default.

    Returns:
      `[n, ...]`, an array of data's shape and dtype; float32 for integers. Zeros in a
      segment that contains only `-inf`.

    Raises:
      TypeError, ValueError: as `segment_sum`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_softmax(jnp.array([7.0, 7.0, 1.0]), jnp.array([0, 0, 1]))
      Array([0.5, 0.5, 1. ], dtype=float32)

    References:
      jraph, `segment_softmax`; PyTorch Geometric, `softmax`.
    """

    def softmax(x: jax.Array, segments: Segments) -> jax.Array:
        out = _softmax(as_floats(_SOFTMAX, x), segments.ids, segments.static)
        out = out.astype(indexing.float_dtype(x.dtype))
        return fill_outside(_SOFTMAX, out, segments, empty)

    return over_segments(
        _SOFTMAX, data, segment_ids, num_segments, indices_are_sorted, softmax
    )


def segment_log_softmax(
    data: ArrayLike | SegmentTensor,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    *,
    empty: ArrayLike | None = None,
) -> Any:
    """Logarithm of the softmax over the elements of each segment.

    `out[i] = data[i] - log(sum_{j: segment_ids[j] == segment_ids[i]} exp(data[j]))`

    Args:
      data: `[n, ...]`, real numbers; or a SegmentTensor, which has its own segments.
      segment_ids: integers `[n]`; see `segment_sum` for this and the next two.
      num_segments: int.
      indices_are_sorted: bool.
      empty: scalar, the result for elements outside all segments; 0 by default.

    Returns:
      `[n, ...]`, an array of data's shape and dtype; float32 for integers. `-inf` in a
      segment that contains only `-inf`.

    Raises:
      TypeError, ValueError: as `segment_sum`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_log_softmax(jnp.array([7.0, 7.0, 1.0]), jnp.array([0, 0, 1]))
      Array([-0.6931472, -0.6931472,  0.       ], dtype=float32)

    References:
      torch-scatter, `scatter_log_softmax`; `jax.nn.log_softmax`.
    """

    def log_softmax(x: jax.Array, segments: Segments) -> jax.Array:
        out = _log_softmax(as_floats(_LOG_SOFTMAX, x), segments.ids, segments.static)
        out = out.astype(indexing.float_dtype(x.dtype))
        return fill_outside(_LOG_SOFTMAX, out, segments, empty)

    return over_segments(
        _LOG_SOFTMAX, data, segment_ids, num_segments, indices_are_sorted, log_softmax
    )


# ------------------------------------------------------------------ of floats


def _shifted(x: jax.Array, segments: Segments) -> tuple[jax.Array, jax.Array]:
    """Each segment's maximum (0 for `-inf`), and `x` minus it; 0 outside segments."""
    top = segments.scatter("max", -jnp.inf, x)
    top = jnp.where(top == -jnp.inf, jnp.zeros((), x.dtype), top)
    return top, segments.mask(x - segments.broadcast(top))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _logsumexp(x: jax.Array, ids: jax.Array, static: Any) -> jax.Array:
    segments = Segments(ids, *static)
    top, x = _shifted(x, segments)
    # The sum drops elements outside all segments.
    out = jnp.log(segments.sum(jnp.exp(x))) + top
    return jnp.where(top == jnp.inf, top, out)


@_logsumexp.defjvp
def _logsumexp_jvp(static, primals, tangents):
    x, ids = primals
    segments = Segments(ids, *static)
    share = _softmax(x, ids, static) * segments.mask(tangents[0])
    return _logsumexp(x, ids, static), segments.sum(share)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _softmax(x: jax.Array, ids: jax.Array, static: Any) -> jax.Array:
    segments = Segments(ids, *static)
    e = jnp.exp(_shifted(x, segments)[1])
    total = segments.sum(e)
    inverse = 1 / jnp.where(total == 0, jnp.ones((), x.dtype), total)
    return e * segments.broadcast(inverse)  # 0 outside segments


@_softmax.defjvp
def _softmax_jvp(static, primals, tangents):
    x, ids = primals
    segments = Segments(ids, *static)
    share = _softmax(x, ids, static)
    t = segments.mask(tangents[0])
    mean = segments.sum(share * t)
    return share, share * (t - segments.broadcast(mean))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _log_softmax(x: jax.Array, ids: jax.Array, static: Any) -> jax.Array:
    segments = Segments(ids, *static)
    x = _shifted(x, segments)[1]
    total = segments.sum(jnp.exp(x))
    log_total = jnp.log(jnp.where(total == 0, jnp.ones((), x.dtype), total))
    return x - segments.broadcast(log_total)


@_log_softmax.defjvp
def _log_softmax_jvp(static, primals, tangents):
    x, ids = primals
    segments = Segments(ids, *static)
    t = segments.mask(tangents[0])
    mean = segments.sum(_softmax(x, ids, static) * t)
    return _log_softmax(x, ids, static), t - segments.broadcast(mean)
