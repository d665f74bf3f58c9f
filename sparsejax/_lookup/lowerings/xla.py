"""The reference lowerings, in plain XLA. Every other lowering must equal them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax._rows import indexing, quantized


# The bits of a code, or these and one plane of the codes.
Codes: TypeAlias = int | tuple[int, int]


@dataclasses.dataclass(frozen=True)
class BagSpec:
    """The static arguments of `bag_sum` and of its transpose.

    Args:
      segmented: True if ids are `[n]`, followed by segment ids, not `[B, L]`.
      weighted: True if weights are the last argument.
      num_bags: the number of bags.
      indices_are_sorted: a promise that segment ids never decrease.
      bits: of a code if the table is the codes of a QuantizedTable. Such a table always
        has weights, `[..., 2]`, which are 0 if an id is out of range.
    """

    segmented: bool
    weighted: bool
    num_bags: int
    indices_are_sorted: bool = False
    bits: Codes | None = None

    def segment_ids(self, rest: Sequence[Any]) -> Any:
        """Returns the segment ids out of the arguments after ids, or None."""
        return rest[0] if self.segmented else None

    def weights(self, rest: Sequence[Any]) -> Any:
        """Returns the weights out of the arguments after ids, or None."""
        return rest[-1] if self.weighted else None


def read_rows(
    table: jax.Array, ids: jax.Array, *, fill: bytes | None = None
) -> jax.Array:
    """Returns `table[ids]`, see `sparsejax._lookup.lookup.read_rows`."""
    mode = "clip" if fill is None else "fill"
    value = None if fill is None else np.frombuffer(fill, table.dtype)[0]
    return table.at[ids].get(mode=mode, fill_value=value, wrap_negative_indices=False)


def bag_sum(
    table: jax.Array, ids: jax.Array, *rest: jax.Array, spec: BagSpec
) -> jax.Array:
    """Sums the rows of each bag, see `sparsejax._lookup.bag_sum`.

    XLA for GPU and TPU fuses a sum with the gather before it: the rows of a fixed bag
    are added up as they are read.
    """
    weights = spec.weights(rest)
    if weights is not None:
        weights = in_range_only(weights, ids, table.shape[0])
    if spec.bits is None:
        rows = weighted_rows(table, ids, weights, None)
    else:
        assert weights is not None  # codes always have weights
        rows = weighted_rows(table, ids, weights[..., 0], spec.bits)
        rows += indexing.append_axes(weights[..., 1], rows.ndim)
    if not spec.segmented:
        return jnp.sum(rows, axis=1)
    if spec.num_bags == 0:  # JAX cannot differentiate a scatter to an empty axis
        return rows[:0]
    total = jnp.zeros((spec.num_bags, *rows.shape[1:]), rows.dtype)
    return total.at[spec.segment_ids(rest)].add(
        rows,
        mode="drop",
        wrap_negative_indices=False,
        indices_are_sorted=spec.indices_are_sorted,
    )


def bags_with(
    is_true: jax.Array,
    segment_ids: jax.Array,
    *,
    num_bags: int,
    indices_are_sorted: bool,
) -> list[jax.Array]:
    """Returns `[bool[num_bags]]`: True for each bag with a true element."""
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
    spec: BagSpec,
) -> jax.Array:
    """Transposes `bag_sum`: adds each bag's sum to its rows of a table."""
    table = jnp.zeros((height, *sums.shape[1:]), sums.dtype)
    if spec.segmented:
        rows = row_cotangents(sums, ids, *rest, spec=spec)
        return indexing.add_rows(table, ids, rows)

    # One column of the bags at a time: all rows read would be an array [B, L, ...].
    def add(j, table):
        column = lambda x: lax.dynamic_index_in_dim(x, j, 1)
        parts = [column(x) for x in (ids, *rest)]
        rows = row_cotangents(sums, *parts, spec=spec)
        return indexing.add_rows(table, parts[0], rows)

    return lax.fori_loop(0, ids.shape[1], add, table)


def row_cotangents(
    cotangent: jax.Array,
    ids: jax.Array,
    *rest: jax.Array,
    spec: BagSpec,
) -> jax.Array:
    """Returns the cotangents of the rows read, `[*ids.shape, ...]`."""
    if spec.segmented:
        out = indexing.take_rows(cotangent, spec.segment_ids(rest))
    else:
        shape = (*ids.shape, *cotangent.shape[1:])
        out = jnp.broadcast_to(jnp.expand_dims(cotangent, 1), shape)
    if spec.weighted:
        out *= indexing.append_axes(spec.weights(rest), out.ndim)
    return out


def weighted_rows(
    table: jax.Array, ids: jax.Array, weights: jax.Array | None, bits: Codes | None
) -> jax.Array:
    """Returns `weights * table[ids]`, wide, with zeros for ids out of range.

    The weights of ids out of range are finite.
    """
    if bits is not None:  # the weights of codes are 0 for ids out of range
        return weighted_rows_in_range(table, ids, weights, bits)
    rows = indexing.take_rows(table, ids)
    rows = rows.astype(indexing.accumulator_dtype(rows.dtype))
    if weights is None:
        return rows
    return rows * indexing.append_axes(weights, rows.ndim)


def weighted_rows_in_range(
    table: jax.Array, ids: jax.Array, weights: jax.Array | None, bits: Codes | None
) -> jax.Array:
    """Returns `weighted_rows` if all ids are in range or, for codes, have weight 0."""
    rows = read_rows(table, ids)
    if bits is None:
        rows = rows.astype(indexing.accumulator_dtype(rows.dtype))
    else:
        assert weights is not None  # codes always have weights
        rows = quantized.planes(rows, *_as_planes(bits)).astype(weights.dtype)
    if weights is None:
        return rows
    return rows * indexing.append_axes(weights, rows.ndim)


def in_range_only(weights: Any, ids: jax.Array, height: int) -> jax.Array:
    """Returns `weights`, 0 for ids out of range."""
    # The given weight of such an id may be anything, and 0 * inf is NaN.
    inside = indexing.in_range(ids, height)
    return jnp.where(indexing.append_axes(inside, weights.ndim), weights, 0)


def row_type(
    table: jax.Array, weights: jax.Array | None, bits: Codes | None
) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of a weighted row."""
    if bits is None or weights is None:
        return table.shape[1:], indexing.accumulator_dtype(table.dtype)
    bits, only = _as_planes(bits)
    return (8 // bits if only is None else 1, table.shape[1]), weights.dtype


def _as_planes(bits: Codes) -> tuple[int, int | None]:
    return bits if isinstance(bits, tuple) else (bits, None)
