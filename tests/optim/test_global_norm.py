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


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_squares_and_sums_of_narrow_types_do_not_overflow(dtype):
    values = jnp.full((2, 4), 4e4, dtype)
    rows = sj.SelectedRows(jnp.array([1, 1]), values, 9)
    got = global_norm(rows)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, 1.6e5, rtol=1e-2)
    np.testing.assert_allclose(global_norm({"w": values}), 4e4 * 8**0.5, rtol=1e-2)


def test_is_differentiable():
    def f(values):
        return global_norm(sj.SelectedRows(jnp.array([1, 1]), values, 4))

    assert np.allclose(jax.grad(f)(jnp.array([[1.0], [2.0]])), 1)


@pytest.mark.parametrize(
    "compute",
    [
        optax.tree.norm,
        lambda g: optax.clip_by_global_norm(1.0).update(g, optax.EmptyState()),
        lambda g: jax.tree.map(lambda x: jnp.sum(x.astype(jnp.float32)), g),
        lambda g: jax.tree.map(lambda x: x.conj().mean() + x.sum(), g),
    ],
    ids=["norm", "clip", "astype", "methods"],
)
def test_functions_of_trees_are_refused_with_the_way_out(compute):
    rows, _ = make_rows([4, 0, 4, 9], 7)
    words = r"sparsejax.optim.global_norm, sparsejax.optim.lazy\(optax.chain"
    with pytest.raises((TypeError, ValueError), match=words):
        jax.jit(compute)({"t": rows})
    with pytest.raises(NotImplementedError):  # the text is JAX's
        compute({"t": rows})
