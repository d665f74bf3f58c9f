"""The global norm of a tree in which some leaves are SelectedRows."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax._rows import SelectedRows, is_selected_rows


def global_norm(tree: Any) -> jax.Array:
    """The Euclidean norm over all leaves of a tree, SelectedRows merged first.

    `sqrt(sum over leaves of sum |x|^2)`, where a SelectedRows counts as the dense array
    it stands for: duplicates are summed before they are squared, and empty slots are
    zero. `optax.tree.norm` of such a tree would square the row ids as well.

    Args:
      tree: any tree of arrays, SelectedRows, `None` and `optax.MaskedNode`.

    Returns:
      A scalar, what `optax.tree.norm` gives for the tree with each SelectedRows
      `.to_dense()`; 0 for a tree without leaves.

    Raises:
      TypeError: a SelectedRows whose rows are no longer integers.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> from sparsejax.optim import global_norm
      >>> rows = sj.SelectedRows(jnp.array([1, 1]), jnp.array([[1.0], [2.0]]), 1000)
      >>> global_norm({"table": rows, "bias": jnp.array([4.0])})
      Array(5., dtype=float32)

    References:
      `optax.tree.norm`; clipping by it: Pascanu et al., 2013, "On the difficulty of
      training recurrent neural networks".
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_selected_rows)
    with jax.numpy_dtype_promotion("standard"):  # leaves may be of several types
        return optax.tree.norm([_merged(leaf) for leaf in leaves])


def _merged(leaf: Any) -> jax.Array:
    if not isinstance(leaf, SelectedRows):
        return leaf
    if not jnp.issubdtype(leaf.rows.dtype, jnp.integer):
        raise TypeError(
            f"sparsejax.optim.global_norm: a SelectedRows has {leaf.rows.dtype} rows. "
            "A tree-wide function has changed its ids too: use SelectedRows.map there."
        )
    return leaf.coalesce().values  # zeros in its empty slots
