"""Mushrooms: libsvm files to a trained model, through the loader and CSR layers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj


@pytest.fixture
def mushrooms(shared_data):
    load = pytest.importorskip("sklearn.datasets").load_svmlight_file
    folder = shared_data / "agaricus"
    options: Any = dict(zero_based=False, dtype=np.float32)
    train, train_labels = load(str(folder / "agaricus.txt.train"), **options)
    test, test_labels = load(
        str(folder / "agaricus.txt.test"), n_features=train.shape[1], **options
    )
    train_labels, test_labels = (
        x.astype(np.float32) for x in (train_labels, test_labels)
    )
    return (train, train_labels), (test, test_labels)


@dataclasses.dataclass(frozen=True)
class FactorizationMachine:
    """A linear part, and a product of factors for each pair of features."""

    num_features: int
    rank: int

    def init(self, key):
        factors = 0.01 * jax.random.normal(key, (self.num_features, self.rank))
        linear = jnp.zeros((self.num_features, 1))
        return {"factors": factors, "linear": linear, "bias": jnp.zeros(())}

    def __call__(self, params, x):
        if not isinstance(x, sj.SegmentTensor):
            x = sj.SegmentTensor.from_csr(x)
        index, value = x.values["index"], x.values["value"]
        rows = sj.lookup(params["factors"], index, mode="zero") * value[:, None]
        total = sj.segment_sum(rows, x.segment_ids, x.num_segments)
        squares = sj.segment_sum(rows**2, x.segment_ids, x.num_segments)
        pairs = 0.5 * jnp.sum(total**2 - squares, axis=-1)
        return sj.dot(x, params["linear"])[:, 0] + pairs + params["bias"]


MODELS = {
    "logistic regression": lambda n: sj.nn.Dense(
        1, n, kernel_init=jax.nn.initializers.zeros
    ),
    "factorization machine": lambda n: FactorizationMachine(n, 4),
}
# FTRL forgets initial weights, so it trains only the linear part of a machine.
CASES = {
    "ftrl": ("logistic regression", lambda: sj.optim.ftrl(20.0, l1=1.0)),
    "machine": ("factorization machine", lambda: optax.adagrad(0.1)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")  # optax's adagrad
@pytest.mark.parametrize("case", CASES)
def test_mushrooms_are_told_apart(mushrooms, case):
    (rows, labels), (test, test_labels) = mushrooms
    assert rows.shape == (6513, 126) and test.shape == (1611, 126)
    model, make = CASES[case]
    layer = MODELS[model](rows.shape[1])
    tx = sj.optim.lazy(make())
    params = layer.init(jax.random.key(0))
    state = tx.init(params)

    def loss(params, x, y):
        score = layer(params, x).reshape(y.shape)
        return optax.sigmoid_binary_cross_entropy(score, y).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x, y):
        grads = sj.grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    loader = sj.data.DataLoader(
        sj.data.ArrayDataset(rows, labels), 64, shuffle=True, drop_remainder=True
    )
    for _ in range(10):
        for x, y in loader:
            params, state = step(params, state, x, y)
    score = np.asarray(layer(params, test)).reshape(-1)
    assert np.mean((score > 0) == (test_labels > 0.5)) == 1.0
    assert float(loss(params, test, test_labels)) < 0.01
    if case == "ftrl":
        assert np.mean(np.asarray(params["kernel"]) == 0.0) > 0.75
