"""Clicks: examples/clicks.py against FuxiCTR, DCN-v2 with dense Adam.

The example makes the data: 26 columns with the vocabularies of Criteo Kaggle, up to
1,000,000 words each, and a number; labels come from a factorization machine. `--data`
is the number of rows. The last tenth is the test; without it, the last tenth is for
validation. Both have vectors of 16, two cross layers, dense layers of 64 and 64, steps
of 1,024 rows, Adam and one epoch. Both get the same ids; words that occur once share
one id. FuxiCTR's package has layers and a training loop, but no models, so the model is
written as its model zoo writes it. `best.txt` beside the data has the AUC of the
probabilities that made the labels. There is no FM here: the example has none.
"""

import pathlib
import re

import numpy as np

from benchmarks.races import common


PEER = ["torch==2.13.0", "fuxictr==2.3.10"]
EXAMPLE, VERSION_OF, UNIT, SCORE = "clicks.py", "fuxictr", "rows", "AUC"
DATA, SETTINGS = ("1000000",), {"batch": 1024, "dim": 16}
LR, EPOCHS = {"ours": 0.01, "peer": 1e-3}, {"ours": 1, "peer": 1}
CAP = 1_000_000
LINE = r"step (\d+): loss (\S+), (\S+) rows/s"


def prepare(folder, data, peer):
    del peer
    import pyarrow.parquet

    import sparsejax as sj
    from benchmarks.models import dlrm
    from examples import clicks

    clicks.HEIGHTS = dlrm.table_rows(CAP)
    clicks.WORDS = [f"word {n}" for n in range(len(clicks.HEIGHTS))]
    path = folder / "test.parquet"
    rows = int(data)
    logits = clicks.make_clicks(path, rows, np.random.default_rng(0))
    whole = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(
        whole.slice(0, 9 * rows // 10), folder / "valid.parquet"
    )
    for part in ("test", "valid"):
        table = pyarrow.parquet.read_table(folder / f"{part}.parquet")
        vocabulary = sj.data.Vocabulary.build(table, clicks.WORDS, min_count=2)
        named = vocabulary.ids(table)
        for name in ("number", "label"):
            named[name] = np.asarray(table[name], np.float32)
        cut = 9 * len(table) // 10
        np.savez(folder / f"{part}-train.npz", **{k: x[:cut] for k, x in named.items()})
        np.savez(folder / f"{part}-held.npz", **{k: x[cut:] for k, x in named.items()})
        np.savetxt(folder / f"{part}-sizes.txt", vocabulary.sizes(), "%d")
    labels = np.load(folder / "test-held.npz")["label"]
    best = clicks.auc(logits[9 * rows // 10 :], labels)
    (folder / "best.txt").write_text(f"{best:.4f}\n")
    print(f"AUC {best:.4f} of the true probabilities", flush=True)


def ours(task):
    from examples import clicks

    words = [f"word {n}" for n in range(len(sizes_of(task)))]
    file = f"{task['data']}/{task['part']}.parquet"
    options = ["--file", file, "--words", ",".join(words), "--out", task["out"]]
    told = common.printed(clicks.main, options, task, ("epochs", "lr", "seed"))
    rows, seconds, end = read_end(told, task)
    common.tell(seconds, rows, **end)


def read_end(told, task):
    """Rows and seconds of the steps that clicks.py told, and its score and loss."""
    step, loss, speed = re.findall(LINE, told)[-1]
    rows, speed = task["batch"] * int(step), float(speed.replace(",", ""))
    (auc,) = re.findall(r"AUC (\S+) in float32", told)
    return rows, rows / speed, {"score": float(auc), "loss": float(loss)}


def sizes_of(task):
    return np.loadtxt(f"{task['data']}/{task['part']}-sizes.txt", int)


def score(data, part, file, end):
    del end
    from examples import clicks

    labels = np.load(pathlib.Path(data) / f"{part}-held.npz")["label"]
    return {"score": clicks.auc(np.load(file)["scores"], labels)}
