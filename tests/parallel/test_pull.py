"""A store's rows for many devices, and a store spread over processes."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false

import contextlib
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import pull_worker as worker
import sparsejax as sj
from helpers import assert_same_bits


# The store runs optax, which relies on implicit promotion.
pytestmark = [pytest.mark.multidevice, pytest.mark.loose_promotion]

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
TIMEOUT = 120  # seconds; it takes about ten


def make_store():
    store = sj.store.KVStore()
    store.init("t", worker.initial(), worker.transformation())
    return store


def assert_same_rows(found, expected):
    assert found.height == expected.height
    assert_same_bits(found.rows, expected.rows)
    assert_same_bits(found.values, expected.values)


# ------------------------------------------------------------------ one process


def test_one_pull_for_all_devices():
    mesh, store, other = worker.make_mesh(), make_store(), make_store()
    ids = np.array([9, 3, 9, 500, 3, 7, 9, 1000], np.int32)
    expected = other.pull("t", ids)
    split = jax.device_put(ids, NamedSharding(mesh, P("x")))
    for given in (ids, split, [jnp.asarray(part) for part in np.split(ids, 4)]):
        before = store.stats()["t"]
        found = sj.parallel.batched_pull(store, "t", given, mesh)
        assert_same_rows(found, expected)
        for leaf in jax.tree.leaves(found):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P()), leaf.ndim)
            for shard in leaf.addressable_shards:
                assert_same_bits(shard.data, leaf)
        after = store.stats()["t"]
        assert after.pulls - before.pulls == 1
        assert after.pulled_rows - before.pulled_rows == 5  # each row once
    exact = sj.parallel.batched_pull(store, "t", ids, mesh, capacity=5)
    assert exact.rows.tolist() == [3, 7, 9, 500, 1000]
    dropped = sj.parallel.batched_pull(store, "t", [-1, 4], mesh, mode="drop")
    assert_same_rows(dropped, other.pull("t", [4]))


def train_alone(store, pull):
    for ids, targets in worker.batches():
        store.push("t", worker.gradient(pull(ids), ids, targets))


@pytest.fixture(scope="module")
def trained():
    """The table that one device trains from a KVStore."""
    with jax.numpy_dtype_promotion("standard"):
        store = make_store()
        train_alone(store, lambda ids: store.pull("t", ids))
        return store.pull_all("t")


@pytest.mark.slow
def test_training_over_a_mesh_equals_one_device(trained):
    mesh = worker.make_mesh()
    split = NamedSharding(mesh, P("x"))
    spread = sj.parallel.SpreadStore(mesh)
    spread.init("t", worker.initial(), worker.transformation())
    store = make_store()
    for ids, targets in worker.batches():
        ids, targets = jax.device_put((ids, targets), split)
        table = sj.parallel.batched_pull(store, "t", ids, mesh)
        store.push("t", worker.gradient(table, ids, targets))
        table = spread.pull("t", ids)
        spread.push("t", worker.gradient(table, ids, targets))
    np.testing.assert_allclose(store.pull_all("t"), trained, rtol=1e-5, atol=1e-6)
    assert_same_bits(spread.local.pull_all("t"), store.pull_all("t"))


def test_first_rows_and_options_of_a_spread_store():
    mesh = worker.make_mesh()
    normal = jax.nn.initializers.normal(1.0)
    spread, store = sj.parallel.SpreadStore(mesh), sj.store.KVStore()
    for x in (spread, store):
        x.init("t", (50, 3), optax.sgd(0.1), initializer=normal, key=3)
    assert_same_rows(spread.pull("t", [[7, 2], [7, 49]]), store.pull("t", [2, 7, 49]))
    empty = spread.pull("t", np.zeros(0, np.int32))
    assert int(empty.num_rows()) == 0 and empty.shape == (50, 3)


def test_errors():
    mesh, store = worker.make_mesh(), make_store()
    pull = sj.parallel.batched_pull
    with pytest.raises(TypeError, match="store must be a sparsejax.store.KVStore"):
        pull({}, "t", [1], mesh)
    with pytest.raises(TypeError, match="batched_pull: mesh must be a jax.sharding"):
        pull(store, "t", [1], "x")
    with pytest.raises(KeyError, match="there is no table 'u'"):
        pull(store, "u", [1], mesh)
    with pytest.raises(ValueError, match="1 of 2 ids for table 't' are out of range"):
        pull(store, "t", [1, worker.HEIGHT], mesh)
    with pytest.raises(ValueError, match="do not fit in capacity=1"):
        pull(store, "t", [1, 2], mesh, capacity=1)
    spread = sj.parallel.SpreadStore(mesh)
    with pytest.raises(KeyError, match="SpreadStore.pull: there is no table 't'"):
        spread.pull("t", [1])
    spread.init("t", (9, 2), optax.sgd(0.1))
    with pytest.raises(ValueError, match="are out of range"):
        spread.pull("t", [9])
    with pytest.raises(TypeError, match="must be a SelectedRows, got a float32"):
        spread.push("t", jnp.ones((9, 2)))
    with pytest.raises(ValueError, match="height 9, .* of 't', got 8"):
        spread.push("t", sj.SelectedRows([1], jnp.ones((1, 2)), 8))


# ------------------------------------------------------------------ two processes


def _free_port():
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _run_both(directory):
    """Runs the two processes; shows what they said if one fails or does not end."""
    port = _free_port()
    running = [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / "pull_worker.py"),
                *map(str, (port, process, directory)),
            ],
            env={**worker.os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(worker.PROCESSES)
    ]
    said = []
    try:
        said += [process.communicate(timeout=TIMEOUT)[0] for process in running]
    except subprocess.TimeoutExpired:
        said.append(f"no end after {TIMEOUT} seconds")
    finally:
        for process in running:
            process.kill()  # which does nothing to one that has ended
            said.append(process.communicate()[0] if process.stdout else "")
    codes = [process.returncode for process in running]
    assert codes == [0] * len(running), "\n\n".join(map(str, [codes, *said]))


@pytest.mark.slow
def test_two_processes_equal_one(trained, tmp_path):
    _run_both(tmp_path)
    parts = [np.load(tmp_path / f"{k}.npz") for k in range(worker.PROCESSES)]
    asked = [np.unique(ids) for ids, _ in worker.batches()]
    for k, part in enumerate(parts):
        assert int(part["rows"]) == len(range(k, worker.HEIGHT, worker.PROCESSES))
        own = trained[k :: worker.PROCESSES]
        np.testing.assert_allclose(part["part"], own, rtol=1e-5, atol=1e-6)
        # All rows that any process named came to each, and no others.
        pulled = part["pulled"]
        pulled = pulled[pulled < worker.HEIGHT]
        np.testing.assert_array_equal(pulled, np.concatenate(asked))
        # Pulled by both, each a half of the ids: the whole table, in order.
        last = part["last"][: worker.HEIGHT]
        np.testing.assert_allclose(last, trained, rtol=1e-5, atol=1e-6)
        # And data_parallel over both, its table on every device.
        np.testing.assert_allclose(part["replica"], trained, rtol=1e-5, atol=1e-6)
    assert_same_bits(parts[0]["replica"], parts[1]["replica"])
    assert_same_bits(parts[0]["last"], parts[1]["last"])
