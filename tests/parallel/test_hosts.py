"""Several processes, over loopback: they train as one does, and go on if one dies."""

import argparse
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
from one_device import assert_close, dense_step_of, mesh_of, place, run


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
    run_together(worker.__file__, directory=tmp_path)
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

    def __init__(self, *command):
        *_, process, folder = command[:4]
        self._said = folder.with_name(f"{process}.txt")
        flags = os.environ["XLA_FLAGS"].replace("count=8", "count=1")
        with self._said.open("a") as said:
            self._supervisor = subprocess.Popen(
                [sys.executable, restart.__file__, *map(str, command)],
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


def latest_step(folder):
    """The latest checkpoint of both, with the store or without."""
    if (folder / "model").exists():
        told = [folder / f"step-{process}" for process in range(2)]
        return min(int(x.read_text() or 0) if x.exists() else 0 for x in told)
    names = [x.name for x in folder.glob("*") if x.name.isdigit()]
    return max(map(int, names), default=0)


def run_with_a_death(folder, *options):
    """Runs examples/restart.py in two processes; kills one, and starts it again."""
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    start = lambda process: Host(address, 2, process, folder, *options)
    hosts = [start(0), start(1)]
    try:
        wait(lambda: latest_step(folder) >= 20, hosts)
        hosts[1].kill()
        ended = r"process 0 of 2 ended .* step (\d+) in (.*): restarting"
        seconds = wait(lambda: re.search(ended, hosts[0].said()), hosts)
        assert seconds < MOST
        (step, named), *_ = re.findall(ended, hosts[0].said())
        assert int(step) in range(20, 60) and named == str(folder)
        hosts[1] = start(1)
        wait(lambda: all(host.code() is not None for host in hosts), hosts)
        told = "\n\n".join(host.said() for host in hosts)
        assert [host.code() for host in hosts] == [0, 0], told
        for process, host in enumerate(hosts):
            starts = re.findall(rf"process {process} starts at step (\d+)", host.said())
            # A process that was not answered in time may have begun once more.
            assert len(starts) > 1 and starts[0] == "0" and {*starts[1:]} == {step}, (
                told
            )
    finally:
        for host in hosts:
            host.kill()
    assert latest_step(folder) == restart.STEPS


def restored(folder):
    params = {
        "table": np.zeros((restart.V, restart.D), np.float32),
        "dense": np.zeros(restart.D, np.float32),
    }
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(folder, options=options) as manager:
        return sj.parallel.restore(manager, (params, restart.tx.init(params)))


def stored(folder):
    """The rows and their state, sorted, and the tree that each process saved."""
    model = folder / "model"
    files = [model]
    if model.is_dir():
        save = model / (model / "current").read_text()
        files = [save / f"{process}-of-2" for process in range(2)]
    rows, trees = [], []
    for path in files:
        with np.load(path) as file:
            rows += np.concatenate([file["0.weights"], file["0.state.0"]], 1).tolist()
            trees.append([file["tree.0"], file["tree.1"]])
    for tree in trees:
        jax.tree.map(assert_same_bits, tree, trees[0])
    return np.array(sorted(rows)), trees[0]


@pytest.mark.skipif(os.name != "posix", reason="kills process groups")
@pytest.mark.parametrize(
    "options, train, saved",
    [([], restart.train_sharded, restored), (["--store"], restart.train_store, stored)],
    ids=["sharded", "store"],
)
def test_a_run_goes_on_after_a_host_has_died(
    options, train, saved, tmp_path, monkeypatch
):
    """It ends with the bits of a run in one process, with a device for each host."""
    folder, alone = tmp_path / "run", tmp_path / "alone"
    run_with_a_death(folder, *options)
    # The loaders of the hosts take turns at the rows of an epoch.
    by_host = lambda sharding, x: jax.device_put(x.reshape(-1, 2).T.ravel(), sharding)
    monkeypatch.setattr(jax, "make_array_from_process_local_data", by_host)
    monkeypatch.setattr(restart, "LOCAL_BATCH", 2 * restart.LOCAL_BATCH)
    mesh, args = mesh_of(2), argparse.Namespace(folder=alone, process=0)
    dense = place(mesh, np.ones(restart.D, np.float32))
    train(args, restart.make_loader(), mesh, dense)
    jax.tree.map(assert_same_bits, saved(folder), saved(alone))
