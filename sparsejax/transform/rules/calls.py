"""Rules for calls: jit, closed_call, and functions with a custom derivative.

The program of a nested `jit` is walked as part of the enclosing one.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from sparsejax import _compat, _primitives
from sparsejax.transform.interpreter import RuleContext, register_rule
from sparsejax.transform.liveness import Liveness, register_flow
from sparsejax.transform.table import TableRef


@register_rule(*_primitives.JITS)
def _jit_rule(
    ctx: RuleContext,
    *inputs: Any,
    jaxpr: Any,
    in_shardings: Sequence[Any] = (),
    out_shardings: Sequence[Any] = (),
    name: str = "jit",
    **_: Any,
) -> list[Any]:
    # Inlined: outside of jit a rebuilt jit would recompile at every call, and inside of
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


# jax 0.12 has an `eval_jaxpr` for what a gradient of a scan hoists out of the loop.
@register_rule(*_primitives.PLAIN_CALLS)
def _call_rule(ctx: RuleContext, *inputs: Any, call_jaxpr: Any, **_: Any) -> list[Any]:
    return ctx.walk(call_jaxpr, inputs)


@register_flow(*_primitives.JITS, *_primitives.CHECKPOINTS, *_primitives.PLAIN_CALLS)
def _call_flow(liveness: Liveness, eqn: Any, out: tuple[bool, ...]) -> Sequence[bool]:
    called = _primitives.called(eqn)
    assert called is not None
    return liveness.inputs(called[0], out)


@register_rule(*_primitives.CUSTOM_CALLS)
def _custom_rule(ctx: RuleContext, *inputs: Any, **params: Any) -> list[Any]:
    # The user's derivative is written for the whole table. A walk of the body would
    # differentiate the body instead.
    del params
    why = "gives its own derivative for the whole table"
    return _compat.bind(ctx.eqn, [ctx.dense(x, why) for x in inputs])
