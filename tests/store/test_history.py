"""Versions of a store, and their branches."""

import os

import numpy as np
import pytest

from sparsejax.store import _history
from sparsejax.store._history import History


def follower_of(history):
    other = History()
    other.follow(history.description())
    return other


def test_nested_changes_are_one():
    history = History()
    with history.one_change():
        history.advance()
        assert history.advance() == 1
    assert history.advance() == 2


def test_the_same_number_on_another_branch_is_another_version():
    history = History()
    for _ in range(3):
        history.advance()
    one, other = follower_of(history), follower_of(history)
    assert one.is_passed_by(history.branches, 3)
    for each in (history, one, other):
        each.advance()
    assert history.has_passed(one.branches, 3)  # where they parted
    assert not history.has_passed(one.branches, 4)
    assert not one.is_passed_by(other.branches, 4)
    assert History().is_passed_by(one.branches, 4)  # nothing had changed


def test_a_forked_child_has_a_branch_of_its_own(monkeypatch):
    history = History()
    history.advance()
    parent = follower_of(history)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    history.advance()
    assert len(history.branches) == 2 and history.branches[1]["start"] == 1
    assert history.has_passed(parent.branches, 1)


def test_branches_are_bounded():
    history = History()
    history.advance()
    first = follower_of(history)
    for _ in range(100):
        history = follower_of(history)
        history.advance()
    assert len(history.branches) == 64 and history.version == 101
    assert not first.is_passed_by(history.branches, history.version)  # forgotten
    assert follower_of(history).has_passed(history.branches, 101)


@pytest.mark.parametrize("height", [0, 1, 40, 1000])
def test_versions_of_rows_in_blocks(monkeypatch, height):
    monkeypatch.setattr(_history, "_BLOCK", 7)
    monkeypatch.setattr(_history, "_MAX_BLOCKS", 4)
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
    every = np.arange(height)
    assert versions.at(every).tolist() == expected.tolist()
