"""One of two processes that train a table sharded over both their memories.

`python mesh_worker.py PORT PROCESS DIRECTORY` trains, and saves its results. The
test imports the model and the batches from here.
"""

import dataclasses
import functools
import os
import pathlib
import sys
from typing import Any


if __name__ == "__main__":  # before JAX is imported
    # Those of the tests, with fewer devices.
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("count=8", "count=2")
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj


PROCESSES, DEVICES = 2, 4
HEIGHT, WIDTH, BATCH, STEPS = 1_001, 4, 24, 4


def initial():
    """The table before the first step."""
    return np.random.default_rng(7).normal(size=(HEIGHT, WIDTH)).astype(np.float32)


def batches():
    """`(ids, targets)` of each step; the last step has even ids only."""
    rng = np.random.default_rng(0)
    for number in range(STEPS):
        ids = (rng.zipf(1.2, BATCH) % HEIGHT).astype(np.int32)
        if number == STEPS - 1:
            ids = ids // 2 * 2
        yield ids, rng.normal(size=BATCH).astype(np.float32)


@functools.cache
def transformation():
    """A transformation that depends on the count of steps, in each process."""
    return optax.adam(optax.exponential_decay(0.1, 1, 0.5))


# One object for all stores, so that its programs are compiled once.
ADAGRAD = optax.adagrad(0.1)


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
    """A step for one device, with a copy of the table on every device."""
    tx = sj.optim.lazy(transformation())

    def step(table, state, ids, targets):
        grads = sj.parallel.pmean(gradient(table, ids, targets), "x", capacity=5)
        updates, state = tx.update(grads, state, table)
        return optax.apply_updates(table, updates), state

    return step, tx.init(jnp.asarray(initial()))


def init_normal(store):
    """A table whose rows start when they are first read."""
    store.init("n", (HEIGHT, 2), None, initializer=jax.nn.initializers.normal(), key=5)
    return store


def train_with_trainer(store, share=lambda batch: batch):
    """Losses, table and dense parameters after a few steps of a Trainer."""

    @dataclasses.dataclass(frozen=True)
    class Regression(sj.nn.SparseBlock):
        item: sj.nn.SparseEmbedding = sj.nn.SparseEmbedding(HEIGHT, WIDTH, name="item")

        def row_ids(self, inputs):
            return self.item.row_ids(inputs)

        def sparse_forward(self, tables, params, inputs):
            return self.item(tables, params["item"], inputs) @ params["w"]

    trainer = sj.nn.Trainer(
        Regression(),
        store,
        lambda outputs, batch: jnp.mean((outputs - batch[1]) ** 2),
        optax.sgd(0.1),
        table_tx=ADAGRAD,
        inputs=lambda batch: batch[0],
        params={"item": {}, "w": np.ones(WIDTH, np.float32)},
        key=3,
    )
    losses = [trainer.step(share(batch)) for batch in batches()]
    return results(losses, trainer.params["w"], store)


def results(losses, w, store):
    losses, w = np.array([*map(np.asarray, losses)]), np.asarray(w)
    return {"loss": losses, "w": w, "table": store.pull_all("item")}


def train_with_step(store, share=lambda batch: batch):
    """The same of `store.train_step`."""
    store.init("item", initial(), ADAGRAD)

    def loss_fn(params, batch):
        outputs = params["item"][batch[0]] @ params["w"]
        return jnp.mean((outputs - batch[1]) ** 2)

    tx, losses = optax.sgd(0.1), []
    params = {"item": store["item"], "w": np.ones(WIDTH, np.float32)}
    state, step = tx.init(params), store.train_step(loss_fn, tx)
    for batch in batches():
        params, state, loss = step(params, state, share(batch))
        losses.append(loss)
    return results(losses, params["w"], store)


def pull_of_two_tables(mesh, process):
    """Checks that it takes as many collectives as a pull of one."""
    store = init_normal(sj.store.KVStore(mesh))
    store.init("t", initial(), None)
    ids = {"n": np.arange(process, 90, 3), "t": np.array([process, 7, HEIGHT - 1])}
    expected = {name: store.pull(name, some) for name, some in ids.items()}
    gather, counts = multihost_utils.process_allgather, []

    def counted(x, **options):
        counts.append(np.size(x))
        return gather(x, **options)

    multihost_utils.process_allgather = counted
    found = store.pull(ids)
    multihost_utils.process_allgather = gather
    assert counts == [2, 64], counts  # sizes; 30 and 3 ids, in a power of two
    for name, rows in expected.items():
        np.testing.assert_array_equal(local(found[name].rows), local(rows.rows))
        np.testing.assert_array_equal(local(found[name].values), local(rows.values))
    assert local(found["t"].rows)[:4].tolist() == [0, 1, 7, HEIGHT - 1]


def errors_are_everywhere(store):
    """A bad id of one process is an error in both, which go on."""
    ids = [HEIGHT] if jax.process_index() == 1 else [0]
    with pytest.raises(ValueError, match="out of range"):
        store.pull("t", ids)


def local(x):
    return np.asarray(x.addressable_data(0))


def global_batch(mesh, process, batch):
    """The batch as global arrays, to which each process gives its half."""
    split = NamedSharding(mesh, P("x"))
    mine = slice(process * BATCH // PROCESSES, (process + 1) * BATCH // PROCESSES)
    share = lambda x: jax.make_array_from_process_local_data(split, x[mine])
    return jax.tree.map(share, batch)


def train(mesh, process, directory) -> dict[str, Any]:
    """Trains with the other process."""
    shared = [global_batch(mesh, process, batch) for batch in batches()]
    stores = {name: sj.store.KVStore(mesh) for name in ("whole", "prefetched")}
    store, ahead = stores.values()
    for each in store, ahead:
        each.init("t", initial(), transformation())
    errors_are_everywhere(store)
    step, state = replicated_step()
    run = sj.parallel.data_parallel(step, mesh, "x")
    replica: Any = initial()
    pulled = []
    for number, (ids, targets) in enumerate(shared):
        parts = [shard.data for shard in ids.addressable_shards]
        table = store.pull("t", ids if number % 2 else parts)
        pulled.append(local(table.rows))
        store.push("t", gradient(table, ids, targets))
        replica, state = run(replica, state, ids, targets)
    last = store.pull("t", np.arange(process, HEIGHT, PROCESSES))

    batch_ids = lambda batch: batch[0]
    for (ids, targets), table in ahead.prefetch(shared, batch_ids, capacity=BATCH):
        ahead.push("t", gradient(table, ids, targets))

    path = pathlib.Path(directory) / "saved"
    store.save(path, {"replica": replica, "steps": STEPS})
    stores["resumed"] = resumed = sj.store.KVStore(mesh)
    resumed.init("t", (HEIGHT, WIDTH), transformation(), path=path.with_name("mapped"))
    saved = resumed.load(path, {"replica": jnp.zeros_like(replica), "steps": 0})
    assert saved["steps"] == STEPS

    stores["followed"] = followed = sj.store.KVStore(mesh)
    followed.init("t", initial(), transformation())
    store.export_changes(path.with_name("changes"), since=0)
    followed.apply_changes(path.with_name("changes"))

    normal = init_normal(sj.store.KVStore(mesh))
    fresh = normal.pull_all("n")
    half = HEIGHT // 2
    normal.assign("n", 2 * fresh)
    rows = np.arange(half, dtype=np.int32)
    normal.assign("n", sj.SelectedRows(rows, 2 * fresh[:half], HEIGHT))
    return {name: each.pull_all("t") for name, each in stores.items()} | {
        "rows": np.array(store.stats()["t"].rows),
        "pulled": np.concatenate(pulled),
        "last": local(last.values),
        "replica": local(replica),
        "saved": local(saved["replica"]),
        "fresh": fresh,
        "assigned": normal.pull_all("n"),
    }


def main(port, process, directory):
    """Runs in both processes, and saves the results of this one."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process)
    mesh = make_mesh()
    share = functools.partial(global_batch, mesh, process)
    found = train(mesh, process, directory)
    pull_of_two_tables(mesh, process)
    for run in train_with_trainer, train_with_step:
        values = run(sj.store.KVStore(mesh), share)
        found |= {f"{run.__name__} {name}": x for name, x in values.items()}
    np.savez(pathlib.Path(directory) / f"{process}.npz", **found)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
