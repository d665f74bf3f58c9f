"""A jitted step with donated buffers costs what the rows read cost."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import re
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest

import sparsejax as sj
from helpers import assert_no_dense, compile_as_users_do
from sparsejax.optim import lazy


V, D, N = 200_003, 64, 1024

TXS = {
    "adam": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "adagrad": lambda: optax.adagrad(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
}


def _program(tx):
    lifted = lazy(tx)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, rows, values):
        grads = {"table": sj.SelectedRows(rows, values, V), "bias": jnp.ones(D)}
        updates, state = lifted.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    table = jax.ShapeDtypeStruct((V, D), jnp.float32)
    params = {"table": table, "bias": jax.ShapeDtypeStruct((D,), jnp.float32)}
    rows = jax.ShapeDtypeStruct((N,), jnp.int32)
    values = jax.ShapeDtypeStruct((N, D), jnp.float32)
    return step, (params, jax.eval_shape(lifted.init, params), rows, values)


@pytest.mark.loose_promotion
@pytest.mark.parametrize("name", TXS)
def test_in_place(name):
    step, args = _program(TXS[name]())
    compiled = compile_as_users_do(step.lower(*args))
    copies = re.findall(rf"= f32\[{V},{D}\]\S* copy\(", compiled.as_text())
    assert not copies
    memory = compiled.memory_analysis()
    assert memory is not None
    table_bytes = 4 * V * D
    assert memory.temp_size_in_bytes < 0.05 * table_bytes
    # All tables, of weights and of state, are the buffers that were handed in.
    tables = sum(x.shape == (V, D) for x in jax.tree.leaves(args))
    assert memory.alias_size_in_bytes >= tables * table_bytes


@pytest.mark.loose_promotion
@pytest.mark.parametrize("name", TXS)
def test_nothing_of_the_tables_size_arises(name):
    step, args = _program(TXS[name]())
    assert_no_dense(step, *args, allow=("scatter", "scatter-add"), heights={V})


@pytest.mark.loose_promotion
def test_a_donated_step_runs():
    tx = lazy(optax.adam(0.1))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jnp.ones((50, 4))
    grads = sj.SelectedRows(jnp.array([3, 3, 50]), jnp.ones((3, 4)), 50)
    state = tx.init(params)
    moments = state[0].mu
    new_params, state = step(params, state, grads)
    assert params.is_deleted() and moments.is_deleted()
    assert jnp.all(jnp.isclose(new_params[3], 0.9)) and jnp.all(new_params[4] == 1)
