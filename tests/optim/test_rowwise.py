"""Row-wise AdaGrad, Adam and LAMB against their definitions in NumPy."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_trees_close, to_dense
from optimizers import V, make_grads, make_params
from sparsejax import optim


LR = 0.1
STEPS = 5


def _wide(h, g):
    return h.reshape(h.shape + (1,) * (g.ndim - 1))


def _mean(g):
    return np.mean(g * g, axis=tuple(range(1, g.ndim)))


def adagrad(w, g, s, k, seen, eps=1e-10):
    s["sum_of_squares"] += g * g
    return w - LR * g / (np.sqrt(s["sum_of_squares"]) + eps)


def rowwise_adagrad(w, g, s, k, seen, eps=1e-2):
    s["sum_of_squares"] += _mean(g)
    return w - LR * g / (np.sqrt(_wide(s["sum_of_squares"], g)) + eps)


def group_adagrad(w, g, s, k, seen, eps=1e-2):
    s["sum_of_squares"] += _mean(g)
    return w - LR * g / np.sqrt(_wide(s["sum_of_squares"], g) + eps)


def _adam(w, g, s, k, eps, squares):
    s["mu"] = 0.8 * s["mu"] + (1 - 0.8) * g
    s["nu"] = 0.95 * s["nu"] + (1 - 0.95) * squares
    k = _wide(np.broadcast_to(k, g.shape[:1]), g)
    nu = s["nu"] if s["nu"].ndim == g.ndim else _wide(s["nu"], g)
    return s["mu"] / (1 - 0.8**k) / (np.sqrt(nu / (1 - 0.95**k)) + eps)


def rowwise_adam(w, g, s, k, seen, eps=1e-2):
    return w - LR * _adam(w, g, s, k, eps, _mean(g))


def rowwise_adam_row_count(w, g, s, k, seen, eps=1e-2):
    s["row_count"] = seen
    return w - LR * _adam(w, g, s, seen, eps, _mean(g))


def row_count_adam(w, g, s, k, seen, eps=1e-2):
    s["row_count"] = seen
    return w - LR * _adam(w, g, s, seen, eps, g * g)


def partial_rowwise_lamb(w, g, s, k, seen, eps=1e-2):
    r = _adam(w, g, s, k, eps, _mean(g)) + 0.05 * w
    norm = lambda x: np.sqrt(np.sum(x * x, axis=tuple(range(1, x.ndim))))
    return w - LR * _wide(norm(w) / norm(r), r) * r


ADAM = {"b1": 0.8, "b2": 0.95, "eps": 1e-2}
RULES = {
    adagrad: lambda: optim.adagrad(LR, eps=1e-10),
    rowwise_adagrad: lambda: optim.rowwise_adagrad(LR, eps=1e-2),
    group_adagrad: lambda: optim.group_adagrad(LR, eps=1e-2),
    rowwise_adam: lambda: optim.rowwise_adam(LR, **ADAM),
    rowwise_adam_row_count: lambda: optim.rowwise_adam(LR, **ADAM, row_count=True),
    row_count_adam: lambda: optim.row_count_adam(LR, **ADAM),
    partial_rowwise_lamb: lambda: optim.partial_rowwise_lamb(
        LR, **ADAM, weight_decay=0.05
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_as_defined(rule):
    """A table of rank 3 by rows with duplicates, against NumPy on its touched rows."""
    tx = RULES[rule]()
    table = np.asarray(make_params(cube=True)["cube"])
    params, w = jnp.asarray(table), table.astype(np.float64)
    state = tx.init(params)
    fields = {
        f: x for f, x in state._asdict().items() if f != "count" and x is not None
    }
    expected = {f: np.asarray(x, np.float64) for f, x in fields.items()}
    seen = np.zeros(V)
    update = jax.jit(tx.update)
    for t in range(STEPS):
        g = make_grads(t, cube=True)["cube"]
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)

        merged = g.coalesce()
        r = np.asarray(merged.rows)[: int(merged.num_rows())]
        seen[r] += 1
        rows = {f: x[r] for f, x in expected.items()}
        values = np.asarray(merged.values, np.float64)[: len(r)]
        w[r] = rule(w[r], values, rows, t + 1, seen[r])
        for f in expected:
            expected[f][r] = rows[f]
    assert len(r) < V and seen.max() > 1
    np.testing.assert_allclose(params, w, rtol=2e-5, atol=2e-6)
    for f in expected:
        np.testing.assert_allclose(
            getattr(state, f), expected[f], rtol=2e-5, atol=2e-6, err_msg=f
        )
    assert state.count == STEPS


@pytest.mark.usefixtures("loose_promotion")
def test_rows_of_one_number_are_plain_adam():
    """Also where 1 - b2 is small: optax's own power is off by 1e-5 there."""
    g = jnp.asarray(np.random.default_rng(0).standard_normal((3, V, 1)), jnp.float32)
    params = jnp.zeros((V, 1))
    ours, theirs = optim.rowwise_adam(LR), optax.adam(LR)
    counted = optim.row_count_adam(LR)
    states = [tx.init(params) for tx in (ours, theirs, counted)]
    steps = [jax.jit(tx.update) for tx in (ours, theirs, counted)]
    for t in range(3):
        results = []
        for k, step in enumerate(steps):
            updates, states[k] = step(g[t], states[k])
            results.append(updates)
        assert_trees_close(results[0], results[1], rtol=2e-5)
        assert_trees_close(results[0], results[2])  # all rows touched at each step


@pytest.mark.parametrize("make", [optim.rowwise_adagrad, optim.rowwise_adam])
def test_nothing_is_nothing(make):
    """A zero gradient with eps = 0 divides nothing by nothing."""
    tx = make(LR, eps=0.0)
    params = jnp.zeros((V, 2))
    updates, _ = tx.update(jnp.zeros((V, 2)), tx.init(params), params)
    assert np.all(updates == 0)
    # Nor has it a derivative that is not a number.
    loss = lambda g: jnp.sum(tx.update(g, tx.init(params), params)[0])
    assert np.all(np.isfinite(jax.grad(loss)(jnp.zeros((V, 2)))))


def test_lamb_moves_rows_of_zeros():
    """Their trust ratio is 1, as optax's; FBGEMM's is 0, and 0 / 0 is NaN there."""
    tx = optim.partial_rowwise_lamb(LR)
    params = jnp.zeros((V, 2)).at[1].set(3.0)
    g = jnp.zeros((V, 2)).at[0].set(1.0)
    updates, _ = tx.update(g, tx.init(params), params)
    np.testing.assert_allclose(updates[0], [-LR, -LR], rtol=1e-6)
    assert np.all(updates[1:] == 0)


def test_a_late_first_step_is_a_whole_one():
    """With a count for each row it is one learning rate, with optax's it is three."""
    params, late = jnp.zeros((V, 2)), jnp.ones((V, 2))
    steps = {}
    for tx in (optim.row_count_adam(LR), optim.rowwise_adam(LR)):
        state = tx.init(params)
        state = state._replace(count=jnp.array(10_000, jnp.int32))
        updates, _ = tx.update(late, state)
        steps[state.row_count is None] = float(-updates[0, 0])
    assert np.isclose(steps[False], LR, rtol=1e-5)
    assert np.isclose(steps[True], LR * 0.1 / np.sqrt(0.001), rtol=1e-3)


def test_bias_leaves_and_rows_without_elements():
    """In rank 1 each element is a row; a row of no elements has mean 0, not NaN."""
    params = {"bias": jnp.zeros(3), "scalar": jnp.zeros(()), "empty": jnp.zeros((4, 0))}
    grads = jax.tree.map(lambda p: p + 2.0, params)
    tx = optim.rowwise_adagrad(LR)
    updates, state = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["bias"], [-LR] * 3, rtol=1e-6)
    np.testing.assert_allclose(updates["scalar"], -LR, rtol=1e-6)
    assert state.sum_of_squares["scalar"].shape == ()
    assert np.all(state.sum_of_squares["empty"] == 0)


def test_mu_may_be_narrow():
    tx = optim.rowwise_adam(LR, mu_dtype="bfloat16")
    params = make_params()
    state = tx.init(params)
    for grads in (make_grads(0), to_dense(make_grads(0))):
        updates, new = jax.eval_shape(tx.update, grads, state, params)
        assert new.mu["table"].dtype == jnp.bfloat16
        assert new.nu["table"].dtype == updates["table"].dtype == jnp.float32


@pytest.mark.slow
def test_in_a_scan_and_under_vmap():
    """Two copies of a model train beside each other, each for three steps."""
    tx = optim.rowwise_adam(LR, row_count=True)
    g = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 4, 3)), jnp.float32)
    rows = jnp.asarray(np.random.default_rng(1).integers(0, 7, (3, 2, 4)))

    def step(carry, x):
        params, state = carry
        updates, state = tx.update(sj.SelectedRows(*x, 7), state, params)
        return (optax.apply_updates(params, updates), state), None

    def train(params, rows, g):
        carry, _ = jax.lax.scan(step, (params, tx.init(params)), (rows, g))
        return carry

    params = jnp.ones((2, 7, 3))
    together = jax.jit(jax.vmap(train, in_axes=(0, 1, 1)))(params, rows, g)
    alone = [jax.jit(train)(params[k], rows[:, k], g[:, k]) for k in range(2)]
    assert_trees_close(together, jax.tree.map(lambda *x: jnp.stack(x), *alone))
