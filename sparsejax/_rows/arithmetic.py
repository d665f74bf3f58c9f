"""Sums, products and scalings of SelectedRows: what its operators do.

`SelectedRows` itself is only known here by what it can do, so that imports keep
pointing one way (the type imports its arithmetic). One rule for types: the data's type
wins, a strongly typed scalar never widens it.
"""

import operator
from collections.abc import Sequence
from typing import Any, NoReturn, Self, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import indexing


NO_DIVISION_BY_ROWS = (
    "SelectedRows as a divisor: the rows that are not stored are zero, so the result "
    "would be infinite there. Use .map(lambda v: x / v) for the stored rows, or "
    ".to_dense()."
)


_NO_LIST = "sparsejax.concatenate: takes a list of SelectedRows, got {found}."


Rows = TypeVar("Rows")  # SelectedRows, or what extends it


class Operators:
    """`+`, `-`, `*`, `/` of SelectedRows, which extends this."""

    def __neg__(self) -> Self:
        return _values_of(self, operator.neg)

    @overload
    def __add__(self, other: Self | float) -> Self: ...
    @overload
    def __add__(self, other: jax.Array | np.ndarray[Any, Any]) -> jax.Array: ...
    @overload
    def __add__(self, other: Any) -> Any: ...
    def __add__(self, other: Any) -> Any:
        return add(self, other)

    @overload
    def __radd__(self, other: Self | float) -> Self: ...
    @overload
    def __radd__(self, other: jax.Array | np.ndarray[Any, Any]) -> jax.Array: ...
    @overload
    def __radd__(self, other: Any) -> Any: ...
    def __radd__(self, other: Any) -> Any:
        return add(self, other)

    @overload
    def __sub__(self, other: Self | float) -> Self: ...
    @overload
    def __sub__(self, other: jax.Array | np.ndarray[Any, Any]) -> jax.Array: ...
    @overload
    def __sub__(self, other: Any) -> Any: ...
    def __sub__(self, other: Any) -> Any:
        return add(self, negative(other))

    @overload
    def __rsub__(self, other: Self | float) -> Self: ...
    @overload
    def __rsub__(self, other: jax.Array | np.ndarray[Any, Any]) -> jax.Array: ...
    @overload
    def __rsub__(self, other: Any) -> Any: ...
    def __rsub__(self, other: Any) -> Any:
        return add(-self, other)

    def __mul__(self, other: Any) -> Self:
        return multiply(self, other)

    def __rmul__(self, other: Any) -> Self:
        return multiply(self, other)

    def __truediv__(self, other: Any) -> Self:
        return divide(self, other)

    def __rtruediv__(self, other: Any) -> NoReturn:
        raise TypeError(NO_DIVISION_BY_ROWS)


def check_rows(call: str, rows: Any) -> None:
    """A TypeError unless `rows` are integers."""
    if not jnp.issubdtype(rows.dtype, jnp.integer):
        raise TypeError(
            f"{call}: rows must be integers (row ids), got {rows.dtype}. A function "
            "over the whole tree (jax.tree.map, or an optax transformation outside of "
            "sparsejax.optim.lazy) changes the ids too: use SelectedRows.map for the "
            "values, and put transformations inside lazy(...)."
        )


def is_selected_rows(x: Any) -> bool:
    """Whether `x` is a SelectedRows, without importing the type."""
    return hasattr(type(x), "coalesce") and hasattr(type(x), "from_dense")


def add(a: Any, b: Any) -> Any:
    """SelectedRows + SelectedRows, array or zero."""
    if is_selected_rows(b):
        _check_same_shape("SelectedRows +", a, b)
        return concatenate([a, b])
    if not _is_arraylike(b):
        return NotImplemented
    if not _is_scalar(b):
        return _add_to_array(b, a)
    if isinstance(b, (int, float)) and b == 0:
        return a  # so that Python's sum() works
    raise TypeError(
        f"SelectedRows + {b}: adding a scalar would change all {a.height} rows, those "
        "not stored. Call .to_dense() first, or use .map(lambda v: v + ...) to act on "
        "the stored rows only."
    )


def negative(x: Any) -> Any:
    """`-x`, or `x` itself where it has no negative (`add` then says so)."""
    return -x if is_selected_rows(x) or _is_arraylike(x) else x


def multiply(a: Any, b: Any) -> Any:
    """SelectedRows times a scalar, or times SelectedRows, row by row."""
    if is_selected_rows(b):
        _check_same_shape("SelectedRows *", a, b)
        merged = a.coalesce()  # a product is not linear in duplicates
        dtype = indexing.promote(a.dtype, b.dtype)
        other = b.get(merged.rows).astype(dtype)
        return merged.map(lambda v: v.astype(dtype) * other)
    if not _is_arraylike(b):
        return NotImplemented
    return a.map(lambda v: _scale(operator.mul, "*", v, b))


def divide(a: Any, b: Any) -> Any:
    """SelectedRows over a scalar."""
    if is_selected_rows(b):
        raise TypeError(NO_DIVISION_BY_ROWS)
    if not _is_arraylike(b):
        return NotImplemented
    return a.map(lambda v: _scale(operator.truediv, "/", v, b))


def concatenate(parts: Sequence[Rows]) -> Rows:
    """The sum of several SelectedRows of one shape, as one with all their slots.

    `concatenate([a, b]).to_dense() == a.to_dense() + b.to_dense()`. Nothing is
    merged: the capacity is the sum of theirs.

    Args:
      parts: at least one SelectedRows; heights and row shapes equal, dtypes promoted.

    Returns:
      SelectedRows.

    Raises:
      TypeError: a part is not a SelectedRows.
      ValueError: no parts, or shapes that differ.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> a = sj.SelectedRows([0], jnp.ones((1, 2)), height=3)
      >>> sj.concatenate([a, 2 * a]).to_dense()[0]
      Array([3., 3.], dtype=float32)

    References:
      PaddlePaddle, `sum` over SelectedRows.
    """
    try:
        summands: list[Any] = list(parts)
    except TypeError:
        raise TypeError(_NO_LIST.format(found=_arguments.kind_of(parts))) from None
    if not summands:
        raise ValueError(
            "sparsejax.concatenate: needs at least one SelectedRows, got an empty list."
        )
    for part in summands:
        if not is_selected_rows(part):
            raise TypeError(
                f"{_NO_LIST.format(found=_arguments.kind_of(part))[:-1]} in it. "
                "SelectedRows.from_dense makes one of an array."
            )
        _check_same_shape("sparsejax.concatenate", summands[0], part)
    if len(summands) == 1:
        return summands[0]
    rows_dtype = indexing.promote(*(p.rows.dtype for p in summands))
    dtype = indexing.promote(*(p.dtype for p in summands))
    rows = jnp.concatenate([p.rows.astype(rows_dtype) for p in summands])
    values = jnp.concatenate([p.values.astype(dtype) for p in summands])
    return type(summands[0])(rows, values, summands[0].height)


def _values_of(rows: Any, f: Any) -> Any:
    return rows.map(f)


def _is_arraylike(x: Any) -> bool:
    return isinstance(x, (bool, int, float, complex, jax.Array, np.ndarray, np.generic))


def _is_scalar(x: Any) -> bool:
    return np.ndim(x) == 0


def _check_same_shape(call: str, a: Any, b: Any) -> None:
    if a.shape != b.shape:
        raise ValueError(
            f"{call}: shapes {a.shape} and {b.shape} differ; both must stand for "
            "arrays of one shape."
        )


def _scale(op, symbol: str, values: jax.Array, by: Any) -> jax.Array:
    if not _is_scalar(by):
        raise TypeError(
            f"SelectedRows {symbol} array of shape {np.shape(by)}: only scalars scale "
            "a SelectedRows. Use .map to act on the stored values, or .to_dense()."
        )
    if isinstance(by, (bool, int, float, complex)):
        return op(values, by)
    # The data's type wins: a float32 scalar must not widen bfloat16 rows.
    wide = indexing.promote(values.dtype, by.dtype)
    narrow = values.dtype if jnp.issubdtype(values.dtype, jnp.inexact) else wide
    return op(values.astype(wide), jnp.asarray(by).astype(wide)).astype(narrow)


def _add_to_array(array: Any, rows: Any) -> jax.Array:
    """The scatter-add; the result has the array's type, as `array.at[...].add` has."""
    array = jnp.asarray(array)
    if array.shape != rows.shape:
        raise ValueError(
            f"SelectedRows + array: shapes {rows.shape} and {array.shape} differ; "
            "there is no broadcasting of a SelectedRows."
        )
    check_rows("SelectedRows + array", rows.rows)
    wide = indexing.accumulator_dtype(indexing.promote(array.dtype, rows.dtype))
    if wide == array.dtype:
        return indexing.add_rows(array, rows.safe_rows(), rows.values.astype(wide))
    # Sums of bfloat16, or float32 updates of bfloat16 weights: add in the wide type and
    # round once, on the rows alone. Added one by one, small updates would be lost.
    merged = rows.astype(wide).coalesce()
    new = indexing.take_rows(array, merged.rows).astype(wide) + merged.values
    return indexing.set_rows(array, merged.rows, new.astype(array.dtype))
