"""lazy: runs any row-separable optax transformation on the rows a gradient touches.

For a table W of V rows, its state S (the leaves that follow the table, see
`state_leaves`), and a gradient given as SelectedRows:

    (R, g) = gradient.coalesce()                 n distinct rows, duplicates summed
    u, s'  = tx.update(g, S[R], W[R])            together with all dense leaves
    updates = SelectedRows(R, u, V),  S[R] := s'

The cost of gathering, arithmetic and scattering is proportional to n, not V. Inside a
jitted step that donates its state, XLA scatters in place.

Sharp edges. Empty slots look like rows that were never touched: zero gradient and
weights, and the initial state of `tx.init`. Their results are dropped. Masks and labels
that are functions of the parameters answer as on all V rows, see `callables`.
"""

from __future__ import annotations

import functools

import optax

from sparsejax._rows import is_selected_rows
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._lazy import (
    callables,
    gather_scatter,
    judge,
    parts,
    row_passes,
    stacks,
    state_leaves,
    state_sharding,
)


CALL = "sparsejax.optim.lazy"


def lazy(
    tx: optax.GradientTransformation, *, check: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Lifts an optax transformation to gradients that are SelectedRows.

    Rows without a gradient stay unchanged, bit for bit: their weights *and their
    state*. Momentum, weight decay and moment estimates of a row therefore change only
    at steps that read it, as in TensorFlow's LazyAdam or PyTorch's SparseAdam. Counts
    and schedules advance at every step.

    For SGD and Adagrad this equals dense training; `is_lazy_exact(tx)` tells for any
    other transformation. `sparsejax.optim.exact` matches dense momentum and Adam.

    A stack of tables `[K, V, ...]` has `K * V` rows, each updated as a row of one
    table.

    For the rows R of a gradient, with duplicates summed to g, it computes

      u, S[R] := tx.update(g, S[R], W[R])

    in one run of `tx` over all leaves, tables and dense leaves together, so clipping by
    global norm is correct. The update of a table is a SelectedRows over R, which
    `optax.apply_updates` adds to the table. A table with a dense gradient is updated
    densely. Under `jax.jit`, donate parameters and state to update both in place.

    Masks and labels that are functions of the parameters (`optax.masked`,
    `optax.partition`, `adamw(mask=)`) are called once, with arrays of the full shapes.
    They may decide by path, shape and dtype, not by numbers.

    State that follows a table keeps its dtype at a sparse gradient, even if optax
    would promote it, as the moments of a float16 table at float32 gradients.

    Put tree-wide transformations inside: `lazy(optax.chain(clip, adam))`, not
    `optax.chain(clip, lazy(adam))`, which would clip the row ids, and raises.
    `clip_by_global_norm` *after* adam sees only the updates of the rows read.

    Args:
      tx: an `optax.GradientTransformation`, yours or optax's, that is row-separable
        (see `is_row_separable`). With `optax.partition` and `optax.masked`, each leaf
        is judged separately.
      check: True refuses `tx` unless its traced program proves that it is
        row-separable. Pass False for a row-separable transformation of your own that
        is refused, for example because of a loop over rows, or because its extra
        arguments are not numbers. Then it is only checked that `tx` runs the same
        operations on few rows as on all: if a row's step does depend on other rows,
        training is wrong.

    Returns:
      `optax.GradientTransformationExtraArgs`.
      `init(params)` is `tx.init(params)`, the same tree, so
      `optax.tree_utils.tree_get` and checkpoints work as before.
      `update(updates, state, params=None, **extra_args)` takes gradients,
      SelectedRows (of the table's height and row shape), arrays, or `None`;
      returns updates of the same structure and the new state.

    Raises:
      TypeError: `tx` is not a transformation; a parameter is itself a SelectedRows; at
        update, the ids of a SelectedRows are not integers.
      ValueError: at init, no leaf can be lifted, because `tx` is not row-separable or
        contains `exact` (the message names the part and its line), or a mask computes
        with numbers; at update, the leaf of a SelectedRows cannot be lifted, or its
        shape is not the table's.

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
    checks.check_transformation(
        CALL,
        tx,
        "optax.adam(1e-3)",
        " lazy wraps the optimizer; sparsejax.value_and_grad wraps the loss. (To "
        "sparsify a function is something else: jax.experimental.sparse.sparsify.)",
    )
    # All depend only on shapes, and cache their answers.
    verdicts = judge.Verdicts(tx)
    depends_on_rows = trees.remember(functools.partial(judge.depends_on_rows, tx))
    resolve = trees.remember(functools.partial(callables.resolve, tx))
    find = trees.remember(
        lambda treedef, specs, tables: state_leaves.find(
            resolve(treedef, specs).init, treedef, specs, tables
        )
    )

    def init(params):
        checks.check_not_quantized(CALL, params)
        checks.check_no_pulled_table(CALL, params)
        leaves, treedef = trees.flatten(params)
        specs = tuple(map(trees.to_spec, leaves))
        refused = verdicts.refusal(treedef, specs) if check else None
        if refused is not None:
            raise _not_separable("this optimizer", refused[1])
        return state_sharding.init(resolve(treedef, specs).init, params)

    def update(updates, state, params=None, **extra_args):
        leaves, treedef = trees.flatten(updates)
        grads = treedef.unflatten(leaves)
        state_sharding.check_sharded(CALL, grads, params, state)
        tables = tuple(i for i, g in enumerate(leaves) if is_selected_rows(g))
        if not tables:
            checks.check_order(CALL, params)
            inner = optax.with_extra_args_support(tx)
            return inner.update(grads, state, params, **extra_args)
        weights = trees.flatten_params(CALL, grads, params)
        checks.check_gradients(CALL, grads, weights)

        specs = tuple(map(trees.to_spec, weights or leaves))
        stacked = {i: leaves[i] for i in tables if leaves[i].stack}
        specs = stacks.specs(stacked, specs)
        own = resolve(treedef, specs)
        inner = optax.with_extra_args_support(own)
        if check:
            refused = verdicts(treedef, specs, tables).refused
        else:  # check=False cannot help if the state has no rows to gather
            found, part = find(treedef, specs, tables), parts.name_of(tx)
            refused = {i: parts.Reason(w, part) for i, (w, _) in found.blocked.items()}
            refused |= judge.refused_by_type(found)
        for i, reason in refused.items():
            where = trees.leaf_paths(grads, "grads")[i]
            name = f"{where}, which has a SelectedRows gradient,"
            if i in stacked:
                name = f"{where}, a stack of tables whose gradient has rows of each,"
            raise _not_separable(name, reason, i in stacked)
        owners = find(treedef, specs, tables).owners
        row_shapes = {i: leaves[i].row_shape for i in tables}
        checks.check_state_rows(CALL, state, owners, row_shapes)
        given = weights
        if stacked:
            leaves, weights, state = stacks.flatten(
                stacked, leaves, weights, state, owners
            )

        passes = None
        if check:  # else the program is not known to be row by row
            passes = row_passes.update(
                inner, treedef, leaves, weights, state, owners, tables, extra_args
            )
        if passes is not None:
            updates, new_state = passes
        else:
            merged = {i: gather_scatter.merge_duplicates(leaves[i]) for i in tables}
            num_rows = tuple(merged[i].capacity for i in tables)
            reason = depends_on_rows(treedef, specs, tables, num_rows)
            if reason is not None:
                raise _not_separable("this optimizer", reason)
            rows = gather_scatter.gather(
                own.init, treedef, leaves, weights, state, owners, merged
            )
            updates, new_state = inner.update(*rows, **extra_args)
            updates = treedef.flatten_up_to(updates)
            for i in tables:
                updates[i] = gather_scatter.as_update(merged[i], updates[i], leaves[i])
            new_state = gather_scatter.scatter_state(state, new_state, owners, merged)
        if stacked:
            updates, new_state = stacks.restore(
                stacked, given, updates, new_state, owners
            )
        return treedef.unflatten(updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _not_separable(
    name: str, reason: parts.Reason, is_stack: bool = False
) -> ValueError:
    if is_stack:
        advice = (
            "Keep the parameter as one table [K * V, ...], and reshape it inside the "
            "loss: table.reshape(K, V, ...)."
        )
    else:
        advice = (
            "Use an optimizer that works row by row (adam, adagrad, rmsprop, sgd, "
            "lion, ...), or keep this one for the dense leaves: "
            'lazy(optax.partition({"table": optax.adam(1e-3), "dense": tx}, labels)). '
            "sparsejax.optim.is_row_separable tells which optimizers work."
        )
    message = f"{CALL}: {name} cannot be lifted to rows, because of {reason}. {advice}"
    if reason.can_be_wrong:
        message += (
            " If you know that each row's step depends only on that row, skip this "
            "check with lazy(tx, check=False)."
        )
    return ValueError(message)
