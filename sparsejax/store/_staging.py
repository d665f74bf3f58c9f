"""The slots of a device cache, and the batches that got slots before their step.

A batch takes two turns. It is *staged* in the store's queue, possibly while the step
before runs: its rows get slots, and the rows without a slot are read from the host.
When it is *taken* for its step, the rows that leave are gathered on the device, and the
rows that come up are scattered in place. The evicted rows are written to the host
later, while the step runs.

So a row may leave with batch k and come up again with batch k + 1 before it was
written. The rule is the one of `KVStore.prefetch`: all rows are read early, writing a
row marks it stale, and stale rows are read again when the batch is taken.

Staged batches hold slots that batches before them still use. If a batch is taken that
is not the next one staged, or the cache is flushed, the staged batches are undone
first, and staged again after it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from sparsejax._rows import indexing
from sparsejax.store._engine import Engine
from sparsejax.store._in_flight import EarlyRows
from sparsejax.store._journal import Journal
from sparsejax.store._places import Places
from sparsejax.store._records import CHUNK
from sparsejax.store._requested import bucket, is_among
from sparsejax.store._slots import Plan, Slots
from sparsejax.store._table import Table


@dataclasses.dataclass(eq=False)
class Batch:
    """A batch that is expected. It is staged when it has a plan.

    Args:
      rows: of the batch, ascending, padded with the height of the table.
      done: the turn in the store's queue that stages it.
      error: of that turn.
      plan: the changes to the slots.
      slots: the cache slots of the rows of the batch, on the device.
      to: the slots of the rows that come up, padded.
      early: weights and state of the rows that come up; None if there are no such rows.
      columns: the same on the device.
    """

    rows: np.ndarray
    done: Future | None = None
    error: Exception | None = None
    plan: Plan | None = None
    slots: Any = None
    to: Any = None
    early: EarlyRows | None = None
    columns: list[Any] = dataclasses.field(default_factory=list)


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
        self.placement: Any = None  # of the array, unless JAX may choose
        is_mapped = table.memory.path is not None
        self._journal = Journal(table) if is_mapped else None
        # Held while slots are planned and batches change hands, not while rows move.
        self._lock = threading.RLock()
        self._announced: collections.deque[Batch] = collections.deque()
        # Per batch, evicted rows that are not written yet: these rows, their places
        # among the rows that were gathered, and the gathered rows on the device.
        self._to_write: collections.deque[Any] = collections.deque()

    # -- a step -----------------------------------------------------------------------

    def prepare(self, rows: Any, params: Any, opt_state: Any) -> tuple[Any, Any, Any]:
        """Puts the rows of a batch into slots.

        The arrays of the cache are donated. In its first batch, the counts of the
        table's optimizer (leaves of state without rows) become the counts of the store.

        Args:
          rows: ascending, padded with the height of the table.
          params, opt_state: the trees of the user.

        Returns:
          `(params, opt_state, slots)`: the trees with the rows in place, and the slot
          of each row.
        """
        self.check_open()
        places = Places(self, params, opt_state)
        batch, plan = self.take(rows)
        places.put_rows(self.commit(batch, plan, places.arrays()))
        if not self._has_counts:
            places.put_counts(self.table.rest)
            self._has_counts = True
        self.steps += 1
        self.hits += plan.slots.size - plan.rows.size
        self.misses += plan.rows.size
        self.evictions += int(np.count_nonzero(plan.leaving >= 0))
        if plan.slots.size:
            self.is_flushed = False
        if self._engine.depths:
            self._engine.queue.call_later(self.write_back)
        else:
            # Without the last batch, whose rows would wait for the running step.
            self._engine.run(functools.partial(self.write_back, keep=1))
        return *places.trees(), batch.slots

    def check_open(self) -> None:
        """Raises a ValueError if the store or the cache was closed."""
        self._engine.check_open()
        if self.is_closed:
            raise ValueError("This cache is closed. Make a new one.")

    def announce(self, rows: np.ndarray) -> Batch:
        """Stages a batch in the store's queue."""
        batch = Batch(rows)
        with self._lock:
            self._announced.append(batch)

        def work():
            with self._lock:
                is_expected = batch in self._announced
            if is_expected:
                self._stage_announced(batch)

        batch.done = self._engine.queue.submit(work)
        return batch

    def withdraw(self, batches: Sequence[Batch]) -> None:
        """Forgets the batches that were not taken, and the rows read for them."""

        def work():
            with self._lock:
                left = [x for x in batches if x in self._announced]
            if left:
                with self.undone():
                    for batch in left:
                        self._announced.remove(batch)

        self._engine.queue.submit(work)

    def take(self, rows: np.ndarray) -> tuple[Batch, Plan]:
        """Returns the staged batch of these rows, with their current content."""
        self._engine.queue.raise_error()
        head = self._announced[0] if self._announced else None
        if head is not None and np.array_equal(head.rows, rows):
            assert head.done is not None
            head.done.result()
            with self._lock:
                is_next = bool(self._announced) and self._announced[0] is head
                plan, error = head.plan, head.error
                if is_next and (plan or error):
                    self._announced.popleft()
            if is_next and error is not None:
                raise error
            if is_next and plan is not None:
                if self._is_current(head):
                    self._drop(head)
                else:
                    self._engine.run(functools.partial(self._hand_out, head))
                return head, plan
        batch = Batch(rows)

        def work():
            with self.undone():
                plan = self._stage(batch)
                self._hand_out(batch)
                return batch, plan

        return self._engine.run(work)

    def commit(
        self, batch: Batch, plan: Plan, arrays: list[jax.Array]
    ) -> list[jax.Array]:
        """Settles that a batch runs: the arrays of the device with its rows in place.

        Args:
          batch, plan: from `take`.
          arrays: weights and state on the device, which are donated.
        """
        slots = self.slots
        with self._lock:
            goes_back = slots.is_dirty[plan.to] & (plan.leaving >= 0)
            slots.is_dirty[plan.to] = False
            slots.is_dirty[plan.slots] = True
        if not plan.rows.size:
            return arrays
        placement = arrays[0].sharding if arrays[0].committed else None
        if placement != self.placement:  # at the first batch
            self.placement = placement
            batch.columns = jax.device_put(batch.columns, placement)
        if goes_back.any():
            leaving = _gather(arrays, batch.to)
            places = np.flatnonzero(goes_back)
            self._to_write.append((plan.leaving[places], places, leaving))
        return _scatter(arrays, batch.to, batch.columns)

    # -- all rows; in the queue -------------------------------------------------------

    def write_back(self, keep: int = 0) -> None:
        """Writes the evicted rows, except the rows of the last `keep` batches."""
        while len(self._to_write) > keep:
            rows, places, leaving = self._to_write[0]
            order = np.argsort(rows)
            values = [np.take(np.asarray(x), places[order], axis=0) for x in leaving]
            self._write(rows[order], values)
            self._to_write.popleft()  # only now, see _is_current

    def write_dirty(self, arrays: list[jax.Array]) -> None:
        """Writes all rows of the device that were trained since they were written."""
        self.write_back()
        dirty = np.flatnonzero(self.slots.is_dirty)
        for start in range(0, dirty.size, CHUNK):
            some = dirty[start : start + CHUNK]
            some = some[np.argsort(self.slots.row_of[some])]
            rows = _gather(arrays, _padded(some, self.slots.row_of.size))
            values = [np.asarray(x)[: some.size] for x in rows]
            self._write(self.slots.row_of[some], values)

    def write_rest(self, new: Sequence[np.ndarray]) -> None:
        """Replaces the leaves of the table's state that have no rows."""
        counts = self.table.rest
        if any((a != b).any() for a, b in zip(new, counts)):
            if self._journal is not None:
                self._journal.before_write(np.empty((0,), np.int64))
            self.table.history.advance()
            for old, value in zip(counts, new):
                old[...] = value

    def flush(self, places: Places, step: int | None) -> None:
        """Writes all rows that were trained, and the counts, and waits for the disk."""
        table = self.table
        table.check_usable()
        with self.undone():
            self.write_dirty(places.arrays())
            self.write_rest(places.counts())
            table.memory.flush()
            table.flushed_step = step
            if self._journal is not None:
                self._journal.commit()
            self.slots.is_dirty[:] = False
            self.is_flushed = True

    def discard(self) -> None:
        """Ends the cache, and rolls a mapped table back to its last flush."""
        with self._lock:
            self._undo_staged()
            self._announced.clear()
            self._to_write.clear()
        if self._journal is not None:
            self._journal.roll_back()
        self.table.cache, self.is_closed = None, True

    def release(self) -> None:
        """Closes the journal; the next process that opens the table rolls it back."""
        self.is_closed = True
        if self._journal is not None:
            self._journal.release()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Unstages all batches within it; stages the expected ones again after it."""
        with self._lock:
            batches = self._undo_staged()
            try:
                yield
            finally:
                for batch in batches:
                    if batch in self._announced:
                        self._stage_announced(batch)

    # -- private ----------------------------------------------------------------------

    def _stage_announced(self, batch: Batch) -> None:
        try:
            batch.error = None
            self._stage(batch)
        except Exception as error:
            batch.error = error

    def _stage(self, batch: Batch) -> Plan:
        """Gives slots to the rows of a batch, and reads them early; in the queue."""
        table, count = self.table, self.slots.row_of.size
        table.check_usable()
        distinct = batch.rows[batch.rows < table.height]
        if distinct.size > count:
            raise ValueError(
                f"The batch reads {distinct.size} distinct rows of table "
                f"{table.spec.name!r}, more than the {count} slots of its CachedTable. "
                f"Use a smaller batch, or slots={distinct.size} or more."
            )
        with self._lock:
            batch.plan = plan = self.slots.plan(distinct)
        try:
            numbers = np.full(batch.rows.shape, count, np.int32)
            numbers[: distinct.size] = plan.slots
            batch.slots, batch.to = jax.device_put(numbers), _padded(plan.to, count)
            if plan.rows.size:
                size = batch.to.size
                batch.early = table.read_early(plan.rows, size, with_state=True)
                self._put(batch)
        except BaseException:
            with self._lock:
                self._undo(batch)
            raise
        return plan

    def _is_current(self, batch: Batch) -> bool:
        """Returns True if no row of a batch is stale or waits to be written."""
        if batch.early is None:
            return True
        # First the rows that wait: a row that the worker writes meanwhile is stale
        # before it stops waiting.
        for left, *_ in list(self._to_write):
            if is_among(batch.early.rows, np.sort(left)).any():
                return False
        return not batch.early.is_stale.any()

    def _hand_out(self, batch: Batch) -> None:
        """Reads the rows again that were written since they were read; in the queue."""
        if not self._is_current(batch):
            self.write_back()
        if batch.early is not None and self.table.hand_out(batch.early):
            self._put(batch)

    def _put(self, batch: Batch) -> None:
        """Copies the rows that were read to the device."""
        assert batch.early is not None
        batch.columns = jax.device_put(batch.early.buffers, self.placement)

    def _drop(self, batch: Batch) -> None:
        if batch.early is not None:
            self.table.drop(batch.early)

    def _undo(self, batch: Batch) -> None:
        """Undoes the latest batch staged."""
        assert batch.plan is not None
        self.slots.undo(batch.plan)
        self._drop(batch)
        batch.plan = batch.early = None

    def _undo_staged(self) -> list[Batch]:
        """Undoes all staged batches, and returns them and those with an error."""
        batches = [x for x in self._announced if x.plan or x.error]
        for batch in reversed(batches):
            if batch.plan is not None:
                self._undo(batch)
            batch.error = None
        return batches

    def _write(self, rows: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Writes distinct ascending rows of the table."""
        if self._journal is not None:
            self._journal.before_write(rows)
        self.table.write(rows, values)
        self.written_rows += rows.size


# ------------------------------------------------------------------ on the device


def _padded(slots: np.ndarray, height: int) -> np.ndarray:
    """Pads slots to a bucket, so that programs are compiled for few sizes."""
    padded = np.full((bucket(slots.size),), height, np.int32)
    padded[: slots.size] = slots
    return padded


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
