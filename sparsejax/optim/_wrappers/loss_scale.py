"""dynamic_loss_scale: float16 gradients that neither underflow nor overflow.

float16 represents magnitudes from about 6e-8 to 65,504. The loss is multiplied by a
scale, as large as possible, and gradients are divided by it. With rows the order
matters: two slots of one row may be finite while their sum is not. So rows are unscaled
and summed in float32, and the sums are tested.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax._rows import SelectedRows, indexing
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._lazy import state_sharding
from sparsejax.optim._optimizers import base
from sparsejax.optim._wrappers.accumulate import update_if


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`.

    Attributes:
      scale: float32, the factor for the next loss.
      good_steps: int32, finite steps since the scale last changed.
      skipped: int32, steps skipped because a gradient was not finite.
      inner_state: state of `tx`.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    inner_state: Any


def dynamic_loss_scale(
    tx: optax.GradientTransformation,
    initial_scale: float = 2.0**15,
    *,
    growth_interval: int = 2000,
    factor: float = 2.0,
) -> optax.GradientTransformationExtraArgs:
    """Dynamic loss scaling for float16 gradients; skips steps that overflow.

    Multiply the loss by `state.scale`, and pass the scaled gradients:

      loss, grads = sj.value_and_grad(lambda p: loss_fn(p) * state.scale)(params)
      updates, state = tx.update(grads, state, params)

    For the scaled gradients G, with duplicates summed in float32, `tx` gets G / scale
    in float32. If any element of G is infinite or NaN, the step is skipped: updates are
    zero (a SelectedRows without a filled slot), the state of `tx` does not change, and
    the scale is divided by `factor`, down to 1. After `growth_interval` consecutive
    finite steps, the scale is multiplied by `factor`.

    Args:
      tx: a transformation that accepts SelectedRows, such as `lazy(...)`.
      initial_scale: float, at least 1. If it and `factor` are powers of two, scaling
        does not round.
      growth_interval: int, finite steps before the scale grows.
      factor: float, by which the scale grows and shrinks.

    Returns:
      `optax.GradientTransformationExtraArgs` with a `LossScaleState`.

    Raises:
      TypeError: `tx` is not a transformation.
      ValueError: an argument is out of its range.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> tx = sj.optim.dynamic_loss_scale(sj.optim.lazy(optax.sgd(1.0)), 1024.0)
      >>> table = jnp.zeros((9, 1))
      >>> state = tx.init(table)
      >>> for value in (512.0, jnp.inf):
      ...     values = jnp.array([[value], [value]], jnp.float16)
      ...     grad = sj.SelectedRows(jnp.array([3, 3]), values, height=9)
      ...     updates, state = tx.update(grad, state, table)
      ...     table = optax.apply_updates(table, updates)
      ...     print(table[3], state.scale, state.skipped)
      [-1.] 1024.0 0
      [-1.] 512.0 1

    References:
      Micikevicius et al., 2018, "Mixed Precision Training"; NVIDIA Apex, dynamic loss
      scaling; `jmp.DynamicLossScale`.
    """
    checks.check_transformation(tx, "lazy(optax.adam(1e-3))")
    at_least_one = "at least 1", lambda x: x >= 1
    base.check("initial_scale", initial_scale, *at_least_one)
    base.check("growth_interval", growth_interval, *at_least_one)
    base.check("factor", factor, "more than 1", lambda x: x > 1)
    inner = optax.with_extra_args_support(tx)
    by = np.float32(factor)

    def init(params):
        # Separate arrays, since no buffer can be donated twice.
        zero = lambda: jnp.zeros((), jnp.int32)
        counters = lambda _: (jnp.asarray(initial_scale, jnp.float32), zero(), zero())
        scale, good_steps, skipped = state_sharding.init(counters, params)
        return LossScaleState(scale, good_steps, skipped, tx.init(params))

    def update(updates, state, params=None, **extra_args):
        checks.check_state(state, LossScaleState)
        leaves, treedef = trees.flatten(updates)
        grads = [_unscale(g, state.scale) for g in leaves]
        values = [g.values if isinstance(g, SelectedRows) else g for g in grads]
        finite = jnp.asarray(True)
        for x in jax.tree.leaves(values):
            finite &= jnp.all(jnp.isfinite(x))
        updates, inner_state = update_if(
            finite,
            inner,
            lambda: treedef.unflatten(grads),
            state.inner_state,
            params,
            extra_args,
        )
        good_steps = jnp.where(finite, state.good_steps + 1, 0)
        grows = good_steps >= growth_interval
        larger = jnp.where(grows, state.scale * by, state.scale)
        larger = jnp.where(jnp.isfinite(larger), larger, state.scale)
        smaller = jnp.maximum(state.scale / by, np.float32(1))
        return updates, LossScaleState(
            jnp.where(finite, larger, smaller),
            jnp.where(grows, 0, good_steps),
            state.skipped + (~finite).astype(jnp.int32),
            inner_state,
        )

    return trees.transformation(init, update)


def _unscale(grad: Any, scale: jax.Array) -> Any:
    """Divides a gradient by the scale, merging duplicates, in float32 or wider."""
    if trees.is_none_or_masked(grad):
        return grad
    if isinstance(grad, SelectedRows):
        return grad.map(lambda v: _unscale(v, scale)).coalesce()
    grad = jnp.asarray(grad)
    grad = grad.astype(indexing.accumulator_dtype(grad.dtype))
    return grad / scale.astype(grad.dtype)
