"""The description of a table and the header, which all files of a store have.

A description is the shape, dtype, leaves of the optimizer state, and PRNG key. It is
compared with the table in memory before anything else is read. So a file of another
optimizer or shape is refused, not reinterpreted.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax._files import check_json


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
      schema: of the header, as in `_files.check_json`.
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
