"""Pictures of reads."""

import sys

import numpy as np
import pytest

import sparsejax as sj


ROWS = sj.SelectedRows(np.array([4, 10, 4]), np.ones((3, 2)), height=10)
STEPS = [np.array([[3, 3], [7, 99]]), np.array([7, -1, 5]), np.array([], int)]


def lines(axes):
    return {line.get_label(): line.get_ydata() for line in axes.get_lines()}


@pytest.mark.slow
def test_rows_touched_counts(tmp_path):
    figure = sj.viz.rows_touched(STEPS, height=10, title="three steps")
    steps, skew = figure.axes
    drawn = lines(steps)
    np.testing.assert_array_equal(drawn["ids read"], [3, 2, 0])
    np.testing.assert_array_equal(drawn["distinct rows"], [2, 2, 0])
    assert set(drawn["rows of the table"]) == {10}
    share = skew.get_lines()[0].get_ydata()
    np.testing.assert_allclose(share[:3], [40, 80, 100])  # rows 3 and 7 twice, 5 once
    figure.savefig(tmp_path / "touched.png")
    assert (tmp_path / "touched.png").stat().st_size > 10_000


def test_rows_touched_of_segments_and_gradients():
    baskets = sj.SegmentTensor.from_lists([[1, 2], [2]], capacity=9)
    figure = sj.viz.rows_touched([baskets, ROWS], height=10)
    np.testing.assert_array_equal(lines(figure.axes[0])["ids read"], [3, 2])


def test_rows_touched_of_a_table_that_fits_no_memory():
    rng = np.random.default_rng(0)
    steps = [rng.integers(0, 10**12, 5000) for _ in range(3)]
    curve = sj.viz.rows_touched(steps, height=10**12).axes[1].get_lines()[0]
    assert len(curve.get_xdata()) <= 2000 and curve.get_ydata()[-1] == 100


def test_rows_touched_refuses(monkeypatch):
    with pytest.raises(TypeError, match=r"must be integer ids.*float64"):
        sj.viz.rows_touched([np.ones(3)], 10)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'sparsejax\[viz\]'"):
        sj.viz.rows_touched(STEPS, 10)
