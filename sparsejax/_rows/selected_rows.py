"""SelectedRows: an array that stores only some of its rows.

A `SelectedRows` of height V has n slots, each with a row id and the values of the row.
Gradients of lookups, updates of optimizers and rows pulled from a store are
SelectedRows.

Every operation keeps these invariants:

- A slot whose id is not in `[0, height)` is *empty*; usually its id is `height`. Every
  operation ignores the values of empty slots, which may be anything.
- Duplicates are allowed and mean their sum.
- The number of slots (`capacity`) is static, so everything works under `jit`.
- The rows of a stack of K tables, `[K, V, ...]`, are its K * V rows, in order: row v of
  table k has the id k * V + v.
- In arithmetic the dtype of the values wins: a strongly typed scalar never widens it.

`jax.tree.map` over a `SelectedRows` also visits its ids, as a leaf that JAX moves but
does not compute with (see `row_ids`). Use `SelectedRows.map` for the values, and put
optax transformations inside `sparsejax.optim.lazy`, not around it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import (
    Any,
    Literal,
    Self,
    TypeGuard,
    TypeVar,
    overload,
)

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike, Spec
from sparsejax._rows import indexing, merge, row_ids


_WAYS_OUT = (
    "jax.tree.map calls its function with the row ids, [n, 1, ...], and with the "
    "values, [n, ...]. Use SelectedRows.map to change the values, .to_dense() for an "
    "array, or is_leaf=lambda x: isinstance(x, sparsejax.SelectedRows) in jax.tree.map."
)

Rows = TypeVar("Rows", bound="SelectedRows")


class _InErrors(type):
    """Adds advice to JAX's own errors, which format this type.

    The metaclass of SelectedRows. JAX raises these errors between the parts of a chain,
    where sparsejax has no code. The `repr` of the type is as usual.
    """

    def __format__(cls, spec: str) -> str:
        return (
            f"{cls!r}, the rows of a gradient or an update of a table (in an optimizer "
            "write sparsejax.optim.lazy(optax.chain(...)), with all transformations of "
            "optax inside of lazy, and sparsejax.optim.accumulate(lazy(tx), k, "
            "capacity) instead of optax.MultiSteps; put a scan over microbatches "
            "inside the loss, with jax.checkpoint)"
        )


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class SelectedRows(_arguments.NotAnArray, metaclass=_InErrors):
    """Rows of a `[height, ...]` array, by id.

    Represents the array `d` with `d[r] = sum_{i: rows[i] == r} values[i]`, and zeros in
    all other rows. Gradients, updates of optimizers and rows pulled from a
    `sparsejax.store.KVStore` are SelectedRows. Everything works under `jit`:

    - `to_dense()`, `from_dense(x)`: convert to and from an array.
    - `coalesce()`: merges duplicates; ids ascend.
    - `g[ids]`, `get(ids)`, `find(ids)`, `retain(ids)`: rows by id.
    - `map(f)`, `astype(dtype)`: change only the values.
    - `a + b`, `a - b` (with an array, the result is an array), `a * 2`, `a / 2`,
      `a * b`.
    - `shape`, `dtype`, `ndim`: of the dense array.
    - `unstacked()`: for a stack of tables, the rows of one table `[K * V, ...]`.
    - `capacity`, `num_rows()`, `filled()`, `safe_rows()`: about the slots.

    A pytree with two leaves. Arithmetic on the ids through a tree (`jax.tree.map`,
    optax outside of `sparsejax.optim.lazy`) raises an error; moving them works.

    Args:
      rows: integer `[n]`, the id of each slot; `rows[i] == height` marks an empty
        slot. Integers too narrow for `height` are widened.
      values: `[n, ...]`, any dtype, the values of each slot.
      height: int, the number of rows of the dense array.
      stack: tuple of ints, the leading axes of a stack of tables: `(K,)` for the array
        `[K, V, ...]`, whose height is K * V; row v of table k has the id k * V + v.

    Raises:
      TypeError, ValueError: an argument is not as described.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> g = sj.SelectedRows(jnp.array([2, 0, 2]), jnp.ones((3, 2)), height=4)
      >>> g.to_dense()
      Array([[1., 1.],
             [0., 0.],
             [2., 2.],
             [0., 0.]], dtype=float32)
      >>> g.coalesce().rows
      Array([0, 2, 4], dtype=int32)

    References:
      PaddlePaddle, `SelectedRows` {rows, value, height}; TensorFlow,
      `IndexedSlices`.
    """

    _ids: Any  # plain ids; or the leaf that a tree was rebuilt with
    values: jax.Array
    height: int
    stack: tuple[int, ...] = ()
    _row_ndim: int = 1  # the number of axes of a row
    _is_computed: bool = False  # a function of trees put integers in place of the ids

    _as_array = (
        "Call .to_dense() for the dense array, or use .rows and .values, .map(f) for a "
        "function of the values, or sparsejax.optim.global_norm."
    )
    _parts = ".to_dense(), or the .rows and .values of .coalesce()"

    def __init__(
        self,
        rows: ArrayLike | Spec,
        values: ArrayLike | Spec,
        height: int,
        stack: Sequence[int] = (),
    ):
        # Pytree code does not come here but to `tree_unflatten`, whose children may be
        # tracers, ShapeDtypeStructs or placeholders.
        rows = _array_or_spec(_arguments.saturate(rows), "rows")
        values = _array_or_spec(values, "values")
        fix = "It is the number of rows of the dense array."
        height = _arguments.static_int("height", height, hint=fix)
        if rows.shape == (0,) and not jnp.issubdtype(rows.dtype, jnp.integer):
            rows = jnp.zeros((0,), jnp.int32)  # SelectedRows([], ...) means no rows
        _check_rows(rows)
        if len(rows.shape) != 1 or values.shape[:1] != rows.shape:
            raise ValueError(
                f"rows must have shape [n] and values shape [n, ...], got {rows.shape} "
                f"and {values.shape}. For a batch use jax.vmap."
            )
        wide = _arguments.index_dtype(height, rows.dtype)
        if wide != rows.dtype and not isinstance(rows, jax.ShapeDtypeStruct):
            rows = jnp.asarray(rows).astype(wide)
        row_ndim = len(values.shape) - 1
        vars(self).update(_ids=rows, values=values, height=height, _row_ndim=row_ndim)
        if stack != ():
            vars(self).update(stack=_check_stack(stack, height))

    # -- pytree ------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the children with their keys."""
        keys = jax.tree_util.GetAttrKey("rows"), jax.tree_util.GetAttrKey("values")
        children, static = SelectedRows.tree_flatten(self)
        return tuple(zip(keys, children)), static

    def tree_flatten(self) -> tuple[Any, Any]:
        """Returns the children; the first one is a leaf of `row_ids`."""
        ids = self._ids
        if not self._is_computed:
            ids = row_ids.IDS.seal(ids, self._row_ndim)
        return (ids, self.values), (self.height, self.stack, self._row_ndim)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Self:
        """Rebuilds without checks: children may be anything JAX puts there."""
        (ids, values), (height, stack, row_ndim) = children, static
        ids = row_ids.IDS.from_words(ids, values, row_ndim)
        fields = dict(height=height, stack=stack, _row_ndim=row_ndim)
        if isinstance(ids, jax.Array) and jnp.issubdtype(ids.dtype, jnp.integer):
            fields["_is_computed"] = True
        return _unchecked(cls, _ids=ids, values=values, **fields)

    def __getstate__(self) -> dict[str, Any]:
        # For pickle and copy. Plain ids can be read without JAX.
        return {**vars(self), "_ids": self.rows}

    # -- what it is --------------------------------------------------------------

    @property
    def rows(self) -> jax.Array:
        """The id of each slot, integers `[n]`."""
        ids, values = self._ids, getattr(self.values, "shape", None)
        if self._is_computed:
            raise TypeError(
                "A function of the leaves of a SelectedRows computed "
                f"{_arguments.show_spec(ids)} in place of the row ids. {_WAYS_OUT}"
            )
        if row_ids.IDS.dtype_in(ids) and values is not None:
            slots = len(ids.shape) - self._row_ndim
            expected = (*values[:slots], *(1,) * self._row_ndim) if slots >= 0 else None
            if ids.shape != expected:
                raise ValueError(
                    "A function of the leaves of a SelectedRows changed their shapes: "
                    f"row ids {ids.shape}, values {values}. {_WAYS_OUT}"
                )
        # Not kept: a tracer that is kept can outlive the function that it belongs to.
        return row_ids.IDS.unseal(ids, self._row_ndim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense array: `(height, *values.shape[1:])`.

        For a stack it is `(*stack, height // prod(stack), *values.shape[1:])`.
        """
        return (*self.row_shape, *self.values.shape[1:])

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The leading axes of the dense array: `(height,)`, or (K, V) for a stack."""
        self._check_no_batch()
        return (*self.stack, self.height // math.prod(self.stack))

    @property
    def dtype(self) -> Any:
        """The type of the values."""
        return self.values.dtype

    @property
    def ndim(self) -> int:
        """Rank of the dense array."""
        self._check_no_batch()
        return len(self.stack) + len(self.values.shape)

    @property
    def capacity(self) -> int:
        """Number of slots, filled or empty; static."""
        self._check_no_batch()
        return self.values.shape[0]

    def num_rows(self) -> jax.Array:
        """Counts filled slots, each duplicate included, as an int32 scalar."""
        return jnp.sum(self.filled(), axis=-1, dtype=jnp.int32)

    def _check_no_batch(self) -> None:
        """Raises a ValueError for a batch, which has more than one axis of slots."""
        if len(self.values.shape) - self._row_ndim > 1:
            raise ValueError(
                "This is a batch of SelectedRows, as jax.vmap and jax.lax.scan return, "
                f"with values {_arguments.show_spec(self.values)}. Use "
                "jax.vmap(f)(batch), or sum them: SelectedRows(batch.rows.ravel(), "
                "jnp.concatenate(batch.values), batch.height)."
            )

    def __repr__(self) -> str:
        ids, values = self._ids, _arguments.show_spec(self.values)
        with contextlib.suppress(TypeError, ValueError):  # leaves that do not fit
            ids = self.rows
        rows, num_rows = _arguments.show_spec(ids), ""
        is_concrete = _arguments.is_concrete(ids) and ids.ndim == 1
        if is_concrete and jnp.issubdtype(ids.dtype, jnp.integer):
            ids = np.asarray(ids)
            filled = (ids >= 0) & (ids < self.height)
            shown = [str(r) if ok else "-" for r, ok in zip(ids[:8], filled[:8])]
            rows = f"[{' '.join([*shown, *['...'] * (ids.size > 8)])}]"
            num_rows = f", num_rows={filled.sum()}"
        stack = f", stack={self.stack}" if self.stack else ""
        height = f"height={self.height}{stack}"
        return f"SelectedRows(rows={rows}, values={values}, {height}{num_rows})"

    # -- to and from dense -------------------------------------------------------

    @classmethod
    def from_dense(cls, x: ArrayLike, capacity: int | None = None) -> Self:
        """Stores the rows of `x` that are not all zero, with ascending ids.

        Args:
          x: `[V, ...]`.
          capacity: int, slots of the result. The default is the number of non-zero
            rows, or V inside `jit`, where this number is unknown.

        Returns:
          SelectedRows of height V.

        Raises:
          ValueError: `x` has more non-zero rows than `capacity`. Inside `jit`, all
            values become NaN instead.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.SelectedRows.from_dense(jnp.array([[0.0], [3.0], [0.0]])).rows
          Array([1], dtype=int32)

        References:
          MXNet, `cast_storage(x, "row_sparse")`.
        """
        x = _arguments.to_array(x, "x")
        if x.ndim == 0:
            raise ValueError("x must have at least one axis, got a scalar.")
        used = jnp.any(x != 0, axis=tuple(range(1, x.ndim)))
        count = jnp.sum(used, dtype=jnp.int32)
        if capacity is None:
            capacity = int(count) if _arguments.is_concrete(count) else x.shape[0]
        capacity = _arguments.static_int("capacity", capacity)
        height = x.shape[0]
        (rows,) = jnp.nonzero(used, size=capacity, fill_value=height)
        rows = rows.astype(_arguments.index_dtype(height))
        values = indexing.take_rows(x, rows)
        values = _arguments.report_overflow(values, count, capacity)
        return cls(rows, values, height)

    def to_dense(self) -> jax.Array:
        """Returns the dense array, `[height, ...]`; duplicates are summed.

        Floats narrower than float32 are summed in float32 and rounded once. The sum of
        booleans is their logical or.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.SelectedRows(jnp.array([1, 1]), jnp.array([2.0, 3.0]), 3).to_dense()
          Array([0., 5., 0.], dtype=float32)
        """
        self._check_no_batch()
        shape = (self.height, *self.values.shape[1:])
        zeros = jnp.zeros(shape, indexing.accumulator_dtype(self.dtype))
        values = self.values.astype(zeros.dtype)
        dense = indexing.add_rows(zeros, self.safe_rows(), values).astype(self.dtype)
        return stacked_rows(self, dense)

    def __array_function__(
        self, function: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        if function in (np.array_equal, np.array_equiv):  # they would answer False
            self.__array__()
        return function._implementation(*args, **kwargs)

    # -- rows --------------------------------------------------------------------

    def __getitem__(self, ids: ArrayLike) -> jax.Array:
        """Reads rows by id as `to_dense()[ids]` does; see `get` for other ids."""
        way_out = "Use .get(ids), .rows and .values, or .to_dense()."
        if self.stack:
            raise TypeError(
                "a stack of tables has no [ids]. Use .get(k * V + v), or .to_dense()."
            )
        return self.get(_arguments.as_indices(ids, self.height, way_out))

    @overload
    def coalesce(self, capacity: int | None = None) -> SelectedRows: ...
    @overload
    def coalesce(
        self, capacity: int | None = None, *, return_overflow: Literal[True]
    ) -> tuple[SelectedRows, jax.Array]: ...
    def coalesce(
        self, capacity: int | None = None, *, return_overflow: bool = False
    ) -> Any:
        """Merges duplicates: each row at most once, ids ascending, empty slots last.

        `values'[j] = sum_{i: rows[i] == rows'[j]} values[i]`, summed in float32 for
        narrower floats. Rows whose sum is zero are kept. The order of summation is
        fixed, so equal input gives equal bits.

        Args:
          capacity: int, slots of the result. The default, `min(n, height)`, always
            suffices.
          return_overflow: True also returns the number of rows that did not fit.

        Returns:
          SelectedRows, or `(SelectedRows, overflow)` with an int32 scalar. On overflow
          the rows with the largest ids are dropped.

        Raises:
          ValueError: the rows do not fit and `return_overflow` is not set. Inside
            `jit`, all values become NaN instead.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> g = sj.SelectedRows(jnp.array([3, 1, 3]), jnp.array([1.0, 5.0, 2.0]), 4)
          >>> g.coalesce().rows, g.coalesce().values
          (Array([1, 3, 4], dtype=int32), Array([5., 3., 0.], dtype=float32))

        References:
          PaddlePaddle, `scatter::MergeAdd`; PyTorch, `Tensor.coalesce`.
        """
        enough = _compat.min_dim(self.capacity, self.height)
        if capacity is None:
            capacity = enough
        capacity = _arguments.static_int("capacity", capacity)
        rows, values, count = merge.coalesce(
            self.safe_rows(), self.values, self.height, capacity
        )
        if return_overflow:
            overflow = jnp.maximum(count - capacity, 0)
            return with_slots(self, rows, values), overflow
        if _arguments.may_exceed(enough, capacity):
            values = _arguments.report_overflow(values, count, capacity)
        return with_slots(self, rows, values)

    def get(self, ids: ArrayLike) -> jax.Array:
        """Returns the rows with these ids, in order; zeros for rows not stored.

        Args:
          ids: integers of any shape.

        Returns:
          `[*ids.shape, *shape[1:]]`.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> g = sj.SelectedRows(jnp.array([7, 2]), jnp.array([1.0, 5.0]), 9)
          >>> g.get(jnp.array([2, 3, 7]))
          Array([5., 0., 1.], dtype=float32)

        References:
          PaddlePaddle, `SelectedRows::Get`.
        """
        return self.find(ids)[0]

    def find(self, ids: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Returns `get(ids)`, and which rows are stored, bool `[*ids.shape]`.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> g = sj.SelectedRows(jnp.array([7, 2]), jnp.array([0.0, 5.0]), 9)
          >>> g.find(jnp.array([2, 3, 7]))[1]
          Array([ True, False,  True], dtype=bool)
        """
        ids = _arguments.as_ids(ids, self.height)
        merged = self.coalesce()
        slot, stored = merge.find_slots(merged.rows, ids, self.height)
        slot = jnp.where(stored, slot, _arguments.scalar(merged.capacity, slot))
        # Wide for the derivative, which sums the cotangents of a row read many times.
        values = merged.values.astype(indexing.accumulator_dtype(self.dtype))
        return indexing.take_rows(values, slot).astype(self.dtype), stored

    def retain(self, ids: ArrayLike) -> SelectedRows:
        """Keeps only the rows in `ids`; the other slots become empty.

        Args:
          ids: integers of any shape; repetitions have no effect.

        Returns:
          SelectedRows of the same capacity, slots in the same order.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> g = sj.SelectedRows(jnp.array([7, 2]), jnp.array([1.0, 5.0]), 9)
          >>> g.retain([2, 2]).rows
          Array([9, 2], dtype=int32)

        References:
          MXNet, `sparse.retain`.
        """
        self._check_no_batch()
        ids = _arguments.as_ids(ids, self.height).reshape(-1)
        rows = self.rows
        _, keep = merge.find_slots(jnp.sort(ids), rows, self.height)
        rows = jnp.where(keep, rows, _arguments.scalar(self.height, rows))
        return with_slots(self, rows, indexing.zero_unless(keep, self.values))

    def map(self, f: Callable[[jax.Array], jax.Array]) -> SelectedRows:
        """Applies `f` to the values; the ids stay the same.

        If `f` is not linear and there are duplicates, call `.coalesce()` first.

        Args:
          f: `[n, ...] -> [n, ...]`; the row shape may change.

        Raises:
          ValueError: `f` changes the number of slots.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> g = sj.SelectedRows(jnp.array([1]), jnp.array([[3.0, 4.0]]), 2)
          >>> g.map(lambda v: v.clip(max=3.5)).values
          Array([[3. , 3.5]], dtype=float32)
        """
        values = _array_or_spec(f(self.values), "values")
        if not row_ids.IDS.dtype_in(self._ids):
            _check_rows(self.rows)
        if values.shape[:1] != self.values.shape[:1]:
            raise ValueError(
                f"f must keep the {self.capacity} slots, got shape {values.shape}."
            )
        row_ndim = self._row_ndim + len(values.shape) - len(self.values.shape)
        return _replaced(self, values=values, _row_ndim=row_ndim)

    def astype(self, dtype: jax.typing.DTypeLike) -> SelectedRows:
        """Returns the same rows with values cast to `dtype`."""
        return self.map(lambda v: v.astype(dtype))

    # -- a stack of tables -------------------------------------------------------

    def unstacked(self) -> SelectedRows:
        """Returns the rows as rows of `[height, ...]` instead of `[K, V, ...]`.

        Returns itself if it is not a stack of tables.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> g = sj.SelectedRows(jnp.array([7]), jnp.ones((1, 2)), 12, stack=(3,))
          >>> g.shape, g.unstacked().shape
          ((3, 4, 2), (12, 2))
        """
        self._check_no_batch()
        if not self.stack:
            return self
        return SelectedRows(self.rows, self.values, self.height)

    # -- arithmetic ---------------------------------------------------------------

    def __neg__(self) -> SelectedRows:
        return self.map(operator.neg)

    @overload
    def __add__(self, other: Self | float) -> Self: ...
    @overload
    def __add__(self, other: jax.Array | np.ndarray[Any, Any]) -> jax.Array: ...
    @overload
    def __add__(self, other: Any) -> Any: ...
    def __add__(self, other: Any) -> Any:
        if is_selected_rows(other):
            _check_same_shape(self, other)
            return concatenate([self, other])
        if not _is_arraylike(other):
            return NotImplemented
        if np.ndim(other):
            if row_ids.PAIRS.dtype_in(other) and _arguments.is_concrete(other):
                raise TypeError(
                    "SelectedRows + scale_bias of a QuantizedTable works only inside "
                    "jit: jax.jit(optax.apply_updates)(params, updates)."
                )
            total = known_sum(self, other)
            return _add_to_array(other, self) if total is None else total
        if isinstance(other, (int, float)) and other == 0:
            return self  # sum() starts with 0
        raise TypeError(
            f"SelectedRows + {other}: adding a scalar would change all {self.height} "
            "rows. Call .to_dense(), or .map(lambda v: v + ...) for the stored rows."
        )

    __radd__ = __add__

    @overload
    def __sub__(self, other: Self | float) -> Self: ...
    @overload
    def __sub__(self, other: jax.Array | np.ndarray[Any, Any]) -> jax.Array: ...
    @overload
    def __sub__(self, other: Any) -> Any: ...
    def __sub__(self, other: Any) -> Any:
        if is_selected_rows(other) or _is_arraylike(other):
            return self.__add__(-other)
        return NotImplemented

    def __rsub__(self, other: Any) -> Any:
        return (-self).__add__(other)

    def __mul__(self, other: Any) -> SelectedRows:
        if is_selected_rows(other):
            _check_same_shape(self, other)
            merged = self.coalesce()  # a product is not linear in duplicates
            dtype = indexing.promote(self.dtype, other.dtype)
            factor = other.get(merged.rows).astype(dtype)
            return merged.map(lambda v: v.astype(dtype) * factor)
        if not _is_arraylike(other):
            return NotImplemented
        return self.map(lambda v: _scale(operator.mul, "*", v, other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> SelectedRows:
        if not _is_arraylike(other):
            return NotImplemented
        return self.map(lambda v: _scale(operator.truediv, "/", v, other))

    # -- slots -------------------------------------------------------------------

    def filled(self) -> jax.Array:
        """Returns which slots are not empty, bool `[n]`."""
        return indexing.in_range(self.rows, self.height)

    def safe_rows(self) -> jax.Array:
        """Returns `rows` with each id out of range replaced by `height`."""
        rows = self.rows
        _check_rows(rows)
        filled = indexing.in_range(rows, self.height)
        return jnp.where(filled, rows, _arguments.scalar(self.height, rows))


# ------------------------------------------------------------------ functions


def is_selected_rows(x: Any) -> TypeGuard[SelectedRows]:
    """Returns True for a SelectedRows; for `is_leaf=` of `jax.tree` functions."""
    return isinstance(x, SelectedRows)


def with_known_sum(rows: Rows, array: Any, total: Any) -> Rows:
    """Returns the same rows with the note that `array + rows` is `total`.

    The note belongs to this object and these values only. Results of operations or of
    `jax.jit` do not have it.
    """
    return _replaced(rows, _known_sum=(array, rows.values, total))


def known_sum(rows: SelectedRows, array: Any) -> Any:
    """Returns the `array + rows` that `with_known_sum` noted, or None."""
    table, values, total = vars(rows).get("_known_sum", (None, None, None))
    return total if table is array and values is rows.values else None


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Sums SelectedRows of equal shape by joining their slots.

    `concatenate([a, b]).to_dense() == a.to_dense() + b.to_dense()`. Duplicates are
    not merged: the capacities add up.

    Args:
      parts: one or more SelectedRows of equal shape; dtypes are promoted.

    Returns:
      SelectedRows.

    Raises:
      TypeError: a part is not a SelectedRows.
      ValueError: `parts` is empty, or the shapes differ.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> a = sj.SelectedRows([0], jnp.ones((1, 2)), height=3)
      >>> sj.concatenate([a, 2 * a]).to_dense()[0]
      Array([3., 3.], dtype=float32)

    References:
      PaddlePaddle, `sum` over SelectedRows.
    """
    summands: list[Any] = list(parts)
    if not summands:
        raise ValueError("parts must not be empty: pass at least one SelectedRows.")
    for part in summands:
        if not is_selected_rows(part):
            raise TypeError(
                f"every part must be a SelectedRows, got {_arguments.kind_of(part)}. "
                "Convert arrays with SelectedRows.from_dense."
            )
        _check_same_shape(summands[0], part)
    if len(summands) == 1:
        return summands[0]
    rows_dtype = indexing.promote(*(p.rows.dtype for p in summands))
    dtype = indexing.promote(*(p.dtype for p in summands))
    rows = jnp.concatenate([p.rows.astype(rows_dtype) for p in summands])
    values = jnp.concatenate([p.values.astype(dtype) for p in summands])
    total: Any = with_slots(summands[0], rows, values)
    return total


def with_slots(like: SelectedRows, rows: Any, values: Any) -> SelectedRows:
    """Returns a SelectedRows with these slots, and the height and stack of `like`."""
    return SelectedRows(rows, values, like.height, like.stack)


def flat_rows(like: SelectedRows, array: Any) -> Any:
    """Reshapes `[K, V, ...]` to `[K * V, ...]` if `like` is a stack of tables."""
    if not like.stack:
        return array
    return indexing.merge_axes(jnp.asarray(array), len(like.row_shape))


def stacked_rows(like: SelectedRows, array: Any) -> Any:
    """Inverts `flat_rows`."""
    if not like.stack:
        return array
    return array.reshape(*like.row_shape, *array.shape[1:])


def restacked(rows: SelectedRows, stack: tuple[int, ...], array: Any) -> SelectedRows:
    """Inverts `SelectedRows.unstacked`.

    Args:
      rows: of one table.
      stack: the leading axes.
      array: None, or the array `[K, V, ...]` to which the rows are added. The sum that
        `with_known_sum` noted is with this array as one table.
    """
    out = SelectedRows(rows.rows, rows.values, rows.height, stack)
    _, values, total = vars(rows).get("_known_sum", (None, None, None))
    if array is None or values is not rows.values:
        return out
    return with_known_sum(out, array, stacked_rows(out, total))


# ------------------------------------------------------------------ private


def _unchecked(kind: type[Rows], **fields: Any) -> Rows:
    """Builds SelectedRows of its fields, without the checks of `__init__`."""
    rows = object.__new__(kind)
    vars(rows).update(fields)
    return rows


def _replaced(rows: Rows, **fields: Any) -> Rows:
    """Returns `rows` with other fields, without checks."""
    return _unchecked(type(rows), **{**vars(rows), **fields})


def _check_stack(stack: Any, height: int) -> tuple[int, ...]:
    """Returns the leading axes of a stack, as ints whose product divides `height`."""
    sizes = stack if isinstance(stack, (tuple, list)) else (stack,)
    sizes = tuple(_arguments.static_int("a size in stack", n, 1) for n in sizes)
    if height % math.prod(sizes):
        raise ValueError(
            f"stack must be a tuple of ints whose product divides height={height}, got "
            f"{_arguments.show(stack)}. K tables of V rows have height=K * V."
        )
    return sizes


def _array_or_spec(x: Any, name: str) -> jax.Array | jax.ShapeDtypeStruct:
    """Converts lists and NumPy arrays to JAX arrays; tracers and specs pass through."""
    is_spec = hasattr(x, "dtype") and hasattr(x, "shape")
    if is_spec and not isinstance(x, np.ndarray):
        return x
    return _arguments.to_array(x, name)


def _check_rows(rows: Any) -> None:
    """Raises a TypeError unless `rows` are integers."""
    dtype = getattr(rows, "dtype", None)  # a filter of leaves puts None there
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"rows must be integers (row ids), got {dtype}. Use "
            "sparsejax.value_and_grad, SelectedRows.map to change the values, and "
            "sparsejax.optim.lazy(...) around optax transformations."
        )


def _is_arraylike(x: Any) -> bool:
    return isinstance(x, (bool, int, float, complex, jax.Array, np.ndarray, np.generic))


def _check_same_shape(a: Any, b: Any) -> None:
    if a.shape != b.shape:
        raise ValueError(
            f"The dense shapes must be equal, got {a.shape} and {b.shape}."
        )


def _scale(op, symbol: str, values: jax.Array, by: Any) -> jax.Array:
    if np.ndim(by):
        raise TypeError(
            f"SelectedRows {symbol} array: the array must be a scalar, got shape "
            f"{np.shape(by)}. Use .map to change the stored values, or .to_dense()."
        )
    if isinstance(by, (bool, int, float, complex)):
        return op(values, by)
    # The dtype of the values wins: a float32 scalar must not widen bfloat16 rows.
    wide = indexing.promote(values.dtype, by.dtype)
    narrow = values.dtype if jnp.issubdtype(values.dtype, jnp.inexact) else wide
    return op(values.astype(wide), jnp.asarray(by).astype(wide)).astype(narrow)


def _add_to_array(array: Any, rows: Any) -> jax.Array:
    """Scatter-adds in the array's dtype, as `array.at[...].add` does."""
    if row_ids.PAIRS.dtype_in(array):
        words = row_ids.words_of_leaf(array)  # see `optim.rounding`
        return row_ids.seal_words(_add_to_array(words, rows))
    array = jnp.asarray(array)
    if array.shape != rows.shape:
        raise ValueError(
            f"SelectedRows + array: the shapes must be equal, got {rows.shape} and "
            f"{array.shape}. A SelectedRows does not broadcast."
        )
    array = flat_rows(rows, array)
    wide = indexing.accumulator_dtype(indexing.promote(array.dtype, rows.dtype))
    if wide == array.dtype:
        values = rows.values.astype(wide)
        return stacked_rows(rows, indexing.add_rows(array, rows.safe_rows(), values))
    # Sums of bfloat16 values, and float32 updates of bfloat16 weights, are added in the
    # wide dtype and rounded once, for these rows only. Rounding after each addition
    # would lose small updates.
    merged = rows.astype(wide).coalesce()
    new = indexing.take_rows(array, merged.rows).astype(wide) + merged.values
    new = indexing.set_rows(array, merged.rows, new.astype(array.dtype))
    return stacked_rows(rows, new)
