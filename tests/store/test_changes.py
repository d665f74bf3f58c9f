"""Files of changes: a follower is equal to its trainer at each version."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import changes_model
import sparsejax as sj
import test_store_files
from helpers import assert_same_bits, make_rows
from sparsejax.store import _history, _table
from test_store_files import ARRAY, TX, D, V, one_table, same, same_weights, steps


pytestmark = pytest.mark.usefixtures("loose_promotion")

new_store = functools.partial(test_store_files.new_store, given_tx=TX)
without_tx = functools.partial(test_store_files.new_store, None)


# ------------------------------------------------------------------ equal


@pytest.mark.parametrize("block", [7, 1 << 12])
def test_random_steps_against_a_model(monkeypatch, block):
    """Files that fit, that were applied, with gaps, and of another run."""
    monkeypatch.setattr(_history, "_BLOCK", block)
    outcomes = changes_model.compare(seed=block, steps=200)
    assert outcomes.keys() == {"applied", "refused", "old", "replaced"}


def test_tables_of_all_kinds(tmp_path):
    """Given weights and bfloat16, without an optimizer and with the state."""
    trainer, follower, twin = new_store(), without_tx(), new_store()
    version, path = 0, tmp_path / "changes"
    for k in range(2):
        steps(range(3 * k, 3 * k + 3), trainer)
        trainer.export_changes(path, since=version, state=True)
        twin.apply_changes(path)
        same(trainer, twin)
        version = trainer.export_changes(path, since=version)
        assert version == 9 * (k + 1)  # a push is a change of a table
        changes = follower.apply_changes(path)
        assert {x.rows.dtype for x in changes.values()} == {np.dtype(np.int32)}
        same_weights(trainer, follower)
    size = path.stat().st_size
    assert size < 3 * 24 * (8 + 1 + 16) + 6_000  # rows that changed, and a header
    steps(range(9, 11), trainer, twin)
    same(trainer, twin)
    trainer.pull("t", [1, 2])  # rows that start are the same everywhere
    trainer.assign("given", 2 * ARRAY)
    assert trainer.version == version + 7
    assert trainer.changed_since(version + 6)["given"].tolist() == [*range(V)]
    trainer.export_changes(path, since=0)
    steps([3], lone := new_store())
    for store in (lone, follower):
        store.apply_changes(path)
        same_weights(trainer, store)


def test_rows_read_early_are_the_new_ones(tmp_path):
    trainer, follower = one_table(), one_table(None)
    steps(range(2), trainer)
    trainer.export_changes(tmp_path / "changes", since=0)
    read = []
    for _, rows in follower.prefetch([np.arange(V)] * 3, lambda ids: ids, depth=2):
        read.append(np.asarray(rows.values)[:V])
        follower.apply_changes(tmp_path / "changes")
    assert_same_bits(read[1], trainer.pull_all("t"))
    assert (read[0] != read[1]).any()


def test_a_device_cache_changes_rows_when_it_is_flushed(tmp_path):
    store, follower = one_table(), one_table(None)
    cache, tx = sj.store.CachedTable(store, "t", 4), sj.optim.lazy(TX)
    params: Any = cache.table
    state = tx.init(params)
    step = store.train_step(lambda p, ids: p[ids].sum(), tx)
    for ids in ([3, 7], [1, 2], [9, 8]):
        params, state, _ = step(params, state, np.array(ids))
    export = lambda: store.export_changes(tmp_path / "changes", since=0)
    for call in (lambda: store.changed_since(0), export):
        with pytest.raises(RuntimeError, match="trained on the device since its last"):
            call()
    cache.flush(params, state)
    version = export()
    assert store.changed_since(0)["t"].tolist() == [1, 2, 3, 7, 8, 9]
    follower.apply_changes(tmp_path / "changes")
    same_weights(store, follower)
    _, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
    cache.flush(params, state)  # only the count of steps changed
    assert store.version > version


# ------------------------------------------------------------------ which file fits


def test_another_run_begins_in_a_forked_child(tmp_path, monkeypatch):
    trainer, follower, version = one_table(), one_table(None), 0
    for k, number in enumerate((os.getpid(), -1)):
        monkeypatch.setattr(os, "getpid", lambda number=number: number)
        steps([k], trainer)
        version = trainer.export_changes(tmp_path / f"{k}", since=version)
    follower.apply_changes(tmp_path / "0")
    with pytest.raises(ValueError, match="of another run"):
        follower.apply_changes(tmp_path / "1")


def test_a_save_is_all_changes_with_state(tmp_path):
    trainer, follower = new_store(), new_store()
    steps(range(3), trainer)
    trainer.save(tmp_path / "saved")
    follower.apply_changes(tmp_path / "saved")
    same(trainer, follower)
    with np.load(tmp_path / "saved") as members:
        assert members["0.rows"].tolist() == trainer.changed_since(0)["t"].tolist()
        assert_same_bits(members["0.weights"], trainer.pull_all("t")[members["0.rows"]])


def test_given_rows_without_state_start_with_theirs(tmp_path):
    """The state of adagrad does not start as zeros."""
    tx = optax.adagrad(0.1, initial_accumulator_value=0.5)
    trainer, follower, loaded = (
        one_table(tx, x, None) for x in (ARRAY, ARRAY, 0 * ARRAY)
    )
    rows, other = (make_rows(x, V, (D,), seed=x[0])[0] for x in ([3, 4], [4, 9]))
    trainer.push("t", rows)
    follower.push("t", other)
    trainer.save(tmp_path / "saved")
    follower.apply_changes(tmp_path / "saved")  # row 9 is as it was given
    loaded.load(tmp_path / "saved")
    for store in trainer, follower, loaded:
        store.push("t", other)
    same(trainer, loaded)
    same_weights(trainer, follower)
    theirs, table = (x.engine.tables["t"] for x in (trainer, follower))
    assert_same_bits(table.touched, theirs.touched)
    touched = np.flatnonzero(theirs.touched)
    assert_same_bits(table.by_row[0][touched], theirs.by_row[0][touched])


def test_a_store_that_was_changed_itself_takes_only_all_rows(tmp_path):
    trainer, follower = one_table(), one_table()
    steps(range(3), trainer)
    trainer.export_changes(tmp_path / "some", since=2)
    trainer.export_changes(tmp_path / "all", since=0)
    steps(range(5, 9), follower)
    before = follower.pull_all("t")
    with pytest.raises(ValueError, match="this store was changed itself"):
        follower.apply_changes(tmp_path / "some")
    assert_same_bits(follower.pull_all("t"), before)
    changes = follower.apply_changes(tmp_path / "all")
    same_weights(trainer, follower)
    assert {*changes["t"].rows} > {*trainer.changed_since(0)["t"]}
    with pytest.raises(ValueError, match="not known, only those since version 3"):
        follower.changed_since(0)


@pytest.mark.parametrize("tx", [TX, None], ids=["adam", "none"])
def test_a_table_that_was_opened(tx, tmp_path):
    """Its file does not say what changed when: a new version begins."""
    path = tmp_path / "table"
    with one_table(path=path) as store:
        steps(range(2), store)
    with one_table(path=path) as trainer:
        follower = one_table(tx)
        assert trainer.version == 1
        trainer.export_changes(tmp_path / "all", since=0)
        follower.apply_changes(tmp_path / "all")
        same_weights(trainer, follower)
        steps([2], trainer)
        trainer.export_changes(tmp_path / "changes", since=1)
        assert follower.apply_changes(tmp_path / "changes")["t"].rows.size == 8
        same_weights(trainer, follower)


# ------------------------------------------------------------------ refused, or stopped


def test_other_tables_are_refused(tmp_path):
    trainer, path = new_store(), tmp_path / "changes"
    steps([0], trainer)
    trainer.export_changes(path, since=0, state=True)
    for other, message in [
        (one_table(), "has the tables .'given', 'narrow', 't'"),
        (new_store(seed=2), "'t' has key"),  # its untouched rows start otherwise
        (without_tx(), "'t' has state of no arrays here"),
    ]:
        with pytest.raises(ValueError, match=message):
            other.apply_changes(path)
        assert other.version == 0


def test_a_follower_that_is_stopped_is_half_loaded(tmp_path, monkeypatch):
    trainer, path = one_table(), tmp_path / "table"
    steps([0], trainer)
    trainer.export_changes(tmp_path / "changes", since=0)

    def stop(*_):
        raise KeyboardInterrupt

    with one_table(path=path) as follower:
        with monkeypatch.context() as patch:
            patch.setattr(_table.Table, "clear", stop)
            with pytest.raises(KeyboardInterrupt):
                follower.apply_changes(tmp_path / "changes")
        with pytest.raises(RuntimeError, match="half loaded: .* apply_changes"):
            follower.pull("t", [1])
    with pytest.raises(ValueError, match="table is half loaded"):
        one_table(path=path)
