"""Rules for the primitives that read rows: gather, slice, dynamic_slice, read_rows.

A view (`TableRef`) has one axis of rows; its other axes are the *content* of a row. An
equation reads rows if it selects along the row axis and takes the whole content.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._compat import primitives as p
from sparsejax._lookup.lookup import read_rows_p
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
    if not isinstance(ref, TableRef):
        return NotImplemented  # the indices are computed from a table
    dims, axes = dimension_numbers, ref.row_axes
    if (
        not set(axes) & set(dims.start_index_map)
        or (not ref.is_stack and ref.row_axis in dims.operand_batching_dims)
        or not _whole_rows(ref, slice_sizes, dims.operand_batching_dims)
        or mode not in _MODES
    ):
        return NotImplemented
    batch = jnp.shape(indices)[:-1]
    indices = _arguments.as_ids(ctx.dense(indices, live=False), ref.height)
    ids, valid = _ids_read(
        indices,
        _sizes(ref, indices),
        tuple(
            _arguments.scalar(ref.shape[axis] - slice_sizes[axis], indices)
            for axis in axes
        ),
        _arguments.scalar(ref.height, indices),
        dims=dims,
        axes=axes,
        widths=tuple(slice_sizes[axis] for axis in axes),
        mode=mode,
    )
    fill, fill_of_read = None, None
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        fill = indexing.fill_value(ref.dtype) if fill_value is None else fill_value
        fill = np.array(fill, ref.dtype)[()]
        if not ref.steps and ref.has_all_rows:
            # XLA fuses this fill with the read, and a fill after it often with nothing.
            # As bytes: NaN equals nothing, so that each call would compile again, and
            # zero of float16 equals zero of bfloat16.
            fill, fill_of_read = None, fill.tobytes()
    mask = valid
    if valid is not None:
        mask = jnp.broadcast_to(indexing.append_axes(valid, ids.ndim), ids.shape)
    in_bounds = mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS
    drop = in_bounds or fill_of_read is not None
    rows = ctx.read(ref, ids, mask, drop, fill_of_read)
    # [*batch, *widths, *content] -> [*batch, *operand's axes]
    rows = _move_axes(rows, len(batch), axes)
    for d, k in zip(dims.operand_batching_dims, dims.start_indices_batching_dims):
        if d not in axes:
            rows = _diagonal(rows, k, len(batch) + d)
    # Without the axes that are collapsed or batched.
    gone = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    kept = [d for d in range(ref.ndim) if d not in gone]
    shape = batch + tuple(slice_sizes[d] for d in kept)
    rows = indexing.reshape(rows, shape)
    if fill is not None:
        assert valid is not None  # in this mode
        rows = _fill_unless(valid, rows, fill)
    batch_axes, kept_axes = iter(range(len(batch))), iter(range(len(batch), rows.ndim))
    offset = set(map(int, dims.offset_dims))
    order = [next(kept_axes if d in offset else batch_axes) for d in range(rows.ndim)]
    in_order = order == list(range(rows.ndim))
    return rows if in_order else lax.transpose(rows, order)


@register_rule(p.dynamic_slice_p)
def _dynamic_slice_rule(
    ctx: RuleContext, ref: Any, *starts: Any, slice_sizes: Sequence[int], **_: Any
) -> Any:
    def places(axis):
        start = _arguments.as_ids(starts[axis], ref.height)
        last = _arguments.scalar(ref.shape[axis] - slice_sizes[axis], start)
        start = jnp.clip(start, _arguments.scalar(0, start), last)
        return start[None] + _steps(slice_sizes[axis], 1, start.dtype)

    return _read_slice(ctx, ref, tuple(slice_sizes), places)


@register_rule(p.slice_p)
def _slice_rule(
    ctx: RuleContext, ref: Any, *, start_indices: Any, limit_indices: Any, strides: Any
) -> Any:
    strides = strides or (1,) * ref.ndim
    taken = [range(*t) for t in zip(start_indices, limit_indices, strides)]
    dtype = _arguments.index_dtype(ref.height)
    places = lambda axis: jnp.asarray(taken[axis], dtype)
    in_steps = ref.is_stack and strides[ref.row_axes[0]] != 1
    return _read_slice(ctx, ref, tuple(map(len, taken)), places, in_steps)


def _read_slice(
    ctx: RuleContext,
    ref: TableRef,
    sizes: tuple[int, ...],
    places: Callable[[int], jax.Array],
    in_steps: bool = False,
) -> Any:
    """Reads a slice of a view. A slice of whole tables of a stack is another view.

    Args:
      ctx, ref: the context, and the view.
      sizes: shape of the slice.
      places: maps an axis of rows to the places of the slice along it.
      in_steps: True if the slice skips tables of a stack.
    """
    if not _whole_rows(ref, sizes):
        return NotImplemented
    if sizes == ref.shape:
        return ref
    first, *more = ref.row_axes
    if more and sizes[more[0]] == ref.shape[more[0]] and sizes[first] and not in_steps:
        return ref.part(places(first)[0], sizes[first])
    of_axes = [places(axis) for axis in ref.row_axes]
    ids = _row_numbers(of_axes, _sizes(ref, of_axes[0]))
    return _move_axes(ctx.read(ref, ids, drop=False), 0, ref.row_axes)


@register_rule(read_rows_p)
def _read_rows_rule(ctx: RuleContext, ref: Any, ids: Any, *, fill: Any) -> Any:
    # In the trace of a function that itself takes a gradient by sparsejax.
    if not isinstance(ref, TableRef) or ref.row_axes != (0,):
        return NotImplemented
    if fill is not None and (ref.steps or not ref.has_all_rows):
        return NotImplemented
    return ctx.read(ref, ctx.dense(ids, live=False), fill=fill)


_MODES = (
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


def _whole_rows(
    ref: TableRef, sizes: Sequence[int], other_axes: Sequence[int] = ()
) -> bool:
    content_axes = set(range(ref.ndim)) - {*ref.row_axes, *other_axes}
    return all(sizes[d] == ref.shape[d] for d in content_axes)


# Jitted so that JAX traces it once for tables of all heights.
@functools.partial(
    jax.jit, static_argnames=("dims", "axes", "widths", "mode"), inline=True
)
def _ids_read(
    indices: jax.Array,
    sizes: Sequence[Any],
    lasts: Sequence[Any],
    height: Any,
    *,
    dims: Any,
    axes: Sequence[int],
    widths: Sequence[int],
    mode: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes the rows that a gather reads.

    Args:
      indices: the indices of the gather, `[*batch, k]`.
      sizes, lasts, height: for each axis of rows its length and the last start in
        range, and the number of all rows.
      dims, mode: parameters of the gather.
      axes: the axes of rows.
      widths: how many places are read along each.

    Returns:
      Row numbers `[*batch, *widths]`; and a mask `[*batch]` of the reads whose
      transpose adds to the table, or None for all.
    """
    batch = indices.shape[:-1]
    checks = []
    batched = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims))
    places = []
    for axis, last, width in zip(axes, lasts, widths):
        if axis in batched:  # vmap over the tables of a stack
            start = lax.broadcasted_iota(indices.dtype, batch, batched[axis])
        elif axis not in dims.start_index_map:
            start = jnp.zeros(batch, indices.dtype)
        else:
            given = indices[..., list(dims.start_index_map).index(axis)]
            start = jnp.clip(given, _arguments.scalar(0, given), last)
            if mode != lax.GatherScatterMode.CLIP:
                # In these modes XLA also clamps a read that is out of range, but the
                # transpose drops it.
                checks.append(given == start)
        start = start[..., None]
        steps = _steps(width, start.ndim, start.dtype)
        places.append(start + steps if width > 1 else start)
    if mode != lax.GatherScatterMode.CLIP:
        for k, d in enumerate(dims.start_index_map):
            if d not in axes:  # taken whole, so any start but 0 is out of range
                checks.append(indices[..., k] == 0)
    ids = _row_numbers(places, sizes)
    if not checks:
        return ids, None
    valid = functools.reduce(operator.and_, checks)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        # The rows of the others are replaced. Since their ids are out of range, a
        # gradient of this gradient also drops them.
        ids = jnp.where(indexing.append_axes(valid, ids.ndim), ids, height)
    return ids, valid


def _row_numbers(places: Sequence[jax.Array], sizes: Sequence[Any]) -> jax.Array:
    """Returns rows of a view, from places `[..., n_i]` along each axis of rows.

    Args:
      places: of a dtype that can count all rows.
      sizes: the lengths of these axes, of that dtype.

    Returns:
      `[..., n_1]`, or for a stack `[..., n_1, n_2]`.
    """
    ids = places[0]
    for place, size in zip(places[1:], sizes[1:]):
        ids = ids[..., None] * size + place[..., None, :]
    return ids


def _sizes(ref: TableRef, like: Any) -> tuple[Any, ...]:
    """Returns the lengths of a view's axes of rows, in the dtype of `like`."""
    return tuple(_arguments.scalar(ref.shape[axis], like) for axis in ref.row_axes)


def _move_axes(rows: jax.Array, start: int, axes: Sequence[int]) -> jax.Array:
    """Moves the axes of rows, which follow `start` other axes, to `axes`."""
    here = tuple(range(start, start + len(axes)))
    there = tuple(start + axis for axis in axes)
    return rows if here == there else jnp.moveaxis(rows, here, there)


def _diagonal(x: jax.Array, k: int, d: int) -> jax.Array:
    """Takes element i of axis `d` at place i of axis `k`; `d` stays, of length 1."""
    shape = [1] * x.ndim
    shape[k] = x.shape[k]
    at = lax.broadcasted_iota(jnp.int32, shape, k)
    return jnp.take_along_axis(x, at, d, mode="promise_in_bounds")


@jax.jit
def _fill_unless(keep: jax.Array, rows: jax.Array, fill: Any) -> jax.Array:
    """Replaces rows by `fill` where the mask `keep` of the first axes is False.

    Jitted, so that `jax_debug_nans` sees the fill value only if it is used.
    """
    return jnp.where(indexing.append_axes(keep, rows.ndim), rows, fill)


def _steps(width: int, ndim: int, dtype: Any) -> np.ndarray:
    """Counts `0, 1, ..., width - 1` along the last of `ndim` axes."""
    return np.arange(width, dtype=dtype).reshape((1,) * (ndim - 1) + (width,))
