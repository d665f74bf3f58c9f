"""Where the state of a table lies: over the devices that the table lies over.

`tx.init` makes most state with `zeros_like`, which follows the weights. What it makes
of a shape alone (a number a row, a count) lies on one device, and a jitted step would
find it elsewhere from the second call on: compile again, and copy what was donated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from sparsejax import _ids
from sparsejax.optim import _follow


def spread_tables(leaves: Sequence[Any]) -> dict[int, NamedSharding]:
    """The leaves whose rows are known to be spread over devices, and how."""
    found = {}
    for i, leaf in enumerate(leaves):
        if _ids.is_concrete(leaf) and isinstance(leaf, jax.Array):
            sharding = leaf.sharding
            if isinstance(sharding, NamedSharding) and any(sharding.spec[:1]):
                found[i] = sharding
    return found


def init_beside(init: Callable, params: Any) -> Any:
    """`init(params)`, its state lying where the tables among `params` lie."""
    leaves, treedef = jax.tree.flatten(params, is_leaf=_follow.is_leaf)
    tables = spread_tables(leaves)
    if not tables:
        return init(params)
    specs = tuple(map(_follow.spec, leaves))
    owners = _follow.follow(init, treedef, specs, tuple(tables)).owners
    return place(init(params), owners, tables)


def place(state: Any, owners: Sequence[int | None], tables: dict[int, Any]) -> Any:
    """`state` beside its tables.

    Args:
      state: as `tx.init` made it.
      owners: for each of its leaves the table that it follows, or None.
      tables: from `spread_tables`, not empty.
    """
    mesh = next(iter(tables.values())).mesh
    leaves, treedef = jax.tree.flatten(state)
    for k, (leaf, owner) in enumerate(zip(leaves, owners)):
        if not (_ids.is_concrete(leaf) and isinstance(leaf, jax.Array)):
            continue
        if owner in tables:
            want = _sharding(tables[owner].mesh, leaf, tables[owner].spec[0])
        elif len(leaf.sharding.device_set) == 1:
            want = _sharding(mesh, leaf)
        else:
            continue
        if not leaf.sharding.is_equivalent_to(want, leaf.ndim):
            leaves[k] = jax.device_put(leaf, want)
    return treedef.unflatten(leaves)


def _sharding(mesh: Any, leaf: jax.Array, *parts: Any) -> NamedSharding:
    """With a part for each axis, as types over explicit axes are written."""
    rest = (None,) * (leaf.ndim - len(parts))
    return NamedSharding(mesh, PartitionSpec(*parts, *rest))
