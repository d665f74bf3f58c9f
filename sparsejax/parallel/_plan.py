"""plan: chooses a layout for each table of a model, and puts the tables there.

`_costs` has the formulas, and `_plan_reads` finds what a step reads from each table.
"""

from __future__ import annotations

import dataclasses
import functools
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
from sparsejax.parallel._costs import Cost, cost_table_wise, costs_of, state_bytes
from sparsejax.parallel._layout import LAYOUTS, TableWise
from sparsejax.parallel._plan_reads import Read, reads_in_loss, reads_of_ids
from sparsejax.parallel._read import measure_capacity, owners_of
from sparsejax.parallel._table import (
    ShardedTable,
    can_send_in_16_bits,
    check_axis,
    check_has_devices,
    check_wire_dtype,
    names_of,
    shard_rows,
)


_MARGIN = 1.1
REPLICATED = "replicated-sparse", "replicated-dense"


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
      is_measured: True if duplicates and capacity were measured on a sample of ids.
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
    """The result of `plan`; prints as a table.

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
        return {table.name: table for table in self.tables}[name]

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
        """Places the parameters: each table as planned, all else replicated.

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
        leaves = self.treedef.flatten_up_to(params)
        tables = [None if k is None else self.tables[k] for k in self.places]
        placed = [self._place(x, table) for x, table in zip(leaves, tables)]
        return jax.tree.unflatten(self.treedef, placed)

    def _place(self, leaf: Any, table: TablePlan | None) -> Any:
        if table is not None and table.choice not in REPLICATED:
            return self._shard(leaf, table)
        if isinstance(leaf, ShardedTable):
            leaf = leaf.to_dense()
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
        check_has_devices(self.mesh)
        return jax.device_put(leaf, everywhere)

    def _shard(self, leaf: Any, table: TablePlan) -> Any:
        layout = table.groups.get(table.choice, LAYOUTS["mod"])
        if isinstance(leaf, ShardedTable):
            if table.choice == "row-sharded" and leaf.layout.is_arithmetic:
                return dataclasses.replace(leaf, wire_dtype=table.wire_dtype)
            leaf = leaf.to_dense()
        if table.choice == "column-sharded":
            return shard_columns(leaf, self.mesh, self.axis)
        is_measured = table.is_measured and table.choice == "row-sharded"
        return shard_rows(
            leaf,
            self.mesh,
            self.axis,
            layout=layout,
            capacity=math.ceil(_MARGIN * table.capacity) if is_measured else None,
            wire_dtype=table.wire_dtype,
        )

    def describe(self, *, bytes_per_second: float = 50e9) -> str:
        """Shows the plan as text: for each table its layout and its cost for a device.

        Args:
          bytes_per_second: the bandwidth of a device. The last column is the bytes of a
            step divided by it. The default is the bandwidth of a fast network.

        Returns:
          str, a line for each table: its shape, the ids that a device reads in a step
          and how many of them are distinct, its layout, the bytes of table and
          optimizer state on a device, the bytes it sends in a step, and their time.

        Example:
          >>> import jax, sparsejax as sj
          >>> mesh = jax.sharding.AbstractMesh((4,), ("x",))
          >>> plan = sj.parallel.plan({"user": (100_000, 32)}, mesh, 20_480)
          >>> plan.describe().splitlines()[2].split()[-7:]
          ['column-sharded', '3.2', 'MB', '1.17', 'MB', '23.3', 'us']
        """

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
        lines = [
            text,
            f"{self.num_devices} devices; memory and sent bytes are of one device",
        ]
        limit, need = self.device_bytes, self.total.memory
        if limit is not None and need > limit:
            lines.append(
                f"too large for any layout: {_size(need)} of {_size(limit)} on a device"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.describe()


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
    extra byte sent. docs/explain/exchange.md has the formulas. On a mesh of one device
    tables are replicated.

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
        It is initialized with the whole of `tables`, as labels and masks need it.
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
      `Plan`, which prints as a table. `plan.apply(params)` has the parameters on the
      devices, `plan.batch_sharding` the sharding for batches, and
      `plan[name].costs` the costs of the other layouts of a table.

    Raises:
      ValueError: there are no tables, `axis` is unknown, `batch` does not match
        `tables`, `layouts` or `stacks` name an unknown table or layout, or other
        numbers of rows, or `wire_dtype` is not bfloat16.

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
    axis = check_axis(mesh, mesh.axis_names if axis is None else axis)
    wire_dtype = check_wire_dtype(wire_dtype)
    find = reads_of_ids if loss is None else functools.partial(reads_in_loss, loss)
    leaves, treedef, names, reads = find(tables, batch)
    numbers = [k for k, read in enumerate(reads) if read is not None]
    if not numbers:
        raise ValueError(
            "sparsejax.parallel.plan: found no table. A table is a parameter that the "
            f"loss reads by rows only, got {_arguments.show_tree(tables)}."
        )
    state = state_bytes(leaves, treedef, tx, numbers)
    stacks = {_whole_name(name, names): rows for name, rows in (stacks or {}).items()}
    plans = [
        _table_plan(
            names[k],
            jax.ShapeDtypeStruct(leaves[k].shape, leaves[k].dtype),
            reads[k] or (),
            state[k],
            mesh,
            axis,
            stacks.get(names[k]),
            wire_dtype,
        )
        for k in numbers
    ]
    plans, fixed = _overrule(plans, layouts or {})
    if device_bytes is not None:
        plans = _fit(plans, fixed, device_bytes)
    places = [numbers.index(k) if k in numbers else None for k in range(len(leaves))]
    devices = math.prod(mesh.shape[name] for name in names_of(axis))
    return Plan(tuple(plans), devices, device_bytes, mesh, axis, treedef, tuple(places))


def _whole_name(given: str, names: Iterable[str]) -> str:
    """Returns the one table name that ends with the given key."""
    ends = str(given), f"[{given!r}]", f".{given}"
    matches = [name for name in names if name == given]
    matches = matches or [name for name in names if name.endswith(ends)]
    if len(matches) != 1:
        raise ValueError(
            f"sparsejax.parallel.plan: {given!r} must be the name of one table, or the "
            f"end of one name alone, but {len(matches)} of {', '.join(names)} match."
        )
    return matches[0]


# ------------------------------------------------------------------ one table


def _table_plan(
    name: str,
    spec: jax.ShapeDtypeStruct,
    reads: Sequence[Read],
    state: tuple[int, int],
    mesh: Any,
    axis: Any,
    heights: Sequence[int] | None,
    wire_dtype: Any,
) -> TablePlan:
    table = shard_rows(spec, mesh, axis)
    wire_dtype = wire_dtype if can_send_in_16_bits(spec.dtype) else None
    owners, height = owners_of(table), spec.shape[0]
    devices = owners.count
    here = sum(-(-read.count // devices) for read in reads)
    samples = [read.ids for read in reads if read.ids is not None]
    is_measured = len(samples) == len(reads)
    distinct, capacity = min(here, height), None
    if is_measured:
        distinct = _max_distinct(samples, devices, height)
        sizes = [
            measure_capacity(table, ids, margin=1.0) for ids in samples if ids.size
        ]
        capacity = max(sizes, default=1)
    slots = [owners.slots(-(-read.count // owners.devices), capacity) for read in reads]
    outputs = math.ceil(sum(read.count / read.length for read in reads) / devices)
    replicas = owners.devices // devices
    sent = sum(slots) * (2 * (devices - 1) + (replicas - 1) * devices)
    costs = costs_of(spec, devices, here, outputs, distinct, sent, state, wire_dtype)
    groups = {}
    if heights is not None:
        if sum(heights) != height:
            raise ValueError(
                "sparsejax.parallel.plan: stacks must have the numbers of rows of the "
                f"tables in {name}, {height} in all, got {tuple(heights)}."
            )
        sizes = {"table-wise": devices, "table-row-wise": mesh.shape[table.axes[0]]}
        if sizes["table-row-wise"] == devices:
            del sizes["table-row-wise"]
        is_float = jax.numpy.issubdtype(spec.dtype, np.floating)
        has_bags = is_float and all(read.length == int(read.length) for read in reads)
        for choice, count in sizes.items():
            if not has_bags or count < 2:
                continue
            layout, cost = cost_table_wise(
                spec, tuple(heights), reads, devices, count, state, wire_dtype
            )
            stored = devices * layout.per_shard(height, devices)
            if stored <= max(np.iinfo(np.int32).max, height):
                groups[choice], costs[choice] = layout, cost
    choice = min(costs, key=lambda name: (costs[name].wire, costs[name].memory))
    return TablePlan(
        name=name,
        shape=spec.shape,
        dtype=np.dtype(spec.dtype).name,
        ids=here,
        distinct=distinct,
        capacity=max(slots),
        costs=costs,
        choice=choice if devices > 1 else "replicated-sparse",
        is_measured=is_measured,
        groups=groups,
        wire_dtype=wire_dtype,
    )


def _max_distinct(samples: Sequence[np.ndarray], devices: int, height: int) -> int:
    """Returns the most distinct in-range ids of a device; shards samples evenly."""

    def part(sample, k):
        here = -(-sample.size // devices)
        return sample[k * here : (k + 1) * here]

    parts = [np.concatenate([part(s, k) for s in samples]) for k in range(devices)]
    kept = [part[(part >= 0) & (part < height)] for part in parts]
    return max(np.unique(part).size for part in kept)


# ------------------------------------------------------------------ all tables


def _overrule(
    tables: Sequence[TablePlan], layouts: Mapping[str, str]
) -> tuple[Sequence[TablePlan], dict[str, str]]:
    """Gives the tables the layouts in `layouts`; also returns these by whole name."""
    by_name = {table.name: table for table in tables}
    chosen: dict[str, str] = {}
    for given, layout in layouts.items():
        name = _whole_name(given, by_name)
        if layout not in by_name[name].costs:
            raise ValueError(
                f"sparsejax.parallel.plan: the layout of {name} must be one of "
                f"{', '.join(by_name[name].costs)}, got {layout!r}. Columns must be a "
                "multiple of the devices; table-wise layouts need stacks=, several "
                "devices, and reads of single ids or bags of one length."
            )
        chosen[name] = layout
    change = lambda t: dataclasses.replace(t, choice=chosen.get(t.name, t.choice))
    return [change(table) for table in tables], chosen


def _fit(
    tables: Sequence[TablePlan], fixed: Mapping[str, str], budget: int
) -> Sequence[TablePlan]:
    """Moves tables to layouts that need less memory, until all fit or none can move."""
    tables = list(tables)
    while (over := sum(t.costs[t.choice].memory for t in tables) - budget) > 0:
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
    """Returns extra bytes sent per byte freed, of the `over` that must be freed."""
    now, then = table.costs[table.choice], table.costs[layout]
    return (then.wire - now.wire) / min(over, now.memory - then.memory)


def _show_shape(table: TablePlan) -> str:
    return f"{table.dtype}[{','.join(map(str, table.shape))}]"


def _size(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
