"""A block of a transformer, which sequence.py and language.py share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def make_block(layer: Callable[[int, int], Any], dim: int) -> dict[str, Any]:
    """The layers of a block, each made by `layer(inputs, outputs)`."""
    return {
        "qkv": layer(dim, 3 * dim),
        "out": layer(dim, dim),
        "up": layer(dim, 4 * dim),
        "down": layer(4 * dim, dim),
    }


def block(params, x, heads):
    """Causal self-attention and a feed-forward layer, each with a residual."""
    dense = lambda name, x: x @ params[name]["kernel"] + params[name]["bias"]
    cut = lambda x: x.reshape(*x.shape[:2], heads, -1)
    q, k, v = map(cut, jnp.split(dense("qkv", normalize(x)), 3, axis=-1))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + dense("out", mixed.reshape(x.shape))
    return x + dense("down", jax.nn.relu(dense("up", normalize(x))))


def normalize(x):
    """Zero mean and unit variance of each vector."""
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5)


def draw(rng, count, shape, negatives):
    """Sequences by Zipf's law, the one after each place, some drawn for all."""
    by_zipf = lambda *shape: (count ** rng.random(shape) - 1).astype(np.int32)
    ids = by_zipf(shape[0], shape[1] + 1)
    return ids[:, :-1], ids[:, 1:].reshape(-1), by_zipf(negatives)


def sampled_loss(x, table, batch, read):
    """Mean cross entropy of the one that follows among it and the drawn ones."""
    x = normalize(x).reshape(-1, x.shape[-1])
    following, negatives = read(table, batch["next"]), read(table, batch["negatives"])
    positive = jnp.sum(x * following, axis=1, keepdims=True)
    logits = jnp.concatenate([positive, x @ negatives.T], axis=1)
    labels = jnp.zeros(len(x), jnp.int32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
