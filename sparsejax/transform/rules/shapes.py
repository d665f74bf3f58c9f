"""Rules for transpose, reshape, squeeze and broadcast: rows stay whole."""

import math
from typing import Any

from jax import lax

from sparsejax._compat import primitives as p
from sparsejax.transform.interpreter import RuleContext, register_rule


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
    # Rows stay whole if some axis of the result still runs over them, with as much of
    # the content in front of it as before.
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
    # A row function has the rows on its first axis; the other axes keep their order.
    places = tuple(d + (d < axis) for k, d in enumerate(along) if k != ref.row_axis)
    return ref.then(
        lambda rows: lax.broadcast_in_dim(rows, rows.shape[:1] + content, (0, *places)),
        shape=tuple(shape),
        row_axis=axis,
    )
