"""A training step over a mesh, in every layout of a table or of several tables.

Each device has its own part of a batch of bags of ids. A step looks up, differentiates
and updates with Adagrad. The tables, one or a collection of eight, are put in every
layout that `sj.parallel.plan` has for them, by `plan.apply`; and, as "by XLA", sharded
by rows and left to XLA's partitioner (GSPMD). Compared are the bytes that a device
sends in a step, read from the compiled program and as the plan predicts them, the bytes
that it holds, and the time of a step. The sides take turns, with other ids in every
run; their losses are compared before they are timed.

    python -m benchmarks sharded
    python -m benchmarks sharded --case table --rows 100000 --check --json out.jsonl

Devices are made of the CPU where there are no others: these share its cores, and what
they exchange is a copy in memory. So times show what the work costs, and bytes what a
network would add. `--check` asserts the claim on bytes.
"""

import argparse
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from benchmarks import timing


HEIGHTS = (300_000, 200_000, 90_000, 80_000, 70_000, 60_000, 50_000, 30_000)
BAG = 20
MAX_DEVICES = 8
AXES = ("host", "x")
XLA, OURS = "by XLA", "row-sharded"
# The megabytes that a device sends in a step by rows, at these sizes.
CLAIMED_MB = 0.6
CLAIMED_CASE = {"devices": 4, "rows": 100_000, "dim": 32, "ids": 5_120, "skew": "zipf"}


def about() -> dict[str, Any]:
    """Asks for devices made of the CPU, before JAX looks for any; the machine."""
    name = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {name}={MAX_DEVICES}".strip()
    # XLA's threads; a device may wait for the others in several of them at once.
    os.environ.setdefault("NPROC", "32")
    return timing.machine()


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each number of devices, and each table or collection."""
    for devices in args.devices:
        for rows in args.rows if args.case != "collection" else ():
            yield measure(args, devices, (rows,))
        if args.case != "table":
            yield measure(args, devices, HEIGHTS)


def measure(
    args: argparse.Namespace, devices: int, heights: Sequence[int]
) -> dict[str, Any]:
    """Times all layouts of tables of these heights: one record."""
    # Two places on the first axis, as two hosts would have.
    auto, some = (AxisType.Auto,) * 2, jax.devices()[:devices]
    mesh = jax.make_mesh((2, devices // 2), AXES, axis_types=auto, devices=some)
    rng, names = np.random.default_rng(0), [f"t{k}" for k in range(len(heights))]
    shapes = {name: (height, args.dim) for name, height in zip(names, heights)}
    layer = sj.nn.EmbeddingCollection(shapes)
    # All tables together read as many ids, however many there are.
    examples = max(1, args.ids // (BAG * len(heights)))

    def loss_fn(params, batch):
        out = layer(params["tables"], batch["ids"])
        bags = jnp.stack([out[name] for name in names], axis=1)
        scores = jnp.einsum("bfd,d->b", jnp.tanh(bags), params["w"])
        return jnp.mean((scores - batch["y"]) ** 2)

    def make_batch():
        shape, is_zipf = (devices * examples, BAG), args.skew == "zipf"
        draw = lambda: rng.zipf(1.2, shape) if is_zipf else rng.integers(2**31, shape)
        ids = {n: (draw() % h).astype(np.int32) for n, h in zip(names, heights)}
        return {"ids": ids, "y": rng.standard_normal(shape[0], np.float32)}

    tables = jax.tree.map(np.asarray, layer.init(jax.random.key(0)))
    params = {"tables": tables, "w": np.ones(args.dim, np.float32)}
    batch, tx = make_batch(), optax.adagrad(0.05)
    options = {"loss": loss_fn, "tx": tx, "stacks": layer.heights()}
    plan = functools.partial(sj.parallel.plan, params, mesh, batch, **options)
    (table,) = plan().tables

    # Where each side has its parameters and its batch.
    placed: dict[str, tuple[Any, Any]] = {}
    for name in table.costs:
        applied = plan(layouts={table.name: name})
        placed[name] = applied.apply(params), applied.batch_sharding
    if sum(heights) % devices == 0:
        rows = lambda x: NamedSharding(mesh, P(AXES) if np.ndim(x) > 1 else P())
        by_rows = jax.device_put(params, jax.tree.map(rows, params))
        placed[XLA] = by_rows, NamedSharding(mesh, P(AXES))

    compiled, states, losses, programs = {}, {}, {}, {}
    for name, (held, where) in placed.items():
        step, own_tx = make_step(loss_fn, tx, name, held, table.distinct)
        run = sj.parallel.data_parallel(step, mesh, AXES)
        given = held, own_tx.init(held), jax.device_put(batch, where)
        compiled[name] = timing.compile_apart(run, *given)
        *states[name], losses[name] = compiled[name].run(*given)
        programs[name] = functools.partial(_advance, name, compiled[name].run)
    for name, loss in losses.items():
        np.testing.assert_allclose(loss, losses[OURS], 1e-4, err_msg=f"loss of {name}")

    def inputs():
        batch = make_batch()
        return {name: jax.device_put(batch, put) for name, (_, put) in placed.items()}

    sent = {k: sj.viz.wire_bytes(x.run).total / 1e6 for k, x in compiled.items()}
    return {
        **{"tables": len(heights), "devices": devices, "rows": sum(heights)},
        **{"dim": args.dim, "ids": args.ids, "skew": args.skew},
        "choice": table.choice,
        "sent_mb": sent,
        "planned_mb": {name: cost.wire / 1e6 for name, cost in table.costs.items()},
        "held_mb": {name: cost.memory / 1e6 for name, cost in table.costs.items()},
        **timing.compare(args, programs, states, inputs, compiled=compiled),
    }


def make_step(
    loss_fn: Callable, tx: Any, name: str, params: Any, distinct: int
) -> tuple[Callable, Any]:
    """`step(params, state, batch) -> (params, state, loss)` of a layout, and its tx."""
    # Sparse also where a batch reads much of a table.
    tables = {"tables": jax.tree.map(lambda _: True, params["tables"]), "w": False}
    value_and_grad = functools.partial(sj.value_and_grad, tables=tables)
    gather, lazy = lambda grads: grads, sj.optim.lazy(tx)
    if name == "replicated-dense":
        value_and_grad, lazy = jax.value_and_grad, tx
    if name == "replicated-sparse":
        gather = functools.partial(sj.parallel.pmean, axis_name=AXES, capacity=distinct)

    def step(params, state, batch):
        loss, grads = value_and_grad(loss_fn)(params, batch)
        updates, state = lazy.update(gather(grads), state, params)
        return optax.apply_updates(params, updates), state, loss

    return step, lazy


def _advance(name: str, run: Callable, states: Any, batches: Any) -> Any:
    """The states of all sides, after a step of one."""
    *new, loss = run(*states[name], batches[name])
    return states | {name: new}, loss


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold, for one table of skewed ids.

    Columns send less than rows where a model, as this one, sums bags first; they hold
    every row, and each device works on all ids.
    """
    wrong = []
    for r in records:
        if r["tables"] > 1 or r["skew"] != "zipf":
            continue
        sent = r["sent_mb"]
        case = f"{r['devices']} devices, {r['rows']:,} rows: {sent[OURS]:.3f} MB sent"
        claimed = all(r[key] == value for key, value in CLAIMED_CASE.items())
        if claimed and sent[OURS] > CLAIMED_MB:
            wrong.append(f"{case}, {CLAIMED_MB} claimed")
        wrong += [
            f"{case}, {name} {sent[name]:.3f}"
            for name in (XLA, "replicated-dense")
            if sent.get(name, float("inf")) < sent[OURS]
        ]
    return wrong


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    parser.add_argument("--case", choices=("table", "collection"))
    parser.add_argument("--devices", type=int, nargs="+", default=(4, 8))
    parser.add_argument("--rows", type=int, nargs="+", default=(10_000, 100_000, 10**6))
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--ids", type=int, default=5_120, help=f"a device: {BAG} a bag")
    parser.add_argument("--skew", default="zipf", choices=("zipf", "uniform"))
