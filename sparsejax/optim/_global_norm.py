"""The global norm of a tree with SelectedRows among its leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax._arguments import PyTree
from sparsejax._rows import indexing, is_selected_rows


def global_norm(tree: PyTree) -> jax.Array:
    """Returns the Euclidean norm over all leaves of a tree, including SelectedRows.

    `sqrt(sum over leaves of sum |x|^2)`, where a SelectedRows counts as the dense array
    that it represents: duplicates are summed before squaring, and empty slots are zero.
    `optax.tree.norm` of such a tree would also square the row ids.

    Args:
      tree: any tree of arrays, SelectedRows, `None` and `optax.MaskedNode`.

    Returns:
      A scalar, equal to `optax.tree.norm` of the tree with each SelectedRows as
      `.to_dense()`, but of float32 for narrower leaves, whose squares would overflow; 0
      for a tree without leaves.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> from sparsejax.optim import global_norm
      >>> rows = sj.SelectedRows(jnp.array([1, 1]), jnp.array([[1.0], [2.0]]), 1000)
      >>> global_norm({"table": rows, "bias": jnp.array([4.0])})
      Array(5., dtype=float32)

    References:
      `optax.tree.norm`; for clipping: Pascanu et al., 2013, "On the difficulty of
      training recurrent neural networks".
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_selected_rows)
    with jax.numpy_dtype_promotion("standard"):  # leaves may be of several types
        return optax.tree.norm([_merged(leaf) for leaf in leaves])


def _merged(leaf: Any) -> jax.Array:
    if is_selected_rows(leaf):  # the values of empty slots are zeros
        return leaf.astype(indexing.accumulator_dtype(leaf.dtype)).coalesce().values
    leaf = jnp.asarray(leaf)
    return leaf.astype(indexing.accumulator_dtype(leaf.dtype))
