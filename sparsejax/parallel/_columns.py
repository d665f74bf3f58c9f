"""shard_columns: every device holds some columns of all rows of a table.

Each device reads all ids of the batch in its own columns, so there is no routing and no
capacity to choose, and skewed ids do not matter. The rows read are sharded by columns
too, and the optimizer updates each device's columns locally. Only the ids are sent, to
every device, and the rows read, if the model needs whole rows
(`sparsejax.parallel.plan` counts the bytes).

The table is a plain array with a sharding. XLA's partitioner needs no help with it:
gather and scatter of rows do not cross columns. The tests check the compiled programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sparsejax._arguments import TableLike
from sparsejax.parallel._table import check_axis, check_has_devices, constrain


def shard_columns(
    table: TableLike,
    mesh: Mesh | AbstractMesh,
    axis: str | Sequence[str],
) -> Any:
    """Shards a table by columns: each of N devices holds D / N columns of each row.

    The result is an ordinary array. `sparsejax.lookup`, `embedding_bag`,
    `sparsejax.value_and_grad` and `sparsejax.optim.lazy` work on it inside a jitted
    step over the mesh; the rows `[..., D]` that are read are sharded by columns too.
    Pass ids that are replicated on every device
    (`jax.device_put(ids, NamedSharding(mesh, P()))`): XLA gathers sharded ids again for
    each use. Outside of `jit`, `tx.init(params)` shards the state like the tables;
    inside of `jit`, give `out_shardings`. Over Explicit axes, `value_and_grad` gathers
    whole rows of the gradient on every device; over Auto axes they stay sharded.

    Args:
      table: `[V, ..., D]`, a JAX or NumPy array (for an `np.memmap`, only each device's
        part is read), or a traced array inside `jit`, so that
        `jax.jit(lambda key: shard_columns(init(key), mesh, axis))` creates each part on
        its device. A `jax.ShapeDtypeStruct` gives the abstract form.
      mesh: as returned by `jax.make_mesh`, with Auto or Explicit axes.
      axis: name of a mesh axis, or a tuple of names.

    Returns:
      Array `[V, ..., D]` whose last axis is sharded over `axis`, or a ShapeDtypeStruct.

    Raises:
      TypeError: `mesh` or `table` has the wrong type.
      ValueError: `axis` is unknown, the table has fewer than two axes, D is not a
        multiple of the number of devices, or the array is concrete and the mesh
        abstract.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_columns(jnp.ones((1000, 8)), mesh, "x")
      >>> table.shape, table.sharding.spec == jax.P(None, "x")
      ((1000, 8), True)

    References:
      TorchRec, column-wise sharding.
    """
    axis = check_axis(mesh, axis)
    table = jnp.asarray(table) if hasattr(table, "__jax_array__") else table
    shape = tuple(table.shape)
    if len(shape) < 2:
        raise ValueError(
            "sparsejax.parallel.shard_columns: table must have at least two axes, rows "
            f"first and columns last, got shape {shape}. Use shard_rows, or replicate "
            "the table."
        )
    spec = PartitionSpec(*(None,) * (len(shape) - 1), axis)
    sharding = NamedSharding(mesh, spec)
    if isinstance(table, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, table.dtype, sharding=sharding)
    if isinstance(table, Tracer):
        return constrain(table, mesh, *spec)
    check_has_devices(mesh)
    if isinstance(table, np.ndarray):
        dtype = jax.dtypes.canonicalize_dtype(table.dtype)
        part = lambda index: np.asarray(table[index], dtype)
        return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)
    return jax.device_put(table, sharding)
