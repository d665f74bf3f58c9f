"""rows_touched: how many rows each step reads, and the skew of the reads."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from sparsejax._arguments import kind_of
from sparsejax._rows import SelectedRows
from sparsejax._segments import SegmentTensor


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
            f"there must be a step and a row, got {len(ids)} steps and height={height}."
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "rows_touched needs matplotlib: pip install 'sparsejax[viz]'."
        ) from error
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_steps(left, ids, height)
    _draw_skew(right, np.concatenate(ids), height)
    if title:
        figure.suptitle(title)
    return figure


def _ids_of(step: Any, height: int) -> np.ndarray:
    if isinstance(step, SegmentTensor):
        step = np.asarray(step.values)[np.asarray(step.segment_ids) < step.num_segments]
    elif isinstance(step, SelectedRows):
        if step.height != height:
            raise ValueError(
                f"a SelectedRows has height {step.height}, the table {height} rows."
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
    distinct = [len(np.unique(x)) for x in ids]
    marker = "." if len(ids) < 60 else ""
    axes.plot([len(x) for x in ids], marker=marker, label="ids read")
    axes.plot(distinct, marker=marker, label="distinct rows")
    axes.axhline(height, color="gray", ls="--", label="rows of the table")
    axes.set_ylim(max(0.4, min(distinct) / 2), height * 2)
    axes.set(yscale="log", title="Rows touched per step", xlabel="step", ylabel="rows")
    axes.legend()


def _draw_skew(axes: Any, ids: np.ndarray, height: int) -> None:
    _, counts = np.unique(ids, return_counts=True)  # bincount needs height of memory
    share = 100 * np.cumsum(np.sort(counts)[::-1]) / max(1, len(ids))
    popular = 100 * np.arange(1, len(share) + 1) / height
    # At most `_POINTS` of them, evenly spaced on the logarithmic axis.
    shown = np.arange(len(share))
    if len(share) > _POINTS:
        shown = np.unique(np.geomspace(1, len(share), _POINTS).astype(np.int64)) - 1
    # The other rows were not read: the curve stays at 100 %.
    axes.plot(np.append(popular[shown], 100), np.append(share[shown], 100))
    axes.set(xscale="log", ylim=(0, 103), title="Skew of the reads")
    axes.set(xlabel="% of rows, most popular first", ylabel="% of reads")
