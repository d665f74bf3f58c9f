"""Lowerings for CUDA, where adding floats to equal rows takes atomics."""

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._lookup.lowerings import xla
from sparsejax._rows import indexing, merge_cuda


def add_bags(
    sums: jax.Array,
    ids: jax.Array,
    *rest: jax.Array,
    height: int,
    spec: xla.BagSpec,
) -> jax.Array:
    """Computes `xla.add_bags` in a fixed order: merges duplicates first."""
    rows = xla.row_cotangents(sums, ids, *rest, spec=spec)
    rows = indexing.merge_axes(rows, ids.ndim)
    empty = _arguments.scalar(height, ids)
    ids = jnp.where(indexing.in_range(ids, height), ids, empty).reshape(-1)
    distinct, at, total, _ = merge_cuda.merge_rows(ids, rows, height)
    zeros = jnp.zeros((height, *sums.shape[1:]), sums.dtype)
    total = indexing.take_rows(total, at)
    return indexing.set_distinct_rows(zeros, distinct, total)
