"""The reference lowerings, in plain XLA. Every other lowering must equal them."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax._rows import indexing, quantized


# How many bits a code has, and which plane is wanted, by default all of them.
Codes: TypeAlias = int | tuple[int, int]


def read_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`table[ids]` for flat ids; those out of range read the nearest row."""
    return table.at[ids].get(mode="clip", wrap_negative_indices=False)


def bag_sum(
    table: jax.Array,
    ids: jax.Array,
    *rest: jax.Array,
    segmented: bool,
    weighted: bool,
    num_bags: int,
    indices_are_sorted: bool,
    bits: Codes | None = None,
) -> jax.Array:
    """Sums of the rows in each bag: see `sparsejax._lookup.bag_sum`.

    XLA for GPU and TPU fuses a sum with the gather before it, so that the rows of a
    fixed bag are added up as they are read.
    """
    weights: Any = None  # there are some where there are bits
    if weighted:
        weights = in_range_only(rest[-1], ids, table.shape[0])
    if bits is not None:
        weights, ones = weights[..., 0], weights[..., 1]
    rows = weighted_rows(table, ids, weights, bits)
    if bits is not None:
        rows += indexing.append_axes(ones, rows.ndim)
    if not segmented:
        return jnp.sum(rows, axis=1)
    total = jnp.zeros((num_bags, *rows.shape[1:]), rows.dtype)
    return total.at[rest[0]].add(
        rows,
        mode="drop",
        wrap_negative_indices=False,
        indices_are_sorted=indices_are_sorted,
    )


def bags_with(
    is_true: jax.Array,
    segment_ids: jax.Array,
    *,
    num_bags: int,
    indices_are_sorted: bool,
) -> list[jax.Array]:
    """Which bags have an element that is true: `[bool[num_bags]]`."""
    count = jnp.zeros((num_bags,), jnp.int32)
    count = count.at[segment_ids].add(
        is_true.astype(jnp.int32),
        mode="drop",
        wrap_negative_indices=False,
        indices_are_sorted=indices_are_sorted,
    )
    return [count > 0]


def add_bags(
    sums: jax.Array,
    ids: jax.Array,
    *rest: jax.Array,
    height: int,
    segmented: bool,
    weighted: bool,
) -> jax.Array:
    """The transpose of `bag_sum`: the table to which each bag adds its `sums`."""
    static = dict(segmented=segmented, weighted=weighted)
    table = jnp.zeros((height, *sums.shape[1:]), sums.dtype)
    if segmented:
        return indexing.add_rows(table, ids, row_cotangents(sums, ids, *rest, **static))

    # One column of the bags at a time, so that there is no array of all rows read.
    def add(j, table):
        column = lambda x: lax.dynamic_index_in_dim(x, j, 1)
        parts = [column(x) for x in (ids, *rest)]
        return indexing.add_rows(
            table, parts[0], row_cotangents(sums, *parts, **static)
        )

    return lax.fori_loop(0, ids.shape[1], add, table)


def row_cotangents(
    cotangent: jax.Array,
    ids: jax.Array,
    *rest: jax.Array,
    segmented: bool,
    weighted: bool,
) -> jax.Array:
    """Cotangents of the rows read, `[*ids.shape, ...]`, from those of the bags."""
    if segmented:
        out = indexing.take_rows(cotangent, rest[0])
    else:
        shape = (*ids.shape, *cotangent.shape[1:])
        out = jnp.broadcast_to(jnp.expand_dims(cotangent, 1), shape)
    if weighted:
        out *= indexing.append_axes(rest[-1], out.ndim)
    return out


def weighted_rows(
    table: jax.Array, ids: jax.Array, weights: jax.Array | None, bits: Codes | None
) -> jax.Array:
    """`weights * table[ids]`, wide; zeros where an id is out of range.

    There the weights are finite.
    """
    if bits is not None:  # their weights are 0 already
        return weighted_rows_in_range(table, ids, weights, bits)
    rows = indexing.take_rows(table, ids)
    rows = rows.astype(indexing.accumulator_dtype(rows.dtype))
    if weights is None:
        return rows
    return rows * indexing.append_axes(weights, rows.ndim)


def weighted_rows_in_range(
    table: jax.Array, ids: jax.Array, weights: jax.Array | None, bits: Codes | None
) -> jax.Array:
    """`weighted_rows`, if all ids are in range, or have weight 0 for codes."""
    rows = read_rows(table, ids)
    if bits is None:
        rows = rows.astype(indexing.accumulator_dtype(rows.dtype))
    else:
        rows = quantized.planes(rows, *_as_planes(bits)).astype(jnp.float32)
    if weights is None:
        return rows
    return rows * indexing.append_axes(weights, rows.ndim)


def in_range_only(weights: Any, ids: jax.Array, height: int) -> jax.Array:
    """`weights`, 0 where an id is out of range."""
    # Where nothing is read the weight may be anything, and 0 * inf is NaN.
    inside = indexing.in_range(ids, height)
    return jnp.where(indexing.append_axes(inside, weights.ndim), weights, 0)


def row_type(table: jax.Array, bits: Codes | None) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of a weighted row."""
    if bits is None:
        return table.shape[1:], indexing.accumulator_dtype(table.dtype)
    bits, only = _as_planes(bits)
    return (8 // bits if only is None else 1, table.shape[1]), jnp.float32


def _as_planes(bits: Codes) -> tuple[int, int | None]:
    return bits if isinstance(bits, tuple) else (bits, None)
