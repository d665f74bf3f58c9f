"""`exact` and state other than moments: as dense training, or refused by name."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnusedExpression=false

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import slow_but


V, D = 7, 2
PARAMS = {"table": jnp.linspace(-1.0, 1.0, V * D).reshape(V, D)}
# Row 0 is read at first and never again, row 1 at every step, row 2 from time to time.
READ = [[0, 1], [1], [1, 2], [1], [1, 3], [1], [1, 2], [1, 4], [1], [1, 2], [1], [1]]


def gradient(step):
    """The rows and values of one step's gradient, the same for both sides.

    Of two slots at every step, so that it is compiled once.
    """
    rows = np.array([*READ[step], V][:2])
    values = np.cos(np.arange(len(rows) * D) + step).reshape(-1, D).astype(np.float32)
    return sj.SelectedRows(rows, values, V)


def train(tx, exact):
    @jax.jit
    def step(params, state, grad):
        if exact:
            params, state = tx.catch_up(params, state, {"table": grad.rows})
        grads = {"table": grad if exact else grad.to_dense()}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for k in range(len(READ)):
        params, state = step(params, state, gradient(k))
    return jax.jit(tx.flush)(params, state)[0] if exact else params


class Gated(NamedTuple):
    moment: Any
    gate: Any


def gated(first, after, is_open):
    """Momentum with a part of the state that decides when it moves the weights."""

    def init(params):
        return Gated(optax.tree.zeros_like(params), jnp.asarray(first))

    def update(updates, state, params=None):
        del params
        moment = jax.tree.map(lambda m, g: 0.5 * m + g, state.moment, updates)
        moves = is_open(state.gate)
        step = lambda m, g: -0.1 * (g + jnp.where(moves, m, 0.0))
        updates = jax.tree.map(step, moment, updates)
        return updates, Gated(moment, after(state.gate))

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    # The state of `init` differs from all later ones.
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(0.1),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(0.1),
    "flag after the first step": lambda: gated(
        False, lambda gate: jnp.array(True), lambda gate: gate
    ),
    "flag of the first step": lambda: gated(
        True, lambda gate: jnp.array(False), lambda gate: ~gate
    ),
    "number 1 after the first step": lambda: gated(
        0, lambda gate: jnp.minimum(gate + 1, 1), lambda gate: gate > 0
    ),
    "float after the first step": lambda: gated(
        0.0, lambda gate: jnp.ones(()), lambda gate: gate > 0
    ),
    "nothing": lambda: gated(0, lambda gate: gate + 1, lambda gate: gate >= 0),
    # It changes later.
    "every other step": lambda: gated(True, jnp.logical_not, lambda gate: gate),
    "every third step": lambda: gated(
        0, lambda gate: (gate + 1) % 3, lambda gate: gate == 0
    ),
    "number by twos": lambda: gated(
        0, lambda gate: gate + 2, lambda gate: gate % 4 == 0
    ),
    "from the third step on": lambda: gated(
        0, lambda gate: gate + 1, lambda gate: gate >= 3
    ),
    "float count": lambda: gated(0.0, lambda gate: gate + 1, lambda gate: gate >= 3),
    "down from three": lambda: gated(
        3, lambda gate: jnp.maximum(gate - 1, 0), lambda gate: gate == 0
    ),
}
# Those that must not be refused: momentum with a schedule, or a first step like others.
ACCEPTED = "nothing", "optimistic_gradient_descent", "from the third step on"


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", slow_but(OPTIMIZERS, "every other step"))
def test_as_dense_or_refused(name):
    tx = OPTIMIZERS[name]()
    try:
        sj.optim.exact(tx).init(PARAMS)
    except ValueError as error:
        assert "cannot be kept exact" in str(error) and name not in ACCEPTED
        return
    got, want = train(sj.optim.exact(tx), True), train(tx, False)
    np.testing.assert_allclose(got["table"], want["table"], rtol=1e-5, atol=1e-6)
