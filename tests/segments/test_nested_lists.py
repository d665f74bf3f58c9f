"""from_lists, to_lists and repr: segments as Python's lists, and as text."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from helpers import assert_trees_close


make = sj.SegmentTensor

ints = st.integers(-(2**31), 2**31 - 1)
floats = st.floats(width=32, allow_nan=False)
flags = st.booleans()


def nested(elements, depth):
    for _ in range(depth):
        elements = st.lists(elements, max_size=4)
    return elements


def depth_of(x):
    """The depth of a list, by its elements."""
    return 1 + max(map(depth_of, x), default=0) if isinstance(x, list) else 0


# ------------------------------------------------------------------ there and back


@hypothesis.given(
    st.one_of(*(nested(e, d) for e in (ints, floats, flags) for d in (2, 3, 4)))
)
@hypothesis.settings(max_examples=60)
def test_round_trip(lists):
    x = make.from_lists(lists)
    assert x.num_segments == len(lists)
    assert x.lengths.tolist() == [len(s) for s in lists]
    assert x.to_lists() == lists
    inner, depth = x, 1
    while isinstance(inner, sj.SegmentTensor):
        inner, depth = inner.values, depth + 1
    # If no list has an element, the depth is the depth of the lists.
    assert depth == max(depth_of(lists), 2)
    assert_trees_close(make.from_lists(x.to_lists()), x)
    roomy = make.from_lists(lists, capacity=(30, None, 70))
    assert roomy.capacity == 30 and roomy.to_lists() == lists


@pytest.mark.slow
@hypothesis.given(
    st.lists(
        st.dictionaries(st.integers(-5, 5), st.lists(ints, max_size=3), max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_maps(maps):
    hypothesis.assume(any(maps))
    x = make.from_lists(maps)
    want = {
        "key": [list(m) for m in maps],
        "ids": [list(m.values()) for m in maps],
    }
    assert x.to_lists() == want
    assert_trees_close(make.from_lists(want), x)


def test_maps_of_numbers_and_maps_inside():
    """`{1: 0.4, 3: 0.7}` of Caffe2's document: ids and a score for each."""
    x = make.from_lists([{1: 0.4, 3: 0.7}, {}, {2: 0.5}])
    assert x.values["key"].dtype == jnp.int32
    assert x.to_lists()["key"] == [[1, 3], [], [2]]
    assert_trees_close(x.values["value"], jnp.array([0.4, 0.7, 0.5]))
    x = make.from_lists([[{1: [5]}, {}], [{2: [], 3: [6, 7]}]])
    keys, ids = [[[1], []], [[2, 3]]], [[[[5]], []], [[[], [6, 7]]]]
    assert x.to_lists() == {"key": keys, "ids": ids}


def test_a_segment_may_be_an_array():
    rows, none = np.ones((2, 3), np.float32), np.zeros((0, 3), np.float32)
    for given, want in (
        (
            [np.array([1, 2]), [], jnp.array([9]), np.zeros(0, int)],
            [[1, 2], [], [9], []],
        ),
        (np.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
        ([[np.array([1, 2]), np.array([3])], [np.array([4])]], [[[1, 2], [3]], [[4]]]),
        # An element may be a scalar of NumPy's or JAX's.
        ([[np.int8(3), jnp.int32(4)], [5]], [[3, 4], [5]]),
        ([(1, 2), (3,)], [[1, 2], [3]]),
        # Rows of an array are elements, and not looked into.
        ([rows, none], [[[1, 1, 1], [1, 1, 1]], []]),
    ):
        assert make.from_lists(given).to_lists() == want
    assert make.from_lists([rows, none]).values.shape == (2, 3)


def test_types():
    for lists, dtype in [
        ([[1], []], jnp.int32),
        ([[], []], jnp.int32),
        ([[1, 2.5]], jnp.float32),
        ([[True]], jnp.bool_),
        ([np.array([1.0])], jnp.float32),
        ([np.array([1], np.uint8), []], jnp.uint8),
    ]:
        assert make.from_lists(lists).values.dtype == dtype
    for dtype in jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint32:
        x = make.from_lists([[1, 2], [3]], dtype=dtype)
        assert x.values.dtype == dtype and x.to_lists() == [[1, 2], [3]]
    x = make.from_lists([[2**32 - 1]], dtype=jnp.uint32)
    assert x.to_lists() == [[2**32 - 1]]
    x = make.from_lists([{1: [2]}, {3: [4]}], dtype=jnp.float32)
    assert x.values["key"].dtype == jnp.int32
    assert x.values["ids"].values.dtype == jnp.float32


# ------------------------------------------------------------------ as text


def test_repr():
    many = make.from_lengths(np.arange(200), [20] * 10)
    deep = make.from_lengths(many, [9, 1])
    assert len(repr(deep)) < 200
    lists = make.from_lists
    for x, part in (
        (
            lists([[10, 11], [101], []], capacity=5),
            "SegmentTensor([[10 11] [101] []], int32, num_segments=3, capacity=5)",
        ),
        (
            lists([[[10, 11], [101]], []]),
            "([[[10 11] [101]] []], int32, num_segments=2, capacity=2)",
        ),
        (
            lists([{1: [10, 11], 3: [101]}, {1: [7]}]),
            "({ids: [[[10 11] [101]] [[7]]] int32, key: [[1 3] [1]] int32}, num_s",
        ),
        (
            lists([[0.5, 1e-9, 3.0], [-2.25]]),
            "([[0.5 1e-09 3] [-2.25]], float32,",
        ),
        (lists([[True]]), "([[True]], bool, "),
        (lists([[1234567]]), "[[1234567]]"),
        (many, "([[0 1 2 3 4 5 6 7 ...] [20 "),
        (many, " ...] ...], int32, num_segments=10, capacity=200)"),
        (deep, "SegmentTensor([[[0 1 2 3 ...] [20 21 22 23 ...] "),
    ):
        assert part in repr(x)


def test_repr_of_what_has_no_values():
    x = make.from_lists([[1, 2], [3]])
    rows = make.from_lengths(jnp.ones((3, 2)), [2, 1])
    assert repr(rows) == "SegmentTensor(float32[3,2], num_segments=2, capacity=3)"
    seen = []
    jax.jit(lambda x: seen.append(repr(x)))(x)
    jax.eval_shape(lambda x: seen.append(repr(x)), x)
    seen.append(repr(jax.eval_shape(lambda x: x, x)))
    assert set(seen) == {"SegmentTensor(int32[3], num_segments=2, capacity=3)"}
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), x)
    assert "(int32[2,3], num_segments=2, capacity=" in repr(stacked)
    jax.vmap(lambda x: seen.append(repr(x)))(stacked)
    assert seen[-1] == seen[0]
    # JAX also puts placeholders there.
    structure = jax.tree.structure(x)
    odd = jax.tree.unflatten(structure, [None, None])
    assert repr(odd) == "SegmentTensor(None, num_segments=2, capacity=None)"
    assert "num_segments=2" in repr(jax.tree.map(lambda a: a.shape, x))
    nested = jax.eval_shape(lambda: make.from_lists([[[1], []]]))
    assert repr(nested).count("SegmentTensor(") == 2
    of_ids = jax.grad(lambda x: jnp.sum(sj.segment_sum(x)), allow_int=True)
    assert "num_segments=2" in repr(of_ids(x.map(jnp.float32)))
