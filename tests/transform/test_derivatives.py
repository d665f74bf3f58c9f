"""Losses of rows: values and derivatives of both orders equal dense JAX."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_no_copies, assert_trees_close, compile_step, to_dense


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D, N = 300, 6, 20
RNG = np.random.default_rng(0)
I, J = RNG.integers(0, V, (2, N), np.int32)
Y = RNG.standard_normal((N, D))

# Losses of tables t and u, and of dense weights w and h.
LOSSES = {
    "distance from data": lambda t, u, w, h: jnp.sum((t[I] - Y) ** 2),
    "dots": lambda t, u, w, h: jnp.sum(jnp.einsum("bd,bd->b", t[I], t[J]) ** 2),
    "quotient": lambda t, u, w, h: jnp.sum(t[I] / (3 + t[J] ** 2)),
    "lookup": lambda t, u, w, h: jnp.sum(sj.lookup(t, I - 9, mode="zero") ** 2),
    "masked": lambda t, u, w, h: jnp.sum(jnp.where(t[I] > 0, t[I], 0) ** 2),
    "penalty": lambda t, u, w, h: jnp.sum(t[I] @ w) + jnp.sum(t[I] ** 2),
    "pairs of two tables": lambda t, u, w, h: jnp.sum(jnp.sum(t[I] * u[J], 1) ** 2),
    "gate": lambda t, u, w, h: jnp.sum(t[I] * jax.nn.sigmoid(u[J])),
    "hidden layer": lambda t, u, w, h: jnp.sum(jnp.tanh(t[I] @ h) ** 2),
    "negatives": lambda t, u, w, h: jnp.sum(
        jnp.einsum("bd,bkd->bk", t[I[:4]], t[J.reshape(4, 5)]) ** 2
    ),
}


def _params(dtype):
    rng = np.random.default_rng(1)
    shapes = {"t": (V, D), "u": (V, D), "w": (D,), "h": (D, 3)}
    params = {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}
    # Away from 0, where the loss "masked" has no derivative.
    return params | {"t": params["t"] + 2 * jnp.sign(params["t"])}


# Ids and data of NumPy become constants of the program.
@pytest.mark.parametrize("name", LOSSES)
def test_derivatives(name, x64):
    """The gradient, and the derivatives of value and gradient in both directions."""
    loss = lambda params: LOSSES[name](**params)

    def ours(params):
        value, grads = sj.value_and_grad(loss)(params)
        assert isinstance(grads["t"], sj.SelectedRows)
        return value, to_dense(grads)

    def both_ways(f, params):
        cubes = lambda p: sum(jnp.sum(x**3) for x in jax.tree.leaves(f(p)))
        moved = jax.tree.map(jnp.ones_like, params)
        return jax.jvp(f, (params,), (moved,)), jax.grad(cubes)(params)

    run = lambda params: [
        both_ways(f, params) for f in (ours, jax.value_and_grad(loss))
    ]
    assert_trees_close(*jax.jit(run)(_params(jnp.float64)), rtol=1e-9, atol=1e-9)


@pytest.mark.window
def test_a_gradient_inside_of_another_reads_once():
    params, loss = _params(jnp.float32), lambda p: jnp.sum(p["t"][I] ** 2)
    norm = lambda grad: lambda p: jnp.sum(to_dense(grad(loss)(p))["t"][J] ** 2)
    grads = sj.grad(norm(sj.grad))(params)
    assert_trees_close(to_dense(grads), jax.grad(norm(jax.grad))(params), atol=1e-4)
    program = jax.make_jaxpr(sj.grad(norm(sj.grad)))(params)
    assert str(program).count("= read_rows") == 1


def test_aux_and_ids_that_change():
    """Rows that are returned are those that were read before the update."""
    table = _params(jnp.float32)["t"]

    @jax.jit
    def step(table, ids):
        loss = lambda t: (jnp.sum(t[ids] ** 2), t[ids])
        (_, rows), grads = sj.value_and_grad(loss, has_aux=True)(table)
        return table + (-0.5) * grads, rows

    for ids in (jnp.array([3, 3, V - 1]), jnp.array([0, 7, 8])):
        new, rows = step(table, ids)
        np.testing.assert_array_equal(rows, table[ids])
        np.testing.assert_allclose(new, table.at[ids].add(-table[ids]), atol=1e-6)


# ------------------------------------------------------------------ the program

# By name: the loss, its parameters, the optimizer, and the most arrays of the
# rows' size that a step has.
LARGE = {
    "squares": (lambda p, i, j: jnp.sum(p["t"][i] ** 2), "t", optax.adam, 2.2),
    "dots": (
        lambda p, i, j: jnp.sum(jnp.sum(p["t"][i] * p["t"][j], 1) ** 2),
        "t",
        optax.sgd,
        4.5,
    ),
    "pairs": (lambda p, i, j: jnp.sum(p["t"][i] * p["u"][j]), "tu", optax.adam, 4.6),
    "penalty": (
        lambda p, i, j: jnp.sum(p["t"][i] @ p["w"]) + jnp.sum(p["u"][j] ** 2),
        "tuw",
        optax.sgd,
        4.6,
    ),
}


@pytest.mark.window
@pytest.mark.parametrize("name", LARGE)
def test_memory_of_a_step(name):
    """The step makes no array of a table's size, and few of the size of the rows."""
    v, d, n = 200_003, 64, 20_000
    loss, uses, tx, most = LARGE[name]
    shapes = {name: (d,) if name == "w" else (v, d) for name in uses}
    compiled = compile_step(loss, sj.optim.lazy(tx(0.1)), shapes, (n,), (n,))
    # A GPU's scatter reads the rows of the other table: each has to come first.
    if name != "pairs" or jax.default_backend() == "cpu":
        table = jax.ShapeDtypeStruct((v, d), jnp.float32)
        assert_no_copies(compiled.as_text(), table)
    rows = compiled.memory_analysis().temp_size_in_bytes / (4 * n * d)
    if jax.default_backend() == "cpu":
        assert rows < most, rows
