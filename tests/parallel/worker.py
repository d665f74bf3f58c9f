"""One of several processes that train a sharded table together, or one to be killed.

`python worker.py train PORT PROCESS DIRECTORY` trains with a second process
and saves the weights. `python worker.py crash DIRECTORY KILLS` saves and
is killed, again and again. The tests import the models and batches from here, to
train them on one device.
"""

import os
import pathlib
import random
import signal
import sys
import time
import warnings


if __name__ == "__main__":  # before JAX is imported
    # Those of the tests, with fewer devices.
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("count=8", "count=2")
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import one_device
import sparsejax as sj


PROCESSES, DEVICES = 2, 4
HEIGHT, WIDTH, BATCH, STEPS = 37, 4, 24, 5  # rows that 4 devices do not share evenly
KINDS = ("zipf", "adversarial")
OPTIMIZERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(0.1)}
TABLE_STEP, BLOCK_STEP, STATE_STEP = 5, 6, 7
CRASH_HEIGHT, CRASH_PATIENCE = 100_001, 60  # rows; seconds


# ------------------------------------------------------------------ training


def batches(kind):
    """(ids, targets) of each step; adversarial ids are all of one owner."""
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(STEPS):
        ids = {
            "zipf": lambda: rng.zipf(1.2, BATCH) % HEIGHT,
            "adversarial": lambda: rng.integers(0, HEIGHT // DEVICES, BATCH) * DEVICES,
        }[kind]()
        yield ids.astype(np.int32), rng.normal(size=BATCH).astype(np.float32)


def initial():
    """The table and the dense weights before the first step."""
    rng = np.random.default_rng(7)
    table = rng.normal(size=(HEIGHT, WIDTH)).astype(np.float32)
    return table, rng.normal(size=WIDTH).astype(np.float32)


def loss_fn(params, ids, targets):
    """A regression on looked-up rows."""
    rows = sj.lookup(params["table"], ids)
    return jnp.mean((rows @ params["dense"] - targets) ** 2)


def tables_of(state):
    """The values of the tables in an optimizer's state."""
    is_table = lambda x: isinstance(x, sj.parallel.ShardedTable)
    leaves = jax.tree.leaves(state, is_leaf=is_table)
    return [x.values for x in leaves if is_table(x)]


# ------------------------------------------------------------------ many processes


def train(port, process, directory):
    """Trains every kind of ids with every optimizer; saves all tables and losses."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=auto)
    assert [d.process_index for d in mesh.devices.flat] == [0, 0, 1, 1]
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    repeated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    mine = slice(process * BATCH // PROCESSES, (process + 1) * BATCH // PROCESSES)
    share = lambda x: jax.make_array_from_process_local_data(split, x[mine])
    table, dense = initial()

    trained = {}
    for name, tx in OPTIMIZERS.items():
        tx = sj.optim.lazy(tx)
        step = jax.jit(one_device.step_of(loss_fn, tx), donate_argnums=(0, 1))
        for kind in KINDS:
            params = {
                "table": sj.parallel.shard_rows(table, mesh, "x"),
                "dense": jax.device_put(dense, repeated),
            }
            # Either way its state lies with the table.
            init = tx.init if kind == "zipf" else jax.jit(tx.init)
            state, losses = init(params), []
            for ids, targets in batches(kind):
                params, state, value = step(params, state, share(ids), share(targets))
                losses.append(float(value))
            losses = np.array(losses, np.float32)
            trained[f"{name} {kind}"] = {"params": params, "losses": losses}

    # All processes get the ids of all devices; the cleared state fits the next step.
    tx = sj.optim.track_changes(sj.optim.lazy(OPTIMIZERS["sgd"]))
    step = jax.jit(one_device.step_of(loss_fn, tx), donate_argnums=(0, 1))
    sharded = sj.parallel.shard_rows(table, mesh, "x")
    tracked = {"table": sharded, "dense": jax.device_put(dense, repeated)}
    marks = tx.init(tracked)
    for ids, targets in batches("zipf"):
        tracked, marks, _ = step(tracked, marks, share(ids), share(targets))
        changed, marks = sj.optim.take_changes(tracked, marks)
        assert changed["table"].tolist() == np.unique(ids).tolist()

    spec = jax.ShapeDtypeStruct(table.shape, table.dtype)
    block = sj.parallel.shard_rows(spec, mesh, "x", layout="block")
    as_block = jax.tree.map(lambda x: x, trained)
    for run in as_block.values():
        run["params"] = {**run["params"], "table": block}
    with ocp.CheckpointManager(directory) as manager:
        batch = {"batch": STEPS}
        sj.parallel.save(manager, trained, step=TABLE_STEP, custom_metadata=batch)
        as_block = sj.parallel.restore(manager, as_block)
        sj.parallel.save(manager, as_block, step=BLOCK_STEP)
        sj.parallel.save(manager, (params, state), step=STATE_STEP)
        # Into state of each process: it goes where the table goes.
        nowhere = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
        found = sj.parallel.restore(manager, (params, nowhere), step=STATE_STEP)[1]
        assert len(tables_of(found)) == 2  # Adam's moments
        for a, b in zip(tables_of(found), tables_of(state), strict=True):
            assert a.sharding == params["table"].values.sharding
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
                assert np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()
    jax.distributed.shutdown()


# ------------------------------------------------------------------ killed


def contents(step):
    """A tree whose values are all the number of its step."""
    return {"table": np.full((CRASH_HEIGHT, 16), step, np.float32), "step": step}


def save_on_and_on(directory):
    """Goes on from the latest checkpoint, and saves until it is killed."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharded(step):
        tree = contents(step)
        return {**tree, "table": sj.parallel.shard_rows(tree["table"], mesh, "x")}

    options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
    with ocp.CheckpointManager(directory, options=options) as manager:
        step = manager.latest_step() or 0
        if step:
            assert sj.parallel.restore(manager, sharded(0))["step"] == step
        while True:
            step += 1
            sj.parallel.save(manager, sharded(step), step=step)


def crash(directory, kills):
    """Forks a process that saves, kills it in the midst of a save; `kills` times."""
    draw = random.Random(0)
    for _ in range(kills):
        child = os.fork()
        if not child:
            save_on_and_on(directory)
        # A save is under way while its directory has a name that is not final. First
        # comes one that is: each life gets some steps further.
        seen, deadline = set(), time.monotonic() + CRASH_PATIENCE
        while time.monotonic() < deadline:
            unfinished = set(pathlib.Path(directory).glob("*orbax-checkpoint-tmp*"))
            if unfinished - seen and len(seen) > 2:
                break
            seen |= unfinished
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left = list(pathlib.Path(directory).glob("*orbax-checkpoint-tmp*"))
        print("killed; unfinished saves left behind:", len(left), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        # Until a child uses it, JAX has started no thread: it may be forked.
        warnings.filterwarnings("ignore", "os.fork")
        crash(sys.argv[2], int(sys.argv[3]))
