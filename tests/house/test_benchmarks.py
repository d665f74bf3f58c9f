"""The benchmarks run, on tiny sizes; no test here asserts a time.

Each benchmark compares the results of its sides itself before it times them.
"""

import json

import jax.numpy as jnp
import pytest


pytest.importorskip("benchmarks")  # a source distribution has none

from benchmarks import __main__, sharded, sweep, timing  # noqa: E402
from benchmarks.models import __main__ as models  # noqa: E402


# optax's own schedules and moments promote types.
pytestmark = pytest.mark.usefixtures("loose_promotion")

RUNS = {
    "sweep": "--optimizers sgd --rows 1e3 --ids 100 --dim 4 --repeats 3",
    "step": "--steps adam bag_fixed --rows 1000 --ids 64 --dim 4 --repeats 3",
    "flat": "--steps sgd --rows 300 600 --ids 32 --dim 4 --repeats 2",
    "trace": "--layers 1 --dim 24 --tables 2 --repeats 1",
    "bag": "--combiners mean --rows 300 --dim 4 --bags 16 --repeats 3 --seconds 0",
    "segment": "--elements 40 --dim 3 --segments 5 --repeats 3 --reductions sum",
    "sharded": "--devices 2 --rows 301 --dim 4 --ids 40 --repeats 3 --sides ours dense",
    "store": "--rows 301 --dim 4 --ids 128 --repeats 3 --optimizers adagrad",
    "stored": "--models two_towers --rows 2000 --dim 4 --batch 16 --steps 4 --turn 2",
    "index": "--only drift --steps 20 --batch 64 --ways lru hashed",
    "cache": "--rows 2000 --dim 4 --ids 64 --warm 3 --steps 3 --ways whole cached",
    "quantized": "--bits 4 --layouts fixed --rows 300 --dim 8 --bags 16 --repeats 3",
    "keras_fit": "--rows 300 --dim 4 --batch 8 --batches 2 --repeats 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_runs(name, tmp_path, capsys, monkeypatch):
    if name == "keras_fit":
        pytest.importorskip("keras")
    monkeypatch.setattr(timing, "bandwidth", lambda: 1e9)
    monkeypatch.setattr(sweep, "FIXED_ROWS", 1000)
    # Most of the time goes to compiling, for each table again.
    monkeypatch.setattr(sharded, "HEIGHTS", (300, 200))
    path = tmp_path / "lines.jsonl"
    assert __main__.main([name, *RUNS[name].split(), "--json", str(path)]) == 0
    assert capsys.readouterr().out
    assert [json.loads(line) for line in path.read_text().splitlines()]


def test_every_benchmark_is_run():
    # Whole models need gigabytes, and `exact_loss` a text: they have no tiny size.
    # test_races.py has the races, tests/nn/test_dlrm.py has `dlrm`.
    others = {"models", "exact_loss", "races", "dlrm"}
    assert {*RUNS, *others} == {*__main__.NAMES}
    for name in models.NAMES:
        assert (models._ROOT / "benchmarks" / "models" / f"{name}.py").is_file()


def test_unknown_benchmark(capsys):
    assert __main__.main(["no_such"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_programs_take_turns_and_pass_the_state_on():
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
    assert [given for _, given in log] == list(range(12))  # new inputs each time
    assert state == 12
    assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3}
