"""GraphSAGE (Hamilton et al., 2017), sampled neighbours: 62,464 rows of 64, Adagrad."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models import apply_dense, cross_entropy, dense, normal, zipf


NODES, DIM, HIDDEN, LABELS = 1_000_000, 64, 128, 40
BATCH, FIRST, SECOND = 1_024, 10, 5
tx = optax.adagrad(0.05)


def make(rng: np.random.Generator) -> dict[str, object]:
    """Vectors of nodes, and two layers of a mean aggregator."""
    return {
        "nodes": normal(rng, NODES, DIM),
        "inner": dense(rng, 2 * DIM, HIDDEN),
        "outer": dense(rng, 2 * HIDDEN, LABELS),
    }


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Nodes, 10 neighbours of each, 5 neighbours of those; hubs by Zipf's law."""
    return {
        "node": rng.integers(0, NODES, BATCH, np.int32),
        "neighbour": zipf(rng, NODES, BATCH, FIRST),
        "second": zipf(rng, NODES, BATCH, FIRST, SECOND),
        "label": rng.integers(0, LABELS, BATCH, np.int32),
    }


def loss(params, batch, read):
    """Mean cross entropy of the nodes' labels."""

    def aggregate(name, own, neighbours):
        x = jnp.concatenate([own, jnp.mean(neighbours, axis=-2)], axis=-1)
        return apply_dense(params[name], x)

    nodes = params["nodes"]
    node, first = read(nodes, batch["node"]), read(nodes, batch["neighbour"])
    second = read(nodes, batch["second"])
    inner = jax.nn.relu(aggregate("inner", first, second))
    own = jax.nn.relu(aggregate("inner", node, first))
    return cross_entropy(aggregate("outer", own, inner), batch["label"])
