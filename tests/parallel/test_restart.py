"""examples/restart.py: a host dies, the run goes on.

Two processes train. One is killed together with its supervisor; the other ends by
itself, prints the checkpoint that it restarts from, and the dead one is started again.
The weights are compared with a run of one process that was not interrupted. The table
is sharded over devices, or, with `--store`, over host memories.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import pages
import sparsejax as sj
from examples import restart
from helpers import assert_same_bits
from sparsejax.store import _snapshot
from sparsejax.store._processes import Processes


pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("eight_devices"),
    pytest.mark.skipif(os.name != "posix", reason="kills process groups"),
]

TIMEOUT = 240  # seconds; it takes about 25
MOST = 15  # seconds until the others end: 5 to 11 alone, 97 without the setting


class _Host:
    """A supervisor and its child, in a process group of their own."""

    def __init__(self, port, process, directory, options):
        self._said = directory.with_name(f"host {process}.txt")
        command = [restart.__file__, f"127.0.0.1:{port}", 2, process, directory]
        flags = os.environ["XLA_FLAGS"].replace("count=8", "count=1")
        env = {**os.environ, "PYTHONPATH": str(pages.ROOT), "XLA_FLAGS": flags}
        with self._said.open("a") as said:
            self._supervisor = subprocess.Popen(
                [sys.executable, *map(str, command), *options],
                env=env,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self):
        return self._said.read_text()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._supervisor.pid, signal.SIGKILL)
        self._supervisor.wait()

    def code(self):
        return self._supervisor.poll()


def _wait(until, hosts):
    """Seconds until `until()`."""
    start = time.monotonic()
    while not until():
        waited = time.monotonic() - start
        assert waited < TIMEOUT, "\n\n".join(host.said() for host in hosts)
        time.sleep(0.02)
    return time.monotonic() - start


class _Both:
    """The loaders of two processes, or iterators of theirs, as one."""

    def __init__(self, parts):
        self._parts = parts

    def __iter__(self):
        return _Both([iter(part) for part in self._parts])

    def __next__(self):
        batches = [next(part) for part in self._parts]
        return jax.tree.map(lambda *x: np.concatenate(x), *batches)

    def get_state(self):
        return self._parts[0].get_state()


def _run_here(directory, monkeypatch, *options):
    """Runs the program on two devices of this process."""

    def leave(code):
        raise AssertionError(f"the script ended with {code}")

    def both(*args, shard, **options):
        assert shard == (0, 1)
        return _Both([data_loader(*args, shard=(k, 2), **options) for k in range(2)])

    data_loader = sj.data.DataLoader

    monkeypatch.setenv("IS_CHILD", "1")
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    monkeypatch.setattr(sj.data, "DataLoader", both)
    restart.main(["", "1", "0", str(directory), *options])


def _let_a_host_die(tmp_path, latest_step, *options):
    """Runs two processes, kills one at step 20, starts it again.

    Args:
      tmp_path: a folder.
      latest_step: `f(directory)`, the latest checkpoint of both.
      *options: of the program.
    """
    directory = tmp_path / "run"
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    start = lambda process: _Host(port, process, directory, options)
    hosts = [start(0), start(1)]
    try:
        _wait(lambda: latest_step(directory) >= 20, hosts)
        hosts[1].kill()
        ended = r"process 0 of 2 ended .* step (\d+) in (.*): restarting"
        seconds = _wait(lambda: re.search(ended, hosts[0].said()), hosts)
        assert seconds < MOST
        (step, named), *_ = re.findall(ended, hosts[0].said())
        assert int(step) in range(20, 60) and named == str(directory)
        hosts[1] = start(1)
        _wait(lambda: all(host.code() is not None for host in hosts), hosts)
        told = "\n\n".join(host.said() for host in hosts)
        assert [host.code() for host in hosts] == [0, 0], told
        for process, host in enumerate(hosts):
            starts = re.findall(rf"process {process} starts at step (\d+)", host.said())
            # A process that was not answered in time may have begun once more.
            assert starts[0] == "0" and set(starts[1:]) == {step}, told
    finally:
        for host in hosts:
            host.kill()
    return directory


@pytest.mark.usefixtures("loose_promotion")  # as in a reader's session
def test_a_run_goes_on_after_a_host_has_died(tmp_path, monkeypatch):
    names = lambda directory: [x.name for x in directory.glob("*") if x.name.isdigit()]
    latest_step = lambda directory: max(map(int, names(directory)), default=0)
    directory = _let_a_host_die(tmp_path, latest_step)

    _run_here(tmp_path / "uninterrupted", monkeypatch)
    params = {
        "table": np.zeros((restart.V, restart.D), np.float32),
        "dense": np.zeros(restart.D, np.float32),
    }
    like = (params, restart.tx.init(params))
    trained = []
    for path in (directory, tmp_path / "uninterrupted"):
        options = ocp.CheckpointManagerOptions(read_only=True)
        with ocp.CheckpointManager(path, options=options) as manager:
            assert manager.latest_step() == restart.STEPS
            trained.append(sj.parallel.restore(manager, like))
    jax.tree.map(assert_same_bits, *trained)
    assert np.all(trained[0][0]["dense"] != 1)  # it did train


def _saved_tree(path, process=0, count=1):
    """All arrays of a table and the tree in a file, and the ids of its rows."""
    store = sj.store.KVStore()
    store.engine.processes = Processes(process, count)
    store.init("table", (restart.V, restart.D), optax.adagrad(0.1))
    params = {"table": store["table"], "dense": np.zeros(restart.D, np.float32)}
    position = restart.make_loader().get_state()
    like = params, restart.tx.init(params), 0, position
    report = lambda *_: None
    tables, history = store.engine.tables, store.engine.history
    record = _snapshot.Record(path, tables, report, replaces=True, tree=like)
    _snapshot.put(record, history, replaces=True, is_save=True)
    table = tables["table"]
    ids = table.spec.owners.ids(np.arange(table.height))
    return record.tree, ids, [np.array(x) for x in (table.weights, *table.by_row)]


@pytest.mark.usefixtures("loose_promotion")
def test_a_store_goes_on_after_a_host_has_died(tmp_path, monkeypatch):
    def latest_step(directory):
        told = [directory / f"step-{process}" for process in range(2)]
        read = lambda path: int(path.read_text() or 0) if path.exists() else 0
        return min(map(read, told))

    directory = _let_a_host_die(tmp_path, latest_step, "--store")
    assert latest_step(directory) == 60

    _run_here(tmp_path / "uninterrupted", monkeypatch, "--store")
    expected, ids, arrays = _saved_tree(tmp_path / "uninterrupted" / "model")
    np.testing.assert_array_equal(ids, np.arange(restart.V))
    save = directory / "model" / (directory / "model" / "current").read_text()
    paths = [save / f"{process}-of-2" for process in range(2)]
    for process, path in enumerate(paths):
        tree, ids, own = _saved_tree(path, process, 2)

        for mine, whole in zip(*map(jax.tree.leaves, (tree[:2], expected[:2]))):
            assert_same_bits(mine, whole)
        assert tree[2] == expected[2] == 60
        for mine, whole in zip(own, arrays, strict=True):
            assert_same_bits(mine, whole[ids])
    assert np.all(expected[0]["dense"] != 1)
