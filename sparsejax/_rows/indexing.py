"""Reading and writing rows of arrays by id, and accumulator dtypes.

Reading an id out of range (outside `[0, height)`) gives zeros; writing it does nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments


def in_range(ids: jax.Array, height: int) -> jax.Array:
    """Which ids are in `[0, height)`."""
    return (ids >= 0) & (ids < _arguments.scalar(height, ids))


def append_axes(x: jax.Array, ndim: int) -> jax.Array:
    """`x` with axes of length 1 appended, up to rank `ndim`."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


def zero_unless(keep: jax.Array, values: jax.Array) -> jax.Array:
    """`values` where the mask `keep` of the leading axes is true, zeros elsewhere."""
    keep = append_axes(keep, values.ndim)
    return jnp.where(keep, values, jnp.zeros((), values.dtype))


def fill_value(dtype: Any) -> np.ndarray:
    """What `jnp.take` returns for an index out of range."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(np.nan, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.array(True)
    limits = jnp.iinfo(dtype)
    unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
    return np.array(limits.max if unsigned else limits.min, dtype)


def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`table[ids]`, zeros for ids out of range."""
    if table.shape[0] == 0:  # JAX cannot gather from an empty axis
        return jnp.zeros((*ids.shape, *table.shape[1:]), table.dtype)
    table = jnp.asarray(table)  # outside jit it may be a NumPy array
    return table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def add_rows(table: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """`table` with `values` added to rows `ids`; duplicates are summed.

    The sum of booleans is their logical or, as with `+` on arrays.
    """
    add = table.at[ids].max if table.dtype == jnp.bool_ else table.at[ids].add
    return add(values, mode="drop", wrap_negative_indices=False)


def set_rows(table: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """`table` with rows `ids` replaced; ids in range must be unique."""
    return table.at[ids].set(values, mode="drop", wrap_negative_indices=False)


def accumulator_dtype(dtype: Any) -> Any:
    """The dtype that sums of `dtype` accumulate in: at least float32 for floats."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(dtype)


def float_dtype(dtype: Any) -> Any:
    """The dtype of a mean: `dtype` itself for floats, else float32."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(jnp.float32)


def float_accumulator_dtype(dtype: Any) -> Any:
    """The dtype that a mean of `dtype` accumulates in."""
    return accumulator_dtype(float_dtype(dtype))


def promote(*dtypes: Any) -> Any:
    """The common type of `dtypes`, even under strict dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def merge_plan(
    rows: jax.Array, height: int, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where each of `rows` goes when duplicates are merged.

    Args:
      rows: integer `[n]`, in `[0, height]`; `height` is an empty slot.
      height: number of rows of the table.
      capacity: slots of the result.

    Returns:
      `(unique [capacity], slot int32[n], count int32[])`: the distinct rows in
      ascending order, padded with `height`; the slot of each of `rows` in `unique`, or
      `capacity` if it has no slot; the number of distinct rows, even if not all fit.
    """
    empty = _arguments.scalar(height, rows)
    # Sort only the ids, then find each one by binary search: on XLA:CPU this is faster
    # than sorting pairs (see benchmarks/NOTES.md).
    ordered = lax.sort(rows, is_stable=False)
    first = jnp.ones(rows.shape, bool).at[1:].set(ordered[1:] != ordered[:-1])
    first &= ordered != empty
    place = jnp.cumsum(first, dtype=jnp.int32) - 1
    place = jnp.where(ordered == empty, np.int32(capacity), place)
    place = jnp.minimum(place, np.int32(capacity))
    unique = set_rows(jnp.full((capacity,), empty, rows.dtype), place, ordered)
    # In slot order, so sums are reproducible and the values need no gather.
    slot = take_rows(place, jnp.searchsorted(ordered, rows))
    return unique, slot, jnp.sum(first, dtype=jnp.int32)


def stable_order(keys: jax.Array, limit: int) -> jax.Array:
    """The permutation that sorts `keys` stably, int32 `[n]`.

    Args:
      keys: integer `[n]`, in `[0, limit)`.
      limit: static.
    """
    n = keys.size
    if limit * n > jnp.iinfo(jnp.int32).max:
        return jnp.argsort(keys, stable=True).astype(jnp.int32)
    # Pack key and position into one distinct number: XLA:CPU sorts single numbers
    # several times as fast as pairs.
    position = lax.iota(jnp.int32, n)
    packed = keys.astype(jnp.int32) * np.int32(n) + position
    return lax.sort(packed, is_stable=False) % np.int32(max(n, 1))


def find_slots(
    sorted_rows: jax.Array, ids: jax.Array, height: int
) -> tuple[jax.Array, jax.Array]:
    """Finds each id in ascending `sorted_rows` by binary search: `(slot, stored)`."""
    last = sorted_rows.shape[0] - 1
    if last < 0:
        return jnp.zeros(ids.shape, jnp.int32), jnp.zeros(ids.shape, bool)
    inside = in_range(ids, height)  # before the cast, which may narrow
    ids = jnp.where(inside, ids, _arguments.scalar(0, ids)).astype(sorted_rows.dtype)
    slot = jnp.searchsorted(sorted_rows, ids).astype(jnp.int32)
    slot = jnp.minimum(slot, np.int32(last))
    return slot, inside & (sorted_rows[slot] == ids)
