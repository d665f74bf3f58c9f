"""segment_*: values, against loops in NumPy and against jax.ops."""

import functools
import inspect
import pickle

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reductions
import sparsejax as sj
from helpers import assert_trees_close
from reductions import REDUCTIONS, SMOOTH, ours


S, N = 4, 9
IDS = np.array([3, -1, 0, 0, 3, 7, 3, 0, 2**31 - 1], np.int32)  # 1 and 2 are empty
NAMESAKES = ("sum", "prod", "max", "min")


def floats(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


top_k = jax.jit(sj.segment_top_k, static_argnums=2, static_argnames="k")


def assert_all_close(actual, expected):
    expected = {
        name: jax.tree.map(
            lambda a, e: np.asarray(e, np.asarray(a).dtype), actual[name], value
        )
        for name, value in expected.items()
    }
    assert_trees_close(actual, expected, rtol=2e-5, atol=2e-6)


def check_all(x, ids, w, num_segments):
    """Every reduction of these, unsorted and sorted, is the loop's."""
    expected = reductions.all_by_numpy(x, ids, w, num_segments)
    assert_all_close(reductions.all_of(num_segments, False)(x, ids, w), expected)
    order = np.argsort(ids, kind="stable")
    x, ids, w = x[order], ids[order], w[order]
    expected = reductions.all_by_numpy(x, ids, w, num_segments)
    assert_all_close(reductions.all_of(num_segments, True)(x, ids, w), expected)


# ------------------------------------------------------------------ against loops


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.data())
def test_all_reductions_are_their_loops(data):
    any_id = st.one_of(st.integers(0, S - 1), st.integers(-3, S + 2), st.just(1))
    ids = data.draw(st.lists(any_id, min_size=N, max_size=N))
    # Few values, so that there are ties, exactly summed.
    eighths = st.integers(-16, 16).map(lambda i: i / 8)
    x = data.draw(st.lists(eighths, min_size=2 * N, max_size=2 * N))
    w = data.draw(st.lists(st.integers(0, 3), min_size=N, max_size=N))
    check_all(
        np.array(x, np.float32).reshape(N, 2),
        np.array(ids, np.int32),
        np.array(w, np.float32),
        S,
    )


@pytest.mark.parametrize(
    ("ids", "num_segments"),
    [([], S), ([], 0), ([0, -1, 5], 0), ([0] * 5, 1)],
    ids=["no_elements", "nothing", "no_segments", "one_segment"],
)
def test_small_shapes(ids, num_segments):
    ids = np.array(ids, np.int32)
    x, w = floats((len(ids), 2)), np.ones(len(ids), np.float32)
    check_all(x, ids, w, num_segments)


def test_many_segments():
    rng = np.random.default_rng(0)
    n, num_segments = 200_000, 100_000
    ids = rng.integers(-5, num_segments + 5, n)
    x = rng.integers(-4, 5, n).astype(np.float32)
    inside = (ids >= 0) & (ids < num_segments)
    kept, to = x[inside], ids[inside]
    total, top = np.zeros(num_segments, np.float32), np.full(num_segments, -np.inf)
    np.add.at(total, to, kept)
    np.maximum.at(top, to, kept)
    np.testing.assert_array_equal(sj.segment_sum(x, ids, num_segments), total)
    np.testing.assert_array_equal(sj.segment_max(x, ids, num_segments), top)
    count = np.bincount(to, minlength=num_segments)
    np.testing.assert_array_equal(sj.segment_count(x, ids, num_segments), count)


@pytest.mark.parametrize("shape", [(N,), (N, 2, 3), (N, 0)])
def test_axes_of_data(shape):
    x = floats(shape)
    expected = {name: reductions.oracle(name, x, IDS, S) for name in SMOOTH}
    assert_all_close(reductions.smooth_of(S)(x, IDS), expected)
    if shape[-1]:
        for out, expected in zip(top_k(x, IDS, S, k=2), reductions.top_k(x, IDS, S, 2)):
            assert_trees_close(out, expected)


# ------------------------------------------------------------------ against jax.ops


@pytest.mark.parametrize(
    "name, dtype",
    [
        *zip(NAMESAKES, (np.float32, np.int8, np.uint32, np.complex64)),
        *zip(NAMESAKES, (np.complex64, np.uint32, np.int8, np.float32)),
    ],
)
def test_calls_of_jax_ops_are_served(name, dtype):
    x = np.arange(1, 2 * N + 1).reshape(N, 2).astype(dtype)
    flags, ids = np.arange(N) > 4, np.sort(IDS.clip(0, S - 1))
    drop = jax.lax.GatherScatterMode.FILL_OR_DROP

    def calls(f, x, flags):
        return [
            f(x, IDS, num_segments=S),
            f(x, np.sort(IDS), num_segments=S, indices_are_sorted=True),
            f(x, np.arange(N), num_segments=S, unique_indices=True, mode="drop"),
            f(x, IDS, num_segments=S, mode="clip", bucket_size=4),
            f(x, IDS, num_segments=S, mode=drop),
            f(x, ids, S, True),
            *([f(flags, ids, 5)] if name in ("max", "min") else []),
        ]

    pair = ours(name), getattr(jax.ops, f"segment_{name}")
    assert_trees_close(*jax.jit(lambda *xs: [calls(f, *xs) for f in pair])(x, flags))
    ids = np.array([0, 3, -1, 3, 0, 0, 1, 1, -7])
    assert_trees_close(*(f(x, segment_ids=ids) for f in pair))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.int64, np.uint64])
def test_ids_of_any_integer_type(dtype):
    large = np.iinfo(dtype).max
    ids = np.array([3, 0, large, large - 1, 2], dtype)
    x = np.ones(5, np.float32)
    assert sj.segment_sum(x, ids, S).tolist() == [1, 0, 1, 1]
    assert sj.segment_sum(x[:2], ids[:2]).tolist() == [1, 0, 0, 1]


# ------------------------------------------------------------------ dtypes


TOLERANCE = {
    "int16": (1e-5, 1e-6),
    "float32": (2e-5, 2e-6),
    "float64": (1e-7, 1e-8),
    "bfloat16": (2e-2, 2e-2),
    "float16": (2e-2, 2e-2),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_types_stay(dtype, x64):
    """With floats, and with integers but for their means; ids have 64 bits here."""
    x = floats((N,)) if dtype != "int16" else np.arange(1, N + 1)
    x, ids = x.astype(jnp.dtype(dtype)), IDS.astype(np.int64)
    stay = ("sum", "prod", "max", "min", "cumsum") if dtype == "int16" else SMOOTH
    for name, value in reductions.smooth_of(S)(x, ids).items():
        assert value.dtype == (dtype if name in stay else jnp.float32), name
        expected = reductions.oracle(name, x, ids, S)
        if dtype == "int16" and name in ("max", "min"):
            limits = np.iinfo(np.int16)
            expected = expected.clip(limits.min, limits.max)
        value = np.asarray(value, np.float64)
        np.testing.assert_allclose(value, expected, *TOLERANCE[dtype], err_msg=name)
    values, positions = top_k(x, ids, S, k=1)
    assert (values.dtype, positions.dtype) == (dtype, np.int32)
    names = "argmax", "argmin", "count"
    integers = jax.jit(lambda: [ours(name)(x, ids, S) for name in names])()
    assert {y.dtype for y in integers} == {np.dtype(np.int32)}
    weighted = jax.jit(lambda w: sj.segment_sum(x, ids, S, weights=w))(np.ones(N))
    assert weighted.dtype == ("float64" if dtype == "int16" else dtype)
    if dtype == "int16":  # a mean is of floats, and does not run over
        mean = sj.segment_mean(np.full(9, limits.max), np.zeros(9, int))
        assert mean.tolist() == [limits.max]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_floats_of_16_bits_are_summed_in_float32(dtype):
    ids = np.zeros(4096, np.int32)

    @jax.jit
    def f(x):
        total, mean = sj.segment_sum(x, ids, 1), sj.segment_mean(x, ids, 1)
        running = sj.segment_cumsum(x, ids, 1, indices_are_sorted=True)
        ties = jax.grad(lambda x: sj.segment_max(x, ids, 1)[0])(x)
        return total[0], mean[0], running[-1], jnp.sum(ties.astype(jnp.float32))

    out = f(jnp.ones((4096,), dtype))
    assert [float(x) for x in out] == [4096, 1, 4096, 1]
    assert [x.dtype for x in out[:3]] == [dtype] * 3


# ------------------------------------------------------------------ empty and weights


@pytest.mark.slow
def test_empty_takes_the_place_of_every_default():
    x = floats((N, 2))
    expected = {name: reductions.oracle(name, x, IDS, S, -7.0) for name in SMOOTH}
    assert_all_close(reductions.smooth_of(S, empty=-7.0)(x, IDS), expected)
    calls = {"argmax": (x, -1), "argmin": (x, -1)}
    calls |= {"any": (x > 9, True), "all": (x < 9, False), "count": (x, -1)}
    run = lambda: {k: ours(k)(y, IDS, S, empty=e) for k, (y, e) in calls.items()}
    found = {k: y.tolist() for k, y in jax.jit(run)().items()}
    assert found.pop("count") == [3, -1, -1, 3]
    assert all(y[1] == [calls[k][1]] * 2 for k, y in found.items())
    values, _ = top_k(x[:, 0], IDS, S, k=4, empty=-jnp.inf)
    assert np.isinf(values).sum(axis=1).tolist() == [1, 4, 4, 1]
    traced = jax.jit(lambda e: sj.segment_max(x, IDS, S, empty=e))(np.float32(3))
    assert traced.tolist()[1] == [3, 3]


def test_weights_that_sum_to_zero_give_empty():
    x, ids = np.array([1, 3, 5], np.float32), np.array([0, 0, 1])
    w = np.array([2, -2, 0], np.float32)
    names = "mean", "sqrtn", "sum"
    run = jax.jit(lambda: [ours(k)(x, ids, 3, weights=w, empty=-1.0) for k in names])
    mean, sqrtn, total = run()
    assert mean.tolist() == [-1, -1, -1]
    # The weights' squares do not sum to zero.
    np.testing.assert_allclose(sqrtn, [-4 / np.sqrt(8), -1, -1], rtol=1e-6)
    assert total.tolist() == [-4, 0, -1]


def test_weights_of_integers():
    x, ids = np.array([1, 3, 5], np.int32), np.array([0, 0, 1])
    out = sj.segment_sum(x, ids, weights=np.array([2, 1, 0], np.int32))
    assert out.dtype == jnp.int32 and out.tolist() == [5, 0]
    out = sj.segment_sum(x, ids, weights=np.array([0.5, 1.0, 0.0], np.float32))
    assert out.dtype == jnp.float32 and out.tolist() == [3.5, 0]
    out = sj.segment_mean(x, ids, weights=np.array([1, 3, 1], np.int32))
    assert out.dtype == jnp.float32 and out.tolist() == [2.5, 5]


# ------------------------------------------------------------------ numbers


def test_infinities_and_nan():
    inf, nan = np.inf, np.nan
    x = np.array([-inf, -inf, inf, 1.0, -inf, 1.0, nan, 1.0], np.float32)
    ids = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    out = reductions.all_of(S, True)(x, ids, np.ones(8, np.float32))
    for name, expected in {
        "logsumexp": [-inf, inf, 1, nan],
        "softmax": [0, 0, nan, nan, 0, 1, nan, nan],
        "log_softmax": [-inf, -inf, nan, nan, -inf, 0, nan, nan],
        "max": [-inf, inf, 1, nan],
        "min": [-inf, 1, -inf, nan],
        "argmax": [0, 2, 5, 6],
        "argmin": [0, 3, 4, 6],
        "cumsum": [-inf, -inf, inf, inf, -inf, -inf, nan, nan],
    }.items():
        np.testing.assert_array_equal(out[name], expected, err_msg=name)
    np.testing.assert_array_equal(out["logmeanexp"][:2], [-inf, inf])
    values, positions = out["top_k"]
    np.testing.assert_array_equal(values[:, 0], [-inf, inf, 1, nan])
    assert positions[:, 0].tolist() == [0, 0, 1, 0]


def test_large_numbers_cost_no_digits():
    x = np.array([1e5, 1e5 + 1, 300.0, -300.0], np.float32)
    ids = np.array([0, 0, 1, 1])
    sigmoid = 1 / (1 + np.exp(-1.0))
    softmax = [1 - sigmoid, sigmoid, 1, 0]
    log_softmax = np.log([1 - sigmoid, sigmoid, 1, np.exp(-600)])
    slope_of = jax.grad(lambda x: jnp.sum(sj.segment_logsumexp(x, ids, 2)))
    functions = sj.segment_softmax, sj.segment_log_softmax, sj.segment_var
    *results, slope = jax.jit(lambda: [*(f(x, ids) for f in functions), slope_of(x)])()
    for out, right in zip(results, (softmax, log_softmax, [0.25, 90_000]), strict=True):
        np.testing.assert_allclose(out, right, rtol=1e-6)
    np.testing.assert_allclose(slope, softmax, rtol=1e-6)


def test_ties_of_top_k_come_in_order():
    x, ids = np.array([2, 7, 7, 7, 2], np.int32), np.array([1, 1, 1, 0, 1])
    values, positions = top_k(x, ids, 2, k=4)
    assert values.tolist() == [[7, 0, 0, 0], [7, 7, 2, 2]]
    assert positions.tolist() == [[0, -1, -1, -1], [1, 2, 0, 3]]


# ------------------------------------------------------------------ SegmentTensor


def segments(values, is_sorted=False):
    ids = np.where(IDS < 0, S, IDS) if is_sorted else IDS  # empty elements come last
    ids = np.sort(ids) if is_sorted else ids
    return sj.SegmentTensor.from_segment_ids(values, ids, S, is_sorted=is_sorted)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_a_segment_tensor_brings_its_segments(is_sorted):
    x = floats((N, 2))
    data = segments(jnp.asarray(x), is_sorted)
    ids = np.asarray(data.segment_ids)
    out = jax.jit(lambda st: {name: ours(name)(st) for name in SMOOTH})(data)
    assert_all_close(out, {name: reductions.oracle(name, x, ids, S) for name in SMOOTH})
    assert sj.segment_count(data).tolist() == [3, 0, 0, 3]
    expected = reductions.position(x, ids, S, np.argmax)
    assert_trees_close(sj.segment_argmax(data), expected)


def test_each_array_of_a_tree_of_values_is_reduced():
    x = floats((N, 2))
    data = segments({"a": x, "b": x[:, 0]})
    out = sj.segment_mean(data)
    assert_trees_close(out["a"], sj.segment_mean(x, IDS, S))
    assert_trees_close(out["b"], sj.segment_mean(x[:, 0], IDS, S))
    inner = sj.SegmentTensor.from_lengths(jnp.arange(9), np.ones(N, int))
    for tree in (data, segments({"key": jnp.arange(N), "ids": inner})):
        assert sj.segment_count(tree).tolist() == [3, 0, 0, 3]


# ------------------------------------------------------------------ jit and arguments


def test_num_segments_is_found_outside_of_jit_only():
    x = np.ones(3, np.float32)
    assert sj.segment_sum(x, jnp.array([0, 4, 1])).shape == (5,)
    assert sj.segment_sum(x, [0, 4, 1]).shape == (5,)
    assert sj.segment_sum(x, jnp.array([-1, -4, -1])).shape == (0,)
    assert sj.segment_sum(x[:0], []).shape == (0,)
    assert jax.jit(lambda x: sj.segment_sum(x, np.array([0, 4, 1])))(x).shape == (5,)


def test_one_compilation_serves_all_ids():
    f = lambda x, ids: sj.segment_max(x, ids, S)
    g = jax.jit(chex.assert_max_traces(f, 1))
    for seed in range(3):
        g(floats((N,), seed), jnp.asarray(np.roll(IDS, seed)))


def test_shapes_are_known_before_data():
    x = jax.ShapeDtypeStruct((N, 2), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((N,), jnp.int32)
    for name, out in jax.eval_shape(reductions.smooth_of(S), x, ids).items():
        shape = (S, 2) if name in REDUCTIONS else (N, 2)
        assert (out.shape, out.dtype) == (shape, jnp.bfloat16)


# ------------------------------------------------------------------ signatures

OWN = {
    "top_k": "k",
    "normalize": "eps",
    **dict.fromkeys(reductions.WEIGHTED, "weights"),
}
OTHERS = "argmax", "argmin", "top_k", "count", "any", "all"


@pytest.mark.parametrize("name", [*SMOOTH, *OTHERS])
def test_all_take_the_arguments_of_jax(name):
    function = ours(name)
    shown = inspect.signature(function).parameters
    common = inspect.signature(jax.ops.segment_sum).parameters
    assert {*common, "empty"} == {*shown} - {OWN.get(name)}
    assert [*shown][:4] == ["data", *[*common][1:4]]  # also by position
    for key in (k for k in common if k != "data"):
        assert shown[key].default in (common[key].default, None)
    data, own = np.ones(2, bool), {"k": 1} if name == "top_k" else {}
    data = data if name in ("any", "all") else data.astype(np.float32)
    run = functools.partial(function, data, np.array([0, 7]), 2, **own)
    jax.eval_shape(lambda: run(unique_indices=True, bucket_size=None))
    if name == "count":
        assert run(mode="clip").tolist() == [1, 1]
    with pytest.raises(TypeError, match="unexpected keyword argument 'wieghts'"):
        run(wieghts=data)
    # It is known by its public name.
    assert function.__name__ == function.__qualname__ == f"segment_{name}"
    assert pickle.loads(pickle.dumps(function)) is function
    assert f"def segment_{name}(" in inspect.getsource(function)
