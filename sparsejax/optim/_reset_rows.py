"""reset_rows: fresh weights and fresh optimizer state for rows with new keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._arguments import Initializer, KeyLike, PyTree
from sparsejax._rows import (
    indexing,
    is_selected_rows,
    with_slots,
)
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._exact import catch_up
from sparsejax.optim._exact.exact import ExactState
from sparsejax.optim._lazy import state_leaves, state_sharding
from sparsejax.optim._optimizers.missed_steps import WeightDecayState
from sparsejax.optim._wrappers.accumulate import (
    AccumulateState,
    find_slots,
    held_gradients,
    with_held_gradients,
)
from sparsejax.optim._wrappers.track_changes import TrackChangesState


def reset_rows(
    tx: Any,
    state: PyTree,
    params: PyTree,
    rows: PyTree,
    *,
    embedding_init: Initializer | None = None,
    key: KeyLike | None = None,
) -> tuple[Any, Any]:
    """Gives rows of tables fresh weights and fresh optimizer state.

    For rows that belong to something else from now on, such as those that
    `sparsejax.HashIndex.insert` evicts. Afterwards a row is as if its table had just
    been initialized, in the weights and in all state that follows the table; for
    `track_changes` it has changed. Counts and all other rows stay as they are, bit for
    bit.

    Args:
      tx: the transformation that `state` belongs to: any of optax, bare or lifted by
        `lazy`, or of `sparsejax.optim`.
      state: its state.
      params: all parameters that it trains.
      rows: a tree like `params`, with integers of any shape at tables, None or nothing
        at other leaves: `{"items": evicted}`. Ids out of range are ignored.
      embedding_init: `(key, shape, dtype) -> array`, called with shape `[n, ...]` for n
        rows of a table; by default the new weights are zeros.
      key: one PRNG key, or an int as its seed, for `embedding_init`; another one at
        each call.

    Returns:
      The new `(params, state)`.

    Raises:
      TypeError: `rows` has no integers, `tx` is not a transformation, or
        `embedding_init` has no key.
      ValueError: `rows` does not match `params`, or `state` does not; or part of the
        state cannot be split into rows.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> tx = sj.optim.lazy(optax.sgd(1.0, momentum=0.9))
      >>> params = {"items": jnp.ones((4, 1)), "bias": jnp.ones(1)}
      >>> grads = {"items": -jnp.ones((4, 1)), "bias": jnp.zeros(1)}
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> evicted = jnp.array([2, 4])  # 4 is out of range
      >>> params, state = sj.optim.reset_rows(tx, state, params, {"items": evicted})
      >>> params["items"][:, 0]
      Array([2., 2., 0., 2.], dtype=float32)
      >>> optax.tree_utils.tree_get(state, "trace")["items"][:, 0]
      Array([-1., -1.,  0., -1.], dtype=float32)

    References:
      TorchRec, `reset_inplace` of managed collision modules.
    """
    checks.check_transformation(tx, "lazy(optax.adam(1e-3))")
    state_sharding.check_not_sharded(params)
    given = params, state
    params, state, rows = map(trees.without_variables, (params, state, rows))
    leaves, treedef = trees.flatten(params)
    by_leaf = trees.ids_by_leaf("rows", params, rows)
    ids = {i: _ids(params, leaves[i], i, x) for i, x in by_leaf.items()}
    ids = {i: x for i, x in ids.items() if x.size}
    if not ids:
        return given

    fresh = {}
    for i, x in ids.items():
        shape, dtype = (x.size, *leaves[i].shape[1:]), leaves[i].dtype
        fresh[i] = _fresh(i, shape, dtype, embedding_init, key)
    specs = tuple(map(trees.to_spec, leaves))
    init = lambda params: _map_accumulators(_without_buffers, tx.init(params))
    follows = state_leaves.find(init, treedef, specs, tuple(ids))
    for i, (why, _) in follows.blocked.items():
        raise ValueError(
            f"rows of {trees.leaf_paths(params, 'params')[i]} cannot be reset, "
            f"because {why}. Use another optimizer for this table, through "
            "optax.partition."
        )
    bare = _map_accumulators(_without_buffers, state)
    heights = {i: leaves[i].shape[:1] for i in ids}
    checks.check_state_rows(bare, follows.owners, heights)
    # Tables of the new rows alone. The others' state from this `init` is not used.
    new = init(treedef.unflatten(fresh.get(i, x) for i, x in enumerate(leaves)))
    nodes, state_treedef = jax.tree.flatten(bare)
    if jax.tree.structure(new) != state_treedef:
        raise ValueError(
            "the structure of the state depends on the number of rows. In "
            "place of a function that decides by shape, pass the tree that it returns: "
            "mask=mask_fn(params)."
        )
    new = jax.tree.leaves(_at_this_step(new, bare))
    for k, owner in enumerate(follows.owners):
        if owner is not None:
            nodes[k] = _write(nodes[k], ids[owner], new[k])

    def with_buffers(_, node):
        buffers = held_gradients(node, leaves, treedef)
        for i, x in ids.items():
            if not trees.is_none_or_masked(buffers[i]):
                buffers[i] = _zeroed(buffers[i], x)
        return with_held_gradients(node, buffers, treedef)

    bare = state_treedef.unflatten(nodes)
    state = _map_accumulators(with_buffers, bare, state)
    for i, x in ids.items():
        leaves[i] = _write(leaves[i], x, fresh[i])
    return trees.in_structure_of(given, (treedef.unflatten(leaves), state))


# ------------------------------------------------------------------ private


def _ids(params: Any, table: Any, i: int, rows: Any) -> jax.Array:
    if not _arguments.is_array(table) or table.ndim == 0:
        raise ValueError(
            f"{trees.leaf_paths(params, 'params')[i]} must be a table, an "
            f"array with rows along its first axis, got {_arguments.kind_of(table)}."
        )
    return _arguments.as_ids(rows, table.shape[0], "rows").reshape(-1)


def _fresh(i: int, shape: Any, dtype: Any, embedding_init: Any, key: Any) -> jax.Array:
    if embedding_init is None:
        return jnp.zeros(shape, dtype)
    key = _arguments.as_key(key, from_int=True)
    made = jnp.asarray(embedding_init(jax.random.fold_in(key, i), shape, dtype))
    if made.shape != shape:
        raise ValueError(
            f"embedding_init must return an array of shape {shape}, got "
            f"{_arguments.kind_of(made)}."
        )
    return made


def _write(table: Any, ids: jax.Array, values: jax.Array) -> jax.Array:
    table = jnp.asarray(table)
    return indexing.set_rows(table, ids, values.astype(table.dtype))


def _map_accumulators(change: Callable, state: Any, *others: Any) -> Any:
    """Returns `change(*nodes)` in place of each state of `accumulate` in `state`.

    The states inside of it are those of `state`, changed in the same way.
    """
    is_ours = lambda x: isinstance(x, AccumulateState)

    def visit(*nodes):
        if not is_ours(nodes[0]):
            return nodes[0]
        inner = _map_accumulators(change, *(node.inner_opt_state for node in nodes))
        return change(*nodes)._replace(inner_opt_state=inner)

    return jax.tree.map(visit, state, *others, is_leaf=is_ours)


def _without_buffers(node: AccumulateState) -> AccumulateState:
    """Its size is not the tables', so no rule of shapes holds."""
    return node._replace(acc_grads=(), acc_rows=())


def _at_this_step(new: Any, state: Any) -> Any:
    """Returns `new`, the state of `tx.init`, for rows that missed no step up to now."""

    def date(node, now):
        if isinstance(node, WeightDecayState):
            dated = lambda x: jnp.broadcast_to(now.log_decay, x.shape)
            return node._replace(decayed=jax.tree.map(dated, node.decayed))
        if isinstance(node, ExactState):
            records = (
                catch_up.records_at(now.step, x.shape[0], then)
                for x, then in zip(node.last_updates, now.now)
            )
            return node._replace(last_updates=tuple(records))
        if isinstance(node, TrackChangesState):
            inner = _at_this_step(node.inner_state, now.inner_state)
            return TrackChangesState(inner, jax.tree.map(jnp.ones_like, node.changed))
        return node

    kinds = WeightDecayState, ExactState, TrackChangesState
    return jax.tree.map(date, new, state, is_leaf=lambda x: isinstance(x, kinds))


def _zeroed(held: Any, ids: jax.Array) -> Any:
    """Sets these rows of a buffer to zero; they keep their slots."""
    if not is_selected_rows(held):
        return _write(held, ids, jnp.zeros((ids.size, *held.shape[1:])))
    slot, has_slot = find_slots(held, ids)
    slot = jnp.where(has_slot, slot, np.int32(held.capacity))
    zeros = jnp.zeros((ids.size, *held.values.shape[1:]), held.dtype)
    return with_slots(held, held.rows, indexing.set_rows(held.values, slot, zeros))
