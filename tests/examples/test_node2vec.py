"""examples/node2vec.py finds held-out edges of a real graph."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from examples import node2vec
from helpers import assert_gradients


pytestmark = pytest.mark.usefixtures("loose_promotion", "freed_pages")


@pytest.mark.slow
def test_held_out_edges_are_found(tmp_path, shared_data, capsys):
    """The most frequent entities have edges enough for short walks."""
    ends = np.load(shared_data / "codex_m" / "codex_m.npz")["train"][:, [0, 2]]
    frequent = np.argsort(-np.bincount(ends.ravel()), kind="stable")[:2_000]
    path = tmp_path / "edges.txt.gz"
    np.savetxt(path, ends[np.isin(ends, frequent).all(1)], "Q%d", header="from to")
    options = "--epochs 4 --dim 16 --length 12 --p 0.5 --q 2"
    node2vec.main([str(path), *options.split()])
    found = capsys.readouterr().out.splitlines()
    assert re.match(r"\d+,\d+ nodes, \d+,\d+ edges, \d,?\d+ held out", found[0])
    score, common = map(float, re.findall(r"0\.\d+", found[-1]))
    assert 0.6 < common < 0.7 and score > common + 0.1, found


def test_gradients_are_those_of_jax_and_sparse():
    rng = np.random.default_rng(0)
    draw = lambda: jnp.asarray(rng.normal(size=(2000, 4)), jnp.float32)
    params = {"nodes": draw(), "contexts": draw()}
    walks, negatives = rng.integers(2000, size=(3, 12)), jnp.arange(20)
    loss = lambda params: node2vec.loss_fn(params, walks, negatives)
    assert_gradients(loss, params, {"['nodes']": 36, "['contexts']": 56})


@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (0.25, 4.0), (4.0, 0.5)])
def test_steps_have_the_probabilities_of_p_and_q(p, q):
    """From 0 to 2; then back to 0, to 1, which is near 0, or to 3, which is not."""
    graph = node2vec.Graph(np.array([[0, 2], [0, 1], [1, 2], [2, 3]]), 4)
    walks = graph.walks(np.zeros(90_000, int), 3, p, q, np.random.default_rng(0))
    assert graph.has(*walks[:, :2].T).all() and graph.has(*walks[:, 1:].T).all()
    after = walks[walks[:, 1] == 2, 2]
    weights = np.array([1 / p, 1, 0, 1 / q])
    found = np.bincount(after, minlength=4) / len(after)
    np.testing.assert_allclose(found, weights / weights.sum(), atol=0.01)
