"""Rules for arithmetic on a table: casts, elementwise functions, scalings, biases.

They pass the table on: a row of the result depends on that row of the table alone, so
the arithmetic is done later, on the rows that are read.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _compat
from sparsejax._compat import primitives as p
from sparsejax.transform.interpreter import RuleContext, register_rule
from sparsejax.transform.liveness import register_flow
from sparsejax.transform.table import TableRef, vary


# -- one operand -----------------------------------------------------------------------

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
def _identity_rule(ctx: RuleContext, ref: Any, **params: Any) -> Any:
    del ctx, params
    return ref


@register_rule(p.device_put_p, "optimization_barrier")
def _identities_rule(ctx: RuleContext, *inputs: Any, **params: Any) -> Any:
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
    # shard_map marks a replicated table as varying before varying ids read it.
    del ctx
    axes = frozenset(params["axes"])
    return ref.then(lambda rows: vary(rows, axes))


# -- two operands, one of them the same for all rows -----------------------------------


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
    producer = ctx.producer(position)
    if producer is None or producer[0].primitive is not p.broadcast_in_dim_p:
        return None
    eqn, (source, *_) = producer
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
