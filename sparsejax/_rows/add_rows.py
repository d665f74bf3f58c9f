"""add_rows: values added to rows of a table, a primitive where a kernel does it.

A scatter-add of XLA runs on one core. The kernel of sparsejax-native uses all of them.
"""

import jax

from sparsejax import _compat, _native
from sparsejax._rows import indexing


def add_rows(table: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """`indexing.add_rows`, with the kernel on a CPU.

    Args:
      table: `[V, ...]`.
      ids: integers `[n]`; those out of range add nothing.
      values: `[n, ...]`, of the table's dtype.
    """
    has_kernel = _native.enabled() and _native.can_add(table, ids)
    if not has_kernel or _compat.is_laid_out(table):
        return indexing.add_rows(table, ids, values)
    return _add_rows_p.bind(table, ids, values)[0]


def _with_kernel(*args: jax.Array) -> list[jax.Array]:
    return [(_native.add_rows if _native.enabled() else indexing.add_rows)(*args)]


_add_rows_p = _compat.platform_primitive(
    "add_rows",
    lambda *args: [indexing.add_rows(*args)],
    {},
    lambda table, *_: [(table.shape, table.dtype)],
    native=_with_kernel,
)
