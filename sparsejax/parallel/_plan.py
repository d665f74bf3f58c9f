"""plan: what each layout of a table costs, in memory and on the wire.

With N devices, a table `[V, ...]` of rows of d bytes, n ids on each device and step,
and U distinct ids among a device's n (n if unknown), a device holds

    row-sharded         (d + s) ceil(V / N)     s: bytes of optimizer state a row
    column-sharded      (d + s) V / N           state of another shape than the table
    replicated          (d + s) V               is replicated

and sends in a step, lookup and update together,

    row-sharded         2 (N - 1) C (d + 4)
    column-sharded      2 n d (N - 1) / N + 3 (N - 1) 4 n
    replicated-sparse   (N - 1) U (d + 4)
    replicated-dense    2 V d (N - 1) / N

Row-sharded: C is the capacity, the rows requested from one owner in one round; without
skew it is slightly more than U / N. Column-sharded: whole rows are sent in both
directions, and XLA gathers the ids for each of their three uses; each device reads all
N n ids, in narrow rows. (A bag that is summed first is sent as one row, and replicated
ids are not sent.) Replicated: ids and rows of the gradient go to all devices, or the
dense gradient is all-reduced. An id takes 4 bytes, or 8 in tables of 2^31 rows. Losses
and norms add a few numbers. `sparsejax.parallel.wire_bytes` reports what a compiled
step actually sends.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax.parallel._exchange import Owners
from sparsejax.parallel._lookup import measure_capacity
from sparsejax.parallel._table import ShardedTable, check_axis, shard_rows
from sparsejax.parallel._wire_bytes import format_table


_CALL = "sparsejax.parallel.plan"
LAYOUTS = (
    "row-sharded",
    "column-sharded",
    "replicated-sparse",
    "replicated-dense",
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a layout for each device.

    Args:
      memory: int, bytes of the table and its optimizer state.
      wire: int, bytes sent in a step.
    """

    memory: int
    wire: int


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """The layouts of one table, their costs and the choice.

    Args:
      name: the path of the table, for example `tables['user']`.
      shape, dtype: of the table.
      ids: the number of ids per device and step.
      distinct: the most distinct ids of any device in the sample; `ids` without one.
      capacity: for `sparsejax.parallel.lookup`, if row-sharded.
      costs: by layout, without layouts that the shape does not allow.
      choice: the recommended layout.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    ids: int
    distinct: int
    capacity: int
    costs: Mapping[str, Cost]
    choice: str


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The result of `plan`; prints as a table.

    Args:
      tables: a `TablePlan` for each table.
      num_devices: N.
      device_bytes: the bytes that each device has for tables; None for no limit.
    """

    tables: tuple[TablePlan, ...]
    num_devices: int
    device_bytes: int | None

    def __getitem__(self, name: str) -> TablePlan:
        for table in self.tables:
            if table.name == name:
                return table
        known = ", ".join(table.name for table in self.tables)
        raise KeyError(f"{_CALL}: there is no table {name!r}, only {known}.")

    @property
    def total(self) -> Cost:
        """The cost per device of all tables in their recommended layouts."""
        chosen = [table.costs[table.choice] for table in self.tables]
        return Cost(sum(c.memory for c in chosen), sum(c.wire for c in chosen))

    def __repr__(self) -> str:
        head = ("table", "shape", "ids", "distinct", *LAYOUTS, "choice")
        rows = []
        for table in self.tables:
            cells = [_show_cost(table.costs.get(layout)) for layout in LAYOUTS]
            shape = f"{table.dtype}[{','.join(map(str, table.shape))}]"
            counts = f"{table.ids:,}", f"{table.distinct:,}"
            rows.append((table.name, shape, *counts, *cells, table.choice))
        rows.append(("total", "", "", "", "", "", "", "", _show_cost(self.total)))
        lines = [
            format_table([head, *rows], right=range(2, 8)),
            f"{self.num_devices} devices; memory of a device, and what it sends",
        ]
        limit, need = self.device_bytes, self.total.memory
        if limit is not None and need > limit:
            lines.append(
                f"too large for any layout: {_size(need)} of {_size(limit)} on a device"
            )
        return "\n".join(lines)


def plan(
    tables: PyTree,
    mesh: Mesh | AbstractMesh,
    batch: PyTree,
    *,
    axis: str | Sequence[str] | None = None,
    tx: optax.GradientTransformation | None = None,
    device_bytes: int | None = None,
) -> Plan:
    """Estimates what each layout of each table costs, and recommends one.

    It recommends the layout that sends the fewest bytes and, among equals, the one that
    needs the least memory. If the tables do not fit into `device_bytes`, some get
    layouts that need less memory, starting with those that free the most memory per
    extra byte sent. The module docstring has the formulas.

    Args:
      tables: a tree of arrays, `jax.ShapeDtypeStruct`, ShardedTables, or shapes as
        tuples of ints (of float32).
      mesh: the mesh, or an `AbstractMesh`.
      batch: for each table, what a step reads from it on all devices together: the
        number of ids, or a sample of ids, whose duplicates and skew are measured
        (ideally the ids of a whole step, in order). A tree like `tables`, or one value
        for all tables.
      axis: name of the mesh axis that tables and batch are sharded over, or a tuple of
        names; None for all axes.
      tx: the optax transformation, whose state also takes memory; None for no state.
      device_bytes: int, the bytes that each device has for tables and their state; None
        for no limit.

    Returns:
      `Plan`, which prints as a table.

    Raises:
      TypeError: `mesh`, a table, `tx` or `device_bytes` has the wrong type.
      ValueError: there are no tables, a table is a scalar or has a negative shape,
        `axis` is unknown, or `batch` does not match `tables`.

    Example:
      >>> import jax, numpy as np, sparsejax as sj
      >>> mesh = jax.sharding.AbstractMesh((4,), ("x",))
      >>> tables = {"user": (100_000, 32), "country": (200, 32)}
      >>> batch = {"user": np.arange(20_480) // 4, "country": 20_480}
      >>> found = sj.parallel.plan(tables, mesh, batch)
      >>> found["tables['user']"].choice, found["tables['country']"].choice
      ('row-sharded', 'replicated-dense')
      >>> found["tables['user']"].costs["replicated-dense"].wire
      19200000

    References:
      TorchRec, `EmbeddingShardingPlanner`.
    """
    all_axes = getattr(mesh, "axis_names", ())
    axis = check_axis(_CALL, mesh, all_axes if axis is None else axis)
    if tx is not None and not callable(getattr(tx, "init", None)):
        raise TypeError(
            f"{_CALL}: tx must be an optax transformation or None, got {tx!r}."
        )
    is_number = isinstance(device_bytes, int | float | np.number | None)
    is_number = is_number and not isinstance(device_bytes, bool)
    if not is_number or (device_bytes is not None and not device_bytes > 0):
        raise (ValueError if is_number else TypeError)(
            f"{_CALL}: device_bytes must be a positive number of bytes or None, got "
            f"{device_bytes!r}."
        )
    names = (axis,) if isinstance(axis, str) else axis
    devices = math.prod(mesh.shape[name] for name in names)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tables, is_leaf=_is_table)
    if not paths:
        raise ValueError(
            f"{_CALL}: tables must contain at least one table, got {tables!r}."
        )
    specs = [_spec(_name(path), table) for path, table in paths]
    reads = _reads(batch, treedef, len(specs))
    found = [
        _table_plan(_name(path), spec, read, mesh, axis, devices, tx)
        for (path, _), spec, read in zip(paths, specs, reads)
    ]
    chosen = _fit(found, device_bytes)
    return Plan(tuple(chosen), devices, device_bytes)


# ------------------------------------------------------------------ arguments


def _is_table(x: Any) -> bool:
    if isinstance(x, ShardedTable):
        return True
    return isinstance(x, tuple) and all(isinstance(n, int | np.integer) for n in x)


def _name(path: Any) -> str:
    return "tables" + jax.tree_util.keystr(path)


def _spec(name: str, table: Any) -> jax.ShapeDtypeStruct:
    if isinstance(table, tuple):
        if any(n < 0 for n in table):
            raise ValueError(
                f"{_CALL}: {name} must have a non-negative shape, got {table}."
            )
        table = jax.ShapeDtypeStruct(table, np.dtype(np.float32))
    if not (hasattr(table, "shape") and hasattr(table, "dtype")):
        raise TypeError(
            f"{_CALL}: {name} must be an array, a jax.ShapeDtypeStruct, a ShardedTable "
            f"or a shape as a tuple of ints, got {_arguments.kind_of(table)}."
        )
    if not table.shape:
        raise ValueError(
            f"{_CALL}: {name} must have at least one axis, its rows, got shape ()."
        )
    return jax.ShapeDtypeStruct(tuple(table.shape), table.dtype)


def _reads(batch: Any, treedef: Any, count: int) -> Sequence[Any]:
    """The number of ids or a sample, for each table."""
    if isinstance(batch, int | np.integer) or hasattr(batch, "dtype"):
        return [batch] * count
    try:
        return treedef.flatten_up_to(batch)
    except ValueError as error:
        raise ValueError(
            f"{_CALL}: batch must be a tree like tables: {error}"
        ) from None


# ------------------------------------------------------------------ one table


def _table_plan(
    name: str,
    spec: jax.ShapeDtypeStruct,
    read: Any,
    mesh: Any,
    axis: Any,
    devices: int,
    tx: Any,
) -> TablePlan:
    table = shard_rows(spec, mesh, axis)
    owners = Owners(mesh, table.axes, table.rows_per_shard)
    sample = _sample(name, read)
    here = -(-(read if sample is None else sample.size) // devices)
    if sample is None:
        distinct, capacity = min(here, spec.shape[0]), None
    else:
        distinct = _most_distinct(sample, devices, spec.shape[0])
        capacity = measure_capacity(table, sample, margin=1.0)
    capacity = owners.slots(here, capacity)
    costs = _costs(spec, devices, here, distinct, capacity, tx)
    choice = min(costs, key=lambda x: (costs[x].wire, costs[x].memory))
    dtype = np.dtype(spec.dtype).name
    return TablePlan(
        name, tuple(spec.shape), dtype, here, distinct, capacity, costs, choice
    )


def _sample(name: str, read: Any) -> np.ndarray | None:
    if hasattr(read, "dtype") and np.ndim(read):
        return np.asarray(
            _arguments.as_integers(_CALL, read, f"batch of {name}")
        ).reshape(-1)
    if isinstance(read, int | np.integer) and not isinstance(read, bool) and read >= 0:
        return None
    raise ValueError(
        f"{_CALL}: batch must be the number of ids per step (on all devices together) "
        "or a sample of ids as an integer array, either one for all tables or a tree "
        f"like tables; for {name} got {read!r}."
    )


def _most_distinct(sample: np.ndarray, devices: int, height: int) -> int:
    """The most distinct in-range ids on any device, with the sample sharded evenly."""
    here = -(-sample.size // devices)
    parts = [sample[k * here : (k + 1) * here] for k in range(devices)]
    kept = [part[(part >= 0) & (part < height)] for part in parts]
    return max(np.unique(part).size for part in kept)


def _costs(
    spec: jax.ShapeDtypeStruct,
    devices: int,
    ids: int,
    distinct: int,
    capacity: int,
    tx: Any,
) -> dict[str, Cost]:
    """The formulas in the module docstring, in whole bytes."""
    height, *content = spec.shape
    row = math.prod(content) * np.dtype(spec.dtype).itemsize
    id_bytes = 4 if height <= np.iinfo(np.int32).max else 8
    others = devices - 1
    like, aside = _state_bytes(spec, tx)
    whole = height * row + like + aside
    rows = math.ceil(height / devices)
    wires = {
        "row-sharded": 2 * others * capacity * (row + id_bytes),
        "column-sharded": others * (3 * id_bytes * ids + 2 * ids * row // devices),
        "replicated-sparse": others * distinct * (row + id_bytes),
        "replicated-dense": 2 * height * row * others // devices,
    }
    memory = {
        "row-sharded": whole * rows // max(height, 1),
        "column-sharded": (height * row + like) // devices + aside,
        "replicated-sparse": whole,
        "replicated-dense": whole,
    }
    if not content or content[-1] % devices:
        del wires["column-sharded"]
    return {layout: Cost(memory[layout], wire) for layout, wire in wires.items()}


def _state_bytes(spec: jax.ShapeDtypeStruct, tx: Any) -> tuple[int, int]:
    """Bytes of optimizer state with the table's shape, and with other shapes."""
    if tx is None:
        return 0, 0
    like = aside = 0
    for leaf in jax.tree.leaves(jax.eval_shape(tx.init, spec)):
        size = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        if leaf.shape == spec.shape:
            like += size
        elif leaf.shape[:1] == spec.shape[:1]:
            aside += size
    return like, aside


# ------------------------------------------------------------------ all tables


def _fit(tables: Sequence[TablePlan], budget: int | None) -> Sequence[TablePlan]:
    """Moves tables to layouts that need less memory, until all fit or none is left."""
    tables = list(tables)
    while budget is not None:
        over = sum(t.costs[t.choice].memory for t in tables) - budget
        if over <= 0:
            break
        moves = [
            (_price(t, layout, over), k, layout)
            for k, t in enumerate(tables)
            for layout in t.costs
            if t.costs[layout].memory < t.costs[t.choice].memory
        ]
        if not moves:
            break
        _, k, layout = min(moves)
        tables[k] = dataclasses.replace(tables[k], choice=layout)
    return tables


def _price(table: TablePlan, layout: str, over: int) -> float:
    """Additional bytes sent for each byte freed of the `over` that must be freed."""
    now, then = table.costs[table.choice], table.costs[layout]
    return (then.wire - now.wire) / min(over, now.memory - then.memory)


def _size(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _show_cost(cost: Cost | None) -> str:
    return "-" if cost is None else f"{_size(cost.memory)}, {_size(cost.wire)}"
