"""Dense training at sparse cost: `exact(tx)` beside `tx` on dense gradients and `lazy`.

Word vectors are trained on a text (skip-grams with negative samples), with the same
batches several times: by optax on dense gradients, by `sparsejax.optim.exact`, and by
`sparsejax.optim.lazy`. Told is how far the last two are from the first. For a
yardstick, dense and exact training are repeated in float64: what float32 is off by, and
what exact is off by without rounding.

    python -m benchmarks exact_loss --text book.txt.gz --out exact_adam.png
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj
from examples import word2vec


KINDS = ("dense", "exact", "lazy")
NEGATIVES, WINDOW = 5, 5


class Task(NamedTuple):
    """A loss, where its parameters start, batches, and what is held out."""

    name: str
    loss: Callable[..., jax.Array]
    params: Any
    batches: Any
    held_out: Any


def optimizers(steps: int, rate: float) -> dict[str, Any]:
    """What is compared."""
    cosine = optax.cosine_decay_schedule(rate, steps)
    return {
        "adam": optax.adam(rate),
        "adamw, cosine": optax.adamw(cosine, weight_decay=0.1),
        "momentum": optax.sgd(20 * rate, momentum=0.9),
    }


# ------------------------------------------------------------------ tasks


def skip_gram_loss(params: Any, ids: Any) -> jax.Array:
    """Of a word `ids[:, 0]`, one near it, and words drawn at random."""
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


def skip_grams(path: str | None, steps: int, batch: int, dim: int) -> Task:
    """Word vectors; the last tenth of the text is held out."""
    words, counts, ids = word2vec.read_corpus(path, 2)
    rng = np.random.default_rng(0)
    cut = ids.size * 9 // 10
    sampler = sj.losses.NegativeSampler.from_counts(counts)

    def with_negatives(tokens, count):
        pairs = near_pairs(tokens, counts, rng)
        pairs = np.resize(pairs, (count, 2))
        drawn = sampler.sample(jax.random.key(count), (count, NEGATIVES)).ids
        return np.concatenate([pairs, drawn], axis=1)

    train = with_negatives(ids[:cut], steps * batch)
    shape = (len(words), dim)
    params = {
        "in": (rng.random(shape, np.float32) - 0.5) / dim,
        "out": np.zeros(shape, np.float32),
    }
    return Task(
        f"skip-grams, {shape[0]:,} words",
        skip_gram_loss,
        params,
        train.reshape(steps, batch, 2 + NEGATIVES),
        with_negatives(ids[cut:], 20_000),
    )


# ------------------------------------------------------------------ training


def train(task: Task, tx: Any, kind: str, every: int) -> tuple[Any, Any, Any]:
    """Loss of each step, held-out losses, and the tables in the end."""
    tables = jax.tree.map(lambda x: np.ndim(x) > 1, task.params)
    lifted = {"exact": sj.optim.exact, "lazy": sj.optim.lazy}.get(kind, lambda tx: tx)(
        tx
    )

    def step(carry, batch):
        params, state = carry
        if kind == "exact":
            both = sj.optim.exact_value_and_grad(task.loss, lifted, tables=tables)
            (loss, grads), params, state = both(params, state, batch)
        elif kind == "lazy":
            both = sj.value_and_grad(task.loss, tables=tables)
            loss, grads = both(params, batch)
        else:
            loss, grads = jax.value_and_grad(task.loss)(params, batch)
        updates, state = lifted.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    @functools.partial(jax.jit, donate_argnums=0)
    def run(carry, batches):
        return jax.lax.scan(step, carry, batches)

    @jax.jit
    def evaluate(carry, held_out):
        params = lifted.flush(*carry)[0] if kind == "exact" else carry[0]
        return task.loss(params, held_out), params

    params = jax.tree.map(jnp.asarray, task.params)
    carry = params, jax.jit(lifted.init)(params)
    steps = len(jax.tree.leaves(task.batches)[0])
    held_out = jax.tree.map(jnp.asarray, task.held_out)
    losses, held = [], []
    for first in range(0, steps, every):
        held.append(float(evaluate(carry, held_out)[0]))
        chunk = jax.tree.map(
            lambda x, a=first: jnp.asarray(x[a : a + every]), task.batches
        )
        carry, some = run(carry, chunk)
        losses.append(np.asarray(some, np.float64))
    last, params = evaluate(carry, held_out)
    weights = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(params)]
    return (
        np.concatenate(losses),
        np.array([*held, float(last)]),
        np.concatenate(weights),
    )


def compare(task: Task, tx: Any, every: int) -> dict[str, Any]:
    """Trains in all ways, and dense in float64."""
    results = {kind: train(task, tx, kind, every) for kind in KINDS}
    with jax.enable_x64(True):
        wide = lambda x: x.astype(np.float64) if x.dtype == np.float32 else x
        wider = task._replace(
            params=jax.tree.map(wide, task.params),
            batches=jax.tree.map(wide, task.batches),
            held_out=jax.tree.map(wide, task.held_out),
        )
        results["dense, float64"] = train(wider, tx, "dense", every)
        results["exact, float64"] = train(wider, tx, "exact", every)
    return results


def distance(a: Any, b: Any) -> tuple[float, float]:
    """Of two trainings: the largest of the losses', and of the weights in the end."""
    losses = np.max(np.abs(a[0] - b[0]) / np.abs(b[0]))
    return float(losses), float(np.linalg.norm(a[2] - b[2]) / np.linalg.norm(b[2]))


# ------------------------------------------------------------------ showing


def plot(results: dict[str, Any], every: int, path: str, title: str) -> None:
    """Held-out losses, and how far they are from those of dense training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    figure.suptitle(title, fontsize=10)
    left, right = figure.subplots(1, 2)
    styles = {"dense": ("C0-", 5), "exact": ("C1--", 2.2), "lazy": ("C2-", 1.8)}
    x = np.arange(len(results["dense"][1])) * every
    for kind, (style, width) in styles.items():
        alpha = 0.35 if kind == "dense" else 1
        label = f"{kind} Adam"
        left.plot(x, results[kind][1], style, label=label, linewidth=width, alpha=alpha)
    left.set(xlabel="step", ylabel="held-out loss")
    left.legend()
    for kind in ("lazy", "exact"):
        away = np.abs(results[kind][1] - results["dense"][1]) / results["dense"][1]
        right.plot(x, np.maximum(away, 1e-9), styles[kind][0], label=f"{kind} Adam")
    away = (
        np.abs(results["dense, float64"][1] - results["dense"][1]) / results["dense"][1]
    )
    right.plot(x, np.maximum(away, 1e-9), "k:", label="dense Adam in float64")
    right.set(xlabel="step", ylabel="distance from dense Adam, relative", yscale="log")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks exact_loss", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--text", metavar="FILE", help="default: Python's help texts")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--every", type=int, default=50, help="steps between losses")
    parser.add_argument("--only", help="one of the optimizers")
    parser.add_argument("--out", metavar="FILE.png", help="draws held-out losses, Adam")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it."""
    args = parse(argv)
    task = skip_grams(args.text, args.steps, args.batch, args.dim)
    print(f"{task.name}, {args.steps} steps; relative distances")
    print(f"{'optimizer':50}  losses   weights    held out")
    for name, tx in optimizers(args.steps, args.rate).items():
        if args.only not in (None, name):
            continue
        results = compare(task, tx, args.every)
        for kind, result in results.items():
            other = "dense, float64" if kind == "exact, float64" else "dense"
            losses, weights = distance(result, results[other])
            print(
                f"{name:15}{kind:15} from {other:15}{losses:>8.1e} {weights:>9.1e}"
                f"{result[1][-1]:>12.6f}",
                flush=True,
            )
        if args.out and name == "adam":
            plot(
                results, args.every, args.out, f"{task.name}, {args.batch} pairs a step"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
