"""Kills processes and checks their files: `python -m tests.tools.fuzz kills`.

A child works without end, and reports each step. It is killed (SIGKILL) at a random
moment, and another process reads its files and goes one more step:

- a file that was replaced, or a saved store, is the last one or the one before;
- a mapped table opens, with the rows of all pushes but the last; with keys, each row is
  that of its own key; with a device cache, all of it is as it was at a flush;
- a mapped table that was being made is not there, or whole; one that was being loaded
  is whole, or raises that it is half loaded;
- stores that follow by files of changes go on from what they have;
- nothing else is in the folder but temporary files, whose names begin with a dot.

The parent does not use JAX, so that children can be forked from it and start JAX.
"""

import multiprocessing
import os
import pathlib
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import sparsejax as sj
from sparsejax._files import replacing


V, D, BATCH = 40_000, 8, 40
STEPS = V // BATCH
TX = optax.sgd(1.0)
FORK = multiprocessing.get_context("fork")

Work = Callable[[pathlib.Path, int], Iterator[None]]
Check = Callable[[pathlib.Path, int, int], int]

# ------------------------------------------------------------------ kinds of work

# `work(path, start)` goes on from version `start`, and yields after each version.
# `check(path, done, begun)` looks for version `done`, or `begun` if one was begun, and
# returns the one that it found. It is called only if there is a file at the path.


def _replace(path, start):
    while True:
        start += 1
        with replacing(path) as file:
            for _ in range(4):
                file.write(start.to_bytes(4, "little") * 20_000)
        yield


def _check_replaced(path, done, begun):
    found = np.frombuffer(path.read_bytes(), np.uint32)
    assert len(found) == 80_000 and found[0] in (done, begun)
    assert (found == found[0]).all()
    return int(found[0])


def _store(shape: Any = (V, D), tx: Any = TX, **options):
    store = sj.store.KVStore()
    store.init("t", shape, tx, **options)
    return store


def _create(path, start):
    while True:
        start += 1
        path.unlink(missing_ok=True)
        _store(np.full((V, D), start, np.float32), None, path=path).close()
        yield


def _check_created(path, done, begun):
    with _store(tx=None, path=path) as store:
        (found,) = np.unique(store.pull_all("t"))
    assert found in (done, begun)
    return int(found)


def _push(store, version):
    """Version k adds 1 to batch k of the rows."""
    rows = np.arange((version - 1) * BATCH, version * BATCH, dtype=np.int32)
    store.push("t", sj.SelectedRows(rows, -np.ones((BATCH, D), np.float32), V))


def _check_rows(store, done, begun):
    """Rows of whole pushes are 1, later ones 0; of the one that was begun, some."""
    rows = store.pull_all("t")[:, 0].reshape(STEPS, BATCH)
    assert (rows[:done] == 1).all() and (rows[begun:] == 0).all()
    assert np.isin(rows[done:begun], (0, 1)).all()
    return begun if (rows[done:begun] == 1).all() else done


def _save(path, start):
    store = _store()
    if start:
        store.load(path)
    while start < STEPS:
        start += 1
        _push(store, start)
        store.save(path)
        yield


def _check_saved(path, done, begun):
    store = _store()
    store.load(path)
    found = _check_rows(store, done, begun)
    count = store.stats()["t"].touched_rows
    assert count == found * BATCH, (count, found)  # no part of a push is in a save
    return found


def _train(path, start):
    store = _store(path=path)
    while start < STEPS:
        start += 1
        _push(store, start)
        store.flush()
        yield


def _prefetch(path, start):
    store = _store(path=path)
    batches = [np.arange(k * BATCH, (k + 1) * BATCH) for k in range(start, STEPS)]
    for _, rows in store.prefetch(batches, lambda ids: ids, depth=2):
        store.push("t", rows.map(lambda values: -jax.numpy.ones_like(values)))
        store.flush()
        yield


def _check_mapped(path, done, begun):
    with _store(path=path) as store:
        found = _check_rows(store, done, begun)
        if found < begun:  # the push was killed: its rows start anew, and it is redone
            rows = np.arange(done * BATCH, begun * BATCH, dtype=np.int32)
            zeros = np.zeros((len(rows), D), np.float32)
            store.assign("t", sj.SelectedRows(rows, zeros, V))
    return found


def _cache_batches(version):
    """The ids of the steps of a version of a cached table."""
    return np.random.default_rng(version).integers(0, V, (8, BATCH), np.int32)


def _cache(path, start):
    """Each step adds 1 to its rows on the device; most leave before the flush."""
    store = _store(path=path)
    cache, tx = sj.store.CachedTable(store, "t", 2 * BATCH), sj.optim.lazy(TX)
    params: Any = cache.table
    state = tx.init(params)
    step = store.train_step(lambda table, ids: -table[ids].sum(), tx)
    while start < STEPS:
        start += 1
        for ids, rows in step.prefetch(params, _cache_batches(start)):
            params, state, _ = step(params, state, ids, rows)
        cache.flush(params, state, step=start)
        yield


def _check_cached(path, done, begun):
    """All rows are as they were at one flush: the last, or the one that was begun."""
    with _store(path=path) as store:
        rows = store.pull_all("t")
        found = sj.store.CachedTable(store, "t", 1).step or 0
    assert found in (done, begun)
    expected = np.zeros((V, D), np.float32)
    for version in range(1, found + 1):
        np.add.at(expected, _cache_batches(version), 1)
    assert (rows == expected).all()
    return found


def _keyed(path):
    return _store((3 * BATCH, D), path=path, keys=sj.store.KeyPolicy(admit_after=2))


def _keys_of(version):
    return np.arange((version - 1) * BATCH, version * BATCH) + 1


def _train_keys(path, start):
    """Version k adds to the rows of its keys, which are new, the keys themselves."""
    store = _keyed(path)
    while start < STEPS:
        start += 1
        keys = _keys_of(start)
        for _ in range(2):
            rows, _ = store.insert("t", keys, start)
        weights = store.pull_all("t")[rows]
        values = weights - np.repeat(keys[:, None], D, 1).astype(np.float32)
        store.push("t", sj.SelectedRows(rows, values, 3 * BATCH))
        yield


def _check_keys(path, done, begun):
    """A key has its own weights or, if its push was not done, none."""
    with _keyed(path) as store:
        keys, rows = store.items("t")
        assert len({*keys.tolist()}) == len(keys) == store.stats()["t"].keys
        weights = store.pull_all("t")[rows]
    is_own = weights == keys[:, None]
    assert (is_own | (weights == 0)).all()
    if done:
        assert is_own.all(axis=1)[np.isin(keys, _keys_of(done))].sum() == BATCH
    return done


def _opened(path):
    """The table; a new one in place of one that is half loaded."""
    try:
        return _store(path=path)
    except ValueError as error:
        assert "half loaded" in str(error)
    path.unlink()
    return _store(path=path)


def _load(path, start):
    """A saved store is loaded again and again into a mapped table."""
    saved = path.with_name("store")
    if not saved.exists():
        store = _store()
        for version in range(1, 20):
            _push(store, version)
        store.save(saved)
    path.unlink(missing_ok=True)
    store = _store(path=path)
    while True:
        store.load(saved)
        yield


def _check_loaded(path, done, begun):
    """The table is as it was saved, or raises that it is half loaded."""
    with _opened(path) as store:
        count = 19 if store.pull_all("t")[0].any() else 0
        _check_rows(store, count, count)
    return begun


def _follow(path, start):
    """A trainer writes changes; a store in memory and one in a file apply them."""
    changes, saved = path.with_name("changes"), path.with_name("follower")
    trainer, follower = _store(), _store()
    if saved.exists():
        follower.load(saved)
    mapped = _opened(path.with_name("table"))
    if start:
        trainer.load(path)
        mapped.load(path)
    since = 0  # another run of the trainer begins
    while start < STEPS:
        start += 1
        _push(trainer, start)
        trainer.save(path)
        since = trainer.export_changes(changes, since=since)
        for store in (follower, mapped):
            store.apply_changes(changes)
            assert store.version == start
        follower.save(saved)
        yield


def _check_followers(path, done, begun):
    saved, table = path.with_name("follower"), path.with_name("table")
    if saved.exists():
        store = _store()
        store.load(saved)
        for _ in range(2):  # all rows of its version, and of the version of the file
            assert store.version <= begun
            _check_rows(store, store.version, store.version)
            store.apply_changes(path.with_name("changes"))
    else:
        assert done == 0
    if table.exists():
        with _opened(table) as store:
            count = int(store.pull_all("t")[:, 0].sum()) // BATCH
            assert count <= begun
            _check_rows(store, count, count)
    return _check_saved(path, done, begun)


KINDS: dict[str, tuple[str, Work, Check]] = {  # with the name of the file
    "replace": ("file", _replace, _check_replaced),
    "create": ("table", _create, _check_created),
    "save": ("store", _save, _check_saved),
    "load": ("table", _load, _check_loaded),
    "push": ("table", _train, _check_mapped),
    "prefetch": ("table", _prefetch, _check_mapped),
    "cache": ("table", _cache, _check_cached),
    "keys": ("table", _train_keys, _check_keys),
    "changes": ("store", _follow, _check_followers),
}


# ------------------------------------------------------------------ killing


class Victim:
    """A job that is killed again and again, in a folder of its own."""

    def __init__(self, kind: str, folder: pathlib.Path, rng: random.Random):
        self.kind, self.rng = kind, rng
        name, self.work, self.check = KINDS[kind]
        self.path = folder / kind / name
        self.path.parent.mkdir()
        self.version = 0

    def kill(self) -> None:
        """Starts a child, kills it, checks its files, and goes one more step."""
        told, tell = os.pipe()
        found = FORK.Value("q")

        def run():
            steps = self.work(self.path, self.version)
            while True:
                os.write(tell, b"<")
                next(steps)
                os.write(tell, b">")

        child = FORK.Process(target=run)
        child.start()
        os.close(tell)
        marks = os.read(told, 1)
        # While the store is made, or from the first step on.
        if self.rng.random() < 0.8:
            marks += os.read(told, 1)
        pauses = 0, self.rng.uniform(0, 0.02), self.rng.random() / 5
        time.sleep(self.rng.choice(pauses))
        child.kill()
        child.join()
        while more := os.read(told, 1 << 16):
            marks += more
        os.close(told)
        done, begun = (self.version + marks.count(x) for x in (b">", b"<"))
        # A child that was through with all versions is not killed any more.
        assert child.exitcode == -signal.SIGKILL or begun >= STEPS, self.kind

        def check():
            is_removed = self.kind in ("create", "load")  # by the work itself
            version = begun if is_removed else 0
            if self.path.exists():
                version = self.check(self.path, done, begun)
            else:
                assert is_removed or done == 0
            if version < STEPS:
                next(self.work(self.path, version))
            found.value = version + 1

        child = FORK.Process(target=check)
        child.start()
        child.join()
        assert child.exitcode == 0, f"{self.kind}: see above"
        names = "file", "store", "table", "changes", "follower"
        for path in self.path.parent.iterdir():  # a killed child leaves temporary files
            is_temporary = path.name.startswith(tuple(f".{name}." for name in names))
            assert path.name in names or is_temporary, path
        self.version = found.value
        if self.version >= STEPS - 1:
            for path in self.path.parent.iterdir():
                path.unlink()
            self.version = 0


def compare(seed: int, rounds: int = 4) -> dict[str, int]:
    """Kills each kind of work `rounds` times; the number of kills."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        victims = [Victim(kind, pathlib.Path(folder), rng) for kind in KINDS]
        for victim in victims * rounds:
            victim.kill()
    return {"kills, nothing lost": len(victims) * rounds}
