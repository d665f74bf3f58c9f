"""TableRef: a table that has not been read yet; and planting a delta into a read.

While the interpreter walks a program, a table travels as a `TableRef` instead of an
array. A ref stands for a *row-wise view* of the table: an array `X` with one axis over
the table's rows, such that the slice of `X` at row r depends on `table[r]` alone.
Casts, scalings, reshapes and transposes that keep rows whole give another view. Nothing
is computed until rows are read; then these steps are applied to the rows read.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from sparsejax import _compat


@dataclasses.dataclass(frozen=True)
class RowFunction:
    """`fn(rows [n, ...], *operands) -> [n, ...]`, acting on each row alone.

    The operands are not closed over by `fn`, so that a ref can be passed into a
    `shard_map`, whose body must not close over arrays from outside.
    """

    fn: Callable[..., jax.Array]
    operands: tuple[Any, ...] = ()

    def __call__(self, rows: jax.Array) -> jax.Array:
        return self.fn(rows, *self.operands)


@dataclasses.dataclass(frozen=True)
class TableRef:
    """A row-wise view of table number `index`.

    Args:
      index: the number of the table in this transformation.
      array: the table itself, `[V, ...]`.
      shape: shape of the view.
      dtype: type of the view.
      row_axis: the axis of the view that runs over the table's rows.
      stopped: whether a `stop_gradient` lies between table and view, so that reads of
        the view are not differentiated.
      steps: functions that map rows of the table `[n, *array.shape[1:]]` to rows of the
        view `[n, *content]`, where `content` is `shape` without `row_axis`.

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
    row_axis: int = 0
    stopped: bool = False
    steps: tuple[RowFunction, ...] = ()

    @classmethod
    def of(cls, index: int, array: jax.Array) -> "TableRef":
        """The table itself, as a view."""
        return cls(index, array, tuple(array.shape), array.dtype)

    @property
    def ndim(self) -> int:
        """Rank of the view."""
        return len(self.shape)

    @property
    def height(self) -> int:
        """V, the number of rows."""
        return self.array.shape[0]

    @property
    def content(self) -> tuple[int, ...]:
        """Shape of one row of the view."""
        return self.shape[: self.row_axis] + self.shape[self.row_axis + 1 :]

    def then(self, fn: Callable[..., jax.Array], *operands: Any, **changes: Any) -> Any:
        """The view after one more row function; `changes` are fields that change."""
        step = RowFunction(fn, operands)
        return dataclasses.replace(self, steps=(*self.steps, step), **changes)

    def view(self, rows: jax.Array) -> jax.Array:
        """Rows of the table `[n, ...]` as rows of the view `[n, *content]`."""
        for step in self.steps:
            rows = step(rows)
        return rows

    def materialize(self) -> jax.Array:
        """The whole view as an array: all V rows."""
        return jnp.moveaxis(self.view(self.array), 0, self.row_axis)


@jax.custom_vjp
def plant(rows: jax.Array, delta: jax.Array) -> jax.Array:
    """`rows`, whose cotangent also goes to `delta`.

    A custom rule, not `rows + delta`: nothing is added in the forward pass, and `-0.0`
    keeps its sign. The cotangent goes to `rows` as well, so that an outer derivative of
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
    """`plant`, for a program that has only a linear combination of the rows.

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


def replicate(x: jax.Array) -> jax.Array:
    """`x` on every device, if explicit mesh axes shard it."""
    spec = _compat.explicit_spec(x)
    return reshard(x, (None,) * len(spec), jax.typeof(x).sharding.mesh)


def reshard(x: jax.Array, spec: tuple[Any, ...], mesh: Any) -> jax.Array:
    """`x` sharded as `spec` over explicit mesh axes; as it is for an empty `spec`."""
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*spec))) if spec else x


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`x`, marked as varying over the manual mesh `axes` it is not yet varying over."""
    missing = axes - _compat.varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x
