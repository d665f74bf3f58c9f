"""Running an optimizer on a few probes: a twin of it, small, with the same clocks.

`exact` knows nothing of how a transformation is written. What it must know, that is
what a step without gradient does to a coordinate, now or some steps ahead, it finds out
by running the transformation on a twin of the tree of parameters, in which each table
is a column of probes and every other leaf is a single element. The twin's state is what
`tx.init` makes of it, with

- the leaves that follow a table replaced by the moments of the probes,
- all others (counts, hyper-parameters) taken from the real state, integers among them
  being *clocks*: what they are j steps ahead is j more.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax._rows import indexing
from sparsejax.optim._lazy import follow


class Rows(NamedTuple):
    """Probes of one table: weights `[R]`, and moments, `[R]` each."""

    weights: jax.Array
    moments: tuple[jax.Array, ...]


class Twin:
    """A transformation on probes.

    Args:
      tx: the transformation.
      treedef: structure of the parameters, holes counting as leaves.
      specs: ShapeDtypeStructs (or holes) of its leaves.
      following: by table (a leaf's number), the leaves of the state that follow it.
    """

    def __init__(
        self,
        tx: Any,
        treedef: Any,
        specs: Sequence[Any],
        following: dict[int, tuple[int, ...]],
    ):
        self._tx = optax.with_extra_args_support(tx)
        self._treedef = treedef
        self._specs = specs
        self._following = following
        self._owners = {
            k: (i, n) for i, f in following.items() for n, k in enumerate(f)
        }

    def spec(self, table: int) -> Any:
        """Shape and type of a table."""
        return self._specs[table]

    def dtype(self, table: int) -> Any:
        """What numbers about a table are computed in."""
        return indexing.accumulator_dtype(self._specs[table].dtype)

    def init(self, count: int) -> Any:
        """The state of a tree with `count` probes a table, leaves of it in a list."""
        return jax.tree.leaves(self._tx.init(self._tree({}, count)))

    def step(
        self,
        state: Any,
        rows: dict[int, Rows],
        ahead: Any = 0,
        gradient: Any = None,
    ) -> tuple[dict[int, jax.Array], dict[int, Rows], list[Any]]:
        """One step, without gradient unless one is given.

        Args:
          state: the real state, or one of this twin.
          rows: the probes, by table.
          ahead: so many steps later than `state` is.
          gradient: by table `[R]`.

        Returns:
          How far the weights move, the probes after that, and all leaves of the state.
        """
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            weights = {i: r.weights for i, r in rows.items()}
            params = self._tree(weights)
            made, structure = jax.tree.flatten(self._tx.init(params))
            leaves = jax.tree.leaves(state)
            for k, (own, real) in enumerate(zip(made, leaves, strict=True)):
                made[k] = self._leaf(k, own, real, rows, ahead)
            gradient = gradient or {i: jnp.zeros_like(w) for i, w in weights.items()}
            grads, state = self._tree(gradient), structure.unflatten(made)
            updates, state = self._tx.update(grads, state, params)
        new = jax.tree.leaves(state)
        updates = self._treedef.flatten_up_to(updates)
        moves = {i: updates[i].reshape(-1) for i in rows}
        after = {
            i: Rows(
                r.weights + moves[i].astype(r.weights.dtype),
                tuple(new[k].reshape(-1) for k in self._following[i]),
            )
            for i, r in rows.items()
        }
        return moves, after, new

    def _tree(self, values: dict[int, Any], count: int = 1) -> Any:
        """The parameters: `values` where they are given, zeros elsewhere."""
        leaves = []
        for i, spec in enumerate(self._specs):
            if follow.is_leaf(spec):
                leaves.append(spec)
                continue
            rows = (
                values[i].shape[:1]
                if i in values
                else (count,) * (i in self._following)
            )
            shape = (*rows, *(1,) * (len(spec.shape) - len(rows)))
            value = values[i] if i in values else jnp.zeros(shape, spec.dtype)
            leaves.append(value.reshape(shape).astype(spec.dtype))
        return self._treedef.unflatten(leaves)

    def _leaf(self, k: int, own: Any, real: Any, rows: Any, ahead: Any) -> Any:
        if k in self._owners:
            table, place = self._owners[k]
            return rows[table].moments[place].reshape(own.shape).astype(own.dtype)
        if np.shape(real) != own.shape:
            return own  # of a leaf that is no table: smaller here
        real = jnp.asarray(real)
        is_clock = jnp.issubdtype(real.dtype, jnp.integer)
        return real + jnp.asarray(ahead).astype(real.dtype) if is_clock else real
