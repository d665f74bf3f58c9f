"""examples/many_devices.py learns, and goes on from a checkpoint on fewer devices."""

import re

import numpy as np
import pytest

from examples import many_devices
from helpers import run_python


pytestmark = [
    pytest.mark.usefixtures("loose_promotion", "freed_pages", "eight_devices"),
    pytest.mark.slow,
]


@pytest.fixture
def run(monkeypatch, capsys):
    heights = {"user": 1_000, "item": 300, "country": 40}
    monkeypatch.setattr(many_devices, "HEIGHTS", heights)
    monkeypatch.setattr(many_devices, "BATCH", 512)

    def run(*options):
        many_devices.main([str(option) for option in options])
        return capsys.readouterr().out

    return run


def _auc(out):
    return [float(x) for x in re.findall(r"0\.\d+", out.splitlines()[-1])]


def test_it_learns_and_goes_on_with_half_of_the_devices(run, tmp_path):
    whole = run("--devices", 2, "--steps", 100)
    found, best = _auc(whole)
    assert best > 0.8 and found > best - 0.15
    folder = "--folder", tmp_path / "run"
    sharded = run("--devices", 4, "--steps", 80, "--save-every", 40, *folder)
    assert re.search(r"\['user'\] +float32\[1000,16\] .* row-sharded", sharded)
    rest = run("--devices", 2, "--steps", 100, *folder)
    assert "goes on from step 80" in rest and "2 devices" in rest
    assert re.search(r"step 100: loss 0\.\d+, [\d,]+ clicks/s", rest)
    np.testing.assert_allclose(_auc(rest), _auc(whole), atol=2e-3)


def test_devices_are_simulated():
    """In a process of its own: JAX has started its devices here."""
    out = run_python("examples/many_devices.py", "--simulate=2", "--steps=1")
    assert "2 devices; memory" in out
