"""track_changes: which rows of the tables on the device changed since they were taken.

The state has a boolean for each row of a table, which a step sets for the rows of its
update: a scatter of n booleans for n rows, in place if the state is donated. The rows
of a ShardedTable are marked by their owners, to which the update was sent anyway, so
the booleans of a table are the booleans of all devices together.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax._rows import SelectedRows, indexing, is_quantized, is_selected_rows
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._lazy import separability, state_sharding


class TrackChangesState(NamedTuple):
    """State of `track_changes`.

    Attributes:
      inner_state: state of `tx`.
      changed: a tree like the parameters, with booleans `[V]` for a table of V rows (in
        order of position for a ShardedTable), and None for other leaves.
    """

    inner_state: Any
    changed: Any


separability.NOT_LIFTED[TrackChangesState] = (
    "sparsejax.optim.track_changes",
    "it goes around lazy, not inside of it: sparsejax.optim.track_changes(lazy(tx))",
)


def track_changes(
    tx: optax.GradientTransformation, *, tables: bool | PyTree = None
) -> optax.GradientTransformationExtraArgs:
    """Keeps which rows of each table were updated, for `take_changes`.

    For a table with booleans C and an update U of `tx`,

      C[r] := C[r] or (row r is in U)

    A row is in a SelectedRows if it has a slot, and in an array if it is not zero. A
    step costs what it touches. The updates and the state of `tx` do not change.

    Put it around everything else, so that it sees the updates that are applied. For a
    `ShardedTable`, each device keeps the booleans of the rows that it owns.

    Args:
      tx: any transformation but `exact(...)`; `lazy(...)` for tables.
      tables: a tree of bools, or a bool, that is a prefix of the parameters: True for
        the leaves to track, except scalars, which have no rows. By default the tables
        are the arrays of floats of rank 2 or more, the sharded tables and the quantized
        ones.

    Returns:
      `optax.GradientTransformationExtraArgs` with a `TrackChangesState`. Under
      `jax.jit`, donate it with the parameters.

    Raises:
      TypeError: `tx` is not a transformation.
      ValueError: `tables` is not a prefix of the parameters; at update, a leaf that is
        not tracked has a SelectedRows, or the SelectedRows is of a stack of tables.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> tx = sj.optim.track_changes(sj.optim.lazy(optax.sgd(0.1)))
      >>> params = {"items": jnp.ones((1000, 2)), "bias": jnp.zeros(2)}
      >>> state = tx.init(params)
      >>> for row in (70, 3, 70):
      ...     rows = sj.SelectedRows(jnp.array([row]), jnp.ones((1, 2)), height=1000)
      ...     grads = {"items": rows, "bias": jnp.ones(2)}
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> ids, state = sj.optim.take_changes(params, state)
      >>> ids
      {'bias': None, 'items': array([ 3, 70], dtype=int32)}

    References:
      TorchRec, `ModelDeltaTracker`.
    """
    checks.check_transformation(tx, "lazy(optax.adam(1e-3))")
    inner = optax.with_extra_args_support(tx)

    def init(params):
        wanted = _wanted(params, tables)

        def marks(params):
            leaves, treedef = trees.flatten(params)
            zeros = lambda x: jnp.zeros(x.shape[:1], bool)
            flags = (zeros(x) if w else None for x, w in zip(leaves, wanted))
            return treedef.unflatten(flags)

        return TrackChangesState(tx.init(params), state_sharding.init(marks, params))

    def update(updates, state, params=None, **extra_args):
        checks.check_state(state, TrackChangesState)
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        leaves, treedef = trees.flatten(updates)
        flags = treedef.flatten_up_to(state.changed)
        for i, (update, flag) in enumerate(zip(leaves, flags)):
            if flag is not None:
                flags[i] = _mark(jnp.asarray(flag), update)
            elif is_selected_rows(update):
                where = trees.leaf_paths(updates, "updates")[i]
                raise ValueError(
                    f"{where} is a SelectedRows, but its parameter is not "
                    "tracked. Pass tables=, a tree of bools with True for it."
                )
        return updates, TrackChangesState(inner_state, treedef.unflatten(flags))

    return trees.transformation(init, update)


def take_changes(params: PyTree, state: PyTree) -> tuple[Any, Any]:
    """Returns the ids of rows changed since the last call, and a cleared state.

    Call it outside of jit. With several processes, all of them call it, and each gets
    all ids.

    Args:
      params: the parameters.
      state: the state of `track_changes`, perhaps inside of another state.

    Returns:
      `(ids, state)`: a tree like `params`, with ascending integers `[n]` for a table,
      and None for a leaf that is not tracked; and the state in which no row is marked.

    Raises:
      TypeError: it is called inside of jit.
      ValueError: `state` has no state of `track_changes`, or several, or one of other
        parameters.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> tx = sj.optim.track_changes(sj.optim.lazy(optax.sgd(0.1)))
      >>> table = jnp.ones((1000, 2))
      >>> rows = sj.SelectedRows(jnp.array([7, 2]), jnp.ones((2, 2)), height=1000)
      >>> updates, state = tx.update(rows, tx.init(table), table)
      >>> table = optax.apply_updates(table, updates)
      >>> ids, state = sj.optim.take_changes(table, state)
      >>> ids, table[ids][:, 0]
      (array([2, 7], dtype=int32), Array([0.9, 0.9], dtype=float32))
      >>> sj.optim.take_changes(table, state)[0]
      array([], dtype=int32)

    References:
      TorchRec, `ModelDeltaTracker.get_unique_ids`.
    """
    is_ours = lambda x: isinstance(x, TrackChangesState)
    nodes, of_state = jax.tree.flatten(state, is_leaf=is_ours)
    places = [k for k, node in enumerate(nodes) if is_ours(node)]
    if len(places) != 1:
        raise ValueError(
            f"state must have one state of sparsejax.optim.track_changes, got "
            f"{len(places)}. Make the optimizer as track_changes(lazy(tx))."
        )
    ours = nodes[places[0]]
    if not all(map(_arguments.is_concrete, jax.tree.leaves(ours.changed))):
        raise TypeError(
            "the number of ids depends on values, so it cannot be traced by "
            "jit, vmap, grad or scan. Call it between steps."
        )
    is_leaf = lambda x: trees.is_leaf(x) or state_sharding.is_sharded_table(x)
    treedef = jax.tree.structure(params, is_leaf=is_leaf)
    flags = treedef.flatten_up_to(ours.changed)
    ids = [_ids(flag) for flag in flags]
    # New arrays, which a step may donate; sharded as the old ones.
    clear = lambda x: jnp.zeros_like(x, device=getattr(x, "sharding", None))
    cleared = jax.tree.map(clear, ours.changed)
    nodes[places[0]] = ours._replace(changed=cleared)
    return treedef.unflatten(ids), of_state.unflatten(nodes)


# ------------------------------------------------------------------ private


def _wanted(params: Any, tables: Any) -> list[bool]:
    """Returns, for each leaf, True if it is tracked."""
    leaves, _ = trees.flatten(params)
    if tables is None:
        is_table = lambda x: is_quantized(x) or _arguments.is_float_array(x, 2)
        return [is_table(leaf) for leaf in leaves]
    flags = _arguments.flag_leaves("tables", tables, params, trees.is_leaf)
    return [bool(flag) and np.ndim(leaf) > 0 for leaf, flag in zip(leaves, flags)]


def _mark(flags: jax.Array, update: Any) -> jax.Array:
    """Sets the booleans of the rows in an update to True."""
    if trees.is_none_or_masked(update):
        return flags
    if is_quantized(update):  # of codes and of scales, with the same rows
        update = jax.tree.leaves(update, is_leaf=is_selected_rows)[0]
    if not is_selected_rows(update):
        update = jnp.asarray(update)
        return flags | jnp.any(update != 0, axis=tuple(range(1, update.ndim)))
    if update.stack:
        raise ValueError(
            f"an update is of a stack of tables, of shape {update.shape}, "
            "whose rows cannot be tracked. Keep the parameter as one table [K * V, "
            "...], and reshape it inside the loss: table.reshape(K, V, ...)."
        )
    return mark_rows(update, flags)


@functools.singledispatch
def mark_rows(update: SelectedRows, flags: jax.Array) -> jax.Array:
    """Sets the booleans `[V]` of the rows of an update to True.

    A subclass of SelectedRows, like the one of a sharded table, registers its own.
    """
    if not update.height:
        return flags
    rows = update.safe_rows()
    return indexing.add_rows(flags, rows, jnp.ones(rows.shape, bool))


def _ids(flags: Any) -> Any:
    """Returns the rows that are marked, as ids of the table; None without marks."""
    if flags is None:
        return None
    if state_sharding.is_sharded_table(flags):
        positions = np.flatnonzero(_on_host(flags.values))
        ids = np.asarray(flags.ids_at(positions))
        return np.sort(ids[ids < flags.height])
    marked = np.flatnonzero(_on_host(flags))
    return marked.astype(_arguments.index_dtype(flags.shape[0]))


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)
