"""Where the state of a table lies: over the devices that the table lies over.

`tx.init` makes most state with `zeros_like`, which follows the weights. What it makes
of a shape alone (a number a row, a count) lies on one device, and a jitted step would
find it elsewhere from the second call on: compile again, and copy what was donated.
Inside of `jit` nothing follows anything: the weights' values are not used, and all of
the state would come out on one device. There it is told where to lie.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sparsejax import _arguments
from sparsejax.optim._lazy import follow


@functools.singledispatch
def layout_of(node: Any) -> NamedSharding | None:
    """How the rows of a table lie, where it is known that they are spread.

    Open to tables that are nodes of a tree: such a type registers its own way.
    """
    if _arguments.is_concrete(node) and isinstance(node, jax.Array):
        sharding = node.sharding
        if isinstance(sharding, NamedSharding) and any(sharding.spec[:1]):
            return sharding
    return None


def is_table(node: Any) -> bool:
    """Whether this is a table of a type of its own, whose rows are spread."""
    return layout_of.dispatch(type(node)) is not layout_of.dispatch(object)


def tables_in(tree: Any) -> list[Any]:
    """The tables of a type of their own in a tree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_table) if is_table(x)]


def check_none_spread(call: str, params: Any) -> None:
    """A TypeError where a table is spread over devices, for what cannot take it."""
    for table in tables_in(params):
        raise TypeError(
            f"{call}: a table among the parameters is a {type(table).__name__}, whose "
            "rows are spread over devices. Only sparsejax.optim.lazy and what is made "
            "with it takes them; or shard the table by columns, "
            "sparsejax.parallel.shard_columns. To sum gradients over batches, add them "
            "by hand: g1 + g2 of two ShardedTables."
        )


def check_beside(call: str, grads: Any, params: Any, state: Any) -> None:
    """Errors for gradients or a state that are not those of the tables of `params`."""
    is_leaf = lambda x: is_table(x) or follow.is_leaf(x)
    tables = tables_in(grads if params is None else params)
    if params is not None and tables:
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_leaf)
        try:
            found = treedef.flatten_up_to(grads)
        except ValueError:
            found = leaves  # trees of other structure: `lazy` says so
        for table, grad in zip(leaves, found):
            if not is_table(table) or follow.is_leaf(grad):
                continue
            if not is_table(grad) or _frame(grad) != _frame(table):
                kind = type(table).__name__
                if is_table(grad):
                    what = repr(grad)
                else:
                    what = f"an object of type {type(grad).__name__}"
                raise TypeError(
                    f"{call}: the gradient of a {kind} is a {kind}, got {what} for "
                    f"{table}. Take it with sparsejax.value_and_grad of a loss that "
                    "reads the table with sparsejax.parallel.lookup or embedding_bag."
                )
    frames = set(map(_frame, tables))
    for table in tables_in(state):
        if _frame(table) not in frames:
            raise ValueError(
                f"{call}: the state holds {table}, and no table among the parameters "
                f"is of that height and layout on that mesh: {tables}. Hand in the "
                "state of these tables, that tx.init(params) or the last update gave."
            )


def _frame(table: Any) -> Any:
    """What is static about a table: its height, and how it lies."""
    return jax.tree.structure(table.map(lambda _: 0))


def spread_tables(params: Any) -> dict[int, NamedSharding]:
    """The leaves whose rows are known to be spread over devices, and how."""
    is_leaf = lambda x: is_table(x) or follow.is_leaf(x)
    found, i = {}, 0
    for node in jax.tree.leaves(params, is_leaf=is_leaf):
        sharding = layout_of(node)
        if sharding is not None:
            found[i] = sharding
        i += len(jax.tree.leaves(node, is_leaf=follow.is_leaf))
    return found


def init_beside(init: Callable, params: Any) -> Any:
    """`init(params)`, its state lying where the tables among `params` lie."""
    tables = spread_tables(params)
    if not tables:
        return init(params)
    leaves, treedef = jax.tree.flatten(params, is_leaf=follow.is_leaf)
    specs = tuple(map(follow.spec, leaves))
    owners = follow.follow(init, treedef, specs, tuple(tables)).owners
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
        if not isinstance(leaf, jax.Array):
            continue
        known = _arguments.is_concrete(leaf)
        if owner in tables:
            want = _sharding(tables[owner].mesh, leaf, tables[owner].spec[0])
        elif len(leaf.sharding.device_set) == 1 if known else not leaf.ndim:
            want = _sharding(mesh, leaf)
        elif not known and all(kind == AxisType.Explicit for kind in mesh.axis_types):
            # Types know how dense leaves lie; written so that a step finds it again.
            spec = jax.typeof(leaf).sharding.spec
            want = _sharding(mesh, leaf, *spec[: leaf.ndim])
        else:
            continue
        if not known:
            leaves[k] = _told(leaf, want)
        elif not leaf.sharding.is_equivalent_to(want, leaf.ndim):
            leaves[k] = jax.device_put(leaf, want)
    return treedef.unflatten(leaves)


def _told(leaf: jax.Array, want: NamedSharding) -> jax.Array:
    """A traced leaf laid out so, whichever type the mesh's axes have."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        return leaf  # a device's part already
    if AxisType.Explicit not in want.mesh.axis_types:
        return jax.lax.with_sharding_constraint(leaf, want)
    # `jit` drops the weights, which `init` does not use, and with them the devices.
    # Types name a mesh without devices; a `shard_map` says which they are.
    same = jax.shard_map(
        lambda x: x, mesh=want.mesh, in_specs=want.spec, out_specs=want.spec
    )
    return same(jax.reshard(leaf, want))


def _sharding(mesh: Any, leaf: jax.Array, *parts: Any) -> NamedSharding:
    """With a part for each axis, as types over explicit axes are written."""
    rest = (None,) * (leaf.ndim - len(parts))
    return NamedSharding(mesh, PartitionSpec(*parts, *rest))
