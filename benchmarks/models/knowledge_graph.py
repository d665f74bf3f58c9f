"""DistMult (Yang et al., 2015) on corrupted triples: 16,384 rows of 128, Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models import normal


ENTITIES, RELATIONS, DIM, TRIPLES = 1_000_000, 500, 128, 4_096
DRAWN = {"head": ENTITIES, "relation": RELATIONS, "tail": ENTITIES}
DRAWN |= {"other_head": ENTITIES, "other_tail": ENTITIES}
tx = optax.adam(1e-3)


def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The vectors of entities and of relations."""
    sizes = {"entities": ENTITIES, "relations": RELATIONS}
    return {name: normal(rng, n, DIM, scale=0.3) for name, n in sizes.items()}


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Triples, and an entity in place of each head and of each tail."""
    return {name: rng.integers(0, n, TRIPLES, np.int32) for name, n in DRAWN.items()}


def loss(params, batch, read):
    """The mean logistic loss of true triples and of corrupted ones."""
    entity = lambda name: read(params["entities"], batch[name])
    head, tail = entity("head"), entity("tail")
    relation = read(params["relations"], batch["relation"])
    score = lambda h, t: jnp.sum(h * relation * t, axis=-1)
    return -jnp.mean(
        jax.nn.log_sigmoid(score(head, tail))
        + jax.nn.log_sigmoid(-score(entity("other_head"), tail))
        + jax.nn.log_sigmoid(-score(head, entity("other_tail")))
    )
