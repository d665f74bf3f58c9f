"""A state that a checkpoint restored without its types: lists, dicts and tuples."""

import jax
import jax.numpy as jnp
import optax
import pytest

import sparsejax as sj
from sparsejax import optim


def as_lists(state):
    if isinstance(state, tuple):
        return [as_lists(x) for x in state]
    return state


def as_dicts(state):
    if hasattr(state, "_fields"):
        return {name: as_dicts(getattr(state, name)) for name in state._fields}
    if isinstance(state, tuple):
        return {str(i): as_dicts(x) for i, x in enumerate(state)}
    return state


def as_tuples(state):
    return tuple(as_tuples(x) for x in state) if isinstance(state, tuple) else state


TXS = {
    "accumulate": lambda: optim.accumulate(optim.lazy(optax.adam(0.1)), 2, 8),
    "dynamic_loss_scale": lambda: optim.dynamic_loss_scale(optim.lazy(optax.adam(0.1))),
    "rounding": lambda: optim.rounding(optim.lazy(optax.adam(0.1)), master=True),
    "track_changes": lambda: optim.track_changes(optim.lazy(optax.adam(0.1))),
    "rowwise_adagrad": lambda: optim.rowwise_adagrad(0.1),
    "rowwise_adam": lambda: optim.rowwise_adam(0.1),
    "ftrl": lambda: optim.ftrl(0.1),
    "ema": lambda: optim.ema(0.9),
    "weight_decay": lambda: optim.weight_decay(0.1),
}


@pytest.mark.parametrize("restore", [as_lists, as_dicts, as_tuples])
@pytest.mark.parametrize("name", TXS)
@pytest.mark.parametrize("kind", ["rows", "dense"])
def test_is_refused(name, restore, kind):
    tx, params = TXS[name](), {"t": jnp.ones((40, 2))}
    rows = sj.SelectedRows(jnp.array([3]), jnp.ones((1, 2)), 40)
    grads = {"t": rows if kind == "rows" else rows.to_dense()}
    state = restore(tx.init(params))
    with pytest.raises(TypeError, match="restore into tx.init"):
        jax.eval_shape(tx.update, grads, state, params)
