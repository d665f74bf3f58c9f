"""Transformers with sampled softmax, Adam: SASRec, and a small language model."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models import (
    Model,
    apply_dense,
    dense,
    normal,
    sampled_cross_entropy,
    zipf,
)


class Sizes(NamedTuple):
    rows: int
    dim: int
    heads: int
    blocks: int
    batch: int
    length: int
    negatives: int
    has_output: bool  # a table of its own, not tied to the input


# Kang and McAuley, 2018: 13,312 rows of 64.
SASREC = Sizes(500_000, 64, 2, 1, 128, 50, 512, has_output=False)
# 6,144 rows of 256.
LANGUAGE = Sizes(200_000, 256, 4, 2, 16, 64, 4_096, has_output=True)


def make(sizes: Sizes, rng: np.random.Generator) -> dict[str, object]:
    """Vectors of items, as input and perhaps as output, and of places; the blocks."""
    dim, scale = sizes.dim, 0.05 if sizes.has_output else 0.1
    widths = {"qkv": (dim, 3 * dim), "out": (dim, dim)}
    widths |= {"up": (dim, 4 * dim), "down": (4 * dim, dim)}
    params = {
        "items": normal(rng, sizes.rows, dim, scale=scale),
        "places": normal(rng, sizes.length, dim, scale=scale),
        "blocks": [
            {name: dense(rng, *shape, scale) for name, shape in widths.items()}
            for _ in range(sizes.blocks)
        ],
    }
    if sizes.has_output:
        params["output"] = normal(rng, sizes.rows, dim, scale=scale)
    return params


def batches(sizes: Sizes, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Sequences by Zipf's law, the item after each place, items drawn for all."""
    ids = zipf(rng, sizes.rows, sizes.batch, sizes.length + 1)
    drawn = zipf(rng, sizes.rows, sizes.negatives)
    return {"item": ids[:, :-1], "next": ids[:, 1:].reshape(-1), "negatives": drawn}


def loss(sizes: Sizes, params, batch, read):
    """The loss of the next item."""
    x = read(params["items"], batch["item"]) + params["places"]
    for layers in params["blocks"]:
        x = block(layers, x, sizes.heads)
    x = normalize(x).reshape(-1, sizes.dim)
    output = params.get("output", params["items"])
    following, negatives = read(output, batch["next"]), read(output, batch["negatives"])
    return sampled_cross_entropy(x, following, negatives)


def block(layers, x, heads):
    """Causal self-attention and a feed-forward layer, each with a residual."""
    cut = lambda x: x.reshape(*x.shape[:2], heads, -1)
    qkv = apply_dense(layers["qkv"], normalize(x))
    q, k, v = map(cut, jnp.split(qkv, 3, axis=-1))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + apply_dense(layers["out"], mixed.reshape(x.shape))
    up = jax.nn.relu(apply_dense(layers["up"], normalize(x)))
    return x + apply_dense(layers["down"], up)


def normalize(x):
    """Zero mean and unit variance of each vector."""
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5)


def model(sizes: Sizes) -> Model:
    of = lambda part: functools.partial(part, sizes)
    return Model(of(make), of(batches), of(loss), optax.adam(1e-3))
