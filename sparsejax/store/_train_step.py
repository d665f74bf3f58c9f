"""TrainStep: the whole training step of a function of trees with tables of a store."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax._rows import SelectedRows, indexing, is_selected_rows
from sparsejax.optim import global_norm
from sparsejax.store._engine import Request
from sparsejax.store._functions import (
    Program,
    RowIds,
    Rows,
    as_arrays,
    gradient,
    jitted,
    spec_of,
)
from sparsejax.store._in_flight import OtherThread
from sparsejax.store._requested import Capacities, distinct_rows
from sparsejax.store._tree_tables import caches_of, put_tables, tables_of
from sparsejax.transform.trace import check_fun


_CALL = "KVStore.train_step"


class RowsStep:
    """The compiled part of a training step, on pulled rows, and the push.

    `TrainStep` finds the rows that a function reads. A block of `sparsejax.nn` lists
    them, and `Trainer` pulls them: see `ListedTable`.

    Args:
      engine: of the store of the tables.
      fun, tx, has_aux, tables, donate: as in `KVStore.train_step`.
      clip_norm: the largest global norm of all gradients together, or None.
      checked: True to run under `checkify`; a failed check raises before the push.
    """

    def __init__(
        self,
        engine: Any,
        fun: Callable[[Any, Any], Any],
        tx: optax.GradientTransformation,
        *,
        has_aux: bool = False,
        tables: PyTree = False,
        donate: bool = True,
        clip_norm: float | None = None,
        checked: bool = False,
    ):
        self._engine, self._fun, self._tx = engine, fun, tx
        self._has_aux, self._tables, self._clip_norm = has_aux, tables, clip_norm
        self._run = jitted(self._compute, donate, checked)
        self.compilations = 0

    def __call__(
        self, params: PyTree, opt_state: PyTree, batch: Any, rows: Rows
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Returns `(params, opt_state, value, grads)`; `push` the gradients then.

        Args:
          params, opt_state: of the step.
          batch: the batch, from `as_arrays`.
          rows: by table.
        """
        first = as_arrays((params, opt_state))
        params, opt_state, value, of_rows = self._run(rows, first, batch)
        # The ids are known before the program has ended.
        ids = {name: x.rows for name, x in rows.items() if is_selected_rows(x)}
        grads = {name: (ids.get(name), values) for name, values in of_rows.items()}
        return params, opt_state, value, grads

    def push(self, grads: Mapping[str, Any]) -> None:
        """Pushes the gradients of a step, by table; `None` as ids for no rows."""
        for name, (ids, values) in grads.items():
            table = self._engine.table(name)
            if ids is None:
                ids = np.full(len(values), table.spec.owners.height)
            self._engine.push(table, ids, values)

    def _compute(self, rows: Any, first: Any, batch: Any) -> Any:
        self.compilations += 1  # runs once per compilation
        params, opt_state = first
        places, specs = tables_of(params), self._engine.tables
        frozen = [t.name for t in places if specs[t.name].spec.optimizer is None]
        value, grads, of_tables = gradient(
            self._fun,
            0,
            self._has_aux,
            self._tables,
            rows,
            (params, batch),
            {},
            frozen,
        )
        # For `tx`, tables of the store have no gradient, but tables of a cache do.
        remaining, pushed, kept = iter(of_tables), {}, []
        for table in places:
            grad = table if table.name in frozen else next(remaining)
            if is_selected_rows(grad):
                pushed.setdefault(table.name, []).append(grad)
                grad = table
            kept.append(grad)
        # The gradients of a table have the same rows.
        pushed = {name: _sum(parts) for name, parts in pushed.items()}
        grads = put_tables(grads, kept)
        if self._clip_norm is not None:
            pushed, grads = _clip((pushed, grads), self._clip_norm)
        updates, opt_state = self._tx.update(grads, opt_state, params)
        of_rows = {name: grad.values for name, grad in pushed.items()}
        return optax.apply_updates(params, updates), opt_state, value, of_rows


class TrainStep:
    """A training step of parameters with tables of a store, from `store.train_step`.

    `step(params, opt_state, batch)` pulls the rows that the batch reads, runs a
    compiled program, and pushes the gradients of the rows:

      loss, g, h = value_and_grad(fun)(rows, params)        g of the rows, h of params
      params     = params + tx.update(h)                    in the same program
      rows       = one step of the optimizer in the store   for each table

    With `prefetch`, the store reads the rows of the next batch while this one runs. The
    results have the same bits.

    The tables of a `CachedTable` are trained on the device by `tx`, which must be
    `lazy`. Before the program runs, their rows are put into slots.

    - `step(params, opt_state, batch)`: one step.
    - `prefetch(params, batches)`: batches with their rows.
    - `compilations`: the number of times that the step was compiled.

    Args:
      engine: of the store of the tables.
      fun, tx, has_aux, tables, donate: as in `KVStore.train_step`.
      capacities: of the tables.

    Raises:
      TypeError: `fun` is not a function, or `tx` not a transformation.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> store = sj.store.KVStore()
      >>> store.init("items", (1_000_000, 2), optax.sgd(0.5))
      >>> def loss_fn(params, ids):
      ...     return jnp.mean((params["items"][ids] @ params["w"] - 1.0) ** 2)
      >>> params = {"items": store["items"], "w": jnp.ones(2)}
      >>> tx = optax.sgd(0.1)
      >>> step = store.train_step(loss_fn, tx)
      >>> opt_state = tx.init(params)
      >>> batches = [jnp.array([7, 5]), jnp.array([7, 7])] * 3
      >>> for ids, rows in step.prefetch(params, batches):
      ...     params, opt_state, loss = step(params, opt_state, ids, rows)
      >>> bool(loss < 0.01), step.compilations
      (True, 1)

    References:
      MXNet, `gluon.Trainer` with `update_on_kvstore`.
    """

    def __init__(
        self,
        engine: Any,
        fun: Callable[[Any, Any], Any],
        tx: optax.GradientTransformation,
        has_aux: bool,
        capacities: Any,
        tables: PyTree,
        donate: bool,
    ):
        check_fun(fun, 0, has_aux)
        if not callable(getattr(tx, "init", None)):
            raise TypeError(
                f"{_CALL}: tx must be an optax transformation, for example "
                f"optax.adam(1e-3), got {_arguments.kind_of(tx)}."
            )
        donate = _arguments.check_bool("donate", donate)
        self._engine, self._ids = engine, RowIds(engine, fun)
        self._capacities: Capacities = capacities
        self._step = RowsStep(
            engine, fun, tx, has_aux=has_aux, tables=tables, donate=donate
        )

    @property
    def compilations(self) -> int:
        """The number of times that the step was compiled."""
        return self._step.compilations

    def __call__(
        self,
        params: PyTree,
        opt_state: PyTree,
        batch: PyTree,
        rows: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Takes one step on one batch.

        Args:
          params: a tree with tables of the store. Its arrays are donated, unless
            `donate` is False.
          opt_state: `tx.init(params)`, or the state of the last step; donated too.
          batch: a tree. Arrays of other shapes, and leaves that are not arrays and have
            other values, compile the step again.
          rows: the rows of this batch, from `prefetch`.

        Returns:
          `(params, opt_state, loss)`, or `(params, opt_state, (loss, aux))`.

        Raises:
          TypeError: an argument is traced; there is no table among `params`.
          DensifyError: `fun` uses all rows of a table.
          ValueError: the ids of a read depend on rows of a table of the store; the
            batch reads more rows than `capacity`. Nothing has changed.
        """
        arguments = as_arrays((params, batch))
        program, caches = self._ids.program(arguments), caches_of(params)
        if rows is None:
            request = self._request(program, caches, arguments)
            pulled = self._engine.pull(request.ids, request.capacity)
            rows = {**pulled, **request.cached}
        elif not isinstance(rows, Mapping) or rows.keys() != program.counts.keys():
            given = _arguments.kind_of(rows)
            given = list(rows) if isinstance(rows, Mapping) else given
            raise ValueError(
                f"{_CALL}: rows must be the rows of this batch from prefetch, of the "
                f"tables {sorted(program.counts)}, got {given}."
            )
        step_rows: dict[str, Any] = dict(rows)
        for name in caches.keys() & step_rows.keys():
            prepared = caches[name].prepare(step_rows[name], params, opt_state)
            params, opt_state, step_rows[name] = prepared
        params, opt_state, value, grads = self._step(
            params, opt_state, arguments[1], step_rows
        )
        self._step.push(grads)
        return params, opt_state, value

    def prefetch(
        self, params: PyTree, batches: Iterable[Any], *, depth: int = 1
    ) -> Generator[tuple[Any, dict[str, Any]]]:
        """Yields batches with their rows, which are read while the last step runs.

        Args:
          params: the parameters of the first step. Only their structure, shapes and
            dtypes are used.
          batches: an iterable of batches, which are taken from it ahead of time.
          depth: the number of batches prepared ahead; 0 prepares none.

        Returns:
          An iterator of `(batch, rows)` for `step(params, opt_state, batch, rows)`.
          Closing it early ends the thread. Errors of a batch are raised when it is
          requested.

        Raises:
          ValueError: at a batch, ids depend on arrays of `params`, which the running
            step changes.
        """
        depth = _arguments.static_int("depth", depth)
        paths, structure = jax.tree_util.tree_flatten_with_path(as_arrays(params))
        specs = structure.unflatten(spec_of(x) for _, x in paths)
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        caches, thread = caches_of(params), OtherThread()
        del paths, params  # the step donates them

        def request_of(batch):
            arguments = specs, as_arrays(batch)
            program = self._ids.program(arguments)
            for k in program.needed:
                if k < len(names):
                    raise ValueError(
                        f"TrainStep.prefetch: ids depend on params{names[k]}, which "
                        "the running step changes. Call step(params, opt_state, batch) "
                        "without prefetch, or pass that array in the batch."
                    )
            return thread.call(lambda: self._request(program, caches, arguments))

        return self._engine.prefetch(batches, request_of, depth)

    def _request(
        self, program: Program, caches: Mapping[str, Any], arguments: Any
    ) -> Request:
        """Returns the rows that a batch reads, of tables of the store and of caches."""
        ids, cached = program.ids(arguments), {}
        capacity = program.capacity(self._capacities)
        for name in caches.keys() & ids.keys():
            height = self._engine.tables[name].height
            rows = distinct_rows(name, ids.pop(name), height, "drop")
            size = capacity(name, rows.size, height)
            cached[name] = caches[name].batch(rows, size)
        return Request(ids, capacity, cached)


def _sum(parts: Sequence[SelectedRows]) -> SelectedRows:
    """Sums gradients of the same slots."""
    first = parts[0]
    if len(parts) == 1:
        return first
    wide = indexing.accumulator_dtype(first.dtype)
    total = functools.reduce(operator.add, [x.values.astype(wide) for x in parts])
    return first.map(lambda _: total.astype(first.dtype))


def _clip(grads: Any, max_norm: float) -> Any:
    """Scales all gradients by `min(1, max_norm / their global norm)`."""
    norm = global_norm(grads)
    scale = jnp.where(norm > max_norm, max_norm / jnp.maximum(norm, max_norm), 1)
    shrink = lambda v: v * scale.astype(v.dtype)
    return jax.tree.map(
        lambda g: g.map(shrink) if is_selected_rows(g) else shrink(g),
        grads,
        is_leaf=is_selected_rows,
    )
