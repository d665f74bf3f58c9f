"""The costs of each layout of a table for a device, in memory and on the wire.

With N devices, a table `[V, ...]` of rows of d bytes, n ids on each device and step,
and U distinct ids among a device's n (n if unknown), a device holds

    row-sharded         (d + s) ceil(V / N)     s: bytes of optimizer state a row
    column-sharded      (d + s) V / N           state of another shape than the table
    replicated          (d + s) V               is replicated

and sends in a step, lookup and update together,

    row-sharded         2 (N - 1) C (d + 4)
    column-sharded      2 b d (N - 1) / N + 3 (N - 1) 4 n
    replicated-sparse   (N - 1) U (d + 4)
    replicated-dense    2 V d (N - 1) / N
    table-wise          (G - 1 + G (m - 1)) b (4 L + 2 d)

Row-sharded: C is the capacity, the rows requested from one owner in one round; without
skew it is slightly more than U / N. If the mesh has other axes than the table's, over
which it is replicated r times, a batch is read in r N parts, and (r - 1) N C (d + 4)
bytes more are sent, to sum the gradients of the replicas. Column-sharded: whole rows
are sent in both directions, b of them, since a bag is one row by then; XLA gathers the
ids for each of their three uses, unless they are replicated; each device reads all N n
ids, in narrow rows. Replicated: ids and rows of the gradient go to all devices, or the
dense gradient is all-reduced. Table-wise, for a stack of tables: whole tables on G
groups of m devices, m = 1, or "table-row-wise" with a group for each place on the first
mesh axis; b, the most bags that a device reads from the tables of one group, of L ids
each. A device holds the rows of its group's tables, divided by m.

An id takes 4 bytes, or 8 in tables of 2^31 rows. With `wire_dtype=jnp.bfloat16` a
number of a row-sharded, table-wise or table-row-wise table takes 2 bytes on the wire,
and as many as before in memory. Losses and norms add a few numbers. A table that is
read in several places sends the sum of what each read sends. `sparsejax.viz.wire_bytes`
reports what a compiled step actually sends.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sparsejax.parallel._layout import TableWise, balance
from sparsejax.parallel._table import ShardedTable


@dataclasses.dataclass(frozen=True)
class Read:
    """One read of a table in a step, on all devices together.

    Args:
      count: the number of ids.
      ids: the ids, in the order of the batch, or None if they are not known.
      length: the number of ids that are combined into one row.
    """

    count: int
    ids: np.ndarray | None
    length: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a layout for each device.

    Args:
      memory: int, bytes of the table and its optimizer state.
      wire: int, bytes sent in a step.
      layout: for a stack that is sharded table by table, which devices have which
        table.
    """

    memory: int
    wire: int
    layout: TableWise | None = None


def costs_of(
    table: ShardedTable,
    ids: int,
    outputs: int,
    distinct: int,
    sent: int,
    state: tuple[int, int],
) -> dict[str, Cost]:
    """Applies the module's formulas, in whole bytes; `sent` is rows sent by rows."""
    height, devices, (like, aside) = table.height, table.num_shards, state
    row, sent_row, id_bytes = _bytes_of(table)
    others = devices - 1
    whole = height * row + like + aside
    rows = math.ceil(height / devices)
    costs = {
        "row-sharded": Cost(
            whole * rows // max(height, 1), sent * (sent_row + id_bytes)
        ),
        "column-sharded": Cost(
            (height * row + like) // devices + aside,
            others * (3 * id_bytes * ids + 2 * outputs * row // devices),
        ),
        "replicated-sparse": Cost(whole, others * distinct * (row + id_bytes)),
        "replicated-dense": Cost(whole, 2 * height * row * others // devices),
    }
    if table.ndim < 2 or table.shape[-1] % devices:
        del costs["column-sharded"]
    return costs


def _bytes_of(table: ShardedTable) -> tuple[int, int, int]:
    """Returns the bytes of a row, of a row on the wire, and of an id."""
    count, wire_dtype = math.prod(table.shape[1:]), table.wire_dtype or table.dtype
    row, sent = (count * np.dtype(x).itemsize for x in (table.dtype, wire_dtype))
    return row, sent, 4 if table.height <= np.iinfo(np.int32).max else 8


def cost_table_wise(
    table: ShardedTable,
    heights: tuple[int, ...],
    reads: Sequence[Read],
    num_groups: int,
    state: tuple[int, int],
) -> Cost | None:
    """Returns the cost of a stack with its tables in groups of devices.

    None if a device would have more rows than an id can number.
    """
    # By read and table the bags of a device. Unknown ids are shared equally.
    height, devices, starts = table.height, table.num_shards, np.cumsum([0, *heights])
    bags = np.zeros((len(reads), len(heights)))
    for k, read in enumerate(reads):
        if read.ids is None:
            bags[k] = read.count / read.length / len(heights)
            continue
        ids = read.ids.reshape(-1, int(read.length))
        first = np.where((ids >= 0) & (ids < height), ids, -1).max(axis=1)
        bags[k], _ = np.histogram(first[first >= 0], starts)
    bags /= devices
    row, sent_row, id_bytes = _bytes_of(table)
    each = np.array([id_bytes * read.length + 2 * sent_row for read in reads])
    layout = balance(heights, (each @ bags).tolist(), num_groups)
    in_group = np.asarray(layout.groups)[:, None] == np.arange(num_groups)
    most = (bags @ in_group).max(axis=1)
    hops = num_groups - 1 + (devices // num_groups - 1) * num_groups
    rows = layout.per_shard(height, devices)
    if devices * rows > max(np.iinfo(np.int32).max, height):
        return None
    memory = (height * row + sum(state)) * rows // max(1, height)
    return Cost(memory, math.ceil(hops * (most @ each)), layout)


def state_bytes(
    leaves: Sequence[Any], treedef: Any, tx: Any, tables: Sequence[int]
) -> list[tuple[int, int]]:
    """Returns, by parameter, bytes of state with its shape, and of other row state.

    State belongs to a table if it gets longer with it. Each table gets longer by
    another number of rows, since masks, labels and capacities need the whole tree.

    Args:
      leaves, treedef: the parameters.
      tx: the optimizer, or None.
      tables: the places of the tables among the leaves.
    """
    sizes = [[0, 0] for _ in leaves]

    def state_of(more):
        longer = list(leaves)
        for k in tables:
            height, *row = leaves[k].shape
            shape = height + more * (k + 1), *row
            longer[k] = jax.ShapeDtypeStruct(shape, leaves[k].dtype)
        return jax.tree.leaves(jax.eval_shape(tx.init, treedef.unflatten(longer)))

    states = [] if tx is None else zip(state_of(0), state_of(1), strict=True)
    for now, then in states:
        k = then.shape[0] - now.shape[0] - 1 if now.shape else -1
        if k in tables:
            size = math.prod(now.shape) * np.dtype(now.dtype).itemsize
            sizes[k][now.shape != tuple(leaves[k].shape)] += size
    return [(like, aside) for like, aside in sizes]
