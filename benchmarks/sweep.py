"""How a training step grows with the rows of its table, 8,192 ids a step.

The steps are those of `step`: ours and dense optax. There is no `tables=`, so a table
which is small beside the batch is left dense.

    python -m benchmarks sweep --quick
    python -m benchmarks sweep --check --seconds 15 --repeats 100
    python -m benchmarks sweep --plot docs/images/step_time.png

`--check` asserts what the library claims on two cores of a CPU. The last command makes
the picture of README.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks import timing
from benchmarks.step import OPTIMIZERS, Case, make_state, measure


ROWS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
IDS = 8_192


def needed_bytes(case: Case) -> int:
    """The bytes of a case: tables, the dense gradient, and an update as large."""
    params = jax.eval_shape(lambda: make_state(case, OPTIMIZERS[case.optimizer]))
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(params)]
    return sum(sizes) + 2 * max(sizes)


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each case that fits into memory."""
    if args.quick:
        args.optimizers, args.seconds = ["adam"], 1.0
        args.rows = [n for n in args.rows if n <= 100_000]
    for optimizer in args.optimizers:
        for rows in args.rows:
            case = Case(optimizer, rows, IDS, args.dim, "uniform")
            if (needed := needed_bytes(case)) > timing.free_bytes():
                print(f"{optimizer} {rows:,} skipped: {needed / 1e9:.1f} GB")
                continue
            yield measure(case, args, peer=False)


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold, or that nothing here was measured for."""
    ratio = {(r["optimizer"], r["rows"]): r["ratio"]["dense"] for r in records}
    ours = {r["rows"]: r["ms"]["ours"] for r in records if r["optimizer"] == "adam"}
    growth = ours[10**7] / ours[10**5] if {10**5, 10**7} <= ours.keys() else None
    claims = [
        ("adam, 1e6 rows, dense/ours", ratio.get(("adam", 10**6)), 30, None),
        ("adam, 1e7 rows, dense/ours", ratio.get(("adam", 10**7)), 120, None),
        ("adam, from 1e5 to 1e7 rows", growth, None, 2.5),
    ]
    claims += [
        (f"{name}, {rows:,} rows, dense/ours", x, 1 / 1.1, None)
        for (name, rows), x in ratio.items()
        if rows <= 10**4
    ]
    wrong = []
    for name, value, least, most in claims:
        if value is None:
            wrong.append(f"{name}: not measured")
        elif least and value < least or most and value > most:
            wrong.append(f"{name}: {value:.2f}, claimed {least or most:.3g}")
    return wrong


def finish(args: argparse.Namespace, records: Sequence[dict[str, Any]]) -> None:
    """Plots step time over rows; both axes logarithmic."""
    if not args.plot:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    machine = timing.machine()
    title = f"{machine['cores']} cores, jax {machine['jax']}, D = {args.dim}"
    figure.suptitle(title, fontsize=10)
    ax = figure.subplots()
    labels = {"xlabel": "rows of the table", "ylabel": "step time (ms)"}
    ax.set(xscale="log", yscale="log", title=f"{IDS:,} ids a step", **labels)
    ax.grid(alpha=0.3)
    for number, name in enumerate(args.optimizers):
        mine = [r for r in records if r["optimizer"] == name]
        x = [r["rows"] for r in mine]
        for side, style, label in (("dense", "--s", None), ("ours", "-o", name)):
            y = [r["ms"][side] for r in mine]
            ax.plot(x, y, style, color=f"C{number}", markersize=4, label=label)
    for style, name in (("-o", "sparsejax"), ("--s", "optax, dense")):
        ax.plot([], [], style, color="black", label=name, markersize=4)
    ax.legend(fontsize=8, handlelength=4)
    figure.savefig(args.plot, dpi=150)


def count(text: str) -> int:
    """A whole number, written 10000 or 1e4."""
    return int(float(text))


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    names = [*OPTIMIZERS]
    parser.add_argument("--optimizers", nargs="+", choices=names, default=names)
    parser.add_argument("--rows", nargs="+", type=count, default=ROWS, metavar="V")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="small sizes, Adam, 10 s")
    parser.add_argument("--plot", metavar="FILE.png")
