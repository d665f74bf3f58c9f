"""Tables whose hot rows are on every device: reads, training, bytes and wrong input.

The oracle is dense JAX: the same program with a plain array in place of the table.
"""

import dataclasses
import functools
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from helpers import slow_but
from sparsejax.parallel._choose_hot import choose_hot
from test_sharded_model import all_reads, make_ids, make_table


# Optax's Adam needs loose promotion.
pytestmark = [pytest.mark.multidevice, pytest.mark.loose_promotion, pytest.mark.window]
V, D = 101, 4
HOT = [55, 7, 0, 100, 3, 62]
replicate = sj.parallel.replicate_hot_rows


def make_mesh(shape, kind=AxisType.Auto):
    names = ("r", "x")[-len(shape) :]
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, devices=devices, axis_types=(kind,) * len(shape))


def zipf(seed, size, height):
    weights = 1 / np.arange(1, height + 1)
    rng = np.random.default_rng(seed)
    return rng.choice(height, size, p=weights / weights.sum()).astype(np.int32)


# ------------------------------------------------------------------ reads


@pytest.mark.parametrize("size", slow_but([1, 8], 8))
def test_reads_as_of_an_array(size):
    """By all that reads an array, see `test_sharded_model.READS`."""
    params: Any = {"table": jnp.asarray(make_table()), "w": jnp.ones(())}
    value, grads = jax.jit(jax.value_and_grad(all_reads))(params, make_ids())
    params["table"] = replicate(make_table(), make_mesh((size,)), "x", HOT)
    found, mine = jax.jit(sj.value_and_grad(all_reads))(params, make_ids())
    np.testing.assert_allclose(found, value, rtol=1e-5)
    assert isinstance(mine["table"].hot, sj.SelectedRows)
    assert isinstance(mine["table"].cold.values, sj.parallel.ShardedRows)
    dense = mine["table"].to_dense()
    np.testing.assert_allclose(dense, grads["table"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mine["w"], grads["w"], rtol=1e-5, atol=1e-5)


def bags(table, ids, segments, padded):
    """Both kinds of bags, all combiners, and the modes and options of a lookup."""
    read = functools.partial(sj.embedding_bag, table)
    combiners = "sum", "mean", "sqrtn", "max", "min", "none"
    parts = [read(padded, combiner=c) for c in combiners]
    weights = jnp.sin(padded.astype(jnp.float32))
    parts += [read(padded, weights=weights, padding_id=7)]
    parts += [read(ids, segments, 5, combiner=c) for c in ("mean", "logsumexp")]
    look = functools.partial(sj.lookup, table)
    parts += [look(ids + 60, mode=mode) for mode in ("zero", "clip")]
    parts += [look(ids, padding_id=55, max_norm=0.5)]
    return sum(jnp.sum(jnp.tanh(rows * (k + 1))) for k, rows in enumerate(parts))


@pytest.mark.parametrize(
    "shape,kind", [((4, 2), AxisType.Auto), ((8,), AxisType.Explicit)]
)
@pytest.mark.parametrize("layout", slow_but(["mod", "block"], "mod"))
def test_bags_and_modes(shape, kind, layout):
    mesh = make_mesh(shape, kind)
    table = replicate(make_table(), mesh, "x", HOT, layout=layout)
    ids = make_ids()
    given = ids, jnp.arange(ids.size) % 5, ids.reshape(8, 2)
    split = jax.device_put(given, NamedSharding(mesh, P(mesh.axis_names)))
    value, dense = jax.jit(jax.value_and_grad(bags))(make_table(), *given)
    found, grad = jax.jit(sj.value_and_grad(bags))(table, *split)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    np.testing.assert_allclose(grad.to_dense(), dense, rtol=1e-5, atol=1e-5)
    # JAX's own gradient is a dense array for each part.
    plain = jax.jit(jax.grad(bags))(table, *split)
    assert isinstance(plain.hot, jax.Array)
    np.testing.assert_allclose(plain.to_dense(), dense, rtol=1e-5, atol=1e-5)


def test_without_a_gradient():
    table, ids = make_table(), make_ids()
    mine = replicate(table, make_mesh((8,)), "x", HOT)
    np.testing.assert_array_equal(mine[ids], table[ids])
    np.testing.assert_array_equal(mine[-5:], table[-5:])
    np.testing.assert_array_equal(mine.to_dense(), table)
    take = lambda t, i: jnp.take(t, i, axis=0)
    np.testing.assert_array_equal(sj.parallel.forward(take)(mine, ids), table[ids])
    hot = np.array(HOT[:2] * 4, np.int32)
    rows, metrics = sj.parallel.lookup(mine, hot, return_metrics=True)
    np.testing.assert_array_equal(rows, table[hot])
    assert int(metrics.rows) == 0 == int(metrics.largest)  # nothing was requested
    assert sj.lookup(mine, jnp.zeros((0, 3), jnp.int32)).shape == (0, 3, D)
    assert sj.parallel.measure_capacity(mine, hot) == 1
    ids = "[  0   3   7  55  62 100]"
    assert repr(mine).startswith(f"HotColdTable(hot=float32[6, 4], hot_ids={ids}, cold")


def test_sampled_softmax():
    mesh, labels = make_mesh((8,)), make_ids()
    params = {"items": make_table(), "bias": make_table()[:, :1]}
    inputs, negatives = make_table()[:16], jnp.array([0, 3, 4, 99])

    def loss(p):
        args = p["items"], inputs, labels, negatives
        return sj.losses.sampled_softmax_loss(*args, bias=p["bias"]).sum()

    value, dense = jax.jit(jax.value_and_grad(loss))(params)
    mine = {k: replicate(x, mesh, "x", HOT) for k, x in params.items()}
    found, grads = jax.jit(sj.value_and_grad(loss))(mine)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad.to_dense(), dense[name], atol=1e-5)


def test_touched_rows_are_what_was_read():
    table = replicate(make_table(), make_mesh((8,)), "x", HOT)
    loss = lambda table: jnp.sum(0.0 * table[jnp.array([7, 55, 7, 1])])
    hot = jax.jit(sj.grad(loss))(table).hot
    # Ids 7 and 55 are hot rows 2 and 3. A cotangent of zero is a touch, too.
    np.testing.assert_array_equal(hot.rows, [6, 6, 2, 3, 6, 6])


# ------------------------------------------------------------------ arithmetic


def test_gradients_are_added_and_scaled():
    table, ids = replicate(make_table(), make_mesh((8,)), "x", HOT), make_ids()
    grad = jax.jit(sj.grad(lambda t, i: jnp.sum(sj.lookup(t, i, mode="zero") ** 2)))
    g1, g2 = grad(table, ids), grad(table, ids + 1)
    dense = g1.to_dense(), g2.to_dense()
    total = (sum([g1, g2]) - -2 * g1) / jnp.float32(4)
    np.testing.assert_allclose(total.to_dense(), (3 * dense[0] + dense[1]) / 4, 1e-5)
    assert type(total.hot) is type(g1.hot)  # so that lazy updates it in one pass
    np.testing.assert_array_equal((2 * table).to_dense(), 2 * make_table())
    other = replicate(make_table(), table.mesh, "x", HOT[:-1])
    for wrong, kind in [
        (lambda: table + other, ValueError),
        (lambda: table + 1, TypeError),
        (lambda: table * jnp.ones(3), TypeError),
        (lambda: 1 / table, TypeError),
        (lambda: table + table.cold, TypeError),
        (lambda: jax.tree.map(jnp.add, g1, g2), Exception),
        (lambda: np.asarray(table), TypeError),
        (lambda: jnp.take(jnp.asarray(table), ids), TypeError),
        (lambda: sj.grad(lambda t: jnp.sum(t @ jnp.ones(D)))(table), sj.DensifyError),
    ]:
        with pytest.raises(kind):
            wrong()


# ------------------------------------------------------------------ training


def reads_twice(params, ids):
    first = sj.lookup(params["table"], ids[0])
    second = params["table"][ids[1]]
    return jnp.sum(jnp.tanh(first * second) * params["w"])


def loop(params, ids):
    """The ids in turns, in a loop whose body is run again for its gradient."""

    @jax.checkpoint
    def step(total, some):
        return total + jnp.sum(jnp.tanh(params["table"][some]) * params["w"]), ()

    return lax.scan(step, 0.0, ids)[0]


def oracle(loss, tx, params, state, ids):
    """A lazy step on one device: rows that are not read keep weights and state."""
    value, grads = jax.value_and_grad(loss)(params, ids)
    updates, new = tx.update(grads, state, params)
    read = jnp.zeros(V, bool).at[ids.reshape(-1)].set(True)[:, None]
    keep = lambda new, old: (
        jnp.where(read, new, old) if jnp.shape(new) == (V, D) else new
    )
    params = jax.tree.map(keep, optax.apply_updates(params, updates), params)
    return params, jax.tree.map(keep, new, state), value


def is_table(x):
    return isinstance(x, sj.parallel.HotColdTable)


TRAINED: Any = {
    "one device": (reads_twice, (1,), AxisType.Auto),
    "eight devices": (reads_twice, (8,), AxisType.Auto),
    "replicas": (reads_twice, (4, 2), AxisType.Auto),
    "explicit": (reads_twice, (8,), AxisType.Explicit),
    "loop": (loop, (8,), AxisType.Auto),
}


@pytest.mark.parametrize("name", slow_but(TRAINED, "replicas", "explicit"))
@pytest.mark.parametrize("clip", slow_but([False, True], False))
def test_trains_as_on_one_device(name, clip):
    loss, shape, kind = TRAINED[name]
    mesh = make_mesh(shape, kind)
    inner = optax.adam(0.05)
    if clip:
        inner = optax.chain(optax.clip_by_global_norm(0.5), inner)
    tx, count = sj.optim.lazy(inner), 0
    everywhere = P(None) if kind == AxisType.Explicit else P()
    w = jax.device_put(np.ones(D, np.float32), NamedSharding(mesh, everywhere))
    params: Any = {"table": replicate(make_table(), mesh, "x", HOT), "w": w}
    plain = {"table": jnp.asarray(make_table()), "w": jnp.ones(D)}
    state, plain_state = tx.init(params), inner.init(plain)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        nonlocal count
        count += 1
        value, grads = sj.value_and_grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    plain_step = jax.jit(functools.partial(oracle, loss, inner))
    split = NamedSharding(mesh, P(None, mesh.axis_names))
    for seed in range(3):
        ids = zipf(seed, 32, V).reshape(2, 16)
        given = params["table"]
        params, state, value = step(params, state, jax.device_put(ids, split))
        assert given.hot.is_deleted() and given.cold.values.is_deleted()
        plain, plain_state, expected = plain_step(plain, plain_state, ids)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
    # On a mesh of one device, JAX writes what lies on it in another way at first.
    assert count == 1 + (mesh.size == 1)
    whole = lambda tree: jax.tree.map(
        lambda x: x.to_dense() if is_table(x) else x, tree, is_leaf=is_table
    )
    found = jax.tree.leaves(whole((params, state)))
    for a, b in zip(found, jax.tree.leaves((plain, plain_state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    # Replicas are equal bit for bit; slots of hot rows among the cold stay zero.
    copies = [np.asarray(s.data) for s in params["table"].hot.addressable_shards]
    assert all(np.array_equal(copies[0], copy) for copy in copies)
    np.testing.assert_array_equal(params["table"].cold.to_dense()[np.array(HOT)], 0)


def test_in_a_data_parallel_step():
    """Given over Explicit axes, which the step sees as Auto."""
    mesh = make_mesh((8,), AxisType.Explicit)
    tx, ids = sj.optim.lazy(optax.sgd(1.0)), make_ids()
    eight = [55, 7, 0, 100, 3, 62, 5, 6]

    def step(table, state, ids):
        loss = lambda table: jnp.sum(jnp.take(table, ids, axis=0) ** 2)
        grad = sj.parallel.pmean(sj.grad(loss)(table), "x")
        updates, state = tx.update(grad, state, table)
        return optax.apply_updates(table, updates), state, grad.hot.rows

    table = replicate(make_table(), mesh, "x", eight)
    run = sj.parallel.data_parallel(step, mesh, "x")
    table, _, rows = run(table, tx.init(table), ids)
    assert rows.shape == (8,)  # not gathered once more
    counts = np.bincount(ids, minlength=V)[:, None]
    expected = make_table() * (1 - 2 * counts)
    np.testing.assert_allclose(table.to_dense(), expected, rtol=1e-5)


# ------------------------------------------------------------------ what a step sends

HEIGHT, WIDTH, BATCH = 100_003, 32, 20_480


def compile_step(table, mesh):
    """An Adam step of abstract arrays that reads the table twice."""
    tx = sj.optim.lazy(optax.adam(1e-3))
    abstract = lambda x, *spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, P(*spec))
    )
    by_rows = lambda x: abstract(x, *(["x"] if x.shape[:1] == stored else []))
    stored = (table.num_shards * table.rows_per_shard,)
    params = {"table": table}
    state = jax.tree.map(by_rows, jax.eval_shape(tx.init, params))

    def loss(params, ids):
        first, second = (sj.lookup(params["table"], i) for i in ids)
        return jnp.mean(jnp.sum(first * second, axis=-1))

    def step(params, state, ids):
        value, grads = sj.value_and_grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    ids = abstract(jax.ShapeDtypeStruct((BATCH,), jnp.int32), mesh.axis_names)
    step = jax.jit(step, donate_argnums=(0, 1))
    return step.lower(params, state, (ids, ids)).compile()


def test_sends_what_the_formula_says_and_copies_no_table():
    mesh = make_mesh((4, 2))
    spec = jax.ShapeDtypeStruct((HEIGHT, WIDTH), jnp.float32)
    plain, ids = sj.parallel.shard_rows(spec, mesh, "x"), zipf(0, BATCH, HEIGHT)
    choice = choose_hot(plain, [ids, ids], 4 * WIDTH)
    table = replicate(spec, mesh, "x", choice.hot_ids, capacity=choice.capacity)
    assert choice.capacity == sj.parallel.measure_capacity(table, ids, margin=1)
    count, row = len(choice.hot_ids), 4 * WIDTH
    cold = (row + 4) * 2 * choice.capacity * (2 * (2 - 1) + (4 - 1) * 2)
    assert choice.wire == cold + 2 * count * (row + 1) * 7 // 8
    program = compile_step(table, mesh)
    wire = sj.parallel.wire_bytes(program)
    assert wire.total == pytest.approx(choice.wire, rel=0.01), wire

    capacity = sj.parallel.measure_capacity(plain, ids, margin=1)
    plain = dataclasses.replace(plain, capacity=capacity)
    without = sj.parallel.wire_bytes(compile_step(plain, mesh))
    assert wire.total < 0.9 * without.total, (wire, without)

    text, memory = program.as_text() or "", program.memory_analysis()
    rows = table.rows_per_shard
    assert memory is not None
    assert memory.alias_size_in_bytes >= 3 * 4 * (rows + count) * WIDTH
    made = set(re.findall(rf"= f32\[{rows},{WIDTH}\]\S* (\w[\w-]*)\(", text))
    in_place = {"scatter", "fusion", "dynamic-update-slice"}
    assert made <= {"parameter", "get-tuple-element"} | in_place, made
    assert f"[{rows * 2}," not in text and f"[{HEIGHT}," not in text


def test_choice():
    mesh = make_mesh((8,))
    table = sj.parallel.shard_rows(np.zeros((64, 2), np.float32), mesh, "x")
    # Every device reads three ids of one owner, and a row of its own.
    shared = np.tile([9, 17, 25], (8, 1))
    ids = np.concatenate([shared, np.arange(8)[:, None] * 8 + 2], axis=1)
    choice = choose_hot(table, [ids], 8)
    np.testing.assert_array_equal(choice.hot_ids, [9, 17])
    assert choice.capacity == 1
    assert choice.wire == 2 * 7 * 1 * 12 + round(2 * 2 * 9 * 7 / 8)
    # Where no row is read by several devices, none is hot.
    assert choose_hot(table, [np.arange(64)], 8).hot_ids.size == 0
    assert choose_hot(table, [np.array([-1, 64])], 8).capacity == 1


# ------------------------------------------------------------------ making one


def test_made_of_arrays_functions_and_specs():
    table, mesh = make_table(), make_mesh((8,))
    made = [
        replicate(jnp.asarray(table), mesh, "x", np.array(HOT, np.uint8)),
        replicate(lambda ids: table[ids], mesh, "x", HOT, height=V),
        jax.jit(lambda t: replicate(t, mesh, "x", HOT))(table),
    ]
    spec = replicate(jax.ShapeDtypeStruct((V, D), jnp.float32), mesh, "x", HOT)
    for mine in made:
        np.testing.assert_array_equal(mine.to_dense(), table)
        np.testing.assert_array_equal(mine.hot, table[np.sort(HOT)])
        np.testing.assert_array_equal(mine.cold.to_dense()[np.array(HOT)], 0)
        assert jax.tree.structure(mine) == jax.tree.structure(spec)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(spec)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    np.testing.assert_array_equal(np.asarray(spec.hot_ids), np.sort(HOT))
    assert (spec.num_hot, spec.height, spec.ndim) == (6, V, 2)


def test_vectors_and_narrow_types():
    """A table `[V]` has dense gradients, one of bfloat16 sums in float32."""
    mesh, ids = make_mesh((8,)), jnp.arange(40) % 7
    loss = lambda table: jnp.sum(sj.lookup(table, ids) * jnp.arange(40.0) / 64)
    vector = make_table()[:, 0]
    grad = jax.jit(sj.grad(loss))(replicate(vector, mesh, "x", HOT))
    assert isinstance(grad.hot, jax.Array)
    dense = jax.grad(loss)(vector)
    np.testing.assert_allclose(grad.to_dense(), dense, rtol=1e-6)
    loss = lambda table: jnp.sum(sj.lookup(table, ids).astype(jnp.float32) ** 2)
    narrow = jnp.asarray(make_table(), jnp.bfloat16)
    grad = jax.jit(sj.grad(loss))(replicate(narrow, mesh, "x", HOT))
    assert grad.hot.dtype == jnp.bfloat16
    rows, wide = np.array([0, 3]), narrow.astype(jnp.float32)
    expected = 2 * np.bincount(ids, minlength=V)[:, None] * wide
    np.testing.assert_allclose(
        grad.to_dense()[rows].astype(jnp.float32), expected[rows], rtol=2**-8
    )


# ------------------------------------------------------------------ checkpoints


def test_checkpoints(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    table = replicate(make_table(), make_mesh((8,)), "x", HOT)
    params = {"table": table, "m": table.map(operator.neg)}
    spec = jax.ShapeDtypeStruct((V, D), jnp.float32)
    like = lambda hot, size: {
        name: replicate(spec, make_mesh((size,)), "x", hot) for name in params
    }
    with sj.parallel.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, params)
        found = checkpoints.restore(like(HOT, 4))  # on other devices
        np.testing.assert_array_equal(found["table"].to_dense(), make_table())
        np.testing.assert_array_equal(found["m"].to_dense(), -make_table())
        assert found["table"].num_shards == 4
        other = [*HOT[:-1], 63]
        with pytest.raises(ValueError, match=r"\['m'\] has other hot ids than the 6"):
            checkpoints.restore(like(other, 8))
