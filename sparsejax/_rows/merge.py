"""Merging duplicate row ids: where each id goes, stable orders, ids found again."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._rows import indexing


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
    unique = indexing.set_rows(jnp.full((capacity,), empty, rows.dtype), place, ordered)
    # In slot order, so sums are reproducible and the values need no gather.
    slot = indexing.take_rows(place, jnp.searchsorted(ordered, rows))
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
    inside = indexing.in_range(ids, height)  # before the cast, which may narrow
    ids = jnp.where(inside, ids, _arguments.scalar(0, ids)).astype(sorted_rows.dtype)
    slot = jnp.searchsorted(sorted_rows, ids).astype(jnp.int32)
    slot = jnp.minimum(slot, np.int32(last))
    return slot, inside & (sorted_rows[slot] == ids)
