"""HashIndex as a Python dict: `python -m tests.tools.fuzz index`.

`Model` does what the docstring of `HashIndex` says, key by key, with sets and sorted
lists. `compare` runs both on a random stream whose keys drift.
"""

import jax
import jax.numpy as jnp
import numpy as np

import sparsejax as sj


class Model:
    """A HashIndex whose window is the whole index and whose sketch counts exactly."""

    def __init__(self, capacity, policy="lru", admit_after=1, max_evictions=None):
        self.capacity, self.policy = capacity, policy
        self.admit_after, self.max_evictions = admit_after, max_evictions
        self.rows, self.counts, self.last, self.sightings = {}, {}, {}, {}
        self.evicted = self.refused = self.waiting = 0

    def insert(self, keys, step):
        """The rows of keys (Python's ints), and those that were evicted."""
        for key in {*keys} & {*self.rows}:
            self.counts[key] += 1
            self.last[key] = step
        new = []
        for key in sorted({*keys} - {*self.rows}, key=lambda key: key % 2**64):
            self.sightings[key] = self.sightings.get(key, 0) + 1
            if self.sightings[key] >= self.admit_after:
                new.append(key)
            else:
                self.waiting += 1

        free = list(range(len(self.rows), self.capacity))
        most = len(keys) if self.max_evictions is None else self.max_evictions
        old = [key for key in self.rows if self.last[key] != step]
        order = {"lru": self._lru, "lfu": self._lfu}[self.policy]
        old = sorted(old, key=order)[: max(0, min(most, len(new) - len(free)))]
        evicted = sorted(self.rows[key] for key in old)
        for key in old:
            del self.rows[key]
        self.evicted += len(evicted)
        for key, row in zip(new, free + evicted):
            self.rows[key], self.counts[key], self.last[key] = row, 1, step
        self.refused += max(0, len(new) - len(free) - len(evicted))
        return [self.rows.get(key, self.capacity) for key in keys], evicted

    def _lru(self, key):
        return self.last[key], self.rows[key]

    def _lfu(self, key):
        return self.counts[key], self.last[key], self.rows[key]


insert = jax.jit(sj.HashIndex.insert, donate_argnums=0)
find = jax.jit(sj.HashIndex.find)


def words(keys, key_bits):
    """Keys as `insert` takes them under jit, without x64."""
    keys = np.asarray(keys, np.int64)
    if key_bits == 64:
        return jnp.asarray(sj.HashIndex.split_keys(keys))
    return jnp.asarray(keys.astype(np.int32))


def check_step(index, model, keys, step):
    """One insert by both; the new index."""
    given = words(keys, index.key_bits)
    index, rows, evicted = insert(index, given, np.uint32(step))
    want, gone = model.insert(keys, step)
    np.testing.assert_array_equal(rows, want)
    evicted = np.asarray(evicted)
    assert evicted[: len(gone)].tolist() == gone
    assert (evicted[len(gone) :] == model.capacity).all()
    return index


def check_state(index, model, others):
    """Compares the stored keys; other keys are not found."""
    keys, rows = index.items()
    assert dict(zip(keys.tolist(), rows.tolist())) == model.rows
    by_row = sorted(model.rows, key=model.rows.get)
    used = len(by_row)
    assert np.asarray(index.counts)[:used].tolist() == [model.counts[k] for k in by_row]
    last = np.asarray(index.last_step)[:used].tolist()
    assert last == [model.last[k] for k in by_row]
    assert int(index.num_keys) == used
    totals = index.num_evicted, index.num_refused, index.num_waiting
    assert tuple(map(int, totals)) == (model.evicted, model.refused, model.waiting)
    want = [model.rows.get(key, model.capacity) for key in others]
    found = find(index, words(others, index.key_bits))
    np.testing.assert_array_equal(found, want)


def stream(rng, num_steps, size, key_bits):
    """Batches of Zipf keys over a window that drifts, spread over all bits."""
    spread = np.uint64(0x9E3779B97F4A7C15)
    for step in range(num_steps):
        keys = (rng.zipf(1.2, size) % 5_000 + 3 * step).astype(np.uint64)
        keys = (keys * spread).view(np.int64)
        yield (keys if key_bits == 64 else keys.astype(np.int32)).tolist()


def compare(seed, num_steps=500, size=256, capacity=1_000):
    """Runs both on one stream; how many keys were inserted or found."""
    rng = np.random.default_rng(seed)
    key_bits, policy = (32, 64)[seed % 2], ("lru", "lfu")[seed // 2 % 2]
    most = (None, 40)[seed // 4 % 2]
    index = sj.HashIndex.create(
        capacity, key_bits=key_bits, policy=policy, max_evictions=most, seed=seed
    )
    model = Model(capacity, policy, max_evictions=most)
    # Steps that pass from 31 to 32 bits, and the last ones.
    first = (2**31 - 20, 0, 2**32 - num_steps)[seed % 3]
    keys = []
    for step, keys in enumerate(stream(rng, num_steps, size, key_bits), first):
        index = check_step(index, model, keys, step)
        if (step - first) % 50 == 0:
            check_state(index, model, rng.permutation(keys).tolist())
    check_state(index, model, keys)
    return {"operations, equal": num_steps * size}
