"""TrainStep: the whole training step of a function of trees with tables of a store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax._rows import SelectedRows, indexing, is_selected_rows
from sparsejax.optim import global_norm
from sparsejax.store._in_flight import OtherThread
from sparsejax.store._leaf import CachedRows, put_tables, tables_of
from sparsejax.store._pulled_calls import (
    Capacities,
    Part,
    Program,
    RowIds,
    Rows,
    gradient,
    jitted,
    spec_of,
    split,
)
from sparsejax.store._requested_rows import distinct_rows
from sparsejax.transform.trace import check_fun


if TYPE_CHECKING:
    from sparsejax.store._store import KVStore

_CALL = "sparsejax.store.KVStore.train_step"


class RowsStep:
    """The compiled part of a training step, on rows that are found, and the push.

    `TrainStep` finds the rows that a function reads. A block of `sparsejax.nn` lists
    them, and `Trainer` pulls them: see `ListedTable`.

    Args:
      call: for messages.
      store: of the tables.
      fun, tx, has_aux, tables, donate: as in `KVStore.train_step`.
      clip_norm: the largest global norm of all gradients together, or None.
      checked: True to run under `checkify`; a failed check raises before the push.
    """

    def __init__(
        self,
        call: str,
        store: Any,
        fun: Callable[[Any, Any], Any],
        tx: optax.GradientTransformation,
        *,
        has_aux: bool = False,
        tables: PyTree = False,
        donate: bool = True,
        clip_norm: float | None = None,
        checked: bool = False,
    ):
        self._call, self._store, self._fun, self._tx = call, store, fun, tx
        self._has_aux, self._tables, self._clip_norm = has_aux, tables, clip_norm
        self._run = jitted(self._compute, donate, checked)
        self.compilations = 0

    def __call__(
        self, params: PyTree, opt_state: PyTree, batch: Part, rows: Rows
    ) -> tuple[Any, Any, Any, Mapping[str, SelectedRows]]:
        """`(params, opt_state, value, grads)`; `push` the gradients then."""
        first = split(self._call, (params, opt_state))
        params, opt_state, value, of_slots = self._run(rows, first, batch)
        # Their ids are known before the program has ended.
        grads = {name: self._gradient(name, x, rows) for name, x in of_slots.items()}
        return params, opt_state, value, grads

    def _gradient(self, name: str, values: jax.Array, rows: Rows) -> SelectedRows:
        """A gradient of the rows that were pulled; of no row if none was."""
        if name in rows:
            return SelectedRows(rows[name].rows, values, rows[name].height)
        height = self._store.spec(name).shape[0]
        return SelectedRows(np.full(len(values), height), values, height)

    def push(self, grads: Mapping[str, Any]) -> None:
        """Pushes the gradients of a step, by table."""
        for name, grad in grads.items():
            self._store.push(name, grad)

    def _compute(self, rows: Any, first: Any, batch: Any) -> Any:
        self.compilations += 1  # runs once per compilation
        params, opt_state = first
        names = {table.name for table in tables_of(params)}
        frozen = [name for name in names if not self._store.is_trainable(name)]
        for table in _caches(params):
            if table.name in frozen:
                raise ValueError(
                    f"{self._call}: table {table.name!r} of a CachedTable was made "
                    "with tx=None, so it has no optimizer. Make it with the one that "
                    f"tx applies to it, or put store[{table.name!r}] into params."
                )
        arguments = rows, (params, batch), {}, frozen
        value, grads, found = gradient(
            self._call, self._fun, 0, self._has_aux, self._tables, *arguments
        )
        # For `tx`, tables of the store have no gradient, but tables of a cache do.
        of_tx, by_table = iter(found), {}
        places = []
        for table in tables_of(params):
            if table.name in frozen:
                places.append(table)
                continue
            name, grad = next(of_tx)
            is_cached = isinstance(table, CachedRows)
            places.append(grad if is_cached else table)
            if not is_cached:
                by_table.setdefault(name, []).append(grad)
        # The gradients of a table have the same rows.
        by_table = {name: _sum(parts) for name, parts in by_table.items()}
        grads = put_tables(grads, places)
        if self._clip_norm is not None:
            by_table, grads = _clip((by_table, grads), self._clip_norm)
        updates, opt_state = self._tx.update(grads, opt_state, params)
        of_slots = {name: grad.values for name, grad in by_table.items()}
        return optax.apply_updates(params, updates), opt_state, value, of_slots


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
      store: the store of the tables.
      fun, tx, has_aux, capacity, tables, donate: as in `KVStore.train_step`.

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
        store: KVStore,
        fun: Callable[[Any, Any], Any],
        tx: optax.GradientTransformation,
        has_aux: bool,
        capacity: int | Mapping[str, int] | None,
        tables: PyTree,
        donate: bool,
    ):
        check_fun(fun, 0, has_aux)
        if not callable(getattr(tx, "init", None)):
            raise _arguments.wrong_type(
                _CALL,
                "tx",
                "an optax transformation, for example optax.adam(1e-3)",
                _arguments.kind_of(tx),
            )
        donate = _arguments.check_bool("donate", donate)
        self._store = store
        self._ids = RowIds(_CALL, store, fun)
        self._capacities = Capacities(capacity)
        self._step = RowsStep(
            _CALL, store, fun, tx, has_aux=has_aux, tables=tables, donate=donate
        )

    @property
    def compilations(self) -> int:
        """The number of times that the step was compiled."""
        return self._step.compilations

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{_CALL}: a step cannot be copied or pickled, because its store has a "
            "thread. Save the tables with store.save(path), and params and opt_state "
            "with any tool."
        )

    def __call__(
        self,
        params: PyTree,
        opt_state: PyTree,
        batch: PyTree,
        rows: Mapping[str, SelectedRows] | None = None,
    ) -> tuple[Any, Any, Any]:
        """One step on one batch.

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
        first, rest = split(_CALL, params), split(_CALL, batch)
        program = self._ids.program(first, rest)
        if rows is None:
            rows = self._rows(program, params, first, rest)
        else:
            _check_rows(program.counts, rows)
        found: dict[str, Any] = dict(rows)
        for table in _caches(params):
            if table.name in found:
                ids = found[table.name]
                params, opt_state, slots = table.cache.prepare(ids, params, opt_state)
                found[table.name] = ids, slots
        params, opt_state, value, grads = self._step(params, opt_state, rest, found)
        self._step.push(grads)
        return params, opt_state, value

    def prefetch(
        self, params: PyTree, batches: Iterable[Any], *, depth: int = 1
    ) -> Generator[tuple[Any, dict[str, SelectedRows]]]:
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
        part = split(_CALL, params)
        paths = [
            jax.tree_util.keystr(path)
            for path, x in jax.tree_util.tree_leaves_with_path(params)
            if _arguments.is_array(x)
        ]
        first = Part([spec_of(x) for x in part.arrays], part.static)
        caches = {table.name: table.cache for table in _caches(params)}
        del part, params  # the step donates them

        def with_ids(batches):
            with OtherThread() as thread:
                for batch in batches:
                    rest = split(_CALL, batch)
                    program = self._ids.program(first, rest)
                    for k in program.needed:
                        if k < len(first.arrays):
                            raise ValueError(
                                f"{_CALL}.prefetch: ids depend on params{paths[k]}, "
                                "which the running step changes. Call step(params, "
                                "opt_state, batch) without prefetch, or pass that "
                                "array in the batch."
                            )
                    find = functools.partial(
                        self._split_ids, program, caches, first, rest
                    )
                    yield _Ahead(batch, *thread.call(find))

        found = with_ids(batches)
        for name, cache in caches.items():
            of_cache = lambda ahead, name=name: ahead.cached.get(name, _NO_ROWS)
            found = cache.prefetch(found, of_cache, depth=depth)
        pulled = self._store._prefetch(
            _CALL, found, lambda ahead: ahead.ids, depth, lambda ahead: ahead.slots
        )
        return _with_cached(pulled)

    # -- private ----------------------------------------------------------------------

    def _rows(
        self, program: Program, params: Any, first: Part, rest: Part
    ) -> dict[str, Any]:
        """The rows of a batch: pulled, or of a cache their ids."""
        caches = {table.name: table.cache for table in _caches(params)}
        ids, cached, slots = self._split_ids(program, caches, first, rest)
        return {**self._store._pull_tables(_CALL, ids, slots), **cached}

    def _split_ids(
        self, program: Program, caches: Mapping[str, Any], first: Part, rest: Part
    ) -> tuple[dict[str, Any], dict[str, np.ndarray], Callable[..., int]]:
        """The ids of a batch to be pulled, the rows for caches, and the capacities."""
        ids = self._ids.of(program, first, rest)
        slots = self._capacities.slots(_CALL, program)
        cached = {}
        for name in caches.keys() & ids.keys():
            height = self._store.spec(name).shape[0]
            rows = distinct_rows(_CALL, name, ids.pop(name), height, "drop")
            padded = np.full(slots(name, rows.size, height), height, rows.dtype)
            padded[: rows.size] = rows
            cached[name] = padded
        return ids, cached, slots


def _check_rows(counts: Mapping[str, int], rows: Any) -> None:
    """Raises unless `rows` are rows of the tables that the batch reads."""
    wanted = set(counts)
    found = set(rows) if isinstance(rows, Mapping) else None
    if found != wanted:
        raise _arguments.wrong(
            _CALL,
            "rows",
            f"the rows of this batch from prefetch, of tables {sorted(wanted)}",
            _arguments.kind_of(rows) if found is None else f"{sorted(found)}",
        )


class _Ahead(NamedTuple):
    """A batch ahead: its ids to pull, its rows for caches, and its capacities."""

    batch: Any
    ids: dict[str, Any]
    cached: dict[str, np.ndarray]
    slots: Callable[..., int]


_NO_ROWS = np.zeros((0,), np.int32)


def _with_cached(pulled: Generator[Any]) -> Generator[tuple[Any, dict[str, Any]]]:
    """The batches with all their rows."""
    for ahead, rows in pulled:
        yield ahead.batch, {**rows, **ahead.cached}


def _caches(params: Any) -> list[CachedRows]:
    """The tables of caches among the parameters."""
    return [table for table in tables_of(params) if isinstance(table, CachedRows)]


def _sum(parts: Sequence[SelectedRows]) -> SelectedRows:
    """The sum of gradients of the same slots."""
    first, *others = parts
    if not others:
        return first
    wide = indexing.accumulator_dtype(first.dtype)
    total = first.values.astype(wide)
    for other in others:
        total += other.values.astype(wide)
    return SelectedRows(first.rows, total.astype(first.dtype), first.height)


def _clip(grads: Any, max_norm: float) -> Any:
    """All gradients times `min(1, max_norm / their global norm)`."""
    norm = global_norm(grads)
    scale = jnp.where(norm > max_norm, max_norm / jnp.maximum(norm, max_norm), 1)
    shrink = lambda v: v * scale.astype(v.dtype)
    return jax.tree.map(
        lambda g: g.map(shrink) if is_selected_rows(g) else shrink(g),
        grads,
        is_leaf=is_selected_rows,
    )
