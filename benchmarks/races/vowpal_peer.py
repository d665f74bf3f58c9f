"""Vowpal Wabbit's side of the race: its driver, from its own text."""

import json
import sys
import time

import numpy as np
from vowpalwabbit import Workspace


task = json.loads(sys.argv[1])
stem, model = f"{task['data']}/{task['part']}", f"{task['out']}/model.vw"
began = time.perf_counter()
learns = Workspace(
    f"-d {stem}-train.vw -q AB --loss_function logistic --adaptive -b 22 "
    f"-l {task['lr']} --random_seed {task['seed']} -f {model} --quiet"
)  # `-d`: reads and learns all rows
learns.finish()
seconds = time.perf_counter() - began
told = f"{task['out']}/told.txt"
Workspace(f"-t -i {model} -d {stem}-held.vw --link logistic -p {told} --quiet").finish()
chance, file = np.loadtxt(told), f"{task['out']}/1.npz"
np.savez(file, scores=np.clip(chance, 1e-7, 1 - 1e-7))
rows = sum(1 for _ in open(f"{stem}-train.vw"))
print(json.dumps({"seconds": seconds, "samples": rows, "file": file}))
