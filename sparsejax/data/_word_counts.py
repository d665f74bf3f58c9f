"""WordCounts: how often each word of a column occurs, counted part by part."""

from collections.abc import Iterable

import numpy as np

from sparsejax.data import _short_words, _text
from sparsejax.data._arrow_words import ArrowWords
from sparsejax.data._text import Words


class WordCounts:
    """Counts of words; takes memory for each distinct word.

    Short words are counted as integers, by sorting many at once.

    Args:
      most_waiting: how many words may wait to be counted at once: a part of a column
        has nearly as many distinct words as all of it.
    """

    def __init__(self, most_waiting: int):
        self._counts: dict[bytes, int] = {}  # of parts that have long words
        self._keys = np.zeros(0, np.uint64)  # short words, and their counts
        self._key_counts = np.zeros(0, np.int64)
        self._waiting: list[np.ndarray] = []
        self._waiting_arrow: list[ArrowWords] = []
        self._most_waiting = most_waiting

    def add(self, words: Words | ArrowWords) -> None:
        keys = _short_words.as_keys(words)
        if keys is not None:
            self._waiting.append(keys)
            if sum(map(len, self._waiting)) > self._most_waiting:
                self._count_waiting()
        elif isinstance(words, ArrowWords):
            self._waiting_arrow.append(words)
            if 4 * sum(map(len, self._waiting_arrow)) > self._most_waiting:
                self._count_waiting()
        else:
            found, counts = np.unique(_text.as_bytes(words), return_counts=True)
            self._add_counts(found.tolist(), counts.tolist())

    def total(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct words, `S[k]` in ascending order, and their counts, int64."""
        self._count_waiting()
        own = self._counts
        words = np.array(list(own), "S") if own else np.zeros(0, "S1")
        counts = np.fromiter(own.values(), np.int64, len(own))
        return _sum(
            np.concatenate([words, _short_words.as_words(self._keys)]),
            np.concatenate([counts, self._key_counts]),
        )

    def _count_waiting(self) -> None:
        if self._waiting_arrow:
            self._add_counts(*ArrowWords.join(self._waiting_arrow).counts())
        waiting = np.concatenate([np.zeros(0, np.uint64), *self._waiting])
        self._waiting, self._waiting_arrow = [], []
        keys, counts = np.unique(waiting, return_counts=True)
        self._keys, self._key_counts = _sum(
            np.concatenate([self._keys, keys]),
            np.concatenate([self._key_counts, counts]),
        )

    def _add_counts(self, words: Iterable[bytes], counts: Iterable[int]) -> None:
        own = self._counts
        for word, n in zip(words, counts):
            own[word] = own.get(word, 0) + n


def _sum(words: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct words, ascending, and the sum of the counts of each."""
    order = np.argsort(words)
    words, counts = words[order], counts[order]
    is_first = np.append(True, words[1:] != words[:-1])[: len(words)]
    sums = np.add.reduceat(counts, np.flatnonzero(is_first)) if len(words) else counts
    return words[is_first], sums.astype(np.int64)
