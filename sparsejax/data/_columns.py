"""Columns of a data set: single rows, and batches of rows.

A column is either an array, whose rows are stacked, or ragged: elements along one axis
and the offset at which each row begins, as in a SegmentTensor, but in NumPy. Elements
may be rows of a ragged column in turn, to any depth. Each level needs a capacity.

This module does not use a device: a batch consists of NumPy arrays, in the dtypes that
JAX keeps. A jitted function transfers it to the device.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sparsejax import _arguments
from sparsejax._segments import SegmentTensor, elements
from sparsejax.data import _arrow


@dataclasses.dataclass(frozen=True)
class Array:
    """A column of rows of one shape: `[n, ...]`."""

    source: Any  # the user's argument, from which single rows are read
    values: np.ndarray
    dtype: np.dtype  # the dtype in JAX

    def __len__(self) -> int:
        return len(self.values)


@dataclasses.dataclass(frozen=True)
class Ragged:
    """A column of rows of different lengths.

    Args:
      source: the user's argument, or None inside another column.
      offsets: int64 `[n + 1]`, ascending.
      values: a tree of Array and Ragged, whose rows are the elements.
    """

    source: Any
    offsets: np.ndarray
    values: Any

    def __len__(self) -> int:
        return len(self.offsets) - 1


# ------------------------------------------------------------------ making


def as_column(data: Any, name: str) -> Array | Ragged:
    """Makes a column of an array, a CSR matrix, a SegmentTensor, a frame or a list."""
    if isinstance(data, SegmentTensor):
        return _of_segments(data, data, name)
    if _arrow.is_column(data):  # a pandas Series is indexed by label
        column = _arrow.as_array(data, name)
        is_nested = _arrow.import_pyarrow().types.is_nested(column.type)
        data = column.to_pylist() if is_nested else np.asarray(column)
    if hasattr(data, "tocsr"):  # a matrix of scipy, which is not imported
        data = data.tocsr()
        parts = {"index": data.indices, "value": data.data}
        return Ragged(data, data.indptr.astype(np.int64), _leaves(parts, name))
    is_array = hasattr(data, "shape") and hasattr(data, "dtype")
    if not is_array and isinstance(data, Sequence) and not isinstance(data, str):
        return _of_list(data if isinstance(data, tuple) else list(data), name)
    if not is_array:
        raise TypeError(
            f"ArrayDataset: {name} must be an array, a scipy sparse matrix, a "
            "SegmentTensor, a column of a data frame, or a list with one list or array "
            f"per row, got {_arguments.kind_of(data)}."
        )
    return _of_array(data, name)


def _of_array(data: Any, name: str) -> Array:
    values = np.asanyarray(data)  # a memory map stays one
    is_numeric = values.dtype.kind in "biufc" or jax.numpy.issubdtype(
        values.dtype, jax.numpy.inexact
    )
    # The last, padded batch of a masked array would lose the mask.
    if values.ndim == 0 or not is_numeric or isinstance(values, np.ma.MaskedArray):
        raise TypeError(
            f"ArrayDataset: {name} must be an array of numbers, one row per example, "
            f"got {_arguments.kind_of(values)}. Convert words to ids, and fill masks."
        )
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(values.dtype))
    if dtype != values.dtype and values.dtype.kind in "iu" and values.size:
        low, high, limits = values.min(), values.max(), np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"ArrayDataset: {name} must fit in {dtype}, got integers from {low} to "
                f"{high}. Set jax_enable_x64, or use smaller ids."
            )
    return Array(data, values, dtype)


def _of_list(data: Sequence[Any], name: str) -> Array | Ragged:
    try:
        if data and all(isinstance(row, np.ndarray) and row.ndim for row in data):
            lengths = [len(row) for row in data]
            values = np.concatenate(data)  # SegmentTensor would cast 64-bit floats
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            return Ragged(data, offsets, _of_array(values, name))
        if not any(
            isinstance(row, (list, tuple, dict)) or np.ndim(row) for row in data
        ):
            return _of_array(np.asarray(data), name)
        rows = [list(row) if isinstance(row, tuple) else row for row in data]
        return _of_segments(SegmentTensor.from_lists(rows), data, name)
    except (TypeError, ValueError) as e:
        # JAX raises subclasses, whose constructors have other arguments.
        kind = TypeError if isinstance(e, TypeError) else ValueError
        raise kind(
            f"ArrayDataset: the rows of the list {name} do not form a column: {e} Rows "
            "of different lengths must be lists or arrays of numbers, of one type and "
            "depth."
        ) from None


def _of_segments(st: SegmentTensor, source: Any, name: str) -> Ragged:
    st = st.sort()
    offsets = np.asarray(st.offsets).astype(np.int64)
    return Ragged(source, offsets, _leaves(st.values, name))


def _leaves(values: Any, name: str) -> Any:
    array = lambda x: _of_array(np.asarray(x), name)
    nested = lambda x: _of_segments(x, None, name)
    return elements.map_leaves(array, nested, values)


# ------------------------------------------------------------------ single rows


def get(column: Array | Ragged, key: int | slice) -> Any:
    """Returns `column[key]` in the user's type."""
    source = column.source
    if isinstance(column, Array):
        return source[key]
    if isinstance(source, (list, tuple)):
        flat = isinstance(column.values, Array) and not isinstance(key, slice)
        return np.asarray(source[key]) if flat else source[key]
    if not isinstance(source, SegmentTensor):  # CSR: a row is a matrix of one row
        return source[key if isinstance(key, slice) else slice(key, key + 1)]
    if isinstance(key, slice):
        return _pick(column, np.arange(len(column))[key])
    span = np.arange(int(column.offsets[key]), int(column.offsets[key + 1]))
    return _map(lambda x: _pick(x, span), column.values)


def _pick(column: Array | Ragged, rows: np.ndarray) -> Any:
    if isinstance(column, Array):
        return column.values[rows]
    sizes = tuple(int(counts[rows].sum()) for counts in lengths(column))
    return take(column, rows, len(rows), sizes)


def _map(f: Any, values: Any) -> Any:
    return jax.tree.map(f, values, is_leaf=lambda x: isinstance(x, (Array, Ragged)))


# ------------------------------------------------------------------ batches


def lengths(column: Ragged) -> list[np.ndarray]:
    """Returns the elements of each row, int64 `[n]`, for each level, outermost first.

    Levels of the same depth in a tree share an entry, the maximum of their lengths.
    """
    outer = np.diff(column.offsets)
    inner: list[np.ndarray] = []
    for child in _ragged_leaves(column):
        for depth, counts in enumerate(lengths(child)):
            sums = np.concatenate([[0], np.cumsum(counts)])
            in_row = np.diff(sums[column.offsets])
            if depth == len(inner):
                inner.append(in_row)
            else:
                inner[depth] = np.maximum(inner[depth], in_row)
    return [outer, *inner]


def _ragged_leaves(column: Ragged) -> list[Ragged]:
    leaves = jax.tree.leaves(
        column.values, is_leaf=lambda x: isinstance(x, (Array, Ragged))
    )
    return [x for x in leaves if isinstance(x, Ragged)]


def take(
    column: Array | Ragged, rows: np.ndarray, size: int, capacities: tuple[int, ...]
) -> Any:
    """Returns rows as a batch, padded with zeros or empty rows.

    Args:
      column: the column of the rows.
      rows: integers, at most `size` of them.
      size: int, the number of rows of the batch.
      capacities: the capacities of the levels of a ragged column, outermost first, in
        which the rows fit.

    Returns:
      NumPy array `[size, ...]`, or a sorted SegmentTensor of NumPy arrays with `size`
      segments and that capacity.
    """
    if isinstance(column, Array):
        if len(rows) == size:
            return column.values[rows].astype(column.dtype, copy=False)
        out = np.zeros((size, *column.values.shape[1:]), column.dtype)
        out[: len(rows)] = column.values[rows]
        return out
    capacity, *inner = capacities
    starts = column.offsets[rows]
    counts = column.offsets[rows + 1] - starts
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(rows) else 0
    places = np.arange(total) + np.repeat(starts - ends + counts, counts)
    segment_ids = np.full(capacity, size, np.int32)
    segment_ids[:total] = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    values = _map(lambda x: take(x, places, capacity, tuple(inner)), column.values)
    # The constructors would transfer each array to the device; unflattening does not.
    return SegmentTensor.tree_unflatten((size, True), (values, segment_ids))
