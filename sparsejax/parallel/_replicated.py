"""Replicated tables: psum and pmean of rows, and data_parallel.

Every device holds the whole table and reads its own part of the batch. A dense
all-reduce of the gradient sends `2 V d (N - 1) / N` bytes (d: bytes per row). The
gradient of the n rows that a device read is `SelectedRows(rows [n], values [n, ...])`.
Duplicates are summed, so the sum over devices is the concatenation of all slots: an
all-gather of ids and rows, `(N - 1) n (d + 4)` bytes, whatever V is. All devices get
the same slots in the same order, so the optimizer computes the same bits everywhere,
and replicas stay equal.

`psum` and `pmean` work in two settings, which JAX itself distinguishes. Inside
`jax.shard_map` the axis is Manual, and values belong to one device. Under
`jax.set_mesh`, as in a step run by `data_parallel`, values belong to the whole batch,
and there is nothing to sum.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sparsejax import _arguments, _compat
from sparsejax._arguments import PyTree
from sparsejax._rows import SelectedRows, is_selected_rows, with_slots
from sparsejax.parallel._rows import ShardedRows
from sparsejax.parallel._table import ShardedTable, check_axis, names_of


def psum(tree: PyTree, axis_name: Hashable, *, capacity: int | None = None) -> Any:
    """Sums a tree that contains SelectedRows over the devices of a mesh axis.

    The sum of SelectedRows is the concatenation of all devices' slots: ids and rows are
    gathered, and nothing of the table's size is sent. Every other leaf goes through
    `jax.lax.psum`. Call it inside `jax.shard_map`, or `jax.vmap` with an `axis_name`.
    Under `check_vma=True`, the default of `shard_map`, JAX itself sums the dense
    gradients of replicated parameters. Their types say that they do not vary over the
    axis, and such leaves stay as they are.

    Under `jax.set_mesh` of a mesh with that axis, as in a step run by `data_parallel`,
    gradients belong to the whole batch already. Then `psum` only gathers rows on
    every device, and leaves all other leaves unchanged.

    Args:
      tree: a pytree of arrays and SelectedRows.
      axis_name: name of a mesh axis, or a tuple of names.
      capacity: int, at least 1, the number of slots that each device sends for each
        SelectedRows after merging duplicates. If the distinct rows of any device do not
        fit, all devices send all slots instead, so no row is lost. None sends all slots
        without merging. `sparsejax.parallel.plan` measures a suitable value.

    Returns:
      The tree, the same on every device. A SelectedRows of n slots gets N * n slots,
      some of them empty if `capacity` limits the exchange.

    Raises:
      ValueError: the axis is unknown here, or `capacity` is not a positive int.
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
    axes = _names(axis_name)
    if capacity is not None:
        capacity = _arguments.static_int(
            "capacity",
            capacity,
            1,
            " It is the number of slots that each device sends. None sends all.",
        )
    if _num_devices(axes) is None:
        mesh = jax.sharding.get_abstract_mesh()
        if not set(axes) <= set(mesh.axis_names):
            raise ValueError(
                f"sparsejax.parallel.psum: the axis {axis_name!r} is unknown here. "
                "Call it inside jax.shard_map over a mesh with that axis, or in a step "
                "run by sparsejax.parallel.data_parallel over that axis."
            )
        gather = lambda x: _gather_global(x, axes, mesh, capacity)
        reduce = lambda x: gather(x) if is_selected_rows(x) else x
    else:
        reduce = lambda x: _sum_over(x, axes, capacity)
    return jax.tree.map(reduce, tree, is_leaf=is_selected_rows)


def pmean(tree: PyTree, axis_name: Hashable, *, capacity: int | None = None) -> Any:
    """Averages a tree that contains SelectedRows over the devices of a mesh axis.

    `psum(tree) / N`, see `sparsejax.parallel.psum`: a leaf that does not vary over the
    axis counts as a sum, and is divided. If each device's loss is the mean
    over its part of the batch, and the parts are equal, the mean of the gradients is
    the gradient of the mean over the whole batch.

    Args:
      tree: a pytree of arrays and SelectedRows.
      axis_name: name of a mesh axis, or a tuple of names.
      capacity: as in `psum`.

    Returns:
      The tree, the same on every device.

    Raises:
      TypeError, ValueError: as `psum`.

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
    total, devices = psum(tree, axis_name, capacity=capacity), _num_devices(axis_name)
    if devices is None:  # of the whole batch already
        return total
    return jax.tree.map(lambda x: x / devices, total, is_leaf=is_selected_rows)


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh,
    axis: str | Sequence[str],
    *,
    donate: bool = True,
) -> DataParallelStep:
    """Runs a single-device training step over a mesh, with the batch sharded.

    `data_parallel(step, mesh, axis)(params, opt_state, batch)` equals
    `step(params, opt_state, batch)` up to rounding: losses, means and norms are over
    the whole batch. It is `jax.jit(step)` under `jax.set_mesh(mesh)`, with the batch
    sharded along its leading axis, and parameters and state replicated. XLA partitions
    the step, which needs no collectives. Dense gradients are summed over the devices.
    Gradients of tables that are read by rows are sent as ids and rows, however large
    the table is.

    The optimizer needs those rows on every device, so XLA gathers ids and all-reduces
    rows: one slot per id, never an array of the table's size. With
    `sparsejax.parallel.pmean(grads, axis)` after `sparsejax.value_and_grad`, rows are
    gathered instead of all-reduced. That sends half the bytes, or fewer with
    `capacity=`; the result is the same.

    Args:
      step: `(params, opt_state, *batch) -> (params, opt_state, ...)`, a function that
        can be jitted. Its other results are returned unchanged.
      mesh: as returned by `jax.make_mesh`. Its axes are treated as Auto.
      axis: name of the mesh axis to shard the batch over, or a tuple of names.
      donate: if True, parameters and state are donated and updated in place.

    Returns:
      `DataParallelStep`, called like `step`. Parameters and state that are not on the
      mesh yet are replicated; pass the returned ones to the next step. Arrays of the
      batch are sharded if their leading axis is a multiple of the number of devices,
      and replicated otherwise, which costs work but does not change the result: pad
      them to a multiple. Arrays that are already on the mesh, and tables from
      `shard_rows` and `shard_columns`, stay where they are. `.lower(...)` lowers the
      jitted step.

    Raises:
      TypeError: `step` does not return such a tuple.
      ValueError: `axis` is unknown, no array of the batch can be sharded, or the step
        returns parameters or state with a different structure.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax as sj
      >>> tx = sj.optim.lazy(optax.sgd(0.5))
      >>> def step(params, state, ids):
      ...     loss = lambda p: jnp.mean(p["table"][ids])
      ...     value, grads = sj.value_and_grad(loss)(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state, value
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> params = {"table": jnp.ones((100, 2))}
      >>> run = sj.parallel.data_parallel(step, mesh, "x")
      >>> params, state, value = run(params, tx.init(params), jnp.array([3, 7]))
      >>> params["table"][3], params["table"][4]
      (Array([0.875, 0.875], dtype=float32), Array([1., 1.], dtype=float32))

    References:
      MXNet Gluon, `Trainer` and `split_and_load`; Horovod, `DistributedOptimizer`.
    """
    axes = names_of(check_axis(mesh, axis))
    auto = (AxisType.Auto,) * mesh.devices.ndim
    auto_mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    jitted = jax.jit(
        functools.partial(_run, step),
        static_argnums=0,
        donate_argnums=(1, 2) if donate else (),
    )
    return DataParallelStep(jitted, auto_mesh, axes)


@dataclasses.dataclass(frozen=True, repr=False)
class DataParallelStep:
    """A training step over a mesh, made by `data_parallel`; called like the step.

    Args:
      jitted: the step, as a function of shardings and of the step's arguments.
      mesh: the devices, with Auto axes: the step contains no shardings.
      axes: names of the mesh axes that the batch is sharded over.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> step = lambda w, state, x: (w + jnp.mean(x), state)
      >>> run = sj.parallel.data_parallel(step, mesh, "x")
      >>> run(jnp.array(1.0), (), jnp.arange(4.0))
      (Array(2.5, dtype=float32), ())
    """

    jitted: jax.stages.Wrapped
    mesh: Mesh
    axes: tuple[str, ...]

    def __call__(self, params: PyTree, opt_state: PyTree, *batch: PyTree) -> Any:
        """Takes one step; see `data_parallel`."""
        args = self._place(params, opt_state, batch)
        with jax.set_mesh(self.mesh):
            return self.jitted(*args)

    def lower(
        self, params: PyTree, opt_state: PyTree, *batch: PyTree
    ) -> jax.stages.Lowered:
        """Lowers the jitted step for arrays or `jax.ShapeDtypeStruct`."""
        args = self._place(params, opt_state, batch)
        with jax.set_mesh(self.mesh):
            return self.jitted.lower(*args)

    def _place(self, params: Any, opt_state: Any, batch: Any) -> tuple[Any, ...]:
        """Places the arguments of `jitted`: shardings, then the step's arguments."""
        is_table = lambda x: isinstance(x, ShardedTable)
        is_here = lambda x: is_table(x) and x.mesh.shape == self.mesh.shape
        # As the step, tables have Auto axes.
        auto = lambda x: dataclasses.replace(x, mesh=self.mesh) if is_here(x) else x
        kept = jax.tree.map(auto, (params, opt_state), is_leaf=is_table)
        kept = jax.tree.map(lambda x: self._put(x, PartitionSpec()), kept)
        shardings = tuple(x.sharding for x in jax.tree.leaves(kept))

        devices = math.prod(self.mesh.shape[name] for name in self.axes)
        is_even = lambda x: np.ndim(x) > 0 and np.shape(x)[0] % devices == 0
        leaves = jax.tree.leaves(batch)
        if leaves and not any(map(is_even, leaves)):
            sizes = sorted({np.shape(x)[0] for x in leaves if np.ndim(x)})
            raise ValueError(
                "sparsejax.parallel.data_parallel: no array of the batch can be "
                f"sharded over the {devices} devices along {self.axes!r}: its leading "
                f"axes are {sizes}. Pad them to a multiple of {devices}."
            )
        split, whole = PartitionSpec(self.axes), PartitionSpec()
        put = lambda x: self._put(x, split if is_even(x) else whole)
        return shardings, *kept, *jax.tree.map(put, batch)

    def _put(self, x: Any, spec: PartitionSpec) -> Any:
        """Shards `x` as `spec`, or as it already is over such a mesh."""
        current = getattr(x, "sharding", None)
        if isinstance(current, NamedSharding) and current.mesh.shape == self.mesh.shape:
            spec = current.spec
        sharding = NamedSharding(self.mesh, spec)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.device_put(x, sharding)


def _run(
    step: Callable[..., Any],
    shardings: Sequence[NamedSharding],
    params: Any,
    opt_state: Any,
    *batch: Any,
) -> Any:
    """Runs the step; new parameters and state are sharded like the old ones."""
    out = step(params, opt_state, *batch)
    if not isinstance(out, tuple) or len(out) < 2:
        raise TypeError(
            "sparsejax.parallel.data_parallel: step must return a tuple (params, "
            f"opt_state, ...), got {_arguments.kind_of(out)}. Losses and metrics come "
            "after these."
        )
    leaves, treedef = jax.tree.flatten(out[:2])
    kept = lax.with_sharding_constraint(leaves, list(shardings))
    return (*treedef.unflatten(kept), *out[2:])


# ------------------------------------------------------------------ the exchange


def _names(axis_name: Any) -> tuple[Any, ...]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def _num_devices(axis_name: Any) -> int | None:
    """Returns the size of a Manual axis, or of an axis of vmap; otherwise None."""
    try:
        return lax.axis_size(_names(axis_name))
    except NameError:
        return None


def _sum_over(x: Any, axes: tuple[str, ...], capacity: int | None) -> Any:
    """Sums a leaf over axes whose devices have their own values."""
    if isinstance(x, ShardedRows):
        raise TypeError(
            "sparsejax.parallel.psum: the gradient of a ShardedTable cannot be summed "
            "inside a shard_map. sparsejax.optim.lazy sends its rows to their owners; "
            "use it on global arrays, in a step run by data_parallel or jax.jit."
        )
    # With `check_vma` types say what varies. JAX has summed other gradients already.
    if _compat.varying_axes(lax.axis_index(axes)):
        varying = frozenset().union(*map(_compat.varying_axes, jax.tree.leaves(x)))
        axes = tuple(name for name in axes if name in varying)
    if not axes:
        return x
    return _gather(x, axes, capacity) if is_selected_rows(x) else lax.psum(x, axes)


def _gather(
    x: SelectedRows, axes: tuple[str, ...], capacity: int | None
) -> SelectedRows:
    """Gathers the slots of all devices, in the order of the devices."""
    # The result is the same on every device. If types are checked, they must say so.
    told = _compat.varying_axes(x.rows) | _compat.varying_axes(x.values)
    to = "invarying" if told else "varying"
    gather = lambda y: _compat.all_gather(y, axes, to=to)
    if capacity is None or capacity >= x.capacity:
        return with_slots(x, gather(x.rows), gather(x.values))
    merged, overflow = x.coalesce(capacity, return_overflow=True)
    num_empty = lax.axis_size(axes) * (x.capacity - capacity)

    def merged_rows():
        rows, values = gather(merged.rows), gather(merged.values)
        empty = jnp.full((num_empty,), x.height, rows.dtype)
        nothing = jnp.zeros((num_empty, *values.shape[1:]), values.dtype)
        return jnp.concatenate([rows, empty]), jnp.concatenate([values, nothing])

    def all_rows():
        return gather(x.rows), gather(x.values)

    # All devices must take the same branch: collectives in one of them would hang.
    rows, values = lax.cond(lax.pmax(overflow, axes) == 0, merged_rows, all_rows)
    return with_slots(x, rows, values)


def _gather_global(
    x: SelectedRows, axes: tuple[str, ...], mesh: Any, capacity: int | None
) -> SelectedRows:
    """Gathers the slots of a global SelectedRows on every device."""
    devices = math.prod(mesh.shape[name] for name in axes)
    if isinstance(x, ShardedRows) or x.capacity % devices:
        return x  # at its owners, or too small to be sharded
    spec = PartitionSpec(axes)
    if AxisType.Explicit in mesh.axis_types:
        x = with_slots(x, *(jax.sharding.reshard(y, spec) for y in (x.rows, x.values)))
    gather = lambda x: _gather(x, axes, capacity)
    return jax.shard_map(
        gather, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
    )(x)
