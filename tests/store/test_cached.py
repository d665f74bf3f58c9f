"""CachedTable: training has the bits of the whole table on the device."""

import shutil
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_in_place, assert_same_bits
from sparsejax.store import _in_flight, _slots, _staging


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


def new_store(tx, *, path=None, name="items", initializer=NORMAL):
    store = sj.store.KVStore()
    store.init(name, (V, D), TX[tx], initializer=initializer, key=3, path=path)
    return store


def make_batches(steps, seed=0, size=BATCH):
    """Zipf ids with duplicates, some of them out of range, and labels."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = (np.floor(V ** rng.random(size)).astype(np.int32) - 1) * 37 % V
        ids[rng.random(size) < 0.05] = rng.choice([-1, -7, V, V + 5])
        yield ids, rng.standard_normal(size).astype(np.float32)


class Model:
    """A step with a table and a dense weight, the same function for any table."""

    def __init__(self, tx):
        self.tx = sj.optim.lazy(TX[tx])
        self.step = jax.jit(self._step, donate_argnums=(0, 1))

    def params(self, array):
        return {"items": array, "w": jnp.full((D,), jnp.float32(0.5))}

    def _step(self, params, state, ids, labels):
        def loss(params):
            x = sj.lookup(params["items"], ids, mode="zero")
            return jnp.mean((jnp.tanh(x) @ params["w"] - labels) ** 2)

        tables = {"items": True, "w": False}
        value, grads = sj.value_and_grad(loss, tables=tables)(params)
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value


MODELS = {name: Model(name) for name in TX}


def train_whole(tx, batches) -> tuple[Any, Any, np.ndarray]:
    """With the whole table on the device: weights, state, losses."""
    model = MODELS[tx]
    params = model.params(jnp.asarray(new_store(tx).pull_all("items")))
    state = model.tx.init(params)
    losses = []
    for ids, labels in batches:
        params, state, loss = model.step(params, state, ids, labels)
        losses.append(loss)
    return params, state, np.array(losses)


def attached(tx, cache) -> tuple[Any, Any]:
    params = MODELS[tx].params(cache.array)
    return params, cache.attach(MODELS[tx].tx, params)


def train_cached(tx, cache, batches, params, state, *, depth=None) -> Any:
    losses = []
    if depth is not None:
        batches = cache.prefetch(batches, lambda batch: batch[0], depth=depth)
    for ids, labels in batches:
        params, state, slots = cache.prepare(ids, params, state)
        params, state, loss = MODELS[tx].step(params, state, slots, labels)
        losses.append(loss)
    return params, state, np.array(losses)


def assert_trained(store, params, state, whole):
    """After a flush, the store and the dense leaves equal the whole table."""
    table = store._tables["items"]
    expected_params, expected_state, _ = whole
    assert_same_bits(store.pull_all("items"), expected_params["items"])
    assert_same_bits(params["w"], expected_params["w"])
    followers, others = [], []
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state)):
        (others if mine.shape == theirs.shape else followers).append((mine, theirs))
    for mine, theirs in others:
        assert_same_bits(mine, theirs)
    touched = np.flatnonzero(table.touched)
    assert touched.size > SLOTS and len(followers) == len(table.by_row)
    for column, (_, theirs) in zip(table.by_row, followers):
        assert_same_bits(column[touched], np.asarray(theirs)[touched])
    counts = [x for x in jax.tree.leaves(expected_state) if not np.shape(x)]
    for mine, theirs in zip(table.rest, counts):
        assert_same_bits(mine, theirs)


def workers():
    return [t for t in threading.enumerate() if t.name.startswith(_in_flight._THREAD)]


# ------------------------------------------------------------------ equal bits


def check_equal(tx, slots, depth, steps, path=None):
    batches = list(make_batches(steps))
    store = new_store(tx, path=path)
    cache = sj.store.CachedTable(store, "items", slots)
    params, state = attached(tx, cache)
    params, state, losses = train_cached(tx, cache, batches, params, state, depth=depth)
    whole = train_whole(tx, batches)
    assert_same_bits(losses, whole[2])
    with pytest.raises(RuntimeError, match="since its last flush"):
        store.pull("items", [1])
    cache.flush(params, state)
    assert_trained(store, params, state, whole)
    stats = cache.stats()
    assert stats.steps == steps and 0 < stats.hit_rate < 1
    if slots < V - 1:
        assert stats.evictions > steps / 4 and stats.used_slots == slots
    assert stats.bytes_back <= stats.bytes_up + SLOTS * stats.bytes_up / stats.misses
    assert not workers()
    return store, cache


@pytest.mark.parametrize(
    ("tx", "slots", "depth"),
    [
        ("adam", SLOTS, 1),
        ("adam", SLOTS, None),
        ("adam", SLOTS, 3),
        pytest.param("adagrad", V - 1, 0, marks=pytest.mark.slow),
    ],
)
def test_the_bits_of_the_whole_table(tx, slots, depth):
    check_equal(tx, slots, depth, 40)


@pytest.mark.slow
@pytest.mark.parametrize(("tx", "depth"), [("adagrad", 1), ("adam", 2)])
def test_the_bits_of_the_whole_table_after_200_steps(tx, depth):
    """With hardly more slots than the distinct rows of a step."""
    check_equal(tx, BATCH + depth, depth, 200)


def test_rows_that_leave_and_come_up_again_at_once():
    """Two sets of rows alternate, read ahead, with too few slots for both."""
    store = new_store("adam")
    cache = sj.store.CachedTable(store, "items", SLOTS)
    stale = []
    hand_out = store._tables["items"].hand_out

    def seen(early):
        stale.append(int(early.is_stale.sum()))
        return hand_out(early)

    store._tables["items"].hand_out = seen
    labels = np.ones(BATCH, np.float32)
    ids = [np.arange(BATCH, dtype=np.int32) * 2 + k % 2 for k in range(12)]
    batches = [(x, labels) for x in ids]
    params, state = attached("adam", cache)
    params, state, losses = train_cached("adam", cache, batches, params, state, depth=2)
    assert sum(stale) >= 8 * (2 * BATCH - SLOTS)
    whole = train_whole("adam", batches)
    assert_same_bits(losses, whole[2])
    cache.flush(params, state)
    assert_trained(store, params, state, whole)


def test_other_ids_between_and_stopping_early():
    """Prefetching is only a hint: batches may be skipped, repeated, or left."""
    rng = np.random.default_rng(1)
    batches = list(make_batches(40))
    others = list(make_batches(40, seed=2))
    store = new_store("adam")
    cache = sj.store.CachedTable(store, "items", SLOTS)
    params, state = attached("adam", cache)
    taken, losses = [], []
    for start in (0, 25):
        part = cache.prefetch(batches[start:], lambda batch: batch[0], depth=2)
        for k, batch in enumerate(part, start):
            dice = rng.random()
            steps = [batch] * (dice > 0.1) + [others[k]] * (dice > 0.8)
            for ids, labels in rng.permutation(np.array(steps, object)):
                ids, labels = ids.astype(np.int32), labels.astype(np.float32)
                taken.append((ids, labels))
                params, state, slots = cache.prepare(ids, params, state)
                step = MODELS["adam"].step
                params, state, loss = step(params, state, slots, labels)
                losses.append(loss)
            if dice < 0.2:
                cache.flush(params, state)
                found = store.pull("items", [5, 6], capacity=2).values
                assert_same_bits(found, store.pull_all("items")[5:7])
            if k == 20:
                break
        part.close()
        assert not workers()
    whole = train_whole("adam", taken)
    assert_same_bits(np.array(losses), whole[2])
    cache.flush(params, state)
    assert_trained(store, params, state, whole)
    assert not cache._staging._announced and not store._tables["items"].in_flight


@pytest.mark.slow
def test_two_tables_of_one_optimizer():
    tx = optax.adam(0.1)
    lifted = sj.optim.lazy(optax.chain(optax.clip_by_global_norm(0.1), tx))
    chained = optax.chain(optax.clip_by_global_norm(0.1), tx)
    store = sj.store.KVStore()
    for k, name in enumerate(("user", "item")):
        store.init(name, (V, D), chained, initializer=NORMAL, key=k)

    @jax.jit
    def step(params, state, user, item):
        def loss(params):
            x = sj.lookup(params["user"]["table"], user)
            return jnp.sum(x * sj.lookup(params["item"], item) - x)

        value, grads = sj.value_and_grad(loss, tables=True)(params)
        updates, state = lifted.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    rng = np.random.default_rng(0)
    batches = [tuple(rng.integers(0, V, (2, BATCH))) for _ in range(12)]
    whole = {"user": {"table": store.pull_all("user")}, "item": store.pull_all("item")}
    whole = jax.tree.map(jnp.asarray, whole)
    expected = lifted.init(whole)
    for user, item in batches:
        whole, expected, _ = step(whole, expected, user, item)

    users = sj.store.CachedTable(store, "user", 20)
    items = sj.store.CachedTable(store, "item", 30)
    params = {"user": {"table": users.array}, "item": items.array}
    state = users.attach(lifted, params)
    state = items.attach(lifted, params, state)
    ahead = users.prefetch(batches, lambda batch: batch[0])
    ahead = items.prefetch(ahead, lambda batch: batch[1])
    for user, item in ahead:
        params, state, user = users.prepare(user, params, state)
        params, state, item = items.prepare(item, params, state)
        params, state, _ = step(params, state, user, item)
    users.flush(params, state)
    items.flush(params, state)
    assert_same_bits(store.pull_all("user"), whole["user"]["table"])
    assert_same_bits(store.pull_all("item"), whole["item"])
    count = optax.tree_utils.tree_get(state, "count")
    assert_same_bits(count, np.int32(12))
    assert [int(store._tables[n].rest[0]) for n in ("user", "item")] == [12, 12]
    assert not workers()


# ------------------------------------------------------------------ ids


def test_ids_out_of_range_and_padding():
    store = sj.store.KVStore()
    weights = np.arange(V * D, dtype=np.float32).reshape(V, D)
    store.init("items", weights, None)  # only read
    cache = sj.store.CachedTable(store, "items", 6, padding_id=3)
    params = [cache.array]
    assert cache.attach(None, params) is None
    wide = np.array([[3, 7, -1], [V, 2**40, 7]])
    params, state, slots = cache.prepare(wide, params)
    assert state is None and slots.dtype == np.int32
    assert np.asarray(slots)[[0, 0, 1], [0, 2, 0]].tolist() == [3, -1, V]
    assert slots[1, 1] == 2**31 - 1 and slots[0, 1] == slots[1, 2] != 3
    ids = np.array([0, 3, 9, 8, 11, 200], np.uint8)
    params, _, slots = cache.prepare(ids, params)
    read = sj.lookup(params[0], slots, padding_id=3)
    expected = np.where(ids[:, None] == 3, 0, weights[ids])
    assert_same_bits(read, expected)
    params, _, slots = cache.prepare(jnp.zeros((0, 2), jnp.int32), params)
    assert slots.shape == (0, 2)
    with pytest.raises(ValueError, match="6 distinct rows .* its 5 slots. .* slots=7"):
        cache.prepare(np.arange(10, 16), params)
    assert cache.is_flushed and cache.stats().written_rows == 0
    assert_same_bits(store.pull("items", [8]).values[0], weights[8])
    cache.close()
    cache.close()


def test_too_many_rows_change_nothing():
    batches = list(make_batches(6))
    store = new_store("adam")
    cache = sj.store.CachedTable(store, "items", SLOTS)
    params, state = attached("adam", cache)
    large = np.arange(SLOTS + 1), None
    mixed = [*batches[:3], large, *batches[3:]]
    losses = []
    for ids, labels in cache.prefetch(mixed, lambda batch: batch[0], depth=2):
        try:
            params, state, slots = cache.prepare(ids, params, state)
        except ValueError as error:
            assert "reads 25 distinct rows of table 'items'" in str(error)
            continue
        params, state, loss = MODELS["adam"].step(params, state, slots, labels)
        losses.append(loss)
    whole = train_whole("adam", batches)
    assert_same_bits(np.array(losses), whole[2])
    cache.flush(params, state)
    assert_same_bits(store.pull_all("items"), whole[0]["items"])


# ------------------------------------------------------------------ cost


def test_programs_are_few_and_in_place():
    array, rows = jnp.zeros((4096, 32)), jnp.zeros((64, 32))
    scatter = lambda x, slots, new: _staging._scatter([x], slots, [new])[0]
    assert_in_place(scatter, array, jnp.arange(64), rows)

    compiled: Any = _staging._gather, _staging._scatter
    programs = lambda: sum(f._cache_size() for f in compiled)
    before = programs()
    store = new_store("sgd")
    cache = sj.store.CachedTable(store, "items", 100)
    params, state = attached("sgd", cache)
    rng = np.random.default_rng(0)
    for size in rng.integers(1, 100, 60):
        ids = rng.integers(0, V, size)
        params, state, _ = cache.prepare(ids, params, state)
    assert programs() - before <= 2 * 5  # capacities 8, 16, ..., 128


def test_rows_are_read_while_the_step_runs():
    store = new_store("sgd")
    cache = sj.store.CachedTable(store, "items", SLOTS)
    params, state = attached("sgd", cache)
    batches = [np.arange(k, k + 8) for k in range(0, 40, 4)]
    for k, ids in enumerate(cache.prefetch(batches, lambda ids: ids)):
        params, state, _ = cache.prepare(ids, params, state)
        ahead: Any = list(cache._staging._announced)
        assert len(ahead) == (k < 9)
        for entry in ahead:  # the next prepare reads nothing
            entry.done.result()
            assert entry.staged.columns and cache._staging._is_current(entry.staged)
        store.stats()
        assert not cache._staging._to_write  # the rows that left are on the host
    assert not workers()


def test_batches_that_are_skipped_are_forgotten():
    store = new_store("sgd")
    cache = sj.store.CachedTable(store, "items", SLOTS)
    params, state = attached("sgd", cache)
    batches = [np.arange(k, k + 8) for k in range(40)]
    for k, ids in enumerate(cache.prefetch(batches, lambda ids: ids, depth=2)):
        store.stats()
        assert len(cache._staging._announced) <= 3
        assert len(store._tables["items"].in_flight) <= 3
        if k % 7 == 0:
            params, state, slots = cache.prepare(ids, params, state)
            assert slots.shape == ids.shape


# ------------------------------------------------------------------ slots


@pytest.mark.parametrize("takes_back", [False, True])
@pytest.mark.parametrize(
    "height, count, most", [(V, SLOTS, SLOTS), (2000, 300, 9), (400, 300, 60)]
)
def test_the_least_recently_used_rows_leave(height, count, most, takes_back):
    """Any of the rows that were used at the same time may leave."""
    rng = np.random.default_rng(0)
    slots = _slots.Slots(height, count, unused=5)
    used_at = {}
    for now in range(80 if count == SLOTS else 400):
        size = rng.integers(1, most)
        rows = np.unique(np.floor(height ** rng.random(size)).astype(np.int64) - 1)
        before = set(slots.row_of[slots.row_of >= 0])
        if takes_back:
            plans = [slots.plan(rng.choice(height, 9, False)) for _ in range(2)]
            for plan in reversed(plans):
                slots.undo(plan)
            assert set(slots.row_of[slots.row_of >= 0]) == before
        plan = slots.plan(np.sort(rows))
        ids = np.array([-1, height, *rows])
        places = slots.translate(ids)
        assert places[:2].tolist() == [-1, height] and 5 not in places
        assert (slots.row_of[places[2:]] == rows).all()
        left = set(plan.leaving[plan.leaving >= 0])
        after = set(slots.row_of[slots.row_of >= 0])
        assert after == (before - left) | set(rows) and len(after) <= count - 1
        assert not left & set(rows)
        assert not left or len(after) == count - 1
        stayed = before - left - set(rows)
        last, used_at = used_at, used_at | dict.fromkeys(rows.tolist(), now)
        # An undone plan counts as a use, so that then another row may leave.
        if left and stayed and not takes_back:
            assert max(last[x] for x in left) <= min(last[x] for x in stayed)
    assert slots.used == count - 1


# ------------------------------------------------------------------ files


def test_a_copy_is_what_was_flushed(tmp_path):
    """A copy of table and journal equals the files that a kill leaves."""
    batches = list(make_batches(30))
    store = new_store("adam", path=tmp_path / "table")
    cache = sj.store.CachedTable(store, "items", SLOTS)
    params, state = attached("adam", cache)
    params, state, _ = train_cached("adam", cache, batches[:10], params, state)
    assert cache.step is None
    cache.flush(params, state, step=10)
    assert not (tmp_path / "table.journal").exists()
    weights = store.pull_all("items")
    params, state, _ = train_cached("adam", cache, batches[10:20], params, state)
    for name in ("table", "table.journal"):
        shutil.copy(tmp_path / name, tmp_path / f"copied{name[5:]}")
    assert cache.stats().written_rows > 40
    params, state, losses = train_cached("adam", cache, batches[20:], params, state)
    cache.flush(params, state)
    whole = train_whole("adam", batches)
    assert_trained(store, params, state, whole)
    assert cache.step is None  # of this flush
    cache.close()
    store.close()
    assert not (tmp_path / "table.journal").exists()

    saved = (tmp_path / "copied").read_bytes(), (tmp_path / "copied.journal")
    changed, journal = saved[0], saved[1].read_bytes()
    start = int(np.frombuffer(changed, np.uint8).size)
    assert start and journal.startswith(b"sparsejax journal")
    for damaged in (
        journal[:-300] + bytes([journal[-300] ^ 1]) + journal[-299:],
        journal[:40],
        b"",
        journal.replace(b'"id": "', b'"id": "0'),
    ):
        saved[1].write_bytes(damaged)
        with pytest.raises(ValueError, match="KVStore.init: .*journal"):
            new_store("adam", path=tmp_path / "copied")
        assert (tmp_path / "copied").read_bytes() == changed
    saved[1].unlink()
    with pytest.raises(ValueError, match="its journal .*copied.journal"):
        new_store("adam", path=tmp_path / "copied")
    # The kill may cut an entry short: its rows were not written.
    saved[1].write_bytes(journal + journal[-500:-499] * 0 + b"\1" * 9)
    store = new_store("adam", path=tmp_path / "copied")
    assert not saved[1].exists()
    assert_same_bits(store.pull_all("items"), weights)
    assert int(store._tables["items"].rest[0]) == 10

    # Training continues from there.
    cache = sj.store.CachedTable(store, "items", SLOTS)
    params, state = attached("adam", cache)
    assert_same_bits(state[0].count, np.int32(10))
    assert cache.step == 10
    whole = train_whole("adam", batches[:10])
    params["w"] = whole[0]["w"]
    mu, nu = state[0].mu | {"w": whole[1][0].mu["w"]}, state[0].nu
    state = (state[0]._replace(mu=mu, nu=nu | {"w": whole[1][0].nu["w"]}), *state[1:])
    params, state, found = train_cached("adam", cache, batches[10:], params, state)
    assert_same_bits(found[10:], losses)
    cache.close(discard=True)
    assert_same_bits(store.pull_all("items"), weights)
    store.close()
    (tmp_path / "copied.journal").write_bytes(journal[:10])  # begun by a flush's kill
    new_store("adam", path=tmp_path / "copied").close()
    assert sorted(x.name for x in tmp_path.iterdir()) == ["copied", "table"]


def test_the_store_refuses_what_the_cache_has(tmp_path):
    store = new_store("sgd")
    store.save(tmp_path / "saved")
    cache = sj.store.CachedTable(store, "items", SLOTS)
    params, state = attached("sgd", cache)
    store.save(tmp_path / "saved")
    params, state, _ = cache.prepare([1, 2], params, state)
    rows = sj.SelectedRows([1], jnp.ones((1, D)), V)
    reads = [
        lambda: store.pull("items", [1]),
        lambda: store.row_sparse_pull("items", [1]),
        lambda: store.pull_all("items"),
        lambda: next(store.prefetch([[1]], np.array)),
        lambda: store.save(tmp_path / "saved"),
    ]
    writes = [
        lambda: store.push("items", rows),
        lambda: store.assign("items", rows),
        lambda: store.load(tmp_path / "saved"),
    ]
    for read in reads:
        with pytest.raises(RuntimeError, match="First call flush"):
            read()
    with pytest.raises(RuntimeError, match="flush.* first, or pass discard=True"):
        cache.close()
    cache.flush(params, state)
    for read in reads:
        read()
    for write in writes:
        with pytest.raises(RuntimeError, match="First call close"):
            write()
    with pytest.raises(RuntimeError, match="has a CachedTable already"):
        sj.store.CachedTable(store, "items", 3)
    cache.close()
    for write in writes:
        write()


def test_saved_and_loaded(tmp_path):
    batches = list(make_batches(20))
    store = new_store("adam")
    cache = sj.store.CachedTable(store, "items", SLOTS)
    params, state = attached("adam", cache)
    params, state, _ = train_cached("adam", cache, batches[:10], params, state)
    cache.flush(params, state, step=7)
    store.save(tmp_path / "saved")
    params, state, losses = train_cached("adam", cache, batches[10:], params, state)
    with pytest.raises(RuntimeError, match="First call close"):
        store.load(tmp_path / "saved")
    assert_same_bits(losses, train_whole("adam", batches)[2][10:])

    resumed = new_store("adam")
    resumed.load(tmp_path / "saved")
    again = sj.store.CachedTable(resumed, "items", SLOTS)
    assert again.step == 7
    params, state = attached("adam", again)
    whole = train_whole("adam", batches[:10])
    params["w"] = whole[0]["w"]
    dense = lambda mine, theirs: theirs if theirs.shape == (D,) else mine
    state = jax.tree.map(dense, state, whole[1])
    _, _, found = train_cached("adam", again, batches[10:], params, state)
    assert_same_bits(found, losses)


# ------------------------------------------------------------------ placement


@pytest.mark.slow
def test_where_the_state_is():
    """`attach` finds the leaves of the table in a state of several optimizers."""
    table_tx = optax.inject_hyperparams(optax.adam)(0.1)
    store = sj.store.KVStore()
    store.init("items", (V, D), table_tx, initializer=NORMAL)
    store._tables["items"].rest[0][...] = 7
    labels = {"emb": {"items": "table", "other": "table"}, "w": "dense"}
    tx = sj.optim.lazy(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.partition({"table": table_tx, "dense": optax.adam(0.2)}, labels),
        )
    )
    cache = sj.store.CachedTable(store, "items", SLOTS)
    other = jnp.ones((SLOTS, D))  # of the same shape
    params = {"emb": {"other": other, "items": cache.array}, "w": jnp.ones(D)}
    state = cache.attach(tx, params)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    places: Any = cache._places
    assert [paths[k].split(".")[-1] for k in places.by_row] == [
        "mu['emb']['items']",
        "nu['emb']['items']",
    ]
    assert all("'table'" in paths[k] for k in places.rest)
    counts = [int(x) for path, x in leaves if str(path[-1]) == ".count"]
    assert sorted(counts) == [0, 0, 7] and len(places.rest) == len(
        store._tables["items"].rest
    )


@pytest.mark.usefixtures("eight_devices")
def test_on_another_device():
    store = new_store("sgd")
    cache = sj.store.CachedTable(store, "items", SLOTS)
    params, state = attached("sgd", cache)
    device = jax.devices()[1]
    params = jax.device_put(params, device)
    for ids in cache.prefetch([[1, 2], [3], [4, 5]], lambda ids: ids):
        params, state, slots = cache.prepare(ids, params, state)
        assert params["items"].devices() == {device}
    cache.flush(params, state)
    read = sj.lookup(params["items"], slots)
    assert_same_bits(read, store.pull_all("items")[4:6])


def test_what_is_refused():
    store = new_store("adam")
    cache = sj.store.CachedTable(store, "items", SLOTS)
    assert repr(cache) == "CachedTable('items', float32[24,4])"
    model = MODELS["adam"]
    params = model.params(cache.array)
    with pytest.raises(RuntimeError, match=r"prepare: .* Call attach\(tx, params\)"):
        cache.prepare([1], params, ())
    for wrong, how in (
        ({"a": jnp.ones((SLOTS, D))}, "nowhere"),
        ([cache.array] * 2, ""),
    ):
        with pytest.raises(ValueError, match=f"attach: params have .*{how}"):
            cache.attach(model.tx, wrong)
    with pytest.raises(ValueError, match="tx is None"):
        cache.attach(None, params)
    with pytest.raises(ValueError, match=r"store.init with the transformation that tx"):
        cache.attach(MODELS["adagrad"].tx, params)
    with pytest.raises(ValueError, match="does not have the structure of tx.init"):
        cache.attach(model.tx, params, ())
    state = cache.attach(model.tx, params)
    with pytest.raises(RuntimeError, match="Take it from there"):
        _ = cache.array
    for bad, error, match in (
        ([1.5], TypeError, "ids must be integers"),
        (np.arange(SLOTS + 1), ValueError, "25 distinct rows"),
    ):
        with pytest.raises(error, match=match):
            cache.prepare(bad, params, state)
    with pytest.raises(ValueError, match="opt_state must have the structure"):
        cache.prepare([1], params, ())
    with pytest.raises(ValueError, match=r"needs an array float32\[24, 4\]"):
        cache.prepare([1], params | {"items": jnp.ones((3, D))}, state)
    with pytest.raises(TypeError, match="traced by jit, vmap, grad or scan"):
        jax.jit(lambda ids: cache.prepare(ids, params, state))(jnp.array([1]))
    new, _, _ = cache.prepare([1], params, state)
    with pytest.raises(ValueError, match="donated to a step"):
        cache.prepare([2], params, state)
    assert cache.stats().steps == 1 and not new["items"].is_deleted()
    make: Any = sj.store.CachedTable
    for arguments, error, match in (
        ((3, "items", 5), TypeError, "store must be a sparsejax.store.KVStore"),
        ((store, "users", 5), KeyError, "no table 'users'"),
        ((store, "items", 0), ValueError, "slots must be a positive int"),
        ((store, "items", V + 1), ValueError, "slots=212 are more than"),
    ):
        with pytest.raises(error, match=match):
            make(*arguments)
    with pytest.raises(TypeError, match="ids_of must be a function"):
        cache.prefetch([], 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="depth must be"):
        cache.prefetch([], np.array, depth=-1)
    with pytest.raises(ZeroDivisionError):
        next(cache.prefetch([1], lambda batch: batch // 0))
    assert not workers()
