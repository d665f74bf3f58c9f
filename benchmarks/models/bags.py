"""Bags of words, as fastText classifies (Joulin et al., 2017): 81,920 ids, Adagrad."""

import jax.numpy as jnp
import numpy as np
import optax


WORDS, DIM, TEXTS, LENGTH, LABELS = 1_000_000, 100, 4_096, 20, 16


def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The vectors of words, and a linear layer."""
    return {
        "words": 0.1 * rng.standard_normal((WORDS, DIM), np.float32),
        "kernel": rng.standard_normal((DIM, LABELS), np.float32) / DIM**0.5,
        "bias": np.zeros(LABELS, np.float32),
    }


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Texts of up to 20 words by Zipf's law, and labels."""
    ids = (WORDS ** rng.random((TEXTS, LENGTH)) - 1).astype(np.int32)
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, (TEXTS, 1))
    weights = (np.arange(LENGTH) < lengths) / lengths
    labels = rng.integers(0, LABELS, TEXTS, np.int32)
    return {"ids": ids, "weights": weights.astype(np.float32), "labels": labels}


def loss(params, batch, read):
    """Mean cross entropy of a linear layer on the mean of a text's words."""
    rows = read(params["words"], batch["ids"])
    means = jnp.sum(rows * batch["weights"][..., None], axis=1)
    logits = means @ params["kernel"] + params["bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return jnp.mean(losses)


def optimizer() -> optax.GradientTransformation:
    return optax.adagrad(0.1)
