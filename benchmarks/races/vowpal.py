"""Clicks from text: examples/clicks.py against Vowpal Wabbit, logistic regression.

Rows as the benchmark of fwumious_wabbit (outbrain) describes them: an animal, one of
1,000 herbivores and 1,000 carnivores, is offered one of 1,000 plants and 1,000 meats,
and eats what its kind eats. `--data` is the number of rows. Vowpal Wabbit learns
weights of words and of pairs (`-q`), each row once, from its own text; the example
trains DCN-v2 from CSV. The clock has reading and parsing on both sides. The last tenth
is the test; without it, the last tenth is for validation. Each pair of words is rare: a
model that knows words as vectors needs fewer rows. The programs thus differ.
"""

import io
import pathlib

import numpy as np

from benchmarks.races import common, fuxictr


PEER, VERSION_OF = ["vowpalwabbit==9.11.9", "numpy"], "vowpalwabbit"
EXAMPLE = "clicks.py"
UNIT, SCORE, DATA, SETTINGS = "rows", "AUC", ("1000000",), {"batch": 1024}
LR, EPOCHS = {"ours": 0.01, "peer": 0.5}, {"ours": 1, "peer": 1}
EACH = 1000


class Told(io.StringIO):
    """The printed text, and the time at which the last step was printed."""

    def __init__(self):
        super().__init__()
        self.clock, self.seconds = common.Clock(), 0.0

    def write(self, text):
        if text.startswith("step"):
            self.seconds = self.clock.seconds()
        return super().write(text)


def prepare(folder, data, peer):
    del peer
    rng, rows = np.random.default_rng(0), int(data)
    kinds, numbers = rng.integers(2, size=(2, rows)), rng.integers(EACH, size=(2, rows))
    names = np.array([["Herbivore", "Carnivore"], ["Plant", "Meat"]])
    labels = kinds[0] == kinds[1]
    lines = []
    for n in (0, 1):
        words = np.char.add(
            np.char.add(names[n][kinds[n]], "-"), numbers[n].astype(str)
        )
        lines.append(words.tolist())
    sign = np.where(labels, "1", "-1").tolist()
    vw = [f"{s} |A {a} |B {b}" for s, a, b in zip(sign, *lines)]
    csv = [f"{int(y)},{a},{b}" for y, a, b in zip(labels.tolist(), *lines)]
    for part, end in (("test", rows), ("valid", 9 * rows // 10)):
        text = "\n".join(["label,animal,food", *csv[:end]])
        (folder / f"{part}.csv").write_text(text + "\n")
        cut = 9 * end // 10
        (folder / f"{part}-train.vw").write_text("\n".join(vw[:cut]) + "\n")
        (folder / f"{part}-held.vw").write_text("\n".join(vw[cut:end]) + "\n")
        np.save(folder / f"{part}-labels.npy", labels[cut:end])


def ours(task):
    from examples import clicks

    file = f"{task['data']}/{task['part']}.csv"
    options = ["--file", file, "--words", "animal,food", "--numbers", ""]
    names, told = ("epochs", "lr", "seed", "out"), Told()
    text = common.printed(clicks.main, options, task, names, told)
    rows, _, end = fuxictr.read_end(text, task)
    common.tell(told.seconds, rows, **end)


def score(data, part, file, end):
    """The AUC and the log loss of probabilities."""
    del end
    from examples import clicks

    labels = np.load(pathlib.Path(data) / f"{part}-labels.npy")
    chance = np.load(file)["scores"]
    loss = -np.mean(np.log(np.where(labels, chance, 1 - chance)))
    return {"score": clicks.auc(chance, labels), "loss": loss}
