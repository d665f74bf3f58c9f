"""Tables of a store whose rows belong to keys: KVStore.insert, find and items."""

import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import index_model
import sparsejax as sj
from helpers import assert_same_bits
from oracle import run_steps, train_in_memory
from sparsejax.store._keys import KeyMap
from test_store_files import rewrite


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D = 24, 2
ONES = jax.nn.initializers.ones
SGD, ADAGRAD = optax.sgd(1.0), sj.optim.adagrad(0.1)
SPREAD = np.uint64(0x9E3779B97F4A7C15)


def store_of(height=V, tx=None, path=None, initializer=ONES, **policy):
    store = sj.store.KVStore()
    keys = sj.store.KeyPolicy(**policy)
    shape = (height, D)
    store.init("t", shape, tx, path=path, initializer=initializer, keys=keys)
    return store


def index_of(store) -> Any:
    return store.engine.tables["t"].keys


def insert(store, keys, step, **options):
    rows, evicted = store.insert("t", np.asarray(keys), step, **options)
    return rows.tolist(), evicted.tolist()


# ------------------------------------------------------------------ against a dict


def test_key_map_is_a_dict():
    """Adds and removals, with the hash table growing and full of removed slots."""
    rng = np.random.default_rng(0)
    column = np.zeros((20_000,), np.int64)
    mapped, model, free = KeyMap(column), {}, list(range(20_000))
    for turn in range(200):
        keys = np.unique(rng.integers(-(2**63), 2**63, 300, np.int64))
        rows = np.array([free.pop() for _ in keys])
        column[rows] = keys
        mapped.add(keys, rows)
        model |= dict(zip(keys.tolist(), rows.tolist()))
        gone = rng.permutation(list(model))[: 280 if turn % 3 else 150]
        mapped.remove(gone)
        free += [model.pop(key) for key in gone.tolist()]
        if turn % 20 == 0:
            some = np.concatenate([list(model), gone, keys]).astype(np.int64)
            expected = [model.get(key, -1) for key in some.tolist()]
            assert mapped.find(some).tolist() == expected
    assert len(mapped) == len(model)
    assert mapped._slots.size == 1 << 16  # for these 12,700, not all that ever were


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("most, admit_after", [(None, 1), (5, 2)])
def test_is_the_index_model(policy, most, admit_after):
    """The keys follow tests/tools/index_model.py over drifting Zipf keys."""
    height, rng = 200, np.random.default_rng(7)
    options = dict(policy=policy, max_evictions=most, admit_after=admit_after)
    store = store_of(height, **options)
    model = index_model.Model(height, **options)
    keys: list[int] = []
    for step in range(100):
        spread = (rng.zipf(1.2, 64) % 300 + 3 * step).astype(np.uint64) * SPREAD
        keys = spread.view(np.int64).tolist()
        rows, evicted = model.insert(keys, step)
        rows = [rows[k : k + 8] for k in range(0, 64, 8)]
        assert insert(store, np.reshape(keys, (8, 8)), step) == (rows, evicted)
    found, rows = store.items("t")
    assert dict(zip(found.tolist(), rows.tolist())) == model.rows
    others = np.array([*keys, 12345])
    expected = [model.rows.get(key, height) for key in others.tolist()]
    assert store.find("t", others).tolist() == expected
    stats = store.stats()["t"]
    assert (stats.keys, stats.evicted_keys) == (len(model.rows), model.evicted)
    assert (stats.refused_keys, stats.waiting_keys) == (model.refused, model.waiting)


def test_more_keys_in_a_call_than_are_kept():
    """Two generations of 1,024 keys are still known when 3,000 have waited."""
    store = store_of(8, admit_after=2)
    insert(store, np.arange(3000), 0)
    rows, _ = insert(store, [0, 1023, 1024, 2047, 2048, 2999], 1)
    assert rows == [8, 8, 0, 1, 2, 3]


# ------------------------------------------------------------------ types of keys


def test_kinds_of_keys():
    """Integers and text stay different, in arrays of objects as of data frames too."""
    store = store_of()
    find = lambda keys: store.find("t", keys).tolist()
    for mixed in ["a", 3], [[3, 4], ["a", "b"]], ["a", None]:  # NumPy makes strings
        for keys in (mixed, np.array(mixed, dtype=object)):
            for use in (lambda keys: store.insert("t", keys, 0), find):
                with pytest.raises(TypeError, match="all integers or all strings"):
                    use(keys)
    wide = np.array([[1 << 60, -1], [5, 1 << 60]])
    assert insert(store, wide, 0)[0] == [[1, 2], [0, 1]]  # ascending as unsigned
    assert find(wide.astype(np.uint64)) == [[1, 2], [0, 1]]
    assert find(np.array([5, 6], np.int8)) == [0, V]
    assert find(np.array([[5, 1 << 60]], object)) == [[0, 1]]
    words = np.array([["ann", "J\u00f6rg"], ["", "ann"]])
    rows, _ = store.insert("t", words, 1)
    assert rows[0, 0] == rows[1, 1] and len({*rows.flat}) == 3
    assert find([b"ann", "J\u00f6rg"]) == rows[0].tolist()
    assert find(np.array(["ann"], object)) == [find("ann")]
    assert insert(store, [], 2) == insert(store, np.array([], "U3"), 2) == ([], [])
    assert find(["ann\0", b"\0"]) == [V, V]  # other words
    mask = np.array([True, False, True])
    assert insert(store, [5, 77, 78], 2, where=mask)[0] == [0, V, 6]
    assert find([77]) == [V]
    rows, _ = store.insert("t", np.array(["b", b"a", "a"], object), 3)
    assert rows[1] == rows[2] != rows[0] and store.stats()["t"].keys == 9


@pytest.mark.parametrize("first", [2**31 - 1, 1_764_000_000_000, 2**63 - 3])
def test_steps_of_any_size(first):
    store = store_of(2, SGD)
    for key, more in (7, 0), (9, 1), (7, 2), (4, 2):
        _, evicted = insert(store, [key], first + more)
    assert evicted == [1] and index_of(store).last_step.tolist() == [first + 2] * 2


def test_a_row_that_was_used_without_a_key_starts_anew():
    store = store_of(8, SGD)
    grad: Any = sj.SelectedRows([0, 5], np.ones((2, D), np.float32), 8)
    store.push("t", grad)
    assert insert(store, np.arange(8), 0)[0] == list(range(8))
    assert (store.pull_all("t") == 1).all()
    store.push("t", grad)
    assert insert(store, [8], 1) == ([0], [0])  # and one whose key was evicted
    pulled = store.pull("t", [8, 0], mode="drop", capacity=2)
    read = sj.lookup(pulled, jnp.array([8, 0]), mode="zero")
    assert_same_bits(read, np.array([[0, 0], [1, 1]], np.float32))


def test_a_table_grows_as_keys_come():
    store = store_of(10**8)
    insert(store, np.arange(1000) * 10**12, 0)
    store.pull("t", np.arange(1000))
    stats = store.stats()["t"]
    assert (stats.keys, stats.touched_rows, stats.evicted_keys) == (1000, 1000, 0)


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("mapped", [True, False])
def test_restored_it_goes_on_as_before(tmp_path, mapped):
    """Saved and loaded, or its mapped file opened again."""

    def make(k):
        path = tmp_path / f"table{k}" if mapped else None
        # Rows are searched among the next 6, so the place of the search matters.
        return store_of(20, ADAGRAD, path, admit_after=2, window=6)

    def train(store, steps):
        for k in steps:
            keys = np.random.default_rng(k).zipf(1.3, 12) % 40 * 10**12
            rows, _ = store.insert("t", keys, k)
            pulled = store.pull("t", rows, mode="drop", capacity=16)
            store.push("t", pulled.map(lambda x, k=k: x + k))

    through, stopped = make(0), make(1)
    for store in (through, stopped):
        train(store, range(15))
        for step in (13, 14):
            insert(store, [-3], step)  # a key whose row was never pulled
    if mapped:
        stopped.close()
        again = make(1)
    else:
        stopped.save(tmp_path / "saved")
        again = make(1)
        for _ in range(3):
            insert(again, [1, 2, 3, 10**12], 0)  # forgotten by load
        again.load(tmp_path / "saved")
    for store in (through, again):
        train(store, range(15, 30))
    for x, y in zip(through.items("t"), again.items("t")):
        np.testing.assert_array_equal(x, y)
    assert_same_bits(through.pull_all("t"), again.pull_all("t"))
    assert again.stats()["t"].evicted_keys > 0
    for store in (through, again):
        store.close()


def test_damaged_saves_of_keys_are_refused(tmp_path):
    store, path = store_of(8), tmp_path / "saved"
    for message, change, arrays in (
        (
            "it has no sightings of keys",
            lambda header: header["tables"]["t"].pop("sightings"),
            {},
        ),
        ("a key has several rows", lambda header: None, {"keys.0": np.array([4, 4])}),
    ):
        insert(store, [4, 2], 0)
        store.save(path)
        rewrite(path, change, **arrays)
        with pytest.raises(ValueError, match=f"of table 't', {message}"):
            store.load(path)
        assert store.find("t", [4, 2]).tolist() == [1, 0]


def test_after_a_kill_a_row_without_a_key_is_free(tmp_path):
    """The count of a row is cleared first and written last, see `TableKeys`."""
    store = store_of(8, path=tmp_path / "t")
    insert(store, np.arange(6), 0)
    store.assign("t", sj.SelectedRows(np.arange(6), np.full((6, D), 5.0), 8))
    index_of(store).counts[[1, 4]] = 0
    store.close()
    store = store_of(8, path=tmp_path / "t")
    assert store.find("t", np.arange(6)).tolist() == [0, 8, 2, 3, 8, 5]
    assert insert(store, [11, 12, 13, 14, 15], 1)[0] == [1, 4, 6, 7, 0]
    assert insert(store, [11, 12, 13, 14, 15], 1)[1] == []
    weights = store.pull_all("t")[:, 0].tolist()
    assert weights == [1, 1, 5, 5, 1, 5, 1, 1]  # rows with a new key are fresh
    store.close()


# ------------------------------------------------------------------ beside other things


@pytest.mark.parametrize("depth", [0, 3])
def test_prefetch_evicts_no_key_in_flight(depth):
    """The weight of a key counts its pushes since it got its row."""
    store = store_of(16, SGD)
    rng = np.random.default_rng(3)
    batches = [(k, np.unique(rng.zipf(1.4, 4) % 30 + k // 4)) for k in range(60)]
    weights: dict[int, int] = {}
    given = []

    def ids_of(batch):
        step, keys = batch
        before = dict(zip(*(x.tolist() for x in store.items("t"))))
        rows, evicted = store.insert("t", keys, step)
        owners = {row: key for key, row in before.items()}
        given.append([owners[row] for row in evicted.tolist()])
        return rows

    pairs = store.prefetch(batches, ids_of, depth=depth, capacity=8, mode="drop")
    for (step, keys), pulled in pairs:
        for key in given[step]:
            del weights[key]
        for key in keys[store.find("t", keys) < 16].tolist():
            weights[key] = weights.get(key, 1) + 1
        store.push("t", pulled.map(lambda x: 0 * x - 1))
    keys, rows = store.items("t")
    assert dict(zip(keys.tolist(), store.pull_all("t")[rows, 0].tolist())) == weights
    assert store.stats()["t"].evicted_keys > 20


@pytest.mark.parametrize("depth", [None, 1])
def test_a_cached_table_trains_the_rows_of_keys(tmp_path, depth):
    """With the bits of the whole table on the device; its keys are saved."""
    make = lambda: store_of(tx=ADAGRAD, path=tmp_path / "t", admit_after=2)
    store, tx, batches = make(), sj.optim.lazy(ADAGRAD), []
    whole: Any = {"t": jnp.asarray(store.pull_all("t"))}
    cache = sj.store.CachedTable(store, "t", 8)
    params: Any = {"t": cache.table}
    loss = lambda p, rows: jnp.sum((sj.lookup(p["t"], rows, mode="zero") - 1.5) ** 2)

    def batches_of_rows():
        for number in range(12):
            keys = np.random.default_rng(number).zipf(1.4, 6) % 20
            batches.append(store.insert("t", keys, number)[0])
            yield batches[-1]

    step, state = store.train_step(loss, tx), tx.init(params)
    _, params, state = run_steps(step, params, state, batches_of_rows(), depth)
    cache.flush(params, state)
    _, whole, _ = train_in_memory(loss, whole, ADAGRAD, batches)
    trained, (keys, rows) = store.pull_all("t"), store.items("t")
    np.testing.assert_allclose(trained, whole["t"], rtol=1e-5)
    assert 8 < len(keys) < V and (trained[rows] != 1).any()
    store.close()
    with make() as store:
        assert store.items("t")[0].tolist() == keys.tolist()
        assert_same_bits(store.pull_all("t"), trained)


def test_keys_that_came_since_a_flush_have_fresh_rows(tmp_path):
    """A copy of the files equals the files that a killed process leaves."""
    store = store_of(tx=optax.sgd(0.1), path=tmp_path / "t")
    cache = sj.store.CachedTable(store, "t", 4)
    tx = sj.optim.lazy(optax.sgd(0.1))
    table: Any = cache.table
    state = tx.init(table)
    train = store.train_step(lambda p, rows: -10 * p[rows].sum(), tx)
    batches = [[1, 2, 3], [4, 5, 6], [1, 7, 8], [9, 2, 7], [1, 3, 8], [7, 8, 9]]
    for step, keys in enumerate(batches):
        if step == 2:
            cache.flush(table, state, step=step)
        rows, _ = store.insert("t", np.array(keys), step)
        table, state, _ = train(table, state, rows)
    shutil.copytree(tmp_path, tmp_path / "killed")
    opened = store_of(tx=optax.sgd(0.1), path=tmp_path / "killed" / "t")
    keys, rows = opened.items("t")
    weights = dict(zip(keys.tolist(), opened.pull_all("t")[rows, 0].tolist()))
    assert weights == dict.fromkeys(range(1, 7), 2) | dict.fromkeys(range(7, 10), 1)
    opened.close()
    store.close()


def test_a_cached_table_may_get_keys_but_lose_none():
    store = store_of(3, SGD)
    sj.store.CachedTable(store, "t", 3)
    insert(store, [1, 2, 3], 0)
    with pytest.raises(RuntimeError, match="in a CachedTable cannot change hands"):
        store.insert("t", np.array([3, 4]), 1)
    assert store.items("t")[0].tolist() == [1, 2, 3]
    assert index_of(store).last_step.tolist() == [0, 0, 0]
