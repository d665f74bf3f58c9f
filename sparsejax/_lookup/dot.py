"""dot: a sparse matrix in rows (CSR) times a dense one, with a row-sparse gradient.

Invariant, as in `_lookup`: `dense` is read once, by one primitive whose operand is
`dense` itself, and an element that counts nothing is out of range for it too. So the
gradient of `dense` has the rows that the matrix names, and no others.
"""

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._lookup import lookup
from sparsejax._lookup.bag_sum import bag_sum
from sparsejax._rows import SelectedRows, indexing
from sparsejax._segments import SegmentTensor


_CALL = "sparsejax.dot"

_ELEMENTS = (
    "{call}: csr's values must be {{'index': int[n], 'value': dtype[n]}}, got {found}. "
    "For ids that all count one, use value=jnp.ones(n)."
)
_NOT_DENSE = (
    "{call}: dense must be a JAX or NumPy array, or a SelectedRows, of one axis or "
    "more, got {found}."
)


def dot(
    csr: Any, dense: Any, *, transpose: bool = False, num_columns: int | None = None
) -> Any:
    """`csr @ dense`, or with `transpose` the SelectedRows of `csr.T @ dense`.

    `out[s] = sum_{i in segment s} value[i] * dense[index[i]]`, and transposed
    `out[c] = sum_{i: index[i] == c} value[i] * dense[segment(i)]`. Differentiable in
    `dense` and in `value`. Under `sparsejax.grad` the gradient of `dense` is a
    SelectedRows of the rows in `index`, as a lookup's is of its ids.

    Args:
      csr: `[S, C]`, a matrix stored by rows. A SegmentTensor with a segment a row and
        values `{"index": int[n], "value": dtype[n]}`; or a scipy CSR matrix, or a
        `jax.experimental.sparse.BCSR` without batch. Duplicates count each. A column
        out of `[0, C)` counts nothing; it never wraps.
      dense: `[C, ...]`, transposed `[S, ...]`. Or a SelectedRows of that shape, and
        means what it stands for: a row that is not stored is zero.
      transpose: bool, multiply by the transposed matrix.
      num_columns: int C. Known from scipy's and BCSR's shapes, and from `dense` unless
        transposed; a SegmentTensor needs it with `transpose`.

    Returns:
      `[S, ...]`. Transposed, a SelectedRows of height C with one slot for each element
      of the matrix, duplicates not merged. The dtype is the common one of `value` and
      `dense`; sums are formed in at least float32.

    Raises:
      TypeError: `csr` is no such matrix, `dense` no array, or both are of booleans.
      ValueError: the shapes do not go together, or `num_columns` is missing or wrong.

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
        num_columns = _arguments.static_int(_CALL, "num_columns", num_columns)
    csr, num_columns = _as_csr(csr, num_columns)
    index, value, segment_ids = _elements(csr)
    dense = _as_dense(dense)
    if transpose and num_columns is None:
        raise ValueError(
            f"{_CALL}: transpose=True needs the number of columns, which a "
            "SegmentTensor does not know. Pass num_columns."
        )
    shape = (
        csr.num_segments,
        dense.shape[0] if num_columns is None else num_columns,
    )
    rows, columns = reversed(shape) if transpose else shape
    if dense.shape[0] != columns:
        mark = ".T" if transpose else ""
        raise ValueError(
            f"{_CALL}: csr{mark} is [{rows}, {columns}] and dense has shape "
            f"{dense.shape}: the first axis of dense must be {columns}."
        )

    index = _arguments.as_ids(_CALL, index, shape[1], "csr's index")
    counts = indexing.in_range(index, shape[1]) & indexing.in_range(
        segment_ids, shape[0]
    )
    # What counts nothing may hold anything, in all three.
    index = jnp.where(counts, index, _arguments.scalar(shape[1], index))
    dtype = indexing.promote(value.dtype, dense.dtype)
    if dtype == jnp.bool_:
        raise TypeError(
            f"{_CALL}: value and dense are both booleans, which have no sum. Cast one "
            "of them, with .astype(jnp.int32) to count."
        )
    wide = indexing.accumulator_dtype(dtype)
    value = indexing.zero_unless(counts, value).astype(wide)

    in_one = isinstance(dense, jax.Array) and wide == indexing.accumulator_dtype(
        dense.dtype
    )
    if in_one and not transpose:  # a row of the result is a bag of weighted rows
        is_sorted = csr.is_sorted
        out = bag_sum(
            dense, index, value, segment_ids, rows, indices_are_sorted=is_sorted
        )
        return out.astype(dtype)
    segment_ids = jnp.where(
        counts, segment_ids, _arguments.scalar(shape[0], segment_ids)
    )
    read, write = (segment_ids, index) if transpose else (index, segment_ids)
    products = lookup.read_rows(_CALL, dense, read, None, "zero").astype(wide)
    products *= indexing.append_axes(value, products.ndim)
    if transpose:
        return SelectedRows(write, products.astype(dtype), rows)
    out = jnp.zeros((rows, *dense.shape[1:]), wide)
    return indexing.add_rows(out, write, products).astype(dtype)


# ------------------------------------------------------------------ private


def _as_csr(csr: Any, num_columns: int | None) -> tuple[SegmentTensor, int | None]:
    """`csr` as a SegmentTensor, and its number of columns where that is known."""
    if isinstance(csr, SegmentTensor):
        return csr, num_columns
    # scipy and BCSR are known by what they have, so that neither need be imported.
    # scipy's CSC has the same three arrays, and means another matrix by them.
    known = all(hasattr(csr, name) for name in ("indptr", "indices", "data", "shape"))
    if not known or getattr(csr, "format", "csr") != "csr" or csr.indptr.ndim != 1:
        found = _arguments.kind_of(csr)
        if known:
            found += f", format {getattr(csr, 'format', 'BCSR')} and shape {csr.shape}"
        raise TypeError(
            f"{_CALL}: csr must be a SegmentTensor with values {{'index', 'value'}}, a "
            f"scipy CSR matrix or a BCSR, got {found}. SegmentTensor.from_csr makes "
            "one of indptr, indices and data; scipy's other formats have .tocsr()."
        )
    if num_columns is not None and num_columns != csr.shape[1]:
        raise ValueError(
            f"{_CALL}: num_columns={num_columns}, but csr has shape {csr.shape}."
        )
    values = {"index": jnp.asarray(csr.indices), "value": jnp.asarray(csr.data)}
    return SegmentTensor.from_offsets(values, jnp.asarray(csr.indptr)), csr.shape[1]


def _elements(csr: SegmentTensor) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Column, value and row of each element, or an error."""
    values = csr.values
    if not isinstance(values, dict) or values.keys() != {"index", "value"}:
        keys = isinstance(values, dict)
        found = f"a dict of {sorted(values)}" if keys else _arguments.kind_of(values)
        raise TypeError(_ELEMENTS.format(call=_CALL, found=found))
    index, value = values["index"], jnp.asarray(values["value"])
    if value.ndim != 1 or jnp.shape(index) != value.shape:
        found = f"shapes {jnp.shape(index)} and {value.shape}"
        raise ValueError(_ELEMENTS.format(call=_CALL, found=found))
    return index, value, csr.segment_ids


def _as_dense(dense: Any) -> Any:
    dense = _arguments.as_array(dense)
    if not isinstance(dense, (jax.Array, SelectedRows)):
        raise TypeError(_NOT_DENSE.format(call=_CALL, found=_arguments.kind_of(dense)))
    if dense.ndim == 0:
        raise ValueError(_NOT_DENSE.format(call=_CALL, found="a scalar"))
    return dense
