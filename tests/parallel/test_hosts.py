"""Two processes of two devices each, over loopback, against one device in one process.

The processes run `worker.py`. Both write one checkpoint, which the test reads onto one
device.
"""

import contextlib
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import sparsejax as sj
import worker
from helpers import ROOT, assert_same_bits
from one_device import assert_close, dense_step_of, run


pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).parent
TIMEOUT = 240  # seconds; it takes about ten


def _free_port():
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _run_all(*argument_lists):
    """Runs a worker for each list of arguments at once; shows output if one fails."""
    running = [
        subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), *map(str, arguments)],
            cwd=ROOT,
            env={**worker.os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for arguments in argument_lists
    ]
    said = {}
    try:
        for process in running:
            said[process.pid] = process.communicate(timeout=TIMEOUT)[0]
    except subprocess.TimeoutExpired:
        said["time"] = f"no end after {TIMEOUT} seconds"
    finally:
        for process in running:
            process.kill()  # which does nothing to one that has ended
            said.setdefault(process.pid, process.communicate()[0])
    codes = [process.returncode for process in running]
    assert codes == [0] * len(running), "\n\n".join(map(str, [codes, *said.values()]))


def _like():
    """The tree that was saved, its tables as plain arrays on one device."""
    table, dense = map(jnp.asarray, worker.initial())
    losses = np.zeros(worker.STEPS, np.float32)
    run = {"params": {"table": table, "dense": dense}, "losses": losses}
    return {
        f"{name} {kind}": run for name in worker.OPTIMIZERS for kind in worker.KINDS
    }


def _check_training(trained, name):
    """The weights that an optimizer trained on each kind of ids, against one device."""
    tx = worker.OPTIMIZERS[name]
    step = dense_step_of(worker.loss_fn, tx, worker.HEIGHT)
    for kind in worker.KINDS:
        table, dense = map(jnp.asarray, worker.initial())
        params = {"table": table, "dense": dense}
        params, _, losses = run(step, params, tx.init(params), worker.batches(kind))
        assert not np.allclose(params["table"], table)  # it did train
        found = trained[f"{name} {kind}"]
        expected = {"params": params, "losses": losses}
        assert_close(found, expected, err_msg=f"{name} {kind}")


@pytest.mark.usefixtures("loose_promotion")  # optax.adam on dense arrays
def test_two_processes_train_like_one_device(tmp_path):
    """One test, so that the processes run once, however many workers pytest has."""
    port = _free_port()
    _run_all(*(["train", port, k, tmp_path] for k in range(worker.PROCESSES)))
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        first = sj.parallel.restore(manager, _like(), step=worker.TABLE_STEP)
        for name in worker.OPTIMIZERS:
            _check_training(first, name)
        # They restored their checkpoint into the other layout, and saved that.
        second = sj.parallel.restore(manager, _like(), step=worker.BLOCK_STEP)
        jax.tree.map(assert_same_bits, first, second)
        metadata = manager.metadata(worker.TABLE_STEP).custom_metadata
        assert metadata["batch"] == worker.STEPS
        assert manager.latest_step() == worker.STATE_STEP
