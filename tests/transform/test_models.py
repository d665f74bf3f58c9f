"""The two-word change on models in other people's ways of writing them.

Each is a program whose tables are read through the lifted transformations of a
framework. A package that is not installed skips its tests; `pip install
'sparsejax[models]'` brings them.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import sparsejax as sj
from helpers import assert_trees_close, is_rows, to_dense


pytestmark = [pytest.mark.usefixtures("loose_promotion"), pytest.mark.slow]

V, D, K = 97, 4, 3
IDS = np.array([3, 1, 3])
EACH = np.stack([IDS, IDS + 1, IDS * 11])
ZERO = jnp.zeros(())


def _check(loss, params, sparse):
    """The gradient is jax.grad's, and sparse for leaves whose path has `sparse`.

    Args:
      loss: a function of the parameters.
      params: a tree of arrays.
      sparse: by a part of the leaf's path, how many rows are read.
    """
    g, dense = jax.jit(lambda p: (sj.grad(loss)(p), jax.grad(loss)(p)))(params)
    leaves = jax.tree_util.tree_leaves_with_path(g, is_leaf=is_rows)
    rows = {jax.tree_util.keystr(p): x.capacity for p, x in leaves if is_rows(x)}
    assert rows == {p: n for p in rows for part, n in sparse.items() if part in p}
    assert len(rows) == len(sparse)
    assert_trees_close(to_dense(g), dense, rtol=1e-5, atol=1e-5)


def _total(x):
    return jnp.sum(jnp.sin(x.astype(jnp.float32)))


# -- equinox ---------------------------------------------------------------------------


class EqxModel(eqx.Module):
    embed: Any
    mlp: Any
    name: str = eqx.field(static=True, default="model")

    def __init__(self, key):
        keys = jax.random.split(key)
        self.embed = eqx.nn.Embedding(V, D, key=keys[0])
        self.mlp = eqx.nn.MLP(D, "scalar", 5, 1, key=keys[1])

    def __call__(self, ids):
        return self.mlp(jnp.mean(jax.vmap(self.embed)(ids), axis=0))


def test_an_equinox_model_that_can_be_called():
    """It is a function and a tree; as `tables=` it is the tree."""
    model = EqxModel(jax.random.key(0))
    params, _ = eqx.partition(model, eqx.is_inexact_array)
    tables = jax.tree.map(lambda x: x is params.embed.weight, params)
    loss = lambda model, ids: _total(jax.vmap(model)(ids))
    in_parts = lambda p: loss(eqx.combine(p, model), jnp.asarray(EACH))
    g = sj.grad(in_parts, tables=tables)(params)
    assert is_rows(g.embed.weight) and callable(g)
    sj.testing.assert_equals_dense(loss, optax.adagrad(0.1), model, [EACH, EACH + 1])


def test_an_ensemble_in_equinox():
    ensemble = eqx.filter_vmap(EqxModel)(jax.random.split(jax.random.key(0), K))
    params, static = eqx.partition(ensemble, eqx.is_inexact_array)
    same, each = jnp.asarray(IDS), jnp.asarray(EACH)

    def vmapped(params):
        model, call = eqx.combine(params, static), lambda m, ids: m(ids)
        of_same = eqx.filter_vmap(call, in_axes=(eqx.if_array(0), None))
        return _total(of_same(model, same)) + _total(eqx.filter_vmap(call)(model, each))

    def scanned(params):
        step = lambda total, p: (total + _total(eqx.combine(p, static)(same)), None)
        return jax.lax.scan(step, ZERO, params)[0]

    _check(vmapped, params, {".embed.weight": 18})
    _check(scanned, params, {".embed.weight": 9})


# -- nnx -------------------------------------------------------------------------------


class NnxModel(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(V, D, rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(D, 2, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.dense(self.embed(ids))


def _call(model, ids: Any = IDS):
    return _total(model(jnp.asarray(ids)))


def _nnx_scanned(m):
    step = lambda total, m, ids: (total + _call(m, ids), total)
    scan = nnx.scan(step, in_axes=(nnx.Carry, None, 0), out_axes=(nnx.Carry, 0))
    return scan(ZERO, m, jnp.asarray(EACH))[0]


def _nnx_looped(m):
    body = lambda k, carry: (carry[0] + _call(carry[1]), carry[1])
    return nnx.fori_loop(0, 2, body, (ZERO, m))[0]


def _twice(m):
    return 2.0 * _call(m, IDS[:2])


# How a model is called, and how many rows it reads.
NNX = {
    "jit": (nnx.jit(_call), 3),
    "remat": (nnx.remat(_call), 3),
    "vmap": (lambda m: jnp.sum(nnx.vmap(_call, in_axes=(None, 0))(m, EACH)), 9),
    "scan": (_nnx_scanned, 9),
    "fori_loop": (_nnx_looped, 6),
    "cond": (lambda m: nnx.cond(jnp.array(3) > 2, _call, _twice, m), 3),
    "switch": (lambda m: nnx.switch(jnp.array(1), [_call, _twice], m), 3),
}


@pytest.mark.parametrize("name", NNX)
def test_nnx_lifted_and_then_another_read(name):
    call, rows = NNX[name]
    graph, state = nnx.split(NnxModel())

    def loss(state):
        model = nnx.merge(graph, state)
        return call(model) + _call(model, IDS + 5)

    _check(loss, state, {"embed": rows + 3})


def test_nnx_stacks_of_modules():
    make = nnx.vmap(lambda key: nnx.Embed(V, D, rngs=nnx.Rngs(key)))
    graph, state = nnx.split(make(jax.random.split(jax.random.key(0), K)))

    def loss(state):
        vmapped = _total(nnx.vmap(lambda m, i: m(i))(nnx.merge(graph, state), EACH))
        step = lambda total, m: jnp.tanh(total + _call(m))
        scan = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return vmapped + scan(ZERO, nnx.merge(graph, state))

    _check(loss, state, {"embedding": 18})


# -- linen -----------------------------------------------------------------------------


class Step(nn.Module):
    @nn.compact
    def __call__(self, total, ids):
        return jnp.tanh(total + _total(nn.Embed(V, D)(ids))), None


def _map_variables(into, out=lambda x: x):
    each = lambda f: functools.partial(jax.tree.map, f)
    options: Any = dict(trans_in_fn=each(into), trans_out_fn=each(out), init=True)
    return nn.map_variables(nn.Embed, "params", **options)(V, D)(IDS)


SPLIT: Any = dict(variable_axes={"params": 0}, split_rngs={"params": True})
SHARED: Any = dict(variable_broadcast="params", split_rngs={"params": False})
ONE: Any = dict(variable_axes={"params": None}, split_rngs={"params": False})
LINEN = {
    "rnn": (lambda: nn.RNN(nn.LSTMCell(6))(nn.Embed(V, D)(EACH)), 9),
    "vmap_split": (lambda: nn.vmap(nn.Embed, **SPLIT)(V, D)(EACH), 9),
    "vmap_shared": (lambda: nn.vmap(nn.Embed, **ONE)(V, D)(EACH), 9),
    "scan_split": (lambda: nn.scan(Step, **SPLIT)()(ZERO, EACH)[0], 9),
    "scan_shared": (lambda: nn.scan(Step, **SHARED)()(ZERO, EACH)[0], 9),
    "remat_scan": (lambda: nn.scan(nn.remat(Step), **SPLIT)()(ZERO, EACH)[0], 9),
    "jit": (lambda: nn.jit(nn.Embed)(V, D)(IDS), 3),
    "map_variables": (lambda: _map_variables(lambda x: 2.0 * jnp.tanh(x)), 3),
    # A table stored transposed has its rows along the last axis: dense.
    "map_variables_transposed": (
        lambda: _map_variables(jnp.transpose, jnp.transpose),
        None,
    ),
}


@pytest.mark.parametrize("name", LINEN)
def test_linen_lifted(name):
    call, rows = LINEN[name]

    class Model(nn.Module):
        @nn.compact
        def __call__(self):
            return _total(nn.Dense(2)(jnp.atleast_1d(call())))

    model: Any = Model()
    sparse = {"embedding": rows} if rows else {}
    params = jax.jit(model.init)(jax.random.key(0))
    _check(model.apply, params, sparse)


# -- haiku, numpyro --------------------------------------------------------------------


def _haiku_embed(hk):
    embed = hk.Embed(V, D)
    embed(IDS)  # haiku wants parameters made outside of branches and loops
    return lambda ids: embed(jnp.asarray(ids))


def _haiku_scanned(hk):
    embed = _haiku_embed(hk)
    step = lambda total, ids: (jnp.tanh(total + _total(embed(ids))), None)
    return hk.scan(step, ZERO, jnp.asarray(EACH))[0]


def _haiku_branched(hk):
    embed = _haiku_embed(hk)
    return hk.cond(jnp.array(3) > 2, embed, lambda ids: 2.0 * embed(ids), IDS)


def _haiku_stacked(hk):
    layer = lambda x: jnp.tanh(x + hk.Embed(V, D)(jnp.asarray(IDS)))
    return hk.experimental.layer_stack(K)(layer)(jnp.zeros((3, D)))


HAIKU = {
    "scan": (_haiku_scanned, 9),
    "remat": (lambda hk: hk.remat(hk.Embed(V, D))(jnp.asarray(IDS)), 3),
    "vmap": (lambda hk: hk.vmap(_haiku_embed(hk), split_rng=False)(EACH), 9),
    "cond": (_haiku_branched, 3),
    "layer_stack": (_haiku_stacked, 9),
}


@pytest.mark.parametrize("name", HAIKU)
def test_haiku(name):
    hk = pytest.importorskip("haiku")
    call, rows = HAIKU[name]
    model = hk.without_apply_rng(hk.transform(lambda: _total(call(hk))))
    _check(model.apply, model.init(jax.random.key(0)), {"embeddings": rows})


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
        positive = dist.constraints.positive
        scales = numpyro.param("scales", jnp.ones((V, 1)), constraint=positive)
        with numpyro.plate("items", V, subsample_size=3) as ids:
            numpyro.sample("z", dist.Normal(means[ids][:, 0], scales[ids][:, 0]))

    svi = infer.SVI(model, guide, optax.adagrad(0.1), infer.Trace_ELBO())
    y = jax.random.normal(jax.random.key(2), (V,))
    params = svi.optim.get_params(svi.init(jax.random.key(0), y).optim_state)

    def loss(params):
        constrained = svi.constrain_fn(params)
        return svi.loss.loss(jax.random.key(1), constrained, model, guide, y)

    _check(loss, params, {"scales": 3, "means": 3})
