"""The journal of a mapped table: the content of its rows at the last flush.

A device cache writes rows back at any time, so that between two flushes the file of its
table has rows of different steps. Before a row is overwritten for the first time since
a flush, its old weights and state are appended to the journal, a file next to the file
of the table. If the process is killed, the next process that opens the table rolls it
back.

The header of the table contains the id of its journal. The header is written with the
id after the journal is begun, and without it when a flush is done. Each is one write,
so that a kill leaves the old header or the new one. A journal whose id is in no header
is useless, and is overwritten or removed.

A journal has no record for each entry: nothing can be appended to an archive, and a
file for each write-back would be thousands between two flushes.

An entry is appended before its rows are overwritten. So only the last entry can be cut
short by a kill, and none of its rows was overwritten.
"""

import math
import os
import pathlib
import secrets
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from sparsejax._files import CHUNK, as_bytes
from sparsejax.store import _mapped, _records
from sparsejax.store._table import Table


MAGIC = b"sparsejax journal 1\n"
_HEADER = {"id": str}
# Bytes before an entry: its number of rows, its checksum, and a checksum of these two.
_PREFIX = 16


def journal_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of the journal of a mapped table."""
    path = pathlib.Path(os.path.realpath(path))
    return path.with_name(f"{path.name}.journal")


class Journal:
    """Keeps the content of the rows of a mapped table at the last flush.

    Args:
      table: with a mapped file.
    """

    def __init__(self, table: Table):
        self._table = table
        self._path = journal_path(table.memory.path)
        self._file: BinaryIO | None = None
        self._is_logged = np.zeros((0,), bool)

    def before_write(self, rows: np.ndarray) -> None:
        """Appends the rows that were not written since the last flush."""
        file = self._begin()
        rows = rows[~self._is_logged[rows]]
        for start in range(0, rows.size, CHUNK):
            part = rows[start : start + CHUNK]
            columns = [np.take(x, part, axis=0) for x in self._table.columns]
            _append(file, part.size, [part.astype(np.int64), *columns])
        self._is_logged[rows] = True

    def commit(self) -> None:
        """Ends the journal of a table that is on the disk."""
        self._table.journal = None
        self._table.write_header()
        if self._file is not None:
            self.release()
            self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Leaves the journal to the next process that opens the table."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def roll_back(self) -> None:
        """Restores the table at its last flush."""
        if self._file is not None:
            self.release()
            roll_back(self._table)

    def _begin(self) -> BinaryIO:
        if self._file is not None:
            return self._file
        name = secrets.token_hex(8)
        file = open(self._path, "wb")
        file.write(_records.header_bytes(MAGIC, {"id": name}))
        _append(file, 0, self._table.rest)
        os.fsync(file.fileno())
        self._table.journal = name
        self._table.write_header()
        self._file = file
        self._is_logged = _mapped.zeros((self._table.height,), bool)
        return file


def roll_back(table: Table) -> None:
    """Restores a mapped table at the last flush of its device cache.

    Raises:
      ValueError: the journal is missing or damaged; the table has not changed.
    """
    path = journal_path(table.memory.path)
    if table.journal is None:
        _remove_leftover(path)
        return
    try:
        file = open(path, "rb")
    except FileNotFoundError:
        raise ValueError(
            f"Table {table.spec.name!r} was trained in a CachedTable that did "
            f"not end with a flush, and its journal {path}, which has the rows of the "
            "last flush, is not there. Put it back, or use another copy of the table."
        ) from None
    with file:
        for is_checked in (False, True):  # all checksums, before a row is changed
            file.seek(0)
            header = _records.read_header(path, file, MAGIC, _HEADER)
            if header["id"] != table.journal:
                raise ValueError(
                    f"{path} is not the journal of this copy of table "
                    f"{table.spec.name!r}. Put back the one that belongs to it."
                )
            entries = _entries(path, file, table)
            other_state = next(entries)
            for rows, *columns in entries:
                if is_checked:
                    table.write(rows, columns)
    for old, new in zip(table.rest, other_state):
        old[...] = new
    table.memory.flush()
    table.journal = None
    table.write_header()
    path.unlink()


def _remove_leftover(path: pathlib.Path) -> None:
    """Removes a journal that a kill after its flush left; removes no other file."""
    try:
        with open(path, "rb") as file:
            begins = file.read(len(MAGIC))
    except FileNotFoundError:
        return
    if MAGIC.startswith(begins):
        path.unlink(missing_ok=True)


def _append(file: BinaryIO, count: int, arrays: Sequence[np.ndarray]) -> None:
    parts = [as_bytes(x) for x in arrays]
    prefix = count.to_bytes(8, "little") + _checksum(*parts)
    for part in (prefix, _checksum(prefix), *parts):
        file.write(part)
    file.flush()


def _entries(path: Any, file: BinaryIO, table: Table) -> Iterator[list[np.ndarray]]:
    """Yields the leaves of state without rows, then rows and columns of each entry."""
    size, is_first = os.fstat(file.fileno()).st_size, True
    while True:
        prefix = file.read(_PREFIX)
        count = int.from_bytes(prefix[:8], "little")
        is_cut = len(prefix) < _PREFIX
        if not is_cut and _checksum(prefix[:12]) != prefix[12:]:
            raise _damaged(path, file)
        specs = [(x.shape, x.dtype) for x in table.rest]
        if not is_first:
            specs = [((count, *x.shape[1:]), x.dtype) for x in table.columns]
            specs.insert(0, ((count,), np.dtype(np.int64)))
        lengths = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
        if is_cut or sum(lengths) > size - file.tell():
            if is_first:  # it was on the disk before the table's header had the id
                raise _damaged(path, file)
            return
        parts = [file.read(length) for length in lengths]
        if _checksum(*parts) != prefix[8:12]:
            raise _damaged(path, file)
        arrays = [
            np.frombuffer(part, dtype).reshape(shape)
            for part, (shape, dtype) in zip(parts, specs)
        ]
        if not is_first and (arrays[0].view(np.uint64) >= table.height).any():
            raise _damaged(path, file)
        yield arrays
        is_first = False


def _checksum(*parts: Any) -> bytes:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum.to_bytes(4, "little")


def _damaged(path: Any, file: BinaryIO) -> ValueError:
    return ValueError(
        f"{path} is damaged before byte {file.tell()}, so its table cannot be "
        "restored at the last flush. Use another copy of both files."
    )
