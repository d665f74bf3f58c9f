"""Sources of columns, read some rows at a time: CSV, Parquet, streams, data frames.

`open_tables` yields one `Table` for each file, or one for the data in memory. A table
has the names of its columns, and reads batches: dicts of pyarrow arrays. The errors of
pyarrow differ from file to file and from release to release. Here a malformed row is a
ValueError, and a damaged file an OSError.
"""

import contextlib
import csv
import io
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sparsejax import _arguments, _progress
from sparsejax.data import _arrow


# Bytes of a CSV file that are parsed at once. A row must fit into one block. pyarrow
# reads 32 blocks ahead.
BLOCK = 4 << 20
_BATCH_ROWS = 1 << 18  # of a Parquet file
_MAX_HEADER = 1 << 20  # bytes
_PARQUET = b"PAR1\x15"  # a text file may begin with "PAR1"
# Compressed files are recognized by their first bytes, because names may lack the
# suffix.
_CODECS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}

_IN_MEMORY = "the source"

# A function of the number of bytes of a file that were read.
Report = Callable[[int], Any]


class Text(NamedTuple):
    """The format of a CSV file, see `read_ids`."""

    separator: str = "auto"
    header: bool = False
    quotes: bool = True


class Table(NamedTuple):
    """Columns that are read some rows at a time.

    Args:
      name: the path of a file, or `_IN_MEMORY`, for messages.
      columns: the names of all columns.
      read: a function of the columns of words and the columns of numbers to read, which
        returns an iterator over batches, each a dict of pyarrow arrays.
    """

    name: str
    columns: list[str]
    read: Callable[[Collection[str], Collection[str]], Iterator[dict[str, Any]]]

    def describe(self, column: str) -> str:
        """Returns the name of a column for messages."""
        return f"column {column!r}" + f" of {self.name}" * (self.name != _IN_MEMORY)


def check_text(call: str, separator: Any, header: Any, quotes: Any) -> Text:
    """Checks the arguments that say how CSV files are read."""
    header = _arguments.check_bool(call, "header", header)
    quotes = _arguments.check_bool(call, "quotes", quotes)
    is_one = isinstance(separator, str) and len(separator.encode()) == 1
    if separator != "auto" and (not is_one or separator in '\r\n"'):
        raise _arguments.wrong(
            call,
            "separator",
            "'auto' or one ASCII character (but no quote and no newline)",
            repr(separator),
            "A file with '::' between fields has separator=':' and an empty column "
            "between each two.",
        )
    return Text(separator, header, quotes)


def check_source(call: str, source: Any) -> list[Any]:
    """Returns paths, or a list of one table; or raises a TypeError."""
    if isinstance(source, (str, bytes, os.PathLike)):
        return [os.fsdecode(source)]
    is_paths = isinstance(source, (list, tuple)) and bool(source)
    if is_paths and all(isinstance(x, (str, bytes, os.PathLike)) for x in source):
        return [os.fsdecode(path) for path in source]
    if isinstance(source, Mapping) or _arrow.is_table(source):
        return [source]
    is_lazy = hasattr(type(source), "collect")
    example = "'ratings.csv', {'user': users, 'item': items}, or df[['user', 'item']]"
    raise _arguments.wrong_type(
        call,
        "source",
        "a path, a list of paths, a dict of columns, a data frame or an Arrow table",
        _arguments.kind_of(source),
        f"Pass for example {'df.collect()' if is_lazy else example}.",
    )


def open_tables(
    call: str, sources: Iterable[Any], text: Text, progress: Any = False
) -> Iterator[Table]:
    """Yields the table of each source, see `check_source`.

    Args:
      call: for messages.
      sources: paths, or one table in memory.
      text: the format of CSV files.
      progress: as in `_progress.progress_reporter`, of the bytes of all files.
    """
    _arrow.import_pyarrow(call)
    sources = list(sources)
    paths = [x for x in sources if isinstance(x, str)]
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"{call}: there is no file {path!r}. Pass words as a dict of columns, "
                "{'word': [...]}."
            )
    total, done = sum(map(os.path.getsize, paths)), 0
    reporter = _progress.progress_reporter(call, progress, "B", needs_tqdm=True)
    with reporter as report:
        for source in sources:
            if not isinstance(source, str):
                yield _table_in_memory(call, source)
                continue
            before = done
            tell = lambda n, before=before: report(before + n, total)
            make = _parquet_table if _is_parquet(source) else _csv_table
            yield make(call, source, text, tell)
            done += os.path.getsize(source)
            tell(done - before)


# ------------------------------------------------------------------ in memory


def columns_of(call: str, data: Any) -> dict[str, Any]:
    """Returns the columns of a dict, a data frame or an Arrow table by name."""
    if isinstance(data, Mapping):
        found = dict(data)
    elif _is_stream(data):
        table = _arrow.import_pyarrow(call).table(data)
        found = _by_name(call, table.column_names, table.columns)
    else:  # pandas, Hugging Face datasets
        names = getattr(data, "column_names", None)
        names = list(data.columns if names is None else names)
        _by_name(call, names, names)
        found = {name: data[name] for name in names}
    if not found:
        raise ValueError(f"{call}: there must be at least one column.")
    for name in found:
        if not isinstance(name, str):
            raise TypeError(
                f"{call}: names of columns must be strings, got {name!r}. Rename the "
                "columns."
            )
    return found


def _is_stream(data: Any) -> bool:
    # The stream of pandas converts all columns, and has the index as a column.
    return hasattr(data, "__arrow_c_stream__") and not hasattr(data, "iloc")


def _by_name(call: str, names: list[Any], columns: Any) -> dict[Any, Any]:
    if len(set(names)) < len(names):
        raise ValueError(f"{call}: the names of columns must differ, got {names}.")
    return dict(zip(names, columns))


def _table_in_memory(call: str, data: Any) -> Table:
    if isinstance(data, Mapping) or not _is_stream(data):
        found = columns_of(call, data)

        def read(words: Collection[str], numbers: Collection[str]) -> Iterator[Any]:
            wanted = dict.fromkeys([*words, *numbers])
            yield {n: _arrow.as_array(call, found[n], f"column {n!r}") for n in wanted}

        return Table(_IN_MEMORY, list(found), read)

    # A stream may be larger than memory, so only one batch of it is held.
    batches = _arrow.import_pyarrow(call).RecordBatchReader.from_stream(data)
    names = list(batches.schema.names)
    _by_name(call, names, names)

    def stream(words: Collection[str], numbers: Collection[str]) -> Iterator[Any]:
        wanted = dict.fromkeys([*words, *numbers])
        next_batch = batches.read_next_batch
        while (batch := _guarded(call, _IN_MEMORY, next_batch)) is not None:
            if batch.num_rows:
                yield {name: batch.column(name) for name in wanted}

    return Table(_IN_MEMORY, names, stream)


# ------------------------------------------------------------------ CSV


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[Any, Any]]:
    """Yields a file, and the stream of its uncompressed bytes."""
    import pyarrow as pa

    with open(path, "rb") as file:
        magic = file.read(4)
    codec = next((c for start, c in _CODECS.items() if magic.startswith(start)), None)
    with pa.OSFile(path) as raw:
        yield raw, pa.CompressedInputStream(raw, codec) if codec else raw


class _WholeLineEnds(io.RawIOBase):
    r"""A stream whose reads never end between "\r" and "\n".

    pyarrow takes a "\n" at the start of a block for the rest of a line end, and drops
    it, also inside quotes. So a text that has "\r\n" there would become another word.

    pyarrow reads ahead in a thread of its own. `stop` ends the stream early: a thread
    that still reads when Python exits would abort the process.
    """

    def __init__(self, stream: Any):
        super().__init__()
        self._stream = stream
        self._held = b""
        self._reading = threading.Lock()
        self._ended = threading.Event()
        self._is_stopped = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        with self._reading:
            found = b"" if self._is_stopped else self._next(size)
            if not found:
                self._ended.set()
            return found

    def stop(self) -> None:
        """Ends the stream, and waits until the thread has seen its end."""
        with self._reading:
            self._is_stopped = True
        self._ended.wait(0.1)  # a thread whose queue is full reads no more

    def _next(self, size: int) -> bytes:
        found = self._held + self._stream.read(max(size - len(self._held), 1))
        is_cut = len(found) > 1 and found.endswith(b"\r")
        self._held = found[-1:] if is_cut else b""
        return found[:-1] if is_cut else found


def _csv_table(call: str, path: str, text: Text, report: Report) -> Table:
    def first_bytes() -> bytes:
        with _opened(path) as (_, stream):
            return stream.read(_MAX_HEADER)

    names, separator = _first_row(_guarded(call, path, first_bytes), text)
    if not text.header:
        names = [f"f{k}" for k in range(len(names))]  # as pyarrow names them

    def read(words: Collection[str], numbers: Collection[str]) -> Iterator[Any]:
        if not names:
            return
        import pyarrow as pa
        import pyarrow.csv as arrow_csv

        kinds = dict.fromkeys(words, pa.binary()) | dict.fromkeys(numbers, pa.float64())
        with _opened(path) as (raw, stream), contextlib.ExitStack() as stack:
            if text.quotes:
                stream = _WholeLineEnds(stream)
                stack.callback(stream.stop)
            batches = _guarded(
                call,
                path,
                lambda: arrow_csv.open_csv(
                    stream,
                    arrow_csv.ReadOptions(
                        use_threads=False,  # else errors lack the row number
                        block_size=BLOCK,
                        autogenerate_column_names=not text.header,
                    ),
                    arrow_csv.ParseOptions(
                        delimiter=separator,
                        quote_char='"' if text.quotes else False,
                        newlines_in_values=text.quotes,
                    ),
                    arrow_csv.ConvertOptions(
                        include_columns=list(kinds),
                        column_types=kinds,
                        null_values=[""],
                        strings_can_be_null=False,
                        check_utf8=False,
                    ),
                ),
            )
            while (batch := _guarded(call, path, batches.read_next_batch)) is not None:
                report(raw.tell())
                found = {name: batch.column(name) for name in kinds}
                for name in set(words) - set(numbers):
                    found[name] = _trimmed(found[name])
                yield found

    return Table(path, names, read)


def _first_row(content: bytes, text: Text) -> tuple[list[str], str]:
    """Returns the fields of the first row of a CSV file, and the separator."""
    lines = content.decode("utf-8-sig", "replace").lstrip("\r\n")
    first = lines.splitlines()[0] if lines else ""
    separator = text.separator
    if separator == "auto":
        separator = "\t" if "\t" in first else ","
    quoting = csv.QUOTE_MINIMAL if text.quotes else csv.QUOTE_NONE
    rows = csv.reader(io.StringIO(lines), delimiter=separator, quoting=quoting)
    try:
        return next(iter(rows), []), separator
    except csv.Error:  # a field of more than 128 kB
        return first.split(separator), separator


def _trimmed(words: Any) -> Any:
    """Returns a column of words without the blanks around them, in a dictionary.

    Otherwise "bob" of a line "ann, bob" would be another word than "bob" of "ann,bob".
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    compute: Any = pc
    coded = words.dictionary_encode()
    # A view as text is not checked: the bytes need not be UTF-8.
    text = compute.ascii_trim(coded.dictionary.view(pa.string()), " \t")
    trimmed = text.view(pa.binary())
    return pa.DictionaryArray.from_arrays(coded.indices, trimmed)


# ------------------------------------------------------------------ Parquet


def _is_parquet(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_PARQUET)) == _PARQUET


def _parquet_table(call: str, path: str, text: Text, report: Report) -> Table:
    import pyarrow.parquet as parquet

    options: Any = dict(page_checksum_verification=True, pre_buffer=False)

    def columns() -> list[str]:
        with parquet.ParquetFile(path, **options) as file:
            return list(file.schema_arrow.names)

    def read(words: Collection[str], numbers: Collection[str]) -> Iterator[Any]:
        wanted = sorted({*words, *numbers})
        with open(path, "rb") as raw:
            file = _damaged(call, path, lambda: parquet.ParquetFile(raw, **options))
            rows, size = file.metadata.num_rows, os.path.getsize(path)
            # One group of rows at a time. Otherwise a damaged header of a page moves
            # the values of later groups.
            batches = itertools.chain.from_iterable(
                file.iter_batches(
                    _BATCH_ROWS, row_groups=[k], columns=wanted, use_threads=False
                )
                for k in range(file.num_row_groups)
            )
            done = 0
            while True:
                batch = _damaged(call, path, lambda: _next_batch(batches))
                if batch is None:
                    break
                done += batch.num_rows
                report(min(size * done // max(rows, 1), size))
                if batch.num_rows:
                    yield {name: batch.column(name) for name in wanted}
        if done != rows:  # pyarrow skips pages whose headers it takes for others
            raise OSError(
                f"{call}: {path} cannot be read to its end: {done} rows were found of "
                f"the {rows} in its footer. It is damaged or incomplete."
            )

    return Table(path, _damaged(call, path, columns), read)


def _next_batch(batches: Iterator[Any]) -> Any:
    """Returns the next batch. pyarrow does not check the indices of a dictionary."""
    import pyarrow as pa

    batch = next(batches, None)
    for column in () if batch is None else batch.columns:
        if pa.types.is_dictionary(column.type):
            column.validate(full=True)
    return batch


# ------------------------------------------------------------------ errors


def _guarded(call: str, name: str, step: Callable[[], Any]) -> Any:
    """Calls `step`; returns None at the end of a stream, and converts errors."""
    import pyarrow as pa

    try:
        return step()
    except StopIteration:
        return None
    except FileNotFoundError:
        raise
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise ValueError(f"{call}: {name}: {_reason(error)}.") from None
    except (pa.ArrowException, OSError) as error:
        raise OSError(
            f"{call}: {name} cannot be read to its end ({_reason(error)}): it is "
            "damaged or incomplete."
        ) from None


def _damaged(call: str, path: str, step: Callable[[], Any]) -> Any:
    """Calls `step`; any error becomes an OSError, since Parquet has no bad rows."""
    try:
        return step()
    except Exception as error:
        raise OSError(
            f"{call}: {path} cannot be read ({_reason(error)}): it is damaged or "
            "incomplete."
        ) from None


def _reason(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return (text if len(text) <= 200 else f"{text[:197]}...") or type(error).__name__
