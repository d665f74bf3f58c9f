"""Files of labels, numbers and categories, which become ids: clicks, ratings."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sparsejax._files import as_path
from sparsejax.data import _checks, _csv_layout, _csv_lines, _encoders


_READ = "sparsejax.data.read_csv_ids"
_ITERATE = "sparsejax.data.iter_csv_ids"


def read_csv_ids(
    path: str | os.PathLike[str],
    ids: Any,
    *,
    num_numbers: int = _csv_layout.NUM_NUMBERS,
    num_ids: int = _csv_layout.NUM_IDS,
    label: bool = True,
    columns: Mapping[str, Any] | None = None,
    separator: str = "auto",
    header: bool = False,
    missing: float = np.nan,
    progress: bool = False,
) -> dict[str, np.ndarray]:
    """Reads rows of labels, numbers and categories: click logs, ratings.

    The fields are those of Criteo's click logs, in their order: a label, numbers,
    categories. For a file of another order, as one of user,item,rating, `columns` says
    which field is what.

    Fields have a tab or a comma between them, and nothing is quoted. Categories are any
    bytes, as the hexadecimal words of Criteo. An empty field is a missing one. Empty
    lines are skipped.

    Args:
      path: of a text file; compressed by gzip or bzip2 is seen by itself.
      ids: what makes ids of categories: a `HashIds`, a `Vocabulary`, or an int, which
        stands for `HashIds(int)`. Missing categories get id 0.
      num_numbers: int, numbers of a row.
      num_ids: int, categories of a row.
      label: whether a number comes first that is the label.
      columns: where the fields are, instead of these three: a dict of "ids" and, if
        there are such, of "label" (one field) and "numbers". A field is an int, its
        place in a row from 0, or a str, its name in the first line, which then is a
        header. Fields that are not in it are not read.
      separator: one character; "auto" is a tab if the first line has one, else a comma.
      header: whether the first line is names, no row.
      missing: number for a missing number or label. With NaN, as it is, a missing label
        is an error.
      progress: whether a bar says how far it is.

    Returns:
      A dict of columns, for `ArrayDataset`: "label" float32 `[n]` (if there is one),
      "numbers" float32 `[n, num_numbers]`, "ids" int32 `[n, num_ids]`; or those that
      `columns` has. The ids of column c are in `[0, ids.sizes(num_ids)[c])`.

    Raises:
      TypeError: `ids`, `path` or another argument is none of these.
      ValueError: a row has other fields, or what should be a number is none: the
        message begins with file:line.
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

    Ratings, with an id of its own for each user and each item:

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
    layout = _csv_layout.as_layout(
        _READ, num_numbers, num_ids, label, separator, header, columns
    )
    encoder = _as_encoder(_READ, ids, layout)
    path, missing = as_path(_READ, path), _as_missing(_READ, missing)
    return _join(layout, list(_encoded(path, layout, encoder, missing, progress)))


def iter_csv_ids(
    path: str | os.PathLike[str],
    ids: Any,
    *,
    chunk_rows: int = 65536,
    num_numbers: int = _csv_layout.NUM_NUMBERS,
    num_ids: int = _csv_layout.NUM_IDS,
    label: bool = True,
    columns: Mapping[str, Any] | None = None,
    separator: str = "auto",
    header: bool = False,
    missing: float = np.nan,
    progress: bool = False,
) -> Iterator[dict[str, np.ndarray]]:
    """The same, a part at a time: for files that memory cannot hold.

    Args:
      path, ids: as of `read_csv_ids`.
      chunk_rows: int, rows of a part; the last one may have fewer.
      num_numbers, num_ids, label, columns, separator, header, missing, progress: as
        there.

    Returns:
      Iterator over dicts as `read_csv_ids` gives them.

    Raises:
      TypeError, ValueError, OSError: as `read_csv_ids`; for what is in the file, when
        its part is asked for.

    Example:
      >>> import os, tempfile, sparsejax as sj
      >>> path = os.path.join(tempfile.mkdtemp(), "clicks.csv")
      >>> with open(path, "w") as file:
      ...     _ = file.write("1,a\\n0,b\\n1,c\\n")
      >>> layout = dict(num_numbers=0, num_ids=1)
      >>> parts = sj.data.iter_csv_ids(path, 100, chunk_rows=2, **layout)
      >>> [part["label"].tolist() for part in parts]
      [[1.0, 0.0], [1.0]]
    """
    layout = _csv_layout.as_layout(
        _ITERATE, num_numbers, num_ids, label, separator, header, columns
    )
    encoder = _as_encoder(_ITERATE, ids, layout)
    path, missing = as_path(_ITERATE, path), _as_missing(_ITERATE, missing)
    size = _checks.as_int("chunk_rows", chunk_rows, 1, _ITERATE)
    return _chunks(layout, _encoded(path, layout, encoder, missing, progress), size)


# ------------------------------------------------------------------ private


def _as_missing(call: str, missing: Any) -> float:
    number = isinstance(missing, (int, float, np.integer, np.floating))
    if not number or isinstance(missing, bool):
        raise TypeError(f"{call}: missing must be a number, got {missing!r}.")
    return float(missing)


def _as_encoder(call: str, ids: Any, layout: _csv_layout.Layout) -> Any:
    num_ids = layout.size("ids")
    if isinstance(ids, (int, np.integer)) and not isinstance(ids, bool):
        ids = _encoders.HashIds(int(ids))
    if not isinstance(ids, (_encoders.HashIds, _encoders.Vocabulary)):
        raise TypeError(
            f"{call}: ids must be a HashIds, a Vocabulary, or an int for HashIds(int), "
            f"got {ids!r}."
        )
    ids.sizes(num_ids)  # an error where it is of another number of columns
    if isinstance(ids, _encoders.Vocabulary):
        _encoders.check_names(call, ids.names, layout.names())
    return ids


def _encoded(
    path: Any, layout: _csv_layout.Layout, encoder: Any, missing: float, progress: bool
) -> Iterator[dict[str, np.ndarray]]:
    for table in _csv_lines.read(path, layout, progress):
        part = {}
        if "label" in layout.places:
            part["label"] = table.numbers("label", missing)[:, 0]
        if "numbers" in layout.places:
            part["numbers"] = table.numbers("numbers", missing)
        ids = np.zeros((len(table.lines), layout.size("ids")), np.int32)
        for column in range(layout.size("ids")):
            words = _encoders.Words(*table.words(column))
            ids[:, column] = encoder.encode(column, words)
        part["ids"] = ids
        yield part


def _join(
    layout: _csv_layout.Layout, parts: list[dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    none = {
        "label": np.zeros(0, np.float32),
        "numbers": np.zeros((0, layout.size("numbers")), np.float32),
        "ids": np.zeros((0, layout.size("ids")), np.int32),
    }
    return {
        name: np.concatenate([part[name] for part in parts]) if parts else none[name]
        for name in layout.places
    }


def _chunks(
    layout: _csv_layout.Layout, parts: Iterator[dict[str, np.ndarray]], size: int
) -> Iterator[dict[str, np.ndarray]]:
    """`parts`, cut anew into `size` rows."""
    waiting, count = [], 0
    for part in parts:
        waiting.append(part)
        count += len(part["ids"])
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
