"""Rules for the primitives that read rows: gather, slice, dynamic_slice, read_rows.

A view (`TableRef`) has one axis of rows; its other axes are the *content* of a row. An
equation reads rows if it selects along the row axis and takes the whole content.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._compat import primitives as p
from sparsejax._lookup.read_rows import read_rows_p
from sparsejax._rows import indexing
from sparsejax.transform.interpreter import RuleContext, register_rule_of_stacks
from sparsejax.transform.table import TableRef


@register_rule_of_stacks(p.gather_p)
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
    if not isinstance(ref, TableRef):
        return NotImplemented  # the indices are computed from a table
    dims, axes = dimension_numbers, ref.row_axes
    if (
        not set(axes) & set(dims.start_index_map)
        or (ref.stack_axis is None and ref.row_axis in dims.operand_batching_dims)
        or not _whole_rows(ref, slice_sizes, dims.operand_batching_dims)
        or mode not in _MODES
    ):
        return NotImplemented
    batch = jnp.shape(indices)[:-1]
    num_ids = math.prod((*batch, *(slice_sizes[axis] for axis in axes)))
    collected = ctx.collect(ref, num_ids)
    if collected is not None:
        return collected
    indices = jnp.asarray(ctx.dense(indices, live=False))
    valid = jnp.ones(batch, bool)
    batched = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims))
    places = []
    for axis in axes:
        size, width = ref.shape[axis], slice_sizes[axis]
        if axis in batched:  # vmap over the tables of a stack
            start = lax.broadcasted_iota(jnp.int32, batch, batched[axis])
        elif axis not in dims.start_index_map:
            start = jnp.zeros(batch, jnp.int32)
        else:
            position = list(dims.start_index_map).index(axis)
            given = _arguments.as_ids("gather", indices[..., position], ref.height)
            last = _arguments.scalar(size - width, given)
            start = jnp.clip(given, _arguments.scalar(0, given), last)
            if mode != lax.GatherScatterMode.CLIP:
                # XLA clamps a read that is out of range in these modes, too, but its
                # transpose drops it.
                valid &= given == start
        places.append(start[..., None] + _steps(width, start.ndim + 1, start.dtype))
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        for k, d in enumerate(dims.start_index_map):
            if d not in axes:  # taken whole, so any start but 0 is out of range
                valid &= indices[..., k] == 0
    ids = _row_numbers(ref, places)
    each_valid = jnp.broadcast_to(indexing.append_axes(valid, ids.ndim), ids.shape)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        # What these read is replaced below. With ids out of range, a gradient of this
        # gradient drops them as well.
        ids = jnp.where(each_valid, ids, _arguments.scalar(ref.height, ids))
    drop = mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS
    rows = ctx.read(ref, ids, each_valid, drop)
    # [*batch, *widths, *content] -> [*batch, *operand's axes] -> without collapsed ones
    rows = _move_axes(rows, len(batch), axes)
    for d, k in batched.items():
        if d not in axes:
            rows = _diagonal(rows, k, len(batch) + d)
    gone = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    kept = [d for d in range(ref.ndim) if d not in gone]
    rows = rows.reshape(batch + tuple(slice_sizes[d] for d in kept))
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        fill = indexing.fill_value(rows.dtype) if fill_value is None else fill_value
        rows = _fill_unless(valid, rows, np.array(fill, rows.dtype))
    batch_axes, kept_axes = iter(range(len(batch))), iter(range(len(batch), rows.ndim))
    offset = set(map(int, dims.offset_dims))
    order = [next(kept_axes if d in offset else batch_axes) for d in range(rows.ndim)]
    return lax.transpose(rows, order)


@register_rule_of_stacks(p.dynamic_slice_p)
def _dynamic_slice_rule(
    ctx: RuleContext, ref: Any, *starts: Any, slice_sizes: Sequence[int], **_: Any
) -> Any:
    if not _whole_rows(ref, slice_sizes):
        return NotImplemented
    if tuple(slice_sizes) == ref.shape:
        return ref

    def first(axis):
        start = _arguments.as_ids("dynamic_slice", starts[axis], ref.height)
        last = _arguments.scalar(ref.shape[axis] - slice_sizes[axis], start)
        return jnp.clip(start, _arguments.scalar(0, start), last)

    if _is_part(ref, slice_sizes):
        return ref.part(first(ref.stack_axis), slice_sizes[ref.stack_axis])
    places = []
    for axis in ref.row_axes:
        start = first(axis)
        places.append(start[None] + _steps(slice_sizes[axis], 1, start.dtype))
    rows = ctx.read(ref, _row_numbers(ref, places), drop=False)
    return _move_axes(rows, 0, ref.row_axes)


@register_rule_of_stacks(p.slice_p)
def _slice_rule(
    ctx: RuleContext, ref: Any, *, start_indices: Any, limit_indices: Any, strides: Any
) -> Any:
    strides = strides or (1,) * ref.ndim
    taken = [range(*t) for t in zip(start_indices, limit_indices, strides)]
    sizes = tuple(map(len, taken))
    if not _whole_rows(ref, sizes):
        return NotImplemented
    if sizes == ref.shape:
        return ref
    if _is_part(ref, sizes) and strides[ref.stack_axis] == 1:
        return ref.part(start_indices[ref.stack_axis], sizes[ref.stack_axis])
    dtype = _arguments.index_dtype(ref.height)
    places = [jnp.asarray(taken[axis], dtype) for axis in ref.row_axes]
    rows = ctx.read(ref, _row_numbers(ref, places), drop=False)
    return _move_axes(rows, 0, ref.row_axes)


@register_rule_of_stacks(read_rows_p)
def _read_rows_rule(ctx: RuleContext, ref: Any, ids: Any) -> Any:
    # In the trace of a function that itself takes a gradient by sparsejax.
    if not isinstance(ref, TableRef) or ref.row_axes != (0,):
        return NotImplemented
    return ctx.read(ref, ctx.dense(ids, live=False))


_MODES = (
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


def _whole_rows(
    ref: TableRef, sizes: Sequence[int], besides: Sequence[int] = ()
) -> bool:
    rest = set(range(ref.ndim)) - {*ref.row_axes, *besides}
    return all(sizes[d] == ref.shape[d] for d in rest)


def _is_part(ref: TableRef, sizes: Sequence[int]) -> bool:
    """Whether a slice has whole tables of a stack."""
    return ref.stack_axis is not None and sizes[ref.row_axis] == ref.shape[ref.row_axis]


def _row_numbers(ref: TableRef, places: Sequence[jax.Array]) -> jax.Array:
    """Rows of a view, from places `[..., n_i]` along each of its axes of rows.

    Returns:
      `[..., n_1]`, or for a stack `[..., n_1, n_2]`.
    """
    ids = places[0]
    for axis, place in zip(ref.row_axes[1:], places[1:]):
        dtype = _arguments.index_dtype(ref.height)
        size = np.array(ref.shape[axis], dtype)
        ids = ids.astype(dtype)[..., None] * size + place.astype(dtype)[..., None, :]
    return ids


def _move_axes(rows: jax.Array, start: int, axes: Sequence[int]) -> jax.Array:
    """The axes of rows, which come first after `start` others, put at `axes`."""
    here = range(start, start + len(axes))
    return jnp.moveaxis(rows, here, [start + axis for axis in axes])


def _diagonal(x: jax.Array, k: int, d: int) -> jax.Array:
    """`x` with axis `d` of length 1: element i of it where axis `k` is at i."""
    shape = [1] * x.ndim
    shape[k] = x.shape[k]
    at = lax.broadcasted_iota(jnp.int32, shape, k)
    return jnp.take_along_axis(x, at, d, mode="promise_in_bounds")


@jax.jit
def _fill_unless(keep: jax.Array, rows: jax.Array, fill: Any) -> jax.Array:
    """`rows` where the mask `keep` of the first axes is True, else `fill`.

    Jitted, so that `jax_debug_nans` sees the fill value only where it is used.
    """
    return jnp.where(indexing.append_axes(keep, rows.ndim), rows, fill)


def _steps(width: int, ndim: int, dtype: Any) -> np.ndarray:
    """`0, 1, ..., width - 1` along the last of `ndim` axes."""
    return np.arange(width, dtype=dtype).reshape((1,) * (ndim - 1) + (width,))
