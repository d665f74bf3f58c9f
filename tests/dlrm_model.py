"""A DLRM of 26 tables in an `EmbeddingCollection`, and synthetic clicks.

The model is that of Naumov et al., 2019: 13 dense features through a bottom MLP, 26
categorical ones through the tables, the dot products of all pairs of these 27 vectors,
a top MLP. Ids are drawn by Zipf's law, clicks from weights of the ids.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj
from benchmarks.models.dlrm import NUM_DENSE


BASE_RATE = 0.25  # of clicks if all features say nothing, about Criteo's


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
    """The loss of a constant guess: the entropy of a coin that falls so often."""
    return float(-rate * np.log(rate) - (1 - rate) * np.log(1 - rate))


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
