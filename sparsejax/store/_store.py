"""KVStore: named row-sparse tables in host memory or files, pulled and pushed."""

import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import SelectedRows
from sparsejax.store import _all_rows, _prefetch, _saving
from sparsejax.store._gradient import whole_gradient
from sparsejax.store._make import make_table
from sparsejax.store._named import NamedTables
from sparsejax.store._part import EXACT, make_part, pull
from sparsejax.store._stats import TableStats, stats_of


_CALL = "sparsejax.store.KVStore"


class KVStore(NamedTables):
    """Named tables in host memory or in files, whose rows are pulled and pushed.

    A table of V rows stays on the host, with its optimizer's state. A step
    pulls the rows that its batch names onto the device, as a SelectedRows, and
    pushes their gradient; the store then runs the optimizer on those rows of
    weights and state, exactly as `sparsejax.optim.lazy` would on the device:

      W[R], S[R] := step(W[R], S[R], g)      R the rows of the gradient g

    so the device holds what a batch names, whatever V is.

    A pulled SelectedRows takes the place of the table in `sparsejax.lookup`,
    `embedding_bag` and the layers of `sparsejax.nn`, and
    `sparsejax.value_and_grad` with respect to it gives a SelectedRows with the
    same rows, to be pushed. Rows that were not pulled read NaN. (`jax.grad`
    takes no ids: hand it `pulled.values`.)

    One thread at a time works on a store; calls from several wait for each
    other. Each table has its own transformation, so clipping by global norm
    sees one table's rows.

    - `init`: makes a table, or opens its file.
    - `pull`, `push`: rows to the device, and their gradient back.
    - `prefetch`: batches with their rows, read while the step before runs.
    - `assign`, `pull_all`: sets rows; reads all rows.
    - `save`, `load`: all tables, to and from a file.
    - `names`, `spec`, `is_trainable`, `stats`: which tables there are, what they are,
      and what was done with them.
    - `flush`, `close`: mapped files to the disk, and the end; or
      `with KVStore() as s`.

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

    # -- tables -----------------------------------------------------------------------

    def init(
        self,
        name: str,
        shape_or_array: Any,
        tx: Any,
        *,
        path: str | os.PathLike[str] | None = None,
        initializer: Callable[..., Any] | None = None,
        seed: Any = 0,
        dtype: Any = None,
    ) -> None:
        """Makes a table, or opens the file of one.

        Args:
          name: of the table.
          shape_or_array: `[V, ...]`, the shape as a tuple, or the first weights of all
            rows, which are copied.
          tx: an optax transformation that is row-separable, bare or inside of
            `sparsejax.optim.lazy`; None for a table that is only read.
          path: of a memory-mapped file that holds weights and state, and stays when the
            process ends. A file that is there is opened, and must be of this shape,
            type, optimizer state and seed.

            Writes go to the file as the system sees fit; `flush` waits for the disk. A
            process killed in the middle of a push leaves of that push any part: some
            rows new and some old, a row's weights new and its state old, the count of
            steps old. Rows of other pushes are whole, and so is the file. If the
            machine itself stops, any of what was written since the last `flush` may be
            lost. `save` has no such window. The file takes room as rows are touched;
            where the disk is full by then, the system ends the process (SIGBUS).
          initializer: `(key, shape, dtype) -> array`, such as those of
            `jax.nn.initializers`, for rows that are touched for the first time. It gets
            a key for each row, made of `seed` and the row's id, and the shape
            `(1, *row)`; so a row starts the same in whatever order rows are touched.
            Left out, rows start as zeros.
          seed: int or PRNG key of the initializer.
          dtype: of the weights, where a shape is given; float32 if left out.

        Raises:
          TypeError, ValueError: an argument is none of these; `tx` is not row-separable
            (the message names the part); a file of another table.
          RuntimeError: the file is in use by another store.
          OSError: less is free on the disk than the whole file may need.
        """
        call = f"{_CALL}.init"
        self._check_open(call)
        if not isinstance(name, str):
            raise TypeError(f"{call}: the name of a table is a string, got {name!r}.")
        if name in self._tables:
            raise ValueError(
                f"{call}: there is a table {name!r} already. Choose another name, or "
                "push to the one that is there."
            )
        table = make_table(
            call, name, shape_or_array, tx, path, initializer, seed, dtype
        )
        self._do(call, lambda: self._tables.update({name: table}))

    # -- pull and push ----------------------------------------------------------------

    def pull(
        self, name: str, ids: Any, *, capacity: int | None = None, mode: str = "error"
    ) -> SelectedRows:
        """The rows that `ids` name, on the device.

        Args:
          name: of the table.
          ids: integers of any type and shape.
          capacity: slots of the result; the next power of two (at most V) if left out,
            so that a jitted step is compiled a few times only. Static: the same number
            for each batch, and it is compiled once.
          mode: what to do with ids out of range: "error", or "drop" for leaving them
            out, such as a padding id of -1.

        Returns:
          SelectedRows of height V: each row once, ids ascending, and then empty slots
          with `rows == V` and zeros.

        Raises:
          KeyError: no such table.
          TypeError: `ids` are not integers.
          ValueError: ids out of range; more rows than `capacity` (the message says how
            many).
        """
        call = f"{_CALL}.pull"
        table = self._table(call, name)

        return self._do(call, lambda: pull(call, table, ids, capacity, mode))

    def row_sparse_pull(self, name: str, row_ids: Any) -> SelectedRows:
        """The rows that `row_ids` name, and no empty slots: MXNet's operation.

        As `pull`, with as many slots as there are distinct rows. That number is part of
        the result's shape: in a loop, a jitted step would be compiled for each.
        """
        call = f"{_CALL}.row_sparse_pull"
        table = self._table(call, name)

        return self._do(call, lambda: pull(call, table, row_ids, EXACT, "error"))

    def push(self, name: str, grads: Any) -> None:
        """Has the optimizer make one step with a gradient.

        Slots with the same row mean their sum, merged as `SelectedRows.coalesce` does;
        rows that are not named keep their weights and state. Between `prefetch`'s
        batches the gradient is put in line and not waited for, so that it may still be
        computed; do not donate it. What goes wrong then is raised by the next call.

        Args:
          name: of the table.
          grads: SelectedRows of the table's shape, or a list of them, which are summed.

        Raises:
          KeyError: no such table.
          TypeError, ValueError: no SelectedRows, or of another shape.
        """
        call = f"{_CALL}.push"
        table = self._table(call, name)
        gradient = whole_gradient(call, table, grads)

        def work():
            began = time.perf_counter()
            forward = lambda rows, new: self._flights.pushed(name, rows, new)
            table.step(np.asarray(gradient.rows), gradient.values, forward)
            table.counts.push_seconds += time.perf_counter() - began

        self._line.later(work)

    def prefetch(
        self,
        batches: Iterable[_prefetch.Batch],
        ids_of: Callable[[_prefetch.Batch], Any],
        *,
        depth: int = 1,
        capacity: int | Mapping[str, int] | None = None,
        mode: str = "error",
    ) -> Generator[tuple[_prefetch.Batch, Any]]:
        """Batches with their rows, pulled while the step before is running.

        Gives bit for bit what pulling each batch's rows as it comes would give: all
        that was pushed before a batch is asked for is in its rows. A thread of the
        store reads the rows that the step under way did not pull, waits for the step's
        gradients, and forwards the rows they change. Between batches `push` returns at
        once; a step may push nothing, once or often, to any table. Other calls wait for
        the pushes before them.

        Args:
          batches: iterable of anything; the next ones are taken from it early.
          ids_of: `batch -> {name: ids}`, or ids alone in a store of one table.
          depth: how many batches are prepared ahead; 0 prepares none.
          capacity: as in `pull`, or one for each table by name.
          mode: as in `pull`.

        Returns:
          An iterator of `(batch, {name: SelectedRows})`, or `(batch, SelectedRows)`
          where `ids_of` gives ids alone. Closing it early ends the thread. Errors of
          `batches` and `ids_of` come when it is the batch's turn.

        Raises:
          KeyError: a capacity for a table that is not there.
          ValueError: depth is negative; at a batch, what `pull` raises.

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
        depth = _arguments.static_int(call, "depth", depth)
        _prefetch.check_ids_of(call, ids_of)
        for name in capacity if isinstance(capacity, Mapping) else ():
            self._table(call, name)  # no other names, which would be ignored

        def only(ids):
            names = self.names()
            if len(names) != 1:
                found = _arguments.kind_of(ids)
                raise TypeError(
                    f"{call}: ids_of must return {{name: ids}}, where a store has not "
                    f"one table. It has {names or 'none'}, and ids_of returned {found}."
                )
            return names[0]

        def part(name, ids):
            slots = capacity.get(name) if isinstance(capacity, Mapping) else capacity
            return make_part(call, self._table(call, name), ids, slots, mode)

        return _prefetch.prefetch(
            self._line,
            self._flights,
            batches,
            ids_of,
            only,
            part,
            depth,
            lambda: self._check_open(call),
        )

    # -- all rows ---------------------------------------------------------------------

    def pull_all(self, name: str, *, progress: Any = False) -> np.ndarray:
        """The weights of all rows, `[V, ...]`, in host memory; nothing is touched.

        Args:
          name: of the table.
          progress: True for a progress bar on stderr, or a function of (rows done, rows
            in all).
        """
        call = f"{_CALL}.pull_all"
        table = self._table(call, name)
        with _arguments.progress_reporter(call, progress) as report:
            return self._do(call, lambda: _all_rows.pull_all(table, report))

    def assign(self, name: str, weights: Any) -> None:
        """Sets weights of rows; the state of the optimizer stays as it is.

        Args:
          name: of the table.
          weights: SelectedRows of the table's shape, each row named once, or an array
            `[V, ...]` of all rows. Cast to the table's type.

        Raises:
          KeyError: no such table.
          TypeError, ValueError: weights of another shape; a row that is named twice.

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
        forward = lambda rows, new: self._flights.pushed(name, rows, new)
        self._do(call, lambda: _all_rows.assign(call, table, weights, forward))

    def save(self, path: str | os.PathLike[str], *, progress: Any = False) -> None:
        """Writes all tables to a file, weights and state.

        The file is written beside `path` and takes its place when it is whole and on
        the disk. Killed at any moment, `path` holds what it held before or all that is
        saved now. Of tables that were not given as arrays only the rows touched are
        written.

        Args:
          path: of the file; its directory is there.
          progress: True for a progress bar on stderr, or a function of (rows done, rows
            in all). Rows of the optimizer's state count as well.

        Raises:
          IsADirectoryError: `path` is one.
          ValueError: `path` is the file of a memory-mapped table, of any store.
          RuntimeError: a table is half loaded, see `load`.
        """
        call = f"{_CALL}.save"
        with _arguments.progress_reporter(call, progress) as report:
            self._do(call, lambda: _saving.save(call, path, self._tables, report))

    def load(self, path: str | os.PathLike[str], *, progress: Any = False) -> None:
        """Reads what `save` wrote into this store's tables.

        A file has no functions in it: call `init` for each table first, with the shape,
        the optimizer and the initializer it was saved with. Its seed comes with the
        file, so that rows not touched yet start as they would have.

        Args:
          path: of the file.
          progress: as in `save`; the rows are counted twice, checked and then read.

        Raises:
          FileNotFoundError: no such file.
          ValueError: no file of a store, one that was cut off or damaged (each part has
            a checksum), or of other tables. Nothing has been changed then.

        The file is read twice, and nothing is changed until all of it is found to be
        whole. Stopped while the rows are read for good, the tables are half loaded:
        pulls, pushes and `save` raise RuntimeError until a `load` is done, and a mapped
        file is refused by `init`.
        """
        call = f"{_CALL}.load"

        def work():
            self._flights.reloaded()
            _saving.load(call, path, self._tables, report)

        with _arguments.progress_reporter(call, progress) as report:
            self._do(call, work)

    # -- the store as a whole ---------------------------------------------------------

    def spec(self, name: str) -> jax.ShapeDtypeStruct:
        """The shape and dtype of a table; waits for nothing.

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
        return jax.ShapeDtypeStruct(table.shape, table.dtype)

    def is_trainable(self, name: str) -> bool:
        """Whether a table was made with an optimizer, so that `push` can update it.

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
        """For each table its size and what was done with it."""
        call = f"{_CALL}.stats"
        tables = self._tables.items()
        return self._do(call, lambda: {name: stats_of(table) for name, table in tables})

    def flush(self) -> None:
        """Waits until memory-mapped tables are on the disk, and all pushes are done."""
        tables = self._tables.values()
        self._do(f"{_CALL}.flush", lambda: [t.memory.flush() for t in tables])
