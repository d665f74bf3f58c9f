"""Runs a transformation on the gathered rows of tables and state.

The functions on one table use `functools.singledispatch`, so that a subclass of
SelectedRows, such as ShardedRows, can register its own implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from sparsejax import _compat
from sparsejax._lookup.lookup import read_rows
from sparsejax._rows import SelectedRows, indexing, is_quantized
from sparsejax.optim._lazy import separability


if TYPE_CHECKING:
    from sparsejax.optim._lazy.lazy import Step


# ------------------------------------------------------------------ a step


def run(tx: Any, step: Step, extra_args: dict[str, Any]) -> tuple[list[Any], Any]:
    """Returns updates and new state, from `tx` on the rows of all gradients."""
    merged = merge(tx, step, separability.refused)
    updates, state = tx.update(*gather(tx, step, merged), **extra_args)
    return scatter(step, merged, step.treedef.flatten_up_to(updates), state)


def merge(tx: Any, step: Step, refused: Callable) -> dict[int, SelectedRows]:
    """Returns for each table its gradient without duplicates.

    Raises:
      refused: `tx` runs other operations on the rows of a gradient than on all.
    """
    merged = {i: merge_duplicates(step.grads[i]) for i in step.tables}
    num_rows = tuple(rows.capacity for rows in merged.values())
    reason = separability.difference_of_rows(tx, *step.key, num_rows)
    if reason is not None:
        raise refused("this optimizer", reason)
    return merged


def gather(
    tx: Any, step: Step, merged: dict[int, SelectedRows]
) -> tuple[Any, Any, Any]:
    """Returns gradients, state and parameters with rows instead of tables.

    Args:
      tx: the transformation.
      step: its arguments.
      merged: for each table, its gradient without duplicates.
    """
    state, state_treedef = jax.tree.flatten(step.state)
    grads, weights = list(step.grads), step.weights
    for i, rows in merged.items():
        grads[i] = rows.values
    if weights is not None:
        weights = list(weights)
        for i, rows in merged.items():
            weights[i] = gather_rows(rows, weights[i], jnp.zeros_like(rows.values))
    if any(owner is not None for owner in step.owners):
        # An empty slot gets the state of a row that was never touched.
        untouched = list(weights or grads)
        for i in merged:
            untouched[i] = jnp.zeros_like(untouched[i])
        fresh = jax.tree.leaves(tx.init(step.treedef.unflatten(untouched)))
        for k, owner in enumerate(step.owners):
            if owner is not None:
                state[k] = gather_rows(merged[owner], state[k], fresh[k])
    return (
        step.treedef.unflatten(grads),
        state_treedef.unflatten(state),
        None if weights is None else step.treedef.unflatten(weights),
    )


def scatter(
    step: Step, merged: dict[int, SelectedRows], updates: list[Any], new_state: Any
) -> tuple[list[Any], Any]:
    """Returns the updates of tables, and the old state with these rows written."""
    updates = list(updates)
    for i, rows in merged.items():
        updates[i] = as_update(rows, updates[i], step.grads[i])
    leaves, treedef = jax.tree.flatten(new_state)
    for k, (owner, old) in enumerate(zip(step.owners, jax.tree.leaves(step.state))):
        if owner is not None:
            leaves[k] = scatter_rows(merged[owner], old, leaves[k])
    return updates, treedef.unflatten(leaves)


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
