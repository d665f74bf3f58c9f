"""Our own optimizers: their rules in NumPy, and the properties that all of them share.

Each takes dense and SelectedRows gradients, under strict promotion.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import (
    IN_PLACE,
    assert_no_dense,
    assert_same_bits,
    assert_trees_close,
    dense as summed,
    to_dense,
)
from optimizers import LR, SCHEDULE, V, make_grads, make_params, step
from sparsejax import optim
from sparsejax.optim import lazy


MAKERS = {
    "ftrl": lambda lr=LR: optim.ftrl(lr, l1=0.05, l2=0.01),
    "adagrad": lambda lr=LR: optim.adagrad(lr, 0.1),
    "rowwise_adagrad": lambda lr=LR: optim.rowwise_adagrad(lr),
    "group_adagrad": lambda lr=LR: optim.group_adagrad(lr),
    "rowwise_adam": lambda lr=LR: optim.rowwise_adam(lr),
    "rowwise_adam_row_count": lambda lr=LR: optim.rowwise_adam(lr, row_count=True),
    "row_count_adam": lambda lr=LR: optim.row_count_adam(lr),
    "partial_rowwise_lamb": lambda lr=LR: optim.partial_rowwise_lamb(
        lr, weight_decay=0.01
    ),
    "weight_decay": lambda lr=LR: optim.weight_decay(0.5, lr),
    "ema": lambda lr=LR: optim.ema(0.9),
}
each = pytest.mark.parametrize("name", MAKERS)
# One of each file, for tests in which the rule matters less.
some = pytest.mark.parametrize(
    "name", ["ftrl", "rowwise_adagrad", "rowwise_adam_row_count", "weight_decay"]
)
# One object each, which is judged once.
TXS = {name: make() for name, make in MAKERS.items()}


def _kinds(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


def _draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ------------------------------------------------------------------ what all share


@each
def test_nothing_of_the_tables_size_arises(name):
    run = functools.partial(step, TXS[name])
    params = make_params()
    args = params, jax.eval_shape(TXS[name].init, params), make_grads(0)
    assert_no_dense(run, *args, allow=IN_PLACE, heights={V})


@some
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_state_is_at_least_float32(name, dtype, x64):
    """Updates have the parameters' type, so that apply_updates promotes nothing."""
    tx, params, grads = TXS[name], make_params(dtype), make_grads(0, dtype)
    state = jax.eval_shape(tx.init, params)
    wide = "float32" if dtype == "bfloat16" else dtype
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"int32", wide}
    for g in (grads, to_dense(grads)):
        updates, new = jax.eval_shape(tx.update, g, state, params)
        assert updates["bias"].dtype == updates["table"].dtype == dtype
        assert _kinds(new) == _kinds(state)


def test_mu_may_be_narrow():
    tx, params = optim.rowwise_adam(LR, mu_dtype="bfloat16"), make_params()
    for grads in (make_grads(0), to_dense(make_grads(0))):
        updates, new = jax.eval_shape(tx.update, grads, tx.init(params), params)
        assert new.mu["table"].dtype == jnp.bfloat16
        assert new.nu["table"].dtype == updates["table"].dtype == jnp.float32


@some
def test_state_is_a_named_tree_that_goes_on_with_another_rate(name):
    params, grads = make_params(), jax.jit(to_dense)(make_grads(0))
    _, state = jax.jit(TXS[name].update)(grads, TXS[name].init(params), params)
    early = optax.tree_utils.tree_set(state, count=jnp.zeros((), jnp.int32))
    assert state.count == 1 and early.count == 0 and early[1:] == state[1:]
    # A schedule and the old state: from step 1 on.
    both = MAKERS[name](SCHEDULE), MAKERS[name](SCHEDULE(1))

    @jax.jit
    def run(*args):
        return [tx.update(*args) for tx in both]

    assert_trees_close(*run(grads, state, params))


@some
def test_none_and_masked_leaves(name):
    params = {"a": jnp.ones((V, 2)), "none": None, "b": jnp.ones(3)}
    grads = {"a": jnp.ones((V, 2)), "none": None, "b": None}
    tx: Any = TXS[name]
    state = tx.init(params)
    updates, new = tx.update(grads, state, params)
    assert updates["none"] is None and updates["b"] is None
    of_b = lambda tree: [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if "'b'" in jax.tree_util.keystr(path)
    ]
    jax.tree.map(assert_same_bits, of_b(new), of_b(state))
    masked = optax.masked(tx, {"a": True, "none": False, "b": False})
    grads["b"] = jnp.ones(3)
    found, _ = masked.update(grads, masked.init(params), params)
    assert_trees_close(found, {**updates, "b": jnp.ones(3)})


@pytest.mark.usefixtures("loose_promotion")
def test_injected_hyperparameters():
    params, grads = make_params(), make_grads(0)
    tx, injected = TXS["rowwise_adam"], optax.inject_hyperparams(optim.rowwise_adam)(LR)
    state = injected.init(params)
    assert state.hyperparams.keys() == {"learning_rate", "b1", "b2", "eps"}
    updates, _ = jax.jit(injected.update)(grads, state, params)
    expected, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert_trees_close(to_dense(updates), to_dense(expected), rtol=1e-4)


@pytest.mark.slow
def test_in_a_scan_and_under_vmap():
    """Two copies of a model train beside each other, each for three steps."""
    tx = TXS["rowwise_adam_row_count"]
    g, rows = _draw(3, 2, 4, 3), np.random.default_rng(1).integers(0, 7, (3, 2, 4))

    def train(params, rows, g):
        one = lambda carry, x: (step(tx, *carry, sj.SelectedRows(*x, 7)), None)
        return jax.lax.scan(one, (params, tx.init(params)), (rows, g))[0]

    params, run = np.ones((2, 7, 3), np.float32), jax.jit(train)
    together = jax.jit(jax.vmap(train, in_axes=(0, 1, 1)))(params, rows, g)
    alone = [run(params[k], rows[:, k], g[:, k]) for k in range(2)]
    assert_trees_close(together, jax.tree.map(lambda *x: np.stack(x), *alone))


def test_wrong_calls():
    """tests/error_messages.md has more."""
    table = np.ones((ROWS, D), np.float32)
    state = optim.ema(0.9).init(table)
    for words, call in (
        ("must be", lambda: optim.rowwise_adagrad(-0.1)),
        ("must be", lambda: optim.adagrad(0.1, -1.0)),
        ("must be", lambda: optim.rowwise_adam(0.1, b2=1.0)),
        ("must be", lambda: optim.row_count_adam(0.1, b1=-0.1)),
        ("must be", lambda: optim.partial_rowwise_lamb(0.1, weight_decay=-1.0)),
        ("must be", lambda: optim.weight_decay(-0.1)),
        ("must be", lambda: optim.ema(1.0)),
        ("debias", lambda: optim.ema(0.9, 0.5)),
        ("contain", lambda: optim.ema_params(table, optax.sgd(0.1).init(table))),
        ("two states", lambda: optim.ema_params(table, (state, state))),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()
    for name in ("partial_rowwise_lamb", "weight_decay", "ema"):
        state = jax.eval_shape(TXS[name].init, make_params())
        for grads in (make_grads(0), jax.jit(to_dense)(make_grads(0))):
            with pytest.raises(ValueError, match="params"):
                jax.eval_shape(TXS[name].update, grads, state)


# ------------------------------------------------------------------ rules

# A rule changes the state `s` and returns the new weights, where k is the number of the
# step and `seen` how often each row was touched.


def _wide(h, g):
    return h.reshape(h.shape + (1,) * (g.ndim - 1))


def _mean(g):
    return np.mean(g * g, axis=tuple(range(1, g.ndim)))


def adagrad(w, g, s, k, seen):
    s["sum_of_squares"] += g * g
    return w - LR * g / (np.sqrt(s["sum_of_squares"]) + 1e-10)


def rowwise_adagrad(w, g, s, k, seen):
    s["sum_of_squares"] += _mean(g)
    return w - LR * g / (np.sqrt(_wide(s["sum_of_squares"], g)) + 1e-2)


def group_adagrad(w, g, s, k, seen):
    s["sum_of_squares"] += _mean(g)
    return w - LR * g / np.sqrt(_wide(s["sum_of_squares"], g) + 1e-2)


def _adam(g, s, k, squares):
    s["mu"] = 0.8 * s["mu"] + (1 - 0.8) * g
    s["nu"] = 0.95 * s["nu"] + (1 - 0.95) * squares
    k = _wide(np.broadcast_to(k, g.shape[:1]), g)
    nu = s["nu"] if s["nu"].ndim == g.ndim else _wide(s["nu"], g)
    return s["mu"] / (1 - 0.8**k) / (np.sqrt(nu / (1 - 0.95**k)) + 1e-2)


def rowwise_adam(w, g, s, k, seen):
    return w - LR * _adam(g, s, k, _mean(g))


def rowwise_adam_row_count(w, g, s, k, seen):
    s["row_count"] = seen
    return w - LR * _adam(g, s, seen, _mean(g))


def row_count_adam(w, g, s, k, seen):
    s["row_count"] = seen
    return w - LR * _adam(g, s, seen, g * g)


def partial_rowwise_lamb(w, g, s, k, seen):
    r = _adam(g, s, k, _mean(g)) + 0.05 * w
    norm = lambda x: np.sqrt(np.sum(x * x, axis=tuple(range(1, x.ndim))))
    return w - LR * _wide(norm(w) / norm(r), r) * r


def ftrl(w, g, s, k, seen, learning_rate, beta=1.0, l1=0.0, l2=0.0):
    """McMahan et al., 2013, algorithm 1."""
    z, n = s["z"], s["n"]
    sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / learning_rate
    s["z"], s["n"] = z, n = z + g - sigma * w, n + g * g
    with np.errstate(divide="ignore", invalid="ignore"):
        w = -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / learning_rate + l2)
    return np.where(np.abs(z) <= l1, 0, w)


ADAM = {"b1": 0.8, "b2": 0.95, "eps": 1e-2}
FTRL = [
    {"learning_rate": 0.1},
    {"learning_rate": 0.05, "beta": 0.5, "l1": 0.7, "l2": 0.3},
    {"learning_rate": 0.2, "beta": 0.0, "l1": 2.0},
]
RULES = [
    (adagrad, optim.adagrad(LR, 0.1, eps=1e-10)),
    (rowwise_adagrad, optim.rowwise_adagrad(LR, eps=1e-2)),
    (group_adagrad, optim.group_adagrad(LR, eps=1e-2)),
    (rowwise_adam, optim.rowwise_adam(LR, **ADAM)),
    (rowwise_adam_row_count, optim.rowwise_adam(LR, **ADAM, row_count=True)),
    (row_count_adam, optim.row_count_adam(LR, **ADAM)),
    (
        partial_rowwise_lamb,
        optim.partial_rowwise_lamb(LR, **ADAM, weight_decay=0.05),
    ),
    *((functools.partial(ftrl, **hyper), optim.ftrl(**hyper)) for hyper in FTRL),
]


@pytest.mark.parametrize("rule, tx", RULES)
def test_as_defined(rule, tx, x64):
    """Four steps by rows with duplicates, and a dense one, which moves all rows.

    Rows that are not read keep their bits.
    """
    params = make_params("float64", cube=True)["cube"]
    w, state, seen = np.array(params), tx.init(params), np.zeros(V)
    held = lambda state: {
        field: np.array(x, np.float64)
        for field, x in state._asdict().items()
        if field != "count" and x is not None
    }
    expected, run = held(state), jax.jit(functools.partial(step, tx))
    for t in range(5):
        g = make_grads(t, "float64", cube=True)["cube"]
        sums, rows = summed(g.rows, g.values, V), np.asarray(g.rows)
        touched = np.unique(rows[(rows >= 0) & (rows < V)])
        if t == 4:
            g, touched = sums, np.arange(V)
        old = np.asarray(params)
        params, state = run(params, state, g)
        others = np.setdiff1d(np.arange(V), touched)
        assert_same_bits(np.asarray(params)[others], old[others])

        seen[touched] += 1
        s = {field: x[touched] for field, x in expected.items()}
        w[touched] = rule(w[touched], sums[touched], s, t + 1, seen[touched])
        for field in expected:
            expected[field][touched] = s[field]
    assert seen.min() == 1 and seen.max() > 2 and state.count == 5
    assert run._cache_size() == 2
    found = {"weights": np.asarray(params), **held(state)}
    assert_trees_close(found, {"weights": w, **expected}, rtol=1e-9)
    np.testing.assert_array_equal(np.asarray(params) == 0, w == 0)


@pytest.mark.parametrize("make", [optim.rowwise_adagrad, optim.rowwise_adam])
def test_nothing_is_nothing(make):
    """A zero gradient with eps = 0 divides nothing by nothing; so its derivative."""
    tx, zeros = make(LR, eps=0.0), jnp.zeros((V, 2))
    update = lambda g: tx.update(g, tx.init(zeros), zeros)[0]
    updates, pullback = jax.jit(lambda g: jax.vjp(update, g))(zeros)
    assert np.all(np.asarray(updates) == 0)
    assert np.all(np.isfinite(jax.jit(pullback)(jnp.ones_like(zeros))[0]))


def test_lamb_moves_rows_of_zeros():
    """Their trust ratio is 1, as optax's; FBGEMM's is 0, and 0 / 0 is NaN there."""
    tx = optim.partial_rowwise_lamb(LR)
    params, g = np.zeros((2, V, 2), np.float32)
    params[1], g[0] = 3.0, 1.0
    updates, _ = jax.jit(tx.update)(g, tx.init(params), params)
    updates = np.asarray(updates)
    np.testing.assert_allclose(updates[0], [-LR, -LR], rtol=1e-6)
    assert np.all(updates[1:] == 0)


def test_bias_leaves_and_rows_without_elements():
    """In rank 1 each element is a row; a row of no elements has mean 0, not NaN."""
    shapes, tx = {"bias": 3, "scalar": (), "empty": (4, 0)}, optim.rowwise_adagrad(LR)
    fill = lambda x: {name: np.full(y, x, np.float32) for name, y in shapes.items()}
    params, grads = fill(0), fill(2)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["bias"], [-LR] * 3, rtol=1e-6)
    np.testing.assert_allclose(updates["scalar"], -LR, rtol=1e-6)
    assert state.sum_of_squares["scalar"].shape == ()
    assert np.all(np.asarray(state.sum_of_squares["empty"]) == 0)


# ------------------------------------------------------------------ ftrl


@pytest.mark.slow
@pytest.mark.parametrize(
    "params_dtype, grads_dtype",
    [("float32", "bfloat16"), ("bfloat16", "bfloat16")],
)
def test_zeros_of_ftrl_are_exact(params_dtype, grads_dtype):
    """Whatever the weights were: `old + (0 - old)` is 0, in rows and dense alike."""
    tx, zeros = optim.ftrl(1.0, l1=1.5), []
    start = jnp.asarray(_draw(V, 4, seed=1), params_dtype)
    with jax.numpy_dtype_promotion("standard"):  # optax adds float32 to bfloat16
        run = jax.jit(functools.partial(step, tx))
        for rows in (None, jnp.arange(V)):
            params, state = start, tx.init(start)
            for g in _draw(3, V, 4, seed=3):
                g = jnp.asarray(g, grads_dtype)
                g = g if rows is None else sj.SelectedRows(rows, g, V)
                params, state = run(params, state, g)
                zeros.append(np.abs(state.z) <= 1.5)
                np.testing.assert_array_equal(np.asarray(params) == 0, zeros[-1])
    assert params.dtype == params_dtype
    assert 0.1 < np.mean(zeros) < 0.9


def test_a_large_sum_of_squares_loses_no_step():
    """sqrt(n + g^2) - sqrt(n) in float32 would be 0 or 2e-3 here, and is 5e-4."""
    tx, params = optim.ftrl(1.0), np.ones((1, 1), np.float32)
    state = tx.init(params)._replace(n=np.float32(1e6) * params)
    _, new = jax.jit(tx.update)(params, state, params)
    assert np.isclose(new.z, 1 - 5e-4, rtol=1e-7, atol=0).all()


# ------------------------------------------------------------------ weight_decay

ROWS, D, RATE = 11, 2, 0.3
flush = jax.jit(optim.flush_weight_decay)
SCHEDULES = {
    "constant": 0.05,
    "schedule": optax.exponential_decay(0.2, 3, 0.7),
    "python": lambda count: 0.1 / (1 + count),
}


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_touched_row_is_where_the_dense_run_has_it(name):
    """SGD depends on nothing but the gradient, so rows agree whenever they are read."""
    lr = SCHEDULES[name]
    tx = lazy(optax.chain(optax.sgd(lr), optim.weight_decay(RATE, lr)))
    params = jnp.asarray(_draw(ROWS, D))
    dense, rng = np.asarray(params, np.float64), np.random.default_rng(1)
    state, run = tx.init(params), jax.jit(functools.partial(step, tx))
    for t in range(9):
        rate = float(lr(np.array(t))) if callable(lr) else lr
        rows = rng.integers(0, 4, 3)  # some are read at every step, most never
        values = rng.standard_normal((3, D)).astype(np.float32)
        g = sj.SelectedRows(rows, values, ROWS)
        params, state = run(params, state, g)
        dense = dense * (1 - rate * RATE) - rate * summed(rows, values, ROWS)
        touched = np.unique(rows)
        np.testing.assert_allclose(
            np.asarray(params)[touched], dense[touched], rtol=2e-5
        )
    assert np.any(np.abs(np.asarray(params) - dense) > 0.05)
    flushed, after = flush(params, state)
    np.testing.assert_allclose(flushed, dense, rtol=2e-5)
    # Up to date: another flush changes nothing.
    again, _ = flush(flushed, after)
    np.testing.assert_array_equal(again, flushed)
    # A dense gradient touches all rows.
    params, _ = run(params, state, np.ones((ROWS, D), np.float32))
    rate = float(lr(np.array(9))) if callable(lr) else lr
    np.testing.assert_allclose(params, dense * (1 - rate * RATE) - rate, rtol=2e-5)


def test_many_steps_of_decay_lose_no_digit():
    """After many steps a single one is as exact as the first, also as one program."""
    tx = optim.weight_decay(0.01, 1e-3)
    params, zeros = np.ones((2, 1), np.float32), np.zeros((2, 1), np.float32)
    one = lambda _, state: tx.update(zeros, state, params)[1]
    steps = jax.jit(lambda state: jax.lax.fori_loop(0, 300_000, one, state))
    state = steps(tx.init(params))
    total = np.asarray(state.log_decay, np.float64).sum()
    assert np.isclose(total, 300_000 * np.log1p(-1e-5), rtol=1e-6)
    updates, state = tx.update(zeros, state, params)
    assert np.isclose(float(updates[0, 0]), -1e-5, rtol=1e-6)
    # A plain float would be off by much more.
    high = np.asarray(state.log_decay)[0]
    assert abs(float(high + np.float32(-1e-5)) - float(high) + 1e-5) > 1e-8


def test_a_schedule_that_takes_it_all():
    """1 - lr * rate of 0 or less leaves (almost) nothing, and no NaN later."""
    tx = optim.weight_decay(1.0, lambda count: jnp.where(count == 0, 2.0, 0.1))
    params = jnp.ones((2, 1))
    state = tx.init(params)
    for _ in range(2):
        params, state = step(tx, params, state, jnp.zeros((2, 1)))
        np.testing.assert_allclose(params, 0, atol=1e-7)
    assert np.all(np.isfinite(state.log_decay))


@pytest.mark.usefixtures("loose_promotion")
def test_flush_finds_all_of_them():
    """Through masks, each state for its own parameters."""
    shapes = {"a": (ROWS, D), "b": (ROWS, D), "c": (3,)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    mask = lambda name: {key: key == name for key in params}
    tx = optax.chain(
        optax.masked(optim.weight_decay(0.1), mask("a")),
        optax.masked(optim.weight_decay(0.5), mask("b")),
        optax.sgd(0.1),
    )
    # A step that reads neither.
    none = {"a": None, "b": None, "c": np.zeros(3, np.float32)}
    _, state = jax.jit(tx.update)(none, tx.init(params), params)
    params, _ = flush(params, state)
    for name, expected in (("a", 0.9), ("b", 0.5), ("c", 1.0)):
        np.testing.assert_allclose(params[name], expected, rtol=1e-6)


# ------------------------------------------------------------------ ema

DECAY = 0.8
CHAINS = {
    "last": lambda average: lazy(optax.chain(optax.adam(0.1), average)),
    # The parts after it change the updates.
    "first": lambda average: lazy(optax.chain(average, optax.adam(0.1))),
    "lazies": lambda average: optax.chain(lazy(average), lazy(optax.sgd(0.3))),
    "rounding": lambda average: optim.rounding(lazy(average), master=True),
}


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize(
    "chain, debias", [*((name, True) for name in CHAINS), ("first", False)]
)
def test_all_rows_have_the_dense_average_after_every_step(chain, debias):
    tx = CHAINS[chain](optim.ema(DECAY, debias))
    dense = optax.ema(DECAY, debias)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(params, state, grads, dense_state):
        params, state = step(tx, params, state, grads)
        expected, dense_state = dense.update(params, dense_state)
        average = optim.ema_params(params, state)
        return params, state, dense_state, expected, average

    params = {"table": jnp.asarray(_draw(ROWS, D)), "bias": jnp.asarray(_draw(3))}
    state, dense_state = tx.init(params), dense.init(params)
    start, rng = np.asarray(params["table"]).copy(), np.random.default_rng(1)
    for k in range(9):
        rows = rng.integers(0, 5, 3)  # with duplicates; most rows are never touched
        table = sj.SelectedRows(rows, _draw(3, D, seed=k), ROWS)
        grads = {"table": table, "bias": jnp.asarray(_draw(3, seed=k))}
        result = run(params, state, grads, dense_state)
        params, state, dense_state, expected, found = result
        assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)
    assert run._cache_size() == 1
    assert np.abs(found["table"] - params["table"]).max() > 0.05
    if debias:
        assert_same_bits(found["table"][5:], start[5:])


def test_long_gaps_lose_no_digit():
    """A row touched twice with 200,000 steps between, against float64."""
    decay, gap = 0.99999, 200_000
    tx, average = optim.ema(decay), jax.jit(optim.ema_params)
    table = np.array([[1.0], [4.0]], np.float32)
    first = sj.SelectedRows([0], np.array([[1.0]], np.float32), 2)  # 1 to 2
    second = sj.SelectedRows([0], np.array([[3.0]], np.float32), 2)  # 2 to 5
    run = jax.jit(functools.partial(step, tx))

    def check(exact):
        np.testing.assert_allclose(average(table, state), [[exact], [4.0]], rtol=1e-6)

    table, state = run(table, tx.init(table), first)
    state = state._replace(count=state.count + gap)
    check(2.0)  # the average of rows that were 2 from the first step on
    table, state = run(table, state, second)
    weight = (1 - decay) / -np.expm1((gap + 2) * np.log(decay))
    exact = weight * 5 + (1 - weight) * 2
    check(exact)
    state = state._replace(count=state.count + gap)
    mass = -np.expm1((gap + 2) * np.log(decay))
    past = mass * exact * np.exp(gap * np.log(decay))
    now = -np.expm1(gap * np.log(decay)) * 5
    check((past + now) / -np.expm1((2 * gap + 2) * np.log(decay)))


@pytest.mark.usefixtures("loose_promotion")
def test_some_parameters_in_low_precision_and_no_decay():
    """Masked leaves stay the parameters; bfloat16 leaves are averaged in float32."""
    full = lambda x, dtype=np.float32: np.full((ROWS, D), x, dtype)
    params = {"a": full(1.0, jnp.bfloat16), "b": full(1.0), "none": None}
    tx = optax.masked(optim.ema(0.0), {"a": True, "b": False, "none": False})
    state = tx.init(params)
    assert state.inner_state.average["a"].dtype == jnp.float32
    updates = {"a": full(0.5, jnp.bfloat16), "b": full(1.0), "none": None}
    moved, state = jax.jit(functools.partial(step, tx))(params, state, updates)
    found = optim.ema_params(moved, state)
    assert found["none"] is None and found["b"] is moved["b"]
    assert_same_bits(found["a"], moved["a"])  # decay 0: the parameters


# ------------------------------------------------------------------ global_norm


norm = jax.jit(optim.global_norm)


def test_global_norm_is_of_merged_rows():
    ids, values, bias = np.array([4, 0, 4, 9]), _draw(4, 3), np.float32([0, 1, 2])
    rows = sj.SelectedRows(ids, values, 9)
    tree = {"rows": rows, "bias": bias, "none": None}
    squares = np.sum(summed(ids, values, 9) ** 2)
    assert np.isclose(norm(tree), np.sqrt(squares + 5))
    assert optim.global_norm({"none": None, "masked": optax.MaskedNode()}) == 0
    stack = sj.SelectedRows(ids, values, 9, stack=(3,))
    assert np.isclose(norm(stack), np.sqrt(squares))
    f = lambda x: optim.global_norm(sj.SelectedRows(np.array([1, 1]), x, 4))
    assert np.allclose(jax.jit(jax.grad(f))(np.float32([[1], [2]])), 1)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_squares_and_sums_of_narrow_types_do_not_overflow(dtype):
    values = np.full((2, 4), 4e4, dtype)
    rows = sj.SelectedRows(np.array([1, 1]), values, 9)
    of_rows = norm([rows, np.zeros(9, np.float32)])
    assert of_rows.dtype == jnp.float32
    np.testing.assert_allclose(of_rows, 1.6e5, rtol=1e-2)
    np.testing.assert_allclose(norm({"w": values}), 4e4 * 8**0.5, rtol=1e-2)
