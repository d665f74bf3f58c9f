"""top_k, against sorting all scores; its memory, read off the compiled program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import sparsejax as sj
from helpers import compile_as_users_do, slow_but


V, D, B, K = 211, 4, 5, 9
RNG = np.random.default_rng(0)
# Small integers: float32 multiplies and adds them exactly, and many sums are equal.
TABLE = RNG.integers(-2, 3, (V, D)).astype(np.float32)
QUERIES = RNG.integers(-2, 3, (B, D)).astype(np.float32)
BIAS = RNG.integers(-1, 2, (V, 1)).astype(np.float32)
SEEN = np.where(RNG.random((B, 60)) < 0.8, RNG.integers(0, V, (B, 60)), -1)
SEEN[0, :3] = [V, V + 5, -7]


def dot(queries, table):
    return queries @ table.T


def cosine(queries, table):
    norm = lambda x: np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30)
    return (queries / norm(queries)) @ (table / norm(table)).T


def l2(queries, table):
    return -((queries[:, None] - table) ** 2).sum(-1)


def manhattan(queries, rows):
    return -jnp.abs(queries[:, None] - rows[None]).sum(-1)


def best(scores, k, seen=None):
    """Brute force: all ids by score, then by id."""
    scores = scores.copy()
    for row, ids in enumerate([] if seen is None else seen):
        scores[row, [i for i in ids if 0 <= i < scores.shape[1]]] = -np.inf
    every = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    ids = np.lexsort((every, -scores))[:, :k]
    top = np.take_along_axis(scores, ids, 1)
    return top, np.where(top == -np.inf, -1, ids)


def assert_same(found, want):
    np.testing.assert_allclose(found[0], want[0], rtol=1e-6)
    np.testing.assert_array_equal(found[1], want[1])


# ------------------------------------------------------------------ results


@pytest.mark.window
@pytest.mark.parametrize("chunk_size", slow_but([1, 16, V - 1, None], 16))
def test_equals_brute_force(chunk_size):
    """Across the borders of chunks, and with a last chunk that is not whole."""

    @jax.jit
    def run(table, queries, bias, seen):
        call = functools.partial(sj.top_k, table, queries, K, chunk_size=chunk_size)
        return [
            call(),
            call(score="l2"),
            call(score=manhattan),
            call(bias=bias, exclude=seen),
            call(bias=bias[:, 0], exclude=seen[1]),
        ]

    found = run(TABLE, QUERIES, BIAS, SEEN)
    with_bias = dot(QUERIES, TABLE) + BIAS.T
    assert_same(found[0], best(dot(QUERIES, TABLE), K))
    assert_same(found[1], best(l2(QUERIES, TABLE), K))
    assert_same(found[2], best(np.asarray(manhattan(QUERIES, TABLE)), K))
    assert_same(found[3], best(with_bias, K, SEEN))
    assert_same(found[4], best(with_bias, K, [SEEN[1]] * B))
    assert len(np.unique(found[0][0])) < K  # there are equal scores


@pytest.mark.slow
def test_cosine_and_float64(x64):
    table, queries = RNG.normal(size=(V, D)), RNG.normal(size=(B, D))
    table[3] = 0
    search = functools.partial(sj.top_k, k=V, score="cosine", chunk_size=50)
    found = jax.jit(search)(table, queries)
    assert found[0].dtype == jnp.float64
    scores, ids = best(cosine(queries, table), V)
    np.testing.assert_allclose(found[0], scores, atol=1e-14)
    np.testing.assert_array_equal(found[1], ids)


@pytest.mark.slow
def test_shapes():
    """One query, several axes of them, vmap, and lists of seen ids of any length."""
    seen = [[i for i in ids if i >= 0] for ids in SEEN.tolist()]
    seen = sj.SegmentTensor.from_lists(seen, capacity=400)

    @jax.jit
    def run(table, queries, seen):
        return (
            sj.top_k(table, queries[0], K),
            jax.vmap(lambda q: sj.top_k(table, q, K))(queries),
            sj.top_k(table, queries[None], K, exclude=SEEN[None]),
            sj.top_k(table, queries, K, exclude=seen),
            sj.top_k(table, queries[:0], K),
        )

    one, mapped, grid, without_seen, none = run(TABLE, QUERIES, seen)
    want = best(dot(QUERIES, TABLE), K)
    assert_same(one, (want[0][0], want[1][0]))
    assert_same(mapped, want)
    want = best(dot(QUERIES, TABLE), K, SEEN)
    assert_same(grid, [x[None] for x in want])
    assert_same(without_seen, want)
    assert none[1].shape == (0, K)


@pytest.mark.slow
def test_where_too_few_are_left():
    search = jax.jit(lambda table: sj.top_k(table, QUERIES, 4, exclude=[1, 3]))
    found = jax.device_get(search(TABLE[:4]))
    assert (found[1][:, 2:] == -1).all() and (found[0][:, 2:] == -np.inf).all()
    assert set(found[1][:, :2].ravel().tolist()) == {0, 2}


@pytest.mark.slow
def test_zeros_of_both_signs_are_equal():
    table = np.array([[0.0], [-0.0], [0.0], [-0.0]], np.float32)
    found = sj.top_k(table, np.ones((1, 1), np.float32), 4, score=lambda q, t: q * t.T)
    assert found[1].tolist() == [[0, 1, 2, 3]]


@pytest.mark.slow
def test_16_bits_are_scored_in_float32():
    """bfloat16 has no numbers between 256 and 258: rounded scores would be equal."""
    table = (np.arange(300) < [[300], [257], [258]]).astype(jnp.bfloat16)
    found = sj.top_k(table, np.ones((1, 300), jnp.bfloat16), 3)
    assert found[0].tolist() == [[300, 258, 257]]


@pytest.mark.slow
def test_nothing_is_differentiated():
    """The table beside it keeps its sparse gradient."""

    def loss(table, queries):
        _, ids = sj.top_k(table, queries, 2)
        return jnp.sum(sj.lookup(table, ids) * queries[:, None])

    @jax.jit
    def run(table, queries):
        grads = sj.grad(loss)(table, queries)
        return grads, grads.to_dense(), jax.grad(loss)(table, queries)

    grads, got, want = run(TABLE, QUERIES)
    assert isinstance(grads, sj.SelectedRows)
    np.testing.assert_allclose(got, want)


# ------------------------------------------------------------------ memory


@pytest.mark.window
@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], "float32"))
def test_memory_does_not_grow_with_the_table(dtype):
    def temporaries(height):
        spec = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
        args = spec(height, 64), spec(256, 64), spec(256, 20, dtype="int32")
        search = jax.jit(lambda t, q, seen: sj.top_k(t, q, 100, exclude=seen))
        memory = compile_as_users_do(search.lower(*args)).memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    small, large = temporaries(1_000_000), temporaries(4_000_000)
    assert large < small + 1e6
    assert large < 4_000_000 * 256 * 4 / 50  # the size of all scores


# ------------------------------------------------------------------ many devices


@pytest.mark.slow
@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("layout", ["mod", "block"])
def test_of_a_sharded_table(layout):
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[:8])
    shard = lambda x: sj.parallel.shard_rows(x, mesh, "x", layout=layout)
    options = {"exclude": SEEN, "chunk_size": 16}

    @jax.jit
    def run(table, bias, queries, small):
        return (
            sj.parallel.top_k(table, queries, K, bias=bias, **options),
            sj.parallel.top_k(table, queries[0], V),
            sj.parallel.top_k(small, queries, 2, bias=BIAS[:2]),
        )

    found, every, few = run(shard(TABLE), shard(BIAS), QUERIES, shard(TABLE[:2]))
    assert_same(found, best(dot(QUERIES, TABLE) + BIAS.T, K, SEEN))
    want = best(dot(QUERIES, TABLE), V)
    assert_same(every, (want[0][0], want[1][0]))
    assert_same(few, best(dot(QUERIES, TABLE[:2]) + BIAS[:2].T, 2))


@pytest.mark.slow
@pytest.mark.usefixtures("eight_devices")
def test_inside_shard_map():
    """Queries of each device, and negatives that it draws itself."""
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    sampler = sj.losses.NegativeSampler.from_counts(np.arange(1, 50))

    def body(table, queries, sampler, keys):
        sample = functools.partial(sampler.sample, keys[0], 8)
        _, ids = sj.top_k(table, queries, 3, exclude=SEEN[0], chunk_size=50)
        return ids, sample(unique=True).ids, sample(exclude=jnp.array([1, 2])).ids

    specs = P(), P("x"), P(), P("x")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"))
    keys = jax.random.split(jax.random.key(0), 2)
    found, unique, _ = jax.jit(mapped)(TABLE, QUERIES[:4], sampler, keys)
    want = best(dot(QUERIES[:4], TABLE), 3, [SEEN[0]] * 4)
    np.testing.assert_array_equal(found, want[1])
    assert [len({*x}) for x in np.asarray(unique).reshape(2, 8).tolist()] == [8, 8]
