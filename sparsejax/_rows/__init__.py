"""SelectedRows, QuantizedTable; reading, writing and scattering rows by id."""

from sparsejax._rows.quantized import (
    QuantizedTable as QuantizedTable,
    is_quantized as is_quantized,
    quantize as quantize,
)
from sparsejax._rows.selected_rows import (
    SelectedRows as SelectedRows,
    concatenate as concatenate,
    flat_rows as flat_rows,
    is_selected_rows as is_selected_rows,
    known_sum as known_sum,
    restacked as restacked,
    stacked_rows as stacked_rows,
    with_known_sum as with_known_sum,
    with_slots as with_slots,
)
from sparsejax._rows.tables import (
    RowTable as RowTable,
    Table as Table,
    as_table as as_table,
    check_whole as check_whole,
    read_row_table as read_row_table,
    read_stacked_tables as read_stacked_tables,
    reduce_row_table as reduce_row_table,
    table_or_none as table_or_none,
)
