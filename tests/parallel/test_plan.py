"""plan: its formulas against compiled programs, its advice, and models that it placed.

The oracle of a trained model is the same program without a plan, on one device.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false

import functools

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
SPEC = jax.ShapeDtypeStruct((V, D), jnp.float32)


def spec(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def count(n):
    """Ids that are not known yet."""
    return jax.ShapeDtypeStruct((n,), jnp.int32)


def make_ids():
    rng = np.random.default_rng(0)
    return (rng.zipf(1.2, BATCH) % V).astype(np.int32)


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
    ids = make_ids()
    options = {"axis": "x", "wire_dtype": wire_dtype}
    (found,) = sj.parallel.plan(SPEC, mesh, ids, **options).tables
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
    ids = jax.device_put(ids, NamedSharding(mesh, ids_spec))
    compiled = run.lower(table, tx.init(table), ids).compile()
    wire = sj.viz.wire_bytes(compiled, branch=min)
    assert wire.total == pytest.approx(found.costs[layout].wire, rel=tolerance), wire


def test_memory_and_state():
    # Both moments of Adam, and rowwise Adagrad's one number a row.
    specs, ids = {"a": SPEC}, {"a": count(100)}
    found = sj.parallel.plan(specs, MESH, ids, tx=optax.adam(1e-3)).tables[0]
    row = 3 * D * 4
    assert found.costs["replicated-dense"].memory == V * row
    assert found.costs["row-sharded"].memory == -(-V // N) * row
    assert found.costs["column-sharded"].memory == V * row // N
    tx = sj.optim.lazy(sj.optim.rowwise_adagrad(0.1))
    found = sj.parallel.plan(specs, MESH, ids, tx=tx)["params['a']"]
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
    tables = {"owner": SPEC, "same": SPEC, "even": SPEC}
    batch = {"owner": one_owner, "same": same, "even": np.arange(one_owner.size)}
    found = sj.parallel.plan(tables, MESH, batch)
    here = one_owner.size // N
    measured = {t.name[8:-2]: (t.ids, t.distinct, t.capacity) for t in found.tables}
    assert measured == {
        "owner": (here, here, here),
        "same": (here, 1, 1),
        "even": (here, here, here // N),
    }
    assert found["params['owner']"].choice == "column-sharded"
    assert found["params['same']"].choice == "replicated-sparse"
    assert found["params['even']"].choice == "row-sharded"


def test_recommendations_and_memory_limits():
    tables = {"big": spec(10**8, 64), "odd": spec(10**6, 30), "small": spec(50, 64)}
    mesh = AbstractMesh((2, 4), ("a", "b"))
    ids = dict.fromkeys(tables, np.arange(8_192) // 2) | {
        "small": np.arange(8_192) % 50
    }
    found = sj.parallel.plan(tables, mesh, ids)
    choices = [t.choice for t in found.tables]
    assert choices == ["row-sharded", "row-sharded", "replicated-dense"]
    assert "column-sharded" not in found["params['odd']"].costs
    assert found.total.wire == sum(t.costs[t.choice].wire for t in found.tables)
    ids = dict.fromkeys(tables, count(8_192))
    assert sj.parallel.plan(tables, mesh, ids, axis="a").tables[0].ids == 4_096
    (one,) = sj.parallel.plan(SPEC, AbstractMesh((1,), ("x",)), count(80)).tables
    assert one.choice == "replicated-sparse"

    # Two tables that are best replicated; with room for one, one of them is cut.
    tables, ids = {"a": spec(1_000, 16), "b": spec(1_000, 32)}, {}
    ids = {"a": count(4_000), "b": count(40_000)}
    free = sj.parallel.plan(tables, MESH, ids)
    assert {t.choice for t in free.tables} == {"replicated-dense"}
    limit = 1_000 * 32 * 4 + 1_000 * 16 * 4 // 2
    tight = sj.parallel.plan(tables, MESH, ids, device_bytes=limit)
    assert [t.choice for t in tight.tables] == ["row-sharded", "replicated-dense"]
    assert tight.total.memory <= limit
    fixed = {"b": "replicated-sparse"}
    none = sj.parallel.plan(tables, MESH, ids, device_bytes=100, layouts=fixed)
    assert none.tables[1].choice == "replicated-sparse"
    assert "too large for any layout" in repr(none)


def test_reads_are_found_in_a_loss():
    """Works with abstract parameters, since ids depend only on the batch."""

    def loss(params, batch):
        rows = params["a"][batch["ids"] // 2]
        rows += params["a"][batch["ids"] % 2] + params["b"][batch["ids"]]
        return jnp.sum(rows @ params["w"]), params["b"].shape

    params = {"a": SPEC, "b": SPEC, "w": spec(D, D)}
    ids = make_ids()
    found = sj.parallel.plan(params, MESH, {"ids": ids}, loss=loss)
    assert [t.name for t in found.tables] == ["params['a']", "params['b']"]
    first, second = found.tables
    (alone,) = sj.parallel.plan(SPEC, MESH, ids).tables
    assert (second.ids, second.distinct, second.capacity, second.costs) == (
        alone.ids,
        alone.distinct,
        alone.capacity,
        alone.costs,
    )
    assert first.ids == 2 * second.ids and first.is_measured
    assert "params['w']" not in repr(found)
    # Without ids their number is known.
    unknown = sj.parallel.plan(params, MESH, {"ids": count(BATCH)}, loss=loss)
    assert not unknown.tables[0].is_measured and unknown.tables[0].ids == first.ids
    assert repr(unknown).splitlines()[2].split()[2:4] == [str(first.ids), "-"]


def test_ids_may_be_sharded():
    mesh, ids = mesh_of(N, kind=AxisType.Explicit), make_ids()
    (found,) = sj.parallel.plan(SPEC, mesh, place(mesh, ids, "x")).tables
    (expected,) = sj.parallel.plan(SPEC, MESH, ids).tables
    assert found == expected


def test_ids_that_depend_on_rows_are_found():
    def loss(params, ids):
        rows = params["a"][ids]
        return jnp.sum(rows * params["b"][jnp.argmax(rows, axis=1)])

    params = {"a": jnp.ones((V, D)).at[:, 2].set(5.0), "b": jnp.ones((V, D))}
    found = sj.parallel.plan(params, MESH, make_ids(), loss=loss)
    assert found["params['b']"].distinct == 1 < found["params['a']"].distinct


def test_apply_and_layouts():
    mesh = mesh_of(8)
    params = {"a": jnp.ones((V, D)), "b": np.ones((V, D), np.float32), "w": jnp.ones(3)}
    loss = lambda p, ids: jnp.sum(p["a"][ids]) + jnp.sum(p["b"][ids]) + p["w"][0]
    layouts = {"params['a']": "row-sharded", "['b']": "column-sharded"}
    plan = functools.partial(sj.parallel.plan, params, mesh, make_ids(), loss=loss)
    found = plan(layouts=layouts, device_bytes=V)
    assert [t.choice for t in found.tables] == ["row-sharded", "column-sharded"]
    placed = found.apply(params)
    capacity = found["params['a']"].capacity
    assert capacity < placed["a"].capacity <= 1.1 * capacity + 1
    assert placed["b"].sharding.spec == P(None, "x")
    assert placed["w"].sharding.spec == P() and len(placed["w"].devices()) == 8
    # Again, from sharded tables: by rows they stay where they are.
    again = sj.parallel.plan(placed, mesh, make_ids(), loss=loss, layouts=layouts)
    assert jax.tree.structure(again.apply(placed)) == jax.tree.structure(placed)
    for layout in ("replicated-dense", "column-sharded"):  # elsewhere
        moved = plan(layouts=dict.fromkeys(layouts, layout)).apply(placed)
        assert_same_bits(moved["a"], params["a"])
        is_whole = moved["a"].sharding.is_fully_replicated
        assert is_whole == (layout == "replicated-dense")
    abstract = found.apply(jax.eval_shape(lambda: params))
    shardings = lambda tree: [x.sharding for x in jax.tree.leaves(tree)]
    assert shardings(abstract) == shardings(placed)


def test_prints_as_a_table():
    ids = np.arange(4 * 5_120) // 2
    found = sj.parallel.plan({"user": spec(100_000, 32)}, MESH, {"user": ids})
    head, rule, user, total, where = repr(found).splitlines()
    assert head.split()[:4] == ["table", "shape", "ids", "distinct"]
    assert set(rule) == {"-"}
    assert user.startswith("params['user']  float32[100000,32]  5,120     2,560")
    assert user.endswith("row-sharded  3.2 MB  507 kB")
    assert total.startswith("total") and where.startswith("4 devices")


# ------------------------------------------------------------------ a model


def model_of(heights, width):
    """Flax's layers as they are: abstract parameters, a loss, and its batches."""
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            towers = {k: nnx.Embed(n, width, rngs=rngs) for k, n in heights.items()}
            self.towers = nnx.Dict(towers) if hasattr(nnx, "Dict") else towers
            self.dense = nnx.Linear(width, width, rngs=rngs)

        def __call__(self, ids):
            rows = [tower(ids[name]) for name, tower in self.towers.items()]
            return jnp.sum(self.dense(rows[0]) * sum(rows[1:]), axis=-1)

    graph, params = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)

    def loss_fn(params, batch):
        scores = nnx.merge(graph, params)(batch["ids"])
        return jnp.mean(optax.sigmoid_binary_cross_entropy(scores, batch["label"]))

    def batch_of(seed, size):
        rng = np.random.default_rng(seed)
        ids = {name: rng.zipf(1.2, size) % n for name, n in heights.items()}
        return {"ids": ids, "label": rng.normal(size=size).astype(np.float32)}

    return params, loss_fn, batch_of


def is_sharded(x):
    return isinstance(x, sj.parallel.ShardedTable)


def test_trained_on_one_device_and_on_eight():
    params, loss_fn, batch_of = model_of({"a": 301, "b": 223, "c": 98}, D)
    batches, params = [batch_of(seed, 16) for seed in range(3)], drawn(params)
    plan = functools.partial(
        sj.parallel.plan, params, mesh_of(8), batches[0], loss=loss_fn
    )
    names = [table.name for table in plan().tables]
    layouts = "row-sharded", "column-sharded", "replicated-sparse"
    planned = plan(layouts=dict(zip(names, layouts, strict=True)))
    assert tuple(table.choice for table in planned.tables) == layouts
    tx = sj.optim.lazy(optax.adam(0.05))
    step = jax.jit(step_of(loss_fn, tx), donate_argnums=(0, 1))
    trained = []
    for put, sharding in ((planned.apply, planned.batch_sharding), (lambda x: x, None)):
        placed = put(jax.tree.map(jnp.copy, params))  # the step overwrites them
        split = [(jax.device_put(batch, sharding),) for batch in batches]
        trained.append(run(step, placed, tx.init(placed), split)[0])
    found = filter(is_sharded, jax.tree.leaves(trained[0], is_leaf=is_sharded))
    assert len(list(found)) == 1
    assert_trees_close(*map(whole, trained), rtol=1e-5, atol=1e-5)


def test_sends_little_and_copies_no_table():
    """20,480 reads at four devices, as in docs/explain/exchange.md; nothing is run."""
    params, loss_fn, batch_of = model_of({"a": 100_003, "b": 100_003}, 32)
    tx, batch = sj.optim.lazy(optax.adam(1e-3)), batch_of(0, 10_240)
    plan = sj.parallel.plan(params, mesh_of(N), batch, loss=loss_fn, tx=tx)
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
    step = jax.jit(step_of(loss_fn, tx), donate_argnums=(0, 1))
    program = step.lower(params, state, batch).compile()
    wire, text = sj.viz.wire_bytes(program), program.as_text() or ""
    assert wire.total <= 600_000, wire
    assert wire.total == pytest.approx(1.1 * plan.total.wire, rel=0.03), wire
    for table in filter(is_sharded, jax.tree.leaves(params, is_leaf=is_sharded)):
        assert_in_place(text, table)
