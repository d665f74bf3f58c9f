"""`row_ids` of the layers: one meaning of negative ids, and the rows of a call."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj


IDS = np.array([3, -1, 4, 99, 2])


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
        assert layer.row_ids(IDS)["embedding"].tolist() == want
        traced = jax.jit(layer.row_ids)(jnp.asarray(IDS))
        assert traced["embedding"].tolist() == want
    matrix = sj.SegmentTensor(jnp.asarray(IDS), jnp.array([0, 0, 0, 0, 9]), 3)
    assert sj.nn.Dense(1, 4, mode=mode).row_ids(matrix)["kernel"].tolist() == want
    # In a stack, an id out of range must not be a row of the next table.
    table = sj.nn.Embedding(4, 2, mode=mode, padding_id=2)
    both = sj.nn.EmbeddingCollection({"a": table, "b": (5, 2)}, {"a": "a", "b": "b"})
    found = both.row_ids({"a": jnp.asarray(IDS)})["stack_width2_float32"].tolist()
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
    assert layer.row_ids(IDS[:1])["embedding"].base is IDS


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
