"""Two processes of two devices each, over loopback, against one device in one process.

The processes run `worker.py`. Both write one checkpoint, which the test reads onto one
device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import sparsejax as sj
import worker
from helpers import assert_same_bits, run_together
from one_device import assert_close, dense_step_of, run


pytestmark = pytest.mark.slow


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
    run_together(worker.__file__, "train", directory=tmp_path)
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
