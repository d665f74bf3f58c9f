"""A part of a table on its way to the device: the rows that one batch names."""

import time
from typing import Any

import numpy as np

from sparsejax._rows import SelectedRows
from sparsejax.store import _rows_wanted as wanted
from sparsejax.store._table import Table


EXACT: Any = object()  # a capacity: as many slots as there are rows


class Part:
    """One table's rows for a batch that is not out yet."""

    def __init__(self, table: Table, rows: np.ndarray, capacity: int):
        self.table, self.rows = table, rows
        self.values = table.empty(rows.size, capacity)
        self._late = np.zeros(rows.shape, bool)

    def expect(self, other: "Part") -> None:
        """Leaves the rows that another part has for later: they will likely change."""
        self._late |= wanted.members(self.rows, other.rows)

    def read_early(self) -> None:
        """Reads all rows but those."""
        self._read(~self._late)

    def forward(self, rows: np.ndarray, weights: np.ndarray) -> None:
        """Takes the new weights of rows that were pushed."""
        hit = wanted.members(self.rows, rows)
        self.values[: hit.size][hit] = weights[np.searchsorted(rows, self.rows[hit])]
        self._late &= ~hit

    def read_again(self) -> None:
        """Takes nothing for granted: all tables were loaded anew."""
        self._late[:] = True

    def finish(self) -> SelectedRows:
        """Reads what is left; the rows on the device."""
        self._read(self._late)
        return self.table.selected(self.rows, self.values)

    def _read(self, which: np.ndarray) -> None:
        began = time.perf_counter()
        if which.all():
            self.table.gather(self.rows, self.values)
        elif which.any():
            rows = self.rows[which]
            part = self.table.gather(rows, self.table.empty(rows.size, rows.size))
            self.values[: which.size][which] = part
        self.table.counts.pull_seconds += time.perf_counter() - began


def make_part(
    call: str, table: Table, ids: Any, capacity: int | None, mode: str
) -> Part:
    """The rows of a table that `ids` name, with room for their weights."""
    began = time.perf_counter()
    rows = wanted.distinct_rows(call, table.name, ids, table.height, mode)
    slots = rows.size
    if capacity is not EXACT:
        slots = wanted.capacity_for(call, table.name, slots, table.height, capacity)
    part = Part(table, rows, slots)
    table.counts.pulls += 1
    table.counts.pulled_rows += rows.size
    table.counts.pull_seconds += time.perf_counter() - began
    return part


def pull(
    call: str, table: Table, ids: Any, capacity: int | None, mode: str
) -> SelectedRows:
    """Those rows at once."""
    part = make_part(call, table, ids, capacity, mode)
    part.read_early()
    return part.finish()
