"""What a trainer does to batches, pulled rows and gradients: sizes and scales."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import SelectedRows, is_selected_rows
from sparsejax._segments import SegmentTensor
from sparsejax.nn._matrix import Elements
from sparsejax.optim._lazy.norm import global_norm


_LEAST_CAPACITY = 8


def on_device(batch: Any, rooms: dict[int, int]) -> Any:
    """The batch with SegmentTensors for scipy's matrices.

    Args:
      batch: any tree.
      rooms: for each of its matrices the capacity so far; they grow by powers of two.
    """
    is_csr = lambda x: hasattr(x, "indptr") and hasattr(x, "tocsr")
    is_leaf = lambda x: is_csr(x) or isinstance(x, SegmentTensor)
    leaves, tree = jax.tree.flatten(batch, is_leaf=is_leaf)
    for i, leaf in enumerate(leaves):
        if is_csr(leaf):
            room = 1 << max(leaf.nnz - 1, 0).bit_length()
            rooms[i] = max(rooms.get(i, _LEAST_CAPACITY), room)
            leaves[i] = _as_segments(leaf.tocsr(), rooms[i])
    return tree.unflatten(leaves)


def copied(x: Any) -> jax.Array:
    """`x` as a JAX array that nobody else has."""
    return x.copy() if isinstance(x, jax.Array) else jnp.array(x)


def pad(rows: SelectedRows, capacity: int) -> SelectedRows:
    """The same rows and empty slots, `capacity` in all."""
    more = capacity - rows.capacity
    if more == 0:
        return rows
    ids = jnp.pad(
        rows.rows, (0, more), constant_values=_arguments.scalar(rows.height, rows.rows)
    )
    widths = [(0, more)] + [(0, 0)] * (rows.ndim - 1)
    return SelectedRows(ids, jnp.pad(rows.values, widths), rows.height)


def clip(grads: Any, max_norm: float) -> Any:
    """All gradients times `min(1, max_norm / their global norm)`."""
    norm = global_norm(grads)
    scale = jnp.where(norm > max_norm, max_norm / jnp.maximum(norm, max_norm), 1)
    shrink = lambda v: v * scale.astype(v.dtype)
    return jax.tree.map(
        lambda g: g.map(shrink) if is_selected_rows(g) else shrink(g),
        grads,
        is_leaf=is_selected_rows,
    )


def _as_segments(x: Any, room: int) -> SegmentTensor:
    """A scipy CSR matrix, with room for so many elements."""
    index, value = np.zeros(room, x.indices.dtype), np.zeros(room, x.data.dtype)
    index[: x.nnz], value[: x.nnz] = x.indices[: x.nnz], x.data[: x.nnz]
    elements = SegmentTensor.from_csr(x.indptr, index, value)
    return Elements.of(elements, int(x.shape[1]))  # which would be forgotten
