"""Changes of a store as plain dicts: `python -m tests.tools.fuzz changes`.

A trainer store with a table of ids and a table of keys is trained at random: pushes,
assigned rows, new keys that evict others. It writes files of changes since random
versions, saves itself, and is restarted from its last save, or from an older one. Two
followers, one with the optimizer state and one without, apply files in random order,
and are restarted as well. `Model` has the rows of each version as dicts; after each
step the store of that step must be equal to its dict, and a file that does not fit must
be refused with nothing changed.
"""

import collections
import copy
import itertools
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
import optax

import index_model
import sparsejax as sj


V, HEIGHT, D = 60, 12, 2  # rows of both tables
POOL = 30  # keys
TX = optax.sgd(0.5, momentum=0.5)
RUNS = itertools.count(1)


def new_store(trains=True):
    store = sj.store.KVStore()
    tx = TX if trains else None
    ones = jax.nn.initializers.ones
    store.init("items", (V, D), tx)
    policy = sj.store.KeyPolicy(window=HEIGHT)
    store.init("users", (HEIGHT, D), tx, initializer=ones, keys=policy)
    return store


class Model:
    """The rows that a trainer should have, and when each last changed."""

    def __init__(self):
        self.version = 0
        self.weights = {"items": {}, "users": {}}  # by row: weights and momentum
        self.keys = index_model.Model(HEIGHT)
        self.changed_at = {"items": {}, "users": {}}
        self.run, self.is_loaded = 0, True  # the next change begins a run
        self.known_since = 0

    def advance(self):
        if self.is_loaded:
            self.run, self.is_loaded = next(RUNS), False
        self.version += 1

    def loaded(self):
        """A store that loaded a save of this one."""
        model = copy.deepcopy(self)
        model.is_loaded, model.known_since = True, model.version
        return model

    def change(self, name, rows):
        self.changed_at[name] |= dict.fromkeys(rows, self.version)

    def push(self, name, rows, values):
        self.advance()
        total = {}
        for row, value in zip(rows, values):
            total[row] = total.get(row, 0) + value
        start = 1.0 if name == "users" else 0.0
        for row, value in total.items():
            old, trace = self.weights[name].get(row, (np.full(D, start), np.zeros(D)))
            trace = value + 0.5 * trace
            self.weights[name][row] = old - 0.5 * trace, trace
        self.change(name, total)

    def assign(self, name, rows, values):
        self.advance()
        for row, value in zip(rows, values):
            _, trace = self.weights[name].get(row, (0, np.zeros(D)))
            self.weights[name][row] = value, trace
        self.change(name, rows)

    def insert(self, keys, step):
        self.advance()
        rows, evicted = self.keys.insert(keys, step)
        for row in evicted:
            self.weights["users"].pop(row, None)
        self.change("users", {row for row in rows if row != HEIGHT} | {*evicted})
        return rows

    def dense(self, name, part):
        start = 1.0 if name == "users" and part == 0 else 0.0
        out = np.full((V if name == "items" else HEIGHT, D), start, np.float32)
        for row, columns in self.weights[name].items():
            out[row] = columns[part]
        return out


def check_store(store, model, with_state):
    """Compares all rows, their momentum and all keys."""
    for name in ("items", "users"):
        np.testing.assert_array_equal(store.pull_all(name), model.dense(name, 0))
        if with_state:
            (trace,) = store.engine.tables[name].by_row
            np.testing.assert_array_equal(trace, model.dense(name, 1))
    keys, rows = store.items("users")
    assert dict(zip(keys.tolist(), rows.tolist())) == model.keys.rows
    found = store.find("users", np.arange(POOL))
    want = [model.keys.rows.get(key, HEIGHT) for key in range(POOL)]
    assert found.tolist() == want
    if with_state:
        index = store.engine.tables["users"].keys
        assert index.last_step[rows].tolist() == [model.keys.last[k] for k in keys]
        assert index.counts[rows].tolist() == [model.keys.counts[k] for k in keys]


class Follower:
    """A store that applies files, and the model that it should be equal to."""

    def __init__(self, with_state):
        self.with_state = with_state
        self.restart(None, Model())

    def restart(self, path: Any, model: Model):
        self.store, self.model = new_store(self.with_state), model
        if path is not None:
            self.store.load(path)
        check_store(self.store, self.model, self.with_state)

    def apply(self, path, since, model):
        """Applies a file of `model`, or is refused."""
        mine = self.model
        is_same = mine.run == model.run and mine.version > 0
        is_old = not model.version or (is_same and model.version <= mine.version)
        fits = is_same or not mine.version
        replaces = not fits and since == 0 and not is_old
        if not replaces and not is_old and (not fits or since > mine.version):
            try:
                self.store.apply_changes(path)
            except ValueError:
                check_store(self.store, mine, self.with_state)
                return "refused"
            raise AssertionError("a file that does not fit was applied")
        changes = self.store.apply_changes(path)
        if is_old:
            assert not any(x.rows.size for x in changes.values())
            check_store(self.store, mine, self.with_state)
            return "old"
        for name, found in changes.items():
            changed = model.changed_at[name].items()
            want = {row for row, version in changed if version > since}
            found = found.rows.tolist()
            if replaces or since < model.known_since:  # and all that were known
                assert {*found} >= want and found == sorted({*found})
            else:
                assert found == sorted(want), (name, found, want)
        gone = sorted({*mine.keys.rows} - {*model.keys.rows})
        assert changes["users"].evicted.tolist() == gone
        assert self.store.version == model.version
        self.model = model
        check_store(self.store, model, self.with_state)
        return "replaced" if replaces else "applied"


def compare(seed, steps=1_000):
    """Runs one random sequence; the number of files by what became of them."""
    rng = np.random.default_rng(seed)
    outcomes = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        trainer, model = new_store(), Model()
        saves = []  # models, by number of the file
        files = []  # (path, since, model)
        followers = [Follower(True), Follower(False)]

        def save():
            path = folder / f"save {len(saves)}"
            trainer.save(path)
            saves.append(copy.deepcopy(model))
            return path

        for step in range(steps):
            kind = rng.choice(
                ["push", "users", "assign", "export", "apply", "save", "restart"],
                p=[0.22, 0.22, 0.06, 0.18, 0.29, 0.02, 0.01],
            )
            size = int(rng.integers(1, 6))
            values = rng.integers(-4, 5, (size, D)).astype(np.float32)
            if kind == "push":
                rows = rng.integers(0, V, size)
                trainer.push("items", sj.SelectedRows(rows, values, V))
                model.push("items", rows.tolist(), values)
            elif kind == "assign":
                rows = rng.permutation(V)[:size]
                trainer.assign("items", sj.SelectedRows(rows, values, V))
                model.assign("items", rows.tolist(), values)
            elif kind == "users":
                keys = rng.integers(0, POOL, size)
                rows, _ = trainer.insert("users", keys, step)
                assert rows.tolist() == model.insert(keys.tolist(), step)
                if rng.random() < 0.7:
                    trainer.push("users", sj.SelectedRows(rows, values, HEIGHT))
                    kept = rows < HEIGHT
                    model.push("users", rows[kept].tolist(), values[kept])
            elif kind == "export":
                # Mostly what a follower needs, with more or less than that.
                since = followers[int(rng.integers(2))].model.version
                since = int(np.clip(since + rng.integers(-3, 2), 0, model.version))
                since = since if rng.random() < 0.9 else 0
                since = 0 if since < model.known_since else since
                now = max(since, model.known_since)
                for name, found in trainer.changed_since(now).items():
                    changed = model.changed_at[name].items()
                    want = sorted(row for row, version in changed if version > now)
                    assert found.tolist() == want
                for follower in followers:
                    state = follower.with_state
                    path = folder / f"changes {len(files)}"
                    assert model.version == trainer.export_changes(
                        path, since=since, state=state
                    )
                    entry = path, since, copy.deepcopy(model)
                    files.append((*entry, state))
                check_store(trainer, model, True)
            elif kind == "apply" and files:
                follower = followers[int(rng.integers(2))]
                own = [x[:3] for x in files if x[3] == follower.with_state]
                recent = own[-1 - min(int(rng.geometric(0.6)) - 1, len(own) - 1)]
                found = follower.apply(*recent)
                outcomes[found] += 1
                if found == "refused" and rng.random() < 0.2:
                    if follower.with_state:
                        follower.restart(save(), model.loaded())
                    else:  # it cannot read the state in a saved store
                        trainer.export_changes(folder / "all", since=0)
                        now = copy.deepcopy(model)
                        follower.apply(folder / "all", 0, now)
                elif rng.random() < 0.1 and found in ("applied", "replaced"):
                    follower.store.save(folder / "own")
                    follower.restart(folder / "own", follower.model.loaded())
            elif kind == "save":
                save()
            elif kind == "restart" and saves:
                number = (
                    len(saves) - 1 if rng.random() < 0.5 else rng.integers(len(saves))
                )
                trainer, model = new_store(), saves[number].loaded()
                trainer.load(folder / f"save {number}")
                check_store(trainer, model, True)
    return outcomes
