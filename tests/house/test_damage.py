"""Files of every reader, damaged at random: see `damage`."""

import collections

import pytest

import damage


pytestmark = pytest.mark.usefixtures("loose_promotion")  # as in a reader's session

WITH_ORBAX = {"parallel.restore", "CheckpointManager", "nn.Trainer"}
QUICK = [name for name in damage.READERS if name not in WITH_ORBAX]


def _try(bench, seed, count, least):
    """Nothing else came out, and at least so many files were refused."""
    found = collections.Counter()
    for case in range(count):
        name, what = bench.try_case(seed, case)
        assert what in ("read", "refused"), f"case {case}, {name}:\n{what}"
        found[what] += 1
    assert found["refused"] >= least, found


def test_damaged_files_are_refused(tmp_path):
    _try(damage.Bench(tmp_path, QUICK), 1, 100, 45)


@pytest.mark.slow
def test_damage_on_the_command_line(monkeypatch, capsys):
    readers = {name: damage.READERS[name] for name in QUICK}
    monkeypatch.setattr(damage, "READERS", readers)
    monkeypatch.setattr(damage, "_limit_memory", lambda gigabytes: None)
    monkeypatch.setattr("sys.argv", ["damage", "--count", "20", "--seed", "3"])
    assert damage.main() == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "20 files of seed 3, 0 raised something else"
    assert [line.split("  ")[0] for line in lines] == [*readers]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of orbax, whose errors are raised here
@pytest.mark.parametrize("name", damage.READERS)
def test_damaged_files_of_each_reader_are_refused(name, tmp_path):
    bench = damage.Bench(tmp_path, [name])
    if name in WITH_ORBAX:  # most of their files hold what is not read
        _try(bench, 2, 30, 4)
    else:
        _try(bench, 2, 100, 40)
