"""Bringing rows of one table up to date: some of them, or all.

Beside its weights and moments a table has a *book*, one row of numbers for each of its
rows:

    [the step its weights are of, the step its moments are of, F at the first of these]

A step is written as two numbers, floats all of them, so that a book is read and written
by rows in one go, like the table itself.

XLA writes into a donated array in place if it can see that all reads come before. So
what is written here always depends on what was read, even where that changes nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax._lookup.read_rows import read_rows
from sparsejax._rows import SelectedRows, indexing
from sparsejax.optim._exact import drift
from sparsejax.optim._exact.drift import Model
from sparsejax.optim._lazy.table_rows import write_into


_CLOCKS = 4  # columns in front of F
_DIGIT = 4096  # a step is a * _DIGIT + b; both are exact in float32


class Table(NamedTuple):
    """All that belongs to one table; `model` is static."""

    model: Model
    weights: jax.Array
    moments: list[jax.Array]
    book: jax.Array
    now: jax.Array


class _Book(NamedTuple):
    """Rows of a book."""

    weights_step: jax.Array
    moments_step: jax.Array
    then: jax.Array


def new_book(height: int, now: jax.Array) -> jax.Array:
    """The book of a table at step 0."""
    zero = jnp.zeros((height,), jnp.int32)
    return _write_book(zero, zero, now)


def catch_up(table: Table, ids: jax.Array, step: jax.Array) -> Table:
    """Weights of the rows `ids` brought to the present, and noted in the book."""
    if not table.model.columns:
        return table
    book = _read_book(read_rows(table.book, ids))
    old = [read_rows(x, ids) for x in (table.weights, *table.moments)]
    weights = _advance(table, old[0], old[1:], book, step)
    # The same step either way. But now the book is written after moments are read, and
    # whoever writes moments reads the book first.
    steps = jnp.maximum(step, book.weights_step)
    for x in old:
        steps = _after(x, steps, step)
    present = _write_book(steps, book.moments_step, table.now)
    # Duplicates write the same thing twice. To merge them first would cost more.
    return table._replace(
        weights=indexing.set_rows(table.weights, ids, weights),
        book=indexing.set_rows(table.book, ids, present),
    )


class Present(NamedTuple):
    """What `tx` must be given for the rows of a gradient.

    Args:
      moments: theirs, at the present step.
      correction: what is to be added to the weights: nothing, unless the user forgot to
        catch up. None where weights do not move.
      stale: for how many rows that is so.
      steps: the steps that their weights were of.
    """

    moments: list[jax.Array]
    correction: jax.Array | None
    stale: Any
    steps: jax.Array


def present(
    table: Table, moments: Sequence[jax.Array], rows: SelectedRows, step: jax.Array
) -> Present:
    """The rows of a gradient; `moments` are theirs, as stored."""
    book = _read_book(read_rows(table.book, rows.rows))
    if not table.model.columns:
        faded = _faded(table.model, moments, step - book.moments_step)
        return Present(faded, None, np.int32(0), book.moments_step)
    late = rows.filled() & (book.weights_step < step)
    wide = indexing.accumulator_dtype(table.weights.dtype)

    def correct():
        # Read once more, here where it is rarely needed: what is read outside then
        # goes into the arithmetic of `tx` without being written down for this.
        old, *stored = (
            read_rows(x, rows.rows) for x in (table.weights, *table.moments)
        )
        new = _advance(table, old, stored, book, step)
        return indexing.zero_unless(late, new.astype(wide) - old.astype(wide))

    def nothing():
        return jnp.zeros((rows.capacity, *table.weights.shape[1:]), wide)

    correction = lax.cond(jnp.any(late), correct, nothing)
    # No step is after the present, so this changes nothing but the order.
    since = _after(correction, book.moments_step, jnp.minimum(book.moments_step, step))
    faded = _faded(table.model, moments, step - since)
    count = jnp.sum(late, dtype=jnp.int32)
    return Present(faded, correction, count, book.weights_step)


def stamp(
    table: Table, rows: SelectedRows, before: jax.Array, now: Any, step: jax.Array
) -> Table:
    """Notes that rows, so far of steps `before`, are of `step`, with F `now`."""
    steps = jnp.maximum(before, step)
    book = _write_book(steps, steps, now)
    return table._replace(book=write_into(rows, table.book, book), now=now)


def stamp_all(table: Table, now: Any, step: jax.Array) -> Table:
    """The same for every row."""
    steps = jnp.broadcast_to(step, table.book.shape[:1])
    return table._replace(book=_write_book(steps, steps, now), now=now)


def bring(table: Table, step: jax.Array) -> Table:
    """All weights and all moments of the present step; `stamp_all` writes that down.

    What is up to date keeps its bits.
    """
    book = _read_book(table.book)
    weights = _advance(table, table.weights, table.moments, book, step)
    moments = _faded(table.model, table.moments, step - book.moments_step)
    return table._replace(weights=weights, moments=moments)


def bring_if_stale(table: Table, step: jax.Array) -> Table:
    """`bring`, written down; for one who reads all rows, and has mostly done so."""

    def brought(weights, moments, book):
        new = bring(table._replace(weights=weights, moments=moments, book=book), step)
        new = stamp_all(new, table.now, step)
        return new.weights, new.moments, new.book

    book = _read_book(table.book)
    steps = jnp.minimum(book.weights_step, book.moments_step)
    weights, moments, book = lax.cond(
        jnp.any(steps < step),
        brought,
        lambda *same: same,
        table.weights,
        table.moments,
        table.book,
    )
    return table._replace(weights=weights, moments=moments, book=book)


# ------------------------------------------------------------------ rows


def _advance(
    table: Table, weights: Any, moments: Sequence[Any], book: _Book, step: jax.Array
) -> jax.Array:
    """Rows of weights, with their moments as stored, at the present step."""
    if not table.model.columns:
        return weights
    since = book.weights_step - book.moments_step
    gap = step - book.weights_step
    return drift.advance(
        table.model, weights, moments, since, gap, book.then, table.now
    )


def _after(x: jax.Array, steps: jax.Array, same: jax.Array) -> jax.Array:
    """`steps`, which are the `same`, but not before `x` has been computed."""
    some = x[(slice(None), *(0,) * (x.ndim - 1))]
    return jnp.where(some == some, steps, same)


def _faded(model: Model, moments: Sequence[jax.Array], gap: jax.Array) -> list[Any]:
    faded = []
    for ratio, m in zip(model.ratios, moments, strict=True):
        wide = indexing.accumulator_dtype(m.dtype)
        left = drift.remaining(ratio, gap, wide)
        faded.append(drift.scale_rows(m.astype(wide), left).astype(m.dtype))
    return faded


def _read_book(rows: jax.Array) -> _Book:
    a, b, c, d = rows[:, :_CLOCKS].astype(jnp.int32).T
    return _Book(a * np.int32(_DIGIT) + b, c * np.int32(_DIGIT) + d, rows[:, _CLOCKS:])


def _write_book(weights_step: Any, moments_step: Any, now: jax.Array) -> jax.Array:
    """Rows of a book, all with the same F."""
    digits = [f(s) for s in (weights_step, moments_step) for f in (_high, _low)]
    clocks = jnp.stack(digits, axis=1).astype(now.dtype)
    then = jnp.broadcast_to(now, (*clocks.shape[:1], *now.shape))
    return jnp.concatenate([clocks, then], axis=1)


def _high(step: jax.Array) -> jax.Array:
    return step // np.int32(_DIGIT)


def _low(step: jax.Array) -> jax.Array:
    return step % np.int32(_DIGIT)
