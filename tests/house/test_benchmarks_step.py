"""The benchmarks of a step beside other systems, on tiny sizes, without a time."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest


pytest.importorskip("benchmarks")  # a source distribution has none

import sparsejax as sj  # noqa: E402
from benchmarks import __main__, flat, step, sweep, trace  # noqa: E402


pytestmark = pytest.mark.loose_promotion

CASE = sweep.Case("ids", "sgd", 300, 32, 16)


@pytest.mark.slow
def test_the_floor_takes_steps():
    """Of distinct ids, so that nothing is to merge; Adam's floor corrects no bias."""
    if step.floor_library() is None:
        pytest.skip("needs a C++ compiler")
    rng = np.random.default_rng(0)
    table = rng.standard_normal((300, 16)).astype(np.float32)
    weights = rng.standard_normal(16).astype(np.float32)
    ids = rng.permutation(300)[:32].astype(np.int32)
    clicked = rng.integers(0, 2, 32).astype(np.float32)
    params = {"table": jax.numpy.asarray(table), "weights": jax.numpy.asarray(weights)}
    grads = jax.grad(sweep.loss_fn)(params, (ids, clicked))
    for name, tx in (
        ("sgd", optax.sgd(step.RATE)),
        ("adagrad", optax.adagrad(step.RATE, 0.0)),
        ("rowwise_adagrad", step.OPTIMIZERS["rowwise_adagrad"]()),
    ):
        arrays = step.floor_arrays(table)
        side = step.floor_side(
            dataclasses.replace(CASE, optimizer=name), arrays, weights
        )
        side((), {"numpy": (ids, clicked)})
        updates, _ = tx.update(grads, tx.init(params), params)
        want = optax.apply_updates(params, updates)["table"]
        np.testing.assert_allclose(arrays[0], want, rtol=1e-5, atol=1e-6)
        assert np.any(arrays[0] != table)
    smallest = np.float32(1e-45)
    assert smallest * np.float32(1) == smallest, "subnormal numbers became zero"


def _record(ratio, name="adam"):
    sides = dict.fromkeys(step.SIDES, 2.0)
    return {"step": name, "ids": 65_536, "skew": "zipf", "ms": sides, "ratio": ratio}


def test_claims():
    assert step.check([_record(2.1), _record(None)]) == []
    assert step.check([_record(1.9), _record(9.0)]) == [
        "adam, 65,536 zipf ids: 1.90 times as fast as the faster peer, claimed at "
        "least 2.00"
    ]
    few = _record(0.5, "bag_ragged") | {"ids": 8_192}
    assert step.check([few]) == []
    few["ms"]["fbgemm"] = 1.0
    assert step.check([few]) == [
        "bag_ragged, 8,192 zipf ids: 0.50 times as fast as FBGEMM, claimed at least "
        "1.00"
    ]


@pytest.mark.slow
def test_command_line(tmp_path, capsys):
    lines, picture = tmp_path / "lines.jsonl", tmp_path / "picture.png"
    size = "--rows 1000 --ids 64 --dim 4 --repeats 3 --seconds 0".split()
    argv = ["step", "--steps", "adam", "bag_fixed", *size]
    argv += ["--json", str(lines), "--plot", str(picture)]
    assert __main__.main(argv) == 0
    assert __main__.main(["step", "--steps", "sgd", "--loss", "squares", *size]) == 0
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [r["skew"] for r in records] == ["uniform", "zipf"] * 2
    assert all(r["ms"]["ours"] > 0 and r["repeats"] == 3 for r in records)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "ours" in capsys.readouterr().out


def test_growth_with_the_table(tmp_path, capsys):
    lines = tmp_path / "lines.jsonl"
    argv = "flat --steps sgd --rows 300 600 --ids 32 --dim 4 --repeats 2".split()
    assert __main__.main([*argv, "--json", str(lines)]) == 0
    (record,) = [json.loads(line) for line in lines.read_text().splitlines()]
    assert record["growth"] == record["ms"]["600"] / record["ms"]["300"]
    assert "growth" in capsys.readouterr().out


def test_claims_of_growth():
    record = {"step": "adam", "ms": {"300": 1.0, "600": 1.2}, "growth": 1.2}
    assert flat.check([record]) == []
    assert flat.check([record | {"growth": 1.3}]) == [
        "adam: 1.30 times as long at 600 rows as at 300, claimed at most 1.25"
    ]


def test_tracing(tmp_path, capsys):
    lines = tmp_path / "lines.jsonl"
    argv = "trace --layers 2 --dim 24 --tables 3 --repeats 1 --json".split()
    assert __main__.main([*argv, str(lines)]) == 0
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    found = [(r["program"], r["caches"]) for r in records]
    bert = "bert, 2 layers"
    assert found == [(bert, "cleared"), (bert, "warm"), ("3 tables", "cleared")]
    assert all(r["ratio"] == r["ms"]["ours"] / r["ms"]["jax"] for r in records)
    assert "ratio" in capsys.readouterr().out


def test_the_model_that_is_traced():
    loss, args = trace.bert(12, 768)
    assert sum(x.size for x in jax.tree.leaves(args[0])) == 109_483_778
    grads = jax.eval_shape(sj.grad(loss), *args)
    sparse = [name for name, g in grads.items() if isinstance(g, sj.SelectedRows)]
    assert sorted(sparse) == ["positions", "words"]


def test_claims_of_tracing():
    bert = {"program": "bert, 2 layers", "caches": "warm", "ratio": 1.3}
    tables = {"program": "1,000 tables", "ms": {"ours": 4_000.0}, "ratio": 0.7}
    assert trace.check([bert, tables]) == []
    slow = [bert | {"ratio": 1.4}, tables | {"ms": {"ours": 6_000.0}}]
    assert trace.check(slow) == [
        "bert, 2 layers, caches warm: 1.40 times as long as jax.value_and_grad, "
        "claimed at most 1.3",
        "1,000 tables: 6.0 s, claimed at most 5.0 s",
    ]
