"""Stores in files: saved whole or not at all, and tables mapped into memory."""

import errno
import fcntl
import io
import json
import os
import pathlib
import shutil
import signal
import threading
import time
import traceback
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


def new_store(tx=TX, seed=1, path=None):
    store = sj.store.KVStore()
    store.init("lazy", (V, D), tx, initializer=NORMAL, key=seed, path=path)
    store.init("given", ARRAY, None)
    store.init("narrow", (V,), NARROW_TX, dtype=jnp.bfloat16)
    return store


def one_table(tx: Any = TX, **options):
    store = sj.store.KVStore()
    store.init("t", (V, D), tx, initializer=NORMAL, **options)
    return store


def steps(store, seeds):
    """Pushes to each table with an optimizer."""
    for seed in seeds:
        ids = np.random.default_rng(seed).integers(0, V, 8)
        for name in store.names():
            if store.is_trainable(name):
                spec = store.spec(name)
                rows, _ = make_rows(ids, V, spec.shape[1:], spec.dtype, seed=seed)
                store.push(name, rows)


def same_state(store, other):
    for name in store.names():
        assert_same_bits(store.pull_all(name), other.pull_all(name))
        mine, theirs = store.engine.tables[name], other.engine.tables[name]
        for a, b in zip([*mine.by_row, *mine.rest], [*theirs.by_row, *theirs.rest]):
            assert_same_bits(a, b)


def same(store, other):
    same_state(store, other)
    for name in store.names():
        mine, theirs = store.engine.tables[name], other.engine.tables[name]
        assert_same_bits(mine.touched, theirs.touched)


def rewrite(path, change=lambda header: None, rows=None):
    """Changes the header of a record or rows of its first table, as a program may."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(members["header.json"])
    change(header)
    members["header.json"] = json.dumps(header).encode()
    if rows is not None:
        file = io.BytesIO()
        np.save(file, np.array(rows))
        members["0.rows.npy"] = file.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def files(directory):
    return sorted(path.name for path in pathlib.Path(directory).iterdir())


# ------------------------------------------------------------------ save and load


def test_a_tree_in_the_same_file(tmp_path):
    """Arrays, keys, numbers and text; tables of the store are not saved again."""
    store, other = new_store(), new_store()
    steps(store, range(2))
    devices = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    tree = {
        "table": store["lazy"],
        "key": jax.random.key(3),
        "half": jnp.arange(3, dtype=jnp.bfloat16),
        "there": jax.device_put(np.ones((2, 2)), devices),
        "numpy": (np.arange(4), np.float32(7), np.zeros((0, 2)), None),
        "plain": [7, 0.5, True, "w\u00f6rd"],
    }
    store.save(tmp_path / "file", tree)
    empty = jax.tree.map(
        lambda x: x if isinstance(x, str) else x * 0, tree | {"key": 0}
    )
    empty |= {"key": jax.random.key(9), "plain": [0, 0.0, False, ""]}
    found = other.load(tmp_path / "file", empty)
    same(other, store)
    assert found["table"] == store["lazy"] and found["plain"] == tree["plain"]
    data = jax.random.key_data
    assert_same_bits(data(found["key"]), data(tree["key"]))
    for name in "half", "there", "numpy":
        jax.tree.map(assert_same_bits, found[name], tree[name])
    assert type(found["numpy"][1]) is np.float32
    assert found["there"].sharding == devices and not found["half"].committed
    # A tree that is not asked for, and one that is not there.
    assert other.load(tmp_path / "file") is None
    store.save(tmp_path / "file")
    with pytest.raises(ValueError, match="no leaves"):
        other.load(tmp_path / "file", {"step": 0})


@pytest.mark.slow
def test_loaded_is_saved_and_goes_on_alike(tmp_path):
    store, path = new_store(), tmp_path / "store"
    steps(store, range(4))
    seen = []
    store.save(path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    other = new_store(seed=2)  # the seed comes with the file
    steps(other, range(10, 13))  # the old content is forgotten
    other.load(path)
    same(store, other)
    for each in (store, other):
        steps(each, range(4, 8))
    same(store, other)
    assert files(tmp_path) == ["store"]


def test_only_rows_touched_are_saved(tmp_path):
    store = sj.store.KVStore()
    store.init("t", (1_000_000, 8), optax.adagrad(0.1), initializer=NORMAL)
    store.pull("t", np.arange(0, 1_000_000, 10_000))
    store.save(tmp_path / "store")
    size = (tmp_path / "store").stat().st_size
    assert 100 * (8 + 64) < size < 100 * (8 + 64) + 4000


@pytest.mark.parametrize("work", ["save", "export_changes"])
def test_an_error_while_a_file_is_written_leaves_the_old_one(
    tmp_path, monkeypatch, work
):
    store, path = new_store(), tmp_path / "store"
    write = lambda path: (
        store.save(path) if work == "save" else store.export_changes(path, since=0)
    )
    steps(store, range(2))
    write(path)
    before = path.read_bytes()
    steps(store, range(2, 4))

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(_files.Writer, "array", fail)
    with pytest.raises(OSError, match="no space left"):
        write(path)
    assert path.read_bytes() == before and files(tmp_path) == ["store"]
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "missing" / "store")


@pytest.mark.parametrize("wrong", [[5, 3], [3, V], [3, 3]])
def test_a_file_of_wrong_ids(tmp_path, wrong):
    store, path = one_table(), tmp_path / "store"
    store.push("t", make_rows([4, 9], V, (D,))[0])
    store.save(path)
    rewrite(path, rows=wrong)
    other = one_table()
    with pytest.raises(ValueError, match="rows are not ascending row ids"):
        other.load(path)
    same(other, one_table())


def test_saving_over_a_mapped_table_is_refused(tmp_path):
    paths = [tmp_path / "table", tmp_path / "other"]
    (tmp_path / "link").symlink_to(paths[0])
    with one_table(path=paths[0]) as store, one_table(path=paths[1]):
        steps(store, range(2))
        for file in (*paths, tmp_path / "link"):
            content = file.read_bytes()
            with pytest.raises(ValueError, match="the file of a memory-mapped table"):
                store.save(file)
            assert file.read_bytes() == content


@pytest.mark.slow
def test_a_load_that_is_stopped(tmp_path):
    """While the file is checked nothing changes; later on the tables are marked."""
    store, path, table = new_store(), tmp_path / "store", tmp_path / "table"
    new_store().save(tmp_path / "empty")
    steps(store, range(4))
    store.save(path)
    seen = []
    store.load(path, progress=lambda *done: seen.append(done))
    assert seen[-1][0] == seen[-1][1] == 2 * seen[len(seen) // 2 - 1][0]

    def load_until(other, count):
        def progress(done, total):
            if done >= count:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            other.load(path, progress=progress)

    with new_store(path=table) as other, new_store() as start:
        for each in (other, start):
            steps(each, range(10, 13))
        load_until(other, 1)
        same(other, start)
        load_until(other, seen[-1][0] // 2 + 1)
        for use in (
            lambda: other.pull("narrow", [1]),
            lambda: other.pull_all("given"),
            lambda: steps(other, [1]),
            lambda: other.save(tmp_path / "no"),
        ):
            with pytest.raises(RuntimeError, match="is half loaded.*Call load again"):
                use()
    with pytest.raises(ValueError, match="init: .*table is half loaded.*Delete"):
        new_store(path=table)
    table.unlink()
    # Loaded once more, in the same store, nothing is left of the first try.
    with new_store(path=table) as other, new_store() as empty:
        load_until(other, seen[-1][0] // 2 + 1)
        other.load(tmp_path / "empty")
        same(other, empty)
    new_store(path=table).close()  # the mark is gone


# ------------------------------------------------------------------ mapped tables


@pytest.mark.slow
def test_a_mapped_table_outlives_its_store(tmp_path):
    path, kept = tmp_path / "table", new_store()
    with new_store(path=path) as store:
        for each in (store, kept):
            steps(each, range(3))
        assert store.stats()["lazy"].path == str(path)
        store.flush()
        store.save(tmp_path / "store")
    with new_store(path=path) as store:
        assert_same_bits(store.pull_all("lazy"), kept.pull_all("lazy"))
        steps(store, range(9, 11))
        store.load(tmp_path / "store")
        same(store, kept)
        for each in (store, kept):
            steps(each, range(3, 5))
        same(store, kept)
    with new_store(path=path) as store:
        assert_same_bits(store.pull_all("lazy"), kept.pull_all("lazy"))
    assert files(tmp_path) == ["store", "table"]


def test_a_mapped_table_of_an_array(tmp_path):
    path = tmp_path / "table"
    with sj.store.KVStore() as store:
        store.init("t", ARRAY, TX, path=path)
        store.push("t", make_rows([3], V, (D,))[0])
        expected = store.pull_all("t")
        store.save(tmp_path / "store")
    with sj.store.KVStore() as store:
        with pytest.raises(ValueError, match="'t' has an array, but .* already"):
            store.init("t", ARRAY, TX, path=path)
        store.init("t", (V, D), TX, path=path)
        assert_same_bits(store.pull_all("t"), expected)
        store.push("t", make_rows([4], V, (D,))[0])
        store.load(tmp_path / "store")
        assert_same_bits(store.pull_all("t"), expected)
    with sj.store.KVStore() as store:  # a table that was not given, and then was
        store.init("t", (V, D), TX, path=tmp_path / "other")
        store.load(tmp_path / "store")
    with sj.store.KVStore() as store:
        store.init("t", (V, D), TX, path=tmp_path / "other")
        assert_same_bits(store.pull_all("t"), expected)
        store.save(tmp_path / "again")
        store.assign("t", ARRAY)
        store.load(tmp_path / "again")
        assert_same_bits(store.pull_all("t"), expected)


SPECS = [jax.ShapeDtypeStruct((V, D), np.float32), jax.ShapeDtypeStruct((V,), np.uint8)]


def describe():
    key = {"impl": "threefry2x32", "data": [0, 0]}
    start = {"shape": [V, D], "dtype": "float32", "state": [], "given": False}
    return start | {"first": [], "key": key, "keyed": False}


def in_children(count, work):
    """Runs `work` in forked children that begin together; returns their results.

    They live until the last one has answered. `work` must do without JAX, which does
    not survive a fork.
    """
    ready, go, end = os.pipe(), os.pipe(), os.pipe()
    answers = []
    for k in range(count):
        answer = os.pipe()
        if not os.fork():
            try:
                signal.alarm(20)
                os.write(ready[1], b".")
                os.read(go[0], 1)
                text = str(work(k))
            except BaseException as error:
                text = "".join(traceback.format_exception(error))[-300:]
            os.write(answer[1], text.encode()[:4000])
            os.read(end[0], 1)
            os._exit(0)
        os.close(answer[1])
        answers.append(answer[0])
    for _ in range(count):
        os.read(ready[0], 1)
    os.write(go[1], b"." * count)
    found = [os.read(answer, 4000).decode() for answer in answers]
    os.write(end[1], b"." * count)
    for _ in range(count):
        os.wait()
    for one in (*ready, *go, *end, *answers):
        os.close(one)
    return found


forks = pytest.mark.filterwarnings("ignore:.*fork")


@forks
def test_of_processes_that_create_a_file_one_has_it(tmp_path):
    count = 4
    for trial in range(3):
        path, kept = tmp_path / f"table {trial}", []

        def create(k, path=path, kept=kept):
            try:
                memory = _mapped.MappedFile(path, SPECS, {}, describe(), "t")
            except RuntimeError as error:
                assert "is in use by another store" in str(error)
                return "refused"
            kept.append(memory)
            memory.arrays[0][:] = k
            memory.flush()
            return f"has it {k} {os.fstat(memory._file.fileno()).st_ino}"

        found = in_children(count, create)
        assert found.count("refused") == count - 1, found
        (winner,) = (x for x in found if x != "refused")
        assert winner.startswith("has it"), winner
        _, _, k, inode = winner.split()
        assert path.stat().st_ino == int(inode)  # and not one that was replaced
        memory = _mapped.MappedFile(path, SPECS, {}, describe(), "t")
        assert (memory.arrays[0] == int(k)).all()
        memory.close()
    assert len(files(tmp_path)) == trial + 1


def test_a_table_that_is_created_meanwhile(tmp_path, monkeypatch):
    """The file appears after it was searched, as with two processes at once."""
    path = tmp_path / "table"
    with one_table(path=path) as store, sj.store.KVStore() as other:
        with monkeypatch.context() as patch:
            patch.setattr(_mapped.pathlib.Path, "exists", lambda self: False)
            with pytest.raises(RuntimeError, match="is in use by another store"):
                other.init("t", (V, D), TX, path=path)
            with pytest.raises(ValueError, match="'t' has an array, but .* already"):
                other.init("t", ARRAY, TX, path=path)
        steps(store, [0])
        store.flush()
        expected = store.pull_all("t")
    with one_table(path=path) as store:
        assert_same_bits(store.pull_all("t"), expected)
    assert files(tmp_path) == ["table"]


def test_a_table_that_is_created_while_a_store_is_saved(tmp_path):
    path = tmp_path / "file"
    with new_store() as store, sj.store.KVStore() as other:
        steps(store, range(2))

        def progress(done, total):
            if "t" not in other:
                other.init("t", (V, D), TX, path=path)

        with pytest.raises(ValueError, match="the file of a memory-mapped table"):
            store.save(path, progress=progress)
        other.push("t", make_rows([3], V, (D,))[0])
        other.flush()  # its file is in its place
    assert files(tmp_path) == ["file"]


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


@forks
@pytest.mark.parametrize("prefetching", ["", "read", "reading"])
def test_a_forked_child_does_not_give_up_the_lock(tmp_path, monkeypatch, prefetching):
    path = tmp_path / "table"
    store = one_table(path=path)
    batches: Any = None
    forked, read = threading.Event(), store.engine.tables["t"].read_early

    def read_after_the_fork(rows, *rest, **options):
        assert rows != [2] or forked.wait(60)
        return read(rows, *rest, **options)

    if prefetching:  # its thread is not in the child
        if prefetching == "reading":
            table = store.engine.tables["t"]
            monkeypatch.setattr(table, "read_early", read_after_the_fork)
        batches = store.prefetch([np.array([1]), np.array([2])], lambda ids: ids)
        next(batches)

    def close(k):
        if k and prefetching:
            batches.close()
        store.close()
        return "closed"

    assert in_children(2, close) == ["closed"] * 2
    forked.set()
    with pytest.raises(RuntimeError, match="is in use by another store"):
        one_table(path=path)
    steps(store, [0])
    store.save(tmp_path / "store")
    store.load(tmp_path / "store")  # writes a header
    if prefetching:
        batches.close()
    store.close()
    with one_table(path=path) as other:
        assert other.stats()["t"].touched_rows >= 1


@forks
def test_a_child_that_lives_on_does_not_keep_the_lock(tmp_path):
    path, end = tmp_path / "table", os.pipe()
    store = one_table(path=path)
    child = os.fork()
    if not child:
        os.read(end[0], 1)
        os._exit(0)
    store.close()
    one_table(path=path).close()
    os.write(end[1], b".")
    os.waitpid(child, 0)
    os.close(end[0])
    os.close(end[1])


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
    with one_table() as store:
        with pytest.raises(ValueError, match=message):
            store.load(saved)


@pytest.mark.parametrize(
    "key",
    [{"impl": "other", "data": [0, 0]}, {"impl": "threefry2x32", "data": [0, 1 << 40]}],
)
def test_a_saved_key_that_starts_no_row(tmp_path, key):
    path = tmp_path / "store"
    with one_table() as store:
        store.save(path)
        rewrite(path, lambda header: header["tables"]["t"].update(key=key))
        with pytest.raises(ValueError, match="of table 't', its key is"):
            store.load(path)
        assert store.pull_all("t").any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": np.float16}, "has dtype float16 here, but float32"),
        ({"tx": optax.sgd(0.1)}, r"has state of no arrays here, but .*mu"),
        ({"key": 5}, "has key"),
        ({"initializer": None}, "starts as zeros, without an initializer here, but"),
        ({"initializer": jax.nn.initializers.normal(0.2)}, "had another initializer"),
    ],
)
def test_a_file_of_another_table_is_refused(tmp_path, change, message):
    path = tmp_path / "table"
    one_table(path=path).close()
    arguments = {"tx": TX, "initializer": NORMAL, **change}
    with sj.store.KVStore() as store:
        with pytest.raises(ValueError, match=message):
            store.init("t", (V, D), path=path, **arguments)


def test_a_save_of_another_initializer_is_refused(tmp_path):
    with one_table() as store:
        store.save(tmp_path / "saved")
        store.export_changes(tmp_path / "changes", since=0)
    for other in (jax.nn.initializers.normal(0.2), None):
        with sj.store.KVStore() as store:
            store.init("t", (V, D), TX, initializer=other)
            for use, file in ((store.load, "saved"), (store.apply_changes, "changes")):
                with pytest.raises(ValueError, match="had another initializer"):
                    use(tmp_path / file)


def test_a_table_larger_than_the_memory():
    """Rows that are not touched cost nothing; a refusal names the way out."""
    with sj.store.KVStore() as store:
        store.init("t", (1 << 30, 64), sj.optim.rowwise_adagrad(0.1))
        store.pull("t", [3, 1 << 29])
        assert store.stats()["t"].touched_rows == 2
        with pytest.raises(MemoryError, match="path="):
            store.init("u", ((1 << 31) - 2, 1 << 20), None)


def test_a_mapped_file_larger_than_the_disk(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(_mapped.shutil, "disk_usage", lambda path: usage)
    with sj.store.KVStore() as store:
        with pytest.raises(OSError, match="init: .* file system has only 1000 left"):
            store.init("t", (V, D), TX, path=tmp_path / "table")
    assert not files(tmp_path)


# ------------------------------------------------------------------ millions of rows


@pytest.mark.slow
def test_twenty_million_rows(tmp_path):
    """Adagrad on 20 million rows of 32: the device holds the rows of a batch."""
    rows, dim, ids, capacity = 20_000_000, 32, 4096, 4096
    path = tmp_path / "table"
    tx = optax.adagrad(0.1)
    before = {id(x) for x in jax.live_arrays()}

    @jax.jit
    def step(table, ids, targets):
        loss = lambda t: jnp.sum((sj.lookup(t, ids) - targets) ** 2)
        return sj.value_and_grad(loss)(table)

    rng = np.random.default_rng(0)
    batches = [rng.integers(0, rows, ids) for _ in range(8)] * 2
    targets = jnp.ones((ids, dim))
    began = time.perf_counter()
    with sj.store.KVStore() as store:
        store.init("t", (rows, dim), tx, path=path, initializer=NORMAL)
        losses = []
        for batch, table in store.prefetch(batches, np.asarray, capacity=capacity):
            loss, grad = step(table, jnp.asarray(batch), targets)
            store.push("t", grad)
            losses.append(loss)
            if len(losses) == 2:
                program = step.lower(table, jnp.asarray(batch), targets).compile()
                memory = program.memory_analysis()
        assert time.perf_counter() - began < 60
        assert store.stats()["t"].bytes > 5e9
        assert store.stats()["t"].touched_rows == np.unique(batches).size
        live = [x for x in jax.live_arrays() if id(x) not in before]
        assert sum(x.nbytes for x in live) < 40 * capacity * dim * 4
    assert np.mean(losses[8:]) < 0.9 * np.mean(losses[:8])
    assert memory is not None
    used = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert used + memory.argument_size_in_bytes < 20 * capacity * dim * 4
    assert path.stat().st_size > 5e9
    assert path.stat().st_blocks * 512 < 1.5e9  # a page for each row touched
