"""Rows of tables and of optimizer state: gathered for a step, scattered back after it.

The functions on one table are open to other kinds of SelectedRows, such as those of a
sharded table: a subclass registers its own way (`functools.singledispatch`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._lookup.read_rows import read_rows
from sparsejax._rows import SelectedRows, indexing


# ------------------------------------------------------------------ one table


@functools.singledispatch
def merge_duplicates(grad: SelectedRows) -> SelectedRows:
    """The distinct rows, ascending, their values summed."""
    # At least one slot, so that no reduction inside `tx` meets an empty array.
    return grad.coalesce(capacity=max(1, min(grad.capacity, grad.height)))


@functools.singledispatch
def gather_rows(rows: SelectedRows, table: Any, otherwise: jax.Array) -> jax.Array:
    """Rows of a table, `otherwise` in empty slots."""
    if not rows.height:
        return otherwise
    read = read_rows(jnp.asarray(table), rows.rows)
    filled = indexing.append_axes(rows.filled(), read.ndim)
    # An optimization_barrier before the arithmetic made no difference on XLA:CPU.
    return jnp.where(filled, read, otherwise.astype(read.dtype))


@functools.singledispatch
def scatter_rows(rows: SelectedRows, table: Any, values: jax.Array) -> jax.Array:
    """The table with these rows, which are distinct and ascending, replaced."""
    table = jnp.asarray(table)
    if not rows.height:
        return table
    # Each empty slot gets an id of its own beyond the end. XLA may then be told that
    # ids are unique, and needs no atomic writes where it scatters in parallel.
    ids = rows.rows
    unique = rows.height + rows.capacity <= jnp.iinfo(ids.dtype).max
    if unique:
        beyond = jnp.arange(rows.capacity, dtype=ids.dtype)
        ids = ids + jnp.where(rows.filled(), _arguments.scalar(0, ids), beyond)
    return table.at[ids].set(
        values.astype(table.dtype),
        mode="drop",
        wrap_negative_indices=False,
        indices_are_sorted=True,
        unique_indices=unique,
    )


@functools.singledispatch
def as_update(rows: SelectedRows, values: jax.Array, grad: SelectedRows) -> Any:
    """The update of a table, zero in empty slots, with at most the gradient's capacity.

    Args:
      rows: the merged gradient.
      values: what `tx` made of it.
      grad: the gradient as it came.
    """
    values = indexing.zero_unless(rows.filled(), values)
    slots = min(grad.capacity, grad.height)
    return SelectedRows(rows.rows[:slots], values[:slots], rows.height)


# ------------------------------------------------------------------ whole trees


def gather(
    init: Callable,
    treedef: Any,
    grads: Sequence[Any],
    weights: Sequence[Any] | None,
    state: Any,
    owners: Sequence[int | None],
    merged: dict[int, SelectedRows],
) -> tuple[Any, Any, Any]:
    """What `tx.update` is called with: rows in place of the tables.

    Args:
      init: `tx.init`.
      treedef: structure of the gradients.
      grads: their leaves.
      weights: leaves of the parameters, or None.
      state: the state of `tx`.
      owners: for each leaf of the state the table that it follows, or None.
      merged: by table (number of a leaf), its gradient without duplicates.

    Returns:
      Trees of gradients, state and parameters (None if there were none).
    """
    state_leaves, state_treedef = jax.tree.flatten(state)
    grads = [merged[i].values if i in merged else g for i, g in enumerate(grads)]
    if weights is not None:
        weights = [
            gather_rows(merged[i], w, jnp.zeros_like(grads[i])) if i in merged else w
            for i, w in enumerate(weights)
        ]
    if any(owner is not None for owner in owners):
        # An empty slot has the state of a row that was never touched.
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
    """The new state, with its rows written into the tables of the old one."""
    leaves, treedef = jax.tree.flatten(new_state)
    for k, (owner, old) in enumerate(zip(owners, jax.tree.leaves(state))):
        if owner is not None:
            leaves[k] = scatter_rows(merged[owner], old, leaves[k])
    return treedef.unflatten(leaves)
