"""What the losses share: vectors and scores as arrays, and products of vectors."""

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._rows import indexing


def as_floats(call: str, x: Any, name: str) -> jax.Array:
    """`x` as a JAX array of floats, or a TypeError that names `call`."""
    x = _arguments.to_array(call, x, name, "an array of floats")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{call}: {name} must be floats, got {x.dtype} of shape {x.shape}. Cast "
            "them with .astype(jnp.float32)."
        )
    return x


def products(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """`einsum` of two arrays of floats, accumulated in at least float32."""
    dtype = indexing.promote(x.dtype, y.dtype)
    wide = indexing.accumulator_dtype(dtype)
    x, y = x.astype(dtype), y.astype(dtype)
    return jnp.einsum(subscripts, x, y, preferred_element_type=wide)


def as_mask(call: str, where: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """`where` as booleans of `shape`; axes of length 1 and missing ones broadcast."""
    if where is None:
        return None
    where = _arguments.to_array(call, where, "where", "an array of booleans")
    if where.dtype != jnp.bool_:
        raise TypeError(
            f"{call}: where must be booleans, got {where.dtype} of shape {where.shape}."
        )
    try:
        return jnp.broadcast_to(where, shape)
    except ValueError:
        raise ValueError(
            f"{call}: where must broadcast to {shape}, a boolean for each negative, "
            f"got shape {where.shape}."
        ) from None
