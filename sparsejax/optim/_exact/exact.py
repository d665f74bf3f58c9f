"""exact: dense training at sparse cost.

A dense optimizer moves every row at every step: momentum carries the row on, Adam's
moments decay, weight decay shrinks it. `lazy` does none of this to rows without a
gradient, so it is another algorithm. `exact` postpones it: for each row it keeps the
step of its last update, and brings the row up to date before it is read. `closed_form`
has the formulas, `zero_gradient` reads the step of a row without a gradient.

For each table the state keeps last-update records (see `catch_up`): for each row the
step that its weights are of, the step that its moments are of, and a short vector F,
which says how far the moments were still going to move the weights.

- `catch_up` brings the weights of the rows that will be read up to date.
- `update` brings the moments of the rows with a gradient up to date and runs `tx` on
  these rows, as `lazy` does.
- `flush` does for all rows what these two do for some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax._rows import SelectedRows
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._exact import catch_up as _catch_up
from sparsejax.optim._exact.catch_up import CurrentRows, Table
from sparsejax.optim._exact.plan import Plan, not_exact, planner
from sparsejax.optim._lazy import gather_scatter, separability, state_sharding
from sparsejax.optim._lazy.lazy import Step


class ExactState(NamedTuple):
    """State of `exact`. `last_updates` and `now` have an entry for each table.

    Attributes:
      inner: the state of the optimizer, as `tx.init` gives it.
      step: int32, the number of updates so far.
      stale: int32, how many rows got a gradient without having been caught up.
      last_updates: `[V, 4 + columns]`: for each row the step of its
        weights, the step of its moments (two numbers each), and F at the former.
      now: `[columns]`, F at the present step.
      caught_up: integer, 1 if `catch_up` was called since the last update. Then it has
        a weak type, which tells `update` at trace time. Unlike a static field, it can
        be carried by scan, and chosen by cond and where.
    """

    inner: Any
    step: jax.Array
    stale: jax.Array
    last_updates: tuple[jax.Array, ...]
    now: tuple[jax.Array, ...]
    caught_up: jax.Array


separability.NOT_LIFTED[ExactState] = (
    "sparsejax.optim.exact",
    "it accepts SelectedRows itself, and its rows must be caught up before they are "
    "read, which neither lazy nor a store does; use exact(tx) alone, with its catch_up "
    "and flush",
)


class Exact(NamedTuple):
    """The result of `exact`: an optax transformation with two more functions."""

    init: Callable[[Any], ExactState]
    update: Callable[..., tuple[Any, ExactState]]
    catch_up: Callable[..., tuple[Any, ExactState]]
    flush: Callable[..., tuple[Any, ExactState]]


def exact(tx: optax.GradientTransformation, *, tables: PyTree = None) -> Exact:
    """Trains as `tx` does on dense gradients, at the cost of the rows that are read.

    In dense training a row without a gradient still moves. If its weights are w, and a
    step multiplies its moments m and v by constants, then all steps from s to t are

      w_t = D(s, t) (w_s - F_s(v_s) m_s) + F_t(v_t) m_t

    where D(s, t) is the product of (1 - learning rate * weight decay), and F_t(v_t) m_t
    is the distance that m_t would still move the weights. So a row is brought up to
    date when it is read, at a cost that does not depend on the number of steps that it
    missed. `closed_form.py` has the formula of F and the error bounds.

    Args:
      tx: an optax transformation: sgd, momentum, nesterov, adam, nadam, adamw, rmsprop,
        adagrad and similar, chained with clipping of gradients, schedules, decoupled
        weight decay, `inject_hyperparams`.
      tables: which leaves are tables: a tree prefix of bools, or
        `callable(path, leaf) -> bool`. None takes every real float leaf of rank 2 or
        more that can be kept exact.

    Returns:
      `(init, update, catch_up, flush)`. The gradient of a table is a SelectedRows or
      an array, which updates all rows. `catch_up(params, state, ids)` brings rows up to
      date before the loss reads them; `ids` is a tree like `params`, with integers of
      any shape, or `...` for all rows, at tables. `flush(params, state)` does so for
      all rows: call it before the whole table is used, and after a hyper-parameter in
      the state is set by hand. Both return `(params, state)`.

    Raises:
      ValueError: at init, `tx` cannot be kept exact, or there is no table; at update,
        `catch_up` was not called since the last update.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> tx = sj.optim.exact(optax.sgd(1.0, momentum=0.5))
      >>> params = jnp.zeros((100, 1))
      >>> state = tx.init(params)
      >>> for row in (3, 4, 4):
      ...     params, state = tx.catch_up(params, state, jnp.array([row]))
      ...     g = sj.SelectedRows(jnp.array([row]), -jnp.ones((1, 1)), 100)
      ...     updates, state = tx.update(g, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params[3], tx.flush(params, state)[0][3]
      (Array([1.], dtype=float32), Array([1.75], dtype=float32))
    """
    checks.check_transformation(tx, "optax.adam(1e-3)")
    plan_of, inner_tx = planner(tx, tables), optax.with_extra_args_support(tx)

    def init(params):
        state_sharding.check_not_sharded(params)
        checks.check_params(params)
        leaves, _, plan = plan_of(params)
        inner = tx.init(params)
        # Two arrays, not one twice: a buffer cannot be donated twice.
        step, stale = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        # Jitted, since it is many small operations.
        now = tuple(jax.jit(lambda inner: plan.displacement(inner, None))(inner))
        records = tuple(
            _catch_up.records_at(step, leaves[i].shape[0], then)
            for i, then in zip(plan.recurrences, now)
        )
        return ExactState(inner, step, stale, records, now, _not_caught_up())

    def catch_up(params, state, ids):
        given = params, state
        params, state, ids = map(trees.without_variables, (params, state, ids))
        leaves, treedef, plan = plan_of(params)
        tables = _tables(plan, leaves, state)
        for i, ids_of_leaf in trees.ids_by_leaf("ids", params, ids).items():
            if i not in tables:
                continue  # its gradients are dense, so it is never behind
            if ids_of_leaf is ...:
                tables[i] = _catch_up.catch_up_all(tables[i], state.step)
                continue
            height = leaves[i].shape[0]
            rows = _arguments.as_ids(ids_of_leaf, height).reshape(-1)
            tables[i] = _catch_up.catch_up(tables[i], rows, state.step)
        state = state._replace(caught_up=jnp.asarray(1))
        return _with_tables(given, treedef, leaves, state, tables)

    def update(updates, state, params=None, **extra_args):
        checks.require_params(params, "it moves weights without a gradient")
        state_sharding.check_not_sharded(updates)
        step = Step.of(updates, state, params)
        plan = plan_of(step.treedef.unflatten(step.weights))[-1]
        tables = _tables(plan, step.weights, state)
        _check_gradients(step, tables, plan)
        merged = gather_scatter.merge(tx, step, not_exact)
        owners = [owner if owner in merged else None for owner in plan.owners]
        step = step._replace(state=state.inner, owners=owners)

        grads, *stored = gather_scatter.gather(tx, step, merged)
        *caught_up, current = _caught_up(step, tables, merged, state.step, *stored)
        updates, inner = inner_tx.update(grads, *caught_up, **extra_args)
        updates = step.treedef.flatten_up_to(updates)
        stale = state.stale
        for i, rows in current.items():
            updates[i] = _add(updates[i], rows.correction)
            stale = stale + rows.num_stale
        updates, inner = gather_scatter.scatter(step, merged, updates, inner)

        now = tuple(plan.displacement(inner, state.now))
        records = tuple(
            _catch_up.records_after(table, current.get(i), state.step + 1, then)
            for (i, table), then in zip(tables.items(), now)
        )
        state = ExactState(inner, state.step + 1, stale, records, now, _not_caught_up())
        return step.treedef.unflatten(updates), state

    def flush(params, state):
        given = params, state
        params, state = map(trees.without_variables, given)
        leaves, treedef, plan = plan_of(params)
        tables = _tables(plan, leaves, state)
        # All rows get the same F, so the sum of log(1 - d) in it may restart at zero.
        fresh = plan.displacement(state.inner, None)
        for (i, table), now in zip(tables.items(), fresh):
            table = _catch_up.catch_up_all(table, state.step)
            records = _catch_up.records_at(state.step, leaves[i].shape[0], now)
            tables[i] = table._replace(records=records, now=now)
        return _with_tables(given, treedef, leaves, state, tables)

    return Exact(init, update, catch_up, flush)


# ------------------------------------------------------------------ the gradients


def _check_gradients(step: Step, tables: dict[int, Table], plan: Plan) -> None:
    """Raises a ValueError for a SelectedRows that `update` refuses."""
    for i in step.tables:
        where = step.path(i)
        if i in step.stacks:
            raise ValueError(
                f"{where} has rows of a stack of tables, of shape "
                f"{step.stacks[i][0].shape}, which exact does not catch up. Keep the "
                "parameter as one table [K * V, ...], reshaped in the loss, or take "
                "its gradient as an array: exact_value_and_grad does."
            )
        if i not in tables:
            raise plan.refusal(i, where)
        moves = tables[i].recurrence.num_coefficients > 0
        if moves and not getattr(step.state.caught_up, "weak_type", False):
            raise ValueError(
                f"{where} is a SelectedRows, but tx.catch_up was not called since the "
                "last update, so the gradient may be of old weights. Use (loss, grads)"
                ", params, state = sparsejax.optim.exact_value_and_grad(loss_fn, tx)("
                "params, state, batch) instead of sparsejax.value_and_grad, or call "
                "params, state = tx.catch_up(params, state, ids) before it."
            )


def _caught_up(
    step: Step,
    tables: dict[int, Table],
    merged: dict[int, SelectedRows],
    now: jax.Array,
    inner: Any,
    params: Any,
) -> tuple[Any, Any, dict[int, CurrentRows]]:
    """Brings the rows that get a gradient to the present step.

    Args:
      step: the arguments of the update.
      tables: as they are stored.
      merged: by table, a gradient that is a SelectedRows, without duplicates.
      now: the present step.
      inner: the state of the optimizer, with the rows of these gradients.
      params: the parameters, likewise.

    Returns:
      State and parameters at the present step, and the rows by table.
    """
    inner, inner_treedef = jax.tree.flatten(inner)
    weights, current = step.treedef.flatten_up_to(params), {}
    for i, table in tables.items():
        if trees.is_none_or_masked(step.grads[i]):
            continue
        leaves = table.recurrence.leaves
        if i in merged:
            moments = [inner[k] for k in leaves]
            rows = _catch_up.current_rows(table, merged[i], moments, now)
        else:
            rows = _catch_up.current_table(table, now)
        for k, moment in zip(leaves, rows.moments):
            inner[k] = moment
        weights[i], current[i] = _add(weights[i], rows.correction), rows
    return inner_treedef.unflatten(inner), step.treedef.unflatten(weights), current


# ------------------------------------------------------------------ the state


def _tables(plan: Plan, weights: Any, state: Any) -> dict[int, Table]:
    """Takes the arrays of each table out of the parameters and the state."""
    checks.check_state(state, ExactState)
    checks.check_state(state.inner, plan.state)
    inner = jax.tree.leaves(state.inner)
    sizes = len(state.last_updates), len(inner)
    if sizes != (len(plan.recurrences), len(plan.owners)):
        raise TypeError(
            "the state belongs to a different tree of parameters. Pass the state that "
            "init(params), catch_up, update or flush returned for these parameters."
        )
    tables = {}
    per_table = zip(plan.recurrences.items(), state.last_updates, state.now)
    for (i, recurrence), records, now in per_table:
        moments = [inner[k] for k in recurrence.leaves]
        # NumPy's arrays, of a checkpoint for instance, as JAX's.
        arrays = jax.tree.map(jnp.asarray, (weights[i], moments, records, now))
        tables[i] = Table(recurrence, *arrays)
    return tables


def _with_tables(
    given: Any, treedef: Any, leaves: Any, state: ExactState, tables: dict[int, Table]
) -> tuple[Any, ExactState]:
    """Returns the given parameters and state with the arrays of `tables`."""
    leaves = list(leaves)
    inner, inner_treedef = jax.tree.flatten(state.inner)
    for i, table in tables.items():
        leaves[i] = table.weights
        for k, m in zip(table.recurrence.leaves, table.moments):
            inner[k] = m
    records = tuple(table.records for table in tables.values())
    now = tuple(table.now for table in tables.values())
    inner = inner_treedef.unflatten(inner)
    state = state._replace(inner=inner, last_updates=records, now=now)
    return trees.in_structure_of(given, (treedef.unflatten(leaves), state))


def _not_caught_up() -> jax.Array:
    return jnp.zeros((), jnp.asarray(0).dtype)  # with a dtype, so its type is strong


def _add(x: jax.Array, correction: jax.Array | None) -> jax.Array:
    """Adds in the wider dtype; the result has the dtype of `x`."""
    if correction is None:
        return x
    return (x.astype(correction.dtype) + correction).astype(x.dtype)
