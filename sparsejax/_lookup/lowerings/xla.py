"""The reference lowerings, in plain XLA. Every other lowering must equal them."""

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax._rows import indexing


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
) -> jax.Array:
    """Sums of the rows in each bag: see `sparsejax._lookup.bag_sum`.

    XLA for GPU and TPU fuses a sum with the gather before it, so that the rows of a
    fixed bag are added up as they are read.
    """
    wide = indexing.accumulator_dtype(table.dtype)
    rows = weighted_rows(table, ids, rest[-1] if weighted else None, wide)
    if not segmented:
        return jnp.sum(rows, axis=1)
    total = jnp.zeros((num_bags, *table.shape[1:]), wide)
    return total.at[rest[0]].add(
        rows,
        mode="drop",
        wrap_negative_indices=False,
        indices_are_sorted=indices_are_sorted,
    )


def weighted_rows(
    table: jax.Array, ids: jax.Array, weights: jax.Array | None, dtype: np.dtype
) -> jax.Array:
    """`weights * table[ids]`, in `dtype`; zeros where an id is out of range."""
    rows = indexing.take_rows(table, ids).astype(dtype)
    if weights is None:
        return rows
    # Where nothing is read the weight may be anything, and 0 * inf is NaN.
    weights = jnp.where(indexing.in_range(ids, table.shape[0]), weights, 0)
    return rows * indexing.append_axes(weights, rows.ndim)
