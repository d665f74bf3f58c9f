"""Places: the arrays of a device cache in the trees of the user.

They are leaves of `CachedRows`: one node among the parameters, and one for each leaf of
the table's optimizer state that has rows.

The table's own optimizer makes a state of one structure. In the state of the user's
`tx` the same structure occurs once, in which a leaf with rows is a tree like the
parameters, with one node of this cache. So the leaves match by structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax.store._tree_tables import CachedRows


class Places:
    """The arrays of a cache in `params` and `opt_state`, which are not changed.

    Args:
      cache: the `Staging` of the cache, which keeps the places for trees of one
        structure.
      params, opt_state: the trees.
    """

    def __init__(self, cache: Any, params: Any, opt_state: Any):
        self._leaves, self._tree = jax.tree.flatten((params, opt_state))
        if cache.known_places is None or cache.known_places[0] != self._tree:
            numbered = self._tree.unflatten(range(self._tree.num_leaves))
            cache.known_places = self._tree, _find(cache, *numbered)
        self._by_row, self._counts = cache.known_places[1]
        self._check(cache)

    def arrays(self) -> list[jax.Array]:
        """Returns the weights, and the leaves of state with rows, on the device."""
        return [jnp.asarray(self._leaves[k]) for k in self._by_row]

    def put_rows(self, arrays: Sequence[jax.Array]) -> None:
        """Replaces `arrays()`."""
        for k, array in zip(self._by_row, arrays):
            self._leaves[k] = array

    def counts(self) -> list[np.ndarray]:
        """Returns the leaves of state without rows."""
        return [np.asarray(self._leaves[k]) for k in self._counts]

    def put_counts(self, counts: Sequence[np.ndarray]) -> None:
        """Replaces `counts()`."""
        for k, value in zip(self._counts, counts):
            self._leaves[k] = jnp.array(value)

    def trees(self) -> tuple[Any, Any]:
        """Returns `(params, opt_state)`."""
        return self._tree.unflatten(self._leaves)

    def _check(self, cache: Any) -> None:
        """Raises a ValueError unless the arrays can be donated and have slots."""
        name, count = cache.table.spec.name, cache.slots.row_of.size
        for k, column in zip(self._by_row, cache.table.columns):
            x = self._leaves[k]
            spec = (count, *column.shape[1:]), column.dtype
            if (np.shape(x), getattr(x, "dtype", None)) != spec:
                raise ValueError(
                    f"Table {name!r} needs an array {column.dtype.name}"
                    f"{list(spec[0])} in params and opt_state, got "
                    f"{_arguments.kind_of(x)}."
                )
            if isinstance(x, jax.Array) and x.is_deleted():
                raise ValueError(
                    f"The array of table {name!r}, or its state, was donated to a "
                    "step. Pass the trees that the last step returned."
                )
            if isinstance(x, jax.Array) and not x.is_fully_replicated:
                raise ValueError(
                    f"The array of table {name!r} is sharded. Keep it on one device, "
                    "or replicate it."
                )


def _find(cache: Any, params: Any, opt_state: Any) -> tuple[list[int], list[int]]:
    """Finds the leaves of the table in trees of the positions of their leaves.

    Returns:
      The positions of weights and state with rows; and of state without rows.
    """
    name, optimizer = cache.table.spec.name, cache.table.spec.optimizer
    weights, state = _nodes(cache, params), {*_nodes(cache, opt_state)}
    if len(weights) != 1:
        raise ValueError(
            f"params must have cache.table of table {name!r} once, but have it "
            f"{len(weights)} times."
        )
    matches = _matches(opt_state, optimizer.structure, optimizer.by_row, state)
    if not optimizer.leaves and not state:
        matches = [[]]
    if len(matches) != 1 or not state <= {*matches[0]}:
        raise ValueError(
            f"opt_state does not have the state {[x.name for x in optimizer.leaves]} "
            f"that table {name!r} has in the store. Call store.init with the "
            "transformation that tx applies to this table, and pass tx.init(params) or "
            "the state of the last step."
        )
    pairs = list(zip(matches[0], optimizer.by_row))
    by_row = [k for k, has_rows in pairs if has_rows]
    return weights + by_row, [k for k, has_rows in pairs if not has_rows]


def _nodes(cache: Any, tree: Any) -> list[Any]:
    """Returns the contents of the nodes of a cache in a tree."""
    is_own = lambda x: isinstance(x, CachedRows) and x.cache is cache
    return [x.array for x in jax.tree.leaves(tree, is_leaf=is_own) if is_own(x)]


def _matches(
    tree: Any, structure: Any, by_row: Sequence[bool], nodes: set[int]
) -> list[list[int]]:
    """Finds the table's state in the smallest trees that have it all.

    Args:
      tree: of the positions of its leaves.
      structure: of the table's state.
      by_row: for each of its leaves, True for a leaf with rows.
      nodes: the positions of nodes of the cache.
    """
    children = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
    nested = []
    for child in children:
        if child is not tree:
            nested += _matches(child, structure, by_row, nodes)
    if nested:
        return nested
    try:
        parts = structure.flatten_up_to(tree)
    except (ValueError, TypeError):
        return []
    places = []
    for part, has_rows in zip(parts, by_row):
        of_cache = nodes & {*jax.tree.leaves(part)}
        if len(of_cache) == 1:
            places.append(*of_cache)
        elif isinstance(part, int) and not has_rows:
            places.append(part)
        else:
            return []
    return [places]
