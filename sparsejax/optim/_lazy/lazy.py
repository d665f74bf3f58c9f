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
that are functions of the parameters see one row, or the rows of a gradient: they may
decide by path, dtype and rank, and one that decides by the number of rows is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax

from sparsejax._rows import (
    SelectedRows,
    flat_rows,
    is_selected_rows,
    restacked,
    stacked_rows,
)
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._lazy import gather_scatter, passes, separability, state_sharding


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
    `optax.partition`, `adamw(mask=)`) may decide by path, dtype and rank. One that
    decides by the number of rows is refused: pass the tree, `mask=mask_fn(params)`.

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
        contains `exact` (the message names the part and its line), or `tx.init` raises
        on abstract arrays; at update, the leaf of a SelectedRows cannot be lifted, or
        its shape is not the table's.

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
        tx,
        "optax.adam(1e-3)",
        " lazy wraps the optimizer; sparsejax.value_and_grad wraps the loss. (To "
        "sparsify a function is something else: jax.experimental.sparse.sparsify.)",
    )
    inner = optax.with_extra_args_support(tx)

    def init(params):
        checks.check_params(params)
        if check:
            leaves, treedef = trees.flatten(params)
            specs = tuple(map(trees.to_spec, leaves))
            reason = separability.refusal(tx, treedef, specs)
            if reason is not None:
                raise separability.refused("this optimizer", reason)
        return state_sharding.init(tx.init, params)

    def update(updates, state, params=None, **extra_args):
        step = Step.of(updates, state, params)
        if not step.tables:
            return inner.update(updates, state, params, **extra_args)
        verdict = separability.for_tables(tx, *step.key, check)
        for table, reason in verdict.refused.items():
            raise separability.refused(step.path(table), reason, table in step.stacks)
        step = step.with_owners(verdict.owners, verdict.state)
        new = passes.run(inner, step, extra_args) if check else None
        if new is None:  # outside of jit, without params, or check=False
            new = gather_scatter.run(inner, step, extra_args)
        return step.restore(*new)

    return trees.transformation(init, update)


class Step(NamedTuple):
    """The arguments of one update as leaves, with one table instead of each stack.

    A gradient with the rows of a stack `[K, V, ...]` has ids that count the rows of all
    its tables. So weights and the state that follows them are reshaped to one table
    `[K * V, ...]`, which inside `jit` costs nothing.

    Attributes:
      treedef: structure of the gradients.
      specs: of the parameters as they are passed, see `trees.to_spec`.
      tables: the leaves whose gradients are SelectedRows.
      grads: leaves of the gradients.
      weights: leaves of the parameters, or None.
      state: the state of the transformation.
      stacks: by leaf, the gradient and the parameter of a stack as they are passed.
      owners: for each leaf of the state, the table that it follows, or None.
    """

    treedef: Any
    specs: tuple[Any, ...]
    tables: tuple[int, ...]
    grads: list[Any]
    weights: list[Any] | None
    state: Any
    stacks: dict[int, tuple[SelectedRows, Any]]
    owners: Sequence[int | None] = ()

    @classmethod
    def of(cls, updates: Any, state: Any, params: Any) -> Step:
        """Makes the step with these arguments; raises if they do not fit together."""
        grads, treedef = trees.flatten(updates)
        state_sharding.check_sharded(updates, params, state)
        weights = trees.flatten_params(updates, params)
        checks.check_gradients(updates, weights)
        tables = tuple(i for i, g in enumerate(grads) if is_selected_rows(g))
        stacks = {
            i: (grads[i], weights and weights[i]) for i in tables if grads[i].stack
        }
        specs = tuple(
            trees.to_spec(x, trees.StackSpec if i in stacks else jax.ShapeDtypeStruct)
            for i, x in enumerate(weights or grads)
        )
        for i, (stack, weight) in stacks.items():
            grads[i] = stack.unstacked()
            if weights is not None:
                weights[i] = flat_rows(stack, weight)
        return cls(treedef, specs, tables, grads, weights, state, stacks)

    @property
    def key(self) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
        return self.treedef, self.specs, self.tables

    def path(self, table: int) -> str:
        """Returns the path of a table, for messages."""
        return trees.leaf_paths(self.treedef.unflatten(self.grads), "grads")[table]

    def with_owners(self, owners: Sequence[int | None], expected: Any) -> Step:
        """Returns the step with `owners`; raises unless the state is as expected.

        Args:
          owners: for each leaf of the state, the table that it follows, or None.
          expected: the state that `tx.init` returns.
        """
        checks.check_state(self.state, expected)
        gradients = {i: self.grads[i] for i in self.tables}
        gradients |= {i: stack for i, (stack, _) in self.stacks.items()}
        row_shapes = {i: gradient.row_shape for i, gradient in gradients.items()}
        checks.check_state_rows(self.state, owners, row_shapes)
        leaves, treedef = jax.tree.flatten(self.state)
        for k, owner in enumerate(owners):
            if owner is not None:
                leaves[k] = flat_rows(gradients[owner], leaves[k])
        return self._replace(state=treedef.unflatten(leaves), owners=owners)

    def restore(self, updates: Sequence[Any], state: Any) -> tuple[Any, Any]:
        """Returns updates and new state as trees, with the axes of the stacks."""
        updates, (leaves, treedef) = list(updates), jax.tree.flatten(state)
        for i, (stack, weight) in self.stacks.items():
            updates[i] = restacked(updates[i], stack.stack, weight)
        for k, owner in enumerate(self.owners):
            if owner in self.stacks:
                leaves[k] = stacked_rows(self.stacks[owner][0], leaves[k])
        return self.treedef.unflatten(updates), treedef.unflatten(leaves)
