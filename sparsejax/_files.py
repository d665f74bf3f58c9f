"""Files that are replaced whole, and files that may be damaged.

`replacing` writes a temporary file next to the target and renames it over the target
(an atomic step). A reader sees either the old file or the new one, never a partial
file.

`read_npz` compares the arrays of a file with a schema. Nothing is unpickled, and no
code in a file is run.
"""

import contextlib
import errno
import math
import os
import pathlib
import re
import secrets
import stat
import zipfile
from collections.abc import Collection, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np


def as_path(call: str, path: Any) -> Any:
    """Returns `path`, or raises: `open` would take an int as a file descriptor."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"{call}: path must be a str or os.PathLike, got {path!r}.")
    return path


# ------------------------------------------------------------------ writing


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file for writing that replaces `path` at the end.

    If an error is raised, `path` stays unchanged. If the process is killed, `path`
    stays unchanged and the temporary file remains. The content is on disk before the
    rename; the new name may not be, so that after a crash of the machine the old file
    may be back. Symbolic links are followed. The new file has the mode of the old one.

    Raises:
      OSError: `path` is not a regular file (renaming over a device would remove it), or
        may not be written.
    """
    path = pathlib.Path(os.path.realpath(path))
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    if mode is not None and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))
    if mode is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    # A private file is private from the first byte on; a new file follows the umask.
    descriptor = os.open(temporary, flags, 0o666 if mode is None else 0o600)
    try:
        with open(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        if mode is not None:
            temporary.chmod(mode)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# ------------------------------------------------------------------ archives


class ArraySpec(NamedTuple):
    """The accepted types of an array in an archive.

    Args:
      kinds: the accepted letters of `dtype.kind`, out of "biufcSU".
      ndims: the accepted numbers of axes.
      required: True if the archive must contain the array.
    """

    kinds: str
    ndims: Collection[int]
    required: bool = True


# deflate packs at most 1,032 bytes into one: a match of 258 bytes takes two bits.
_MAX_RATIO = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
# Version 3 is for names of fields that are not Latin-1, which no plain array has.
_READ_HEADER: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npz(
    call: str, path: Any, what: str, schema: Mapping[str, ArraySpec]
) -> dict[str, np.ndarray]:
    """Reads the arrays of an `.npz` file that are in a schema, by name.

    All arrays are checked before the first one is read: kinds and ranks against the
    schema, the sizes that headers claim against the size of the file.

    Args:
      call: for messages.
      path: the file.
      what: the expected content, for messages: "a file that ... wrote".
      schema: by name, or by a regular expression of names. Other names are refused:
        zip has no checksum of names, and one that is damaged would be missed.

    Raises:
      OSError: the file cannot be opened.
      ValueError: the file is damaged, or has other content.
    """
    with open(path, "rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            with zipfile.ZipFile(file) as archive:
                members = _find_members(archive, schema)
                for member, spec in members.values():
                    _check_header(archive, member, spec, size)
                return {
                    name: _read_array(archive, member)
                    for name, (member, _) in members.items()
                }
        # zipfile, zlib and NumPy raise a dozen types for damaged content.
        except Exception as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise ValueError(
                f"{call}: {os.fspath(path)} is not {what}: {reason}."
            ) from error


def _find_members(
    archive: zipfile.ZipFile, schema: Mapping[str, ArraySpec]
) -> dict[str, tuple[zipfile.ZipInfo, ArraySpec]]:
    """Returns the members of an archive that are in the schema, by array name."""
    members, names = {}, []
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name in names:
            raise ValueError(f"it has two arrays named {name!r}")
        names.append(name)
        spec = next((x for form, x in schema.items() if re.fullmatch(form, name)), None)
        if spec is None:
            raise ValueError(f"it has an array of an unknown name, {name!r:.100}")
        members[name] = member, spec
    required = [form for form, spec in schema.items() if spec.required]
    if not set(required) <= members.keys():
        raise ValueError(
            f"expected arrays named {', '.join(required)}, found "
            f"{', '.join(sorted(names)[:20])}"
        )
    return members


def _check_header(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, spec: ArraySpec, size: int
) -> None:
    """Raises a ValueError unless a member is an array of the spec, of its own size."""
    name = member.filename.removesuffix(".npy")
    ratio = _MAX_RATIO.get(member.compress_type)
    if ratio is None:
        raise ValueError(f"array {name!r} is compressed in an unknown way")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in _READ_HEADER:
            raise ValueError(f"array {name!r} has an unknown format version, {version}")
        shape, _, dtype = _READ_HEADER[version](file)
        stored = member.file_size - file.tell()
    if dtype.hasobject:
        raise ValueError(f"array {name!r} contains pickled objects")
    if dtype.kind not in spec.kinds or len(shape) not in spec.ndims:
        raise ValueError(
            f"array {name!r} has the type {dtype.str[1:]} and {len(shape)} axes, "
            f"expected one of the kinds {spec.kinds!r} and {_show_ranks(spec.ndims)}"
        )
    # A dtype of no bytes would claim any number of elements.
    if not dtype.itemsize or math.prod(shape) * dtype.itemsize != stored:
        raise ValueError(
            f"array {name!r} has {stored} bytes, which do not match its header, "
            f"{dtype}{list(shape)}"
        )
    if member.file_size > ratio * size:
        raise ValueError(
            f"array {name!r} claims {member.file_size} bytes, more than a file of "
            f"{size} bytes can hold"
        )


def _show_ranks(ndims: Collection[int]) -> str:
    low, high = min(ndims), max(ndims)
    return f"{low} axes" if low == high else f"{low} to {high} axes"


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        file.read()  # zipfile compares the checksum at the end
    return array.astype(array.dtype.newbyteorder("="), order="K", copy=False)
