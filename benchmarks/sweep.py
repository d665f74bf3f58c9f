"""A whole training step with an embedding table: sparsejax against dense optax.

The step is lookup, loss, gradient and update of a small click model, jitted, with
parameters and optimizer state donated and other ids in every run. Ours and optax's
differ in two words (`sj.value_and_grad`, `sj.optim.lazy`). There is no `tables=`, so
that a table which is small beside the batch shows whether it is left dense.

Two sweeps: over the table's rows with as many ids a step, and over the ids with as
many rows. If ours leaves the table dense, it is also timed with `tables=True` in the
sweep over ids, which shows where the two really cross.

    python -m benchmarks sweep --quick
    python -m benchmarks sweep --check --seconds 15 --repeats 100
    python -m benchmarks sweep --ids --plot docs/images/step_time.png

`--check` asserts what the library claims on two cores of a CPU. The last command makes
the picture of README.
"""

import argparse
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj
from benchmarks import timing


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "adagrad": lambda: optax.adagrad(0.01),
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3),
}
ROWS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
IDS = (100, 1_000, 10_000, 100_000, 250_000, 1_000_000)
FIXED_IDS = 8_192
FIXED_ROWS = 1_000_000


# ------------------------------------------------------------------ what is timed


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement: which optimizer, on how large a table, with how many ids."""

    sweep: str
    optimizer: str
    rows: int
    ids: int
    dim: int
    zipf: bool = False


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Logistic loss of a linear model on one embedding an example."""
    ids, clicked = batch
    logits = sj.lookup(params["table"], ids, mode="clip") @ params["weights"]
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, clicked))


def make_step(value_and_grad: Callable, tx: optax.GradientTransformation) -> Any:
    """`(state, batch) -> (state, loss)`, jitted, the state donated."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        params, opt_state = state
        loss, grads = value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def make_state(case: Case, tx: optax.GradientTransformation) -> Any:
    """Parameters and optimizer state."""

    def make():
        shape = (case.rows, case.dim)
        params = {
            "table": jnp.full(shape, 0.01, jnp.float32),
            "weights": jnp.linspace(-1.0, 1.0, case.dim, dtype=jnp.float32),
        }
        return params, tx.init(params)

    return jax.jit(make)()


def make_batch(case: Case, rng: np.random.Generator) -> Any:
    """Ids, uniform or skewed as in real data, and labels."""
    ids = timing.make_ids(case.ids, case.rows, case.zipf, rng)
    clicked = rng.integers(0, 2, case.ids)
    return jnp.asarray(ids), jnp.asarray(clicked.astype(np.float32))


def picks(case: Case) -> str:
    """Whether the gradient of the case's table is sparse or dense, found by shapes."""
    params, _ = jax.eval_shape(lambda: make_state(case, optax.identity()))
    batch = make_batch(case, np.random.default_rng(0))
    grads = jax.eval_shape(sj.grad(loss_fn), params, batch)
    return "sparse" if isinstance(grads["table"], sj.SelectedRows) else "dense"


# ------------------------------------------------------------------ measuring


def measure(case: Case, args: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """Times a case, the sides taking turns: medians in milliseconds, bytes, seconds."""
    tx = OPTIMIZERS[case.optimizer]()
    picked = picks(case)
    steps = {
        "ours": make_step(sj.value_and_grad, sj.optim.lazy(tx)),
        "dense": make_step(jax.value_and_grad, tx),
    }
    if picked == "dense" and case.sweep == "ids":
        tables = {"table": True, "weights": None}
        required = functools.partial(sj.value_and_grad, tables=tables)
        steps["required"] = make_step(required, sj.optim.lazy(tx))
    rng = np.random.default_rng(0)
    state, batch = make_state(case, tx), make_batch(case, rng)
    compiled = {
        name: timing.compile_apart(step, state, batch) for name, step in steps.items()
    }
    times, state = timing.alternate(
        {name: c.run for name, c in compiled.items()},
        state,
        lambda: make_batch(case, rng),
        repeats=args.repeats,
        seconds=args.seconds,
    )
    num_tables = sum(x.shape == (case.rows, case.dim) for x in jax.tree.leaves(state))
    del state
    gc.collect()
    touched = np.unique(np.asarray(batch[0])).size
    ms = {name: timing.median_ms(t) for name, t in times.items()}
    return {
        **dataclasses.asdict(case),
        "picked": picked,
        "ms": ms,
        "ratio": ms["dense"] / ms["ours"],
        # What moving the bytes of the rows read would take, in order.
        "floor_ms": 1e3 * 2 * num_tables * touched * case.dim * 4 / bandwidth,
        "spread": {name: timing.spread(t) for name, t in times.items()},
        "temp_bytes": {name: c.temp_bytes for name, c in compiled.items()},
        "compile_s": {name: c.seconds for name, c in compiled.items()},
        "repeats": len(times["ours"]),
    }


def needed_bytes(case: Case) -> int:
    """What a case takes at most: tables, the dense gradient, and an update as large."""
    params = jax.eval_shape(lambda: make_state(case, OPTIMIZERS[case.optimizer]()))
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(params)]
    return sum(sizes) + 2 * max(sizes)


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each case of both sweeps that fits into memory."""
    if args.quick:
        args.optimizers, args.seconds, args.ids = ["adam"], 1.0, []
        args.rows = [n for n in args.rows if n <= 100_000]
    bandwidth = timing.bandwidth()
    for optimizer in args.optimizers:
        sizes = [("rows", rows, FIXED_IDS) for rows in args.rows]
        sizes += [("ids", FIXED_ROWS, ids) for ids in args.ids]
        for sweep, rows, ids in sizes:
            case = Case(sweep, optimizer, rows, ids, args.dim, args.zipf)
            free = timing.free_bytes()
            if free is None or needed_bytes(case) <= free:
                yield measure(case, args, bandwidth)
            else:
                needed = f"{needed_bytes(case) / 1e9:.1f} GB"
                print(f"{optimizer:9} {rows:>9,} {ids:>9,}  skipped: needs {needed}")


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold, or that nothing here was measured for."""
    wrong = []
    at = {(r["optimizer"], r["rows"]): r for r in records if r["sweep"] == "rows"}

    def claim(name: str, value: float | None, bound: float, at_least: bool) -> None:
        if value is None:
            wrong.append(f"{name}: not measured")
        elif (value < bound) if at_least else (value > bound):
            words = "at least" if at_least else "at most"
            wrong.append(f"{name}: {value:.2f}, claimed {words} {bound:g}")

    for rows, bound in ((10**6, 30), (10**7, 120)):
        ratio = at.get(("adam", rows), {}).get("ratio")
        claim(f"adam, {rows:.0e} rows, dense/ours", ratio, bound, True)
    low, high = at.get(("adam", 10**5)), at.get(("adam", 10**7))
    growth = high["ms"]["ours"] / low["ms"]["ours"] if low and high else None
    claim("adam, step time from 1e+05 to 1e+07 rows", growth, 2.5, False)
    for (optimizer, rows), r in at.items():
        if rows <= 10**4:
            name = f"{optimizer}, {rows:.0e} rows, ours/dense"
            claim(name, 1 / r["ratio"], 1.1, False)
    return wrong


# ------------------------------------------------------------------ showing


HEADER = (
    "optimizer      rows       ids  picked   ours ms  dense ms   ratio  required"
    "   floor  ours MB  dense MB  compile s"
)


def line(r: dict[str, Any]) -> str:
    """One line of the table."""
    ms, temp, seconds = r["ms"], r["temp_bytes"], r["compile_s"]
    required = f"{ms['required']:.2f}" if "required" in ms else ""
    return (
        f"{r['optimizer']:9} {r['rows']:>9,} {r['ids']:>9,}  {r['picked']:6} "
        f"{ms['ours']:>9.2f} {ms['dense']:>9.2f} {r['ratio']:>7.2f} {required:>9} "
        f"{r['floor_ms']:>7.2f} {temp['ours'] / 1e6:>8.1f} {temp['dense'] / 1e6:>9.1f} "
        f"{seconds['ours']:>5.1f} {seconds['dense']:>4.1f}"
    )


def plot(args: argparse.Namespace, records: Sequence[dict[str, Any]]) -> None:
    """Step time over rows and over ids, whichever varies; both axes logarithmic."""
    if not args.plot:
        return
    from matplotlib.figure import Figure

    panels = {
        "rows": ("rows of the table", f"{FIXED_IDS:,} ids a step"),
        "ids": ("ids a step", f"{FIXED_ROWS:,} rows"),
    }
    shown = [x for x in panels if len({r[x] for r in records if r["sweep"] == x}) > 1]
    figure = Figure(figsize=(1.5 + 5.0 * len(shown), 4.5), layout="constrained")
    machine = timing.machine()
    title = f"{machine['cores']} cores, jax {machine['jax']}, D = {args.dim}"
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for ax, sweep in zip(axes, shown):
        label, fixed = panels[sweep]
        ax.set(xscale="log", yscale="log", xlabel=label, title=fixed)
        ax.grid(alpha=0.3)
        for number, name in enumerate(OPTIMIZERS):
            mine = [r for r in records if (r["sweep"], r["optimizer"]) == (sweep, name)]
            mine.sort(key=lambda r: r[sweep])
            for side, style in (("dense", "--s"), ("ours", "-o")):
                y = [r["ms"][side] for r in mine]
                label = name if mine and side == "ours" else None
                options: Any = {"color": f"C{number}", "markersize": 4, "label": label}
                ax.plot([r[sweep] for r in mine], y, style, **options)
    axes[0].set_ylabel("step time (ms)")
    for style, name in (("-o", "sparsejax"), ("--s", "optax, dense")):
        axes[0].plot([], [], style, color="black", label=name, markersize=4)
    axes[0].legend(fontsize=8, handlelength=4)
    figure.savefig(args.plot, dpi=150)


# ------------------------------------------------------------------ command line


def count(text: str) -> int:
    """A positive whole number, written 10000 or 1e4."""
    value = float(text)
    if value != int(value) or value < 1:
        raise ValueError(text)
    return int(value)


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    parser.add_argument(
        "--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS)
    )
    parser.add_argument("--rows", nargs="*", type=count, default=ROWS, metavar="V")
    parser.add_argument("--ids", nargs="*", type=count, default=IDS, metavar="N")
    parser.add_argument("--dim", type=count, default=64)
    parser.add_argument("--zipf", action="store_true", help="skewed ids, not uniform")
    parser.add_argument("--quick", action="store_true", help="small sizes, Adam, 10 s")
    parser.add_argument("--plot", metavar="FILE.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if `--check` is given and a claim does not hold."""
    return timing.run(
        "sweep", __doc__, argv, options, cases, line, failures, HEADER, plot
    )
