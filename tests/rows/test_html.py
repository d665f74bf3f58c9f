"""The HTML of SelectedRows and SegmentTensors in notebooks."""

import html.parser
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from sparsejax._rows import html as rows_html


class _Checker(html.parser.HTMLParser):
    """Tags that close as they open, and the text between them."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(x):
    checker = _Checker()
    checker.feed(x._repr_html_())
    assert not checker.open
    return " ".join(checker.text)


def test_selected_rows():
    ids = jnp.array([2, 9, 5])
    text = read(sj.SelectedRows(ids, jnp.arange(6.0).reshape(3, 2), height=9))
    assert "9 × 2 float32, 2 of 3 slots filled" in text
    assert "2 0 1 empty – 5 4 5" in text
    assert "0 of 0 slots" in read(sj.SelectedRows([], jnp.ones((0, 2)), height=9))


def test_where_the_rows_are():
    """Each place of the table has a tick, which is darker for more stored rows."""
    rows = jnp.array([0, *range(2_000, 2_005), 3_999])  # ten rows to a tick
    shown = sj.SelectedRows(rows, jnp.ones((7, 1)), height=4_000)._repr_html_()
    opacity = {
        int(tick): float(shade)
        for d, shade in re.findall("d='([^']*)' stroke=.*?opacity='([^']*)'", shown)
        for tick in re.findall(r"M(\d+) 0v10", d)
    }
    assert sorted(opacity) == [0, 200, 399]
    assert opacity[0] == opacity[399] < opacity[200]
    full = sj.SelectedRows(jnp.arange(4_000), jnp.ones((4_000, 1)), height=4_000)
    assert set(re.findall("stroke-opacity='([^']*)'", full._repr_html_())) == {
        "0.4",
        "1.00",
    }


def test_complex_numbers():
    values = jnp.array([[1.5 + 2j]], jnp.complex64)
    assert "1.5+2j" in read(sj.SelectedRows(jnp.array([2]), values, height=9))


def test_text_in_cells_is_escaped():
    lines = [("first", "<b>")]
    assert "&lt;b&gt;" in rows_html.table(lines, 0)
    assert "<td" in rows_html.table(lines, 0, escaped=True).split("<b>")[0]


def test_segments():
    text = read(sj.SegmentTensor.from_lists([[10, 11], [], [101]], capacity=5))
    assert "3 segments, 3 of 5 elements filled 0 10 11 1 empty 2 101" in text
    nested = sj.SegmentTensor.from_lists([[[10, 11], [101]], [[11], []]])
    assert "0 10 11 101 1 11 empty" in read(nested)
    keyed = {"<id>": nested.values, "score": jnp.ones((4, 2))}
    text = read(sj.SegmentTensor.from_lengths(keyed, jnp.array([3, 1])))
    assert "<id>" in text and "[2] [2] [2] 1 [2]" in text


@pytest.mark.slow
@pytest.mark.parametrize("n", [10, 300_000])
def test_size_is_bounded(n):
    """Large arrays do not make large pages."""
    rows = sj.SelectedRows(np.arange(n), np.ones((n, 50), np.float32), height=10 * n)
    lists = sj.SegmentTensor.from_lengths(np.arange(n), np.full(10, n // 10))
    wide = sj.SegmentTensor.from_lengths(np.arange(n), np.ones(n, np.int32))
    for x in (rows, lists, wide):
        assert len(x._repr_html_()) < 30_000
    if n > 10:
        assert "299,992 more" in read(rows) and "29,984 more" in read(lists)


def test_before_there_are_data():
    """Of tracers and specs the text is shown, escaped."""
    rows = sj.SelectedRows(jnp.array([2]), jnp.ones((1, 2)), height=9)
    spec = jax.eval_shape(lambda: rows)
    assert read(spec) == repr(spec)
    seen = []
    jax.jit(lambda x: seen.append(read(x)))(rows)
    assert "SelectedRows" in seen[0]
    # Rows may be known when values are traced.
    known = lambda x: seen.append(read(sj.SelectedRows(rows.rows, x, 9)))
    jax.jit(known)(rows.values)
    assert "SelectedRows" in seen[1]
    batch = jax.vmap(lambda i: sj.SegmentTensor.from_lengths(i, jnp.array([1, 1])))
    assert "SegmentTensor" in read(batch(jnp.ones((3, 2))))
