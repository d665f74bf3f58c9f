"""Words of NumPy arrays, which the keys of a store are made of.

A word is a string of bytes: text in UTF-8, an integer in decimal. A missing value
(None, NaN, a null) is the empty word.
"""

from typing import NamedTuple

import numpy as np

from sparsejax.data import _arrow


class Column(NamedTuple):
    """A column of words.

    Args:
      words: bytes `S[k]`, distinct values as words.
      rows: int64 `[n]`, the position in `words` of each row.
    """

    words: np.ndarray
    rows: np.ndarray

    def per_row(self, per_word: np.ndarray) -> np.ndarray:
        """Returns for each row the value of its word."""
        return per_word[self.rows]


def as_column(call: str, data: np.ndarray, name: str = "words") -> Column:
    """Returns an array of strings, bytes or integers `[n]` as words."""
    found = _arrow.as_column(call, data, name)
    return Column(np.array(found.words.to_pylist(), "S"), found.rows)
