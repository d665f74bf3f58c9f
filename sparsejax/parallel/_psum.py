"""psum and pmean: gradients of replicated tables, exchanged as ids and rows.

Every device holds the whole table and reads its own part of the batch. A dense
all-reduce of the gradient sends `2 V d (N - 1) / N` bytes (d: bytes per row). The
gradient of the n rows that a device read is `SelectedRows(rows [n], values [n, ...])`.
Duplicates are summed, so the sum over devices is the concatenation of all slots: an
all-gather of ids and rows, `(N - 1) n (d + 4)` bytes, whatever V is.

All devices get the same slots in the same order, so the optimizer computes the same
bits everywhere, and replicas stay equal.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sparsejax import _arguments, _compat
from sparsejax._arguments import PyTree
from sparsejax._rows import SelectedRows, is_selected_rows, with_slots
from sparsejax.parallel._rows import ShardedRows


# Set while `data_parallel` traces a step: the names of its axes and its mesh.
_whole_batch: contextvars.ContextVar[tuple[tuple[str, ...], Any] | None] = (
    contextvars.ContextVar("whole_batch", default=None)
)


def psum(tree: PyTree, axis_name: Hashable, *, capacity: int | None = None) -> Any:
    """Sums a tree that contains SelectedRows over the devices of a mesh axis.

    The sum of SelectedRows is the concatenation of all devices' slots: ids and rows are
    gathered, and nothing of the table's size is sent. Every other leaf goes through
    `jax.lax.psum`. Call it inside `jax.shard_map`, or `jax.vmap` with an `axis_name`.
    If the tree has dense gradients of replicated parameters, pass `check_vma=False` to
    `shard_map`: under `check_vma=True` JAX has already summed them, and they would be
    summed twice.

    In a step run by `data_parallel`, gradients are already those of the whole batch.
    This function then only gathers rows on every device, and leaves everything else
    unchanged. No axis is bound there: `jax.lax.psum`, `pmean` and `axis_index` do not
    know its name.

    Args:
      tree: a pytree of arrays and SelectedRows.
      axis_name: name of a mesh axis, or a tuple of names.
      capacity: int, at least 1, the number of slots that each device sends for each
        SelectedRows after merging duplicates. If the distinct rows of any device do not
        fit, all devices send all slots instead, so no row is lost. None sends all slots
        without merging. `sparsejax.parallel.plan` measures a suitable value.

    Returns:
      The tree, the same on every device. A SelectedRows of n slots gets N * n slots,
      some of them empty where `capacity` limits what is sent.

    Raises:
      ValueError: called outside of `shard_map` and `data_parallel`, or `capacity` is
        not a positive int.
      TypeError: the tree has the gradient of a ShardedTable, inside a `shard_map`.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,))
      >>> total = lambda g: sj.parallel.psum(g, "x")
      >>> f = jax.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P())
      >>> f(sj.SelectedRows(jnp.array([7, 2]), jnp.ones((2, 3)), height=100))
      SelectedRows(rows=[7 2], values=float32[2,3], height=100, num_rows=2)

    References:
      Horovod, `allreduce` of `tf.IndexedSlices`; PaddlePaddle, all-reduce of
      SelectedRows.
    """
    return _all_reduce("psum", tree, axis_name, capacity, mean=False)


def pmean(tree: PyTree, axis_name: Hashable, *, capacity: int | None = None) -> Any:
    """Averages a tree that contains SelectedRows over the devices of a mesh axis.

    `psum(tree) / N`, see `sparsejax.parallel.psum`. Where each device's loss is the
    mean over its part of the batch, and the parts are equal, the mean of the gradients
    is the gradient of the mean over the whole batch.

    Args:
      tree: a pytree of arrays and SelectedRows.
      axis_name: name of a mesh axis, or a tuple of names.
      capacity: as in `psum`.

    Returns:
      The tree, the same on every device.

    Raises:
      ValueError: called outside of `shard_map` and `data_parallel`, or `capacity` is
        not a positive int.
      TypeError: the tree has the gradient of a ShardedTable, inside a `shard_map`.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,))
      >>> f = lambda x: sj.parallel.pmean({"loss": jnp.mean(x)}, "x")
      >>> jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P())(jnp.arange(3.0))
      {'loss': Array(1., dtype=float32)}

    References:
      Horovod, `allreduce(op=Average)`; MXNet, `KVStore.pushpull`.
    """
    return _all_reduce("pmean", tree, axis_name, capacity, mean=True)


@contextlib.contextmanager
def whole_batch(axes: tuple[str, ...], mesh: Any) -> Iterator[None]:
    """Inside, values are already sums over `axes`: `psum` and `pmean` only gather."""
    token = _whole_batch.set((axes, mesh))
    try:
        yield
    finally:
        _whole_batch.reset(token)


# ------------------------------------------------------------------ the exchange


def _all_reduce(name: str, tree: Any, axis_name: Any, capacity: Any, mean: bool) -> Any:
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if capacity is not None:
        capacity = _arguments.static_int(
            f"sparsejax.parallel.{name}",
            "capacity",
            capacity,
            1,
            " It is the number of slots that each device sends. None sends all.",
        )
    try:
        devices = lax.axis_size(axes)
    except NameError:
        within = _whole_batch.get()
        if within is None or not set(axes) <= set(within[0]):
            raise ValueError(
                f"sparsejax.parallel.{name}: the axis {axis_name!r} is not bound "
                "here. Call it inside jax.shard_map over a mesh with that axis, or "
                "in a step run by sparsejax.parallel.data_parallel over that axis."
            ) from None
        gather = lambda x: (
            _gather_global(x, *within, capacity) if is_selected_rows(x) else x
        )
        return jax.tree.map(gather, tree, is_leaf=is_selected_rows)

    def reduce(x):
        if isinstance(x, ShardedRows):
            raise TypeError(
                f"sparsejax.parallel.{name}: the gradient of a ShardedTable cannot be "
                "summed inside a shard_map. sparsejax.optim.lazy sends its rows to "
                "their owners; use it on global arrays, in a step run by "
                "data_parallel or jax.jit."
            )
        if is_selected_rows(x):
            total = _gather(x, axes, devices, capacity)
            return total / devices if mean else total
        return lax.pmean(x, axes) if mean else lax.psum(x, axes)

    return jax.tree.map(reduce, tree, is_leaf=is_selected_rows)


def _gather(
    x: SelectedRows, axes: tuple[str, ...], devices: int, capacity: int | None
) -> SelectedRows:
    """The slots of all devices, in the order of the devices."""
    # The result is the same on every device; where types are checked, they must say so.
    told = _compat.varying_axes(x.rows) | _compat.varying_axes(x.values)
    to = "invarying" if told else "varying"
    gather = lambda y: _compat.all_gather(y, axes, to=to)
    if capacity is None or capacity >= x.capacity:
        return with_slots(x, gather(x.rows), gather(x.values))
    merged, overflow = x.coalesce(capacity, return_overflow=True)
    rest = devices * (x.capacity - capacity)

    def merged_rows():
        rows, values = gather(merged.rows), gather(merged.values)
        empty = jnp.full((rest,), x.height, rows.dtype)
        nothing = jnp.zeros((rest, *values.shape[1:]), values.dtype)
        return jnp.concatenate([rows, empty]), jnp.concatenate([values, nothing])

    def all_rows():
        return gather(x.rows), gather(x.values)

    # All devices must take the same branch: collectives in one of them would hang.
    rows, values = lax.cond(lax.pmax(overflow, axes) == 0, merged_rows, all_rows)
    return with_slots(x, rows, values)


def _gather_global(
    x: SelectedRows, axes: tuple[str, ...], mesh: Any, capacity: int | None
) -> SelectedRows:
    """A global SelectedRows with its slots gathered on every device."""
    devices = math.prod(mesh.shape[name] for name in axes)
    if isinstance(x, ShardedRows) or x.capacity % devices:
        return x  # at its owners, or too small to be sharded
    gather = lambda x: _gather(x, axes, devices, capacity)
    spec = PartitionSpec(axes)
    return jax.shard_map(
        gather, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
    )(x)
