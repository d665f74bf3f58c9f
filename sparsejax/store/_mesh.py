"""A store for the devices of a mesh, in one process or in several.

Several devices often need the same row, so their ids are merged first. Each row is read
from the store once and copied from the host to one device; then the devices all-gather
the rows.

With P processes (hosts), each row of a table and its optimizer state belong to one of
them, by a hash of the id. A pull of any number of tables takes these steps:

    sizes   how many ids each process has, of each table          process_allgather
    ids     each process gets the ids of all processes            process_allgather
    rows    each process reads its own rows, once each            Table
    values  to one device of the host, then to all devices        all_gather, by table

After a step the gradient is on every device, so a push sends nothing: each process
selects its own rows. All processes must make the same calls in the same order, as with
any collective, so collectives run on the calling thread, never in the store's queue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sparsejax import _arguments
from sparsejax._files import CHUNK
from sparsejax._hashing import mix
from sparsejax._rows import SelectedRows, indexing
from sparsejax.store._requested import bucket, check_not_traced, sorted_unique


class Owners:
    """The process that owns each row of a table, and the place of the row there.

    Ids are taken in groups of P. In each group every process owns one id, in an order
    that a hash of the group rotates, so that ids with a stride do not all belong to
    one process. The id of group `g` is row `g` of its owner:

      owner(i) = (i + hash(i // P)) mod P      row(i) = i // P

    Args:
      height: rows of the whole table.
      process, count: the index of this process, and P.
    """

    def __init__(self, height: int, process: int = 0, count: int = 1):
        self.height, self.process, self.count = height, process, count
        groups = -(-height // count)
        last = np.array([groups - 1])
        is_cut = groups > 0 and int(self.ids(last)[0]) >= height
        self.own_height = groups - is_cut

    def find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds the owner of each id, and its row there."""
        if self.count == 1:
            return np.zeros_like(ids), ids
        groups, place = np.divmod(ids, self.count)
        return (place + self._rotation(groups)) % self.count, groups

    def localize(self, ids: np.ndarray) -> np.ndarray:
        """Maps the ids of this process to its rows; `own_height` for all other ids.

        If the ids are ascending, so are the rows.
        """
        if self.count == 1:
            return ids
        owner, rows = self.find(ids)
        is_own = (owner == self.process) & (ids >= 0) & (ids < self.height)
        return np.where(is_own, rows, self.own_height).astype(ids.dtype)

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Returns the ids of rows of this process."""
        if self.count == 1:
            return rows
        place = (self.process - self._rotation(rows)) % self.count
        return rows * self.count + place

    def _rotation(self, groups: np.ndarray) -> np.ndarray:
        hashes = mix(groups.astype(np.int64).view(np.uint64))
        return (hashes % np.uint64(self.count)).astype(groups.dtype)


class Devices:
    """The devices of a mesh, to which pulled rows are copied.

    Args:
      mesh: with at least one device of every process.
    """

    def __init__(self, mesh: Any):
        if not isinstance(mesh, Mesh):
            raise TypeError(
                "KVStore: mesh must be a jax.sharding.Mesh or None, got "
                f"{_arguments.kind_of(mesh)}."
            )
        self.process, self.count = jax.process_index(), jax.process_count()
        self._mesh = mesh
        owners = np.array([device.process_index for device in mesh.devices.flat])
        self._of_process = [np.flatnonzero(owners == p) for p in range(self.count)]
        for process, devices in enumerate(self._of_process):
            if not devices.size:
                raise ValueError(
                    "KVStore: mesh must contain a device of every process, through "
                    f"which it sends its rows, got none of process {process}."
                )

    def gather(self, x: np.ndarray) -> np.ndarray:
        """Gathers the arrays `x` of all processes, `[P, ...]`. A collective."""
        return np.asarray(multihost_utils.process_allgather(x))

    def merge_ids(
        self, ids: Mapping[str, Any], heights: Mapping[str, int]
    ) -> dict[str, np.ndarray]:
        """Merges the ids of all devices of all processes, on the host. A collective.

        Args:
          ids: by table integers of any shape, the ids of the devices of this process:
            an array, a global array that is sharded over the mesh, or a list of arrays.
          heights: by table the rows of the whole table.
        """
        local_ids = {name: own_ids(name, some) for name, some in ids.items()}
        if self.count == 1 or not local_ids:
            return local_ids
        kinds = [np.dtype(_arguments.index_dtype(heights[name])) for name in local_ids]
        parts = []
        for some, kind in zip(local_ids.values(), kinds):
            limits = np.iinfo(kind)  # an id that is cut to them stays out of range
            some = np.clip(some.astype(np.int64), limits.min, limits.max)
            parts.append(sorted_unique(some).astype(kind))
        sizes = self.gather(np.array([part.size for part in parts], np.int32))
        padded = np.zeros(bucket(int(sizes.sum(axis=1).max())), np.result_type(*kinds))
        padded[: sum(part.size for part in parts)] = np.concatenate(parts)
        gathered, stops = self.gather(padded), np.cumsum(sizes, axis=1)
        cut = [np.split(x, ends) for x, ends in zip(gathered, stops)]
        return {
            name: np.concatenate([x[k] for x in cut]).astype(kind)
            for k, (name, kind) in enumerate(zip(local_ids, kinds))
        }

    def replicate(
        self, owners: Owners, rows: np.ndarray, own: np.ndarray, capacity: int
    ) -> SelectedRows:
        """Replicates pulled rows on every device. A collective.

        Args:
          owners: of the table.
          rows: the distinct rows of the pull, ascending, as ids of the whole table.
          own: `[n, ...]`, the weights of the rows of this process among them.
          capacity: slots of the result.
        """
        owner, _ = owners.find(rows)
        # A power of two, so that the all-gather is compiled for only a few sizes.
        parts = enumerate(self._of_process)
        shares = [np.count_nonzero(owner == p) / len(x) for p, x in parts]
        each = bucket(int(np.ceil(max(shares))))
        places = np.full(
            capacity, self._mesh.size * each, np.int32
        )  # empty slots: zeros
        for p, devices in enumerate(self._of_process):
            which = np.flatnonzero(owner == p)
            number, offset = np.divmod(np.arange(which.size), each)
            places[which] = devices[number] * each + offset
        first = {int(d): k * each for k, d in enumerate(self._of_process[self.process])}

        def of_device(index):
            start = first[(index[0].start or 0) // each]
            out = np.zeros((each, *own.shape[1:]), own.dtype)
            values = own[start : start + each]
            out[: len(values)] = values
            return out

        one_axis = _one_axis(self._mesh)
        sharding = NamedSharding(one_axis, PartitionSpec("all"))
        shape = (self._mesh.size * each, *own.shape[1:])
        values = jax.make_array_from_callback(shape, sharding, of_device)
        gathered = _all_gather(self._mesh)(values, _replicated(one_axis, places))
        slots = np.full(capacity, owners.height, rows.dtype)
        slots[: rows.size] = rows
        return SelectedRows(_replicated(self._mesh, slots), gathered, owners.height)

    def on_one_device(self, x: Any) -> Any:
        """Returns a whole array on one device of this process; waits for nothing.

        A collective if the array is sharded over processes.
        """
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        if not x.is_fully_replicated:
            whole = NamedSharding(self._mesh, PartitionSpec())
            x = jax.jit(lambda x: x, out_shardings=whole)(x)
        return x.addressable_data(0)


def of_all_processes(owners: Owners, own: np.ndarray) -> np.ndarray:
    """Makes a whole array from the rows that each process owns. A collective."""
    out = np.empty((owners.height, *own.shape[1:]), own.dtype)
    groups = -(-owners.height // owners.count)
    for start in range(0, groups, CHUNK):
        rows = np.arange(start, min(start + CHUNK, groups))
        part = np.zeros((rows.size, *own.shape[1:]), own.dtype)
        some = own[start : start + CHUNK]
        part[: len(some)] = some
        gathered = np.asarray(multihost_utils.process_allgather(part))
        for process, values in enumerate(gathered):
            ids = Owners(owners.height, process, owners.count).ids(rows)
            out[ids[ids < owners.height]] = values[ids < owners.height]
    return out


def own_ids(name: str, ids: Any) -> np.ndarray:
    """Returns the ids of this process, flat, on the host."""
    if isinstance(ids, list | tuple) and any(np.ndim(x) for x in ids):
        return np.concatenate([own_ids(name, x) for x in ids])
    check_not_traced(name, "ids", ids)
    if isinstance(ids, jax.Array) and not ids.is_fully_addressable:
        shards = [np.asarray(shard.data) for shard in ids.addressable_shards]
        ids = np.concatenate([shard.reshape(-1) for shard in shards])
    return np.asarray(_arguments.as_integers(ids)).reshape(-1)


def _replicated(mesh: Mesh, x: np.ndarray) -> jax.Array:
    """Replicates `x`, which all processes have, on every device of the mesh."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback(x.shape, whole, lambda index: x[index])


def _one_axis(mesh: Mesh) -> Mesh:
    """Returns the same devices in the same order, along one axis."""
    return Mesh(mesh.devices.reshape(-1), ("all",), axis_types=(AxisType.Auto,))


@functools.lru_cache(maxsize=16)
def _all_gather(mesh: Mesh) -> Callable[..., jax.Array]:
    """Makes `(rows of each device, places) -> rows at these places`, replicated."""

    def body(rows, places):
        return indexing.take_rows(lax.all_gather(rows, "all", tiled=True), places)

    mapped = jax.shard_map(
        body,
        mesh=_one_axis(mesh),
        in_specs=(PartitionSpec("all"), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, PartitionSpec()))
