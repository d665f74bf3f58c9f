"""Columns of any package as pyarrow arrays, and their words.

A word is a string of bytes: text in UTF-8, an integer in decimal. So a column of a data
frame and the same column of a CSV file have the same words. A missing value (None, NaN,
a null, an empty string) is the empty word.

A column is first reduced to its distinct values by `dictionary_encode`, and only these
become words. pyarrow is imported by the first call that needs it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sparsejax import _arguments


# A vocabulary stores its words as NumPy's fixed-width bytes, so one word of a megabyte
# would take a megabyte for every word.
MAX_WORD_BYTES = 1024
_EXACT = 2**53  # float64 represents all integers up to this one
_KINDS = "biufOSUT"  # of NumPy's dtypes; the others are dates, complex numbers, records


def import_pyarrow(call: str) -> Any:
    """Returns pyarrow, or raises an ImportError with the command to install it."""
    try:
        import pyarrow
        import pyarrow.compute
    except ImportError:
        raise ImportError(
            f"{call}: needs pyarrow, which is not installed. Run pip install "
            "'sparsejax[data]'."
        ) from None
    return pyarrow


# ------------------------------------------------------------------ columns


def is_table(data: Any) -> bool:
    """Returns True for a data frame, an Arrow table, or a stream of record batches."""
    kind = type(data)
    # A polars LazyFrame has columns, but no values until collect().
    if hasattr(kind, "collect"):
        return False
    if any(hasattr(kind, name) for name in ("columns", "column_names")):
        return True
    return hasattr(kind, "__arrow_c_stream__") and hasattr(kind, "schema")


def is_column(data: Any) -> bool:
    """Returns True for a column of a data frame, and for an Arrow array."""
    names = ("__arrow_c_stream__", "__arrow_c_array__", "iloc")
    return any(hasattr(data, name) for name in names)


def as_array(call: str, data: Any, name: str) -> Any:
    """Returns a column as a pyarrow Array or ChunkedArray.

    Args:
      call, name: for messages.
      data: a list, a NumPy or JAX array, or a column of pandas, polars, pyarrow or
        another package with `__arrow_c_stream__`.
    """
    pa = import_pyarrow(call)
    if isinstance(data, (str, bytes, Mapping)) or is_table(data):
        _refuse(call, data, name)
    if isinstance(data, (pa.Array, pa.ChunkedArray)):
        return data
    # pyarrow converts columns of pandas, in which NaN is a missing value.
    is_pandas = hasattr(data, "iloc") or type(data).__module__.startswith("pandas.")
    if hasattr(data, "__arrow_c_stream__") and not is_pandas:
        return pa.chunked_array(data)
    if hasattr(data, "__arrow_c_array__"):
        return pa.array(data)
    if not is_pandas:
        data = _as_values(call, data, name)
    try:
        return pa.array(data, from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, UnicodeError):
        values = data.tolist() if hasattr(data, "tolist") else list(data)
    # pyarrow infers one type for all values, and int64 for integers.
    try:
        return pa.array(values, pa.uint64(), from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError):
        return pa.array([_as_word(call, x, name) for x in values], pa.binary())


def _as_word(call: str, value: Any, name: str) -> bytes | None:
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
    if value is None or is_float and value != value or _is_null(value):
        return None
    _refuse(call, value, name)


def _is_null(value: Any) -> bool:
    return type(value).__name__ in ("NAType", "NaTType")  # of pandas


def _as_values(call: str, data: Any, name: str) -> Any:
    """Returns a list, or a NumPy array of a dtype that pyarrow accepts."""
    if not hasattr(data, "__array__"):
        if not isinstance(data, Iterable):
            _refuse(call, data, name)
        return list(data)
    found = data if isinstance(data, np.ma.MaskedArray) else np.asarray(data)
    if found.ndim != 1 or found.dtype.kind not in _KINDS:
        _refuse(call, found, name)
    if found.dtype.kind in "OT":
        return found.tolist()
    return found.astype(found.dtype.newbyteorder("="), copy=False)


def as_floats(array: Any) -> np.ndarray | None:
    """Returns a pyarrow array as float64, nulls as NaN; None if it is not numbers."""
    pa = import_pyarrow("")
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    kind, types = array.type, pa.types
    tests = types.is_integer, types.is_floating, types.is_boolean
    if not any(test(kind) for test in (*tests, types.is_decimal, types.is_null)):
        return None
    numbers = array.cast(pa.float64(), safe=False).fill_null(float("nan"))
    return numbers.to_numpy(zero_copy_only=False)


# ------------------------------------------------------------------ words


class Column(NamedTuple):
    """A column of words.

    Args:
      words: pyarrow BinaryArray `[k]` without nulls. The last word is empty, and stands
        for missing values. The same word may occur twice.
      rows: int64 `[n]`, the position in `words` of each row.
      is_integer: True if all values that are not missing are integers.
    """

    words: Any
    rows: np.ndarray
    is_integer: bool

    def counts(self) -> np.ndarray:
        """Returns the number of rows of each word, int64 `[k]`."""
        return np.bincount(self.rows, minlength=len(self.words))


def as_column(call: str, data: Any, name: str = "words") -> Column:
    """Returns a column as words, or raises a TypeError that names `call`.

    Args:
      call, name: for messages.
      data: strings, bytes or integers `[n]`, as `as_array` accepts them.
    """
    pa = import_pyarrow(call)
    array = as_array(call, data, name)
    if not pa.types.is_dictionary(array.type):
        try:
            array = array.dictionary_encode()
        except pa.ArrowNotImplementedError:  # lists, records
            _refuse(call, next(iter(array.drop_null().to_pylist()), None), name)
    if isinstance(array, pa.ChunkedArray):
        try:
            array = array.unify_dictionaries().combine_chunks()
        except pa.ArrowNotImplementedError:  # dictionaries of string views
            array = pa.array(array.to_pylist()).dictionary_encode()
    words, is_integer = _as_words(call, array.dictionary, name)
    _check_words(call, words, name)
    rows = array.indices.cast(pa.int64()).fill_null(len(words))
    # The last word is the empty one, which rows without a value have.
    words = pa.concat_arrays([words, pa.array([b""], pa.binary())])
    return Column(words, rows.to_numpy(zero_copy_only=False), is_integer)


def _as_words(call: str, values: Any, name: str) -> tuple[Any, bool]:
    """Returns distinct values as a BinaryArray, and True if all are integers."""
    pa = import_pyarrow(call)
    kind, types = values.type, pa.types
    if types.is_integer(kind):
        words, is_integer = values.cast(pa.string()), True
    elif types.is_floating(kind):
        # pandas stores ids as floats if one of them is missing.
        numbers = values.cast(pa.float64()).fill_null(float("nan"))
        numbers = numbers.to_numpy(zero_copy_only=False)
        is_given = numbers == numbers
        is_wrong = is_given & ~(np.abs(numbers) <= _EXACT)
        is_wrong |= is_given & (np.trunc(numbers) != numbers)
        if is_wrong.any():
            _refuse(call, float(numbers[np.argmax(is_wrong)]), name)
        whole = np.where(is_given, numbers, 0).astype(np.int64)
        words = pa.array(whole, mask=~is_given).cast(pa.string())
        is_integer = bool(is_given.any())
    elif types.is_boolean(kind) or types.is_null(kind):
        text = [None if value is None else str(value) for value in values.to_pylist()]
        words, is_integer = pa.array(text, pa.string()), False
    elif any(test(kind) for test in _text_types(types)):
        is_integer = False
        try:
            words = values.cast(pa.binary())
        except pa.ArrowNotImplementedError:  # string views, before pyarrow 20
            text = [_as_word(call, value, name) for value in values.to_pylist()]
            words = pa.array(text, pa.binary())
    else:
        _refuse(call, next(iter(values.drop_null().to_pylist()), kind), name)
    return words.cast(pa.binary()).fill_null(b""), is_integer


def _text_types(types: Any) -> list[Any]:
    names = "string large_string string_view binary large_binary binary_view"
    return [getattr(types, f"is_{n}") for n in [*names.split(), "fixed_size_binary"]]


def _check_words(call: str, words: Any, name: str) -> None:
    """Raises a ValueError for a word that a vocabulary cannot store."""
    lengths, content = lengths_and_bytes(words)
    ends = np.cumsum(lengths) - 1
    if lengths.max(initial=0) > MAX_WORD_BYTES:
        want = f"words of at most {MAX_WORD_BYTES} bytes"
        raise _arguments.wrong(call, name, want, f"one of {lengths.max()} bytes")
    ends_in_zero = (lengths > 0) & (content[np.maximum(ends, 0)] == 0)
    if ends_in_zero.any():
        found = words[int(np.argmax(ends_in_zero))].as_py()
        raise _arguments.wrong(
            call,
            name,
            "words that do not end in a zero byte",
            repr(found[-20:]),
            "Files with zero bytes are not plain text, but UTF-16, workbooks or "
            "archives.",
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


def decode(words: np.ndarray) -> np.ndarray:
    """Returns words `S[...]` as text `U[...]`; `as_column` turns them back."""
    if not words.size:
        return np.zeros(words.shape, np.str_)
    return np.char.decode(words, "utf-8", "surrogateescape")


def _refuse(call: str, found: Any, name: str) -> NoReturn:
    hint = ""
    if is_table(found):
        hint = " It is a table: pass one of its columns, or encode_columns(table)."
    elif getattr(getattr(found, "dtype", None), "kind", "") in ("M", "m"):
        hint = " Of times, pass the seconds since the first one, as floats."
    elif isinstance(found, (float, np.floating)):
        hint = " Numbers that are not ids are features, or are cut into buckets first."
    elif isinstance(found, (list, tuple)) or np.ndim(found) > 1:
        hint = " Flatten lists of words first, and keep their lengths."
    raise TypeError(
        f"{call}: {name} must be strings or integers, one for each row, got "
        f"{_arguments.show(found)}.{hint}"
    )
