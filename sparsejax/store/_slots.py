"""Which row of a table is in which slot of its device cache, and which leaves next.

A batch is planned as a whole: its rows that have a slot keep it, those without one get
a free slot or that of a row that leaves. A policy says which rows leave; a row of the
batch itself never does. A plan can be undone, the latest first, so that batches may be
planned ahead and taken back. What a policy remembers of an undone plan stays: it is a
guess anyway, and no guess changes what is computed.
"""

import collections
import dataclasses

import numpy as np

from sparsejax.store import _memory


@dataclasses.dataclass(eq=False)
class Plan:
    """What a batch changes about the slots.

    Args:
      slots: of all distinct rows of the batch.
      rows: that come up, ascending.
      to: the slots that they get.
      leaving: the rows that were in these slots, or -1.
    """

    slots: np.ndarray
    rows: np.ndarray
    to: np.ndarray
    leaving: np.ndarray


class Slots:
    """The slots of a device cache, all free.

    Args:
      height: rows of the table.
      count: slots.
      policy: one of `POLICIES`.
      unused: a slot that is never given to a row, or None.
    """

    def __init__(self, height: int, count: int, policy: str, unused: int | None):
        self.height = height
        self.row_of = np.full((count,), -1, np.int64)
        self.is_dirty = np.zeros((count,), bool)
        self._slot_of = _memory.zeros((height,), np.int32)  # slot + 1, or 0 for none
        self._used_at = np.full((count,), -1, np.int64)  # by the batch of this number
        free = np.arange(count)[::-1]
        if unused is not None:
            free = free[free != unused]
            self._used_at[unused] = np.iinfo(np.int64).max
        self._free, self._num_free = free.copy(), free.size
        self._now = 0
        self._policy = POLICIES[policy](self._used_at, height)

    @property
    def capacity(self) -> int:
        """The most distinct rows that a batch may have."""
        return self._free.size

    @property
    def used(self) -> int:
        """How many slots have a row."""
        return self._free.size - self._num_free

    def translate(self, ids: np.ndarray) -> np.ndarray:
        """Ids as slots, int32; ids of rows without a slot stay as they are."""
        limits = np.iinfo(np.int32)
        slots = np.clip(ids, limits.min, limits.max).astype(np.int32)
        good = (ids >= 0) & (ids < self.height)
        # In bounds for any id: what is read for the others is not used.
        found = self._slot_of[np.where(good, ids, 0).astype(np.int64)]
        return np.where(good & (found > 0), found - np.int32(1), slots)

    def plan(self, rows: np.ndarray) -> Plan:
        """Gives slots to distinct ascending rows, at most `capacity` of them."""
        self._now += 1
        slots = np.take(self._slot_of, rows) - np.int32(1)
        is_missing = slots < 0
        missing = rows[is_missing]
        self._used_at[slots[~is_missing]] = self._now  # so that none of them leaves
        free = min(missing.size, self._num_free)
        start = self._num_free - free
        to = self._free[start : self._num_free][::-1]
        self._num_free = start
        self._used_at[to] = self._now
        if free < missing.size:
            evicted = self._policy.choose(missing.size - free, self._now)
            to = np.concatenate([to, evicted])
        to = np.sort(to)  # written in ascending order
        leaving = self.row_of[to]
        self._slot_of[leaving[leaving >= 0]] = 0
        self._slot_of[missing] = to + 1
        self.row_of[to] = missing
        self._used_at[to] = self._now
        slots[is_missing] = to
        self._policy.use(slots, rows, self._now)
        return Plan(slots, missing, to, leaving)

    def undo(self, plan: Plan) -> None:
        """Undoes the latest plan that is not undone yet."""
        self._slot_of[plan.rows] = 0
        self.row_of[plan.to] = plan.leaving
        was_used = plan.leaving >= 0
        self._slot_of[plan.leaving[was_used]] = plan.to[was_used] + 1
        free = plan.to[~was_used][::-1]
        self._used_at[free] = -1
        self._free[self._num_free : self._num_free + free.size] = free
        self._num_free += free.size


# ------------------------------------------------------------------ policies

# Each is made with `used_at`, which says of each slot by which batch it was used last:
# -1 if it is free. `use` is told the rows and slots of each batch; `choose` gives
# distinct slots whose rows leave, of those that were used before batch `now`.


class LeastRecentlyUsed:
    """Evicts the row whose last use is longest ago.

    A queue has the slots of each batch. An entry counts only if the slot was not used
    since, so a batch costs what it has of rows, however many slots there are.
    """

    def __init__(self, used_at: np.ndarray, height: int):
        del height
        self._used_at = used_at
        self._queue: collections.deque[tuple[int, np.ndarray]] = collections.deque()
        self._queued = 0

    def use(self, slots: np.ndarray, rows: np.ndarray, now: int) -> None:
        del rows
        self._queue.append((now, slots))
        self._queued += slots.size
        if self._queued > 4 * self._used_at.size:
            entries = [(at, self._valid(at, slots)) for at, slots in self._queue]
            self._queue = collections.deque(x for x in entries if x[1].size)
            self._queued = sum(slots.size for _, slots in self._queue)

    def choose(self, count: int, now: int) -> np.ndarray:
        del now
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
        return slots[self._used_at[slots] == at]


class LeastFrequentlyUsed:
    """Evicts the row that the fewest batches used, and of equals the one used longest
    ago. A row's count stays when it leaves.

    Slots that leave next are found for several batches at once, in order. What a batch
    uses afterwards is compared with them, so only each 16th batch looks at all slots.
    """

    _BATCHES = 16

    def __init__(self, used_at: np.ndarray, height: int):
        self._used_at = used_at
        self._uses = _memory.zeros((height,), np.uint32)
        self._key = np.zeros(used_at.shape, np.int64)
        self._forget()

    def use(self, slots: np.ndarray, rows: np.ndarray, now: int) -> None:
        uses = self._uses[rows] + np.uint32(1)
        self._uses[rows] = uses
        # The batch's number is cut to 32 bits: it only decides between equals.
        self._key[slots] = (uses.astype(np.int64) << 32) | (now & 0xFFFF_FFFF)
        if self._limit:
            self._since.append(slots)
            self._num_since += slots.size
            if self._num_since > self._key.size:  # to look again is less work
                self._forget()

    def choose(self, count: int, now: int) -> np.ndarray:
        low = np.unique(np.concatenate([self._low, *self._since]))
        self._low = low[self._key[low] < self._limit]
        self._since, self._num_since = [], 0
        is_same = self._key[self._next] == self._next_key
        self._next, self._next_key = self._next[is_same], self._next_key[is_same]
        found = np.concatenate(
            [self._may_leave(self._low, now), self._first(count, now)]
        )
        if found.size < count:
            self._look_ahead(count, now)
            return self._first(count, now)
        return found[np.argpartition(self._key[found], count - 1)[:count]]

    def _forget(self) -> None:
        none = np.empty((0,), np.int64)
        self._next = self._next_key = none  # ascending; who has another key was used
        self._limit = 0  # the key of all others, or more, if they were not used since
        self._low = none  # those that were used since, with smaller keys
        self._since: list[np.ndarray] = []
        self._num_since = 0

    def _look_ahead(self, count: int, now: int) -> None:
        slots = np.flatnonzero(self._used_at < now)
        key = self._key[slots]
        self._low, self._limit = slots[:0], np.iinfo(np.int64).max
        ahead = self._BATCHES * count
        if ahead < slots.size:
            some = np.argpartition(key, ahead)
            self._limit = key[some[ahead]]
            slots, key = slots[some[:ahead]], key[some[:ahead]]
        order = np.argsort(key)
        self._next, self._next_key = slots[order], key[order]

    def _first(self, count: int, now: int) -> np.ndarray:
        return self._may_leave(self._next, now)[:count]

    def _may_leave(self, slots: np.ndarray, now: int) -> np.ndarray:
        return slots[self._used_at[slots] < now]


class Clock:
    """Evicts the next row, round and round, that was not used since the last visit."""

    def __init__(self, used_at: np.ndarray, height: int):
        del height
        self._used_at = used_at
        self._is_recent = np.zeros(used_at.shape, bool)
        self._hand = 0

    def use(self, slots: np.ndarray, rows: np.ndarray, now: int) -> None:
        del rows, now
        self._is_recent[slots] = True

    def choose(self, count: int, now: int) -> np.ndarray:
        chosen = []
        while count:
            stop = min(self._hand + max(2 * count, 1024), self._used_at.size)
            here = slice(self._hand, stop)
            leaves = ~self._is_recent[here] & (self._used_at[here] < now)
            found = self._hand + np.flatnonzero(leaves)[:count]
            if found.size == count:
                stop = int(found[-1]) + 1
            self._is_recent[self._hand : stop] = False
            self._used_at[found] = now  # once is enough
            self._hand = stop % self._used_at.size
            chosen.append(found)
            count -= found.size
        return np.concatenate(chosen)


POLICIES = {"lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed, "clock": Clock}
