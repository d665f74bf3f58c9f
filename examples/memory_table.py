"""A small language model with a large memory: hashes of the last bytes name its rows.

    python examples/memory_table.py --text book.txt.gz --where file --rows 300_000_000

Each place of the text reads a row for its last 2, 3, 4 and 6 bytes, and adds them to
what the transformer sees, as Engram and n-gram embeddings do. A step reads a few
thousand rows, so the memory may be larger than the device (`--where store`), or than
the host's memory (`--where file`). `--rows 0` trains the transformer alone.
"""

import argparse
import gzip
import pathlib
import resource
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj


BLOCKS, DIM, HEADS, LENGTH, BATCH = 3, 128, 4, 256, 8  # of the transformer
GRAMS, WIDTH = (2, 3, 4, 6), 32  # bytes that name a row; length of a row
HELD_OUT, EVERY = 64, 20  # pieces to test with; steps between reports and saves


def init(key):
    """The transformer, and what reads the memory into it."""
    normal = lambda key, *shape: jax.random.normal(key, shape) / np.sqrt(shape[0])
    keys, blocks = jax.random.split(key, 5), []
    for own in jax.random.split(keys[0], (BLOCKS, 3)):
        qkv, out = normal(own[0], DIM, 3 * DIM), jnp.zeros((DIM, DIM))
        wide, narrow = normal(own[1], DIM, 4 * DIM), jnp.zeros((4 * DIM, DIM))
        blocks.append({"qkv": qkv, "out": out, "wide": wide, "narrow": narrow})
    return {
        "bytes": 0.02 * jax.random.normal(keys[1], (256, DIM)),
        "places": 0.02 * jax.random.normal(keys[2], (LENGTH, DIM)),
        "blocks": blocks,
        "read": normal(keys[3], len(GRAMS) * WIDTH, DIM),
        "head": normal(keys[4], DIM, 256),
    }


def ngram_rows(text, num_rows):
    """For each place of `text` `[B, L]`, the rows of its last bytes, `[B, L, 4]`."""
    text = text.astype(jnp.uint32)
    state, rows = jnp.full_like(text, 0x811C9DC5), []
    for back in range(max(GRAMS)):
        byte = jnp.pad(text, ((0, 0), (back, 0)))[:, : text.shape[1]]
        state = (state ^ byte) * jnp.uint32(0x01000193)  # FNV-1a
        if back + 1 in GRAMS:
            mixed = (state ^ (state >> 15)) * jnp.uint32(0x85EBCA6B)
            rows.append((mixed ^ (mixed >> 16)) % jnp.uint32(num_rows))
    return jnp.stack(rows, -1).astype(jnp.int32)


def loss_fn(params, text):
    """The mean loss of the next byte, in nats, of `text` `[B, L + 1]`."""
    inputs, targets = text[:, :-1], text[:, 1:].astype(jnp.int32)
    x = params["bytes"][inputs.astype(jnp.int32)] + params["places"]
    if "memory" in params:
        rows = ngram_rows(inputs, params["memory"].shape[0])
        x += params["memory"][rows].reshape(*inputs.shape, -1) @ params["read"]
    for block in params["blocks"]:
        heads = jnp.split(jax.nn.standardize(x) @ block["qkv"], 3, axis=-1)
        heads = [h.reshape(*h.shape[:2], HEADS, -1) for h in heads]
        seen = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
        x += seen @ block["out"]
        x += jax.nn.gelu(jax.nn.standardize(x) @ block["wide"]) @ block["narrow"]
    logits = jax.nn.standardize(x) @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.mean(losses)


def read_text(path):
    """The bytes of a text: nine tenths to train, and the last one to test."""
    data = pathlib.Path(path).read_bytes()
    data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    return np.split(np.frombuffer(data, np.uint8), [len(data) * 9 // 10])


def pieces(text, count, seed):
    """Random pieces of a text, `[count, LENGTH + 1]`."""
    first = np.random.default_rng(seed).integers(0, len(text) - LENGTH, count)
    return text[first[:, None] + np.arange(LENGTH + 1)]


def device_step(tx, row_tx, params) -> Any:
    """The step and the state of a memory that is an array, or of none."""
    labels = {name: "rows" if name == "memory" else "dense" for name in params}
    tx = sj.optim.lazy(optax.partition({"rows": row_tx, "dense": tx}, labels))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        loss, grads = sj.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, tx.init(params)


def main(argv=None):
    parser = argparse.ArgumentParser(description="A language model with a memory.")
    parser.add_argument("--text", metavar="FILE", required=True, help="plain or gzip")
    parser.add_argument("--where", choices=["device", "store", "file"], default="store")
    parser.add_argument("--rows", type=int, default=4_000_000, help="of the memory")
    parser.add_argument("--file", default="memory_table.rows", help="of --where file")
    parser.add_argument("--save", metavar="FILE", help="resume from it, and write it")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(argv)
    sj.cpu.keep_freed_pages()
    text, held_out = read_text(args.text)
    params, store = init(jax.random.key(0)), sj.store.KVStore()
    tx, row_tx = optax.adam(1e-3), sj.optim.rowwise_adagrad(0.1)
    is_stored = args.rows > 0 and args.where != "device"
    if is_stored:
        path = {"store": None, "file": args.file}[args.where]
        store.init("memory", (args.rows, WIDTH), row_tx, path=path)
        params["memory"] = store["memory"]
        step, opt_state = store.train_step(loss_fn, tx), tx.init(params)
    else:
        if args.rows:
            params["memory"] = jnp.zeros((args.rows, WIDTH))
        step, opt_state = device_step(tx, row_tx, params)
    first = 0
    if args.save and pathlib.Path(args.save).exists():
        params, opt_state, first = store.load(args.save, (params, opt_state, first))
        print(f"resumed after {first} steps")
    batches: Any = (pieces(text, BATCH, n + 1) for n in range(first, args.steps))
    batches = step.prefetch(params, batches) if is_stored else zip(batches)
    began = time.perf_counter()
    for number, batch in enumerate(batches, first + 1):
        params, opt_state, loss = step(params, opt_state, *batch)
        if number % EVERY == 0:
            loss, spent = float(loss), time.perf_counter() - began
            speed, began = EVERY * BATCH * LENGTH / spent, began + spent
            print(f"step {number}: loss {loss:.4f}, {speed:,.0f} tokens/s", flush=True)
            if args.save:
                store.save(args.save, (params, opt_state, number))
    evaluate = store.forward(loss_fn) if is_stored else jax.jit(loss_fn)
    bits = evaluate(params, pieces(held_out, HELD_OUT, 0)) / np.log(2)
    touched = [f"{x.touched_rows:,} rows touched, " for x in store.stats().values()]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{bits:.3f} bits a byte of the held-out text")
    print(*touched, f"{resident:,} MiB resident", sep="")
    store.close()


if __name__ == "__main__":
    main()
