"""Reading a HotColdTable: hot rows from the device itself, cold rows from their owners.

An id is looked up in the ascending hot ids. If it is there, its row is read from the
replicated hot rows; the exchange with owners gets an id out of range instead, which
requests nothing.

Reads of hot rows are one primitive, `read_hot_rows`, and its transpose is another,
`add_hot_rows`, which sums over devices. In a walk, the gradient of all reads of a table
is packaged at once: one all-reduce of the sums of its K rows, and one that counts the
devices that read each of them, in as few bytes as hold the count. So it is the same on
all devices, bit for bit, and costs the same whatever the number of ids.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from sparsejax import _arguments
from sparsejax._rows import indexing
from sparsejax.parallel import _exchange
from sparsejax.parallel._exchange import Metrics, Owners
from sparsejax.parallel._hot_passes import HotRows
from sparsejax.parallel._hot_rows import HotColdTable, HotIds
from sparsejax.parallel._linear_reads import linear_reads
from sparsejax.parallel._lookup import (
    like_ids,
    no_rows,
    owners_of,
    positions_of,
    read_ids,
    record_read,
    shard_ids,
    slots_of,
)
from sparsejax.transform.interpreter import RuleContext, register_rule
from sparsejax.transform.table import TableRef


@read_ids.register
def _read_ids(
    table: HotColdTable, call: str, ids: jax.Array, capacity: int | str | None
) -> tuple[jax.Array, Metrics]:
    return read(call, table, ids, capacity)


def read(
    call: str,
    table: HotColdTable,
    ids: jax.Array,
    capacity: int | str | None,
    record: Callable[..., tuple[jax.Array, jax.Array]] | None = None,
) -> tuple[jax.Array, Metrics]:
    """The rows of ids of any shape; zeros for ids out of range.

    Args:
      call: the public call, for errors.
      table: whose parts are arrays.
      ids: integers.
      capacity: as in `sparsejax.parallel.lookup`.
      record: `f(hot, cold, owners, slots, divide)` returns the rows `[n, ...]` that
        were read, recorded as reads; `divide(ids)` gives the places of the ids that
        were read among the hot rows, and their positions in the cold table.
    """
    owners = owners_of(table)
    slots = slots_of(call, owners, table, ids, capacity)
    if not ids.size:
        return no_rows(table, ids)

    def divide(ids):
        flat = shard_ids(owners, table.height, ids)
        places, rest = _divide(owners, table.hot_ids, table.height, flat)
        return places, positions_of(owners, table.cold, rest)

    places, positions = divide(ids)
    cold, metrics = _exchange.read_rows(owners, slots, table.cold.values, positions)
    hot = _read_hot(owners, jnp.asarray(table.hot), places)
    if record is not None:
        hot, cold = record(hot, cold, owners, slots, divide)
    is_hot = indexing.append_axes(places < np.int32(table.num_hot), hot.ndim)
    return like_ids(owners, jnp.where(is_hot, hot, cold), ids), metrics


# Jitted, because outside of `jit` a `shard_map` runs operation by operation.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _divide(
    owners: Owners, hot_ids: HotIds, height: int, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """For each id its place among the hot rows, else K; and the id, but V if hot."""
    known = hot_ids.ids.astype(ids.dtype)

    def body(ids):
        at = jnp.searchsorted(known, ids).astype(jnp.int32)
        at = jnp.minimum(at, np.int32(len(known) - 1))
        is_hot = jnp.asarray(known)[at] == ids
        places = jnp.where(is_hot, at, np.int32(len(known)))
        return places, jnp.where(is_hot, _arguments.scalar(height, ids), ids)

    spec = owners.batch_spec
    return owners.shard_map(body, ids, in_specs=(spec,), out_specs=(spec, spec))


# ------------------------------------------------------------------ two primitives


def _read(hot, places, *, owners, height):
    del height
    specs = PartitionSpec(), owners.batch_spec
    out = owners.batch_spec
    return (
        owners.shard_map(
            indexing.take_rows, hot, places, in_specs=specs, out_specs=out
        ),
    )


def _add(cotangent, places, *, owners, height):
    def body(cotangent, places):
        return _sum_here(height, [places], [cotangent])

    total = owners.shard_map(
        lambda *args: lax.psum(body(*args), owners.mesh.axis_names),
        cotangent,
        places,
        in_specs=(owners.batch_spec,) * 2,
        out_specs=PartitionSpec(),
    )
    return total.astype(cotangent.dtype)


def _sum_here(
    height: int, places: Sequence[jax.Array], values: Sequence[jax.Array]
) -> jax.Array:
    """Sums `[K, ...]` of this device's rows `[n, ...]` by their places."""
    wide = indexing.accumulator_dtype(values[0].dtype)
    total = jnp.zeros((height, *values[0].shape[1:]), wide)
    for at, rows in zip(places, values):
        total = indexing.add_rows(total, at, rows.astype(wide))
    return total


_read_hot_p, _ = linear_reads("hot_rows", _read, _add)


def _read_hot(owners: Owners, hot: jax.Array, places: jax.Array) -> jax.Array:
    """Rows `[n, ...]` at places `[n]`, sharded as batches are; zeros for K."""
    static = dict(owners=owners, height=hot.shape[0], batched=())
    return _read_hot_p.bind(hot, places, **static)[0]


# ------------------------------------------------------------------ value_and_grad


@dataclasses.dataclass(frozen=True)
class HotKind:
    """The static part of a read of hot rows; builds their gradient.

    Args:
      owners: which device owns which cold rows; batches are sharded over its devices.
      height: K.
    """

    owners: Owners
    height: int

    def moved(self) -> HotKind:
        """The same: of hot rows every device has all."""
        return self

    def package(
        self,
        row: Sequence[int],
        dtype: Any,
        ids: Sequence[jax.Array],
        cotangents: Sequence[jax.Array],
        sites: Sequence[Any],
    ) -> HotRows:
        """The gradient of all reads, equal on all devices; untouched rows are empty."""
        del row, sites
        rows, values = _sum_reads(self, list(ids), list(cotangents))
        return HotRows.make(rows, values.astype(dtype), self.height, self.owners)


def count_dtype(owners: Owners) -> Any:
    """The smallest integers that can count the devices."""
    return next(
        np.dtype(kind)
        for kind in (np.int8, np.int16, np.int32)
        if owners.devices <= np.iinfo(kind).max
    )


@functools.partial(jax.jit, static_argnums=0)
def _sum_reads(
    kind: HotKind, places: Sequence[jax.Array], cotangents: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Rows `[K]` and values `[K, ...]` of the gradient."""
    owners, height, count = kind.owners, kind.height, len(places)

    def body(*args):
        at = [x.reshape(-1) for x in args[:count]]
        pairs = zip(args[count:], args[:count])
        values = [x.reshape(-1, *x.shape[places.ndim :]) for x, places in pairs]
        read = jnp.zeros((height,), bool)
        for x in at:
            read = indexing.set_rows(read, x, jnp.ones(x.shape, bool))
        sums = _sum_here(height, at, values), read.astype(count_dtype(owners))
        return tuple(lax.psum(x, owners.mesh.axis_names) for x in sums)

    # A loop adds a leading axis, its length.
    loops = [(None,) * (x.ndim - 1) for x in places]
    specs = tuple(PartitionSpec(*loop, *owners.batch_spec) for loop in loops)
    total, readers = owners.shard_map(
        body,
        *places,
        *cotangents,
        in_specs=(*specs, *specs),
        out_specs=(PartitionSpec(), PartitionSpec()),
    )
    touched = readers > 0
    rows = jnp.where(touched, np.arange(height, dtype=np.int32), np.int32(height))
    return rows, indexing.zero_unless(touched, total)


@register_rule(_read_hot_p)
def _read_rule(
    ctx: RuleContext,
    ref: Any,
    places: jax.Array,
    *,
    owners: Owners,
    height: int,
    batched: tuple[bool, ...],
) -> Any:
    if not isinstance(ref, TableRef) or ref.row_axis != 0 or any(batched):
        return NotImplemented
    if not ref.has_all_rows:
        return NotImplemented
    static = dict(owners=owners, height=height, batched=batched)
    (rows,) = _read_hot_p.bind(ref.array, places, **static)
    kind = HotKind(owners, height)
    return [record_read(ctx, ref, rows, places, kind, batched)]
