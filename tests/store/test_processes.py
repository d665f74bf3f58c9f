"""Saves of several processes: cut off anywhere, they are never mixed.

Two threads stand for two processes, each with a store that owns half of the rows. A
barrier stands for JAX's collectives; it breaks when a process dies.
"""

import threading
from typing import Any

import numpy as np
import optax
import pytest

import sparsejax as sj
from sparsejax.store import _processes, _snapshot


HEIGHT = 7
# Its state is the sum of the gradients, which do not move the weights.
TX = optax.sgd(0.0, momentum=1.0)


class Killed(BaseException):
    """In place of a signal."""


class Host:
    """A process that may be killed at a step of its work."""

    def __init__(self, process, barrier, gathered, kill_at):
        self.process, self._barrier, self._gathered = process, barrier, gathered
        self._left, self.error, self.steps = kill_at, None, 0
        self.version: Any = None
        self.store = sj.store.KVStore()
        processes = _processes.Processes(process, 2, self._gather)
        self.store.engine.processes = processes
        self.store.init("t", (HEIGHT, 2), TX)

    def step(self):
        """One step; the process may die before it."""
        self.steps += 1
        if self._left == 0:
            self._left = None  # its files may be cleaned up
            self._barrier.abort()
            raise Killed
        self._left = None if self._left is None else self._left - 1

    def rows(self):
        """The weights and their state."""
        table = self.store.engine.tables["t"]
        return np.append(table.weights, table.by_row[0])

    def _gather(self, x):
        self.step()
        self._gathered[self.process] = np.array(x)
        self._barrier.wait(60)
        found = np.stack([self._gathered[k] for k in range(2)])
        self._barrier.wait(60)
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

    monkeypatch.setattr(_processes.os, "replace", counted(_processes.os.replace))
    monkeypatch.setattr(_processes.os, "unlink", counted(_processes.os.unlink))


def run_both(work, kills=(None, None)):
    """`work(host)` in two processes; returns them, with their errors."""
    barrier, gathered = threading.Barrier(2), {}
    hosts = [Host(k, barrier, gathered, kills[k]) for k in range(2)]

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
        rows = sj.SelectedRows(np.arange(HEIGHT), values, HEIGHT)
        host.store.push("t", rows)
        host.store.save(path, {"version": version, "dense": values[:2]})

    return work


def load(path):
    """The host has the tree, the weights and the state of one save."""

    def work(host):
        like = {"version": 0, "dense": np.zeros((2, 2), np.float32)}
        found = host.store.load(path, like)
        host.version = found["version"]
        assert (found["dense"] == host.version).all()
        assert (host.rows() == host.version).all()

    return work


def succeed(hosts):
    for host in hosts:
        if host.error is not None:
            raise host.error
    return hosts


def version_in(path):
    """The save that both processes load."""
    (version,) = {host.version for host in succeed(run_both(load(path)))}
    return version


def test_a_save_cut_off_is_completed_or_dropped(tmp_path):
    """Both processes die, each before any of its steps, or not at all."""
    path = tmp_path / "saved"
    succeed(run_both(save(path, 1)))
    steps = [host.steps for host in run_both(save(path, 2))]
    assert min(steps) >= 4 and version_in(path) == 2
    last, seen = 2, set()
    moments = [(k, None) for k in range(steps[0])]
    moments += [(None, k) for k in range(steps[1])]
    for kills in [*moments, (None, None), *((k, k) for k in range(min(steps)))]:
        hosts = run_both(save(path, last + 1), kills)
        returned = any(host.error is None for host in hosts)
        version = version_in(path)
        assert version == last + 1 if returned else version in (last, last + 1)
        seen.add(version - last)
        last = version
    assert seen == {0, 1}
    current = (path / "current").read_text()
    assert {x.name for x in path.iterdir()} >= {"current", current}
    succeed(run_both(save(path, last + 1)))
    stamp = (path / "current").read_text()  # what was cut off is removed
    assert sorted(x.name for x in path.iterdir()) == sorted(["current", stamp])


def test_a_damaged_file_of_one_process_is_refused_in_both(tmp_path):
    path = tmp_path / "saved"
    succeed(run_both(save(path, 1)))
    current = path / "current"
    file = path / current.read_text() / "1-of-2"
    kept = file.read_bytes()
    for content in kept[:-9], kept[9:], None:
        error = ValueError if content else FileNotFoundError
        file.write_bytes(content) if content else file.unlink()
        first, second = run_both(load(path))
        assert isinstance(first.error, RuntimeError) and type(second.error) is error
        assert "process 1 of 2 failed" in str(first.error)
        assert not first.rows().any() and not second.rows().any()
    file.write_bytes(kept)
    assert version_in(path) == 1
    for content in "", "../saved", "0" * 17:
        current.write_text(content)
        assert [type(host.error) for host in run_both(load(path))] == [ValueError] * 2
    current.unlink()
    assert {type(host.error) for host in run_both(load(path))} == {FileNotFoundError}


def test_an_error_of_one_process_is_raised_in_both(tmp_path, monkeypatch):
    path = tmp_path / "saved"
    succeed(run_both(save(path, 1)))
    write = _snapshot.write

    def fail(file, *args, **options):
        if str(file).endswith("1-of-2"):
            raise OSError("no space left")
        return write(file, *args, **options)

    monkeypatch.setattr(_snapshot, "write", fail)
    first, second = run_both(save(path, 2))
    assert isinstance(first.error, RuntimeError)
    assert "process 1 of 2 failed" in str(first.error)
    assert isinstance(second.error, OSError)
    assert version_in(path) == 1
