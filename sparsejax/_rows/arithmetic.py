"""Divisions, norms and products that neither overflow nor divide by zero."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax._rows import indexing


def safe_divide(total: jax.Array, by: jax.Array) -> jax.Array:
    """Returns `total / by` with one number of `by` per row, or 0 if that is zero."""
    is_zero = by == 0
    by = jnp.where(is_zero, jnp.ones((), by.dtype), by).astype(total.dtype)
    out = quotient(total, indexing.append_axes(by, total.ndim))
    return indexing.zero_unless(~is_zero, out)


@jax.custom_jvp
def quotient(total: jax.Array, by: jax.Array) -> jax.Array:
    """Returns `total / by`, with one number of `by` for many of `total`.

    The derivative multiplies by the inverse. XLA would choose between a division and a
    product by the surrounding program: an exported program, which is simplified in
    another order, would differ in the last bit.
    """
    return total / by


@quotient.defjvp
def _quotient_jvp(primals, tangents):
    (total, by), (total_dot, by_dot) = primals, tangents
    out, inverse = quotient(total, by), 1 / by
    return out, (total_dot - out * by_dot) * inverse


@jax.custom_jvp
def root(x: jax.Array) -> jax.Array:
    """Returns the square root, whose derivative at 0 is 0, not infinite."""
    # Only the derivative is guarded: with a select around the result, XLA:CPU does not
    # vectorize it, and a step of FTRL takes 4 times as long.
    return jnp.sqrt(x)


@root.defjvp
def _root_jvp(primals, tangents):
    y = root(*primals)
    is_positive, half = y > 0, jnp.full((), 0.5, y.dtype)
    slope = half / jnp.where(is_positive, y, jnp.ones((), y.dtype))
    return y, jnp.where(is_positive, slope, jnp.zeros((), y.dtype)) * tangents[0]


def power_of_two(x: jax.Array) -> jax.Array:
    """Returns the largest power of two up to `|x|`; 1 for 0, infinity and NaN.

    Floats divided by the power of their largest one have squares that neither overflow
    nor vanish, and the division is exact. It is constant for derivatives.
    """
    bits = {2: np.int16, 4: np.int32, 8: np.int64}[x.dtype.itemsize]
    exponent = np.array(np.inf, x.dtype).view(bits)
    power = lax.bitcast_convert_type(lax.stop_gradient(x), bits) & exponent
    power = lax.bitcast_convert_type(power, x.dtype)
    is_finite = (power > 0) & (power < np.inf)
    return jnp.where(is_finite, power, jnp.ones((), x.dtype))


def norms(x: jax.Array) -> jax.Array:
    """Returns the root of the sum of squares over the last axis; slopes at 0 are 0."""
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)), axis=-1, initial=0)
    unit = power_of_two(largest).astype(x.dtype)
    x = x / unit[..., None]
    return unit * root(jnp.sum(x * x, axis=-1))


def einsum(subscripts: str, x: jax.Array, y: jax.Array, **options: Any) -> jax.Array:
    """Returns `jnp.einsum` of two arrays of floats, accumulated in at least float32."""
    dtype = indexing.promote(x.dtype, y.dtype)
    wide = indexing.accumulator_dtype(dtype)
    x, y = x.astype(dtype), y.astype(dtype)
    return jnp.einsum(subscripts, x, y, preferred_element_type=wide, **options)
