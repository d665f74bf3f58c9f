"""A ShardedTable where an array is needed: how a walk reads its rows.

`jnp.asarray(table)` binds the primitive `sharded_table`, whose result has the shape of
the table. In a walk it becomes a view of the table's values with a `RowReader`. So all
that reads rows of an array reads rows of a ShardedTable: `jnp.take`, an embedding layer
of flax, under `vmap` and `scan`, cast or not.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._rows import indexing
from sparsejax.parallel import _embedding_bag
from sparsejax.parallel._lookup import (
    check_table,
    owners_of,
    positions_of,
    put_on_mesh,
    read,
)
from sparsejax.parallel._table import ShardedTable, sharded_table_p
from sparsejax.transform.interpreter import RuleContext, register_rule
from sparsejax.transform.plan import DensifyError
from sparsejax.transform.table import RowReader, TableRef


class TableReader(RowReader):
    """What the readers of all kinds of table have in common."""

    def table(self, values: Any) -> Any:
        """The table with these values."""
        raise NotImplementedError

    @property
    def call(self) -> str:
        """The public name of the kind of table, for errors."""
        return f"sparsejax.parallel.{type(self.table(None)).__name__}"

    def read(
        self, ctx: Any, ref: TableRef, ids: jax.Array, counts: jax.Array, nearest: bool
    ) -> jax.Array:
        """As `RowReader.read`."""
        table = self.table(ref.array)
        check_table(self.call, table, "lookup")
        none = _arguments.scalar(table.height, ids)
        counted = jnp.where(counts, ids, none)
        if nearest:
            last = _arguments.scalar(table.height - 1, ids)
            ids = jnp.clip(ids, _arguments.scalar(0, ids), last)
        else:
            ids = counted
        return self._read(ctx, ref, table, put_on_mesh(self.call, table, ids), counted)

    def _read(
        self, ctx: Any, ref: TableRef, table: Any, ids: jax.Array, counted: jax.Array
    ) -> jax.Array:
        """The rows of `ids`, recorded as reads of what is in range of `counted`."""
        raise NotImplementedError

    def bag_sum(
        self,
        ctx: Any,
        ref: TableRef,
        ids: jax.Array,
        weights: jax.Array | None,
        segment_ids: jax.Array | None,
        num_bags: int,
    ) -> jax.Array:
        """As `RowReader.bag_sum`."""
        owners = owners_of(self.table(ref.array))
        read_rows = lambda ids: ctx.read(ref, ids, drop=False)
        return _embedding_bag.sum_bags(
            owners, read_rows, ref.height, ids, weights, segment_ids, num_bags
        )

    def refuse(self, ref: TableRef, use: str) -> NoReturn:
        """As `RowReader.refuse`."""
        table = self.table(ref.array)
        kind, search = type(table).__name__, ""
        if isinstance(table, ShardedTable):
            search = (
                "The rows with the highest scores are "
                "sparsejax.parallel.top_k(query, table, k). "
            )
        raise DensifyError(
            f"sparsejax: {use}, and so needs the whole of a {kind} of shape "
            f"{table.shape}, whose rows lie on {table.num_shards} devices. Read rows "
            "there: table[ids], jnp.take(table, ids, axis=0), sparsejax.lookup or "
            f"sparsejax.embedding_bag. {search}For the whole table on every device "
            "write table.to_dense()."
        )


@dataclasses.dataclass(frozen=True)
class _ShardedReader(TableReader):
    """Reads rows by `all_to_all`; `static` are the fields of the table."""

    static: tuple[Any, ...]

    def table(self, values: Any) -> ShardedTable:
        """The table with these values."""
        return ShardedTable.tree_unflatten(self.static, (values,))

    def _read(
        self, ctx: Any, ref: TableRef, table: Any, ids: jax.Array, counted: jax.Array
    ) -> jax.Array:
        def record(rows, kind):
            positions = positions_of(kind.owners, table, counted)
            inside = indexing.in_range(positions, kind.owners.height)
            return ctx.plant(ref, rows, positions, inside, kind=kind)

        return read(self.call, table, ids, None, record)[0]


def whole_view(x: Any) -> TableRef | None:
    """The view of an array as it is; None for a view that is not of the whole table."""
    if not isinstance(x, TableRef):
        return TableRef.of_array(jnp.asarray(x))
    is_whole = not x.steps and x.row_axes == (0,) and x.has_all_rows
    return x if is_whole else None


@register_rule(sharded_table_p, of_arrays=True)
def _view_rule(ctx: RuleContext, values: Any, *, static: tuple[Any, ...]) -> Any:
    view = whole_view(values)
    if view is None:
        return NotImplemented
    shape = tuple(ctx.eqn.outvars[0].aval.shape)
    return dataclasses.replace(view, shape=shape, reader=_ShardedReader(static))
