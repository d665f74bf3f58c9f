"""Kills processes at random moments and checks their files.

    python -m tests.tools.kills --seconds 60          all kinds, for a minute
    python -m tests.tools.kills --kind push --seed 3

A child works without end: it replaces a file, saves a store, trains a mapped table,
on the host or in a device cache, or one whose rows change hands between keys, or writes
changes that other stores apply.
It reports each step. It is killed (SIGKILL) at a random moment, and another
process reads its files:

- a file that was replaced, or a saved store, is the last one or the one before;
- a mapped table opens, and the rows of all pushes but the last are whole;
- in one with keys, no key has the weights of another, and those of all pushes but the
  last have theirs;
- a mapped table with a device cache is what it was at a flush, all of it;
- a mapped table that was being made is not there, or whole;
- a store that follows by files of changes goes on from what it saved; a mapped table
  that follows has all rows of one version, or raises that it is half loaded;
- nothing else is in the folder but temporary files, whose names begin with a dot.

The parent does not use JAX, so that children can be forked from it and start JAX.
"""

import argparse
import math
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import sparsejax as sj
from sparsejax._files import replacing
from sparsejax.store import _mapped


V, D, BATCH = 40_000, 8, 40
STEPS = V // BATCH
TX = optax.sgd(1.0)

Work = Callable[[pathlib.Path, int], Iterator[None]]
Check = Callable[[pathlib.Path, int, int], int]

# ------------------------------------------------------------------ kinds of work

# `work(folder, start)` goes on from version `start`, and yields after each version.
# `check(folder, done, begun)` looks for version `done`, or `begun` if one was begun,
# and returns the one that it found.


def _replace(folder, start):
    while True:
        start += 1
        with replacing(folder / "file") as file:
            for _ in range(4):
                file.write(start.to_bytes(4, "little") * 20_000)
        yield


def _check_replaced(folder, done, begun):
    path = folder / "file"
    if not path.exists():
        assert done == 0
        return 0
    found = np.frombuffer(path.read_bytes(), np.uint32)
    assert (
        len(found) == 80_000 and found[0] in (done, begun) and (found == found[0]).all()
    )
    return int(found[0])


def _specs():
    shapes = [((V, D), np.float32), ((V,), np.uint8)]
    return [jax.ShapeDtypeStruct(*spec) for spec in shapes]


def _header():
    key = {"impl": "threefry2x32", "data": [0, 0]}
    start = {"shape": [V, D], "dtype": "float32", "state": [], "given": False}
    return start | {"first": [], "key": key, "keyed": False}


def _create(folder, start):
    while True:
        start += 1
        (folder / "table").unlink(missing_ok=True)
        memory = _mapped.MappedFile(folder / "table", _specs(), {}, _header(), "t")
        memory.arrays[0][:] = start
        memory.close()
        yield


def _check_created(folder, done, begun):
    if not (folder / "table").exists():
        return begun
    memory = _mapped.MappedFile(folder / "table", _specs(), {}, _header(), "t")
    found = {int(x) for x in np.unique(memory.arrays[0])}
    memory.close()
    assert found <= {0, done, begun}, found
    return max(found)


def _store(folder, **options):
    store = sj.store.KVStore()
    store.init("t", (V, D), TX, **options)
    return store


def _push(store, version):
    """Version k adds 1 to batch k of the rows."""
    rows = np.arange((version - 1) * BATCH, version * BATCH, dtype=np.int32)
    store.push("t", sj.SelectedRows(rows, -np.ones((BATCH, D), np.float32), V))


def _check_rows(store, done, begun):
    """Rows of whole pushes are 1, later ones 0; of the one that was begun, some."""
    rows = store.pull_all("t")[:, 0].reshape(STEPS, BATCH)
    assert (rows[:done] == 1).all() and (rows[begun:] == 0).all()
    assert np.isin(rows[done:begun], (0, 1)).all()
    whole = begun if (rows[done:begun] == 1).all() else done
    return whole


def _save(folder, start):
    store = _store(folder)
    if start:
        store.load(folder / "store")
    while start < STEPS:
        start += 1
        _push(store, start)
        store.save(folder / "store")
        yield


def _check_saved(folder, done, begun):
    if not (folder / "store").exists():
        assert done == 0
        return 0
    store = _store(folder)
    store.load(folder / "store")
    found = _check_rows(store, done, begun)
    count = store.stats()["t"].touched_rows
    assert count == found * BATCH, (count, found)  # no part of a push is in a save
    return found


def _train(folder, start):
    store = _store(folder, path=folder / "table")
    while start < STEPS:
        start += 1
        _push(store, start)
        store.flush()
        yield


def _prefetch(folder, start):
    store = _store(folder, path=folder / "table")
    batches = [np.arange(k * BATCH, (k + 1) * BATCH) for k in range(start, STEPS)]
    for ids, rows in store.prefetch(batches, lambda ids: ids, depth=2):
        store.push("t", rows.map(lambda values: -jax.numpy.ones_like(values)))
        store.flush()
        start += 1
        yield


def _check_mapped(folder, done, begun):
    if not (folder / "table").exists():
        assert done == 0
        return 0
    store = _store(folder, path=folder / "table")
    found = _check_rows(store, done, begun)
    if found < begun:  # the push was killed: it is done again on rows that start anew
        rows = np.arange(done * BATCH, begun * BATCH, dtype=np.int32)
        zeros = np.zeros((len(rows), D), np.float32)
        store.assign("t", sj.SelectedRows(rows, zeros, V))
    store.close()
    return found


def _cache_batches(version):
    """The ids of the steps of a version of a cached table."""
    return np.random.default_rng(version).integers(0, V, (8, BATCH), np.int32)


def _cache(folder, start):
    """Each step adds 1 to its rows on the device; most leave before the flush."""
    store = _store(folder, path=folder / "table")
    cache = sj.store.CachedTable(store, "t", 2 * BATCH)
    tx = sj.optim.lazy(TX)
    params: Any = cache.table
    state = tx.init(params)
    step = store.train_step(lambda table, ids: -table[ids].sum(), tx)
    while start < STEPS:
        start += 1
        for ids, rows in step.prefetch(params, _cache_batches(start)):
            params, state, _ = step(params, state, ids, rows)
        cache.flush(params, state, step=start)
        yield


def _check_cached(folder, done, begun):
    """All rows are as they were at one flush: the last, or the one that was begun."""
    if not (folder / "table").exists():
        assert done == 0
        return 0
    store = _store(folder, path=folder / "table")
    rows, found = store.pull_all("t"), store.engine.tables["t"].flushed_step or 0
    store.close()
    assert found in (done, begun)
    expected = np.zeros((V, D), np.float32)
    for version in range(1, found + 1):
        np.add.at(expected, _cache_batches(version), 1)
    assert (rows == expected).all()
    return found


def _keyed(folder):
    store = sj.store.KVStore()
    policy = sj.store.KeyPolicy(admit_after=2)
    store.init("t", (3 * BATCH, D), TX, path=folder / "table", keys=policy)
    return store


def _keys_of(version):
    return np.arange((version - 1) * BATCH, version * BATCH) + 1


def _train_keys(folder, start):
    """Version k adds to the rows of its keys, which are new, the keys themselves."""
    store = _keyed(folder)
    while start < STEPS:
        start += 1
        keys = _keys_of(start)
        for _ in range(2):
            rows, _ = store.insert("t", keys, start)
        weights = store.pull_all("t")[rows]
        values = weights - np.repeat(keys[:, None], D, 1).astype(np.float32)
        store.push("t", sj.SelectedRows(rows, values, 3 * BATCH))
        yield


def _check_keys(folder, done, begun):
    """A key has its own weights or, if its push was not done, none."""
    if not (folder / "table").exists():
        assert done == 0
        return 0
    store = _keyed(folder)
    keys, rows = store.items("t")
    assert len({*keys.tolist()}) == len(keys) == store.stats()["t"].keys
    weights = store.pull_all("t")[rows]
    assert ((weights == keys[:, None]) | (weights == 0)).all()
    is_own = (weights == keys[:, None]).all(axis=1)
    if done:
        assert is_own[np.isin(keys, _keys_of(done))].sum() == BATCH
    store.close()
    return done


def _load(folder, start):
    """A saved store is loaded again and again into a mapped table."""
    if not (folder / "store").exists():
        store = _store(folder)
        for version in range(1, 20):
            _push(store, version)
        store.save(folder / "store")
    (folder / "table").unlink(missing_ok=True)
    store = _store(folder, path=folder / "table")
    while True:
        store.load(folder / "store")
        yield


def _check_loaded(folder, done, begun):
    """The table is as it was saved, or raises that it is half loaded."""
    if (folder / "table").exists():
        try:
            store = _store(folder, path=folder / "table")
        except ValueError as error:
            assert "half loaded" in str(error)
        else:
            rows = store.pull_all("t")[:, 0]
            assert (rows[: 19 * BATCH] == rows[0]).all() and not rows[
                19 * BATCH :
            ].any()
            store.close()
    return begun


def _follow(folder, start):
    """A trainer writes changes; a store in memory and one in a file apply them."""
    trainer, follower = _store(folder), _store(folder)
    if start:
        trainer.load(folder / "store")
    if (folder / "follower").exists():
        follower.load(folder / "follower")
    mapped = _mapped_follower(folder)
    if start:
        mapped.load(folder / "store")
    since = 0  # another run of the trainer begins
    while start < STEPS:
        start += 1
        _push(trainer, start)
        trainer.save(folder / "store")
        since = trainer.export_changes(folder / "changes", since=since)
        for store in (follower, mapped):
            store.apply_changes(folder / "changes")
            assert store.version == start
        follower.save(folder / "follower")
        yield


def _mapped_follower(folder):
    try:
        return _store(folder, path=folder / "table")
    except ValueError as error:
        assert "half loaded" in str(error)
    (folder / "table").unlink()
    return _store(folder, path=folder / "table")


def _check_followers(folder, done, begun):
    found = _check_saved(folder, done, begun)
    if (folder / "follower").exists():
        store = _store(folder)
        store.load(folder / "follower")
        for _ in range(2):  # all rows of its version, and of the version of the file
            assert store.version <= begun
            _check_rows(store, store.version, store.version)
            store.apply_changes(folder / "changes")
    else:
        assert done == 0
    if (folder / "table").exists():
        with _mapped_follower(folder) as store:
            count = int(store.pull_all("t")[:, 0].sum()) // BATCH
            assert count <= begun
            _check_rows(store, count, count)
    return found


KINDS: dict[str, tuple[Work, Check]] = {
    "replace": (_replace, _check_replaced),
    "create": (_create, _check_created),
    "save": (_save, _check_saved),
    "load": (_load, _check_loaded),
    "push": (_train, _check_mapped),
    "prefetch": (_prefetch, _check_mapped),
    "cache": (_cache, _check_cached),
    "keys": (_train_keys, _check_keys),
    "changes": (_follow, _check_followers),
}


# ------------------------------------------------------------------ killing


def _in_child(work: Callable[[], Any]) -> int:
    """Forks a child, which runs `work` and exits with 0 if it returns."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


class Victim:
    """A job that is killed again and again, in a folder of its own."""

    def __init__(self, kind: str, folder: pathlib.Path, rng: random.Random):
        self.kind, self.folder, self.rng = kind, folder, rng
        self.version = 0
        self.kills = 0

    def kill(self) -> None:
        """Starts a child, kills it, and checks its files."""
        work, check = KINDS[self.kind]
        start = self.version
        told, tell = os.pipe()

        def run():
            steps = work(self.folder, start)
            while True:
                os.write(tell, b"<")
                next(steps)
                os.write(tell, b">")

        child = _in_child(run)
        os.close(tell)
        marks = os.read(told, 1)
        # While the store is made, or from the first step on.
        if self.rng.random() < 0.8:
            marks += os.read(told, 1)
        time.sleep(
            self.rng.choice([0, self.rng.uniform(0, 0.02), self.rng.random() / 5])
        )
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        while more := os.read(told, 1 << 16):
            marks += more
        os.close(told)
        # A child that was through with all versions is not killed any more.
        assert os.WIFSIGNALED(status) or start + marks.count(b"<") >= STEPS, self.kind
        self.kills += 1
        self._check(check, start + marks.count(b">"), start + marks.count(b"<"))

    def _check(self, check: Check, done: int, begun: int) -> None:
        found, answer = os.pipe()

        def run():
            version = check(self.folder, done, begun)
            os.write(answer, version.to_bytes(8, "little"))

        child = _in_child(run)
        os.close(answer)
        content = os.read(found, 8)
        os.close(found)
        _, status = os.waitpid(child, 0)
        assert status == 0, (
            f"{self.kind}: version {done} or {begun} is not what is there"
        )
        self.version = int.from_bytes(content, "little")
        if self.version >= STEPS - 1:
            self.finish()
            self.version = 0

    def finish(self) -> None:
        """Goes one more step, checks the names in the folder, and empties it."""
        work, _ = KINDS[self.kind]
        start = min(self.version, STEPS - 1)
        child = _in_child(lambda: next(work(self.folder, start)))
        assert os.waitpid(child, 0)[1] == 0
        names = ("file", "store", "table", "changes", "follower")
        for path in self.folder.iterdir():  # a killed child leaves temporary files
            assert path.name in names or path.name.startswith(
                tuple(f".{name}." for name in names)
            ), path
        for path in self.folder.iterdir():
            path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--count", type=int, help="of kills, however long they take")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        victims = []
        for kind in given.kind or KINDS:
            own = pathlib.Path(folder, kind)
            own.mkdir()
            victims.append(Victim(kind, own, rng))
        seconds = given.seconds if given.count is None else math.inf
        until = time.monotonic() + seconds
        for k in range(given.count or 10**9):
            if time.monotonic() > until:
                break
            victims[k % len(victims)].kill()
        for victim in victims:
            victim.finish()
            print(f"{victim.kind:8} {victim.kills:4} kills")
    kills = sum(victim.kills for victim in victims)
    print(f"{kills} kills of seed {given.seed}, nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
