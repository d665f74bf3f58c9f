"""Files: replaced whole, and archives read with care.

`replacing` writes a new file next to the old one, forces it to disk, renames it over
the old one (which is atomic) and forces the directory to disk. A reader sees the old
file or the new one, never a part. A process that is killed in between leaves a file
with its own name; the next call that writes to the same place removes it.

`read_npz` checks every member of an archive before it reads one, and never unpickles.
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
    """`path`, or a TypeError: `open` also accepts an int, as a file descriptor."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"{call}: path must be a str or an os.PathLike, got {path!r}.")
    return path


# ------------------------------------------------------------------ writing


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which replaces `path` at the end.

    On an error `path` stays as it was. A symbolic link is followed.
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
    """Removes the files of processes of this machine that no longer run."""
    for name in os.listdir(directory):
        pid = name.removeprefix(prefix).partition("-")[0]
        if name.startswith(prefix) and pid.isdigit() and not _is_alive(int(pid)):
            (directory / name).unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it runs, and belongs to another user
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

    All members are checked before one is read: that they are plain arrays, whose shapes
    agree with the bytes stored. So a damaged or hostile file runs no code and makes
    this process allocate no more than the archive holds.

    Args:
      call: for messages.
      path: of the file.
      what: what the file should be, for messages: "a file that ... wrote".
      required: names of arrays that must be there.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not such a file, or is damaged.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
            if not members.keys() >= set(required):
                raise ValueError(
                    f"it has the arrays {', '.join(sorted(members))}, not "
                    f"{', '.join(required)}"
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
            raise ValueError(f"its array {name!r} has the unknown version {version}")
        stored = member.file_size - file.tell()
    if dtype.hasobject:
        raise ValueError(f"its array {name!r} holds pickled objects")
    if math.prod(shape) * dtype.itemsize != stored:
        raise ValueError(
            f"its array {name!r} should be {dtype}{list(shape)}, but has {stored} bytes"
        )


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        file.read()  # to the end, where the checksum is compared
    return array
