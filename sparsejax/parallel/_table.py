"""ShardedTable: a table whose rows are sharded over the devices of a mesh.

With N devices along the axis, each owns R rows, about V / N. One array holds the
rows of all owners in turn, `N * R` rows sharded over the axis. Rows without an id are
padding: zero, and hidden from the user. The place of an id in this array is its
*position*, and its owner is `position // R`. `_row_layout` has the formulas.

Frequent ids are often neighbours (in a vocabulary sorted by frequency), and the layout
"mod" distributes neighbours over all owners.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike, TableLike
from sparsejax._rows import SelectedRows, indexing
from sparsejax.optim._lazy import state_sharding
from sparsejax.parallel._over_devices import TableOverDevices, refuse_stand_in
from sparsejax.parallel._row_layout import RowLayout, TableWise
from sparsejax.transform.table import replicate, reshard


_CALL = "sparsejax.parallel.shard_rows"
LAYOUTS = ("mod", "block")


# What stands for a table in a program that will be walked: `_views.py` has its rule.
sharded_table_p = _compat.view_primitive(
    "sharded_table",
    lambda shape, *, static: (static[0], *shape[1:]),
    lambda *, static: refuse_stand_in("ShardedTable", static[0]),
)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardedTable(TableOverDevices):
    """A `[height, ...]` table whose rows are sharded over the devices of a mesh.

    A pytree with one child, so `tx.init`, `jax.jit` with donation, checkpoints and
    `optax.apply_updates` work on it leaf by leaf. `shard_rows` makes one. A model reads
    it as it reads an array: by `table[ids]`, `sparsejax.lookup`, `embedding_bag`, `dot`
    and the layers of `sparsejax.nn` anywhere, by `jnp.take` and the embedding layers of
    flax and equinox inside of `sparsejax.value_and_grad` and
    `sparsejax.parallel.forward`. `sparsejax.parallel.lookup` and `embedding_bag` have
    more options. Its gradient under `sparsejax.value_and_grad` is a ShardedTable with
    ShardedRows as its child.

    Sum the gradients of several batches as `g1 + g2`, and scale them as `g / 2`.
    `jax.tree.map(jnp.add, g1, g2)` would add row numbers too, so it raises.

    Args:
      values: array `[N * R, ...]` sharded over `axis`, in order of position; a
        ShardedRows in gradients and updates.
      height: int, the number of rows of the table.
      mesh: the mesh.
      axis: the mesh axis that the rows are sharded over, or a tuple of axes.
      layout: `"mod"`, `"block"` or a TableWise, which device owns which rows.
      capacity: int, for reads that name none, as in `sparsejax.parallel.lookup`; None
        for the default.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.ones((5, 2)), mesh, "x")
      >>> table.shape, table.num_shards, table.to_dense().shape
      ((5, 2), 1, (5, 2))
      >>> table[jnp.array([4, 0])]
      Array([[1., 1.],
             [1., 1.]], dtype=float32)

    References:
      TorchRec, row-wise sharding; TensorFlow, `partition_strategy` "mod" and "div".
    """

    values: Any
    height: int
    mesh: Mesh | AbstractMesh
    axis: str | tuple[str, ...]
    layout: str | TableWise
    capacity: int | None = None

    # -- pytree ------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The child with its key, and the static fields."""
        return ((jax.tree_util.GetAttrKey("values"), self.values),), self._static

    @property
    def _static(self) -> tuple[Any, ...]:
        return self.height, self.mesh, self.axis, self.layout, self.capacity

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Self:
        """Rebuilds without checks, since JAX may pass any object as the child."""
        return cls(*children, *static)

    # -- as TableOverDevices needs it --------------------------------------------

    @property
    def _parts(self) -> tuple[Any, ...]:
        return (self.values,)

    def _with_parts(self, *parts: Any) -> Self:
        (values,) = parts
        return dataclasses.replace(self, values=values)

    def _stand_in(self) -> jax.Array:
        return sharded_table_p.bind(jnp.asarray(self.values), static=self._static)

    # -- properties --------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the table, `(height, ...)`, without padding."""
        return (self.height, *self.values.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def ndim(self) -> int:
        """Rank of the table."""
        return len(self.values.shape)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the rows are sharded over, always as a tuple."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    @property
    def num_shards(self) -> int:
        """N, the number of parts that the rows are divided into."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    @property
    def rows_per_shard(self) -> int:
        """R, the number of rows of each part, padding included."""
        return self.row_layout.per_shard

    @property
    def row_layout(self) -> RowLayout:
        """The position of each row."""
        return RowLayout(self.height, self.num_shards, self.layout)

    @property
    def sharding(self) -> NamedSharding:
        """How `values` are sharded."""
        rest = ()
        if AxisType.Explicit in self.mesh.axis_types and self.values is not None:
            # Spelled as in JAX's types, so that a jitted step is not recompiled.
            rest = (None,) * (self.ndim - 1)
        return NamedSharding(self.mesh, PartitionSpec(self.axis, *rest))

    def __repr__(self) -> str:
        if hasattr(self.values, "dtype") and hasattr(self.values, "shape"):
            what = f"{self.values.dtype}{list(self.shape)}"
        else:
            what = repr(self.values)  # a tree of shardings or of names, say
        return (
            f"ShardedTable({what}, {self.num_shards} x {self.rows_per_shard} rows over "
            f"{self.axis!r}, layout={self.layout!r})"
        )

    # -- ids and positions -------------------------------------------------------

    def position(self, ids: ArrayLike) -> jax.Array:
        """The positions of the rows of `ids`; `N * R` for ids out of range.

        Args:
          ids: integers of any shape.

        Returns:
          int32 (or int64) of the same shape.
        """
        call = "sparsejax.parallel.ShardedTable.position"
        length = self.num_shards * self.rows_per_shard
        ids = _arguments.as_ids(call, ids, self.height)
        named = indexing.in_range(ids, self.height)
        ids = ids.astype(_arguments.index_dtype(length, ids.dtype))
        spec = _compat.explicit_spec(ids) if isinstance(self.layout, TableWise) else ()
        # JAX does not know how what is gathered by sharded numbers is sharded.
        found = self.row_layout.position(replicate(ids) if spec else ids)
        found = reshard(found, spec, self.mesh) if spec else found
        return jnp.where(named, found, _arguments.scalar(length, ids))

    def ids_at(self, position: ArrayLike) -> jax.Array:
        """The inverse of `position`; `height` for padding and out of range."""
        call = "sparsejax.parallel.ShardedTable.ids_at"
        length = self.num_shards * self.rows_per_shard
        position = _arguments.as_ids(call, position, length)
        named = indexing.in_range(position, length)
        ids = self.row_layout.ids_at(position)
        named &= ids < _arguments.scalar(self.height, ids)
        return jnp.where(named, ids, _arguments.scalar(self.height, ids))

    def requested(self, ids: np.ndarray) -> np.ndarray:
        """Those of the ids whose rows are requested from owners: in range."""
        return ids

    # -- the whole table ---------------------------------------------------------

    def to_dense(self) -> jax.Array:
        """The whole table in the order of ids, `[height, ...]`; for tests and export.

        Also works for gradients and updates, whose child is a SelectedRows.
        """
        if isinstance(self.values, SelectedRows):
            ids = self.ids_at(replicate(self.values.rows))
            values = replicate(self.values.values)
            return SelectedRows(ids, values, self.height).to_dense()
        values = replicate(self.values)
        if self.layout == "mod":
            parts = (self.num_shards, self.rows_per_shard, *values.shape[1:])
            values = jnp.swapaxes(values.reshape(parts), 0, 1).reshape(values.shape)
        elif isinstance(self.layout, TableWise):
            ids = lax.iota(_arguments.index_dtype(values.shape[0]), self.height)
            return values[self.position(ids)]
        return values[: self.height]

    def map(self, f: Callable[[Any], Any]) -> ShardedTable:
        """The same layout with `f(values)`; `f` must keep the first axis."""
        return dataclasses.replace(self, values=f(self.values))


def shard_rows(
    table: TableLike,
    mesh: Mesh | AbstractMesh,
    axis: str | Sequence[str],
    *,
    layout: str | TableWise = "mod",
    height: int | None = None,
) -> ShardedTable:
    """Shards the rows of a table over the devices along a mesh axis.

    Each of the N devices along the axis gets `ceil(V / N)` rows. Over the mesh's other
    axes the parts are replicated. `sparsejax.parallel.lookup` and `embedding_bag` read
    the result; the training step around them is the same as on one device.

    Args:
      table: `[V, ...]`, a JAX or NumPy array (or `np.memmap`): each device's part is
        cut on the host, so no device ever holds V rows. Inside `jit`, a traced array. A
        `jax.ShapeDtypeStruct` gives the table's abstract form. Or, for tables larger
        than the memory of a host, a function `f(ids) -> rows [len(ids), ...]` of NumPy
        ids, called once for each part that has rows.
      mesh: as returned by `jax.make_mesh`, with Auto or Explicit axes.
      axis: name of a mesh axis, or a tuple of names.
      layout: `"mod"` distributes neighbouring ids over the devices, so frequent ids
        that are neighbours do not all go to one device; `"block"` keeps neighbours
        together; a `TableWise` is for a stack of tables that lie on different devices.
      height: int, V, for a table given as a function.

    Returns:
      `ShardedTable` of shape `[V, ...]`.

    Raises:
      TypeError: `mesh` or `table` has the wrong type.
      ValueError: `axis` or `layout` is unknown, `table` is a scalar, `height` is
        missing, `f` returns rows of the wrong shape, or the rows are concrete and the
        mesh abstract.

    Example:
      >>> import jax, numpy as np, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> sj.parallel.shard_rows(np.ones((1000, 8), np.float32), mesh, "x")
      ShardedTable(float32[1000, 8], 1 x 1000 rows over 'x', layout='mod')
      >>> table = sj.parallel.shard_rows(np.ones((1000, 8), np.float32), mesh, "x")
      >>> loss = lambda table, ids: sj.parallel.lookup(table, ids).sum()
      >>> sj.grad(loss)(table, np.array([3, 7])).to_dense()[3:5, 0]
      Array([1., 0.], dtype=float32)

    References:
      TorchRec, row-wise sharding; PaddlePaddle, distributed lookup table (ids by
      remainder over parameter servers).
    """
    return make_table(_CALL, table, mesh, axis, layout, height)


# ------------------------------------------------------------------ making the values


def make_table(
    call: str,
    table: Any,
    mesh: Any,
    axis: Any,
    layout: str | TableWise,
    height: int | None,
    zeros: np.ndarray | None = None,
) -> ShardedTable:
    """`shard_rows`, for the public function `call`, with zeros in the rows `zeros`."""
    axis = check_axis(call, mesh, axis)
    if isinstance(layout, TableWise):
        names = (axis,) if isinstance(axis, str) else axis
        split_axes(call, mesh, names, layout.num_groups)
    elif layout not in LAYOUTS:
        raise ValueError(
            f"{call}: layout must be 'mod', 'block' or a TableWise, got {layout!r}. "
            "'mod' distributes neighbouring ids over all devices; 'block' keeps them "
            "together."
        )

    def make(values, height):
        if isinstance(layout, TableWise) and layout.height != height:
            raise ValueError(
                f"{call}: layout must have as many rows as the table, {height}, got "
                f"tables of {layout.height} rows together."
            )
        made = ShardedTable(values, height, mesh, axis, layout)
        count, each = made.num_shards, made.rows_per_shard
        fits = _arguments.has_index_dtype
        if fits(height) and not fits(count * each):
            raise ValueError(
                f"{call}: {count} devices with {each} rows each have more positions "
                f"than 32 bits can count, for a table of {height} rows. Choose a "
                "layout that distributes the rows more evenly, or set jax_enable_x64."
            )
        return made

    if callable(table):
        hint = " A table given as a function of ids needs height=, its number of rows."
        height = _arguments.static_int(call, "height", height, hint=hint)
        return make(_values_from(call, table, make(None, height), zeros), height)
    table = _arguments.as_array(table) if hasattr(table, "__jax_array__") else table
    if not (hasattr(table, "shape") and hasattr(table, "dtype")):
        raise TypeError(
            f"{call}: table must be a JAX or NumPy array, a ShapeDtypeStruct or a "
            f"function of ids, got {_arguments.kind_of(table)}."
        )
    _check_numeric(call, table.dtype)
    shape = tuple(table.shape)
    if not shape:
        raise ValueError(
            f"{call}: table must have at least one axis, got shape {shape}. The first "
            "axis is the rows."
        )
    if height is not None:
        raise ValueError(
            f"{call}: height is only for a table given as a function of ids, got "
            f"height={height!r} and a table of shape {shape}. Leave height out."
        )
    empty = make(None, shape[0])
    if isinstance(table, jax.ShapeDtypeStruct):
        stored = (empty.num_shards * empty.rows_per_shard, *shape[1:])
        abstract = make(jax.ShapeDtypeStruct(stored, table.dtype), shape[0])
        return abstract.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=abstract.sharding)
        )
    if not _arguments.is_concrete(table):
        if zeros is not None:
            table = table.at[zeros].set(np.zeros((), table.dtype))
        return make(_values_of_traced(table, empty), shape[0])
    host = table if isinstance(table, np.ndarray) else np.asarray(table)
    return make(_values_from(call, lambda ids: host[ids], empty, zeros), shape[0])


def _values_of_traced(table: jax.Array, empty: ShardedTable) -> jax.Array:
    """`values` of a traced array, computed by reshapes of whole axes."""
    shards, per_shard = empty.num_shards, empty.rows_per_shard
    table = replicate(table)
    if isinstance(empty.layout, TableWise):
        length = shards * per_shard
        ids = empty.ids_at(lax.iota(_arguments.index_dtype(length), length))
        table = indexing.take_rows(table, ids)
        return constrain(table, empty.mesh, empty.axis)
    padding = shards * per_shard - empty.height
    table = jnp.pad(table, [(0, padding), *((0, 0) for _ in table.shape[1:])])
    if empty.layout == "mod":
        parts = table.reshape(per_shard, shards, *table.shape[1:])
        table = jnp.swapaxes(parts, 0, 1).reshape(table.shape)
    return constrain(table, empty.mesh, empty.axis)


def _values_from(
    call: str, rows_of: Callable, empty: ShardedTable, zeros: np.ndarray | None
) -> jax.Array:
    """`values` from a function of NumPy ids, built part by part on the host.

    Each process builds only the parts of its own devices.
    """
    check_has_devices(call, empty.mesh)
    per_shard = empty.rows_per_shard
    length = empty.num_shards * per_shard

    def ids_of_shard(shard: int) -> np.ndarray:
        begin = shard * per_shard
        pieces = empty.row_layout.progression(begin, begin + per_shard)
        ids = [np.arange(x.start, x.stop, x.step) for _, x in pieces]
        return np.concatenate([np.zeros(0, np.int64), *ids])

    def write(shard: int, rows: np.ndarray, out: np.ndarray) -> None:
        begin, used = shard * per_shard, 0
        for at, ids in empty.row_layout.progression(begin, begin + per_shard):
            out[at : at + len(ids)] = rows[used : used + len(ids)]
            used += len(ids)

    def checked_rows(ids: np.ndarray, row: tuple[int, ...] | None) -> np.ndarray:
        # NumPy would broadcast a row that is too short without an error.
        rows = np.asarray(rows_of(ids))
        _check_numeric(call, rows.dtype)
        if rows.shape[:1] != ids.shape or row not in (None, rows.shape[1:]):
            want = f"[{len(ids)}, ...]" if row is None else (len(ids), *row)
            raise ValueError(
                f"{call}: the function must return one row per id, {want} for "
                f"{len(ids)} ids, got shape {rows.shape}."
            )
        return rows

    def shards_in(rows: slice) -> range:
        start, stop, _ = rows.indices(length)
        return range(start // per_shard, stop // per_shard)

    # Shape and dtype are those of this process's first part that has rows.
    by_rows = NamedSharding(empty.mesh, PartitionSpec(empty.axis))
    here = by_rows.addressable_devices_indices_map((length,)).values()
    own = sorted({k for index in here if index for k in shards_in(index[0])})
    first = next((k for k in own if len(ids_of_shard(k))), None)
    if first is None:
        like, made = checked_rows(np.arange(min(1, empty.height)), None), {}
    else:
        like = checked_rows(ids_of_shard(first), None)
        made = {first: like}
    row, dtype = like.shape[1:], jax.dtypes.canonicalize_dtype(like.dtype)

    def part(index):
        start, stop, _ = index[0].indices(length)
        out = np.zeros((stop - start, *row), dtype)
        for shard in shards_in(index[0]):
            ids = ids_of_shard(shard)
            if not len(ids):
                continue
            rows = made.pop(shard, None)
            if rows is None:
                rows = checked_rows(ids, row)
            if zeros is not None:
                rows = np.array(rows)
                rows[np.isin(ids, zeros)] = 0
            write(shard, rows, out[shard * per_shard - start :])
        return out

    shape = (length, *row)
    sharding = empty.map(lambda _: jax.ShapeDtypeStruct(shape, dtype)).sharding
    return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)


def _check_numeric(call: str, dtype: Any) -> None:
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TypeError(
            f"{call}: a table must be numeric, got {dtype}. Map text to numbers with "
            "a vocabulary first (sparsejax.data)."
        )


# ------------------------------------------------------------------ for other layouts


def check_has_devices(call: str, mesh: Any) -> None:
    """Raises a ValueError for a mesh without devices."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"{call}: a concrete table needs devices, but an AbstractMesh has none. "
            "Pass a jax.sharding.Mesh (jax.make_mesh), or "
            "jax.ShapeDtypeStruct(shape, dtype) for the abstract form."
        )


def split_axes(
    call: str, mesh: Any, axes: tuple[str, ...], num_groups: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes over which the groups of a TableWise layout lie, and those inside."""
    sizes = [mesh.shape[name] for name in axes]
    for k in range(len(axes) + 1):
        # Axes of one device, behind them, divide nothing.
        if math.prod(sizes[:k]) == num_groups and set(sizes[k:]) != {1}:
            return axes[:k], axes[k:]
    raise ValueError(
        f"{call}: a TableWise layout of {num_groups} groups needs axes of the mesh "
        f"that come first and have {num_groups} devices, got "
        f"{dict(zip(axes, sizes))}. For groups of several devices make a mesh with two "
        "axes, groups first, and pass both as axis."
    )


def check_axis(call: str, mesh: Any, axis: Any) -> str | tuple[str, ...]:
    """The axis as one name or a tuple of two or more; raises if it is invalid."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"{call}: mesh must be a jax.sharding.Mesh, as returned by jax.make_mesh, "
            f"got {_arguments.kind_of(mesh)}."
        )
    names = (axis,) if isinstance(axis, str) else axis
    known = isinstance(names, tuple | list) and all(n in mesh.axis_names for n in names)
    if not known or not names or len(set(names)) != len(names):
        raise ValueError(
            f"{call}: axis must be the name of a mesh axis, or a tuple of names, got "
            f"{axis!r}. The axes of this mesh are {mesh.axis_names}."
        )
    types = dict(zip(mesh.axis_names, mesh.axis_types))
    for name in names:
        if types[name] == AxisType.Manual:
            raise ValueError(
                f"{call}: the mesh axis {name!r} is Manual here, because arrays are "
                "already sharded inside a shard_map. Call it outside of the "
                "shard_map."
            )
    return names[0] if len(names) == 1 else tuple(names)


def constrain(x: jax.Array, mesh: Any, *spec: Any) -> jax.Array:
    """`x` sharded as `PartitionSpec(*spec)`, over Explicit and Auto axes alike."""
    rest = (None,) * (x.ndim - len(spec))
    sharding = NamedSharding(mesh, PartitionSpec(*spec, *rest))
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


@state_sharding.rows_sharding.register
def _sharding_of(table: ShardedTable) -> NamedSharding | None:
    """For a traced table its own sharding, since its array does not know it yet."""
    if not isinstance(table.values, Tracer):
        return state_sharding.rows_sharding(table.values)
    # An optimizer also probes tables of other heights, which have no sharding.
    stored = table.num_shards * table.rows_per_shard
    return table.sharding if table.values.shape[:1] == (stored,) else None
