"""The two-word change on models in other people's ways of writing them.

Each is a program whose tables are read through the lifted transformations of a
framework. haiku is skipped where it is not installed; `pip install 'sparsejax[models]'`
brings it.
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
KEY, ZERO = jax.random.key(0), jnp.zeros(())


def _total(x):
    return jnp.sum(jnp.sin(x))


def _add_total(f):
    """The step of a loop."""
    return lambda total, *args: (jnp.tanh(total + _total(f(*args))), None)


# -- equinox ---------------------------------------------------------------------------


class EqxModel(eqx.Module):
    embed: eqx.nn.Embedding
    mlp: eqx.nn.MLP
    name: str = "model"

    def __call__(self, ids):
        return self.mlp(jnp.mean(jax.vmap(self.embed)(ids), axis=0))


def _eqx_model(key):
    mlp = eqx.nn.MLP(D, "scalar", 5, 1, key=key)
    return EqxModel(eqx.nn.Embedding(V, D, key=key), mlp)


def test_an_equinox_model_that_can_be_called():
    """It is a function and a tree; as `tables=` it is the tree."""
    model = eqx.filter_jit(_eqx_model)(KEY)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    tables = jax.tree.map(lambda x: x is params.embed.weight, params)
    loss = lambda model, ids: _total(jax.vmap(model)(ids))
    in_parts = lambda p: loss(eqx.combine(p, static), jnp.asarray(EACH))
    g = jax.jit(sj.grad(in_parts, tables=tables))(params)
    assert is_rows(g.embed.weight) and callable(g)
    sj.testing.assert_equals_dense(loss, optax.adagrad(0.1), model, [EACH, EACH + 1])


def _eqx_ensemble(call):
    """A loss of K models as one tree."""
    make = eqx.filter_jit(eqx.filter_vmap(_eqx_model))
    ensemble = make(jax.random.split(KEY, K))
    params, static = eqx.partition(ensemble, eqx.is_inexact_array)
    return lambda p: call(p, lambda p: eqx.combine(p, static)), params


def _eqx_vmapped(params, model):
    call, same = lambda m, ids: m(ids), jnp.asarray(IDS)
    of_same = eqx.filter_vmap(call, in_axes=(eqx.if_array(0), None))
    each = eqx.filter_vmap(call)(model(params), jnp.asarray(EACH))
    return _total(of_same(model(params), same)) + _total(each)


def _eqx_scanned(params, model):
    step = _add_total(lambda p: model(p)(jnp.asarray(IDS)))
    return jax.lax.scan(step, ZERO, params)[0]


# -- nnx -------------------------------------------------------------------------------


class NnxModel(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(V, D, rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(D, 2, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.dense(self.embed(ids))


def _call(model, ids: Any = IDS):
    return _total(model(jnp.asarray(ids)))


def _nnx(call, make: Any = NnxModel):
    graph, state = nnx.split(make())
    return lambda state: call(nnx.merge(graph, state)), state


def _nnx_scanned(m):
    step = lambda total, m, ids: (total + _call(m, ids), total)
    scan = nnx.scan(step, in_axes=(nnx.Carry, None, 0), out_axes=(nnx.Carry, 0))
    return scan(ZERO, m, jnp.asarray(EACH))[0] + _call(m, IDS + 5)


def _nnx_stack():
    return nnx.vmap(lambda key: nnx.Embed(V, D, rngs=nnx.Rngs(key)))(
        jax.random.split(KEY, K)
    )


def _nnx_of_stack(m):
    step = lambda total, m: jnp.tanh(total + _call(m))
    scan = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return _total(nnx.vmap(lambda m, i: m(i))(m, EACH)) + scan(ZERO, m)


# -- linen -----------------------------------------------------------------------------


class Step(nn.Module):
    @nn.compact
    def __call__(self, total, ids):
        return _add_total(nn.Embed(V, D))(total, ids)


def _linen(call):
    class Model(nn.Module):
        @nn.compact
        def __call__(self):
            return _total(nn.Dense(2)(jnp.atleast_1d(call())))

    model: Any = Model()
    return model.apply, jax.jit(model.init)(KEY)


def _map_variables(into, out=lambda x: x):
    each = lambda f: functools.partial(jax.tree.map, f)
    options: Any = dict(trans_in_fn=each(into), trans_out_fn=each(out), init=True)
    return nn.map_variables(nn.Embed, "params", **options)(V, D)(IDS)


SPLIT: Any = dict(variable_axes={"params": 0}, split_rngs={"params": True})
SHARED: Any = dict(variable_broadcast="params", split_rngs={"params": False})


# -- haiku -----------------------------------------------------------------------------


def _haiku(call):
    hk = pytest.importorskip("haiku")
    model = hk.without_apply_rng(hk.transform(lambda: _total(call(hk))))
    return model.apply, jax.jit(model.init)(KEY)


def _haiku_scanned(hk):
    embed = hk.Embed(V, D)
    embed(IDS)  # haiku wants parameters made outside of branches and loops
    step = _add_total(lambda ids: embed(jnp.asarray(ids)))
    return hk.scan(step, ZERO, jnp.asarray(EACH))[0]


def _haiku_stacked(hk):
    layer = lambda x: jnp.tanh(x + hk.Embed(V, D)(jnp.asarray(IDS)))
    return hk.experimental.layer_stack(K)(layer)(jnp.zeros((3, D)))


# By name: how a loss and its parameters are made, of what, and how many rows are read.
MODELS: dict[str, Any] = {
    "equinox ensemble": (_eqx_ensemble, _eqx_vmapped, 18),
    "equinox scanned": (_eqx_ensemble, _eqx_scanned, 9),
    "nnx jit and remat": (_nnx, nnx.jit(nnx.remat(_call)), 3),
    "nnx vmap": (_nnx, lambda m: nnx.vmap(_call, in_axes=(None, 0))(m, EACH).sum(), 9),
    "nnx scan and again": (_nnx, _nnx_scanned, 12),
    "nnx cond": (
        _nnx,
        lambda m: nnx.cond(jnp.array(3) > 2, _call, lambda m: 2.0 * _call(m), m),
        3,
    ),
    "nnx stack": (functools.partial(_nnx, make=_nnx_stack), _nnx_of_stack, 18),
    "linen rnn": (_linen, lambda: nn.RNN(nn.LSTMCell(6))(nn.Embed(V, D)(EACH)), 9),
    "linen vmap": (_linen, lambda: nn.vmap(nn.Embed, **SPLIT)(V, D)(EACH), 9),
    "linen scan": (_linen, lambda: nn.scan(Step, **SHARED)()(ZERO, EACH)[0], 9),
    "linen remat": (
        _linen,
        lambda: nn.scan(nn.remat(Step), **SPLIT)()(ZERO, EACH)[0],
        9,
    ),
    "linen map_variables": (_linen, lambda: _map_variables(jnp.tanh), 3),
    # A table stored transposed has its rows along the last axis: dense.
    "linen transposed": (
        _linen,
        lambda: _map_variables(jnp.transpose, jnp.transpose),
        None,
    ),
    "haiku scan": (_haiku, _haiku_scanned, 9),
    "haiku layer_stack": (_haiku, _haiku_stacked, 9),
}


@pytest.mark.parametrize("name", MODELS)
def test_lifted_transformations(name):
    """The gradient is jax.grad's, and only that of the table is sparse."""
    make, call, rows = MODELS[name]
    loss, params = make(call)
    g, dense = jax.jit(lambda p: (sj.grad(loss)(p), jax.grad(loss)(p)))(params)
    leaves = jax.tree_util.tree_leaves_with_path(g, is_leaf=is_rows)
    sparse = {jax.tree_util.keystr(p): x.capacity for p, x in leaves if is_rows(x)}
    assert [*sparse.values()] == ([rows] if rows else [])
    assert all("embed" in path for path in sparse)
    assert_trees_close(to_dense(g), dense, rtol=1e-5, atol=1e-5)
