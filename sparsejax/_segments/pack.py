"""pack_segments and unpack_segments: segments to rows of equal length, and back.

Both only move elements, by one gather an array whose indices are computed from the
lengths; so their gradients move them back.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor


_PACK = "sparsejax.pack_segments"
_UNPACK = "sparsejax.unpack_segments"

_PADDED = (
    "{call}: padded must be an array [S, L, ...], or a tree of such arrays that agree "
    "in S and L, got {found}."
)


def pack_segments(st: Any, max_length: int, *, return_mask: bool = False) -> Any:
    """Segments as the rows of one array, cut at `max_length` and padded with zeros.

    `out[s, j]` is element j of segment s, zero where the segment has none.

    Args:
      st: SegmentTensor, whose values are an array `[n, ...]` or a tree of such.
      max_length: int L. What a segment has beyond is cut, and gets no gradient.
      return_mask: also return which slots hold an element.

    Returns:
      `[S, max_length, ...]`, or a tree of such, of the values' dtypes. With
      `return_mask` the pair of this and bool `[S, max_length]`. Differentiable in the
      values.

    Raises:
      TypeError: `st` is no SegmentTensor, or has one among its values.
      ValueError: `max_length` is no static, non-negative int.

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
            f"{_PACK}: st must be a SegmentTensor, got {_arguments.kind_of(st)}. Make "
            "one with SegmentTensor.from_lengths(data, lengths)."
        )
    nested = jax.tree.leaves(st.values, is_leaf=_is_segments)
    if any(_is_segments(leaf) for leaf in nested):
        raise TypeError(
            f"{_PACK}: st has a SegmentTensor among its values, whose elements have no "
            "place in an array. Pack that first, and pass what comes out as the values."
        )
    max_length = _arguments.static_int(_PACK, "max_length", max_length)
    if not st.is_sorted:
        st = st.sort()
    column = lax.iota(jnp.int32, max_length)[None, :]
    mask = column < st.lengths.astype(jnp.int32)[:, None]
    source = st.offsets[:-1].astype(jnp.int32)[:, None] + column
    source = jnp.where(mask, source, np.int32(st.capacity))
    packed = jax.tree.map(
        lambda x: indexing.take_rows(jnp.asarray(x), source), st.values
    )
    return (packed, mask) if return_mask else packed


def unpack_segments(padded: Any, lengths: Any) -> SegmentTensor:
    """The first `lengths[s]` elements of each row s of `padded`, as segments.

    The inverse of `pack_segments`: what that cut is not there any more, so a length
    above L counts as L.

    Args:
      padded: `[S, L, ...]`, or a tree of such arrays.
      lengths: int `[S]`.

    Returns:
      SegmentTensor of S segments, whose capacity is the number of elements. Inside
      `jit`, where that is not known, it is S * L, and the elements come first.
      Differentiable in `padded`.

    Raises:
      TypeError: `lengths` are not integers.
      ValueError: the shapes do not go together.

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
    as_array = lambda x: _arguments.to_array(_UNPACK, x, "padded")
    padded = jax.tree.map(as_array, padded, is_leaf=is_list)
    shapes = {x.shape[:2] for x in jax.tree.leaves(padded)}
    if len(shapes) != 1 or any(len(shape) != 2 for shape in shapes):
        found = [x.shape for x in jax.tree.leaves(padded)]
        raise ValueError(_PADDED.format(call=_UNPACK, found=f"shapes {found}"))
    ((rows, width),) = shapes
    lengths = _arguments.as_integers(_UNPACK, lengths, "lengths")
    if lengths.shape != (rows,):
        raise ValueError(
            f"{_UNPACK}: lengths must have shape [{rows}], as padded has rows, got "
            f"{lengths.shape}."
        )
    capacity = rows * width
    if _arguments.is_concrete(lengths):
        lengths = np.clip(np.asarray(lengths), 0, width)
        capacity = int(lengths.sum())
    lengths = jnp.clip(jnp.asarray(lengths), 0, width).astype(jnp.int32)
    ends = jnp.cumsum(lengths, dtype=_arguments.index_dtype(rows * width))
    place = lax.iota(ends.dtype, capacity)
    row = jnp.searchsorted(ends, place, side="right").astype(ends.dtype)
    source = row * width + place - indexing.take_rows(ends - lengths, row)
    source = jnp.where(row < rows, source, rows * width)
    values = jax.tree.map(
        lambda x: indexing.take_rows(x.reshape(rows * width, *x.shape[2:]), source),
        padded,
    )
    return SegmentTensor.from_lengths(values, lengths)


# ------------------------------------------------------------------ private


def _is_segments(x: Any) -> bool:
    return isinstance(x, SegmentTensor)
