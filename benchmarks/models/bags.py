"""Bags of words, as fastText classifies (Joulin et al., 2017): 81,920 ids, Adagrad."""

import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models import apply_dense, cross_entropy, dense, normal, zipf


WORDS, DIM, TEXTS, LENGTH, LABELS = 1_000_000, 100, 4_096, 20, 16
tx = optax.adagrad(0.1)


def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The vectors of words, and a linear layer."""
    return {"words": normal(rng, WORDS, DIM), **dense(rng, DIM, LABELS, DIM**-0.5)}


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Texts of up to 20 words by Zipf's law, and labels."""
    ids = zipf(rng, WORDS, TEXTS, LENGTH)
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, (TEXTS, 1))
    weights = (np.arange(LENGTH) < lengths) / lengths
    labels = rng.integers(0, LABELS, TEXTS, np.int32)
    return {"ids": ids, "weights": weights.astype(np.float32), "labels": labels}


def loss(params, batch, read):
    """Mean cross entropy of a linear layer on the mean of a text's words."""
    rows = read(params["words"], batch["ids"])
    means = jnp.sum(rows * batch["weights"][..., None], axis=1)
    return cross_entropy(apply_dense(params, means), batch["labels"])
