"""`sj.embedding_bag` against the natural JAX expression and PyTorch's EmbeddingBag.

Bags of a fixed size and ragged ones, ids uniform and skewed, forward and with the
gradient of the table (sparse on all sides: `sj.value_and_grad` on both JAX sides, which
then differ in the bag alone, and `sparse=True` in PyTorch). Sides take turns, with
other ids in every run.

    python -m benchmarks bag
    python -m benchmarks bag --check --json bags.jsonl

PyTorch is left out where it is not installed. `--check` asserts what the library claims
on two cores of a CPU, and exits with 1 where it does not hold.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparsejax as sj
from benchmarks import timing


try:
    import torch  # pyright: ignore[reportMissingImports]
except ImportError:  # not among what the benchmarks install
    torch: Any = None


LAYOUTS = ("fixed", "ragged")
PASSES = ("forward", "gradient")
FIXED_SIZE, LONGEST = 16, 64
# How many times faster than gather and segment_sum the forward pass has to be.
LEAST = {"fixed": 4.0, "ragged": 2.0}


# ------------------------------------------------------------------ data


def lengths_of(layout: str, bags: int, rng: np.random.Generator) -> np.ndarray:
    """How many ids each bag has."""
    if layout == "fixed":
        return np.full(bags, FIXED_SIZE)
    return rng.integers(1, LONGEST + 1, bags)


def capacity_of(layout: str, bags: int) -> int:
    """How many ids all bags may have; ragged ones leave a tail empty."""
    return bags * (FIXED_SIZE if layout == "fixed" else (LONGEST + 1) // 2 + 2)


def make_batch(
    layout: str, bags: int, rows: int, zipf: bool, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and the bag of each; the empty tail has bag number `bags`."""
    capacity = capacity_of(layout, bags)
    segments = np.repeat(np.arange(bags), lengths_of(layout, bags, rng))[:capacity]
    segments = np.pad(segments, (0, capacity - segments.size), constant_values=bags)
    if zipf:
        # Log-uniform ranks, which is Zipf's law with exponent 1, strewn over the table.
        ids = np.floor(rows ** rng.random(capacity)).astype(np.int64) - 1
        ids = ids * 7_368_787 % rows
    else:
        ids = rng.integers(0, rows, capacity)
    return ids.astype(np.int32), segments.astype(np.int32)


# ------------------------------------------------------------------ the sides


def ours(layout: str, bags: int, combiner: str) -> Callable[..., jax.Array]:
    """`(table, ids, segments) -> [bags, D]`."""

    def call(table, ids, segments):
        if layout == "fixed":
            return sj.embedding_bag(table, ids.reshape(bags, -1), combiner=combiner)
        return sj.embedding_bag(
            table, ids, segments, bags, combiner=combiner, indices_are_sorted=True
        )

    return call


def natural(layout: str, bags: int, combiner: str) -> Callable[..., jax.Array]:
    """What one writes in JAX."""
    del layout

    def call(table, ids, segments):
        rows = table[ids]
        reduce = jax.ops.segment_max if combiner == "max" else jax.ops.segment_sum
        total = reduce(rows, segments, bags, indices_are_sorted=True)
        if combiner != "mean":
            return total
        ones = jnp.ones(segments.shape, table.dtype)
        count = jax.ops.segment_sum(ones, segments, bags, indices_are_sorted=True)
        return total / jnp.maximum(count, 1)[:, None]

    return call


def jax_side(call: Callable, direction: str, example: Sequence[Any]) -> timing.Compiled:
    """A side as a compiled program `(table, (ids, segments)) -> (table, result)`."""
    value_and_grad = sj.value_and_grad(
        lambda table, *batch: jnp.sum(call(table, *batch) ** 2), tables=True
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def run(table, batch):
        run = call if direction == "forward" else value_and_grad
        return table, run(table, *batch)

    return timing.compile_apart(run, example[0], example[1])


def torch_batch(layout: str, bags: int, ids: np.ndarray, segments: np.ndarray) -> Any:
    """The same bags as `EmbeddingBag` takes them, made before the clock runs."""
    if torch is None:
        return ()
    if layout == "fixed":
        return (torch.from_numpy(ids.astype(np.int64).reshape(bags, -1)),)
    offsets = np.searchsorted(segments, np.arange(bags + 1))
    parts = ids[: offsets[-1]], offsets[:-1]
    return tuple(torch.from_numpy(x.astype(np.int64)) for x in parts)


def torch_side(combiner: str, direction: str, table: jax.Array) -> Callable:
    """PyTorch's EmbeddingBag as `(table, batch) -> (table, result)`."""
    bag = torch.nn.EmbeddingBag.from_pretrained(
        torch.from_numpy(np.array(table)),
        freeze=False,
        mode=combiner,
        sparse=combiner != "max",
    )

    def run(table, batch):
        bag.weight.grad = None
        with torch.set_grad_enabled(direction != "forward"):
            out = bag(*batch)
        if direction != "forward":
            (out**2).sum().backward()
        return table, ()

    return run


# ------------------------------------------------------------------ measuring


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record a case."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((args.rows, args.dim), dtype=np.float32))
    cases = itertools.product(args.layouts, args.combiners, PASSES)
    for layout, combiner, direction in cases:
        ids = jax.ShapeDtypeStruct((capacity_of(layout, args.bags),), jnp.int32)
        sides, temporaries = {}, {}
        for name, make in (("ours", ours), ("natural", natural)):
            call = make(layout, args.bags, combiner)
            side = jax_side(call, direction, (table, [ids, ids]))
            sides[name] = functools.partial(_with, side.run, "jax")
            temporaries[name] = side.temp_bytes / 1e6
        if torch is not None:
            side = torch_side(combiner, direction, table)
            sides["torch"] = functools.partial(_with, side, "torch")
        for skew in ("uniform", "zipf"):
            inputs = functools.partial(make_inputs, layout, args, skew == "zipf", rng)
            times, table = timing.alternate(
                sides, table, inputs, repeats=args.repeats, seconds=args.seconds
            )
            medians = {name: timing.median_ms(t) for name, t in times.items()}
            yield {
                "layout": layout,
                "combiner": combiner,
                "pass": direction,
                "ids": skew,
                "ms": medians,
                "ratio": medians["natural"] / medians["ours"],
                "spread": timing.spread(times["ours"]),
                "temporaries_mb": temporaries,
            }


def make_inputs(
    layout: str, args: argparse.Namespace, zipf: bool, rng: np.random.Generator
) -> dict[str, Any]:
    """One batch, as each side takes it."""
    batch = make_batch(layout, args.bags, args.rows, zipf, rng)
    return {
        "jax": [jnp.asarray(x) for x in batch],
        "torch": torch_batch(layout, args.bags, *batch),
    }


def _with(run: Callable, side: str, table: jax.Array, inputs: dict[str, Any]) -> Any:
    return run(table, inputs[side])


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold."""
    wrong = []
    for r in records:
        if r["combiner"] != "sum" or r["pass"] != "forward":
            continue
        if r["ratio"] < LEAST[r["layout"]]:
            wrong.append(
                f"{r['layout']} bags of {r['ids']} ids: {r['ratio']:.1f} times the "
                f"natural expression's speed, {LEAST[r['layout']]:g} claimed"
            )
    return wrong


def print_record(record: dict[str, Any]) -> None:
    """One line of the table."""
    ms, temp = record["ms"], record["temporaries_mb"]
    torch_ms = f"{ms['torch']:8.2f}" if "torch" in ms else "       -"
    print(
        f"{record['layout']:7} {record['combiner']:5} {record['pass']:9}"
        f"{record['ids']:8} {ms['ours']:8.2f} {ms['natural']:8.2f} {torch_ms}"
        f" {record['ratio']:6.1f}   {temp['ours']:6.1f} {temp['natural']:6.1f}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and checks where asked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks bag",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--dim", type=int, default=64, help="columns of the table")
    parser.add_argument("--bags", type=int, default=4_096)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument(
        "--combiners",
        nargs="+",
        default=("sum", "mean"),
        choices=("sum", "mean", "max"),
    )
    parser.add_argument("--repeats", type=int, default=25, help="timed runs, at most")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a case, about")
    parser.add_argument("--json", help="appends a line for each case to this file")
    parser.add_argument("--check", action="store_true", help="asserts the claims")
    args = parser.parse_args(argv)
    machine = timing.machine()
    print(" ".join(f"{k}={v}" for k, v in machine.items()))
    print(f"table [{args.rows}, {args.dim}], {args.bags} bags; medians in ms")
    print(
        "layout  comb. pass     ids          ours  natural    torch  ratio"
        "   temporaries (MB)"
    )
    records = timing.collect(measure(args), print_record, args.json, machine)
    return timing.report(failures(records) if args.check else [])
