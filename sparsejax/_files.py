"""Files that are replaced whole, and records, which may be damaged.

`replacing` writes a temporary file next to the target and renames it over the target
(an atomic step). A reader sees either the old file or the new one, never a partial
file.

A record is an `.npz` archive: `header.json` and arrays, `words 0.npy` and so on, which
NumPy reads. They are not compressed, and zip has a checksum of each. An array of a
dtype that NumPy has no name for, such as bfloat16, is stored as unsigned integers. A
reader knows the name, shape and dtype of each array from the header. So it compares the
bytes of a member's own header, and parses nothing but JSON.
"""

import contextlib
import errno
import io
import json
import math
import os
import pathlib
import secrets
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Self

import numpy as np


CHUNK = 1 << 16  # rows at a time, when all rows are read or written
_HEADER = "header.json"

Spec = tuple[tuple[int, ...], Any]  # shape and dtype


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


# ------------------------------------------------------------------ records


class Writer:
    """Writes a record to an open file.

    Args:
      file: for writing.
      form: the name and version of the format.
      header: ready for JSON.
    """

    def __init__(self, file: BinaryIO, form: str, header: Mapping[str, Any]):
        self._archive = zipfile.ZipFile(file, "w")
        text = json.dumps({"format": form, **header})
        self._archive.writestr(zipfile.ZipInfo(_HEADER), text)

    def array(self, name: str, array: np.ndarray) -> None:
        """Writes an array."""
        self.chunks(name, (array.shape, array.dtype), [array])

    def chunks(self, name: str, spec: Spec, chunks: Iterable[np.ndarray]) -> None:
        """Writes an array, of which some rows come at a time."""
        info = zipfile.ZipInfo(f"{name}.npy")
        with self._archive.open(info, "w", force_zip64=True) as member:
            member.write(_npy_header(spec))
            for chunk in chunks:
                member.write(as_bytes(chunk))

    def close(self) -> None:
        """Ends the archive."""
        self._archive.close()


class Reader:
    """Reads a record, which may be damaged.

    Args:
      path: of the file.
      form: as in `Writer`.
      schema: of the header, as in `check_json`.

    Raises:
      OSError: the file cannot be opened.
      ValueError: it is not a record, or damaged; so do all methods.
    """

    def __init__(
        self, path: str | os.PathLike[str], form: str, schema: Mapping[str, Any]
    ):
        self.path, self._form = path, form
        self._file = open(path, "rb")
        try:
            with self.checked():
                # zipfile accepts bytes before and after an archive.
                size = os.fstat(self._file.fileno()).st_size
                first = self._file.read(4)
                self._file.seek(max(size - 22, 0))
                last = self._file.read()
                if first != b"PK\3\4" or last[:4] + last[-2:] != b"PK\5\6\0\0":
                    raise ValueError("it does not begin and end as its archive")
                self._archive = zipfile.ZipFile(self._file)
                self._members = {x.filename: x for x in self._archive.infolist()}
                total = sum(x.file_size for x in self._archive.infolist())
                packed = [x for x in self._members.values() if x.compress_type]
                if packed or total > size:
                    raise ValueError("a member claims more than the file holds")
                self.header = json.loads(self._archive.read(_HEADER))
                check_json(self.header, {"format": str, **schema}, "header")
                if self.header["format"] != form:
                    raise ValueError(f"its format is {self.header['format']!r:.40}")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()

    def expect(self, specs: Mapping[str, Spec]) -> None:
        """Raises unless the archive has exactly these arrays."""
        with self.checked():
            names = {f"{name}.npy" for name in specs} | {_HEADER}
            if self._members.keys() != names or len(self._archive.infolist()) != len(
                names
            ):
                raise ValueError("its arrays are not the ones that its header tells")
            for name, (shape, dtype) in specs.items():
                size = math.prod(shape) * np.dtype(dtype).itemsize
                size += len(_npy_header((shape, dtype)))
                if self._members[f"{name}.npy"].file_size != size:
                    raise ValueError(f"array {name} has not the {size} bytes expected")

    def array(self, name: str, spec: Spec) -> np.ndarray:
        """Reads a whole array."""
        shape, dtype = spec
        out = np.empty(shape, dtype)
        with self.checked(), self._open(name, spec) as member:
            _fill(member, out)
            _end(member)
        return out

    def chunks(self, name: str, spec: Spec) -> Iterator[np.ndarray]:
        """Yields an array's rows, some at a time; its checksum is known at the end."""
        (height, *row), dtype = spec
        with self.checked(), self._open(name, spec) as member:
            for start in range(0, height, CHUNK):
                out = np.empty((min(CHUNK, height - start), *row), dtype)
                _fill(member, out)
                yield out
            _end(member)

    def _open(self, name: str, spec: Spec) -> Any:
        member = self._archive.open(f"{name}.npy")
        head = _npy_header(spec)
        if member.read(len(head)) != head:
            raise ValueError(f"array {name} has another shape or dtype")
        return member

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Names the file in errors; zipfile raises a dozen types for damaged files."""
        try:
            yield
        except Exception as error:
            reason = str(error).rstrip(".")[:200] or type(error).__name__
            raise ValueError(
                f"{os.fspath(self.path)} is not a whole file of the format "
                f"{self._form!r}: {reason}. Use another copy."
            ) from error


def _npy_header(spec: Spec) -> bytes:
    """Returns the first bytes of a `.npy` file."""
    shape, dtype = spec
    dtype = np.dtype(dtype)
    if dtype.kind == "V":
        dtype = np.dtype(f"u{dtype.itemsize}")
    head = io.BytesIO()
    fields = {"descr": dtype.str, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(head, fields)
    return head.getvalue()


def _fill(member: Any, out: np.ndarray) -> None:
    content = memoryview(as_bytes(out)) if out.size else memoryview(b"")
    done = 0
    while done < len(content):
        count = member.readinto(content[done:])
        if not count:
            raise ValueError("it ends within an array")
        done += count


def _end(member: Any) -> None:
    """Reads the end of a member, at which zipfile compares the checksum."""
    if member.read(1):
        raise ValueError("an array is longer than its shape")


def as_bytes(values: Any) -> memoryview:
    """Returns an array's bytes in C order, also of dtypes without a NumPy format."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


# ------------------------------------------------------------------ JSON


def check_json(value: Any, schema: Any, where: str) -> None:
    """Raises a ValueError unless parsed JSON is as a schema says.

    Args:
      value: from `json.loads`.
      schema: `int` for integers from 0 to 2^63 - 1; another type for its values;
        `object` for anything; a list of one schema for a list; a dict of schemas by key
        for a dict, in which a key that ends with "?" may be missing, and other keys are
        ignored; `{"*": schema}` for a dict with any keys.
      where: the place of the value, for messages.
    """
    kind = type(schema) if isinstance(schema, (list, dict)) else schema
    if not isinstance(value, kind) or (kind is int and not _is_size(value)):
        raise ValueError(f"{where} has an unexpected value, {repr(value)[:40]}")
    if isinstance(schema, list):
        for place, item in enumerate(value):
            check_json(item, schema[0], f"{where}[{place}]")
    elif isinstance(schema, dict) and "*" in schema:
        for key, item in value.items():
            check_json(item, schema["*"], f"{where}[{key!r}]")
    elif isinstance(schema, dict):
        for key, one in schema.items():
            name = key.removesuffix("?")
            if name in value:
                check_json(value[name], one, f"{where}[{name!r}]")
            elif key == name:
                raise ValueError(f"{where}[{key!r}] is missing")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63  # type(True) is bool
