"""batched_pull: a store's rows for all devices of a mesh, fetched once.

Several devices often need the same row, so their ids are merged first. Each row is read
from the store once and copied from the host to one device; then the devices all-gather
the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike
from sparsejax._rows import SelectedRows, indexing
from sparsejax.store import KVStore
from sparsejax.store._optimizer import on_host


_CALL = "sparsejax.parallel.batched_pull"


def batched_pull(
    store: KVStore,
    name: str,
    ids: ArrayLike,
    mesh: Mesh,
    *,
    capacity: int | None = None,
    mode: str = "error",
) -> SelectedRows:
    """The rows for all devices' ids, read once from a store, on every device.

    Returns what `store.pull(name, ids)` returns, for a step over a mesh with a sharded
    batch. A row that several devices need is read once and copied to a device once.

    Args:
      store: a `sparsejax.store.KVStore`, in one process. For several processes use
        `sparsejax.parallel.SpreadStore`.
      name: of the table.
      ids: integers of any shape, the ids of all devices: an array, sharded over the
        mesh or not, or a list with one array per device.
      mesh: the mesh whose devices get the rows.
      capacity: slots of the result, as in `KVStore.pull`.
      mode: "raise", "error" or "drop", as in `KVStore.pull`.

    Returns:
      SelectedRows, each row once, ids ascending, replicated. Use it as the table in a
      jitted step over the mesh, and pass the step's gradient to `store.push`.

    Raises:
      TypeError: `store` or `mesh` has the wrong type, or the ids are not integers.
      KeyError: the store has no such table.
      ValueError: ids are out of range, `capacity` is too small, or there are several
        processes.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> store = sj.store.KVStore()
      >>> store.init("words", (1_000_000, 2), optax.sgd(0.5))
      >>> ids = [jnp.array([7, 2]), jnp.array([7, 9])]  # of two devices
      >>> words = sj.parallel.batched_pull(store, "words", ids, mesh, capacity=3)
      >>> words.rows, store.stats()["words"].pulled_rows
      (Array([2, 7, 9], dtype=int32), 3)

    References:
      MXNet Gluon, `Trainer._row_sparse_pull` and `KVStore.row_sparse_pull` with a list
      of row ids, one for each device.
    """
    if not isinstance(store, KVStore):
        raise TypeError(
            f"{_CALL}: store must be a sparsejax.store.KVStore, got "
            f"{_arguments.kind_of(store)}. A sparsejax.parallel.SpreadStore has its "
            "own pull."
        )
    check_mesh(_CALL, mesh)
    if jax.process_count() > 1:
        raise ValueError(
            f"{_CALL}: a KVStore serves one process, but there are "
            f"{jax.process_count()}. Shard the rows over the memory of all processes "
            "with sparsejax.parallel.SpreadStore(mesh)."
        )
    ids = own_ids(_CALL, ids)
    with on_host(required=False):
        pulled = store.pull(name, ids, capacity=capacity, mode=mode)
    rows, values = np.asarray(pulled.rows), np.asarray(pulled.values)
    each = -(-len(rows) // mesh.size)
    part = lambda k: values[k * each : (k + 1) * each]
    found = to_all_devices(mesh, part, each, values, np.arange(len(rows)))
    return SelectedRows(replicate_over(mesh, rows), found, pulled.height)


# ------------------------------------------------------------------ for SpreadStore


def check_mesh(call: str, mesh: Any) -> None:
    """Raises unless `mesh` is a mesh with devices."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{call}: mesh must be a jax.sharding.Mesh, got {_arguments.kind_of(mesh)}."
        )


def own_ids(call: str, ids: Any) -> np.ndarray:
    """This process's ids, flat, on the host."""
    if isinstance(ids, list | tuple) and any(np.ndim(x) for x in ids):
        return np.concatenate([own_ids(call, x) for x in ids])
    if isinstance(ids, jax.Array) and not ids.is_fully_addressable:
        shards = [np.asarray(s.data) for s in ids.addressable_shards]
        ids = np.concatenate([shard.reshape(-1) for shard in shards])
    return np.asarray(_arguments.as_integers(call, ids)).reshape(-1)


def replicate_over(mesh: Mesh, x: np.ndarray) -> jax.Array:
    """`x`, which all processes have, on every device of the mesh."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback(x.shape, whole, lambda index: x[index])


def to_all_devices(
    mesh: Mesh,
    part: Callable[[int], np.ndarray],
    each: int,
    like: np.ndarray,
    slots: np.ndarray,
) -> jax.Array:
    """Copies host rows to one device each, then all-gathers them on every device.

    Args:
      mesh: N devices.
      part: for the number of one of this process's devices in the mesh, the rows that
        are copied to it, at most `each`.
      each: int.
      like: an array of rows, for their shape and dtype.
      slots: `[n]`, the place of each row of the result among the `N * each` rows; out
        of range gives zeros.

    Returns:
      `[n, ...]`, replicated.
    """
    row, dtype = like.shape[1:], like.dtype
    one_axis = _one_axis(mesh)
    shape = (mesh.size * each, *row)

    def padded(index):
        out = np.zeros((each, *row), dtype)
        rows = part((index[0].start or 0) // each)
        out[: len(rows)] = rows
        return out

    sharding = NamedSharding(one_axis, PartitionSpec("all"))
    parts = jax.make_array_from_callback(shape, sharding, padded)
    return _gather(mesh)(parts, replicate_over(one_axis, slots.astype(np.int32)))


def _one_axis(mesh: Mesh) -> Mesh:
    """The same devices in the same order, along one axis."""
    return Mesh(mesh.devices.reshape(-1), ("all",), axis_types=(AxisType.Auto,))


@functools.lru_cache(maxsize=16)
def _gather(mesh: Mesh) -> Callable[..., jax.Array]:
    def body(parts, slots):
        return indexing.take_rows(lax.all_gather(parts, "all", tiled=True), slots)

    specs: Sequence[PartitionSpec] = (PartitionSpec("all"), PartitionSpec())
    mapped = jax.shard_map(
        body,
        mesh=_one_axis(mesh),
        in_specs=tuple(specs),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, PartitionSpec()))
