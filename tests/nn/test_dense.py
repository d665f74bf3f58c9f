"""Dense on arrays and CSR, against plain jnp on dense arrays."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCSR
from jax.test_util import check_grads

import sparsejax as sj
from helpers import assert_no_dense, assert_trees_close, to_dense


sparse = pytest.importorskip("scipy.sparse")

C, S, CAPACITY = 211, 5, 24  # a prime that nothing else is
NORMAL = jax.nn.initializers.normal(1.0)


def _scipy(dtype: Any = np.float32):
    return sparse.random(S, C, 0.015, "csr", dtype, np.random.default_rng(0))


def _segments(matrix, is_sorted=True):
    """The matrix with empty slots, in which anything stands."""
    n = matrix.nnz
    index = np.full(CAPACITY, 7, np.int32)
    value = np.full(CAPACITY, np.nan, matrix.dtype)
    rows = np.full(CAPACITY, S, np.int32)
    index[:n], value[:n] = matrix.indices, matrix.data
    rows[:n] = np.repeat(np.arange(S), np.diff(matrix.indptr))
    index[n:] = np.resize([7, -3, C, C + 5], CAPACITY - n)
    order = np.arange(CAPACITY)
    if not is_sorted:
        order = np.random.default_rng(1).permutation(CAPACITY)
    values = {"index": jnp.asarray(index[order]), "value": jnp.asarray(value[order])}
    return sj.SegmentTensor(values, jnp.asarray(rows[order]), S, is_sorted)


def _forms(matrix):
    bcsr = BCSR.from_scipy_sparse(matrix)
    return {
        "scipy": matrix,
        "bcsr": bcsr,
        "segments": _segments(matrix),
        "unsorted": _segments(matrix, is_sorted=False),
        "array": jnp.asarray(matrix.toarray()),
    }


LAYERS = {
    "dense": sj.nn.Dense(3, C, bias_init=NORMAL),
    "dense without bias": sj.nn.Dense(1, use_bias=False),
}


@functools.cache
def _params(layer):
    spec: Any = jax.ShapeDtypeStruct((1, C), jnp.float32)
    return jax.jit(lambda key: layer.init(key, spec))(jax.random.key(0))


def _plain(params, x):
    """The layer on an array, by its definition."""
    return x @ params["kernel"] + params.get("bias", jnp.zeros(()))


def _required(layer):
    return dataclasses.replace(layer, sparse_grad=True).table_prefix()


# ------------------------------------------------------------------ values


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("loose_promotion")  # of the plain function
def test_every_form_of_input(name):
    layer, matrix = LAYERS[name], _scipy()
    params = _params(layer)
    want = _plain(params, jnp.asarray(matrix.toarray()))
    forms = _forms(matrix)
    outs = {"scipy": layer(params, forms.pop("scipy"))}
    call = lambda params, forms: {k: layer(params, x) for k, x in forms.items()}
    outs |= jax.jit(call)(params, forms)
    for form, out in outs.items():
        assert out.dtype == jnp.float32, form
        np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5, err_msg=form)


@pytest.mark.slow
def test_ids_alone_count_one():
    layer, matrix = LAYERS["dense"], _scipy()
    params, st = _params(layer), _segments(matrix)
    ids = sj.SegmentTensor(st.values["index"], st.segment_ids, S, True)
    matrix.data[:] = 1
    out, want = layer(params, ids), layer(params, matrix)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def test_leading_axes():
    x, layer = jax.random.normal(jax.random.key(1), (2, 3, C)), LAYERS["dense"]
    out, one = layer(_params(layer), x), layer(_params(layer), x[1, 2])
    assert out.shape == (2, 3, 3)
    np.testing.assert_allclose(out[1, 2], one, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_types_of_results(x64):
    matrix = _scipy()
    st, kinds = _segments(matrix), jax.ShapeDtypeStruct
    layer = sj.nn.Dense(2, C, dtype="bfloat16")
    exact = dataclasses.replace(layer, dtype=None)
    params = _params(layer)
    for x in (st, jnp.asarray(matrix.toarray())):
        out = layer(params, x)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(out, np.float32), exact(params, x), rtol=0.05, atol=0.05
        )
    counts = {**st.values, "value": np.ones(CAPACITY, np.int32)}
    counts = sj.SegmentTensor(counts, st.segment_ids, S, True)
    small = sj.nn.Dense(2, C, param_dtype="bfloat16")
    params = jax.eval_shape(small.init, jax.random.key(0))
    assert params["kernel"].dtype == params["bias"].dtype == jnp.bfloat16
    for layer, x, dtype in (
        (small, kinds((1, C), jnp.bfloat16), jnp.bfloat16),
        (small, st, jnp.float32),  # the common type
        (sj.nn.Dense(2, C), counts, jnp.float32),
        (sj.nn.Dense(2, C), kinds((2, C), jnp.int64), jnp.float32),
    ):
        params = jax.eval_shape(layer.init, jax.random.key(0))
        assert jax.eval_shape(layer, params, x).dtype == dtype


# ------------------------------------------------------------------ gradients


@pytest.mark.usefixtures("loose_promotion")
def test_gradient_is_that_of_plain_jnp():
    layer, matrix = LAYERS["dense"], _scipy()
    params, x = _params(layer), _segments(matrix, is_sorted=False)
    array = jnp.asarray(matrix.toarray())
    loss = lambda params, x: jnp.sum(jnp.sin(layer(params, x)))
    plain = lambda params, x: jnp.sum(jnp.sin(_plain(params, x)))
    required = sj.grad(loss, tables=_required(layer))
    assert_no_dense(required, params, x)
    two = jax.tree.map(lambda *xs: np.stack(xs), x, x)

    def scanned(params):
        add = lambda total, x: (total + loss(params, x), None)
        return jax.lax.scan(add, jnp.zeros(()), two)[0]

    @jax.jit
    def run(params, x, two):
        g = required(params, x)
        tables = {k: v for k, v in g.items() if k != "bias"}
        assert all(v.capacity == CAPACITY for v in tables.values())
        mapped = jax.vmap(lambda x: to_dense(required(params, x)))(two)
        halves = [jax.tree.map(lambda x, k=k: x[k], mapped) for k in range(2)]
        found = to_dense(g), jax.grad(loss)(params, x), *halves
        in_scan = sj.grad(scanned, tables=_required(layer))(params)
        return found, to_dense(in_scan), jax.grad(plain)(params, array)

    found, in_scan, want = run(params, x, two)
    for got in found:
        assert_trees_close(got, want, rtol=1e-4, atol=1e-4)
    twice = jax.tree.map(lambda x: 2 * np.asarray(x), want)
    assert_trees_close(in_scan, twice, rtol=1e-4, atol=2e-4)


@pytest.mark.slow
def test_numerical_gradients(x64):
    matrix = _scipy(np.float64)
    st = _segments(matrix)

    def loss(layer, params, value):
        x = sj.SegmentTensor({**st.values, "value": value}, st.segment_ids, S, True)
        return jnp.sum(jnp.sin(layer(params, x)))

    value = jnp.where(jnp.isnan(st.values["value"]), 0, st.values["value"])
    layer = dataclasses.replace(LAYERS["dense"], param_dtype="float64")
    f = lambda *args: loss(layer, *args)
    check_grads(jax.jit(f), (_params(layer), value), 1, ["fwd", "rev"])


def test_sparse_grad_false_is_dense_always():
    x = _segments(_scipy())
    layer = sj.nn.Dense(1, C, sparse_grad=False)
    loss = lambda params: jnp.sum(layer(params, x))
    g = jax.eval_shape(sj.grad(loss), _params(layer))
    assert not any(isinstance(v, sj.SelectedRows) for v in g.values())
    assert set(layer.table_prefix().values()) == {False}


# ------------------------------------------------------------------ pulled rows


@pytest.mark.slow
def test_weights_that_were_pulled():
    layer, x = LAYERS["dense"], _segments(_scipy())
    params = _params(layer)
    ids = np.unique(np.asarray(x.values["index"])[: _scipy().nnz])
    ids = np.append(ids, np.full(20 - ids.size, C, ids.dtype))
    zero = np.zeros((1, 3), np.float32)
    pull = lambda w: sj.SelectedRows(ids, np.append(w, zero, axis=0)[ids], C)
    pulled = {k: v if k == "bias" else pull(v) for k, v in params.items()}
    loss = lambda params: jnp.sum(jnp.sin(layer(params, x)))

    @jax.jit
    def run(pulled, params):
        outs = layer(pulled, x), layer(params, x)
        return outs, (to_dense(sj.grad(loss)(pulled)), jax.grad(loss)(params))

    (out, want), (g, want_g) = run(pulled, params)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    assert_trees_close(g, want_g, rtol=1e-4, atol=1e-4)

    # A row that was not pulled is unknown, so it reads NaN and not zero.
    without = lambda w: w.retain(ids[1:])
    first = {k: v if k == "bias" else without(v) for k, v in pulled.items()}
    missing = np.asarray(_scipy()[:, ids[:1]].toarray())[:, 0] != 0
    bad = np.isnan(np.asarray(jax.jit(layer)(first, x)).reshape(S, -1)).all(axis=1)
    np.testing.assert_array_equal(bad, missing)
    with pytest.raises(TypeError, match="every row"):
        layer(pulled, jnp.ones((2, C)))


# ------------------------------------------------------------------ as values


def test_layers_are_static():
    layer = sj.nn.Dense(3, C)
    assert layer == sj.nn.Dense(3, C, param_dtype=jnp.float32)
    assert hash(layer) == hash(sj.nn.Dense(3, C))
    assert layer != sj.nn.Dense(3, C, use_bias=False)
    f = jax.jit(lambda layer, params, x: layer(params, x), static_argnums=0)
    assert f(layer, layer.init(jax.random.key(0)), jnp.ones((2, C))).shape == (2, 3)
    assert repr(sj.nn.Dense(3, dtype="bfloat16")) == "Dense(3, dtype=bfloat16)"


def test_columns_come_from_the_input():
    layer = sj.nn.Dense(2)
    key = jax.random.key(0)
    spec: Any = jax.ShapeDtypeStruct((4, 9), jnp.float32)
    for x, columns in ((jnp.ones((4, 9)), 9), (_scipy(), C), (spec, 9)):
        assert layer.init(key, x)["kernel"].shape == (columns, 2)
    for x in (None, _segments(_scipy()), jnp.ones(())):
        with pytest.raises(ValueError, match="in_features"):
            layer.init(key, x)


def test_elements_that_are_refused():
    """Beside those of tests/error_messages.md."""
    layer = sj.nn.Dense(2, C)
    st = lambda values: sj.SegmentTensor(values, jnp.zeros(3, jnp.int32), 1)
    wide = {"index": jnp.arange(3), "value": jnp.ones((3, 2))}
    for x, word in ((st(jnp.ones(3)), "index"), (st(wide), "value")):
        with pytest.raises(TypeError, match=word):
            layer(_params(layer), x)
