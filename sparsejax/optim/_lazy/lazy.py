"""lazy: any row-separable optax transformation, run on the rows a gradient touches.

The lift, for a table W of V rows, its state leaves S (those that follow the table, see
`_follow`), and a gradient given as SelectedRows:

    (R, g) = gradient.coalesce()                 n distinct rows, duplicates summed
    u, s'  = tx.update(g, S[R], W[R])            together with all dense leaves
    updates = SelectedRows(R, u, V),  S[R] := s'

Gathering, arithmetic and scattering cost what n rows cost. Inside a jitted step that
donates its state, XLA scatters in place.

Sharp edges. Empty slots look like rows that were never touched: gradient and weight
zero, state as `tx.init` makes it; what comes out of them is dropped. Masks and labels
that are functions of the parameters see n rows instead of V: go by names, types or
ranks there, not by the number of rows.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import _arguments
from sparsejax._rows import SelectedRows, is_selected_rows
from sparsejax.optim._lazy import follow as _follow, parts, placement, separable
from sparsejax.optim._lazy.table_rows import (
    merge_duplicates,
    read_into,
    update_of,
    write_into,
)


CALL = "sparsejax.optim.lazy"

_NOT_A_TRANSFORMATION = (
    CALL + ": takes an optax transformation such as optax.adam(1e-3), got {found}. It "
    "does not transform functions (jax.experimental.sparse.sparsify does, and means "
    "another thing): write lazy(tx) around the optimizer, and sparsejax.value_and_grad "
    "around the loss."
)
_NOT_SEPARABLE = (
    CALL + ": {what} cannot be lifted to rows, because of {reason}. Use an optimizer "
    "that works row by row (adam, adagrad, rmsprop, sgd, lion, ...), or keep this one "
    'for the dense leaves: lazy(optax.partition({{"table": optax.adam(1e-3), "dense": '
    "tx}}, labels)). sparsejax.optim.is_row_separable tells which are."
)
_EXACT = (
    CALL + ": sparsejax.optim.exact takes SelectedRows itself, and rows have to be "
    "caught up before they are read, which nobody does for it in here or in a store. "
    "On the device use exact(tx) alone, with its catch_up and flush; else lazy(tx)."
)
_ROWS_CHANGED = (
    "{call}: the gradient of {where} is a SelectedRows whose {found}: a function over "
    "the whole tree (jax.tree.map, optax.scale, a mask) has been applied to its row "
    "ids too. Use SelectedRows.map or g * 0.5 for the values, and put optax "
    "transformations inside of lazy(...), not before it."
)
_PULLED = (
    "{call}: {where} is itself a SelectedRows, a pulled part of a table. An optimizer "
    "needs an array with state beside it: hand in its .values as the parameter and the "
    "gradient of those values, and keep .rows to know which rows they are."
)
_OTHER_STATE = (
    CALL + ": the state does not go with these gradients: {found}. Hand in the state "
    "that lazy(tx).init(params) or the last update gave."
)


def lazy(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Lifts an optax transformation to gradients that are SelectedRows.

    Rows that the gradient does not name are left alone: their weights *and
    their state* keep their bits. Momentum, weight decay and moment estimates of
    a row thus move only at steps that read it, as in TensorFlow's LazyAdam or
    PyTorch's SparseAdam, while counts and schedules advance at every step.

    For SGD and Adagrad that is what dense training does; `is_lazy_exact(tx)`
    tells for any other. `sparsejax.optim.exact` trains as dense momentum and
    Adam do.

    For the rows R that a gradient names, duplicates summed to g, it computes

      u, S[R] := tx.update(g, S[R], W[R])

    in one run of `tx` over all leaves, tables and dense ones, so that clipping
    by global norm is right. The update of a table is a SelectedRows over R,
    which `optax.apply_updates` adds to the table. A table with a dense gradient
    is updated densely. Under `jax.jit`, donate parameters and state: both are
    updated in place.

    Put tree-wide transformations inside: `lazy(optax.chain(clip, adam))`, not
    `optax.chain(clip, lazy(adam))`, which would clip the row ids.
    `clip_by_global_norm` *after* adam sees the updates of the rows read only.

    Args:
      tx: an `optax.GradientTransformation` that is row-separable, see
        `is_row_separable`; yours is as good as optax's. With `optax.partition`
        and `optax.masked` this is judged leaf by leaf.

    Returns:
      `optax.GradientTransformationExtraArgs`.
      `init(params)` is `tx.init(params)`, the same tree, so
      `optax.tree_utils.tree_get` and checkpoints work as before.
      `update(updates, state, params=None, **extra_args)` takes gradients,
      SelectedRows (of the table's height and row shape), arrays, or `None`;
      returns updates of the same structure and the new state.

    Raises:
      TypeError: `tx` is no transformation, or has `exact` in it; at update, a
        SelectedRows whose ids are no longer integers; a parameter that is
        itself a SelectedRows.
      ValueError: at init, no leaf can be lifted, because `tx` is not
        row-separable (the message names the part that is not); at update, the
        leaf of a SelectedRows cannot be, or its shape is not the table's.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> from sparsejax.optim import lazy
      >>> params = {"table": jnp.ones((1000, 2)), "bias": jnp.zeros(2)}
      >>> tx = lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))
      >>> state = tx.init(params)
      >>> rows = sj.SelectedRows(jnp.array([3, 3]), jnp.ones((2, 2)), height=1000)
      >>> grads = {"table": rows, "bias": jnp.ones(2)}
      >>> updates, state = tx.update(grads, state, params)
      >>> updates["table"].shape, updates["table"].num_rows()
      ((1000, 2), Array(1, dtype=int32))
      >>> optax.apply_updates(params, updates)["table"][2:5]
      Array([[1. , 1. ],
             [0.9, 0.9],
             [1. , 1. ]], dtype=float32)

    References:
      TensorFlow Addons, `LazyAdam`; PyTorch, `SparseAdam`; PaddlePaddle,
      `Adam(lazy_mode=True)`; MXNet, `lazy_update`.
    """
    if not parts.is_transformation(tx):
        raise TypeError(_NOT_A_TRANSFORMATION.format(found=describe(tx)))
    if separable.holds_exact(tx):
        raise TypeError(_EXACT)
    inner = optax.with_extra_args_support(tx)
    # What is found out about `tx` depends on shapes only and is found out once.
    verdicts = separable.Verdicts(tx)
    follow = separable.remember(functools.partial(_follow.follow, tx.init))

    def init(params):
        leaves, treedef = separable.flatten(params)
        for where, leaf in zip(leaf_paths(params, "params"), leaves):
            if isinstance(leaf, SelectedRows):
                raise TypeError(_PULLED.format(call=CALL, where=where))
        specs = tuple(map(_follow.spec, leaves))
        refused = verdicts.refusal(treedef, specs)
        if refused is not None:
            reason = verdicts.blame(treedef, specs, *refused)
            what = "this optimizer"
            raise ValueError(_NOT_SEPARABLE.format(what=what, reason=reason))
        return placement.init_beside(tx.init, params)

    def update(updates, state, params=None, **extra_args):
        grads = updates
        placement.check_beside(CALL, grads, params, state)
        leaves, treedef = separable.flatten(grads)
        tables = [i for i, g in enumerate(leaves) if isinstance(g, SelectedRows)]
        if not tables:
            return inner.update(grads, state, params, **extra_args)
        weights = weights_of(grads, treedef, params)
        check_gradients(grads, leaves, weights, tables)

        specs = tuple(_follow.spec(w) for w in weights or leaves)
        for refused in verdicts.failures(treedef, specs, tables).items():
            reason = verdicts.blame(treedef, specs, *refused)
            where = leaf_paths(grads, "grads")[refused[0]]
            what = f"{where}, which has a SelectedRows gradient,"
            raise ValueError(_NOT_SEPARABLE.format(what=what, reason=reason))
        owners = follow(treedef, specs, tuple(tables)).owners

        merged = {i: merge_duplicates(leaves[i]) for i in tables}
        cut = cut_rows(tx.init, treedef, leaves, weights, state, owners, merged)
        updates, new_state = inner.update(*cut, **extra_args)
        updates = treedef.flatten_up_to(updates)
        for i, rows in merged.items():
            updates[i] = update_of(rows, updates[i], leaves[i])
        return treedef.unflatten(updates), put_back(state, new_state, owners, merged)

    return optax.GradientTransformationExtraArgs(init, update)


# ------------------------------------------------------------------ the lift


def cut_rows(
    init, treedef, leaves, weights, state, owners, merged
) -> tuple[Any, Any, Any]:
    """Gradients, state and weights with rows in the place of tables."""
    state_leaves, state_treedef = jax.tree.flatten(state)
    _check_state(state_leaves, owners, merged)
    grads = [merged[i].values if i in merged else g for i, g in enumerate(leaves)]
    if weights is not None:
        weights = [
            read_into(merged[i], w, jnp.zeros_like(grads[i])) if i in merged else w
            for i, w in enumerate(weights)
        ]
    if any(owner is not None for owner in owners):
        # An empty slot has a row that was never touched.
        untouched = [
            jnp.zeros_like(x) if i in merged else x
            for i, x in enumerate(weights or grads)
        ]
        fresh = jax.tree.leaves(init(treedef.unflatten(untouched)))
        for k, owner in enumerate(owners):
            if owner is not None:
                state_leaves[k] = read_into(merged[owner], state_leaves[k], fresh[k])
    return (
        treedef.unflatten(grads),
        state_treedef.unflatten(state_leaves),
        None if weights is None else treedef.unflatten(weights),
    )


def put_back(state, new_state, owners, merged) -> Any:
    """The new state, tables in it being the old ones with new rows."""
    leaves, treedef = jax.tree.flatten(new_state)
    for k, (owner, old) in enumerate(zip(owners, jax.tree.leaves(state))):
        if owner is not None:
            leaves[k] = write_into(merged[owner], old, leaves[k])
    return treedef.unflatten(leaves)


# ------------------------------------------------------------------ checks


def weights_of(
    grads: Any, treedef: Any, params: Any, call: str = CALL
) -> list[Any] | None:
    if params is None:
        return None
    try:
        return treedef.flatten_up_to(params)
    except ValueError:
        shown = [
            _arguments.show_tree(tree, is_selected_rows) for tree in (grads, params)
        ]
        raise ValueError(
            f"{call}: gradients and params are trees of other structure, {shown[0]} "
            f"and {shown[1]}. A table's gradient is one SelectedRows at the place of "
            "the table."
        ) from None


def check_gradients(
    grads, leaves, weights, tables: Sequence[int], call: str = CALL
) -> None:
    for i in tables:
        rows, values = leaves[i].rows, leaves[i].values
        where = lambda i=i: leaf_paths(grads, "grads")[i]
        dtype = getattr(rows, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
            kind = type(rows).__name__ if dtype is None else dtype
            found = f"rows are {kind}, not integers"
            raise TypeError(_ROWS_CHANGED.format(call=call, where=where(), found=found))
        if not hasattr(values, "dtype"):
            found = f"values are {type(values).__name__}, no array"
            raise TypeError(_ROWS_CHANGED.format(call=call, where=where(), found=found))
        if weights is None:
            continue
        if isinstance(weights[i], SelectedRows):
            path = leaf_paths(grads, "params")[i]
            raise TypeError(_PULLED.format(call=call, where=path))
        expected = np.shape(weights[i])
        if leaves[i].shape != expected:
            found = leaves[i].shape
            raise ValueError(
                f"{call}: the gradient of {where()} is a SelectedRows of shape "
                f"{found}, but the parameter has shape {expected}. Height and row "
                "shape must be the table's."
            )


def _check_state(state_leaves, owners, merged) -> None:
    if len(state_leaves) != len(owners):
        found = f"it has {len(state_leaves)} leaves instead of {len(owners)}"
        raise ValueError(_OTHER_STATE.format(found=found))
    for leaf, owner in zip(state_leaves, owners):
        if owner is not None and np.shape(leaf)[:1] != (merged[owner].height,):
            found = (
                f"a leaf of shape {np.shape(leaf)} belongs to a table of "
                f"{merged[owner].height} rows"
            )
            raise ValueError(_OTHER_STATE.format(found=found))


def leaf_paths(tree: Any, name: str) -> list[str]:
    is_leaf = lambda x: isinstance(x, SelectedRows) or _follow.is_leaf(x)
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [name + jax.tree_util.keystr(path) for path, _ in paths]


def describe(x: Any) -> str:
    if callable(x):
        return f"the function {getattr(x, '__name__', type(x).__name__)}"
    return f"{type(x).__name__}"
