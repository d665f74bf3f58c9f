"""Knowledge graphs: examples/knowledge_graph.py against PyKEEN, ComplEx or DistMult.

Data: `codex_m`, 185,584 triples of CoDEx-M; or a folder with WordNet 3.0, such as
/usr/share/wordnet of Debian's wordnet-base, as a graph of 117,659 meanings. The score
of an epoch is the filtered MRR of every tenth validation triple, both ways round; the
last one is of all test triples (in tuning, of the validation triples). PyKEEN trains
with 64 negatives for each triple and Adam (`--set loop='"slcwa"'`, its default), or
with all entities as negatives and reciprocal relations (`'"lcwa"'`, the setting of the
best published figure: 0.337 by ComplEx of LibKGE). The example shares its 2,048
negatives in a step, and reads each triple both ways round. Loss, regularization and
initial values are each program's own. The smallest of PyKEEN's three learning rates is
its default.
"""

import functools
import pathlib
import re
import sys

import numpy as np

from benchmarks.races import common


PEER = ["torch==2.13.0", "pykeen==1.11.1"]
EXAMPLE, VERSION_OF = "knowledge_graph.py", "pykeen"
UNIT, SCORE, DATA = "triples", "filtered MRR", ("codex_m",)
LR, EPOCHS = {"ours": 0.2, "peer": 3e-3}, {"ours": 20, "peer": 5}
SETTINGS = {"model": "complex", "dim": 512, "batch": 1024, "negatives": 2048}
SETTINGS |= {"loop": "slcwa"}  # of PyKEEN
LINE = r"epoch (\d+): loss (\S+), MRR (\S+), (\S+) triples/s"

# Pointers of WordNet whose inverses are kept, as WN18RR does (Dettmers et al., 2018).
INVERSES = "~", "~i", "%m", "%s", "%p", "-c", "-r", "-u"
HELD_OUT = 3_000  # triples of WordNet for validation, and as many for the test


def wordnet(folder):
    """Distinct links between meanings, in three parts; see wndb(5WN) for the files."""
    if not (pathlib.Path(folder) / "data.noun").is_file():
        sys.exit(
            f"races: {folder} is not a folder with WordNet's data.noun: see --help."
        )
    names, links = {}, {}
    number = lambda part, offset: names.setdefault((part, offset), len(names))
    for part in "noun", "verb", "adj", "adv":
        for line in (pathlib.Path(folder) / f"data.{part}").read_text().splitlines():
            if line.startswith("  "):  # the license
                continue
            fields = line.split(" | ")[0].split()
            head = number(fields[2].replace("s", "a"), fields[0])
            end = 4 + 2 * int(fields[3], 16)  # of its words, each with a number
            for n in range(end + 1, end + 1 + 4 * int(fields[end]), 4):
                symbol, offset, of, _ = fields[n : n + 4]
                if symbol not in INVERSES:
                    links[head, symbol, number(of, offset)] = None
    kinds = sorted({symbol for _, symbol, _ in links})
    triples = np.array([(head, kinds.index(kind), tail) for head, kind, tail in links])
    triples = np.random.default_rng(0).permutation(triples)
    left, held = np.bincount(triples[:, [0, 2]].ravel()), []
    for n, (head, _, tail) in enumerate(triples.tolist()):
        if min(left[head], left[tail]) > 1 and len(held) < 2 * HELD_OUT:
            left[[head, tail]] -= 1
            held.append(n)  # both meanings stay in the part for training
    train = np.delete(triples, held, axis=0)
    valid, test = triples[held[:HELD_OUT]], triples[held[HELD_OUT:]]
    return {"train": train, "valid": valid, "test": test}


def prepare(folder, data, peer):
    del peer
    if data == "codex_m":
        triples = np.load(common.data_folder(data) / "codex_m.npz")
    else:
        triples = wordnet(data)
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


def score_all(entity, relation, inverse, triples):
    """Scores of all entities as tails; relation R + r is r read from tail to head."""
    head, which, half = entity[triples[:, 0]], triples[:, 1], len(relation)
    if inverse:  # PyKEEN's rows: 2 r, and 2 r + 1 for its inverse
        query = head * np.concatenate([relation[::2], relation[1::2]])[which]
    else:
        rows = relation[which % half]
        query = head * np.where((which < half)[:, None], rows, rows.conj())
    scores = (query @ entity.conj().T).real
    return np.pad(scores, ((0, 0), (1, 0)))  # the example's id 0: unknown words


def score(data, part, file, end):
    """Filtered MRR of PyKEEN's vectors, as the example computes its own."""
    from examples import knowledge_graph

    entities, relations, parts = load(data)
    arrays = np.load(file)
    scores_of = lambda shifted: score_all(
        arrays["entity"],
        arrays["relation"],
        len(arrays["relation"]) > relations,
        shifted - np.array([1, 0, 1]),
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
    """The number of entities and of relations, and the triples by part."""
    parts = {}
    for part in ("train", "valid", "test"):
        text = (pathlib.Path(data) / f"{part}.txt").read_text()
        parts[part] = np.array(re.findall(r"\d+", text), np.int64).reshape(-1, 3)
    everything = np.concatenate(list(parts.values()))
    return everything[:, [0, 2]].max() + 1, everything[:, 1].max() + 1, parts
