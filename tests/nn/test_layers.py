"""Embedding, EmbeddingBag and Dense, against plain jnp on the table."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental.sparse import BCSR
from jax.test_util import check_grads

import sparsejax as sj
from helpers import assert_no_dense, assert_trees_close, to_dense


sparse = pytest.importorskip("scipy.sparse")

V, D = 211, 3  # a prime that nothing else is
S, CAPACITY = 5, 24
IDS = jnp.array([[3, 7, -1], [V, 3, 5], [V - 1, 0, 7]])
NORMAL = jax.nn.initializers.normal(1.0)
LAYER = sj.nn.Embedding(V, D, padding_id=-1, mode="zero")
BAG = sj.nn.EmbeddingBag(V, D, padding_id=-1, mode="zero", combiner="mean")
DENSE = sj.nn.Dense(D, V, bias_init=NORMAL)


def _scipy(dtype: Any = np.float32):
    return sparse.random(S, V, 0.015, "csr", dtype, np.random.default_rng(0))


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


def _forms(matrix):
    bcsr = BCSR.from_scipy_sparse(matrix)
    return {
        "scipy": matrix,
        "bcsr": bcsr,
        "segments": _segments(matrix),
        "unsorted": _segments(matrix, is_sorted=False),
        "array": jnp.asarray(matrix.toarray()),
    }


@functools.cache
def _params(layer):
    spec: Any = jax.ShapeDtypeStruct((1, V), jnp.float32)
    inputs = (spec,) if isinstance(layer, sj.nn.Dense) else ()
    return jax.jit(lambda key: layer.init(key, *inputs))(jax.random.key(0))


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
    return x @ params["kernel"] + params.get("bias", jnp.zeros(()))


MATRIX = _scipy()
CSR = _segments(MATRIX, is_sorted=False)
# The layer, its inputs and how many of them there are, and the function of arrays.
CASES = {
    "embedding": (LAYER, IDS, IDS.size, _plain),
    "bag": (BAG, IDS, IDS.size, _plain_mean),
    "dense": (DENSE, CSR, CAPACITY, lambda p, x: _plain_dense(p, MATRIX.toarray())),
}


def _required(layer):
    return dataclasses.replace(layer, sparse_grad=True).table_prefix()


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("loose_promotion")  # of the plain function
def test_gradient_is_that_of_plain_jnp(name):
    layer, inputs, count, plain = CASES[name]
    params, tables = _params(layer), _required(layer)
    loss = lambda params, x: jnp.sum(jnp.sin(layer(params, x)))
    oracle = lambda params: jnp.sum(jnp.sin(plain(params, inputs)))
    required = sj.grad(loss, tables=tables)
    assert_no_dense(required, params, inputs)
    two = jax.tree.map(lambda x: np.stack([x, x]), inputs)

    def scanned(params):
        add = lambda total, x: (total + loss(params, x), None)
        return jax.lax.scan(add, jnp.zeros(()), two)[0]

    @jax.jit
    def run(params, inputs, two):
        g = required(params, inputs)
        assert [x.capacity for key, x in g.items() if key != "bias"] == [count]
        mapped = jax.vmap(lambda x: to_dense(required(params, x)))(two)
        halves = [jax.tree.map(lambda x, k=k: x[k], mapped) for k in range(2)]
        found = to_dense(g), jax.grad(loss)(params, inputs), *halves
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
@pytest.mark.parametrize("name", CASES)
def test_sparse_grad_false_is_dense_always(name):
    layer, inputs, *_ = CASES[name]
    layer = dataclasses.replace(layer, sparse_grad=False)
    assert set(layer.table_prefix().values()) == {False}
    params = _params(layer)
    loss = lambda p: jnp.sum(jnp.sin(layer(p, inputs)))
    two = jax.tree.map(lambda x: np.stack([x, x]), params)

    @jax.jit
    def run(params, two):
        grads = sj.grad(loss)(params), jax.grad(loss)(params)
        return *grads, jax.vmap(jax.grad(loss))(two)

    g, want, mapped = run(params, two)
    assert not any(isinstance(x, sj.SelectedRows) for x in g.values())
    assert_trees_close(g, want)
    assert_trees_close(jax.tree.map(lambda x: x[1], mapped), want)
    with pytest.raises(sj.DensifyError, match="dense_gradient"):
        sj.grad(loss, tables=_required(layer))(params)
    # Nothing of it is left when it is compiled.
    lowered = jax.jit(layer).lower(params, inputs).compile()
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
def test_numerical_gradients(x64):
    matrix = _scipy(np.float64)
    st = _segments(matrix)

    def loss(layer, params, value):
        x = sj.SegmentTensor({**st.values, "value": value}, st.segment_ids, S, True)
        return jnp.sum(jnp.sin(layer(params, x)))

    value = jnp.where(jnp.isnan(st.values["value"]), 0, st.values["value"])
    layer = dataclasses.replace(DENSE, param_dtype="float64")
    f = lambda *args: loss(layer, *args)
    check_grads(jax.jit(f), (_params(layer), value), 1, ["fwd", "rev"])


# ------------------------------------------------------------------ Embedding, bags


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


def test_keys_of_any_kind():
    two = jax.random.split(jax.random.key(0))
    for layer in (LAYER, BAG):
        both = jax.vmap(layer.init)(two)["embedding"]
        old = layer.init(jax.random.PRNGKey(3))["embedding"]
        assert both.shape == (2, V, D) and old.shape == (V, D)


# ------------------------------------------------------------------ Dense


@pytest.mark.slow
@pytest.mark.parametrize("layer", [DENSE, sj.nn.Dense(1, use_bias=False)])
@pytest.mark.usefixtures("loose_promotion")  # of the plain function
def test_every_form_of_input(layer):
    params, forms = _params(layer), _forms(MATRIX)
    want = _plain_dense(params, jnp.asarray(MATRIX.toarray()))
    outs = {"scipy": layer(params, forms.pop("scipy"))}
    call = lambda params, forms: {k: layer(params, x) for k, x in forms.items()}
    outs |= jax.jit(call)(params, forms)
    for form, out in outs.items():
        assert out.dtype == jnp.float32, form
        np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5, err_msg=form)


@pytest.mark.slow
def test_ids_alone_count_one():
    ones, st, params = _scipy(), _segments(_scipy()), _params(DENSE)
    ids = sj.SegmentTensor(st.values["index"], st.segment_ids, S, True)
    ones.data[:] = 1
    np.testing.assert_allclose(
        DENSE(params, ids), DENSE(params, ones), rtol=1e-5, atol=1e-5
    )


def test_leading_axes():
    x = jax.random.normal(jax.random.key(1), (2, 3, V))
    out, one = DENSE(_params(DENSE), x), DENSE(_params(DENSE), x[1, 2])
    assert out.shape == (2, 3, D)
    np.testing.assert_allclose(out[1, 2], one, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_types_of_results(x64):
    matrix = MATRIX
    st, kinds = _segments(matrix), jax.ShapeDtypeStruct
    layer = sj.nn.Dense(2, V, dtype="bfloat16")
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
    small = sj.nn.Dense(2, V, param_dtype="bfloat16")
    params = jax.eval_shape(small.init, jax.random.key(0))
    assert params["kernel"].dtype == params["bias"].dtype == jnp.bfloat16
    for layer, x, dtype in (
        (small, kinds((1, V), jnp.bfloat16), jnp.bfloat16),
        (small, st, jnp.float32),  # the common type
        (sj.nn.Dense(2, V), counts, jnp.float32),
        (sj.nn.Dense(2, V), kinds((2, V), jnp.int64), jnp.float32),
    ):
        params = jax.eval_shape(layer.init, jax.random.key(0))
        assert jax.eval_shape(layer, params, x).dtype == dtype


def test_columns_come_from_the_input():
    layer, key = sj.nn.Dense(2), jax.random.key(0)
    spec: Any = jax.ShapeDtypeStruct((4, 9), jnp.float32)
    for x, columns in ((jnp.ones((4, 9)), 9), (MATRIX, V), (spec, 9)):
        assert layer.init(key, x)["kernel"].shape == (columns, 2)


# ------------------------------------------------------------------ rows to pull


NEGATIVE = np.array([3, -1, 4, 99, 2])


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("fill", [3, -2, 4, 99, -1]),
        ("zero", [3, -1, -1, -1, -1]),
        ("clip", [3, 0, 3, 3, -1]),
    ],
)
def test_all_layers_agree_on_negative_ids(mode, want):
    options: Any = dict(mode=mode, padding_id=2)
    for layer in (
        sj.nn.Embedding(4, 2, **options),
        sj.nn.EmbeddingBag(4, 2, **options),
        sj.nn.SparseEmbedding(4, 2, name="embedding", **options),
    ):
        assert layer.row_ids(NEGATIVE)["embedding"].tolist() == want
        traced = jax.jit(layer.row_ids)(jnp.asarray(NEGATIVE))
        assert traced["embedding"].tolist() == want
    matrix = sj.SegmentTensor(jnp.asarray(NEGATIVE), jnp.array([0, 0, 0, 0, 9]), 3)
    assert sj.nn.Dense(1, 4, mode=mode).row_ids(matrix)["kernel"].tolist() == want
    # In a stack, an id out of range must not be a row of the next table.
    table = sj.nn.Embedding(4, 2, mode=mode, padding_id=2)
    both = sj.nn.EmbeddingCollection({"a": table, "b": (5, 2)}, {"a": "a", "b": "b"})
    found = both.row_ids({"a": jnp.asarray(NEGATIVE)})["stack_width2_float32"].tolist()
    assert found == [-2 if x < -1 or x > 3 else x for x in want]


def test_bags_of_weighted_ids_and_of_a_collection():
    elements = {"index": jnp.array([3, 1, 0]), "value": jnp.ones(3)}
    bags = sj.SegmentTensor(elements, jnp.array([0, 1, 2]), 2)
    bag = sj.nn.EmbeddingBag(4, 2, mode="zero")
    assert bag.row_ids(bags)["embedding"].tolist() == [3, 1, -1]
    ids = {"a": jnp.array([[3, 4], [-1, 0]])}
    rows = sj.nn.EmbeddingCollection({"a": bag}).row_ids(ids)
    assert rows["stack_width2_float32"].tolist() == [3, -1, -1, 0]


def test_ids_of_other_types():
    layer = sj.nn.Embedding(4, 2)
    huge = np.array([2**64 - 1, 3], np.uint64)
    assert layer.row_ids(huge)["embedding"].tolist() == [2**63 - 1, 3]
    # All ids fine: as given, without a copy.
    assert layer.row_ids(NEGATIVE[:1])["embedding"].base is NEGATIVE


@pytest.mark.parametrize("mode", ["drop", "fill", "clip", "zero"])
def test_pulling_row_ids_is_as_good_as_the_kernel(mode):
    """Dense on the rows that `row_ids` lists, against the whole kernel."""
    layer = sj.nn.Dense(2, 4, mode=mode, use_bias=False)
    kernel = jnp.arange(1.0, 9.0).reshape(4, 2)
    elements = {"index": jnp.array([3, 0, 7]), "value": jnp.array([1.0, 2.0, 3.0])}
    x = sj.SegmentTensor(elements, jnp.array([0, 1, 1]), 2)
    rows = np.unique(layer.row_ids(x)["kernel"])
    rows = rows[(rows >= 0) & (rows < 4)]
    pulled = sj.SelectedRows(jnp.asarray(rows), kernel[rows], 4)
    want = layer({"kernel": kernel}, x)
    np.testing.assert_array_equal(layer({"kernel": pulled}, x), want)
    second = {"drop": 2, "zero": 2, "fill": np.nan, "clip": 2 + 3 * 7}[mode]
    np.testing.assert_array_equal(want[:, 0], [7, second])


def test_blocks_are_layers_that_know_their_names():
    item = sj.nn.SparseEmbedding(5, 2, name="item")
    words = sj.nn.SparseLinear(1, 4, name="words")
    key = jax.random.key(0)
    assert isinstance(item, sj.nn.Embedding) and isinstance(words, sj.nn.Dense)
    assert item.init(key) == {} and words.init(key).keys() == {"bias"}
    assert item.table_prefix() == {} and words.table_prefix() == {"bias": False}


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
    for layer in (sj.nn.Dense(3, V), sj.nn.Dense(3, V, param_dtype=jnp.float32)):
        assert layer == sj.nn.Dense(3, V) != sj.nn.Dense(3, V, use_bias=False)
        assert hash(layer) == hash(sj.nn.Dense(3, V))
    f = jax.jit(lambda layer, params, x: layer(params, x), static_argnums=0)
    assert f(layer, layer.init(jax.random.key(0)), jnp.ones((2, V))).shape == (2, 3)
    assert repr(sj.nn.Dense(3, dtype="bfloat16")) == "Dense(3, dtype=bfloat16)"
