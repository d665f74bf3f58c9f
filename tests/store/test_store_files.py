"""Stores in files: saved whole or not at all, and tables mapped into memory."""

import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import shutil
import signal
import textwrap
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
from helpers import assert_same_bits, make_rows, run_python
from sparsejax.store import _mapped, _records, _snapshot


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


def steps(store, seeds):
    for seed in seeds:
        ids = np.random.default_rng(seed).integers(0, V, 8)
        store.push("lazy", make_rows(ids, V, (D,), seed=seed)[0])
        store.push("narrow", make_rows(ids, V, (), jnp.bfloat16, seed=seed)[0])


def same(store, other):
    for name in store.names():
        assert_same_bits(store.pull_all(name), other.pull_all(name))
        mine, theirs = store.engine.tables[name], other.engine.tables[name]
        for a, b in zip([*mine.by_row, *mine.rest], [*theirs.by_row, *theirs.rest]):
            assert_same_bits(a, b)
        assert_same_bits(mine.touched, theirs.touched)


def rewrite(path, change):
    """Changes the header of a record, as another program may."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(members["header.json"])
    change(header)
    members["header.json"] = json.dumps(header).encode()
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


@pytest.mark.slow
def test_what_load_refuses(tmp_path):
    store, path = new_store(), tmp_path / "store"
    steps(store, range(2))
    store.save(path)
    with pytest.raises(FileNotFoundError):
        store.load(tmp_path / "nothing")
    other = sj.store.KVStore()
    other.init("lazy", (V, D), TX, initializer=NORMAL)
    with pytest.raises(ValueError, match="has the tables .'given', 'lazy', 'narrow'"):
        other.load(path)
    other = new_store(optax.adagrad(0.1))
    with pytest.raises(ValueError, match="Table 'lazy' has state .*sum_of_squares"):
        other.load(path)
    content = path.read_bytes()
    middle = len(content) // 2
    for wrong in [
        b"",
        b"other" + content,
        content[:40],
        content[:-1],
        content + b"x",
        content[: middle - 1] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        b"sparsejax store 3\n" + content,  # of a release before
    ]:
        (tmp_path / "wrong").write_bytes(wrong)
        other, start = new_store(), new_store()
        with pytest.raises(ValueError, match="is not a whole file of this sparsejax"):
            other.load(tmp_path / "wrong")
        same(other, start)


def test_an_error_while_saving_leaves_the_old_file(tmp_path):
    store, path = new_store(), tmp_path / "store"
    steps(store, range(2))
    store.save(path)
    before = path.read_bytes()
    steps(store, range(2, 4))

    def fail(done, total):
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        store.save(path, progress=fail)
    assert path.read_bytes() == before and files(tmp_path) == ["store"]
    with pytest.raises(FileNotFoundError):
        store.save(tmp_path / "missing" / "store")


def test_a_file_of_wrong_ids(tmp_path, monkeypatch):
    store, path = new_store(), tmp_path / "store"
    steps(store, range(2))
    find = _snapshot._all_rows
    for wrong in ([5, 3], [3, V], [3, 3]):
        with monkeypatch.context() as patch:
            all_rows = lambda table, wrong=wrong: (
                np.array(wrong) if table.spec.name == "lazy" else find(table)
            )
            patch.setattr(_snapshot, "_all_rows", all_rows)
            patch.setattr(_snapshot.np, "take", lambda x, rows, **_: x[rows * 0])
            for table in store.engine.tables.values():
                patch.setattr(table, "touched", np.ones(V + 1, np.uint8))
            store.save(path)
        other, start = new_store(), new_store()
        with pytest.raises(ValueError, match="rows are not ascending row ids"):
            other.load(path)
        same(other, start)


def test_saving_over_a_mapped_table_is_refused(tmp_path):
    path, other_path = tmp_path / "table", tmp_path / "other"
    (tmp_path / "link").symlink_to(path)
    with new_store(path=path) as store, new_store(path=other_path) as other:
        steps(store, range(2))
        before = store.pull_all("lazy")
        for file in (path, other_path, tmp_path / "link"):
            content = file.read_bytes()
            with pytest.raises(ValueError, match="the file of a memory-mapped table"):
                store.save(file)
            assert file.read_bytes() == content
        with pytest.raises(IsADirectoryError, match="got the dir"):
            store.save(tmp_path)
        assert "lazy" in other
    with new_store(path=path) as store:
        assert_same_bits(store.pull_all("lazy"), before)


@pytest.mark.slow
def test_a_load_that_is_stopped(tmp_path):
    """While the file is checked nothing changes; later on the tables are marked."""
    store, path, table = new_store(), tmp_path / "store", tmp_path / "table"
    steps(store, range(4))
    seen = []
    store.save(path)
    store.load(path, progress=lambda *done: seen.append(done))
    assert seen[-1][0] == seen[-1][1] == 2 * seen[len(seen) // 2 - 1][0]

    def stop_at(count):
        def progress(done, total):
            if done >= count:
                raise KeyboardInterrupt

        return progress

    with new_store(path=table) as other:
        steps(other, range(10, 13))
        other.flush()
        with new_store() as start:
            steps(start, range(10, 13))
            with pytest.raises(KeyboardInterrupt):
                other.load(path, progress=stop_at(1))
            same(other, start)
        with pytest.raises(KeyboardInterrupt):
            other.load(path, progress=stop_at(seen[-1][0] // 2 + 1))
        uses = [
            lambda: other.pull("narrow", [1]),
            lambda: other.pull_all("given"),
            lambda: steps(other, [1]),
            lambda: other.save(tmp_path / "no"),
        ]
        for use in uses:
            with pytest.raises(RuntimeError, match="is half loaded.*Call load again"):
                use()
    with sj.store.KVStore() as other:
        with pytest.raises(ValueError, match="init: .*table is half loaded.*Delete"):
            other.init("lazy", (V, D), TX, initializer=NORMAL, key=1, path=table)
    table.unlink()
    # Loaded once more, in the same store, nothing is left of the first try.
    empty = new_store()
    empty.save(tmp_path / "empty")
    with new_store(path=table) as other:
        with pytest.raises(KeyboardInterrupt):
            other.load(path, progress=stop_at(seen[-1][0] // 2 + 1))
        other.load(tmp_path / "empty")
        same(other, empty)
    new_store(path=table).close()  # the mark is gone


# One process, so that JAX is started once. It forks a child that saves one version
# after the other and reports each (with NumPy only, since JAX does not survive a fork),
# kills it at a random moment, and loads the file: one version, whole, and not older
# than the last one that the child reported as saved.
KILLER = """
    import os, random, signal, sys, time
    import numpy as np, optax
    import sparsejax as sj

    store = sj.store.KVStore()
    store.init("t", (20_000, 64), sj.optim.rowwise_adagrad(0.1))
    table, path = store.engine.tables["t"], sys.argv[1]
    dice = random.Random(0)
    version = within = 0
    seen = set()
    for trial in range(20):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            while True:
                version += 1
                table.weights[:], table.by_row[0][:] = version, -version
                table.touched[:version] = 1
                os.write(writer, b"<")
                store.save(path)
                os.write(writer, b">")
        os.close(writer)
        os.read(reader, 1)
        time.sleep(dice.uniform(0, 0.08))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        marks = b"<"
        while more := os.read(reader, 1000):
            marks += more
        os.close(reader)
        within += marks.endswith(b"<")
        if not os.path.exists(path):
            assert version + marks.count(b">") == 0
            continue
        store.load(path)
        found = int(table.weights[0, 0])
        assert found - version in (marks.count(b">"), marks.count(b"<")), found
        rows = np.flatnonzero(table.touched)
        assert (rows == np.arange(found)).all()
        assert (table.weights[rows] == found).all()
        assert (table.by_row[0][rows] == -found).all()
        version = found
        seen.add(found)
    store.save(path)
    print(within, len(seen), *os.listdir(os.path.dirname(path)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_while_saving(tmp_path):
    """SIGKILL at 20 random moments, most of them within a save."""
    printed = run_python("-c", textwrap.dedent(KILLER), tmp_path / "store")
    within, versions, *left = printed.split()
    assert int(within) >= 5 and int(versions) >= 5
    left.remove("store")
    assert all(name.startswith(".store.") for name in left)  # of the killed saves


# ------------------------------------------------------------------ mapped tables


@pytest.mark.slow
def test_a_mapped_table_outlives_its_store(tmp_path):
    path = tmp_path / "table"
    kept = new_store()
    with new_store(path=path) as store:
        for each in (store, kept):
            steps(each, range(3))
        assert store.stats()["lazy"].path == str(path)
        store.flush()
    steps(kept, range(3, 5))
    with new_store(path=path) as store:
        assert store.stats()["lazy"].touched_rows > 10
        steps(store, range(3, 5))
        mine, theirs = store.engine.tables["lazy"], kept.engine.tables["lazy"]
        assert_same_bits(store.pull_all("lazy"), kept.pull_all("lazy"))
        for a, b in zip([*mine.by_row, *mine.rest], [*theirs.by_row, *theirs.rest]):
            assert_same_bits(a, b)
        store.save(tmp_path / "store")
        steps(store, range(9, 11))
        store.load(tmp_path / "store")
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


def test_one_store_at_a_time(tmp_path):
    path = tmp_path / "table"
    store, other = sj.store.KVStore(), sj.store.KVStore()
    store.init("t", (V, D), TX, path=path)
    with pytest.raises(RuntimeError, match="is in use by another store"):
        other.init("t", (V, D), TX, path=path)
    store.close()
    other.init("t", (V, D), TX, path=path)
    assert "t" in other
    other.close()


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
@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_of_processes_that_create_a_file_one_has_it(tmp_path, count):
    for trial in range(3 if count == 3 else 5):
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
    with sj.store.KVStore() as store, sj.store.KVStore() as other:
        store.init("t", (V, D), TX, path=path)
        with monkeypatch.context() as patch:
            patch.setattr(_mapped.pathlib.Path, "exists", lambda self: False)
            with pytest.raises(RuntimeError, match="is in use by another store"):
                other.init("t", (V, D), TX, path=path)
            with pytest.raises(ValueError, match="'t' has an array, but .* already"):
                other.init("t", ARRAY, TX, path=path)
        store.push("t", make_rows([3], V, (D,))[0])
        store.flush()
        expected = store.pull_all("t")
    with sj.store.KVStore() as store:
        store.init("t", (V, D), TX, path=path)
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

    path = tmp_path / "table"
    monkeypatch.setattr(fcntl, "flock", flock)
    for rows in (1, 2):
        with sj.store.KVStore() as store:
            store.init("t", (V, D), TX, path=path)
            store.pull("t", [rows])
            assert store.stats()["t"].touched_rows == rows
    assert files(tmp_path) == ["table"]


def test_a_mapped_file_that_is_deleted_or_replaced(tmp_path):
    path = tmp_path / "table"
    with sj.store.KVStore() as store:
        store.init("t", (V, D), TX, path=path)
        path.unlink()
        with pytest.raises(FileNotFoundError, match="table was deleted or rep"):
            store.flush()
        path.write_bytes(b"other")
        with pytest.raises(FileNotFoundError, match="Call save to keep them"):
            store.flush()
        store.save(tmp_path / "kept")
    assert path.read_bytes() == b"other"


@forks
@pytest.mark.parametrize("prefetching", ["", "read", "reading"])
def test_a_forked_child_does_not_give_up_the_lock(tmp_path, monkeypatch, prefetching):
    path = tmp_path / "table"
    store = sj.store.KVStore()
    store.init("t", (V, D), TX, path=path)
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
    with sj.store.KVStore() as other:
        with pytest.raises(RuntimeError, match="is in use by another store"):
            other.init("t", (V, D), TX, path=path)
    store.push("t", make_rows([3], V, (D,))[0])
    store.save(tmp_path / "store")
    store.load(tmp_path / "store")  # writes a header
    if prefetching:
        batches.close()
    store.close()
    with sj.store.KVStore() as other:
        other.init("t", (V, D), TX, path=path)
        assert other.stats()["t"].touched_rows >= 1


@forks
def test_a_child_that_lives_on_does_not_keep_the_lock(tmp_path):
    path, end = tmp_path / "table", os.pipe()
    store = sj.store.KVStore()
    store.init("t", (V, D), TX, path=path)
    child = os.fork()
    if not child:
        os.read(end[0], 1)
        os._exit(0)
    store.close()
    with sj.store.KVStore() as other:
        other.init("t", (V, D), TX, path=path)
    os.write(end[1], b".")
    os.waitpid(child, 0)
    os.close(end[0])
    os.close(end[1])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"state": [3]}, "header.*'state'..0. has an unexpected value, 3"),
        ({"given": "yes"}, "header.*'given'. has an unexpected value"),
        ({"key": []}, "header.*'key'. has an unexpected value, a list"),
        ({"key": {"impl": "x"}}, r"header.*'key'.*\['data'\] is missing"),
        ({"shape": [V, True]}, "header.*'shape'..1. has an unexpected value, True"),
        ({"shape": [V, 4.0]}, "header.*'shape'..1. has an unexpected value, 4.0"),
        ({"step": -1}, "header.*'step'. has an unexpected value, -1"),
        ({"step": 1 << 63}, "header.*'step'. has an unexpected value, 92233720368"),
        ({"dtype": None}, "header.*'dtype'. has an unexpected value, a NoneType"),
    ],
)
def test_headers_that_no_store_wrote(tmp_path, change, message):
    """Headers with the right checksum, written by another program."""
    path, saved = tmp_path / "table", tmp_path / "store"
    with sj.store.KVStore() as store:
        store.init("t", (V, D), TX, path=path)
        store.save(saved)
    with open(path, "r+b") as file:
        found = _records.read_header(path, file, _mapped.MAGIC, {})
        file.seek(0)
        _records.write_header(file, _mapped.MAGIC, found | change)
    with sj.store.KVStore() as store:
        with pytest.raises(ValueError, match=message):
            store.init("t", (V, D), TX, path=path)
        store.init("t", (V, D), TX)
        rewrite(saved, lambda header: header["tables"]["t"].update(change))
        with pytest.raises(ValueError, match=message):
            store.load(saved)


@pytest.mark.parametrize(
    "key",
    [
        {"impl": "other", "data": [0, 0]},
        {"impl": "threefry2x32", "data": [0]},
        {"impl": "threefry2x32", "data": [0, 1 << 40]},
    ],
)
def test_a_saved_key_that_starts_no_row(tmp_path, key):
    path = tmp_path / "store"
    with sj.store.KVStore() as store:
        store.init("t", (V, D), TX, initializer=NORMAL)
        table = store.engine.tables["t"]
        first = table.spec.first
        table.spec = dataclasses.replace(table.spec, key=key)
        vars(table.spec)["first"] = first
        store.save(path)
    with sj.store.KVStore() as store:
        store.init("t", (V, D), TX, initializer=NORMAL)
        with pytest.raises(ValueError, match="of table 't', its key is"):
            store.load(path)
        assert store.pull_all("t").any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"shape": (V + 1, D)}, r"has shape \[301, 4\] here, but \[300, 4\]"),
        ({"dtype": np.float16}, "has dtype float16 here, but float32"),
        ({"tx": optax.sgd(0.1)}, r"has state of no arrays here, but .*mu"),
        ({"key": 5}, "has key"),
        ({"initializer": None}, "starts as zeros, without an initializer here, but"),
        ({"initializer": jax.nn.initializers.normal(0.2)}, "had another initializer"),
    ],
)
def test_a_file_of_another_table_is_refused(tmp_path, change, message):
    arguments = {"shape": (V, D), "tx": TX, "initializer": NORMAL}
    for more in ({}, change):
        given = {**arguments, **more}
        shape, tx = given.pop("shape"), given.pop("tx")
        with sj.store.KVStore() as store:
            if more:
                with pytest.raises(ValueError, match=message):
                    store.init("t", shape, tx, path=tmp_path / "table", **given)
            else:
                store.init("t", shape, tx, path=tmp_path / "table", **given)


def test_a_save_of_another_initializer_is_refused(tmp_path):
    make = jax.nn.initializers.normal
    with sj.store.KVStore() as store:
        store.init("t", (V, D), TX, initializer=make(0.1), key=3)
        store.save(tmp_path / "saved")
        store.export_changes(tmp_path / "changes", since=0)
    for initializer in (make(0.2), jax.nn.initializers.uniform(0.1), None):
        with sj.store.KVStore() as store:
            store.init("t", (V, D), TX, initializer=initializer, key=3)
            with pytest.raises(ValueError, match="had another initializer"):
                store.load(tmp_path / "saved")
            with pytest.raises(ValueError, match="had another initializer"):
                store.apply_changes(tmp_path / "changes")


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


def test_a_mapped_file_that_was_cut_off(tmp_path):
    path = tmp_path / "table"
    with sj.store.KVStore() as store:
        store.init("t", (V, D), TX, path=path)
    os.truncate(path, path.stat().st_size - 1)
    with sj.store.KVStore() as store:
        with pytest.raises(ValueError, match="it was truncated"):
            store.init("t", (V, D), TX, path=path)


# ------------------------------------------------------------------ millions of rows


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
def test_twenty_million_rows(tmp_path, mapped):
    """Adagrad on 20 million rows of 32: the device holds the rows of a batch."""
    rows, dim, ids, capacity = 20_000_000, 32, 4096, 4096
    path = tmp_path / "table" if mapped else None
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
    if path is not None:
        assert path.stat().st_size > 5e9
        assert path.stat().st_blocks * 512 < 1.5e9  # a page for each row touched
