"""Saving the tables of a store in one file, and loading them.

The file is a description of all tables and then, table by table: the leaves of state
beside the rows, the ids of the rows touched, their weights (of all rows, where the
weights were given as an array), and their leaves of state. Rows that were never touched
need no room: the key in the description makes them again.
"""

import io
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sparsejax._replace import replacing
from sparsejax.store import _layout
from sparsejax.store._table import CHUNK, Table, put_rows


MAGIC = b"sparsejax store 1\n"

_OTHER_TABLES = (
    "{call}: {path} holds the tables {found}, and this store {expected}. Call init for "
    "each table of the file, and for no other, before load."
)
_CUT_OFF = (
    "{call}: {path} has {found} bytes instead of {expected}: it was cut off or changed."
)

Report = Callable[[int, int], None]


def save(path: str | os.PathLike, tables: Mapping[str, Table], report: Report) -> None:
    """Writes all tables; `path` is replaced at once when everything is on the disk."""
    descriptions, touched = {}, {}
    for name, table in tables.items():
        touched[name] = np.flatnonzero(table.touched)
        count = int(touched[name].size)
        descriptions[name] = table.description() | {"touched": count}
    total = sum(_steps(description) for description in descriptions.values())
    done = 0
    with replacing(path) as file:
        _layout.write_header(file, MAGIC, {"tables": descriptions})
        for name, table in tables.items():
            for leaf in table.rest:
                file.write(_layout.as_bytes(leaf))
            file.write(_layout.as_bytes(touched[name].astype(np.int64)))
            columns = [(column, touched[name]) for column in table.by_row]
            every = np.arange(table.height) if table.given else touched[name]
            for column, rows in [(table.weights, every), *columns]:
                for start in range(0, rows.size, CHUNK):
                    part = rows[start : start + CHUNK]
                    values = np.take(column, part, axis=0, mode="clip")
                    file.write(_layout.as_bytes(values))
                    done += part.size
                    report(done, total)


def load(
    call: str, path: str | os.PathLike, tables: Mapping[str, Table], report: Report
) -> None:
    """Reads what `save` wrote into tables of the same kind."""
    with open(path, "rb") as file:
        header = _layout.read_header(call, path, file, MAGIC)
        found = header["tables"]
        _check(call, path, file, found, tables)
        total = sum(_steps(description) for description in found.values())
        done = 0
        for name, description in found.items():
            table = tables[name]
            table.reset(description["key"])
            for leaf in table.rest:
                leaf[...] = _read(file, leaf.shape, leaf.dtype)
            touched = _read(file, (description["touched"],), np.int64)
            columns = [(column, touched) for column in table.by_row]
            every = np.arange(table.height) if description["given"] else touched
            for column, rows in [(table.weights, every), *columns]:
                for start in range(0, rows.size, CHUNK):
                    part = rows[start : start + CHUNK]
                    shape = part.size, *column.shape[1:]
                    put_rows(column, part, _read(file, shape, column.dtype))
                    done += part.size
                    report(done, total)
            table.touched[touched] = 1
            table.describe_as(table.key, given=description["given"])


def _check(
    call: str,
    path: Any,
    file: io.BufferedReader,
    found: dict[str, Any],
    tables: Mapping[str, Table],
) -> None:
    if found.keys() != tables.keys():
        raise ValueError(
            _OTHER_TABLES.format(
                call=call, path=path, found=sorted(found), expected=sorted(tables)
            )
        )
    expected = file.tell()
    for name, description in found.items():
        fields = "shape", "dtype", "state", "initialized"
        here = tables[name].description()
        _layout.check_same(call, path, name, description, here, fields)
        expected += _bytes(tables[name], description)
    size = os.fstat(file.fileno()).st_size
    if size != expected:
        raise ValueError(
            _CUT_OFF.format(call=call, path=path, found=size, expected=expected)
        )


def _bytes(table: Table, description: dict[str, Any]) -> int:
    count = description["touched"]
    rows = table.height if description["given"] else count
    return (
        sum(leaf.nbytes for leaf in table.rest)
        + count * 8
        + rows * _row_bytes(table.weights)
        + sum(count * _row_bytes(column) for column in table.by_row)
    )


def _row_bytes(column: np.ndarray) -> int:
    return int(np.prod(column.shape[1:])) * column.dtype.itemsize


def _steps(description: dict[str, Any]) -> int:
    """Rows to move: those of the weights, and of each leaf of state that has rows."""
    count = description["touched"]
    by_row = sum(leaf["by_row"] for leaf in description["state"])
    return (description["shape"][0] if description["given"] else count) + count * by_row


def _read(file: io.BufferedReader, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    values = np.empty(shape, dtype)
    if file.readinto(values.reshape(-1).view(np.uint8).data) != values.nbytes:
        raise OSError("the file became shorter while it was read")
    return values
