"""Files of every reader, damaged at random: see `damage`."""

import gc

import pytest

import damage


# As in a reader's session.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("loose_promotion")]

WITH_ORBAX = ["CheckpointManager", "parallel.restore"]


@pytest.mark.filterwarnings("ignore")  # of orbax, whose errors are raised here
@pytest.mark.parametrize("name", ["others", *WITH_ORBAX])
def test_damaged_files_are_refused(name):
    names, count, least = [name], 30, 4  # most files of orbax hold what is not read
    if name == "others":
        names = [name for name in damage.READERS if name not in WITH_ORBAX]
        count, least = 200, 90
    found = damage.compare(2, names, count)
    assert found["refused"] >= least, found
    gc.collect()  # orbax' unfinished coroutines warn here, not in a later test
