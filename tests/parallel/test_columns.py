"""Tables cut by columns: their results, and the traffic of the compiled step."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from helpers import assert_trees_close


# optax itself relies on implicit promotion.
pytestmark = [pytest.mark.usefixtures("eight_devices", "loose_promotion")]
V, D, N, BATCH = 10_007, 16, 4, 64


def make_mesh(kind=AxisType.Auto):
    return jax.make_mesh((N,), ("x",), axis_types=(kind,), devices=jax.devices()[:N])


def make_table():
    return np.random.default_rng(0).standard_normal((V, D)).astype(np.float32)


def make_batch(seed):
    rng = np.random.default_rng(seed)
    ids = (rng.zipf(1.3, (BATCH, 5)) % V).astype(np.int32)
    ids[0] = [7, 7, V, -1, 3]
    return {"ids": ids, "y": rng.standard_normal((BATCH, D), np.float32)}


def loss_fn(params, batch):
    bags = sj.embedding_bag(params["table"], batch["ids"], mode="zero")
    first = sj.lookup(params["table"], batch["ids"][:, -1], mode="zero")
    return jnp.mean(((bags + first) * params["w"] - batch["y"]) ** 2)


def step_of(tx, value_and_grad, loss_fn=loss_fn):
    def step(params, state, batch):
        loss, grads = value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_training_equals_one_device(kind):
    mesh = make_mesh(kind)
    params = {"table": make_table(), "w": np.ones(D, np.float32)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1))
    expected = jax.tree.map(jnp.asarray, params), tx.init(params)
    dense = jax.jit(step_of(tx, jax.value_and_grad))

    params = {
        "table": sj.parallel.shard_columns(params["table"], mesh, "x"),
        "w": jax.device_put(params["w"], NamedSharding(mesh, P("x"))),
    }
    lifted = sj.optim.lazy(tx)
    found = params, lifted.init(params)
    ours = jax.jit(step_of(lifted, sj.value_and_grad), donate_argnums=(0, 1))
    laid_out = jax.tree.map(lambda x: x.sharding.spec, found[0])
    for seed in range(3):
        batch = make_batch(seed)
        *expected, loss = dense(*expected, batch)
        batch = jax.device_put(batch, NamedSharding(mesh, P()))
        with jax.set_mesh(mesh):  # value_and_grad over Explicit axes needs it
            *found, found_loss = ours(*found, batch)
        np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    assert_trees_close(tuple(found), tuple(expected))
    for tree in (found[0], found[1][1][0].sum_of_squares):
        assert jax.tree.map(lambda x: x.sharding.spec, tree) == laid_out


def compiled_step(loss_fn):
    mesh = make_mesh()
    params = {"table": sj.parallel.shard_columns(make_table(), mesh, "x")}
    tx = sj.optim.lazy(optax.adam(0.1))
    step = jax.jit(step_of(tx, sj.value_and_grad, loss_fn), donate_argnums=(0, 1))
    ids = jax.device_put(jnp.arange(BATCH), NamedSharding(mesh, P()))
    return step.lower(params, tx.init(params), ids).compile()


def test_update_is_local_and_in_place():
    loss = lambda params, ids: jnp.sum(jnp.sin(sj.lookup(params["table"], ids)))
    compiled = compiled_step(loss)
    # The loss is a sum over columns: one number. Nothing else moves.
    found = sj.viz.wire_bytes(compiled)
    assert found.total == 2 * 4 * (N - 1) // N, found
    memory = compiled.memory_analysis()
    part = V * D * 4 // N
    assert memory.alias_size_in_bytes >= 3 * part  # the table and both moments
    assert memory.temp_size_in_bytes < part / 2


def test_rows_for_the_devices_whose_batch_it_is():
    mesh = make_mesh()

    def loss(params, ids):
        rows = sj.lookup(params["table"], ids)
        rows = jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, P("x")))
        return jnp.sum(jnp.linalg.norm(rows, axis=1))  # wants whole rows

    found = sj.viz.wire_bytes(compiled_step(loss))
    rows = 2 * (BATCH * D * 4 // N) * (N - 1) // N  # there and back
    assert found.by_kind["all-to-all"] == rows, found
    # XLA may gather the ids for each of their uses, but nothing else.
    assert found.total - rows <= 4 * (BATCH * 4) * (N - 1) // N + 8, found


def test_what_it_takes():
    mesh = make_mesh()
    sharding = NamedSharding(mesh, P(None, "x"))
    for x in (make_table(), jnp.asarray(make_table())):
        found = sj.parallel.shard_columns(x, mesh, "x")
        assert found.sharding == sharding
        assert {s.data.shape for s in found.addressable_shards} == {(V, D // N)}
        np.testing.assert_array_equal(found, x)
    made = jax.jit(lambda: sj.parallel.shard_columns(jnp.ones((3, 5, D)), mesh, ["x"]))
    assert made().sharding.spec == P(None, None, "x")
    spec = jax.ShapeDtypeStruct((V, D), jnp.bfloat16)
    found = sj.parallel.shard_columns(spec, mesh, "x")
    assert (found.shape, found.dtype, found.sharding) == ((V, D), spec.dtype, sharding)
