"""HashIds: ids of words by a hash.

Id 0 is for missing words. Words are a matrix of bytes, one row per word, with their
lengths, so all words of a column are hashed at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from sparsejax import _arguments
from sparsejax._arguments import ColumnLike
from sparsejax.data import _text, _words
from sparsejax.data._arrow_words import ArrowWords
from sparsejax.data._text import Words


_MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class HashIds:
    """Ids of categories by a hash; needs no pass over the data, but ids may collide.

    The id of a word in column c is `1 + mix(fnv1a(word, salt(seed, c))) mod (B - 1)`,
    and 0 if it is missing. It is the same in every process and on every machine. The
    same word gets different ids in different columns.

    Args:
      num_buckets: int B, rows of a table, below 2^31; or one per column.
      seed: int; another seed gives other collisions.

    Raises:
      ValueError: fewer than two buckets, or too many.

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
        for size in np.atleast_1d(np.asarray(self.num_buckets, object)):
            whole = isinstance(size, (int, np.integer))
            if not whole or not 2 <= size <= np.iinfo(np.int32).max:
                raise ValueError(
                    "sparsejax.data.HashIds: num_buckets must be an int from 2 to "
                    f"2147483647, or one per column, got {self.num_buckets!r}. Id 0 is "
                    "for missing words, and ids are int32."
                )
        _arguments.static_int("sparsejax.data.HashIds", "seed", self.seed)

    def sizes(self, num_columns: int) -> list[int]:
        """The number of ids of each column: rows of its table.

        Args:
          num_columns: int, number of columns.

        Raises:
          ValueError: `num_buckets` is a list of another length.
        """
        if isinstance(self.num_buckets, (int, np.integer)):
            return [int(self.num_buckets)] * num_columns
        found = [int(size) for size in self.num_buckets]
        if len(found) != num_columns:
            raise ValueError(
                f"sparsejax.data.HashIds: num_buckets has {len(found)} entries, but "
                f"the file has {num_columns} columns of categories."
            )
        return found

    def encode(self, column: int, words: ColumnLike) -> np.ndarray:
        """The ids of words, int32 `[n]`.

        Args:
          column: int, the column they are from.
          words: strings, bytes or integers `[n]`: a list, an array, or a column of
            pandas, polars, pyarrow or Hugging Face datasets.

        Raises:
          TypeError: `words` is not such a column, or `column` is not an int.
          IndexError: `column` is out of range.
        """
        call, size = "sparsejax.data.HashIds.encode", self.num_buckets
        column = _arguments.static_int(
            call,
            "column",
            column,
            hint=" HashIds knows columns by their place.",
        )
        if not isinstance(size, (int, np.integer)):
            if column >= len(size):
                raise IndexError(
                    f"{call}: column {column} is out of range for {len(size)} columns."
                )
            size = size[column]
        salt = _mix_int(_mix_int(self.seed + 1) + column)
        if isinstance(words, Words):
            return _hash(words, salt, int(size))
        if isinstance(words, ArrowWords):
            parts = [_hash(part, salt, int(size)) for part in words.words()]
            return np.concatenate(parts)
        found = _words.as_column(call, words)
        return found.per_row(_hash(_text.as_matrix(found.words), salt, int(size)))


# ------------------------------------------------------------------ private


def _hash(words: Words, salt: int, size: int) -> np.ndarray:
    ids = hash_words(words, salt) % np.uint64(size - 1) + np.uint64(1)
    if not words.lengths.min(initial=0):
        ids = np.where(words.lengths > 0, ids, np.uint64(0))
    return ids.astype(np.int32)


def hash_words(words: Words, salt: int) -> np.ndarray:
    """A hash of 64 bits of each word, uint64 `[n]`, the same in every process."""
    # FNV-1a: exclusive or with a byte, then times a prime, modulo 2^64.
    state = np.full(len(words.lengths), 0xCBF29CE484222325 ^ salt, np.uint64)
    least = int(words.lengths.min(initial=0))
    for place in range(words.text.shape[1]):
        step = (state ^ words.text[:, place]) * np.uint64(0x100000001B3)
        is_whole = place < least
        state = step if is_whole else np.where(place < words.lengths, step, state)
    return mix(state)


def mix(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's finalizer: each bit of the result depends on each of x."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def _mix_int(x: int) -> int:
    return int(mix(np.array([x & _MASK], np.uint64))[0])
