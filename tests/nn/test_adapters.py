"""The layers as modules of flax and equinox: the same values and gradients."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_trees_close


# optax's, and the frameworks' own.
pytestmark = pytest.mark.usefixtures("loose_promotion")
V, D = 211, 4
IDS = jnp.array([3, 7, 3, -1])
LAYER = sj.nn.Embedding(V, D, padding_id=-1)
TABLES = {"a": (150, D), "b": (61, D)}


def _linen():
    pytest.importorskip("flax.linen")
    module = sj.nn.flax.Layer(LAYER)
    params = module.init(jax.random.key(0), IDS)
    return params, module.apply, lambda p: p["params"]["embedding"]


def _nnx():
    nnx = pytest.importorskip("flax.nnx")
    graph, params = nnx.split(sj.nn.nnx.Layer(LAYER, rngs=nnx.Rngs(0)))
    apply = lambda p, ids: nnx.merge(graph, p)(ids)
    return params, apply, lambda p: nnx.to_pure_dict(p)["params"]["embedding"]


def _equinox():
    pytest.importorskip("equinox")
    model = sj.nn.equinox.Layer(LAYER, key=jax.random.key(0))
    return model, lambda model, ids: model(ids), lambda model: model.params["embedding"]


@pytest.mark.parametrize("make", [_linen, _nnx, _equinox])
def test_same_values_gradients_and_training(make):
    params, apply, table = make()
    plain = {"embedding": table(params)}
    np.testing.assert_array_equal(apply(params, IDS), LAYER(plain, IDS))
    tx = sj.optim.lazy(optax.adagrad(0.1))

    def train(f, params):
        @jax.jit
        def step(params, state, ids):
            loss = lambda p: jnp.sum(jnp.sin(f(p, ids)))
            grads = sj.grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, grads

        state, grads = tx.init(params), params
        for k in range(2):
            params, state, grads = step(params, state, (IDS + k) % V)
        return params, grads

    (trained, grads), (want, want_grads) = train(apply, params), train(LAYER, plain)
    assert isinstance(table(grads), sj.SelectedRows)
    assert_trees_close(table(grads), want_grads["embedding"])
    assert_trees_close(table(trained), want["embedding"])


@pytest.mark.slow
def test_linen_inside_a_model():
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, ids):
            layer = sj.nn.flax.Layer
            rows = layer(sj.nn.EmbeddingCollection(TABLES))({"a": ids, "b": ids})
            tied = layer(sj.nn.Embedding(V, D), name="tied")  # called twice: one table
            x = layer(sj.nn.Dense(D))(rows["a"] + rows["b"]) + tied(ids)
            return tied.attend(x) if self.is_initializing() else x

    ids, model = jnp.array([1, 2]), Model()
    out, variables = jax.jit(model.init_with_output)(jax.random.key(0), ids)
    assert out.shape == (2, V)
    assert jax.tree.map(jnp.shape, variables["params"]) == {
        "Layer_0": {f"stack_width{D}_float32": (211, D)},
        "tied": {"embedding": (V, D)},
        "Layer_1": {"kernel": (D, D), "bias": (D,)},
    }
    loss = lambda variables: jnp.sum(jnp.sin(model.apply(variables, ids)))
    g = jax.eval_shape(sj.grad(loss), variables)["params"]
    tables = g["tied"]["embedding"], *g["Layer_0"].values()
    assert all(isinstance(x, sj.SelectedRows) for x in tables)


@pytest.mark.window
def test_every_layer_has_its_module():
    nnx, eqx = (pytest.importorskip(name) for name in ("flax.nnx", "equinox"))
    x, key = jnp.ones((2, 9)), jax.random.key(0)
    for layer, inputs in (
        (sj.nn.Dense(3), x),  # whose size depends on the input
        (sj.nn.EmbeddingBag(V, D), IDS[None]),
        (sj.nn.EmbeddingCollection(TABLES), {"a": IDS}),
    ):
        linen = sj.nn.flax.Layer(layer)
        variables = linen.init(key, inputs)
        spec = jax.eval_shape(linen.apply, variables, inputs)
        model = sj.nn.equinox.Layer(layer, inputs, key=key)
        assert isinstance(model, eqx.Module) and model.layer == linen.layer == layer
        assert eqx.filter_eval_shape(model, inputs) == spec
        model = sj.nn.nnx.Layer(layer, inputs, rngs=nnx.Rngs(0))
        shapes = jax.tree.map(lambda x: x.shape, spec)
        assert jax.tree.map(jnp.shape, model(inputs)) == shapes
    query = jnp.ones((2, D))
    assert sj.nn.nnx.Layer(LAYER, rngs=nnx.Rngs(0)).attend(query).shape == (2, V)
    assert sj.nn.equinox.Layer(LAYER, key=key).attend(query).shape == (2, V)


@pytest.mark.parametrize(
    ("name", "package"),
    [("flax",) * 2, ("nnx", "flax"), ("equinox",) * 2, ("keras",) * 2],
)
def test_a_framework_that_is_missing_is_named(name, package, monkeypatch):
    if name in vars(sj.nn):
        monkeypatch.delattr(sj.nn, name)
    monkeypatch.delitem(sys.modules, f"sparsejax.nn.{name}", raising=False)
    for module in {package} | {m for m in sys.modules if m.split(".")[0] == package}:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=f"needs {package}.*pip install"):
        getattr(sj.nn, name)
    assert not hasattr(sj.nn, "torch")
