"""Times a training step of each model, the sides in processes of their own, in turns.

    python -m benchmarks models
    python -m benchmarks models --names dlrm bags --reads index --sides ours ours+pages
    python -m benchmarks models --trees OLD_CHECKOUT . --sides ours+pages
    pip install torch flax && python -m benchmarks models --sides ours dense torch
    python -m benchmarks models --check

Sides:

    ours         as installed
    ours+pages   after sj.cpu.keep_freed_pages()
    dense        plain jax.value_and_grad and optax
    dense+pages  the same, after sj.cpu.keep_freed_pages()
    rest+pages   plain JAX without tables: the rows that are read are constants
    torch        the model's file in PyTorch, NAME_torch.py
    torch+pages  the same, after sj.cpu.keep_freed_pages()
    torch-rest   PyTorch without tables

All run on the GPU if there is one. A process compiles its step and then waits. In each
round every process runs some steps, each on other ids, and reports their times; what
counts is the median over all rounds. The losses of the first batch must agree.
With `--trees` the same models are timed with the sparsejax of several checkouts, a line
for each. The column `ratio` compares each line with the first. `--check` times what the
claims need, and exits with 1 unless, compared with the faster of torch and torch+pages,
every model is at least 1.0 times as fast as installed, 1.3 times after
`keep_freed_pages`, and 2.0 times in its sparse part: a step less the step without
tables.
"""

import argparse
import importlib
import itertools
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj
from benchmarks import timing
from benchmarks.models import LARGE, NAMES, READS


SIDES = (
    *("ours", "ours+pages", "dense", "dense+pages", "rest+pages"),
    *("torch", "torch+pages", "torch-rest"),
)
CHECKED = ("ours", "ours+pages", "rest+pages", "torch", "torch+pages", "torch-rest")
MIN, MIN_WITH_PAGES, MIN_OF_TABLES = 1.0, 1.3, 2.0
_ROOT = pathlib.Path(__file__).parent.parent.parent


# ------------------------------------------------------------------ one side


def serve(name: str, read: str, side: str) -> None:
    """Compiles the step of one side, then runs as many as each line of stdin says."""
    if side.endswith("+pages") and not sj.cpu.keep_freed_pages():
        raise SystemExit("the allocator is not glibc's: it cannot keep freed pages")

    model = importlib.import_module(f"benchmarks.models.{name}")
    rng = np.random.default_rng(0)
    params = model.make(rng)
    make_step = _torch_step if side.startswith("torch") else _jax_step
    step, put, about = make_step(model, name, params, model.batches(rng), read, side)
    about["loss"] = float(step(put(model.batches(rng))))
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line) + 2):
            batch = put(model.batches(rng))
            start = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - start)
        # The first steps of a round bring the caches back that other processes used.
        print(json.dumps([1e3 * t for t in times[2:]]), flush=True)


def _jax_step(model, name, params, first, read, side):
    """A step `batch -> loss` that ends when its results are ready; `put`; facts."""
    tx, differentiate = model.optimizer(), jax.value_and_grad
    if side.startswith("ours"):
        tx, differentiate = sj.optim.lazy(tx), sj.value_and_grad

    def loss(params, batch):
        return model.loss(params, batch, READS[read])

    if side.startswith("rest"):
        loss, params, rows = _without_tables(model, params, first)

    def train_step(params, state, batch):
        value, grads = differentiate(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def put(batch):
        batch = batch | {"rows": rows} if side.startswith("rest") else batch
        return jax.block_until_ready(jax.device_put(batch))

    def step(batch):
        nonlocal params, state
        params, state, value = jax.block_until_ready(compiled.run(params, state, batch))
        return value

    params = jax.device_put(params)
    state = jax.jit(tx.init)(params)
    jitted = jax.jit(train_step, donate_argnums=(0, 1))
    compiled = timing.compile_apart(jitted, params, state, put(first))
    return (
        step,
        put,
        {"compile_s": compiled.seconds, "temp_mb": {"step": compiled.temp_bytes / 1e6}},
    )


def _without_tables(model, params, batch):
    """The loss on rows out of the batch, the parameters it is left with, and rows."""
    tables, shapes = set(), []

    def trace(leaves, batch):
        def read(table, ids):
            tables.update(k for k, x in enumerate(leaves) if x is table)
            shapes.append((*ids.shape, *table.shape[1:]))
            return jnp.zeros(shapes[-1])

        return model.loss(treedef.unflatten(leaves), batch, read)

    leaves, treedef = jax.tree.flatten(params)
    jax.eval_shape(trace, leaves, batch)
    kept = [None if k in tables else x for k, x in enumerate(leaves)]
    rng = np.random.default_rng(1)
    rows = [0.1 * rng.standard_normal(shape, np.float32) for shape in shapes]

    def loss(params, batch):
        rows = iter(batch["rows"])
        return model.loss(params, batch, lambda table, ids: next(rows))

    return loss, treedef.unflatten(kept), rows


def _torch_step(model, name, params, first, read, side):
    """The same of the model in PyTorch."""
    from benchmarks.models import torch_side

    step, put = torch_side.make_step(name, params, has_tables=side != "torch-rest")
    return step, put, {}


class _Process:
    """A side in a process of its own, which `serve` runs."""

    def __init__(self, tree: str, name: str, read: str, side: str):
        # The package of that checkout, the models of this one.
        code = (
            f"import sys; sys.path[0] = {str(pathlib.Path(tree).resolve())!r}\n"
            f"import sparsejax; sys.path[0] = {str(_ROOT)!r}\n"
            f"from benchmarks.models.__main__ import serve; serve{name, read, side}"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.times: list[float] = []
        self.about: dict[str, Any] = self._read()  # once the step is compiled

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with {self._process.wait()}, see above")
        return json.loads(line)

    def run(self, steps: int) -> None:
        """Runs and times that many steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        self.times += self._read()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# ------------------------------------------------------------------ all sides


def measure(args: argparse.Namespace, name: str, read: str) -> list[dict[str, Any]]:
    """A record for each tree and side: the median step and the ratio to the first."""
    sides = [(tree, side) for side in args.sides for tree in args.trees]
    processes: dict[tuple[str, str], _Process] = {}
    try:
        for tree, side in sides:
            # One compiles after the other, since that is timed too.
            processes[tree, side] = _Process(tree, name, read, side)
        for number in range(args.repeats):
            order = list(processes.values())
            random.Random(number).shuffle(order)
            for process in order:
                process.run(args.steps)
    finally:
        for process in processes.values():
            process.close()
    losses = {k: p.about["loss"] for k, p in processes.items() if "rest" not in k[1]}
    if losses and max(losses.values()) - min(losses.values()) > 1e-3:
        raise SystemExit(f"{name}: the losses of the first batch differ: {losses}")
    medians = {k: statistics.median(p.times) for k, p in processes.items()}
    return [
        {
            "model": name,
            "read": read,
            "side": side,
            "tree": tree,
            "ms": {"step": medians[tree, side]},
            "ratio": {"to the first": medians[tree, side] / medians[sides[0]]},
            **processes[tree, side].about,
        }
        for tree, side in sides
    ]


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold; prints the table of README and of performance.md."""
    wrong = []
    print("\n| model | as installed | freed pages kept | PyTorch | without tables |")
    for name, read in dict.fromkeys((r["model"], r["read"]) for r in records):
        mine = [r for r in records if (r["model"], r["read"]) == (name, read)]
        ms = {r["side"]: r["ms"]["step"] for r in mine}
        peer = min(ms["torch"], ms["torch+pages"])
        tables = ms["ours+pages"] - ms["rest+pages"]
        shown = ms["ours"], ms["ours+pages"], peer, ms["rest+pages"]
        print(f"| {name}, {read} | {' | '.join(f'{x:.1f}' for x in shown)} |")
        for case, ratio, least in (
            ("as installed", peer / ms["ours"], MIN),
            ("with pages kept", peer / ms["ours+pages"], MIN_WITH_PAGES),
            ("of the tables", (peer - ms["torch-rest"]) / tables, MIN_OF_TABLES),
        ):
            if ratio < least:
                wrong.append(f"{name}, {read}, {case}: {ratio:.2f}, claimed {least}")
    return wrong


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each model, way to read, side and checkout."""
    if args.check:
        args.sides = CHECKED
    for name, read in itertools.product(args.names, args.reads):
        yield from measure(args, name, read)


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the models and their sides."""
    parser.set_defaults(repeats=7)  # rounds
    parser.add_argument("--names", nargs="+", choices=[*NAMES, *LARGE], default=NAMES)
    parser.add_argument("--reads", nargs="+", choices=[*READS], default=[*READS])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--trees", nargs="+", default=["."], help="checkouts")
    parser.add_argument("--steps", type=int, default=10, help="of each round")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if `--check` is given and a claim does not hold."""
    # This process leaves the device, and its memory, to the processes of the sides.
    benchmark = "models", __doc__, argv, options, cases, failures
    return timing.run(*benchmark, about=dict)


if __name__ == "__main__":
    sys.exit(main())
