"""Rules for transpose, reshape, squeeze and broadcast: rows stay whole."""

import math
from typing import Any

from jax import lax

from sparsejax._compat import primitives as p
from sparsejax.transform.interpreter import RuleContext, register_rule
from sparsejax.transform.table import without


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
