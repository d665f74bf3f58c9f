"""The row in each slot of a device cache, and the row that is evicted next.

A batch is planned as a whole: its rows that have a slot keep the slot; each other row
gets a free slot, or the slot of the row whose last use is longest ago (LRU). A row of
the batch itself never leaves.
"""

import collections

import numpy as np

from sparsejax.store import _mapped


class Slots:
    """The slots of a device cache, all free.

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
