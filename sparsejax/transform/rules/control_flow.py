"""Rules for equations that contain a program: calls, scan, cond, checkpoint.

The program of a call, such as a nested `jit`, is walked as part of the enclosing one.
The others are rebuilt with public functions of JAX around a walk of their body: deltas
go in and ids come out, stacked along the length of a loop. Bodies close over tables
(and all else that does not change), so no table is carried, stacked or returned.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import _arguments, _compat, _mesh, _primitives
from sparsejax._compat import primitives as p
from sparsejax.transform.interpreter import Body, RuleContext, Site, register_rule
from sparsejax.transform.liveness import Liveness, register_flow
from sparsejax.transform.table import TableRef


_RETURNED = "returns it whole"


# -- calls ----------------------------------------------------------------------------


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


# -- checkpoint ------------------------------------------------------------------------


@register_rule(_compat.remat_p)
def _checkpoint_rule(
    ctx: RuleContext, *inputs: Any, jaxpr: Any, prevent_cse: Any, policy: Any, **_: Any
) -> list[Any]:
    places = [i for i, x in enumerate(inputs) if not isinstance(x, TableRef)]
    body = Body(ctx, jaxpr)
    views: list[Any] = []

    def run(arrays, deltas):
        outs, ids = body.walk(_merge(inputs, places, arrays), deltas)
        # The body returns the operands of a view; its other fields are static.
        views[:] = [o if isinstance(o, TableRef) else None for o in outs]
        return [v.operands if v else o for o, v in zip(outs, views)], ids

    rebuilt = jax.checkpoint(run, prevent_cse=prevent_cse, policy=policy)
    outs, ids = rebuilt([inputs[i] for i in places], ctx.reads.take(len(body.sites)))
    ctx.reads.add(body.sites, ids)
    return [v.with_operands(o) if v else o for o, v in zip(outs, views)]


# -- scan ------------------------------------------------------------------------------


@register_rule(p.scan_p)
def _scan_rule(ctx: RuleContext, *inputs: Any, **params: Any) -> list[Any]:
    jaxpr, _ = _compat.open_jaxpr(params["jaxpr"])
    body = Body(ctx, params["jaxpr"])
    length, (n_consts, n_carry) = params["length"], _compat.scan_split(params)
    consts, carry = inputs[:n_consts], list(inputs[n_consts : n_consts + n_carry])
    xs = list(inputs[n_consts + n_carry :])
    is_stack = lambda x: isinstance(x, TableRef) and x.is_stack and x.row_axes[0] == 0
    stacks = {i: x for i, x in enumerate(xs) if is_stack(x)}
    for i, x in enumerate(xs):
        # The loop is over the numbers of the tables in a stack.
        numbered = i in stacks
        xs[i] = jnp.arange(length) if numbered else ctx.dense(x, "is looped over")
    into, out_of = jaxpr.invars[n_consts : n_consts + n_carry], jaxpr.outvars[:n_carry]
    for i, (c, a, b) in enumerate(zip(carry, into, out_of)):
        if isinstance(c, TableRef) and a is not b:
            carry[i] = ctx.dense(c, "is carried through a loop that changes it")
    # A table that is carried unchanged is a constant.
    places = [i for i, c in enumerate(carry) if not isinstance(c, TableRef)]
    live = _loop_liveness(ctx.run.liveness, jaxpr, ctx.live, n_consts, n_carry)

    def step(changing, x):
        x, deltas = x
        x = [stacks[i].one(k) if i in stacks else k for i, k in enumerate(x)]
        args = [*consts, *_merge(carry, places, changing), *x]
        outs, ids = body.walk(args, deltas, live)
        outs = [
            o if i < n_carry and i not in places else ctx.dense(o, _RETURNED, live[i])
            for i, o in enumerate(outs)
        ]
        return [outs[i] for i in places], (outs[n_carry:], ids)

    xs = xs, ctx.reads.take(len(body.sites))
    changing, (ys, ids) = lax.scan(
        step,
        [carry[i] for i in places],
        xs,
        # A symbolic length, in an export, must come from the arrays.
        length=None if jax.tree.leaves(xs) else length,
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    ctx.reads.add([s.in_loop(length) for s in body.sites], ids)
    return [*_merge(carry, places, changing), *ys]


@register_flow(p.scan_p)
def _scan_flow(liveness: Liveness, eqn: Any, out: tuple[bool, ...]) -> Sequence[bool]:
    body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
    n_consts, n_carry = _compat.scan_split(eqn.params)
    live = _loop_liveness(liveness, body, out, n_consts, n_carry)
    return liveness.inputs(body, live)


def _loop_liveness(
    liveness: Liveness, body: Any, out: Sequence[bool], n_consts: int, n_carry: int
) -> tuple[bool, ...]:
    """Returns True for each output of a step that is live after it or in the next."""
    live = tuple(out)
    while True:
        ins = liveness.inputs(body, live)[n_consts : n_consts + n_carry]
        more = tuple(a or b for a, b in zip(live, ins)) + live[n_carry:]
        if more == live:
            return live
        live = more


# -- cond and switch -------------------------------------------------------------------


@register_rule(p.cond_p)
def _cond_rule(
    ctx: RuleContext, index: Any, *operands: Any, branches: Sequence[Any], **_: Any
) -> list[Any]:
    # Only one branch runs, so the branches share their deltas: for each table as many
    # rows as the branch that reads the most. The remaining slots of a branch are empty.
    bodies = [Body(ctx, jaxpr, number) for number, jaxpr in enumerate(branches)]
    shared = _largest(bodies)
    deltas = dict(zip((s.table for s in shared), ctx.reads.take(len(shared))))

    def run(body: Body):
        outs, ids = body.walk(operands, _cut(deltas, body.sites))
        outs = [ctx.dense(o, _RETURNED, live) for o, live in zip(outs, ctx.live)]
        return outs, [_gather_ids(site, body.sites, ids, ctx) for site in shared]

    outs, ids = lax.switch(index, [functools.partial(run, body) for body in bodies])
    ctx.reads.add(_largest(bodies), ids)
    return outs


@register_flow(p.cond_p)
def _cond_flow(liveness: Liveness, eqn: Any, out: tuple[bool, ...]) -> Sequence[bool]:
    bodies = [_compat.open_jaxpr(b)[0] for b in eqn.params["branches"]]
    ins = zip(*(liveness.inputs(body, out) for body in bodies))
    return (False, *(any(x) for x in ins))


def _largest(branches: Sequence[Body]) -> list[Site]:
    """Returns one site for each table, as large as in any branch."""
    result: dict[int, Site] = {}
    for body in branches:
        total: dict[int, int] = {}
        for site in body.sites:
            total[site.table] = total.get(site.table, 0) + site.num_rows
            seen = result.get(site.table, site._replace(lead=(0,), spec=()))
            # Numbers of rows may be symbolic, in an export.
            size = _compat.max_dim(seen.num_rows, total[site.table])
            axes = seen.axes | site.axes
            # A read that is put together with others moves to another place.
            kind = seen.kind and seen.kind.moved()
            result[site.table] = seen._replace(lead=(size,), axes=axes, kind=kind)
    return [result[table] for table in sorted(result)]


def _cut(deltas: dict[int, jax.Array], sites: Sequence[Site]) -> list[jax.Array]:
    """Cuts the deltas of one branch out of the shared ones, one after the other."""
    at = dict.fromkeys(deltas, 0)
    pieces = []
    for site in sites if deltas else ():
        delta, start = deltas[site.table], at[site.table]
        at[site.table] = start + site.num_rows
        piece = delta[start : start + site.num_rows]
        piece = piece.reshape(site.lead + delta.shape[1:])
        pieces.append(_mesh.reshard(piece, site.spec, site.mesh))
    return pieces


def _gather_ids(
    shared: Site, sites: Sequence[Site], ids: Sequence[jax.Array], ctx: RuleContext
) -> jax.Array:
    """Joins the ids at which one branch read one table, padded to the shared length."""
    height = ctx.run.heights[shared.table]
    dtype = _arguments.index_dtype(height)
    pairs = zip(sites, ids)
    # Branches must also agree on the sharding over explicit mesh axes.
    mine = [_mesh.replicate(i).reshape(-1) for s, i in pairs if s.table == shared.table]
    num_empty = shared.num_rows - sum(i.size for i in mine)
    empty = jnp.full((num_empty,), height, dtype)
    mine = [_compat.to_varying(i, shared.axes) for i in (*mine, empty)]
    return jnp.concatenate(mine)


# -- helpers ---------------------------------------------------------------------------


def _merge(full: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Puts `new` at `places` of `full`."""
    result = list(full)
    for place, x in zip(places, new):
        result[place] = x
    return result
