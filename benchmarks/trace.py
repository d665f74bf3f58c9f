"""Tracing: how long JAX takes until it has a program, before XLA compiles it.

Two programs, ours and with `jax.value_and_grad` in turns:

- bert: the gradient of a BERT of the base size (109 million parameters, 1,170
  equations), whose embeddings are a small part of it. First with JAX's caches cleared
  before each trace, then with caches that know the model.
- tables: a training step with Adam of a thousand tables of unequal heights.

    python -m benchmarks trace --check

Nothing is computed, so it takes no memory to speak of.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj
from benchmarks import timing


MOST_RATIO = 2.0  # of bert, ours to JAX's
MOST_SECONDS = 5.0  # of tables, ours, a thousand of them

WORDS, LENGTH, BATCH, HEADS = 30_522, 128, 8, 12


# -- a model like BERT -----------------------------------------------------------------


def _normalize(params, x):
    mean = jnp.mean(x, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-12)
    return (x - mean) * scale * params["scale"] + params["bias"]


def _dense(params, x):
    return x @ params["weights"] + params["bias"]


def _dropout(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def _layer(params, x, mask, key):
    keys = jax.random.split(key, 3)
    batch, length, dim = x.shape

    def heads(name):
        y = _dense(params[name], x).reshape(batch, length, HEADS, dim // HEADS)
        return y.transpose(0, 2, 1, 3)

    query, key, value = heads("query"), heads("key"), heads("value")
    scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(dim // HEADS) + mask
    read = _dropout(keys[0], jax.nn.softmax(scores)) @ value
    read = _dense(params["out"], read.transpose(0, 2, 1, 3).reshape(x.shape))
    x = _normalize(params["norm"], x + _dropout(keys[1], read))
    hidden = jax.nn.gelu(_dense(params["wide"], x))
    hidden = _dropout(keys[2], _dense(params["narrow"], hidden))
    return _normalize(params["norm2"], x + hidden)


def bert_loss(params, batch, key):
    """The cross-entropy of a classifier of sentences, with dropout."""
    keys = jax.random.split(key, len(params["layers"]) + 1)
    x = params["words"][batch["words"]] + params["types"][batch["types"]]
    x += params["positions"][jnp.arange(x.shape[1])]
    x = _dropout(keys[-1], _normalize(params["norm"], x))
    mask = jnp.where(batch["mask"], 0.0, -1e9)[:, None, None, :]
    for layer, k in zip(params["layers"], keys):
        x = _layer(layer, x, mask, k)
    logits = _dense(params["logits"], jnp.tanh(_dense(params["pool"], x[:, 0])))
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)
    return -jnp.mean(picked)


def bert(layers: int, dim: int) -> tuple[Callable, Any]:
    """The loss, and the shapes of its arguments."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    dense = lambda rows, to: {"weights": array(rows, to), "bias": array(to)}
    norm = {"scale": array(dim), "bias": array(dim)}
    layer = {
        **{name: dense(dim, dim) for name in ("query", "key", "value", "out")},
        "wide": dense(dim, 4 * dim),
        "narrow": dense(4 * dim, dim),
        "norm": norm,
        "norm2": norm,
    }
    params = {
        "words": array(WORDS, dim),
        "types": array(2, dim),
        "positions": array(512, dim),
        "norm": norm,
        "layers": [layer] * layers,
        "pool": dense(dim, dim),
        "logits": dense(dim, 2),
    }
    batch = {
        "words": ints(BATCH, LENGTH),
        "types": ints(BATCH, LENGTH),
        "mask": jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.bool_),
        "label": ints(BATCH),
    }
    return bert_loss, (params, batch, jax.eval_shape(lambda: jax.random.key(0)))


# -- many tables -----------------------------------------------------------------------


def tables(count: int, value_and_grad: Callable, tx: Any) -> tuple[Callable, Any]:
    """A training step of so many tables, and the shapes of its arguments."""
    names = [f"table{k}" for k in range(count)]

    def loss(params, batch):
        rows = [params[name][batch[name]] for name in names]
        return sum(jnp.sum(x**2) for x in rows)

    def step(params, state, batch):
        value, grads = value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {
        name: jax.ShapeDtypeStruct((1_000 + k, 16), jnp.float32)
        for k, name in enumerate(names)
    }
    batch = {name: jax.ShapeDtypeStruct((64,), jnp.int32) for name in names}
    return step, (params, jax.eval_shape(tx.init, params), batch)


# -- measuring -------------------------------------------------------------------------


def _program(make: Callable[[], tuple[Callable, Any]]) -> Callable[..., Any]:
    """What `timing.alternate` times: the trace of a function that JAX has not seen."""

    def run(state, inputs):
        fun, args = make()
        jax.jit(lambda *xs: fun(*xs)).trace(*args)
        return state, inputs

    return run


def measure(
    name: str, makers: dict[str, Callable], caches: str, repeats: int
) -> dict[str, Any]:
    """Traces programs in turn; one record. `caches` are "cleared" or "warm"."""
    inputs = jax.clear_caches if caches == "cleared" else tuple
    programs = {who: _program(make) for who, make in makers.items()}
    times, _ = timing.alternate(programs, (), inputs, repeats=repeats)
    ms = {who: timing.median_ms(t) for who, t in times.items()}
    return {
        "benchmark": "trace",
        "program": name,
        "caches": caches,
        "ms": ms,
        "spread": {who: timing.spread(t) for who, t in times.items()},
        "ratio": ms["ours"] / ms["jax"],
    }


def measure_all(
    layers: int, dim: int, count: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yields a record for each program."""
    loss, args = bert(layers, dim)
    losses = {
        "jax": lambda: (jax.value_and_grad(loss), args),
        "ours": lambda: (sj.value_and_grad(loss), args),
    }
    for caches in ("cleared", "warm"):
        yield measure(f"bert, {layers} layers", losses, caches, repeats)
    adam = optax.adam(1e-3)
    steps = {
        "jax": functools.partial(tables, count, jax.value_and_grad, adam),
        "ours": functools.partial(
            tables, count, sj.value_and_grad, sj.optim.lazy(adam)
        ),
    }
    yield measure(f"{count:,} tables", steps, "cleared", max(1, repeats // 3))


def check(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold."""
    wrong = []
    for r in records:
        if r["program"].startswith("bert") and r["ratio"] > MOST_RATIO:
            wrong.append(
                f"{r['program']}, caches {r['caches']}: {r['ratio']:.2f} times as long "
                f"as jax.value_and_grad, claimed at most {MOST_RATIO}"
            )
        if r["program"].endswith("tables") and r["ms"]["ours"] > 1e3 * MOST_SECONDS:
            wrong.append(
                f"{r['program']}: {r['ms']['ours'] / 1e3:.1f} s, claimed at most "
                f"{MOST_SECONDS} s"
            )
    return wrong


def line(record: dict[str, Any]) -> str:
    """One line of the table."""
    ms = record["ms"]
    return (
        f"{record['program']:18}{record['caches']:>9}{ms['jax']:>10.0f}"
        f"{ms['ours']:>10.0f}{record['ratio']:>8.2f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and checks where asked."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks trace", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=12, help="of the BERT")
    parser.add_argument("--dim", type=int, default=768, help="its width")
    parser.add_argument("--tables", type=int, default=1_000, help="of the step")
    parser.add_argument("--repeats", type=int, default=9, help="timed traces")
    parser.add_argument("--json", metavar="FILE", help="append a JSON line a program")
    parser.add_argument("--check", action="store_true", help="exit 1 if a claim fails")
    args = parser.parse_args(argv)
    machine = timing.machine()
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    print("medians in ms\n")
    print(f"{'program':18}{'caches':>9}{'jax':>10}{'ours':>10}{'ratio':>8}")
    records = measure_all(args.layers, args.dim, args.tables, args.repeats)
    show = lambda record: print(line(record), flush=True)
    found = timing.collect(records, show, args.json, machine)
    return timing.report(check(found) if args.check else [])


if __name__ == "__main__":
    sys.exit(main())
