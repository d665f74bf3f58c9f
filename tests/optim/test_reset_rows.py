"""reset_rows: afterwards a row is as if it had never been touched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import (
    assert_same_bits,
    assert_trees_close,
    assert_written_in_place,
    compile_as_users_do,
    slow_but,
)
from optimizers import SEPARABLE, step
from sparsejax.optim import lazy, reset_rows


pytestmark = pytest.mark.usefixtures("loose_promotion")  # optimizers of others
V, D = 7, 3
OWN = {
    "rowwise_adam": lambda: sj.optim.rowwise_adam(0.1),
    "weight_decay": lambda: optax.chain(optax.sgd(0.1), sj.optim.weight_decay(0.1)),
    "partition": lambda: optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)},
        {"table": "a", "w": "b"},
    ),
}
# Kinds of state: [V, D], [V], [V, 1], copies of weights, counts, hyperparameters.
OF_OPTAX = "adam inject_hyperparams schedule_free user_written"
CHOSEN = {name: SEPARABLE[name] for name in OF_OPTAX.split()} | OWN
# For the new weights.
TO_ONES = {"embedding_init": jax.nn.initializers.ones, "key": 0}


def _params():
    # The reset row starts at its new weights.
    table = np.random.default_rng(0).normal(size=(V, D)).astype(np.float32)
    table[2] = 0
    return {"table": table, "w": np.ones(D, np.float32)}


def _grads(k, rows):
    rng = np.random.default_rng(k)
    values = rng.normal(size=(len(rows), D)).astype(np.float32)
    w = rng.normal(size=D).astype(np.float32)
    return {"table": sj.SelectedRows(np.array(rows), values, V), "w": w}


@pytest.mark.parametrize("name", slow_but(CHOSEN, "adam"))
def test_a_row_is_as_if_never_touched(name):
    """A run that touches row 2 and resets it, and one that did not touch it before."""
    tx = lazy(CHOSEN[name]())
    train, rows = jax.jit(functools.partial(step, tx)), {"table": np.array([2, V, -1])}
    reset = jax.jit(lambda params, state: reset_rows(tx, state, params, rows))

    def run(row):
        """Reads `row` where another run reads row 2."""
        params = _params()
        state = tx.init(params)
        for k, rows in enumerate(([row, 5, 1], [0, row, row])):
            params, state = train(params, state, _grads(k, rows))
        if row == 2:
            params, state = reset(params, state)
        return train(params, state, _grads(3, [2, 4, 2]))

    touched, untouched = run(2), run(V)
    if name == "weight_decay":  # the row of zeros has another date of its last decay
        touched, untouched = touched[0], untouched[0]
    assert_trees_close(touched, untouched)


def test_other_rows_keep_their_bits_and_new_ones_are_of_the_initializer():
    tx, normal = lazy(optax.adam(0.1)), jax.nn.initializers.normal(2.0)

    @jax.jit
    def run(params):
        params, state = step(tx, params, tx.init(params), _grads(0, [0, 2, 5]))
        rows = {"table": np.array([5, V]), "w": None}
        options = {"embedding_init": normal, "key": 3}
        reset = reset_rows(tx, state, params, rows, **options)
        key = jax.random.fold_in(jax.random.key(3), 0)
        return params, state, *reset, normal(key, (2, D), jnp.float32)

    params, state, new, fresh, drawn = jax.tree.map(np.asarray, run(_params()))
    others = np.array([0, 1, 2, 3, 4, 6])
    assert_same_bits(new["table"][others], params["table"][others])
    assert_same_bits(new["w"], params["w"])
    assert_same_bits(new["table"][5], drawn[0])
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(fresh)):
        if before.shape == (V, D):
            assert_same_bits(after[others], before[others])
            assert not after[5].any() and before[5].any()
        else:
            assert_same_bits(after, before)


@pytest.mark.slow
def test_copies_of_weights_in_the_state_are_those_of_the_new_weights():
    tx = sj.optim.rounding(lazy(optax.sgd(0.1)), master=True)
    table = np.zeros((V, D), jnp.bfloat16)
    reset = jax.jit(lambda *args: reset_rows(tx, *args, np.array([1]), **TO_ONES))
    table, state = jax.device_get(reset(tx.init(table), table))
    assert table[:3, 0].tolist() == state.master[:3, 0].tolist() == [0, 1, 0]


@pytest.mark.slow
def test_missed_decay_counts_from_the_reset():
    tx = lazy(optax.chain(optax.sgd(1.0), sj.optim.weight_decay(0.5)))
    zero = lambda row: sj.SelectedRows(np.array([row]), np.zeros((1, 1), np.float32), V)

    @jax.jit
    def run(table):
        state = tx.init(table)
        for row in (0, 1):
            table, state = step(tx, table, state, zero(row))
        table, state = reset_rows(tx, state, table, np.array([3]), **TO_ONES)
        table, state = step(tx, table, state, zero(3))
        return table, sj.optim.flush_weight_decay(table, state)[0]

    before, table = run(np.ones((V, 1), np.float32))
    np.testing.assert_allclose(before[3], 0.5, rtol=1e-6)
    expected = [0.125] * 3 + [0.5] + [0.125] * 3
    np.testing.assert_allclose(table[:, 0], expected, rtol=1e-6)


@pytest.mark.slow
def test_rows_of_exact_are_up_to_date():
    """Dense training of a row of ones that is new at step 2."""
    decay = optax.add_decayed_weights(0.5)
    tx = sj.optim.exact(optax.chain(optax.trace(0.5), decay, optax.scale(-0.1)))

    def train(params, state, row):
        params, state = tx.catch_up(params, state, {"table": row})
        grads = {"table": sj.SelectedRows(row, np.ones((1, 1), np.float32), V)}
        return step(tx, params, state, grads)

    @jax.jit
    def run(params):
        state, row = tx.init(params), {"table": np.array([4])}
        for _ in range(2):
            params, state = train(params, state, row["table"])
        params, state = reset_rows(tx, state, params, row, **TO_ONES)
        params, state = train(params, state, np.array([0]))
        return tx.flush(params, state)[0]

    params = run({"table": np.ones((V, 1), np.float32)})
    np.testing.assert_allclose(params["table"][4], 0.95, rtol=1e-6)
    np.testing.assert_allclose(params["table"][5], 0.95**3, rtol=1e-6)


@pytest.mark.parametrize("capacity", slow_but([3, V, None], 3))
def test_accumulated_gradients_are_dropped(capacity):
    """The slots of other rows stay where they are."""
    tx = sj.optim.accumulate(lazy(optax.sgd(1.0)), 2, capacity={"t": capacity})
    full = lambda x: np.full((2, 1), x, np.float32)
    grad = lambda rows, x: {"t": sj.SelectedRows(np.array(rows), full(x), V)}
    dense = lambda rows, x: {"t": grad(rows, x)["t"].to_dense()}
    make = dense if capacity is None else grad

    @jax.jit
    def run(params):
        _, state = tx.update(make([1, 2], 8.0), tx.init(params), params)
        rows = {"t": np.array([1, 5])}
        params, state = reset_rows(tx, state, params, rows)
        return step(tx, params, state, make([1, 6], 2.0))[0]

    params = run({"t": np.zeros((V, 1), np.float32)})
    assert params["t"][:, 0].tolist() == [0, -1, -4, 0, 0, 0, -1]


@pytest.mark.slow
def test_in_place():
    tx, table = lazy(optax.adam(0.1)), jnp.zeros((50_000, 8))
    reset = lambda table, state, rows: reset_rows(tx, state, table, rows)
    donated = jax.jit(reset, donate_argnums=(0, 1))
    compiled = compile_as_users_do(donated.lower(table, tx.init(table), jnp.arange(16)))
    assert_written_in_place(compiled, [table] * 3, 10_000)
