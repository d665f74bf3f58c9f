"""DistMult (Yang et al., 2015) on corrupted triples: 16,384 rows of 128, Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


ENTITIES, RELATIONS, DIM, TRIPLES = 1_000_000, 500, 128, 4_096


def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The vectors of entities and of relations."""
    normal = lambda n: 0.3 * rng.standard_normal((n, DIM), np.float32)
    return {"entities": normal(ENTITIES), "relations": normal(RELATIONS)}


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Triples, and an entity in place of each head and of each tail."""
    draw = lambda n: rng.integers(0, n, TRIPLES, np.int32)
    return {
        "head": draw(ENTITIES),
        "relation": draw(RELATIONS),
        "tail": draw(ENTITIES),
        "other_head": draw(ENTITIES),
        "other_tail": draw(ENTITIES),
    }


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


def optimizer() -> optax.GradientTransformation:
    return optax.adam(1e-3)
