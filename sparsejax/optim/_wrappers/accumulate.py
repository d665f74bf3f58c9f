"""accumulate: the mean of k gradients, held by rows.

A table's gradients are held in a SelectedRows of fixed capacity C in the state:

- If C is smaller than the table, its slots are filled in the order in which rows turn
  up. Each step merges its gradient, finds which of its rows are held already (the ids
  are sorted, the values stay where they are), and adds to or fills those slots. What is
  touched is what the gradient touched: held values are neither moved nor copied.
- If every row has a slot, row r has slot r.

A slot is empty if its id is the table's height. Its value is then what an earlier round
left there; emptying the buffer after a step writes ids only.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from sparsejax import _arguments
from sparsejax._rows import SelectedRows, indexing
from sparsejax.optim._lazy import follow, lazy, parts, placement, separable
from sparsejax.optim._lazy.table_rows import check_on_one_device
from sparsejax.optim._wrappers import conditional


CALL = "sparsejax.optim.accumulate"

_NOT_LAZY = (
    CALL + ": takes a transformation that takes SelectedRows, such as "
    "lazy(optax.adam(1e-3)), got {found}."
)
_NOT_AN_INT = CALL + ": {name} must be a positive int{more}, got {found}."
_CAPACITY_TREE = (
    CALL + ": capacity is an int or a tree (prefix) of ints for params, with None for "
    "what has a dense gradient, got {found} for {want}."
)
_TOO_FEW_SLOTS = (
    CALL + ": {where} has a dense gradient of {height} rows, but only {slots} slots. "
    'Give capacity as a tree, with None for this leaf: capacity={{"table": 4096, '
    '"kernel": None}}.'
)
_NO_SLOTS = (
    CALL + ": {where} has a SelectedRows gradient, but no slots: capacity is None for "
    "it, or one int for a tree, which gives slots to leaves of rank 2 and more. Give "
    "capacity as a tree with an int for this leaf."
)


class AccumulateState(NamedTuple):
    """State of `accumulate`; names as in `optax.MultiStepsState`.

    Attributes:
      mini_step: int32, gradients held at the moment, less than `every_k`.
      gradient_step: int32, steps that `tx` has made.
      inner_opt_state: state of `tx`.
      acc_grads: sums of the gradients held, at least float32: a SelectedRows for each
        table, arrays for dense leaves.
      overflow: int32, how many rows found no slot, over all steps and tables. A row
        counts once for each gradient that names it.
    """

    mini_step: jax.Array
    gradient_step: jax.Array
    inner_opt_state: Any
    acc_grads: Any
    overflow: jax.Array


def accumulate(
    tx: Any, every_k: int | Callable[[jax.Array], Any], capacity: Any
) -> optax.GradientTransformationExtraArgs:
    """Gradient accumulation that stays sparse: one step of `tx` for k gradients.

    Holds gradients g_1, ..., g_k and at the k-th runs

      updates, state = tx.update((g_1 + ... + g_k) / k, state, params)

    as `optax.MultiSteps` does; with a loss that is a mean over the batch this is a step
    on one batch k times as large. Before the k-th, updates are zero (a SelectedRows
    without a filled slot) and the state of `tx` stays as it is. Rows are merged as they
    come; sums are held in at least float32.

    A table's gradients live in a buffer of `capacity` rows. Give it the number of
    distinct rows that k gradients can touch, or the table's height. A row that finds no
    slot is left out of this step as if no gradient had named it, and is counted in
    `state.overflow`. Rows that have one get their whole sum, so a step on too small a
    buffer is right for the rows that came first.

    Args:
      tx: a transformation that takes SelectedRows: `lazy(...)`, or one of this module.
        Extra arguments of `update` reach it at the k-th gradient.
      every_k: int k, or a function of `gradient_step`, a schedule.
      capacity: int, slots for each leaf of rank 2 or more; or a tree (prefix) of the
        params with ints for tables and None for what has dense gradients. There an int
        for a leaf of rank 1 makes it a table too. A leaf with slots may have a dense
        gradient as well if it has no more rows than slots.

    Returns:
      `optax.GradientTransformationExtraArgs` with an `AccumulateState`. Under `jax.jit`
      donate it with the parameters: buffers and tables are updated in place.

    Raises:
      TypeError: `tx` is no transformation.
      ValueError: `every_k` or `capacity` is no positive int, or no tree for these
        params; at update, a dense gradient with more rows than slots, or a SelectedRows
        without slots.

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

    References:
      `optax.MultiSteps`.
    """
    if not parts.is_transformation(tx):
        raise TypeError(_NOT_LAZY.format(found=_arguments.kind_of(tx)))
    inner = optax.with_extra_args_support(tx)
    if not callable(every_k):
        every_k = _positive("every_k", every_k, more=" or a function of the step")

    def init(params):
        placement.check_none_spread(CALL, params)
        inner_state = tx.init(params)
        leaves, treedef = separable.flatten(params)
        buffers = [_empty(*leaf) for leaf in zip(leaves, _slots(params, capacity))]
        # Each an array of its own: no buffer can be donated twice.
        mini_step, gradient_step, overflow = (
            jnp.zeros((), jnp.int32) for _ in range(3)
        )
        return AccumulateState(
            mini_step, gradient_step, inner_state, treedef.unflatten(buffers), overflow
        )

    def update(updates, state, params=None, **extra_args):
        grads, treedef = separable.flatten(updates)
        check_on_one_device(CALL, grads)
        parts.check_state(CALL, state, AccumulateState)
        lazy.weights_of(updates, treedef, params, CALL)
        # jnp.asarray: a state from a checkpoint may be of NumPy arrays.
        sums = treedef.flatten_up_to(jax.tree.map(jnp.asarray, state.acc_grads))
        overflow = jnp.asarray(state.overflow)
        for i, grad in enumerate(grads):
            if not follow.is_leaf(grad):
                _check(updates, i, sums[i], grad)
                sums[i], missed = _add(sums[i], grad)
                overflow += missed

        k = every_k(state.gradient_step) if callable(every_k) else every_k
        k = jnp.asarray(k, jnp.int32)
        due = state.mini_step >= k - 1
        updates, inner_state = conditional.update_if(
            due,
            inner,
            lambda: treedef.unflatten([_mean(*pair, k) for pair in zip(sums, grads)]),
            state.inner_opt_state,
            params,
            extra_args,
        )
        return updates, AccumulateState(
            jnp.where(due, 0, state.mini_step + 1),
            state.gradient_step + due.astype(jnp.int32),
            inner_state,
            treedef.unflatten([_emptied(due, held) for held in sums]),
            overflow,
        )

    return optax.GradientTransformationExtraArgs(init, update)


# ------------------------------------------------------------------ the buffers


def _empty(leaf: Any, slots: int | None) -> Any:
    """What sums of a leaf's gradients are held in, with nothing in it."""
    if follow.is_leaf(leaf):
        return leaf
    leaf = jnp.asarray(leaf)
    dtype = indexing.accumulator_dtype(leaf.dtype)
    if slots is None:
        return jnp.zeros(leaf.shape, dtype)
    height = leaf.shape[0]
    rows = jnp.full((slots,), height, _arguments.index_dtype(height))
    return SelectedRows(rows, jnp.zeros((slots, *leaf.shape[1:]), dtype), height)


def _add(held: Any, grad: Any) -> tuple[Any, Any]:
    """The sum with a gradient added, and how many rows found no slot."""
    if not isinstance(held, SelectedRows):
        return held + grad.astype(held.dtype), 0
    if not isinstance(grad, SelectedRows):
        rows = jnp.arange(held.height, dtype=held.rows.dtype)
        values = indexing.zero_unless(held.filled(), held.values)
        return SelectedRows(rows, values + grad.astype(held.dtype), held.height), 0

    grad = grad.astype(held.dtype).coalesce()
    rows, here = grad.rows.astype(held.rows.dtype), grad.filled()
    none = np.int32(held.capacity)
    if held.capacity == held.height:
        slot = jnp.where(here, rows, _arguments.scalar(held.height, rows)).astype(
            jnp.int32
        )
        known = indexing.take_rows(held.filled(), slot)
    else:
        places = lax.iota(jnp.int32, held.capacity)
        ordered, places = lax.sort((held.rows, places), num_keys=1)
        found, known = indexing.find_slots(ordered, rows, held.height)
        new = here & ~known
        free = held.num_rows() + jnp.cumsum(new, dtype=jnp.int32) - 1
        slot = jnp.where(new, jnp.minimum(free, none), none)
        slot = jnp.where(known, places[found], slot)
    old = indexing.take_rows(held.values, jnp.where(known, slot, none))
    values = indexing.set_rows(held.values, slot, old + grad.values)
    missed = jnp.sum(here & (slot == none), dtype=jnp.int32)
    return SelectedRows(
        indexing.set_rows(held.rows, slot, rows), values, held.height
    ), missed


def _mean(held: Any, grad: Any, k: jax.Array) -> Any:
    """The mean of k gradients, of the kind that the last one is."""
    if follow.is_leaf(held):
        return held
    if not isinstance(held, SelectedRows):
        return held / k.astype(held.dtype)
    if isinstance(grad, SelectedRows):
        return held / k.astype(held.dtype)
    return indexing.zero_unless(held.filled(), held.values) / k.astype(held.dtype)


def _emptied(due: jax.Array, held: Any) -> Any:
    if follow.is_leaf(held):
        return held
    if not isinstance(held, SelectedRows):
        return jnp.where(due, jnp.zeros((), held.dtype), held)
    rows = jnp.where(due, _arguments.scalar(held.height, held.rows), held.rows)
    return SelectedRows(rows, held.values, held.height)


# ------------------------------------------------------------------ the arguments


def _slots(params: Any, capacity: Any) -> list[int | None]:
    """How many slots each leaf of `params` gets; None where it is held as an array."""
    is_none = lambda x: x is None
    try:
        numbers, treedef = jax.tree.flatten(capacity, is_leaf=is_none)
        subtrees = treedef.flatten_up_to(params)
    except ValueError:
        found, want = (
            _arguments.show_tree(capacity, is_none),
            _arguments.show_tree(params),
        )
        raise ValueError(_CAPACITY_TREE.format(found=found, want=want)) from None
    slots = []
    for number, subtree in zip(numbers, subtrees):
        leaves, treedef = separable.flatten(subtree)
        named = jax.tree_util.treedef_is_leaf(treedef)  # the leaf itself was given
        if number is not None:
            number = _positive("capacity", number, more=", or a tree of such and None")
        slots += [_slots_of(leaf, number, 1 if named else 2) for leaf in leaves]
    return slots


def _slots_of(leaf: Any, number: int | None, lowest_rank: int) -> int | None:
    if number is None or follow.is_leaf(leaf) or np.ndim(leaf) < lowest_rank:
        return None
    return min(number, np.shape(leaf)[0])


def _positive(name: str, number: Any, more: str) -> int:
    try:
        found = operator.index(number)
    except TypeError:
        found = 0
    if found < 1 or isinstance(number, bool):
        shown = _arguments.show(number)
        raise ValueError(_NOT_AN_INT.format(name=name, more=more, found=shown))
    return found


def _check(updates: Any, i: int, held: Any, grad: Any) -> None:
    rows, slots = isinstance(grad, SelectedRows), isinstance(held, SelectedRows)
    if rows and not slots:
        raise ValueError(_NO_SLOTS.format(where=_path(updates, i)))
    if slots and not rows and held.capacity < held.height:
        where, slots = _path(updates, i), held.capacity
        raise ValueError(
            _TOO_FEW_SLOTS.format(where=where, height=held.height, slots=slots)
        )


def _path(tree: Any, i: int) -> str:
    is_leaf = lambda x: isinstance(x, SelectedRows) or follow.is_leaf(x)
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return "grads" + jax.tree_util.keystr(paths[i][0])
