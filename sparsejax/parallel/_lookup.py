"""lookup: reads rows of a row-sharded table; its transformation rule and gradient."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike
from sparsejax._lookup import lookup as _lookup
from sparsejax._rows import indexing, read_row_table
from sparsejax._segments import SegmentTensor
from sparsejax.parallel import _exchange
from sparsejax.parallel._exchange import Metrics, Owners
from sparsejax.parallel._over_devices import TableOverDevices
from sparsejax.parallel._row_layout import TableWise
from sparsejax.parallel._rows import ShardedRows, concatenate
from sparsejax.parallel._table import ShardedTable, constrain
from sparsejax.transform.interpreter import RuleContext, register_rule
from sparsejax.transform.table import TableRef, replicate, reshard


_CALL = "sparsejax.parallel.lookup"
_MEASURE = "sparsejax.parallel.measure_capacity"


def lookup(
    table: TableOverDevices,
    ids: ArrayLike,
    *,
    mode: str = "fill",
    padding_id: int | None = None,
    max_norm: float | None = None,
    capacity: int | str | None = None,
    return_metrics: bool = False,
) -> Any:
    """Reads rows, by id, of a table whose rows are sharded over devices.

    Returns the same rows as `sparsejax.lookup`, for a table too large for one device.
    Each device takes its part of the ids, drops duplicates and requests the rows from
    their owners: at most `capacity` rows from each owner in one round of `all_to_all`,
    in as many rounds as needed. No id is lost, however skewed the ids are. Under
    `sparsejax.grad` the gradient is a ShardedTable of ShardedRows;
    `sparsejax.optim.lazy` sends its rows to their owners.

    Call it on global arrays, with the ids of the whole batch, under `jit` or not. With
    N owners, C = capacity and rows of B bytes, each device sends
    `(N - 1) * C * (4 + B)` bytes per round, and the same again for the gradient.

    Args:
      table: from `shard_rows`.
      ids: integers of any type and shape; negative ids are out of range.
      mode: what an id out of range reads: `"fill"` (NaN), `"clip"`, `"zero"`,
        `"raise"` or `"error"`, as in `sparsejax.lookup`.
      padding_id: int, an id that reads zeros and gets no gradient.
      max_norm: positive number, as in `sparsejax.lookup`.
      capacity: int, the number of rows that a device requests from one owner per round.
        It only affects speed: too small a value costs rounds, too large a value costs
        bandwidth. `"auto"` measures the ids, outside of `jit`; `measure_capacity`
        measures a sample. None takes the table's own; if it has none, 25% more than an
        even share if all ids are distinct.
      return_metrics: whether to also return the `Metrics` of the exchange.

    Returns:
      `[*ids.shape, *table.shape[1:]]`, or `(rows, metrics)`. Over Explicit axes the
      rows are sharded like `ids`: shard the ids, or every device gets all rows.

    Raises:
      TypeError: `table` is not a ShardedTable, `ids` are not integers, or an option has
        the wrong type.
      ValueError: `mode` is unknown, `capacity` is below 1 or is `"auto"` inside `jit`,
        the ids are on other devices than the table, or it is called inside a
        `shard_map` over the table's mesh.

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
            f"{_CALL}: ids must be an array of integers, got a SegmentTensor. Use "
            "sparsejax.parallel.embedding_bag(table, ids) to reduce the rows of each "
            "segment, or look up ids.values to get every row."
        )
    ids = put_on_mesh(_CALL, table, _arguments.as_integers(_CALL, ids))
    mode = _lookup.check_mode(_CALL, mode)
    padding = _lookup.padding_mask(_CALL, ids, padding_id)
    max_norm = _lookup.check_max_norm(_CALL, max_norm, table.dtype)
    ids = _arguments.as_ids(_CALL, ids, table.height)
    rows, metrics = gather(_CALL, table, ids, padding, mode, capacity)
    if max_norm is not None:
        rows = _lookup.clip_rows(rows, max_norm, table.ndim - 1)
    return (rows, metrics) if return_metrics else rows


def measure_capacity(
    table: TableOverDevices, sample_ids: ArrayLike, *, margin: float = 1.1
) -> int:
    """The `capacity` at which batches like this one need a single round.

    The most distinct rows that any device requests from any owner, times `margin`,
    because batches differ.

    Args:
      table: from `shard_rows`; its values are not read.
      sample_ids: integers, the ids of one batch of all devices together, as large as
        the batches that will be looked up; or a list of such batches. They must be
        concrete, so call this function outside of `jit`.
      margin: positive number; 1 is just enough for the sample.

    Returns:
      int.

    Raises:
      TypeError: `table` is not a ShardedTable, or the ids are not integers.
      ValueError: the ids are traced or empty, or `margin` is not a positive number.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.ones((100, 2)), mesh, "x")
      >>> sj.parallel.measure_capacity(table, jnp.array([7, 7, 7, 8]), margin=1.0)
      2
    """
    check_table(_MEASURE, table, "lookup")
    batches: Any = sample_ids if isinstance(sample_ids, list | tuple) else [sample_ids]
    if all(np.ndim(batch) == 0 for batch in batches):
        batches = [batches if isinstance(sample_ids, list | tuple) else sample_ids]
    if not isinstance(margin, (int, float, np.number)) or not 0 < margin < math.inf:
        raise ValueError(
            f"{_MEASURE}: margin must be a positive number, got {margin!r}. A margin "
            "of 1 is just enough for the sample."
        )
    most = count = 0
    for batch in batches:
        if not (_arguments.is_concrete(batch) or isinstance(batch, list | tuple)):
            raise ValueError(
                f"{_MEASURE}: sample_ids must be concrete, got traced ids. Call it "
                "outside of jit, and pass its result as capacity."
            )
        batch = _arguments.as_integers(_MEASURE, batch)
        most, count = max(most, _most_asked(table, batch)), count + batch.size
    if not count:
        raise ValueError(
            f"{_MEASURE}: sample_ids must not be empty. Pass the ids of one or more "
            "batches."
        )
    return max(1, math.ceil(most * margin))


@read_row_table.register
def _read_row_table(
    table: TableOverDevices, call: str, ids: Any, padding: jax.Array | None, mode: str
) -> jax.Array:
    """The rows of a table over devices for `sparsejax.lookup` and the layers."""
    check_table(call, table, "lookup")
    return gather(call, table, put_on_mesh(call, table, ids), padding, mode, None)[0]


# ------------------------------------------------------------------ for embedding_bag


def gather(
    call: str,
    table: TableOverDevices,
    ids: jax.Array,
    padding: jax.Array | None,
    mode: str,
    capacity: int | str | None,
) -> tuple[jax.Array, Metrics]:
    """The rows that `lookup` reads, for checked arguments, and the metrics."""
    wanted = _lookup.clip_ids(call, table, ids) if mode == "clip" else ids
    if padding is not None:
        wanted = jnp.where(padding, _arguments.scalar(table.height, ids), wanted)
    rows, metrics = read_ids(table, call, wanted, capacity)
    if mode in ("zero", "clip"):
        return rows, metrics
    bad = ~indexing.in_range(wanted, table.height)
    if padding is not None:
        bad &= ~padding
    if mode == "error":
        _lookup.check_none(call, table, replicate(bad), replicate(ids))
    bad = indexing.append_axes(bad, rows.ndim)
    return jnp.where(bad, indexing.fill_value(rows.dtype), rows), metrics


def check_table(call: str, table: Any, name: str) -> None:
    """Raises unless `table` is over devices and can be read here."""
    if not isinstance(table, TableOverDevices):
        raise TypeError(
            f"{call}: table must be a ShardedTable, got {_arguments.kind_of(table)}. "
            "Make one with sparsejax.parallel.shard_rows(table, mesh, axis), or use "
            f"sparsejax.{name} for a table that one device holds."
        )
    context = jax.sharding.get_abstract_mesh()
    manual = [n for n in context.manual_axes if n in table.mesh.axis_names]
    if manual:
        raise ValueError(
            f"{call}: cannot be called inside a shard_map over {manual}. It takes the "
            "ids of the whole batch and shards them itself. Call it outside of the "
            "shard_map, on global arrays."
        )


def put_on_mesh(call: str, table: TableOverDevices, ids: Any) -> jax.Array:
    """Moves ids from one device to the table's mesh; raises if they are elsewhere."""
    mesh = table.mesh
    is_array = isinstance(ids, jax.Array) and _arguments.is_concrete(ids)
    if not (isinstance(mesh, Mesh) and is_array and ids.committed):
        return ids
    here, there = ids.sharding.device_set, set(mesh.devices.flat)
    if here == there:
        return ids
    if len(here) == 1 and here <= there:
        return jax.device_put(ids, owners_of(table).sharding(PartitionSpec()))
    raise ValueError(
        f"{call}: ids must be on the table's {len(there)} devices, {mesh}, got "
        f"{ids.sharding}. Move them with jax.device_put(ids, NamedSharding(mesh, "
        f"PartitionSpec({', '.join(map(repr, table.axes))})))."
    )


def owners_of(table: TableOverDevices) -> Owners:
    """Which device owns which rows of a table."""
    return Owners(table.mesh, table.axes, table.rows_per_shard)


# ------------------------------------------------------------------ reading


@functools.singledispatch
def read_ids(
    table: Any, call: str, ids: jax.Array, capacity: int | str | None
) -> tuple[jax.Array, Metrics]:
    """The rows of ids of any shape; zeros for ids out of range.

    Each kind of table registers its own.
    """
    raise NotImplementedError


@read_ids.register
def _read_ids(
    table: ShardedTable, call: str, ids: jax.Array, capacity: int | str | None
) -> tuple[jax.Array, Metrics]:
    return read(call, table, ids, capacity)


def read(
    call: str,
    table: ShardedTable,
    ids: jax.Array,
    capacity: int | str | None,
    record: Callable[..., jax.Array] | None = None,
) -> tuple[jax.Array, Metrics]:
    """`read_ids` of a ShardedTable.

    Args:
      call: the public call, for errors.
      table: whose values are an array.
      ids: integers.
      capacity: as in `lookup`.
      record: `f(rows, kind)` returns the rows `[n, ...]` that arrived, recorded as a
        read.
    """
    owners = owners_of(table)
    slots = slots_of(call, owners, table, ids, capacity)
    if not ids.size:
        return no_rows(table, ids)
    positions = positions_of(owners, table, ids)
    rows, metrics = _exchange.read_rows(owners, slots, table.values, positions)
    if record is not None:
        rows = record(rows, ReadKind(owners, slots))
    return like_ids(owners, rows, ids), metrics


def no_rows(table: TableOverDevices, ids: jax.Array) -> tuple[jax.Array, Metrics]:
    """What is read for no ids."""
    rows = jnp.zeros((*ids.shape, *table.shape[1:]), table.dtype)
    return rows, _exchange.no_metrics()


def like_ids(owners: Owners, rows: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows that were read for `shard_ids(ids)`, in the shape of `ids`."""
    shape = (*ids.shape, *rows.shape[1:])
    if not owners.is_explicit:
        return rows if rows.shape == shape else rows[: ids.size].reshape(shape)
    spec = _compat.explicit_spec(ids)
    spec += (None,) * (len(shape) - len(spec))
    sharding = owners.sharding(PartitionSpec(*spec))
    if rows.shape[0] == ids.size:
        return lax.reshape(rows, shape, out_sharding=sharding)
    rows = replicate(rows)[: ids.size].reshape(shape)
    return jax.sharding.reshard(rows, sharding)


def slots_of(call: str, owners: Owners, table: Any, ids: Any, capacity: Any) -> int:
    """C, the slots of a round, for the `capacity` of a public call."""
    here = -(-ids.size // owners.devices)
    if capacity is None:
        return owners.slots(here, table.capacity)
    if isinstance(capacity, str) and capacity == "auto":
        if not _arguments.is_concrete(ids):
            raise ValueError(
                f"{call}: capacity='auto' measures the ids, which needs concrete ids, "
                "got traced ids. Measure a sample outside of jit and pass the int: "
                "capacity = sparsejax.parallel.measure_capacity(table, sample_ids)."
            )
        return owners.slots(here, max(1, _most_asked(table, ids)))
    if isinstance(capacity, str | bool):
        raise ValueError(
            f"{call}: capacity must be a positive int, 'auto' or None, got "
            f"{capacity!r}."
        )
    hint = " 'auto' and None are also accepted."
    capacity = _arguments.static_int(call, "capacity", capacity, 1, hint)
    return owners.slots(here, capacity)


def shard_ids(owners: Owners, none: int, ids: jax.Array) -> jax.Array:
    """Ids or positions as `[n]`, sharded over the devices, and padded for that.

    Args:
      owners: which device owns which rows.
      none: the number that pads, out of range.
      ids: integers of any shape.
    """
    padding = -ids.size % owners.devices
    batch = owners.sharding(owners.batch_spec)
    if _compat.explicit_spec(ids) and not padding:
        return lax.reshape(ids, (ids.size,), out_sharding=batch)
    ids = replicate(ids).reshape(-1)  # a few ids, not rows
    if padding:
        ids = jnp.concatenate([ids, jnp.full((padding,), none, ids.dtype)])
    if _arguments.is_concrete(ids) and len(ids.sharding.device_set) == 1:
        return jax.device_put(ids, batch)
    return jax.sharding.reshard(ids, batch) if owners.is_explicit else ids


def positions_of(owners: Owners, table: ShardedTable, ids: jax.Array) -> jax.Array:
    """The positions of ids, `[n]`, padded and sharded as by `shard_ids`."""
    if not isinstance(table.layout, TableWise):
        return shard_ids(owners, owners.height, table.position(ids))
    # On each device by itself: XLA's partitioner makes of a search in constants, for
    # ids that are constants, a program that jaxlib 0.7 cannot run.
    spec, ids = owners.batch_spec, shard_ids(owners, -1, ids)
    return owners.shard_map(table.position, ids, in_specs=(spec,), out_specs=spec)


def _most_asked(table: TableOverDevices, ids: Any) -> int:
    """The most distinct rows that a device requests from an owner; runs on the host."""
    owners, ids = owners_of(table), np.asarray(ids).reshape(-1)
    here = -(-ids.size // owners.devices)
    most = 0
    for k in range(owners.devices):
        part = ids[k * here : (k + 1) * here]
        distinct = np.unique(part[(part >= 0) & (part < table.height)])
        owner = table.row_layout.owner_of(distinct)
        if owner.size:
            most = max(most, int(np.unique(owner, return_counts=True)[1].max()))
    return most


# ------------------------------------------------------------------ value_and_grad


@dataclasses.dataclass(frozen=True)
class ReadKind:
    """The static part of a read of sharded rows; builds the gradient of its table.

    Args:
      owners: which device owns which rows.
      slots: C, of the exchange; 0 if each device read rows of its own.
      here: how many ids a device reads.
    """

    owners: Owners
    slots: int
    here: int = 0

    def moved(self) -> ReadKind:
        """The kind of the same reads, once their slots may lie on other devices."""
        slots = self.slots or self.owners.slots(self.here, None)
        return dataclasses.replace(self, slots=slots)

    def package(
        self,
        row: Sequence[int],
        dtype: Any,
        ids: Sequence[jax.Array],
        cotangents: Sequence[jax.Array],
        sites: Sequence[Any],
    ) -> ShardedRows:
        """The gradient of a table from all its reads; each slot stays on its device."""
        owners, parts = self.owners, []
        for i, c, site in zip(ids, cotangents, sites):
            # A loop adds a leading axis, its length; the ids behind it are sharded over
            # devices.
            here = i.shape[-1]
            turns = i.size // max(1, here)
            rows = _merge_turns(owners, i.reshape(turns, here))
            values = _merge_turns(owners, c.reshape(turns, here, *row))
            filled = indexing.in_range(rows, owners.height)
            values = indexing.zero_unless(filled, values).astype(dtype)
            slots = site.kind.slots * turns
            parts.append(ShardedRows.make(rows, values, owners, slots))
        return concatenate(parts)


def _merge_turns(owners: Owners, x: jax.Array) -> jax.Array:
    """`[turns, n, ...]` as `[turns * n, ...]`, without moving data between devices."""
    if x.shape[0] == 1:
        # Without the constraint XLA may gather what a jitted gradient returns.
        return constrain(x[0], owners.mesh, *owners.batch_spec)
    merge = lambda part: part.reshape(math.prod(part.shape[:2]), *part.shape[2:])
    by_turn = PartitionSpec(None, *owners.batch_spec)
    return owners.shard_map(merge, x, in_specs=(by_turn,), out_specs=owners.batch_spec)


@register_rule(_exchange.read_rows_p)
def _read_rule(
    ctx: RuleContext,
    ref: Any,
    positions: jax.Array,
    *,
    owners: Owners,
    slots: int,
    batched: tuple[bool, ...],
) -> Any:
    if not isinstance(ref, TableRef) or ref.row_axis != 0 or any(batched):
        return NotImplemented
    rows, *metrics = _exchange.read_rows_p.bind(
        ref.array, positions, owners=owners, slots=slots, batched=batched
    )
    kind = ReadKind(owners, slots, positions.size // owners.devices)
    # A batch and the ids become one axis, whose parts are not those of the devices.
    kind = kind.moved() if batched else kind
    return [record_read(ctx, ref, rows, positions, kind, batched), *metrics]


def record_read(
    ctx: RuleContext,
    ref: TableRef,
    rows: jax.Array,
    positions: jax.Array,
    kind: Any,
    batched: tuple[bool, ...],
) -> jax.Array:
    """The rows that a primitive of `linear_reads` gave, recorded as a read of `kind`.

    Args:
      ctx, ref: of its rule.
      rows: `[*positions.shape, ...]`, of the table, not of the view.
      positions: what the primitive was given.
      kind: whose `owners` the rows were read with.
      batched: of the primitive.
    """
    shape, spec, transpose = positions.shape, (), lambda cotangent: cotangent
    if batched:
        # Explicit sharding keeps the batch and the ids from becoming one axis.
        spec, transpose = _compat.explicit_spec(rows), replicate
        rows, positions = (replicate(x) if spec else x for x in (rows, positions))
    rows = ctx.combine(ref, positions, rows, transpose, kind=kind)
    rows = reshard(rows, spec, kind.owners.mesh)
    if ref.steps:
        rows = ref.view(rows.reshape(positions.size, *rows.shape[len(shape) :]))
        rows = rows.reshape(*shape, *rows.shape[1:])
    return rows
