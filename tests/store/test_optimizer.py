"""The program of a store's optimizer, and the buffers that it borrows.

test_store.py compares the results with `lazy` on the device.
"""

import functools
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


@functools.cache
def compiled_step(name):
    tx = {"adam": optax.adam(0.1), "adagrad": optax.adagrad(0.1)}[name]
    optimizer = Optimizer(tx, (V, D), np.float32, "t")
    rows = np.ones((C, D), np.float32)
    arguments = (
        rows,
        [rows for by_row in optimizer.by_row if by_row],
        [np.zeros((), np.int32) for by_row in optimizer.by_row if not by_row],
        np.ones(C, bool),
        np.zeros(2 * C, np.int32),
        np.ones((2 * C, D), np.float32),
    )
    lowered = optimizer._programs.update.lower(optimizer._layout, *arguments)
    return compile_as_users_do(lowered)


@pytest.mark.parametrize("name", ["adam", "adagrad"])
def test_the_step_gathers_nothing(name):
    """If this fails: a gather keeps XLA from vectorising the step."""
    operations = re.findall(r"= \S+ ([\w-]+)\(", compiled_step(name).as_text())
    assert operations.count("scatter") == 1  # it sums duplicates
    assert "gather" not in operations and "dynamic-slice" not in operations


@pytest.mark.parametrize("name", ["adam", "adagrad"])
def test_the_step_does_not_write_to_its_arguments(name):
    """If this fails: the step changes NumPy's buffers, which it only borrows."""
    assert compiled_step(name).memory_analysis().alias_size_in_bytes == 0


def test_padding_does_not_reach_the_norm():
    """Three rows in eight slots; with zeros in the padding the norm would be NaN."""
    tx = optax.chain(
        optax.scale_by_rms(eps=0.0, initial_scale=1.0), optax.clip_by_global_norm(0.5)
    )
    store = sj.store.KVStore()
    store.init("t", (V, 2), tx)
    grad = sj.SelectedRows([3, 5, 9], jnp.ones((3, 2)), V)
    store.push("t", grad)
    lifted = sj.optim.lazy(tx)
    table = jnp.zeros((V, 2))
    grads: Any = grad
    updates, _ = lifted.update(grads, lifted.init(table), table)
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


@pytest.mark.parametrize("lift", [lambda tx: tx, sj.optim.lazy])
def test_a_mask_by_shape_is_refused(lift):
    """The store runs it on the rows of a gradient, whose number it would look at."""
    is_whole: Any = lambda table: table.shape == (V, D)
    tx = optax.masked(optax.sgd(1.0, momentum=0.9), is_whole)
    with pytest.raises(ValueError, match="number of rows"):
        Optimizer(lift(tx), (V, D), np.float32, "t")
