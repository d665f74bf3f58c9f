"""segment_cumsum, and `Order`: running sums and products inside segments.

One associative scan runs over all segments; its operator restarts at the first element
of each segment. Nothing is subtracted, so rounding errors, infinities and NaN do not
leak from one segment into another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax._rows import indexing
from sparsejax._segments.reduce.segments import Segments, segment_reduction


@segment_reduction(kind="number", empty="0", per_element=True)
def segment_cumsum(x: jax.Array, segments: Segments) -> jax.Array:
    """Computes the cumulative sum of `data` inside each segment.

    `out[i] = sum_{j <= i: segment_ids[j] == segment_ids[i]} data[j]`

    Returns:
      `[n, ...]`, of data's shape and dtype. Floats of 16 bits are summed in float32.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.segment_cumsum(jnp.array([1, 2, 3, 4]), jnp.array([0, 0, 1, 1]))
      Array([1, 3, 3, 7], dtype=int32)

    References:
      Blelloch (1990), "Prefix sums and their applications" (segmented scans); NumPy,
      `cumsum`.
    """
    order = in_order(segments)
    running = order.running(jnp.add, 0, order.rows(segments.mask(x)))
    return segments.mask(order.back(running))


# ------------------------------------------------------------------ elements in order


@dataclasses.dataclass(frozen=True)
class Order:
    """The elements grouped by segment, each segment in its original order.

    Args:
      segments: the segments of the elements in this order.
      permutation: int32 `[n]`, the position of each element in the data; None if the
        data is already in this order.
    """

    segments: Segments
    permutation: jax.Array | None

    def rows(self, x: jax.Array) -> jax.Array:
        """Returns `x` in this order."""
        if self.permutation is None:
            return x
        return x.at[self.permutation].get(mode="clip", unique_indices=True)

    def back(self, x: jax.Array) -> jax.Array:
        """Returns `x`, which is in this order, in the order of the data."""
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
        """Applies `op` over each element of `x` and all earlier ones of its segment.

        Args:
          op: associative, elementwise.
          identity: the identity element of `op`.
          x: `[n, ...]`, in this order.
          reverse: True takes all later elements instead of the earlier ones.
          exclusive: True leaves out the element itself.
        """
        ids = self.segments.ids
        if ids.shape[0] == 0:
            return x
        neutral = jnp.full((), identity, x.dtype)
        new = jnp.ones((1,), bool)
        edge = ids[1:] != ids[:-1]
        edge = jnp.concatenate([edge, new] if reverse else [new, edge])
        edge = indexing.append_axes(edge, x.ndim)

        def combine(a, b):
            # `where` selects the operand, not the result: the gradient must not
            # multiply by elements of an earlier segment, which may be NaN.
            (edge_a, a), (edge_b, b) = a, b
            return edge_a | edge_b, op(jnp.where(edge_b, neutral, a), b)

        out = lax.associative_scan(combine, (edge, x), reverse=reverse)[1]
        if not exclusive:
            return out
        pad = jnp.full_like(out[:1], neutral)
        out = jnp.concatenate([out[1:], pad] if reverse else [pad, out[:-1]])
        return jnp.where(edge, neutral, out)


def in_order(segments: Segments) -> Order:
    """Groups the elements by segment; ids out of range come before or after."""
    if segments.is_sorted:
        return Order(segments, None)
    place = lax.iota(jnp.int32, segments.ids.shape[0])
    ids, place = lax.sort((segments.ids, place), num_keys=1, is_stable=True)
    return Order(dataclasses.replace(segments, ids=ids, is_sorted=True), place)
