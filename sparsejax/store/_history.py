"""The versions of a store, and the version at which each row last changed.

A version is a number that grows with each change of a table of the store. Each table
keeps an int64 for each row: the version at which the row last changed. So the memory is
bounded by the number of rows, and the rows that changed since any version are known.

Numbers alone do not tell what a store contains: a trainer that is killed and goes on
from a file repeats numbers with other rows. So versions belong to branches. The store
begins a branch, with a random name, at its first change, and again at its first change
after it took over the versions of a file. Two stores have the same rows if they have
the same version on the same branch.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sparsejax.store import _memory


# The schema of `History.description`, for `check_json`; `start` is the version before
# the first one of a branch.
BRANCHES = [{"name": str, "start": int}]
SAVED = {"version": int, "known_since": int, "branches": BRANCHES}

_MAX_VERSION = 1 << 62  # versions
_MAX_BRANCHES = 64  # followers that are older than this many restarts are refused
_BLOCK, _MAX_BLOCKS = 1 << 12, 1 << 8  # rows of a block, blocks read at once


class History:
    """The versions of a store, which its tables share."""

    def __init__(self):
        self.version = 0
        self.known_since = 0  # the changes since this version are known, not before
        self.branches: list[dict[str, Any]] = []  # as in the header of a file
        self._process: int | None = None  # the one that began the last branch
        self._is_joined = False

    def advance(self) -> int:
        """The version of a change that begins."""
        if not self._is_joined:
            if self._process != os.getpid():  # a forked child has a branch of its own
                self._process = os.getpid()
                branch = {"name": secrets.token_hex(8), "start": self.version}
                self.branches = [*self.branches[1 - _MAX_BRANCHES :], branch]
            self.version += 1
        return self.version

    @contextlib.contextmanager
    def one_change(self) -> Iterator[None]:
        """All changes within it have one version."""
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
        self.branches = self.branches[-1:]

    def follow(self, description: dict[str, Any]) -> None:
        """Takes over the version and the branches of a file."""
        self.version = description["version"]
        self.known_since = description.get("known_since", self.known_since)
        self.branches = description["branches"]
        self._process = None

    def description(self) -> dict[str, Any]:
        """The part about versions in the header of a saved store, see `SAVED`."""
        return {
            "version": self.version,
            "known_since": self.known_since,
            "branches": self.branches,
        }

    def has_passed(self, branches: Sequence[dict[str, Any]], version: int) -> bool:
        """Returns True if the store had this version, of a file with these branches."""
        return version <= self.version and _is_same(self.branches, branches, version)

    def is_passed_by(self, branches: Sequence[dict[str, Any]], version: int) -> bool:
        """Returns True if a store with these branches and version had this one."""
        return self.version <= version and _is_same(
            self.branches, branches, self.version
        )


def _is_same(
    ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], version: int
) -> bool:
    """Returns True if both made this version on the same branch."""
    if not version:
        return True  # nothing had changed
    names = [
        next((x["name"] for x in reversed(branches) if x["start"] < version), None)
        for branches in (ours, theirs)
    ]
    return names[0] is not None and names[0] == names[1]


def check_versions(call: str, path: Any, found: dict[str, Any]) -> None:
    """Raises a ValueError unless the versions in a file may be versions of a store."""
    version, starts = found["version"], [x["start"] for x in found["branches"]]
    is_ordered = starts == sorted(starts) and all(x < version for x in starts)
    if version >= _MAX_VERSION or not is_ordered or bool(starts) != bool(version):
        raise ValueError(
            f"{call}: {path} is damaged: version {version} cannot be one of its "
            "branches. Use another copy."
        )


class RowVersions:
    """The version at which each row of a table last changed; 0 for never.

    The largest version of each block of rows is kept, too. So a table of a billion rows
    is not read to find a thousand that changed, and takes memory only for their blocks.

    Args:
      height: the number of rows.
    """

    def __init__(self, height: int):
        self._rows = _memory.zeros((height,), np.int64)
        self._blocks = np.zeros((-(-height // _BLOCK),), np.int64)

    def mark(self, rows: np.ndarray, versions: Any) -> None:
        """Sets the versions of distinct rows, one for each or one for all."""
        self._rows[rows] = versions
        np.maximum.at(self._blocks, rows // _BLOCK, versions)

    def at(self, rows: np.ndarray) -> np.ndarray:
        """The versions of rows."""
        return np.take(self._rows, rows, mode="clip")

    def since(self, version: int) -> np.ndarray:
        """The rows that changed after a version, int64, ascending."""
        blocks = np.flatnonzero(self._blocks > version)
        # Runs of neighbours, not too long, are read at once.
        is_first = (np.diff(blocks, prepend=-2) != 1) | (blocks % _MAX_BLOCKS == 0)
        found = [np.zeros((0,), np.int64)]
        for run in np.split(blocks, np.flatnonzero(is_first)[1:]):
            if run.size:
                start, stop = run[0] * _BLOCK, (run[-1] + 1) * _BLOCK
                here = np.flatnonzero(self._rows[start:stop] > version)
                found.append(start + here)
        return np.concatenate(found)
