"""Words of at most 8 bytes as integers, which are counted and found much faster.

Ids in files are mostly such words: numbers of users, hexadecimal hashes. The bytes of a
word are those of its integer, the first one the lowest; what it lacks is zeros, which
words do not end in. So 0 is the empty word.
"""

from typing import NamedTuple

import numpy as np

from sparsejax.data import _text
from sparsejax.data._arrow_words import ArrowWords
from sparsejax.data._text import Words


_WIDTH = 8
_MASKS = np.array([(1 << 8 * k) - 1 for k in range(_WIDTH + 1)], np.uint64)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 by the golden ratio


def as_keys(words: Words | ArrowWords) -> np.ndarray | None:
    """Words as integers, uint64 `[n]`; or None if one is longer."""
    if isinstance(words, Words):
        n, width = words.text.shape
        if width > _WIDTH:
            return None
        text = np.zeros((n, _WIDTH), np.uint8)
        text[:, :width] = words.text
        return text.view("<u8").reshape(n)
    text, begin, end = words.spans()
    lengths = end - begin
    if lengths.max(initial=0) > _WIDTH:
        return None
    text = np.append(text, np.zeros(_WIDTH, np.uint8))
    keys = _text.every(text, _WIDTH)[begin].view("<u8")
    return keys & _MASKS[lengths]


def as_words(keys: np.ndarray) -> np.ndarray:
    """Integers as words, `S8`."""
    return np.ascontiguousarray(keys, "<u8").view(f"S{_WIDTH}")


class Index(NamedTuple):
    """Where each word of a list is, by hashing with linear probing.

    Args:
      keys: uint64 `[2^k]`, at most half of them used; 0 for an unused one.
      values: int32 `[2^k]`.
    """

    keys: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, words: np.ndarray, values: np.ndarray) -> "Index | None":
        """Of distinct words `S[n]` that are not empty; None if one is longer."""
        if words.dtype.itemsize > _WIDTH:
            return None
        keys = words.astype(f"S{_WIDTH}").view("<u8")
        size = 1 << max(2 * len(keys) - 1, 1).bit_length()
        index = cls(np.zeros(size, np.uint64), np.zeros(size, np.int32))
        left, slots = np.arange(len(keys)), index._slots(keys)
        while len(left):
            empty = index.keys[slots] == 0
            # Of several that are first at a slot, the last one stays there.
            index.keys[slots[empty]] = keys[left[empty]]
            placed = index.keys[slots] == keys[left]
            index.values[slots[placed]] = values[left[placed]]
            left, slots = left[~placed], index._next(slots[~placed])
        return index

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The value of each word, int32 `[n]`; 0 where it is not in the list."""
        slots = self._slots(keys)
        found = self.keys[slots]
        out = np.where(found == keys, self.values[slots], np.int32(0))
        left = np.flatnonzero((found != keys) & (found != 0))
        slots = slots[left]
        while len(left):
            slots = self._next(slots)
            found, own = self.keys[slots], keys[left]
            hits = found == own
            out[left[hits]] = self.values[slots[hits]]
            going_on = ~hits & (found != 0)
            left, slots = left[going_on], slots[going_on]
        return out

    def _slots(self, keys: np.ndarray) -> np.ndarray:
        bits = len(self.keys).bit_length() - 1
        return ((keys * _GOLDEN) >> np.uint64(64 - bits)).astype(np.int64)

    def _next(self, slots: np.ndarray) -> np.ndarray:
        return (slots + 1) & (len(self.keys) - 1)
