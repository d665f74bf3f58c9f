"""Rows and gradients sent in 16 bits: values, sums at the owner, bytes, training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import sparsejax as sj
from helpers import assert_same_bits, assert_trees_close, whole
from one_device import mesh_of, place, table_of
from sparsejax import _compat


pytestmark = [pytest.mark.usefixtures("eight_devices", "loose_promotion")]
BF16 = jnp.bfloat16
V, D = 203, 8
MESHES = {
    "8 devices": ((8,), ("x",), "x", AxisType.Auto),
    "2 replicas of 4": ((2, 4), ("data", "x"), "x", AxisType.Auto),
    "8 replicas": ((8, 1), ("data", "x"), "x", AxisType.Auto),
    "Explicit": ((8,), ("x",), "x", AxisType.Explicit),
}


def on_mesh(name, table, **options):
    shape, names, axis, kind = MESHES[name]
    mesh = mesh_of(shape, names, kind)
    table = sj.parallel.shard_rows(table, mesh, axis, **options)
    return table, lambda x: place(mesh, x, names)


def rounded(x):
    return x.astype(BF16).astype(x.dtype)


# ------------------------------------------------------------------ values


def loss_fn(table, ids):
    return jnp.sum(jnp.sin(sj.lookup(table, ids)) * 3)


_dense_gradient = jax.jit(jax.grad(loss_fn))


@pytest.mark.parametrize(
    ("mesh", "capacity"),
    [
        ("2 replicas of 4", 2),  # many rounds
        ("8 replicas", None),  # one
        ("Explicit", 2),
    ],
)
def test_rows_and_gradients_are_rounded_once(mesh, capacity):
    weights, ids = table_of(V, D), np.random.default_rng(1).integers(0, V, 64)
    table, split = on_mesh(mesh, weights, wire_dtype=BF16, capacity=capacity)

    @jax.jit
    def step(table, ids):
        grad = sj.grad(loss_fn)(table, ids)
        tx = sj.optim.lazy(optax.sgd(1.0))
        updates, _ = tx.update(grad, tx.init(table), table)
        after = optax.apply_updates(table, updates)
        return sj.lookup(table, ids), grad.map(lambda g: g.coalesce()), after

    found, merged, after = step(table, split(ids))
    # With one owner, no row is sent.
    read = weights if mesh == "8 replicas" else rounded(weights)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, read[ids])
    expected = _dense_gradient(jnp.asarray(read), ids)
    assert merged.dtype == after.dtype == jnp.float32
    same, merged, after = map(np.asarray, whole((table, merged, after)))
    np.testing.assert_array_equal(same, weights)  # itself not rounded
    # Each device's sum is rounded by at most 2^-8 of itself.
    np.testing.assert_allclose(merged, expected, rtol=2**-8, atol=2**-8)
    assert np.abs(merged - expected).max() > 0
    # The sum that was applied is the same one, however many rounds it took.
    np.testing.assert_array_equal(after, weights - merged)


@pytest.mark.parametrize("mesh", ["2 replicas of 4", "8 replicas"])
def test_owners_add_in_float32(mesh):
    """Device 0 adds 512, the others 1 each: in bfloat16 the sum would stay 512.

    A device adds its own gradients before it sends them: 512 are 512 ones.
    """
    table, split = on_mesh(mesh, np.zeros((V, D), np.float32), wire_dtype=BF16)
    ids = np.full((8, 512), -1)
    ids[0], ids[1:, 0] = 7, 7
    assert BF16(512) + BF16(1) == BF16(512)
    # The last is of the transpose of the read, without rows.
    read = lambda t, ids: jnp.sum(sj.lookup(t, ids, mode="zero"))

    @jax.jit
    def step(t, ids):
        merged = sj.grad(read)(t, ids).map(lambda g: g.coalesce())
        after = optax.apply_updates(t, -sj.grad(read)(t, ids))
        return after, merged, jax.grad(read)(t, ids)

    found = whole(step(table, split(ids.reshape(-1))))
    for x, expected in zip(found, (-519.0, 519.0, 519.0)):
        np.testing.assert_array_equal(np.asarray(x)[7], np.full(D, expected))


def test_float64_and_bfloat16_tables():
    """A float64 is summed in float64; a bfloat16's gradient is sent as it is."""
    ids = np.full(8, 5, np.int32)
    scale = np.array([2.0**26] + [1.0] * 7)
    with _compat.enable_x64(True):
        weights = np.random.default_rng(0).normal(size=(V, D))
        table, split = on_mesh("8 devices", weights, wire_dtype=BF16)
        assert table.dtype == jnp.float64
        found = jax.jit(sj.lookup)(table, split(np.arange(8)))
        np.testing.assert_array_equal(found, rounded(weights)[:8])
        loss_fn = lambda t: jnp.sum(sj.lookup(t, split(ids)) * split(scale)[:, None])
        merged = jax.jit(lambda t: sj.grad(loss_fn)(t).map(lambda g: g.coalesce()))
        assert whole(merged(table))[5, 0] == 2.0**26 + 7  # 2^26 in float32
    weights = table_of(V, D).astype(BF16)
    table, split = on_mesh("8 devices", weights, wire_dtype=BF16)
    found = jax.jit(sj.lookup)(table, split(np.arange(8)))
    assert_same_bits(found, weights[:8])
    loss_fn = lambda t: jnp.sum(sj.lookup(t, split(ids)).astype(jnp.float32))
    step = jax.jit(lambda t: sj.grad(loss_fn)(t).map(lambda g: g.coalesce()))
    assert whole(step(table))[5, 0] == 8
    sent = sj.viz.wire_bytes(step.lower(table).compile()).collectives
    assert {c.shape.split("[")[0] for c in sent if c.kind == "all-to-all"} == {
        "8 x s32",
        "8 x u16",
    }


@pytest.mark.parametrize("how", ["vmap", "second order"])
def test_inside_of_transformations(how):
    weights, ids = table_of(V, D), np.random.default_rng(1).integers(0, V, (4, 16))
    table, _ = on_mesh("8 devices", weights, wire_dtype=BF16)
    inner = lambda t, ids: jnp.sum(jnp.sin(sj.lookup(t, ids)) ** 2)
    loss_fn = lambda t: jnp.sum(jax.vmap(lambda ids: inner(t, ids))(ids))
    if how == "second order":
        scaled = lambda t: jax.jvp(lambda a: inner(t * a, ids[0]), (1.0,), (1.0,))[1]
        found, expected = jax.jit(jax.grad(scaled))(table), jax.grad(scaled)
        expected = jax.jit(expected)(jnp.asarray(weights))
    else:
        found = jax.jit(sj.grad(loss_fn))(table)
        expected = jax.jit(jax.grad(loss_fn))(jnp.asarray(weights))
    np.testing.assert_allclose(whole(found), expected, rtol=0.02, atol=0.05)


# ------------------------------------------------------------------ bags at the owner


def test_table_wise():
    axis, count = ("host", "x"), 2
    mesh = mesh_of((count, 4), axis)
    heights = (61, 40, 23)
    bag = functools.partial(sj.nn.EmbeddingBag, features=D)
    kinds = zip(heights, ("sum", "mean", "sqrtn"))
    layer = sj.nn.EmbeddingCollection(
        {str(k): bag(n, combiner=kind) for k, (n, kind) in enumerate(kinds)}
    )
    rng = np.random.default_rng(0)
    ((name, spec),) = jax.eval_shape(lambda: layer.init(jax.random.key(0))).items()
    stack = rng.normal(0, D**-0.5, spec.shape).astype(spec.dtype)
    ids = {str(k): rng.integers(0, n, (16, 3)) for k, n in enumerate(heights)}
    layout = sj.parallel.TableWise(heights, tuple(k % count for k in range(3)), count)

    def loss_fn(table):
        out = layer({name: table}, ids)
        return sum(jnp.sum(jnp.sin(3 * x)) for x in out.values()), out

    grad = sj.value_and_grad(loss_fn, has_aux=True, tables=True)

    @jax.jit
    def step(table):
        (_, out), g = grad(table)
        return out, g.map(lambda g: g.coalesce())

    def run(wire):
        table = sj.parallel.shard_rows(
            stack, mesh, axis, layout=layout, wire_dtype=wire
        )
        compiled = step.lower(table).compile()
        out, g = compiled(table)
        return out, whole(g), sj.viz.wire_bytes(compiled)

    (out, g, sent), (wide, wide_g, wide_sent) = run(BF16), run(None)
    assert_trees_close(out, wide, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(g, wide_g, rtol=0.02, atol=0.1)
    assert np.abs(g - wide_g).max() > 0
    in_16_bits = [c for c in sent.collectives if "u16" in c.shape]
    floats = sum(c.total for c in wide_sent.collectives if "f32[]" not in c.shape)
    floats -= sum(c.total for c in wide_sent.collectives if "s32" in c.shape)
    assert sum(c.total for c in in_16_bits) == floats // 2
    # Nothing but the loss is still sent in float32.
    assert {c.shape for c in sent.collectives if "f32" in c.shape} <= {"f32[]"}


# ------------------------------------------------------------------ bytes


def test_bytes_of_a_step(mesh="2 replicas of 4"):
    """In the compiled program the bytes of rows are halved, the bytes of ids stay."""

    def sent(wire_dtype):
        spec = jax.ShapeDtypeStruct((100_003, 32), jnp.float32)
        table, split = on_mesh(mesh, spec, wire_dtype=wire_dtype, capacity=80)
        loss_fn = lambda t, ids: jnp.sum(sj.lookup(t, ids, mode="zero") ** 2)
        step = lambda t, ids: optax.apply_updates(t, -sj.grad(loss_fn)(t, ids))
        ids = split(np.zeros(4_096, np.int32))
        compiled = jax.jit(step).lower(table, ids).compile()
        metrics = jax.jit(sj.parallel.exchange_metrics)(table, ids)
        return sj.viz.wire_bytes(compiled), int(metrics.bytes)

    def by_dtype(found):
        kinds = ("f32", "u16", "s32")
        of = lambda kind: sum(c.total for c in found.collectives if kind in c.shape)
        return dict(zip(kinds, map(of, kinds)))

    (wide, lookup), (narrow, narrow_lookup) = sent(None), sent(BF16)
    wide, narrow = by_dtype(wide), by_dtype(narrow)
    loss = wide["f32"] - 2 * narrow["u16"]
    assert narrow["u16"] > 50_000 and 0 <= loss == narrow["f32"] < 100
    assert wide["s32"] == narrow["s32"] and wide["u16"] == 0
    assert lookup == (4 - 1) * 80 * (4 + 32 * 4)
    assert narrow_lookup == (4 - 1) * 80 * (4 + 32 * 2)


def test_plan():
    """Other numbers are sent; apply makes the tables that it counted."""
    spec = lambda width, dtype: jax.ShapeDtypeStruct((50_003, width), dtype)
    tables = {"float": spec(32, jnp.float32), "half": spec(16, jnp.float16)}
    ids = dict.fromkeys(tables, jax.ShapeDtypeStruct((2_048,), jnp.int32))
    plan = functools.partial(
        sj.parallel.plan, tables, mesh_of(8), ids, stacks={"float": (20_000, 30_003)}
    )
    narrow, wide = plan(wire_dtype=BF16), plan()
    assert narrow.tables[1] == wide.tables[1] and narrow.tables[1].wire_dtype is None
    (table, _), (before, _) = narrow.tables, wide.tables
    bags = 2_048 // 8 // 2
    assert before.costs["table-wise"].wire == 7 * bags * (4 + 2 * 32 * 4)
    saved = {
        "row-sharded": 2 * 7 * table.capacity * 32 * 2,
        "table-wise": 7 * bags * 2 * 32 * 2,
    }
    for layout, cost in table.costs.items():
        assert cost.wire == before.costs[layout].wire - saved.get(layout, 0)
        assert cost.memory == before.costs[layout].memory
    placed = narrow.apply(tables)
    assert placed["float"].wire_dtype == BF16 and placed["half"].wire_dtype is None


# ------------------------------------------------------------------ training


def train_two_towers(batches, sizes, wire_dtype):
    """The losses of in-batch softmax, and the bytes of exchanges of a step."""
    mesh = mesh_of((8,), ("x",), AxisType.Auto)
    draw = lambda seed, n: 0.1 * jax.random.normal(jax.random.key(seed), (n, D))
    params = {
        name: sj.parallel.shard_rows(draw(k, n), mesh, "x", wire_dtype=wire_dtype)
        for k, (name, n) in enumerate(sizes.items())
    }

    def loss_fn(params, batch):
        user, item = (sj.lookup(params[name], batch[name]) for name in sizes)
        ids = batch["item"]
        return jnp.mean(sj.losses.in_batch_softmax_loss(user, item, candidate_ids=ids))

    tx = sj.optim.lazy(optax.adam(0.01))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = sj.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    batches = [place(mesh, batch, "x") for batch in batches]
    state, losses = tx.init(params), []
    compiled = step.lower(params, state, batches[0]).compile()
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return np.array(losses), sj.viz.wire_bytes(compiled).by_kind["all-to-all"]


@pytest.mark.slow
def test_trains_to_the_loss_of_float32():
    users, more = np.random.default_rng(0).zipf(1.3, (2, 4_000))
    pairs = np.stack([users % 301, (users + more % 8) % 211], axis=1).astype(np.int32)
    some = np.random.default_rng(0).integers(0, len(pairs), (40, 64))
    batches = [{"user": x[:, 0], "item": x[:, 1]} for x in pairs[some]]
    sizes = {"user": 301, "item": 211}
    wide, sent = train_two_towers(batches, sizes, None)
    narrow, sent_in_16_bits = train_two_towers(batches, sizes, BF16)
    assert wide[-10:].mean() < 0.97 * wide[0]  # it learns
    np.testing.assert_allclose(narrow[-10:].mean(), wide[-10:].mean(), rtol=1e-3)
    assert (narrow != wide).any() and sent_in_16_bits < 0.75 * sent
