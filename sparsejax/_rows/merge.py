"""Merging duplicate row ids, stable orders, and binary search for ids."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments, _compat
from sparsejax._rows import indexing, merge_cuda


def merge_plan(
    rows: jax.Array, height: int, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the slot of each row when duplicates are merged.

    Args:
      rows: integer `[n]`, in `[0, height]`; `height` is an empty slot.
      height: number of rows of the table.
      capacity: slots of the result.

    Returns:
      `(unique [capacity], slot int32[n], count int32[])`: the distinct rows in
      ascending order, padded with `height`; the slot in `unique` of each element of
      `rows`, or `capacity` if it has none; the number of distinct rows, even if not all
      of them fit.
    """
    none = jnp.zeros((*rows.shape, 0), rows.dtype)
    unique, slot, _, count = _merge(rows, none, height, capacity)
    return unique, slot, count


def coalesce(
    rows: jax.Array, values: jax.Array, height: int, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merges duplicate rows, always in the same order.

    Args:
      rows: integer `[n]`, in `[0, height]`; `height` is an empty slot.
      values: `[n, ...]`.
      height: number of rows of the table.
      capacity: slots of the result.

    Returns:
      `(rows [capacity], values [capacity, ...], count int32[])`: the distinct rows in
      ascending order, padded with `height`; their sums; the number of distinct rows,
      even if not all of them fit.
    """
    unique, _, total, count = _merge(rows, values, height, capacity)
    return unique, total, count


def _merge(rows: Any, values: Any, height: int, capacity: int) -> Sequence[jax.Array]:
    """Returns `(unique, slot, sums, count)`; XLA drops those that are not used."""
    static = dict(height=height, capacity=capacity)
    if not rows.size or _compat.has_mesh(rows) or _compat.has_mesh(values):
        return _merge_by_sorting(rows, values, **static)
    return _merge_p.bind(rows, values, **static)


def _merge_by_sorting(rows, values, *, height, capacity):
    empty = _arguments.scalar(height, rows)
    # Sort only the ids, then find each one by binary search: on XLA:CPU this is faster
    # than sorting pairs, and a merge by hashing whose rows are sorted afterwards takes
    # 0.7 to 1.7 times as long (see benchmarks/NOTES.md).
    ordered = lax.sort(rows, is_stable=False)
    first = jnp.ones(rows.shape, bool).at[1:].set(ordered[1:] != ordered[:-1])
    first &= ordered != empty
    place = jnp.cumsum(first, dtype=jnp.int32) - 1
    most = _arguments.scalar(capacity, place)
    place = jnp.minimum(jnp.where(ordered == empty, most, place), most)
    unique = indexing.set_rows(jnp.full((capacity,), empty, rows.dtype), place, ordered)
    # In slot order, so sums are reproducible and the values need no gather.
    slot = indexing.take_rows(place, indexing.search_sorted(ordered, rows))
    wide = indexing.accumulator_dtype(values.dtype)
    zeros = jnp.zeros((capacity, *values.shape[1:]), wide)
    total = indexing.add_rows(zeros, slot, values.astype(wide)).astype(values.dtype)
    return unique, slot, total, jnp.sum(first, dtype=jnp.int32)


def _merge_types(rows, values, *, height, capacity):
    summed = (capacity, *values.shape[1:]), values.dtype
    slots = ((capacity,), rows.dtype), (rows.shape, jnp.int32)
    return [*slots, summed, ((), jnp.int32)]


_merge_p = _compat.primitive(
    "merge",
    _merge_by_sorting,
    {"cuda": merge_cuda.merge},
    types=_merge_types,
    multiple_results=True,
)


def first_slots(rows: jax.Array, height: int) -> jax.Array:
    """Finds the first slot with the same id for each row, int32 `[n]`, by hashing.

    Each id is hashed to one of 4 n cells, and the first slot in a cell wins the cell.
    Ids equal to the winner's id have found their first slot, since equal ids always
    share a cell. The other ids go into another round with another hash. Each round
    finishes at least one id per cell, so the loop ends.

    Args:
      rows: integer `[n]`; ids out of `[0, height)` are empty slots, whose result is n.
      height: number of rows of the table.
    """
    n = rows.shape[0]
    # Any number of cells will do: an export for any n has 2^20.
    bits = 20 if _compat.is_symbolic_dim(n) else max(4, (4 * n - 1).bit_length())
    slots = lax.iota(jnp.int32, n)
    cells, none = np.int32(1 << bits), _arguments.scalar(n, slots)
    low = rows.astype(jnp.uint32)
    high = (rows >> 32).astype(jnp.uint32) if rows.dtype.itemsize > 4 else None

    def turn(state):
        k, first = state
        # Odd factors that differ in many bits (multiplicative hashing: Knuth, 6.4).
        factor = np.uint32(0x9E3779B1) + k * np.uint32(0x85EBCA6A)
        mixed = low * factor
        if high is not None:
            mixed += high * (factor ^ np.uint32(0xC2B2AE34))
        cell = lax.shift_right_logical(mixed, np.uint32(32 - bits)).astype(jnp.int32)
        waits = first < 0
        cell = jnp.where(waits, cell, cells)
        winners = jnp.full((1 << bits,), none).at[cell].min(slots, mode="drop")
        winner = jnp.minimum(winners[jnp.minimum(cell, cells - 1)], none - 1)
        first = jnp.where(waits & (rows[winner] == rows), winner, first)
        return k + np.uint32(1), first

    start = jnp.where(indexing.in_range(rows, height), np.int32(-1), none)
    waiting = lambda state: jnp.any(state[1] < 0)
    return lax.while_loop(waiting, turn, (np.uint32(0), start))[1]


def stable_order(keys: jax.Array, limit: int) -> jax.Array:
    """Returns the permutation that sorts `keys` stably, int32 `[n]`.

    Args:
      keys: integer `[n]`, in `[0, limit)`.
      limit: static.
    """
    n = keys.size
    if _arguments.may_exceed(limit * n, jnp.iinfo(jnp.int32).max):
        return jnp.argsort(keys, stable=True).astype(jnp.int32)
    # Pack key and position into one number: XLA:CPU sorts single numbers several times
    # as fast as pairs.
    position = lax.iota(jnp.int32, n)
    packed = keys.astype(jnp.int32) * np.int32(n) + position
    return lax.sort(packed, is_stable=False) % np.int32(max(n, 1))


def find_slots(
    sorted_rows: jax.Array, ids: jax.Array, height: int
) -> tuple[jax.Array, jax.Array]:
    """Finds each id in ascending `sorted_rows` by binary search: `(slot, stored)`."""
    last = sorted_rows.shape[0] - 1
    if sorted_rows.shape[0] == 0:
        return jnp.zeros(ids.shape, jnp.int32), jnp.zeros(ids.shape, bool)
    inside = indexing.in_range(ids, height)  # before the cast, which can narrow ids
    ids = jnp.where(inside, ids, _arguments.scalar(0, ids)).astype(sorted_rows.dtype)
    slot = indexing.search_sorted(sorted_rows, ids)
    slot = jnp.minimum(slot, _arguments.scalar(last, slot))
    return slot, inside & (sorted_rows[slot] == ids)
