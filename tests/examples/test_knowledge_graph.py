"""examples/knowledge_graph.py ranks the answers of a real graph above frequent ones."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.races import pykeen
from examples import knowledge_graph
from helpers import assert_gradients


pytestmark = pytest.mark.usefixtures("loose_promotion", "freed_pages")


@pytest.fixture
def codex(tmp_path, shared_data):
    """The triples between the most frequent entities of CoDEx-M."""
    graph = np.load(shared_data / "codex_m" / "codex_m.npz")
    counts = np.bincount(graph["train"][:, [0, 2]].ravel())
    frequent = np.argsort(-counts, kind="stable")[:800]
    for name in ("train", "valid", "test"):
        kept = graph[name][np.isin(graph[name][:, [0, 2]], frequent).all(1)]
        np.savetxt(tmp_path / f"{name}.txt", kept, "%d", delimiter="\t")
    return str(tmp_path)


@pytest.mark.slow
def test_answers_are_ranked_above_frequent_ones(codex, capsys):
    options = "--model complex --dim 64 --epochs 12 --batch 256 --negatives 128"
    knowledge_graph.main([codex, *options.split()])
    found = capsys.readouterr().out.splitlines()
    assert found[0] == "8,515 triples of 613 entities"
    assert re.findall(pykeen.LINE, found[-2])[0][0] == "12"
    mrr, frequent = map(float, re.findall(r"0\.\d+", found[-1]))
    assert frequent == pytest.approx(0.339, abs=0.001)
    assert mrr > frequent + 0.12


@pytest.mark.slow
def test_transe_learns_the_translations_of_a_grid(tmp_path, capsys):
    """A point of a grid and a relation, an offset, have one tail: the best MRR is 1."""
    offsets = [(0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, -1), (2, 1), (1, 2), (3, 0)]
    points = [(y, x) for y in range(15) for x in range(20)]
    triples = [
        f"{y},{x}\t{k}\t{y + a},{x + b}"
        for y, x in points
        for k, (a, b) in enumerate(offsets)
        if (y + a, x + b) in points
    ]
    np.random.default_rng(0).shuffle(triples)
    parts = {"valid": triples[:100], "test": triples[100:300], "train": triples[300:]}
    for name, lines in parts.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    options = "--model transe --dim 32 --negatives 256"
    knowledge_graph.main([str(tmp_path), *options.split()])
    found = capsys.readouterr().out.splitlines()[-1]
    mrr, frequent = map(float, re.findall(r"0\.\d+", found))
    assert mrr > 0.7 > frequent, found


@pytest.mark.parametrize("model", knowledge_graph.MODELS)
def test_scores_are_the_papers_and_gradients_sparse(model):
    rng = np.random.default_rng(0)
    params = {
        "entity": jnp.asarray(rng.normal(size=(500, 4)), jnp.float32),
        "relation": jnp.asarray(rng.normal(size=(90, 4)), jnp.float32),
    }
    triples = rng.integers(0, (500, 90, 500), (3, 3))
    found = knowledge_graph.score_all(params, triples, model)
    np.testing.assert_allclose(found, _scores(params, triples, model), 1e-3, 1e-4)
    negatives = jnp.append(rng.integers(0, 500, 6), triples[0, 2])
    loss = lambda params: knowledge_graph.loss_fn(params, triples, negatives, model, 0)
    assert_gradients(loss, params, {"['entity']": 13, "['relation']": 3})


def _scores(params, triples, model):
    """By the formulas of the papers, in float64."""
    entity, relation = (np.asarray(x, np.float64) for x in params.values())
    h, r = entity[triples[:, :1]], relation[triples[:, 1:2]]
    if model == "transe":
        return -(np.linalg.norm(h + r - entity, axis=-1) ** 2)
    if model == "distmult":
        return np.sum(h * r * entity, axis=-1)
    h, r, t = (x[..., :2] + 1j * x[..., 2:] for x in (h, r, entity))
    return np.real(np.sum(h * r * np.conj(t), axis=-1))


def test_other_right_answers_do_not_count():
    scores = np.array([[9.0, 3, 8, 1, 3]])
    known = np.array([[1, 0, 2], [1, 0, 1], [1, 1, 4]])
    mrr = lambda triples, known: knowledge_graph.filtered_mrr(
        lambda part: np.repeat(scores, len(part), 0), triples, known, block=1
    )
    assert mrr(known[:1], known) == 1  # of 3, 8, 1, 3; id 0 is no entity
    assert mrr(known[1:2], known) == pytest.approx(1 / 1.5)  # 2 is right too; a tie
    assert mrr(known[1:], known) == pytest.approx((1 / 1.5 + 1 / 2.5) / 2)
