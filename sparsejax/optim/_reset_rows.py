"""reset_rows: rows of a table whose keys are new, with nothing left of the old ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._arguments import Initializer, KeyLike, PyTree
from sparsejax._rows import (
    indexing,
    is_selected_rows,
    merge,
    with_slots,
)
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._exact import catch_up
from sparsejax.optim._exact.exact import ExactState
from sparsejax.optim._lazy import state_leaves, state_sharding
from sparsejax.optim._optimizers.weight_decay import WeightDecayState
from sparsejax.optim._wrappers.accumulate import (
    AccumulateState,
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
      TypeError: `rows` has no integers, or `tx` is not a transformation.
      ValueError: `rows` does not match `params`, or `state` does not; part of the state
        cannot be split into rows; or `embedding_init` has no key.

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
    # Tables of the new rows alone. The others' state from this `init` is not used.
    small = [fresh.get(i, leaf) for i, leaf in enumerate(leaves)]
    specs = tuple(map(trees.to_spec, leaves))
    init = lambda params: _map_accumulators(_without_buffers, tx.init(params))
    follows = state_leaves.find(init, treedef, specs, tuple(ids))
    for i, (why, _) in follows.blocked.items():
        raise ValueError(
            f"rows of {trees.leaf_paths(params, 'params')[i]} cannot be reset, "
            f"because {why}. Use another optimizer for this table, through "
            "optax.partition."
        )
    heights = {i: leaves[i].shape[:1] for i in ids}
    zeroed_sums = []

    def take(node):
        buffers = held_gradients(node, leaves, treedef)
        for i, x in ids.items():
            if not trees.is_none_or_masked(buffers[i]):
                buffers[i] = _zeroed(buffers[i], x)
        zeroed = with_held_gradients(node, buffers, treedef)
        zeroed_sums.append((zeroed.acc_grads, zeroed.acc_rows))
        return _without_buffers(node)

    state = _map_accumulators(take, state)
    checks.check_state_rows(state, follows.owners, heights)
    new = init(treedef.unflatten(small))
    if jax.tree.structure(new) != jax.tree.structure(state):
        raise ValueError(
            "the structure of the state depends on the number of rows. In "
            "place of a function that decides by shape, pass the tree that it returns: "
            "mask=mask_fn(params)."
        )
    new = _at_this_step(new, state)
    nodes, state_treedef = jax.tree.flatten(state)
    for k, (owner, value) in enumerate(zip(follows.owners, jax.tree.leaves(new))):
        if owner is not None:
            nodes[k] = _write(nodes[k], ids[owner], value)
    kept = iter(zeroed_sums)

    def put_back(node):
        grads, rows = next(kept)
        return node._replace(acc_grads=grads, acc_rows=rows)

    state = _map_accumulators(put_back, state_treedef.unflatten(nodes))
    weights = [
        _write(x, ids[i], fresh[i]) if i in ids else x for i, x in enumerate(leaves)
    ]
    return trees.in_structure_of(given, (treedef.unflatten(weights), state))


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
    if key is None:
        raise ValueError(
            "embedding_init needs a key, another one at each call, for "
            "example jax.random.fold_in(key, step)."
        )
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


def _map_accumulators(change: Callable, state: Any) -> Any:
    """Returns `state` with `change(node)` for each state of `accumulate` in it."""
    is_ours = lambda x: isinstance(x, AccumulateState)

    def visit(node):
        if not is_ours(node):
            return node
        node = change(node)
        inner = _map_accumulators(change, node.inner_opt_state)
        return node._replace(inner_opt_state=inner)

    return jax.tree.map(visit, state, is_leaf=is_ours)


def _without_buffers(node: AccumulateState) -> AccumulateState:
    """Its size is not the tables', so no rule of shapes holds."""
    return node._replace(acc_grads=(), acc_rows=())


def _at_this_step(new: Any, state: Any) -> Any:
    """Returns `new`, the state of `tx.init`, for rows that missed no step up to now."""
    kinds = WeightDecayState, ExactState, TrackChangesState
    is_dated = lambda x: isinstance(x, kinds)
    nodes, treedef = jax.tree.flatten(new, is_leaf=is_dated)
    for k, (node, now) in enumerate(zip(nodes, treedef.flatten_up_to(state))):
        if isinstance(node, WeightDecayState):
            date = lambda x, now=now: jnp.broadcast_to(now.log_decay, x.shape)
            nodes[k] = node._replace(decayed=jax.tree.map(date, node.decayed))
        elif isinstance(node, ExactState):
            records = (
                catch_up.records_at(now.step, x.shape[0], then)
                for x, then in zip(node.last_updates, now.now)
            )
            nodes[k] = node._replace(last_updates=tuple(records))
        elif isinstance(node, TrackChangesState):
            inner = _at_this_step(node.inner_state, now.inner_state)
            changed = jax.tree.map(jnp.ones_like, node.changed)
            nodes[k] = TrackChangesState(inner, changed)
    return treedef.unflatten(nodes)


def _zeroed(held: Any, ids: jax.Array) -> Any:
    """Sets these rows to zero. They keep their slots: filled ones come first."""
    if not is_selected_rows(held):
        return _write(held, ids, jnp.zeros((ids.size, *held.shape[1:])))
    places = lax.iota(jnp.int32, held.capacity)
    ordered, places = lax.sort((held.rows, places), num_keys=1)
    slot, has_slot = merge.find_slots(ordered, ids, held.height)
    slot = jnp.where(has_slot, places[slot], np.int32(held.capacity))
    zeros = jnp.zeros((ids.size, *held.values.shape[1:]), held.dtype)
    return with_slots(held, held.rows, indexing.set_rows(held.values, slot, zeros))
