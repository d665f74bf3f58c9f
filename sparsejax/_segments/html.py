"""HTML for SegmentTensor in notebooks: a coloured row of cells for each segment."""

import html
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from sparsejax import _arguments
from sparsejax._rows.html import MUTED, box, number, shape, table, text
from sparsejax._segments import elements


_MAX_SEGMENTS, _MAX_CELLS = 10, 16  # half as many at the next level
# Distinct hues, used in turn.
_HUES = (210, 30, 140, 280, 0, 180)


def segments(x: Any) -> str:
    """HTML for a SegmentTensor: a coloured row of cells for each segment."""
    arrays = jax.tree.leaves(x)
    if not all(map(_arguments.is_concrete, arrays)) or np.ndim(x.segment_ids) != 1:
        return text(repr(x))
    filled = int(np.sum(np.asarray(x.segment_ids) < x.num_segments))
    title = f"{x.num_segments:,} segments, {filled:,} of {x.capacity:,} elements filled"
    parts = []
    for path, leaf in elements.leaves_with_path(x.values):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        parts.append(f"<div style='{MUTED}'>{html.escape(name)}</div>" * bool(name))
        lines = [[str(k), cells] for k, cells in _segment_cells(x, leaf, _MAX_SEGMENTS)]
        parts.append(table(lines, x.num_segments - len(lines), escaped=True))
    return box("SegmentTensor", title, parts)


def _segment_cells(x: Any, leaf: Any, limit: int) -> Iterable[tuple[int, str]]:
    """Yields the first segments, each as cells of its elements."""
    ids = np.asarray(x.segment_ids)
    places = [np.flatnonzero(ids == k) for k in range(min(limit, x.num_segments))]
    shown = np.concatenate([np.zeros(0, int), *(p[:_MAX_CELLS] for p in places)])
    if elements.is_nested(leaf):
        inner = dict(_inner_cells(leaf))
        texts = [inner.get(int(place), "…") for place in shown]
    else:
        # One gather: only the displayed values leave the device.
        values = np.asarray(leaf[shown]) if len(shown) else ()
        texts = [number(v) if np.ndim(v) == 0 else shape(v) for v in values]
    for k, mine in enumerate(places):
        here, texts = (
            texts[:_MAX_CELLS][: len(mine)],
            texts[min(len(mine), _MAX_CELLS) :],
        )
        more = len(mine) - len(here)
        here += [f"… {more:,} more"] * bool(more)
        yield k, "".join(_cell(text, k) for text in here) or "<i>empty</i>"


def _inner_cells(leaf: Any) -> Iterable[tuple[int, str]]:
    """Yields the cells of the inner segments, which are elements of the outer ones."""
    for path, array in elements.leaves_with_path(leaf.values):
        if not path:  # a map, which has a path, would not fit into a cell
            yield from _segment_cells(leaf, array, _MAX_SEGMENTS * _MAX_CELLS // 2)


def _cell(text: str, k: int) -> str:
    hue = _HUES[k % len(_HUES)]
    return (
        f"<span style='background:hsla({hue},70%,50%,0.22);border-radius:3px;"
        f"margin:1px;padding:0 5px;display:inline-block'>{text}</span>"
    )
