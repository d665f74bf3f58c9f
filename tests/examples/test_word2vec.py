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


def test_the_loss_is_that_of_negative_sampling_and_its_gradient_sparse():
    rng = np.random.default_rng(0)
    draw = lambda: jnp.asarray(rng.normal(size=(2000, 4)), jnp.float32)
    params = {"words": draw(), "contexts": draw()}
    chunks, negatives = rng.integers(2000, size=(3, 9)), rng.integers(2000, size=(3, 7))
    reach = rng.integers(1, 4, (3, 9))
    given = chunks, reach, negatives
    total = lambda params: word2vec.loss_fn(params, *given)[0]
    capacities = {"['words']": 27, "['contexts']": 48}
    loss = assert_gradients(total, params, capacities, atol=1e-4)
    words, contexts = (np.asarray(x, np.float64) for x in params.values())
    losses = []  # of one pair after the other
    for chunk, reaches, others in zip(*given):
        for i, word in enumerate(chunk):
            for j, near in enumerate(chunk):
                if 0 < abs(i - j) <= reaches[i]:
                    right = np.log1p(np.exp(-words[word] @ contexts[near]))
                    wrong = np.log1p(np.exp(contexts[others] @ words[word]))
                    losses.append(right + word2vec.NEGATIVES * wrong.mean())
    assert word2vec.loss_fn(params, *given)[1] == len(losses)
    np.testing.assert_allclose(loss, np.sum(losses), rtol=1e-5)


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


def test_it_runs_without_tqdm(monkeypatch):
    monkeypatch.setattr(word2vec, "tqdm", None)
    monkeypatch.setattr(word2vec, "CHUNKS", 1)
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


# ------------------------------------------------------------------ the chunks


def test_chunks_have_all_words_in_order(monkeypatch):
    monkeypatch.setattr(word2vec, "PLACES", 8)
    tokens, counts = np.arange(40), np.full(40, 1)
    chunks = word2vec.cut(tokens, counts, np.random.default_rng(0), threshold=99.0)
    assert sorted(chunks.ravel().tolist()) == list(range(40))
    assert set(((chunks[:, 1:] - chunks[:, :-1]) % 40).ravel().tolist()) == {1}
    again = word2vec.cut(tokens, counts, np.random.default_rng(1), threshold=99.0)
    assert sorted(map(tuple, again)) != sorted(map(tuple, chunks))  # cut elsewhere
    short = word2vec.cut(tokens[:5], counts, np.random.default_rng(0), threshold=99.0)
    assert short.shape == (1, 8) and set(short.ravel().tolist()) == set(range(5))


def test_frequent_words_are_thinned_out():
    tokens, counts = np.repeat([0, 1], [100_000, 10]), np.array([100_000, 10])
    chunks = word2vec.cut(tokens, counts, np.random.default_rng(0))
    # sqrt(0.001) + 0.001 of the frequent word is kept; of the rare word, all.
    assert abs(np.sum(chunks == 0) / (0.0326 * 100_000) - 1) < 0.05
    assert 10 <= np.sum(chunks == 1) <= 20  # the last chunk may repeat some


def test_batches_use_every_chunk(monkeypatch):
    monkeypatch.setattr(word2vec, "CHUNKS", 4)
    monkeypatch.setattr(word2vec, "PLACES", 8)
    tokens, counts = np.arange(70), np.ones(70)
    chunks = word2vec.cut(tokens, counts, np.random.default_rng(0))
    steps, words, found = -(-len(chunks) // 4), 0.0, []
    rng = np.random.default_rng(0)
    for (batch, share), _ in zip(word2vec.batches(tokens, counts, rng), range(steps)):
        found.append(batch)
        words += share
    np.testing.assert_array_equal(np.concatenate(found)[: len(chunks)], chunks)
    assert words == pytest.approx(70)
