"""LightFM's side of the race: WARP, epoch by epoch as its examples write it."""

import json
import sys
import time

import numpy as np
from lightfm import LightFM
from scipy.sparse import coo_matrix


task = json.loads(sys.argv[1])
lines = np.load(f"{task['data']}/{task['part']}.npz")
past = np.unique(lines["past"], axis=0)
values = np.ones(len(past), np.float32)
interactions = coo_matrix((values, tuple(past.T)), tuple(lines["shape"]))
model = LightFM(
    no_components=task["dim"],
    loss="warp",
    learning_rate=task["lr"],
    random_state=task["seed"],
)
seconds = 0.0
for epoch in range(1, task["epochs"] + 1):
    began = time.perf_counter()
    model.fit_partial(interactions, epochs=1, num_threads=task["threads"])
    seconds += time.perf_counter() - began
    (biases, items), (_, users) = (
        model.get_item_representations(),
        model.get_user_representations(),
    )
    file = f"{task['out']}/{epoch}.npz"
    one = np.ones((len(users), 1))
    with_biases = {"users": np.hstack([users, one]), "items": np.c_[items, biases]}
    np.savez(file, **with_biases)
    samples = epoch * interactions.nnz
    print(json.dumps({"seconds": seconds, "samples": samples, "file": file}))
