"""A step that may be skipped; if so, nothing is computed and nothing changes.

If the step is skipped, `lax.cond` passes the state through. With donated buffers, XLA
copies no table on either branch (tests/optim/test_memory.py checks this), and a skipped
step costs no more than its empty updates.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import _compat


def update_if(
    wanted: jax.Array,
    tx: Any,
    make_grads: Callable[[], Any],
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, Any]:
    """`tx.update(make_grads(), state, params)` if `wanted`, else no update.

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
    axes = []

    def step(state, params):
        updates, new = tx.update(make_grads(), state, params, **extra_args)
        return updates, jax.tree.map(_keep_dtype, state, new)

    def look(state, params):
        updates, new = step(state, params)
        axes[:] = map(_compat.varying_axes, jax.tree.leaves((updates, new)))
        return updates

    spec = jax.eval_shape(look, state, params)

    def skip(state, params):
        del params
        # Strong types, as after a step, so that the caller is compiled once.
        state = jax.tree.map(_strong, state)
        # Row ids of zeros are empty slots.
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec), state

    def with_axes(branch):
        """Makes the results of both branches vary over the same `shard_map` axes."""

        def run(state, params):
            of_skip = map(_compat.varying_axes, jax.tree.leaves(skip(state, params)))
            of_both = [a | b for a, b in zip(axes, of_skip)]
            leaves, treedef = jax.tree.flatten(branch(state, params))
            return treedef.unflatten(map(_compat.to_varying, leaves, of_both))

        return run

    return lax.cond(wanted, with_axes(step), with_axes(skip), state, params)


def _keep_dtype(old: Any, new: Any) -> jax.Array:
    old, new = jnp.asarray(old), jnp.asarray(new)  # one may be a number of Python's
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _strong(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return lax.convert_element_type(x, x.dtype) if x.weak_type else x
