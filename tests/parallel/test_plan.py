"""plan: its formulas against compiled programs, its advice, and models that it placed.

The oracle of a trained model is the same program without a plan, on one device.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from helpers import assert_same_bits, assert_trees_close, drawn, whole
from one_device import assert_in_place, mesh_of, place, run, step_of


# optax itself relies on implicit promotion.
pytestmark = [pytest.mark.usefixtures("eight_devices", "loose_promotion")]
V, D, N, BATCH = 5_003, 8, 4, 256
MESH = AbstractMesh((N,), ("x",))
plan = sj.parallel.plan


def spec(*shape, dtype: Any = jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


count = functools.partial(spec, dtype=jnp.int32)  # ids that are not known yet
SPEC = spec(V, D)
IDS = (np.random.default_rng(0).zipf(1.2, BATCH) % V).astype(np.int32)


# ------------------------------------------------------------------ costs


# XLA gathers the ids of a column-sharded table three times, if it must. Replicas
# exchange the ids of as many rounds as there might be.
@pytest.mark.parametrize(
    ("layout", "replicas", "wire_dtype", "tolerance"),
    [
        ("row-sharded", 1, None, 0.05),
        ("row-sharded", 1, jnp.bfloat16, 0.05),
        ("row-sharded", 2, None, 0.15),
        ("column-sharded", 1, jnp.bfloat16, 0.35),
        ("replicated-sparse", 1, None, 0.01),
        ("replicated-dense", 1, None, 0.01),
    ],
)
def test_formulas_against_compiled_programs(layout, replicas, wire_dtype, tolerance):
    mesh = mesh_of((replicas, N // replicas), ("r", "x"))
    (found,) = plan(SPEC, mesh, IDS, axis="x", wire_dtype=wire_dtype).tables
    table, lookup, reduce = np.ones((V, D), np.float32), sj.lookup, lambda g: g
    ids_spec, tables = P(("r", "x")), layout != "replicated-dense"
    if layout == "row-sharded":
        options = {"capacity": found.capacity, "wire_dtype": wire_dtype}
        table = sj.parallel.shard_rows(table, mesh, "x", **options)
    elif layout == "column-sharded":
        table, ids_spec = sj.parallel.shard_columns(table, mesh, "x"), P()
        whole = NamedSharding(mesh, P("x"))
        lookup = lambda t, ids: jax.lax.with_sharding_constraint(
            sj.lookup(t, ids), whole
        )
    elif layout == "replicated-sparse":
        reduce = lambda g: sj.parallel.psum(g, "x", capacity=found.distinct)
    tx = sj.optim.lazy(optax.sgd(0.1)) if tables else optax.sgd(0.1)
    loss = lambda t, ids: jnp.sum(jnp.linalg.norm(lookup(t, ids), axis=1))

    def step(params, state, ids):
        grads = reduce(sj.grad(loss, tables=tables)(params, ids))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = sj.parallel.data_parallel(step, mesh, ("r", "x"))
    ids = jax.device_put(IDS, NamedSharding(mesh, ids_spec))
    compiled = run.lower(table, tx.init(table), ids).compile()
    wire = sj.viz.wire_bytes(compiled, branch=min)
    assert wire.total == pytest.approx(found.costs[layout].wire, rel=tolerance), wire


def test_memory_of_state():
    """Also of masks, labels and capacities, which need the whole tree of parameters."""
    params = {"t": jnp.ones((V, D)), "u": jnp.ones((V + 1, D)), "w": jnp.ones((D, 1))}
    labels = {"t": "a", "u": "b", "w": "b"}
    parts = {"a": sj.optim.rowwise_adagrad(0.1), "b": optax.adam(1e-3)}
    masked = optax.masked(optax.trace(0.9), {"t": False, "u": True, "w": True})
    adam, capacity = sj.optim.lazy(optax.adam(1e-3)), {"t": 64, "u": 64, "w": None}
    loss = lambda p, b: jnp.sum(p["t"][b] @ p["w"] + p["u"][b] @ p["w"])
    moments = 2 * D * 4
    for tx, state_of_a_row in [
        (optax.adam(1e-3), (moments, moments)),
        (sj.optim.lazy(optax.partition(parts, labels)), (4, moments)),
        (sj.optim.lazy(optax.chain(masked, optax.sgd(0.1))), (0, D * 4)),
        (sj.optim.accumulate(adam, 2, capacity), (moments, moments)),
    ]:
        found = plan(params, MESH, IDS, loss=loss, tx=tx).tables
        for table, state in zip(found, state_of_a_row):
            height, row = table.shape[0], D * 4 + state
            memory = {name: cost.memory for name, cost in table.costs.items()}
            assert memory["replicated-dense"] == memory["replicated-sparse"]
            assert memory["replicated-sparse"] == height * row
            assert memory["row-sharded"] == -(-height // N) * row
            narrow = 4 if state == 4 else 0  # a number a row has no columns to shard
            columns = height * (row - narrow) // N + height * narrow
            assert memory["column-sharded"] == columns


def test_bytes_in_16_bits():
    """Other numbers are sent; apply makes the tables that it counted."""
    tables = {"float": spec(50_003, 32), "half": spec(50_003, 16, dtype=jnp.float16)}
    ids = dict.fromkeys(tables, count(2_048))
    stacks = {"float": (20_000, 30_003)}
    make = functools.partial(plan, tables, mesh_of(8), ids, stacks=stacks)
    narrow = make(wire_dtype=jnp.bfloat16)
    (table, half), (before, same) = narrow.tables, make().tables
    assert half == same and half.wire_dtype is None
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
    assert placed["float"].wire_dtype == jnp.bfloat16
    assert placed["half"].wire_dtype is None


# ------------------------------------------------------------------ advice


def test_duplicates_and_skew_are_measured():
    one_owner = np.arange(BATCH) * N % V  # as long as it does not wrap, owner 0
    one_owner = one_owner[one_owner % N == 0][: BATCH // 2]
    size, here = one_owner.size, one_owner.size // N
    batch = {"owner": one_owner, "same": np.full(size, 7), "even": np.arange(size)}
    found = plan(dict.fromkeys(batch, SPEC), MESH, batch)
    assert {
        t.name[8:-2]: (t.ids, t.distinct, t.capacity, t.choice) for t in found.tables
    } == {
        "owner": (here, here, here, "column-sharded"),
        "same": (here, 1, 1, "replicated-sparse"),
        "even": (here, here, here // N, "row-sharded"),
    }


def test_recommendations_and_memory_limits():
    tables = {"big": spec(10**8, 64), "odd": spec(10**6, 30), "small": spec(50, 64)}
    mesh = AbstractMesh((2, 4), ("a", "b"))
    ids = dict.fromkeys(tables, np.arange(8_192) // 2)
    found = plan(tables, mesh, ids | {"small": np.arange(8_192) % 50})
    choices = [t.choice for t in found.tables]
    assert choices == ["row-sharded", "row-sharded", "replicated-dense"]
    assert "column-sharded" not in found["params['odd']"].costs
    assert found.total.wire == sum(t.costs[t.choice].wire for t in found.tables)
    ids = dict.fromkeys(tables, count(8_192))
    assert plan(tables, mesh, ids, axis="a").tables[0].ids == 4_096
    (one,) = plan(SPEC, AbstractMesh((1,), ("x",)), count(80)).tables
    assert one.choice == "replicated-sparse"

    # Two tables that are best replicated; with room for one, one of them is cut.
    tables = {"a": spec(1_000, 16), "b": spec(1_000, 32)}
    ids = {"a": count(4_000), "b": count(40_000)}
    free = plan(tables, MESH, ids)
    assert {t.choice for t in free.tables} == {"replicated-dense"}
    limit = 1_000 * 32 * 4 + 1_000 * 16 * 4 // 2
    tight = plan(tables, MESH, ids, device_bytes=limit)
    assert [t.choice for t in tight.tables] == ["row-sharded", "replicated-dense"]
    assert tight.total.memory <= limit
    fixed = {"b": "replicated-sparse"}
    none = plan(tables, MESH, ids, device_bytes=100, layouts=fixed)
    assert none.tables[1].choice == "replicated-sparse"
    assert "too large for any layout" in repr(none)


def test_reads_are_found_in_a_loss():
    """Also with abstract parameters, and ids that depend on rows that were read."""

    def loss(params, batch):
        rows = params["a"][batch["ids"] // 2]
        rows += params["a"][batch["ids"] % 2] + params["b"][batch["ids"]]
        return jnp.sum(rows @ params["w"]), params["b"].shape

    params = {"a": SPEC, "b": SPEC, "w": spec(D, D)}
    found = plan(params, MESH, {"ids": IDS}, loss=loss)
    assert [t.name for t in found.tables] == ["params['a']", "params['b']"]
    first, second = found.tables
    (alone,) = plan(SPEC, MESH, IDS).tables
    for name in ("ids", "distinct", "capacity", "costs"):
        assert getattr(second, name) == getattr(alone, name)
    split = place(mesh_of(N, kind=AxisType.Explicit), IDS, "x")
    assert plan(SPEC, split.sharding.mesh, split).tables == (alone,)
    assert first.ids == 2 * second.ids and first.is_measured
    assert "params['w']" not in repr(found)
    # Without ids their number is known.
    unknown = plan(params, MESH, {"ids": count(BATCH)}, loss=loss)
    assert not unknown.tables[0].is_measured and unknown.tables[0].ids == first.ids
    assert repr(unknown).splitlines()[2].split()[2:4] == [str(first.ids), "-"]

    def of_rows(params, ids):
        rows = params["a"][ids]
        return jnp.sum(rows * params["b"][jnp.argmax(rows, axis=1)])

    params = {"a": jnp.ones((V, D)).at[:, 2].set(5.0), "b": jnp.ones((V, D))}
    found = plan(params, MESH, IDS, loss=of_rows)
    assert found["params['b']"].distinct == 1 < found["params['a']"].distinct


def test_prints_as_a_table():
    ids = np.arange(4 * 5_120) // 2
    found = plan({"user": spec(100_000, 32)}, MESH, {"user": ids})
    head, rule, user, total, where = repr(found).splitlines()
    assert head.split()[:4] == ["table", "shape", "ids", "distinct"]
    assert set(rule) == {"-"}
    assert user.startswith("params['user']  float32[100000,32]  5,120     2,560")
    assert user.endswith("row-sharded  3.2 MB  507 kB")
    assert total.startswith("total") and where.startswith("4 devices")


# ------------------------------------------------------------------ models


def test_apply_and_layouts():
    mesh = mesh_of(8)
    params = {"a": jnp.ones((V, D)), "b": np.ones((V, D), np.float32), "w": jnp.ones(3)}
    loss = lambda p, ids: jnp.sum(p["a"][ids]) + jnp.sum(p["b"][ids]) + p["w"][0]
    layouts = {"params['a']": "row-sharded", "['b']": "column-sharded"}
    make = functools.partial(plan, params, mesh, IDS, loss=loss)
    found = make(layouts=layouts, device_bytes=V)
    assert [t.choice for t in found.tables] == ["row-sharded", "column-sharded"]
    placed = found.apply(params)
    capacity = found["params['a']"].capacity
    assert capacity < placed["a"].capacity <= 1.1 * capacity + 1
    assert placed["b"].sharding.spec == P(None, "x")
    assert placed["w"].sharding.spec == P() and len(placed["w"].devices()) == 8
    # Again, from sharded tables: by rows they stay where they are.
    again = plan(placed, mesh, IDS, loss=loss, layouts=layouts)
    assert jax.tree.structure(again.apply(placed)) == jax.tree.structure(placed)
    for layout in ("replicated-dense", "column-sharded"):  # elsewhere
        moved = make(layouts=dict.fromkeys(layouts, layout)).apply(placed)
        assert_same_bits(moved["a"], params["a"])
        is_whole = moved["a"].sharding.is_fully_replicated
        assert is_whole == (layout == "replicated-dense")
    abstract = found.apply(jax.eval_shape(lambda: params))
    shardings = lambda tree: [x.sharding for x in jax.tree.leaves(tree)]
    assert shardings(abstract) == shardings(placed)


@pytest.mark.slow
def test_trained_on_one_device_and_on_eight():
    layouts = {"a": "row-sharded", "b": "column-sharded", "c": "replicated-sparse"}
    heights = {"a": 301, "b": 223, "c": 98}
    params = drawn({name: spec(n, D) for name, n in heights.items()} | {"w": spec(D)})
    rng = np.random.default_rng(0)
    batches = [{k: rng.zipf(1.2, 16) % n for k, n in heights.items()} for _ in range(3)]

    def loss_fn(params, ids):
        a, b, c = (params[name][ids[name]] for name in heights)
        return jnp.mean(jnp.tanh((a * (b + c)) @ params["w"]))

    made = plan(params, mesh_of(8), batches[0], loss=loss_fn, layouts=layouts)
    assert [table.choice for table in made.tables] == list(layouts.values())
    tx = sj.optim.lazy(optax.adagrad(0.05))
    step = jax.jit(step_of(loss_fn, tx), donate_argnums=(0, 1))
    trained = []
    for put, sharding in ((made.apply, made.batch_sharding), (lambda x: x, None)):
        placed = put(jax.tree.map(jnp.copy, params))  # the step overwrites them
        split = [(jax.device_put(batch, sharding),) for batch in batches]
        trained.append(run(step, placed, tx.init(placed), split)[0])
    assert isinstance(trained[0]["a"], sj.parallel.ShardedTable)
    assert_trees_close(*map(whole, trained), rtol=1e-5, atol=1e-5)


def bags_of(length, heights, size, width):
    """Parameters, a loss and a batch of a collection with a bag for each table."""
    layer = sj.nn.EmbeddingCollection(
        {f"t{k}": (height, width) for k, height in enumerate(heights)}
    )

    def loss_fn(params, batch):
        out = layer(params["tables"], batch["ids"])
        rows = jnp.stack([out[name] for name in batch["ids"]], axis=1)
        scores = jnp.einsum("bfd,d->b", jnp.tanh(rows), params["w"])
        return jnp.mean((scores - batch["y"]) ** 2)

    rng = np.random.default_rng(0)
    ids = {
        f"t{k}": (rng.zipf(1.2, (size, length)) % height).astype(np.int32)
        for k, height in enumerate(heights)
    }
    batch = {"ids": ids, "y": rng.normal(size=size).astype(np.float32)}
    tables = drawn(jax.eval_shape(lambda: layer.init(jax.random.key(0))))
    params = {"tables": tables, "w": jnp.ones(width)}
    return params, batch, dict(loss=loss_fn, stacks=layer.heights())


@pytest.mark.parametrize("layout", ["table-wise", "table-row-wise"])
def test_the_sums_of_bags_are_sent(layout):
    """Less than half of the bytes of rows."""
    heights = [30_000, 20_000, 9_000, 8_000, 7_000, 6_000, 5_000, 3_000]
    params, batch, options = bags_of(20, heights, 128, 32)
    (name,), tx = params["tables"], sj.optim.lazy(optax.adagrad(0.1))
    layouts = {f"params['tables']['{name}']": layout}
    mesh = mesh_of((2, 2), ("host", "x"))
    made = plan(params, mesh, batch, tx=tx, layouts=layouts, **options)
    (table,) = made.tables
    assert table.costs[layout].wire < 0.5 * table.costs["row-sharded"].wire
    params = made.apply(params)
    held = params["tables"][name]
    assert held.layout == table.costs[layout].layout
    assert table.costs[layout].memory == 2 * held.rows_per_shard * 32 * 4
    assert layout in repr(made)
    batch, state = jax.device_put(batch, made.batch_sharding), tx.init(params)
    step = jax.jit(step_of(options["loss"], tx), donate_argnums=(0, 1))
    compiled = step.lower(params, state, batch).compile()
    wire = sj.viz.wire_bytes(compiled)
    # Besides, the gradient of `w` and the loss.
    assert wire.total == pytest.approx(made.total.wire, rel=0.01), wire
    assert_in_place(compiled.as_text(), held)
    # The first step's buffers belong to NumPy, and are never overwritten.
    where = lambda params: [
        shard.data.unsafe_buffer_pointer()
        for shard in params["tables"][name].values.addressable_shards
    ]
    params, state, _ = compiled(params, state, batch)
    before = where(params)
    params, *_ = compiled(params, state, batch)
    assert where(params) == before


def test_table_wise_is_chosen_for_bags_not_for_single_ids():
    for length, expected in ((20, "table-wise"), (1, "row-sharded")):
        params, batch, options = bags_of(length, [5000] * 8, 256, 30)
        (table,) = plan(params, MESH, batch, **options).tables
        assert table.choice == expected
        # All devices have two of the tables.
        placed: Any = table.costs["table-wise"].layout
        assert sorted(placed.groups) == sorted([0, 1, 2, 3] * 2)
