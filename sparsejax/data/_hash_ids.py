"""HashIds: ids of words by a hash.

Id 0 is for missing words. Only the distinct words of a column are hashed, all at once,
as a matrix of bytes.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsejax import _arguments
from sparsejax._arguments import ColumnLike
from sparsejax._hashing import hash_words, mix
from sparsejax.data import _arrow
from sparsejax.data._selection import place_of


_MASK = (1 << 64) - 1
_MAX_CELLS = 1 << 20  # bytes of the matrix of some words


@dataclasses.dataclass(frozen=True)
class HashIds:
    """Ids of words by a hash, without a pass over the data; ids may collide.

    The id of a word in column c is `1 + mix(fnv1a(word, salt(seed, c))) mod (B - 1)`;
    the id of a missing word is 0. Ids are the same in every process and on every
    machine. The same word has different ids in different columns.

    Args:
      num_buckets: int B, the number of rows of a table, from 2 to 2^31 - 1; or one int
        for each column.
      seed: int; collisions depend on it.
      names: the names of the columns, in order, or empty. With names, `encode` takes
        the name of a column, and `read_ids` refuses columns with other names.

    Raises:
      TypeError: `names` are not a list of strings.
      ValueError: `num_buckets` is out of range, `names` has a name twice, or the two
        have different lengths.

    Example:
      >>> import sparsejax as sj
      >>> encoder = sj.data.HashIds([1000, 50], names=["ad", "site"])
      >>> encoder.encode("ad", ["68fd1e64", "", "05db9164", "68fd1e64"])
      array([184,   0, 633, 184], dtype=int32)
      >>> encoder.sizes()
      [1000, 50]

    Without names, a column is its position from 0:

      >>> sj.data.HashIds(1000).encode(0, ["68fd1e64"])
      array([184], dtype=int32)

    References:
      Weinberger et al., 2009, "Feature Hashing for Large Scale Multitask Learning";
      Fowler, Noll, Vo, FNV-1a; Appleby, MurmurHash3 (the finalizer).
    """

    num_buckets: int | Sequence[int]
    seed: int = 0
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        several = np.ndim(self.num_buckets) > 0
        given: Any = self.num_buckets if several else (self.num_buckets,)
        try:
            sizes = tuple(map(operator.index, given))
        except TypeError:
            sizes = (0,)
        if not all(2 <= size <= np.iinfo(np.int32).max for size in sizes):
            raise _arguments.wrong(
                "sparsejax.data.HashIds",
                "num_buckets",
                "an int from 2 to 2147483647, or one for each column",
                repr(self.num_buckets),
                "Id 0 is for missing words, and ids are int32.",
            )
        seed = _arguments.static_int("sparsejax.data.HashIds", "seed", self.seed)
        names = _as_names(self.names)
        if names and several and len(names) != len(sizes):
            raise ValueError(
                f"sparsejax.data.HashIds: num_buckets has {len(sizes)} entries, but "
                f"names has {len(names)}. Pass one name for each entry."
            )
        buckets = sizes if several else sizes[0]
        vars(self).update(num_buckets=buckets, seed=seed, names=names)

    def sizes(self, num_columns: int | None = None) -> list[int]:
        """Returns the number of ids of each column, the rows of its table.

        Args:
          num_columns: int, the number of columns. It may be None if `num_buckets` is a
            list or if there are names.

        Raises:
          ValueError: there is another number of columns, or it is not known.
        """
        own, buckets = self._num_columns(), self.num_buckets
        count = own if num_columns is None else num_columns
        if count is None:
            raise ValueError(
                "sparsejax.data.HashIds.sizes: the number of columns is not known. "
                "Pass num_columns, or make HashIds with names=."
            )
        if own is not None and count != own:
            field = "names" if isinstance(buckets, int) else "num_buckets"
            raise ValueError(
                f"sparsejax.data.HashIds: {field} has {own} entries, but "
                f"there are {num_columns} columns of words."
            )
        return [buckets] * count if isinstance(buckets, int) else list(buckets)

    def encode(self, column: int | str, words: ColumnLike) -> np.ndarray:
        """Returns the ids of words, int32 `[n]`; 0 for missing words.

        Args:
          column: the column of the words: its name, or its position from 0.
          words: strings, bytes or integers `[n]`: a list, an array, or a column of
            pandas, polars, pyarrow or Hugging Face datasets.

        Raises:
          TypeError: `words` is not a column of strings, bytes or integers.
          ValueError: there is no column of that name.
          IndexError: `column` is out of range.
        """
        call = "sparsejax.data.HashIds.encode"
        place = place_of(call, column, self.names, self._num_columns())
        return self._ids_of(place, _arrow.as_column(call, words))

    def _num_columns(self) -> int | None:
        """Returns the number of columns, or None if it is not known."""
        if not isinstance(self.num_buckets, int):
            return len(self.num_buckets)
        return len(self.names) or None

    def _ids_of(self, column: int, words: _arrow.Column) -> np.ndarray:
        sizes = self.num_buckets
        size = sizes if isinstance(sizes, int) else sizes[column]
        salt = _mix_int(_mix_int(self.seed + 1) + column)
        return _hash(words.words, salt, size)[words.rows]


# ------------------------------------------------------------------ private


def _as_names(names: Any) -> tuple[str, ...]:
    call = "sparsejax.data.HashIds"
    is_list = isinstance(names, (list, tuple, np.ndarray))
    if not is_list or not all(isinstance(name, str) for name in names):
        want = "a list of strings, one for each column"
        raise _arguments.wrong_type(call, "names", want, _arguments.show(names))
    found = tuple(map(str, names))
    for name in found:
        if found.count(name) > 1:
            raise ValueError(f"{call}: names has {name!r} twice.")
    return found


def _hash(words: Any, salt: int, size: int) -> np.ndarray:
    """Returns the ids of a BinaryArray `[k]`, int32; 0 for the empty word."""
    lengths, text = _arrow.lengths_and_bytes(words)
    starts = np.cumsum(lengths) - lengths
    ids = np.zeros(len(lengths), np.int32)
    # The matrix is as wide as its longest word, so its size is bounded.
    step = max(_MAX_CELLS // max(int(lengths.max(initial=0)), 1), 1)
    for at in range(0, len(lengths), step):
        own, begin = lengths[at : at + step], starts[at : at + step]
        places = begin[:, None] + np.arange(int(own.max()))
        matrix = text[np.minimum(places, len(text) - 1)]
        found = hash_words(matrix, own, salt) % np.uint64(size - 1)
        ids[at : at + step] = np.where(own > 0, found + np.uint64(1), 0)
    return ids


def _mix_int(x: int) -> int:
    return int(mix(np.array([x & _MASK], np.uint64))[0])
