"""Host memory of a store: the arrays of a table, in memory or in a mapped file.

The arrays of a table start as zeros that take no space: pages of memory, or of a sparse
file, are allocated when first written.
"""

import contextlib
import io
import math
import mmap
import os
import pathlib
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from sparsejax._files import as_bytes
from sparsejax.store import _records


try:
    import fcntl
except ImportError:  # not a POSIX system: files are not locked
    fcntl: Any = None

MAGIC = b"sparsejax table 3\n"
_INIT = "sparsejax.store.KVStore.init"
_HEADER = _records.DESCRIPTION | {"loading?": bool, "journal?": str}
_START = 1 << 16  # of the rows, behind the header
_PAGE = 4096
# Only pages that are written count against the memory of the machine, so that a table
# may be larger. Python 3.11 and 3.12 do not name Linux's MAP_NORESERVE.
_UNRESERVED: dict[str, Any] = {}
if sys.platform == "linux":
    flags = (
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 1 << 14)
    )
    _UNRESERVED = {"flags": flags}
_LARGE = 1 << 20


# ------------------------------------------------------------------ arrays of a table


class Memory:
    """The arrays of a table, in memory.

    Args:
      specs: shapes and dtypes of the arrays.
      initial: first values, by position; the other arrays start as zeros.
    """

    path = None

    def __init__(self, specs: Sequence[Any], initial: Mapping[int, np.ndarray]):
        self.arrays = [
            np.array(initial[k], order="C")
            if k in initial
            else zeros(spec.shape, spec.dtype)
            for k, spec in enumerate(specs)
        ]

    def describe(self, header: dict[str, Any]) -> None:
        """Does nothing: there is no file."""

    def flush(self) -> None:
        """Does nothing: there is no file."""

    def close(self) -> None:
        """Frees the memory."""
        self.arrays = []


class MappedFile:
    """The arrays of a table, in a memory-mapped file.

    The file is locked until `close`, so that only one store has it open. A new file is
    locked before it appears at its path. A forked child shares the lock and does not
    end it.

    Args:
      path: of the file, which is created if it does not exist.
      specs, initial: as in `Memory`; `initial` is for a new file.
      header: the table's description, which must agree with the header of an existing
        file.
      name: of the table, for messages.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Sequence[Any],
        initial: Mapping[int, np.ndarray],
        header: dict[str, Any],
        name: str,
    ):
        path = pathlib.Path(path)
        self.path = os.fspath(path)
        self._process = os.getpid()
        offsets, end = [], _START
        for spec in specs:
            offsets.append(end)
            end += spec.size * np.dtype(spec.dtype).itemsize
            end += -end % _PAGE

        def write(file):
            file.write(_header_of(header))
            file.truncate(end)
            for k, values in initial.items():
                file.seek(offsets[k])
                file.write(as_bytes(values))

        file = _create(path, end, write)
        self.is_new = file is not None
        if file is None:
            if header["given"]:  # its weights would be lost
                raise ValueError(
                    f"{_INIT}: table {name!r} has an array, but {path} already exists. "
                    "Pass the shape to open the file, or use another path."
                )
            file = _open_locked(path)
        try:
            self.found = _read_header(path, file, header, name)
            size = os.fstat(file.fileno()).st_size
            if size != end:
                raise ValueError(
                    f"{_INIT}: {path} has {size} bytes instead of {end}: it was "
                    "truncated."
                )
            self._map = mmap.mmap(file.fileno(), size)
        except BaseException:
            file.close()
            raise
        # Unbuffered, since a forked child shares the position in the file.
        self._file = file.detach()
        _advise(self._map, "MADV_RANDOM")  # rows are read at random: no read-ahead
        self.arrays = [
            np.frombuffer(self._map, x.dtype, math.prod(x.shape), at).reshape(x.shape)
            for x, at in zip(specs, offsets)
        ]

    def describe(self, header: dict[str, Any]) -> None:
        """Replaces the description of the table, and waits for the disk."""
        self._file.seek(0)
        # In one write: a kill leaves the old header or the new one.
        self._file.write(_header_of(header))
        os.fsync(self._file.fileno())

    def flush(self) -> None:
        """Waits until all changes are on the disk.

        Raises:
          FileNotFoundError: the file was removed, or another one put in its place.
        """
        self._map.flush()
        if not _is_at(self._file, self.path):
            raise FileNotFoundError(
                f"{self.path} was deleted or replaced while this store had it "
                "open, so its rows end with this process. Call save to keep them."
            )

    def close(self) -> None:
        """Flushes, and releases the file to other stores."""
        self._map.flush()
        self.arrays = []
        del self._map  # unmapped when the last view of it is gone
        # Unlocked explicitly, since a forked child may have the file open for longer.
        # The child itself must not unlock it, since the lock is its parent's.
        if self._process == os.getpid() and fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


def _header_of(header: dict[str, Any]) -> bytes:
    """Returns the first bytes of the file."""
    encoded = _records.header_bytes(MAGIC, header)
    if len(encoded) > _START:
        raise ValueError(
            f"{_INIT}: the optimizer state has too many arrays for a file."
        )
    return encoded


def _create(
    path: pathlib.Path, size: int, write: Callable[[BinaryIO], Any]
) -> io.BufferedRandom | None:
    """Makes the file of a table, which appears whole and locked.

    Args:
      path: symbolic links are followed; its file system must have hard links.
      size: to which the file may grow.
      write: writes the content.

    Returns:
      The file, open for reading and writing; None if there is one already.
    """
    path = pathlib.Path(os.path.realpath(path))
    if path.exists():
        return None
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise OSError(
            f"{_INIT}: {path} may grow to {size} bytes, but its file system has only "
            f"{free} left, and writing to a mapped file on a full disk kills the "
            "process. Free some space, or use another file system."
        )
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = open(temporary, "x+b")
    try:
        _lock(file)
        write(file)
        file.flush()
        os.fsync(file.fileno())
        os.link(temporary, path)  # one step, unlike a check and a rename
    except FileExistsError:  # another process was faster
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return file


def _read_header(
    path: pathlib.Path, file: BinaryIO, header: dict[str, Any], name: str
) -> dict[str, Any]:
    """Reads the header of the file, which must describe this table."""
    file.seek(0)
    saved = _records.read_header(path, file, MAGIC, _HEADER)
    if saved.get("loading"):
        raise ValueError(
            f"{_INIT}: {path} is half loaded: the process that loaded a saved store "
            "or applied changes to it stopped before the end. Delete the file, call "
            "init again, and then load."
        )
    fields = "shape", "dtype", "state", "key", "keyed"
    _records.check_same(path, name, saved, header, fields)
    return saved


def _open_locked(path: pathlib.Path) -> io.BufferedRandom:
    """Opens the file of a table, and locks it until it is closed."""
    while True:
        file = open(path, "r+b")
        try:
            if not _lock(file):
                raise RuntimeError(
                    f"{_INIT}: {path} is in use by another store, in this process or "
                    "another one. Close that store first."
                )
            if _is_at(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # the file was replaced after it was opened


def _lock(file: BinaryIO) -> bool:
    """Locks a file until it is closed; returns False if it is locked already."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return True


def _is_at(file: io.IOBase | BinaryIO, path: str | os.PathLike[str]) -> bool:
    """Returns True if an open file is the one at `path`, not removed or replaced."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(file.fileno()))


def is_mapped_table(path: str | os.PathLike[str]) -> bool:
    """Returns True if a file belongs to a memory-mapped table, of any version."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(MAGIC) - 2) == MAGIC[:-2]


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Makes zeros in pages of 4 kB, each allocated when first written.

    `np.zeros` asks for pages of 2 MB, and the system clears a whole page for the first
    row touched in it: 20 million rows of 32, touched at random, took 5 GB and 30 s.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < _LARGE:
        return np.zeros(shape, dtype)
    try:
        memory = mmap.mmap(-1, size, **_UNRESERVED)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"sparsejax.store: the system has no {size} bytes of memory for an array "
            f"of shape {list(shape)} ({error}). Pass KVStore.init path=, to keep the "
            "table in a file."
        ) from error
    _advise(memory, "MADV_NOHUGEPAGE")
    return np.frombuffer(memory, dtype).reshape(shape)


def _advise(memory: mmap.mmap, name: str) -> None:
    """Calls `memory.madvise` if this system has that advice."""
    advice = getattr(mmap, name, None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without that feature
            memory.madvise(advice)
