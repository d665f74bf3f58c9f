"""Stacks of tables `[K, V, ...]` in a step, taken for one table `[K * V, ...]`.

A gradient with the rows of a stack has ids that count the rows of all its tables. So
the step is a step of one table: weights and the state that follows them are reshaped
before it, and back after it, which inside `jit` costs nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from sparsejax._rows import SelectedRows, flat_rows, restacked, stacked_rows
from sparsejax.optim import _trees as trees


Stacks = Mapping[int, SelectedRows]  # the gradient of each stack, by leaf index


def specs(stacks: Stacks, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The specs of parameters, with a `StackSpec` for each stack."""
    return tuple(
        trees.StackSpec(x.shape, x.dtype) if i in stacks else x
        for i, x in enumerate(leaves)
    )


def flatten(
    stacks: Stacks,
    grads: Sequence[Any],
    weights: Sequence[Any] | None,
    state: Any,
    owners: Sequence[int | None],
) -> tuple[list[Any], list[Any] | None, Any]:
    """Gradients, weights and state with one table in place of each stack."""
    grads = [stacks[i].unstacked() if i in stacks else g for i, g in enumerate(grads)]
    if weights is not None:
        weights = [
            flat_rows(stacks[i], w) if i in stacks else w for i, w in enumerate(weights)
        ]
    leaves, treedef = jax.tree.flatten(state)
    for k, stack in _following(stacks, owners).items():
        leaves[k] = flat_rows(stack, leaves[k])
    return grads, weights, treedef.unflatten(leaves)


def restore(
    stacks: Stacks,
    weights: Sequence[Any] | None,
    updates: Sequence[Any],
    state: Any,
    owners: Sequence[int | None],
) -> tuple[list[Any], Any]:
    """Updates and state with the axes of the stacks.

    Args:
      stacks: as for `flatten`.
      weights: the parameters as they were passed, to which the updates are added.
      updates: updates of the tables.
      state: the new state.
      owners: for each leaf of the state, the table that it follows, or None.
    """
    updates = [
        restacked(u, stacks[i].stack, None if weights is None else weights[i])
        if i in stacks
        else u
        for i, u in enumerate(updates)
    ]
    leaves, treedef = jax.tree.flatten(state)
    for k, stack in _following(stacks, owners).items():
        leaves[k] = stacked_rows(stack, leaves[k])
    return updates, treedef.unflatten(leaves)


def _following(stacks: Stacks, owners: Sequence[int | None]) -> dict[int, SelectedRows]:
    """The leaves of the state that follow a stack, with its gradient."""
    return {
        k: stacks[owner]
        for k, owner in enumerate(owners)
        if owner is not None and owner in stacks
    }
