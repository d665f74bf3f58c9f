"""sj.testing.assert_equals_dense: what it accepts, and that it sees each difference."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import drawn, slow_but
from sparsejax import transform
from sparsejax.testing import assert_equals_dense


# optax itself relies on implicit promotion.
pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D = 61, 3
ADAGRAD, LAZY = optax.adagrad(0.1), sj.optim.lazy
ADAMW = optax.adamw(0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), ADAMW)
IDS = np.array([[3, 7, 3, 11], [7, 3, 60, 9], [5, 7, 0, 60]])
TARGETS = np.random.default_rng(0).standard_normal(IDS.shape).astype(np.float32)
BATCHES = [{"ids": i, "y": y} for i, y in zip(IDS, TARGETS)]


def normal(*shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype)


def loss_of_tables(params, batch):
    rows = params["table"][batch["ids"]] @ params["w"]
    if "cube" in params:
        rows += jnp.sum(params["cube"][batch["ids"] % 7], (1, 2))
    return jnp.mean((rows - batch["y"]) ** 2).astype(jnp.float32)


PARAMS = {"table": normal(V, D), "w": normal(D)}


# ------------------------------------------------------------------ what it accepts


def bfloat16_and_namedtuples():
    class Batch(NamedTuple):
        ids: np.ndarray
        y: np.ndarray

    loss = lambda params, batch: loss_of_tables(params, batch._asdict())
    cast = lambda x: x.astype(jnp.bfloat16)
    params = jax.tree.map(cast, {**PARAMS, "cube": normal(V, 2, 3)})
    return loss, params, [Batch(*batch) for batch in zip(IDS, TARGETS)]


def stack():
    def loss(params, batch):
        rows = params[np.arange(4) % 2, batch["ids"]]
        return jnp.sum(jnp.tanh(rows) * batch["y"][:, None])

    return loss, normal(2, V, D), BATCHES


def constants_in_the_tree():
    """A count, a name and a function are no parameters. Batches are tuples."""
    params = {**PARAMS, "n": jnp.arange(3), "f": jnp.tanh, "no": None}

    def loss(params, ids, y):
        return params["f"](loss_of_tables(params, {"ids": ids, "y": y}))

    return loss, params, zip(IDS, TARGETS)  # an iterator


def nnx():
    """tests/transform/test_models.py has a model of equinox."""
    nnx = pytest.importorskip("flax.nnx")
    spec = nnx.eval_shape(lambda: nnx.Embed(V, D, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(spec)

    def loss(state, batch):
        out = jnp.sum(nnx.merge(graph, state)(batch["ids"]), -1)
        return jnp.mean((out - batch["y"]) ** 2)

    return loss, drawn(state), BATCHES


ACCEPTED: list[Any] = [
    (constants_in_the_tree, ADAGRAD, False),
    (nnx, ADAMW, True),
    (bfloat16_and_namedtuples, CLIPPED, False),
    (stack, CLIPPED, False),
]


@pytest.mark.parametrize("make, tx, exact", slow_but(ACCEPTED, ACCEPTED[0]))
def test_models(make, tx, exact):
    loss, params, batches = make()
    assert_equals_dense(loss, tx, params, batches, exact)


def test_float64_aux_value_and_required_tables(x64):
    """`value` goes to `tx`; a table of 5 rows is read more than once each."""
    params = {"table": normal(5, D, dtype=np.float64), "w": np.ones(D)}
    loss = lambda params, ids: (jnp.sum(params["table"][ids] @ params["w"]), ids)
    assert_equals_dense(
        loss,
        optax.polyak_sgd(),
        params,
        IDS[:2] % 5,
        has_aux=True,
        tables={"table": True, "w": None},
    )


# ------------------------------------------------------------------ what it sees


def _seen(message, loss=loss_of_tables, tx=ADAGRAD, **options):
    with pytest.raises(AssertionError, match=message):
        assert_equals_dense(loss, tx, PARAMS, BATCHES, **options)


def _row_9_wrong(grads):
    """A row that the second batch is the first to read."""
    g = grads["table"]
    values = g.values * jnp.where(g.rows == 9, 1.001, 1.0)[:, None]
    return {**grads, "table": sj.SelectedRows(g.rows, values, g.height)}


GRADIENTS = {
    "one row": (
        lambda value, grads: (value, _row_9_wrong(grads)),
        r"step 1: the gradient of params\['table'\] differs at row 9, column 0: "
        r"\S+ by sparsejax, \S+ by plain JAX. 3 of 183 numbers differ by more than",
    ),
    "the loss": (
        lambda value, grads: (0.0, grads),
        r"step 0: the loss differs: 0.0 by sparsejax, \d",
    ),
    "another type": (
        lambda value, grads: (value, {**grads, "w": grads["w"].astype(jnp.float16)}),
        r"the gradient of params\['w'\] is float16\[3\] by sparsejax and float32",
    ),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_sees_a_wrong_gradient(case, monkeypatch):
    change, message = GRADIENTS[case]
    original = sj.value_and_grad

    def wrong(fun, **options):
        return lambda *args: change(*original(fun, **options)(*args))

    monkeypatch.setattr(transform, "value_and_grad", wrong)
    _seen(message)
    if case == "one row":  # the tolerances accept it
        for options in ({"rtol": 0.01}, {"atol": 0.01}):
            assert_equals_dense(loss_of_tables, ADAGRAD, PARAMS, BATCHES, **options)


def _bit_of_row_20(x):
    """No batch reads this row."""
    return x.at[20].multiply(1 + 2**-23) if x.shape == (V, D) else x


UPDATES = {
    # For a step of 1e-4 on weights of about 1.
    "1 % of a step": (
        lambda updates, state, _: ({**updates, "w": updates["w"] * 1.01}, state),
        r"step 0: params\['w'\] differs at row 0: \S+ by",
    ),
    "a row that was not read": (
        lambda updates, state, params: (
            {**updates, "table": _bit_of_row_20(params["table"]) - params["table"]},
            state,
        ),
        r"step 0: params\['table'\] differs at row ",
    ),
    "its state": (
        lambda updates, state, _: (updates, jax.tree.map(_bit_of_row_20, state)),
        r"step 0: state\[0\].sum_of_squares\['table'\] differs at row 20, column 0: "
        r".* The batch did not read this row, so it must not change.",
    ),
}


@pytest.mark.parametrize("case", UPDATES)
def test_sees_a_wrong_update(case, monkeypatch):
    change, message = UPDATES[case]

    def wrong(tx):
        lifted = LAZY(tx)

        def update(grads, state, params, **extra_args):
            return change(*lifted.update(grads, state, params, **extra_args), params)

        return optax.GradientTransformationExtraArgs(lifted.init, update)

    monkeypatch.setattr(sj.optim, "lazy", wrong)
    _seen(message, tx=optax.adagrad(1e-4))


def test_sees_what_is_not_row_separable(monkeypatch):
    monkeypatch.setattr(sj.optim, "lazy", lambda tx: LAZY(tx, check=False))
    _seen(r"step 0: params\['table'\] differs at row", tx=optax.lamb(0.1))


@pytest.mark.slow
def test_sees_a_norm_over_the_rows_read():
    """As the docstring of `lazy` says, it is not a norm over all rows."""
    tx = optax.chain(optax.adam(0.1), optax.clip_by_global_norm(0.1))
    _seen(r"step 1: params\['table'\] differs at row", tx=tx)


@pytest.mark.slow
def test_sees_rows_that_were_not_caught_up():
    """A row that moved at step 0, and is then read only under stop_gradient."""

    def loss(params, batch):
        row = jax.lax.stop_gradient(params["table"])[11]
        return loss_of_tables(params, batch) + jnp.sum(row)

    tx = optax.sgd(0.1, momentum=0.9)
    _seen(r"step 2: the loss differs", loss=loss, tx=tx, exact=True)
