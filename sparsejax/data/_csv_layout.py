"""Which fields of a row are the label, which numbers, and which categories.

They come in this order, so many of each; or `columns` says where each of them is, by
its place or by its name in the first line. What is not named there is not read.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsejax.data import _checks, _text_files


KEYS = ("label", "numbers", "ids")
NUM_NUMBERS, NUM_IDS = 13, 26  # Criteo's

_ONE, _SOME = "one int or str", "a list of ints and strs"


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a row of the file has.

    Args:
      call: for messages.
      places: for "label", "numbers" and "ids", where there are such, their fields: ints
        from 0, or names.
      num_fields: of a row; None if it is the first line that says so.
      separator: one character, or "auto".
      header: whether the first line is names.
    """

    call: str
    places: dict[str, tuple[Any, ...]]
    num_fields: int | None
    separator: str
    header: bool

    def size(self, key: str) -> int:
        """How many fields there are of "label", "numbers" or "ids"."""
        return len(self.places.get(key, ()))

    def names(self) -> list[str]:
        """The names of the categories, where all of them have one; else nothing."""
        places = self.places.get("ids", ())
        return list(places) if all(isinstance(p, str) for p in places) else []

    def describe(self) -> str:
        """What a row is made of, for messages."""
        if self.num_fields is None:
            return "as the first line has"
        numbers, ids = self.size("numbers"), self.size("ids")
        parts = ["label"] if self.size("label") else []
        parts += [f"{numbers} numbers"] if numbers else []
        parts += [f"{ids} categories"] if ids else []
        return ", ".join(parts)

    def find(self, path: Any, line: int, first: list[bytes]) -> "Fields":
        """The places of all fields, after a look at the first line."""
        if self.num_fields is not None:
            return Fields(self.places, self.num_fields)
        names = [field.strip() for field in first]
        found = {}
        for key, places in self.places.items():
            own = []
            for place in places:
                if isinstance(place, str):
                    if names.count(place.encode()) != 1:
                        shown = _text_files.show(b", ".join(names), 200)
                        expected = f"the name {place!r} once, as columns has it"
                        _text_files.refuse(path, line, f"the names {shown}", expected)
                    place = names.index(place.encode())
                elif place >= len(first):
                    shown = f"{len(first)} field{'s' if len(first) > 1 else ''}"
                    expected = f"a field {place}, counted from 0, as columns has it"
                    _text_files.refuse(path, line, shown, expected)
                own.append(place)
            found[key] = tuple(own)
        return Fields(found, len(first))


@dataclasses.dataclass(frozen=True)
class Fields:
    """Where in a row the parts of a Layout are: all places are ints."""

    places: dict[str, tuple[int, ...]]
    num_fields: int


def as_layout(
    call: str,
    num_numbers: Any,
    num_ids: Any,
    label: Any,
    separator: Any,
    header: Any,
    columns: Any,
) -> Layout:
    """The arguments of a reader as a Layout, or an error."""
    numbers = _checks.as_int("num_numbers", num_numbers, 0, call)
    ids = _checks.as_int("num_ids", num_ids, 0, call)
    label = _checks.as_bool("label", label, call)
    header = _checks.as_bool("header", header, call)
    one = isinstance(separator, str) and len(separator.encode()) == 1
    if separator != "auto" and not one:
        raise ValueError(
            f"{call}: separator must be 'auto' or one character, got {separator!r}."
        )
    if columns is not None:
        if (numbers, ids, label) != (NUM_NUMBERS, NUM_IDS, True):
            raise ValueError(
                f"{call}: columns says which fields there are, and num_numbers, "
                "num_ids and label say it as well. Leave these out."
            )
        places = _as_places(call, columns)
        named = any(isinstance(p, str) for own in places.values() for p in own)
        return Layout(call, places, None, separator, header or named)
    first = int(label)
    last = first + numbers + ids
    if not last:
        raise ValueError(
            f"{call}: a row must have at least one number, category or label."
        )
    places: dict[str, tuple[Any, ...]] = {"label": (0,)} if label else {}
    places["numbers"] = tuple(range(first, first + numbers))
    places["ids"] = tuple(range(first + numbers, last))
    return Layout(call, places, last, separator, header)


# ------------------------------------------------------------------ private


def _as_places(call: str, columns: Any) -> dict[str, tuple[Any, ...]]:
    is_map = isinstance(columns, Mapping)
    if not is_map or "ids" not in columns or not columns.keys() <= set(KEYS):
        raise ValueError(
            f"{call}: columns must be a dict of 'label', 'numbers' and 'ids', the last "
            f"of which it must have, got {columns!r}. For lines of user,item,rating: "
            "columns={'label': 'rating', 'ids': ['user', 'item']}, names in the first "
            "line, or places from 0: columns={'label': 2, 'ids': [0, 1]}."
        )
    out: dict[str, tuple[Any, ...]] = {}
    for key in (key for key in KEYS if key in columns):
        given = columns[key]
        one = key == "label" or isinstance(given, (str, int, np.integer))
        try:
            fields: Any = [given] if one else given
            own = tuple(_as_place(field) for field in fields)
        except TypeError:
            own = (None,)
        if None in own:
            want = _ONE if key == "label" else _SOME
            error = (
                f"{call}: columns[{key!r}] must be {want}: the field's place in a "
                f"row, from 0, or its name in the first line. Got {given!r}."
            )
            raise ValueError(error)
        out[key] = own
    return out


def _as_place(place: Any) -> int | str | None:
    """A place or a name; None if it is neither."""
    if isinstance(place, (int, np.integer)) and not isinstance(place, bool):
        return int(place) if place >= 0 else None
    return place if isinstance(place, str) else None
