"""Writing rows of a table by id: scatter_assign and scatter_weighted_sum.

Both return a new table. They read and write only the given rows, in place if the old
table is donated to `jit`. Ids out of range are dropped; they never wrap.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike
from sparsejax._rows import SelectedRows, as_table, check_whole, indexing


def scatter_assign(table: ArrayLike, rows: ArrayLike, values: ArrayLike) -> jax.Array:
    """Replaces rows of a table.

    `out[rows[i]] = values[i]`; every other row is unchanged.

    Args:
      table: `[V, ...]`.
      rows: integers of any shape, usually `[n]`. Ids out of range, such as V for an
        empty slot, are dropped. Any one of several duplicates may win. A GPU writes the
        elements of a row independently, so the result may mix duplicates.
      values: `[*rows.shape, *table.shape[1:]]`, cast to the table's dtype.

    Returns:
      `[V, ...]`, of the table's dtype. Differentiable in `table` and `values`.

    Raises:
      TypeError: `table` is not an array, `rows` are not integers, or the dtype of
        `values` cannot be cast to the table's.
      ValueError: the shapes do not match.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> table = jnp.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
      >>> sj.scatter_assign(table, jnp.array([2, 0, 3]), jnp.zeros((3, 2)))
      Array([[0., 0.],
             [2., 2.],
             [0., 0.]], dtype=float32)

    References:
      Caffe2, `ScatterAssign`; PaddlePaddle, `scatter(overwrite=True)`.
    """
    table = _as_table(table)
    flat, shape = _flat_rows(table, rows)
    values = _flat_values("values", values, shape, table)
    _check_kind("values", values.dtype, table.dtype)
    return indexing.set_rows(table, flat, values.astype(table.dtype))


def scatter_weighted_sum(
    table: ArrayLike, weight: ArrayLike, rows: ArrayLike, *values_and_weights: ArrayLike
) -> jax.Array:
    """Scales rows of a table and adds weighted values to them.

    `scatter_weighted_sum(table, w0, rows, v1, w1, v2, w2, ...)` replaces every row r in
    `rows` by

    `out[r] = w0 * table[r] + sum_{i: rows[i] == r} (w1 * v1[i] + w2 * v2[i] + ...)`

    and leaves every other row unchanged, bit for bit. `w0` applies once, however often
    r occurs; Caffe2's operator applies it at each occurrence.

    Args:
      table: `[V, ...]`.
      weight: scalar w0. The Python number 1 is fastest: duplicates are not merged.
      rows: integers of any shape, usually `[n]`. Ids out of range, such as V for an
        empty slot, are dropped.
      *values_and_weights: pairs of values, `[*rows.shape, *table.shape[1:]]`, and a
        scalar weight of shape `()` or `(1,)`. Without pairs, the rows are only scaled.

    Returns:
      `[V, ...]`, of the table's dtype. Sums accumulate in at least float32 and are
      rounded once. Differentiable in the table, the values and the weights.

    Raises:
      TypeError: `table` is not an array, `rows` are not integers, or values or weights
        cannot be cast to the table's dtype.
      ValueError: the shapes do not match, or a weight is missing.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> table = jnp.array([1.0, 2.0, 3.0])
      >>> v = jnp.array([1.0, 10.0, 100.0])
      >>> sj.scatter_weighted_sum(table, 0.5, jnp.array([2, 0, 2]), v, 2.0)
      Array([ 20.5,   2. , 203.5], dtype=float32)

    References:
      Caffe2, `ScatterWeightedSum`.
    """
    table = _as_table(table)
    flat, shape = _flat_rows(table, rows)
    if len(values_and_weights) % 2:
        raise ValueError(
            "After rows come pairs of values and weights: (table, w0, rows, v1, w1, "
            f"v2, w2, ...). Got {len(values_and_weights)} arguments after rows."
        )
    values = [
        _flat_values(f"values v{i}", v, shape, table)
        for i, v in enumerate(values_and_weights[::2], 1)
    ]
    weights = [_weight(i, w) for i, w in enumerate((weight, *values_and_weights[1::2]))]
    # The data determine the dtype of the sum; weights never widen it.
    wide = indexing.promote(table.dtype, *(v.dtype for v in values))
    wide = indexing.accumulator_dtype(wide)
    for i, v in enumerate(values, 1):
        _check_kind(f"values v{i}", v.dtype, table.dtype)
    for i, w in enumerate(weights):
        _check_kind(f"weight w{i}", w.dtype, table.dtype)
    w0, *weights = (w.astype(wide) for w in weights)

    total = jnp.zeros((flat.size, *table.shape[1:]), wide)
    for v, w in zip(values, weights):
        total += w * v.astype(wide)
    update = SelectedRows(flat, total, table.shape[0])
    if isinstance(weight, (int, float)) and weight == 1:
        return table + update
    # Merge duplicates first, so each row is read, scaled and written once.
    update = update.coalesce()
    old = indexing.take_rows(table, update.rows).astype(wide)
    new = w0 * old + update.values
    # With unique ids, JAX differentiates the scatter without table-sized arrays that
    # record which of several duplicates won.
    return indexing.set_distinct_rows(table, update.rows, new)


# ------------------------------------------------------------------ private


def _as_table(table: Any) -> jax.Array:
    whole: Any = as_table(table)
    check_whole("table", whole, "a scatter")
    return whole


def _flat_rows(table: jax.Array, rows: Any):
    """Returns `rows` flattened, and their original shape."""
    rows = _arguments.as_ids(rows, table.shape[0], "rows")
    return rows.reshape(-1), rows.shape


def _flat_values(name: str, values: Any, shape, table: jax.Array) -> jax.Array:
    """Returns `values` with the axes of `rows` merged into one."""
    values = _arguments.to_array(values, name)
    expected = (*shape, *table.shape[1:])
    if values.shape != expected:
        raise ValueError(
            f"{name} must have shape rows.shape + table.shape[1:] = {expected}, got "
            f"{values.shape}. They are not broadcast; use jnp.broadcast_to."
        )
    return values.reshape(math.prod(shape), *table.shape[1:])


def _weight(i: int, weight: Any) -> jax.Array:
    name = f"weight w{i}"
    weight = _arguments.to_array(weight, name, "a scalar")
    weight = weight.reshape(()) if weight.shape == (1,) else weight
    return _arguments.as_scalar(weight, name, weight.dtype)


def _check_kind(name: str, dtype: Any, of_table: Any) -> None:
    """Raises a TypeError for floats in a table of integers; floats may narrow."""
    for kind in (jnp.complexfloating, jnp.inexact):
        if jnp.issubdtype(dtype, kind) and not jnp.issubdtype(of_table, kind):
            raise TypeError(
                f"cannot store {dtype} {name} in a {of_table} table. Cast one of them."
            )
