"""Rows of arrays by id: SelectedRows, reading and writing rows, scatter."""

from sparsejax._rows.selected_rows import (
    SelectedRows as SelectedRows,
    concatenate as concatenate,
    is_selected_rows as is_selected_rows,
)
