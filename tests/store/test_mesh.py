"""KVStore(mesh): rows for many devices, and tables sharded over processes."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import mesh_worker as worker
import sparsejax as sj
from helpers import assert_same_bits, run_together
from sparsejax.store import _mesh


# The store runs optax, which relies on implicit promotion.
pytestmark = [pytest.mark.usefixtures("eight_devices", "loose_promotion")]


def assert_same_rows(found, expected):
    assert found.height == expected.height
    assert_same_bits(found.rows, expected.rows)
    assert_same_bits(found.values, expected.values)


# ------------------------------------------------------------------ owners


@pytest.mark.parametrize("height", [0, 1, 7, 1001])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_each_row_has_one_owner(height, count):
    ids = np.arange(height, dtype=np.int32)
    owner, _ = _mesh.Owners(height, 0, count).find(ids)
    seen = np.zeros(height, int)
    for process in range(count):
        owners = _mesh.Owners(height, process, count)
        rows = owners.localize(np.append(ids, height))
        if count > 1:
            assert rows[-1] == owners.own_height  # an empty slot
        own = np.flatnonzero(rows[:-1] < owners.own_height)
        assert (owner[own] == process).all()
        # All rows of the process, in the order of their ids.
        np.testing.assert_array_equal(rows[own], np.arange(owners.own_height))
        np.testing.assert_array_equal(owners.ids(rows[own]), own)
        seen[own] += 1
    assert (seen == 1).all()


def test_ids_with_a_stride_have_all_owners():
    owner, _ = _mesh.Owners(100_000, 0, 8).find(np.arange(0, 100_000, 8))
    assert (np.bincount(owner) / 12_500 > 0.1).all()
    huge = _mesh.Owners(1 << 40, 3, 8)
    ids = np.array([0, (1 << 40) - 1, (1 << 39) + 5])
    rows = huge.localize(ids)
    own = rows < huge.own_height
    np.testing.assert_array_equal(huge.ids(rows[own]), ids[own])


# ------------------------------------------------------------------ one process


def test_one_pull_for_all_devices():
    """Its rows start as on one device."""
    mesh = worker.make_mesh()
    store, other = (worker.init_normal(sj.store.KVStore(x)) for x in (mesh, None))
    ids = np.array([9, 3, 9, 500, 3, 7, 9, 1000], np.int32)
    expected = other.pull("n", ids)
    split = jax.device_put(ids, NamedSharding(mesh, P("x")))
    for k, given in enumerate((ids, split, [*map(jnp.asarray, np.split(ids, 4))]), 1):
        pulled = store.pull("n", given)
        assert_same_rows(pulled, expected)
        for x in pulled.rows, pulled.values:
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, P()), x.ndim)
            for shard in x.addressable_shards:
                assert_same_bits(shard.data, x)
        stats = store.stats()["n"]
        assert (stats.pulls, stats.pulled_rows) == (k, 5 * k)  # each row once
    assert store.pull("n", ids, capacity=5).rows.tolist() == [3, 7, 9, 500, 1000]
    assert store.row_sparse_pull("n", ids).capacity == 5
    assert_same_rows(store.pull("n", [-1, 4], mode="drop"), other.pull("n", [4]))
    assert_same_rows(store.pull("n", []), other.pull("n", []))
    with pytest.raises(ValueError, match="'n' are out of range"):
        store.pull("n", [1, worker.HEIGHT])
    with pytest.raises(ValueError, match="'n' do not fit in capacity=1"):
        store.pull("n", [1, 2], capacity=1)


# ------------------------------------------------------------------ two processes


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    """By pull and push, a Trainer and `store.train_step`."""
    run_together(worker.__file__, directory=tmp_path)
    store = sj.store.KVStore()
    store.init("t", worker.initial(), worker.transformation())
    for ids, targets in worker.batches():
        store.push("t", worker.gradient(store.pull("t", ids), ids, targets))
    trained = store.pull_all("t")
    parts = [np.load(tmp_path / f"{k}.npz") for k in range(worker.PROCESSES)]
    needed = [np.unique(ids) for ids, _ in worker.batches()]
    rows = [int(part["rows"]) for part in parts]
    assert sum(rows) == worker.HEIGHT and abs(rows[0] - rows[1]) <= 1
    # And data_parallel over both, its table on every device.
    tables = "whole", "prefetched", "resumed", "followed", "replica", "saved"
    expected = dict.fromkeys(tables, trained)
    for run in worker.train_with_trainer, worker.train_with_step:
        alone = run(sj.store.KVStore())
        expected |= {f"{run.__name__} {name}": x for name, x in alone.items()}
    for part in parts:
        # All rows that any process needs came to each, and no others.
        pulled = part["pulled"]
        pulled = pulled[pulled < worker.HEIGHT]
        np.testing.assert_array_equal(pulled, np.concatenate(needed))
        # Pulled by both, each a half of the ids: the whole table, in order.
        close: Any = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        close(part["last"][: worker.HEIGHT], trained)
        for name, x in expected.items():
            close(part[name], x, err_msg=name)
    for name in set(parts[0].files) - {"rows"}:
        assert_same_bits(parts[0][name], parts[1][name])
    # Initial and assigned rows are the same for any number of processes.
    one = worker.init_normal(sj.store.KVStore())
    assert_same_bits(parts[0]["fresh"], one.pull_all("n"))
    assert_same_bits(parts[0]["assigned"], 2 * one.pull_all("n"))
