"""CSV reading with pyarrow: a block of lines as a table of columns.

pyarrow takes a fraction of the time of `_csv.py`, but it reads a slightly different
format: blanks around a field belong to it, a lone carriage return ends a line, text may
follow a closing quote, `nan(1)` is a number; and its errors do not name the line. So
`read` gives it only what both read alike. Everything else, and what pyarrow refuses, is
read by `_csv.py`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from sparsejax.data import _text
from sparsejax.data._arrow_words import ArrowWords, as_numpy
from sparsejax.data._text import Words


LEAST = 1 << 16  # bytes of a text; for less it does not pay to import pyarrow
_MOST_FIELDS = 1 << 12  # of a row, which all have names


class ArrowTable:
    """A block of lines; `_csv.Table` has the same methods.

    Args:
      used: the bytes of the text that are whole rows.
      places: as of `_csv.Fields`.
      columns: pyarrow's, by place: float64 or bytes.
      blank: the bytes to take off the ends of words.
      own: makes the `_csv.Table`, for what is not usual, and for errors.
    """

    def __init__(
        self,
        used: int,
        places: Mapping[str, tuple[int, ...]],
        columns: dict[int, Any],
        blank: bytes,
        own: Callable[[], Any],
    ):
        self.used = used
        self._places = places
        self._columns = columns
        self._blank = blank
        self._own = own

    @property
    def num_rows(self) -> int:
        return len(next(iter(self._columns.values())))

    def numbers(self, key: str, missing: float) -> np.ndarray:
        """The label or the numbers, float32 `[rows, fields]`."""
        places = self._places[key]
        out = np.full((self.num_rows, len(places)), missing, np.float32)
        for k, place in enumerate(places):
            column = self._columns[place].combine_chunks()
            filled = column.fill_null(float("nan")) if column.null_count else column
            numbers = as_numpy(filled, np.float64)
            found, fault = _text.cast(numbers, np.dtype(np.float32))
            given = np.isfinite(found)
            # A number that is infinite or NaN may be one that only pyarrow accepts.
            is_usual = given.sum() == len(column) - column.null_count
            is_whole = key != "label" or not np.isnan(missing) or not column.null_count
            if fault is not None or not is_usual or not is_whole:
                return self._own().numbers(key, missing)
            out[given, k] = found[given]
        return out

    def words(self, column: int) -> Iterator[Words | ArrowWords]:
        """A column of categories, some rows at a time."""
        chunks = self._columns[self._places["ids"][column]]
        words = ArrowWords(chunks.combine_chunks())
        words = words.trim(self._blank) if self._blank else words
        is_long = words.lengths().max(initial=0) > _text.MOST_BYTES
        return self._own().words(column) if is_long else iter([words])


def read(
    text: bytes,
    num_fields: int,
    places: Mapping[str, tuple[int, ...]],
    separator: bytes,
    quotes: bool,
    own: Callable[[bytes], Any],
) -> ArrowTable | None:
    """A text as a table, or None where pyarrow might read it in another way.

    Args:
      text: lines, each with its newline.
      num_fields: of a row.
      places: the fields of "label", "numbers" and "ids" to read.
      separator: one byte.
      quotes: whether fields may be in double quotes.
      own: makes the `_csv.Table` of a text.
    """
    ids = set(places["ids"])
    numbers = {x for key, fields in places.items() if key != "ids" for x in fields}
    if len(text) < LEAST or num_fields > _MOST_FIELDS or not ids or ids & numbers:
        return None
    csv = _pyarrow_csv()
    if csv is None:
        return None
    import pyarrow as pa

    quoted = quotes and b'"' in text
    used = _whole_rows(text, separator) if quoted else len(text)
    blank = bytes(c for c in _text.blanks(separator) if bytes([c]) in text)
    if (
        not used
        or text.startswith(_text.BYTE_ORDER_MARK)  # which pyarrow skips
        or b"\0" in text  # NumPy's words do not end in zeros
        or (b"\r" in text and text.count(b"\r") != text.count(b"\r\n"))
        # A line of blanks is empty, and "" is not.
        or (num_fields == 1 and (blank or quoted))
        or (quoted and blank and _has_blanks_beside(text, separator, blank))
    ):
        return None
    kinds = {x: pa.binary() for x in ids} | {x: pa.float64() for x in numbers}
    try:
        table = csv.read_csv(
            pa.py_buffer(text).slice(0, used),
            csv.ReadOptions(
                use_threads=False,
                block_size=used,
                column_names=list(map(str, range(num_fields))),
            ),
            csv.ParseOptions(
                delimiter=separator.decode("latin-1"),
                quote_char='"' if quoted else False,
                newlines_in_values=quoted,
            ),
            csv.ConvertOptions(
                include_columns=list(map(str, kinds)),
                column_types={str(x): kind for x, kind in kinds.items()},
                null_values=[""],
                strings_can_be_null=False,
                check_utf8=False,
            ),
        )
    except pa.ArrowException:
        return None  # the error that names the line is `own`'s
    if not table.num_rows:
        return None
    columns = {x: table[str(x)] for x in kinds}
    return ArrowTable(
        used,
        places,
        columns,
        b"" if quoted else blank,
        functools.partial(own, text[:used]),
    )


# ------------------------------------------------------------------ private


@functools.cache
def _pyarrow_csv() -> Any:
    try:
        from pyarrow import csv
    except ImportError:
        return None
    return csv


def _whole_rows(text: bytes, separator: bytes) -> int:
    """The bytes of a text with quotes that are whole rows.

    0 if a quote is at another place than around a field or doubled within.
    """
    a = np.frombuffer(text, np.uint8)
    marks = np.flatnonzero(a == _text.QUOTE)
    if not _text.are_around_fields(a, marks, separator):
        return 0
    if len(marks) % 2 == 0:
        return len(text)
    last = len(marks) - 1  # begins a field, or goes on after a doubled quote
    while last > 1 and marks[last] == marks[last - 1] + 1:
        last -= 2
    while True:
        end = text.rfind(b"\n", 0, int(marks[last])) + 1
        last = int(np.searchsorted(marks, end))
        if last % 2 == 0:
            return end
        last -= 1  # that newline is within quotes


def _has_blanks_beside(text: bytes, separator: bytes, blank: bytes) -> bool:
    """Whether a field that is not in quotes may begin or end with a blank.

    Quotes must be around fields, which may contain separators and newlines.
    """
    edges = [separator, b"\n", b"\r"]
    pairs = [(bytes([c]), edge) for c in blank for edge in edges]
    if not any(c + edge in text or edge + c in text for c, edge in pairs):
        return text[:1] in blank
    a = np.frombuffer(text, np.uint8)
    is_quote = (a == _text.QUOTE).view(np.uint8)
    is_outside = np.cumsum(is_quote, dtype=np.uint8) % 2 == 0  # the sum wraps
    is_cut = (a == separator[0]) | (a == _text.NEWLINE)
    cuts = np.flatnonzero(is_cut & is_outside)
    before = a[cuts - 1]
    before = np.where(before == _text.RETURN, a[cuts - 2], before)
    after = a[np.minimum(cuts + 1, len(a) - 1)]
    is_blank = np.zeros(256, bool)
    is_blank[list(blank)] = True
    return bool(is_blank[before].any() or is_blank[after].any() or is_blank[a[0]])
