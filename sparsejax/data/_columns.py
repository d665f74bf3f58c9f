"""Columns of a data set: what a row of each is, and how rows become a batch.

A column is an array, whose rows stack, or ragged: elements in one axis and the offsets
at which each row begins, as SegmentTensor has them, but in NumPy. Elements may be rows
of a ragged column themselves, and so to any depth. Each level of it needs a capacity.

Nothing here touches a device: a batch is made of NumPy arrays, in the types that JAX
keeps, and goes to the device when a jitted function takes it.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from sparsejax import _arguments
from sparsejax._segments import SegmentTensor, elements


_UNEQUAL = (
    "{call}: {name} is a list whose rows cannot be read as one column: {reason}. For "
    "rows that differ in length give a list or an array of numbers for each, of one "
    "type and depth."
)


@dataclasses.dataclass(frozen=True)
class Array:
    """A column whose rows all have one shape: `[n, ...]`."""

    source: Any  # what the user gave, which answers for single rows
    values: np.ndarray
    dtype: np.dtype  # what JAX keeps of it

    def __len__(self) -> int:
        return len(self.values)


@dataclasses.dataclass(frozen=True)
class Ragged:
    """A column whose rows differ in length.

    Args:
      source: what the user gave, or None inside of another column.
      offsets: int64 `[n + 1]`, ascending.
      values: a tree of Array and of Ragged, with an element a row.
    """

    source: Any
    offsets: np.ndarray
    values: Any

    def __len__(self) -> int:
        return len(self.offsets) - 1


# ------------------------------------------------------------------ making


def as_column(call: str, data: Any, name: str) -> Array | Ragged:
    """A column of an array, a CSR matrix, a SegmentTensor or a list; else an error."""
    if isinstance(data, SegmentTensor):
        return _of_segments(call, data, data, name)
    if hasattr(data, "tocsr"):  # scipy's, known without an import
        if getattr(data, "format", None) != "csr":
            raise TypeError(
                f"{call}: {name} is a sparse matrix in the format {data.format}; rows "
                "are taken from CSR. Call .tocsr()."
            )
        parts = {"index": data.indices, "value": data.data}
        return Ragged(data, _as_offsets(data.indptr), _leaves(call, parts, name))
    if isinstance(data, (list, tuple)):
        return _of_list(call, data, name)
    if not hasattr(data, "shape") or not hasattr(data, "dtype"):
        raise TypeError(
            f"{call}: {name} is {_arguments.kind_of(data)}. A column is an array, a "
            "scipy CSR matrix, a SegmentTensor, or a list with a list or an array for "
            "each row."
        )
    return _of_array(call, data, name)


def _of_array(call: str, data: Any, name: str) -> Array:
    if isinstance(data, np.ma.MaskedArray):
        raise TypeError(
            f"{call}: {name} is a masked array, and JAX has none. Fill it, with "
            ".filled(...), and give the mask as a column of its own."
        )
    _refuse_keys(call, data, name)
    values = np.asanyarray(data)  # a memory map stays one
    if values.ndim == 0:
        raise ValueError(
            f"{call}: {name} is one number; a column has a row for each example."
        )
    known = values.dtype.kind in "biufc" or jax.numpy.issubdtype(
        values.dtype, jax.numpy.inexact
    )
    if not known:  # strings, objects, dates
        raise TypeError(
            f"{call}: {name} has dtype {values.dtype}, which JAX has no arrays of. "
            "Turn it into numbers first; categories into ids."
        )
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(values.dtype))
    if dtype != values.dtype and values.dtype.kind in "iu" and values.size:
        low, high, limits = values.min(), values.max(), np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"{call}: {name} holds the integers {low} to {high}, and JAX keeps "
                f"{dtype}. Set jax_enable_x64, or give smaller ids."
            )
    return Array(data, values, dtype)


def _of_list(call: str, data: Any, name: str) -> Array | Ragged:
    first = data[0] if len(data) else 0
    _refuse_keys(call, first, name)
    if _is_number(first):
        for at, row in enumerate(data):
            if not _is_number(row):
                found, one = type(row).__name__, type(first).__name__
                reason = f"row {at} is {found} and row 0 is {one}"
                raise ValueError(_UNEQUAL.format(call=call, name=name, reason=reason))
        return _of_array(call, np.asarray(data), name)
    try:
        if all(isinstance(row, np.ndarray) for row in data):
            lengths = [len(row) for row in data]
            values: Any = np.concatenate(data)  # 64-bit floats may stay what they are
        else:
            st = SegmentTensor.from_lists([_plain(row) for row in data])
            return dataclasses.replace(_of_segments(call, st, data, name), source=data)
    except (TypeError, ValueError) as e:
        # JAX's own errors are of these kinds, and are made of other things than text.
        kind = TypeError if isinstance(e, TypeError) else ValueError
        reason = str(e).rstrip(".")
        raise kind(_UNEQUAL.format(call=call, name=name, reason=reason)) from None
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Ragged(data, offsets, _of_array(call, values, name))


def _is_number(row: Any) -> bool:
    return not isinstance(row, (list, tuple, dict)) and np.ndim(row) == 0


def _refuse_keys(call: str, data: Any, name: str) -> None:
    keys = jax.dtypes.prng_key
    if isinstance(data, jax.Array) and jax.numpy.issubdtype(data.dtype, keys):
        raise TypeError(
            f"{call}: {name} is random keys, of which a batch is none. Give "
            "jax.random.key_data(keys), which are numbers."
        )


def _plain(row: Any) -> Any:
    return list(row) if isinstance(row, tuple) else row


def _of_segments(call: str, st: SegmentTensor, source: Any, name: str) -> Ragged:
    st = st.sort()
    offsets = _as_offsets(np.asarray(st.offsets))
    return Ragged(source, offsets, _leaves(call, st.values, name))


def _leaves(call: str, values: Any, name: str) -> Any:
    array = lambda x: _of_array(call, np.asarray(x), name)
    nested = lambda x: _of_segments(call, x, None, name)
    return elements.map_leaves(array, nested, values)


def _as_offsets(offsets: Any) -> np.ndarray:
    return np.asarray(offsets).astype(np.int64)


# ------------------------------------------------------------------ single rows


def get(column: Array | Ragged, key: int | slice) -> Any:
    """What a user means by `column[key]`, in the kind of thing that he gave."""
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
    """For each level, outermost first, the number of elements of each row, int64 `[n]`.

    Levels side by side in a tree share an entry, the greater number of the two.
    """
    own = np.diff(column.offsets)
    inner: list[np.ndarray] = []
    for child in _ragged_leaves(column):
        for depth, counts in enumerate(lengths(child)):
            sums = np.concatenate([[0], np.cumsum(counts)])
            sums = sums[column.offsets]
            spread = np.diff(sums)
            if depth == len(inner):
                inner.append(spread)
            else:
                inner[depth] = np.maximum(inner[depth], spread)
    return [own, *inner]


def _ragged_leaves(column: Ragged) -> list[Ragged]:
    found = jax.tree.leaves(
        column.values, is_leaf=lambda x: isinstance(x, (Array, Ragged))
    )
    return [x for x in found if isinstance(x, Ragged)]


def take(
    column: Array | Ragged, rows: np.ndarray, size: int, capacities: tuple[int, ...]
) -> Any:
    """`rows` as a batch of `size` rows, those beyond being zeros or empty.

    Args:
      column: to take them from.
      rows: integers, at most `size` of them.
      size: rows of the batch.
      capacities: of a ragged column's levels, outermost first; enough.

    Returns:
      NumPy array `[size, ...]`, or a SegmentTensor of NumPy arrays with `size` segments
      and that capacity, sorted.
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
    # Rebuilt as pytrees are, since the makers would put each array on the device.
    return SegmentTensor.tree_unflatten((size, True), (values, segment_ids))
