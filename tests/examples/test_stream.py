"""examples/stream.py: the follower is equal at each version, and its answers right."""

import re

import numpy as np
import pytest

from helpers import ROOT, run_python


def write_stream(path, events=6_000, topics=6):
    """Users of a topic take its items; old items go, and new ones come."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        file.write("user,item\n")
        for number in range(events):
            user = rng.integers(60)
            item = topics * rng.integers(5) + user % topics + topics * (number // 400)
            file.write(f"u{user},i{item}\n")


@pytest.mark.slow
def test_a_follower_answers(tmp_path):
    write_stream(tmp_path / "events.csv")
    options = ["--rows", 80, "--batch", 64, "--every", 15]
    lines = run_python(
        ROOT / "examples" / "stream.py", tmp_path / "events.csv", *options
    ).splitlines()
    assert len(lines) == 7
    gone = re.findall(r"(\d+) items gone", "\n".join(lines[:-1]))
    assert len(gone) == 6 and sum(map(int, gone)) > 10  # keys were evicted
    pattern = r"6 versions, all equal; (0\.\d+) of the later answers right"
    (share,) = re.findall(pattern, lines[-1])
    assert float(share) > 0.8, lines[-1]
