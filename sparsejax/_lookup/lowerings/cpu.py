"""Lowerings for XLA:CPU, where a gather on its own is slow.

The loop of a gather is vectorised only if arithmetic is fused into it, and a gather
followed by a sum is not fused: the rows read are an array, written and read again.
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


# Columns of a fixed bag that are added in one loop; longest piece of a segmented bag.
_COLUMNS, _PIECE, _PIECE_OF_CODES = 16, 8, 32


# ------------------------------------------------------------------ read_rows


def read_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`table[ids]` for flat ids; those out of range read the nearest row.

    The rows are multiplied by a factor that is always one, but that XLA cannot prove to
    be one, so the gather is fused with arithmetic. Left alone, XLA would move the
    multiplication into the users of the rows, and the gather would stand alone again. A
    conditional on a predicate that is always true, which XLA cannot prove either, keeps
    the two together.
    """
    if ids.size == 0 or not jnp.issubdtype(table.dtype, jnp.floating):
        return xla.read_rows(table, ids)
    least = np.array(jnp.iinfo(ids.dtype).min, ids.dtype)

    # No id is `least`: the caller replaces ids below -1 by -1.
    def read(table, ids):
        one = jnp.where(
            ids > least, jnp.ones((), table.dtype), 2 * jnp.ones((), table.dtype)
        )
        rows = xla.read_rows(table, ids)
        return rows * indexing.append_axes(one, rows.ndim)

    def never(table, ids):
        return jnp.zeros(ids.shape + table.shape[1:], table.dtype)

    return lax.cond(ids[0] > least, read, never, table, ids)


# ------------------------------------------------------------------ bag_sum


def bag_sum(
    table: jax.Array, ids: jax.Array, *rest: jax.Array, spec: xla.BagSpec
) -> jax.Array:
    """`xla.bag_sum`, to rounding.

    A sum of a few gathers is one vectorised loop that writes each bag once. Therefore

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
        total = _sum_fixed_codes(table, ids, weights[..., 0], bits)
        return total + jnp.sum(weights[..., 1], axis=1)[:, None, None]
    # As long as pieces can be while most of them are more than half full.
    average = ids.size // max(num_bags, 1) if is_static and spec.segmented else 0
    longest = _PIECE if bits is None else _PIECE_OF_CODES
    lengths = (1, 2, 4, 8, 16, 32)
    length = max(n for n in lengths if n <= min(max(average, 1), longest))
    if not spec.segmented or length == 1:
        return xla.bag_sum(table, ids, *rest, spec=spec)
    segment_ids = _arguments.as_ids("bag_sum", spec.segment_ids(rest), num_bags)
    if not spec.indices_are_sorted:
        ids, segment_ids, weights = _sort_by_bag(ids, segment_ids, weights, num_bags)
    return _sum_pieces(table, ids, weights, segment_ids, num_bags, length, bits)


def _sum_fixed(
    table: jax.Array, ids: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Sums of fixed bags `[B, L]` of floats.

    Usually all ids are in range, and one check of that is faster than a mask on every
    number read. The conditional has a second purpose: XLA cannot fuse the gathers with
    the users of the sums. In one loop with a division or a root they would not be
    vectorised.
    """
    rest = () if weights is None else (weights,)
    return lax.cond(
        jnp.all(indexing.in_range(ids, table.shape[0])),
        functools.partial(_add_blocks, xla.weighted_rows_in_range, None),
        functools.partial(_add_blocks, xla.weighted_rows, None),
        table,
        ids,
        *rest,
    )


def _sum_fixed_codes(
    table: jax.Array, ids: jax.Array, scales: jax.Array, bits: xla.Codes
) -> jax.Array:
    """Sums of fixed bags `[B, L]` of codes, without a mask: scales are 0 out of range.

    The conditional, which XLA cannot decide, keeps the gathers apart from the users of
    the sums, as in `_sum_fixed`: 8 bits 2.2 ms, without it 11 (4,096 bags of 16, rows
    of 64, fastest of 41 in turns on a busy machine, November 2026).
    """
    ids = jnp.maximum(ids, _arguments.scalar(-1, ids))
    least = _arguments.scalar(jnp.iinfo(ids.dtype).min, ids)
    add = functools.partial(_add_blocks, xla.weighted_rows_in_range, bits)
    never = lambda table, ids, _: _add_columns(None, bits, table, ids[:, :0])
    return lax.cond(ids[0, 0] > least, add, never, table, ids, scales)


def _add_blocks(read, bits, table, ids, *rest) -> jax.Array:
    """Sums of the rows of fixed bags, 16 columns at a time."""
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
    """`total`, by default zeros, plus the rows of each column of ids."""
    for j in range(ids.shape[1]):
        w = None if weights is None else weights[:, j]
        rows = read(table, ids[:, j], w, bits)
        total = rows if total is None else total + rows
    if total is None:
        shape, dtype = xla.row_type(table, bits)
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
    """Sums of segmented bags whose elements are in order, in pieces of `length`.

    The last piece of a bag is half full on average. A conditional on the number of
    pieces leaves out those that would be needed if most had a single element.
    """
    n = ids.size
    bounds = jnp.arange(num_bags + 1, dtype=segment_ids.dtype)
    offsets = jnp.searchsorted(segment_ids, bounds).astype(jnp.int32)
    pieces = (offsets[1:] - offsets[:-1] + np.int32(length - 1)) // np.int32(length)
    ends = jnp.cumsum(pieces, dtype=jnp.int32)

    def add_pieces(most):
        # A piece belongs to the bag whose number is that of the bags that end before.
        bag = jnp.zeros((most,), jnp.int32).at[ends].add(np.int32(1), mode="drop")
        bag = jnp.cumsum(bag, dtype=jnp.int32)
        known = jnp.minimum(bag, np.int32(num_bags - 1))
        first = ends[known] - pieces[known]
        number = jnp.arange(most, dtype=jnp.int32) - first
        start = offsets[known] + number * np.int32(length)
        end = jnp.where(bag < num_bags, offsets[known + 1], start)
        # The last window would end behind the elements; it begins earlier instead.
        at = jnp.minimum(start, np.int32(n - length))
        places = at[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        inside = (places >= start[:, None]) & (places < end[:, None])
        # Windows are faster than single elements.
        cut = jax.vmap(lambda x, k: lax.dynamic_slice_in_dim(x, k, length), (None, 0))
        some = jnp.where(inside, cut(ids, at), _arguments.scalar(table.shape[0], ids))
        if bits is None:
            rest = () if weights is None else (jnp.where(inside, cut(weights, at), 0),)
            total = _add_columns(xla.weighted_rows, bits, table, some, *rest)
        else:
            # Apart, not as an array [..., 2]: else XLA computes them for each code.
            scale, bias = (jnp.where(inside, cut(weights[:, k], at), 0) for k in (0, 1))
            total = _add_codes(table, some, scale, bits)
            # A loop over columns, which reads the windows; a reduction would not.
            bias = functools.reduce(operator.add, [bias[:, j] for j in range(length)])
            total += bias[:, None, None]
        return jax.ops.segment_sum(
            total, bag, num_segments=num_bags, indices_are_sorted=True
        )

    usual = n // length + num_bags // 2 + num_bags // 16
    most = n // length + num_bags
    return lax.cond(
        ends[-1] <= usual, lambda: add_pieces(usual), lambda: add_pieces(most)
    )


def _add_codes(
    table: jax.Array, ids: jax.Array, scales: jax.Array, bits: Any
) -> jax.Array:
    """Codes of each column of ids, times its scales: `[n, 8 // bits, bytes]`.

    A loop for each plane: in one loop for both planes of 4 bits, ragged bags take 18.5
    ms in place of 7.2 (133,000 ids, fastest of 41 in turns on a busy machine, November
    2026). Two bits gain nothing and lose nothing.
    """
    planes = [bits] if bits == 8 else [(bits, k) for k in range(8 // bits)]
    add = functools.partial(_add_columns, xla.weighted_rows_in_range)
    return jnp.concatenate([add(k, table, ids, scales) for k in planes], axis=1)


def bags_with(
    is_true: jax.Array, segment_ids: jax.Array, *, num_bags: int, **static: Any
) -> list[jax.Array]:
    """`xla.bags_with`, for few that are true: if there is none, nothing is added up."""
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
    """The elements in the order of their bags."""
    none = _arguments.scalar(num_bags, segment_ids)
    bags = jnp.where(indexing.in_range(segment_ids, num_bags), segment_ids, none)
    order = merge.stable_order(bags, num_bags + 1)
    return ids[order], bags[order], None if weights is None else weights[order]
