"""The slots of a device cache, and the batches that got slots before their step.

A batch takes two turns. It is *staged* in the store's queue, possibly while the step
before runs: its rows get slots, and the rows without a slot are read from the host.
When it is *taken* for its step, the rows that leave are gathered on the device, and the
rows that come up are scattered in place. The rows that left are written to the host
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
from sparsejax.store._in_flight import EarlyRows
from sparsejax.store._journal import Journal
from sparsejax.store._requested_rows import bucket, distinct_rows, is_among
from sparsejax.store._slots import Plan, Slots
from sparsejax.store._table import CHUNK, Table


@dataclasses.dataclass(eq=False)
class Staged:
    """A batch that has its slots.

    Args:
      plan: the changes to the slots.
      slot_ids: the ids as slots, on the device.
      to: the slots of the rows that come up, padded.
      early: weights and state of the rows that come up; None if there are no such rows.
      columns: the same on the device.
    """

    plan: Plan
    slot_ids: jax.Array
    to: np.ndarray
    early: EarlyRows | None = None
    columns: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class _Announced:
    """A batch that is expected.

    Args:
      ids: of the batch.
      owner: the iterator that announced it.
      done: the turn in the store's queue that stages it.
      staged, error: the result of that turn.
    """

    ids: np.ndarray
    owner: object
    done: Future | None = None
    staged: Staged | None = None
    error: Exception | None = None


class Staging:
    """Moves rows between a table and the slots of its device cache.

    Args:
      call: for messages: the method that takes batches.
      table: on the host.
      count: the number of slots.
      padding_id: an id that needs no row, or None.
    """

    def __init__(self, call: str, table: Table, count: int, padding_id: int | None):
        self._call, self._table, self._padding_id = call, table, padding_id
        is_slot = padding_id is not None and 0 <= padding_id < count
        self.slots = Slots(table.height, count, padding_id if is_slot else None)
        self.written_rows = 0
        self.placement: Any = None  # of the array, unless JAX may choose
        is_mapped = table.memory.path is not None
        self._journal = Journal(table) if is_mapped else None
        # Held while slots are planned and batches change hands, not while rows move.
        self._lock = threading.RLock()
        self._announced: collections.deque[_Announced] = collections.deque()
        # Of each batch whose rows that left are not written: these rows, their places
        # among the rows that were gathered, and the gathered rows on the device.
        self._to_write: collections.deque[Any] = collections.deque()

    # -- a step -----------------------------------------------------------------------

    def announce(self, ids: np.ndarray, owner: object) -> _Announced:
        """Stages a batch in the store's queue."""
        entry = _Announced(ids, owner)
        with self._lock:
            self._announced.append(entry)

        def work():
            with self._lock:
                is_expected = entry in self._announced
            if is_expected:
                self._stage_announced(entry)

        entry.done = self._table.queue.submit(work)
        return entry

    def withdraw(self, entry: _Announced) -> None:
        """Forgets a batch that was skipped, with the rows that were read for it."""

        def work():
            with self._lock:
                is_skipped = entry in self._announced
            if is_skipped:
                with self.undone():
                    self._announced.remove(entry)

        self._table.queue.submit(work)

    def take(self, ids: np.ndarray) -> Staged:
        """The staged batch of these ids, with the current rows."""
        self._table.queue.raise_error()
        head = self._announced[0] if self._announced else None
        if head is not None and np.array_equal(head.ids, ids):
            assert head.done is not None
            head.done.result()
            with self._lock:
                staged, error = head.staged, head.error
                is_next = self._announced and self._announced[0] is head
                if is_next and (staged or error):
                    self._announced.popleft()
                else:
                    staged = error = None
            if error is not None:
                raise error
            if staged is not None:
                if self._is_current(staged):
                    self._drop(staged)
                else:
                    hand_out = functools.partial(self._hand_out, staged)
                    self._table.run(self._call, hand_out)
                return staged

        def work():
            with self.undone():
                staged = self._stage(ids)
                self._hand_out(staged)
                return staged

        return self._table.run(self._call, work)

    def commit(self, staged: Staged, arrays: list[jax.Array]) -> list[jax.Array]:
        """Settles that a batch runs: the arrays of the device with its rows in place.

        Args:
          staged: from `take`.
          arrays: weights and state on the device, which are donated.
        """
        slots, plan = self.slots, staged.plan
        with self._lock:
            goes_back = slots.is_dirty[plan.to] & (plan.leaving >= 0)
            slots.is_dirty[plan.to] = False
            if self._table.optimizer is not None:
                slots.is_dirty[plan.slots] = True
        if not plan.rows.size:
            return arrays
        placement = arrays[0].sharding if arrays[0].committed else None
        if placement != self.placement:  # at the first batch
            self.placement = placement
            staged.columns = jax.device_put(staged.columns, placement)
        if goes_back.any():
            leaving = _gather(arrays, staged.to)
            places = np.flatnonzero(goes_back)
            self._to_write.append((plan.leaving[places], places, leaving))
        return _scatter(arrays, staged.to, staged.columns)

    def forget(self, owner: object) -> None:
        """Withdraws the batches of an iterator that were not taken; in the queue."""
        with self.undone():
            for entry in list(self._announced):
                if entry.owner is owner:
                    self._announced.remove(entry)
        self.write_back()

    # -- all rows; in the queue -------------------------------------------------------

    def write_back(self, keep: int = 0) -> None:
        """Writes the rows that left, except the rows of the last `keep` batches."""
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
        rest = self._table.rest
        if any((a != b).any() for a, b in zip(new, rest)):
            if self._journal is not None:
                self._journal.before_write(np.empty((0,), np.int64))
            self._table.history.advance()
            for old, value in zip(rest, new):
                old[...] = value

    def end_flush(self) -> None:
        """All rows are on the host, and on the disk if the table is in a file."""
        if self._journal is not None:
            self._journal.commit()
        self.slots.is_dirty[:] = False

    def discard(self) -> None:
        """Forgets all batches, and rolls a mapped table back to its last flush."""
        with self._lock:
            self._undo_staged()
            self._announced.clear()
            self._to_write.clear()
        if self._journal is not None and not self._table.is_closed:
            self._journal.roll_back()

    def release(self) -> None:
        """Closes the journal; the next process that opens the table rolls it back."""
        if self._journal is not None:
            self._journal.release()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within it no batch is staged; after it, the expected ones are again."""
        with self._lock:
            entries = self._undo_staged()
            try:
                yield
            finally:
                for entry in entries:
                    if entry in self._announced:
                        self._stage_announced(entry)

    # -- private ----------------------------------------------------------------------

    def _stage_announced(self, entry: _Announced) -> None:
        try:
            entry.error, entry.staged = None, self._stage(entry.ids)
        except Exception as error:
            entry.error = error

    def _stage(self, ids: np.ndarray) -> Staged:
        """Gives slots to the rows of a batch, and reads them early; in the queue."""
        table, slots, call = self._table, self.slots, self._call
        table.check_usable()
        needed = ids.reshape(-1)
        if self._padding_id is not None:
            needed = needed[needed != self._padding_id]
        rows = distinct_rows(call, table.name, needed, table.height, "drop")
        count = slots.row_of.size
        if rows.size > slots.capacity:
            raise ValueError(
                f"{call}: the batch reads {rows.size} distinct rows of table "
                f"{table.name!r}, more than its {slots.capacity} slots. Use a smaller "
                f"batch, or slots={rows.size + count - slots.capacity} or more."
            )
        with self._lock:
            plan = slots.plan(rows)
            slot_ids = jax.device_put(slots.translate(ids))
            staged = Staged(plan, slot_ids, _padded(plan.to, count))
        if plan.rows.size:
            try:
                size = staged.to.size
                staged.early = table.read_early(plan.rows, size, with_state=True)
                self._put(staged)
            except BaseException:
                with self._lock:
                    self._undo(staged)
                raise
        return staged

    def _is_current(self, staged: Staged) -> bool:
        """Returns True if no row of a batch is stale or waits to be written."""
        if staged.early is None:
            return True
        rows = staged.early.rows
        # First the rows that wait: a row that the worker writes meanwhile is stale
        # before it stops waiting.
        for left, *_ in list(self._to_write):
            if is_among(rows, np.sort(left)).any():
                return False
        return not staged.early.is_stale.any()

    def _hand_out(self, staged: Staged) -> None:
        """Reads the rows again that were written since they were read; in the queue."""
        if not self._is_current(staged):
            self.write_back()
        if staged.early is not None and self._table.hand_out(staged.early):
            self._put(staged)

    def _put(self, staged: Staged) -> None:
        """Copies the rows that were read to the device."""
        assert staged.early is not None
        staged.columns = jax.device_put(staged.early.buffers, self.placement)

    def _drop(self, staged: Staged) -> None:
        if staged.early is not None:
            self._table.drop(staged.early)

    def _undo(self, staged: Staged) -> None:
        """Undoes the latest batch staged."""
        self.slots.undo(staged.plan)
        self._drop(staged)

    def _undo_staged(self) -> list[_Announced]:
        """Undoes all staged batches, and returns their entries."""
        entries = [x for x in self._announced if x.staged or x.error]
        for entry in reversed(entries):
            if entry.staged is not None:
                self._undo(entry.staged)
            entry.staged = entry.error = None
        return entries

    def _write(self, rows: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Writes distinct ascending rows of the table."""
        if self._journal is not None:
            self._journal.before_write(rows)
        self._table.write(rows, values)
        self.written_rows += rows.size


# ------------------------------------------------------------------ on the device


def _padded(slots: np.ndarray, height: int) -> np.ndarray:
    """Slots in a bucket, so that programs are compiled for few numbers of them."""
    padded = np.full((bucket(slots.size),), height, np.int32)
    padded[: slots.size] = slots
    return padded


# Two programs: in one, XLA:CPU copies the arrays, since it gathers from the arrays that
# it scatters into (2026-11).


@jax.jit
def _gather(arrays, slots):
    """The rows of distinct slots."""
    return [indexing.take_rows(x, slots) for x in arrays]


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(arrays, slots, columns):
    """The arrays, with other rows in distinct ascending slots."""
    return [
        indexing.set_distinct_rows(x, slots, new, indices_are_sorted=True)
        for x, new in zip(arrays, columns)
    ]
