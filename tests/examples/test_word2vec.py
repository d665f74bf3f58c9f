"""examples/word2vec.py learns, prints its results, and rejects unreadable texts."""

import gzip
import re

import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from examples import word2vec
from helpers import assert_gradients


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
    monkeypatch.setattr(word2vec, "CHUNKS", 4)
    monkeypatch.setattr(word2vec, "tqdm", None)  # as if it were not there
    path = tmp_path / "text.txt"
    path.write_text(topics_text(np.random.default_rng(0)))
    words, counts, tokens = word2vec.read_corpus(str(path), 5)
    tx = sj.optim.lazy(sj.optim.adagrad(0.1))
    how = 16, 0.5, tx, sj.value_and_grad
    vectors, losses, speed, ms = word2vec.train(tokens, counts, *how)
    assert losses[-1] < losses[0] and speed > 0 and ms > 0
    units = vectors / jnp.linalg.norm(vectors, axis=1, keepdims=True)
    nearest = np.asarray(jnp.argsort(-units @ units.T, axis=1)[:, 1])
    assert np.mean([words[i][0] == words[j][0] for i, j in enumerate(nearest)]) > 0.9


def test_gradients_are_those_of_jax_and_sparse():
    rng = np.random.default_rng(0)
    draw = lambda: jnp.asarray(rng.normal(size=(2000, 4)), jnp.float32)
    chunks, negatives = rng.integers(2000, size=(3, 9)), rng.integers(2000, size=(3, 7))
    given = chunks, rng.integers(1, 4, (3, 9)), negatives
    loss = lambda params: word2vec.loss_fn(params, *given)[0]
    params = {"words": draw(), "contexts": draw()}
    assert_gradients(loss, params, {"['words']": 27, "['contexts']": 48}, atol=1e-4)


@pytest.mark.slow
def test_main_prints_what_it_promises(tmp_path, capsys, monkeypatch, freed_pages):
    monkeypatch.setattr(word2vec, "TIMED_ROWS", 3000)
    monkeypatch.setattr(word2vec, "CHUNKS", 2)
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress((SENTENCE * 60).encode()))
    word2vec.main(["--text", str(path), "--seconds", "0.2", "--dim", "4"])
    assert freed_pages == [1]
    out = capsys.readouterr().out
    assert re.search(r"Loss [\d.]+ at first, [\d.]+ now; [\d,]+ words/s", out)
    assert re.search(r"\n +seven: \w+, \w+, \w+, \w+, \w+, \w+\n", out)
    assert re.search(r"A step on 3,000 rows: [\d.]+ ms, dense optax [\d.]+ ms", out)


# ------------------------------------------------------------------ the text


def test_the_default_text_is_english_prose():
    words, counts, tokens = word2vec.read_corpus(None, 5)
    assert words[0] == "the" and list(counts) == sorted(counts, reverse=True)
    assert tokens.size > 40_000 and len(words) > 1000
    np.testing.assert_array_equal(np.bincount(tokens), counts)


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
