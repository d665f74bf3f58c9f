"""SparseBlock, SparseEmbedding, SparseLinear: rows pulled, values read, and errors.

The oracle is the same block on whole tables, as arrays, with `jax.grad`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from jax.experimental import checkify
from jax.experimental.sparse import BCSR

import sparsejax as sj
from helpers import assert_trees_close
from sparsejax.nn import PulledTables, SparseBlock, SparseEmbedding, SparseLinear


V, D = 11, 3
KEY = jax.random.key(0)


def table(rows=V, columns=D):
    values = np.random.default_rng(0).integers(-8, 9, (rows, columns)) / 4
    return jnp.asarray(values, jnp.float32)


def pull(block, inputs, whole, capacity=8):
    """The rows of `row_ids` as a store pulls them: sorted, then empty slots of NaN."""
    pulled = {}
    for name, ids in block.row_ids(inputs).items():
        weights = np.asarray(whole[name])
        ids = np.unique(np.asarray(ids))
        ids = ids[(ids >= 0) & (ids < len(weights))]
        rows = np.full(capacity, len(weights), np.int32)
        rows[: len(ids)] = ids
        values = np.full((capacity, weights.shape[1]), np.nan, np.float32)
        values[: len(ids)] = weights[ids]
        pulled[name] = sj.SelectedRows(rows, jnp.asarray(values), len(weights))
    return pulled


RAGGED = sj.SegmentTensor(jnp.array([7, 2, 99, 7]), jnp.array([0, 0, 3, 1]), 3)
MATRIX = sp.csr_matrix(np.array([[0, 2, 0, 1], [0] * 4, [3, 0, 0, -1.0]], np.float32))
ELEMENTS = {"index": jnp.array([3, 0, 1, 77]), "value": jnp.array([1.0, 2, 3, jnp.nan])}
GARBAGE = sj.SegmentTensor(ELEMENTS, jnp.array([1, 0, 1, 2]), 2)

embedding = functools.partial(SparseEmbedding, V, D, name="t")
linear = functools.partial(SparseLinear, D, 4, name="t")
# A block, its inputs, and the rows that it lists.
CASES: dict[str, Any] = {
    "ids": (embedding(), np.array([[4, 0], [10, 1]], np.uint8), [[4, 0], [10, 1]]),
    "padding": (embedding(padding_id=4), np.array([4, 0, 4]), [-1, 0, -1]),
    "max_norm": (embedding(max_norm=1.0), np.array([4, 0, 4], np.int8), [4, 0, 4]),
    "ragged": (embedding(mode="error"), RAGGED, [7, 2, -1, 7]),
    "scipy": (linear(), MATRIX, [1, 3, 0, 3]),
    "bcsr": (linear(use_bias=False), BCSR.from_scipy_sparse(MATRIX), [1, 3, 0, 3]),
    "segments": (linear(mode="error"), GARBAGE, [3, 0, 1, -1]),
    "columns": (linear(), RAGGED.map(lambda ids: ids % 5), [2, 2, -1, 2]),
}


@pytest.mark.parametrize("name", CASES)
def test_pulled_rows_are_as_good_as_the_table(name):
    block, inputs, listed = CASES[name]
    assert block.row_ids(inputs)["t"].tolist() == listed
    if name != "scipy":
        assert jax.jit(block.row_ids)(inputs)["t"].tolist() == listed
    ((_, spec),) = block.tables().items()
    whole = {"t": table(*spec.shape)}
    params = jax.tree.map(lambda x: x + 1, block.init(KEY))
    pulled = pull(block, inputs, whole)

    def loss(tables, params):
        out = block(tables, params, inputs)
        if isinstance(out, sj.SegmentTensor):
            out = sj.segment_sum(out)
        return jnp.sum(out**2 * jnp.arange(1, out.size + 1.0).reshape(out.shape)), out

    def run(value_and_grad, tables):
        differentiate = value_and_grad(loss, argnums=(0, 1), has_aux=True)
        error, out = jax.jit(checkify.checkify(differentiate))(tables, params)
        error.throw()
        return out

    (_, out), (rows, grads) = run(sj.value_and_grad, pulled)
    (_, want), (dense, want_grads) = run(jax.value_and_grad, whole)
    assert_trees_close((out, grads), (want, want_grads))
    np.testing.assert_array_equal(rows["t"].rows, pulled["t"].rows)
    assert_trees_close(rows["t"].to_dense(), dense["t"])


def test_blocks_are_layers():
    item, words = embedding(padding_id=0), linear()
    assert isinstance(item, sj.nn.Embedding) and isinstance(words, sj.nn.Dense)
    assert item.table_prefix() == {} and words.table_prefix() == {"bias": False}
    assert repr(item) == "SparseEmbedding(11, 3, padding_id=0, name='t')"


@pytest.mark.slow
def test_rows_that_were_not_pulled():
    rows = sj.SelectedRows(jnp.array([1, 11, 3]), jnp.ones((3, D)), V)
    out = embedding()({"t": rows}, {}, jnp.array([1, 2, 3, 11, -1]))
    assert np.isnan(out).all(axis=1).tolist() == [False, True, False, True, True]
    few = sj.SelectedRows(jnp.array([0, 3]), jnp.ones((2, D)), 4)
    params = linear().init(KEY)
    out = jax.jit(linear())({"t": few}, params, GARBAGE)
    assert np.isnan(out).all(axis=1).tolist() == [False, True]  # of column 1
    for block, rows, inputs in (
        (embedding(mode="error"), rows, jnp.array([1, 2])),
        (linear(mode="error"), few, GARBAGE),
    ):
        f = jax.jit(checkify.checkify(block))
        message = f({"t": rows}, params, inputs)[0].get() or ""
        assert "1 of" in message and "does not store" in message


def test_columns_out_of_range_are_read_by_the_mode():
    # Row 0 is fine, row 1 has columns 4 and -1 beside 0, and the last element is empty.
    values = {
        "index": jnp.array([3, 0, 4, -1, 77]),
        "value": np.arange(1, 6, dtype="f"),
    }
    bad = sj.SegmentTensor(values, jnp.array([0, 1, 1, 1, 3]), 3)
    weights = np.array([[10], [20], [30], [40]], np.float32)
    rows = sj.SelectedRows(jnp.array([0, 3, 4]), weights[[0, 3, 3]], 4)
    make = functools.partial(SparseLinear, 1, 4, name="t", use_bias=False)
    read = lambda mode, table: make(mode=mode)({"t": table}, {}, bad)
    expected = {
        "drop": [40, 20, 0],
        "fill": [40, np.nan, 0],
        "zero": [40, 20, 0],
        "clip": [40, 2 * 10 + 3 * 40 + 4 * 10, 0],
    }
    read_all = jax.jit(lambda x: {mode: read(mode, x)[:, 0] for mode in expected})
    for some in (rows, weights):
        for mode, out in read_all(some).items():
            np.testing.assert_array_equal(out, expected[mode])
    # No row that is read gets NaN in its gradient from one that is not.
    grad = jax.jit(sj.grad(lambda t: jnp.sum(read("zero", t))))(rows)
    np.testing.assert_array_equal(grad.values, [[2], [1], [0]])


# ------------------------------------------------------------------ own blocks


@dataclasses.dataclass(frozen=True)
class Towers(SparseBlock):
    """Two tables, one of them used twice, and ordinary layers."""

    item: SparseEmbedding = SparseEmbedding(V, D, name="item")
    words: SparseLinear = SparseLinear(D, 4, name="words")
    top: sj.nn.Dense = sj.nn.Dense(1, D)
    more: Any = ()

    def row_ids(self, inputs):
        return sj.nn.merge_row_ids(
            self.item.row_ids(inputs["seen"]),
            self.item.row_ids(inputs["next"]),
            self.words.row_ids(inputs["words"]),
        )

    def sparse_forward(self, tables, params, inputs):
        item = functools.partial(self.item, tables, params["item"])
        x = item(inputs["seen"]) * item(inputs["next"])
        x += self.words(tables, params["words"], inputs["words"])
        return self.top(params["top"], x)


INPUTS = {"seen": jnp.array([3, 4]), "next": jnp.array([4, 0]), "words": GARBAGE}


@pytest.mark.slow
def test_a_block_of_blocks():
    block, whole = Towers(), {"item": table(), "words": table(4)}
    shapes = {name: spec.shape for name, spec in block.tables().items()}
    assert shapes == {"item": (V, D), "words": (4, D)}
    params = jax.jit(block.init)(KEY)
    assert params["item"] == {} and params["words"].keys() == {"bias"}
    assert params["top"]["kernel"].shape == (D, 1)
    pulled = pull(block, INPUTS, whole)
    assert pulled["item"].rows.tolist()[:4] == [0, 3, 4, V]
    want = jax.jit(block)(whole, params, INPUTS)
    two = {name: jnp.stack([INPUTS[name]] * 2) for name in ("seen", "next")}

    @jax.jit
    def run(pulled, params):
        batched = jax.vmap(lambda ids: block(pulled, params, INPUTS | ids))(two)
        return block(pulled, params, INPUTS), batched

    found = run(PulledTables(pulled), params)
    assert_trees_close(found, (want, jnp.stack([want, want])))
    assert hash(block) == hash(Towers()) and block == Towers()
    # Only what row_ids lists is pulled.
    some = PulledTables({"item": pulled["item"]})
    for call in (block, block.sparse_forward, jax.jit(block)):
        with pytest.raises(sj.NotPulledError, match="'words'.*Towers.row_ids"):
            call(dict(some), params, INPUTS)
    assert "words" not in some and some.get("words") is None and len(some) == 1
    assert "SelectedRows" in repr(some)


def test_tables_of_fields():
    names = lambda *more: list(Towers(more=more).tables())
    one, two = SparseEmbedding(V, D), SparseEmbedding(V, D)
    assert names(one) == ["item", "words", "embedding"]
    assert names({"a": one}, [one]) == names(one)
    assert names(SparseEmbedding(V, D, name="item")) == ["item", "words"]  # shared
    init = Towers(more=({"a": one, "b": SparseLinear(2, 3)},)).init(KEY)
    assert init["more"][0]["a"] == {} and init["more"][0]["b"]["bias"].shape == (2,)
    with pytest.raises(ValueError, match="'embedding', the default. Give each"):
        names(one, two)


def test_merge_row_ids():
    merge = sj.nn.merge_row_ids
    assert merge({"a": [1]}, {"b": [2]}) == {"a": [1], "b": [2]}
    ids = merge(
        {"a": np.array([[2**60, 3]], np.uint64)}, {"a": jnp.array([3])}, {"a": []}
    )
    assert isinstance(ids["a"], np.ndarray) and ids["a"].tolist() == [2**60, 3, 3]
    joined = jax.jit(lambda x, y: merge({"a": x}, {"a": y}))
    ids = joined(jnp.array([1], jnp.int8), jnp.array([[300]], jnp.int16))["a"]
    assert ids.tolist() == [1, 300]


# ------------------------------------------------------------------ errors


class Bare(SparseBlock):
    """A block whose layer is not a dataclass field, and whose forward is given."""

    def __init__(self, forward: Any = None):
        self.item, self.forward = embedding(), forward

    def row_ids(self, inputs):
        return self.item.row_ids(inputs)

    def sparse_forward(self, tables, params, inputs):
        return self.forward(tables["t"])


def test_a_table_where_an_array_is_needed():
    def other(table):
        raise TypeError("something else")

    whole, ids = {"t": table()}, jnp.array([3, 4])
    pulled = pull(Bare(), ids, whole)
    dot = lambda x: jnp.dot(jnp.ones((2, D)), x)
    # Other reasons are raised as they are.
    for forward, given, said in (
        (dot, pulled, "Bare: a SelectedRows from `tables` was used where"),
        (other, whole, "^something else$"),
        (other, pulled, "^something else$"),
        (lambda t: jnp.dot(jnp.ones(2), t.values), pulled, "^dot_general requires"),
    ):
        with pytest.raises(TypeError, match=said):
            Bare(forward)(given, {}, ids)


def test_layers_that_are_not_dataclass_fields():
    @dataclasses.dataclass(frozen=True)
    class Unannotated(Towers):
        others = [sj.nn.Dense(1, 2)]

    class Overrides(Bare):
        def tables(self):
            return self.item.tables()

    for block, name in ((Bare(), "item"), (Unannotated(), "others")):
        for call in (block.tables, functools.partial(block.init, KEY)):
            with pytest.raises(TypeError, match=f"'{name}' are not dataclass fields"):
                call()
    assert Overrides().tables()["t"].shape == (V, D)
