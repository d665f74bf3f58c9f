"""Versions of a store, and their runs."""

import os

import numpy as np
import pytest

from sparsejax.store import _history
from sparsejax.store._history import History


def test_nested_changes_are_one():
    history = History()
    with history.one_change():
        history.advance()
        assert history.advance() == 1
    assert history.advance() == 2


def test_a_run_begins_after_a_file_and_in_a_forked_child(monkeypatch):
    history = History()
    history.advance()
    first = history.run
    history.advance()
    assert history.run == first
    history.follow("of a file", 7)
    assert (history.run, history.version) == ("of a file", 7)
    history.advance()
    second = history.run
    assert len({first, second, "of a file", ""}) == 4 and history.version == 8
    monkeypatch.setattr(os, "getpid", lambda: -1)
    history.advance()
    assert history.run not in (first, second)


@pytest.mark.parametrize("height", [0, 1, 40, 1000])
def test_versions_of_rows_in_blocks(monkeypatch, height):
    monkeypatch.setattr(_history, "_BLOCK", 7)
    rng = np.random.default_rng(0)
    versions, expected = _history.RowVersions(height), np.zeros(height, np.int64)
    for version in range(1, 9):
        rows = np.flatnonzero(rng.random(height) < rng.choice([0.0, 0.01, 0.1, 0.5]))
        given = version if version % 2 else rng.integers(1, version + 1, rows.size)
        versions.mark(rows, given)
        expected[rows] = given
        for since in range(10):
            found = versions.since(since)
            assert found.dtype == np.int64
            assert found.tolist() == np.flatnonzero(expected > since).tolist()
