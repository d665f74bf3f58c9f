"""sparse_table: stock `jax.grad` gives rows, on releases of JAX with hijax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike, PyTree
from sparsejax._rows import sparse_table as tables


_CALL = "sparsejax.experimental.sparse_table"


def sparse_table(array: ArrayLike, capacity: int) -> Any:
    """An array as a table whose gradient under `jax.grad` is a SelectedRows.

    The type of the result has another type for its cotangents: at most `capacity` rows
    of the table, by id. So JAX's own `jax.grad` and `jax.value_and_grad`, with respect
    to it, give `sum_i e(ids[i]) g[i]^T` as rows, where `g[i]` is the cotangent of what
    was read at `ids[i]`, and no array of the table's size is made. It is a view: make
    it in each step, of the parameter, outside of the function that is differentiated.

    It can be read by `table[ids]`, `sparsejax.lookup` and `sparsejax.embedding_bag`,
    under `jit`, `vmap`, `scan` and `cond`, and differentiated any number of times,
    forward too. Several reads are merged, into `capacity` slots. Everything else that
    an array can do raises. `jax.checkpoint` does not take such values yet, nor does
    `jax.shard_map` take these: read the rows outside of it.

    Outside of `jit` the gradient is a SelectedRows. Inside it is a tracer, which all of
    `sparsejax.optim` takes as it is, and of which `selected_rows` makes a SelectedRows.

    An experiment: `sparsejax.value_and_grad` needs no capacity, takes any model as it
    is, and runs on every release. This shows what is left of it where JAX itself knows
    of rows.

    Args:
      array: `[V, ...]`, floating point.
      capacity: int, the number of distinct rows that a gradient has room for. Pass the
        number of ids that are read, or of distinct ones.

    Returns:
      A table of the array's shape and dtype.

    Raises:
      RuntimeError: JAX is older than 0.12.
      TypeError: `array` is not a floating-point array, or `capacity` is not an int. At
        use: it is used as a whole array, is indexed by something other than integers,
        or was made inside of the function that is differentiated.
      ValueError: `array` is a scalar, or `capacity` is negative. In the backward pass:
        more distinct rows were read than `capacity`. (Inside `jit` the gradient's
        values become NaN instead.)

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> table = sj.experimental.sparse_table(  # doctest: +SKIP
      ...     jnp.ones((1000, 2)), capacity=4
      ... )
      >>> jax.grad(  # doctest: +SKIP
      ...     lambda t: jnp.sum(t[jnp.array([7, 2])] ** 2) + jnp.sum(t[7])
      ... )(table)
      SelectedRows(rows=[2 7 - -], values=float32[4,2], height=1000, num_rows=2)

    References:
      JAX, `jax.experimental.hijax`; TensorFlow, whose `tf.gradients` gives
      `IndexedSlices` for what was read by `tf.gather`.
    """
    array = _arguments.to_array(_CALL, array, "array")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{_CALL}: array must be floating point, got {array.dtype}. Cast it with "
            ".astype(jnp.float32)."
        )
    if array.ndim == 0:
        raise ValueError(
            f"{_CALL}: array must have at least one axis, got a scalar. The first axis "
            "is the rows: a table is [V], [V, D] or [V, ...]."
        )
    capacity = _arguments.check_capacity(_CALL, capacity)
    if not _compat.has_hijax:
        raise RuntimeError(
            f"{_CALL}: needs jax {_compat.HIJAX_RELEASE} or newer, got jax "
            f"{jax.__version__}. Install that release, or use "
            "sparsejax.value_and_grad, which needs none of it."
        )
    return tables.make(array, capacity)


def selected_rows(tree: PyTree) -> Any:
    """A tree in which the gradients of sparse tables are SelectedRows.

    Inside `jit`, the gradient that `jax.grad` gives with respect to a `sparse_table` is
    a tracer of a type of its own. This opens it, `g = sum_i e(rows[i]) values[i]^T`,
    into a SelectedRows of `capacity` slots. All of `sparsejax.optim` does so itself.

    Args:
      tree: of gradients; what is no gradient of a sparse table stays as it is.

    Returns:
      The tree, with a SelectedRows for each of them.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.experimental.selected_rows({"bias": jnp.zeros(2)})
      {'bias': Array([0., 0.], dtype=float32)}

    References:
      PaddlePaddle, `SelectedRows`.
    """
    return tables.opened(tree)
