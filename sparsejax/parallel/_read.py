"""How `sparsejax.lookup`, `embedding_bag`, `table[ids]` and `jnp.take` read a table.

All of them end in one exchange, `_exchange.read_rows`. `sparsejax.lookup` and
`embedding_bag` get there by `read_row_table` and `reduce_row_table`.

`jnp.take` and the embedding layers of flax read an array. `jnp.asarray(table)` binds
the primitive `sharded_table`, whose result has the shape of the table. In a walk the
result becomes a view of the table's values with a `RowReader`. So every program that
reads rows of an array can read rows of a ShardedTable, also under `vmap` and `scan`,
and of a table that is cast.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike
from sparsejax._lookup import lookup as _lookup
from sparsejax._mesh import explicit_spec, replicate, reshard
from sparsejax._rows import indexing, read_row_table, reduce_row_table
from sparsejax._segments import SegmentTensor
from sparsejax.parallel import _bags, _exchange
from sparsejax.parallel._exchange import Metrics, Owners
from sparsejax.parallel._rows import ShardedRows, concatenate
from sparsejax.parallel._table import ShardedTable, constrain, sharded_table_p
from sparsejax.transform.forward import run_forward
from sparsejax.transform.interpreter import RuleContext, register_rule
from sparsejax.transform.plan import DensifyError
from sparsejax.transform.table import RowReader, TableRef
from sparsejax.transform.trace import check_fun


P = ParamSpec("P")
T = TypeVar("T")


def measure_capacity(
    table: ShardedTable, sample_ids: ArrayLike, *, margin: float = 1.1
) -> int:
    """Measures the `capacity` at which batches like this one need a single round.

    It is the largest number of distinct rows that any device requests from any owner,
    times `margin`, because batches differ. Pass it as `capacity=` to `shard_rows`, or
    set it: `dataclasses.replace(table, capacity=capacity)`.

    Args:
      table: from `shard_rows`; its values are not read.
      sample_ids: integers, the ids of one batch of all devices together, as large as
        the batches that will be looked up; or a list of such batches. They must be
        concrete, so call this function outside of `jit`.
      margin: positive number; 1 is just enough for the sample.

    Returns:
      int.

    Raises:
      TypeError: `table` is not a ShardedTable, the ids are not integers or are traced,
        or `margin` is not a number.
      ValueError: there are no ids, or `margin` is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.ones((100, 2)), mesh, "x")
      >>> sj.parallel.measure_capacity(table, jnp.array([7, 7, 7, 8]), margin=1.0)
      2
    """
    check_table(table)
    batches: Any = sample_ids if isinstance(sample_ids, list | tuple) else [sample_ids]
    if all(np.ndim(batch) == 0 for batch in batches):
        batches = [batches]
    if not 0 < margin < math.inf:
        raise ValueError(
            "sparsejax.parallel.measure_capacity: margin must be positive, and 1 is "
            f"just enough for the sample, got {margin!r}."
        )
    batches = [_arguments.as_integers(batch) for batch in batches]
    if not sum(batch.size for batch in batches):
        raise ValueError(
            "sparsejax.parallel.measure_capacity: sample_ids must not be empty. Pass "
            "the ids of one or more batches."
        )
    most = max(max_requested(table, batch) for batch in batches)
    return max(1, math.ceil(most * margin))


def max_requested(table: ShardedTable, ids: Any) -> int:
    """Returns the most distinct rows that a device requests from any owner."""
    most, shards = 0, table.num_shards
    for distinct in distinct_ids([ids], owners_of(table).devices, table.height):
        positions = table.layout.position(distinct, table.height, shards)
        requested = np.bincount(positions // table.rows_per_shard, minlength=1)
        most = max(most, int(requested.max()))
    return most


def distinct_ids(
    batches: Sequence[Any], devices: int, height: int
) -> Iterator[np.ndarray]:
    """Yields each device's distinct ids in range; batches are sharded evenly."""
    batches = [np.asarray(ids).reshape(-1) for ids in batches]
    for k in range(devices):
        heres = [-(-ids.size // devices) for ids in batches]
        parts = [ids[k * n : (k + 1) * n] for ids, n in zip(batches, heres)]
        part = np.unique(np.concatenate(parts))
        yield part[(part >= 0) & (part < height)]


def exchange_metrics(table: ShardedTable, ids: ArrayLike | SegmentTensor) -> Metrics:
    """Returns rounds, rows, overflow and bytes of a lookup of `ids`.

    Nothing is read: the ids are grouped by owner and counted. The gradient of the
    lookup needs the same again. Works inside and outside of `jit`.

    Args:
      table: from `shard_rows`; its `capacity` is the number of rows of a round.
      ids: integers of any shape, the ids of the whole batch, as `sparsejax.lookup`
        takes them; or a SegmentTensor of ids. Negative ids, like all ids out of range,
        request no row.

    Returns:
      `Metrics`, the same on every device.

    Raises:
      TypeError: `table` is not a ShardedTable, or `ids` are not integers.
      ValueError: the ids are on other devices than the table, or it is called inside a
        `shard_map` over the table's mesh.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.ones((9, 2)), mesh, "x", capacity=2)
      >>> found = sj.parallel.exchange_metrics(table, jnp.array([1, 2, 3, 1]))
      >>> int(found.rounds), int(found.rows), int(found.overflow)
      (2, 3, 1)
    """
    check_table(table)
    ids = ids.values if isinstance(ids, SegmentTensor) else ids
    ids = put_on_mesh(table, _arguments.as_integers(ids))
    ids = _arguments.as_ids(ids, table.height)
    if not ids.size:
        zero = jnp.zeros((), jnp.int32)
        return Metrics(zero, zero, zero, zero, jnp.zeros((), jnp.float32))
    owners = owners_of(table)
    positions, slots = positions_of(owners, table, ids), slots_of(owners, table, ids)
    row = table.shape[1:]
    return _exchange.measure(owners, slots, positions, table.dtype, row)


def check_table(table: Any) -> None:
    """Raises unless `table` is a ShardedTable that can be read here."""
    if not isinstance(table, ShardedTable):
        raise TypeError(
            "sparsejax.parallel: table must be a ShardedTable, got "
            f"{_arguments.kind_of(table)}. Make one with "
            "sparsejax.parallel.shard_rows(table, mesh, axis)."
        )
    context = jax.sharding.get_abstract_mesh()
    manual = [n for n in context.manual_axes if n in table.mesh.axis_names]
    if manual:
        raise ValueError(
            "sparsejax: a ShardedTable takes the ids of the whole batch and shards "
            f"them itself, but this is inside a shard_map over {manual}. Read it "
            "outside of the shard_map, at global arrays."
        )


def put_on_mesh(table: ShardedTable, ids: Any) -> jax.Array:
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
        f"sparsejax: ids are on {ids.sharding}, but the ShardedTable is on {mesh}. "
        "Move them with jax.device_put(ids, NamedSharding(mesh, "
        f"PartitionSpec({', '.join(map(repr, table.axes))})))."
    )


def owners_of(table: ShardedTable) -> Owners:
    """Returns the owner of each row of a table."""
    wire_dtype = table.wire_dtype
    return Owners(table.mesh, table.axes, table.rows_per_shard, wire_dtype)


# ------------------------------------------------------------------ reading


@read_row_table.register
def _read_row_table(
    table: ShardedTable, ids: Any, padding: jax.Array | None, mode: str
) -> jax.Array:
    """Reads rows of a sharded table, for `sparsejax.lookup` and the layers."""
    check_table(table)
    return _gather(table, put_on_mesh(table, ids), padding, mode)


@reduce_row_table.register
def _reduce_row_table(
    table: ShardedTable,
    ids: Any,
    skip: jax.Array | None,
    weights: jax.Array | None,
    segments: tuple[jax.Array, int] | None,
    *,
    combiner: str,
    mode: str,
    max_norm: float | None = None,
) -> jax.Array:
    """Reduces bags of a sharded table, for `sparsejax.embedding_bag` and layers."""
    check_table(table)
    ids = put_on_mesh(table, ids)

    def read_rows(ids, skip):
        rows = _gather(table, ids, skip, mode)
        if max_norm is not None:
            rows = _lookup.clip_rows(rows, max_norm, table.ndim - 1)
        return rows

    return _bags.reduce_bags(
        owners_of(table), read_rows, ids, skip, weights, segments, combiner
    )


def _gather(table: ShardedTable, ids: jax.Array, padding: Any, mode: str) -> jax.Array:
    """Gathers the rows of checked ids, as `mode` and `padding` say."""
    wanted = _lookup.clip_ids(table, ids) if mode == "clip" else ids
    if padding is not None:
        wanted = jnp.where(padding, _arguments.scalar(table.height, ids), wanted)
    rows = _read(table, wanted)
    if mode in ("zero", "clip"):
        return rows
    bad = ~indexing.in_range(wanted, table.height)
    if padding is not None:
        bad &= ~padding
    if mode == "error":
        _lookup.check_none(table, replicate(bad), replicate(ids))
    bad = indexing.append_axes(bad, rows.ndim)
    return jnp.where(bad, indexing.fill_value(rows.dtype), rows)


def _read(
    table: ShardedTable,
    ids: jax.Array,
    record: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Reads the rows of ids of any shape; zeros for ids out of range.

    Args:
      table: its values are an array.
      ids: integers.
      record: `f(rows, kind)` returns the rows `[n, ...]` that arrived, recorded as a
        read.
    """
    if not ids.size:
        return jnp.zeros((*ids.shape, *table.shape[1:]), table.dtype)
    owners, slots = owners_of(table), slots_of(owners_of(table), table, ids)
    positions = positions_of(owners, table, ids)
    rows = _exchange.read_rows(owners, slots, table.values, positions)
    if record is not None:
        rows = record(rows, ReadKind(owners, slots))
    return _like_ids(owners, rows, ids)


def slots_of(owners: Owners, table: ShardedTable, ids: jax.Array) -> int:
    """Returns C, the slots of a round of the exchange for these ids."""
    return owners.slots(-(-ids.size // owners.devices), table.capacity)


def _like_ids(owners: Owners, rows: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns rows that were read for `_shard_ids(ids)`, in the shape of `ids`."""
    shape = (*ids.shape, *rows.shape[1:])
    if not owners.is_explicit:
        return rows if rows.shape == shape else rows[: ids.size].reshape(shape)
    spec = explicit_spec(ids)
    spec += (None,) * (len(shape) - len(spec))
    sharding = owners.sharding(PartitionSpec(*spec))
    if rows.shape[0] == ids.size:
        return lax.reshape(rows, shape, out_sharding=sharding)
    rows = replicate(rows)[: ids.size].reshape(shape)
    return jax.sharding.reshard(rows, sharding)


def _shard_ids(owners: Owners, none: int, ids: jax.Array) -> jax.Array:
    """Shards ids or positions, as `[n]` and padded, over the devices.

    Args:
      owners: which device owns which rows.
      none: the number that pads, out of range.
      ids: integers of any shape.
    """
    padding = -ids.size % owners.devices
    batch = owners.sharding(owners.batch_spec)
    if explicit_spec(ids) and not padding:
        return lax.reshape(ids, (ids.size,), out_sharding=batch)
    ids = replicate(ids).reshape(-1)  # a few ids, not rows
    if padding:
        ids = jnp.concatenate([ids, jnp.full((padding,), none, ids.dtype)])
    if _arguments.is_concrete(ids) and len(ids.sharding.device_set) == 1:
        return jax.device_put(ids, batch)
    return jax.sharding.reshard(ids, batch) if owners.is_explicit else ids


def positions_of(owners: Owners, table: ShardedTable, ids: jax.Array) -> jax.Array:
    """Returns the positions of ids, `[n]`, padded and sharded as by `_shard_ids`."""
    if table.layout.is_arithmetic:
        return _shard_ids(owners, owners.height, table.position(ids))
    # Each device computes its own positions. For a search in constants, at ids that are
    # constants, XLA's partitioner makes a program that jaxlib 0.7 cannot run.
    spec, ids = owners.batch_spec, _shard_ids(owners, -1, ids)
    return owners.shard_map(table.position, ids, in_specs=(spec,), out_specs=spec)


# ------------------------------------------------------------------ value_and_grad


@dataclasses.dataclass(frozen=True)
class ReadKind:
    """The static part of a read of sharded rows; builds the gradient of its table.

    Args:
      owners: which device owns which rows.
      slots: C, of the exchange; 0 if each device read its own rows.
      here: the number of ids that a device reads.
    """

    owners: Owners
    slots: int
    here: int = 0

    def moved(self) -> ReadKind:
        """Returns the kind of the same reads if slots may be on other devices."""
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
        """Makes a table's gradient from all its reads; slots stay on their devices."""
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
    """Reshapes `[turns, n, ...]` to `[turns * n, ...]`; moves no data over devices."""
    if x.shape[0] == 1:
        # Without the constraint XLA may gather the result of a jitted gradient.
        return constrain(x[0], owners.mesh, *owners.batch_spec)
    merge = lambda part: indexing.merge_axes(part, 2)
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
    if not ref.has_all_rows:
        return NotImplemented
    rows = _exchange.read_rows_p.bind(
        ref.array, positions, owners=owners, slots=slots, batched=batched
    )
    kind = ReadKind(owners, slots, positions.size // owners.devices)
    shape = positions.shape
    # A batch and the ids become one axis, whose parts are on other devices.
    kind = kind.moved() if batched else kind
    spec, transpose = (), lambda cotangent: cotangent
    if batched:
        # Explicit sharding keeps the batch and the ids from becoming one axis.
        spec, transpose = explicit_spec(rows), replicate
        rows, positions = (replicate(x) if spec else x for x in (rows, positions))
    rows = ctx.combine(ref, positions, rows, transpose, kind=kind)
    rows = reshard(rows, spec, kind.owners.mesh)
    if ref.steps:
        rows = ref.view(rows.reshape(positions.size, *rows.shape[len(shape) :]))
        rows = rows.reshape(*shape, *rows.shape[1:])
    return rows


# ------------------------------------------------------------------ as an array


def forward(fun: Callable[P, T]) -> Callable[P, T]:
    """Makes JAX's functions read rows of ShardedTables outside of `value_and_grad`.

    `jnp.take(table, ids, axis=0)`, and with it the embedding layers of flax, work on a
    ShardedTable inside of `sparsejax.value_and_grad`. `forward` is for calls outside of
    it: evaluation and serving. (`table[ids]`, `sparsejax.lookup`, `embedding_bag` and
    the layers of `sparsejax.nn` need neither.) Combine it with `jit` as
    `jax.jit(forward(fun))`.

    Args:
      fun: a function of trees of arrays and ShardedTables, or that closes over them. It
        is traced as under `jit`, except that arguments which are not arrays (ints,
        strings, functions) are passed through unchanged.

    Returns:
      A function of the same arguments that returns the same.

    Raises:
      TypeError: `fun` is not a function.
      DensifyError: it uses a whole table. The message shows the operation and its
        source line.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.arange(6.0).reshape(3, 2), mesh, "x")
      >>> take = lambda table, ids: jnp.take(table, ids, axis=0)
      >>> sj.parallel.forward(take)(table, jnp.array([2, 0]))
      Array([[4., 5.],
             [0., 1.]], dtype=float32)

    References:
      Quax, `quaxify`, which lets functions of JAX take types of array that are not its.
    """
    check_fun(fun)
    call: Callable[..., Any] = fun

    @functools.wraps(fun)
    def forward_fun(*args: P.args, **kwargs: P.kwargs) -> Any:
        return run_forward(call, *args, **kwargs)

    return forward_fun


@dataclasses.dataclass(frozen=True)
class _ShardedReader(RowReader):
    """Reads rows by `all_to_all`; `static` are the fields of the table."""

    static: tuple[Any, ...]

    def table(self, values: Any) -> ShardedTable:
        """Returns the table with these values."""
        return ShardedTable.tree_unflatten(self.static, (values,))

    def read(
        self, ctx: Any, ref: TableRef, ids: jax.Array, counts: jax.Array, nearest: bool
    ) -> jax.Array:
        """Implements `RowReader.read`."""
        table = self.table(ref.array)
        check_table(table)
        none = _arguments.scalar(table.height, ids)
        counted = jnp.where(counts, ids, none)
        if nearest:
            last = _arguments.scalar(table.height - 1, ids)
            ids = jnp.clip(ids, _arguments.scalar(0, ids), last)
        else:
            ids = counted

        def record(rows, kind):
            positions = positions_of(kind.owners, table, counted)
            inside = indexing.in_range(positions, kind.owners.height)
            return ctx.plant(ref, rows, positions, inside, kind=kind)

        return _read(table, put_on_mesh(table, ids), record)

    def bag_sum(
        self, ctx: Any, ref: TableRef, ids: jax.Array, rest: Sequence[Any], spec: Any
    ) -> jax.Array:
        """Implements `RowReader.bag_sum`."""
        weights, segment_ids = spec.weights(rest), spec.segment_ids(rest)
        segments = None if segment_ids is None else (segment_ids, spec.num_bags)

        def read_rows(ids, skip):
            rows = ctx.read(ref, ids, drop=False)
            return rows.astype(indexing.accumulator_dtype(rows.dtype))

        owners = owners_of(self.table(ref.array))
        skip = ~indexing.in_range(ids, ref.height)
        return _bags.reduce_bags(owners, read_rows, ids, skip, weights, segments, "sum")

    def refuse(self, ref: TableRef, use: str) -> NoReturn:
        """Implements `RowReader.refuse`."""
        table = self.table(ref.array)
        raise DensifyError(
            f"sparsejax: {use}, and so needs the whole of a ShardedTable of shape "
            f"{table.shape}, whose rows lie on {table.num_shards} devices. Read rows "
            "there: table[ids], jnp.take(table, ids, axis=0), sparsejax.lookup or "
            "sparsejax.embedding_bag. The rows with the highest scores are "
            "sparsejax.parallel.top_k(query, table, k). For the whole table on every "
            "device write table.to_dense()."
        )


@register_rule(sharded_table_p, of_arrays=True)
def _view_rule(ctx: RuleContext, values: Any, *, static: tuple[Any, ...]) -> Any:
    view = values
    if not isinstance(view, TableRef):
        view = TableRef.of_array(jnp.asarray(values))
    elif view.steps or view.row_axes != (0,) or not view.has_all_rows:
        return NotImplemented  # a view of a part of the table, or of other rows
    shape = tuple(ctx.eqn.outvars[0].aval.shape)
    return dataclasses.replace(view, shape=shape, reader=_ShardedReader(static))
