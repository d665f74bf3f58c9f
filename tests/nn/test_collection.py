"""EmbeddingCollection, against one lookup or bag for each feature."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import sparsejax as sj
from helpers import assert_no_dense, assert_trees_close, eqns_of


B, D = 4, 3
Bag, Embedding = sj.nn.EmbeddingBag, sj.nn.Embedding
# Padding and modes differ, and the stack has a prime number of rows.
TABLES = {
    "user": (101, D),
    "flag": Bag(2, D, mode="zero"),
    "item": Bag(307, D, combiner="mean", padding_id=-1, mode="zero"),
    "shop": Bag(43, D, mode="clip", padding_id=0),
    "word": Embedding(146, D, padding_id=5),
}
FEATURES = {
    "user": "user",
    "flag": "flag",
    "clicked": "item",
    "bought": "item",
    "seen": ("item", "max"),
    "wished": ("item", "none"),
    "shop": "shop",
    "words": "word",
}
STACK = f"stack_width{D}_float32"
HEIGHT = sum((101, 2, 307, 43, 146))
LAYER = sj.nn.EmbeddingCollection(TABLES, FEATURES)


@pytest.fixture(scope="module")
def params():
    return jax.jit(LAYER.init)(jax.random.key(0))


def _segments(values, segment_ids, is_sorted=True):
    return sj.SegmentTensor(jnp.array(values), jnp.array(segment_ids), B, is_sorted)


def _ids() -> dict[str, Any]:
    """Every form, with padding, empty slots and ids of the neighbour's rows."""
    return {
        "user": jnp.array([0, 100, 7, 7]),
        "flag": jnp.array([0, 1, 2, -1]),
        "clicked": jnp.array([[3, 9, -1], [306, -1, -1], [-1, -1, -1], [307, 3, -2]]),
        "bought": _segments([3, 306, 400, -7, 5], [0, 0, 1, 4, 4]),
        "seen": _segments([1, 5, 3, 2], [2, 0, 2, 4], is_sorted=False),
        "wished": jnp.array([[[3, -1]], [[307, 9]], [[0, 0]], [[1, 2]]]),
        "shop": jnp.array([[42, 43], [0, 0], [1, 0], [-3, 99]]),
        "words": _segments([1, 5, 145, 9999], [0, 0, 3, 4]),
    }


def _one_by_one(tables, ids, weights=None):
    """The reference: each feature is read by itself from its own table."""
    out, weights = {}, weights or {}
    reads = {name: read for name, *read in LAYER.features}
    for name, x in ids.items():
        table, combiner = reads[name]
        layer = dict(LAYER.tables)[table]
        options: Any = dict(mode=layer.mode, padding_id=layer.padding_id)
        rows, w = tables[table], weights.get(name)
        if isinstance(x, sj.SegmentTensor) and combiner == "none":
            out[name] = Embedding(*rows.shape, **options)({"embedding": rows}, x)
        elif combiner == "none":
            out[name] = sj.lookup(rows, x, **options)  # pyright: ignore[reportArgumentType]
        else:
            if isinstance(x, jax.Array) and x.ndim == 1:
                x, w = x[:, None], None if w is None else w[:, None]
            options |= dict(combiner=combiner, weights=w)
            out[name] = sj.embedding_bag(rows, x, **options)
    return out


def _loss(out):
    leaves = jax.tree.leaves({k: getattr(v, "values", v) for k, v in out.items()})
    return sum(jnp.sum(jnp.sin(jnp.nan_to_num(x))) for x in leaves)


APART = dataclasses.replace(LAYER, stacked=False)


# ------------------------------------------------------------------ values


def test_each_feature_is_read_from_its_own_table(params):
    """Also if the tables are arrays of their own; some features alone, with weights."""
    assert {k: v.shape for k, v in params.items()} == {STACK: (HEIGHT, D)}
    ids, rng = _ids(), np.random.default_rng(1)
    few = {name: ids[name] for name in ("user", "flag", "clicked", "bought")}
    draw = lambda x: rng.random(getattr(x, "values", x).shape, np.float32)
    weights = {name: draw(x) for name, x in few.items()}
    weights["bought"][4] = np.nan  # of an empty slot
    pairs = {"index": few["bought"].values, "value": weights["bought"]}
    both = {"bought": sj.SegmentTensor(pairs, few["bought"].segment_ids, B, True)}
    loss = lambda w: _loss(LAYER(params, few, {**weights, "clicked": w}))
    plain = lambda w: _loss(
        _one_by_one(LAYER.unstack(params), few, {**weights, "clicked": w})
    )

    @jax.jit
    def run(params, ids, few, both, weights):
        tables = LAYER.unstack(params)
        want, weighted = _one_by_one(tables, ids), _one_by_one(tables, few, weights)
        return [
            (LAYER(params, ids), want),
            (APART(tables, ids), want),
            (LAYER(params, few), {name: want[name] for name in few}),
            (LAYER(params, few, weights), weighted),
            (LAYER(params, both)["bought"], weighted["bought"]),
            tuple(jax.grad(f)(weights["clicked"]) for f in (loss, plain)),
        ]

    for out, want in run(params, ids, few, both, weights):
        assert_trees_close(out, want)
    assert LAYER(params, {}) == {}


@pytest.mark.slow
def test_an_id_never_reads_the_neighbour():
    layer = sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)})
    params = {"stack_width2_float32": jnp.arange(24.0).reshape(12, 2)}
    wide = np.array([4, 5, 2**40, -(2**40)])
    small = jnp.array([4, 5, 255], jnp.uint8)
    empty = {"a": jnp.zeros((2, 0), int), "b": jnp.zeros((0,), int)}

    @jax.jit
    def read(ids, small, empty):
        both = [layer(params, {"a": x, "b": x}) for x in (ids, wide)]
        return both, layer(params, {"a": small}), layer(params, empty)

    both, of_small, of_empty = read(jnp.array([4, 5, 6, -1]), small, empty)
    for out in jax.tree.map(np.asarray, both):
        assert np.isnan(out["a"]).all(axis=1).tolist() == [False, True, True, True]
        assert out["b"][0].tolist() == [18.0, 19.0]
        assert np.isnan(out["b"][3]).all()
    assert np.isnan(of_small["a"]).all(axis=1).tolist() == [0, 1, 1]
    np.testing.assert_array_equal(of_empty["a"], np.zeros((2, 2)))
    assert of_empty["b"].shape == (0, 2)
    a = Embedding(5, 2, mode="error", padding_id=-1)
    strict = sj.nn.EmbeddingCollection({"a": a, "b": (7, 2)})
    call = jax.jit(checkify.checkify(lambda ids: strict(params, {"a": ids})["a"]))
    assert call(jnp.array([4, -1]))[0].get() is None
    assert "the table has 5 rows" in str(call(jnp.array([4, 5]))[0].get())


def test_as_few_gathers_as_shapes_allow(params):
    def reads(f, params, ids, heights):
        eqns = [e for e in eqns_of(f, params, ids) if e.invars]
        shapes = [(e, getattr(e.invars[0].aval, "shape", ())) for e in eqns]
        names = [e.primitive.name for e, shape in shapes if shape[:1] in heights]
        return sum(name in ("gather", "bag_sum") for name in names)

    single = {name: jnp.arange(B) for name in FEATURES if name != "seen"}
    assert reads(LAYER, params, single, [(HEIGHT,)]) == 1
    # Rows and single ids; bags of 3 of the mean; ragged ones; a maximum; bags of 2.
    assert reads(LAYER, params, _ids(), [(HEIGHT,)]) == 5
    heights = [(table.num_embeddings,) for _, table in LAYER.tables]
    assert reads(APART, LAYER.unstack(params), _ids(), heights) == len(FEATURES)


@pytest.mark.slow
def test_groups_of_width_and_type():
    layer = sj.nn.EmbeddingCollection(
        {
            "a": Embedding(5, 2, dtype="float32", param_dtype="bfloat16"),
            "b": Embedding(7, 2, param_dtype="bfloat16", max_norm=0.5),
            "c": Embedding(9, 3, sparse_grad=False),
            "d": Embedding(4, 3),
        }
    )
    params = jax.jit(layer.init)(jax.random.key(0))
    assert {name: x.shape for name, x in params.items()} == {
        "stack_width2_bfloat16": (12, 2),
        "stack_width3_float32_dense": (9, 3),
        "stack_width3_float32": (4, 3),
    }
    sparse = {name: not name.endswith("dense") for name in params}
    assert layer.table_prefix() == sparse
    ids = {name: np.array([[1], [3]]) for name in "abcd"}
    out = jax.jit(layer)(params, ids)
    types = {name: x.dtype.name for name, x in out.items()}
    assert types == {"a": "float32", "b": "bfloat16", "c": "float32", "d": "float32"}
    norms = np.linalg.norm(np.asarray(out["b"], np.float32), axis=-1)
    assert np.all(norms <= 0.51)
    loss = lambda p: _loss({k: v.astype(jnp.float32) for k, v in layer(p, ids).items()})
    g = jax.eval_shape(sj.grad(loss, tables=sj.nn.tables(layer)), params)
    assert {name: isinstance(x, sj.SelectedRows) for name, x in g.items()} == sparse


# ------------------------------------------------------------------ gradients


@pytest.mark.slow
def test_gradient_is_that_of_the_tables_one_by_one(params):
    ids = _ids()
    loss = lambda params, ids: _loss(LAYER(params, ids))
    plain = lambda tables, ids: _loss(_one_by_one(tables, ids))
    two = jax.tree.map(lambda x: np.stack([x, x]), ids)
    assert_no_dense(sj.grad(loss), params, ids, heights=[HEIGHT])

    def scanned(params):
        add = lambda total, ids: (total + loss(params, ids), None)
        return jax.lax.scan(add, jnp.zeros(()), two)[0]

    @jax.jit
    def run(params, ids, two):
        g, in_scan = sj.grad(loss)(params, ids), sj.grad(scanned)(params)[STACK]
        # Two of two flags are read, but it is the stack that counts.
        assert isinstance(g[STACK], sj.SelectedRows)
        assert isinstance(in_scan, sj.SelectedRows)
        parts = {k: v.to_dense() for k, v in LAYER.unstack(g).items()}
        want = jax.grad(plain)(LAYER.unstack(params), ids)
        over = jax.vmap(lambda ids: sj.grad(loss)(params, ids)[STACK].to_dense())
        found = g[STACK].to_dense(), over(two)[1], in_scan.to_dense()
        return parts, want, found, jax.grad(loss)(params, ids)[STACK]

    parts, want, found, of_jax = run(params, ids, two)
    assert_trees_close(parts, want, rtol=1e-4, atol=1e-6)
    want = of_jax, of_jax, 2 * of_jax
    for pair in zip(found, want, strict=True):
        assert_trees_close(*pair, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_stacks_that_were_pulled(params):
    ids = _ids()
    named = jax.jit(LAYER.row_ids)(ids)
    assert named.keys() == {STACK}
    rows = np.unique(np.where(named[STACK] < 0, HEIGHT, named[STACK]))
    rows = np.append(rows, np.full(40 - rows.size, HEIGHT, rows.dtype))
    values = np.append(params[STACK], np.zeros((1, D), np.float32), axis=0)[rows]
    pulled = {STACK: sj.SelectedRows(rows, values, HEIGHT)}

    @jax.jit
    def run(pulled, params):
        g = sj.grad(lambda p: _loss(LAYER(p, ids)))(pulled)[STACK]
        return LAYER(pulled, ids), LAYER(params, ids), g

    got, want, g = run(pulled, params)
    assert_trees_close(got, want)
    np.testing.assert_array_equal(g.rows, rows)


# ------------------------------------------------------------------ one table


def test_tables_one_by_one(params):
    tables = LAYER.unstack(params)
    assert_trees_close(LAYER.stack(tables), params)
    new = jnp.full((2, D), 9.0)
    changed = LAYER.unstack(LAYER.set_table(params, "flag", new))
    assert_trees_close(changed, {**tables, "flag": new})
    # Each is drawn by its own layer.
    ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
    tables = {"a": Bag(5, 2, embedding_init=ones), "b": Bag(7, 2, embedding_init=zeros)}
    layer = sj.nn.EmbeddingCollection(tables | {"c": (6, 2)})
    tables = layer.unstack(jax.jit(layer.init)(jax.random.key(0)))
    assert np.all(tables["a"] == 1) and np.all(tables["b"] == 0)
    assert np.unique(tables["c"]).size == 12


def test_a_collection_is_static():
    same = sj.nn.EmbeddingCollection(dict(TABLES), dict(FEATURES))
    assert LAYER == same and hash(LAYER) == hash(same)
    assert LAYER != APART and dataclasses.replace(APART, stacked=True) == LAYER
    small = sj.nn.EmbeddingCollection({"a": (5, 2)}, {"x": ("a", "max")})
    shown = "{'a': EmbeddingBag(5, 2)}, {'x': ('a', 'max')}"
    assert repr(small) == f"EmbeddingCollection({shown})"
    f = jax.jit(lambda layer, p, ids: layer(p, ids), static_argnums=0)
    out = f(small, small.init(jax.random.key(0)), {"x": jnp.array([1])})
    assert out["x"].shape == (1, 2)
