"""Saving the tables of a store in one file, and loading them.

The file is a description of all tables and then, table by table: the leaves of state
beside the rows, the ids of the rows touched, their weights (of all rows, where the
weights were given as an array), and their leaves of state. Rows that were never touched
need no room: the key in the description makes them again. Each part has a checksum.
"""

import functools
import io
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from sparsejax._files import as_path, replacing
from sparsejax.store import _blocks, _layout, _memory
from sparsejax.store._table import CHUNK, Table, put_rows


MAGIC = b"sparsejax store 2\n"


Report = Callable[[int, int], None]


def save(
    call: str, path: str | os.PathLike[str], tables: Mapping[str, Table], report: Report
) -> None:
    """Writes all tables; `path` is replaced at once when everything is on the disk."""
    if os.path.isdir(as_path(call, path)):
        raise IsADirectoryError(
            f"{call}: {path} is a directory. Give the path of a file in it."
        )
    if _memory.is_mapped_table(path):
        raise ValueError(
            f"{call}: {path} is the file of a memory-mapped table, which saving there "
            "would destroy. Save to another path."
        )
    descriptions, touched = {}, {}
    for name, table in tables.items():
        table.check_usable()
        touched[name] = np.flatnonzero(table.touched)
        count = int(touched[name].size)
        descriptions[name] = table.description() | {"touched": count}
    total = sum(_steps(description) for description in descriptions.values())
    done = 0
    with replacing(path) as file:
        _layout.write_header(file, MAGIC, {"tables": descriptions})
        for name, table in tables.items():
            for leaf in table.rest:
                _blocks.write(file, leaf)
            _blocks.write(file, touched[name].astype(np.int64))
            columns = [(column, touched[name]) for column in table.by_row]
            every = np.arange(table.height) if table.given else touched[name]
            for column, rows in [(table.weights, every), *columns]:
                for start in range(0, rows.size, CHUNK):
                    part = rows[start : start + CHUNK]
                    values = np.take(column, part, axis=0, mode="clip")
                    _blocks.write(file, values)
                    done += part.size
                    report(done, total)


def load(
    call: str, path: str | os.PathLike[str], tables: Mapping[str, Table], report: Report
) -> None:
    """Reads what `save` wrote into tables of the same kind.

    All of the file is read and checked before a table is touched. From then on, until
    the last row is there, the tables are marked as being loaded.
    """
    with open(as_path(call, path), "rb") as file:
        header = _layout.read_header(call, path, file, MAGIC)
        found = _check(call, path, file, header, tables)
        total = 2 * sum(_steps(description) for description in found.values())
        done, start = 0, file.tell()

        def advance(rows):
            nonlocal done
            done += rows
            report(done, total)

        read = functools.partial(_blocks.read, call, path, file)
        for name, description in found.items():
            parts = _parts(read, tables[name], description)
            _, ids = next(parts)
            if not _are_ids(ids, tables[name].height):
                raise ValueError(
                    f"{call}: {path} is damaged: what it says are rows of table "
                    f"{name!r} are not. Load an older file."
                )
            for _, rows, _ in parts:
                advance(rows.size)
        file.seek(start)
        for table in tables.values():
            table.set_loading(True)
        for name, description in found.items():
            table = tables[name]
            parts = _parts(read, table, description)
            rest, ids = next(parts)
            table.reset(description["key"])
            # Before the rows: whatever is written is forgotten by the next load.
            table.touched[ids] = 1
            table.describe_as(table.key, given=description["given"])
            for leaf, new in zip(table.rest, rest):
                leaf[...] = new
            for column, rows, values in parts:
                put_rows(column, rows, values)
                advance(rows.size)
        for table in tables.values():
            table.memory.flush()
            table.set_loading(False)


def _parts(read: Callable, table: Table, description: dict[str, Any]) -> Iterator[Any]:
    """What is in the file of a table.

    Gives at first `(state beside the rows, ids of the rows touched)`, and then, chunk
    by chunk, `(column, rows, values)`.
    """
    rest = [read(leaf.shape, leaf.dtype) for leaf in table.rest]
    touched = read((description["touched"],), np.int64)
    yield rest, touched
    columns = [(column, touched) for column in table.by_row]
    every = np.arange(table.height) if description["given"] else touched
    for column, rows in [(table.weights, every), *columns]:
        for start in range(0, rows.size, CHUNK):
            part = rows[start : start + CHUNK]
            yield column, part, read((part.size, *column.shape[1:]), column.dtype)


def _are_ids(ids: np.ndarray, height: int) -> bool:
    """Whether they are rows of a table, each once, ascending."""
    inside = not ids.size or (ids[0] >= 0 and ids[-1] < height)
    return bool(inside and (ids[1:] > ids[:-1]).all())


def _check(
    call: str,
    path: Any,
    file: io.BufferedReader,
    header: dict[str, Any],
    tables: Mapping[str, Table],
) -> dict[str, Any]:
    """The descriptions of a file's tables, which are those at hand."""
    found = header.get("tables")
    if not isinstance(found, dict):
        raise ValueError(
            f"{call}: {path} is not a file of sparsejax.store (its header describes no "
            "tables)."
        )
    if found.keys() != tables.keys():
        raise ValueError(
            f"{call}: {path} holds the tables {sorted(found)}, and this store "
            f"{sorted(tables)}. Call init for each table of the file, and for no "
            "other, before load."
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
            f"{call}: {path} has {size} bytes instead of {expected}: it was cut off or "
            "changed."
        )
    return found


def _bytes(table: Table, description: dict[str, Any]) -> int:
    """What a table takes in the file, checksums included."""
    count = description["touched"]
    rows = table.height if description["given"] else count
    columns = [(table.weights, rows), *((column, count) for column in table.by_row)]
    blocks = len(table.rest) + 1 + sum(-(-n // CHUNK) for _, n in columns)
    return (
        sum(leaf.nbytes for leaf in table.rest)
        + count * 8
        + sum(n * _row_bytes(column) for column, n in columns)
        + blocks * _blocks.CHECKSUM
    )


def _row_bytes(column: np.ndarray) -> int:
    return int(np.prod(column.shape[1:])) * column.dtype.itemsize


def _steps(description: dict[str, Any]) -> int:
    """Rows to move: those of the weights, and of each leaf of state that has rows."""
    count = description["touched"]
    by_row = sum(leaf["by_row"] for leaf in description["state"])
    return (description["shape"][0] if description["given"] else count) + count * by_row
