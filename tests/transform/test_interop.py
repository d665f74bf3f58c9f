"""The two-word change on models nobody here wrote: flax linen, flax nnx, equinox."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import is_rows, to_dense


pytestmark = [pytest.mark.usefixtures("loose_promotion"), pytest.mark.window]
V, D = 500, 8
OPTIMIZERS = {"sgd": optax.sgd(0.1), "adagrad": optax.adagrad(0.1)}


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
    params = model.init(jax.random.key(0), jnp.zeros((4, 7), int))
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
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_trains_to_the_same_losses(name, optimizer):
    # SGD and Adagrad leave rows alone that were not read, so sparse equals dense.
    params, apply = MODELS[name]()
    tx = OPTIMIZERS[optimizer]
    loss = lambda p, ids, y: jnp.mean((apply(p, ids) - y) ** 2)

    def train(value_and_grad, tx):
        @jax.jit
        def step(params, state, ids, y):
            value, grads = value_and_grad(loss)(params, ids, y)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        p, state, losses = params, tx.init(params), []
        for batch in _batches():
            p, state, value = step(p, state, *batch)
            losses.append(value)
        return p, losses

    sparse, losses = train(sj.value_and_grad, sj.optim.lazy(tx))
    dense, want = train(jax.value_and_grad, tx)
    tolerance = 2e-2 if name == "linen_bfloat16" else 1e-5
    np.testing.assert_allclose(losses, want, rtol=tolerance)
    _assert_close(sparse, dense, tolerance)


@pytest.mark.slow
def test_flax_train_state():
    train_state = pytest.importorskip("flax.training.train_state")
    params, apply = _linen(jnp.float32)
    state = train_state.TrainState.create(
        apply_fn=apply, params=params, tx=sj.optim.lazy(optax.adam(1e-2))
    )

    @jax.jit
    def step(state, ids, y):
        loss = lambda p: jnp.mean((state.apply_fn(p, ids) - y) ** 2)
        value, grads = sj.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    batch = next(_batches())
    losses = []
    for _ in range(8):
        state, value = step(state, *batch)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    table = state.params["params"]["Embed_0"]["embedding"]
    start = params["params"]["Embed_0"]["embedding"]
    changed = np.any(np.asarray(table != start), axis=1)
    assert set(np.flatnonzero(changed)) == set(np.unique(batch[0]))


@pytest.mark.slow
def test_flax_nnx_optimizer():
    nnx = pytest.importorskip("flax.nnx")
    model = _nnx_model()
    optimizer = nnx.Optimizer(model, sj.optim.lazy(optax.adam(1e-2)), wrt=nnx.Param)
    graph, _ = nnx.split(model)
    loss = lambda s, ids, y: jnp.mean((nnx.merge(graph, s)(ids) - y) ** 2)
    before = np.asarray(model.embed.embedding[...])
    losses = []
    batch = next(_batches())
    for _ in range(5):
        _, params = nnx.split(model)
        value, grads = sj.value_and_grad(loss)(params, *batch)
        assert _rows_in(grads)
        optimizer.update(model, grads)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    changed = np.any(np.asarray(model.embed.embedding[...]) != before, axis=1)
    assert set(np.flatnonzero(changed)) == set(np.unique(batch[0]))


@pytest.mark.slow
def test_training_in_a_scan():
    params, apply = _linen(jnp.float32)
    tx = sj.optim.lazy(optax.adam(1e-2))
    loss = lambda p, ids, y: jnp.mean((apply(p, ids) - y) ** 2)

    def step(carry, batch):
        params, state = carry
        value, grads = sj.value_and_grad(loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    batches = jax.tree.map(lambda *x: jnp.stack(x), *_batches())
    _, losses = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), batches))(params)
    carry, want = (params, tx.init(params)), []
    for batch in _batches():
        carry, value = jax.jit(step)(carry, batch)
        want.append(value)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
