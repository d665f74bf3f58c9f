"""`store["items"]`: a table of a store in a tree of parameters, and how it is read.

A `StoredTable` is a static node of a tree: it has no leaves, so optax, equinox and
`jax.jit` pass it on. `CachedRows`, the table of a `CachedTable`, is a node whose leaf
is the array of slots. While a function is traced, a *view* takes its place: the result
of the primitive `stored_table`, an abstract array of the whole table's shape. Programs
with a view are never run. They are walked, twice:

- To find the ids. The view records the ids of every read, differentiated or not, and
  the rows read are deltas. So an id that depends on a delta depends on rows.
- To run the step, on the rows that were pulled, `values[i] = table[rows[i]]` with
  ascending `rows`. The view translates each id to its slot i, by binary search, and
  reads `values`. In a cache, row `rows[i]` is in `values[slots[i]]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike, PyTree
from sparsejax._rows import SelectedRows, indexing, is_selected_rows, merge
from sparsejax.transform.interpreter import RuleContext, Site, register_rule
from sparsejax.transform.plan import DensifyError
from sparsejax.transform.rules.bag_sum import bag_sum_rule
from sparsejax.transform.table import RowReader, TableRef


# The rows of a table in a step, ascending, and their values; for a table of a device
# cache, their cache slots.
Pulled = tuple[Any, Any]


class _TreeTable:
    """A table in a tree of parameters, instead of an array."""

    engine: Any  # the store's; its types are not for users
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    # NumPy must leave `array + table` to us instead of looping over objects.
    __array_ufunc__ = None

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"Table {self.name!r} of a store was used where an array is needed. Call "
            "the function that reads it by store.value_and_grad(fun), "
            "store.forward(fun) or store.train_step(fun, tx), and pass the table in "
            "its arguments: fun must not close over it. Or read rows with "
            f"store.pull({self.name!r}, ids)."
        )

    def __jax_array__(self) -> NoReturn:
        self.__array__()

    def __getitem__(self, ids: object) -> NoReturn:
        self.__array__()

    # Without this, Python would iterate by `self[0], self[1], ...`.
    __iter__ = None

    @property
    def ndim(self) -> int:
        """Rank of the table."""
        return len(self.shape)

    def no_rows(self) -> jax.Array:
        """Returns the row of one empty slot."""
        height = self.shape[0]
        return jnp.full((1,), height, _arguments.index_dtype(height))


@jax.tree_util.register_static
class StoredTable(_TreeTable):
    """A table of a `KVStore` in a tree of parameters, from `store["name"]`.

    It takes the place of the table's array in a dict, a dataclass, or a model of flax
    or equinox. The methods `value_and_grad`, `forward` and `train_step` of the store
    pull the rows that a function reads. Inside the function it is an array of the
    table's shape and dtype, which may be read by rows in any way:

      params["items"][ids],  jnp.take(params["items"], ids, axis=0)

    In a tree it is a node without leaves. `tx.init(params)`, `jax.tree.map`,
    `equinox.partition` and checkpoints of `params` pass it over; its rows and their
    optimizer state are in the store.

    Args:
      engine: of the store.
      name: of the table.
      shape, dtype: of the table.

    Example:
      >>> import optax, sparsejax as sj
      >>> store = sj.store.KVStore()
      >>> store.init("items", (1000, 8), optax.sgd(0.1))
      >>> store["items"]
      StoredTable('items', float32[1000,8])

    References:
      MXNet, `Parameter` with `stype="row_sparse"`.
    """

    def __init__(
        self, engine: Any, name: str, shape: tuple[int, ...], dtype: DTypeLike
    ):
        self.engine: Any = engine
        self.name: str = name
        self.shape: tuple[int, ...] = shape
        self.dtype: np.dtype = np.dtype(dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredTable) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[type, int, str]:
        return type(self), id(self.engine), self.name

    def __repr__(self) -> str:
        return f"StoredTable({self.name!r}, {_arguments.show_spec(self)})"

    # A copy of a model reads the same table.
    def __copy__(self) -> StoredTable:
        return self

    def __deepcopy__(self, memo: Any) -> StoredTable:
        return self

    # -- in a step --------------------------------------------------------------------

    def not_read(self) -> Pulled:
        """Returns the rows of a step that does not read the table: one empty slot."""
        return self.no_rows(), jnp.zeros((1, *self.shape[1:]), self.dtype)

    def values(self, pulled: Pulled) -> Any:
        """Returns the array to differentiate: the pulled rows of this table."""
        return pulled[1]

    def view(self, values: PyTree, pulled: Pulled) -> Any:
        """Returns the view that the function gets instead of the table."""
        return view_of_rows(self, values, pulled[0])

    def gradient(self, grad: PyTree, pulled: Pulled) -> Any:
        """Returns the gradient of the rows, from the gradient of `values`."""
        wide = indexing.accumulator_dtype(grad.dtype)
        zeros = jnp.zeros(pulled[1].shape, wide)
        sums = indexing.add_rows(zeros, grad.safe_rows(), grad.values.astype(wide))
        return SelectedRows(pulled[0], sums.astype(grad.dtype), self.shape[0])

    def without_array(self) -> StoredTable:
        """Returns the table for an argument whose values are passed apart."""
        return self


@jax.tree_util.register_static
class ListedTable(StoredTable):
    """A table whose rows a block lists; `fun` sees them as a SelectedRows.

    The blocks of `sparsejax.nn` list the ids that they read, as in MXNet Gluon: a
    forward pass without its pull is an error. So their ids are not traced, and they may
    read the rows in any way, also by `.rows` and `.values`.

    Args:
      engine, name, shape, dtype: as of `StoredTable`.
    """

    def values(self, pulled: Pulled) -> Any:
        """Implements `StoredTable.values`."""
        return SelectedRows(pulled[0], pulled[1], self.shape[0])

    def view(self, values: PyTree, pulled: Pulled) -> Any:
        """Implements `StoredTable.view`."""
        return values

    def gradient(self, grad: PyTree, pulled: Pulled) -> Any:
        """Implements `StoredTable.gradient`."""
        return grad


@jax.tree_util.register_pytree_with_keys_class
class CachedRows(_TreeTable):
    """The table of a `CachedTable` in a tree of parameters, from `cache.table`.

    It takes the place of the table's array, as `StoredTable` does. Its leaf is the
    array of slots, so `tx.init(params)` makes its optimizer state, and the step trains
    it on the device. `KVStore.train_step` puts the rows of each batch into slots.

    Args:
      array: `[slots, ...]`; a SelectedRows of that height in a gradient.
      cache: the cache.
      stored: the table in the store.

    Example:
      >>> import optax, sparsejax as sj
      >>> store = sj.store.KVStore()
      >>> store.init("items", (1000, 8), optax.sgd(0.1))
      >>> cache = sj.store.CachedTable(store, "items", slots=4)
      >>> cache.table.shape, cache.table.array.shape
      ((1000, 8), (4, 8))

    References:
      FBGEMM, `EmbeddingLocation.MANAGED_CACHING`.
    """

    array: ArrayLike
    cache: Any  # its `Staging`, whose types are not for users
    stored: StoredTable

    def __init__(self, array: ArrayLike, cache: object, stored: StoredTable):
        self.array, self.cache, self.stored = array, cache, stored
        self.engine: Any = stored.engine
        self.name: str = stored.name
        self.shape: tuple[int, ...] = stored.shape
        self.dtype: np.dtype = stored.dtype

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the child with its key, and the static fields."""
        key = jax.tree_util.GetAttrKey("array")
        return ((key, self.array),), (self.cache, self.stored)

    @classmethod
    def tree_unflatten(
        cls, static: tuple[Any, StoredTable], children: Sequence[ArrayLike]
    ) -> CachedRows:
        """Rebuilds without checks, since JAX may pass any object as the child."""
        (array,) = children
        return cls(array, *static)

    def __repr__(self) -> str:
        return f"CachedRows({self.name!r}, {_arguments.show_spec(self)})"

    # -- in a step --------------------------------------------------------------------

    def not_read(self) -> Pulled:
        """Implements `StoredTable.not_read`."""
        return self.no_rows(), self.no_rows()

    def values(self, pulled: Pulled) -> Any:
        """Implements `StoredTable.values`: the array of slots."""
        return self.array

    def view(self, values: PyTree, pulled: Pulled) -> Any:
        """Implements `StoredTable.view`."""
        return view_of_rows(self, values, *pulled)

    def gradient(self, grad: PyTree, pulled: Pulled) -> Any:
        """Implements `StoredTable.gradient`, of the array of slots."""
        return CachedRows(grad, self.cache, self.stored)

    def without_array(self) -> StoredTable:
        """Implements `StoredTable.without_array`."""
        return self.stored


def is_table(x: Any) -> bool:
    """Returns True if `x` is a table of a store, also one that is cached."""
    return isinstance(x, _TreeTable)


def tables_of(tree: Any) -> list[Any]:
    """Returns a tree's tables in order; each occurs as often as in the tree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_table) if is_table(x)]


def caches_of(tree: Any) -> dict[str, Any]:
    """Returns the device caches of the tables in a tree, by name."""
    tables = tables_of(tree)
    return {t.name: t.cache for t in tables if isinstance(t, CachedRows)}


def put_tables(tree: Any, values: Sequence[Any]) -> Any:
    """Replaces the tree's tables by `values`, in the order of `tables_of`."""
    is_leaf = lambda x: is_table(x) or is_selected_rows(x)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    remaining = iter(values)
    return structure.unflatten(next(remaining) if is_table(x) else x for x in leaves)


# ------------------------------------------------------------------ views


class _Static(NamedTuple):
    """The static argument of a view.

    Args:
      name, height: of the table.
      number: of the table, in a walk that records ids; None in one that reads rows.
    """

    name: str
    height: int
    number: int | None


def _refuse_to_run(*, static: _Static) -> NoReturn:
    """Raises the error of a program with a view that is run without a walk."""
    raise TypeError(
        f"Table {static.name!r} of a store is used where its reads of rows cannot be "
        "found: in a function with a derivative of its own, in a while loop, in a "
        "jax.grad inside of the function, or for each of several tables under vmap. "
        "Read its rows outside of that."
    )


stored_table_p = _compat.view_primitive(
    "stored_table", lambda shape, *, static: (static.height, *shape[1:]), _refuse_to_run
)


def view_to_record(table: _TreeTable, number: int) -> jax.Array:
    """Makes a view of a table that records ids, for a walk with the table's number."""
    values = jnp.zeros((1, *table.shape[1:]), table.dtype)
    rows = jnp.zeros((1,), _arguments.index_dtype(table.shape[0]))
    static = _Static(table.name, table.shape[0], number)
    return stored_table_p.bind(values, rows, static=static)


def view_of_rows(
    table: _TreeTable,
    values: jax.Array,
    rows: jax.Array,
    slots: jax.Array | None = None,
) -> jax.Array:
    """Makes a view of a table that reads pulled rows, or the slots of a cache.

    Args:
      table: the table.
      values: `[C, ...]`.
      rows: `[n]`, ascending; the height of the table for an empty slot.
      slots: `[n]`, the row of `values` that has each of `rows`; None if these are in
        order.
    """
    static = _Static(table.name, table.shape[0], None)
    more = () if slots is None else (slots,)
    return stored_table_p.bind(values, rows, *more, static=static)


@register_rule(stored_table_p, of_arrays=True)
def _view_rule(
    ctx: RuleContext, values: Any, rows: Any, *slots: Any, static: _Static
) -> Any:
    view = values
    if not isinstance(view, TableRef):
        view = TableRef.of_array(jnp.asarray(values))
    elif view.steps or view.row_axes != (0,) or not view.has_all_rows:
        return NotImplemented  # a view of a part of the rows
    shape = tuple(ctx.eqn.outvars[0].aval.shape)
    if static.number is None:
        reader: Any = _RowsReader(static, rows, *slots)
        return dataclasses.replace(view, shape=shape, reader=reader)
    reader = _IdsReader(static)
    return dataclasses.replace(view, index=static.number, shape=shape, reader=reader)


@dataclasses.dataclass(frozen=True, eq=False)
class _Reader(RowReader):
    """The base of both readers."""

    static: _Static

    def refuse(self, ref: TableRef, use: str) -> NoReturn:
        """Implements `RowReader.refuse`."""
        name, height = self.static.name, self.static.height
        raise DensifyError(
            f"{use}, and so needs all {height} rows of table {name!r}, which are in "
            "host memory or a file. Read rows there: table[ids], jnp.take(table, ids, "
            "axis=0), sparsejax.lookup or sparsejax.embedding_bag. If the function "
            "needs the whole table, keep it on the device: "
            f"jnp.asarray(store.pull_all({name!r}))."
        )

    def _in_table(self, ids: jax.Array, counts: jax.Array, nearest: bool) -> jax.Array:
        """Returns the ids of the rows that a read returns; the height for no row."""
        height = _arguments.scalar(self.static.height, ids)
        if nearest:
            last = _arguments.scalar(self.static.height - 1, ids)
            return jnp.clip(ids, _arguments.scalar(0, ids), last)
        return jnp.where(counts, ids, height)


@dataclasses.dataclass(frozen=True, eq=False)
class _IdsReader(_Reader):
    """Records the ids of each read. The rows read are its delta."""

    def read(
        self, ctx: Any, ref: TableRef, ids: jax.Array, counts: jax.Array, nearest: bool
    ) -> jax.Array:
        """Implements `RowReader.read`."""
        row = ref.array.shape[1:]
        if not ids.size:
            return jnp.zeros((*ids.shape, *row), ref.array.dtype)
        site = Site(ref.index, (ids.size,), ctx.where)
        if not ctx.reads.planting:
            ctx.reads.add([site], [])
            return jnp.zeros((*ids.shape, *row), ref.array.dtype)
        (delta,) = ctx.reads.take(1)
        ctx.reads.add([site], [self._in_table(ids, counts, nearest).reshape(-1)])
        return delta.reshape(*ids.shape, *row)

    def bag_sum(
        self, ctx: Any, ref: TableRef, ids: jax.Array, rest: Sequence[Any], spec: Any
    ) -> jax.Array:
        """Implements `RowReader.bag_sum`."""
        rows = indexing.merge_axes(ctx.read(ref, ids, drop=False), ids.ndim)
        places = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
        return bag_sum_rule(ctx, TableRef.of_array(rows), places, *rest, spec=spec)


@dataclasses.dataclass(frozen=True, eq=False)
class _RowsReader(_Reader):
    """Reads `values` at the slots of ids, which are searched in ascending `rows`."""

    rows: jax.Array
    slots: jax.Array | None = None

    def read(
        self, ctx: Any, ref: TableRef, ids: jax.Array, counts: jax.Array, nearest: bool
    ) -> jax.Array:
        """Implements `RowReader.read`."""
        small = TableRef.of(ref.index, ref.array)
        small = dataclasses.replace(small, stopped=ref.stopped)
        slots, _ = self._slots(self._in_table(ids, counts, nearest), ref)
        # A row that was not pulled reads NaN. That happens only if the step computes
        # other ids than the program that found them.
        fill = indexing.fill_value(ref.array.dtype).tobytes()
        return ctx.read(small, slots, counts, drop=False, fill=fill)

    def bag_sum(
        self, ctx: Any, ref: TableRef, ids: jax.Array, rest: Sequence[Any], spec: Any
    ) -> jax.Array:
        """Implements `RowReader.bag_sum`."""
        small = dataclasses.replace(ref, shape=ref.array.shape, reader=None)
        if ref.steps:
            shape = (ref.array.shape[0], *ref.shape[1:])
            small = dataclasses.replace(small, shape=shape)
        slots, stored = self._slots(ids, ref)
        absent = jnp.any(indexing.in_range(ids, self.static.height) & ~stored)
        sums = bag_sum_rule(ctx, small, slots, *rest, spec=spec)
        return jnp.where(absent, indexing.fill_value(sums.dtype), sums)

    def _slots(self, ids: jax.Array, ref: TableRef) -> tuple[jax.Array, jax.Array]:
        """Returns each id's slot, C without one, and a mask of ids that have one."""
        slots, stored = merge.find_slots(self.rows, ids, self.static.height)
        if self.slots is not None:
            slots = self.slots[slots]
        return jnp.where(stored, slots, np.int32(ref.array.shape[0])), stored
