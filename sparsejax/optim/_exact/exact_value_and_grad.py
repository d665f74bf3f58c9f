"""exact_value_and_grad: finds the ids that a loss reads, and catches their rows up.

The loss is traced and walked as `sparsejax.value_and_grad` does it, but only for the
ids of its reads. This requires that no ids are computed from rows of a table.
Otherwise, which rows must be caught up would depend on rows that are not caught up yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax.optim._exact.exact import Exact, ExactState
from sparsejax.transform.forward import ids_program
from sparsejax.transform.grad import differentiate
from sparsejax.transform.liveness import Liveness
from sparsejax.transform.plan import Plan, collect, make_plan
from sparsejax.transform.trace import check_fun, trace_call


Params = TypeVar("Params")
P = ParamSpec("P")


@overload
def exact_value_and_grad(
    fun: Callable[Concatenate[Params, P], Any],
    tx: Exact,
    *,
    has_aux: Literal[False] = False,
    tables: PyTree = None,
) -> Callable[
    Concatenate[Params, ExactState, P],
    tuple[tuple[jax.Array, Any], Params, ExactState],
]: ...
@overload
def exact_value_and_grad(
    fun: Callable[Concatenate[Params, P], Any],
    tx: Exact,
    *,
    has_aux: bool = False,
    tables: PyTree = None,
) -> Callable[
    Concatenate[Params, ExactState, P],
    tuple[tuple[Any, Any], Params, ExactState],
]: ...
def exact_value_and_grad(
    fun: Callable[..., Any], tx: Exact, *, has_aux: bool = False, tables: PyTree = None
) -> Callable[..., Any]:
    """`sparsejax.value_and_grad`, after catching up the rows that `fun` will read.

    For a table T that `fun` reads at rows R, this is

      params, state = tx.catch_up(params, state, R)
      value, grads = sparsejax.value_and_grad(fun)(params, ...)

    with R found in the trace of `fun`. Rows that are read only for an auxiliary output
    are caught up, too. Rows that are read only under `stop_gradient` are not: pass them
    to `tx.catch_up` yourself. A leaf that is not read by rows is caught up as a whole,
    which costs nothing if it is up to date.

    Args:
      fun: a function `fun(params, *args, **kwargs)` with a scalar float output, or
        `(scalar, aux)`.
      tx: the result of `sparsejax.optim.exact`.
      has_aux: True if `fun` returns `(loss, aux)`.
      tables: as in `sparsejax.value_and_grad`.

    Returns:
      A function `(params, state, *args, **kwargs) -> ((value, grads), params, state)`.

    Raises:
      TypeError: `tx` was not made by `exact`.
      ValueError: ids are computed from rows of a table.
      DensifyError: as in `sparsejax.value_and_grad`.

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
      `sparsejax.optim.exact`; oryx, `harvest`, which collects values from a trace.
    """
    check_fun(fun, 0, has_aux)
    if not isinstance(tx, Exact):
        raise TypeError(
            "tx must be what sparsejax.optim.exact(...) returned, got "
            f"{_arguments.kind_of(tx)}. Put other transformations inside of exact: "
            "exact(optax.chain(...)). For other optimizers use "
            "sparsejax.value_and_grad."
        )

    @functools.wraps(fun)
    def exact_value_and_grad_fun(
        params: Any, state: ExactState, *args: Any, **kwargs: Any
    ) -> Any:
        call = trace_call(fun, 0, has_aux, tables, (params, *args), kwargs)
        plan = make_plan(call, stacks=False)
        ids = call.tree.unflatten(_ids_read(plan))
        params, state = tx.catch_up(params, state, ids)
        for leaf, value in zip(call.leaves, call.tree.flatten_up_to(params)):
            call.flat.inputs[leaf.position] = value
        (loss, aux), grads = differentiate(plan)
        return (((loss, aux) if has_aux else loss), grads), params, state

    return exact_value_and_grad_fun


def _ids_read(plan: Plan) -> list[Any]:
    """Returns for each leaf the ids that are read, or `...` if all rows are used."""
    call, tables = plan.call, plan.tables
    plan = collect(call, tables, _EverythingIsLive())
    whole = {use.table for use in plan.run.dense}
    tables = [leaf for leaf in tables if leaf.position not in whole]
    plan = plan.only(tables)

    program = ids_program(plan.walk, plan.zero_deltas(), call.flat.inputs)
    names = {leaf.position: leaf.name for leaf in plan.tables}
    for k, site in enumerate(plan.run.sites):
        _, inputs = program.behind(k)
        if not names.keys().isdisjoint(inputs):
            raise ValueError(
                f"the ids by which {names[site.table]} is read at {site.where} are "
                "computed from rows of a table, so they are not known before those "
                "rows are up to date. Catch the rows up yourself: tx.catch_up(params, "
                "state, ids), in the order in which they are read, then "
                "sparsejax.value_and_grad."
            )
    inputs = [x for x, needed in zip(call.flat.inputs, program.needs_input) if needed]
    ids: dict[int, list[jax.Array]] = {position: [] for position in names}
    for site, x in zip(plan.run.sites, program.run((), inputs)):
        ids[site.table].append(x.reshape(-1))
    by_leaf: dict[int, Any] = {
        position: jnp.concatenate(xs) if xs else None for position, xs in ids.items()
    }
    return [by_leaf.get(leaf.position, ...) for leaf in call.leaves]


class _EverythingIsLive(Liveness):
    """For a walk that has to find all reads, not only those that are differentiated."""

    def variables(self, jaxpr: Any, out: Sequence[bool]) -> set[Any]:
        del out
        return {*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)}
