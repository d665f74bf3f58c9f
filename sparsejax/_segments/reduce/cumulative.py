"""Running sums and products inside segments: segment_cumsum, and what prod needs.

Segments are scanned one after another in one associative scan, whose operator starts
anew at each segment's first element. Nothing is subtracted, so no segment's rounding,
infinity or NaN reaches another.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax._rows import indexing
from sparsejax._segments.reduce import common as args
from sparsejax._segments.reduce.common import Segments


_CUMSUM = "sparsejax.segment_cumsum"


def segment_cumsum(
    data: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    empty: Any = None,
) -> Any:
    """Running sum of `data` inside each segment.

    `out[i] = sum_{j <= i: segment_ids[j] == segment_ids[i]} data[j]`

    Args:
      data: `[n, ...]`, integers or floats; or a SegmentTensor, which brings its own
        segments.
      segment_ids: integers `[n]`, as `segment_sum` has them, like the next two.
      num_segments: int.
      indices_are_sorted: bool; saves a stable sort of the ids.
      empty: scalar, what elements that belong to no segment get; 0 if left out.

    Returns:
      `[n, ...]`, of data's shape and dtype. Floats of 16 bits are summed in float32.

    Raises:
      TypeError, ValueError: as `segment_sum` does.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_cumsum(jnp.array([1, 2, 3, 4]), jnp.array([0, 0, 1, 1]))
      Array([1, 3, 3, 7], dtype=int32)

    References:
      Blelloch (1990), "Prefix sums and their applications" (segmented scans); NumPy,
      `cumsum`.
    """

    def cumsum(x: jax.Array, segments: Segments) -> jax.Array:
        args.check_kind(_CUMSUM, x, False)
        order = in_order(segments)
        wide = args.members_only(x, segments).astype(
            indexing.accumulator_dtype(x.dtype)
        )
        out = order.back(order.running(jnp.add, 0, order.rows(wide)))
        out = args.members_only(out.astype(x.dtype), segments)
        return args.fill_others(_CUMSUM, out, segments, empty)

    return args.over_segments(
        _CUMSUM, data, segment_ids, num_segments, indices_are_sorted, cumsum
    )


# ------------------------------------------------------------------ elements in order


@dataclasses.dataclass(frozen=True)
class Order:
    """Elements with those of a segment side by side, in the order they had.

    Args:
      segments: the segments of the elements so ordered.
      permutation: int32 `[n]`, where each of them is in the data; None if the data has
        them in that order.
    """

    segments: Segments
    permutation: jax.Array | None

    def rows(self, x: jax.Array) -> jax.Array:
        """`x` in this order."""
        if self.permutation is None:
            return x
        return x.at[self.permutation].get(mode="clip", unique_indices=True)

    def back(self, x: jax.Array) -> jax.Array:
        """`x`, which is in this order, in the order of the data."""
        if self.permutation is None:
            return x
        return jnp.zeros_like(x).at[self.permutation].set(x, unique_indices=True)

    def running(
        self,
        op: Callable[[jax.Array, jax.Array], jax.Array],
        identity: Any,
        x: jax.Array,
        *,
        reverse: bool = False,
        exclusive: bool = False,
    ) -> jax.Array:
        """`op` over each element of `x` and all before it (after it) in its segment.

        Args:
          op: associative, elementwise.
          identity: what `op` leaves the other operand as.
          x: `[n, ...]`, in this order.
          reverse: from the last element to the first.
          exclusive: without the element itself.
        """
        ids = self.segments.ids
        if ids.shape[0] == 0:
            return x
        neutral = jnp.full((), identity, x.dtype)
        new = jnp.ones((1,), bool)
        edge = ids[1:] != ids[:-1]
        edge = jnp.concatenate([edge, new] if reverse else [new, edge])
        edge = args.beside(edge, x.ndim)

        def combine(a, b):
            # The neutral element is put in, not the result chosen: where a segment
            # begins, what came before is then not multiplied by in the gradient.
            (edge_a, a), (edge_b, b) = a, b
            return edge_a | edge_b, op(jnp.where(edge_b, neutral, a), b)

        out = lax.associative_scan(combine, (edge, x), reverse=reverse)[1]
        if not exclusive:
            return out
        pad = jnp.full_like(out[:1], neutral)
        out = jnp.concatenate([out[1:], pad] if reverse else [pad, out[:-1]])
        return jnp.where(edge, neutral, out)


def in_order(segments: Segments) -> Order:
    """The elements ordered by segment; those of no segment are before or after."""
    if segments.is_sorted:
        return Order(segments, None)
    place = lax.iota(jnp.int32, segments.ids.shape[0])
    ids, place = lax.sort((segments.ids, place), num_keys=1, is_stable=True)
    return Order(dataclasses.replace(segments, ids=ids, is_sorted=True), place)
