"""Batches in flight: rows that are read early, batches read ahead, the work queue.

The rows of the next batch are read while the step of a batch runs, though the push of
that step may still change some of them. One rule keeps the result equal to reading each
batch when it is used: all rows are read early; each write to the table marks its rows
stale in the batches in flight; the stale rows are read again when the batch is handed
out. The queue runs first in, first out, so all earlier writes are done by then. The
rule does not depend on how many pushes a step makes: none (evaluation), one or several.
"""

import collections
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from sparsejax import _arguments, _compat


# ------------------------------------------------------------------ rows of a batch


class EarlyRows:
    """Rows of a table for a batch in flight, read when this object is made.

    Args:
      columns: arrays of the table to read: weights, and perhaps leaves of state.
      rows: the distinct rows, ascending.
      capacity: rows of each buffer, of which those after the first are zeros.
    """

    def __init__(self, columns: Sequence[np.ndarray], rows: np.ndarray, capacity: int):
        self.rows = rows
        self.is_stale = np.zeros(rows.shape, bool)
        self._columns = columns
        self.buffers = [
            np.empty((capacity, *column.shape[1:]), column.dtype) for column in columns
        ]
        for column, buffer in zip(columns, self.buffers):
            # Other modes copy through a temporary, to leave `out` as it is on an error.
            np.take(column, rows, axis=0, out=buffer[: rows.size], mode="clip")
            buffer[rows.size :] = 0

    def read_stale(self) -> None:
        """Reads the stale rows again."""
        places = np.flatnonzero(self.is_stale)
        for column, buffer in zip(self._columns, self.buffers):
            buffer[places] = np.take(column, self.rows[places], axis=0)
        self.is_stale[:] = False


# ------------------------------------------------------------------ batches ahead


class ReadAhead:
    """Results that are prepared from batches ahead of their use, in order.

    An error of the batches or of `prepare` is raised when its batch is taken.

    Args:
      batches: an iterable.
      prepare: a function of a batch, whose result is never an exception.
    """

    END: Any = object()

    def __init__(self, batches: Iterable[Any], prepare: Callable[[Any], Any]):
        self._batches, self._prepare = iter(batches), prepare
        self._ahead: collections.deque[Any] = collections.deque()
        self._is_ended = False

    def fill(self, count: int) -> None:
        """Prepares batches until `count` are ahead, or the batches end."""
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
        """Takes the first result, or `END` after the last."""
        self.fill(1)
        if not self._ahead:
            return self.END
        head = self._ahead.popleft()
        if isinstance(head, Exception):
            raise head
        return head

    def rest(self) -> list[Any]:
        """Returns the results that were not taken; they leave the queue."""
        ahead, self._ahead = self._ahead, collections.deque()
        return [x for x in ahead if not isinstance(x, Exception)]


# ------------------------------------------------------------------ the queue

_THREAD = "sparsejax.store"


class WorkQueue:
    """Runs a store's work first in, first out.

    While an iterator of `prefetch` exists, a worker thread does all work. A push is
    queued and returns at once; every other call waits for its turn and its result. So a
    pull sees all earlier pushes, and prefetching never overtakes one. Without a worker
    the calling thread does its own work. A forked child has no worker.
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
        """Forgets, in a forked child, the worker and the locks of the parent."""
        if self._process != os.getpid():
            self.__init__()

    def _run(self, work: Callable[[], Any]) -> Any:
        with self._working:
            return work()

    def _keep_error(self, future: Future) -> None:
        error = future.exception()
        if error is not None:
            self._errors.append(error)


class OtherThread:
    """A thread that runs small programs while the caller's thread runs steps.

    The programs that one thread starts on the CPU run one after the other. A small
    program would wait for the step that the same thread has started.
    """

    def __init__(self):
        self._pool = ThreadPoolExecutor(1)  # which ends its thread when it is collected

    def call(self, work: Callable[[], Any]) -> Any:
        """Runs `work` there, under the JAX config of the caller; waits for it."""
        return self._pool.submit(_with_config_of_caller(work)).result()


def _with_config_of_caller(work: Callable[[], Any]) -> Callable[[], Any]:
    """Runs `work` under the calling thread's JAX config, since it is thread-local."""
    x64 = _arguments.x64_enabled()
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]

    def run():
        with _compat.enable_x64(x64), jax.default_device(device):
            return work()

    return run
