"""A training step as its table grows: does it cost what the batch reads?

The step of `sweep`, of sparsejax alone, with as many ids of tables of 10^5, 10^6 and
10^7 rows. The tables take turns in one process, with other ids in every run. Nothing
else runs between them: after a dense step, which walks all of a large table, a sparse
one would find less of the table in the caches than it does in a training loop.

    python -m benchmarks flat --check

Adam with 10^7 rows of 64 numbers takes 8 GB.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import sparsejax as sj
from benchmarks import step, sweep, timing
from benchmarks.sweep import Case


ROWS = (100_000, 1_000_000, 10_000_000)
MOST = 1.25  # times as long at the most rows as at the fewest


def measure(cases: Sequence[Case], repeats: int) -> dict[str, Any]:
    """Times a step, its tables in turns; one record. `cases` differ by rows only."""
    first = cases[0]
    tx = step.OPTIMIZERS[first.optimizer]()
    train = sweep.make_step(sj.value_and_grad, sj.optim.lazy(tx))
    rng = np.random.default_rng(0)
    states = [sweep.make_state(case, tx) for case in cases]

    def batches() -> list[Any]:
        return [sweep.make_batch(case, rng) for case in cases]

    def program(k: int) -> Callable:
        run = timing.compile_apart(train, states[k], batches()[k]).run

        def one(states, batches):
            state, loss = run(states[k], batches[k])
            return [*states[:k], state, *states[k + 1 :]], loss

        return one

    programs = {str(case.rows): program(k) for k, case in enumerate(cases)}
    times, _ = timing.alternate(programs, states, batches, repeats=repeats)
    ms = {rows: timing.median_ms(t) for rows, t in times.items()}
    return {
        "benchmark": "flat",
        "step": first.optimizer,
        "dim": first.dim,
        "ids": first.ids,
        "ms": ms,
        "spread": {rows: timing.spread(t) for rows, t in times.items()},
        "growth": ms[str(cases[-1].rows)] / ms[str(first.rows)],
    }


def check(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold."""
    return [
        f"{r['step']}: {r['growth']:.2f} times as long at {max(map(int, r['ms'])):,} "
        f"rows as at {min(map(int, r['ms'])):,}, claimed at most {MOST}"
        for r in records
        if r["growth"] > MOST
    ]


def line(record: dict[str, Any]) -> str:
    """One line of the table."""
    cells = "".join(f"{ms:>12.2f}" for ms in record["ms"].values())
    return f"{record['step']:16}{cells} {record['growth']:>7.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and checks where asked."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks flat", description=__doc__.split("\n")[0]
    )
    names = list(step.OPTIMIZERS)
    parser.add_argument("--steps", nargs="+", default=names, choices=names)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="increasing")
    parser.add_argument("--dim", type=int, default=64, help="columns of the table")
    parser.add_argument("--ids", type=int, default=8_192, help="of a batch")
    parser.add_argument("--repeats", type=int, default=100, help="timed runs")
    parser.add_argument("--json", metavar="FILE", help="append a JSON line a step")
    parser.add_argument("--check", action="store_true", help="exit 1 if a claim fails")
    args = parser.parse_args(argv)
    machine = timing.machine()
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{args.ids:,} ids, {args.dim} columns; medians in ms\n")
    print(f"{'rows':16}" + "".join(f"{n:>12,}" for n in args.rows), " growth")
    records = (
        measure(
            [Case("rows", name, rows, args.ids, args.dim) for rows in args.rows],
            args.repeats,
        )
        for name in args.steps
    )
    show = lambda record: print(line(record), flush=True)
    found = timing.collect(records, show, args.json, machine)
    return timing.report(check(found) if args.check else [])


if __name__ == "__main__":
    sys.exit(main())
