"""`sj.nn.nnx.value_and_grad` and `grad` against their namesakes in flax.nnx."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_trees_close, is_rows, to_dense, whole


nnx = pytest.importorskip("flax.nnx")
pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D = 101, 4
IDS = jnp.array([[3, 7, 3], [0, 9, 7]])
Y = jnp.array([1.0, 0.0])


class Count(nnx.Variable):
    """A variable of another type than Param."""


class Model(nnx.Module):
    """Its call changes batch statistics, a counter, rngs and a Python int."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.items = nnx.Embed(V, D, rngs=rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(D, 1, rngs=rngs)
        self.count = Count(jnp.zeros((), jnp.int32))
        self.calls = 0

    def __call__(self, ids):
        self.count[...] += 1
        self.calls += 1
        x = self.drop(self.norm(self.items(ids).mean(axis=1)))
        return self.head(x)[:, 0]


class Shared(nnx.Module):
    """A module that is reached by two names."""

    def __init__(self, embed):
        self.first = self.second = embed
        self.seen = Count(jnp.zeros(()))

    def __call__(self, ids):
        self.seen[...] += 1.0
        return self.first(ids).sum((1, 2)) * self.second(ids + 1).sum((1, 2))


def _mse(model, ids, y):
    return jnp.mean((model(ids) - y) ** 2)


def _plain(tree):
    """A State as arrays by path: keys as their data, SelectedRows as dense arrays."""
    if not isinstance(tree, nnx.State):
        return tree
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    as_data = lambda x: jax.random.key_data(x) if is_key(x) else x
    return jax.tree.map(as_data, to_dense(nnx.to_pure_dict(tree)))


def _same(name, fun, make, **options):
    """Our function and flax's on equal arguments: results, and arguments afterwards."""
    results = []
    for module in (sj.nn.nnx, nnx):
        args, kwargs = make()
        for _ in range(2):
            out = getattr(module, name)(fun, **options)(*args, **kwargs)
        state = _plain(nnx.state((args, kwargs)))
        is_state = lambda x: isinstance(x, nnx.State)
        plain = jax.tree.map(_plain, to_dense(out), is_leaf=is_state)
        results.append((plain, state, args, out))
    (*ours, args, out), (*flaxs, _, _) = results
    assert_trees_close(ours, flaxs, rtol=1e-5, atol=1e-6)
    return args, out


def _rows_of(grads):
    return [x for x in jax.tree.leaves(grads, is_leaf=is_rows) if is_rows(x)]


@pytest.mark.window
def test_gradients_and_state_are_those_of_flax():
    make = lambda: ((Model(), IDS, Y), {})
    (model, *_), (loss, grads) = _same("value_and_grad", _mse, make)
    assert isinstance(grads, nnx.State)
    assert nnx.to_pure_dict(grads)["items"]["embedding"].capacity == IDS.size
    assert int(model.count[...]) == model.calls == 2 and loss.shape == ()
    assert float(jnp.max(jnp.abs(model.norm.mean[...]))) > 0


def test_new_variables_and_aux():
    """A variable that the loss adds, and a module among the outputs."""

    def loss(model, ids, y):
        model.extra = Count(jnp.sum(ids) * 1.0)
        other = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        return _mse(model, ids, y), {"name": "a", "other": other, "ids": ids}

    results = []
    for module in (sj.nn.nnx, nnx):
        model = Model()
        grads, aux = module.grad(loss, has_aux=True)(model, IDS, Y)
        other = aux.pop("other")
        results.append((_plain(grads), aux["ids"], _plain(nnx.state((model, other)))))
        assert isinstance(other, nnx.Linear) and aux["name"] == "a"
        assert float(model.extra[...]) == 29.0
    assert_trees_close(*results, rtol=1e-5, atol=1e-6)


_GRAPH, *_ = nnx.split(Model(), nnx.Param, ...)
_TWO = lambda a, b, scale: jnp.sum(a(IDS)) * jnp.sum(b(IDS) * scale)
_part = lambda n, name: nnx.DiffState(n, nnx.PathContains(name))
_models = lambda: ((Model(), Model(1), 2.0), {})
_CALLS: dict[str, Any] = {
    # fun, (args, kwargs), argnums, how many gradients are sparse
    "kwargs": (_mse, lambda: ((Model(),), {"y": Y, "ids": IDS}), 0, 1),
    "tuple": (_TWO, _models, (0, 2), 1),
    "both": (_TWO, _models, (1, 0), 2),
    "array": (lambda t, i: jnp.sum(t[i]), lambda: ((jnp.ones((V, D)), IDS), {}), 0, 1),
    "DiffState": (_mse, lambda: ((Model(), IDS, Y), {}), _part(0, "items"), 1),
    "DiffStates": (_TWO, _models, (_part(0, "head"), 1), 1),
    "tree_of_modules": (
        lambda trees, ids: jnp.sum(trees["a"](ids)) * jnp.sum(trees["b"][0](ids)),
        lambda: (({"a": Model(), "b": [Model(1)]}, IDS), {}),
        *(0, 2),
    ),
    "shared": (
        lambda model, ids: jnp.sum(model(ids)),
        lambda: ((Shared(nnx.Embed(V, D, rngs=nnx.Rngs(0))), IDS), {}),
        *(0, 1),
    ),
    "state": (
        lambda params, rest, ids: jnp.sum(nnx.merge(_GRAPH, params, rest)(ids)),
        lambda: ((*nnx.split(Model(), nnx.Param, ...)[1:], IDS), {}),
        *(0, 1),
    ),
    "variable": (
        lambda table, ids: jnp.sum(table[...][ids] ** 2),
        lambda: ((nnx.Param(jnp.arange(V * D * 1.0).reshape(V, D)), IDS), {}),
        *(0, 1),
    ),
}


@pytest.mark.parametrize("name", _CALLS)
def test_arguments(name):
    fun, make, argnums, count = _CALLS[name]
    _, grads = _same("grad", fun, make, argnums=argnums)
    assert len(_rows_of(grads)) == count
    assert isinstance(grads, tuple) == isinstance(argnums, tuple)


def test_training():
    """Steps with `nnx.Optimizer`, under `nnx.jit`: lazy Adagrad is dense Adagrad."""
    results = []
    for module, tx in ((sj.nn.nnx, sj.optim.lazy), (nnx, lambda tx: tx)):
        model = Model()
        chain = optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1))
        optimizer = nnx.Optimizer(model, tx(chain), wrt=nnx.Param)
        step = nnx.jit(partial(_step, module))
        losses = [step(model, optimizer, (IDS + 5 * k) % V, Y) for k in range(3)]
        results.append((losses, _plain(nnx.state((model, optimizer)))))
    assert_trees_close(*results, rtol=1e-4, atol=1e-5)


def _step(module, model, optimizer, ids, y):
    loss, grads = module.value_and_grad(_mse)(model, ids, y)
    optimizer.update(model, grads)
    return loss


def test_under_other_transformations():
    """Second order, one call in the other, and remat."""

    def penalty(module, model, ids, y):
        grads = module.grad(_mse)(model, ids, y)
        return jnp.sum(nnx.to_pure_dict(grads)["head"]["kernel"] ** 2)

    @partial(nnx.jit, static_argnums=0)
    def run(module, model):
        grads = module.grad(partial(penalty, module))(model, IDS, Y)
        return grads, module.grad(nnx.remat(_mse))(model, IDS, Y)

    results = []
    for module in (sj.nn.nnx, nnx):
        model = Model()
        grads, again = run(module, model)
        results.append((_plain(grads), _plain(again), int(model.count[...])))
    assert_trees_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.window
def test_tables_are_updated_in_place():
    model = Model()
    optimizer = nnx.Optimizer(model, sj.optim.lazy(optax.adam(0.1)), wrt=nnx.Param)

    step = nnx.jit(partial(_step, sj.nn.nnx), donate_argnums=(0, 1))
    step(model, optimizer, IDS, Y)
    table = model.items.embedding[...]
    before, address = np.array(table), table.unsafe_buffer_pointer()
    step(model, optimizer, IDS, Y)
    table = model.items.embedding[...]
    assert table.unsafe_buffer_pointer() == address
    moved = np.flatnonzero((np.asarray(table) != before).any(1))
    assert moved.tolist() == [0, 3, 7, 9]
    assert "in place" in str(sj.explain(step)(model, optimizer, IDS, Y))


def test_tables():
    model, every = Model(), jnp.arange(V)[None].repeat(2, 0)
    grad = lambda **options: partial(nnx.eval_shape, sj.nn.nnx.grad(_mse, **options))
    assert not _rows_of(grad()(model, every, Y))
    only = {"items": {"embedding": True}}
    only |= {"norm": dict(scale=None, bias=None), "head": dict(kernel=None, bias=None)}
    is_table = lambda path, leaf: leaf.shape == (V, D)
    for tables in (only, nnx.State(only), is_table):
        (g,) = _rows_of(grad(tables=tables)(model, every, Y))
        assert g.capacity == 2 * V
    assert not _rows_of(grad(tables=False)(model, IDS, Y))
    several = sj.nn.nnx.grad(_TWO, argnums=(0, 1), tables=(only, False))
    assert len(_rows_of(nnx.eval_shape(several, model, Model(1), 1.0))) == 1
    with pytest.raises(sj.DensifyError, match=r"model\['items'\]\['embedding'\]"):
        sj.nn.nnx.grad(
            lambda model: jnp.sum(model.items.embedding[...]), tables=is_table
        )(model)


# ------------------------------------------------------------------ tables in a state


def train(model, tx, batches):
    """Losses of a donated jitted step, and how often it was traced."""
    opt, traces = nnx.Optimizer(model, tx, wrt=nnx.Param), 0

    @partial(nnx.jit, donate_argnums=(0, 1))
    def step(model, opt, ids):
        nonlocal traces
        traces += 1
        loss_fn = lambda model: jnp.mean((model(ids).sum(1) - 1.0) ** 2)
        loss, grads = sj.nn.nnx.value_and_grad(loss_fn)(model)
        opt.update(model, grads)
        return loss

    return [step(model, opt, ids) for ids in batches], traces


@pytest.mark.window
@pytest.mark.usefixtures("eight_devices")
def test_a_sharded_table_in_an_optimizer():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    batches = [np.random.default_rng(k).integers(0, 99, 16) for k in range(3)]
    alone, sharded = (nnx.Embed(999, D, rngs=nnx.Rngs(0)) for _ in range(2))
    table = sj.parallel.shard_rows(np.asarray(sharded.embedding[...]), mesh, "x")
    sharded.embedding = nnx.Param(table)
    tx = sj.optim.lazy(optax.adam(1e-2))
    want, _ = train(alone, tx, batches)
    losses, traces = train(sharded, tx, batches)
    assert traces <= 2  # flax's own count of steps starts on one device
    assert_trees_close(losses, want)
    table = nnx.to_pure_dict(nnx.state(sharded))["embedding"]
    assert_trees_close(whole(table), alone.embedding[...])


def test_rows_in_an_optimizer():
    # `accumulate` keeps the rows of a gradient in its state.
    tx = sj.optim.accumulate(sj.optim.lazy(optax.adam(1e-2)), 2, 64)
    losses, traces = train(nnx.Embed(V, D, rngs=nnx.Rngs(0)), tx, [IDS] * 4)
    assert losses[0] == losses[1] != losses[2] and traces == 1
