"""NegativeSampler: the alias table exactly, frequencies by chi-square tests."""

# `label_log_q` is None without labels.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalIterable=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from helpers import count_traces, slow_but
from sparsejax.losses import _negatives


Sampler = sj.losses.NegativeSampler
V, N = 50, 200_000


def zipf(size):
    return 1.0 / np.arange(1, size + 1)


COUNTS = {
    "zipf": zipf(V),
    "equal": np.ones(V),
    "with zeros": np.where(np.arange(V) % 3, zipf(V)[::-1], 0),
    "one alone": np.eye(V)[7],
    "one heavy": 1e6 * np.eye(V)[3] + 1,
    "many": np.random.default_rng(0).pareto(1.0, 10_007),
    "one id": np.ones(1),
    "equal but for rounding": np.full(49, 0.1),
}
SAMPLERS = {
    "uniform": lambda: Sampler.uniform(V),
    "log_uniform": lambda: Sampler.log_uniform(V),
    "counts": lambda: Sampler.from_counts(COUNTS["with zeros"]),
}


@jax.jit
def draw(sampler, key):
    return sampler.sample(key, N).ids


def assert_follows(ids, probs):
    """A chi-square test, which a correct sampler fails for one key in 100,000."""
    assert ids.min() >= 0 and ids.max() < len(probs)
    counts = np.bincount(ids, minlength=len(probs))
    assert not counts[probs == 0].any()
    probs, counts = probs[probs > 0], counts[probs > 0]
    want = probs * len(ids)
    assert want.min() > 5
    statistic, freedom = np.sum((counts - want) ** 2 / want), len(probs) - 1
    # Wilson and Hilferty's cube root is about normal.
    normal = (statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))
    assert normal / np.sqrt(2 / (9 * freedom)) < 4.3


# ------------------------------------------------------------------ the law


@pytest.mark.parametrize("name", COUNTS)
def test_the_alias_table_holds_the_probabilities(name):
    probs = COUNTS[name] / COUNTS[name].sum()
    threshold, alias = _negatives._alias_table(probs)
    own = threshold / 2.0**32
    own = np.where(alias == np.arange(len(probs)), 1.0, own)
    found = own.copy()
    np.add.at(found, alias, 1 - own)
    np.testing.assert_allclose(found / len(probs), probs, atol=1e-9 / len(probs))
    assert not found[probs == 0].any()  # not even once in 2^32 draws


@pytest.mark.parametrize("name", slow_but(SAMPLERS, "counts"))
def test_frequencies(name):
    sampler = SAMPLERS[name]()
    k = np.arange(V)
    probs = {
        "uniform": np.full(V, 1 / V),
        "log_uniform": np.log((k + 2) / (k + 1)) / np.log(V + 1),  # TensorFlow's
        "counts": COUNTS["with zeros"] ** 0.75 / (COUNTS["with zeros"] ** 0.75).sum(),
    }[name]
    assert_follows(np.asarray(draw(sampler, jax.random.key(0))), probs)
    found = np.exp(sampler.log_prob(k))
    drawn = probs > 0
    np.testing.assert_allclose(found[drawn], probs[drawn], rtol=1e-5)
    np.testing.assert_allclose(found[~drawn], probs[drawn].min(), rtol=1e-5)
    assert np.isnan(sampler.log_prob(jnp.array([-1, V]))).all()


@pytest.mark.slow
@pytest.mark.parametrize("size", [10_000_000, 2**31 - 2])
def test_a_log_uniform_draw_reaches_every_id(size):
    """For more ids than float32 numbers: octaves, parts, last bits."""
    ids = np.asarray(draw(Sampler.log_uniform(size), jax.random.key(1))).astype(int)
    edges = np.r_[0:8, 2 ** np.arange(4, int(np.log2(size))), size]
    probs = np.diff(np.log(edges + 1.0)) / np.log(size + 1)
    assert_follows(np.searchsorted(edges, ids, side="right") - 1, probs)
    late = ids[ids > size // 16]
    assert_follows(late % 64, np.full(64, 1 / 64))
    # The last octave is not a whole one: its density still falls as 1 / id.
    edges = np.linspace(size // 2, size, 9).astype(int)
    law = np.diff(np.log(edges + 1.0))
    last = late[late >= edges[0]]
    assert_follows(np.searchsorted(edges, last, side="right") - 1, law / law.sum())


# ------------------------------------------------------------------ samples


@pytest.mark.slow
def test_expected_counts():
    """The count of an id in a sample; 0 or 1 if the sample is unique."""
    sampler, n, samples = Sampler.from_counts(COUNTS["zipf"], power=1.0), 8, 1_000
    every = np.arange(V)
    excluded = jnp.array([1, 3, 3, -1, V])
    keys = jax.random.split(jax.random.key(2), samples)

    def sample(key):
        both = [
            sampler.sample(key, n, every),
            sampler.sample(key, n, every, exclude=excluded),
            sampler.sample(key, n, every, unique=True),
            sampler.sample(key, n, every, unique=True, exclude=excluded),
        ]
        counts = lambda s: jnp.zeros(V).at[s.ids].add(1.0)
        return [(s.ids, counts(s), jnp.exp(s.label_log_q), s.log_q) for s in both]

    found = jax.tree.map(np.asarray, jax.jit(jax.vmap(sample))(keys))
    probs = zipf(V) / zipf(V).sum()
    rest = np.where(np.isin(every, [1, 3]), 0, probs)
    rest /= rest.sum()
    drawn = rest > 0
    for k, (ids, counts, expected, log_q) in enumerate(found):
        assert (ids >= 0).all()
        if k >= 2:  # distinct
            assert (counts <= 1).all()
        if k % 2:
            assert not counts[:, ~drawn].any()
        np.testing.assert_allclose(
            log_q, np.log(np.take_along_axis(expected, ids, 1)), atol=1e-4
        )
        law = rest if k % 2 else probs
        of_id, share = np.mean(counts, 0)[drawn], np.mean(expected, 0)[drawn]
        if k < 2:
            np.testing.assert_allclose(share, n * law[drawn], rtol=1e-4)
        # TensorFlow's 1 - (1 - p)^t, at the t of this sample, is near the truth.
        slack = 0.05 * share if k >= 2 else 0.0
        assert (abs(of_id - share) < 4.5 * np.sqrt(share / samples) + slack).all()


def test_unique_replays_the_draws():
    """Returns the first n distinct draws, and the number of draws used."""
    sampler = Sampler.from_counts([8.0, 4.0, 2.0, 1.0, 1.0], power=1.0)
    n, key = 4, jax.random.key(5)
    labels = jnp.arange(15).reshape(3, 5) % 5

    @jax.jit
    def run(key):
        draw = lambda k: sampler._draw(jax.random.fold_in(key, k), (3, n))
        sample = sampler.sample(key, (3, n), labels, unique=True)
        return sample, jax.vmap(draw)(jnp.arange(64))

    found, rounds = jax.tree.map(np.asarray, run(key))
    for row, (ids, log_q) in enumerate(zip(found.ids, found.label_log_q)):
        draws = rounds[:, row].reshape(-1).tolist()
        distinct = list(dict.fromkeys(draws))[:n]
        assert ids.tolist() == distinct
        tries = draws.index(distinct[-1]) + 1
        want = 1 - (1 - np.array([8, 4, 2, 1, 1]) / 16) ** tries
        np.testing.assert_allclose(np.exp(log_q), want, rtol=1e-5)


@pytest.mark.slow
def test_slots_that_cannot_be_filled_are_minus_one():

    @jax.jit
    def run(sampler, key):
        return (
            sampler.sample(key, 3, unique=True),
            sampler.sample(key, (2, 3), exclude=[[0, 2], [0, -1]]),
            Sampler.uniform(4).sample(key, 4, unique=True),
        )

    some, rest, every = run(Sampler.from_counts([1, 0, 1, 0]), jax.random.key(0))
    assert sorted(some.ids.tolist()) == [-1, 0, 2]
    assert rest.ids.tolist() == [[-1] * 3, [2] * 3]
    assert np.isfinite(rest.log_q).all()
    assert sorted(every.ids.tolist()) == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.window
def test_transformations():
    """A pytree: an argument of jit, vmap and scan; other counts do not recompile."""

    def ids(sampler, key):
        found = sampler.sample(key, 8, jnp.array([1, 2]))
        return found.ids, found.log_q, found.label_log_q

    traced = count_traces(ids)
    jitted, vmap = jax.jit(traced), jax.jit(jax.vmap(ids, (None, 0)))
    step = lambda sampler, key: (sampler, ids(sampler, key))
    scan = jax.jit(lambda sampler, keys: jax.lax.scan(step, sampler, keys))
    keys = jax.random.split(jax.random.key(3), 4)
    for name in ("zipf", "with zeros"):
        sampler = Sampler.from_counts(COUNTS[name])
        want = [jitted(sampler, key) for key in keys]
        mapped = vmap(sampler, keys)
        _, scanned = scan(sampler, keys)
        for found in (mapped, scanned):
            for a, b in zip(found, zip(*want)):
                np.testing.assert_allclose(a, np.stack(b), rtol=1e-5)
    assert traced.count == 1
