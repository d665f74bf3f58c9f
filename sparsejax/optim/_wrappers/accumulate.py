"""accumulate: one optimizer step for k gradients, accumulated sparsely.

The state sums the gradients of a table in C slots, each with a row id and a sum:

- If C is smaller than the table, slots are filled in the order in which rows appear.
  Each step merges its gradient, finds which of its rows already have a slot (by sorting
  only the ids), and adds to these slots or fills new ones. Only the slots of the
  gradient's rows are touched: no other value is moved or copied.
- If every row has a slot, row r has slot r.

A slot is empty if its id is the table's height. Its value is then left over from an
earlier step, since emptying the buffer only writes ids. The state has plain arrays, not
SelectedRows, because `flax.nnx.Optimizer` rebuilds other containers as its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from sparsejax import _arguments, _compat, _mesh
from sparsejax._arguments import PyTree
from sparsejax._rows import (
    SelectedRows,
    flat_rows,
    indexing,
    merge,
    stacked_rows,
    with_slots,
)
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._lazy import separability, state_sharding


class AccumulateState(NamedTuple):
    """State of `accumulate`; names as in `optax.MultiStepsState`.

    Attributes:
      mini_step: int32, the number of accumulated gradients, less than k.
      gradient_step: int32, the number of steps of `tx`.
      inner_opt_state: state of `tx`.
      acc_grads: the sums of gradients, in float32 or wider: `[C, ...]` for a leaf with
        C slots, and of the leaf's shape for others.
      acc_rows: the row id of each slot, `[C]`; 0 for leaves without slots.
      overflow: int32, the number of rows that found no slot, over all steps and tables.
        A row counts once per gradient that contains it.
    """

    mini_step: jax.Array
    gradient_step: jax.Array
    inner_opt_state: Any
    acc_grads: Any
    acc_rows: Any
    overflow: jax.Array


separability.NOT_LIFTED[AccumulateState] = (
    "sparsejax.optim.accumulate",
    "it goes around lazy, not inside of it: sparsejax.optim.accumulate(lazy(tx), k, "
    "capacity)",
)


def accumulate(
    tx: optax.GradientTransformation,
    every_k_schedule: int | Callable[[jax.Array], Any],
    capacity: int | PyTree,
    *,
    stacked: bool | PyTree = False,
) -> optax.GradientTransformationExtraArgs:
    """Gradient accumulation that stays sparse: one step of `tx` for k gradients.

    Accumulates gradients g_1, ..., g_k, and at the k-th runs

      updates, state = tx.update((g_1 + ... + g_k) / k, state, params)

    like `optax.MultiSteps`. Before, updates are zero (a SelectedRows without a filled
    slot) and the state of `tx` does not change. Sums are in float32 or wider.

    The gradients of a table are summed in a buffer of `capacity` rows: the number of
    distinct rows that k gradients can have, or the table's height. A row that finds no
    slot is omitted from this step, as if it had no gradient, and is counted in
    `state.overflow`. Rows that have a slot get their full sum.

    Args:
      tx: a transformation that accepts SelectedRows, such as `lazy(...)`.
      every_k_schedule: int k, or a schedule: a function of `gradient_step`.
      capacity: int, slots for each leaf of rank 2 or more; or a tree (prefix) of the
        params with ints for tables, also of rank 1, and None for dense leaves. A leaf
        with as many slots as rows may also have a dense gradient.
      stacked: True, or a tree (prefix) of the params with True for stacks of tables
        `[K, V, ...]`, which then have slots for the rows of each table.

    Returns:
      `optax.GradientTransformationExtraArgs` with an `AccumulateState`.

    Raises:
      TypeError: `tx` is not a transformation, or `every_k_schedule` or `capacity` is
        not an int.
      ValueError: `every_k_schedule` or `capacity` is not positive, or is not a prefix
        of the params; at update, a gradient does not fit the slots of its leaf.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> tx = sj.optim.accumulate(sj.optim.lazy(optax.sgd(1.0)), 2, capacity=8)
      >>> table = jnp.zeros((1000, 1))
      >>> state = tx.init(table)
      >>> for row in (3, 5):
      ...     grad = sj.SelectedRows(jnp.array([row]), jnp.ones((1, 1)), height=1000)
      ...     updates, state = tx.update(grad, state, table)
      ...     table = optax.apply_updates(table, updates)
      ...     print(updates.num_rows(), table[3:6, 0], state.overflow)
      0 [0. 0. 0.] 0
      2 [-0.5  0.  -0.5] 0
    """
    checks.check_transformation(tx, "lazy(optax.adam(1e-3))")
    inner = optax.with_extra_args_support(tx)
    every_k: Any = every_k_schedule
    if not callable(every_k):
        hint = " Or pass a function of the step."
        every_k = _arguments.static_int("every_k_schedule", every_k, 1, hint)

    def init(params):
        state_sharding.check_not_sharded(params)
        inner_state = tx.init(params)  # which knows what is not a parameter
        leaves, treedef = trees.flatten(params)
        stacks = _arguments.flag_leaves("stacked", stacked, params, trees.is_leaf)
        buffers = map(_empty, leaves, _slots(params, capacity), stacks)
        rows, sums = (treedef.unflatten(x) for x in zip(*buffers))
        # Separate arrays, since no buffer can be donated twice.
        zero = lambda: jnp.zeros((), jnp.int32)
        return AccumulateState(zero(), zero(), inner_state, sums, rows, zero())

    def update(updates, state, params=None, **extra_args):
        grads, treedef = trees.flatten(updates)
        state_sharding.check_not_sharded(grads)
        checks.check_state(state, AccumulateState)
        trees.flatten_params(updates, params)
        buffers = held_gradients(state, grads, treedef)
        overflow = jnp.asarray(state.overflow)
        for i, grad in enumerate(grads):
            if not trees.is_none_or_masked(grad):
                _check_slots(updates, i, buffers[i], grad)
                buffers[i], missed = _add(buffers[i], grad)
                overflow += missed

        k = every_k(state.gradient_step) if callable(every_k) else every_k
        k = jnp.asarray(k, jnp.int32)
        due = state.mini_step >= k - 1
        mean = lambda: treedef.unflatten(_mean(*xs, k) for xs in zip(buffers, grads))
        updates, inner_state = update_if(
            due, inner, mean, state.inner_opt_state, params, extra_args
        )
        state = state._replace(
            mini_step=jnp.where(due, 0, state.mini_step + 1),
            gradient_step=state.gradient_step + due.astype(jnp.int32),
            inner_opt_state=inner_state,
            overflow=overflow,
        )
        emptied = [_emptied(due, buffer) for buffer in buffers]
        return updates, with_held_gradients(state, emptied, treedef)

    return optax.GradientTransformationExtraArgs(init, update)


# ------------------------------------------------------------------ skipped steps


def update_if(
    wanted: jax.Array,
    tx: Any,
    make_grads: Callable[[], Any],
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, Any]:
    """Returns `tx.update(make_grads(), state, params)` if `wanted`, else no update.

    A skipped step costs no more than its empty updates: `lax.cond` passes the state on,
    and XLA copies no table (tests/optim/test_memory.py).

    Args:
      wanted: bool scalar.
      tx: a transformation that accepts extra arguments.
      make_grads: returns the gradients; called only if the step runs.
      state: of `tx`.
      params: parameters, or None.
      extra_args: extra arguments of `tx.update`.

    Returns:
      Updates and state. If not `wanted`, updates are zero (a SelectedRows has no filled
      slot), and the state is unchanged. Leaves of the state keep their dtypes, so that
      both branches agree and loops can carry them.
    """
    types = []

    def step(state, params):
        updates, new = tx.update(make_grads(), state, params, **extra_args)
        out = updates, jax.tree.map(_as_type_of, state, new)
        types[:] = map(_placement, jax.tree.leaves(out))
        return out

    spec, _ = jax.eval_shape(step, state, params)

    def skip(state, params):
        del params
        # Row ids of zeros are empty slots.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec)
        return zeros, jax.tree.map(_as_type_of, state, state)

    def of_one_type(branch):
        """Gives the results of both branches the shardings of a step."""

        def run(state, params):
            skipped = jax.tree.leaves(skip(state, params))
            leaves, treedef = jax.tree.flatten(branch(state, params))
            for k, (spec, mesh, axes) in enumerate(types):
                axes |= _compat.varying_axes(skipped[k])
                x = _mesh.reshard(leaves[k], spec, mesh)
                leaves[k] = _compat.to_varying(x, axes)
            return treedef.unflatten(leaves)

        return run

    return lax.cond(wanted, of_one_type(step), of_one_type(skip), state, params)


def _placement(x: jax.Array) -> tuple[Any, Any, frozenset]:
    """Returns the sharding in the type of `x`, and the axes over which it varies."""
    mesh = jax.typeof(x).sharding.mesh
    return _mesh.explicit_spec(x), mesh, _compat.varying_axes(x)


def _as_type_of(old: Any, new: Any) -> jax.Array:
    """Casts to the dtype of `old`, and to no weak type: the caller is compiled once."""
    return jnp.asarray(new).astype(jnp.asarray(old).dtype)


# ------------------------------------------------------------------ the buffers


def held_gradients(state: AccumulateState, like: Any, treedef: Any) -> list[Any]:
    """Returns the buffers: SelectedRows, and arrays for leaves without slots.

    Args:
      state: of `accumulate`.
      like: the leaves of the gradients or of the parameters.
      treedef: their structure.
    """
    # A state from a checkpoint may contain NumPy arrays.
    sums = treedef.flatten_up_to(jax.tree.map(jnp.asarray, state.acc_grads))
    rows = treedef.flatten_up_to(jax.tree.map(jnp.asarray, state.acc_rows))
    for i, (leaf, ids) in enumerate(zip(like, rows)):
        if np.ndim(ids):
            shape = leaf.shape
            *stack, _ = row_shape = shape[: len(shape) + 1 - sums[i].ndim]
            sums[i] = SelectedRows(ids, sums[i], math.prod(row_shape), stack)
    return sums


def with_held_gradients(
    state: AccumulateState, buffers: list[Any], treedef: Any
) -> AccumulateState:
    """Returns the state with other buffers."""
    rows, sums = treedef.flatten_up_to(state.acc_rows), list(buffers)
    for i, buffer in enumerate(buffers):
        if isinstance(buffer, SelectedRows):
            rows[i], sums[i] = buffer.rows, buffer.values
    rows, sums = map(treedef.unflatten, (rows, sums))
    return state._replace(acc_grads=sums, acc_rows=rows)


def _empty(leaf: Any, slots: int | None, is_stack: bool | None) -> tuple[Any, Any]:
    """Returns the row ids and sums of an empty buffer."""
    if trees.is_none_or_masked(leaf):
        return leaf, leaf
    leaf = jnp.asarray(leaf)
    dtype = indexing.accumulator_dtype(leaf.dtype)
    if slots is None:
        return jnp.zeros((), jnp.int32), jnp.zeros(leaf.shape, dtype)
    row_axes = 2 if is_stack and leaf.ndim > 2 else 1
    height = math.prod(leaf.shape[:row_axes])
    slots = min(slots, height)
    rows = jnp.full((slots,), height, _arguments.index_dtype(height))
    return rows, jnp.zeros((slots, *leaf.shape[row_axes:]), dtype)


def _add(held: Any, grad: Any) -> tuple[Any, Any]:
    """Adds a gradient to the sum; also counts the rows that found no slot."""
    if not isinstance(held, SelectedRows):
        return held + grad.astype(held.dtype), 0
    if not isinstance(grad, SelectedRows):
        rows = jnp.arange(held.height, dtype=held.rows.dtype)
        values = indexing.zero_unless(held.filled(), held.values)
        grad = flat_rows(held, grad.astype(held.dtype))
        return with_slots(held, rows, values + grad), 0

    grad = grad.astype(held.dtype).coalesce()
    rows, here = grad.rows.astype(held.rows.dtype), grad.filled()
    none = np.int32(held.capacity)
    if held.capacity == held.height:
        slot = jnp.where(here, rows.astype(jnp.int32), none)
        has_slot = indexing.take_rows(held.filled(), slot)
    else:
        own, has_slot = find_slots(held, rows)
        new = here & ~has_slot
        free = held.num_rows() + jnp.cumsum(new, dtype=jnp.int32) - 1
        slot = jnp.where(new, jnp.minimum(free, none), none)
        slot = jnp.where(has_slot, own, slot)
    old = indexing.take_rows(held.values, jnp.where(has_slot, slot, none))
    values = indexing.set_rows(held.values, slot, old + grad.values)
    missed = jnp.sum(here & (slot == none), dtype=jnp.int32)
    return with_slots(held, indexing.set_rows(held.rows, slot, rows), values), missed


def find_slots(held: SelectedRows, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the slot of each row, and True where a row has one."""
    places = lax.iota(jnp.int32, held.capacity)
    ordered, places = lax.sort((held.rows, places), num_keys=1)
    place, has_slot = merge.find_slots(ordered, rows, held.height)
    return places[place], has_slot


def _mean(held: Any, grad: Any, k: jax.Array) -> Any:
    """Returns the mean of k gradients, dense or SelectedRows like the last one."""
    if trees.is_none_or_masked(held):
        return held
    if isinstance(held, SelectedRows) and not isinstance(grad, SelectedRows):
        held = stacked_rows(held, indexing.zero_unless(held.filled(), held.values))
    return held / k.astype(held.dtype)


def _emptied(due: jax.Array, held: Any) -> Any:
    if trees.is_none_or_masked(held):
        return held
    if not isinstance(held, SelectedRows):
        return jnp.where(due, jnp.zeros((), held.dtype), held)
    rows = jnp.where(due, _arguments.scalar(held.height, held.rows), held.rows)
    return with_slots(held, rows, held.values)


# ------------------------------------------------------------------ the arguments


def _slots(params: Any, capacity: Any) -> list[int | None]:
    """Returns each leaf's number of slots; None if its sum is an array."""
    slots = []
    for number, subtree in _arguments.match_prefix("capacity", capacity, params):
        leaves, treedef = trees.flatten(subtree)
        min_rank = 1 if jax.tree_util.treedef_is_leaf(treedef) else 2
        if number is not None:
            hint = "Or pass a tree of ints, with None for dense leaves."
            number = _arguments.static_int("capacity", number, 1, hint)
        for leaf in leaves:
            dense = trees.is_none_or_masked(leaf) or np.ndim(leaf) < min_rank
            slots.append(None if dense else number)
    return slots


def _check_slots(updates: Any, i: int, held: Any, grad: Any) -> None:
    """Raises a ValueError if the gradient of leaf i does not match its buffer."""
    wrong = None
    if not isinstance(held, SelectedRows):
        if isinstance(grad, SelectedRows):
            wrong = (
                "is a SelectedRows, but its leaf has no slots: its capacity is None, "
                "or capacity is one int, which gives slots only to leaves of rank 2 or "
                "more. Pass capacity as a tree with an int for this leaf."
            )
    elif not isinstance(grad, SelectedRows):
        if held.capacity < held.height:
            wrong = (
                f"is a dense gradient of {held.height} rows, but its leaf has only "
                f"{held.capacity} slots. Pass capacity as a tree with None for this "
                'leaf, for example {"table": 4096, "kernel": None}.'
            )
    elif grad.row_shape != held.row_shape:
        row_shape, slots = ("x".join(map(str, x.row_shape)) for x in (grad, held))
        wrong = (
            f"has {row_shape} rows, but the slots of its leaf are for {slots} rows. "
            "Pass stacked=True, or a tree with True for this leaf, if it is a stack of "
            "tables [K, V, ...] read at (k, v)."
        )
    if wrong:
        raise ValueError(f"{trees.leaf_paths(updates, 'grads')[i]} {wrong}")
