"""A table in host memory: weights, optimizer state, and which rows were touched.

Row r of a table is row r of several arrays: its weights, and each leaf of the optimizer
state that has one row for each row of the table. The other leaves of the state (counts,
hyperparameters) are kept in `rest`. All arrays start as zeros that take no memory. A
row gets its first weights and state when it is first read or written, so a table of
many million rows takes memory only for the rows that were touched.

The first weights of a row depend on the table's key and the row's id alone, not on
which other rows were touched before or together with it.

Nothing here is thread-safe: the work on a table runs in its queue, one call at a time.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from sparsejax import _arguments
from sparsejax._files import CHUNK
from sparsejax._index.policy import KeyPolicy
from sparsejax.store import _records
from sparsejax.store._history import History, RowVersions
from sparsejax.store._in_flight import EarlyRows
from sparsejax.store._keys import TableKeys, specs_of_keys
from sparsejax.store._mesh import Owners
from sparsejax.store._optimizer import Optimizer, on_host
from sparsejax.store._requested import MIN_CAPACITY, bucket, is_among, places_of


class TableStats(NamedTuple):
    """The size and usage statistics of a table, from `KVStore.stats()`.

    If several processes share the table, the numbers are of this process and its rows.

    Args:
      rows: the number of rows of the table.
      touched_rows: the number of rows that were ever pulled or pushed, and have state.
      bytes: the size of all rows and their state. Unless the table was made from an
        array, only touched rows take memory or disk space.
      path: of the memory-mapped file, or None.
      pulls, pulled_rows, pull_seconds: the number of pulls, the number of distinct rows
        in all of them, and the time that the store worked on them.
      pushes, pushed_rows, push_seconds: the same for pushes.
      keys: the number of keys that have a row; None for a table without keys.
      evicted_keys, refused_keys, waiting_keys: the number of keys that lost their row,
        found no free row, and were not admitted yet, in all calls of `KVStore.insert`
        of this process. In each call, each key counts once.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> store = sj.store.KVStore()
      >>> store.init("words", (1000, 8), sj.optim.adagrad(0.1))
      >>> words = store.pull("words", jnp.array([7, 2, 7]))
      >>> stats = store.stats()["words"]
      >>> stats.touched_rows, stats.pulled_rows, stats.bytes
      (2, 2, 65004)
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
    keys: int | None = None
    evicted_keys: int = 0
    refused_keys: int = 0
    waiting_keys: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class TableSpec:
    """A table before it has rows.

    Args:
      name: of the table.
      shape: `[V, ...]`, of the rows that this process owns.
      dtype: of the weights.
      optimizer: or None, for a table that is only read.
      initializer: `(key, shape, dtype) -> rows` as in `jax.nn.initializers`, called
        with shape `[1, ...]` for each row; None for zeros or weights that were given.
      key: of the initializer, encoded by `_records.encode_key`.
      given: True if the weights of all rows were given.
      owners: which ids the rows have, if several processes share a larger table.
      policy: of its keys, or None for a table without keys.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    optimizer: Optimizer | None
    initializer: Callable | None
    key: dict[str, Any]
    given: bool
    owners: Owners
    policy: KeyPolicy | None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the table of all processes."""
        return (self.owners.height, *self.shape[1:])

    @functools.cached_property
    def first(self) -> list[float]:
        """The first values of row 0 when it starts; none without an initializer.

        By them a file whose rows had another initializer is found.
        """
        made = np.asarray(self.first_weights(np.zeros((1,), np.uint32)))
        return np.real(made).reshape(-1)[:8].astype(np.float64).tolist()

    def first_weights(self, ids: np.ndarray) -> np.ndarray:
        """Returns the weights with which rows start; none without an initializer."""
        if self.initializer is None:
            return np.zeros((0, *self.shape[1:]), self.dtype)
        # The programs run on full buckets: XLA compiles the remainder of a vectorized
        # loop differently, and a row must not depend on how many are touched with it.
        padded = np.zeros((bucket(ids.size),), np.uint32)
        padded[: ids.size] = ids
        with on_host():
            key = _records.decode_key(self.key)
            shape = 1, *self.shape[1:]
            new = _first_rows(self.initializer, shape, self.dtype, key, padded)
        return np.asarray(new)[: ids.size].reshape(-1, *self.shape[1:])

    def arrays(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the arrays: weights, touched, state by row, other state, keys."""
        specs = [(self.shape, self.dtype), (self.shape[:1], np.uint8)]
        leaves = [] if self.optimizer is None else self.optimizer.leaves
        for by_row in (True, False):
            specs += [(x.shape, x.dtype) for x in leaves if x.by_row == by_row]
        keys = [] if self.policy is None else specs_of_keys(self.shape[0])
        return [*(jax.ShapeDtypeStruct(*spec) for spec in specs), *keys]

    def describe(self) -> dict[str, Any]:
        """Describes the table at the start of its files, ready for JSON."""
        leaves = [] if self.optimizer is None else self.optimizer.leaves
        return {
            "shape": list(self.shape),
            "dtype": self.dtype.name,
            "state": [
                x._asdict() | {"shape": list(x.shape), "dtype": x.dtype.name}
                for x in leaves
            ],
            "given": self.given,
            "first": self.first,
            "key": self.key,
            "keyed": self.policy is not None,
        }


class Table:
    """One named table.

    Args:
      spec: of the table.
      memory: `Memory` or `MappedFile`, with the arrays of `spec.arrays()`.
      history: the versions of its store.
    """

    def __init__(self, spec: TableSpec, memory: Any, history: History):
        self.spec, self.memory, self.history = spec, memory, history
        self.height = spec.shape[0]
        self.forget_changes()
        self.in_flight: list[EarlyRows] = []
        self.weights, self.touched, *state = memory.arrays
        self.keys = None
        if spec.policy is not None:
            count = len(specs_of_keys(self.height))
            self.keys = TableKeys(spec.policy, state[-count:])
            state = state[:-count]
        count = 0 if spec.optimizer is None else sum(spec.optimizer.by_row)
        self.by_row, self.rest = state[:count], state[count:]
        self.is_loading = False
        self.journal: str | None = None  # id of the journal that rolls its file back
        self.cache: Any = None  # the cache of its rows on the device
        self.flushed_step: int | None = None  # the step of the last flush of the cache
        self.counters = {"pulls": 0, "pulled_rows": 0, "pull_seconds": 0.0}
        self.counters |= {"pushes": 0, "pushed_rows": 0, "push_seconds": 0.0}
        # For each leaf of state: True if it starts as zeros for any weights.
        self._is_zero = []
        if spec.optimizer is not None:
            rng = np.random.default_rng(0)
            weights = rng.standard_normal((MIN_CAPACITY, *spec.shape[1:]))
            leaves, _ = spec.optimizer.init(weights.astype(spec.dtype))
            self._is_zero = [not x.any() for x in leaves]

    def stats(self) -> TableStats:
        """Returns the current size and usage statistics of the table."""
        keys: dict[str, Any] = {}
        if self.keys is not None:
            keys = {
                "keys": len(self.keys),
                "evicted_keys": self.keys.evicted,
                "refused_keys": self.keys.refused,
                "waiting_keys": self.keys.waiting,
            }
        return TableStats(
            rows=self.height,
            touched_rows=int(np.count_nonzero(self.touched)),
            bytes=sum(x.nbytes for x in self.memory.arrays),
            path=self.memory.path,
            **self.counters,
            **keys,
        )

    def description(self) -> dict[str, Any]:
        """Returns the description of the table that its files begin with."""
        step = {} if self.flushed_step is None else {"step": self.flushed_step}
        return step | self.spec.describe()

    def check_usable(self) -> None:
        """Raises a RuntimeError if the table is half loaded."""
        if self.is_loading:
            raise RuntimeError(
                f"Table {self.spec.name!r} is half loaded: KVStore.load or "
                "apply_changes stopped before the end. Call load again."
            )

    def check_not_cached(self) -> None:
        """Raises a RuntimeError if a CachedTable is over the table."""
        if self.cache is not None:
            raise RuntimeError(
                f"Table {self.spec.name!r} has rows in a CachedTable on the device, "
                "which would not see this change. First call close() of the "
                "CachedTable."
            )

    def check_written_back(self) -> None:
        """Raises a RuntimeError if rows were trained that only the device has."""
        if self.cache is not None and not self.cache.is_flushed:
            raise RuntimeError(
                f"Table {self.spec.name!r} has rows in a CachedTable that were trained "
                "on the device since its last flush. First call flush(params, "
                "opt_state) of the CachedTable."
            )

    # -- reading ----------------------------------------------------------------------

    def read_early(
        self, rows: np.ndarray, capacity: int, *, with_state: bool
    ) -> EarlyRows:
        """Reads distinct ascending rows for a batch, which is in flight from now on."""
        self.touch(rows)
        columns = self.columns if with_state else [self.weights]
        early = EarlyRows(columns, rows, capacity)
        self.in_flight.append(early)
        return early

    def hand_out(self, early: EarlyRows) -> None:
        """Reads the stale rows of a batch again, which is not in flight any more."""
        self.drop(early)
        if early.is_stale.any():
            self.touch(early.rows)  # a row may have been cleared
            early.read_stale()

    def drop(self, early: EarlyRows) -> None:
        """Ends the flight of a batch; its rows are not marked any more."""
        if early in self.in_flight:
            self.in_flight.remove(early)

    def _mark_stale(self, written: np.ndarray) -> None:
        """Marks distinct ascending rows in the batches in flight."""
        for early in list(self.in_flight):  # a step drops some on another thread
            early.is_stale |= is_among(early.rows, written)

    def peek(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copies weights of consecutive `rows` into `out`, without touching them."""
        self.check_usable()
        out[...] = self.weights[rows[0] : rows[-1] + 1]
        if self.spec.initializer is not None:
            fresh = self.touched[rows[0] : rows[-1] + 1] == 0
            if fresh.any():
                out[fresh] = self.first_weights(rows[fresh])

    def chunks(self) -> Iterator[np.ndarray]:
        """Yields the ids of all rows, some at a time."""
        for start in range(0, self.height, CHUNK):
            stop = min(start + CHUNK, self.height)
            yield np.arange(start, stop, dtype=_arguments.index_dtype(self.height))

    # -- weights and state ------------------------------------------------------------

    @property
    def columns(self) -> list[np.ndarray]:
        """The weights, and the leaves of state that have rows."""
        return [self.weights, *self.by_row]

    def write(self, rows: np.ndarray, columns: Sequence[np.ndarray]) -> None:
        """Replaces distinct ascending rows: their weights, or weights and state."""
        self.changed_at.mark(rows, self.history.advance())
        for column, new in zip(self.columns, columns):
            put_rows(column, rows, new)
        self._mark_stale(rows)

    # -- writing ----------------------------------------------------------------------

    def step(self, rows: np.ndarray, values: Any) -> None:
        """Takes one step of the optimizer.

        Args:
          rows, values: of the gradient.
        """
        assert self.spec.optimizer is not None
        distinct, positions, capacity = places_of(rows, self.height)
        self.touch(distinct)
        weights, *by_row = EarlyRows(self.columns, distinct, capacity).buffers
        weights, by_row, other_state = self.spec.optimizer.update(
            weights, by_row, self.rest, distinct.size, positions, values
        )
        self.write(distinct, [x[: distinct.size] for x in (weights, *by_row)])
        for old, new in zip(self.rest, other_state):
            old[...] = new
        self.counters["pushes"] += 1
        self.counters["pushed_rows"] += distinct.size

    # -- keys -------------------------------------------------------------------------

    def insert(
        self,
        keys: np.ndarray,
        step: int,
        where: np.ndarray | None,
        held_steps: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Implements `KVStore.insert`: returns each key's row, and the evicted rows.

        The arguments are described at `TableKeys.insert`.
        """
        assert self.keys is not None

        def check(evicted):
            if evicted.size and self.cache is not None:
                raise RuntimeError(
                    f"Table {self.spec.name!r} is full (new keys without a row: "
                    f"{evicted.size}), and a row that is in a CachedTable cannot "
                    "change hands. First call flush(params, opt_state) and close() of "
                    "the CachedTable, and make another one after insert; or refuse "
                    "such keys, KeyPolicy(max_evictions=0)."
                )

        # A row without a key may have weights: of a key that was removed before a kill,
        # or of a row that was used by its id.
        clear = lambda rows: self.clear(rows[self.touched[rows] != 0])
        with self.history.one_change():
            used, evicted = self.keys.insert(
                keys, step, where, held_steps, check, clear
            )
            self.changed_at.mark(used, self.history.version)
        rows = self.keys.find(keys)
        if where is not None:
            rows[~where] = self.height
        return rows, evicted.astype(rows.dtype)

    # -- the first touch --------------------------------------------------------------

    def touch(self, rows: np.ndarray) -> None:
        """Gives the untouched rows among `rows` their initial weights and state."""
        self.check_usable()
        fresh = rows[np.take(self.touched, rows, mode="clip") == 0]
        if self.spec.initializer is None and all(self._is_zero):
            self.touched[fresh] = 1  # weights and state are zeros, or were given
            return
        for start in range(0, fresh.size, CHUNK):
            block = fresh[start : start + CHUNK]
            weights = self.first_weights(block)
            if self.spec.initializer is not None:
                put_rows(self.weights, block, weights)
            if self.spec.optimizer is not None:
                shape = bucket(block.size), *self.spec.shape[1:]
                padded = np.empty(shape, self.spec.dtype)
                padded[: block.size] = weights
                padded[block.size :] = 0
                leaves, _ = self.spec.optimizer.init(padded)
                for column, new, is_zero in zip(self.by_row, leaves, self._is_zero):
                    if not is_zero:
                        put_rows(column, block, new[: block.size])
            # Last: a row that is marked is whole, even after a crash.
            self.touched[block] = 1

    def first_weights(self, rows: np.ndarray) -> np.ndarray:
        """Returns the weights of untouched rows."""
        if self.spec.initializer is None:
            return np.take(self.weights, rows, axis=0, mode="clip")
        return self.spec.first_weights(self.spec.owners.ids(rows))

    def clear(self, rows: np.ndarray) -> None:
        """Makes `rows` untouched again: fresh weights and state when next touched."""
        self.changed_at.mark(rows, self.history.advance())
        for column in self.columns:
            column[rows] = 0
        self.touched[rows] = 0  # last: an untouched row is all zeros
        self._mark_stale(rows)

    def mark_changed(self, rows: np.ndarray) -> None:
        """Marks distinct rows as changed in this version of the store."""
        self.changed_at.mark(rows, self.history.version)
        self._mark_stale(rows)

    def forget_changes(self) -> None:
        """Makes the array of the version at which each row last changed."""
        self.changed_at = RowVersions(self.height)

    def ids_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns ids of this process's rows, in the dtype of `SelectedRows.rows`."""
        owners = self.spec.owners
        return owners.ids(rows).astype(_arguments.index_dtype(owners.height))

    def write_header(self) -> None:
        """Writes the description and the marks of the table to its mapped file."""
        marks: dict[str, Any] = {"loading": True} if self.is_loading else {}
        if self.journal is not None:
            marks["journal"] = self.journal
        self.memory.describe(self.description() | marks)

    def close(self) -> None:
        """Releases the arrays."""
        if self.cache is not None:
            self.cache.release()
        self.weights = self.touched = np.zeros((0,))
        self.changed_at = RowVersions(0)
        self.by_row, self.rest, self.keys = [], [], None
        self.memory.close()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _first_rows(
    initializer: Callable, shape: tuple[int, ...], dtype: Any, key: Any, ids: jax.Array
) -> jax.Array:
    """Calls `initializer` for each row, with a key made from the row's id."""
    row = lambda i: initializer(jax.random.fold_in(key, i), shape, dtype)
    return jax.vmap(row)(ids).astype(dtype)


def put_rows(column: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
    """Sets `column[rows] = values`.

    Each row is written as one item of type void: 65,536 rows of 32 float32 take 1.5 ms
    so, and 7.6 to 12 ms with NumPy's assignment of rows (2026-11).
    """
    if column.ndim == 1 or not column[:1].nbytes:
        column[rows] = values
        return
    item = np.dtype((np.void, column[:1].nbytes))
    flat = lambda x: x.reshape(-1).view(item)
    flat(column)[rows] = flat(np.ascontiguousarray(values, column.dtype))
