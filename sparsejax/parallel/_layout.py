"""Layouts: which device owns which rows of a table, and in which order it stores them.

N devices own R rows each. The rows of all owners in turn are one array `[N * R, ...]`,
and the place of a row in this array is its *position*. With `V` rows, V <= N R:

    Mod     position(id) = (id mod N) * R + id // N,    R = ceil(V / N)
    Block   position(id) = id,                          R = ceil(V / N)

`TableWise` is for a stack of tables T_0, ..., T_K, one after the other in one array.
The owners are G groups of m = N / G devices. Each table is in one group, and its rows
are divided over the m devices of the group. Row j of table k is at

    position(start_k + j) = (m group_k + j mod m) * R + offset_k + j // m

Here offset_k is the number of rows that a device of the group holds of earlier tables,
and R is the largest number of rows that any device holds. With m = 1 each table is
whole on one device.

A layout does not know V and N. Its methods take them as `height` and `shards`. Ids and
positions may be arrays of JAX, or of NumPy on the host.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from sparsejax import _arguments
from sparsejax._rows import indexing


Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True, repr=False)
class Mod:
    """Row i is on device i mod N, so that neighbouring ids are on different devices.

    `position` and `ids_at` of `Mod` and `Block` are arithmetic, which XLA partitions.
    `TableWise` searches, which it does not.
    """

    is_arithmetic = True
    is_by_id = False  # True if the position of a row is its id

    def __repr__(self) -> str:
        return "'mod'"  # as users write it

    def check(
        self, height: int, mesh: Mesh | AbstractMesh, axes: Sequence[str]
    ) -> None:
        """Raises unless a table of this height can be laid out over the mesh axes."""

    def per_shard(self, height: int, shards: int) -> int:
        """Returns R; at least 1, so that no device has an empty part."""
        return max(1, -(-height // shards))

    def position(self, ids: Array, height: int, shards: int) -> Any:
        """Returns the position of each id in range; arbitrary for ids out of range."""
        n, rows = _scalars(ids, shards, self.per_shard(height, shards))
        return ids % n * rows + ids // n

    def ids_at(self, positions: Array, height: int, shards: int) -> Any:
        """Returns the id at each position in range; for padding, `height` or more."""
        n, rows = _scalars(positions, shards, self.per_shard(height, shards))
        part, row = positions // rows, positions % rows
        return row * n + part

    def filled(self, shard: Any, height: int, shards: int) -> Any:
        """Returns the rows of a device that are not padding; `shard` may be traced."""
        return (height - shard + shards - 1) // shards

    def in_order(self, values: jax.Array, height: int, shards: int) -> jax.Array:
        """Returns stored rows `[N * R, ...]` in the order of ids; padding is last."""
        parts = values.reshape(shards, len(values) // shards, *values.shape[1:])
        return jnp.swapaxes(parts, 0, 1).reshape(values.shape)

    def stored(self, rows: jax.Array, height: int, shards: int) -> jax.Array:
        """Inverts `in_order`: rows in the order of ids, `[N * R, ...]`."""
        parts = rows.reshape(len(rows) // shards, shards, *rows.shape[1:])
        return jnp.swapaxes(parts, 0, 1).reshape(rows.shape)


@dataclasses.dataclass(frozen=True, repr=False)
class Block:
    """Each device has R neighbouring rows. A plain array is a Block of one device.

    The methods are explained at `Mod`.
    """

    is_arithmetic = is_by_id = True

    def __repr__(self) -> str:
        return "'block'"  # as users write it

    def check(
        self, height: int, mesh: Mesh | AbstractMesh, axes: Sequence[str]
    ) -> None:
        """Accepts any height and mesh."""

    def per_shard(self, height: int, shards: int) -> int:
        """Returns R; at least 1, so that no device has an empty part."""
        return max(1, -(-height // shards))

    def position(self, ids: Array, height: int, shards: int) -> Any:
        """Returns the id itself."""
        return ids

    def ids_at(self, positions: Array, height: int, shards: int) -> Any:
        """Returns the position itself."""
        return positions

    def filled(self, shard: Any, height: int, shards: int) -> Any:
        """Counts a device's rows that are not padding; 0 or less if none."""
        return height - shard * self.per_shard(height, shards)

    def in_order(self, values: jax.Array, height: int, shards: int) -> jax.Array:
        """Returns the stored rows, which are in the order of ids."""
        return values

    def stored(self, rows: jax.Array, height: int, shards: int) -> jax.Array:
        """Returns the rows as they are."""
        return rows


@dataclasses.dataclass(frozen=True, repr=False)
class TableWise:
    """A layout for a stack of tables: each table on one device, or one group of them.

    For `shard_rows(stack, mesh, axis, layout=...)`. The rows of the stack are the rows
    of its tables, one table after the other, as `sparsejax.nn.EmbeddingCollection`
    stores them. The owner of a table sums the features and bags of fixed length that
    the collection reads: ids are sent to the owner and bags come back, instead of rows.
    The plan that `sparsejax.parallel.plan` makes with `stacks=` chooses the groups.

    Args:
      heights: ints, the number of rows of each table, in order.
      groups: ints, the group of each table, from 0 to num_groups - 1.
      num_groups: int, the number of groups, a divisor of the number of devices; for
        whole tables on single devices, the number of devices. The first axes of the
        mesh in `axis` must have this many devices. The rows of each table are divided
        over the other axes. With `axis=("host", "device")` and a group for each host,
        tables are on different hosts, and the devices of a host share a table's rows.

    Raises:
      TypeError, ValueError: the lists are empty, differ in length, or hold other
        numbers.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> layout = sj.parallel.TableWise(heights=(5, 3), groups=(0, 0), num_groups=1)
      >>> table = sj.parallel.shard_rows(jnp.ones((8, 2)), mesh, "x", layout=layout)
      >>> table.layout, table[jnp.array([7])]
      (TableWise(tables=2, groups=1), Array([[1., 1.]], dtype=float32))

    References:
      TorchRec, table-wise and table-row-wise sharding.
    """

    heights: tuple[int, ...]
    groups: tuple[int, ...]
    num_groups: int

    is_arithmetic = is_by_id = False

    def __post_init__(self) -> None:
        heights, groups = (tuple(map(int, x)) for x in (self.heights, self.groups))
        is_valid = len(heights) == len(groups) > 0 and min(heights) >= 0
        if not is_valid or not 0 <= min(groups) <= max(groups) < self.num_groups:
            raise ValueError(
                "sparsejax.parallel.TableWise: heights and groups must have one number "
                "for each table, groups from 0 to num_groups - 1, got "
                f"heights={heights}, groups={groups}, num_groups={self.num_groups}."
            )
        vars(self).update(heights=heights, groups=groups)

    def __repr__(self) -> str:
        return f"TableWise(tables={len(self.heights)}, groups={self.num_groups})"

    @property
    def height(self) -> int:
        """V, the number of rows of the stack."""
        return sum(self.heights)

    @property
    def starts(self) -> np.ndarray:
        """int64, the first row of each table in the stack."""
        return np.cumsum([0, *self.heights[:-1]])

    def split_axes(
        self, mesh: Mesh | AbstractMesh, axes: Sequence[str]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the axes over the groups, and the axes inside of a group.

        Raises:
          ValueError: no first axes of the mesh have a device for each group.
        """
        sizes = [mesh.shape[name] for name in axes]
        for k in range(len(sizes) + 1):
            # Axes of one device, behind them, divide nothing.
            if math.prod(sizes[:k]) == self.num_groups and set(sizes[k:]) != {1}:
                return tuple(axes[:k]), tuple(axes[k:])
        raise ValueError(
            f"sparsejax.parallel.TableWise: {self.num_groups} groups need axes of the "
            f"mesh that come first and have {self.num_groups} devices, got "
            f"{dict(zip(axes, sizes))}. For groups of several devices make a mesh with "
            "two axes, groups first, and pass both as axis."
        )

    # -- the methods of a layout, explained at `Mod` -----------------------------

    def check(
        self, height: int, mesh: Mesh | AbstractMesh, axes: Sequence[str]
    ) -> None:
        """Raises unless the tables have these rows and the groups these devices.

        Raises:
          ValueError: they do not.
        """
        self.split_axes(mesh, axes)
        if height != self.height:
            raise ValueError(
                f"sparsejax.parallel.TableWise: heights are {self.height} rows "
                f"together, but the table has {height}."
            )

    def per_shard(self, height: int, shards: int) -> int:
        """Returns R; at least 1, so that no device has an empty part."""
        return max(1, int(_group_rows(self, shards)[1].max()))

    def position(self, ids: Array, height: int, shards: int) -> Any:
        """Returns the position of each id in range; arbitrary for ids out of range."""
        m, per_shard = shards // self.num_groups, self.per_shard(height, shards)
        table = _last_at_most(self.starts, ids)
        first = np.asarray(self.groups) * m * per_shard + _group_rows(self, shards)[0]
        ids = ids - _pick(self.starts, table, ids)
        n, rows = _scalars(ids, m, per_shard)
        return _pick(first, table, ids) + (ids % n * rows + ids // n)

    def ids_at(self, positions: Array, height: int, shards: int) -> Any:
        """Returns the id at each position in range; for padding, `height`."""
        per_shard = self.per_shard(height, shards)
        m, rows = _scalars(positions, shards // self.num_groups, per_shard)
        part, row = positions // rows, positions % rows
        # The rows of a group's devices are numbered without the device. A table is then
        # a run of these numbers.
        number = part // m * rows + row
        first = np.asarray(self.groups) * per_shard + _group_rows(self, shards)[0]
        order = np.argsort(first, kind="stable")
        at = _last_at_most(first[order], number)
        pick = lambda xs: _pick(np.asarray(xs)[order], at, positions)
        ids = (number - pick(first)) * m + part % m
        zero, none = _scalars(ids, 0, height)
        is_row = (ids >= zero) & (ids < pick(self.heights))
        xp = ids.__array_namespace__()
        return xp.where(is_row, ids + pick(self.starts), none)

    def in_order(self, values: jax.Array, height: int, shards: int) -> jax.Array:
        """Returns stored rows in the order of ids, `[V, ...]`."""
        ids = lax.iota(_arguments.index_dtype(values.shape[0]), height)
        return values[self.position(ids, height, shards)]

    def stored(self, rows: jax.Array, height: int, shards: int) -> jax.Array:
        """Returns rows `[V or more, ...]` in the order of ids as `[N * R, ...]`."""
        length = shards * self.per_shard(height, shards)
        positions = lax.iota(_arguments.index_dtype(length), length)
        ids = self.ids_at(positions, height, shards)
        return indexing.take_rows(rows[:height], ids)


Layout = Mod | Block | TableWise
LAYOUTS = {"mod": Mod(), "block": Block()}


def balance(
    heights: Sequence[int], loads: Sequence[float], num_groups: int
) -> TableWise:
    """Makes the layout whose groups have about equal loads and numbers of rows.

    Tables are placed in descending order of load. Each goes to the group that is then
    the least full, by the larger of its shares of load and of rows.

    Args:
      heights: the number of rows of each table.
      loads: for each table, for example the number of its rows that a step reads.
      num_groups: G.
    """
    share = lambda xs: np.asarray(xs, np.float64) / max(1e-9, sum(xs) / num_groups)
    load, rows = share(loads), share(heights)
    full = np.zeros((num_groups, 2))
    groups = np.zeros(len(heights), np.int64)
    for k in sorted(range(len(heights)), key=lambda k: -max(load[k], rows[k])):
        then = full + [load[k], rows[k]]
        groups[k] = np.lexsort((then.sum(1), then.max(1)))[0]
        full[groups[k]] = then[groups[k]]
    return TableWise(tuple(map(int, heights)), tuple(groups.tolist()), num_groups)


@functools.lru_cache(maxsize=64)
def _group_rows(layout: TableWise, shards: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each table's first row on its group's devices, and the rows of groups."""
    m = shards // layout.num_groups
    used = np.zeros(layout.num_groups, np.int64)
    offsets = []
    for height, group in zip(layout.heights, layout.groups):
        offsets.append(used[group])
        used[group] += -(-height // m)
    return np.array(offsets), used


def _scalars(like: Any, *numbers: int) -> Iterator[Any]:
    return (_arguments.scalar(n, like) for n in numbers)


def _last_at_most(ascending: np.ndarray, x: Any) -> Any:
    """Returns the index of the last element that is at most x; 0 if there is none."""
    xp = x.__array_namespace__()
    after = xp.searchsorted(xp.asarray(ascending.astype(x.dtype)), x, side="right")
    return xp.maximum(after - 1, 0)


def _pick(values: Any, at: Any, like: Any) -> Any:
    xp = like.__array_namespace__()
    return xp.asarray(np.asarray(values).astype(like.dtype))[at]
