"""FTRL against its definition in NumPy, and that zeros are zeros."""

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
from sparsejax.optim import ftrl


V, D = 23, 4


def _reference(w, z, n, g, learning_rate, beta, l1, l2):
    """One step of McMahan et al., 2013, algorithm 1, at each coordinate."""
    sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / learning_rate
    z = z + g - sigma * w
    n = n + g * g
    with np.errstate(divide="ignore", invalid="ignore"):
        w = -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / learning_rate + l2)
    return np.where(np.abs(z) <= l1, 0, w), z, n


def _gradients(steps=6, dtype=np.float32):
    rng = np.random.default_rng(3)
    return rng.standard_normal((steps, V, D)).astype(dtype)


@pytest.mark.parametrize(
    "hyper",
    [
        {"learning_rate": 0.1},
        {"learning_rate": 0.05, "beta": 0.5, "l1": 0.7, "l2": 0.3},
        {"learning_rate": 0.2, "beta": 0.0, "l1": 2.0},
    ],
)
def test_as_in_the_paper(hyper, x64):
    tx = ftrl(**hyper)
    hyper = {"beta": 1.0, "l1": 0.0, "l2": 0.0, **hyper}
    w = np.random.default_rng(0).standard_normal((V, D))
    z = n = np.zeros_like(w)
    params = jnp.asarray(w)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for g in _gradients(dtype=np.float64):
        g[:3] = 0  # rows that have no gradient
        updates, state = update(jnp.asarray(g), state, params)
        params = optax.apply_updates(params, updates)
        w, z, n = _reference(w, z, n, g, **hyper)
        assert_trees_close((params, state.z, state.n), (w, z, n), rtol=1e-9)
        np.testing.assert_array_equal(params == 0, w == 0)
    assert state.count == 6
    # All weights move: those without history are forgotten, the others are not.
    assert np.all(params[:3] == 0) and np.any(params[3:] != 0)
    if hyper["l1"]:
        assert np.any(params[3:] == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params_dtype, grads_dtype",
    [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float32")],
)
def test_zeros_are_exact(params_dtype, grads_dtype):
    """Whatever the weights were: `old + (0 - old)` is 0, in rows and dense alike."""
    tx = ftrl(1.0, l1=1.5)
    start = np.random.default_rng(1).standard_normal((V, D))
    start = jnp.asarray(start, params_dtype)
    zeros = np.zeros(0, bool)
    with jax.numpy_dtype_promotion("standard"):  # optax adds float32 to bfloat16

        @jax.jit
        def step(params, state, g):
            updates, state = tx.update(g, state, params)
            return optax.apply_updates(params, updates), state

        for rows in (None, jnp.arange(V)):
            params, state = start, tx.init(start)
            for g in _gradients(3):
                g = jnp.asarray(g, grads_dtype)
                g = g if rows is None else sj.SelectedRows(rows, g, V)
                params, state = step(params, state, g)
                expected = np.abs(state.z) <= 1.5
                np.testing.assert_array_equal(np.asarray(params) == 0, expected)
                zeros = np.concatenate([zeros, expected.ravel()])
    assert params.dtype == params_dtype
    assert 0.1 < zeros.mean() < 0.9


def test_a_schedule_gives_alpha_of_the_step():
    tx = ftrl(optax.linear_schedule(0.1, 0.02, 4), l1=0.1)
    params, g = jnp.zeros((V, D)), jnp.asarray(_gradients(1)[0])
    state = tx.init(params)._replace(count=jnp.array(2, jnp.int32))
    result = tx.update(g, state, params)
    expected = ftrl(0.06, l1=0.1).update(g, state, params)
    assert_trees_close(result, expected)


def test_a_large_sum_of_squares_loses_no_step():
    """sqrt(n + g^2) - sqrt(n) in float32 would be 0 or 2e-3 here, and is 5e-4."""
    tx, params = ftrl(1.0), jnp.ones((1, 1))
    state = tx.init(params)._replace(n=jnp.full((1, 1), 1e6))
    _, new = tx.update(jnp.ones((1, 1)), state, params)
    assert np.isclose(new.z[0, 0], 1 - 5e-4, rtol=1e-7, atol=0)


def test_starts_from_weights_when_z_stands_for_them():
    """The formula of the docstring: z = -w * (beta / lr + l2) - sign(w) * l1."""
    lr, beta, l1, l2 = 0.1, 1.0, 0.3, 0.2
    w = jnp.asarray(_gradients(1)[0])
    tx = ftrl(lr, beta, l1, l2)
    state = tx.init(w)
    state = state._replace(z=-w * (beta / lr + l2) - jnp.sign(w) * l1)
    updates, _ = tx.update(jnp.zeros_like(w), state, w)
    assert np.all(np.abs(updates) < 1e-6)
