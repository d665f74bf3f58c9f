"""ten_tables.py with SGD."""

import optax

from benchmarks.models.ten_tables import batches, loss, make


__all__ = ["batches", "loss", "make", "optimizer"]


def optimizer() -> optax.GradientTransformation:
    return optax.sgd(0.01)
