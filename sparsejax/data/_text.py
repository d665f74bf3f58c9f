"""Words as a matrix of bytes, which a hash reads column by column."""

from typing import NamedTuple

import numpy as np


class Words(NamedTuple):
    """A column of words: uint8 `[n, L]`, each padded with zeros, and lengths `[n]`."""

    text: np.ndarray
    lengths: np.ndarray


def as_matrix(words: np.ndarray) -> Words:
    """NumPy's strings of bytes as a matrix of bytes, which can be hashed."""
    text = np.ascontiguousarray(words).view(np.uint8)
    text = text.reshape(len(words), words.dtype.itemsize)
    return Words(text, np.char.str_len(words))
