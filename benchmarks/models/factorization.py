"""Matrix factorization with biases, BPR (Rendle et al., 2009): 49,152 rows, Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models import normal, zipf


USERS, ITEMS, DIM, BATCH = 1_000_000, 500_000, 64, 8_192
tx = optax.adam(1e-3)


def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Vectors and biases of users and items."""
    return {
        "users": normal(rng, USERS, DIM),
        "items": normal(rng, ITEMS, DIM),
        "user_bias": np.zeros((USERS, 1), np.float32),
        "item_bias": np.zeros((ITEMS, 1), np.float32),
    }


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Users, an item that each chose, and one that it did not."""
    return {
        "user": rng.integers(0, USERS, BATCH, np.int32),
        "chosen": zipf(rng, ITEMS, BATCH),
        "other": rng.integers(0, ITEMS, BATCH, np.int32),
    }


def loss(params, batch, read):
    """The mean of -log sigmoid(score of the chosen item - score of the other one)."""
    user = read(params["users"], batch["user"])
    bias = read(params["user_bias"], batch["user"])[:, 0]

    def score(item):
        rows = read(params["items"], item)
        return jnp.sum(user * rows, axis=-1) + read(params["item_bias"], item)[:, 0]

    chosen, other = score(batch["chosen"]), score(batch["other"])
    # The bias of a user cancels in BPR; in the penalty it does not.
    return -jnp.mean(jax.nn.log_sigmoid(chosen - other)) + 1e-4 * jnp.mean(bias**2)
