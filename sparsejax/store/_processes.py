"""Saves of several processes, in a directory that all of them see.

Process k of P writes `path/STAMP/k-of-P`, with one stamp for each save. When all have
written, process 0 replaces the file `path/current`, which has the stamp: a reader sees
the older save or the new one, never parts of both. Then it removes other saves.

An error of one process, such as a full disk, is raised in all of them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from sparsejax._files import replacing


T = TypeVar("T")

_STAMP_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that share the rows of a store.

    Args:
      process, count: the index of this process, and P. With one process, a save is a
        file, and nothing waits.
      gather: the arrays `[P, ...]` of all processes, from the array of each. A
        collective.
    """

    process: int = 0
    count: int = 1
    gather: Callable[[np.ndarray], np.ndarray] = lambda x: x[None]

    def run(self, work: Callable[[], T]) -> T:
        """Runs `work()`; raises everywhere if any process raises. A collective."""
        if self.count == 1:
            return work()
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
                f"KVStore: process {failed[0]} of {self.count} failed, see its error. "
                "Nothing was saved or loaded."
            )
        return result  # type: ignore

    def own_path(self, path: Any) -> Any:
        """Returns the path of the file of this process, if there are several."""
        if self.count == 1:
            return path
        return f"{os.fspath(path)}.{self.process}-of-{self.count}"

    def save(self, path: Any, write: Callable[[str], Any]) -> None:
        """Makes a save: `write(path)` writes the file of this process. A collective."""
        if self.count == 1:
            write(path)
            return
        random = np.frombuffer(secrets.token_bytes(_STAMP_BYTES), np.uint8)
        stamp = self.gather(random)[0].tobytes().hex()
        own_path = self._own(path, stamp)

        def write_own():
            os.makedirs(os.path.dirname(own_path), exist_ok=True)
            write(own_path)

        def commit():
            if self.process == 0:
                with replacing(os.path.join(path, "current")) as file:
                    file.write(stamp.encode())
                for name in os.listdir(path):
                    if _is_stamp(name) and name != stamp:
                        shutil.rmtree(os.path.join(path, name), ignore_errors=True)

        self.run(write_own)
        self.run(commit)

    def saved(self, path: Any) -> str:
        """Returns the file of this process of the last whole save. A collective."""
        if self.count == 1:
            return path

        def read():
            with open(os.path.join(path, "current")) as file:
                stamp = file.read(100)
            if not _is_stamp(stamp):
                raise ValueError(f"{path}: the file 'current' is damaged.")
            return stamp

        stamp = self.run(read)
        stamps = self.gather(np.frombuffer(bytes.fromhex(stamp), np.uint8))
        if (stamps != stamps[0]).any():
            raise ValueError(
                f"{path}: the processes see different saves. Call load when no process "
                "saves, in a directory that all of them share."
            )
        return self._own(path, stamp)

    def _own(self, path: Any, stamp: str) -> str:
        return os.path.join(path, stamp, f"{self.process}-of-{self.count}")


def _is_stamp(name: str) -> bool:
    return re.fullmatch(f"[0-9a-f]{{{2 * _STAMP_BYTES}}}", name) is not None
