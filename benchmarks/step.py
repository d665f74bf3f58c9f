"""A training step at the sizes of click models: ours, PyTorch, FBGEMM, dense optax.

The step is lookup, loss, gradient and update of a small click model, or of a sum of
squares, over 1,000,000 rows of 64 numbers. All sides take turns in one process, with
other ids in every run; every other system owns its table and state. Bags are timed
forward only.

    python -m benchmarks step
    python -m benchmarks step --check --json steps.jsonl --plot steps.png
    python -m benchmarks step --loss squares

PyTorch and FBGEMM are left out where they are not installed (`pip install torch
fbgemm-gpu-cpu`, releases that go together), the floor where there is no C++ compiler.
The floor (floor.cpp) reads, updates and writes each row once in native code, without
merging duplicates. Reported are medians in milliseconds, and how many times faster
ours is than the faster peer.
"""

import argparse
import ctypes
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj
from benchmarks import bag, sweep, timing
from benchmarks.sweep import Case


try:
    import torch  # pyright: ignore[reportMissingImports]
except ImportError:  # not among what the benchmarks install
    torch: Any = None
try:
    from fbgemm_gpu import (  # pyright: ignore[reportMissingImports]
        split_embedding_configs as fbgemm_configs,
        split_table_batched_embeddings_ops_common as fbgemm_common,
        split_table_batched_embeddings_ops_training as fbgemm,
    )
except (ImportError, OSError):  # OSError: built for another release of PyTorch
    fbgemm: Any = None
    fbgemm_configs: Any = None
    fbgemm_common: Any = None


RATE = 1e-3
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(RATE),
    "adagrad": lambda: optax.adagrad(RATE),
    "adam": lambda: optax.adam(RATE),
    "rowwise_adagrad": lambda: sj.optim.rowwise_adagrad(RATE),
}
KINDS = {"sgd": 0, "adagrad": 1, "adam": 2, "rowwise_adagrad": 3}
TORCH = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "SparseAdam"}
FBGEMM = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
}
IDS = (65_536, 8_192)
PEERS = ("torch", "fbgemm")
SIDES = ("ours", "dense", *PEERS, "floor")

# By step, ids and skew: how many times faster than the faster peer ours has to be.
LEAST = {
    ("sgd", 65_536, "uniform"): 2.0,
    ("sgd", 65_536, "zipf"): 2.0,
    ("adagrad", 65_536, "uniform"): 2.5,
    ("adagrad", 65_536, "zipf"): 1.5,
    ("adam", 65_536, "uniform"): 3.5,
    ("adam", 65_536, "zipf"): 2.0,
    ("rowwise_adagrad", 65_536, "uniform"): 1.2,
    ("rowwise_adagrad", 65_536, "zipf"): 1.0,
    ("sgd", 8_192, "uniform"): 1.3,
    ("adagrad", 8_192, "uniform"): 2.5,
    ("adam", 8_192, "uniform"): 3.0,
    ("bag_fixed", 65_536, "uniform"): 0.6,
    ("bag_fixed", 65_536, "zipf"): 0.6,
    ("bag_ragged", 65_536, "uniform"): 0.3,
    ("bag_ragged", 65_536, "zipf"): 0.3,
}
# And than FBGEMM: of so few bags PyTorch, which has no tables, is faster than it.
LEAST_FBGEMM = {
    ("bag_fixed", 8_192, "uniform"): 0.6,
    ("bag_fixed", 8_192, "zipf"): 0.6,
    ("bag_ragged", 8_192, "uniform"): 0.3,
    ("bag_ragged", 8_192, "zipf"): 0.3,
}


# ------------------------------------------------------------------ sides of a step

# A side is `(state, inputs) -> (state, result)`. The state is that of the JAX sides;
# the others hold their own.


def jax_sides(case: Case) -> tuple[dict[str, Callable], Any]:
    """Returns our side and dense optax, and the state that the two share."""
    tx = OPTIMIZERS[case.optimizer]()
    state = sweep.make_state(case, tx)
    batch = sweep.make_batch(case, np.random.default_rng(0))
    sides = {}

    def add(name, value_and_grad, lifted):
        step = sweep.make_step(value_and_grad, lifted, sweep.LOSSES[case.loss])
        run = timing.compile_apart(step, state, batch).run
        sides[name] = lambda state, inputs: run(state, inputs["jax"])

    add("ours", sj.value_and_grad, sj.optim.lazy(tx))
    add("dense", jax.value_and_grad, tx)
    return sides, state


def torch_loss(case: Case, rows: Any, dense: Any, clicked: Any) -> Any:
    """The loss of `sweep.LOSSES`, of rows that were read."""
    if case.loss == "squares":
        return rows.square().sum()
    functional = torch.nn.functional
    return functional.binary_cross_entropy_with_logits(rows @ dense, clicked)


def torch_side(case: Case, table: np.ndarray, weights: np.ndarray) -> Callable:
    """PyTorch with sparse gradients."""
    rows = torch.nn.Parameter(torch.from_numpy(table.copy()))
    dense = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    optimizers = torch.optim
    tx = getattr(optimizers, TORCH[case.optimizer])([rows], lr=RATE)
    name = "Adam" if case.optimizer == "adam" else TORCH[case.optimizer]
    tx_dense = getattr(optimizers, name)([dense], lr=RATE)

    def run(state, inputs):
        ids, clicked = inputs["torch"]
        rows.grad = dense.grad = None
        read = torch.nn.functional.embedding(ids, rows, sparse=True)
        torch_loss(case, read, dense, clicked).backward()
        tx.step()
        tx_dense.step()
        return state, ()

    return run


def fbgemm_side(case: Case, table: np.ndarray, weights: np.ndarray) -> Callable:
    """FBGEMM's embedding, which updates the table in its backward pass."""
    place = fbgemm_common.EmbeddingLocation.HOST
    module = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(case.rows, case.dim, place, fbgemm.ComputeDevice.CPU)],
        optimizer=getattr(fbgemm_configs.EmbOptimType, FBGEMM[case.optimizer]),
        learning_rate=RATE,
        # Bags of one id: the mode without bags is ten times as slow on a CPU.
        pooling_mode=fbgemm_common.PoolingMode.SUM,
        device="cpu",
    )
    module.split_embedding_weights()[0].copy_(torch.from_numpy(table))
    dense = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    tx_dense = torch.optim.SGD([dense], lr=RATE)
    offsets = torch.arange(case.ids + 1)

    def run(state, inputs):
        ids, clicked = inputs["torch"]
        dense.grad = None
        torch_loss(case, module(ids, offsets), dense, clicked).backward()
        tx_dense.step()
        return state, ()

    return run


@functools.cache
def floor_library() -> Any:
    """floor.cpp, compiled; None without a compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    source = pathlib.Path(__file__).with_name("floor.cpp")
    built = pathlib.Path(tempfile.mkdtemp()) / "floor.so"
    options = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
    # Parts of -ffast-math. As a whole it makes the library, when it is loaded, flush
    # the subnormal numbers of the process to zero.
    options += ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"]
    options += ["-freciprocal-math", "-ffinite-math-only", "-fno-math-errno"]
    subprocess.run([compiler, *options, str(source), "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


def floor_arrays(table: np.ndarray) -> list[np.ndarray]:
    """The table and state of the floor."""
    return [table.copy(), np.zeros_like(table), np.zeros_like(table)]


def floor_side(
    case: Case, arrays: Sequence[np.ndarray], weights: np.ndarray
) -> Callable:
    """The floor, which updates `floor_arrays`."""
    pointer = lambda x: ctypes.c_void_p(x.ctypes.data)
    step, threads = floor_library().step, int(timing.machine()["cores"])

    def run(state, inputs):
        ids, clicked = inputs["numpy"]
        step(
            KINDS[case.optimizer],
            *map(pointer, (ids, clicked)),
            *map(ctypes.c_int64, (case.ids, case.dim)),
            *map(pointer, (weights, *arrays)),
            threads,
        )
        return state, ()

    return run


def peers(case: Case, state: Any) -> dict[str, Callable]:
    """The other systems that are installed and have this optimizer."""
    params, _ = state
    table, weights = np.array(params["table"]), np.array(params["weights"])
    sides = {}
    if torch is not None and case.optimizer in TORCH:
        sides["torch"] = torch_side(case, table, weights)
    if fbgemm is not None and case.optimizer in FBGEMM:
        sides["fbgemm"] = fbgemm_side(case, table, weights)
    if floor_library() is not None and case.loss == "logistic":
        sides["floor"] = floor_side(case, floor_arrays(table), weights)
    return sides


def make_inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """One batch, as each side takes it."""
    batch = sweep.make_batch(case, rng)
    ids, clicked = arrays = tuple(np.array(x) for x in batch)
    inputs = {"jax": batch, "numpy": arrays}
    if torch is not None:
        ids = torch.from_numpy(ids.astype(np.int64))
        inputs["torch"] = ids, torch.from_numpy(clicked)
    return inputs


# ------------------------------------------------------------------ sides of a bag


def bag_sides(case: Case, layout: str) -> tuple[dict[str, Callable], Any, Callable]:
    """Ours and the peers' sums of bags, the table, and what makes inputs."""
    bags = case.ids // bag.FIXED_SIZE
    capacity = bag.capacity_of(layout, bags)
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((case.rows, case.dim), dtype=np.float32))
    ids = jax.ShapeDtypeStruct((capacity,), jnp.int32)
    f = bag.ours(layout, bags, "sum")
    ours = bag.jax_side(f, "forward", (table, [ids, ids])).run
    sides = {"ours": lambda table, inputs: ours(table, inputs["jax"])}
    if torch is not None:
        run = bag.torch_side("sum", "forward", table)
        sides["torch"] = lambda table, inputs: run(table, inputs["torch"])
    if torch is not None and fbgemm is not None:
        module = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
            [
                (
                    case.rows,
                    case.dim,
                    fbgemm_common.EmbeddingLocation.HOST,
                    fbgemm.ComputeDevice.CPU,
                )
            ],
            pooling_mode=fbgemm_common.PoolingMode.SUM,
            device="cpu",
        )
        module.split_embedding_weights()[0].copy_(torch.from_numpy(np.array(table)))

        def pooled(table, inputs):
            with torch.no_grad():
                module(*inputs["fbgemm"])
            return table, ()

        sides["fbgemm"] = pooled

    def inputs():
        ids, segments = bag.make_batch(layout, bags, case.rows, case.zipf, rng)
        made = {"jax": [jnp.asarray(ids), jnp.asarray(segments)]}
        if torch is not None:
            made["torch"] = bag.torch_batch(layout, bags, ids, segments)
            offsets = np.searchsorted(segments, np.arange(bags + 1)).astype(np.int64)
            flat = ids[: offsets[-1]].astype(np.int64)
            made["fbgemm"] = [torch.from_numpy(x) for x in (flat, offsets)]
        return made

    return sides, table, inputs


# ------------------------------------------------------------------ measuring


def measure(case: Case, repeats: int, seconds: float) -> dict[str, Any]:
    """Times all sides of a case in turns; one record."""
    rng = np.random.default_rng(0)
    if case.optimizer.startswith("bag_"):
        sides, state, inputs = bag_sides(case, case.optimizer.removeprefix("bag_"))
    else:
        sides, state = jax_sides(case)
        sides |= peers(case, state)
        inputs = functools.partial(make_inputs, case, rng)
    times, state = timing.alternate(
        sides, state, inputs, repeats=repeats, seconds=seconds
    )
    ms = {name: timing.median_ms(t) for name, t in times.items()}
    fastest = min((ms[name] for name in PEERS if name in ms), default=None)
    return {
        "benchmark": "step",
        "step": case.optimizer,
        "loss": case.loss,
        "rows": case.rows,
        "dim": case.dim,
        "ids": case.ids,
        "skew": "zipf" if case.zipf else "uniform",
        "ms": ms,
        "best_ms": {name: 1e3 * min(t) for name, t in times.items()},
        "spread": {name: timing.spread(t) for name, t in times.items()},
        "ratio": fastest and fastest / ms["ours"],
        "repeats": len(times["ours"]),
    }


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """All cases."""
    for ids in args.ids:
        for name in args.steps:
            for zipf in (False, True):
                yield Case("ids", name, args.rows, ids, args.dim, zipf, args.loss)


def check(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold, of those that were measured."""
    wrong = []
    for r in records:
        case, fbgemm_ms = (r["step"], r["ids"], r["skew"]), r["ms"].get("fbgemm")
        for ratio, least, peer in (
            (r["ratio"], LEAST.get(case), "the faster peer"),
            (
                fbgemm_ms and fbgemm_ms / r["ms"]["ours"],
                LEAST_FBGEMM.get(case),
                "FBGEMM",
            ),
        ):
            if ratio is not None and least is not None and ratio < least:
                wrong.append(
                    f"{r['step']}, {r['ids']:,} {r['skew']} ids: {ratio:.2f} times as "
                    f"fast as {peer}, claimed at least {least:.2f}"
                )
    return wrong


def line(record: dict[str, Any]) -> str:
    """One line of the table."""
    cells = (
        f"{record['ms'][s]:9.2f}" if s in record["ms"] else f"{'-':>9}" for s in SIDES
    )
    ratio = "-" if record["ratio"] is None else f"{record['ratio']:.2f}"
    return (
        f"{record['step']:16} {record['ids']:>7,} {record['skew']:8}"
        f"{''.join(cells)} {ratio:>7}"
    )


def plot(records: Sequence[dict[str, Any]], path: str, title: str) -> None:
    """A bar a side for each case."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 0.9 * len(records), 4.5), layout="constrained")
    ax = figure.subplots()
    width = 0.8 / len(SIDES)
    for k, side in enumerate(SIDES):
        at = [i for i, r in enumerate(records) if side in r["ms"]]
        ax.bar(
            [i + (k - len(SIDES) / 2 + 0.5) * width for i in at],
            [records[i]["ms"][side] for i in at],
            width,
            label={"ours": "sparsejax", "dense": "optax, dense"}.get(side, side),
        )
    names = [f"{r['step']}\n{r['ids']:,}\n{r['skew']}" for r in records]
    ax.set_xticks(range(len(records)), names, fontsize=7)
    ax.set(yscale="log", ylabel="ms", title=title)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and checks where asked."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks step", description=__doc__.split("\n")[0]
    )
    names = [*OPTIMIZERS, "bag_fixed", "bag_ragged"]
    parser.add_argument("--steps", nargs="+", default=names, choices=names)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--dim", type=int, default=64, help="columns of the table")
    parser.add_argument("--ids", nargs="+", type=int, default=IDS, help="of a batch")
    parser.add_argument("--loss", choices=sweep.LOSSES, default="logistic")
    parser.add_argument("--repeats", type=int, default=40, help="timed runs, at most")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a case, about")
    parser.add_argument("--json", metavar="FILE", help="append a JSON line a case")
    parser.add_argument("--plot", metavar="FILE.png")
    parser.add_argument("--check", action="store_true", help="exit 1 if a claim fails")
    args = parser.parse_args(argv)
    machine = timing.machine()
    if torch is not None:
        torch.set_num_threads(machine["cores"])
        machine["torch"] = torch.__version__
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"table [{args.rows:,}, {args.dim}]; medians in ms\n")
    print(
        f"{'step':16} {'ids':>7} {'skew':8}" + "".join(f"{s:>9}" for s in SIDES),
        "  ratio",
    )
    records = []
    for case in cases(args):
        record = measure(case, args.repeats, args.seconds)
        records.append(record)
        print(line(record), flush=True)
        if args.json:
            timing.append_json_line(args.json, machine | record)
    if args.plot:
        plot(records, args.plot, f"{machine['cores']} cores, jax {machine['jax']}")
    return timing.report(check(records) if args.check else [])


if __name__ == "__main__":
    sys.exit(main())
