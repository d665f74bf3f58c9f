"""Requested rows: the distinct rows of a batch's ids, and the capacity for them.

A pull reads its rows in ascending order, so that it walks through memory in one
direction. Capacities only grow, or are powers of two, so that a jitted step is compiled
for few of them, however many rows its batches need.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.core import Tracer

from sparsejax import _arguments


MIN_CAPACITY = 8


def check_not_traced(name: str, what: str, *arrays: Any) -> None:
    """Raises a TypeError if an array is a tracer, since a store works outside jit."""
    if any(isinstance(x, Tracer) for x in arrays):
        raise TypeError(
            f"Table {name!r} is in host memory and cannot use {what} traced by jit, "
            "vmap, grad or scan. Pull outside, pass the SelectedRows to the jitted "
            "step, and push the gradient that it returns."
        )


def distinct_rows(name: str, ids: Any, height: int, mode: str) -> np.ndarray:
    """Returns the distinct `ids`, ascending, in the dtype of SelectedRows.rows."""
    hint = "'drop' ignores ids out of range, for example a padding id of -1."
    mode = _arguments.check_mode(mode, ("error", "drop"), hint)
    ids = _arguments.as_integers(ids)
    check_not_traced(name, "ids", ids)
    ids = np.asarray(ids).reshape(-1)
    if mode == "error":
        check_ids(name, ids, height)
    elif ids.size and (ids.min() < 0 or ids.max() >= height):
        ids = ids[(ids >= 0) & (ids < height)]
    return sorted_unique(ids.astype(_arguments.index_dtype(height)))


def check_ids(name: str, ids: np.ndarray, height: int) -> None:
    """Raises a ValueError if an id is out of range."""
    if ids.size and (ids.min() < 0 or ids.max() >= height):
        good = (ids >= 0) & (ids < height)
        raise ValueError(
            f"{int(np.sum(~good))} of {ids.size} ids for table {name!r} are out of "
            f"range, the first is {int(ids[np.argmin(good)])} and the table has "
            f"{height} rows. Correct the ids, or use mode='drop'."
        )


def check_rows(name: Any, rows: np.ndarray, height: int) -> None:
    """Raises a ValueError unless each row is in the table or an empty slot."""
    good = (rows >= 0) & (rows <= height)
    if not good.all():
        raise ValueError(
            f"{np.count_nonzero(~good)} of {rows.size} rows for table {name!r} are out "
            f"of range, the first is {int(rows[np.argmin(good)])} and the table has "
            f"{height} rows; only an empty slot has the row {height}."
        )


def places_of(rows: np.ndarray, height: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns a gradient's distinct rows, and the place of each of its slots in them.

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


def is_among(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Masks the rows that are among `others`; both distinct and ascending."""
    if not rows.size or not others.size:
        return np.zeros(rows.shape, bool)
    position = np.searchsorted(others, rows)
    np.minimum(position, others.size - 1, out=position)
    return others[position] == rows


def sorted_unique(ids: np.ndarray) -> np.ndarray:
    """Returns the distinct values of `ids` `[n]`, ascending.

    `np.unique` of NumPy 2.3 and later hashes them: 65,536 int32 of a million values
    take it 18 ms, and 0.3 ms here (2026-11).
    """
    ids = np.sort(ids)
    first = np.empty(ids.shape, bool)
    first[:1] = True
    np.not_equal(ids[1:], ids[:-1], out=first[1:])
    return ids[first]


# ------------------------------------------------------------------ capacities


def bucket(count: int) -> int:
    """Returns the power of two that holds `count` rows."""
    return max(MIN_CAPACITY, _arguments.next_power_of_two(count))


def a_quarter_more(count: int) -> int:
    """Adds a quarter to `count`, rounded up a little."""
    size = max(MIN_CAPACITY, count + count // 4)
    unit = max(1, _arguments.next_power_of_two(size) // 16)
    return -(-size // unit) * unit


def capacity_for(name: str, count: int, height: int, capacity: int | None) -> int:
    """Returns the capacity for `count` rows; raises if `capacity` is too small."""
    if capacity is None:
        return min(bucket(count), max(1, height))
    capacity = _arguments.static_int("capacity", capacity)
    if count > capacity:
        raise ValueError(
            f"{count} distinct rows of table {name!r} do not fit in capacity="
            f"{capacity}. Pass capacity={count} or more, or omit it."
        )
    return capacity


class Capacities:
    """Capacities by name, which are given, or are measured and only grow.

    Args:
      given: an int, a mapping from names to ints, or None.
      room: the capacity for a number of rows or elements that is larger than before.
    """

    def __init__(
        self,
        given: int | Mapping[str, int] | None = None,
        room: Callable[[int], int] = a_quarter_more,
    ):
        self._given, self._room = given, room
        self.measured: dict[Any, int] = {}

    def given(self, name: Any) -> int | None:
        """Returns the capacity that was given for a name, or None."""
        given = self._given
        return given.get(name) if isinstance(given, Mapping) else given

    def pulled(self, name: str, count: int, height: int) -> int:
        """Returns the capacity of a pull: given, or the next power of two."""
        return capacity_for(name, count, height, self.given(name))

    def grow(self, name: Any, count: int, most: int | None = None) -> int:
        """Returns the capacity for `count`, at least the one of earlier calls."""
        if count > self.measured.get(name, 0) or name not in self.measured:
            size = self._room(count)
            self.measured[name] = max(1, size if most is None else min(size, most))
        return self.measured[name]
