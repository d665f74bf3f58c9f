"""Two towers with sampled softmax (Yi et al., 2019): 9,216 rows of 64, Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


USERS, ITEMS, CATEGORIES, DIM = 1_000_000, 500_000, 1_000, 64
BATCH, NEGATIVES = 4_096, 1_024


def make(rng: np.random.Generator) -> dict[str, object]:
    """Vectors of users, items and categories, and a layer in each tower."""
    normal = lambda *shape: 0.1 * rng.standard_normal(shape, np.float32)
    layer = lambda n: {"kernel": normal(n, DIM), "bias": np.zeros(DIM, np.float32)}
    return {
        "users": normal(USERS, DIM),
        "items": normal(ITEMS, DIM),
        "categories": normal(CATEGORIES, DIM),
        "user_tower": layer(DIM),
        "item_tower": layer(2 * DIM),
    }


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Users, the item that each chose, items drawn by their frequency for all."""
    items = lambda n: (ITEMS ** rng.random(n) - 1).astype(np.int32)
    item = items(BATCH + NEGATIVES)
    return {
        "user": rng.integers(0, USERS, BATCH, np.int32),
        "item": item,
        "category": item % CATEGORIES,
    }


def loss(params, batch, read):
    """Mean cross entropy of the chosen item among it and the drawn ones."""

    def tower(name, x):
        layer = params[name]
        return jax.nn.relu(x @ layer["kernel"] + layer["bias"])

    user = tower("user_tower", read(params["users"], batch["user"]))
    rows = read(params["items"], batch["item"])
    category = read(params["categories"], batch["category"])
    item = tower("item_tower", jnp.concatenate([rows, category], axis=1))
    chosen, drawn = item[:BATCH], item[BATCH:]
    positive = jnp.sum(user * chosen, axis=1, keepdims=True)
    logits = jnp.concatenate([positive, user @ drawn.T], axis=1)
    labels = jnp.zeros(BATCH, jnp.int32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def optimizer() -> optax.GradientTransformation:
    return optax.adam(1e-3)
