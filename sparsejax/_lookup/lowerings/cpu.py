"""Lowerings for XLA:CPU, where a gather on its own is slow.

XLA:CPU vectorizes the loop of a gather only if arithmetic is fused into it. It does not
fuse a gather with the sum after it: the rows are written to an array and read again.
benchmarks/NOTES.md has the measurements, tests/transform/test_compiled.py checks that
the compiled programs have the structure described here.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._lookup.lowerings import xla
from sparsejax._rows import indexing, merge
from sparsejax._rows.order_after import always_true


_COLUMNS = 16  # of a fixed bag that are added in one loop
_MAX_PIECE, _MAX_PIECE_OF_CODES = 8, 32  # elements of a piece of a segmented bag


# ------------------------------------------------------------------ read_rows


def read_rows(
    table: jax.Array, ids: jax.Array, *, fill: bytes | None = None
) -> jax.Array:
    """Returns `table[ids]`, see `sparsejax._lookup.lookup.read_rows`.

    The rows are multiplied by a factor that is always one, so that the gather is fused
    with arithmetic. Left alone, XLA would move the multiplication into the users of the
    rows, and the gather would be unfused again. A conditional keeps both together.

    65,536 rows of 64: a bare gather takes 5 to 12 ms, this 1.4 if memory is reused and
    5 if fresh pages are touched (two cores, November 2026).
    """
    if ids.size == 0 or not jnp.issubdtype(table.dtype, jnp.floating):
        return xla.read_rows(table, ids, fill=fill)

    # The caller replaces ids below -1 by -1, so no id is the least integer.
    def read(table, ids):
        one = jnp.where(
            always_true(ids), jnp.ones((), table.dtype), 2 * jnp.ones((), table.dtype)
        )
        rows = xla.read_rows(table, ids)
        rows *= indexing.append_axes(one, rows.ndim)
        if fill is None:
            return rows
        keep = indexing.in_range(ids, table.shape[0])
        value = np.frombuffer(fill, table.dtype)[0]
        return jnp.where(indexing.append_axes(keep, rows.ndim), rows, value)

    def never(table, ids):
        return jnp.zeros(ids.shape + table.shape[1:], table.dtype)

    return lax.cond(always_true(ids[0]), read, never, table, ids)


# ------------------------------------------------------------------ bag_sum


def bag_sum(
    table: jax.Array, ids: jax.Array, *rest: jax.Array, spec: xla.BagSpec
) -> jax.Array:
    """Computes `xla.bag_sum`, to rounding.

    A sum of a few gathers is one vectorized loop that writes each bag once. Therefore

    - a fixed bag is added up 16 columns at a time;
    - segmented bags, with their elements in order, are cut into *pieces* of at most 8
      elements, or of 32 for codes. Pieces are fixed bags. However long a bag is, there
      are at most `n / 8` pieces and one more for each bag, so adding up their sums by
      segment is cheap.
    """
    bits, num_bags = spec.bits, spec.num_bags
    if bits in (4, 2) and not spec.segmented:  # see `_add_codes`
        one = lambda k: dataclasses.replace(spec, bits=(bits, k))
        planes = [bag_sum(table, ids, *rest, spec=one(k)) for k in range(8 // bits)]
        return jnp.concatenate(planes, axis=1)
    weights = spec.weights(rest)  # never None for codes, and 0 out of range
    if weights is not None and bits is None:
        weights = xla.in_range_only(weights, ids, table.shape[0])
    # Shapes are symbolic in an export for any size of batch.
    is_static = isinstance(ids.shape[-1], int)
    if is_static and not spec.segmented and ids.size and ids.shape[1] > 1:
        if bits is None:
            return _sum_fixed(table, ids, weights)
        assert weights is not None
        total = _sum_fixed_codes(table, ids, weights[..., 0], bits)
        return total + jnp.sum(weights[..., 1], axis=1)[:, None, None]
    # As long as pieces can be while most of them are more than half full.
    average = ids.size // max(num_bags, 1) if is_static and spec.segmented else 0
    longest = _MAX_PIECE if bits is None else _MAX_PIECE_OF_CODES
    lengths = (1, 2, 4, 8, 16, 32)
    length = max(n for n in lengths if n <= min(max(average, 1), longest))
    if not spec.segmented or length == 1:
        return xla.bag_sum(table, ids, *rest, spec=spec)
    segment_ids = _arguments.as_ids(spec.segment_ids(rest), num_bags)
    if not spec.indices_are_sorted:
        ids, segment_ids, weights = _sort_by_bag(ids, segment_ids, weights, num_bags)
    return _sum_pieces(table, ids, weights, segment_ids, num_bags, length, bits)


def _sum_fixed(
    table: jax.Array, ids: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Sums fixed bags `[B, L]` of floats.

    Usually all ids are in range, and one check of that is faster than a mask on every
    number read. The conditional has a second purpose: XLA cannot fuse the gathers with
    the users of the sums. In one loop with a division or a root they would not be
    vectorized.
    """
    extra = () if weights is None else (weights,)
    return lax.cond(
        jnp.all(indexing.in_range(ids, table.shape[0])),
        functools.partial(_add_blocks, xla.weighted_rows_in_range, None),
        functools.partial(_add_blocks, xla.weighted_rows, None),
        table,
        ids,
        *extra,
    )


def _sum_fixed_codes(
    table: jax.Array, ids: jax.Array, scales: jax.Array, bits: xla.Codes
) -> jax.Array:
    """Sums fixed bags `[B, L]` of codes without a mask: scales are 0 out of range.

    The conditional, which XLA cannot decide, keeps the gathers apart from the users of
    the sums, as in `_sum_fixed`: 8 bits 2.2 ms, without it 11 (4,096 bags of 16, rows
    of 64, fastest of 41 in turns on a busy machine, November 2026).
    """
    ids = jnp.maximum(ids, _arguments.scalar(-1, ids))
    add = functools.partial(_add_blocks, xla.weighted_rows_in_range, bits)
    never = lambda table, ids, w: _add_columns(None, bits, table, ids[:, :0], w)
    return lax.cond(always_true(ids[0, 0]), add, never, table, ids, scales)


def _add_blocks(read, bits, table, ids, *rest) -> jax.Array:
    """Sums the rows of fixed bags, 16 columns at a time."""
    first = ids.shape[1] % _COLUMNS
    cut = lambda at, width: [
        lax.dynamic_slice_in_dim(x, at, width, 1) for x in (ids, *rest)
    ]
    total = _add_columns(read, bits, table, *cut(0, first))
    if ids.shape[1] < _COLUMNS:
        return total

    def add_block(k, total):
        block = cut(first + k * _COLUMNS, _COLUMNS)
        return _add_columns(read, bits, table, *block, total=total)

    return lax.fori_loop(0, ids.shape[1] // _COLUMNS, add_block, total)


def _add_columns(read, bits, table, ids, weights=None, *, total=None) -> jax.Array:
    """Adds the rows of each column of ids to `total`, by default zeros."""
    for j in range(ids.shape[1]):
        w = None if weights is None else weights[:, j]
        rows = read(table, ids[:, j], w, bits)
        total = rows if total is None else total + rows
    if total is None:
        shape, dtype = xla.row_type(table, weights, bits)
        return jnp.zeros((ids.shape[0], *shape), dtype)
    return total


def _sum_pieces(
    table: jax.Array,
    ids: jax.Array,
    weights: Any,
    segment_ids: jax.Array,
    num_bags: int,
    length: int,
    bits: xla.Codes | None,
) -> jax.Array:
    """Sums segmented bags whose elements are in order, in pieces of `length`.

    The number of pieces is static. As many as every input needs would mostly be empty:
    a conditional on the number that this input needs chooses between the usual number
    and the largest (ragged bags 2.55 -> 2.3 ms, benchmarks/NOTES.md).
    """
    n = ids.size
    bounds = jnp.arange(num_bags + 1, dtype=segment_ids.dtype)
    offsets = jnp.searchsorted(segment_ids, bounds).astype(jnp.int32)
    pieces = (offsets[1:] - offsets[:-1] + np.int32(length - 1)) // np.int32(length)
    ends = jnp.cumsum(pieces, dtype=jnp.int32)

    def add_pieces(count):
        # The bag of a piece is the number of bags whose pieces end before it.
        bag = jnp.zeros((count,), jnp.int32).at[ends].add(np.int32(1), mode="drop")
        bag = jnp.cumsum(bag, dtype=jnp.int32)
        safe_bag = jnp.minimum(bag, np.int32(num_bags - 1))
        first = ends[safe_bag] - pieces[safe_bag]
        number = jnp.arange(count, dtype=jnp.int32) - first
        start = offsets[safe_bag] + number * np.int32(length)
        end = jnp.where(bag < num_bags, offsets[safe_bag + 1], start)
        # The last window would end behind the elements; it begins earlier.
        at = jnp.minimum(start, np.int32(n - length))
        places = at[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        inside = (places >= start[:, None]) & (places < end[:, None])
        # Reading windows takes 0.78 of the time of reading single elements.
        cut = jax.vmap(lambda x, k: lax.dynamic_slice_in_dim(x, k, length), (None, 0))
        here = jnp.where(inside, cut(ids, at), _arguments.scalar(table.shape[0], ids))
        if bits is None:
            extra = () if weights is None else (jnp.where(inside, cut(weights, at), 0),)
            total = _add_columns(xla.weighted_rows, bits, table, here, *extra)
        else:
            # As two arrays: XLA would compute an array [..., 2] again for each code.
            scale, bias = (jnp.where(inside, cut(weights[:, k], at), 0) for k in (0, 1))
            total = _add_codes(table, here, scale, bits)
            # A sum of columns is fused with the windows; a reduction is not.
            bias = functools.reduce(operator.add, [bias[:, j] for j in range(length)])
            total += bias[:, None, None]
        return jax.ops.segment_sum(
            total, bag, num_segments=num_bags, indices_are_sorted=True
        )

    usual = n // length + num_bags // 2 + num_bags // 16
    largest = n // length + num_bags
    return lax.cond(
        ends[-1] <= usual, lambda: add_pieces(usual), lambda: add_pieces(largest)
    )


def _add_codes(
    table: jax.Array, ids: jax.Array, scales: jax.Array, bits: Any
) -> jax.Array:
    """Sums codes by column of ids, times scales: `[n, 8 // bits, bytes]`.

    A loop for each plane: in one loop for both planes of 4 bits, ragged bags take 18.5
    ms instead of 7.2 (133,000 ids, fastest of 41 in turns on a busy machine, November
    2026). Two bits gain nothing and lose nothing.
    """
    planes = [bits] if bits == 8 else [(bits, k) for k in range(8 // bits)]
    add = functools.partial(_add_columns, xla.weighted_rows_in_range)
    return jnp.concatenate([add(k, table, ids, scales) for k in planes], axis=1)


def bags_with(
    is_true: jax.Array, segment_ids: jax.Array, *, num_bags: int, **static: Any
) -> list[jax.Array]:
    """Computes `xla.bags_with`; adds nothing up if no element is true."""
    count = functools.partial(xla.bags_with, num_bags=num_bags, **static)
    return lax.cond(
        jnp.any(is_true & indexing.in_range(segment_ids, num_bags)),
        count,
        lambda *_: [jnp.zeros((num_bags,), bool)],
        is_true,
        segment_ids,
    )


def _sort_by_bag(
    ids: jax.Array,
    segment_ids: jax.Array,
    weights: jax.Array | None,
    num_bags: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the elements in the order of their bags."""
    none = _arguments.scalar(num_bags, segment_ids)
    bags = jnp.where(indexing.in_range(segment_ids, num_bags), segment_ids, none)
    order = merge.stable_order(bags, num_bags + 1)
    return ids[order], bags[order], None if weights is None else weights[order]
