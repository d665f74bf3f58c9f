"""Adam and LAMB with one second moment, or one step count, per row.

All share one rule. For the gradient g of a row w after t steps:

  mu' = b1 * mu + (1 - b1) * g
  nu' = b2 * nu + (1 - b2) * g^2            or mean(g^2), one number per row
  r = mu' / (1 - b1^t) / (sqrt(nu' / (1 - b2^t)) + eps)

and the update is computed from r. By default t is the number of all steps, as in other
libraries. With a count per row, t is how often that row was touched: a row that is
first read at step 10,000 then takes a normal first step, not one that is too long
(since its moments still start at zero).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from sparsejax._arguments import Scalar
from sparsejax.optim import _checks as checks
from sparsejax.optim._optimizers import base


class RowwiseAdamState(NamedTuple):
    """The number of steps, first and second moments, and touches per row or None."""

    count: Any
    mu: Any
    nu: Any
    row_count: Any = None


def rowwise_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    row_count: bool = False,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam with one second moment per row of a table.

    For the gradient g of row w at step t = 1, 2, ...:

      mu' = b1 * mu + (1 - b1) * g
      nu' = b2 * nu + (1 - b2) * mean(g^2)
      w' = w - learning_rate * mu' / (1 - b1^t) / (sqrt(nu' / (1 - b2^t)) + eps)

    The state is V x (D + 1) numbers instead of V x 2 D. A dense gradient updates all
    rows. A SelectedRows updates its rows (duplicates are summed first) and leaves the
    others unchanged, bit for bit. Use it alone or inside `lazy(optax.chain(...))`. In a
    leaf of rank 1, each element is a row.

    Args:
      learning_rate: a number or a schedule.
      b1, b2: decays of the first and of the second moment, in [0, 1).
      eps: added to the square root of the corrected moment, as in optax and FBGEMM.
        Caffe2 adds it before the correction, where it is `eps / sqrt(1 - b2^t)`.
      row_count: True corrects the bias by how often each row was touched, instead
        of the number of steps.
      mu_dtype: dtype of `mu`; None for the parameter's, but at least float32.

    Returns:
      `optax.GradientTransformationExtraArgs` with state
      `RowwiseAdamState(count, mu, nu, row_count)`: `mu` `[V, ...]`, `nu` `[V]`, and
      `row_count` int32 `[V]`, None without `row_count=True`.

    Raises:
      ValueError: an argument is out of its range.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> tx = sj.optim.rowwise_adam(0.1)
      >>> weights = jnp.zeros((1000, 2))
      >>> grad = sj.SelectedRows([3], jnp.array([[1.0, 7.0]]), height=1000)
      >>> updates, state = tx.update(grad, tx.init(weights))
      >>> updates.values  # 0.1 * g / sqrt((1 + 49) / 2)
      Array([[-0.02, -0.14]], dtype=float32)
      >>> state.mu.shape, state.nu.shape
      ((1000, 2), (1000,))

    References:
      Caffe2, `RowWiseSparseAdam`; FBGEMM, `PARTIAL_ROWWISE_ADAM`; Kingma and Ba, 2015,
      "Adam".
    """
    return _adam(learning_rate, b1, b2, eps, True, row_count, mu_dtype)


def row_count_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam with bias correction by how often each row was touched.

    For each coordinate of a row that is touched for the k-th time:

      mu' = b1 * mu + (1 - b1) * g
      nu' = b2 * nu + (1 - b2) * g^2
      w' = w - learning_rate * mu' / (1 - b1^k) / (sqrt(nu' / (1 - b2^k)) + eps)

    `optax.adam` has the number of all steps instead of k. There, a row that is first
    read late takes a step of about `(1 - b1) / sqrt(1 - b2)` = 3 learning rates; here
    it takes a step of one. Rows touched at every step are updated as by `optax.adam`.

    Args:
      learning_rate: a number or a schedule of the (global) step.
      b1, b2: decays of the first and of the second moment, in [0, 1).
      eps: added to the square root of the corrected moment, as in optax.
      mu_dtype: dtype of `mu`; None for the parameter's, but at least float32.

    Returns:
      `optax.GradientTransformationExtraArgs` with state
      `RowwiseAdamState(count, mu, nu, row_count)`: `mu` and `nu` of the parameters'
      shape, `row_count` int32 `[V]`.

    Raises:
      ValueError: an argument is out of its range.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> tx = sj.optim.row_count_adam(0.1)
      >>> weights = jnp.zeros((1000, 2))
      >>> state = tx.init(weights)
      >>> for row in (3, 3, 8):
      ...     grad = sj.SelectedRows([row], jnp.array([[1.0, 7.0]]), height=1000)
      ...     updates, state = tx.update(grad, state)
      >>> updates.values.round(6)  # the third step, but the first of row 8
      Array([[-0.1, -0.1]], dtype=float32)
      >>> state.row_count[3], state.row_count[8]
      (Array(2, dtype=int32), Array(1, dtype=int32))

    References:
      FBGEMM, Adam with `use_rowwise_bias_correction`.
    """
    return _adam(learning_rate, b1, b2, eps, False, True, mu_dtype)


def partial_rowwise_lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    row_count: bool = False,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """LAMB by rows: one second moment and one trust ratio per row of a table.

    For the gradient g of row w at step t = 1, 2, ...:

      mu' = b1 * mu + (1 - b1) * g
      nu' = b2 * nu + (1 - b2) * mean(g^2)
      r = mu' / (1 - b1^t) / (sqrt(nu' / (1 - b2^t)) + eps) + weight_decay * w
      w' = w - learning_rate * |w| / |r| * r

    with the norms of the row. If either norm is 0, the ratio is 1, as in `optax.lamb`;
    FBGEMM does not update a row of zeros. `optax.lamb` uses the norms of the whole
    table, so it cannot be lifted to rows. Otherwise this is `rowwise_adam`.

    Args:
      learning_rate: a number or a schedule.
      b1, b2: decays of the first and of the second moment, in [0, 1).
      eps: added to the square root of the corrected moment.
      weight_decay: the multiple of the weights added to the step before scaling.
      row_count, mu_dtype: as in `rowwise_adam`.

    Returns:
      `optax.GradientTransformationExtraArgs` with the state of `rowwise_adam`. `update`
      needs `params`.

    Raises:
      ValueError: an argument is out of its range; at update, `params` is missing.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> tx = sj.optim.partial_rowwise_lamb(0.1)
      >>> weights = jnp.full((1000, 2), 5.0)
      >>> grad = sj.SelectedRows([3], jnp.array([[1.0, 7.0]]), height=1000)
      >>> updates, state = tx.update(grad, tx.init(weights), weights)
      >>> updates.values.round(6)  # 0.1 * |w| = 0.707 in the direction of g
      Array([[-0.1, -0.7]], dtype=float32)

    References:
      FBGEMM, `PARTIAL_ROWWISE_LAMB`; You et al., 2020, "Large Batch Optimization for
      Deep Learning: Training BERT in 76 minutes".
    """
    base.check_not_negative(weight_decay=weight_decay)

    def direction(r, w):
        checks.require_params(
            w, "LAMB scales the step of each row by the norm of its weights"
        )
        w = jnp.asarray(w).astype(r.dtype)
        r = r + base.like(weight_decay, r) * w
        weight_norm = base.root(base.row_sum(w * w))
        norm = base.root(base.row_sum(r * r))
        is_nonzero = (weight_norm > 0) & (norm > 0)
        ratio = jnp.where(is_nonzero, base.divide(weight_norm, norm), base.like(1, r))
        return base.per_row(ratio, r) * r

    return _adam(learning_rate, b1, b2, eps, True, row_count, mu_dtype, direction)


def _adam(
    learning_rate: Any,
    b1: Any,
    b2: Any,
    eps: Any,
    rowwise_nu: bool,  # one second moment a row
    by_row_count: bool,
    mu_dtype: Any,
    direction: Callable = lambda r, w: r,
) -> optax.GradientTransformationExtraArgs:
    """Takes steps of `-learning_rate * direction(r, w)`, with r as above."""
    base.check_decay_rates(b1=b1, b2=b2)
    base.check_not_negative(learning_rate=learning_rate, eps=eps)
    zeros = base.row_zeros if rowwise_nu else base.zeros

    def init(params):
        mu = jax.tree.map(lambda p: base.zeros(p, mu_dtype), params)
        nu = jax.tree.map(zeros, params)
        touched = None
        if by_row_count:
            touched = jax.tree.map(lambda p: base.row_zeros(p, jnp.int32), params)
        return RowwiseAdamState(jnp.zeros((), jnp.int32), mu, nu, touched)

    def update(updates, state, params=None):
        rate = base.at(learning_rate, state.count)

        def rule(g, w, mu, nu, count=state.count):
            count = optax.safe_increment(count)
            gradient = g.astype(nu.dtype)
            square = gradient * gradient
            square = base.row_mean(square) if rowwise_nu else square
            new_mu = _moment(b1, mu.astype(nu.dtype), gradient)
            new_nu = _moment(b2, nu, square)

            first, second = (base.bias_correction(b, count, nu.dtype) for b in (b1, b2))
            divisor = base.root(new_nu / base.per_row(second, nu)) + base.like(eps, nu)
            divisor = base.per_row(divisor, g)
            r = base.divide(new_mu / base.per_row(first, g), divisor)
            step = -base.like(rate, nu) * direction(r, w)
            step = step.astype(base.result_dtype(g, w))
            return step, new_mu.astype(mu.dtype), new_nu, count

        fields = ["mu", "nu", "row_count"] if by_row_count else ["mu", "nu"]
        return base.map_leaves(rule, updates, state, params, fields)

    return base.dense_or_rows(init, update, RowwiseAdamState)


def _moment(decay: Any, old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns `decay * old + (1 - decay) * new`; `1 - decay` as precise as given."""
    return base.like(decay, old) * old + base.like(1 - decay, old) * new
