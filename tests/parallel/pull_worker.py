"""One of two processes that train a table spread over both their memories.

`python pull_worker.py PORT PROCESS DIRECTORY` trains, and saves its part of
the table. The test imports from here what is trained on what.
"""

import os
import pathlib
import sys
from typing import Any


if __name__ == "__main__":  # before JAX is imported
    flags = "--xla_force_host_platform_device_count=2"
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj


PROCESSES, DEVICES = 2, 4
HEIGHT, WIDTH, BATCH, STEPS = 1_001, 4, 24, 4


def initial():
    """The table before the first step."""
    return np.random.default_rng(7).normal(size=(HEIGHT, WIDTH)).astype(np.float32)


def batches():
    """(ids, targets) of each step; in the last one all rows are of one process."""
    rng = np.random.default_rng(0)
    for number in range(STEPS):
        ids = (rng.zipf(1.2, BATCH) % HEIGHT).astype(np.int32)
        if number == STEPS - 1:
            ids = ids // 2 * 2
        yield ids, rng.normal(size=BATCH).astype(np.float32)


def transformation():
    """Of which the count of steps matters, in a process without a row too."""
    return optax.adam(optax.exponential_decay(0.1, 1, 0.5))


def make_mesh():
    return jax.make_mesh(
        (DEVICES,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES]
    )


@jax.jit
def gradient(table, ids, targets):
    """The gradient of a regression on looked-up rows."""

    def loss(table):
        rows = sj.lookup(table, ids)
        return jnp.mean((jnp.sum(rows, axis=1) - targets) ** 2)

    return sj.grad(loss)(table)


def replicated_step():
    """A step for one device, of a table that every device has a copy of."""
    tx = sj.optim.lazy(transformation())

    def step(table, state, ids, targets):
        grads = sj.parallel.pmean(gradient(table, ids, targets), "x", capacity=5)
        updates, state = tx.update(grads, state, table)
        return optax.apply_updates(table, updates), state

    return step, tx.init(jnp.asarray(initial()))


def errors_are_everywhere(store):
    """One process asks for what there is not: both must be told, and go on."""
    ids = [HEIGHT] if jax.process_index() == 1 else [0]
    try:
        store.pull("t", ids)
    except ValueError as error:
        assert "out of range" in str(error)
        return
    raise AssertionError("a bad id of one process went unnoticed in this one")


def train(port, process, directory):
    """Trains with the other process, and saves what this one holds."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process)
    mesh = make_mesh()
    split = NamedSharding(mesh, P("x"))
    mine = slice(process * BATCH // PROCESSES, (process + 1) * BATCH // PROCESSES)
    share = lambda x: jax.make_array_from_process_local_data(split, x[mine])

    store = sj.parallel.SpreadStore(mesh)
    store.init("t", initial(), transformation())
    errors_are_everywhere(store)
    step, state = replicated_step()
    run = sj.parallel.data_parallel(step, mesh, "x")
    replica: Any = initial()
    pulled = []
    for number, (ids, targets) in enumerate(batches()):
        ids, targets = share(ids), share(targets)
        parts = [shard.data for shard in ids.addressable_shards]
        table = store.pull("t", ids if number % 2 else parts)
        pulled.append(np.asarray(table.rows.addressable_data(0)))
        store.push("t", gradient(table, ids, targets))
        replica, state = run(replica, state, ids, targets)
    last = store.pull("t", np.arange(process, HEIGHT, PROCESSES))
    np.savez(
        pathlib.Path(directory) / f"{process}.npz",
        part=store.local.pull_all("t"),
        last=np.asarray(last.values.addressable_data(0)),
        rows=np.array(store.local.stats()["t"].rows),
        replica=np.asarray(replica.addressable_data(0)),
        pulled=np.concatenate(pulled),
    )
    jax.distributed.shutdown()


if __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
