"""Trains in several processes, and starts all of them again when one of them dies.

    python examples/restart.py localhost:1234 2 0 run & \\
    python examples/restart.py localhost:1234 2 1 run       # then kill a child of one
    python examples/restart.py host0:1234 2 0 run --store   # tables in host memories

Start it on each host: the address of host 0, the number of processes, and of this one.
It runs itself as a child, again when the child fails. If a child dies, the coordinator
ends the others, and all go on from the latest save, in a folder that all hosts see.
"""

import argparse
import functools
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj


V, D, LOCAL_BATCH, STEPS, SAVE_EVERY = 1_007, 16, 64, 60, 10
ATTEMPTS = 5  # failures in a row without a new save
tx = sj.optim.lazy(optax.adagrad(0.1))


def latest_step(args):
    """The step of the latest save, or 0."""
    if args.store:
        path = pathlib.Path(args.folder, f"step-{args.process}")
        return int(path.read_text()) if path.exists() else 0
    names = [path.name for path in pathlib.Path(args.folder).glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def supervise(args):
    """Runs this script as a child, again and again, until it succeeds."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the child too
    child, env = [sys.executable, *sys.argv], {**os.environ, "IS_CHILD": "1"}
    failures, before = 0, latest_step(args)
    while code := subprocess.run(child, env=env).returncode:
        step = latest_step(args)
        failures, before = (failures + 1 if step == before else 1), step
        ended = f"process {args.process} of {args.processes} ended with exit code"
        message = f"{ended} {code}. Resume from step {step} in {args.folder}"
        if failures == ATTEMPTS:
            sys.exit(f"{message}: failed {failures} times.")
        print(f"{message}: restarting.", file=sys.stderr, flush=True)
        time.sleep(1)


def make_loader():
    rng = np.random.default_rng(0)
    ids = rng.zipf(1.3, 2_048).astype(np.int32) % V
    dataset = sj.data.ArrayDataset(ids, rng.normal(size=2_048).astype(np.float32))
    part = jax.process_index(), jax.process_count()  # each process reads its part
    options = {"shuffle": True, "drop_remainder": True, "shard": part}
    return sj.data.DataLoader(dataset, LOCAL_BATCH, **options)


def batches_from(loader, step, mesh):
    """Global batches with the position after each, epoch by epoch, to the last step."""
    print(f"process {jax.process_index()} starts at step {step}", flush=True)
    split = NamedSharding(mesh, P("x"))
    make_global = functools.partial(jax.make_array_from_process_local_data, split)
    while step < STEPS:
        batches = iter(loader)  # the next epoch, or the rest of the one restored
        for _, batch in zip(range(STEPS - step), batches):
            step += 1
            yield step, [make_global(x) for x in batch], batches.get_state


def loss_fn(params, batch):
    ids, targets = batch
    return jnp.mean((params["table"][ids] @ params["dense"] - targets) ** 2)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, state, batch):
    loss, grads = sj.value_and_grad(loss_fn)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def train_sharded(args, loader, mesh, dense):
    """A table whose rows are sharded over the devices; orbax saves."""
    table = np.random.default_rng(1).normal(0, 0.1, (V, D)).astype(np.float32)
    params = {"table": sj.parallel.shard_rows(table, mesh, "x"), "dense": dense}
    options = ocp.CheckpointManagerOptions(max_to_keep=3, cleanup_tmp_directories=True)
    with ocp.CheckpointManager(args.folder, options=options) as manager:
        state, step = tx.init(params), manager.latest_step() or 0
        if step:
            params, state = sj.parallel.restore(manager, (params, state))
            loader.set_state(manager.metadata(step).custom_metadata["loader"])
        for step, batch, position in batches_from(loader, step, mesh):
            params, state, _ = train_step(params, state, batch)
            if step % SAVE_EVERY == 0:
                meta, tree = {"loader": position()}, (params, state)
                sj.parallel.save(manager, tree, step=step, custom_metadata=meta)


def train_store(args, loader, mesh, dense):
    """A table whose rows are in the memories of the hosts; the store saves."""
    store, path = sj.store.KVStore(mesh), pathlib.Path(args.folder, "model")
    store.init("table", (V, D), optax.adagrad(0.1))
    params = {"table": store["table"], "dense": dense}
    state, step = tx.init(params), 0
    train_step = store.train_step(loss_fn, tx)
    try:
        saved = store.load(path, (params, state, step, loader.get_state()))
        params, state, step, position = saved
        loader.set_state(position)
    except FileNotFoundError:
        path.parent.mkdir(exist_ok=True)  # the first start
    for step, batch, position in batches_from(loader, step, mesh):
        params, state, _ = train_step(params, state, batch)
        if step % SAVE_EVERY == 0:
            store.save(path, (params, state, step, position()))
            path.with_name(f"step-{args.process}").write_text(str(step))


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = {"coordinator": str, "processes": int, "process": int, "folder": str}
    for name, kind in kinds.items():
        parser.add_argument(name, type=kind)
    parser.add_argument("--store", action="store_true")
    args = parser.parse_args(argv)
    if "IS_CHILD" not in os.environ:
        return supervise(args)  # makes no array, so it occupies no device
    try:
        jax.distributed.initialize(
            args.coordinator, args.processes, args.process, heartbeat_timeout_seconds=10
        )
        mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
        dense = jax.device_put(np.ones(D, np.float32), NamedSharding(mesh, P()))
        train = train_store if args.store else train_sharded
        train(args, make_loader(), mesh, dense)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at its end the script would wait for the other processes


if __name__ == "__main__":
    main()
