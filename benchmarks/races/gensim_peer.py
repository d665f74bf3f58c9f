"""gensim's side of the race: Word2Vec as its documentation writes it."""

import json
import sys
import time

import numpy as np
from gensim.models import Word2Vec
from gensim.models.callbacks import CallbackAny2Vec


class Points(CallbackAny2Vec):
    """After each epoch saves the vectors, off the clock."""

    def __init__(self, task):
        self.task, self.epoch, self.paused = task, 0, 0.0

    def on_train_begin(self, model):
        self.began = time.perf_counter()

    def on_epoch_end(self, model):
        now = time.perf_counter()
        self.epoch += 1
        file = f"{self.task['out']}/{self.epoch}.npz"
        words, seconds = model.wv.index_to_key, now - self.began - self.paused
        counts = [model.wv.get_vecattr(word, "count") for word in words]
        arrays = {"words": model.wv.vectors, "contexts": model.syn1neg}
        np.savez(file, **arrays, names=words, counts=counts)
        samples = self.epoch * sum(counts)
        point = {"seconds": seconds, "samples": int(samples), "file": file}
        print(json.dumps(point), flush=True)
        self.paused += time.perf_counter() - now


task = json.loads(sys.argv[1])
Word2Vec(
    corpus_file=f"{task['data']}/train.txt",
    vector_size=task["dim"],
    sg=1,
    negative=5,
    window=5,
    min_count=5,
    alpha=task["lr"],
    epochs=task["epochs"],
    workers=task["threads"],
    seed=task["seed"],
    callbacks=[Points(task)],
)
