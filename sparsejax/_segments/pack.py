"""pack_segments and unpack_segments: between segments and rows of equal length.

Each is a single gather per array, with indices computed from the lengths. Packing is
`SegmentTensor.to_padded` with zeros.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, PyTree
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor


def pack_segments(
    st: SegmentTensor, max_length: int, *, return_mask: bool = False
) -> Any:
    """Packs segments as rows of one array, cut at `max_length`, padded with zeros.

    `out[s, j]` is element j of segment s, or zero if the segment is shorter.

    Args:
      st: SegmentTensor, whose values are an array `[n, ...]` or a tree of arrays.
      max_length: int L. Elements of a segment beyond L are cut and get no gradient.
      return_mask: True also returns a mask of the slots that contain an element.

    Returns:
      `[S, max_length, ...]`, or a tree of such arrays, of the values' dtypes. With
      `return_mask`, a pair of these and bool `[S, max_length]`. Differentiable in the
      values.

    Raises:
      TypeError: `st` is not a SegmentTensor, or `max_length` is not a static int.
      ValueError: `max_length` is negative.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> data, lengths = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([1, 0, 3])
      >>> st = sj.SegmentTensor.from_lengths(data, lengths)
      >>> sj.pack_segments(st, 2)
      Array([[1., 0.],
             [0., 0.],
             [2., 3.]], dtype=float32)
      >>> sj.pack_segments(st, 2, return_mask=True)[1]
      Array([[ True, False],
             [False, False],
             [ True,  True]], dtype=bool)

    References:
      Caffe2, `PackSegments` (`max_length`, `return_presence_mask`).
    """
    if not isinstance(st, SegmentTensor):
        raise TypeError(
            f"st must be a SegmentTensor, got {_arguments.kind_of(st)}. Make one with "
            "SegmentTensor.from_lengths(data, lengths)."
        )
    max_length = _arguments.static_int("max_length", max_length)
    packed = st.to_padded(max_length, 0)
    if not return_mask:
        return packed
    return packed, lax.iota(jnp.int32, max_length)[None] < st.lengths[:, None]


def unpack_segments(padded: PyTree, lengths: ArrayLike) -> SegmentTensor:
    """Returns the first `lengths[s]` elements of each row s of `padded`, as segments.

    The inverse of `pack_segments`, except for elements that it cut: a length above L
    counts as L.

    Args:
      padded: `[S, L, ...]`, or a tree of such arrays.
      lengths: int `[S]`.

    Returns:
      SegmentTensor of S segments. Its capacity is the number of elements, or S * L
      inside `jit`, where that number is unknown; empty elements come last.
      Differentiable in `padded`.

    Raises:
      TypeError: `lengths` are not integers.
      ValueError: the shapes do not match.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> padded = jnp.array([[1.0, 0.0], [0.0, 0.0], [2.0, 3.0]])
      >>> st = sj.unpack_segments(padded, jnp.array([1, 0, 2]))
      >>> st.values, st.lengths
      (Array([1., 2., 3.], dtype=float32), Array([1, 0, 2], dtype=int32))

    References:
      Caffe2, `UnpackSegments`.
    """
    is_list = lambda x: isinstance(x, list)  # an array, never a node of the tree
    as_array = lambda x: _arguments.to_array(x, "padded")
    padded = jax.tree.map(as_array, padded, is_leaf=is_list)
    shapes = {x.shape[:2] for x in jax.tree.leaves(padded)}
    if len(shapes) != 1 or any(len(shape) != 2 for shape in shapes):
        raise ValueError(
            "padded must be an array [S, L, ...], or a tree of such arrays with equal "
            f"S and L, got shapes {[x.shape for x in jax.tree.leaves(padded)]}."
        )
    ((rows, width),) = shapes
    lengths = _arguments.as_integers(lengths, "lengths")
    if lengths.shape != (rows,):
        raise ValueError(
            f"lengths must be [{rows}], one a row of padded, got {lengths.shape}."
        )
    capacity = rows * width
    if _arguments.is_concrete(lengths):
        lengths = np.clip(np.asarray(lengths), 0, width)
        capacity = int(lengths.sum())
    lengths = jnp.clip(jnp.asarray(lengths), 0, width).astype(jnp.int32)
    ends = jnp.cumsum(lengths, dtype=_arguments.index_dtype(rows * width))
    position = lax.iota(ends.dtype, capacity)
    row = indexing.search_sorted(ends, position, side="right").astype(ends.dtype)
    source = row * width + position - indexing.take_rows(ends - lengths, row)
    source = jnp.where(row < rows, source, rows * width)
    values = jax.tree.map(
        lambda x: indexing.take_rows(x.reshape(rows * width, *x.shape[2:]), source),
        padded,
    )
    return SegmentTensor.from_lengths(values, lengths)
