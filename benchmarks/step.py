"""A training step at the sizes of click models: ours, PyTorch, FBGEMM, dense optax.

The step is lookup, loss, gradient and update of a small click model, over 1,000,000
rows of 64 numbers. All sides take turns in one process, with other ids in every run;
every other system owns its table and state.

    python -m benchmarks step
    python -m benchmarks step --check --json steps.jsonl

PyTorch and FBGEMM are left out where they are not installed (`pip install torch
fbgemm-gpu-cpu`, releases that go together). Reported are medians in milliseconds, and
how many times faster ours is than the faster peer.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax

import sparsejax as sj
from benchmarks import sweep, timing
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
TORCH = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "SparseAdam"}
FBGEMM = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
}
IDS = (65_536, 8_192)
PEERS = ("torch", "fbgemm")
SIDES = ("ours", "dense", *PEERS)

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
        step = sweep.make_step(value_and_grad, lifted)
        run = timing.compile_apart(step, state, batch).run
        sides[name] = lambda state, inputs: run(state, inputs["jax"])

    add("ours", sj.value_and_grad, sj.optim.lazy(tx))
    add("dense", jax.value_and_grad, tx)
    return sides, state


def torch_loss(rows: Any, dense: Any, clicked: Any) -> Any:
    """The loss of `sweep`, of rows that were read."""
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
        torch_loss(read, dense, clicked).backward()
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
        torch_loss(module(ids, offsets), dense, clicked).backward()
        tx_dense.step()
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
    return sides


def make_inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """One batch, as each side takes it."""
    batch = sweep.make_batch(case, rng)
    inputs = {"jax": batch}
    if torch is not None:
        ids, clicked = (np.array(x) for x in batch)
        ids = torch.from_numpy(ids.astype(np.int64))
        inputs["torch"] = ids, torch.from_numpy(clicked)
    return inputs


# ------------------------------------------------------------------ measuring


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each case."""
    if torch is not None:
        torch.set_num_threads(int(timing.machine()["cores"]))
    for ids in args.ids:
        for name in args.steps:
            for zipf in (False, True):
                case = Case("ids", name, args.rows, ids, args.dim, zipf)
                yield measure(case, args)


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Times all sides of a case in turns; one record."""
    rng = np.random.default_rng(0)
    sides, state = jax_sides(case)
    sides |= peers(case, state)
    times, state = timing.alternate(
        sides,
        state,
        functools.partial(make_inputs, case, rng),
        repeats=args.repeats,
        seconds=args.seconds,
    )
    ms = {name: timing.median_ms(t) for name, t in times.items()}
    fastest = min((ms[name] for name in PEERS if name in ms), default=None)
    return {
        "step": case.optimizer,
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


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold, of those that were measured."""
    wrong = []
    for r in records:
        least = LEAST.get((r["step"], r["ids"], r["skew"]))
        if r["ratio"] is not None and least is not None and r["ratio"] < least:
            wrong.append(
                f"{r['step']}, {r['ids']:,} {r['skew']} ids: {r['ratio']:.2f} times as "
                f"fast as the faster peer, claimed at least {least:.2f}"
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


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    names = [*OPTIMIZERS]
    parser.add_argument("--steps", nargs="+", default=names, choices=names)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--dim", type=int, default=64, help="columns of the table")
    parser.add_argument("--ids", nargs="+", type=int, default=IDS, help="of a batch")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if `--check` is given and a claim does not hold."""
    header = f"{'step':16} {'ids':>7} {'skew':8}" + "".join(f"{s:>9}" for s in SIDES)
    return timing.run(
        "step", __doc__, argv, options, cases, line, failures, f"{header}   ratio"
    )
