"""Rules that pass a table on: casts, elementwise functions, scalings, other shapes.

A row of the result depends on that row of the table alone, so it is computed later,
from the rows that are read.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _compat, _mesh, _primitives
from sparsejax._compat import primitives as p
from sparsejax.transform.interpreter import RuleContext, register_rule
from sparsejax.transform.liveness import register_flow
from sparsejax.transform.table import TableRef, without


# -- one operand -----------------------------------------------------------------------


@register_rule(*_primitives.UNARY)
def _elementwise_rule(ctx: RuleContext, ref: Any, **params: Any) -> Any:
    # A cast of the table becomes a cast of the rows: flax's Embed(dtype=bfloat16) casts
    # all V rows before it looks up a few.
    primitive = ctx.eqn.primitive
    dtype = ctx.eqn.outvars[0].aval.dtype
    return ref.then(lambda rows: primitive.bind(rows, **params), dtype=dtype)


@register_rule(p.copy_p, p.sharding_constraint_p)
def _identity_rule(ctx: RuleContext, ref: Any, **params: Any) -> Any:
    del ctx, params
    return ref


@register_rule("reshard")
def _reshard_rule(ctx: RuleContext, ref: Any, **params: Any) -> Any:
    # jax 0.8 writes a reshard before each argument of a shard_map; most of them move
    # nothing. `table.at[ids].get(out_sharding=...)` only makes the mesh axes Auto for
    # the gather. A table that moves, or was on no mesh, becomes another array, which is
    # a dense use.
    del params
    before, after = (v.aval.sharding for v in (*ctx.eqn.invars, *ctx.eqn.outvars))
    if before == after:
        return ref
    parts = (*_mesh.partitions(before.spec), *_mesh.partitions(after.spec))
    moves = any(part is not None for part in parts)
    moves |= any(map(_mesh.explicit_spec, jax.tree.leaves(ref.operands)))
    if moves or ref.reader is not None or before.mesh.empty:
        return NotImplemented
    replicate = lambda x: _mesh.on_mesh(x, after.mesh)
    ref = ref.with_operands(jax.tree.map(replicate, ref.operands))
    mesh = ref.mesh or before.mesh
    return dataclasses.replace(ref, array=replicate(ref.array), mesh=mesh)


@register_rule(p.device_put_p, "optimization_barrier")
def _identities_rule(ctx: RuleContext, *inputs: Any, **params: Any) -> Any:
    del params
    arrays = [x for x in inputs if not isinstance(x, TableRef)]
    if ctx.eqn.primitive.name == "optimization_barrier":
        arrays = list(lax.optimization_barrier(arrays)) if arrays else []
    elif arrays:
        return NotImplemented
    remaining = iter(arrays)
    return [x if isinstance(x, TableRef) else next(remaining) for x in inputs]


@register_rule(p.stop_gradient_p)
def _stop_gradient_rule(ctx: RuleContext, ref: Any, **params: Any) -> Any:
    del ctx, params
    return ref.then(lax.stop_gradient, stopped=True)


@register_flow(p.stop_gradient_p)
def _stop_gradient_flow(liveness: Any, eqn: Any, out: Any) -> Sequence[bool]:
    del liveness, out
    return (False,) * len(eqn.invars)


@register_rule(_compat.pvary_p)
def _pvary_rule(ctx: RuleContext, *inputs: Any, **params: Any) -> Any:
    # shard_map marks a replicated table as varying before varying ids read it.
    axes = frozenset(params["axes"])
    mark = functools.partial(_compat.to_varying, axes=axes)
    outs = [x.then(mark) if isinstance(x, TableRef) else mark(x) for x in inputs]
    # Up to jax 0.9 one equation marks several arrays.
    return outs if ctx.eqn.primitive.multiple_results else outs[0]


# -- two operands: one is equal for all rows, or both are views of one table -----------


@register_rule(*_primitives.ARITHMETIC)
def _binary_rule(ctx: RuleContext, x: Any, y: Any, **params: Any) -> Any:
    x, y = ctx.one_table(x, y)
    left = isinstance(x, TableRef)
    ref, other, position = (x, y, 1) if left else (y, x, 0)
    out, axes = ctx.eqn.outvars[0].aval, ref.row_axes
    if any(out.shape[axis] != ref.shape[axis] for axis in axes):
        return NotImplemented  # one row, broadcast to many
    changes = dict(shape=tuple(out.shape), dtype=out.dtype)
    content = without(out.shape, axes)

    def bind(rows, other):
        # Either may be broadcast to the content of the other one.
        if other.ndim:
            shape = np.broadcast_shapes(rows.shape[1:], other.shape[1:])
            rows = jnp.broadcast_to(rows, rows.shape[:1] + shape)
            other = jnp.broadcast_to(other, rows.shape)
        other = _compat.to_varying(other, _compat.varying_axes(rows))
        args = (rows, other) if left else (other, rows)
        rows = ctx.eqn.primitive.bind(*args, **params)
        return jnp.broadcast_to(rows, rows.shape[:1] + content)

    if isinstance(other, TableRef):
        same = (other.index, other.row_axes) == (ref.index, axes)
        if not same or other.first is not ref.first or other.reader != ref.reader:
            return NotImplemented
        if ref.reader is not None and other.array is not ref.array:
            return NotImplemented
        table = dataclasses.replace(ref, steps=())
        both = lambda rows, mine, its: bind(
            ref.with_operands(mine).view(rows), other.with_operands(its).view(rows)
        )
        changes |= dict(stopped=ref.stopped and other.stopped)
        return table.then(both, ref.operands, other.operands, **changes)
    other = _same_for_all_rows(ctx, ref, other, position)
    return NotImplemented if other is None else ref.then(bind, other, **changes)


def _same_for_all_rows(
    ctx: RuleContext, ref: TableRef, other: Any, position: int
) -> jax.Array | None:
    """Returns `other` as `()` or `[1, ...]` if it is equal for every row, else None."""
    if np.ndim(other) == 0:
        return jnp.asarray(other)
    if all(np.shape(other)[axis] == 1 for axis in ref.row_axes):
        return jnp.reshape(other, (1, *without(np.shape(other), ref.row_axes)))
    producer = ctx.producer(position)
    if producer is None or producer[0].primitive is not p.broadcast_in_dim_p:
        return None
    eqn, (source, *_) = producer
    along = [int(d) for d in eqn.params["broadcast_dimensions"]]
    source, shape = jnp.asarray(ctx.dense(source, live=False)), [1] * ref.ndim
    if source.ndim == 0:
        return source
    for size, d in zip(source.shape, along):
        shape[d] = size
    if any(shape[axis] != 1 for axis in ref.row_axes):
        return None
    return source.reshape(1, *without(shape, ref.row_axes))


# -- shapes ---------------------------------------------------------------------------


@register_rule(p.transpose_p)
def _transpose_rule(ctx: RuleContext, ref: Any, *, permutation: Any) -> Any:
    del ctx
    content = [d for d in range(ref.ndim) if d not in ref.row_axes]
    order = (0, *(content.index(d) + 1 for d in permutation if d in content))
    return ref.then(
        lambda rows: lax.transpose(rows, order),
        shape=tuple(ref.shape[d] for d in permutation),
        row_axes=tuple(permutation.index(axis) for axis in ref.row_axes),
    )


@register_rule(p.reshape_p, p.squeeze_p)
def _reshape_rule(ctx: RuleContext, ref: Any, *dynamic: Any, **params: Any) -> Any:
    if dynamic or params.get("dimensions") and ctx.eqn.primitive is p.reshape_p:
        return NotImplemented
    shape = tuple(ctx.eqn.outvars[0].aval.shape)
    start, *second = ref.row_axes
    if second and second != [start + 1]:
        return NotImplemented  # the rows of a stack are not in order
    before = math.prod(ref.shape[:start])
    # Rows stay whole if one axis of the result, or two for a stack, still run over
    # them, with as much of the content in front as before.
    matches = [
        range(axis, axis + count)
        for count in (1, 2)
        for axis in range(len(shape) - count + 1)
        if math.prod(shape[axis : axis + count]) == ref.height
        and math.prod(shape[:axis]) == before
    ]
    if not matches:
        return NotImplemented
    content = without(shape, matches[0])
    return ref.then(
        lambda rows: rows.reshape(rows.shape[:1] + content),
        shape=shape,
        row_axes=tuple(matches[0]),
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
    along = [int(d) for d in broadcast_dimensions]
    axes = tuple(along[axis] for axis in ref.row_axes)
    # A table of one row may be broadcast to many.
    if dynamic or any(shape[along[a]] != ref.shape[a] for a in ref.row_axes):
        return NotImplemented
    content = without(shape, axes)
    # A row function has the rows on its first axis; the other axes keep their order.
    kept_axes = [d for d in range(len(shape)) if d not in axes]
    places = tuple(kept_axes.index(d) + 1 for d in along if d in kept_axes)
    return ref.then(
        lambda rows: lax.broadcast_in_dim(rows, rows.shape[:1] + content, (0, *places)),
        shape=tuple(shape),
        row_axes=axes,
    )


# -- products --------------------------------------------------------------------------


@register_rule(p.dot_general_p)
def _dot_general_rule(ctx: RuleContext, x: Any, y: Any, **params: Any) -> Any:
    # A dense use in any case; ids as one-hot rows have a reason of their own.
    left = isinstance(x, TableRef)
    ref, producer = (x, ctx.producer(1)) if left else (y, ctx.producer(0))
    sums = params["dimension_numbers"][0][0 if left else 1]
    if isinstance(x, TableRef) == isinstance(y, TableRef) or ref.row_axis not in sums:
        return NotImplemented
    if producer is None or not _is_one_hot(producer[0]):
        return NotImplemented
    dense = [ctx.dense(z, "multiplies it by one-hot rows") for z in (x, y)]
    return _compat.bind(ctx.eqn, dense)[0]


def _is_one_hot(eqn: Any) -> bool:
    if eqn.primitive is p.convert_element_type_p:
        return eqn.invars[0].aval.dtype == jnp.bool_
    return eqn.params.get("name") == "_one_hot"
