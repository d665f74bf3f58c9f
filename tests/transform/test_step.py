"""`explain` of a jitted step: gradients, donation, walks, copies, and the advice."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import dataclasses
import functools
import re

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


def loss_fn(params, batch):
    logits = (params["table"][batch["ids"]] @ params["w"])[:, 0]
    return jnp.mean((logits - batch["y"]) ** 2)


def make_step(tx=SGD, value_and_grad=sj.value_and_grad, more=None, loss=loss_fn):
    def step(params, state, batch):
        value, grads = value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates)
        return new, state, value if more is None else (value, more(params, new))

    return step


def explain(step, *, tx=SGD, donate=(0, 1), params=PARAMS, batch=BATCH):
    jitted = jax.jit(step, donate_argnums=donate)
    return sj.explain(jitted)(params, tx.init(params), batch)


# ------------------------------------------------------------------ donation


@pytest.mark.window
def test_a_step_in_place():
    found = explain(make_step(ADAM), tx=ADAM)
    assert found.advice == ()
    table = found["params['table']"]
    assert table.sparse and table.rows_read == N
    assert found.donated_bytes >= 3 * TABLE
    assert found.temporary_bytes < TABLE
    assert [leaf.name for leaf in found.leaves] == ["params['table']", "params['w']"]
    first, _, _, line, *_ = str(found).splitlines()
    assert first.startswith("step: each table with a sparse gradient is updated in")
    assert "sparse" in line and "test_step.py" in line
    assert "temporaries: " in str(found) and "largest table: 32.3 kB" in str(found)


@pytest.mark.window
def test_a_step_without_donation():
    found = explain(make_step(ADAM), tx=ADAM, donate=())
    (advice,) = found.advice
    assert advice.startswith(
        "3 arrays with the rows of params['table'] are not donated"
    )
    assert "so each step copies 96.9 kB" in advice and "donate_argnums=" in advice
    assert str(found).splitlines()[1] == f"1. {advice}"
    assert found.donated_bytes == 0
    half = explain(make_step(ADAM), tx=ADAM, donate=(0,))
    assert half.advice[0].startswith("2 arrays with the rows of params['table'] are")


def test_results_that_are_missing_or_in_another_order():
    found = sj.explain(jax.jit(sj.value_and_grad(loss_fn)))(PARAMS, BATCH)
    assert "params['table'] is not updated in this function" in found.advice[0]

    def swapped(params, state, batch):
        new, state, value = make_step(tx)(params, state, batch)
        return value, state, new

    tx = sj.optim.lazy(optax.sgd(0.1, momentum=0.9))
    (advice,) = explain(swapped, tx=tx).advice
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


def test_lazy_is_missing():
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
def test_a_table_that_is_no_argument():
    step = lambda scale, batch: sj.value_and_grad(loss_fn)(PARAMS, batch)
    found = sj.explain(jax.jit(step))(jnp.ones(()), BATCH)
    assert "params['table'] is not updated in this function" in found.advice[0]


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
    found = sj.explain(loss)(table, BATCH["ids"])
    assert not found["t"].sparse
    (advice,) = found.advice
    assert re.search(advised, advice)
    assert f"1. {advice}" in str(found)
    in_step = lambda p, batch: loss(p["t"], batch["ids"])
    step = explain(make_step(loss=in_step), params={"t": table})
    assert step.advice[0] == advice.replace(" of t ", " of p['t'] ")


def test_a_dense_leaf_that_is_most_of_a_step():
    params = {"in": jnp.ones((V, D)), "out": jnp.ones((D, 40_000))}
    loss = lambda p, batch: jnp.mean(p["in"][batch["ids"]] @ p["out"])
    (advice,) = explain(make_step(loss=loss), params=params).advice
    assert advice.startswith("p['out'] of 1.28 MB has a dense gradient (`dot_general`")


def test_tables_of_one_height():
    """`b` is read too often for a sparse gradient: a dense one is cheaper."""
    params = {k: jnp.ones((V, D)) for k in "abc"} | {"w": jnp.ones((D, D))}

    def loss(params, batch):
        many = jnp.arange(V) % 7
        rows = params["a"][batch["ids"]] + params["b"][many][:N]
        return jnp.sum(rows @ params["w"]) + jnp.sum(params["c"][batch["ids"]])

    found = explain(make_step(loss=loss), params=params)
    assert not found.advice
    assert "not sparse: reads 1009 of 1009" in str(found)
    with pytest.raises(KeyError, match="no leaf params, only"):
        found["params"]


# ------------------------------------------------------------------ all rows


@pytest.mark.window
def test_a_gradient_that_is_made_dense():
    tx = optax.sgd(0.1)

    def dense(fun):
        def run(*args):
            value, grads = sj.value_and_grad(fun)(*args)
            return value, helpers.to_dense(grads)

        return run

    (advice,) = explain(make_step(tx, dense), tx=tx).advice
    assert "though the gradient is sparse" in advice and "test_step.py" in advice


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


# ------------------------------------------------------------------ stacks


@pytest.mark.window
def test_the_tables_of_a_stack(eight_devices):
    tables = {f"t{k}": (400 + k, 4) for k in range(6)} | {"w": (90, 8)}
    layer = sj.nn.EmbeddingCollection(tables)
    params = {"emb": layer.init(jax.random.key(0))}
    ids = dict.fromkeys(tables, jnp.arange(4))

    @jax.remat
    def loss(params, ids):
        return sum(jnp.sum(x**2) for x in layer(params["emb"], ids).values())

    found = explain(make_step(loss=loss), params=params, batch=ids)
    lines = ["6 tables: t0, t1, t2, t3 and 2 more", "table: w"]
    told = sj.explain(loss)(params, ids)
    assert all(line in str(x) for line in lines for x in (found, told))
    stack = told["params['emb']['stack_width4_float32']"]
    assert stack.tables == tuple(f"t{k}" for k in range(6))
    alone = dataclasses.replace(layer, stacked=False)
    loss = lambda params: sum(jnp.sum(x) for x in alone(params, ids).values())
    assert "tables" not in str(sj.explain(loss)(alone.init(jax.random.key(0))))

    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    shard = functools.partial(sj.parallel.shard_rows, mesh=mesh, axis="d")
    params = {k: shard(x) for k, x in params["emb"].items()}
    loss = lambda params: sum(jnp.sum(x**2) for x in layer(params, ids).values())
    assert lines[0] in str(sj.explain(loss)(params))


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
    assert first["params['table']"].sparse and not first.advice
    run()
    assert step.count == 3


@pytest.mark.window
def test_steps_in_a_loop():
    def steps(params, state, batches):
        def body(carry, batch):
            params, state = carry
            params, state, value = make_step()(params, state, batch)
            return (params, state), value

        carry, values = jax.lax.scan(body, (params, state), batches)
        return *carry, values

    found = explain(steps, batch=jax.tree.map(lambda x: jnp.stack([x] * 3), BATCH))
    assert found["params['table']"].sparse and not found.advice


def test_reads_of_one_line_are_counted():
    loss = lambda p, batch: sum(jnp.sum(p["table"][batch["ids"] + k]) for k in range(9))
    assert f"9 x {N} at" in str(explain(make_step(loss=loss)))


@pytest.mark.window
def test_static_arguments_and_shapes():
    @functools.partial(
        jax.jit, static_argnames="k", donate_argnames=("params", "state")
    )
    def step(params, *, state, batch, k):
        return make_step()(params, state, batch)[:k]

    shapes = jax.eval_shape(lambda: (PARAMS, SGD.init(PARAMS), BATCH))
    found = sj.explain(step)(shapes[0], state=shapes[1], batch=shapes[2], k=2)
    assert found["params['table']"].sparse and not found.advice


class Trainer:
    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
    def step(self, params, state, batch):
        return make_step()(params, state, batch)


def test_a_method_and_a_partial():
    trainer, args = Trainer(), (PARAMS, SGD.init(PARAMS), BATCH)
    for step in (trainer.step, functools.partial(Trainer.step, trainer)):
        found = sj.explain(step)(*args)
        assert found["params['table']"].sparse and not found.advice


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
    found = sj.explain(nnx.jit(step, donate_argnums=(0, 1)))(
        model, optimizer, BATCH["ids"]
    )
    assert not found.advice
    (name,) = [x.name for x in found.leaves if x.sparse]
    assert "['items']['embedding']" in name
    after = jax.tree.leaves(nnx.state((model, optimizer)))
    assert all(x is y for x, y in zip(before, after, strict=True))
    found = sj.explain(nnx.jit(step))(model, optimizer, BATCH["ids"])
    assert found.advice[0].startswith(f"3 arrays with the rows of {name} are not")


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
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return eqx.combine(params, static), state, value

    k1, k2 = jax.random.split(jax.random.key(0))
    model = EqxModel(eqx.nn.Embedding(V, D, key=k1), eqx.nn.Linear(D, 1, key=k2))
    tx = sj.optim.lazy(optax.sgd(0.1, momentum=0.9))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    args = model, state, BATCH["ids"]
    found = sj.explain(eqx.filter_jit(step, donate="all"))(*args)
    assert not found.advice and found["params.table.weight"].rows_read == N
    found = sj.explain(eqx.filter_jit(step))(*args)
    assert "2 arrays with the rows of params.table.weight" in found.advice[0]
    assert len(found.leaves) == 3


@pytest.mark.window
@pytest.mark.usefixtures("eight_devices")
def test_a_step_over_a_mesh():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    params = {
        "table": jax.device_put(jnp.ones((8 * 131, D)), NamedSharding(mesh, P("x"))),
        "w": jax.device_put(PARAMS["w"], NamedSharding(mesh, P())),
    }
    found = explain(make_step(), params=params)
    assert found["params['table']"].sparse and not found.advice


# ------------------------------------------------------------------ not a step


def test_a_jitted_loss_is_a_loss():
    found = sj.explain(jax.jit(loss_fn))(PARAMS, BATCH)
    assert found["params['table']"].sparse
    with_aux = jax.jit(lambda params, batch: (loss_fn(params, batch), batch))
    found = sj.explain(with_aux, has_aux=True)(PARAMS, BATCH)
    assert found["params['table']"].sparse


def test_a_step_must_be_jitted():
    step = make_step()
    with pytest.raises(TypeError, match="scalar-output functions") as error:
        sj.explain(step)(PARAMS, SGD.init(PARAMS), BATCH)
    assert "jit it first: sparsejax.explain(jax.jit(step" in error.value.__notes__[0]


@pytest.mark.slow
def test_a_step_of_exact():
    tx = sj.optim.exact(optax.sgd(0.1, momentum=0.9))
    both = sj.optim.exact_value_and_grad(loss_fn, tx)

    def step(params, state, batch):
        (value, grads), params, state = both(params, state, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    found = explain(step, tx=tx)
    assert found["params['table']"].sparse and not found.advice
