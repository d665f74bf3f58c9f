"""CachedTable: the hot rows of a store's table on the device, trained there."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax.store._staging import Places, Staging
from sparsejax.store._store import KVStore
from sparsejax.store._tree_tables import CachedRows


_CALL = "CachedTable"


class CacheStats(NamedTuple):
    """Statistics of a device cache, from `CachedTable.stats()`.

    Args:
      slots: the number of rows that the device can hold.
      used_slots: the number of slots that have a row.
      steps: the number of steps.
      hits: the number of distinct rows of batches that were on the device, summed over
        the steps.
      misses: the number of distinct rows that were fetched from the host.
      evictions: the number of rows that were evicted for another row.
      written_rows: the number of rows that were written to the host, when they left or
        by `flush`.
      bytes_up, bytes_back: bytes of weights and state that were copied to the device,
        and to the host.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> store = sj.store.KVStore()
      >>> store.init("words", (1000, 8), optax.sgd(0.1))
      >>> cache = sj.store.CachedTable(store, "words", slots=4)
      >>> tx = sj.optim.lazy(optax.sgd(0.1))
      >>> step = store.train_step(lambda words, ids: words[ids].sum(), tx)
      >>> words, state = cache.table, tx.init(cache.table)
      >>> for ids in ([7, 2, 7], [7, 5, 1], [3, 3, 3]):
      ...     words, state, loss = step(words, state, jnp.array(ids))
      >>> stats = cache.stats()
      >>> stats.hits, stats.misses, stats.evictions, round(stats.hit_rate, 2)
      (1, 5, 1, 0.17)
    """

    slots: int
    used_slots: int
    steps: int
    hits: int
    misses: int
    evictions: int
    written_rows: int
    bytes_up: int
    bytes_back: int

    @property
    def hit_rate(self) -> float:
        """The share of a batch's distinct rows that were on the device."""
        rows = self.hits + self.misses
        return self.hits / rows if rows else 0.0


class CachedTable:
    """The hot rows of a table on the device, the whole table on the host or in a file.

    A table of V rows stays in a `KVStore`, with its optimizer state. The device has an
    array of `slots` rows, and optimizer state for these rows. Before a step, the rows
    that its batch reads get slots:

      slot[id]: V -> {0, ..., slots - 1},   array[slot[id]] = W[id] for each id read

    Missing rows are fetched with their state. If all slots are taken, the rows whose
    last use is longest ago (LRU) go back to the store. `table` takes the place of the
    table in the parameters, and functions read it by the ids of the whole table. The
    step is `KVStore.train_step`, with a `tx` inside `sparsejax.optim.lazy`. Training
    has the same bits for any number of slots that holds the distinct rows of each step,
    and equals the whole table on the device to rounding.

    The counts of the table's optimizer (leaves of state without rows) are kept in the
    store: the first step of a cache takes them from there.

    Rows that were trained are only on the device until `flush`. Before it, the store
    refuses to read, save or change the table. If the process is killed:

    - A table in a file that is opened again has the weights, state and counts of the
      last `flush`. Rows that were written since are rolled back, from a journal next to
      the file (`items.table.journal`). Keep both files together.
    - A table in memory is lost. After `flush`, `KVStore.save` writes all of it, and a
      kill leaves the old file or the new one.
    - Keys of a table with `keys=` are not rolled back: keys that were inserted since
      have rows as if they were inserted after the flush.
    - If the machine itself stops, only a file of `KVStore.save` is safe.

    You save the other parameters and their state. Save them under a number before
    `flush`, and pass `flush` the number: after a restart, `step` returns it.

    - `table`: to put into the parameters.
    - `flush`, `step`: writes all rows to the store; the number passed to it.
    - `stats`: hit rate, and bytes moved.
    - `close`: ends the cache.

    Args:
      store: the store of the table, of one process.
      name: of the table, made with the transformation that trains it.
      slots: the number of rows that the device can hold.

    Raises:
      TypeError, ValueError: a wrong argument; more slots than the table has rows.
      KeyError: no such table.
      RuntimeError: the table has a cache already.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> store = sj.store.KVStore()
      >>> store.init("items", (1_000_000, 2), optax.sgd(0.5))
      >>> cache = sj.store.CachedTable(store, "items", slots=3)
      >>> loss = lambda p, ids: jnp.sum((p["items"][ids] - 1.0) ** 2)
      >>> tx = sj.optim.lazy(optax.sgd(0.5))
      >>> params = {"items": cache.table}
      >>> step, opt_state = store.train_step(loss, tx), tx.init(params)
      >>> batches = [jnp.array([70_000, 2]), jnp.array([3, 70_000])]
      >>> for ids, rows in step.prefetch(params, batches):
      ...     params, opt_state, loss = step(params, opt_state, ids, rows)
      >>> cache.flush(params, opt_state)
      >>> store.pull("items", [2, 3, 70_000], capacity=3).values
      Array([[1., 1.],
             [1., 1.],
             [1., 1.]], dtype=float32)

    References:
      FBGEMM, `EmbeddingLocation.MANAGED_CACHING` with `CacheAlgorithm.LRU`; HugeCTR,
      GPU embedding cache.
    """

    def __init__(self, store: KVStore, name: str, slots: int):
        if not isinstance(store, KVStore):
            raise TypeError(
                f"{_CALL}: store must be a sparsejax.store.KVStore, got "
                f"{_arguments.kind_of(store)}."
            )
        self._engine = store.engine
        table, self._stored = self._engine.table(name), store[name]
        if table.spec.owners.count > 1:
            raise ValueError(
                f"{_CALL}: table {name!r} is sharded over {table.spec.owners.count} "
                "processes, but a cache needs all rows in one. Train it with pull and "
                "push."
            )
        if table.spec.optimizer is None:
            raise ValueError(
                f"{_CALL}: table {name!r} was made with tx=None, so it has no "
                "optimizer. Make it with the one that trains it, or put "
                f"store[{name!r}] into params."
            )
        slots = _arguments.static_int("slots", slots, 1)
        if slots > table.height:
            raise ValueError(
                f"{_CALL}: slots={slots} are more than table {name!r} has rows, "
                f"{table.height}. Pass {table.height} or less."
            )
        self._rows = Staging(self._engine, table, slots)

        def work():
            if table.cache is not None:
                raise RuntimeError(
                    f"{_CALL}: table {name!r} has a CachedTable already. Use it, or "
                    "call its close() first."
                )
            table.check_usable()
            table.cache = self._rows

        self._engine.run(work)

    def __reduce__(self) -> Any:
        return self._engine.__reduce__()  # which raises

    def __repr__(self) -> str:
        shape = [self._rows.slots.row_of.size, *self._stored.shape[1:]]
        array = f"{self._stored.dtype.name}{shape}".replace(" ", "")
        return f"CachedTable({self._stored.name!r}, {array})"

    @property
    def table(self) -> CachedRows:
        """The table to put into the parameters before the first step, with empty slots.

        Functions of these parameters read it by the ids of the whole table.
        """
        shape = self._rows.slots.row_of.size, *self._stored.shape[1:]
        array = jnp.zeros(shape, self._stored.dtype)
        return CachedRows(array, self._rows, self._stored)

    def flush(
        self, params: PyTree, opt_state: PyTree, *, step: int | None = None
    ) -> None:
        """Writes all rows that were trained to the store, with their state.

        It waits for the running step. For a table in a file it also waits for the disk.
        If the process is killed later, the table is restored at this flush; if it is
        killed before the end of the flush, at the previous one.

        Args:
          params, opt_state: the current trees; they are not donated.
          step: a number to keep with the rows, see the property `step`.

        Raises:
          ValueError: the trees are not the trees of the last step; a negative `step`.
          FileNotFoundError: the mapped file was deleted or replaced while it was open.
        """
        self._rows.check_open()
        if step is not None:
            step = _arguments.static_int("step", step)
        places = Places(self._rows, params, opt_state)
        self._engine.run(lambda: self._rows.flush(places, step))

    @property
    def step(self) -> int | None:
        """The `step` of the last `flush`, perhaps in an earlier process.

        It tells which dense parameters belong to the rows: save them under a number,
        and then flush with this number; after a kill, load the dense parameters of
        `step`. `KVStore.save` also saves the number.
        """
        return self._rows.table.flushed_step

    def stats(self) -> CacheStats:
        """Returns the hit rate, and rows and bytes moved since the cache was made."""
        rows = self._rows
        row = sum(x[:1].nbytes for x in rows.table.columns)
        return CacheStats(
            slots=rows.slots.row_of.size,
            used_slots=rows.slots.used,
            steps=rows.steps,
            hits=rows.hits,
            misses=rows.misses,
            evictions=rows.evictions,
            written_rows=rows.written_rows,
            bytes_up=rows.misses * row,
            bytes_back=rows.written_rows * row,
        )

    def close(self, *, discard: bool = False) -> None:
        """Ends the cache; the store can change the table again.

        Args:
          discard: True to drop the training since the last flush. A table in a file is
            then restored at that flush. In memory, rows that have left the device keep
            their trained weights: call `KVStore.load`.

        Raises:
          RuntimeError: rows were trained since the last flush, and `discard` is false.
        """
        rows = self._rows
        if rows.is_closed or self._engine.is_closed:
            return
        discard = _arguments.check_bool("discard", discard)
        if not rows.is_flushed and not discard:
            raise RuntimeError(
                f"{_CALL}.close: rows of table {self._stored.name!r} were trained "
                "since the last flush. Call flush(params, opt_state) first, or pass "
                "discard=True."
            )
        self._engine.run(rows.discard)
