"""The kinds of table that can be read by rows, and the checks for them.

A table is an array `[V, ...]`, a SelectedRows of some rows, a QuantizedTable, or a
RowTable, such as a ShardedTable. Only an array can also be read as a whole: the others
would have to be made dense first, which nothing does silently. A subclass of RowTable
registers a function with `read_row_table` and one with `reduce_row_table`, and may
register a third one with `read_stacked_tables`.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from sparsejax import _arguments
from sparsejax._rows.quantized import QuantizedTable
from sparsejax._rows.selected_rows import SelectedRows


class RowTable:
    """A table whose rows may be on many devices: `sparsejax.parallel.ShardedTable`."""

    shape: Any
    dtype: Any
    ndim: Any


@functools.singledispatch
def read_row_table(
    table: Any, ids: jax.Array, padding: jax.Array | None, mode: str
) -> jax.Array:
    """Reads the rows of `sparsejax.lookup`; the arguments are checked."""
    raise NotImplementedError


@functools.singledispatch
def reduce_row_table(
    table: Any,
    ids: jax.Array,
    skip: jax.Array | None,
    weights: jax.Array | None,
    segments: tuple[jax.Array, int] | None,
    *,
    combiner: str,
    mode: str,
    max_norm: float | None = None,
) -> jax.Array:
    """Computes the bags of `sparsejax.embedding_bag`; the arguments are checked.

    Args:
      table: the table.
      ids: `[B, L]`, or `[n]` with `segments`.
      skip: bools, True for an element that belongs to no bag.
      weights: with the shape of `ids`.
      segments: the bag of each element, and the number of bags.
      combiner, mode, max_norm: as in `embedding_bag`.
    """
    raise NotImplementedError


@functools.singledispatch
def read_stacked_tables(
    table: Any,
    ids: jax.Array,
    skip: jax.Array,
    tables: Sequence[tuple[int, int]],
    weights: jax.Array | None,
    *,
    combiner: str,
    mode: str,
    max_norm: float | None,
) -> jax.Array | None:
    """Computes the bags `[B, F, ...]` of features, each from its table in a stack.

    Returns None if the table has no such function. `reduce_row_table` then computes the
    bags.

    Args:
      table: the stack.
      ids: rows of the stack `[B, F, L]`, feature by feature of one table.
      skip: bools, True for an element that belongs to no bag.
      tables: by feature, the rows `[start, stop)` of its table in the stack.
      weights: with the shape of `ids`.
      combiner: as in `embedding_bag`; `"none"` for rows, with L = 1.
      mode, max_norm: as in `embedding_bag`.
    """
    return None


Table: TypeAlias = jax.Array | SelectedRows | QuantizedTable | RowTable


def table_or_none(x: Any) -> Any:
    """Returns `x` if it is a table, with NumPy arrays as JAX arrays; else None."""
    if not isinstance(x, RowTable):  # a ShardedTable has __jax_array__, which raises
        x = _arguments.as_array(x)
    return x if isinstance(x, Table) else None


def as_table(x: Any, name: str = "table") -> Table:
    """Returns `x` as a table with an axis of rows, or raises."""
    table = table_or_none(x)
    if table is None:
        fix = _arguments.convert_tensor(x, name)
        fix = fix or "Pass the array of weights itself, as in params['table']."
        raise TypeError(
            f"{name} must be a JAX or NumPy array, a SelectedRows, a QuantizedTable or "
            f"a ShardedTable, got {_arguments.kind_of(x)}. {fix}"
        )
    if table.ndim == 0:
        raise ValueError(
            f"{name} must have at least one axis, got shape {table.shape}. The first "
            "axis is the rows: a table is [V], [V, D] or [V, ...]."
        )
    if isinstance(table, SelectedRows) and table.stack:
        raise ValueError(
            f"{name} is a SelectedRows of a stack of tables, {table.shape}. Read its "
            f".unstacked(): row v of table k has the id k * {table.shape[1]} + v."
        )
    return table


def check_whole(name: str, table: Any, user: str, fix: str = "") -> None:
    """Raises if `table` is a table that is not an array.

    Args:
      name: the argument.
      table: a table, or anything else, which passes.
      user: the operation that needs every row, the subject of the error's sentence.
      fix: another way out than to pass the whole table, a sentence.
    """
    if isinstance(table, SelectedRows):
        what, way_out = "a SelectedRows, which stores only some rows", "the whole table"
    elif isinstance(table, QuantizedTable):
        what = "a QuantizedTable, which is dequantized row by row"
        way_out = "its .dequantize()"
    elif isinstance(table, RowTable):
        what = f"a {type(table).__name__}, whose rows are on several devices"
        way_out = "its .to_dense()"
    else:
        return
    raise TypeError(
        f"{name} is {what}, but {user} needs every row. {fix or f'Pass {way_out}.'}"
    )
