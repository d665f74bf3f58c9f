"""Parquet reading with pyarrow: labels, numbers and categories, some rows at a time.

pyarrow's own errors are not the same from file to file and from release to release. A
damaged file is an OSError here, and what is wrong with a column a ValueError.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sparsejax import _arguments
from sparsejax.data import _csv, _text, _words
from sparsejax.data._arrow_words import ArrowWords, as_numpy


_BATCH = 1 << 18  # rows
_MAGIC = b"PAR1"


def is_parquet(path: Any) -> bool:
    """Whether a file begins as Parquet does; text does not go on so."""
    with open(path, "rb") as file:
        return file.read(5) == _MAGIC + b"\x15"


class ParquetTable(NamedTuple):
    """Some rows of a file; `_csv.Table` has the same methods.

    Args:
      call: for messages.
      path: of the file.
      names: of the columns of "label", "numbers" and "ids".
      batch: pyarrow's RecordBatch.
      first: the number of its first row.
    """

    call: str
    path: Any
    names: dict[str, tuple[str, ...]]
    batch: Any
    first: int

    @property
    def num_rows(self) -> int:
        return self.batch.num_rows

    def numbers(self, key: str, missing: float) -> np.ndarray:
        """The label or the numbers, float32 `[rows, columns]`."""
        names = self.names[key]
        out = np.full((self.num_rows, len(names)), missing, np.float32)
        for k, name in enumerate(names):
            numbers = self._floats(name)
            found, fault = _text.cast(numbers, np.dtype(np.float32))
            if fault is not None:
                expected = "a number that float32 holds"
                self._refuse(fault, name, f"{numbers[fault]:g}", expected)
            given = found == found  # pyarrow's null is NaN by now
            if key == "label" and np.isnan(missing) and not given.all():
                expected = "the label (missing= fills in)"
                self._refuse(int(np.argmin(given)), name, "nothing", expected)
            out[given, k] = found[given]
        return out

    def words(self, column: int) -> Iterator[ArrowWords]:
        """A column of categories, some rows at a time."""
        import pyarrow as pa

        name = self.names["ids"][column]
        found, types = self.batch.column(name), pa.types
        if types.is_dictionary(found.type):
            found = found.dictionary_decode()
        kind = found.type
        if types.is_integer(kind):
            found, kind = found.cast(pa.string()), pa.string()
        is_text = types.is_string(kind) or types.is_binary(kind)
        if is_text or types.is_large_string(kind) or types.is_large_binary(kind):
            words = ArrowWords(found.cast(pa.binary()).fill_null(b""))
            lengths = words.lengths()
            if lengths.max(initial=0) > _text.MOST_BYTES:
                at = int(np.argmax(lengths))
                shown = f"a category of {lengths[at]} bytes"
                self._refuse(at, name, shown, f"at most {_text.MOST_BYTES}")
            if not np.any(words.spans()[0] == 0):
                yield words
                return
        where = f"column {name!r} of {os.fspath(self.path)}"
        one = _words.as_column(self.call, found, where)
        yield ArrowWords(pa.array(one.per_row(one.words).tolist(), pa.binary()))

    def _floats(self, name: str) -> np.ndarray:
        import pyarrow as pa

        column, types = self.batch.column(name), pa.types
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        kind = column.type
        tests = types.is_integer, types.is_floating, types.is_boolean
        if not any(test(kind) for test in (*tests, types.is_decimal, types.is_null)):
            raise ValueError(
                f"{self.call}: {os.fspath(self.path)} has {kind} in the column "
                f"{name!r}, expected numbers. Cast the column, or read it as one of "
                "the 'ids'."
            )
        numbers = column.cast(pa.float64(), safe=False)
        return as_numpy(numbers.fill_null(float("nan")), np.float64)

    def _refuse(self, row: int, name: str, found: str, expected: str) -> NoReturn:
        raise ValueError(
            f"{os.fspath(self.path)}, row {self.first + row} from 0: found {found} in "
            f"the column {name!r}, expected {expected}"
        )


def read(path: Any, layout: _csv.Layout, progress: Any) -> Iterator[ParquetTable]:
    """The rows of a file, some at a time.

    Args:
      path: of the file.
      layout: which columns are what, by name or by position.
      progress: as in `_arguments.progress_reporter`, of rows.
    """
    call = layout.call
    if layout.num_fields is not None:
        raise ValueError(
            f"{call}: {os.fspath(path)} is a Parquet file, whose columns have names. "
            "Say which to read, for example columns={'ids': ['user', 'item']}."
        )
    with open(path, "rb") as raw:
        if raw.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(
                f"{call}: {os.fspath(path)} is not a Parquet file. "
                "sparsejax.data.read_csv_ids reads text."
            )
        try:
            from pyarrow import parquet
        except ImportError:
            raise ImportError(
                f"{call}: reading Parquet needs pyarrow, which is not installed. Run "
                "pip install 'sparsejax[arrow]'."
            ) from None
        raw.seek(0)
        reporter = _arguments.progress_reporter(call, progress, needs_tqdm=True)
        with reporter as report:
            options: Any = dict(page_checksum_verification=True, pre_buffer=False)
            file = _guarded(call, path, lambda: parquet.ParquetFile(raw, **options))
            schema = _guarded(call, path, lambda: list(file.schema_arrow.names))
            names = {
                key: tuple(_find(path, schema, place) for place in places)
                for key, places in layout.places.items()
            }
            wanted = sorted({name for own in names.values() for name in own})
            batches = _guarded(
                call,
                path,
                lambda: file.iter_batches(_BATCH, columns=wanted, use_threads=False),
            )
            first = 0
            while True:
                batch = _guarded(call, path, lambda: _next_batch(batches))
                if batch is None:
                    return
                if batch.num_rows:
                    yield ParquetTable(call, path, names, batch, first)
                first += batch.num_rows
                report(first, file.metadata.num_rows)


def _next_batch(batches: Iterator[Any]) -> Any:
    """The next rows. Their numbers into a dictionary are not checked by pyarrow."""
    import pyarrow as pa

    batch = next(batches, None)
    for column in () if batch is None else batch.columns:
        if pa.types.is_dictionary(column.type):
            column.validate(full=True)
    return batch


def _guarded(call: str, path: Any, step: Callable[[], Any]) -> Any:
    """What pyarrow returns; any of its errors as an OSError."""
    try:
        return step()
    except Exception as e:
        reason = str(e).strip().partition("\n")[0] or type(e).__name__
        raise OSError(
            f"{call}: {os.fspath(path)} cannot be read ({reason}): it is damaged or "
            "incomplete."
        ) from None


def _find(path: Any, schema: list[str], place: Any) -> str:
    """The name of a column that is given by name or by position."""
    shown = _text.show(", ".join(schema).encode(), 200)
    if isinstance(place, str):
        if schema.count(place) != 1:
            raise ValueError(
                f"{os.fspath(path)}: found the columns {shown}, expected the name "
                f"{place!r} once, as in columns="
            )
        return place
    if place >= len(schema):
        raise ValueError(
            f"{os.fspath(path)}: found the columns {shown}, expected a column {place} "
            "(counting from 0), as in columns="
        )
    return schema[place]
