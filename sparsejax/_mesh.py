"""Arrays over the devices of a mesh whose axes are Explicit: their types, and moves.

The type of such an array has a PartitionSpec: `partitions`, one an axis, and sets of
`reduced` and `unreduced` mesh axes. A reduced axis does not shard the array. It only
says that the array's cotangent is a sum over that axis which is still to be taken. A
SelectedRows has all its slots on every device, so nothing is left to sum: rows and
deltas have partitions alone.
"""

import contextlib
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from sparsejax import _compat


def partitions(spec: Any) -> tuple[Any, ...]:
    """Returns the partitions of a spec, which has no `*` if axes are reduced."""
    return tuple(getattr(spec, "partitions", spec))


def explicit_spec(x: Any) -> tuple[Any, ...]:
    """Returns the partitions of `x` over Explicit mesh axes; () if none shards it."""
    parts = partitions(getattr(jax.typeof(x).sharding, "spec", ()))
    return parts if any(part is not None for part in parts) else ()


def replicate(x: jax.Array) -> jax.Array:
    """Puts `x` on every device, if Explicit mesh axes shard it."""
    spec = explicit_spec(x)
    return reshard(x, (None,) * len(spec), jax.typeof(x).sharding.mesh)


def reshard(x: jax.Array, spec: tuple[Any, ...], mesh: Any) -> jax.Array:
    """Shards `x` as `spec` over Explicit mesh axes; an empty `spec` changes nothing."""
    if not spec:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))


def on_mesh(x: jax.Array, mesh: Any) -> jax.Array:
    """Puts `x` on every device of `mesh`, whose axes may be of another type."""
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))


def mesh_of(x: jax.Array) -> contextlib.AbstractContextManager:
    """Enters the mesh in the type of `x`, for operations on `x`."""
    if not _compat.has_mesh(x):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh)
