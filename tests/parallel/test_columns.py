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
from one_device import mesh_of, place, run, step_of, table_of


# optax itself relies on implicit promotion.
pytestmark = [pytest.mark.usefixtures("eight_devices", "loose_promotion")]
V, D, N, BATCH = 10_007, 16, 4, 64
TABLE = table_of(V, D)


def make_batch(seed):
    rng = np.random.default_rng(seed)
    ids = (rng.zipf(1.3, (BATCH, 5)) % V).astype(np.int32)
    ids[0] = [7, 7, V, -1, 3]
    return {"ids": ids, "y": rng.standard_normal((BATCH, D), np.float32)}


def loss_fn(params, batch):
    bags = sj.embedding_bag(params["table"], batch["ids"], mode="zero")
    first = sj.lookup(params["table"], batch["ids"][:, -1], mode="zero")
    return jnp.mean(((bags + first) * params["w"] - batch["y"]) ** 2)


@pytest.mark.slow
def test_training_equals_one_device():
    """Over Explicit axes; test_replicated.py trains over Auto ones."""
    mesh = mesh_of(kind=AxisType.Explicit)
    params = {"table": TABLE, "w": np.ones(D, np.float32)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1))
    batches = [(make_batch(seed),) for seed in range(3)]
    dense = jax.jit(step_of(loss_fn, tx, jax.value_and_grad))
    expected = run(dense, jax.tree.map(jnp.asarray, params), tx.init(params), batches)

    params = {
        "table": sj.parallel.shard_columns(TABLE, mesh, "x"),
        "w": place(mesh, params["w"], "x"),
    }
    lifted = sj.optim.lazy(tx)
    ours = jax.jit(step_of(loss_fn, lifted), donate_argnums=(0, 1))
    specs = jax.tree.map(lambda x: x.sharding.spec, params)
    with jax.set_mesh(mesh):  # value_and_grad over Explicit axes needs it
        batches = [(place(mesh, *batch),) for batch in batches]
        found = run(ours, params, lifted.init(params), batches)
    assert_trees_close(found, expected)
    for tree in (found[0], found[1][1][0].sum_of_squares):
        assert jax.tree.map(lambda x: x.sharding.spec, tree) == specs


def compiled_step(loss_fn):
    params = {"table": sj.parallel.shard_columns(TABLE, mesh_of(), "x")}
    tx = sj.optim.lazy(optax.adam(0.1))
    step = jax.jit(step_of(loss_fn, tx), donate_argnums=(0, 1))
    ids = place(mesh_of(), jnp.arange(BATCH))
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
    rows_of = NamedSharding(mesh_of(), P("x"))

    def loss(params, ids):
        rows = sj.lookup(params["table"], ids)
        rows = jax.lax.with_sharding_constraint(rows, rows_of)
        return jnp.sum(jnp.linalg.norm(rows, axis=1))  # wants whole rows

    found = sj.viz.wire_bytes(compiled_step(loss))
    rows = 2 * (BATCH * D * 4 // N) * (N - 1) // N  # there and back
    assert found.by_kind["all-to-all"] == rows, found
    # XLA may gather the ids for each of their uses, but nothing else.
    assert found.total - rows <= 4 * (BATCH * 4) * (N - 1) // N + 8, found
