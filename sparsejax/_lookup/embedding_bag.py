"""embedding_bag: reads rows of a table and reduces them bag by bag in one operation.

`sum`, `mean` and `sqrtn` are one weighted sum, `bag_sum`, and a divisor computed from
the weights alone, so the rows read are never an array in the program. The other
combiners, tables that are SelectedRows, and `max_norm` read the rows first.

Every combiner ignores skipped elements (padding, and elements that are in no bag): in
sums, in counts and in maxima.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike
from sparsejax._lookup import lookup
from sparsejax._lookup.bag_sum import bag_sum, bags_with, quantized_bag_sum
from sparsejax._rows import (
    QuantizedTable,
    RowTable,
    SelectedRows,
    Table,
    arithmetic,
    as_table,
    indexing,
    is_quantized,
    reduce_row_table,
)
from sparsejax._segments import SegmentTensor
from sparsejax._segments.reduce.exponentials import segment_logsumexp
from sparsejax._segments.reduce.extremes import segment_max, segment_min
from sparsejax._segments.reduce.segments import (
    Segments,
    check_arguments,
    check_weights,
)


_SUMS = ("sum", "mean", "sqrtn")
_COMBINERS = (*_SUMS, "max", "min", "logsumexp", "none")


# ------------------------------------------------------------------ public


def embedding_bag(
    table: ArrayLike | Table,
    ids: ArrayLike | SegmentTensor,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    weights: ArrayLike | None = None,
    combiner: str = "sum",
    mode: str = "fill",
    padding_id: int | None = None,
    max_norm: float | None = None,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Reduces rows of `table`, by id, to one row per bag.

    With `x_i = table[ids[i]]` and weights `w_i` (1 by default), over the i of bag b:

    - `"sum"`: `out[b] = sum w_i x_i`
    - `"mean"`: `out[b] = sum w_i x_i / sum w_i`
    - `"sqrtn"`: `out[b] = sum w_i x_i / sqrt(sum w_i^2)`
    - `"max"`, `"min"`, `"logsumexp"`: per column
    - `"none"`: the rows themselves, as `sparsejax.lookup` returns them

    An empty bag, and a bag whose divisor is 0, give zeros. Differentiable in `table`
    and `weights`.

    Args:
      table: `[V, ...]`, as in `sparsejax.lookup`.
      ids: integers. `[n]`, with `segment_ids`; or `[..., L]`, one bag per row,
        padded with `padding_id`; or a SegmentTensor of ids.
      segment_ids: integers `[n]`, the bag of each id; out of range for an id that is
        in no bag.
      num_segments: static int, the number of bags; by default the largest segment id
        plus 1, outside of `jit` only.
      weights: real numbers with the shape of `ids`, for sum, mean and sqrtn.
      combiner: how a bag is reduced.
      mode, max_norm: as in `sparsejax.lookup`. An id out of range counts in a mean.
      padding_id: int, an id that does not count in any bag.
      indices_are_sorted: bool, a promise that `segment_ids` ascend, which is faster.

    Returns:
      `[num_segments, *table.shape[1:]]`, or `[..., *table.shape[1:]]` for padded ids,
      of the table's dtype; means and weighted sums of integers are float32.

    Raises:
      TypeError, ValueError: an argument has the wrong type, dtype or shape, or the
        bags are missing or passed twice.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> table, ids = jnp.array([[1.0], [3.0], [5.0]]), jnp.array([0, 2, 1])
      >>> sj.embedding_bag(table, ids, jnp.array([0, 0, 2]), 3).T
      Array([[6., 0., 3.]], dtype=float32)

    References:
      Caffe2, `SparseLengthsSum` and related operators; PyTorch, `EmbeddingBag`;
      TensorFlow, `embedding_lookup_sparse` (`sqrtn`, weights).
    """
    table = as_table(table)
    if table.dtype == jnp.bool_:
        raise TypeError(
            "table must be numeric, got bool. Cast it with .astype(jnp.int32)."
        )
    mode = lookup.check_mode(mode)
    max_norm = lookup.check_max_norm(max_norm, table.dtype)
    combiner = check_combiner(combiner)
    if weights is not None and combiner not in _SUMS:
        raise ValueError(
            f"weights need combiner 'sum', 'mean' or 'sqrtn', got {combiner!r}. Leave "
            "them out, or scale the rows of sparsejax.lookup."
        )
    is_tensor = isinstance(ids, SegmentTensor)
    if is_tensor and not hasattr(ids.values, "dtype"):
        raise TypeError(
            f"ids.values must be one array, got {_arguments.kind_of(ids.values)}. Pass "
            "a SegmentTensor of that array, or the inner SegmentTensor."
        )
    element_ids = _arguments.as_integers(ids.values if is_tensor else ids)
    padding = lookup.padding_mask(element_ids, padding_id)
    if weights is not None:
        weights = _as_weights(weights, element_ids, table.dtype)
    arrays = table, _arguments.saturate(element_ids), weights, padding
    reduce: Any = functools.partial(_reduce, combiner, mode, max_norm)
    if is_tensor or (segment_ids is not None and element_ids.ndim == 1):
        data = ids if is_tensor else arrays[1]
        bags = segment_ids, num_segments, indices_are_sorted
        return reduce(*arrays, check_arguments(data, *bags, name="ids")[1])
    _check_padded(element_ids, segment_ids, num_segments)

    def reduce_padded(table, ids, *others):
        flat = lambda x: None if x is None else indexing.merge_axes(x, ids.ndim - 1)
        lead = ids.shape if combiner == "none" else ids.shape[:-1]
        bags = reduce(table, *map(flat, (ids, *others)), None)
        return bags.reshape(*lead, *table.shape[1:])

    ndim = element_ids.ndim - (combiner != "none")
    return indexing.sharded_like_ids(reduce_padded, *arrays, ndim=ndim)


def _reduce(
    combiner: str,
    mode: str,
    max_norm: float | None,
    table: Any,
    ids: Any,
    weights: jax.Array | None,
    padding: jax.Array | None,
    segments: Segments | None,
) -> jax.Array:
    """Reduces bags `[B, L]`, or bags `[n]` of `segments`."""
    ids = _arguments.as_ids(ids, table.shape[0])
    skip = padding
    if segments is not None:
        skip = ~segments.inside if skip is None else skip | ~segments.inside
    if weights is not None and skip is not None:
        weights = indexing.zero_unless(~skip, weights)  # may be inf, and 0 * inf is NaN
    if isinstance(table, RowTable):
        pair = None if segments is None else (segments.ids, segments.count)
        how = dict(combiner=combiner, mode=mode, max_norm=max_norm)
        return reduce_row_table(table, ids, skip, weights, pair, **how)
    bags = _Bags(ids, skip, weights, segments)
    fuses = combiner in _SUMS and jnp.issubdtype(table.dtype, jnp.floating)
    if fuses and max_norm is None and not isinstance(table, SelectedRows):
        total = _fused_sum(table, bags, mode)
        return _divide(total, bags, combiner).astype(table.dtype)
    rows = lookup.read(table, ids, skip, mode)
    if max_norm is not None:
        rows = lookup.clip_rows(rows, max_norm, table.ndim - 1)
    return _reduce_rows(rows, bags, combiner)


# ------------------------------------------------------------------ arguments


@dataclasses.dataclass(frozen=True)
class _Bags:
    """The elements of the bags: `[B, L]` for fixed bags, `[n]` for segmented ones.

    Args:
      ids: integers, the ids looked up.
      skip: bool, true for elements that are in no bag; None if each is in a bag.
      weights: numbers, or None for ones.
      segments: None for fixed bags.
    """

    ids: jax.Array
    skip: jax.Array | None
    weights: jax.Array | None
    segments: Segments | None

    def total(self, x: jax.Array) -> jax.Array:
        """Returns the sum of `x`, a number or a row for each element, of each bag."""
        if self.skip is not None:
            x = indexing.zero_unless(~self.skip, x)
        if self.segments is None:
            return jnp.sum(x, axis=1)
        return self.segments.sum(x)

    def norms(self, x: jax.Array) -> jax.Array:
        """Returns the root of the sum of squares of `x`, a number for each element."""
        if self.segments is None:
            # The weights of skipped elements are zeros.
            return arithmetic.norms(x)
        x, unit = self.segments.in_units(x)
        return unit * arithmetic.root(self.total(x * x))


def _check_padded(ids: Any, segment_ids: Any, num_segments: Any) -> None:
    """Raises unless `ids` are padded, and nothing else says which bags there are."""
    if ids.ndim > 1 and not (segment_ids is None is num_segments):
        raise ValueError(
            f"ids of shape {ids.shape} are one bag per row. Omit segment_ids and "
            "num_segments, or pass ids [n] with segment_ids."
        )
    if ids.ndim < 2:
        raise ValueError(
            f"ids of shape {ids.shape} need segment_ids, the bag of each id. Pass "
            "them, a SegmentTensor, or ids padded to [B, L], one bag per row."
        )


def check_combiner(combiner: Any) -> str:
    """Returns `combiner`; raises unless it is the name of one."""
    if combiner not in _COMBINERS:
        names = ", ".join(map(repr, _COMBINERS))
        raise ValueError(
            f"combiner must be one of {names}, got {_arguments.show(combiner)}. 'none' "
            "returns the rows without reducing them."
        )
    return combiner


def _as_weights(weights: Any, ids: Any, dtype: Any) -> jax.Array:
    """Returns `weights` in the shape of `ids`, in the accumulator dtype of `dtype`."""
    weights = check_weights(_arguments.to_array(weights, "weights"), ids.shape)
    return weights.astype(indexing.float_accumulator_dtype(dtype))


# ------------------------------------------------------------------ sums


def _fused_sum(table: jax.Array | QuantizedTable, bags: _Bags, mode: str) -> jax.Array:
    """Returns the weighted sum of each bag, in the accumulator's dtype."""
    height = table.shape[0]
    safe = lookup.clip_ids(table, bags.ids) if mode == "clip" else bags.ids
    ids = safe
    if bags.skip is not None:
        ids = jnp.where(bags.skip, _arguments.scalar(height, ids), ids)
    add: Any = quantized_bag_sum if is_quantized(table) else bag_sum
    segments, where, options = bags.segments, (), {}
    if segments is not None:
        where = segments.ids, segments.count
        options = dict(indices_are_sorted=segments.is_sorted)
    total = add(table, ids, bags.weights, *where, **options)
    if mode in ("zero", "clip"):
        return total
    bad = ~indexing.in_range(safe, height)
    if bags.skip is not None:
        bad &= ~bags.skip
    if mode == "error":
        lookup.check_none(table, bad, bags.ids)
    is_bad = bags_with(bad, *where, **options) if where else jnp.any(bad, axis=1)
    # Adding NaN, unlike selecting it, keeps the gradients of the bag's other rows.
    nan = jnp.where(is_bad, jnp.nan, 0)
    return total + indexing.append_axes(nan.astype(total.dtype), total.ndim)


def _divide(total: jax.Array, bags: _Bags, combiner: str) -> jax.Array:
    """Divides the weighted sums as the combiner requires."""
    if combiner == "sum":
        return total
    dtype = indexing.float_accumulator_dtype(total.dtype)
    weights = bags.weights
    if weights is None:
        by = bags.total(jnp.ones(bags.ids.shape, dtype))
        by = arithmetic.root(by) if combiner == "sqrtn" else by
    else:
        by = bags.norms(weights) if combiner == "sqrtn" else bags.total(weights)
    return arithmetic.safe_divide(total.astype(dtype), by)


# ------------------------------------------------------------------ rows first


def _reduce_rows(rows: jax.Array, bags: _Bags, combiner: str) -> jax.Array:
    """Reduces rows that have been read."""
    if combiner == "none":
        return rows
    if combiner in _SUMS:
        keeps = bags.weights is None and combiner == "sum"
        dtype = rows.dtype if keeps else indexing.float_accumulator_dtype(rows.dtype)
        x = rows.astype(indexing.accumulator_dtype(dtype))
        if bags.weights is not None:
            x *= indexing.append_axes(bags.weights, x.ndim)
        total = _divide(bags.total(x), bags, combiner)
        floats = jnp.issubdtype(rows.dtype, jnp.inexact)
        return total.astype(rows.dtype if floats or keeps else dtype)
    segments = _flat_segments(bags)
    x = indexing.merge_axes(rows, bags.ids.ndim)
    reduce = {"max": segment_max, "min": segment_min, "logsumexp": segment_logsumexp}
    return reduce[combiner](
        x,
        segments.ids,
        segments.count,
        indices_are_sorted=segments.is_sorted,
        empty=0,
    )


def _flat_segments(bags: _Bags) -> Segments:
    """Returns the segments of the flattened elements, skipped ones out of range."""
    if bags.segments is None:
        count, length = bags.ids.shape
        ids = lax.broadcasted_iota(jnp.int32, (count, length), 0).reshape(-1)
        segments = Segments(ids, count, is_sorted=True)
    else:
        segments = bags.segments
    if bags.skip is None:
        return segments
    none = _arguments.scalar(segments.count, segments.ids)
    ids = jnp.where(bags.skip.reshape(-1), none, segments.ids)
    return Segments(ids, segments.count)
