"""Two towers with sampled softmax (Yi et al., 2019): 9,216 rows of 64, Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models import apply_dense, dense, normal, sampled_cross_entropy, zipf


USERS, ITEMS, CATEGORIES, DIM = 1_000_000, 500_000, 1_000, 64
BATCH, NEGATIVES = 4_096, 1_024
tx = optax.adam(1e-3)


def make(rng: np.random.Generator) -> dict[str, object]:
    """Vectors of users, items and categories, and a layer in each tower."""
    return {
        "users": normal(rng, USERS, DIM),
        "items": normal(rng, ITEMS, DIM),
        "categories": normal(rng, CATEGORIES, DIM),
        "user_tower": dense(rng, DIM, DIM),
        "item_tower": dense(rng, 2 * DIM, DIM),
    }


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Users, the item that each chose, items drawn by their frequency for all."""
    item = zipf(rng, ITEMS, BATCH + NEGATIVES)
    return {
        "user": rng.integers(0, USERS, BATCH, np.int32),
        "item": item,
        "category": item % CATEGORIES,
    }


def loss(params, batch, read):
    """Mean cross entropy of the chosen item among it and the drawn ones."""
    rows = read(params["users"], batch["user"])
    user = jax.nn.relu(apply_dense(params["user_tower"], rows))
    rows = read(params["items"], batch["item"])
    category = read(params["categories"], batch["category"])
    both = jnp.concatenate([rows, category], axis=1)
    item = jax.nn.relu(apply_dense(params["item_tower"], both))
    return sampled_cross_entropy(user, item[:BATCH], item[BATCH:])
