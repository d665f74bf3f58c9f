"""The exchange of rows between devices: who owns which, and how they travel.

A table has N parts along some axes of a mesh. Over the other axes the parts are
replicated, and a batch is sharded over all axes. So a device exchanges rows with the N
owners along the table's axes, and gradients are also summed over the replicas.

Each device has positions `[n]` whose rows it reads, or has gradients for. Sorted and
without duplicates they are grouped by owner, since the owner is `position // R`. In one
*round* of `all_to_all` every device sends C of them to each owner. If a device requests
more from some owner, more rounds follow, the same number on every device:

    rounds = ceil(most rows that any device requests from any owner / C)

So C affects speed, never results. Gradients that are merged take two passes of rounds:
first the ids, which tell the owner its distinct rows, then the values, each added to
the row of its id. Gradients that are applied at once take one, in which each round
completes a range of the owner's rows (`receive_by_ranges`). Either way a row is
complete before it is used, however many rounds its parts took.

A read is linear in the table. It is one primitive, `read_sharded_rows`, and its
transpose is another, `add_sharded_rows`. Each is the transpose of the other, so that
derivatives of any order consist of these two. Under `vmap` all arrays get a leading
axis. For each such axis, outermost first, the static `batched` says whether each batch
element has a table of its own, or all share one table.

With a `wire_dtype` of 16 bits, rows and merged gradients are rounded to it, sent as
its bits (`send_rows`), and have their own dtype again on arrival. So XLA cannot widen
the collective, as it does on CPUs, and owners sum in their own dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sparsejax import _arguments, _compat
from sparsejax._lookup.lookup import read_rows as _read_local_rows
from sparsejax._rows import indexing, merge


# ------------------------------------------------------------------ owners


@dataclasses.dataclass(frozen=True)
class Owners:
    """The owner of each row; static.

    Args:
      mesh: the mesh.
      axes: the mesh axes that the rows are sharded over.
      rows: R, the number of rows of each owner.
      wire_dtype: the dtype in which rows are sent; None for their own dtype.
    """

    mesh: Any
    axes: tuple[str, ...]
    rows: int
    wire_dtype: Any = None

    @property
    def count(self) -> int:
        """N, the number of owners."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    @property
    def height(self) -> int:
        """The number of positions; as a position it is out of range."""
        return self.count * self.rows

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The other axes of the mesh: over them the table is replicated."""
        return tuple(name for name in self.mesh.axis_names if name not in self.axes)

    @property
    def devices(self) -> int:
        """The number of devices; a batch is sharded over all of them."""
        return math.prod(self.mesh.shape.values())

    @property
    def table_spec(self) -> PartitionSpec:
        """How tables are sharded, and everything else that the owners hold."""
        return PartitionSpec(self.axes)

    @property
    def batch_spec(self) -> PartitionSpec:
        """How ids and the rows read for them are sharded."""
        return PartitionSpec((*self.replica_axes, *self.axes))

    @property
    def is_explicit(self) -> bool:
        """True if the types of arrays over this mesh carry their sharding."""
        return any(kind == AxisType.Explicit for kind in self.mesh.axis_types)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Returns `spec` over this mesh."""
        return NamedSharding(self.mesh, spec)

    def shard_map(
        self,
        body: Callable,
        *args: Any,
        in_specs: tuple[PartitionSpec, ...],
        out_specs: Any,
        check_vma: bool = False,
    ) -> Any:
        """Runs `body` on each device's part of `args`.

        Replicas stay equal because they add in the same order. JAX's types cannot
        express that, so they are not checked by default.
        """
        if self.is_explicit:
            pairs = zip(args, in_specs)
            args = tuple(
                jax.sharding.reshard(x, self.sharding(spec)) for x, spec in pairs
            )
        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=check_vma,
        )(*args)

    def slots(self, n: int, capacity: int | None) -> int:
        """Returns C for `n` ids a device: `capacity`, or 1.25 times an even share."""
        if capacity is None:
            capacity = math.ceil(1.25 * n / self.count) + 8
        return max(1, min(n, self.rows, capacity))

    def max_received(self, slots: int, positions: jax.Array) -> int:
        """Returns the most distinct rows that an owner can receive for positions."""
        here = positions.size // self.devices
        senders = self.devices if slots else self.devices // self.count
        return max(1, min(self.rows, senders * min(here, self.rows)))

    # -- for the body of a `shard_map` -------------------------------------------

    def to_positions(self, rows: jax.Array) -> jax.Array:
        """Turns this owner's row numbers into positions; R becomes `height`."""
        wide = _arguments.index_dtype(self.height, rows.dtype)
        first = lax.axis_index(self.axes).astype(wide) * np.array(self.rows, wide)
        none = rows >= _arguments.scalar(self.rows, rows)
        return jnp.where(none, np.array(self.height, wide), rows.astype(wide) + first)

    def to_own_rows(self, positions: jax.Array) -> jax.Array:
        """Turns positions into this owner's row numbers; R for rows of other owners."""
        first = lax.axis_index(self.axes).astype(positions.dtype)
        rows = positions - first * _arguments.scalar(self.rows, positions)
        is_own = indexing.in_range(rows, self.rows)
        return jnp.where(is_own, rows, _arguments.scalar(self.rows, rows))

    def all_to_all(self, x: jax.Array, wire_dtype: Any = None) -> jax.Array:
        """`x [N, ...]`: `x[j]` goes to owner j, and comes back from it."""
        return x if self.count == 1 else send_rows(x, self.axes, wire_dtype)

    def gather_replicas(self, x: jax.Array, wire_dtype: Any = None) -> jax.Array:
        """Gathers `x [N, ...]` of the devices that own the same rows, by replica."""
        axes = self.replica_axes
        if not axes:
            return x
        if wire_dtype is None:
            return lax.all_gather(x, axes, tiled=True)
        bits = lax.all_gather(_as_bits(x, wire_dtype), axes, tiled=True)
        return _from_bits(bits, wire_dtype, x.dtype)


# ------------------------------------------------------------------ metrics


class Metrics(NamedTuple):
    """Rounds, rows and overflow of an exchange, over all devices.

    Args:
      rounds: int32, the number of rounds.
      rows: int32, distinct rows requested, summed over the requesting devices.
      largest: int32, the most rows that any device requested from any owner; with this
        capacity one round would have sufficed.
      overflow: int32, rows that did not fit into the first round; no row is lost.
      bytes: float32, bytes that one device sends in all rounds.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.ones((9, 2)), mesh, "x", capacity=2)
      >>> found = sj.parallel.exchange_metrics(table, jnp.array([1, 2, 3, 1]))
      >>> int(found.rounds), int(found.largest)
      (2, 3)
    """

    rounds: jax.Array
    rows: jax.Array
    largest: jax.Array
    overflow: jax.Array
    bytes: jax.Array


def measure(
    owners: Owners, slots: int, positions: jax.Array, dtype: Any, row: tuple[int, ...]
) -> Metrics:
    """Returns the cost of exchanging the rows at `positions`, without the exchange."""

    def body(positions):
        rounds = Rounds.of(owners, slots, positions)
        overflow = jnp.maximum(rounds.size - np.int32(slots), np.int32(0))
        sums = jnp.stack([jnp.sum(x, dtype=jnp.int32) for x in (rounds.size, overflow)])
        sums = lax.psum(sums, owners.mesh.axis_names)
        return jnp.stack([rounds.largest, *sums])

    counts = owners.shard_map(
        body, positions, in_specs=(owners.batch_spec,), out_specs=PartitionSpec()
    )
    largest, rows, overflow = (counts[k] for k in range(3))
    rounds = (largest + np.int32(slots - 1)) // np.int32(slots)
    # In each round ids go one way and rows the other.
    sent_as = dtype if owners.wire_dtype is None else owners.wire_dtype
    slot_bytes = positions.dtype.itemsize + math.prod(row) * jnp.dtype(sent_as).itemsize
    round_bytes = np.float32((owners.count - 1) * slots * slot_bytes)
    sent = rounds.astype(jnp.float32) * round_bytes
    return Metrics(rounds, rows, largest, overflow, sent)


# ------------------------------------------------------------------ one device's side


class Rounds(NamedTuple):
    """The rounds in which a device sends its distinct positions to their owners.

    `sent` in the methods is int32, the positions that went out in earlier rounds: one
    number, or `[N]`.

    Args:
      owners, slots: static.
      rows: `[u]`, the distinct positions, ascending, then `height`.
      first: int32 `[N]`, the start of each owner's positions in `rows`.
      size: int32 `[N]`, their number.
      slot: int32 `[n]`, the place of each of the device's positions in `rows`.
      largest: int32, the largest `size` on any device.
    """

    owners: Owners
    slots: int
    rows: jax.Array
    first: jax.Array
    size: jax.Array
    slot: jax.Array
    largest: jax.Array

    @classmethod
    def of(cls, owners: Owners, slots: int, positions: jax.Array) -> Rounds:
        """Groups this device's positions `[n]` by their owner."""
        capacity = max(1, min(positions.size, owners.height))
        rows, slot, _ = merge.merge_plan(positions, owners.height, capacity)
        starts = np.arange(owners.count + 1, dtype=np.int64) * owners.rows
        edges = jnp.searchsorted(rows, starts.astype(rows.dtype)).astype(jnp.int32)
        size = edges[1:] - edges[:-1]
        largest = lax.pmax(jnp.max(size), owners.mesh.axis_names)
        return cls(owners, slots, rows, edges[:-1], size, slot, largest)

    @property
    def is_one(self) -> bool:
        """True if one round always suffices."""
        return self.slots >= min(self.slot.size, self.owners.rows)

    def _places(self, sent: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the places in `rows` of a round's slots `[N, C]`, and a mask."""
        slot = np.arange(self.slots, dtype=np.int32).reshape(1, -1)
        within = jnp.reshape(sent, (-1, 1)) + slot
        return self.first.reshape(-1, 1) + within, within < self.size.reshape(-1, 1)

    def ids(self, sent: Any) -> jax.Array:
        """Returns the owners' row numbers `[N, C]` of one round; R in empty slots."""
        at, used = self._places(sent)
        starts = np.arange(self.owners.count).reshape(-1, 1) * self.owners.rows
        ids = indexing.take_rows(self.rows, at) - starts.astype(self.rows.dtype)
        return jnp.where(used, ids, _arguments.scalar(self.owners.rows, ids))

    def send_ids(self, sent: Any) -> jax.Array:
        """Sends one round's ids; returns the own rows that were requested, `[N, C]`."""
        return self.owners.all_to_all(self.ids(sent))

    def send_values(self, values: jax.Array, sent: Any) -> jax.Array:
        """Sends one round's values; returns the values of own rows, `[N, C, ...]`."""
        at, used = self._places(sent)
        none = np.int32(values.shape[0])
        rows = indexing.take_rows(values, jnp.where(used, at, none))
        return self.owners.all_to_all(rows, self.owners.wire_dtype)

    def sum_duplicates(self, values: jax.Array) -> jax.Array:
        """Sums `values [n, ...]` for each distinct position, `[u, ...]`."""
        zeros = jnp.zeros((self.rows.size, *values.shape[1:]), values.dtype)
        return indexing.add_rows(zeros, self.slot, values)

    def run(self, body: Callable, start: Any) -> Any:
        """Runs `carry = body(sent, carry)` for each round, `sent` one number."""
        if self.is_one:
            return body(np.int32(0), start)
        # `while_loop`, since the number of rounds depends on the batch.
        more = lambda carry: carry[0] < self.largest
        step = lambda carry: (carry[0] + np.int32(self.slots), body(*carry))
        return lax.while_loop(more, step, (jnp.zeros((), jnp.int32), start))[1]


def send_rows(x: jax.Array, axes: tuple[str, ...], wire_dtype: Any) -> jax.Array:
    """`x [N, ...]`: `x[j]` goes to device j along `axes`, and comes back from it.

    Args:
      x: floats; integers if `wire_dtype` is None.
      axes: of the mesh.
      wire_dtype: the dtype in which `x` is sent, its own part included; None for the
        dtype of `x`.
    """
    if wire_dtype is None:
        return lax.all_to_all(x, axes, 0, 0, tiled=True)
    return _send_narrow_p.bind(x, names=axes, wire_dtype=wire_dtype)


def _as_bits(x: jax.Array, wire_dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x.astype(wire_dtype), jnp.uint16)


def _from_bits(bits: jax.Array, wire_dtype: Any, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(bits, wire_dtype).astype(dtype)


def _send_narrow(x: jax.Array, *, names: tuple[str, ...], wire_dtype: Any) -> jax.Array:
    bits = lax.all_to_all(_as_bits(x, wire_dtype), names, 0, 0, tiled=True)
    return _from_bits(bits, wire_dtype, x.dtype)


def _send_narrow_vmap(bind, args, axes, **static):
    # Behind the axis of devices, so that the same axis is divided.
    x = jnp.moveaxis(args[0], axes[0], 1)
    return jnp.moveaxis(bind(x, **static), 1, 0)


# Its own transpose. JAX has no derivative of the bits of a number.
_send_narrow_p = _compat.primitive(
    "send_rows",
    _send_narrow,
    {},
    transposes={
        0: lambda cotangent, like, _, **static: _send_narrow_p.bind(cotangent, **static)
    },
    batch=_send_narrow_vmap,
)


# ------------------------------------------------------------------ reading rows


def read_rows(
    owners: Owners, slots: int, values: jax.Array, positions: jax.Array
) -> jax.Array:
    """Reads rows of a sharded table.

    Args:
      owners: static.
      slots: static; 0 if each position is in the part of the device that has it, so
        that nothing needs to be sent.
      values: `[N * R, ...]`, sharded as tables are.
      positions: `[n]`, sharded as batches are, n a multiple of the devices.

    Returns:
      Rows `[n, ...]`; zeros for the position `N * R`.
    """
    if not _arguments.is_concrete(positions):
        # `jit` finds the devices of a program in its shard_maps, but does not look
        # inside primitives, so this shard_map stays outside.
        spec = owners.batch_spec
        positions = owners.shard_map(
            lambda x: x, positions, in_specs=(spec,), out_specs=spec
        )
    return read_rows_p.bind(values, positions, owners=owners, slots=slots, batched=())


def rearrange(
    owners: Owners,
    values: jax.Array,
    rows: int,
    position_of: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Puts a sharded table's rows in another order, with no whole table anywhere.

    Args:
      owners: static.
      values: `[N * R, ...]`, sharded as tables are.
      rows: the number of rows of each owner in the result, R'.
      position_of: the positions in `values` of the rows `[0, N * R')` of the result;
        `N * R` for a row of zeros.

    Returns:
      `[N * R', ...]`, sharded as tables are.
    """
    slots, dtype = owners.slots(rows, None), _arguments.index_dtype(owners.height)
    dtype = _arguments.index_dtype(owners.count * rows, dtype)
    owners = dataclasses.replace(owners, wire_dtype=None)  # nothing is rounded

    def body(values):
        first = lax.axis_index(owners.axes).astype(dtype) * np.array(rows, dtype)
        positions = position_of(first + lax.iota(dtype, rows))
        return _read_here(owners, slots, values, positions)

    spec = owners.table_spec
    return owners.shard_map(body, values, in_specs=(spec,), out_specs=spec)


def _read_here(
    owners: Owners, slots: int, values: jax.Array, positions: jax.Array
) -> jax.Array:
    """Returns the rows at this device's positions, in the body of a `shard_map`."""
    if not slots:
        return _read_own_rows(values, owners.to_own_rows(positions))
    row = values.shape[1:]
    rounds = Rounds.of(owners, slots, positions)
    # Each position is answered in one round, at one place of that round.
    owner = positions // _arguments.scalar(owners.rows, positions)
    is_valid = owner < _arguments.scalar(owners.count, owner)
    owner = jnp.where(is_valid, owner, _arguments.scalar(0, owner)).astype(jnp.int32)
    within = rounds.slot - rounds.first[owner]
    slot = within % np.int32(slots)
    place = owner * np.int32(slots) + slot
    sent_before = jnp.where(is_valid, within - slot, np.int32(-1))

    def one_round(sent, rows):
        answers = _read_own_rows(values, rounds.send_ids(sent))
        answers = owners.all_to_all(answers, owners.wire_dtype)
        answers = answers.reshape(owners.count * slots, *row)
        now = sent_before == sent
        at = jnp.where(now, place, np.int32(answers.shape[0]))
        new = indexing.take_rows(answers, at)
        if rows is None:
            return new
        return jnp.where(indexing.append_axes(now, new.ndim), new, rows)

    start = None
    if not rounds.is_one:
        start = jnp.zeros((positions.size, *row), values.dtype)
    return rounds.run(one_round, start)


def _read_own_rows(values: jax.Array, ids: jax.Array) -> jax.Array:
    """Reads rows `[N, C, ...]` that this device owns, zeros for R."""
    flat = ids.reshape(-1)
    used = indexing.in_range(flat, values.shape[0])
    rows = indexing.zero_unless(used, _read_local_rows(values, flat))
    return rows.reshape(*ids.shape, *values.shape[1:])


def _add(
    cotangent: jax.Array, positions: jax.Array, *, owners: Owners, slots: int
) -> jax.Array:
    """Transposes the read: sums cotangents of rows into a table `[N * R, ...]`."""
    row, wide = cotangent.shape[1:], indexing.accumulator_dtype(cotangent.dtype)

    def body(cotangent, positions):
        table = jnp.zeros((owners.rows, *row), wide)
        if not slots:
            rows = owners.to_own_rows(positions)
            return total(indexing.add_rows(table, rows, cotangent.astype(wide)))
        rounds = Rounds.of(owners, slots, positions)
        merged = rounds.sum_duplicates(cotangent.astype(wide))

        def one_round(sent, table):
            requested = rounds.send_ids(sent)
            return indexing.add_rows(table, requested, rounds.send_values(merged, sent))

        return total(rounds.run(one_round, table))

    def total(table):
        table = lax.psum(table, owners.replica_axes) if owners.replica_axes else table
        return table.astype(cotangent.dtype)

    return owners.shard_map(
        body,
        cotangent,
        positions,
        in_specs=(owners.batch_spec, owners.batch_spec),
        out_specs=owners.table_spec,
    )


# ------------------------------------------------------------------ two primitives


def _batched_read(values, positions, *, owners, slots, batched):
    def read(values, positions):
        spec = owners.batch_spec
        here = functools.partial(_read_here, owners, slots)
        specs = owners.table_spec, spec
        return owners.shard_map(here, values, positions, in_specs=specs, out_specs=spec)

    for own_table in reversed(batched):
        read = jax.vmap(read, in_axes=(0 if own_table else None, 0))
    return read(values, positions)


def _batched_add(cotangent, positions, *, batched, **static):
    add = functools.partial(_add, **static)
    for _ in batched:
        add = jax.vmap(add)
    shared = tuple(k for k, own_table in enumerate(batched) if not own_table)
    tables = add(cotangent, positions)
    return jnp.sum(tables, shared) if shared else tables


def _read_vmap(bind, args, axes, *, batched, **static):
    own_table = axes[0] is not None
    one = 0 if own_table else 1  # the first argument with an axis
    args = [*args[:one], *indexing.batch_in_front(args[one:], axes[one:])]
    return bind(*args, batched=(own_table, *batched), **static)


def _add_vmap(bind, args, axes, *, batched, **static):
    args = indexing.batch_in_front(args, axes)
    return bind(*args, batched=(True, *batched), **static)


read_rows_p = _compat.primitive(
    "read_sharded_rows",
    _batched_read,
    {},
    transposes={0: lambda rows, like, _, *at, **how: add_rows_p.bind(rows, *at, **how)},
    batch=_read_vmap,
)
add_rows_p = _compat.primitive(
    "add_sharded_rows",
    _batched_add,
    {},
    transposes={
        0: lambda table, like, _, *at, **how: read_rows_p.bind(table, *at, **how)
    },
    batch=_add_vmap,
)


# ------------------------------------------------------------------ gradients of rows


def send_to_owners(
    owners: Owners, slots: int, positions: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sends gradients of rows to the owners, which sum them over all devices.

    Args:
      owners, slots: static; no slots if each row is at its owner already.
      positions: `[n]`, `height` for an empty slot, sharded as batches are.
      values: `[n, ...]`.

    Returns:
      `(positions [N * M], values [N * M, ...])`, sharded as tables are: each owner has
      its distinct rows ascending, then empty slots.
    """
    row, dtype = values.shape[1:], values.dtype
    wide = indexing.accumulator_dtype(dtype)
    here = positions.size // owners.devices
    most_sent = max(1, min(here, owners.rows))  # of distinct rows, to one owner
    most_got = owners.max_received(slots, positions)
    length = slots * -(-most_sent // max(1, slots))

    def body(positions, values):
        values = indexing.zero_unless(positions < owners.height, values).astype(wide)
        total = jnp.zeros((most_got, *row), wide)
        if not slots:
            rows, values = _at_this_owner(owners, positions, values)
            rows, slot, _ = merge.merge_plan(rows, owners.rows, most_got)
            total = indexing.add_rows(total, slot, values)
            return owners.to_positions(rows), total.astype(dtype)
        rounds = Rounds.of(owners, slots, positions)
        merged = rounds.sum_duplicates(values)

        def send_ids(sent, got):
            new = rounds.send_ids(sent)
            return lax.dynamic_update_slice(got, new, (np.int32(0), sent))

        none = _arguments.scalar(owners.rows, positions)
        got = jnp.full((owners.count, length), none, positions.dtype)
        got = rounds.run(send_ids, got)
        got = owners.gather_replicas(got).reshape(-1)
        rows, slot, _ = merge.merge_plan(got, owners.rows, most_got)
        slot = slot.reshape(-1, length)

        def send_values(sent, total):
            new = rounds.send_values(merged, sent)
            new = owners.gather_replicas(new, owners.wire_dtype)
            at = lax.dynamic_slice_in_dim(slot, sent, slots, 1)
            return indexing.add_rows(total, at, new)

        total = rounds.run(send_values, total)
        return owners.to_positions(rows), total.astype(dtype)

    return owners.shard_map(
        body,
        positions,
        values,
        in_specs=(owners.batch_spec, owners.batch_spec),
        out_specs=(owners.table_spec, owners.table_spec),
    )


def receive_by_ranges(
    owners: Owners,
    slots: int,
    positions: jax.Array,
    values: jax.Array,
    apply: Callable[[jax.Array, jax.Array, Any], Any],
    carry: Any,
) -> Any:
    """Sends gradients of rows to their owners, which apply them range by range.

    For the body of an `owners.shard_map`. In each round a device sends its next C rows
    to each owner, in ascending order. An owner applies the rows up to the smallest
    row at which any device stopped, because it has all parts of these rows. So a row is
    applied once, however its parts are distributed, and an owner holds no more than
    the rows of a round. The rows above are sent again in the next round. No division
    of the rows into ranges of at most C from each device has fewer ranges.

    Args:
      owners, slots: static.
      positions: `[n]` of this device, `height` for an empty slot.
      values: `[n, ...]`.
      apply: `carry = apply(rows [m], values [m, ...], carry)`; `rows` are
        this owner's row numbers with all their duplicates, and R for an empty slot;
        ranges ascend.
      carry: any tree of arrays.
    """
    wide = indexing.accumulator_dtype(values.dtype)
    values = indexing.zero_unless(positions < owners.height, values).astype(wide)
    if not slots:
        return apply(*_at_this_owner(owners, positions, values), carry)
    rounds = Rounds.of(owners, slots, positions)
    merged = rounds.sum_duplicates(values)
    last_row = _arguments.scalar(owners.rows - 1, positions)
    starts = (np.arange(owners.count) * owners.rows).astype(positions.dtype)

    def one_round(sent, carry):
        ids = rounds.ids(sent)
        # The last id is sent as its complement if the device has more for this owner.
        more = sent + np.int32(slots) < rounds.size
        ids = ids.at[:, -1].set(jnp.where(more, ~ids[:, -1], ids[:, -1]))
        got = owners.gather_replicas(owners.all_to_all(ids))
        rows = rounds.send_values(merged, sent)
        rows = owners.gather_replicas(rows, owners.wire_dtype)
        stops = got[:, -1]
        until = jnp.min(jnp.where(stops < 0, ~stops, last_row))
        got = jnp.where(got < 0, ~got, got)
        got = jnp.where(got <= until, got, _arguments.scalar(owners.rows, got))
        carry = apply(got.reshape(-1), indexing.merge_axes(rows, 2), carry)
        until = lax.all_gather(until, owners.axes)
        sent = jnp.searchsorted(rounds.rows, starts + until, side="right")
        return jnp.any(until < last_row), sent.astype(jnp.int32) - rounds.first, carry

    sent = jnp.zeros((owners.count,), jnp.int32)
    if rounds.is_one:
        return one_round(sent, carry)[2]
    return lax.while_loop(
        lambda state: state[0],
        lambda state: one_round(*state[1:]),
        (jnp.array(True), sent, carry),
    )[2]


def _at_this_owner(
    owners: Owners, positions: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the owner's row numbers and values, replicas' too; merges nothing."""
    rows = owners.to_own_rows(positions)
    return owners.gather_replicas(rows), owners.gather_replicas(
        values, owners.wire_dtype
    )
