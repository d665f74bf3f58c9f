"""Pictures of reads."""

import numpy as np
import pytest

import sparsejax as sj


ROWS = sj.SelectedRows(np.array([4, 10, 4]), np.ones((3, 2)), height=10)
BAGS = sj.SegmentTensor.from_lists([[1, 2], [2]], capacity=9)
STEPS = [np.array([[3, 3], [7, 99]]), np.array([7, -1, 5]), np.array([], int)]


@pytest.mark.slow
def test_rows_touched_counts(tmp_path):
    figure = sj.viz.rows_touched([*STEPS, BAGS, ROWS], height=10, title="five steps")
    steps, skew = figure.axes
    drawn = {line.get_label(): line.get_ydata() for line in steps.get_lines()}
    np.testing.assert_array_equal(drawn["ids read"], [3, 2, 0, 3, 2])
    np.testing.assert_array_equal(drawn["distinct rows"], [2, 2, 0, 2, 1])
    assert set(drawn["rows of the table"]) == {10}
    popular, share = skew.get_lines()[0].get_data()
    np.testing.assert_allclose(popular, [10, 20, 30, 40, 50, 60, 100])
    np.testing.assert_allclose(share, [20, 40, 60, 80, 90, 100, 100])
    assert steps.get_yscale() == skew.get_xscale() == "log"
    figure.savefig(tmp_path / "touched.png")
    assert (tmp_path / "touched.png").stat().st_size > 10_000


def test_rows_touched_of_a_table_that_fits_no_memory():
    rng = np.random.default_rng(0)
    steps = [rng.integers(0, 10**12, 5000) for _ in range(3)]
    curve = sj.viz.rows_touched(steps, height=10**12).axes[1].get_lines()[0]
    assert len(curve.get_xdata()) <= 2000 and curve.get_ydata()[-1] == 100
