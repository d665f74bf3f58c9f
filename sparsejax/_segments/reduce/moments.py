"""Variance, standard deviation and normalisation of each segment.

In two passes: the mean first, then the squares of what is left, so that a large mean
costs no digits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax._segments.reduce import common as args
from sparsejax._segments.reduce.common import Segments


_VAR = "sparsejax.segment_var"
_STD = "sparsejax.segment_std"
_NORMALIZE = "sparsejax.segment_normalize"


def segment_var(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    empty: Any = None,
) -> Any:
    """Variance of each segment.

    `out[s] = mean_{i: segment_ids[i] == s} (data[i] - mean[s])**2`, the mean of all its
    elements, as `jnp.var` gives with its default `ddof=0`.

    Args:
      data: `[n, ...]`, real numbers; or a SegmentTensor, which brings its own segments.
      segment_ids: integers `[n]`, as `segment_sum` has them, like the next two.
      num_segments: int.
      indices_are_sorted: bool.
      empty: scalar, the result of a segment without elements; 0 if left out.

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 of integers.

    Raises:
      TypeError, ValueError: as `segment_sum` does.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_var(jnp.array([1.0, 3.0, 7.0]), jnp.array([0, 0, 1]))
      Array([1., 0.], dtype=float32)

    References:
      jraph, `segment_variance`; NumPy, `var`.
    """

    def var(x: jax.Array, segments: Segments) -> jax.Array:
        out = _moments(args.as_floats(_VAR, x), segments)[1]
        out = out.astype(args.float_dtype(x.dtype))
        return args.fill_empty(_VAR, out, segments, empty)

    return args.over_segments(
        _VAR, data, segment_ids, num_segments, indices_are_sorted, var
    )


def segment_std(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    empty: Any = None,
) -> Any:
    """Standard deviation of each segment.

    `out[s] = sqrt(mean_{i: segment_ids[i] == s} (data[i] - mean[s])**2)`

    Args:
      data: `[n, ...]`, real numbers; or a SegmentTensor, which brings its own segments.
      segment_ids: integers `[n]`, as `segment_sum` has them, like the next two.
      num_segments: int.
      indices_are_sorted: bool.
      empty: scalar, the result of a segment without elements; 0 if left out.

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 of integers. Where the variance
      is 0, as in each segment of one element, the gradient is 0; `jnp.std` gives NaN.

    Raises:
      TypeError, ValueError: as `segment_sum` does.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_std(jnp.array([1.0, 3.0, 7.0]), jnp.array([0, 0, 1]))
      Array([1., 0.], dtype=float32)

    References:
      torch-scatter, `scatter_std` (which divides by n - 1); NumPy, `std`.
    """

    def std(x: jax.Array, segments: Segments) -> jax.Array:
        var = _moments(args.as_floats(_STD, x), segments)[1]
        # The root of a safe number: the gradient of `where` is 0 * that of the root.
        none = var == 0
        root = jnp.sqrt(jnp.where(none, jnp.ones((), var.dtype), var))
        out = jnp.where(none, jnp.zeros((), var.dtype), root)
        out = out.astype(args.float_dtype(x.dtype))
        return args.fill_empty(_STD, out, segments, empty)

    return args.over_segments(
        _STD, data, segment_ids, num_segments, indices_are_sorted, std
    )


def segment_normalize(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    empty: Any = None,
    eps: float = 1e-5,
) -> Any:
    """Elements with the mean of their segment taken away, over its deviation.

    `out[i] = (data[i] - mean[s]) / sqrt(max(var[s], eps))` with `s = segment_ids[i]`,
    and the mean and variance of the elements of s.

    Args:
      data: `[n, ...]`, real numbers; or a SegmentTensor, which brings its own segments.
      segment_ids: integers `[n]`, as `segment_sum` has them, like the next two.
      num_segments: int.
      indices_are_sorted: bool.
      empty: scalar, what elements that belong to no segment get; 0 if left out.
      eps: positive number, the least variance that is divided by.

    Returns:
      `[n, ...]`, an array of data's shape and dtype; float32 of integers.

    Raises:
      TypeError, ValueError: as `segment_sum` does; ValueError also if `eps` is not
        positive.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_normalize(jnp.array([1.0, 3.0, 7.0]), jnp.array([0, 0, 1]))
      Array([-1.,  1.,  0.], dtype=float32)

    References:
      jraph, `segment_normalize`.
    """
    if not isinstance(eps, (int, float, np.number)) or not eps > 0:
        raise ValueError(
            f"{_NORMALIZE}: eps must be a static positive number, got {eps!r}. It "
            "bounds the variance that is divided by from below."
        )

    def normalize(x: jax.Array, segments: Segments) -> jax.Array:
        away, var = _moments(args.as_floats(_NORMALIZE, x), segments)
        scale = lax.rsqrt(jnp.maximum(var, jnp.array(eps, var.dtype)))
        out = (away * args.spread(scale, segments)).astype(args.float_dtype(x.dtype))
        return args.fill_others(_NORMALIZE, out, segments, empty)

    return args.over_segments(
        _NORMALIZE, data, segment_ids, num_segments, indices_are_sorted, normalize
    )


# ------------------------------------------------------------------ private


def _moments(x: jax.Array, segments: Segments) -> tuple[jax.Array, jax.Array]:
    """Elements less the mean of their segment, `[n, ...]`, and each one's variance."""
    count = args.count_elements(segments)
    mean = args.divide(args.add_up(x, segments), count)
    away = args.members_only(x - args.spread(mean, segments), segments)
    return away, args.divide(args.add_up(away * away, segments), count)
