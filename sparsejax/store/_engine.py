"""The tables of a store, and the order of the work on them.

The engine moves rows. It does not check arguments of users and documents nothing for
them: `KVStore` does both. All work on tables runs in one queue, so a pull sees all
earlier pushes. Collectives of several processes run on the calling thread.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from sparsejax._rows import SelectedRows
from sparsejax.store._history import History
from sparsejax.store._in_flight import EarlyRows, ReadAhead, WorkQueue
from sparsejax.store._mesh import Devices
from sparsejax.store._processes import Processes
from sparsejax.store._requested import check_rows, distinct_rows
from sparsejax.store._table import Table


# `f(name, count, height)`: the capacity for `count` distinct rows of a table.
CapacityOf = Callable[[str, int, int], int]


class Request(NamedTuple):
    """The rows that a batch needs.

    Args:
      ids: by table, of rows to pull.
      capacity: of the pulled rows.
      cached: by table, a `CachedBatch` of rows that get slots in its device cache.
      alone: True for a request of one table, whose rows are not in a dict.
    """

    ids: Mapping[str, Any]
    capacity: CapacityOf
    cached: Mapping[str, Any] = {}
    alone: bool = False


class _Early(NamedTuple):
    """Rows of a table that were read for a batch.

    Args:
      table: of the rows.
      rows: the distinct rows of the batch, ascending; of all processes.
      capacity: rows of the result.
      early: the weights of the rows that this process owns.
    """

    table: Table
    rows: np.ndarray
    capacity: int
    early: EarlyRows

    def drop(self) -> None:
        """Ends the flight of the rows."""
        self.table.drop(self.early)


class _Ahead(NamedTuple):
    """A batch ahead, and what reads its rows."""

    batch: Any
    request: Request
    early: Future


class Engine:
    """The state of a store.

    Args:
      mesh: of the devices to which rows are pulled, or None.
    """

    def __init__(self, mesh: Any):
        self.devices = None if mesh is None else Devices(mesh)
        self.processes = Processes()
        if self.devices is not None:
            place = self.devices.process, self.devices.count
            self.processes = Processes(*place, self.devices.gather)
        self.tables: dict[str, Table] = {}
        self.queue = WorkQueue()
        self.history = History()
        self.depths: list[int] = []  # of the iterators of prefetch that run
        self.is_closed = False

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A KVStore, its tables and its steps cannot be copied or pickled, because "
            "it has a thread and may have open files. Save the tables with "
            "store.save(path), and load them into another store."
        )

    def check_open(self) -> None:
        """Raises a ValueError if the store was closed."""
        if self.is_closed:
            raise ValueError("KVStore: this store is closed. Make a new one.")

    def run(self, work: Callable[[], Any]) -> Any:
        """Waits for the turn of `work` in the queue, and returns its result."""
        self.check_open()
        return self.queue.call(work)

    def table(self, name: Any) -> Table:
        """Returns a table by its name."""
        self.check_open()
        try:
            return self.tables[name]
        except (KeyError, TypeError):
            names = ", ".join(map(repr, self.tables)) or "none"
            raise KeyError(
                f"KVStore: there is no table {name!r}; the store has {names}. Call "
                "init first."
            ) from None

    def close(self) -> None:
        """Flushes, and releases memory and files."""

        def work():
            for table in self.tables.values():
                table.close()
            self.is_closed = True

        if not self.is_closed:
            self.run(work)

    # -- rows -------------------------------------------------------------------------

    def pull(
        self, ids: Mapping[str, Any], capacity: CapacityOf, mode: str = "drop"
    ) -> dict[str, SelectedRows]:
        """Pulls the rows of several tables' ids in one turn of the queue."""
        ids = self._merged(ids)

        def work():
            parts = self._read_early(ids, capacity, mode)
            for part in parts:
                part.drop()
            return parts

        return self._on_device(self.run(work))

    def push(self, table: Table, rows: Any, values: Any) -> None:
        """Queues one step of a table's optimizer; an error is queued, too."""
        table.check_not_cached()
        rows, values = self.on_one_device(rows), self.on_one_device(values)

        def work():
            began = time.perf_counter()
            here = np.asarray(rows)
            check_rows(table.spec.name, here, table.spec.owners.height)
            # Every process steps, even without rows: step counts must agree.
            table.step(table.spec.owners.localize(here), values)
            table.counters["push_seconds"] += time.perf_counter() - began

        self.queue.call_later(work)

    def prefetch(
        self,
        batches: Iterable[Any],
        request_of: Callable[[Any], Request],
        depth: int,
        mode: str = "drop",
    ) -> Generator[tuple[Any, Any]]:
        """Yields batches with their rows, which are read while the last step runs."""

        def prepare(batch):
            request = request_of(batch)
            ids = self._merged(request.ids)
            read = functools.partial(
                self._read_early, ids, request.capacity, mode, request.cached
            )
            return _Ahead(batch, request, self.queue.submit(read))

        ahead, head = ReadAhead(batches, prepare), None
        is_exiting = sys.is_finalizing  # when it is true, modules may be gone
        self.queue.start_worker()
        self.depths.append(depth)
        for table in self.tables.values():
            if table.keys is not None:
                table.keys.latest_step = None
        try:
            while True:
                self.check_open()
                head = ahead.take()
                if head is ReadAhead.END:
                    break
                work = functools.partial(_hand_out, head.early)
                handed_out = self.queue.submit(work)
                ahead.fill(depth)
                pulled = self._on_device(handed_out.result())
                self.queue.raise_error()
                rows: Any = {**pulled, **head.request.cached}
                if head.request.alone:
                    (rows,) = rows.values()
                yield head.batch, rows
                for cached in head.request.cached.values():
                    cached.drop()  # unless its step has run
            self.queue.submit(lambda: None).result()  # wait for the last pushes
            self.queue.raise_error()
        finally:
            if not is_exiting():
                self.depths.remove(depth)
                for each in [head, *ahead.rest()]:
                    if isinstance(each, _Ahead):
                        self.queue.submit(functools.partial(_drop, each))
                self.queue.stop_worker()

    def _read_early(
        self,
        ids: Mapping[str, Any],
        capacity: CapacityOf,
        mode: str,
        cached: Mapping[str, Any] = {},
    ) -> list[_Early]:
        """Reads the rows of a request, in flight from now on; in the queue."""
        parts: list[_Early] = []
        try:
            for name, some in ids.items():
                began, table = time.perf_counter(), self.tables[name]
                table.check_written_back()
                owners = table.spec.owners
                rows = distinct_rows(name, some, owners.height, mode)
                size = capacity(name, rows.size, owners.height)
                local_rows = owners.localize(rows)
                local_rows = local_rows[local_rows < table.height]
                # For a mesh the rows are padded when they are copied to its devices.
                padded = size if self.devices is None else local_rows.size
                early = table.read_early(local_rows, padded, with_state=False)
                parts.append(_Early(table, rows, size, early))
                table.counters["pulls"] += 1
                table.counters["pulled_rows"] += local_rows.size
                table.counters["pull_seconds"] += time.perf_counter() - began
            for batch in cached.values():
                batch.read_early()
        except BaseException:
            for part in [*parts, *cached.values()]:
                part.drop()
            raise
        return parts

    def _merged(self, ids: Mapping[str, Any]) -> Mapping[str, Any]:
        """Merges the ids of all devices of the mesh, by table. A collective."""
        heights = {name: self.table(name).spec.owners.height for name in ids}
        return ids if self.devices is None else self.devices.merge_ids(ids, heights)

    # -- devices ----------------------------------------------------------------------

    def on_one_device(self, x: Any) -> Any:
        """Returns an array of a step over the mesh, whole on one device."""
        return x if self.devices is None else self.devices.on_one_device(x)

    def _on_device(self, early: Sequence[_Early]) -> dict[str, SelectedRows]:
        """Moves rows that were read to the device; nothing writes to their buffers."""
        pairs = {x.table.spec.name: self._rows_and_values(x) for x in early}
        if self.devices is None:
            # One copy of all tables. The CPU device may use these buffers in place.
            pairs = jax.device_put(pairs)
        pulled = {}
        for part in early:
            spec = part.table.spec
            rows, values = pairs[spec.name]
            pulled[spec.name] = SelectedRows(rows, values, spec.owners.height)
        return pulled

    def _rows_and_values(self, early: _Early) -> tuple[Any, Any]:
        """Returns the rows and values of a SelectedRows; on the host without a mesh."""
        owners, rows = early.table.spec.owners, early.rows
        (values,) = early.early.buffers
        if self.devices is not None:
            replicated = self.devices.replicate(owners, rows, values, early.capacity)
            return replicated.rows, replicated.values
        padded = np.full((early.capacity,), owners.height, rows.dtype)
        padded[: rows.size] = rows
        return padded, values


def _hand_out(early: Future) -> list[_Early]:
    """Returns the rows of a batch in flight, with all writes so far; in the queue."""
    parts = early.result()  # done by now; raises its error
    for part in parts:
        began = time.perf_counter()
        part.table.hand_out(part.early)
        part.table.counters["pull_seconds"] += time.perf_counter() - began
    return parts


def _drop(ahead: _Ahead) -> None:
    """Forgets a batch in flight; in the queue."""
    # Done by now, but in a forked child, where the parent's worker will not read it.
    if ahead.early.done() and ahead.early.exception() is None:
        for part in [*ahead.early.result(), *ahead.request.cached.values()]:
            part.drop()
