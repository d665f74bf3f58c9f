"""Several processes, over loopback: they train as one does, and go on if one dies."""

import concurrent.futures
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import sparsejax as sj
import worker
from examples import restart
from helpers import ROOT, assert_same_bits, run_together
from one_device import assert_close, dense_step_of, run


# optax.adam on dense arrays, and as in a reader's session
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("eight_devices", "loose_promotion"),
]

TIMEOUT = 240  # seconds; it takes about 25
MOST = 15  # seconds until the others end: 5 to 11 alone, 97 without the setting


# ------------------------------------------------------------------ training


def test_two_processes_train_like_one_device(tmp_path):
    """They run `worker.py`, and write one checkpoint, which is read onto one device."""
    run_together(worker.__file__, "train", directory=tmp_path)
    table, dense = map(jnp.asarray, worker.initial())
    trained = {}
    for name, tx in worker.OPTIMIZERS.items():
        step = dense_step_of(worker.loss_fn, tx, worker.HEIGHT)
        for kind in worker.KINDS:
            params = {"table": table, "dense": dense}
            params, _, losses = run(step, params, tx.init(params), worker.batches(kind))
            assert not np.allclose(params["table"], table)  # it did train
            trained[f"{name} {kind}"] = {"params": params, "losses": losses}
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        first = sj.parallel.restore(manager, trained, step=worker.TABLE_STEP)
        assert_close(first, trained)
        # They restored their checkpoint into the other layout, and saved that.
        second = sj.parallel.restore(manager, trained, step=worker.BLOCK_STEP)
        jax.tree.map(assert_same_bits, first, second)
        metadata = manager.metadata(worker.TABLE_STEP).custom_metadata
        assert metadata["batch"] == worker.STEPS
        assert manager.latest_step() == worker.STATE_STEP


# ------------------------------------------------------------------ a host dies


class Host:
    """A supervisor and its child, in a process group of their own."""

    def __init__(self, port, process, directory, options):
        self._said = directory.with_name(f"{directory.name} {process}.txt")
        command = [restart.__file__, f"127.0.0.1:{port}", 2, process, directory]
        flags = os.environ["XLA_FLAGS"].replace("count=8", "count=1")
        with self._said.open("a") as said:
            self._supervisor = subprocess.Popen(
                [sys.executable, *map(str, command), *options],
                env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
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


def wait(until, hosts):
    """Seconds until `until()`."""
    start = time.monotonic()
    while not until():
        waited = time.monotonic() - start
        assert waited < TIMEOUT, "\n\n".join(host.said() for host in hosts)
        time.sleep(0.02)
    return time.monotonic() - start


def latest_step(directory):
    """The latest checkpoint of both, with the store or without."""
    if (directory / "model").exists():
        told = [directory / f"step-{process}" for process in range(2)]
        return min(int(x.read_text() or 0) if x.exists() else 0 for x in told)
    names = [x.name for x in directory.glob("*") if x.name.isdigit()]
    return max(map(int, names), default=0)


def run_hosts(directory, *options, with_a_death):
    """Runs examples/restart.py in two processes; may kill one, and start it again."""
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    start = lambda process: Host(port, process, directory, options)
    hosts, step = [start(0), start(1)], None
    try:
        if with_a_death:
            wait(lambda: latest_step(directory) >= 20, hosts)
            hosts[1].kill()
            ended = r"process 0 of 2 ended .* step (\d+) in (.*): restarting"
            seconds = wait(lambda: re.search(ended, hosts[0].said()), hosts)
            assert seconds < MOST
            (step, named), *_ = re.findall(ended, hosts[0].said())
            assert int(step) in range(20, 60) and named == str(directory)
            hosts[1] = start(1)
        wait(lambda: all(host.code() is not None for host in hosts), hosts)
        told = "\n\n".join(host.said() for host in hosts)
        assert [host.code() for host in hosts] == [0, 0], told
        for process, host in enumerate(hosts):
            starts = re.findall(rf"process {process} starts at step (\d+)", host.said())
            # A process that was not answered in time may have begun once more.
            assert starts[0] == "0" and set(starts[1:]) <= {step}, told
            assert len(starts) > with_a_death, told
    finally:
        for host in hosts:
            host.kill()
    assert latest_step(directory) == restart.STEPS


def run_twice(folder, *options):
    """Folders of two runs, side by side: one goes on after a death of a host."""
    folders = folder / "run", folder / "other"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        other = pool.submit(run_hosts, folders[1], *options, with_a_death=False)
        run_hosts(folders[0], *options, with_a_death=True)
        other.result()
    return folders


@pytest.mark.skipif(os.name != "posix", reason="kills process groups")
def test_a_run_goes_on_after_a_host_has_died(tmp_path):
    """The weights are those of a run that was not interrupted."""
    params = {
        "table": np.zeros((restart.V, restart.D), np.float32),
        "dense": np.zeros(restart.D, np.float32),
    }
    trained = []
    for directory in run_twice(tmp_path):
        options = ocp.CheckpointManagerOptions(read_only=True)
        with ocp.CheckpointManager(directory, options=options) as manager:
            like = (params, restart.tx.init(params))
            trained.append(sj.parallel.restore(manager, like))
    jax.tree.map(assert_same_bits, *trained)
    assert np.all(trained[0][0]["dense"] != 1)  # it did train


@pytest.mark.skipif(os.name != "posix", reason="kills process groups")
def test_a_store_goes_on_after_a_host_has_died(tmp_path):
    """Rows, state and the tree in its files are those of the other run."""
    saved = []
    for directory in run_twice(tmp_path, "--store"):
        save = directory / "model" / (directory / "model" / "current").read_text()
        for process in range(2):
            with np.load(save / f"{process}-of-2") as file:
                saved.append({k: file[k] for k in file.files if k != "header.json"})
    for mine, other in zip(saved[:2], saved[2:], strict=True):
        assert len(mine) > 2
        jax.tree.map(assert_same_bits, mine, other)
