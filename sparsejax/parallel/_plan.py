"""plan: chooses a layout for each table of a model, and puts the tables there.

`_costs` has the formulas, and `_plan_reads` finds what a step reads from each table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax.parallel._columns import shard_columns
from sparsejax.parallel._costs import Cost, cost_table_wise, costs_of
from sparsejax.parallel._layout import TableWise
from sparsejax.parallel._plan_reads import Read, reads_in_loss
from sparsejax.parallel._read import measure_capacity, owners_of
from sparsejax.parallel._table import (
    ShardedTable,
    can_send_in_16_bits,
    check_axis,
    check_has_devices,
    check_wire_dtype,
    shard_rows,
)


_CALL = "sparsejax.parallel.plan"
_MARGIN = 1.1
LAYOUTS = (
    "row-sharded",
    "column-sharded",
    "table-wise",
    "table-row-wise",
    "replicated-sparse",
    "replicated-dense",
)


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """The layouts of one table, their costs and the choice.

    Args:
      name: the path of the table, for example `tables['user']`.
      shape, dtype: of the table.
      ids: the number of ids per device and step.
      distinct: the most distinct ids of any device in the sample; `ids` without one.
      capacity: of the ShardedTable, if row-sharded.
      costs: by layout, without layouts that the shape does not allow.
      choice: the recommended layout, or the layout in `layouts=`.
      is_measured: whether duplicates and capacity were measured on a sample of ids.
      groups: for the layouts of a stack of tables, which devices have which table.
      wire_dtype: of the ShardedTable, None for the dtype of the table.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    ids: int
    distinct: int
    capacity: int
    costs: Mapping[str, Cost]
    choice: str
    is_measured: bool = False
    groups: Mapping[str, TableWise] = dataclasses.field(default_factory=dict)
    wire_dtype: DTypeLike | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The result of `plan`; prints as a table, with all layouts.

    Args:
      tables: a `TablePlan` for each table.
      num_devices: N.
      device_bytes: the bytes that each device has for tables; None for no limit.
      mesh: the mesh.
      axis: the mesh axis, or axes, that tables and batch are sharded over.
      treedef: the structure of the parameters.
      places: for each of their leaves its number among `tables`, or None.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> params = {"items": jnp.ones((100, 4)), "w": jnp.ones(4)}
      >>> loss_fn = lambda params, ids: jnp.sum(params["items"][ids] @ params["w"])
      >>> layouts = {"params['items']": "row-sharded"}
      >>> ids = jnp.array([3, 5])
      >>> plan = sj.parallel.plan(params, mesh, ids, loss=loss_fn, layouts=layouts)
      >>> plan.apply(params)["items"]
      ShardedTable(float32[100, 4], 1 x 100 rows over 'x', layout='mod')
    """

    tables: tuple[TablePlan, ...]
    num_devices: int
    device_bytes: int | None
    mesh: Any
    axis: Any
    treedef: Any
    places: tuple[int | None, ...]

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

    @property
    def batch_sharding(self) -> NamedSharding:
        """How batches are sharded: their first axis, over the devices of `axis`."""
        return NamedSharding(self.mesh, PartitionSpec(self.axis))

    def apply(self, params: PyTree) -> Any:
        """The parameters on the devices: each table as planned, all else replicated.

        A row-sharded table becomes a `ShardedTable`, which the model reads as it reads
        an array; with a tenth more than the capacity that was measured, since batches
        differ. Other leaves remain arrays. Make the optimizer's state of the result:
        `tx.init(plan.apply(params))`, which is then laid out like the tables.

        Args:
          params: a tree like the one that was planned: of arrays (NumPy's are cut on
            the host), or of `jax.ShapeDtypeStruct`.

        Returns:
          The tree with other leaves.

        Raises:
          ValueError: `params` is another tree, or the mesh is abstract and an array is
            not.
        """
        is_leaf = lambda x: _is_table(x) and x != ()
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_leaf)
        if treedef != self.treedef:
            raise ValueError(
                f"{_CALL}: apply needs a tree like the one that was planned, "
                f"{self.treedef}, got {treedef}."
            )
        tables = [None if k is None else self.tables[k] for k in self.places]
        placed = [self._place(x, table) for x, table in zip(leaves, tables)]
        return jax.tree.unflatten(treedef, placed)

    def _place(self, leaf: Any, table: TablePlan | None) -> Any:
        layout = "replicated" if table is None else table.choice
        wire_dtype = None if table is None else table.wire_dtype
        if isinstance(leaf, tuple):  # a shape, of float32
            leaf = jax.ShapeDtypeStruct(leaf, np.dtype(np.float32))
        if isinstance(leaf, ShardedTable):
            if layout == "row-sharded" and not isinstance(leaf.layout, TableWise):
                return dataclasses.replace(leaf, wire_dtype=wire_dtype)
            leaf = leaf.to_dense()
        if table is not None and layout in table.groups:
            by_table = table.groups[layout]
            return shard_rows(
                leaf, self.mesh, self.axis, layout=by_table, wire_dtype=wire_dtype
            )
        if layout == "row-sharded":
            capacity = None
            if table is not None and table.is_measured:
                capacity = math.ceil(_MARGIN * table.capacity)
            return shard_rows(
                leaf, self.mesh, self.axis, capacity=capacity, wire_dtype=wire_dtype
            )
        if layout == "column-sharded":
            return shard_columns(leaf, self.mesh, self.axis)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
        check_has_devices(_CALL, self.mesh)
        return jax.device_put(leaf, everywhere)

    def describe(self, *, bytes_per_second: float = 50e9) -> str:
        """The plan as text: for each table its layout and its cost for a device.

        Args:
          bytes_per_second: the bandwidth of a device. The last column is the bytes of a
            step divided by it. The default is the bandwidth of a fast network.

        Returns:
          str, a line for each table: its shape, the ids that a device reads in a step
          and how many of them are distinct, its layout, the bytes of table and
          optimizer state on a device, the bytes it sends in a step, and their time.

        Raises:
          TypeError: `bytes_per_second` is not a number.
          ValueError: `bytes_per_second` is not positive.

        Example:
          >>> import jax, sparsejax as sj
          >>> mesh = jax.sharding.AbstractMesh((4,), ("x",))
          >>> plan = sj.parallel.plan({"user": (100_000, 32)}, mesh, 20_480)
          >>> plan.describe().splitlines()[2].split()[-7:]
          ['column-sharded', '3.2', 'MB', '1.17', 'MB', '23.3', 'us']
        """
        is_number = isinstance(bytes_per_second, int | float | np.number)
        if not is_number or not bytes_per_second > 0:
            raise (_arguments.wrong if is_number else _arguments.wrong_type)(
                f"{_CALL}(...).describe",
                "bytes_per_second",
                "a positive number",
                repr(bytes_per_second),
            )

        def cells(cost):
            time = f"{1e6 * cost.wire / bytes_per_second:,.1f} us"
            return _size(cost.memory), _size(cost.wire), time

        head = ("table", "shape", "ids", "distinct", "layout", "memory", "sent", "time")
        rows = [
            (
                table.name,
                _show_shape(table),
                f"{table.ids:,}",
                f"{table.distinct:,}" if table.is_measured else "-",
                table.choice,
                *cells(table.costs[table.choice]),
            )
            for table in self.tables
        ]
        rows.append(("total", "", "", "", "", *cells(self.total)))
        text = _arguments.show_table([head, *rows], right=(2, 3, 5, 6, 7))
        return "\n".join([text, self._last_lines()])

    def _last_lines(self) -> str:
        line = f"{self.num_devices} devices; memory and sent bytes are of one device"
        limit, need = self.device_bytes, self.total.memory
        if limit is None or need <= limit:
            return line
        return (
            f"{line}\ntoo large for any layout: {_size(need)} of {_size(limit)} on a "
            "device"
        )

    def __repr__(self) -> str:
        layouts = [x for x in LAYOUTS if any(x in t.costs for t in self.tables)]
        head = ("table", "shape", "ids", "distinct", *layouts, "choice")
        rows = []
        for table in self.tables:
            cells = [_show_cost(table.costs.get(layout)) for layout in layouts]
            counts = f"{table.ids:,}", f"{table.distinct:,}"
            rows.append((table.name, _show_shape(table), *counts, *cells, table.choice))
        blank = [""] * (len(head) - 2)
        rows.append(("total", *blank, _show_cost(self.total)))
        text = _arguments.show_table([head, *rows], right=range(2, len(head) - 1))
        return "\n".join([text, self._last_lines()])


def plan(
    tables: PyTree,
    mesh: Mesh | AbstractMesh,
    batch: PyTree,
    *,
    axis: str | Sequence[str] | None = None,
    tx: optax.GradientTransformation | None = None,
    device_bytes: int | None = None,
    loss: Callable[..., Any] | None = None,
    layouts: Mapping[str, str] | None = None,
    stacks: Mapping[str, Sequence[int]] | None = None,
    wire_dtype: DTypeLike | None = None,
) -> Plan:
    """Estimates the cost of each layout of each table, and chooses a layout for each.

    With `loss`, the tables are found among all parameters of a model, and `plan.apply`
    puts the parameters on the devices as planned. The model stays as it is::

        plan = sj.parallel.plan(params, mesh, batch, loss=loss_fn)
        params = plan.apply(params)
        state = tx.init(params)

    It chooses the layout that sends the fewest bytes and, among equals, the one that
    needs the least memory. If the tables do not fit into `device_bytes`, some get
    layouts that need less memory, starting with those that free the most memory per
    extra byte sent. docs/scaling.md has the formulas. On a mesh of one device tables
    are replicated.

    Args:
      tables: a tree of arrays, `jax.ShapeDtypeStruct`, ShardedTables, or shapes as
        tuples of ints (of float32); with `loss`, all parameters of the model.
      mesh: the mesh, or an `AbstractMesh`. Make its axes Auto: over Explicit ones JAX
        itself reads no column-sharded or replicated table at ids that are sharded.
      batch: for each table, the reads of a step on all devices together: the number of
        ids, or a sample of ids, with measured duplicates and skew (ideally the ids of a
        whole step, in order). A tree like `tables`, in which None
        means that a leaf is not a table, or one value for all tables. With `loss`, a
        batch of all devices together, of arrays or `jax.ShapeDtypeStruct`; ids of
        arrays are measured.
      axis: name of the mesh axis that tables and batch are sharded over, or a tuple of
        names; None for all axes.
      tx: the optax transformation, whose state also takes memory; None for no state.
      device_bytes: int, the bytes that each device has for tables and their state; None
        for no limit.
      loss: function `loss(params, batch)` that returns a scalar, or a tuple that begins
        with one. It is traced, not run. Tables are the parameters that it reads by
        rows and uses in no other way, as `sparsejax.explain` shows them.
      layouts: by the name of a table, as the plan prints it, or the end of it, a layout
        to use instead of the recommended one: `"row-sharded"`, `"column-sharded"`,
        `"table-wise"`, `"table-row-wise"`, `"replicated-sparse"` or
        `"replicated-dense"`.
      stacks: for stacks of tables, the number of rows of each of their tables, by the
        name of the stack or the end of it: `EmbeddingCollection.heights()`. Only these
        can be sharded table by table. The cost counts single ids and bags of a fixed
        length, which the owners sum.
      wire_dtype: as in `shard_rows`, for the tables that are sharded by rows or table
        by table. Tables of float16 and of integers are sent in their own dtype.

    Returns:
      `Plan`, which prints as a table. `plan.describe()` has a line for each table with
      its layout only, `plan.apply(params)` the parameters on the devices, and
      `plan.batch_sharding` the sharding for batches.

    Raises:
      TypeError: `mesh`, a table, `tx`, `loss`, `device_bytes`, `layouts`, `stacks` or
        `wire_dtype` has the wrong type.
      ValueError: there are no tables, a table is a scalar or has a negative shape,
        `axis` is unknown, `batch` does not match `tables`, `layouts` or `stacks` name
        an unknown table or layout, or other numbers of rows, or `wire_dtype` is not
        bfloat16.

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
    wire_dtype = check_wire_dtype(_CALL, wire_dtype)
    if tx is not None and not callable(getattr(tx, "init", None)):
        raise _arguments.wrong_type(
            _CALL, "tx", "an optax transformation or None", repr(tx)
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
    if loss is None:
        named, treedef = jax.tree_util.tree_flatten_with_path(tables, is_leaf=_is_table)
        names, leaves = [_name(path) for path, _ in named], [leaf for _, leaf in named]
        given = _reads(batch, treedef, len(leaves))
        specs = [
            None if r is None else _spec(name, leaf)
            for name, leaf, r in zip(names, leaves, given)
        ]
        reads = [r if r is None else _as_reads(n, r) for n, r in zip(names, given)]
    else:
        leaves, treedef, names, reads = reads_in_loss(_CALL, loss, tables, batch)
        specs = [_spec(name, leaf) for name, leaf in zip(names, leaves)]
    numbers = [k for k, read in enumerate(reads) if read is not None]
    if not numbers:
        raise ValueError(
            f"{_CALL}: tables must contain at least one table, got "
            f"{_arguments.show_tree(tables)}."
            + ("" if loss is None else " The loss reads none of them by rows only.")
        )
    rows = {names[k]: spec.shape[0] for k, spec in enumerate(specs) if spec is not None}
    heights = _heights(rows, stacks or {})
    found = [
        _table_plan(
            names[k],
            specs[k],
            reads[k] or (),
            mesh,
            axis,
            tx,
            heights.get(names[k]),
            wire_dtype,
        )
        for k in numbers
    ]
    chosen = _fit(*_overrule(found, layouts or {}), device_bytes)
    places = [numbers.index(k) if k in numbers else None for k in range(len(leaves))]
    return Plan(
        tuple(chosen), devices, device_bytes, mesh, axis, treedef, tuple(places)
    )


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
        raise _arguments.wrong_type(
            _CALL,
            name,
            (
                "an array, a jax.ShapeDtypeStruct, a ShardedTable or a shape as "
                "a tuple of ints"
            ),
            _arguments.kind_of(table),
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


def _heights(
    tables: Mapping[str, int], stacks: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """The numbers of rows of the tables in each stack, by its whole name."""
    found = {}
    if not isinstance(stacks, Mapping):
        raise _arguments.wrong_type(
            _CALL,
            "stacks",
            (
                "a dict of heights by the names of stacks, as "
                "EmbeddingCollection.heights() returns it"
            ),
            repr(stacks),
        )
    for given, heights in stacks.items():
        name = _whole_name(given, tables, "stacks")
        is_list = isinstance(heights, Sequence | np.ndarray)
        if not is_list or not all(isinstance(n, int | np.integer) for n in heights):
            raise TypeError(
                f"{_CALL}: stacks must have a list of ints for each stack, the numbers "
                f"of rows of its tables; for {name} got {heights!r}."
            )
        if sum(heights) != tables[name]:
            raise ValueError(
                f"{_CALL}: stacks must have the numbers of rows of the tables in "
                f"{name}, {tables[name]} in all, got {tuple(heights)}."
            )
        found[name] = tuple(map(int, heights))
    return found


def _whole_name(given: Any, names: Iterable[str], argument: str) -> str:
    """The one table name that ends with the given key."""
    ends = str(given), f"[{given!r}]", f".{given}"
    found = [name for name in names if name == given]
    found = found or [name for name in names if name.endswith(ends)]
    if len(found) != 1:
        raise ValueError(
            f"{_CALL}: {argument} must name one table each, got {given!r}, the end of "
            f"{len(found)} of the names {', '.join(names)}. Pass a whole name, or an "
            "end that one name alone has."
        )
    return found[0]


# ------------------------------------------------------------------ one table


def _table_plan(
    name: str,
    spec: Any,
    reads: Sequence[Read],
    mesh: Any,
    axis: Any,
    tx: Any,
    heights: tuple[int, ...] | None,
    wire_dtype: Any,
) -> TablePlan:
    table = shard_rows(spec, mesh, axis)
    wire_dtype = wire_dtype if can_send_in_16_bits(spec.dtype) else None
    owners = owners_of(table)
    devices = owners.count
    each = [-(-read.count // devices) for read in reads]
    here = sum(each)
    samples = [read.ids for read in reads if read.ids is not None]
    if len(samples) < len(reads):
        distinct, capacity = min(here, spec.shape[0]), None
    else:
        distinct = _max_distinct(samples, devices, spec.shape[0])
        measure = lambda ids: measure_capacity(table, ids, margin=1.0)
        capacity = max((measure(ids) for ids in samples if ids.size), default=1)
    slots = [owners.slots(-(-read.count // owners.devices), capacity) for read in reads]
    outputs = math.ceil(sum(read.count / read.length for read in reads) / devices)
    replicas = owners.devices // devices
    sent = sum(slots) * (2 * (devices - 1) + (replicas - 1) * devices)
    costs = costs_of(spec, devices, here, outputs, distinct, sent, tx, wire_dtype)
    groups = {}
    is_float = jax.numpy.issubdtype(spec.dtype, np.floating)
    if heights and is_float and all(read.length == int(read.length) for read in reads):
        sizes = {"table-wise": devices, "table-row-wise": mesh.shape[table.axes[0]]}
        for layout, count in sizes.items():
            if count < 2 or (layout == "table-row-wise" and count == devices):
                continue
            by_table, cost = cost_table_wise(
                spec, heights, reads, devices, count, tx, wire_dtype
            )
            held = by_table.per_shard(spec.shape[0], devices)
            if devices * held <= max(np.iinfo(np.int32).max, spec.shape[0]):
                groups[layout], costs[layout] = by_table, cost
    choice = min(costs, key=lambda name: (costs[name].wire, costs[name].memory))
    if devices == 1:
        choice = "replicated-sparse"
    dtype, measured = np.dtype(spec.dtype).name, capacity is not None
    shape = tuple(spec.shape)
    most = max(slots)
    return TablePlan(
        name,
        shape,
        dtype,
        here,
        distinct,
        most,
        costs,
        choice,
        measured,
        groups,
        wire_dtype,
    )


def _as_reads(name: str, read: Any) -> list[Read]:
    if hasattr(read, "dtype") and np.ndim(read):
        ids = _arguments.as_integers(read, f"batch of {name}")
        return [Read(ids.size, np.asarray(ids).reshape(-1))]
    if isinstance(read, int | np.integer) and not isinstance(read, bool) and read >= 0:
        return [Read(int(read))]
    raise ValueError(
        f"{_CALL}: batch must be the number of ids per step (on all devices together) "
        "or a sample of ids as an integer array, either one for all tables or a tree "
        f"like tables; for {name} got {read!r}."
    )


def _max_distinct(samples: Sequence[np.ndarray], devices: int, height: int) -> int:
    """The most distinct in-range ids on any device, with samples sharded evenly."""

    def part(sample, k):
        here = -(-sample.size // devices)
        return sample.reshape(-1)[k * here : (k + 1) * here]

    parts = [np.concatenate([part(s, k) for s in samples]) for k in range(devices)]
    kept = [part[(part >= 0) & (part < height)] for part in parts]
    return max(np.unique(part).size for part in kept)


# ------------------------------------------------------------------ all tables


def _overrule(
    tables: Sequence[TablePlan], layouts: Mapping[str, str]
) -> tuple[Sequence[TablePlan], dict[str, str]]:
    """The tables with the layouts in `layouts`, and these layouts by whole name."""
    known = {table.name: table for table in tables}
    if not isinstance(layouts, Mapping):
        raise _arguments.wrong_type(
            _CALL, "layouts", "a dict of layouts by the names of tables", repr(layouts)
        )
    chosen: dict[str, str] = {}
    for given, layout in layouts.items():
        name = _whole_name(given, known, "layouts")
        if name in chosen:
            raise ValueError(
                f"{_CALL}: layouts must name each table once, but {given!r} is {name}, "
                f"which already has {chosen[name]!r}."
            )
        if layout not in known[name].costs:
            raise ValueError(
                f"{_CALL}: the layout of {name} must be one of "
                f"{', '.join(map(repr, known[name].costs))}, got {layout!r}."
                f"{_why(layout)}"
            )
        chosen[name] = layout
    return [
        dataclasses.replace(table, choice=chosen.get(table.name, table.choice))
        for table in tables
    ], chosen


def _why(layout: str) -> str:
    """Returns why a table cannot have the layout; empty for an unknown layout."""
    if layout in ("table-wise", "table-row-wise"):
        return (
            " Only stacks of floats named in stacks= can be sharded table by table, if "
            "they are read by single ids and bags of a fixed length, on several "
            'devices ("table-row-wise": along several mesh axes).'
        )
    if layout == "column-sharded":
        return " Columns must be a multiple of the number of devices."
    return ""


def _fit(
    tables: Sequence[TablePlan], fixed: Mapping[str, str], budget: int | None
) -> Sequence[TablePlan]:
    """Moves tables to layouts that need less memory, until all fit or none can move."""
    tables = list(tables)
    while budget is not None:
        over = sum(t.costs[t.choice].memory for t in tables) - budget
        if over <= 0:
            break
        moves = [
            (_price(t, layout, over), k, layout)
            for k, t in enumerate(tables)
            if t.name not in fixed
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


def _show_shape(table: TablePlan) -> str:
    return f"{table.dtype}[{','.join(map(str, table.shape))}]"


def _size(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _show_cost(cost: Cost | None) -> str:
    return "-" if cost is None else f"{_size(cost.memory)}, {_size(cost.wire)}"
