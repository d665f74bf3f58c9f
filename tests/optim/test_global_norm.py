"""global_norm of trees with SelectedRows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from cases import ROW_CASES, names
from helpers import dense, make_rows
from sparsejax.optim import global_norm


@pytest.mark.parametrize("case", ROW_CASES, ids=names(ROW_CASES))
def test_equals_the_dense_norm(case):
    rows, values = make_rows(case.padded, case.height)
    tree = {"rows": rows, "bias": jnp.arange(3.0), "none": None}
    expected = np.linalg.norm([*dense(rows.rows, values, case.height).flat, 0, 1, 2])
    got = jax.jit(global_norm)(tree)
    assert got.dtype == jnp.float32
    assert np.isclose(got, expected)


def test_equals_optax_on_the_dense_tree():
    rows, _ = make_rows([4, 0, 4, 9], 7)
    tree = {"rows": rows, "bias": jnp.arange(3.0)}
    assert np.isclose(
        global_norm(tree), optax.tree.norm({**tree, "rows": rows.to_dense()})
    )


def test_of_nothing():
    assert global_norm({}) == 0
    assert global_norm({"none": None, "masked": optax.MaskedNode()}) == 0


def test_leaves_of_several_types():
    rows = sj.SelectedRows(jnp.array([1, 1]), jnp.ones((2, 4), jnp.bfloat16), 9)
    assert global_norm([rows, jnp.full((9,), 1.0)]) == 5
    assert global_norm(rows).dtype == jnp.bfloat16


def test_is_differentiable():
    def f(values):
        return global_norm(sj.SelectedRows(jnp.array([1, 1]), values, 4))

    assert np.allclose(jax.grad(f)(jnp.array([[1.0], [2.0]])), 1)
