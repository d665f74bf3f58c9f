"""Our side of each race runs on tiny data, and the table says what was measured."""

import json
import types

import numpy as np
import pytest


pytest.importorskip("benchmarks")  # a source distribution has none

from benchmarks.races import (  # noqa: E402
    __main__ as races,
    common,
    gensim,
    implicit,
    pykeen,
    vowpal,
)
from examples import word2vec  # noqa: E402


pytestmark = pytest.mark.usefixtures("loose_promotion", "freed_pages")


def points_of(out):
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def test_the_table():
    race = types.SimpleNamespace(
        UNIT="words", SCORE="AUC", EXAMPLE="a.py", VERSION_OF="other"
    )
    point = lambda seconds, score, **more: {
        "seconds": seconds, "samples": 100 * seconds, "score": score, "cpu": 2.0, **more
    }  # fmt: skip
    runs = {
        "ours": [[point(3, 0.7, loss=0.25)], [point(3, 0.6, loss=0.75)]],
        "peer": [[point(1, 0.5), point(2, 0.6)], [point(1, 0.4), point(2, 0.8)]],
    }
    versions, rates = {"ours": "1", "peer": "2"}, {"ours": 0.1, "peer": 1.0}
    head, _, ours, peer = common.table(race, runs, versions, rates).splitlines()
    titles = "side version lr words/s", "seconds to 0.7000", "seconds", "CPU seconds"
    assert head.replace("|", "").split() == " ".join([*titles, "AUC loss"]).split()
    cells = [x.strip() for x in ours.strip("|").split("|")]
    assert cells[:5] == ["a.py", "1", "0.1", "100 (100 to 100)", "3.0, 1 of 2 not"]
    assert cells[5:7] == ["3.0 (3.0 to 3.0)", "2.0 (2.0 to 2.0)"]
    assert cells[7:] == ["0.6500 (0.6000 to 0.7000)", "0.5000 (0.2500 to 0.7500)"]
    assert "2.0, 1 of 2 not" in peer and peer.endswith("| - |")


def test_without_a_name_the_races_are_listed(capsys):
    assert races.main([]) == 0
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines()] == list(races.NAMES)
    here = common.pathlib.Path(races.__file__).parent
    assert all((here / f"{name}_peer.py").is_file() for name in races.NAMES)


def test_gensim(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(word2vec, "CHUNKS", 1)
    rng = np.random.default_rng(0)
    topics = np.array([[f"{a}{b}" for b in "bcdfgh"] for a in "mnpr"])
    text = lambda n: " ".join(topics[rng.integers(4, size=n), :].ravel())
    (tmp_path / "train.txt").write_text(text(1000))
    (tmp_path / "held.txt").write_text(text(30))
    pairs = [
        f"{a} {b} {10.0 * (a[0] == b[0])}" for a in topics[0] for b in topics[:2, 0]
    ]
    for name in "wordsim353.tsv", "simlex999.txt":
        (tmp_path / name).write_text("\n".join(["# a head", *pairs, *pairs[::-1]]))
    paths = {"data": str(tmp_path), "out": str(tmp_path)}
    gensim.ours({**paths, "seed": 0, "lr": 0.3, "epochs": 2, "dim": 8})
    points = points_of(capsys.readouterr().out)
    assert [point["samples"] for point in points] == [6000, 12000]
    assert 0 < points[0]["seconds"] < points[1]["seconds"]
    parts = zip(("valid", "test"), points)
    scores = [gensim.score(tmp_path, part, x["file"], False) for part, x in parts]
    assert scores[1]["loss"] < scores[0]["loss"] < 6 * np.log(2)
    assert scores[1]["score"] > 0.5 and scores[0]["score"] > 0.5


def test_implicit_scores_the_new_items_of_the_last_basket(tmp_path, monkeypatch):
    lines = {
        "user": np.array([*"aababbbaac"]),
        "basket": np.array([1, 1, 2, 3, 2, 4, 4, 3, 3, 5]),
        "item": np.array([0, 1, 2, 1, 4, 0, 5, 0, 6, 7]),
    }
    implicit.write(tmp_path, "test", lines)
    made = np.load(tmp_path / "test.npz")
    assert made["past"].tolist() == [[0, 0], [0, 1], [1, 2], [1, 3]]  # 4 is the 3rd
    # In their last baskets a has 0 and 1 again. c has one basket only, thus no past.
    assert made["wanted"].tolist() == [[0, 5], [1, 0], [1, 4]]
    assert (tmp_path / "test.csv").read_text().startswith("user,basket,item\na,1,0\n")
    vectors = np.zeros((7, 3))
    vectors[[0, 1, 5], 0] = 3.0, 2.0, 1.0  # 0 and 1 were had before
    vectors[[4, 0], 1] = 2.0, 1.0
    np.savez(tmp_path / "1.npz", users=np.eye(3), items=vectors)
    for k, want in ((1, 2 / 3), (2, 1.0)):
        monkeypatch.setattr(implicit, "K", k)
        found = implicit.score(tmp_path, "test", tmp_path / "1.npz", True)
        assert found == {"score": pytest.approx(want)}


@pytest.mark.parametrize("model", ["complex", "distmult"])
def test_pykeen_scores_both_ways_round(model):
    rng = np.random.default_rng(0)
    draw = lambda n: (
        rng.normal(size=(n, 3)) + (model == "complex") * 1j * rng.normal(size=(n, 3))
    )
    entity, relation = draw(5), draw(2)
    value = lambda h, r, t: np.sum(entity[h] * relation[r] * entity[t].conj()).real
    given = np.array([[3, 1, 0], [3, 2 + 1, 0]])
    forth, back = pykeen.score_all(entity, relation, given)
    np.testing.assert_allclose(forth[1:], [value(3, 1, t) for t in range(5)])
    np.testing.assert_allclose(back[1:], [value(h, 1, 3) for h in range(5)])


@pytest.mark.parametrize("part", ["valid", "test"])
def test_vowpal_has_the_same_rows_on_both_sides(part, tmp_path):
    vowpal.prepare(tmp_path, "200", None)
    read = lambda name: (tmp_path / f"{part}{name}").read_text().splitlines()
    rows = [line.split(",") for line in read(".csv")[1:]]
    assert len(rows) == {"valid": 180, "test": 200}[part]
    texts = read("-train.vw") + read("-held.vw")
    assert texts == [f"{'1' if y == '1' else '-1'} |A {a} |B {b}" for y, a, b in rows]
    eats = {("Herbivore", "Plant"), ("Carnivore", "Meat")}
    wanted = [tuple(x.split("-")[0] for x in row[1:]) in eats for row in rows]
    assert wanted == [row[0] == "1" for row in rows] and 60 < sum(wanted) < 140
    held = np.array(wanted[9 * len(rows) // 10 :])
    np.savez(tmp_path / "1.npz", scores=np.where(held, 0.75, 0.25))
    found = vowpal.score(tmp_path, part, tmp_path / "1.npz", True)
    assert found == {"score": 1.0, "loss": pytest.approx(-np.log(0.75))}
