"""The versions of a store, and the version at which each row last changed.

A version is a number that grows with each change of a table of the store. Each table
keeps an int64 for each row: the version at which the row last changed. So the memory is
bounded by the number of rows, and the rows that changed since any version are known.

Numbers alone do not tell what a store contains: a trainer that is started again from a
file repeats numbers with other rows. So a version is a number of a *run*, which has a
random id. A store begins a run at its first change, and again at its first change after
it took over the version of a file. Two stores of one run and version have the same
rows.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from sparsejax.store import _mapped


_BLOCK = 1 << 12  # rows


class History:
    """The versions of a store, which its tables share."""

    def __init__(self):
        self.version = 0
        self.known_since = 0  # the changes since this version are known, not before
        self.run = ""  # its id
        self._process: int | None = None  # the one that began the run
        self._is_joined = False

    def advance(self) -> int:
        """Begins a change, and returns its version."""
        if not self._is_joined:
            if self._process != os.getpid():  # a forked child has a run of its own
                self._process, self.run = os.getpid(), secrets.token_hex(8)
            self.version += 1
        return self.version

    @contextlib.contextmanager
    def one_change(self) -> Iterator[None]:
        """Gives all changes within it one version."""
        self.advance()
        self._is_joined = True
        try:
            yield
        finally:
            self._is_joined = False

    def forget(self) -> None:
        """Begins anew: any row may have changed, before the version that begins."""
        self._process = None
        self.known_since = self.advance()

    def follow(self, run: str, version: int) -> None:
        """Takes over the version of a file."""
        self.run, self.version, self._process = run, version, None


class RowVersions:
    """The version at which each row of a table last changed; 0 for never.

    The largest version of each block of rows is kept, too. So a table of a billion rows
    is not read to find a thousand that changed, and takes memory only for their blocks.

    Args:
      height: the number of rows.
    """

    def __init__(self, height: int):
        self._rows = _mapped.zeros((height,), np.int64)
        self._blocks = np.zeros((-(-height // _BLOCK),), np.int64)

    def mark(self, rows: np.ndarray, versions: Any) -> None:
        """Sets the versions of distinct rows, one for each or one for all."""
        self._rows[rows] = versions
        np.maximum.at(self._blocks, rows // _BLOCK, versions)

    def since(self, version: int) -> np.ndarray:
        """Returns the rows that changed after a version, int64, ascending."""
        parts = [np.zeros((0,), np.int64)]
        for start in np.flatnonzero(self._blocks > version) * _BLOCK:
            is_later = self._rows[start : start + _BLOCK] > version
            parts.append(start + np.flatnonzero(is_later))
        return np.concatenate(parts)
