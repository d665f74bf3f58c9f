"""RowTable: a table that is not an array and registers how its rows are read.

A subclass registers a function with `read_row_table` and one with `reduce_row_table`.
It may register a third one with `read_stacked_tables`.
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
