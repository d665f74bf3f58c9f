"""The two-word change on models in other people's ways of writing them.

Each is a program whose tables are read through the lifted transformations of a
framework. A package that is not installed skips its tests; `pip install
'sparsejax[models]'` brings them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_trees_close, is_rows, to_dense


pytestmark = [pytest.mark.usefixtures("loose_promotion"), pytest.mark.slow]

V, D, K = 97, 4, 3
IDS = np.array([3, 1, 3])
EACH = np.stack([IDS, IDS + 1, IDS * 11])


def _check(loss, params, sparse):
    """The gradient is jax.grad's, and sparse for leaves whose path has `sparse`.

    Args:
      loss: a function of the parameters.
      params: a tree of arrays.
      sparse: by a part of the leaf's path, how many rows are read.
    """
    both = jax.jit(lambda p: (sj.grad(loss)(p), jax.grad(loss)(p)))
    g, want = both(params)
    found, _ = jax.tree_util.tree_flatten_with_path(g, is_leaf=is_rows)
    rows = {jax.tree_util.keystr(p): x.capacity for p, x in found if is_rows(x)}
    expected = {
        path: count for path in rows for part, count in sparse.items() if part in path
    }
    assert rows == expected and len(rows) == len(sparse), (rows, sparse)
    assert_trees_close(to_dense(g), want, rtol=1e-5, atol=1e-5)


def _total(x):
    return jnp.sum(jnp.sin(x))


# -- equinox ---------------------------------------------------------------------------


def _equinox():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        embed: Any
        mlp: Any
        name: str = eqx.field(static=True, default="model")

        def __init__(self, key):
            keys = jax.random.split(key)
            self.embed = eqx.nn.Embedding(V, D, key=keys[0])
            self.mlp = eqx.nn.MLP(D, "scalar", 5, 1, key=keys[1])

        def __call__(self, ids):
            return self.mlp(jnp.mean(jax.vmap(self.embed)(ids), axis=0))

    return eqx, Model


def test_an_equinox_model_that_can_be_called():
    """It is a function and a tree; as `tables=` it is the tree."""
    eqx, model = _equinox()
    model = model(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params):
        model = eqx.combine(params, static)
        return _total(jax.vmap(model)(jnp.asarray(EACH)))

    _check(loss, params, {".embed.weight": 9})
    tables = jax.tree.map(lambda x: None, params)
    tables = eqx.tree_at(
        lambda m: m.embed.weight, tables, True, is_leaf=lambda x: x is None
    )
    g = sj.grad(loss, tables=tables)(params)
    assert is_rows(g.embed.weight) and callable(g)

    total = lambda model, ids: _total(jax.vmap(model)(ids))
    sj.testing.assert_equals_dense(total, optax.adagrad(0.1), model, [EACH, EACH + 1])


def test_an_ensemble_in_equinox():
    eqx, model = _equinox()
    ensemble = eqx.filter_vmap(model)(jax.random.split(jax.random.key(0), K))
    params, static = eqx.partition(ensemble, eqx.is_inexact_array)

    def loss(params):
        model = eqx.combine(params, static)
        same = eqx.filter_vmap(lambda m, ids: m(ids), in_axes=(eqx.if_array(0), None))
        each = eqx.filter_vmap(lambda m, ids: m(ids))
        return _total(same(model, jnp.asarray(IDS))) + _total(
            each(model, jnp.asarray(EACH))
        )

    _check(loss, params, {".embed.weight": 18})

    def scanned(params):
        step = lambda total, p: (
            total + _total(eqx.combine(p, static)(jnp.asarray(IDS))),
            None,
        )
        return jax.lax.scan(step, jnp.zeros(()), params)[0]

    _check(scanned, params, {".embed.weight": 9})


# -- nnx -------------------------------------------------------------------------------


def _nnx_calls():
    nnx = pytest.importorskip("flax.nnx")
    call = lambda m, ids: _total(m(jnp.asarray(ids)))

    def scanned(m):
        def step(total, m, ids):
            return total + call(m, ids), total

        scan = nnx.scan(step, in_axes=(nnx.Carry, None, 0), out_axes=(nnx.Carry, 0))
        return scan(jnp.zeros(()), m, jnp.asarray(EACH))[0]

    def looped(m):
        def body(k, carry):
            total, m = carry
            return total + call(m, IDS), m

        return nnx.fori_loop(0, 2, body, (jnp.zeros(()), m))[0]

    return {
        "jit": (lambda m: nnx.jit(call)(m, IDS), 3),
        "remat": (lambda m: nnx.remat(call)(m, IDS), 3),
        "checkpoint_twice": (lambda m: nnx.remat(nnx.remat(call))(m, IDS), 3),
        "vmap": (
            lambda m: jnp.sum(nnx.vmap(call, in_axes=(None, 0))(m, jnp.asarray(EACH))),
            9,
        ),
        "scan": (scanned, 9),
        "fori_loop": (looped, 6),
        "cond": (
            lambda m: nnx.cond(
                jnp.array(3) > 2,
                lambda m: call(m, IDS),
                lambda m: 2.0 * call(m, IDS[:2]),
                m,
            ),
            3,
        ),
        "switch": (
            lambda m: nnx.switch(
                jnp.array(1),
                [lambda m: call(m, IDS), lambda m: 2.0 * call(m, IDS[:2])],
                m,
            ),
            3,
        ),
    }


NNX = (
    "jit", "remat", "checkpoint_twice", "vmap", "scan", "fori_loop", "cond", "switch"
)  # fmt: skip


@pytest.mark.parametrize("name", NNX)
def test_nnx_lifted_and_then_another_read(name):
    nnx = pytest.importorskip("flax.nnx")
    calls = _nnx_calls()
    assert set(calls) == set(NNX)
    call, rows = calls[name]

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(V, D, rngs=rngs)
            self.dense = nnx.Linear(D, 2, rngs=rngs)

        def __call__(self, ids):
            return self.dense(self.embed(ids))

    graph, state = nnx.split(Model(nnx.Rngs(0)))

    def loss(state):
        model = nnx.merge(graph, state)
        total = call(model)
        return total + _total(model(jnp.asarray(IDS + 5)))

    _check(loss, state, {"embed": rows + 3})


def test_nnx_stacks_of_modules():
    nnx = pytest.importorskip("flax.nnx")

    @nnx.vmap
    def make(key):
        return nnx.Embed(V, D, rngs=nnx.Rngs(key))

    graph, state = nnx.split(make(jax.random.split(jax.random.key(0), K)))

    def vmapped(state):
        return _total(nnx.vmap(lambda m, i: m(i))(nnx.merge(graph, state), EACH))

    def scanned(state):
        def step(total, m):
            return jnp.tanh(total + _total(m(jnp.asarray(IDS))))

        scan = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(jnp.zeros(()), nnx.merge(graph, state))

    _check(lambda s: vmapped(s) + scanned(s), state, {"embedding": 18})


# -- linen -----------------------------------------------------------------------------


def _linen_calls():
    nn = pytest.importorskip("flax.linen")
    split = dict(variable_axes={"params": 0}, split_rngs={"params": True})
    shared = dict(variable_broadcast="params", split_rngs={"params": False})

    class Step(nn.Module):
        @nn.compact
        def __call__(self, total, ids):
            return jnp.tanh(total + _total(nn.Embed(V, D)(ids))), None

    def mapped(tree):
        return jax.tree.map(lambda x: 2.0 * jnp.tanh(x), tree)

    def transposed(tree):
        return jax.tree.map(jnp.transpose, tree)

    both = dict(trans_in_fn=transposed, trans_out_fn=transposed)
    zero = jnp.zeros(())
    return {
        "vmap_split": (lambda: nn.vmap(nn.Embed, **split)(V, D)(EACH), 9),
        "vmap_shared": (
            lambda: nn.vmap(
                nn.Embed, variable_axes={"params": None}, split_rngs={"params": False}
            )(V, D)(EACH),
            9,
        ),
        "scan_split": (lambda: nn.scan(Step, **split)()(zero, EACH)[0], 9),
        "scan_shared": (lambda: nn.scan(Step, **shared)()(zero, EACH)[0], 9),
        "remat": (lambda: nn.remat(nn.Embed)(V, D)(IDS), 3),
        "remat_scan": (
            lambda: nn.scan(nn.remat(Step), **split)()(zero, EACH)[0],
            9,
        ),
        "jit": (lambda: nn.jit(nn.Embed)(V, D)(IDS), 3),
        "map_variables": (
            lambda: nn.map_variables(nn.Embed, "params", trans_in_fn=mapped, init=True)(
                V, D
            )(IDS),
            3,
        ),
        "map_variables_transposed": (
            lambda: nn.map_variables(nn.Embed, "params", init=True, **both)(V, D)(IDS),
            None,
        ),
    }


LINEN = (
    "vmap_split", "vmap_shared", "scan_split", "scan_shared", "remat", "remat_scan",
    "jit", "map_variables", "map_variables_transposed",
)  # fmt: skip


@pytest.mark.parametrize("name", LINEN)
def test_linen_lifted(name):
    nn = pytest.importorskip("flax.linen")
    calls = _linen_calls()
    assert set(calls) == set(LINEN)
    call, rows = calls[name]

    class Model(nn.Module):
        @nn.compact
        def __call__(self):
            return _total(nn.Dense(2)(jnp.atleast_1d(call())))

    model = Model()
    params = model.init(jax.random.key(0))
    # A table stored transposed has its rows along the last axis: dense.
    sparse = {"embedding": rows} if rows else {}
    _check(lambda p: model.apply(p), params, sparse)


# -- haiku -----------------------------------------------------------------------------


def _haiku_calls():
    hk = pytest.importorskip("haiku")

    def scanned():
        embed = hk.Embed(V, D)
        step = lambda total, ids: (jnp.tanh(total + _total(embed(ids))), None)
        return hk.scan(step, jnp.zeros(()), jnp.asarray(EACH))[0]

    def vmapped():
        return hk.vmap(hk.Embed(V, D), split_rng=False)(jnp.asarray(EACH))

    def branched():
        embed = hk.Embed(V, D)
        embed(IDS)  # haiku wants parameters made outside of branches
        twice = lambda ids: 2.0 * embed(ids)
        return hk.cond(jnp.array(3) > 2, embed, twice, jnp.asarray(IDS))

    def stacked():
        layer = lambda x: jnp.tanh(x + hk.Embed(V, D)(jnp.asarray(IDS)))
        return hk.experimental.layer_stack(K)(layer)(jnp.zeros((3, D)))

    def looped():
        embed = hk.Embed(V, D)
        embed(IDS)
        return hk.fori_loop(
            0, K, lambda k, x: jnp.tanh(x + embed(jnp.asarray(IDS))), jnp.zeros((3, D))
        )

    return {
        "scan": (scanned, 9),
        "remat": (lambda: hk.remat(hk.Embed(V, D))(jnp.asarray(IDS)), 3),
        "vmap": (vmapped, 9),
        "cond": (branched, 3),
        "layer_stack": (stacked, 9),
        "fori_loop": (looped, 9),
    }


HAIKU = ("scan", "remat", "vmap", "cond", "layer_stack", "fori_loop")


@pytest.mark.parametrize("name", HAIKU)
def test_haiku(name):
    hk = pytest.importorskip("haiku")
    calls = _haiku_calls()
    assert set(calls) == set(HAIKU)
    call, rows = calls[name]
    model = hk.without_apply_rng(hk.transform(lambda: _total(call())))
    params = model.init(jax.random.key(0))
    _check(model.apply, params, {"embeddings": rows})


# -- keras, numpyro --------------------------------------------------------------------


def test_keras_stateless_call():
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("keras is set up for another backend")
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((3,), dtype="int32"),
            layers.Embedding(V, D),
            layers.GlobalAveragePooling1D(),
            layers.Dense(2),
        ]
    )
    trainable = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]

    def loss(trainable):
        out, _ = model.stateless_call(trainable, others, jnp.asarray(EACH))
        return _total(out)

    _check(loss, trainable, {"[0]": 9})


def test_numpyro_svi():
    """The ELBO of a subsampled model, with a table of means and one of scales."""
    numpyro = pytest.importorskip("numpyro")
    dist, infer = numpyro.distributions, numpyro.infer

    def model(y):
        with numpyro.plate("items", V, subsample_size=3) as ids:
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(z, 1.0), obs=y[ids])

    def guide(y):
        del y
        means = numpyro.param("means", jnp.zeros((V, 1)))
        scales = numpyro.param(
            "scales", jnp.ones((V, 1)), constraint=dist.constraints.positive
        )
        with numpyro.plate("items", V, subsample_size=3) as ids:
            numpyro.sample("z", dist.Normal(means[ids][:, 0], scales[ids][:, 0]))

    svi = infer.SVI(model, guide, optax.adagrad(0.1), infer.Trace_ELBO())
    y = jax.random.normal(jax.random.key(2), (V,))
    state = svi.init(jax.random.key(0), y)
    params = svi.optim.get_params(state.optim_state)

    def loss(params):
        constrained = svi.constrain_fn(params)
        return svi.loss.loss(jax.random.key(1), constrained, model, guide, y)

    _check(loss, params, {"scales": 3, "means": 3})
