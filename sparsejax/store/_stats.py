"""What a table holds and what was done with it."""

from typing import NamedTuple

import numpy as np

from sparsejax.store._table import Table


class TableStats(NamedTuple):
    """One table of `sparsejax.store.KVStore.stats()`.

    Args:
      rows: of the table.
      touched_rows: those that were ever pulled or pushed, and so have state.
      bytes: that all rows and their state take; of a table that was not given as an
        array, memory or disk holds the rows touched only.
      path: of the memory-mapped file, or None.
      pulls, pulled_rows, pull_seconds: how often, how many distinct rows in all, and
        how long the store worked on it.
      pushes, pushed_rows, push_seconds: the same of pushes.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> store = sj.store.KVStore()
      >>> store.init("words", (1000, 8), optax.adagrad(0.1))
      >>> words = store.pull("words", jnp.array([7, 2, 7]))
      >>> stats = store.stats()["words"]
      >>> stats.touched_rows, stats.pulled_rows, stats.bytes
      (2, 2, 65000)
    """

    rows: int
    touched_rows: int
    bytes: int
    path: str | None
    pulls: int
    pulled_rows: int
    pull_seconds: float
    pushes: int
    pushed_rows: int
    push_seconds: float

    @property
    def pulled_rows_per_second(self) -> float:
        """Distinct rows a second of work."""
        return self.pulled_rows / self.pull_seconds if self.pull_seconds else 0.0

    @property
    def pushed_rows_per_second(self) -> float:
        """Distinct rows a second of work."""
        return self.pushed_rows / self.push_seconds if self.push_seconds else 0.0


def stats_of(table: Table) -> TableStats:
    """Those of a table now."""
    return TableStats(
        rows=table.height,
        touched_rows=int(np.count_nonzero(table.touched)),
        bytes=sum(x.nbytes for x in table.memory.arrays),
        path=table.memory.path,
        **vars(table.counts),
    )
