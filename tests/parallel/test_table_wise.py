"""Stacks whose tables lie on different devices, against the same stack on one device.

The oracle is the same collection and optimizer without a mesh.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from helpers import assert_trees_close, drawn, whole
from one_device import assert_at_owners, assert_in_place, mesh_of, run, step_of


pytestmark = [pytest.mark.usefixtures("eight_devices", "loose_promotion")]
HEIGHTS = {"user": 61, "item": 40, "day": 7, "shop": 23, "one": 1}
D, BATCH = 4, 16


def collection(**options):
    bag = functools.partial(sj.nn.EmbeddingBag, features=D, padding_id=-1)
    tables = {
        "user": sj.nn.EmbeddingBag(61, D, mode="zero"),
        "item": bag(40, combiner="sum", **options),
        "day": bag(7, combiner="mean", **options),
        "shop": bag(23, combiner="sqrtn", **options),
        "one": sj.nn.Embedding(1, D),
    }
    features = {
        "user": "user",
        "bought": "item",
        "seen": "item",
        "day": "day",
        "shop": "shop",
        "one": "one",
    }
    return sj.nn.EmbeddingCollection(tables, features)


def make_batch(seed, batch=BATCH):
    """Bags with padding, ids of one example, duplicates, and weights."""
    rng = np.random.default_rng(seed)
    draw = lambda height, *shape: rng.integers(-1, height, (batch, *shape), np.int32)
    ids = {
        "user": draw(61) + (rng.random(batch) < 0.2) * np.int32(1000),
        "bought": draw(40, 3),
        "seen": draw(40, 3),
        "day": draw(7, 3),
        "shop": draw(23, 2),
        "one": np.zeros(batch, np.int32),
    }
    weights = {"shop": rng.normal(size=(batch, 2)).astype(np.float32)}
    return {"ids": ids, "weights": weights, "y": rng.normal(size=batch).astype("f")}


def make_loss(layer):
    def loss_fn(params, batch):
        out = layer(params["tables"], batch["ids"], batch["weights"])
        rows = jnp.concatenate([out[name] for name in sorted(out)], axis=1)
        scores = jnp.sum(jnp.tanh(rows) * params["w"], axis=1)
        return jnp.mean((scores - batch["y"]) ** 2)

    return loss_fn


def init(layer):
    """The parameters of `layer.init` in shape, with numbers of NumPy."""
    return drawn(jax.eval_shape(lambda: layer.init(jax.random.key(0))), seed=7)


def held(stack, heights, groups, num_groups=8):
    """The stack over that many devices, each table on those of its group."""
    layout = sj.parallel.TableWise(heights, groups, num_groups)
    return sj.parallel.shard_rows(stack, mesh_of(num_groups), "x", layout=layout)


def make_params(layer):
    w = np.linspace(-1.0, 1.0, 6 * D, dtype=np.float32)
    return {"tables": init(layer), "w": jnp.array(w)}


def make_step(loss_fn, tx) -> Any:
    # Even if a batch reads more than a quarter of the stack.
    sparse = {"tables": True, "w": False}
    value_and_grad = functools.partial(sj.value_and_grad, tables=sparse)
    return jax.jit(step_of(loss_fn, tx, value_and_grad), donate_argnums=(0, 1))


def everywhere(tree):
    """Puts what is not of a table on all devices of the table's mesh."""
    is_table = lambda x: isinstance(x, sj.parallel.ShardedTable)
    leaves = jax.tree.leaves(tree, is_leaf=is_table)
    meshes = [x.mesh for x in leaves if is_table(x)]
    if not meshes:
        return tree

    def put(x):
        if is_table(x):
            return x
        # Over Explicit axes, JAX's results have a part for each axis.
        spec = P(*[None] * x.ndim) if meshes[0].are_all_axes_explicit else P()
        return jax.device_put(x, NamedSharding(meshes[0], spec))

    return jax.tree.map(put, tree, is_leaf=is_table)


def train(layer, tx, place: Any = lambda x: x, split: Any = lambda x: x):
    params, step = make_params(layer), make_step(make_loss(layer), tx)
    params["tables"] = {k: place(x) for k, x in params["tables"].items()}
    params, state = everywhere((params, tx.init(params)))
    batches = [(split(make_batch(seed)),) for seed in range(3)]
    params, _, losses = run(step, params, state, batches)
    assert step._cache_size() == 1
    return whole(params), losses


@functools.cache
def train_on_one_device(optimizer):
    return train(collection(), sj.optim.lazy(OPTIMIZERS[optimizer]()))


MESHES = {  # shape of the mesh, its axes, the axes of the table, number of groups
    "8 devices": ((8,), ("x",), "x", 8),
    "2 hosts of 4": ((2, 4), ("host", "x"), ("host", "x"), 2),
    "2 replicas of 4": ((2, 4), ("data", "x"), "x", 4),
    "one group": ((4,), ("x",), "x", 1),
}


def on_mesh(name, kind=AxisType.Auto):
    """Functions that put tables and batches on a mesh."""
    shape, names, axis, groups = MESHES[name]
    mesh = mesh_of(shape, names, kind)
    layout = sj.parallel.TableWise(
        tuple(HEIGHTS.values()), tuple(k % groups for k in range(5)), groups
    )
    place = lambda x: sj.parallel.shard_rows(x, mesh, axis, layout=layout)
    split = lambda x: jax.device_put(x, NamedSharding(mesh, P(names)))
    return place, split


OPTIMIZERS = {
    "adam": lambda: optax.adam(0.05),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.01), optax.adagrad(0.1)),
}


@pytest.mark.parametrize(
    "mesh, optimizer, kind",
    [
        ("2 hosts of 4", "adam", AxisType.Auto),
        ("2 replicas of 4", "clipped", AxisType.Auto),
        ("one group", "adam", AxisType.Auto),
        ("8 devices", "adam", AxisType.Explicit),
    ],
)
def test_trains_as_on_one_device(mesh, optimizer, kind):
    layer, tx = collection(), sj.optim.lazy(OPTIMIZERS[optimizer]())
    place, split = on_mesh(mesh, kind)
    plain = train_on_one_device(optimizer)
    assert_trees_close(train(layer, tx, place, split), plain, rtol=1e-5, atol=1e-6)


def test_other_reads():
    """An odd number of examples, NaN for ids out of range, max_norm, ragged bags.

    A stack is also read by rows: `sj.lookup`, and the features that the owners do not
    add up. Both kinds of gradients then meet in one ShardedRows.
    """
    layer, (place, _) = collection(max_norm=0.5), on_mesh("2 hosts of 4")
    params = init(layer)
    ids = dict(make_batch(0, batch=5)["ids"])
    ids["bought"][0, 0], ids["day"][2, 2] = 40, 99
    lists = [[3, 22], [], [5, 5, 5], [1], [0]]
    ids |= {"shop": sj.SegmentTensor.from_lists(lists)}
    (name,) = params
    sharded = {name: place(params[name])}

    def loss_fn(params):
        out = layer(params, ids)
        again = sj.lookup(params[name], jnp.array([0, 70, 131]))
        total = sum(jnp.nansum(jnp.sin(x)) for x in out.values())
        return total + jnp.sum(again**2), (out, again)

    find = sj.value_and_grad(loss_fn, has_aux=True, tables=True)

    @jax.jit
    def find_and_merge(params):
        out, grads = find(params)
        return out, grads[name], grads[name].map(lambda g: g.coalesce())

    (loss, found), *grads = find_and_merge(sharded)
    find_dense = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    (expected_loss, expected), wanted = find_dense(params)
    assert np.isnan(np.asarray(found[0]["bought"][0])).all()
    assert_trees_close((loss, found), (expected_loss, expected), rtol=1e-6)
    assert_trees_close(whole(grads), [wanted[name]] * 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_sqrtn_of_any_weights(size):
    layer, (place, _) = collection(), on_mesh("2 hosts of 4")
    params, batch = init(layer), make_batch(0)
    read = lambda params, w: layer(params, batch["ids"], {"shop": w})["shop"]
    weights = batch["weights"]["shop"]
    want = read(params, weights)
    got = jax.jit(read)(jax.tree.map(place, params), size * weights)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_gradient_at_its_owner_merges_there():
    """Outside of `jit`; nothing is sent."""
    layer, (place, split) = collection(), on_mesh("2 replicas of 4")
    params, batch = make_params(layer), make_batch(1)
    (name,) = params["tables"]
    loss_fn = make_loss(layer)
    wanted = jax.jit(jax.grad(loss_fn))(params, batch)["tables"][name]
    params["tables"][name] = place(params["tables"][name])
    grad = jax.jit(sj.grad(loss_fn))(params, split(batch))["tables"][name]
    assert grad.values.slots == 0
    merged = grad.values.coalesce()
    assert_at_owners(merged, params["tables"][name])
    found = whole([grad, grad.map(lambda _: merged), (grad + grad) / 2])
    assert_trees_close(found, [wanted] * 3, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "heights, groups", [((30, 50, 20), (0, 1, 2)), ((50, 50), (3, 7))]
)
def test_heights_in_another_order(heights, groups):
    """A feature whose table is not one of the layout's is read row by row."""
    layer = sj.nn.EmbeddingCollection({"a": (50, 2), "b": (30, 2), "c": (20, 2)})
    ((name, stack),) = init(layer).items()
    ids = {key: np.arange(16, dtype=np.int32).reshape(8, 2) for key in "abc"}
    read = jax.jit(lambda stack: layer({name: stack}, ids))
    assert_trees_close(read(held(stack, heights, groups)), read(stack), rtol=1e-6)


def test_means_of_16_bits_do_not_overflow():
    bag = sj.nn.EmbeddingBag(20, 2, combiner="mean", param_dtype=jnp.float16)
    layer = sj.nn.EmbeddingCollection({"a": bag})
    stack = held(np.full((20, 2), 60_000, np.float16), (20,), (0,))
    params = dict.fromkeys(init(layer), stack)
    found = jax.jit(layer)(params, {"a": np.ones((8, 3), np.int32)})["a"]
    assert found.dtype == jnp.float16 and (np.asarray(found) == 60_000).all()


@pytest.mark.parametrize("how", ["vmap", "cond"])
def test_inside_of_transformations(how):
    """Slots that are not on the devices that read them are sent."""
    layer, tx = collection(), sj.optim.lazy(optax.sgd(0.5))
    place, split = on_mesh("2 hosts of 4")
    loss_fn = make_loss(layer)

    def some_of(batch):
        return batch | {"ids": {name: batch["ids"][name] for name in ("user", "shop")}}

    def transformed(params, batch):
        run = functools.partial(loss_fn, params)
        if how == "cond":
            once = jax.checkpoint(run)
            twice = lambda batch: run(batch) + 2 * run(jax.tree.map(jnp.flip, batch))
            return jax.lax.cond(batch["y"][0] > 100, once, twice, batch)
        parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
        return jnp.mean(jax.vmap(run)(parts))

    def one_step(place, split):
        params = make_params(layer)
        params["tables"] = {k: place(x) for k, x in params["tables"].items()}
        params["w"], step = params["w"][: 2 * D], make_step(transformed, tx)
        batch = split(some_of(make_batch(0)))
        params, _, loss = step(params, tx.init(params), batch)
        return whole(params), loss

    plain = one_step(lambda x: x, lambda x: x)
    assert_trees_close(one_step(place, split), plain, rtol=1e-5, atol=1e-6)


def test_scan():
    layer, tx = collection(), sj.optim.lazy(optax.adagrad(0.1))
    place, split = on_mesh("8 devices")
    params = make_params(layer)
    (name,) = params["tables"]
    params["tables"][name] = place(params["tables"][name])
    params, state = everywhere((params, tx.init(params)))
    step = make_step(make_loss(layer), tx)
    batches = [make_batch(seed) for seed in range(3)]

    @jax.jit
    def steps(params, state, batches):
        body = lambda carry, batch: (step(*carry, batch)[:2], None)
        return jax.lax.scan(body, (params, state), batches)[0]

    copies = jax.tree.map(jnp.copy, (params, state))
    found, _ = steps(*copies, jax.tree.map(lambda *xs: np.stack(xs), *batches))
    params, *_ = run(step, params, state, [(split(batch),) for batch in batches])
    assert_trees_close(found, params, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ plans, and bytes


def bags_of(length, heights, width=32):
    """A collection of tables with a bag of `length` ids in each, and a loss."""
    tables = {f"t{k}": (height, width) for k, height in enumerate(heights)}
    layer = sj.nn.EmbeddingCollection(tables)

    def loss_fn(params, batch):
        out = layer(params["tables"], batch["ids"])
        rows = jnp.stack([out[name] for name in tables], axis=1)
        scores = jnp.einsum("bfd,d->b", jnp.tanh(rows), params["w"])
        return jnp.mean((scores - batch["y"]) ** 2)

    def batch(rng, size):
        ids = {
            f"t{k}": (rng.zipf(1.2, (size, length)) % height).astype(np.int32)
            for k, height in enumerate(heights)
        }
        return {"ids": ids, "y": rng.normal(size=size).astype(np.float32)}

    return layer, loss_fn, batch


@pytest.mark.parametrize("layout", ["table-wise", "table-row-wise"])
def test_plan_is_applied_and_its_bytes_are_sent(layout):
    """For bags, the owners' sums are sent: less than half of the bytes of rows."""
    heights = [30_000, 20_000, 9_000, 8_000, 7_000, 6_000, 5_000, 3_000]
    layer, loss_fn, batch_of = bags_of(20, heights)
    mesh = mesh_of((2, 2), ("host", "x"))
    batch = batch_of(np.random.default_rng(0), 128)
    params = {"tables": init(layer), "w": jnp.ones(32)}
    (name,) = params["tables"]
    tx, key = sj.optim.lazy(optax.adagrad(0.1)), f"params['tables']['{name}']"
    plan = sj.parallel.plan(
        *(params, mesh, batch),
        loss=loss_fn,
        tx=tx,
        stacks=layer.heights(),
        layouts={key: layout},
    )
    (table,) = plan.tables
    assert table.costs[layout].wire < 0.5 * table.costs["row-sharded"].wire
    applied = plan.apply(params)
    held = applied["tables"][name]
    assert held.layout == table.costs[layout].layout
    rows = held.rows_per_shard
    assert table.costs[layout].memory == 2 * rows * 32 * 4
    assert layout in repr(plan)
    batches = jax.device_put(batch, plan.batch_sharding)
    step, state = make_step(loss_fn, tx), tx.init(applied)
    compiled = step.lower(applied, state, batches).compile()
    wire = sj.viz.wire_bytes(compiled)
    # Besides, the gradient of `w` and the loss.
    assert wire.total == pytest.approx(plan.total.wire, rel=0.01), wire
    assert_in_place(compiled.as_text(), held)
    # The first step's buffers belong to NumPy, and are never overwritten.
    where = lambda table: [
        shard.data.unsafe_buffer_pointer() for shard in table.values.addressable_shards
    ]
    applied, state, _ = step(applied, state, batches)
    before = where(applied["tables"][name])
    applied, *_ = step(applied, state, batches)
    assert where(applied["tables"][name]) == before


def test_plan_chooses_table_wise_for_bags_not_for_single_ids():
    mesh = jax.sharding.AbstractMesh((4,), ("x",))
    heights = [5000] * 8
    for length, expected in ((20, "table-wise"), (1, "row-sharded")):
        layer, loss_fn, batch_of = bags_of(length, heights, width=30)
        params = {"tables": init(layer), "w": jnp.ones(30)}
        batch = batch_of(np.random.default_rng(0), 256)
        plan = sj.parallel.plan(
            params, mesh, batch, loss=loss_fn, stacks=layer.heights()
        )
        (table,) = plan.tables
        assert table.choice == expected
        # All devices have two of the tables.
        placed: Any = table.costs["table-wise"].layout
        assert sorted(placed.groups) == sorted([0, 1, 2, 3] * 2)


def test_weights_of_padding_do_not_matter():
    """As on one device, even for NaN."""
    layer = sj.nn.EmbeddingCollection({"a": sj.nn.EmbeddingBag(9, 2, padding_id=0)})
    ((name, stack),) = init(layer).items()
    args = {"a": jnp.array([[0, 5]])}, {"a": jnp.array([[jnp.nan, 2.0]])}
    for table in (stack, held(stack, (9,), (0,), 1)):
        out = jax.jit(layer)({name: table}, *args)["a"]
        assert_trees_close(out, 2 * np.asarray(stack[5:6]))
