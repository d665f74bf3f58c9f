"""Ten tables on a GPU, at the sizes of NVIDIA's recsys-examples (dynamicemb), Adam.

A step reads 1,048,570 ids, about 350,000 distinct, of ten tables of 838,860 rows of 128
numbers. There is no model: the loss is the sum of squares of what was read.
"""

import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models import Model


TABLES, ROWS, DIM, IDS, ALPHA = 10, 838_860, 128, 104_857, 1.03


def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The tables."""
    return {f"t{k}": rng.random((ROWS, DIM), np.float32) - 0.5 for k in range(TABLES)}


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Ids by a power law, of ranks that lie anywhere in the tables."""
    u, power = rng.random((TABLES, IDS)), 1 - ALPHA
    ranks = ((1 - u * (1 - ROWS**power)) ** (1 / power)).astype(np.int64) - 1
    ids = np.minimum(ranks, ROWS - 1) * 7_368_787 % ROWS
    return {f"t{k}": x for k, x in enumerate(ids.astype(np.int32))}


def loss(params, batch, read):
    """The mean over ids of half the squared norm of their rows."""
    rows = [read(params[name], batch[name]) for name in params]
    return sum(jnp.sum(jnp.square(x)) for x in rows) / (2 * IDS)


ADAM = Model(make, batches, loss, optax.adam(1e-3))
SGD = Model(make, batches, loss, optax.sgd(0.01))
