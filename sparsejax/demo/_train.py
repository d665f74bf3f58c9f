"""`python -m sparsejax.demo`: word vectors from a text, with sparse gradients.

Skip-gram with negative sampling: two tables of vectors, one for words and one for the
words near them, learn to tell the pairs of the text from random pairs. A step reads a
few thousand rows of both tables, and costs what it reads, for tables of any size: the
gradients are SelectedRows, and `sj.optim.lazy` lifts an optax optimizer to them. A
table at the end compares it with dense training.

The model is `loss_fn`, the step `make_step`; both use the public API only.

References: Mikolov et al., 2013, "Distributed Representations of Words and Phrases and
their Compositionality".
"""

import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj
from sparsejax import _arguments
from sparsejax.demo import _options, _output, _text, timing
from sparsejax.demo._options import OPTIMIZERS, Config, UserError
from sparsejax.demo._text import Corpus


Params = dict[str, jax.Array]
Ids = jax.Array | np.ndarray

_SUBSAMPLING = 1e-3  # words more frequent than this are subsampled
_CHUNK = 32  # steps in one call
_TIMED_DIM = 32
_TIMED_PAIRS = 1024
_TIMED_ROWS = (10**4, 10**5, 10**6)
_TIMED_ROWS_BIG = (*_TIMED_ROWS, 10**7)


# ------------------------------------------------------------------ the model


def init_params(key: jax.Array, size: int, dim: int) -> Params:
    """The two tables, `[V, D]` each, with the initial values of word2vec."""
    words = jax.random.uniform(key, (size, dim), minval=-0.5, maxval=0.5) / dim
    return {"words": words, "contexts": jnp.zeros((size, dim))}


def loss_fn(params: Params, pairs: Ids, negatives: Ids) -> jax.Array:
    """The loss of negative sampling, summed over the batch.

    `sum_i [ -log s(w_i . c_i) - sum_k log s(-w_i . c_ik) ]`, s the logistic function.

    Args:
      params: the tables.
      pairs: int `[B, 2]`, words and their neighbours.
      negatives: int `[B, K]`, words drawn at random.
    """
    words = sj.lookup(params["words"], pairs[:, 0], mode="clip")
    others = jnp.concatenate([pairs[:, 1:], negatives], axis=1)
    contexts = sj.lookup(params["contexts"], others, mode="clip")
    logits = jnp.einsum("bd,bkd->bk", words, contexts)
    is_neighbour = jnp.zeros_like(logits).at[:, 0].set(1.0)
    return jnp.sum(optax.sigmoid_binary_cross_entropy(logits, is_neighbour))


def make_step(tx: optax.GradientTransformation, value_and_grad: Callable) -> Callable:
    """`(state, (pairs, negatives)) -> (state, loss)`; state: parameters, optimizer's.

    Args:
      tx: an optax transformation, lazy for `sj.value_and_grad`.
      value_and_grad: `jax.value_and_grad` or `sj.value_and_grad`.
    """

    def step(state, batch):
        params, opt_state = state
        loss, grads = value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def make_train(
    step: Callable, sampler: sj.losses.NegativeSampler, negatives: int
) -> Callable:
    """`(state, key, int32[steps, B, 2]) -> (state, losses)`: many steps in one call."""

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, key, batches, sampler):
        def one(state, xs):
            pairs, key = xs
            drawn = sampler.sample(key, (pairs.shape[0], negatives)).ids
            return step(state, (pairs, drawn))

        keys = jax.random.split(key, batches.shape[0])
        state, losses = jax.lax.scan(one, state, (batches, keys))
        return state, losses / batches.shape[1]

    # An argument: what a jitted function closes over is a constant of the program.
    return lambda state, key, batches: train(state, key, batches, sampler)


# ------------------------------------------------------------------ training


class Trained(NamedTuple):
    """The trained tables, and the loss at each number of words read."""

    params: Params
    words_read: list[float]
    losses: list[float]


def train(config: Config, corpus: Corpus, report: Callable[[float, float, float], Any]):
    """Trains word vectors, until the time or the epochs are used up.

    The learning rate falls to zero over whichever of the two ends first.

    Args:
      config: the settings.
      corpus: the text.
      report: called after each chunk of steps but the first, which is compiled, and at
        the end, with the words read so far, those that will be read in all, and the
        mean loss of a pair.

    Returns:
      `Trained`.
    """
    rng = np.random.default_rng(config.seed)
    init_key, key = jax.random.split(jax.random.key(config.seed))
    keep = _text.keep_probability(corpus, _SUBSAMPLING)
    seconds, epochs = config.limits
    words_in_all = corpus.tokens.size * epochs
    pairs_in_all = _text.expected_pairs(corpus, keep, config.window)
    pairs_in_all = max(1.0, pairs_in_all * epochs)

    tx = sj.optim.lazy(make_optimizer(config))
    # tables=True: a short text has so few words that a step reads most of them. By
    # default value_and_grad would then, rightly, take the cheaper dense gradient.
    value_and_grad = functools.partial(sj.value_and_grad, tables=True)
    sampler = sj.losses.NegativeSampler.from_counts(corpus.counts)
    run = make_train(make_step(tx, value_and_grad), sampler, config.negatives)

    params = init_params(init_key, len(corpus.words), config.dim)
    state = (params, tx.init(params))
    pairs = _text.all_skip_grams(corpus, keep, config.window, epochs, rng)
    words_read, losses, done, began = [], [], 0, time.perf_counter()
    for number, chunk in enumerate(_text.batches(pairs, config.batch_size, _CHUNK)):
        elapsed = time.perf_counter() - began
        if elapsed >= seconds and losses:
            break
        share = max(done / pairs_in_all, elapsed / seconds)
        state = with_rate(state, config.rate * max(1.0 - share, 1e-3))
        state, loss = run(state, jax.random.fold_in(key, number), jnp.asarray(chunk))
        loss = float(jnp.mean(loss))
        if not math.isfinite(loss):
            raise UserError(
                "the loss is no longer a number: take a lower --learning-rate than "
                f"{config.rate:g}"
            )
        done += chunk.shape[0] * chunk.shape[1]
        words_read.append(min(done / pairs_in_all, 1.0) * words_in_all)
        losses.append(loss)
        if number:
            speed = words_read[-1] / (time.perf_counter() - began)
            report(words_read[-1], min(words_in_all, speed * seconds), loss)
    if not losses:
        raise UserError(
            "the text is too short: no two of its frequent words are near each other. "
            "Take a longer text or a lower --min-count"
        )
    report(words_read[-1], words_read[-1], losses[-1])
    return Trained(state[0], words_read, losses)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """The optimizer, with a learning rate in its state, which `with_rate` sets."""
    make = optax.inject_hyperparams(OPTIMIZERS[config.optimizer][0])
    return make(learning_rate=config.rate)


def with_rate(state: tuple[Params, Any], rate: float) -> tuple[Params, Any]:
    """The state with another learning rate."""
    params, opt_state = state
    new = jnp.asarray(rate, jnp.float32)
    return params, optax.tree_utils.tree_set(opt_state, learning_rate=new)


# ------------------------------------------------------------------ results


def save(config: Config, corpus: Corpus, vectors: np.ndarray) -> None:
    """`--save`."""
    assert config.save is not None
    settings = dataclasses.asdict(config) | {"learning_rate": config.rate}
    _output.save_vectors(config.save, corpus.words, vectors, settings)
    print(f"Saved {len(corpus.words):,} vectors to {config.save}")


def draw(config: Config, corpus: Corpus, trained: Trained, vectors: np.ndarray) -> None:
    """`--plot`."""
    assert config.plot is not None
    shown = _text.content_words(corpus, 150)
    title = (
        f"{len(corpus.words):,} words in {config.dim} dimensions, "
        f"{trained.words_read[-1] / corpus.tokens.size:.3g} epochs of "
        f"{config.optimizer}"
    )
    words = [corpus.words[i] for i in shown]
    _output.plot(
        config.plot, trained.words_read, trained.losses, words, vectors[shown], title
    )
    print(f"Drew {config.plot}")


# ------------------------------------------------------------------ the timing table


def print_timing(config: Config) -> None:
    """Times a step of this model with larger tables, sparse and dense in turns."""
    reads = _TIMED_PAIRS * (2 + config.negatives)
    print(
        f"\nOne training step of this model, {_TIMED_PAIRS:,} pairs with "
        f"{config.negatives} negatives ({reads:,} rows read),\ntwo tables of "
        f"{_TIMED_DIM} dimensions, {config.optimizer}; medians:\n\n"
        "  rows of a table  sparsejax  optax, dense  times faster"
    )
    for rows in _TIMED_ROWS_BIG if config.big else _TIMED_ROWS:
        print(f"  {rows:15,}  {_timing_line(config, rows)}", flush=True)
    print(
        "\nIf a step reads more than a quarter of a table, sparsejax uses the dense "
        "update, which is then cheaper."
    )


def _timing_line(config: Config, rows: int) -> str:
    tx = OPTIMIZERS[config.optimizer][0](config.rate)

    def make_state():
        params = init_params(jax.random.key(0), rows, _TIMED_DIM)
        return params, tx.init(params)

    shapes = jax.eval_shape(make_state)
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)]
    needed = sum(sizes) + 4 * max(sizes)  # with two dense gradients and two updates
    free = timing.free_bytes()
    if free is not None and needed > 0.9 * free:
        return f"left out: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"

    rng = np.random.default_rng(config.seed)

    def batch():
        ids = rng.integers(0, rows, (_TIMED_PAIRS, 2 + config.negatives), np.int32)
        return jnp.asarray(ids[:, :2]), jnp.asarray(ids[:, 2:])

    state = jax.jit(make_state)()
    programs = {}
    for name, optimizer, value_and_grad in (
        ("ours", sj.optim.lazy(tx), sj.value_and_grad),
        ("dense", tx, jax.value_and_grad),
    ):
        step = jax.jit(make_step(optimizer, value_and_grad), donate_argnums=0)
        programs[name] = timing.compile_apart(step, state, batch()).run
    times, _ = timing.alternate(programs, state, batch, repeats=25, seconds=4.0)
    ours, dense = (timing.median_ms(times[name]) for name in ("ours", "dense"))
    return f"{ours:6.1f} ms  {dense:9.1f} ms  {dense / ours:11.1f}×"


# ------------------------------------------------------------------ the program


def check_memory(config: Config, size: int) -> None:
    """Raises a `UserError` if tables for `size` words do not fit into memory."""
    needed = (
        4 * config.dim * (6 * size + 8 * config.batch_size * (2 + config.negatives))
    )
    free = timing.free_bytes()
    if free is not None and needed > free:
        raise UserError(
            f"{size:,} words in {config.dim} dimensions need {needed / 1e9:.1f} GB and "
            f"{free / 1e9:.1f} GB are free: lower --dim, --max-vocab or --batch-size"
        )


def run(config: Config) -> None:
    """The whole demo."""
    _options.check(config)
    text = _text.read_text(config.text)
    corpus = _text.make_corpus(text, config.min_count, config.max_vocab)
    check_memory(config, len(corpus.words))
    source = config.text or "Python's help texts"
    print(
        f"{source}: {corpus.tokens.size:,} words, {len(corpus.words):,} different ones "
        f"that occur {config.min_count} times or more",
        flush=True,
    )
    with _arguments.progress_reporter("", not config.quiet, " words") as bar:
        report = lambda words, total, loss: bar(words, total, loss=f"{loss:.3f}")
        began = time.perf_counter()
        trained = train(config, corpus, report)
        took = time.perf_counter() - began
    passes = trained.words_read[-1] / corpus.tokens.size
    print(f"Read {passes:.3g} times in {took:.0f} seconds")
    last = float(np.mean(trained.losses[-10:]))
    print(f"Loss of a pair: {trained.losses[0]:.3f} at first, {last:.3f} in the end")
    vectors = np.asarray(trained.params["words"])
    if config.save:
        save(config, corpus, vectors)
    if config.plot:
        draw(config, corpus, trained, vectors)
    _output.print_neighbours(corpus, vectors)
    if config.timing:
        print_timing(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo with command-line arguments; returns the exit code."""
    try:
        run(_options.parse(argv))
    except UserError as e:
        print(f"sparsejax.demo: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sparsejax.demo: interrupted before the end", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output is gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0
