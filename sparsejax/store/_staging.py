"""The slots of a device cache, and the batches that got slots before their step.

The arrays of the cache are nodes of the user's trees, `CachedRows`: one among the
parameters, and one for each leaf of the table's optimizer state that has rows.
`Places` finds them.

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
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import indexing
from sparsejax.store._engine import Engine
from sparsejax.store._format import CHUNK
from sparsejax.store._in_flight import EarlyRows
from sparsejax.store._journal import Journal
from sparsejax.store._requested import bucket, is_among
from sparsejax.store._slots import Plan, Slots
from sparsejax.store._table import Table
from sparsejax.store._tree_tables import CachedRows, is_table


@dataclasses.dataclass(eq=False)
class Staged:
    """A batch that has its slots.

    Args:
      plan: the changes to the slots.
      slots: the cache slots of the rows of the batch, on the device.
      to: the slots of the rows that come up, padded.
      early: weights and state of the rows that come up; None if there are no such rows.
      columns: the same on the device.
    """

    plan: Plan
    slots: jax.Array
    to: np.ndarray
    early: EarlyRows | None = None
    columns: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Announced:
    """A batch that is expected.

    Args:
      rows: of the batch, padded with the height of the table.
      done: the turn in the store's queue that stages it.
      staged, error: the result of that turn.
    """

    rows: np.ndarray
    done: Future | None = None
    staged: Staged | None = None
    error: Exception | None = None


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
        self.known_state: Any = None  # see Places
        self.written_rows = 0
        self.placement: Any = None  # of the array, unless JAX may choose
        is_mapped = table.memory.path is not None
        self._journal = Journal(table) if is_mapped else None
        # Held while slots are planned and batches change hands, not while rows move.
        self._lock = threading.RLock()
        self._announced: collections.deque[Announced] = collections.deque()
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
        staged = self.take(rows)
        places.put_rows(self.commit(staged, places.arrays()))
        if not self._has_counts:
            places.put_counts(self.table.rest)
            self._has_counts = True
        plan = staged.plan
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
        return *places.trees(), staged.slots

    def check_open(self) -> None:
        """Raises a ValueError if the store or the cache was closed."""
        self._engine.check_open()
        if self.is_closed:
            raise ValueError("This cache is closed. Make a new one.")

    def announce(self, rows: np.ndarray) -> Announced:
        """Stages a batch in the store's queue."""
        entry = Announced(rows)
        with self._lock:
            self._announced.append(entry)

        def work():
            with self._lock:
                is_expected = entry in self._announced
            if is_expected:
                self._stage_announced(entry)

        entry.done = self._engine.queue.submit(work)
        return entry

    def withdraw(self, entries: Sequence[Announced]) -> None:
        """Forgets the batches that were not taken, and the rows read for them."""

        def work():
            with self._lock:
                left = [x for x in entries if x in self._announced]
            if left:
                with self.undone():
                    for entry in left:
                        self._announced.remove(entry)

        self._engine.queue.submit(work)

    def take(self, rows: np.ndarray) -> Staged:
        """Returns the staged batch of these rows, with their current content."""
        self._engine.queue.raise_error()
        head = self._announced[0] if self._announced else None
        if head is not None and np.array_equal(head.rows, rows):
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
                    self._engine.run(hand_out)
                return staged

        def work():
            with self.undone():
                staged = self._stage(rows)
                self._hand_out(staged)
                return staged

        return self._engine.run(work)

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
            table.memory.check_in_place()
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
            entries = self._undo_staged()
            try:
                yield
            finally:
                for entry in entries:
                    if entry in self._announced:
                        self._stage_announced(entry)

    # -- private ----------------------------------------------------------------------

    def _stage_announced(self, entry: Announced) -> None:
        try:
            entry.error, entry.staged = None, self._stage(entry.rows)
        except Exception as error:
            entry.error = error

    def _stage(self, rows: np.ndarray) -> Staged:
        """Gives slots to the rows of a batch, and reads them early; in the queue."""
        table, slots = self.table, self.slots
        table.check_usable()
        distinct = rows[rows < table.height]
        count = slots.row_of.size
        if distinct.size > count:
            raise ValueError(
                f"The batch reads {distinct.size} distinct rows of table "
                f"{table.spec.name!r}, more than the {count} slots of its CachedTable. "
                f"Use a smaller batch, or slots={distinct.size} or more."
            )
        with self._lock:
            plan = slots.plan(distinct)
            numbers = np.full(rows.shape, count, np.int32)
            numbers[: distinct.size] = plan.slots
            staged = Staged(plan, jax.device_put(numbers), _padded(plan.to, count))
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
        if staged.early is not None and self.table.hand_out(staged.early):
            self._put(staged)

    def _put(self, staged: Staged) -> None:
        """Copies the rows that were read to the device."""
        assert staged.early is not None
        staged.columns = jax.device_put(staged.early.buffers, self.placement)

    def _drop(self, staged: Staged) -> None:
        if staged.early is not None:
            self.table.drop(staged.early)

    def _undo(self, staged: Staged) -> None:
        """Undoes the latest batch staged."""
        self.slots.undo(staged.plan)
        self._drop(staged)

    def _undo_staged(self) -> list[Announced]:
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
        self.table.write(rows, values)
        self.written_rows += rows.size


# ------------------------------------------------------------------ in the trees


class Places:
    """The arrays of a cache in the trees of the user.

    The table's own optimizer makes a state of one structure. In the state of the user's
    `tx` the same structure occurs once, in which a leaf with rows is a tree like the
    parameters, with one node of this cache. So the leaves match by structure.

    Args:
      cache: the cache.
      params, opt_state: the trees, which are not changed.
    """

    def __init__(self, cache: Staging, params: Any, opt_state: Any):
        self._cache = cache
        self._params, self._params_tree = jax.tree.flatten(params, is_leaf=is_table)
        self._state, self._state_tree = jax.tree.flatten(opt_state, is_leaf=is_table)
        optimizer = cache.table.spec.optimizer
        assert optimizer is not None
        self._tables = self._nodes(self._params)
        if len(self._tables) != 1:
            raise ValueError(
                f"params must have cache.table of table {cache.table.spec.name!r} "
                f"once, but have it {len(self._tables)} times."
            )
        if cache.known_state is None or cache.known_state[0] != self._state_tree:
            numbered = self._state_tree.unflatten(range(len(self._state)))
            nodes = {*self._nodes(self._state)}
            matches = _matches(numbered, optimizer.structure, optimizer.by_row, nodes)
            places = matches[0] if len(matches) == 1 else []
            is_whole = len(places) == len(optimizer.by_row) and nodes <= {*places}
            cache.known_state = self._state_tree, places if is_whole else None
        places = cache.known_state[1]
        if places is None:
            raise ValueError(
                f"opt_state does not have the state {optimizer.names} that table "
                f"{cache.table.spec.name!r} has in the store. Call store.init with the "
                "transformation that tx applies to this table, and pass "
                "tx.init(params) or the state of the last step."
            )
        pairs = list(zip(places, optimizer.by_row))
        self._by_row = [k for k, by_row in pairs if by_row]
        self._counts = [k for k, by_row in pairs if not by_row]
        self._check()

    def arrays(self) -> list[jax.Array]:
        """Returns the weights, and the leaves of state with rows, on the device."""
        nodes = [self._params[self._tables[0]]]
        nodes += [self._state[k] for k in self._by_row]
        return [jnp.asarray(node.array) for node in nodes]

    def put_rows(self, arrays: Sequence[jax.Array]) -> None:
        """Replaces `arrays()`."""
        weights, *by_row = arrays
        self._put(self._params, self._tables[0], weights)
        for k, array in zip(self._by_row, by_row):
            self._put(self._state, k, array)

    def counts(self) -> list[np.ndarray]:
        """Returns the leaves of state without rows."""
        leaves = [self._state[k] for k in self._counts]
        return [np.asarray(x.array if is_table(x) else x) for x in leaves]

    def put_counts(self, counts: Sequence[np.ndarray]) -> None:
        """Replaces `counts()`."""
        for k, value in zip(self._counts, counts):
            self._put(self._state, k, jnp.array(value))

    def trees(self) -> tuple[Any, Any]:
        """Returns `(params, opt_state)`."""
        params = self._params_tree.unflatten(self._params)
        return params, self._state_tree.unflatten(self._state)

    def _nodes(self, leaves: Sequence[Any]) -> list[int]:
        """Returns the positions of the nodes of this cache."""
        is_own = lambda x: isinstance(x, CachedRows) and x.cache is self._cache
        return [k for k, x in enumerate(leaves) if is_own(x)]

    def _put(self, leaves: list[Any], k: int, array: Any) -> None:
        old = leaves[k]
        is_node = isinstance(old, CachedRows)
        leaves[k] = CachedRows(array, old.cache, old.stored) if is_node else array

    def _check(self) -> None:
        """Raises a ValueError unless the arrays can be donated and have slots."""
        table, count = self._cache.table, self._cache.slots.row_of.size
        for x, column in zip(self._unchecked(), table.columns):
            spec = (count, *column.shape[1:]), column.dtype
            if (np.shape(x), getattr(x, "dtype", None)) != spec:
                raise ValueError(
                    f"Table {table.spec.name!r} needs an array {column.dtype.name}"
                    f"{list(spec[0])} in params and opt_state, got "
                    f"{_arguments.kind_of(x)}."
                )
            if isinstance(x, jax.Array) and x.is_deleted():
                raise ValueError(
                    f"The array of table {table.spec.name!r}, or its state, was "
                    "donated to a step. Pass the trees that the last step returned."
                )
            if isinstance(x, jax.Array) and not x.is_fully_replicated:
                raise ValueError(
                    f"The array of table {table.spec.name!r} is sharded. Keep it on "
                    "one device, or replicate it."
                )

    def _unchecked(self) -> list[Any]:
        nodes = [self._params[k] for k in self._tables]
        return [x.array for x in [*nodes, *(self._state[k] for k in self._by_row)]]


def _matches(
    tree: Any, structure: Any, by_row: Sequence[bool], nodes: set[int]
) -> list[list[int]]:
    """Finds the table's state in the smallest trees that have it all.

    Args:
      tree: of the positions of its leaves.
      structure: of the table's state.
      by_row: for each of its leaves, True for a leaf with rows.
      nodes: the positions of nodes of the cache.
    """
    children = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
    nested = []
    for child in children:
        if child is not tree:
            nested += _matches(child, structure, by_row, nodes)
    if nested:
        return nested
    try:
        parts = structure.flatten_up_to(tree)
    except (ValueError, TypeError):
        return []
    places = []
    for part, has_rows in zip(parts, by_row):
        of_cache = nodes & {*jax.tree.leaves(part)}
        if len(of_cache) == 1:
            places.append(*of_cache)
        elif isinstance(part, int) and not has_rows:
            places.append(part)
        else:
            return []
    return [places]


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
