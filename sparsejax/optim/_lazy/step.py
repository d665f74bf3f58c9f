"""The arguments of one update as leaves, with one table instead of a stack of tables.

A gradient with the rows of a stack `[K, V, ...]` has ids that count the rows of all its
tables. So the step is a step of one table `[K * V, ...]`: weights and the state that
follows them are reshaped before it, and back after it, which inside `jit` costs
nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from sparsejax._rows import (
    SelectedRows,
    flat_rows,
    is_selected_rows,
    restacked,
    stacked_rows,
)
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._lazy import state_sharding


class Step(NamedTuple):
    """The arguments of `update`.

    Attributes:
      treedef: structure of the gradients.
      specs: of the parameters, see `trees.to_spec`.
      tables: the leaves whose gradients are SelectedRows.
      grads: leaves of the gradients.
      weights: leaves of the parameters, or None.
      state: the state of the transformation.
      owners: for each leaf of the state, the table that it follows, or None.
      stacks: the gradients of stacks, by leaf.
    """

    treedef: Any
    specs: tuple[Any, ...]
    tables: tuple[int, ...]
    grads: list[Any]
    weights: list[Any] | None
    state: Any
    owners: tuple[int | None, ...]
    stacks: dict[int, SelectedRows]

    @classmethod
    def of(cls, updates: Any, state: Any, params: Any) -> "Step":
        """Makes the step with these arguments; raises if they do not fit together."""
        grads, treedef = trees.flatten(updates)
        state_sharding.check_sharded(updates, params, state)
        weights = trees.flatten_params(updates, params)
        checks.check_gradients(updates, weights)
        tables = tuple(i for i, g in enumerate(grads) if is_selected_rows(g))
        stacks = {i: grads[i] for i in tables if grads[i].stack}
        specs = tuple(
            trees.StackSpec(x.shape, x.dtype) if i in stacks else trees.to_spec(x)
            for i, x in enumerate(weights or grads)
        )
        return cls(treedef, specs, tables, grads, weights, state, (), stacks)

    @property
    def key(self) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
        return self.treedef, self.specs, self.tables

    def path(self, table: int) -> str:
        """Returns the path of a table, for messages."""
        return trees.leaf_paths(self.treedef.unflatten(self.grads), "grads")[table]

    def with_owners(self, owners: tuple[int | None, ...], expected: Any) -> "Step":
        """Returns the step with `owners`; raises unless the state is as expected.

        Args:
          owners: for each leaf of the state, the table that it follows, or None.
          expected: the state that `tx.init` returns.
        """
        checks.check_state(self.state, expected)
        row_shapes = {i: self.grads[i].row_shape for i in self.tables}
        checks.check_state_rows(self.state, owners, row_shapes)
        return self._replace(owners=owners)

    def flat(self) -> "Step":
        """Returns the same step with one table instead of each stack."""
        weights = self.weights and list(self.weights)
        grads, (state, treedef) = list(self.grads), jax.tree.flatten(self.state)
        for i, stack in self.stacks.items():
            grads[i] = stack.unstacked()
            if weights is not None:
                weights[i] = flat_rows(stack, weights[i])
        for k, owner in enumerate(self.owners):
            if owner in self.stacks:
                state[k] = flat_rows(self.stacks[owner], state[k])
        return self._replace(
            grads=grads, weights=weights, state=treedef.unflatten(state)
        )

    def restore(self, updates: Sequence[Any], state: Any) -> tuple[Any, Any]:
        """Updates and new state of the flat step, with the axes of the stacks."""
        updates, (leaves, treedef) = list(updates), jax.tree.flatten(state)
        for i, grad in self.stacks.items():
            weights = self.weights and self.weights[i]
            updates[i] = restacked(updates[i], grad.stack, weights)
        for k, owner in enumerate(self.owners):
            if owner in self.stacks:
                leaves[k] = stacked_rows(self.stacks[owner], leaves[k])
        return self.treedef.unflatten(updates), treedef.unflatten(leaves)
