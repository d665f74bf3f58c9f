"""read_ids, iter_ids: labels, numbers and ids of words, from any source of columns.

`_sources.py` reads a source as batches of columns; a `HashIds` or a `Vocabulary` turns
words into ids.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax.data import _arrow, _sources
from sparsejax.data._hash_ids import HashIds
from sparsejax.data._selection import Selection, as_selection
from sparsejax.data._vocabulary import Vocabulary


def read_ids(
    source: str | os.PathLike[str] | Iterable[Any] | PyTree,
    encoder: HashIds | Vocabulary | int,
    columns: Mapping[str, Any] | None = None,
    *,
    missing: float = np.nan,
    separator: str = "auto",
    header: bool = False,
    quotes: bool = True,
) -> dict[str, np.ndarray]:
    r"""Reads labels, numbers and ids of words, for example of click logs or ratings.

    The source is a CSV or Parquet file, a data frame, an Arrow table or a dict of
    columns. The ids depend on the columns alone, not on the kind of source. pyarrow is
    needed.

    Words are strings, bytes or integers; spaces and tabs around the words of a CSV file
    are removed. Numbers are booleans, integers or floats. None, nulls, NaN and empty
    fields are missing values. Only the named columns are read.

    Args:
      source: one of these:
        a path, or a list of paths, of Parquet files and of CSV files; CSV files may be
        compressed by gzip, bzip2 or zstd;
        a data frame of pandas or polars, or a data set of Hugging Face;
        an Arrow table, or any object with `__arrow_c_stream__`, such as the reader that
        `pyarrow.csv.open_csv` returns for CSV files of other forms;
        a dict of columns, each a list or an array.
      encoder: turns words into ids: a `HashIds`, a `Vocabulary`, or an int as short for
        `HashIds(int)`. Missing words get id 0.
      columns: a dict with "ids" and optionally "label" (one column) and "numbers". A
        column is a str, its name, or an int, its position from 0. Names require that
        the first line of a CSV file has the names. If omitted, all columns are words.
      missing: replaces a missing number or label. With the default, NaN, a missing
        label is an error.
      separator: the separator of a CSV file, one character. "auto" is a tab if the
        first line has a tab, else a comma.
      header: True if a CSV file begins with names, and `columns` has only positions.
      quotes: True if fields of a CSV file may be in double quotes. A field in quotes
        may contain separators and newlines, and `""` in it is one quote.

    Returns:
      A dict of columns, for `ArrayDataset`: "ids" int32 `[n, C]`, and, if `columns` has
      them, "label" float32 `[n]` and "numbers" float32 `[n, N]`. The ids of column c
      are in `[0, encoder.sizes(C)[c])`.

    Raises:
      ImportError: pyarrow is not installed.
      TypeError: an argument or a column of words has the wrong type.
      ValueError: a column or a label is missing; a row has a wrong number of fields; a
        field of a column of numbers is not a number. The message names the file and the
        row.
      OSError: a file cannot be read, or is damaged.

    Example:
      >>> import os, tempfile, sparsejax as sj
      >>> path = os.path.join(tempfile.mkdtemp(), "ratings.csv")
      >>> with open(path, "w") as file:
      ...     _ = file.write("user,item,rating\nann,tea,5\nbob,tea,2\nann,jam,3\n")
      >>> columns = {"label": "rating", "ids": ["user", "item"]}
      >>> vocabulary = sj.data.Vocabulary.build(path, columns)
      >>> data = sj.data.read_ids(path, vocabulary, columns)
      >>> data["label"], data["ids"], vocabulary.sizes()
      (array([5., 2., 3.], dtype=float32), array([[1, 1],
             [2, 1],
             [1, 2]], dtype=int32), [3, 3])

    Click logs without names: a label, two numbers and a category, by position.

      >>> path = os.path.join(tempfile.mkdtemp(), "clicks.tsv")
      >>> with open(path, "w") as file:
      ...     _ = file.write("1\t5\t\t68fd1e64\n0\t-2\t7\t\n")
      >>> columns = {"label": 0, "numbers": [1, 2], "ids": [3]}
      >>> data = sj.data.read_ids(path, 1000, columns)
      >>> data["numbers"], data["ids"]
      (array([[ 5., nan],
             [-2.,  7.]], dtype=float32), array([[184],
             [  0]], dtype=int32))

    References:
      Criteo, Display Advertising Challenge (Kaggle, 2014): a label, 13 counts, 26
      categories: `{"label": 0, "numbers": range(1, 14), "ids": range(14, 40)}`.
    """
    call = "sparsejax.data.read_ids"
    selection = as_selection(call, columns)
    blocks = _blocks(selection, source, encoder, missing, separator, header, quotes)
    return _join(selection, list(blocks))


def iter_ids(
    source: str | os.PathLike[str] | Iterable[Any] | PyTree,
    encoder: HashIds | Vocabulary | int,
    columns: Mapping[str, Any] | None = None,
    *,
    chunk_rows: int = 65536,
    missing: float = np.nan,
    separator: str = "auto",
    header: bool = False,
    quotes: bool = True,
) -> Iterator[dict[str, np.ndarray]]:
    """Reads a source like `read_ids`, in chunks, for files larger than memory.

    Args:
      source, encoder, columns, missing: as in `read_ids`.
      chunk_rows: int, rows of a chunk; the last chunk may have fewer.
      separator, header, quotes: as in `read_ids`.

    Returns:
      Iterator over dicts like those of `read_ids`. `tqdm` shows its progress.

    Raises:
      ImportError, TypeError, ValueError, OSError: as `read_ids`; errors in a file are
        raised when the chunk is read.

    Example:
      >>> import sparsejax as sj
      >>> data = {"label": [1, 0, 1], "ad": ["a", "b", "c"]}
      >>> columns = {"label": "label", "ids": "ad"}
      >>> chunks = sj.data.iter_ids(data, 100, columns, chunk_rows=2)
      >>> [chunk["label"].tolist() for chunk in chunks]
      [[1.0, 0.0], [1.0]]
    """
    call = "sparsejax.data.iter_ids"
    selection = as_selection(call, columns)
    size = _arguments.static_int(call, "chunk_rows", chunk_rows, 1)
    blocks = _blocks(selection, source, encoder, missing, separator, header, quotes)
    return _chunks(selection, blocks, size)


# ------------------------------------------------------------------ private


def _blocks(
    selection: Selection,
    source: Any,
    encoder: Any,
    missing: Any,
    separator: Any,
    header: Any,
    quotes: Any,
) -> Iterator[dict[str, np.ndarray]]:
    """Checks the arguments, and returns an iterator over blocks of rows."""
    call = selection.call
    if isinstance(encoder, (int, np.integer)) and not isinstance(encoder, bool):
        encoder = HashIds(int(encoder))
    if not isinstance(encoder, (HashIds, Vocabulary)):
        raise _arguments.wrong_type(
            call,
            "encoder",
            "a HashIds, a Vocabulary, or an int for HashIds(int)",
            _arguments.show(encoder),
        )
    if selection.places is not None:
        encoder.sizes(len(selection.places["ids"]))  # raises if it has another number
    is_number = isinstance(missing, (int, float, np.integer, np.floating))
    if not is_number or isinstance(missing, bool):
        raise _arguments.wrong_type(
            call, "missing", "a number", _arguments.show(missing)
        )
    header = _arguments.check_bool(call, "header", header) or selection.needs_names
    text = _sources.check_text(call, separator, header, quotes)
    sources = _sources.check_source(call, source)
    _arrow.import_pyarrow(call)
    tables = _sources.open_tables(call, sources, text)
    return (
        block
        for table in tables
        for block in _encode(selection, table, encoder, float(missing))
    )


def _encode(
    selection: Selection,
    table: _sources.Table,
    encoder: HashIds | Vocabulary,
    missing: float,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the rows of a table, a batch at a time."""
    call, found = selection.call, selection.find(table)
    encoder.sizes(len(found["ids"]))
    names = selection.names(table)
    known = list(encoder.names)
    if known and names and known != names:
        kind = "vocabulary" if isinstance(encoder, Vocabulary) else "HashIds"
        raise ValueError(
            f"{call}: the {kind} is for the columns {known}, but the ids of "
            f"{table.name} are {names}, in this order. Use the names of the {kind} "
            "in columns=; or, if these are the same columns under other names, pass "
            "dataclasses.replace(encoder, names=())."
        )
    numbers = [*found.get("label", ()), *found.get("numbers", ())]
    first = 0
    for batch in table.read(found["ids"], numbers):
        num_rows = _num_rows(call, batch)
        columns = {}
        for key in ("label", "numbers"):
            if key in found:
                own = [
                    _numbers(call, table, name, batch[name], first, missing, key)
                    for name in found[key]
                ]
                columns[key] = np.stack(own, 1) if own else np.zeros((num_rows, 0))
        if "label" in columns:
            columns["label"] = columns["label"][:, 0]
        ids = np.zeros((num_rows, len(found["ids"])), np.int32)
        for place, name in enumerate(found["ids"]):
            column = _arrow.as_column(call, batch[name], table.describe(name))
            ids[:, place] = encoder._ids_of(place, column)
        columns["ids"] = ids
        yield columns
        first += num_rows


def _num_rows(call: str, batch: dict[str, Any]) -> int:
    sizes = {name: len(column) for name, column in batch.items()}
    first, *others = sizes
    for name in others:
        if sizes[name] != sizes[first]:
            raise ValueError(
                f"{call}: all columns must have the same number of rows, got "
                f"{sizes[name]} for {name!r} and {sizes[first]} for {first!r}."
            )
    return sizes[first]


def _numbers(
    call: str,
    table: _sources.Table,
    name: str,
    column: Any,
    first: int,
    missing: float,
    key: str,
) -> np.ndarray:
    """Returns a column, float32 `[n]`; warns if whole numbers are rounded."""
    floats = _arrow.as_floats(column)
    if floats is None:
        raise ValueError(
            f"{call}: {table.name} has {column.type} in the column {name!r}, expected "
            "numbers. Cast the column, or read it as one of the 'ids'."
        )
    with np.errstate(over="ignore", invalid="ignore"):
        out = floats.astype(np.float32)
    is_given = out == out
    is_lost = np.isinf(out) & np.isfinite(floats)
    if is_lost.any():
        row = int(np.argmax(is_lost))
        found, expected = f"{floats[row]:g}", "a number that float32 holds"
    elif key == "label" and np.isnan(missing) and not is_given.all():
        # One NaN among the labels makes every parameter NaN.
        row = int(np.argmin(is_given))
        found, expected = "nothing", "the label (missing= fills in)"
    else:
        is_rounded = (np.trunc(floats) == floats) & (out != floats)
        if key == "numbers" and (is_rounded & (np.abs(floats) < 2**53)).any():
            warnings.warn(
                f"{call}: float32 rounds whole numbers of the column {name!r} of "
                f"{table.name}. Of times, subtract the first one. To keep them, read "
                "the column with pyarrow.",
                stacklevel=2,
            )
        return np.where(is_given, out, np.float32(missing))
    raise ValueError(
        f"{call}: {table.name}, row {first + row} from 0: found {found} in the column "
        f"{name!r}, expected {expected}."
    )


def _join(
    selection: Selection, blocks: list[dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    if blocks:
        keys = blocks[0]
        return {key: np.concatenate([block[key] for block in blocks]) for key in keys}
    places = selection.places or {"ids": ()}
    none = {
        "label": np.zeros(0, np.float32),
        "numbers": np.zeros((0, len(places.get("numbers", ()))), np.float32),
        "ids": np.zeros((0, len(places["ids"])), np.int32),
    }
    return {key: none[key] for key in places}


def _chunks(
    selection: Selection, blocks: Iterator[dict[str, np.ndarray]], size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the rows of blocks in chunks of `size` rows."""
    waiting, count = [], 0
    for block in blocks:
        waiting.append(block)
        count += len(block["ids"])
        if count < size:
            continue
        rows = _join(selection, waiting)
        whole = count - count % size
        for start in range(0, whole, size):
            yield {name: x[start : start + size] for name, x in rows.items()}
        waiting = [{name: x[whole:] for name, x in rows.items()}]
        count -= whole
    if count:
        yield _join(selection, waiting)
