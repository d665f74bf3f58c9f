"""dynamic_loss_scale: gradients in float16 that neither vanish nor overflow.

float16 ends at 65,504 above and near 6e-8 below. The loss is multiplied by a scale
that is as large as goes well, and gradients are divided by it. Where that is done
matters with rows: two slots of one row may be finite and their sum not, so rows are
unscaled and summed in float32, and it is the sums that are looked at.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import _arguments
from sparsejax._rows import SelectedRows, indexing
from sparsejax.optim._lazy import follow, parts, separable
from sparsejax.optim._wrappers import conditional


CALL = "sparsejax.optim.dynamic_loss_scale"

_NOT_LAZY = (
    CALL + ": takes a transformation that takes SelectedRows, such as "
    "lazy(optax.adam(1e-3)), got {found}."
)
_NUMBERS = (
    CALL + ": wants initial_scale >= 1, factor > 1 and growth_interval >= 1, got "
    "{initial_scale}, {factor} and {growth_interval}."
)


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`.

    Attributes:
      scale: float32, what to multiply the next loss by.
      good_steps: int32, finite steps since the scale last changed.
      skipped: int32, steps left out because a gradient was not finite.
      inner_state: state of `tx`.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    inner_state: Any


def dynamic_loss_scale(
    tx: Any,
    initial_scale: float = 2.0**15,
    *,
    growth_interval: int = 2000,
    factor: float = 2.0,
) -> optax.GradientTransformationExtraArgs:
    """Loss scaling for gradients in float16, skipping steps that overflow.

    Multiply the loss by `state.scale`, and hand the scaled gradients in:

      loss, grads = sj.value_and_grad(lambda p: loss_fn(p) * state.scale)(params)
      updates, state = tx.update(grads, state, params)

    With G the scaled gradients, duplicates of a row summed in float32, `tx` gets
    G / scale in float32. If a number of G is infinite or NaN, the step is left out:
    updates are zero (a SelectedRows without a filled slot), the state of `tx` stays as
    it is, and the scale is divided by `factor`, down to 1. After `growth_interval`
    finite steps in a row it is multiplied by `factor`.

    Args:
      tx: a transformation that takes SelectedRows: `lazy(...)`, or one of this module;
        for parameters of 16 bits themselves, `rounding(lazy(...), ...)`.
      initial_scale: float, at least 1; a power of two, as is `factor`, rounds nothing.
      growth_interval: int, finite steps before the scale grows.
      factor: float, by how much it grows and shrinks.

    Returns:
      `optax.GradientTransformationExtraArgs` with a `LossScaleState`.

    Raises:
      TypeError: `tx` is no transformation.
      ValueError: numbers out of range.

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
    if not parts.is_transformation(tx):
        raise TypeError(_NOT_LAZY.format(found=_arguments.kind_of(tx)))
    numbers = dict(
        initial_scale=initial_scale, factor=factor, growth_interval=growth_interval
    )
    try:
        known = initial_scale >= 1 and factor > 1 and growth_interval >= 1
    except TypeError:  # a string, or None
        known = False
    if not known:
        raise ValueError(
            _NUMBERS.format(**{k: _arguments.show(x) for k, x in numbers.items()})
        )
    inner = optax.with_extra_args_support(tx)
    by = np.float32(factor)

    def init(params):
        scale = jnp.asarray(initial_scale, jnp.float32)
        # Each an array of its own: no buffer can be donated twice.
        good_steps, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return LossScaleState(scale, good_steps, skipped, tx.init(params))

    def update(updates, state, params=None, **extra_args):
        parts.check_state(CALL, state, LossScaleState)
        leaves, treedef = separable.flatten(updates)
        grads = [_unscaled(g, state.scale) for g in leaves]
        numbers = [g.values if isinstance(g, SelectedRows) else g for g in grads]
        finite = jnp.asarray(True)
        for x in numbers:
            if not follow.is_leaf(x):
                finite &= jnp.all(jnp.isfinite(x))
        updates, inner_state = conditional.update_if(
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

    return optax.GradientTransformationExtraArgs(init, update)


def _unscaled(grad: Any, scale: jax.Array) -> Any:
    """A gradient over the scale, merged, in float32 or wider."""
    if follow.is_leaf(grad):
        return grad
    if isinstance(grad, SelectedRows):
        return grad.map(lambda v: _unscaled(v, scale)).coalesce()
    grad = jnp.asarray(grad)
    grad = grad.astype(indexing.accumulator_dtype(grad.dtype))
    return grad / scale.astype(grad.dtype)
