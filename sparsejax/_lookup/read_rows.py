"""read_rows: rows of a table by flat ids, a primitive with a lowering per platform."""

import jax
import jax.numpy as jnp

from sparsejax import _arguments, _compat
from sparsejax._lookup.lowerings import cpu, xla


read_rows_p = _compat.primitive(
    "read_rows",
    xla.read_rows,
    {"cpu": cpu.read_rows},
    types=lambda table, ids, fill: [(ids.shape + table.shape[1:], table.dtype)],
)


def read_rows(
    table: jax.Array, ids: jax.Array, *, fill: bytes | None = None
) -> jax.Array:
    """Returns `table[ids]` for flat ids.

    Args:
      table: `[V, ...]`.
      ids: integers `[n]`.
      fill: the bytes of the number, of the table's dtype, that an id out of range
        reads; if None, it reads the nearest row.

    Returns:
      `[n, ...]`, of the table's dtype.
    """
    table = jnp.asarray(table)
    ids = _arguments.as_ids(ids, table.shape[0])
    # If the types of these arrays have a mesh, XLA's gather propagates it.
    if _compat.has_mesh(table) or _compat.has_mesh(ids):
        return xla.read_rows(table, ids, fill=fill)
    if not jnp.issubdtype(table.dtype, jnp.floating) or table.shape[0] == 0:
        return xla.read_rows(table, ids, fill=fill)
    return read_rows_p.bind(
        table, jnp.maximum(ids, _arguments.scalar(-1, ids)), fill=fill
    )
