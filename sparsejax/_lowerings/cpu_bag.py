"""bag_sum for XLA:CPU, whose scatter-add and whose lone gather are slow.

A gather followed by a sum is not fused there: the rows read are an array, written and
read again, and adding them up by segment takes as long again. A sum of a few gathers is
one vectorised loop that writes each bag once (see benchmarks/NOTES.md). So

- a fixed bag is added up a few columns at a time;
- bags of any size, their elements in order, are cut into *pieces* of at most 8
  elements. Pieces are fixed bags, and few enough that adding up their sums by segment
  is cheap; however long one bag is, there are never more than `n / 8` and one for each
  bag.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _ids
from sparsejax._lowerings import xla


_COLUMNS = 8


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
        return _sum_columns(table, ids, weights)
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
    segment_ids = _ids.as_ids("bag_sum", rest[0], num_bags)
    if not indices_are_sorted:
        ids, segment_ids, weights = _sort(ids, segment_ids, weights, num_bags)
    return _sum_pieces(table, ids, weights, segment_ids, num_bags, length)


def _sum_columns(
    table: jax.Array, ids: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Sums of fixed bags `[B, L]`, a few columns at a time.

    In a loop of at least two steps, so that XLA cannot fuse the gathers with whatever
    reads the sums: together with a division or a root they would not be vectorised.
    """
    bags, length = ids.shape
    wide = _ids.accumulator_dtype(table.dtype)
    width = min(_COLUMNS, -(-length // 2))
    steps = -(-length // width)
    beyond = ((0, 0), (0, steps * width - length))
    ids = jnp.pad(ids, beyond, constant_values=table.shape[0])
    if weights is not None:
        weights = jnp.pad(weights, beyond)

    def add(k, total):
        block = lambda x: lax.dynamic_slice_in_dim(x, k * width, width, 1)
        columns = block(ids)
        w = None if weights is None else block(weights)
        for j in range(width):
            column = None if w is None else w[:, j]
            total += xla.weighted_rows(table, columns[:, j], column, wide)
        return total

    zeros = jnp.zeros((bags, *table.shape[1:]), wide)
    return lax.fori_loop(0, steps, add, zeros)


def _piece_length(elements: int, num_bags: int) -> int:
    """As long as pieces may be without most of them being emptier than full."""
    average = elements // max(num_bags, 1)
    return max(p for p in (1, 2, 4, _COLUMNS) if p <= max(average, 1))


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
    ids = jnp.where(inside, ids[at], _ids.scalar(table.shape[0], ids))
    if weights is not None:
        weights = weights[at]
    sums = _sum_columns(table, ids, weights)
    return jax.ops.segment_sum(sums, bag, num_bags, indices_are_sorted=True)


def _sort(
    ids: jax.Array,
    segment_ids: jax.Array,
    weights: jax.Array | None,
    num_bags: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The elements in the order of their bags."""
    n = ids.size
    none = _ids.scalar(num_bags, segment_ids)
    bags = jnp.where(_ids.in_range(segment_ids, num_bags), segment_ids, none)
    if (num_bags + 1) * n <= jnp.iinfo(jnp.int32).max:
        # One number to sort instead of pairs of them, which takes a third of the time.
        keys = bags.astype(jnp.int32) * np.int32(n) + jnp.arange(n, dtype=jnp.int32)
        order = lax.sort(keys, is_stable=False) % np.int32(n)
    else:
        order = jnp.argsort(bags)
    return ids[order], bags[order], None if weights is None else weights[order]
