"""`explain` of a jitted step: gradients, updates, donation, and the advice."""

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
from sparsejax import _hlo


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


def updates(found):
    return {x.name: x.update for x in found.arrays}


def all_are(update):
    names = "params['table']", "state[0].mu['table']", "state[0].nu['table']"
    return dict.fromkeys(names, update)


def table_is(update):
    return {"params['table']": update}


# ------------------------------------------------------------------ kinds of steps


@pytest.mark.window
def test_a_step_in_place():
    found = explain(make_step(ADAM), tx=ADAM)
    assert found.advice == ()
    assert updates(found) == all_are("in place")
    table = found["params['table']"]
    assert table.gradient.sparse and table.gradient.rows_read == N
    assert table.donated and table.num_bytes == TABLE
    assert all(x.table is table for x in found.arrays)
    assert found.donated_bytes >= 3 * TABLE
    assert found.needed_bytes == found.moved_bytes < TABLE
    assert found.temporary_bytes < TABLE
    assert [leaf.name for leaf in found.leaves] == ["params['table']", "params['w']"]
    first, head, _, line, *_ = str(found).splitlines()
    assert (
        first == "step: each table is updated in place, at the cost of the rows read."
    )
    assert head.split()[-5:] == ["update", "where,", "or", "why", "not"]
    assert "in place, 2 of state too" in line and "test_step.py" in line


@pytest.mark.window
def test_a_step_without_donation():
    found = explain(make_step(ADAM), tx=ADAM, donate=())
    assert updates(found) == all_are("copied")
    (advice,) = found.advice
    assert advice.startswith("params['table'], state[0].mu['table'] and state[0].nu")
    assert "are not donated, so each step copies 96.9 kB" in advice
    assert "slower than a dense step" in advice and "donate_argnums=" in advice
    assert str(found).splitlines()[1] == f"1. {advice}"
    assert found.donated_bytes == 0
    assert found.moved_bytes >= 6 * TABLE > 10 * found.needed_bytes
    half = explain(make_step(ADAM), tx=ADAM, donate=(0,))
    assert updates(half)["params['table']"] == "in place"
    assert "state[0].mu['table'] and state[0].nu['table'] are not" in half.advice[0]
    assert "\n  state[0].mu['table']" in str(half)


@pytest.mark.window
@pytest.mark.parametrize("tx", [optax.adam(0.1), ADAM], ids=["optax", "lazy"])
def test_the_gradient_of_jax(tx):
    found = explain(make_step(tx, jax.value_and_grad), tx=tx)
    assert updates(found) == all_are("walked")
    assert "params['table'] is read by rows" in found.advice[0]
    assert "Call it in place of jax.value_and_grad" in found.advice[0]
    assert found["params['table']"].gradient is None and found.needed_bytes is None
    undonated = explain(make_step(tx, jax.value_and_grad), tx=tx, donate=())
    assert "the step needs 96.9 kB more" in undonated.advice[0]


def test_lazy_is_missing():
    tx = optax.adam(0.1)
    with pytest.raises(TypeError, match=r"SelectedRows for params\['table'\].*lazy"):
        explain(make_step(tx), tx=tx)
    with pytest.raises(ZeroDivisionError):  # of the user, before any gradient
        sj.explain(jax.jit(lambda params: 1 / 0))(PARAMS)


@pytest.mark.window
def test_a_gradient_that_is_made_dense():
    tx = optax.sgd(0.1)

    def dense(fun):
        def run(*args):
            value, grads = sj.value_and_grad(fun)(*args)
            return value, helpers.to_dense(grads)

        return run

    found = explain(make_step(tx, dense), tx=tx)
    assert updates(found) == table_is("walked")
    assert "though the gradient is sparse" in found.advice[0]
    assert "`add` at" in found.advice[0] and "test_step.py" in found.advice[0]


@pytest.mark.window
@pytest.mark.usefixtures("cpu_backend")
def test_a_write_before_all_else_and_a_read_of_the_new_table():
    dims = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))

    def write_and_read(table, rows, values):
        table = jax.lax.scatter_add(table, rows, values, dims)
        return table, table[rows[:, 0]]

    args = jnp.ones((V, D)), jnp.zeros((N, 1), jnp.int32), jnp.ones((N, D))
    found = sj.explain(jax.jit(write_and_read, donate_argnums=0))(*args)
    uses = {use.primitive: use.late for use in found["table"].uses}
    assert uses == {"scatter-add": False, "gather": False}


def test_the_old_table_is_read_after_the_update():
    read = lambda old, new: jnp.sum(old["table"][jnp.array([5, 9])])
    line = read.__code__.co_firstlineno
    found = explain(make_step(more=read))
    assert updates(found) == table_is("copied")
    assert f"`gather` at {__file__}:{line}" in found.advice[0]
    assert found["params['table']"].reasons == [f"`gather` at {__file__}:{line}"]
    returned = explain(make_step(more=lambda old, new: old["table"]))
    assert "`return` at the end of the step" in returned.advice[0]


def test_a_number_of_all_rows_is_logged():
    norm = lambda old, new: jnp.sum(new["table"] ** 2)
    found = explain(make_step(more=norm))
    assert updates(found) == table_is("walked")
    assert "`reduce_sum` at" in found.advice[0] and "global_norm" in found.advice[0]


@pytest.mark.window
def test_results_in_another_order():
    """JAX pairs buffers and results by shape: the table would go where `mu` was."""

    def step(params, state, batch):
        new, state, value = make_step(tx)(params, state, batch)
        return value, state, new

    tx = sj.optim.lazy(optax.sgd(0.1, momentum=0.9))
    found = explain(step, tx=tx)
    assert set(updates(found).values()) == {"copied"}
    assert "in another order than the arguments" in found.advice[0]
    assert all(x.swapped for x in found.arrays)


def test_gradients_that_are_returned():
    found = sj.explain(jax.jit(sj.value_and_grad(loss_fn)))(PARAMS, BATCH)
    assert updates(found) == table_is("not updated")
    assert "is not updated in this function" in found.advice[0]


def test_no_table():
    step = lambda x, key: (x, key, x + jax.random.normal(key, x.shape))
    (advice,) = sj.explain(jax.jit(step))(jnp.ones((9, 2)), jax.random.key(0)).advice
    assert "the step has no table" in advice


@pytest.mark.window
def test_a_table_that_is_no_argument():
    step = lambda scale, batch: sj.value_and_grad(loss_fn)(PARAMS, batch)[1]
    found = sj.explain(jax.jit(step))(jnp.ones(()), BATCH)
    assert "params['table'] is not an argument of the step" in found.advice[0]
    assert not found.arrays and "params['table']" in str(found)


def test_tables_of_one_height():
    """One of them is read too often for a sparse gradient. `b` has no sparse use."""
    params = {k: jnp.ones((V, D)) for k in "abc"} | {"w": jnp.ones((D, D))}

    def loss(params, batch):
        many = jnp.arange(V) % 7
        rows = params["a"][batch["ids"]] + params["b"][many][:N]
        return jnp.sum(rows @ params["w"]) + jnp.sum(params["c"][batch["ids"]])

    tx = sj.optim.lazy(optax.sgd(0.1, momentum=0.9))
    found = explain(make_step(tx, loss=loss), tx=tx, params=params)
    assert len(found.arrays) == 6
    for name in "abc":
        for x in found.arrays:
            if x.name.endswith(f"['{name}']"):
                assert x.table is found[f"params['{name}']"]
                assert x.update == ("walked" if name == "b" else "in place")
    assert not found.advice  # a dense gradient of `b` is cheaper
    assert "not sparse: reads 1009 of 1009" in str(found)
    with pytest.raises(KeyError, match="no leaf params, only"):
        found["params"]

    def tied(params, batch):
        return loss(params, batch) + jnp.sum(params["b"] @ params["w"])

    (advice,) = explain(make_step(loss=tied), params=params).advice
    assert "`dot_general` at" in advice and "Read rows there" in advice


def test_only_arrays_with_its_rows_follow_a_table():
    """One equation writes rows, and takes numbers of the state besides."""
    make = optax.inject_hyperparams(optax.sgd)
    tx = sj.optim.lazy(make(learning_rate=0.1, momentum=0.9))
    found = explain(make_step(tx), tx=tx)
    assert len(found.arrays) == 2 and not found.advice


# ------------------------------------------------------------------ stacks, aliases


@pytest.mark.window
@pytest.mark.parametrize("value_and_grad", [sj.value_and_grad, jax.value_and_grad])
def test_the_tables_of_a_stack(value_and_grad):
    dense = sj.nn.Embedding(70, 4, sparse_grad=False)
    tables = {f"t{k}": (400 + k, 4) for k in range(6)} | {"w": (90, 8), "own": dense}
    layer = sj.nn.EmbeddingCollection(tables)
    params = {"emb": layer.init(jax.random.key(0))}
    ids = dict.fromkeys(tables, jnp.arange(4))

    @jax.remat
    def loss(params, ids):
        return sum(jnp.sum(x**2) for x in layer(params["emb"], ids).values())

    tx = SGD if value_and_grad is sj.value_and_grad else optax.sgd(0.1)
    step = make_step(tx, value_and_grad, loss=loss)
    found = explain(step, tx=tx, params=params, batch=ids)
    lines = ["6 tables: t0, t1, t2, t3 and 2 more", "table: w", "table: own"]
    assert all(f" {line}\n" in str(found) for line in lines)
    stack = found["params['emb']['stack_width4_float32']"]
    assert stack.tables == tuple(f"t{k}" for k in range(6))
    half = lambda params, ids: loss(jax.tree.map(jnp.bfloat16, params), ids)
    assert lines[0] in str(sj.explain(half)(params, ids))
    told = sj.explain(loss)(params, ids)
    assert told["params['emb']['stack_width8_float32']"].tables == ("w",)
    assert all(line in str(told) for line in lines)
    alone = dataclasses.replace(layer, stacked=False)
    loss = lambda params: sum(jnp.sum(x) for x in alone(params, ids).values())
    assert "tables" not in str(sj.explain(loss)(alone.init(jax.random.key(0))))


@pytest.mark.window
def test_the_tables_of_a_sharded_stack(eight_devices):
    layer = sj.nn.EmbeddingCollection({"a": (64, 4), "b": (32, 4)})
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    shard = functools.partial(sj.parallel.shard_rows, mesh=mesh, axis="d")
    params = {k: shard(x) for k, x in layer.init(jax.random.key(0)).items()}
    ids = dict.fromkeys("ab", jnp.arange(8))
    loss = lambda params: sum(jnp.sum(x**2) for x in layer(params, ids).values())
    assert "2 tables: a, b" in str(sj.explain(loss)(params))


@pytest.mark.window
def test_an_array_that_is_donated_twice():
    table, more = jnp.ones((V, D)), jnp.ones((V, D))
    read = lambda params, ids: jnp.sum(params["a"][ids] * params["b"][ids])
    step, batch = make_step(loss=read), jnp.arange(N)
    for twin in (table, jax.device_put(table)):  # which shares the buffer
        found = explain(step, params={"a": table, "b": twin}, batch=batch)
        assert "params['a'] and params['b'] are one array, and each" in found.advice[0]
        assert "copy before the first step: jnp.copy(params['b'])." in found.advice[0]
        assert str(found).startswith("step: this fails, or costs more")
    params = {"a": table, "b": more}

    two = lambda params, old, ids: (step(params, SGD.init(params), ids)[0], old[0])
    donated = sj.explain(jax.jit(two, donate_argnums=0))
    (advice,) = donated(params, table, batch).advice
    assert "params['a'] and old are one array, and params['a'] is donated" in advice
    assert "previously donated" in advice and "jnp.copy(params['a'])." in advice
    assert not donated(params, jnp.copy(table), batch).advice
    assert not explain(step, params=params, batch=batch).advice
    same = {"a": table, "b": table}  # not donated: JAX takes it
    assert all(
        "one array" not in x
        for x in explain(step, donate=(), params=same, batch=batch).advice
    )


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
    assert first["params['table']"].gradient.sparse and not first.advice
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
    assert updates(found) == table_is("in place") and not found.advice


def test_two_gradients_of_one_table():
    def twice(params, state, batch):
        params, state, _ = make_step()(params, state, batch)
        return make_step()(params, state, batch)

    found = explain(twice)
    assert updates(found) == table_is("in place") and not found.advice
    gradient = found["params['table']"].gradient
    assert gradient.rows_read == 2 * N and len(gradient.reads) == 2


def test_leaves_that_the_loss_calls_alike():
    def step(params, ids):
        value = 0.0
        for name in "ab":
            run = sj.value_and_grad(lambda t: jnp.sum(t[ids] ** 2))
            more, grads = run(params[name])
            value, params = value + more, params | {name: params[name] + grads}
        return params, value

    params = {"a": jnp.ones((V, D)), "b": jnp.ones((V, D))}
    found = sj.explain(jax.jit(step, donate_argnums=0))(params, jnp.arange(3))
    assert updates(found) == {f"params['{name}']": "in place" for name in "ab"}
    alone = lambda params, ids: step({"a": params, "b": params}, ids)
    found = sj.explain(jax.jit(alone))(params["a"], jnp.arange(3))
    assert found["t"].gradient.rows_read == 6


@pytest.mark.window
def test_static_arguments_and_shapes():
    @functools.partial(
        jax.jit, static_argnames="k", donate_argnames=("params", "state")
    )
    def step(params, *, state, batch, k):
        return make_step()(params, state, batch)[:k]

    shapes = jax.eval_shape(lambda: (PARAMS, SGD.init(PARAMS), BATCH))
    found = sj.explain(step)(shapes[0], state=shapes[1], batch=shapes[2], k=2)
    assert updates(found) == table_is("in place") and not found.advice


@pytest.mark.window
def test_a_step_of_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.items = nnx.Embed(V, D, rngs=rngs)
            self.users = nnx.Embed(V, D, rngs=rngs)
            self.out = nnx.Linear(D, 1, rngs=rngs)

        def __call__(self, ids):
            return self.out(self.items(ids) * self.users(ids))

    def step(model, optimizer, ids):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        loss = lambda params: jnp.mean(nnx.merge(graph, params, rest)(ids) ** 2)
        value, grads = sj.value_and_grad(loss)(params)
        optimizer.update(model, grads)
        return value

    model = Model(nnx.Rngs(0))
    tx = sj.optim.lazy(optax.sgd(0.1, momentum=0.9))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = jax.tree.leaves(nnx.state((model, optimizer)))
    jitted = nnx.jit(step, donate_argnums=(0, 1))
    found = sj.explain(jitted)(model, optimizer, BATCH["ids"])
    assert set(updates(found).values()) == {"in place"} and not found.advice
    tables = {x.name: x for x in found.arrays if x.table is x}
    assert [name.split("'")[1] for name in tables] == ["items", "users"]
    for table in tables.values():  # the state's own names do not tell
        assert sum(x.table is table for x in found.arrays) == 2
    after = jax.tree.leaves(nnx.state((model, optimizer)))
    assert all(x is y for x, y in zip(before, after, strict=True))
    found = sj.explain(nnx.jit(step))(model, optimizer, BATCH["ids"])
    assert set(updates(found).values()) == {"copied"}
    assert "are not donated" in found.advice[0]


class Model(eqx.Module):
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
    model = Model(eqx.nn.Embedding(V, D, key=k1), eqx.nn.Linear(D, 1, key=k2))
    tx = sj.optim.lazy(optax.sgd(0.1, momentum=0.9))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    args = model, state, BATCH["ids"]
    found = sj.explain(eqx.filter_jit(step, donate="all"))(*args)
    assert set(updates(found).values()) == {"in place"} and not found.advice
    assert found["params.table.weight"].gradient.rows_read == N
    found = sj.explain(eqx.filter_jit(step))(*args)
    assert "params.table.weight and dynamic" in found.advice[0]
    assert "are not donated" in found.advice[0] and len(found.leaves) == 3


@pytest.mark.window
@pytest.mark.usefixtures("eight_devices")
def test_a_step_over_a_mesh():
    """Each device holds an eighth of the rows."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    params = {"table": jnp.ones((8 * 131, D)), "w": PARAMS["w"]}
    spread = {
        "table": jax.device_put(params["table"], NamedSharding(mesh, P("x"))),
        "w": jax.device_put(params["w"], NamedSharding(mesh, P())),
    }
    found = explain(make_step(), params=spread)
    assert updates(found) == table_is("in place") and not found.advice
    table = found["params['table']"]
    assert table.shape == (8 * 131, D) and table.num_bytes == 4 * 131 * D


# ------------------------------------------------------------------ not a step


def test_a_jitted_loss_is_a_loss():
    found = sj.explain(jax.jit(loss_fn))(PARAMS, BATCH)
    assert found["params['table']"].sparse
    with_aux = jax.jit(lambda params, batch: (loss_fn(params, batch), batch))
    found = sj.explain(with_aux, has_aux=True)(PARAMS, BATCH)
    assert found["params['table']"].sparse


def test_a_step_must_be_jitted():
    step = make_step()
    match = re.escape("explain(jax.jit(step, donate_argnums=(0, 1)))(params, state")
    with pytest.raises(TypeError, match=match):
        sj.explain(step)(PARAMS, SGD.init(PARAMS), BATCH)
    counted = lambda state, batch: (state["count"] + 1, batch)
    with pytest.raises(TypeError, match="got int32.*is a training step, jit it first"):
        sj.explain(counted)({"count": jnp.array(1)}, BATCH)


# ------------------------------------------------------------------ compiled programs

# As other platforms and releases write it.
PROGRAM = """
HloModule step, input_output_alias={ {0}: (0, {}, may-alias), {1}: (2, {}, must-alias) \
}, buffer_donor={ (4, {}) }, entry_computation_layout={(f32[9,2]{1,0})->f32[9,2]{1,0}}

%body (p: (s32[], f32[9,2])) -> (s32[], f32[9,2]) {
  %p = (s32[], f32[9,2]{1,0:T(8,128)}) parameter(0)
  %i = s32[] get-tuple-element((s32[], f32[9,2]{1,0}) %p), index=0
  %t = f32[9,2]{1,0} get-tuple-element((s32[], f32[9,2]{1,0}) %p), index=1
  %u = f32[9,2]{1,0} dynamic-update-slice(f32[9,2]{1,0} %t, f32[1,2]{1,0} %z, s32[] %i)
  ROOT %r = (s32[], /*index=1*/f32[9,2]{1,0}) tuple(s32[] %i, f32[9,2]{1,0} %u)
}

%test (p.1: (s32[], f32[9,2])) -> pred[] {
  %p.1 = (s32[], f32[9,2]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

%branch (q: f32[9,2]) -> f32[2] {
  %q = f32[9,2]{1,0} parameter(0)
  ROOT %s = f32[2]{0} reduce(f32[9,2]{1,0} %q, f32[] %zero), dimensions={0}
}

%other (q.1: f32[9,2]) -> f32[2] {
  %q.1 = f32[9,2]{1,0} parameter(0)
  ROOT %s.1 = f32[2]{0} broadcast(f32[] %zero), dimensions={}
}

%fused (f: f32[9,2], ids: s32[4,1]) -> f32[4,2] {
  %f = f32[9,2]{1,0} parameter(0)
  %ids = s32[4,1]{1,0} parameter(1)
  ROOT %g = f32[4,2]{1,0} gather(%f, %ids), offset_dims={1}
}

ENTRY %main {
  %ids.1 = s32[4,1]{1,0} parameter(3), metadata={op_name="ids"}
  %a = f32[9,2]{1,0} parameter(0), metadata={op_name="params[\\'a\\']" id=3}
  %b = f32[9,2]{1,0} parameter(1), metadata={op_name="b"}
  %c = f32[9,2]{1,0} parameter(2), metadata={op_name="c"}
  %d = f32[9,2]{1,0} parameter(4), metadata={op_name="d"}
  %n = s32[] constant(0)
  %start = (s32[], f32[9,2]{1,0}) tuple(%n, %a)
  %loop = (s32[], f32[9,2]{1,0}) while(%start), condition=%test, body=%body
  %new = f32[9,2]{1,0} get-tuple-element(%loop), index=1
  %rows = f32[4,2]{1,0} fusion(%b, %ids.1), kind=kLoop, calls=%fused
  %cs = (f32[9,2]{1,0}, f32[9,2]{1,0}, u32[]) copy-start(%c)
  %cd = f32[9,2]{1,0} copy-done(%cs)
  %pred = pred[] constant(true)
  %sum = f32[2]{0} conditional(%pred, %d, %d), true_computation=%branch, \
false_computation=%other
  %k = f32[9,2]{1,0} custom-call(%cd, %ids.1), custom_call_target="own", \
output_to_operand_aliasing={{}: (0, {})}
  ROOT %out = (f32[9,2]{1,0}, f32[9,2]{1,0}, f32[2]{0}) tuple(%new, %k, %sum)
}
"""


@pytest.mark.window
def test_programs_of_other_platforms():
    found = {x.name: x for x in _hlo.arguments(_hlo.parse(PROGRAM))}
    assert {name: x.uses for name, x in found.items()} == {
        "params['a']": {"write"},
        "b": {"read"},
        "c": {"copy", "write"},
        "ids": {"walk"},
        "d": {"walk"},
    }
    donated = {name for name, x in found.items() if x.donated}
    assert donated == {"params['a']", "c", "d"}
    assert not any(x.swapped for x in found.values())
    text = PROGRAM.replace("tuple(%new, %k, %sum)", "tuple(%k, %new, %sum)")
    found = {x.name: x.swapped for x in _hlo.arguments(_hlo.parse(text))}
    assert [name for name, swapped in found.items() if swapped] == ["params['a']", "c"]
