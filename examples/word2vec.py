"""Word vectors from a text: skip-gram with negative sampling, with sparse gradients.

    python examples/word2vec.py --text book.txt.gz --seconds 60

Two tables, of words and of the words near them, learn to tell neighbours in the text
from random words (Mikolov et al., 2013). The text is cut into chunks of 32 words: a row
is read once for all pairs of its word, and the words of a chunk share their negatives.
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

CHUNKS, PLACES, DRAWN = 64, 32, 32  # of a step; words and negatives of a chunk
WINDOW, NEGATIVES, TIMED_ROWS = 5, 5, 200_000  # a pair counts as if it had NEGATIVES


def loss_fn(params, chunks, reach, negatives):
    """The sum of the losses of all pairs of near words, and the number of pairs."""
    words, contexts = params["words"][chunks], params["contexts"][chunks]
    places = jnp.arange(chunks.shape[1])
    far = jnp.abs(places[:, None] - places[None])[None]
    near = jnp.float32((far > 0) & (far <= reach[:, :, None]))
    right = jax.nn.softplus(-jnp.einsum("cid,cjd->cij", words, contexts))
    drawn = params["contexts"][negatives]
    wrong = jax.nn.softplus(jnp.einsum("cid,cnd->cin", words, drawn))
    share = NEGATIVES / negatives.shape[1] * jnp.sum(near, axis=2, keepdims=True)
    return jnp.sum(right * near) + jnp.sum(wrong * share), jnp.sum(near)


def read_corpus(path, min_count):
    """The words of a text, most frequent first, their counts, and the text as ids."""
    if path is None:
        from pydoc_data.topics import topics  # Python's help texts: 65,000 words

        text = "\n".join(topics[name] for name in sorted(topics))
    else:
        try:
            data = pathlib.Path(path).read_bytes()
            unzip = gzip.decompress if data.startswith(b"\x1f\x8b") else bytes
            text = unzip(data).decode("utf-8-sig")
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


def cut(tokens, counts, rng, threshold=1e-3):
    """Chunks of a text, shuffled, after frequent words were thinned out."""
    rarity = threshold * np.sum(counts) / counts
    kept = tokens[rng.random(tokens.size) < (np.sqrt(rarity) + rarity)[tokens]]
    kept = np.roll(kept, rng.integers(PLACES))  # other words are apart next time
    return rng.permutation(np.resize(kept, (-(-kept.size // PLACES), PLACES)))


def batches(tokens, counts, rng):
    """Batches of chunks without end, and the number of words that each stands for."""
    for piece in itertools.cycle(np.array_split(tokens, -(-tokens.size // 1_000_000))):
        chunks = cut(piece, counts, rng)
        steps = -(-len(chunks) // CHUNKS)
        for batch in np.resize(chunks, (steps, CHUNKS, PLACES)):  # repeats in the last
            yield batch, piece.size / steps


def train(tokens, counts, dim, seconds, tx, value_and_grad, seed=0, stop=None):
    """Trains until the seconds are over, or `stop(params, words done)` is true."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, chunks, number, sampler):
        keys = jax.random.split(jax.random.fold_in(key, number))
        reach = jax.random.randint(keys[0], chunks.shape, 1, WINDOW + 1)
        negatives = sampler.sample(keys[1], (len(chunks), DRAWN)).ids
        given = params, chunks, reach, negatives
        (loss, pairs), grads = value_and_grad(loss_fn, has_aux=True)(*given)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss / pairs

    shape, key = (len(counts), dim), jax.random.key(seed)
    words = (jax.random.uniform(key, shape) - 0.5) / dim
    params = {"words": words, "contexts": jnp.zeros(shape)}
    state, sampler = tx.init(params), sj.losses.NegativeSampler.from_counts(counts)
    bar = tqdm(unit=" steps", leave=False) if tqdm else None
    losses, done, rng = [], 0.0, np.random.default_rng(seed)
    for number, (chunks, share) in enumerate(batches(tokens, counts, rng)):
        params, state, loss = step(params, state, chunks, number, sampler)
        done += share
        if number % 10 == 0:  # reading a loss waits for the step
            losses.append(float(loss))
            if bar is not None:
                bar.set_postfix(loss=losses[-1], refresh=False)
                bar.update(number - bar.n)
            if number == 0:  # the first step was compiled
                done, began = 0.0, time.perf_counter()
            elif time.perf_counter() - began > seconds or stop and stop(params, done):
                break
    spent = time.perf_counter() - began
    return params["words"], losses, done / spent, 1e3 * spent / number  # words/s, ms


def main(argv=None):
    parser = argparse.ArgumentParser(description="Trains word vectors.")
    parser.add_argument("--text", metavar="FILE", help="UTF-8, plain or gzip")
    parser.add_argument("--seconds", type=float, default=60, help="of training")
    parser.add_argument("--dim", type=int, default=64, help="length of a vector")
    parser.add_argument("--min-count", type=int, default=5, help="of a word")
    parser.add_argument("--lr", type=float, default=0.1, help="of Adagrad")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not min(args.seconds, args.dim, args.min_count, args.lr) > 0:
        sys.exit("word2vec: --seconds, --dim, --min-count, --lr must be positive.")
    sj.cpu.keep_freed_pages()  # dense steps gain most from it
    words, counts, tokens = read_corpus(args.text, args.min_count)
    print(f"{tokens.size:,} words, {len(words):,} different ones")
    tx = sj.optim.adagrad(args.lr)
    ours, plain = (sj.optim.lazy(tx), sj.value_and_grad), (tx, jax.value_and_grad)
    given = tokens, counts, args.dim, args.seconds
    vectors, losses, speed, _ = train(*given, *ours, args.seed)
    print(f"Loss {losses[0]:.3f} at first, {losses[-1]:.3f} now; {speed:,.0f} words/s")
    units = np.asarray(vectors / jnp.linalg.norm(vectors, axis=1, keepdims=True))
    for i in [i for i, word in enumerate(words) if len(word) > 4][:10]:
        near = np.argsort(-(units @ units[i]))[1:7]
        print(f"{words[i]:>12}: {', '.join(words[j] for j in near)}")
    text = np.random.default_rng(0).permutation(TIMED_ROWS), np.ones(TIMED_ROWS)
    ms = [train(*text, args.dim, min(args.seconds, 1), *x)[-1] for x in (ours, plain)]
    print(f"A step on {TIMED_ROWS:,} rows: {ms[0]:.1f} ms, dense optax {ms[1]:.1f} ms")


if __name__ == "__main__":
    main()
