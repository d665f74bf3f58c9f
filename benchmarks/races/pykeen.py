"""Knowledge graphs: examples/knowledge_graph.py against PyKEEN, ComplEx or DistMult.

Data: `codex_m`, 185,584 triples of CoDEx-M. The score of an epoch is the filtered MRR
of every tenth validation triple, both ways round; the last one is of all test triples
(in tuning, of the validation triples). PyKEEN trains with 64 negatives for each triple
and Adam, its default; the best published figure is 0.337, by ComplEx of LibKGE. The
example shares its 2,048 negatives in a step, and reads each triple both ways round.
Loss, regularization and initial values are each program's own. The smallest of PyKEEN's
three learning rates is its default.
"""

import functools
import pathlib
import re

import numpy as np

from benchmarks.races import common


PEER = ["torch==2.13.0", "pykeen==1.11.1"]
EXAMPLE, VERSION_OF = "knowledge_graph.py", "pykeen"
UNIT, SCORE, DATA = "triples", "filtered MRR", ("codex_m",)
LR, EPOCHS = {"ours": 0.2, "peer": 3e-3}, {"ours": 20, "peer": 5}
SETTINGS = {"model": "complex", "dim": 512, "batch": 1024, "negatives": 2048}
LINE = r"epoch (\d+): loss (\S+), MRR (\S+), (\S+) triples/s"


def prepare(folder, data, peer):
    del peer
    triples = np.load(common.data_folder(data) / "codex_m.npz")
    for part in ("train", "valid", "test"):
        np.savetxt(folder / f"{part}.txt", triples[part], "e%d\tr%d\te%d")


def ours(task):
    from examples import knowledge_graph

    names = "model", "epochs", "dim", "batch", "negatives", "lr", "seed"
    told = common.printed(knowledge_graph.main, [task["data"]], task, names)
    lines, seconds = re.findall(LINE, told), 0.0
    (test,) = re.findall(r"Test: filtered MRR ([\d.]+)", told)
    (triples,) = re.findall(r"^([\d,]+) triples", told)
    triples = int(triples.replace(",", ""))
    for epoch, loss, mrr, speed in lines:
        seconds += triples / float(speed.replace(",", ""))  # compilation in the first
        end = {"test": float(test)} if int(epoch) == len(lines) else {}
        end = end if task["part"] == "test" else {}
        point = {"score": float(mrr), "loss": float(loss)}
        common.tell(seconds, triples * int(epoch), **point, **end)


def score_all(entity, relation, triples):
    """Scores of all entities as tails; relation R + r is r read from tail to head."""
    head, which, half = entity[triples[:, 0]], triples[:, 1], len(relation)
    rows = relation[which % half]
    query = head * np.where((which < half)[:, None], rows, rows.conj())
    scores = (query @ entity.conj().T).real
    return np.pad(scores, ((0, 0), (1, 0)))  # the example's id 0: unknown words


def score(data, part, file, end):
    """Filtered MRR of PyKEEN's vectors, as the example computes its own."""
    from examples import knowledge_graph

    relations, parts = load(data)
    arrays = np.load(file)
    scores_of = lambda shifted: score_all(
        arrays["entity"], arrays["relation"], shifted - np.array([1, 0, 1])
    )
    both = []
    for x in parts.values():
        back = x[:, ::-1] + np.array([0, relations, 0])
        both.append(np.concatenate([x, back]) + np.array([1, 0, 1]))
    mrr = functools.partial(
        knowledge_graph.filtered_mrr, scores_of, known=np.concatenate(both)
    )
    point = {"score": mrr(both[1][::10])}
    return point | ({"test": mrr(both[2])} if end and part == "test" else {})


def load(data):
    """The number of relations, and the triples by part."""
    parts = {}
    for part in ("train", "valid", "test"):
        text = (pathlib.Path(data) / f"{part}.txt").read_text()
        parts[part] = np.array(re.findall(r"\d+", text), np.int64).reshape(-1, 3)
    return max(x[:, 1].max() for x in parts.values()) + 1, parts
