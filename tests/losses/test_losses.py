"""Losses: each against its published formula in NumPy, float64; sparse gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import sparsejax as sj
from helpers import assert_no_dense, assert_trees_close, is_rows, slow_but
from sparsejax.losses import NegativeSamples


L = sj.losses
V, D, B, T, N = 997, 4, 5, 2, 7


def log_sum(x, axis=-1):
    top = x.max(axis, keepdims=True)
    return np.log(np.exp(x - top).sum(axis)) + top.squeeze(axis)


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


# ------------------------------------------------------------------ on rows of a table


def make(several=False, shared=True, bias=None, corrected=True, lead=(B,)):
    """Parameters and batch, with hits of labels and a negative that is missing."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 20, (*lead, T) if several else lead)
    ids = rng.integers(0, 20, (N,) if shared else (*lead, N))
    ids[..., 1] = -1
    ids[..., 2] = labels.flat[0]
    params = {"table": rng.normal(size=(V, D)), "inputs": rng.normal(size=(*lead, D))}
    if bias is not None:
        params["bias"] = rng.normal(size=(V, 1)[:bias])
    negatives = ids
    if corrected:
        log_qs = (jnp.asarray(rng.normal(size=x.shape)) for x in (ids, labels))
        negatives = NegativeSamples(jnp.asarray(ids), *log_qs)
    return jax.tree.map(jnp.asarray, (params, labels, negatives))


def expected(params, labels, negatives, remove):
    """The scores of labels and negatives; -inf for a negative that does not count."""
    params, labels = jax.tree.map(np.asarray, (params, labels))
    table, x = params["table"], params["inputs"]
    bias = params.get("bias", np.zeros(V)).reshape(V)
    ids, log_q, label_log_q = negatives, 0.0, 0.0
    if isinstance(negatives, NegativeSamples):
        ids, log_q, label_log_q = map(np.asarray, negatives)
    ids = np.broadcast_to(ids, (*x.shape[:-1], N))
    right = labels if labels.ndim == x.ndim else labels[..., None]
    label_log_q = np.reshape(label_log_q, np.shape(label_log_q) and right.shape)
    score = lambda c, q: (table[c] * x[..., None, :]).sum(-1) + bias[c] - q
    others = np.where(ids == -1, -np.inf, score(ids, log_q))
    if remove:
        hits = (ids[..., :, None] == right[..., None, :]).any(-1)
        assert hits.any()
        others = np.where(hits, -np.inf, others)
    return score(right, label_log_q), others


def softmax_formula(right, others):
    return log_sum(np.concatenate([right, others], -1)) - right.mean(-1)


def nce_formula(right, others):
    """Cross-entropies, with a probability of 1 / T for each label."""
    z = 1 / right.shape[-1]
    of_labels = -(z * log_sigmoid(right) + (1 - z) * log_sigmoid(-right)).sum(-1)
    return of_labels - log_sigmoid(-others).sum(-1)


SAMPLED = {
    "each its own": {"shared": False, "several": True, "bias": 2},
    "ids alone": {"corrected": False, "bias": 1},
    "sequences": {"lead": (B, 3)},
}


@pytest.mark.parametrize("name", slow_but(SAMPLED, "each its own"))
def test_sampled_losses(name, x64):
    """Values by the formulas; gradients of rows only, equal to jax.grad's."""
    params, labels, negatives = make(**SAMPLED[name])

    def losses(params, labels, negatives):
        args = params["table"], params["inputs"], labels, negatives
        bias = params.get("bias")
        return {
            (loss.__name__, remove): loss(
                *args, bias=bias, remove_accidental_hits=remove
            )
            for loss in (L.sampled_softmax_loss, L.nce_loss)
            for remove in (True, False)
        }

    def total(params, *batch):
        found = losses(params, *batch)
        return sum(jnp.sum(jnp.cos(x)) for x in found.values()), found

    tables = {k: k != "inputs" for k in params}

    @jax.jit
    def run(*args):
        grads, _ = sj.grad(total, tables=tables, has_aux=True)(*args)
        for key in params.keys() - {"inputs"}:
            assert isinstance(grads[key], sj.SelectedRows)
            grads[key] = grads[key].to_dense()
        return grads, *jax.grad(total, has_aux=True)(*args)

    grads, dense, found = run(params, labels, negatives)
    for (loss, remove), value in found.items():
        formula = nce_formula if loss == "nce_loss" else softmax_formula
        want = formula(*expected(params, labels, negatives, remove))
        np.testing.assert_allclose(value, want, rtol=1e-12)
        assert value.shape == params["inputs"].shape[:-1]
    assert_trees_close(grads, dense, atol=1e-12)
    args = params, labels, negatives
    assert_no_dense(sj.grad(total, tables=tables, has_aux=True), *args)
    # A bias [V, 1] has rows without being asked, [V] has none.
    has_rows = jax.tree.map(
        is_rows, jax.eval_shape(sj.grad(total, has_aux=True), *args)[0], is_leaf=is_rows
    )
    two_axes = {k for k, x in params.items() if x.shape[0] == V and x.ndim == 2}
    assert {k for k, x in has_rows.items() if x} == two_axes


@pytest.mark.slow
@pytest.mark.window
def test_under_vmap_and_scan(x64):
    """Each loss with a table, per example under vmap, and summed by a scan."""
    params, labels, negatives = make(several=True, bias=2)
    table, rest = {k: params[k] for k in ("table", "bias")}, params["inputs"]
    label_log_q = negatives.label_log_q

    def one(table, x, label, log_q):
        mine = negatives._replace(label_log_q=log_q)
        args = table["table"], x, label, mine
        return L.sampled_softmax_loss(*args, bias=table["bias"]) + L.nce_loss(*args)

    def mapped(table):
        mapped = jax.vmap(one, (None, 0, 0, 0))
        return jnp.sum(jnp.sin(mapped(table, rest, labels, label_log_q)))

    def scanned(table):
        def step(total, xs):
            return total + jnp.sin(one(table, *xs)), None

        return jax.lax.scan(step, jnp.zeros(()), (rest, labels, label_log_q))[0]

    @jax.jit
    def run(table):
        sparse = [sj.grad(f)(table) for f in (mapped, scanned)]
        for found in sparse:
            assert all(isinstance(found[key], sj.SelectedRows) for key in table)
        dense = [{k: x.to_dense() for k, x in found.items()} for found in sparse]
        return dense, jax.grad(mapped)(table)

    of_each, dense = run(table)
    for found in of_each:
        assert_trees_close(found, dense, atol=1e-12)


# ------------------------------------------------------------------ in the batch


def test_in_batch_softmax(x64):
    rng = np.random.default_rng(1)
    c = B + 3
    q, k, log_q = rng.normal(size=(B, D)), rng.normal(size=(c, D)), rng.normal(size=c)
    ids = np.array([4, 7, 4, 1, 2, 7, 9, 9])
    where = np.array([1, 1, 1, 0, 1, 1, 0, 1], bool)
    options = {"candidate_ids": ids, "log_q": log_q, "temperature": 0.3, "where": where}
    call = L.in_batch_softmax_loss

    @jax.jit
    def run(q, k, options):
        return [
            call(q, k),
            call(q, k, **options),
            call(q, k, **options, num_hard_negatives=2),
            call(q, k, where=jnp.zeros((B, c), bool)),
        ]

    plain, whole, hard, none = run(q, k, options)
    scores = q @ k.T
    np.testing.assert_allclose(plain, log_sum(scores) - np.diag(scores), rtol=1e-12)
    scores = scores / 0.3 - log_q
    right = np.diag(scores)
    counts = (ids[:B, None] != ids) & where
    assert counts.sum() < where.sum() * B - 5  # accidental hits
    others = np.where(counts, scores, -np.inf)
    want = log_sum(np.c_[right, others]) - right
    np.testing.assert_allclose(whole, want, rtol=1e-12)
    want = log_sum(np.c_[right, np.sort(others)[:, -2:]]) - right
    np.testing.assert_allclose(hard, want, rtol=1e-12)
    np.testing.assert_allclose(none, 0, atol=1e-12)


# ------------------------------------------------------------------ on scores


def test_losses_of_pairs(x64):
    rng = np.random.default_rng(3)
    p, n = rng.normal(size=(B, 2)), rng.normal(size=(B, 2, N))
    where = rng.random((B, 2, N)) < 0.5
    where[0, 0] = False
    mean = lambda x: x.sum(-1, where=where) / np.maximum(where.sum(-1), 1)

    @jax.jit
    def run(p, n, where):
        margin = functools.partial(L.margin_ranking_loss, p, n, 0.4, where=where)
        adversarial = functools.partial(L.self_adversarial_loss, p, n, 0.4)
        return {
            "bpr": L.bpr_loss(p, n, where=where),
            "bpr of one": L.bpr_loss(p, n[..., 0], where=where[..., 0]),
            "hinge": margin(),
            "hardest": margin(hardest=True),
            "hinge of one": L.margin_ranking_loss(p, n[..., 0]),
            "adversarial": adversarial(temperature=2.0),
            "masked": adversarial(where=where),
            "equal weights": adversarial(temperature=0.0),
            "gradient": jax.grad(lambda n: L.self_adversarial_loss(p, n).sum())(n),
        }

    hinge = np.maximum(0, 0.4 + n - p[..., None])
    first = -log_sigmoid(0.4 + p)
    each = -log_sigmoid(-(0.4 + n))
    weights = np.exp(2 * n) / np.exp(2 * n).sum(-1, keepdims=True)
    masked = np.where(where, np.exp(n), 0)
    masked /= np.maximum(masked.sum(-1, keepdims=True), 1e-30)
    want = {
        "bpr": mean(-log_sigmoid(p[..., None] - n)),
        "bpr of one": where[..., 0] * -log_sigmoid(p - n[..., 0]),
        "hinge": mean(hinge),
        "hardest": np.where(where, hinge, 0).max(-1),
        "hinge of one": np.maximum(0, 1 - p + n[..., 0]),
        "adversarial": first + (weights * each).sum(-1),
        "masked": first + (masked * each).sum(-1),
        "equal weights": first + each.mean(-1),
        # None flows through the weights.
        "gradient": np.exp(n - log_sum(n)[..., None]) / (1 + np.exp(-n)),
    }
    found = run(p, n, where)
    assert found["bpr"][0, 0] == 0
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)


# ------------------------------------------------------------------ all


@pytest.mark.slow
def test_derivatives(x64):
    """check_grads of every loss, in all that is differentiable, to second order."""
    params, labels, negatives = make(several=True, bias=2)
    table = params["table"][:20]
    pairs = jnp.asarray(np.random.default_rng(4).normal(size=(2, B)))
    ids = jnp.array([1, 2, 1, 3, 4])

    def total(table, x, bias, candidates, temperature, pairs):
        negative = jnp.stack([pairs[1], 2 * pairs[1]], -1)
        losses = [
            L.sampled_softmax_loss(table, x, labels, negatives, bias=bias[:20]),
            L.nce_loss(table, x, labels, negatives, bias=bias[:20]),
            L.in_batch_softmax_loss(
                x, candidates, candidate_ids=ids, temperature=temperature
            ),
            L.bpr_loss(pairs[0], negative),
            L.margin_ranking_loss(pairs[0], negative, temperature),
            # The weights of a self-adversarial loss are constants, see above.
            L.self_adversarial_loss(pairs[0], negative, temperature=0.0),
        ]
        return sum(jnp.sum(jnp.sin(loss)) for loss in losses)

    args = table, params["inputs"], params["bias"], params["inputs"] + 1
    check_grads(jax.jit(total), (*args, jnp.asarray(0.7), pairs), order=1, rtol=1e-4)


@pytest.mark.slow
def test_16_bits_are_summed_in_float32():
    """bfloat16 has no numbers between 256 and 258."""

    @jax.jit
    def run(x, table):
        labels, ids = jnp.array([1]), jnp.array([2, 3])
        scores = x[:, 0], x[:, 0].astype(jnp.float32)
        return [
            L.sampled_softmax_loss(table, x, labels, ids),
            L.in_batch_softmax_loss(x, jnp.concatenate([x, x.at[:, 0].set(0)])),
            L.bpr_loss(*scores),
        ]

    x = jnp.ones((1, 257), jnp.bfloat16)
    found = run(x, jnp.ones((9, 257), jnp.bfloat16).at[1, 0].set(0))
    assert all(loss.dtype == jnp.float32 for loss in found)
    np.testing.assert_allclose(found[0], np.log(1 + 2 * np.e), atol=1e-4)
    np.testing.assert_allclose(found[1], np.log(1 + 1 / np.e), atol=1e-4)


@pytest.mark.slow
def test_ids_out_of_range_are_seen():
    """A label, or a negative other than -1, that no row belongs to gives NaN."""
    run = jax.jit(L.sampled_softmax_loss)
    table, x = jnp.ones((9, 2)), jnp.ones((2, 2))
    found = run(table, x, jnp.array([-1, 3]), jnp.array([2]))
    np.testing.assert_array_equal(np.isnan(found), [True, False])
    found = run(table, x, jnp.array([1, 3]), jnp.array([9]))
    assert np.isnan(found).all()
