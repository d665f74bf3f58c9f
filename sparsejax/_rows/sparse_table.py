"""A table whose type says that its cotangents are rows, and those rows.

On releases of JAX with types of one's own (hijax), `SparseTable` is a value whose type,
`TableType`, has the tangent and cotangent type `RowsType`: at most `capacity` rows of
the table, by id. JAX's own `grad` then gives rows. What is here is the types, their
values, and one primitive for each thing that is done with them:

    MakeTable: array -> table          ReadRows: table, ids -> rows as an array
    ToRows: array, ids -> Rows         GetRows: Rows, ids -> rows as an array
    AddRows: Rows, Rows -> Rows        NoRows: -> Rows
    OpenRows: Rows -> ids, values

`ToRows` is the transpose of `ReadRows` and of `GetRows`, and `GetRows` that of
`ToRows`, so derivatives of any order stay among them.

Inside programs, which includes the function that is differentiated, both are tracers of
those types, and only the primitives' `expand` sees `SparseTable` and `Rows`. Under
`vmap` a type has the axes `batch` in front; each primitive maps over them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax import _arguments, _compat
from sparsejax._rows import indexing, merge
from sparsejax._rows.selected_rows import SelectedRows, is_selected_rows


_MAKE = "sparsejax.experimental.sparse_table"
_READ = "sparsejax.experimental.sparse_table[ids]"

# What a user would do with an array, by the names under which JAX asks a type for it.
_OPERATORS = """
    add radd sub rsub mul rmul matmul rmatmul truediv rtruediv floordiv rfloordiv mod
    rmod pow rpow neg pos abs eq ne lt le gt ge float int bool complex index round iter
""".split()
_METHODS = """
    T mT at astype reshape sum mean max min std var dot transpose ravel flatten take
    copy squeeze real imag any all argmax argmin clip conj cumsum item tolist sort view
""".split()
_REFUSED = {f"_{name}": name for name in _OPERATORS} | {x: x for x in _METHODS}


# ------------------------------------------------------------------ types


@dataclasses.dataclass(frozen=True)
class _Rowed(_compat.HiType):
    """What both types have.

    Args:
      table: the shape of the table, `(height, ...)`.
      dtype: of its values.
      capacity: how many rows a cotangent has.
      batch: the axes that `vmap` adds in front.
    """

    table: tuple[int, ...]
    dtype: np.dtype
    capacity: int
    batch: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.batch, *self.table)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def mat(self) -> Any:  # `cond` asks for it, of each result of a branch
        return self.lo_ty()[-1].mat

    def dec_rank(self, size: int, spec: Any) -> Any:
        return dataclasses.replace(self, batch=self.batch[1:]) if spec == 0 else self

    def inc_rank(self, size: int, spec: Any) -> Any:
        batch = (size, *self.batch)
        return dataclasses.replace(self, batch=batch) if spec == 0 else self

    def leading_axis_spec(self) -> int:
        return 0

    def str_short(self, short_dtypes: bool = False, mesh_axis_types: bool = False):
        del short_dtypes, mesh_axis_types
        sizes = ",".join(map(str, self.shape))
        return f"{type(self).__name__}[{self.dtype.name}[{sizes}], {self.capacity}]"

    __repr__ = str_short


class TableType(_Rowed):
    """The type of a SparseTable."""

    def lo_ty(self) -> list[Any]:
        return [_compat.array_type(self.shape, self.dtype)]

    def lower_val(self, value: SparseTable) -> list[Any]:
        return [value.array]

    def raise_val(self, array: Any) -> SparseTable:
        return SparseTable(array, self.capacity, len(self.batch))

    def to_tangent_aval(self) -> RowsType:
        return RowsType(self.table, self.dtype, self.capacity, self.batch)

    def _getitem(self, table: Any, ids: Any) -> jax.Array:
        return index(table, ids)

    def _len(self, table: Any) -> int:
        return table.shape[0]

    @_compat.array_method
    def __jax_array__(self: Any) -> NoReturn:
        _refuse(self.aval, "a function of arrays")

    def __getattr__(self, name: str) -> Any:
        if name in _REFUSED:
            _refuse(self, f"its `{_REFUSED[name]}`")
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")


class RowsType(_Rowed):
    """The type of Rows."""

    def lo_ty(self) -> list[Any]:
        ids = _arguments.index_dtype(self.table[0])
        slots = (*self.batch, self.capacity)
        values = _compat.array_type((*slots, *self.table[1:]), self.dtype)
        return [_compat.array_type(slots, ids), values]

    def lower_val(self, value: Rows) -> list[Any]:
        return [value.rows, value.values]

    def raise_val(self, rows: Any, values: Any) -> Rows:
        self_ = object.__new__(Rows)
        vars(self_).update(rows=rows, values=values, height=self.table[0])
        return self_

    def to_tangent_aval(self) -> RowsType:
        return self

    def vspace_zero(self) -> Any:
        return NoRows(self)()

    def vspace_add(self, x: Any, y: Any) -> Any:
        return AddRows(self)(x, y)


# ------------------------------------------------------------------ values


class SparseTable:
    """A table whose gradient under `jax.grad` is rows: see `sparse_table`.

    Args:
      array: `[*batch, height, ...]`.
      capacity: how many distinct rows the gradient holds.
      batch_ndim: how many axes in front are those of a `vmap`.
    """

    def __init__(self, array: Any, capacity: int, batch_ndim: int = 0):
        self.array, self.capacity, self._batch_ndim = array, capacity, batch_ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def ndim(self) -> int:
        return self.array.ndim

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: Any) -> jax.Array:
        return index(self, ids)

    def __iter__(self) -> NoReturn:
        _refuse(self, "a loop over its rows")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self, "a function of NumPy")

    def __jax_array__(self) -> NoReturn:
        _refuse(self, "a function of arrays")

    def __repr__(self) -> str:
        array = _arguments.show_spec(self.array)
        return f"SparseTable({array}, capacity={self.capacity})"


class Rows(SelectedRows):
    """A SelectedRows that JAX takes as one value, and not as a tree of two leaves."""

    @property
    def shape(self) -> tuple[int, ...]:
        batch = self.rows.ndim - 1
        row = self.values.shape[batch + 1 :]
        return (*self.rows.shape[:batch], self.height, *row)


def _table_type(table: SparseTable) -> TableType:
    batch, shape = table._batch_ndim, table.shape
    return TableType(shape[batch:], table.dtype, table.capacity, shape[:batch])


def _rows_type(rows: Any) -> RowsType:
    *batch, capacity = rows.rows.shape
    table = (rows.height, *rows.values.shape[len(batch) + 1 :])
    return RowsType(table, rows.values.dtype, capacity, tuple(batch))


_compat.register_hitype(SparseTable, _table_type)
_compat.register_hitype(Rows, _rows_type)


# ------------------------------------------------------------------ functions


def make(array: jax.Array, capacity: int) -> Any:
    """`array` as a table of which a cotangent has `capacity` rows."""
    return MakeTable(jax.typeof(array), capacity)(array)


def is_sparse_table(x: Any) -> bool:
    """Whether `x` is a SparseTable, or a tracer of one."""
    return isinstance(x, SparseTable) or isinstance(_aval(x), TableType)


def take(table: Any, ids: jax.Array, *, clip: bool = False) -> jax.Array:
    """Rows of a table by id; for ids out of range zeros, with `clip` the nearest.

    These have no gradient either way, as in JAX.
    """
    kind = jax.typeof(table)
    if kind.batch:
        raise ValueError(
            f"{_READ}: the table must have no axis of a vmap, got a stack of tables of "
            f"shape {kind.shape}. Read it inside jax.vmap."
        )
    ids = ids.astype(_arguments.index_dtype(kind.table[0]))
    return ReadRows(kind, jax.typeof(ids), clip)(table, ids)


def index(table: Any, ids: Any) -> jax.Array:
    """`table[ids]`: negative ids count from the end, others are clamped, as in JAX."""
    if isinstance(ids, (tuple, slice, type(None), type(Ellipsis))):
        raise TypeError(
            f"{_READ}: ids must be integers, the rows to read, got "
            f"{_arguments.kind_of(ids)}. Index the rows that were read, as in "
            "table[ids][..., :4]."
        )
    ids = jnp.asarray(_arguments.as_integers(_READ, ids))
    height = table.shape[0]
    if height > jnp.iinfo(ids.dtype).max:
        ids = ids.astype(_arguments.index_dtype(height))
    if jnp.issubdtype(ids.dtype, jnp.signedinteger):
        ids = jnp.where(ids < 0, ids + _arguments.scalar(height, ids), ids)
    return take(table, ids, clip=True)


def opened(tree: Any) -> Any:
    """`tree` with a SelectedRows in the place of each Rows, traced or not."""

    def is_leaf(x):
        return is_selected_rows(x) or is_rows(x)

    if not any(map(is_rows, jax.tree.leaves(tree, is_leaf=is_leaf))):
        return tree
    return jax.tree.map(lambda x: _open(x) if is_rows(x) else x, tree, is_leaf=is_leaf)


def is_rows(x: Any) -> TypeGuard[Rows]:
    """Whether `x` is Rows, or a tracer of one."""
    return isinstance(x, Rows) or isinstance(_aval(x), RowsType)


def _open(x: Any) -> SelectedRows:
    kind = jax.typeof(x)
    rows, values = OpenRows(kind)(x)
    # As `vmap` gives a SelectedRows: its leaves have an axis in front.
    out = object.__new__(SelectedRows)
    vars(out).update(rows=rows, values=values, height=kind.table[0])
    return out


def _aval(x: Any) -> Any:
    return x.aval if isinstance(x, Tracer) else None


def _refuse(table: Any, what: str) -> NoReturn:
    raise TypeError(
        f"{_MAKE}: a sparse table of shape {table.shape} was used as a whole array, by "
        f"{what}. It is read by rows only: table[ids], sparsejax.lookup or "
        "sparsejax.embedding_bag. For other uses pass the array as an argument of its "
        "own."
    )


# ------------------------------------------------------------------ primitives


class _Prim(_compat.HiPrim):
    """A primitive whose parameters are what its `__init__` is given."""

    # Without it a derivative would also be asked for where nothing is differentiated.
    skip_linearization_on_zero_tangents = True

    def __init__(self, in_avals: tuple[Any, ...], out_aval: Any, **params: Any):
        self.in_avals, self.out_aval, self.params = in_avals, out_aval, params
        super().__init__()


class _Linear(_Prim):
    """A primitive that is linear in its first argument; others are ids.

    `transposed(cotangent, ids)` is the cotangent of the first.
    """

    def jvp(self, primals: Any, tangents: Any) -> Any:
        return self(*primals), self(tangents[0], *primals[1:])

    lin, linearized = _compat.linearize_from_jvp()

    def vjp_fwd(self, nonzeros: Any, x: Any, *ids: Any) -> Any:
        del nonzeros
        return self(x, *ids), ids

    def vjp_bwd(self, ids: Any, cotangent: Any, x: Any, *others: Any) -> None:
        del others
        if not _compat.is_zero(cotangent):
            x.accum(self.transposed(cotangent, *ids))

    def transpose(self, cotangent: Any, x: Any, *ids: Any) -> None:
        self.vjp_bwd(ids, cotangent, x)

    def transposed(self, cotangent: Any, *ids: Any) -> Any:
        raise NotImplementedError(type(self).__name__)


class MakeTable(_Prim):
    def __init__(self, array: Any, capacity: int, batch_ndim: int = 0):
        batch, table = array.shape[:batch_ndim], array.shape[batch_ndim:]
        out = TableType(table, array.dtype, capacity, batch)
        super().__init__((array,), out, capacity=capacity, batch_ndim=batch_ndim)

    def expand(self, array: Any) -> SparseTable:
        return self.out_aval.raise_val(array)

    def jvp(self, primals: Any, tangents: Any) -> NoReturn:
        _refuse_inside(primals[0])

    def lin(self, nonzeros: Any, array: Any) -> NoReturn:
        _refuse_inside(array)

    def vjp_fwd(self, nonzeros: Any, array: Any) -> NoReturn:
        _refuse_inside(array)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        if dims[0] is None:
            return self(*args), None
        array = jnp.moveaxis(args[0], dims[0], 0)
        kind = jax.typeof(array)
        return MakeTable(kind, self.capacity, self.batch_ndim + 1)(array), 0


def _refuse_inside(array: Any) -> NoReturn:
    raise TypeError(
        f"{_MAKE}: the table must be made outside of the function that is "
        f"differentiated, got an array of shape {array.shape} that jax.grad "
        "differentiates itself. Make it first, and differentiate with respect to it: "
        "jax.grad(loss_fn)({'items': sparse_table(params['items'], capacity)}, batch)."
    )


class ReadRows(_Prim):
    def __init__(self, table: Any, ids: Any, clip: bool):
        shape = (*ids.shape, *table.table[1:])
        out = _compat.array_type(shape, table.dtype)
        super().__init__((table, ids), out, clip=clip)

    def expand(self, table: SparseTable, ids: Any) -> Any:
        def read(array, ids):
            if self.clip:
                height = self.in_avals[0].table[0]
                last = _arguments.scalar(max(height - 1, 0), ids)
                ids = jnp.clip(ids, _arguments.scalar(0, ids), last)
            return indexing.take_rows(array, ids)

        return _mapped(read, len(self.in_avals[0].batch))(table.array, ids)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        (table, ids), (change, _) = primals, tangents
        out = self(table, ids)
        if _compat.is_zero(change):
            return out, _compat.zero_tangent(self.out_aval)
        return out, GetRows(jax.typeof(change), self.in_avals[1])(change, ids)

    lin, linearized = _compat.linearize_from_jvp()

    def vjp_fwd(self, nonzeros: Any, table: Any, ids: Any) -> Any:
        del nonzeros
        return self(table, ids), ids

    def vjp_bwd(self, ids: Any, cotangent: Any, table: Any, _: Any) -> None:
        if not _compat.is_zero(cotangent):
            kind, of_ids = self.in_avals
            to_rows = ToRows(self.out_aval, of_ids, kind.to_tangent_aval())
            table.accum(to_rows(cotangent, ids))

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        read = functools.partial(ReadRows, clip=self.clip)
        return _batch_read(read, axis_data.size, args, dims)


class GetRows(_Linear):
    def __init__(self, rows: Any, ids: Any):
        shape = (*ids.shape, *rows.table[1:])
        super().__init__((rows, ids), _compat.array_type(shape, rows.dtype))

    def expand(self, rows: Rows, ids: Any) -> Any:
        kind = self.in_avals[0]

        def get(rows, values, ids):
            return SelectedRows(rows, values, kind.table[0]).get(ids)

        return _mapped(get, len(kind.batch))(rows.rows, rows.values, ids)

    def transposed(self, cotangent: Any, *ids: Any) -> Any:
        kind, of_ids = self.in_avals
        return ToRows(self.out_aval, of_ids, kind)(cotangent, *ids)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        return _batch_read(GetRows, axis_data.size, args, dims)


class ToRows(_Linear):
    def __init__(self, values: Any, ids: Any, out: RowsType):
        super().__init__((values, ids), out, out=out)

    def expand(self, values: Any, ids: Any) -> Rows:
        height, *row = self.out.table
        capacity = self.out.capacity

        def to_rows(values, ids):
            ids, values = ids.reshape(-1), values.reshape(ids.size, *row)
            empty = _arguments.scalar(height, ids)
            ids = jnp.where(indexing.in_range(ids, height), ids, empty)
            if ids.size > capacity:
                return _merged(ids, values, height, capacity)
            pad = capacity - ids.size
            ids = jnp.pad(ids, (0, pad), constant_values=height)
            return ids, jnp.pad(values, [(0, pad)] + [(0, 0)] * len(row))

        return self.out.raise_val(*_mapped(to_rows, len(self.out.batch))(values, ids))

    def transposed(self, cotangent: Any, *ids: Any) -> Any:
        return GetRows(self.out, self.in_avals[1])(cotangent, *ids)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        if dims == (None, None):
            return self(*args), None
        values, ids = (_in_front(x, d, axis_data.size) for x, d in zip(args, dims))
        out = self.out.inc_rank(axis_data.size, 0)
        return ToRows(jax.typeof(values), jax.typeof(ids), out)(values, ids), 0


class AddRows(_Prim):
    def __init__(self, rows: RowsType):
        super().__init__((rows, rows), rows, rows=rows)

    def expand(self, x: Rows, y: Rows) -> Rows:
        kind = self.rows

        def add(rows, values, more_rows, more_values):
            rows = jnp.concatenate([rows, more_rows])
            values = jnp.concatenate([values, more_values])
            return _merged(rows, values, kind.table[0], kind.capacity)

        add = _mapped(add, len(kind.batch))
        return kind.raise_val(*add(x.rows, x.values, y.rows, y.values))

    def jvp(self, primals: Any, tangents: Any) -> Any:
        moved = [t for t in tangents if not _compat.is_zero(t)]
        return self(*primals), moved[0] if len(moved) == 1 else self(*moved)

    lin, linearized = _compat.linearize_from_jvp()

    def vjp_fwd(self, nonzeros: Any, x: Any, y: Any) -> Any:
        del nonzeros
        return self(x, y), None

    def vjp_bwd(self, _: Any, cotangent: Any, x: Any, y: Any) -> None:
        if not _compat.is_zero(cotangent):
            for each in (x, y):
                if hasattr(each, "accum"):
                    each.accum(cotangent)

    def transpose(self, cotangent: Any, x: Any, y: Any) -> None:
        self.vjp_bwd(None, cotangent, x, y)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        if dims == (None, None):
            return self(*args), None
        kind = self.rows.inc_rank(axis_data.size, 0)
        x, y = (_rows_in_front(x, d, kind) for x, d in zip(args, dims))
        return AddRows(kind)(x, y), 0


class NoRows(_Prim):
    def __init__(self, rows: RowsType):
        super().__init__((), rows, rows=rows)

    def expand(self) -> Rows:
        ids, values = self.rows.lo_ty()
        ids = jnp.full(ids.shape, self.rows.table[0], ids.dtype)
        return self.rows.raise_val(ids, jnp.zeros(values.shape, values.dtype))

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        return self(), None


class OpenRows(_Prim):
    def __init__(self, rows: RowsType):
        super().__init__((rows,), tuple(rows.lo_ty()), rows=rows)

    def expand(self, rows: Rows) -> Any:
        return rows.rows, rows.values

    def jvp(self, primals: Any, tangents: Any) -> Any:
        ids, values = self(*primals)
        of_ids, of_values = self.out_aval
        change = GetRows(self.rows, of_ids)(tangents[0], ids)
        return (ids, values), (_compat.zero_tangent(of_ids), change)

    lin, linearized = _compat.linearize_from_jvp()

    def vjp_fwd(self, nonzeros: Any, rows: Any) -> Any:
        del nonzeros
        ids, values = self(rows)
        return (ids, values), ids

    def vjp_bwd(self, ids: Any, cotangents: Any, rows: Any) -> None:
        of_ids, of_values = self.out_aval
        if not _compat.is_zero(cotangents[1]):
            rows.accum(ToRows(of_values, of_ids, self.rows)(cotangents[1], ids))

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        if dims == (None,):
            return self(*args), (None, None)
        return OpenRows(self.rows.inc_rank(axis_data.size, 0))(*args), (0, 0)


def _merged(rows: Any, values: Any, height: int, capacity: int) -> Any:
    rows, values, count = merge.coalesce(rows, values, height, capacity)
    return rows, _arguments.report_overflow(_MAKE, values, count, capacity)


def _mapped(f: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`f`, mapped over so many axes in front."""
    for _ in range(count):
        f = jax.vmap(f)
    return f


def _in_front(x: Any, dim: int | None, size: int) -> Any:
    if dim is None:
        return jnp.broadcast_to(x, (size, *x.shape))
    return jnp.moveaxis(x, dim, 0)


def _rows_in_front(x: Any, dim: int | None, kind: RowsType) -> Any:
    if dim is not None:
        return x
    ids, values = OpenRows(jax.typeof(x))(x)
    ids, values = (_in_front(part, None, kind.batch[0]) for part in (ids, values))
    return ToRows(jax.typeof(values), jax.typeof(ids), kind)(values, ids)


def _batch_read(prim: Any, size: int, args: Any, dims: Any) -> Any:
    """`ReadRows` and `GetRows` under `vmap`."""
    (table, ids), (dim, ids_dim) = args, dims
    kind = jax.typeof(table)
    if dim is None and ids_dim is None:
        return prim(kind, jax.typeof(ids))(table, ids), None
    if dim is None:  # one table for all: more ids, after the axes of the table
        front = len(kind.batch)
        ids = jnp.moveaxis(ids, ids_dim, front)
        return prim(kind, jax.typeof(ids))(table, ids), front
    ids = _in_front(ids, ids_dim, size)
    return prim(kind, jax.typeof(ids))(table, ids), 0
