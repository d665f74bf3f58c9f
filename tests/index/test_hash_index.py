"""HashIndex: a vocabulary that grows and forgets, compared with a Python dict."""

import dataclasses
import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sparsejax as sj
from helpers import (
    assert_same_bits,
    assert_written_in_place,
    compile_as_users_do,
    slow_but,
)
from index_model import Model, check_state, check_step, compare, find, insert, words
from sparsejax._index import hash_index


INT64 = np.iinfo(np.int64)
LARGE = [INT64.max, INT64.min, 2**31, 2**32, -(2**31), 2**32 - 1, 2**63 - 7]
EXTREMES = [0, -1, 1, *LARGE]


# ------------------------------------------------------------------ a dict


@pytest.mark.parametrize("seed", slow_but([0, 11], 0))
def test_equals_a_dict(seed):
    """Streams that drift, on an index with a quarter of the rows they would need.

    32 bits and lru, then 64 bits and lfu; steps that pass 31 bits, then 32.
    """
    compare(seed, num_steps=60, size=64, capacity=50)


ROWS, BUCKETS = 20, 8


@functools.cache
def same_buckets():
    """24 keys that have the same two of the 8 buckets of an index of 20 rows."""
    keys = np.arange(-1_000, 1_000)
    two_buckets = jax.jit(hash_index._two_buckets, static_argnums=(1, 2))
    one, two = two_buckets(hash_keys(keys), BUCKETS, 0)
    pair = np.sort(np.stack([one, two]), axis=0)
    return keys[(pair[0] == 1) & (pair[1] == 2)][:24].tolist()


def hash_keys(keys):
    flat = np.asarray(sj.HashIndex.split_keys(keys))
    return tuple(jnp.asarray(flat[..., k]) for k in range(2))


KEYS = st.one_of(
    st.integers(-6, 6),
    st.sampled_from(EXTREMES),
    st.deferred(lambda: st.sampled_from(same_buckets())),
)


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    st.lists(
        st.tuples(st.lists(KEYS, min_size=8, max_size=8), st.integers(0, 1)),
        max_size=12,
    )
)
def test_nothing_is_lost_whatever_the_keys(steps):
    """All keys are accounted for, even if buckets overflow."""
    index, step = sj.HashIndex.create(ROWS, key_bits=64), 0
    known, last = {}, {}
    for keys, more in steps:
        step += more  # several inserts at one step
        before = int(index.num_refused)
        index, rows, evicted = insert(index, words(keys, 64), step)
        rows = dict(zip(keys, np.asarray(rows).tolist()))
        gone = [r for r in np.asarray(evicted).tolist() if r < ROWS]
        assert gone == sorted(set(gone))
        for row in gone:
            key = next(k for k, r in known.items() if r == row)
            assert last[key] < step and key not in rows
            del known[key]
        for key, row in rows.items():
            assert known.get(key, row) == row, "a key has moved"
        refused = sum(row == ROWS for row in rows.values())
        assert int(index.num_refused) - before == refused
        known |= {key: row for key, row in rows.items() if row < ROWS}
        last |= dict.fromkeys(keys, step)
        assert len(set(known.values())) == len(known) == int(index.num_keys)
    stored = dict(zip(*(x.tolist() for x in index.items())))
    assert stored == known
    others = [*EXTREMES, *range(-6, 7)]
    want = [known.get(key, ROWS) for key in others]
    np.testing.assert_array_equal(find(index, words(others, 64)), want)


def test_two_full_buckets_refuse_and_count():
    keys, rows = same_buckets(), []
    index = sj.HashIndex.create(ROWS, key_bits=64)
    for some in (keys[:8], keys[8:16], keys[16:]):
        index, found, _ = insert(index, words(some, 64), 0)
        rows += found.tolist()
    assert sorted(rows) == [*range(16), *[ROWS] * 8]
    assert int(index.num_refused) == 8 and int(index.num_keys) == 16


ADMITTING: dict[str, Any] = dict(key_bits=64, policy="lfu", admit_after=3)


@pytest.mark.slow
def test_old_sightings_fade():
    """Keys seen once each, many times as many as columns, are not admitted for that."""
    index = sj.HashIndex.create(1024, admit_after=2, max_evictions=0)
    keys = np.arange(12 * 512, dtype=np.int32).reshape(12, 512)
    for step in range(12):
        index, _, _ = insert(index, keys[step], step)
    # The sketch takes some of 6,144 keys seen once for another.
    assert int(index.num_keys) < 900
    index, rows, _ = insert(index, keys[-1], 12)
    assert int(index.num_refused) + np.sum(np.asarray(rows) < 1024) >= 512


# ------------------------------------------------------------------ the batch


def test_admission_after_k_sightings_and_order_in_a_batch():
    """In calls, not in occurrences; as exactly as a dict while keys are few."""
    rng = np.random.default_rng(0)
    index, other = (sj.HashIndex.create(16, **ADMITTING) for _ in range(2))
    model = Model(16, "lfu", admit_after=3)
    for step in range(30):
        keys = rng.integers(0, 24, 8)
        index = check_step(index, model, keys.tolist(), step)
        order = rng.permutation(8)
        given = words(keys[order], 64)
        other, rows, _ = insert(other, given, np.uint32(step))
        jax.tree.map(assert_same_bits, other, index)
        np.testing.assert_array_equal(rows, find(index, given))
    check_state(index, model, list(range(8)))
    assert model.waiting and model.evicted


def test_where_leaves_padding_out():
    index = sj.HashIndex.create(8)
    keys, mask = np.array([[5, -1], [-1, 6]], np.int32), np.eye(2, dtype=bool)
    index, rows, _ = insert(index, keys, 0, where=mask)
    assert rows.tolist() == [[0, 8], [8, 1]]
    assert index.items()[0].tolist() == [5, 6]
    # Known keys that are masked were not used.
    index, rows, _ = insert(index, keys, 3, where=~mask)
    assert index.last_step[:3].tolist() == [0, 0, 3]
    assert index.find(keys)[0, 0] == 0


@pytest.mark.parametrize("first", [0, 2**31 - 1, 2**32 - 3])
def test_steps_of_any_size(first):
    """The least recently used key goes, however the steps are given."""
    for way in (lambda s: s, np.int64, np.asarray, np.uint32, jnp.uint32):
        index = sj.HashIndex.create(8)
        for key, more in (10, 0), (20, 1), (10, 2), (30, 2):
            keys = np.arange(key, key + 4, dtype=np.int32)
            index, _, evicted = index.insert(keys, way(first + more))
        assert evicted.tolist() == [4, 5, 6, 7]
        assert index.find([10, 20]).tolist() == [0, 8]
        assert index.last_step.tolist() == [first + 2] * 8


def test_no_keys_at_all():
    index = sj.HashIndex.create(8)
    same, rows, evicted = index.insert([], 0)
    assert same is index and rows.shape == evicted.shape == (0,)
    assert index.find(np.zeros((0, 3), int)).shape == (0, 3)


@pytest.mark.slow
def test_max_evictions_and_window():
    """A call evicts at most that many, only from the window, and moves the window."""
    index = sj.HashIndex.create(12, max_evictions=2, window=4)
    for keys in np.arange(12, dtype=np.int32).reshape(4, 3):
        index, _, _ = insert(index, keys, 0)
    windows = []
    for step in range(1, 5):
        keys = np.arange(3, dtype=np.int32) + 100 * step
        index, rows, evicted = insert(index, keys, step)
        assert evicted.shape == (2,) and rows.tolist().count(12) == 1
        windows.append(evicted.tolist())
    assert windows == [[0, 1], [4, 5], [8, 9], [2, 3]]
    assert int(index.num_evicted) == 8 and int(index.num_refused) == 4
    full = sj.HashIndex.create(2, max_evictions=0)
    full, rows, evicted = insert(full, keys, 0)
    assert rows.tolist() == [0, 1, 2] and evicted.shape == (0,)


# ------------------------------------------------------------------ keys


def test_extreme_keys():
    keys, index = np.array(EXTREMES), sj.HashIndex.create(ROWS, key_bits=64)
    for some in (keys[:8], keys[-8:]):
        index, _, _ = insert(index, words(some, 64), 0)
    rows = index.find(keys)  # int64 of NumPy
    assert sorted(rows.tolist()) == list(range(10))
    assert dict(zip(*(x.tolist() for x in index.items()))) == dict(
        zip(EXTREMES, rows.tolist())
    )
    stored, used = index.keys_of(rows)
    assert used.all() and (sj.HashIndex.join_keys(stored) == keys).all()
    narrow, rows, _ = sj.HashIndex.create(8).insert([-1, 0, 2**31 - 1, -(2**31)], 0)
    assert rows.tolist() == [3, 0, 1, 2]
    assert narrow.find(np.array([2**32 - 1], np.uint32)) == narrow.find([-1]) == 3


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int8, np.int32, np.uint32])
def test_words_of_keys(dtype):
    limits = np.iinfo(dtype)
    keys = np.array([[0, 1, 5], [limits.max, limits.min, limits.max - 3]], dtype)
    split = sj.HashIndex.split_keys(keys)
    assert split.shape == (2, 3, 2) and split.dtype == np.uint32
    joined = sj.HashIndex.join_keys(split)
    assert (joined.astype(keys.dtype if keys.itemsize == 8 else np.int64) == keys).all()
    if keys.itemsize < 8:
        np.testing.assert_array_equal(sj.HashIndex.split_keys(jnp.asarray(keys)), split)


def test_keys_and_steps_of_64_bits_under_x64(x64):
    index, keys = sj.HashIndex.create(3, key_bits=64), jnp.array([3, -4, 2**40])
    for keys_, step in ([7, 8, 9], 0), ([7, 8, 9], 2**31), (keys, 2**32 - 1):
        keys_ = jnp.asarray(keys_, jnp.int64)
        index, rows, evicted = insert(index, keys_, np.int64(step))
    assert evicted.tolist() == [0, 1, 2]
    assert rows.tolist() == [0, 2, 1] and rows.dtype == jnp.int32
    split = sj.HashIndex.split_keys(keys)
    np.testing.assert_array_equal(split, sj.HashIndex.split_keys(np.asarray(keys)))
    np.testing.assert_array_equal(index.find(split), rows)


# ------------------------------------------------------------------ programs


@pytest.mark.slow
def test_in_place():
    index = sj.HashIndex.create(200_000, admit_after=2, max_evictions=16)
    keys = jnp.zeros((64,), jnp.int32)
    compiled = compile_as_users_do(insert.lower(index, keys, np.int32(0)))
    arrays = [x for x in jax.tree.leaves(index) if x.size > 1_000]
    assert len(arrays) == 5
    # The window has 4,096 rows.
    assert_written_in_place(compiled, arrays, 200_000)


OWNERS = 8


@jax.jit
def insert_mine(index, given):
    """Inserts the keys of an owner."""
    step, owner, keys = given
    mine = index.owners(keys, OWNERS) == owner
    index, rows, evicted = index.insert(keys, step, where=mine)
    return index, (rows, evicted, mine)


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("over", ["vmap", "shard_map"])
def test_one_index_for_each_owner_of_keys_in_a_scan(over):
    """Each inserts the keys that it owns, as one alone does."""
    count, steps = OWNERS, 12
    rng = np.random.default_rng(1)
    keys = rng.zipf(1.3, (steps, 24)) % 60 + np.arange(steps)[:, None]
    batches = sj.HashIndex.split_keys(keys * 7_919)

    def run(owner, index, batches):
        owners = jnp.broadcast_to(owner, steps)
        return lax.scan(insert_mine, index, (jnp.arange(steps), owners, batches))

    every: Any = jax.vmap(run, (0, 0, None))
    if over == "shard_map":
        mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,))
        specs: Any = dict(in_specs=(P("x"), P("x"), P()), out_specs=P("x"))
        first = lambda tree: jax.tree.map(lambda x: x[0], tree)
        of_first = lambda owner, index, keys: run(owner[0], first(index), keys)
        stacked = lambda *args: jax.tree.map(lambda x: x[None], of_first(*args))
        every = jax.shard_map(stacked, mesh=mesh, **specs)
    alone = sj.HashIndex.create(5, key_bits=64)
    empty = jax.tree.map(lambda x: np.stack([x] * count), alone)
    found = jax.jit(every)(np.arange(count), empty, batches)
    indexes, found = jax.device_get(found)
    assert f"{count} x 5 rows" in repr(indexes) and indexes.num_evicted.any()
    assert (found[-1].sum(axis=0) == 1).all()  # a key has one owner
    for owner in range(count):
        index = alone
        for step in range(steps):
            given = np.array(step), np.array(owner), batches[step]
            index, expected = insert_mine(index, given)
            for x, y in zip(found, expected, strict=True):
                np.testing.assert_array_equal(x[owner, step], y)
        jax.tree.map(lambda x, y, k=owner: assert_same_bits(x[k], y), indexes, index)


# ------------------------------------------------------------------ a tree


def test_an_index_prints():
    index = sj.HashIndex.create(8, key_bits=64, policy="lfu", admit_after=2)
    assert repr(index) == "HashIndex(0 of 8 rows, 64-bit keys, lfu, admit_after=2)"
    spec = jax.eval_shape(lambda: sj.HashIndex.create(8, max_evictions=3))
    assert repr(spec) == "HashIndex(? of 8 rows, 32-bit keys, lru, max_evictions=3)"
    assert dataclasses.is_dataclass(spec)
