"""CachedTable: the hot rows of a store's table on the device, trained there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, PyTree
from sparsejax.optim import _trees as trees
from sparsejax.optim._lazy import state_leaves
from sparsejax.store._in_flight import ReadAhead, check_ahead
from sparsejax.store._leaf import CachedRows
from sparsejax.store._staging import Staging
from sparsejax.store._store import KVStore


Batch = TypeVar("Batch")

_CALL = "sparsejax.store.CachedTable"


class CacheStats(NamedTuple):
    """Statistics of a device cache, from `CachedTable.stats()`.

    Args:
      slots: the number of rows that the device can hold.
      used_slots: the number of slots that have a row.
      steps: the number of calls of `prepare`.
      hits: the number of distinct rows of batches that were on the device, summed over
        the steps.
      misses: the number of distinct rows that were fetched from the host.
      evictions: the number of rows that left their slot for another row.
      written_rows: the number of rows that were written to the host, when they left or
        by `flush`.
      bytes_up, bytes_back: bytes of weights and state that were copied to the device,
        and to the host.

    Example:
      >>> import optax, sparsejax as sj
      >>> store = sj.store.KVStore()
      >>> store.init("words", (1000, 8), optax.sgd(0.1))
      >>> cache = sj.store.CachedTable(store, "words", slots=4)
      >>> tx = sj.optim.lazy(optax.sgd(0.1))
      >>> params = {"words": cache.array}
      >>> state = cache.attach(tx, params)
      >>> for ids in ([7, 2, 7], [7, 5, 1], [3]):
      ...     params, state, slots = cache.prepare(ids, params, state)
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


class _Places(NamedTuple):
    """The positions of a table among the leaves of parameters and state.

    Args:
      params, state: the tree structures; `state` is None without an optimizer.
      table: the position of the array among the parameters.
      by_row: the positions of the leaves of state that have a row for each slot.
      rest: the positions of the leaves of state without rows, which the store keeps.
    """

    params: Any
    state: Any
    table: int
    by_row: tuple[int, ...]
    rest: tuple[int, ...]


class CachedTable:
    """The hot rows of a table on the device, the whole table on the host or in a file.

    A table of V rows stays in a `KVStore`, with its optimizer state. The device has an
    array of `slots` rows, and optimizer state for these rows. Before a step, `prepare`
    puts the rows of the batch into slots, and translates ids to slots:

      slot[id]: V -> {0, ..., slots - 1},   array[slot[id]] = W[id] for each id read

    Missing rows are fetched with their state. If all slots are taken, the rows whose
    last use is longest ago (LRU) go back to the store. The step is the usual one:
    `sparsejax.value_and_grad` and `sparsejax.optim.lazy`, on the array and the slots.
    Training has the same bits as with the whole table on the device, for any number of
    slots that holds the distinct rows of each step.

    The step must make a sparse gradient. If a step reads a large part of an array, and
    the array is small here, `sparsejax.value_and_grad` makes a dense one. So require
    the sparse gradient: `tables={"items": True}`.

    Ids out of range, negative ones included, do not change and are out of range of the
    array, so the `mode` of `sparsejax.lookup` applies to them. (Do not use mode="clip",
    which would read the last slot.) A `padding_id` does not change either.

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

    - `attach`: finds the array in the parameters; makes the optimizer state.
    - `table`: in place of the array, read by ids; `KVStore.train_step` prepares it.
    - `prepare`: puts the rows of a batch into slots.
    - `prefetch`: batches, whose rows are read while the previous step runs.
    - `flush`, `step`: writes all rows to the store; the number passed to it.
    - `stats`: hit rate, and bytes moved.
    - `close`: ends the cache.

    Args:
      store: the store of the table, of one process.
      name: of the table, made with the transformation that trains it (or None, if it is
        only read).
      slots: the number of rows that the device can hold.
      padding_id: an id for padding, which does not change. The slot of that number, if
        there is one, stays empty.

    Raises:
      TypeError, ValueError: a wrong argument; more slots than the table has rows.
      KeyError: no such table.
      RuntimeError: the table has a cache already.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax as sj
      >>> store = sj.store.KVStore()
      >>> store.init("items", (1_000_000, 2), optax.sgd(0.5))
      >>> cache = sj.store.CachedTable(store, "items", slots=3)
      >>> tx = sj.optim.lazy(optax.sgd(0.5))
      >>> params = {"items": cache.array}
      >>> opt_state = cache.attach(tx, params)
      >>> @jax.jit
      ... def train_step(params, opt_state, slots):
      ...     loss = lambda p: jnp.sum((sj.lookup(p["items"], slots) - 1.0) ** 2)
      ...     grads = sj.grad(loss, tables={"items": True})(params)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state
      >>> batches = [jnp.array([70_000, 2, 70_000]), jnp.array([3, 70_000])]
      >>> for ids in cache.prefetch(batches, lambda ids: ids):
      ...     params, opt_state, slots = cache.prepare(ids, params, opt_state)
      ...     params, opt_state = train_step(params, opt_state, slots)
      >>> cache.flush(params, opt_state)
      >>> store.pull("items", [2, 3, 70_000], capacity=3).values
      Array([[1., 1.],
             [1., 1.],
             [1., 1.]], dtype=float32)

    References:
      FBGEMM, `EmbeddingLocation.MANAGED_CACHING` with `CacheAlgorithm.LRU`; HugeCTR,
      GPU embedding cache.
    """

    def __init__(
        self,
        store: KVStore,
        name: str,
        slots: int,
        *,
        padding_id: int | None = None,
    ):
        if not isinstance(store, KVStore):
            raise _arguments.wrong_type(
                _CALL, "store", "a sparsejax.store.KVStore", _arguments.kind_of(store)
            )
        table = store._table(_CALL, name)
        if table.owners.count > 1:
            raise ValueError(
                f"{_CALL}: table {name!r} is sharded over {table.owners.count} "
                "processes, but a cache needs all rows in one. Train it with pull and "
                "push."
            )
        slots = _arguments.static_int("slots", slots, 1)
        if slots > table.height:
            raise ValueError(
                f"{_CALL}: slots={slots} are more than table {name!r} has rows, "
                f"{table.height}. Pass {table.height} or less."
            )
        if padding_id is not None and not isinstance(padding_id, (int, np.integer)):
            raise _arguments.wrong_type(
                _CALL, "padding_id", "an int or None", _arguments.show(padding_id)
            )
        self._table, self._num_slots = table, slots
        self._stored = store[name]
        self._staging = Staging(f"{_CALL}.prepare", table, slots, padding_id)
        shape = slots, *table.shape[1:]
        self._array: jax.Array | None = jnp.zeros(shape, table.dtype)
        self._places: _Places | None = None
        self._prefetching = 0
        self._steps = self._hits = self._misses = self._evictions = 0
        self.is_flushed: bool = True
        self._is_closed = False

        def work():
            if table.cache is not None:
                raise RuntimeError(
                    f"{_CALL}: table {name!r} has a CachedTable already. Use it, or "
                    "call its close() first."
                )
            table.check_usable()
            table.cache = self

        table.run(_CALL, work)

    def __repr__(self) -> str:
        array = f"{self._table.dtype.name}{[self._num_slots, *self._table.shape[1:]]}"
        return f"CachedTable({self._table.name!r}, {array.replace(' ', '')})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{_CALL}: a cache cannot be copied or pickled, because its rows belong to "
            "a store. Call cache.flush(params, opt_state) and store.save(path)."
        )

    # -- the array in the parameters --------------------------------------------------

    @property
    def array(self) -> jax.Array:
        """The array `[slots, ...]` to put into the parameters, before `attach`."""
        if self._array is None:
            raise RuntimeError(
                f"{_CALL}.array: the array is among the parameters given to attach, "
                "and is replaced at each step. Take it from there."
            )
        return self._array

    @property
    def table(self) -> CachedRows:
        """The table to put into the parameters, before `attach`.

        In place of `array`: functions of these parameters read it by the ids of the
        table, and `KVStore.train_step` calls `prepare`.
        """
        return CachedRows(self.array, self, self._stored)

    def attach(
        self,
        tx: optax.GradientTransformation | None,
        params: PyTree,
        opt_state: PyTree = None,
    ) -> PyTree:
        """Finds the array among the parameters, and its state in the state of `tx`.

        Args:
          tx: the transformation of all parameters, inside `sparsejax.optim.lazy`; None
            for a table that is only read.
          params: a tree with `array` as one leaf.
          opt_state: the state to change, for example the result of `attach` of another
            table; by default `tx.init(params)`.

        Returns:
          The state, with the table's counts and hyperparameters (leaves without rows)
          from the store: as of the last `flush`.

        Raises:
          ValueError: `params` do not have `array`, or have it twice; the store has
            another optimizer state for the table.
        """
        call = f"{_CALL}.attach"
        self._check_open(call)
        table = self._table
        array = self.array
        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        found = [(k, path) for k, (path, leaf) in enumerate(leaves) if leaf is array]
        if len(found) != 1:
            how = "twice" if found else "nowhere"
            raise ValueError(
                f"{call}: params have the array of table {table.name!r} {how}. Put "
                "cache.array itself, not a copy of it, into params as one leaf."
            )
        (index, path), *_ = found
        if tx is None:
            if table.optimizer is not None:
                raise ValueError(
                    f"{call}: table {table.name!r} has an optimizer in the store, but "
                    "tx is None. Pass the transformation that trains params."
                )
            self._places = _Places(tree, None, index, (), ())
            self._array = None
            return opt_state
        if opt_state is None:
            opt_state = tx.init(params)
        by_row, rest = self._state_places(call, tx, params, path, opt_state)
        state, state_tree = jax.tree.flatten(opt_state)
        for k, value in zip(rest, table.rest):
            state[k] = jnp.array(value)
        self._places = _Places(tree, state_tree, index, by_row, rest)
        self._array = None
        return state_tree.unflatten(state)

    def _state_places(
        self, call: str, tx: Any, params: Any, path: Any, opt_state: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The positions of the leaves of state with rows of the table, and without."""
        leaves, tree = trees.flatten(params)
        (index,) = (k for k, x in enumerate(leaves) if x is self._array)
        specs = tuple(map(trees.to_spec, leaves))
        following = state_leaves.find(tx.init, tree, specs, (index,))
        if jax.tree.structure(opt_state) != jax.tree.structure(following.state):
            raise ValueError(
                f"{call}: opt_state does not have the structure of tx.init(params). "
                "Pass the state that tx.init or another attach returned."
            )
        paths, _ = jax.tree_util.tree_flatten_with_path(following.state)
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        by_row = tuple(k for k, x in enumerate(following.owners) if x == index)
        table, slots = self._table, self._num_slots
        optimizer = table.optimizer
        own = [] if optimizer is None else list(zip(optimizer.names, optimizer.by_row))
        own_rows = [name for name, has_rows in own if has_rows]
        own_rest = [name for name, has_rows in own if not has_rows]
        shapes = [(paths[k][1].shape, paths[k][1].dtype) for k in by_row]
        expected = [((slots, *x.shape[1:]), x.dtype) for x in table.by_row]
        # In the whole state, a leaf of the table's own state has the same name after a
        # prefix and, if the leaf has rows, before the path of the table.
        end = jax.tree_util.keystr(path)
        before = None
        if shapes == expected and own_rows:
            name, ending = names[by_row[0]], own_rows[0] + end
            if name.endswith(ending):
                before = name.removesuffix(ending)

        def matches(k, name, leaf):
            same = (
                names[k] == before + name
                if before is not None
                else (names[k].endswith(name) and not own_rows)
            )
            spec = paths[k][1]
            return same and (spec.shape, spec.dtype) == (leaf.shape, leaf.dtype)

        rest = [
            [k for k in range(len(names)) if matches(k, name, leaf)]
            for name, leaf in zip(own_rest, table.rest)
        ]
        if shapes != expected or any(len(places) != 1 for places in rest):
            ours = [names[k] for k in by_row]
            raise ValueError(
                f"{call}: table {table.name!r} has the state {own_rows + own_rest} in "
                f"the store, but tx keeps {ours} for it, or no such counts. Call "
                "store.init with the transformation that tx applies to this table."
            )
        return by_row, tuple(k for (k,) in rest)

    # -- a step -----------------------------------------------------------------------

    def prepare(
        self, ids: ArrayLike, params: PyTree, opt_state: PyTree = None
    ) -> tuple[Any, Any, jax.Array]:
        """Puts the rows of a batch into slots, and translates ids to slots.

        Call it outside jit, once for each step and table, with the parameters and state
        of the last step. The array and its state are donated.

        Args:
          ids: integers of any dtype and shape; they may repeat or be out of range.
          params, opt_state: trees with the structure that `attach` got and returned.

        Returns:
          `(params, opt_state, slots)`: the same trees with the rows in place, and int32
          of the shape of `ids`.

        Raises:
          TypeError: `ids` are not integers.
          ValueError: there are more distinct rows than slots (the message has the
            number), or the trees differ. Nothing has changed.
        """
        call = f"{_CALL}.prepare"
        arrays = self._arrays(call, params, opt_state)
        staged = self._staging.take(self._as_ids(call, ids))
        arrays = self._staging.commit(staged, arrays)
        plan = staged.plan
        self._steps += 1
        self._hits += plan.slots.size - plan.rows.size
        self._misses += plan.rows.size
        self._evictions += int(np.count_nonzero(plan.leaving >= 0))
        if self._table.optimizer is not None and plan.slots.size:
            self.is_flushed = False
        write_back = self._staging.write_back
        if self._prefetching:
            self._table.queue.call_later(write_back)
        else:
            # Without the last batch, whose rows would wait for the running step.
            self._table.run(call, functools.partial(write_back, keep=1))
        return *self._with_arrays(params, opt_state, arrays), staged.slot_ids

    def prefetch(
        self,
        batches: Iterable[Batch],
        ids_of: Callable[[Batch], Any],
        *,
        depth: int = 1,
    ) -> Generator[Batch]:
        """Yields the batches unchanged; their rows are read while the last step runs.

        Call `prepare` for each of them in the loop, with the same ids. A thread of the
        store gives slots to the rows of the next batch, reads the missing rows, and
        writes the rows that left. The results are the same, bit for bit, also if you
        prepare other ids in between, or skip a batch. For several tables, wrap the
        batches once for each table.

        Args:
          batches: an iterable of anything; batches are taken from it ahead of time.
          ids_of: `batch -> ids`, the ids of this table.
          depth: the number of batches read ahead; 0 reads none.

        Returns:
          An iterator. Closing it early ends the thread. Errors of `batches` or `ids_of`
          are raised when their batch is requested, and the error of a batch with too
          many rows by `prepare`.

        Raises:
          TypeError, ValueError: `ids_of` is not a function, `depth` is negative.
        """
        call = f"{_CALL}.prefetch"
        self._check_open(call)
        depth = check_ahead(call, ids_of, depth)
        return self._prefetch(batches, ids_of, depth)

    def _prefetch(
        self, batches: Iterable[Any], ids_of: Callable[[Any], Any], depth: int
    ) -> Generator[Any]:
        """The iterator that `prefetch` returns."""
        call = f"{_CALL}.prefetch"
        queue, owner = self._table.queue, object()

        def prepare(batch):
            if not depth:
                return batch, None
            ids = self._as_ids(call, ids_of(batch))
            return batch, self._staging.announce(ids, owner)

        ahead = ReadAhead(batches, prepare)
        is_exiting = sys.is_finalizing  # when it is true, modules may be gone
        queue.start_worker()
        self._prefetching += 1
        try:
            while True:
                self._check_open(call)
                head = ahead.take()
                if head is ReadAhead.END:
                    break
                ahead.fill(depth)
                batch, entry = head
                yield batch
                if entry is not None:
                    self._staging.withdraw(entry)
        finally:
            if not is_exiting():
                self._prefetching -= 1
                queue.submit(functools.partial(self._staging.forget, owner))
                queue.stop_worker()

    # -- all rows ---------------------------------------------------------------------

    def flush(
        self, params: PyTree, opt_state: PyTree = None, *, step: int | None = None
    ) -> None:
        """Writes all rows that were trained to the store, with their state.

        It waits for the running step. For a table in a file it also waits for the disk.
        If the process is killed later, the table is restored at this flush; if it is
        killed before the end of the flush, at the previous one.

        Args:
          params, opt_state: the current trees; they are not donated.
          step: a number to keep with the rows, see the property `step`.

        Raises:
          ValueError: the trees are not the trees of `attach`; a negative `step`.
          FileNotFoundError: the mapped file was deleted or replaced while it was open.
        """
        call = f"{_CALL}.flush"
        if step is not None:
            step = _arguments.static_int("step", step)
        arrays = self._arrays(call, params, opt_state)
        places = self._places
        assert places is not None
        leaves = jax.tree.leaves(opt_state)
        rest = [leaves[k] for k in places.rest]

        def work():
            table = self._table
            table.check_usable()
            with self._staging.undone():
                self._staging.write_dirty(arrays)
                self._staging.write_rest([np.asarray(x) for x in rest])
                table.memory.flush()
                table.memory.check_in_place(call)
                table.flushed_step = step
                self._staging.end_flush()
                self.is_flushed = True

        self._table.run(call, work)

    @property
    def step(self) -> int | None:
        """The `step` of the last `flush`, perhaps in an earlier process.

        It tells which dense parameters belong to the rows: save them under a number,
        and then flush with this number; after a kill, load the dense parameters of
        `step`. `KVStore.save` also saves the number.
        """
        return self._table.flushed_step

    def stats(self) -> CacheStats:
        """The hit rate, and the rows and bytes moved since the cache was made."""
        row = sum(x[:1].nbytes for x in self._table.columns)
        return CacheStats(
            slots=self._num_slots,
            used_slots=self._staging.slots.used,
            steps=self._steps,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            written_rows=self._staging.written_rows,
            bytes_up=self._misses * row,
            bytes_back=self._staging.written_rows * row,
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
        call = f"{_CALL}.close"
        if self._is_closed:
            return
        discard = _arguments.check_bool("discard", discard)
        if not self.is_flushed and not discard:
            raise RuntimeError(
                f"{call}: rows of table {self._table.name!r} were trained since the "
                "last flush. Call flush(params, opt_state) first, or pass "
                "discard=True."
            )

        def work():
            self._staging.discard()
            self._table.cache = None
            self._is_closed = True

        self._table.queue.call(work)

    def release(self) -> None:
        """Ends the cache of a closed store; opening the file again rolls it back."""
        self._is_closed = True
        self._staging.release()

    # -- private ----------------------------------------------------------------------

    def _as_ids(self, call: str, ids: Any) -> np.ndarray:
        """Ids as int64; larger ids are out of range anyway."""
        self._check_not_traced(call, ids)
        ids = _arguments.as_integers(ids)
        self._check_not_traced(call, ids)
        ids = np.asarray(ids)
        if ids.dtype == np.uint64:
            ids = np.minimum(ids, np.uint64(np.iinfo(np.int64).max))
        return ids.astype(np.int64)

    def _arrays(self, call: str, params: Any, opt_state: Any) -> list[jax.Array]:
        """The array and its state in the trees, in the order of the table's columns."""
        self._check_open(call)
        places, table = self._places, self._table
        if places is None:
            raise RuntimeError(
                f"{call}: the place of table {table.name!r} in params is not known. "
                "Call attach(tx, params) first."
            )
        leaves, tree = jax.tree.flatten(params)
        state, state_tree = jax.tree.flatten(opt_state)
        if tree != places.params or (
            places.state is not None and state_tree != places.state
        ):
            which = "params" if tree != places.params else "opt_state"
            raise ValueError(
                f"{call}: {which} must have the structure that attach was given, or "
                "returned. Pass the trees of the last step."
            )
        found = [leaves[places.table], *(state[k] for k in places.by_row)]
        self._check_not_traced(call, *found)
        for x, column in zip(found, table.columns):
            shape = self._num_slots, *column.shape[1:]
            if (np.shape(x), getattr(x, "dtype", None)) != (shape, column.dtype):
                raise ValueError(
                    f"{call}: table {table.name!r} needs an array {column.dtype.name}"
                    f"{list(shape)} in params and opt_state, got "
                    f"{_arguments.kind_of(x)}."
                )
            if isinstance(x, jax.Array) and x.is_deleted():
                raise ValueError(
                    f"{call}: the array of table {table.name!r}, or its state, was "
                    "donated to a step or to prepare. Pass the trees that the last one "
                    "returned."
                )
            if isinstance(x, jax.Array) and not x.is_fully_replicated:
                raise ValueError(
                    f"{call}: the array of table {table.name!r} is sharded. Keep it on "
                    "one device, or replicate it."
                )
        return [jnp.asarray(x) for x in found]

    def _with_arrays(
        self, params: Any, opt_state: Any, arrays: Sequence[jax.Array]
    ) -> tuple[Any, Any]:
        """The trees with other arrays."""
        places = self._places
        assert places is not None
        leaves, state = jax.tree.leaves(params), jax.tree.leaves(opt_state)
        leaves[places.table], *by_row = arrays
        for k, x in zip(places.by_row, by_row):
            state[k] = x
        if places.state is not None:
            opt_state = places.state.unflatten(state)
        return places.params.unflatten(leaves), opt_state

    def _check_not_traced(self, call: str, *arrays: Any) -> None:
        if any(isinstance(x, Tracer) for x in arrays):
            raise TypeError(
                f"{call}: table {self._table.name!r} is in host memory, so it cannot "
                "use arrays traced by jit, vmap, grad or scan. Call it before the "
                "jitted step, and pass the result to the step."
            )

    def _check_open(self, call: str) -> None:
        self._table.check_open(call)
        if self._is_closed:
            raise ValueError(f"{call}: this cache is closed. Make a new one.")
