"""KVStore: named tables in host memory or files, pulled and pushed by rows."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, NoReturn, Self, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from sparsejax import _arguments, _progress
from sparsejax._arguments import ArrayLike, Initializer, KeyLike, Progress, PyTree
from sparsejax._rows import SelectedRows, concatenate
from sparsejax.store import _changes, _extra, _pulled_calls, _saving, _together
from sparsejax.store._changes import Changes
from sparsejax.store._history import History
from sparsejax.store._in_flight import EarlyRows, ReadAhead, WorkQueue, check_ahead
from sparsejax.store._keys import KeyPolicy, TableKeys, as_keys, as_where
from sparsejax.store._leaf import StoredTable, put_tables
from sparsejax.store._make import make_table, own_path
from sparsejax.store._mesh import Devices, of_all_processes
from sparsejax.store._requested_rows import (
    capacity_for,
    check_not_traced,
    check_rows,
    distinct_rows,
    slots_of,
)
from sparsejax.store._table import Table, TableStats, closed
from sparsejax.store._train_step import TrainStep
from sparsejax.transform.trace import check_fun


Batch = TypeVar("Batch")
T = TypeVar("T")
# `f(name, count, height)`: the slots for `count` distinct rows of a table.
Slots = Callable[[str, int, int], int]

_CALL = "sparsejax.store.KVStore"


class KVStore:
    """Named tables in host memory or files, accessed by pulling and pushing rows.

    A table of V rows stays on the host, together with its optimizer state. A step
    pulls the rows that its batch needs to the device, as a SelectedRows, and pushes
    their gradient. The store then runs the optimizer on these rows of weights and
    state, as `sparsejax.optim.lazy` does on the device, to rounding:

      W[R], S[R] := step(W[R], S[R], g)      R: the rows of the gradient g

    So the device needs memory only for the rows of a batch, for any V.

    A pulled SelectedRows takes the place of the table in `sparsejax.lookup`,
    `embedding_bag` and the layers of `sparsejax.nn`. Its gradient from
    `sparsejax.value_and_grad` is a SelectedRows with the same rows, ready to be pushed.
    Rows that were not pulled read as NaN. (`jax.grad` does not accept ids: pass it
    `pulled.values`.)

    A store runs one call at a time; calls from other threads wait. Each table has its
    own transformation, so clipping by global norm sees the rows of one table.

    With a mesh, pulled rows are on all its devices, for a step over a sharded batch.
    Pass the ids of all devices: a row that several devices need is read once. With
    several processes, a hash of its id decides which process owns a row, in memory or
    in a file. Every process makes the same store and the same calls in the same order,
    with the ids of its own devices, and prefetches the same number of batches. Rows
    start as in one process, and training equals training in one process to rounding.

    - `init`: makes a table, or opens its file.
    - `insert`, `find`, `items`: the rows of keys that come and go, in a table made with
      `keys=KeyPolicy()`.
    - `pull`, `push`: move rows to the device, and their gradient back.
    - `prefetch`: batches with their rows, read while the previous step runs.
    - `store["name"]`: a table in a tree of parameters. `value_and_grad`, `train_step`
      and `forward` run functions of such trees on the rows that they read.
    - `assign`, `pull_all`: set rows; read all rows.
    - `save`, `load`: all tables, to and from a file.
    - `version`, `changed_since`: which rows changed; `export_changes`,
      `apply_changes`: these rows, to and from a file.
    - `names`, `spec`, `is_trainable`, `stats`: the tables, their shapes and
      dtypes, and their statistics.
    - `flush`, `close`: write mapped files to disk; end the store.

    A store is also a context manager, which closes it.

    Args:
      mesh: of the devices to which rows are pulled, at least one of each process; None
        for JAX's default device.

    Raises:
      TypeError: `mesh` is not a mesh.
      ValueError: a process has no device in the mesh.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax as sj
      >>> store = sj.store.KVStore()
      >>> store.init("words", (1_000_000, 2), optax.sgd(0.5))
      >>> @jax.jit
      ... def step(params, ids):
      ...     loss = lambda p: jnp.sum((sj.lookup(p["words"], ids) - 1.0) ** 2)
      ...     return sj.value_and_grad(loss)(params)
      >>> ids = jnp.array([70_000, 2, 70_000])
      >>> loss, grads = step({"words": store.pull("words", ids)}, ids)
      >>> store.push("words", grads["words"])
      >>> store.pull("words", ids, capacity=2).values
      Array([[1., 1.],
             [2., 2.]], dtype=float32)

    References:
      MXNet, `KVStore` (`init`, `push`, `row_sparse_pull`); Li et al., 2014,
      "Scaling Distributed Machine Learning with the Parameter Server".
    """

    def __init__(self, mesh: Mesh | None = None):
        self._devices = None if mesh is None else Devices(_CALL, mesh)
        # The index of this process, and the number of processes that share the rows.
        self._place = (0, 1)
        if self._devices is not None:
            self._place = self._devices.process, self._devices.count
        self._processes: _together.Processes | None = None
        if self._devices is not None and self._devices.count > 1:
            gather = self._devices.gather
            self._processes = _together.Processes(*self._place, gather)
        self._tables: dict[str, Table] = {}
        self._queue = WorkQueue()
        self._history = History()
        self._depths: list[int] = []  # of the iterators of prefetch that run
        self._closed = False

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    def __getitem__(self, name: str) -> StoredTable:
        """A table in a tree of parameters, see `StoredTable`."""
        table = self._table(f"{_CALL}[name]", name)
        return StoredTable(self, name, table.whole_shape, table.dtype)

    # Without this, Python would iterate by `self[0], self[1], ...`.
    __iter__ = None

    def __repr__(self) -> str:
        tables = (
            f"{name}: {_arguments.show_spec(self.spec(name))}" for name in self._tables
        )
        return f"KVStore({'closed' if self._closed else ', '.join(tables)})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{_CALL}: a store cannot be copied or pickled, because it has a thread "
            "and may have open files. Save its tables with store.save(path), and load "
            "them into another store."
        )

    # -- tables -----------------------------------------------------------------------

    def init(
        self,
        name: str,
        shape_or_array: ArrayLike,
        tx: optax.GradientTransformation | None,
        *,
        path: str | os.PathLike[str] | None = None,
        initializer: Initializer | None = None,
        key: KeyLike = 0,
        dtype: DTypeLike | None = None,
        keys: KeyPolicy | None = None,
    ) -> None:
        """Makes a table, or opens the file of one.

        Args:
          name: of the table.
          shape_or_array: `[V, ...]`, the shape as a tuple, or the first weights of all
            rows, which are copied.
          tx: an optax transformation that is row-separable, bare or inside
            `sparsejax.optim.lazy`; None for a table that is only read.
          path: of a memory-mapped file for weights and state, which outlives the
            process. An existing file is opened, and must have this shape, dtype,
            optimizer state, initializer and key. With several processes, `.0-of-2`,
            `.1-of-2` and so on are appended.

            The system writes changes to the file at any time; `flush` waits for the
            disk. If the process is killed during a push, any part of that push may be
            in the file: some rows new and some old, a row's weights new and its state
            old, the step count old. The rows of other pushes are whole, and the file is
            valid. If the machine itself stops, everything written since the last
            `flush` may be lost. `save` does not have this risk. The file grows as rows
            are touched; if the disk is full then, the system kills the process
            (SIGBUS).
          initializer: `(key, shape, dtype) -> array`, as in `jax.nn.initializers`,
            called when a row is touched for the first time. Its key is made from `key`
            and the row's id, and its shape is `(1, *row)`. So a row starts the same in
            any order in which rows are touched. By default rows start as zeros.
          key: PRNG key of the initializer, or an int as its seed.
          dtype: of the weights, if a shape is given; float32 by default.
          keys: the policy of a table whose rows belong to keys, see `insert`. V is the
            largest number of rows to which the table grows.

        Raises:
          TypeError, ValueError: a wrong argument; `tx` is not row-separable (the
            message names the part), or decides by the path of a parameter; the file of
            another table.
          MemoryError: the system has not enough memory; a file needs less.
          RuntimeError: the file is in use by another store.
          OSError: the disk has less free space than the whole file may need.
        """
        call = f"{_CALL}.init"
        self._check_open(call)
        if not isinstance(name, str):
            raise _arguments.wrong_type(call, "name", "a string", repr(name))
        if name in self._tables:
            raise ValueError(
                f"{call}: table {name!r} already exists. Use another name, or push to "
                "the existing table."
            )
        table = make_table(
            name,
            shape_or_array,
            tx,
            path,
            initializer,
            key,
            dtype,
            keys,
            self._queue,
            self._history,
            *self._place,
        )
        self._run(call, lambda: self._tables.update({name: table}))

    def names(self) -> tuple[str, ...]:
        """The names of the tables, in the order they were made."""
        return tuple(self._tables)

    def spec(self, name: str) -> jax.ShapeDtypeStruct:
        """The shape and dtype of a table, without waiting.

        Args:
          name: of the table.

        Raises:
          KeyError: no such table.

        Example:
          >>> import sparsejax as sj
          >>> store = sj.store.KVStore()
          >>> store.init("words", (1000, 2), None)
          >>> store.spec("words")
          ShapeDtypeStruct(shape=(1000, 2), dtype=float32)
        """
        table = self._table(f"{_CALL}.spec", name)
        return jax.ShapeDtypeStruct(table.whole_shape, table.dtype)

    def is_trainable(self, name: str) -> bool:
        """Returns True if a table was made with an optimizer, so that `push` works.

        Args:
          name: of the table.

        Raises:
          KeyError: no such table.

        Example:
          >>> import sparsejax as sj
          >>> store = sj.store.KVStore()
          >>> store.init("words", (1000, 2), None)
          >>> store.is_trainable("words")
          False
        """
        return self._table(f"{_CALL}.is_trainable", name).optimizer is not None

    def stats(self) -> dict[str, TableStats]:
        """The size and statistics of each table."""
        tables = self._tables.items()
        return self._run(f"{_CALL}.stats", lambda: {n: t.stats() for n, t in tables})

    # -- keys -------------------------------------------------------------------------

    def insert(
        self,
        name: str,
        keys: ArrayLike | Sequence[str],
        step: int,
        *,
        where: ArrayLike | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Gives rows to new keys, and marks all keys as used at this step.

        It does the work of `sparsejax.HashIndex.insert` outside `jit`, for any number
        of keys of 64 bits, in a table made with `keys=KeyPolicy(...)`. A new key gets
        the next row that was never used, so the table takes memory as its vocabulary
        grows. If all V rows are taken, the new key gets the row of an evicted key. Such
        a row starts anew, with weights from the initializer and fresh optimizer state.

        A row belongs to one key until the key is evicted. The result does not depend on
        the order of the keys, and a key that occurs several times counts once.
        Sightings of keys that wait for admission are counted exactly. A sighting is
        forgotten after n to 2n sightings of other keys, with n the number of rows (at
        least 1024, at most 2^22). Keys and sightings are saved and restored with the
        table.

        Inside the `ids_of` of `prefetch`, keys of batches whose gradient may not have
        been pushed yet are not evicted. For that, `step` must count the batches.

        Args:
          name: of the table.
          keys: NumPy integers of any shape, or strings, but not both. The key of a
            string is its hash of 64 bits.
          step: int below 2^63, the number of the training step. Keys that were used at
            the same step are not evicted.
          where: booleans of the shape of `keys`, False for padding.

        Returns:
          `(rows, evicted)`: the row of each key, of the shape of `keys`, or V for a key
          without a row (`pull(..., mode="drop")` skips it, and `sparsejax.lookup(...,
          mode="zero")` reads zeros); and the rows whose key was evicted, ascending.

        Raises:
          KeyError: there is no such table.
          TypeError: `keys` are not all integers or all strings, or are a JAX array of
            32 bits; `where` is not a mask of them.
          ValueError: the table was made without keys; `step` is not an int, or does not
            count batches while `prefetch` runs.
          RuntimeError: a key must be evicted while a CachedTable is over the table.

        Example:
          >>> import numpy as np, optax, sparsejax as sj
          >>> store = sj.store.KVStore()
          >>> policy = sj.store.KeyPolicy(policy="lru")
          >>> store.init("users", (3, 8), optax.adam(0.1), keys=policy)
          >>> rows, evicted = store.insert("users", np.array([1 << 60, 5, 1 << 60]), 0)
          >>> rows
          array([1, 0, 1], dtype=int32)
          >>> rows, evicted = store.insert("users", ["ann", "bob"], 1)
          >>> rows, evicted  # key 5 was evicted
          (array([2, 0], dtype=int32), array([0], dtype=int32))

        References:
          TensorFlow Recommenders Addons, dynamic embedding; HugeCTR, HierarchicalKV.
        """
        call = f"{_CALL}.insert"
        table, index = self._keyed(call, name)
        found = as_keys(call, keys)
        mask = as_where(call, where, found.shape)
        step = _arguments.static_int("step", step)
        if step >= 2**63:
            raise _arguments.wrong(call, "step", "below 2^63", f"{step}")

        def work():
            table.check_usable()
            depth = max(self._depths, default=0)
            latest, index.latest_step = index.latest_step, step
            if depth and latest is not None and step - latest not in (0, 1):
                raise ValueError(
                    f"{call}: step must count batches while prefetch runs, got "
                    f"{step} after {latest}. The keys of the latest steps belong to "
                    "batches in flight, and must keep their rows."
                )
            return table.insert(call, found, step, mask, depth)

        return self._run(call, work)

    def find(self, name: str, keys: ArrayLike | Sequence[str]) -> np.ndarray:
        """The row of each key, or V if the key has no row. Changes nothing.

        Args:
          name: of the table.
          keys: as in `insert`.

        Raises:
          KeyError: there is no such table.
          TypeError: as in `insert`.
          ValueError: the table was made without keys.

        Example:
          >>> import numpy as np, sparsejax as sj
          >>> store = sj.store.KVStore()
          >>> store.init("users", (3, 8), None, keys=sj.store.KeyPolicy())
          >>> _ = store.insert("users", np.array([70, 50]), step=0)
          >>> store.find("users", np.array([50, 60, 70]))
          array([0, 3, 1], dtype=int32)
        """
        call = f"{_CALL}.find"
        _, index = self._keyed(call, name)
        found = as_keys(call, keys)
        return self._run(call, lambda: index.find(found))

    def items(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The keys that have a row, and their rows, by ascending row.

        Args:
          name: of the table.

        Returns:
          `(keys, rows)`: int64 `[n]`, hashes for strings; and integers `[n]`.

        Raises:
          KeyError: there is no such table.
          ValueError: the table was made without keys.

        Example:
          >>> import numpy as np, sparsejax as sj
          >>> store = sj.store.KVStore()
          >>> store.init("users", (3, 8), None, keys=sj.store.KeyPolicy())
          >>> _ = store.insert("users", np.array([70, 50]), step=0)
          >>> store.items("users")
          (array([50, 70]), array([0, 1]))
        """
        call = f"{_CALL}.items"
        _, index = self._keyed(call, name)

        def work():
            rows = index.rows()
            return index.keys[rows], rows

        return self._run(call, work)

    # -- pull and push ----------------------------------------------------------------

    @overload
    def pull(
        self,
        name: str,
        ids: ArrayLike,
        *,
        capacity: int | None = None,
        mode: str = "error",
    ) -> SelectedRows: ...
    @overload
    def pull(
        self,
        name: Mapping[str, ArrayLike],
        ids: None = None,
        *,
        capacity: int | Mapping[str, int] | None = None,
        mode: str = "error",
    ) -> dict[str, SelectedRows]: ...
    def pull(
        self,
        name: str | Mapping[str, ArrayLike],
        ids: ArrayLike | None = None,
        *,
        capacity: int | Mapping[str, int] | None = None,
        mode: str = "error",
    ) -> SelectedRows | dict[str, SelectedRows]:
        """The rows of `ids`, on the device, or on all devices of the mesh.

        With several processes, the ids of several tables take the same two collectives
        as the ids of one.

        Args:
          name: of the table; or `{name: ids}` for several tables.
          ids: integers of any dtype and shape. With a mesh, the ids of the devices of
            this process: an array, sharded or not, or a list of arrays.
          capacity: slots of the result; by default the next power of two (at most V),
            so that a jitted step is compiled only a few times. With the same capacity
            for all batches, the step is compiled once. For several tables also a dict.
          mode: for ids out of range: "raise" or "error", or "drop" to ignore them, for
            example a padding id of -1.

        Returns:
          SelectedRows of height V: each row once, ids ascending, followed by empty
          slots with `rows == V` and zeros. For several tables, a dict of them.

        Raises:
          KeyError: there is no such table.
          TypeError: `ids` are not integers, or are missing.
          ValueError: ids are out of range, or there are more rows than `capacity` (the
            message has the number). With several processes, all of them raise it.
        """
        call = f"{_CALL}.pull"
        slots = _slots_given(call, capacity)
        if not isinstance(name, Mapping):
            return self._pull(call, name, ids, slots, mode)
        if ids is not None:
            raise _arguments.wrong_type(
                call, "ids", "left out for a dict of ids", _arguments.kind_of(ids)
            )
        if isinstance(capacity, Mapping):
            for each in capacity:
                self._table(call, each)  # an unknown name would have no effect
        return self._pull_tables(call, name, slots, mode)

    def row_sparse_pull(self, name: str, row_ids: ArrayLike) -> SelectedRows:
        """The rows of `row_ids` without empty slots, as in MXNet.

        The number of slots is the number of distinct rows. It is part of the result's
        shape, so a jitted step is compiled again for each new number.
        """
        slots = lambda name, count, height: count
        return self._pull(f"{_CALL}.row_sparse_pull", name, row_ids, slots, "error")

    def push(self, name: str, grads: PyTree) -> None:
        """One step of the optimizer with a gradient.

        Duplicates are summed, as by `SelectedRows.coalesce`. All other rows keep their
        weights and state. While `prefetch` runs, `push` queues the gradient and returns
        at once: the gradient may still be computing, and must not be donated. The next
        call raises an error of such a push.

        With several processes, the gradient is the same in each, and each process
        updates its own rows.

        Args:
          name: of the table.
          grads: SelectedRows of the table's shape, or a list of them, which are summed.

        Raises:
          KeyError: no such table.
          TypeError, ValueError: `grads` is not a SelectedRows of the table's shape.
          ValueError: a row is neither in the table nor an empty slot, `height`.
        """
        table = self._table(f"{_CALL}.push", name)
        table.check_not_cached(f"{_CALL}.push")
        gradient = _checked_gradient(table, grads)
        arrays = self._on_one_device(gradient.rows, gradient.values)

        def work():
            began = time.perf_counter()
            rows, values = np.asarray(arrays[0]), arrays[1]
            check_rows(f"{_CALL}.push", name, rows, table.owners.height)
            # A process without any of these rows also takes the step, so that the
            # counts of all processes agree.
            rows = table.owners.localize(rows)
            table.step(rows, values)
            table.push_seconds += time.perf_counter() - began

        self._queue.call_later(work)

    def prefetch(
        self,
        batches: Iterable[Batch],
        ids_of: Callable[[Batch], Any],
        *,
        depth: int = 1,
        capacity: int | Mapping[str, int] | None = None,
        mode: str = "error",
    ) -> Generator[tuple[Batch, Any]]:
        """Yields batches with their rows, which are read while the last step runs.

        The result is the same, bit for bit, as pulling the rows of each batch when it
        is requested: it includes all earlier pushes. A thread of the store reads the
        rows while a step runs, waits for the gradients of the step, and reads the rows
        that they change again. Between two batches `push` returns at once; a step may
        push any number of times, to any table. Other calls wait for earlier pushes.

        Args:
          batches: an iterable of anything; batches are taken from it ahead of time.
          ids_of: `batch -> {name: ids}`, or just the ids in a store with one table.
          depth: the number of batches prepared ahead; 0 prepares none.
          capacity: as in `pull`, or a mapping from table names to capacities.
          mode: as in `pull`.

        Returns:
          An iterator of `(batch, {name: SelectedRows})`, or of `(batch, SelectedRows)`
          if `ids_of` returns just the ids. Closing it early ends the thread. Errors of
          `batches` or `ids_of` are raised when their batch is requested.

        Raises:
          KeyError: `capacity` has a table that does not exist.
          ValueError: `depth` is negative; at a batch, the errors of `pull`.

        Example:
          >>> import jax.numpy as jnp, optax, sparsejax as sj
          >>> store = sj.store.KVStore()
          >>> store.init("words", (1000, 2), optax.sgd(1.0))
          >>> batches = [jnp.array([7, 2]), jnp.array([7, 9])]
          >>> for ids, words in store.prefetch(batches, lambda ids: ids, capacity=2):
          ...     store.push("words", words.map(jnp.ones_like))
          >>> words.values
          Array([[-1., -1.],
                 [ 0.,  0.]], dtype=float32)
        """
        call = f"{_CALL}.prefetch"
        self._check_open(call)
        depth = check_ahead(call, ids_of, depth)
        if isinstance(capacity, Mapping):
            for name in capacity:
                self._table(call, name)  # an unknown name would have no effect
        slots = _slots_given(call, capacity)
        return self._prefetch(call, batches, ids_of, depth, lambda _: slots, mode)

    def _prefetch(
        self,
        call: str,
        batches: Iterable[Any],
        ids_of: Callable[[Any], Any],
        depth: int,
        slots_of: Callable[[Any], Slots],
        mode: str = "drop",
    ) -> Generator[tuple[Any, Any]]:
        """The iterator that `prefetch` returns."""

        def prepare(batch):
            ids = ids_of(batch)
            is_alone = not isinstance(ids, Mapping)
            if is_alone and len(self._tables) != 1:
                raise TypeError(
                    f"{call}: ids_of must return {{name: ids}} unless the store has "
                    f"one table, got {_arguments.kind_of(ids)} for the tables "
                    f"{self.names() or 'none'}."
                )
            if is_alone:
                ids = {self.names()[0]: ids}
            ids, slots = self._merged(call, ids), slots_of(batch)

            def work():
                found: list[_Pulled] = []
                try:
                    for name, some in ids.items():
                        found.append(self._read_early(call, name, some, slots, mode))
                except BaseException:  # the rows that were read are in flight no more
                    for pulled in found:
                        pulled.table.drop(pulled.early)
                    raise
                return found

            return batch, is_alone, self._queue.submit(work)

        ahead = ReadAhead(batches, prepare)
        is_exiting = sys.is_finalizing  # when it is true, modules may be gone
        self._queue.start_worker()
        self._depths.append(depth)
        for table in self._tables.values():
            if table.keys is not None:
                table.keys.latest_step = None
        try:
            while True:
                self._check_open(call)
                head = ahead.take()
                if head is ReadAhead.END:
                    break
                batch, is_alone, early = head
                handed_out = self._queue.submit(functools.partial(_hand_out, early))
                ahead.fill(depth)
                pulled = handed_out.result()
                self._queue.raise_error()
                found = self._on_device(pulled)
                yield batch, (next(iter(found.values())) if is_alone else found)
            self._queue.submit(lambda: None).result()  # wait for the last pushes
            self._queue.raise_error()
        finally:
            if not is_exiting():
                self._depths.remove(depth)
                for _, _, early in ahead.rest():
                    self._queue.submit(functools.partial(_drop, early))
                self._queue.stop_worker()

    # -- functions of trees with tables -----------------------------------------------

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        *,
        capacity: int | Mapping[str, int] | None = None,
        tables: PyTree = False,
    ) -> Callable[..., tuple[Any, Any]]:
        """`jax.value_and_grad` of a function of parameters with tables of this store.

        Two lines change for a table that does not fit on the device: `store["items"]`
        takes the place of its array, and `store.value_and_grad` the place of
        `jax.value_and_grad`. The function does not change. It may read tables by
        `table[ids]`, `jnp.take`, `sparsejax.lookup`, `embedding_bag`, `dot`, layers of
        `sparsejax.nn`, flax and equinox, inside `jit`, `vmap`, `scan`, `cond` and
        `checkpoint`, in several places.

        With arguments of new shapes, the result traces `fun` and cuts out the program
        that computes the ids of every read. At each call it

        1. runs that program on the host;
        2. pulls the distinct rows of all tables, in one batch;
        3. runs `value_and_grad` of `fun` on these rows, compiled.

        A table T that is read at ids I has the gradient

          SelectedRows(rows=unique(I), values=[dL/dT[i] for i in unique(I)])

        and the store's optimizer is applied to it by `push`. Ids out of range read what
        they read in an array. `train_step` does all of this and the update.

        Args:
          fun: a function with a scalar float output, or `(scalar, aux)`. It is traced
            as under `jit`. Arguments that are not arrays are constants; other values
            compile it again.
          argnums: int or tuple of ints, the arguments to differentiate. A table of
            another argument is read without a gradient.
          has_aux: True if `fun` returns `(loss, aux)`.
          capacity: the number of rows of a table that a batch may read, or a dict of
            one per table; more is an error. By default it is measured: a quarter more
            than the distinct rows of the first batch, at most the number of ids. It
            grows if a batch needs more, and then compiles again. New ids alone never
            do.
          tables: which of the other parameters, arrays on the device, get a sparse
            gradient, as in `sparsejax.value_and_grad`. By default none.

        Returns:
          A function of the same arguments that returns `(value, gradient)`, or
          `((value, aux), gradient)`. The gradient has the structure of the argument,
          with a SelectedRows in place of each table. If a table is in several places,
          each has the gradient of its own reads; push them as a list.

        Raises:
          DensifyError: `fun` uses all rows of a table.
          TypeError: no table is among the arguments, or an argument is traced.
          ValueError: the ids of a read depend on rows of a table of the store; a batch
            reads more rows than `capacity`. Nothing has changed.

        Example:
          >>> import jax.numpy as jnp, optax, sparsejax as sj
          >>> store = sj.store.KVStore()
          >>> store.init("items", (1_000_000, 2), optax.sgd(0.5))
          >>> def loss_fn(params, ids):
          ...     return jnp.sum((params["items"][ids] * params["w"] - 1.0) ** 2)
          >>> params = {"items": store["items"], "w": jnp.ones(2)}
          >>> loss, grads = store.value_and_grad(loss_fn)(params, jnp.array([7, 5]))
          >>> loss, grads["w"]
          (Array(4., dtype=float32), Array([0., 0.], dtype=float32))
          >>> grads["items"].rows[:2]
          Array([5, 7], dtype=int32)
          >>> store.push("items", grads["items"])
          >>> store.pull("items", [7]).values[0]
          Array([1., 1.], dtype=float32)

        References:
          MXNet, `gluon.Trainer` with row-sparse parameters; TensorFlow Recommenders
          Addons, `dynamic_embedding.Variable`.
        """
        call = f"{_CALL}.value_and_grad"
        numbers = check_fun(fun, argnums, has_aux)
        slots = self._capacities(call, capacity)

        def body(rows, arguments, _):
            args, kw = arguments
            value, grads, found = _pulled_calls.gradient(
                call, fun, numbers, has_aux, tables, rows, args, kw
            )
            return value, put_tables(grads, [g for _, g in found])

        return self._on_pulled_rows(call, fun, body, slots)

    def forward(
        self,
        fun: Callable[..., T],
        *,
        capacity: int | Mapping[str, int] | None = None,
    ) -> Callable[..., T]:
        """Runs a function of parameters with tables of this store, without a gradient.

        For evaluation and serving. It pulls rows as `value_and_grad` does.

        Args:
          fun: a function of trees, traced as under `jit`.
          capacity: as in `value_and_grad`.

        Returns:
          A function of the same arguments that returns the same.

        Raises:
          DensifyError, TypeError, ValueError: as `value_and_grad`.

        Example:
          >>> import jax.numpy as jnp, optax, sparsejax as sj
          >>> store = sj.store.KVStore()
          >>> store.init("items", jnp.arange(8.0).reshape(4, 2), None)
          >>> mean = store.forward(lambda params, ids: params["items"][ids].mean(0))
          >>> mean({"items": store["items"]}, jnp.array([3, 1]))
          Array([4., 5.], dtype=float32)
        """
        call = f"{_CALL}.forward"
        check_fun(fun)
        slots = self._capacities(call, capacity)

        def body(rows, arguments, _):
            return _pulled_calls.forward(call, fun, rows, *arguments)

        return self._on_pulled_rows(call, fun, body, slots)

    def train_step(
        self,
        fun: Callable[[Any, Any], Any],
        tx: optax.GradientTransformation,
        has_aux: bool = False,
        *,
        capacity: int | Mapping[str, int] | None = None,
        tables: PyTree = False,
        donate: bool = True,
    ) -> TrainStep:
        """The training step of parameters with tables of this store.

        See `TrainStep`. Its `prefetch` reads the rows of the next batch while a step
        runs.

        Args:
          fun: `(params, batch) -> loss`, or `(loss, aux)`, as in `value_and_grad`.
          tx: an optax transformation for the arrays among `params`. The tables have
            their own, given to `init`; a table made with `tx=None` does not change.
          has_aux, capacity: as in `value_and_grad`.
          tables: as in `value_and_grad`; `tx` must then be `lazy`.
          donate: True if `params` and `opt_state` are donated at each step.

        Returns:
          A `TrainStep`.

        Raises:
          TypeError: `fun` is not a function, or `tx` not a transformation.
          KeyError: `capacity` has a table that does not exist.
        """
        call = f"{_CALL}.train_step"
        self._check_open(call)
        self._capacities(call, capacity)
        return TrainStep(self, fun, tx, has_aux, capacity, tables, donate)

    def _on_pulled_rows(
        self,
        call: str,
        fun: Callable[..., Any],
        body: Callable[..., Any],
        capacities: _pulled_calls.Capacities,
    ) -> Callable[..., Any]:
        """`body(rows, (args, kwargs), ())` as a function of the arguments of `fun`."""
        row_ids = _pulled_calls.RowIds(call, self, lambda a: fun(*a[0], **a[1]))
        run = _pulled_calls.jitted(body)
        nothing = _pulled_calls.split(call, ())

        @functools.wraps(fun)
        def on_pulled_rows(*args, **kwargs):
            self._check_open(call)
            _pulled_calls.check_no_cache(call, (args, kwargs))
            part = _pulled_calls.split(call, (args, kwargs))
            program = row_ids.program(part)
            slots = capacities.slots(call, program)
            rows = self._pull_tables(call, row_ids.of(program, part), slots)
            return run(rows, part, nothing)

        return on_pulled_rows

    def _capacities(self, call: str, capacity: Any) -> _pulled_calls.Capacities:
        """Checks `capacity`, an int or None, or a dict of them."""
        given = capacity if isinstance(capacity, Mapping) else {None: capacity}
        for name, size in given.items():
            if name is not None:
                self._table(call, name)  # an unknown name would have no effect
            if size is not None:
                _arguments.check_capacity(size)
        return _pulled_calls.Capacities(capacity)

    # -- all rows ---------------------------------------------------------------------

    def pull_all(self, name: str, *, progress: Progress = False) -> np.ndarray:
        """The weights of all rows, `[V, ...]`, in host memory, without touching them.

        With several processes, each gets the rows of all.

        Args:
          name: of the table.
          progress: True for a progress bar on stderr, or a function of (rows done, rows
            in all).
        """
        call = f"{_CALL}.pull_all"
        table = self._table(call, name)

        def work():
            table.check_written_back(call)
            out = np.empty(table.shape, table.dtype)
            for rows in table.chunks():
                table.peek(rows, out[rows[0] : rows[-1] + 1])
                report(int(rows[-1]) + 1, table.height)
            return out

        with _progress.progress_reporter(call, progress) as report:
            own = self._run(call, work)
        return own if table.owners.count == 1 else of_all_processes(table.owners, own)

    def assign(self, name: str, weights: ArrayLike | SelectedRows) -> None:
        """Sets the weights of rows; the optimizer state does not change.

        Args:
          name: of the table.
          weights: SelectedRows of the table's shape without duplicates, or an array
            `[V, ...]` of all rows, which are cast to the table's dtype. The same in all
            processes.

        Raises:
          KeyError: no such table.
          TypeError, ValueError: `weights` has another shape, or duplicate rows.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> store = sj.store.KVStore()
          >>> store.init("words", (1000, 2), None)
          >>> store.assign("words", sj.SelectedRows([7], jnp.ones((1, 2)), 1000))
          >>> store.pull("words", [6, 7], capacity=2).values
          Array([[0., 0.],
                 [1., 1.]], dtype=float32)
        """
        call = f"{_CALL}.assign"
        table = self._table(call, name)
        given = weights
        if isinstance(weights, SelectedRows):
            rows, values = self._on_one_device(weights.rows, weights.values)
            given = SelectedRows(rows, values, weights.height)
        else:
            (given,) = self._on_one_device(weights)

        def work():
            table.check_not_cached(call)
            with self._history.one_change():
                for rows, values in _rows_to_assign(table, given):
                    table.touch(rows)
                    table.write(rows, [values])

        self._run(call, work)

    # -- files ------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        extra: PyTree = None,
        *,
        progress: Progress = False,
    ) -> None:
        """Writes all tables to a file, weights and state.

        The file is written next to `path`, and replaces `path` when it is complete and
        on disk. If the process is killed, `path` has its old or its new content. For
        tables that were not made from an array, only touched rows are written.

        With several processes, each writes its own rows to a file of its own, whose
        name ends in `.0-of-2`, `.1-of-2` and so on. The files of a save have one stamp.
        A save that is cut off, because a process is killed, is completed or dropped by
        the next `save` or `load`: rows of two saves are never mixed. An error in one
        process is raised in all.

        Args:
          path: of the file, in an existing directory.
          extra: a tree of arrays, ints, floats, bools and strings, which is saved in
            the same file: dense parameters, their optimizer state, the number of the
            step, the position of a loader. Each process saves its own.
          progress: True for a progress bar on stderr, or a function of (rows done, rows
            in all), which also counts rows of the optimizer state.

        Raises:
          IsADirectoryError: `path` is a directory.
          TypeError: a leaf of `extra` is something else.
          ValueError: `path` is the file of a memory-mapped table, of any store.
          RuntimeError: a table is half loaded, see `load`; another process failed.

        Example:
          >>> import jax.numpy as jnp, tempfile, sparsejax as sj
          >>> store = sj.store.KVStore()
          >>> store.init("words", jnp.ones((5, 2)), None)
          >>> path = tempfile.mkdtemp() + "/model.store"
          >>> store.save(path, {"w": jnp.arange(3), "step": 7})
          >>> store.assign("words", jnp.zeros((5, 2)))
          >>> store.load(path, {"w": jnp.zeros(3, int), "step": 0})
          {'step': 7, 'w': Array([0, 1, 2], dtype=int32)}
          >>> float(store.pull_all("words").sum())
          10.0
        """
        call = f"{_CALL}.save"
        whole = lambda x: self._on_one_device(x)[0]
        leaves = _extra.leaves_of(call, extra, whole)
        with _progress.progress_reporter(call, progress) as report:

            def write(path, stamp=None):
                arguments = path, self._tables, self._history, report, leaves, stamp
                self._run(call, lambda: _saving.save(*arguments))

            if self._processes is None:
                write(path)
            else:
                _together.save(self._processes, call, path, write)

    def load(
        self,
        path: str | os.PathLike[str],
        extra: PyTree = None,
        *,
        progress: Progress = False,
    ) -> Any:
        """Loads a file written by `save` into the tables of this store.

        A file contains no functions: first call `init` for each table, with the same
        shape, optimizer and initializer as before saving. The key comes from the file,
        so that untouched rows start as they would have in the saved store.

        The file is read twice, and nothing changes until all of it has been checked. If
        the second pass fails, the tables are half loaded: pulls, pushes and `save`
        raise RuntimeError until a `load` succeeds, and `init` refuses a mapped file.

        Args:
          path: of the file.
          extra: a tree like the one that was saved, of the same structure, shapes and
            dtypes; None to skip it. Its values are not used.
          progress: as in `save`; each row counts twice, when checked and when read.

        Returns:
          The tree that was saved, with its arrays placed as in `extra`; or None.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file is not a file of `save`, is truncated or damaged (each
            part has a checksum), has other tables or another tree, or the files of the
            processes are not of one save. Nothing has changed.
          RuntimeError: another process failed.
        """
        call, processes = f"{_CALL}.load", self._processes
        with _progress.progress_reporter(call, progress) as report:
            if processes is not None:
                _together.check_one_save(processes, call, path)
                path = own_path(path, *self._place)
            check = lambda: _saving.check(path, self._tables, report, extra)
            arguments = path, self._tables, self._history, report
            read = lambda: _saving.load(*arguments)
            if processes is None:
                return self._run(call, lambda: (check(), read())[0])
            found = processes.run(call, lambda: self._run(call, check))
            processes.run(call, lambda: self._run(call, read))
            return found

    # -- what changed -----------------------------------------------------------------

    @property
    def version(self) -> int:
        """A number that grows with each change of a table, after all earlier pushes.

        It is 0 in a new store. `load` and `apply_changes` set it to the version of the
        file. A table whose file already existed may have any rows, so that `init`
        begins a new version, before which no changes are known.
        """
        return self._run(f"{_CALL}.version", lambda: self._history.version)

    def changed_since(self, version: int) -> dict[str, np.ndarray]:
        """The ids of the rows that changed after a version.

        A row changes if its weights, its state or its key changes, or the use of its
        key by `insert`. A row that is read for the first time does not: it starts the
        same in each store. The store keeps the last version of each row, 8 bytes.

        Args:
          version: an earlier `version`.

        Returns:
          For each table integers `[n]`, ascending; with several processes, the rows of
          this one. In a store that follows another one, rows of the versions that this
          store skipped may be among them.

        Raises:
          ValueError: the store has not reached the version, or does not know the
            changes since.
          RuntimeError: a CachedTable has rows that were trained since its last flush.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> store = sj.store.KVStore()
          >>> store.init("words", (1000, 2), None)
          >>> before = store.version
          >>> store.assign("words", sj.SelectedRows([7], jnp.ones((1, 2)), 1000))
          >>> store.changed_since(before)
          {'words': array([7], dtype=int32)}
        """
        call = f"{_CALL}.changed_since"
        version = _arguments.static_int("version", version)

        def work():
            for table in self._tables.values():
                table.check_usable()
                table.check_written_back(call)
            found = _changes.changed_since(call, self._tables, self._history, version)
            return {name: self._tables[name].ids_of(x) for name, x in found.items()}

        return self._run(call, work)

    def export_changes(
        self, path: str | os.PathLike[str], *, since: int, state: bool = False
    ) -> int:
        """Writes the rows that changed after a version to a file, for `apply_changes`.

        The file has the weights of these rows and, of a table with keys, the key of
        each row that changed: new keys, and rows whose key was evicted. It is written
        next to `path`, and replaces `path` when it is complete and on disk, as by
        `save`. It has a checksum for each array.

        With several processes, each writes its own rows to a file of its own, as by
        `save`.

        A file since version 0 has all rows that changed, and a follower may apply it
        whatever it has: its other rows start anew. It has all rows that were touched if
        the store does not know the changes since version 0.

        Args:
          path: of the file, in an existing directory.
          since: an earlier `version`; the follower must have reached it.
          state: True to write also the optimizer state of the rows, the counts, and the
            sightings of keys, so that a follower can go on training. For that, pass it
            for all files.

        Returns:
          The version that a follower has after `apply_changes`: `since` of the next
          file.

        Raises:
          IsADirectoryError: `path` is a directory.
          TypeError: `state` is not a bool.
          ValueError: the store has not reached `since`, or does not know the changes
            since; `path` is the file of a memory-mapped table.
          RuntimeError: a table is half loaded, or a CachedTable has rows that were
            trained since its last flush.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj, tempfile
          >>> path = f"{tempfile.mkdtemp()}/changes"
          >>> trainer, follower = sj.store.KVStore(), sj.store.KVStore()
          >>> for store in trainer, follower:
          ...     store.init("words", (1000, 2), None)
          >>> trainer.assign("words", sj.SelectedRows([7], jnp.ones((1, 2)), 1000))
          >>> version = trainer.export_changes(path, since=0)
          >>> changes = follower.apply_changes(path)
          >>> follower.pull("words", [6, 7], capacity=2).values
          Array([[0., 0.],
                 [1., 1.]], dtype=float32)

        References:
          TorchRec, `ModelDeltaTracker`; DeepRec, incremental checkpoints.
        """
        call = f"{_CALL}.export_changes"
        since = _arguments.static_int("since", since)
        state = _arguments.check_bool("state", state)
        path = own_path(path, *self._place)
        arguments = path, self._tables, self._history, since, state

        def work():
            for table in self._tables.values():
                table.check_usable()
                table.check_written_back(call)
            return _changes.export(*arguments)

        return self._run(call, work)

    def apply_changes(self, path: str | os.PathLike[str]) -> dict[str, Changes]:
        """Applies a file that `export_changes` of another store wrote.

        This store then has the version of the file, and the weights of the other store
        at this version, to the bit. Both stores must be made by `init` with the same
        tables, initializers, keys and given arrays, or this store must have loaded a
        file that the other one saved. The follower may have tables without optimizer,
        for files without state. Apply the files in order. A file whose version was
        reached before changes nothing.

        The whole file is read into memory and checked before anything is changed. If
        the process is killed later, a mapped table is half loaded, as by `load`.

        Args:
          path: of the file.

        Returns:
          For each table the ids of the rows that changed, and the keys that lost their
          row.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file is not a file of `export_changes`, is truncated or
            damaged, or has other tables; it is not since version 0, and has the changes
            of another store, or later changes than the next ones. Nothing has changed.
          RuntimeError: a CachedTable is over a table; a table is half loaded.

        Example:
          See `export_changes`.
        """
        call = f"{_CALL}.apply_changes"
        path = own_path(path, *self._place)
        work = functools.partial(_changes.apply, path, self._tables, self._history)
        return self._run(call, work)

    def flush(self) -> None:
        """Waits until all pushes are done and memory-mapped tables are on the disk.

        Raises:
          FileNotFoundError: a mapped file was deleted or replaced while it was open.
        """
        call = f"{_CALL}.flush"

        def work():
            for table in self._tables.values():
                table.memory.flush()
                table.memory.check_in_place(call)

        self._run(call, work)

    def close(self) -> None:
        """Flushes, releases memory and files, and ends the store."""
        if self._closed:
            return

        def work():
            for table in self._tables.values():
                table.close()
            self._closed = True

        self._run(f"{_CALL}.close", work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    # -- private ----------------------------------------------------------------------

    def _pull(
        self, call: str, name: Any, ids: Any, slots: Slots, mode: str
    ) -> SelectedRows:
        self._table(call, name)
        return self._pull_tables(call, {name: ids}, slots, mode)[name]

    def _pull_tables(
        self, call: str, ids: Mapping[str, Any], slots: Slots, mode: str = "drop"
    ) -> dict[str, SelectedRows]:
        """The rows of the ids of several tables, in one turn of the queue."""
        ids = self._merged(call, ids)

        def work():
            found = []
            for name, some in ids.items():
                pulled = self._read_early(call, name, some, slots, mode)
                pulled.table.drop(pulled.early)
                found.append(pulled)
            return found

        return self._on_device(self._run(call, work))

    def _read_early(
        self, call: str, name: str, ids: Any, slots: Slots, mode: str
    ) -> _Pulled:
        """Reads the rows of `ids`, which are in flight from now on; in the queue."""
        table = self._table(call, name)
        table.check_written_back(call)
        began = time.perf_counter()
        owners = table.owners
        rows = distinct_rows(call, name, ids, owners.height, mode)
        capacity = slots(name, rows.size, owners.height)
        own = owners.localize(rows)
        own = own[own < table.height]
        # For a mesh the rows are padded when they are copied to its devices.
        size = capacity if self._devices is None else own.size
        early = table.read_early(own, size, with_state=False)
        table.pulls += 1
        table.pulled_rows += own.size
        table.pull_seconds += time.perf_counter() - began
        return _Pulled(table, rows, capacity, early)

    def _merged(self, call: str, ids: Mapping[str, Any]) -> Mapping[str, Any]:
        """The ids of all devices of the mesh, by table. A collective."""
        heights = {name: self._table(call, name).owners.height for name in ids}
        if self._devices is None:
            return ids
        return self._devices.merge_ids(call, ids, heights)

    def _on_device(self, pulled: Sequence[_Pulled]) -> dict[str, SelectedRows]:
        """Pulled rows as arrays; nothing writes to their buffers any more."""
        found = {x.table.name: self._slots_and_values(x) for x in pulled}
        if self._devices is None:
            # One copy of all tables. The CPU device may use these buffers in place.
            found = jax.device_put(found)
        heights = {x.table.name: x.table.owners.height for x in pulled}
        return {
            name: SelectedRows(rows, values, heights[name])
            for name, (rows, values) in found.items()
        }

    def _slots_and_values(self, pulled: _Pulled) -> tuple[Any, Any]:
        """The rows and values of a SelectedRows; on the host without a mesh."""
        owners, rows = pulled.table.owners, pulled.rows
        (values,) = pulled.early.buffers
        if self._devices is not None:
            found = self._devices.replicate(owners, rows, values, pulled.capacity)
            return found.rows, found.values
        slots = np.full((pulled.capacity,), owners.height, rows.dtype)
        slots[: rows.size] = rows
        return slots, values

    def _on_one_device(self, *arrays: Any) -> list[Any]:
        """Arrays of a step over the mesh, each whole on one device."""
        if self._devices is None:
            return list(arrays)
        return [self._devices.on_one_device(x) for x in arrays]

    def _run(self, call: str, work: Callable[[], Any]) -> Any:
        self._check_open(call)
        return self._queue.call(work)

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise closed(call)

    def _keyed(self, call: str, name: Any) -> tuple[Table, TableKeys]:
        """A table and its keys."""
        table = self._table(call, name)
        if table.keys is None:
            raise ValueError(
                f"{call}: table {name!r} was made without keys: its rows are ids. Pull "
                "them by id, or pass init keys=sparsejax.store.KeyPolicy()."
            )
        return table, table.keys

    def _table(self, call: str, name: Any) -> Table:
        self._check_open(call)
        try:
            return self._tables[name]
        except (KeyError, TypeError):
            names = ", ".join(map(repr, self.names()))
            known = f"only {names}" if names else "nor any other"
            raise KeyError(
                f"{call}: there is no table {name!r}, {known}. Call init first."
            ) from None


def _slots_given(call: str, capacity: Any) -> Slots:
    """The slots of `pull` and `prefetch`: given, or the next power of two."""

    def slots(name, count, height):
        by_name = isinstance(capacity, Mapping)
        given = capacity.get(name) if by_name else capacity
        return capacity_for(call, name, count, height, given)

    return slots


# ------------------------------------------------------------------ reading


class _Pulled(NamedTuple):
    """Rows of a table that were read for a batch.

    Args:
      table: of the rows.
      rows: the distinct rows of the batch, ascending; of all processes.
      capacity: slots of the result.
      early: the weights of the rows that this process owns.
    """

    table: Table
    rows: np.ndarray
    capacity: int
    early: EarlyRows


def _hand_out(early: Future) -> list[_Pulled]:
    """The rows of a batch in flight, with all writes so far; in the queue."""
    found = early.result()  # done by now; raises its error
    for pulled in found:
        began = time.perf_counter()
        pulled.table.hand_out(pulled.early)
        pulled.table.pull_seconds += time.perf_counter() - began
    return found


def _drop(early: Future) -> None:
    """Forgets a batch in flight; in the queue."""
    # Done by now, but in a forked child, where the parent's worker will not read it.
    if early.done() and early.exception() is None:
        for pulled in early.result():
            pulled.table.drop(pulled.early)


# ------------------------------------------------------------------ arguments


def _checked_gradient(table: Table, grads: Any) -> SelectedRows:
    """Checks the argument of `push`, and returns it as one SelectedRows."""
    call = f"{_CALL}.push"
    if table.optimizer is None:
        raise ValueError(
            f"{call}: table {table.name!r} is read-only, since it was made with "
            "tx=None. Pass init an optax transformation, for example "
            "sparsejax.optim.adagrad(0.1)."
        )
    parts = list(grads) if isinstance(grads, (list, tuple)) else [grads]
    if not parts:
        raise ValueError(
            f"{call}: grads for table {table.name!r} is an empty list. Pass at least "
            "one SelectedRows."
        )
    for part in parts:
        if not isinstance(part, SelectedRows):
            raise _arguments.wrong_type(
                call,
                f"the gradient for table {table.name!r}",
                "a SelectedRows or a list of them",
                _arguments.kind_of(part),
                "Use sparsejax.value_and_grad with respect to the pulled SelectedRows.",
            )
        rows = part.rows  # which may take a program
        dtype = getattr(rows, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
            found = type(rows).__name__ if dtype is None else dtype
            raise _arguments.wrong_type(
                call,
                f"the rows of the gradient for table {table.name!r}",
                "integers",
                str(found),
                "(jax.grad returns no ids, and jax.tree.map changes them.) Use "
                "sparsejax.value_and_grad, and SelectedRows.map to change only the "
                "values.",
            )
        check_not_traced(call, table.name, "gradients", rows, part.values)
        if jnp.issubdtype(part.dtype, jnp.complexfloating):
            raise _arguments.wrong_type(
                call,
                f"the gradient for table {table.name!r}",
                f"real like the table ({table.dtype})",
                str(part.dtype),
                "If this is intended, use its .real part.",
            )
        if part.shape != table.whole_shape:
            raise ValueError(
                f"{call}: the gradient for table {table.name!r} must have the shape of "
                f"the table, {table.whole_shape}, got {part.shape}."
            )
    return parts[0] if len(parts) == 1 else concatenate(parts)


def _rows_to_assign(
    table: Table, weights: Any
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields distinct ascending rows of this process and their weights."""
    call, name = f"{_CALL}.assign", table.name
    is_sparse = isinstance(weights, SelectedRows)
    values = weights.values if is_sparse else weights
    check_not_traced(call, name, "weights", values)
    is_known = is_sparse or _arguments.is_array(weights)
    dtype = getattr(values, "dtype", None)
    is_complex = dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)
    if (
        not is_known
        or weights.shape != table.whole_shape
        or is_complex > (table.dtype.kind == "c")
    ):
        found = _arguments.kind_of(weights)
        if is_known:
            found = f"{dtype}{list(weights.shape)}"
        raise _arguments.wrong_type(
            call,
            f"weights for table {name!r}",
            f"a SelectedRows or an array of all rows, of shape {table.whole_shape} "
            "(and real if the table is)",
            str(found),
        )
    values = np.asarray(values)
    if not is_sparse:
        for rows in table.chunks():
            yield rows, values[table.owners.ids(rows)].astype(table.dtype)
        return
    check_not_traced(call, name, "ids", weights.rows)
    rows = np.asarray(weights.rows)
    height = table.owners.height
    check_rows(call, name, rows, height)
    distinct, positions, capacity = slots_of(rows, height)
    filled = np.flatnonzero(positions < capacity)
    if filled.size != distinct.size:
        raise ValueError(
            f"{call}: the SelectedRows for table {name!r} has duplicate rows. "
            "Pass each row once; .coalesce() sums duplicates."
        )
    order = filled[np.argsort(positions[filled])]
    own = table.owners.localize(distinct)
    is_own = own < table.height
    yield own[is_own], values[order[is_own]].astype(table.dtype)
