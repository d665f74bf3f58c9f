"""The benchmark of HashIndex, on tiny sizes; no test here looks at a time."""

import json

import pytest


pytest.importorskip("benchmarks")  # a source distribution has none

from benchmarks import __main__, index  # noqa: E402


pytestmark = pytest.mark.loose_promotion


@pytest.mark.slow
def test_a_quarter_of_the_rows_is_enough_where_the_vocabulary_drifts(tmp_path, capsys):
    lines = tmp_path / "lines.jsonl"
    argv = "--only drift --steps 150 --batch 256 --ways lru hashed --check"
    assert __main__.main(["index", *argv.split(), "--json", str(lines)]) == 0
    assert "over all rows" in capsys.readouterr().out
    record = json.loads(lines.read_text())
    assert record["rows"] == record["distinct"] // 4 and record["evicted"]["lru"]
    assert record["ratio"]["lru"] < 1.01 < record["ratio"]["hashed"]


def test_a_claim_fails_where_medians_and_fastest_runs_say_so():
    times = {
        "plan, sorting": 1.0,
        "find": 2.5,
        "insert, known": 1,
        "insert, 2 % new": 1,
    }
    record = {"benchmark": "index", "ms": times, "fastest_ms": times | {"find": 1.5}}
    assert not index.failures([record])
    record["fastest_ms"] = times
    assert index.failures([record]) == ["find: 2.50 times the plan by sorting"]
    assert index.failures([{"benchmark": "drift", "ratio": {"lru": 1.02}}])
