"""A whole training step of a DLRM with 26 tables: sparsejax against dense optax.

The model is that of Naumov et al., 2019: 13 dense features through a bottom MLP, 26
categorical ones through an `EmbeddingCollection`, the dot products of all pairs of
those 27 vectors, a top MLP. The tables have the sizes of Criteo Kaggle, the largest cut
to a million rows; ids are drawn by Zipf's law, clicks from weights of the ids.

Three sides take turns: ours, with all tables of one width in one stack; ours with every
table by itself; and the same model with `jax.value_and_grad` and plain optax.

    python -m benchmarks dlrm --quick
    python -m benchmarks dlrm --train 2000 --json steps.jsonl

`--train` also trains ours that many steps and prints its loss beside the entropy of the
base rate, which is the loss of whoever knows no feature.
"""

import argparse
import dataclasses
import functools
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj
from benchmarks import timing
from benchmarks.models.dlrm import NUM_DENSE, table_rows


BASE_RATE = 0.25  # of clicks where all features say nothing, about Criteo's
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "adagrad": lambda: optax.adagrad(0.02),
    "adam": lambda: optax.adam(1e-3),
}


# ------------------------------------------------------------------ model


@dataclasses.dataclass(frozen=True)
class Model:
    """The layers of a DLRM, by name as in its parameters.

    Args:
      rows: of each table.
      dim: width of a row.
      bottom: widths of the bottom MLP's hidden layers; its last one is `dim`.
      top: widths of the top MLP's hidden layers; its last one is 1.
      stacked: whether tables of one width share an array.
    """

    rows: tuple[int, ...]
    dim: int = 16
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256)
    stacked: bool = True

    @functools.cached_property
    def layers(self) -> dict[str, Any]:
        """The collection of tables, and the layers of both MLPs."""
        tables = {f"C{k + 1}": (n, self.dim) for k, n in enumerate(self.rows)}
        pairs = (len(self.rows) + 1) * len(self.rows) // 2
        bottom = (NUM_DENSE, *self.bottom, self.dim)
        top = (self.dim + pairs, *self.top, 1)
        return {
            "tables": sj.nn.EmbeddingCollection(tables, stacked=self.stacked),
            "bottom": [sj.nn.Dense(n, m) for m, n in zip(bottom, bottom[1:])],
            "top": [sj.nn.Dense(n, m) for m, n in zip(top, top[1:])],
        }

    def init(self, key: jax.Array) -> Any:
        """The parameters, a dict in the structure of `layers`."""
        layers, tree = jax.tree.flatten(self.layers)
        keys = jax.random.split(key, len(layers))
        return jax.tree.unflatten(tree, [x.init(k) for x, k in zip(layers, keys)])

    def __call__(self, params: Any, batch: Any) -> jax.Array:
        """The logit of each example."""
        x = self._mlp(params, "bottom", batch["dense"])
        x = jax.nn.relu(x)
        rows = self.layers["tables"](params["tables"], batch["ids"])
        vectors = jnp.stack([x, *(rows[name] for name in batch["ids"])], axis=1)
        dots = jnp.einsum("bid,bjd->bij", vectors, vectors)
        i, j = np.tril_indices(vectors.shape[1], -1)
        x = jnp.concatenate([x, dots[:, i, j]], axis=1)
        return self._mlp(params, "top", x)[:, 0]

    def _mlp(self, params: Any, name: str, x: jax.Array) -> jax.Array:
        for k, layer in enumerate(self.layers[name]):
            x = layer(params[name][k], jax.nn.relu(x) if k else x)
        return x


def loss_fn(model: Model, params: Any, batch: Any) -> jax.Array:
    """Mean log-loss."""
    losses = optax.sigmoid_binary_cross_entropy(model(params, batch), batch["clicked"])
    return jnp.mean(losses)


def make_step(model: Model, value_and_grad: Callable, tx: Any) -> Any:
    """`(state, batch) -> (state, loss)`, to be jitted with the state donated."""

    def step(state, batch):
        params, opt_state = state
        loss, grads = value_and_grad(functools.partial(loss_fn, model))(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


# ------------------------------------------------------------------ data


class Clicks:
    """Synthetic batches: Zipf's ids, and clicks that depend on them.

    Args:
      rows: of each table.
      batch: examples a batch.
      seed: of everything.
    """

    def __init__(self, rows: Sequence[int], batch: int, seed: int = 0):
        self.rows, self.batch = tuple(rows), batch
        self._rng = np.random.default_rng(seed)
        draw = np.random.default_rng(seed + 1)
        self._weights = [draw.normal(0, 0.5, n).astype(np.float32) for n in self.rows]
        self._dense = draw.normal(0, 0.2, NUM_DENSE).astype(np.float32)

    def __call__(self) -> dict[str, Any]:
        """One batch: dense features, ids by feature, clicks."""
        rng, shape = self._rng, self.batch
        dense = rng.normal(size=(shape, NUM_DENSE)).astype(np.float32)
        logits = dense @ self._dense + np.log(BASE_RATE / (1 - BASE_RATE))
        ids = {}
        for k, (n, weights) in enumerate(zip(self.rows, self._weights)):
            # Log-uniform ranks, which is Zipf's law with exponent 1, strewn over the
            # table.
            ranks = np.floor(n ** rng.random(shape)).astype(np.int64) - 1
            ids[f"C{k + 1}"] = (ranks * 7_368_787 % n).astype(np.int32)
            logits = logits + weights[ids[f"C{k + 1}"]]
        clicked = rng.random(shape) < 1 / (1 + np.exp(-logits))
        batch = {"dense": dense, "ids": ids, "clicked": clicked.astype(np.float32)}
        return jax.tree.map(jnp.asarray, batch)


def entropy(rate: float) -> float:
    """Of a coin that falls so often: the loss of a constant guess."""
    return float(-rate * np.log(rate) - (1 - rate) * np.log(1 - rate))


# ------------------------------------------------------------------ measuring


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Times a step of each side, taking turns, and trains ours."""
    rows, tx = table_rows(args.cap), OPTIMIZERS[args.optimizer]()
    models = {
        "stacked": Model(rows, args.dim),
        "apart": Model(rows, args.dim, stacked=False),
    }
    sides = {
        "ours": ("stacked", sj.value_and_grad, sj.optim.lazy(tx)),
        "apart": ("apart", sj.value_and_grad, sj.optim.lazy(tx)),
        "dense": ("stacked", jax.value_and_grad, tx),
    }
    clicks = Clicks(rows, args.batch)

    def make_state(model):
        params = model.init(jax.random.key(0))
        return params, tx.init(params)

    made = jax.jit(make_state, static_argnums=0)
    state = {name: made(model) for name, model in models.items()}
    first, programs, compiled = clicks(), {}, {}
    for name, (which, value_and_grad, own) in sides.items():
        step = jax.jit(make_step(models[which], value_and_grad, own), donate_argnums=0)
        compiled[name] = timing.compile_apart(step, state[which], first)

        def program(state, batch, which=which, run=compiled[name].run):
            state[which], loss = run(state[which], batch)
            return state, loss

        programs[name] = program
    times, state = timing.alternate(
        programs, state, clicks, repeats=args.repeats, seconds=args.seconds
    )
    ms = {name: timing.median_ms(x) for name, x in times.items()}
    del state["apart"]
    gc.collect()
    _, losses, rate = train(compiled["ours"].run, state["stacked"], clicks, args.train)
    tail = losses[-max(len(losses) // 10, 1) :]
    return {
        "benchmark": "dlrm",
        "optimizer": args.optimizer,
        "rows": sum(rows),
        "dim": args.dim,
        "batch": args.batch,
        "ms": ms,
        "spread": {name: timing.spread(x) for name, x in times.items()},
        "ratio": ms["dense"] / ms["ours"],
        "temp_bytes": {name: c.temp_bytes for name, c in compiled.items()},
        "compile_s": {name: c.seconds for name, c in compiled.items()},
        "repeats": len(times["ours"]),
        "trained": args.train,
        "loss": float(np.mean(tail)) if tail else None,
        "entropy": entropy(rate) if tail else None,
    }


def train(
    run: Callable, state: Any, clicks: Callable, steps: int
) -> tuple[Any, list[float], float]:
    """The state after so many steps, their losses, and the rate of clicks."""
    losses, rates = [], []
    for _ in range(steps):
        batch = clicks()
        rates.append(jnp.mean(batch["clicked"]))
        state, loss = run(state, batch)
        losses.append(loss)
    rate = float(np.mean([float(x) for x in rates])) if rates else BASE_RATE
    return state, [float(x) for x in losses], rate


# ------------------------------------------------------------------ showing


HEADER = "side        ms  spread  temporaries MB  compile s"


def lines(r: dict[str, Any]) -> list[str]:
    """The table."""
    out = [
        f"{name:6} {r['ms'][name]:>7.2f} {r['spread'][name]:>7.2f} "
        f"{r['temp_bytes'][name] / 1e6:>15.1f} {r['compile_s'][name]:>10.1f}"
        for name in r["ms"]
    ]
    return [*out, f"dense / ours: {r['ratio']:.1f}"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks dlrm", description=__doc__.split("\n")[0]
    )
    number = lambda text: int(float(text))
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    parser.add_argument("--cap", type=number, default=10**6, help="rows of a table")
    parser.add_argument("--dim", type=number, default=16)
    parser.add_argument("--batch", type=number, default=2048)
    parser.add_argument("--repeats", type=number, default=30, help="at most")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="no new repeat after so long"
    )
    parser.add_argument("--train", type=number, default=0, help="steps to train ours")
    parser.add_argument("--quick", action="store_true", help="tables of 10,000 rows")
    parser.add_argument("--json", metavar="FILE", help="append a JSON line")
    args = parser.parse_args(argv)
    if args.quick:
        args.cap, args.seconds = min(args.cap, 10_000), 2.0
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    args = parse(argv)
    machine = timing.machine()
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    rows = table_rows(args.cap)
    print(
        f"{len(rows)} tables of {min(rows):,} to {max(rows):,} rows, {sum(rows):,} in "
        f"all, x {args.dim}; {args.batch:,} examples a step, {args.optimizer}\n"
    )
    result = measure(args)
    print("\n".join([HEADER, *lines(result)]))
    if result["loss"] is not None:
        print(
            f"loss of the last tenth of {args.train:,} steps: {result['loss']:.4f}; "
            f"entropy of the base rate: {result['entropy']:.4f}"
        )
    if args.json:
        timing.append_json_line(args.json, {**machine, **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
