"""sj.store.KVStore: pull, push and the first touch, against the table on the device."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import (
    assert_same_bits,
    assert_trees_close,
    compile_as_users_do,
    count_traces,
    make_rows,
)
from sparsejax.store._optimizer import Optimizer


# optax's own schedules and moments promote types.
pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D = 60, 5
NORMAL = jax.nn.initializers.normal(0.1)
# One object for all stores, so that its programs are compiled once.
SGD, ADAM, ADAGRAD = optax.sgd(1.0), optax.adam(0.1), optax.adagrad(0.1)


def weights(seed=0, shape=(V, D), dtype: Any = np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def store_of(array, tx, **options):
    store = sj.store.KVStore()
    store.init("t", array, tx, **options)
    return store


# ------------------------------------------------------------------ pull


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint32, np.int64])
def test_pull_gives_each_row_once_ascending(dtype):
    table = weights()
    store = store_of(table, None)
    pulled = store.pull("t", np.array([[9, 2], [9, 40]], dtype))
    assert isinstance(pulled.rows, jax.Array) and pulled.rows.dtype == jnp.int32
    np.testing.assert_array_equal(pulled.rows, [2, 9, 40] + [V] * 5)
    assert_same_bits(pulled.values[:3], table[[2, 9, 40]])
    assert not np.asarray(pulled.values[3:]).any()
    assert pulled.height == V
    assert store.pull("t", jnp.array([3]), capacity=4).capacity == 4
    assert store.pull("t", []).num_rows() == 0


def test_capacities_are_few():
    store = store_of(weights(), None)
    sizes = {store.pull("t", np.arange(n)).capacity for n in range(1, V, 3)}
    assert sizes == {8, 16, 32, V}  # never above the height


def test_row_sparse_pull_gives_the_rows_alone():
    """MXNet 1.9.1 returns the requested rows, sorted, each once."""
    store = store_of(weights(), None)
    for ids in (np.array([1, 3]), np.array([3, 1, 3, 1]), jnp.array([[0, 4], [4, 2]])):
        pulled, rows = store.row_sparse_pull("t", ids), np.unique(ids)
        np.testing.assert_array_equal(pulled.rows, rows)
        assert_same_bits(pulled.values, weights()[rows])


def test_ids_out_of_range():
    store = store_of(weights(), None)
    for ids in (np.array([3, -1, 60, 2]), np.array([2**63 + 5], np.uint64)):
        with pytest.raises(ValueError, match="ids for table 't' are out of range"):
            store.pull("t", ids)
    pulled = store.pull("t", np.array([3, -1, 60, 2]), mode="drop")
    np.testing.assert_array_equal(pulled.rows[:3], [2, 3, V])


@pytest.mark.parametrize("shape", [(V,), (V, 2, 3), (V, 0)])
def test_rows_of_any_rank(shape):
    table = weights(shape=shape)
    store = store_of(table, SGD)
    grad = sj.SelectedRows([4, 4], jnp.ones((2, *shape[1:])), V)
    store.push("t", grad)
    table[4] -= 2
    np.testing.assert_allclose(store.pull_all("t"), table)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_types(dtype):
    table = weights().astype(dtype)
    tx = sj.optim.rowwise_adagrad(0.1)
    store = store_of(table, tx)
    grad, _ = make_rows([3, 9, 3], V, (D,), dtype, seed=1)
    store.push("t", grad)
    first = jax.jit(lambda grad, table: tx.update(grad, tx.init(table), table)[0])
    updates = first(grad, jnp.asarray(table))
    new = np.asarray(optax.apply_updates(jnp.asarray(table), updates))
    assert_same_bits(store.pull("t", [3, 9], capacity=2).values, new[[3, 9]])


# ------------------------------------------------------------------ push

TRANSFORMATIONS = {
    "adam": lambda: optax.adam(optax.cosine_decay_schedule(0.1, 20)),
    "rowwise_adagrad": lambda: sj.optim.rowwise_adagrad(0.1),
    # Zeros in the empty slots would make its norm NaN.
    "clipped": lambda: optax.chain(
        optax.scale_by_rms(eps=0.0, initial_scale=1.0), optax.clip_by_global_norm(0.5)
    ),
    "adagrad": lambda: ADAGRAD,
    "ftrl": lambda: sj.optim.ftrl(0.5, l1=0.01, l2=0.01),
    "hyperparams": lambda: optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.1),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_push_is_lazy_on_the_device(name):
    tx = TRANSFORMATIONS[name]()
    lifted = sj.optim.lazy(tx)
    store = store_of(weights(), lifted if name == "adam" else tx)

    @jax.jit
    def step(table, state, grad):
        updates, state = lifted.update(grad, state, table)
        return optax.apply_updates(table, updates), state

    table = jnp.asarray(weights())
    state = lifted.init(table)
    rng = np.random.default_rng(1)
    for _ in range(6):
        rows = rng.integers(0, V + 1, 16)  # duplicates, and empty slots of NaN
        grad, _ = make_rows(rows, V, (D,), seed=int(rng.integers(100)))
        grad = grad.map(lambda v: v / 7)
        table, state = step(table, state, grad)
        store.push("t", grad)
        ids = np.unique(rng.integers(0, V, 9))
        pulled = store.pull("t", ids, capacity=9).values
        assert_trees_close(np.asarray(pulled)[: ids.size], np.asarray(table)[ids])
    assert_trees_close(store.pull_all("t"), table)
    kept = store.engine.tables["t"]
    leaves = [*kept.by_row, *kept.rest]
    named = sorted(jax.tree.leaves(state), key=lambda x: np.shape(x)[:1] != (V,))
    assert len(leaves) == len(named)
    touched = kept.touched.astype(bool)
    for mine, theirs in zip(leaves, named):
        if mine.shape[:1] == (V,):
            mine, theirs = mine[touched], np.asarray(theirs)[touched]
        assert mine.dtype == theirs.dtype
        assert_trees_close(mine, np.asarray(theirs))


def test_training_on_pulled_rows_is_training_on_the_table():
    tx = sj.optim.lazy(ADAGRAD)
    store = store_of(weights(), tx)
    same = assert_same_bits if jax.default_backend() == "cpu" else assert_trees_close

    def loss(params, ids, targets):
        return jnp.sum(params["w"] * (sj.lookup(params["t"], ids) - targets) ** 2)

    traced = count_traces(sj.value_and_grad(loss, tables={"t": True, "w": False}))
    whole = jax.jit(sj.value_and_grad(loss, tables={"t": True, "w": False}))
    pulled, update = jax.jit(traced), jax.jit(tx.update)
    table, w = jnp.asarray(weights()), jnp.array(0.5)
    state = tx.init(table)
    rng = np.random.default_rng(2)
    for _ in range(5):
        ids = jnp.asarray(rng.integers(0, V, (3, 4)))
        targets = jnp.asarray(rng.standard_normal((3, 4, D)), jnp.float32)
        expected, grads = whole({"t": table, "w": w}, ids, targets)
        updates, state = update(grads["t"], state, table)
        table = optax.apply_updates(table, updates)

        rows = store.pull("t", ids, capacity=12)
        value, mine = pulled({"t": rows, "w": w}, ids, targets)
        same(value, expected)
        assert isinstance(mine["t"], sj.SelectedRows)
        assert_same_bits(mine["t"].rows, rows.rows)
        assert_trees_close(mine["w"], grads["w"])
        store.push("t", mine["t"])
    same(store.pull_all("t"), table)
    assert traced.count == 1


def test_a_list_of_gradients_is_summed():
    parts = [make_rows(r, V, (D,), seed=len(r))[0] for r in ([3, 5], [5, 9, V])]
    one, other = (store_of(weights(), ADAM) for _ in "12")
    one.push("t", parts)
    other.push("t", sj.concatenate(parts))
    assert_same_bits(one.pull_all("t"), other.pull_all("t"))
    assert one.stats()["t"].pushes == 1


def test_nothing_pushed_moves_nothing_but_the_count():
    store = store_of(weights(), ADAM)
    store.push("t", sj.SelectedRows([V, V], jnp.full((2, D), jnp.nan), V))
    assert_same_bits(store.pull_all("t"), weights())
    (count,) = store.engine.tables["t"].rest
    assert count == 1


def test_what_is_refused_changes_nothing():
    store: Any = store_of(weights(), SGD)
    rows_of = lambda rows, height=V: sj.SelectedRows(rows, jnp.ones((2, D)), height)
    for rows in ([-3, 1], [1, V + 1], [2**31 - 1, V]):
        for call in store.push, store.assign:
            with pytest.raises(ValueError, match=f"1 of 2 rows for .*'t'.*{V} rows"):
                call("t", rows_of(rows))
    with pytest.raises(ValueError, match="has duplicate rows"):
        store.assign("t", rows_of([3, 3]))
    with pytest.raises(ValueError, match="must be real and of the shape"):
        store.push("t", rows_of([1, 2], V + 1))
    for wrong in rows_of([1, 2], V + 1), np.ones((V, D), np.complex64), [1, 2]:
        with pytest.raises(TypeError, match="assign: weights for table 't'"):
            store.assign("t", wrong)
    ids, array = jnp.array([1, 3]), jnp.ones((V, D))
    grad = lambda values: sj.SelectedRows(ids, values, V)
    for traced in (
        lambda: jax.vmap(lambda i: store.row_sparse_pull("t", i))(ids),
        lambda: jax.lax.scan(lambda c, i: (c, store.pull("t", i)), 0, ids),
        lambda: jax.jit(lambda v: store.push("t", grad(v)))(array[:2]),
        lambda: jax.jit(lambda a: store.init("u", a, SGD))(array),
        lambda: jax.jit(lambda a: store.assign("t", a))(array),
    ):
        with pytest.raises(TypeError, match="is in host memory"):
            traced()
    assert_same_bits(store.pull_all("t"), weights())
    assert store.names() == ("t",)


# ------------------------------------------------------------------ its program


@pytest.mark.parametrize("make", [optax.adam, optax.adagrad])
def test_the_step_gathers_nothing_and_writes_to_no_argument(make):
    """Gathers keep XLA from vectorising it; buffers of NumPy are only borrowed."""
    count = 4096
    optimizer = Optimizer(make(0.1), (5000, 16), np.float32, "t")
    rows, scalar = np.ones((count, 16), np.float32), np.zeros((), np.int32)
    leaves = [rows if by_row else scalar for by_row in optimizer.by_row]
    state = optimizer.structure.unflatten(leaves)
    places = np.ones(count, bool), np.zeros(2 * count, np.int32)
    update: Any = optimizer._update
    values = np.ones((2 * count, 16), np.float32)
    compiled = compile_as_users_do(
        update.lower(optimizer.by_row, rows, state, *places, values)
    )
    operations = re.findall(r"= \S+ ([\w-]+)\(", compiled.as_text())
    assert operations.count("scatter") == 1  # it sums duplicates
    assert "gather" not in operations and "dynamic-slice" not in operations
    assert compiled.memory_analysis().alias_size_in_bytes == 0


def test_the_program_borrows_neither_counts_nor_rows(tmp_path):
    """The store changes the count in place, and pushes only to rows not handed out."""
    height, width, count = 5000, 16, 4096
    with store_of((height, width), ADAM, path=tmp_path / "table") as store:
        for steps in range(1, 4):  # with the count on its own page
            ones = jnp.ones((count, width))
            store.push("t", sj.SelectedRows(np.arange(count), ones, height))
            assert store.engine.tables["t"].rest[0] == steps
    table = weights(shape=(height, width))
    store, out, expected = store_of(table, SGD), [], table[:count]
    for _, rows in store.prefetch([np.arange(count)] * 4, lambda ids: ids, depth=2):
        out.append((rows.values, np.array(rows.values)))
        store.push("t", rows.map(jnp.ones_like))
    for values, copy in out:
        assert_same_bits(values, copy)
        assert_same_bits(values, expected)
        expected = expected - 1


# ------------------------------------------------------------------ init


def test_transformations_that_treat_all_tables_alike():
    """By path or by rank; labels that differ by path are refused."""
    sgd = optax.sgd(0.1)
    name = lambda path, _: path[0].key if path else "other"
    labels = lambda params: jax.tree.map_with_path(name, params)
    store_of((V, D), optax.partition({"t": sgd, "other": sgd}, labels))
    by_rank = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    store_of((V, D), optax.masked(optax.add_decayed_weights(0.1), by_rank))


def test_a_state_leaf_as_long_as_the_table_is_not_taken_for_rows():
    # A count for each column, of which there are as many as rows.
    init: Any = lambda p: (jnp.zeros(p.shape[1:]), jnp.zeros_like(p))
    update: Any = lambda g, s, p=None: (-g, (s[0] + 1, s[1] + g))
    tx = optax.GradientTransformation(init, update)
    store = store_of(weights(shape=(4, 4)), tx)
    store.push("t", sj.SelectedRows([2], jnp.ones((1, 4)), 4))
    kept = store.engine.tables["t"]
    np.testing.assert_array_equal(kept.rest[0], np.ones(4))
    np.testing.assert_array_equal(kept.by_row[0].sum(1), [0, 0, 4, 0])


def test_names_and_closing():
    with sj.store.KVStore() as store:
        store.init("a", (3, 2), None)
        store.init("b", (4,), None, dtype=np.int32)
        assert store.names() == ("a", "b") and "a" in store and 3 not in store
        assert repr(store) == "KVStore(a: float32[3,2], b: int32[4])"
    assert repr(store) == "KVStore(closed)"
    store.close()
    for use in (store.stats, lambda: store.save("x")):
        with pytest.raises(ValueError, match="this store is closed"):
            use()


@pytest.mark.parametrize("depth", [0, 1])
def test_closing_inside_of_a_loop(depth):
    store = store_of((V, D), SGD)
    with pytest.raises(ValueError, match="this store is closed"):
        for _, rows in store.prefetch([[1], [2], [1]], np.array, depth=depth):
            store.push("t", rows.map(jnp.ones_like))
            store.close()


# ------------------------------------------------------------------ assign


def test_assigned_rows_are_read():
    store = store_of((V, D), ADAM)
    store.push("t", sj.SelectedRows([2], jnp.ones((1, D)), V))
    state = [x.copy() for x in store.engine.tables["t"].by_row]
    rows = np.array([7, V, 2, V])  # two empty slots
    values = np.arange(4 * D, dtype=np.float64).reshape(4, D)
    store.assign("t", sj.SelectedRows(rows, values, V))
    expected = np.zeros((V, D), np.float32)
    expected[[7, 2]] = values[[0, 2]]
    assert_same_bits(store.pull_all("t"), expected)
    store.assign("t", expected + 1)
    assert_same_bits(store.pull("t", np.arange(V), capacity=V).values, expected + 1)
    for before, after in zip(state, store.engine.tables["t"].by_row):
        assert_same_bits(before, after)


# ------------------------------------------------------------------ the first touch


@pytest.mark.slow
def test_rows_start_the_same_in_any_order():
    rng = np.random.default_rng(0)
    tx, options = ADAGRAD, dict(initializer=NORMAL, key=7)
    stores = [store_of((1000, 3), tx, **options) for _ in range(3)]
    for store in stores[:2]:  # batches of other sizes and orders
        for size in rng.integers(1, 200, 12):
            store.pull("t", rng.integers(0, 1000, size))
    first, *others = (store.pull_all("t") for store in stores)
    assert stores[2].stats()["t"].touched_rows == 0  # pull_all touches nothing
    pulled = stores[2].pull("t", np.arange(1000), capacity=1000).values
    for rows in (*others, pulled):
        assert_same_bits(rows, first)
    assert abs(first.std() - 0.1) < 0.01


def test_initializers():
    fans = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
    first = lambda x, **options: store_of(x, None, **options).pull_all("t")
    rows = first((4000, 16), initializer=fans)
    assert abs(rows.std() - 0.25) < 0.01  # flax's own for embeddings: 1 / sqrt(16)
    for constant in (jax.nn.initializers.ones, lambda k, s, d: jnp.full(s, 1.0, d)):
        assert (first((V, D), initializer=constant) == 1).all()
    halves = first(np.ones((V, D), np.float32), dtype=np.float16)
    assert halves.dtype == np.float16 and (halves == 1).all()
    seeds = 3, jax.random.key(3), jax.random.PRNGKey(3), 4
    same, *others, other = (first((V, D), initializer=NORMAL, key=x) for x in seeds)
    for rows in others:
        assert_same_bits(rows, same)
    assert (same != other).all()


def test_the_state_of_a_row_starts_with_the_row():
    # Lookahead's slow weights are a copy of the weights.
    init: Any = lambda p: p * 1
    update: Any = lambda g, s, p=None: (-g, s)
    tx = optax.chain(
        optax.GradientTransformation(init, update),
        optax.adagrad(1.0, initial_accumulator_value=0.5),
    )
    store = store_of((200, 3), tx, initializer=NORMAL)
    start = store.pull_all("t")
    grad, _ = make_rows([7, 150], 200)
    store.push("t", grad)
    store.pull("t", [9])
    first, sums = store.engine.tables["t"].by_row
    assert_same_bits(first[[7, 9, 150]], start[[7, 9, 150]])
    assert_trees_close(sums[9], np.full(3, 0.5, np.float32))
    assert (sums[[7, 150]] >= 0.5).all() and not sums[8].any()
    assert store.stats()["t"].touched_rows == 3


def test_stats_count():
    store = store_of((V, D), ADAM)
    store.pull("t", [1, 2, 2])
    store.push("t", make_rows([2, 9], V, (D,))[0])
    stats = store.stats()["t"]
    assert stats[:2] == (V, 3) and stats.bytes == V * D * 4 * 3 + V + 4
    assert (stats.pulls, stats.pulled_rows) == (1, 2)
    assert stats.pull_seconds > 0 and stats.push_seconds > 0
    assert (stats.pushes, stats.pushed_rows) == (1, 2)


def test_pull_all_reports():
    store, seen = store_of((100_000, 1), None), []
    store.pull_all("t", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(65536, 100_000), (100_000, 100_000)]


# ------------------------------------------------------------------ types of 64 bits


@pytest.mark.slow
def test_under_x64(x64):
    table = weights()
    store = store_of(table, ADAGRAD)
    store.init("wide", weights(dtype=np.float64), ADAM)
    ids = jnp.array([2, 7])
    assert ids.dtype == jnp.int64
    find = jax.jit(sj.grad(lambda t: jnp.sum(sj.lookup(t, ids) ** 2)))
    for name, dtype in (("t", jnp.float32), ("wide", jnp.float64)):
        pulled = store.pull(name, ids)
        assert pulled.dtype == dtype
        grad = find(pulled)
        assert grad.dtype == dtype
        store.push(name, grad)
        assert store.pull(name, ids).dtype == dtype


# ------------------------------------------------------------------ meshes


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_under_a_mesh(axis_type):
    axis_types = (jax.sharding.AxisType[axis_type],)
    mesh = jax.make_mesh((8,), ("x",), axis_types=axis_types)
    with jax.set_mesh(mesh):
        store = store_of((V, D), ADAGRAD, initializer=NORMAL)
        start = store.pull_all("t")
        sharded = jax.NamedSharding(mesh, jax.P("x"))
        values = jax.device_put(np.ones((8, D), np.float32), sharded)
        store.push("t", sj.SelectedRows(np.arange(8), values, V))
        pulled = store.pull("t", np.arange(9))
    assert (np.asarray(pulled.values)[:8] < start[:8]).all()
    assert_same_bits(pulled.values[8], start[8])
    assert not pulled.values.committed  # goes along with arrays of any placement
