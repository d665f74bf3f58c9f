"""Shards optimizer state like the tables that it belongs to.

`tx.init` makes most state with `zeros_like`, which keeps the sharding of the weights.
State made from a shape alone (one number per row, a count) is on a single device. A
jitted step would return it with another sharding, so the second call would recompile
and copy the donated buffers. Under `jit` nothing keeps the sharding: `init` does not
use the values of the weights, and all state would be on one device. There the sharding
is requested explicitly.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sparsejax import _arguments
from sparsejax._rows import RowTable, SelectedRows, is_selected_rows
from sparsejax.optim import _trees as trees
from sparsejax.optim._lazy import state_leaves


# ------------------------------------------------------------------ sharded tables


@functools.singledispatch
def rows_sharding(node: Any) -> NamedSharding | None:
    """Returns the sharding of a table if its rows are known to be sharded, else None.

    A table type that is a pytree node registers its own implementation.
    """
    if _arguments.is_concrete(node) and isinstance(node, jax.Array):
        sharding = node.sharding
        if isinstance(sharding, NamedSharding) and any(sharding.spec[:1]):
            return sharding
    return None


def is_sharded_table(node: Any) -> bool:
    """Returns True if `node` is a ShardedTable."""
    return isinstance(node, RowTable)


def _is_leaf(node: Any) -> bool:
    return is_sharded_table(node) or trees.is_none_or_masked(node)


def _sharded_tables(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=is_sharded_table)
    return [x for x in leaves if is_sharded_table(x)]


def check_not_sharded(tree: Any) -> None:
    """Raises a TypeError for sharded tables and gradients of sharded tables."""
    special = lambda x: is_selected_rows(x) and type(x) is not SelectedRows
    is_leaf = lambda x: is_sharded_table(x) or special(x)
    for leaf in filter(is_leaf, jax.tree.leaves(tree, is_leaf=is_leaf)):
        raise TypeError(
            f"A {type(leaf).__name__}, whose rows are sharded over devices, is "
            "accepted only by sparsejax.optim.lazy and optimizers built on it. Shard "
            "the table by columns (sparsejax.parallel.shard_columns); or, to sum "
            "gradients over batches, add the ShardedTables: g1 + g2."
        )


def check_sharded(grads: Any, params: Any, state: Any) -> None:
    """Raises unless gradients and state match the sharded tables of `params`."""
    tables = _sharded_tables(grads if params is None else params)
    if params is not None and tables:
        leaves, treedef = jax.tree.flatten(params, is_leaf=_is_leaf)
        try:
            parts = treedef.flatten_up_to(grads)
        except ValueError:
            parts = leaves  # another structure, which `trees.flatten_params` reports
        for table, grad in zip(leaves, parts):
            if not is_sharded_table(table) or trees.is_none_or_masked(grad):
                continue
            if not is_sharded_table(grad) or _static(grad) != _static(table):
                kind, shown = type(table).__name__, _arguments.kind_of(grad)
                if is_sharded_table(grad):
                    shown = repr(grad)
                raise TypeError(
                    f"The gradient of a {kind} must be a {kind} of the same "
                    f"height, layout and mesh, got {shown} for {table}. Use "
                    "sparsejax.value_and_grad, with a loss that reads the table "
                    "through sparsejax.lookup or embedding_bag."
                )
    expected = set(map(_static, tables))
    for table in _sharded_tables(state):
        if _static(table) not in expected:
            raise ValueError(
                f"The state is for {table}, but no table in the parameters has "
                f"this height, layout and mesh: {tables}. Pass the state that "
                "tx.init(params) or the last update returned for these tables."
            )


def _static(table: Any) -> Any:
    """Returns the static part of a table: its height, layout and mesh."""
    return jax.tree.structure(table.map(lambda _: 0))


# ------------------------------------------------------------------ init


def init(tx_init: Callable, params: Any) -> Any:
    """Computes `tx_init(params)`, sharded like the tables in `params`."""
    tables, i = {}, 0  # by leaf index
    for node in jax.tree.leaves(params, is_leaf=_is_leaf):
        sharding = rows_sharding(node)
        if sharding is not None:
            tables[i] = sharding
        i += len(jax.tree.leaves(node, is_leaf=trees.is_none_or_masked))
    if not tables:
        return tx_init(params)

    leaves, treedef = jax.tree.flatten(params, is_leaf=trees.is_none_or_masked)
    specs = tuple(map(trees.to_spec, leaves))
    owners = state_leaves.find(tx_init, treedef, specs, tuple(tables)).owners
    mesh = next(iter(tables.values())).mesh
    leaves, treedef = jax.tree.flatten(tx_init(params))
    for k, (leaf, owner) in enumerate(zip(leaves, owners)):
        if not isinstance(leaf, jax.Array):
            continue
        fixed = _arguments.is_concrete(leaf)
        if owner is not None:
            leaf_sharding = _sharding(tables[owner].mesh, leaf, tables[owner].spec[0])
        elif len(leaf.sharding.device_set) == 1 if fixed else not leaf.ndim:
            leaf_sharding = _sharding(mesh, leaf)
        elif not fixed and all(kind == AxisType.Explicit for kind in mesh.axis_types):
            # The type of the leaf includes its sharding. Write it in full, so that the
            # state a step returns has the same type.
            spec = jax.typeof(leaf).sharding.spec
            leaf_sharding = _sharding(mesh, leaf, *spec[: leaf.ndim])
        else:
            continue
        if not fixed:
            leaves[k] = _constrain(leaf, leaf_sharding)
        elif not leaf.sharding.is_equivalent_to(leaf_sharding, leaf.ndim):
            leaves[k] = jax.device_put(leaf, leaf_sharding)
    return treedef.unflatten(leaves)


def _constrain(leaf: jax.Array, want: NamedSharding) -> jax.Array:
    """Gives a traced leaf this sharding, for any type of mesh axes."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        return leaf  # already the shard of one device
    if AxisType.Explicit not in want.mesh.axis_types:
        return jax.lax.with_sharding_constraint(leaf, want)
    # `jit` drops the weights, which `init` does not use, and with them the devices. The
    # mesh of a type has no devices; a `shard_map` supplies them.
    same = jax.shard_map(
        lambda x: x, mesh=want.mesh, in_specs=want.spec, out_specs=want.spec
    )
    return same(jax.sharding.reshard(leaf, want))


def _sharding(mesh: Any, leaf: jax.Array, *parts: Any) -> NamedSharding:
    """Makes a sharding with one entry per axis, as in the types of explicit axes."""
    unsharded = (None,) * (leaf.ndim - len(parts))
    return NamedSharding(mesh, PartitionSpec(*parts, *unsharded))
