"""The device cache of a table: its rows on the device, and the way of rows there.

A batch takes two turns. When it is *announced*, perhaps while the step before runs, the
rows without a slot are read from the host. When it is *taken* for its step, its rows
get slots: the rows that leave are gathered on the device, and the rows that come up are
scattered in place. The evicted rows are written to the host later, while the step runs.

So a row may leave with batch k and come up again with batch k + 1 before it was
written. The rule is the one of `KVStore.prefetch`: all rows are read early, and writing
a row marks it stale. Slots change only when a batch is taken. So an announced batch
only guesses which rows have no slot, and may be taken at any time, again, or never:
rows that it did not read, or that are stale, are read when it is taken.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sparsejax._files import CHUNK
from sparsejax._rows import indexing
from sparsejax.store import _mapped
from sparsejax.store._engine import Engine
from sparsejax.store._in_flight import EarlyRows
from sparsejax.store._journal import Journal
from sparsejax.store._places import Places
from sparsejax.store._requested import bucket, is_among
from sparsejax.store._table import Table, put_rows


class Slots:
    """The row in each slot of a device cache, and the row that is evicted next.

    The rows of a batch that have a slot keep it. Each other row gets a free slot, or
    the slot of the row whose last use is longest ago (LRU), not of the batch itself.

    A queue holds the slots of each batch. An entry of the queue is valid only if its
    slot was not used since. So a plan costs time in proportion to the rows of the
    batch, not to the number of slots: `np.argpartition` over 10^6 slots took 15 ms a
    step (2026-11).

    Args:
      height: rows of the table.
      count: number of slots.
    """

    def __init__(self, height: int, count: int):
        self.row_of = np.full((count,), -1, np.int64)
        self.is_dirty = np.zeros((count,), bool)
        self._slot_of = _mapped.zeros((height,), np.int32)  # slot + 1, or 0 for none
        self._used_at = np.full((count,), -1, np.int64)  # number of the last batch
        self._free = np.arange(count, dtype=np.int32)[::-1].copy()
        self._num_free = count
        self._now = 0
        self._queue: collections.deque[tuple[int, np.ndarray]] = collections.deque()
        self._queued = 0

    @property
    def used(self) -> int:
        """The number of slots that have a row."""
        return self._free.size - self._num_free

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the slot of each row, int32, or -1."""
        return np.take(self._slot_of, rows) - np.int32(1)

    def plan(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gives slots to distinct ascending rows, at most one for each slot.

        Returns:
          The slots of the rows that come up, both ascending; and the rows that were in
          these slots, or -1.
        """
        self._now += 1
        slots = self.of(rows)
        is_missing = slots < 0
        missing = rows[is_missing]
        self._used_at[slots[~is_missing]] = self._now  # so that these rows stay
        free = min(missing.size, self._num_free)
        start = self._num_free - free
        to = self._free[start : self._num_free][::-1]
        self._num_free = start
        if free < missing.size:
            to = np.concatenate([to, self._least_recently_used(missing.size - free)])
        to = np.sort(to)  # written in ascending order
        leaving = self.row_of[to]
        self._slot_of[leaving[leaving >= 0]] = 0
        self._slot_of[missing] = to + 1
        self.row_of[to] = missing
        self._used_at[to] = self._now
        slots[is_missing] = to
        self._use(slots)
        return to, leaving

    def _use(self, slots: np.ndarray) -> None:
        """Appends the slots of a batch to the queue."""
        self._queue.append((self._now, slots))
        self._queued += slots.size
        if self._queued > 4 * self._used_at.size:  # most entries are invalid: drop them
            entries = [(at, self._valid(at, slots)) for at, slots in self._queue]
            self._queue = collections.deque(x for x in entries if x[1].size)
            self._queued = sum(slots.size for _, slots in self._queue)

    def _least_recently_used(self, count: int) -> np.ndarray:
        """Takes `count` slots from the head of the queue."""
        chosen = []
        while count:
            at, slots = self._queue.popleft()
            self._queued -= slots.size
            slots = self._valid(at, slots)
            chosen.append(slots[:count])
            if slots.size > count:
                self._queue.appendleft((at, slots[count:]))
                self._queued += slots.size - count
            count -= chosen[-1].size
        return np.concatenate(chosen)

    def _valid(self, at: int, slots: np.ndarray) -> np.ndarray:
        """Returns the slots of batch `at` that no later batch used."""
        return slots[self._used_at[slots] == at]


class CachedBatch:
    """The rows of a batch, which its step gets from the device cache of a table.

    Args:
      cache: of the table.
      rows: distinct and ascending.
      capacity: of the rows in the step.
    """

    def __init__(self, cache: Staging, rows: np.ndarray, capacity: int):
        self.cache, self.rows, self.capacity = cache, rows, capacity
        self.early: EarlyRows | None = None  # weights and state of rows without a slot

    def read_early(self) -> None:
        """Reads the rows that have no slot now; in the queue."""
        table = self.cache.table
        rows = self.rows[self.cache.slots.of(self.rows) < 0]
        self.early = table.read_early(rows, rows.size, with_state=True)

    def drop(self) -> None:
        """Forgets the rows that were read."""
        if self.early is not None:
            self.cache.table.drop(self.early)
            self.early = None


class Staging:
    """Moves rows between a table and the slots of its device cache.

    Args:
      engine: of the store.
      table: on the host, with an optimizer.
      count: the number of slots.
    """

    def __init__(self, engine: Engine, table: Table, count: int):
        self._engine, self.table = engine, table
        self.slots = Slots(table.height, count)
        self.steps = self.hits = self.misses = self.evictions = 0
        self.is_flushed, self.is_closed = True, False
        self._has_counts = False  # of the table, in the user's state
        self.known_places: Any = None  # of Places
        self.written_rows = 0
        is_mapped = table.memory.path is not None
        self._journal = Journal(table) if is_mapped else None
        # Per batch, evicted rows that are not written yet: these rows, their places
        # among the rows that were gathered, and the gathered rows on the device.
        self._to_write: collections.deque[Any] = collections.deque()

    # -- a step -----------------------------------------------------------------------

    def prepare(
        self, batch: CachedBatch, params: Any, opt_state: Any
    ) -> tuple[Any, Any, tuple[np.ndarray, np.ndarray]]:
        """Puts the rows of a batch into slots.

        The arrays of the cache are donated. In its first batch, the counts of the
        table's optimizer (leaves of state without rows) become the counts of the store.

        Args:
          batch: of this cache.
          params, opt_state: the trees of the user.

        Returns:
          `(params, opt_state, (rows, slots))`: the trees with the rows in place; the
          rows, padded with the height of the table; and the slot of each row.
        """
        self.check_open()
        places = Places(self, params, opt_state)
        self._engine.queue.raise_error()
        count = self.slots.row_of.size
        if batch.rows.size > count:
            raise ValueError(
                f"The batch reads {batch.rows.size} distinct rows of table "
                f"{self.table.spec.name!r}, more than the {count} slots of its "
                f"CachedTable. Use a smaller batch, or slots={batch.rows.size} or more."
            )
        columns = self._read(batch)
        places.put_rows(self._take(batch.rows, columns, places.arrays()))
        if not self._has_counts:
            places.put_counts(self.table.rest)
            self._has_counts = True
        if self._engine.depths:
            self._engine.queue.call_later(self.write_back)
        else:
            # Without the last batch, whose rows would wait for the running step.
            self._engine.run(functools.partial(self.write_back, keep=1))
        slots = self.slots.of(batch.rows)
        rows = padded(batch.rows, self.table.height, batch.capacity)
        return *places.trees(), (rows, padded(slots, count, batch.capacity))

    def batch(self, rows: np.ndarray, capacity: int) -> CachedBatch:
        """Returns the rows of a batch for `prepare`."""
        return CachedBatch(self, rows, capacity)

    def check_open(self) -> None:
        """Raises a ValueError if the store or the cache was closed."""
        self._engine.check_open()
        if self.is_closed:
            raise ValueError("This cache is closed. Make a new one.")

    def _read(self, batch: CachedBatch) -> list[np.ndarray]:
        """Returns weights and state of the rows without a slot, padded."""
        rows, early = batch.rows[self.slots.of(batch.rows) < 0], batch.early
        if not rows.size:
            return []
        size, is_waiting = bucket(rows.size), np.zeros(rows.shape, bool)
        # First the rows that wait to be written: a row that the worker writes meanwhile
        # is stale before it stops waiting.
        for leaving, *_ in list(self._to_write):
            is_waiting |= is_among(rows, np.sort(leaving))
        if early is None or not early.rows.size:
            return self._engine.run(lambda: self._read_late(rows, size, is_waiting))
        is_current = is_among(rows, early.rows[~early.is_stale]) & ~is_waiting
        batch.drop()
        places, columns = np.searchsorted(early.rows, rows), []
        for buffer in early.buffers:
            columns.append(np.zeros((size, *buffer.shape[1:]), buffer.dtype))
            out = columns[-1][: rows.size]
            np.take(buffer, places, axis=0, out=out, mode="clip")
        late = np.flatnonzero(~is_current)
        if late.size:
            work = lambda: self._read_late(rows[late], late.size, is_waiting)
            values = self._engine.run(work)
            for column, new in zip(columns, values):
                put_rows(column, late, new)
        return columns

    def _read_late(
        self, rows: np.ndarray, capacity: int, is_waiting: np.ndarray
    ) -> list[np.ndarray]:
        """Reads rows that were not read early, or are stale; in the queue."""
        if is_waiting.any():
            self.write_back()
        self.table.touch(rows)
        return EarlyRows(self.table.columns, rows, capacity).buffers

    def _take(
        self, rows: np.ndarray, columns: list[np.ndarray], arrays: list[jax.Array]
    ) -> list[jax.Array]:
        """Gives slots to distinct ascending rows.

        Args:
          rows: of a batch.
          columns: weights and state of the rows that have no slot, padded.
          arrays: weights and state on the device, which are donated.

        Returns:
          The arrays with the rows in place.
        """
        slots = self.slots
        to, evicted = slots.plan(rows)
        self.steps += 1
        self.hits += rows.size - to.size
        self.misses += to.size
        self.evictions += int(np.count_nonzero(evicted >= 0))
        goes_back = slots.is_dirty[to] & (evicted >= 0)
        slots.is_dirty[slots.of(rows)] = True
        self.is_flushed = self.is_flushed and not rows.size
        if not to.size:
            return arrays
        to = padded(to, slots.row_of.size, bucket(to.size))
        if goes_back.any():
            leaving = _gather(arrays, to)
            places = np.flatnonzero(goes_back)
            self._to_write.append((evicted[places], places, leaving))
        placement = arrays[0].sharding if arrays[0].committed else None
        return _scatter(arrays, to, jax.device_put(columns, placement))

    # -- all rows; in the queue -------------------------------------------------------

    def write_back(self, keep: int = 0) -> None:
        """Writes the evicted rows, except the rows of the last `keep` batches."""
        while len(self._to_write) > keep:
            rows, places, leaving = self._to_write[0]
            order = np.argsort(rows)
            values = [np.take(np.asarray(x), places[order], axis=0) for x in leaving]
            self._write(rows[order], values)
            self._to_write.popleft()  # only now, see _read

    def flush(self, places: Places, step: int | None) -> None:
        """Writes all rows that were trained, and the counts, and waits for the disk."""
        table, slots, arrays = self.table, self.slots, places.arrays()
        table.check_usable()
        self.write_back()
        dirty = np.flatnonzero(slots.is_dirty)
        for start in range(0, dirty.size, CHUNK):
            some = dirty[start : start + CHUNK]
            some = some[np.argsort(slots.row_of[some])].astype(np.int32)
            size = bucket(some.size)
            rows = _gather(arrays, padded(some, slots.row_of.size, size))
            values = [np.asarray(x)[: some.size] for x in rows]
            self._write(slots.row_of[some], values)
        counts = places.counts()
        if any((a != b).any() for a, b in zip(counts, table.rest)):
            if self._journal is not None:
                self._journal.before_write(np.empty((0,), np.int64))
            table.history.advance()
            for old, value in zip(table.rest, counts):
                old[...] = value
        table.memory.flush()
        table.flushed_step = step
        if self._journal is not None:
            self._journal.commit()
        slots.is_dirty[:] = False
        self.is_flushed = True

    def discard(self) -> None:
        """Ends the cache, and rolls a mapped table back to its last flush."""
        self._to_write.clear()
        if self._journal is not None:
            self._journal.roll_back()
        self.table.cache, self.is_closed = None, True

    def release(self) -> None:
        """Closes the journal; the next process that opens the table rolls it back."""
        self.is_closed = True
        if self._journal is not None:
            self._journal.release()

    def _write(self, rows: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Writes distinct ascending rows of the table."""
        if self._journal is not None:
            self._journal.before_write(rows)
        self.table.write(rows, values)
        self.written_rows += rows.size


def padded(x: np.ndarray, fill: int, size: int) -> np.ndarray:
    """Pads row ids or slots, so that programs are compiled for few sizes."""
    out = np.full((size,), fill, x.dtype)
    out[: x.size] = x
    return out


# ------------------------------------------------------------------ on the device


# Two programs: in one, XLA:CPU copies the arrays, since it gathers from the arrays that
# it scatters into (2026-11).


@jax.jit
def _gather(arrays, slots):
    """Gathers the rows of distinct slots."""
    return [indexing.take_rows(x, slots) for x in arrays]


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(arrays, slots, columns):
    """Writes other rows to distinct ascending slots of the arrays."""
    return [
        indexing.set_distinct_rows(x, slots, new, indices_are_sorted=True)
        for x, new in zip(arrays, columns)
    ]
