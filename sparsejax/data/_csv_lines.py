"""Rows of a label, numbers and categories, with tabs or commas between: into arrays.

A block of lines is cut into its fields at once: where each begins and ends in the text.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from sparsejax.data import _numbers, _text_files
from sparsejax.data._csv_layout import Fields, Layout


_MOST_BYTES = 1024
_NEWLINE, _RETURN = np.uint8(ord("\n")), np.uint8(ord("\r"))


class Table(NamedTuple):
    """Lines that were cut into fields.

    Args:
      path: of the file.
      fields: what they are.
      text: uint8, the lines.
      begin, end: int64 `[rows, fields]`, places in `text`.
      lines: int64 `[rows]`, the line of the file each row is.
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
        found, fault = _numbers.read_floats(self.text, begin[given], end[given])
        expected = "a number, or nothing"
        if fault is None:
            found, fault = _numbers.cast(found, np.dtype(np.float32))
            expected = "a number that float32 holds, or nothing"
        if fault is not None:
            row, place = (int(at[fault]) for at in np.nonzero(given))
            field = fields[place]
            shown = _text_files.show(self._field(row, field))
            shown = f"{shown} in field {field + 1}"
            _text_files.refuse(self.path, self.lines[row], shown, expected)
        if key == "label" and np.isnan(missing) and not given.all():
            # One NaN among the labels, and all that is trained is NaN.
            line = self.lines[int(np.argmin(given[:, 0]))]
            shown = f"nothing in field {fields[0] + 1}"
            _text_files.refuse(self.path, line, shown, "the label (missing= fills in)")
        out = np.full(given.shape, missing, np.float32)
        out[given] = found
        return out

    def words(self, column: int) -> tuple[np.ndarray, np.ndarray]:
        """The column of categories as bytes: uint8 `[rows, L]`, lengths `[rows]`."""
        field = self.fields.places["ids"][column]
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
    fields = None
    for text, line in _text_files.blocks(layout.call, path, progress):
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
    # \r\n ends a line as well; \r is no part of its last field.
    returned = a[np.maximum(newlines - 1, 0)] == _RETURN
    returned &= newlines - 1 > before
    empty = newlines - returned - before == 1
    want = fields.num_fields
    wrong = (counts != want) & ~(empty & (counts == 1))
    if wrong.any():
        at = int(np.argmax(wrong))
        found = f"{counts[at]} field{'s' if counts[at] > 1 else ''}"
        mark = {b"\t": "tabs", b",": "commas"}.get(separator, repr(separator.decode()))
        expected = f"{want} ({layout.describe()}) with {mark} between"
        _text_files.refuse(path, line + at, found, expected)
    full = ~empty
    cuts_of = np.repeat(full, counts)
    shape = int(full.sum()), want
    end = cuts[cuts_of].reshape(shape)
    begin = np.concatenate([[-1], cuts])[:-1][cuts_of].reshape(shape) + 1
    end[:, -1] -= returned[full]
    return Table(path, fields, a, begin, end, line + np.flatnonzero(full))
