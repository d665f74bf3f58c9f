"""Named sets of ids, shared by tests and benchmarks.

A case says which rows a batch reads. Every operation that takes ids is tested on all of
them, so that no test forgets the odd ones.
"""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class IdCase:
    """Ids into a table of `height` rows; those out of range name no row."""

    name: str
    ids: np.ndarray
    height: int

    @property
    def padded(self) -> np.ndarray:
        """The ids and empty slots up to nine: one compiled program for most cases."""
        missing = 9 - self.ids.size
        if self.ids.ndim != 1 or self.ids.dtype.itemsize < 4 or missing < 0:
            return self.ids
        return np.append(self.ids, np.full(missing, self.height, self.ids.dtype))


def zipf(n: int, height: int, *, exponent: float = 1.1, seed: int = 0) -> np.ndarray:
    """`n` ids as data has them: few rows often, most rows rarely, in no order."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, height + 1, dtype=np.float64) ** -exponent
    ranks = rng.choice(height, size=n, p=weights / weights.sum())
    return rng.permutation(height)[ranks].astype(np.int32)


def _case(name, ids, height, dtype: Any = np.int32):
    return IdCase(name, np.asarray(ids, dtype), height)


ID_CASES = (
    _case("distinct", [4, 0, 6, 2], 7),
    _case("duplicates", [4, 0, 4, 2, 0, 4], 7),
    _case("all_one_row", [3] * 6, 7),
    _case("every_row", [6, 5, 4, 3, 2, 1, 0], 7),
    _case("empty", [], 7),
    _case("single", [6], 7),
    _case("one_row_table", [0, 0, 1, -1], 1),
    _case("padded_with_height", [2, 5, 2, 7, 7, 7], 7),
    _case("only_padding", [7, 7, 7], 7),
    _case("out_of_range", [2, -1, 7, 8, -7, -8, 2**31 - 1, -(2**31), 6], 7),
    _case("int8", [4, -1, 4, 100, -128], 7, np.int8),
    # An id and the height that its type cannot hold.
    _case("uint8", [4, 255, 4, 0, 7], 300, np.uint8),
    _case("uint32", [4, 2**32 - 1, 4, 2**31, 7], 7, np.uint32),
    # Cut to 32 bits, some of these would name a row.
    _case("int64", [4, -1, 4, 2**32 + 2, -(2**32) + 3, 2**63 - 1], 7, np.int64),
    _case("uint64", [4, 2**32 + 2, 4, 2**64 - 1], 7, np.uint64),
    _case("matrix", [[4, 0, 7], [4, -1, 2]], 7),
    _case("scalar", 3, 7),
    _case("cube", [[[1, 2], [3, 1]], [[0, 6], [9, 1]]], 7),
    _case("zipf", zipf(64, 101), 101),
)

# Those that a SelectedRows can have: one axis of slots.
ROW_CASES = tuple(case for case in ID_CASES if case.ids.ndim == 1)


def names(cases) -> list[str]:
    """The cases' names, for pytest's `ids=`."""
    return [case.name for case in cases]
