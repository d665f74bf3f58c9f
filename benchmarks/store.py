"""`sj.store.KVStore`: rows a second of pull and push, and steps with prefetching.

Pull and push stand against what NumPy takes for the memory traffic alone, with the same
ids: `np.take` of the weights for a pull; `np.take` and fancy assignment of the weights
and of each leaf of state for a push, without an optimizer. A step (pull, loss and
gradient of a small network on the device, push) is timed one after the other and with
`prefetch`. Sides take turns, with other ids in every run.

    python -m benchmarks store
    python -m benchmarks store --json store.jsonl

All rows are touched before the clock runs.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj
from benchmarks import timing


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.01),
    "rowwise_adagrad": lambda: sj.optim.rowwise_adagrad(0.01),
    "adagrad": lambda: optax.adagrad(0.01),
    "adam": lambda: optax.adam(0.01),
}
STEPS, HIDDEN = 10, 256


# ------------------------------------------------------------------ data


def make_ids(count: int, rows: int, zipf: bool, rng: np.random.Generator) -> np.ndarray:
    """Ids, uniform or by Zipf's law with exponent 1, strewn over the table."""
    if not zipf:
        return rng.integers(0, rows, count, np.int32)
    ids = np.floor(rows ** rng.random(count)).astype(np.int64) - 1
    return (ids * 7_368_787 % rows).astype(np.int32)


def make_store(optimizer: str, rows: int, dim: int) -> sj.store.KVStore:
    """A store of one table, all of whose rows were touched."""
    store = sj.store.KVStore()
    weights = np.random.default_rng(0).standard_normal((rows, dim), np.float32)
    store.init("table", weights, OPTIMIZERS[optimizer]())
    for start in range(0, rows, 1 << 20):
        store.row_sparse_pull("table", np.arange(start, min(start + (1 << 20), rows)))
    return store


# ------------------------------------------------------------------ pull and push


def pull_sides(store: sj.store.KVStore, weights: np.ndarray) -> dict[str, Callable]:
    """`(_, ids) -> (_, rows)` of the store and of NumPy."""

    def ours(state, inputs):
        return state, store.pull("table", inputs["ids"], capacity=inputs["ids"].size)

    def floor(state, inputs):
        return state, np.take(weights, inputs["ids"], axis=0)

    return {"ours": ours, "numpy": floor}


def push_sides(
    store: sj.store.KVStore, columns: Sequence[np.ndarray]
) -> dict[str, Callable]:
    """`(_, gradient) -> (_, _)` of the store and of NumPy."""

    def ours(state, inputs):
        store.push("table", inputs["grad"])
        return state, ()

    def floor(state, inputs):
        rows = inputs["rows"]
        for column in columns:
            column[rows] = np.take(column, rows, axis=0)
        return state, ()

    return {"ours": ours, "numpy": floor}


def make_inputs(args: argparse.Namespace, zipf: bool, rng: np.random.Generator) -> Any:
    """Ids, and a gradient for the rows they name, ready on the device."""
    ids = make_ids(args.ids, args.rows, zipf, rng)
    rows = np.unique(ids)
    slots = np.full(args.ids, args.rows, np.int32)
    slots[: rows.size] = rows
    values = rng.standard_normal((args.ids, args.dim), np.float32)
    grad = sj.SelectedRows(slots, jnp.asarray(values), args.rows)
    return {"ids": ids, "rows": rows, "grad": jax.block_until_ready(grad)}


def measure_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for pull, and one for push with each optimizer."""
    rng = np.random.default_rng(1)
    for number, optimizer in enumerate(args.optimizers):
        store = make_store(optimizer, args.rows, args.dim)
        floor: list[Any] = [np.ones((args.rows, args.dim), np.float32)]
        leaves = sj.optim.lazy(OPTIMIZERS[optimizer]()).init(jnp.ones((args.rows, 1)))
        for leaf in jax.tree.leaves(leaves):
            if leaf.shape[:1] == (args.rows,):
                wide = (args.rows, args.dim) if leaf.ndim > 1 else (args.rows,)
                floor.append(np.ones(wide, np.float32))
        cases = {"push": push_sides(store, floor)}
        if not number:
            cases = {"pull": pull_sides(store, floor[0])} | cases
        for zipf in (False, True):
            inputs = functools.partial(make_inputs, args, zipf, rng)
            distinct = np.median([inputs()["rows"].size for _ in range(5)])
            for what, sides in cases.items():
                times, _ = timing.alternate(
                    sides, (), inputs, repeats=args.repeats, seconds=args.seconds
                )
                ms = {name: timing.median_ms(t) for name, t in times.items()}
                yield {
                    "what": what,
                    "optimizer": "" if what == "pull" else optimizer,
                    "ids": "zipf" if zipf else "uniform",
                    "ms": ms,
                    "ratio": ms["ours"] / ms["numpy"],
                    "rows_per_second": distinct / ms["ours"] * 1e3,
                    "spread": timing.spread(times["ours"]),
                }


# ------------------------------------------------------------------ steps


def step_sides(store: sj.store.KVStore, dim: int) -> dict[str, Callable]:
    """`(_, batches) -> (_, losses)`: some steps one after the other, and prefetched."""

    @jax.jit
    def step(table, layers, ids):
        def loss(table):
            x = sj.embedding_bag(table, ids)
            for layer in layers:
                x = jnp.tanh(x @ layer)
            return jnp.mean(x**2)

        return sj.value_and_grad(loss)(table)

    rng = np.random.default_rng(2)
    sizes = dim, HIDDEN, HIDDEN, HIDDEN, 1
    layers = [
        jnp.asarray(rng.standard_normal(shape, np.float32))
        / np.float32(shape[0] ** 0.5)
        for shape in zip(sizes, sizes[1:])
    ]

    def synchronous(state, batches):
        losses = []
        for ids in batches:
            table = store.pull("table", ids, capacity=ids.size)
            loss, grad = step(table, layers, ids)
            store.push("table", grad)
            losses.append(loss)
        return state, losses

    def prefetched(state, batches):
        losses = []
        capacity = batches[0].size
        for ids, table in store.prefetch(batches, lambda b: b, capacity=capacity):
            loss, grad = step(table, layers, ids)
            store.push("table", grad)
            losses.append(loss)
        return state, losses

    return {"synchronous": synchronous, "prefetched": prefetched}


def measure_steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each kind of ids."""
    rng = np.random.default_rng(3)
    store = make_store("adagrad", args.rows, args.dim)
    sides = step_sides(store, args.dim)
    for zipf in (False, True):

        def batches(zipf=zipf):
            size = args.ids // 4
            ids = [make_ids(size, args.rows, zipf, rng) for _ in range(STEPS)]
            return [x.reshape(-1, 16) for x in ids]

        times, _ = timing.alternate(
            sides, (), batches, repeats=args.repeats, seconds=args.seconds
        )
        ms = {name: timing.median_ms(t) / STEPS for name, t in times.items()}
        yield {
            "what": "step",
            "optimizer": "adagrad",
            "ids": "zipf" if zipf else "uniform",
            "ms": ms,
            "ratio": ms["prefetched"] / ms["synchronous"],
            "spread": timing.spread(times["prefetched"]),
        }


def print_record(record: dict[str, Any]) -> None:
    """One line of the table."""
    left, right = record["ms"].values()
    rate = record.get("rows_per_second")
    print(
        f"{record['what']:6}{record['optimizer']:16}{record['ids']:8}"
        f"{left:9.2f} {right:9.2f} {record['ratio']:7.2f}"
        f"{f'{rate:14,.0f}' if rate else ''}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints two tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks store",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--dim", type=int, default=32, help="columns of the table")
    parser.add_argument("--ids", type=int, default=65_536, help="of a batch")
    parser.add_argument(
        "--optimizers", nargs="+", default=tuple(OPTIMIZERS), choices=OPTIMIZERS
    )
    parser.add_argument("--repeats", type=int, default=25, help="timed runs, at most")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a case, about")
    parser.add_argument("--json", help="appends a line for each case to this file")
    args = parser.parse_args(argv)
    print(" ".join(f"{k}={v}" for k, v in timing.machine().items()))
    print(f"table [{args.rows}, {args.dim}], {args.ids} ids; medians in ms")
    print("      optimizer       ids          ours     numpy   ratio distinct rows/s")
    for record in measure_rows(args):
        _report(record, args)
    print(f"steps of {args.ids // 4} ids; medians in ms a step")
    print("                              synchron. prefetched  ratio")
    for record in measure_steps(args):
        _report(record, args)
    return 0


def _report(record: dict[str, Any], args: argparse.Namespace) -> None:
    print_record(record)
    if args.json:
        timing.append_json_line(args.json, record | timing.machine())
