"""Trains a DLRM on many devices: its tables are planned, sharded, saved and restored.

    python examples/many_devices.py --simulate 8                # 8 devices of one CPU
    python examples/many_devices.py --steps 2000 --folder run   # on the devices here
    python examples/many_devices.py --steps 4000 --folder run   # goes on, on any number

The clicks are made from a stated model: vectors of users, items and countries that the
program knows and the DLRM has to learn. No model has a better AUC than its
probabilities. A batch depends on the number of its step alone, so that a run that was
saved and restored takes the steps of one that was not.
"""

import argparse
import os
import pathlib
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType

import sparsejax as sj


HEIGHTS = {"user": 200_000, "item": 20_000, "country": 40}
DIM, BATCH = 16, 1024


def make_batch(number, size, known):
    """The clicks of a step, and their logits; they are the same in every run."""
    rng = np.random.default_rng(number)
    batch, vectors = {"dense": rng.normal(size=(size, 4)).astype(np.float32)}, []
    for name, height in HEIGHTS.items():
        batch[name] = (height ** rng.random(size)).astype(
            np.int32
        )  # a few are frequent
        vectors.append(known[name][batch[name]])
    user, item, country = vectors
    logits = np.sum(user * item + user * country + batch["dense"] * item, axis=1)
    batch["label"] = (rng.random(size) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return batch, logits


def init(key):
    keys = iter(jax.random.split(key, 6))
    normal = lambda n, m, scale: scale * jax.random.normal(next(keys), (n, m))
    return {
        "tables": {name: normal(n, DIM, 0.1) for name, n in HEIGHTS.items()},
        "bottom": normal(4, DIM, 0.5),
        "top": [normal(DIM + 6, 64, 0.2), normal(64, 1, 0.1)],
    }


def logits_of(params, batch):
    """Products of all pairs of vectors, then dense layers (Naumov et al., 2019)."""
    dense = jnp.tanh(batch["dense"] @ params["bottom"])
    rows = [table[batch[name]] for name, table in params["tables"].items()]
    vectors = jnp.stack([dense, *rows], axis=1)
    products = jnp.einsum("bid,bjd->bij", vectors, vectors)
    pairs = products[:, *np.triu_indices(vectors.shape[1], 1)]
    hidden = jax.nn.relu(jnp.concatenate([dense, pairs], axis=1) @ params["top"][0])
    return (hidden @ params["top"][1])[:, 0]


def loss_fn(params, batch):
    losses = optax.sigmoid_binary_cross_entropy(
        logits_of(params, batch), batch["label"]
    )
    return jnp.mean(losses)


def auc(scores, labels):
    """The probability that a click has a higher score than a row without one."""
    right, wrong = scores[labels > 0], np.sort(scores[labels == 0])
    return np.mean(np.searchsorted(wrong, right)) / len(wrong)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Trains a DLRM on many devices.")
    parser.add_argument("--simulate", type=int, help="devices to make of the CPU")
    parser.add_argument("--devices", type=int, help="the number of devices to use")
    parser.add_argument("--steps", type=int, default=1000, help="in all runs together")
    parser.add_argument("--save-every", type=int, default=500, help="steps")
    parser.add_argument("--folder", help="for checkpoints; it goes on from the latest")
    args = parser.parse_args(argv)
    sj.cpu.keep_freed_pages()
    if args.simulate:  # before the first computation
        os.environ.setdefault("NPROC", str(4 * args.simulate))  # threads; or they wait
        jax.config.update("jax_num_cpu_devices", args.simulate)
        jax.config.update("jax_platforms", "cpu")
    found = len(jax.devices())
    if args.devices is not None and not 1 <= args.devices <= found:
        sys.exit(f"many_devices: --devices must be 1 to {found}, got {args.devices}.")
    devices = jax.devices()[: args.devices]
    mesh = jax.make_mesh(
        (len(devices),), ("x",), axis_types=(AxisType.Auto,), devices=devices
    )
    tx = sj.optim.lazy(sj.optim.adagrad(0.05))
    rng = np.random.default_rng(0)
    known = {name: rng.normal(0, 0.7, (n, 4)) for name, n in HEIGHTS.items()}
    first, _ = make_batch(0, BATCH, known)
    shapes = jax.eval_shape(init, jax.random.key(0))
    plan = sj.parallel.plan(shapes, mesh, first, loss=loss_fn, tx=tx)
    print(plan)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        loss, grads = sj.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = plan.apply(init(jax.random.key(0)))
    opt_state, losses, start = tx.init(params), [], 0
    manager = None
    if args.folder:
        folder = pathlib.Path(args.folder).absolute()
        manager = ocp.CheckpointManager(
            folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )
        if start := manager.latest_step() or 0:
            params, opt_state = sj.parallel.restore(manager, (params, opt_state))
            print(f"goes on from step {start}")
    began = time.perf_counter()
    for number in range(start, args.steps):
        batch, _ = make_batch(number, BATCH, known)
        batch = jax.device_put(batch, plan.batch_sharding)
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss)
        if manager and (number + 1) % args.save_every == 0:
            sj.parallel.save(manager, (params, opt_state), step=number + 1)
        if (number + 1) % 100 == 0:
            loss, spent = np.mean(losses[-100:]), time.perf_counter() - began
            speed = BATCH * len(losses) / spent
            print(f"step {number + 1}: loss {loss:.4f}, {speed:,.0f} clicks/s")
    if manager:
        manager.close()  # waits for the last save
    batch, logits = make_batch(2**31, 16 * BATCH, known)  # of no step
    scores = np.asarray(jax.jit(logits_of)(params, batch))
    found, best = auc(scores, batch["label"]), auc(logits, batch["label"])
    print(f"AUC {found:.4f}, of the true probabilities {best:.4f}")


if __name__ == "__main__":
    main()
