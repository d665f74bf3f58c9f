"""The two-word change on models of flax linen, flax nnx and equinox."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import is_rows, to_dense


pytestmark = pytest.mark.usefixtures("loose_promotion")
V, D = 500, 8
OPTIMIZERS = {"sgd": optax.sgd(0.1), "adagrad": optax.adagrad(0.1)}
CLIPPED_ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def _batches(steps=6):
    keys = jax.random.split(jax.random.key(1), (steps, 2))
    for key_ids, key_y in keys:
        ids = jax.random.randint(key_ids, (4, 7), 0, 60)
        yield ids, jax.random.normal(key_y, (4,))


def _linen(dtype):
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            x = nn.Embed(V, D, dtype=dtype)(ids)
            x = nn.RNN(nn.LSTMCell(6))(x)
            return nn.Dense(1)(x[:, -1])[:, 0]

    model = Model()
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((4, 7), int))
    return params, lambda p, ids: model.apply(p, ids).astype(jnp.float32)  # pyright: ignore


def _nnx_model():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(V, D, rngs=rngs)
            self.head = nnx.Linear(D, 1, rngs=rngs)

        def __call__(self, ids):
            return self.head(jnp.mean(self.embed(ids), axis=1))[:, 0]

    return Model(nnx.Rngs(0))


def _nnx():
    nnx = pytest.importorskip("flax.nnx")
    graph, state = nnx.split(_nnx_model())
    return state, lambda s, ids: nnx.merge(graph, s)(ids)


def _equinox():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        embed: Any
        head: Any

        def __init__(self, key):
            self.embed = eqx.nn.Embedding(V, D, key=key)
            self.head = eqx.nn.MLP(D, "scalar", 5, 1, key=key)

        def __call__(self, ids):
            return self.head(jnp.mean(jax.vmap(self.embed)(ids), axis=0))

    params, static = eqx.partition(Model(jax.random.key(0)), eqx.is_inexact_array)
    return params, lambda p, ids: jax.vmap(eqx.combine(p, static))(ids)


MODELS = {
    "linen": partial(_linen, jnp.float32),
    "linen_bfloat16": partial(_linen, jnp.bfloat16),
    "nnx": _nnx,
    "equinox": _equinox,
}


def _rows_in(tree):
    return [x for x in jax.tree.leaves(tree, is_leaf=is_rows) if is_rows(x)]


def _assert_close(a, b, tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.window
@pytest.mark.parametrize("name", MODELS)
def test_gradient_equals_jax(name):
    params, apply = MODELS[name]()
    loss = lambda p, ids, y: jnp.mean((apply(p, ids) - y) ** 2)
    batch = next(_batches())
    g = jax.jit(sj.grad(loss))(params, *batch)
    (rows,) = _rows_in(g)
    assert rows.shape == (V, D) and rows.capacity == 28
    tolerance = 1e-2 if name == "linen_bfloat16" else 1e-6
    _assert_close(to_dense(g), jax.jit(jax.grad(loss))(params, *batch), tolerance)
    spec = jax.eval_shape(sj.grad(loss), params, *batch)
    assert _rows_in(spec)[0].capacity == 28


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, optimizer", [("linen", "sgd"), ("nnx", "sgd"), ("equinox", "adagrad")]
)
def test_trains_as_dense(name, optimizer):
    params, apply = MODELS[name]()
    loss = lambda p, ids, y: jnp.mean((apply(p, ids) - y) ** 2)
    sj.testing.assert_equals_dense(loss, OPTIMIZERS[optimizer], params, _batches(4))


def _check_training(old, table, want, ids):
    """The table is as dense training makes it; only rows of `ids` changed."""
    np.testing.assert_allclose(table, want, rtol=1e-5, atol=1e-6)
    changed = np.any(np.asarray(table) != np.asarray(old), axis=1)
    assert set(np.flatnonzero(changed)) == set(np.unique(ids))


@pytest.mark.slow
def test_flax_train_state():
    train_state = pytest.importorskip("flax.training.train_state")
    params, apply = _linen(jnp.float32)
    make = partial(train_state.TrainState.create, apply_fn=apply, params=params)

    @partial(jax.jit, static_argnums=0)
    def step(value_and_grad, state, ids, y):
        loss = lambda p: jnp.mean((state.apply_fn(p, ids) - y) ** 2)
        value, grads = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    batch = next(_batches())
    state, dense = make(tx=sj.optim.lazy(CLIPPED_ADAM)), make(tx=CLIPPED_ADAM)
    losses = []
    for _ in range(8):
        state, value = step(sj.value_and_grad, state, *batch)
        dense, _ = step(jax.value_and_grad, dense, *batch)
        losses.append(float(value))
    assert losses[-1] < losses[0] and state.step == 8
    start, table, want = (
        p["params"]["Embed_0"]["embedding"]
        for p in (params, state.params, dense.params)
    )
    _check_training(start, table, want, batch[0])
    _assert_close(state.opt_state, dense.opt_state, 1e-5)


@pytest.mark.slow
def test_flax_nnx_optimizer():
    """Outside of jit: tests/optim/test_frameworks.py."""
    nnx = pytest.importorskip("flax.nnx")
    model, dense_model = _nnx_model(), _nnx_model()
    graph, _ = nnx.split(model)
    loss = lambda s, ids, y: jnp.mean((nnx.merge(graph, s)(ids) - y) ** 2)
    update = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    batch = next(_batches())

    def train(model, value_and_grad, tx):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        find, losses = jax.jit(value_and_grad(loss)), []
        for _ in range(5):
            value, grads = find(nnx.split(model)[1], *batch)
            update(model, optimizer, grads)
            losses.append(float(value))
        assert optimizer.step[...] == 5 and losses[-1] < losses[0]
        return grads

    before = np.asarray(model.embed.embedding[...])
    assert _rows_in(train(model, sj.value_and_grad, sj.optim.lazy(CLIPPED_ADAM)))
    train(dense_model, jax.value_and_grad, CLIPPED_ADAM)
    tables = model.embed.embedding[...], dense_model.embed.embedding[...]
    _check_training(before, *tables, batch[0])
    ours, plain = (nnx.to_pure_dict(nnx.state(m)) for m in (model, dense_model))
    _assert_close(ours, plain, 1e-5)


@pytest.mark.slow
def test_training_in_a_scan():
    params, apply = _equinox()
    tx = sj.optim.lazy(optax.adam(1e-2))
    loss = lambda p, ids, y: jnp.mean((apply(p, ids) - y) ** 2)

    def step(carry, batch):
        params, state = carry
        value, grads = sj.value_and_grad(loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    batches = jax.tree.map(lambda *x: jnp.stack(x), *_batches())
    _, losses = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), batches))(params)
    carry, want, step = (params, tx.init(params)), [], jax.jit(step)
    for batch in _batches():
        carry, value = step(carry, batch)
        want.append(value)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
