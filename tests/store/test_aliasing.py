"""What the store leans on in JAX and XLA: buffers used in place, and one program.

The store gathers rows into NumPy buffers from a pool, which JAX's CPU device uses in
place. It counts on this:

1. JAX does not copy a buffer of the right alignment. (Else every pull and push copies
   its rows once more. Results stay right.)
2. JAX keeps the NumPy array alive as long as an array or a running program uses it, and
   so does a result that is made in its memory. (Else the memory returns to the pool too
   early, the next pull overwrites it, and training goes wrong without an error.)
3. The optimizer's program keeps the scatters that give the bits of `lazy` on the device
   and has no gather, which would keep XLA from vectorising the step.

Each test names what breaks if it fails with another jaxlib.
"""

import functools
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_same_bits, compile_as_users_do
from sparsejax.store import _memory, _prefetch, _table
from sparsejax.store._optimizer import Optimizer


pytestmark = pytest.mark.loose_promotion

V, D, C = 5000, 16, 4096  # C rows of D are 256 kB: large enough for the pool


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    """The free memory of the pool, by size; a pool of this test alone."""
    free = {}
    monkeypatch.setattr(_memory, "_pool", free)
    return free


def new_store(tx=None):
    weights = np.random.default_rng(0).standard_normal((V, D)).astype(np.float32)
    store = sj.store.KVStore()
    store.init("t", weights, tx)
    return store, weights


def address(x):
    is_jax = isinstance(x, jax.Array)
    return x.unsafe_buffer_pointer() if is_jax else x.ctypes.data


def is_free(pool, at):
    """Whether the byte at an address is in memory that the pool gives away next."""
    memories = [memory for free in pool.values() for memory in free]
    return any(x.ctypes.data <= at < x.ctypes.data + x.nbytes for x in memories)


def overwrite(pool):
    """Writes to all free memory, as later pulls and pushes would."""
    for free in pool.values():
        for memory in list(free):
            memory[:] = 255  # as float32: NaN


@pytest.fixture
def taken(monkeypatch):
    """The buffers that were taken from the pool, by address: no references."""
    found = []

    def record(shape, dtype):
        x = _memory.pooled_empty(shape, dtype)
        found.append(address(x))
        return x

    monkeypatch.setattr(_prefetch, "pooled_empty", record)
    monkeypatch.setattr(_table, "pooled_empty", record)
    return found


# ------------------------------------------------------------------ in place


def test_pulled_rows_are_not_copied(taken):
    """If this fails: each pull copies its rows once more than it has to."""
    store, weights = new_store()
    rows = store.pull("t", np.arange(C))
    assert address(rows.values) in taken
    assert_same_bits(rows.values, weights[:C])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, np.uint8])
@pytest.mark.parametrize("shape", [(C * 64,), (C, 64), (C, 3, 32)])
def test_device_put_takes_pooled_buffers_in_place(shape, dtype):
    """If this fails: each push copies rows and state once more than it has to."""
    x = _memory.pooled_empty(shape, dtype)
    x[...] = 1
    y = jax.device_put(x, jax.devices("cpu")[0])
    assert address(y) == address(x) and address(x) % 64 == 0
    assert (np.asarray(y) == 1).all()


def test_a_push_copies_what_it_writes_in_place_and_nothing_else(taken, tmp_path):
    """If rows are copied: each push is slower. If other state is not: JAX reads memory
    of the table, which the push writes to."""
    store = sj.store.KVStore()
    path = tmp_path / "table"  # mapped: state on pages of its own, aligned
    store.init("t", (V, D), optax.adam(0.1), path=path)
    table, arguments = store._tables["t"], []
    assert [address(x) % 64 for x in table.rest] == [0]

    def spy(layout, weights, by_row, rest, *others):
        arguments.append([[address(x) for x in [weights, *by_row]], address(rest[0])])
        return programs.update(layout, weights, by_row, rest, *others)

    assert table.optimizer is not None
    programs = table.optimizer._programs
    table.optimizer._programs = programs._replace(update=spy)
    store.push("t", sj.SelectedRows(np.arange(C), jnp.ones((C, D)), V))
    ((rows, rest),) = arguments
    assert {*rows} <= {*taken} and len(rows) == 3
    assert rest != address(table.rest[0]) and table.rest[0] == 1
    store.close()


def test_memory_is_used_again(pool, taken):
    """If this fails: the pool is of no use, and each pull clears fresh memory."""
    store, _ = new_store()
    for _ in range(5):
        rows = store.pull("t", np.arange(C))
        del rows
        gc.collect()
    values = taken[::2]  # values, then rows of each pull; those are too small to pool
    assert len(set(values)) <= 2
    assert is_free(pool, values[-1])


# ------------------------------------------------------------------ kept alive


@pytest.mark.slow
def test_memory_is_not_free_while_jax_has_it(pool):
    """If this fails: the next pull overwrites rows that a step still reads."""
    store, weights = new_store()
    rows = store.pull("t", np.arange(C))
    at = address(rows.values)
    holders = {
        "array": rows.values,
        "numpy": np.asarray(rows.values),
        "tree": jax.tree.map(lambda x: x, rows).values,
        "put": jax.device_put(rows.values, jax.devices("cpu")[0]),
        "jit": jax.jit(lambda x: x)(rows.values),  # a copy, or the same memory
        "reshaped": rows.values.reshape(-1, D),
    }
    assert {address(holders[name]) for name in ("array", "numpy", "tree")} == {at}
    del rows
    while holders:
        gc.collect()
        users = [name for name, x in holders.items() if address(x) == at]
        assert is_free(pool, at) == (not users), users
        overwrite(pool)
        for x in holders.values():
            assert_same_bits(x, weights[:C])
        del x
        holders.pop(next(iter(holders)))
    gc.collect()
    assert is_free(pool, at)


@pytest.mark.slow
def test_a_running_program_keeps_its_arguments(pool):
    """If this fails: rows change while the step that reads them runs."""
    store, weights = new_store()

    @jax.jit
    def slow(x):
        return x + jax.lax.fori_loop(0, 300, lambda _, y: jnp.sin(y + 1), x) * 0

    slow(jnp.zeros((C, D))).block_until_ready()  # compile
    for _ in range(5):
        out = slow(store.pull("t", np.arange(C)).values)
        gc.collect()
        overwrite(pool)  # while it runs
        assert_same_bits(out, weights[:C])


def test_donated_rows(pool):
    """If this fails: a result in donated memory is overwritten by the next pull."""
    store, weights = new_store()
    rows = store.pull("t", np.arange(C))
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    out = double(rows.values)
    del rows
    gc.collect()
    overwrite(pool)
    assert not is_free(pool, address(out))
    assert_same_bits(out, weights[:C] * 2)


def test_rows_that_were_handed_out_are_not_written_to():
    """Later pushes are forwarded to the batches that are still being prepared only."""
    store, weights = new_store(optax.sgd(1.0))
    out = []
    for _, rows in store.prefetch([np.arange(C)] * 4, lambda ids: ids, depth=2):
        out.append((rows.values, np.array(rows.values)))
        store.push("t", rows.map(jnp.ones_like))
    expected = weights[:C]
    for values, copy in out:
        assert_same_bits(values, copy)
        assert_same_bits(values, expected)
        expected = expected - 1


# ------------------------------------------------------------------ the program


@functools.cache
def compiled_step(name):
    tx = {"adam": optax.adam(0.1), "adagrad": optax.adagrad(0.1)}[name]
    optimizer = Optimizer(tx, (V, D), np.float32)
    rows = np.ones((C, D), np.float32)
    arguments = (
        rows,
        [rows for by_row in optimizer.by_row if by_row],
        [np.zeros((), np.int32) for by_row in optimizer.by_row if not by_row],
        np.arange(C, dtype=np.int32),
        np.zeros(2 * C, np.int32),
        np.ones((2 * C, D), np.float32),
    )
    lowered = optimizer._programs.update.lower(optimizer._layout, *arguments)
    return optimizer, compile_as_users_do(lowered)


@pytest.mark.parametrize("name", ["adam", "adagrad"])
def test_the_step_scatters_state_and_gathers_nothing(name):
    """If this fails: the bits of `lazy` are lost (scatters), or speed (a gather)."""
    optimizer, compiled = compiled_step(name)
    operations = re.findall(r"= \S+ ([\w-]+)\(", compiled.as_text())
    # One sums duplicates; then the weights and each leaf of state by row.
    assert operations.count("scatter") == 1 + 1 + sum(optimizer.by_row)
    assert "gather" not in operations and "dynamic-slice" not in operations


@pytest.mark.parametrize("name", ["adam", "adagrad"])
def test_the_step_does_not_write_to_its_arguments(name):
    """If this fails: the step changes NumPy's buffers, which it only borrows."""
    _, compiled = compiled_step(name)
    assert compiled.memory_analysis().alias_size_in_bytes == 0
