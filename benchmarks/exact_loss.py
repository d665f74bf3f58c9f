"""Dense training at sparse cost: `exact(tx)` beside `tx` on dense gradients and `lazy`.

Word vectors are trained on a text (skip-grams with negative samples), with the same
batches several times: by optax on dense gradients, by `sparsejax.optim.exact`, and by
`sparsejax.optim.lazy`. Printed is how far the last two are from the first. For a
yardstick, dense and exact training are repeated in float64: the distance of dense
training in float32, and of exact training without rounding.

    python -m benchmarks exact_loss --text book.txt.gz --out exact_adam.png
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj
from benchmarks import timing
from examples import word2vec


NEGATIVES, WINDOW, HELD_OUT = 5, 5, 20_000


class Training(NamedTuple):
    """The loss of each step, held-out losses, and all weights in the end."""

    losses: np.ndarray
    held_out: np.ndarray
    weights: np.ndarray


def optimizers(steps: int, rate: float) -> dict[str, Any]:
    """The optimizers that are compared."""
    cosine = optax.cosine_decay_schedule(rate, steps)
    return {
        "adam": optax.adam(rate),
        "adamw, cosine": optax.adamw(cosine, weight_decay=0.1),
        "momentum": optax.sgd(20 * rate, momentum=0.9),
    }


def loss_fn(params: Any, ids: Any) -> jax.Array:
    """The loss of a word `ids[:, 0]`, a word near it, and words drawn at random."""
    word = sj.lookup(params["in"], ids[:, 0], mode="clip")
    others = sj.lookup(params["out"], ids[:, 1:], mode="clip")
    logits = jnp.einsum("bd,bkd->bk", word, others)
    near = jnp.zeros_like(logits).at[:, 0].set(1)
    return jnp.mean(jnp.sum(optax.sigmoid_binary_cross_entropy(logits, near), axis=1))


def near_pairs(tokens: Any, counts: Any, rng: np.random.Generator) -> np.ndarray:
    """All pairs of neighbours, shuffled, after frequent words were thinned out."""
    rarity = 1e-4 * np.sum(counts) / counts
    kept = tokens[rng.random(tokens.size) < (np.sqrt(rarity) + rarity)[tokens]]
    reach, pairs = rng.integers(1, WINDOW + 1, kept.size), []  # near words count more
    for distance in range(1, WINDOW + 1):
        both = np.stack([kept[:-distance], kept[distance:]], axis=1)
        pairs.append(both[reach[:-distance] >= distance])
        pairs.append(both[reach[distance:] >= distance, ::-1])
    return rng.permutation(np.concatenate(pairs))


def skip_grams(args: argparse.Namespace) -> tuple[Any, np.ndarray, np.ndarray]:
    """Parameters, batches, and pairs of the last tenth of the text, held out."""
    words, counts, ids = word2vec.read_corpus(args.text, 2)
    rng = np.random.default_rng(0)
    sampler = sj.losses.NegativeSampler.from_counts(counts)

    def with_negatives(tokens, count):
        pairs = np.resize(near_pairs(tokens, counts, rng), (count, 2))
        drawn = sampler.sample(jax.random.key(count), (count, NEGATIVES)).ids
        return np.concatenate([pairs, drawn], axis=1)

    cut, shape = ids.size * 9 // 10, (len(words), args.dim)
    batches = with_negatives(ids[:cut], args.steps * args.batch)
    params = {
        "in": (rng.random(shape, np.float32) - 0.5) / args.dim,
        "out": np.zeros(shape, np.float32),
    }
    batches = batches.reshape(args.steps, args.batch, 2 + NEGATIVES)
    return params, batches, with_negatives(ids[cut:], HELD_OUT)


def train(data: Any, tx: Any, kind: str, every: int) -> Training:
    """Trains by one of the three ways."""
    params, batches, held_out = jax.tree.map(jnp.asarray, data)
    if kind != "dense":
        tx = getattr(sj.optim, kind)(tx)

    def step(carry, batch):
        params, state = carry
        if kind == "exact":
            both = sj.optim.exact_value_and_grad(loss_fn, tx, tables=True)
            (loss, grads), params, state = both(params, state, batch)
        elif kind == "lazy":
            loss, grads = sj.value_and_grad(loss_fn, tables=True)(params, batch)
        else:
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    @functools.partial(jax.jit, donate_argnums=0)
    def run(carry, batches):
        return jax.lax.scan(step, carry, batches)

    @jax.jit
    def evaluate(carry):
        params = tx.flush(*carry)[0] if kind == "exact" else carry[0]
        return loss_fn(params, held_out), params

    carry = params, jax.jit(tx.init)(params)
    losses, held = [], [evaluate(carry)[0]]
    for first in range(0, len(batches), every):
        carry, some = run(carry, batches[first : first + every])
        losses.append(some)
        held.append(evaluate(carry)[0])
    weights = [x.ravel() for x in jax.tree.leaves(evaluate(carry)[1])]
    parts = np.concatenate(losses), np.array(held), np.concatenate(weights)
    return Training(*(x.astype(np.float64) for x in parts))


def compare(data: Any, tx: Any, every: int) -> dict[str, Training]:
    """Trains in all ways, and the first two again in float64."""
    kinds = ("dense", "exact", "lazy")
    results = {kind: train(data, tx, kind, every) for kind in kinds}
    wide = lambda x: x.astype(np.float64) if x.dtype == np.float32 else x
    with jax.enable_x64(True):
        wider = jax.tree.map(wide, data)
        for kind in kinds[:2]:
            results[f"{kind}, float64"] = train(wider, tx, kind, every)
    return results


def plot(results: dict[str, Training], every: int, path: str, title: str) -> None:
    """Held-out losses, and how far they are from the losses of dense training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    figure.suptitle(title, fontsize=10)
    left, right = figure.subplots(1, 2)
    dense = results["dense"].held_out
    x = np.arange(len(dense)) * every
    styles = {"dense": ("C0-", 5), "exact": ("C1--", 2.2), "lazy": ("C2-", 1.8)}
    for kind, (style, width) in styles.items():
        loss, label = results[kind].held_out, f"{kind} Adam"
        left.plot(
            x, loss, style, label=label, linewidth=width, alpha=min(1.0, 1.8 / width)
        )
    left.set(xlabel="step", ylabel="held-out loss")
    distances = {"lazy": "C2-", "exact": "C1--", "dense, float64": "k:"}
    for kind, style in distances.items():
        away = np.abs(results[kind].held_out - dense) / dense
        right.plot(x, np.maximum(away, 1e-9), style, label=f"Adam: {kind}")
    right.set(xlabel="step", ylabel="distance from dense Adam, relative", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=80)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains with each optimizer, and prints a line for each way."""
    parser = timing.parser_of("exact_loss", __doc__)
    parser.add_argument("--text", metavar="FILE", help="default: Python's help texts")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--every", type=int, default=50, help="steps between losses")
    parser.add_argument("--out", metavar="FILE.png", help="draws held-out losses, Adam")
    args = parser.parse_args(argv)
    data = skip_grams(args)
    title = f"skip-grams, {len(data[0]['in']):,} words"
    print(f"{title}, {args.steps} steps; relative distances")
    print(f"{'optimizer':50}  losses   weights    held out")
    for name, tx in optimizers(args.steps, args.rate).items():
        results = compare(data, tx, args.every)
        for kind, result in results.items():
            other = "dense, float64" if kind == "exact, float64" else "dense"
            base = results[other]
            losses = np.max(np.abs(result.losses - base.losses) / base.losses)
            weights = np.linalg.norm(result.weights - base.weights)
            print(
                f"{name:15}{kind:15} from {other:15}{losses:>8.1e} "
                f"{weights / np.linalg.norm(base.weights):>9.1e}"
                f"{result.held_out[-1]:>12.6f}",
                flush=True,
            )
        if args.out and name == "adam":
            plot(results, args.every, args.out, f"{title}, {args.batch} pairs a step")
    return 0
