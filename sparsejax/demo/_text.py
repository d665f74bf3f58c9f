"""The demo's text: reading it, splitting it into words, making pairs of neighbours."""

import collections
import gzip
import pathlib
import re
import stat
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sparsejax.demo._options import UserError


class Corpus(NamedTuple):
    """A text as word numbers.

    Args:
      words: the vocabulary, most frequent first.
      counts: int64 `[V]`, how often each word occurs.
      tokens: int32 `[N]`, the text; out-of-vocabulary words are left out.
    """

    words: list[str]
    counts: np.ndarray
    tokens: np.ndarray


# Two letters or more, of any alphabet.
_WORD = re.compile(r"[^\W\d_]{2,}")
_GZIP = b"\x1f\x8b"
_PIECE = 1_000_000  # words whose pairs are held in memory at a time


# ------------------------------------------------------------------ reading


def read_text(path: str | None) -> str:
    """The text in `path` (UTF-8, plain or gzip), or the default text.

    The default is the help topics of CPython: 65,000 words of English prose about
    Python.
    """
    if path is None:
        return _default_text()
    try:
        data = _read_bytes(pathlib.Path(path))
        if data.startswith(_GZIP) or path.endswith(".gz"):
            data = gzip.decompress(data) if data else data
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise UserError(
            f"{path} is not a whole gzip file: unpack it, or name another --text"
        ) from None
    except (OSError, ValueError) as e:  # ValueError: a null character in the name
        reason = getattr(e, "strerror", None) or e
        raise UserError(
            f"cannot read {path} ({reason}): name a readable text file with --text"
        ) from None
    if not data.strip():
        raise UserError(f"{path} is empty: name a file with some text in it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(
            f"{path} is not UTF-8 text but binary or in another encoding: convert it "
            "(iconv -t utf-8), or name another --text"
        )
    return text


def _default_text() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # not in all distributions of Python
        raise UserError(
            "this Python comes without its help texts (pydoc_data): name a text file "
            "with --text"
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def _read_bytes(path: pathlib.Path) -> bytes:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise OSError(0, "it is a directory")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):  # /dev/zero never ends
        raise OSError(0, "it is not a file")
    return path.read_bytes()


# ------------------------------------------------------------------ words


def make_corpus(text: str, min_count: int, max_vocab: int) -> Corpus:
    """Splits a text into lower-case words and numbers them by frequency.

    Args:
      text: any.
      min_count: words that occur less often are left out.
      max_vocab: only this many of the most frequent words are kept.
    """
    found = _WORD.findall(text.lower())
    counter = collections.Counter(found)
    # Ties in alphabetical order, so that the same text gives the same numbers.
    ranked = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
    kept = [(word, n) for word, n in ranked[:max_vocab] if n >= min_count]
    if len(kept) < 2:
        raise UserError(
            f"the text is too short: of its {len(found)} words, {len(kept)} occur "
            f"--min-count {min_count} times or more. Take a longer text or a lower "
            "--min-count"
        )
    number = {word: i for i, (word, _) in enumerate(kept)}
    tokens = [number[word] for word in found if word in number]
    return Corpus(
        [word for word, _ in kept],
        np.array([n for _, n in kept], np.int64),
        np.array(tokens, np.int32),
    )


def content_words(corpus: Corpus, number: int) -> list[int]:
    """Frequent words that say what a text is about, in any language.

    Function words are evenly distributed over a text, content words come in clumps. The
    text is cut into a hundred parts. The clumpiness of a word is the variance of its
    counts over their mean, which is about 1 for words at random positions.
    """
    parts = np.array_split(corpus.tokens, 100)
    frequent = min(len(corpus.words), max(number, 300))
    counts = np.stack([np.bincount(p, minlength=frequent)[:frequent] for p in parts])
    clumpiness = counts.var(axis=0) / np.maximum(counts.mean(axis=0), 1e-9)
    long_enough = np.array([len(word) > 3 for word in corpus.words[:frequent]])
    score = clumpiness * np.sqrt(corpus.counts[:frequent]) * long_enough
    return [int(i) for i in np.argsort(-score, kind="stable")[:number]]


# ------------------------------------------------------------------ pairs


def keep_probability(corpus: Corpus, threshold: float) -> np.ndarray:
    """The probability to keep each word when frequent words are subsampled.

    `min(1, sqrt(t / f) + t / f)` for a word of relative frequency f.
    """
    rarity = threshold * corpus.tokens.size / corpus.counts
    return np.minimum(1.0, np.sqrt(rarity) + rarity)


def expected_pairs(corpus: Corpus, keep: np.ndarray, window: int) -> float:
    """About how many pairs one epoch has."""
    return float(np.sum(corpus.counts * keep)) * (window + 1)


def skip_grams(
    tokens: np.ndarray, keep: np.ndarray, window: int, rng: np.random.Generator
) -> np.ndarray:
    """The pairs of one pass over a text, shuffled.

    Frequent words are subsampled first, so windows reach over the dropped ones. The
    window of each word is drawn from 1 to `window`, which gives near words more weight.

    Args:
      tokens: int `[N]`.
      keep: float `[V]`, from `keep_probability`.
      window: the largest window, in words to each side.
      rng: for all random draws.

    Returns:
      int32 `[P, 2]`: a word, and a word near it.
    """
    kept = tokens[rng.random(tokens.size) < keep[tokens]]
    reach = rng.integers(1, window + 1, kept.size)
    pairs = [np.zeros((0, 2), np.int32)]
    for distance in range(1, min(window, kept.size - 1) + 1):
        left, right = kept[:-distance], kept[distance:]
        near = reach[:-distance] >= distance
        pairs.append(np.stack([left[near], right[near]], axis=1))
        near = reach[distance:] >= distance
        pairs.append(np.stack([right[near], left[near]], axis=1))
    return rng.permutation(np.concatenate(pairs))


def all_skip_grams(
    corpus: Corpus, keep: np.ndarray, window: int, epochs: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """The pairs of all epochs; a long text in pieces, each shuffled separately."""
    pieces = np.array_split(corpus.tokens, -(-corpus.tokens.size // _PIECE))
    for _ in range(epochs):
        for piece in pieces:
            yield skip_grams(piece, keep, window, rng)


def batches(pairs: Iterator[np.ndarray], size: int, chunk: int) -> Iterator[np.ndarray]:
    """Cuts a stream of pairs into chunks of batches: int32 `[<= chunk, size, 2]`.

    The last batch is padded by repeating pairs.
    """
    rest = np.zeros((0, 2), np.int32)
    for more in pairs:
        rest = np.concatenate([rest, more])
        while len(rest) >= chunk * size:
            yield rest[: chunk * size].reshape(chunk, size, 2)
            rest = rest[chunk * size :]
    if len(rest):
        steps = -(-len(rest) // size)
        yield np.resize(rest, (steps * size, 2)).reshape(steps, size, 2)
