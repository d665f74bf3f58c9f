"""unique and partition: distinct ids, and ids grouped by shard.

Here ids are keys of any integer type, including hashes and negative numbers. There is
no table, so an id is never out of range: ids are neither dropped nor truncated to 32
bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike
from sparsejax._rows import merge
from sparsejax._segments import SegmentTensor, elements


def unique(ids: ArrayLike, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the distinct ids in ascending order, in an array of static size.

    `out[inverse[i]] == ids[i]`, so `sj.lookup(table, out)[inverse]` reads a table only
    once for each distinct id of a batch.

    Args:
      ids: integers of any dtype and shape, including negative values and the largest
        value of the dtype.
      size: int, slots of the result, as in `jax.numpy.unique`. `ids.size` always
        suffices.

    Returns:
      `(out [size], inverse int32[*ids.shape], count int32[])`. `out` has the dtype
      of `ids`; its slots from `count` on contain the largest value of that dtype, which
      is out of range for any table if the dtype has 32 bits (cast narrower ids first,
      and do not look up with mode "clip"). `count` is the true number of distinct ids.
      If it exceeds `size`, the largest ids are missing from `out`, and their
      `inverse` is `size`, which is out of range.

    Raises:
      TypeError: `ids` are not integers, or `size` is not a static int.
      ValueError: `size` is negative, or 64-bit ids do not fit in 32 bits and
        `jax_enable_x64` is not set.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> out, inverse, count = sj.unique(jnp.array([7, 3, 7, 7]), size=3)
      >>> out, inverse, count
      (Array([         3,          7, 2147483647], dtype=int32),
       Array([1, 0, 1, 1], dtype=int32), Array(2, dtype=int32))

    References:
      Caffe2, `Unique`; `jax.numpy.unique(size=)`.
    """
    ids = _keys(ids)
    size = _arguments.static_int("size", size)
    largest = int(jnp.iinfo(ids.dtype).max)
    flat = ids.reshape(-1)
    # The plan treats `largest` as an empty slot. As an id it comes last, right before
    # padding of the same value.
    out, slot, others = merge.merge_plan(flat, largest, size)
    is_largest = flat == _arguments.scalar(largest, flat)
    slot = jnp.where(
        is_largest, jnp.minimum(others, _arguments.scalar(size, others)), slot
    )
    count = others + jnp.any(is_largest).astype(jnp.int32)
    return out, slot.reshape(ids.shape), count


def partition(ids: ArrayLike, num_parts: int) -> SegmentTensor:
    """Groups ids by `ids mod num_parts`, with their original positions.

    It is Caffe2's Partition. It splits ids, where `optax.partition` and
    `equinox.partition` split a tree of parameters.

    Segment p contains the ids with `ids[i] mod num_parts == p`, in their original
    order. The remainder is Python's, never negative: -1 is in the last part.

    Args:
      ids: integers of any dtype and shape.
      num_parts: int, at least 1.

    Returns:
      SegmentTensor of `num_parts` segments and `ids.size` elements, whose values are
      `{"id": [n], "position": int32[n]}`, with `ids.reshape(-1)[position] == id`.
      `x[position]` groups other values in the same way, and
      `jnp.zeros_like(x).at[position].set(x)` restores the original order.

    Raises:
      TypeError: `ids` are not integers, or `num_parts` is not a static int.
      ValueError: `num_parts` is not positive, or 64-bit ids do not fit in 32 bits and
        `jax_enable_x64` is not set.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> parts = sj.partition(jnp.array([4, 7, -1, 6]), 2)
      >>> parts.lengths, parts.values["id"], parts.values["position"]
      (Array([2, 2], dtype=int32), Array([ 4,  6,  7, -1], dtype=int32),
       Array([0, 3, 1, 2], dtype=int32))

    References:
      Caffe2, `Partition`.
    """
    num_parts = _arguments.static_int("num_parts", num_parts, 1)
    flat = _keys(ids).reshape(-1)
    wide = _arguments.index_dtype(num_parts, flat.dtype)
    part = jnp.remainder(flat.astype(wide), np.array(num_parts, wide))
    part = part.astype(_arguments.index_dtype(num_parts))
    position = merge.stable_order(part, num_parts)
    values = {"id": flat[position], "position": position}
    segment_ids = part[position]
    return SegmentTensor.from_segment_ids(
        values, segment_ids, num_parts, is_sorted=True
    )


# ------------------------------------------------------------------ private


def _keys(ids: Any) -> jax.Array:
    """Returns ids as a JAX array, or raises if JAX would truncate them to 32 bits."""
    ids = _arguments.as_integers(ids)
    return jnp.asarray(elements.narrow(ids, "ids"))
