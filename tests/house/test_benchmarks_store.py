"""The benchmark of the store, on tiny sizes; no test here looks at a time."""

import json

import jax
import numpy as np
import pytest


pytest.importorskip("benchmarks")  # a source distribution has none

from benchmarks import __main__, store as bench  # noqa: E402


pytestmark = pytest.mark.loose_promotion


@pytest.mark.slow
def test_command_line(tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    argv = "--rows 301 --dim 4 --ids 128 --repeats 3 --optimizers adagrad --json"
    assert __main__.main(["store", *argv.split(), str(path)]) == 0
    assert "distinct rows/s" in capsys.readouterr().out
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["what"] for r in records] == ["pull", "push", "pull", "push"] + 2 * [
        "step"
    ]
    assert all(r["rows_per_second"] > 0 for r in records[:4])
    assert {r["jax"] for r in records} == {jax.__version__}


@pytest.mark.slow
def test_both_ways_take_the_same_steps():
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 50, (4, 16)).astype(np.int32) for _ in range(5)]
    found = []
    for name in ("synchronous", "prefetched"):
        store = bench.make_store("adagrad", 50, 3)
        assert store.stats()["table"].touched_rows == 50
        _, losses = bench.step_sides(store, 3)[name]((), batches)
        found.append((np.array(losses), store.pull_all("table")))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.mark.slow
def test_caches_beside_other_ways(tmp_path, capsys):
    """That their losses are those of the whole table is looked at while it runs."""
    path = tmp_path / "lines.jsonl"
    argv = "--rows 2000 --dim 4 --ids 64 --warm 3 --steps 3 --json"
    ways = "--ways", "whole", "prefetch", "cached"
    assert __main__.main(["cache", *argv.split(), str(path), *ways]) == 0
    assert "hit rate" in capsys.readouterr().out
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["way"] for r in records] == ["whole", "prefetch", "cached"]
    assert 0 < records[2]["hit_rate"] < 1 and records[2]["bytes_back"] > 0
