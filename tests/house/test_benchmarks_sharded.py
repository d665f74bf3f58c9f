"""The benchmark of sharded tables, on tiny sizes; no test here looks at a time."""

import json

import jax
import pytest


pytest.importorskip("benchmarks")  # a source distribution has none

from benchmarks import __main__, sharded  # noqa: E402


pytestmark = [pytest.mark.loose_promotion, pytest.mark.multidevice]


@pytest.mark.slow
def test_command_line(tmp_path, capsys):
    # The sides' losses are compared before they are timed.
    path = tmp_path / "lines.jsonl"
    argv = "--devices 2 --rows 301 --dim 4 --ids 40 --repeats 3 --check --json"
    assert __main__.main(["sharded", *argv.split(), str(path)]) == 0
    out = capsys.readouterr().out
    assert sharded.HEADER in out and sharded.PLACEMENTS_HEADER in out
    record, placed = [json.loads(line) for line in path.read_text().splitlines()]
    assert placed["choice"] in placed["wire"] and "table-wise" in placed["ms"]
    assert placed["wire"]["table-wise"] < placed["wire"]["row-sharded"]
    assert list(record["wire"]) == list(record["ms"]) == list(sharded.SIDES)
    assert record["ratio"]["ours"] == 1
    assert record["wire"]["dense"] >= 2 * 301 * 4 * 4 // 2
    assert 0 < record["wire"]["ours"] < record["wire"]["rows"]
    assert record["jax"] == jax.__version__
    assert len(list(sharded.lines(record))) == len(sharded.SIDES)


def test_a_claim_fails_where_bytes_say_so():
    case = sharded.CLAIMED_CASE
    few, many = sharded.CLAIMED_BYTES, sharded.CLAIMED_BYTES + 1
    record = lambda ours, **others: case | {"wire": {"ours": ours, **others}}
    assert not sharded.failures([record(few, rows=many, columns=1)])
    assert len(sharded.failures([record(many, dense=many)])) == 1
    assert len(sharded.failures([record(few, dense=few - 1)])) == 1
    assert not sharded.failures([record(many) | {"skew": "uniform"}])


def test_asks_for_devices_unless_the_user_has(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    sharded.force_devices()
    monkeypatch.setenv("XLA_FLAGS", sharded.os.environ["XLA_FLAGS"])
    want = "--xla_a=1 --xla_force_host_platform_device_count=8"
    assert sharded.os.environ["XLA_FLAGS"] == want
    sharded.force_devices()
    assert sharded.os.environ["XLA_FLAGS"] == want
