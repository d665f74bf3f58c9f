"""Files that are replaced whole, and files that may be damaged.

`replacing` writes a temporary file next to the target and renames it over the target
(an atomic step). A reader sees either the old file or the new one, never a partial
file.

`read_npz` compares the arrays of a file with a schema. Nothing is unpickled, and no
code in a file is run.
"""

import contextlib
import errno
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
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


def read_npz(
    call: str, path: Any, what: str, schema: Mapping[str, ArraySpec]
) -> dict[str, np.ndarray]:
    """Reads the arrays of an `.npz` file that are in a schema, by name.

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
            archive: Any
            with np.lib.npyio.NpzFile(file, allow_pickle=False) as archive:
                specs = _specs_of(archive.files, schema)
                damaged = archive.zip.testzip()
                if damaged is not None:
                    raise ValueError(f"the checksum of {damaged!r} does not match")
                return {
                    name: _checked(name, archive[name], spec)
                    for name, spec in specs.items()
                }
        # zipfile, zlib and NumPy raise a dozen types for damaged content.
        except Exception as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise ValueError(
                f"{call}: {os.fspath(path)} is not {what}: {reason}."
            ) from error


def _specs_of(
    names: Sequence[str], schema: Mapping[str, ArraySpec]
) -> dict[str, ArraySpec]:
    """Returns the spec of each array of an archive, or raises a ValueError."""
    specs = {}
    for name in names:
        if name in specs:
            raise ValueError(f"it has two arrays named {name!r}")
        spec = next((x for form, x in schema.items() if re.fullmatch(form, name)), None)
        if spec is None:
            raise ValueError(f"it has an array of an unknown name, {name!r:.100}")
        specs[name] = spec
    required = {form for form, spec in schema.items() if spec.required}
    if not required <= specs.keys():
        raise ValueError(
            f"expected arrays named {', '.join(sorted(required))}, found "
            f"{', '.join(sorted(names)[:20])}"
        )
    return specs


def _checked(name: str, array: Any, spec: ArraySpec) -> np.ndarray:
    """Returns an array of the spec in native byte order, or raises a ValueError."""
    if not isinstance(array, np.ndarray):  # NumPy reads other content as bytes
        raise ValueError(f"{name!r} is not an array of NumPy")
    if array.dtype.kind not in spec.kinds or array.ndim not in spec.ndims:
        raise ValueError(
            f"array {name!r} has the type {array.dtype.str[1:]} and {array.ndim} axes, "
            f"expected one of the kinds {spec.kinds!r}, and axes: {[*spec.ndims]}"
        )
    return array.astype(array.dtype.newbyteorder("="), order="K", copy=False)
