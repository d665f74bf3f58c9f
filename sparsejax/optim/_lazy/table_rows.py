"""What `lazy` does with the rows of a gradient: merge, read, write, hand back.

Each is open to other kinds of SelectedRows than those of one device: a subclass
registers its own way (`functools.singledispatch` on the rows).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._lookup.read_rows import read_rows
from sparsejax._rows import SelectedRows, indexing


@functools.singledispatch
def merge_duplicates(rows: SelectedRows) -> SelectedRows:
    """The distinct rows, ascending, their values summed."""
    # At least one slot, so that no reduction inside `tx` meets an empty array.
    return rows.coalesce(capacity=max(1, min(rows.capacity, rows.height)))


@functools.singledispatch
def read_into(rows: SelectedRows, table: Any, otherwise: jax.Array) -> jax.Array:
    """Rows of a table, `otherwise` in empty slots."""
    if not rows.height:
        return otherwise
    read = read_rows(jnp.asarray(table), rows.rows)
    filled = indexing.append_axes(rows.filled(), read.ndim)
    # A barrier between this and the arithmetic was measured on XLA:CPU: no difference.
    return jnp.where(filled, read, otherwise.astype(read.dtype))


@functools.singledispatch
def write_into(rows: SelectedRows, table: Any, values: jax.Array) -> jax.Array:
    """The table with these rows, which are distinct and ascending, replaced."""
    table = jnp.asarray(table)
    if not rows.height:
        return table
    # Empty slots get ids of their own beyond the end. XLA may then be told that ids are
    # unique, and needs no atomic writes where it runs in parallel.
    ids = rows.rows
    unique = rows.height + rows.capacity <= jnp.iinfo(ids.dtype).max
    if unique:
        beyond = jnp.arange(rows.capacity, dtype=ids.dtype)
        ids = ids + jnp.where(rows.filled(), _arguments.scalar(0, ids), beyond)
    return table.at[ids].set(
        values.astype(table.dtype),
        mode="drop",
        wrap_negative_indices=False,
        indices_are_sorted=True,
        unique_indices=unique,
    )


@functools.singledispatch
def update_of(rows: SelectedRows, values: jax.Array, grad: SelectedRows) -> Any:
    """What `tx` made of the rows, nothing in empty slots, as many slots as asked."""
    values = indexing.zero_unless(rows.filled(), values)
    slots = min(grad.capacity, grad.height)
    return SelectedRows(rows.rows[:slots], values[:slots], rows.height)


def check_on_one_device(call: str, leaves: Sequence[Any]) -> None:
    """A TypeError for other kinds of SelectedRows, for what looks inside of them."""
    for leaf in leaves:
        if isinstance(leaf, SelectedRows) and type(leaf) is not SelectedRows:
            raise TypeError(
                f"{call}: a gradient is a {type(leaf).__name__}, whose rows are spread "
                "over devices. Only sparsejax.optim.lazy takes them; or shard the "
                "table by columns, sparsejax.parallel.shard_columns, whose gradients "
                "are plain SelectedRows."
            )
