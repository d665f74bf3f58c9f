"""A small transformer with a vocabulary of 200,000: 6,144 rows of 256, Adam."""

import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models.transformer import block, make_block, normalize


WORDS, DIM, HEADS, LAYERS = 200_000, 256, 4, 2
BATCH, LENGTH, NEGATIVES = 16, 64, 4_096


def make(rng: np.random.Generator) -> dict[str, object]:
    """Vectors of words as input and as output, of places, and the layers."""
    normal = lambda *shape: 0.05 * rng.standard_normal(shape, np.float32)
    layer = lambda n, m: {"kernel": normal(n, m), "bias": np.zeros(m, np.float32)}
    return {
        "words": normal(WORDS, DIM),
        "places": normal(LENGTH, DIM),
        "blocks": [make_block(layer, DIM) for _ in range(LAYERS)],
        "output": normal(WORDS, DIM),
    }


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Texts by Zipf's law, the word after each, words drawn for all."""
    words = lambda *shape: (WORDS ** rng.random(shape) - 1).astype(np.int32)
    text = words(BATCH, LENGTH + 1)
    return {
        "word": text[:, :-1],
        "next": text[:, 1:].reshape(-1),
        "negatives": words(NEGATIVES),
    }


def loss(params, batch, read):
    """Mean cross entropy of the next word among it and the drawn ones."""
    x = read(params["words"], batch["word"]) + params["places"]
    for layers in params["blocks"]:
        x = block(layers, x, HEADS)
    x = normalize(x).reshape(-1, DIM)
    following = read(params["output"], batch["next"])
    negatives = read(params["output"], batch["negatives"])
    positive = jnp.sum(x * following, axis=1, keepdims=True)
    logits = jnp.concatenate([positive, x @ negatives.T], axis=1)
    labels = jnp.zeros(BATCH * LENGTH, jnp.int32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def optimizer() -> optax.GradientTransformation:
    return optax.adam(1e-3)
