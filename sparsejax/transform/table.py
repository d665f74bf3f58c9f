"""TableRef: a table that has not been read yet; and planting a delta into a read.

While the interpreter walks a program, a table travels as a `TableRef` instead of an
array. A ref stands for a *row-wise view* of the table: an array `X` with one axis over
the table's rows, such that the slice of `X` at row r depends on `table[r]` alone.
Casts, scalings, reshapes and transposes that keep rows whole give another view. Nothing
is computed until rows are read; then these steps are applied to the rows read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments, _compat, _mesh
from sparsejax._arguments import ArrayLike
from sparsejax._rows import indexing


@dataclasses.dataclass(frozen=True)
class RowFunction:
    """A function `fn(rows [n, ...], *operands) -> [n, ...]` of each row alone.

    The operands are not closed over by `fn`, so that a ref can be passed into a
    `shard_map`, whose body must not close over arrays from outside.
    """

    fn: Callable[..., jax.Array]
    operands: tuple[Any, ...] = ()

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Applies the function to rows `[n, ...]`."""
        return self.fn(rows, *self.operands)


class RowReader:
    """How a view reads rows of an array whose rows are not in the order of ids.

    The rows of a table may be sharded over devices. Such a view has all rows of a table
    but is never an array: nothing moves unless rows are read. A reader is hashable, and
    the same in both walks.
    """

    def read(
        self, ctx: Any, ref: TableRef, ids: jax.Array, counts: jax.Array, nearest: bool
    ) -> jax.Array:
        """Reads rows, and records that in `ctx`.

        Args:
          ctx: the `RuleContext`.
          ref: the view; its steps are not applied here.
          ids: integers of any shape.
          counts: bools of the same shape, which of the reads get a gradient.
          nearest: True if an id that does not count must read the nearest row; else it
            may read anything.

        Returns:
          `[*ids.shape, *row]`.
        """
        raise NotImplementedError

    def bag_sum(
        self, ctx: Any, ref: TableRef, ids: jax.Array, rest: Sequence[Any], spec: Any
    ) -> jax.Array:
        """Computes the sums of rows of `sparsejax._lookup.bag_sum`.

        Args:
          ctx, ref, ids: as in `read`.
          rest, spec: the other arguments of the primitive, and its `BagSpec`.
        """
        raise NotImplementedError

    def refuse(self, ref: TableRef, use: str) -> NoReturn:
        """Raises the error of a use of the whole table, described by `use`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class TableRef:
    """A row-wise view of table number `index`.

    Args:
      index: the number of the table in this transformation.
      array: the table itself, `[V, ...]`.
      shape: shape of the view.
      dtype: type of the view.
      row_axes: the axes of the view that run over the table's rows: one, or two for a
        stack. A stack is a table `[K * V, ...]` reshaped to `[K, V, ...]`, or a
        parameter of that shape that is read by two numbers, whose `array` is reshaped.
      stopped: True if a `stop_gradient` is between table and view, so that reads of
        the view are not differentiated.
      steps: functions that map rows of the table `[n, *array.shape[1:]]` to rows of the
        view `[n, *content]`. `content` is `shape` without the axes of rows.
      first: the first of the table's rows that the view has, an integer scalar; None
        if it has all of them. A table of a stack is such a view.
      reader: a `RowReader`, if row r of the view is not row r of `array`; else None.
      mesh: the mesh of the table, if `array` is on a mesh with other types of axes,
        such as Auto instead of Explicit; else None.

    Example:
      >>> import jax.numpy as jnp
      >>> from sparsejax.extend import TableRef
      >>> ref = TableRef.of(0, jnp.ones((5, 2)))
      >>> doubled = ref.then(lambda rows: 2 * rows)
      >>> doubled.shape, doubled.content, doubled.view(jnp.ones((1, 2)))
      ((5, 2), (2,), Array([[2., 2.]], dtype=float32))
    """

    index: int
    array: jax.Array
    shape: tuple[int, ...]
    dtype: Any
    row_axes: tuple[int, ...] = (0,)
    stopped: bool = False
    steps: tuple[RowFunction, ...] = ()
    first: Any = None
    reader: RowReader | None = None
    mesh: Any = None

    @classmethod
    def of(cls, index: int, array: jax.Array, stacked: bool = False) -> TableRef:
        """Makes the view of a table, or of `[K, V, ...]` as `[K * V, ...]`."""
        shape, dtype = tuple(array.shape), array.dtype
        if not stacked:
            return cls(index, array, shape, dtype)
        rows = indexing.merge_axes(array, 2)
        return cls(index, rows, shape, dtype, row_axes=(0, 1))

    @classmethod
    def of_array(cls, array: jax.Array) -> TableRef:
        """Makes a view of an array that is not a table of the walk.

        Its reads are not recorded, and JAX differentiates them as for any array.
        """
        return dataclasses.replace(cls.of(-1, array), stopped=True)

    @property
    def ndim(self) -> int:
        """Rank of the view."""
        return len(self.shape)

    @property
    def height(self) -> int:
        """Number of rows of the view."""
        return math.prod(self.shape[axis] for axis in self.row_axes)

    @property
    def is_stack(self) -> bool:
        """True if the view has two axes of rows; the first one counts tables."""
        return len(self.row_axes) == 2

    @property
    def row_axis(self) -> int | None:
        """The axis of the view that runs over the table's rows; None for a stack."""
        return None if self.is_stack else self.row_axes[0]

    @property
    def has_all_rows(self) -> bool:
        """Returns True if row r of the view is made of row r of `array`."""
        return not self.is_stack and self.first is None and self.reader is None

    @property
    def content(self) -> tuple[int, ...]:
        """Shape of one row of the view."""
        return without(self.shape, self.row_axes)

    def part(self, start: ArrayLike, size: int) -> TableRef:
        """Returns tables `start, ..., start + size - 1` of a stack."""
        stack_axis, row_axis = self.row_axes
        shape = list(self.shape)
        shape[stack_axis] = size
        dtype = _arguments.index_dtype(self.array.shape[0])
        first = jnp.asarray(start, dtype) * np.array(self.shape[row_axis], dtype)
        if self.first is not None:
            first += self.first
        return dataclasses.replace(self, shape=tuple(shape), first=first)

    def one(self, number: ArrayLike) -> TableRef:
        """Returns table `number` of a stack."""
        stack_axis, row_axis = self.row_axes
        part = self.part(number, 1)
        shape = without(part.shape, (stack_axis,))
        axis = row_axis - (row_axis > stack_axis)
        return dataclasses.replace(part, shape=shape, row_axes=(axis,))

    def then(self, fn: Callable[..., jax.Array], *operands: Any, **changes: Any) -> Any:
        """Returns the view after one more row function; `changes` are new fields."""
        step = RowFunction(fn, operands)
        return dataclasses.replace(self, steps=(*self.steps, step), **changes)

    def view(self, rows: jax.Array) -> jax.Array:
        """Applies the steps to rows of the table; returns rows `[n, *content]`."""
        for step in self.steps:
            rows = step(rows)
        return rows

    def materialize(self) -> jax.Array:
        """Computes the whole view as an array."""
        if self.reader is not None:
            self.reader.refuse(self, "the function returns a table")
        rows, axes = self.array, self.row_axes
        with _mesh.mesh_of(rows):  # an equation that makes axes Auto runs on another
            if self.first is not None:
                rows = lax.dynamic_slice_in_dim(rows, self.first, self.height)
            rows = self.view(rows)
            rows = rows.reshape(*(self.shape[axis] for axis in axes), *rows.shape[1:])
            return jnp.moveaxis(rows, range(len(axes)), axes)

    @property
    def operands(self) -> tuple[Any, Sequence[Sequence[Any]]]:
        """All arrays of the view but the table, as a tree."""
        return self.first, [step.operands for step in self.steps]

    def with_operands(self, operands: tuple[Any, Sequence[Sequence[Any]]]) -> Any:
        """Returns the view with other arrays instead of its `operands`."""
        first, of_steps = operands
        pairs = zip(self.steps, of_steps, strict=True)
        steps = tuple(RowFunction(step.fn, tuple(new)) for step, new in pairs)
        return dataclasses.replace(self, first=first, steps=steps)


def without(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """Returns `shape` without `axes`."""
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


@jax.custom_vjp
def plant(rows: jax.Array, delta: jax.Array) -> jax.Array:
    """Returns `rows`, whose cotangent also goes to `delta`.

    A custom rule, not `rows + delta`: nothing is added in the forward pass, and `-0.0`
    keeps its sign. The cotangent also goes to `rows`, so that an outer derivative of
    the same program sees the table they came from.
    """
    del delta
    return rows


def _plant_fwd(rows, delta):
    del delta
    return rows, None


def _plant_bwd(_, cotangent):
    return cotangent, cotangent


plant.defvjp(_plant_fwd, _plant_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def plant_combined(
    transpose: Callable[..., jax.Array],
    combined: jax.Array,
    delta: jax.Array,
    *operands: jax.Array,
) -> jax.Array:
    """Plants a delta if the program has only a linear combination of the rows.

    The cotangent of the rows, `transpose(cotangent, *operands)`, goes to `delta`.
    """
    del transpose, delta, operands
    return combined


def _combined_fwd(transpose, combined, delta, *operands):
    del transpose, delta
    return combined, operands


def _combined_bwd(transpose, operands, cotangent):
    return cotangent, transpose(cotangent, *operands), *(None for _ in operands)


plant_combined.defvjp(_combined_fwd, _combined_bwd)


def drop_cotangents(x: jax.Array, keep: jax.Array) -> jax.Array:
    """Drops the cotangents of `x` where the mask `keep` of its first axes is False.

    This matches an XLA gather that is out of range: the forward pass clamps the index,
    and the transpose drops the cotangent. It is a primitive because a custom derivative
    of Python is either forward or reverse, and cannot be differentiated again.
    """
    return _drop_cotangents_p.bind(x, keep)


def _drop_transpose(cotangent, like, x, keep):
    del like, x
    return indexing.zero_unless(keep, cotangent)


def _drop_batch(bind, args, axes):
    return bind(*indexing.batch_in_front(args, axes))


_drop_cotangents_p = _compat.primitive(
    "drop_cotangents",
    lambda x, keep: x,
    {},
    transposes={0: _drop_transpose},
    batch=_drop_batch,
    types=lambda x, keep: [(x.shape, x.dtype)],
)
