"""rounding, dynamic_loss_scale, and state in types of 16 bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_same_bits, assert_trees_close
from optimizers import LR, V, make_grads, make_params, step
from sparsejax.optim import accumulate, dynamic_loss_scale, lazy, rounding


pytestmark = pytest.mark.usefixtures("loose_promotion")

ADAM, SGD = lazy(optax.adam(LR)), lazy(optax.sgd(1.0))
NARROW = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])


def _train(tx, params, grads):
    """The last parameters and state."""
    state, run = tx.init(params), jax.jit(functools.partial(step, tx))
    for g in grads:
        params, state = run(params, state, g)
    return params, state


@jax.jit
def _as_float32(grads):
    return {name: g.astype(jnp.float32) for name, g in grads.items()}


# ------------------------------------------------------------------ rounding numbers


def rounded(x, dtype, key=None):
    """Numbers of float32 as a step from zero leaves them; to nearest without a key."""
    tx, table = rounding(SGD, key, master=key is None), jnp.zeros(x.shape, dtype)
    updates, _ = tx.update(-x, tx.init(table), table)
    return optax.apply_updates(table, updates)


@NARROW
def test_rounding_to_nearest_is_the_cast(dtype):
    rng = np.random.default_rng(0)  # subnormal numbers too
    x = rng.standard_normal(2000) * 2.0 ** rng.integers(-30, 20, 2000)
    x = np.append(x, [0.0, np.inf, -np.inf, np.nan, 1e38, 65519.9, 65520.0])
    x = x.astype(np.float32)
    found = jax.jit(rounded, static_argnums=1)(x, dtype)
    with np.errstate(over="ignore"):
        assert_trees_close(found, x.astype(dtype), rtol=0, atol=0)


@NARROW
def test_rounding_at_random_is_unbiased(dtype):
    """4096 draws: the mean of a neighbour is within 5 of its standard deviations."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(300) * 10.0 ** rng.integers(-4, 4, 300)
    x = x.astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 4096)
    draw = jax.jit(jax.vmap(lambda key: rounded(x, dtype, key)))
    drawn = np.asarray(draw(keys)).astype(np.float64)
    low, high = drawn.min(axis=0), drawn.max(axis=0)
    nearest = x.astype(dtype)
    # Only the two neighbours, one of which is the nearest.
    assert np.all((drawn == low) | (drawn == high))
    assert np.all((low <= x) & (x <= high) & ((nearest == low) | (nearest == high)))
    gap = high - low
    chance = (x - low) / np.where(gap == 0, 1, gap)
    deviation = gap * np.sqrt(chance * (1 - chance) / len(keys))
    error = np.abs(drawn.mean(axis=0) - x)
    assert np.all(error <= 5 * deviation + 1e-12)
    assert np.median(error[gap > 0] / gap[gap > 0]) > 1e-4  # a draw, not a formula
    # Rounded to nearest, they are off by a quarter of the gap on average.
    assert np.mean(np.abs(nearest - x)[gap > 0] / gap[gap > 0]) > 0.2


@pytest.mark.slow
@NARROW
def test_what_rounding_at_random_keeps(dtype):
    limit = float(jnp.finfo(dtype).max)
    exact = np.float32([0.0, 1.0, -1.5, limit, -limit, np.inf, -np.inf, np.nan])
    # Numbers slightly above the limit become the largest number.
    above = np.full(100, min(limit * 1.0005, 3.4e38), np.float32)
    draw = jax.jit(rounded, static_argnums=1)
    drawn = np.asarray(draw(np.append(exact, above), dtype, jax.random.key(1)))
    assert_trees_close(drawn[:8], exact.astype(dtype), rtol=0, atol=0)
    assert np.all(drawn[8:] == limit)


def test_the_same_key_in_other_words():
    """And each gives the same bits each time, another one others."""
    x = jnp.linspace(0, 1, 500)
    words = (3, np.int32(3), jax.random.key(3), jax.random.PRNGKey(3))
    first, *others = (rounded(x, jnp.bfloat16, key) for key in words)
    for other in others:
        assert_same_bits(other, first)
    assert not jnp.array_equal(rounded(x, jnp.bfloat16, 4), first)


@pytest.mark.slow
@NARROW
def test_the_table_gets_the_rounded_weights_bits(dtype):
    """old + (new - old) is new, over many exponents and both signs."""
    rng = np.random.default_rng(1)
    old = rng.standard_normal((V, 64)) * 10.0 ** rng.integers(-2, 3, (V, 64))
    factor = rng.choice([1e-4, 0.1, 1.0, 2.5, 30.0], (V, 64))
    table = old.astype(dtype)
    grad = (old * factor * rng.standard_normal((V, 64))).astype(np.float32)
    weights = table.astype(np.float32)
    # See the module: a weight may fall to a 4,096th part, not to less, in one step.
    grad[np.abs(weights - grad) * 2**12 < np.abs(weights)] = 0
    expected = (weights - grad).astype(dtype)
    tx = rounding(SGD, master=True)
    run = jax.jit(functools.partial(step, tx))
    for g in (grad, sj.SelectedRows(np.arange(V)[::-1], grad[::-1], V)):
        new, state = run(table, tx.init(table), g)
        assert_same_bits(new, expected)
        assert_same_bits(np.asarray(state.master).astype(dtype), expected)


# ------------------------------------------------------------------ training


@pytest.mark.slow
def test_small_updates_arrive_in_expectation():
    """64 steps of 2^-11 from 1; bfloat16 has steps of 2^-8 there."""
    table = np.ones((V, 512), jnp.bfloat16)
    values = np.full((3, 512), 2**-12, jnp.bfloat16)  # row 4 twice, summed
    grads = [sj.SelectedRows(np.array([4, V, 4]), values, V)] * 64
    stuck, _ = _train(SGD, table, grads)
    assert np.all(np.asarray(stuck) == 1)
    trained, state = _train(rounding(SGD, 3), table, grads)
    moved = 1 - np.asarray(trained, np.float64)[4]
    # 64 draws of 1/8: 8 steps of 2^-8 on average, with a deviation of 2.65.
    assert abs(moved.mean() - 2**-5) < 4 * 2.65 * 2**-8 / np.sqrt(512)
    assert 2 < moved.std() / 2**-8 < 3.3
    assert_same_bits(np.delete(trained, 4, axis=0), np.delete(table, 4, axis=0))
    assert state.step == 64


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_masters_train_as_float32_does(wrapped):
    """By themselves, and with accumulation and a loss scale around them."""
    wide, scale, rtol = make_params(cube=True), 1, 1e-5
    # Numbers of bfloat16 in either run, so that both start from the same.
    narrow = {name: np.asarray(p).astype(jnp.bfloat16) for name, p in wide.items()}
    narrow["cube"] = np.asarray(wide["cube"])  # stays as it is
    wide = {name: p.astype(np.float32) for name, p in narrow.items()}
    tx, plain = rounding(ADAM, master=True), ADAM
    if wrapped:
        tx, plain, scale = accumulate(tx, 2, 20), accumulate(plain, 2, 20), 8
        tx, rtol = dynamic_loss_scale(tx, 8.0), 2e-4
    grads = [make_grads(i, jnp.bfloat16, cube=True) for i in range(6)]
    expected, inner = _train(plain, wide, list(map(_as_float32, grads)))

    @jax.jit
    def scaled(grads):
        grads = {**grads, "cube": grads["cube"].astype(jnp.float32)}
        return {name: scale * x for name, x in grads.items()}

    params, state = _train(tx, narrow, list(map(scaled, grads)))
    held = state.inner_state.inner_opt_state if wrapped else state
    assert held.master["cube"] is None
    for name in ("bias", "table"):
        assert_trees_close(held.master[name], expected[name], rtol=rtol, atol=rtol)
        master = np.asarray(held.master[name])
        assert_same_bits(params[name], master.astype(jnp.bfloat16))
    assert_trees_close(params["cube"], expected["cube"], rtol=rtol, atol=rtol)
    inner = inner.inner_opt_state if wrapped else inner
    assert_trees_close(held.inner_state, inner, rtol=rtol, atol=rtol)


def test_state_is_float32_unless_asked_otherwise():
    params, grads = make_params(jnp.bfloat16), make_grads(0, jnp.bfloat16)
    for mu_dtype, expected in ((None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
        tx = rounding(lazy(optax.adam(LR, mu_dtype=mu_dtype)), 0)
        state = tx.init(params)
        updates, new = jax.eval_shape(tx.update, grads, state, params)
        assert optax.tree_utils.tree_get(new, "mu")["table"].dtype == expected
        assert optax.tree_utils.tree_get(new, "nu")["table"].dtype == jnp.float32
        assert updates["table"].dtype == updates["bias"].dtype == jnp.float32
        assert new == jax.eval_shape(lambda state=state: state)


def test_updates_with_duplicates_are_merged_before_rounding():
    """A transformation other than `lazy` also rounds the row once."""
    plain = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (-g, s))
    table, values = np.ones((V, 1), jnp.bfloat16), np.full((3, 1), 2**-9, np.float32)
    grad = sj.SelectedRows(np.array([2, 2, 5]), values, V)
    tx = rounding(plain, master=True)
    new, state = jax.jit(functools.partial(step, tx))(table, tx.init(table), grad)
    master = np.asarray(state.master)[:, 0]
    assert master[2] == 1 - 2**-8 and master[5] == 1 - 2**-9
    assert np.asarray(new)[2, 0] == 1 - 2**-8


# ------------------------------------------------------------------ loss scaling


def _overflowing(dtype=jnp.float16):
    """Two slots of one row, each finite in float16, their sum not."""
    values = np.array([[4e4], [4e4], [np.nan]], dtype)
    return sj.SelectedRows(np.array([3, 3, V]), values, V)


@pytest.mark.slow
def test_apply_if_finite_inside_of_lazy_sees_merged_rows():
    table, grad = np.ones((V, 1), np.float16), _overflowing()
    tx = lazy(optax.apply_if_finite(optax.adam(LR), 5))
    new, state = jax.jit(functools.partial(step, tx))(table, tx.init(table), grad)
    assert state.total_notfinite == 1
    assert_same_bits(new, table)


def test_rows_are_unscaled_and_summed_in_float32():
    table, grad = np.zeros((V, 1), np.float32), _overflowing()
    tx = dynamic_loss_scale(SGD, 2.0**15)
    state, update = tx.init(table), jax.jit(tx.update)
    updates, new = update(grad, state, table)
    assert new.skipped == 0
    expected = -2 * float(np.float16(4e4)) / 2**15
    assert np.asarray(updates.to_dense())[3] == expected
    # Updates that would vanish in float16 once unscaled do not.
    tiny = grad.map(lambda v: np.full_like(v, 2**-14))
    updates, _ = update(tiny, state, table)
    assert np.asarray(updates.to_dense())[3] == -(2**-28)


@pytest.mark.parametrize("bad", ["table", "bias"])
def test_a_step_that_is_not_finite_is_left_out(bad):
    tx = dynamic_loss_scale(ADAM, 4.0, growth_interval=2)
    params, update = make_params(), jax.jit(tx.update)
    state, scales = tx.init(params), []
    infinite = {
        "bias": lambda g: g + jnp.inf,
        "table": lambda g: g.map(lambda v: v.at[0].set(-jnp.inf)),
    }
    for i in range(8):
        grads, old = make_grads(i), (params, state.inner_state)
        if i in (1, 2, 3):
            grads[bad] = infinite[bad](grads[bad])
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if i in (1, 2, 3):
            jax.tree.map(assert_same_bits, (params, state.inner_state), old)
            assert updates["table"].num_rows() == 0
        scales.append(float(state.scale))
    assert scales == [4, 2, 1, 1, 1, 2, 2, 4]  # never below 1
    assert state.skipped == 3 and state.inner_state[0].count == 5


def test_a_donated_step_runs():
    """Parameters and state as `init` gives them share no buffer."""
    tx = lazy(optax.contrib.schedule_free_sgd(LR))  # its state has the weights in it
    tx = dynamic_loss_scale(accumulate(rounding(tx, 0, master=True), 1, 20))
    params, grads = make_params(jnp.float16), make_grads(0, jnp.float16)
    carry = params, tx.init(params)
    train = lambda *carry: step(tx, *carry, grads)
    params, state = jax.jit(train, donate_argnums=(0, 1))(*carry)
    assert carry[0]["table"].is_deleted() and params["table"].dtype == jnp.float16
    assert state.inner_state.gradient_step == 1
