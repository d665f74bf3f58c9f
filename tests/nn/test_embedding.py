"""Embedding and EmbeddingBag, against plain jnp on the table."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import sparsejax as sj
from helpers import assert_no_dense, assert_trees_close


V, D = 211, 3  # a prime that nothing else is
IDS = jnp.array([[3, 7, -1], [V, 3, 5], [V - 1, 0, 7]])
LAYER = sj.nn.Embedding(V, D, padding_id=-1, mode="zero")
BAG = sj.nn.EmbeddingBag(V, D, padding_id=-1, mode="zero", combiner="mean")


@functools.cache
def _params(layer):
    return jax.jit(layer.init)(jax.random.key(0))


def _plain(table, ids):
    """`table[ids]`, with zeros for ids out of range."""
    inside = (ids >= 0) & (ids < V)
    rows = table[jnp.where(inside, ids, 0)]
    return jnp.where(inside[..., None], rows, jnp.zeros((), rows.dtype))


def _plain_mean(table, ids):
    """The mean of each bag; -1 is padding, V counts."""
    count = jnp.sum(ids != -1, axis=-1, keepdims=True).astype(table.dtype)
    return jnp.sum(_plain(table, ids), axis=-2) / count


PLAIN = {"embedding": (LAYER, _plain), "bag": (BAG, _plain_mean)}


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("name", PLAIN)
def test_gradient_is_that_of_plain_jnp(name):
    layer, f = PLAIN[name]
    params = _params(layer)
    loss = lambda params, ids: jnp.sum(jnp.sin(layer(params, ids)))
    plain = lambda params, ids: jnp.sum(jnp.sin(f(params["embedding"], ids)))
    two = np.stack([IDS, IDS])

    def scanned(params):
        add = lambda total, ids: (total + loss(params, ids), None)
        return jax.lax.scan(add, jnp.zeros(()), two)[0]

    @jax.jit
    def run(params):
        both = layer(params, IDS), f(params["embedding"], IDS)
        g, in_scan = sj.grad(loss)(params, IDS), sj.grad(scanned)(params)
        g, in_scan = g["embedding"], in_scan["embedding"]
        assert isinstance(g, sj.SelectedRows) and g.capacity == IDS.size
        assert isinstance(in_scan, sj.SelectedRows)
        dense = lambda ids: sj.grad(loss)(params, ids)["embedding"].to_dense()
        found = g.to_dense(), jax.vmap(dense)(two), in_scan.to_dense()
        return both, found, jax.grad(plain)(params, IDS)["embedding"]

    (got, values), found, want = run(params)
    np.testing.assert_allclose(got, values, rtol=1e-5, atol=1e-6)
    want = np.asarray(want)
    assert_trees_close(found, (want, np.stack([want, want]), 2 * want))
    assert_no_dense(sj.grad(loss), params, IDS)


@pytest.mark.slow
def test_ids_of_any_rank_and_segments():
    params = _params(LAYER)
    table = params["embedding"]
    for shape in ((), (4,), (2, 0), (1, 2, 3)):
        ids = jnp.ones(shape, jnp.int32)
        assert jax.eval_shape(LAYER, params, ids).shape == (*shape, D)
    values = jnp.array([3, 7, 3, V + 9])
    st = sj.SegmentTensor(values, jnp.array([1, 0, 1, 2]), 2)
    out = LAYER(params, st)
    assert isinstance(out, sj.SegmentTensor) and out.num_segments == 2
    want = jnp.concatenate([table[values[:3]], jnp.zeros((1, D))])
    np.testing.assert_array_equal(out.values, want)
    # An element in no segment is not an error, for any id.
    strict = dataclasses.replace(LAYER, mode="error")
    np.testing.assert_array_equal(strict(params, st).values, want)
    with pytest.raises(checkify.JaxRuntimeError, match="out of range"):
        strict(params, jnp.array([V, 0]))


@pytest.mark.slow
def test_options_are_those_of_lookup_and_embedding_bag():
    table = np.random.default_rng(0).normal(size=(V, D)).astype(np.float32)
    ids = np.array([[5, -1], [V, 0]])
    cases: list[dict[str, Any]] = [
        dict(mode="clip"),
        dict(mode="fill", padding_id=0),
        dict(mode="zero", max_norm=0.5),
    ]
    combiners = "sum", "mean", "sqrtn", "max", "min", "logsumexp", "none"
    bags: list[dict[str, Any]] = [dict(combiner="max", **x) for x in cases]
    bags += [dict(combiner=x, mode="zero") for x in combiners]

    @jax.jit
    def run(table):
        pairs = []
        for options in cases:
            out = sj.nn.Embedding(V, D, **options)(table, ids)
            pairs.append((out, sj.lookup(table, ids, **options)))
        for options in bags:
            out = sj.nn.EmbeddingBag(V, D, **options)(table, ids)
            pairs.append((out, sj.embedding_bag(table, ids, **options)))
        return pairs

    for out, want in run(table):
        np.testing.assert_array_equal(out, want)
    with pytest.raises(ValueError, match="median"):
        sj.nn.EmbeddingBag(5, 2, combiner="median")


def test_forms_of_bags():
    layer = sj.nn.EmbeddingBag(V, D, combiner="sum", padding_id=-1)
    params = _params(layer)
    padded = jnp.array([[3, 7], [5, -1], [-1, -1]])
    weights = jnp.array([[0.5, 2.0], [3.0, jnp.nan], [jnp.nan, jnp.nan]])
    table = np.asarray(params["embedding"])
    first = 0.5 * table[3] + 2 * table[7]
    want = np.stack([first, 3 * table[5], np.zeros(D, np.float32)])
    flat, ids = jnp.array([3, 7, 5, 9]), jnp.array([0, 0, 1, 3])
    w = jnp.array([0.5, 2.0, 3.0, jnp.nan])
    st = sj.SegmentTensor(flat, ids, 3, True)
    both = sj.SegmentTensor({"index": flat, "value": w}, ids, 3, True)

    @jax.jit
    def run(params):
        return (
            layer(params, padded, weights=weights),
            layer(params, flat, ids, 3, weights=w, indices_are_sorted=True),
            layer(params, st, weights=w),
            layer(params, both),
        )

    padded_out, *others = run(params)
    np.testing.assert_allclose(padded_out, want, rtol=1e-5)
    for out in others:
        np.testing.assert_allclose(out, padded_out, rtol=1e-6)


def test_the_rows_are_cast_not_the_table():
    for kind in (sj.nn.Embedding, sj.nn.EmbeddingBag):
        layer = kind(V, D, dtype="float16", param_dtype="bfloat16", mode="zero")
        params = _params(layer)
        assert params["embedding"].dtype == jnp.bfloat16
        assert layer(params, jnp.array([[1]])).dtype == jnp.float16
        loss = lambda p, f=layer: jnp.sum(f(p, jnp.array([[1, 2]])).astype(jnp.float32))
        assert_no_dense(sj.grad(loss), params)


# ------------------------------------------------------------------ kinds of gradient


@pytest.mark.slow
def test_sparse_grad_false_is_dense_always():
    for kind in (sj.nn.Embedding, sj.nn.EmbeddingBag):
        layer = kind(V, D, sparse_grad=False)
        params, ids = _params(layer), jnp.array([[3, 7]])
        loss = lambda p, layer=layer, ids=ids: jnp.sum(jnp.sin(layer(p, ids)))
        two = jax.tree.map(lambda x: np.stack([x, x]), params)

        @jax.jit
        def run(params, two, loss=loss):
            grads = sj.grad(loss)(params), jax.grad(loss)(params)
            return *grads, jax.vmap(jax.grad(loss))(two)

        g, want, mapped = (x["embedding"] for x in run(params, two))
        assert isinstance(g, jax.Array)
        assert_trees_close(g, want)
        assert_trees_close(mapped[1], want)
        with pytest.raises(sj.DensifyError, match="dense_gradient"):
            sj.grad(loss, tables=True)(params)
        # Nothing of it is left when it is compiled.
        lowered = jax.jit(layer).lower(params, ids).compile()
        assert f"f32[{V},{D}]{{1,0}} copy(" not in str(lowered.as_text())


@pytest.mark.slow
@pytest.mark.usefixtures("eight_devices")
def test_sparse_grad_false_over_a_mesh():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    layer, spec = sj.nn.Embedding(V, D, sparse_grad=False), jax.sharding.PartitionSpec

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(spec(), spec("i")), out_specs=spec()
    )
    def loss(params, ids):
        return jax.lax.psum(jnp.sum(layer(params, ids)), "i")

    g = sj.grad(loss)(_params(layer), jnp.array([3, 7]))["embedding"]
    assert isinstance(g, jax.Array)
    assert np.flatnonzero(np.any(np.asarray(g) != 0, axis=1)).tolist() == [3, 7]


def test_required_sparse_gradients():
    layers = {"a": sj.nn.Embedding(17, D), "b": [sj.nn.EmbeddingBag(V, D)], "c": None}
    layers["d"] = sj.nn.Embedding(V, D, sparse_grad=False)
    yes, no = {"embedding": True}, {"embedding": False}
    tables = sj.nn.tables(layers)
    assert tables == {"a": yes, "b": [yes], "c": None, "d": no}
    a, b, d = layers["a"], layers["b"][0], layers["d"]
    params = {"a": _params(a), "b": [_params(b)], "c": jnp.ones(D), "d": _params(d)}
    ids = jnp.arange(9)

    def loss(params):
        bags = b(params["b"][0], ids[None])
        rows = a(params["a"], ids) * params["c"][None] + d(params["d"], ids)
        return jnp.sum(rows) + jnp.sum(bags)

    def kinds(**options):
        g = jax.eval_shape(sj.grad(loss, **options), params)
        return [isinstance(x["embedding"], sj.SelectedRows)
                for x in (g["a"], g["b"][0], g["d"])]  # fmt: skip

    assert kinds() == [False, True, False]  # 9 of 17 rows are more than half
    assert kinds(tables=tables) == [True, True, False]


@pytest.mark.slow
def test_attend():
    layer = sj.nn.Embedding(V, D)
    params, query = _params(layer), jax.random.normal(jax.random.key(1), (2, 4, D))
    want = np.einsum("abd,vd->abv", query, params["embedding"])
    assert_trees_close(layer.attend(params, query), want)
    half = dataclasses.replace(layer, dtype="bfloat16").attend(params, query)
    assert half.dtype == jnp.bfloat16

    def tied(params, ids):
        logits = layer.attend(params, layer(params, ids))
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

    both = jax.jit(lambda *args: (sj.grad(tied)(*args), jax.grad(tied)(*args)))
    g, want = (x["embedding"] for x in both(params, np.array([3, 7])))
    assert isinstance(g, jax.Array)  # all rows are scored
    assert_trees_close(g, want)
    for wrong in (jnp.ones((2, D + 1)), jnp.ones(D, jnp.int32), jnp.ones(())):
        with pytest.raises((TypeError, ValueError), match="query"):
            layer.attend(params, wrong)


@pytest.mark.slow
def test_rows_that_were_pulled():
    """The rows alone are params enough, as is the table; gradients have their rows."""
    params = _params(LAYER)
    ids = jnp.unique(IDS, size=10, fill_value=V)
    rows = sj.SelectedRows(ids, sj.lookup(params["embedding"], ids, mode="zero"), V)
    for layer in (LAYER, BAG):
        f = lambda p, layer=layer: (x := layer(p, IDS), jnp.sum(jnp.sin(x)))[::-1]
        g, out = jax.jit(sj.grad(f, has_aux=True))(rows)
        np.testing.assert_array_equal(g.rows, rows.rows)
        want, of_table = jax.jit(jax.grad(f, has_aux=True))(params["embedding"])
        np.testing.assert_allclose(out, of_table, rtol=1e-6)
        assert_trees_close(g.to_dense(), want)
    fill = dataclasses.replace(LAYER, mode="fill")
    assert np.isnan(fill({"embedding": rows}, jnp.array([99]))).all()
    with pytest.raises(TypeError, match="every row"):
        LAYER.attend(rows, jnp.ones(D))


# ------------------------------------------------------------------ as values


def test_layers_are_static():
    ones = jax.nn.initializers.ones
    zero: Any = np.int64(0)
    for kind in (sj.nn.Embedding, sj.nn.EmbeddingBag):
        layer = kind(V, D, padding_id=zero, param_dtype="float32")
        assert layer == kind(V, D, padding_id=0) != kind(V, D)
        assert hash(layer) == hash(kind(V, D, padding_id=0))
        drawn = kind(V, D, embedding_init=ones)
        assert drawn == kind(V, D, embedding_init=ones) != kind(V, D)
        assert dataclasses.replace(drawn, features=2).embedding_init == ones
        f = jax.jit(lambda layer, p, ids: layer(p, ids), static_argnums=0)
        assert f(layer, _params(layer), jnp.array([[0]])).shape[-1] == D
    layer = sj.nn.EmbeddingBag(V, D, combiner="mean", dtype="bfloat16", mode="raise",
                               embedding_init=ones)  # fmt: skip
    shown = "dtype=bfloat16, mode='error', embedding_init=ones, combiner='mean'"
    assert repr(layer) == f"EmbeddingBag(211, 3, {shown})"
    table = _params(sj.nn.Embedding(2000, 64))["embedding"]
    assert abs(float(jnp.mean(jnp.sum(table * table, axis=1))) - 1) < 0.02


def test_keys_of_any_kind():
    two = jax.random.split(jax.random.key(0))
    for layer in (LAYER, BAG):
        both = jax.vmap(layer.init)(two)["embedding"]
        old = layer.init(jax.random.PRNGKey(3))["embedding"]
        assert both.shape == (2, V, D) and old.shape == (V, D)
