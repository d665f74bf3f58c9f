"""SASRec (Kang and McAuley, 2018), one block: 13,312 rows of 64, Adam."""

import numpy as np
import optax

from benchmarks.models.transformer import block, draw, make_block, sampled_loss


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
    """Sequences of items, the item after each, items drawn for all."""
    drawn = draw(rng, ITEMS, (BATCH, LENGTH), NEGATIVES)
    return dict(zip(("item", "next", "negatives"), drawn))


def loss(params, batch, read):
    """The loss of the next item."""
    x = read(params["items"], batch["item"]) + params["places"]
    return sampled_loss(block(params, x, HEADS), params["items"], batch, read)


def optimizer() -> optax.GradientTransformation:
    return optax.adam(1e-3)
