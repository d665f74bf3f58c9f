"""Rules for the primitives that read rows: gather, slice, dynamic_slice, read_rows.

A view (`TableRef`) has one axis of rows; its other axes are the *content* of a row. An
equation reads rows if it selects along the row axis and takes the whole content.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._compat import primitives as p
from sparsejax._lookup.read_rows import read_rows_p
from sparsejax._rows import indexing
from sparsejax.transform.interpreter import RuleContext, register_rule
from sparsejax.transform.table import TableRef


@register_rule(p.gather_p)
def _gather_rule(
    ctx: RuleContext,
    ref: Any,
    indices: Any,
    *,
    dimension_numbers: Any,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **_: Any,
) -> Any:
    dims, axis = dimension_numbers, ref.row_axis
    if (
        dims.operand_batching_dims
        or axis not in dims.start_index_map
        or not _whole_rows(ref, slice_sizes)
        or mode not in _MODES
    ):
        return NotImplemented
    indices = jnp.asarray(indices)
    width, batch = slice_sizes[axis], indices.shape[:-1]
    last = ref.height - width
    position = list(dims.start_index_map).index(axis)
    start = _arguments.as_ids("gather", indices[..., position], ref.height)
    inside = jnp.clip(
        start, _arguments.scalar(0, start), _arguments.scalar(last, start)
    )
    valid = jnp.ones(batch, bool)
    if mode != lax.GatherScatterMode.CLIP:
        # XLA clamps a read that is out of range in these modes, too, but its transpose
        # drops it.
        valid = start == inside
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        for k, d in enumerate(dims.start_index_map):
            if d != axis:  # taken whole, so any start but 0 is out of range
                valid &= indices[..., k] == 0
    ids = inside[..., None] + _steps(width, inside.ndim + 1, inside.dtype)
    each_valid = jnp.broadcast_to(valid[..., None], ids.shape)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        # What these read is replaced below. With ids out of range, a gradient of this
        # gradient drops them as well.
        ids = jnp.where(each_valid, ids, _arguments.scalar(ref.height, ids))
    rows = ctx.read(ref, ids, each_valid)
    # [*batch, width, *content] -> [*batch, *operand's axes] -> without collapsed ones
    rows = jnp.moveaxis(rows, len(batch), len(batch) + axis)
    kept = [d for d in range(ref.ndim) if d not in dims.collapsed_slice_dims]
    rows = rows.reshape(batch + tuple(slice_sizes[d] for d in kept))
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        mask = jnp.reshape(valid, batch + (1,) * len(kept))
        fill = indexing.fill_value(rows.dtype) if fill_value is None else fill_value
        rows = jnp.where(mask, rows, jnp.array(fill, rows.dtype))
    batch_axes, kept_axes = iter(range(len(batch))), iter(range(len(batch), rows.ndim))
    offset = set(map(int, dims.offset_dims))
    order = [next(kept_axes if d in offset else batch_axes) for d in range(rows.ndim)]
    return lax.transpose(rows, order)


@register_rule(p.dynamic_slice_p)
def _dynamic_slice_rule(
    ctx: RuleContext, ref: Any, *starts: Any, slice_sizes: Sequence[int], **_: Any
) -> Any:
    axis = ref.row_axis
    if not _whole_rows(ref, slice_sizes):
        return NotImplemented
    width = slice_sizes[axis]
    if width == ref.height:
        return ref
    start = _arguments.as_ids("dynamic_slice", starts[axis], ref.height)
    last = _arguments.scalar(ref.height - width, start)
    start = jnp.clip(start, _arguments.scalar(0, start), last)
    rows = ctx.read(ref, start[None] + _steps(width, 1, start.dtype))
    return jnp.moveaxis(rows, 0, axis)


@register_rule(p.slice_p)
def _slice_rule(
    ctx: RuleContext, ref: Any, *, start_indices: Any, limit_indices: Any, strides: Any
) -> Any:
    axis = ref.row_axis
    strides = strides or (1,) * ref.ndim
    taken = [range(*t) for t in zip(start_indices, limit_indices, strides)]
    if not _whole_rows(ref, [len(t) for t in taken]):
        return NotImplemented
    if len(taken[axis]) == ref.height:
        return ref
    ids = jnp.asarray(taken[axis], _arguments.index_dtype(ref.height))
    return jnp.moveaxis(ctx.read(ref, ids), 0, axis)


@register_rule(read_rows_p)
def _read_rows_rule(ctx: RuleContext, ref: Any, ids: Any) -> Any:
    # In the trace of a function that itself takes a gradient by sparsejax.
    if ref.row_axis != 0:
        return NotImplemented
    return ctx.read(ref, ids)


_MODES = (
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


def _whole_rows(ref: TableRef, sizes: Sequence[int]) -> bool:
    return all(sizes[d] == ref.shape[d] for d in range(ref.ndim) if d != ref.row_axis)


def _steps(width: int, ndim: int, dtype: Any) -> np.ndarray:
    """`0, 1, ..., width - 1` along the last of `ndim` axes."""
    return np.arange(width, dtype=dtype).reshape((1,) * (ndim - 1) + (width,))
