"""Finds the leaves of an optimizer's state that follow the rows of a table.

A state leaf follows a table if row r of the leaf belongs to row r of the table. Adam's
`mu` and `nu` do, its `count` does not, and neither does a vector of shape `[D]`, even
if D equals the number of rows. So the shape alone is ambiguous, but how it changes is
not. `tx.init` is evaluated abstractly twice, the second time with p_i more rows in
table i, with a different p_i for each table. A state leaf of shape `[V_i, ...]` that
becomes `[V_i + p_i, ...]` follows table i. A leaf that does not change follows no
table. Any other change means that the state cannot be split into rows. A stack of
tables `[K, V, ...]` grows along both of its axes of rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from sparsejax.optim import _trees as trees


class StateLeaves(NamedTuple):
    """The leaves of an optimizer's state, in the order of `jax.tree.leaves(state)`.

    Attributes:
      owners: for each leaf, the table (index of a parameter leaf) that it follows, or
        None.
      blocked: for each table, why the state cannot be split into its rows, and the
        leaf that shows it, None if its structure does.
      state: the state as ShapeDtypeStructs.
    """

    owners: tuple[int | None, ...]
    blocked: dict[int, tuple[str, int | None]]
    state: Any


def find(
    init: Callable, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
) -> StateLeaves:
    """Finds the state leaves that follow each table.

    Args:
      init: `tx.init`.
      treedef: structure of the parameters, see `trees.flatten`.
      specs: its leaves, see `trees.to_spec`.
      tables: which leaves are tables, with rows along the first axis, or along the
        first two for a `trees.StackSpec`.
    """
    more = _more_rows(tables)
    blocked: dict[int, tuple[str, int | None]] = {}
    state = _state(init, treedef, specs)
    before, structure = jax.tree_util.tree_flatten_with_path(state)
    grown = _state(init, treedef, _grow(specs, more))
    after, grown_structure = jax.tree.flatten(grown)
    if structure != grown_structure:
        why = "the structure of its state depends on the number of rows"
        blocked |= {table: (why, None) for table in tables}
        return StateLeaves((None,) * len(before), blocked, state)

    owners = []
    table_of = {extra: table for table, extra in more.items()}
    for k, ((path, old), new) in enumerate(zip(before, after)):
        owner = None
        if old.shape != new.shape:
            extra = new.shape[0] - old.shape[0] if old.shape and new.shape else 0
            owner = table_of.get(extra)
            if owner is not None and not _follows(old, new, specs[owner], extra):
                owner = None
            if owner is None:
                for table in _tables_to_blame(old, new, more):
                    why = (
                        "its state leaf "
                        f"{jax.tree_util.keystr(path) or '(all of it)'} of shape "
                        f"{list(old.shape)} becomes {list(new.shape)} when the "
                        f"table has {more[table]} more rows, so it does not have "
                        "one row per row of the table"
                    )
                    blocked[table] = why, k
        owners.append(owner)
    return StateLeaves(tuple(owners), blocked, state)


def depends_on_shapes(
    init: Callable, treedef: Any, specs: Sequence[Any], leaves: Sequence[int]
) -> list[bool]:
    """For each state leaf, True if its shape depends on a shape of `leaves`."""
    grown = _state(init, treedef, _grow(specs, _more_rows(leaves)))
    before, structure = jax.tree.flatten(_state(init, treedef, specs))
    after, grown_structure = jax.tree.flatten(grown)
    if structure != grown_structure:
        return [False] * len(before)
    return [old.shape != new.shape for old, new in zip(before, after)]


def without_mesh() -> Any:
    """A context in which shapes are global shapes, even inside `shard_map`."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _state(init: Callable, treedef: Any, specs: Sequence[Any]) -> Any:
    with without_mesh():
        return jax.eval_shape(init, treedef.unflatten(map(trees.plain, specs)))


def _more_rows(leaves: Sequence[int]) -> dict[int, int]:
    """The number of rows to add to each leaf: odd, so no two add up to a third."""
    return {leaf: 2 * k + 3 for k, leaf in enumerate(leaves)}


def _grow(specs: Sequence[Any], more: dict[int, int]) -> list[Any]:
    grown = list(specs)
    for i, extra in more.items():
        shape, count = specs[i].shape, trees.row_axes(specs[i])
        rows = (size + extra for size in shape[:count])
        grown[i] = trees.reshaped(specs[i], (*rows, *shape[count:]))
    return grown


def _follows(old: Any, new: Any, table: Any, extra: int) -> bool:
    count = trees.row_axes(table)
    rows = table.shape[:count]
    return (
        old.shape[:count] == rows
        and new.shape[:count] == tuple(size + extra for size in rows)
        and old.shape[count:] == new.shape[count:]
    )


def _tables_to_blame(old: Any, new: Any, more: dict[int, int]) -> list[int]:
    """The tables whose extra rows explain the change; all of them if none does."""
    if len(old.shape) == len(new.shape):
        changes = {b - a for a, b in zip(old.shape, new.shape)}
        found = [table for table, extra in more.items() if extra in changes]
        if found:
            return found
    return list(more)
