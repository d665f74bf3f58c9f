"""Brings rows of one table to the present step, some of them or all.

Besides its weights and moments a table has *last-update records*. That of a row is

    [step of its weights, step of its moments, F at the step of its weights]

with F as in `closed_form`. All entries are floats, so that a record is read and written
like a row of the table. A step takes two of them, since float32 has only 24 bits.

XLA updates a donated array in place if it sees that every read of the old values comes
before the write. Otherwise it copies the whole array. A data dependence shows it the
order. So whatever `current_rows` and `records_after` hand on to be written depends on
what was read before, even where that changes no value.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax._lookup.lookup import read_rows
from sparsejax._rows import SelectedRows, indexing
from sparsejax._rows.order_after import always_true
from sparsejax.optim._exact import closed_form
from sparsejax.optim._exact.closed_form import Recurrence
from sparsejax.optim._lazy.gather_scatter import scatter_rows


_STEP_COLUMNS = 4  # columns of a record in front of F
_BASE = 4096  # a step is stored as a * _BASE + b; float32 holds both exactly


class Table(NamedTuple):
    """The arrays of one table, and its recurrence, which is static."""

    recurrence: Recurrence
    weights: jax.Array
    moments: list[jax.Array]
    records: jax.Array
    now: jax.Array  # F at the present step


class _Records(NamedTuple):
    """Last-update records of some rows: int32 `[n]` twice, and F `[n, ...]`."""

    weights_step: jax.Array
    moments_step: jax.Array
    then: jax.Array


class CurrentRows(NamedTuple):
    """The rows of a gradient at the present step.

    Attributes:
      rows: the gradient; None if it is an array, with all rows.
      moments: of these rows.
      correction: to be added to weights of rows that were not caught up; zero for
        the others. None if a zero-gradient step does not move weights.
      num_stale: how many rows were not caught up.
      weights_steps: the steps that the weights of `rows` are of.
    """

    rows: SelectedRows | None
    moments: list[jax.Array]
    correction: jax.Array | None
    num_stale: Any = np.int32(0)
    weights_steps: Any = None


# ------------------------------------------------------------------ some rows


def catch_up(table: Table, ids: jax.Array, step: jax.Array) -> Table:
    """Brings the weights of rows `ids` to `step`, and writes their records.

    The moments stay as they are. They are known in closed form whenever they are
    needed, and writing them would double the cost.
    """
    if not table.recurrence.num_coefficients:
        return table
    records = _unpack(read_rows(table.records, ids))
    weights, *moments = (read_rows(x, ids) for x in (table.weights, *table.moments))
    new = _advance(table, weights, moments, records, step)
    steps = jnp.broadcast_to(step, ids.shape)
    present = _pack(steps, records.moments_step, table.now)
    # Duplicate ids write equal values. Merging them first would cost more.
    return table._replace(
        weights=indexing.set_rows(table.weights, ids, new),
        records=indexing.set_rows(table.records, ids, present),
    )


def current_rows(
    table: Table, rows: SelectedRows, moments: Sequence[jax.Array], step: jax.Array
) -> CurrentRows:
    """Returns the rows of a gradient at `step`, from their moments as stored."""
    records = _unpack(read_rows(table.records, rows.rows))
    if not table.recurrence.num_coefficients:
        decayed = _decay(table.recurrence, moments, step - records.moments_step)
        return CurrentRows(rows, decayed, None, np.int32(0), records.moments_step)
    stale = rows.filled() & (records.weights_step < step)
    wide = indexing.accumulator_dtype(table.weights.dtype)

    def correct():
        # These reads repeat what the caller has read. If this rare branch used the
        # caller's rows, XLA would have to store them for it, instead of fusing their
        # reads into the arithmetic of `tx`.
        old, *stored = (
            read_rows(x, rows.rows) for x in (table.weights, *table.moments)
        )
        new = _advance(table, old, stored, records, step)
        return indexing.zero_unless(stale, new.astype(wide) - old.astype(wide))

    def nothing():
        return jnp.zeros((rows.capacity, *table.weights.shape[1:]), wide)

    correction = lax.cond(jnp.any(stale), correct, nothing)
    # The new moments must depend on the reads in `correct`. Else XLA copies the moments
    # in order to write before it reads.
    some = correction[(slice(None), *(0,) * (correction.ndim - 1))]
    moments_step = jnp.where(always_true(some), records.moments_step, step)
    missed = step - moments_step
    moments = [
        indexing.zero_unless(missed >= 0, m) if ratio == 1.0 else m
        for ratio, m in zip(table.recurrence.ratios, moments)
    ]
    decayed = _decay(table.recurrence, moments, missed)
    num_stale = jnp.sum(stale, dtype=jnp.int32)
    return CurrentRows(rows, decayed, correction, num_stale, records.weights_step)


# ------------------------------------------------------------------ all rows


def catch_up_all(table: Table, step: jax.Array) -> Table:
    """Brings all rows to `step`, at no cost if they are up to date already.

    Rows that are up to date keep their bits.
    """

    def catch_up(weights, moments, records):
        new = _advance(table, weights, moments, _unpack(records), step)
        missed = step - _unpack(records).moments_step
        moments = _decay(table.recurrence, moments, missed)
        return new, moments, records_at(step, records.shape[0], table.now)

    records = _unpack(table.records)
    steps = jnp.minimum(records.weights_step, records.moments_step)
    weights, moments, records = lax.cond(
        jnp.any(steps < step),
        catch_up,
        lambda *same: same,
        table.weights,
        table.moments,
        table.records,
    )
    return table._replace(weights=weights, moments=moments, records=records)


def current_table(table: Table, step: jax.Array) -> CurrentRows:
    """Returns all rows at `step`, for a dense gradient, which updates all."""
    new = catch_up_all(table, step)
    correction = new.weights - table.weights
    return CurrentRows(None, new.moments, correction)


# ------------------------------------------------------------------ records


def records_at(step: jax.Array, height: int, now: jax.Array) -> jax.Array:
    """Returns records of rows that are up to date at `step`, where F is `now`."""
    steps = jnp.broadcast_to(step, (height,))
    return _pack(steps, steps, now)


def records_after(
    table: Table, updated: CurrentRows | None, step: jax.Array, now: jax.Array
) -> jax.Array:
    """Returns the records after `step`, where F is `now`, of the rows `updated`."""
    if updated is None:
        return table.records
    if updated.rows is None:
        return records_at(step, table.records.shape[0], now)
    # The maximum is `step`. It makes what is written depend on what was read.
    steps = jnp.maximum(updated.weights_steps, step)
    return scatter_rows(updated.rows, table.records, _pack(steps, steps, now))


# ------------------------------------------------------------------ helpers


def _advance(
    table: Table, weights: Any, moments: Sequence[Any], records: _Records, step: Any
) -> jax.Array:
    """Returns rows of weights at `step`, from their moments as stored."""
    age = records.weights_step - records.moments_step
    missed = step - records.weights_step
    return closed_form.advance(
        table.recurrence, weights, moments, age, missed, records.then, table.now
    )


def _decay(
    recurrence: Recurrence, moments: Sequence[jax.Array], missed: jax.Array
) -> list[jax.Array]:
    """Returns moments after `missed` zero-gradient steps."""
    decayed = []
    for ratio, m in zip(recurrence.ratios, moments, strict=True):
        wide = m.astype(indexing.accumulator_dtype(m.dtype))
        decayed.append(closed_form.decayed(wide, ratio, missed).astype(m.dtype))
    return decayed


def _pack(weights_step: Any, moments_step: Any, now: jax.Array) -> jax.Array:
    """Returns records that all have the same F."""
    base = np.int32(_BASE)
    steps = [f for s in (weights_step, moments_step) for f in (s // base, s % base)]
    steps = jnp.stack(steps, axis=1).astype(now.dtype)
    then = jnp.broadcast_to(now, (*steps.shape[:1], *now.shape))
    return jnp.concatenate([steps, then], axis=1)


def _unpack(records: jax.Array) -> _Records:
    base = np.int32(_BASE)
    a, b, c, d = records[:, :_STEP_COLUMNS].astype(jnp.int32).T
    return _Records(a * base + b, c * base + d, records[:, _STEP_COLUMNS:])
