"""Records: the files of a store, an `.npz` archive with a JSON header.

The members are `header.json` and arrays, `0.weights.npy` and so on, which NumPy reads.
They are not compressed, and zip has a checksum of each. An array of a dtype that NumPy
has no name for, such as bfloat16, is stored as unsigned integers.

A reader knows the name, shape and dtype of each array from the header. So it compares
the bytes of a member's own header, and parses nothing but JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Self

import numpy as np

from sparsejax.store._format import CHUNK, as_bytes, check_json


FORMAT = "sparsejax store 4"
_HEADER = "header.json"

Spec = tuple[tuple[int, ...], Any]  # shape and dtype


class Writer:
    """Writes a record to an open file.

    Args:
      file: for writing.
      header: ready for JSON.
    """

    def __init__(self, file: BinaryIO, header: Mapping[str, Any]):
        self._archive = zipfile.ZipFile(file, "w")
        text = json.dumps({"format": FORMAT, **header})
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
      schema: of the header, as in `check_json`.

    Raises:
      OSError: the file cannot be opened.
      ValueError: it is not a record, or damaged; so do all methods.
    """

    def __init__(self, path: str | os.PathLike[str], schema: Mapping[str, Any]):
        self.path = path
        self._file = open(path, "rb")
        try:
            with self._checked():
                # zipfile accepts bytes before and after an archive.
                first = self._file.read(4)
                self._file.seek(-22, os.SEEK_END)
                last = self._file.read()
                if first != b"PK\3\4" or last[:4] + last[-2:] != b"PK\5\6\0\0":
                    raise ValueError("it does not begin and end as its archive")
                self._archive = zipfile.ZipFile(self._file)
                self._members = {x.filename: x for x in self._archive.infolist()}
                size = os.fstat(self._file.fileno()).st_size
                total = sum(x.file_size for x in self._archive.infolist())
                packed = [x for x in self._members.values() if x.compress_type]
                if packed or total > size:
                    raise ValueError("a member claims more than the file holds")
                self.header = json.loads(self._archive.read(_HEADER))
                check_json(self.header, {"format": str, **schema}, "header")
                if self.header["format"] != FORMAT:
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
        with self._checked():
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
        with self._checked(), self._open(name, spec) as member:
            _fill(member, out)
            _end(member)
        return out

    def chunks(self, name: str, spec: Spec) -> Iterator[np.ndarray]:
        """Yields an array's rows, some at a time; its checksum is known at the end."""
        (height, *row), dtype = spec
        with self._checked(), self._open(name, spec) as member:
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
    def _checked(self) -> Iterator[None]:
        """Names the file in errors; zipfile raises a dozen types for damaged files."""
        try:
            yield
        except Exception as error:
            reason = str(error).rstrip(".")[:200] or type(error).__name__
            raise ValueError(
                f"{os.fspath(self.path)} is not a whole file of this sparsejax.store: "
                f"{reason}. Use another copy."
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
