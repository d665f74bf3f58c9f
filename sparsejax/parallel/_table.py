"""ShardedTable: a table whose rows are spread over the devices of a mesh.

With N devices along the axis, each owns `R = ceil(V / N)` rows. The rows lie one owner
after the other in one array of `N * R` rows, sharded over the axis; what is beyond V is
padding, and hidden. Where an id lies is its *position*:

    layout "mod":   position(id) = (id mod N) * R + id // N
    layout "block": position(id) = id

so that the owner is `position // R` in both. Frequent ids are often neighbours (a
vocabulary sorted by frequency), and "mod" deals them out to all owners in turn.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sparsejax import _arguments, _compat
from sparsejax._rows import SelectedRows, indexing
from sparsejax.optim._lazy import state_sharding
from sparsejax.parallel import _table_parts
from sparsejax.parallel._table_arithmetic import Arithmetic


_CALL = "sparsejax.parallel.shard_rows"
LAYOUTS = ("mod", "block")


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardedTable(Arithmetic):
    """A `[height, ...]` table, its rows spread over the devices of a mesh.

    A pytree with one child, so that `tx.init`, `jax.jit` with donation, checkpoints and
    `optax.apply_updates` work on it leaf by leaf. `shard_rows` makes one;
    `sparsejax.parallel.lookup` and `embedding_bag` read it. Its gradient under
    `sparsejax.value_and_grad` is a ShardedTable too, with ShardedRows as its child. Two
    of one shape and layout are added with `+`, and scaled with `*` and `/` by numbers:
    sum the gradients of several batches so, not by a function over all leaves, which
    would add row numbers too.

    Args:
      values: `[N * R, ...]`, sharded over `axis`, in the order of positions; in
        gradients and updates ShardedRows over positions.
      height: int, the number of rows of the table.
      mesh: the mesh.
      axis: the mesh axis that the rows are spread over, or a tuple of axes.
      layout: `"mod"` or `"block"`, which row lies where.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.ones((5, 2)), mesh, "x")
      >>> table.shape, table.num_shards, table.to_dense().shape
      ((5, 2), 1, (5, 2))

    References:
      TorchRec, row-wise sharding; TensorFlow, `partition_strategy` "mod" and "div".
    """

    values: Any
    height: int
    mesh: Any
    axis: str | tuple[str, ...]
    layout: str

    # numpy and jax must hand `array + table` to us instead of looping over objects.
    __array_ufunc__ = None

    # -- pytree ------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The child with its key, and what is static."""
        static = self.height, self.mesh, self.axis, self.layout
        return ((jax.tree_util.GetAttrKey("values"), self.values),), static

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Self:
        """Rebuilds without checks: the child may be anything JAX puts there."""
        return cls(*children, *static)

    # -- what it is --------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the table as the user sees it: `(height, ...)`."""
        return (self.height, *self.values.shape[1:])

    @property
    def dtype(self) -> Any:
        """The type of the values."""
        return self.values.dtype

    @property
    def ndim(self) -> int:
        """Rank of the table."""
        return len(self.values.shape)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the rows are spread over, always as a tuple."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    @property
    def num_shards(self) -> int:
        """N, the number of parts the rows are in."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    @property
    def rows_per_shard(self) -> int:
        """R, the number of rows of each part, padding included."""
        return rows_per_shard(self.height, self.num_shards)

    @property
    def sharding(self) -> NamedSharding:
        """How `values` are laid out."""
        rest = ()
        if AxisType.Explicit in self.mesh.axis_types and self.values is not None:
            # As JAX writes it in types, so that a jitted step finds it again.
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

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"sparsejax: a ShardedTable of shape {self.shape} was used where an array "
            "is needed (jnp.asarray, an index, sparsejax.lookup). Its rows lie on "
            f"{self.num_shards} devices: look them up with "
            "sparsejax.parallel.lookup(table, ids) or "
            "sparsejax.parallel.embedding_bag, or call .to_dense() for the whole of it."
        )

    # So that jnp.asarray, and with it sparsejax.lookup, raises the same error.
    def __jax_array__(self) -> NoReturn:
        self.__array__()

    def __getitem__(self, ids: Any) -> NoReturn:
        self.__array__()

    # -- ids and positions -------------------------------------------------------

    def position(self, ids: Any) -> jax.Array:
        """Where the rows of `ids` lie among `values`; `N * R` for ids out of range.

        Args:
          ids: integers of any shape.

        Returns:
          int32 (or int64) of the same shape.
        """
        call = "sparsejax.parallel.ShardedTable.position"
        shards, rows = self.num_shards, self.rows_per_shard
        ids = _arguments.as_ids(call, ids, self.height)
        named = indexing.in_range(ids, self.height)
        ids = ids.astype(_arguments.index_dtype(shards * rows, ids.dtype))
        if self.layout == "mod":
            n, r = _arguments.scalar(shards, ids), _arguments.scalar(rows, ids)
            ids = jnp.remainder(ids, n) * r + jnp.floor_divide(ids, n)
        return jnp.where(named, ids, _arguments.scalar(shards * rows, ids))

    def ids_at(self, position: Any) -> jax.Array:
        """The inverse of `position`: the ids there, `height` where there is none."""
        call = "sparsejax.parallel.ShardedTable.ids_at"
        shards, rows = self.num_shards, self.rows_per_shard
        ids = _arguments.as_ids(call, position, shards * rows)
        named = indexing.in_range(ids, shards * rows)
        if self.layout == "mod":
            n, r = _arguments.scalar(shards, ids), _arguments.scalar(rows, ids)
            ids = jnp.remainder(ids, r) * n + jnp.floor_divide(ids, r)
        named &= ids < _arguments.scalar(self.height, ids)
        return jnp.where(named, ids, _arguments.scalar(self.height, ids))

    # -- as a whole --------------------------------------------------------------

    def to_dense(self) -> jax.Array:
        """The whole table in the order of ids, `[height, ...]`; for tests and export.

        Also of gradients and updates, whose child is a SelectedRows.
        """
        if isinstance(self.values, SelectedRows):
            rows, values = (gathered(x) for x in (self.values.rows, self.values.values))
            return SelectedRows(self.ids_at(rows), values, self.height).to_dense()
        values = gathered(self.values)
        if self.layout == "mod":
            parts = (self.num_shards, self.rows_per_shard, *values.shape[1:])
            values = jnp.swapaxes(values.reshape(parts), 0, 1).reshape(values.shape)
        return values[: self.height]

    def map(self, f: Callable[[Any], Any]) -> "ShardedTable":
        """The same layout with `f(values)`; `f` must keep the first axis."""
        return dataclasses.replace(self, values=f(self.values))


def shard_rows(
    table: Any,
    mesh: Mesh | AbstractMesh,
    axis: str | Sequence[str],
    *,
    layout: str = "mod",
    height: int | None = None,
) -> ShardedTable:
    """Spreads the rows of a table over the devices along a mesh axis.

    Each of the N devices along the axis gets `ceil(V / N)` rows. Over the
    mesh's other axes the parts are repeated. `sparsejax.parallel.lookup` and
    `embedding_bag` read it; the training step around them stays that of one
    device.

    Args:
      table: `[V, ...]`, a JAX or NumPy array (a `np.memmap` too): each device's
        part is cut on the host, so that no device ever holds V rows. Inside
        `jit`, a traced array. A `jax.ShapeDtypeStruct` gives the table's
        abstract form. Or a function `f(ids) -> rows [len(ids), ...]` of NumPy
        ids, called for each part that has rows, for tables larger than any one
        memory.
      mesh: as `jax.make_mesh` gives, its axes Auto or Explicit.
      axis: name of a mesh axis, or a tuple of names.
      layout: `"mod"` deals ids out in turn, so that frequent ids that are
        neighbours do not meet on one device; `"block"` keeps neighbours
        together.
      height: int, V, for a table given as a function.

    Returns:
      `ShardedTable` of shape `[V, ...]`.

    Raises:
      TypeError: `mesh` or `table` is of another kind.
      ValueError: no such axis or layout, a scalar, `height` missing, rows of
        another shape from `f`, or known rows over an AbstractMesh.

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
      TorchRec, row-wise sharding; PaddlePaddle, distributed lookup table (ids
      by remainder over parameter servers).
    """
    axis = check_axis(_CALL, mesh, axis)
    if layout not in LAYOUTS:
        raise ValueError(
            f"{_CALL}: layout must be 'mod' or 'block', got {layout!r}. 'mod' spreads "
            "neighbouring ids over all devices, 'block' keeps them together."
        )
    make = lambda values, height: ShardedTable(values, height, mesh, axis, layout)
    if callable(table):
        hint = " A table given as a function of ids needs height=, its number of rows."
        whole = _arguments.static_int(_CALL, "height", height, hint=hint)
        values = _table_parts.from_function(_CALL, table, make(None, whole))
        return make(values, whole)
    table = _arguments.as_array(table) if hasattr(table, "__jax_array__") else table
    if not (hasattr(table, "shape") and hasattr(table, "dtype")):
        raise TypeError(
            f"{_CALL}: table must be a JAX or NumPy array, a ShapeDtypeStruct or a "
            f"function of ids, got {_arguments.kind_of(table)}."
        )
    _table_parts.check_numbers(_CALL, table.dtype)
    shape = tuple(table.shape)
    if not shape:
        raise ValueError(
            f"{_CALL}: table must have at least one axis, got shape {shape}. The first "
            "axis is the rows."
        )
    if height is not None:
        raise ValueError(
            f"{_CALL}: height={height!r} is for a table given as a function of ids; "
            f"this one has shape {shape}. Leave it out."
        )
    empty = make(None, shape[0])
    if isinstance(table, jax.ShapeDtypeStruct):
        stored = (empty.num_shards * empty.rows_per_shard, *shape[1:])
        abstract = make(jax.ShapeDtypeStruct(stored, table.dtype), shape[0])
        return abstract.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=abstract.sharding)
        )
    if not _arguments.is_concrete(table):
        return make(_inside_jit(table, empty), shape[0])
    host = table if isinstance(table, np.ndarray) else np.asarray(table)
    take = lambda ids: host[ids]
    return make(_table_parts.from_function(_CALL, take, empty), shape[0])


# ------------------------------------------------------------------ making


def _inside_jit(table: jax.Array, empty: ShardedTable) -> jax.Array:
    """`values` of a traced array: the same order, by arithmetic on whole axes."""
    shards, per_shard = empty.num_shards, empty.rows_per_shard
    table = gathered(table)
    beyond = shards * per_shard - empty.height
    table = jnp.pad(table, [(0, beyond), *((0, 0) for _ in table.shape[1:])])
    if empty.layout == "mod":
        parts = table.reshape(per_shard, shards, *table.shape[1:])
        table = jnp.swapaxes(parts, 0, 1).reshape(table.shape)
    return laid_out(table, empty.mesh, empty.axis)


# ------------------------------------------------------------------ shared


def rows_per_shard(height: int, shards: int) -> int:
    """`ceil(height / shards)`, at least 1, so that no part is an empty array."""
    return max(1, -(-height // shards))


def check_axis(call: str, mesh: Any, axis: Any) -> str | tuple[str, ...]:
    """The axis as a name or a tuple of two names or more, or an error naming `call`."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"{call}: mesh must be a jax.sharding.Mesh, as jax.make_mesh gives, got "
            f"{_arguments.kind_of(mesh)}."
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
                f"{call}: the mesh axis {name!r} is Manual here, inside of a shard_map "
                "over it, where arrays are already cut. Call it outside of the "
                "shard_map."
            )
    return names[0] if len(names) == 1 else tuple(names)


def laid_out(x: jax.Array, mesh: Any, *parts: Any) -> jax.Array:
    """`x` sharded as `PartitionSpec(*parts)`, whichever type the mesh's axes have."""
    rest = (None,) * (x.ndim - len(parts))
    sharding = NamedSharding(mesh, PartitionSpec(*parts, *rest))
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def gathered(x: jax.Array) -> jax.Array:
    """What is sharded over explicit mesh axes, on every device."""
    if not _compat.explicit_spec(x):
        return x
    return jax.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec()))


@state_sharding.rows_sharding.register
def _layout_of(table: ShardedTable) -> NamedSharding | None:
    """Of a traced table its own, whose array does not know it yet."""
    if not isinstance(table.values, Tracer):
        return state_sharding.rows_sharding(table.values)
    # An optimizer also tries tables of other heights, which nothing is said of.
    stored = table.num_shards * table.rows_per_shard
    return table.sharding if table.values.shape[:1] == (stored,) else None
