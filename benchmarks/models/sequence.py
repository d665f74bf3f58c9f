"""SASRec (Kang and McAuley, 2018), one block: 13,312 rows of 64, Adam."""

import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models.transformer import block, make_block, normalize


ITEMS, DIM, HEADS, BATCH, LENGTH, NEGATIVES = 500_000, 64, 2, 128, 50, 512


def make(rng: np.random.Generator) -> dict[str, object]:
    """Vectors of items and of places, and the layers of a block."""
    normal = lambda *shape: 0.1 * rng.standard_normal(shape, np.float32)
    layer = lambda n, m: {"kernel": normal(n, m), "bias": np.zeros(m, np.float32)}
    return {
        "items": normal(ITEMS, DIM),
        "places": normal(LENGTH, DIM),
        **make_block(layer, DIM),
    }


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Sequences of items by Zipf's law, the item after each, items drawn for all."""
    items = lambda *shape: (ITEMS ** rng.random(shape) - 1).astype(np.int32)
    sequence = items(BATCH, LENGTH + 1)
    return {
        "item": sequence[:, :-1],
        "next": sequence[:, 1:].reshape(-1),
        "negatives": items(NEGATIVES),
    }


def loss(params, batch, read):
    """Mean cross entropy of the next item among it and the drawn ones."""
    x = read(params["items"], batch["item"]) + params["places"]
    x = normalize(block(params, x, HEADS)).reshape(-1, DIM)
    following = read(params["items"], batch["next"])
    negatives = read(params["items"], batch["negatives"])
    positive = jnp.sum(x * following, axis=1, keepdims=True)
    logits = jnp.concatenate([positive, x @ negatives.T], axis=1)
    labels = jnp.zeros(BATCH * LENGTH, jnp.int32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def optimizer() -> optax.GradientTransformation:
    return optax.adam(1e-3)
