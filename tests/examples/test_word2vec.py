"""examples/word2vec.py learns, prints its results, and rejects unreadable texts."""

import gzip
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from examples import word2vec


pytestmark = pytest.mark.usefixtures("loose_promotion", "freed_pages")

SENTENCE = "the cat saw a dog and the dog saw a bird while seven birds flew over there "


def topics_text(rng, sentences=3000):
    """Sentences of six words, each about one of eight topics of six words."""
    words = [[f"{a}{b}" for b in "bcdfgh"] for a in "mnprstvz"]
    return " ".join(
        " ".join(rng.choice(words[k]) for _ in range(6))
        for k in rng.integers(8, size=sentences)
    )


def test_words_of_a_topic_become_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(word2vec, "PAIRS", 512)
    path = tmp_path / "text.txt"
    path.write_text(topics_text(np.random.default_rng(0)))
    words, counts, tokens = word2vec.read_corpus(str(path), 5)
    tx = sj.optim.adagrad(0.1)
    trained = {}
    for name, how in (
        ("ours", (sj.optim.lazy(tx), sj.value_and_grad)),
        ("dense", (tx, jax.value_and_grad)),
    ):
        vectors, losses, speed, ms = word2vec.train(tokens, counts, 16, 0.5, *how)
        assert losses[-1] < losses[0] and speed > 0 and ms > 0
        units = vectors / jnp.linalg.norm(vectors, axis=1, keepdims=True)
        nearest = np.asarray(jnp.argsort(-units @ units.T, axis=1)[:, 1])
        trained[name] = np.mean(
            [words[i][0] == words[j][0] for i, j in enumerate(nearest)]
        )
    assert trained["ours"] > 0.9 and trained["dense"] > 0.9, trained


def test_gradients_are_those_of_jax_and_sparse():
    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.normal(size=(2000, 4)), jnp.float32)
        for name in ("words", "contexts")
    }
    pairs, negatives = jnp.asarray(rng.integers(2000, size=(64, 2))), jnp.arange(32)
    grads = sj.grad(word2vec.loss_fn)(params, pairs, negatives)
    assert {k: g.capacity for k, g in grads.items()} == {"words": 64, "contexts": 96}
    want = jax.grad(word2vec.loss_fn)(params, pairs, negatives)
    for name, g in grads.items():
        np.testing.assert_allclose(g.to_dense(), want[name], rtol=1e-4, atol=1e-5)


def test_the_loss_is_that_of_negative_sampling():
    """With all negatives equally likely it is 2 pairs' logistic losses, one by one."""
    params = {
        "words": jnp.array([[1.0], [2.0]]),
        "contexts": jnp.array([[3.0], [-1.0]]),
    }
    loss = word2vec.loss_fn(params, jnp.array([[0, 1], [1, 0]]), jnp.array([1, 1]))
    minus_log_sigmoid = lambda x: np.log1p(np.exp(-x))
    right = minus_log_sigmoid(-1.0) + minus_log_sigmoid(6.0)
    wrong = minus_log_sigmoid(1.0) + minus_log_sigmoid(2.0)
    np.testing.assert_allclose(loss, right + word2vec.NEGATIVES * wrong, rtol=1e-6)


@pytest.mark.slow
def test_main_prints_what_it_promises(tmp_path, capsys, monkeypatch, freed_pages):
    monkeypatch.setattr(word2vec, "TIMED_ROWS", 3000)
    monkeypatch.setattr(word2vec, "PAIRS", 256)
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress((SENTENCE * 60).encode()))
    word2vec.main(["--text", str(path), "--seconds", "0.2", "--dim", "4"])
    assert freed_pages == [1]
    out = capsys.readouterr().out
    assert re.search(r"Loss [\d.]+ at first, [\d.]+ now; [\d,]+ words/s", out)
    assert re.search(r"\n +seven: \w+, \w+, \w+, \w+, \w+, \w+\n", out)
    assert re.search(r"A step on 3,000 rows: [\d.]+ ms, dense optax [\d.]+ ms", out)


def test_it_runs_without_tqdm(monkeypatch):
    monkeypatch.setattr(word2vec, "tqdm", None)
    monkeypatch.setattr(word2vec, "PAIRS", 64)
    tx = sj.optim.lazy(optax.sgd(0.1))
    tokens, counts = np.arange(200) % 20, np.full(20, 10)
    _, losses, _, _ = word2vec.train(tokens, counts, 4, 0, tx, sj.value_and_grad)
    assert len(losses) == 2  # of the first step and of the last one


# ------------------------------------------------------------------ the text


def test_the_default_text_is_english_prose():
    words, counts, tokens = word2vec.read_corpus(None, 5)
    assert words[0] == "the" and list(counts) == sorted(counts, reverse=True)
    assert tokens.size > 40_000 and len(words) > 1000
    np.testing.assert_array_equal(np.bincount(tokens), counts)


def test_words_of_any_alphabet(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(
        b"\xef\xbb\xbf" + "größe naïve слово x 1 ".encode() + b"aa bb cc dd ee ff gg"
    )
    words, _, tokens = word2vec.read_corpus(str(path), 1)
    assert set(words) == {*"größe naïve слово aa bb cc dd ee ff gg".split()}
    assert tokens.size == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*No such file"),
        (b"", r"must have 10 words that occur 5 times \(--min-count\), got 0\."),
        (b"two words", "got 0"),
        (bytes(range(128, 256)) * 9, "cannot read .* as UTF-8 text"),
        (gzip.compress(SENTENCE.encode() * 20)[:-12], "cannot read .*"),
        (b"\x1f\x8b" + b"\xff" * 40, "cannot read .*"),
        (gzip.compress(SENTENCE.encode())[:20] + b"\xff" * 30, "cannot read .*"),
    ],
    ids="missing empty short binary cut no_gzip broken".split(),
)
def test_a_text_that_cannot_be_used(content, message, tmp_path):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match=f"^word2vec: .*{message}") as error:
        word2vec.main(["--text", str(path)])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", ["--seconds", "--dim", "--min-count"])
def test_options_out_of_range(option, capsys):
    for value in ("0", "-1"):
        with pytest.raises(SystemExit, match="must be positive"):
            word2vec.main([option, value])
    with pytest.raises(SystemExit):
        word2vec.main([option, "many"])
    assert f"argument {option}: invalid" in capsys.readouterr().err


# ------------------------------------------------------------------ the pairs


def test_skip_grams_are_neighbours_both_ways(monkeypatch):
    rng, tokens, counts = np.random.default_rng(0), np.arange(9), np.ones(9)
    monkeypatch.setattr(word2vec, "WINDOW", 1)
    pairs = word2vec.skip_grams(tokens, counts, rng, threshold=9.0)
    expected = {(i, i + 1) for i in range(8)} | {(i + 1, i) for i in range(8)}
    assert {tuple(p) for p in pairs.tolist()} == expected
    monkeypatch.setattr(word2vec, "WINDOW", 3)
    wide = word2vec.skip_grams(tokens, counts, rng, threshold=9.0)
    assert np.abs(wide[:, 0] - wide[:, 1]).max() == 3
    assert len(word2vec.skip_grams(tokens[:1], counts, rng, threshold=9.0)) == 0


def test_frequent_words_are_thinned_out():
    tokens, counts = np.repeat([0, 1], [100_000, 10]), np.array([100_000, 10])
    pairs = word2vec.skip_grams(tokens, counts, np.random.default_rng(0))
    # sqrt(0.001) + 0.001 of the frequent word is kept; a word has 6 pairs on average.
    assert abs(np.sum(pairs == 0) / (2 * 6 * 0.0326 * 100_000) - 1) < 0.05
    assert np.sum(pairs[:, 0] == 1) > 40  # of the rare word, all


def test_batches_use_every_pair(monkeypatch):
    monkeypatch.setattr(word2vec, "PAIRS", 8)
    tokens, counts = np.arange(30), np.ones(30)
    rng = np.random.default_rng(0)
    pairs = word2vec.skip_grams(tokens, counts, np.random.default_rng(0))
    steps, words, found = -(-len(pairs) // 8), 0.0, []
    for (batch, share), _ in zip(word2vec.batches(tokens, counts, rng), range(steps)):
        found.append(np.asarray(batch))
        words += share
    np.testing.assert_array_equal(np.concatenate(found)[: len(pairs)], pairs)
    assert words == pytest.approx(30)
