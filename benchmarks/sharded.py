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
    python -m benchmarks sharded --rows 100000 --check --json sharded.jsonl

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
MOST_DEVICES = 8
# Of a device and a step; what is claimed at 4 devices, 100,000 rows, 32 columns and
# 5,120 Zipf ids a device.
CLAIMED_BYTES = 600_000
CLAIMED_CASE = {"devices": 4, "rows": 100_000, "dim": 32, "ids": 5_120, "skew": "zipf"}


def force_devices() -> None:
    """Asks for devices made of the CPU; in time only before JAX has looked for any."""
    name = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {name}={MOST_DEVICES}".strip()
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
    """One record for each number of devices and of rows."""
    for devices in args.devices:
        for rows in args.rows:
            yield measure(args, devices, rows)


def measure(args: argparse.Namespace, devices: int, rows: int) -> dict[str, Any]:
    """Compiles the sides, compares and times them."""
    mesh, rng = make_mesh(devices), np.random.default_rng(0)
    table = rng.standard_normal((rows, args.dim), dtype=np.float32)
    batch = functools.partial(make_batch, args, mesh, rows, rng)
    first = batch()
    abstract = jax.ShapeDtypeStruct(table.shape, table.dtype)
    like = sj.parallel.shard_rows(abstract, mesh, "x")
    capacity = sj.parallel.measure_capacity(like, first["split"]["ids"])

    (plan,) = sj.parallel.plan(abstract, mesh, first["split"]["ids"]).tables
    predicted = {
        name: plan.costs[LAYOUTS[name]].wire
        for name in args.sides
        if LAYOUTS.get(name) in plan.costs
    }

    compiled, wires, state, losses, programs = {}, {}, {}, {}, {}
    for name in args.sides:
        run, state[name] = make_side(name, table, mesh, capacity)
        kind = "ids on all" if name == "columns" else "split"
        compiled[name] = timing.compile_apart(run, *state[name], first[kind])
        wires[name] = sj.viz.wire_bytes(compiled[name].run)
        *state[name], losses[name] = compiled[name].run(*state[name], first[kind])
        programs[name] = _program(name, compiled[name].run, kind)
    for name, loss in losses.items():
        np.testing.assert_allclose(
            loss, losses[args.sides[0]], rtol=1e-4, err_msg=f"{name}: another loss"
        )
    times, _ = timing.alternate(
        programs, state, batch, repeats=args.repeats, seconds=args.seconds
    )
    medians = {name: timing.median_ms(t) for name, t in times.items()}
    return {
        "benchmark": "sharded",
        "devices": devices,
        "rows": rows,
        "dim": args.dim,
        "ids": args.ids,
        "skew": args.skew,
        "capacity": capacity,
        "wire": {name: wire.total for name, wire in wires.items()},
        "predicted_wire": predicted,
        "wire_by_kind": {name: wire.by_kind for name, wire in wires.items()},
        "ms": medians,
        "ratio": {name: medians["ours"] / ms for name, ms in medians.items()}
        if "ours" in medians
        else {},
        "spread": {name: timing.spread(t) for name, t in times.items()},
        "compile_s": {name: c.seconds for name, c in compiled.items()},
        "temp_mb": {name: c.temp_bytes / 1e6 for name, c in compiled.items()},
    }


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


# ------------------------------------------------------------------ all placements

HEIGHTS = (300_000, 200_000, 90_000, 80_000, 70_000, 60_000, 50_000, 30_000)


def placements(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each number of devices."""
    for devices in args.devices:
        yield measure_placements(args, devices)


def measure_placements(args: argparse.Namespace, devices: int) -> dict[str, Any]:
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
        draw = {
            "zipf": lambda height: rng.zipf(1.2, shape) % height,
            "uniform": lambda height: rng.integers(0, height, shape),
        }[args.skew]
        ids = {n: draw(h).astype(np.int32) for n, h in zip(names, HEIGHTS)}
        y = rng.standard_normal(devices * examples, np.float32)
        return {"ids": ids, "y": y}

    tables = jax.tree.map(np.asarray, layer.init(jax.random.key(0)))
    params = {"tables": tables, "w": np.ones(args.dim, np.float32)}
    (stack,) = tables
    first, tx = batch(), optax.adagrad(0.05)
    plan = functools.partial(
        sj.parallel.plan,
        *(params, mesh, first),
        loss=loss_fn,
        tx=tx,
        stacks=layer.heights(),
    )
    best = plan()
    (found,) = best.tables
    compiled, state, losses, programs = {}, {}, {}, {}
    for name in found.costs:
        applied = plan(layouts={found.name: name})
        held = applied.apply(params)
        sparse = name != "replicated-dense"
        own_tx = sj.optim.lazy(tx) if sparse else tx
        # Sparse also where a batch reads much of a table.
        value_and_grad = functools.partial(
            sj.value_and_grad, tables={"tables": {stack: True}, "w": False}
        )
        gather = None
        if name == "replicated-sparse":
            gather = functools.partial(
                sj.parallel.pmean, axis_name=("host", "x"), capacity=found.distinct
            )
        step = _plain_step(
            loss_fn, own_tx, value_and_grad if sparse else jax.value_and_grad, gather
        )
        run = sj.parallel.data_parallel(step, mesh, ("host", "x"))
        state[name] = held, own_tx.init(held)
        split = jax.device_put(first, applied.batch_sharding)
        compiled[name] = timing.compile_apart(run, *state[name], split)
        *state[name], losses[name] = compiled[name].run(*state[name], split)
        programs[name] = _program(name, compiled[name].run)
    for name, loss in losses.items():
        np.testing.assert_allclose(
            loss, losses["row-sharded"], rtol=1e-4, err_msg=f"{name}: another loss"
        )
    put = lambda: jax.device_put(batch(), best.batch_sharding)
    times, _ = timing.alternate(
        programs, state, put, repeats=args.repeats, seconds=args.seconds
    )
    wires = {n: sj.viz.wire_bytes(c.run) for n, c in compiled.items()}
    return {
        "benchmark": "placements",
        "devices": devices,
        "heights": HEIGHTS,
        "dim": args.dim,
        "ids": examples * BAG * len(HEIGHTS),
        "skew": args.skew,
        "choice": found.choice,
        "memory": {name: cost.memory for name, cost in found.costs.items()},
        "wire": {name: wire.total for name, wire in wires.items()},
        "predicted_wire": {name: cost.wire for name, cost in found.costs.items()},
        "ms": {name: timing.median_ms(t) for name, t in times.items()},
        "spread": {name: timing.spread(t) for name, t in times.items()},
        "compile_s": {name: c.seconds for name, c in compiled.items()},
        "temp_mb": {name: c.temp_bytes / 1e6 for name, c in compiled.items()},
    }


PLACEMENTS_HEADER = (
    "devices  placement          holds (MB)  sends (MB)  planned  step (ms)  "
    "temporaries (MB)"
)


def placement_lines(record: dict[str, Any]) -> Iterator[str]:
    """The lines of the table for a record, one a placement."""
    for name, ms in record["ms"].items():
        chosen = "*" if name == record["choice"] else " "
        yield (
            f"{record['devices']:7}  {name + chosen:18}"
            f" {record['memory'][name] / 1e6:10.2f}"
            f" {record['wire'][name] / 1e6:11.3f}"
            f" {record['predicted_wire'][name] / 1e6:8.3f}"
            f" {ms:10.2f} {record['temp_mb'][name]:17.2f}"
        )


# ------------------------------------------------------------------ command line


HEADER = (
    "devices       rows  side       sends (MB)  planned  step (ms)  ours/side  "
    "compile (s)  temporaries (MB)"
)


def lines(record: dict[str, Any]) -> Iterator[str]:
    """The lines of the table for a record, one a side."""
    for name, ms in record["ms"].items():
        ratio = record["ratio"].get(name, float("nan"))
        planned = record["predicted_wire"].get(name, float("nan"))
        yield (
            f"{record['devices']:7} {record['rows']:10}  {name:9}"
            f" {record['wire'][name] / 1e6:11.3f} {planned / 1e6:8.3f}"
            f" {ms:10.2f} {ratio:10.2f}"
            f" {record['compile_s'][name]:12.2f} {record['temp_mb'][name]:17.2f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if `--check` is given and a claim does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks sharded", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--devices", type=int, nargs="+", default=(4, 8))
    parser.add_argument("--rows", type=int, nargs="+", default=(10_000, 100_000, 10**6))
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--ids", type=int, default=5_120, help="of a device")
    parser.add_argument("--skew", default="zipf", choices=("zipf", "uniform"))
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--repeats", type=int, default=15, help="timed runs, at most")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a case, about")
    parser.add_argument("--json", metavar="FILE", help="append a JSON line a case")
    parser.add_argument("--check", action="store_true", help="exit 1 if a claim fails")
    args = parser.parse_args(argv)
    if args.ids % BAG:
        parser.error(f"--ids must be a multiple of {BAG}, the ids of a bag")
    force_devices()
    machine = timing.machine()
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"rows of {args.dim} floats, {args.ids} {args.skew} ids a device; medians")
    print(HEADER, flush=True)
    show = lambda record: print("\n".join(lines(record)), flush=True)
    records = timing.collect(cases(args), show, args.json, machine)
    print(f"\n{len(HEIGHTS)} tables; * is what the plan chooses\n{PLACEMENTS_HEADER}")
    show = lambda record: print("\n".join(placement_lines(record)), flush=True)
    timing.collect(placements(args), show, args.json, machine)
    return timing.report(failures(records) if args.check else [])
