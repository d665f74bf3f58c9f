"""An epoch of `fit` on two tables, with `keras.Model` and with `SparseModel`.

The model multiplies a row of each table and has a dense layer, and the optimizer is
Adam. The two take turns; the first epoch compiles and does not count. The
losses of the first epoch are compared: they differ only by the steps that lazy Adam
leaves out.

    python -m benchmarks keras_fit --rows 1000000
"""

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import optax

import sparsejax as sj


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the seconds of an epoch with each model, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=lambda x: int(float(x)), default=1_000_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="append the record to this file")
    given = parser.parse_args(argv)
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras: Any = importlib.import_module("keras")

    rng = np.random.default_rng(0)
    count = given.batch * given.batches
    x = [rng.integers(0, given.rows, count).astype("int32") for _ in range(2)]
    y = rng.normal(size=count).astype("float32")

    def make(cls: Any) -> Any:
        keras.utils.set_random_seed(0)
        ids = [keras.Input((), dtype="int32") for _ in range(2)]
        rows = [keras.layers.Embedding(given.rows, given.dim)(i) for i in ids]
        model = cls(ids, keras.layers.Dense(1)(rows[0] * rows[1]))
        is_sparse = cls is sj.nn.keras.SparseModel
        model.compile(optax.adam(1e-3, eps=1e-7) if is_sparse else "adam", "mse")
        return model

    classes = {"keras.Model": keras.Model, "SparseModel": sj.nn.keras.SparseModel}
    models = {name: make(cls) for name, cls in classes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    losses = {}
    for repeat in range(given.repeats + 1):
        for name, model in models.items():
            start = time.perf_counter()
            history = model.fit(x, y, batch_size=given.batch, verbose=0, shuffle=False)
            if repeat:
                seconds[name].append(time.perf_counter() - start)
            else:
                losses[name] = history.history["loss"][0]
    dense, sparse = losses.values()
    assert abs(dense - sparse) < 0.05 * dense, losses
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    record = {"benchmark": "keras_fit", **vars(given), "seconds": middle}
    ratio = middle["keras.Model"] / middle["SparseModel"]
    for name, value in middle.items():
        print(f"{name}: {value:.3f} s an epoch of {given.batches} x {given.batch}")
    print(f"{ratio:.0f} times as fast")
    if given.json:
        del record["json"]
        with open(given.json, "a") as file:
            print(json.dumps(record), file=file)
    return 0
