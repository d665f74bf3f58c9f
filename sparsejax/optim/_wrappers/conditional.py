"""A step that may be left out: nothing moves then, and nothing is computed.

`lax.cond` hands the untouched branch's state through as it is. With donated buffers XLA
makes no copy of the tables in it, on either branch (a test keeps it so), and a step
that is left out costs what its empty updates cost.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import _compat
from sparsejax._rows import SelectedRows, is_selected_rows
from sparsejax.transform.table import vary


def update_if(
    wanted: jax.Array,
    tx: Any,
    make_grads: Callable[[], Any],
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, Any]:
    """`tx.update(make_grads(), state, params)` where `wanted` holds, else no update.

    Args:
      wanted: bool scalar.
      tx: a transformation that takes extra arguments.
      make_grads: gives the gradients, SelectedRows among them; called where they are
        needed only.
      state: of `tx`.
      params: parameters, or None.
      extra_args: extra arguments of `tx.update`.

    Returns:
      Updates and state. Where `wanted` does not hold, updates are zero, each
      SelectedRows without a filled slot, and the state is the one handed in. Leaves of
      the state keep their types, so that both branches agree and loops can carry it.
    """
    axes = []

    def step(state, params):
        updates, new = tx.update(make_grads(), state, params, **extra_args)
        return updates, jax.tree.map(lambda x, old: _as_type_of(old, x), new, state)

    def look(state, params):
        updates, new = step(state, params)
        axes[:] = map(_compat.varying_axes, jax.tree.leaves((updates, new)))
        return updates

    spec = jax.eval_shape(look, state, params)

    def rest(state, params):
        del params
        return jax.tree.map(_nothing, spec, is_leaf=is_selected_rows), state

    def alike(branch):
        """With results that vary over the same axes of a mesh inside `shard_map`."""

        def run(state, params):
            of_rest = map(_compat.varying_axes, jax.tree.leaves(rest(state, params)))
            everywhere = [a | b for a, b in zip(axes, of_rest)]
            leaves, treedef = jax.tree.flatten(branch(state, params))
            return treedef.unflatten(map(vary, leaves, everywhere))

        return run

    return lax.cond(wanted, alike(step), alike(rest), state, params)


def _as_type_of(old: Any, new: Any) -> jax.Array:
    old = jnp.asarray(old)
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _nothing(spec: Any) -> Any:
    if not isinstance(spec, SelectedRows):
        return jnp.zeros(spec.shape, spec.dtype)
    rows = jnp.full(spec.rows.shape, spec.height, spec.rows.dtype)
    # Of whichever kind: a subclass has more that is static.
    return jax.tree.structure(spec).unflatten([rows, _nothing(spec.values)])
