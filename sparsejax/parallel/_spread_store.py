"""SpreadStore: tables whose rows are sharded over the memory of all processes.

With P processes (hosts), process p holds the rows with `id mod P == p` and their
optimizer state in a `KVStore` of its own, as its row `id // P`. A pull takes three
collectives of JAX and one local read:

    ids     each process gets the ids of all processes            process_allgather
    rows    each process reads those of its own rows, once each   KVStore
    values  to one device of the host, then to all devices        all_gather

After a step the gradient is on every device, so a push sends nothing: each process
selects the rows that it holds. All processes must make the same calls in the same
order, as with any collective.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, KeyLike
from sparsejax._rows import SelectedRows
from sparsejax.parallel._batched_pull import (
    check_mesh,
    own_ids,
    replicate_over,
    to_all_devices,
)
from sparsejax.store import KVStore, _requested_rows as requested
from sparsejax.store._optimizer import on_host


_CALL = "sparsejax.parallel.SpreadStore"


class SpreadStore:
    """A `sparsejax.store.KVStore` whose rows are sharded over several processes.

    Every process creates one with the same mesh, and all of them call `init`, `pull`
    and `push` together. In a single process it is a KVStore that serves several
    devices.

    Args:
      mesh: the mesh whose devices get the rows; it must contain devices of every
        process.

    Raises:
      TypeError: `mesh` is not a mesh.
      ValueError: a process has no device in the mesh.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> store = sj.parallel.SpreadStore(mesh)
      >>> store.init("words", (1_000_000, 2), optax.sgd(0.5))
      >>> words = store.pull("words", jnp.array([7, 2, 7]))
      >>> store.push("words", words.map(jnp.ones_like))
      >>> store.pull("words", [7], capacity=1).values
      Array([[-0.5, -0.5]], dtype=float32)

    References:
      Li et al., 2014, "Scaling Distributed Machine Learning with the Parameter Server";
      MXNet, distributed `KVStore` with `row_sparse` values.
    """

    def __init__(self, mesh: Mesh):
        check_mesh(_CALL, mesh)
        self._mesh = mesh
        self._count, self._process = jax.process_count(), jax.process_index()
        owners = [device.process_index for device in mesh.devices.flat]
        self._devices = [
            np.flatnonzero(np.array(owners) == p) for p in range(self._count)
        ]
        for process, devices in enumerate(self._devices):
            if not devices.size:
                raise ValueError(
                    f"{_CALL}: mesh must contain a device of every process, got none "
                    f"of process {process}. Each process sends its rows through one "
                    "of its devices."
                )
        self._store = KVStore()
        self._heights: dict[str, int] = {}

    @property
    def local(self) -> KVStore:
        """This process's KVStore, whose row `id // P` is row `id` of the whole table.

        Use it for `stats`, `flush` and `close`, and for `save` and `load` with one file
        per process.
        """
        return self._store

    def init(
        self,
        name: str,
        shape_or_array: ArrayLike,
        tx: optax.GradientTransformation | None,
        *,
        path: str | os.PathLike[str] | None = None,
        key: KeyLike = 0,
        **options: Any,
    ) -> None:
        """Creates a table; this process holds its own rows of it.

        Args:
          name, shape_or_array, tx: as in `KVStore.init`, for the whole table.
          path: of a memory-mapped file; with several processes, `.0-of-2`, `.1-of-2`
            and so on are appended.
          key: as in `KVStore.init`; with several processes, each folds in its index.
          **options: `initializer` and `dtype`, as in `KVStore.init`.

        Raises:
          ValueError: there are `keys` among the options; and as `KVStore.init`.
        """
        if options.get("keys") is not None:
            raise ValueError(
                f"{_CALL}.init: table {name!r} cannot have keys, since its rows are "
                "sharded over processes by id. Pull ids that a sparsejax.HashIndex or "
                "a sparsejax.data.Vocabulary gives to keys, or keep the table in a "
                "sparsejax.store.KVStore."
            )
        given: Any = shape_or_array
        is_shape = isinstance(given, (tuple, list))
        shape = given if is_shape else np.shape(given)
        known = shape and isinstance(shape[0], (int, np.integer))
        height, process, count = int(shape[0]) if known else 0, *self._place()
        own = len(range(process, height, count))
        part = given  # passed on if wrong: KVStore.init raises
        if known:
            part = (own, *shape[1:]) if is_shape else given[process::count]
        if count > 1:
            key = jax.random.key(key) if isinstance(key, int) else key
            key = jax.random.fold_in(key, process)
            if path is not None:
                path = f"{os.fspath(path)}.{process}-of-{count}"
        self._store.init(name, part, tx, path=path, key=key, **options)
        self._heights[name] = height

    def pull(
        self,
        name: str,
        ids: ArrayLike,
        *,
        capacity: int | None = None,
        mode: str = "error",
    ) -> SelectedRows:
        """The rows for the ids of all processes, on every device of the mesh.

        Args:
          name: of the table.
          ids: integers of any shape, the ids of this process's devices: an array, a
            global array sharded over the mesh, or a list with one array per device.
          capacity: slots of the result; None takes the next power of two.
          mode: "raise", "error" or "drop", as in `KVStore.pull`.

        Returns:
          SelectedRows of the whole table's height, replicated: each row once, ids
          ascending, then empty slots with zeros.

        Raises:
          KeyError: there is no such table.
          TypeError: `ids` are not integers.
          ValueError: ids of any process are out of range, or there are more distinct
            rows than `capacity`; raised in every process.
        """
        call = f"{_CALL}.pull"
        height = self._height(call, name)
        # All processes merge the same ids, so that all raise the same error.
        kind = np.dtype(_arguments.index_dtype(height))
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
        ids = np.clip(own_ids(call, ids).astype(np.int64), low, high)
        ids = self._of_all(np.unique(ids).astype(kind))
        rows = requested.distinct_rows(call, name, ids, height, mode)
        slots = requested.capacity_for(call, name, rows.size, height, capacity)

        process, count = self._place()
        owner = rows % count
        with on_host(required=False):
            own = rows[owner == process] // count
            values = np.asarray(self._store.row_sparse_pull(name, own).values)
        # A power of two, so that the all-gather is compiled for only a few sizes.
        shares = [np.sum(owner == p) / len(self._devices[p]) for p in range(count)]
        each = requested.bucket(int(np.ceil(max(shares))))
        where = np.full(slots, self._mesh.size * each)
        for p in range(count):
            which = np.flatnonzero(owner == p)
            number, offset = np.divmod(np.arange(which.size), each)
            where[which] = self._devices[p][number] * each + offset

        def part(device):
            first = int(np.searchsorted(self._devices[process], device)) * each
            return values[first : first + each]

        found = to_all_devices(self._mesh, part, each, values, where)
        out = np.full(slots, height, rows.dtype)
        out[: rows.size] = rows
        return SelectedRows(replicate_over(self._mesh, out), found, height)

    def push(self, name: str, grads: SelectedRows) -> None:
        """Runs one optimizer step with a gradient; each process updates its own rows.

        Args:
          name: of the table.
          grads: SelectedRows of the whole table's height, for example the gradient of
            what `pull` returned; the same in every process.

        Raises:
          KeyError: there is no such table.
          TypeError: `grads` is not a SelectedRows.
          ValueError: `grads` has another height or shape.
        """
        call = f"{_CALL}.push"
        height = self._height(call, name)
        if not isinstance(grads, SelectedRows):
            raise TypeError(
                f"{call}: grads must be a SelectedRows, got "
                f"{_arguments.kind_of(grads)}. Use sparsejax.value_and_grad to "
                "differentiate with respect to what pull returned."
            )
        if grads.row_shape != (height,):
            found = " x ".join(map(str, grads.row_shape))
            raise ValueError(
                f"{call}: grads must have height {height}, the number of rows of "
                f"{name!r}, got {found}."
            )
        process, count = self._place()
        rows, values = (self._whole(x) for x in (grads.rows, grads.values))
        requested.check_rows(call, name, rows, height)
        own = (rows >= 0) & (rows < height) & (rows % count == process)
        part = len(range(process, height, count))
        with on_host(required=False):
            rows = np.where(own, rows // count, part).astype(rows.dtype)
            # Processes without any of these rows also push, so that step counts agree.
            self._store.push(name, SelectedRows(rows, values, part))

    # -- inside ------------------------------------------------------------------

    def _place(self) -> tuple[int, int]:
        return self._process, self._count

    def _height(self, call: str, name: str) -> int:
        if name not in self._heights:
            raise KeyError(f"{call}: there is no table {name!r}. Call init first.")
        return self._heights[name]

    def _of_all(self, ids: np.ndarray) -> np.ndarray:
        """The ids of all processes."""
        if self._count == 1:
            return ids
        sizes = multihost_utils.process_allgather(np.array(ids.size))
        padded = np.zeros(requested.bucket(int(np.max(sizes))), ids.dtype)
        padded[: ids.size] = ids
        found = np.asarray(multihost_utils.process_allgather(padded))
        return np.concatenate([x[:n] for x, n in zip(found, sizes)])

    def _whole(self, x: Any) -> np.ndarray:
        """A whole array on this host, also if it is sharded over processes."""
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            if not x.is_fully_replicated:
                whole = NamedSharding(self._mesh, PartitionSpec())
                x = jax.jit(lambda x: x, out_shardings=whole)(x)
            x = x.addressable_data(0)
        return np.asarray(x)
