"""exact: dense training at sparse cost.

A dense optimizer moves every row at every step: momentum carries it on, Adam's moments
fade, weight decay shrinks it. `lazy` leaves rows without gradient alone, which is
another algorithm. `exact` leaves them alone too, but remembers since when, and brings a
row up to date before it is read. The formulas are in `_exact_drift`; what `tx` does to
a row that gets no gradient is found out in `_exact_model`.

For each table the state keeps a book (see `_exact_table`): for each row the step that
its weights are of, the step that its moments are of, and a handful of numbers F, its
future as seen from the first of these.

- `catch_up` writes weights and book of the rows that will be read. It leaves the
  moments as they are: they are known in closed form whenever they are needed, and
  writing them would cost as much again.
- `update` lets moments of the rows with a gradient fade to the present, runs `tx` on
  those rows as `lazy` does, and writes weights, moments and book.
- `flush` does for all rows what both do for a few.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax import _arguments
from sparsejax._rows import SelectedRows
from sparsejax.optim._exact import plan as _exact_plan, table as _exact_table
from sparsejax.optim._exact.plan import Plan
from sparsejax.optim._exact.table import Table
from sparsejax.optim._lazy import follow as _follow, lazy, parts, placement, separable
from sparsejax.optim._lazy.table_rows import (
    check_on_one_device,
    merge_duplicates,
    update_of,
)


CALL = "sparsejax.optim.exact"

_NOT_A_TRANSFORMATION = (
    CALL + ": takes an optax transformation such as optax.adam(1e-3), got {found}."
)
_NEEDS_PARAMS = (
    CALL + ": update needs the parameters: tx.update(grads, state, params), with the "
    "params that catch_up gave."
)
_OTHER_STATE = (
    CALL + ": takes the state that its own init, catch_up, update or flush gave, got "
    "{found}."
)
_NO_SUCH_LEAF = (
    CALL + ": ids name {path}, which is no leaf of the parameters; there are {known}."
)


class ExactState(NamedTuple):
    """State of `exact`; the last two have an entry for each table, in their order.

    Args:
      inner: the state of the optimizer, what `tx.init` gives.
      step: int32, how many updates there have been.
      stale: int32, how many rows got a gradient without having been caught up before.
      books: `[V, 4 + columns]`, for each row the step of its weights, that of its
        moments, and its F.
      now: `[columns]`, F of the present step.
    """

    inner: Any
    step: jax.Array
    stale: jax.Array
    books: tuple[jax.Array, ...]
    now: tuple[jax.Array, ...]


class Exact(NamedTuple):
    """What `exact` returns: an optax transformation with two functions more."""

    init: Callable[[Any], ExactState]
    update: Callable[..., tuple[Any, ExactState]]
    catch_up: Callable[..., tuple[Any, ExactState]]
    flush: Callable[..., tuple[Any, ExactState]]


def exact(tx: Any, *, tables: Any = None) -> Exact:
    """Trains as `tx` does on dense gradients, at the cost of the rows that are read.

    A row that gets no gradient at step t still moves in dense training. For
    weights w, moments m and a divisor v that fade by constant ratios, all of
    that between two steps s < t is

      w_t = D(s, t) (w_s - F_s(v_s) m_s) + F_t(v_t) m_t

    with D the product of (1 - learning rate * weight decay) and F_t m the sum
    of all that m would still move the weight by. F is one small vector a step,
    which each row keeps from the step it was last brought up to date. So a row
    costs the same however long it was not read, and a step costs what its rows
    cost. Any schedule will do.

    F is evaluated by a replay of `tx` itself that is bounded (176 steps for
    Adam's defaults, what is beyond is below 1e-8 of it) and interpolated in v;
    the error that this makes is at most 2e-7 of the drift. So training is that
    of `tx`, to rounding.

    Rows must be caught up before the loss reads them:

      params, state = tx.catch_up(params, state, ids)
      loss, grads = sj.value_and_grad(loss_fn)(params, batch)
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)

    and all of them, by `flush`, before the whole table is looked at, saved or
    handed to another program. `exact_value_and_grad` does the first two lines
    and finds the ids itself. A row with a gradient that was not caught up is
    caught up by `update`. Its gradient was then taken at old weights;
    `state.stale` counts such rows.

    Args:
      tx: an optax transformation which, for a row without gradient, shrinks
        each moment by a constant and moves weights linearly in them, divided at
        most by the root of one moment plus eps: sgd, momentum, nesterov, adam,
        nadam, adamw, rmsprop, adagrad and such, in a chain with clipping of
        gradients, schedules, decoupled weight decay, inject_hyperparams. This
        is found out by running it.
      tables: which leaves are tables: a tree prefix of bools, or
        `callable(path, leaf) -> bool`. None takes every real float leaf of rank
        2 or more for which `tx` is of that kind. Where the model has many
        matrices that are no tables, say so: the state keeps clocks for each
        table.

    Returns:
      `(init, update, catch_up, flush)`.
      `init(params)` gives an `ExactState`.
      `catch_up(params, state, ids)` gives `(params, state)` with rows brought
      up to date. `ids` is a tree like `params` with integers of any shape at
      tables, None or nothing at all elsewhere; `...` stands for all rows. Out
      of range names no row; duplicates do no harm.
      `update(grads, state, params, **extra_args)` is optax's; a table's
      gradient is a SelectedRows, or dense, which moves all rows.
      `flush(params, state)` gives `(params, state)` with all rows up to date.
      Call it also after a hyper-parameter in the state was set by hand: F looks
      ahead.

    Raises:
      TypeError: `tx` is no transformation; a state that is not `exact`'s.
      ValueError: at init, `tx` is of another kind (the message names the part,
        and why), or there is no table; at update, the leaf of a SelectedRows is
        none.

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
      The last-step counter is that of sparse regularised SGD (Carpenter, 2008,
      "Lazy Sparse Stochastic Gradient Descent"; Langford et al., 2009); here
      for moments too.
    """
    if not parts.is_transformation(tx):
        found = lazy.describe(tx)
        raise TypeError(_NOT_A_TRANSFORMATION.format(found=found))
    planned = _exact_plan.Planner(CALL, tx, tables)
    follow = separable.remember(functools.partial(_follow.follow, tx.init))
    inner_update = optax.with_extra_args_support(tx).update

    def init(params):
        placement.check_none_spread(CALL, params)
        leaves, _, plan = planned(params)
        inner = tx.init(params)
        # Each an array of its own: no buffer can be donated twice.
        step, stale = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        heights = [leaves[i].shape[0] for i in plan.models]
        # Jitted, since it is many small operations.
        now = tuple(jax.jit(lambda inner: plan.future(inner, None))(inner))
        books = tuple(map(_exact_table.new_book, heights, now))
        return ExactState(inner, step, stale, books, now)

    def catch_up(params, state, ids):
        leaves, treedef, plan = planned(params)
        tables = _tables(plan, leaves, state)
        for i, named in _named(params, ids).items():
            if i not in tables:
                continue  # its gradients are dense, so it is never behind
            if named is ...:
                tables[i] = _exact_table.bring_if_stale(tables[i], state.step)
                continue
            named = _arguments.as_ids(CALL + ".catch_up", named, leaves[i].shape[0])
            named = named.reshape(-1)
            tables[i] = _exact_table.catch_up(tables[i], named, state.step)
        return _with_tables(treedef, leaves, state, tables)

    def update(updates, state, params=None, **extra_args):
        grads = updates
        if params is None:
            raise ValueError(_NEEDS_PARAMS)
        leaves, treedef = separable.flatten(grads)
        check_on_one_device(CALL, leaves)
        weights = lazy.weights_of(grads, treedef, params, CALL)
        assert weights is not None
        sparse = [i for i, g in enumerate(leaves) if isinstance(g, SelectedRows)]
        lazy.check_gradients(grads, leaves, weights, sparse, CALL)
        params = treedef.unflatten(weights)
        _, _, plan = planned(params)
        tables = _tables(plan, weights, state)
        for i in sparse:
            if i not in tables:
                raise _refusal(plan, grads, "grads", i)

        # Tables with a dense gradient, all of whose rows are read.
        step, corrections = state.step, {}
        for i, table in tables.items():
            if i in sparse or _follow.is_leaf(leaves[i]):
                continue
            tables[i] = _exact_table.bring_if_stale(table, step)
            corrections[i] = tables[i].weights - table.weights
        params, state = _with_tables(treedef, weights, state, tables)
        weights = treedef.flatten_up_to(params)

        # Rows of the others.
        merged = {i: merge_duplicates(leaves[i]) for i in sparse}
        specs = tuple(map(_follow.spec, weights))
        owners = follow(treedef, specs, tuple(merged)).owners
        cut = lazy.cut_rows(
            tx.init, treedef, leaves, weights, state.inner, owners, merged
        )
        rows_grads, rows_state, rows_weights = cut
        moments = jax.tree.leaves(rows_state)
        rows_weights = treedef.flatten_up_to(rows_weights)
        stale, before = state.stale, {}
        for i, rows in merged.items():
            mine = tables[i].model.leaves
            old = [moments[k] for k in mine]
            found = _exact_table.present(tables[i], old, rows, step)
            stale, before[i] = stale + found.stale, found.steps
            for k, m in zip(mine, found.moments):
                moments[k] = m
            if found.correction is not None:
                corrections[i] = found.correction
                rows_weights[i] = _plus(rows_weights[i], found.correction)
        rows_state = jax.tree.structure(rows_state).unflatten(moments)
        rows_params = treedef.unflatten(rows_weights)

        updates, new = inner_update(rows_grads, rows_state, rows_params, **extra_args)
        updates = treedef.flatten_up_to(updates)
        for i, correction in corrections.items():
            updates[i] = _plus(updates[i], correction)
        for i, rows in merged.items():
            updates[i] = update_of(rows, updates[i], leaves[i])

        new = lazy.put_back(state.inner, new, owners, merged)
        step, future = step + 1, plan.future(new, state.now)
        for (i, table), now in zip(tables.items(), future):
            if i in merged:
                tables[i] = _exact_table.stamp(table, merged[i], before[i], now, step)
            elif i in corrections:
                tables[i] = _exact_table.stamp_all(table, now, step)
            else:
                tables[i] = table._replace(now=now)
        state = _bookkeeping(ExactState(new, step, stale, (), ()), tables)
        return treedef.unflatten(updates), state

    def flush(params, state):
        leaves, treedef, plan = planned(params)
        tables = _tables(plan, leaves, state)
        tables = {i: _exact_table.bring(t, state.step) for i, t in tables.items()}
        params, state = _with_tables(treedef, leaves, state, tables)
        # All rows get the same F, so that the sums in it may begin again at zero.
        future = plan.future(state.inner, None)
        for (i, table), now in zip(tables.items(), future):
            tables[i] = _exact_table.stamp_all(table, now, state.step)
        return params, _bookkeeping(state, tables)

    return Exact(init, update, catch_up, flush)


# ------------------------------------------------------------------ the state


def _tables(plan: Plan, weights: Any, state: Any) -> dict[int, Table]:
    """What belongs to each table, taken out of parameters and state."""
    if not isinstance(state, ExactState) or len(state.books) != len(plan.models):
        found = type(state).__name__
        if isinstance(state, ExactState):
            found = f"one of {len(state.books)} tables instead of {len(plan.models)}"
        raise TypeError(_OTHER_STATE.format(found=found))
    inner = jax.tree.leaves(state.inner)
    if any(k >= len(inner) for model in plan.models.values() for k in model.leaves):
        raise TypeError(_OTHER_STATE.format(found="one of another tree of parameters"))
    tables = {}
    for (i, model), *own in zip(plan.models.items(), state.books, state.now):
        moments = [inner[k] for k in model.leaves]
        # NumPy's arrays, of a checkpoint for instance, as JAX's.
        arrays = jax.tree.map(jnp.asarray, (weights[i], moments, *own))
        tables[i] = Table(model, *arrays)
    return tables


def _with_tables(
    treedef: Any, leaves: Any, state: ExactState, tables: dict[int, Table]
) -> tuple[Any, ExactState]:
    """Parameters and state with what is in `tables`."""
    leaves = list(leaves)
    inner, structure = jax.tree.flatten(state.inner)
    for i, table in tables.items():
        leaves[i] = table.weights
        for k, m in zip(table.model.leaves, table.moments):
            inner[k] = m
    state = _bookkeeping(state._replace(inner=structure.unflatten(inner)), tables)
    return treedef.unflatten(leaves), state


def _bookkeeping(state: ExactState, tables: dict[int, Table]) -> ExactState:
    return state._replace(
        books=tuple(t.book for t in tables.values()),
        now=tuple(t.now for t in tables.values()),
    )


# ------------------------------------------------------------------ helpers


def _plus(x: jax.Array, correction: jax.Array) -> jax.Array:
    """Added in the wider type, in the type of `x`."""
    return (x.astype(correction.dtype) + correction).astype(x.dtype)


def _named(params: Any, ids: Any) -> dict[int, Any]:
    """The ids of each leaf that has some."""
    paths = lazy.leaf_paths(params, "")
    found = {}
    for path, named in jax.tree_util.tree_leaves_with_path(ids):
        path = jax.tree_util.keystr(path)
        if path not in paths:
            known = ", ".join(paths)
            error = _NO_SUCH_LEAF.format(path=path or "the whole tree", known=known)
            raise ValueError(error)
        found[paths.index(path)] = named
    return found


def _refusal(plan: Plan, tree: Any, name: str, leaf: int) -> ValueError:
    where, reason = lazy.leaf_paths(tree, name)[leaf], plan.why_not(leaf)
    error = _exact_plan.NOT_EXACT.format(call=CALL, where=where, reason=reason)
    return ValueError(error)
