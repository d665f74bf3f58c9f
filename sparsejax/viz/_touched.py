"""rows_touched: how many rows each step reads, and the skew of the reads."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from sparsejax._arguments import kind_of
from sparsejax._rows import SelectedRows
from sparsejax._segments import SegmentTensor


_BLUE, _ORANGE = "#2b6cb0", "#c05621"  # visible on light and on dark
_INK = "#7a8490"
_POINTS = 2000


def rows_touched(steps: Iterable[Any], height: int, *, title: str = "") -> Any:
    """Plots the rows that each step touches, and the skew of the reads.

    Left: for each step, the number of ids and of distinct rows among them, which is the
    cost of a sparse step; and the number of rows of the table, which is the cost of a
    dense step. Right: the share of all reads that the most popular rows
    get.

    Args:
      steps: for each step its ids (integers of any shape, or a SegmentTensor of them)
        or a gradient (a SelectedRows whose height is `height`). Ids out of range are
        left out.
      height: int, the number of rows of the table.
      title: str, the title of the figure.

    Returns:
      `matplotlib.figure.Figure`, which notebooks show; `.savefig(path)` writes it.

    Raises:
      ImportError: matplotlib is not installed.
      TypeError: a step that is not ids and not a gradient.
      ValueError: no steps, no rows, or a gradient of another table.

    Example:
      >>> import numpy as np, sparsejax as sj
      >>> steps = np.random.default_rng(0).zipf(1.3, size=(20, 512))
      >>> figure = sj.viz.rows_touched(steps, height=100_000)
      >>> [axes.get_title() for axes in figure.axes]
      ['Rows touched per step', 'Skew of the reads']

    References:
      Naumov et al., "Deep Learning Recommendation Model" (2019), on skewed reads.
    """
    ids = [_ids_of(step, height) for step in steps]
    if not ids or height <= 0:
        raise ValueError(
            "rows_touched: there must be at least one step and one row, got "
            f"{len(ids)} and {height}."
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "rows_touched needs matplotlib, which is not installed: pip install "
            "'sparsejax[viz]'."
        ) from error
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    figure.patch.set_alpha(0)
    left, right = figure.subplots(1, 2)
    _draw_steps(left, ids, height)
    _draw_skew(right, np.concatenate(ids), height)
    if title:
        figure.suptitle(title, color=_INK)
    return figure


def _ids_of(step: Any, height: int) -> np.ndarray:
    if isinstance(step, SegmentTensor):
        step = np.asarray(step.values)[np.asarray(step.segment_ids) < step.num_segments]
    elif isinstance(step, SelectedRows):
        if step.height != height:
            raise ValueError(
                f"rows_touched: got a SelectedRows of height {step.height} for a table "
                f"of {height} rows."
            )
        step = step.rows
    ids = np.asarray(step).reshape(-1)
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(
            "rows_touched: a step must be integer ids, a SegmentTensor of ids or a "
            f"SelectedRows, got {kind_of(step)}."
        )
    return ids[(ids >= 0) & (ids < height)]


def _draw_steps(axes: Any, ids: list[np.ndarray], height: int) -> None:
    number = np.arange(len(ids))
    distinct = [len(np.unique(x)) for x in ids]
    marks = {"marker": "o", "markersize": 3} if len(ids) < 60 else {}
    read = [len(x) for x in ids]
    axes.plot(number, read, color=_ORANGE, label="ids read", **marks)
    axes.plot(number, distinct, color=_BLUE, label="distinct rows", **marks)
    axes.axhline(height, color=_INK, ls="--", lw=1, label="rows of the table")
    axes.set_yscale("log")
    axes.set_ylim(max(0.4, min(distinct) / 2), height * 2)
    _finish(axes, "Rows touched per step", "step", "rows")
    axes.legend(frameon=False, labelcolor=_INK, fontsize=9)


def _draw_skew(axes: Any, ids: np.ndarray, height: int) -> None:
    _, counts = np.unique(ids, return_counts=True)  # bincount needs height of memory
    share = 100 * np.cumsum(np.sort(counts)[::-1]) / max(1, len(ids))
    popular = 100 * np.arange(1, len(share) + 1) / height
    # At most `_POINTS` of them, evenly spaced on the logarithmic axis.
    shown = np.arange(len(share))
    if len(share) > _POINTS:
        shown = np.unique(np.geomspace(1, len(share), _POINTS).astype(np.int64)) - 1
    # The other rows were not read: the curve stays at 100 %.
    line = [np.append(x[shown], 100) for x in (popular, share)] if len(share) else []
    axes.plot(*line, color=_BLUE)
    axes.set_xscale("log")
    axes.set_ylim(0, 103)
    if len(share):
        top = math.ceil(height / 100)
        at = share[min(top, len(share)) - 1]
        axes.plot([100 * top / height], [at], "o", color=_ORANGE)
        text = f"top {top:,} row(s) ({100 * top / height:.3g} %): {at:.0f} % of reads"
        # A rising curve leaves this corner free.
        where = {"transform": axes.transAxes, "ha": "right", "fontsize": 9}
        axes.text(0.98, 0.04, text, color=_ORANGE, **where)
    _finish(axes, "Skew of the reads", "% of rows, most popular first", "% of reads")


def _finish(axes: Any, title: str, x: str, y: str) -> None:
    axes.patch.set_alpha(0)
    axes.set_title(title, color=_INK, fontsize=11)
    axes.set_xlabel(x, color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.tick_params(colors=_INK, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_INK)
