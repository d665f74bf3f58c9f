"""Functions of parameters with tables of a store, against the same in memory."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false

import copy
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from helpers import (
    assert_same_bits,
    assert_trees_close,
    count_traces,
    dense,
    drawn,
    to_dense,
)
from oracle import run_steps, train_in_memory
from programs import PROGRAMS, D, N, V


# The store runs optax, which relies on implicit promotion.
pytestmark = pytest.mark.usefixtures("loose_promotion")

BATCH = 12
# One object for all stores, so that its programs are compiled once.
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
SCHEDULED = optax.adam(optax.cosine_decay_schedule(0.1, 20))


def weights(seed=0):
    return np.random.default_rng(seed).standard_normal((V, D)).astype(np.float32)


def make_store(tx=SGD, mesh=None, users=None):
    store = sj.store.KVStore(mesh)
    store.init("items", weights(0), tx)
    store.init("users", weights(1), users or tx)
    return store


def arrays():
    """The parameters in memory."""
    w = jnp.array(np.linspace(-1, 1, D, dtype=np.float32))
    return {"items": jnp.array(weights(0)), "users": jnp.array(weights(1)), "w": w}


def with_tables(store, params):
    return {**params, "items": store["items"], "users": store["users"]}


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, V, (2, BATCH)).astype(np.int32)
    ids[0, :3] = ids[0, 3]  # duplicates
    item, user, weight = map(jnp.asarray, (*ids, rng.random(BATCH, np.float32)))
    return {"item": item, "user": user, "weight": weight}


BATCHES = [make_batch(seed) for seed in range(4)]


def simple(params, batch):
    rows = params["items"][batch["item"]] * params["users"][batch["user"]]
    return jnp.mean((rows @ params["w"] - batch["weight"]) ** 2)


def train_on_store(store, loss, params, tx, batches=BATCHES, *, depth: Any = 1) -> Any:
    """Losses, parameters and state; a depth of None does not prefetch."""
    step = store.train_step(loss, tx)
    trained = run_steps(step, params, tx.init(params), batches, depth)
    assert step.compilations == 1
    return trained


def assert_tables_close(store, **tables):
    for name, table in tables.items():
        assert_trees_close(store.pull_all(name), table, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------ ways of reading


def csr(ids):
    values = {"index": ids, "value": jnp.linspace(0.5, 1.0, N)}
    return sj.SegmentTensor.from_lengths(values, jnp.array([2, 0, 3]))


def sines(rows):
    return jnp.sum(jnp.sin(rows))


OWN: dict[str, Any] = {  # beside those of tests/programs.py
    "lookup": lambda t, w, i: sines(sj.lookup(t, i, padding_id=3, max_norm=1.0)),
    "lookup_zero": lambda t, w, i: sines(sj.lookup(t, i + 150, mode="zero")),
    "bag_bfloat16": lambda t, w, i: sines(
        sj.embedding_bag(t.astype(jnp.bfloat16), i[None]).astype(jnp.float32)
    ),
    "dot": lambda t, w, i: sines(sj.dot(csr(i), t)),
    "computed_ids": lambda t, w, i: sines(t[(i * 7 + i[::-1]) % V]),
    "random_ids": lambda t, w, i: sines(
        t[jax.random.randint(jax.random.key(4), (6,), 0, V)]
    ),
    "stopped": lambda t, w, i: sines(t[i] * lax.stop_gradient(t)[i + 1]),
    "negative": lambda t, w, i: sines(t[i - 3]),
    "at_get": lambda t, w, i: sines(t.at[i * 60 - 20].get(mode="fill", fill_value=2.0)),
    "transposed": lambda t, w, i: sines(t.T[:, i]),
    "jitted": lambda t, w, i: jax.jit(lambda t: sines(t[i]))(t),
    "not_read": lambda t, w, i: w[0],
}
# One loss reads in many ways, since each compiles for a while.
GROUPS = [
    "negative python_int take_clip at_get dynamic_slice computed_ids stopped",
    "vmapped take/as_bfloat16 scaled_by_row_vector transposed jitted random_ids "
    "not_read",
    "index/rematerialized index/scan/scan index/scan_carries_the_table "
    "index/cond_closure index/cond/scan index/custom_vjp_of_rows",
    "bag_fixed bag_ragged bag_max bag_bfloat16 lookup lookup_zero dot",
]


def loss_of(names):
    reads = [(OWN | PROGRAMS)[name] for name in names]

    def loss(params, batch):
        items, w, ids = params["items"], params["w"], batch["item"][2 : 2 + N]
        total = jnp.mean((params["users"][batch["user"]] @ w) ** 2)
        return total + sum(read(items, w, ids) for read in reads) / (N * D)

    return loss


@pytest.mark.parametrize("names", [x.split() for x in GROUPS], ids=lambda x: x[0])
def test_each_way_of_reading(names):
    loss, store, params = loss_of(names), make_store(), arrays()
    run, in_memory = store.value_and_grad(loss), jax.jit(jax.value_and_grad(loss))
    for batch in BATCHES[:2]:
        value, grads = run(with_tables(store, params), batch)
        expected = in_memory(params, batch)
        assert_trees_close(value, expected[0], rtol=1e-5)
        assert_trees_close(to_dense(grads), expected[1], rtol=1e-4, atol=1e-6)
        # The same rows as a pull has, so that push need not merge.
        rows = np.asarray(grads["items"].rows)
        filled = rows[rows < V]
        assert (np.diff(filled) > 0).all() and (rows[filled.size :] == V).all()
    store.push("items", grads["items"])
    assert_tables_close(store, items=params["items"] - 0.1 * expected[1]["items"])


# ------------------------------------------------------------------ training


@pytest.mark.usefixtures("eight_devices")
def test_training_equals_training_in_memory():
    """With the same bits if rows are read early, and on a mesh."""
    batches = [jax.tree.map(lambda x: np.resize(x, 16), x) for x in 2 * BATCHES]
    expected, memory, _ = train_in_memory(simple, arrays(), SCHEDULED, batches)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    trained = []
    for depths, on_mesh in ((None,), False), ((0, 3), False), ((1,), True):
        store = make_store(SCHEDULED, mesh if on_mesh else None)
        params, given = with_tables(store, arrays()), batches
        if on_mesh:
            params["w"] = put(params["w"], P())
            given = [put(batch, P("x")) for batch in batches]
        step, state = store.train_step(simple, SCHEDULED), SCHEDULED.init(params)
        losses, size = [], len(given) // len(depths)
        for k, depth in enumerate(depths):
            part = given[k * size :][:size]
            some, params, state = run_steps(step, params, state, part, depth)
            losses += some
        # Adam's count begins on one device and comes back on all.
        assert step.compilations == 1 + on_mesh
        assert params["items"] == store["items"]
        tables = {name: store.pull_all(name) for name in ("items", "users")}
        trained.append((losses, tables | {"w": params["w"]}))
        if not on_mesh:
            jax.tree.map(assert_same_bits, trained[0], trained[-1])
        assert_trees_close(losses, expected, rtol=1e-5)
        assert_trees_close(params["w"], memory["w"], rtol=1e-5)
        assert_tables_close(store, items=memory["items"], users=memory["users"])


# ------------------------------------------------------------------ the call


def test_aux_and_argnums():
    store, params, batch = make_store(), arrays(), make_batch()

    def loss(w, tables, batch, *, power):
        rows = tables["items"][batch["item"]] @ w
        other = tables["items"][batch["user"]]  # read for aux alone
        return jnp.mean(rows**power), {"rows": rows, "n": len(batch), "other": other}

    run = store.value_and_grad(loss, (1, 0), has_aux=True)
    (value, aux), grads = run(params["w"], with_tables(store, {}), batch, power=2)
    dense = functools.partial(loss, power=2)
    find = jax.jit(jax.value_and_grad(dense, (1, 0), has_aux=True))
    (expected, _), (of_tables, of_w) = find(params["w"], params, batch)
    assert aux["n"] == 3 and aux["rows"].shape == (BATCH,)
    assert_trees_close(aux["other"], weights(0)[np.asarray(batch["user"])])
    assert_trees_close(value, expected, rtol=1e-5)
    assert_trees_close(grads[1], of_w, rtol=1e-5)
    assert_trees_close(to_dense(grads[0]["items"]), of_tables["items"], rtol=1e-4)
    # A table of an argument that is not differentiated is read without a gradient.
    run = store.value_and_grad(loss, has_aux=True)
    _, of_w = run(params["w"], with_tables(store, {}), batch, power=2)
    assert_trees_close(of_w, grads[1], rtol=1e-5)


@pytest.mark.parametrize("reads", ["none", "twice"])
def test_a_table_in_two_places_is_pulled_and_pushed_once(reads):
    """Each push is one step of the optimizer, so Adam counts as in memory."""
    store, memory = make_store(ADAM), arrays()
    params = {"a": memory["items"], "b": memory["items"], "w": memory["w"]}
    tables = {"a": store["items"], "b": store["items"], "w": memory["w"] + 0}

    def loss(params, batch):
        total = jnp.sum(params["w"] ** 2)
        if reads == "twice":
            a, b = params["a"][batch["item"]], params["b"][batch["user"]]
            total += jnp.mean((a * b) @ params["w"])
        return total

    _, grads = store.value_and_grad(loss)(tables, BATCHES[0])
    expected = jax.jit(jax.grad(loss))(params, BATCHES[0])
    assert_trees_close(to_dense(grads), expected, rtol=1e-4, atol=1e-6)
    assert store.stats()["items"].pulls == (reads == "twice")

    one = lambda p, batch: loss({"a": p["t"], "b": p["t"], "w": p["w"]}, batch)
    txs = optax.partition({"t": ADAM, "w": SGD}, {"t": "t", "w": "w"})
    params = {"t": memory["items"], "w": memory["w"]}
    expected, params, _ = train_in_memory(one, params, txs, BATCHES)
    losses, _, _ = train_on_store(store, loss, tables, SGD, depth=None)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_trees_close(store.pull_all("items"), params["t"], rtol=1e-5, atol=1e-6)
    assert store.stats()["items"].pushes == len(BATCHES)


def test_frozen_tables_and_tables_on_the_device():
    store, small = make_store(), jnp.array(weights(2))
    kinds = np.arange(V, dtype=np.int32) % 7
    store.init("kinds", kinds, None, dtype=np.int32)

    def loss(params, batch):
        kind = sj.lookup(params["kinds"], batch["item"])
        rows = params["small"][batch["user"]] * params["items"][batch["item"]]
        return jnp.mean(rows**2 * kind[:, None])

    tx = sj.optim.lazy(SGD)
    params = {"items": store["items"], "kinds": store["kinds"], "small": small}
    step = store.train_step(loss, tx, tables=lambda path, leaf: True, donate=False)
    state, batch = tx.init(params), make_batch()
    new, state, _ = step(params, state, batch)
    memory = {"small": small, "items": jnp.array(weights(0))}
    of = jax.jit(jax.grad(lambda p, b: loss({**p, "kinds": kinds}, b)))(memory, batch)
    assert_trees_close(new["small"], small - 0.1 * of["small"], rtol=1e-5, atol=1e-6)
    assert_tables_close(store, items=memory["items"] - 0.1 * of["items"])
    assert new["kinds"] == store["kinds"]


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16])
def test_ids_of_numpy(dtype):
    store = make_store()
    read = lambda params, ids: jnp.sum(sj.lookup(params["items"], ids, mode="zero"))
    ids = np.array([7, 3, 7, 199], dtype)
    if dtype == np.int64:
        ids = np.append(ids, [2**40 + 1, -5])
    value, grads = store.value_and_grad(read)({"items": store["items"]}, ids)
    assert_trees_close(value, weights(0)[[7, 3, 7, 199]].sum(), rtol=1e-5)
    assert np.asarray(grads["items"].rows)[:4].tolist() == [3, 7, 199, V]


def test_new_ids_do_not_compile_again():
    """Nor those of a step: `train_on_store` counts its compilations."""
    store = make_store()
    counted = count_traces(simple)
    run = store.value_and_grad(counted)
    for seed in range(5):
        run(with_tables(store, arrays()), make_batch(seed))
    # Once for the ids, once for the step; the few distinct rows of another batch fit.
    assert counted.count == 2


def test_capacity_is_measured_and_grows():
    store = make_store()
    run = store.value_and_grad(lambda params, ids: jnp.sum(params["items"][ids] ** 2))
    sizes = []
    for count in (3, 9, 50, 10, 100):
        ids = np.arange(100) % count
        _, grads = run({"items": store["items"]}, ids)
        sizes.append(grads["items"].capacity)
        expected = dense(ids, 2 * weights(0)[ids], V)
        found = dense(grads["items"].rows, grads["items"].values, V)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert sizes == [8, 11, 64, 64, 100]  # never more than the number of ids


@pytest.mark.parametrize("cached", [False, True])
def test_overflow_changes_nothing(cached):
    """Rows over the capacity, or more than a cache has slots, of one of the tables."""
    store, tx = make_store(ADAM), sj.optim.lazy(ADAM)
    before = {name: store.pull_all(name) for name in ("items", "users")}
    params: Any = with_tables(store, arrays())
    capacity = {"users": 4}
    if cached:
        cache = sj.store.CachedTable(store, "users", slots=4)
        params, capacity = params | {"users": cache.table}, None
    step, state = store.train_step(simple, tx, capacity=capacity), tx.init(params)
    for refused in (
        lambda: step(params, state, make_batch()),
        lambda: [step(params, state, *x) for x in step.prefetch(params, BATCHES)],
    ):
        with pytest.raises(ValueError, match="'users'"):
            refused()
    assert not params["w"].is_deleted()
    for name, table in before.items():
        assert_same_bits(store.pull_all(name), table)
    assert store.stats()["items"].pushes == 0
    assert not [*step.prefetch(params, [])]


# ------------------------------------------------------------------ a cache


@pytest.mark.parametrize("users", ["pulled", "cached"])
def test_cached_tables_are_trained_as_in_memory(users):
    """By ids, with one table in a cache and one that is pulled, or both in caches."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.05))
    store, cached = make_store(tx, users=tx if users == "cached" else SGD), ["items"]
    cached += ["users"] * (users == "cached")
    caches = {name: sj.store.CachedTable(store, name, slots=20) for name in cached}
    params = with_tables(store, arrays())
    params |= {name: cache.table for name, cache in caches.items()}
    assert params["items"].shape == (V, D) and params["items"].dtype == np.float32
    lifted = sj.optim.lazy(tx)
    losses, params, state = train_on_store(store, simple, params, lifted)
    for name, cache in caches.items():
        assert cache.stats().hits > 0
        cache.flush(params, state)
        assert store.engine.tables[name].rest[0] == len(BATCHES)  # the count of Adam

    labels = {"items": "cached", "w": "cached", "users": users}
    both = optax.partition({"cached": tx, "pulled": SGD}, labels)
    expected, memory, _ = train_in_memory(simple, arrays(), both, BATCHES)
    assert_trees_close(losses, expected, rtol=1e-5)
    assert_tables_close(store, items=memory["items"], users=memory["users"])
    assert_trees_close(params["w"], memory["w"], rtol=1e-4)


# ------------------------------------------------------------------ refusals


def test_ids_that_are_computed():
    """From rows of the store they cannot be, but from arrays and parameters."""
    store = make_store()
    links = np.arange(V, dtype=np.int32)[::-1]
    store.init("next", links, None, dtype=np.int32)
    ids, on_device = make_batch()["item"], jnp.asarray(links)
    params = with_tables(store, {"next": store["next"], "w": jnp.full(1, 2.0)})
    hop = lambda p, ids: lax.scan(lambda i, _: (p["next"][i], i), ids[0], None, 3)
    with pytest.raises(ValueError, match="depend on rows of table 'next'"):
        store.forward(hop)(params, ids)
    two = store.forward(lambda p, ids: {"rows": p["items"][on_device[ids]]})
    assert_same_bits(two(params, ids)["rows"], weights(0)[links[ids]])
    loss = lambda p, ids: jnp.sum(p["items"][ids + p["w"].astype(int)[0]])
    params = {"items": store["items"], "w": jnp.full(1, 2.0)}
    value, _ = store.value_and_grad(loss)(params, jnp.array([1, 5]))
    assert_trees_close(value, weights(0)[[3, 7]].sum(), rtol=1e-5)


def test_the_table_as_an_object():
    store = make_store()
    table = store["items"]
    assert table == store["items"] != store["users"]
    assert table.shape == (V, D) and table.ndim == 2 and table.dtype == np.float32
    assert copy.deepcopy({"t": [table]})["t"][0] is table and copy.copy(table) is table
    assert not jax.tree.leaves(table)
    assert jax.jit(lambda p: p)({"t": table})["t"] == table
    for use in (np.asarray, jnp.asarray, lambda t: sj.lookup(t, 3), pickle.dumps):
        with pytest.raises(TypeError):
            use(table)


# ------------------------------------------------------------------ frameworks


def store_of(tables):
    store = sj.store.KVStore()
    for name, table in tables.items():
        store.init(name, np.asarray(table), ADAM)
    return store


def assert_trains_as_in_memory(store, score, in_memory, on_store, tables):
    """`tables` takes a tree of parameters and returns {name: table}."""
    loss = lambda p, batch: jnp.mean((score(p, batch) - batch["weight"]) ** 2)
    expected, memory, _ = train_in_memory(loss, in_memory, ADAM, BATCHES)
    assert {t.name for t in tables(on_store).values()} == {"items", "users"}
    losses, _, _ = train_on_store(store, loss, on_store, ADAM)
    assert_trees_close(losses, expected, rtol=1e-5)
    assert_tables_close(store, **tables(memory))


def test_linen():
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, batch):
            user = linen.Embed(V, D, name="users")(batch["user"])
            item = linen.Embed(V, D, name="items")(batch["item"])
            return linen.Dense(1)(jnp.tanh(jnp.concatenate([user, item], -1)))[:, 0]

    model = Model()
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), make_batch()))
    params = drawn(params, 0.5)
    tables = lambda p: {n: p["params"][n]["embedding"] for n in ("items", "users")}
    store = store_of(tables(params))
    on_store = jax.tree.map(jnp.copy, params)  # the step donates
    for name in ("items", "users"):
        on_store["params"][name]["embedding"] = store[name]
    assert_trains_as_in_memory(store, model.apply, params, on_store, tables)


@pytest.mark.window
def test_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.users = nnx.Embed(V, D, rngs=rngs)
            self.items = nnx.Embed(V, D, rngs=rngs)
            self.top = nnx.Linear(2 * D, 1, rngs=rngs)

        def __call__(self, batch):
            user, item = self.users(batch["user"]), self.items(batch["item"])
            return self.top(jnp.tanh(jnp.concatenate([user, item], -1)))[:, 0]

    model = Model(nnx.Rngs(0))
    _, in_memory = nnx.split(model)
    in_memory = jax.tree.map(jnp.copy, in_memory)  # the step donates
    # flax 0.11 has no get_value.
    value = lambda x: x.get_value() if hasattr(type(x), "get_value") else x.value
    as_arrays = lambda p: {n: value(p[n]["embedding"]) for n in ("items", "users")}
    store = store_of(as_arrays(in_memory))
    model.users.embedding = nnx.Param(store["users"])
    model.items.embedding = nnx.Param(store["items"])
    graph, on_store = nnx.split(model)
    score = lambda params, batch: nnx.merge(graph, params)(batch)
    assert_trains_as_in_memory(store, score, in_memory, on_store, as_arrays)


def test_equinox():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        users: Any
        items: Any
        top: Any

        def __init__(self, key):
            a, b, c = jax.random.split(key, 3)
            self.users = eqx.nn.Embedding(V, D, key=a)
            self.items = eqx.nn.Embedding(V, D, key=b)
            self.top = eqx.nn.MLP(2 * D, "scalar", 8, 1, key=c)

        def __call__(self, batch):
            user, item = self.users(batch["user"]), self.items(batch["item"])
            return self.top(jnp.concatenate([user, item]))

    model = drawn(eqx.filter_eval_shape(lambda: Model(jax.random.key(0))), 0.5)
    tables = lambda m: {"items": m.items.weight, "users": m.users.weight}
    store = store_of(tables(model))
    where = lambda m: (m.users.weight, m.items.weight)
    on_store = eqx.tree_at(where, model, (store["users"], store["items"]))
    in_memory, _ = eqx.partition(model, eqx.is_inexact_array)
    on_store, static = eqx.partition(on_store, eqx.is_inexact_array)
    assert static.users.weight == store["users"]

    def score(params, batch, static=static):
        return jax.vmap(eqx.combine(params, static))(batch)

    sums, batch = lambda *args: jnp.sum(score(*args)), make_batch()
    # The other order of the halves is never a silent zero gradient.
    with pytest.raises((TypeError, ValueError)):
        store.value_and_grad(lambda p, b: sums(static, b, p))(on_store, batch)
    # As an argument or closed over, the static half may keep the tables.
    value, _ = store.value_and_grad(sums)(on_store, batch, static)
    assert_trees_close(value, jax.jit(sums)(in_memory, batch), rtol=1e-5)
    assert_trains_as_in_memory(store, score, in_memory, on_store, tables)
