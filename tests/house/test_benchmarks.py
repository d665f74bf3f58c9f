"""The benchmarks' own machinery, on tiny sizes; no test here looks at a time."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest


pytest.importorskip("benchmarks")  # a source distribution has none

from benchmarks import __main__, sweep, timing  # noqa: E402


# optax's own schedules and moments promote types.
pytestmark = pytest.mark.loose_promotion


def _case(optimizer="adam", rows=500, ids=16, over="rows", zipf=False):
    return sweep.Case(over, optimizer, rows, ids, 4, zipf)


# ------------------------------------------------------------------ timing


def test_programs_take_turns_and_hand_the_state_on():
    log = []

    def program(name):
        def run(state, given):
            log.append((name, int(given)))
            return state + 1, None

        return run

    numbers = iter(range(100))
    times, state = timing.alternate(
        {"a": program("a"), "b": program("b")},
        0,
        lambda: jnp.asarray(next(numbers)),
        repeats=3,
    )
    # In each round both, an untimed run before the timed one, in any order.
    names = "".join(name for name, _ in log)
    rounds = [names[i : i + 4] for i in range(0, 12, 4)]
    assert set(rounds) == {"aabb", "bbaa"}
    assert [given for _, given in log] == list(range(12))  # fresh inputs each time
    assert state == 12
    assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3}


def test_a_limit_of_time_leaves_three_rounds():
    run = lambda state, _: (state, None)
    times, _ = timing.alternate({"a": run}, 0, lambda: 0, repeats=50, seconds=0.0)
    assert len(times["a"]) == 3


def test_compiling_is_apart_and_tells_memory():
    compiled = timing.compile_apart(jax.jit(lambda x: x @ x), jnp.ones((8, 8)))
    assert compiled.seconds > 0
    assert isinstance(compiled.temp_bytes, int)
    np.testing.assert_array_equal(compiled.run(jnp.ones((8, 8))), np.full((8, 8), 8.0))


def test_statistics():
    assert timing.median_ms([0.001, 0.5, 0.002]) == pytest.approx(2.0)
    assert timing.spread([1.0, 1.0, 1.0, 1.0]) == 0
    assert timing.spread([1.0]) == 0


def test_memory_and_machine_can_be_told():
    free = timing.free_bytes()
    assert free is None or free > 0
    assert {"device", "jax", "python", "cpu", "cores"} <= timing.machine().keys()
    assert timing.bandwidth(megabytes=1) > 0


# ------------------------------------------------------------------ sweep


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", sweep.OPTIMIZERS)
def test_a_case_is_measured(optimizer):
    result = sweep.measure(_case(optimizer), 3, 1.0, 1e9)
    assert result.picked == "sparse" and result.repeats == 3
    assert result.insisted_ms is None
    assert result.ratio == pytest.approx(result.dense_ms / result.ours_ms)
    assert result.dense_temp >= 500 * 4 * 4
    assert len(sweep.line(result)) <= len(sweep.HEADER) + 1
    machine = timing.machine()
    fields = json.loads(json.dumps(sweep.record(result, machine)))
    assert fields["optimizer"] == optimizer and fields["rows"] == 500
    assert fields["jax"] == jax.__version__


@pytest.mark.slow
def test_where_dense_is_picked_sparse_is_timed_as_well():
    result = sweep.measure(_case("sgd", rows=20, over="ids"), 3, 1.0, 1e9)
    assert result.picked == "dense"
    assert result.insisted_ms is not None


def test_both_sides_take_the_same_step():
    case = _case("adagrad")
    tx = sweep.OPTIMIZERS["adagrad"]()
    batch = sweep.make_batch(case, np.random.default_rng(0))
    ours = sweep.make_step(sweep.sj.value_and_grad, sweep.sj.optim.lazy(tx))
    dense = sweep.make_step(jax.value_and_grad, tx)
    (a, _), loss = ours(sweep.make_state(case, tx), batch)
    (b, _), dense_loss = dense(sweep.make_state(case, tx), batch)
    np.testing.assert_allclose(loss, dense_loss, rtol=1e-6)
    np.testing.assert_allclose(a["table"], b["table"], rtol=1e-5)


@pytest.mark.parametrize("zipf", [False, True])
def test_ids_are_rows_and_differ(zipf):
    case = _case(rows=1000, ids=300, zipf=zipf)
    rng = np.random.default_rng(0)
    (first, _), (second, _) = (sweep.make_batch(case, rng) for _ in range(2))
    assert first.dtype == jnp.int32 and first.shape == (300,)
    assert 0 <= int(first.min()) and int(first.max()) < 1000
    assert np.any(first != second)
    distinct = np.unique(first).size
    assert distinct < 200 if zipf else distinct > 230


def test_needed_memory_counts_gradient_and_update():
    table = 500 * 4 * 4
    assert sweep.needed_bytes(_case("sgd")) == pytest.approx(3 * table, rel=0.01)
    assert sweep.needed_bytes(_case("adam")) == pytest.approx(5 * table, rel=0.01)


def _result(rows, ours, dense, optimizer="adam"):
    fields: dict[str, Any] = {f.name: 0 for f in dataclasses.fields(sweep.Result)}
    fields |= {
        "case": _case(optimizer, rows),
        "ours_ms": ours,
        "dense_ms": dense,
        "ratio": dense / ours,
    }
    return sweep.Result(**fields)


GOOD = ((10**4, 1.0, 1.0), (10**5, 2.0, 9), (10**6, 3.0, 120), (10**7, 4.9, 900))


def test_claims_that_hold():
    assert sweep.check([_result(*r) for r in GOOD]) == []


@pytest.mark.parametrize(
    ("worse", "message"),
    [
        ((10**4, 1.2, 1.0), "adam, 1e+04 rows, ours/dense: 1.20, claimed at most 1.1"),
        ((10**6, 4.9, 120), "adam, 1e+06 rows, dense/ours: 24.49, claimed at least 30"),
        ((10**7, 5.5, 900), "from 1e+05 to 1e+07 rows: 2.75, claimed at most 2.5"),
        ((10**7, 4.9, 500), "adam, 1e+07 rows, dense/ours: 102.04"),
    ],
)
def test_claims_that_do_not_hold(worse, message):
    results = [_result(*r) for r in GOOD if r[0] != worse[0]] + [_result(*worse)]
    failures = sweep.check(results)
    assert len(failures) == 1
    assert message in failures[0]


def test_claims_that_nothing_was_measured_for():
    assert len(sweep.check([])) == 4
    assert all("not measured" in failure for failure in sweep.check([]))


@pytest.mark.slow
def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "bandwidth", lambda: 1e9)
    monkeypatch.setattr(sweep, "FIXED_ROWS", 1000)
    lines, picture = tmp_path / "lines.jsonl", tmp_path / "picture.png"
    argv = "--optimizers sgd --rows 1e3 --ids 100 --dim 4 --repeats 3".split()
    argv += ["--json", str(lines), "--plot", str(picture)]
    for _ in range(2):  # lines are appended
        assert __main__.main(["sweep", *argv]) == 0
    out = capsys.readouterr().out
    assert "jax" in out and sweep.HEADER in out
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [r["sweep"] for r in records] == ["rows", "ids"] * 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_check_fails_with_code_1(capsys, monkeypatch):
    monkeypatch.setattr(timing, "bandwidth", lambda: 1e9)
    argv = "--optimizers sgd --rows --ids --check".split()
    assert __main__.main(argv) == 1
    assert capsys.readouterr().err.count("does not hold: ") == 4


def test_a_case_too_large_for_memory_is_skipped(capsys, monkeypatch):
    monkeypatch.setattr(timing, "bandwidth", lambda: 1e9)
    monkeypatch.setattr(timing, "free_bytes", lambda: 1000)
    assert sweep.main("--optimizers sgd --rows 1e3 --ids".split()) == 0
    assert "skipped: needs" in capsys.readouterr().out


def test_unknown_benchmark(capsys):
    assert __main__.main(["no_such"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
