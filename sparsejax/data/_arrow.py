"""Tables of any package as batches of columns, and the words of a column.

A table is a dict of columns, a data frame of pandas, an object with
`__arrow_c_stream__` (polars, pyarrow, DuckDB), or an iterable of these.

A word is a string of bytes: text in UTF-8, an integer in decimal. So a column has the
same words in every package. A missing value (None, NaN, a null, an empty string) is the
empty word. A column is first reduced to its distinct values by `dictionary_encode`, and
only these become words. pyarrow is imported by the first call that needs it.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sparsejax import _arguments
from sparsejax._segments import SegmentTensor


# A vocabulary stores its words as NumPy's fixed-width bytes, so one word of a megabyte
# would take a megabyte for every word.
MAX_WORD_BYTES = 1024
_EXACT = 2**53  # float64 represents all integers up to this one


def import_pyarrow() -> Any:
    """Returns pyarrow, or raises an ImportError with the command to install it."""
    try:
        import pyarrow
        import pyarrow.compute
    except ImportError:
        raise ImportError(
            "sparsejax.data reads columns of words and data frames with pyarrow, "
            "which is not installed. Run pip install 'sparsejax[data]'."
        ) from None
    return pyarrow


# ------------------------------------------------------------------ tables


def is_table(data: Any) -> bool:
    """Returns True for a dict, a data frame, an Arrow table, or a stream of batches."""
    kind = type(data)
    # A polars LazyFrame has columns, but no values until collect().
    if hasattr(kind, "collect"):
        return False
    is_frame = any(hasattr(kind, name) for name in ("columns", "column_names"))
    is_stream = hasattr(kind, "__arrow_c_stream__") and hasattr(kind, "schema")
    return isinstance(data, Mapping) or is_frame or is_stream


def columns_of(table: Any) -> dict[str, Any]:
    """Returns the columns of one table by name."""
    if isinstance(table, Mapping):
        names, columns = list(table), list(table.values())
    elif _is_stream(table):
        whole = import_pyarrow().table(table)
        names, columns = whole.column_names, whole.columns
    else:  # pandas, Hugging Face datasets
        names = getattr(table, "column_names", None)
        names = list(table.columns if names is None else names)
        columns = [table[name] for name in names]
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"a table must have columns with strings as names, got {names}. Pass "
            "them, for example by pandas.read_csv(path, names=[...])."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"the names of columns must differ, got {names}.")
    return dict(zip(names, columns))


def _is_stream(data: Any) -> bool:
    # The stream of pandas converts all columns, and has the index as a column.
    return hasattr(data, "__arrow_c_stream__") and not hasattr(data, "iloc")


def batches(table: Any) -> Iterator[dict[str, Any]]:
    """Yields the columns of a table by name, a batch of rows at a time.

    Only one batch of a stream or of an iterable is in memory. A stream of no rows
    yields one empty batch, which has the names.
    """
    if _is_stream(table):
        stream = import_pyarrow().RecordBatchReader.from_stream(table)
        for batch in itertools.chain([stream.schema.empty_table()], stream):
            yield columns_of(batch)
    elif is_table(table):
        yield columns_of(table)
    elif isinstance(table, Iterable) and not isinstance(table, (str, bytes)):
        for part in table:
            yield from batches(part)
    else:
        is_lazy = hasattr(type(table), "collect")
        hint = "Read files with pyarrow.csv.read_csv, pandas or polars."
        raise TypeError(
            "a table must be a dict of columns, a data frame, an Arrow table or an "
            f"iterable of these, got {_arguments.kind_of(table)}. "
            f"{'Call .collect().' if is_lazy else hint}"
        )


def select(batch: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """Returns the columns of these names, or raises a ValueError."""
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(f"the table has the columns {list(batch)}, but no {missing}.")
    return [batch[name] for name in names]


def ids_of_table(
    table: Any, names: Sequence[str], ids_of: Callable[[str, "Words"], np.ndarray]
) -> dict[str, Any]:
    """Returns the ids of each column of a table that is among `names`.

    Args:
      table: a table.
      names: the names of the columns that have ids.
      ids_of: returns the ids of words of the column of a name.

    Returns:
      A dict of int32 `[n]`, or of SegmentTensors for columns of lists.
    """
    parts: dict[str, Any] = {}
    for batch in batches(table):
        parts = parts or {name: [] for name in names if name in batch}
        if not parts:
            raise ValueError(
                f"the table has the columns {list(batch)}, none of {list(names)}."
            )
        for name, column in zip(parts, select(batch, list(parts))):
            words = as_words(column, name)
            parts[name].append((ids_of(name, words), words.lengths))
    return {name: _join(pieces) for name, pieces in parts.items()}


def _join(parts: list[tuple[np.ndarray, np.ndarray | None]]) -> Any:
    ids = np.concatenate([ids_of_part for ids_of_part, _ in parts])
    of_parts = [lengths for _, lengths in parts if lengths is not None]
    if not of_parts:
        return ids
    if len(of_parts) < len(parts):
        raise TypeError("a column has lists of words in some batches, words in others.")
    lengths = np.concatenate(of_parts)
    segment_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    # `from_lengths` would transfer the arrays to the device; unflattening does not.
    return SegmentTensor.tree_unflatten((len(lengths), True), (ids, segment_ids))


# ------------------------------------------------------------------ columns


def is_column(data: Any) -> bool:
    """Returns True for a column of a data frame, and for an Arrow array."""
    names = ("__arrow_c_stream__", "__arrow_c_array__", "iloc")
    return any(hasattr(data, name) for name in names)


def as_array(data: Any, name: str) -> Any:
    """Returns a column as a pyarrow Array or ChunkedArray.

    Args:
      data: a list, a NumPy or JAX array, or a column of pandas, polars, pyarrow or
        another package with `__arrow_c_stream__`.
      name: the name of the column, for messages.
    """
    pa = import_pyarrow()
    if isinstance(data, (pa.Array, pa.ChunkedArray)):
        return data
    if isinstance(data, (str, bytes, Mapping)) or is_table(data):
        _refuse(data, name)
    # pyarrow converts columns of pandas, in which NaN is a missing value.
    is_pandas = hasattr(data, "iloc") or type(data).__module__.startswith("pandas.")
    if not is_pandas:
        if hasattr(data, "__arrow_c_stream__"):
            return pa.chunked_array(data)
        if hasattr(data, "__arrow_c_array__"):
            return pa.array(data)
        if hasattr(data, "__array__"):
            data = np.asanyarray(data)  # pyarrow reads the mask of a masked array
            if data.dtype.kind in "iuf":  # which pyarrow reads in native order alone
                data = data.astype(data.dtype.newbyteorder("="), copy=False)
        elif not isinstance(data, Iterable):
            _refuse(data, name)
    # pyarrow infers one type for all values, and int64 for integers.
    for kind in (None, pa.uint64()):
        try:
            return pa.array(data, kind, from_pandas=True)
        except (pa.ArrowException, OverflowError, TypeError, UnicodeError):
            continue
    return pa.array([_as_word(value, name) for value in data], pa.binary())


def _as_word(value: Any, name: str) -> bytes | None:
    """Returns one value of a column of several types as a word."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        # Bytes that are not UTF-8 survive `decode` and this.
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, (bool, int, np.bool_, np.integer)):
        return str(value).encode()
    is_float = isinstance(value, (float, np.floating))
    if is_float and float(value).is_integer() and abs(value) <= _EXACT:
        return str(int(value)).encode()
    is_null = type(value).__name__ in ("NAType", "NaTType")  # of pandas
    if value is None or is_null or is_float and value != value:
        return None
    _refuse(value, name)


def _refuse(value: Any, name: str) -> NoReturn:
    raise TypeError(
        f"the column {name!r} must be strings or integers, or lists of these, got "
        f"{_arguments.show(value)}. Numbers that are not ids need no vocabulary."
    )


# ------------------------------------------------------------------ words


class Words(NamedTuple):
    """A column of words, or of lists of words.

    Args:
      distinct: pyarrow BinaryArray `[k]` without nulls. The last word is empty, and
        stands for missing values. The same word may occur twice.
      places: int64 `[n]`, the position in `distinct` of each word.
      is_integer: True if all values that are not missing are integers.
      lengths: int64 `[rows]`, the number of words of each list; None without lists.
    """

    distinct: Any
    places: np.ndarray
    is_integer: bool
    lengths: np.ndarray | None


def as_words(data: Any, name: str = "words") -> Words:
    """Returns the words of a column, which `as_array` accepts."""
    pa = import_pyarrow()
    array, lengths = as_array(data, name), None
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if any(test(array.type) for test in lists):
        lengths = pa.compute.list_value_length(array).fill_null(0).to_numpy()
        lengths = lengths.astype(np.int64)
        array = pa.compute.list_flatten(array)
    if not pa.types.is_dictionary(array.type):
        try:
            array = array.dictionary_encode()
        except pa.ArrowNotImplementedError:  # lists of lists, records
            _refuse(next(iter(array.drop_null().to_pylist()), None), name)
    if isinstance(array, pa.ChunkedArray):
        try:
            array = array.unify_dictionaries().combine_chunks()
        except pa.ArrowNotImplementedError:  # dictionaries of string views
            array = pa.array(array.to_pylist()).dictionary_encode()
    distinct, is_integer = _as_distinct(array.dictionary, name)
    _check_words(distinct, name)
    places = array.indices.cast(pa.int64()).fill_null(len(distinct))
    # The last word is the empty one, which rows without a value have.
    distinct = pa.concat_arrays([distinct, pa.array([b""], pa.binary())])
    return Words(distinct, places.to_numpy(zero_copy_only=False), is_integer, lengths)


def _as_distinct(values: Any, name: str) -> tuple[Any, bool]:
    """Returns distinct values as a BinaryArray, and True if all are integers."""
    pa = import_pyarrow()
    kind, types = values.type, pa.types
    is_integer = types.is_integer(kind)
    if is_integer:
        values = values.cast(pa.string())
    elif types.is_floating(kind):
        # pandas stores ids as floats if one of them is missing.
        values = pa.array([_as_word(x, name) for x in values.to_pylist()], pa.binary())
        is_integer = values.null_count < len(values)
    try:
        words = values.cast(pa.binary())
    except pa.ArrowNotImplementedError:  # booleans; string views before pyarrow 20
        words = pa.array([_as_word(x, name) for x in values.to_pylist()], pa.binary())
    return words.fill_null(b""), is_integer


def _check_words(words: Any, name: str) -> None:
    """Raises a ValueError for a word that a vocabulary cannot store."""
    lengths, content = lengths_and_bytes(words)
    if lengths.max(initial=0) > MAX_WORD_BYTES:
        raise ValueError(
            f"the column {name!r} has a word of {lengths.max()} bytes. The limit is "
            f"{MAX_WORD_BYTES} bytes."
        )
    ends = content[np.maximum(np.cumsum(lengths) - 1, 0)]
    if (at := np.flatnonzero((lengths > 0) & (ends == 0))).size:
        raise ValueError(
            f"the column {name!r} has a word that ends in a zero byte, "
            f"{words[int(at[0])].as_py()[-20:]!r}. Files with zero bytes are not plain "
            "text, but UTF-16 or binary."
        )


def lengths_and_bytes(words: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the length of each word, and the bytes of all words one after another.

    Args:
      words: pyarrow BinaryArray `[k]` without nulls.
    """
    _, offsets, content = words.buffers()
    if not len(words):
        return np.zeros(0, np.int64), np.zeros(1, np.uint8)
    places = np.frombuffer(offsets, np.int32)[words.offset :][: len(words) + 1]
    text = np.frombuffer(content, np.uint8) if content else np.zeros(0, np.uint8)
    # With one byte more, so that a place behind the last word can be read.
    text = np.append(text[places[0] : places[-1]], np.uint8(1))
    return np.diff(places).astype(np.int64), text


def as_flat_words(data: Any) -> Words:
    """Returns the words of a column without lists."""
    words = as_words(data)
    if words.lengths is not None:
        raise TypeError(
            "words must be strings or integers, got lists of words. Flatten them, or "
            "call ids(table), which returns a SegmentTensor for a column of lists."
        )
    return words


def place_of(column: Any, names: Sequence[str], count: int | None) -> int:
    """Returns the position of a column that is given by name or by position.

    Args:
      column: a name, or a position from 0.
      names: the names of all columns, or empty.
      count: the number of columns; None for any number.
    """
    if isinstance(column, str):
        if column not in names:
            raise ValueError(
                f"there is no column {column!r}. The columns are {list(names)}."
            )
        return list(names).index(column)
    place = operator.index(column)
    if place < 0 or count is not None and place >= count:
        raise IndexError(f"column {place} is out of range for {count} columns.")
    return place
