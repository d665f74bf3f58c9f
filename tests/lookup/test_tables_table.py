"""tests/docs/which_table.md is right about every cell."""

import pytest

import tables_table


FOUND: dict[tuple[str, str], str] = {}


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion", "eight_devices")
@pytest.mark.parametrize("row", tables_table.ROWS)
def test_a_row_of_the_table_is_tried(row):
    call = tables_table.ROWS[row]
    own = {name: tables_table.tried(row, call, name) for name in tables_table.KINDS}
    FOUND.update({(row, name): found for name, found in own.items()})
    lines = tables_table.PAGE.read_text().splitlines()
    (line,) = [x for x in lines if x.startswith(f"| {row} |")]
    works = [cell.strip().startswith("yes") for cell in line.split("|")[2:-1]]
    assert works == [x == "yes" for x in own.values()], own


@pytest.mark.slow
def test_the_page_is_the_one_that_is_made():
    if len(FOUND) < len(tables_table.ROWS) * len(tables_table.KINDS):
        pytest.skip("not all rows were tried in this process")
    made = tables_table.page(FOUND)
    assert made == tables_table.PAGE.read_text(), "python tests/tables_table.py"
