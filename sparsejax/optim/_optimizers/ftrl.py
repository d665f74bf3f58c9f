"""FTRL-proximal, for sparse linear models: many weights become exactly zero."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax._arguments import Scalar
from sparsejax.optim import _checks as checks
from sparsejax.optim._optimizers import base


class FtrlState(NamedTuple):
    """The number of steps; per coordinate, `z` and the sum of squared gradients `n`."""

    count: Any
    z: Any
    n: Any


def ftrl(
    learning_rate: optax.ScalarOrSchedule,
    beta: Scalar = 1.0,
    l1: Scalar = 0.0,
    l2: Scalar = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """FTRL-proximal with a learning rate per coordinate.

    For the gradient g at weights w and the learning rate lr, for each coordinate:

      n' = n + g^2
      z' = z + g - (sqrt(n') - sqrt(n)) / lr * w
      w' = 0                                                        where |z'| <= l1
      w' = (sign(z') * l1 - z') / ((beta + sqrt(n')) / lr + l2)  elsewhere

    The update is `w' - w`. Where w' is 0, adding it to w gives exactly 0.

    The first step that touches a row forgets its initial weights, since z starts at 0.
    A dense gradient updates all rows (those without history become 0), a SelectedRows
    only its own. Use it alone or inside `lazy(optax.chain(...))`.

    Args:
      learning_rate: a positive number or a schedule, alpha in the paper. The current
        value is used throughout, as in Caffe2 and MXNet.
      beta: keeps the first steps small; with `beta=0` the first step is about lr.
      l1: strength of the L1 penalty, which makes weights exactly zero.
      l2: strength of the L2 penalty in units of the gradient: `l2 / 2 * w^2` per step.

    Returns:
      `optax.GradientTransformationExtraArgs` with state `FtrlState(count, z, n)`; `z`
      and `n` have the shape of the parameters, float32 for narrower types. `update`
      needs `params`.

    Raises:
      ValueError: an argument is out of its range, or `params` is missing.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> tx = sj.optim.ftrl(learning_rate=0.5, l1=1.0)
      >>> weights = jnp.zeros((1000, 2))
      >>> state = tx.init(weights)
      >>> grad = sj.SelectedRows([3], jnp.array([[4.0, 0.5]]), height=1000)
      >>> updates, state = tx.update(grad, state, weights)
      >>> optax.apply_updates(weights, updates)[3]
      Array([-0.3, 0. ], dtype=float32)
      >>> state.z[3]
      Array([4. , 0.5], dtype=float32)

    References:
      McMahan et al., 2013, "Ad Click Prediction: a View from the Trenches".
    """
    positive = "a positive number or a schedule"
    base.check("learning_rate", learning_rate, positive, lambda x: x > 0)
    base.check_not_negative(beta=beta, l1=l1, l2=l2)

    def init(params):
        z, n = jax.tree.map(base.zeros, params), jax.tree.map(base.zeros, params)
        return FtrlState(jnp.zeros((), jnp.int32), z, n)

    def update(updates, state, params=None):
        checks.require_params(
            params, "FTRL returns the difference of new and old weights"
        )
        rate = base.at(learning_rate, state.count)

        def rule(g, z, n, w):
            old = jnp.asarray(w).astype(z.dtype)
            gradient = g.astype(z.dtype)
            square = gradient * gradient
            new_n = n + square
            # sqrt(n') - sqrt(n), without cancellation for large n.
            growth = base.divide(square, base.root(new_n) + base.root(n))
            new_z = z + gradient - growth / base.like(rate, z) * old
            strength = base.like(beta, z) + base.root(new_n)
            strength = strength / base.like(rate, z) + base.like(l2, z)
            limit = base.like(l1, z)
            kept = base.divide(jnp.sign(new_z) * limit - new_z, strength)
            new = jnp.where(jnp.abs(new_z) > limit, kept, base.like(0, z))
            # Never in a narrower dtype than the weights: old + (0 - old) must be 0.
            return (new - old).astype(base.result_dtype(g, w)), new_z, new_n

        updates, z, n = base.map_leaves(rule, updates, (state.z, state.n), params)
        return updates, FtrlState(optax.safe_increment(state.count), z, n)

    return base.dense_or_rows(init, update, FtrlState)
