"""ShardedRows: the gradient of a table whose rows are sharded over devices.

It has two states. `sparsejax.value_and_grad` returns it with every slot on the device
whose batch read the row; nothing has been sent yet. `coalesce` sends the slots to the
owners of their rows and merges them there. Each owner then holds its own distinct rows,
and reading or writing them moves nothing between devices.

Inside of `jit`, `sparsejax.optim.lazy` does not hold them: owners merge and apply rows
as they arrive, see `_passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax._arguments import ArrayLike
from sparsejax._rows import SelectedRows, indexing, is_selected_rows, known_sum
from sparsejax.optim._lazy import gather_scatter, passes
from sparsejax.optim._wrappers import track_changes
from sparsejax.parallel import _exchange
from sparsejax.parallel._exchange import Owners
from sparsejax.parallel._passes import RangePasses


@jax.tree_util.register_pytree_with_keys_class
class ShardedRows(SelectedRows):
    """A SelectedRows over the positions of a ShardedTable, sharded over its devices.

    Represents the `[N * R, ...]` array of the table's stored values. As the child of a
    ShardedTable it represents the table's gradient or update in the order of ids:
    `table.to_dense()`.

    Args:
      rows: positions, `N * R` for an empty slot.
      values: a row for each slot.
      height: `N * R`.
      stack: `()`, since a ShardedTable has one axis of rows.
      owners: which device owns which rows.
      slots: how many rows a device sends to an owner in one round of the exchange; 0 if
        each row was read by its owner; None once they are merged at their owners.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.ones((9, 2)), mesh, "x")
      >>> loss = lambda t: jnp.sum(sj.lookup(t, jnp.array([3, 3])))
      >>> g = sj.grad(loss)(table)
      >>> g.values.num_rows(), g.values.coalesce().num_rows()
      (Array(2, dtype=int32), Array(1, dtype=int32))

    References:
      PaddlePaddle, `SelectedRows` sent to parameter servers.
    """

    owners: Owners
    slots: int | None

    @classmethod
    def make(cls, rows: Any, values: Any, owners: Owners, slots: int | None) -> Any:
        """Builds it from its parts, without checks."""
        self = object.__new__(cls)
        fields = {"height": owners.height, "_row_ndim": np.ndim(values) - 1}
        vars(self).update(fields, _ids=rows, values=values, owners=owners, slots=slots)
        return self

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the children with their keys."""
        children, static = super().tree_flatten_with_keys()
        return children, (static, self.owners, self.slots)

    def tree_flatten(self) -> tuple[Any, Any]:
        """Returns the children."""
        children, static = super().tree_flatten()
        return children, (static, self.owners, self.slots)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Self:
        """Rebuilds without checks, since JAX may pass any objects as children."""
        self = super().tree_unflatten(static[0], children)
        vars(self).update(zip(("owners", "slots"), static[1:]))
        return self

    @property
    def is_merged(self) -> bool:
        """True if the rows are distinct and at their owners."""
        return self.slots is None

    def coalesce(
        self, capacity: int | None = None, *, return_overflow: bool = False
    ) -> Any:
        """Merges each row once, at its owner; rows ascend at each owner.

        Args:
          capacity: must be None; every owner has a slot for each row it may receive.
          return_overflow: if True, also return the overflow, an int32 scalar that is 0.

        Raises:
          ValueError: `capacity` is given.
        """
        if capacity is not None:
            raise ValueError(
                "ShardedRows.coalesce: capacity must be None, since every owner has a "
                f"slot for each row it may receive, got {capacity!r}."
            )
        merged = self if self.is_merged else _send(self)
        return (merged, jnp.zeros((), jnp.int32)) if return_overflow else merged

    def find(self, ids: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Finds rows by position, and a mask of them. Gathers all slots, for tests."""
        return self.everywhere().find(ids)

    def retain(self, ids: ArrayLike) -> SelectedRows:
        """Keeps only the rows at these positions. Gathers all slots, for tests."""
        return self.everywhere().retain(ids)

    def everywhere(self) -> SelectedRows:
        """Returns the same slots as a plain SelectedRows, without owners."""
        return SelectedRows(self.rows, self.values, self.height)

    def map(self, f: Callable[[jax.Array], jax.Array]) -> ShardedRows:
        """Returns the same positions with `f(values)`."""
        values = self.everywhere().map(f).values
        return ShardedRows.make(self.rows, values, self.owners, self.slots)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, ShardedRows):
            return concatenate([self, other])
        if is_selected_rows(other) or np.ndim(other) == 0:
            return self.everywhere().__add__(other)
        total = known_sum(self, other)
        return _add_to(other, self) if total is None else total

    __radd__ = __add__


# ------------------------------------------------------------------ at the owners


def _at_owners(f: Callable, rows: ShardedRows, *args: Any) -> jax.Array:
    """Runs `f(rows, *args)` at each owner, on its own parts.

    Args:
      f: function of a SelectedRows whose ids are the owner's row numbers.
      rows: merged.
      *args: arrays, sharded as tables are.
    """
    owners, spec = rows.owners, rows.owners.table_spec

    def body(positions, values, *args):
        own_rows = owners.to_own_rows(positions)
        return f(SelectedRows(own_rows, values, owners.rows), *args)

    in_specs = (spec,) * (2 + len(args))
    return owners.shard_map(
        body, rows.rows, rows.values, *args, in_specs=in_specs, out_specs=spec
    )


# Jitted, because outside of `jit` a `shard_map` runs operation by operation.


@jax.jit
def _send(rows: ShardedRows) -> ShardedRows:
    owners, slots = rows.owners, rows.slots or 0
    positions = rows.safe_rows()
    merged = _exchange.send_to_owners(owners, slots, positions, rows.values)
    return ShardedRows.make(*merged, owners, None)


@jax.jit
def _add(table: jax.Array, rows: ShardedRows) -> jax.Array:
    return _at_owners(lambda own, part: part + own, rows, table)


@jax.jit
def _join(parts: Sequence[ShardedRows]) -> ShardedRows:
    owners, spec = parts[0].owners, parts[0].owners.batch_spec
    dtype = indexing.promote(*(part.dtype for part in parts))

    def join(xs):
        join = lambda *xs: jnp.concatenate(xs)
        return owners.shard_map(join, *xs, in_specs=(spec,) * len(xs), out_specs=spec)

    rows = join([part.rows for part in parts])
    values = join([part.values.astype(dtype) for part in parts])
    slots = sum(part.slots or 0 for part in parts)
    return ShardedRows.make(rows, values, owners, slots)


def concatenate(parts: Sequence[ShardedRows]) -> ShardedRows:
    """Sums gradients by keeping all their slots, each still on its device."""
    owners = parts[0].owners
    for part in parts:
        if part.owners != owners or part.shape != parts[0].shape:
            raise ValueError(
                f"ShardedRows + ShardedRows of shapes {parts[0].shape} and "
                f"{part.shape}: both must be gradients of tables of one shape and "
                "layout on one mesh."
            )
    if len(parts) == 1:
        return parts[0]
    if any(part.is_merged for part in parts):
        raise ValueError(
            "ShardedRows + ShardedRows: one of them is already merged at its owners. "
            "Add gradients before an optimizer or .coalesce() sends them there."
        )
    return _join(list(parts))


def _add_to(table: Any, rows: ShardedRows) -> jax.Array:
    """Adds `rows` to `table`; each owner adds its own rows."""
    if np.shape(table) != rows.shape:
        raise ValueError(
            f"array + ShardedRows: shapes {np.shape(table)} and {rows.shape} differ. "
            "A ShardedRows has the shape of a ShardedTable's values. Add it to "
            "table.values, or use optax.apply_updates on trees."
        )
    return _add(jnp.asarray(table), rows.coalesce())


@passes.passes_over.register
def _passes_over(grad: ShardedRows, table: Any, others: Any) -> RangePasses | None:
    del others  # a device has only its own part of a gradient
    runs = not grad.is_merged and passes.is_traced(grad, table)
    return RangePasses(grad) if runs else None


@gather_scatter.merge_duplicates.register
def _merge(rows: ShardedRows) -> ShardedRows:
    return rows.coalesce()


@gather_scatter.gather_rows.register
def _read(rows: ShardedRows, table: Any, otherwise: jax.Array) -> jax.Array:
    return _at_owners(gather_scatter.gather_rows, rows, jnp.asarray(table), otherwise)


@gather_scatter.scatter_rows.register
def _write(rows: ShardedRows, table: Any, values: jax.Array) -> jax.Array:
    return _at_owners(gather_scatter.scatter_rows, rows, jnp.asarray(table), values)


@track_changes.mark_rows.register
def _mark(update: ShardedRows, flags: jax.Array) -> jax.Array:
    def mark(own, part):
        return indexing.add_rows(part, own.rows, jnp.ones(own.rows.shape, bool))

    return _at_owners(mark, update.coalesce(), flags)


@gather_scatter.as_update.register
def _update(rows: ShardedRows, values: jax.Array, grad: SelectedRows) -> Any:
    del grad
    values = indexing.zero_unless(rows.filled(), values)
    return ShardedRows.make(rows.rows, values, rows.owners, None)
