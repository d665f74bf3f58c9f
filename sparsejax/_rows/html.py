"""HTML for SelectedRows in notebooks, and parts shared with SegmentTensor.

The output has at most a few hundred cells, however large the arrays are. Colours are
translucent and text inherits its colour, so light and dark themes both work.
"""

import html
from typing import Any

import numpy as np

from sparsejax import _arguments


_SLOTS, _COLUMNS = 8, 6
_TICKS = 400
_CELL = "padding:1px 6px;text-align:right;font-family:monospace"
MUTED = "opacity:0.65"


def rows(x: Any) -> str:
    """Returns HTML for a SelectedRows: a strip of row positions, and the first rows."""
    concrete = _arguments.is_concrete(x.rows) and _arguments.is_concrete(x.values)
    if not concrete or x.rows.ndim > 1:
        return text(repr(x))
    ids = np.asarray(x.rows)
    filled = (ids >= 0) & (ids < x.height)
    shape = " × ".join(f"{n:,}" for n in x.shape)
    title = f"{shape} {x.dtype.name}, {filled.sum():,} of {len(ids):,} slots filled"
    # Only the displayed values leave the device.
    values = [np.ravel(v) for v in np.asarray(x.values[:_SLOTS])]
    lines = []
    for row, ok, value in zip(ids, filled, values):
        cells = [number(v) for v in value[:_COLUMNS]] if ok else ["–"]
        cells += ["…"] * bool(ok and len(value) > _COLUMNS)
        lines.append([f"{row:,}" if ok else "empty", *cells])
    more = len(ids) - len(lines)
    strip = _strip(ids[filled], x.height)
    return box("SelectedRows", title, [strip, table(lines, more)])


def _strip(ids: np.ndarray, height: int) -> str:
    """Draws the table as a line; a darker tick stands for more stored rows."""
    if not height or not len(ids):
        return ""
    place = np.unique(ids.astype(np.int64)).astype(np.float64) * _TICKS // height
    ticks, counts = np.unique(place.astype(int), return_counts=True)
    # A few shades, one path each; even the faintest is visible.
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


# ------------------------------------------------------------------ parts


def box(kind: str, title: str, parts: list[str]) -> str:
    head = f"<b>{kind}</b> <span style='{MUTED}'>{title}</span>"
    return f"<div style='font-size:90%'>{head}{''.join(parts)}</div>"


def table(lines: Any, more: int, escaped: bool = False) -> str:
    body = ""
    for first, *cells in lines:
        cells = cells if escaped else map(html.escape, cells)
        body += f"<tr><th style='{_CELL};{MUTED}'>{html.escape(first)}</th>"
        align = ";text-align:left" if escaped else ""
        body += "".join(f"<td style='{_CELL}{align}'>{c}</td>" for c in cells) + "</tr>"
    if more > 0:
        body += f"<tr><td style='{MUTED}'>… {more:,} more</td></tr>"
    return f"<table style='border-collapse:collapse'>{body}</table>"


def number(v: Any) -> str:
    v = np.asarray(v)
    if v.dtype.kind in "biu":
        return str(v)
    return f"{complex(v):.4g}" if v.dtype.kind == "c" else f"{float(v):.4g}"


def shape(v: Any) -> str:
    return f"[{'×'.join(map(str, np.shape(v)))}]"


def text(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"
