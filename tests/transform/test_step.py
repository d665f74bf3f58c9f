"""`explain` of a jitted step: gradients, donation, walks, copies, and the advice."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import dataclasses
import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import helpers
import sparsejax as sj


# Dense optax and JAX's own models promote types.
pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D, N = 1009, 8, 16
TABLE = 4 * V * D
PARAMS = {"table": jnp.ones((V, D)), "w": jnp.ones((D, 1))}
BATCH = {"ids": jnp.arange(N), "y": jnp.ones(N)}
SGD, ADAM = sj.optim.lazy(optax.sgd(0.1)), sj.optim.lazy(optax.adam(0.1))
MOMENTUM = sj.optim.lazy(optax.sgd(0.1, momentum=0.9))


def loss_fn(params, batch):
    logits = (params["table"][batch["ids"]] @ params["w"])[:, 0]
    return jnp.mean((logits - batch["y"]) ** 2)


def make_step(tx=SGD, value_and_grad=sj.value_and_grad, more=None, loss=loss_fn) -> Any:
    def step(params, state, batch):
        value, grads = value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates)
        return new, state, value if more is None else (value, more(params, new))

    return step


def explain(step, *, tx=SGD, donate=(0, 1), params=PARAMS, batch=BATCH):
    jitted = jax.jit(step, donate_argnums=donate)
    return sj.explain(jitted)(params, tx.init(params), batch)


def assert_in_place(told, table="params['table']"):
    assert told[table].sparse and told[table].rows_read == N and not told.advice


# ------------------------------------------------------------------ donation


@pytest.mark.window
def test_a_step_in_place():
    told = explain(make_step(ADAM), tx=ADAM)
    assert_in_place(told)
    assert told.donated_bytes >= 3 * TABLE
    assert told.temporary_bytes < TABLE
    assert [leaf.name for leaf in told.leaves] == ["params['table']", "params['w']"]
    first, _, _, line, *_ = str(told).splitlines()
    assert first.startswith("step: each table with a sparse gradient is updated in")
    assert "sparse" in line and "test_step.py" in line
    assert "temporaries: " in str(told) and "largest table: 32.3 kB" in str(told)


@pytest.mark.window
def test_a_step_without_donation():
    told = explain(make_step(ADAM), tx=ADAM, donate=())
    (advice,) = told.advice
    assert advice.startswith(
        "3 arrays with the rows of params['table'] are not donated"
    )
    assert "so each step copies 96.9 kB" in advice and "donate_argnums=" in advice
    assert str(told).splitlines()[1] == f"1. {advice}"
    assert told.donated_bytes == 0
    half = explain(make_step(ADAM), tx=ADAM, donate=(0,))
    assert half.advice[0].startswith("2 arrays with the rows of params['table'] are")


@pytest.mark.window
def test_a_table_that_is_not_updated():
    by_argument = sj.explain(jax.jit(sj.value_and_grad(loss_fn)))(PARAMS, BATCH)
    closure = lambda scale, batch: sj.value_and_grad(loss_fn)(PARAMS, batch)
    for told in (by_argument, sj.explain(jax.jit(closure))(jnp.ones(()), BATCH)):
        assert "params['table'] is not updated in this function" in told.advice[0]


def test_results_in_another_order():
    step = lambda *args: make_step(MOMENTUM)(*args)[::-1]
    (advice,) = explain(step, tx=MOMENTUM).advice
    assert "another order than the arguments" in advice


@pytest.mark.window
def test_the_old_table_is_read_after_the_update():
    read = lambda old, new: jnp.sum(old["table"][jnp.array([5, 9])])
    (advice,) = explain(make_step(more=read)).advice
    assert "params['table'] is donated, and copied all the same" in advice
    assert explain(make_step(more=lambda old, new: read(new, old))).advice == ()


# ------------------------------------------------------------------ gradients


@pytest.mark.window
@pytest.mark.parametrize("tx", [optax.adam(0.1), ADAM], ids=["optax", "lazy"])
def test_the_gradient_of_jax(tx):
    (advice,) = explain(make_step(tx, jax.value_and_grad), tx=tx).advice
    assert "does not call sparsejax.value_and_grad" in advice
    assert "Call it in place of jax.value_and_grad" in advice


def test_errors_are_those_of_the_step():
    tx = optax.adam(0.1)
    with pytest.raises((TypeError, ValueError), match="lazy"):
        explain(make_step(tx), tx=tx)
    with pytest.raises(ZeroDivisionError):  # of the user, before any gradient
        sj.explain(jax.jit(lambda params: 1 / 0))(PARAMS)


def test_no_table():
    step = lambda x, key: (x, key, x + jax.random.normal(key, x.shape))
    (advice,) = sj.explain(jax.jit(step))(jnp.ones((9, 2)), jax.random.key(0)).advice
    assert "it has no sparse gradient" in advice


@pytest.mark.window
def test_a_gradient_that_is_made_dense():
    def dense(fun):
        return lambda *args: helpers.to_dense(sj.value_and_grad(fun)(*args))

    tx = optax.sgd(0.1)
    (advice,) = explain(make_step(tx, dense), tx=tx).advice
    assert "though the gradient is sparse" in advice and "test_step.py" in advice


def test_a_dense_leaf_that_is_most_of_a_step():
    params = {"in": jnp.ones((V, D)), "out": jnp.ones((D, 40_000))}
    loss = lambda p, batch: jnp.mean(p["in"][batch["ids"]] @ p["out"])
    (advice,) = explain(make_step(loss=loss), params=params).advice
    assert advice.startswith("p['out'] of 1.28 MB has a dense gradient (`dot_general`")


DENSE = {
    "one-hot rows": lambda t, ids: jax.nn.one_hot(ids, V) @ t,
    "table\\[ids\\] reads": lambda t, ids: (
        (ids[:, None] == jnp.arange(V)).astype(t.dtype) @ t
    ),
    "sample some rows": lambda t, ids: t[ids] @ t.T,
    "padding_id=": lambda t, ids: jnp.pad(t, ((1, 0), (0, 0)))[ids],
    "f\\(table\\[ids\\]\\)": lambda t, ids: (t / jnp.linalg.norm(t, axis=1)[:, None])[
        ids
    ],
    "single numbers": lambda t, ids: t.ravel()[ids],
}


@pytest.mark.parametrize("advised", DENSE)
def test_advice_for_dense_gradients(advised):
    loss = lambda t, ids: jnp.sum(DENSE[advised](t, ids))
    table = jnp.ones((V, D))
    if "numbers" in advised:
        table, loss = jnp.ones(100_000), lambda t, ids: jnp.sum(t[ids] ** 2)
    told = sj.explain(loss)(table, BATCH["ids"])
    assert not told["t"].sparse
    (advice,) = told.advice
    assert re.search(advised, advice)
    assert f"1. {advice}" in str(told)
    in_step = lambda p, batch: loss(p["t"], batch["ids"])
    step = explain(make_step(loss=in_step), params={"t": table})
    assert step.advice[0] == advice.replace(" of t ", " of p['t'] ")


def test_tables_of_one_height():
    """`b` is read too often for a sparse gradient: a dense one is cheaper."""
    params = {k: jnp.ones((V, D)) for k in "abc"} | {"w": jnp.ones((D, D))}

    def loss(params, batch):
        many = jnp.arange(V) % 7
        rows = params["a"][batch["ids"]] + params["b"][many][:N]
        times = [jnp.sum(params["c"][batch["ids"] + k]) for k in range(9)]
        return jnp.sum(rows @ params["w"]) + sum(times)

    told = explain(make_step(loss=loss), params=params)
    assert not told.advice
    assert "not sparse: reads 1009 of 1009" in str(told)
    assert f"9 x {N} at" in str(told)


WALKS = {
    "global_norm": lambda old, new: jnp.sum(new["table"] ** 2),
    "projection": lambda old, new: jnp.maximum(new["table"], 0.0),
    "lax.cond": lambda old, new: jnp.where(jnp.any(new["w"] > 0), new["table"], 0.0),
}


@pytest.mark.parametrize("advised", WALKS)
def test_a_step_that_goes_through_all_rows(advised):
    (advice,) = explain(make_step(more=WALKS[advised])).advice
    line = WALKS[advised].__code__.co_firstlineno
    assert f"test_step.py:{line}" in advice and advised in advice


@pytest.mark.window
def test_the_tables_of_a_stack(eight_devices):
    tables = {f"t{k}": (400 + k, 4) for k in range(6)} | {"w": (90, 8)}
    layer = sj.nn.EmbeddingCollection(tables)
    params = layer.init(jax.random.key(0))
    ids = dict.fromkeys(tables, jnp.arange(4))

    total = lambda layer: (
        lambda params, ids: sum(map(jnp.sum, layer(params, ids).values()))
    )
    loss = jax.remat(total(layer))
    told = sj.explain(loss)(params, ids)
    stack = told["params['stack_width4_float32']"]
    assert stack.tables == tuple(f"t{k}" for k in range(6))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    sharded = {k: sj.parallel.shard_rows(x, mesh, "d") for k, x in params.items()}
    step = explain(make_step(loss=loss), params=params, batch=ids)
    for x in (told, step, sj.explain(loss)(sharded, ids)):
        assert "6 tables: t0, t1, t2, t3 and 2 more" in str(x)
        assert "table: w" in str(x)
    alone = dataclasses.replace(layer, stacked=False)
    params = alone.init(jax.random.key(0))
    assert "tables" not in str(sj.explain(total(alone))(params, ids))


# ------------------------------------------------------------------ forms of steps


def test_it_traces_anew_and_leaves_the_step_alone():
    """Nothing that was traced before is reused, in nested functions neither."""
    step = helpers.count_traces(make_step())
    inner = jax.jit(step)
    outer = jax.jit(lambda *args: inner(*args), donate_argnums=(0, 1))
    run = lambda: outer(jax.tree.map(jnp.copy, PARAMS), SGD.init(PARAMS), BATCH)
    run()
    first, second = (
        sj.explain(outer)(PARAMS, SGD.init(PARAMS), BATCH) for _ in range(2)
    )
    assert step.count == 3
    assert str(first) == str(second)
    assert_in_place(first)
    run()
    assert step.count == 3


@pytest.mark.window
def test_steps_in_a_loop():
    def steps(params, state, batches):
        body = lambda carry, batch: (make_step()(*carry, batch)[:2], None)
        return jax.lax.scan(body, (params, state), batches)[0]

    told = explain(steps, batch=jax.tree.map(lambda x: jnp.stack([x] * 3), BATCH))
    assert told["params['table']"].sparse and not told.advice


@pytest.mark.window
def test_static_arguments_and_shapes():
    @functools.partial(
        jax.jit, static_argnames="k", donate_argnames=("params", "state")
    )
    def step(params, *, state, batch, k):
        return make_step()(params, state, batch)[:k]

    shapes = jax.eval_shape(lambda: (PARAMS, SGD.init(PARAMS), BATCH))
    assert_in_place(sj.explain(step)(shapes[0], state=shapes[1], batch=shapes[2], k=2))


class Trainer:
    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
    def step(self, params, state, batch):
        return make_step()(params, state, batch)


def test_a_method_and_a_partial():
    trainer = Trainer()
    for step in (trainer.step, functools.partial(Trainer.step, trainer)):
        assert_in_place(sj.explain(step)(PARAMS, SGD.init(PARAMS), BATCH))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.items = nnx.Embed(V, D, rngs=rngs)
        self.out = nnx.Linear(D, 1, rngs=rngs)

    def __call__(self, ids):
        return self.out(self.items(ids))


@pytest.mark.window
def test_a_step_of_nnx():
    def step(model, optimizer, ids):
        loss = lambda model: jnp.mean(model(ids) ** 2)
        value, grads = sj.nn.nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    before = jax.tree.leaves(nnx.state((model, optimizer)))
    told = sj.explain(nnx.jit(step, donate_argnums=(0, 1)))(
        model, optimizer, BATCH["ids"]
    )
    (name,) = [x.name for x in told.leaves if x.sparse]
    assert "['items']['embedding']" in name
    assert_in_place(told, name)
    after = jax.tree.leaves(nnx.state((model, optimizer)))
    assert all(x is y for x, y in zip(before, after, strict=True))
    told = sj.explain(nnx.jit(step))(model, optimizer, BATCH["ids"])
    assert told.advice[0].startswith(f"3 arrays with the rows of {name} are not")


class EqxModel(eqx.Module):
    table: eqx.nn.Embedding
    out: eqx.nn.Linear
    name: str = "static"

    def __call__(self, ids):
        return jax.vmap(lambda i: self.out(self.table(i)))(ids)


@pytest.mark.window
def test_a_step_of_equinox():
    def step(model, state, ids):
        params, static = eqx.partition(model, eqx.is_inexact_array)
        loss = lambda params: jnp.mean(eqx.combine(params, static)(ids) ** 2)
        value, grads = sj.value_and_grad(loss)(params)
        updates, state = MOMENTUM.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return eqx.combine(params, static), state, value

    k1, k2 = jax.random.split(jax.random.key(0))
    model = EqxModel(eqx.nn.Embedding(V, D, key=k1), eqx.nn.Linear(D, 1, key=k2))
    state = MOMENTUM.init(eqx.filter(model, eqx.is_inexact_array))
    args = model, state, BATCH["ids"]
    table = "params.table.weight"
    assert_in_place(sj.explain(eqx.filter_jit(step, donate="all"))(*args), table)
    told = sj.explain(eqx.filter_jit(step))(*args)
    assert f"2 arrays with the rows of {table}" in told.advice[0]
    assert len(told.leaves) == 3


@pytest.mark.window
@pytest.mark.usefixtures("eight_devices")
def test_a_step_over_a_mesh():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    params = {
        "table": jax.device_put(jnp.ones((8 * 131, D)), NamedSharding(mesh, P("x"))),
        "w": jax.device_put(PARAMS["w"], NamedSharding(mesh, P())),
    }
    assert_in_place(explain(make_step(), params=params))


@pytest.mark.slow
def test_a_step_of_exact():
    tx = sj.optim.exact(optax.sgd(0.1, momentum=0.9))
    both = sj.optim.exact_value_and_grad(loss_fn, tx)

    def step(params, state, batch):
        (value, grads), params, state = both(params, state, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    assert_in_place(explain(step, tx=tx))


# ------------------------------------------------------------------ not a step


def test_a_jitted_loss_is_a_loss():
    with_aux = lambda params, batch: (loss_fn(params, batch), batch)
    assert_in_place(sj.explain(jax.jit(loss_fn))(PARAMS, BATCH))
    assert_in_place(sj.explain(jax.jit(with_aux), has_aux=True)(PARAMS, BATCH))


def test_a_step_must_be_jitted():
    with pytest.raises(TypeError, match="scalar-output functions") as error:
        sj.explain(make_step())(PARAMS, SGD.init(PARAMS), BATCH)
    assert "jit it first: sparsejax.explain(jax.jit(step" in error.value.__notes__[0]
