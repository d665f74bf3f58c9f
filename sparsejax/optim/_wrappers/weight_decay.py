"""Decoupled weight decay that a row which was not read gets when it is read again.

AdamW multiplies every weight by `1 - lr_t * rate` at every step. Under `lazy` a row
that is not read is left alone, so rare rows hardly decay. Here a row that is touched
gets the decay of all the steps it missed at once, which is a product over them:

  w' = w * prod_{s = last + 1 .. t} (1 - lr_s * rate) + update

One sum is kept, L_t = sum_{s <= t} log(1 - lr_s * rate), and for each row the L at
which it was last decayed. Then the product is exp(L_t - L_last), whatever the schedule.

L grows while the differences stay small, so float32 would lose them: after a million
steps of 1e-5 a single one is good to a few percent only. L is therefore kept as a sum
of two floats, which has twice the digits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import _arguments
from sparsejax._rows import indexing
from sparsejax.optim._lazy import follow
from sparsejax.optim._optimizers import both_kinds as _kinds


CALL = "sparsejax.optim.weight_decay"
_WHY = "weight decay is a part of the weights"
_TOO_MUCH = (
    CALL + ": rate * learning_rate is {found}, but a step can take away less than 1 "
    "times the weight. Give the rate of AdamW, which the learning rate multiplies."
)


class WeightDecayState(NamedTuple):
    """Steps taken, the sum L of two floats `[2]`, and for each row its L `[V, 2]`."""

    count: Any
    log_decay: jax.Array
    decayed: Any


def weight_decay(
    rate: Any, learning_rate: Any = 1.0
) -> optax.GradientTransformationExtraArgs:
    """Decoupled weight decay, the missed steps made up for when a row is touched.

    At step t a touched row w that was last touched at step t - k becomes

      w' = w * (1 - lr_t * rate) * ... * (1 - lr_{t-k+1} * rate) + update

    for any schedule of lr. The rows that are not touched keep their bits. Put it last
    in a chain: `chain(adam(lr), weight_decay(rate, lr))` is `optax.adamw(lr,
    weight_decay=rate)` for rows touched at every step. `optax.adamw` inside of `lazy`
    decays a row only at the steps that read it.

    Between two steps that touch it, a row is larger than it would be under dense
    AdamW: a lookup reads it before its missed decay. `flush_weight_decay` brings all
    rows up to date, for evaluation and for export.

    It works with dense and SelectedRows updates, bare or inside of
    `lazy(optax.chain(...))`; use `optax.masked` to leave parameters out.

    Args:
      rate: the decay's strength, as AdamW's `weight_decay`; a number, not negative.
      learning_rate: a number or a schedule of the step, the one of the optimizer.

    Returns:
      `optax.GradientTransformationExtraArgs` with state
      `WeightDecayState(count, log_decay, decayed)`; `decayed` has shape `[V, 2]`.
      `update` needs `params`.

    Raises:
      ValueError: an argument is negative, or `rate * learning_rate` is 1 or more; at
        update, `params` is missing.

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
      Loshchilov and Hutter, 2019, "Decoupled Weight Decay Regularization"; FBGEMM,
      row-wise AdaGrad with `prev_iter`.
    """
    _kinds.check_not_negative(CALL, rate=rate, learning_rate=learning_rate)
    numbers = all(isinstance(x, (int, float)) for x in (rate, learning_rate))
    if numbers and rate * learning_rate >= 1:
        raise ValueError(_TOO_MUCH.format(found=rate * learning_rate))

    def init(params):
        dtypes = [indexing.accumulator_dtype(p.dtype) for p in jax.tree.leaves(params)]
        dtype = indexing.promote(jnp.float32, *dtypes)
        start = lambda p: jnp.zeros((*jnp.shape(p)[:1], 2), dtype)
        count, log_decay = jnp.zeros((), jnp.int32), jnp.zeros((2,), dtype)
        return WeightDecayState(count, log_decay, jax.tree.map(start, params))

    def update(updates, state, params=None):
        _kinds.require_params(CALL, _WHY, params)
        step = _log_of_step(rate, _kinds.at(learning_rate, state.count), state)
        log_decay = _add(state.log_decay, step)

        def rule(u, decayed, w):
            wide = indexing.accumulator_dtype(indexing.promote(u.dtype, w.dtype))
            lost = _missed(log_decay, decayed, w).astype(wide) * w.astype(wide)
            new = (u.astype(wide) + lost).astype(_kinds.result_dtype(u, w))
            return new, jnp.broadcast_to(log_decay, decayed.shape)

        updates, decayed = _kinds.map_leaves(rule, updates, (state.decayed,), params)
        count = optax.safe_increment(state.count)
        return updates, WeightDecayState(count, log_decay, decayed)

    return _kinds.both_kinds(init, update)


def flush_weight_decay(params: Any, state: Any) -> tuple[Any, Any]:
    """Gives all rows the decay of `weight_decay` that they have missed so far.

    For every row, `w' = w * exp(L - L_last)` with L of the last step taken. It walks
    over all of every table: call it before evaluation or export, not at each step.
    Afterwards training goes on as it would have, up to rounding.

    Args:
      params: the parameters the optimizer trains, all of them.
      state: the optimizer's whole state, with one or more states of `weight_decay`
        anywhere in it.

    Returns:
      `(params, state)`, both new.

    Raises:
      ValueError: there is no state of `weight_decay` in `state`.

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
    is_ours = lambda x: isinstance(x, WeightDecayState)
    nodes, treedef = jax.tree.flatten(state, is_leaf=is_ours)
    if not any(map(is_ours, nodes)):
        raise ValueError(
            "sparsejax.optim.flush_weight_decay: there is no state of "
            "sparsejax.optim.weight_decay in what was handed in as the optimizer's "
            "state. Call flush_weight_decay(params, state) with the state of a chain "
            "that has it."
        )
    weights, params_treedef = jax.tree.flatten(params, is_leaf=follow.is_leaf)
    for k, node in enumerate(nodes):
        if not is_ours(node):
            continue
        if jax.tree.structure(node.decayed, is_leaf=follow.is_leaf) != params_treedef:
            found, want = (
                _arguments.show_tree(params),
                _arguments.show_tree(node.decayed),
            )
            raise ValueError(
                "sparsejax.optim.flush_weight_decay: params must be all that the "
                f"optimizer trains, a tree {want}, got {found}."
            )
        decayed = params_treedef.flatten_up_to(node.decayed)
        for i, (w, rows) in enumerate(zip(weights, decayed)):
            if follow.is_leaf(rows):  # masked: not its to decay
                continue
            wide = jnp.asarray(w).astype(indexing.accumulator_dtype(w.dtype))
            lost = _missed(node.log_decay, rows, wide).astype(wide.dtype) * wide
            weights[i] = (wide + lost).astype(w.dtype)
            decayed[i] = jnp.broadcast_to(node.log_decay, rows.shape)
        nodes[k] = node._replace(decayed=params_treedef.unflatten(decayed))
    return params_treedef.unflatten(weights), treedef.unflatten(nodes)


def _log_of_step(rate: Any, learning_rate: Any, state: WeightDecayState) -> jax.Array:
    """`log(1 - lr * rate)` of one step."""
    if all(isinstance(x, (int, float, np.floating)) for x in (rate, learning_rate)):
        return _kinds.like(np.log1p(-np.float64(rate * learning_rate)), state.log_decay)
    rate = _kinds.like(rate, state.log_decay)
    taken = rate * _kinds.like(learning_rate, state.log_decay)
    # A schedule's value cannot be refused: all of the weight at most, and L is finite.
    most = np.nextafter(np.ones((), taken.dtype), np.zeros((), taken.dtype))
    return jnp.log1p(-jnp.minimum(taken, most))


def _add(total: jax.Array, x: jax.Array) -> jax.Array:
    """The sum of two floats `total` and `x`, again as two floats (Knuth's two-sum)."""
    high, low = total[0], total[1]
    rounded = high + x
    back = rounded - high
    low = low + ((high - (rounded - back)) + (x - back))
    new = rounded + low
    return jnp.stack([new, low - (new - rounded)])


def _missed(log_decay: jax.Array, decayed: jax.Array, w: jax.Array) -> jax.Array:
    """What the missed steps change a weight of 1 by, one number a row of `w`."""
    high, low = log_decay[0] - decayed[..., 0], log_decay[1] - decayed[..., 1]
    return _kinds.per_row(jnp.expm1(high + low), w)
