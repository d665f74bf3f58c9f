"""Files of every reader, damaged at random: see `damage`."""

import collections
import gc

import pytest

import damage
from helpers import slow_but


pytestmark = pytest.mark.usefixtures("loose_promotion")  # as in a reader's session

WITH_ORBAX = {"parallel.restore", "CheckpointManager"}
OTHERS = {name: x for name, x in damage.READERS.items() if name not in WITH_ORBAX}


@pytest.mark.slow
def test_damage_on_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(damage, "READERS", OTHERS)
    monkeypatch.setattr("sys.argv", ["damage", "--count", "20", "--seed", "3"])
    assert damage.main() == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "20 files of seed 3, 0 raised something else"
    assert [line.split("  ")[0] for line in lines] == [*OTHERS]


@pytest.mark.filterwarnings("ignore")  # of orbax, whose errors are raised here
@pytest.mark.parametrize("name", slow_but(["others", *sorted(WITH_ORBAX)], "others"))
def test_damaged_files_are_refused(name, tmp_path):
    names, count, least = [name], 30, 4  # most files of orbax hold what is not read
    if name == "others":
        names, count, least = OTHERS, 200, 90
    bench, found = damage.Bench(tmp_path, names), collections.Counter()
    for case in range(count):
        reader, outcome = bench.try_case(2, case)
        found[outcome] += 1
        assert outcome in ("read", "refused"), f"case {case}, {reader}:\n{outcome}"
    assert found["refused"] >= least, found
    gc.collect()  # orbax' unfinished coroutines warn here, not in a later test
