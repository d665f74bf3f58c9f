"""Rows to and from their owners: what each device does, inside of a `shard_map`.

Each device has positions `[n]` that it wants rows of, or has gradients for. Distinct
and ascending they lie owner by owner, since the owner is `position // R`. From each
owner's part C slots go out in one *round* of `all_to_all`; where some owner's part is
longer there are further rounds, as many on every device, until all has gone through:

    rounds = ceil(longest part of any device / C)

So C decides about speed, never about results. Gradients go in two passes of rounds:
ids first, from which the owner knows its distinct rows, then values, which are added to
the row of their id. A row is therefore whole before it is used, however many rounds its
parts took.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from sparsejax import _arguments
from sparsejax._lookup.read_rows import read_rows
from sparsejax._rows import indexing
from sparsejax.parallel._owners import Metrics, Owners, no_metrics, round_bytes


class _Parts(NamedTuple):
    """One device's distinct positions, cut into the owners' parts."""

    rows: jax.Array  # [u], ascending, then `height`
    first: jax.Array  # int32[N], where each owner's part begins
    size: jax.Array  # int32[N], and how long it is
    slot: jax.Array  # int32[n], the place of each position in `rows`


# ------------------------------------------------------------------ one device's side


def sort_out(owners: Owners, positions: jax.Array) -> _Parts:
    """The distinct positions, owner by owner."""
    most = max(1, min(positions.size, owners.height))
    rows, slot, _ = indexing.merge_plan(positions, owners.height, most)
    starts = np.arange(owners.count + 1, dtype=np.int64) * owners.rows
    edges = jnp.searchsorted(rows, starts.astype(rows.dtype)).astype(jnp.int32)
    return _Parts(rows, edges[:-1], edges[1:] - edges[:-1], slot)


def rounds_of(owners: Owners, parts: _Parts, slots: int) -> jax.Array:
    """How many rounds all devices need, the same int32 on each."""
    longest = lax.pmax(jnp.max(parts.size), owners.mesh.axis_names)
    return (longest + np.int32(slots - 1)) // np.int32(slots)


def ids_of_round(owners: Owners, parts: _Parts, slots: int, number: Any) -> jax.Array:
    """Row numbers at the owner `[N, C]` that round `number` asks for, R for none."""
    steps = np.arange(slots, dtype=np.int32)
    within = number * np.int32(slots) + steps
    at, named = _round(parts, within)
    starts = np.arange(owners.count).reshape(-1, 1) * owners.rows
    ids = indexing.take_rows(parts.rows, at) - starts.astype(parts.rows.dtype)
    return jnp.where(named, ids, _arguments.scalar(owners.rows, ids))


def values_of_round(parts: _Parts, values: jax.Array, slots: int, number: Any) -> Any:
    """`values [u, ...]` of the ids of round `number`, `[N, C, ...]`."""
    steps = np.arange(slots, dtype=np.int32)
    at, named = _round(parts, number * np.int32(slots) + steps)
    at = jnp.where(named, at, np.int32(values.shape[0]))
    return indexing.take_rows(values, at)


def _round(parts: _Parts, within: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Places in `rows` of the elements `within [C]` of each part, and which exist."""
    within = jnp.reshape(within, (1, -1))
    return parts.first.reshape(-1, 1) + within, within < parts.size.reshape(-1, 1)


def swap(owners: Owners, x: jax.Array) -> jax.Array:
    """`x [N, ...]`: what is for owner j goes there; back comes what others had here."""
    if owners.count == 1:
        return x
    return lax.all_to_all(x, owners.axes, 0, 0, tiled=True)


def repeat_rounds(rounds: Any, single: bool, body: Callable, start: Any) -> Any:
    """`body(number, carry)` for each round; one that is known to suffice, no loop."""
    if single:
        return body(np.int32(0), start)
    # A `while`, not a loop of static length: as many rounds as this batch needs.
    more = lambda carry: carry[0] < rounds
    step = lambda carry: (carry[0] + np.int32(1), body(*carry))
    return lax.while_loop(more, step, (jnp.zeros((), jnp.int32), start))[1]


def _is_single(owners: Owners, n: int, slots: int) -> bool:
    return slots >= min(n, owners.rows)


# ------------------------------------------------------------------ reading


def read(
    owners: Owners, slots: int, values: jax.Array, positions: jax.Array
) -> tuple[jax.Array, Metrics]:
    """Rows `[n, ...]` at `positions`, zeros for `height`, and what it took."""
    content, n = values.shape[1:], positions.size

    def body(values, positions):
        parts = sort_out(owners, positions)
        rounds = rounds_of(owners, parts, slots)
        # The place of each position's answer: its round, and where in it.
        owner = positions // _arguments.scalar(owners.rows, positions)
        named = owner < _arguments.scalar(owners.count, owner)
        owner = jnp.where(named, owner, _arguments.scalar(0, owner)).astype(jnp.int32)
        within = parts.slot - parts.first[owner]
        place = owner * np.int32(slots) + within % np.int32(slots)
        round_of = jnp.where(named, within // np.int32(slots), np.int32(-1))

        def one(number, rows):
            asked = swap(owners, ids_of_round(owners, parts, slots, number))
            answers = _read_own(values, asked)
            answers = swap(owners, answers).reshape(owners.count * slots, *content)
            here = round_of == number
            at = jnp.where(here, place, np.int32(answers.shape[0]))
            got = indexing.take_rows(answers, at)
            if rows is None:
                return got
            return jnp.where(here.reshape(-1, *(1 for _ in content)), got, rows)

        single = _is_single(owners, positions.size, slots)
        start = None if single else jnp.zeros((positions.size, *content), values.dtype)
        rows = repeat_rounds(rounds, single, one, start)
        return rows, _count(owners, parts, slots)

    if not n:
        return jnp.zeros((0, *content), values.dtype), no_metrics()
    batch, table = owners.batch_spec, owners.table_spec
    out = batch, PartitionSpec()
    rows, counts = owners.run(body, values, positions, into=(table, batch), out=out)
    sent = round_bytes(owners, slots, positions.dtype, values.dtype, content)
    return rows, _metrics(counts, sent)


def _read_own(values: jax.Array, asked: jax.Array) -> jax.Array:
    """Rows `[N, C, ...]` of this owner's, zeros for R."""
    flat = asked.reshape(-1)
    named = indexing.in_range(flat, values.shape[0])
    rows = indexing.zero_unless(named, read_rows(values, flat))
    return rows.reshape(*asked.shape, *values.shape[1:])


def spread(
    owners: Owners, slots: int, cotangent: jax.Array, positions: jax.Array
) -> jax.Array:
    """The transpose of `read`: cotangents of rows added into a whole `[N * R, ...]`."""
    content, wide = cotangent.shape[1:], indexing.accumulator_dtype(cotangent.dtype)

    def body(cotangent, positions):
        parts = sort_out(owners, positions)
        merged = _merged(parts, cotangent.astype(wide))

        def one(number, table):
            asked = swap(owners, ids_of_round(owners, parts, slots, number))
            values = swap(owners, values_of_round(parts, merged, slots, number))
            return indexing.add_rows(table, asked, values)

        single = _is_single(owners, positions.size, slots)
        start = jnp.zeros((owners.rows, *content), wide)
        table = repeat_rounds(rounds_of(owners, parts, slots), single, one, start)
        table = lax.psum(table, owners.others) if owners.others else table
        return table.astype(cotangent.dtype)

    batch = owners.batch_spec
    return owners.run(
        body, cotangent, positions, into=(batch, batch), out=owners.table_spec
    )


def _merged(parts: _Parts, values: jax.Array) -> jax.Array:
    """Sums `[u, ...]` of `values [n, ...]` for each distinct position."""
    zeros = jnp.zeros((parts.rows.size, *values.shape[1:]), values.dtype)
    return indexing.add_rows(zeros, parts.slot, values)


# ------------------------------------------------------------------ to the owners


def most_rows(owners: Owners, n: int) -> int:
    """The most distinct rows that an owner can be sent by devices of `n` slots each."""
    return max(1, min(owners.rows, owners.devices * min(n, owners.rows)))


def send(
    owners: Owners, slots: int, positions: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of rows at their owners, summed over all devices.

    Args:
      owners, slots: static.
      positions: `[n]`, `height` for an empty slot, laid out as batches are.
      values: `[n, ...]`.

    Returns:
      `(positions [N * M], values [N * M, ...])`, laid out as tables are: of each owner
      its distinct rows ascending, then empty slots.
    """
    content, dtype = values.shape[1:], values.dtype
    wide = indexing.accumulator_dtype(dtype)
    here = positions.size // owners.devices
    most = most_rows(owners, here)
    longest = max(1, min(here, owners.rows))  # of a part
    single = _is_single(owners, here, slots)
    length = slots * -(-longest // slots)

    def body(positions, values):
        parts = sort_out(owners, positions)
        rounds = rounds_of(owners, parts, slots)
        values = indexing.zero_unless(positions < owners.height, values).astype(wide)
        merged = _merged(parts, values)

        def ids(number, asked):
            new = swap(owners, ids_of_round(owners, parts, slots, number))
            return lax.dynamic_update_slice(
                asked, new, (np.int32(0), number * np.int32(slots))
            )

        none = _arguments.scalar(owners.rows, positions)
        asked = jnp.full((owners.count, length), none, positions.dtype)
        asked = _of_repeats(owners, repeat_rounds(rounds, single, ids, asked))
        rows, slot, _ = indexing.merge_plan(asked.reshape(-1), owners.rows, most)
        slot = slot.reshape(-1, length)

        def add(number, total):
            new = swap(owners, values_of_round(parts, merged, slots, number))
            new = _of_repeats(owners, new)
            at = lax.dynamic_slice_in_dim(slot, number * np.int32(slots), slots, 1)
            return indexing.add_rows(total, at, new)

        total = jnp.zeros((most, *content), wide)
        total = repeat_rounds(rounds, single, add, total)
        return _global(owners, rows), total.astype(dtype)

    table = owners.table_spec
    return owners.run(
        body, positions, values, into=(owners.batch_spec,) * 2, out=(table, table)
    )


def _of_repeats(owners: Owners, x: jax.Array) -> jax.Array:
    """`x [N, ...]` of all devices that own the same rows, `[repeats * N, ...]`."""
    return lax.all_gather(x, owners.others, tiled=True) if owners.others else x


def _global(owners: Owners, rows: jax.Array) -> jax.Array:
    """Positions of row numbers of this owner's; `height` for R."""
    wide = _arguments.index_dtype(owners.height, rows.dtype)
    first = lax.axis_index(owners.axes).astype(wide) * np.array(owners.rows, wide)
    none = rows >= _arguments.scalar(owners.rows, rows)
    return jnp.where(none, np.array(owners.height, wide), rows.astype(wide) + first)


def local(owners: Owners, positions: jax.Array) -> jax.Array:
    """The inverse: row numbers of this owner's; R for any other position."""
    first = lax.axis_index(owners.axes).astype(positions.dtype)
    rows = positions - first * _arguments.scalar(owners.rows, positions)
    own = indexing.in_range(rows, owners.rows)
    return jnp.where(own, rows, _arguments.scalar(owners.rows, rows))


# ------------------------------------------------------------------ metrics


def needed(owners: Owners, slots: int, positions: jax.Array, sent: float) -> Metrics:
    """What the exchange of `positions` takes, without doing it."""

    def body(positions):
        return _count(owners, sort_out(owners, positions), slots)

    counts = owners.run(body, positions, into=(owners.batch_spec,), out=PartitionSpec())
    return _metrics(counts, sent)


def _count(owners: Owners, parts: _Parts, slots: int) -> jax.Array:
    """Rounds, the longest part, distinct rows, and those beyond the first round."""
    beyond = jnp.maximum(parts.size - np.int32(slots), np.int32(0))
    sums = jnp.stack([jnp.sum(x, dtype=jnp.int32) for x in (parts.size, beyond)])
    sums = lax.psum(sums, owners.mesh.axis_names)
    longest = lax.pmax(jnp.max(parts.size), owners.mesh.axis_names)
    return jnp.stack([rounds_of(owners, parts, slots), longest, *sums])


def _metrics(counts: jax.Array, sent: float) -> Metrics:
    rounds, longest, rows, overflow = (counts[k] for k in range(4))
    moved = rounds.astype(jnp.float32) * np.float32(sent)
    return Metrics(rounds, rows, longest, overflow, moved)
