"""A training step over a mesh: tables by rows, by columns, or on every device.

Each device has its own part of a batch of bags of ids. A step looks up, differentiates
and updates with Adagrad. The sides are

    ours       `sj.parallel.shard_rows`: rows are exchanged with their owners, the
               capacity measured from a sample batch
    rows       the same rows sharded over the mesh, left to XLA's partitioner (GSPMD)
    columns    `sj.parallel.shard_columns`, which is left to it too
    dense      a table on every device, the gradient all-reduced, optax on all rows

and what is compared is what a device sends in a step, read from the compiled program
and as `sj.parallel.plan` predicts it, and the time of a step. The sides take turns,
with other ids in every run; their losses are compared before they are timed.

Then a collection of tables, each read by a bag a row of the batch, in every layout that
`sj.parallel.plan` has for their stack, put there by `plan.apply`: what the plan says
that a device holds and sends, what the compiled program sends, and the time of a step.

    python -m benchmarks sharded
    python -m benchmarks sharded --case table --rows 100000 --check --json out.jsonl

Devices are made of the CPU where there are no others: these share its cores, and what
they exchange is a copy in memory. So times show what the work costs, and bytes what a
network would add. `--check` asserts the claim on bytes, and exits with 1 where it does
not hold.
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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import sparsejax as sj
from benchmarks import timing


SIDES = ("ours", "rows", "columns", "dense")
# The layout that the plan has for a side.
LAYOUTS = {
    "ours": "row-sharded",
    "columns": "column-sharded",
    "dense": "replicated-dense",
}
BAG = 20
MAX_DEVICES = 8
# Of a device and a step; what is claimed at 4 devices, 100,000 rows, 32 columns and
# 5,120 Zipf ids a device.
CLAIMED_BYTES = 600_000
CLAIMED_CASE = {"devices": 4, "rows": 100_000, "dim": 32, "ids": 5_120, "skew": "zipf"}


def force_devices() -> None:
    """Asks for devices made of the CPU; in time only before JAX has looked for any."""
    name = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {name}={MAX_DEVICES}".strip()
    # XLA's threads; a device may wait for the others in several of them at once.
    os.environ.setdefault("NPROC", "32")


def make_mesh(devices: int) -> Mesh:
    """A mesh of the first devices, left to the partitioner where nothing is said."""
    kinds = (AxisType.Auto,)
    return jax.make_mesh(
        (devices,), ("x",), axis_types=kinds, devices=jax.devices()[:devices]
    )


# ------------------------------------------------------------------ the sides


def make_step(lookup: Callable[..., Any], tx: Any, value_and_grad: Any) -> Any:
    """`step(params, state, batch) -> (params, state, loss)`, as for one device."""

    def loss_fn(params, batch):
        rows = lookup(params["table"], batch["ids"], mode="zero")
        bags = jnp.sum(rows.reshape(-1, BAG, rows.shape[-1]), axis=1)
        return jnp.mean((jnp.tanh(bags) @ params["w"] - batch["y"]) ** 2)

    return _plain_step(loss_fn, tx, value_and_grad)


def _plain_step(loss_fn: Any, tx: Any, value_and_grad: Any, gather: Any = None) -> Any:
    def step(params, state, batch):
        loss, grads = value_and_grad(loss_fn)(params, batch)
        grads = grads if gather is None else gather(grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def make_side(
    name: str, table: np.ndarray, mesh: Mesh, capacity: int
) -> tuple[sj.parallel.DataParallelStep, Any]:
    """A side's step over the mesh, and its parameters and state."""
    lookup, tx = sj.lookup, sj.optim.lazy(optax.adagrad(0.05))
    sparse = {"table": True, "w": False}  # also where a batch reads much of the table
    value_and_grad = functools.partial(sj.value_and_grad, tables=sparse)
    if name == "ours":
        held = sj.parallel.shard_rows(table, mesh, "x", capacity=capacity)
    elif name == "rows":
        even = np.pad(table, [(0, -len(table) % mesh.size), (0, 0)])
        held = jax.device_put(even, NamedSharding(mesh, P("x")))
    elif name == "columns":
        held = sj.parallel.shard_columns(table, mesh, "x")
    else:
        held = jax.device_put(table, NamedSharding(mesh, P()))
        tx, value_and_grad = optax.adagrad(0.05), jax.value_and_grad
    w = jax.device_put(np.ones(table.shape[1], np.float32), NamedSharding(mesh, P()))
    params = {"table": held, "w": w}
    step = make_step(lookup, tx, value_and_grad)
    # It keeps every side's layout from step to step.
    return sj.parallel.data_parallel(step, mesh, "x"), (params, tx.init(params))


def make_batch(
    args: argparse.Namespace, mesh: Mesh, rows: int, rng: np.random.Generator
) -> dict[str, Any]:
    """A batch as each kind of side wants it: split, or ids on every device."""
    count = mesh.size * args.ids
    ids = rng.zipf(1.2, count) if args.skew == "zipf" else rng.integers(0, rows, count)
    batch = {
        "ids": (ids % rows).astype(np.int32),
        "y": rng.standard_normal(count // BAG, np.float32),
    }
    split = jax.device_put(batch, NamedSharding(mesh, P("x")))
    whole = jax.device_put(batch["ids"], NamedSharding(mesh, P()))
    return {"split": split, "ids on all": split | {"ids": whole}}


# ------------------------------------------------------------------ measuring


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each number of devices and of rows, and for each collection."""
    for devices in args.devices if args.case != "collection" else ():
        for rows in args.rows:
            yield measure_table(args, devices, rows)
    for devices in args.devices if args.case != "table" else ():
        yield measure_collection(args, devices)


def measure(
    args: argparse.Namespace, sides: dict[str, Any], batch: Callable[[], Any]
) -> dict[str, Any]:
    """Compiles, compares and times sides, `(step, (params, state), kind of batch)`."""
    compiled, state, losses, programs = {}, {}, {}, {}
    first = batch()
    for name, (step, held, kind) in sides.items():
        compiled[name] = timing.compile_apart(step, *held, first[kind])
        *state[name], losses[name] = compiled[name].run(*held, first[kind])
        programs[name] = _program(name, compiled[name].run, kind)
    for name, loss in losses.items():
        np.testing.assert_allclose(
            loss, next(iter(losses.values())), rtol=1e-4, err_msg=f"{name}: other loss"
        )
    times, _ = timing.alternate(
        programs, state, batch, repeats=args.repeats, seconds=args.seconds
    )
    wires = {name: sj.viz.wire_bytes(c.run) for name, c in compiled.items()}
    return {
        "dim": args.dim,
        "ids": args.ids,
        "skew": args.skew,
        "wire": {name: wire.total for name, wire in wires.items()},
        "wire_by_kind": {name: wire.by_kind for name, wire in wires.items()},
        "ms": {name: timing.median_ms(t) for name, t in times.items()},
        "spread": {name: timing.spread(t) for name, t in times.items()},
        "compile_s": {name: c.seconds for name, c in compiled.items()},
        "temp_mb": {name: c.temp_bytes / 1e6 for name, c in compiled.items()},
    }


def measure_table(args: argparse.Namespace, devices: int, rows: int) -> dict[str, Any]:
    """One table on all sides."""
    mesh, rng = make_mesh(devices), np.random.default_rng(0)
    table = rng.standard_normal((rows, args.dim), dtype=np.float32)
    batch = functools.partial(make_batch, args, mesh, rows, rng)
    ids = batch()["split"]["ids"]
    abstract = jax.ShapeDtypeStruct(table.shape, table.dtype)
    like = sj.parallel.shard_rows(abstract, mesh, "x")
    capacity = sj.parallel.measure_capacity(like, ids)
    (plan,) = sj.parallel.plan(abstract, mesh, ids).tables
    sides = {
        name: (
            *make_side(name, table, mesh, capacity),
            "ids on all" if name == "columns" else "split",
        )
        for name in SIDES
    }
    predicted = {
        name: plan.costs[layout].wire
        for name, layout in LAYOUTS.items()
        if layout in plan.costs
    }
    about = {"case": "table", "devices": devices, "rows": rows, "capacity": capacity}
    about |= {"choice": "", "predicted_wire": predicted}
    return about | measure(args, sides, batch)


def _program(
    name: str, run: Callable[..., Any], kind: str | None = None
) -> Callable[..., Any]:
    """`(states, batch) -> (states, loss)`, of all sides' states with this one's new."""

    def program(states, batch):
        *new, loss = run(*states[name], batch if kind is None else batch[kind])
        return states | {name: new}, loss

    return program


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold.

    Columns send less than rows where a model, as this one, sums bags first; they hold
    every row, and each device works on all ids.
    """
    wrong = []
    for r in records:
        sent = dict(r["wire"])
        wire = sent.pop("ours", None)
        sent.pop("columns", None)
        if wire is None or r["skew"] != "zipf":
            continue
        claimed = all(r[key] == value for key, value in CLAIMED_CASE.items())
        case = f"{r['devices']} devices, {r['rows']} rows: {wire:,} bytes sent"
        if claimed and wire > CLAIMED_BYTES:
            wrong.append(f"{case}, {CLAIMED_BYTES:,} claimed")
        wrong += [f"{case}, {n} {b:,}" for n, b in sent.items() if wire > b]
    return wrong


# ------------------------------------------------------------------ a collection

HEIGHTS = (300_000, 200_000, 90_000, 80_000, 70_000, 60_000, 50_000, 30_000)


def measure_collection(args: argparse.Namespace, devices: int) -> dict[str, Any]:
    """A collection of tables in each layout that the plan has for its stack."""
    # Two places on the first axis, as two hosts would have.
    mesh = jax.make_mesh(
        (2, devices // 2),
        ("host", "x"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[:devices],
    )
    rng, names = np.random.default_rng(0), [f"t{k}" for k in range(len(HEIGHTS))]
    layer = sj.nn.EmbeddingCollection(
        {name: (height, args.dim) for name, height in zip(names, HEIGHTS)}
    )
    # All of its features together read as many ids as the table of the other case.
    examples = max(1, args.ids // (BAG * len(HEIGHTS)))

    def loss_fn(params, batch):
        out = layer(params["tables"], batch["ids"])
        bags = jnp.stack([out[name] for name in names], axis=1)
        scores = jnp.einsum("bfd,d->b", jnp.tanh(bags), params["w"])
        return jnp.mean((scores - batch["y"]) ** 2)

    def batch():
        shape = (devices * examples, BAG)
        draw = (
            rng.zipf if args.skew == "zipf" else lambda _, n: rng.integers(0, 2**31, n)
        )
        ids = {
            n: (draw(1.2, shape) % h).astype(np.int32) for n, h in zip(names, HEIGHTS)
        }
        return {"ids": ids, "y": rng.standard_normal(devices * examples, np.float32)}

    tables = jax.tree.map(np.asarray, layer.init(jax.random.key(0)))
    params = {"tables": tables, "w": np.ones(args.dim, np.float32)}
    (stack,) = tables
    tx = optax.adagrad(0.05)
    plan = functools.partial(
        sj.parallel.plan,
        *(params, mesh, batch()),
        loss=loss_fn,
        tx=tx,
        stacks=layer.heights(),
    )
    best = plan()
    (found,) = best.tables
    sides, puts = {}, {}
    for name in found.costs:
        applied = plan(layouts={found.name: name})
        held = applied.apply(params)
        sparse, gather = name != "replicated-dense", None
        own_tx = sj.optim.lazy(tx) if sparse else tx
        # Sparse also if a batch reads much of a table.
        tree = {"tables": {stack: True}, "w": False}
        value_and_grad = functools.partial(sj.value_and_grad, tables=tree)
        value_and_grad = value_and_grad if sparse else jax.value_and_grad
        if name == "replicated-sparse":
            gather = functools.partial(
                sj.parallel.pmean, axis_name=("host", "x"), capacity=found.distinct
            )
        step = _plain_step(loss_fn, own_tx, value_and_grad, gather)
        run = sj.parallel.data_parallel(step, mesh, ("host", "x"))
        sides[name] = run, (held, own_tx.init(held)), name
        puts[name] = applied.batch_sharding

    def split():
        made = batch()
        return {name: jax.device_put(made, put) for name, put in puts.items()}

    about = {"case": "collection", "devices": devices, "rows": sum(HEIGHTS)}
    about |= {"choice": found.choice}
    about |= {"memory": {name: cost.memory for name, cost in found.costs.items()}}
    about |= {"predicted_wire": {name: cost.wire for name, cost in found.costs.items()}}
    return about | measure(args, sides, split)


# ------------------------------------------------------------------ command line


HEADER = (
    "devices       rows  side               sends (MB)  planned  step (ms)  "
    "compile (s)  temporaries (MB)   (* is what the plan chooses)"
)


def line(r: dict[str, Any]) -> str:
    """The lines of the table for a record, one a side."""
    return "\n".join(
        f"{r['devices']:7} {r['rows']:10}  {name + '*' * (name == r['choice']):18}"
        f" {r['wire'][name] / 1e6:10.3f}"
        f" {r['predicted_wire'].get(name, float('nan')) / 1e6:8.3f} {ms:10.2f}"
        f" {r['compile_s'][name]:12.2f} {r['temp_mb'][name]:17.2f}"
        for name, ms in r["ms"].items()
    )


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    parser.add_argument("--case", choices=("table", "collection"))
    parser.add_argument("--devices", type=int, nargs="+", default=(4, 8))
    parser.add_argument("--rows", type=int, nargs="+", default=(10_000, 100_000, 10**6))
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--ids", type=int, default=5_120, help=f"a device: {BAG} a bag")
    parser.add_argument("--skew", default="zipf", choices=("zipf", "uniform"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if `--check` is given and a claim does not hold."""
    force_devices()
    return timing.run("sharded", __doc__, argv, options, cases, line, failures, HEADER)
