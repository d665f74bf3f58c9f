"""plan: chooses a layout for each table of a model, and puts the tables there.

The loss is traced: its reads of rows are the tables' reads, and the program of their
ids, run on a batch, counts duplicates and skew. `_costs` has the formulas.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax._lookup.lookup import lookup
from sparsejax.parallel._columns import shard_columns
from sparsejax.parallel._costs import (
    Cost,
    Read,
    cost_table_wise,
    costs_of,
    state_bytes,
)
from sparsejax.parallel._read import distinct_ids, max_requested, owners_of
from sparsejax.parallel._table import (
    ShardedTable,
    can_send_in_16_bits,
    check_axis,
    check_has_devices,
    check_wire_dtype,
    names_of,
    shard_rows,
)
from sparsejax.transform.forward import ids_program
from sparsejax.transform.plan import find_tables
from sparsejax.transform.trace import trace_call


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
    is_measured: bool
    wire_dtype: DTypeLike | None

    @property
    def cost(self) -> Cost:
        """The cost of the choice."""
        return self.costs[self.choice]


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The result of `plan`; prints as a table.

    Args:
      leaves: for each parameter the `TablePlan` if it is a table, otherwise None.
      treedef: the structure of the parameters.
      mesh: the mesh.
      axis: the mesh axis, or axes, that tables and batch are sharded over.
      device_bytes: the bytes that each device has for tables; None for no limit.

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

    leaves: tuple[TablePlan | None, ...]
    treedef: Any
    mesh: Any
    axis: Any
    device_bytes: int | None

    @property
    def tables(self) -> tuple[TablePlan, ...]:
        """The `TablePlan` of each table."""
        return tuple(leaf for leaf in self.leaves if leaf is not None)

    def __getitem__(self, name: str) -> TablePlan:
        return {table.name: table for table in self.tables}[name]

    @property
    def total(self) -> Cost:
        """The cost per device of all tables in their recommended layouts."""
        chosen = [table.cost for table in self.tables]
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
        placed = [self._place(x, table) for x, table in zip(leaves, self.leaves)]
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
        by_rows = table.choice == "row-sharded"
        if isinstance(leaf, ShardedTable):
            if by_rows and leaf.layout.is_arithmetic:
                return dataclasses.replace(leaf, wire_dtype=table.wire_dtype)
            leaf = leaf.to_dense()
        if table.choice == "column-sharded":
            return shard_columns(leaf, self.mesh, self.axis)
        return shard_rows(
            leaf,
            self.mesh,
            self.axis,
            layout=table.cost.layout or "mod",
            # A tenth more than measured, since batches differ.
            capacity=math.ceil(1.1 * table.capacity)
            if table.is_measured and by_rows
            else None,
            wire_dtype=table.wire_dtype,
        )

    def __repr__(self) -> str:
        head = ("table", "shape", "ids", "distinct", "layout", "memory", "sent")
        rows = [
            (
                table.name,
                f"{table.dtype}[{','.join(map(str, table.shape))}]",
                f"{table.ids:,}",
                f"{table.distinct:,}" if table.is_measured else "-",
                table.choice,
                _size(table.cost.memory),
                _size(table.cost.wire),
            )
            for table in self.tables
        ]
        limit, need = self.device_bytes, self.total.memory
        rows.append(("total", "", "", "", "", _size(need), _size(self.total.wire)))
        text = _arguments.show_table([head, *rows], right=(2, 3, 5, 6))
        devices = math.prod(self.mesh.shape[name] for name in names_of(self.axis))
        text += f"\n{devices} devices; memory and sent bytes are of one device"
        if limit is not None and need > limit:
            text += (
                f"\ntoo large for any layout: {_size(need)} of {_size(limit)} on a "
                "device"
            )
        return text


def plan(
    params: PyTree,
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

    The tables are found among all parameters of a model, and `plan.apply` puts the
    parameters on the devices as planned. The model stays as it is::

        plan = sj.parallel.plan(params, mesh, batch, loss=loss_fn)
        params = plan.apply(params)
        state = tx.init(params)

    It chooses the layout that sends the fewest bytes and, among equals, the one that
    needs the least memory. If the tables do not fit into `device_bytes`, some get
    layouts that need less memory, starting with those that free the most memory per
    extra byte sent. docs/explain/exchange.md has the formulas. On a mesh of one device
    tables are replicated.

    Args:
      params: all parameters of the model: arrays, `jax.ShapeDtypeStruct` or
        ShardedTables.
      mesh: the mesh, or an `AbstractMesh`. Make its axes Auto: over Explicit ones JAX
        itself reads no column-sharded or replicated table at ids that are sharded.
      batch: a batch of all devices together, of arrays or `jax.ShapeDtypeStruct`.
        Duplicates and skew of the ids of arrays are measured: pass a whole batch, in
        order.
      axis: name of the mesh axis that tables and batch are sharded over, or a tuple of
        names; None for all axes.
      tx: the optax transformation, whose state also takes memory; None for no state.
        It is initialized with the whole of `params`, as labels and masks need it.
      device_bytes: int, the bytes that each device has for tables and their state; None
        for no limit.
      loss: function `loss(params, batch)` that returns a scalar, or a tuple that begins
        with one. It is traced, not run. Tables are the parameters that it reads by
        rows and uses in no other way, as `sparsejax.explain` shows them. None if
        `batch` is a tree like `params` with the ids that each of these tables is read
        at.
      layouts: by the name of a table, as the plan prints it, or the end of it, a layout
        to use instead of the recommended one: `"row-sharded"`, `"column-sharded"`,
        `"table-wise"`, `"table-row-wise"`, `"replicated-sparse"` or
        `"replicated-dense"`.
      stacks: for stacks of tables, the number of rows of each of their tables, by the
        name of the stack or the end of it: `EmbeddingCollection.heights()`. Only these
        can be sharded table by table. The cost counts single ids and bags of a fixed
        length, which the owners sum.
      wire_dtype: as in `shard_rows`, for the tables that are sharded by rows or table
        by table. Tables of float16 are sent in their own dtype.

    Returns:
      `Plan`, which prints as a table. `plan.apply(params)` has the parameters on the
      devices, `plan.batch_sharding` the sharding for batches, and
      `plan[name].costs` the costs of the other layouts of a table.

    Raises:
      ValueError: there are no tables, `axis` is unknown, `layouts` or `stacks` name an
        unknown table or layout, or other numbers of rows, or `wire_dtype` is not
        bfloat16.

    Example:
      >>> import jax, numpy as np, sparsejax as sj
      >>> mesh = jax.sharding.AbstractMesh((4,), ("x",))
      >>> spec = lambda height: jax.ShapeDtypeStruct((height, 32), np.float32)
      >>> tables = {"user": spec(100_000), "country": spec(200)}
      >>> ids = {"user": np.arange(20_480) // 4, "country": np.arange(20_480) % 200}
      >>> plan = sj.parallel.plan(tables, mesh, ids)
      >>> plan["params['user']"].choice, plan["params['country']"].choice
      ('row-sharded', 'replicated-dense')
      >>> plan["params['user']"].costs["replicated-dense"].wire
      19200000

    References:
      TorchRec, `EmbeddingShardingPlanner`.
    """
    axis = check_axis(mesh, mesh.axis_names if axis is None else axis)
    wire_dtype = check_wire_dtype(wire_dtype)
    if loss is None:
        # On the host, since ids may be sharded over Explicit axes.
        on_host = lambda x: np.asarray(x) if isinstance(x, jax.Array) else x
        loss, batch = _look_up_all, jax.tree.map(on_host, batch)
    traced, reads = _reads_in(loss, params, batch)
    leaves = [leaf.value for leaf in traced.leaves]
    tables = {traced.leaves[k].name: k for k, read in enumerate(reads) if read}
    if not tables:
        raise ValueError(
            "sparsejax.parallel.plan: found no table. A table is a parameter that the "
            f"loss reads by rows only, got {_arguments.show_tree(params)}."
        )
    state = state_bytes(leaves, traced.tree, tx, list(tables.values()))
    layouts = {_whole_name(name, tables): x for name, x in (layouts or {}).items()}
    stacks = {_whole_name(name, tables): x for name, x in (stacks or {}).items()}
    plans = {}
    for name, k in tables.items():
        spec = jax.ShapeDtypeStruct(leaves[k].shape, leaves[k].dtype)
        wire = wire_dtype if can_send_in_16_bits(spec.dtype) else None
        table = shard_rows(spec, mesh, axis, wire_dtype=wire)
        options = stacks.get(name), layouts.get(name)
        plans[name] = _table_plan(name, table, reads[k], state[k], *options)
    if device_bytes is not None:
        _fit(plans, layouts, device_bytes)
    by_leaf = tuple(plans.get(leaf.name) for leaf in traced.leaves)
    return Plan(by_leaf, traced.tree, mesh, axis, device_bytes)


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


# ------------------------------------------------------------------ reads


def _look_up_all(tables: PyTree, ids: PyTree) -> jax.Array:
    """Stands for the loss of a model that reads these tables at these ids."""

    def read(table, ids):
        rows = lookup(table, ids, mode="zero")
        return jnp.sum(jnp.abs(rows)).astype(jnp.float32)

    return sum(jax.tree.leaves(jax.tree.map(read, tables, ids)), jnp.zeros(()))


def _reads_in(loss: Callable[..., Any], params: PyTree, batch: PyTree) -> Any:
    """Traces `loss(params, batch)` and finds the parameters that it reads by rows.

    Returns:
      The traced call; and for each leaf of `params` its reads, none if it is no table.
    """
    first = lambda out: out[0] if isinstance(out, tuple) else out
    fun = lambda params, batch: first(loss(params, batch))
    is_sharded = lambda x: isinstance(x, ShardedTable)
    as_array = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_sharded(x) else x
    params = jax.tree.map(as_array, params, is_leaf=is_sharded)
    traced = trace_call(fun, 0, False, None, (params, batch), {})
    found = find_tables(traced)
    by_input: dict[int, list[Read]] = {leaf.position: [] for leaf in found.tables}
    ids = _ids_of(found) or [None] * len(found.run.sites)
    for site, own_ids in zip(found.run.sites, ids):
        if site.num_rows:
            by_input[site.table].append(Read(site.num_rows, own_ids, site.per_output))
    return traced, [by_input.get(leaf.position, []) for leaf in traced.leaves]


def _ids_of(found: Any) -> list[np.ndarray] | None:
    """Returns the ids of each read, or None if they depend on abstract inputs.

    Only the equations that make ids are run, so that tables may be abstract.
    """
    inputs = found.call.flat.inputs
    deltas = jax.eval_shape(found.zero_deltas)
    program = ids_program(found.walk, deltas, inputs)
    inputs = [x for x, needed in zip(inputs, program.needs_input) if needed]
    values = *program.consts, *inputs
    if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in values):
        return None
    zeros = [
        jnp.zeros(x.shape, x.dtype)
        for x, needed in zip(deltas, program.needs_delta)
        if needed
    ]
    return [np.asarray(x) for x in jax.jit(program.run)(zeros, inputs)]


# ------------------------------------------------------------------ one table


def _table_plan(
    name: str,
    table: ShardedTable,
    reads: Sequence[Read],
    state: tuple[int, int],
    heights: Sequence[int] | None,
    layout: str | None,
) -> TablePlan:
    owners, height = owners_of(table), table.height
    devices = owners.count
    here = sum(-(-read.count // devices) for read in reads)
    samples = [read.ids for read in reads if read.ids is not None]
    distinct, capacity = min(here, height), None
    if samples:
        distinct = max(x.size for x in distinct_ids(samples, devices, height))
        capacity = max(1, *(max_requested(table, ids) for ids in samples))
    slots = [owners.slots(-(-read.count // owners.devices), capacity) for read in reads]
    outputs = math.ceil(sum(read.count / read.length for read in reads) / devices)
    replicas = owners.devices // devices
    sent = sum(slots) * (2 * (devices - 1) + (replicas - 1) * devices)
    costs = costs_of(table, here, outputs, distinct, sent, state)
    if heights is not None:
        if sum(heights) != height:
            raise ValueError(
                "sparsejax.parallel.plan: stacks must have the numbers of rows of the "
                f"tables in {name}, {height} in all, got {tuple(heights)}."
            )
        groups = {"table-wise": devices}
        if (hosts := table.mesh.shape[table.axes[0]]) != devices:
            groups["table-row-wise"] = hosts
        is_float = jnp.issubdtype(table.dtype, jnp.floating)
        has_bags = is_float and all(x.length == int(x.length) for x in reads)
        for choice, count in groups.items():
            if has_bags and count > 1:
                cost = cost_table_wise(table, tuple(heights), reads, count, state)
                if cost is not None:
                    costs[choice] = cost
    choice = min(costs, key=lambda name: (costs[name].wire, costs[name].memory))
    choice = layout or (choice if devices > 1 else "replicated-sparse")
    if choice not in costs:
        raise ValueError(
            f"sparsejax.parallel.plan: the layout of {name} must be one of "
            f"{', '.join(costs)}, got {choice!r}. Columns must be a multiple of the "
            "devices; table-wise layouts need stacks=, several devices, and reads of "
            "single ids or bags of one length."
        )
    return TablePlan(
        name=name,
        shape=table.shape,
        dtype=np.dtype(table.dtype).name,
        ids=here,
        distinct=distinct,
        capacity=max(slots),
        costs=costs,
        choice=choice,
        is_measured=bool(samples),
        wire_dtype=table.wire_dtype,
    )


# ------------------------------------------------------------------ all tables


def _fit(plans: dict[str, TablePlan], fixed: Iterable[str], budget: int) -> None:
    """Moves tables to layouts that need less memory, until all fit or none can move."""
    while (over := sum(t.cost.memory for t in plans.values()) - budget) > 0:
        moves = [
            (_price(t, layout, over), k, name, layout)
            for k, (name, t) in enumerate(plans.items())
            if name not in fixed
            for layout in t.costs
            if t.costs[layout].memory < t.cost.memory
        ]
        if not moves:
            break
        *_, name, layout = min(moves)
        plans[name] = dataclasses.replace(plans[name], choice=layout)


def _price(table: TablePlan, layout: str, over: int) -> float:
    """Returns extra bytes sent per byte freed, of the `over` that must be freed."""
    now, then = table.cost, table.costs[layout]
    return (then.wire - now.wire) / min(over, now.memory - then.memory)


def _size(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
