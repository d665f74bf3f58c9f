"""Word vectors from a text: skip-gram with negative sampling, with sparse gradients.

    python examples/word2vec.py --text book.txt.gz --seconds 60

Two tables, of words and of the words near them, learn to tell neighbours in the text
from random words (Mikolov et al., 2013). A step reads a few thousand rows, and its cost
does not depend on the size of the tables.
"""

import argparse
import gzip
import itertools
import pathlib
import re
import sys
import time
import zlib
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj


try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

PAIRS, DRAWN, NEGATIVES = 4096, 256, 5  # of a step; shared by all its pairs; of a pair
WINDOW, TIMED_ROWS = 5, 200_000


def loss_fn(params, pairs, negatives):
    words = params["words"][pairs[:, 0]]
    right = jnp.sum(words * params["contexts"][pairs[:, 1]], axis=1)
    wrong = jax.nn.softplus(words @ params["contexts"][negatives].T)
    share = NEGATIVES / negatives.size  # a pair counts as if it had NEGATIVES alone
    return jnp.sum(jax.nn.softplus(-right)) + share * jnp.sum(wrong)


def read_corpus(path, min_count):
    """The words of a text, most frequent first, their counts, and the text as ids."""
    if path is None:
        from pydoc_data.topics import topics  # Python's help texts: 65,000 words

        text = "\n".join(topics[name] for name in sorted(topics))
    else:
        try:
            data = pathlib.Path(path).read_bytes()
            data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
            text = data.decode("utf-8-sig")
        except (OSError, ValueError, EOFError, zlib.error) as error:
            sys.exit(f"word2vec: cannot read {path} as UTF-8 text or gzip: {error}")
    found = re.findall(r"[^\W\d_]{2,}", text.lower())
    counts = {w: n for w, n in Counter(found).most_common() if n >= min_count}
    if len(counts) < 10:
        need = f"10 words that occur {min_count} times (--min-count)"
        sys.exit(f"word2vec: the text must have {need}, got {len(counts)}.")
    ids = {word: i for i, word in enumerate(counts)}
    tokens = np.array([ids[word] for word in found if word in ids], np.int32)
    return list(counts), np.array(list(counts.values())), tokens


def skip_grams(tokens, counts, rng, threshold=1e-3):
    """All pairs of neighbours, shuffled, after frequent words were thinned out."""
    rarity = threshold * np.sum(counts) / counts
    kept = tokens[rng.random(tokens.size) < (np.sqrt(rarity) + rarity)[tokens]]
    reach, pairs = rng.integers(1, WINDOW + 1, kept.size), []  # near words count more
    for distance in range(1, WINDOW + 1):
        both = np.stack([kept[:-distance], kept[distance:]], axis=1)
        pairs.append(both[reach[:-distance] >= distance])
        pairs.append(both[reach[distance:] >= distance, ::-1])
    return rng.permutation(np.concatenate(pairs))


def batches(tokens, counts, rng):
    """Batches of pairs without end, and the number of words that each stands for."""
    for piece in itertools.cycle(np.array_split(tokens, -(-tokens.size // 1_000_000))):
        pairs = skip_grams(piece, counts, rng)
        steps = -(-len(pairs) // PAIRS)
        for batch in np.resize(pairs, (steps, PAIRS, 2)):  # repeats pairs in the last
            yield jnp.asarray(batch), piece.size / steps


def train(tokens, counts, dim, seconds, tx, value_and_grad):
    """Trains for some seconds; returns the vectors, the losses, words/s and ms/step."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, pairs, key, sampler):
        negatives = sampler.sample(key, DRAWN).ids
        loss, grads = value_and_grad(loss_fn)(params, pairs, negatives)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss / len(pairs)

    shape, key = (len(counts), dim), jax.random.key(0)
    words = jax.random.uniform(key, shape, minval=-0.5, maxval=0.5) / dim
    params = {"words": words, "contexts": jnp.zeros(shape)}
    state, sampler = tx.init(params), sj.losses.NegativeSampler.from_counts(counts)
    steps = enumerate(batches(tokens, counts, np.random.default_rng(0)))
    bar = tqdm(unit=" steps", leave=False) if tqdm else None
    losses, done, began = [], 0.0, time.perf_counter()
    for number, (pairs, share) in steps:
        now = jax.random.fold_in(key, number)
        params, state, loss = step(params, state, pairs, now, sampler)
        done += share
        if number % 10 == 0:  # reading a loss waits for the step
            losses.append(float(loss))
            if bar is not None:
                bar.set_postfix(loss=losses[-1], refresh=False)
                bar.update(number - bar.n)
            if number == 0:  # the first step was compiled
                done, began = 0.0, time.perf_counter()
            elif time.perf_counter() - began > seconds:
                break
    spent = time.perf_counter() - began
    return params["words"], losses, done / spent, 1e3 * spent / number


def main(argv=None):
    parser = argparse.ArgumentParser(description="Trains word vectors.")
    parser.add_argument("--text", metavar="FILE", help="UTF-8, plain or gzip")
    parser.add_argument("--seconds", type=float, default=60, help="of training")
    parser.add_argument("--dim", type=int, default=64, help="length of a vector")
    parser.add_argument("--min-count", type=int, default=5, help="of a word")
    args = parser.parse_args(argv)
    if not min(args.seconds, args.dim, args.min_count) > 0:
        sys.exit("word2vec: --seconds, --dim and --min-count must be positive.")
    sj.cpu.keep_freed_pages()  # dense steps gain most from it
    words, counts, tokens = read_corpus(args.text, args.min_count)
    print(f"{tokens.size:,} words, {len(words):,} different ones")
    tx = sj.optim.adagrad(0.1)
    ours, plain = (sj.optim.lazy(tx), sj.value_and_grad), (tx, jax.value_and_grad)
    vectors, losses, speed, _ = train(tokens, counts, args.dim, args.seconds, *ours)
    print(f"Loss {losses[0]:.3f} at first, {losses[-1]:.3f} now; {speed:,.0f} words/s")
    units = np.asarray(vectors / jnp.linalg.norm(vectors, axis=1, keepdims=True))
    for i in [i for i, word in enumerate(words) if len(word) > 4][:10]:
        near = np.argsort(-(units @ units[i]))[1:7]
        print(f"{words[i]:>12}: {', '.join(words[j] for j in near)}")
    text = np.random.default_rng(0).permutation(TIMED_ROWS), np.ones(TIMED_ROWS)
    ms = [train(*text, args.dim, 1, *how)[-1] for how in (ours, plain)]
    print(f"A step on {TIMED_ROWS:,} rows: {ms[0]:.1f} ms, dense optax {ms[1]:.1f} ms")


if __name__ == "__main__":
    main()
