"""The exponential average of rarely touched rows against optax.ema of every step."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_same_bits, assert_trees_close
from sparsejax.optim import ema, ema_params, lazy


V, D = 11, 2
DECAY = 0.8


def _params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return {"table": draw(V, D), "bias": draw(3)}


def _grads(rng):
    rows = rng.integers(0, 5, 3)  # with duplicates; most rows are never touched
    values = rng.standard_normal((3, D)).astype(np.float32)
    bias = rng.standard_normal(3).astype(np.float32)
    return {"table": sj.SelectedRows(rows, values, V), "bias": jnp.asarray(bias)}


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize(
    "chain",
    [
        lambda average: lazy(optax.chain(optax.adam(0.1), average)),
        # Not the last: the parts after it change the updates.
        lambda average: lazy(optax.chain(average, optax.adam(0.1))),
        lambda average: optax.chain(lazy(average), lazy(optax.sgd(0.3))),
        lambda average: sj.optim.rounding(lazy(average), master=True),
    ],
)
def test_all_rows_have_the_dense_average_after_every_step(chain, debias):
    tx = chain(ema(DECAY, debias))
    dense = optax.ema(DECAY, debias)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads, dense_state):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        expected, dense_state = dense.update(params, dense_state)
        return params, state, expected, dense_state, ema_params(params, state)

    params, rng = _params(), np.random.default_rng(1)
    state, dense_state = tx.init(params), dense.init(params)
    start = np.asarray(params["table"]).copy()
    for _ in range(9):
        result = step(params, state, _grads(rng), dense_state)
        params, state, expected, dense_state, found = result
        assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)
    assert step._cache_size() == 1
    assert np.abs(found["table"] - params["table"]).max() > 0.05
    if debias:
        assert_same_bits(found["table"][5:], start[5:])


def test_long_gaps_lose_no_digit():
    """A row touched twice with 200,000 steps between, against float64."""
    decay, gap = 0.99999, 200_000
    tx = ema(decay)
    table = jnp.array([[1.0], [4.0]])
    first = sj.SelectedRows([0], jnp.array([[1.0]]), 2)  # 1 to 2
    second = sj.SelectedRows([0], jnp.array([[3.0]]), 2)  # 2 to 5
    _, state = tx.update(first, tx.init(table), table)
    table = table + first
    state = state._replace(count=state.count + gap)
    exact = 2.0  # the average of rows that were 2 from the first step on
    np.testing.assert_allclose(ema_params(table, state), [[exact], [4.0]], rtol=1e-6)
    _, state = tx.update(second, state, table)
    table = table + second
    weight = (1 - decay) / -np.expm1((gap + 2) * np.log(decay))
    exact = weight * 5 + (1 - weight) * 2
    np.testing.assert_allclose(ema_params(table, state), [[exact], [4.0]], rtol=1e-6)
    state = state._replace(count=state.count + gap)
    mass = -np.expm1((gap + 2) * np.log(decay))
    past = mass * exact * np.exp(gap * np.log(decay))
    now = -np.expm1(gap * np.log(decay)) * 5
    exact = (past + now) / -np.expm1((2 * gap + 2) * np.log(decay))
    np.testing.assert_allclose(ema_params(table, state), [[exact], [4.0]], rtol=1e-6)


@pytest.mark.usefixtures("loose_promotion")
def test_some_parameters_in_low_precision_and_no_decay():
    """Of leaves that are masked the parameters themselves, of bfloat16 float32's."""
    params = {"a": jnp.ones((V, D), jnp.bfloat16), "b": jnp.ones((V, D)), "none": None}
    tx = optax.masked(ema(0.0), {"a": True, "b": False, "none": False})
    state = tx.init(params)
    assert state.inner_state.average["a"].dtype == jnp.float32
    updates = {"a": jnp.full((V, D), 0.5, jnp.bfloat16), "b": jnp.ones((V, D))}
    updates, state = tx.update({**updates, "none": None}, state, params)
    moved = optax.apply_updates(params, updates)
    found = ema_params(moved, state)
    assert found["none"] is None and found["b"] is moved["b"]
    assert_same_bits(found["a"], moved["a"])  # decay 0: the parameters


def test_errors():
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\)"):
        ema(1.0)
    with pytest.raises(TypeError, match="debias must be True or False"):
        ema(0.9, 0.5)
    table = jnp.ones((V, D))
    tx = ema(0.9)
    state = tx.init(table)
    with pytest.raises(ValueError, match="update needs params"):
        tx.update(table, state)
    with pytest.raises(ValueError, match="must contain the state of sparsejax"):
        ema_params(table, optax.sgd(0.1).init(table))
    with pytest.raises(ValueError, match="params must be all parameters"):
        ema_params({"t": table}, state)
    with pytest.raises(ValueError, match="two states of sparsejax.optim.ema for one"):
        ema_params(table, (state, state))
