"""shard_columns: every device holds all rows of a table, and a part of each.

Each device reads all ids of the batch in its own columns, so nothing is routed, no
capacity is chosen and no skew of the ids matters. What is read comes out cut by columns
too, and an optimizer's update is local to each device. What moves is ids to every
device, and the rows that were read where the model wants them whole (see
`sparsejax.parallel.plan` for the bytes).

The table is a plain array with a sharding, and XLA's partitioner needs no help with it:
gather and scatter on rows do not cross columns. The tests read the compiled programs.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sparsejax import _arguments
from sparsejax.parallel._table import check_axis, laid_out
from sparsejax.parallel._table_parts import check_has_devices


_CALL = "sparsejax.parallel.shard_columns"
_NOT_A_TABLE = (
    _CALL + ": table must be a JAX or NumPy array or a ShapeDtypeStruct, got {found}."
)
_NO_COLUMNS = (
    _CALL + ": table must have at least two axes, rows first and columns last, got "
    "shape {shape}. Use shard_rows, or keep it on every device."
)
_UNEVEN = (
    _CALL + ": {columns} columns cannot be cut into {parts} equal parts, one for each "
    "device along {axis!r}. Make the table {wider} columns wide (jnp.pad, and ignore "
    "what is beyond), take an axis whose size divides {columns}, or use shard_rows, "
    "which takes any shape."
)


def shard_columns(
    table: Any, mesh: Mesh | AbstractMesh, axis: str | Sequence[str]
) -> Any:
    """Cuts a table by columns: each device along a mesh axis holds D / N of each row.

    The result is an ordinary array. `sparsejax.lookup`, `embedding_bag`,
    `sparsejax.value_and_grad` and `sparsejax.optim.lazy` take it as any other, inside a
    jitted step over the mesh; rows come out as `[..., D]` cut by columns. Hand the step
    ids that are on every device (`jax.device_put(ids, NamedSharding(mesh, P()))`): of
    ids that are split over the mesh XLA gathers a copy for each use. `tx.init(params)`,
    outside of `jit`, lays out state like the table it belongs to; inside, name
    `out_shardings`. Over Explicit axes, `value_and_grad` gathers whole rows of the
    gradient on every device; over Auto axes they stay cut.

    Args:
      table: `[V, ..., D]`, a JAX or NumPy array (a `np.memmap` too, of which each
        device's part is read alone), or inside `jit` a traced array, so that
        `jax.jit(lambda key: shard_columns(init(key), mesh, axis))` makes each part
        where it belongs. A `jax.ShapeDtypeStruct` gives the abstract form.
      mesh: as `jax.make_mesh` gives, its axes Auto or Explicit.
      axis: name of a mesh axis, or a tuple of names.

    Returns:
      Array `[V, ..., D]` whose last axis is sharded over `axis`, or a ShapeDtypeStruct.

    Raises:
      TypeError: `mesh` or `table` is of another kind.
      ValueError: no such axis, fewer than two axes, D does not divide evenly, or a
        known array over an AbstractMesh.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_columns(jnp.ones((1000, 8)), mesh, "x")
      >>> table.shape, table.sharding.spec == jax.P(None, "x")
      ((1000, 8), True)

    References:
      TorchRec, column-wise sharding.
    """
    axis = check_axis(_CALL, mesh, axis)
    table = _arguments.as_array(table) if hasattr(table, "__jax_array__") else table
    if not (hasattr(table, "shape") and hasattr(table, "dtype")):
        raise TypeError(_NOT_A_TABLE.format(found=_arguments.kind_of(table)))
    shape = tuple(table.shape)
    if len(shape) < 2:
        raise ValueError(_NO_COLUMNS.format(shape=shape))
    names = (axis,) if isinstance(axis, str) else axis
    parts = math.prod(mesh.shape[name] for name in names)
    if shape[-1] % parts:
        wider = -(-shape[-1] // parts) * parts
        raise ValueError(
            _UNEVEN.format(columns=shape[-1], parts=parts, axis=axis, wider=wider)
        )
    spec = PartitionSpec(*(None,) * (len(shape) - 1), axis)
    sharding = NamedSharding(mesh, spec)
    if isinstance(table, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, table.dtype, sharding=sharding)
    if isinstance(table, np.ndarray) or _arguments.is_concrete(table):
        check_has_devices(_CALL, mesh)
    if isinstance(table, np.ndarray):
        dtype = jax.dtypes.canonicalize_dtype(table.dtype)
        part = lambda index: np.asarray(table[index], dtype)
        return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)
    if _arguments.is_concrete(table):
        return jax.device_put(table, sharding)
    return laid_out(table, mesh, *spec)
