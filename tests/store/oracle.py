"""Training with the tables of a store, and the same with the tables on the device."""

import threading
from typing import Any

import jax
import optax

import sparsejax as sj
from sparsejax.store import _in_flight


def train_in_memory(loss, params, tx, batches, tables=None) -> Any:
    """Losses, parameters and state."""
    lazy = sj.optim.lazy(tx)

    @jax.jit
    def step(params, state, batch):
        value, grads = sj.value_and_grad(loss, tables=tables)(params, batch)
        updates, state = lazy.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = lazy.init(params), []
    for batch in batches:
        params, state, value = step(params, state, batch)
        losses.append(value)
    return losses, params, state


def run_steps(step, params, state, batches, depth: Any = None) -> Any:
    """The same by a step of `store.train_step`; with a depth it prefetches."""
    losses, pairs = [], ((batch, None) for batch in batches)
    if depth is not None:
        pairs = step.prefetch(params, batches, depth=depth)
    for batch, rows in pairs:
        params, state, value = step(params, state, batch, rows)
        losses.append(value)
    return losses, params, state


def workers():
    """The threads of stores that run."""
    return [t for t in threading.enumerate() if t.name.startswith(_in_flight._THREAD)]
