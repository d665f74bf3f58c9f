"""Files that are replaced whole, and what is read from files that may be damaged.

`replacing` writes a temporary file next to the target, flushes it to disk, renames it
over the target (an atomic step) and flushes the directory to disk. A reader sees
either the old file or the new one, never a partial file. `create` does the same for a
file that must not be there yet.

A temporary file is locked while it is written. If the process is killed, the lock ends
and the file remains; the next call that writes to the same path removes it.

`read_npz` and `check_json` compare what a file says of itself with a schema, and its
sizes with the size of the file, before memory is allocated. Nothing is unpickled or
evaluated.
"""

import contextlib
import errno
import io
import math
import os
import pathlib
import platform
import re
import secrets
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np


try:
    import fcntl
except ImportError:  # not a POSIX system: files are not locked
    fcntl: Any = None


def as_path(call: str, path: Any) -> Any:
    """`path`, or a TypeError: `open` alone would accept an int as file descriptor."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"{call}: path must be a str or os.PathLike, got {path!r}.")
    return path


# ------------------------------------------------------------------ writing


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file for writing that replaces `path` at the end.

    If an error is raised, `path` stays unchanged. Symbolic links are followed. The new
    file has the permissions of the old one and, where the system allows it, its owner
    and group. A file that may not be written is refused. A FIFO or a device is written
    to as it is.
    """
    old = _status(path)
    if old is not None and not stat.S_ISREG(old.st_mode):
        with _Stream(io.FileIO(path, "wb")) as file:  # refuses a directory
            yield file
        return
    if old is not None and not os.access(path, os.W_OK):
        reason = os.strerror(errno.EACCES)
        raise PermissionError(errno.EACCES, reason, os.fspath(path))
    path = pathlib.Path(os.path.realpath(path))
    file, temporary = _open_temporary(path, old)
    try:
        with file:
            yield file
            _to_disk(file)
            if fcntl is None:  # such a system renames closed files only
                file.close()
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _directory_to_disk(path.parent)


class _Stream(io.BufferedWriter):
    """A FIFO or a device; some of these say that they can seek, and cannot."""

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        raise io.UnsupportedOperation("tell")


def create(
    path: str | os.PathLike[str], write: Callable[[io.BufferedRandom], Any]
) -> io.BufferedRandom:
    """Makes a file that appears at `path` whole, and locked if locks exist.

    Args:
      path: symbolic links are followed.
      write: writes the content.

    Returns:
      The file, open for reading and writing. The lock (of `flock`) ends when it is
      closed.

    Raises:
      FileExistsError: there is a file at `path`, perhaps since a moment ago.
    """
    path = pathlib.Path(os.path.realpath(path))
    file, temporary = _open_temporary(path, None)
    try:
        write(file)
        _to_disk(file)
        _rename_to_new(temporary, path)
    except BaseException:
        file.close()
        raise
    finally:
        temporary.unlink(missing_ok=True)
    _directory_to_disk(path.parent)
    return file


def _rename_to_new(temporary: pathlib.Path, path: pathlib.Path) -> None:
    """Gives a file the name `path`, or raises FileExistsError."""
    try:
        os.link(temporary, path)  # in one step, unlike a look and a rename
    except FileExistsError:
        raise
    except OSError:  # a file system without links: an empty file holds the place
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            os.replace(temporary, path)
        except OSError:
            path.unlink()
            raise


def lock(file: BinaryIO) -> bool:
    """Locks a file until it is closed; False if it is locked already.

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


def is_at(file: io.IOBase | BinaryIO, path: str | os.PathLike[str]) -> bool:
    """Whether an open file is the one at `path`, and was not removed or replaced."""
    found = _status(path)
    return found is not None and os.path.samestat(found, os.fstat(file.fileno()))


def _status(path: Any) -> os.stat_result | None:
    """The status of a file, or None if there is none."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


# What follows the prefix of a temporary file: the process, and a random number.
_SUFFIX = re.compile(r"\d+-[0-9a-f]+")


def _open_temporary(
    path: pathlib.Path, old: os.stat_result | None
) -> tuple[io.BufferedRandom, pathlib.Path]:
    """A new file next to `path`, locked, with the permissions of the old file."""
    prefix = f".{path.name}.{platform.node()}."
    _remove_abandoned(path.parent, prefix)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    while True:
        number = secrets.token_hex(8)  # a process id alone may come again
        temporary = path.with_name(f"{prefix}{os.getpid()}-{number}")
        descriptor = os.open(temporary, flags, 0o666 if old is None else 0o600)
        file = open(descriptor, "w+b")
        try:
            if old is not None:
                _copy_permissions(descriptor, old)
            try:
                is_ours = lock(file) and is_at(file, temporary)
            except OSError:  # a file system without locks, where none is removed
                is_ours = True
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        if is_ours:
            return file, temporary
        file.close()  # another process removes it, since it was not locked yet


def _copy_permissions(descriptor: int, old: os.stat_result) -> None:
    """Gives a file the owner, group and mode of another, as far as that is allowed."""
    if not hasattr(os, "fchown"):
        return
    for owner in ((-1, old.st_gid), (old.st_uid, -1)):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, *owner)
    mode = stat.S_IMODE(old.st_mode) & 0o777
    if os.fstat(descriptor).st_gid != old.st_gid:
        mode &= ~0o070  # they were for another group
    os.fchmod(descriptor, mode)


def _remove_abandoned(directory: pathlib.Path, prefix: str) -> None:
    """Removes temporary files that no process is writing."""
    try:
        names = os.listdir(directory)
    except PermissionError:  # files may be made there, but not listed
        return
    for name in names:
        if name.startswith(prefix) and _SUFFIX.fullmatch(name.removeprefix(prefix)):
            with contextlib.suppress(OSError):
                _remove_unlocked(directory / name)


def _remove_unlocked(path: pathlib.Path) -> None:
    """Removes a regular file, or raises an OSError if it is locked."""
    if fcntl is None:
        path.unlink()  # which fails for an open file on a system without fcntl
        return
    # A link is not followed, and a FIFO not waited for.
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    finally:
        os.close(descriptor)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _directory_to_disk(directory: pathlib.Path) -> None:
    """Makes a new name in a directory survive a crash of the machine."""
    if os.name != "posix":
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except PermissionError:  # files may be made there, but not listed
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------ archives


class ArraySpec(NamedTuple):
    """What an array in an archive must be.

    Args:
      kinds: the letters of `dtype.kind` that it may have, of "biufcSU".
      ndims: the numbers of axes that it may have.
      required: whether the archive must contain it.
    """

    kinds: str
    ndims: Collection[int]
    required: bool = True


# What `zipfile` was seen to raise for damaged content.
_DAMAGED = (
    EOFError,
    LookupError,
    OverflowError,
    RuntimeError,  # NotImplementedError too
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those of NumPy

# An archive that is small on disk may be large in memory. The arrays may have so many
# bytes, and in addition so many times the bytes of the file.
_FREE_BYTES, _MOST_RATIO = 64 << 20, 100

_MOST_HEADER = 4096  # bytes of text before an array; NumPy writes 118
_HEADER = re.compile(
    r"\{'descr': '([<>|=]?)([a-zA-Z])(\d{0,6})', 'fortran_order': (True|False), "
    r"'shape': \(((?:\d{1,19},)?|\d{1,19}(?:, \d{1,19}){1,31})\), \} *\n"
)
_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
_SIZES["u"] = _SIZES["i"]


class _Header(NamedTuple):
    """What the text before an array says of it."""

    dtype: np.dtype
    shape: tuple[int, ...]
    order: Any  # "C" or "F"
    start: int  # bytes before the values


def read_npz(
    call: str, path: Any, what: str, schema: Mapping[str, ArraySpec]
) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file that are in a schema, by name.

    Before any array is read, all are checked to be plain arrays of the kinds and ranks
    of the schema whose shapes match their stored sizes, and whose sizes are in
    proportion to the file. A damaged or hostile file therefore cannot run code, nor
    make this process allocate more than 64 MB and 100 times the size of the file.

    Args:
      call: for messages.
      path: the file.
      what: what the file should be, for messages: "a file written by ...".
      schema: by name, or by a regular expression of names. Other arrays are ignored.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is damaged, or not what it should be.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            members = _find_members(archive, schema)
            headers = {
                name: _read_header(archive, name, member, spec)
                for name, (member, spec) in members.items()
            }
            _check_total(members, os.fstat(file.fileno()).st_size)
            return {
                name: _read_values(archive, member, headers[name])
                for name, (member, _) in members.items()
            }
    except _DAMAGED as error:
        reason = str(error).rstrip(".")
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place before the beginning of the file
            raise
        reason = "its table of contents is damaged"
    raise ValueError(f"{call}: {os.fspath(path)} is not {what}: {reason}.")


def _find_members(
    archive: zipfile.ZipFile, schema: Mapping[str, ArraySpec]
) -> dict[str, tuple[zipfile.ZipInfo, ArraySpec]]:
    """The members that are in the schema."""
    found, names = {}, []
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        names.append(name)
        spec = next((s for form, s in schema.items() if re.fullmatch(form, name)), None)
        if spec is None:
            continue
        if name in found:
            raise ValueError(f"it has two arrays named {name}")
        if member.compress_type not in _METHODS:
            raise ValueError(f"array {name!r} is compressed in an unknown way")
        found[name] = member, spec
    required = [form for form, spec in schema.items() if spec.required]
    if not set(required) <= found.keys():
        raise ValueError(
            f"expected arrays named {', '.join(required)}, found "
            f"{', '.join(sorted(names)[:20])}"
        )
    return found


def _read_header(
    archive: zipfile.ZipFile, name: str, member: zipfile.ZipInfo, spec: ArraySpec
) -> _Header:
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"array {name!r} has an unknown format version, {version}")
        length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
        text = file.read(min(length, _MOST_HEADER)).decode("latin1")
        start = file.tell()
    found = _HEADER.fullmatch(text)
    if found is None:
        raise ValueError(f"array {name!r} does not have the header of a plain array")
    byte_order, kind, size, is_fortran, shape = found.groups()
    if kind == "O":
        raise ValueError(f"array {name!r} contains pickled objects")
    shape = tuple(int(n) for n in shape.split(",") if n)
    is_known = int(size or 0) in _SIZES.get(kind, ()) or kind in "SU" and size
    if kind not in spec.kinds or not is_known or len(shape) not in spec.ndims:
        raise ValueError(
            f"array {name!r} has the type {kind}{size} and {len(shape)} axes, expected "
            f"one of the kinds {spec.kinds!r} and {_show_ranks(spec.ndims)}"
        )
    dtype = np.dtype(f"{byte_order}{kind}{size}")
    stored = member.file_size - start
    # A type of no bytes has any number of elements in none.
    if math.prod(shape) * dtype.itemsize != stored or not dtype.itemsize:
        raise ValueError(
            f"array {name!r} has {stored} bytes, which do not match its header, "
            f"{dtype}{list(shape)}"
        )
    return _Header(dtype, shape, "F" if is_fortran == "True" else "C", start)


def _show_ranks(ndims: Collection[int]) -> str:
    low, high = min(ndims), max(ndims)
    return f"{low} axes" if low == high else f"{low} to {high} axes"


def _check_total(
    members: Mapping[str, tuple[zipfile.ZipInfo, ArraySpec]], size: int
) -> None:
    total = sum(member.file_size for member, _ in members.values())
    if total > _FREE_BYTES + _MOST_RATIO * size:
        raise ValueError(
            f"its arrays have {total} bytes, more than {_MOST_RATIO} times the {size} "
            "bytes of the file; if it is to be trusted, write it again without "
            "compression"
        )


def _read_values(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, header: _Header
) -> np.ndarray:
    values = np.empty(member.file_size - header.start, np.uint8)
    with archive.open(member) as file:
        file.read(header.start)
        at = 0
        while at < len(values):
            part = file.read(min(len(values) - at, 1 << 20))
            if not part:
                raise EOFError("it ends within an array")
            values[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        file.read()  # zipfile verifies the checksum at the end
    values = values.view(header.dtype).reshape(header.shape, order=header.order)
    return values.astype(header.dtype.newbyteorder("="), order="K", copy=False)


# ------------------------------------------------------------------ JSON


def check_json(value: Any, schema: Any, where: str = "") -> None:
    """Raises a ValueError unless parsed JSON is as a schema says.

    Args:
      value: from `json.loads`.
      schema: `int` for integers from 0 to 2^63 - 1; another type for its values;
        `object` for anything; None for null; a set of the strings that it may be; a
        tuple of alternatives; a list of one schema for a list; a dict of schemas by
        key for a dict, where a key that ends with "?" may be missing, "*" is any other
        key, and without "*" other keys are ignored.
      where: the place of the value, for messages.
    """
    if isinstance(schema, tuple):
        if not any(_has_form(value, one) for one in schema):
            raise _unexpected(value, where)
        schema = next(one for one in schema if _has_form(value, one))
    if not _has_form(value, schema):
        raise _unexpected(value, where)
    if isinstance(schema, list):
        for place, item in enumerate(value):
            check_json(item, schema[0], f"{where}[{place}]")
    elif isinstance(schema, dict):
        for key, one in schema.items():
            name = key.removesuffix("?")
            if name in value:
                check_json(value[name], one, f"{where}[{name!r}]")
            elif key == name and key != "*":
                raise ValueError(f"{where}[{key!r}] is missing")
        if "*" in schema:
            for key in value.keys() - schema.keys():
                check_json(value[key], schema["*"], f"{where}[{key!r}]")


def _has_form(value: Any, schema: Any) -> bool:
    """Whether a value is as a schema says, its items left out."""
    if schema is None:
        return value is None
    if isinstance(schema, (list, dict)):
        return isinstance(value, type(schema))
    if isinstance(schema, set):
        return isinstance(value, str) and value in schema
    if schema is int:  # True is none
        return type(value) is int and 0 <= value < 1 << 63
    return isinstance(value, schema)


def _unexpected(value: Any, where: str) -> ValueError:
    is_short = isinstance(value, (int, float, str))
    shown = repr(value)[:40] if is_short else f"a {type(value).__name__}"
    return ValueError(f"{where or 'it'} has an unexpected value, {shown}")
