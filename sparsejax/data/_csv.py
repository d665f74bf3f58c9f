"""CSV reading: splits lines of a label, numbers and categories into fields.

A separator divides fields, and nothing is quoted. A `Layout` says which fields are the
label, numbers and categories: either a count of each, in this order, or `columns` with
the position or name of each. `read` splits a block of lines at once: a `Table` knows
where each field begins and ends in the text.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sparsejax import _arguments
from sparsejax.data import _text


NUM_NUMBERS, NUM_IDS = 13, 26  # of Criteo's files

_KEYS = ("label", "numbers", "ids")
_MOST_BYTES = 1024  # of a category
_NEWLINE, _RETURN = np.uint8(ord("\n")), np.uint8(ord("\r"))


# ------------------------------------------------------------------ which fields


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which fields of a row are what.

    Args:
      call: for messages.
      places: the fields of "label", "numbers" and "ids", if present: ints from 0, or
        names.
      num_fields: of a row; None if the first line determines it.
      separator: one character, or "auto".
      header: whether the first line contains names.
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
        """The names of the categories if all have one, else an empty list."""
        places = self.places.get("ids", ())
        return list(places) if all(isinstance(p, str) for p in places) else []

    def describe(self) -> str:
        """The fields of a row, for messages."""
        if self.num_fields is None:
            return "as in the first line"
        numbers, ids = self.size("numbers"), self.size("ids")
        parts = ["label"] if self.size("label") else []
        parts += [f"{numbers} numbers"] if numbers else []
        parts += [f"{ids} categories"] if ids else []
        return ", ".join(parts)

    def find(self, path: Any, line: int, first: list[bytes]) -> "Fields":
        """The places of all fields, where names are looked up in the first line."""
        if self.num_fields is not None:
            return Fields(self.places, self.num_fields)
        names = [field.strip() for field in first]
        found = {}
        for key, places in self.places.items():
            own = []
            for place in places:
                if isinstance(place, str):
                    if names.count(place.encode()) != 1:
                        _text.refuse(
                            path,
                            line,
                            f"the names {_text.show(b', '.join(names), 200)}",
                            f"the name {place!r} once, as in columns=",
                        )
                    place = names.index(place.encode())
                elif place >= len(first):
                    _text.refuse(
                        path,
                        line,
                        _count(len(first)),
                        f"a field {place} (counting from 0), as in columns=",
                    )
                own.append(place)
            found[key] = tuple(own)
        return Fields(found, len(first))


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of a Layout as found in a file: all places are ints."""

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
    """The arguments of a reader as a Layout."""
    numbers = _arguments.static_int(call, "num_numbers", num_numbers)
    ids = _arguments.static_int(call, "num_ids", num_ids)
    label = _arguments.check_bool(call, "label", label)
    header = _arguments.check_bool(call, "header", header)
    one = isinstance(separator, str) and len(separator.encode()) == 1
    if separator != "auto" and not one:
        raise ValueError(
            f"{call}: separator must be 'auto' or one character, got {separator!r}."
        )
    if columns is not None:
        if (numbers, ids, label) != (NUM_NUMBERS, NUM_IDS, True):
            raise ValueError(
                f"{call}: columns already says which fields to read. Omit num_numbers, "
                "num_ids and label."
            )
        places = _as_places(call, columns)
        named = any(isinstance(p, str) for own in places.values() for p in own)
        return Layout(call, places, None, separator, header or named)
    first = int(label)
    last = first + numbers + ids
    if not last:
        raise ValueError(
            f"{call}: a row must have a label, a number or a category, got label=False "
            "with num_numbers and num_ids 0."
        )
    places: dict[str, tuple[Any, ...]] = {"label": (0,)} if label else {}
    places["numbers"] = tuple(range(first, first + numbers))
    places["ids"] = tuple(range(first + numbers, last))
    return Layout(call, places, last, separator, header)


def _as_places(call: str, columns: Any) -> dict[str, tuple[Any, ...]]:
    is_map = isinstance(columns, Mapping)
    if not is_map or "ids" not in columns or not columns.keys() <= set(_KEYS):
        raise ValueError(
            f"{call}: columns must be a dict with the key 'ids' and optionally 'label' "
            f"and 'numbers', got {columns!r}. For lines of user,item,rating, pass the "
            "names in the first line, {'label': 'rating', 'ids': ['user', 'item']}, or "
            "the positions from 0, {'label': 2, 'ids': [0, 1]}."
        )
    out: dict[str, tuple[Any, ...]] = {}
    for key in (key for key in _KEYS if key in columns):
        given = columns[key]
        one = key == "label" or isinstance(given, (str, int, np.integer))
        try:
            fields: Any = [given] if one else given
            own = tuple(_as_place(field) for field in fields)
        except TypeError:
            own = (None,)
        if None in own:
            want = "one int or str" if key == "label" else "a list of ints and strs"
            raise ValueError(
                f"{call}: columns[{key!r}] must be {want} (the position of a field, "
                f"from 0, or its name in the first line), got {given!r}."
            )
        out[key] = own
    return out


def _as_place(place: Any) -> int | str | None:
    """A position or a name, or None if it is neither."""
    if isinstance(place, (int, np.integer)) and not isinstance(place, bool):
        return int(place) if place >= 0 else None
    return place if isinstance(place, str) else None


# ------------------------------------------------------------------ cutting lines


class Words(NamedTuple):
    """A column of words: uint8 `[n, L]`, each padded with zeros, and lengths `[n]`."""

    text: np.ndarray
    lengths: np.ndarray


class Table(NamedTuple):
    """A block of lines, split into fields.

    Args:
      path: of the file.
      fields: which fields are what.
      text: uint8, the lines.
      begin, end: int64 `[rows, fields]`, positions in `text`.
      lines: int64 `[rows]`, the line number of each row.
    """

    path: Any
    fields: Fields
    text: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    lines: np.ndarray

    def numbers(self, key: str, missing: float) -> np.ndarray:
        """The label or the numbers, float32 `[rows, fields]`."""
        fields = list(self.fields.places[key])
        begin, end = self.begin[:, fields], self.end[:, fields]
        given = end > begin
        found, fault = _text.read_floats(self.text, begin[given], end[given])
        expected = "a number, or nothing"
        if fault is None:
            found, fault = _text.cast(found, np.dtype(np.float32))
            expected = "a number that float32 holds, or nothing"
        if fault is not None:
            row, place = (int(at[fault]) for at in np.nonzero(given))
            field = self.text[begin[row, place] : end[row, place]].tobytes()
            self._refuse(row, fields[place], _text.show(field), expected)
        if key == "label" and np.isnan(missing) and not given.all():
            # One NaN among the labels makes every parameter NaN.
            row = int(np.argmin(given[:, 0]))
            expected = "the label (missing= fills in)"
            self._refuse(row, fields[0], "nothing", expected)
        out = np.full(given.shape, missing, np.float32)
        out[given] = found
        return out

    def words(self, column: int) -> Words:
        """A column of categories."""
        field = self.fields.places["ids"][column]
        begin, end = self.begin[:, field], self.end[:, field]
        lengths = end - begin
        width = int(lengths.max(initial=0))
        if width > _MOST_BYTES:
            found = f"a category of {width} bytes"
            row = int(np.argmax(lengths))
            self._refuse(row, field, found, f"at most {_MOST_BYTES}")
        places = np.arange(width)
        at = np.minimum(begin[:, None] + places, len(self.text) - 1)
        text = np.where(places < lengths[:, None], self.text[at], np.uint8(0))
        return Words(text, lengths)

    def _refuse(self, row: int, field: int, found: str, expected: str) -> NoReturn:
        found = f"{found} in field {field + 1}"
        _text.refuse(self.path, self.lines[row], found, expected)


def read(path: Any, layout: Layout, progress: Any) -> Iterator[Table]:
    """The rows of a file, a block at a time."""
    separator = None if layout.separator == "auto" else layout.separator.encode()
    fields = None
    for text, line in _text.blocks(layout.call, path, progress):
        if separator is None or fields is None:
            rows = text.lstrip(b"\r\n")
            if not rows:
                continue
            line += text.count(b"\n", 0, len(text) - len(rows))
            first, _, rest = rows.partition(b"\n")
            if separator is None:
                separator = b"\t" if b"\t" in first else b","
            fields = layout.find(path, line, first.split(separator))
            text, line = (rest, line + 1) if layout.header else (rows, line)
        if text:
            yield _cut(path, layout, fields, text, line, separator)


def _cut(
    path: Any, layout: Layout, fields: Fields, text: bytes, line: int, separator: bytes
) -> Table:
    a = np.frombuffer(text, np.uint8)
    newlines = np.flatnonzero(a == _NEWLINE)
    cuts = np.flatnonzero((a == _NEWLINE) | (a == np.uint8(separator[0])))
    last = np.searchsorted(cuts, newlines)
    counts = np.diff(last, prepend=-1)
    before = np.concatenate([[-1], newlines])[:-1]
    # \r\n ends a line as well; \r is not part of the last field.
    returned = a[np.maximum(newlines - 1, 0)] == _RETURN
    returned &= newlines - 1 > before
    empty = newlines - returned - before == 1
    want = fields.num_fields
    wrong = (counts != want) & ~(empty & (counts == 1))
    if wrong.any():
        at = int(np.argmax(wrong))
        mark = {b"\t": "tabs", b",": "commas"}.get(separator, repr(separator.decode()))
        expected = f"{want} ({layout.describe()}) with {mark} between"
        _text.refuse(path, line + at, _count(counts[at]), expected)
    full = ~empty
    cuts_of = np.repeat(full, counts)
    shape = int(full.sum()), want
    end = cuts[cuts_of].reshape(shape)
    begin = np.concatenate([[-1], cuts])[:-1][cuts_of].reshape(shape) + 1
    end[:, -1] -= returned[full]
    return Table(path, fields, a, begin, end, line + np.flatnonzero(full))


def _count(fields: int) -> str:
    return f"{fields} field{'s' if fields > 1 else ''}"
