"""data_parallel: a step for one device, run over a mesh with the batch split.

The step is written, and means, what it does on one device that has the whole batch:
losses, means and norms are over the whole batch. XLA partitions it. The batch is split
along its leading axis, parameters and state are on every device (or as they are laid
out already: tables by `shard_rows` and `shard_columns` stay where they are), and both
are updated in place. Over a mesh with Explicit axes the step runs on the same devices
with Auto axes, since a step for one device says nothing of layouts.

The gradient of a replicated table is a SelectedRows over the batch's slots. The
optimizer needs it everywhere: ids are gathered, and rows travel in an all-reduce of one
slot for each id, never of the table's size. With `sparsejax.parallel.pmean(grads,
axis)` in the step they travel in an all-gather instead, half the bytes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sparsejax import _arguments
from sparsejax.parallel._replicated import whole_batch
from sparsejax.parallel._table import ShardedTable, check_axis


_CALL = "sparsejax.parallel.data_parallel"
_NOT_A_STEP = (
    _CALL + ": step must be a function (params, opt_state, batch) -> (params, "
    "opt_state, ...), got {found}."
)
_NOT_A_RESULT = (
    _CALL + ": step must return a tuple (params, opt_state, ...), got {found}. Put "
    "losses and metrics behind the two."
)
_OTHER_TREE = (
    _CALL + ": step returned {what} of another structure than it was given, {found} "
    "instead of {expected}. They replace each other from step to step."
)
_OTHER_LEAF = (
    _CALL + ": step returned {name} as {found}, it was given {expected}. They replace "
    "each other from step to step."
)
_NOTHING_TO_SPLIT = (
    _CALL + ": no array of the batch can be split over the {devices} devices along "
    "{axis!r}: the leading axes are {found}. Take a batch whose size is a multiple of "
    "{devices}, or pad it."
)


# What a step takes and returns.
_KEPT = ("params", "opt_state")


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh,
    axis: str | Sequence[str],
    *,
    donate: bool = True,
) -> "DataParallelStep":
    """Runs a training step for one device over a mesh, the batch split over `axis`.

    `data_parallel(step, mesh, axis)(params, opt_state, batch)` is
    `step(params, opt_state, batch)`, up to rounding: no call in the step is needed.
    No axis is bound in it either: of collectives only `sparsejax.parallel.psum` and
    `pmean` may be called there. Each device reads, and differentiates, its part of the
    batch. Dense gradients are
    summed over devices; gradients of tables that are read by rows travel as ids and
    rows, whatever the tables' size.

    With `sparsejax.parallel.pmean(grads, axis)` behind `sparsejax.value_and_grad`, rows
    are gathered rather than all-reduced, which moves half of the bytes, or fewer with
    `capacity=`; the result is the same.

    Args:
      step: `(params, opt_state, *batch) -> (params, opt_state, ...)`, a function that
        can be jitted. Whatever else it returns comes back as it is.
      mesh: as `jax.make_mesh` gives. Its axes count as Auto.
      axis: name of a mesh axis, or a tuple of names.
      donate: whether parameters and state are given away, and updated in place.

    Returns:
      `DataParallelStep`, called like `step`. Parameters and state that are not on the
      mesh yet are put on all its devices; hand in at the next step what comes back.
      Arrays of the batch whose leading axis is a multiple of the number of devices are
      split, others go to every device, which changes the work of each and not the
      result; so pad them all to one size. Without a batch every device does the same
      work. Arrays that are on the mesh already, and tables
      of `shard_rows` and `shard_columns`, stay where they are. `.lower(...)` is that
      of the jitted step.

    Raises:
      TypeError: `step` is no function, or does not return such a tuple.
      ValueError: no such axis; nothing in the batch can be split; or the step returns
        parameters or state of another structure, or of other shapes, or parameters of
        another dtype.

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
        raise TypeError(_NOT_A_STEP.format(found=_arguments.kind_of(step)))
    axis = check_axis(_CALL, mesh, axis)
    axes = (axis,) if isinstance(axis, str) else axis
    return DataParallelStep(step, mesh, axes, bool(donate))


class DataParallelStep:
    """What `data_parallel` makes: called like the step, over the mesh.

    Args:
      step, mesh, donate: as of `data_parallel`.
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

    def __call__(self, params: Any, opt_state: Any, *batch: Any) -> Any:
        """One step; see `data_parallel`."""
        jitted, args = self._prepare(params, opt_state, batch)
        return jitted(*args)

    def lower(self, params: Any, opt_state: Any, *batch: Any) -> jax.stages.Lowered:
        """`jax.jit(step).lower(...)`, of arrays or of `jax.ShapeDtypeStruct`."""
        jitted, args = self._prepare(params, opt_state, batch)
        return jitted.lower(*args)

    # -- how it is laid out ------------------------------------------------------

    def _prepare(self, params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
        """The jitted step for these layouts, and the arguments laid out."""
        whole = NamedSharding(self._mesh, PartitionSpec())
        kept = jax.tree.map(
            lambda x: self._put(x, whole), self._over_auto_axes((params, opt_state))
        )
        leaves, treedef = jax.tree.flatten(kept)
        layouts = tuple(x.sharding for x in leaves)
        key = treedef, layouts
        if key not in self._jitted:
            donated = (0, 1) if self._donate else ()
            self._jitted[key] = jax.jit(self._traced(*key), donate_argnums=donated)
        return self._jitted[key], (*kept, *self._split(batch))

    def _traced(self, treedef: Any, layouts: Sequence[NamedSharding]) -> Any:
        """The step, what it returns laid out as what it was given."""

        def data_parallel_step(params, opt_state, *batch):
            with whole_batch(self._axes, self._mesh):
                out = self._step(params, opt_state, *batch)
            if not isinstance(out, tuple) or len(out) < 2:
                size = f" of {len(out)}" if isinstance(out, tuple) else ""
                raise TypeError(_NOT_A_RESULT.format(found=type(out).__name__ + size))
            for what, x, given in zip(_KEPT, out, (params, opt_state)):
                _check_alike(what, x, given)
            kept = jax.lax.with_sharding_constraint(
                jax.tree.leaves(out[:2]), list(layouts)
            )
            return (*treedef.unflatten(kept), *out[2:])

        return data_parallel_step

    def _split(self, batch: Any) -> Any:
        """The batch, each of its arrays split along the leading axis if that goes."""
        devices = math.prod(self._mesh.shape[name] for name in self._axes)
        leading = [np.shape(x)[:1] for x in jax.tree.leaves(batch)]
        if leading and not any(size and size[0] % devices == 0 for size in leading):
            sizes = sorted({size[0] for size in leading if size})
            raise ValueError(
                _NOTHING_TO_SPLIT.format(devices=devices, axis=self._axes, found=sizes)
            )

        def put(x):
            shape = np.shape(x)
            even = shape and shape[0] % devices == 0
            spec = PartitionSpec(self._axes) if even else PartitionSpec()
            return self._put(x, NamedSharding(self._mesh, spec))

        return jax.tree.map(put, batch)

    def _put(self, x: Any, layout: NamedSharding) -> Any:
        """`x` laid out so, unless it lies on the mesh already."""
        found = getattr(x, "sharding", None)
        if isinstance(found, NamedSharding) and found.mesh == self._mesh:
            return x
        if isinstance(found, NamedSharding) and found.mesh == self._given:
            layout = NamedSharding(self._mesh, found.spec)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)
        return jax.device_put(x, layout)

    def _over_auto_axes(self, tree: Any) -> Any:
        """The tree, its sharded tables naming the mesh that the step runs over."""
        is_table = lambda x: isinstance(x, ShardedTable)

        def move(x):
            same = is_table(x) and x.mesh == self._given
            return dataclasses.replace(x, mesh=self._mesh) if same else x

        return jax.tree.map(move, tree, is_leaf=is_table)


def _check_alike(what: str, returned: Any, given: Any) -> None:
    """Raises unless one can stand for the other at the next step.

    State may come back in another dtype: some optimizers find theirs at the first step.
    """
    found, expected = jax.tree.structure(returned), jax.tree.structure(given)
    if found != expected:
        raise ValueError(_OTHER_TREE.format(what=what, found=found, expected=expected))
    leaves, _ = jax.tree_util.tree_flatten_with_path(given)
    for (path, old), new in zip(leaves, jax.tree.leaves(returned)):
        old, new = jax.typeof(old), jax.typeof(new)
        if old.shape != new.shape or what == "params" and old.dtype != new.dtype:
            name = what + jax.tree_util.keystr(path)
            say = lambda x: f"{x.dtype.name}{list(x.shape)}"
            raise ValueError(
                _OTHER_LEAF.format(name=name, found=say(new), expected=say(old))
            )
