"""Requested rows: the distinct rows of a batch's ids, and the capacity for them.

A pull reads its rows in ascending order, so that it walks through memory in one
direction. Capacities are powers of two, so that a jitted step is compiled for few of
them, however many rows its batches need.
"""

from typing import Any

import numpy as np
from jax.core import Tracer

from sparsejax import _arguments


MIN_CAPACITY = 8


def check_not_traced(call: str, name: str, what: str, *arrays: Any) -> None:
    """Raises a TypeError if an array is a tracer, since a store works outside jit.

    Args:
      call, name, what: for the message: the call, the table, the kind of the arrays.
    """
    if any(isinstance(x, Tracer) for x in arrays):
        raise TypeError(
            f"{call}: table {name!r} is in host memory, so it cannot use {what} traced "
            "by jit, vmap, grad or scan. Call it outside: pull, pass the SelectedRows "
            "to the jitted step, and push the gradient that it returns."
        )


def distinct_rows(
    call: str, name: str, ids: Any, height: int, mode: str = "error"
) -> np.ndarray:
    """The rows of `ids`, each once, ascending, in the dtype of SelectedRows.rows."""
    hint = "'drop' ignores ids out of range, for example a padding id of -1."
    mode = _arguments.check_mode(mode, ("error", "drop"), hint)
    ids = _arguments.as_integers(ids)
    check_not_traced(call, name, "ids", ids)
    ids = np.asarray(ids).reshape(-1)
    if ids.size and (ids.min() < 0 or ids.max() >= height):
        good = (ids >= 0) & (ids < height)
        if mode == "error":
            raise ValueError(
                f"{call}: {int(np.sum(~good))} of {ids.size} ids for table {name!r} "
                f"are out of range, the first is {int(ids[np.argmin(good)])} and the "
                f"table has {height} rows. Correct the ids, or use mode='drop'."
            )
        ids = ids[good]
    return sorted_unique(ids.astype(_arguments.index_dtype(height)))


def check_rows(call: str, name: Any, rows: np.ndarray, height: int) -> None:
    """Raises a ValueError unless each row is in the table or an empty slot."""
    good = (rows >= 0) & (rows <= height)
    if not good.all():
        raise ValueError(
            f"{call}: {np.count_nonzero(~good)} of {rows.size} rows for table {name!r} "
            f"are out of range, the first is {int(rows[np.argmin(good)])} and the "
            f"table has {height} rows. Correct the rows; an empty slot has the row "
            f"{height}."
        )


def slots_of(rows: np.ndarray, height: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The distinct rows of a gradient, and the place of each of its slots among them.

    Returns:
      `(distinct, positions, capacity)`: the rows, ascending; for each slot the position
      of its row among them, int32, or `capacity` if the slot is out of range; and a
      capacity that holds them.
    """
    dtype = _arguments.index_dtype(height)
    filled = (rows >= 0) & (rows < height)
    count = int(np.count_nonzero(filled))
    head = rows[:count]
    if filled[:count].all() and (head[1:] > head[:-1]).all():  # coalesced already
        capacity = bucket(count)
        positions = np.full(rows.shape, capacity, np.int32)
        positions[:count] = np.arange(count, dtype=np.int32)
        return head.astype(dtype), positions, capacity
    safe = np.where(filled, rows, height).astype(dtype)
    distinct = sorted_unique(safe[filled])
    capacity = bucket(distinct.size)
    positions = np.searchsorted(distinct, safe).astype(np.int32)
    positions[~filled] = capacity
    return distinct, positions, capacity


def bucket(count: int) -> int:
    """The power of two that holds `count` rows."""
    return max(MIN_CAPACITY, _arguments.next_power_of_two(count))


def capacity_for(
    call: str, name: str, count: int, height: int, capacity: int | None
) -> int:
    """The capacity for `count` rows; a ValueError if `capacity` is too small."""
    if capacity is None:
        return min(bucket(count), max(1, height))
    capacity = _arguments.check_capacity(capacity)
    if count > capacity:
        raise ValueError(
            f"{call}: {count} distinct rows of table {name!r} do not fit in "
            f"capacity={capacity}. Pass capacity={count} or more, or omit it."
        )
    return capacity


def is_among(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """A mask of the rows that are among `others`; both distinct and ascending."""
    if not rows.size or not others.size:
        return np.zeros(rows.shape, bool)
    position = np.searchsorted(others, rows)
    np.minimum(position, others.size - 1, out=position)
    return others[position] == rows


def sorted_unique(ids: np.ndarray) -> np.ndarray:
    """The distinct values of `ids` `[n]`, ascending.

    `np.unique` of NumPy 2.3 and later hashes them: 65,536 int32 of a million values
    take it 18 ms, and 0.3 ms here (2026-11).
    """
    ids = np.sort(ids)
    first = np.empty(ids.shape, bool)
    first[:1] = True
    np.not_equal(ids[1:], ids[:-1], out=first[1:])
    return ids[first]
