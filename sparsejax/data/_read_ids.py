"""read_csv_ids, read_parquet_ids: files of labels, numbers and categories as arrays.

`_csv.py` or `_parquet.py` reads a file as tables, a part at a time; a `HashIds` or a
`Vocabulary` turns categories into ids.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from sparsejax import _arguments
from sparsejax._arguments import Progress
from sparsejax._files import as_path
from sparsejax.data import _csv, _parquet
from sparsejax.data._hash_ids import HashIds
from sparsejax.data._vocabulary import Vocabulary


_READ = "sparsejax.data.read_csv_ids"
_ITERATE = "sparsejax.data.iter_csv_ids"
_READ_PARQUET = "sparsejax.data.read_parquet_ids"
_ITERATE_PARQUET = "sparsejax.data.iter_parquet_ids"


def read_csv_ids(
    path: str | os.PathLike[str],
    ids: HashIds | Vocabulary | int,
    *,
    num_numbers: int = _csv.NUM_NUMBERS,
    num_ids: int = _csv.NUM_IDS,
    label: bool = True,
    columns: Mapping[str, Any] | None = None,
    separator: str = "auto",
    header: bool = False,
    missing: float = np.nan,
    quotes: bool = True,
    progress: Progress = False,
) -> dict[str, np.ndarray]:
    """Reads rows of labels, numbers and categories, like click logs or ratings.

    The default is the order of Criteo's click logs: a label, numbers, categories. For
    other files, for example lines of user,item,rating, `columns` says which field is
    which.

    Fields are separated by a tab or a comma. Categories are any bytes, for example
    Criteo's hexadecimal words. Spaces and tabs around a field do not belong to it, nor
    do the double quotes around one that begins with a quote: such a field may contain
    separators and newlines, and `""` in it is one quote. An empty field is a missing
    value. Empty lines are skipped.

    Args:
      path: of a text file; gzip and bzip2 are recognized by their first bytes.
      ids: turns categories into ids: a `HashIds`, a `Vocabulary`, or an int as short
        for `HashIds(int)`. Missing categories get id 0.
      num_numbers: int, the number of numbers in a row.
      num_ids: int, the number of categories in a row.
      label: whether the first field is the label, a number.
      columns: the fields to read, instead of these three: a dict with "ids" and
        optionally "label" (one field) and "numbers". A field is an int, its position in
        a row from 0, or a str, its name in the first line, which is then a header.
        Other fields are not read.
      separator: one character, or several such as "::". "auto" is a tab if the first
        line has one, "::" if it is like MovieLens' `1::1193::5`, else a comma.
      header: whether the first line contains names and is not a row.
      missing: replaces a missing number or label. With the default, NaN, a missing
        label is an error.
      quotes: whether fields may be in double quotes. With False, a quote is a character
        like any other.
      progress: True for a progress bar on stderr, or a function of (bytes read, bytes
        of the file).

    Returns:
      A dict of columns, for `ArrayDataset`: "label" float32 `[n]` (if there is one),
      "numbers" float32 `[n, num_numbers]`, "ids" int32 `[n, num_ids]`; or those in
      `columns`. The ids of column c are in `[0, ids.sizes(num_ids)[c])`.

    Raises:
      TypeError: `ids`, `path` or another argument has the wrong type.
      ValueError: a row has a wrong number of fields, or a field is not a number as it
        should be; a quote is not closed, or text follows it; a line has more than 32
        MB. The message begins with file:line.
      OSError: the file cannot be read, or is damaged.

    Example:
      >>> import os, tempfile, sparsejax as sj
      >>> path = os.path.join(tempfile.mkdtemp(), "clicks.tsv")
      >>> with open(path, "w") as file:
      ...     _ = file.write("1\\t5\\t\\t68fd1e64\\n0\\t-2\\t7\\t\\n")
      >>> data = sj.data.read_csv_ids(path, 1000, num_numbers=2, num_ids=1)
      >>> data["numbers"], data["ids"]
      (array([[ 5., nan],
             [-2.,  7.]], dtype=float32), array([[184],
             [  0]], dtype=int32))

    Ratings, where each user and each item gets its own id:

      >>> path = os.path.join(tempfile.mkdtemp(), "ratings.csv")
      >>> with open(path, "w") as file:
      ...     _ = file.write("user,item,rating\\nann,tea,5\\nbob,tea,2\\nann,jam,3\\n")
      >>> columns = {"label": "rating", "ids": ["user", "item"]}
      >>> ids = sj.data.Vocabulary.build(path, columns=columns)
      >>> data = sj.data.read_csv_ids(path, ids, columns=columns)
      >>> data["label"], data["ids"], ids.sizes()
      (array([5., 2., 3.], dtype=float32), array([[1, 1],
             [2, 1],
             [1, 2]], dtype=int32), [3, 3])

    References:
      Criteo, Display Advertising Challenge (Kaggle, 2014): 13 counts, 26 categories.
    """
    layout = _csv.as_layout(
        _READ, num_numbers, num_ids, label, separator, header, columns, quotes
    )
    path = _check(layout, path, ids, missing)
    return _join(
        layout, _encode(_csv.read(path, layout, progress), ids, layout, missing)
    )


def iter_csv_ids(
    path: str | os.PathLike[str],
    ids: HashIds | Vocabulary | int,
    *,
    chunk_rows: int = 65536,
    num_numbers: int = _csv.NUM_NUMBERS,
    num_ids: int = _csv.NUM_IDS,
    label: bool = True,
    columns: Mapping[str, Any] | None = None,
    separator: str = "auto",
    header: bool = False,
    missing: float = np.nan,
    quotes: bool = True,
    progress: Progress = False,
) -> Iterator[dict[str, np.ndarray]]:
    """Reads a file like `read_csv_ids`, in chunks, for files larger than memory.

    Args:
      path, ids: as in `read_csv_ids`.
      chunk_rows: int, rows of a chunk; the last chunk may have fewer.
      num_numbers, num_ids, label, columns: as in `read_csv_ids`.
      separator, header, missing, quotes, progress: as in `read_csv_ids`.

    Returns:
      Iterator over dicts like those of `read_csv_ids`.

    Raises:
      TypeError, ValueError, OSError: as `read_csv_ids`; errors in the file are raised
        when the chunk is read.

    Example:
      >>> import os, tempfile, sparsejax as sj
      >>> path = os.path.join(tempfile.mkdtemp(), "clicks.csv")
      >>> with open(path, "w") as file:
      ...     _ = file.write("1,a\\n0,b\\n1,c\\n")
      >>> layout = dict(num_numbers=0, num_ids=1)
      >>> chunks = sj.data.iter_csv_ids(path, 100, chunk_rows=2, **layout)
      >>> [chunk["label"].tolist() for chunk in chunks]
      [[1.0, 0.0], [1.0]]
    """
    layout = _csv.as_layout(
        _ITERATE, num_numbers, num_ids, label, separator, header, columns, quotes
    )
    path = _check(layout, path, ids, missing)
    size = _arguments.static_int(_ITERATE, "chunk_rows", chunk_rows, 1)
    tables = _csv.read(path, layout, progress)
    return _chunks(layout, _encode(tables, ids, layout, missing), size)


def read_parquet_ids(
    path: str | os.PathLike[str],
    ids: HashIds | Vocabulary | int,
    *,
    columns: Mapping[str, Any],
    missing: float = np.nan,
    progress: Progress = False,
) -> dict[str, np.ndarray]:
    """Reads labels, numbers and categories of a Parquet file; needs pyarrow.

    Categories are strings, bytes or integers, and give the ids that they give as a CSV
    file or in `Vocabulary.from_columns`. Numbers may be booleans, integers or floats.
    Nulls and NaN are missing values. Only the columns that are named are read.

    Args:
      path: of a Parquet file.
      ids: as in `read_csv_ids`.
      columns: which column is what: a dict with "ids" and optionally "label" (one
        column) and "numbers", each by name, or by position from 0.
      missing: as in `read_csv_ids`.
      progress: True for a progress bar on stderr, or a function of (rows read, rows of
        the file).

    Returns:
      A dict of columns, as `read_csv_ids`.

    Raises:
      ImportError: pyarrow is not installed.
      TypeError: an argument has the wrong type.
      ValueError: a column is missing or of another type, a label is missing, or the
        file is not Parquet.
      OSError: the file cannot be read, or is damaged.

    Example:
      >>> import os, tempfile, pyarrow, pyarrow.parquet, sparsejax as sj
      >>> path = os.path.join(tempfile.mkdtemp(), "ratings.parquet")
      >>> table = {"user": [7, 8, 7], "item": ["tea", "tea", None], "rating": [5, 2, 3]}
      >>> pyarrow.parquet.write_table(pyarrow.table(table), path)
      >>> columns = {"label": "rating", "ids": ["user", "item"]}
      >>> ids = sj.data.Vocabulary.build(path, columns=columns)
      >>> data = sj.data.read_parquet_ids(path, ids, columns=columns)
      >>> data["label"], data["ids"]
      (array([5., 2., 3.], dtype=float32), array([[1, 1],
             [2, 1],
             [1, 0]], dtype=int32))
    """
    layout = _csv.as_layout(_READ_PARQUET, columns=columns or {})
    path = _check(layout, path, ids, missing)
    tables = _parquet.read(path, layout, progress)
    return _join(layout, _encode(tables, ids, layout, missing))


def iter_parquet_ids(
    path: str | os.PathLike[str],
    ids: HashIds | Vocabulary | int,
    *,
    columns: Mapping[str, Any],
    chunk_rows: int = 65536,
    missing: float = np.nan,
    progress: Progress = False,
) -> Iterator[dict[str, np.ndarray]]:
    """Reads a file like `read_parquet_ids`, in chunks, for files larger than memory.

    Args:
      path, ids, columns, missing, progress: as in `read_parquet_ids`.
      chunk_rows: int, rows of a chunk; the last chunk may have fewer.

    Returns:
      Iterator over dicts like those of `read_parquet_ids`.

    Raises:
      ImportError, TypeError, ValueError, OSError: as `read_parquet_ids`; errors in the
        file are raised when the chunk is read.

    Example:
      >>> import os, tempfile, pyarrow, pyarrow.parquet, sparsejax as sj
      >>> path = os.path.join(tempfile.mkdtemp(), "clicks.parquet")
      >>> pyarrow.parquet.write_table(pyarrow.table({"ad": [7, 8, 7]}), path)
      >>> chunks = sj.data.iter_parquet_ids(
      ...     path, 100, columns={"ids": "ad"}, chunk_rows=2
      ... )
      >>> [chunk["ids"].shape for chunk in chunks]
      [(2, 1), (1, 1)]
    """
    layout = _csv.as_layout(_ITERATE_PARQUET, columns=columns or {})
    path = _check(layout, path, ids, missing)
    size = _arguments.static_int(_ITERATE_PARQUET, "chunk_rows", chunk_rows, 1)
    tables = _parquet.read(path, layout, progress)
    return _chunks(layout, _encode(tables, ids, layout, missing), size)


# ------------------------------------------------------------------ private


def _check(layout: _csv.Layout, path: Any, ids: Any, missing: Any) -> Any:
    """The path; or an error, before the file is opened."""
    call = layout.call
    if _is_int(ids):
        HashIds(int(ids))
    elif not isinstance(ids, (HashIds, Vocabulary)):
        raise TypeError(
            f"{call}: ids must be a HashIds, a Vocabulary, or an int for HashIds(int), "
            f"got {ids!r}."
        )
    else:
        ids.sizes(layout.size("ids"))  # raises if it has another number of columns
    names = layout.names()
    known = list(ids.names) if isinstance(ids, Vocabulary) else []
    if known and names and known != names:
        raise ValueError(
            f"{call}: the vocabulary is for the columns {known}, but the ids in the "
            f"file are {names}, in this order. Use the names of the vocabulary in "
            "columns=; or, if these are the same columns under other names, pass "
            "dataclasses.replace(vocabulary, names=())."
        )
    number = isinstance(missing, (int, float, np.integer, np.floating))
    path = as_path(call, path)
    if not number or isinstance(missing, bool):
        raise TypeError(f"{call}: missing must be a number, got {missing!r}.")
    return path


def _is_int(ids: Any) -> bool:
    return isinstance(ids, (int, np.integer)) and not isinstance(ids, bool)


def _encode(
    tables: Iterator[Any], ids: Any, layout: _csv.Layout, missing: Any
) -> Iterator[dict[str, np.ndarray]]:
    """The columns of a file, a table at a time."""
    encoder: Any = HashIds(int(ids)) if _is_int(ids) else ids
    for table in tables:
        columns = {}
        if "label" in layout.places:
            columns["label"] = table.numbers("label", float(missing))[:, 0]
        if "numbers" in layout.places:
            columns["numbers"] = table.numbers("numbers", float(missing))
        out = np.zeros((table.num_rows, layout.size("ids")), np.int32)
        for column in range(layout.size("ids")):
            parts = [encoder.encode(column, words) for words in table.words(column)]
            out[:, column] = np.concatenate(parts)
        columns["ids"] = out
        yield columns


def _join(
    layout: _csv.Layout, blocks: Iterable[dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    blocks = list(blocks)
    none = {
        "label": np.zeros(0, np.float32),
        "numbers": np.zeros((0, layout.size("numbers")), np.float32),
        "ids": np.zeros((0, layout.size("ids")), np.int32),
    }
    return {
        name: np.concatenate([block[name] for block in blocks])
        if blocks
        else none[name]
        for name in layout.places
    }


def _chunks(
    layout: _csv.Layout, blocks: Iterator[dict[str, np.ndarray]], size: int
) -> Iterator[dict[str, np.ndarray]]:
    """`blocks`, split into chunks of `size` rows."""
    waiting, count = [], 0
    for block in blocks:
        waiting.append(block)
        count += len(block["ids"])
        if count < size:
            continue
        rows = _join(layout, waiting)
        whole = count - count % size
        for start in range(0, whole, size):
            yield {name: x[start : start + size] for name, x in rows.items()}
        waiting = [{name: x[whole:] for name, x in rows.items()}]
        count -= whole
    if count:
        yield _join(layout, waiting)
