"""dot: a CSR matrix times a dense matrix, with a row-sparse gradient.

Invariant, as in `lookup`: `dense` is read once, by one primitive whose operand is
`dense` itself, and an element of the matrix that is dropped (its column or row is out
of range) is also out of range for that primitive. The gradient of `dense` therefore has
only the rows in the matrix's column indices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, CSRLike
from sparsejax._lookup import lookup
from sparsejax._lookup.bag_sum import bag_sum, quantized_bag_sum
from sparsejax._rows import (
    RowTable,
    SelectedRows,
    Table,
    as_table,
    indexing,
    is_quantized,
    reduce_row_table,
)
from sparsejax._segments import SegmentTensor


def dot(
    csr: CSRLike,
    dense: ArrayLike | Table,
    *,
    transpose: bool = False,
    num_columns: int | None = None,
) -> Any:
    """`csr @ dense`, or with `transpose` the SelectedRows of `csr.T @ dense`.

    `out[s] = sum_{i in segment s} value[i] * dense[index[i]]`, and transposed
    `out[c] = sum_{i: index[i] == c} value[i] * dense[segment(i)]`. Differentiable in
    `dense` and in `value`; under `sparsejax.grad` the gradient of `dense` is sparse.

    Args:
      csr: `[S, C]`. A SegmentTensor with one segment per row and values
        `{"index": int[n], "value": dtype[n]}`; or a scipy CSR matrix; or a
        `jax.experimental.sparse.BCSR` without batch dimensions. Duplicates are summed.
        An element whose column is outside `[0, C)` is dropped; columns never wrap.
      dense: `[C, ...]`, or `[S, ...]` with `transpose`. Or a SelectedRows of that
        shape, in which rows that are not stored are zeros; a QuantizedTable; or a
        ShardedTable.
      transpose: True multiplies by the transposed matrix.
      num_columns: int C; required for a SegmentTensor with `transpose`.

    Returns:
      `[S, ...]`. With `transpose`, a SelectedRows of height C with one slot per element
      of the matrix; duplicates are not merged. The dtype is the promoted dtype of
      `value` and `dense`; sums are accumulated in at least float32.

    Raises:
      TypeError: `csr` is not such a matrix, `dense` is not a table, `num_columns` is
        not a static int, or value and `dense` are both booleans.
      ValueError: shapes do not match, or `num_columns` is missing or wrong.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> index, value = jnp.array([2, 0, 2]), jnp.array([1.0, 2.0, 3.0])
      >>> elements = {"index": index, "value": value}
      >>> csr = sj.SegmentTensor.from_lengths(elements, jnp.array([2, 0, 1]))
      >>> sj.dot(csr, jnp.array([[1.0], [10.0], [100.0]]))
      Array([[102.],
             [  0.],
             [300.]], dtype=float32)
      >>> sj.dot(csr, jnp.ones((3, 1)), transpose=True, num_columns=4).to_dense()
      Array([[2.],
             [0.],
             [4.],
             [0.]], dtype=float32)

    References:
      MXNet, `sparse.dot` (`transpose_a`, row-sparse gradient).
    """
    if num_columns is not None:
        num_columns = _arguments.static_int("num_columns", num_columns)
    csr, num_columns = _as_csr(csr, num_columns)
    index, value = _elements(csr)
    segment_ids = csr.segment_ids
    dense = as_table(dense, "dense")
    if transpose and num_columns is None:
        raise ValueError(
            "transpose=True needs num_columns if csr is a SegmentTensor. Pass it."
        )
    shape = (
        csr.num_segments,
        dense.shape[0] if num_columns is None else num_columns,
    )
    rows, columns = reversed(shape) if transpose else shape
    if dense.shape[0] != columns:
        mark = ".T" if transpose else ""
        raise ValueError(
            f"The first axis of dense must be {columns}, since csr{mark} is [{rows}, "
            f"{columns}], got shape {dense.shape}."
        )

    index = _arguments.as_ids(index, shape[1], "csr's index")
    counts = indexing.in_range(index, shape[1]) & indexing.in_range(
        segment_ids, shape[0]
    )
    # Column, value and row of a dropped element may be anything, even NaN.
    index = jnp.where(counts, index, _arguments.scalar(shape[1], index))
    dtype = indexing.promote(value.dtype, dense.dtype)
    if dtype == jnp.bool_:
        raise TypeError("value and dense must not both be bool. Cast one with .astype.")
    wide = indexing.accumulator_dtype(dtype)
    value = indexing.zero_unless(counts, value).astype(wide)

    # A row of the result is a bag of weighted rows of `dense`.
    if isinstance(dense, RowTable) and not transpose:
        bags = segment_ids, rows
        how = dict(combiner="sum", mode="zero")
        out = reduce_row_table(dense, index, ~counts, value, bags, **how)
        return out.astype(dtype)
    same_type = wide == indexing.accumulator_dtype(dense.dtype)
    if not isinstance(dense, SelectedRows) and same_type and not transpose:
        add: Any = quantized_bag_sum if is_quantized(dense) else bag_sum
        out = add(
            dense, index, value, segment_ids, rows, indices_are_sorted=csr.is_sorted
        )
        return out.astype(dtype)
    segment_ids = jnp.where(
        counts, segment_ids, _arguments.scalar(shape[0], segment_ids)
    )
    read, write = (segment_ids, index) if transpose else (index, segment_ids)
    products = lookup.read(dense, read, None, "zero").astype(wide)
    products *= indexing.append_axes(value, products.ndim)
    if transpose:
        return SelectedRows(write, products.astype(dtype), rows)
    out = jnp.zeros((rows, *dense.shape[1:]), wide)
    return indexing.add_rows(out, write, products).astype(dtype)


# ------------------------------------------------------------------ private


def _as_csr(csr: Any, num_columns: int | None) -> tuple[SegmentTensor, int | None]:
    """Returns `csr` as a SegmentTensor, and its number of columns if known."""
    if isinstance(csr, SegmentTensor):
        return csr, num_columns
    # scipy matrices and BCSR are recognized by their attributes, without importing
    # either package. scipy's CSC has the same three arrays with another meaning.
    is_csr = all(hasattr(csr, name) for name in ("indptr", "indices", "data", "shape"))
    if not is_csr or getattr(csr, "format", "csr") != "csr" or csr.indptr.ndim != 1:
        kind = _arguments.kind_of(csr)
        if is_csr:
            kind += f", format {getattr(csr, 'format', 'BCSR')} and shape {csr.shape}"
        raise TypeError(
            "csr must be a SegmentTensor with values {'index', 'value'}, a scipy CSR "
            f"matrix or a BCSR, got {kind}. Call .tocsr() or SegmentTensor.from_csr."
        )
    if num_columns is not None and num_columns != csr.shape[1]:
        raise ValueError(f"num_columns={num_columns}, but csr has shape {csr.shape}.")
    return SegmentTensor.from_csr(csr), csr.shape[1]


def _elements(csr: SegmentTensor) -> tuple[jax.Array, jax.Array]:
    """Returns the column and the value of each element."""
    values = csr.values
    if not isinstance(values, dict) or values.keys() != {"index", "value"}:
        is_dict = isinstance(values, dict)
        kind = f"a dict of {sorted(values)}" if is_dict else _arguments.kind_of(values)
        raise TypeError(
            "csr's values must be {'index': int[n], 'value': dtype[n]}, got "
            f"{kind}. If every id has weight one, use value=jnp.ones(n)."
        )
    index, value = values["index"], jnp.asarray(values["value"])
    if value.ndim != 1 or jnp.shape(index) != value.shape:
        raise ValueError(
            "csr's values must be {'index': int[n], 'value': dtype[n]}, got shapes "
            f"{jnp.shape(index)} and {value.shape}."
        )
    return index, value
