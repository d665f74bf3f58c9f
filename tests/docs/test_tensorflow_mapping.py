"""docs/tensorflow.md: its code, checked against the answers of TensorFlow and Keras.

`golden/tensorflow.json` and `.npz` hold the answers of the real systems, and how they
were called; the other rows are in `tensorflow.txt`, with NumPy or by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

import sparsejax as sj
from recorded import TABLE, Page, after, page_ran, same  # noqa: F401  (a fixture)


pytestmark = pytest.mark.slow

PAGE = Page("tensorflow", hidden=("10 ",), tables=("params", "weights"), zeros=True)


# ------------------------------------------------------------------ for tensorflow.txt

GIVEN = PAGE.inputs("global_norm of repeated ids")
REPEATED = sj.SelectedRows(GIVEN["indices"], GIVEN["values"], 9)
SAMPLER = {"range_max": 9, "unigrams": np.arange(1, 10), "distortion": 0.75}
SAMPLER |= {"key": jax.random.key(0), "num_sampled": 20_000, "labels": np.arange(9)}
SAMPLER |= {"unique": False}
K = np.arange(9)
PAIR = {"queries": TABLE[:3], "candidates": TABLE[3:8]}
WEIGHTED = sj.SegmentTensor.from_lists(
    {"index": [[4, 1], [0]], "value": [[1.0, 2.0], [3.0]]}
)
KEYS = [1 << 40, 5], [1 << 40, 7], [8, 1 << 40]
TINY = jnp.float32(1e-6)  # so small that eps shows, at the first step


def has_law(found, law):
    """Whether 20,000 samples are drawn by a law, and say so."""
    counts, want = np.bincount(found.ids, minlength=9), 20_000 * law
    close = (np.abs(counts - want) < 5 * np.sqrt(want)).all()
    return close and same(np.exp(found.label_log_q), want)


def retrieval_loss(queries, candidates, ids, log_q, temperature):
    """As call() of tfrs.tasks.Retrieval computes it."""
    scores = queries @ candidates.T / temperature - log_q
    hits = (ids[:3, None] == ids) & ~np.eye(3, 5, dtype=bool)
    scores[hits] = np.finfo(np.float32).min
    return -np.diag(scores - scipy.special.logsumexp(scores, axis=1, keepdims=True))


def scale_of(layer):
    """The factor of the bag of rows 4 and 1, with weights 1 and 2."""
    params = jax.jit(layer.init)(jax.random.key(0))
    (table,) = map(np.asarray, params.values())
    bags = jax.jit(layer)(params, {"clicked": WEIGHTED})["clicked"]
    return np.asarray(bags)[0] / (table[4] + 2 * table[1])


def first_step(tx):
    return -np.asarray(tx.update(TINY, tx.init(TINY), TINY)[0])


def moves(name):
    """Whether row 8, which only the first step reads, moves later."""
    return (np.diff(PAGE.first(name)[:, 8], axis=0) != 0).any()


# ------------------------------------------------------------------ by hand


def test_repeated_ids_in_keras():
    """Difference: repeated ids under Keras Adam, Adagrad, RMSprop; each is squared."""
    name = "Keras' Adagrad, repeated ids"
    w, ids, targets = PAGE.inputs(name).values()
    merged, squares = np.zeros_like(w), np.full_like(w, 0.1)
    np.add.at(merged, ids[0], targets[0])
    np.add.at(squares, ids[0], targets[0] ** 2)
    assert same(PAGE.first(name)[0], w - 0.1 * merged / np.sqrt(squares + 1e-7))
    grad = sj.SelectedRows(ids[0], targets[0], 9)
    ours = after(sj.optim.lazy(optax.adagrad(0.1)), 1, w, grad)
    assert same(ours, w - 0.1 * merged / np.sqrt(0.1 + merged**2 + 1e-7))


def test_repeated_ids_in_raw_ops():
    """Difference: repeated ids in `raw_ops.ResourceSparseApply*`; a step for each."""
    name = "repeated ids of ResourceSparseApplyAdagradV2"
    w, values, indices = PAGE.inputs(name).values()
    h, one_by_one = np.zeros_like(w), w.copy()
    for row, g in zip(indices, values):
        h[row] += g**2
        one_by_one[row] -= 0.1 * g / (np.sqrt(h[row]) + 1e-7)
    assert same(PAGE.first(name), one_by_one)
    grad = sj.SelectedRows(indices, values, 9)
    off = np.abs(after(sj.optim.adagrad(0.1, eps=1e-7), 1, w, grad) - one_by_one)
    assert np.flatnonzero(off.max(axis=1) > 1e-3).tolist() == [7]


test_line, test_recorded, test_nothing_is_left_out = PAGE.tests(globals())
