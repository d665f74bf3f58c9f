"""The mask of several losses."""

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments


def as_mask(where: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns `where` as booleans, broadcast to `shape`; None stays None."""
    if where is None:
        return None
    where = _arguments.to_array(where, "where", "an array of booleans")
    if where.dtype != jnp.bool_:
        raise TypeError(f"where must be booleans, got {_arguments.kind_of(where)}.")
    try:
        return jnp.broadcast_to(where, shape)
    except ValueError:
        raise ValueError(
            f"where must broadcast to {shape}, a boolean for each negative, got shape "
            f"{where.shape}."
        ) from None
