"""Saves and changes of a store: the rows that changed since a version, in one record.

A save is all rows that changed since version 0, with their optimizer state; a file of
`export_changes` is the same since any version, with or without state. The header
describes the tables, the run of the store and the versions. For the k-th table:

- `k.rows`, `k.kinds`: the ids of the rows that changed, ascending; and for each
  `_GONE` if the row is untouched again, `_WHOLE` if it has weights and state, or
  `_GIVEN` if it has the weights that were given to `init`, and no state yet.
- `k.weights`: of the rows that are not gone; `k.state.i`: of the whole rows.
- `k.rest.i`: the leaves of state without rows.
- `k.keys.i`, of a table with keys: key, last step and count of each row, where a count
  of 0 means that the row has no key. `k.sightings.i`: of other keys, with state.

Untouched rows are not written: the key in the description makes them again. All values
are absolute, so a file may begin before the version of its reader. A file since version
0 has all rows that are not as `init` makes them: it may replace whatever a store has.

A file is read twice. Nothing changes until all of it has been checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsejax._files import CHUNK, Reader, Spec, Writer, as_path, replacing
from sparsejax.store import _mapped, _records, _saved_tree
from sparsejax.store._history import History
from sparsejax.store._optimizer import on_host
from sparsejax.store._table import Table, put_rows


_FORMAT = "sparsejax store 4"
_GONE, _WHOLE, _GIVEN = 0, 1, 2  # kinds of rows
_MAX_VERSION = 1 << 62
_SIGHTINGS = {"young": int, "old": int, "hand": int}
_COUNTS = {"rows": int, "weights": int, "whole": int, "sightings?": _SIGHTINGS}
_HEADER = {
    "run": str,
    "since": int,
    "version": int,
    "state": bool,
    "tables": {"*": _records.DESCRIPTION | _COUNTS},
    "tree": _saved_tree.DESCRIPTION,
}

Report = Callable[[int, int], None]


class Changes(NamedTuple):
    """The changes of a table, from `KVStore.apply_changes`.

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
    tables: Mapping[str, Table], history: History, since: int
) -> dict[str, np.ndarray]:
    """Returns the rows of each table that changed after a version, int64, ascending."""
    _check_readable(tables)
    if since > history.version:
        raise ValueError(
            f"Version {since} is not reached yet: this store is at version "
            f"{history.version}."
        )
    if since < history.known_since:
        raise ValueError(
            f"The changes since version {since} are not known, only those since "
            f"version {history.known_since}, because a table was opened from its file, "
            "or a file was loaded. export_changes(since=0) writes all rows."
        )
    return {name: table.changed_at.since(since) for name, table in tables.items()}


def _check_readable(tables: Mapping[str, Table]) -> None:
    for table in tables.values():
        table.check_usable()
        table.check_written_back()


# The arrays of a table in a record by member, apart from its columns.
Part = dict[str, np.ndarray]


def _numbered(field: str, arrays: Iterable[np.ndarray]) -> Part:
    return {f"{field}.{i}": array for i, array in enumerate(arrays)}


def _arrays(part: Part, field: str) -> list[np.ndarray]:
    """Inverts `_numbered`."""
    return [x for member, x in part.items() if member.startswith(f"{field}.")]


def _columns(
    tables: Mapping[str, Table], parts: Mapping[str, Part], state: bool
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Returns the columns in a record: the member, the array and its rows."""
    columns = []
    for k, (name, part) in enumerate(parts.items()):
        rows, kinds, table = part["rows"], part["kinds"], tables[name]
        columns.append((f"{k}.weights", table.weights, rows[kinds != _GONE]))
        whole = rows[kinds == _WHOLE]
        for i, array in enumerate(table.by_row if state else []):
            columns.append((f"{k}.state.{i}", array, whole))
    return columns


def _spec_of(column: np.ndarray, ids: np.ndarray) -> Spec:
    return (ids.size, *column.shape[1:]), column.dtype


def write(
    path: str | os.PathLike[str],
    tables: Mapping[str, Table],
    history: History,
    since: int,
    state: bool,
    report: Report = lambda done, total: None,
    tree: tuple[Sequence[Any], Sequence[np.ndarray]] = ((), ()),
    *,
    all_rows: bool = False,
) -> int:
    """Writes the rows that changed after a version; returns the current version.

    Args:
      path: of the file, which is replaced when it is complete.
      tables, history: of the store.
      since: the version.
      state: True to write the optimizer state, too.
      report: of the rows done, and in all.
      tree: from `_saved_tree.describe`.
      all_rows: True to write the rows that were touched, too, which start the same in
        any store.
    """
    check_target(path)
    if all_rows or since == 0 < history.known_since:
        _check_readable(tables)
        rows = {name: _all_rows(table) for name, table in tables.items()}
    else:
        rows = changed_since(tables, history, since)
    parts: dict[str, Part] = {}
    descriptions = {}
    for name, table in tables.items():
        changed = rows[name]
        is_given = _GIVEN if table.spec.given else _GONE
        kinds = np.where(table.touched[changed] != 0, _WHOLE, is_given)
        parts[name] = part = {"rows": changed, "kinds": kinds.astype(np.uint8)}
        descriptions[name] = table.description() | {
            "rows": kinds.size,
            "weights": int(np.count_nonzero(kinds)),
            "whole": int(np.count_nonzero(kinds == _WHOLE)),
        }
        if state:
            part |= _numbered("rest", table.rest)
        if table.keys is not None:
            part |= _numbered("keys", (x[changed] for x in table.keys.columns))
            if state:
                sizes, sightings = table.keys.sightings()
                part |= _numbered("sightings", sightings)
                descriptions[name]["sightings"] = sizes
    header = {
        "run": history.run,
        "since": since,
        "version": history.version,
        "state": state,
        "tables": descriptions,
        "tree": tree[0],
    }
    columns = _columns(tables, parts, state)
    total, done = sum(ids.size for _, _, ids in columns), 0

    def chunks(column, ids):
        nonlocal done
        for start in range(0, ids.size, CHUNK):
            chunk = ids[start : start + CHUNK]
            yield np.take(column, chunk, axis=0, mode="clip")
            done += chunk.size
            report(done, total)

    with replacing(path) as file:
        with contextlib.closing(Writer(file, _FORMAT, header)) as writer:
            for k, part in enumerate(parts.values()):
                for member, array in part.items():
                    writer.array(f"{k}.{member}", array)
            for member, column, ids in columns:
                writer.chunks(member, _spec_of(column, ids), chunks(column, ids))
            for k, array in enumerate(tree[1]):
                writer.array(f"tree.{k}", array)
        check_target(path)  # a table may have been made there meanwhile
    return history.version


def check_target(path: str | os.PathLike[str]) -> None:
    """Raises if `path` is a directory, or the file of a mapped table."""
    if os.path.isdir(as_path("KVStore", path)):
        raise IsADirectoryError(f"path must be a file, got the directory {path}.")
    if _mapped.is_mapped_table(path):
        raise ValueError(
            f"{path} is the file of a memory-mapped table, which this call would "
            "destroy. Use another path."
        )


def _all_rows(table: Table) -> np.ndarray:
    """Returns the rows that may differ from `init`'s, int64, ascending."""
    if table.spec.given:
        return np.arange(table.height)
    is_known = table.touched != 0
    is_known[table.changed_at.since(0)] = True
    if table.keys is not None:
        is_known[table.keys.rows()] = True
    return np.flatnonzero(is_known)


# ------------------------------------------------------------------ reading


def _specs(table: Table, saved: Mapping[str, Any], state: bool) -> dict[str, Spec]:
    """Returns the arrays of a table that a file must have, by member.

    Args:
      table: of the store.
      saved: the description of the table in the file.
      state: True if the file has the optimizer state.
    """
    int64, count = np.dtype(np.int64), (saved["rows"],)
    specs: dict[str, Spec] = {"rows": (count, int64), "kinds": (count, np.uint8)}
    if table.keys is not None:
        specs |= {f"keys.{i}": (count, int64) for i in range(len(table.keys.columns))}
    columns = {"weights": (table.weights, saved["weights"])}
    if state:
        specs |= {f"rest.{i}": (x.shape, x.dtype) for i, x in enumerate(table.rest)}
        whole = saved["whole"]
        columns |= {f"state.{i}": (x, whole) for i, x in enumerate(table.by_row)}
        if table.keys is not None:
            sizes = (saved["sightings"]["young"] + saved["sightings"]["old"],)
            specs |= {f"sightings.{i}": (sizes, int64) for i in range(2)}
    for member, (column, size) in columns.items():
        specs[member] = (size, *column.shape[1:]), column.dtype
    return specs


class Record:
    """A record that was checked against the tables of a store.

    Args:
      path: of the file.
      tables: by name.
      report: of the rows done, and in all.
      replaces: True for a save that replaces all tables, also their keys and the
        weights that were given.
      tree: a tree like the one that was saved, or None.

    Raises:
      ValueError: the file is damaged, or has other tables.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tables: Mapping[str, Table],
        report: Report,
        *,
        replaces: bool,
        tree: Any = None,
    ):
        self.path, self.tables, self._report = path, tables, report
        for table in tables.values():
            table.check_not_cached()
        with Reader(as_path("KVStore", path), _FORMAT, _HEADER) as reader:
            self.header = reader.header
            self._check_tables(replaces)
            state, saved = self.header["state"], self.header["tables"]
            specs = {
                f"{k}.{member}": spec
                for k, name in enumerate(saved)
                for member, spec in _specs(tables[name], saved[name], state).items()
            }
            arrays = [x for x in self.header["tree"] if "stored" in x]
            tree_specs = {
                f"tree.{k}": _saved_tree.spec_of(path, x) for k, x in enumerate(arrays)
            }
            reader.expect(specs | tree_specs)
            self.parts = {
                name: self._read_part(reader, f"{k}.", name, specs)
                for k, name in enumerate(saved)
            }
            self._columns = _columns(tables, self.parts, state)
            self._total = 2 * sum(ids.size for _, _, ids in self._columns)
            self._done = 0
            self._read_columns(reader, lambda *_: None)
            arrays = [reader.array(*item) for item in tree_specs.items()]
            self.tree = _saved_tree.put(path, tree, self.header["tree"], arrays)

    def write(self) -> None:
        """Writes the columns of the file to the tables; reads the file again."""
        with Reader(self.path, _FORMAT, _HEADER) as reader:
            if reader.header != self.header:
                raise ValueError(f"{self.path} was replaced while it was read.")
            self._read_columns(reader, put_rows)

    def _read_part(
        self, reader: Reader, prefix: str, name: str, specs: Mapping[str, Spec]
    ) -> Part:
        table, saved = self.tables[name], self.header["tables"][name]
        part = {
            member.removeprefix(prefix): reader.array(member, spec)
            for member, spec in specs.items()
            if member.startswith(prefix)
            and member.split(".")[1] not in ("weights", "state")
        }
        rows, kinds = part["rows"], part["kinds"]
        in_range = not rows.size or (rows[0] >= 0 and rows[-1] < table.height)
        if not in_range or (rows[1:] <= rows[:-1]).any():
            raise self.damaged(name, "its rows are not ascending row ids")
        if (
            (kinds > _GIVEN).any()
            or np.count_nonzero(kinds) != saved["weights"]
            or np.count_nonzero(kinds == _WHOLE) != saved["whole"]
            or (kinds == (_GONE if saved["given"] else _GIVEN)).any()
        ):
            raise self.damaged(name, "kinds of rows do not add up")
        return part

    def _read_columns(self, reader: Reader, put: Any) -> None:
        """Calls `put(column, rows, values)` for all values of all columns."""
        for member, column, ids in self._columns:
            start = 0
            for values in reader.chunks(member, _spec_of(column, ids)):
                put(column, ids[start : start + len(values)], values)
                start += len(values)
                self._done += len(values)
                self._report(self._done, self._total)

    def _check_tables(self, replaces: bool) -> None:
        """Raises a ValueError unless the file is of the same tables."""
        saved, path = self.header["tables"], self.path
        if saved.keys() != self.tables.keys():
            raise ValueError(
                f"{path} has the tables {sorted(saved)}, but this store has "
                f"{sorted(self.tables)}. Call init for exactly the tables of the file."
            )
        if replaces and (self.header["since"] or not self.header["state"]):
            raise ValueError(
                f"{path} is a file of export_changes, not of save. Call apply_changes."
            )
        if not self.header["since"] <= self.header["version"] < _MAX_VERSION:
            raise ValueError(
                f"{path} is damaged: its versions are out of order. Use another copy."
            )
        for name, there in saved.items():
            spec = self.tables[name].spec
            fields = ["shape", "dtype", "keyed"]
            fields += ["state"] * self.header["state"]
            if replaces:
                self._check_key(name, there["key"])
                spec = dataclasses.replace(spec, key=there["key"])
            else:
                fields += ["given"] + ["key"] * (spec.initializer is not None)
            here = spec.describe()
            _records.check_same(path, name, there, here, tuple(fields))
            if self.header["state"] and spec.policy and "sightings" not in there:
                raise self.damaged(name, "it has no sightings of keys")
            if replaces and there["given"] and there["weights"] != spec.shape[0]:
                raise self.damaged(name, "it has not all rows")

    def _check_key(self, name: str, key: dict[str, Any]) -> None:
        """Raises unless the rows of a table can start from the key in a file."""
        try:
            with on_host():
                is_one = _records.decode_key(key).ndim == 0
        except (TypeError, ValueError, OverflowError):
            is_one = False
        if not is_one:
            raise self.damaged(name, f"its key is {key}")

    def damaged(self, name: str, why: str) -> ValueError:
        """Returns the error of a file whose content cannot be right."""
        return ValueError(
            f"{self.path} is damaged: of table {name!r}, {why}. Use another copy."
        )


# ------------------------------------------------------------------ changing the tables


def apply(
    path: str | os.PathLike[str], tables: Mapping[str, Table], history: History
) -> dict[str, Changes]:
    """Applies a record to the tables of a store that follows another one."""
    for table in tables.values():
        table.check_usable()
    record = Record(path, tables, lambda done, total: None, replaces=False)
    run, since, version = (record.header[x] for x in ("run", "since", "version"))
    is_same = run == history.run and bool(run)
    nothing = np.zeros((0,), np.int64)
    if not version or (is_same and version <= history.version):
        return {n: Changes(t.ids_of(nothing), nothing) for n, t in tables.items()}
    replaces = not is_same and history.version > 0
    has_all = all(
        not table.spec.given or record.header["tables"][name]["rows"] == table.height
        for name, table in tables.items()
    )
    if replaces and (since or not has_all):
        raise ValueError(
            f"{path} has the changes from version {since} to {version} of another run "
            f"than the one that this store follows to version {history.version}: this "
            "store was changed itself, or the other one was started again. Apply a "
            "file of export_changes(since=0) once."
        )
    if since > history.version:
        raise ValueError(
            f"{path} has the changes since version {since}, but this store is at "
            f"version {history.version}. First apply the files between them."
        )
    return put(record, history, replaces=replaces, is_save=False)


def put(
    record: Record, history: History, *, replaces: bool, is_save: bool
) -> dict[str, Changes]:
    """Writes a record to its tables, which are half loaded until the last row.

    Args:
      record: the record.
      history: of the store, which takes over the version of the record.
      replaces: True to make all other rows untouched.
      is_save: True to take over keys, given weights and flushed steps, too.
    """
    tables, header = record.tables, record.header
    others = dict.fromkeys(tables, np.zeros((0,), np.int64))
    if replaces:
        for name, table in tables.items():
            rows = record.parts[name]["rows"]
            others[name] = np.setdiff1d(_all_rows(table), rows, assume_unique=True)
    new_keys = {}  # by table: rows, and columns of keys, which other rows lose
    for name, table in tables.items():
        if table.keys is not None:
            part, gone = record.parts[name], others[name]
            free = np.zeros(gone.shape, np.int64)
            columns = [np.concatenate([x, free]) for x in _arrays(part, "keys")]
            new_keys[name] = np.concatenate([part["rows"], gone]), columns
            if not table.keys.can_replace(*new_keys[name]):
                raise record.damaged(name, "a key has several rows")
    if not header["state"]:  # rows start with state, which a usable table allows
        for name, part in record.parts.items():
            tables[name].touch(part["rows"][part["kinds"] == _WHOLE])
    changes = {}
    with _marked_as_loading(tables), history.one_change():
        for name, table in tables.items():
            rows, kinds = record.parts[name]["rows"], record.parts[name]["kinds"]
            there, gone = header["tables"][name], others[name]
            evicted = np.zeros((0,), np.int64)
            if is_save:
                key, given = there["key"], there["given"]
                table.spec = dataclasses.replace(table.spec, key=key, given=given)
                table.flushed_step = there.get("step")
            if table.keys is not None:
                evicted = table.keys.replace(*new_keys[name])
            # Without the state of rows that were trained and are not any more.
            old = rows[(kinds != _WHOLE) & (table.touched[rows] != 0)]
            table.clear(np.sort(np.concatenate([old, gone]), kind="stable"))
            # Marked before they are written, so that a later load clears them.
            table.touched[rows] = 1
            changed = np.sort(np.concatenate([rows, gone]), kind="stable")
            changes[name] = Changes(table.ids_of(changed), np.sort(evicted))
        record.write()
        history.follow(header["run"], header["version"])
        for name, table in tables.items():
            part = record.parts[name]
            table.touched[part["rows"]] = part["kinds"] == _WHOLE
            for leaf, new in zip(table.rest, _arrays(part, "rest")):
                leaf[...] = new
            if table.keys is not None and header["state"]:
                sizes = header["tables"][name]["sightings"]
                table.keys.restore_sightings(sizes, _arrays(part, "sightings"))
            if replaces:
                table.forget_changes()
            table.mark_changed(part["rows"])
        if replaces:
            history.known_since = history.version
    return changes


@contextlib.contextmanager
def _marked_as_loading(tables: Mapping[str, Table]) -> Iterator[None]:
    """Marks tables as half loaded while it lasts, for a kill or an error within it."""
    for table in tables.values():
        table.is_loading = True
        table.write_header()
    yield
    for table in tables.values():
        table.memory.flush()
        table.is_loading = False
        table.write_header()
