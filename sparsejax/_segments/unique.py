"""unique and partition: distinct ids, and ids grouped by shard.

Ids here are keys of any integer type, including hashes and negative numbers. There is
no table yet, so no id is out of range: none is dropped and none is cut to 32 bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor


_UNIQUE = "sparsejax.unique"
_PARTITION = "sparsejax.partition"


def unique(ids: Any, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The distinct ids, ascending, in an array of static size.

    `out[inverse[i]] == ids[i]`. A table is then read once for each distinct id of a
    batch: `sj.lookup(table, out)[inverse]`.

    Args:
      ids: integers of any type and shape; negative values and the largest of the type
        are allowed.
      capacity: int, slots of the result. `ids.size` always suffices.

    Returns:
      `(out [capacity], inverse int32[*ids.shape], count int32[])`. `out` has the type
      of `ids`; its slots from `count` on hold the largest value of that type, which is
      out of range of any table if the type has 32 bits (cast narrower ids first, and do
      not look up with mode "clip"). `count` is the true number of distinct ids. If it
      exceeds `capacity`, the largest ids are missing in `out`, and their `inverse` is
      `capacity`, which is out of range.

    Raises:
      TypeError: `ids` are not integers.
      ValueError: `capacity` is not a static, non-negative int; or 64-bit ids do not
        fit into 32 bits, without `jax_enable_x64`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> out, inverse, count = sj.unique(jnp.array([7, 3, 7, 7]), capacity=3)
      >>> out, inverse, count
      (Array([         3,          7, 2147483647], dtype=int32),
       Array([1, 0, 1, 1], dtype=int32), Array(2, dtype=int32))

    References:
      Caffe2, `Unique`; `jax.numpy.unique(size=)`.
    """
    ids = _keys(_UNIQUE, ids)
    capacity = _arguments.check_capacity(_UNIQUE, capacity)
    largest = int(jnp.iinfo(ids.dtype).max)
    flat = ids.reshape(-1)
    # The plan treats `largest` as an empty slot. As an id it comes last, where the
    # padding has the same value.
    out, slot, others = indexing.merge_plan(flat, largest, capacity)
    is_largest = flat == _arguments.scalar(largest, flat)
    slot = jnp.where(is_largest, jnp.minimum(others, np.int32(capacity)), slot)
    count = others + jnp.any(is_largest).astype(jnp.int32)
    return out, slot.reshape(ids.shape), count


def partition(ids: Any, num_parts: int) -> SegmentTensor:
    """Ids grouped by their remainder: the shard of each id, and its position.

    Segment p holds the ids with `ids[i] mod num_parts == p`, in the order given. The
    remainder is Python's, never negative: -1 is in the last part.

    Args:
      ids: integers of any type and shape.
      num_parts: int, at least 1.

    Returns:
      SegmentTensor of `num_parts` segments and `ids.size` elements, whose values are
      `{"id": [n], "position": int32[n]}`, with `ids.reshape(-1)[position] == id`. So
      `x[position]` groups values that belong to the ids in the same way, and
      `jnp.zeros_like(x).at[position].set(x)` restores the original order.

    Raises:
      TypeError: `ids` are not integers.
      ValueError: `num_parts` is not a static, positive int; or 64-bit ids do not fit
        into 32 bits, without `jax_enable_x64`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> parts = sj.partition(jnp.array([4, 7, -1, 6]), 2)
      >>> parts.lengths, parts.values["id"], parts.values["position"]
      (Array([2, 2], dtype=int32), Array([ 4,  6,  7, -1], dtype=int32),
       Array([0, 3, 1, 2], dtype=int32))

    References:
      Caffe2, `Partition`.
    """
    num_parts = _arguments.static_int(_PARTITION, "num_parts", num_parts, 1)
    flat = _keys(_PARTITION, ids).reshape(-1)
    wide = _arguments.index_dtype(num_parts, flat.dtype)
    part = jnp.remainder(flat.astype(wide), np.array(num_parts, wide))
    part = part.astype(_arguments.index_dtype(num_parts))
    position = indexing.stable_order(part, num_parts)
    values = {"id": flat[position], "position": position}
    segment_ids = part[position]
    return SegmentTensor.from_segment_ids(
        values, segment_ids, num_parts, is_sorted=True
    )


# ------------------------------------------------------------------ private


def _keys(call: str, ids: Any) -> jax.Array:
    """Ids as a JAX array, or an error if JAX would cut them to 32 bits."""
    ids = _arguments.as_integers(call, ids)
    is_wide = isinstance(ids, np.ndarray) and ids.itemsize == 8
    if is_wide and not _arguments.x64_enabled():
        low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
        limits = jnp.iinfo(jnp.int32 if ids.dtype.kind == "i" else jnp.uint32)
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"{call}: ids of {ids.dtype} range from {low} to {high}, and without "
                "64-bit types JAX would cut them to 32 bits. Set jax_enable_x64, or "
                "hash the ids to 32 bits first."
            )
        ids = ids.astype(limits.dtype)
    return jnp.asarray(ids)
