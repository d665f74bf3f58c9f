"""Which leaves of an optimizer's state follow the rows of a table.

A leaf follows a table if its first axis *is* the table's: row r of the leaf belongs to
row r of the table. Adam's `mu` and `nu` do, its `count` does not, and a `[D]` vector
does not, even where D happens to equal the number of rows. So shapes alone do not tell;
but shapes that *change* do. `tx.init` is evaluated abstractly twice, the second time
with p_i rows added to table i, each p_i another number. A leaf of shape [V_i, ...] that
becomes [V_i + p_i, ...] follows table i; one that does not change follows none;
any other change means that the state cannot be cut into rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax


OTHER_STRUCTURE = "its state has another structure when the table has more rows"


class Following(NamedTuple):
    """For each leaf of the state its table (or None), and why a table has no such."""

    owners: tuple[int | None, ...]
    blocked: dict[int, str]
    state: Any  # the state itself, abstractly


def is_leaf(x: Any) -> bool:
    """What counts as one leaf of a gradient or parameter tree: holes do, too."""
    return x is None or isinstance(x, optax.MaskedNode)


def spec(x: Any) -> Any:
    """`x` as a ShapeDtypeStruct; holes stay what they are, other things are holes."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    if isinstance(x, (bool, int, float, complex)):
        return jax.ShapeDtypeStruct((), jax.dtypes.result_type(x))
    return x if is_leaf(x) else None


def follow(
    init: Callable, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
) -> Following:
    """Finds the state leaves that follow each table.

    Args:
      init: `tx.init`.
      treedef: structure of the parameters, holes (`is_leaf`) counting as leaves.
      specs: ShapeDtypeStructs (or holes) of its leaves.
      tables: which leaves are tables; their first axis is the rows.

    Returns:
      `Following`, owners in the order of `jax.tree.leaves(state)`.
    """
    more = _growth(tables)
    state = _state(init, treedef, specs)
    before, structure = jax.tree_util.tree_flatten_with_path(state)
    grown = _state(init, treedef, _grow(specs, more))
    after, grown_structure = jax.tree.flatten(grown)
    if structure != grown_structure:
        blocked = dict.fromkeys(tables, OTHER_STRUCTURE)
        return Following((None,) * len(before), blocked, state)

    owners, blocked = [], {}
    for (path, old), new in zip(before, after):
        owner = None
        if old.shape != new.shape:
            owner = next(
                (t for t in tables if _has_its_rows(old, new, specs[t], more[t])), None
            )
            if owner is None:
                for table in _blamed(old, new, more):
                    blocked[table] = (
                        "its state leaf "
                        f"{jax.tree_util.keystr(path) or '(all of it)'} of shape "
                        f"{list(old.shape)} becomes {list(new.shape)} when the "
                        f"table has {more[table]} more rows, so it does not have "
                        "one row for each row of the table"
                    )
        owners.append(owner)
    return Following(tuple(owners), blocked, state)


def depends_on_shapes(
    init: Callable, treedef: Any, specs: Sequence[Any], leaves: Sequence[int]
) -> list[bool]:
    """For each leaf of the state, whether its shape follows any of `leaves`."""
    grown = _state(init, treedef, _grow(specs, _growth(leaves)))
    before, structure = jax.tree.flatten(_state(init, treedef, specs))
    after, grown_structure = jax.tree.flatten(grown)
    if structure != grown_structure:
        return [False] * len(before)
    return [old.shape != new.shape for old, new in zip(before, after)]


def without_mesh() -> Any:
    """A context in which shapes are whole shapes, also inside of `shard_map`."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _state(init: Callable, treedef: Any, specs: Sequence[Any]) -> Any:
    with without_mesh():
        return jax.eval_shape(init, treedef.unflatten(specs))


def _growth(leaves: Sequence[int]) -> dict[int, int]:
    """Another number of extra rows for each leaf; odd, so that no two make a third."""
    return {leaf: 2 * k + 3 for k, leaf in enumerate(leaves)}


def _grow(specs: Sequence[Any], more: dict[int, int]) -> list[Any]:
    grown = list(specs)
    for i, extra in more.items():
        rows, *rest = specs[i].shape
        grown[i] = jax.ShapeDtypeStruct((rows + extra, *rest), specs[i].dtype)
    return grown


def _has_its_rows(old: Any, new: Any, table: Any, extra: int) -> bool:
    rows = table.shape[0]
    return (
        old.shape[:1] == (rows,)
        and new.shape[:1] == (rows + extra,)
        and old.shape[1:] == new.shape[1:]
    )


def _blamed(old: Any, new: Any, more: dict[int, int]) -> list[int]:
    """The tables whose extra rows explain the change, all of them if none does."""
    if len(old.shape) == len(new.shape):
        changes = {b - a for a, b in zip(old.shape, new.shape)}
        found = [table for table, extra in more.items() if extra in changes]
        if found:
            return found
    return list(more)
