"""A HotColdTable where an array is needed: how a walk reads its rows.

As `_views.py` does for a ShardedTable. Here a view is of two tables at once: it is the
view of the cold table, and its reader knows the view of the hot rows. A read is
recorded as one of each.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from sparsejax._rows import indexing
from sparsejax.parallel import _hot_reads
from sparsejax.parallel._hot_rows import HotColdTable, hot_cold_table_p
from sparsejax.parallel._lookup import ReadKind
from sparsejax.parallel._table import ShardedTable
from sparsejax.parallel._views import TableReader, whole_view
from sparsejax.transform.interpreter import RuleContext, register_rule
from sparsejax.transform.table import TableRef


@dataclasses.dataclass(frozen=True, eq=False)
class _HotColdReader(TableReader):
    """Reads rows by `all_to_all`, and hot rows from the device itself.

    Args:
      static: the hot ids, and the fields of the cold table.
      hot: the view of the hot rows.
    """

    static: tuple[Any, ...]
    hot: TableRef

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, _HotColdReader)
            and self.static == other.static
            and self.hot.index == other.hot.index
            and self.hot.array is other.hot.array
        )

    def __hash__(self) -> int:
        return hash(self.static)

    def table(self, values: Any) -> HotColdTable:
        """The table whose cold part has these values."""
        hot_ids, fields = self.static
        cold = ShardedTable.tree_unflatten(fields, (values,))
        return HotColdTable(self.hot.array, cold, hot_ids)

    def _read(
        self, ctx: Any, ref: TableRef, table: Any, ids: jax.Array, counted: jax.Array
    ) -> jax.Array:
        # What stops the gradient of the view does so for both tables.
        stopped = self.hot.stopped or (ref.stopped and ref.index >= 0)
        hot_ref = dataclasses.replace(self.hot, stopped=stopped)

        def record(hot, cold, owners, slots, divide):
            places, positions = divide(counted)
            kind = _hot_reads.HotKind(owners, table.num_hot)
            inside = indexing.in_range(places, table.num_hot)
            hot = ctx.plant(hot_ref, hot, places, inside, kind=kind)
            kind = ReadKind(owners, slots)
            inside = indexing.in_range(positions, owners.height)
            return hot, ctx.plant(ref, cold, positions, inside, kind=kind)

        return _hot_reads.read(self.call, table, ids, None, record)[0]


@register_rule(hot_cold_table_p, of_arrays=True)
def _view_rule(
    ctx: RuleContext, values: Any, hot: Any, *, static: tuple[Any, ...]
) -> Any:
    cold_view, hot_view = whole_view(values), whole_view(hot)
    if cold_view is None or hot_view is None:
        return NotImplemented
    shape = tuple(ctx.eqn.outvars[0].aval.shape)
    reader = _HotColdReader(static, hot_view)
    return dataclasses.replace(cold_view, shape=shape, reader=reader)
