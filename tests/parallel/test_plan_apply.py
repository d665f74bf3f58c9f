"""plan.apply: models trained on one device and on eight, and the bytes of a step.

The oracle is the same program without a plan, on one device.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import sparsejax as sj
from helpers import assert_trees_close, drawn, whole


# Optax's Adam and flax need loose promotion.
pytestmark = pytest.mark.usefixtures("eight_devices", "loose_promotion")
USERS, ITEMS, D, BATCH = 301, 223, 8, 16


def make_mesh(size):
    devices = jax.devices()[:size]
    return jax.make_mesh((size,), ("x",), devices=devices, axis_types=(AxisType.Auto,))


# ------------------------------------------------------------------ two models


def two_towers(users, items, width):
    """Flax's layers as they are, their parameters abstract."""
    nnx = pytest.importorskip("flax.nnx")

    class TwoTowers(nnx.Module):
        def __init__(self, rngs):
            self.user = nnx.Embed(users, width, rngs=rngs)
            self.item = nnx.Embed(items, width, rngs=rngs)
            self.dense = nnx.Linear(width, width, rngs=rngs)

        def __call__(self, user, item):
            return jnp.sum(self.dense(self.user(user)) * self.item(item), axis=-1)

    model = nnx.eval_shape(lambda: TwoTowers(nnx.Rngs(0)))
    graph, params = nnx.split(model, nnx.Param)

    def loss_fn(params, batch):
        scores = nnx.merge(graph, params)(batch["user"], batch["item"])
        return jnp.mean(optax.sigmoid_binary_cross_entropy(scores, batch["label"]))

    return params, loss_fn


def dlrm(users, items, width, stacked=True):
    """A collection of tables, one of them read by two features, and a layer on top."""
    layer = sj.nn.EmbeddingCollection(
        {"user": (users, width), "item": (items, width), "day": (14 * width, width)},
        {"user": "user", "item": "item", "last": "item", "day": "day"},
        stacked=stacked,
    )

    def loss_fn(params, batch):
        ids = {name: batch[name] for name in ("user", "item", "last", "day")}
        rows = jnp.stack(list(layer(params["tables"], ids).values()), 1)
        crossed = jnp.einsum("bfd,bgd->bfg", rows, rows).reshape(len(rows), -1)
        return jnp.mean((jnp.tanh(crossed) @ params["w"] - batch["label"]) ** 2)

    specs = jax.eval_shape(lambda: layer.init(jax.random.key(0)))
    w = jnp.array(np.linspace(-1.0, 1.0, 16, dtype=np.float32))
    return {"tables": drawn(specs, width**-0.5), "w": w}, loss_fn


def make_batch(seed, users=USERS, items=ITEMS, size=BATCH, draw=None):
    rng = np.random.default_rng(seed)
    draw = draw or (lambda rng, height: rng.integers(0, height, size))
    heights = {"user": users, "item": items, "last": items, "day": 7}
    batch = {name: draw(rng, n).astype(np.int32) for name, n in heights.items()}
    return batch | {"label": rng.normal(size=size).astype(np.float32)}


def make_step(loss_fn, tx):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = sj.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def train(params, loss_fn, plan=None):
    """Three steps; with a plan, on its devices."""
    params = jax.tree.map(jnp.copy, params)  # the step overwrites them
    tx = sj.optim.lazy(optax.adam(0.05))
    params = params if plan is None else plan.apply(params)
    state, step = tx.init(params), make_step(loss_fn, tx)
    for seed in range(3):
        batch = make_batch(seed)
        if plan is not None:
            batch = jax.device_put(batch, plan.batch_sharding)
        params, state, _ = step(params, state, batch)
    return params


def is_sharded(x):
    return isinstance(x, sj.parallel.ShardedTable)


LAYOUTS = ("row-sharded", "column-sharded", "replicated-sparse")
MODELS: Any = {
    "three layouts": (dlrm, {"stacked": False}, LAYOUTS),
    "collection": (dlrm, {}, LAYOUTS[:1]),
}


@pytest.mark.parametrize("name", ["three layouts", "collection"])
def test_trained_on_one_device_and_on_eight(name):
    make, options, layouts = MODELS[name]
    params, loss_fn = make(USERS, ITEMS, D, **options)
    plain = whole(train(params, loss_fn))
    plan: Any = functools.partial(
        sj.parallel.plan, params, make_mesh(8), make_batch(0), loss=loss_fn
    )
    names = [table.name for table in plan().tables]
    assert all(name.startswith("params") for name in names)
    asked = {name: layouts[k % len(layouts)] for k, name in enumerate(names)}
    applied = plan(layouts=asked)
    assert [table.choice for table in applied.tables] == list(asked.values())
    trained = train(params, loss_fn, applied)
    found = jax.tree.leaves(trained, is_leaf=is_sharded)
    rows = [choice for choice in asked.values() if choice == "row-sharded"]
    assert sum(map(is_sharded, found)) == len(rows)
    assert_trees_close(whole(trained), plain, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------ bytes on the wire

HEIGHT, WIDTH, READS, DEVICES = 100_003, 32, 20_480, 4


@pytest.mark.parametrize(
    "make", [two_towers, pytest.param(dlrm, marks=pytest.mark.window)]
)
def test_sends_little_and_copies_no_table(make):
    """20,480 reads at four devices, as in docs/explain/exchange.md; nothing is run."""
    size = READS // (2 if make is two_towers else 4)
    heights = HEIGHT, HEIGHT if make is two_towers else 60_000
    zipf = lambda rng, height: rng.zipf(1.2, size) % height
    params, loss_fn = make(*heights, WIDTH)
    batch = make_batch(0, *heights, size, zipf)
    tx, mesh = sj.optim.lazy(optax.adam(1e-3)), make_mesh(DEVICES)
    plan = sj.parallel.plan(params, mesh, batch, loss=loss_fn, tx=tx)
    assert {table.choice for table in plan.tables} == {"row-sharded"}
    abstract = lambda x, sharding: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding
    )
    params = plan.apply(jax.tree.map(lambda x: abstract(x, None), params))
    state = jax.tree.map(
        lambda x: abstract(x, plan.batch_sharding if x.ndim == 2 else None),
        jax.eval_shape(tx.init, params),
    )
    batch = jax.tree.map(lambda x: abstract(x, plan.batch_sharding), batch)
    program = make_step(loss_fn, tx).lower(params, state, batch).compile()
    wire, text = sj.viz.wire_bytes(program), program.as_text() or ""
    assert wire.total <= 600_000, wire
    assert wire.total == pytest.approx(1.1 * plan.total.wire, rel=0.03), wire
    for table in filter(is_sharded, jax.tree.leaves(params, is_leaf=is_sharded)):
        shaped = rf"= f32\[{table.rows_per_shard},{WIDTH}\]\S* (\w[\w-]*)\("
        made = set(re.findall(shaped, text))
        in_place = {"scatter", "fusion", "dynamic-update-slice"}
        assert made <= {"parameter", "get-tuple-element"} | in_place, made
        assert f"[{table.rows_per_shard * DEVICES}," not in text
        assert f"[{table.height}," not in text
