"""Whether lazy training equals dense training: what changes without a gradient.

`lazy(tx)` does not touch rows without a gradient, where a dense run gives them a zero
gradient. The two are equal if `tx` leaves a row with a zero gradient unchanged, weights
and state, whatever happened to it before:

    G[r] = 0   =>   U[r] = 0  and  S'[r] = S[r]

Like separability in `probe`, this is tested on random numbers: a few steps on a small
table, each with different rows, so that zero gradients occur for rows that were never
read, read one step ago, and read two steps ago. The comparison is bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax._arguments import PyTree
from sparsejax.optim._lazy import (
    optax_internals,
    probe,
    row_separable,
    state_leaves,
    trees,
)


WEIGHTS = "weights"  # in the result of `moving`
_TABLE = jax.ShapeDtypeStruct((probe.ROWS, 8), jnp.float32)


def is_lazy_exact(tx: optax.GradientTransformation, params: PyTree = None) -> bool:
    """Whether `lazy(tx)` trains exactly as `tx` does with dense gradients.

    For a gradient G that is zero outside the rows R, weights W and state S, with
    `U, S' = tx(G, S, W)`, it tests whether

      `U[r] = 0` and `S'[r] = S[r]` for each row r outside R.

    If so, skipping those rows is not an approximation. Otherwise, with momentum or
    weight decay for example, rows that are not read stay unchanged where a dense run
    would have moved them. Counts and schedules, which advance at every step, do not
    belong to rows and are not compared. The test runs `tx` on a small table.

    True for sgd, sign_sgd and adagrad, also after clipping by value or by global norm.
    False for momentum, adam and anything else whose state decays, for weight decay, and
    for anything that is not row-separable (see `is_row_separable`).

    Args:
      tx: an optax transformation.
      params: parameters (or ShapeDtypeStructs) for transformations that need them. The
        answer is then about all leaves that can be lifted. By default `tx` is tested on
        one table.

    Returns:
      bool. Never raises: a transformation that cannot be run is not exact.

    Example:
      >>> import optax
      >>> from sparsejax.optim import is_lazy_exact
      >>> is_lazy_exact(optax.adagrad(0.1)), is_lazy_exact(optax.adam(1e-3))
      (True, False)

    References:
      TensorFlow Addons, `LazyAdam`, which explains how lazy updates differ from Adam.
    """
    try:
        if params is None:
            return row_separable.is_row_separable(tx) and not moving(tx)
        leaves, treedef = trees.flatten(params)
        specs = tuple(map(trees.to_spec, leaves))
        arrays = [i for i, s in enumerate(specs) if row_separable.is_float_array(s)]
        tables = [i for i in arrays if len(specs[i].shape) > 1] or arrays
        failed = row_separable.Verdicts(tx).failures(treedef, specs, tables)
        lifted = [i for i in tables if i not in failed]
        return bool(lifted) and not moving(tx, treedef, specs, lifted)
    except Exception:
        return False


def moving(
    tx: Any,
    treedef: Any = jax.tree.structure(0),
    specs: Sequence[Any] = (_TABLE,),
    tables: Sequence[int] = (0,),
) -> list[str]:
    """The parts of a row that change although its gradient is zero.

    Args:
      tx: the transformation.
      treedef: structure of the parameters, see `trees.flatten`.
      specs: its leaves, see `trees.to_spec`.
      tables: which leaves are tables.

    Returns:
      `WEIGHTS` and paths of state leaves; empty if rows do not change.

    Raises:
      Whatever `tx` raises on such trees.
    """
    with probe.jax_defaults(), np.errstate(all="ignore"):
        specs = probe.small_tree(specs, tables)
        found = state_leaves.find(tx.init, treedef, specs, tables)
        required = optax_internals.required_extra_args(tx)
        extra_args = dict.fromkeys(required, np.float32(1))
        inner = optax.with_extra_args_support(tx)

        def update(grads, state, weights):
            args = treedef.unflatten(grads), state, treedef.unflatten(weights)
            updates, state = inner.update(*args, **extra_args)
            updates = treedef.flatten_up_to(updates)
            return [updates[t] for t in tables], jax.tree.leaves(state)

        rng = np.random.default_rng(0)
        weights = [probe.random_array(rng, s) for s in specs]
        init = jax.jit(lambda w: jax.tree.leaves(tx.init(treedef.unflatten(w))))
        init = probe.compile_probe(init, specs)
        state = [probe.to_host(leaf) for leaf in init(weights)]
        run = probe.compile_probe(jax.jit(update), specs, found.state, specs)
        paths, state_treedef = jax.tree_util.tree_flatten_with_path(found.state)
        moved, changed = False, set()
        direction = [probe.random_array(rng, s) for s in specs]
        for step, scale in enumerate(probe.SCALES):
            grads = [probe.random_gradient(rng, d, scale) for d in direction]
            resting = np.arange(probe.ROWS) % 3 != step % 3
            for t in tables:
                grads[t][resting] = 0
            updates, new = run(grads, state_treedef.unflatten(state), weights)
            for t, update_of_t in zip(tables, map(np.asarray, updates)):
                moved |= bool(np.any(update_of_t[resting] != 0))
                weights[t] = (weights[t] + update_of_t).astype(weights[t].dtype)
            new = [probe.to_host(leaf) for leaf in new]
            for k, owner in enumerate(found.owners):
                if owner is None:
                    continue
                old_rows, new_rows = state[k][resting], new[k][resting]
                has_nan = jnp.issubdtype(old_rows.dtype, jnp.inexact)
                if not np.array_equal(old_rows, new_rows, equal_nan=has_nan):
                    changed.add(k)
            state = [
                leaf if leaf.dtype == old.dtype else leaf.astype(old.dtype)
                for leaf, old in zip(new, state)
            ]
        names = [jax.tree_util.keystr(paths[k][0]) for k in sorted(changed)]
        return [WEIGHTS, *names] if moved else names
