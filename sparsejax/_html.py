"""SelectedRows and SegmentTensor as HTML, for notebooks.

No more than a few hundred cells are made, whatever the size of the arrays. Colours are
translucent and text inherits its own, so that it reads on light and on dark pages.
"""

import html
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from sparsejax import _elements, _ids


_SLOTS, _COLUMNS = 8, 6  # of a SelectedRows
_SEGMENTS, _CELLS = 10, 16  # of a SegmentTensor, and half as many a level deeper
_TICKS = 400
_CELL = "padding:1px 6px;text-align:right;font-family:monospace"
_MUTED = "opacity:0.65"
# Hues far apart, in turn; a segment is known by its place as well as by its colour.
_HUES = (210, 30, 140, 280, 0, 180)


def rows(x: Any) -> str:
    """A SelectedRows: where its rows lie, and the first of them."""
    if not (_ids.is_concrete(x.rows) and _ids.is_concrete(x.values)):
        return _text(repr(x))
    ids = np.asarray(x.rows)
    filled = (ids >= 0) & (ids < x.height)
    shape = " × ".join(f"{n:,}" for n in x.shape)
    title = f"{shape} {x.dtype.name}, {filled.sum():,} of {len(ids):,} slots filled"
    # Of the values only what is shown leaves the device.
    values = [np.ravel(v) for v in np.asarray(x.values[:_SLOTS])]
    lines = []
    for row, ok, value in zip(ids, filled, values):
        cells = [_number(v) for v in value[:_COLUMNS]] if ok else ["–"]
        cells += ["…"] * bool(ok and len(value) > _COLUMNS)
        lines.append([f"{row:,}" if ok else "empty", *cells])
    more = len(ids) - len(lines)
    strip = _strip(ids[filled], x.height)
    return _box("SelectedRows", title, [strip, _table(lines, more)])


def segments(x: Any) -> str:
    """A SegmentTensor: a coloured row of cells for each segment."""
    arrays = jax.tree.leaves(x)
    if not all(map(_ids.is_concrete, arrays)) or np.ndim(x.segment_ids) != 1:
        return _text(repr(x))
    filled = int(np.sum(np.asarray(x.segment_ids) < x.num_segments))
    title = f"{x.num_segments:,} segments, {filled:,} of {x.capacity:,} elements filled"
    parts = []
    for path, leaf in _elements.leaves_with_path(x.values):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        parts.append(f"<div style='{_MUTED}'>{html.escape(name)}</div>" * bool(name))
        lines = [[str(k), cells] for k, cells in _segment_cells(x, leaf, _SEGMENTS)]
        parts.append(_table(lines, x.num_segments - len(lines), escaped=True))
    return _box("SegmentTensor", title, parts)


# ------------------------------------------------------------------ segments


def _segment_cells(x: Any, leaf: Any, room: int) -> Iterable[tuple[int, str]]:
    """The first segments, each as cells of its elements."""
    ids = np.asarray(x.segment_ids)
    places = [np.flatnonzero(ids == k) for k in range(min(room, x.num_segments))]
    shown = np.concatenate([np.zeros(0, int), *(p[:_CELLS] for p in places)])
    if _elements.is_nested(leaf):
        inner = dict(_inner_cells(leaf))
        texts = [inner.get(int(place), "…") for place in shown]
    else:
        # At once, and of the values only what is shown leaves the device.
        values = np.asarray(leaf[shown]) if len(shown) else ()
        texts = [_number(v) if np.ndim(v) == 0 else _shape(v) for v in values]
    for k, mine in enumerate(places):
        here, texts = texts[:_CELLS][: len(mine)], texts[min(len(mine), _CELLS) :]
        more = len(mine) - len(here)
        here += [f"… {more:,} more"] * bool(more)
        yield k, "".join(_cell(text, k) for text in here) or "<i>empty</i>"


def _inner_cells(leaf: Any) -> Iterable[tuple[int, str]]:
    """Inner segments are elements of the outer ones: enough of them to show."""
    for path, array in _elements.leaves_with_path(leaf.values):
        if not path:  # of a map, the keys would not fit into a cell
            yield from _segment_cells(leaf, array, _SEGMENTS * _CELLS // 2)


def _cell(text: str, k: int) -> str:
    hue = _HUES[k % len(_HUES)]
    return (
        f"<span style='background:hsla({hue},70%,50%,0.22);border-radius:3px;"
        f"margin:1px;padding:0 5px;display:inline-block'>{text}</span>"
    )


# ------------------------------------------------------------------ pieces


def _box(kind: str, title: str, parts: list[str]) -> str:
    head = f"<b>{kind}</b> <span style='{_MUTED}'>{title}</span>"
    return f"<div style='font-size:90%'>{head}{''.join(parts)}</div>"


def _table(lines: Any, more: int, escaped: bool = False) -> str:
    body = ""
    for first, *cells in lines:
        cells = cells if escaped else map(html.escape, cells)
        body += f"<tr><th style='{_CELL};{_MUTED}'>{html.escape(first)}</th>"
        align = ";text-align:left" if escaped else ""
        body += "".join(f"<td style='{_CELL}{align}'>{c}</td>" for c in cells) + "</tr>"
    if more > 0:
        body += f"<tr><td style='{_MUTED}'>… {more:,} more</td></tr>"
    return f"<table style='border-collapse:collapse'>{body}</table>"


def _strip(ids: np.ndarray, height: int) -> str:
    """A line for the table; a tick is the darker, the more of its rows are there."""
    if not height or not len(ids):
        return ""
    place = np.unique(ids.astype(np.int64)).astype(np.float64) * _TICKS // height
    ticks, counts = np.unique(place.astype(int), return_counts=True)
    # Shades, so that all ticks of one are one path; the faintest can still be seen.
    share = np.minimum(1, counts * _TICKS / max(height, _TICKS))
    shades = np.ceil(4 * share).astype(int)
    paths = "".join(
        f"<path d='{''.join(f'M{t} 0v10' for t in ticks[shades == shade])}' "
        f"stroke='hsl(210,70%,50%)' stroke-opacity='{0.1 + 0.9 * shade / 4:.2f}'/>"
        for shade in np.unique(shades)
    )
    return (
        f"<svg width='{_TICKS}' height='12' style='display:block;margin:2px 0'>"
        f"<path d='M0 11h{_TICKS}' stroke='currentColor' stroke-opacity='0.4'/>"
        f"{paths}</svg>"
    )


def _number(v: Any) -> str:
    v = np.asarray(v)
    if v.dtype.kind in "biu":
        return str(v)
    return f"{complex(v):.4g}" if v.dtype.kind == "c" else f"{float(v):.4g}"


def _shape(v: Any) -> str:
    return f"[{'×'.join(map(str, np.shape(v)))}]"


def _text(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"
