"""Saves of several processes: cut off anywhere, they are never mixed.

Two threads stand for two processes, each with a store that owns half of the rows. A
barrier stands for JAX's collectives; it breaks when a process dies.
"""

import itertools
import threading

import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_same_bits
from sparsejax.store import _together


HEIGHT = 7


class Killed(BaseException):
    """In place of a signal."""


class Host:
    """A process that may be killed at a step of its work."""

    def __init__(self, process, barrier, gathered, kill_at, tx):
        self.process, self._barrier, self._gathered = process, barrier, gathered
        self._left, self.error, self.steps = kill_at, None, 0
        self.store = sj.store.KVStore()
        self.store.engine.process, self.store.engine.count = process, 2
        self.store._processes = _together.Processes(process, 2, self._gather)
        self.store.init("t", (HEIGHT, 2), tx)

    def step(self):
        """One step; the process may die before it."""
        self.steps += 1
        if self._left == 0:
            self._left = None  # its files may be cleaned up
            self._barrier.abort()
            raise Killed
        self._left = None if self._left is None else self._left - 1

    def weights(self):
        return self.store.engine.tables["t"].weights

    def _gather(self, x):
        self.step()
        self._gathered[self.process] = np.array(x)
        self._barrier.wait(20)
        found = np.stack([self._gathered[k] for k in range(2)])
        self._barrier.wait(20)
        return found


LOCAL = threading.local()


@pytest.fixture(autouse=True)
def _steps_of_files(monkeypatch):
    """Each rename, removal and write of a file is a step."""

    def counted(function):
        def run(*args, **kwargs):
            if hasattr(LOCAL, "host"):
                LOCAL.host.step()
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(_together.os, "replace", counted(_together.os.replace))
    monkeypatch.setattr(_together.os, "unlink", counted(_together.os.unlink))


def run_both(work, kills=(None, None), tx=None):
    """`work(host)` in two processes; returns them, with their errors."""
    barrier, gathered = threading.Barrier(2), {}
    hosts = [Host(k, barrier, gathered, kills[k], tx) for k in range(2)]

    def main(host):
        LOCAL.host = host
        try:
            work(host)
        except BaseException as error:
            host.error = error

    threads = [threading.Thread(target=main, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return hosts


def save(path, version):
    def work(host):
        values = np.full((HEIGHT, 2), version, np.float32)
        host.store.assign("t", values)
        host.store.save(path, {"version": version, "dense": values[:2]})

    return work


def load(path, found):
    def work(host):
        like = {"version": 0, "dense": np.zeros((2, 2), np.float32)}
        found[host.process] = host.store.load(path, like)

    return work


def version_in(path):
    """The save that both processes load."""
    found = {}
    hosts = run_both(load(path, found))
    assert [host.error for host in hosts] == [None, None]
    version = found[0]["version"]
    for host in hosts:
        assert found[host.process]["version"] == version
        assert (found[host.process]["dense"] == version).all()
        assert (host.weights() == version).all()
    return version


def raise_errors(hosts):
    for host in hosts:
        if host.error is not None:
            raise host.error


def test_a_save_cut_off_is_completed_or_dropped(tmp_path):
    """Both processes die, each before any of its steps, or not at all."""
    path = tmp_path / "saved"
    raise_errors(run_both(save(path, 1)))
    steps = [host.steps for host in run_both(save(path, 2))]
    assert steps[0] == steps[1] >= 4 and version_in(path) == 2
    last, seen = 2, set()
    moments = [None, *range(steps[0])]
    for kills in itertools.product(moments, moments):
        hosts = run_both(save(path, last + 1), kills)
        returned = any(host.error is None for host in hosts)
        version = version_in(path)
        assert version == last + 1 if returned else version in (last, last + 1)
        seen.add(version - last)
        last = version
    assert seen == {0, 1}
    assert sorted(x.name for x in tmp_path.iterdir()) == [
        "saved.0-of-2",
        "saved.1-of-2",
    ]


def test_a_load_cut_off(tmp_path):
    """While it completes a save, and while the next save begins."""
    path = tmp_path / "saved"
    raise_errors(run_both(save(path, 1)))
    steps = run_both(save(path, 2))[0].steps
    for first, second in itertools.product(range(3), range(4)):
        # One process has renamed its file of version 3, and the other has not.
        run_both(save(path, 3), (None, steps - 1))
        run_both(load(path, {}), (first, None))
        run_both(save(path, 4), (None, second))
        assert version_in(path) in (3, 4)
        raise_errors(run_both(save(path, 2)))


def test_files_of_two_saves_are_refused(tmp_path):
    path = tmp_path / "saved"
    raise_errors(run_both(save(path, 1)))
    old = (tmp_path / "saved.1-of-2").read_bytes()
    raise_errors(run_both(save(path, 2)))
    kept = (tmp_path / "saved.1-of-2").read_bytes()
    cases = {
        "older": (old, ValueError, ValueError),
        "damaged at its end": (kept[:-9], RuntimeError, ValueError),
        "damaged at its start": (kept[9:], ValueError, ValueError),
        "missing": (None, ValueError, FileNotFoundError),
    }
    for content, *errors in cases.values():
        (tmp_path / "saved.1-of-2").unlink()
        if content is not None:
            (tmp_path / "saved.1-of-2").write_bytes(content)
        hosts = run_both(load(path, {}))
        assert [type(host.error) for host in hosts] == errors
        assert not hosts[0].weights().any() and not hosts[1].weights().any()
    (tmp_path / "saved.1-of-2").write_bytes(kept)
    assert version_in(path) == 2


def test_an_error_of_one_process_is_raised_in_both(tmp_path):
    path = tmp_path / "saved"
    raise_errors(run_both(save(path, 1)))

    def work(host):
        if host.process == 1:
            (tmp_path / "saved.1-of-2.next").mkdir()
        save(path, 2)(host)

    first, second = run_both(work)
    assert isinstance(first.error, RuntimeError)
    assert "process 1 of 2 failed" in str(first.error)
    assert isinstance(second.error, IsADirectoryError)
    (tmp_path / "saved.1-of-2.next").rmdir()
    assert version_in(path) == 1


def test_state_is_of_the_same_save(tmp_path):
    """Optimizer state too, by a step after loading."""
    path, row = tmp_path / "saved", np.ones((HEIGHT, 2), np.float32)
    gradient = lambda: sj.SelectedRows(np.arange(HEIGHT), row, HEIGHT)
    results = {}

    def train(host):
        host.store.push("t", gradient())
        host.store.save(path)
        host.store.push("t", gradient())
        results[host.process] = host.weights().copy()

    def resume(host):
        host.store.load(path)
        host.store.push("t", gradient())
        assert_same_bits(host.weights(), results[host.process])

    raise_errors(run_both(train, tx=optax.adam(0.1)))
    raise_errors(run_both(resume, tx=optax.adam(0.1)))
