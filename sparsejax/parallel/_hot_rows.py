"""HotColdTable: a sharded table whose most frequent rows are on every device.

Where a few ids make up most of a batch (Zipf's law), every device requests the same
rows from the same owners in every step. Here the K rows of these *hot* ids are
replicated: reading one of them sends nothing. All other rows are *cold*, and lie at
their owners as in a ShardedTable.

The cold table keeps a slot for each hot row, of zeros, which nothing reads or writes.
So ids mean the same in both, and K is small beside V.

The gradient of the hot rows is summed over devices, `[K, ...]`, together with how many
devices read each row. Rows that no device read are empty slots, so an optimizer leaves
them alone, as it does any row that a batch did not read.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike, TableLike
from sparsejax._rows import SelectedRows
from sparsejax.parallel._over_devices import TableOverDevices, refuse_stand_in
from sparsejax.parallel._row_layout import RowLayout, TableWise
from sparsejax.parallel._table import ShardedTable, check_axis, constrain, make_table
from sparsejax.transform.table import replicate


_CALL = "sparsejax.parallel.replicate_hot_rows"


class HotIds:
    """The ids of hot rows: distinct, ascending, and hashed by content.

    Static data of a pytree is compared whenever a jitted function is called. Of tables
    that were made of each other it is the same object.

    Args:
      ids: integers `[K]`, ascending.
    """

    def __init__(self, ids: np.ndarray[Any, Any]):
        self.ids: np.ndarray[Any, np.dtype[np.int64]] = ids.astype(np.int64)
        self.ids.flags.writeable = False
        self.digest: str = hashlib.sha256(self.ids.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: Any) -> bool:
        same_type = isinstance(other, HotIds)
        return self is other or (same_type and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.array(self.ids, dtype, copy=copy)

    def __repr__(self) -> str:
        return f"HotIds({len(self)}, {self.digest[:8]})"


# What stands for a table in a program that will be walked; `_hot_views.py` has its
# rule. Its arguments are the values of the cold table, and the hot rows.
hot_cold_table_p = _compat.view_primitive(
    "hot_cold_table",
    lambda shape, *, static: (static[1][0], *shape[1:]),
    lambda *, static: refuse_stand_in("HotColdTable", static[1][0]),
)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HotColdTable(TableOverDevices):
    """A `[height, ...]` table, its hot rows on every device, its cold rows sharded.

    A pytree with two children. `replicate_hot_rows` makes one. A model reads it in all
    the ways in which it reads a `ShardedTable`, and `sparsejax.optim.lazy` updates it.
    Its gradient under `sparsejax.value_and_grad` is a HotColdTable of a SelectedRows
    `[K, ...]` and a ShardedTable of ShardedRows. Add and scale gradients as
    `(g1 + g2) / 2`.

    Args:
      hot: array `[K, ...]`, replicated, in ascending order of ids; a SelectedRows in
        gradients and updates.
      cold: ShardedTable `[height, ...]`; its rows of hot ids are zeros that are never
        read.
      hot_ids: which ids are hot; `np.asarray(table.hot_ids)` are the ids.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = jnp.arange(10.0).reshape(5, 2)
      >>> table = sj.parallel.replicate_hot_rows(table, mesh, "x", [3])
      >>> table.shape, table.num_hot, table.hot
      ((5, 2), 1, Array([[6., 7.]], dtype=float32))
      >>> table[jnp.array([4, 3])]
      Array([[8., 9.],
             [6., 7.]], dtype=float32)

    References:
      Adnan et al., 2021, "Accelerating Recommendation System Training by Leveraging
      Popular Choices" (FAE: hot rows on every device).
    """

    hot: jax.Array | SelectedRows
    cold: ShardedTable
    hot_ids: HotIds

    _differs_in = "shape, mesh, layout or hot ids"

    # -- pytree ------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The children with their keys, and the hot ids."""
        key = jax.tree_util.GetAttrKey
        return ((key("hot"), self.hot), (key("cold"), self.cold)), self.hot_ids

    @classmethod
    def tree_unflatten(cls, hot_ids: HotIds, children: Sequence[Any]) -> Self:
        """Rebuilds without checks, since JAX may pass any objects as children."""
        hot, cold = children
        return cls(hot, cold, hot_ids)

    # -- as TableOverDevices needs it --------------------------------------------

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.hot, self.cold.values

    def _with_parts(self, *parts: Any) -> Self:
        hot, values = parts
        cold = dataclasses.replace(self.cold, values=values)
        return dataclasses.replace(self, hot=hot, cold=cold)

    def _stand_in(self) -> jax.Array:
        static = self.hot_ids, self.cold.tree_flatten_with_keys()[1]
        parts = jnp.asarray(self.cold.values), jnp.asarray(self.hot)
        return hot_cold_table_p.bind(*parts, static=static)

    def from_owners(self, ids: np.ndarray) -> np.ndarray:
        """`ids`, with -1 for each whose row no device requests from its owner."""
        return np.where(np.isin(ids, self.hot_ids.ids), -1, ids)

    # -- properties --------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the table, `(height, ...)`."""
        return self.cold.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.cold.dtype

    @property
    def ndim(self) -> int:
        """Rank of the table."""
        return self.cold.ndim

    @property
    def num_hot(self) -> int:
        """K, the number of hot rows."""
        return len(self.hot_ids)

    @property
    def height(self) -> int:
        """V, the number of rows."""
        return self.cold.height

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The mesh."""
        return self.cold.mesh

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the cold rows are sharded over."""
        return self.cold.axes

    @property
    def layout(self) -> str | TableWise:
        """`"mod"` or `"block"`, which device owns which cold rows."""
        return self.cold.layout

    @property
    def capacity(self) -> int | None:
        """For reads that name none, as in `sparsejax.parallel.lookup`."""
        return self.cold.capacity

    @property
    def num_shards(self) -> int:
        """N, the number of parts that the cold rows are divided into."""
        return self.cold.num_shards

    @property
    def rows_per_shard(self) -> int:
        """The number of rows of each part."""
        return self.cold.rows_per_shard

    @property
    def row_layout(self) -> RowLayout:
        """The position of each row among those of `cold`."""
        return self.cold.row_layout

    def __repr__(self) -> str:
        hot = self.hot
        if hasattr(hot, "dtype") and hasattr(hot, "shape"):
            hot = f"{hot.dtype}{list(hot.shape)}"
        ids = np.array2string(self.hot_ids.ids, threshold=8, edgeitems=2)
        return f"HotColdTable(hot={hot}, hot_ids={ids}, cold={self.cold})"

    # -- the whole table ---------------------------------------------------------

    def to_dense(self) -> jax.Array:
        """The whole table in the order of ids, `[height, ...]`; for tests and export.

        Also works for gradients and updates.
        """
        hot = self.hot
        hot = hot.to_dense() if isinstance(hot, SelectedRows) else replicate(hot)
        dense, ids = self.cold.to_dense(), self.hot_ids.ids
        ids = ids.astype(_arguments.index_dtype(self.height))
        return dense.at[ids].set(hot.astype(dense.dtype))

    def map(self, f: Callable[[Any], Any]) -> HotColdTable:
        """The same layout with `f` of the hot rows and `f` of the cold values."""
        return self._with_parts(*map(f, self._parts))


def replicate_hot_rows(
    table: TableLike,
    mesh: Mesh | AbstractMesh,
    axis: str | Sequence[str],
    hot_ids: ArrayLike,
    *,
    layout: str | TableWise = "mod",
    height: int | None = None,
    capacity: int | None = None,
) -> HotColdTable:
    """Shards the rows of a table over devices, but puts its hot rows on all of them.

    For tables of which every device reads the same few rows in every step. Reading a
    hot row sends nothing and waits for no other device. With N devices, K hot ids, rows
    of d bytes and C cold rows that a device requests from one owner, a device sends

        2 * (N - 1) * C * (d + 4) + 2 * K * (d + 1) * (N - 1) / N

    bytes in a step: cold rows as in `shard_rows`, and the sums of the gradients of hot
    rows. (Of 128 devices or more, d + 2.) It holds `(V / N + K) d` bytes. A device
    requests a cold row once however often it reads it, so a table that is read once in
    a step sends about as much without hot rows. It sends less with them if it is read
    several times (in a loop, in several layers, again under `jax.checkpoint`), or is
    replicated over another axis of the mesh.

    Args:
      table, mesh, axis, layout, height: as in `shard_rows`.
      hot_ids: integers `[K]`, distinct ids in any order, known outside of `jit`: the
        ids that occur on most devices in most batches.
      capacity: int, C, for reads that name none. `measure_capacity(table, sample_ids)`
        of the result measures it. None leaves it at 25% more than an even share of all
        ids, which is too much if most ids are hot.

    Returns:
      `HotColdTable` of shape `[V, ...]`.

    Raises:
      TypeError: `hot_ids` are not integers, or `mesh` or `table` has the wrong type.
      ValueError: `hot_ids` are traced, empty, out of range or contain an id twice, have
        another rank than 1, or an argument is wrong as in `shard_rows`.

    Example:
      >>> import jax, numpy as np, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = np.ones((1000, 8), np.float32)
      >>> table = sj.parallel.replicate_hot_rows(table, mesh, "x", np.arange(16))
      >>> loss = lambda table, ids: sj.lookup(table, ids).sum()
      >>> grad = sj.grad(loss)(table, np.array([3, 700]))
      >>> grad.hot.num_rows(), grad.cold.values.num_rows()
      (Array(1, dtype=int32), Array(1, dtype=int32))

    References:
      Adnan et al., 2021, "Accelerating Recommendation System Training by Leveraging
      Popular Choices"; Parallax, Kim et al., 2019 (dense and sparse parameters).
    """
    check_axis(_CALL, mesh, axis)
    shape = (height,) if callable(table) else getattr(table, "shape", ())
    ids = _check_hot_ids(hot_ids, *shape[:1])
    if capacity is not None:
        capacity = _arguments.static_int(_CALL, "capacity", capacity, 1)
    if _arguments.is_concrete(table):
        table = np.asarray(table)
    cold = make_table(_CALL, table, mesh, axis, layout, height, ids)
    cold = dataclasses.replace(cold, capacity=capacity)
    return HotColdTable(_hot_rows(table, ids, cold), cold, HotIds(ids))


def _check_hot_ids(hot_ids: Any, height: Any = None) -> np.ndarray:
    """The ids as NumPy integers, ascending; raises if they are wrong."""
    if isinstance(hot_ids, list | tuple) and all(isinstance(i, int) for i in hot_ids):
        hot_ids = np.asarray(hot_ids)  # inside jit, JAX would trace a list
    found = _arguments.as_integers(_CALL, hot_ids, "hot_ids")
    if not _arguments.is_concrete(found):
        raise ValueError(
            f"{_CALL}: hot_ids must be concrete, got {_arguments.show(found)}. They "
            "decide about shapes: choose them outside of jit."
        )
    ids = np.sort(np.asarray(found).reshape(-1))
    if found.ndim != 1 or not ids.size:
        raise ValueError(
            f"{_CALL}: hot_ids must have shape [K] with at least one id, got shape "
            f"{found.shape}. A table without hot rows is "
            "sparsejax.parallel.shard_rows(table, mesh, axis)."
        )
    twice = ids[1:][ids[1:] == ids[:-1]]
    if twice.size:
        raise ValueError(
            f"{_CALL}: hot_ids must be distinct, but {twice[0]} occurs more than once. "
            "Pass np.unique(hot_ids)."
        )
    if isinstance(height, int) and not 0 <= int(ids[0]) <= int(ids[-1]) < height:
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise ValueError(
            f"{_CALL}: hot_ids must be ids of the table's {height} rows, got {wrong}. "
            "Ids do not wrap; leave out those that are no row."
        )
    return ids


def _hot_rows(table: Any, ids: np.ndarray, cold: ShardedTable) -> Any:
    """The hot rows on every device of the table's mesh."""
    mesh, shape = cold.mesh, (len(ids), *cold.shape[1:])
    # Spelled as in JAX's types, so that a jitted step is not recompiled.
    is_explicit = AxisType.Explicit in mesh.axis_types
    parts = (None,) * len(shape) if is_explicit else ()
    sharding = NamedSharding(mesh, PartitionSpec(*parts))
    if isinstance(table, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, cold.dtype, sharding=sharding)
    if not callable(table) and not isinstance(table, np.ndarray):
        return constrain(replicate(jnp.asarray(table))[ids], mesh, *parts)
    rows = np.asarray(table(ids) if callable(table) else table[ids])
    if rows.shape != shape:
        raise ValueError(
            f"{_CALL}: the function must return one row per id, {shape} for "
            f"{len(ids)} ids, got shape {rows.shape}."
        )
    rows = rows.astype(cold.dtype)
    return jax.make_array_from_callback(shape, sharding, lambda index: rows[index])
