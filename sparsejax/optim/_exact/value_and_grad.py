"""Wiring `exact` into a step: the ids that a loss reads, taken from its trace.

The loss is walked as `sparsejax.value_and_grad` walks it, once more and for nothing but
the ids of its reads. What else that walk computes nobody asks for, and XLA removes it.
For that, ids must not be computed from rows of a table: which rows must be caught up
would depend on what is in rows that are not caught up yet.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast, overload

import jax
import jax.numpy as jnp

from sparsejax import _arguments, _compat
from sparsejax._compat import primitives as p
from sparsejax.optim._exact.exact import Exact, ExactState
from sparsejax.transform.grad import value_and_grad
from sparsejax.transform.interpreter import Reads
from sparsejax.transform.liveness import Liveness
from sparsejax.transform.plan import Plan, collect, make_plan
from sparsejax.transform.trace import Call, trace_call


CALL = "sparsejax.optim.exact_value_and_grad"

_NOT_EXACT = (
    CALL + ": takes what sparsejax.optim.exact(...) returned as its second argument, "
    "got {found}. Elsewhere use sparsejax.value_and_grad."
)
_CIRCULAR = (
    CALL + ": the ids by which {name} is read at {where} are computed from rows of a "
    "table, so they are not known before those rows are up to date. Catch the rows up "
    "by hand: tx.catch_up(params, state, ids), in the order in which they are read, "
    "then sparsejax.value_and_grad."
)


Params = TypeVar("Params")
P = ParamSpec("P")


@overload
def exact_value_and_grad(
    fun: Callable[Concatenate[Params, P], Any],
    tx: Exact,
    has_aux: Literal[False] = False,
    *,
    tables: Any = None,
) -> Callable[
    Concatenate[Params, ExactState, P],
    tuple[tuple[jax.Array, Any], Params, ExactState],
]: ...
@overload
def exact_value_and_grad(
    fun: Callable[Concatenate[Params, P], Any],
    tx: Exact,
    has_aux: bool = False,
    *,
    tables: Any = None,
) -> Callable[
    Concatenate[Params, ExactState, P],
    tuple[tuple[Any, Any], Params, ExactState],
]: ...
def exact_value_and_grad(
    fun: Callable[..., Any], tx: Exact, has_aux: bool = False, *, tables: Any = None
) -> Callable[..., Any]:
    """`sparsejax.value_and_grad` that first brings up to date what `fun` will read.

    For a table T that `fun` reads at rows R, it is

      params, state = tx.catch_up(params, state, R)
      value, grads = sparsejax.value_and_grad(fun)(params, ...)

    with R found in the trace of `fun`. Rows that are read for an auxiliary output are
    brought up to date as well; those that are only read under `stop_gradient` are not:
    name them in a `tx.catch_up` of your own. A leaf that is not read by rows is brought
    up to date as a whole, which costs something only if it is not.

    Args:
      fun: a function `fun(params, *args, **kwargs)` with a scalar float output, or
        `(scalar, aux)`.
      tx: what `sparsejax.optim.exact` returned.
      has_aux: whether `fun` returns `(loss, aux)`.
      tables: as in `sparsejax.value_and_grad`.

    Returns:
      A function `(params, state, *args, **kwargs) -> ((value, grads), params, state)`.

    Raises:
      TypeError: `tx` is no `exact(...)`.
      ValueError: ids are computed from rows of a table.
      DensifyError: as `sparsejax.value_and_grad`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from sparsejax.optim import exact, exact_value_and_grad
      >>> tx = exact(optax.sgd(0.1, momentum=0.9))
      >>> params = {"table": jnp.ones((100, 2))}
      >>> loss = lambda params, ids: jnp.sum(params["table"][ids] ** 2)
      >>> step = exact_value_and_grad(loss, tx)
      >>> state, ids = tx.init(params), jnp.array([4, 9])
      >>> (value, grads), params, state = step(params, state, ids)
      >>> updates, state = tx.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> (value, grads), params, state = step(params, state, jnp.array([9, 1]))
      >>> params["table"][4, 0], params["table"][9, 0], int(state.stale)
      (Array(0.8, dtype=float32), Array(0.8, dtype=float32), 0)

    References:
      `sparsejax.optim.exact`; harvesting values from a trace: oryx, `harvest`.
    """
    if not isinstance(tx, Exact):
        raise TypeError(_NOT_EXACT.format(found=_arguments.kind_of(tx)))
    both = value_and_grad(fun, 0, has_aux, tables=tables)

    @functools.wraps(fun)
    def exact_value_and_grad_fun(
        params: Any, state: ExactState, *args: Any, **kwargs: Any
    ) -> Any:
        full = (params, *args)
        call = trace_call(fun, 0, has_aux, tables, full, kwargs, CALL)
        ids = call.tree.unflatten(_ids_of(call))
        params, state = tx.catch_up(params, state, ids)
        return both(params, *args, **kwargs), params, state

    return exact_value_and_grad_fun


# ------------------------------------------------------------------ the ids


class _Everything:
    """Liveness for which all of a program counts: what is read must be up to date."""

    def variables(self, jaxpr: Any, out: Sequence[bool]) -> "_Everything":
        """All variables."""
        del jaxpr, out
        return self

    def inputs(self, jaxpr: Any, out: Sequence[bool]) -> tuple[bool, ...]:
        """All inputs."""
        del out
        return (True,) * len(jaxpr.invars)

    def __contains__(self, variable: Any) -> bool:
        return True


def _ids_of(call: Call) -> list[Any]:
    """What `catch_up` takes for each leaf: ids, or `...` for all of it."""
    tables = make_plan(call).tables
    while True:
        plan = collect(call, tables, cast(Liveness, _Everything()))
        whole = {use.table for use in plan.run.dense}
        if not whole:
            break
        tables = [t for number, t in enumerate(tables) if number not in whole]

    def ids(*inputs):
        reads = Reads(plan.zero_deltas())
        plan.walk(inputs, reads)
        return reads.ids

    _check_known(plan, ids)
    found: dict[int, list[jax.Array]] = {leaf.position: [] for leaf in tables}
    for site, x in zip(plan.run.sites, ids(*call.inputs)):
        found[tables[site.table].position].append(x.reshape(-1))
    nothing = jnp.zeros((0,), jnp.int32)
    return [
        jnp.concatenate(found[leaf.position] or [nothing])
        if leaf.position in found
        else ...
        for leaf in call.leaves
    ]


# ------------------------------------------------------------------ what they are of


def _check_known(plan: Plan, ids: Callable) -> None:
    """Raises if some ids are computed from what is read out of a table."""
    call, tables = plan.call, plan.tables
    jaxpr, _ = _compat.trace(ids, *call.inputs)
    positions = {leaf.position for leaf in tables}
    from_table = _reached(jaxpr, [i in positions for i in range(len(call.inputs))])
    for site, circular in zip(plan.run.sites, from_table):
        if circular:
            name = tables[site.table].name
            raise ValueError(_CIRCULAR.format(name=name, where=site.where))


def _reached(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs of an open jaxpr are computed from the inputs marked."""
    marked = {v for v, mark in zip(jaxpr.invars, inputs) if mark}

    def is_marked(v):
        return not isinstance(v, _compat.Literal) and v in marked

    for eqn in jaxpr.eqns:
        ins = [is_marked(v) for v in eqn.invars]
        if any(ins):
            outs = _reached_by(eqn, ins)
            marked.update(v for v, mark in zip(eqn.outvars, outs) if mark)
    return [is_marked(v) for v in jaxpr.outvars]


def _reached_by(eqn: Any, ins: list[bool]) -> list[bool]:
    """The same for one equation; all outputs, where nothing better is known."""
    every = [True] * len(eqn.outvars)
    if eqn.primitive in (p.jit_p, p.remat_p, _compat.shard_map_p):
        return _reached(_compat.open_jaxpr(eqn.params["jaxpr"])[0], ins)
    if eqn.primitive is p.cond_p and not ins[0]:
        branches = [_compat.open_jaxpr(b)[0] for b in eqn.params["branches"]]
        return [any(x) for x in zip(*(_reached(b, ins[1:]) for b in branches))]
    if eqn.primitive is p.scan_p:
        body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
        n_consts, n_carry = _compat.scan_split(eqn.params)
        while True:
            outs = _reached(body, ins)
            carry = ins[n_consts : n_consts + n_carry]
            more = [a or b for a, b in zip(carry, outs)]
            if more == carry:
                return outs
            ins = [*ins[:n_consts], *more, *ins[n_consts + n_carry :]]
    return every
