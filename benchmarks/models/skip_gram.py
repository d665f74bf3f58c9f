"""Skip-gram with negative sampling (Mikolov et al., 2013): 57,344 rows of 100, SGD."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


WORDS, DIM, PAIRS, NEGATIVES = 400_000, 100, 8_192, 5
tx = optax.sgd(0.025)


def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A table of vectors for centers, one for contexts."""
    centers = rng.uniform(-0.5, 0.5, (WORDS, DIM)) / DIM
    contexts = np.zeros((WORDS, DIM), np.float32)
    return {"centers": centers.astype(np.float32), "contexts": contexts}


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Pairs of words by Zipf's law, negatives by its power of 3/4."""
    words = lambda shape, power: (WORDS ** rng.random(shape) ** power - 1).astype("i4")
    return {
        "center": words(PAIRS, 1.0),
        "context": words(PAIRS, 1.0),
        "negatives": words((PAIRS, NEGATIVES), 0.75),
    }


def loss(params, batch, read):
    """The mean over pairs of the logistic losses of one context and its negatives."""
    center = read(params["centers"], batch["center"])
    context = read(params["contexts"], batch["context"])
    negatives = read(params["contexts"], batch["negatives"])
    positive = jnp.sum(center * context, axis=-1)
    negative = jnp.einsum("bd,bkd->bk", center, negatives)
    return -jnp.mean(
        jax.nn.log_sigmoid(positive) + jnp.sum(jax.nn.log_sigmoid(-negative), axis=-1)
    )
