"""bag_sum for XLA:CPU, where a gather that stands alone is slow.

A gather followed by a sum is not fused there: the rows read are an array, written and
read again. A sum of a few gathers is one vectorised loop that writes each bag once (see
benchmarks/NOTES.md). So

- a fixed bag is added up 16 columns at a time;
- bags of any size, their elements in order, are cut into *pieces* of at most 8
  elements. Pieces are fixed bags, and few enough that adding up their sums by segment
  is cheap; however long one bag is, there are never more than `n / 8` and one for each
  bag.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._lookup.lowerings import xla
from sparsejax._rows import indexing


_COLUMNS, _PIECE = 16, 8


def bag_sum(
    table: jax.Array,
    ids: jax.Array,
    *rest: jax.Array,
    segmented: bool,
    weighted: bool,
    num_bags: int,
    indices_are_sorted: bool,
) -> jax.Array:
    """What `xla.bag_sum` gives, to rounding."""
    weights = rest[-1] if weighted else None
    if not segmented and ids.size and ids.shape[1] > 1:
        return _sum_fixed(table, ids, weights)
    length = _piece_length(ids.size, num_bags) if segmented else 1
    if length == 1:
        return xla.bag_sum(
            table,
            ids,
            *rest,
            segmented=segmented,
            weighted=weighted,
            num_bags=num_bags,
            indices_are_sorted=indices_are_sorted,
        )
    segment_ids = _arguments.as_ids("bag_sum", rest[0], num_bags)
    if not indices_are_sorted:
        ids, segment_ids, weights = _sort(ids, segment_ids, weights, num_bags)
    return _sum_pieces(table, ids, weights, segment_ids, num_bags, length)


def _sum_fixed(
    table: jax.Array, ids: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Sums of fixed bags `[B, L]`.

    Ids are mostly all in range, and it is quicker to see that first than to look at
    each number that is read. The conditional has another use: XLA cannot fuse the
    gathers with whatever reads the sums. Together with a division or a root they would
    not be vectorised.
    """
    rest = () if weights is None else (weights,)

    def add(read):
        def add_blocks(table, ids, *rest):
            first = ids.shape[1] % _COLUMNS
            cut = lambda at, width: [
                lax.dynamic_slice_in_dim(x, at, width, 1) for x in (ids, *rest)
            ]
            total = _add_columns(read, table, *cut(0, first))
            if ids.shape[1] < _COLUMNS:
                return total

            def add_block(k, total):
                block = cut(first + k * _COLUMNS, _COLUMNS)
                return _add_columns(read, table, *block, total=total)

            steps = ids.shape[1] // _COLUMNS
            return lax.fori_loop(0, steps, add_block, total)

        return add_blocks

    every = jnp.all(indexing.in_range(ids, table.shape[0]))
    return lax.cond(every, add(_read_all), add(xla.weighted_rows), table, ids, *rest)


def _add_columns(read, table, ids, weights=None, *, total=None) -> jax.Array:
    """`total`, zeros if left out, and the rows of each column of ids added to it."""
    wide = indexing.accumulator_dtype(table.dtype)
    for j in range(ids.shape[1]):
        w = None if weights is None else weights[:, j]
        rows = read(table, ids[:, j], w, wide)
        total = rows if total is None else total + rows
    if total is None:
        return jnp.zeros((ids.shape[0], *table.shape[1:]), wide)
    return total


def _read_all(table, ids, weights, dtype) -> jax.Array:
    """`xla.weighted_rows` for ids all of which are in range."""
    rows = xla.read_rows(table, ids).astype(dtype)
    if weights is None:
        return rows
    return rows * indexing.append_axes(weights, rows.ndim)


def _piece_length(elements: int, num_bags: int) -> int:
    """As long as pieces may be without most of them being emptier than full."""
    average = elements // max(num_bags, 1)
    return max(p for p in (1, 2, 4, _PIECE) if p <= max(average, 1))


def _sum_pieces(
    table: jax.Array,
    ids: jax.Array,
    weights: jax.Array | None,
    segment_ids: jax.Array,
    num_bags: int,
    length: int,
) -> jax.Array:
    """Sums of bags whose elements are in order."""
    n = ids.size
    bounds = jnp.arange(num_bags + 1, dtype=segment_ids.dtype)
    offsets = jnp.searchsorted(segment_ids, bounds).astype(jnp.int32)
    pieces = (offsets[1:] - offsets[:-1] + np.int32(length - 1)) // np.int32(length)
    ends = jnp.cumsum(pieces, dtype=jnp.int32)
    most = min(num_bags, n) + n // length
    # The bag of a piece is the number of bags that end before it.
    bag = jnp.zeros((most,), jnp.int32).at[ends].add(np.int32(1), mode="drop")
    bag = jnp.cumsum(bag, dtype=jnp.int32)
    known = jnp.minimum(bag, np.int32(num_bags - 1))
    first = ends[known] - pieces[known]
    number = jnp.arange(most, dtype=jnp.int32) - first
    start = offsets[known] + number * np.int32(length)
    end = jnp.where(bag < num_bags, offsets[known + 1], start)
    at = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    inside = at < end[:, None]
    at = jnp.where(inside, at, 0)
    ids = jnp.where(inside, ids[at], _arguments.scalar(table.shape[0], ids))
    rest = () if weights is None else (weights[at],)
    sums = _add_columns(xla.weighted_rows, table, ids, *rest)
    return jax.ops.segment_sum(sums, bag, num_bags, indices_are_sorted=True)


def _sort(
    ids: jax.Array,
    segment_ids: jax.Array,
    weights: jax.Array | None,
    num_bags: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The elements in the order of their bags."""
    none = _arguments.scalar(num_bags, segment_ids)
    bags = jnp.where(indexing.in_range(segment_ids, num_bags), segment_ids, none)
    order = indexing.stable_order(bags, num_bags + 1)
    return ids[order], bags[order], None if weights is None else weights[order]
