"""SegmentTensor: its makers and views, against nested lists and NumPy."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse as jax_sparse
from jax.test_util import check_grads

import sparsejax as sj
from helpers import assert_same_bits, assert_trees_close


make = sj.SegmentTensor

# The batch of Caffe2's document on sparse operations, in all its representations.
LISTS = [[1, 2, 3], [2, 4, 6, 7], [3, 6]]
VALUES = np.array([1, 2, 3, 2, 4, 6, 7, 3, 6], np.int32)
LENGTHS = np.array([3, 4, 2], np.int32)
SORTED_IDS = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2], np.int32)
UNSORTED = (
    np.array([4, 1, 3, 6, 3, 2, 7, 2, 6], np.int32),
    np.array([1, 0, 2, 1, 0, 1, 1, 0, 2], np.int32),
)
PADDED = np.array([[1, 2, 3, -1], [2, 4, 6, 7], [3, 6, -1, -1]], np.int32)
MULTI_HOT = np.array(
    [[0, 1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0, 1, 1], [0, 0, 0, 1, 0, 0, 1, 0]],
    np.int32,
)
OFFSETS = np.array([0, 3, 7, 9])
MAKERS = {
    "lengths": lambda a, **o: make.from_lengths(a(VALUES), a(LENGTHS), **o),
    "offsets": lambda a, **o: make.from_offsets(a(VALUES), a(OFFSETS), **o),
    "padded": lambda a, **o: make.from_padded(a(PADDED), **o),
    "multi-hot": lambda a, **o: make.from_multi_hot(a(MULTI_HOT), **o),
    "csr": lambda a, **o: make.from_csr(a(OFFSETS), a(VALUES), **o),
    "lists": lambda a, **o: make.from_lists([a(np.array(s)) for s in LISTS], **o),
    "sorted ids": lambda a: make.from_segment_ids(
        a(VALUES), a(SORTED_IDS), 3, is_sorted=True
    ),
}


def lists_of(x):
    """The segments as lists, by a plain loop."""
    lists = [[] for _ in range(x.num_segments)]
    for value, k in zip(np.asarray(x.values).tolist(), np.asarray(x.segment_ids)):
        if 0 <= k < x.num_segments:
            lists[k].append(value)
    return lists


def check(x, lists):
    """`x` is these segments, in whichever order its elements are."""
    assert isinstance(x, sj.SegmentTensor)
    assert lists_of(x) == lists
    assert x.num_segments == len(lists)
    assert x.capacity == x.values.shape[0] == x.segment_ids.shape[0]
    assert x.segment_ids.dtype == x.lengths.dtype == x.offsets.dtype == jnp.int32
    assert x.lengths.tolist() == [len(s) for s in lists]
    assert x.offsets.tolist() == np.cumsum([0, *map(len, lists)]).tolist()
    if x.is_sorted:
        assert (np.diff(x.segment_ids) >= 0).all()


# ------------------------------------------------------------------ representations


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("maker", MAKERS)
def test_every_representation_to_every_other(maker, as_array):
    x = MAKERS[maker](as_array)
    check(x, LISTS)
    assert x.is_sorted and x.values.dtype == jnp.int32
    assert isinstance(x.values, jax.Array) and isinstance(x.segment_ids, jax.Array)
    assert_trees_close((x.values, x.segment_ids), (VALUES, SORTED_IDS))
    assert_trees_close((x.to_padded(), x.to_multi_hot(8)), (PADDED, MULTI_HOT))
    assert x.to_lists() == LISTS


def test_unsorted_segment_ids():
    x = make.from_segment_ids(*UNSORTED, 3)
    want = [[1, 3, 2], [4, 6, 2, 7], [3, 6]]
    check(x, want)
    assert not x.is_sorted and x.sort().is_sorted
    check(x.sort(), want)
    assert x.to_lists() == want
    assert_trees_close(x.to_multi_hot(8), MULTI_HOT)
    assert x.to_padded().tolist() == [[1, 3, 2, -1], [4, 6, 2, 7], [3, 6, -1, -1]]


def test_rows_as_elements():
    values = jnp.arange(8.0).reshape(4, 2)
    x = make.from_lengths(values, [1, 0, 3])
    padded = x.to_padded(2)
    assert padded.shape == (3, 2, 2)
    assert padded.tolist() == [[[0, 1], [-1, -1]], [[-1, -1]] * 2, [[2, 3], [4, 5]]]
    # Elements are whole: one with a filler in it is one.
    padded = jnp.array([[[0, -1], [-1, -1]], [[-1, -1], [5, 6]]])
    assert make.from_padded(padded).to_lists() == [[[0, -1]], [[5, 6]]]


def test_padded_with_holes_and_other_fillers():
    holes = np.array([[-1, 5, -1], [0, -1, 2]], np.int32)
    check(make.from_padded(holes), [[5], [0, 2]])
    check(make.from_padded(holes, filler=5), [[-1, -1], [0, -1, 2]])
    floats = np.array([[np.nan, 5.0], [0.0, np.nan]], np.float32)
    check(make.from_padded(floats, filler=np.nan), [[5.0], [0.0]])
    x = make.from_lists([[1.0], []])
    assert np.isnan(np.asarray(x.to_padded(filler=np.nan))[1]).all()
    flags = make.from_lists([[True], []]).to_padded(filler=False)
    assert flags.dtype == bool and flags.tolist() == [[True], [False]]
    assert make.from_lists([[1, 2], [3]]).to_padded(1, 0).tolist() == [[1], [3]]


def test_csr_of_scipy_and_bcsr():
    dense = np.array([[0, 2.5, 0], [0, 0, 0], [1, 0, 3]], np.float32)
    want = {"index": [[1], [], [0, 2]], "value": [[2.5], [], [1.0, 3.0]]}
    scipy_sparse = pytest.importorskip("scipy.sparse")
    matrix = scipy_sparse.csr_array(dense)
    x = make.from_csr(matrix)
    assert x.to_lists() == want
    assert x.values["value"].dtype == jnp.float32
    parts = matrix.indptr, matrix.indices, matrix.data
    assert_trees_close(make.from_csr(*parts), x)
    back = (x.values["value"], x.values["index"], x.offsets)
    back = scipy_sparse.csr_array(back, dense.shape)
    np.testing.assert_array_equal(back.todense(), dense)
    # BCSR has room for more than it holds, which then is empty here.
    data, index = np.append(matrix.data, [0, 0]), np.append(matrix.indices, [3, 3])
    parts = jnp.asarray(data), jnp.asarray(index), jnp.asarray(matrix.indptr)
    x = make.from_csr(jax_sparse.BCSR(parts, shape=(3, 3)))
    assert x.to_lists() == want and x.capacity == 5
    with pytest.raises(ValueError, match="tocsr"):
        make.from_csr(matrix.tobsr())


def test_multi_hot_counts():
    """Caffe2's SegmentOneHot/basic, and an id twice, which that does not count."""
    x = make.from_lengths(np.array([1, 3, 0]), [2, 0, 1])
    assert x.to_multi_hot(4).tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
    x = make.from_lists([[1, 1, 5, -1], [0]])
    assert x.to_multi_hot(3).tolist() == [[0, 2, 0], [1, 0, 0]]
    counts = np.array([[0, 2, 1], [0, 0, 0], [3, 0, 0]])
    assert make.from_multi_hot(counts).to_multi_hot(3).tolist() == counts.tolist()
    flags = jax.jit(make.from_multi_hot)(jnp.array(counts > 0))
    check(flags, [[1, 2], [], [0]])
    assert flags.capacity == 9


# ------------------------------------------------------------------ any segments


@pytest.mark.slow
@hypothesis.given(
    st.lists(st.integers(-3, 9), min_size=9, max_size=9),
    st.integers(0, 4),
    st.booleans(),
)
def test_segment_ids_out_of_range_and_in_any_order(ids, num_segments, as_jax):
    values = np.arange(len(ids), dtype=np.int32)
    given = jnp.array(ids, jnp.int32) if as_jax else np.array(ids, np.int64)
    x = make.from_segment_ids(values, given, num_segments)
    want = [[i for i, k in enumerate(ids) if k == j] for j in range(num_segments)]
    check(x, want)
    assert all(0 <= k <= num_segments for k in x.segment_ids)
    assert x.to_lists() == want
    check(x.sort(), want)
    assert x.sort().capacity == len(ids)


segments = st.lists(
    st.lists(st.integers(0, 9), max_size=4), min_size=4, max_size=4
).map(lambda s: (s, np.concatenate([*s, np.full(16 - sum(map(len, s)), 99)])))


@jax.jit
def convert(values, lengths):
    """All conversions in one program, of padded input: one shape, one compilation."""
    x = make.from_lengths(values, lengths)
    shuffled = make.from_segment_ids(values[::-1], x.segment_ids[::-1], 4)
    padded = x.to_padded(4)
    return {
        "lengths": x,
        "capacity": make.from_lengths(values, lengths, capacity=20),
        "offsets": make.from_offsets(values, sj.lengths_to_offsets(lengths)),
        "padded": make.from_padded(padded),
        "multi-hot": x.to_multi_hot(7),
        "as padded": padded,
        "cut": x.to_padded(2),
        "shuffled": shuffled,
        "sorted": shuffled.sort(),
        "shuffled as padded": shuffled.to_padded(4),
    }


@hypothesis.given(segments)
@hypothesis.settings(max_examples=30)
def test_under_jit_as_outside(given):
    lists, values = given
    lengths = [len(s) for s in lists]
    got = convert(values.astype(np.int32), np.array(lengths, np.int32))
    for name in "lengths", "capacity", "offsets", "padded":
        check(got[name], lists)
    backwards = [s[::-1] for s in lists]
    check(got["shuffled"], backwards)
    check(got["sorted"], backwards)
    pad = lambda s, n: (s + [-1] * 4)[:n]
    assert got["as padded"].tolist() == [pad(s, 4) for s in lists]
    assert got["cut"].tolist() == [pad(s, 2) for s in lists]
    assert got["shuffled as padded"].tolist() == [pad(s, 4) for s in backwards]
    assert got["multi-hot"].tolist() == [[s.count(v) for v in range(7)] for s in lists]
    assert got["capacity"].capacity == 20


def test_no_segments_and_no_elements():
    check(make.from_lists([]), [])
    check(make.from_lengths(np.zeros(0, np.int32), [0, 0]), [[], []])
    check(make.from_lengths(np.arange(3), []), [])
    check(make.from_padded(np.zeros((2, 0), np.int32)), [[], []])
    check(make.from_padded(np.zeros((2, 0), np.int32), capacity=3), [[], []])
    x = make.from_lists([[], []])
    assert x.to_padded().shape == (2, 0) and x.to_padded(2).tolist() == [[-1, -1]] * 2
    assert x.to_multi_hot(3).tolist() == [[0, 0, 0]] * 2
    assert x.sort() is x and x.to_lists() == [[], []]


# ------------------------------------------------------------------ capacity


@pytest.mark.parametrize("maker", [name for name in MAKERS if name != "sorted ids"])
def test_capacity_adds_empty_elements(maker):
    x = MAKERS[maker](np.asarray, capacity=12)
    check(x, LISTS)
    assert x.capacity == 12
    assert x.segment_ids[9:].tolist() == [3, 3, 3]
    assert x.to_lists() == LISTS
    assert_trees_close(x.to_padded(), PADDED)
    with pytest.raises(ValueError, match="9 elements do not fit in capacity=8"):
        MAKERS[maker](np.asarray, capacity=8)


def test_elements_beyond_the_lengths_are_empty_and_may_be_cut():
    x = make.from_lengths(np.append(VALUES, [77, 77]), LENGTHS)
    check(x, LISTS)
    check(make.from_lengths(x.values, LENGTHS, capacity=9), LISTS)


def test_overflow_under_jit_shows():
    """As NaN; integers have none, but a float beside them does."""
    values, both = jnp.arange(4.0), {"id": jnp.arange(4), "score": jnp.arange(4.0)}
    cut = jax.jit(functools.partial(make.from_lengths, capacity=3))
    assert cut(values, jnp.array([1, 2])).to_lists() == [[0.0], [1.0, 2.0]]
    lengths, offsets = jax.jit(make.from_lengths), jax.jit(make.from_offsets)
    padded = jax.jit(functools.partial(make.from_padded, capacity=2))
    for x in (
        cut(values, jnp.array([1, 3])),
        cut(both, jnp.array([4])).values["score"],
        padded(jnp.array([[1.0, -1.0], [2.0, 3.0]])),
        # Invalid lengths, and invalid offsets.
        *(lengths(values, jnp.array(n)) for n in ([4, 1], [5, -1])),
        *(offsets(values, jnp.array(n)) for n in ([0, 2, 5], [1, 2, 3], [0, 3, 2])),
    ):
        assert np.isnan(x.values if isinstance(x, make) else x).all()


def test_overflow_that_could_not_show_is_refused_under_jit():
    ids, lengths = jnp.arange(4), jnp.array([1, 2])
    match = r"integers cannot become NaN to report it\. Pass capacity=4"
    for f, *args in [
        (make.from_lengths, ids, lengths),
        (make.from_padded, jnp.zeros((2, 2), int)),
        (make.from_multi_hot, jnp.zeros((2, 2), bool)),
    ]:
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(functools.partial(f, capacity=3), *args)
    # Wrong lengths still show in the result.
    assert jax.jit(make.from_lengths)(ids, jnp.array([3, 3])).lengths.tolist() == [3, 1]


# ------------------------------------------------------------------ nesting

NESTED = [[[10, 11], [101]], [], [[11], [], [102, 103, 104]]]


def test_nested():
    x = make.from_lists(NESTED)
    assert x.lengths.tolist() == [2, 0, 3]
    assert isinstance(x.values, sj.SegmentTensor)
    assert x.values.lengths.tolist() == [2, 1, 1, 0, 3]
    assert x.to_lists() == NESTED
    assert x.map(jnp.negative).to_lists()[0] == [[-10, -11], [-101]]
    want = -np.ones((3, 3, 3), np.int32)
    for i, elements in enumerate(NESTED):
        for j, ids in enumerate(elements):
            want[i, j, : len(ids)] = ids
    assert_trees_close(x.to_padded(), want)
    sizes = jax.jit(lambda x: x.to_padded((3, 2)))(x)
    assert_trees_close(sizes, want[:, :, :2])


def test_nested_moves_as_a_whole():
    inner = make.from_lists([[1, 2], [], [3], [4, 5, 6]])
    x = make.from_segment_ids({"ids": inner, "key": np.arange(4)}, [2, 0, -1, 2], 3)
    want = {"ids": [[[]], [], [[1, 2], [4, 5, 6]]], "key": [[1], [], [0, 3]]}
    for y in x, x.sort(), jax.jit(lambda x: x.sort())(x):
        assert y.to_lists() == want
    assert x.sort().values["ids"].is_sorted
    assert x.to_padded(2, 0)["key"].tolist() == [[1, 0], [0, 0], [0, 3]]
    unsorted = make.from_segment_ids(inner.values, inner.segment_ids, 4)
    x = make.from_segment_ids(unsorted, x.segment_ids, 3)
    assert x.sort().to_lists() == want["ids"]
    # Empty elements are added, and cut, as empty segments.
    for capacity in 6, 3:
        x = make.from_lengths(inner, [2, 1], capacity=capacity)
        assert x.to_lists() == [[[1, 2], []], [[3]]]
        assert x.capacity == x.values.num_segments == capacity

    @jax.jit
    def f(inner, lengths):
        x = make.from_lengths({"ids": inner, "w": jnp.ones(4)}, lengths, capacity=5)
        return x, x.values["ids"].to_padded(2)

    x, padded = f(inner, jnp.array([1, 2]))
    assert x.to_lists() == {"ids": [[[1, 2]], [[], [3]]], "w": [[1.0], [1.0, 1.0]]}
    assert padded.tolist() == [[1, 2], [-1, -1], [3, -1], [4, 5], [-1, -1]]
    x, _ = f(inner, jnp.array([3, 3]))
    assert np.isnan(x.values["w"][:4]).all()


def test_capacities_of_levels():
    x = make.from_lists(NESTED, capacity=(8, 9))
    assert x.capacity == x.values.num_segments == 8
    assert x.values.capacity == 9
    assert x.to_lists() == NESTED
    assert make.from_lists(NESTED, capacity=8).values.capacity == 7
    assert make.from_lists(NESTED, capacity=(None, 9)).values.capacity == 9


# ------------------------------------------------------------------ transformations


def test_is_a_pytree():
    x = make.from_lists(NESTED, capacity=6)
    leaves, structure = jax.tree.flatten(x)
    assert len(leaves) == 3
    assert_trees_close(jax.tree.unflatten(structure, leaves), x)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(x)]
    assert paths == [".values.values", ".values.segment_ids", ".segment_ids"]
    for odd in None, object():
        y = jax.tree.unflatten(structure, [odd] * 3)
        assert y.segment_ids is odd and y.num_segments == 3
    spec = jax.eval_shape(lambda x: x, x)
    assert spec.capacity == 6 and spec.is_sorted
    assert jax.jit(lambda x: x)(x).to_lists() == NESTED


BATCH = [[[1, 2], [3]], [[], [4, 5, 6]]]
PARTS = [make.from_lists(lists, capacity=4) for lists in BATCH]
STACKED = jax.tree.map(lambda *x: np.stack(x), *PARTS)


@pytest.mark.slow
def test_vmap_over_a_batch():
    f = lambda x: (x.lengths, x.offsets, x.to_padded(3), x.to_multi_hot(7))
    again = lambda x: make.from_lengths(x.values, x.lengths)
    turn = lambda x: make.from_segment_ids(x.values, 1 - x.segment_ids, 2).sort()
    scan = lambda batch: jax.lax.scan(lambda last, x: (x, f(x)), PARTS[1], batch)[1]
    maps = [jax.vmap(g) for g in (f, again, turn)]
    run = jax.jit(lambda batch: [g(batch) for g in (*maps, scan)])
    got, made, turned, scanned = jax.tree.map(np.asarray, run(STACKED))
    assert_trees_close(scanned, got)
    for i, part in enumerate(PARTS):
        assert_trees_close(jax.tree.map(lambda x, i=i: x[i], got), jax.jit(f)(part))
    assert_trees_close(made, STACKED)
    first = jax.tree.map(lambda x: x[0], turned)
    assert first.to_lists() == [[3], [1, 2]]


def test_gradients_of_values(x64):
    values, ids = np.linspace(-0.9, 1.3, 5), np.array([1, 0, 1, -1, 2])
    weights = np.arange(12.0).reshape(3, 4)

    @jax.jit
    def f(values):
        x = make.from_segment_ids(values, ids, 3)
        y = make.from_lengths(x.sort().values, jnp.array([1, 2, 1]), capacity=7)
        z = make.from_padded(y.to_padded(4))
        return jnp.sum((y.to_padded(4) * weights) ** 2) + jnp.sum(z.values**3)

    check_grads(f, (values,), order=1, modes=("fwd", "rev"))
    grad = np.asarray(jax.grad(f)(values))
    assert grad[3] == 0 and (np.delete(grad, 3) != 0).all()
    # A NaN in an empty element changes neither values nor gradients.
    values[3] = np.nan
    np.testing.assert_array_equal(jax.grad(f)(values), grad)
    # And with respect to a SegmentTensor, whose ids have none.
    x = make.from_lengths(np.array([1, 2, np.nan]), [1, 1], capacity=5)
    loss = jax.jit(lambda x: jnp.sum(x.to_padded(2, 0.0) ** 2))
    value, grads = jax.value_and_grad(loss, allow_int=True)(x)
    assert value == 5 and grads.values.tolist() == [2, 4, 0, 0, 0]
    assert grads.segment_ids.dtype == jax.dtypes.float0


def test_values_keep_their_type():
    for dtype in (jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint32, bool):
        x = make.from_lengths(np.array([1, 0, 1]).astype(dtype), [1, 2], capacity=4)
        filler = False if dtype is bool else 0
        padded = jax.jit(lambda x, filler=filler: x.to_padded(2, filler))(x)
        assert x.values.dtype == padded.dtype == dtype
    same = make.from_lengths(np.array([-0.0, np.nan], np.float32), [2])
    assert_same_bits(same.values, np.array([-0.0, np.nan], np.float32))


def test_x64(x64):
    x = make.from_lengths(np.array([2**40, 1]), np.array([1, 1]))
    assert x.values.dtype == jnp.int64 and x.values[0] == 2**40
    check(x, [[2**40], [1]])
    ids = jnp.array([2**32, 1, -(2**32)])
    for f in make.from_segment_ids, jax.jit(make.from_segment_ids, static_argnums=2):
        check(f(jnp.arange(3), ids, 2), [[], [1]])
    assert make.from_lists([[1.5]]).values.dtype == jnp.float64
    assert make.from_padded(PADDED).values.dtype == jnp.int32
    narrow = make.from_lengths(jnp.ones(2, jnp.float32), [2])
    assert narrow.to_padded().dtype == narrow.sort().values.dtype == jnp.float32


def test_parts_may_be_numpy_arrays():
    """As in batches of a loader: every view also works outside of jit."""
    ours = sj.SegmentTensor.from_lists([[1, 2], [], [3]], capacity=5)
    theirs = jax.tree.map(np.asarray, ours)
    for view in (
        lambda st: st.to_padded(),
        lambda st: st.lengths,
        lambda st: st.offsets,
        lambda st: st.to_multi_hot(4),
        lambda st: st.sort().values,
        lambda st: sj.segment_max(st),
        lambda st: sj.pack_segments(st, 2),
    ):
        np.testing.assert_array_equal(view(theirs), view(ours))
    assert theirs.to_lists() == ours.to_lists() and repr(theirs) == repr(ours)
