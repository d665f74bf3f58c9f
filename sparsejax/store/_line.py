"""The line in which a store's work stands while batches are prefetched.

One thread does it, first come first served. Pushes are put in line and not waited for;
everything else waits its turn and for its result. So whoever pulls sees every push
that was made before, and a thread that only prefetches never overtakes one.
"""

import collections
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from sparsejax import _arguments


_THREAD = "sparsejax.store"


class Line:
    """A worker thread while somebody needs it, the caller's own thread else."""

    def __init__(self):
        self._state = threading.Lock()  # of the two below, never held for long
        self._users = 0
        self._pool: ThreadPoolExecutor | None = None
        self._work = threading.RLock()  # held by whoever works
        self._failed: collections.deque[BaseException] = collections.deque()

    def enter(self) -> None:
        """From now on there is a worker."""
        with self._state:
            self._users += 1
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, _THREAD)

    def leave(self) -> None:
        """The worker ends after what is in line, if nobody else needs it."""
        with self._state:
            self._users -= 1
            pool = self._pool
            if self._users or pool is None:
                return
            self._pool = None
        # A generator may be collected on the worker itself, which cannot await its end.
        pool.shutdown(wait=not threading.current_thread().name.startswith(_THREAD))

    def call(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, done in its turn."""
        self.raise_failed()
        future = self._submit(work)
        result = self._alone(work) if future is None else future.result()
        self.raise_failed()
        return result

    def later(self, work: Callable[[], Any]) -> None:
        """Has `work` done in its turn; an error is raised by the next call."""
        self.raise_failed()
        future = self._submit(work)
        if future is None:
            self._alone(work)
        else:
            future.add_done_callback(self._remember)

    def submit(self, work: Callable[[], Any]) -> Future:
        """The same, for who has entered: the future of `work`."""
        future = self._submit(work)
        assert future is not None
        return future

    def raise_failed(self) -> None:
        """Raises what went wrong in line, once."""
        if self._failed:
            raise self._failed.popleft()

    def _submit(self, work: Callable[[], Any]) -> Future | None:
        with self._state:
            if self._pool is None:
                return None
            return self._pool.submit(self._alone, _as_here(work))

    def _alone(self, work: Callable[[], Any]) -> Any:
        with self._work:
            return work()

    def _remember(self, future: Future) -> None:
        error = future.exception()
        if error is not None:
            self._failed.append(error)


def _as_here(work: Callable[[], Any]) -> Callable[[], Any]:
    """`work` under what the calling thread has set of JAX, which other threads lack."""
    x64 = _arguments.x64_enabled()
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]

    def run():
        with jax.enable_x64(x64), jax.default_device(device):
            return work()

    return run
