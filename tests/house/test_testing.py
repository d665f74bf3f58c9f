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
from sparsejax import transform
from sparsejax.testing import assert_equals_dense


# optax itself relies on implicit promotion.
pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D = 61, 3
ADAGRAD, LAZY = optax.adagrad(0.1), sj.optim.lazy
IDS = np.array([[3, 7, 3, 11], [7, 3, 60, 9], [5, 7, 0, 60]])
TARGETS = np.random.default_rng(0).standard_normal(IDS.shape).astype(np.float32)
BATCHES = [{"ids": i, "y": y} for i, y in zip(IDS, TARGETS)]


def table(*shape, dtype=np.float32):
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def params_of_a_table(dtype=np.float32):
    return {
        "table": jnp.asarray(table(V, D, dtype=dtype)),
        "w": jnp.asarray(table(D, dtype=dtype)),
    }


def params_of_two_tables(dtype=np.float32):
    cube = jnp.asarray(table(V, 2, 3, dtype=dtype))
    return {"cube": cube, **params_of_a_table(dtype)}


def loss_of_tables(params, batch):
    rows = params["table"][batch["ids"]] @ params["w"]
    if "cube" in params:
        rows += jnp.sum(params["cube"][batch["ids"] % 7], (1, 2))
    return jnp.mean((rows - batch["y"]) ** 2).astype(jnp.float32)


# ------------------------------------------------------------------ what it accepts


def _dict():
    return loss_of_tables, params_of_a_table(), BATCHES


def _bfloat16():
    return loss_of_tables, params_of_two_tables(jnp.bfloat16), BATCHES


def _a_batch_that_is_a_namedtuple():
    class Batch(NamedTuple):
        ids: np.ndarray
        y: np.ndarray

    loss = lambda params, batch: loss_of_tables(params, batch._asdict())
    return loss, params_of_two_tables(), [Batch(*batch) for batch in zip(IDS, TARGETS)]


def _stack():
    def loss(params, batch):
        rows = params[np.arange(4) % 2, batch["ids"]]
        return jnp.sum(jnp.tanh(rows) * batch["y"][:, None])

    return loss, table(2, V, D), BATCHES


def _constants_in_the_tree():
    """A count, a name and a function are no parameters. Batches are tuples."""
    params = {**params_of_a_table(), "n": jnp.arange(3), "f": jnp.tanh, "no": None}

    def loss(params, ids, y):
        return params["f"](loss_of_tables(params, {"ids": ids, "y": y}))

    return loss, params, zip(IDS, TARGETS)  # an iterator


def _equinox():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0))

    class Model(eqx.Module):
        embed: Any
        mlp: Any

        def __call__(self, ids):
            return jax.vmap(lambda i: self.mlp(self.embed(i)))(ids)

    def loss(model, batch):
        return jnp.mean((model(batch["ids"]) - batch["y"]) ** 2)

    embed = eqx.nn.Embedding(V, D, key=keys[0])
    return loss, Model(embed, eqx.nn.MLP(D, "scalar", 4, 1, key=keys[1])), BATCHES


def _linen():
    nn = pytest.importorskip("flax.linen")
    embed = nn.Embed(V, D)
    loss = lambda variables, batch: jnp.mean(
        (jnp.sum(embed.apply(variables, batch["ids"]), -1) - batch["y"]) ** 2
    )
    return loss, embed.init(jax.random.key(0), IDS[0]), BATCHES


def _nnx():
    nnx = pytest.importorskip("flax.nnx")
    graph, state = nnx.split(nnx.Embed(V, D, rngs=nnx.Rngs(0)))

    def loss(state, batch):
        out = jnp.sum(nnx.merge(graph, state)(batch["ids"]), -1)
        return jnp.mean((out - batch["y"]) ** 2)

    return loss, state, BATCHES


MODELS = [_constants_in_the_tree, _equinox, _nnx, _linen]


def _check(tx, model, **options):
    loss, params, batches = model
    assert_equals_dense(loss, tx, params, batches, **options)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__[1:])
def test_models(make):
    _check(ADAGRAD, make())


@pytest.mark.slow
@pytest.mark.parametrize("make", [_bfloat16, _stack])
def test_models_with_moments(make):
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1))
    _check(tx, make())


def test_batches_that_are_namedtuples():
    _check(ADAGRAD, _a_batch_that_is_a_namedtuple())


def test_exact():
    _check(optax.sgd(0.1, momentum=0.9), _constants_in_the_tree(), exact=True)


@pytest.mark.slow
def test_exact_moments_in_nnx():
    _check(optax.adamw(0.1), _nnx(), exact=True)


def test_float64_aux_value_and_required_tables(x64):
    """`value` goes to `tx`; a table of 5 rows is read more than once each."""
    params = {"table": table(5, D, dtype=np.float64), "w": np.ones(D)}
    loss = lambda params, ids: (jnp.sum(params["table"][ids] @ params["w"]), ids)
    tx = optax.polyak_sgd()
    batches = [IDS[0] % 5, IDS[1] % 5]
    tables = {"table": True, "w": None}
    assert_equals_dense(loss, tx, params, batches, has_aux=True, tables=tables)


# ------------------------------------------------------------------ what it sees


def _seen(message, loss=loss_of_tables, tx=ADAGRAD, **options):
    with pytest.raises(AssertionError, match=message):
        assert_equals_dense(loss, tx, params_of_a_table(), BATCHES, **options)


def _with_rows(grads, change):
    """The gradients, with the values of a table changed by a function of its rows."""
    g = grads["table"]
    values = g.values * change(g.rows)[:, None]
    return {**grads, "table": sj.SelectedRows(g.rows, values, g.height)}


def test_sees_one_wrong_row_of_a_gradient(monkeypatch):
    """Row 9, which the second batch is the first to read."""

    def wrong(fun, **options):
        def run(*args):
            value, grads = sj.value_and_grad(fun, **options)(*args)
            return value, _with_rows(grads, lambda r: jnp.where(r == 9, 1.001, 1.0))

        return run

    monkeypatch.setattr(transform, "value_and_grad", wrong)
    _seen(
        r"step 1: the gradient of params\['table'\] differs at row 9, column 0: "
        r"\S+ by sparsejax, \S+ by plain JAX. 3 of 183 numbers differ by more than"
    )
    _check(ADAGRAD, _dict(), rtol=0.01)
    _check(ADAGRAD, _dict(), atol=0.01)


def test_sees_a_wrong_loss(monkeypatch):
    def wrong(fun, **options):
        return lambda *args: (0.0, sj.value_and_grad(fun, **options)(*args)[1])

    monkeypatch.setattr(transform, "value_and_grad", wrong)
    _seen(r"step 0: the loss differs: 0.0 by sparsejax, \d")


def test_sees_a_gradient_of_another_type(monkeypatch):
    def wrong(fun, **options):
        def run(*args):
            value, grads = sj.value_and_grad(fun, **options)(*args)
            return value, {**grads, "w": grads["w"].astype(jnp.float16)}

        return run

    monkeypatch.setattr(transform, "value_and_grad", wrong)
    _seen(r"the gradient of params\['w'\] is float16\[3\] by sparsejax and float32")


def _lazy_that(change):
    """`lazy` whose parameters and state are changed after each update."""

    def make(tx):
        lifted = LAZY(tx)

        def update(grads, state, params, **extra_args):
            updates, state = lifted.update(grads, state, params, **extra_args)
            return change(updates, state, params)

        return optax.GradientTransformationExtraArgs(lifted.init, update)

    return make


def test_sees_a_small_wrong_update(monkeypatch):
    """1 % of a step of 1e-4 on weights of about 1."""

    def change(updates, state, params):
        updates["w"] = updates["w"] * 1.01
        return updates, state

    monkeypatch.setattr(sj.optim, "lazy", _lazy_that(change))
    _seen(r"step 0: params\['w'\] differs at row 0: \S+ by", tx=optax.adagrad(1e-4))


def test_sees_a_row_that_was_not_read(monkeypatch):
    """Even by the last bit, in the table and in the state."""

    def of_table(updates, state, params):
        moved = params["table"].at[20].multiply(1 + 2**-23)
        return {**updates, "table": moved - params["table"]}, state

    monkeypatch.setattr(sj.optim, "lazy", _lazy_that(of_table))
    _seen(r"step 0: params\['table'\] differs at row ")

    def of_state(updates, state, params):
        flat, tree = jax.tree.flatten(state)
        flat = [x.at[20].multiply(1 + 2**-23) if x.shape == (V, D) else x for x in flat]
        return updates, tree.unflatten(flat)

    monkeypatch.setattr(sj.optim, "lazy", _lazy_that(of_state))
    _seen(
        r"step 0: state\[0\].sum_of_squares\['table'\] differs at row 20, column 0: "
        r".* The batch did not read this row, so it must not change."
    )


def test_sees_what_is_not_row_separable(monkeypatch):
    monkeypatch.setattr(sj.optim, "lazy", lambda tx: LAZY(tx, check=False))
    _seen(r"step 0: params\['table'\] differs at row", tx=optax.lamb(0.1))


@pytest.mark.slow
def test_sees_a_norm_over_the_rows_read():
    """As its docstring says, it is not a norm over all rows."""
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


# ------------------------------------------------------------------ what it refuses


def test_refuses_a_check_of_nothing():
    """If no gradient is sparse, both sides run the same program."""
    params, loss = {"w": jnp.ones(D)}, lambda params, x: jnp.sum(params["w"] * x)
    with pytest.raises(ValueError, match="no gradient is sparse"):
        assert_equals_dense(loss, ADAGRAD, params, [jnp.ones(D)])
