"""Saves the tables of a store to one file, and loads them.

The file has a header that describes all tables, and then for each table:

- the leaves of state without rows;
- the ids of the touched rows, their weights (or the weights of all rows, if they were
  given as an array), and their leaves of state;
- if the table has keys: the rows that have a key, with keys, steps and counts, and the
  sightings of other keys;
- the rows that changed since the store was made, and the version at which each last
  changed.

Last come the arrays of a tree that is saved with the tables (`_extra`).

Untouched rows take no space: the key in the description makes them again. Each array
has a checksum.
"""

import contextlib
import dataclasses
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sparsejax._files import as_path, replacing
from sparsejax.store import _extra, _format, _history, _keys, _memory
from sparsejax.store._history import History
from sparsejax.store._optimizer import on_host
from sparsejax.store._table import CHUNK, Table, put_rows


MAGIC = b"sparsejax store 3\n"
_COUNTS = {"touched": int, "keys?": _keys.SAVED, "changed?": int}
# Files of earlier versions have neither "history" nor "changed".
_HEADER = {
    "tables": {"*": _format.DESCRIPTION | _COUNTS},
    "history?": _history.SAVED,
    "extra?": _extra.DESCRIPTION,
    "stamp?": str,
}

_SAVE, _LOAD = "sparsejax.store.KVStore.save", "sparsejax.store.KVStore.load"

Report = Callable[[int, int], None]

_KEYS, _CHANGED = "keys", "changed"  # in place of a column


def save(
    path: str | os.PathLike[str],
    tables: Mapping[str, Table],
    history: History,
    report: Report,
    extra: Sequence[_extra.Leaf] = (),
    stamp: str | None = None,
) -> None:
    """Writes all tables to a file that then replaces `path`.

    Args:
      path: of the file.
      tables: by name.
      history: of the store.
      report: of the rows done, and in all.
      extra: the leaves of a tree.
      stamp: which the files of all processes have in common.
    """
    check_target(_SAVE, path)
    descriptions, touched, changed = {}, {}, {}
    for name, table in tables.items():
        table.check_usable()
        table.check_written_back()
        touched[name] = np.flatnonzero(table.touched)
        changed[name] = table.changed_at.since(0)
        counts = {"touched": touched[name].size, "changed": changed[name].size}
        keys = {} if table.keys is None else {"keys": table.keys.description()}
        descriptions[name] = table.description() | counts | keys
    total = sum(_steps(description) for description in descriptions.values())
    done = 0
    with replacing(path) as file:
        header = {"tables": descriptions, "history": history.description()}
        header |= {"extra": _extra.describe(extra)} if extra else {}
        header |= {} if stamp is None else {"stamp": stamp}
        _format.write_header(file, MAGIC, header)
        for name, table in tables.items():
            for leaf in table.rest:
                _format.write_array(file, leaf)
            _format.write_array(file, touched[name].astype(np.int64))
            columns = [(column, touched[name]) for column in table.by_row]
            weighted = np.arange(table.height) if table.spec.given else touched[name]
            for column, rows in [(table.weights, weighted), *columns]:
                for start in range(0, rows.size, CHUNK):
                    chunk = rows[start : start + CHUNK]
                    values = np.take(column, chunk, axis=0, mode="clip")
                    _format.write_array(file, values)
                    done += chunk.size
                    report(done, total)
            if table.keys is not None:
                for array in table.keys.contents():
                    _format.write_array(file, array)
            _format.write_array(file, changed[name])
            _format.write_array(file, table.changed_at.at(changed[name]))
        for leaf in extra:
            if leaf.is_array:
                _format.write_array(file, leaf.value)
        check_target(_SAVE, path)  # a table may have been made there meanwhile


def check_target(call: str, path: str | os.PathLike[str]) -> None:
    """Raises if `path` is a directory, or the file of a mapped table."""
    if os.path.isdir(as_path(call, path)):
        raise IsADirectoryError(
            f"{call}: path must be a file, got the directory {path}."
        )
    if _memory.is_mapped_table(path):
        raise ValueError(
            f"{call}: {path} is the file of a memory-mapped table, which this call "
            "would destroy. Use another path."
        )


def stamp_in(call: str, path: str) -> str | None:
    """The stamp in the header of a file of `save`, if it has one."""
    with open(path, "rb") as file:
        return _format.read_header(call, path, file, MAGIC, _HEADER).get("stamp")


def check(
    path: str | os.PathLike[str],
    tables: Mapping[str, Table],
    report: Report,
    extra: Any = None,
) -> Any:
    """Checks the whole file of a `save`, and changes nothing.

    Args:
      path, tables, report: as in `save`.
      extra: a tree like the one that was saved, or None.

    Returns:
      The tree that was saved.
    """
    for table in tables.values():
        table.check_not_cached()
    with open(as_path(_LOAD, path), "rb") as file:
        header = _format.read_header(_LOAD, path, file, MAGIC, _HEADER)
        if "history" in header:
            _history.check_versions(_LOAD, path, header["history"])
        found = _checked_descriptions(path, file, header, tables)
        total = 2 * sum(_steps(description) for description in found.values())
        done = 0
        for name, description in found.items():
            contents = _contents(path, file, tables[name], description)
            next(contents)
            for column, rows, _ in contents:
                if isinstance(column, np.ndarray):
                    done += rows.size
                    report(done, total)
        leaves = header.get("extra", [])
        read = lambda size: _format.read_array(_LOAD, path, file, (size,), np.uint8)
        arrays = [read(size) for size in _extra.sizes(leaves)]
        return _extra.put(_LOAD, path, extra, leaves, arrays)


def load(
    path: str | os.PathLike[str],
    tables: Mapping[str, Table],
    history: History,
    report: Report,
) -> None:
    """Reads a file that `check` has checked into its tables.

    Until the last row is read, the tables are marked as half loaded.
    """
    with open(as_path(_LOAD, path), "rb") as file:
        header = _format.read_header(_LOAD, path, file, MAGIC, _HEADER)
        found = _checked_descriptions(path, file, header, tables)
        done = sum(_steps(description) for description in found.values())
        total = 2 * done
        with marked_as_loading(tables):
            for name, description in found.items():
                table = tables[name]
                contents = _contents(path, file, table, description)
                rest, ids = next(contents)
                table.flushed_step = description.get("step")
                table.reset(description["key"])
                # Marked before they are written, so that the next load resets them.
                table.touched[ids] = 1
                table.describe_as(table.spec.key, given=description["given"])
                for leaf, new in zip(table.rest, rest):
                    leaf[...] = new
                for column, rows, values in contents:
                    if column is _KEYS:
                        assert table.keys is not None
                        table.keys.restore(description["keys"], values)
                    elif column is _CHANGED:
                        table.changed_at.mark(rows, values)
                    else:
                        put_rows(column, rows, values)
                        done += rows.size
                        report(done, total)
        if "history" in header:
            history.follow(header["history"])
        else:
            history.forget()


@contextlib.contextmanager
def marked_as_loading(tables: Mapping[str, Table]) -> Iterator[None]:
    """A kill or an error within it leaves tables that are marked as half loaded."""
    for table in tables.values():
        table.set_loading(True)
    yield
    for table in tables.values():
        table.memory.flush()
        table.set_loading(False)


def _contents(
    path: Any, file: io.BufferedReader, table: Table, description: dict[str, Any]
) -> Iterator[Any]:
    """Reads the arrays of a table.

    Yields first `(state without rows, ids of the touched rows)`, and then, chunk by
    chunk, `(column, rows, values)`. If the table has keys, `(_KEYS, rows, arrays)`
    follows, with the arrays of `TableKeys.contents`. Last, unless the file is of an
    earlier version, `(_CHANGED, rows, versions)`.
    """

    def check_rows(ids):
        in_range = not ids.size or (ids[0] >= 0 and ids[-1] < table.height)
        if not (in_range and (ids[1:] > ids[:-1]).all()):
            raise ValueError(
                f"{_LOAD}: {path} is damaged: its rows of table {table.spec.name!r} "
                "are not ascending row ids. Load an older file."
            )

    read = lambda shape, dtype: _format.read_array(_LOAD, path, file, shape, dtype)
    rest = [read(leaf.shape, leaf.dtype) for leaf in table.rest]
    touched = read((description["touched"],), np.int64)
    check_rows(touched)
    yield rest, touched
    columns = [(column, touched) for column in table.by_row]
    weighted = np.arange(table.height) if description["given"] else touched
    for column, rows in [(table.weights, weighted), *columns]:
        for start in range(0, rows.size, CHUNK):
            chunk = rows[start : start + CHUNK]
            yield column, chunk, read((chunk.size, *column.shape[1:]), column.dtype)
    if table.keys is not None:
        arrays = [read((n,), np.int64) for n in _keys.sizes(description["keys"])]
        check_rows(arrays[0])
        yield _KEYS, arrays[0], arrays
    if "changed" in description:
        changed = read((description["changed"],), np.int64)
        check_rows(changed)
        yield _CHANGED, changed, read(changed.shape, np.int64)


def _checked_descriptions(
    path: Any,
    file: io.BufferedReader,
    header: dict[str, Any],
    tables: Mapping[str, Table],
) -> dict[str, Any]:
    """The descriptions in a header, which must agree with `tables`."""
    found = header["tables"]
    if found.keys() != tables.keys():
        raise ValueError(
            f"{_LOAD}: {path} has the tables {sorted(found)}, but this store has "
            f"{sorted(tables)}. Before load, call init for exactly the tables of the "
            "file."
        )
    expected = file.tell()
    for name, description in found.items():
        fields = "shape", "dtype", "state", "keyed"
        _check_key(path, name, description["key"])
        here = dataclasses.replace(tables[name].spec, key=description["key"]).describe()
        _format.check_same(_LOAD, path, name, description, here, fields)
        if tables[name].keys is not None and "keys" not in description:
            raise ValueError(
                f"{_LOAD}: {path} is damaged: it has no keys of table {name!r}. "
                "Load an older file."
            )
        expected += _bytes(tables[name], description)
    for count in _extra.sizes(header.get("extra", [])):
        expected += count + _format.CHECKSUM_BYTES
    size = os.fstat(file.fileno()).st_size
    if size != expected:
        raise ValueError(
            f"{_LOAD}: {path} has {size} bytes instead of {expected}: it was truncated "
            "or changed."
        )
    return found


def _check_key(path: Any, name: str, key: dict[str, Any]) -> None:
    """Raises unless the rows of a table can start from the key in a file."""
    try:
        with on_host():
            is_one = _format.decode_key(key).ndim == 0
    except (TypeError, ValueError, OverflowError):
        is_one = False
    if not is_one:
        raise ValueError(
            f"{_LOAD}: {path} is damaged: the key of table {name!r} is {key}. Load an "
            "older file."
        )


def _bytes(table: Table, description: dict[str, Any]) -> int:
    """The size of a table in the file, with checksums."""
    count = description["touched"]
    rows = table.height if description["given"] else count
    columns = [(table.weights, rows), *((column, count) for column in table.by_row)]
    size = count * 8 + sum(leaf.nbytes for leaf in table.rest)
    arrays = len(table.rest) + 1
    if table.keys is not None:
        sizes = _keys.sizes(description["keys"])
        size += sum(sizes) * 8
        arrays += len(sizes)
    if "changed" in description:
        size += description["changed"] * 16
        arrays += 2
    for column, n in columns:
        size += n * int(np.prod(column.shape[1:])) * column.dtype.itemsize
        arrays += -(-n // CHUNK)
    return size + arrays * _format.CHECKSUM_BYTES


def _steps(description: dict[str, Any]) -> int:
    """The number of rows to read or write, of weights and of each leaf of state."""
    count = description["touched"]
    by_row = sum(leaf["by_row"] for leaf in description["state"])
    return (description["shape"][0] if description["given"] else count) + count * by_row
