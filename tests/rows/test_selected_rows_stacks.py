"""SelectedRows of a stack of tables `[K, V, ...]`: ids count the rows of all tables."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from helpers import assert_same_bits


K, V = 3, 5
ROWS = np.array([14, 2, 2, 15, -1, 5])  # two of them empty
VALUES = np.arange(12.0, dtype=np.float32).reshape(6, 2)


def _stack():
    return sj.SelectedRows(ROWS, VALUES, K * V, stack=(K,))


def _dense():
    out = np.zeros((K * V, 2), np.float32)
    filled = (ROWS >= 0) & (ROWS < K * V)
    np.add.at(out, ROWS[filled], VALUES[filled])
    return out.reshape(K, V, 2)


def _is_stack(x):
    return isinstance(x, sj.SelectedRows) and (x.stack, x.height) == ((K,), K * V)


def test_is_what_it_says():
    g = _stack()
    assert (g.shape, g.ndim, g.capacity, g.row_shape) == ((K, V, 2), 3, 6, (K, V))
    assert "height=15, stack=(3,), num_rows=4" in repr(g)
    assert "stack=(3,)" in repr(jax.eval_shape(lambda: g))
    assert g.unstacked().shape == (K * V, 2) and g.unstacked().unstacked().stack == ()
    assert sj.SelectedRows(ROWS, VALUES, K * V).unstacked().stack == ()


@pytest.mark.slow
def test_operations_keep_the_stack():
    g, dense = _stack(), _dense()
    want = {
        "coalesce": (g.coalesce(), dense),
        "merged": (g.coalesce(2, return_overflow=True)[0], None),
        "map": (g.map(jnp.negative), -dense),
        "scaled": (2 * g / 4, dense / 2),
        "sum": (g + g - g, dense),
        "product": (g * g, dense**2),
        "concatenated": (sj.concatenate([g, g]), 2 * dense),
        "retained": (g.retain([2]), np.where(dense == dense[0, 2], dense, 0)),
        "cast": (g.astype(jnp.bfloat16), dense),
        "copied": (pickle.loads(pickle.dumps(g)), dense),
        "tree": (jax.tree.map(lambda x: x, g), dense),
        "jit": (jax.jit(lambda g: g)(g), dense),
        "scan": (jax.lax.scan(lambda c, _: (c * 1.0, None), g, None, 2)[0], dense),
    }
    for name, (found, dense_found) in want.items():
        assert _is_stack(found), name
        if dense_found is not None:
            np.testing.assert_array_equal(found.to_dense(), dense_found, err_msg=name)
    assert_same_bits(g.get([2, 7]), np.stack([dense[0, 2], [0, 0]]).astype("f"))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_added_to_an_array(dtype):
    g, array = _stack(), jnp.ones((K, V, 2), dtype)
    added = jax.jit(lambda g, x: x + g)(g, array)
    assert_same_bits(added, (1 + _dense()).astype(dtype))
    assert_same_bits(g + np.asarray(array), added)
    assert_same_bits(array - g, (1 - _dense()).astype(dtype))
    for wrong in (jnp.ones((K * V, 2)), g.unstacked()):
        with pytest.raises(ValueError, match=r"\(3, 5, 2\)"):
            _ = g + wrong


def test_trees_tell_a_stack_from_a_table():
    structure = jax.tree.structure
    assert structure(_stack()) != structure(_stack().unstacked())
    assert structure(_stack()) == structure(_stack().coalesce(4))
    other = sj.SelectedRows(ROWS, VALUES, K * V, stack=(V,))
    assert structure(_stack()) != structure(other)


def test_gradient_with_respect_to_a_stack():
    g = _stack()
    loss = lambda g: jnp.sum(jnp.sin(g.to_dense()))
    found = sj.grad(loss)(g)
    assert _is_stack(found)
    assert_same_bits(found.rows, g.rows)


def test_refused():
    with pytest.raises(TypeError, match=r"Use .get\(k \* V \+ v\)"):
        _stack()[7]
    calls = {
        "lookup": lambda g: sj.lookup(g, jnp.array([1])),
        "embedding_bag": lambda g: sj.embedding_bag(g, jnp.array([[1]])),
        "dot": lambda g: sj.dot(sj.SegmentTensor.from_csr([0, 1], [1], [1.0]), g),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match="a stack.*unstacked"):
            call(_stack())


@pytest.mark.slow
def test_described_and_exported():
    """Its dense shape; and a step that returns one runs elsewhere."""
    (described,) = sj.desc.describe({"g": _stack()})
    assert described.dims == (K, V, 2)
    loss = lambda t, ids: jnp.sum(t[1, ids] ** 2)
    export = pytest.importorskip("jax.export")
    pytest.importorskip("flatbuffers")
    args = jnp.ones((K, V, 2)), jnp.array([4, 4])
    step = jax.jit(lambda t, ids: sj.grad(loss, tables=True)(t, ids))
    data = export.export(step)(*args).serialize()
    found = export.deserialize(data).call(*args)
    assert _is_stack(found)
    np.testing.assert_array_equal(found.to_dense(), jax.grad(loss)(*args))
