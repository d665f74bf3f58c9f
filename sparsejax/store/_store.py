"""KVStore: named tables in host memory or files, pulled and pushed by rows."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from sparsejax import _arguments, _progress
from sparsejax._arguments import ArrayLike, Initializer, KeyLike, Progress, PyTree
from sparsejax._files import CHUNK
from sparsejax._index.policy import KeyPolicy
from sparsejax._rows import SelectedRows, concatenate
from sparsejax.store import _functions, _saved_tree, _snapshot
from sparsejax.store._engine import Engine, Request
from sparsejax.store._init_table import make_table
from sparsejax.store._keys import TableKeys, as_keys, as_where
from sparsejax.store._mesh import of_all_processes
from sparsejax.store._requested import (
    Capacities,
    check_not_traced,
    check_rows,
)
from sparsejax.store._snapshot import Changes
from sparsejax.store._table import Table, TableStats
from sparsejax.store._train_step import TrainStep
from sparsejax.store._tree_tables import StoredTable, put_tables
from sparsejax.transform.trace import check_fun


Batch = TypeVar("Batch")
T = TypeVar("T")


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
        self.engine: Any = Engine(mesh)  # its types are not for users

    def __contains__(self, name: object) -> bool:
        return name in self.engine.tables

    def __getitem__(self, name: str) -> StoredTable:
        """Returns a table in a tree of parameters, see `StoredTable`."""
        spec = self.spec(name)
        return StoredTable(self.engine, name, spec.shape, spec.dtype)

    # Without this, Python would iterate by `self[0], self[1], ...`.
    __iter__ = None

    def __reduce__(self) -> Any:
        return self.engine.__reduce__()  # which raises

    def __repr__(self) -> str:
        if self.engine.is_closed:
            return "KVStore(closed)"
        specs = {name: self.spec(name) for name in self.names()}
        shown = (f"{name}: {_arguments.show_spec(x)}" for name, x in specs.items())
        return f"KVStore({', '.join(shown)})"

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
          dtype: of the weights; by default of the array, or float32 for a shape.
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
        self.engine.check_open()
        if not isinstance(name, str):
            raise TypeError(f"KVStore.init: name must be a string, got {name!r}.")
        if name in self.engine.tables:
            raise ValueError(
                f"KVStore.init: table {name!r} already exists. Use another name, or "
                "push to the existing table."
            )
        table = make_table(
            name,
            shape_or_array,
            tx,
            initializer,
            key,
            dtype,
            keys,
            path,
            self.engine.processes,
            self.engine.history,
        )
        self.engine.run(lambda: self.engine.tables.update({name: table}))

    def names(self) -> tuple[str, ...]:
        """Returns the names of the tables, in the order they were made."""
        return tuple(self.engine.tables)

    def spec(self, name: str) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of a table, without waiting.

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
        spec = self.engine.table(name).spec
        return jax.ShapeDtypeStruct(spec.whole_shape, spec.dtype)

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
        return self.engine.table(name).spec.optimizer is not None

    def stats(self) -> dict[str, TableStats]:
        """Returns the size and statistics of each table."""
        tables = self.engine.tables.items()
        return self.engine.run(lambda: {name: t.stats() for name, t in tables})

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
        table, index = self._keyed(name)
        int_keys = as_keys(keys)
        mask = as_where(where, int_keys.shape)
        step = _arguments.static_int("step", step)
        if step >= 2**63:
            raise ValueError(f"KVStore.insert: step must be below 2^63, got {step}.")

        def work():
            table.check_usable()
            depth = max(self.engine.depths, default=0)
            latest, index.latest_step = index.latest_step, step
            if depth and latest is not None and step - latest not in (0, 1):
                raise ValueError(
                    "KVStore.insert: step must count batches while prefetch runs, got "
                    f"{step} after {latest}. The keys of the latest steps belong to "
                    "batches in flight, and must keep their rows."
                )
            return table.insert(int_keys, step, mask, depth)

        return self.engine.run(work)

    def find(self, name: str, keys: ArrayLike | Sequence[str]) -> np.ndarray:
        """Returns the row of each key, or V if the key has no row. Changes nothing.

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
        _, index = self._keyed(name)
        int_keys = as_keys(keys)
        return self.engine.run(lambda: index.find(int_keys))

    def items(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the keys that have a row, and their rows, by ascending row.

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
        _, index = self._keyed(name)

        def work():
            rows = index.rows()
            return index.keys[rows], rows

        return self.engine.run(work)

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
        """Pulls the rows of `ids` to the device, or to all devices of the mesh.

        With several processes, the ids of several tables take the same two collectives
        as the ids of one.

        Args:
          name: of the table; or `{name: ids}` for several tables.
          ids: integers of any dtype and shape. With a mesh, the ids of the devices of
            this process: an array, sharded or not, or a list of arrays.
          capacity: slots of the result; by default the next power of two (at most V),
            so that a jitted step is compiled only a few times. With the same capacity
            for all batches, the step is compiled once. For several tables also a dict.
          mode: for ids out of range: "error", or "drop" to ignore them, for
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
        capacities = self._capacities(capacity)
        if not isinstance(name, Mapping):
            return self.engine.pull({name: ids}, capacities.pulled, mode)[name]
        if ids is not None:
            raise TypeError("KVStore.pull: leave out ids, which are in the dict.")
        return self.engine.pull(name, capacities.pulled, mode)

    def row_sparse_pull(self, name: str, row_ids: ArrayLike) -> SelectedRows:
        """Pulls the rows of `row_ids` without empty slots, as in MXNet.

        The number of slots is the number of distinct rows. It is part of the result's
        shape, so a jitted step is compiled again for each new number.
        """
        capacity = lambda name, count, height: count
        return self.engine.pull({name: row_ids}, capacity, "error")[name]

    def push(self, name: str, grads: PyTree) -> None:
        """Takes one step of the optimizer with a gradient.

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
        table = self.engine.table(name)
        gradient = _checked_gradient(table, grads)
        self.engine.push(table, gradient.rows, gradient.values)

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
        self.engine.check_open()
        depth = _arguments.static_int("depth", depth)
        if not callable(ids_of):
            raise TypeError(
                "KVStore.prefetch: ids_of must be a function that takes a batch and "
                f"returns its ids, got {_arguments.kind_of(ids_of)}."
            )
        capacity_of = self._capacities(capacity).pulled

        def request_of(batch):
            ids = ids_of(batch)
            if isinstance(ids, Mapping):
                return Request(ids, capacity_of)
            if len(self.names()) != 1:
                raise TypeError(
                    "KVStore.prefetch: ids_of must return {name: ids} unless the store "
                    f"has one table, got {_arguments.kind_of(ids)} for the tables "
                    f"{self.names() or 'none'}."
                )
            return Request({self.names()[0]: ids}, capacity_of, alone=True)

        return self.engine.prefetch(batches, request_of, depth, mode)

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
          with a SelectedRows instead of each table. If a table is in several places,
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
        numbers = check_fun(fun, argnums, has_aux)

        def body(rows, arguments, _):
            value, grads, of_tables = _functions.gradient(
                fun, numbers, has_aux, tables, rows, *arguments
            )
            return value, put_tables(grads, of_tables)

        return self._on_pulled_rows(fun, body, capacity)

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
        check_fun(fun)

        def body(rows, arguments, _):
            return _functions.forward(fun, rows, *arguments)

        return self._on_pulled_rows(fun, body, capacity)

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
        """Makes the training step of parameters with tables of this store.

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
        capacities = self._capacities(capacity)
        return TrainStep(self.engine, fun, tx, has_aux, capacities, tables, donate)

    def _on_pulled_rows(
        self, fun: Callable[..., Any], body: Callable[..., Any], capacity: Any
    ) -> Callable[..., Any]:
        """Makes `body(rows, (args, kwargs), ())` a function of `fun`'s arguments."""
        capacities, engine = self._capacities(capacity), self.engine
        row_ids = _functions.RowIds(engine, lambda args, kw: fun(*args, **kw))
        run = _functions.jitted(body)

        @functools.wraps(fun)
        def on_pulled_rows(*args, **kwargs):
            engine.check_open()
            _functions.check_no_cache((args, kwargs))
            arguments = _functions.as_arrays((args, kwargs))
            program = row_ids.program(arguments)
            ids = program.ids(arguments)
            rows = engine.pull(ids, program.capacity(capacities))
            return run(rows, arguments, ())

        return on_pulled_rows

    # -- all rows ---------------------------------------------------------------------

    def pull_all(self, name: str, *, progress: Progress = False) -> np.ndarray:
        """Copies all weights, `[V, ...]`, to host memory, without touching rows.

        With several processes, each gets the rows of all.

        Args:
          name: of the table.
          progress: True for a progress bar on stderr, or a function of (rows done, rows
            in all).
        """
        table = self.engine.table(name)

        def work():
            table.check_written_back()
            out = np.empty(table.spec.shape, table.spec.dtype)
            for rows in table.chunks():
                table.peek(rows, out[rows[0] : rows[-1] + 1])
                report(int(rows[-1]) + 1, table.height)
            return out

        with _progress.progress_reporter("KVStore.pull_all", progress) as report:
            local_rows = self.engine.run(work)
        owners = table.spec.owners
        return local_rows if owners.count == 1 else of_all_processes(owners, local_rows)

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
        table, whole = self.engine.table(name), self.engine.on_one_device
        given = weights
        if isinstance(weights, SelectedRows):
            rows, values = whole(weights.rows), whole(weights.values)
            given = SelectedRows(rows, values, weights.height)
        else:
            given = whole(weights)

        def work():
            table.check_not_cached()
            with self.engine.history.one_change():
                for rows, values in _rows_to_assign(table, given):
                    table.touch(rows)
                    table.write(rows, [values])

        self.engine.run(work)

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

        The file is an `.npz` archive that NumPy reads.

        With several processes, `path` is a directory that all of them see, and each
        writes its own rows to a file in it. When all have written, process 0 makes the
        save the current one. A save that is cut off, because a process is killed,
        leaves the older one. An error in one process is raised in all.

        Args:
          path: of the file, in an existing directory; of a directory with several
            processes.
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
        tree = _saved_tree.describe(extra, self.engine.on_one_device)
        tables, history = self.engine.tables, self.engine.history
        with _progress.progress_reporter("KVStore.save", progress) as report:

            def write(path):
                arguments = path, tables, history, 0, True, report, tree
                work = lambda: _snapshot.write(*arguments, all_rows=True)
                self.engine.run(work)

            self.engine.processes.save(path, write)

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
            part has a checksum), or has other tables or another tree. Nothing has
            changed.
          RuntimeError: another process failed.
        """
        processes = self.engine.processes
        tables, history = self.engine.tables, self.engine.history
        with _progress.progress_reporter("KVStore.load", progress) as report:
            path = processes.saved(path)
            check = lambda: _snapshot.Record(
                path, tables, report, replaces=True, tree=extra
            )
            record = processes.run(lambda: self.engine.run(check))
            put = lambda: _snapshot.put(record, history, replaces=True, is_save=True)
            processes.run(lambda: self.engine.run(put))
            return record.tree

    # -- what changed -----------------------------------------------------------------

    @property
    def version(self) -> int:
        """A number that grows with each change of a table, after all earlier pushes.

        It is 0 in a new store. `load` and `apply_changes` set it to the version of the
        file, before which `load` knows no changes. A table whose file already existed
        may have any rows, so that `init` begins a new version, too.
        """
        return self.engine.run(lambda: self.engine.history.version)

    def changed_since(self, version: int) -> dict[str, np.ndarray]:
        """Returns the ids of the rows that changed after a version.

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
        version = _arguments.static_int("version", version)
        tables, history = self.engine.tables, self.engine.history

        def work():
            rows_by_name = _snapshot.changed_since(tables, history, version)
            return {name: tables[name].ids_of(x) for name, x in rows_by_name.items()}

        return self.engine.run(work)

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
        since = _arguments.static_int("since", since)
        state = _arguments.check_bool("state", state)
        path = self.engine.processes.own_path(path)
        arguments = path, self.engine.tables, self.engine.history, since, state
        return self.engine.run(lambda: _snapshot.write(*arguments))

    def apply_changes(self, path: str | os.PathLike[str]) -> dict[str, Changes]:
        """Applies a file that `export_changes` or `save` of another store wrote.

        This store then has the version of the file, and the weights of the other store
        at this version, to the bit. Both stores must be made by `init` with the same
        tables, initializers, keys and given arrays, or this store must have loaded a
        file that the other one saved. The follower may have tables without optimizer,
        for files without state. Apply the files in order. A file whose version was
        reached before changes nothing.

        A version belongs to one run of the other store. If that store is started again
        from a save, or if this store was changed itself, apply a file since version 0
        once: it replaces all rows.

        The whole file is checked before anything is changed. If the process is killed
        later, a mapped table is half loaded, as by `load`.

        Args:
          path: of the file.

        Returns:
          For each table the ids of the rows that changed, and the keys that lost their
          row.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file is not a file of `export_changes`, is truncated or
            damaged, or has other tables; it is not since version 0, and has the changes
            of another run, or later changes than the next ones. Nothing has changed.
          RuntimeError: a CachedTable is over a table; a table is half loaded.

        Example:
          See `export_changes`.
        """
        path = self.engine.processes.own_path(path)
        tables, history = self.engine.tables, self.engine.history
        return self.engine.run(lambda: _snapshot.apply(path, tables, history))

    def flush(self) -> None:
        """Waits until all pushes are done and memory-mapped tables are on the disk.

        Raises:
          FileNotFoundError: a mapped file was deleted or replaced while it was open.
        """

        def work():
            for table in self.engine.tables.values():
                table.memory.flush()

        self.engine.run(work)

    def close(self) -> None:
        """Flushes, releases memory and files, and ends the store."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    # -- private ----------------------------------------------------------------------

    def _keyed(self, name: Any) -> tuple[Table, TableKeys]:
        """Returns a table and its keys."""
        table = self.engine.table(name)
        if table.keys is None:
            raise ValueError(
                f"Table {name!r} was made without keys: its rows are ids. Pull them by "
                "id, or pass init keys=sparsejax.store.KeyPolicy()."
            )
        return table, table.keys

    def _capacities(self, capacity: Any) -> Capacities:
        """Checks an argument: an int or None, or a dict of them by table."""
        by_name = capacity if isinstance(capacity, Mapping) else {None: capacity}
        for name, size in by_name.items():
            if name is not None:
                self.engine.table(name)  # an unknown name would have no effect
            if size is not None:
                _arguments.static_int("capacity", size)
        return Capacities(capacity)


# ------------------------------------------------------------------ arguments


def _checked_gradient(table: Table, grads: Any) -> SelectedRows:
    """Checks the argument of `push`, and returns it as one SelectedRows."""
    name, spec = table.spec.name, table.spec
    if spec.optimizer is None:
        raise ValueError(
            f"KVStore.push: table {name!r} is read-only, since it was made with "
            "tx=None. Pass init an optax transformation."
        )
    parts = list(grads) if isinstance(grads, (list, tuple)) else [grads]
    for part in parts:
        if not isinstance(part, SelectedRows):
            raise TypeError(
                f"KVStore.push: the gradient for table {name!r} must be a SelectedRows "
                f"or a list of them, got {_arguments.kind_of(part)}. Use "
                "sparsejax.value_and_grad with respect to the pulled SelectedRows."
            )
        rows = part.rows  # which may take a program
        if not (hasattr(rows, "dtype") and jnp.issubdtype(rows.dtype, jnp.integer)):
            raise TypeError(
                f"KVStore.push: the rows of the gradient for table {name!r} must be "
                f"integers, got {_arguments.kind_of(rows)}. Use "
                "sparsejax.value_and_grad, since jax.grad returns no ids, and "
                "SelectedRows.map to change only the values."
            )
        check_not_traced(name, "gradients", rows, part.values)
        is_complex = jnp.issubdtype(part.dtype, jnp.complexfloating)
        if is_complex or part.shape != spec.whole_shape:
            raise (TypeError if is_complex else ValueError)(
                f"KVStore.push: the gradient for table {name!r} must be real and of "
                f"the shape of the table, {spec.whole_shape}, got {part.dtype} of "
                f"shape {part.shape}."
            )
    if not parts:
        raise ValueError(f"KVStore.push: grads for table {name!r} is an empty list.")
    return parts[0] if len(parts) == 1 else concatenate(parts)


def _rows_to_assign(
    table: Table, weights: Any
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields distinct ascending rows of this process and their weights."""
    name, spec, owners = table.spec.name, table.spec, table.spec.owners
    is_sparse = isinstance(weights, SelectedRows)
    values = weights.values if is_sparse else weights
    check_not_traced(name, "weights", values)
    is_known = is_sparse or _arguments.is_array(weights)
    if (
        not is_known
        or weights.shape != spec.whole_shape
        or np.iscomplexobj(values) > (spec.dtype.kind == "c")
    ):
        shown = f"{values.dtype}{list(weights.shape)}" if is_known else None
        raise TypeError(
            f"KVStore.assign: weights for table {name!r} must be a SelectedRows or an "
            f"array of all rows, of shape {spec.whole_shape} (and real if the table "
            f"is), got {shown or _arguments.kind_of(weights)}."
        )
    values = np.asarray(values)
    order = rows = np.arange(owners.height)
    if is_sparse:
        check_not_traced(name, "ids", weights.rows)
        rows = np.asarray(weights.rows)
        check_rows(name, rows, owners.height)
        rows = rows.astype(_arguments.index_dtype(owners.height))
        count = np.count_nonzero(rows < owners.height)
        order = np.argsort(rows, kind="stable")[:count]
        if (np.diff(rows[order]) == 0).any():
            raise ValueError(
                f"KVStore.assign: the SelectedRows for table {name!r} has duplicate "
                "rows. Pass each row once; .coalesce() sums duplicates."
            )
    for start in range(0, order.size, CHUNK):
        places = order[start : start + CHUNK]
        local_rows = owners.localize(rows[places])
        is_own = local_rows < table.height
        yield local_rows[is_own], values[places[is_own]].astype(spec.dtype)
