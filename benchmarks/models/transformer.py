"""A block of a transformer, which sequence.py and language.py share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


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
