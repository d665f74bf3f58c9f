"""`sj.store.CachedTable`: hit rate, bytes moved and step time, beside two other ways.

One model is trained on the same Zipf ids with its table whole on the device, with the
rows of each batch pulled by `KVStore.prefetch`, and with a share of the rows cached on
the device. All rows of the stores are written before, and each way first
takes steps that are not timed, so that the cache is full. The losses of the caches have
to be those of the whole table, bit for bit, if that is one of the ways. CPU time is
that of all threads, the device's too.

    python -m benchmarks cache
    python -m benchmarks cache --rows 1000000 --json cache.jsonl

The whole table takes 8 bytes a number of the device, a store as much of the host; one
after the other.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparsejax as sj
from benchmarks import timing
from benchmarks.store import HIDDEN, make_ids


BAG, CHUNK = 16, 1 << 20
WAYS = ("whole", "prefetch", "cached")


# ------------------------------------------------------------------ the model


def make_layers(dim: int) -> list[jax.Array]:
    """A network on the sum of a bag."""
    rng = np.random.default_rng(2)
    sizes = dim, HIDDEN, HIDDEN, HIDDEN, 1
    return [
        jnp.asarray(rng.standard_normal(shape, np.float32))
        / np.float32(shape[0] ** 0.5)
        for shape in zip(sizes, sizes[1:])
    ]


def make_loss(layers: Sequence[jax.Array]) -> Callable:
    def loss(table, ids):
        x = sj.embedding_bag(table, ids)
        for layer in layers:
            x = jnp.tanh(x @ layer)
        return jnp.mean((x - jnp.float32(1)) ** 2)

    return loss


# ------------------------------------------------------------------ ways to train

# Each is a generator that takes a step whenever it is asked, and yields its loss.


def whole(batches: Any, args: argparse.Namespace) -> Iterator[jax.Array]:
    """The table on the device."""
    train, tx = _train_step(args)
    table = jnp.zeros((args.rows, args.dim), jnp.float32)
    state = tx.init(table)
    for ids in batches:
        table, state, loss = train(table, state, ids)
        yield loss


def pulled(batches: Any, args: argparse.Namespace) -> Iterator[jax.Array]:
    """The rows of each batch from a store, trained on the host."""
    store = _make_store(args)
    loss = make_loss(make_layers(args.dim))
    step = jax.jit(sj.value_and_grad(loss))
    for ids, rows in store.prefetch(batches, lambda ids: ids, capacity=args.ids):
        value, grad = step(rows, ids)
        store.push("table", grad)
        yield value


def cached(
    batches: Any, args: argparse.Namespace, found: dict[str, Any]
) -> Iterator[jax.Array]:
    """A share of the rows on the device; `found["stats"]` tells how it goes."""
    store, tx = _make_store(args), sj.optim.adagrad(0.01)
    cache = sj.store.CachedTable(store, "table", int(args.rows * args.share))
    found["stats"] = cache.stats
    table, state = cache.table, tx.init(cache.table)
    step = store.train_step(make_loss(make_layers(args.dim)), tx)
    for ids, rows in step.prefetch(table, batches):
        table, state, loss = step(table, state, ids, rows)
        yield loss
    cache.flush(table, state)


def _train_step(args: argparse.Namespace) -> Any:
    tx = sj.optim.adagrad(0.01)
    gradient = sj.value_and_grad(make_loss(make_layers(args.dim)), tables=True)

    def step(table, state, ids):
        loss, grad = gradient(table, ids)
        update, state = tx.update(grad, state, table)
        return table + update, state, loss

    return jax.jit(step, donate_argnums=(0, 1)), tx


def _make_store(args: argparse.Namespace) -> sj.store.KVStore:
    store = sj.store.KVStore()
    store.init("table", (args.rows, args.dim), sj.optim.adagrad(0.01))
    # As after a long training, or a load: else pages are new to the process whenever a
    # row is read for the first time, which takes longer than all else.
    for start in range(0, args.rows, CHUNK):
        rows = np.arange(start, min(start + CHUNK, args.rows), dtype=np.int32)
        nothing = np.zeros((rows.size, args.dim), np.float32)
        store.push("table", sj.SelectedRows(rows, nothing, args.rows))
    return store


# ------------------------------------------------------------------ measuring


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each way."""
    expected = None
    for name in args.ways:
        rng = np.random.default_rng(3)
        batches = (
            make_ids(args.ids, args.rows, True, rng).reshape(-1, BAG)
            for _ in range(args.warm + args.steps)
        )
        found: dict[str, Any] = {}
        if name == "whole":
            steps = whole(batches, args)
        elif name == "prefetch":
            steps = pulled(batches, args)
        else:
            steps = cached(batches, args, found)
        losses = [next(steps) for _ in range(args.warm)]
        jax.block_until_ready(losses)
        before = found["stats"]() if found else None
        began, cpu = time.perf_counter(), time.process_time()
        losses += [next(steps) for _ in range(args.steps)]
        jax.block_until_ready(losses)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        after = found["stats"]() if found else None
        assert next(steps, None) is None
        losses = np.array(losses)
        record = {"way": name, "ms": seconds / args.steps * 1e3}
        record["cpu_ms"] = cpu / args.steps * 1e3
        if name == "whole":
            expected = losses
        elif before is not None and after is not None:
            if expected is not None:
                np.testing.assert_array_equal(losses, expected)
            hits, misses = after.hits - before.hits, after.misses - before.misses
            record["hit_rate"] = hits / (hits + misses)
            record["distinct"] = (hits + misses) / args.steps
            for side in ("bytes_up", "bytes_back"):
                moved = getattr(after, side) - getattr(before, side)
                record[side] = moved / args.steps
        yield record
        del steps, found
        gc.collect()


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks cache",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--rows", type=int, default=20_000_000, help="of the table")
    parser.add_argument("--dim", type=int, default=32, help="columns of the table")
    parser.add_argument("--ids", type=int, default=16_384, help="of a batch")
    parser.add_argument("--share", type=float, default=0.05, help="of rows in slots")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--warm", type=int, default=300, help="steps before the clock")
    parser.add_argument("--steps", type=int, default=100, help="timed steps")
    parser.add_argument("--json", help="appends a line for each way to this file")
    args = parser.parse_args(argv)
    print(" ".join(f"{k}={v}" for k, v in timing.machine().items()))
    slots = int(args.rows * args.share)
    print(
        f"table [{args.rows}, {args.dim}], {slots} slots, {args.ids} Zipf ids, Adagrad"
    )
    print("              ms/step CPU ms/step  hit rate    MB up  MB back")
    for record in measure(args):
        line = f"{record['way']:10}{record['ms']:11.2f}{record['cpu_ms']:12.2f}"
        if "hit_rate" in record:
            up, back = record["bytes_up"] / 1e6, record["bytes_back"] / 1e6
            line += f"{record['hit_rate']:10.1%}{up:9.2f}{back:9.2f}"
        print(line, flush=True)
        if args.json:
            timing.append_json_line(args.json, record | timing.machine())
    return 0
