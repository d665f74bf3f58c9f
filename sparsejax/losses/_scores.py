"""Helpers of several losses: scalars, masks, and products of vectors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments


def as_mask(where: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns `where` as booleans, broadcast to `shape`; None stays None."""
    if where is None:
        return None
    where = _arguments.to_array(where, "where", "an array of booleans")
    if where.dtype != jnp.bool_:
        found = f"{where.dtype} of shape {where.shape}"
        raise TypeError(f"where must be booleans, got {found}.")
    try:
        return jnp.broadcast_to(where, shape)
    except ValueError:
        raise ValueError(
            f"where must broadcast to {shape}, a boolean for each negative, got shape "
            f"{where.shape}."
        ) from None


def as_scalar(x: Any, name: str, dtype: Any) -> jax.Array:
    """Returns `x`, a number or a scalar array, as a scalar of `dtype`."""
    array = jnp.asarray(x) if isinstance(x, (int, float, np.number)) else x
    array, want = _arguments.as_array(array), "a number or a scalar array"
    if not isinstance(array, jax.Array):
        raise TypeError(f"{name} must be {want}, got {_arguments.show(x)}.")
    if array.ndim:
        raise ValueError(f"{name} must be {want}, got {_arguments.show(x)}.")
    return array.astype(dtype)
