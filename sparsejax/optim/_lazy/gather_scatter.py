"""Gathers rows of tables and optimizer state for a step, and scatters them back.

The functions on one table use `functools.singledispatch`, so that a subclass of
SelectedRows, such as ShardedRows, can register its own implementation.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _compat
from sparsejax._lookup.read_rows import read_rows
from sparsejax._rows import SelectedRows, indexing, is_quantized
from sparsejax.optim._lazy import separability
from sparsejax.optim._lazy.step import Step


# ------------------------------------------------------------------ one table


@functools.singledispatch
def merge_duplicates(grad: SelectedRows) -> SelectedRows:
    """Merges duplicates: distinct rows, ascending, with their values summed."""
    # At least one slot, so that no reduction inside `tx` sees an empty array.
    return grad.coalesce(
        capacity=_compat.max_dim(1, _compat.min_dim(grad.capacity, grad.height))
    )


@functools.singledispatch
def gather_rows(rows: SelectedRows, table: Any, otherwise: jax.Array) -> jax.Array:
    """Gathers rows of a table; `otherwise` in empty slots."""
    if not rows.height:
        return otherwise
    if is_quantized(table):
        read = table.get(rows.rows)
    else:
        read = read_rows(jnp.asarray(table), rows.rows)
    filled = indexing.append_axes(rows.filled(), read.ndim)
    # An optimization_barrier before the arithmetic made no difference on XLA:CPU.
    return jnp.where(filled, read, otherwise.astype(read.dtype))


@functools.singledispatch
def scatter_rows(rows: SelectedRows, table: Any, values: jax.Array) -> jax.Array:
    """Replaces these rows of the table; they must be distinct and ascending."""
    table = jnp.asarray(table)
    if not rows.height:
        return table
    return indexing.set_distinct_rows(table, rows.rows, values, indices_are_sorted=True)


@functools.singledispatch
def as_update(rows: SelectedRows, values: jax.Array, grad: SelectedRows) -> Any:
    """Makes the table's update: zero in empty slots, at most the gradient's slots.

    Args:
      rows: the merged gradient.
      values: the update that `tx` computed from it.
      grad: the original gradient.
    """
    values = indexing.zero_unless(rows.filled(), values)
    slots = _compat.min_dim(grad.capacity, grad.height)
    return SelectedRows(rows.rows[:slots], values[:slots], rows.height)


# ------------------------------------------------------------------ whole trees


def run(tx: Any, step: Step, extra_args: dict[str, Any]) -> tuple[list[Any], Any]:
    """Updates and new state, by running `tx` on the rows of all gradients.

    Args:
      tx: the transformation, with extra arguments.
      step: without stacks.
      extra_args: of `tx.update`.
    """
    merged = {i: merge_duplicates(step.grads[i]) for i in step.tables}
    num_rows = tuple(rows.capacity for rows in merged.values())
    reason = separability.difference_of_rows(tx, *step.key, num_rows)
    if reason is not None:
        raise separability.refused("this optimizer", reason)
    rows = gather(
        tx.init,
        step.treedef,
        step.grads,
        step.weights,
        step.state,
        step.owners,
        merged,
    )
    updates, state = tx.update(*rows, **extra_args)
    updates = step.treedef.flatten_up_to(updates)
    for i, merged_rows in merged.items():
        updates[i] = as_update(merged_rows, updates[i], step.grads[i])
    return updates, scatter_state(step.state, state, step.owners, merged)


def gather(
    init: Callable,
    treedef: Any,
    grads: Sequence[Any],
    weights: Sequence[Any] | None,
    state: Any,
    owners: Sequence[int | None],
    merged: dict[int, SelectedRows],
) -> tuple[Any, Any, Any]:
    """Returns the arguments of `tx.update`, with rows instead of tables.

    Args:
      init: `tx.init`.
      treedef: structure of the gradients.
      grads: their leaves.
      weights: leaves of the parameters, or None.
      state: the state of `tx`.
      owners: for each leaf of the state, the table that it follows, or None.
      merged: for each table (leaf index), its gradient without duplicates.

    Returns:
      Trees of gradients, state and parameters (None without parameters).
    """
    state_leaves, state_treedef = jax.tree.flatten(state)
    grads = [merged[i].values if i in merged else g for i, g in enumerate(grads)]
    if weights is not None:
        weights = [
            gather_rows(merged[i], w, jnp.zeros_like(grads[i])) if i in merged else w
            for i, w in enumerate(weights)
        ]
    if any(owner is not None for owner in owners):
        # An empty slot gets the state of a row that was never touched.
        untouched = [
            jnp.zeros_like(x) if i in merged else x
            for i, x in enumerate(weights or grads)
        ]
        fresh = jax.tree.leaves(init(treedef.unflatten(untouched)))
        for k, owner in enumerate(owners):
            if owner is not None:
                state_leaves[k] = gather_rows(merged[owner], state_leaves[k], fresh[k])
    return (
        treedef.unflatten(grads),
        state_treedef.unflatten(state_leaves),
        None if weights is None else treedef.unflatten(weights),
    )


def scatter_state(
    state: Any,
    new_state: Any,
    owners: Sequence[int | None],
    merged: dict[int, SelectedRows],
) -> Any:
    """Returns the new state, with its rows written into the tables of the old state."""
    leaves, treedef = jax.tree.flatten(new_state)
    for k, (owner, old) in enumerate(zip(owners, jax.tree.leaves(state))):
        if owner is not None:
            leaves[k] = scatter_rows(merged[owner], old, leaves[k])
    return treedef.unflatten(leaves)
