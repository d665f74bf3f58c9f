"""plan: its formulas against compiled programs, its measures and its advice."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj


# optax itself relies on implicit promotion.
pytestmark = [pytest.mark.usefixtures("eight_devices", "loose_promotion")]
V, D, N, BATCH = 5_003, 8, 4, 256
MESH = AbstractMesh((N,), ("x",))


def make_ids():
    rng = np.random.default_rng(0)
    return (rng.zipf(1.2, BATCH) % V).astype(np.int32)


def compiled_wire(layout, sample, capacity, distinct):
    """The bytes that a step with this layout sends, from the compiled program."""
    mesh = jax.make_mesh(
        (N,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:N]
    )
    table, lookup, reduce = np.ones((V, D), np.float32), sj.lookup, lambda g: g
    ids_spec, tables = P("x"), True
    if layout == "row-sharded":
        table = sj.parallel.shard_rows(table, mesh, "x", capacity=capacity)
    elif layout == "column-sharded":
        table, ids_spec = sj.parallel.shard_columns(table, mesh, "x"), P()
        whole = NamedSharding(mesh, P("x"))
        lookup = lambda t, ids: jax.lax.with_sharding_constraint(
            sj.lookup(t, ids), whole
        )
    elif layout == "replicated-sparse":
        reduce = lambda g: sj.parallel.psum(g, "x", capacity=distinct)
    else:
        tables = False
    tx = optax.sgd(0.1) if not tables else sj.optim.lazy(optax.sgd(0.1))

    def step(params, state, ids):
        loss = lambda t: jnp.sum(jnp.linalg.norm(lookup(t, ids), axis=1))
        grads = reduce(sj.grad(loss, tables=tables)(params))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = sj.parallel.data_parallel(step, mesh, "x")
    ids = jax.device_put(sample, NamedSharding(mesh, ids_spec))
    compiled = run.lower(table, tx.init(table), ids).compile()
    return sj.viz.wire_bytes(compiled, branch=min)


# XLA gathers the ids of a column-sharded table three times, if it must.
@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [
        ("row-sharded", 0.05),
        ("column-sharded", 0.35),
        ("replicated-sparse", 0.01),
        ("replicated-dense", 0.01),
    ],
)
def test_formulas_against_compiled_programs(layout, tolerance):
    ids = make_ids()
    (found,) = sj.parallel.plan((V, D), MESH, ids).tables
    wire = compiled_wire(layout, ids, found.capacity, found.distinct)
    assert wire.total == pytest.approx(found.costs[layout].wire, rel=tolerance), wire


def test_rows_that_are_replicated_over_another_axis():
    ids = make_ids()
    mesh = jax.make_mesh(
        (2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:N]
    )
    (found,) = sj.parallel.plan((V, D), mesh, ids, axis="b").tables
    table = np.ones((V, D), np.float32)
    table = sj.parallel.shard_rows(table, mesh, "b", capacity=found.capacity)

    def step(table, ids):
        read = lambda t: sj.lookup(t, ids)
        grads = sj.grad(lambda t: jnp.sum(jnp.linalg.norm(read(t), axis=1)))(table)
        return optax.apply_updates(table, -grads)

    ids = jax.device_put(ids, NamedSharding(mesh, P(("a", "b"))))
    compiled = jax.jit(step).lower(table, ids).compile()
    wire = sj.viz.wire_bytes(compiled, branch=min)
    # Replicas exchange the ids of as many rounds as there might be.
    assert wire.total == pytest.approx(found.costs["row-sharded"].wire, rel=0.15), wire


def test_memory_and_state():
    # Both moments of Adam, and rowwise Adagrad's one number a row.
    specs = {"a": jax.ShapeDtypeStruct((V, D), jnp.float32)}
    found = sj.parallel.plan(specs, MESH, 100, tx=optax.adam(1e-3)).tables[0]
    row = 3 * D * 4
    assert found.costs["replicated-dense"].memory == V * row
    assert found.costs["row-sharded"].memory == -(-V // N) * row
    assert found.costs["column-sharded"].memory == V * row // N
    tx = sj.optim.lazy(sj.optim.rowwise_adagrad(0.1))
    found = sj.parallel.plan(specs, MESH, 100, tx=tx)["tables['a']"]
    assert found.costs["column-sharded"].memory == V * D * 4 // N + V * 4


def test_state_of_labels_masks_and_capacities():
    # Each needs the whole tree of parameters.
    params = {"t": jnp.ones((V, D)), "u": jnp.ones((V + 1, D)), "w": jnp.ones((D, 1))}
    labels = {"t": "a", "u": "b", "w": "b"}
    parts = {"a": sj.optim.rowwise_adagrad(0.1), "b": optax.adam(1e-3)}
    masked = optax.masked(optax.trace(0.9), {"t": False, "u": True, "w": True})
    loss = lambda p, b: jnp.sum(p["t"][b] @ p["w"] + p["u"][b] @ p["w"])
    for tx, state_of_a_row in [
        (sj.optim.lazy(optax.partition(parts, labels)), (4, 2 * D * 4)),
        (sj.optim.lazy(optax.chain(masked, optax.sgd(0.1))), (0, D * 4)),
        (
            sj.optim.accumulate(
                sj.optim.lazy(optax.adam(1e-3)), 2, {"t": 64, "u": 64, "w": None}
            ),
            (2 * D * 4, 2 * D * 4),
        ),
    ]:
        found = sj.parallel.plan(params, MESH, make_ids(), loss=loss, tx=tx)
        sizes = [
            t.costs["replicated-sparse"].memory // t.shape[0] for t in found.tables
        ]
        assert sizes == [D * 4 + state for state in state_of_a_row]


def test_duplicates_and_skew_are_measured():
    one_owner = np.arange(BATCH) * N % V  # as long as it does not wrap, owner 0
    one_owner = one_owner[one_owner % N == 0][: BATCH // 2]
    same = np.full(one_owner.size, 7)
    tables = {"owner": (V, D), "same": (V, D), "even": (V, D)}
    batch = {"owner": one_owner, "same": same, "even": np.arange(one_owner.size)}
    found = sj.parallel.plan(tables, MESH, batch)
    here = one_owner.size // N
    measured = {t.name[8:-2]: (t.ids, t.distinct, t.capacity) for t in found.tables}
    assert measured == {
        "owner": (here, here, here),
        "same": (here, 1, 1),
        "even": (here, here, here // N),
    }
    assert found["tables['owner']"].choice == "column-sharded"
    assert found["tables['same']"].choice == "replicated-sparse"
    assert found["tables['even']"].choice == "row-sharded"


def test_recommendations_and_memory_limits():
    tables = {"big": (10**8, 64), "odd": (10**6, 30), "small": (50, 64)}
    mesh = AbstractMesh((2, 4), ("a", "b"))
    found = sj.parallel.plan(tables, mesh, np.arange(8_192) // 2)
    assert found.num_devices == 8
    choices = [t.choice for t in found.tables]
    assert choices == ["row-sharded", "row-sharded", "replicated-dense"]
    assert "column-sharded" not in found["tables['odd']"].costs
    assert found.total.wire == sum(t.costs[t.choice].wire for t in found.tables)
    found = sj.parallel.plan(tables, mesh, 8_192, axis="a")
    assert (found.num_devices, found.tables[0].ids) == (2, 4_096)

    # Two tables that are best replicated; with room for one, one of them is cut.
    tables = {"a": (1_000, 16), "b": (1_000, 32)}
    sizes = 1_000 * 16 * 4, 1_000 * 32 * 4
    free = sj.parallel.plan(tables, MESH, {"a": 4_000, "b": 40_000})
    assert {t.choice for t in free.tables} == {"replicated-dense"}
    limit = sizes[1] + sizes[0] // 2
    tight = sj.parallel.plan(
        tables, MESH, {"a": 4_000, "b": 40_000}, device_bytes=limit
    )
    assert [t.choice for t in tight.tables] == ["row-sharded", "replicated-dense"]
    assert tight.total.memory <= limit
    none = sj.parallel.plan(tables, MESH, 4_000, device_bytes=100)
    assert "too large for any layout" in repr(none)


def test_reads_are_found_in_a_loss():
    """Works with abstract parameters, since ids depend only on the batch."""

    def loss(params, batch):
        rows = params["a"][batch["ids"] // 2]
        rows += params["a"][batch["ids"] % 2] + params["b"][batch["ids"]]
        return jnp.sum(rows @ params["w"]), params["b"].shape

    shapes = {"a": (V, D), "b": (V, D), "w": (D, D)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    ids = make_ids()
    found = sj.parallel.plan(params, MESH, {"ids": ids}, loss=loss)
    assert [t.name for t in found.tables] == ["params['a']", "params['b']"]
    first, second = found.tables
    (alone,) = sj.parallel.plan((V, D), MESH, ids).tables
    assert (second.ids, second.distinct, second.capacity, second.costs) == (
        alone.ids,
        alone.distinct,
        alone.capacity,
        alone.costs,
    )
    assert first.ids == 2 * second.ids and first.is_measured
    assert "params['w']" not in repr(found)
    # Without ids their number is known.
    batch = {"ids": jax.ShapeDtypeStruct((BATCH,), jnp.int32)}
    unknown = sj.parallel.plan(params, MESH, batch, loss=loss)
    assert not unknown.tables[0].is_measured and unknown.tables[0].ids == first.ids
    assert unknown.describe().splitlines()[2].split()[2:4] == [str(first.ids), "-"]


def test_ids_that_depend_on_rows_are_found():
    def loss(params, ids):
        rows = params["a"][ids]
        return jnp.sum(rows * params["b"][jnp.argmax(rows, axis=1)])

    params = {"a": jnp.ones((V, D)).at[:, 2].set(5.0), "b": jnp.ones((V, D))}
    found = sj.parallel.plan(params, MESH, make_ids(), loss=loss)
    assert found["params['b']"].distinct == 1 < found["params['a']"].distinct


def test_apply_and_layouts():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    params = {"a": jnp.ones((V, D)), "b": np.ones((V, D), np.float32), "w": jnp.ones(3)}
    batch = {"a": make_ids(), "b": 80, "w": None}
    layouts = {"tables['a']": "row-sharded", "tables['b']": "column-sharded"}
    found = sj.parallel.plan(params, mesh, batch, layouts=layouts, device_bytes=V)
    assert [t.choice for t in found.tables] == ["row-sharded", "column-sharded"]
    placed = found.apply(params)
    capacity = found["tables['a']"].capacity
    ends = {"a": "row-sharded", "['b']": "column-sharded"}
    by_ends = sj.parallel.plan(params, mesh, batch, layouts=ends, device_bytes=V)
    assert [t.choice for t in by_ends.tables] == [t.choice for t in found.tables]
    assert capacity < placed["a"].capacity <= 1.1 * capacity + 1
    assert placed["b"].sharding.spec == P(None, "x")
    assert placed["w"].sharding.spec == P() and len(placed["w"].devices()) == 8
    assert jax.tree.structure(found.apply(placed)) == jax.tree.structure(placed)
    abstract = found.apply(jax.eval_shape(lambda: params))
    assert abstract["a"].sharding == placed["a"].sharding
    assert [x.sharding for x in jax.tree.leaves(abstract)] == [
        x.sharding for x in jax.tree.leaves(placed)
    ]
    (one,) = sj.parallel.plan((V, D), AbstractMesh((1,), ("x",)), 80).tables
    assert one.choice == "replicated-sparse"


def test_prints_as_a_table():
    ids = np.arange(4 * 5_120) // 2
    found = sj.parallel.plan({"user": (100_000, 32)}, MESH, ids)
    head, rule, user, total, where = repr(found).splitlines()
    assert head.split()[:4] == ["table", "shape", "ids", "distinct"]
    assert set(rule) == {"-"}
    assert user.startswith("tables['user']  float32[100000,32]  5,120     2,560")
    assert user.endswith("row-sharded  3.2 MB  507 kB  10.1 us")
    assert repr(found) == found.describe()
    assert total.startswith("total") and where.startswith("4 devices")
