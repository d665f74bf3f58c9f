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

    Raises:
      ValueError: `num_buckets` is out of range.

    Example:
      >>> import sparsejax as sj
      >>> encoder = sj.data.HashIds(1000)
      >>> encoder.encode(0, [b"68fd1e64", b"", b"05db9164", b"68fd1e64"])
      array([184,   0, 633, 184], dtype=int32)
      >>> encoder.sizes(2)
      [1000, 1000]

    References:
      Weinberger et al., 2009, "Feature Hashing for Large Scale Multitask Learning";
      Fowler, Noll, Vo, FNV-1a; Appleby, MurmurHash3 (the finalizer).
    """

    num_buckets: int | Sequence[int]
    seed: int = 0

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
        vars(self).update(num_buckets=sizes if several else sizes[0], seed=seed)

    def sizes(self, num_columns: int) -> list[int]:
        """Returns the number of ids of each column, the rows of its table.

        Args:
          num_columns: int, the number of columns.

        Raises:
          ValueError: `num_buckets` is a list of another length.
        """
        if isinstance(self.num_buckets, int):
            return [self.num_buckets] * num_columns
        found = list(self.num_buckets)
        if len(found) != num_columns:
            raise ValueError(
                f"sparsejax.data.HashIds: num_buckets has {len(found)} entries, but "
                f"there are {num_columns} columns of words."
            )
        return found

    def encode(self, column: int, words: ColumnLike) -> np.ndarray:
        """Returns the ids of words, int32 `[n]`.

        Args:
          column: int, the position of the column, from 0.
          words: strings, bytes or integers `[n]`: a list, an array, or a column of
            pandas, polars, pyarrow or Hugging Face datasets.

        Raises:
          TypeError: `words` is not a column of strings, bytes or integers, or `column`
            is not an int.
          IndexError: `column` is out of range.
        """
        call = "sparsejax.data.HashIds.encode"
        column = _arguments.static_int(
            call,
            "column",
            column,
            hint=" HashIds has no names of columns: pass the position.",
        )
        sizes = self.num_buckets
        if not isinstance(sizes, int) and column >= len(sizes):
            raise IndexError(
                f"{call}: column {column} is out of range for {len(sizes)} columns."
            )
        return self._ids_of(column, _arrow.as_column(call, words))

    def _ids_of(self, column: int, words: _arrow.Column) -> np.ndarray:
        sizes = self.num_buckets
        size = sizes if isinstance(sizes, int) else sizes[column]
        salt = _mix_int(_mix_int(self.seed + 1) + column)
        return _hash(words.words, salt, size)[words.rows]


# ------------------------------------------------------------------ private


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
