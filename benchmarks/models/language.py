"""A small transformer with a vocabulary of 200,000: 6,144 rows of 256, Adam."""

import numpy as np
import optax

from benchmarks.models.transformer import block, draw, make_block, sampled_loss


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
    """Texts, the word after each, words drawn for all."""
    drawn = draw(rng, WORDS, (BATCH, LENGTH), NEGATIVES)
    return dict(zip(("word", "next", "negatives"), drawn))


def loss(params, batch, read):
    """The loss of the next word."""
    x = read(params["words"], batch["word"]) + params["places"]
    for layers in params["blocks"]:
        x = block(layers, x, HEADS)
    return sampled_loss(x, params["output"], batch, read)


def optimizer() -> optax.GradientTransformation:
    return optax.adam(1e-3)
