"""lazy inside flax's and equinox's training loops, unmodified."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_same_bits, assert_trees_close
from optimizers import LR
from sparsejax.optim import lazy


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D = 23, 5
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LR))
TX = lazy(INNER)


def _rows(table):
    values = jnp.arange(4.0 * D).reshape(4, D)
    return sj.SelectedRows(jnp.array([3, 1, 3, V]), values, table.shape[0])


def _check(old, new, expected):
    assert_trees_close(new, expected)
    others = np.delete(np.arange(V), [1, 3])
    assert_same_bits(np.asarray(new)[others], np.asarray(old)[others])


def _nnx_model():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(V, D, rngs=rngs)
            self.dense = nnx.Linear(D, 2, rngs=rngs)

    return nnx, Model(nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [False, True])
def test_nnx_optimizer_accumulates(jitted):
    """Its state is of nnx's kind after the first step, and that after the second."""
    nnx, model = _nnx_model()
    _, dense_model = _nnx_model()
    accumulated = sj.optim.accumulate(lazy(optax.sgd(LR)), 2, capacity=8)
    optimizer = nnx.Optimizer(model, accumulated, wrt=nnx.Param)
    dense = nnx.Optimizer(
        dense_model, optax.MultiSteps(optax.sgd(LR), 2), wrt=nnx.Param
    )
    ids = jnp.array([3, 1, 3])
    graph, _ = nnx.split(model)

    def loss(params, scale):
        layer = nnx.merge(graph, params)
        return scale * jnp.sum(jnp.sin(layer.dense(layer.embed(ids))))

    def step(grad, model, optimizer, scale):
        optimizer.update(model, grad(loss)(nnx.state(model, nnx.Param), scale))

    sparse_step, dense_step = (
        (nnx.jit(step, static_argnums=0) if jitted else step) for _ in range(2)
    )
    sparse_grad = lambda f: sj.grad(f, tables=lambda path, x: x.shape == (V, D))
    for k in range(4):
        sparse_step(sparse_grad, model, optimizer, k + 1.0)
        dense_step(jax.grad, dense_model, dense, k + 1.0)
    assert_trees_close(
        nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(dense_model))
    )


def test_equinox_module():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Embedding(V, D, key=jax.random.key(0))
    rows = _rows(model.weight)
    grads = eqx.tree_at(lambda m: m.weight, model, rows)
    params = eqx.filter(model, eqx.is_array)
    state = TX.init(params)
    assert_trees_close(state, INNER.init(params))

    @eqx.filter_jit
    def step(model, state, grads):
        params = eqx.filter(model, eqx.is_array)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(model, updates), state

    new, state = step(model, state, grads)
    expected, _ = INNER.update(
        eqx.tree_at(lambda m: m.weight, model, rows.to_dense()), INNER.init(params)
    )
    _check(model.weight, new.weight, model.weight + expected.weight)


@pytest.mark.slow
@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shard_map(kind):
    """Each device has a part of the table, of the state, and rows of its own."""
    parts = 8
    kind = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((parts,), ("x",), axis_types=(kind,))
    spec = jax.P("x")
    put = lambda x: jax.device_put(x, jax.NamedSharding(mesh, spec))
    table = jnp.arange(float(parts * V * D)).reshape(parts * V, D)
    rows = jnp.tile(jnp.array([3, 1, 3, V]), parts)
    values = jnp.ones((4 * parts, D))
    tx = lazy(optax.adagrad(LR))

    def step(table, rows, values):
        state = tx.init(table)
        updates, state = tx.update(sj.SelectedRows(rows, values, V), state, table)
        return optax.apply_updates(table, updates), state[0].sum_of_squares

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(step, in_specs=spec, out_specs=spec)
        new, squares = jax.jit(mapped)(put(table), put(rows), put(values))
    part, squares_of_part = step(table[:V], rows[:4], values[:4])
    new, squares = np.asarray(new), np.asarray(squares)
    assert_trees_close(new[:V], np.asarray(part))
    assert_trees_close(squares, np.tile(squares_of_part, (parts, 1)))
