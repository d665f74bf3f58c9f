"""AdaGrad as embeddings are trained with it: one accumulator a row, or one a number.

The peers differ in where eps is and in what an accumulator belongs to; this file has
the three rules that `optax.adagrad` (a number, eps inside of the root) does not give.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax._rows import indexing
from sparsejax.optim._optimizers import both_kinds as _kinds


class AdagradState(NamedTuple):
    """Steps taken, and sums of squared gradients: one a row, or one a number."""

    count: Any
    sum_of_squares: Any


def rowwise_adagrad(
    learning_rate: Any, initial_accumulator_value: Any = 0.0, eps: Any = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """AdaGrad with one accumulator for each row of a table.

    For the gradient g of row w with accumulator h:

      h' = h + mean(g^2)
      w' = w - learning_rate * g / (sqrt(h') + eps)

    State is V numbers instead of V x D. It works with dense gradients, where all rows
    are updated, and with SelectedRows, where the rows named are (duplicates summed
    first) and the others keep their bits; bare or inside of `lazy(optax.chain(...))`.
    In a leaf of rank 1 each element is a row.

    Args:
      learning_rate: a number or a schedule of the step.
      initial_accumulator_value: h at the start, not negative.
      eps: added beside the root. `group_adagrad` has it inside.

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
    _check("rowwise_adagrad", learning_rate, initial_accumulator_value, eps)
    beside = lambda h: _kinds.root(h) + _kinds.like(eps, h)
    return _adagrad(learning_rate, initial_accumulator_value, beside, by_row=True)


def group_adagrad(
    learning_rate: Any, initial_accumulator_value: Any = 0.0, eps: Any = 1e-5
) -> optax.GradientTransformationExtraArgs:
    """MXNet's GroupAdaGrad: one accumulator for each row, eps inside of the root.

    For the gradient g of row w with accumulator h:

      h' = h + mean(g^2)
      w' = w - learning_rate * g / sqrt(h' + eps)

    Otherwise it is `rowwise_adagrad`, whose eps is beside the root; its state goes with
    this one as well. MXNet keeps it as `[V, 1]`.

    Args:
      learning_rate: a number or a schedule of the step.
      initial_accumulator_value: h at the start, not negative.
      eps: added inside of the root.

    Returns:
      `optax.GradientTransformationExtraArgs` with state
      `AdagradState(count, sum_of_squares)`; `sum_of_squares` has shape `[V]`, float32
      for narrower types.

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
    _check("group_adagrad", learning_rate, initial_accumulator_value, eps)
    inside = lambda h: _kinds.root(h + _kinds.like(eps, h))
    return _adagrad(learning_rate, initial_accumulator_value, inside, by_row=True)


def adagrad(
    learning_rate: Any, initial_accumulator_value: Any = 0.0, eps: Any = 1e-10
) -> optax.GradientTransformationExtraArgs:
    """AdaGrad with eps beside the root, as PyTorch, Caffe2, Paddle and FBGEMM have it.

    For each coordinate w with gradient g and accumulator h:

      h' = h + g^2
      w' = w - learning_rate * g / (sqrt(h') + eps)

    `optax.adagrad` has `sqrt(h' + eps)`, and starts h at 0.1. It works with dense and
    SelectedRows gradients, bare or inside of `lazy(optax.chain(...))`.

    Args:
      learning_rate: a number or a schedule of the step.
      initial_accumulator_value: h at the start, not negative.
      eps: added beside the root. PyTorch's is 1e-10, Caffe2's 1e-5, Paddle's 1e-6.

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
    _check("adagrad", learning_rate, initial_accumulator_value, eps)
    beside = lambda h: _kinds.root(h) + _kinds.like(eps, h)
    return _adagrad(learning_rate, initial_accumulator_value, beside, by_row=False)


def _check(name: str, learning_rate: Any, initial: Any, eps: Any) -> None:
    call = f"sparsejax.optim.{name}"
    _kinds.check_not_negative(
        call, learning_rate=learning_rate, initial_accumulator_value=initial, eps=eps
    )


def _adagrad(
    learning_rate: Any, initial: Any, scale: Callable, by_row: bool
) -> optax.GradientTransformationExtraArgs:
    """The rule; `scale` makes of the accumulator what the gradient is divided by."""

    def init(params):
        def start(p):
            zeros = jnp.zeros_like(p, dtype=indexing.accumulator_dtype(p.dtype))
            zeros = _kinds.row_zeros(p) if by_row else zeros
            return zeros + _kinds.like(initial, zeros)

        return AdagradState(jnp.zeros((), jnp.int32), jax.tree.map(start, params))

    def update(updates, state, params=None):
        rate = _kinds.at(learning_rate, state.count)

        def rule(g, h, w):
            gradient = g.astype(h.dtype)
            square = gradient * gradient
            new_h = h + (_kinds.row_mean(square) if by_row else square)
            divisor = scale(new_h)
            divisor = _kinds.per_row(divisor, g) if by_row else divisor
            step = -_kinds.like(rate, h) * _kinds.divide(gradient, divisor)
            return step.astype(_kinds.result_dtype(g, w)), new_h

        states = (state.sum_of_squares,)
        updates, sums = _kinds.map_leaves(rule, updates, states, params)
        return updates, AdagradState(optax.safe_increment(state.count), sums)

    return _kinds.both_kinds(init, update)
