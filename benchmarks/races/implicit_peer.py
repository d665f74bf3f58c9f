"""implicit's side of the race: BayesianPersonalizedRanking as its README writes it."""

import json
import sys
import time

import numpy as np
from implicit.cpu.bpr import BayesianPersonalizedRanking
from scipy.sparse import csr_matrix


task = json.loads(sys.argv[1])
lines = np.load(f"{task['data']}/{task['part']}.npz")
past = lines["past"]
user_items = csr_matrix((np.ones(len(past)), tuple(past.T)), tuple(lines["shape"]))
model = BayesianPersonalizedRanking(
    factors=task["dim"],
    learning_rate=task["lr"],
    iterations=task["epochs"],
    num_threads=task["threads"],
    random_state=task["seed"],
)
paused = 0.0


def save(epoch, *told):
    """After each epoch saves the factors, off the clock."""
    global paused
    now, file = time.perf_counter(), f"{task['out']}/{epoch}.npz"
    np.savez(file, users=model.user_factors, items=model.item_factors)
    samples = (epoch + 1) * user_items.nnz
    point = {"seconds": now - began - paused, "samples": samples, "file": file}
    print(json.dumps(point), flush=True)
    paused += time.perf_counter() - now


began = time.perf_counter()
model.fit(user_items, show_progress=False, callback=save)
