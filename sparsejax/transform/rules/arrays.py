"""Rules for equations that read rows of a table, or pass it on.

A view (`TableRef`) has one axis of rows; its other axes are the *content* of a row. An
equation reads rows if it picks along the row axis and takes the content whole. It
passes the table on if every row of its result comes from that row alone.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments, _compat
from sparsejax._compat import primitives as p
from sparsejax._rows import indexing
from sparsejax.transform.interpreter import RuleContext, register_rule
from sparsejax.transform.liveness import register_flow
from sparsejax.transform.table import TableRef, vary


# -- reading rows ----------------------------------------------------------------------


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
        # XLA clamps a read that is out of range too, but its transpose drops it.
        valid = start == inside
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        for k, d in enumerate(dims.start_index_map):
            if d != axis:  # taken whole, so any other start would be out of range
                valid &= indices[..., k] == 0
    ids = inside[..., None] + _steps(width, inside.ndim + 1, inside.dtype)
    everywhere = jnp.broadcast_to(valid[..., None], ids.shape)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        # What is read there is not used. An id that is no row's says so to a gradient
        # of this gradient as well.
        ids = jnp.where(everywhere, ids, _arguments.scalar(ref.height, ids))
    rows = ctx.read(ref, ids, everywhere)
    # [*batch, width, *content] -> [*batch, *operand's axes] -> without collapsed ones
    rows = jnp.moveaxis(rows, len(batch), len(batch) + axis)
    kept = [d for d in range(ref.ndim) if d not in dims.collapsed_slice_dims]
    rows = rows.reshape(batch + tuple(slice_sizes[d] for d in kept))
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        mask = jnp.reshape(valid, batch + (1,) * len(kept))
        rows = jnp.where(mask, rows, _fill(fill_value, rows.dtype))
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


@register_rule("read_rows")
def _read_rows_rule(ctx: RuleContext, ref: Any, ids: Any) -> Any:
    # Our own read: a gradient taken by sparsejax inside the function has planted it.
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


def _fill(fill_value: Any, dtype: Any) -> jax.Array:
    return jnp.array(
        indexing.fill_value(dtype) if fill_value is None else fill_value, dtype
    )


# -- passing the table on: one operand, each row by itself -----------------------------

_ELEMENTWISE = (
    p.abs_p, p.acos_p, p.acosh_p, p.asin_p, p.asinh_p, p.atan_p, p.atanh_p, p.cbrt_p,
    p.ceil_p, p.convert_element_type_p, p.cos_p, p.cosh_p, p.erf_p, p.erfc_p,
    p.erf_inv_p,
    p.exp_p, p.exp2_p, p.expm1_p, p.floor_p, p.integer_pow_p, p.is_finite_p, p.log_p,
    p.log1p_p, p.logistic_p, p.name_p, p.neg_p, p.reduce_precision_p, p.round_p,
    p.rsqrt_p, p.sign_p, p.sin_p, p.sinh_p, p.sqrt_p, p.square_p, p.tan_p, p.tanh_p,
)  # fmt: skip


@register_rule(*_ELEMENTWISE)
def _elementwise_rule(ctx: RuleContext, ref: Any, **params: Any) -> Any:
    # A cast of the table becomes a cast of the rows: flax's Embed(dtype=bfloat16) casts
    # all V rows before it looks up a few.
    primitive = ctx.eqn.primitive
    dtype = ctx.eqn.outvars[0].aval.dtype
    return ref.then(lambda rows: primitive.bind(rows, **params), dtype=dtype)


@register_rule(p.copy_p, p.sharding_constraint_p)
def _same_rule(ctx: RuleContext, ref: Any, **params: Any) -> Any:
    del ctx, params
    return ref


@register_rule(p.device_put_p, "optimization_barrier")
def _same_each_rule(ctx: RuleContext, *inputs: Any, **params: Any) -> Any:
    del params
    arrays = [x for x in inputs if not isinstance(x, TableRef)]
    if ctx.eqn.primitive.name == "optimization_barrier":
        arrays = list(lax.optimization_barrier(arrays)) if arrays else []
    elif arrays:
        return NotImplemented
    rest = iter(arrays)
    return [x if isinstance(x, TableRef) else next(rest) for x in inputs]


@register_rule(p.stop_gradient_p)
def _stop_gradient_rule(ctx: RuleContext, ref: Any, **params: Any) -> Any:
    del ctx, params
    return ref.then(lax.stop_gradient, stopped=True)


@register_flow(p.stop_gradient_p)
def _stop_gradient_flow(liveness: Any, eqn: Any, out: Any) -> Sequence[bool]:
    del liveness, out
    return (False,) * len(eqn.invars)


@register_rule(_compat.pvary_p)
def _pvary_rule(ctx: RuleContext, ref: Any, **params: Any) -> Any:
    # shard_map marks a replicated table as varying before ids that vary read it.
    del ctx
    axes = frozenset(params["axes"])
    return ref.then(lambda rows: vary(rows, axes))


# -- passing the table on: two operands, one of them the same for all rows -------------


@register_rule(p.mul_p, p.div_p, p.add_p, p.sub_p, p.max_p, p.min_p)
def _binary_rule(ctx: RuleContext, x: Any, y: Any, **params: Any) -> Any:
    left = isinstance(x, TableRef)
    ref, position = (x, 1) if left else (y, 0)
    other = _same_for_all_rows(ctx, ref, y if left else x, position)
    if other is None:
        return NotImplemented
    primitive = ctx.eqn.primitive

    def fn(rows, other):
        other = jnp.broadcast_to(other, rows.shape) if other.ndim else other
        other = vary(other, _compat.varying_axes(rows))
        return primitive.bind(*((rows, other) if left else (other, rows)), **params)

    return ref.then(fn, other, dtype=ctx.eqn.outvars[0].aval.dtype)


def _same_for_all_rows(
    ctx: RuleContext, ref: TableRef, other: Any, position: int
) -> jax.Array | None:
    """`other` as `()` or `[1, *content]` if it is the same for every row, else None."""
    if isinstance(other, TableRef):
        return None
    if np.ndim(other) == 0:
        return jnp.asarray(other)
    made = ctx.producer(position)
    if made is None or made[0].primitive is not p.broadcast_in_dim_p:
        return None
    eqn, (source, *_) = made
    along = [int(d) for d in eqn.params["broadcast_dimensions"]]
    if isinstance(source, TableRef):
        return None
    source, shape = jnp.asarray(source), [1] * ref.ndim
    if source.ndim == 0:
        return source
    for size, d in zip(source.shape, along):
        shape[d] = size
    if shape[ref.row_axis] != 1:
        return None
    return jnp.moveaxis(source.reshape(shape), ref.row_axis, 0)


# -- passing the table on: other shapes, rows kept whole -------------------------------


@register_rule(p.transpose_p)
def _transpose_rule(ctx: RuleContext, ref: Any, *, permutation: Any) -> Any:
    del ctx
    axis = permutation.index(ref.row_axis)
    content = [d - (d > ref.row_axis) for d in permutation if d != ref.row_axis]
    order = (0, *(d + 1 for d in content))
    shape = tuple(ref.shape[d] for d in permutation)
    return ref.then(lambda rows: lax.transpose(rows, order), shape=shape, row_axis=axis)


@register_rule(p.reshape_p, p.squeeze_p)
def _reshape_rule(ctx: RuleContext, ref: Any, *dynamic: Any, **params: Any) -> Any:
    if dynamic or params.get("dimensions") and ctx.eqn.primitive is p.reshape_p:
        return NotImplemented
    shape = tuple(ctx.eqn.outvars[0].aval.shape)
    before = math.prod(ref.shape[: ref.row_axis])
    # The rows stay whole if some axis of the result still runs over them, with as much
    # of the content in front of it as before.
    axes = [
        axis
        for axis, size in enumerate(shape)
        if size == ref.height and math.prod(shape[:axis]) == before
    ]
    if not axes:
        return NotImplemented
    content = shape[: axes[0]] + shape[axes[0] + 1 :]
    return ref.then(
        lambda rows: rows.reshape(rows.shape[:1] + content),
        shape=shape,
        row_axis=axes[0],
    )


@register_rule(p.broadcast_in_dim_p)
def _broadcast_rule(
    ctx: RuleContext,
    ref: Any,
    *dynamic: Any,
    shape: Any,
    broadcast_dimensions: Any,
    **_,
) -> Any:
    del ctx
    axis = int(broadcast_dimensions[ref.row_axis])
    if dynamic or shape[axis] != ref.height:
        return NotImplemented
    along = [int(d) for d in broadcast_dimensions]
    content = tuple(size for d, size in enumerate(shape) if d != axis)
    # rows lead in what a row function sees; the other axes keep their order
    places = tuple(d + (d < axis) for k, d in enumerate(along) if k != ref.row_axis)
    return ref.then(
        lambda rows: lax.broadcast_in_dim(rows, rows.shape[:1] + content, (0, *places)),
        shape=tuple(shape),
        row_axis=axis,
    )
