"""The ids of the rows that a layer reads, as a `SparseBlock` lists them for a store.

One meaning of negative ids, for all layers: -1 stands for an element that reads no row,
such as padding. Any other id outside of the table is out of range, and `Trainer`
rejects it; an id of -1 that is not padding is therefore returned as -2.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor


def row_ids(ids: Any, skip: Any, height: int, mode: str) -> Any:
    """Replaces `ids` by -1 where `skip` is set, or where `mode` reads no row.

    Args:
      ids: integers.
      skip: booleans that broadcast to `ids`.
      height: the number of rows of the table.
      mode: of the layer. `"clip"` gives the nearest row; `"zero"` and `"drop"` read
        no row for an id out of range; under other modes it stays out of range.
    """
    if isinstance(ids, np.ndarray) and isinstance(skip, np.ndarray):
        in_range = not ids.size or (ids.min() >= 0 and ids.max() < height)
        if in_range and not skip.any():
            return ids  # the common case, without a copy
        xp: Any = np
        limits = np.iinfo(np.int64)
    else:
        xp, ids = jnp, jnp.asarray(ids)
        limits = jnp.iinfo(indexing.promote(ids.dtype, jnp.int8))
    if ids.dtype.kind == "u":  # a large id must not become negative
        largest = min(int(limits.max), int(jnp.iinfo(ids.dtype).max))
        ids = xp.minimum(ids, np.array(largest, ids.dtype))
    ids = ids.astype(limits.dtype)
    if mode == "clip":
        last = min(height - 1, int(limits.max))
        ids = xp.clip(ids, np.array(0, ids.dtype), np.array(last, ids.dtype))
    elif mode in ("zero", "drop"):
        in_range = ids >= 0
        if height <= limits.max:
            in_range &= ids < np.array(height, ids.dtype)
        ids = xp.where(in_range, ids, np.array(-1, ids.dtype))
    else:
        minus_one = ids == np.array(-1, ids.dtype)
        ids = xp.where(minus_one, np.array(-2, ids.dtype), ids)
    return xp.where(skip, np.array(-1, ids.dtype), ids)


def without_segment(st: SegmentTensor, ndim: int) -> Any:
    """Masks the elements outside all segments, with axes added up to `ndim`."""
    ids = on_host(st.segment_ids)
    empty = ~((ids >= 0) & (ids < st.num_segments))
    return indexing.append_axes(empty, ndim)


def on_host(x: Any) -> Any:
    """Makes `x` a NumPy array if this process has its values; else returns `x`."""
    if not _arguments.is_concrete(x) or not getattr(x, "is_fully_addressable", True):
        return x
    return np.asarray(x)
