"""AdaGrad and FTRL: step sizes from sums of squared gradients.

Libraries differ in where AdaGrad adds eps and in what shares an accumulator. This file
has the three rules that `optax.adagrad` (per coordinate, eps inside the square root)
does not cover. FTRL is for sparse linear models: many weights become exactly zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax._arguments import Scalar
from sparsejax.optim import _checks as checks
from sparsejax.optim._optimizers import base


class AdagradState(NamedTuple):
    """The number of steps, and sums of squared gradients per row or coordinate."""

    count: Any
    sum_of_squares: Any


class FtrlState(NamedTuple):
    """The number of steps; per coordinate, `z` and the sum of squared gradients `n`."""

    count: Any
    z: Any
    n: Any


def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: Scalar = 0.0,
    eps: Scalar = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """AdaGrad with one accumulator per row of a table.

    For the gradient g of row w with accumulator h:

      h' = h + mean(g^2)
      w' = w - learning_rate * g / (sqrt(h') + eps)

    The state is V numbers instead of V x D. A dense gradient updates all rows. A
    SelectedRows updates its rows (duplicates are summed first) and leaves the others
    unchanged, bit for bit. Use it alone or inside `lazy(optax.chain(...))`. In a leaf
    of rank 1, each element is a row.

    Args:
      learning_rate: a number or a schedule.
      initial_accumulator_value: the initial h, non-negative.
      eps: added outside the square root; `group_adagrad` adds it inside.

    Returns:
      `optax.GradientTransformationExtraArgs` with state
      `AdagradState(count, sum_of_squares)`; `sum_of_squares` has shape `[V]`, float32
      for narrower types.

    Raises:
      ValueError: an argument is negative.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> tx = sj.optim.rowwise_adagrad(0.1)
      >>> weights = jnp.zeros((1000, 2))
      >>> grad = sj.SelectedRows([3], jnp.array([[1.0, 7.0]]), height=1000)
      >>> updates, state = tx.update(grad, tx.init(weights))
      >>> updates.values  # 0.1 * g / sqrt((1 + 49) / 2)
      Array([[-0.02, -0.14]], dtype=float32)
      >>> state.sum_of_squares[2:5]
      Array([ 0., 25.,  0.], dtype=float32)

    References:
      Caffe2, `RowWiseSparseAdagrad`; FBGEMM, `EXACT_ROWWISE_ADAGRAD`; Duchi et al.,
      2011, "Adaptive Subgradient Methods".
    """
    return _adagrad(learning_rate, initial_accumulator_value, eps, by_row=True)


def group_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: Scalar = 0.0,
    eps: Scalar = 1e-5,
) -> optax.GradientTransformationExtraArgs:
    """MXNet's GroupAdaGrad: one accumulator per row, eps inside the square root.

    For the gradient g of row w with accumulator h:

      h' = h + mean(g^2)
      w' = w - learning_rate * g / sqrt(h' + eps)

    It differs from `rowwise_adagrad`, which adds eps outside the square root, only in
    this; the two have the same state. MXNet stores it as `[V, 1]`.

    Args:
      learning_rate: a number or a schedule.
      initial_accumulator_value: the initial h, non-negative.
      eps: added inside the square root.

    Returns:
      `optax.GradientTransformationExtraArgs` with the state of `rowwise_adagrad`.

    Raises:
      ValueError: an argument is negative.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> tx = sj.optim.group_adagrad(0.1, eps=75.0)
      >>> weights = jnp.zeros((1000, 2))
      >>> grad = sj.SelectedRows([3], jnp.array([[1.0, 7.0]]), height=1000)
      >>> tx.update(grad, tx.init(weights))[0].values  # 0.1 * g / sqrt(25 + 75)
      Array([[-0.01, -0.07]], dtype=float32)

    References:
      MXNet, `contrib.group_adagrad_update`.
    """
    return _adagrad(
        learning_rate, initial_accumulator_value, eps, by_row=True, eps_in_root=True
    )


def adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: Scalar = 0.0,
    eps: Scalar = 1e-10,
) -> optax.GradientTransformationExtraArgs:
    """AdaGrad with eps outside the square root, as in PyTorch, Caffe2 and others.

    For each coordinate w with gradient g and accumulator h:

      h' = h + g^2
      w' = w - learning_rate * g / (sqrt(h') + eps)

    `optax.adagrad` has `sqrt(h' + eps)`, and h starts at 0.1: where a loss is a mean
    over a large batch, the squares of a row's gradients are much smaller than that, and
    rows hardly move. PyTorch, Caffe2, Paddle and FBGEMM have the rule above.

    This optimizer accepts dense and SelectedRows gradients, alone or inside
    `lazy(optax.chain(...))`.

    Args:
      learning_rate: a number or a schedule.
      initial_accumulator_value: the initial h, non-negative.
      eps: added outside the square root. The defaults of others are 1e-10 (PyTorch),
        1e-5 (Caffe2) and 1e-6 (Paddle).

    Returns:
      `optax.GradientTransformationExtraArgs` with state
      `AdagradState(count, sum_of_squares)`; `sum_of_squares` has the shape of the
      parameters, float32 for narrower types.

    Raises:
      ValueError: an argument is negative.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> tx = sj.optim.adagrad(0.1, eps=1.0)
      >>> weights = jnp.zeros((1000, 2))
      >>> grad = sj.SelectedRows([3], jnp.array([[1.0, 3.0]]), height=1000)
      >>> tx.update(grad, tx.init(weights))[0].values
      Array([[-0.05 , -0.075]], dtype=float32)

    References:
      Duchi et al., 2011, "Adaptive Subgradient Methods"; PyTorch, `optim.Adagrad`;
      Caffe2, `SparseAdagrad`; PaddlePaddle, `adagrad`.
    """
    return _adagrad(learning_rate, initial_accumulator_value, eps, by_row=False)


def _adagrad(
    learning_rate: Any,
    initial_accumulator_value: Any,
    eps: Any,
    *,
    by_row: bool,
    eps_in_root: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """AdaGrad with one accumulator per row or per coordinate."""
    base.check_not_negative(
        learning_rate=learning_rate,
        initial_accumulator_value=initial_accumulator_value,
        eps=eps,
    )
    zeros = base.row_zeros if by_row else base.zeros

    def init(params):
        start = lambda x: x + base.like(initial_accumulator_value, x)
        sums = jax.tree.map(lambda p: start(zeros(p)), params)
        return AdagradState(jnp.zeros((), jnp.int32), sums)

    def update(updates, state, params=None):
        rate = base.at(learning_rate, state.count)

        def rule(g, w, h):
            gradient = g.astype(h.dtype)
            square = gradient * gradient
            new_h = h + (base.row_mean(square) if by_row else square)
            small = base.like(eps, h)
            root = base.root(new_h + small if eps_in_root else new_h)
            divisor = base.per_row(root if eps_in_root else root + small, g)
            step = -base.like(rate, h) * base.divide(gradient, divisor)
            return step.astype(base.result_dtype(g, w)), new_h

        return base.map_leaves(rule, updates, state, params, ["sum_of_squares"])

    return base.dense_or_rows(init, update, AdagradState)


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

        def rule(g, w, z, n):
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

        return base.map_leaves(rule, updates, state, params, ["z", "n"])

    return base.dense_or_rows(init, update, FtrlState)
