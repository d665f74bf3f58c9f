"""data_parallel: a step for one device, run over a mesh with the batch sharded.

The step is written for one device that has the whole batch: losses, means and norms are
over the whole batch. XLA partitions it. The batch is sharded along its leading axis.
Parameters and state are replicated, except for tables that `shard_rows` or
`shard_columns` have sharded already, and are updated in place. Over a mesh with
Explicit axes, the step runs on the same devices with Auto axes, because a single-device
step contains no shardings.

The gradient of a replicated table is a SelectedRows over the slots of the batch. The
optimizer needs it on every device, so ids are gathered and rows are all-reduced: one
slot per id, never an array of the table's size. With
`sparsejax.parallel.pmean(grads, axis)` in the step the rows are all-gathered instead,
which sends half the bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax.parallel._psum import whole_batch
from sparsejax.parallel._table import ShardedTable, check_axis


_CALL = "sparsejax.parallel.data_parallel"


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh,
    axis: str | Sequence[str],
    *,
    donate: bool = True,
) -> DataParallelStep:
    """Runs a single-device training step over a mesh, with the batch sharded.

    `data_parallel(step, mesh, axis)(params, opt_state, batch)` equals
    `step(params, opt_state, batch)` up to rounding. The step needs no collectives, and
    no axis is bound in it: the only ones allowed are `sparsejax.parallel.psum` and
    `pmean`. Each device reads and differentiates its part of the batch. Dense gradients
    are summed over the devices. Gradients of tables that are read by rows are sent as
    ids and rows, however large the table is.

    With `sparsejax.parallel.pmean(grads, axis)` after `sparsejax.value_and_grad`, rows
    are gathered instead of all-reduced. That sends half the bytes, or fewer with
    `capacity=`; the result is the same.

    Args:
      step: `(params, opt_state, *batch) -> (params, opt_state, ...)`, a function that
        can be jitted. Its other results are returned unchanged.
      mesh: as returned by `jax.make_mesh`. Its axes are treated as Auto.
      axis: name of the mesh axis to shard the batch over, or a tuple of names.
      donate: whether parameters and state are donated and updated in place.

    Returns:
      `DataParallelStep`, called like `step`. Parameters and state that are not on the
      mesh yet are replicated; pass the returned ones to the next step. Arrays of the
      batch are sharded if their leading axis is a multiple of the number of devices,
      and replicated otherwise, which costs work but does not change the result: pad
      them to a multiple. Arrays that are already on the mesh, and tables from
      `shard_rows` and `shard_columns`, stay where they are. `.lower(...)` lowers the
      jitted step.

    Raises:
      TypeError: `step` is not a function, or does not return such a tuple.
      ValueError: `axis` is unknown, no array of the batch can be sharded, or the step
        returns parameters or state with a different structure or different shapes, or
        parameters with a different dtype.

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
    if not callable(step):
        raise TypeError(
            f"{_CALL}: step must be a function (params, opt_state, batch) -> (params, "
            f"opt_state, ...), got {_arguments.kind_of(step)}."
        )
    axis = check_axis(_CALL, mesh, axis)
    axes = (axis,) if isinstance(axis, str) else axis
    return DataParallelStep(step, mesh, axes, bool(donate))


class DataParallelStep:
    """A training step over a mesh, made by `data_parallel`; called like the step.

    Args:
      step, mesh, donate: as in `data_parallel`.
      axes: names of mesh axes.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> step = lambda w, state, x: (w + jnp.mean(x), state)
      >>> run = sj.parallel.data_parallel(step, mesh, "x")
      >>> run(jnp.array(1.0), (), jnp.arange(4.0))
      (Array(2.5, dtype=float32), ())
    """

    def __init__(
        self,
        step: Callable[..., Any],
        mesh: Mesh,
        axes: tuple[str, ...],
        donate: bool,
    ):
        self._step, self._axes = step, axes
        self._given = mesh
        self._mesh = Mesh(
            mesh.devices,
            mesh.axis_names,
            axis_types=(AxisType.Auto,) * mesh.devices.ndim,
        )
        self._donate = donate
        self._jitted: dict[Any, Any] = {}

    def __call__(self, params: PyTree, opt_state: PyTree, *batch: PyTree) -> Any:
        """One step; see `data_parallel`."""
        jitted, args = self._prepare(params, opt_state, batch)
        return jitted(*args)

    def lower(
        self, params: PyTree, opt_state: PyTree, *batch: PyTree
    ) -> jax.stages.Lowered:
        """`jax.jit(step).lower(...)`, for arrays or `jax.ShapeDtypeStruct`."""
        jitted, args = self._prepare(params, opt_state, batch)
        return jitted.lower(*args)

    # -- shardings ---------------------------------------------------------------

    def _prepare(self, params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
        """The jitted step for these shardings, and the arguments on the mesh."""
        whole = NamedSharding(self._mesh, PartitionSpec())
        kept = jax.tree.map(
            lambda x: self._put(x, whole), self._over_auto_axes((params, opt_state))
        )
        leaves, treedef = jax.tree.flatten(kept)
        key = treedef, tuple(x.sharding for x in leaves)
        if key not in self._jitted:
            donated = (0, 1) if self._donate else ()
            self._jitted[key] = jax.jit(self._traced(*key), donate_argnums=donated)
        return self._jitted[key], (*kept, *self._split(batch))

    def _traced(self, treedef: Any, shardings: Sequence[NamedSharding]) -> Any:
        """The step, with new parameters and state sharded like the old ones."""

        def data_parallel_step(params, opt_state, *batch):
            with whole_batch(self._axes, self._mesh):
                out = self._step(params, opt_state, *batch)
            if not isinstance(out, tuple) or len(out) < 2:
                size = f" of {len(out)}" if isinstance(out, tuple) else ""
                raise TypeError(
                    f"{_CALL}: step must return a tuple (params, opt_state, ...), got "
                    f"{type(out).__name__}{size}. Losses and metrics come after these."
                )
            _check_replaceable("params", out[0], params)
            _check_replaceable("opt_state", out[1], opt_state)
            kept = jax.lax.with_sharding_constraint(
                jax.tree.leaves(out[:2]), list(shardings)
            )
            return (*treedef.unflatten(kept), *out[2:])

        return data_parallel_step

    def _split(self, batch: Any) -> Any:
        """The batch, with arrays sharded along their leading axis if divisible."""
        devices = math.prod(self._mesh.shape[name] for name in self._axes)
        leading = [np.shape(x)[:1] for x in jax.tree.leaves(batch)]
        if leading and not any(size and size[0] % devices == 0 for size in leading):
            sizes = sorted({size[0] for size in leading if size})
            raise ValueError(
                f"{_CALL}: the batch must have an array that can be sharded over the "
                f"{devices} devices along {self._axes!r}, got leading axes {sizes}. "
                f"Use a batch size that is a multiple of {devices}, or pad the batch."
            )

        def put(x):
            shape = np.shape(x)
            even = shape and shape[0] % devices == 0
            spec = PartitionSpec(self._axes) if even else PartitionSpec()
            return self._put(x, NamedSharding(self._mesh, spec))

        return jax.tree.map(put, batch)

    def _put(self, x: Any, sharding: NamedSharding) -> Any:
        """`x` with this sharding, unless it is on the mesh already."""
        found = getattr(x, "sharding", None)
        if isinstance(found, NamedSharding) and found.mesh == self._mesh:
            return x
        if isinstance(found, NamedSharding) and found.mesh == self._given:
            sharding = NamedSharding(self._mesh, found.spec)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.device_put(x, sharding)

    def _over_auto_axes(self, tree: Any) -> Any:
        """The tree, with the mesh of its sharded tables replaced by the Auto mesh."""
        is_table = lambda x: isinstance(x, ShardedTable)

        def move(x):
            same = is_table(x) and x.mesh == self._given
            return dataclasses.replace(x, mesh=self._mesh) if same else x

        return jax.tree.map(move, tree, is_leaf=is_table)


def _check_replaceable(what: str, returned: Any, given: Any) -> None:
    """A ValueError unless `returned` can be passed to the next step for `given`.

    State may change its dtype: some optimizers set it at the first step.
    """
    found, expected = jax.tree.structure(returned), jax.tree.structure(given)
    if found != expected:
        raise ValueError(
            f"{_CALL}: step must return {what} with the structure of its argument, "
            f"{expected}, got {found}. They are the next step's arguments."
        )
    leaves, _ = jax.tree_util.tree_flatten_with_path(given)
    for (path, old), new in zip(leaves, jax.tree.leaves(returned)):
        old, new = jax.typeof(old), jax.typeof(new)
        if old.shape != new.shape or what == "params" and old.dtype != new.dtype:
            raise ValueError(
                f"{_CALL}: step must return {what}{jax.tree_util.keystr(path)} as "
                f"{old.dtype.name}{list(old.shape)}, like its argument, got "
                f"{new.dtype.name}{list(new.shape)}. It is the next step's argument."
            )
