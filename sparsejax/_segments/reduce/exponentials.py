"""Segment logsumexp, logmeanexp, softmax and log_softmax.

Each segment is shifted by its maximum, so nothing overflows. In a segment that contains
only `-inf`, the logsumexp is `-inf`, and the softmax and all gradients are 0;
`jax.nn.softmax` gives NaN. `+inf` behaves as in `jax.nn`: the logsumexp is `+inf`, and
the softmax NaN.

The derivatives are custom: they need the softmax, but not the maximum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax._rows import indexing
from sparsejax._segments.reduce.segments import Segments, segment_reduction


# ------------------------------------------------------------------ public


@segment_reduction(kind="real", empty="`-inf`")
def segment_logsumexp(x: jax.Array, segments: Segments) -> jax.Array:
    """Computes the log of the sum of exponentials of each segment.

    `out[s] = log(sum_{i: segment_ids[i] == s} exp(data[i]))`

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 for integers. Its gradient is the
      segment's softmax, or 0 in a segment that contains only `-inf`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_logsumexp(jnp.array([0.0, 0.0, 500.0]), jnp.array([0, 0, 1]))
      Array([  0.6931472, 500.       ], dtype=float32)

    References:
      Caffe2, `SortedSegmentRangeLogSumExp`; `jax.nn.logsumexp`.
    """
    return _logsumexp(x, segments)


@segment_reduction(kind="real", empty="`-inf`")
def segment_logmeanexp(x: jax.Array, segments: Segments) -> jax.Array:
    """Computes the log of the mean of exponentials of each segment.

    `out[s] = log(mean_{i: segment_ids[i] == s} exp(data[i]))`

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 for integers.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_logmeanexp(jnp.array([100.0, 100.0, 1.0]), jnp.array([0, 0, 1]))
      Array([100.,   1.], dtype=float32)

    References:
      Caffe2, `SortedSegmentRangeLogMeanExp`.
    """
    out = _logsumexp(x, segments)
    log_count = jnp.log(jnp.maximum(segments.lengths(), 1).astype(out.dtype))
    return out - indexing.append_axes(log_count, out.ndim)


@segment_reduction(kind="real", empty="0", per_element=True)
def segment_softmax(x: jax.Array, segments: Segments) -> jax.Array:
    """Computes the softmax over the elements of each segment.

    `out[i] = exp(data[i]) / sum_{j: segment_ids[j] == segment_ids[i]} exp(data[j])`

    Returns:
      `[n, ...]`, an array of data's shape and dtype; float32 for integers. Zeros in a
      segment that contains only `-inf`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_softmax(jnp.array([7.0, 7.0, 1.0]), jnp.array([0, 0, 1]))
      Array([0.5, 0.5, 1. ], dtype=float32)

    References:
      jraph, `segment_softmax`; PyTorch Geometric, `softmax`.
    """
    return _softmax(x, segments)


@segment_reduction(kind="real", empty="0", per_element=True)
def segment_log_softmax(x: jax.Array, segments: Segments) -> jax.Array:
    """Computes the log of the softmax over the elements of each segment.

    `out[i] = data[i] - log(sum_{j: segment_ids[j] == segment_ids[i]} exp(data[j]))`

    Returns:
      `[n, ...]`, an array of data's shape and dtype; float32 for integers. `-inf` in a
      segment that contains only `-inf`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_log_softmax(jnp.array([7.0, 7.0, 1.0]), jnp.array([0, 0, 1]))
      Array([-0.6931472, -0.6931472,  0.       ], dtype=float32)

    References:
      torch-scatter, `scatter_log_softmax`; `jax.nn.log_softmax`.
    """
    return _log_softmax(x, segments)


# ------------------------------------------------------------------ of floats


def _shifted(x: jax.Array, segments: Segments) -> tuple[jax.Array, jax.Array]:
    """Returns each segment's maximum (0 for `-inf`), and `x` minus it, 0 outside."""
    top = segments.scatter("max", -jnp.inf, x)
    top = jnp.where(top == -jnp.inf, jnp.zeros((), x.dtype), top)
    return top, segments.mask(x - segments.broadcast(top))


@jax.custom_jvp
def _logsumexp(x: jax.Array, segments: Segments) -> jax.Array:
    top, x = _shifted(x, segments)
    # The sum drops elements outside all segments.
    out = jnp.log(segments.sum(jnp.exp(x))) + top
    return jnp.where(top == jnp.inf, top, out)


@_logsumexp.defjvp
def _logsumexp_jvp(primals, tangents):
    x, segments = primals
    share = _softmax(x, segments) * segments.mask(tangents[0])
    return _logsumexp(x, segments), segments.sum(share)


@jax.custom_jvp
def _softmax(x: jax.Array, segments: Segments) -> jax.Array:
    e = jnp.exp(_shifted(x, segments)[1])
    total = segments.sum(e)
    inverse = 1 / jnp.where(total == 0, jnp.ones((), x.dtype), total)
    return e * segments.broadcast(inverse)  # 0 outside segments


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
    x, segments = primals
    share = _softmax(x, segments)
    t = segments.mask(tangents[0])
    mean = segments.sum(share * t)
    return share, share * (t - segments.broadcast(mean))


@jax.custom_jvp
def _log_softmax(x: jax.Array, segments: Segments) -> jax.Array:
    x = _shifted(x, segments)[1]
    total = segments.sum(jnp.exp(x))
    log_total = jnp.log(jnp.where(total == 0, jnp.ones((), x.dtype), total))
    return x - segments.broadcast(log_total)


@_log_softmax.defjvp
def _log_softmax_jvp(primals, tangents):
    x, segments = primals
    t = segments.mask(tangents[0])
    mean = segments.sum(_softmax(x, segments) * t)
    return _log_softmax(x, segments), t - segments.broadcast(mean)
