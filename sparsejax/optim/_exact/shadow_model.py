"""The shadow model: an optimizer on a few probe coordinates, at the real step count.

`exact` does not know how a transformation is written. It learns what a zero-gradient
step does by running the transformation on a small copy of the parameter tree. In this
copy each table is a column of probes, and every other leaf has a single element.

The optimizer state of the copy is made by `tx.init`, except that

- the leaves that follow a table are replaced by the moments of the probes;
- the others (counts, hyper-parameters) are taken from the real state. The integers
  among them are *step counters*: j steps later they are greater by j.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax._rows import indexing
from sparsejax.optim import _trees as trees


class Probes(NamedTuple):
    """Probes of one table: weights `[n]` and moments, each `[n]`."""

    weights: jax.Array
    moments: tuple[jax.Array, ...]


class ShadowModel:
    """A transformation on probes.

    Args:
      tx: the transformation.
      treedef: structure of the parameters, None and MaskedNode counting as leaves.
      specs: its leaves as ShapeDtypeStructs (or None, MaskedNode).
      state_leaves: by table (the index of a leaf), the indices of the state leaves that
        follow it.
      row_shape: of the tables, whose coordinates are probes; one each by default.
    """

    def __init__(
        self,
        tx: Any,
        treedef: Any,
        specs: Sequence[Any],
        state_leaves: dict[int, tuple[int, ...]],
        row_shape: Sequence[int] | None = None,
    ):
        self._tx = optax.with_extra_args_support(tx)
        self._treedef = treedef
        self._specs = specs
        self._state_leaves = state_leaves
        self._row_shape = row_shape
        self._moment_of = {
            k: (table, position)
            for table, leaves in state_leaves.items()
            for position, k in enumerate(leaves)
        }

    def with_rows(self, row_shape: Sequence[int]) -> "ShadowModel":
        """The same, with the probes of a table as the coordinates of such rows."""
        parts = self._tx, self._treedef, self._specs, self._state_leaves
        return ShadowModel(*parts, row_shape)

    def spec(self, table: int) -> Any:
        """Shape and dtype of a table."""
        return self._specs[table]

    def dtype(self, table: int) -> Any:
        """The dtype that closed forms of a table are computed in."""
        return indexing.accumulator_dtype(self._specs[table].dtype)

    def init(self, count: int) -> list[Any]:
        """The leaves of a fresh state, with `count` probes per table."""
        return jax.tree.leaves(self._tx.init(self._tree({}, count)))

    def step(
        self,
        state: Any,
        probes: dict[int, Probes],
        ahead: Any = 0,
        gradient: dict[int, Any] | None = None,
    ) -> tuple[dict[int, jax.Array], dict[int, Probes], list[Any]]:
        """One step of the transformation.

        Args:
          state: the real state, or the leaves of one of this model.
          probes: by table.
          ahead: take the step this many steps later than `state` is.
          gradient: by table `[n]`; None is a zero gradient.

        Returns:
          By table the updates of the weights; by table the probes after the step; all
          leaves of the state after the step.
        """
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            weights = {i: p.weights for i, p in probes.items()}
            params = self._tree(weights)
            fresh, structure = jax.tree.flatten(self._tx.init(params))
            leaves = [
                self._state_leaf(k, own, real, probes, ahead)
                for k, (own, real) in enumerate(
                    zip(fresh, jax.tree.leaves(state), strict=True)
                )
            ]
            gradient = gradient or {i: jnp.zeros_like(w) for i, w in weights.items()}
            updates, new = self._tx.update(
                self._tree(gradient), structure.unflatten(leaves), params
            )
        new = jax.tree.leaves(new)
        updates = self._treedef.flatten_up_to(updates)
        moved = {i: updates[i].reshape(-1) for i in probes}
        after = {
            i: Probes(
                p.weights + moved[i].astype(p.weights.dtype),
                tuple(new[k].reshape(-1) for k in self._state_leaves[i]),
            )
            for i, p in probes.items()
        }
        return moved, after, new

    def _tree(self, values: dict[int, Any], count: int = 1) -> Any:
        """The parameters: `values` of tables, zeros elsewhere."""
        leaves = []
        for i, spec in enumerate(self._specs):
            if trees.is_none_or_masked(spec):
                leaves.append(spec)
                continue
            probes = values[i].shape[0] if i in values else count
            shape = (1,) * len(spec.shape)
            if i in values or i in self._state_leaves:
                row_shape = self._row_shape or shape[1:]
                shape = (probes // math.prod(row_shape), *row_shape)
            value = values[i] if i in values else jnp.zeros(shape, spec.dtype)
            leaves.append(value.reshape(shape).astype(spec.dtype))
        return self._treedef.unflatten(leaves)

    def _state_leaf(self, k: int, own: Any, real: Any, probes: Any, ahead: Any) -> Any:
        if k in self._moment_of:
            table, position = self._moment_of[k]
            return probes[table].moments[position].reshape(own.shape).astype(own.dtype)
        if np.shape(real) != own.shape:
            return own  # the state of a leaf that is not a table: smaller here
        return advance_counter(jnp.asarray(real), ahead)


def advance_counter(leaf: Any, steps: Any) -> Any:
    """A state leaf `steps` steps later, if it is a step counter; else as it is."""
    if not jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf
    return leaf + jnp.asarray(steps).astype(leaf.dtype)
