"""CachedTable: training has the bits of the whole table on the device."""

import functools
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_in_place, assert_same_bits, assert_trees_close
from optimizers import SEPARABLE
from oracle import run_steps, train_in_memory, workers
from sparsejax.store import _staging
from sparsejax.store._tree_tables import CachedRows


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D, SLOTS, BATCH = 211, 4, 24, 16
NORMAL = jax.nn.initializers.normal(0.1)
# One object for all stores, so that its programs are compiled once.
TX = {
    "sgd": optax.sgd(0.1),
    "adagrad": sj.optim.adagrad(0.1),
    "adam": optax.adam(0.1),
    "rowwise_adagrad": sj.optim.rowwise_adagrad(0.1),
}


# A store refuses those that decide by a path or by a tree of the parameters.
OPTIMIZERS = {
    name: make for name, make in SEPARABLE.items() if not name.startswith("partition")
}


def new_store(tx, path=None):
    store = sj.store.KVStore()
    store.init("items", (V, D), TX[tx], initializer=NORMAL, key=3, path=path)
    return store


def make_batches(steps, seed=0, size=BATCH):
    """Zipf ids with duplicates, some of them out of range, and labels."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = (np.floor(V ** rng.random(size)).astype(np.int32) - 1) * 37 % V
        ids[rng.random(size) < 0.05] = rng.choice([-1, -7, V, V + 5])
        yield ids, rng.standard_normal(size).astype(np.float32)


def loss_fn(params, batch):
    ids, labels = batch
    x = sj.lookup(params["items"], ids, mode="zero")
    return jnp.mean((jnp.tanh(x) @ params["w"] - labels) ** 2)


def in_order(starts, size=BATCH, stride=1):
    labels, ids = np.ones(size, np.float32), np.arange(size, dtype=np.int32) * stride
    return [(ids + start, labels) for start in starts]


# Depths of prefetching, and the batches that are trained on at each.
PARTS = {
    1: [*make_batches(15)],
    None: [*make_batches(15, seed=1)],
    # Two sets of rows in turn: rows leave and come up again at once.
    2: in_order([0, 1] * 6, stride=2),
}
LIFTED = {name: sj.optim.lazy(tx) for name, tx in TX.items()}
W = jnp.full((D,), jnp.float32(0.5))


def start(tx, *, store=None, slots=SLOTS, path=None) -> Any:
    """A store, its cache, and the parameters, their state and the step that trains."""
    store = new_store(tx, path=path) if store is None else store
    cache = sj.store.CachedTable(store, "items", slots)
    params = {"items": cache.table, "w": W + 0}
    step = store.train_step(loss_fn, LIFTED[tx])
    return store, cache, params, LIFTED[tx].init(params), step


def train_whole(tx, batches) -> tuple[Any, Any, list]:
    """With a slot for each row: weights, state, losses."""
    store, cache, params, state, step = start(tx, slots=V)
    losses, params, state = run_steps(step, params, state, batches)
    cache.flush(params, state)
    table = store.engine.tables["items"]
    weights = {"items": store.pull_all("items"), "w": params["w"]}
    return weights, (state, [*map(np.copy, table.by_row)]), losses


@functools.cache
def train_parts():
    return train_whole("adam", sum(PARTS.values(), []))


def assert_trained(store, params, state, whole):
    """After a flush, the store and the dense leaves equal a slot for each row."""
    table = store.engine.tables["items"]
    weights, (expected_state, by_row), _ = whole
    assert_same_bits(store.pull_all("items"), weights["items"])
    assert_same_bits(params["w"], weights["w"])
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state)):
        if np.shape(mine)[:1] not in ((SLOTS,), (V,)) and mine.shape == theirs.shape:
            assert_same_bits(mine, theirs)
    touched = np.flatnonzero(table.touched)
    assert touched.size > SLOTS and len(by_row) == len(table.by_row)
    for column, theirs in zip(table.by_row, by_row):
        assert_same_bits(column[touched], theirs[touched])
    counts = [x for x in jax.tree.leaves(expected_state) if not np.shape(x)]
    for mine, theirs in zip(table.rest, counts):
        assert_same_bits(mine, theirs)


def late_reads(cache):
    """The numbers of rows that steps read from now on, which were not read early."""
    rows, numbers = cache.table.cache, []
    read = rows._read_late

    def read_late(late, *rest):
        numbers.append(late.size)
        return read(late, *rest)

    rows._read_late = read_late
    return numbers


# ------------------------------------------------------------------ equal bits


@pytest.mark.parametrize(
    ("tx", "slots", "parts"),
    [
        ("adam", SLOTS, PARTS),
        ("rowwise_adagrad", V - 1, {0: [*make_batches(20)]}),
        # Hardly more slots than the distinct rows of a step.
        pytest.param(
            *("adagrad", BATCH + 3, {3: [*make_batches(80)]}), marks=pytest.mark.slow
        ),
    ],
    ids=["some_slots", "many_slots", "few_slots"],
)
def test_the_bits_do_not_depend_on_slots(tx, slots, parts):
    """And are those of an array of all rows, with `value_and_grad` and `lazy`."""
    batches = sum(parts.values(), [])
    whole = train_parts() if parts is PARTS else train_whole(tx, batches)
    weights, (_, by_row), _ = whole
    params = {"items": jnp.asarray(new_store(tx).pull_all("items")), "w": W}
    tables = {"items": True, "w": False}
    _, params, state = train_in_memory(loss_fn, params, TX[tx], batches, tables)
    assert_trees_close(weights, params, rtol=1e-4, atol=1e-6)
    shapes = [x.shape for x in by_row]
    in_memory = [x for x in jax.tree.leaves(state) if x.shape in shapes]
    for mine, theirs in zip(by_row, in_memory, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    store, cache, params, state, step = start(tx, slots=slots)
    late, all_losses = late_reads(cache), []
    for depth, part in parts.items():
        before = sum(late)
        losses, params, state = run_steps(step, params, state, part, depth)
        all_losses += losses
        if depth == 2:  # rows came up again before they were written
            assert sum(late) - before >= 8 * (2 * BATCH - SLOTS)
        assert not workers()
    assert_same_bits(np.array(all_losses), np.array(whole[2]))
    cache.flush(params, state)
    assert_trained(store, params, state, whole)
    stats = cache.stats()
    assert stats.steps == len(batches) and 0 < stats.hit_rate < 1
    if slots < V - 1:
        assert stats.evictions > len(batches) / 4 and stats.used_slots == slots
    row_bytes = stats.bytes_up / stats.misses
    assert stats.bytes_back <= stats.bytes_up + SLOTS * row_bytes


def test_other_batches_between_and_stopping_early():
    """Prefetching is only a hint: batches may be skipped, repeated, or left."""
    rng = np.random.default_rng(1)
    batches, others = list(make_batches(40)), list(make_batches(40, seed=2))
    store, cache, params, state, step = start("adam")
    in_flight = store.engine.tables["items"].in_flight
    taken, losses = [], []
    for begin in (0, 25):
        part = step.prefetch(params, batches[begin:], depth=2)
        for k, (batch, rows) in enumerate(part, begin):
            dice = rng.random()
            store.stats()
            assert len(in_flight) <= 3  # batches that are skipped are forgotten
            steps = [(batch, rows)] * (dice > 0.1) + [(others[k], None)] * (dice > 0.8)
            for some, given in steps[:: rng.choice([-1, 1])]:
                taken.append(some)
                params, state, loss = step(params, state, some, given)
                losses.append(loss)
            if dice < 0.2:
                cache.flush(params, state)
                pulled = store.pull("items", [5, 6], capacity=2).values
                assert_same_bits(pulled, store.pull_all("items")[5:7])
            if k == 20:
                break
        part.close()
        assert not workers()
    whole = train_whole("adam", taken)
    assert_same_bits(np.array(losses), np.array(whole[2]))
    cache.flush(params, state)
    assert_trained(store, params, state, whole)
    assert not in_flight


def test_training_goes_on_after_a_batch_of_too_many_rows():
    batches = list(make_batches(6, size=SLOTS + 1))
    store, cache, params, state, step = start("adam")
    mixed, refused = [*batches[:3], *in_order([0], SLOTS + 1), *batches[3:]], []
    for batch, rows in step.prefetch(params, mixed, depth=2):
        try:
            params, state, _ = step(params, state, batch, rows)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) == 1
    cache.flush(params, state)
    whole = train_whole("adam", batches)
    assert_same_bits(store.pull_all("items"), whole[0]["items"])


# ------------------------------------------------------------------ cost


def test_programs_are_few_and_in_place():
    array, rows = jnp.zeros((4096, 32)), jnp.zeros((64, 32))
    scatter = lambda x, slots, new: _staging._scatter([x], slots, [new])[0]
    assert_in_place(scatter, array, jnp.arange(64), rows)

    compiled: Any = _staging._gather, _staging._scatter
    programs = lambda: sum(f._cache_size() for f in compiled)
    before = programs()
    _, _, params, state, step = start("sgd", slots=100)
    rng = np.random.default_rng(0)
    for height in rng.integers(1, V, 60):
        ids = rng.integers(0, height, 99)
        batch = ids.astype(np.int32), np.ones(99, np.float32)
        params, state, _ = step(params, state, batch)
    assert programs() - before <= 2 * 5  # capacities 8, 16, ..., 128
    assert step.compilations <= 5


def test_rows_are_read_while_the_step_runs():
    store, cache, params, state, step = start("sgd")
    batches = in_order(range(0, 40, 4), 8)
    rows: Any = cache.table.cache  # the rows on the device
    late = late_reads(cache)
    for k, (batch, early) in enumerate(step.prefetch(params, batches)):
        params, state, _ = step(params, state, batch, early)
        store.stats()
        assert len(store.engine.tables["items"].in_flight) == (k < 9)
        assert not rows._to_write  # the rows that left are on the host
    assert not late and not workers()


# ------------------------------------------------------------------ slots


@pytest.mark.parametrize("height, count, most", [(V, SLOTS, SLOTS + 1), (400, 300, 60)])
def test_the_least_recently_used_rows_leave(height, count, most):
    """Any of the rows that were used at the same time may leave."""
    rng = np.random.default_rng(0)
    slots = _staging.Slots(height, count)
    used_at = {}
    for now in range(80 if count == SLOTS else 400):
        size = rng.integers(1, most)
        rows = np.unique(np.floor(height ** rng.random(size)).astype(np.int64) - 1)
        before = set(slots.row_of[slots.row_of >= 0])
        _, leaving = slots.plan(np.sort(rows))
        assert slots._queued == sum(x.size for _, x in slots._queue) <= 4 * count
        assert (slots.row_of[slots.of(rows)] == rows).all()
        left = set(leaving[leaving >= 0])
        after = set(slots.row_of[slots.row_of >= 0])
        assert after == (before - left) | set(rows) and len(after) <= count
        assert not left & set(rows)
        assert not left or len(after) == count
        stayed = before - left - set(rows)
        last, used_at = used_at, used_at | dict.fromkeys(rows.tolist(), now)
        if left and stayed:
            assert max(last[x] for x in left) <= min(last[x] for x in stayed)
    assert slots.used == count


# ------------------------------------------------------------------ files


def test_a_copy_is_what_was_flushed(tmp_path):
    """A copy of table and journal equals the files that a kill leaves."""
    batches, journal = sum(PARTS.values(), []), tmp_path / "table.journal"
    store, cache, params, state, step = start("adam", path=tmp_path / "table")
    _, params, state = run_steps(step, params, state, batches[:10])
    assert cache.step is None
    cache.flush(params, state, step=10)
    assert not journal.exists()
    store.save(tmp_path / "saved")
    weights, w = store.pull_all("items"), np.array(params["w"])
    moments = jax.tree.leaves(jax.tree.map(np.array, state))
    expected, params, state = run_steps(step, params, state, batches[10:20])
    for name in ("table", "table.journal"):
        shutil.copy(tmp_path / name, tmp_path / f"copied{name[5:]}")
    assert cache.stats().written_rows > 40
    _, params, state = run_steps(step, params, state, batches[20:])
    cache.flush(params, state)
    assert_trained(store, params, state, train_parts())
    assert cache.step is None  # of this flush
    cache.close()
    store.close()
    assert not journal.exists()

    # The kill may cut an entry short: its rows were not written.
    journal = tmp_path / "copied.journal"
    content = journal.read_bytes()
    journal.write_bytes(content + b"\0" + b"\1" * 9)
    store = new_store("adam", path=tmp_path / "copied")
    assert not journal.exists()
    assert_same_bits(store.pull_all("items"), weights)
    assert int(store.engine.tables["items"].rest[0]) == 10

    # Training continues from there, and from the saved store, given the dense leaves.
    loaded = new_store("adam")
    loaded.load(tmp_path / "saved")
    for each in loaded, store:
        _, cache, params, state, step = start("adam", store=each)
        assert state[0].count == 0  # the first step takes it from the store
        leaves, tree = jax.tree.flatten(state)
        dense = lambda mine, theirs: jnp.array(theirs) if theirs.shape == (D,) else mine
        state = tree.unflatten(map(dense, leaves, moments))
        params |= {"w": jnp.array(w)}
        losses, _, _ = run_steps(step, params, state, batches[10:20])
        assert cache.step == 10
        assert_same_bits(np.array(losses), np.array(expected))
    cache.close(discard=True)
    assert_same_bits(store.pull_all("items"), weights)
    store.close()
    journal.write_bytes(content[:10])  # begun by a flush's kill
    new_store("adam", path=tmp_path / "copied").close()
    assert sorted(x.name for x in tmp_path.iterdir()) == ["copied", "saved", "table"]


def test_the_store_refuses_what_the_cache_has(tmp_path):
    store, cache, params, state, step = start("sgd")
    path, rows = tmp_path / "saved", sj.SelectedRows([1], jnp.ones((1, D)), V)
    store.save(path)
    params, state, _ = step(params, state, *make_batches(1))
    reads = [
        lambda: store.pull("items", [1]),
        lambda: store.row_sparse_pull("items", [1]),
        lambda: store.pull_all("items"),
        lambda: next(store.prefetch([[1]], np.array)),
        lambda: store.save(path),
    ]
    writes = [
        lambda: store.push("items", rows),
        lambda: store.assign("items", rows),
        lambda: store.load(path),
    ]
    flush = lambda: cache.flush(params, state)
    for calls, name, end in (reads, "flush", flush), (writes, "close", cache.close):
        for call in calls:
            with pytest.raises(RuntimeError, match=f"First call {name}"):
                call()
        end()
        for call in calls:
            call()


# ------------------------------------------------------------------ placement


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_each_optimizer_is_found(name):
    """The state that `tx` keeps for the table, in the order of the store's own."""
    store, tx = sj.store.KVStore(), OPTIMIZERS[name]()
    store.init("items", (V, 5), tx)
    cache: Any = sj.store.CachedTable(store, "items", 5)  # as many slots as columns
    params = {"a": jnp.ones(3), "items": cache.table, "z": jnp.ones((5, 5))}
    places = _staging.Places(cache.table.cache, params, sj.optim.lazy(tx).init(params))
    table = store.engine.tables["items"]
    expected = [((5, *x.shape[1:]), x.dtype) for x in table.columns]
    assert [(x.shape, x.dtype) for x in places.arrays()] == expected
    for mine, theirs in zip(places.counts(), table.rest, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.slow
def test_where_the_state_is():
    """The leaves of the table in a state of several optimizers."""
    table_tx = optax.inject_hyperparams(optax.adam)(0.1)
    store = sj.store.KVStore()
    store.init("items", (V, D), table_tx, initializer=NORMAL)
    store.engine.tables["items"].rest[0][...] = 7
    labels = {"emb": {"items": "table", "other": "table"}, "w": "dense"}
    tx = sj.optim.lazy(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.partition({"table": table_tx, "dense": optax.adam(0.2)}, labels),
        )
    )
    cache = sj.store.CachedTable(store, "items", SLOTS)
    other = jnp.ones((SLOTS, D))  # of the same shape
    params = {"emb": {"other": other, "items": cache.table}, "w": jnp.ones(D)}
    loss = lambda p, ids: jnp.sum(p["emb"]["items"][ids] * p["w"])
    step, state = store.train_step(loss, tx), tx.init(params)
    params, state, _ = step(params, state, jnp.array([1, 2]))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    counts = [int(x) for path, x in leaves if str(path[-1]) == ".count"]
    assert sorted(counts) == [1, 1, 8]
    cache.flush(params, state)
    assert int(store.engine.tables["items"].rest[0]) == 8


@pytest.mark.usefixtures("eight_devices")
def test_on_another_device():
    store, cache, params, state, step = start("sgd")
    device, batches = jax.devices()[1], list(make_batches(3))
    params = jax.device_put(params, device)
    _, params, state = run_steps(step, params, state, batches, depth=1)
    assert params["items"].array.devices() == {device}
    cache.flush(params, state)
    whole = train_whole("sgd", batches)
    assert_same_bits(store.pull_all("items"), whole[0]["items"])


def test_refused_arguments_change_nothing():
    _, cache, params, state, step = start("adam")
    assert repr(cache) == "CachedTable('items', float32[24,4])"
    (batch,) = make_batches(1)
    rows, small = params["items"], start("adam", slots=3)[1].table
    wrong = params | {"items": CachedRows(small.array, rows.cache, rows.stored)}
    accumulated = sj.optim.accumulate(LIFTED["adam"], 2, capacity=64).init(params)
    for *given, message in (
        (params, (), "store.init with the transformation"),
        (params, accumulated, "store.init with the transformation"),
        (wrong, state, r"needs an array float32\[24, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            step(*given, batch)
    step(params, state, batch)
    with pytest.raises(ValueError, match="donated to a step"):
        step(params, state, batch)
    assert cache.stats().steps == 1
