"""`sj.store.KVStore["name"]`: models whose tables are in a file, beside two other ways.

A two-tower model of flax nnx and a DLRM of equinox are trained on the same Zipf ids:

- `stored`: their tables are in a file, as `store["items"]` in the model;
- `block`: the same as a `sj.nn.SparseBlock`, whose ids are listed by hand;
- `memory`: their tables are arrays on the device.

The losses of all steps must agree: |a - b| <= 1e-5 max(1, |b|). The ways take turns,
some steps each, so that they share the machine's hours. The first turn is not timed.

    python -m benchmarks stored
    python -m benchmarks stored --models dlrm --rows 1000000

With `--against CHECKOUT`, the `block` of another commit is trained in a process of its
own, and `stored` and `block` of this one too, in turns. It shows the median of the
ratios of neighbouring turns, of time and of CPU time, which says something on a machine
that does other work too.

    git worktree add /tmp/other c35809f
    python -m benchmarks stored --against /tmp/other

With 20,000,000 rows of 8 numbers, `memory` takes 1.3 GB for each model, and the files
take as much as the rows that were read. It needs flax and equinox.
"""

import argparse
import gc
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import sparsejax as sj
from benchmarks import timing
from benchmarks.store import make_ids


BOUND = 1e-5
FEATURES = 13  # numbers of an example of the DLRM
TABLE_RATE, RATE = 0.05, 1e-3


# ------------------------------------------------------------------ two towers, nnx


class Tower(nnx.Module):
    """A network on the embedding of one id."""

    def __init__(self, rows: int, dim: int, rngs: nnx.Rngs):
        self.table = nnx.Embed(rows, dim, rngs=rngs)
        self.hidden = nnx.Linear(dim, 64, rngs=rngs)
        self.out = nnx.Linear(64, 32, rngs=rngs)

    def top(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.top(self.table(ids))


class TwoTowers(nnx.Module):
    """The score of a user and an item."""

    def __init__(self, rows: dict[str, int], dim: int, rngs: nnx.Rngs):
        self.users = Tower(rows["users"], dim, rngs)
        self.items = Tower(rows["items"], dim, rngs)

    def of_rows(self, rows: dict[str, jax.Array]) -> jax.Array:
        both = self.users.top(rows["users"]) * self.items.top(rows["items"])
        return jnp.sum(both, axis=-1)

    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        both = self.users(batch["users"]) * self.items(batch["items"])
        return jnp.sum(both, axis=-1)


def make_towers(tables: dict[str, Any], dim: int) -> tuple[Any, Callable, Callable]:
    """Parameters with these tables, `apply(params, batch)`, and of rows."""
    few = dict.fromkeys(tables, 1)  # the tables take their place below
    model = TwoTowers(few, dim, nnx.Rngs(0))
    for name, table in tables.items():
        module = getattr(model, name).table
        module.embedding = nnx.Param(table)
        module.num_embeddings = table.shape[0]
    graph, params = nnx.split(model)
    apply = lambda params, batch: nnx.merge(graph, params)(batch)
    of_rows = lambda params, rows, batch: nnx.merge(graph, params).of_rows(rows)
    return params, apply, of_rows


# ------------------------------------------------------------------ DLRM, equinox


class DLRM(eqx.Module):
    """Naumov et al., 2019: products of the embeddings of an example and its numbers."""

    tables: dict[str, eqx.nn.Embedding]
    bottom: eqx.nn.MLP
    top: eqx.nn.MLP

    def __init__(self, names: Sequence[str], dim: int, key: jax.Array):
        first, second, *keys = jax.random.split(key, 2 + len(names))
        self.tables = {
            name: eqx.nn.Embedding(1, dim, key=k) for name, k in zip(names, keys)
        }
        self.bottom = eqx.nn.MLP(FEATURES, dim, 64, 1, key=first)
        pairs = (len(names) + 1) * len(names) // 2
        self.top = eqx.nn.MLP(dim + pairs, "scalar", 64, 1, key=second)

    def of_rows(self, rows: dict[str, jax.Array], features: jax.Array) -> jax.Array:
        x = self.bottom(features)
        all_rows = jnp.stack([x, *(rows[name] for name in self.tables)])
        products = (all_rows @ all_rows.T)[jnp.triu_indices(len(all_rows), 1)]
        return self.top(jnp.concatenate([x, products]))

    def __call__(self, example: dict[str, jax.Array]) -> jax.Array:
        rows = {name: table(example[name]) for name, table in self.tables.items()}
        return self.of_rows(rows, example["features"])


def make_dlrm(tables: dict[str, Any], dim: int) -> tuple[Any, Callable, Callable]:
    """Parameters with these tables, `apply(params, batch)`, and of rows."""
    model = DLRM(tuple(tables), dim, jax.random.key(0))
    weights = lambda m: [table.weight for table in m.tables.values()]
    model = eqx.tree_at(weights, model, list(tables.values()))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    whole = lambda params: eqx.combine(params, static)
    apply = lambda params, batch: jax.vmap(whole(params))(batch)
    of_rows = lambda params, rows, batch: jax.vmap(whole(params).of_rows)(
        rows, batch["features"]
    )
    return params, apply, of_rows


MODELS = {
    "two_towers": (make_towers, {"users": 0.05, "items": 1.0}),
    "dlrm": (make_dlrm, {"items": 1.0, "shops": 0.01, "users": 0.1, "words": 0.02}),
}


# ------------------------------------------------------------------ data, tables


def make_batches(
    heights: dict[str, int], size: int, seed: int
) -> Iterator[dict[str, np.ndarray]]:
    """Batches without an end; the labels depend on the ids."""
    rng = np.random.default_rng(seed)
    while True:
        ids = {name: make_ids(size, v, True, rng) for name, v in heights.items()}
        total = np.sum([x.astype(np.int64) for x in ids.values()], axis=0)
        label = total % 3 == 0
        features = rng.standard_normal((size, FEATURES)).astype(np.float32)
        yield {**ids, "features": features, "label": label.astype(np.float32)}


def open_store(folder: str, heights: dict[str, int], dim: int) -> sj.store.KVStore:
    """A store of tables in files, whose rows start by themselves."""
    store = sj.store.KVStore()
    for k, (name, height) in enumerate(heights.items()):
        store.init(
            name,
            (height, dim),
            sj.optim.adagrad(TABLE_RATE),
            path=pathlib.Path(folder, f"{name}.table"),
            initializer=jax.nn.initializers.normal(0.1),
            key=k,
        )
    return store


def cross_entropy(logits: jax.Array, batch: Any) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()


# ------------------------------------------------------------------ three ways


def train_stored(make: Callable, store: sj.store.KVStore, dim: int) -> Callable:
    """`f(batches) -> losses`, with the tables in the model as `store[name]`."""
    tables = {name: store[name] for name in store.names()}
    params, apply, _ = make(tables, dim)
    loss = lambda params, batch: cross_entropy(apply(params, batch), batch)
    tx = optax.adam(RATE)
    step = store.train_step(loss, tx)
    state = tx.init(params)

    def run(batches):
        nonlocal params, state
        losses = []
        for batch, rows in step.prefetch(params, batches):
            params, state, value = step(params, state, batch, rows)
            losses.append(value)
        return losses

    return run


def train_block(make: Callable, store: sj.store.KVStore, dim: int) -> Callable:
    """The same with a SparseBlock."""
    names = store.names()
    few = {name: jnp.zeros((1, dim)) for name in names}
    params, _, of_rows = make(few, dim)

    class Block(sj.nn.SparseBlock):
        def row_ids(self, inputs):
            return {name: inputs[name] for name in names}

        def sparse_forward(self, tables, params, inputs):
            rows = {name: sj.lookup(tables[name], inputs[name]) for name in names}
            return of_rows(params, rows, inputs)

    trainer = sj.nn.Trainer(
        Block(), store, cross_entropy, optax.adam(RATE), params=params
    )

    def run(batches):
        found = trainer.store.prefetch(batches, trainer.row_ids, mode="drop")
        return [trainer.step(batch, rows) for batch, rows in found]

    return run


def train_in_memory(make: Callable, store: sj.store.KVStore, dim: int) -> Callable:
    """The same with the tables on the device."""
    tables = {name: jnp.asarray(store.pull_all(name)) for name in store.names()}
    heights = {table.shape[0] for table in tables.values()}
    params, apply, _ = make(tables, dim)
    loss = lambda params, batch: cross_entropy(apply(params, batch), batch)
    is_table = lambda x: x.shape[1:] == (dim,) and x.shape[0] in heights
    tx = sj.optim.lazy(
        optax.partition(
            {True: sj.optim.adagrad(TABLE_RATE), False: optax.adam(RATE)},
            lambda params: jax.tree.map(is_table, params),
        )
    )
    required = lambda path, leaf: is_table(leaf)

    def step(params, state, batch):
        value, grads = sj.value_and_grad(loss, tables=required)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    step = jax.jit(step, donate_argnums=(0, 1))
    state = jax.jit(tx.init)(params)

    def run(batches):
        nonlocal params, state
        losses = []
        for batch in batches:
            params, state, value = step(params, state, batch)
            losses.append(value)
        return losses

    return run


WAYS = {"stored": train_stored, "block": train_block, "memory": train_in_memory}


# ------------------------------------------------------------------ other commits


def train_in_turns(way: str, args: argparse.Namespace) -> None:
    """Trains some steps for each line of stdin, and prints how long they took."""
    name = args.models[0]
    heights = heights_of(name, args)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        store = open_store(folder, heights, args.dim)
        run = WAYS[way](MODELS[name][0], store, args.dim)
        batches = make_batches(heights, args.batch, seed=1)
        for _ in sys.stdin:
            here = list(itertools.islice(batches, args.turn))
            start, cpu = time.perf_counter(), time.process_time()
            losses = jax.block_until_ready(run(here))
            taken = time.perf_counter() - start, time.process_time() - cpu
            ms = [1e3 * seconds / args.turn for seconds in taken]
            print(json.dumps([*ms, float(losses[-1])]), flush=True)
        store.close()


def compare(name: str, args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Prints times beside the block of another checkout."""
    here = str(pathlib.Path(__file__).resolve().parents[1])
    kinds = {
        "block there": (os.path.abspath(args.against), "block"),
        "stored": (here, "stored"),
        "block": (here, "block"),
    }
    workers = {}
    for kind, (path, way) in kinds.items():
        # This file, with the package of that checkout. -P: not with the files here.
        command = [sys.executable, "-P", __file__, *argv, "--models", name]
        workers[kind] = subprocess.Popen(
            [*command, "--way", way],
            cwd=path,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for turn in range(args.steps // args.turn):
        for kind in list(kinds) if turn % 2 else list(kinds)[::-1]:
            worker: Any = workers[kind]
            print("go", file=worker.stdin, flush=True)
            found[kind].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        worker.communicate()
    for kind, turns in found.items():
        ratios = []
        for column in (0, 1):
            pairs = zip(turns[1:], found["block there"][1:])  # the first one compiles
            ratios.append(statistics.median(a[column] / b[column] for a, b in pairs))
        ms = [statistics.median(x) for x in list(zip(*turns[1:]))[:2]]
        wall, cpu = (f"{x:8.2f} ms" for x in ms)
        print(
            f"{name:12}{kind:13}{wall}, {ratios[0]:.2f} of block there; CPU {cpu}, "
            f"{ratios[1]:.2f}; loss {turns[-1][2]:.6f}",
            flush=True,
        )


def heights_of(name: str, args: argparse.Namespace) -> dict[str, int]:
    """The number of rows of each table of a model."""
    shares = MODELS[name][1]
    return {t: max(8, int(args.rows * share)) for t, share in shares.items()}


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one model in all ways."""
    make, heights = MODELS[name][0], heights_of(name, args)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        stores = {}
        for way in WAYS:
            own = pathlib.Path(folder, way)
            own.mkdir()
            stores[way] = open_store(str(own), heights, args.dim)
        runs = {w: f(make, stores[w], args.dim) for w, f in WAYS.items()}
        # Each way has its own arrays, since the steps donate them.
        batches = make_batches(heights, args.batch, seed=1)
        losses: dict[str, list[float]] = {way: [] for way in WAYS}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(args.steps // args.turn):
            here = list(itertools.islice(batches, args.turn))
            order = list(runs) if turn % 2 else list(runs)[::-1]
            for way in order:
                start = time.perf_counter()
                found = jax.block_until_ready(runs[way](here))
                if turn:
                    times[way].append((time.perf_counter() - start) / args.turn)
                losses[way] += [float(x) for x in found]
        touched = {
            table: stats.touched_rows
            for table, stats in stores["stored"].stats().items()
        }
        for store in stores.values():
            store.close()
    del runs, stores
    gc.collect()
    ms = {way: timing.median_ms(t) for way, t in times.items()}
    gap = {
        way: max(
            abs(a - b) / max(1, abs(b)) for a, b in zip(losses[way], losses["memory"])
        )
        for way in WAYS
        if way != "memory"
    }
    return {
        "model": name,
        "rows": heights,
        "touched": touched,
        "steps": len(losses["memory"]),
        "loss": (losses["memory"][0], losses["memory"][-1]),
        "gap": gap,
        "ms": ms,
        "to_block": ms["stored"] / ms["block"],
        "to_memory": ms["stored"] / ms["memory"],
        "spread": timing.spread(times["stored"]),
    }


def show(record: dict[str, Any]) -> None:
    """One line of the table."""
    ms, gap = record["ms"], record["gap"]["stored"]
    first, last = record["loss"]
    print(
        f"{record['model']:12}{ms['stored']:9.2f}{ms['block']:9.2f}{ms['memory']:9.2f}"
        f"{record['to_block']:8.2f}{record['to_memory']:8.2f}   {gap:9.1e}  "
        f"{first:.4f} -> {last:.4f} in {record['steps']} steps",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks stored",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--models", nargs="+", default=tuple(MODELS), choices=MODELS)
    parser.add_argument("--rows", type=int, default=20_000_000, help="largest table")
    parser.add_argument("--dim", type=int, default=8, help="columns of the tables")
    parser.add_argument("--batch", type=int, default=4096, help="examples of a batch")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turn", type=int, default=10, help="steps of one turn")
    parser.add_argument("--folder", help="of the files; by default a temporary one")
    parser.add_argument("--json", help="appends a line for each model to this file")
    parser.add_argument("--against", help="a checkout of another commit")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.way:
        train_in_turns(args.way, args)
        return 0
    about = timing.machine()
    print(" ".join(f"{k}={v}" for k, v in about.items()))
    if args.against:
        for name in args.models:
            compare(name, args, sys.argv[1:] if argv is None else argv)
        return 0
    print("              stored    block   memory  /block /memory   largest gap  loss")
    records = timing.collect(
        (measure(name, args) for name in args.models), show, args.json, about
    )
    wrong = [
        f"{record['model']}: the losses of {way} and of memory differ by {gap:.1e}"
        for record in records
        for way, gap in record["gap"].items()
        if not gap <= BOUND
    ]
    return timing.report(wrong)


if __name__ == "__main__":
    sys.exit(main())
