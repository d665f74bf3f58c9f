"""What a table looks like, as files keep it: shapes, types, leaves of state, the key.

Saved stores and memory-mapped tables begin with such a description. It is compared with
that of the table at hand before anything is read, so that a file of another optimizer
or shape is refused and not reinterpreted.
"""

import json
import os
import zlib
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.store._optimizer import Optimizer


_NOT_OURS = "{call}: {path} is not a file of sparsejax.store ({why})."


def describe(
    shape: tuple[int, ...],
    dtype: Any,
    optimizer: Optimizer | None,
    key: dict[str, Any],
    *,
    given: bool,
    initialized: bool,
) -> dict[str, Any]:
    """The description, as JSON has it.

    Args:
      shape, dtype: of the table.
      optimizer: or None.
      key: of the initializer, by `encode_key`.
      given: whether the weights of all rows were given as an array.
      initialized: whether there is an initializer.
    """
    leaves = []
    if optimizer is not None:
        parts = zip(optimizer.names, optimizer.specs, optimizer.by_row)
        leaves = [
            {
                "name": name,
                "shape": list(spec.shape),
                "dtype": np.dtype(spec.dtype).name,
                "by_row": mine,
            }
            for name, spec, mine in parts
        ]
    return {
        "shape": list(shape),
        "dtype": np.dtype(dtype).name,
        "state": leaves,
        "given": given,
        "initialized": initialized,
        "key": key,
    }


def check_same(
    call: str,
    path: Any,
    name: str,
    found: dict[str, Any],
    expected: dict[str, Any],
    fields: tuple[str, ...],
) -> None:
    """An error where a file's description is not the table's."""
    for field in fields:
        if found.get(field) != expected[field]:
            raise ValueError(
                f"{call}: table {name!r} has {field} {_show(expected[field])} here, "
                f"but {_show(found.get(field))} in {path}. Call init with what the "
                "file was made with, or use another file."
            )


def _show(value: Any) -> str:
    """A field of a description; of an optimizer's state the arrays, by name."""
    if not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
        return str(value)
    arrays = (f"{x['name']} {x['dtype']}{x['shape']}" for x in value)
    return f"of {', '.join(arrays)}" if value else "of no arrays"


def encode_key(key: jax.Array) -> dict[str, Any]:
    """A PRNG key as JSON has it."""
    data = np.asarray(jax.random.key_data(key))
    return {"impl": str(jax.random.key_impl(key)), "data": data.tolist()}


def decode_key(encoded: dict[str, Any]) -> jax.Array:
    """The key of `encode_key`."""
    data = jnp.asarray(np.array(encoded["data"], np.uint32))
    return jax.random.wrap_key_data(data, impl=encoded["impl"])


def write_header(file: BinaryIO, magic: bytes, header: dict[str, Any]) -> None:
    """The kind of file, length and checksum of its description, and that."""
    text = json.dumps(header).encode()
    length, checksum = len(text), zlib.crc32(text)
    file.write(
        magic + length.to_bytes(8, "little") + checksum.to_bytes(4, "little") + text
    )


def read_header(call: str, path: Any, file: BinaryIO, magic: bytes) -> dict[str, Any]:
    """What `write_header` wrote, or an error."""
    if file.read(len(magic)) != magic:
        why = f"it does not begin with {magic!r}"
        raise ValueError(_NOT_OURS.format(call=call, path=path, why=why))
    length = int.from_bytes(file.read(8), "little")
    checksum = int.from_bytes(file.read(4), "little")
    if length > os.fstat(file.fileno()).st_size - file.tell():
        why = "it ends within its header"
        raise ValueError(_NOT_OURS.format(call=call, path=path, why=why))
    text = file.read(length)
    header = json.loads(text) if zlib.crc32(text) == checksum else None
    if not isinstance(header, dict):
        why = "its header is damaged"
        raise ValueError(_NOT_OURS.format(call=call, path=path, why=why))
    return header


def as_bytes(values: Any) -> memoryview:
    """The bytes of an array, in order, of types that NumPy cannot write as well."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
