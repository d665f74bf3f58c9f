"""Columns of categories as words: lists, NumPy, pandas, polars, pyarrow, Hugging Face.

A word is a string of bytes: text in UTF-8, an integer in decimal. So a column of a data
frame and the same column of a CSV file have the same words. A missing value (None, NaN,
a null) is the empty word, as an empty field is.

None of these packages is imported: a column is recognized by its methods. A column is
first reduced to its distinct values, and only these become words.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sparsejax import _arguments
from sparsejax.data._text import MOST_BYTES, Words, as_bytes


_EXACT = 2**53  # float64 holds all integers up to it
_KINDS = "iufbOSUT"  # of NumPy's dtypes; the others are dates, complex numbers, records


class Column(NamedTuple):
    """A column of words.

    Args:
      words: bytes `S[k]`, in any order. The same word may occur twice.
      rows: int64 `[n]`, the position in `words` of each row; or None if the rows are
        the words.
      is_integer: whether all that is not missing are integers.
    """

    words: np.ndarray
    rows: np.ndarray | None
    is_integer: bool

    def per_row(self, per_word: np.ndarray) -> np.ndarray:
        """What is known of each word, for each row."""
        return per_word if self.rows is None else per_word[self.rows]

    def counts(self) -> np.ndarray:
        """How many rows each word has, int64 `[k]`."""
        if self.rows is None:
            return np.ones(len(self.words), np.int64)
        return np.bincount(self.rows, minlength=len(self.words))


def as_column(call: str, data: Any, name: str = "words") -> Column:
    """A column of any of these kinds, or a TypeError that names `call`.

    Args:
      call, name: for messages.
      data: strings, bytes or integers, `[n]`.
    """
    if isinstance(data, Words):
        return Column(as_bytes(data), None, False)
    values, rows = _distinct(call, data, name)
    words, is_integer = _as_text(call, values, name)
    # The last word is the empty one, of the rows that have no value.
    words = np.append(words, np.zeros(1, words.dtype))
    return Column(words, np.where(rows < 0, len(words) - 1, rows), is_integer)


def as_columns(call: str, data: Any) -> dict[str, Any]:
    """The columns of a dict or of a data frame, by name; unread."""
    if isinstance(data, Mapping):
        found = dict(data)
    elif is_table(data):
        names = getattr(data, "column_names", None)
        names = list(data.columns if names is None else names)
        if len(set(names)) < len(names):
            raise ValueError(f"{call}: the names of columns must differ, got {names}.")
        found = {name: data[name] for name in names}
    else:
        is_lazy = hasattr(type(data), "collect")
        example = "{'user': users, 'item': items}, or df[['user', 'item']]"
        raise TypeError(
            f"{call}: columns must be a dict of columns or a data frame, got "
            f"{_arguments.kind_of(data)}. Pass for example "
            f"{'df.collect()' if is_lazy else example}."
        )
    if not found:
        raise ValueError(f"{call}: there must be at least one column.")
    for name in found:
        if not isinstance(name, str):
            raise TypeError(
                f"{call}: names of columns must be strings, got {name!r}. Rename the "
                "columns."
            )
    return found


def is_table(data: Any) -> bool:
    """Whether `data` is a data frame of pandas or polars, or a table of others."""
    kind = type(data)  # polars' LazyFrame warns where it is asked for its columns
    named = hasattr(kind, "columns") or hasattr(kind, "column_names")
    return named and hasattr(kind, "__getitem__") and not hasattr(kind, "collect")


# ------------------------------------------------------------------ distinct values


def _distinct(call: str, data: Any, name: str) -> tuple[Any, np.ndarray]:
    """The distinct values of a column, and which each row has: -1 for a missing one."""
    if isinstance(data, (str, bytes, Mapping)) or is_table(data):
        _refuse(call, data, name)
    if hasattr(data, "factorize"):  # pandas: Series, Index, Categorical
        try:
            rows, values = data.factorize()
        except TypeError:  # lists
            return _distinct_objects(call, data.tolist(), name)
        return np.asarray(values), rows
    if hasattr(data, "dictionary_encode"):  # pyarrow: Array, ChunkedArray
        data = data.dictionary_encode()
        if hasattr(data, "unify_dictionaries"):  # in chunks
            data = data.unify_dictionaries().combine_chunks()
        rows = data.indices.cast("int64").fill_null(-1)
        return data.dictionary.to_pylist(), rows.to_numpy(zero_copy_only=False)
    if hasattr(data, "to_list"):  # polars
        return _distinct_objects(call, data.to_list(), name)
    if isinstance(data, np.ma.MaskedArray):
        return _distinct_objects(call, data.tolist(), name)
    if hasattr(data, "__array__"):
        data = np.asarray(data)
        if data.ndim != 1 or data.dtype.kind not in _KINDS:
            _refuse(call, data, name)
        if data.dtype.kind in "iuf":
            return _distinct_numbers(data)
        data = data.tolist()
    if not isinstance(data, Iterable):
        _refuse(call, data, name)
    return _distinct_objects(call, list(data), name)


def _distinct_numbers(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = np.full(len(data), -1)
    given = data == data  # not NaN
    values, rows[given] = np.unique(data[given], return_inverse=True)
    return values, rows


def _distinct_objects(call: str, data: list, name: str) -> tuple[list, np.ndarray]:
    try:
        place = {value: k for k, value in enumerate(dict.fromkeys(data))}
    except TypeError:
        at = next(value for value in data if not _is_hashable(value))
        _refuse(call, at, name)
    rows = map(place.__getitem__, data)
    return list(place), np.fromiter(rows, np.int64, len(data))


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


# ------------------------------------------------------------------ values as words


def _as_text(call: str, values: Any, name: str) -> tuple[np.ndarray, bool]:
    """Distinct values as words `S[k]`, and whether all are integers."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind in "iu":
            return values.astype("S"), True
        if values.dtype.kind not in _KINDS:
            _refuse(call, values, name)
        values = values.tolist()
    words = [_word(call, value, name) for value in values]
    is_number = [
        isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        for value, word in zip(values, words)
        if word
    ]
    for word in words:
        if len(word) > MOST_BYTES or word.endswith(b"\0"):
            found = f"one of {len(word)} bytes that ends in {word[-8:]!r}"
            raise ValueError(
                f"{call}: {name} must have at most {MOST_BYTES} bytes, and must not "
                f"end in a zero byte, got {found}."
            )
    return np.array(words, "S"), bool(is_number) and all(is_number)


def _word(call: str, value: Any, name: str) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return encode(value)
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value)).encode()
    if isinstance(value, (int, np.integer)):
        return str(int(value)).encode()
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return b""
    if isinstance(value, (float, np.floating)):
        if value != value:
            return b""
        if float(value).is_integer() and abs(value) <= _EXACT:
            return str(int(value)).encode()  # pandas makes floats of ids with a NaN
    _refuse(call, value, name)


def encode(word: str) -> bytes:
    """Text as a word. Bytes that are not UTF-8 survive `decode` and this."""
    return word.encode("utf-8", "surrogateescape")


def decode(words: np.ndarray) -> np.ndarray:
    """Words `S[...]` as text `U[...]`."""
    if not words.size:
        return np.zeros(words.shape, np.str_)
    return np.char.decode(words, "utf-8", "surrogateescape")


def _refuse(call: str, found: Any, name: str) -> NoReturn:
    hint = ""
    if is_table(found):
        hint = " It is a table: pass one of its columns, or encode_columns(table)."
    elif isinstance(found, (float, np.floating)):
        hint = " Numbers that are not ids are features, or are cut into buckets first."
    elif isinstance(found, (list, tuple)) or np.ndim(found) > 1:
        hint = " Flatten lists of words first, and keep their lengths."
    raise TypeError(
        f"{call}: {name} must be strings or integers, one for each row, got "
        f"{_arguments.show(found)}.{hint}"
    )
