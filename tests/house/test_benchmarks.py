"""The benchmarks run, on tiny sizes; no test here asserts a time.

Each benchmark compares the results of its sides itself before it times them.
"""

import json

import jax.numpy as jnp
import pytest


pytest.importorskip("benchmarks")  # a source distribution has none

from benchmarks import __main__, sharded, timing  # noqa: E402


# optax's own schedules and moments promote types.
pytestmark = pytest.mark.usefixtures("loose_promotion")

RUNS = {
    "sweep": "--optimizers sgd --rows 1e3 --dim 4",
    "step": "--optimizers adam --rows 1000 --ids 64 --dim 4",
    "ops": "--rows 300 --elements 40 --dim 4 --segments 5 --kinds sum --seconds 0",
    "sharded": "--case collection --devices 2 --dim 4 --ids 40",
    "store": "--rows 2000 --dim 4 --ids 128 --optimizers adagrad",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_runs(name, tmp_path, capsys, monkeypatch):
    # Most of the time goes to compiling, for each table again.
    monkeypatch.setattr(sharded, "HEIGHTS", (300, 200))
    path = tmp_path / "lines.jsonl"
    options = [*RUNS[name].split(), "--repeats", "1", "--json", str(path)]
    assert __main__.main([name, *options]) == 0
    assert capsys.readouterr().out
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {r["benchmark"] for r in records} == {name}


def test_every_benchmark_is_run():
    # Whole models need gigabytes, and `exact_loss` a text: they have no tiny size.
    # test_races.py has the races.
    assert {*RUNS, "models", "exact_loss", "races"} == {*__main__.NAMES}


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
