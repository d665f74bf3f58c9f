"""Rules for calls: jit, closed_call, and functions with a custom derivative.

A nested `jit` is walked where it stands.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from sparsejax import _compat
from sparsejax._compat import primitives as p
from sparsejax.transform.interpreter import RuleContext, register_rule
from sparsejax.transform.liveness import Liveness, register_flow
from sparsejax.transform.table import TableRef


@register_rule(p.jit_p)
def _jit_rule(
    ctx: RuleContext,
    *inputs: Any,
    jaxpr: Any,
    in_shardings: Sequence[Any] = (),
    out_shardings: Sequence[Any] = (),
    name: str = "jit",
    **_: Any,
) -> list[Any]:
    # Inlined: outside of jit a rebuilt one would recompile at every call, and inside
    # jit XLA inlines it anyway. Its sharding constraints are kept.
    args = _constrain(inputs, in_shardings)
    with jax.named_scope(name):
        return _constrain(ctx.walk(jaxpr, args), out_shardings)


def _constrain(xs: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    def one(x, sharding):
        wanted = isinstance(sharding, jax.sharding.Sharding)
        if not wanted or isinstance(x, TableRef):
            return x
        return lax.with_sharding_constraint(x, sharding)

    pad = [None] * (len(xs) - len(shardings))
    return [one(x, s) for x, s in zip(xs, [*shardings, *pad])]


# jax 0.12 calls what a gradient of a scan hoists out of it by `eval_jaxpr`.
@register_rule("closed_call", "call", "eval_jaxpr")
def _call_rule(ctx: RuleContext, *inputs: Any, call_jaxpr: Any, **_: Any) -> list[Any]:
    return ctx.walk(call_jaxpr, inputs)


@register_flow(
    p.jit_p,
    _compat.remat_p,
    "closed_call",
    "call",
    "eval_jaxpr",
    _compat.shard_map_p,
)
def _call_flow(liveness: Liveness, eqn: Any, out: tuple[bool, ...]) -> Sequence[bool]:
    jaxpr = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
    return liveness.inputs(_compat.open_jaxpr(jaxpr)[0], out)


@register_rule(p.custom_jvp_call_p, p.custom_vjp_call_p)
def _custom_rule(ctx: RuleContext, *inputs: Any, **params: Any) -> list[Any]:
    # The user's derivative is written for the whole table; a walk of the body would
    # differentiate the body instead.
    why = "gives its own derivative for the whole table"
    return _compat.bind(ctx.eqn, [ctx.dense(x, why) for x in inputs])
