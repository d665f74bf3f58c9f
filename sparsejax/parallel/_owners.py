"""Owners: which device owns which rows, and how batches and tables are laid out.

A table's N parts lie along some axes of a mesh. Over the mesh's other axes the parts
are repeated; a batch is split over all of them. So a device exchanges rows with the N
owners beside it, and gradients are summed over the repeats as well.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Owners:
    """Who owns which rows; static.

    Args:
      mesh: the mesh.
      axes: the axes that the rows are spread over.
      rows: R, the number of rows of each owner.
    """

    mesh: Any
    axes: tuple[str, ...]
    rows: int

    @property
    def count(self) -> int:
        """N, the number of owners."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    @property
    def height(self) -> int:
        """The number of positions, and the one that stands for no row."""
        return self.count * self.rows

    @property
    def others(self) -> tuple[str, ...]:
        """The other axes of the mesh: over them owners are repeated, batches not."""
        return tuple(name for name in self.mesh.axis_names if name not in self.axes)

    @property
    def repeats(self) -> int:
        """How many devices own the same rows."""
        return math.prod(self.mesh.shape[name] for name in self.others)

    @property
    def devices(self) -> int:
        """The number of devices, over all of which a batch is split."""
        return self.count * self.repeats

    @property
    def table_spec(self) -> PartitionSpec:
        """How tables, and whatever lies at the owners, are laid out."""
        return PartitionSpec(self.axes)

    @property
    def batch_spec(self) -> PartitionSpec:
        """How ids and the rows that they read are laid out."""
        return PartitionSpec((*self.others, *self.axes))

    @property
    def is_explicit(self) -> bool:
        """Whether arrays over this mesh carry their layout in their types."""
        return any(kind == AxisType.Explicit for kind in self.mesh.axis_types)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """`spec` over this mesh."""
        return NamedSharding(self.mesh, spec)

    def run(
        self, body: Callable, *args: Any, into: Any, out: Any, vma: bool = False
    ) -> Any:
        """`body` on each device's part of `args`.

        Without vma types as a rule: that owners which repeat each other stay equal
        follows from the order of their sums, which types do not know.
        """
        if self.is_explicit:
            pairs = zip(args, into)
            args = tuple(jax.reshard(x, self.sharding(spec)) for x, spec in pairs)
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=into, out_specs=out, check_vma=vma
        )(*args)

    def slots(self, n: int, capacity: int | None) -> int:
        """C for `n` ids a device: as asked, or a quarter more than an even share."""
        most = max(1, min(n, self.rows))
        if capacity is None:
            capacity = math.ceil(1.25 * n / self.count) + 8
        return max(1, min(most, capacity))


class Metrics(NamedTuple):
    """What an exchange needed, over all devices.

    Args:
      rounds: int32, how many rounds there were.
      rows: int32, distinct rows asked for, summed over the devices that asked.
      largest: int32, the longest part of any device for any owner: the capacity that
        would have made it one round.
      overflow: int32, rows that did not fit into the first round; none is lost.
      bytes: float32, what one device sends over the wire in all rounds.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.ones((9, 2)), mesh, "x")
      >>> ids = jnp.array([1, 2, 3, 1])
      >>> _, found = sj.parallel.lookup(table, ids, capacity=2, return_metrics=True)
      >>> int(found.rounds), int(found.rows), int(found.overflow)
      (2, 3, 1)
    """

    rounds: jax.Array
    rows: jax.Array
    largest: jax.Array
    overflow: jax.Array
    bytes: jax.Array


def no_metrics() -> Metrics:
    """Of no ids."""
    zero = jnp.zeros((), jnp.int32)
    return Metrics(zero, zero, zero, zero, jnp.zeros((), jnp.float32))


def round_bytes(
    owners: Owners, slots: int, id_dtype: Any, dtype: Any, content: Any
) -> float:
    """Bytes that one device sends in one round: ids one way, rows one way."""
    row = math.prod(content) * jnp.dtype(dtype).itemsize
    each = jnp.dtype(id_dtype).itemsize + row
    return float((owners.count - 1) * slots * each)
