"""Rows of a label, numbers and categories, with tabs or commas between: into arrays.

A block of lines is cut into its fields at once: where each begins and ends in the text.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from sparsejax.data import _arguments, _numbers, _text_files


_SEPARATOR = "{call}: separator must be 'auto' or one character, got {found!r}."
_NO_FIELDS = "{call}: a row must have at least one number, category or label."
_MOST_BYTES = 1024
_NEWLINE, _RETURN = np.uint8(ord("\n")), np.uint8(ord("\r"))


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a row of the file has: [label,] numbers, categories."""

    call: str
    num_numbers: int
    num_ids: int
    label: bool
    separator: str
    header: bool

    def __post_init__(self):
        for name in ("num_numbers", "num_ids"):
            _arguments.as_int(name, getattr(self, name), 0, self.call)
        for name in ("label", "header"):
            _arguments.as_bool(name, getattr(self, name), self.call)
        one = isinstance(self.separator, str) and len(self.separator.encode()) == 1
        if self.separator != "auto" and not one:
            raise ValueError(_SEPARATOR.format(call=self.call, found=self.separator))
        if not self.num_fields:
            raise ValueError(_NO_FIELDS.format(call=self.call))

    @property
    def first(self) -> int:
        """The field where the numbers begin."""
        return 1 if self.label else 0

    @property
    def num_fields(self) -> int:
        """Fields of a row."""
        return self.first + self.num_numbers + self.num_ids

    def describe(self) -> str:
        """What a row is made of, for messages."""
        parts = ["label"] if self.label else []
        parts += [f"{self.num_numbers} numbers"] if self.num_numbers else []
        parts += [f"{self.num_ids} categories"] if self.num_ids else []
        return ", ".join(parts)


class Table(NamedTuple):
    """Lines that were cut into fields.

    Args:
      path: of the file.
      layout: what the fields are.
      text: uint8, the lines.
      begin, end: int64 `[rows, fields]`, places in `text`.
      lines: int64 `[rows]`, the line of the file each row is.
    """

    path: Any
    layout: Layout
    text: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    lines: np.ndarray

    def numbers(self, fields: slice, missing: float) -> np.ndarray:
        """The fields as numbers, float32 `[rows, fields]`."""
        begin, end = self.begin[:, fields], self.end[:, fields]
        given = end > begin
        found, fault = _numbers.read_floats(self.text, begin[given], end[given])
        if fault is not None:
            row, field = (int(at[fault]) for at in np.nonzero(given))
            field += fields.start
            shown = _text_files.show(self._field(row, field))
            shown = f"{shown} in field {field + 1}"
            _text_files.refuse(
                self.path, self.lines[row], shown, "a number, or nothing"
            )
        out = np.full(given.shape, missing, np.float32)
        out[given] = found
        return out

    def words(self, column: int) -> tuple[np.ndarray, np.ndarray]:
        """The column of categories as bytes: uint8 `[rows, L]`, lengths `[rows]`."""
        field = self.layout.first + self.layout.num_numbers + column
        begin, lengths = self.begin[:, field], self.end[:, field]
        lengths = lengths - begin
        width = int(lengths.max(initial=0))
        if width > _MOST_BYTES:
            row = int(np.argmax(lengths))
            shown = f"a category of {width} bytes in field {field + 1}"
            expected = f"at most {_MOST_BYTES}"
            _text_files.refuse(self.path, self.lines[row], shown, expected)
        places = np.arange(width)
        at = np.minimum(begin[:, None] + places, len(self.text) - 1)
        return np.where(places < lengths[:, None], self.text[at], np.uint8(0)), lengths

    def _field(self, row: int, field: int) -> bytes:
        return self.text[self.begin[row, field] : self.end[row, field]].tobytes()


def read(path: Any, layout: Layout, progress: bool) -> Iterator[Table]:
    """The rows of a file, a block at a time."""
    separator = None if layout.separator == "auto" else layout.separator.encode()
    for block in _text_files.blocks(layout.call, path, progress):
        text, line = block
        if separator is None:
            first = text.lstrip(b"\r\n").partition(b"\n")[0]
            separator = b"\t" if b"\t" in first else b","
        if layout.header and line == 1:
            text, line = text[text.index(b"\n") + 1 :], 2
        yield _cut(path, layout, text, line, separator)


def _cut(path: Any, layout: Layout, text: bytes, line: int, separator: bytes) -> Table:
    a = np.frombuffer(text, np.uint8)
    newlines = np.flatnonzero(a == _NEWLINE)
    cuts = np.flatnonzero((a == _NEWLINE) | (a == np.uint8(separator[0])))
    last = np.searchsorted(cuts, newlines)
    fields = np.diff(last, prepend=-1)
    before = np.concatenate([[-1], newlines])[:-1]
    # \r\n ends a line as well; \r is no part of its last field.
    returned = a[np.maximum(newlines - 1, 0)] == _RETURN
    returned &= newlines - 1 > before
    empty = newlines - returned - before == 1
    wrong = (fields != layout.num_fields) & ~(empty & (fields == 1))
    if layout.num_fields > 1 and wrong.any():
        at = int(np.argmax(wrong))
        found = f"{fields[at]} field{'s' if fields[at] > 1 else ''}"
        mark = {b"\t": "tabs", b",": "commas"}.get(separator, repr(separator.decode()))
        expected = f"{layout.num_fields} ({layout.describe()}) with {mark} between"
        _text_files.refuse(path, line + at, found, expected)
    full = ~empty
    cuts_of = np.repeat(full, fields)
    shape = int(full.sum()), layout.num_fields
    end = cuts[cuts_of].reshape(shape)
    begin = np.concatenate([[-1], cuts])[:-1][cuts_of].reshape(shape) + 1
    end[:, -1] -= returned[full]
    return Table(path, layout, a, begin, end, line + np.flatnonzero(full))
