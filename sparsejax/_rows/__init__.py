"""Rows of arrays by id: SelectedRows, reading and writing rows, scatter."""

from sparsejax._rows.selected_rows import SelectedRows as SelectedRows
