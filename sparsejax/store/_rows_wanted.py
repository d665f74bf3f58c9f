"""Ids as a store takes them: distinct rows in ascending order, on the host.

Rows of one pull are read in ascending order, which walks through memory in one
direction, and capacities are powers of two, so that a step that is compiled for a
capacity is compiled a few times only, however many rows its batches name.
"""

from typing import Any

import numpy as np
from jax.core import Tracer

from sparsejax import _arguments


LEAST_CAPACITY = 8
MODES = ("error", "drop")


def check_not_traced(call: str, name: str, what: str, *arrays: Any) -> None:
    """An error where arrays are traced: a store works outside of jit."""
    if any(isinstance(x, Tracer) for x in arrays):
        raise TypeError(
            f"{call}: table {name!r} is in the memory of the host, where {what} that "
            "are traced by jit, vmap, grad or scan have no values. Call it outside: "
            "pull, hand the SelectedRows to the jitted step, and push the gradient "
            "that comes out."
        )


def distinct_rows(
    call: str, name: str, ids: Any, height: int, mode: str = "error"
) -> np.ndarray:
    """The rows that `ids` name, each once, ascending, in the type of a slot's id."""
    if mode not in MODES:
        raise ValueError(
            f"{call}: mode must be 'error' or 'drop', got {mode!r}. 'drop' leaves out "
            "ids that are out of range, such as a padding id of -1."
        )
    ids = _arguments.as_integers(call, ids)
    check_not_traced(call, name, "ids", ids)
    ids = np.asarray(ids).reshape(-1)
    dtype = _arguments.index_dtype(height)
    if ids.size and (ids.min() < 0 or ids.max() >= height):
        good = (ids >= 0) & (ids < height)
        if mode == "error":
            raise ValueError(
                f"{call}: {int(np.sum(~good))} of {ids.size} ids for table {name!r} "
                f"are out of range, the first is {int(ids[np.argmin(good)])} and the "
                f"table has {height} rows. Correct the ids, or ask for mode='drop'."
            )
        ids = ids[good]
    return _unique_of_sorted(np.sort(ids.astype(dtype)))


def slots_of(rows: np.ndarray, height: int) -> tuple[np.ndarray, np.ndarray, int]:
    """A gradient's rows, each once, and where its slots go among them.

    Returns:
      `(distinct, places, capacity)`: the rows ascending; for each slot its place among
      them, int32, `capacity` where it names no row; a bucket that holds them.
    """
    filled = (rows >= 0) & (rows < height)
    count = int(np.count_nonzero(filled))
    head = rows[:count]
    if filled[:count].all() and (head[1:] > head[:-1]).all():  # merged already
        capacity = bucket(count)
        places = np.full(rows.shape, capacity, np.int32)
        places[:count] = np.arange(count, dtype=np.int32)
        return head.astype(_arguments.index_dtype(height)), places, capacity
    safe = np.where(filled, rows, height).astype(_arguments.index_dtype(height))
    distinct = _unique_of_sorted(np.sort(safe[filled]))
    capacity = bucket(distinct.size)
    places = np.searchsorted(distinct, safe).astype(np.int32)
    places[~filled] = capacity
    return distinct, places, capacity


def bucket(count: int) -> int:
    """The power of two that holds `count` rows."""
    return max(LEAST_CAPACITY, 1 << (max(count, 1) - 1).bit_length())


def capacity_for(
    call: str, name: str, count: int, height: int, capacity: int | None
) -> int:
    """Slots for `count` rows; an error if the number asked for is too small."""
    if capacity is None:
        return min(bucket(count), max(1, height))
    capacity = _arguments.check_capacity(call, capacity)
    if count > capacity:
        raise ValueError(
            f"{call}: {count} distinct rows of table {name!r} do not fit into "
            f"capacity={capacity}. Give capacity={count} or more, or leave it out."
        )
    return capacity


def members(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which of `rows` are among `others`; both distinct and ascending."""
    if not rows.size or not others.size:
        return np.zeros(rows.shape, bool)
    place = np.searchsorted(others, rows)
    np.minimum(place, others.size - 1, out=place)
    return others[place] == rows


def _unique_of_sorted(ids: np.ndarray) -> np.ndarray:
    if ids.size < 2:
        return ids
    first = np.empty(ids.shape, bool)
    first[0] = True
    np.not_equal(ids[1:], ids[:-1], out=first[1:])
    return ids[first]
