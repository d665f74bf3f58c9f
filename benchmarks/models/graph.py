"""GraphSAGE (Hamilton et al., 2017), sampled neighbours: 62,464 rows of 64, Adagrad."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


NODES, DIM, HIDDEN, LABELS = 1_000_000, 64, 128, 40
BATCH, FIRST, SECOND = 1_024, 10, 5


def make(rng: np.random.Generator) -> dict[str, object]:
    """Vectors of nodes, and two layers of a mean aggregator."""
    normal = lambda *shape: 0.1 * rng.standard_normal(shape, np.float32)
    layer = lambda n, m: {"kernel": normal(n, m), "bias": np.zeros(m, np.float32)}
    return {
        "nodes": normal(NODES, DIM),
        "inner": layer(2 * DIM, HIDDEN),
        "outer": layer(2 * HIDDEN, LABELS),
    }


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Nodes, 10 neighbours of each, 5 neighbours of those; hubs by Zipf's law."""
    nodes = lambda *shape: (NODES ** rng.random(shape) - 1).astype(np.int32)
    return {
        "node": rng.integers(0, NODES, BATCH, np.int32),
        "neighbour": nodes(BATCH, FIRST),
        "second": nodes(BATCH, FIRST, SECOND),
        "label": rng.integers(0, LABELS, BATCH, np.int32),
    }


def loss(params, batch, read):
    """Mean cross entropy of the nodes' labels."""

    def aggregate(name, own, neighbours):
        layer = params[name]
        x = jnp.concatenate([own, jnp.mean(neighbours, axis=-2)], axis=-1)
        return x @ layer["kernel"] + layer["bias"]

    nodes = params["nodes"]
    node, first = read(nodes, batch["node"]), read(nodes, batch["neighbour"])
    second = read(nodes, batch["second"])
    inner = jax.nn.relu(aggregate("inner", first, second))
    own = jax.nn.relu(aggregate("inner", node, first))
    logits = aggregate("outer", own, inner)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jnp.mean(losses)


def optimizer() -> optax.GradientTransformation:
    return optax.adagrad(0.05)
