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
from helpers import assert_same_bits, assert_trees_close, count_traces, drawn
from test_store import TRANSFORMATIONS


# The store runs optax, which relies on implicit promotion.
pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D, N = 200, 4, 12
# One object for all stores, so that its programs are compiled once.
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)


def weights(seed=0, shape=(V, D)):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_store(tx=None, mesh=None):
    tx = SGD if tx is None else tx
    store = sj.store.KVStore(mesh)
    store.init("items", weights(0), tx)
    store.init("users", weights(1), tx)
    return store


def arrays():
    """The parameters in memory."""
    w = jnp.array(np.linspace(-1, 1, D, dtype=np.float32))
    return {"items": jnp.array(weights(0)), "users": jnp.array(weights(1)), "w": w}


def with_tables(store, params):
    return {**params, "items": store["items"], "users": store["users"]}


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, V, (2, N)).astype(np.int32)
    ids[0, :3] = ids[0, 3]  # duplicates
    return {
        "item": jnp.asarray(ids[0]),
        "user": jnp.asarray(ids[1]),
        "weight": jnp.asarray(rng.random(N, np.float32)),
        "flag": jnp.asarray(seed % 2 == 0),
    }


# ------------------------------------------------------------------ ways of reading


def csr(batch):
    values = {"index": batch["item"], "value": batch["weight"]}
    return sj.SegmentTensor.from_lengths(values, jnp.array([5, 0, 7]))


def bags(batch):
    return sj.SegmentTensor.from_lengths(batch["item"], jnp.array([5, 0, 7]))


def scanned(table, ids):
    return lax.scan(lambda c, i: (jnp.tanh(c + table[i]), c), jnp.zeros(D), ids)[0]


def carried(table, ids):
    def step(carry, i):
        table, total = carry
        return (table, total + table[i] ** 2), None

    (_, total), _ = lax.scan(step, (table, jnp.zeros(D)), ids)
    return total


READS = {
    "index": lambda t, b: t[b["item"]],
    "index_negative": lambda t, b: t[b["item"] - V],
    "scalar": lambda t, b: t[b["item"][0]],
    "constant": lambda t, b: t[5] + t[7:9].sum(0),
    "take_clip": lambda t, b: jnp.take(t, b["item"] + 150, axis=0, mode="clip"),
    "at_zero": lambda t, b: t.at[b["item"] + 150].get(mode="fill", fill_value=0),
    "lookup": lambda t, b: sj.lookup(t, b["item"], padding_id=3, max_norm=1.0),
    "lookup_zero": lambda t, b: sj.lookup(t, b["item"] + 150, mode="zero"),
    "bag": lambda t, b: sj.embedding_bag(t, b["item"].reshape(3, 4)),
    "bag_max": lambda t, b: sj.embedding_bag(t, bags(b), combiner="max"),
    "bag_weights": lambda t, b: sj.embedding_bag(
        t, b["item"].reshape(3, 4), weights=b["weight"].reshape(3, 4)
    ),
    "bag_of_bfloat16": lambda t, b: sj.embedding_bag(
        t.astype(jnp.bfloat16), b["item"].reshape(3, 4)
    ).astype(jnp.float32),
    "dot": lambda t, b: sj.dot(csr(b), t),
    "scaled": lambda t, b: (2 * t + 1)[b["item"]],
    "transposed": lambda t, b: t.T[:, b["item"]],
    "dynamic_slice": lambda t, b: lax.dynamic_slice_in_dim(t, b["item"][0], 2),
    "jit": lambda t, b: jax.jit(lambda t, i: t[i])(t, b["item"]),
    "vmap": lambda t, b: jax.vmap(lambda i: t[i] * 2)(b["item"]),
    "checkpoint": lambda t, b: jax.checkpoint(lambda t, i: jnp.sin(t[i]))(t, b["item"]),
    "scan": lambda t, b: scanned(t, b["item"]),
    "scan_in_vmap": lambda t, b: jax.vmap(lambda i: scanned(t, i))(
        b["item"].reshape(3, 4)
    ),
    "carried": lambda t, b: carried(t, b["item"]),
    "cond": lambda t, b: lax.cond(
        b["flag"], lambda: t[b["item"][:5]].sum(0), lambda: 3 * t[b["user"][0]]
    ),
    "cond_in_scan": lambda t, b: lax.scan(
        lambda c, i: (c + lax.cond(i > 50, lambda: t[i], lambda: -t[i + 9]), None),
        jnp.zeros(D),
        b["item"],
    )[0],
    "computed_ids": lambda t, b: t[(b["item"] * 7 + b["user"]) % V],
    "random_ids": lambda t, b: t[jax.random.randint(jax.random.key(4), (6,), 0, V)],
    "stopped": lambda t, b: t[b["item"]] * lax.stop_gradient(t)[b["user"]],
    "stopped_rows": lambda t, b: t[b["item"]] * lax.stop_gradient(t[b["user"]]),
    "not_read": lambda t, b: jnp.ones(D),
}
# One loss reads in many ways, since each compiles for a while.
GROUPS = [sorted(READS)[k::4] for k in range(4)]


def loss_of(names):
    def loss(params, batch):
        rows = params["users"][batch["user"]] @ params["w"]
        total = jnp.mean(rows**2)
        for k, name in enumerate(names):
            found = READS[name](params["items"], batch)
            total += jnp.mean(jnp.sin(found + k))
        return total

    return loss


def to_dense(grads):
    is_rows = lambda x: isinstance(x, sj.SelectedRows)

    def dense(x):
        if not is_rows(x):
            return x
        table, rows = np.zeros(x.shape, x.dtype), np.asarray(x.rows)
        filled = rows < x.height
        np.add.at(table, rows[filled], np.asarray(x.values)[filled])
        return table

    return jax.tree.map(dense, grads, is_leaf=is_rows)


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: "-".join(names)[:40])
def test_each_way_of_reading(names):
    loss, store = loss_of(names), make_store()
    params = arrays()
    run, dense = store.value_and_grad(loss), jax.jit(jax.value_and_grad(loss))
    for seed in (0, 1):
        batch = make_batch(seed)
        value, grads = run(with_tables(store, params), batch)
        want, expected = dense(params, batch)
        assert_trees_close(value, want, rtol=1e-5)
        assert_trees_close(to_dense(grads), expected, rtol=1e-4, atol=1e-6)
        # The same rows as a pull has, so that push need not merge.
        rows = np.asarray(grads["items"].rows)
        filled = rows[rows < V]
        assert (np.diff(filled) > 0).all() and (rows[filled.size :] == V).all()


def simple(params, batch):
    rows = params["items"][batch["item"]] * params["users"][batch["user"]]
    return jnp.mean((rows @ params["w"] - batch["weight"]) ** 2)


# ------------------------------------------------------------------ training


def train_in_memory(tx, dense_tx, loss, steps=4):
    """Losses and parameters of the same training with the tables on the device."""
    params = arrays()
    lifted = dict.fromkeys(("items", "users"), sj.optim.lazy(tx))
    state = {name: t.init(params[name]) for name, t in lifted.items()}
    dense = dense_tx.init(params["w"])
    tables = {"items": True, "users": True, "w": False}

    @jax.jit
    def step(params, state, dense, batch):
        value, grads = sj.value_and_grad(loss, tables=tables)(params, batch)
        new, updates = {}, {}
        for name, t in lifted.items():
            updates[name], new[name] = t.update(grads[name], state[name], params[name])
        updates["w"], dense = dense_tx.update(grads["w"], dense, params["w"])
        return optax.apply_updates(params, updates), new, dense, value

    losses = []
    for seed in range(steps):
        params, state, dense, value = step(params, state, dense, make_batch(seed))
        losses.append(value)
    return losses, params


@pytest.mark.parametrize("name", ["adam", "rowwise_adagrad"])
def test_training_equals_training_in_memory(name):
    tx, dense_tx = TRANSFORMATIONS[name](), optax.adam(0.01)
    want, expected = train_in_memory(tx, dense_tx, simple)
    store = make_store(tx)
    step = store.train_step(simple, dense_tx)
    params = with_tables(store, arrays())
    state, losses = dense_tx.init(params), []
    for batch, rows in step.prefetch(params, map(make_batch, range(4))):
        params, state, loss = step(params, state, batch, rows)
        losses.append(loss)
    assert_trees_close(losses, want, rtol=1e-5)
    assert_trees_close(params["w"], expected["w"], rtol=1e-5)
    for table in ("items", "users"):
        assert_trees_close(store.pull_all(table), expected[table], rtol=1e-4, atol=1e-6)
    assert params["items"] == store["items"]
    assert step.compilations == 1


def test_prefetch_has_the_same_bits():
    def train(early, depth=1):
        store = make_store(ADAM)
        step = store.train_step(simple, optax.adam(0.01))
        params = with_tables(store, arrays())
        state = optax.adam(0.01).init(params)
        batches = [make_batch(seed) for seed in range(5)]
        for batch in batches if not early else ():
            params, state, _ = step(params, state, batch)
        if early:
            for batch, rows in step.prefetch(params, batches, depth=depth):
                params, state, _ = step(params, state, batch, rows)
        return params["w"], store.pull_all("items"), store.pull_all("users")

    want = train(False)
    for depth in (0, 3):
        jax.tree.map(assert_same_bits, train(True, depth), want)


def test_the_gradient_of_value_and_grad_is_pushed():
    params, store = arrays(), make_store()
    batch = make_batch()
    _, grads = store.value_and_grad(simple)(with_tables(store, params), batch)
    for name in ("items", "users"):
        store.push(name, grads[name])
    expected = jax.jit(jax.grad(simple))(params, batch)
    want = params["items"] - 0.1 * expected["items"]
    assert_trees_close(store.pull_all("items"), want, rtol=1e-5, atol=1e-6)


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
    (want, _), (of_tables, of_w) = find(params["w"], params, batch)
    assert aux["n"] == 4 and aux["rows"].shape == (N,)
    assert_trees_close(aux["other"], weights(0)[np.asarray(batch["user"])])
    assert_trees_close(value, want, rtol=1e-5)
    assert_trees_close(grads[1], of_w, rtol=1e-5)
    assert_trees_close(to_dense(grads[0]["items"]), of_tables["items"], rtol=1e-4)
    # A table of an argument that is not differentiated is read without a gradient.
    (_, _), of_w = store.value_and_grad(loss, has_aux=True)(
        params["w"], with_tables(store, {}), batch, power=2
    )
    assert_trees_close(of_w, grads[1], rtol=1e-5)


def test_a_table_in_several_places():
    store, table, batch = make_store(), jnp.array(weights(0)), make_batch()

    def loss(params, batch):
        pairs = params["in"][batch["item"]] * params["out"][batch["user"]]
        return jnp.mean(pairs**2)

    params = {"in": store["items"], "out": store["items"]}
    before = store.stats()["items"].pulls
    _, grads = store.value_and_grad(loss)(params, batch)
    assert store.stats()["items"].pulls == before + 1
    want = jax.jit(jax.grad(loss))({"in": table, "out": table}, batch)
    assert_trees_close(to_dense(grads), want, rtol=1e-4, atol=1e-6)
    step = store.train_step(loss, SGD)
    step(params, SGD.init(params), batch)
    want = table - 0.1 * (want["in"] + want["out"])
    assert_trees_close(store.pull_all("items"), want, rtol=1e-5, atol=1e-6)
    assert store.stats()["items"].pushes == 1


@pytest.mark.parametrize("reads", ["none", "twice"])
def test_a_step_without_rows_of_a_table_and_with_it_in_two_places(reads):
    """Each push is one step of the optimizer, so Adam counts as in memory."""
    tx, dense = ADAM, SGD
    store, arrays_ = make_store(tx), arrays()
    params = {"a": arrays_["items"], "b": arrays_["items"], "w": arrays_["w"] + 0}
    tables = {"a": store["items"], "b": store["items"], "w": arrays_["w"]}

    def loss(params, batch):
        total = jnp.sum(params["w"] ** 2)
        if reads == "twice":
            a, b = params["a"][batch["item"]], params["b"][batch["user"]]
            total += jnp.mean((a * b) @ params["w"])
        return total

    step, state = store.train_step(loss, dense), dense.init(tables)
    lazy = sj.optim.lazy(tx)
    of_table = lazy.init(params["a"])

    @jax.jit
    def step_in_memory(params, of_table, batch):
        kinds = {"a": True, "b": True, "w": None}
        want, grads = sj.value_and_grad(loss, tables=kinds)(params, batch)
        both = sj.concatenate([grads["a"], grads["b"]])
        updates, of_table = lazy.update(both, of_table, params["a"])
        table = optax.apply_updates(params["a"], updates)
        w = params["w"] - 0.1 * grads["w"]
        return {"a": table, "b": table, "w": w}, of_table, want

    for seed in range(3):
        batch = make_batch(seed)
        tables, state, value = step(tables, state, batch)
        params, of_table, want = step_in_memory(params, of_table, batch)
        np.testing.assert_allclose(value, want, rtol=1e-5)
    assert_trees_close(store.pull_all("items"), params["a"], rtol=1e-5, atol=1e-6)
    assert store.stats()["items"].pushes == 3


def test_frozen_tables_and_tables_on_the_device():
    store, small = make_store(), jnp.array(weights(2))
    store.init("kinds", np.arange(V, dtype=np.int32) % 7, None, dtype=np.int32)

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
    kinds = np.arange(V, dtype=np.int32) % 7
    of = jax.jit(jax.grad(lambda p, b: loss({**p, "kinds": kinds}, b)))(memory, batch)
    assert_trees_close(new["small"], small - 0.1 * of["small"], rtol=1e-5, atol=1e-6)
    want = memory["items"] - 0.1 * of["items"]
    assert_trees_close(store.pull_all("items"), want, rtol=1e-5, atol=1e-6)
    assert new["kinds"] == store["kinds"]


def test_forward():
    store, params, batch = make_store(), arrays(), make_batch()
    scores = lambda params, batch: {"s": params["items"][batch["item"]] @ params["w"]}
    found = store.forward(scores)(with_tables(store, params), batch)
    assert_trees_close(found, scores(params, batch), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16])
def test_ids_of_numpy(dtype):
    store, params = make_store(), arrays()
    read = lambda params, ids: jnp.sum(sj.lookup(params["items"], ids, mode="zero"))
    ids = np.array([7, 3, 7, 199], dtype)
    wide = np.array([7, 3, 2**40 + 1, -5]) if dtype == np.int64 else ids
    find = store.value_and_grad(read)
    for some in (ids, wide):
        value, grads = find(with_tables(store, params), some)
        good = [int(i) for i in some if 0 <= i < V]
        assert_trees_close(value, weights(0)[good].sum(), rtol=1e-5)
        rows = np.asarray(grads["items"].rows)
        assert sorted(set(good)) == rows[rows < V].tolist()


def test_new_ids_do_not_compile_again():
    store = make_store()
    counted = count_traces(simple)
    run = store.value_and_grad(counted)
    params = with_tables(store, arrays())
    for seed in range(5):
        run(params, make_batch(seed))
    # Once for the ids, once for the step; the few distinct rows of another batch fit.
    assert counted.count == 2
    step = store.train_step(simple, SGD)
    state = SGD.init(params)
    for seed in range(5):
        params, state, _ = step(params, state, make_batch(seed))
    assert step.compilations == 1


def test_capacity_is_measured_and_grows():
    store = make_store()
    read = lambda params, ids: jnp.sum(params["items"][ids] ** 2)
    run = store.value_and_grad(read)
    sizes = []
    for count in (3, 9, 50, 10, 100):
        ids = jnp.asarray(np.arange(100) % count)
        _, grads = run({"items": store["items"]}, ids)
        sizes.append(grads["items"].capacity)
        want = np.zeros((V, D), np.float32)
        np.add.at(want, np.asarray(ids), 2 * weights(0)[np.asarray(ids)])
        assert_trees_close(to_dense(grads["items"]), want, rtol=1e-5)
    assert sizes == [8, 11, 64, 64, 100]  # never more than the number of ids


def test_overflow_changes_nothing():
    store = make_store(ADAM)
    params = with_tables(store, arrays())
    before = {name: store.pull_all(name) for name in ("items", "users")}
    step = store.train_step(simple, SGD, capacity={"users": 4})
    with pytest.raises(ValueError, match=r"'users' do not fit in capacity=4"):
        step(params, SGD.init(params), make_batch())
    assert not params["w"].is_deleted()
    for name, table in before.items():
        assert_same_bits(store.pull_all(name), table)
    assert store.stats()["items"].pushes == 0
    # With prefetch too, at the batch that does not fit.
    for _ in step.prefetch(params, []):
        raise AssertionError
    with pytest.raises(ValueError, match="do not fit"):
        next(step.prefetch(params, [make_batch()]))


# ------------------------------------------------------------------ a cache


# For the table and all other parameters, so that the cache finds its state.
CACHED_TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.05))


def cached_batches():
    return [make_batch(seed) for seed in range(4)]


@functools.cache
def train_cached_in_memory():
    """The losses and parameters of `test_cached_tables_are_trained_as_in_memory`."""
    tx, users = sj.optim.lazy(CACHED_TX), sj.optim.lazy(SGD)
    mine = arrays()
    theirs = mine.pop("users")
    state, other = tx.init(mine), users.init(theirs)
    tables = ({"items": True, "w": False}, True)
    run = lambda m, t, b: simple({**m, "users": t}, b)

    @jax.jit
    def step(mine, state, theirs, other, batch):
        loss, grads = sj.value_and_grad(run, (0, 1), tables=tables)(mine, theirs, batch)
        updates, state = tx.update(grads[0], state, mine)
        mine = optax.apply_updates(mine, updates)
        updates, other = users.update(grads[1], other, theirs)
        return mine, state, optax.apply_updates(theirs, updates), other, loss

    losses = []
    for batch in cached_batches():
        mine, state, theirs, other, loss = step(mine, state, theirs, other, batch)
        losses.append(loss)
    return losses, mine, theirs


@pytest.mark.parametrize("early", [True, False])
def test_cached_tables_are_trained_as_in_memory(early):
    """By ids, with one table in a cache and one that is pulled."""
    tx = sj.optim.lazy(CACHED_TX)
    store = sj.store.KVStore()
    store.init("items", weights(0), CACHED_TX)
    store.init("users", weights(1), SGD)
    cache = sj.store.CachedTable(store, "items", slots=20)
    params = {**with_tables(store, arrays()), "items": cache.table}
    assert params["items"].shape == (V, D) and params["items"].dtype == np.float32
    state = tx.init(params)
    step = store.train_step(simple, tx)
    batches, found = cached_batches(), []
    with_rows = (
        step.prefetch(params, batches) if early else ((b, None) for b in batches)
    )
    for batch, rows in with_rows:
        params, state, loss = step(params, state, batch, rows)
        found.append(loss)
    assert step.compilations == 1 and cache.stats().hits > 0
    cache.flush(params, state)

    losses, mine, theirs = train_cached_in_memory()
    assert_trees_close(found, losses, rtol=1e-5)
    assert_trees_close(store.pull_all("items"), mine["items"], rtol=1e-4, atol=1e-6)
    assert_trees_close(store.pull_all("users"), theirs, rtol=1e-4, atol=1e-6)
    assert_trees_close(params["w"], mine["w"], rtol=1e-4)


def test_cached_tables_are_refused_where_rows_cannot_move():
    store = make_store()
    cache = sj.store.CachedTable(store, "items", slots=5)
    params = {**with_tables(store, arrays()), "items": cache.table}
    with pytest.raises(TypeError, match="Train it by store.train_step"):
        store.value_and_grad(simple)(params, make_batch())
    with pytest.raises(TypeError, match="used where an array is needed"):
        np.asarray(params["items"])
    tx = sj.optim.lazy(SGD)
    state = tx.init(params)
    before = store.pull_all("users")
    with pytest.raises(ValueError, match="5"):  # more rows than slots
        store.train_step(simple, tx)(params, state, make_batch())
    assert_same_bits(store.pull_all("users"), before)


# ------------------------------------------------------------------ refusals


def test_a_second_hop_names_both_reads():
    store = make_store()
    store.init("next", np.arange(V, dtype=np.int32), None, dtype=np.int32)

    def loss(params, batch):
        ids = params["next"][batch["item"]]  # first
        return jnp.sum(params["items"][ids])  # second

    params = {"next": store["next"], "items": store["items"]}
    with pytest.raises(ValueError) as found:
        store.forward(loss)(params, make_batch())
    text = str(found.value)
    line = loss.__code__.co_firstlineno
    assert f"test_value_and_grad.py:{line + 2}" in text and "'items'" in text
    assert f"test_value_and_grad.py:{line + 1}" in text and "'next'" in text
    # In a loop, the row read in one turn decides what the next one reads.
    hop = lambda p, b: lax.scan(lambda i, _: (p["next"][i], i), b["item"][0], None, 3)
    with pytest.raises(ValueError, match="depend on rows of table 'next'"):
        store.forward(hop)(params, make_batch())
    # Rows of an array on the device may decide.
    links = np.arange(V)[::-1]
    ids, on_device = make_batch()["item"], jnp.asarray(links)
    two = store.forward(lambda p, i: p["items"][on_device[i]])(params, ids)
    assert_same_bits(two, weights(0)[links[ids]])


@pytest.mark.parametrize(
    "use",
    [
        jnp.mean,
        lambda t: t @ jnp.ones(D),
        lambda t: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, t[c[0]]), (0, t[0])
        )[1],
        lambda t: t.at[3].set(0.0)[4],
    ],
)
def test_a_use_of_all_rows(use):
    store = make_store()
    with pytest.raises((sj.DensifyError, TypeError), match="'items'"):
        store.forward(lambda p: use(p["items"]))({"items": store["items"]})


def test_ids_that_depend_on_parameters():
    store = make_store()

    def loss(params, ids):
        return jnp.sum(params["items"][ids + params["w"].astype(int)[0]])

    params = {"items": store["items"], "w": jnp.full(1, 2.0)}
    value, _ = store.value_and_grad(loss)(params, jnp.array([1, 5]))
    assert_trees_close(value, weights(0)[[3, 7]].sum(), rtol=1e-5)
    step = store.train_step(loss, SGD)
    with pytest.raises(ValueError, match=r"params\['w'\]"):
        next(step.prefetch(params, [jnp.array([1, 5])]))


def test_refusals():
    store, params = make_store(), arrays()
    run = store.value_and_grad(simple)
    with pytest.raises(TypeError, match="have no table of the store"):
        run(params, make_batch())
    with pytest.raises(ValueError, match="belongs to another store"):
        run(with_tables(make_store(), params), make_batch())
    with pytest.raises(TypeError, match="traced by jit"):
        jax.jit(run)(with_tables(store, params), make_batch())
    closed_over = store["items"]
    with pytest.raises(TypeError, match="must not close over it"):
        run(with_tables(store, params), make_batch())
        store.forward(lambda p: closed_over[jnp.array([1])])(with_tables(store, {}))
    step = store.train_step(simple, SGD)
    with pytest.raises(ValueError, match="rows must be the rows of this batch"):
        step(with_tables(store, params), (), make_batch(), {"items": 0})


def test_the_table_as_an_object():
    store = make_store()
    table = store["items"]
    assert table == store["items"] != store["users"]
    assert table.shape == (V, D) and table.ndim == 2 and table.dtype == np.float32
    assert copy.deepcopy({"t": [table]})["t"][0] is table and copy.copy(table) is table
    assert not jax.tree.leaves(table)
    assert jax.jit(lambda p: p)({"t": table})["t"] == table
    with pytest.raises(TypeError, match="store.save"):
        pickle.dumps(table)
    for use in (np.asarray, jnp.asarray, lambda t: t[3], lambda t: sj.lookup(t, 3)):
        with pytest.raises(TypeError):
            use(table)
    with pytest.raises(KeyError, match="there is no table 'item'"):
        store["item"]


# ------------------------------------------------------------------ a mesh


@pytest.mark.usefixtures("eight_devices")
def test_on_a_mesh():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    put = lambda spec: lambda x: jax.device_put(x, NamedSharding(mesh, spec))
    batches = [
        {k: np.resize(v, 16) for k, v in make_batch(seed).items()} for seed in range(3)
    ]

    def train(store, place, everywhere):
        tx = ADAM
        params = with_tables(store, everywhere(arrays()))
        step, state = store.train_step(simple, tx), tx.init(params)
        for batch, rows in step.prefetch(params, map(place, batches)):
            params, state, loss = step(params, state, batch, rows)
        return loss, params["w"], store.pull_all("items"), store.pull_all("users")

    same = lambda x: x
    everywhere = lambda tree: jax.tree.map(put(P()), {"w": tree["w"]})
    shard = lambda batch: jax.tree.map(put(P("x")), batch)
    found = train(make_store(mesh=mesh), shard, everywhere)
    want = train(make_store(), same, same)
    assert_trees_close(found, want, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ frameworks


def towers_loss(score, batch):
    return jnp.mean((score - batch["weight"]) ** 2)


FRAMEWORK_TX = optax.adam(0.05)


def assert_trains_as_in_memory(store, loss, in_memory, on_store, tables):
    """Trains some steps by Adam in the store and on the device.

    Args:
      tables: takes a tree of parameters and returns {name: table}.
    """
    tx = FRAMEWORK_TX
    lazy = sj.optim.lazy(tx)
    # The step donates arrays that the two may share.
    in_memory = jax.tree.map(jnp.copy, in_memory)
    state = lazy.init(in_memory)

    @jax.jit
    def dense_step(params, state, batch):
        value, grads = sj.value_and_grad(loss)(params, batch)
        updates, state = lazy.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    step = store.train_step(loss, tx)
    own = tx.init(on_store)
    batches = [make_batch(seed) for seed in range(4)]
    for batch, rows in step.prefetch(on_store, batches):
        on_store, own, found = step(on_store, own, batch, rows)
        in_memory, state, want = dense_step(in_memory, state, batch)
        assert_trees_close(found, want, rtol=1e-5)
    assert step.compilations == 1
    for name, table in tables(in_memory).items():
        assert_trees_close(store.pull_all(name), table, rtol=1e-4, atol=1e-6)
    assert {t.name for t in tables(on_store).values()} == {"items", "users"}


def store_with(tables):
    store = sj.store.KVStore()
    for name, table in tables.items():
        store.init(name, np.asarray(table), FRAMEWORK_TX)
    return store


@pytest.mark.window
def test_linen():
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, batch):
            user = linen.Embed(V, D, name="users")(batch["user"])
            item = linen.Embed(V, D, name="items")(batch["item"])
            both = jnp.concatenate([user, item], axis=-1)
            return linen.Dense(1)(jnp.tanh(linen.Dense(8)(both)))[:, 0]

    model = Model()
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), make_batch()))
    params = drawn(params, 0.5)
    tables = lambda p: {n: p["params"][n]["embedding"] for n in ("items", "users")}
    store = store_with(tables(params))
    on_store = copy.deepcopy(jax.tree.map(jnp.copy, params))
    for name in ("items", "users"):
        on_store["params"][name]["embedding"] = store[name]
    loss = lambda params, batch: towers_loss(model.apply(params, batch), batch)
    assert_trains_as_in_memory(store, loss, params, on_store, tables)


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
            return self.top(jnp.tanh(jnp.concatenate([user, item], axis=-1)))[:, 0]

    model = Model(nnx.Rngs(0))
    _, in_memory = nnx.split(model)
    in_memory = jax.tree.map(jnp.copy, in_memory)
    # flax 0.11 has no get_value.
    value = lambda x: x.get_value() if hasattr(type(x), "get_value") else x.value
    as_arrays = lambda p: {n: value(p[n]["embedding"]) for n in ("items", "users")}
    store = store_with(as_arrays(in_memory))
    model.users.embedding = nnx.Param(store["users"])
    model.items.embedding = nnx.Param(store["items"])
    graph, on_store = nnx.split(model)

    def loss(params, batch):
        return towers_loss(nnx.merge(graph, params)(batch), batch)

    assert_trains_as_in_memory(store, loss, in_memory, on_store, as_arrays)


@pytest.mark.parametrize("order", ["params first", "static first"])
def test_equinox(order):
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

        def __call__(self, user, item):
            return self.top(jnp.concatenate([self.users(user), self.items(item)]))

    model = drawn(eqx.filter_eval_shape(lambda: Model(jax.random.key(0))), 0.5)
    tables = lambda m: {"items": m.items.weight, "users": m.users.weight}
    store = store_with(tables(model))
    where = lambda m: (m.users.weight, m.items.weight)
    on_store = eqx.tree_at(where, model, (store["users"], store["items"]))
    in_memory, _ = eqx.partition(model, eqx.is_inexact_array)
    on_store, static = eqx.partition(on_store, eqx.is_inexact_array)
    assert static.users.weight == store["users"]

    def loss(params, batch, static):
        model = eqx.combine(params, static)
        return towers_loss(jax.vmap(model)(batch["user"], batch["item"]), batch)

    if order == "static first":

        def wrong(params, batch):
            return towers_loss(
                jax.vmap(eqx.combine(static, params))(batch["user"], batch["item"]),
                batch,
            )

        # Never a silent zero gradient.
        with pytest.raises((TypeError, ValueError)):
            store.value_and_grad(wrong)(on_store, make_batch())
        return
    # As an argument or closed over, the static half may keep the tables.
    value, _ = store.value_and_grad(loss)(on_store, make_batch(), static)
    half = lambda params, batch: loss(params, batch, static)
    assert_trees_close(value, jax.jit(half)(in_memory, make_batch()), rtol=1e-5)
    assert_trains_as_in_memory(store, half, in_memory, on_store, tables)
