"""Training steps of whole models, each written as its users write it.

A file a model, `torch_side.py` for all of them in PyTorch. A model has

- `make(rng) -> params`: the parameters, NumPy arrays of real sizes;
- `batches(rng) -> dict`: one batch; the ids of every call differ;
- `loss(params, batch, read) -> scalar`: the model, where `read` is `table[ids]`, or
  returns rows that are constants;
- `tx`: its optimizer.

`python -m benchmarks models --help` times them. Below is what several models share.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax


class Model(NamedTuple):
    """A model that is not a file of its own."""

    make: Any
    batches: Any
    loss: Any
    tx: optax.GradientTransformation


def normal(rng: np.random.Generator, *shape: int, scale: float = 0.1) -> np.ndarray:
    """Normal numbers."""
    return scale * rng.standard_normal(shape, np.float32)


def dense(
    rng: np.random.Generator, inputs: int, outputs: int, scale: float = 0.1
) -> dict[str, np.ndarray]:
    """A dense layer: a kernel [inputs, outputs] and a bias."""
    kernel = normal(rng, inputs, outputs, scale=scale)
    return {"kernel": kernel, "bias": np.zeros(outputs, np.float32)}


def apply_dense(layer: dict[str, Any], x: Any) -> Any:
    return x @ layer["kernel"] + layer["bias"]


def zipf(rng: np.random.Generator, count: int, *shape: int) -> np.ndarray:
    """Ids by Zipf's law."""
    return (count ** rng.random(shape) - 1).astype(np.int32)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """The mean over examples."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def sampled_cross_entropy(queries: Any, positive: Any, negatives: Any) -> Any:
    """The loss of a row for each query, among it and rows that are drawn for all."""
    score = jnp.sum(queries * positive, axis=1, keepdims=True)
    logits = jnp.concatenate([score, queries @ negatives.T], axis=1)
    return cross_entropy(logits, jnp.zeros(len(queries), jnp.int32))
