"""Error messages: error_messages.md is up to date, and messages name the fix."""

import pytest

import error_table


pytestmark = [
    pytest.mark.usefixtures("loose_promotion"),
    pytest.mark.usefixtures("eight_devices"),
]

PAGE = error_table.PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("section", error_table.sections(), ids=lambda s: s.title)
def test_the_page_is_what_is_found(section):
    assert error_table.table(section) in PAGE, (
        "make it again: python tests/tools/error_table.py"
    )
