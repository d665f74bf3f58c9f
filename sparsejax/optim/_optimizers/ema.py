"""The exponential moving average of parameters, exact though rows are rarely touched.

Dense training would average every row at every step, `a <- d a + (1 - d) w`. But a row
that no step touches keeps its weights w, and then k steps have a closed form:

  a_{t+k} = d^k a_t + (1 - d^k) w

So the state has, for each row, the average up to the step before the last one that
touched it, and the number of that step. The next update of the row sees its weights,
which it has had since then, and adds all these steps; reading does the same. No update
is needed for this, so `ema` can be anywhere in a chain.

Averages are kept with the bias correction in them, `a_t / (1 - d^t)`: the average of a
row that was never touched is then its weights, whatever is in the state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from sparsejax import _arguments
from sparsejax._arguments import PyTree, Scalar
from sparsejax.optim import _checks as checks
from sparsejax.optim._optimizers import base


class EmaState(NamedTuple):
    """State of `ema`.

    Attributes:
      count: int32, the number of steps.
      log_decay: the logarithm of `decay`.
      debias: 1 if averages are bias-corrected, else 0.
      average: for each leaf its average over the steps in `last`, `[V, ...]`.
      last: for each row how many steps are in its average, int32 `[V]`.
    """

    count: Any
    log_decay: Any
    debias: Any
    average: Any
    last: Any


def ema(
    decay: Scalar, debias: bool = True, accumulator_dtype: DTypeLike | None = None
) -> optax.GradientTransformationExtraArgs:
    """Exponential moving average of the parameters, at the cost of the rows touched.

    It averages parameters; `optax.ema` averages updates. Updates pass through
    unchanged. With w_t the parameters after step t,

      a_t = decay * a_{t-1} + (1 - decay) * w_t,    a_0 = 0

    which is what `optax.ema(decay, debias)` makes of the parameters of every step, and
    `a_t / (1 - decay^t)` with `debias`. Rows that a step does not touch are neither
    read nor written: `ema_params` adds what they missed, in closed form. Use it alone
    or anywhere inside `lazy(optax.chain(...))`; docs/howto/optimizers_per_table.md has
    the limits.

    Args:
      decay: number in [0, 1), the weight of the past; 0.999 averages over about 1,000
        steps.
      debias: True corrects for the start at zero.
      accumulator_dtype: of the averages; by default the parameters' dtype, at least
        float32.

    Returns:
      `optax.GradientTransformationExtraArgs` with an `EmaState`: an average `[V, ...]`
      and an int32 `[V]` for each leaf. `update` needs `params`.

    Raises:
      ValueError: `decay` is not in [0, 1); at update, `params` is missing.
      TypeError: `debias` is not a bool.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> tx = sj.optim.lazy(optax.chain(optax.sgd(1.0), sj.optim.ema(0.5)))
      >>> table = jnp.zeros((1000, 1))
      >>> state = tx.init(table)
      >>> for row in (3, 5):
      ...     grad = sj.SelectedRows(jnp.array([row]), -jnp.ones((1, 1)), height=1000)
      ...     updates, state = tx.update(grad, state, table)
      ...     table = optax.apply_updates(table, updates)
      >>> table[3:6, 0]
      Array([1., 0., 1.], dtype=float32)
      >>> sj.optim.ema_params(table, state)[3:6, 0]  # row 3: (1/4 + 1/2) / (3/4)
      Array([1.        , 0.        , 0.6666667], dtype=float32)

    References:
      `optax.ema`; TensorFlow, `tf.train.ExponentialMovingAverage`.
    """
    base.check_decay_rates(decay=decay)
    debias = _arguments.check_bool("debias", debias)

    def init(params):
        average = jax.tree.map(lambda p: base.zeros(p, accumulator_dtype), params)
        last = jax.tree.map(lambda p: base.row_zeros(p, jnp.int32), params)
        dtype = base.widest_dtype(params)
        log_decay = jnp.asarray(base.log(decay), dtype)
        corrected = jnp.asarray(debias, dtype)
        return EmaState(jnp.zeros((), jnp.int32), log_decay, corrected, average, last)

    def update(updates, state, params=None):
        checks.require_params(params, "it averages the parameters")
        log_decay = base.like(base.log(decay), state.log_decay)

        def rule(u, average, last, w):
            new = _after(average, last, state.count, w, log_decay, debias)
            now = jnp.broadcast_to(state.count, last.shape)
            return u, new.astype(average.dtype), now

        states = state.average, state.last
        updates, average, last = base.map_leaves(rule, updates, states, params)
        count = optax.safe_increment(state.count)
        corrected = base.like(debias, state.debias)
        return updates, EmaState(count, log_decay, corrected, average, last)

    return base.dense_or_rows(init, update, EmaState)


def ema_params(params: PyTree, state: PyTree) -> Any:
    """Returns the averages of `ema`, for all parameters and as of the latest step.

    It reads whole tables: call it for evaluation and export, not at each step.

    Args:
      params: all parameters that the optimizer trains, after `optax.apply_updates`.
      state: the whole state of the optimizer, with one or more states of `ema` anywhere
        inside.

    Returns:
      The tree of `params`, of the same shapes and dtypes. A leaf that is not averaged
      (`optax.masked`, `optax.partition`) is returned as it is; so are all leaves before
      the first step, with `debias`.

    Raises:
      ValueError: `state` contains no state of `ema`, or two for one leaf; or `params`
        are not the parameters that it was made for.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> tx = sj.optim.ema(0.9)
      >>> weights = jnp.ones((4, 2))
      >>> update = sj.SelectedRows([3], jnp.ones((1, 2)), height=4)
      >>> updates, state = tx.update(update, tx.init(weights), weights)
      >>> sj.optim.ema_params(weights + updates, state)[:, 0]
      Array([1., 1., 1., 2.], dtype=float32)

    References:
      TensorFlow, `ExponentialMovingAverage.average`; `optax.ema`.
    """
    averaged = set()

    def read(i, node, w, average, last):
        if i in averaged:
            raise ValueError(
                "state contains two states of sparsejax.optim.ema for one "
                "parameter. Pass the part of the state that has one of them."
            )
        averaged.add(i)
        mean = _after(average, last, node.count, w, node.log_decay, node.debias)
        return mean.astype(w.dtype), average, last

    fields = "average", "last"
    return base.catch_up("ema", EmaState, fields, read, params, state)[0]


def _after(
    average: Any, last: Any, count: Any, w: Any, log_decay: Any, debias: Any
) -> jax.Array:
    """Returns averages at step `count` of rows with weights `w` since step `last`."""
    kept = base.per_row(_kept(last, count, log_decay, debias), w)
    return kept * average.astype(kept.dtype) + (1 - kept) * w.astype(kept.dtype)


def _kept(start: Any, end: Any, log_decay: Any, debias: Any) -> jax.Array:
    """Returns the share of the average at step `start` in the one at step `end`."""
    log_decay = jnp.asarray(log_decay)

    def power(n):  # the logarithm of decay**n; decay may be 0
        n = jnp.asarray(n).astype(log_decay.dtype)
        return jnp.where(n == 0, base.like(0, n), n * log_decay)

    share = jnp.exp(power(end - start))
    corrected = share * base.divide(jnp.expm1(power(start)), jnp.expm1(power(end)))
    if isinstance(debias, bool):
        return corrected if debias else share
    return jnp.where(debias > 0, corrected, share)
