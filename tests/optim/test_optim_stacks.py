"""Optimizers on a stack of tables `[K, V, D]` whose gradient has rows of each."""

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
from helpers import assert_same_bits, assert_trees_close, compile_as_users_do
from sparsejax.optim import lazy


pytestmark = pytest.mark.usefixtures("loose_promotion")

K, V, D = 3, 29, 4
IDS = np.array([[3, 1, 3], [28, 1, 0], [7, 7, 7]])
TOUCHED = np.zeros((K, V), bool)
TOUCHED[np.arange(K)[:, None], IDS] = True


def _params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "stack": jax.random.normal(keys[0], (K, V, D)),
        "w": jax.random.normal(keys[1], (D,)),
    }


def _loss(params, ids=IDS):
    rows = jax.vmap(lambda table, ids: table[ids])(params["stack"], ids)
    return jnp.sum(jnp.sin(rows @ params["w"]))


def _flat(tree):
    """The same parameters, gradients or state with one table in place of the stack."""

    def one(x):
        if isinstance(x, sj.SelectedRows):
            return x.unstacked()
        return x.reshape(K * V, *x.shape[2:]) if x.shape[:2] == (K, V) else x

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, sj.SelectedRows))


def _step(tx, grad):
    def step(params, state):
        updates, state = tx.update(grad(_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step


def _run(tx, grad, jitted=True, steps=2):
    params = _params()
    step, state = _step(tx, grad), tx.init(params)
    step = jax.jit(step) if jitted else step
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


OPTIMIZERS = {
    "adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)),
    "sgd": optax.sgd(0.1),
    "adagrad": optax.adagrad(0.1),
    "masked": optax.partition(
        {"a": optax.rmsprop(0.1), "b": optax.lamb(0.1)}, {"stack": "a", "w": "b"}
    ),
}
EXACT = ("sgd", "adagrad")  # these do not move a row without a gradient


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n == "adam" else pytest.mark.slow)
        for n in OPTIMIZERS
    ],
)
def test_is_a_step_of_one_table(name):
    """Bit for bit; rows that were not read keep theirs, and so does their state."""
    tx = OPTIMIZERS[name]
    lifted, old = lazy(tx), _params()

    def on_one_table(loss):
        def grad(params):
            g = sj.grad(loss)(params)
            assert g["stack"].stack == (K,)
            return _flat(g)

        return grad

    params, state = _run(lifted, sj.grad)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(state) == shapes(tx.init(old))

    flat, flat_state = _flat(old), lifted.init(_flat(old))

    @jax.jit
    def flat_step(flat, state):
        stacked = {**flat, "stack": flat["stack"].reshape(K, V, D)}
        updates, state = lifted.update(on_one_table(_loss)(stacked), state, flat)
        return optax.apply_updates(flat, updates), state

    for _ in range(2):
        flat, flat_state = flat_step(flat, flat_state)
    jax.tree.map(assert_same_bits, _flat(params), flat)
    jax.tree.map(assert_same_bits, _flat(state), flat_state)

    assert_same_bits(params["stack"][~TOUCHED], old["stack"][~TOUCHED])
    assert np.all(params["stack"][TOUCHED] != old["stack"][TOUCHED])
    before, after = jax.tree.leaves(tx.init(old)), jax.tree.leaves(state)
    for a, b in zip(before, after):
        if a.shape == (K, V, D):
            assert_same_bits(b[~TOUCHED], a[~TOUCHED])

    dense, dense_state = _run(tx, jax.grad, steps=2 if name in EXACT else 1)
    if name not in EXACT:
        params, state = _run(lifted, sj.grad, steps=1)
    keep = (lambda x: x) if name in EXACT else (lambda x: x[TOUCHED])
    assert_trees_close(keep(params["stack"]), keep(dense["stack"]))
    assert_trees_close(params["w"], dense["w"])
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(dense_state)):
        assert_trees_close(
            *((keep(x) if x.shape == (K, V, D) else x) for x in (a, b)), atol=1e-6
        )


@pytest.mark.slow
def test_outside_of_jit_and_without_params():
    tx = lazy(OPTIMIZERS["adam"])
    assert_trees_close(_run(tx, sj.grad, jitted=False), _run(tx, sj.grad))
    params = _params()
    tx = lazy(optax.adam(0.1))
    g = sj.grad(_loss)(params)
    updates, _ = tx.update(g, tx.init(params))
    assert updates["stack"].shape == (K, V, D)
    dense, _ = optax.adam(0.1).update(jax.grad(_loss)(params), tx.init(params))
    assert_trees_close(updates["stack"].to_dense(), dense["stack"], atol=1e-6)


@pytest.mark.slow
def test_a_compiled_step_is_in_place():
    shape = (4, 50_000, 16)
    tx = lazy(optax.adam(0.1))

    def step(stack, state, ids):
        loss = lambda t: jnp.sum(jnp.sin(jax.vmap(lambda one, i: one[i])(t, ids)))
        updates, state = tx.update(sj.grad(loss)(stack), state, stack)
        return optax.apply_updates(stack, updates), state

    stack = jnp.ones(shape)
    args = stack, tx.init(stack), jnp.zeros((4, 64), int)
    compiled = compile_as_users_do(jax.jit(step, donate_argnums=(0, 1)).lower(*args))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    assert memory.alias_size_in_bytes >= 3 * stack.nbytes  # with both moments
    assert memory.temp_size_in_bytes < stack.nbytes / 8
    sizes = ("[4,50000,16]", "[200000,16]")
    for line in text.splitlines():
        made = line.split("(")[0]
        assert " copy(" not in line or not any(size in made for size in sizes), line


@pytest.mark.slow
def test_refused_for_a_stack():
    """A part that treats the first axis as the rows would see whole tables."""
    params = _params()
    g = sj.grad(_loss)(params)
    for tx, named in (
        (sj.optim.rowwise_adagrad(0.1), "sum_of_squares"),
        (optax.chain(optax.centralize(), optax.sgd(0.1)), "centralize"),
    ):
        lifted = lazy(tx)
        state = lifted.init(params)
        with pytest.raises(ValueError, match=f"a stack of tables.*{named}"):
            lifted.update(g, state, params)
        flat = _flat(params)
        lifted.update(_flat(g), lifted.init(flat), flat)
    with pytest.raises(ValueError, match="does not match these gradients"):
        tx = lazy(optax.adam(0.1))
        tx.update(g, tx.init(_flat(params)), params)


@pytest.mark.slow
def test_exact_takes_dense_gradients_of_a_stack():
    tx = sj.optim.exact(optax.sgd(0.1, momentum=0.9))
    params = _params()
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"grads\['stack'\] has rows of a stack"):
        tx.update(sj.grad(_loss)(params), state, params)
    step = sj.optim.exact_value_and_grad(_loss, tx)
    (_, grads), params, state = step(params, state)
    assert_trees_close(grads, jax.grad(_loss)(params))
    tx.update(grads, state, params)


@pytest.mark.slow
def test_global_norm():
    g = sj.grad(_loss)(_params())
    assert g["stack"].capacity == IDS.size
    dense = jax.grad(_loss)(_params())
    assert_trees_close(sj.optim.global_norm(g), optax.tree.norm(dense))


@pytest.mark.slow
def test_accumulated():
    tx = sj.optim.accumulate(lazy(optax.sgd(0.1)), 2, capacity=16, stacked=True)
    params = dense = _params()
    state = tx.init(params)
    assert state.acc_grads["stack"].shape == (16, D)
    reference = optax.MultiSteps(optax.sgd(0.1), 2)
    dense_state = reference.init(dense)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, state, ids):
        updates, state = tx.update(sj.grad(_loss)(params, ids), state, params)
        return optax.apply_updates(params, updates), state

    for k in range(4):
        params, state = step(params, state, IDS + k % 2)
        updates, dense_state = reference.update(
            jax.grad(_loss)(dense, IDS + k % 2), dense_state, dense
        )
        dense = optax.apply_updates(dense, updates)
    assert_trees_close(params, dense, atol=1e-6)
    assert state.overflow == 0
    # A dense gradient goes into the same kind of slots if there are enough.
    tx = sj.optim.accumulate(lazy(optax.sgd(1.0)), 1, capacity=K * V, stacked=True)
    grads = jax.grad(_loss)(params)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert_trees_close(updates, jax.tree.map(jnp.negative, grads))


def test_accumulate_needs_to_know_of_a_stack():
    params = _params()
    tx = sj.optim.accumulate(lazy(optax.sgd(0.1)), 2, capacity=8)
    with pytest.raises(ValueError, match="3x29 rows, .* for 3 rows. Pass stacked=True"):
        tx.update(sj.grad(_loss)(params), tx.init(params), params)
    for stacked in ({"stack": True}, "stack", {"stack": 3, "w": 1}):
        with pytest.raises((ValueError, TypeError), match="stacked must be"):
            sj.optim.accumulate(tx, 2, 8, stacked=stacked).init(params)


@pytest.mark.slow
def test_rounding_and_loss_scale():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _params())
    tx = sj.optim.rounding(lazy(optax.sgd(0.1)), master=True)
    flat = _flat(params)
    g = sj.grad(_loss)(params)
    updates, state = tx.update(g, tx.init(params), params)
    flat_updates, flat_state = tx.update(_flat(g), tx.init(flat), flat)
    new = optax.apply_updates(params, updates)
    jax.tree.map(assert_same_bits, _flat(new), optax.apply_updates(flat, flat_updates))
    jax.tree.map(assert_same_bits, _flat(state.master), flat_state.master)

    params = _params()
    tx = sj.optim.dynamic_loss_scale(lazy(optax.sgd(0.1)), 4.0)
    g = sj.grad(lambda p: 4.0 * _loss(p))(params)
    updates, _ = tx.update(g, tx.init(params), params)
    want = jax.tree.map(lambda x: -0.1 * x, jax.grad(_loss)(params))
    assert_trees_close(updates["stack"].to_dense(), want["stack"], atol=1e-6)
