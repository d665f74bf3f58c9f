"""A next-basket model on real purchases, and its baselines.

A customer is the mean of the vectors of the items bought before, plus the vector of the
season, which is the last full week. The scores of all items are a linear function of
the customer. The model learns to complete baskets: its input is the history and some
items of a basket, its target the other items.

The data (`online_retail.npz`) are lines of invoices in time order. The last invoice of
each customer is held out; only its items that are new to the customer count.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse

import sparsejax as sj


DAYS = 7 * 24 * 60  # minutes of a week


# ------------------------------------------------------------------ data


@dataclasses.dataclass(frozen=True)
class Purchases:
    """Invoices of the past, and the last one of each customer as a question.

    Args:
      examples: columns for an ArrayDataset, a row for each invoice of the past:
        "history" and "basket", lists of items, and "week".
      histories: for each customer the items bought before the last invoice, the latest
        first.
      weeks: int32 `[customers]`, the week before that invoice.
      bought: bool `[customers, items]`, the items bought before it.
      wanted: int `[pairs, 2]`, its (customer, item) pairs that are new.
      num_weeks: int.
    """

    examples: dict[str, Any]
    histories: list[np.ndarray]
    weeks: np.ndarray
    bought: np.ndarray
    wanted: np.ndarray
    num_weeks: int


def read_purchases(path: Any, longest: int = 100) -> Purchases:
    """Reads the invoices; a history keeps its latest `longest` items."""
    lines = np.load(path)
    invoice, item, customer = (
        lines[name].astype(np.int32) for name in ("invoice", "item", "customer")
    )
    week = (lines["minutes"] // DAYS).astype(np.int32)
    num_customers, num_items = customer.max() + 1, item.max() + 1
    _, first = np.unique(invoice, return_index=True)
    last_of = np.zeros(num_customers, np.int64)
    last_of[customer[first]] = np.arange(len(first))

    baskets, before, weeks_of = [], [], []
    bought = np.zeros((num_customers, num_items), bool)
    past: list[list[int]] = [[] for _ in range(num_customers)]
    histories, wanted = [np.zeros(0, np.int32)] * num_customers, []
    weeks = np.zeros(num_customers, np.int32)
    stops = [*first[1:], len(invoice)]
    for number, (start, stop) in enumerate(zip(first, stops)):
        who, basket = int(customer[start]), np.unique(item[start:stop])
        latest = list(dict.fromkeys(reversed(past[who])))[:longest]
        history = np.array(latest, np.int32)
        if number == last_of[who]:
            histories[who], weeks[who] = history, max(week[start] - 1, 0)
            if len(history):
                new = basket[~bought[who, basket]]
                wanted += [(who, i) for i in new]
            continue
        before.append(history)
        baskets.append(basket)
        weeks_of.append(week[start])
        past[who] += basket.tolist()
        bought[who, basket] = True
    examples = {
        "history": before,
        "basket": baskets,
        "week": np.array(weeks_of, np.int32),
    }
    num_weeks = int(week.max()) + 1
    return Purchases(examples, histories, weeks, bought, np.array(wanted), num_weeks)


def recall(scores: np.ndarray, data: Purchases, k: int) -> float:
    """The share of the wanted items that are among the k best new ones."""
    scores = np.where(data.bought, -np.inf, scores)
    best = np.argpartition(-scores, k, axis=1)[:, :k]
    named = np.zeros(scores.shape, bool)
    np.put_along_axis(named, best, True, axis=1)
    return float(named[tuple(data.wanted.T)].mean())


def popularity_scores(data: Purchases) -> np.ndarray:
    """How many customers bought each item."""
    return np.broadcast_to(data.bought.sum(0, dtype=np.float64), data.bought.shape)


def cosine_scores(data: Purchases) -> np.ndarray:
    """Item-item cosine: the sum over the history of the cosines of the buyers' sets."""
    bought = scipy.sparse.csr_matrix(data.bought, dtype=np.float64)
    both = np.asarray((bought.T @ bought).todense())
    norm = np.sqrt(np.maximum(np.diag(both), 1e-9))
    cosine = both / (norm[:, None] * norm[None])
    np.fill_diagonal(cosine, 0.0)
    return np.asarray(bought @ cosine)


# ------------------------------------------------------------------ model

# Which leaves are tables, read by rows; the scores' weights are used as a whole.
TABLES = {"items": True, "weeks": True, "scores": False, "bias": False}


def init(key: jax.Array, data: Purchases, width: int = 64) -> dict[str, jax.Array]:
    """Small vectors of the items, and the log of their popularity for a bias."""
    num_items = data.bought.shape[1]
    keys = jax.random.split(key)
    return {
        "items": 0.01 * jax.random.normal(keys[0], (num_items, width)),
        "weeks": jnp.zeros((data.num_weeks, width)),
        "scores": 0.1 * jax.random.normal(keys[1], (num_items, width)),
        "bias": jnp.log(1.0 + jnp.asarray(data.bought.sum(0), jnp.float32)),
    }


def score(params: dict, *bags: tuple, week: Any) -> jax.Array:
    """Scores of all items, `[B, items]`, from bags of (items, weights) and the week."""
    vector = sj.lookup(params["weeks"], week)
    for items, weights in bags:
        vector += sj.embedding_bag(
            params["items"], items, weights=weights, combiner="mean"
        )
    return vector @ params["scores"].T + params["bias"][None]


def loss(params: dict, batch: dict, key: jax.Array, shown: float = 0.5) -> jax.Array:
    """Mean of -log softmax over the items of the baskets that were not shown."""
    basket = batch["basket"]
    shows = jax.random.bernoulli(key, shown, (basket.capacity,))
    shows = shows.astype(jnp.float32)
    bags = (batch["history"], None), (basket, shows)
    log_share = jax.nn.log_softmax(score(params, *bags, week=batch["week"]))
    # An element without a basket reads 0, and has no part in the sum.
    real = basket.segment_ids < basket.num_segments
    of_item = log_share.at[basket.segment_ids, basket.values].get(
        mode="fill", fill_value=0.0
    )
    asked = jnp.where(real, 1.0 - shows, 0.0)
    return -jnp.sum(asked * of_item) / jnp.maximum(jnp.sum(asked), 1.0)


def train(
    data: Purchases,
    *,
    epochs: int = 9,
    batch_size: int = 128,
    seed: int = 0,
    loss: Callable = loss,
) -> tuple[dict, list[float]]:
    """Trained parameters, and the mean loss of each epoch."""
    dataset = sj.data.ArrayDataset(data.examples)
    loader = sj.data.DataLoader(
        dataset, batch_size, shuffle=True, seed=seed, drop_remainder=True
    )
    key = jax.random.key(seed)
    params = init(key, data)
    tx = sj.optim.lazy(optax.adam(3e-3))
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch, key):
        value_and_grad = sj.value_and_grad(loss, tables=TABLES)
        value, grads = value_and_grad(params, batch, key)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses, number = [], 0
    for _ in range(epochs):
        total = 0.0
        for batch in loader:
            number += 1
            batch_key = jax.random.fold_in(key, number)
            params, state, value = step(params, state, batch, batch_key)
            total += value
        losses.append(float(total) / len(loader))
    return params, losses


def predict(params: dict, data: Purchases) -> np.ndarray:
    """Scores of all items for each customer's next basket."""
    histories = sj.SegmentTensor.from_lists(data.histories)
    return np.asarray(score(params, (histories, None), week=data.weeks))
