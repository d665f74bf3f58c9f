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

from sparsejax._arguments import ColumnLike, PyTree
from sparsejax._hashing import hash_words, mix
from sparsejax.data import _arrow


_MASK = (1 << 64) - 1
_MAX_CELLS = 1 << 20  # bytes of the matrix of some words


@dataclasses.dataclass(frozen=True, init=False)
class HashIds:
    """Ids of words by a hash, without a pass over the data; ids may collide.

    The id of a word in column c is `1 + mix(fnv1a(word, salt(seed, c))) mod (B - 1)`;
    the id of a missing word is 0. Ids are the same in every process and on every
    machine. The same word has different ids in different columns.

    Args:
      sizes: int B, the number of rows of each table, from 2 to 2^31 - 1; or one int for
        each column.
      seed: int; collisions depend on it.
      names: the names of the columns, in order, or empty. `ids` needs them.

    Raises:
      TypeError: `names` is a str.
      ValueError: a size is out of range, `names` has a name twice, or the two have
        different lengths.

    Example:
      >>> import sparsejax as sj
      >>> hashed = sj.data.HashIds([1000, 50], names=["ad", "site"])
      >>> ids = hashed.ids({"ad": ["68fd1e64", "", "05db9164"], "site": [7, 8, 7]})
      >>> ids["ad"], ids["site"]
      (array([184,   0, 633], dtype=int32), array([22, 45, 22], dtype=int32))
      >>> hashed.sizes()
      [1000, 50]

    Without names, a column is its position from 0:

      >>> sj.data.HashIds(1000).encode(0, ["68fd1e64"])
      array([184], dtype=int32)

    References:
      Weinberger et al., 2009, "Feature Hashing for Large Scale Multitask Learning";
      Fowler, Noll, Vo, FNV-1a; Appleby, MurmurHash3 (the finalizer).
    """

    num_buckets: int | tuple[int, ...]
    seed: int
    names: tuple[str, ...]

    def __init__(
        self, sizes: int | Sequence[int], seed: int = 0, names: Sequence[str] = ()
    ):
        several = np.ndim(sizes) > 0
        given: Any = sizes if several else [sizes]
        own = tuple(map(operator.index, given))
        if not all(2 <= size <= np.iinfo(np.int32).max for size in own):
            raise ValueError(
                f"HashIds: sizes must be from 2 to 2147483647, got {sizes}. Id 0 is "
                "for missing words, and ids are int32."
            )
        if isinstance(names, str):
            raise TypeError(f"HashIds: names must be a list of names, got {names!r}.")
        if len(set(names)) < len(names) or several and names and len(names) != len(own):
            raise ValueError(
                f"HashIds: names must be {len(own) if several else 'any number of'} "
                f"different names, one for each of the sizes, got {list(names)}."
            )
        buckets = own if several else own[0]
        vars(self).update(
            num_buckets=buckets, seed=operator.index(seed), names=tuple(names)
        )

    def sizes(self) -> list[int]:
        """Returns the number of ids of each column, the rows of its table."""
        if isinstance(self.num_buckets, int):
            return [self.num_buckets] * max(len(self.names), 1)
        return list(self.num_buckets)

    def ids(self, table: PyTree) -> dict[str, Any]:
        """Returns the ids of the columns of a table, as `Vocabulary.ids` does.

        Args:
          table: a dict of columns, a data frame, an Arrow table, or an iterable of
            these. Columns that are not in `names` are ignored.

        Returns:
          A dict of int32 `[n]`, or of SegmentTensors for columns of lists.

        Raises:
          ValueError: there are no `names`, or the table has none of them.
        """
        if not self.names:
            raise ValueError(
                "HashIds.ids: the columns have no names. Make it by HashIds(sizes, "
                "names=[...]), since ids depend on the position of a column."
            )
        encode = lambda name, words: self._ids_of(self.names.index(name), words)
        return _arrow.ids_of_table(table, self.names, encode)

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
        count = None if isinstance(self.num_buckets, int) else len(self.num_buckets)
        place = _arrow.place_of(column, self.names, count)
        return self._ids_of(place, _arrow.as_flat_words(words))

    def _ids_of(self, column: int, words: _arrow.Words) -> np.ndarray:
        sizes = self.num_buckets
        size = sizes if isinstance(sizes, int) else sizes[column]
        salt = _mix_int(_mix_int(self.seed + 1) + column)
        return _hash(words.distinct, salt, size)[words.places]


def _hash(words: Any, salt: int, size: int) -> np.ndarray:
    """Returns the ids of a BinaryArray `[k]`, int32; 0 for the empty word."""
    lengths, text = _arrow.lengths_and_bytes(words)
    starts = np.cumsum(lengths) - lengths
    ids = np.zeros(len(lengths), np.int32)
    # The matrix is as wide as its longest word, so its size is bounded.
    step = max(_MAX_CELLS // max(int(lengths.max(initial=0)), 1), 1)
    for at in range(0, len(lengths), step):
        word_lengths, begin = lengths[at : at + step], starts[at : at + step]
        places = begin[:, None] + np.arange(int(word_lengths.max()))
        matrix = text[np.minimum(places, len(text) - 1)]
        hashed = hash_words(matrix, word_lengths, salt) % np.uint64(size - 1)
        ids[at : at + step] = np.where(word_lengths > 0, hashed + np.uint64(1), 0)
    return ids


def _mix_int(x: int) -> int:
    return int(mix(np.array([x & _MASK], np.uint64))[0])
