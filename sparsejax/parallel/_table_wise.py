"""Reads of a stack with its tables on different devices (`TableWise`).

An owner has all rows of a bag, so the owner sums them: every device sends the ids of a
feature to the group that owns the feature's table, and gets its bags back, one row for
each bag. The shapes determine the bytes sent: there are no rounds and no capacity, and
skewed ids do not matter. With G groups of m owners, F features of b bags of L ids on
each device, rows of d bytes, and f, the most features that any group has, a device
sends

    ids      (G - 1) f b L 4  +  (m - 1) G f b L 4
    bags     (G - 1) f b d    +  (m - 1) G f b d

and the bags' gradient on the same way back. (Each of the m owners in a group adds up
its own rows of a bag: the second terms.) The gradients of rows never leave their owner.
With a `wire_dtype` of 16 bits, a number takes 2 bytes of d, and bags and their
gradients are rounded when they are sent.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._lookup import lookup
from sparsejax._rows import arithmetic, indexing, read_stacked_tables
from sparsejax.parallel import _exchange
from sparsejax.parallel._bags import pad_examples, remove_padding
from sparsejax.parallel._exchange import Owners
from sparsejax.parallel._layout import TableWise
from sparsejax.parallel._read import check_table, owners_of, put_on_mesh
from sparsejax.parallel._table import ShardedTable


@dataclasses.dataclass(frozen=True)
class _Route:
    """The devices between which features are sent; static.

    Args:
      owners: which device owns which rows.
      across: the axes from group to group.
      within: the axes inside of a group.
      features: int `[G, f]`, the features of each group; F for none.
      place: int `[F]`, the place of each feature among these.
    """

    owners: Owners
    across: tuple[str, ...]
    within: tuple[str, ...]
    features: np.ndarray
    place: np.ndarray

    @property
    def members(self) -> int:
        """m, the number of devices in a group."""
        return math.prod(self.owners.mesh.shape[name] for name in self.within)

    @classmethod
    def of(
        cls, table: ShardedTable, tables: Sequence[tuple[int, int]]
    ) -> _Route | None:
        """Makes the exchange for features by the rows of their tables in the stack.

        None if a table spans several of the layout's tables.
        """
        layout: Any = table.layout
        starts = [start for start, _ in tables]
        numbers = np.searchsorted(layout.starts, starts, side="right") - 1
        ends = (layout.starts + layout.heights)[numbers]
        if any(stop > end for (_, stop), end in zip(tables, ends)):
            return None
        groups = np.asarray(layout.groups)[numbers]
        most = np.bincount(groups).max()
        features = np.full((layout.num_groups, most), len(tables), np.int32)
        place = np.zeros(len(tables), np.int32)
        for group in range(layout.num_groups):
            (some,) = np.nonzero(groups == group)
            features[group, : len(some)] = some
            place[some] = group * most + np.arange(len(some))
        across, within = layout.split_axes(table.mesh, table.axes)
        return cls(owners_of(table), across, within, features, place)

    def to_owners(self, x: jax.Array, none: Any) -> jax.Array:
        """Gathers `x [b, F, L]` of every device, for the features of this one's group.

        Returns:
          `[m, G, f, b, L]`, by the device that it comes from; `none` for no feature.
        """
        x = jnp.swapaxes(x, 0, 1)
        x = jnp.concatenate([x, jnp.full((1, *x.shape[1:]), none, x.dtype)])
        x = x[self.features]
        if self.across:
            x = lax.all_to_all(x, self.across, 0, 0, tiled=True)
        return lax.all_gather(x, self.within) if self.within else x[None]

    def from_owners(self, x: jax.Array, sent: Any) -> jax.Array:
        """Sums over a group of `x [m, G, f, b, ...]`, back as `sent[b, F, ...]`."""
        wire_dtype = self.owners.wire_dtype
        if not self.within:
            x = x[0]
        elif wire_dtype is None:
            x = lax.psum_scatter(x, self.within)
        else:  # the bytes of a psum_scatter, but the sum is in the dtype of `x`
            x = jnp.sum(_exchange.send_rows(x, self.within, wire_dtype), axis=0)
        x = x.astype(sent)
        if self.across:
            x = _exchange.send_rows(x, self.across, wire_dtype)
        return jnp.swapaxes(lax.collapse(x, 0, 2)[self.place], 0, 1)


@read_stacked_tables.register
def _read_stacked_tables(
    table: ShardedTable,
    ids: jax.Array,
    skip: jax.Array,
    tables: Sequence[tuple[int, int]],
    weights: jax.Array | None,
    *,
    combiner: str,
    mode: str,
    max_norm: float | None,
) -> jax.Array | None:
    """Reads the bags of a stack that is sharded table by table."""
    layout, is_float = table.layout, jnp.issubdtype(table.dtype, jnp.floating)
    is_sum = combiner in ("none", "sum", "mean", "sqrtn")
    if not (isinstance(layout, TableWise) and is_sum and is_float and ids.size):
        return None
    check_table(table)
    route = _Route.of(table, tables)
    if route is None:
        return None
    owners, (examples, *shape) = route.owners, ids.shape

    ids = put_on_mesh(table, ids)
    bad = ~(indexing.in_range(ids, table.height) | skip)
    pad = lambda x, value: pad_examples(owners, x.reshape(examples, -1), value)
    wanted = pad(jnp.where(skip, np.array(-1, ids.dtype), ids), -1)

    def send(ids):
        positions = table.position(ids.reshape(-1, *shape))
        requested = route.to_owners(positions, owners.height).reshape(-1)
        mine = owners.to_own_rows(requested) < _arguments.scalar(owners.rows, requested)
        return jnp.where(mine, requested, _arguments.scalar(owners.height, requested))

    spec = owners.batch_spec
    requested = owners.shard_map(send, wanted, in_specs=(spec,), out_specs=spec)
    # Each device now has only positions of its own part.
    rows = _exchange.read_rows(owners, 0, table.values, requested)
    if max_norm is not None:
        rows = lookup.clip_rows(rows, max_norm, table.ndim - 1)

    args = [rows]
    if weights is not None:
        wide = indexing.accumulator_dtype(table.dtype)
        # As elsewhere, the weight of an element in no bag has no effect.
        used = indexing.zero_unless(~skip, put_on_mesh(table, weights))
        args.append(pad(used.astype(wide), 0))
    # A mean may fit into a float16 although its sum does not.
    is_mean = combiner in ("mean", "sqrtn")
    sent = indexing.accumulator_dtype(table.dtype) if is_mean else table.dtype
    add = functools.partial(_add_rows, route, table.shape[1:], shape, sent)
    bags = owners.shard_map(add, *args, in_specs=(spec,) * len(args), out_specs=spec)
    bags = remove_padding(bags, examples)
    if is_mean:
        by = jnp.ones(skip.shape, sent) if weights is None else weights.astype(sent)
        by = indexing.zero_unless(~skip, by)
        by = arithmetic.norms(by) if combiner == "sqrtn" else jnp.sum(by, axis=-1)
        bags = arithmetic.safe_divide(bags, by).astype(table.dtype)
    if mode == "zero":
        return bags
    # Added, so that a gradient of NaN reaches the bag's other rows, as elsewhere.
    bad = indexing.append_axes(jnp.any(bad, axis=-1), bags.ndim)
    return bags + jnp.where(bad, indexing.fill_value(bags.dtype), 0)


def _add_rows(
    route: _Route,
    row: tuple[int, ...],
    shape: Sequence[int],
    sent: Any,
    rows: jax.Array,
    *weights: jax.Array,
) -> jax.Array:
    """Sums this device's bags `[b, F, *row]` from the rows that it read for others.

    Args:
      route, row: static.
      shape: `(F, L)`.
      sent: the dtype in which bags come back.
      rows: `[m G f b L, *row]`, zeros for the rows of other owners.
      weights: of this device, `[b, F L]`.
    """
    sources, length = math.prod(route.features.shape) * route.members, shape[1]
    b = rows.shape[0] // (sources * length)
    lead = route.members, *route.features.shape, b, length
    wide = indexing.accumulator_dtype(rows.dtype)
    rows = rows.reshape(*lead, *row).astype(wide)
    if weights:
        by = route.to_owners(weights[0].reshape(b, *shape), 0)
        rows = rows * indexing.append_axes(by, rows.ndim)
    return route.from_owners(jnp.sum(rows, axis=4), sent)
