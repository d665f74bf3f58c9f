"""examples/sequence.py finds the next purchases of real customers."""

import re
from functools import partial

import jax
import numpy as np
import pytest

import sparsejax as sj
from examples import sequence
from helpers import assert_gradients


pytestmark = pytest.mark.usefixtures("loose_promotion", "freed_pages")


@pytest.fixture(autouse=True)
def one_block(monkeypatch):
    monkeypatch.setattr(sequence, "BLOCKS", 1)


@pytest.mark.slow
def test_purchases_are_found(tmp_path, shared_data, capsys):
    """A few epochs are enough for the most frequent items."""
    lines = np.load(shared_data / "online_retail" / "online_retail.npz")
    columns = np.stack([lines[name][:60_000] for name in ("customer", "item")], 1)
    frequent = np.argsort(-np.bincount(columns[:, 1]), kind="stable")[:150]
    path = tmp_path / "purchases.csv"
    kept = columns[np.isin(columns[:, 1], frequent)]
    np.savetxt(path, kept, "%d", ",", header="who,what", comments="")
    options = "--length 10 --dim 32 --epochs 4 --lr 8e-3 --negatives 64"
    sequence.main([str(path), "--columns", "who,what", *options.split()])
    found = capsys.readouterr().out.splitlines()
    assert re.match(r"1,\d+ users, 150 items, 1\d,\d+ lines", found[0])
    assert re.match(r"epoch 4: loss [\d.]+, recall@10 0.\d+, [\d.]+ s", found[-2])
    recall, popular = map(float, re.findall(r"0\.\d+", found[-1]))
    assert popular > 0.1 and recall > 1.7 * popular


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(sequence, "DROPOUT", 0.0)
    params = sequence.init(jax.random.key(0), 1000, 6, 8)
    # A new block adds nothing; this one does.
    change = lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape)
    return params | {"blocks": jax.tree.map(change, params["blocks"])}


@jax.jit
def queries(model, items):
    return sequence.queries(model, items, lambda x, number: x)


@pytest.mark.slow
def test_gradients_are_those_of_jax_and_sparse(model):
    batch = np.random.default_rng(0).integers(1, 1000, (3, 7))
    batch[0, 4:] = 0
    sampler = sj.losses.NegativeSampler.uniform(1000)
    loss = partial(sequence.loss_fn, num_negatives=16)
    of_model = lambda model: loss(model, batch, sampler, jax.random.key(2))
    assert_gradients(of_model, model, {"['items']": 3 * 6 + 3 * 6 + 16}, rtol=1e-3)


def test_a_place_sees_the_items_before_it_and_no_padding(model):
    items = np.array([[5, 6, 7, 0, 0, 0], [5, 6, 7, 8, 9, 10], [4, 6, 7, 0, 0, 0]])
    rows = queries(model, items)
    np.testing.assert_allclose(rows[0, :3], rows[1, :3], atol=1e-5)
    assert np.abs(rows[0, :3] - rows[2, :3]).max(axis=1).min() > 0.01
    best = sequence.best_items(model, items, np.array([3, 6, 3]))
    scores = np.array(rows[np.arange(3), [2, 5, 2]] @ model["items"].T)
    scores[:, 0] = -np.inf
    np.testing.assert_array_equal(best, np.argsort(-scores, axis=1)[:, :10])
