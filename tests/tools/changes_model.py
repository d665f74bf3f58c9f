"""Changes of a store as arrays: `python -m tests.tools.fuzz changes`.

A trainer store with a table of ids and a table of keys is trained at random: pushes,
assigned rows, new keys that evict others. It writes files of changes since random
versions, saves itself, and is restarted from its last save, or from an older one. Two
followers, one with the optimizer state and one without, apply files in random order,
and are restarted as well. `Model` has all rows of each version; after each step the
store of that step must be equal to it, and a file that does not fit must be refused
with nothing changed.
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
        self.version = self.known_since = self.run = 0
        self.is_loaded = True  # the next change begins a run
        items, users = np.zeros((V, D), np.float32), np.ones((HEIGHT, D), np.float32)
        self.weights = {"items": items, "users": users}
        self.traces = {name: 0 * x for name, x in self.weights.items()}
        self.changed_at = {name: np.zeros(len(x)) for name, x in self.weights.items()}
        self.keys = index_model.Model(HEIGHT)

    def loaded(self):
        """A store that loaded a save of this one."""
        model = copy.deepcopy(self)
        model.is_loaded, model.known_since = True, model.version
        return model

    def changed_since(self, name, version):
        return np.flatnonzero(self.changed_at[name] > version).tolist()

    def _change(self, name, rows):
        if self.is_loaded:
            self.run, self.is_loaded = next(RUNS), False
        self.version += 1
        self.changed_at[name][rows] = self.version

    def push(self, name, rows, values):
        weights, trace = self.weights[name], self.traces[name]
        total = np.zeros_like(weights)
        np.add.at(total, rows, values)
        rows = np.unique(rows)
        trace[rows] = total[rows] + 0.5 * trace[rows]
        weights[rows] -= 0.5 * trace[rows]
        self._change(name, rows)

    def assign(self, name, rows, values):
        self.weights[name][rows] = values
        self._change(name, rows)

    def insert(self, keys, step):
        rows, evicted = self.keys.insert(keys, step)
        self.weights["users"][evicted], self.traces["users"][evicted] = 1, 0
        self._change("users", [*{*rows, *evicted} - {HEIGHT}])
        return rows


def check_store(store, model, with_state):
    """Compares all rows, their momentum and all keys."""
    tables = store.engine.tables
    for name, weights in model.weights.items():
        np.testing.assert_array_equal(store.pull_all(name), weights)
        if with_state:
            (trace,) = tables[name].by_row
            np.testing.assert_array_equal(trace, model.traces[name])
    keys, rows = store.items("users")
    assert dict(zip(keys.tolist(), rows.tolist())) == model.keys.rows
    expected = [model.keys.rows.get(key, HEIGHT) for key in range(POOL)]
    assert store.find("users", np.arange(POOL)).tolist() == expected
    if with_state:
        index = tables["users"].keys
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
        check_store(self.store, model, self.with_state)

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
            expected, rows = model.changed_since(name, since), found.rows.tolist()
            if replaces or since < model.known_since:  # and all that were known
                assert {*rows} >= {*expected} and rows == sorted({*rows})
            else:
                assert rows == expected, (name, rows, expected)
        gone = sorted({*mine.keys.rows} - {*model.keys.rows})
        assert changes["users"].evicted.tolist() == gone
        assert self.store.version == model.version
        self.model = model
        check_store(self.store, model, self.with_state)
        return "replaced" if replaces else "applied"


def compare(seed, steps=1_000):
    """Runs one random sequence; the number of files by what became of them."""
    with tempfile.TemporaryDirectory() as folder:
        return _compare(np.random.default_rng(seed), steps, pathlib.Path(folder))


def _compare(rng, steps, folder):
    outcomes = collections.Counter()
    trainer, model = new_store(), Model()
    saves = []  # models, by number of the file
    followers = Follower(True), Follower(False)
    files = {follower: [] for follower in followers}  # (path, since, model)

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
        follower = followers[int(rng.integers(2))]
        if kind == "push":
            rows = rng.integers(0, V, size)
            trainer.push("items", sj.SelectedRows(rows, values, V))
            model.push("items", rows, values)
        elif kind == "assign":
            rows = rng.permutation(V)[:size]
            trainer.assign("items", sj.SelectedRows(rows, values, V))
            model.assign("items", rows, values)
        elif kind == "users":
            keys = rng.integers(0, POOL, size)
            rows, _ = trainer.insert("users", keys, step)
            assert rows.tolist() == model.insert(keys.tolist(), step)
            if rng.random() < 0.7:
                trainer.push("users", sj.SelectedRows(rows, values, HEIGHT))
                model.push("users", rows[rows < HEIGHT], values[rows < HEIGHT])
        elif kind == "export":
            # Mostly what a follower needs, with more or less than that.
            since = follower.model.version + rng.integers(-3, 2)
            since = int(np.clip(since, 0, model.version))
            if since < model.known_since or rng.random() < 0.1:
                since = 0
            known = max(since, model.known_since)
            for name, rows in trainer.changed_since(known).items():
                assert rows.tolist() == model.changed_since(name, known)
            for each in followers:
                path = folder / f"changes {step} {each.with_state}"
                state = each.with_state
                version = trainer.export_changes(path, since=since, state=state)
                assert version == model.version
                files[each].append((path, since, copy.deepcopy(model)))
            check_store(trainer, model, True)
        elif kind == "apply" and files[follower]:
            own = files[follower]
            found = follower.apply(*own[-min(int(rng.geometric(0.6)), len(own))])
            outcomes[found] += 1
            if found == "refused" and rng.random() < 0.2:
                if follower.with_state:
                    follower.restart(save(), model.loaded())
                else:  # it cannot read the state in a saved store
                    trainer.export_changes(folder / "all", since=0)
                    follower.apply(folder / "all", 0, copy.deepcopy(model))
            elif rng.random() < 0.1 and found in ("applied", "replaced"):
                follower.store.save(folder / "own")
                follower.restart(folder / "own", follower.model.loaded())
        elif kind == "save":
            save()
        elif kind == "restart" and saves:
            number = len(saves) - 1 if rng.random() < 0.5 else rng.integers(len(saves))
            trainer, model = new_store(), saves[number].loaded()
            trainer.load(folder / f"save {number}")
            check_store(trainer, model, True)
    return outcomes
