"""Descriptions in files of a store: JSON that is compared with a schema."""

import pytest

from sparsejax.store._records import check_json


SCHEMA = {
    "n": int,
    "on?": bool,
    "kind": str,
    "rows": {"height": int},
    "sizes": [int],
    "more": {"*": str},
    "value?": object,
}
GOOD = {
    "n": 3,
    "kind": "a",
    "rows": {"height": 0},
    "sizes": [],
    "more": {},
    "unknown": None,
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({}, None),
        ({"on": True, "value": None, "sizes": [1], "more": {"x": "y"}}, None),
        ({"n": True}, "n'. has an unexpected value, True"),
        ({"n": -1}, "unexpected value, -1"),
        ({"n": 1 << 63}, "unexpected value, 9223372036854775808"),
        ({"n": 3.0}, "unexpected value, 3.0"),
        ({"on": 1}, "on'. has an unexpected value, 1"),
        ({"kind": ["a"]}, "unexpected value, a list"),
        ({"rows": {}}, r"header\['rows'\]\['height'\] is missing"),
        ({"rows": []}, "unexpected value, a list"),
        ({"sizes": [1, "x"]}, r"header\['sizes'\]\[1\] has an unexpected value, 'x'"),
        ({"more": {"x": None}}, r"\['more'\]\['x'\] has an unexpected value, a None"),
    ],
)
def test_json_is_as_its_schema_says(change, message):
    if message is None:
        check_json(GOOD | change, SCHEMA, "header")
        return
    with pytest.raises(ValueError, match=message):
        check_json(GOOD | change, SCHEMA, "header")
    for wrong in (None, [], 3, {}):
        with pytest.raises(ValueError, match="unexpected value|is missing"):
            check_json(wrong, SCHEMA, "header")
