"""Weight decay and averages of all steps, at the cost of the rows that a step touches.

Both would change every row at every step. Here a row keeps the step that it was last
touched at, and gets what it missed, in closed form, when it is touched or read next.

**Weight decay.** AdamW multiplies every weight by `1 - lr_t * d`. Under `lazy`, a row
without a gradient does not change, so rare rows hardly decay. Here a touched row gets
the decay of all steps that it missed, as a product:

  w' = w * prod_{s = last + 1 .. t} (1 - lr_s * d) + update

The state has one sum, L_t = sum_{s <= t} log(1 - lr_s * d), and for each row the value
of L when it was last decayed. The product is then exp(L_t - L_last), for any schedule.
L grows while the differences stay small, so float32 would lose them: after a million
steps of 1e-5, a single step would be accurate only to a few percent. So L is stored as
the sum of two floats, which doubles its precision.

**Averages.** Dense training would do `a <- d a + (1 - d) w`. While a row keeps its
weights w, k steps have a closed form:

  a_{t+k} = d^k a_t + (1 - d^k) w

So the state has, for each row, the average up to the step before the last one that
touched it, and the number of that step. The next update of the row sees its weights,
which it has had since then, and adds all these steps; reading does the same. No update
is needed for this, so `ema` can be anywhere in a chain. Averages are kept with the bias
correction in them, `a_t / (1 - d^t)`: the average of a row that was never touched is
then its weights, whatever is in the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from sparsejax import _arguments
from sparsejax._arguments import PyTree, Scalar
from sparsejax._rows import indexing
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._optimizers import base


# ------------------------------------------------------------------ weight decay


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

        def rule(u, w, decayed):
            wide = indexing.accumulator_dtype(indexing.promote(u.dtype, w.dtype))
            lost = _missed(log_decay, decayed, w).astype(wide) * w.astype(wide)
            new = (u.astype(wide) + lost).astype(base.result_dtype(u, w))
            return new, jnp.broadcast_to(log_decay, decayed.shape)

        updates, state = base.map_leaves(rule, updates, state, params, ["decayed"])
        return updates, state._replace(log_decay=log_decay)

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

    def decay(node, w, decayed):
        wide = w.astype(indexing.accumulator_dtype(w.dtype))
        lost = _missed(node.log_decay, decayed, wide).astype(wide.dtype) * wide
        now = jnp.broadcast_to(node.log_decay, decayed.shape)
        return (wide + lost).astype(w.dtype), now

    return _catch_up(
        "weight_decay", WeightDecayState, decay, params, state, ["decayed"]
    )


def _missed(log_decay: jax.Array, decayed: jax.Array, w: jax.Array) -> jax.Array:
    """Returns how far the missed steps change a weight of 1, for each row of `w`."""
    high, low = log_decay[0] - decayed[..., 0], log_decay[1] - decayed[..., 1]
    return base.per_row(jnp.expm1(high + low), w)


# ------------------------------------------------------------------ averages


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


_AVERAGES = "average", "last"


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

        def rule(u, w, average, last):
            new = _after(average, last, state.count, w, log_decay, debias)
            now = jnp.broadcast_to(state.count, last.shape)
            return u, new.astype(average.dtype), now

        updates, state = base.map_leaves(rule, updates, state, params, _AVERAGES)
        corrected = base.like(debias, state.debias)
        return updates, state._replace(log_decay=log_decay, debias=corrected)

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
    means = []

    def read(node, w, average, last):
        if any(w is mean for mean in means):
            raise ValueError(
                "state contains two states of sparsejax.optim.ema for one "
                "parameter. Pass the part of the state that has one of them."
            )
        mean = _after(average, last, node.count, w, node.log_decay, node.debias)
        means.append(mean.astype(w.dtype))
        return means[-1], average, last

    return _catch_up("ema", EmaState, read, params, state, _AVERAGES)[0]


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


# ------------------------------------------------------------------ all rows


def _catch_up(
    maker: str,
    kind: type,
    rule: Callable,
    params: Any,
    state: Any,
    fields: Sequence[str],
) -> tuple[Any, Any]:
    """Gives all rows what they missed, at each state of a kind anywhere in `state`.

    Args:
      maker: the function of `sparsejax.optim` that makes the states.
      kind: the type of the states.
      rule: `(state, w, *fields of the leaf) -> (w, *fields)`.
      params: all parameters that the optimizer trains.
      state: its whole state.
      fields: of a state, which are trees like the parameters.

    Returns:
      The new parameters and state.
    """
    given = params, state
    params, state = map(trees.without_variables, given)
    is_ours = lambda x: isinstance(x, kind)
    nodes, treedef = jax.tree.flatten(state, is_leaf=is_ours)
    if not any(map(is_ours, nodes)):
        raise ValueError(
            f"state must contain the state of sparsejax.optim.{maker}. Pass "
            f"the whole state of an optimizer that has {maker} in its chain."
        )
    for k, node in enumerate(nodes):
        if is_ours(node):
            _check_same_tree(params, getattr(node, fields[0]))
            advance = lambda w, _, *row, node=node: rule(node, w, *row)
            params, nodes[k] = base.map_leaves(advance, params, node, None, fields)
    return trees.in_structure_of(given, (params, treedef.unflatten(nodes)))


def _check_same_tree(params: Any, tree: Any) -> None:
    """Raises a ValueError unless `params` have the structure of `tree`."""
    structures = (jax.tree.structure(x, is_leaf=trees.is_leaf) for x in (params, tree))
    if len(set(structures)) > 1:
        raise ValueError(
            "params must be all parameters that the optimizer trains, "
            f"{_arguments.show_tree(tree)}, got {_arguments.show_tree(params)}. "
            "With flax.nnx pass nnx.state(model, nnx.Param)."
        )
