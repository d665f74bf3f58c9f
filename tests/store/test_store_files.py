"""Stores in files: saved whole or not at all, and tables mapped into memory."""

import concurrent.futures
import errno
import fcntl
import io
import json
import multiprocessing
import pathlib
import shutil
import threading
import time
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_same_bits, make_rows
from sparsejax import _files
from sparsejax.store import _mapped, _records


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D = 300, 4
# One object for all stores, so that its programs are compiled once.
TX, NARROW_TX = optax.adam(0.1), sj.optim.rowwise_adagrad(0.1)
NORMAL = jax.nn.initializers.normal(0.1)
ARRAY = np.random.default_rng(0).standard_normal((V, D)).astype(np.float32)


def one_table(tx: Any = TX, shape: Any = (V, D), initializer: Any = NORMAL, **options):
    store = sj.store.KVStore()
    store.init("t", shape, tx, initializer=initializer, **options)
    return store


def new_store(tx: Any = TX, given_tx: Any = None, seed=1, path=None):
    store = one_table(tx, key=seed, path=path)
    store.init("given", ARRAY, given_tx)
    store.init("narrow", (V,), tx and NARROW_TX, dtype=jnp.bfloat16)
    return store


def steps(seeds, *stores):
    """Pushes to each table with an optimizer."""
    for store in stores:
        for seed in seeds:
            ids = np.random.default_rng(seed).integers(0, V, 8)
            for name in filter(store.is_trainable, store.names()):
                spec = store.spec(name)
                rows, _ = make_rows(ids, V, spec.shape[1:], spec.dtype, seed=seed)
                store.push(name, rows)


def same_weights(store, other):
    for name in store.names():
        assert_same_bits(store.pull_all(name), other.pull_all(name))


def same(store, other):
    """Weights, optimizer states, and which rows were touched."""
    same_weights(store, other)
    for name in store.names():
        mine, theirs = store.engine.tables[name], other.engine.tables[name]
        for a, b in zip([*mine.by_row, *mine.rest], [*theirs.by_row, *theirs.rest]):
            assert_same_bits(a, b)
        assert_same_bits(mine.touched, theirs.touched)


def rewrite(path, change=lambda header: None, **arrays):
    """Changes the header of a record or arrays of its first table, as a program may."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(members["header.json"])
    change(header)
    members["header.json"] = json.dumps(header).encode()
    for name, array in arrays.items():
        file = io.BytesIO()
        np.save(file, array)
        members[f"0.{name}.npy"] = file.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        for member in members.items():
            archive.writestr(*member)


def files(directory):
    return sorted(path.name for path in pathlib.Path(directory).iterdir())


# ------------------------------------------------------------------ save and load


def test_loaded_is_saved_and_goes_on_alike(tmp_path):
    """With a tree in the same file; its tables of the store are not saved again."""
    store, other, path = new_store(), new_store(seed=2), tmp_path / "file"
    steps(range(2), store)
    steps(range(10, 13), other)  # is forgotten, and the seed comes with the file
    devices = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    tree = {
        "table": store["t"],
        "key": jax.random.key(3),
        "half": jnp.arange(3, dtype=jnp.bfloat16),
        "there": jax.device_put(np.ones((2, 2)), devices),
        "numpy": (np.arange(4), np.float32(7), np.zeros((0, 2)), None),
        "plain": [7, 0.5, True, "w\u00f6rd"],
    }
    seen = []
    store.save(path, tree, progress=lambda *done: seen.append(done))
    assert seen[-1][0] == seen[-1][1] and files(tmp_path) == ["file"]
    plain, key = tree.pop("plain"), tree.pop("key")
    empty: Any = jax.tree.map(lambda x: x * 0, tree)
    empty |= {"key": jax.random.key(9), "plain": [0, 0.0, False, ""]}
    loaded = other.load(path, empty)
    for seed in (3, 4):
        same(other, store)
        steps([seed], store, other)
    assert loaded["table"] == store["t"] and loaded["plain"] == plain
    assert_same_bits(*map(jax.random.key_data, (loaded["key"], key)))
    for name in "half", "there", "numpy":
        jax.tree.map(assert_same_bits, loaded[name], tree[name])
    assert type(loaded["numpy"][1]) is np.float32
    assert loaded["there"].sharding == devices and not loaded["half"].committed
    # A tree that is not asked for, and one that is not there.
    assert other.load(path) is None
    store.save(path)
    with pytest.raises(ValueError, match="no leaves"):
        other.load(path, {"step": 0})


def test_only_rows_touched_are_saved(tmp_path):
    store = one_table(optax.adagrad(0.1), (1_000_000, 8))
    store.pull("t", np.arange(0, 1_000_000, 10_000))
    store.save(tmp_path / "store")
    size = (tmp_path / "store").stat().st_size
    assert 100 * (8 + 64) < size < 100 * (8 + 64) + 4000


def test_an_error_while_a_file_is_written_leaves_the_old_one(tmp_path, monkeypatch):
    store, path = new_store(), tmp_path / "store"
    steps(range(2), store)

    def fail(*_):
        raise OSError("no space left")

    for write in store.save, lambda path: store.export_changes(path, since=0):
        write(path)
        before = path.read_bytes()
        steps(range(2, 4), store)
        with monkeypatch.context() as patch:
            patch.setattr(_files.Writer, "array", fail)
            with pytest.raises(OSError, match="no space left"):
                write(path)
        assert path.read_bytes() == before and files(tmp_path) == ["store"]
        with pytest.raises(FileNotFoundError):
            write(tmp_path / "missing" / "store")


def test_saving_over_a_mapped_table_is_refused(tmp_path):
    """Also if it is made while the store is saved."""
    paths = [tmp_path / "table", tmp_path / "other", tmp_path / "late"]
    (tmp_path / "link").symlink_to(paths[0])
    refused = pytest.raises(ValueError, match="the file of a memory-mapped table")
    made = []

    def progress(done, total):
        if not made:
            made.append(one_table(path=paths[2]))

    with one_table(path=paths[0]) as store, one_table(path=paths[1]):
        steps(range(2), store)
        for file in (*paths[:2], tmp_path / "link"):
            content = file.read_bytes()
            with refused:
                store.save(file)
            assert file.read_bytes() == content
        with refused:
            store.save(paths[2], progress=progress)
    with made[0] as late:
        steps([3], late)
        late.flush()  # its file is in its place
    assert files(tmp_path) == ["late", "link", "other", "table"]


@pytest.mark.slow
def test_a_load_that_is_stopped(tmp_path):
    """While the file is checked nothing changes; later on the tables are marked."""
    store, path, table = new_store(), tmp_path / "store", tmp_path / "table"
    new_store().save(tmp_path / "empty")
    steps(range(4), store)
    store.save(path)
    seen = []
    store.load(path, progress=lambda *done: seen.append(done))
    half = seen[-1][0] // 2
    assert seen[-1][1] == 2 * half == 2 * seen[len(seen) // 2 - 1][0]

    def load_until(other, count):
        def progress(done, total):
            if done >= count:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            other.load(path, progress=progress)

    with new_store(path=table) as other, new_store() as start:
        steps(range(10, 13), other, start)
        load_until(other, 1)
        same(other, start)
        load_until(other, half + 1)
        for use in (
            lambda: other.pull("narrow", [1]),
            lambda: other.pull_all("given"),
            lambda: steps([1], other),
            lambda: other.save(tmp_path / "no"),
        ):
            with pytest.raises(RuntimeError, match="is half loaded.*Call load again"):
                use()
    with pytest.raises(ValueError, match="init: .*table is half loaded.*Delete"):
        new_store(path=table)
    table.unlink()
    # Loaded once more, in the same store, nothing is left of the first try.
    with new_store(path=table) as other, new_store() as empty:
        load_until(other, half + 1)
        other.load(tmp_path / "empty")
        same(other, empty)
    new_store(path=table).close()  # the mark is gone


# ------------------------------------------------------------------ mapped tables


@pytest.mark.parametrize("given", [True, False])
def test_a_mapped_table_outlives_its_store(tmp_path, given):
    weights, initializer = (ARRAY, None) if given else ((V, D), NORMAL)
    reopen = lambda name: one_table(TX, (V, D), initializer, path=tmp_path / name)
    kept, path = one_table(TX, weights, initializer), tmp_path / "table"
    with one_table(TX, weights, initializer, path=path) as store:
        steps(range(3), store, kept)
        assert store.stats()["t"].path == str(path)
        store.flush()
        store.save(tmp_path / "saved")
    with reopen("table") as store:
        same(store, kept)
        steps([9], store)
        store.load(tmp_path / "saved")
        steps([3], store, kept)
        same(store, kept)
        store.load(tmp_path / "saved")
        expected = store.pull_all("t")
    with reopen("other") as store:  # weights that were not given here, and then were
        store.load(tmp_path / "saved")
    with reopen("other") as store:
        assert_same_bits(store.pull_all("t"), expected)
        store.save(tmp_path / "again")
        store.assign("t", ARRAY)
        store.load(tmp_path / "again")
        assert_same_bits(store.pull_all("t"), expected)
    assert files(tmp_path) == ["again", "other", "saved", "table"]


def test_of_stores_that_create_a_file_one_has_it(tmp_path, monkeypatch):
    """None of them finds a file before it makes its own."""
    path, together, link = tmp_path / "table", threading.Barrier(4), _mapped.os.link

    def link_together(*args):
        together.wait(60)
        link(*args)

    def create(k):
        try:
            store = one_table(path=path)
        except RuntimeError as error:
            assert "is in use by another store" in str(error)
            return []
        store.assign("t", np.full((V, D), k))
        store.flush()  # it has the file that is at the path
        return [(k, store)]

    monkeypatch.setattr(_mapped.os, "link", link_together)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        ((k, store),) = sum(pool.map(create, range(4)), [])
    store.close()
    with one_table(path=path) as store:
        assert (store.pull_all("t") == k).all()
    assert files(tmp_path) == ["table"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    for rows in (1, 2):
        with one_table(path=tmp_path / "table") as store:
            store.pull("t", [rows])
            assert store.stats()["t"].touched_rows == rows
    assert files(tmp_path) == ["table"]


def test_a_mapped_file_that_is_deleted_or_replaced(tmp_path):
    path = tmp_path / "table"
    with one_table(path=path) as store:
        path.unlink()
        for replace in (lambda: None, lambda: path.write_bytes(b"other")):
            replace()
            with pytest.raises(FileNotFoundError, match="table was deleted or rep"):
                store.flush()
        store.save(tmp_path / "kept")
    assert path.read_bytes() == b"other"


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("prefetching", ["", "read", "reading"])
def test_a_forked_child_neither_keeps_nor_gives_up_the_lock(
    tmp_path, monkeypatch, prefetching
):
    path, fork = tmp_path / "table", multiprocessing.get_context("fork").Process
    store = one_table(path=path)
    batches: Any = None
    forked, table = threading.Event(), store.engine.tables["t"]
    read = table.read_early

    def read_after_the_fork(rows, *rest, **options):
        assert rows != [2] or forked.wait(60)
        return read(rows, *rest, **options)

    if prefetching:  # its thread is not in the child
        if prefetching == "reading":
            monkeypatch.setattr(table, "read_early", read_after_the_fork)
        batches = store.prefetch([np.array([1]), np.array([2])], lambda ids: ids)
        next(batches)

    def close(ends_loop):
        if ends_loop:
            batches.close()
        store.close()

    for ends_loop in (False, bool(prefetching)):
        child = fork(target=close, args=(ends_loop,))
        child.start()
        child.join(20)
        assert child.exitcode == 0
    forked.set()
    with pytest.raises(RuntimeError, match="is in use by another store"):
        one_table(path=path)
    steps([0], store)
    store.save(tmp_path / "store")
    store.load(tmp_path / "store")  # writes a header
    if prefetching:
        batches.close()
    child = fork(target=time.sleep, args=(60,))
    child.start()
    store.close()
    with one_table(path=path) as other:  # while the child lives on
        assert other.stats()["t"].touched_rows >= 1
    child.kill()
    child.join()


# ------------------------------------------------------------------ other files


@pytest.mark.parametrize(
    "change",
    [
        {"state": [3]},
        {"given": "yes"},
        {"key": []},
        {"key": {"impl": "x"}},
        {"shape": [V, True]},
        {"shape": [V, 4.0]},
        {"step": -1},
        {"step": 1 << 63},
        {"dtype": None},
    ],
)
def test_headers_that_no_store_wrote(tmp_path, change):
    """Headers with the right checksum, written by another program."""
    path, saved, (key,) = tmp_path / "table", tmp_path / "store", change
    message = f"header.*'{key}'.*(has an unexpected value|is missing)"
    with one_table(path=path) as store:
        store.save(saved)
    with open(path, "r+b") as file:
        header = _records.read_header(path, file, _mapped.MAGIC, {})
        file.seek(0)
        file.write(_records.header_bytes(_mapped.MAGIC, header | change))
    with pytest.raises(ValueError, match=message):
        one_table(path=path)
    rewrite(saved, lambda header: header["tables"]["t"].update(change))
    with pytest.raises(ValueError, match=message):
        one_table().load(saved)


_GIVEN = np.full(V, 2, np.uint8)  # the kinds of rows that were given
_GIVEN[[4, 9, 10]] = 1  # with state: one more than the header says
_KEYS = ("other", [0, 0]), ("threefry2x32", [0, 1 << 40])


@pytest.mark.parametrize(
    "message, shape, change",
    [
        *(("not ascending row ids", (V, D), {"rows": x}) for x in ([5, 3], [3, V])),
        ("not ascending row ids", (V, D), {"rows": [3, 3]}),
        ("kinds of rows do not", (V, D), {"kinds": np.array([1, 3], np.uint8)}),
        ("kinds of rows do not", (V, D), {"kinds": np.array([0, 1], np.uint8)}),
        ("kinds of rows do not", ARRAY, {"kinds": _GIVEN}),
        ("kinds of rows do not", ARRAY, {"given": False}),
        *(("its key is", (V, D), {"key": {"impl": x, "data": y}}) for x, y in _KEYS),
    ],
)
def test_a_damaged_save_changes_nothing(tmp_path, message, shape, change):
    initializer = None if shape is ARRAY else NORMAL
    store, other, new = (one_table(TX, shape, initializer) for _ in range(3))
    path = tmp_path / "store"
    store.push("t", make_rows([4, 9], V, (D,))[0])
    store.save(path)
    arrays = {name: change[name] for name in ("rows", "kinds") if name in change}
    fields = {} if arrays else change
    rewrite(path, lambda header: header["tables"]["t"].update(fields), **arrays)
    with pytest.raises(ValueError, match=f"of table 't', .*{message}"):
        other.load(path)
    same(other, new)


def test_files_of_another_table_are_refused(tmp_path):
    path = tmp_path / "table"
    with one_table(path=path) as store:
        store.save(tmp_path / "saved")
        store.export_changes(tmp_path / "changes", since=0)
    another = "had another initializer"
    for message, change in [
        ("has dtype float16 here, but float32", {"dtype": np.float16}),
        (r"has state of no arrays here, but .*mu", {"tx": optax.sgd(0.1)}),
        ("has key", {"key": 5}),
        ("has keyed True here, but False", {"keys": sj.store.KeyPolicy()}),
        ("starts as zeros, without an initializer here, but", {"initializer": None}),
        (another, {"initializer": jax.nn.initializers.normal(0.2)}),
    ]:
        with pytest.raises(ValueError, match=message):
            one_table(path=path, **change)
        if "initializer" in change:
            for use, file in (("load", "saved"), ("apply_changes", "changes")):
                with pytest.raises(ValueError, match=another):
                    getattr(one_table(**change), use)(tmp_path / file)


# ------------------------------------------------------------------ many rows


def test_a_table_larger_than_the_memory():
    """Rows that are not touched cost nothing; a refusal names the way out."""
    with one_table(NARROW_TX, (1 << 30, 64), None) as store:
        store.pull("t", [3, 1 << 29])
        assert store.stats()["t"].touched_rows == 2
    with pytest.raises(MemoryError, match="path="):
        one_table(None, ((1 << 31) - 2, 1 << 20), None)


def test_a_mapped_file_larger_than_the_disk(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(_mapped.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="init: .* file system has only 1000 left"):
        one_table(path=tmp_path / "table")
    assert not files(tmp_path)


@pytest.mark.slow
def test_twenty_million_rows(tmp_path):
    """Adagrad on 20 million rows of 32: the device holds the rows of a batch."""
    rows, dim, capacity = 20_000_000, 32, 4096
    path = tmp_path / "table"
    before = {id(x) for x in jax.live_arrays()}

    @jax.jit
    def step(table, ids, targets):
        loss = lambda t: jnp.sum((sj.lookup(t, ids) - targets) ** 2)
        return sj.value_and_grad(loss)(table)

    rng = np.random.default_rng(0)
    batches = [rng.integers(0, rows, capacity) for _ in range(4)] * 2
    targets, losses = jnp.ones((capacity, dim)), []
    with one_table(optax.adagrad(0.1), (rows, dim), path=path) as store:
        for batch, table in store.prefetch(batches, np.asarray, capacity=capacity):
            loss, grad = step(table, jnp.asarray(batch), targets)
            store.push("t", grad)
            losses.append(loss)
        stats = store.stats()["t"]
        assert stats.bytes > 5e9 and stats.touched_rows == np.unique(batches).size
        live = [x for x in jax.live_arrays() if id(x) not in before]
        assert sum(x.nbytes for x in live) < 40 * capacity * dim * 4
    assert np.mean(losses[4:]) < 0.9 * np.mean(losses[:4])
    memory: Any = step.lower(table, batch, targets).compile().memory_analysis()
    used = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert used + memory.argument_size_in_bytes < 20 * capacity * dim * 4
    assert path.stat().st_size > 5e9
    assert path.stat().st_blocks * 512 < 1.5e9  # a page for each row touched
