"""Lowerings for XLA:CPU, which is slow where a gather stands alone.

Its loop is only vectorised if arithmetic is fused into it (see benchmarks/NOTES.md).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax._lookup.lowerings import xla
from sparsejax._rows import indexing


def read_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`table[ids]` for flat ids; those out of range read the nearest row.

    The rows are multiplied by a one that XLA cannot know to be one. Left alone it would
    move that multiplication to the users of the rows, and the gather would stand alone
    again; a conditional, whose condition it cannot know either, keeps the two together.
    """
    if ids.size == 0 or not jnp.issubdtype(table.dtype, jnp.floating):
        return xla.read_rows(table, ids)
    least = np.array(jnp.iinfo(ids.dtype).min, ids.dtype)

    def read(table, ids):
        one = jnp.where(
            ids > least, jnp.ones((), table.dtype), 2 * jnp.ones((), table.dtype)
        )
        rows = xla.read_rows(table, ids)
        return rows * indexing.append_axes(one, rows.ndim)

    # No id is the least number of its type: that would be out of range, and ids that
    # come here are written as `height` where they are. Were it otherwise, the row of
    # an empty slot would be read twice as large, or as zeros.
    def nothing(table, ids):
        return jnp.zeros(ids.shape + table.shape[1:], table.dtype)

    return lax.cond(ids[0] > least, read, nothing, table, ids)
