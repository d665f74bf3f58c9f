"""`sj.HashIndex`: time of find and insert, and a click model whose vocabulary drifts.

Times stand beside the merging plans, which `lazy` uses for as many row ids: by sorting
(`merge_plan`) and by hashing (`first_slots`). Keys are inserted into a full index: all
of them known, 2 % new, all new. Sides take turns, with other keys in every run.

The model is a logistic regression on a stream of examples of 8 keys, the popular ones
of which are replaced by others all the time. It is trained with a row for every key
that ever occurs, with an index of a quarter of these rows, and with keys hashed to as
many rows; told is the loss on examples before they are trained on.

    python -m benchmarks index
    python -m benchmarks index --only drift --check
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import sparsejax as sj
from benchmarks import timing
from sparsejax._rows import merge


FIELDS = 8
EVERY = "a row for each key"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    EVERY: ("dict", {}),
    "lru": ("index", {}),
    "lru, admitted at the second sighting": ("index", {"admit_after": 2}),
    "lfu": ("index", {"policy": "lfu"}),
    "hashed": ("hashed", {}),
}
MOST = 1.01  # the loss with a quarter of the rows, over that with all
AT_MOST = 2.0  # the time of find and insert, over that of the plan by sorting


# ------------------------------------------------------------------ times


def spread_out(numbers: np.ndarray) -> np.ndarray:
    """Distinct keys for distinct numbers, over all 32 bits."""
    return (numbers.astype(np.uint64) * 0x9E3779B1 & 0xFFFFFFFF).astype(np.uint32)


def make_inputs(keys: int, rows: int, rng: np.random.Generator) -> dict[str, Any]:
    """Row ids, and keys of which all, 98 % and none are among the first half."""
    known = rng.integers(0, rows // 2, keys)
    others = rng.integers(rows, 1 << 32, keys)
    mixed = np.where(rng.random(keys) < 0.02, others, known)
    drawn = {"known": known, "mixed": mixed, "new": rng.integers(rows, 1 << 32, keys)}
    inputs = {name: spread_out(x) for name, x in drawn.items()}
    inputs["rows"] = rng.integers(0, rows, keys, np.int32)
    return jax.block_until_ready(jax.tree.map(jnp.asarray, inputs))


def full_index(keys: int, rows: int) -> sj.HashIndex:
    """An index of the numbers below `rows`, inserted `keys` at a time."""
    index = sj.HashIndex.create(rows, max_evictions=4096)
    insert = jax.jit(sj.HashIndex.insert, donate_argnums=0)
    for start in range(0, rows, keys):
        numbers = np.arange(start, start + keys) % rows
        index, _, _ = insert(index, jnp.asarray(spread_out(numbers)), 0)
    return index


def sides(keys: int, rows: int) -> dict[str, Callable]:
    """`(state, inputs) -> (state, result)` of each."""

    def insert(which, state, inputs):
        step = state["step"] + 1
        index, found, evicted = state[which].insert(inputs[which], step)
        return state | {which: index, "step": step}, (found, evicted)

    only = lambda f: lambda state, inputs: (state, f(state, inputs))
    return {
        "plan, sorting": only(lambda _, x: merge.merge_plan(x["rows"], rows, keys)),
        "plan, hashing": only(lambda _, x: merge.first_slots(x["rows"], rows)),
        "find": only(lambda state, x: state["known"].find(x["known"])),
        "insert, known": functools.partial(insert, "known"),
        "insert, 2 % new": functools.partial(insert, "mixed"),
        "insert, all new": functools.partial(insert, "new"),
    }


def times(args: argparse.Namespace) -> dict[str, Any]:
    """One record: the time of each side in ms."""
    rng = np.random.default_rng(0)
    inputs = functools.partial(make_inputs, args.keys, args.rows, rng)
    full = full_index(args.keys, args.rows)
    state: dict[str, Any] = {"step": jnp.zeros((), jnp.int32)}
    for name, most in (("known", 4096), ("mixed", 4096), ("new", None)):
        copy = jax.tree.map(jnp.copy, full)  # each is donated
        state[name] = dataclasses.replace(copy, max_evictions=most)
    compiled = {
        name: timing.compile_apart(jax.jit(side, donate_argnums=0), state, inputs())
        for name, side in sides(args.keys, args.rows).items()
    }
    taken, state = timing.alternate(
        {name: c.run for name, c in compiled.items()},
        state,
        inputs,
        repeats=args.repeats,
    )
    medians = {name: timing.median_ms(t) for name, t in taken.items()}
    fastest = {name: 1e3 * min(t) for name, t in taken.items()}
    return {
        "benchmark": "index",
        "keys": args.keys,
        "rows": args.rows,
        "ms": medians,
        "fastest_ms": fastest,
        "compile_s": {name: c.seconds for name, c in compiled.items()},
        "temp_mb": {name: c.temp_bytes / 1e6 for name, c in compiled.items()},
        "evicted": {
            name: int(state[name].num_evicted) for name in ("known", "mixed", "new")
        },
        **timing.machine(),
    }


# ------------------------------------------------------------------ drift


def stream(
    steps: int, batch: int, drift: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Keys `[steps, batch, 8]` and labels `[steps, batch]`.

    After each step `drift` new keys are the most popular ones; how popular a key is
    falls by Zipf's law with its age, up to 8,192, and 2 % are of any age up to 32,768.
    A label is drawn by the sum of its keys' weights.
    """
    shape = (steps, batch, FIELDS)
    popular = np.floor(2 ** (13 * rng.random(shape)))
    anywhere = rng.integers(0, 1 << 15, shape)
    ages = np.where(rng.random(shape) < 0.02, anywhere, popular).astype(np.int64)
    keys = drift * np.arange(steps)[:, None, None] + (1 << 15) - ages
    weights = rng.normal(0, 0.7, keys.max() + 1)
    logits = weights[keys].sum(axis=2)
    labels = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
    # Numbered in order of appearance, as a dict numbers them.
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    numbers = np.empty_like(first)
    numbers[np.argsort(first)] = np.arange(first.size)
    keys = numbers[inverse].reshape(keys.shape)
    return keys.astype(np.int32), labels.astype(np.float32)


def loss_fn(params: Any, rows: jax.Array, labels: jax.Array) -> jax.Array:
    weights = sj.lookup(params["table"], rows, mode="zero")[..., 0]
    logits = weights.sum(axis=1) + params["bias"]
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))


def train(keys: Any, labels: Any, height: int, how: str, **options: Any) -> Any:
    """The loss of each step before it, and what became of the index."""
    tx = sj.optim.lazy(sj.optim.adagrad(0.3))
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
        loss, grads = sj.value_and_grad(loss_fn, tables={"table": True, "bias": None})(
            params, rows, labels
        )
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, index), loss

    @jax.jit
    def run(carry, given):
        return lax.scan(body, carry, given)

    given = jnp.arange(len(keys)), jnp.asarray(keys), jnp.asarray(labels)
    (*_, index), losses = run((params, tx.init(params), index), given)
    return np.asarray(losses, np.float64), index


def drift(args: argparse.Namespace) -> dict[str, Any]:
    """One record: the loss over the second half of the stream."""
    rng = np.random.default_rng(0)
    keys, labels = stream(args.steps, args.batch, args.drift, rng)
    distinct = int(keys.max()) + 1
    rows = distinct // 4
    losses, evicted = {}, {}
    for name in (EVERY, *args.ways):
        how, options = WAYS[name]
        height = distinct if name == EVERY else rows
        found, index = train(keys, labels, height, how, **options)
        losses[name] = float(found[len(found) // 2 :].mean())
        if index is not None:
            evicted[name] = int(index.num_evicted)
    return {
        "benchmark": "drift",
        "examples": args.steps * args.batch,
        "distinct": distinct,
        "rows": rows,
        "loss": losses,
        "ratio": {name: x / losses[EVERY] for name, x in losses.items()},
        "evicted": evicted,
    }


# ------------------------------------------------------------------ command line


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold."""
    found = []
    for record in records:
        if record["benchmark"] == "drift":
            if record["ratio"].get("lru", 1.0) > MOST:
                found.append(f"loss {record['ratio']['lru']:.4f} of the unbounded one")
            continue
        for name in ("find", "insert, known", "insert, 2 % new"):
            ratios = [
                record[key][name] / record[key]["plan, sorting"]
                for key in ("ms", "fastest_ms")
            ]
            if min(ratios) > AT_MOST:
                found.append(f"{name}: {min(ratios):.2f} times the plan by sorting")
    return found


def show(record: dict[str, Any]) -> None:
    if record["benchmark"] == "drift":
        print(
            f"\n{record['examples']:,} examples, {record['distinct']:,} distinct keys; "
            f"{record['rows']:,} rows\n{'':40}loss  over all rows   evicted"
        )
        for name, loss in record["loss"].items():
            evicted = record["evicted"].get(name, 0)
            print(f"{name:38} {loss:.4f} {record['ratio'][name]:12.4f} {evicted:12,}")
        return
    print(
        f"{record['keys']:,} keys, {record['rows']:,} rows\n"
        f"{'':20}median (ms)   fastest   over sorting   over hashing   compile (s)"
    )
    for name, ms in record["ms"].items():
        over = [ms / record["ms"][plan] for plan in ("plan, sorting", "plan, hashing")]
        print(
            f"{name:20}{ms:11.2f} {record['fastest_ms'][name]:9.2f}"
            f" {over[0]:14.2f} {over[1]:14.2f} {record['compile_s'][name]:13.1f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if `--check` is given and a claim does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks index", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", choices=("times", "drift"))
    parser.add_argument("--keys", type=int, default=65_536)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=1_024)
    parser.add_argument("--drift", type=int, default=100, help="new keys a step")
    ways = list(WAYS)[1:]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--json", help="append the results to this file")
    parser.add_argument("--check", action="store_true", help="fail if a claim fails")
    args = parser.parse_args(argv)
    records = []
    for name, measure in (("times", times), ("drift", drift)):
        if args.only not in (None, name):
            continue
        records.append(measure(args))
        show(records[-1])
        if args.json:
            timing.append_json_line(args.json, records[-1])
    failed = failures(records) if args.check else []
    for line in failed:
        print("FAILED:", line)
    return bool(failed)
