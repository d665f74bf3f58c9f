"""Losses of rows: values and derivatives of both orders equal dense JAX."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import (
    assert_no_copies,
    assert_trees_close,
    compile_step,
    to_dense,
)


V, D, N = 300, 6, 20
RNG = np.random.default_rng(0)
I, J = RNG.integers(0, V, (2, N), np.int32)
Y, C = RNG.standard_normal((2, N, D))


def _relu_of_rows(p):
    rows = p["t"][I]
    return jnp.sum(jnp.where(rows > 0, rows, 0) ** 2)


# Losses of tables t and u, and of dense weights w and h.
LOSSES = {
    "squares": lambda p: jnp.sum(p["t"][I] ** 2),
    "distance from data": lambda p: jnp.sum((p["t"][I] - Y) ** 2),
    "pairs of one table": lambda p: jnp.sum(jnp.sum(p["t"][I] * p["t"][J], 1) ** 2),
    "dots": lambda p: jnp.sum(jnp.einsum("bd,bd->b", p["t"][I], p["t"][J]) ** 2),
    "quotient": lambda p: jnp.sum(p["t"][I] / (3 + p["t"][J] ** 2)),
    "two tables apart": lambda p: jnp.sum(p["t"][I] ** 2) + jnp.sum(p["u"][J] ** 2),
    "lookup": lambda p: jnp.sum(sj.lookup(p["t"], I - 9, mode="zero") ** 2),
    "clipped": lambda p: jnp.sum(sj.lookup(p["t"], I - 9, mode="clip") ** 2),
    "masked": _relu_of_rows,
    "penalty": lambda p: jnp.sum(p["t"][I] @ p["w"]) + jnp.sum(p["t"][I] ** 2),
    "weights": lambda p: jnp.sum((p["t"][I] @ p["w"]) ** 2),
    "pairs of two tables": lambda p: jnp.sum(jnp.sum(p["t"][I] * p["u"][J], 1) ** 2),
    "translation": lambda p: jnp.sum((p["t"][I] + p["u"][J] - p["t"][J]) ** 2),
    "gate": lambda p: jnp.sum(p["t"][I] * jax.nn.sigmoid(p["u"][J])),
    "hidden layer": lambda p: jnp.sum(jnp.tanh(p["t"][I] @ p["h"]) ** 2),
    "data": lambda p: jnp.sum(p["t"][I] * Y),
    "negatives": lambda p: jnp.sum(
        jnp.einsum("bd,bkd->bk", p["t"][I[:4]], p["t"][J.reshape(4, 5)]) ** 2
    ),
}


@pytest.fixture
def params():
    rng = np.random.default_rng(1)
    new = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return {"t": new(V, D), "u": new(V, D), "w": new(D), "h": new(D, 3)}


# Ids and data of NumPy become constants of the program.
@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", LOSSES)
def test_derivatives(name, params, x64):
    """The gradient, and the derivatives of value and gradient in both directions."""
    loss = LOSSES[name]
    if name == "masked":  # away from points without a derivative
        params["t"] = params["t"] + 2 * jnp.sign(params["t"])

    def ours(params):
        value, grads = sj.value_and_grad(loss)(params)
        assert isinstance(grads["t"], sj.SelectedRows)
        return value, to_dense(grads)

    def both_ways(f, params):
        cubes = lambda p: sum(jnp.sum(x**3) for x in jax.tree.leaves(f(p)))
        moved = jax.tree.map(jnp.ones_like, params)
        return jax.jvp(f, (params,), (moved,)), jax.grad(cubes)(params)

    @jax.jit
    def run(params):
        return both_ways(ours, params), both_ways(jax.value_and_grad(loss), params)

    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    assert_trees_close(*run(params), rtol=1e-9, atol=1e-9)


@pytest.mark.window
@pytest.mark.usefixtures("loose_promotion")
def test_a_gradient_inside_of_another_reads_once(params):
    loss = lambda p: jnp.sum(p["t"][I] ** 2)
    norm = lambda p: jnp.sum(sj.grad(loss)(p)["t"].to_dense()[J] ** 2)
    dense_norm = lambda p: jnp.sum(jax.grad(loss)(p)["t"][J] ** 2)
    grads = sj.grad(norm)(params)
    assert_trees_close(to_dense(grads), jax.grad(dense_norm)(params), atol=1e-4)
    program = jax.make_jaxpr(sj.grad(norm))(params)
    assert str(program).count("= read_rows") == 1


def test_aux_and_ids_that_change(params):
    """Rows that are returned are those that were read before the update."""

    @jax.jit
    def step(params, ids):
        def loss(p):
            rows = p["t"][ids]
            return jnp.sum(rows**2), rows

        (_, rows), grads = sj.value_and_grad(loss, has_aux=True)(params)
        return params["t"] + (-0.5) * grads["t"], rows

    for ids in (jnp.array([3, 3, V - 1]), jnp.array([0, 7, 8])):
        table, rows = step(params, ids)
        np.testing.assert_array_equal(rows, params["t"][ids])
        expected = params["t"].at[ids].add(-params["t"][ids])
        np.testing.assert_allclose(table, expected, atol=1e-6)


# ------------------------------------------------------------------ the program


LARGE = {
    "squares": lambda p, i, j: jnp.sum(p["t"][i] ** 2),
    "dots": lambda p, i, j: jnp.sum(jnp.sum(p["t"][i] * p["t"][j], 1) ** 2),
    "pairs of two tables": lambda p, i, j: jnp.sum(p["t"][i] * p["u"][j]),
    "gate": lambda p, i, j: jnp.sum(p["t"][i] * jax.nn.sigmoid(p["u"][j])),
    "penalty": lambda p, i, j: jnp.sum(p["t"][i] @ p["w"]) + jnp.sum(p["u"][j] ** 2),
}


@pytest.mark.window
@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name, tx", [*zip(LARGE, itertools.cycle(["adam", "sgd"]))])
def test_memory_of_a_step(tx, name):
    """The step makes no array of a table's size, and few of the size of the rows."""
    v, d, n = 200_003, 64, 20_000
    tx = sj.optim.lazy({"sgd": optax.sgd, "adam": optax.adam}[tx](0.1))
    uses = {"pairs of two tables": "tu", "gate": "tu", "penalty": "tuw"}.get(name, "t")
    shapes = {"t": (v, d), "u": (v, d), "w": (d,)}
    shapes = {k: shapes[k] for k in uses}
    compiled = compile_step(LARGE[name], tx, shapes, (n,), (n,))
    # A GPU's scatter reads the rows of the other table: each has to come first.
    if name != "pairs of two tables" or jax.default_backend() == "cpu":
        table = jax.ShapeDtypeStruct((v, d), jnp.float32)
        assert_no_copies(compiled.as_text(), table)
    rows = compiled.memory_analysis().temp_size_in_bytes / (4 * n * d)
    if jax.default_backend() == "cpu":
        assert rows < {"squares": 2.2, "dots": 4.5}.get(name, 4.6), rows
