"""The files of a store: records, and the headers of mapped tables and journals.

A record is an `.npz` archive: `header.json` and arrays, `0.weights.npy` and so on,
which NumPy reads. They are not compressed, and zip has a checksum of each. An array of
a dtype that NumPy has no name for, such as bfloat16, is stored as unsigned integers. A
reader knows the name, shape and dtype of each array from the header. So it compares the
bytes of a member's own header, and parses nothing but JSON.

All files describe their tables: shape, dtype, leaves of the optimizer state, PRNG key.
A description is compared with the table in memory before anything else is read. So a
file of another optimizer or shape is refused, not reinterpreted.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Self

import jax
import jax.numpy as jnp
import numpy as np


FORMAT = "sparsejax store 4"
_HEADER = "header.json"
CHUNK = 1 << 16  # rows at a time, when all rows are read or written

Spec = tuple[tuple[int, ...], Any]  # shape and dtype

# The schema of the result of `describe`, for `check_json`.
DESCRIPTION = {
    "shape": [int],
    "dtype": str,
    "state": [{"name": str, "shape": [int], "dtype": str, "by_row": bool}],
    "given": bool,
    "first": [float],
    "key": {"impl": str, "data": [int]},
    "step?": int,
    "keyed": bool,
}

# ------------------------------------------------------------------ descriptions


def check_same(
    path: Any,
    name: str,
    found: dict[str, Any],
    expected: dict[str, Any],
    fields: tuple[str, ...],
) -> None:
    """Raises a ValueError if a file and memory describe different tables."""
    for field in fields:
        here, there = (each.get(field, False) for each in (expected, found))
        if here != there:
            raise ValueError(
                f"Table {name!r} has {field} {_show(here)} here, "
                f"but {_show(there)} in {path}. Call init with the same "
                "arguments as when the file was made, or use another file."
            )
    same_start = np.shape(expected["first"]) == np.shape(
        found["first"]
    ) and np.allclose(
        expected["first"], found["first"], rtol=1e-3, atol=1e-6, equal_nan=True
    )
    if not same_start:
        raise ValueError(
            f"Row 0 of table {name!r} starts as {_show_row(expected)} here, "
            f"but as {_show_row(found)} in {path}, so its rows had another "
            "initializer. Call init with the initializer with which the file was made."
        )


def _show_row(description: dict[str, Any]) -> str:
    values = ", ".join(f"{x:.3g}" for x in description["first"])
    return f"[{values}]" if values else "zeros, without an initializer"


def _show(value: Any) -> str:
    """Shows a field of a description; for an optimizer state, its arrays by name."""
    if not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
        return str(value)
    arrays = (f"{x['name']} {x['dtype']}{x['shape']}" for x in value)
    return f"of {', '.join(arrays)}" if value else "of no arrays"


def encode_key(key: jax.Array) -> dict[str, Any]:
    """Converts a PRNG key for JSON."""
    data = np.asarray(jax.random.key_data(key))
    return {"impl": str(jax.random.key_impl(key)), "data": data.tolist()}


def decode_key(encoded: dict[str, Any]) -> jax.Array:
    """Inverts `encode_key`.

    Raises:
      TypeError, ValueError, OverflowError: `encoded` is not an encoded key.
    """
    data = jnp.asarray(np.array(encoded["data"], np.uint32))
    return jax.random.wrap_key_data(data, impl=encoded["impl"])


# ------------------------------------------------------------------ headers


def header_bytes(magic: bytes, header: dict[str, Any]) -> bytes:
    """Returns the magic bytes, then length, checksum and text of a JSON header."""
    text = json.dumps(header).encode()
    length, checksum = len(text), zlib.crc32(text)
    return magic + length.to_bytes(8, "little") + checksum.to_bytes(4, "little") + text


def read_header(
    path: Any, file: BinaryIO, magic: bytes, schema: dict[str, Any]
) -> dict[str, Any]:
    """Reads a header of `header_bytes`, or raises a ValueError.

    Args:
      path: for messages.
      file: at its first byte.
      magic: the first bytes of such a file.
      schema: of the header, as in `check_json`.
    """
    begins, length, checksum = file.read(len(magic)), file.read(8), file.read(4)
    size = int.from_bytes(length, "little")
    why = "its header is damaged"
    if begins != magic:
        why = f"it does not begin with {magic!r}"
    elif size > os.fstat(file.fileno()).st_size - file.tell():
        why = "it ends within its header"
    elif zlib.crc32(text := file.read(size)) == int.from_bytes(checksum, "little"):
        try:
            header = json.loads(text)
            check_json(header, schema, "header")
            return header
        except (ValueError, RecursionError) as error:
            why = f"its header is damaged: {str(error)[:200]}"
    raise ValueError(f"{path} is not a file of this sparsejax.store ({why}).")


# ------------------------------------------------------------------ arrays


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
    is_in_range = kind is not int or (type(value) is int and 0 <= value < 1 << 63)
    if not isinstance(value, kind) or not is_in_range:
        raise ValueError(f"{where} has an unexpected value, {repr(value)[:40]}")
    if isinstance(schema, list):
        for place, item in enumerate(value):
            check_json(item, schema[0], f"{where}[{place}]")
    elif isinstance(schema, dict):
        schemas = dict.fromkeys(value, schema["*"]) if "*" in schema else schema
        for key, one in schemas.items():
            name = key if key in value else key.removesuffix("?")
            if name in value:
                check_json(value[name], one, f"{where}[{name!r}]")
            elif key == name:
                raise ValueError(f"{where}[{key!r}] is missing")


# ------------------------------------------------------------------ records


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
