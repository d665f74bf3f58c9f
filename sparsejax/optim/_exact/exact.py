"""exact: dense training at sparse cost.

A dense optimizer moves every row at every step: momentum carries the row on, Adam's
moments decay, weight decay shrinks it. `lazy` does none of this to rows without a
gradient, so it is another algorithm. `exact` postpones it: for each row it keeps the
step of its last update, and brings the row up to date before it is read. `closed_form`
has the formulas, `identify` finds the recurrence of a row without a gradient.

For each table the state keeps last-update records (see `catch_up`): for each row the
step that its weights are of, the step that its moments are of, and a short vector F,
which says how far the moments were still going to move the weights.

- `catch_up` brings the weights of the rows that will be read up to date.
- `update` brings the moments of the rows with a gradient up to date and runs `tx` on
  these rows, as `lazy` does.
- `flush` does for all rows what these two do for some.
"""

from __future__ import annotations

import functools
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
from sparsejax.optim._exact.catch_up import Table
from sparsejax.optim._exact.plan import Plan, Planner, not_exact
from sparsejax.optim._lazy import gather_scatter, judge, state_sharding


CALL = "sparsejax.optim.exact"


class ExactState(NamedTuple):
    """State of `exact`. `last_updates` and `now` have an entry for each table.

    Args:
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


judge.NOT_LIFTED[ExactState] = (
    CALL,
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

    A row without a gradient still moves in dense training. Let its weights be
    w, and let its first moments m and second moment v decay by constant
    factors. Then all steps without a gradient from step s to step t together
    are

      w_t = D(s, t) (w_s - F_s(v_s) m_s) + F_t(v_t) m_t

    where D(s, t) is the product of (1 - learning rate * weight decay), and
    F_t(v_t) m_t is the whole distance that m_t would still move the weights. F
    is one short vector per step. Each row keeps the one of the step at which it
    was last brought up to date. The cost of a row therefore does not depend on how long
    it was not read, and a step costs only as much as its rows. Any learning rate
    schedule works.

    F is computed by running `tx` itself a bounded number of steps ahead (176
    for Adam's defaults; the steps beyond contribute less than 1e-8 of F) and by
    interpolation in v, whose error is at most 2e-7 of the distance. So the
    result is that of `tx` up to rounding.

    Rows must be caught up before the loss reads them:

      params, state = tx.catch_up(params, state, ids)
      loss, grads = sj.value_and_grad(loss_fn)(params, batch)
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)

    `exact_value_and_grad` does the first two lines and finds the ids itself.
    Call `flush`, which catches all rows up, before the whole table is
    evaluated, exported or used by another program. `update` raises an error if
    `catch_up` was not called since the last update. If it was, but without some
    row that gets a gradient, `update` catches this row up, but its gradient was
    taken at old weights. `state.stale` counts such rows.

    Masks and labels that are functions of the parameters are called once, with arrays
    of the full shapes, as under `lazy`.

    Args:
      tx: an optax transformation. On a row without a gradient it must multiply
        each moment by a constant and move the weights linearly in the moments,
        divided at most by the root of one moment plus eps: sgd, momentum,
        nesterov, adam, nadam, adamw, rmsprop, adagrad and similar, chained with
        clipping of gradients, schedules, decoupled weight decay,
        inject_hyperparams. `init` checks this by running it.
      tables: which leaves are tables: a tree prefix of bools, or
        `callable(path, leaf) -> bool`. None takes every real float leaf of rank
        2 or more that `tx` treats in this way. Name the tables if the model has
        many other matrices, because the state keeps records for each table.

    Returns:
      `(init, update, catch_up, flush)`.
      `init(params)` returns an `ExactState`. `catch_up(params, state, ids)` returns
      `(params, state)` with rows brought up to date. `ids` is a tree like `params`,
      with integers of any shape at tables, None or nothing at other leaves; `...` means
      all rows. Ids out of range are ignored. Duplicates are allowed.
      `update(grads, state, params, **extra_args)` is optax's. The gradient of a table
      is a SelectedRows, or dense, which moves all rows. `flush(params, state)` returns
      `(params, state)` with all rows up to date. Call it also after setting a
      hyper-parameter in the state by hand, because F looks ahead.

    Raises:
      TypeError: `tx` is not an optax transformation, or the state is not from `exact`.
      ValueError: at init, `tx` treats rows without a gradient differently (the message
        says which part, and why), or there is no table; at update, a SelectedRows is
        the gradient of a leaf that is not a table, or `catch_up` was not called since
        the last update.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax as sj
      >>> from sparsejax.optim import exact
      >>> tx = exact(optax.sgd(1.0, momentum=0.5))
      >>> params = {"table": jnp.zeros((100, 1))}
      >>> state = tx.init(params)
      >>> for row in (3, 4, 4):
      ...     g = {"table": sj.SelectedRows(jnp.array([row]), -jnp.ones((1, 1)), 100)}
      ...     params, state = tx.catch_up(params, state, {"table": jnp.array([row])})
      ...     updates, state = tx.update(g, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params["table"][3], tx.flush(params, state)[0]["table"][3]
      (Array([1.], dtype=float32), Array([1.75], dtype=float32))

    References:
      The last-step counter comes from sparse regularised SGD (Carpenter, 2008, "Lazy
      Sparse Stochastic Gradient Descent"; Langford et al., 2009). Here it also covers
      moments.
    """
    checks.check_transformation(CALL, tx, "optax.adam(1e-3)")
    planned = Planner(tx, tables)
    depends_on_rows = trees.remember(functools.partial(judge.depends_on_rows, tx))

    def init(params):
        state_sharding.check_not_sharded(CALL, params)
        checks.check_no_pulled_table(CALL, params)
        checks.check_not_quantized(CALL, params)
        leaves, _, plan = planned(params)
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
        leaves, treedef, plan = planned(params)
        tables = _tables(plan, leaves, state)
        for i, ids_of_leaf in trees.ids_by_leaf(CALL, "ids", params, ids).items():
            if i not in tables:
                continue  # its gradients are dense, so it is never behind
            if ids_of_leaf is ...:
                tables[i] = _catch_up.catch_up_all_if_stale(tables[i], state.step)
                continue
            call, height = f"{CALL}.catch_up", leaves[i].shape[0]
            rows = _arguments.as_ids(call, ids_of_leaf, height).reshape(-1)
            tables[i] = _catch_up.catch_up(tables[i], rows, state.step)
        state = state._replace(caught_up=jnp.asarray(1))
        new = _with_tables(treedef, leaves, state, tables)
        return trees.in_structure_of(given, new)

    def update(updates, state, params=None, **extra_args):
        grads = updates
        if params is None:
            raise ValueError(
                f"{CALL}: update needs the parameters: tx.update(grads, state, "
                "params), with the params that catch_up returned."
            )
        leaves, treedef = trees.flatten(grads)
        state_sharding.check_not_sharded(CALL, leaves)
        weights = trees.flatten_params(CALL, grads, params)
        assert weights is not None
        sparse = [i for i, g in enumerate(leaves) if isinstance(g, SelectedRows)]
        if not sparse:
            checks.check_order(CALL, params)
        checks.check_gradients(CALL, grads, weights)
        params = treedef.unflatten(weights)
        _, _, plan = planned(params)
        tables = _tables(plan, weights, state)
        for i in sparse:
            if i not in tables:
                raise plan.refusal(i, trees.leaf_paths(grads, "grads")[i])
            if leaves[i].stack:
                raise ValueError(
                    f"{CALL}: {trees.leaf_paths(grads, 'grads')[i]} has rows of a "
                    f"stack of tables, of shape {leaves[i].shape}, whose rows exact "
                    "does not catch up. Take its gradient by exact_value_and_grad, or "
                    "with tables=False for it, which gives an array; or keep the "
                    "parameter as one table [K * V, ...], reshaped in the loss."
                )
            moves = tables[i].recurrence.num_coefficients > 0
            if moves and not getattr(state.caught_up, "weak_type", False):
                raise ValueError(
                    f"{CALL}: {trees.leaf_paths(grads, 'grads')[i]} is a SelectedRows, "
                    "but tx.catch_up was not called since the last update, so the "
                    "gradient may be of old weights. Use (loss, grads), params, state "
                    "= sparsejax.optim.exact_value_and_grad(loss_fn, tx)(params, "
                    "state, batch) instead of sparsejax.value_and_grad, or call "
                    "params, state = tx.catch_up(params, state, ids) before it."
                )

        # A dense gradient of a table: all rows are updated, so all are caught up.
        step, corrections = state.step, {}
        for i, table in tables.items():
            if i in sparse or trees.is_none_or_masked(leaves[i]):
                continue
            tables[i] = _catch_up.catch_up_all_if_stale(table, step)
            corrections[i] = tables[i].weights - table.weights
        params, state = _with_tables(treedef, weights, state, tables)
        weights = treedef.flatten_up_to(params)

        # A SelectedRows: cut out its rows, as `lazy` does, and bring these up to date.
        merged = {i: gather_scatter.merge_duplicates(leaves[i]) for i in sparse}
        specs = tuple(map(trees.to_spec, weights))
        owners = [owner if owner in merged else None for owner in plan.owners]
        num_rows = tuple(rows.capacity for rows in merged.values())
        reason = depends_on_rows(treedef, specs, tuple(merged), num_rows)
        if reason is not None:
            raise not_exact("this optimizer", reason)
        row_shapes = {i: rows.row_shape for i, rows in merged.items()}
        checks.check_state_rows(CALL, state.inner, owners, row_shapes)
        rows_grads, rows_state, rows_weights = gather_scatter.gather(
            plan.tx.init, treedef, leaves, weights, state.inner, owners, merged
        )
        moments, state_treedef = jax.tree.flatten(rows_state)
        rows_weights = treedef.flatten_up_to(rows_weights)
        stale, weights_steps = state.stale, {}
        for i, rows in merged.items():
            own = tables[i].recurrence.leaves
            stored = [moments[k] for k in own]
            current = _catch_up.current_rows(tables[i], stored, rows, step)
            stale, weights_steps[i] = stale + current.num_stale, current.weights_steps
            for k, m in zip(own, current.moments):
                moments[k] = m
            if current.correction is not None:
                corrections[i] = current.correction
                rows_weights[i] = _add(rows_weights[i], current.correction)

        updates, new = optax.with_extra_args_support(plan.tx).update(
            rows_grads,
            state_treedef.unflatten(moments),
            treedef.unflatten(rows_weights),
            **extra_args,
        )
        updates = treedef.flatten_up_to(updates)
        for i, correction in corrections.items():
            updates[i] = _add(updates[i], correction)
        for i, rows in merged.items():
            updates[i] = gather_scatter.as_update(rows, updates[i], leaves[i])

        new = gather_scatter.scatter_state(state.inner, new, owners, merged)
        step = step + 1
        for (i, table), now in zip(tables.items(), plan.displacement(new, state.now)):
            if i in merged:
                tables[i] = _catch_up.record_update(
                    table, merged[i], weights_steps[i], now, step
                )
            elif i in corrections:
                tables[i] = _catch_up.record_update_of_all(table, now, step)
            else:
                tables[i] = table._replace(now=now)
        state = _state(new, step, stale, tables, _not_caught_up())
        return treedef.unflatten(updates), state

    def flush(params, state):
        given = params, state
        params, state = map(trees.without_variables, given)
        leaves, treedef, plan = planned(params)
        tables = _tables(plan, leaves, state)
        # All rows get the same F, so the sum of log(1 - d) in it may restart at zero.
        fresh = plan.displacement(state.inner, None)
        for (i, table), now in zip(tables.items(), fresh):
            table = _catch_up.catch_up_all(table, state.step)
            tables[i] = _catch_up.record_update_of_all(table, now, state.step)
        new = _with_tables(treedef, leaves, state, tables)
        return trees.in_structure_of(given, new)

    return Exact(init, update, catch_up, flush)


# ------------------------------------------------------------------ the state


def _tables(plan: Plan, weights: Any, state: Any) -> dict[int, Table]:
    """The arrays of each table, taken out of the parameters and the state."""
    checks.check_state(state, ExactState)
    inner = jax.tree.leaves(state.inner)
    needed = max((k for r in plan.recurrences.values() for k in r.leaves), default=-1)
    if len(state.last_updates) != len(plan.recurrences) or needed >= len(inner):
        raise TypeError(
            f"{CALL}: the state belongs to a different tree of parameters. Pass the "
            "state that init(params), catch_up, update or flush returned for these "
            "parameters."
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
    treedef: Any, leaves: Any, state: ExactState, tables: dict[int, Table]
) -> tuple[Any, ExactState]:
    """The parameters and the state with the arrays of `tables`."""
    leaves = list(leaves)
    inner, inner_treedef = jax.tree.flatten(state.inner)
    for i, table in tables.items():
        leaves[i] = table.weights
        for k, m in zip(table.recurrence.leaves, table.moments):
            inner[k] = m
    inner = inner_treedef.unflatten(inner)
    state = _state(inner, state.step, state.stale, tables, state.caught_up)
    return treedef.unflatten(leaves), state


def _state(
    inner: Any, step: Any, stale: Any, tables: dict[int, Table], caught_up: Any
) -> ExactState:
    records = tuple(table.records for table in tables.values())
    now = tuple(table.now for table in tables.values())
    return ExactState(inner, step, stale, records, now, caught_up)


def _not_caught_up() -> jax.Array:
    return jnp.zeros((), jnp.asarray(0).dtype)  # with a dtype, so its type is strong


# ------------------------------------------------------------------ helpers


def _add(x: jax.Array, correction: jax.Array) -> jax.Array:
    """Adds in the wider dtype; the result has the dtype of `x`."""
    return (x.astype(correction.dtype) + correction).astype(x.dtype)
