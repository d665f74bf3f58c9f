"""Saves of several processes, each with a file of its own.

The files of one save have the same stamp. Process k of P has the file `F = path.k-of-P`
and the next file `N = F.next`, a save takes these steps:

1. settle     an interrupted save is completed or dropped, see below
2. write      N, with the new stamp
3. agree      all processes have written N                      (a collective)
4. rename     N replaces F

If processes are killed in step 2, every F is of the older save. If they are killed in
step 4, each process has the new save in F or in N. So in any state one of the two is
complete. `settle` finds it: each process tells the stamps of F and N, and a stamp that
all of them have is completed by renaming; other next files are removed.

An error of one process, such as a full disk, is raised in all of them.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from sparsejax._files import as_path
from sparsejax.store import _saving
from sparsejax.store._init_table import own_path


T = TypeVar("T")

_STAMP_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that share the rows of a store.

    Args:
      process, count: the index of this process, and P.
      gather: the arrays `[P, ...]` of all processes, from the array of each. A
        collective.
    """

    process: int
    count: int
    gather: Callable[[np.ndarray], np.ndarray]

    def run(self, call: str, work: Callable[[], T]) -> T:
        """`work()`; if it raises in any process, all of them raise. A collective."""
        error, result = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        failed = np.flatnonzero(self.gather(np.array(error is not None)))
        if error is not None:
            raise error
        if failed.size:
            raise RuntimeError(
                f"{call}: process {int(failed[0])} of {self.count} failed. See the "
                "error that it raises."
            )
        return result  # pyright: ignore[reportReturnType]


def save(
    processes: Processes, call: str, path: Any, write: Callable[[Any, str], None]
) -> None:
    """Writes the files of a save, all or none of which `load` reads. A collective.

    Args:
      processes: of the store.
      call: for messages.
      path: of the save.
      write: `f(path, stamp)` writes the rows of this process to a file.
    """
    own, following = _paths(processes, call, path)
    settle(processes, call, path)
    random = np.frombuffer(secrets.token_bytes(_STAMP_BYTES), np.uint8)
    stamp = processes.gather(random)[0].tobytes().hex()
    processes.run(call, lambda: write(following, stamp))
    os.replace(following, own)


def settle(processes: Processes, call: str, path: Any) -> bool:
    """Completes or drops an interrupted save. A collective.

    Returns:
      True if the files of all processes are now of one save.
    """
    own, following = _paths(processes, call, path)
    here = np.stack([_stamp_in(call, own), _stamp_in(call, following)])
    stamps = processes.gather(here)  # [P, 2, bytes]
    chosen = _common(stamps)
    if chosen is None:
        return False

    def tidy():
        if (here[0] != chosen).any():
            os.replace(following, own)
        elif os.path.exists(following):
            os.unlink(following)

    processes.run(call, tidy)
    return True


def check_one_save(processes: Processes, call: str, path: Any) -> None:
    """Settles, and raises unless there are files of one save. A collective."""
    own, _ = _paths(processes, call, path)
    is_one = settle(processes, call, path)

    def check():
        if is_one:
            return
        with open(own, "rb"):  # raises FileNotFoundError
            pass
        raise ValueError(
            f"{call}: {own} and the files of the other processes are not of one save: "
            "one of them is missing, damaged, or of another save. Load an older save."
        )

    processes.run(call, check)


def _common(stamps: np.ndarray) -> np.ndarray | None:
    """A stamp that every process has; a next file's, if both have one."""
    for which in (1, 0):
        for stamp in stamps[:, which]:
            if stamp.any() and (stamps == stamp).all(axis=2).any(axis=1).all():
                return stamp
    return None


def _paths(processes: Processes, call: str, path: Any) -> tuple[str, str]:
    own = own_path(as_path(call, path), processes.process, processes.count)
    return own, f"{own}.next"


def _stamp_in(call: str, path: str) -> np.ndarray:
    """The stamp of a file; zeros if there is no whole file."""
    try:
        stamp = bytes.fromhex(_saving.stamp_in(call, path) or "")
    except (OSError, ValueError):
        stamp = b""
    none = bytes(_STAMP_BYTES)
    return np.frombuffer(stamp if len(stamp) == len(none) else none, np.uint8)
