"""RowTable: a table that is not an array; how its rows are read is registered.

Its class registers a function with `read_row_table` and one with `reduce_row_table`,
and may register one with `read_stacked_tables`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax


class RowTable:
    """A table whose rows may lie on many devices: `sparsejax.parallel.ShardedTable`."""

    shape: Any
    dtype: Any
    ndim: Any


@functools.singledispatch
def read_row_table(
    table: Any, call: str, ids: jax.Array, padding: jax.Array | None, mode: str
) -> jax.Array:
    """The rows that `sparsejax.lookup` reads, from checked arguments."""
    raise NotImplementedError


@functools.singledispatch
def reduce_row_table(
    table: Any,
    call: str,
    ids: jax.Array,
    skip: jax.Array | None,
    weights: jax.Array | None,
    segments: tuple[jax.Array, int] | None,
    *,
    combiner: str,
    mode: str,
    max_norm: float | None = None,
) -> jax.Array:
    """The bags of `sparsejax.embedding_bag`, from checked arguments.

    Args:
      table: the table.
      call: the public call, for errors.
      ids: `[B, L]`, or `[n]` with `segments`.
      skip: bools, which elements are in no bag.
      weights: with the shape of `ids`.
      segments: the bag of each element, and the number of bags.
      combiner, mode, max_norm: as there.
    """
    raise NotImplementedError


@functools.singledispatch
def read_stacked_tables(
    table: Any,
    call: str,
    ids: jax.Array,
    skip: jax.Array,
    tables: Sequence[tuple[int, int]],
    weights: jax.Array | None,
    *,
    combiner: str,
    mode: str,
    max_norm: float | None,
) -> jax.Array | None:
    """The bags `[B, F, ...]` of features of a stack of tables, read by their tables.

    None where the table has no such way: its bags are those of `reduce_row_table`.

    Args:
      table: the stack.
      call: the public call, for errors.
      ids: rows of the stack `[B, F, L]`, feature by feature of one table.
      skip: bools, which elements are in no bag.
      tables: by feature, the rows `[start, stop)` of its table in the stack.
      weights: with the shape of `ids`.
      combiner: as in `embedding_bag`; `"none"` for rows, with L = 1.
      mode, max_norm: as there.
    """
    return None
