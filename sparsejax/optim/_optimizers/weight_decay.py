"""Decoupled weight decay that makes up for missed steps when a row is next touched.

AdamW multiplies every weight by `1 - lr_t * d` at every step. Under `lazy`, a row
without a gradient does not change, so rare rows hardly decay. Here a touched row gets
the decay of all steps that it missed at once, as a product:

  w' = w * prod_{s = last + 1 .. t} (1 - lr_s * d) + update

The state has one sum, L_t = sum_{s <= t} log(1 - lr_s * d), and for each row the
value of L when it was last decayed. The product is then exp(L_t - L_last), for any
schedule.

L grows while the differences stay small, so float32 would lose them: after a million
steps of 1e-5, a single step would be accurate only to a few percent. So L is stored as
the sum of two floats, which doubles its precision.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax._arguments import PyTree, Scalar
from sparsejax._rows import indexing
from sparsejax.optim import _checks as checks
from sparsejax.optim._optimizers import base


class WeightDecayState(NamedTuple):
    """The number of steps; the sum L as two floats `[2]`; per row its L `[V, 2]`."""

    count: Any
    log_decay: jax.Array
    decayed: Any


def weight_decay(
    weight_decay: Scalar, learning_rate: optax.ScalarOrSchedule = 1.0
) -> optax.GradientTransformationExtraArgs:
    """Decoupled weight decay; a touched row also gets the decay that it missed.

    At step t, a touched row w that was last touched at step t - k becomes

      w' = w * (1 - lr_t * d) * ... * (1 - lr_{t-k+1} * d) + update

    with d the argument `weight_decay`, for any schedule of lr. The other rows stay
    unchanged, bit for bit. Put it last in a chain:
    `chain(adam(lr), weight_decay(d, lr))` is `optax.adamw(lr, weight_decay=d)` for rows
    touched at every step; `optax.adamw` inside `lazy` decays a row only at the steps
    that read it. `flush_weight_decay` brings all rows up to date, for evaluation and
    export. Use it alone or inside `lazy(optax.chain(...))`.

    Args:
      weight_decay: its strength, as in `optax.adamw`; non-negative.
      learning_rate: of the optimizer, a number or a schedule.

    Returns:
      `optax.GradientTransformationExtraArgs` with state
      `WeightDecayState(count, log_decay, decayed)`; `decayed` has shape `[V, 2]`.
      `update` needs `params`.

    Raises:
      ValueError: an argument is out of its range, or `params` is missing.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> lr = 0.5
      >>> tx = optax.chain(optax.sgd(lr), sj.optim.weight_decay(0.2, lr))
      >>> tx = sj.optim.lazy(tx)
      >>> weights = jnp.ones((1000, 2))
      >>> state = tx.init(weights)
      >>> for row in (3, 8, 3):
      ...     grad = sj.SelectedRows([row], jnp.zeros((1, 2)), height=1000)
      ...     updates, state = tx.update(grad, state, weights)
      ...     weights = optax.apply_updates(weights, updates)
      >>> weights[3, 0], weights[8, 0]  # 0.9 ** 3 and 0.9 ** 2
      (Array(0.729, dtype=float32), Array(0.81, dtype=float32))
      >>> weights, state = sj.optim.flush_weight_decay(weights, state)
      >>> weights[8, 0].round(6), weights[5, 0].round(6)
      (Array(0.729, dtype=float32), Array(0.729, dtype=float32))

    References:
      Loshchilov and Hutter, 2019, "Decoupled Weight Decay Regularization".
    """
    base.check_not_negative(weight_decay=weight_decay, learning_rate=learning_rate)
    if not callable(learning_rate):
        lost = weight_decay * learning_rate
        name = "weight_decay * learning_rate"
        base.check(name, lost, "less than 1: a step removes it", lambda x: x < 1)

    def init(params):
        dtype = base.widest_dtype(params)
        start = lambda p: jnp.zeros((*jnp.shape(p)[:1], 2), dtype)
        count, log_decay = jnp.zeros((), jnp.int32), jnp.zeros((2,), dtype)
        return WeightDecayState(count, log_decay, jax.tree.map(start, params))

    def update(updates, state, params=None):
        checks.require_params(params, "the decay is a fraction of the weights")
        lost = base.like(weight_decay, state.log_decay)
        lost *= base.like(base.at(learning_rate, state.count), lost)
        # A schedule's values are not checked. Below 1, so that L is finite.
        most = np.nextafter(np.ones((), lost.dtype), np.zeros((), lost.dtype))
        log_decay = base.add_as_two(
            state.log_decay, jnp.log1p(-jnp.minimum(lost, most))
        )

        def rule(u, decayed, w):
            wide = indexing.accumulator_dtype(indexing.promote(u.dtype, w.dtype))
            lost = _missed(log_decay, decayed, w).astype(wide) * w.astype(wide)
            new = (u.astype(wide) + lost).astype(base.result_dtype(u, w))
            return new, jnp.broadcast_to(log_decay, decayed.shape)

        updates, decayed = base.map_leaves(rule, updates, (state.decayed,), params)
        count = optax.safe_increment(state.count)
        return updates, WeightDecayState(count, log_decay, decayed)

    return base.dense_or_rows(init, update, WeightDecayState)


def flush_weight_decay(params: PyTree, state: PyTree) -> tuple[Any, Any]:
    """Applies the decay of `weight_decay` that rows have missed so far, to all rows.

    For every row, `w' = w * exp(L - L_last)`, with L of the latest step. It reads and
    writes whole tables: call it before evaluation or export, not at each step. Up to
    rounding, it does not affect training.

    Args:
      params: all parameters that the optimizer trains.
      state: the whole state of the optimizer, with one or more states of `weight_decay`
        anywhere inside.

    Returns:
      The new `(params, state)`.

    Raises:
      ValueError: `state` contains no state of `weight_decay`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> tx = sj.optim.weight_decay(0.1)
      >>> weights = jnp.ones((4, 2))
      >>> update = sj.SelectedRows([3], jnp.zeros((1, 2)), height=4)
      >>> updates, state = tx.update(update, tx.init(weights), weights)
      >>> weights, state = sj.optim.flush_weight_decay(weights + updates, state)
      >>> weights[:, 0]
      Array([0.9, 0.9, 0.9, 0.9], dtype=float32)

    References:
      FBGEMM, `flush`.
    """

    def decay(i, node, w, decayed):
        del i
        wide = w.astype(indexing.accumulator_dtype(w.dtype))
        lost = _missed(node.log_decay, decayed, wide).astype(wide.dtype) * wide
        now = jnp.broadcast_to(node.log_decay, decayed.shape)
        return (wide + lost).astype(w.dtype), now

    fields = ("decayed",)
    return base.catch_up("weight_decay", WeightDecayState, fields, decay, params, state)


def _missed(log_decay: jax.Array, decayed: jax.Array, w: jax.Array) -> jax.Array:
    """Returns how far the missed steps change a weight of 1, for each row of `w`."""
    high, low = log_decay[0] - decayed[..., 0], log_decay[1] - decayed[..., 1]
    return base.per_row(jnp.expm1(high + low), w)
