"""The program that kills processes."""

import os

import pytest

from helpers import run_python


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_nothing_is_lost_to_kills():
    """A kill of each kind of work, by a process that has not started JAX."""
    code = "from tests.tools import kills; print(kills.compare(seed=1, rounds=1))"
    assert run_python("-c", code) == "{'kills, nothing lost': 9}\n"
