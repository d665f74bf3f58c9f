"""Files that are replaced whole: a reader sees the old one or the new one.

A new file is written beside the old one, forced to disk, renamed over it (which is
atomic), and the directory is forced to disk as well. Whoever is killed in between
leaves a file with a name of its own, which the next one to write here takes away.
"""

import contextlib
import os
import pathlib
import platform
import threading
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to be written in the place of `path`; on an error that stays as it is.

    Of a link it is the file that the link points to.
    """
    path = pathlib.Path(os.path.realpath(path))
    _remove_abandoned(path)
    temporary = path.with_name(f"{_prefix(path)}{os.getpid()}-{threading.get_ident()}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _force_directory(path.parent)


def _prefix(path: pathlib.Path) -> str:
    return f".{path.name}.{platform.node()}."


def _remove_abandoned(path: pathlib.Path) -> None:
    """Takes away what processes of this machine that are gone have left."""
    for name in os.listdir(path.parent):
        pid = name.removeprefix(_prefix(path)).partition("-")[0]
        if name.startswith(_prefix(path)) and pid.isdigit() and not _is_alive(int(pid)):
            path.with_name(name).unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # alive, and another user's
        return True
    return True


def _force_directory(directory: pathlib.Path) -> None:
    """So that the new name outlives a crash of the machine, where that can be asked."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
