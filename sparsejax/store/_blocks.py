"""Arrays in a file, one after the other, each with its checksum behind it."""

import io
import zlib
from typing import Any, BinaryIO

import numpy as np

from sparsejax.store import _layout


CHECKSUM = 4  # bytes, little endian, of zlib's crc32


def write(file: BinaryIO, values: Any) -> None:
    """Writes an array and its checksum."""
    content = _layout.as_bytes(values)
    file.write(content)
    file.write(zlib.crc32(content).to_bytes(CHECKSUM, "little"))


def read(
    call: str, path: Any, file: io.BufferedReader, shape: tuple[int, ...], dtype: Any
) -> np.ndarray:
    """What `write` wrote, or a ValueError where it is not what was written."""
    values = np.empty(shape, dtype)
    content = values.reshape(-1).view(np.uint8).data
    complete = file.readinto(content) == values.nbytes
    expected = int.from_bytes(file.read(CHECKSUM), "little")
    if not complete or zlib.crc32(content) != expected:
        at, count = file.tell(), values.nbytes
        raise ValueError(
            f"{call}: {path} is damaged: {count} bytes before its byte {at} have "
            "another checksum than when they were written. Nothing can be read from "
            "it; load an older file."
        )
    return values
