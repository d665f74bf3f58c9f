"""The benchmark of segment reductions, on tiny sizes; no test here looks at a time."""

import json

import jax
import numpy as np
import pytest


pytest.importorskip("benchmarks")  # a source distribution has none

from benchmarks import __main__, segment  # noqa: E402


pytestmark = pytest.mark.loose_promotion


@pytest.mark.slow
def test_command_line(tmp_path, capsys):
    lines = tmp_path / "lines.jsonl"
    argv = "--elements 40 --dim 3 --segments 5 --repeats 3 --reductions sum softmax"
    argv = [*argv.split(), "--json", str(lines)]
    assert __main__.main(["segment", *argv]) == 0
    assert segment.HEADER in capsys.readouterr().out
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    cases = [(r["reduction"], r["ids"], r["pass"]) for r in records]
    orders, passes = segment.ORDERS, segment.PASSES
    wanted = [(r, i, p) for r in ("sum", "softmax") for i in orders for p in passes]
    assert cases == wanted
    for r in records:
        assert {"ours", "natural"} <= r["ms"].keys()
        assert r["ratio"] == pytest.approx(r["ms"]["ours"] / r["ms"]["natural"])
        assert r["jax"] == jax.__version__


@pytest.mark.parametrize("reduction", segment.REDUCTIONS)
def test_all_sides_give_the_same(reduction):
    # `measure` compares them too, before it times them.
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 3), dtype=np.float32)
    for is_sorted in (False, True):
        ids = segment.make_ids(40, 5, is_sorted, rng)
        assert set(ids["numpy"]) == set(range(5))
        assert not is_sorted or np.all(np.diff(ids["numpy"]) >= 0)
        ours = segment.ours(reduction, 5, is_sorted)(x, ids["jax"])
        natural = segment.natural(reduction, 5, is_sorted)(x, ids["jax"])
        np.testing.assert_allclose(ours, natural, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "fastest", "fails"), [(1.2, 1.1, 1), (1.2, 1.0, 0), (1.0, 1.2, 0)]
)
def test_a_claim_fails_where_medians_and_fastest_runs_say_so(ratio, fastest, fails):
    record = {"reduction": "sum", "ids": "sorted", "pass": "forward"}
    record |= {"ratio": ratio, "fastest_ratio": fastest}
    assert len(segment.failures([record])) == fails
