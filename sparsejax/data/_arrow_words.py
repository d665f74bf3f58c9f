"""Columns of categories in pyarrow: words that stay in pyarrow's buffers.

pyarrow counts words and finds them in a list by hashing; NumPy would sort them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from sparsejax.data import _text
from sparsejax.data._text import Words


def as_numpy(array: Any, dtype: Any) -> np.ndarray:
    """The numbers of a pyarrow Array without nulls; its own method imports pandas."""
    content = array.buffers()[1]
    if content is None:
        return np.zeros(0, dtype)
    return np.frombuffer(content, dtype)[array.offset :][: len(array)]


class ArrowWords(NamedTuple):
    """A column of words: a BinaryArray `[n]` without nulls."""

    array: Any

    @classmethod
    def join(cls, parts: list["ArrowWords"]) -> "ArrowWords":
        import pyarrow as pa

        return cls(pa.concat_arrays([part.array for part in parts]))

    def __len__(self) -> int:
        return len(self.array)

    def trim(self, blank: bytes) -> "ArrowWords":
        """Words without the blanks around them."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found: Any = pc
        text = found.ascii_trim(self.array.view(pa.string()), blank.decode())
        return ArrowWords(text.view(pa.binary()))

    def spans(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A text, and where in it each word begins and ends."""
        _, offsets, content = self.array.buffers()
        places = np.frombuffer(offsets, np.int32)[self.array.offset :][: len(self) + 1]
        text = np.frombuffer(content, np.uint8) if content else np.zeros(0, np.uint8)
        return text, places[:-1], places[1:]

    def lengths(self) -> np.ndarray:
        """The bytes of each word, `[n]`."""
        _, begin, end = self.spans()
        return end - begin

    def words(self) -> Iterator[Words]:
        """The words as a matrix of bytes, some at a time."""
        return _text.cut_words(*self.spans())

    def find(self, known: "ArrowWords") -> np.ndarray:
        """The position of each word in `known`, int32 `[n]`; -1 where it is not."""
        import pyarrow.compute as pc

        compute: Any = pc
        found = compute.index_in(self.array, value_set=known.array)
        return as_numpy(found.fill_null(-1), np.int32)

    def counts(self) -> tuple[list[bytes], list[int]]:
        """The distinct words, and how often each occurs."""
        import pyarrow.compute as pc

        compute: Any = pc
        found = compute.value_counts(self.array)
        return found.field(0).to_pylist(), found.field(1).to_pylist()
