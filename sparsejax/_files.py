"""Atomic replacement of files, and safe reading of `.npz` archives.

`replacing` writes a temporary file next to the target, flushes it to disk, renames it
over the target (an atomic step) and flushes the directory to disk. A reader sees
either the old file or the new one, never a partial file. If the process is killed, its
temporary file remains; the next call that writes to the same path removes it.

`read_npz` checks every member of an archive before it reads any, and never unpickles.
"""

import contextlib
import math
import os
import pathlib
import platform
import struct
import threading
import zipfile
import zlib
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

import numpy as np


def as_path(call: str, path: Any) -> Any:
    """`path`, or a TypeError: `open` alone would accept an int as file descriptor."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"{call}: path must be a str or os.PathLike, got {path!r}.")
    return path


# ------------------------------------------------------------------ writing


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file for writing that replaces `path` at the end.

    If an error is raised, `path` stays unchanged. Symbolic links are followed.
    """
    path = pathlib.Path(os.path.realpath(path))
    prefix = f".{path.name}.{platform.node()}."
    _remove_abandoned(path.parent, prefix)
    temporary = path.with_name(f"{prefix}{os.getpid()}-{threading.get_ident()}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # so that the new name survives a crash of the machine
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_abandoned(directory: pathlib.Path, prefix: str) -> None:
    """Removes temporary files whose process no longer runs on this machine."""
    for name in os.listdir(directory):
        pid = name.removeprefix(prefix).partition("-")[0]
        if name.startswith(prefix) and pid.isdigit() and not _is_alive(int(pid)):
            (directory / name).unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process runs, but belongs to another user
        return True
    return True


# ------------------------------------------------------------------ archives


# What `zipfile` and `np.lib.format` raise for damaged content.
_DAMAGED = (
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def read_npz(
    call: str, path: Any, what: str, required: Collection[str] = ()
) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file, by name.

    Before any member is read, all are checked to be plain arrays whose shapes match
    their stored size. A damaged or hostile file therefore cannot run code, nor make
    this process allocate more memory than the size of the archive.

    Args:
      call: for messages.
      path: the file.
      what: what the file should be, for messages: "a file written by ...".
      required: names of the arrays that the file must contain.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is damaged, or not what it should be.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
            if not members.keys() >= set(required):
                raise ValueError(
                    f"expected arrays named {', '.join(required)}, found "
                    f"{', '.join(sorted(members))}"
                )
            for name, member in members.items():
                _check_member(archive, name, member)
            return {
                name: _read_member(archive, member) for name, member in members.items()
            }
    except _DAMAGED as error:
        reason = str(error).rstrip(".")
        raise ValueError(
            f"{call}: {os.fspath(path)} is not {what}: {reason}."
        ) from None


def _check_member(archive: zipfile.ZipFile, name: str, member: zipfile.ZipInfo) -> None:
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"array {name!r} has an unknown format version, {version}")
        stored = member.file_size - file.tell()
    if dtype.hasobject:
        raise ValueError(f"array {name!r} contains pickled objects")
    if math.prod(shape) * dtype.itemsize != stored:
        raise ValueError(
            f"array {name!r} has {stored} bytes, which do not match its header, "
            f"{dtype}{list(shape)}"
        )


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        file.read()  # zipfile verifies the checksum at the end
    return array
