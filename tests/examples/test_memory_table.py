"""examples/memory_table.py: the memory learns, and is the same in all three places."""

import gzip
import re

import jax
import numpy as np
import pytest

from examples import memory_table
from helpers import assert_gradients


pytestmark = pytest.mark.usefixtures("loose_promotion", "freed_pages")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sizes = {"BLOCKS": 1, "DIM": 32, "LENGTH": 32, "WIDTH": 8, "EVERY": 10}
    for name, size in sizes.items():
        monkeypatch.setattr(memory_table, name, size)


@pytest.fixture
def run(tmp_path, shared_data, capsys):
    """Runs the example on the start of a book; the losses, and the last lines."""
    book = shared_data / "warpeace" / "warpeace.txt.gz"
    text = tmp_path / "text.txt"
    text.write_bytes(gzip.decompress(book.read_bytes())[:200_000])

    def run(where, rows, steps, *options):
        options = ["--where", where, "--rows", rows, "--steps", steps, *options]
        options += ["--text", text, "--file", tmp_path / "memory.rows"]
        memory_table.main([str(x) for x in options])
        lines = capsys.readouterr().out
        losses = [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", lines)]
        return losses, lines.splitlines()

    return run


def bits(lines):
    return float(lines[-2].split()[0])


@pytest.mark.slow
def test_the_places_agree_the_memory_helps_and_runs_resume(run, tmp_path):
    runs = {where: run(where, 20_000, 20) for where in ("device", "store", "file")}
    losses, lines = runs["device"]
    _, without = run("device", 0, 20)
    assert bits(lines) < bits(without) - 0.3
    for where in "store", "file":
        same, lines_of_store = runs[where]
        np.testing.assert_allclose(same, losses, atol=2e-3)
        assert abs(bits(lines_of_store) - bits(lines)) < 5e-3
        assert re.match(r"[\d,]+ rows touched, [\d,]+ MiB resident", lines_of_store[-1])
    (tmp_path / "memory.rows").unlink()
    for where in "device", "file":
        save = "--save", tmp_path / f"{where}.save"
        whole, lines = runs[where]
        first, _ = run(where, 20_000, 10, *save)
        later, resumed = run(where, 20_000, 20, *save)
        assert resumed[0] == "resumed after 10 steps"
        assert first + later == whole and bits(resumed) == bits(lines)


@pytest.mark.slow
def test_the_gradient_is_that_of_jax_and_sparse():
    params = memory_table.init(jax.random.key(0))
    shape = 50_000, memory_table.WIDTH
    params["memory"] = 0.1 * jax.random.normal(jax.random.key(1), shape)
    text = np.random.default_rng(0).integers(97, 110, (3, 33)).astype(np.uint8)
    loss = lambda params: memory_table.loss_fn(params, text)
    sparse = {"['bytes']": 3 * 32, "['memory']": 3 * 32 * 4}
    assert_gradients(loss, params, sparse, rtol=1e-3)
