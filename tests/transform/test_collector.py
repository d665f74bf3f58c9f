"""Python's garbage collector rests while a step is traced, and only then."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false

import gc

import jax
import jax.numpy as jnp
import optax
import pytest

import sparsejax as sj


IDS = jnp.array([1, 3])


@pytest.fixture(autouse=True)
def _collector():
    assert gc.isenabled()
    yield
    assert gc.isenabled()


def _recorded(seen, fail=False):
    def loss(table):
        seen.append(gc.isenabled())
        if fail:
            raise RuntimeError("of the loss")
        return jnp.sum(table[IDS] ** 2)

    return loss


def test_paused_where_a_gradient_is_traced():
    seen = []
    step = jax.jit(sj.value_and_grad(_recorded(seen)))
    step(jnp.ones((9, 2)))
    assert seen and not any(seen)
    assert gc.isenabled()


def test_not_paused_where_operations_run():
    seen = []
    sj.value_and_grad(_recorded(seen))(jnp.ones((9, 2)))
    assert seen and all(seen)


def test_not_paused_in_a_vmap_that_runs():
    seen = []
    jax.vmap(sj.grad(_recorded(seen)))(jnp.ones((2, 9, 2)))
    assert seen and all(seen)


def test_an_error_starts_it_again():
    with pytest.raises(RuntimeError, match="of the loss"):
        jax.jit(sj.grad(_recorded([], fail=True)))(jnp.ones((9, 2)))
    assert gc.isenabled()


def test_paused_where_an_update_is_traced():
    seen = []

    def look(updates, params):
        seen.append(gc.isenabled())
        return updates

    tx = sj.optim.lazy(optax.stateless(look))
    table = jnp.ones((9, 2))
    state = tx.init(table)
    grads = sj.SelectedRows(IDS, jnp.ones((2, 2)), height=9)
    tx.update(grads, state, table)  # also for the test of what it does
    seen.clear()
    jax.jit(tx.update)(grads, state, table)
    assert seen and not any(seen)
    assert gc.isenabled()


def test_stays_off_where_the_user_turned_it_off():
    gc.disable()
    try:
        jax.jit(sj.grad(_recorded([])))(jnp.ones((9, 2)))
        assert not gc.isenabled()
    finally:
        gc.enable()
