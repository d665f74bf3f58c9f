"""The demo's results: neighbours of words, a file of vectors, and a plot."""

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from sparsejax._files import replacing
from sparsejax.demo import _text
from sparsejax.demo._options import UserError
from sparsejax.demo._text import Corpus


_NEIGHBOURS = 6
_KNOWN_FROM = 10
_INK, _MUTED, _ACCENT = "#1a1a1a", "#b4bcc6", "#2b6cb0"


# ------------------------------------------------------------------ neighbours


def nearest(vectors: np.ndarray, of: int, number: int) -> list[int]:
    """The words whose vectors are most similar to that of `of`, by cosine."""
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    order = np.argsort(-(units @ units[of]), kind="stable")
    return [int(i) for i in order if i != of][:number]


def print_neighbours(corpus: Corpus, vectors: np.ndarray, number: int = 12) -> None:
    """Prints frequent words, and the words most similar to each."""
    print("\nNearest neighbours (cosine):")
    # The vectors of rare words are still close to their random initial values.
    known = int(np.sum(corpus.counts >= _KNOWN_FROM)) or len(corpus.words)
    chosen = [i for i in _text.content_words(corpus, number) if i < known]
    width = max(len(corpus.words[i]) for i in chosen)
    for i in chosen:
        near = (corpus.words[j] for j in nearest(vectors[:known], i, _NEIGHBOURS))
        print(f"  {corpus.words[i]:{width}}  {', '.join(near)}")


# ------------------------------------------------------------------ files


@contextlib.contextmanager
def atomic_write(path: str) -> Iterator[BinaryIO]:
    """A file that replaces `path` at the end.

    After an error or an interrupt the old file is still there, unchanged.
    """
    try:
        with replacing(path) as file:
            yield file
    except OSError as e:
        raise UserError(
            f"cannot write {path} ({e.strerror or e}): the old file is unchanged, name "
            "another file"
        ) from None


def save_vectors(
    path: str, words: Sequence[str], vectors: np.ndarray, settings: Mapping[str, Any]
) -> None:
    """Writes an npz file: `words` and `vectors`, row by row, and `settings` as JSON."""
    with atomic_write(path) as file:
        np.savez(
            file,
            words=np.array(words),
            vectors=vectors,
            settings=np.array(json.dumps(settings)),
        )


def principal_axes(vectors: np.ndarray, number: int = 2) -> np.ndarray:
    """`[n, number]`: directions of the vectors along the axes of greatest variance."""
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    centred = units - units.mean(axis=0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    return left[:, :number] * scale[:number]


def plot(
    path: str,
    progress: Sequence[float],
    losses: Sequence[float],
    words: Sequence[str],
    vectors: np.ndarray,
    title: str,
) -> None:
    """Draws the loss curve, and words by their first two principal axes.

    Args:
      path: of the file; its name tells the format.
      progress: words read at each point of the loss curve.
      losses: mean loss of a pair there.
      words: to show, the most important first. A word whose label would cover another
        one gets a dot only.
      vectors: `[n, D]`, of these words.
      title: of the figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.2), layout="constrained")
    FigureCanvasAgg(figure)  # can measure texts
    figure.suptitle(title, fontsize=11, color=_INK)
    left, right = figure.subplots(1, 2, width_ratios=(1, 2.1))
    _draw_loss(left, np.asarray(progress), np.asarray(losses))
    _draw_words(figure, right, words, principal_axes(vectors))
    with warnings.catch_warnings():
        # The font may not have all letters of the user's text: boxes are fine.
        warnings.filterwarnings("ignore", message=".*missing from (current )?font.*")
        with atomic_write(path) as file:
            kind = os.path.splitext(path)[1][1:].lower()
            figure.savefig(file, dpi=150, format=kind)


def _draw_loss(ax, progress: np.ndarray, losses: np.ndarray) -> None:
    ax.plot(progress / 1e6, losses, color=_MUTED, linewidth=0.8, label="each call")
    width = 2 * (len(losses) // 50) + 1
    if width > 1:
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        middle = progress[width // 2 : -(width // 2)] / 1e6
        ax.plot(middle, smooth, color=_ACCENT, linewidth=2, label=f"mean of {width}")
        ax.legend(frameon=False)
    ax.set(xlabel="words of text (millions)", ylabel="loss of a pair and its negatives")
    ax.set_title("Loss", fontsize=10)
    ax.grid(alpha=0.25)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _draw_words(figure, ax, words: Sequence[str], points: np.ndarray) -> None:
    ax.set_title("Frequent words, first two principal axes", fontsize=10)
    ax.set(xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_color(_MUTED)
    ax.margins(0.06)
    ax.scatter(points[:, 0], points[:, 1], s=5, color=_MUTED, linewidths=0)
    figure.canvas.draw()  # now the layout is fixed, and texts have sizes
    figure.set_layout_engine("none")
    frame, taken, labelled = ax.get_window_extent(), [], []
    for word, point in zip(words, points):
        label = ax.annotate(
            word,
            point,
            xytext=(0, 2.5),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8.5,
            color=_INK,
            parse_math=False,
        )
        box = label.get_window_extent().expanded(1.05, 1.15)
        inside = frame.x0 < box.x0 and box.x1 < frame.x1 and box.y1 < frame.y1
        if inside and not any(box.overlaps(other) for other in taken):
            taken.append(box)
            labelled.append(point)
        else:
            label.remove()
    ax.scatter(*np.transpose(labelled), s=11, color=_ACCENT, linewidths=0)
