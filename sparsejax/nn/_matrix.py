"""The input matrix of Dense and SparseLinear: array or CSR.

`as_matrix` converts an argument to an array or a `Csr`, and `multiply` accepts both.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._lookup import lookup
from sparsejax._lookup.dot import dot
from sparsejax._lookup.embedding_bag import embedding_bag
from sparsejax._rows import SelectedRows, check_whole, indexing
from sparsejax._segments import SegmentTensor
from sparsejax._segments.reduce.sums import segment_sum


@dataclasses.dataclass(frozen=True)
class Csr:
    """A matrix in CSR, in which empty elements are harmless.

    Args:
      elements: SegmentTensor of `{"index", "value"}`, or of the indices alone.
      index: integers `[n]`; `columns` marks an element that contributes zero. Other
        indices out of range occur only in other modes than `"drop"`.
      value: `[n]`, zero for those elements; None if all other values are one.
      columns: number of columns.
    """

    elements: SegmentTensor
    index: jax.Array
    value: jax.Array | None
    columns: int


@jax.tree_util.register_pytree_with_keys_class
class Elements(SegmentTensor):
    """A SegmentTensor of a matrix's elements that knows the number of columns.

    A matrix that is too wide for a layer therefore raises, under `jit` too.
    """

    columns: int

    def tree_flatten_with_keys(self) -> Any:
        """Returns the children with their keys."""
        children, static = super().tree_flatten_with_keys()
        return children, (*static, self.columns)

    @classmethod
    def tree_unflatten(cls, static, children):
        """Rebuilds without checks, since JAX may pass any objects as children."""
        *elements, columns = static
        self = super().tree_unflatten(tuple(elements), children)
        self.__dict__["columns"] = columns
        return self

    @classmethod
    def of(cls, elements: SegmentTensor, columns: int) -> "Elements":
        """Makes a matrix of `elements` with `columns` columns."""
        static = elements.num_segments, elements.is_sorted, columns
        return cls.tree_unflatten(static, (elements.values, elements.segment_ids))


# ------------------------------------------------------------------ arguments


def as_matrix(x: Any, columns: int, mode: str = "drop") -> Any:
    """Converts `x` to an array `[..., columns]` or a `Csr`; raises if it cannot.

    Args:
      x: the argument.
      columns: the number of columns that `x` must have.
      mode: of the layer. With `"drop"`, an element whose column is out of range
        contributes zero; otherwise its column is left unchanged.
    """
    if not isinstance(x, SegmentTensor):
        shape = np.shape(x)
        if not shape or shape[-1] != columns:
            raise _other_columns(shape, columns)
        if not all(hasattr(x, name) for name in ("indptr", "indices", "data")):
            array = _arguments.to_array(x, "x")
            if not _is_real(array.dtype):
                raise TypeError(f"x must be real numbers, got {array.dtype}.")
            return array
        x = SegmentTensor.from_csr(x)
    check_columns(x, columns)
    return _as_csr(x, columns, mode)


def as_elements(x: Any, columns: int) -> SegmentTensor:
    """Returns a CSR matrix's elements; raises for an array, which has every column."""
    if isinstance(x, SegmentTensor):
        return x  # unchanged: nothing is copied to a device
    matrix = as_matrix(x, columns)
    if isinstance(matrix, Csr):
        return matrix.elements
    raise TypeError(
        f"inputs must be CSR, got an array of shape {matrix.shape}, which has every "
        "column, so every row of the table would be pulled. Convert it with "
        "SegmentTensor.from_csr, or use sparsejax.nn.Dense on the whole weights."
    )


def check_columns(x: SegmentTensor, columns: int) -> None:
    """Raises if `x` is known to have a different number of columns."""
    if isinstance(x, Elements) and x.columns != columns:
        raise _other_columns((x.num_segments, x.columns), columns)


def _other_columns(shape: tuple, columns: int) -> ValueError:
    """Makes the error for a matrix whose last axis is not `columns`."""
    return ValueError(
        f"x must have {columns} columns (in_features), got shape {shape}."
    )


def _as_csr(x: SegmentTensor, columns: int, mode: str) -> Csr:
    index, value = x.values, None
    if isinstance(x.values, dict):
        index, value = x.values["index"], x.values["value"]
    index = _arguments.as_ids(index, columns, "the index of x")
    if value is not None and (value.shape != index.shape or not _is_real(value.dtype)):
        raise TypeError(
            "the value of x must be real numbers in the shape of its index, "
            f"{index.shape}, got {value.dtype} of shape {value.shape}."
        )
    counts = indexing.in_range(x.segment_ids, x.num_segments)
    if mode == "drop":
        counts &= indexing.in_range(index, columns)
    index = jnp.where(counts, index, _arguments.scalar(columns, index))
    if value is not None:
        value = indexing.zero_unless(counts, value)
    return Csr(x, index, value, columns)


def _is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))


# ------------------------------------------------------------------ operations


def result_dtype(x: Any, weights: Any, dtype: Any) -> Any:
    """Returns the dtype of `x @ weights`: `dtype`, or the promoted dtype of both."""
    if dtype is not None:
        return dtype
    factor = x.value if isinstance(x, Csr) else x
    if factor is None:
        return weights.dtype
    return indexing.promote(factor.dtype, weights.dtype)


def multiply(x: Any, weights: Any, dtype: Any, mode: str) -> jax.Array:
    """Computes `x @ weights`, `[..., *weights.shape[1:]]`, in at least float32.

    `mode` decides what an element reads if its column is out of range or not stored.
    """
    wide = indexing.accumulator_dtype(dtype)
    if not isinstance(x, Csr):
        fix = "Pass x as CSR, or the whole weights."
        check_whole("params['kernel']", weights, "x is an array, which", fix)
        x, weights = x.astype(dtype), weights.astype(dtype)
        return jnp.tensordot(x, weights, axes=1, preferred_element_type=wide)
    segments, count = x.elements.segment_ids, x.elements.num_segments
    is_sorted = x.elements.is_sorted
    if mode != "drop" or isinstance(weights, SelectedRows):
        # Not `dot`: it reads zeros for a column out of range and for a row that is not
        # stored. A missing row is one that should have been pulled.
        skip = x.index == _arguments.scalar(x.columns, x.index)
        if mode != "drop":
            skip = ~indexing.in_range(segments, count)
        read_mode = "fill" if mode == "drop" else mode
        rows = lookup.read(weights, x.index, skip, read_mode).astype(wide)
        if x.value is not None:
            rows *= indexing.append_axes(x.value.astype(wide), rows.ndim)
        return segment_sum(rows, segments, count, indices_are_sorted=is_sorted)
    if x.value is None:
        ids = SegmentTensor.tree_unflatten((count, is_sorted), (x.index, segments))
        return embedding_bag(weights, ids, mode="zero").astype(wide)
    values = {"index": x.index, "value": x.value.astype(wide)}
    csr = SegmentTensor.tree_unflatten((count, is_sorted), (values, segments))
    return dot(csr, weights).astype(wide)
