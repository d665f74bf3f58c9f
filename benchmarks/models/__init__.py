"""Training steps of whole models, each written as its users write it.

A file a model. It has

- `make(rng) -> params`: the parameters, NumPy arrays of real sizes;
- `batches(rng) -> dict`: one batch; the ids of every call differ;
- `loss(params, batch, read) -> scalar`: the model, where `read(table, ids)` is one of
  the ways in `READS`;
- `optimizer() -> optax.GradientTransformation`.

`python -m benchmarks models --help` times them; see `benchmarks/models/__main__.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import sparsejax as sj


NAMES = (
    "skip_gram",
    "factorization",
    "dlrm",
    "bags",
    "knowledge_graph",
    "two_towers",
    "sequence",
    "language",
    "graph",
)
# 12 GiB and more: for a GPU, not timed unless they are named.
LARGE = ("ten_tables", "ten_tables_sgd")


def _embed(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Reads rows by a layer of flax that holds the table."""
    rows, dim = table.shape
    layer = nnx.Embed(rows, dim, embedding_init=lambda *_: table, rngs=nnx.Rngs(0))
    return layer(ids)


# Every way of reading rows that the README names.
READS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "index": lambda table, ids: table[ids],
    "take": lambda table, ids: jnp.take(table, ids, axis=0),
    "lookup": sj.lookup,
    "nnx": _embed,
}
