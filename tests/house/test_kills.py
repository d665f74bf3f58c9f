"""The program that kills processes, run as a user runs it."""

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
