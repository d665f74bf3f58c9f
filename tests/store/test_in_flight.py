"""KVStore.prefetch: the bits of pulling each batch when it is used."""

import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_same_bits, run_python
from oracle import workers


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D = 50, 4
CAPACITY = 16


# One object for all stores, so that its programs are compiled once.
TX = optax.adagrad(0.1), optax.adam(0.1)
NORMAL = jax.nn.initializers.normal(0.1)


def new_store(tables=("a",)):
    store = sj.store.KVStore()
    for k, name in enumerate(tables):
        store.init(name, (V, D), TX[k], initializer=NORMAL, key=k)
    return store


@jax.jit
def gradient(rows):
    return rows.map(lambda v: jnp.sin(v * 3) + 0.1)


def schedule(rng, tables):
    """Batches of ids that overlap heavily, and random numbers for `take_step`."""
    for _ in range(12):
        ids = {
            name: rng.zipf(1.3, rng.integers(0, CAPACITY)) % V
            for name in tables
            if rng.random() < 0.8
        }
        yield ids, rng.random(4)


def take_step(store, dice, pulled):
    """Pushes once in most steps, and else twice, never, or other rows."""
    for name, rows in pulled.items():
        if dice[0] < 0.85:
            store.push(name, gradient(rows))
        if dice[1] < 0.2:
            store.push(name, [gradient(rows), gradient(rows)])  # their sum
        if dice[2] < 0.2:  # rows that were not pulled
            others = np.array([0, 1, V - 1])
            store.push(name, sj.SelectedRows(others, jnp.ones((3, D)), V))
        if dice[3] < 0.1:
            store.pull(name, np.arange(5), capacity=8)


@pytest.mark.parametrize("depth", [1, 0, 3])
def test_prefetched_is_synchronous_bit_by_bit(depth):
    for seed in range(4):
        tables = ("a", "b")[: 1 + seed % 2]
        batches = [*schedule(np.random.default_rng(seed), tables)]
        one, other = new_store(tables), new_store(tables)
        ids_of = lambda batch: batch[0]
        ahead = other.prefetch(batches, ids_of, depth=depth, capacity=CAPACITY)
        for (ids, dice), (batch, pulled) in zip(batches, ahead, strict=True):
            assert batch[0] is ids
            expected = {n: one.pull(n, i, capacity=CAPACITY) for n, i in ids.items()}
            jax.tree.map(assert_same_bits, pulled, expected)
            take_step(one, dice, expected)
            take_step(other, dice, pulled)
        for name in tables:
            assert_same_bits(one.pull_all(name), other.pull_all(name))
            assert one.stats()[name].touched_rows == other.stats()[name].touched_rows
    assert not workers()


def test_rows_are_read_while_the_step_runs():
    store, taken = new_store(), []

    def batches():
        for k in range(4):
            taken.append(k)
            yield np.arange(k, k + 3)

    for k, (_, rows) in enumerate(store.prefetch(batches(), lambda ids: ids)):
        assert taken == list(range(min(k + 2, 4)))  # one batch ahead
        store.stats()  # stands in line behind the early reads
        assert store.stats()["a"].pulls == len(taken)
        assert rows.num_rows() == 3
    assert not workers()


def test_push_does_not_wait_for_the_device():
    """Nor does a loop inside of the loop, which pushes nothing."""
    store, start = new_store(), new_store().pull_all("a")
    ahead = store.prefetch([[1, 2], [2, 3]], np.array)
    _, rows = next(ahead)
    for _, seen in store.prefetch([[1, 2], [2, 3]], np.array, depth=2):
        assert seen.capacity == 8
    with store.engine.queue._working:  # the worker stands still
        store.push("a", gradient(rows))
    assert_same_bits(store.pull("a", [2]).values[0], store.pull_all("a")[2])
    _, rows = next(ahead)
    assert (np.asarray(rows.values[0]) != start[2]).all()
    ahead.close()
    assert not workers()


def test_stopping_early_ends_the_thread():
    store = new_store()
    for _, rows in store.prefetch(iter([[1], [2], [3]]), np.array):
        store.push("a", gradient(rows))
        break
    gc.collect()
    assert not workers()
    assert store.stats()["a"].pushes == 1
    ahead = store.prefetch([[1], [2]], np.array)
    next(ahead)
    assert workers()
    store.push("a", gradient(rows))
    ahead.close()
    assert not workers() and store.stats()["a"].pushes == 2
    unused = store.prefetch([[1]], np.array)  # never started: no thread
    assert not workers()
    del unused


def test_other_changes_inside_of_a_loop(tmp_path):
    """A batch that was read ahead has the rows that were loaded or assigned since."""
    store = new_store()
    store.save(tmp_path / "first")
    start = store.pull_all("a")
    ahead = store.prefetch([[1, 2], [1, 2, 3], [2, 3]], np.array)
    _, rows = next(ahead)
    store.push("a", gradient(rows))
    store.load(tmp_path / "first")
    _, rows = next(ahead)
    assert_same_bits(rows.values[:3], start[1:4])
    store.assign("a", sj.SelectedRows([3, 2], jnp.ones((2, D)), V))
    _, rows = next(ahead)
    assert (rows.values[:2] == 1).all()
    ahead.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_errors_come_in_their_turn(depth):
    store = new_store()

    def batches():
        yield [1]
        yield [2]
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        for batch, _ in store.prefetch(batches(), np.array, depth=depth):
            seen.append(batch)
    assert seen == [[1], [2]]
    with pytest.raises(ValueError, match="1 of 1 ids .* the first is 50"):
        for batch, _ in store.prefetch([[3], [V], [4]], np.array, depth=depth):
            seen.append(batch)
    with pytest.raises(ZeroDivisionError):
        for batch, _ in store.prefetch([[5], [0]], lambda batch: [5 // batch[0]]):
            seen.append(batch)
    assert seen == [[1], [2], [3], [5]]
    assert not workers()
    assert store.pull("a", [1]).capacity == 8
    both = new_store(("a", "b"))
    ids_of = lambda batch: {"a": [1, 2], "b": [V]}  # read in this order
    with pytest.raises(ValueError, match="out of range"):
        next(both.prefetch([0], ids_of, depth=depth))
    assert not any(both.engine.tables[name].in_flight for name in ("a", "b"))


def test_an_error_of_a_push_comes_with_the_next_call():
    store = new_store()
    ahead = store.prefetch([[1], [2]], np.array)
    _, rows = next(ahead)
    grad = gradient(rows)
    before = store.pull_all("a")
    grad.values.delete()  # as donating it would
    store.push("a", grad)
    with pytest.raises(RuntimeError, match="deleted"):
        for _ in range(6_000):
            store.pull("a", [1])
            time.sleep(0.01)
    assert_same_bits(store.pull_all("a"), before)
    next(ahead)
    ahead.close()


def test_a_capacity_of_each_table():
    store, capacity = new_store(("a", "b")), {"a": 2, "b": 4}
    ids_of = lambda ids: {"a": ids, "b": ids}
    _, rows = next(store.prefetch([[1]], ids_of, capacity=capacity))
    assert {name: r.capacity for name, r in rows.items()} == capacity
    with pytest.raises(KeyError, match="no table 'v'"):
        store.prefetch([], np.array, capacity={"v": 4})


@pytest.mark.usefixtures("eight_devices")
def test_types_of_the_calling_thread(x64):
    store = sj.store.KVStore()
    store.init("a", np.zeros((V, D)), optax.sgd(1.0))
    with jax.default_device(jax.devices()[1]):
        for _, rows in store.prefetch([jnp.array([1, 2])], lambda ids: ids):
            assert rows.dtype == jnp.float64
            assert rows.values.devices() == {jax.devices()[1]}
            store.push("a", rows.map(jnp.ones_like))
    assert store.pull_all("a").sum() == -2 * D


LEFT_OPEN = """
import os
import numpy as np, optax, sparsejax as sj

os.dup2(1, 2)
store, tx = sj.store.KVStore(), optax.sgd(1.0)
for name in ("a", "b"):
    store.init(name, (50, 4), tx)
ahead = store.prefetch([np.arange(3)] * 5, lambda ids: {"a": ids})
next(ahead)
cache = sj.store.CachedTable(store, "b", 9)
step = store.train_step(lambda p, ids: p[ids].sum(), sj.optim.lazy(tx))
cached = step.prefetch(cache.table, [np.arange(3)] * 5)
next(cached)
"""


@pytest.mark.slow
def test_a_program_may_end_within_the_loop():
    """Python closes the iterators when half of its modules are gone."""
    assert run_python("-c", LEFT_OPEN) == ""
