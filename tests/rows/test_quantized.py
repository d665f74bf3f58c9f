"""QuantizedTable: its numbers, its reads, its forms, and training in 8 bits.

test_caffe2_mapping.py has the recorded answers of Caffe2; here NumPy repeats its
arithmetic, one number at a time, for more rows than are recorded.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export

import sparsejax as sj
from helpers import assert_same_bits, assert_written_in_place, compile_as_users_do


F32, F16 = np.float32, np.float16
KINDS = [(4, F16), (8, F32), (8, F16), (4, F32), (2, F16)]
all_kinds = pytest.mark.parametrize("bits, scale_dtype", KINDS)
# With the scales that each has by default.
each_bits = pytest.mark.parametrize("bits, scale_dtype", [(8, F32), (4, F16), (2, F16)])


dequantize = jax.jit(sj.QuantizedTable.dequantize)


@functools.cache
def two_tables(bits, scale_dtype):
    """Tables of other rows, of one type."""
    return [
        sj.quantize(make_rows(seed=k), bits, scale_dtype=scale_dtype) for k in (0, 1)
    ]


def make_rows(count=48, width=7, seed=0):
    """Rows of all magnitudes, on both sides of zero, some of equal numbers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, width)) * 10.0 ** rng.integers(-3, 3, (count, 1))
    x[::7] = x[::7, :1]
    x[3], x[4, 1:], x[5] = 0, 1.0, np.abs(x[5])
    return x.astype(F32)


# ------------------------------------------------------------------ Caffe2, in NumPy


def caffe2_loss(x, low, high, bits):
    low, levels = F32(F16(low)), F32((1 << bits) - 1)
    span = F32(high - low)
    scale = F32(1) if span == 0 else F32(F16(span / levels))
    total = F32(0)
    with np.errstate(all="ignore"):
        inverse = F32(1) / scale
        for v in x:
            code = max(F32(0), min(np.rint((v - low) * inverse), levels))
            error = F32(v - F32(F32(code * scale) + low))
            total = F32(total + F32(error * error))
    return np.sqrt(total)


def caffe2_search(x, low, high, bits):
    step = F32((high - low) / F32(200))
    least = F32(F32(168) * step)
    found = best = caffe2_loss(x, low, high, bits)
    now_low, now_high = low, high
    while F32(now_low + least) < now_high:
        left = caffe2_loss(x, F32(now_low + step), now_high, bits)
        right = caffe2_loss(x, now_low, F32(now_high - step), bits)
        if found < left and found < right and found < best:
            best, low, high = found, now_low, now_high
        if left < right:
            now_low, found = F32(now_low + step), left
        else:
            now_high, found = F32(now_high - step), right
    return low, high


def caffe2_bytes(rows, bits, scale_dtype, greedy=False, divides=False):
    """Rows of codes, scale and bias, as Caffe2's CPU operators write them."""
    levels, per = F32((1 << bits) - 1), 8 // bits
    out = []
    for x in rows:
        low, high = x.min(), x.max()
        if greedy:
            low, high = caffe2_search(x, low, high, bits)
        low = F32(scale_dtype(low))
        span = F32(high - low)
        if bits == 8 and scale_dtype is F32:
            scale, inverse = F32(span / levels), F32(255) / F32(span + F32(1e-8))
        else:
            scale = F32(scale_dtype(span / levels)) if span else F32(1)
            scale = scale if scale else F32(1)
            inverse = F32(1) / scale
        ratio = (x - low) / scale if divides else (x - low) * inverse
        codes = np.clip(np.rint(ratio), 0, levels).astype(np.uint8)
        codes = np.pad(codes, (0, -len(codes) % per)).reshape(-1, per)
        packed = (codes << (bits * np.arange(per))).sum(axis=1).astype(np.uint8)
        pair = np.array([scale, low], scale_dtype).view(np.uint8)
        out.append(np.concatenate([packed, pair]))
    return np.stack(out)


@all_kinds
@pytest.mark.usefixtures("cpu_backend")
def test_bytes_are_caffe2s(bits, scale_dtype):
    """Outside jit, and inside, since XLA turns divisions into products."""
    x = make_rows()
    want = caffe2_bytes(x, bits, scale_dtype)
    to_bytes = lambda x: sj.quantize(x, bits, scale_dtype=scale_dtype).to_fused()
    assert_same_bits(to_bytes(x), want)
    assert_same_bits(jax.jit(to_bytes)(x), want)
    again = sj.QuantizedTable.from_fused(
        want, bits, scale_dtype=scale_dtype, features=x.shape[1]
    )
    assert_same_bits(again.to_fused(), want)
    assert again.shape == x.shape and again.nbytes == want.size
    # Rows with a single byte of codes.
    size = 1 + 2 * np.dtype(scale_dtype).itemsize
    one = sj.QuantizedTable.from_fused(want[:, -size:], bits, scale_dtype=scale_dtype)
    assert one.shape == (len(x), 8 // bits)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 2])
def test_greedy_search_is_caffe2s(bits):
    x = make_rows(seed=1)
    want = caffe2_bytes(x, bits, F16, greedy=True, divides=True)
    got = sj.quantize(x, bits, search="greedy")
    assert_same_bits(got.to_fused(), want)
    plain = sj.quantize(x, bits)
    error = lambda t: np.linalg.norm(np.asarray(dequantize(t)) - x, axis=1)
    assert np.all(error(got) <= error(plain) * 1.01 + 1e-6)
    assert np.sum(error(got) < 0.99 * error(plain)) > 8  # it pays


@pytest.mark.slow
def test_float16_tables_are_divided():
    x = make_rows().astype(F16)
    want = caffe2_bytes(x.astype(F32), 4, F16, divides=True)
    table = sj.quantize(x, 4)
    assert_same_bits(table.to_fused(), want)
    assert table.dtype == F16 and table.dequantize().dtype == F16


# ------------------------------------------------------------------ numbers


@all_kinds
def test_errors_are_at_most_half_a_scale(bits, scale_dtype):
    x = make_rows(seed=2)
    table = sj.quantize(x, bits, scale_dtype=scale_dtype)
    scale = np.asarray(table.scale, F32)[:, None]
    # The rounding of the bias and of the scale to float16 add a little.
    slack = np.abs(x).max(1, keepdims=True) * (2e-3 if scale_dtype is F16 else 1e-5)
    slack += (1 << bits) * 2.0**-24 * (scale_dtype is F16)  # of small scales
    got = np.asarray(dequantize(table))
    assert np.all(np.abs(got - x) <= 0.5 * scale + slack)
    equal = x.max(1) == x.min(1)
    rtol = 1e-3 if scale_dtype is F16 else 0
    np.testing.assert_allclose(got[equal], x[equal], rtol=rtol)


@each_bits
def test_symmetric(bits, scale_dtype):
    x = make_rows(seed=3)
    x[:, 0] = 0
    table = sj.quantize(x, bits, scale_dtype=scale_dtype, symmetric=True)
    got, negated = (
        np.asarray(dequantize(t))
        for t in (table, sj.quantize(-x, bits, scale_dtype=scale_dtype, symmetric=True))
    )
    if jax.default_backend() == "cpu":
        assert not got[:, 0].any()  # exactly zero
    np.testing.assert_allclose(got, -negated, rtol=1e-4, atol=1e-7 * np.abs(x).max())
    scale = np.asarray(table.scale, F32)[:, None]
    slack = np.abs(x).max(1, keepdims=True) * 1e-3 + 1e-6
    assert np.all(np.abs(got - x) <= 0.5 * scale + slack)


@pytest.mark.slow
def test_rounding_at_random_is_unbiased():
    """1024 draws: every mean is within 5 of its standard deviations."""
    x = make_rows(20, 6, 4)
    one = lambda key: sj.quantize(x, 2, scale_dtype=F32, key=key).dequantize()
    keys = jax.random.split(jax.random.key(0), 1024)
    drawn = np.asarray(jax.jit(jax.vmap(one))(keys)).astype(np.float64)
    deviation = drawn.std(axis=0) / 32
    off = np.abs(drawn.mean(axis=0) - x)
    # If the expected number of draws of the rarer neighbour is below one, the
    # observed deviation is 0.
    gap = np.asarray(sj.quantize(x, 2, scale_dtype=F32).scale)[:, None]
    assert np.all(off <= 5 * deviation + 5e-3 * gap + 1e-6 * np.abs(x))
    assert np.median(deviation[gap[:, 0] > 0]) > 0
    assert all(len(np.unique(d)) <= 2 for d in drawn.reshape(1024, -1).T.round(9))


def test_rows_that_are_not_finite():
    x = make_rows(6)
    x[2, 1], x[4, 0] = np.nan, np.inf
    got = np.asarray(jax.jit(lambda x: sj.quantize(x, 4).dequantize())(x))
    bad = np.isnan(got).all(axis=1)
    assert bad.tolist() == [False, False, True, False, True, False]
    assert not np.isnan(got[~bad]).any()
    wide = sj.quantize(np.array([[-1e5, 0.0]], F32), 4, scale_dtype=F32)
    np.testing.assert_allclose(wide.get(0), [-1e5, 0.0], rtol=0, atol=1e-2)


def test_empty_and_odd_shapes():
    assert sj.quantize(np.ones((0, 3), F32)).dequantize().shape == (0, 3)
    cube = np.arange(24, dtype=F32).reshape(3, 2, 4)

    @jax.jit
    def run(cube):
        narrow, table = sj.quantize(np.ones((3, 0), F32), 4), sj.quantize(cube)
        empty = sj.lookup(sj.quantize(np.ones((0, 3), F32)), jnp.array([0]))
        return narrow, narrow.get(1), empty, table, table.scale, table.get([[2, 0]])

    narrow, row, empty, table, scale, rows = run(cube)
    assert row.shape == (0,) and narrow.nbytes == 12
    assert np.isnan(empty).all()
    assert table.shape == (3, 2, 4) and scale.shape == (3,)
    np.testing.assert_allclose(rows, cube[[2, 0]][None], atol=0.02)


# ------------------------------------------------------------------ reads

IDS = np.array([3, 11, 3, 0, 40, -1, 99, 7, 7, 20, 5, 12], np.int32)
BAGS = np.array([0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 5, 9], np.int32)
WEIGHTS = np.linspace(-1, 2, 12).astype(F32)


@jax.jit
def two_gets(table):
    return table.get(IDS), sj.lookup(table, IDS, mode="zero")


@jax.jit
def some_reads(table):
    padded = sj.embedding_bag(table, IDS.reshape(3, 4), mode="zero")
    bags = sj.embedding_bag(table, IDS, BAGS, 6, weights=WEIGHTS, mode="zero")
    return sj.lookup(table, IDS), padded, bags


@jax.jit
def all_reads(table):
    bag = functools.partial(sj.embedding_bag, table)
    padded = IDS.reshape(3, 4)
    csr = sj.SegmentTensor({"index": IDS, "value": WEIGHTS}, BAGS, 6)
    modes = "fill", "clip", "zero"
    outs = [sj.lookup(table, padded, mode=mode) for mode in modes]
    outs.append(sj.lookup(table, IDS, padding_id=3, max_norm=1.0))
    outs.append(bag(IDS, BAGS, 6, weights=WEIGHTS, combiner="mean", mode="zero"))
    outs.append(bag(padded, padding_id=7, combiner="sqrtn", mode="clip"))
    outs.append(bag(IDS, BAGS, 6))  # NaN in the bag that has an id out of range
    outs.append(bag(IDS, BAGS, 6, combiner="max", mode="zero"))
    long = np.tile(WEIGHTS, 3).reshape(2, 18)  # more than one block of columns
    outs.append(bag(np.tile(IDS, 3).reshape(2, 18), weights=long, mode="zero"))
    two = np.tile(np.stack([IDS, IDS[::-1]]), (1, 9))  # in pieces
    many = lambda ids: bag(ids, np.sort(np.tile(BAGS, 9)), 6, mode="zero")
    outs.append(jax.vmap(many)(two))
    outs.append(sj.dot(csr, table))
    first = jax.tree.map(lambda a: a[:6], table)
    outs.append(sj.dot(csr, first, transpose=True, num_columns=40).values)
    return outs


@each_bits
def test_reads_are_those_of_the_dequantized_table(bits, scale_dtype):
    table = sj.quantize(make_rows(seed=5), bits, scale_dtype=scale_dtype)
    reads = all_reads if bits == 4 else some_reads
    for a, b in zip(reads(table), reads(dequantize(table)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        scale = np.nanmax(np.abs(np.asarray(b))) if b.size else 0
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * (1 + scale))
    assert_same_bits(*two_gets(table))


@pytest.mark.slow
def test_dtype_of_reads():
    table = sj.quantize(jnp.asarray(make_rows(), jnp.bfloat16))
    assert table.dtype == jnp.bfloat16
    ids = jnp.arange(4).reshape(2, 2)
    assert sj.embedding_bag(table, ids).dtype == jnp.bfloat16
    wide = table.astype(jnp.float32)
    assert sj.embedding_bag(wide, ids).dtype == sj.lookup(wide, ids).dtype == F32
    assert_same_bits(wide.codes, table.codes)


def test_nothing_has_the_tables_size():
    """In the compiled programs: no floats [V, D], and few temporaries."""
    height, width, bits = 100_000, 64, 4
    rows = jax.eval_shape(
        lambda x: sj.quantize(x, bits), jax.ShapeDtypeStruct((height, width), F32)
    )
    layer = sj.nn.EmbeddingBag(height, width)
    ids = jax.ShapeDtypeStruct((64, 16), jnp.int32)
    flat = jax.ShapeDtypeStruct((1024,), jnp.int32)

    def serve(table, ids, flat):
        bags = sj.embedding_bag(table, flat, flat // 16, 64, indices_are_sorted=True)
        return sj.lookup(table, ids[:, 0]) + layer(table, ids) + bags

    compiled = compile_as_users_do(jax.jit(serve).lower(rows, ids, flat))
    text, memory = str(compiled.as_text()), compiled.memory_analysis()
    assert memory is not None
    assert f"u8[{height},{width * bits // 8}]" in text
    for kind in ("f32", "s32", "f16"):
        assert f"{kind}[{height},{width}]" not in text
    for kind in ("f32", "f16"):  # of the scales: only the words of the argument
        assert f"{kind}[{height},2]" not in text
    assert memory.temp_size_in_bytes < rows.nbytes / 4


# ------------------------------------------------------------------ forms


def test_a_tree_of_two_leaves():
    x = make_rows()
    table = sj.quantize(x, 4)
    assert repr(table) == (
        "QuantizedTable(float32[48,7], bits=4, scale_dtype=float16, nbytes=384)"
    )
    assert [str(p) for (p,), _ in jax.tree_util.tree_leaves_with_path(table)] == [
        ".codes",
        ".scale_bias",
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), table, table)
    assert stacked.shape == (2, 48, 7)
    _, scanned = jax.lax.scan(lambda _, t: (None, sj.lookup(t, 3)), None, stacked)
    assert_same_bits(scanned[1], table.get(3))
    moved = jax.device_put(table, jax.devices()[-1])
    assert_same_bits(moved.to_fused(), table.to_fused())
    again = pickle.loads(pickle.dumps(table))
    assert_same_bits(again.to_fused(), table.to_fused())
    assert hash(jax.tree.structure(table)) == hash(jax.tree.structure(moved))
    abstract = jax.eval_shape(lambda: table)
    assert "ShapeDtypeStruct" not in repr(abstract)
    assert abstract.scale_bias.shape == table.scale_bias.shape
    assert abstract.scale_bias.dtype == table.scale_bias.dtype
    repr(jax.tree.map(lambda _: None, table))


def test_unpack_is_caffe2s_fake_layout():
    x = make_rows()
    table = sj.quantize(x, 2)
    fake = table.unpack()
    assert fake.bits == 8 and fake.codes.max() == 3
    assert_same_bits(fake.dequantize(), table.dequantize())
    assert fake.to_fused().shape == (48, 7 + 8)


@pytest.mark.slow
def test_exported_and_read_again():
    table = sj.quantize(make_rows(), 4)
    fun = jax.jit(lambda t, ids: (sj.embedding_bag(t, ids), t))
    (batch,) = export.symbolic_shape("batch")
    ids = jax.ShapeDtypeStruct((batch, 4), jnp.int32)
    exported = export.export(fun, platforms=("cpu", "cuda", "tpu"))(table, ids)
    again = export.deserialize(exported.serialize())
    ids = jnp.arange(12).reshape(3, 4)
    (got, same), (want, _) = again.call(table, ids), fun(table, ids)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert repr(same) == repr(table)


@pytest.mark.slow
def test_layers_take_one():
    ids, st = jnp.array([[3, 1], [0, 0]]), sj.SegmentTensor.from_lists([[1, 2], [4]])
    values = {"index": st.values, "value": jnp.ones(st.values.shape)}
    csr = sj.SegmentTensor(values, st.segment_ids, st.num_segments)
    collection = sj.nn.EmbeddingCollection({"a": (5, 4), "b": (7, 4)})
    layers = {
        "one": (sj.nn.Embedding(9, 4), ids),
        "bag": (sj.nn.EmbeddingBag(9, 4, combiner="mean"), st),
        "all": (collection, {"a": ids, "b": st}),
        "dense": (sj.nn.Dense(4, in_features=9, use_bias=False), csr),
    }

    make = lambda layer, key: {k: sj.quantize(w) for k, w in layer.init(key).items()}

    @jax.jit
    def run(key):
        found = {}
        for name, (layer, inputs) in layers.items():
            small = make(layer, key)
            whole = {k: w.dequantize() for k, w in small.items()}
            found[name] = layer(small, inputs), layer(whole, inputs)
        return found, collection.get_table(make(collection, key), "b")

    found, table = run(jax.random.key(0))
    for name, (got, want) in found.items():
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6, err_msg=name)
    assert isinstance(table, sj.QuantizedTable) and table.shape == (7, 4)


# ------------------------------------------------------------------ trees

each = lambda f: lambda *tables: jax.tree.map(f, *tables)


MOVES = {
    "copy": lambda a, b: each(jnp.copy)(a),
    "filter by dtype": each(
        lambda x, y: x + y if jnp.issubdtype(x.dtype, jnp.inexact) else x
    ),
    "reverse": lambda a, b: each(lambda x: x[::-1][::-1])(a),
    "roll": lambda a, b: each(lambda x: jnp.roll(jnp.roll(x, 1, axis=0), -1, axis=0))(
        a
    ),
    "split": lambda a, b: each(lambda x: jnp.concatenate(jnp.split(x, 2)))(a),
    "stack": lambda a, b: each(lambda *xs: jnp.stack(xs)[0])(a, b),
    "where": each(lambda x, y: jnp.where(jnp.array(True), x, y)),
    "zeros": lambda a, b: jax.lax.cond(
        a.bits > 0, lambda: a, lambda: each(jnp.zeros_like)(a)
    ),
}


@pytest.mark.parametrize("bits, scale_dtype", [(4, F16), (8, F32)])
def test_moves_through_trees(bits, scale_dtype):
    a, b = two_tables(bits, scale_dtype)
    moves = lambda a, b: [f(a, b) for f in MOVES.values()]
    for results in moves(a, b), jax.jit(moves)(a, b):
        for name, got in zip(MOVES, results, strict=True):
            assert repr(got) == repr(a), name
            assert_same_bits(got.to_fused(), a.to_fused())
    assert not each(jnp.zeros_like)(a).dequantize().any()
    seen = []
    jax.jit(functools.partial(jax.debug.callback, seen.append))(a)
    jax.effects_barrier()
    assert_same_bits(seen[0].scale_bias, a.scale_bias)


@pytest.mark.parametrize("bits, scale_dtype", [(4, F16), (8, F32)])
def test_requantize(bits, scale_dtype):
    x, y = (make_rows(seed=k) for k in (6, 7))
    a, b = (sj.quantize(t, bits, scale_dtype=scale_dtype) for t in (x, y))
    assert_same_bits(a.requantize(x).to_fused(), a.to_fused())
    old, whole = np.asarray(dequantize(a)), np.asarray(dequantize(b))
    want = 0.75 * old + 0.25 * whole

    @jax.jit
    def run(a, b):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), a, a)
        of_stack = stacked.requantize(jnp.stack([want] * 2))
        last = jax.tree.map(lambda x: x[1], of_stack)
        return a.requantize(0.75 * a.dequantize() + 0.25 * b.dequantize()), last

    for got in (a.requantize(want), *run(a, b)):
        assert repr(got) == repr(a)
        # Half a scale, and the rounding of a float16 bias and scale.
        slack = np.abs(want).max(1) * (2e-3 if scale_dtype is F16 else 1e-5)
        slack += (1 << bits) * 2.0**-24 * (scale_dtype is F16)
        off = np.abs(np.asarray(dequantize(got)) - want).max(1)
        assert np.all(off <= 0.5 * np.asarray(got.scale, F32) + slack)
    # With a key, a step much smaller than a code takes effect in expectation.
    keys = jax.random.split(jax.random.key(0), 256)

    @jax.jit
    def move(a, keys):
        mean = 0.99 * a.dequantize() + 0.01 * whole
        at_random = jax.vmap(lambda key: a.requantize(mean, key).dequantize())
        return at_random(keys).mean(0), a.requantize(mean)

    moved, nearest = move(a, keys)
    want = 0.99 * old + 0.01 * whole
    gap = np.asarray(nearest.scale, F32)[:, None]
    slack = np.abs(want) * (2e-3 if scale_dtype is F16 else 1e-5) + 1e-4
    assert np.all(np.abs(moved - want) <= 0.2 * gap + slack)


def test_reads_of_float64_are_summed_in_float64(x64):
    """A float32 sum would lose the small numbers beside the large one."""
    x = np.array([[1e8, 1e8 + 255], [1.0, 2.0]]).repeat(4, axis=1)
    table = sj.quantize(x, 4, scale_dtype=F32)
    assert table.dtype == np.float64
    ids = np.array([[0, 1, 1, 1] * 8])
    weights = np.where(ids, 1 / 3, 1.0)
    bag = functools.partial(sj.embedding_bag, table)
    csr = sj.SegmentTensor({"index": ids[0], "value": weights[0]}, np.zeros(32, int), 1)

    @jax.jit
    def run():
        ragged = bag(ids[0], ids[0] * 0, 1, weights=weights[0])
        sums = bag(ids, weights=weights), ragged, sj.dot(csr, table)
        return table.unpack().codes, table.get(ids), sums

    codes, rows, sums = run()
    scale, bias = np.asarray(table.scale_bias, np.float64).T[..., None]
    want = scale * np.asarray(codes, np.float64) + bias
    assert_same_bits(table.dequantize(), want)
    assert_same_bits(rows, want[ids])
    total = np.einsum("bl,bld->bd", weights, want[ids])
    for got in sums:
        np.testing.assert_allclose(got, total, rtol=1e-14)


# ------------------------------------------------------------------ derivatives


@pytest.mark.slow
def test_gradients_beside_a_quantized_table():
    """Bag weights and dense parameters get the gradients of the dequantized table."""
    table = sj.quantize(make_rows(), 4)

    def loss(params, table):
        bags = sj.embedding_bag(table, IDS, BAGS, 6, weights=params["w"], mode="zero")
        return jnp.sum((bags @ params["m"]) ** 2)

    params = {"w": jnp.asarray(WEIGHTS), "m": jnp.ones((7, 2))}

    @jax.jit
    def run(params, table):
        ours = jax.grad(loss)(params, table), sj.grad(loss)(params, table)
        return ours, jax.grad(loss)(params, table.dequantize())

    both, want = run(params, table)
    for got in both:
        for name in params:
            scale = np.abs(want[name]).max()
            np.testing.assert_allclose(
                got[name], want[name], rtol=1e-4, atol=1e-5 * scale
            )


# ------------------------------------------------------------------ training


def gradients(params, ids, target):
    """Trains pulled rows; the loss is their distance from a target."""

    def loss(params):
        rows = sj.lookup(params["t"], ids, mode="zero")
        return jnp.sum((rows - target) ** 2)

    return sj.grad(loss)({**params, "t": params["t"].pull(ids)})


def step(tx, params, state, ids, target):
    """One step of a table."""
    updates, state = tx.update(gradients(params, ids, target), state, params)
    return optax.apply_updates(params, updates), state


def test_weights_at_ids_out_of_range_may_be_anything():
    q = sj.quantize(make_rows(50, 5), 4)
    ids = np.tile(np.array([3, 60, -70, 7], np.int32), 20)
    weights = np.where((ids >= 0) & (ids < 50), F32(0.5), F32(np.nan))
    bags = np.arange(5).repeat(16)

    @jax.jit
    def run(q):
        bag = functools.partial(sj.embedding_bag, q, mode="zero")
        fixed = bag(ids.reshape(5, 16), weights=weights.reshape(5, 16))
        ragged = bag(ids, bags, 5, weights=weights, indices_are_sorted=True)
        return fixed, ragged, 2 * (q.get(3) + q.get(7))

    *bags_of_both, want = run(q)
    for got in bags_of_both:
        np.testing.assert_allclose(got, np.tile(want, (5, 1)), rtol=1e-5, atol=1e-5)


def test_no_bags_and_no_rows():
    ids, bags = jnp.arange(40), jnp.zeros(40, int)
    q, empty = sj.quantize(make_rows(50, 5), 4), sj.quantize(np.ones((0, 5)), 4)
    run = jax.jit(sj.embedding_bag, static_argnums=3, static_argnames="mode")
    assert run(q, ids, bags, 0).shape == (0, 5)
    assert run(q, jnp.zeros((0, 5), int)).shape == (0, 5)
    for got in (
        run(empty, ids, bags, 2, mode="zero"),
        run(empty, ids.reshape(2, 20), mode="zero"),
    ):
        np.testing.assert_array_equal(got, np.zeros((2, 5)))


@pytest.mark.usefixtures("loose_promotion")  # optax's adam
def test_a_step_in_8_bits_touches_the_rows_read():
    x = make_rows(40, 8, 6)
    params, before = {"t": sj.quantize(x)}, sj.quantize(x)
    tx = sj.optim.rounding(sj.optim.lazy(optax.sgd(0.5)), 0)
    ids, target = jnp.array([7, 3, 7, 99]), np.full((4, 8), 100, F32)
    train = jax.jit(functools.partial(step, tx), donate_argnums=(0, 1))
    after, state = train(params, tx.init(params), ids, target)
    others = np.delete(np.arange(40), [3, 7])
    rest_of = jax.jit(lambda t: (t.codes[others], t.scale_bias[others]))
    for got, want in zip(rest_of(after["t"]), rest_of(before), strict=True):
        assert_same_bits(got, want)
    old, rows = (np.asarray(dequantize(t)) for t in (before, after["t"]))
    # The gradient is 2 (row - target) for each read, and row 7 is read twice.
    want = {3: np.full(8, 100.0), 7: 200 - old[7]}
    for row, new in want.items():
        scale = np.ptp(new) / 255
        np.testing.assert_allclose(rows[row], new, atol=scale + 1e-4)
    assert state.step == 1 and state.master == ()


def test_a_step_in_8_bits_of_a_table_without_rows():
    params = {"t": sj.quantize(np.ones((0, 8), F32))}
    tx = sj.optim.rounding(sj.optim.lazy(optax.sgd(0.5)), 0)
    ids, target = jnp.array([0, 3]), jnp.ones((2, 8))
    after, _ = jax.jit(functools.partial(step, tx))(
        params, tx.init(params), ids, target
    )
    assert jax.tree.structure(after) == jax.tree.structure(params)
    assert after["t"].codes.shape == params["t"].codes.shape


def test_updates_that_another_program_applies():
    """The sum with the scales is then computed, not known."""
    params = {"t": sj.quantize(make_rows(40, 8, 6), scale_dtype=F16)}
    tx = sj.optim.rounding(sj.optim.lazy(optax.sgd(0.5)), 0)
    ids, target = jnp.array([7, 3, 7, 99]), np.full((4, 8), 100, F32)
    state = tx.init(params)
    want, _ = jax.jit(functools.partial(step, tx))(params, state, ids, target)
    update = lambda p: tx.update(gradients(p, ids, target), state, p)[0]
    updates = jax.jit(update)(params)
    got = jax.jit(optax.apply_updates)(params, updates)
    assert_same_bits(got["t"].to_fused(), want["t"].to_fused())
    with pytest.raises(TypeError, match=r"jax\.jit\(optax\.apply_updates\)"):
        optax.apply_updates(params, updates)


@pytest.mark.slow
def test_rows_keep_their_scales_as_long_as_they_fit():
    """So numbers that did not change keep their codes, however they are rounded."""
    from sparsejax._rows import quantized

    table = sj.quantize(make_rows(20, 8, 7)[8:13])
    rows = np.asarray(dequantize(table))
    middle, outside = rows.copy(), rows.copy()
    middle[:, 3] = rows.mean(axis=1)
    outside[:, 3] = 2 * rows.max(axis=1) + 1
    small = rows.mean(axis=1, keepdims=True) + 0.3 * (rows - rows.mean())
    requantize = jax.jit(quantized.requantize, static_argnums=3)
    for new, fits in ((middle, True), (outside, False), (small, False)):
        codes, pair = requantize(new, table.scale_bias, jax.random.key(0), 8)
        assert np.array_equal(pair, table.scale_bias) == fits
        again = sj.QuantizedTable(codes, pair, 8, (8,), table.dtype)
        off = np.abs(np.asarray(dequantize(again)) - new)
        assert np.all(off <= np.asarray(again.scale)[:, None] * 1.001)
        if fits:
            same = np.delete(np.arange(8), 3)
            assert_same_bits(*(np.asarray(x)[:, same] for x in (codes, table.codes)))


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
def test_training_in_8_bits():
    """Random rounding keeps the effect of updates smaller than half a code."""
    rng = np.random.default_rng(0)
    height, width = 400, 8
    target = jnp.asarray(rng.uniform(-1, 1, (height, width)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, height, (1500, 64)))
    start = sj.quantize(jnp.asarray(rng.uniform(-1, 1, (height, width)), jnp.float32))

    def train(tx, table):
        one = lambda c, ids: (step(tx, c[0], c[1], ids, target[ids]), None)
        params = {"t": table}
        carry = params, tx.init(params)
        (params, state), _ = jax.jit(lambda c: jax.lax.scan(one, c, ids))(carry)
        error = jnp.abs(params["t"].dequantize() - target).mean()
        return float(error), params["t"], state

    sgd = sj.optim.lazy(optax.sgd(2e-3))  # updates of up to 4e-3: half a code
    at_random, table, _ = train(sj.optim.rounding(sgd, 0), start)
    assert table.codes.dtype == jnp.uint8 and table.bits == 8
    float32, _, state = train(sj.optim.rounding(sgd, master=True), start)
    assert state.master["t"].shape == start.shape
    adam, _, state = train(sj.optim.rounding(sj.optim.lazy(optax.adam(1e-2)), 0), start)
    assert state.inner_state[0].mu["t"].shape == start.shape
    assert at_random < 1.1 * float32 + 0.01
    assert adam < 0.02


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
def test_a_step_in_8_bits_is_in_place():
    height, width = 200_000, 64
    params = {
        "t": jax.eval_shape(sj.quantize, jax.ShapeDtypeStruct((height, width), F32))
    }
    tx = sj.optim.rounding(sj.optim.rowwise_adagrad(0.1), 0)
    state = jax.eval_shape(tx.init, params)
    ids = jax.ShapeDtypeStruct((256,), jnp.int32)
    target = jax.ShapeDtypeStruct((256, width), F32)
    train = jax.jit(functools.partial(step, tx), donate_argnums=(0, 1))
    compiled = compile_as_users_do(train.lower(params, state, ids, target))
    text = compiled.as_text()
    assert f"f32[{height},{width}]" not in text
    assert f"f32[{height},2]" not in text
    assert_written_in_place(compiled, [params["t"].codes], params["t"].nbytes / 10)
    assert compiled.memory_analysis().alias_size_in_bytes >= params["t"].nbytes
