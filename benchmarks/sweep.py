"""How a training step grows with the rows of its table, and with the ids it reads.

The steps are those of `step`: ours and dense optax. There is no `tables=`, so that a
table which is small beside the batch shows whether it is left dense. The sweep over
ids also times `tables=True` there, which shows where the two really cross.

    python -m benchmarks sweep --quick
    python -m benchmarks sweep --check --seconds 15 --repeats 100
    python -m benchmarks sweep --ids --plot docs/images/step_time.png

`--check` asserts what the library claims on two cores of a CPU. The last command makes
the picture of README.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax

import sparsejax as sj
from benchmarks import timing
from benchmarks.step import OPTIMIZERS, Case, loss_fn, make_batch, make_state, measure


ROWS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
IDS = (100, 1_000, 10_000, 100_000, 250_000, 1_000_000)
FIXED_IDS = 8_192
FIXED_ROWS = 1_000_000


def picks(case: Case) -> str:
    """Whether the gradient of the case's table is sparse or dense, found by shapes."""
    params, _ = jax.eval_shape(lambda: make_state(case, optax.identity()))
    batch = make_batch(case, np.random.default_rng(0))
    grads = jax.eval_shape(sj.grad(loss_fn), params, batch)
    return "sparse" if isinstance(grads["table"], sj.SelectedRows) else "dense"


def needed_bytes(case: Case) -> int:
    """The bytes of a case: tables, the dense gradient, and an update as large."""
    params = jax.eval_shape(lambda: make_state(case, OPTIMIZERS[case.optimizer]))
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(params)]
    return sum(sizes) + 2 * max(sizes)


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each case of both sweeps that fits into memory."""
    if args.quick:
        args.optimizers, args.seconds, args.ids = ["adam"], 1.0, []
        args.rows = [n for n in args.rows if n <= 100_000]
    sizes = [("rows", rows, FIXED_IDS) for rows in args.rows]
    sizes += [("ids", FIXED_ROWS, ids) for ids in args.ids]
    for optimizer in args.optimizers:
        for sweep, rows, ids in sizes:
            skew = "zipf" if args.zipf else "uniform"
            case = Case(optimizer, rows, ids, args.dim, skew)
            if (needed := needed_bytes(case)) > timing.free_bytes():
                print(f"{optimizer} {rows:,} {ids:,} skipped: {needed / 1e9:.1f} GB")
                continue
            picked = picks(case)
            required = ["required"] if (picked, sweep) == ("dense", "ids") else []
            record = measure(case, args, "dense", *required)
            yield {"sweep": sweep, "picked": picked, **record}


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold, or that nothing here was measured for."""
    at = {(r["optimizer"], r["rows"]): r for r in records if r["sweep"] == "rows"}
    ratio = {key: r["ratio"]["dense"] for key, r in at.items()}
    ours = {rows: r["ms"]["ours"] for (name, rows), r in at.items() if name == "adam"}
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
    """Plots step time over rows and over ids, whichever varies; logarithmic axes."""
    if not args.plot:
        return
    from matplotlib.figure import Figure

    panels = {
        "rows": ("rows of the table", f"{FIXED_IDS:,} ids a step"),
        "ids": ("ids a step", f"{FIXED_ROWS:,} rows"),
    }
    shown = [x for x in panels if any(r["sweep"] == x for r in records)]
    figure = Figure(figsize=(1.5 + 5.0 * len(shown), 4.5), layout="constrained")
    machine = timing.machine()
    title = f"{machine['cores']} cores, jax {machine['jax']}, D = {args.dim}"
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for ax, sweep in zip(axes, shown):
        label, fixed = panels[sweep]
        ax.set(xscale="log", yscale="log", xlabel=label, title=fixed)
        ax.grid(alpha=0.3)
        for number, name in enumerate(args.optimizers):
            mine = [r for r in records if (r["sweep"], r["optimizer"]) == (sweep, name)]
            x = [r[sweep] for r in mine]
            for side, style, label in (("dense", "--s", None), ("ours", "-o", name)):
                y = [r["ms"][side] for r in mine]
                ax.plot(x, y, style, color=f"C{number}", markersize=4, label=label)
    axes[0].set_ylabel("step time (ms)")
    for style, name in (("-o", "sparsejax"), ("--s", "optax, dense")):
        axes[0].plot([], [], style, color="black", label=name, markersize=4)
    axes[0].legend(fontsize=8, handlelength=4)
    figure.savefig(args.plot, dpi=150)


def count(text: str) -> int:
    """A positive whole number, written 10000 or 1e4."""
    value = float(text)
    if value != int(value) or value < 1:
        raise ValueError(text)
    return int(value)


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    names = [*OPTIMIZERS]
    parser.add_argument("--optimizers", nargs="+", choices=names, default=names)
    parser.add_argument("--rows", nargs="*", type=count, default=ROWS, metavar="V")
    parser.add_argument("--ids", nargs="*", type=count, default=IDS, metavar="N")
    parser.add_argument("--dim", type=count, default=64)
    parser.add_argument("--zipf", action="store_true", help="skewed ids, not uniform")
    parser.add_argument("--quick", action="store_true", help="small sizes, Adam, 10 s")
    parser.add_argument("--plot", metavar="FILE.png")
