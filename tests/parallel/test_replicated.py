"""Replicated tables: gradients exchanged as ids and rows, and data_parallel."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from helpers import assert_same_bits, assert_trees_close, make_rows
from one_device import mesh_of, run, step_of, table_of


# optax itself relies on implicit promotion.
pytestmark = [pytest.mark.usefixtures("eight_devices", "loose_promotion")]
V, D, N, BATCH = 4_999, 8, 4, 32


def slots(per_device, seed=0):
    """Rows of all devices in a row: duplicates, empty slots with NaN in them."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 12, N * per_device).astype(np.int32)
    rows[::5] = V
    rows[3] = -1
    return make_rows(rows, V, (D,))[0]


# ------------------------------------------------------------------ psum and pmean


# At 2 slots the distinct rows of a device do not fit, and all slots are sent.
@pytest.mark.window
@pytest.mark.parametrize(
    "capacity, vma", [(None, True), (None, False), (9, True), (2, False)]
)
def test_sum_over_devices(capacity, vma):
    mesh, g = mesh_of(), slots(10)

    def both(g):
        total = sj.parallel.psum(g, "x", capacity=capacity)
        return total, sj.parallel.pmean({"t": g}, "x", capacity=capacity)

    mapped = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=vma)
    )
    total, mean = mapped(g)
    assert total.capacity == N * 10
    np.testing.assert_array_equal(total.to_dense(), g.to_dense())
    np.testing.assert_array_equal(mean["t"].to_dense(), g.to_dense() / N)
    for shard in total.values.addressable_shards:  # replicas stay equal
        assert_same_bits(shard.data, total.values)
    wire = sj.viz.wire_bytes(mapped.lower(g).compile(), branch=min).by_kind
    sent = {None: 10, 9: 9, 2: 2}[capacity]
    assert wire["all-gather"] == (N - 1) * sent * (4 + 4 * D)


@pytest.mark.window
@pytest.mark.parametrize("vma", [True, False])
def test_a_step_under_shard_map_equals_one_device(vma):
    # With check_vma JAX has summed the gradient of `w` over the devices already, and
    # the gradient of the table varies over them.
    mesh = mesh_of((2, 2), ("a", "b"))
    params = {"t": jnp.ones((V, D)), "w": jnp.arange(1.0, D + 1)}
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 40, BATCH))

    def loss(params, ids):
        return jnp.mean((params["t"][ids] @ params["w"]) ** 2)

    def grads(reduce, params, ids):
        value, g = sj.value_and_grad(loss)(params, ids)
        return reduce({"loss": value, **g}, ("a", "b"))

    def summed(reduce):
        mapped = jax.shard_map(
            lambda params, ids: grads(reduce, params, ids),
            mesh=mesh,
            in_specs=(P(), P(("a", "b"))),
            out_specs=P(),
            check_vma=vma,
        )
        out = jax.jit(mapped)(params, ids)
        return {**out, "t": out["t"].to_dense()}

    value, want = jax.value_and_grad(loss)(params, ids)
    want = {"loss": value, **want}
    assert_trees_close(summed(sj.parallel.pmean), want)
    total = jax.tree.map(lambda x: x * N, want)
    assert_trees_close(summed(sj.parallel.psum), total)


@pytest.mark.slow
def test_trees_two_axes_and_narrow_types():
    mesh = mesh_of((2, 2), ("a", "b"))
    g = slots(6).astype(jnp.bfloat16)
    w = jnp.arange(8.0)

    def reduce(g, w):
        tree = {"t": g, "w": w, "n": 1, "none": None}
        return sj.parallel.psum(tree, ("a", "b")), sj.parallel.pmean(w, "b")

    axes = P(("a", "b"))
    total, mean = jax.shard_map(
        reduce, mesh=mesh, in_specs=axes, out_specs=(P(), P("a")), check_vma=False
    )(g, w)
    assert total["t"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(total["t"].to_dense(), g.to_dense())
    np.testing.assert_array_equal(total["w"], w.reshape(4, 2).sum(0))
    assert int(total["n"]) == 4 and total["none"] is None
    np.testing.assert_array_equal(mean, w.reshape(2, 2, 2).mean(1).reshape(4))


@pytest.mark.window
@pytest.mark.parametrize("capacity", [None, 5])
def test_over_an_axis_of_vmap(capacity):
    g = slots(10)
    sum_up = lambda rows, values: sj.parallel.psum(
        sj.SelectedRows(rows, values, V), "i", capacity=capacity
    )
    found = jax.vmap(sum_up, axis_name="i", out_axes=None)(
        g.rows.reshape(N, 10), g.values.reshape(N, 10, D)
    )
    np.testing.assert_array_equal(found.to_dense(), g.to_dense())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_of_the_whole_batch_are_only_gathered(kind):
    """Under `jax.set_mesh`, JAX's own mesh shows that the axis spans devices."""
    mesh, g = mesh_of(kind=kind), slots(10)
    split = jax.device_put(g, NamedSharding(mesh, P("x")))
    both = lambda g: sj.parallel.psum({"g": g, "n": jnp.ones(())}, "x", capacity=9)
    with jax.set_mesh(mesh):
        found = jax.jit(both)(split)
        with pytest.raises(ValueError):
            sj.parallel.psum(g, "y")
    assert found["g"].values.sharding.is_fully_replicated
    np.testing.assert_array_equal(found["g"].to_dense(), g.to_dense())
    assert float(found["n"]) == 1.0


# ------------------------------------------------------------------ data_parallel


def loss_fn(params, batch):
    bags = sj.embedding_bag(params["table"], batch["ids"], mode="zero")
    rows = jnp.tanh(bags @ params["w"])
    return jnp.mean((rows[:, 0] - batch["y"]) ** 2)


def make_params():
    return {"table": jnp.asarray(table_of(V, D)), "w": jnp.asarray(table_of(D, 2))}


def make_batch(seed):
    rng = np.random.default_rng(seed)
    ids = (rng.zipf(1.3, (BATCH, 5)) % V).astype(np.int32)
    ids[0] = [7, 7, V, -1, 3]
    return {"ids": ids, "y": rng.standard_normal(BATCH, np.float32)}


BATCHES = [(make_batch(seed),) for seed in range(3)]


@pytest.mark.parametrize(
    ("capacity", "kind"),
    [
        ("no call", AxisType.Explicit),  # the result of jax.make_mesh
        (None, AxisType.Auto),
        (8, AxisType.Explicit),
    ],
)
def test_data_parallel_equals_one_device(capacity, kind):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1))
    dense = jax.jit(step_of(loss_fn, tx, jax.value_and_grad))
    expected = make_params(), tx.init(make_params())
    *expected, losses = run(dense, *expected, BATCHES)

    def value_and_grad(loss_fn):
        def run(params, batch):
            loss, grads = sj.value_and_grad(loss_fn)(params, batch)
            if capacity != "no call":
                grads = sj.parallel.pmean(grads, "x", capacity=capacity)
            return loss, grads

        return run

    lifted = sj.optim.lazy(tx)
    step = step_of(loss_fn, lifted, value_and_grad)
    ours = sj.parallel.data_parallel(step, mesh_of(kind=kind), "x")
    found = make_params(), lifted.init(make_params())
    *found, found_losses = run(ours, *found, BATCHES[:2])
    before = found[0]["table"]
    *found, last = run(ours, *found, BATCHES[2:])
    assert before.is_deleted()  # given away
    np.testing.assert_allclose([*found_losses, *last], losses, rtol=1e-5)
    assert_trees_close(tuple(found), tuple(expected))
    for leaf in jax.tree.leaves(found):
        assert leaf.sharding.is_fully_replicated and len(leaf.devices()) == N

    compiled = ours.lower(*found, make_batch(0)).compile()
    table = V * D * 4
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * table
    wire = sj.viz.wire_bytes(compiled, branch=min).by_kind
    ids, rows = 4 * BATCH * 5, 4 * BATCH * 5 * D
    if capacity == "no call":
        assert wire["all-reduce"] <= 2 * rows * (N - 1) // N + 200
        assert wire["all-gather"] <= ids * (N - 1) // N
    elif capacity is None:
        assert wire["all-gather"] == (ids + rows) * (N - 1) // N
        assert wire["all-reduce"] <= 200  # loss and dense gradients
    else:
        assert wire["all-gather"] == (N - 1) * capacity * (4 + 4 * D)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_tables_stay_sharded(kind):
    mesh, tx = mesh_of(kind=kind), optax.adagrad(0.1)

    def loss_fn(params, batch):
        rows = [sj.lookup(t, batch["ids"], mode="zero") for t in params.values()]
        return jnp.mean((jnp.sum(rows[0] + rows[1], (1, 2)) - batch["y"]) ** 2)

    table = np.asarray(make_params()["table"])
    expected = {"rows": table, "columns": table}
    dense = jax.jit(step_of(loss_fn, tx, jax.value_and_grad))
    expected, _, losses = run(dense, expected, tx.init(expected), BATCHES[:2])
    lifted = sj.optim.lazy(tx)
    found = {
        "rows": sj.parallel.shard_rows(table, mesh, "x"),
        "columns": sj.parallel.shard_columns(table, mesh, "x"),
    }
    ours = sj.parallel.data_parallel(step_of(loss_fn, lifted), mesh, "x")
    found, _, found_losses = run(ours, found, lifted.init(found), BATCHES[:2])
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
    assert_trees_close(found | {"rows": found["rows"].to_dense()}, expected)
    assert found["rows"].values.sharding.spec == P("x")
    assert found["columns"].sharding.spec == P(None, "x")


def test_what_is_split_and_what_stays():
    mesh = mesh_of((2, 2), ("x", "y"))
    seen = {}

    def step(params, state, batch, scale):
        jax.debug.inspect_array_sharding(
            batch["ids"], callback=lambda s: seen.update(ids=s)
        )
        total = jnp.sum(batch["ids"]) * scale + jnp.sum(batch["odd"])
        return jax.tree.map(lambda p: p + total, params), state

    cut = NamedSharding(mesh, P(None, "y"))
    params = {"a": jax.device_put(jnp.ones((3, 2)), cut), "b": np.ones(3, np.float32)}
    run = sj.parallel.data_parallel(step, mesh, "x", donate=False)
    batch = {"ids": np.ones((4, 3), np.float32), "odd": np.ones(3, np.float32)}
    found, state = run(params, (), batch, 2.0)
    assert state == ()
    assert found["a"].sharding.spec == cut.spec
    assert found["b"].sharding.is_fully_replicated
    np.testing.assert_array_equal(found["b"], 1 + 2 * 12 + 3)
    assert seen["ids"].shard_shape((4, 3)) == (2, 3)
    assert not params["a"].is_deleted()
