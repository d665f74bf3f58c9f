"""Training over several devices equals the plain optimizer on one device.

Tables are sharded by rows, sharded by columns, or replicated. A step is compiled once
and run on batches of every kind of ids.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from helpers import assert_same_bits, assert_trees_close, make_rows, whole
from one_device import (
    assert_at_owners,
    assert_close,
    dense_step_of,
    mesh_of,
    place,
    run,
    step_of,
    table_of,
)


# Optax's Adam needs loose promotion.
pytestmark = pytest.mark.usefixtures("eight_devices", "loose_promotion")

V, D, N, N_IDS = 1009, 4, 4, 64
TABLES = [table_of(V, D, seed=k) for k in range(2)]
WEIGHTS = table_of(N_IDS, D, seed=2)
TXS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "clip, adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
}
shard_rows, shard_columns = sj.parallel.shard_rows, sj.parallel.shard_columns


def batches():
    """Ids in every kind of order in which rows can reach their owners."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, V + 1)
    ids = rng.integers(0, V, N_IDS)
    kinds = {
        "zipf": rng.choice(V, N_IDS, p=weights / weights.sum()),
        "uniform": ids,
        # Each device has its own range: the others wait for its rows.
        "apart": np.sort(ids),
        "one owner, mod": 8 * (ids // 8),
        "one owner, block": ids % (V // 8),
        "one id": np.full(N_IDS, 5),
        "out of range": ids * 2 - V // 2,
        "of one device": np.where(np.arange(N_IDS) < N_IDS // 8, ids, -1),
    }
    return [(ids.astype(np.int32),) for ids in kinds.values()]


def loss_fn(params, ids):
    read = functools.partial(sj.lookup, ids=ids, mode="zero")
    rows = sum(jnp.tanh(read(table)) for table in params["tables"])
    return jnp.sum(rows * WEIGHTS * params["b"][None, :])


@functools.cache
def trained_on_one_device(name):
    params = {"tables": [*map(jnp.asarray, TABLES)], "b": jnp.ones(D)}
    step = dense_step_of(loss_fn, TXS[name], V)
    return run(step, params, TXS[name].init(params), batches())


def by_rows(mesh, axis, capacity=None):
    """A table of each layout; no number of devices here divides V."""
    layouts = zip(TABLES, ("mod", "block"))
    options: dict[str, Any] = dict(mesh=mesh, axis=axis, capacity=capacity)
    return [shard_rows(t, layout=layout, **options) for t, layout in layouts]


def specs_of(tree):
    return [x.sharding.spec for x in jax.tree.leaves(tree)]


# ------------------------------------------------------------------ sharded tables


@pytest.mark.window
@pytest.mark.parametrize(
    "name, shape, axis, capacity, kind",
    [
        ("clip, adam", (8,), "x", 3, AxisType.Auto),  # merged and held
        ("sgd", (2, 4), "x", 2, AxisType.Auto),  # over one of two axes
        ("momentum", (2, 2), ("d", "x"), 3, AxisType.Auto),
        ("clip, adam", (1, 2), "x", 1, AxisType.Explicit),  # sent twice
        ("clip, adam", (4,), "columns", None, AxisType.Explicit),
    ],
)
def test_equals_one_device(name, shape, axis, capacity, kind):
    mesh = mesh_of(shape, ("d", "x")[-len(shape) :], kind)
    tx, parts = sj.optim.lazy(TXS[name]), [mesh.axis_names]
    with jax.set_mesh(mesh):
        if axis == "columns":
            tables, parts = [shard_columns(t, mesh, "x") for t in TABLES], []
        else:
            tables = by_rows(mesh, axis, capacity)
        params = {"tables": tables, "b": place(mesh, np.ones(D, np.float32), None)}
        step: Any = jax.jit(step_of(loss_fn, tx), donate_argnums=(0, 1))
        split = [(place(mesh, ids, *parts),) for (ids,) in batches()]
        before = params, tx.init(params)
        found, state, losses = run(step, *before, split)
        assert step._cache_size() == 1
    assert all(x.is_deleted() for x in jax.tree.leaves(before) if x.ndim == 2)
    assert specs_of((found["tables"], state)) == specs_of((tables, before[1]))
    expected, _, dense_losses = trained_on_one_device(name)
    assert_close(losses, dense_losses)
    assert_close(whole(found["tables"]), expected["tables"])


@pytest.mark.parametrize("name", ["adam", "clip, adam"])
def test_updates_are_at_their_owners(name):
    """If somebody looks at them: each row once, ascending at its owner."""
    mesh, tx = mesh_of(2), sj.optim.lazy(TXS[name])
    table = shard_rows(TABLES[0], mesh, "x", capacity=1)
    params = {"tables": [table], "b": place(mesh, np.ones(D, np.float32))}

    @jax.jit
    def update(params, ids):
        grads = sj.grad(loss_fn)(params, ids)
        return tx.update(grads, tx.init(params), params)[0]

    (ids,) = batches()[1]
    updates = update(params, ids)["tables"][0]
    assert_at_owners(updates.values, table)
    before = {"tables": [jnp.asarray(TABLES[0])], "b": jnp.ones(D)}
    step = dense_step_of(loss_fn, TXS[name], V)
    after, *_ = step(before, TXS[name].init(before), ids)
    assert_close(whole(updates), after["tables"][0] - before["tables"][0])


def test_bfloat16_parts_are_summed_in_float32():
    table = shard_rows(np.zeros((V, 1), jnp.bfloat16), mesh_of(), "x", capacity=1)
    tx: Any = sj.optim.lazy(optax.sgd(1.0))

    def loss(table, ids):
        rows = sj.lookup(table, ids)
        return -jnp.sum(rows.astype(jnp.float32)) * jnp.float32(1.0078125)

    ids = np.full(256, 7, np.int32)  # 64 on each device
    after, *_ = jax.jit(step_of(loss, tx))(table, tx.init(table), ids)
    # Added one by one in bfloat16, 256 of them stop growing at half of that.
    assert float(np.asarray(whole(after))[7, 0]) == 258.0


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_state_made_inside_jit_lies_with_its_table(kind):
    table = shard_rows(TABLES[0], mesh_of(kind=kind), "x")
    params = {"t": table, "b": jnp.ones(D)}
    rows = optax.chain(optax.scale(0.5), sj.optim.lazy(optax.adam(0.1)))
    both = optax.partition(
        {"rows": rows, "dense": optax.adam(0.1)}, {"t": "rows", "b": "dense"}
    )
    own = sj.optim.rowwise_adagrad(0.1)  # a number a row
    for tx, tree in ((both, params), (own, table)):
        made, eager = jax.jit(tx.init)(tree), tx.init(tree)
        assert jax.tree.structure(made) == jax.tree.structure(eager)
        pairs = [*zip(jax.tree.leaves(made), jax.tree.leaves(eager))]
        stored = table.values.shape[:1]
        assert [x for x, _ in pairs if x.shape[:1] == stored]
        for x, y in pairs:
            assert_same_bits(x, y)
            if x.shape[:1] == stored:
                for leaf in (x, y):
                    at = table.values.sharding
                    assert leaf.committed and leaf.sharding.is_equivalent_to(at, x.ndim)


# ------------------------------------------------------------------ columns


def test_the_update_of_columns_is_local_and_in_place():
    """tests/docs/test_exchange_page.py has their bytes on the wire."""
    params = shard_columns(table_of(10_007, 16), mesh_of(), "x")
    loss = lambda table, ids: jnp.sum(jnp.sin(sj.lookup(table, ids)))
    tx = sj.optim.lazy(optax.adam(0.1))
    step = jax.jit(step_of(loss, tx), donate_argnums=(0, 1))
    ids, part = place(mesh_of(), jnp.arange(N_IDS)), params.nbytes // N
    compiled = step.lower(params, tx.init(params), ids).compile()
    # The loss is a sum over columns: one number. Nothing else moves.
    found = sj.viz.wire_bytes(compiled)
    assert found.total == 2 * 4 * (N - 1) // N, found
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * part  # the table and both moments
    assert memory.temp_size_in_bytes < part / 2


# ------------------------------------------------------------------ data_parallel


@pytest.mark.parametrize(
    ("capacity", "kind"),
    [
        ("no call", AxisType.Explicit),  # the result of jax.make_mesh
        (None, AxisType.Auto),
        (8, AxisType.Explicit),
        pytest.param("sharded", AxisType.Explicit, marks=pytest.mark.slow),
    ],
)
def test_data_parallel_equals_one_device(capacity, kind):
    mesh, tx = mesh_of(kind=kind), sj.optim.lazy(TXS["clip, adam"])

    def value_and_grad(loss_fn):
        def run(params, batch):
            loss, grads = sj.value_and_grad(loss_fn)(params, batch)
            if capacity in (None, 8):
                grads = sj.parallel.pmean(grads, "x", capacity=capacity)
            return loss, grads

        return run

    tables: Any = [*map(jnp.asarray, TABLES)]
    if capacity == "sharded":
        tables = [by_rows(mesh, "x")[0], shard_columns(TABLES[1], mesh, "x")]
    params = {"tables": tables, "b": jnp.ones(D)}
    specs = [P("x"), P(None, "x")]
    step = step_of(loss_fn, tx, value_and_grad)
    step = sj.parallel.data_parallel(step, mesh, "x")
    found, state, losses = run(step, params, tx.init(params), batches()[:-1])
    before = found["tables"][1]
    found, state, last = run(step, found, state, batches()[-1:])
    assert before.is_deleted()  # given away
    expected, _, dense_losses = trained_on_one_device("clip, adam")
    assert_close(np.append(losses, last), dense_losses)
    assert_close(whole(found["tables"]), expected["tables"])
    if capacity == "sharded":
        assert [x.spec for x in map(_sharding, found["tables"])] == specs
        return
    for leaf in jax.tree.leaves((found, state)):
        assert leaf.sharding.is_fully_replicated and len(leaf.devices()) == N

    compiled = step.lower(found, state, *batches()[0]).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= 6 * V * D * 4
    wire = sj.viz.wire_bytes(compiled, branch=min).by_kind
    ids, rows = 4 * N_IDS, 2 * 4 * N_IDS * D
    if capacity == "no call":
        assert wire["all-reduce"] <= 2 * rows * (N - 1) // N + 200
        assert wire["all-gather"] <= 2 * ids * (N - 1) // N
    elif capacity is None:
        # Both tables are read by the same ids.
        assert wire["all-gather"] == (ids + rows) * (N - 1) // N
        assert wire["all-reduce"] <= 200  # loss and dense gradients
    else:
        assert wire["all-gather"] == 2 * (N - 1) * capacity * (4 + 4 * D)


def _sharding(table):
    return getattr(table, "values", table).sharding


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


# ------------------------------------------------------------------ psum and pmean


def slots(per_device, seed=0):
    """Rows of all devices in a row: duplicates, empty slots with NaN in them."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 12, N * per_device).astype(np.int32)
    rows[::5] = V
    rows[3] = -1
    return make_rows(rows, V, (D,))[0]


# At 2 slots the distinct rows of a device do not fit, and all slots are sent.
@pytest.mark.window
@pytest.mark.parametrize(
    "capacity, vma, dtype",
    [
        (None, True, "float32"),
        (None, False, "float32"),
        (9, True, "bfloat16"),
        (2, False, "float32"),
    ],
)
def test_sum_over_devices(capacity, vma, dtype):
    mesh, g = mesh_of(), slots(10).astype(dtype)

    def both(g):
        total = sj.parallel.psum(g, "x", capacity=capacity)
        return total, sj.parallel.pmean({"t": g}, "x", capacity=capacity)

    def of_vmap(rows, values):
        g = sj.SelectedRows(rows, values, V)
        return sj.parallel.psum(g, "i", capacity=capacity)

    mapped = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=vma)
    )
    vmapped = jax.jit(jax.vmap(of_vmap, axis_name="i", out_axes=None))
    compiled = mapped.lower(g).compile()
    total, mean = compiled(g)
    assert total.capacity == N * 10 and total.dtype == dtype
    for shard in total.values.addressable_shards:  # replicas stay equal
        assert_same_bits(shard.data, total.values)
    found = total, mean["t"], vmapped(g.rows.reshape(N, 10), g.values.reshape(N, 10, D))
    want = whole(g)
    for x, y in zip(map(whole, found), (want, want / N, want), strict=True):
        np.testing.assert_array_equal(x, y)
    wire = sj.viz.wire_bytes(compiled, branch=min).by_kind
    sent = {None: 10, 9: 9, 2: 2}[capacity]
    assert wire["all-gather"] == (N - 1) * sent * (4 + 4 * D)


@pytest.mark.window
@pytest.mark.parametrize("vma", [True, False])
def test_a_step_under_shard_map_equals_one_device(vma):
    # With check_vma JAX has summed the gradient of `w` over the devices already, and
    # the gradient of the table varies over them.
    mesh, axes = mesh_of((2, 2), ("a", "b")), ("a", "b")
    params = {"t": jnp.ones((V, D)), "w": np.arange(1, D + 1, dtype=np.float32)}
    ids = np.random.default_rng(0).integers(0, 40, N_IDS).astype(np.int32)
    loss = lambda p, ids: jnp.mean((p["t"][ids] @ p["w"]) ** 2)

    def run(params, ids):
        value, g = sj.value_and_grad(loss)(params, ids)
        tree = {"loss": value, **g, "none": None}
        totals = sj.parallel.psum({**tree, "n": 1}, axes)
        part = sj.parallel.pmean(1.0 * ids, "b")
        return sj.parallel.pmean(tree, axes), totals, part

    specs: Any = dict(in_specs=(P(), P(axes)), check_vma=vma)
    specs["out_specs"] = P(), P(), P("a")
    means, totals, part = jax.jit(jax.shard_map(run, mesh=mesh, **specs))(params, ids)
    value, want = jax.jit(jax.value_and_grad(loss))(params, ids)
    want = {"loss": value, **want, "none": None}
    assert_trees_close(whole(means), want)
    assert int(totals.pop("n")) == (1 if vma else N)  # it does not vary
    n_times = jax.tree.map(lambda x: np.asarray(x) * np.float32(N), want)
    assert_trees_close(whole(totals), n_times)
    np.testing.assert_array_equal(part, ids.reshape(2, 2, -1).mean(1).reshape(-1))


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
    np.testing.assert_array_equal(*whole((found["g"], g)))
    assert float(found["n"]) == 1.0
