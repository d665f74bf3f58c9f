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
from sparsejax._rows import is_selected_rows
from sparsejax.store._engine import CapacityOf, Engine
from sparsejax.store._optimizer import on_host
from sparsejax.store._requested import Capacities
from sparsejax.store._tree_tables import (
    Pulled,
    caches_of,
    put_tables,
    tables_of,
    view_to_record,
)
from sparsejax.transform import value_and_grad
from sparsejax.transform.forward import IdsProgram, ids_program, run_forward
from sparsejax.transform.interpreter import Reads, Run, walk
from sparsejax.transform.trace import trace_flat


# The rows of a step by table.
Rows = Mapping[str, Pulled]


# ------------------------------------------------------------------ arguments


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """A leaf that is not an array, and must be hashable.

    With its type: 1, 1.0 and True are equal, but a function may treat them differently.
    """

    kind: type
    value: Any


def as_arrays(tree: Any) -> Any:
    """Returns a tree whose leaves are arrays, for programs that `jitted` compiles.

    Raises:
      TypeError: an array is traced, or another leaf is not hashable.
    """

    def one(x):
        if isinstance(x, Tracer):
            raise TypeError(
                "An argument is traced by jit, vmap, grad or scan, but the rows of the "
                "store are in host memory. Call the function outside: it compiles the "
                "step itself."
            )
        if _arguments.is_array(x):
            return _arguments.saturate(x)
        hash(x)  # raises: a value that changes in place would not compile again
        return _Static(type(x), x)

    return jax.tree.map(one, tree)


def _as_given(tree: Any) -> Any:
    """Inverts `as_arrays`."""
    is_static = lambda x: isinstance(x, _Static)
    value = lambda x: x.value if is_static(x) else x
    return jax.tree.map(value, tree, is_leaf=is_static)


def check_no_cache(tree: Any) -> None:
    """Raises if a table of a CachedTable is in a tree."""
    for name in caches_of(tree):
        raise TypeError(
            f"Table {name!r} is of a CachedTable, whose rows move with their optimizer "
            "state. Train it by store.train_step(fun, tx). To evaluate, call its "
            f"flush, and use store[{name!r}] in its place."
        )


def _check_tables(engine: Engine, tables: Sequence[Any]) -> None:
    """Raises unless there are tables, and all are of the store."""
    for table in tables:
        if table.engine is not engine:
            raise ValueError(
                f"Table {table.name!r} belongs to another store. Use the methods of "
                "one store for all tables of a function."
            )
    if not tables:
        raise TypeError(
            "The arguments have no table of the store. Put store['name'] in place of "
            "the array of a table, or use sparsejax.value_and_grad."
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

    def ids(self, arguments: Any) -> dict[str, Any]:
        """Returns the ids for arguments of this structure."""
        arrays = jax.tree.leaves(arguments)
        needed = [arrays[k] for k in self.needed]
        is_here = lambda x: not isinstance(x, jax.Array) or x.is_fully_addressable
        if not all(map(is_here, needed)):
            return self.run(needed)  # arrays of several processes
        with on_host() as device:
            # Not on the device of the step, where the step of the last batch may run.
            ids = self.run([_for_host(x, device) for x in needed])
            return {name: np.asarray(x) for name, x in ids.items()}

    def capacity(self, capacities: Capacities) -> CapacityOf:
        """Returns the capacity of each table: given, or measured and only growing."""

        def capacity(name, count, height):
            if capacities.given(name) is not None:
                return capacities.pulled(name, count, height)
            return capacities.grow(name, count, min(self.counts[name], height))

        return capacity


class RowIds:
    """The programs that find the rows that calls of a function read, by table.

    Args:
      engine: of the store of the tables.
      fun: a function of trees.
    """

    def __init__(self, engine: Engine, fun: Callable[..., Any]):
        self._engine, self._fun = engine, fun
        self._programs: dict[Any, Program] = {}

    def program(self, arguments: Any) -> Program:
        """Returns the program for arguments of this structure, from `as_arrays`.

        The arrays may be specs.
        """
        arrays, structure = jax.tree.flatten(arguments)
        key = structure, tuple(map(_kind_of, arrays))
        if key not in self._programs:
            # Without their shardings: the program runs on the host.
            self._programs[key] = self._make(list(map(spec_of, arrays)), structure)
        return self._programs[key]

    def _make(self, arrays: Sequence[Any], structure: Any) -> Program:
        flat, tables = self._trace(arrays, structure)
        run = Run({k: table.shape[0] for k, table in enumerate(tables)})
        live = (True,) * len(flat.jaxpr.outvars)
        step = lambda inputs, reads: walk(
            run, reads, flat.jaxpr, [*flat.consts, *inputs], live
        )
        reads = Reads()
        jax.eval_shape(lambda inputs: step(inputs, reads) and None, arrays)
        sites = run.sites = tuple(reads.sites)
        deltas = []
        for site in sites:
            table = tables[site.table]
            shape = site.lead + table.shape[1:]
            deltas.append(jax.ShapeDtypeStruct(shape, table.dtype))
        program = ids_program(step, deltas, arrays)
        names = [table.name for table in tables]
        if any(program.needs_delta):
            _refuse_second_hop(names, sites, program)
        counts: dict[str, int] = {}
        for site in sites:
            name = names[site.table]
            counts[name] = counts.get(name, 0) + site.num_rows
        counts = {name: count for name, count in counts.items() if count}
        needed = [k for k, is_needed in enumerate(program.needs_input) if is_needed]
        by_table = functools.partial(_by_table, names, sites, program)
        return Program(jax.jit(by_table), tuple(needed), counts)

    def _trace(self, arrays: Sequence[Any], structure: Any) -> Any:
        """Traces the function with a view of each table; returns program and tables."""
        tables: dict[str, Any] = {}

        def on_views(arrays):
            args = _as_given(structure.unflatten(arrays))
            in_args = tables_of(args)
            _check_tables(self._engine, in_args)
            tables.update({table.name: table for table in in_args})
            numbers = {name: k for k, name in enumerate(tables)}
            views = [view_to_record(t, numbers[t.name]) for t in in_args]
            return self._fun(*put_tables(args, views))

        flat = trace_flat(on_views, (arrays,), {}, lambda x: True)
        return flat, list(tables.values())


def _by_table(
    names: Sequence[str], sites: Sequence[Any], program: IdsProgram, needed: Any
) -> dict[str, jax.Array]:
    """Returns the ids of all reads of each table, flat."""
    ids_by_name: dict[str, list[jax.Array]] = {}
    for ids, site in zip(program.run((), needed), sites):
        ids_by_name.setdefault(names[int(site.table)], []).append(ids.reshape(-1))
    return {
        name: ids[0] if len(ids) == 1 else jnp.concatenate(ids)
        for name, ids in ids_by_name.items()
    }


def _refuse_second_hop(
    names: Sequence[str], sites: Sequence[Any], program: IdsProgram
) -> NoReturn:
    """Raises the error of ids that depend on rows of a table of the store."""
    for number, site in enumerate(sites):
        reads, _ = program.behind(number)
        if reads:
            first = sites[reads[0]]
            raise ValueError(
                f"The ids of table {names[site.table]!r} at {site.where} depend on "
                f"rows of table {names[first.table]!r} that are read at {first.where}, "
                "but all rows of a step are pulled before it runs. Compute the ids "
                f"from store.pull({names[first.table]!r}, ...) first, and pass them as "
                "an argument; or keep the table of the first read on the device."
            )
    raise AssertionError("sparsejax: ids depend on rows of no read. This is a bug.")


def _for_host(x: Any, device: Any) -> Any:
    """Moves an array to the CPU for a program there; copies only if it is elsewhere."""
    is_there = not isinstance(x, jax.Array) or x.sharding.device_set == {device}
    return x if is_there else np.asarray(x)


def _kind_of(x: Any) -> tuple[Any, ...]:
    """Returns the type for which a program is compiled; cheaper to hash than a spec."""
    return x.shape, x.dtype, getattr(x, "weak_type", False)


def spec_of(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array or spec."""
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)
    )


# ------------------------------------------------------------------ the function


def with_views(tree: Any, rows: Rows, but: Sequence[str] = ()) -> Any:
    """Replaces each table of the tree by a view of the pulled rows.

    Args:
      tree: with tables.
      rows: the rows that were pulled; a table that is not read has none.
      but: the names of tables that stay as they are.
    """

    def view(table):
        if table.name in but:
            return table
        pulled = pulled_of(table, rows)
        return table.view(table.values(pulled), pulled)

    return put_tables(tree, list(map(view, tables_of(tree))))


def pulled_of(table: Any, rows: Rows) -> Pulled:
    """Returns the rows of a table in a step; one empty slot if it is not read."""
    return rows[table.name] if table.name in rows else table.not_read()


def forward(fun: Callable[..., Any], rows: Rows, args: Any, kw: Any) -> Any:
    """Calls `fun` on pulled rows."""

    def on_rows(args, kw):
        args, kw = with_views((args, kw), rows)
        return fun(*args, **kw)

    return run_forward(on_rows, args, kw)


def gradient(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...],
    has_aux: bool,
    tables: Any,
    rows: Rows,
    args: Sequence[Any],
    kw: Mapping[str, Any],
    frozen: Sequence[str] = (),
) -> tuple[Any, Any, list[Any]]:
    """Differentiates `fun` on pulled rows.

    Args:
      fun, argnums, has_aux, tables: as in `sparsejax.value_and_grad`.
      rows: the rows that were pulled.
      args, kw: the arguments of `fun`, with tables.
      frozen: the names of tables without a gradient.

    Returns:
      The value; the gradient, which still has the tables; and the gradient of each of
      them, in order, without the frozen ones.
    """
    several = isinstance(argnums, tuple)
    numbers = [n % len(args) for n in (argnums if several else (argnums,))]
    trained = [t for n in numbers for t in tables_of(args[n]) if t.name not in frozen]
    names = [table.name for table in trained]
    of_trained = [pulled_of(table, rows) for table in trained]
    # One array for each place of a table in the arguments, since each has its gradient.
    values = [table.values(pulled) for table, pulled in zip(trained, of_trained)]
    args, kw = list(args), dict(kw)
    for n in numbers:
        # Without the array of a cache, which is among the values.
        args[n] = put_tables(args[n], [t.without_array() for t in tables_of(args[n])])

    @functools.wraps(fun)
    def on_rows(*args_and_values, **kw):
        *args, values = args_and_values
        views = iter([t.view(x, f) for t, x, f in zip(trained, values, of_trained)])
        for n in numbers:
            all_tables = tables_of(args[n])
            chosen = [t if t.name in frozen else next(views) for t in all_tables]
            args[n] = put_tables(args[n], chosen)
        # A table that is differentiated stays as it is in the other arguments, where a
        # read of it would have no gradient.
        args, kw = with_views((args, kw), rows, but=names)
        return fun(*args, **kw)

    run = value_and_grad(
        on_rows,
        (*numbers, len(args)),
        has_aux,
        tables=_with_values(tables, several, len(numbers)),
    )
    value, (*grads, of_values) = run(*args, values, **kw)
    of_tables = [t.gradient(g, f) for t, g, f in zip(trained, of_values, of_trained)]
    return value, tuple(grads) if several else grads[0], of_tables


def _with_values(tables: Any, several: bool, count: int) -> Any:
    """Returns `tables=` for the arguments of the user and the values of pulled rows."""
    if not callable(tables):
        is_tuple = several and isinstance(tables, tuple)
        return (*(tables if is_tuple else (tables,) * count), True)

    def predicate(path, leaf):
        if path[0].idx == count:
            return True
        return tables(path if several else path[1:], leaf)

    return predicate


def jitted(
    body: Callable[..., Any], donate: bool = False, checked: bool = False
) -> Callable[..., Any]:
    """Compiles `body(rows, first, rest)`, of rows and two trees of any leaves.

    Returns:
      `f(rows, first, rest)`, of the rows of a step by table, and of two trees from
      `as_arrays`. With `donate`, the arrays of `first` are donated. With `checked`, it
      runs under `checkify`, and raises if a check failed.
    """

    def on_arrays(rows, first, rest):
        return body(rows, _as_given(first), _as_given(rest))

    run = checkify.checkify(on_arrays) if checked else on_arrays
    run = jax.jit(run, donate_argnums=(1,) if donate else ())

    def call(rows, first, rest):
        # As a tree, a SelectedRows seals its ids, which takes a program for each table.
        as_pair = lambda x: (x.rows, x.values) if is_selected_rows(x) else x
        out = run({name: as_pair(x) for name, x in rows.items()}, first, rest)
        if checked:
            error, out = out
            error.throw()
        return out

    return call
