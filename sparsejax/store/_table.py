"""A table in host memory: weights, optimizer state, and which rows were touched.

Row r of a table lives in row r of several arrays: its weights, and each leaf of the
optimizer's state that follows the table's rows. The other leaves of the state (counts,
hyperparameters) are beside them. All of it starts as zeros that take no memory; a row
gets its first weights and state when it is first read or written, so a table of many
million rows costs what was touched of it.

A row's first weights depend on the table's key and the row's id alone: not on which
other rows were touched before, or together with it.

Nothing here is safe for several threads; `_store` has the lock.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import SelectedRows
from sparsejax.store import _buffers, _layout, _rows_wanted as wanted
from sparsejax.store._optimizer import Optimizer, on_host


CHUNK = 1 << 16  # rows that are worked on at once where all rows are


class Table:
    """One named table.

    Args:
      name: for messages.
      shape: `[V, ...]`.
      dtype: of the weights.
      optimizer: or None, for a table that is only read.
      initializer: `(key, shape, dtype) -> rows` as in `jax.nn.initializers`, called
        with shape `[1, ...]` for each row; None for weights that are there already.
      key: of the initializer, as files keep it.
      given: whether the weights of all rows were given.
      memory: the arrays in the order of `arrays_of`.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: Any,
        optimizer: Optimizer | None,
        initializer: Callable | None,
        key: dict[str, Any],
        given: bool,
        memory: Any,
    ):
        self.name, self.shape, self.dtype = name, shape, np.dtype(dtype)
        self.height = shape[0]
        self.optimizer, self.initializer = optimizer, initializer
        self.key, self.given, self.memory = key, given, memory
        self.weights, self.touched, *state = memory.arrays
        count = sum(optimizer.by_row) if optimizer else 0
        self.by_row, self.rest = state[:count], state[count:]
        self.counts = Counts()
        self.is_loading = self.is_closed = False
        self._is_zero = self._zero_leaves()

    def description(self) -> dict[str, Any]:
        """What files say of it."""
        return _layout.describe(
            self.shape,
            self.dtype,
            self.optimizer,
            self.key,
            given=self.given,
            initialized=self.initializer is not None,
        )

    def check_usable(self) -> None:
        """An error where its rows are not there, or not all of them."""
        if self.is_closed:
            raise ValueError(
                "sparsejax.store: this store is closed, and with it table "
                f"{self.name!r}."
            )
        if self.is_loading:
            raise RuntimeError(
                f"sparsejax.store: table {self.name!r} is half loaded: KVStore.load "
                "was stopped before it was done. Call load again."
            )

    # -- reading ----------------------------------------------------------------------

    def gather(self, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        """The weights of distinct ascending `rows`, into `out[:len(rows)]`."""
        self.touch(rows)
        _take(self.weights, rows, out[: rows.size])
        return out

    def empty(self, count: int, capacity: int) -> np.ndarray:
        """Room for `capacity` rows, of which all after the first `count` are zeros."""
        out = _buffers.empty((capacity, *self.shape[1:]), self.dtype)
        out[count:] = 0
        return out

    def selected(self, rows: np.ndarray, values: np.ndarray) -> SelectedRows:
        """Rows and their values on the device, `height` in empty slots."""
        slots = _buffers.empty((values.shape[0],), rows.dtype)
        slots[: rows.size] = rows
        slots[rows.size :] = self.height
        # On a CPU this takes them as they are: nobody writes to them again.
        slots, values = jax.device_put((slots, values))
        return SelectedRows(slots, values, self.height)

    # -- writing ----------------------------------------------------------------------

    def step(
        self,
        rows: np.ndarray,
        values: Any,
        forward: Callable[[np.ndarray, np.ndarray], None],
    ) -> None:
        """One step of the optimizer for a gradient's slots.

        Args:
          rows, values: of the gradient.
          forward: gets the distinct rows and their new weights, before the table does.
        """
        assert self.optimizer is not None
        distinct, places, capacity = wanted.slots_of(rows, self.height)
        self.touch(distinct)
        columns = [self.weights, *self.by_row]
        gathered = []
        for column in columns:
            part = _buffers.empty((capacity, *column.shape[1:]), column.dtype)
            part[distinct.size :] = 0
            _take(column, distinct, part[: distinct.size])
            gathered.append(part)
        weights, by_row, rest = self.optimizer.update(
            gathered[0], gathered[1:], self.rest, distinct.size, places, values
        )
        forward(distinct, weights[: distinct.size])
        for column, new in zip(columns, [weights, *by_row]):
            put_rows(column, distinct, new[: distinct.size])
        for old, new in zip(self.rest, rest):
            old[...] = new
        self.counts.pushes += 1
        self.counts.pushed_rows += distinct.size

    # -- the first touch --------------------------------------------------------------

    def touch(self, rows: np.ndarray) -> None:
        """Gives those of `rows` that never had any their first weights and state."""
        self.check_usable()
        fresh = rows[np.take(self.touched, rows, mode="clip") == 0]
        if self.initializer is None and all(self._is_zero):
            self.touched[fresh] = 1  # all zeros, or given
            return
        for start in range(0, fresh.size, CHUNK):
            block = fresh[start : start + CHUNK]
            weights = self.first_weights(block)
            if self.initializer is not None:
                put_rows(self.weights, block, weights)
            if self.optimizer is not None:
                padded = _buffers.empty(
                    (wanted.bucket(block.size), *self.shape[1:]), self.dtype
                )
                padded[: block.size] = weights
                padded[block.size :] = 0
                leaves = self.optimizer.init_rows(padded)
                for column, new, is_zero in zip(self.by_row, leaves, self._is_zero):
                    if not is_zero:
                        put_rows(column, block, new[: block.size])
            # Last: a row whose mark is set is whole, also after a crash.
            self.touched[block] = 1

    def first_weights(self, rows: np.ndarray) -> np.ndarray:
        """The weights that rows have before any step."""
        if self.initializer is None:
            return np.take(self.weights, rows, axis=0, mode="clip")
        # Whole buckets, so that no row is computed in the remainder of a loop.
        ids = np.zeros((wanted.bucket(rows.size),), np.uint32)
        ids[: rows.size] = rows
        with on_host():
            key = _layout.decode_key(self.key)
            shape = 1, *self.shape[1:]
            new = _start(self.initializer, shape, self.dtype, key, ids)
        return np.asarray(new)[: rows.size].reshape(-1, *self.shape[1:])

    def _zero_leaves(self) -> list[bool]:
        """Which leaves of the state start as zeros, whatever the weights are."""
        if self.optimizer is None:
            return []
        rng = np.random.default_rng(0)
        shape = (wanted.LEAST_CAPACITY, *self.shape[1:])
        weights = rng.standard_normal(shape).astype(self.dtype)
        return [not x.any() for x in self.optimizer.init_rows(weights)]

    def reset(self, key: dict[str, Any]) -> None:
        """Forgets all rows; what is touched again starts from `key`."""
        forget = self.chunks() if self.given else self._touched_chunks()
        for rows in forget:
            for column in [self.weights, *self.by_row, self.touched]:
                column[rows] = 0
        self.describe_as(key, given=False)

    def describe_as(self, key: dict[str, Any], *, given: bool) -> None:
        """Sets what files say of it, also in its own file."""
        self.key, self.given = key, given
        mark = {"loading": True} if self.is_loading else {}
        self.memory.describe(self.description() | mark)

    def set_loading(self, loading: bool) -> None:
        """Marks it as half loaded, also in its own file, or takes the mark away."""
        self.is_loading = loading
        self.describe_as(self.key, given=self.given)

    def _touched_chunks(self) -> Iterator[np.ndarray]:
        touched = np.flatnonzero(self.touched)
        for start in range(0, touched.size, CHUNK):
            yield touched[start : start + CHUNK]

    def whole(self, rows: np.ndarray, out: np.ndarray) -> None:
        """The weights of a run of rows, without touching those that were not."""
        self.check_usable()
        out[...] = self.weights[rows[0] : rows[-1] + 1]
        if self.initializer is not None:
            fresh = self.touched[rows[0] : rows[-1] + 1] == 0
            if fresh.any():
                out[fresh] = self.first_weights(rows[fresh])

    def close(self) -> None:
        """Lets go of the arrays."""
        self.is_closed = True
        self.weights = self.touched = np.zeros((0,))
        self.by_row, self.rest = [], []
        self.memory.close()

    def chunks(self) -> Iterator[np.ndarray]:
        """All rows' ids, some at a time."""
        for start in range(0, self.height, CHUNK):
            stop = min(start + CHUNK, self.height)
            yield np.arange(start, stop, dtype=_arguments.index_dtype(self.height))


def arrays_of(
    shape: tuple[int, ...], dtype: Any, optimizer: Optimizer | None
) -> list[jax.ShapeDtypeStruct]:
    """Shapes and types: weights, marks of rows touched, state by row, other state."""
    specs = [(shape, dtype), (shape[:1], np.uint8)]
    if optimizer is not None:
        pairs = list(zip(optimizer.specs, optimizer.by_row))
        specs += [(spec.shape, spec.dtype) for spec, mine in pairs if mine]
        specs += [(spec.shape, spec.dtype) for spec, mine in pairs if not mine]
    return [jax.ShapeDtypeStruct(*spec) for spec in specs]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _start(
    initializer: Callable, shape: tuple[int, ...], dtype: Any, key: Any, ids: jax.Array
) -> jax.Array:
    """`initializer` for each row, with a key of its own."""
    row = lambda i: initializer(jax.random.fold_in(key, i), shape, dtype)
    return jax.vmap(row)(ids).astype(dtype)


class Counts:
    """What was done with a table so far."""

    def __init__(self):
        self.pulls = self.pulled_rows = self.pushes = self.pushed_rows = 0
        self.pull_seconds = self.push_seconds = 0.0


def put_rows(column: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
    """`column[rows] = values`, each row as one item: six times as fast."""
    if column.ndim == 1 or not column[:1].nbytes:
        column[rows] = values
        return
    item = np.dtype((np.void, column[:1].nbytes))
    flat = lambda x: x.reshape(-1).view(item)
    flat(column)[rows] = flat(np.ascontiguousarray(values, column.dtype))


def _take(column: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    # Without mode="clip" NumPy fills a buffer first, to leave `out` whole on an error.
    np.take(column, rows, axis=0, out=out, mode="clip")
