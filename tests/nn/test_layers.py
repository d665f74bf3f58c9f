"""Embedding, EmbeddingBag and Dense, against plain jnp on the table."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCSR

import sparsejax as sj
from helpers import assert_no_dense, assert_trees_close, to_dense


sparse = pytest.importorskip("scipy.sparse")

V, D = 211, 3  # a prime that nothing else is
S, CAPACITY = 5, 24
IDS = jnp.array([[3, 7, -1], [V, 3, 5], [V - 1, 0, 7]])
LAYER = sj.nn.Embedding(V, D, padding_id=-1, mode="zero")
BAG = sj.nn.EmbeddingBag(V, D, padding_id=-1, mode="zero", combiner="mean")
DENSE = sj.nn.Dense(D, V, bias_init=jax.nn.initializers.normal(1.0))
MATRIX = sparse.random(S, V, 0.015, "csr", np.float32, np.random.default_rng(0))


def _segments(matrix, is_sorted=True):
    """The matrix with empty slots, in which anything stands."""
    n = matrix.nnz
    index = np.full(CAPACITY, 7, np.int32)
    value = np.full(CAPACITY, np.nan, matrix.dtype)
    rows = np.full(CAPACITY, S, np.int32)
    index[:n], value[:n] = matrix.indices, matrix.data
    rows[:n] = np.repeat(np.arange(S), np.diff(matrix.indptr))
    index[n:] = np.resize([7, -3, V, V + 5], CAPACITY - n)
    order = np.arange(CAPACITY)
    if not is_sorted:
        order = np.random.default_rng(1).permutation(CAPACITY)
    values = {"index": jnp.asarray(index[order]), "value": jnp.asarray(value[order])}
    return sj.SegmentTensor(values, jnp.asarray(rows[order]), S, is_sorted)


@functools.cache
def _params(layer):
    return jax.jit(layer.init)(jax.random.key(0))


def _plain(params, ids):
    """`table[ids]`, with zeros for ids out of range."""
    table, inside = params["embedding"], (ids >= 0) & (ids < V)
    rows = table[jnp.where(inside, ids, 0)]
    return jnp.where(inside[..., None], rows, jnp.zeros((), rows.dtype))


def _plain_mean(params, ids):
    """The mean of each bag; -1 is padding, V counts."""
    count = jnp.sum(ids != -1, axis=-1, keepdims=True).astype(jnp.float32)
    return jnp.sum(_plain(params, ids), axis=-2) / count


def _plain_dense(params, x):
    return x @ params["kernel"] + params.get("bias", 0.0)


# The layer, its inputs and how many of them there are, and the function of arrays.
CASES: dict[str, Any] = {
    "embedding": (LAYER, IDS, IDS.size, _plain),
    "bag": (BAG, IDS, IDS.size, _plain_mean),
    "dense": (
        *(DENSE, _segments(MATRIX, is_sorted=False), CAPACITY),
        lambda p, x: _plain_dense(p, MATRIX.toarray()),
    ),
}


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("loose_promotion")  # of the plain function
def test_gradient_is_that_of_plain_jnp(name):
    """Sparse, or dense with `sparse_grad=False`."""
    layer, inputs, count, plain = CASES[name]
    params = _params(layer)
    tables = dataclasses.replace(layer, sparse_grad=True).table_prefix()
    always_dense = dataclasses.replace(layer, sparse_grad=False)
    assert set(always_dense.table_prefix().values()) == {False}
    loss = lambda params, x: jnp.sum(jnp.sin(layer(params, x)))
    dense_loss = lambda params, x: jnp.sum(jnp.sin(always_dense(params, x)))
    oracle = lambda params: jnp.sum(jnp.sin(plain(params, inputs)))
    required = sj.grad(loss, tables=tables)
    assert_no_dense(required, params, inputs)
    two, of_two = (
        jax.tree.map(lambda x: jnp.stack([x, x]), tree) for tree in (inputs, params)
    )
    with pytest.raises(sj.DensifyError, match="dense_gradient"):
        sj.grad(dense_loss, tables=tables)(params, inputs)
    # The compiled program copies no table for it.
    compiled = jax.jit(always_dense).lower(params, inputs).compile()
    assert f"f32[{V},{D}]{{1,0}} copy(" not in str(compiled.as_text())

    def scanned(params):
        add = lambda total, x: (total + loss(params, x), None)
        return jax.lax.scan(add, jnp.zeros(()), two)[0]

    @jax.jit
    def run(params, inputs, two):
        g = required(params, inputs)
        assert [x.capacity for key, x in g.items() if key != "bias"] == [count]
        mapped = jax.vmap(lambda x: to_dense(required(params, x)))(two)
        halves = [jax.tree.map(lambda x, k=k: x[k], mapped) for k in range(2)]
        found = [to_dense(g), jax.grad(loss)(params, inputs), *halves]
        g = sj.grad(dense_loss)(params, inputs)
        assert not any(isinstance(x, sj.SelectedRows) for x in g.values())
        mapped = jax.vmap(lambda p: jax.grad(dense_loss)(p, inputs))(of_two)
        found += g, jax.tree.map(lambda x: x[1], mapped)
        in_scan = to_dense(sj.grad(scanned, tables=tables)(params))
        both = layer(params, inputs), plain(params, inputs)
        return both, found, in_scan, jax.grad(oracle)(params)

    (out, expected), found, in_scan, want = run(params, inputs, two)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    for got in found:
        assert_trees_close(got, want, rtol=1e-4, atol=1e-4)
    twice = jax.tree.map(lambda x: 2 * np.asarray(x), want)
    assert_trees_close(in_scan, twice, rtol=1e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("eight_devices")
def test_sparse_grad_false_over_a_mesh():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = sj.nn.Embedding(V, D, sparse_grad=False)
    total = lambda params, ids: jax.lax.psum(jnp.sum(layer(params, ids)), "i")
    specs: Any = dict(in_specs=(jax.P(), jax.P("i")), out_specs=jax.P())
    loss = jax.shard_map(total, mesh=mesh, **specs)
    g = jax.jit(sj.grad(loss))(_params(layer), np.array([3, 7]))["embedding"]
    assert isinstance(g, jax.Array)
    assert np.flatnonzero(np.any(np.asarray(g) != 0, axis=1)).tolist() == [3, 7]


def test_required_sparse_gradients():
    a, b = sj.nn.Embedding(17, D), sj.nn.EmbeddingBag(V, D)
    d = sj.nn.Embedding(V, D, sparse_grad=False)
    tables = sj.nn.tables({"a": a, "b": [b], "c": None, "d": d})
    yes, no = {"embedding": True}, {"embedding": False}
    assert tables == {"a": yes, "b": [yes], "c": None, "d": no}
    params = {"a": _params(a), "b": [_params(b)], "c": jnp.ones(D), "d": _params(d)}
    ids = jnp.arange(9)

    def loss(params):
        bags = b(params["b"][0], ids[None])
        rows = a(params["a"], ids) * params["c"][None] + d(params["d"], ids)
        return jnp.sum(rows) + jnp.sum(bags)

    def kinds(**options):
        g = jax.eval_shape(sj.grad(loss, **options), params)
        leaves = g["a"], g["b"][0], g["d"]
        return [isinstance(x["embedding"], sj.SelectedRows) for x in leaves]

    assert kinds() == [False, True, False]  # 9 of 17 rows are more than half
    assert kinds(tables=tables) == [True, True, False]


# ------------------------------------------------------------------ Embedding, bags


@pytest.mark.slow
def test_ids_of_any_rank_and_segments():
    params = _params(LAYER)
    for shape in ((), (4,), (2, 0), (1, 2, 3)):
        ids = np.ones(shape, np.int32)
        assert jax.eval_shape(LAYER, params, ids).shape == (*shape, D)
    st = sj.SegmentTensor(jnp.array([3, 7, 3, V + 9]), jnp.array([1, 0, 1, 2]), 2)
    want = np.append(np.asarray(params["embedding"])[[3, 7, 3]], np.zeros((1, D)), 0)
    # An element in no segment is not an error, for any id.
    for layer in (LAYER, dataclasses.replace(LAYER, mode="error")):
        out = layer(params, st)
        assert isinstance(out, sj.SegmentTensor) and out.num_segments == 2
        np.testing.assert_array_equal(out.values, want)


def test_options_and_forms_are_those_of_lookup_and_embedding_bag():
    table = np.random.default_rng(0).normal(size=(V, D)).astype(np.float32)
    ids, flat, bags = np.array([[5, -1], [V, 0]]), np.array([3, 7, 5]), [0, 0, 1]
    w = jnp.array([[0.5, 2.0], [3.0, jnp.nan]])
    rows: list[dict[str, Any]] = [
        dict(mode="clip"),
        dict(mode="fill", padding_id=0),
        dict(mode="zero", max_norm=0.5),
    ]
    combiners = "sum", "mean", "sqrtn", "max", "min", "logsumexp", "none"
    padded: list[dict[str, Any]] = [dict(combiner="max", **x) for x in rows]
    padded += [dict(combiner=x, mode="zero") for x in combiners]
    sums = sj.nn.EmbeddingBag(V, D, padding_id=0, mode="zero")
    st: Any = sj.SegmentTensor(flat, np.array(bags), 3, True)
    both = st.map(lambda ids: {"index": ids, "value": w.ravel()[:3]})

    @jax.jit
    def run(table):
        bag = functools.partial(sj.embedding_bag, table)
        pairs = [
            (sj.nn.Embedding(V, D, **x)(table, ids), sj.lookup(table, ids, **x))
            for x in rows
        ]
        pairs += [
            (sj.nn.EmbeddingBag(V, D, **x)(table, ids), bag(ids, **x)) for x in padded
        ]
        options: Any = dict(padding_id=0, mode="zero")
        want = bag(flat, np.array(bags), 3, weights=w.ravel()[:3])
        return pairs + [
            (sums(table, ids, weights=w), bag(ids, weights=w, **options)),
            (sums(table, flat, bags, 3, weights=w.ravel()[:3]), want),
            (sums(table, st, weights=w.ravel()[:3], indices_are_sorted=True), want),
            (sums(table, both), want),
        ]

    for out, want in run(table):
        np.testing.assert_array_equal(out, want)


def test_the_rows_are_cast_not_the_table():
    for kind in (sj.nn.Embedding, sj.nn.EmbeddingBag):
        layer = kind(V, D, dtype="float16", param_dtype="bfloat16", mode="zero")
        params = _params(layer)
        assert params["embedding"].dtype == jnp.bfloat16
        assert layer(params, jnp.array([[1]])).dtype == jnp.float16
        loss = lambda p, f=layer: jnp.sum(f(p, jnp.array([[1, 2]])).astype(jnp.float32))
        assert_no_dense(sj.grad(loss), params)


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


# ------------------------------------------------------------------ Dense


@pytest.mark.slow
@pytest.mark.parametrize("layer", [DENSE, sj.nn.Dense(1, V, use_bias=False)])
@pytest.mark.usefixtures("loose_promotion")  # of the plain function
def test_every_form_of_input(layer):
    params, array, st = _params(layer), MATRIX.toarray(), _segments(MATRIX)
    ones = MATRIX.copy()
    ones.data[:] = 1
    forms = {
        "bcsr": BCSR.from_scipy_sparse(MATRIX),
        "segments": st,
        "unsorted": _segments(MATRIX, is_sorted=False),
        "array": array,
        "leading axes": np.stack([array, array]),
        "ids alone": sj.SegmentTensor(st.values["index"], st.segment_ids, S, True),
    }
    plain = functools.partial(_plain_dense, jax.tree.map(np.asarray, params))
    want: Any = dict.fromkeys(["scipy", *forms], plain(array))
    want["leading axes"] = np.stack([want["array"]] * 2)
    want["ids alone"] = plain(ones.toarray())
    call = lambda params, forms: {k: layer(params, x) for k, x in forms.items()}
    outs = jax.jit(call)(params, forms) | {"scipy": layer(params, MATRIX)}
    for form, out in outs.items():
        assert out.dtype == jnp.float32, form
        np.testing.assert_allclose(out, want[form], rtol=2e-5, atol=2e-5, err_msg=form)


@pytest.mark.slow
def test_types_of_results(x64):
    st, kinds = _segments(MATRIX), jax.ShapeDtypeStruct
    layer, small = sj.nn.Dense(2, V), sj.nn.Dense(2, V, param_dtype="bfloat16")
    rounded = dataclasses.replace(layer, dtype="bfloat16")
    counts = {**st.values, "value": np.ones(CAPACITY, np.int32)}
    counts = sj.SegmentTensor(counts, st.segment_ids, S, True)
    params = jax.eval_shape(small.init, jax.random.key(0))
    assert params["kernel"].dtype == params["bias"].dtype == jnp.bfloat16
    for one, x, dtype in (
        (small, kinds((1, V), jnp.bfloat16), jnp.bfloat16),
        (small, st, jnp.float32),  # the common type
        (layer, counts, jnp.float32),
        (layer, kinds((2, V), jnp.int64), jnp.float32),
        (rounded, jnp.ones((2, V)), jnp.bfloat16),
    ):
        assert jax.eval_shape(one, _params(one), x).dtype == dtype
    # Summed in float32, then rounded once.
    exact = layer(_params(layer), st).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rounded(_params(layer), st), exact)


# ------------------------------------------------------------------ rows to pull


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("fill", [3, -2, 4, 99, -1]),
        ("zero", [3, -1, -1, -1, -1]),
        ("clip", [3, 0, 3, 3, -1]),
    ],
)
def test_all_layers_agree_on_row_ids(mode, want):
    ids = np.array([3, -1, 4, 99, 2])
    options: Any = dict(mode=mode, padding_id=2)
    bag = sj.nn.EmbeddingBag(4, 2, **options)
    for layer in (
        sj.nn.Embedding(4, 2, **options),
        sj.nn.SparseEmbedding(4, 2, name="embedding", **options),
        bag,
    ):
        assert layer.row_ids(ids)["embedding"].tolist() == want
        traced = jax.jit(layer.row_ids)(jnp.asarray(ids))
        assert traced["embedding"].tolist() == want
    segment_ids = jnp.array([0, 0, 0, 0, 9])  # the last element is in no row
    matrix: Any = sj.SegmentTensor(jnp.asarray(ids), segment_ids, 3)
    assert sj.nn.Dense(1, 4, mode=mode).row_ids(matrix)["kernel"].tolist() == want
    weighted = matrix.map(lambda ids: {"index": ids, "value": jnp.ones(5)})
    assert bag.row_ids(weighted)["embedding"].tolist() == want
    # In a stack, an id out of range must not be a row of the next table.
    both = sj.nn.EmbeddingCollection({"a": bag, "b": (5, 2)})
    found = both.row_ids({"a": jnp.asarray(ids)[None]})["stack_width2_float32"]
    assert found.tolist() == [-2 if x < -1 or x > 3 else x for x in want]


def test_row_ids_of_other_types():
    layer, ids = sj.nn.Embedding(4, 2), np.array([3, 2])
    huge = np.array([2**64 - 1, 3], np.uint64)
    assert layer.row_ids(huge)["embedding"].tolist() == [2**63 - 1, 3]
    # All ids fine: as given, without a copy.
    assert layer.row_ids(ids)["embedding"] is ids


# ------------------------------------------------------------------ as values


def test_layers_are_static():
    ones = jax.nn.initializers.ones
    zero: Any = np.int64(0)
    call = jax.jit(lambda layer, p, x: layer(p, x), static_argnums=0)
    bag, dense = functools.partial(sj.nn.EmbeddingBag, V, D), sj.nn.Dense
    for layer, same, other, x in (
        (bag(padding_id=zero, param_dtype="float32"), bag(padding_id=0), bag(), IDS),
        (bag(embedding_init=ones), bag(embedding_init=ones), bag(), IDS),
        (LAYER, dataclasses.replace(LAYER), sj.nn.Embedding(V, D), IDS),
        (
            dense(3, V, param_dtype=jnp.float32),
            dense(3, V),
            dense(3, V, use_bias=False),
            jnp.ones((2, V)),
        ),
    ):
        assert layer == same != other and hash(layer) == hash(same)
        assert call(layer, _params(layer), x).shape[-1] == 3
    layer = bag(combiner="mean", dtype="bfloat16", mode="raise", embedding_init=ones)
    shown = "dtype=bfloat16, mode='error', embedding_init=ones, combiner='mean'"
    assert repr(layer) == f"EmbeddingBag(211, 3, {shown})"
    assert dataclasses.replace(layer, features=2).embedding_init == ones
    assert repr(dense(3, dtype="bfloat16")) == "Dense(3, dtype=bfloat16)"


def test_init():
    table = _params(sj.nn.Embedding(2000, 64))["embedding"]
    assert abs(float(jnp.mean(jnp.sum(table * table, axis=1))) - 1) < 0.02
    two, key = jax.random.split(jax.random.key(0)), jax.random.PRNGKey(3)
    for layer in (LAYER, BAG):  # keys of any kind
        assert jax.vmap(layer.init)(two)["embedding"].shape == (2, V, D)
        assert layer.init(key)["embedding"].shape == (V, D)
    spec: Any = jax.ShapeDtypeStruct((4, 9), jnp.float32)
    for x, columns in ((jnp.ones((4, 9)), 9), (MATRIX, V), (spec, 9)):
        assert sj.nn.Dense(2).init(key, x)["kernel"].shape == (columns, 2)
