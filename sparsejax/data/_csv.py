"""CSV reading: splits lines of a label, numbers and categories into fields.

A separator divides fields. Blanks around a field are not part of it. A field that
begins with a double quote ends at the next one, and may contain separators and
newlines; `""` in it is one quote (RFC 4180). A quote within a field that does not begin
with one is text.

A `Layout` says which fields are the label, numbers and categories: either a count of
each, in this order, or `columns` with the position or name of each. `read` splits a
block of lines at once: a `Table` knows where each field begins and ends in the text.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sparsejax import _arguments
from sparsejax.data import _csv_arrow, _text
from sparsejax.data._text import Words


NUM_NUMBERS, NUM_IDS = 13, 26  # of Criteo's files

_KEYS = ("label", "numbers", "ids")
_MOST_FIELDS = 1 << 20  # of a row
_NEWLINE, _RETURN, _QUOTE = _text.NEWLINE, _text.RETURN, _text.QUOTE


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
      quotes: whether a field may be in double quotes.
    """

    call: str
    places: dict[str, tuple[Any, ...]]
    num_fields: int | None
    separator: str
    header: bool
    quotes: bool

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
        found = {}
        for key, places in self.places.items():
            own = []
            for place in places:
                if isinstance(place, str):
                    if first.count(place.encode()) != 1:
                        _text.refuse(
                            path,
                            line,
                            f"the names {_text.show(b', '.join(first), 200)}",
                            f"the name {place!r} once, as in columns=",
                        )
                    place = first.index(place.encode())
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
    num_numbers: Any = NUM_NUMBERS,
    num_ids: Any = NUM_IDS,
    label: Any = True,
    separator: Any = "auto",
    header: Any = False,
    columns: Any = None,
    quotes: Any = True,
) -> Layout:
    """The arguments of a reader as a Layout."""
    numbers = _arguments.static_int(call, "num_numbers", num_numbers)
    ids = _arguments.static_int(call, "num_ids", num_ids)
    label = _arguments.check_bool(call, "label", label)
    header = _arguments.check_bool(call, "header", header)
    quotes = _arguments.check_bool(call, "quotes", quotes)
    if separator != "auto" and not _is_separator(separator):
        raise ValueError(
            f"{call}: separator must be 'auto' or one character (but no quote and no "
            "newline), or several that are neither letters nor digits, such as '::', "
            f"got {separator!r}."
        )
    if columns is not None:
        if (numbers, ids, label) != (NUM_NUMBERS, NUM_IDS, True):
            raise ValueError(
                f"{call}: columns already says which fields to read. Omit num_numbers, "
                "num_ids and label."
            )
        places = _as_places(call, columns)
        named = any(isinstance(p, str) for own in places.values() for p in own)
        return Layout(call, places, None, separator, header or named, quotes)
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
    return Layout(call, places, last, separator, header, quotes)


def _is_separator(found: Any) -> bool:
    if not isinstance(found, str) or any(c in found for c in '\r\n"'):
        return False
    return len(found.encode()) == 1 or bool(re.fullmatch(r"[^\w\s]+", found, re.ASCII))


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

    @property
    def num_rows(self) -> int:
        return len(self.lines)

    def words(self, column: int) -> Iterator[Words]:
        """A column of categories, some rows at a time."""
        field = self.fields.places["ids"][column]
        begin, end = self.begin[:, field], self.end[:, field]
        most = int((end - begin).max(initial=0))
        if most > _text.MOST_BYTES:
            found = f"a category of {most} bytes"
            row = int(np.argmax(end - begin))
            self._refuse(row, field, found, f"at most {_text.MOST_BYTES}")
        return _text.cut_words(self.text, begin, end)

    def _refuse(self, row: int, field: int, found: str, expected: str) -> NoReturn:
        found = f"{found} in field {field + 1}"
        _text.refuse(self.path, self.lines[row], found, expected)


class _Separator(NamedTuple):
    """What divides fields, and the one byte that does so in the text that is read."""

    given: bytes
    byte: bytes

    def back(self, text: bytes) -> bytes:
        """A part of the text as it is in the file."""
        return text.replace(self.byte, self.given) if self.byte != self.given else text

    def show(self) -> str:
        return {b"\t": "tabs", b",": "commas"}.get(
            self.given, repr(self.given.decode())
        )


def read(
    path: Any, layout: Layout, progress: Any, only_ids: bool = False
) -> Iterator["Table | _csv_arrow.ArrowTable"]:
    """The rows of a file, a block at a time.

    pyarrow reads a block where it is installed and all is usual; else, and for all
    errors, `_split` does. Both give the same.

    Args:
      path, progress: of a file, and as in `_text.opened`.
      layout: which fields are what.
      only_ids: whether numbers will not be asked for.
    """
    separator = None if layout.separator == "auto" else layout.separator.encode()
    fields, rest, line = None, b"", 1  # what is not a whole row yet, and where it is
    for block in _text.blocks(layout.call, path, progress):
        if separator is None:
            first = block.text.lstrip(b"\r\n").partition(b"\n")[0]
            if not first:
                line += _text.count_lines(block.text)
                continue
            separator = _find_separator(first)
        text, cut = _with_one_byte(path, rest + block.text, line, separator)
        table = None
        # In quotes the separator would have to be put back.
        if fields is not None and (cut.byte == cut.given or b'"' not in text):
            own = functools.partial(_read_table, path, layout, fields, cut, line)
            places = {"ids": fields.places["ids"]} if only_ids else fields.places
            table = _csv_arrow.read(
                text, fields.num_fields, places, cut.byte, layout.quotes, own
            )
        if table is not None:
            used = table.used
        else:
            rows, used = _split(path, text, line, cut, layout.quotes)
            if fields is None and len(rows.counts):
                fields = layout.find(path, int(rows.lines[0]), rows.first())
                rows = rows.without_first() if layout.header else rows
            if fields is not None and len(rows.counts):
                table = _table(path, layout, fields, rows, cut)
        line += _text.count_lines(text[:used])
        if len(text) - used > _text.MOST_LINE:
            _refuse_open_quote(path, line, text[used:], cut)
        rest = cut.back(text[used:])
        if table is not None:
            yield table
    if rest and separator is not None:
        text, cut = _with_one_byte(path, rest, line, separator)
        _refuse_open_quote(path, line, text, cut)


def _read_table(
    path: Any,
    layout: Layout,
    fields: Fields,
    separator: _Separator,
    line: int,
    text: bytes,
) -> Table:
    """A text of whole rows, without a header."""
    rows, _ = _split(path, text, line, separator, layout.quotes)
    return _table(path, layout, fields, rows, separator)


# MovieLens' files are 1::1193::5::978300760 in each line.
_MOVIELENS = re.compile(rb"[ \t]*\d+[ \t]*::.*::")


def _find_separator(first: bytes) -> bytes:
    """The separator of a file, by its first line."""
    if b"\t" in first:
        return b"\t"
    return b"::" if _MOVIELENS.match(first) else b","


# Of these some are in no text.
_CONTROLS = [bytes([c]) for c in range(31, 0, -1) if c not in b"\t\n\r"]


def _with_one_byte(
    path: Any, text: bytes, line: int, separator: bytes
) -> tuple[bytes, _Separator]:
    """A text in which a separator is one byte, and that byte."""
    if len(separator) == 1:
        return text, _Separator(separator, separator)
    byte = next((byte for byte in _CONTROLS if byte not in text), None)
    if byte is None:
        expected = f"text with {separator.decode()!r} between"
        _text.refuse(path, line, "all control characters near this line", expected)
    return text.replace(separator, byte), _Separator(separator, byte)


class _Rows(NamedTuple):
    """The fields of a block.

    Args:
      text: uint8; without quotes, it is the block.
      begin, end: int64 `[n]`, positions of all fields in it.
      counts: int64 `[r]`, the number of fields of each row.
      lines: int64 `[r]`, the line number of each row.
    """

    text: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    counts: np.ndarray
    lines: np.ndarray

    def first(self) -> list[bytes]:
        """The fields of the first row."""
        n = int(self.counts[0])
        spans = zip(self.begin[:n].tolist(), self.end[:n].tolist())
        return [self.text[begin:end].tobytes() for begin, end in spans]

    def without_first(self) -> "_Rows":
        """The other rows."""
        n = int(self.counts[0])
        return self._replace(
            begin=self.begin[n:],
            end=self.end[n:],
            counts=self.counts[1:],
            lines=self.lines[1:],
        )


def _split(
    path: Any, text: bytes, line: int, separator: _Separator, quotes: bool
) -> tuple[_Rows, int]:
    """The fields of a block, and how many bytes of it are whole rows."""
    a = np.frombuffer(text, np.uint8)
    is_newline = a == _NEWLINE
    is_cut = is_newline | (a == np.uint8(separator.byte[0]))
    marks = None
    if quotes and b'"' in text:
        marks = _marks(path, text, line, separator, a)
        inside = np.zeros(len(a), np.uint8)
        inside[marks] = 1
        # The sum wraps, which leaves it odd or even.
        is_cut &= np.cumsum(inside, dtype=np.uint8) % 2 == 0
    cuts = np.flatnonzero(is_cut)
    newlines = np.flatnonzero(is_cut & is_newline)
    last = np.searchsorted(cuts, newlines)
    used = int(newlines[-1]) + 1 if len(newlines) else 0
    cuts = cuts[: int(last[-1]) + 1 if len(last) else 0]
    counts = np.diff(last, prepend=-1)
    if counts.max(initial=0) > _MOST_FIELDS:
        at = line + text.count(b"\n", 0, int(newlines[np.argmax(counts)]))
        _text.refuse(path, at, _count(int(counts.max())), f"at most {_MOST_FIELDS}")
    start = np.concatenate([[-1], newlines])[:-1] + 1  # of rows
    begin, end = np.concatenate([[-1], cuts])[:-1] + 1, cuts.copy()
    # \r\n ends a line as well; \r is not part of the last field.
    returned = (a[np.maximum(newlines - 1, 0)] == _RETURN) & (newlines > start)
    end[last] -= returned
    blank = _text.blanks(separator.byte)
    if any(byte in text for byte in blank):
        begin, end = _text.trim(a, begin, end, blank)
    filled = (counts > 1) | (end[last] > begin[last])
    if marks is None:
        lines = np.arange(len(counts))
    else:
        a, begin, end = _unquoted(a, begin, end, marks, separator)
        lines = np.searchsorted(np.flatnonzero(is_newline), start)
    if not filled.all():  # empty lines
        kept = np.repeat(filled, counts)
        begin, end, counts, lines = (
            begin[kept],
            end[kept],
            counts[filled],
            lines[filled],
        )
    return _Rows(a, begin, end, counts, line + lines), used


def _table(
    path: Any, layout: Layout, fields: Fields, rows: _Rows, separator: _Separator
) -> Table:
    want = fields.num_fields
    wrong = rows.counts != want
    if wrong.any():
        at = int(np.argmax(wrong))
        expected = f"{want} ({layout.describe()}) with {separator.show()} between"
        _text.refuse(path, rows.lines[at], _count(rows.counts[at]), expected)
    shape = len(rows.counts), want
    begin, end = rows.begin.reshape(shape), rows.end.reshape(shape)
    return Table(path, fields, rows.text, begin, end, rows.lines)


def _count(fields: int) -> str:
    return f"{fields} field{'s' if fields > 1 else ''}"


# ------------------------------------------------------------------ quotes


def _marks(
    path: Any, text: bytes, line: int, separator: _Separator, a: np.ndarray
) -> np.ndarray:
    """The places of the quotes around fields and within these, ascending.

    The 1st, 3rd, ... begin a part of a field that may contain separators.
    """
    found = np.flatnonzero(a == _QUOTE)
    if _text.are_around_fields(a, found, separator.byte):
        return found
    return _find_marks(path, text, line, separator)


def _find_marks(path: Any, text: bytes, line: int, separator: _Separator) -> np.ndarray:
    """`_marks`, field by field, or an error that names the line."""
    own = re.escape(separator.byte)
    blanks = rb"[ \t]*".replace(separator.byte, b"")
    opening = re.compile(rb'(?:\A|(?<=[\n%b]))%b"' % (own, blanks))
    content = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')  # never less than all of it
    after = re.compile(rb"%b(?:%b|\r?\n)" % (blanks, own))
    quote, marks, at = re.compile(b'"'), [], 0
    while (begun := opening.search(text, at)) is not None:
        marks.append(begun.end() - 1)
        ended = content.match(text, begun.end())
        # Without an end, it goes on in the next block.
        at = len(text) if ended is None else ended.end()
        marks += [m.start() for m in quote.finditer(text, begun.end(), at)]
        if ended is not None and after.match(text, at) is None:
            stop = text.find(b"\n", at)
            _text.refuse(
                path,
                line + text.count(b"\n", 0, at),
                f"{_text.show(separator.back(text[at:stop]))} after a closing quote",
                f"{separator.given.decode()!r} or the end of the line ({_WAY_OUT})",
            )
    return np.array(marks, np.int64)


_WAY_OUT = "quotes=False reads quotes as text"


def _unquoted(
    a: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    marks: np.ndarray,
    separator: _Separator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The text and the fields without their quotes."""
    quoted = np.flatnonzero(
        (end > begin) & (a[np.minimum(begin, len(a) - 1)] == _QUOTE)
    )
    begin, end = begin.copy(), end.copy()
    inner = np.searchsorted(marks, end[quoted]) - np.searchsorted(marks, begin[quoted])
    begin[quoted] += 1
    end[quoted] -= 1
    # With doubled quotes, or separators that are not what they were: written anew.
    changed = inner > 2
    if separator.byte != separator.given:
        places = np.flatnonzero(a == np.uint8(separator.byte[0]))
        first = np.searchsorted(places, begin[quoted])
        changed |= first < np.searchsorted(places, end[quoted])
    parts, size = [a], len(a)
    for field in quoted[changed].tolist():
        content = a[begin[field] : end[field]].tobytes().replace(b'""', b'"')
        content = separator.back(content)
        parts.append(np.frombuffer(content, np.uint8))
        begin[field], end[field] = size, size + len(content)
        size += len(content)
    return np.concatenate(parts) if len(parts) > 1 else a, begin, end


def _refuse_open_quote(
    path: Any, line: int, rest: bytes, separator: _Separator
) -> NoReturn:
    """Raises the error for a quote that is not closed in the rest of a file."""
    marks = _find_marks(path, rest, line, separator)
    # The last one that begins a part of a field.
    at = int(marks[0::2][-1]) if len(marks) else 0
    line += rest.count(b"\n", 0, at)
    _text.refuse(path, line, "a quote that is not closed", f"another one ({_WAY_OUT})")
