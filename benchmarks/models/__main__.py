"""Times a training step of each model, the sides in processes of their own, in turns.

    python -m benchmarks models
    python -m benchmarks models --names dlrm bags --sides ours ours+pages
    python -m benchmarks models --trees OLD_CHECKOUT . --sides ours+pages
    pip install torch && python -m benchmarks models --sides ours dense torch
    python -m benchmarks models --check

Sides:

    ours         as installed
    ours+pages   after sj.cpu.keep_freed_pages()
    dense        plain jax.value_and_grad and optax
    dense+pages  the same, after sj.cpu.keep_freed_pages()
    rest+pages   plain JAX without tables: the rows that are read are constants
    torch        the model in PyTorch, of torch_side.py
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
import json
import operator
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
from benchmarks.models import (
    bags,
    dlrm,
    factorization,
    graph,
    knowledge_graph,
    skip_gram,
    ten_tables,
    transformer,
    two_towers,
)


MODELS: dict[str, Any] = {
    "skip_gram": skip_gram,
    "factorization": factorization,
    "dlrm": dlrm,
    "bags": bags,
    "knowledge_graph": knowledge_graph,
    "two_towers": two_towers,
    "sequence": transformer.model(transformer.SASREC),
    "language": transformer.model(transformer.LANGUAGE),
    "graph": graph,
}
# 12 GiB and more: for a GPU, not timed unless they are named.
LARGE = {"ten_tables": ten_tables.ADAM, "ten_tables_sgd": ten_tables.SGD}


SIDES = (
    *("ours", "ours+pages", "dense", "dense+pages", "rest+pages"),
    *("torch", "torch+pages", "torch-rest"),
)
CHECKED = ("ours", "ours+pages", "rest+pages", "torch", "torch+pages", "torch-rest")
MIN, MIN_WITH_PAGES, MIN_OF_TABLES = 1.0, 1.3, 2.0
ROOT = pathlib.Path(__file__).parents[2]


# ------------------------------------------------------------------ one side


def serve(name: str, side: str) -> None:
    """Compiles the step of one side, then runs as many as each line of stdin says."""
    if side.endswith("+pages") and not sj.cpu.keep_freed_pages():
        raise SystemExit("the allocator is not glibc's: it cannot keep freed pages")

    model, rng, about = (MODELS | LARGE)[name], np.random.default_rng(0), {}
    params, first = model.make(rng), model.batches(rng)
    if side.startswith("torch"):
        from benchmarks.models import torch_side

        step, put = torch_side.make_step(name, params, side != "torch-rest")
    else:
        step, put, about = _jax_step(model, params, first, side)
    about["loss"] = float(step(put(model.batches(rng))))
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line) + 2):
            batch = put(model.batches(rng))
            start = time.perf_counter()
            step(batch)
            times.append(1e3 * (time.perf_counter() - start))
        # The first steps of a round bring the caches back that other processes used.
        print(json.dumps(times[2:]), flush=True)


def _jax_step(model, params, first, side):
    """A step `batch -> loss` that ends when its results are ready; `put`; facts."""
    tx, differentiate, more = model.tx, jax.value_and_grad, {}
    if side.startswith("ours"):
        tx, differentiate = sj.optim.lazy(tx), sj.value_and_grad
    loss = lambda params, batch: model.loss(params, batch, operator.getitem)
    if side.startswith("rest"):
        loss, params, more["rows"] = _without_tables(model, params, first)

    def train_step(params, state, batch):
        value, grads = differentiate(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def put(batch):
        return jax.block_until_ready(jax.device_put(batch | more))

    def step(batch):
        nonlocal params, state
        params, state, value = jax.block_until_ready(compiled.run(params, state, batch))
        return value

    params = jax.device_put(params)
    state = jax.jit(tx.init)(params)
    jitted = jax.jit(train_step, donate_argnums=(0, 1))
    compiled = timing.compile_apart(jitted, params, state, put(first))
    temporaries = {"step": compiled.temp_bytes / 1e6}
    return step, put, {"compile_s": compiled.seconds, "temp_mb": temporaries}


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


class _Process:
    """A side in a process of its own, which `serve` runs."""

    def __init__(self, tree: str, name: str, side: str):
        # The package of that checkout, the models of this one.
        code = (
            f"import sys; sys.path[0] = {str(pathlib.Path(tree).resolve())!r}\n"
            f"import sparsejax; sys.path[0] = {str(ROOT)!r}\n"
            f"from benchmarks.models.__main__ import serve; serve{name, side}"
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process: Any = subprocess.Popen([sys.executable, "-c", code], **pipes)
        self.times: list[float] = []
        self.about: dict[str, Any] = self._read()  # once the step is compiled

    def _read(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with {self.process.wait()}, see above")
        return json.loads(line)

    def run(self, steps: int) -> None:
        """Runs and times that many steps."""
        print(steps, file=self.process.stdin, flush=True)
        self.times += self._read()


# ------------------------------------------------------------------ all sides


def measure(args: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """A record for each tree and side: the median step and the ratio to the first."""
    sides = [(tree, side) for side in args.sides for tree in args.trees]
    processes: dict[tuple[str, str], _Process] = {}
    try:
        for tree, side in sides:
            # One compiles after the other, since that is timed too.
            processes[tree, side] = _Process(tree, name, side)
        for number in range(args.repeats):
            order = list(processes.values())
            random.Random(number).shuffle(order)
            for process in order:
                process.run(args.steps)
    finally:
        for process in processes.values():
            process.process.communicate()
    losses = {k: p.about["loss"] for k, p in processes.items() if "rest" not in k[1]}
    if losses and max(losses.values()) - min(losses.values()) > 1e-3:
        raise SystemExit(f"{name}: the losses of the first batch differ: {losses}")
    medians = {k: statistics.median(p.times) for k, p in processes.items()}
    for (tree, side), ms in medians.items():
        ratio = {"to the first": ms / medians[sides[0]]}
        case = {"model": name, "side": side, "tree": tree}
        times = {"ms": {"step": ms}, "ratio": ratio}
        yield case | times | processes[tree, side].about


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each model, side and checkout."""
    if args.check:
        args.sides = CHECKED
    for name in args.names:
        yield from measure(args, name)


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold; prints the table of README and of performance.md."""
    wrong = []
    print("\n| model | as installed | freed pages kept | PyTorch | without tables |")
    for name in dict.fromkeys(r["model"] for r in records):
        ms = {r["side"]: r["ms"]["step"] for r in records if r["model"] == name}
        peer = min(ms["torch"], ms["torch+pages"])
        tables = ms["ours+pages"] - ms["rest+pages"]
        shown = ms["ours"], ms["ours+pages"], peer, ms["rest+pages"]
        print(f"| {name} | {' | '.join(f'{x:.1f}' for x in shown)} |")
        for case, ratio, least in (
            ("as installed", peer / ms["ours"], MIN),
            ("with pages kept", peer / ms["ours+pages"], MIN_WITH_PAGES),
            ("of the tables", (peer - ms["torch-rest"]) / tables, MIN_OF_TABLES),
        ):
            if ratio < least:
                wrong.append(f"{name}, {case}: {ratio:.2f}, claimed {least}")
    return wrong


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the models and their sides."""
    parser.set_defaults(repeats=7)  # rounds
    names = [*MODELS, *LARGE]
    parser.add_argument("--names", nargs="+", choices=names, default=[*MODELS])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--trees", nargs="+", default=["."], help="checkouts")
    parser.add_argument("--steps", type=int, default=10, help="of each round")


# This process leaves the device, and its memory, to the processes of the sides.
about = dict
