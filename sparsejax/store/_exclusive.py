"""Files of one store at a time: made whole, locked, and still found at their path."""

import contextlib
import io
import os
import pathlib
import secrets
from collections.abc import Callable
from typing import Any, BinaryIO


try:
    import fcntl
except ImportError:  # not a POSIX system: files are not locked
    fcntl: Any = None


def create(
    path: str | os.PathLike[str], write: Callable[[io.BufferedRandom], Any]
) -> io.BufferedRandom:
    """Makes a file that appears at `path` whole, and locked if locks exist.

    Args:
      path: symbolic links are followed.
      write: writes the content.

    Returns:
      The file, open for reading and writing. The lock (of `flock`) ends when the file
      is closed.

    Raises:
      FileExistsError: there is a file at `path`, perhaps since a moment ago.
    """
    path = pathlib.Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = open(temporary, "x+b")
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            lock(file)
        write(file)
        file.flush()
        os.fsync(file.fileno())
        _rename_to_new(temporary, path)
    except BaseException:
        file.close()
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return file


def _rename_to_new(temporary: pathlib.Path, path: pathlib.Path) -> None:
    """Gives a file the name `path`, or raises FileExistsError."""
    try:
        os.link(temporary, path)  # one step, unlike a check and a rename
    except FileExistsError:
        raise
    except OSError:  # a file system without links: an empty file reserves the name
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            os.replace(temporary, path)
        except OSError:
            path.unlink()
            raise


def lock(file: BinaryIO) -> bool:
    """Locks a file until it is closed. Returns False if it is locked already.

    Raises:
      OSError: its file system has no locks.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: io.IOBase) -> None:
    """Ends the lock of a file, also for other processes that have it open."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_UN)


def is_at(file: io.IOBase | BinaryIO, path: str | os.PathLike[str]) -> bool:
    """Returns True if an open file is the one at `path`, not removed or replaced."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(file.fileno()))
