"""Predicts the next item of each user: SASRec with sampled softmax.

    python examples/sequence.py purchases.csv --columns CustomerID,StockCode

The file is CSV or Parquet, with a line for each purchase, click or rating, in the order
of time. A transformer reads the items of a user from left to right and scores the next
one (Kang and McAuley, 2018). The loss compares it with a few hundred random items, so a
step does not read the whole table. The last item of each user is held out for the test,
and the one before it for validation.
"""

import argparse
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.dataset

import sparsejax as sj


BLOCKS, HEADS, DROPOUT = 2, 2, 0.2  # of the transformer


def init(key, num_items, length, dim):
    normal = lambda key, *shape: jax.random.normal(key, shape) / np.sqrt(dim)
    keys, blocks = jax.random.split(key, 3), []
    for own in jax.random.split(keys[2], (BLOCKS, 3)):
        qkv, out = normal(own[0], dim, 3 * dim), jnp.zeros((dim, dim))
        wide, narrow = normal(own[1], dim, 2 * dim), normal(own[2], 2 * dim, dim)
        blocks.append((jnp.ones(dim), qkv, out, jnp.ones(dim), wide, narrow))
    items, places = normal(keys[0], num_items, dim), normal(keys[1], length, dim)
    return {"items": items, "places": places, "blocks": blocks, "norm": jnp.ones(dim)}


def queries(params, items, drop):
    """A vector for each place, `[B, L, D]`: the query for the item after it."""
    norm = lambda x, scale: jax.nn.standardize(x) * scale[None, None]
    x = drop(params["items"][items] + params["places"][None], 0)
    for n, (scale, qkv, out, scale_2, wide, narrow) in enumerate(params["blocks"]):
        heads = jnp.split(norm(x, scale) @ qkv, 3, axis=-1)
        heads = [h.reshape(*h.shape[:2], HEADS, -1) for h in heads]
        seen = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
        x += drop(seen @ out, 2 * n + 1)
        x += drop(jax.nn.gelu(norm(x, scale_2) @ wide) @ narrow, 2 * n + 2)
    return norm(x, params["norm"])


def loss_fn(params, sequences, sampler, key, num_negatives):
    def drop(x, number):
        own = jax.random.fold_in(key, number)
        kept = jax.random.bernoulli(own, 1 - DROPOUT, x.shape)
        return jnp.where(kept, x / (1 - DROPOUT), 0)

    inputs, targets = sequences[:, :-1], sequences[:, 1:].reshape(-1)
    vectors = queries(params, inputs, drop).reshape(len(targets), -1)
    negatives = sampler.sample(key, num_negatives, targets)
    softmax = sj.losses.sampled_softmax_loss
    losses = softmax(params["items"], vectors, targets, negatives)
    return jnp.mean(losses, where=targets > 0)  # 0 is padding


@jax.jit
def best_items(params, inputs, lengths):
    rows = queries(params, inputs, lambda x, number: x)
    last = rows[jnp.arange(len(inputs)), lengths - 1]
    return sj.top_k(params["items"], last, 10, exclude=jnp.array([0]))[1]


def read_sequences(path, columns):
    """The items of each user, in order, and the number of ids of items."""
    table = pyarrow.dataset.dataset(path, format=path.split(".")[-1]).to_table()
    vocabulary = sj.data.Vocabulary.build(table, columns)
    user, item = vocabulary.ids(table).values()
    order = np.argsort(user, kind="stable")
    sequences = np.split(item[order], np.flatnonzero(np.diff(user[order])) + 1)
    sequences = [x for x in sequences if len(x) >= 4]
    if not sequences:
        sys.exit("sequence: no user has 4 items, of which the last 2 are held out.")
    return sequences, vocabulary.size(columns[1])


def padded(sequences, length):
    return np.stack([np.pad(x, (0, length - len(x))) for x in sequences])


def main(argv=None):
    parser = argparse.ArgumentParser(description="Predicts the next item of a user.")
    parser.add_argument("file", help="CSV or Parquet, lines in the order of time")
    parser.add_argument("--columns", default="user,item", help="their names")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--length", type=int, default=50, help="items that are read")
    parser.add_argument("--dim", type=int, default=64, help="length of a vector")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step")
    parser.add_argument("--negatives", type=int, default=512, help="of a step")
    parser.add_argument("--lr", type=float, default=4e-3, help="of Adam")
    args = parser.parse_args(argv)
    sizes = args.epochs, args.length, args.dim, args.batch, args.negatives
    if min(*sizes, args.lr) <= 0:
        parser.error("all numbers must be positive")
    sj.cpu.keep_freed_pages()
    sequences, num_items = read_sequences(args.file, args.columns.split(","))
    past = [x[:-2] for x in sequences]
    counts = np.bincount(np.concatenate(past), None, num_items)
    print(f"{len(sequences):,} users, {num_items - 1:,} items, {counts.sum():,} lines")

    def recall(place, params=None):
        """The share of users whose item at this place is among the 10 best."""
        wanted, best = np.array([x[place] for x in sequences]), np.argsort(-counts)[:10]
        if params is not None:
            read = [x[:place][-args.length :] for x in sequences]
            lengths = np.array([len(x) for x in read])
            best = best_items(params, padded(read, args.length), lengths)
        return np.mean(np.any(best == wanted[:, None], axis=1))

    tx = sj.optim.lazy(optax.adam(args.lr))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch, sampler, key):
        loss = partial(loss_fn, num_negatives=args.negatives)
        value, grads = sj.value_and_grad(loss)(params, batch, sampler, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    pieces = [  # each with the item after it, which begins the next piece
        x[start : start + args.length + 1]
        for x in past
        for start in range(0, len(x) - 1, args.length)
    ]
    dataset = sj.data.ArrayDataset(padded(pieces, args.length + 1))
    loader = sj.data.DataLoader(dataset, args.batch, shuffle=True, drop_remainder=True)
    params = init(jax.random.key(0), num_items, args.length, args.dim)
    opt_state, number = tx.init(params), 0
    sampler = sj.losses.NegativeSampler.from_counts(counts)
    for epoch in range(1, args.epochs + 1):
        began, losses = time.perf_counter(), []
        for batch in loader:
            own = jax.random.fold_in(jax.random.key(1), number)
            params, opt_state, loss = step(params, opt_state, batch, sampler, own)
            losses, number = [*losses, loss], number + 1
        loss, spent = np.mean(losses), time.perf_counter() - began
        found = recall(-2, params)
        print(f"epoch {epoch}: loss {loss:.3f}, recall@10 {found:.3f}, {spent:.1f} s")
    print(f"Test: recall@10 {recall(-1, params):.3f}, of popularity {recall(-1):.3f}")


if __name__ == "__main__":
    main()
