"""`sj.store`, its cache, tables in a model, and `sj.HashIndex`: three cases.

    rows     pull and push of a `KVStore`, and what NumPy takes for the memory traffic
             alone: `np.take`, and for a push fancy assignment of weights and state
    steps    a small network on bags, trained with its table whole on the device; from
             a store, pulled and pushed, one after the other or prefetched; in a
             `CachedTable`; and in a file, as `store[name]`. The losses must agree
    index    `HashIndex`: time of find and insert beside the merging plans of as many
             row ids, and the loss of a click model whose vocabulary drifts, with an
             index of a quarter of the rows

Sides take turns, on the same ids, other ones in every run.

    python -m benchmarks store
    python -m benchmarks store --cases index --check
    python -m benchmarks store --cases steps --rows 20000000
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import sparsejax as sj
from benchmarks import timing
from sparsejax._rows import merge


OPTIMIZERS = {
    "sgd": optax.sgd(0.01),
    "rowwise_adagrad": sj.optim.rowwise_adagrad(0.01),
    "adagrad": optax.adagrad(0.01),
    "adam": optax.adam(0.01),
}
BAG, STEPS, HIDDEN, CHUNK = 16, 10, 256, 1 << 20
MOST = 1.01  # the loss with a quarter of the rows, over the loss with all
AT_MOST = 2.0  # the time of find and insert, over the time of the plan by sorting
SKEWS = ("uniform", "zipf")


def make_store(
    rows: int, dim: int, tx: optax.GradientTransformation, path: Any = None
) -> sj.store.KVStore:
    """A store of one table. All rows are written, as after a long training.

    Else pages are new to the process when a row is read for the first time, which takes
    longer than all else.
    """
    store = sj.store.KVStore()
    store.init("table", (rows, dim), tx, path=path)
    for start in range(0, rows, CHUNK):
        ids = np.arange(start, min(start + CHUNK, rows), dtype=np.int32)
        nothing = np.zeros((ids.size, dim), np.float32)
        store.push("table", sj.SelectedRows(ids, nothing, rows))
    return store


# ------------------------------------------------------------------ rows


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for pull, and one for push with each optimizer."""
    rng, shape = np.random.default_rng(1), (args.rows, args.dim)

    def inputs(zipf):
        ids = timing.make_ids(args.ids, args.rows, zipf, rng)
        distinct = np.unique(ids)
        slots = np.full(args.ids, args.rows, np.int32)
        slots[: distinct.size] = distinct
        values = jnp.asarray(rng.standard_normal((args.ids, args.dim), np.float32))
        return ids, distinct, sj.SelectedRows(slots, values, args.rows)

    def time_sides(operation, skew, ours, numpy):
        sides = {
            "ours": lambda state, given: (state, ours(*given)),
            "numpy": lambda state, given: (state, numpy(*given)),
        }
        draw = functools.partial(inputs, skew == "zipf")
        record = timing.compare(args, sides, (), draw)
        return {"case": "rows", "operation": operation, "ids": skew} | record

    for number, name in enumerate(args.optimizers):
        tx = OPTIMIZERS[name]
        store = make_store(*shape, tx)
        state = jax.eval_shape(tx.init, jax.ShapeDtypeStruct(shape, "f"))
        held = [x.shape for x in jax.tree.leaves(state) if args.rows in x.shape]
        columns = [np.ones(x, np.float32) for x in (shape, *held)]

        def pull(ids, rows, grad, store=store):
            return store.pull("table", ids, capacity=args.ids)

        def take(ids, rows, grad, columns=columns):
            return np.take(columns[0], ids, axis=0)

        def push(ids, rows, grad, store=store):
            store.push("table", grad)

        def assign(ids, rows, grad, columns=columns):
            for column in columns:
                column[rows] = np.take(column, rows, axis=0)

        for skew in SKEWS:
            yield time_sides(f"push, {name}", skew, push, assign)
            if number == 0:
                yield time_sides("pull", skew, pull, take)


# ------------------------------------------------------------------ steps

# Each way to train is `f(batches) -> losses`, with a table, parameters and state of its
# own.

TABLE_TX, LAYERS_TX = sj.optim.adagrad(0.01), optax.adam(1e-3)
BOTH_TX = optax.partition(
    {"table": TABLE_TX, "layers": LAYERS_TX}, {"table": "table", "layers": "layers"}
)


def make_layers(dim: int) -> list[jax.Array]:
    """The dense weights of the network."""
    rng, sizes = np.random.default_rng(2), (dim, HIDDEN, HIDDEN, HIDDEN, 1)
    draw = lambda n, m: rng.standard_normal((n, m), np.float32) / np.float32(n**0.5)
    return [jnp.asarray(draw(*shape)) for shape in zip(sizes, sizes[1:])]


def network_loss(params: Any, ids: jax.Array) -> jax.Array:
    """The loss of a network on the sum of a bag."""
    x = sj.embedding_bag(params["table"], ids)
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer)
    return jnp.mean((x - jnp.float32(1)) ** 2)


def train_whole(args: argparse.Namespace) -> Callable:
    """Trains with the table on the device."""
    tx, tables = sj.optim.lazy(BOTH_TX), {"table": True, "layers": None}
    gradient = sj.value_and_grad(network_loss, tables=tables)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        loss, grads = gradient(params, ids)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    table = jnp.zeros((args.rows, args.dim), jnp.float32)
    params = {"table": table, "layers": make_layers(args.dim)}
    state = jax.jit(tx.init)(params)

    def run(batches):
        nonlocal params, state
        losses = []
        for ids in batches:
            params, state, loss = step(params, state, ids)
            losses.append(loss)
        return losses

    return run


def train_pulled(args: argparse.Namespace, is_prefetched: bool) -> Callable:
    """Trains on rows that are pulled for each batch, and pushes their gradients."""
    store = make_store(args.rows, args.dim, TABLE_TX)
    layers, capacity = make_layers(args.dim), args.ids // 4
    state = LAYERS_TX.init(layers)

    @jax.jit
    def step(table, layers, state, ids):
        params = {"table": table, "layers": layers}
        loss, grads = sj.value_and_grad(network_loss)(params, ids)
        updates, state = LAYERS_TX.update(grads["layers"], state, layers)
        return grads["table"], optax.apply_updates(layers, updates), state, loss

    def run(batches):
        nonlocal layers, state
        losses = []
        if is_prefetched:
            pairs = store.prefetch(batches, lambda ids: ids, capacity=capacity)
        else:
            pull = functools.partial(store.pull, "table", capacity=capacity)
            pairs = ((ids, pull(ids)) for ids in batches)
        for ids, table in pairs:
            grad, layers, state, loss = step(table, layers, state, ids)
            store.push("table", grad)
            losses.append(loss)
        return losses

    return run


def train_tree(args: argparse.Namespace, path: Any = None) -> Callable:
    """Trains a tree that holds a table in a file, or a twentieth of its rows."""
    store = make_store(args.rows, args.dim, TABLE_TX, path)
    table, tx = store["table"], LAYERS_TX
    if path is None:
        height = max(args.rows // 20, args.ids // 4)
        table, tx = sj.store.CachedTable(store, "table", height).table, BOTH_TX
    params = {"table": table, "layers": make_layers(args.dim)}
    step, state = store.train_step(network_loss, tx), tx.init(params)

    def run(batches):
        nonlocal params, state
        losses = []
        for ids, requested in step.prefetch(params, batches):
            params, state, loss = step(params, state, ids, requested)
            losses.append(loss)
        return losses

    return run


def steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each kind of ids; all ways have the same losses at first."""
    rng = np.random.default_rng(3)

    def batches(zipf):
        count, shape = args.ids // 4, (-1, BAG)
        draw = lambda: timing.make_ids(count, args.rows, zipf, rng).reshape(shape)
        return [draw() for _ in range(STEPS)]

    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "whole": train_whole(args),
            "pulled": train_pulled(args, is_prefetched=False),
            "prefetched": train_pulled(args, is_prefetched=True),
            "cached": train_tree(args),
            "stored": train_tree(args, pathlib.Path(folder, "stored")),
        }
        first = batches(True)
        losses = {name: way(first) for name, way in ways.items()}
        for name, own in losses.items():
            np.testing.assert_allclose(own, losses["whole"], 1e-5, 1e-5, err_msg=name)
        sides = {
            name: lambda state, given, way=way: (state, way(given))
            for name, way in ways.items()
        }
        for skew in SKEWS:
            draw = functools.partial(batches, skew == "zipf")
            record = timing.compare(args, sides, (), draw, steps=STEPS)
            yield {"case": "steps", "ids": skew} | record


# ------------------------------------------------------------------ index


def index(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Two records: the time of find and insert, and the loss as a vocabulary drifts."""
    yield index_times(args)
    yield drift(args)


def spread_out(numbers: np.ndarray) -> jax.Array:
    """Distinct keys for distinct numbers, over all 32 bits."""
    keys = numbers.astype(np.uint64) * 0x9E3779B1 & 0xFFFFFFFF
    return jnp.asarray(keys.astype(np.uint32))


def index_times(args: argparse.Namespace) -> dict[str, Any]:
    """Keys into a full index: all of them known, 2 % new, all new."""
    rng, n, v = np.random.default_rng(0), args.ids, args.rows

    def inputs():
        known, new = rng.integers(0, v // 2, n), rng.integers(v, 1 << 32, n)
        mixed = np.where(rng.random(n) < 0.02, new, known)
        keys = {"known": known, "mixed": mixed, "new": new}
        rows = jnp.asarray(rng.integers(0, v, n, np.int32))
        return {name: spread_out(x) for name, x in keys.items()} | {"rows": rows}

    # An index has a compiled program of its own only if `max_evictions` differs.
    insert = jax.jit(sj.HashIndex.insert, donate_argnums=0)
    full, numbers = sj.HashIndex.create(v, max_evictions=4096), itertools.count(1)
    for start in range(0, v, n):
        full, _, _ = insert(full, spread_out(np.arange(start, start + n) % v), 0)
    copy = lambda: jax.tree.map(jnp.copy, full)  # each is donated
    held = {"known": copy(), "mixed": copy()}
    held["new"] = dataclasses.replace(copy(), max_evictions=None)
    find = jax.jit(sj.HashIndex.find)
    plan = jax.jit(lambda rows: merge.merge_plan(rows, v, n))
    hashed = jax.jit(lambda rows: merge.first_slots(rows, v))

    def insert_into(name, state, given):
        held[name], *found = insert(held.pop(name), given[name], next(numbers))
        return state, found

    sides = {
        "plan": lambda state, x: (state, plan(x["rows"])),
        "hashed plan": lambda state, x: (state, hashed(x["rows"])),
        "find": lambda state, x: (state, find(full, x["known"])),
        "insert known": functools.partial(insert_into, "known"),
        "insert 2 % new": functools.partial(insert_into, "mixed"),
        "insert new": functools.partial(insert_into, "new"),
    }
    record = timing.compare(args, sides, (), inputs)
    return {"case": "index", "keys": n} | record


def drift(args: argparse.Namespace) -> dict[str, Any]:
    """The loss of a logistic regression on keys, as the popular ones change.

    After each step 100 new keys are the most popular ones. The popularity of a key
    falls by Zipf's law with its age, and 2 % are of any age. The model has a row for
    each key, an index of a quarter of the rows, or keys hashed to as many rows. The
    loss is of examples before they are trained on.
    """
    rng, shape = np.random.default_rng(0), (16 * args.repeats, 1_024, 8)
    popular = np.floor(2 ** (13 * rng.random(shape))).astype(np.int64)
    is_old = rng.random(shape) < 0.02
    ages = np.where(is_old, rng.integers(0, 1 << 15, shape), popular)
    keys = 100 * np.arange(shape[0])[:, None, None] + (1 << 15) - ages
    weights = rng.normal(0, 0.7, keys.max() + 1)
    clicked = rng.random(shape[:2]) < 1 / (1 + np.exp(-weights[keys].sum(axis=2)))
    _, keys = np.unique(keys, return_inverse=True)
    keys, labels = keys.reshape(shape).astype(np.int32), clicked.astype(np.float32)
    distinct = int(keys.max()) + 1
    tx = sj.optim.lazy(sj.optim.adagrad(0.3))

    def loss_fn(params, rows, labels):
        weights = sj.lookup(params["table"], rows, mode="zero")[..., 0]
        logits = weights.sum(axis=1) + params["bias"]
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))

    gradient = sj.value_and_grad(loss_fn, tables={"table": True, "bias": None})

    def train(height, how):
        params = {"table": jnp.zeros((height, 1)), "bias": jnp.zeros(())}
        index = sj.HashIndex.create(height) if how == "index" else None

        def body(carry, given):
            params, state, index = carry
            step, keys, labels = given
            rows = keys
            if how == "index":
                index, rows, evicted = index.insert(keys, step)
                resets = {"table": evicted}
                params, state = sj.optim.reset_rows(tx, state, params, resets)
            elif how == "hashed":
                mixed = keys.astype(jnp.uint32) * np.uint32(0x9E3779B1)
                rows = lax.rem(mixed >> 8, np.uint32(height)).astype(jnp.int32)
            loss, grads = gradient(params, rows, labels)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state, index), loss

        given = jnp.arange(len(keys), dtype=jnp.uint32), keys, labels
        carry = params, tx.init(params), index
        _, losses = jax.jit(functools.partial(lax.scan, body))(carry, given)
        return float(np.mean(np.asarray(losses)[len(losses) // 2 :]))

    few = distinct // 4
    loss = {
        "all rows": train(distinct, "dict"),
        "lru": train(few, "index"),
        "hashed": train(few, "hashed"),
    }
    ratio = {name: x / loss["all rows"] for name, x in loss.items()}
    return {"case": "drift", "keys": distinct, "loss": loss, "ratio": ratio}


# ------------------------------------------------------------------ command line

CASES = {"rows": rows, "steps": steps, "index": index}


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The records of all cases."""
    return itertools.chain.from_iterable(CASES[name](args) for name in args.cases)


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold."""
    wrong = []
    for r in records:
        if r["case"] == "drift" and r["ratio"]["lru"] > MOST:
            wrong.append(f"a quarter of the rows: {r['ratio']['lru']:.4f} x the loss")
        if r["case"] == "index":
            for name in ("find", "insert known", "insert 2 % new"):
                ratio = min(x[name] / x["plan"] for x in (r["ms"], r["best_ms"]))
                if ratio > AT_MOST:
                    wrong.append(f"{name}: {ratio:.2f} times the plan by sorting")
    return wrong


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    names = [*OPTIMIZERS]
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--dim", type=int, default=32, help="columns of the table")
    parser.add_argument("--ids", type=int, default=65_536, help="of a pull")
    parser.add_argument("--optimizers", nargs="+", default=names, choices=names)
