"""A whole training step with an embedding table: sparsejax against dense optax.

The step is lookup, loss, gradient and update of a small click model, jitted, with
parameters and optimizer state donated and other ids in every run. Ours and optax's
differ in two words (`sj.value_and_grad`, `sj.optim.lazy`). There is no `tables=`, so
that a table which is small beside the batch shows whether it is left dense.

Two sweeps: over the table's rows with as many ids a step, and over the ids with as
many rows. Where ours leaves the table dense, it is also timed with `tables=True` in the
sweep over ids, which shows where the two really cross.

    python -m benchmarks sweep --quick
    python -m benchmarks sweep --check --json steps.jsonl --plot steps.png

`--check` asserts what the library claims on two cores of a CPU, and exits with 1 where
it does not hold.
"""

import argparse
import dataclasses
import functools
import gc
import sys
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
    """One measurement: which optimizer, on how large a table, with how many ids.

    Args:
      loss: one of `LOSSES`.
    """

    sweep: str
    optimizer: str
    rows: int
    ids: int
    dim: int
    zipf: bool = False
    loss: str = "logistic"


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of a case: medians in milliseconds, bytes, seconds.

    Args:
      picked: what `sj.value_and_grad` decided on, "sparse" or "dense".
      insisted_ms: with `tables=True`; None where that is what was picked anyway.
      ratio: dense_ms / ours_ms.
      floor_ms: what moving the bytes of the rows read would take, in order.
    """

    case: Case
    picked: str
    ours_ms: float
    dense_ms: float
    insisted_ms: float | None
    ratio: float
    ours_spread: float
    dense_spread: float
    ours_temp: int
    dense_temp: int
    ours_compile_s: float
    dense_compile_s: float
    floor_ms: float
    repeats: int


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Logistic loss of a linear model on one embedding an example."""
    ids, clicked = batch
    logits = sj.lookup(params["table"], ids, mode="clip") @ params["weights"]
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, clicked))


def squares(params: Any, batch: Any) -> jax.Array:
    """A sum of squares, whose derivative needs the rows themselves."""
    ids, _ = batch
    return jnp.sum(sj.lookup(params["table"], ids, mode="clip") ** 2)


LOSSES = {"logistic": loss_fn, "squares": squares}


def make_step(
    value_and_grad: Callable,
    tx: optax.GradientTransformation,
    loss_fn: Callable = loss_fn,
) -> Any:
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
    if case.zipf:
        # Log-uniform ranks, which is Zipf's law with exponent 1, strewn over the table.
        ranks = np.floor(case.rows ** rng.random(case.ids)).astype(np.int64) - 1
        ids = ranks * 7_368_787 % case.rows
    else:
        ids = rng.integers(0, case.rows, case.ids)
    clicked = rng.integers(0, 2, case.ids)
    return jnp.asarray(ids.astype(np.int32)), jnp.asarray(clicked.astype(np.float32))


def picks(case: Case) -> str:
    """Whether the gradient of the case's table is sparse or dense, found by shapes."""
    params, _ = jax.eval_shape(lambda: make_state(case, optax.identity()))
    batch = make_batch(case, np.random.default_rng(0))
    grads = jax.eval_shape(sj.grad(loss_fn), params, batch)
    return "sparse" if isinstance(grads["table"], sj.SelectedRows) else "dense"


# ------------------------------------------------------------------ measuring


def measure(case: Case, repeats: int, seconds: float, bandwidth: float) -> Result:
    """Times a case, the sides taking turns."""
    tx = OPTIMIZERS[case.optimizer]()
    picked = picks(case)
    insist = functools.partial(
        sj.value_and_grad, tables={"table": True, "weights": None}
    )
    steps = {
        "ours": make_step(sj.value_and_grad, sj.optim.lazy(tx)),
        "dense": make_step(jax.value_and_grad, tx),
    }
    if picked == "dense" and case.sweep == "ids":
        steps["insisted"] = make_step(insist, sj.optim.lazy(tx))

    rng = np.random.default_rng(0)
    state = make_state(case, tx)
    batch = make_batch(case, rng)
    compiled = {
        name: timing.compile_apart(step, state, batch) for name, step in steps.items()
    }
    times, state = timing.alternate(
        {name: c.run for name, c in compiled.items()},
        state,
        lambda: make_batch(case, rng),
        repeats=repeats,
        seconds=seconds,
    )
    tables = sum(x.shape == (case.rows, case.dim) for x in jax.tree.leaves(state))
    del state
    gc.collect()

    touched = np.unique(np.asarray(batch[0])).size
    moved = 2 * tables * touched * case.dim * 4
    ours, dense = (timing.median_ms(times[name]) for name in ("ours", "dense"))
    insisted = times.get("insisted")
    return Result(
        case=case,
        picked=picked,
        ours_ms=ours,
        dense_ms=dense,
        insisted_ms=timing.median_ms(insisted) if insisted else None,
        ratio=dense / ours,
        ours_spread=timing.spread(times["ours"]),
        dense_spread=timing.spread(times["dense"]),
        ours_temp=compiled["ours"].temp_bytes,
        dense_temp=compiled["dense"].temp_bytes,
        ours_compile_s=compiled["ours"].seconds,
        dense_compile_s=compiled["dense"].seconds,
        floor_ms=1e3 * moved / bandwidth,
        repeats=len(times["ours"]),
    )


def needed_bytes(case: Case) -> int:
    """What a case takes at most: tables, the dense gradient, and an update as large."""
    params = jax.eval_shape(lambda: make_state(case, OPTIMIZERS[case.optimizer]()))
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(params)]
    return sum(sizes) + 2 * max(sizes)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """All cases of both sweeps."""
    for optimizer in args.optimizers:
        for rows in args.rows:
            yield Case("rows", optimizer, rows, FIXED_IDS, args.dim, args.zipf)
        for ids in args.ids:
            yield Case("ids", optimizer, FIXED_ROWS, ids, args.dim, args.zipf)


# ------------------------------------------------------------------ what is claimed


def check(results: Sequence[Result]) -> list[str]:
    """The claims that do not hold, or that nothing here was measured for."""
    failures = []
    at = {(r.case.optimizer, r.case.rows): r for r in results if r.case.sweep == "rows"}

    def claim(name: str, value: float | None, bound: float, at_least: bool) -> None:
        if value is None:
            failures.append(f"{name}: not measured")
        elif (value < bound) if at_least else (value > bound):
            words = "at least" if at_least else "at most"
            failures.append(f"{name}: {value:.2f}, claimed {words} {bound:g}")

    for rows, bound in ((10**6, 30), (10**7, 120)):
        r = at.get(("adam", rows))
        claim(f"adam, {rows:.0e} rows, dense/ours", r and r.ratio, bound, True)
    low, high = at.get(("adam", 10**5)), at.get(("adam", 10**7))
    growth = high.ours_ms / low.ours_ms if low and high else None
    claim("adam, step time from 1e+05 to 1e+07 rows", growth, 2.5, False)
    small = [r for r in at.values() if r.case.rows <= 10**4]
    if not small:
        claim("1e+04 rows or fewer, ours/dense", None, 1.1, False)
    for r in small:
        name = f"{r.case.optimizer}, {r.case.rows:.0e} rows, ours/dense"
        claim(name, r.ours_ms / r.dense_ms, 1.1, False)
    return failures


# ------------------------------------------------------------------ showing


HEADER = (
    "optimizer      rows       ids  picked   ours ms  dense ms   ratio  insisted"
    "   floor  ours MB  dense MB  compile s"
)


def line(r: Result) -> str:
    """One line of the table."""
    insisted = "" if r.insisted_ms is None else f"{r.insisted_ms:.2f}"
    return (
        f"{r.case.optimizer:9} {r.case.rows:>9,} {r.case.ids:>9,}  {r.picked:6} "
        f"{r.ours_ms:>9.2f} {r.dense_ms:>9.2f} {r.ratio:>7.2f} {insisted:>9} "
        f"{r.floor_ms:>7.2f} {_mb(r.ours_temp):>8} {_mb(r.dense_temp):>9} "
        f"{r.ours_compile_s:>5.1f} {r.dense_compile_s:>4.1f}"
    )


def _mb(n: int) -> str:
    return "?" if n < 0 else f"{n / 1e6:,.1f}"


def record(r: Result, machine: dict[str, Any]) -> dict[str, Any]:
    """A result as it goes into a JSON line."""
    fields = dataclasses.asdict(r)
    case = fields.pop("case")
    return {"benchmark": "sweep", **machine, **case, **fields}


def plot(results: Sequence[Result], path: str, title: str) -> None:
    """Step time over rows and over ids, whichever varies; both axes logarithmic."""
    from matplotlib.figure import Figure

    panels = {
        "rows": ("rows of the table", f"{FIXED_IDS:,} ids a step"),
        "ids": ("ids a step", f"{FIXED_ROWS:,} rows"),
    }
    sizes = {
        sweep: {getattr(r.case, sweep) for r in results if r.case.sweep == sweep}
        for sweep in panels
    }
    shown = [s for s in panels if len(sizes[s]) > 1] or list(panels)
    figure = Figure(figsize=(1.5 + 5.0 * len(shown), 4.5), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for ax, sweep in zip(axes, shown):
        label, fixed = panels[sweep]
        ax.set(xscale="log", yscale="log", xlabel=label, title=fixed)
        ax.grid(alpha=0.3)
        for number, name in enumerate(OPTIMIZERS):
            mine = [
                r for r in results if (r.case.sweep, r.case.optimizer) == (sweep, name)
            ]
            mine.sort(key=lambda r: getattr(r.case, sweep))
            if not mine:
                continue
            x, color = [getattr(r.case, sweep) for r in mine], f"C{number}"
            ax.plot(x, [r.dense_ms for r in mine], "--s", color=color, markersize=4)
            ax.plot(x, [r.ours_ms for r in mine], "-o", color=color, label=name)
    axes[0].set_ylabel("step time (ms)")
    for style, name in (("-o", "sparsejax"), ("--s", "optax, dense")):
        axes[0].plot([], [], style, color="black", label=name, markersize=4)
    axes[0].legend(fontsize=8, handlelength=4)
    figure.savefig(path, dpi=150)


# ------------------------------------------------------------------ command line


def _count(text: str) -> int:
    """A positive whole number, written 10000 or 1e4."""
    value = float(text)
    if value != int(value) or value < 1:
        raise ValueError(text)
    return int(value)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks sweep",
        description=__doc__.split("\n")[0],
    )
    parser.add_argument(
        "--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS)
    )
    parser.add_argument("--rows", nargs="*", type=_count, default=ROWS, metavar="V")
    parser.add_argument("--ids", nargs="*", type=_count, default=IDS, metavar="N")
    parser.add_argument("--dim", type=_count, default=64)
    parser.add_argument("--zipf", action="store_true", help="skewed ids, not uniform")
    parser.add_argument("--repeats", type=_count, default=100, help="at most, a case")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="no new repeat after so long"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, Adam, 10 s")
    parser.add_argument("--json", metavar="FILE", help="append a JSON line a case")
    parser.add_argument("--plot", metavar="FILE.png")
    parser.add_argument("--check", action="store_true", help="exit 1 if a claim fails")
    args = parser.parse_args(argv)
    if args.quick:
        args.optimizers, args.seconds = ["adam"], 1.0
        args.rows = [n for n in args.rows if n <= 100_000]
        args.ids = []
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if `--check` is given and a claim fails."""
    args = parse(argv)
    if args.plot:
        pass  # or fail now, not in the end
    machine = timing.machine()
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    bandwidth = timing.bandwidth()
    print(f"memory bandwidth, one pass in place: {bandwidth / 1e9:.1f} GB/s\n")
    print(HEADER, flush=True)
    results = []
    for case in cases(args):
        free = timing.free_bytes()
        if free is not None and needed_bytes(case) > free:
            print(
                f"{case.optimizer:9} {case.rows:>9,} {case.ids:>9,}  skipped: needs "
                f"{needed_bytes(case) / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
                flush=True,
            )
            continue
        result = measure(case, args.repeats, args.seconds, bandwidth)
        results.append(result)
        print(line(result), flush=True)
        if args.json:
            timing.append_json_line(args.json, record(result, machine))
    if args.plot:
        title = f"{machine['cores']} cores, jax {machine['jax']}, D = {args.dim}"
        plot(results, args.plot, title)
    failures = check(results) if args.check else []
    for failure in failures:
        print(f"does not hold: {failure}", file=sys.stderr)
    if args.check and not failures:
        print("\nall claims hold")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
