"""The input matrix of Dense and SparseLinear: array or CSR.

`as_matrix` converts an argument to an array or to a SegmentTensor whose strays are
marked, and `multiply` accepts both.
"""

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
    """Converts `x` to an array `[..., columns]` or to CSR; raises if it cannot.

    Args:
      x: the argument.
      columns: the number of columns that `x` must have.
      mode: of the layer. With `"drop"`, an element whose column is out of range
        contributes zero; otherwise its column is left unchanged.

    Returns:
      An array, or a SegmentTensor of `{"index", "value"}` or of the indices alone. The
      index `columns` stands for an element that contributes zero, whose value is zero.
    """
    if _is_csr(x):
        return _without_strays(as_elements(x, columns), columns, mode)
    if np.shape(x)[-1:] != (columns,):
        raise _other_columns(np.shape(x), columns)
    array = _arguments.to_array(x, "x")
    if not _is_real(array.dtype):
        raise TypeError(f"x must be real numbers, got {array.dtype}.")
    return array


def as_elements(x: Any, columns: int) -> SegmentTensor:
    """Returns a CSR matrix's elements; raises for an array, which has every column."""
    if not _is_csr(x):
        raise TypeError(
            f"inputs must be CSR, got an array of shape {np.shape(x)}, which has every "
            "column, so every row of the table would be pulled. Convert it with "
            "SegmentTensor.from_csr, or use sparsejax.nn.Dense on the whole weights."
        )
    if isinstance(x, SegmentTensor):  # unchanged: nothing is copied to a device
        elements, width = x, getattr(x, "columns", columns)
    else:
        elements, width = SegmentTensor.from_csr(x), np.shape(x)[-1]
    if width != columns:
        raise _other_columns((elements.num_segments, width), columns)
    return elements


def _is_csr(x: Any) -> bool:
    names = "indptr", "indices", "data"
    return isinstance(x, SegmentTensor) or all(hasattr(x, name) for name in names)


def _other_columns(shape: tuple, columns: int) -> ValueError:
    """Makes the error for a matrix whose last axis is not `columns`."""
    return ValueError(
        f"x must have {columns} columns (in_features), got shape {shape}."
    )


def split(x: SegmentTensor) -> tuple[Any, Any]:
    """Returns the indices and the values of a matrix; None if all values are one."""
    values = x.values
    return (
        (values["index"], values["value"])
        if isinstance(values, dict)
        else (values, None)
    )


def _without_strays(x: SegmentTensor, columns: int, mode: str) -> SegmentTensor:
    """Marks the elements that contribute zero, as `as_matrix` describes."""
    index, value = split(x)
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
    return _replace(x, index, value)


def _replace(x: SegmentTensor, index: Any, value: Any) -> SegmentTensor:
    values = index if value is None else {"index": index, "value": value}
    static = x.num_segments, x.is_sorted
    return SegmentTensor.tree_unflatten(static, (values, x.segment_ids))


def _is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))


# ------------------------------------------------------------------ operations


def result_dtype(x: Any, weights: Any, dtype: Any) -> Any:
    """Returns the dtype of `x @ weights`: `dtype`, or the promoted dtype of both."""
    if dtype is not None:
        return dtype
    factor = split(x)[1] if isinstance(x, SegmentTensor) else x
    if factor is None:
        return weights.dtype
    return indexing.promote(factor.dtype, weights.dtype)


def multiply(x: Any, weights: Any, dtype: Any, mode: str) -> jax.Array:
    """Computes `x @ weights`, `[..., *weights.shape[1:]]`, in at least float32.

    `mode` decides what an element reads if its column is out of range or not stored.
    """
    wide = indexing.accumulator_dtype(dtype)
    if not isinstance(x, SegmentTensor):
        fix = "Pass x as CSR, or the whole weights."
        check_whole("params['kernel']", weights, "x is an array, which", fix)
        x, weights = x.astype(dtype), weights.astype(dtype)
        return jnp.tensordot(x, weights, axes=1, preferred_element_type=wide)
    index, value = split(x)
    value = None if value is None else value.astype(wide)
    if mode != "drop" or isinstance(weights, SelectedRows):
        # Not `dot`: it reads zeros for a column out of range and for a row that is not
        # stored. A missing row is one that should have been pulled.
        skip = index == _arguments.scalar(weights.shape[0], index)
        if mode != "drop":
            skip = ~indexing.in_range(x.segment_ids, x.num_segments)
        read_mode = "fill" if mode == "drop" else mode
        rows = lookup.read(weights, index, skip, read_mode).astype(wide)
        if value is not None:
            rows *= indexing.append_axes(value, rows.ndim)
        segments, count = x.segment_ids, x.num_segments
        return segment_sum(rows, segments, count, indices_are_sorted=x.is_sorted)
    if value is None:
        return embedding_bag(weights, x, mode="zero").astype(wide)
    return dot(_replace(x, index, value), weights).astype(wide)
