"""`python worker.py PORT PROCESS DIRECTORY` trains with a second process, and saves."""

import os
import sys


if __name__ == "__main__":  # before JAX is imported
    # Those of the tests, with fewer devices.
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("count=8", "count=2")
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from one_device import step_of


PROCESSES, DEVICES = 2, 4
HEIGHT, WIDTH, BATCH, STEPS = 37, 4, 24, 5  # rows that 4 devices do not share evenly
KINDS = ("zipf", "adversarial")
OPTIMIZERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(0.1)}
TABLE_STEP, BLOCK_STEP, STATE_STEP = 5, 6, 7


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


def train(port, process, directory):
    """Trains every kind of ids with every optimizer; saves all tables and losses."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process)
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,))
    assert [d.process_index for d in mesh.devices.flat] == [0, 0, 1, 1]
    split, repeated = (NamedSharding(mesh, spec) for spec in (P("x"), P()))
    mine = slice(process * BATCH // PROCESSES, (process + 1) * BATCH // PROCESSES)
    share = lambda x: jax.make_array_from_process_local_data(split, x[mine])
    table, dense = initial()

    def params():
        sharded = sj.parallel.shard_rows(table, mesh, "x")
        return {"table": sharded, "dense": jax.device_put(dense, repeated)}

    trained = {}
    for name, tx in OPTIMIZERS.items():
        tx = sj.optim.lazy(tx)
        step = jax.jit(step_of(loss_fn, tx), donate_argnums=(0, 1))
        for kind in KINDS:
            # Either way its state lies with the table.
            init, found = tx.init if kind == "zipf" else jax.jit(tx.init), params()
            state, losses = init(found), []
            for ids, targets in batches(kind):
                found, state, value = step(found, state, share(ids), share(targets))
                losses.append(float(value))
            losses = np.array(losses, np.float32)
            trained[f"{name} {kind}"] = {"params": found, "losses": losses}

    # All processes get the ids of all devices; the cleared state fits the next step.
    tx = sj.optim.track_changes(sj.optim.lazy(OPTIMIZERS["sgd"]))
    step = jax.jit(step_of(loss_fn, tx), donate_argnums=(0, 1))
    tracked = params()
    marks = tx.init(tracked)
    for ids, targets in batches("zipf"):
        tracked, marks, _ = step(tracked, marks, share(ids), share(targets))
        changed, marks = sj.optim.take_changes(tracked, marks)
        assert changed["table"].tolist() == np.unique(ids).tolist()

    spec = jax.ShapeDtypeStruct(table.shape, table.dtype)
    block = sj.parallel.shard_rows(spec, mesh, "x", layout="block")
    as_block = {
        name: {**run, "params": {**run["params"], "table": block}}
        for name, run in trained.items()
    }
    with ocp.CheckpointManager(directory) as manager:
        batch = {"batch": STEPS}
        sj.parallel.save(manager, trained, step=TABLE_STEP, custom_metadata=batch)
        as_block = sj.parallel.restore(manager, as_block)
        sj.parallel.save(manager, as_block, step=BLOCK_STEP)
        sj.parallel.save(manager, (found, state), step=STATE_STEP)
        # Into state of each process: it goes where the table goes.
        nowhere = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
        restored = sj.parallel.restore(manager, (found, nowhere), step=STATE_STEP)[1]
        pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
        moments = [(a, b) for a, b in pairs if b.shape == found["table"].values.shape]
        assert len(moments) == 2  # Adam's
        for a, b in moments:
            assert a.sharding == found["table"].values.sharding
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
                assert np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()
    jax.distributed.shutdown()


if __name__ == "__main__":
    port, process, directory = sys.argv[1:]
    train(int(port), int(process), directory)
