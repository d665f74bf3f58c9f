"""Two processes of two devices each, over loopback, against one device in one process.

The processes run `worker.py`. Both write one checkpoint, which the test reads onto one
device.
"""

import contextlib
import functools
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


pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
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


def _dense_step(tx, params, state, ids, targets):
    """A step of dense optax; rows that the batch did not read stay as they were."""
    loss = functools.partial(worker.loss_fn, lambda table, ids: table[ids])
    value, grads = jax.value_and_grad(loss)(params, ids, targets)
    updates, new_state = tx.update(grads, state, params)
    read = jnp.zeros(worker.HEIGHT, bool).at[ids].set(True)[:, None]

    def keep(new, old):
        return jnp.where(read, new, old) if new.shape[:1] == (worker.HEIGHT,) else new

    new_params = jax.tree.map(lambda p, u: p + u, params, updates)
    keep_all = functools.partial(jax.tree.map, keep)
    return keep_all(new_params, params), keep_all(new_state, state), value


def _check_training(trained, name):
    """The weights that an optimizer trained on each kind of ids, against one device."""
    tx = worker.OPTIMIZERS[name]
    step = jax.jit(functools.partial(_dense_step, tx))
    for kind in worker.KINDS:
        table, dense = map(jnp.asarray, worker.initial())
        params = {"table": table, "dense": dense}
        state, losses = tx.init(params), []
        for ids, targets in worker.batches(kind):
            params, state, value = step(params, state, ids, targets)
            losses.append(float(value))
        told = f"{name} {kind}"
        found = trained[told]
        assert not np.allclose(params["table"], table)  # it did train
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        close(found["losses"], losses, err_msg=told)
        close(found["params"]["table"], params["table"], err_msg=told)
        close(found["params"]["dense"], params["dense"], err_msg=told)


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
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        metadata = manager.metadata(worker.TABLE_STEP).custom_metadata
        assert metadata["batch"] == worker.STEPS
        assert manager.latest_step() == worker.STATE_STEP
