"""Descriptions of tables in the files of a store, and the headers of its own files.

A description has the shape, dtype, leaves of the optimizer state and PRNG key of a
table. It is compared with the table in memory before anything else is read. So a file
of another optimizer or shape is refused, not reinterpreted.
"""

import json
import os
import zlib
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np


CHUNK = 1 << 16  # rows at a time, when all rows are read or written

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

_NOT_A_STORE_FILE = "{path} is not a file of this sparsejax.store ({why})."


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


def write_header(file: BinaryIO, magic: bytes, header: dict[str, Any]) -> None:
    """Writes the magic bytes, then length, checksum and text of a JSON header."""
    text = json.dumps(header).encode()
    length, checksum = len(text), zlib.crc32(text)
    file.write(
        magic + length.to_bytes(8, "little") + checksum.to_bytes(4, "little") + text
    )


def read_header(
    path: Any, file: BinaryIO, magic: bytes, schema: dict[str, Any]
) -> dict[str, Any]:
    """Reads a header of `write_header`, or raises a ValueError.

    Args:
      path: for messages.
      file: at its first byte.
      magic: the first bytes of such a file.
      schema: of the header, as in `check_json`.
    """
    if file.read(len(magic)) != magic:
        why = f"it does not begin with {magic!r}"
        raise ValueError(_NOT_A_STORE_FILE.format(path=path, why=why))
    length = int.from_bytes(file.read(8), "little")
    checksum = int.from_bytes(file.read(4), "little")
    if length > os.fstat(file.fileno()).st_size - file.tell():
        why = "it ends within its header"
        raise ValueError(_NOT_A_STORE_FILE.format(path=path, why=why))
    text = file.read(length)
    why = "its header is damaged"
    try:
        if zlib.crc32(text) == checksum:
            header = json.loads(text)
            check_json(header, schema, "header")
            return header
    except (ValueError, RecursionError) as error:
        why = f"its header is damaged: {str(error)[:200]}"
    raise ValueError(_NOT_A_STORE_FILE.format(path=path, why=why))


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
        for a dict. In a dict, a key that ends with "?" may be missing, and "*" is any
        other key; without "*" other keys are ignored.
      where: the place of the value, for messages.
    """
    if not _has_form(value, schema):
        is_short = isinstance(value, (int, float, str))
        shown = repr(value)[:40] if is_short else f"a {type(value).__name__}"
        raise ValueError(f"{where} has an unexpected value, {shown}")
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
    """Returns True if a value is as a schema says, apart from its items."""
    if isinstance(schema, (list, dict)):
        return isinstance(value, type(schema))
    if schema is int:  # type(True) is bool
        return type(value) is int and 0 <= value < 1 << 63
    return isinstance(value, schema)
