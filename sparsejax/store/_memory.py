"""Where the arrays of a table are: in memory, or in a file that is mapped into it.

Both start as zeros that take no room: pages of memory, or of a sparse file, are there
once something is written to them.
"""

import contextlib
import math
import mmap
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsejax._files import replacing
from sparsejax.store import _layout


try:
    import fcntl
except ImportError:  # not a POSIX system: then nobody watches over a file
    fcntl: Any = None


MAGIC = b"sparsejax table 2\n"
_PAGE = 4096
_LARGE = 1 << 20


def is_mapped_table(path: str | os.PathLike[str]) -> bool:
    """Whether a file is that of a memory-mapped table."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        # Whatever its version: it is somebody's table.
        return file.read(len(MAGIC) - 2) == MAGIC[:-2]


class Memory:
    """The arrays of a table, zeros at first.

    Args:
      specs: shapes and types of the arrays.
      initial: what some of them, by their place, start with instead.
    """

    path = None

    def __init__(self, specs: Sequence[Any], initial: Mapping[int, np.ndarray]):
        self.arrays = [
            np.array(initial[k], order="C") if k in initial else _zeros(spec)
            for k, spec in enumerate(specs)
        ]

    def describe(self, header: dict[str, Any]) -> None:
        """Nothing to do: memory is gone when the process is."""

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Gives the memory back."""
        self.arrays = []


class MappedFile:
    """The same, in a memory-mapped file that is made unless it is there.

    Args:
      call: for messages.
      path: of the file.
      specs, initial: as above; `initial` is for a new file.
      header: the table's description; one that is there must agree.
      name: of the table, for messages.
    """

    def __init__(
        self,
        call: str,
        path: str | os.PathLike[str],
        specs: Sequence[Any],
        initial: Mapping[int, np.ndarray],
        header: dict[str, Any],
        name: str,
    ):
        path = pathlib.Path(path)
        self.path = os.fspath(path)
        start = _round_up(len(MAGIC) + 12 + len(str(header)) * 2)
        offsets, end = [], start
        for spec in specs:
            offsets.append(end)
            end = _round_up(end + _size(spec))
        if not path.exists():
            free = shutil.disk_usage(path.parent).free
            if end > free:
                raise OSError(
                    f"{call}: {path} may grow to {end} bytes, and its file system has "
                    f"{free} left. When that is full, writing to the table kills the "
                    "process. Make room, or use another file system."
                )
            with replacing(path) as file:
                _layout.write_header(file, MAGIC, header | {"start": start})
                file.truncate(end)
                for k, values in initial.items():
                    file.seek(offsets[k])
                    file.write(_layout.as_bytes(values))
        self._file = open(path, "r+b")
        try:
            _lock(call, path, self._file)
            found = _layout.read_header(call, path, self._file, MAGIC)
            self.found = found
            if found.get("loading"):
                raise ValueError(
                    f"{call}: {path} is half loaded: the process that loaded a saved "
                    "store into it was stopped before it was done. Delete the file, "
                    "call init again, and then load."
                )
            fields = "shape", "dtype", "state", "initialized", "key"
            _layout.check_same(call, path, name, found, header, fields)
            size = os.fstat(self._file.fileno()).st_size
            expected = end - start + found["start"]
            if size != expected:
                raise ValueError(
                    f"{call}: {path} has {size} bytes instead of {expected}: it was "
                    "cut off."
                )
            self._map = mmap.mmap(self._file.fileno(), size)
        except BaseException:
            self._file.close()
            raise
        _advise(self._map, "MADV_RANDOM")  # rows are read here and there: no read-ahead
        self._start = found["start"]
        shift = self._start - start
        self.arrays = [
            np.frombuffer(self._map, s.dtype, math.prod(s.shape), at + shift).reshape(
                s.shape
            )
            for s, at in zip(specs, offsets)
        ]

    def describe(self, header: dict[str, Any]) -> None:
        """Writes another description of the table, to the disk."""
        self._file.seek(0)
        _layout.write_header(self._file, MAGIC, header | {"start": self._start})
        self._file.flush()
        os.fsync(self._file.fileno())

    def flush(self) -> None:
        """Waits until all that was written is on the disk."""
        self._map.flush()

    def close(self) -> None:
        """Flushes, and lets other stores have the file."""
        self.flush()
        self.arrays = []
        del self._map  # it goes when the last view of it has gone
        _unlock(self._file)
        self._file.close()


def _size(spec: Any) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def _round_up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _zeros(spec: Any) -> np.ndarray:
    """Zeros of which a page takes memory once it is written to.

    `np.zeros` asks for pages of 2 MB, each of which is cleared for the first row in it
    that is touched: 20 million rows of 32, touched at random, took 5 GB and 30 seconds.
    """
    size = _size(spec)
    if size < _LARGE:
        return np.zeros(spec.shape, spec.dtype)
    memory = mmap.mmap(-1, size)
    _advise(memory, "MADV_NOHUGEPAGE")
    return np.frombuffer(memory, spec.dtype).reshape(spec.shape)


def _advise(memory: mmap.mmap, name: str) -> None:
    """Tells the system how memory will be used, where it can be told."""
    advice = getattr(mmap, name, None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without that feature
            memory.madvise(advice)


def _lock(call: str, path: Any, file: Any) -> None:
    """Takes the file for this store alone; the lock goes with the process."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise RuntimeError(
            f"{call}: {path} is in use by another store, of this process or another "
            "one. A memory-mapped table belongs to one store at a time: close the "
            "other one first."
        ) from None


def _unlock(file: Any) -> None:
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_UN)
