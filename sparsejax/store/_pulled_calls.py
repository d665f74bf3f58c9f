"""Functions of trees with tables of a store, run on the rows that they read.

A call of such a function runs these steps:

1. `RowIds` traces the function, once for arguments of the same structure, shapes and
   dtypes, and cuts out the program that computes the ids of every read. It runs that
   program on the host.
2. The store pulls the rows of all tables, in one batch.
3. `jitted` runs the function, or the training step made of it, on these rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify

from sparsejax import _arguments
from sparsejax._rows import SelectedRows, indexing, is_selected_rows
from sparsejax.store._leaf import (
    CachedRows,
    ListedTable,
    put_tables,
    tables_of,
    view_of_rows,
    view_to_record,
)
from sparsejax.store._optimizer import on_host
from sparsejax.store._requested_rows import MIN_CAPACITY, capacity_for
from sparsejax.transform import rules, value_and_grad
from sparsejax.transform.forward import run_forward
from sparsejax.transform.interpreter import Reads, Run, walk
from sparsejax.transform.read_ids import IdsProgram, ids_program
from sparsejax.transform.trace import trace_flat


del rules  # imported for the rules that it registers

# The rows of a step by the name of their table. Of a cache: rows, and their slots.
Rows = Mapping[str, Any]


# ------------------------------------------------------------------ arguments


class Static:
    """The part of a tree that is not arrays: its structure, and its other leaves."""

    def __init__(self, tree: Any, others: Sequence[Any]):
        self.tree, self.others = tree, tuple(others)
        # 1, 1.0 and True are equal, but a function may treat them differently.
        self._key = tree, self.others, tuple(map(type, self.others))
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def join(self, arrays: Sequence[Any]) -> Any:
        """The tree with these arrays."""
        found = iter(arrays)
        leaves = (next(found) if x is _ARRAY else x for x in self.others)
        return self.tree.unflatten(leaves)


class _Array:
    """Stands for an array among the other leaves."""


_ARRAY = _Array()


class Part(NamedTuple):
    """An argument, as arrays and the rest of its tree."""

    arrays: list[Any]
    static: Static


def split(call: str, tree: Any) -> Part:
    """The arrays of a tree, and the rest of it, which is hashable.

    Raises:
      TypeError: an array is traced, or a leaf that is not an array is not hashable.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [_arguments.saturate(x) for x in leaves if _arguments.is_array(x)]
    if any(isinstance(x, Tracer) for x in arrays):
        raise TypeError(
            f"{call}: an argument is traced by jit, vmap, grad or scan, but the rows "
            "are in host memory. Call it outside: it compiles the step itself."
        )
    others = [_ARRAY if _arguments.is_array(x) else x for x in leaves]
    try:
        return Part(arrays, Static(structure, others))
    except TypeError:
        raise TypeError(
            f"{call}: an argument that is not an array is a constant of the compiled "
            f"step and must be hashable, got {_unhashable(others)}. Let the function "
            "close over it."
        ) from None


def _unhashable(leaves: Sequence[Any]) -> str:
    for x in leaves:
        try:
            hash(x)
        except TypeError:
            return _arguments.kind_of(x)
    return "a tree with such a node"


def check_no_cache(call: str, tree: Any) -> None:
    """Raises if a table of a CachedTable is in a tree."""
    for table in tables_of(tree):
        if isinstance(table, CachedRows):
            raise TypeError(
                f"{call}: table {table.name!r} is of a CachedTable, whose rows move "
                "with their optimizer state. Train it by store.train_step(fun, tx). To "
                f"evaluate, call its flush, and use store[{table.name!r}] in its place."
            )


def check_tables(call: str, store: Any, tables: Sequence[Any]) -> None:
    """Raises unless there are tables, and all are of the store."""
    for table in tables:
        if table.store is not store:
            raise ValueError(
                f"{call}: table {table.name!r} belongs to another store. Use the "
                "methods of one store for all tables of a function."
            )
    if not tables:
        raise TypeError(
            f"{call}: the arguments must have a table of the store, got none. Put "
            'store["name"] in place of the array of the table: params["items"] = '
            'store["items"]. Without a table of a store use sparsejax.value_and_grad.'
        )


# ------------------------------------------------------------------ ids


class Program(NamedTuple):
    """The ids of a function for arguments of one structure.

    Args:
      run: a jitted function of the arrays that the ids depend on; returns the ids of
        each table, flat.
      needed: the positions of these arrays among all.
      counts: by table, the number of ids.
    """

    run: Callable[[Sequence[Any]], dict[str, jax.Array]]
    needed: tuple[int, ...]
    counts: dict[str, int]


class RowIds:
    """The ids of the rows that calls of a function read, by table.

    Args:
      call: for messages.
      store: the store of the tables.
      fun: a function of trees.
    """

    def __init__(self, call: str, store: Any, fun: Callable[..., Any]):
        self._call, self._store, self._fun = call, store, fun
        self._programs: dict[Any, Program] = {}

    def of(self, program: Program, *parts: Part) -> dict[str, Any]:
        """The ids of `fun(*arguments)`, which `split` cut, by their program."""
        arrays = [x for part in parts for x in part.arrays]
        needed = [arrays[k] for k in program.needed]
        is_here = lambda x: not isinstance(x, jax.Array) or x.is_fully_addressable
        if not all(map(is_here, needed)):
            return program.run(needed)  # arrays of several processes
        with on_host() as device:
            # Not on the device of the step, where the step of the last batch may run.
            ids = program.run([_for_host(x, device) for x in needed])
            return {name: np.asarray(x) for name, x in ids.items()}

    def program(self, *parts: Part) -> Program:
        """The program for arguments of this structure, arrays or specs."""
        key = tuple((part.static, *map(_kind_of, part.arrays)) for part in parts)
        if key not in self._programs:
            self._programs[key] = self._make(parts)
        return self._programs[key]

    def _make(self, parts: Sequence[Part]) -> Program:
        call = self._call
        # Without their shardings: the program runs on the host.
        arrays = [spec_of(x) for part in parts for x in part.arrays]
        tables: dict[str, Any] = {}

        def on_records(arrays):
            rest = iter(arrays)
            args = [
                part.static.join([next(rest) for _ in part.arrays]) for part in parts
            ]
            found = tables_of(args)
            check_tables(call, self._store, found)
            tables.update({table.name: table for table in found})
            numbers = {name: k for k, name in enumerate(tables)}
            view = lambda t: view_to_record(call, t, numbers[t.name])
            args = put_tables(args, [view(t) for t in found])
            return self._fun(*args)

        flat = trace_flat(on_records, (arrays,), {}, lambda x: True)
        heights = {k: table.shape[0] for k, table in enumerate(tables.values())}
        run, live = Run(heights), (True,) * len(flat.jaxpr.outvars)
        step = lambda inputs, reads: walk(
            run, reads, flat.jaxpr, [*flat.consts, *inputs], live
        )
        reads = Reads()
        jax.eval_shape(lambda inputs: step(inputs, reads) and None, list(arrays))
        sites = run.sites = tuple(reads.sites)
        names = list(tables)

        def delta(site):
            table = tables[names[site.table]]
            return jax.ShapeDtypeStruct(site.lead + table.shape[1:], table.dtype)

        program = ids_program(step, [delta(site) for site in sites], list(arrays))
        if any(program.needs_delta):
            _refuse_second_hop(call, names, sites, program)

        def run_ids(needed):
            found = program.run((), needed)
            mine = lambda k: [
                x.reshape(-1) for x, site in zip(found, sites) if site.table == k
            ]
            by_table = {name: mine(k) for k, name in enumerate(names)}
            return {
                name: x[0] if len(x) == 1 else jnp.concatenate(x)
                for name, x in by_table.items()
                if x
            }

        needed = [k for k, is_needed in enumerate(program.needs_input) if is_needed]
        counts = dict.fromkeys(names, 0)
        for site in sites:
            counts[names[site.table]] += site.num_rows
        counts = {name: count for name, count in counts.items() if count}
        return Program(jax.jit(run_ids), tuple(needed), counts)


def _refuse_second_hop(
    call: str, names: Sequence[str], sites: Sequence[Any], program: IdsProgram
) -> NoReturn:
    """Raises the error of ids that depend on rows of a table of the store."""
    for number, site in enumerate(sites):
        reads, _ = program.behind(number)
        if reads:
            first = sites[reads[0]]
            raise ValueError(
                f"{call}: the ids of table {names[site.table]!r} at {site.where} "
                f"depend on rows of table {names[first.table]!r} that are read at "
                f"{first.where}. All rows of a step are pulled before it runs. Split "
                f"it in two: compute the ids from store.pull({names[first.table]!r}, "
                "...) first, and pass them as an argument. Or keep the table of the "
                "first read on the device, as an array."
            )
    raise AssertionError("sparsejax: ids depend on rows of no read. This is a bug.")


def _for_host(x: Any, device: Any) -> Any:
    """An array for a program on the CPU; a copy only if it is elsewhere."""
    is_there = not isinstance(x, jax.Array) or x.sharding.device_set == {device}
    return x if is_there else np.asarray(x)


def _kind_of(x: Any) -> tuple[Any, ...]:
    """What a program is compiled for; cheaper to hash than a spec."""
    return x.shape, x.dtype, getattr(x, "weak_type", False)


def spec_of(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array or spec."""
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)
    )


# ------------------------------------------------------------------ capacities


class Capacities:
    """The number of slots of a table's rows: given, or measured and only growing.

    Args:
      given: an int, a mapping from tables to ints, or None.
    """

    def __init__(self, given: int | Mapping[str, int] | None):
        self._given = given
        self._measured: dict[str, int] = {}

    def slots(self, call: str, program: Program) -> Callable[[str, int, int], int]:
        """`f(name, count, height)`: the slots for `count` distinct rows of a table.

        It raises a ValueError for more rows than the capacity that was given.
        """

        def choose(name, count, height):
            given: Any = self._given
            if isinstance(given, Mapping):
                given = given.get(name)
            if given is not None:
                return capacity_for(call, name, count, height, given)
            if count > self._measured.get(name, 0) or name not in self._measured:
                most = program.counts[name]
                self._measured[name] = max(1, min(_some_more(count), most, height))
            return self._measured[name]

        return choose


def _some_more(count: int) -> int:
    """A quarter more than `count`, rounded up a little."""
    size = max(MIN_CAPACITY, count + count // 4)
    unit = max(1, _arguments.next_power_of_two(size) // 16)
    return -(-size // unit) * unit


# ------------------------------------------------------------------ the function


def with_views(call: str, tree: Any, rows: Rows, but: Sequence[str] = ()) -> Any:
    """The tree with a view of the pulled rows in place of each table.

    Args:
      call: for messages.
      tree: with tables.
      rows: the rows that were pulled; a table that is not read has none.
      but: the names of tables that stay as they are.
    """
    found = tables_of(tree)
    values = [
        t if t.name in but else view(call, t, values_of(t, rows), rows) for t in found
    ]
    return put_tables(tree, values)


def view(call: str, table: Any, values: Any, rows: Rows) -> Any:
    """A view of the rows of a table, whose values are given."""
    if isinstance(table, ListedTable):
        return values
    if isinstance(table, CachedRows):
        found = rows.get(table.name)
        ids, slots = _no_row(table) if found is None else found
        return view_of_rows(call, table, values, ids, slots)
    return view_of_rows(call, table, values, rows_of(table, rows).rows)


def values_of(table: Any, rows: Rows) -> Any:
    """What is differentiated: the array from which the rows of a table are read.

    For a table whose rows are listed, their SelectedRows.
    """
    if isinstance(table, CachedRows):
        return table.array
    if isinstance(table, ListedTable):
        return rows_of(table, rows)
    return rows_of(table, rows).values


def rows_of(table: Any, rows: Rows) -> SelectedRows:
    """The rows of a table; one empty slot if it is not read."""
    if table.name in rows:
        return rows[table.name]
    slot, _ = _no_row(table)
    zeros = jnp.zeros((1, *table.shape[1:]), table.dtype)
    return SelectedRows(slot, zeros, table.shape[0])


def _no_row(table: Any) -> tuple[jax.Array, jax.Array]:
    """The rows, and the slots, of a table that is not read."""
    height = table.shape[0]
    slot = jnp.full((1,), height, _arguments.index_dtype(height))
    return slot, slot


def forward(call: str, fun: Callable[..., Any], rows: Rows, args: Any, kw: Any) -> Any:
    """`fun` on pulled rows."""

    def on_rows(args, kw):
        args, kw = with_views(call, (args, kw), rows)
        return fun(*args, **kw)

    return run_forward(on_rows, args, kw)


def gradient(
    call: str,
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...],
    has_aux: bool,
    tables: Any,
    rows: Rows,
    args: Sequence[Any],
    kw: Mapping[str, Any],
    frozen: Sequence[str] = (),
) -> tuple[Any, Any, list[tuple[str, Any]]]:
    """`value_and_grad` of `fun` on pulled rows.

    Args:
      call: for messages.
      fun, argnums, has_aux, tables: as in `sparsejax.value_and_grad`.
      rows: the rows that were pulled.
      args, kw: the arguments of `fun`, with tables.
      frozen: the names of tables without a gradient.

    Returns:
      The value; the gradient, which still has the tables; and for each of them, in
      order, its name and its gradient, which has the rows that were pulled.
    """
    several = isinstance(argnums, tuple)
    numbers = [n % len(args) for n in (argnums if several else (argnums,))]
    args, kw = list(args), dict(kw)
    chosen = [tables_of(args[n]) for n in numbers]
    places = [t for found in chosen for t in found if t.name not in frozen]
    # One array for each place of a table in the arguments, since each has its gradient.
    values = [values_of(table, rows) for table in places]
    names = [table.name for table in places]
    for n, here in zip(numbers, chosen):
        # Without the array of a cache, which is among the values.
        args[n] = put_tables(args[n], [getattr(t, "stored", t) for t in here])

    @functools.wraps(fun)
    def on_rows(*args_and_values, **kw):
        *args, values = args_and_values
        rest = iter(values)

        def view_of(table):
            is_frozen = table.name in frozen
            own = values_of(table, rows) if is_frozen else next(rest)
            return view(call, table, own, rows)

        for n, here in zip(numbers, chosen):
            args[n] = put_tables(args[n], [view_of(table) for table in here])
        # A table that is differentiated stays as it is in the other arguments, where a
        # read of it would have no gradient.
        args, kw = with_views(call, (args, kw), rows, but=names)
        return fun(*args, **kw)

    run = value_and_grad(
        on_rows,
        (*numbers, len(args)),
        has_aux,
        tables=_with_values(tables, several, len(numbers)),
    )
    value, (*grads, of_values) = run(*args, values, **kw)
    found = []
    for grad, table in zip(of_values, places):
        if isinstance(table, CachedRows):
            grad = CachedRows(grad, table.cache, table.stored)
        elif not isinstance(table, ListedTable):
            grad = _of_slots(grad, rows_of(table, rows))
        found.append((table.name, grad))
    return value, tuple(grads) if several else grads[0], found


def _with_values(tables: Any, several: bool, count: int) -> Any:
    """`tables=` for the arguments of the user and the values of pulled rows."""
    if not callable(tables):
        is_tuple = several and isinstance(tables, tuple)
        return (*(tables if is_tuple else (tables,) * count), True)

    def predicate(path, leaf):
        if path[0].idx == count:
            return True
        return tables(path if several else path[1:], leaf)

    return predicate


def _of_slots(grad: SelectedRows, rows: SelectedRows) -> SelectedRows:
    """The gradient of `rows`, from the gradient of their values by slot."""
    wide = indexing.accumulator_dtype(grad.dtype)
    zeros = jnp.zeros(rows.values.shape, wide)
    sums = indexing.add_rows(zeros, grad.safe_rows(), grad.values.astype(wide))
    return SelectedRows(rows.rows, sums.astype(grad.dtype), rows.height)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("rows", "values"),
    meta_fields=("height",),
)
@dataclasses.dataclass(frozen=True)
class _PlainRows:
    """A SelectedRows as an argument of a compiled program.

    As a tree, a SelectedRows seals its ids, which takes a program for each table.
    """

    rows: Any
    values: Any
    height: int

    @classmethod
    def of(cls, x: SelectedRows) -> _PlainRows:
        return cls(x.rows, x.values, x.height)

    def join(self) -> SelectedRows:
        return SelectedRows(self.rows, self.values, self.height)


def jitted(
    body: Callable[..., Any], donate: bool = False, checked: bool = False
) -> Callable[..., Any]:
    """Compiles `body(rows, first, rest)`, of trees that `split` cuts.

    Returns:
      `f(rows, first, rest)` of pulled rows and two `Part`s. With `donate`, the arrays
      of `first` are donated. With `checked`, it runs under `checkify`, and raises if a
      check failed.
    """

    @functools.partial(
        jax.jit, static_argnums=(0, 1), donate_argnums=(3,) if donate else ()
    )
    def run(first_static, rest_static, *arrays):
        def on_arrays(rows, first, rest):
            as_rows = lambda x: x.join() if isinstance(x, _PlainRows) else x
            rows = {name: as_rows(x) for name, x in rows.items()}
            return body(rows, first_static.join(first), rest_static.join(rest))

        return (checkify.checkify(on_arrays) if checked else on_arrays)(*arrays)

    def call(rows, first, rest):
        as_plain = lambda x: _PlainRows.of(x) if is_selected_rows(x) else x
        rows = {name: as_plain(x) for name, x in rows.items()}
        out = run(first.static, rest.static, rows, first.arrays, rest.arrays)
        if checked:
            error, out = out
            error.throw()
        return out

    return call
