"""Files of changes: the rows of a store that changed since a version.

A trainer writes such files, and a follower, a store with the same tables, applies them.
The header describes the tables, the version of the changes and the version since which
they are. Then for each table:

- the ids of the rows that changed, and for each a byte: 0 if the row is untouched
  again, because its key was evicted;
- the weights of the other rows; with state, their leaves of state and the leaves
  without rows;
- if the table has keys: key, last step and count of each row that changed, where a
  count of 0 means that the row has no key; with state, all sightings of other keys.

Each array has a checksum. A file is read and checked as a whole before a table changes.
All values are absolute, so a file may begin before the version of the follower. A file
since version 0 has all rows that are not as `init` makes them: it may replace whatever
a follower has.
"""

import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from sparsejax._files import as_path, replacing
from sparsejax.store import _format, _history
from sparsejax.store._history import History
from sparsejax.store._saving import check_target, marked_as_loading
from sparsejax.store._table import CHUNK, Table


MAGIC = b"sparsejax delta 1\n"
_SIGHTINGS = {"young": int, "old": int, "hand": int}
_HEADER = {
    "since": int,
    "version": int,
    "branches": _history.BRANCHES,
    "state": bool,
    "tables": {
        "*": _format.DESCRIPTION | {"rows": int, "touched": int, "keys?": _SIGHTINGS}
    },
}

_EXPORT = "sparsejax.store.KVStore.export_changes"
_APPLY = "sparsejax.store.KVStore.apply_changes"


class Changes(NamedTuple):
    """What changed in a table, from `KVStore.apply_changes`.

    Args:
      rows: integers `[n]`, the ids of the rows that changed, ascending.
      evicted: int64 `[m]`, the keys that lost their row, ascending; hashes for strings.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> trainer, follower = sj.store.KVStore(), sj.store.KVStore()
      >>> for store in trainer, follower:
      ...     store.init("words", (1000, 2), None)
      >>> trainer.assign("words", sj.SelectedRows([7], jnp.ones((1, 2)), 1000))
      >>> import tempfile
      >>> path = f"{tempfile.mkdtemp()}/changes"
      >>> trainer.export_changes(path, since=0)
      1
      >>> follower.apply_changes(path)["words"].rows
      array([7], dtype=int32)
    """

    rows: np.ndarray
    evicted: np.ndarray


# ------------------------------------------------------------------ writing


def changed_since(
    call: str, tables: Mapping[str, Table], history: History, since: int
) -> dict[str, np.ndarray]:
    """The rows of each table that changed after a version, int64, ascending."""
    if since > history.version:
        raise ValueError(
            f"{call}: version {since} is not reached yet: this store is at version "
            f"{history.version}. If it was loaded from a file, its versions go on from "
            "the version of the file, store.version."
        )
    if since < history.known_since:
        raise ValueError(
            f"{call}: the changes since version {since} are not known, only those "
            f"since version {history.known_since}, because a table was opened from its "
            "file, or loaded from a file without versions. export_changes(since=0) "
            "writes all rows."
        )
    return {name: table.changed_at.since(since) for name, table in tables.items()}


def export(
    path: str | os.PathLike[str],
    tables: Mapping[str, Table],
    history: History,
    since: int,
    state: bool,
) -> int:
    """Writes the rows that changed after a version; returns the current version."""
    check_target(_EXPORT, path)
    if since == 0 < history.known_since:
        rows = {name: _all_rows(table) for name, table in tables.items()}
    else:
        rows = changed_since(_EXPORT, tables, history, since)
    is_touched, descriptions = {}, {}
    for name, table in tables.items():
        # The weights that were given belong to rows that may be untouched.
        is_touched[name] = (table.touched[rows[name]] != 0) | table.spec.given
        touched = int(np.count_nonzero(is_touched[name]))
        counts = {"rows": rows[name].size, "touched": touched}
        descriptions[name] = table.description() | counts
        if table.keys is not None:
            sightings = table.keys.description() if state else {}
            descriptions[name]["keys"] = {
                field: sightings.get(field, 0) for field in _SIGHTINGS
            }
    header = {
        "since": since,
        "version": history.version,
        "branches": history.branches,
        "state": state,
        "tables": descriptions,
    }
    with replacing(path) as file:
        _format.write_header(file, MAGIC, header)
        for name, table in tables.items():
            _write_table(file, table, rows[name], is_touched[name], state)
        check_target(_EXPORT, path)
    return history.version


def _all_rows(table: Table) -> np.ndarray:
    """The rows that may not be as `init` makes them, int64, ascending."""
    if table.spec.given:
        return np.arange(table.height)
    is_known = table.touched != 0
    is_known[table.changed_at.since(0)] = True
    return np.flatnonzero(is_known)


def _write_table(
    file: BinaryIO,
    table: Table,
    rows: np.ndarray,
    is_touched: np.ndarray,
    state: bool,
) -> None:
    touched = rows[is_touched]
    _format.write_array(file, rows)
    _format.write_array(file, is_touched.astype(np.uint8))
    for column in table.columns if state else [table.weights]:
        for start in range(0, touched.size, CHUNK):
            chunk = touched[start : start + CHUNK]
            _format.write_array(file, np.take(column, chunk, axis=0, mode="clip"))
    if state:
        for leaf in table.rest:
            _format.write_array(file, leaf)
    if table.keys is not None:
        for column in table.keys.columns:
            _format.write_array(file, column[rows])
        if state:
            for array in table.keys.sightings():
                _format.write_array(file, array)


# ------------------------------------------------------------------ applying


class _Part(NamedTuple):
    """The changes of a table, read from a file.

    Args:
      rows, is_touched: the rows that changed, and a mask of those that have weights.
      columns: of the rows that have weights: the weights; with state, all columns.
      rest: the leaves of state without rows; none without state.
      keys: the columns of the keys of all these rows; none without keys.
      sightings: of other keys; none without state.
      hand: the row at which victims are searched next.
    """

    rows: np.ndarray
    is_touched: np.ndarray
    columns: list[np.ndarray]
    rest: list[np.ndarray]
    keys: list[np.ndarray]
    sightings: list[np.ndarray]
    hand: int


def apply(
    path: str | os.PathLike[str], tables: Mapping[str, Table], history: History
) -> dict[str, Changes]:
    """Reads a file of `export` into tables with the same names and descriptions."""
    for table in tables.values():
        table.check_usable()
        table.check_not_cached()
    with open(as_path(_APPLY, path), "rb") as file:
        header = _format.read_header(_APPLY, path, file, MAGIC, _HEADER)
        _history.check_versions(_APPLY, path, header)
        _check_tables(path, header, tables)
        is_old, replaces = _check_version(path, header, tables, history)
        _check_size(path, file, header, tables)
        read = lambda shape, dtype: _format.read_array(_APPLY, path, file, shape, dtype)
        parts = {
            name: _read_part(
                path, read, tables[name], description, header["state"], replaces
            )
            for name, description in header["tables"].items()
        }
    if is_old:
        nothing = np.zeros((0,), np.int64)
        return {
            name: Changes(table.ids_of(nothing), nothing)
            for name, table in tables.items()
        }
    for name, part in parts.items():
        index = tables[name].keys
        if index is not None and not index.can_replace(part.rows, part.keys):
            raise _damaged(path, name, "a key has several rows")
    for name, part in parts.items():
        tables[name].touch(part.rows[part.is_touched])  # which a usable table allows
    with marked_as_loading(tables), history.one_change():
        found = {name: _apply_part(tables[name], part) for name, part in parts.items()}
        history.follow(header)
        for name, part in parts.items():
            if replaces:
                tables[name].forget_changes()
            tables[name].changed_at.mark(part.rows, history.version)
        if replaces:
            history.known_since = history.version
    return found


def _apply_part(table: Table, part: _Part) -> Changes:
    """Changes a table; returns what changed."""
    evicted = np.zeros((0,), np.int64)
    if table.keys is not None:
        evicted = np.sort(table.keys.replace(part.rows, part.keys))
        if part.sightings:
            table.keys.restore_sightings(part.sightings, part.hand)
    table.clear(part.rows[~part.is_touched])
    table.write(part.rows[part.is_touched], part.columns)
    for old, new in zip(table.rest, part.rest):
        old[...] = new
    return Changes(table.ids_of(part.rows), evicted)


def _check_tables(
    path: Any, header: dict[str, Any], tables: Mapping[str, Table]
) -> None:
    """Raises a ValueError unless a file is of the same tables."""
    found = header["tables"]
    if found.keys() != tables.keys():
        raise ValueError(
            f"{_APPLY}: {path} has the tables {sorted(found)}, but this store has "
            f"{sorted(tables)}. Call init for exactly the tables of the file."
        )
    for name, description in found.items():
        table = tables[name]
        fields = ["shape", "dtype", "given", "keyed"]
        fields += ["key"] * (table.spec.initializer is not None)
        fields += ["state"] * header["state"]
        here = table.description()
        _format.check_same(_APPLY, path, name, description, here, tuple(fields))
        if table.keys is not None and "keys" not in description:
            raise _damaged(path, name, "it has no keys")


def _check_version(
    path: Any, header: dict[str, Any], tables: Mapping[str, Table], history: History
) -> tuple[bool, bool]:
    """Raises a ValueError for a file that does not fit.

    Returns:
      `(is_old, replaces)`: the file was applied before; the file has all rows, and is
      of another store, or this store has changes of its own.
    """
    branches, since, version = (
        header[field] for field in ("branches", "since", "version")
    )
    if history.has_passed(branches, version):
        return True, False
    if not history.is_passed_by(branches, version):
        has_all = all(
            not table.spec.given or header["tables"][name]["rows"] == table.height
            for name, table in tables.items()
        )
        if since == 0 and has_all:
            return False, True
        raise ValueError(
            f"{_APPLY}: {path} has the changes from version {since} to {version} of "
            f"another store than the one that this store follows to version "
            f"{history.version}: this store was changed itself, or the other store "
            "went on from an older file. Load a file that the other store saved, or "
            "apply one of export_changes(since=0)."
        )
    if since > history.version:
        raise ValueError(
            f"{_APPLY}: {path} has the changes since version {since}, but this store "
            f"is at version {history.version}. First apply the files between them."
        )
    return False, False


def _check_size(
    path: Any, file: Any, header: dict[str, Any], tables: Mapping[str, Table]
) -> None:
    """Raises a ValueError unless a file has the size that its header says."""
    expected, state = file.tell(), header["state"]
    for name, description in header["tables"].items():
        table = tables[name]
        rows, touched = description["rows"], description["touched"]
        columns = table.columns if state else [table.weights]
        sizes = [rows * 8, rows]
        for column in columns:
            sizes.append(touched * math.prod(column.shape[1:]) * column.dtype.itemsize)
        if state:
            sizes += [leaf.nbytes for leaf in table.rest]
        if table.keys is not None:
            sizes += [rows * 8] * len(table.keys.columns)
            if state:
                young, old = (description["keys"][x] for x in ("young", "old"))
                sizes += [8 * n for n in (young, young, old, old)]
        # The columns are written in chunks, each with a checksum.
        checksums = len(sizes) + len(columns) * (-(-touched // CHUNK) - 1)
        expected += sum(sizes) + checksums * _format.CHECKSUM_BYTES
    size = os.fstat(file.fileno()).st_size
    if size != expected:
        raise ValueError(
            f"{_APPLY}: {path} has {size} bytes instead of {expected}: it was "
            "truncated or changed. Use another copy."
        )


def _read_part(
    path: Any,
    read: Any,
    table: Table,
    description: dict[str, Any],
    state: bool,
    replaces: bool,
) -> _Part:
    """Reads and checks the changes of a table."""
    count, touched = description["rows"], description["touched"]
    rows = read((count,), np.int64)
    flags = read((count,), np.uint8)
    in_range = not count or (rows[0] >= 0 and rows[-1] < table.height)
    if not in_range or (rows[1:] <= rows[:-1]).any():
        raise _damaged(path, table.spec.name, "its rows are not ascending row ids")
    is_touched = flags == 1
    if (flags > 1).any() or np.count_nonzero(is_touched) != touched:
        raise _damaged(
            path, table.spec.name, "rows with and without weights do not add up"
        )
    if table.spec.given and touched != count:
        raise _damaged(path, table.spec.name, "it has rows without weights")
    columns = []
    for column in table.columns if state else [table.weights]:
        new = np.empty((touched, *column.shape[1:]), column.dtype)
        for start in range(0, touched, CHUNK):
            part = new[start : start + CHUNK]
            part[...] = read(part.shape, part.dtype)
        columns.append(new)
    rest = [read(leaf.shape, leaf.dtype) for leaf in table.rest] if state else []
    keys, sightings, hand = [], [], 0
    if table.keys is not None:
        keys = [read((count,), np.int64) for _ in table.keys.columns]
        if state:
            sizes = description["keys"]
            young, old, hand = (sizes[x] for x in ("young", "old", "hand"))
            sightings = [read((n,), np.int64) for n in (young, young, old, old)]
    if replaces:  # all other rows become untouched
        others = np.setdiff1d(_all_rows(table), rows, assume_unique=True)
        order = np.argsort(np.concatenate([rows, others]))
        rows, is_touched, *keys = (
            np.concatenate([x, y])[order]
            for x, y in zip(
                [rows, is_touched, *keys],
                [
                    others,
                    *(np.zeros(others.shape, x.dtype) for x in [is_touched, *keys]),
                ],
            )
        )
    return _Part(rows, is_touched, columns, rest, keys, sightings, hand)


def _damaged(path: Any, name: str, why: str) -> ValueError:
    return ValueError(
        f"{_APPLY}: {path} is damaged: of table {name!r}, {why}. Use another copy."
    )
