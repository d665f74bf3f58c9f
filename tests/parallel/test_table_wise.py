"""Stacks whose tables lie on different devices.

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
from one_device import assert_at_owners, mesh_of, run, step_of


pytestmark = [pytest.mark.usefixtures("eight_devices", "loose_promotion")]
HEIGHTS = {"user": 61, "item": 40, "day": 7, "shop": 23, "one": 1}
D, BATCH = 4, 16
STACK = f"stack_width{D}_float32"
OPTIMIZERS = {
    "adam": optax.adam(0.05),
    "clipped": optax.chain(optax.clip_by_global_norm(0.01), optax.adagrad(0.1)),
}
MESHES = {  # shape of the mesh, its axes, the axes of the table, number of groups
    "8 devices": ((8,), ("x",), "x", 8),
    "2 hosts of 4": ((2, 4), ("host", "x"), ("host", "x"), 2),
    "2 replicas of 4": ((2, 4), ("data", "x"), "x", 4),
    "one group": ((4,), ("x",), "x", 1),
}


def collection(**options):
    bag = functools.partial(sj.nn.EmbeddingBag, features=D, padding_id=-1)
    tables = {
        "user": sj.nn.EmbeddingBag(61, D, mode="zero"),
        "item": bag(40, combiner="sum", **options),
        "day": bag(7, combiner="mean", **options),
        "shop": bag(23, combiner="sqrtn", **options),
        "one": sj.nn.Embedding(1, D),
    }
    features = {name: name for name in tables if name != "item"}
    return sj.nn.EmbeddingCollection(
        tables, features | dict(bought="item", seen="item")
    )


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


def loss_fn(params, batch):
    out = collection()({STACK: params["stack"]}, batch["ids"], batch["weights"])
    rows = jnp.concatenate([out[name] for name in sorted(out)], axis=1)
    scores = jnp.sum(jnp.tanh(rows) * params["w"][: rows.shape[1]], axis=1)
    return jnp.mean((scores - batch["y"]) ** 2)


def make_params():
    stack = drawn(jax.ShapeDtypeStruct((sum(HEIGHTS.values()), D), jnp.float32), seed=7)
    return {"stack": stack, "w": jnp.linspace(-1.0, 1.0, 6 * D, dtype=jnp.float32)}


def on_mesh(name, kind=AxisType.Auto):
    """Functions that put stacks, other arrays and batches on a mesh."""
    shape, names, axis, groups = MESHES[name]
    mesh = mesh_of(shape, names, kind)
    of_tables = tuple(k % groups for k in range(5))
    layout = sj.parallel.TableWise(tuple(HEIGHTS.values()), of_tables, groups)
    put = lambda x, *parts: jax.device_put(x, NamedSharding(mesh, P(*parts)))
    # Over Explicit axes, JAX's results have a part for each axis.
    parts = lambda x: [None] * x.ndim if kind == AxisType.Explicit else []
    place = lambda x: sj.parallel.shard_rows(x, mesh, axis, layout=layout)
    everywhere = lambda x: jax.tree.map(lambda x: put(x, *parts(x)), x)
    return place, everywhere, lambda batch: put(batch, names)


def same(x):
    return x


def sharded_params(place, everywhere, tx):
    params = make_params()
    params = {"stack": place(params["stack"]), "w": everywhere(params["w"])}
    is_table = lambda x: isinstance(x, sj.parallel.ShardedTable)
    put = lambda x: x if is_table(x) else everywhere(x)
    return params, jax.tree.map(put, tx.init(params), is_leaf=is_table)


def make_step(loss_fn, tx) -> Any:
    # Even if a batch reads more than a quarter of the stack.
    sparse = {"stack": True, "w": False}
    return step_of(loss_fn, tx, functools.partial(sj.value_and_grad, tables=sparse))


def train(tx, place=same, everywhere=same, split=same):
    step: Any = jax.jit(make_step(loss_fn, tx), donate_argnums=(0, 1))
    batches = [(split(make_batch(seed)),) for seed in range(3)]
    params, _, losses = run(step, *sharded_params(place, everywhere, tx), batches)
    assert step._cache_size() == 1
    return whole(params), losses


@functools.cache
def train_on_one_device(optimizer):
    return train(sj.optim.lazy(OPTIMIZERS[optimizer]))


# ------------------------------------------------------------------ training


@pytest.mark.parametrize(
    "mesh, optimizer, kind",
    [
        ("2 hosts of 4", "adam", AxisType.Auto),
        ("2 replicas of 4", "clipped", AxisType.Auto),
        ("8 devices", "adam", AxisType.Explicit),
    ],
)
def test_trains_as_on_one_device(mesh, optimizer, kind):
    found = train(sj.optim.lazy(OPTIMIZERS[optimizer]), *on_mesh(mesh, kind))
    assert_trees_close(found, train_on_one_device(optimizer), rtol=1e-5, atol=1e-6)


def test_steps_in_a_scan():
    tx = sj.optim.lazy(OPTIMIZERS["clipped"])
    place, everywhere, _ = on_mesh("one group")
    step = make_step(loss_fn, tx)

    @jax.jit
    def steps(params, state, batches):
        body = lambda carry, batch: (step(*carry, batch)[:2], None)
        return jax.lax.scan(body, (params, state), batches)[0]

    batches = jax.tree.map(lambda *xs: np.stack(xs), *map(make_batch, range(3)))
    found, _ = steps(*sharded_params(place, everywhere, tx), batches)
    expected, _ = train_on_one_device("clipped")
    assert_trees_close(whole(found), expected, rtol=1e-5, atol=1e-6)


def test_under_vmap():
    """Slots that are not on the devices that read them are sent."""
    tx, batch = sj.optim.lazy(optax.sgd(0.5)), make_batch(0)
    batch["ids"] = {name: batch["ids"][name] for name in ("user", "shop")}

    def mapped(params, batch):
        parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
        return jnp.mean(jax.vmap(functools.partial(loss_fn, params))(parts))

    def one_step(place=same, everywhere=same, split=same):
        step = jax.jit(make_step(mapped, tx))
        args = sharded_params(place, everywhere, tx)
        params, _, loss = step(*args, split(batch))
        return whole(params), loss

    found = one_step(*on_mesh("2 hosts of 4"))
    assert_trees_close(found, one_step(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gradient_at_its_owner_merges_there():
    """Nothing is sent. And the gradient of `jax.grad` is dense."""
    place, _, split = on_mesh("2 replicas of 4")
    params, batch = make_params(), make_batch(1)
    wanted = jax.jit(jax.grad(loss_fn))(params, batch)["stack"]
    params["stack"] = place(params["stack"])
    grad = jax.jit(sj.grad(loss_fn))(params, split(batch))["stack"]
    assert grad.values.slots == 0
    merged = grad.values.coalesce()
    assert_at_owners(merged, params["stack"])
    dense = jax.jit(jax.grad(loss_fn))(params, split(batch))["stack"]
    found = whole([grad, grad.map(lambda _: merged), (grad + grad) / 2, dense])
    assert_trees_close(found, [wanted] * 4, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ reads


@pytest.mark.slow
def test_other_reads():
    """An odd number of examples, NaN for ids out of range, max_norm, ragged bags.

    A stack is also read by rows: `sj.lookup`, and the features that the owners do not
    add up. Both kinds of gradients then meet in one ShardedRows.
    """
    layer, (place, *_) = collection(max_norm=0.5), on_mesh("2 hosts of 4")
    stack, ids = make_params()["stack"], make_batch(0, batch=5)["ids"]
    del ids["seen"]  # as "bought"
    ids["bought"][0, 0], ids["day"][2, 2] = 40, 99
    lists = [[3, 22], [], [5, 5, 5], [1], [0]]
    ids |= {"shop": sj.SegmentTensor.from_lists(lists)}

    def loss_fn(stack):
        out = layer({STACK: stack}, ids)
        again = sj.lookup(stack, jnp.array([0, 70, 131]))
        total = sum(jnp.nansum(jnp.sin(x)) for x in out.values())
        return total + jnp.sum(again**2), (out, again)

    find = sj.value_and_grad(loss_fn, has_aux=True, tables=True)

    @jax.jit
    def find_and_merge(stack):
        out, grad = find(stack)
        return out, grad, grad.map(lambda g: g.coalesce())

    found, *grads = find_and_merge(place(stack))
    find_dense = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    expected, wanted = find_dense(stack)
    assert np.isnan(np.asarray(found[1][0]["bought"][0])).all()
    assert_trees_close(found, expected, rtol=1e-6)
    assert_trees_close(whole(grads), [wanted] * 2, rtol=1e-5, atol=1e-6)


def test_sqrtn_of_any_weights():
    place, *_ = on_mesh("2 hosts of 4")
    stack, batch = make_params()["stack"], make_batch(0)
    ids, weights = batch["ids"], batch["weights"]["shop"]
    read = jax.jit(lambda x, w: collection()({STACK: x}, ids, {"shop": w})["shop"])
    expected = read(stack, weights)
    for size in (1e-20, 1e20):
        got = read(place(stack), np.float32(size) * weights)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def held(stack, heights, groups, num_groups=8):
    """The stack over that many devices, each table on those of its group."""
    layout = sj.parallel.TableWise(heights, groups, num_groups)
    return sj.parallel.shard_rows(stack, mesh_of(num_groups), "x", layout=layout)


@pytest.mark.parametrize(
    "heights, groups", [((30, 50, 20), (0, 1, 2)), ((50, 50), (3, 7))]
)
def test_heights_in_another_order(heights, groups):
    """A feature whose table is not one of the layout's is read row by row."""
    layer = sj.nn.EmbeddingCollection({"a": (50, D), "b": (30, D), "c": (20, D)})
    stack = make_params()["stack"][:100]
    ids = {key: np.arange(16, dtype=np.int32).reshape(8, 2) for key in "abc"}
    read = jax.jit(lambda stack: layer({STACK: stack}, ids))
    assert_trees_close(read(held(stack, heights, groups)), read(stack), rtol=1e-6)


def test_means_of_16_bits_do_not_overflow():
    bag = sj.nn.EmbeddingBag(20, 2, combiner="mean", param_dtype=jnp.float16)
    layer = sj.nn.EmbeddingCollection({"a": bag})
    stack = held(np.full((20, 2), 60_000, np.float16), (20,), (0,))
    params = {"stack_width2_float16": stack}
    found = jax.jit(layer)(params, {"a": np.ones((8, 3), np.int32)})["a"]
    assert found.dtype == jnp.float16 and (np.asarray(found) == 60_000).all()


def test_weights_of_padding_do_not_matter():
    """As on one device, even for NaN."""
    layer = sj.nn.EmbeddingCollection({"a": sj.nn.EmbeddingBag(9, D, padding_id=0)})
    stack = make_params()["stack"][:9]
    args = {"a": jnp.array([[0, 5]])}, {"a": jnp.array([[jnp.nan, 2.0]])}
    for table in (stack, held(stack, (9,), (0,), 1)):
        out = jax.jit(layer)({STACK: table}, *args)["a"]
        assert_trees_close(out, 2 * np.asarray(stack[5:6]))
