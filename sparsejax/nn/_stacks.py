"""Tables of one width and type in one array, one after the other.

A batch of many features then reads a few long arrays, each once, instead of many short
ones. `translate` is where an id of a table becomes a row of its stack, and where an id
beyond its own table is kept from being a row of the next one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._lookup import lookup
from sparsejax._rows import SelectedRows, indexing


# What stands for no row in a stack. Padding is in no bag; a bad id reads what `mode`
# says.
PADDING, BAD = -1, -2


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a table is: rows `[start, stop)` of a stack."""

    stack: str
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tables in one array.

    Args:
      shape: of the array.
      dtype: of the array.
      sparse_grad: whether its gradient may be sparse.
      tables: their names, in order.
    """

    shape: tuple[int, int]
    dtype: Any
    sparse_grad: bool
    tables: tuple[str, ...]


def arrange(
    tables: Sequence[tuple[str, Any]], stacked: bool
) -> tuple[dict[str, Stack], dict[str, Place]]:
    """Which tables share a stack, and where each of them is in it.

    Args:
      tables: names with their layers.
      stacked: whether tables of one width, type and kind of gradient share one.

    Returns:
      The stacks by name, and the places of the tables by theirs.
    """
    stacks: dict[str, Stack] = {}
    places: dict[str, Place] = {}
    for name, layer in tables:
        key = _stack_name(layer) if stacked else name
        stack = stacks.get(key)
        start = 0 if stack is None else stack.shape[0]
        stop = start + layer.num_embeddings
        names = (name,) if stack is None else (*stack.tables, name)
        stacks[key] = Stack(
            (stop, layer.features), layer.param_dtype, layer.sparse_grad, names
        )
        places[name] = Place(key, start, stop)
    for stack in stacks.values():
        _arguments.index_dtype(
            stack.shape[0]
        )  # an error where no id can name its last row
    return stacks, places


def _stack_name(layer: Any) -> str:
    name = f"{layer.param_dtype.name}_{layer.features}"
    return name if layer.sparse_grad else f"{name}_dense"


def translate(
    call: str,
    layer: Any,
    place: Place,
    height: int,
    ids: Any,
    inside: jax.Array | None = None,
) -> jax.Array:
    """Ids of a table as rows of its stack.

    Args:
      call: who to name in errors.
      layer: the table's; its `padding_id`, and its `mode` for ids out of range.
      place: where the table is.
      height: rows of the stack.
      ids: integers of any shape, of which none outside `[0, V)` is a row.
      inside: bool of the shape of `ids`, which of them count; None for all.

    Returns:
      Signed integers of the same shape that are in `[start, stop)`, or `PADDING` for
      what is skipped, or `BAD`.
    """
    given = _arguments.as_integers(call, ids)
    skip = lookup.padding_mask(call, given, layer.padding_id)
    if inside is not None:
        skip = ~inside if skip is None else skip | ~inside
    ids = _arguments.as_ids(call, given, place.num_rows)
    own = indexing.in_range(ids, place.num_rows)
    table = jax.ShapeDtypeStruct((place.num_rows,), jnp.float32)
    if layer.mode == "clip":
        ids, own = lookup.clip_ids(call, table, ids), None
    elif layer.mode == "error":
        bad = ~own if skip is None else ~(own | skip)
        lookup.check_none(call, table, bad, ids)
    wide = _arguments.index_dtype(height)
    rows = ids.astype(wide) + np.array(place.start, wide)
    if own is not None:
        rows = jnp.where(own, rows, np.array(BAD, wide))
    return rows if skip is None else jnp.where(skip, np.array(PADDING, wide), rows)


def cut(stack: Any, place: Place) -> Any:
    """One table out of a stack: an array, or the slots of a SelectedRows."""
    if not isinstance(stack, SelectedRows):
        return stack[place.start : place.stop]
    rows, own = stack.rows, place.num_rows
    inside = (rows >= np.array(place.start, rows.dtype)) & (
        rows < np.array(place.stop, rows.dtype)
    )
    rows = jnp.where(inside, rows - np.array(place.start, rows.dtype), own)
    return SelectedRows(rows, indexing.zero_unless(inside, stack.values), own)
