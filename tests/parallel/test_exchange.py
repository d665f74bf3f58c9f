"""What a step over devices sends and holds, and rows that are sent in 16 bits.

Bytes and memory are read off the compiled program.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from helpers import assert_same_bits, assert_trees_close, whole
from one_device import assert_in_place, mesh_of, place, step_of, table_of
from sparsejax import _compat


# Optax's Adam needs loose promotion.
pytestmark = pytest.mark.usefixtures("eight_devices", "loose_promotion")


# ------------------------------------------------------------------ cost of a step

HEIGHT, DIM, BATCH = 100_003, 32, 20_480


def _loss(params, ids):
    rows = sj.lookup(params["table"], ids)
    return jnp.mean(jnp.sum(rows * params["w"], axis=1) ** 2)


def _step_and_arguments(tx, shards, capacity=None, batch=BATCH):
    mesh = mesh_of(shards)
    abstract = lambda shape, dtype, *parts: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, P(*parts))
    )
    spec = jax.ShapeDtypeStruct((HEIGHT, DIM), jnp.float32)
    table = sj.parallel.shard_rows(spec, mesh, "x", capacity=capacity)
    params = {"table": table, "w": abstract((DIM,), jnp.float32)}
    state = jax.tree.map(
        lambda x: abstract(x.shape, x.dtype, *(("x",) if x.ndim == 2 else ())),
        jax.eval_shape(tx.init, params),
    )
    step = jax.jit(step_of(_loss, tx), donate_argnums=(0, 1))
    return table, step, (params, state, abstract((batch,), jnp.int32, "x"))


def _lowered(*options):
    table, step, args = _step_and_arguments(*options)
    return table, step.lower(*args)


@functools.cache
def _compiled(shards, batch=BATCH) -> Any:
    tx = sj.optim.lazy(optax.adam(1e-3))
    table, lowered = _lowered(tx, shards, None, batch)
    return table, lowered.compile()


def test_in_place_and_less_with_each_device():
    owned, held, made = [], [], []
    for shards in (2, 8):
        table, program = _compiled(shards)
        rows, memory = table.rows_per_shard, program.memory_analysis()
        if shards == 2:  # a part has more rows than the batch
            # Weights and both moments are handed over, not copied ...
            assert memory.alias_size_in_bytes >= 3 * 4 * rows * DIM
            # ... and nothing else has the shape of a part.
            assert_in_place(program.as_text(), table)
        owned.append(rows)
        held.append(memory.argument_size_in_bytes)
        made.append(memory.temp_size_in_bytes)
    assert owned == [50_002, 12_501]
    assert held[0] > 3.6 * held[1]
    # The ids' duplicates are fewer in smaller parts of a batch.
    assert made[0] > 3 * made[1]


def test_owners_hold_what_a_round_carries():
    """Not all rows that could arrive, from however many devices."""
    temporaries = lambda *x: _compiled(*x)[1].memory_analysis().temp_size_in_bytes
    two, eight = temporaries(2), temporaries(8)
    assert two > 3.6 * eight
    as_many_ids = temporaries(2, BATCH // 4)
    assert eight < 1.1 * as_many_ids
    # A device reads, merges, sends and receives arrays with a row for each id.
    assert eight < 7 * 4 * DIM * BATCH // 8


@pytest.mark.window
def test_lowers_for_other_platforms():
    tx = sj.optim.lazy(optax.adagrad(0.1))
    table, step, args = _step_and_arguments(tx, 4, 500)
    exported = export.export(step, platforms=("cpu", "cuda", "tpu"))(*args)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert exported.nr_devices == table.num_shards == 4
    assert "all_to_all" in exported.mlir_module()


@pytest.mark.parametrize(
    "name, shards, batch, exchanges",
    [
        # Ids and rows to read them, ids and rows of the gradient.
        ("adam", 2, 64, 4),
        # A norm first, and few rows: they are held.
        ("clip, adam", 4, 16, 4),
        # A norm first, and many rows: sent for the norm, and sent to be applied.
        ("clip, adam", 2, 64, 6),
    ],
)
def test_how_often_rows_are_sent(name, shards, batch, exchanges):
    clip = [optax.clip_by_global_norm(0.5)] if name == "clip, adam" else []
    tx = sj.optim.lazy(optax.chain(*clip, optax.adam(0.1)))
    text = str(_lowered(tx, shards, 1, batch)[1].as_text())
    assert text.count("stablehlo.all_to_all") == exchanges


# ------------------------------------------------------------------ in 16 bits

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
    table = sj.parallel.shard_rows(table, mesh, axis, wire_dtype=BF16, **options)
    return table, lambda x: place(mesh, x, names)


def rounded(x):
    return x.astype(BF16).astype(x.dtype)


def loss_of_rows(table, ids):
    return jnp.sum(jnp.sin(sj.lookup(table, ids)) * 3)


gradient_of_rows = jax.jit(jax.grad(loss_of_rows))


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
    table, split = on_mesh(mesh, weights, capacity=capacity)

    @jax.jit
    def step(table, ids):
        grad = sj.grad(loss_of_rows)(table, ids)
        tx = sj.optim.lazy(optax.sgd(1.0))
        updates, _ = tx.update(grad, tx.init(table), table)
        after = optax.apply_updates(table, updates)
        return sj.lookup(table, ids), grad.map(lambda g: g.coalesce()), after

    found, merged, after = step(table, split(ids))
    # With one owner, no row is sent.
    read = weights if mesh == "8 replicas" else rounded(weights)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, read[ids])
    expected = gradient_of_rows(read, ids)
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
    table, split = on_mesh(mesh, np.zeros((V, D), np.float32))
    ids = np.full((8, 512), -1)
    ids[0], ids[1:, 0] = 7, 7
    assert BF16(512) + BF16(1) == BF16(512)
    read = lambda t, ids: jnp.sum(sj.lookup(t, ids, mode="zero"))

    @jax.jit
    def step(t, ids):
        grad = sj.grad(read)(t, ids)
        merged, after = grad.map(lambda g: g.coalesce()), optax.apply_updates(t, -grad)
        # The last is of the transpose of the read, without rows.
        return after, merged, jax.grad(read)(t, ids)

    found = whole(step(table, split(ids.reshape(-1))))
    for x, expected in zip(found, (-519.0, 519.0, 519.0)):
        np.testing.assert_array_equal(np.asarray(x)[7], np.full(D, expected))


@pytest.mark.slow
def test_float64_and_bfloat16_tables():
    """A float64 is summed in float64; a bfloat16's gradient is sent as it is."""
    ids = np.full(8, 5, np.int32)
    scale = np.array([2.0**26] + [1.0] * 7)
    with _compat.enable_x64(True):
        weights = np.random.default_rng(0).normal(size=(V, D))
        table, split = on_mesh("8 devices", weights)
        assert table.dtype == jnp.float64
        found = jax.jit(sj.lookup)(table, split(np.arange(8)))
        np.testing.assert_array_equal(found, rounded(weights)[:8])
        loss_fn = lambda t: jnp.sum(sj.lookup(t, split(ids)) * split(scale)[:, None])
        merged = jax.jit(lambda t: sj.grad(loss_fn)(t).map(lambda g: g.coalesce()))
        assert whole(merged(table))[5, 0] == 2.0**26 + 7  # 2^26 in float32
    weights = table_of(V, D).astype(BF16)
    table, split = on_mesh("8 devices", weights)
    found = jax.jit(sj.lookup)(table, split(np.arange(8)))
    assert_same_bits(found, weights[:8])
    loss_fn = lambda t: jnp.sum(sj.lookup(t, split(ids)).astype(jnp.float32))
    step = jax.jit(lambda t: sj.grad(loss_fn)(t).map(lambda g: g.coalesce()))
    compiled = step.lower(table).compile()
    assert whole(compiled(table))[5, 0] == 8
    sent = sj.viz.wire_bytes(compiled).collectives
    sent = {c.shape.split("[")[0] for c in sent if c.kind == "all-to-all"}
    assert sent == {"8 x s32", "8 x u16"}


def test_under_vmap_and_the_second_derivative():
    weights, ids = table_of(V, D), np.random.default_rng(1).integers(0, V, (4, 16))
    table, _ = on_mesh("8 devices", weights)
    inner = lambda t, ids: jnp.sum(jnp.sin(sj.lookup(t, ids)) ** 2)
    mapped = lambda t: jnp.sum(jax.vmap(lambda ids: inner(t, ids))(ids))
    scaled = lambda t: jax.jvp(lambda a: inner(t * a, ids[0]), (1.0,), (1.0,))[1]
    found = jax.jit(lambda t: (sj.grad(mapped)(t), jax.grad(scaled)(t)))(table)
    dense = jax.jit(lambda t: (jax.grad(mapped)(t), jax.grad(scaled)(t)))
    for pair in zip(whole(found), dense(jnp.asarray(weights))):
        np.testing.assert_allclose(*pair, rtol=0.02, atol=0.05)


def bytes_of(kind, wire):
    """The bytes of a program that are of a type of numbers."""
    return sum(c.total for c in wire.collectives if kind in c.shape)


def test_sums_of_bags():
    mesh, heights = mesh_of((2, 4), ("host", "x")), (61, 40, 23)
    bag = functools.partial(sj.nn.EmbeddingBag, features=D)
    kinds = zip(heights, ("sum", "mean", "sqrtn"))
    layer = sj.nn.EmbeddingCollection(
        {str(k): bag(n, combiner=kind) for k, (n, kind) in enumerate(kinds)}
    )
    ((name, spec),) = jax.eval_shape(lambda: layer.init(jax.random.key(0))).items()
    rng = np.random.default_rng(0)
    stack = rng.normal(0, D**-0.5, spec.shape).astype(spec.dtype)
    ids = {str(k): rng.integers(0, n, (16, 3)) for k, n in enumerate(heights)}
    layout = sj.parallel.TableWise(heights, (0, 1, 0), 2)

    def loss_fn(table):
        out = layer({name: table}, ids)
        return sum(jnp.sum(jnp.sin(3 * x)) for x in out.values()), out

    @jax.jit
    def step(table):
        grad = sj.value_and_grad(loss_fn, has_aux=True, tables=True)
        (_, out), g = grad(table)
        return out, g.map(lambda g: g.coalesce())

    def run(wire):
        options: Any = dict(layout=layout, wire_dtype=wire)
        table = sj.parallel.shard_rows(stack, mesh, ("host", "x"), **options)
        compiled = step.lower(table).compile()
        out, g = compiled(table)
        return out, whole(g), sj.viz.wire_bytes(compiled)

    (out, g, sent), (wide, wide_g, wide_sent) = run(BF16), run(None)
    assert_trees_close(out, wide, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(g, wide_g, rtol=0.02, atol=0.1)
    assert np.abs(g - wide_g).max() > 0
    loss = bytes_of("f32", sent)  # Nothing else is still sent in float32.
    assert loss < 100
    assert bytes_of("f32", wide_sent) - loss == 2 * bytes_of("u16", sent) > 0
