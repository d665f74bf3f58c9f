"""examples/clicks.py nears the AUC of the clicks that it makes, also in 8 bits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from benchmarks.races import fuxictr
from examples import clicks
from helpers import assert_gradients, run_python


pytestmark = pytest.mark.usefixtures("loose_promotion", "freed_pages")

# A process with the files alone.
SERVER = """
import pickle, sys
import jax, jax.export, numpy as np
import sparsejax
program = jax.export.deserialize(bytearray(open("program.bin", "rb").read()))
weights = pickle.load(open("weights.pickle", "rb"))
for rows in (1, 3):
    ids, numbers = np.ones((rows, 4), np.int32), np.zeros((rows, 1), np.float32)
    print(program.call(weights, ids, numbers)[0])
"""


@pytest.mark.slow
def test_clicks_are_predicted_and_served(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(clicks, "HEIGHTS", (5, 20, 100, 1_000))
    monkeypatch.setattr(clicks, "WORDS", clicks.WORDS[:4])
    words = ",".join(clicks.WORDS)
    options = ["--rows", "100000", "--epochs", "2", "--out", str(tmp_path)]
    clicks.main([*options, "--words", words])
    out = capsys.readouterr().out
    assert re.match(r"100,000 rows, 1,1\d\d words\nstep 50: loss 0", out)
    assert [x[0] for x in re.findall(fuxictr.LINE, out)] == ["50", "100", "150"]
    found, small, best = map(float, re.findall(r"AUC (0\.\d+)", out))
    assert best - 0.03 < found < best + 0.005 and abs(small - found) < 0.002
    one, same = map(float, run_python("-c", SERVER, cwd=tmp_path).split())
    assert one == pytest.approx(same, rel=1e-5)
    ids, numbers = np.ones((1, 4), np.int32), np.zeros((1, 1), np.float32)
    assert one == pytest.approx(float(clicks.load(tmp_path)(ids, numbers)[0]), rel=1e-3)


def test_gradients_are_those_of_jax_and_sparse():
    layer = sj.nn.EmbeddingCollection({"a": (300, 4), "b": (400, 4)})
    params = clicks.init(jax.random.key(0), layer, 9)
    ids = np.random.default_rng(0).integers(0, 300, (16, 2))
    loss = lambda params: jnp.sum(clicks.predict(params, ids, jnp.ones((16, 1)), layer))
    sparse = {"['tables']['stack_width4_float32']": 32}
    assert_gradients(loss, params, sparse, rtol=1e-3)


def test_auc_is_the_share_of_pairs_in_order_and_half_of_the_ties():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 9, 99), rng.integers(0, 2, 99)
    order = np.sign(scores[labels == 1][:, None] - scores[labels == 0])
    assert clicks.auc(scores, labels) == pytest.approx((1 + order.mean()) / 2)
