"""DLRM (Naumov et al., 2019): 26 tables, 4,096 rows of each, Adagrad."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models import apply_dense, dense, normal


# Distinct values of the 26 categorical columns of the Criteo Kaggle data.
CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
NUM_DENSE = 13
DIM, BATCH = 16, 4_096
BOTTOM = (NUM_DENSE, 512, 256, 64, DIM)
TOP = (DIM + 27 * 26 // 2, 512, 256, 1)
tx = optax.adagrad(0.02)


def table_rows(cap: int) -> tuple[int, ...]:
    """The sizes of the tables, none larger than `cap`."""
    return tuple(min(n, cap) for n in CARDINALITIES)


ROWS = table_rows(1_000_000)


def make(rng: np.random.Generator) -> dict[str, object]:
    """An array for each table, and the layers of both MLPs."""
    mlp = lambda widths: [dense(rng, n, m, n**-0.5) for n, m in zip(widths, widths[1:])]
    tables = [normal(rng, n, DIM) for n in ROWS]
    return {"tables": tables, "bottom": mlp(BOTTOM), "top": mlp(TOP)}


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Dense features, ids by Zipf's law, and clicks."""
    ranks = np.stack([n ** rng.random(BATCH) - 1 for n in ROWS]).astype(np.int64)
    ids = ranks * 7_368_787 % np.array(ROWS)[:, None]
    return {
        "dense": rng.standard_normal((BATCH, NUM_DENSE), np.float32),
        "ids": ids.astype(np.int32),
        "clicked": (rng.random(BATCH) < 0.25).astype(np.float32),
    }


def loss(params, batch, read):
    """Mean log-loss."""

    def mlp(layers, x):
        for k, layer in enumerate(layers):
            x = apply_dense(layer, jax.nn.relu(x) if k else x)
        return x

    x = jax.nn.relu(mlp(params["bottom"], batch["dense"]))
    rows = [read(table, ids) for table, ids in zip(params["tables"], batch["ids"])]
    vectors = jnp.stack([x, *rows], axis=1)
    dots = jnp.einsum("bid,bjd->bij", vectors, vectors)
    i, j = np.tril_indices(len(ROWS) + 1, -1)
    logits = mlp(params["top"], jnp.concatenate([x, dots[:, i, j]], axis=1))[:, 0]
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]))
