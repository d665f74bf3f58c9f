"""`sj.store`, its cache, tables in a model, and `sj.HashIndex`: five cases.

    rows     pull and push of a `KVStore`, and what NumPy takes for the memory traffic
             alone: `np.take`, and for a push fancy assignment of weights and state
    steps    pull, gradient of a small network, push: one after the other, prefetched
    cache    a table whole on the device, pulled by `prefetch`, and in a `CachedTable`
    stored   a two-tower model: tables in files as `store[name]`, in a `SparseBlock`,
             and in memory; the losses of all steps must agree
    index    `HashIndex`: time of find and insert beside the merging plans of as many
             row ids, and the loss of a click model whose vocabulary drifts, with an
             index of a quarter of the rows

Sides take turns, on the same ids, other ones in every run.

    python -m benchmarks store
    python -m benchmarks store --cases index --check
    python -m benchmarks store --cases cache --rows 20000000
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import pathlib
import tempfile
import time
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
    "sgd": lambda: optax.sgd(0.01),
    "rowwise_adagrad": lambda: sj.optim.rowwise_adagrad(0.01),
    "adagrad": lambda: optax.adagrad(0.01),
    "adam": lambda: optax.adam(0.01),
}
BAG, STEPS, HIDDEN, CHUNK = 16, 10, 256, 1 << 20
MOST = 1.01  # the loss with a quarter of the rows, over that with all
AT_MOST = 2.0  # the time of find and insert, over that of the plan by sorting
SKEWS = ("uniform", "zipf")


def make_store(
    rows: int, dim: int, tx: optax.GradientTransformation
) -> sj.store.KVStore:
    """A store of one table. All rows are written, as after a long training.

    Else pages are new to the process when a row is read for the first time, which takes
    longer than all else.
    """
    store = sj.store.KVStore()
    store.init("table", (rows, dim), tx)
    for start in range(0, rows, CHUNK):
        ids = np.arange(start, min(start + CHUNK, rows), dtype=np.int32)
        nothing = np.zeros((ids.size, dim), np.float32)
        store.push("table", sj.SelectedRows(ids, nothing, rows))
    return store


def make_loss(dim: int) -> Callable[[Any, Any], jax.Array]:
    """`(table, ids) -> loss` of a network on the sum of a bag."""
    rng = np.random.default_rng(2)
    sizes = dim, HIDDEN, HIDDEN, HIDDEN, 1
    draw = lambda shape: rng.standard_normal(shape, np.float32) / shape[0] ** 0.5
    layers = [jnp.asarray(draw(s), jnp.float32) for s in zip(sizes, sizes[1:])]

    def loss(table, ids):
        x = sj.embedding_bag(table, ids)
        for layer in layers:
            x = jnp.tanh(x @ layer)
        return jnp.mean((x - jnp.float32(1)) ** 2)

    return loss


def bags(args: argparse.Namespace, zipf: bool, rng: np.random.Generator) -> np.ndarray:
    """A batch of bags, a quarter as many ids as a pull."""
    return timing.make_ids(args.ids // 4, args.rows, zipf, rng).reshape(-1, BAG)


# ------------------------------------------------------------------ rows


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for pull, and one for push with each optimizer."""
    rng = np.random.default_rng(1)

    def inputs(zipf):
        ids = timing.make_ids(args.ids, args.rows, zipf, rng)
        distinct = np.unique(ids)
        slots = np.full(args.ids, args.rows, np.int32)
        slots[: distinct.size] = distinct
        values = jnp.asarray(rng.standard_normal((args.ids, args.dim), np.float32))
        grad = sj.SelectedRows(slots, values, args.rows)
        return {"ids": ids, "rows": distinct, "grad": jax.block_until_ready(grad)}

    for number, (optimizer, skew) in enumerate(
        itertools.product(args.optimizers, SKEWS)
    ):
        tx = OPTIMIZERS[optimizer]()
        store = make_store(args.rows, args.dim, tx)
        shapes = jax.eval_shape(
            tx.init, jax.ShapeDtypeStruct((args.rows, args.dim), "f")
        )
        held = [x.shape for x in jax.tree.leaves(shapes) if args.rows in x.shape]
        columns = [np.ones(x, np.float32) for x in ((args.rows, args.dim), *held)]

        def pull(state, given, store=store):
            return state, store.pull("table", given["ids"], capacity=args.ids)

        def take(state, given, columns=columns):
            return state, np.take(columns[0], given["ids"], axis=0)

        def push(state, given, store=store):
            store.push("table", given["grad"])
            return state, ()

        def assign(state, given, columns=columns):
            for column in columns:
                column[given["rows"]] = np.take(column, given["rows"], axis=0)
            return state, ()

        cases = {f"push, {optimizer}": {"ours": push, "numpy": assign}}
        if number < len(SKEWS):
            cases["pull"] = {"ours": pull, "numpy": take}
        draw = functools.partial(inputs, skew == "zipf")
        distinct = draw()["rows"].size
        for what, sides in cases.items():
            record = alternate(args, f"{what}, {skew}", sides, draw)
            rate = f"{distinct / record['ms']['ours'] * 1e3:,.0f} rows/s"
            yield record | {"case": "rows", "note": rate}


def alternate(
    args: argparse.Namespace,
    what: str,
    sides: dict[str, Callable],
    inputs: Callable[[], Any],
    steps: int = 1,
) -> dict[str, Any]:
    """A record of sides that take turns; ms of one of `steps`."""
    times, _ = timing.alternate(
        sides, (), inputs, repeats=args.repeats, seconds=args.seconds
    )
    ms = {name: timing.median_ms(t) / steps for name, t in times.items()}
    spread = {name: timing.spread(t) for name, t in times.items()}
    return {"what": what, "ms": ms, "spread": spread}


# ------------------------------------------------------------------ steps


def steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each kind of ids."""
    rng = np.random.default_rng(3)
    store = make_store(args.rows, args.dim, optax.adagrad(0.01))
    step = jax.jit(sj.value_and_grad(make_loss(args.dim)))

    def run(pulled):
        losses = []
        for ids, table in pulled:
            loss, grad = step(table, ids)
            store.push("table", grad)
            losses.append(loss)
        return (), losses

    pull = lambda ids: store.pull("table", ids, capacity=ids.size)
    sides = {
        "synchronous": lambda _, batches: run((ids, pull(ids)) for ids in batches),
        "prefetched": lambda _, batches: run(
            store.prefetch(batches, lambda ids: ids, capacity=args.ids // 4)
        ),
    }
    for skew in SKEWS:
        draw = functools.partial(bags, args, skew == "zipf", rng)
        inputs = lambda draw=draw: [draw() for _ in range(STEPS)]
        record = alternate(args, f"a step, {skew}", sides, inputs, STEPS)
        yield record | {"case": "steps", "note": ""}


# ------------------------------------------------------------------ cache

# Each way is a generator that takes a step when it is asked, and yields its loss.


def whole(batches: Any, args: argparse.Namespace, stats: list[Any]) -> Iterator[Any]:
    """The table on the device."""
    tx = sj.optim.adagrad(0.01)
    gradient = sj.value_and_grad(make_loss(args.dim), tables=True)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(table, state, ids):
        loss, grad = gradient(table, ids)
        update, state = tx.update(grad, state, table)
        return table + update, state, loss

    table = jnp.zeros((args.rows, args.dim), jnp.float32)
    state = tx.init(table)
    for ids in batches:
        table, state, loss = train(table, state, ids)
        yield loss


def pulled(batches: Any, args: argparse.Namespace, stats: list[Any]) -> Iterator[Any]:
    """The rows of each batch from a store, trained on the host."""
    store = make_store(args.rows, args.dim, sj.optim.adagrad(0.01))
    step = jax.jit(sj.value_and_grad(make_loss(args.dim)))
    for ids, table in store.prefetch(batches, lambda x: x, capacity=args.ids // 4):
        value, grad = step(table, ids)
        store.push("table", grad)
        yield value


def cached(batches: Any, args: argparse.Namespace, stats: list[Any]) -> Iterator[Any]:
    """A twentieth of the rows on the device; `stats` gets a function of its numbers."""
    tx = sj.optim.adagrad(0.01)
    store = make_store(args.rows, args.dim, tx)
    cache = sj.store.CachedTable(store, "table", max(args.rows // 20, args.ids))
    stats.append(cache.stats)
    table: Any = cache.table
    state = tx.init(table)
    step = store.train_step(make_loss(args.dim), tx)
    for ids, requested in step.prefetch(table, batches):
        table, state, loss = step(table, state, ids, requested)
        yield loss
    cache.flush(table, state)


def cache(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record: each way takes steps until the cache is full, then timed ones."""
    warm, timed, losses, ms, note = 10 * args.repeats, 4 * args.repeats, {}, {}, ""
    for name, way in {"whole": whole, "prefetched": pulled, "cached": cached}.items():
        rng, stats = np.random.default_rng(3), []
        batches = (bags(args, True, rng) for _ in range(warm + timed))
        found = way(batches, args, stats)
        first = jax.block_until_ready([next(found) for _ in range(warm)])
        before, began = [s() for s in stats], time.perf_counter()
        rest = jax.block_until_ready([next(found) for _ in range(timed)])
        ms[name] = (time.perf_counter() - began) / timed * 1e3
        for start, end in zip(before, [s() for s in stats]):
            hits, misses = end.hits - start.hits, end.misses - start.misses
            moved = end.bytes_up - start.bytes_up + end.bytes_back - start.bytes_back
            megabytes = moved / timed / 1e6
            note = f"{hits / (hits + misses):.1%} hits, {megabytes:.2f} MB a step"
        assert next(found, None) is None
        losses[name] = np.array(first + rest)
        del found, stats
        gc.collect()
    np.testing.assert_array_equal(losses["cached"], losses["whole"])
    yield {"case": "cache", "what": "a step, zipf", "ms": ms, "note": note}


# ------------------------------------------------------------------ stored

HEIGHTS, TABLE_RATE = {"users": 0.05, "items": 1.0}, 0.05


def tower_loss(params: Any, rows: dict[str, jax.Array], label: jax.Array) -> jax.Array:
    """The loss of the scores of users and items, of rows that were read."""
    tops = []
    for name in HEIGHTS:
        hidden = jnp.tanh(rows[name] @ params[name]["hidden"])
        tops.append(hidden @ params[name]["out"])
    logits = jnp.sum(tops[0] * tops[1], axis=-1)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, label))


def stored(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record: the three ways to train two towers."""
    heights = {name: max(8, int(args.rows * x)) for name, x in HEIGHTS.items()}
    rng, size = np.random.default_rng(1), args.ids // BAG
    draw = lambda *shape: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32)
    towers = {k: {"hidden": draw(args.dim, 64), "out": draw(64, 32)} for k in heights}

    def batch():
        ids = {k: timing.make_ids(size, v, True, rng) for k, v in heights.items()}
        label = (ids["users"].astype(np.int64) + ids["items"]) % 3 == 0
        return {**ids, "label": label.astype(np.float32)}

    with tempfile.TemporaryDirectory() as folder:
        stores = [sj.store.KVStore() for _ in range(3)]
        for n, store in enumerate(stores):
            for k, (name, height) in enumerate(heights.items()):
                store.init(
                    name,
                    (height, args.dim),
                    sj.optim.adagrad(TABLE_RATE),
                    path=pathlib.Path(folder, f"{name}-{n}.table"),
                    initializer=jax.nn.initializers.normal(0.1),
                    key=k,
                )
        ways = {
            "stored": train_stored(stores[0], towers),
            "block": train_block(stores[1], towers),
            "memory": train_in_memory(stores[2], towers),
        }
        sides = {
            name: lambda state, batches, way=way: (state, way(batches))
            for name, way in ways.items()
        }
        first = [batch() for _ in range(STEPS)]
        losses = {name: way(first) for name, way in ways.items()}
        for name, own in losses.items():
            np.testing.assert_allclose(own, losses["memory"], 1e-5, 1e-5, err_msg=name)

        # All ways train on the same batches, each in its turn.
        inputs = functools.partial(lambda given: given, first)
        record = alternate(args, "two towers, zipf", sides, inputs, STEPS)
        for store in stores:
            store.close()
    yield record | {"case": "stored", "note": f"{size} examples"}


def train_stored(store: sj.store.KVStore, towers: Any) -> Callable:
    """`f(batches) -> losses`, with the tables in the parameters as `store[name]`."""
    params: Any = {"tables": {name: store[name] for name in HEIGHTS}, "towers": towers}
    params["towers"] = jax.tree.map(jnp.copy, towers)  # each way donates its own

    def loss(params, batch):
        rows = {k: sj.lookup(params["tables"][k], batch[k]) for k in HEIGHTS}
        return tower_loss(params["towers"], rows, batch["label"])

    tx = optax.adam(1e-3)
    step, state = store.train_step(loss, tx), tx.init(params)

    def run(batches):
        nonlocal params, state
        losses = []
        for batch, requested in step.prefetch(params, batches):
            params, state, value = step(params, state, batch, requested)
            losses.append(value)
        return losses

    return run


def train_block(store: sj.store.KVStore, towers: Any) -> Callable:
    """The same with a SparseBlock, whose ids are listed by hand."""

    class Block(sj.nn.SparseBlock):
        def row_ids(self, inputs):
            return {name: inputs[name] for name in HEIGHTS}

        def sparse_forward(self, tables, params, inputs):
            rows = {name: sj.lookup(tables[name], inputs[name]) for name in HEIGHTS}
            return tower_loss(params, rows, inputs["label"])

    own = jax.tree.map(jnp.copy, towers)
    trainer = sj.nn.Trainer(
        Block(), store, lambda loss, _: loss, optax.adam(1e-3), params=own
    )
    return lambda batches: [trainer.step(batch) for batch in batches]


def train_in_memory(store: sj.store.KVStore, towers: Any) -> Callable:
    """The same with the tables on the device."""
    tables = {name: jnp.asarray(store.pull_all(name)) for name in HEIGHTS}
    params = {"tables": tables, "towers": jax.tree.map(jnp.copy, towers)}
    parts: Any = {"tables": sj.optim.adagrad(TABLE_RATE), "towers": optax.adam(1e-3)}
    tx = sj.optim.lazy(optax.partition(parts, {name: name for name in parts}))

    def loss(params, batch):
        rows = {k: sj.lookup(params["tables"][k], batch[k]) for k in HEIGHTS}
        return tower_loss(params["towers"], rows, batch["label"])

    required = {"tables": True, "towers": None}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        value, grads = sj.value_and_grad(loss, tables=required)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.jit(tx.init)(params)

    def run(batches):
        nonlocal params, state
        losses = []
        for batch in batches:
            params, state, value = step(params, state, batch)
            losses.append(value)
        return losses

    return run


# ------------------------------------------------------------------ index


def index(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Two records: the time of find and insert, and the loss as a vocabulary drifts."""
    yield index_times(args)
    yield drift(args)


def spread_out(numbers: np.ndarray) -> np.ndarray:
    """Distinct keys for distinct numbers, over all 32 bits."""
    return (numbers.astype(np.uint64) * 0x9E3779B1 & 0xFFFFFFFF).astype(np.uint32)


def index_times(args: argparse.Namespace) -> dict[str, Any]:
    """Keys into a full index: all of them known, 2 % new, all new."""
    rng, n, v = np.random.default_rng(0), args.ids, args.rows

    def inputs():
        known, new = rng.integers(0, v // 2, n), rng.integers(v, 1 << 32, n)
        mixed = np.where(rng.random(n) < 0.02, new, known)
        drawn = {"known": known, "mixed": mixed, "new": new}
        made = {name: spread_out(x) for name, x in drawn.items()}
        made["rows"] = rng.integers(0, v, n, np.int32)
        return jax.block_until_ready(jax.tree.map(jnp.asarray, made))

    full = sj.HashIndex.create(v, max_evictions=4096)
    insert = jax.jit(sj.HashIndex.insert, donate_argnums=0)
    for start in range(0, v, n):
        full, _, _ = insert(
            full, jnp.asarray(spread_out(np.arange(start, start + n) % v)), 0
        )
    state: dict[str, Any] = {"step": jnp.zeros((), jnp.uint32)}
    for name, most in (("known", 4096), ("mixed", 4096), ("new", None)):
        copy = jax.tree.map(jnp.copy, full)  # each is donated
        state[name] = dataclasses.replace(copy, max_evictions=most)

    def insert_into(which, state, given):
        step = state["step"] + 1
        new, found, evicted = state[which].insert(given[which], step)
        return state | {which: new, "step": step}, (found, evicted)

    only = lambda f: lambda state, given: (state, f(state, given))
    sides = {
        "plan": only(lambda _, x: merge.merge_plan(x["rows"], v, n)),
        "hashed plan": only(lambda _, x: merge.first_slots(x["rows"], v)),
        "find": only(lambda state, x: state["known"].find(x["known"])),
        "insert known": functools.partial(insert_into, "known"),
        "insert 2 % new": functools.partial(insert_into, "mixed"),
        "insert new": functools.partial(insert_into, "new"),
    }
    programs = {
        name: timing.compile_apart(jax.jit(f, donate_argnums=0), state, inputs()).run
        for name, f in sides.items()
    }
    times, state = timing.alternate(programs, state, inputs, repeats=args.repeats)
    return {
        "case": "index",
        "what": f"{n:,} keys",
        "ms": {name: timing.median_ms(t) for name, t in times.items()},
        "fastest_ms": {name: 1e3 * min(t) for name, t in times.items()},
        "note": "",
    }


def drift(args: argparse.Namespace) -> dict[str, Any]:
    """The loss of a logistic regression on keys of which the popular ones change.

    After each step 100 new keys are the most popular ones. The popularity of a key
    falls by Zipf's law with its age, and 2 % are of any age. The model has a row for
    each key, an index of a quarter of the rows, or keys hashed to as many rows; told is
    the loss on examples before they are trained on.
    """
    rng = np.random.default_rng(0)
    shape = (16 * args.repeats, 1_024, 8)
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

    def train(height, how, **options):
        params = {"table": jnp.zeros((height, 1)), "bias": jnp.zeros(())}
        index = sj.HashIndex.create(height, **options) if how == "index" else None

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

    loss = {
        "all rows": train(distinct, "dict"),
        "lru": train(distinct // 4, "index"),
        "lru, admitted at 2": train(distinct // 4, "index", admit_after=2),
        "lfu": train(distinct // 4, "index", policy="lfu"),
        "hashed": train(distinct // 4, "hashed"),
    }
    shown = ", ".join(f"{name} {x / loss['all rows']:.4f}" for name, x in loss.items())
    what = f"loss, {distinct:,} keys"
    return {"case": "index", "what": what, "ms": {}, "loss": loss, "note": shown}


# ------------------------------------------------------------------ command line

CASES = {"rows": rows, "steps": steps, "cache": cache, "stored": stored, "index": index}


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The records of all cases."""
    for name in args.cases:
        yield from CASES[name](args)


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold."""
    wrong = []
    for r in records:
        if loss := r.get("loss"):
            ratio = loss["lru"] / loss["all rows"]
            if ratio > MOST:
                wrong.append(f"a quarter of the rows has {ratio:.4f} times the loss")
        for name in ("find", "insert known", "insert 2 % new"):
            if name in r["ms"]:
                both = r["ms"], r["fastest_ms"]
                ratio = min(x[name] / x["plan"] for x in both)
                if ratio > AT_MOST:
                    wrong.append(f"{name}: {ratio:.2f} times the plan by sorting")
    return wrong


def line(r: dict[str, Any]) -> str:
    """One line of the table."""
    ms = "  ".join(f"{name} {x:.2f}" for name, x in r["ms"].items())
    return f"{r['case']:8}{r['what']:32}{ms}  {r['note']}"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    parser.add_argument("--cases", nargs="+", default=tuple(CASES), choices=CASES)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--dim", type=int, default=32, help="columns of the table")
    parser.add_argument("--ids", type=int, default=65_536, help="of a pull")
    parser.add_argument(
        "--optimizers", nargs="+", default=tuple(OPTIMIZERS), choices=OPTIMIZERS
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if `--check` is given and a claim does not hold."""
    return timing.run(
        "store", __doc__, argv, options, cases, line, failures, "medians in ms"
    )
