"""Pulled rows, and prefetching: reading the next batch's rows while a step runs.

A batch must get the bits that it would get from pull 1, push 1, pull 2, push 2, and so
on, one after the other. So the rows of the next batch are of three kinds:

- Rows that no batch in flight has pulled are read early.
- Rows that a push changes are forwarded from that push, whenever it comes.
- Late rows, all others, are read when the next batch is asked for. The pushes of the
  batch before it are in the queue by then, and are done first.

So nothing depends on how many pushes a step makes: none (evaluation), one or several.
"""

import collections
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from sparsejax import _arguments, _compat
from sparsejax._rows import SelectedRows
from sparsejax.store._requested_rows import capacity_for, distinct_rows, is_among
from sparsejax.store._table import Table


EXACT: Any = object()  # a capacity: as many slots as distinct rows


# ------------------------------------------------------------------ rows of a batch


class PulledRows:
    """The rows of one table for a batch, on their way to the device.

    Args:
      call: for messages.
      table: to read from.
      ids, capacity, mode: as in `KVStore.pull`; `capacity` may be `EXACT`.
    """

    def __init__(
        self, call: str, table: Table, ids: Any, capacity: int | None, mode: str
    ):
        began = time.perf_counter()
        rows = distinct_rows(call, table.name, ids, table.height, mode)
        count = slots = rows.size
        if capacity is not EXACT:
            slots = capacity_for(call, table.name, count, table.height, capacity)
        self._table, self.rows = table, rows
        self._values = self._empty(count, slots)
        self._is_late = np.zeros(rows.shape, bool)
        table.pulls += 1
        table.pulled_rows += count
        table.pull_seconds += time.perf_counter() - began

    def wait_for(self, other: "PulledRows") -> None:
        """Marks rows late that an earlier batch pulled; its push may change them."""
        self._is_late |= is_among(self.rows, other.rows)

    def read_early(self) -> None:
        """Reads all rows except the late ones."""
        self._read(~self._is_late)

    def forward(self, rows: np.ndarray, weights: np.ndarray) -> None:
        """Takes over the new weights of rows that were pushed."""
        hit = is_among(self.rows, rows)
        self._values[: hit.size][hit] = weights[np.searchsorted(rows, self.rows[hit])]
        self._is_late &= ~hit

    def read_again(self) -> None:
        """Makes all rows late: other weights were loaded."""
        self._is_late[:] = True

    def finish(self) -> SelectedRows:
        """Reads the late rows, and puts all on the device."""
        self._read(self._is_late)
        height, dtype = self._table.height, self.rows.dtype
        slots = np.empty((self._values.shape[0],), dtype)
        slots[: self.rows.size] = self.rows
        slots[self.rows.size :] = height
        # The CPU device uses these buffers in place. Nothing writes to them any more.
        slots, values = jax.device_put((slots, self._values))
        return SelectedRows(slots, values, height)

    def finish_at_once(self) -> SelectedRows:
        """Reads all rows, and puts them on the device."""
        self.read_early()
        return self.finish()

    def _empty(self, count: int, capacity: int) -> np.ndarray:
        """A buffer of `capacity` rows, with zeros after the first `count`."""
        buffer = np.empty((capacity, *self._table.shape[1:]), self._table.dtype)
        buffer[count:] = 0
        return buffer

    def _read(self, which: np.ndarray) -> None:
        began = time.perf_counter()
        if which.all():
            self._table.gather(self.rows, self._values)
        elif which.any():
            rows = self.rows[which]
            read = self._table.gather(rows, self._empty(rows.size, rows.size))
            self._values[: which.size][which] = read
        self._table.pull_seconds += time.perf_counter() - began


# ------------------------------------------------------------------ batches in flight


class InFlightBatch:
    """A prefetched batch: being prepared, or given to the user with its step running.

    Args:
      owner: the iterator that it belongs to, by identity.
    """

    def __init__(self, owner: object):
        self.owner = owner
        self.tables: dict[str, PulledRows] = {}
        self.is_out = False  # whether the user has it


class InFlightBatches:
    """All in-flight batches of a store, in order; used on the queue's thread only."""

    def __init__(self):
        self._all: list[InFlightBatch] = []

    def prepare(self, batch: InFlightBatch) -> None:
        """Adds a batch, and reads those of its rows that can be read now."""
        for name, pulled in batch.tables.items():
            for other in self._all:
                if name in other.tables:
                    pulled.wait_for(other.tables[name])
            pulled.read_early()
        self._all.append(batch)

    def finish(self, batch: InFlightBatch) -> dict[str, SelectedRows]:
        """Gives a batch to the user, who has finished the owner's previous batch."""
        owner = batch.owner
        self._all = [b for b in self._all if b.owner is not owner or not b.is_out]
        batch.is_out = True
        return {name: pulled.finish() for name, pulled in batch.tables.items()}

    def remove(self, owner: object) -> None:
        """Removes all batches of an owner."""
        self._all = [batch for batch in self._all if batch.owner is not owner]

    def forward(self, name: str, rows: np.ndarray, weights: np.ndarray) -> None:
        """Forwards the new weights of a table's rows to the batches that need them."""
        for batch in self._all:
            if name in batch.tables and not batch.is_out:
                batch.tables[name].forward(rows, weights)

    def read_again(self) -> None:
        """Makes all rows late: other weights were loaded."""
        for batch in self._all:
            for pulled in batch.tables.values():
                pulled.read_again()


# ------------------------------------------------------------------ the queue

_THREAD = "sparsejax.store"


class ReadAhead:
    """What is made of batches ahead of their use, in order.

    An error, of the batches or of `prepare`, is kept and raised in its turn.

    Args:
      batches: to go through.
      prepare: a function of a batch; its result is never an exception.
    """

    END: Any = object()

    def __init__(self, batches: Iterable[Any], prepare: Callable[[Any], Any]):
        self._batches, self._prepare = iter(batches), prepare
        self._ahead: collections.deque[Any] = collections.deque()
        self._is_ended = False

    def fill(self, count: int) -> None:
        """Takes batches until `count` are ahead, or there are no more."""
        while len(self._ahead) < count and not self._is_ended:
            try:
                batch = next(self._batches, self.END)
                self._is_ended = batch is self.END
                if not self._is_ended:
                    self._ahead.append(self._prepare(batch))
            except Exception as error:
                self._is_ended = True
                self._ahead.append(error)

    def take(self) -> Any:
        """The first of them, or `END` after the last."""
        self.fill(1)
        if not self._ahead:
            return self.END
        head = self._ahead.popleft()
        if isinstance(head, Exception):
            raise head
        return head


class WorkQueue:
    """Runs a store's work first in, first out.

    While a batch is in flight a worker thread does all work. Pushes are queued and not
    waited for; every other call waits for its turn and its result. So a pull sees all
    earlier pushes, and prefetching never overtakes one. Without a worker the calling
    thread does its own work. A forked child has no worker, and may not wait for one.
    """

    def __init__(self):
        self._process = os.getpid()
        self._state = threading.Lock()  # of the next two fields; held only briefly
        self._users = 0
        self._pool: ThreadPoolExecutor | None = None
        self._working = threading.RLock()  # held while work is done
        self._errors: collections.deque[BaseException] = collections.deque()

    def start_worker(self) -> None:
        """Starts the worker, unless it runs already."""
        self._renew_after_fork()
        with self._state:
            self._users += 1
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, _THREAD)

    def stop_worker(self) -> None:
        """Ends the worker when the queue is empty, unless another user needs it."""
        self._renew_after_fork()
        with self._state:
            self._users = max(self._users - 1, 0)
            pool = self._pool
            if self._users or pool is None:
                return
            self._pool = None
        # Garbage collection may run this on the worker, which cannot wait for itself.
        pool.shutdown(wait=not threading.current_thread().name.startswith(_THREAD))

    def call(self, work: Callable[[], Any]) -> Any:
        """Waits for the turn of `work`, and returns its result."""
        self.raise_error()
        future = self._submit(work)
        result = self._run(work) if future is None else future.result()
        self.raise_error()
        return result

    def call_later(self, work: Callable[[], Any]) -> None:
        """Queues `work`. The next call raises its error."""
        self.raise_error()
        future = self._submit(work)
        if future is None:
            self._run(work)
        else:
            future.add_done_callback(self._keep_error)

    def submit(self, work: Callable[[], Any]) -> Future:
        """Queues `work` for the worker, and returns its future."""
        future = self._submit(work)
        if future is None:  # in a forked child
            future = Future()
            future.set_result(self._run(work))
        return future

    def raise_error(self) -> None:
        """Raises the first pending error of `call_later`."""
        if self._errors:
            raise self._errors.popleft()

    def _submit(self, work: Callable[[], Any]) -> Future | None:
        self._renew_after_fork()
        with self._state:
            if self._pool is None:
                return None
            return self._pool.submit(self._run, _with_config_of_caller(work))

    def _renew_after_fork(self) -> None:
        """In a forked child: forgets the worker and the locks, which are not here."""
        if self._process != os.getpid():
            self.__init__()

    def _run(self, work: Callable[[], Any]) -> Any:
        with self._working:
            return work()

    def _keep_error(self, future: Future) -> None:
        error = future.exception()
        if error is not None:
            self._errors.append(error)


def _with_config_of_caller(work: Callable[[], Any]) -> Callable[[], Any]:
    """`work` under the calling thread's JAX config, which is thread-local."""
    x64 = _arguments.x64_enabled()
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]

    def run():
        with _compat.enable_x64(x64), jax.default_device(device):
            return work()

    return run
