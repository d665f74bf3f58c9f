"""lookup: rows of a table that is spread over devices, by id."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from sparsejax import _arguments, _compat
from sparsejax._lookup import lookup as _lookup
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor
from sparsejax.parallel._owners import Metrics, Owners, no_metrics
from sparsejax.parallel._rule import Reading, read_rows
from sparsejax.parallel._table import ShardedTable, gathered


_CALL = "sparsejax.parallel.lookup"
_MEASURE = "sparsejax.parallel.measure_capacity"


def lookup(
    table: ShardedTable,
    ids: Any,
    *,
    mode: str = "fill",
    padding_id: int | None = None,
    max_norm: float | None = None,
    capacity: int | str | None = None,
    return_metrics: bool = False,
) -> Any:
    """Rows of a table whose rows are spread over devices, by id.

    What `sparsejax.lookup` gives, of a table that no device holds. Each device takes a
    part of the ids, drops duplicates and asks the owners of the rows for them:
    `capacity` rows of each owner in one round of `all_to_all`, and as many rounds as it
    takes. So no id is ever lost, whatever the skew. Under `sparsejax.grad` the gradient
    is a ShardedTable of ShardedRows, which `sparsejax.optim.lazy` sends to the owners.

    Call it in the global view, in an ordinary function or under `jit`, with ids of the
    whole batch. Per device and round, with N owners, C = capacity and rows of B bytes,
    `(N - 1) * C * (4 + B)` bytes go over the wire, and as much again for the gradient.

    Args:
      table: from `shard_rows`.
      ids: integers of any type and shape; negative ids are out of range.
      mode: what an id out of range reads: `"fill"` (NaN), `"clip"`, `"zero"` or
        `"error"`, as in `sparsejax.lookup`.
      padding_id: int, an id that reads zeros and gets no gradient.
      max_norm: positive number, as in `sparsejax.lookup`.
      capacity: int, rows that a device asks of one owner in a round. It decides about
        speed only: too small costs rounds, too large bandwidth. `"auto"` measures the
        ids, outside of `jit`; `measure_capacity` does so from a sample. None takes a
        quarter more than an even share of ids that are all different.
      return_metrics: also return what it took, as `Metrics`.

    Returns:
      `[*ids.shape, *table.shape[1:]]`, or `(rows, metrics)`. Over Explicit axes laid
      out as `ids` are: shard these over the batch, or every device gets all rows.

    Raises:
      TypeError: `table` is no ShardedTable, `ids` are not integers, or options of a
        wrong kind.
      ValueError: unknown `mode`, a `capacity` below 1, "auto" inside `jit`, ids on
        other devices than the table, or a call from inside a `shard_map` over the
        table's mesh. `jax.jvp` and `jax.linearize` through it are JAX's own TypeError:
        there are derivatives in reverse mode only.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.arange(6.0).reshape(3, 2), mesh, "x")
      >>> sj.parallel.lookup(table, jnp.array([2, 2, -1]), padding_id=-1)
      Array([[4., 5.],
             [4., 5.],
             [0., 0.]], dtype=float32)

    References:
      TorchRec, row-wise sharded embeddings; PaddlePaddle, `lookup_table` on remote
      tables (prefetch by id); Lepikhin et al., 2020, "GShard" (dispatch by all_to_all).
    """
    check_table(_CALL, table, "lookup")
    if isinstance(ids, SegmentTensor):
        raise TypeError(
            f"{_CALL}: ids are a SegmentTensor. Reduce the rows of each segment with "
            "sparsejax.parallel.embedding_bag(table, ids), or look up ids.values for "
            "all rows."
        )
    ids = beside(_CALL, table, _arguments.as_integers(_CALL, ids))
    _lookup.check_mode(_CALL, mode)
    padding = _lookup.padding_mask(_CALL, ids, padding_id)
    max_norm = _lookup.check_max_norm(_CALL, max_norm, table.dtype)
    ids = _arguments.as_ids(_CALL, ids, table.height)
    rows, metrics = gather(_CALL, table, ids, padding, mode, capacity)
    if max_norm is not None:
        rows = _lookup.clip_rows(rows, max_norm, table.ndim - 1)
    return (rows, metrics) if return_metrics else rows


def measure_capacity(
    table: ShardedTable, sample_ids: Any, *, margin: float = 1.1
) -> int:
    """The `capacity` that a batch like this one needs to go through in one round.

    The most distinct rows that any of the devices asks of any owner, and `margin` times
    as many for batches that differ.

    Args:
      table: from `shard_rows`; its rows are not looked at.
      sample_ids: integers, the ids of one batch of the size that will be looked up, all
        devices' together; or a list of such batches. They must be known, outside of
        `jit`.
      margin: number; 1 is just enough for the sample.

    Returns:
      int.

    Raises:
      TypeError: `table` is no ShardedTable, or the ids are not integers.
      ValueError: ids that are not known yet, or none; a `margin` that is no positive
        number.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.ones((100, 2)), mesh, "x")
      >>> sj.parallel.measure_capacity(table, jnp.array([7, 7, 7, 8]), margin=1.0)
      2
    """
    check_table(_MEASURE, table, "lookup")
    batches = sample_ids if isinstance(sample_ids, list | tuple) else [sample_ids]
    if all(np.ndim(batch) == 0 for batch in batches):
        batches = [batches if isinstance(sample_ids, list | tuple) else sample_ids]
    if not isinstance(margin, (int, float, np.number)) or not 0 < margin < math.inf:
        raise ValueError(
            f"{_MEASURE}: margin must be a positive number, got {margin!r}; 1 is just "
            "enough for the sample."
        )
    found = count = 0
    for batch in batches:
        if not (_arguments.is_concrete(batch) or isinstance(batch, list | tuple)):
            raise ValueError(
                f"{_MEASURE}: sample_ids must be known, and inside jit they are not "
                "yet. Measure outside, and pass the int that it gives as capacity."
            )
        batch = _arguments.as_integers(_MEASURE, batch)
        found, count = max(found, _longest_part(table, batch)), count + batch.size
    if not count:
        raise ValueError(
            f"{_MEASURE}: sample_ids has no ids. Pass those of one batch or of several."
        )
    return max(1, math.ceil(found * margin))


# ------------------------------------------------------------------ for embedding_bag


def gather(
    call: str,
    table: ShardedTable,
    ids: jax.Array,
    padding: jax.Array | None,
    mode: str,
    capacity: int | str | None,
) -> tuple[jax.Array, Metrics]:
    """What `lookup` reads, of arguments that have been checked, and what it took."""
    wanted = _lookup.clip_ids(call, table, ids) if mode == "clip" else ids
    if padding is not None:
        wanted = jnp.where(padding, _arguments.scalar(table.height, ids), wanted)
    rows, metrics = _read(call, table, wanted, capacity)
    if mode in ("zero", "clip"):
        return rows, metrics
    bad = ~indexing.in_range(wanted, table.height)
    if padding is not None:
        bad &= ~padding
    if mode == "error":
        _lookup.check_none(call, table, gathered(bad), gathered(ids))
    bad = indexing.append_axes(bad, rows.ndim)
    return jnp.where(bad, indexing.fill_value(rows.dtype), rows), metrics


def check_table(call: str, table: Any, name: str) -> None:
    """An error that names `call` unless `table` is a ShardedTable that can be read."""
    if not isinstance(table, ShardedTable):
        found = _arguments.kind_of(table)
        raise TypeError(
            f"{call}: table must be a ShardedTable, got {found}. Make one with "
            "sparsejax.parallel.shard_rows(table, mesh, axis), or use "
            f"sparsejax.{name} on a table that one device holds."
        )
    here = jax.sharding.get_abstract_mesh()
    manual = [n for n in here.manual_axes if n in table.mesh.axis_names]
    if manual:
        raise ValueError(
            f"{call}: called inside of a shard_map over {manual}. It takes the ids of "
            "the whole batch and splits them itself: call it outside of the shard_map, "
            "on global arrays."
        )


def beside(call: str, table: ShardedTable, ids: Any) -> Any:
    """Ids where the table's devices can take them, or an error that names `call`."""
    mesh = table.mesh
    is_array = isinstance(ids, jax.Array) and _arguments.is_concrete(ids)
    if not (isinstance(mesh, Mesh) and is_array and ids.committed):
        return ids
    here, there = ids.sharding.device_set, set(mesh.devices.flat)
    if here == there:
        return ids
    if len(here) == 1 and here <= there:
        return jax.device_put(ids, owners_of(table).sharding(PartitionSpec()))
    names = ", ".join(map(repr, table.axes))
    raise ValueError(
        f"{call}: ids lie on {ids.sharding}, and the table on {len(there)} devices of "
        f"{mesh}. Put them there: jax.device_put(ids, NamedSharding(mesh, "
        f"PartitionSpec({names})))."
    )


def owners_of(table: ShardedTable) -> Owners:
    """Who owns the rows of a table."""
    return Owners(table.mesh, table.axes, table.rows_per_shard)


# ------------------------------------------------------------------ private


def _read(
    call: str, table: ShardedTable, ids: jax.Array, capacity: int | str | None
) -> tuple[jax.Array, Metrics]:
    """Rows of ids of any shape, zeros for those out of range."""
    owners = owners_of(table)
    slots = _slots(call, owners, table, ids, capacity)
    content = table.shape[1:]
    if not ids.size:
        return jnp.zeros((*ids.shape, *content), table.dtype), no_metrics()
    flat = _split(owners, table.position(ids))
    rows, metrics = read_rows(Reading(owners, slots), table.values, flat)
    return _join(owners, rows, ids), metrics


def _split(owners: Owners, positions: jax.Array) -> jax.Array:
    """Flat positions, filled up so that each device gets as many."""
    beyond = -positions.size % owners.devices
    if _compat.explicit_spec(positions) and not beyond:
        flat = owners.sharding(owners.batch_spec)
        return lax.reshape(positions, (positions.size,), out_sharding=flat)
    positions = gathered(positions).reshape(-1)  # a few ids, not rows
    if beyond:
        none = jnp.full((beyond,), owners.height, positions.dtype)
        positions = jnp.concatenate([positions, none])
    return _place(owners, positions)


def _join(owners: Owners, rows: jax.Array, ids: jax.Array) -> jax.Array:
    """`rows` in the shape of `ids`; over explicit axes laid out as they are."""
    shape = (*ids.shape, *rows.shape[1:])
    if not owners.is_explicit:
        return rows if rows.shape == shape else rows[: ids.size].reshape(shape)
    layout = _compat.explicit_spec(ids)
    rest = (None,) * (len(shape) - len(layout))
    want = owners.sharding(PartitionSpec(*layout, *rest))
    if rows.shape[0] == ids.size:
        return lax.reshape(rows, shape, out_sharding=want)
    return jax.reshard(gathered(rows)[: ids.size].reshape(shape), want)


def _place(owners: Owners, positions: jax.Array) -> jax.Array:
    """Laid out as batches are; from one device too, outside of `jit`."""
    want = owners.sharding(owners.batch_spec)
    if _arguments.is_concrete(positions) and len(positions.sharding.device_set) == 1:
        return jax.device_put(positions, want)
    return jax.reshard(positions, want) if owners.is_explicit else positions


def _slots(call: str, owners: Owners, table: Any, ids: Any, capacity: Any) -> int:
    here = -(-ids.size // owners.devices)
    if capacity is None:
        return owners.slots(here, None)
    if isinstance(capacity, str):
        if capacity != "auto":
            raise ValueError(
                f"{call}: capacity must be a positive int, 'auto' or None, got "
                f"{capacity!r}."
            )
        if not _arguments.is_concrete(ids):
            raise ValueError(
                f"{call}: capacity='auto' measures the ids, and inside jit they are "
                "not known yet. Measure a sample outside and pass the int: capacity = "
                "sparsejax.parallel.measure_capacity(table, sample_ids)."
            )
        return owners.slots(here, max(1, _longest_part(table, ids)))
    if isinstance(capacity, bool):
        raise ValueError(f"{call}: capacity must be a positive int, got {capacity}.")
    hint = " Or give 'auto' or None."
    capacity = _arguments.static_int(call, "capacity", capacity, 1, hint)
    return owners.slots(here, capacity)


def _longest_part(table: ShardedTable, ids: Any) -> int:
    """The most distinct rows that a device asks of an owner, on the host."""
    owners, ids = owners_of(table), np.asarray(ids).reshape(-1)
    named = (ids >= 0) & (ids < table.height)
    longest = 0
    for part, ok in zip(*(_parts(x, owners.devices) for x in (ids, named))):
        distinct = np.unique(part[ok])
        if table.layout == "mod":
            owner = distinct % owners.count
        else:
            owner = distinct // owners.rows
        if owner.size:
            longest = max(longest, int(np.unique(owner, return_counts=True)[1].max()))
    return longest


def _parts(x: np.ndarray, count: int) -> Sequence[np.ndarray]:
    """`x` as the devices take it."""
    size = -(-x.size // count)
    return [x[k * size : (k + 1) * size] for k in range(count)]
