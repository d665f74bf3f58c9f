"""Files of every reader, damaged at random: see `damage`."""

import collections

import pytest

import damage


pytestmark = pytest.mark.usefixtures("loose_promotion")  # as in a reader's session

WITH_ORBAX = {"parallel.restore", "CheckpointManager", "nn.Trainer"}
QUICK = sorted(damage.READERS.keys() - WITH_ORBAX)


def _try(bench, seed, count, least):
    """Nothing else came out, and at least so many files were refused."""
    found = collections.Counter()
    for case in range(count):
        name, what = bench.try_case(seed, case)
        assert what in ("read", "refused"), f"case {case}, {name}:\n{what}"
        found[what] += 1
    assert found["refused"] >= least, found


def test_damaged_files_are_refused(tmp_path):
    _try(damage.Bench(tmp_path, QUICK), 1, 250, 120)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of orbax, whose errors are raised here
@pytest.mark.parametrize("name", damage.READERS)
def test_damaged_files_of_each_reader_are_refused(name, tmp_path):
    bench = damage.Bench(tmp_path, [name])
    if name in WITH_ORBAX:  # most of their files hold what is not read
        _try(bench, 2, 30, 4)
    else:
        _try(bench, 2, 100, 40)
