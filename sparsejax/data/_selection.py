"""Columns by name or by position: the label, numbers and words of a source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsejax import _arguments
from sparsejax.data._sources import Table


_KEYS = ("label", "numbers", "ids")


@dataclasses.dataclass(frozen=True)
class Selection:
    """The columns to read, by name or by position.

    Args:
      call: for messages.
      places: the columns of "label", "numbers" and "ids", if present: ints from 0, or
        names. None if all columns are words.
    """

    call: str
    places: dict[str, tuple[int | str, ...]] | None

    @property
    def needs_names(self) -> bool:
        """True if a CSV file must have the names of columns in its first line."""
        if self.places is None:
            return True
        return any(isinstance(p, str) for own in self.places.values() for p in own)

    def names(self, table: Table) -> list[str]:
        """Returns the names of the columns of words, or [] if one is a position."""
        places = table.columns if self.places is None else self.places["ids"]
        if not all(isinstance(place, str) for place in places):
            return []
        return [_stripped(str(place)) for place in places]

    def find(self, table: Table) -> dict[str, list[str]]:
        """Returns for each key the names of its columns in a table."""
        if self.needs_names and not table.columns:
            raise ValueError(
                f"{self.call}: {table.name} is empty, but its first line must be the "
                "names of the columns."
            )
        places = {"ids": tuple(table.columns)} if self.places is None else self.places
        return {
            key: [self._find(table, place) for place in own]
            for key, own in places.items()
        }

    def _find(self, table: Table, place: int | str) -> str:
        columns = table.columns
        if isinstance(place, str):
            same = [name for name in columns if place in (name, _stripped(name))]
            expected = f"the name {place!r} once"
        else:
            if not columns:  # a file without rows, from which nothing is read
                return f"f{place}"
            own = columns[place : place + 1]
            same = [name for name in columns if name in own]
            expected = f"a column {place} (counting from 0), with a name of its own"
        if len(same) == 1:
            return same[0]
        shown = ", ".join(columns)
        shown = shown if len(shown) <= 200 else f"{shown[:197]}..."
        raise ValueError(
            f"{self.call}: {table.name} has the columns {shown!r}, expected "
            f"{expected}, as in columns=."
        )


def _stripped(name: str) -> str:
    return name.strip(" \t")


def as_selection(call: str, columns: Any) -> Selection:
    """Checks the argument `columns` of a reader."""
    if columns is None:
        return Selection(call, None)
    is_map = isinstance(columns, Mapping)
    if not is_map or "ids" not in columns or not columns.keys() <= set(_KEYS):
        error = _arguments.wrong if is_map else _arguments.wrong_type
        raise error(
            call,
            "columns",
            "a dict with the key 'ids' and optionally 'label' and 'numbers'",
            repr(columns),
            "For lines of user,item,rating, pass the names in the first line, "
            "{'label': 'rating', 'ids': ['user', 'item']}, or the positions from 0, "
            "{'label': 2, 'ids': [0, 1]}.",
        )
    out: dict[str, tuple[int | str, ...]] = {}
    for key in (key for key in _KEYS if key in columns):
        given = columns[key]
        one = key == "label" or isinstance(given, (str, int, np.integer))
        try:
            fields: Any = [given] if one else given
            own = [_as_place(place) for place in fields]
        except TypeError:
            own = [None]
        if None in own:
            want = "one int or str" if key == "label" else "a list of ints and strs"
            want += " (the position of a column, from 0, or its name)"
            raise _arguments.wrong(call, f"columns[{key!r}]", want, repr(given))
        out[key] = tuple(place for place in own if place is not None)
    if not any(out.values()):
        raise _arguments.wrong(call, "columns", "at least one column", repr(columns))
    return Selection(call, out)


def _as_place(place: Any) -> int | str | None:
    """Returns a position or a name, or None for any other value."""
    if isinstance(place, (int, np.integer)) and not isinstance(place, bool):
        return int(place) if place >= 0 else None
    return place if isinstance(place, str) else None


def place_of(call: str, column: Any, names: Sequence[str], count: int | None) -> int:
    """Returns the position of a column that is given by name or by position.

    Args:
      call: the public call, for errors.
      column: a name, or a position from 0.
      names: the names of all columns, or empty.
      count: the number of columns; None if it is not known.
    """
    if isinstance(column, str):
        if column in names:
            return list(names).index(column)
        found = "The columns have no names. Pass"
        if names:
            found = f"The columns are {list(names)}. Pass one of these names, or"
        last = "" if count is None else f" to {count - 1}"
        raise ValueError(
            f"{call}: there is no column {column!r}. {found} a position from 0{last}."
        )
    hint = " Pass the name of a column, or its position from 0."
    place = _arguments.static_int(call, "column", column, hint=hint)
    if count is not None and place >= count:
        raise IndexError(f"{call}: column {place} is out of range for {count} columns.")
    return place
