"""The program of a store's optimizer, and the buffers that it borrows.

test_store.py compares the results with `lazy` on the device.
"""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_same_bits, assert_trees_close, compile_as_users_do
from sparsejax.store._optimizer import Optimizer


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D, C = 5000, 16, 4096


@pytest.mark.parametrize("make", [optax.adam, optax.adagrad])
def test_the_step_gathers_nothing_and_writes_to_no_argument(make):
    """Gathers keep XLA from vectorising it; buffers of NumPy are only borrowed."""
    optimizer = Optimizer(make(0.1), (V, D), np.float32, "t")
    rows, count = np.ones((C, D), np.float32), np.zeros((), np.int32)
    leaves = [rows if by_row else count for by_row in optimizer.by_row]
    state = optimizer.structure.unflatten(leaves)
    places = np.ones(C, bool), np.zeros(2 * C, np.int32)
    update: Any = optimizer._update
    values = np.ones((2 * C, D), np.float32)
    compiled = compile_as_users_do(
        update.lower(optimizer.by_row, rows, state, *places, values)
    )
    operations = re.findall(r"= \S+ ([\w-]+)\(", compiled.as_text())
    assert operations.count("scatter") == 1  # it sums duplicates
    assert "gather" not in operations and "dynamic-slice" not in operations
    assert compiled.memory_analysis().alias_size_in_bytes == 0


def test_padding_does_not_reach_the_norm():
    """Three rows in eight slots; with zeros in the padding the norm would be NaN."""
    rms: Any = optax.scale_by_rms(eps=0.0, initial_scale=1.0)
    tx = optax.chain(rms, optax.clip_by_global_norm(0.5))
    store = sj.store.KVStore()
    store.init("t", (V, 2), tx)
    grad: Any = sj.SelectedRows([3, 5, 9], jnp.ones((3, 2)), V)
    store.push("t", grad)
    lifted, table = sj.optim.lazy(tx), jnp.zeros((V, 2))
    updates, _ = lifted.update(grad, lifted.init(table), table)
    expected = np.asarray(optax.apply_updates(table, updates))
    assert np.isfinite(expected).all()
    assert_trees_close(store.pull_all("t"), expected)


def test_counts_are_not_borrowed(tmp_path):
    """The store changes the count in place, so the program must get a copy."""
    store = sj.store.KVStore()
    store.init("t", (V, D), optax.adam(0.1), path=tmp_path / "table")  # on its own page
    rows = sj.SelectedRows(np.arange(C), jnp.ones((C, D)), V)
    for count in range(1, 4):
        store.push("t", rows)
        assert store.engine.tables["t"].rest[0] == count
    store.close()


def test_rows_that_were_handed_out_are_not_written_to():
    """Later pushes change only the batches that are still being prepared."""
    weights = np.random.default_rng(0).standard_normal((V, D)).astype(np.float32)
    store = sj.store.KVStore()
    store.init("t", weights, optax.sgd(1.0))
    out = []
    for _, rows in store.prefetch([np.arange(C)] * 4, lambda ids: ids, depth=2):
        out.append((rows.values, np.array(rows.values)))
        store.push("t", rows.map(jnp.ones_like))
    expected = weights[:C]
    for values, copy in out:
        assert_same_bits(values, copy)
        assert_same_bits(values, expected)
        expected = expected - 1
