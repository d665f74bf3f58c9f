"""Weight decay that makes up for missed steps against a dense run of AdamW."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_trees_close
from sparsejax.optim import flush_weight_decay, lazy, weight_decay


V, D = 11, 2
RATE = 0.3
SCHEDULES = {
    "constant": 0.05,
    "schedule": optax.exponential_decay(0.2, 3, 0.7),
    "python": lambda count: 0.1 / (1 + count),
}


def _rates(learning_rate, steps):
    if not callable(learning_rate):
        return np.full(steps, learning_rate)
    return np.array([float(learning_rate(jnp.array(t))) for t in range(steps)])


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_touched_row_is_where_the_dense_run_has_it(name):
    """SGD depends on nothing but the gradient, so rows agree whenever they are read."""
    lr = SCHEDULES[name]
    tx = lazy(optax.chain(optax.sgd(lr), weight_decay(RATE, lr)))
    params = jnp.asarray(np.random.default_rng(0).standard_normal((V, D)), jnp.float32)
    dense = np.asarray(params, np.float64)
    state = tx.init(params)
    update = jax.jit(tx.update)
    rng = np.random.default_rng(1)
    for rate in _rates(lr, 9):
        rows = rng.integers(0, 4, 3)  # some are read at every step, most never
        values = rng.standard_normal((3, D)).astype(np.float32)
        g = sj.SelectedRows(rows, values, V)
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        dense = dense * (1 - rate * RATE) - rate * np.asarray(g.to_dense(), np.float64)
        touched = np.unique(rows)
        np.testing.assert_allclose(params[touched], dense[touched], rtol=2e-5)
    assert np.any(np.abs(params - dense) > 0.05)
    flushed, state = jax.jit(flush_weight_decay)(params, state)
    np.testing.assert_allclose(flushed, dense, rtol=2e-5)
    # Up to date: another flush changes nothing.
    again, _ = flush_weight_decay(flushed, state)
    np.testing.assert_array_equal(again, flushed)


@pytest.mark.usefixtures("loose_promotion")
def test_rows_touched_at_every_step_have_adamw():
    lr = optax.linear_schedule(0.1, 0.01, 5)
    ours = optax.chain(optax.adam(lr), weight_decay(RATE, lr))
    theirs = optax.adamw(lr, weight_decay=RATE)
    rng = np.random.default_rng(1)
    params = expected = {"table": jnp.ones((V, D)), "bias": jnp.ones(3)}
    state, their_state = ours.init(params), theirs.init(params)

    @jax.jit
    def step(params, state, expected, their_state, grads):
        updates, state = ours.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        updates, their_state = theirs.update(grads, their_state, expected)
        return params, state, optax.apply_updates(expected, updates), their_state

    for _ in range(6):
        draw = lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32)
        grads = jax.tree.map(draw, params)
        result = step(params, state, expected, their_state, grads)
        params, state, expected, their_state = result
        assert_trees_close(params, expected)


def test_many_steps_lose_no_digit():
    """After many steps a single one is as exact as the first, also as one program."""
    tx = weight_decay(0.01, 1e-3)
    params = jnp.ones((2, 1))
    state = tx.init(params)

    @jax.jit
    def steps(state, n):
        one = lambda _, state: tx.update(jnp.zeros((2, 1)), state, params)[1]
        return jax.lax.fori_loop(0, n, one, state)

    def step_of(state):
        updates, state = tx.update(jnp.zeros((2, 1)), state, params)
        return float(updates[0, 0]), state

    state = steps(state, 300_000)
    total = np.asarray(state.log_decay, np.float64).sum()
    assert np.isclose(total, 300_000 * np.log1p(-1e-5), rtol=1e-6)
    late, state = step_of(state)
    assert np.isclose(late, -1e-5, rtol=1e-6)
    # A plain float would be off by much more.
    high = state.log_decay[0]
    assert abs(float(high + jnp.float32(-1e-5)) - float(high) + 1e-5) > 1e-8


def test_a_schedule_that_takes_it_all():
    """1 - lr * rate of 0 or less leaves (almost) nothing, and no NaN later."""
    tx = weight_decay(1.0, lambda count: jnp.where(count == 0, 2.0, 0.1))
    params = jnp.ones((2, 1))
    state = tx.init(params)
    for expected in (0.0, 0.0):
        updates, state = tx.update(jnp.zeros((2, 1)), state, params)
        params = params + updates
        np.testing.assert_allclose(params, expected, atol=1e-7)
    assert np.all(np.isfinite(state.log_decay))


@pytest.mark.usefixtures("loose_promotion")
def test_flush_finds_all_of_them():
    """Through masks, each state for its own parameters."""
    params = {"a": jnp.ones((V, D)), "b": jnp.ones((V, D)), "c": jnp.ones(3)}
    mask = lambda name: {key: key == name for key in params}
    tx = optax.chain(
        optax.masked(weight_decay(0.1), mask("a")),
        optax.masked(weight_decay(0.5), mask("b")),
        optax.sgd(0.1),
    )
    state = tx.init(params)
    none = {"a": None, "b": None, "c": jnp.zeros(3)}  # a step that reads neither
    _, state = tx.update(none, state, params)
    params, _ = flush_weight_decay(params, state)
    for name, expected in (("a", 0.9), ("b", 0.5), ("c", 1.0)):
        np.testing.assert_allclose(params[name], expected, rtol=1e-6)
