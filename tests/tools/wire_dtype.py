"""Trains two models with rows sent in float32 and in bfloat16, and compares the losses.

    python -m tests.tools.wire_dtype                    1,000 steps of each
    python -m tests.tools.wire_dtype --steps 300 --cap 10000

Eight simulated devices. `two towers` are trained on the purchases in
shared/data/online_retail by in-batch softmax; `dlrm` has the 26 tables of
tests/dlrm_model.py, of at most `--cap` rows. Printed are the mean losses of the last
tenth of the steps, their relative difference, and the bytes of ids and rows that a
device sends in a step, read from the compiled program.
"""

import argparse
import functools
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any


if __name__ == "__main__":  # before JAX is imported
    flags = "--xla_force_host_platform_device_count=8"
    os.environ.update(XLA_FLAGS=flags, NPROC="32", JAX_PLATFORMS="cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import sparsejax as sj
from benchmarks.models.dlrm import table_rows
from tests import dlrm_model as dlrm


DATA = pathlib.Path(__file__).parents[3] / "shared/data/online_retail"


def two_towers(pairs: np.ndarray, width: int, batch: int) -> tuple[Any, Any, Any]:
    """Parameters, loss and endless batches of two tables, from pairs of ids `[n, 2]`.

    Args:
      pairs: integers, the user and the item of each purchase.
      width: of the tables.
      batch: pairs in a batch.
    """
    users, items = (int(n) + 1 for n in pairs.max(axis=0))
    counts = np.bincount(pairs[:, 1], minlength=items).astype(np.float32)
    log_q = np.log((counts + 1) / (counts + 1).sum())

    def loss_fn(params, batch):
        user, item = (sj.lookup(params[name], batch[name]) for name in params)
        losses = sj.losses.in_batch_softmax_loss(
            user, item, candidate_ids=batch["item"], log_q=batch["log_q"]
        )
        return jnp.mean(losses)

    def batches():
        rng = np.random.default_rng(0)
        while True:
            some = pairs[rng.integers(0, len(pairs), batch)].astype(np.int32)
            yield {"user": some[:, 0], "item": some[:, 1], "log_q": log_q[some[:, 1]]}

    draw = lambda seed, n: 0.1 * jax.random.normal(jax.random.key(seed), (n, width))
    return {"user": draw(0, users), "item": draw(1, items)}, loss_fn, batches()


def click_model(
    cap: int, width: int, batch: int, count: int = 26
) -> tuple[Any, Any, Any]:
    """Parameters, loss and endless batches of a DLRM.

    Args:
      cap: the most rows of a table.
      width: of the tables.
      batch: examples in a batch.
      count: the number of tables.
    """
    model = dlrm.Model(table_rows(cap)[:count], width, bottom=(64,), top=(64,))
    loss_fn = functools.partial(dlrm.loss_fn, model)
    clicks = dlrm.Clicks(model.rows, batch)
    return model.init(jax.random.key(0)), loss_fn, iter(clicks, None)


def train(
    params: Any, loss_fn: Any, batches: Iterable[Any], tx: Any, wire_dtype: Any
) -> tuple[np.ndarray, int]:
    """Trains on eight devices; returns the losses and the bytes of an exchange.

    Args:
      params: arrays; all tables are sharded by rows.
      loss_fn: `loss_fn(params, batch)`.
      batches: a step for each.
      tx: an optax transformation.
      wire_dtype: of `shard_rows`.
    """
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    batches, tx = list(batches), sj.optim.lazy(tx)
    make_plan = functools.partial(
        sj.parallel.plan, params, mesh, batches[0], loss=loss_fn, wire_dtype=wire_dtype
    )
    names = [table.name for table in make_plan().tables]
    plan = make_plan(layouts=dict.fromkeys(names, "row-sharded"))
    params = plan.apply(jax.tree.map(np.asarray, params))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = sj.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses, sent = tx.init(params), [], 0
    for batch in batches:
        batch = jax.device_put(batch, plan.batch_sharding)
        if not losses:
            compiled = step.lower(params, state, batch).compile()
            sent = sj.viz.wire_bytes(compiled).by_kind["all-to-all"]
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return np.array(losses), sent


def compare(
    params: Any, loss_fn: Any, batches: Iterator[Any], tx: Any, steps: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """The losses `[steps]` and bytes of exchanges, in float32 and in bfloat16."""
    some = list(itertools.islice(batches, steps))
    runs = [train(params, loss_fn, some, tx, wire) for wire in (None, jnp.bfloat16)]
    (wide, narrow), sent = zip(*runs)
    return wide, narrow, list(sent)


def _purchases() -> np.ndarray:
    lines = np.load(DATA / "online_retail.npz")
    columns = [
        np.unique(lines[k], return_inverse=True)[1] for k in ("customer", "item")
    ]
    return np.stack(columns, axis=1)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--cap", type=int, default=100_000, help="rows of a table")
    args = parser.parse_args()
    models = {
        "two towers": (two_towers(_purchases(), 32, 512), optax.adam(0.01)),
        "dlrm": (click_model(args.cap, 16, 1024), optax.adagrad(0.02)),
    }
    for name, (model, tx) in models.items():
        wide, narrow, sent = compare(*model, tx, args.steps)
        last = max(1, args.steps // 10)
        a, b = wide[-last:].mean(), narrow[-last:].mean()
        print(
            f"{name}: loss {wide[0]:.4f} at first, {a:.5f} in float32, {b:.5f} in "
            f"bfloat16 ({100 * (b / a - 1):+.4f} %); sent {sent[0]:,} and {sent[1]:,} "
            f"bytes ({sent[1] / sent[0]:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
