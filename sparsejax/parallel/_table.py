"""ShardedTable: a table whose rows are sharded over the devices of a mesh.

With N devices along the axis, each owns R rows, about V / N. One array holds the
rows of all owners in turn, `N * R` rows sharded over the axis. Rows without an id are
padding: zero, and hidden from the user. The place of an id in this array is its
*position*, and its owner is `position // R`. `_layout` has the formulas.

Frequent ids are often neighbours (in a vocabulary sorted by frequency), and the layout
"mod" distributes neighbours over all owners.

Code that needs an array (`jnp.take`, a layer of flax) gets an abstract stand-in, the
result of the primitive `sharded_table`. Only programs that we trace to walk contain it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike, TableLike
from sparsejax._mesh import explicit_spec, replicate, reshard
from sparsejax._rows import RowTable, SelectedRows, indexing, read_row_table
from sparsejax.optim._lazy import state_sharding
from sparsejax.parallel._layout import LAYOUTS, Block, Layout
from sparsejax.transform.forward import run_forward
from sparsejax.transform.trace import makes_views


_NUMBERS = (int, float, complex)


def _refuse_to_run(*, static: tuple[Any, ...]) -> NoReturn:
    """Raises the error of a program with a stand-in that is run without a walk."""
    raise TypeError(
        f"sparsejax: a program uses a ShardedTable of {static[0]} rows as an "
        "array, but its reads of rows cannot be found: in a function with a derivative "
        "of its own, in a while loop, in a jax.grad inside of the loss, or for each of "
        "several tables under vmap. Read rows there with sparsejax.lookup(table, ids)."
    )


# The stand-in for a table in programs that we trace to walk. Its rule: `_read.py`.
sharded_table_p = _compat.view_primitive(
    "sharded_table",
    lambda shape, *, static: (static[0], *shape[1:]),
    _refuse_to_run,
)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardedTable(RowTable):
    """A `[height, ...]` table whose rows are sharded over the devices of a mesh.

    A pytree with one child, so `tx.init`, `jax.jit` with donation, checkpoints and
    `optax.apply_updates` work on it leaf by leaf. `shard_rows` makes one. A model reads
    it as it reads an array: by `table[ids]`, `sparsejax.lookup`, `embedding_bag`, `dot`
    and the layers of `sparsejax.nn` anywhere, by `jnp.take` and the embedding layers of
    flax and equinox inside of `sparsejax.value_and_grad` and
    `sparsejax.parallel.forward`. Its gradient under `sparsejax.value_and_grad` is a
    ShardedTable with ShardedRows as its child.

    Sum the gradients of several batches as `g1 + g2`, and scale them as `g / 2`.
    `jax.tree.map(jnp.add, g1, g2)` would add row numbers too, so it raises.

    Args:
      values: array `[N * R, ...]` sharded over `axis`, in order of position; a
        ShardedRows in gradients and updates.
      height: int, the number of rows of the table.
      mesh: the mesh.
      axis: the mesh axis that the rows are sharded over, or a tuple of axes.
      layout: which device owns which rows.
      capacity: int, the number of rows that a device requests from one owner in one
        round of `all_to_all`; None for 25% more than an even share if all ids are
        distinct. It affects only speed: rows that do not fit into a round go into the
        next one. `dataclasses.replace(table, capacity=...)` changes it.
      wire_dtype: the dtype in which rows and their gradients are sent, bfloat16, or
        None for their own. `dataclasses.replace(table, wire_dtype=...)` changes it.

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
    layout: Layout
    capacity: int | None = None
    wire_dtype: DTypeLike | None = None

    # NumPy and JAX must leave `array + table` to us instead of looping over objects.
    __array_ufunc__ = None

    # -- pytree ------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the child with its key, and the static fields."""
        return ((jax.tree_util.GetAttrKey("values"), self.values),), self._static

    @property
    def _static(self) -> tuple[Any, ...]:
        fields = self.height, self.mesh, self.axis, self.layout, self.capacity
        return (*fields, self.wire_dtype)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Self:
        """Rebuilds without checks, since JAX may pass any object as the child."""
        return cls(*children, *static)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A ShardedTable cannot be pickled, because its mesh names devices of this "
            "process. Save it with sparsejax.parallel.save, or pickle table.to_dense()."
        )

    def __copy__(self) -> Self:
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: Any) -> Self:
        return jax.tree.map(lambda x: copy.deepcopy(x, memo), self)

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
        return names_of(self.axis)

    @property
    def num_shards(self) -> int:
        """N, the number of parts that the rows are divided into."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    @property
    def rows_per_shard(self) -> int:
        """R, the number of rows of each part, padding included."""
        return self.layout.per_shard(self.height, self.num_shards)

    @property
    def sharding(self) -> NamedSharding:
        """How `values` are sharded."""
        unsharded = ()
        if AxisType.Explicit in self.mesh.axis_types and self.values is not None:
            # Spelled as in JAX's types, so that a jitted step is not recompiled.
            unsharded = (None,) * (self.ndim - 1)
        return NamedSharding(self.mesh, PartitionSpec(self.axis, *unsharded))

    def __repr__(self) -> str:
        if hasattr(self.values, "dtype") and hasattr(self.values, "shape"):
            shown = f"{self.values.dtype}{list(self.shape)}"
        else:
            shown = repr(self.values)  # in a tree of shardings or names, for example
        sent = "" if self.wire_dtype is None else f", wire_dtype={self.wire_dtype}"
        return (
            f"ShardedTable({shown}, {self.num_shards} x {self.rows_per_shard} rows "
            f"over {self.axis!r}, layout={self.layout!r}{sent})"
        )

    # -- read as an array --------------------------------------------------------

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"sparsejax: a ShardedTable of shape {self.shape} was used where "
            f"an array is needed. Its rows lie on {self.num_shards} devices: read them "
            "with table[ids], sparsejax.lookup or sparsejax.embedding_bag. jnp.take "
            "and layers of flax read them inside of sparsejax.value_and_grad and of "
            "sparsejax.parallel.forward(fun). Or call .to_dense() for the whole table."
        )

    def __jax_array__(self) -> jax.Array:
        """Returns the stand-in, in the trace of a program to walk."""
        if not makes_views.value or not hasattr(self.values, "dtype"):
            self.__array__()
        return sharded_table_p.bind(jnp.asarray(self.values), static=self._static)

    def __getitem__(self, ids: Any) -> Any:
        """Reads rows by id, as from an array; `table[...]` is the table."""
        if ids is Ellipsis:
            return self
        if isinstance(self.values, SelectedRows):
            self.__array__()
        is_array = _arguments.is_array(ids)
        if is_array and AxisType.Explicit in self.mesh.axis_types:
            # JAX's gather cannot derive the sharding of rows read at sharded ids.
            ids = _arguments.as_indices(ids, self.height, "Use .to_dense().")
            return read_row_table(self, ids, None, "clip")
        read = lambda table, ids: jnp.asarray(table)[ids]
        return read(self, ids) if makes_views.value else run_forward(read, self, ids)

    # Without these, Python would iterate by `self[0], self[1], ...`, without an end.
    __iter__ = None
    __contains__ = None

    # -- ids and positions -------------------------------------------------------

    def position(self, ids: ArrayLike) -> jax.Array:
        """Returns the positions of the rows of `ids`; `N * R` for ids out of range.

        Args:
          ids: integers of any shape.

        Returns:
          int32 (or int64) of the same shape.
        """
        length = self.num_shards * self.rows_per_shard
        ids = _arguments.as_ids(ids, self.height)
        named = indexing.in_range(ids, self.height)
        ids = ids.astype(_arguments.index_dtype(length, ids.dtype))
        positions = self._by_layout(self.layout.position, ids)
        return jnp.where(named, positions, _arguments.scalar(length, ids))

    def ids_at(self, position: ArrayLike) -> jax.Array:
        """Inverts `position`; `height` for padding and out of range."""
        length = self.num_shards * self.rows_per_shard
        position = _arguments.as_ids(position, length)
        named = indexing.in_range(position, length)
        ids = self._by_layout(self.layout.ids_at, position)
        named &= ids < _arguments.scalar(self.height, ids)
        return jnp.where(named, ids, _arguments.scalar(self.height, ids))

    def _by_layout(self, function: Callable, x: jax.Array) -> jax.Array:
        """Applies `position` or `ids_at` of the layout."""
        # Over Explicit axes JAX cannot gather by sharded indices.
        spec = () if self.layout.is_arithmetic else explicit_spec(x)
        x = replicate(x) if spec else x
        return reshard(function(x, self.height, self.num_shards), spec, self.mesh)

    # -- the whole table ---------------------------------------------------------

    def to_dense(self) -> jax.Array:
        """Returns the whole table by ids, `[height, ...]`; for tests and export.

        Gradients and updates, which have a SelectedRows as child, can be converted too.
        """
        if isinstance(self.values, SelectedRows):
            ids = self.ids_at(replicate(self.values.rows))
            values = replicate(self.values.values)
            return SelectedRows(ids, values, self.height).to_dense()
        values = replicate(self.values)
        values = self.layout.in_order(values, self.height, self.num_shards)
        return values[: self.height]

    def map(self, f: Callable[[Any], Any]) -> ShardedTable:
        """Returns the same layout with `f(values)`; `f` must keep the first axis."""
        return dataclasses.replace(self, values=f(self.values))

    # -- sums and scalings -------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        if isinstance(other, _NUMBERS) and other == 0:
            return self  # so that Python's sum() works
        return self._apply(operator.add, "+", other)

    __radd__ = __add__

    def __neg__(self) -> Any:
        return self.map(operator.neg)

    def __sub__(self, other: Any) -> Any:
        return self._apply(operator.sub, "-", other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        return self._apply(operator.mul, "*", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._apply(operator.truediv, "/", other)

    def _apply(self, op: Any, symbol: str, other: Any) -> Any:
        """Applies `op` to the values of two tables, or to one's values and a number."""
        # Not "/": rows of padding are zero.
        if isinstance(other, ShardedTable) and symbol != "/":
            shapes = [np.shape(table.values) for table in (self, other)]
            if self._static != other._static or shapes[0] != shapes[1]:
                raise ValueError(
                    f"ShardedTable {symbol} ShardedTable: {self} and {other} differ in "
                    "shape, mesh or layout. Both must be tables, or both gradients, "
                    "with the same shape, layout and mesh."
                )
            return self.map(lambda values: op(values, other.values))
        if not isinstance(other, (*_NUMBERS, np.generic, np.ndarray, jax.Array)):
            return NotImplemented
        if np.ndim(other):
            raise TypeError(
                f"ShardedTable {symbol} array of shape {np.shape(other)}: the array "
                "must be a scalar. Use table.map(lambda v: ...) on the values in order "
                "of position, or .to_dense()."
            )
        if symbol in "+-":
            # Padding rows, and rows that a gradient does not store, must stay zero.
            self.__array__()

        def scale(values):
            """Scales the rows; the data's dtype wins, as in SelectedRows."""
            if isinstance(values, SelectedRows) or isinstance(other, _NUMBERS):
                return op(values, other)
            wide = indexing.promote(values.dtype, other.dtype)
            narrow = values.dtype if jnp.issubdtype(values.dtype, jnp.inexact) else wide
            scaled = op(values.astype(wide), jnp.asarray(other).astype(wide))
            return scaled.astype(narrow)

        return self.map(scale)


def shard_rows(
    table: TableLike,
    mesh: Mesh | AbstractMesh,
    axis: str | Sequence[str],
    *,
    layout: str | Layout = "mod",
    height: int | None = None,
    capacity: int | None = None,
    wire_dtype: DTypeLike | None = None,
) -> ShardedTable:
    """Shards the rows of a table over the devices along a mesh axis.

    Each of the N devices along the axis gets `ceil(V / N)` rows. Over the mesh's other
    axes the parts are replicated. `sparsejax.lookup`, `embedding_bag` and `table[ids]`
    read the result: each device takes its part of the ids, drops duplicates and
    requests the rows from their owners by `all_to_all`. The training step is the same
    as on one device, and `sparsejax.optim.lazy` sends gradients to the owners.

    With N owners, C = capacity and rows of B bytes, each device sends
    `(N - 1) * C * (4 + B)` bytes per round, and the same again for the gradient. No id
    is lost, however skewed the ids are: there are as many rounds as needed.
    `exchange_metrics` counts them.

    With `wire_dtype=jnp.bfloat16`, B is 2 bytes a number. A row is rounded to the
    nearest bfloat16 when it is read. Each device sums its gradients of a row in float32
    and rounds the sum, and the owner adds the rounded sums in float32. A number is
    rounded by at most 1/256 of itself, each time that it is sent. Weights and optimizer
    state keep their own dtype.

    Args:
      table: `[V, ...]`, a JAX or NumPy array (or `np.memmap`): each device's part is
        cut on the host, so no device ever holds V rows. Inside `jit`, a traced array. A
        `jax.ShapeDtypeStruct` gives the table's abstract form. Or, for tables larger
        than the memory of a host, a function `f(ids) -> rows [len(ids), ...]` of NumPy
        ids, called with one id for the shape and dtype, and for the rows of each part.
      mesh: as returned by `jax.make_mesh`, with Auto or Explicit axes.
      axis: name of a mesh axis, or a tuple of names.
      layout: `"mod"` distributes neighbouring ids over the devices, so frequent ids
        that are neighbours do not all go to one device; `"block"` keeps neighbours
        together; a `TableWise` is for a stack of tables on different devices.
        The `layout` of another ShardedTable is also accepted.
      height: int, V, for a table given as a function.
      capacity: int, the number of rows that a device requests from one owner per round.
        It affects only speed: a smaller value costs rounds, a larger value costs
        bandwidth. `measure_capacity` measures a sample of ids. None for 25% more than
        an even share if all ids are distinct.
      wire_dtype: `jnp.bfloat16`, the dtype in which rows and their gradients are sent,
        for a table of float32, float64 or bfloat16. None for the table's dtype, in
        which gradients of float16 and bfloat16 are sent as float32. On a single device
        nothing is sent or rounded.

    Returns:
      `ShardedTable` of shape `[V, ...]`.

    Raises:
      TypeError: `mesh`, `table`, `layout`, `capacity` or `wire_dtype` has the wrong
        type, or a table of this dtype cannot be sent in `wire_dtype`.
      ValueError: `axis` or `layout` is unknown, `table` is a scalar, `height` is
        missing or given for an array, `f` returns rows of the wrong shape, `wire_dtype`
        is not bfloat16, or the rows are concrete and the mesh abstract.

    Example:
      >>> import jax, numpy as np, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> sj.parallel.shard_rows(np.ones((1000, 8), np.float32), mesh, "x")
      ShardedTable(float32[1000, 8], 1 x 1000 rows over 'x', layout='mod')
      >>> table = sj.parallel.shard_rows(np.ones((1000, 8), np.float32), mesh, "x")
      >>> loss = lambda table, ids: sj.lookup(table, ids).sum()
      >>> sj.grad(loss)(table, np.array([3, 7])).to_dense()[3:5, 0]
      Array([1., 0.], dtype=float32)

    References:
      TorchRec, row-wise sharding, `QCommsConfig` (16 bits); PaddlePaddle, distributed
      lookup table (ids by remainder over parameter servers); Lepikhin et al., 2020,
      "GShard" (dispatch by all_to_all).
    """
    axis, wire_dtype = check_axis(mesh, axis), check_wire_dtype(wire_dtype)
    layout = LAYOUTS.get(layout, layout) if isinstance(layout, str) else layout
    if not isinstance(layout, Layout):
        raise ValueError(
            "sparsejax.parallel.shard_rows: layout must be 'mod', 'block' or a "
            f"TableWise, got {layout!r}."
        )
    if capacity is not None:
        capacity = _arguments.static_int("capacity", capacity, 1)
    if callable(table) != (height is not None):
        raise ValueError(
            "sparsejax.parallel.shard_rows: height is the number of rows of a table "
            f"given as a function of ids, and of no other, got height={height!r} and "
            f"{_arguments.kind_of(table)}."
        )
    if height is None and not table.shape:
        raise ValueError(
            "sparsejax.parallel.shard_rows: the first axis of a table is its rows, "
            "got a scalar."
        )
    num_rows: Any = table.shape[0] if height is None else height
    layout.check(num_rows, mesh, names_of(axis))
    empty = ShardedTable(None, num_rows, mesh, axis, layout, capacity, wire_dtype)
    count, each = empty.num_shards, empty.rows_per_shard
    fits = _arguments.has_index_dtype
    if fits(num_rows) and not fits(count * each):
        raise ValueError(
            f"sparsejax.parallel.shard_rows: {count} devices with {each} rows each "
            "have more positions than 32 bits can count, for a table of "
            f"{num_rows} rows. Choose a layout that distributes the rows more evenly, "
            "or set jax_enable_x64."
        )
    made = empty.map(lambda _: _values(table, empty))
    if wire_dtype is not None and not can_send_in_16_bits(made.dtype):
        raise TypeError(
            f"sparsejax.parallel.shard_rows: a table of {made.dtype} cannot be sent in "
            "bfloat16, only float32, float64 and bfloat16. Leave wire_dtype out."
        )
    return made


# ------------------------------------------------------------------ making the values


def _values(table: Any, empty: ShardedTable) -> Any:
    """Returns the stored values of a table of any kind."""
    if isinstance(table, jax.ShapeDtypeStruct):
        return _abstract_values(table, empty)
    table = jnp.asarray(table) if hasattr(table, "__jax_array__") else table
    if isinstance(table, Tracer):
        return _values_of_traced(table, empty)
    if callable(table):
        return _values_from(table, empty)
    return _values_from(np.asanyarray(table).__getitem__, empty)


def _abstract_values(table: Any, empty: ShardedTable) -> Any:
    shape = (empty.num_shards * empty.rows_per_shard, *table.shape[1:])
    made = empty.map(lambda _: jax.ShapeDtypeStruct(shape, table.dtype))
    return jax.ShapeDtypeStruct(shape, table.dtype, sharding=made.sharding)


def _values_of_traced(table: jax.Array, empty: ShardedTable) -> jax.Array:
    """Computes `values` of a traced array by reshapes of whole axes."""
    height, shards = empty.height, empty.num_shards
    padding = shards * Block().per_shard(height, shards) - height
    widths = [(0, padding), *((0, 0) for _ in table.shape[1:])]
    rows = jnp.pad(replicate(table), widths)
    return constrain(empty.layout.stored(rows, height, shards), empty.mesh, empty.axis)


def _values_from(rows_of: Callable, empty: ShardedTable) -> jax.Array:
    """Builds `values` from a function of NumPy ids, part by part on the host.

    Each process builds only the parts of its own devices.
    """
    check_has_devices(empty.mesh)
    first = np.asarray(rows_of(np.arange(min(1, empty.height))))
    dtype = jax.dtypes.canonicalize_dtype(first.dtype)
    values = _abstract_values(jax.ShapeDtypeStruct(first.shape, dtype), empty)

    def part(index):
        positions = np.arange(*index[0].indices(values.shape[0]))
        ids = empty.layout.ids_at(positions, empty.height, empty.num_shards)
        filled = ids < empty.height
        out = np.zeros((len(ids), *values.shape[1:]), dtype)
        if filled.any():
            rows = np.asarray(rows_of(ids[filled]))
            expected = int(filled.sum()), *values.shape[1:]
            if rows.shape != expected:  # NumPy would broadcast a row that is too short
                raise ValueError(
                    "sparsejax.parallel.shard_rows: the function must return one row "
                    f"per id, {expected} for {expected[0]} ids, got shape {rows.shape}."
                )
            out[filled] = rows
        return out

    return jax.make_array_from_callback(
        values.shape, values.sharding, part, dtype=dtype
    )


# ------------------------------------------------------------------ wire_dtype


def check_wire_dtype(wire_dtype: Any) -> np.dtype | None:
    """Returns `wire_dtype` as a dtype, or None; raises unless it is bfloat16."""
    if wire_dtype is not None and jnp.dtype(wire_dtype) != jnp.bfloat16:
        raise ValueError(
            f"sparsejax.parallel: wire_dtype must be jax.numpy.bfloat16 or None, got "
            f"{jnp.dtype(wire_dtype)}. A float16 overflows above 65,504, and loses "
            "gradients below 6e-8."
        )
    return None if wire_dtype is None else jnp.dtype(wire_dtype)


def can_send_in_16_bits(dtype: Any) -> bool:
    """Returns True if bfloat16 has the range of `dtype`."""
    return dtype in (jnp.float32, jnp.float64, jnp.bfloat16)


# ------------------------------------------------------------------ for other layouts


def check_has_devices(mesh: Any) -> None:
    """Raises a ValueError for a mesh without devices."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            "sparsejax.parallel: a concrete table needs devices, but an AbstractMesh "
            "has none. Pass a jax.sharding.Mesh (jax.make_mesh), or "
            "jax.ShapeDtypeStruct(shape, dtype) for the abstract form."
        )


def names_of(axis: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the mesh axes, always as a tuple."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def check_axis(mesh: Any, axis: Any) -> str | tuple[str, ...]:
    """Returns the axis as one name or a tuple of two or more; raises if invalid."""
    names, types = names_of(axis), dict(zip(mesh.axis_names, mesh.axis_types))
    if not names or len(set(names)) != len(names) or not set(names) <= types.keys():
        raise ValueError(
            "sparsejax.parallel: axis must be the name of a mesh axis, or a tuple of "
            f"names, got {axis!r}. The axes of this mesh are {mesh.axis_names}."
        )
    if any(types[name] == AxisType.Manual for name in names):
        raise ValueError(
            f"sparsejax.parallel: the mesh axis {axis!r} is Manual here, because "
            "arrays are already sharded inside a shard_map. Call it outside of the "
            "shard_map."
        )
    return names[0] if len(names) == 1 else names


def constrain(x: jax.Array, mesh: Any, *spec: Any) -> jax.Array:
    """Shards `x` as `PartitionSpec(*spec)`, over Explicit and Auto axes alike."""
    unsharded = (None,) * (x.ndim - len(spec))
    sharding = NamedSharding(mesh, PartitionSpec(*spec, *unsharded))
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


@state_sharding.rows_sharding.register
def _sharding_of(table: ShardedTable) -> NamedSharding | None:
    """Returns a traced table's own sharding, since its array does not know it yet."""
    if not isinstance(table.values, Tracer):
        return state_sharding.rows_sharding(table.values)
    # An optimizer also probes tables of other heights, which have no sharding.
    stored = table.num_shards * table.rows_per_shard
    return table.sharding if table.values.shape[:1] == (stored,) else None
