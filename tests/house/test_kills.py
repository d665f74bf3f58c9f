"""The programs that kill processes and damage files, run as a user runs them."""

import os

import pytest

from helpers import run_python


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_nothing_is_lost_to_kills():
    """A kill of each kind of work."""
    lines = run_python(
        "-m", "tests.tools.kills", "--count", 9, "--seed", 1
    ).splitlines()
    assert lines[-1] == "9 kills of seed 1, nothing lost"
    assert [line.split()[1] for line in lines[:-1]] == ["1"] * 9


@pytest.mark.slow
def test_damage_on_the_command_line():
    lines = run_python(
        "-m", "tests.tools.damage", "--count", 50, "--seed", 3
    ).splitlines()
    assert lines[-1] == "50 files of seed 3, 0 raised something else"
