"""Variance, standard deviation and normalisation of each segment.

Two passes compute the mean and then the squared deviations: a large mean costs no
precision.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax._rows import arithmetic
from sparsejax._segments.reduce.segments import Segments, segment_reduction


@segment_reduction(kind="real", empty="0")
def segment_var(x: jax.Array, segments: Segments) -> jax.Array:
    """Computes the variance of each segment.

    `out[s] = mean_{i: segment_ids[i] == s} (data[i] - mean[s])**2`, as `jnp.var` with
    its default `ddof=0`.

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 for integers.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_var(jnp.array([1.0, 3.0, 7.0]), jnp.array([0, 0, 1]))
      Array([1., 0.], dtype=float32)

    References:
      jraph, `segment_variance`; NumPy, `var`.
    """
    centered, count = _centered(x, segments)
    return arithmetic.safe_divide(segments.sum(centered * centered), count)


@segment_reduction(kind="real", empty="0")
def segment_std(x: jax.Array, segments: Segments) -> jax.Array:
    """Computes the standard deviation of each segment.

    `out[s] = sqrt(mean_{i: segment_ids[i] == s} (data[i] - mean[s])**2)`

    Returns:
      `[num_segments, ...]`, of data's dtype; float32 for integers. If the variance is
      0, for example in a segment of one element, the gradient is 0; the gradient of
      `jnp.std` is NaN.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_std(jnp.array([1.0, 3.0, 7.0]), jnp.array([0, 0, 1]))
      Array([1., 0.], dtype=float32)

    References:
      torch-scatter, `scatter_std` (which divides by n - 1); NumPy, `std`.
    """
    centered, count = _centered(x, segments)
    centered, unit = segments.in_units(centered)
    var = arithmetic.safe_divide(segments.sum(centered * centered), count)
    return unit * arithmetic.root(var)


@segment_reduction(kind="real", empty="0", per_element=True)
def segment_normalize(
    x: jax.Array, segments: Segments, *, eps: float = 1e-5
) -> jax.Array:
    """Normalises each segment to mean 0 and variance 1.

    `out[i] = (data[i] - mean[s]) / sqrt(max(var[s], eps))` with `s = segment_ids[i]`,
    and the mean and variance of the elements of segment s.

    Args:
      eps: positive number, a lower bound on the variance in the denominator.

    Returns:
      `[n, ...]`, an array of data's shape and dtype; float32 for integers.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_normalize(jnp.array([1.0, 3.0, 7.0]), jnp.array([0, 0, 1]))
      Array([-1.,  1.,  0.], dtype=float32)

    References:
      jraph, `segment_normalize`.
    """
    if not eps > 0:
        raise ValueError(f"eps must be a positive number, got {eps!r}.")
    centered, count = _centered(x, segments)
    # Small deviations stay as they are: `eps` is larger than their squares.
    centered, unit = segments.in_units(centered, least=1)
    var = arithmetic.safe_divide(segments.sum(centered * centered), count)
    scale = lax.rsqrt(jnp.maximum(var, jnp.array(eps, var.dtype) / (unit * unit)))
    return centered * segments.broadcast(scale)


# ------------------------------------------------------------------ private


def _centered(x: jax.Array, segments: Segments) -> tuple[jax.Array, jax.Array]:
    """Returns elements minus the mean of their segment, and the segments' lengths."""
    count = segments.lengths()
    mean = arithmetic.safe_divide(segments.sum(x), count)
    return segments.mask(x - segments.broadcast(mean)), count
