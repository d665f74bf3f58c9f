"""SelectedRows, and reading, writing and scattering rows by id."""

from sparsejax._rows.selected_rows import (
    SelectedRows as SelectedRows,
    concatenate as concatenate,
    is_selected_rows as is_selected_rows,
)
