"""Tables whose rows are spread over devices: lookups, gradients and training steps.

The oracle is a plain array on one device. A step is compiled once and run on batches of
every kind: Zipf, uniform, all ids to one owner, and ids out of range.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from helpers import slow_but, whole


# Optax's Adam needs loose promotion; the lookups themselves are tested without.
pytestmark = pytest.mark.usefixtures("eight_devices")

V, D, N_IDS = 101, 4, 64
MESHES = {
    "4": ((4,), ("x",), "x"),
    "2x4, rows over one": ((2, 4), ("d", "x"), "x"),
    "2x2, rows over both": ((2, 2), ("d", "x"), ("d", "x")),
}


def _mesh(name, kind=AxisType.Auto):
    shape, names, axis = MESHES[name]
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, names, devices=devices, axis_types=(kind,) * len(shape))
    return mesh, axis


def _table(seed=0, shape=(V, D), dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def _rows_or_zeros(table, ids):
    """`sj.lookup(table, ids, mode="zero")` in NumPy."""
    padded = np.concatenate([table, np.zeros_like(table, shape=(1, table.shape[1]))])
    return padded[np.where((ids >= 0) & (ids < len(table)), ids, len(table))]


def lookup(table, ids, capacity, **options):
    """`sj.lookup` of the table with another capacity."""
    return sj.lookup(dataclasses.replace(table, capacity=capacity), ids, **options)


def _place(mesh, x, *parts):
    return jax.device_put(x, NamedSharding(mesh, P(*parts)))


def _batches(kind, seed=1):
    """Five batches of ids."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, V + 1)
    make = {
        "zipf": lambda: rng.choice(V, N_IDS, p=weights / weights.sum()),
        "uniform": lambda: rng.integers(-3, V + 3, N_IDS),  # some out of range
        "one owner, mod": lambda: 8 * rng.integers(0, V // 8, N_IDS),
        "one owner, block": lambda: rng.integers(0, V // 8, N_IDS),
        "one id": lambda: np.full(N_IDS, 5),
    }
    return [make[kind]().astype(np.int32) for _ in range(5)]


# ------------------------------------------------------------------ training

C = np.random.default_rng(2).normal(size=(N_IDS, D)).astype(np.float32)
TXS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clip, adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "rowwise_adagrad": sj.optim.rowwise_adagrad(0.1),
}


def _loss(read, params, ids):
    rows = [jnp.tanh(read(table, ids)) for table in params["tables"]]
    return jnp.sum(sum(rows) * C * params["b"][None, :])


@functools.cache
def _dense_step(name):
    """One step of the plain optimizer on plain arrays; rows not read put back."""
    tx = TXS[name]

    def step(params, state, ids):
        read = lambda table, ids: sj.lookup(table, ids, mode="zero")
        value, grads = jax.value_and_grad(functools.partial(_loss, read))(params, ids)
        updates, new_state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates)
        touched = (
            jnp.zeros(V, bool)
            .at[ids]
            .set(True, mode="drop", wrap_negative_indices=False)
        )

        def keep(old, new):
            if new.shape[:1] != (V,):
                return new
            return jnp.where(touched.reshape(V, *(1,) * (new.ndim - 1)), new, old)

        return *jax.tree.map(keep, (params, state), (new, new_state)), value

    return jax.jit(step)


@functools.cache
def _dense_run(name, kind):
    tables = [jnp.asarray(_table(0)), jnp.asarray(_table(1))]
    params = {"tables": tables, "b": jnp.asarray(np.ones(D, np.float32))}
    state, losses = TXS[name].init(params), []
    for ids in _batches(kind):
        params, state, value = _dense_step(name)(params, state, ids)
        losses.append(float(value))
    return losses, params


def _sharded_step(tx, slots, params, state, ids):
    read = functools.partial(lookup, mode="zero", capacity=slots)
    loss = functools.partial(_loss, read)
    value, grads = sj.value_and_grad(loss)(params, ids)
    assert all(isinstance(g.values, sj.parallel.ShardedRows) for g in grads["tables"])
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def _sharded_start(tx, mesh, axis):
    # One table of each layout, V divisible by no number of devices here.
    tables = [
        sj.parallel.shard_rows(_table(k), mesh, axis, layout=layout)
        for k, layout in enumerate(("mod", "block"))
    ]
    params = {"tables": tables, "b": _place(mesh, np.ones(D, np.float32), None)}
    return params, tx.init(params)


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize(
    "name, where, kind",
    slow_but(
        [
            ("momentum", "2x2, rows over both", AxisType.Auto),
            ("clip, adam", "4", AxisType.Auto),
            ("rowwise_adagrad", "2x4, rows over one", AxisType.Explicit),
        ],
        ("rowwise_adagrad", "2x4, rows over one", AxisType.Explicit),
    ),
)
def test_training_equals_one_device(name, where, kind):
    mesh, axis = _mesh(where, kind)
    ours = name == "rowwise_adagrad"
    tx = TXS[name] if ours else sj.optim.lazy(TXS[name])
    with jax.set_mesh(mesh):
        # Three rows at a time: most of these batches take several rounds.
        step = jax.jit(functools.partial(_sharded_step, tx, 3), donate_argnums=(0, 1))
        for ids_kind in ("zipf", "uniform", "one owner, mod", "one owner, block"):
            want_losses, want = _dense_run(name, ids_kind)
            params, state = _sharded_start(tx, mesh, axis)
            losses = []
            for ids in _batches(ids_kind):
                ids = _place(mesh, ids, mesh.axis_names)
                params, state, value = step(params, state, ids)
                losses.append(float(value))
            np.testing.assert_allclose(losses, want_losses, rtol=1e-5, atol=1e-5)
            for got, table in zip(whole(params["tables"]), want["tables"]):
                np.testing.assert_allclose(got, table, rtol=1e-5, atol=1e-5)
        assert step._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_bfloat16_sums_in_float32():
    mesh, axis = _mesh("4")
    table = sj.parallel.shard_rows(np.zeros((V, 1), jnp.bfloat16), mesh, axis)
    ids = np.full(256, 7, np.int32)  # 64 on each device

    def loss(table):
        rows = sj.lookup(table, ids)
        return jnp.sum(rows.astype(jnp.float32)) * jnp.float32(1.0078125)

    merged = jax.jit(lambda t: sj.grad(loss)(t).map(lambda rows: rows.coalesce()))(
        table
    )
    assert merged.dtype == jnp.bfloat16
    # Added one by one in bfloat16, 256 of them stop growing at half of that.
    assert float(whole(merged)[7, 0]) == 258.0


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
def test_other_optimizers():
    mesh, axis = _mesh("4")
    params: Any = {"t": sj.parallel.shard_rows(_table(), mesh, axis)}
    loss = lambda p: jnp.sum(sj.lookup(p["t"], IDS, mode="zero") ** 2)
    tx: Any = sj.optim.dynamic_loss_scale(sj.optim.lazy(optax.sgd(0.1)))

    @jax.jit
    def step(params, state):
        scaled = lambda p: loss(p) * state.scale
        grads = sj.grad(scaled)(params)
        norm = sj.optim.global_norm(grads) / state.scale
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), norm, grads

    new, norm, grads = step(params, tx.init(params))
    plain = lambda t: jnp.sum(sj.lookup(t, IDS, mode="zero") ** 2)
    want = np.asarray(jax.jit(jax.grad(plain))(_table()))
    np.testing.assert_allclose(whole(new)["t"], _table() - 0.1 * want, rtol=1e-5)
    np.testing.assert_allclose(norm, np.linalg.norm(want), rtol=1e-5)
    for other in (
        sj.optim.accumulate(sj.optim.lazy(optax.sgd(0.1)), 2, 16),
        sj.optim.exact(optax.sgd(0.1)),
    ):
        with pytest.raises(TypeError, match="sharded over devices"):
            other.update(grads, other.init(params), params)


# ------------------------------------------------------------------ lookup


@functools.cache
def _looked_up(where, layout, n, slots, mode):
    mesh, axis = _mesh(where)
    table = sj.parallel.shard_rows(_table(), mesh, axis, layout=layout)
    table = dataclasses.replace(table, capacity=slots)
    read = lambda ids: sj.lookup(table, ids, mode=mode, padding_id=3)
    # As in `lookup`, the padding id requests no row.
    asked = lambda ids: jnp.where(ids == 3, np.int32(-1), ids)
    if mode == "clip":
        asked = lambda ids: jnp.where(ids == 3, np.int32(-1), jnp.clip(ids, 0, V - 1))
    count = lambda ids: sj.parallel.exchange_metrics(table, asked(ids))
    return jax.jit(lambda ids: (read(ids), count(ids)))


@pytest.mark.window
@pytest.mark.parametrize(
    "where, layout, n, slots, mode",
    [
        ("4", "mod", 64, 1, "fill"),
        ("4", "block", 61, None, "clip"),
        ("2x4, rows over one", "mod", 50, 2, "zero"),
        ("2x2, rows over both", "block", 3, None, "fill"),
    ],
)
def test_lookup_is_exact(where, layout, n, slots, mode):
    look = _looked_up(where, layout, n, slots, mode)
    plain = jax.jit(lambda ids: sj.lookup(_table(), ids, mode=mode, padding_id=3))
    for kind in ("zipf", "uniform", "one owner, mod", "one owner, block", "one id"):
        ids = _batches(kind)[0][:n]
        rows, metrics = look(ids)
        np.testing.assert_array_equal(rows, plain(ids))
        assert int(metrics.rounds) == -(-int(metrics.largest) // (slots or 10**6)) or (
            slots is None
        )
        assert (int(metrics.overflow) > 0) == (int(metrics.rounds) > 1)


@pytest.mark.slow
def test_explicit_axes_lay_rows_out_as_ids():
    mesh, axis = _mesh("4", AxisType.Explicit)  # and no jax.set_mesh
    table = sj.parallel.shard_rows(_table(), mesh, axis)

    @jax.jit
    def both(ids):
        bags = sj.embedding_bag(table, ids, mode="zero")
        return sj.lookup(table, ids, mode="zero"), bags

    want = _rows_or_zeros(_table(), IDS.reshape(8, 3))
    for part in ("x", None):
        ids = _place(mesh, IDS.reshape(8, 3), part, None)
        program = both.lower(ids).compile()
        rows, bags = program(ids)
        np.testing.assert_array_equal(rows, want)
        np.testing.assert_allclose(bags, want.sum(1), rtol=1e-5, atol=1e-6)
        assert rows.sharding.spec == P(part, None, None)
        assert bags.sharding.spec == P(part, None)
        # Sharded ids: nothing is gathered on the way.
        text = str(program.as_text())
        assert ("all-gather" in text) == (part is None)


@pytest.mark.slow
@pytest.mark.parametrize("height", [0, 3])
def test_few_rows_and_no_ids(height):
    mesh, axis = _mesh("4")
    table = _table(shape=(height, 2))
    sharded = sj.parallel.shard_rows(table, mesh, axis)
    assert sharded.shape == (height, 2)
    assert sharded.values.shape[0] == 4 * sharded.rows_per_shard
    np.testing.assert_array_equal(whole(sharded), table)
    ids, no_ids = np.arange(-2, 7), np.zeros((0, 5), np.int32)
    loss = lambda t: jnp.sum(sj.lookup(t, no_ids[:, 0]))

    @jax.jit
    def run(t):
        rows = sj.lookup(t, ids, mode="zero")
        return rows, sj.lookup(t, no_ids), sj.grad(loss, tables=True)(t)

    rows, none, grad = run(sharded)
    np.testing.assert_array_equal(rows, _rows_or_zeros(table, ids))
    assert none.shape == (0, 5, 2)
    assert grad.values.capacity == 0


@pytest.mark.slow
def test_ids_of_any_kind(x64):
    mesh, axis = _mesh("4")
    sharded = sj.parallel.shard_rows(_table(), mesh, axis)
    all_ids = [
        np.array([[2**40, -1], [5, 100]]),
        np.array([200, 7], np.uint8),
        jnp.array(100),
        [3, 3],
    ]
    read = jax.jit(lambda t: [sj.lookup(t, ids) for ids in all_ids])
    for rows, want in zip(read(sharded), read(_table())):
        assert rows.dtype == want.dtype == jnp.float32
        np.testing.assert_array_equal(rows, want)


@pytest.mark.slow
def test_measured_capacity_is_one_round():
    mesh, axis = _mesh("4")
    sharded = sj.parallel.shard_rows(_table(), mesh, axis)
    metrics_of = jax.jit(sj.parallel.exchange_metrics)
    ids = _batches("zipf")[0]
    enough = sj.parallel.measure_capacity(sharded, ids, margin=1)
    tight = dataclasses.replace(sharded, capacity=enough)
    metrics = metrics_of(tight, ids)
    assert int(metrics.rounds) == 1
    assert int(metrics.largest) == enough
    # ids and rows to and from the three other devices
    assert float(metrics.bytes) == 3 * enough * (4 + 4 * D)
    less = dataclasses.replace(sharded, capacity=enough - 1)
    assert int(metrics_of(less, ids).rounds) == 2
    none = metrics_of(sharded, np.zeros(0, np.int32))
    assert int(none.rounds) == int(none.bytes) == 0


# ------------------------------------------------------------------ gradients

IDS = np.random.default_rng(3).integers(-2, V + 2, (3, 8)).astype(np.int32)


def _several(look, t, ids):
    rows = jnp.sin(look(t, ids[0])) * jnp.cos(look(t, ids[1]))
    return jnp.sum(rows) + jnp.sum(look(t, ids[2, :6]) ** 2)


def _in_scan(look, t, ids):
    step = lambda total, i: (total + jnp.sum(jnp.sin(look(t, i))), None)
    return lax.scan(step, jnp.zeros(()), ids)[0]


def _in_branch(look, t, ids):
    yes = lambda: jnp.sum(look(t, ids[0]) ** 2) + jnp.sum(look(t, ids[1]))
    return lax.cond(ids[0, 0] > -9, yes, lambda: jnp.sum(look(t, ids[2])))


def _in_checkpoint_and_jit(look, t, ids):
    rows = jax.checkpoint(jax.jit(lambda i: jnp.sin(look(t, i))))(ids)
    return jnp.sum(rows**2)


def _under_vmap(look, t, ids):
    return jnp.sum(jnp.sin(jax.vmap(lambda i: look(t, i))(ids)))


def _of_a_view(look, t, ids):
    half = lambda x: (2 * x).astype(jnp.float16)
    t = t.map(half) if isinstance(t, sj.parallel.ShardedTable) else half(t)
    return jnp.sum(jnp.sin(look(t, ids)).astype(jnp.float32))


PROGRAMS = [
    _several, _in_scan, _in_branch, _in_checkpoint_and_jit, _under_vmap, _of_a_view
]  # fmt: skip


@pytest.mark.window
@pytest.mark.parametrize("program", slow_but(PROGRAMS, _under_vmap))
def test_gradient(program):
    kind = AxisType.Explicit if program in (_several, _in_branch) else AxisType.Auto
    mesh, axis = _mesh("2x4, rows over one" if program is _in_scan else "4", kind)
    look = functools.partial(lookup, mode="zero", capacity=2)
    plain = functools.partial(sj.lookup, mode="zero")
    grad = jax.jit(jax.grad(functools.partial(program, plain)))
    want = grad(jnp.asarray(_table()), IDS)
    with jax.set_mesh(mesh):
        table = sj.parallel.shard_rows(_table(), mesh, axis)

        @jax.jit
        def both(table, ids):
            loss = functools.partial(program, look)
            g = sj.grad(loss)(table, ids)
            return g, g.map(lambda rows: rows.coalesce()), table.values + g.values

        g, merged, moved = both(table, IDS)
        assert isinstance(g.values, sj.parallel.ShardedRows)
        assert not g.values.is_merged
        moved = table.map(lambda _: moved)
        found, again, moved = whole((g, merged, moved))
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
        # Each row once, at its owner, ascending there.
        assert merged.values.is_merged
        for owner, rows in enumerate(np.split(np.asarray(merged.values.rows), 4)):
            named = rows[rows < merged.values.height]
            assert (np.diff(named) > 0).all()
            assert (named // table.rows_per_shard == owner).all()
        np.testing.assert_allclose(again, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(moved, _table() + want, rtol=1e-5, atol=1e-5)


@pytest.mark.window
def test_a_read_is_one_primitive():
    """Its parameters are static: no rule hangs on a name, nothing is kept for each."""
    mesh, axis = _mesh("4")
    table = sj.parallel.shard_rows(_table(), mesh, axis)
    for capacity in (2, 3):
        look = functools.partial(lookup, mode="zero", capacity=capacity)
        eqns = jax.make_jaxpr(look)(table, IDS).jaxpr.eqns
        (read,) = (e for e in eqns if e.primitive.name == "read_sharded_rows")
        assert read.params["slots"] == capacity
    # Linear in the table: the tangents of rows are rows of the tangents.
    tangents = table.map(lambda x: 2 * x)
    rows, found = jax.jit(lambda t, d: jax.jvp(lambda t: look(t, IDS), (t,), (d,)))(
        table, tangents
    )
    np.testing.assert_array_equal(found, 2 * rows)


@pytest.mark.window
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_jit_finds_the_devices_of_the_mesh(kind):
    """Although neither table nor ids are on them, without jax.set_mesh."""
    mesh, axis = _mesh("4", kind)
    table = sj.parallel.shard_rows(_table(), mesh, axis)
    loose = table.map(lambda x: jnp.asarray(np.asarray(x)))
    assert len(loose.values.sharding.device_set) == 1
    look = jax.jit(functools.partial(sj.lookup, mode="zero"))
    want = _rows_or_zeros(_table(), IDS)
    np.testing.assert_array_equal(look(loose, IDS), want)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_vmap_over_ids_and_over_tables(shared):
    mesh, axis = _mesh("4")
    table = sj.parallel.shard_rows(_table(), mesh, axis)
    look = functools.partial(lookup, mode="zero", capacity=2)
    read = lambda values, ids: look(table.map(lambda _: values), ids)
    values = table.values if shared else jnp.stack([table.values, 2 * table.values])
    f = jax.vmap(read, in_axes=(None if shared else 0, 0))
    grad = jax.jit(jax.grad(lambda values, ids: jnp.sum(jnp.sin(f(values, ids)))))

    def want(values):
        dense = lambda v: table.map(lambda _: v).to_dense()
        tables = [values] * 2 if shared else values
        pairs = zip(tables, IDS)
        rows = [sj.lookup(dense(v), i, mode="zero") for v, i in pairs]
        return jnp.sum(jnp.sin(jnp.stack(rows)))

    got = grad(values, IDS[:2])
    expected = jax.jit(jax.grad(want))(values)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dense_gradient_and_second_derivative():
    mesh, axis = _mesh("4")
    table = sj.parallel.shard_rows(_table(), mesh, axis)
    ids = IDS.clip(0, 9)  # many duplicates

    def norm_of_gradient(read, grad, t):
        loss = lambda t: jnp.sum(jnp.sin(read(t, ids)) ** 2)
        leaf = jax.tree.leaves(grad(loss)(t))[0]
        return jnp.sum(leaf**2) + loss(t)

    look = functools.partial(lookup, capacity=3)
    second = lambda read: jax.grad(functools.partial(norm_of_gradient, read, jax.grad))
    got = jax.jit(second(look))(table)
    want = jax.jit(second(sj.lookup))(jnp.asarray(_table()))
    assert isinstance(got.values, jax.Array)
    np.testing.assert_allclose(got.to_dense(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_sums_of_gradients():
    mesh, axis = _mesh("4")
    table = sj.parallel.shard_rows(_table(), mesh, axis)
    loss = lambda t, ids: jnp.sum(jnp.sin(sj.lookup(t, ids, mode="zero")))
    grad = jax.jit(sj.grad(loss))
    a, b = (grad(table, ids).values for ids in IDS[:2])
    dense = jax.jit(jax.grad(loss))
    want = sum(dense(jnp.asarray(_table()), ids) for ids in IDS[:2])
    of = lambda rows: table.map(lambda _: rows)
    sums = jax.jit(lambda a, b: (a + b, (a + b - 0.5 * b) / 2, a, b))(a, b)
    both, half, *parts = map(np.asarray, whole([of(rows) for rows in sums]))
    np.testing.assert_allclose(both, want, rtol=1e-5, atol=1e-6)
    found = 4 * half - 2 * parts[0]
    np.testing.assert_allclose(found, parts[1], rtol=1e-4, atol=1e-5)
    metrics = a.metrics()
    assert int(metrics.rounds) >= 1
    assert int(metrics.rows) <= 8
    with pytest.raises(ValueError, match="already merged at its owners"):
        print(a.coalesce() + b)
    with pytest.raises(ValueError, match="capacity must be None"):
        a.coalesce(3)


# ------------------------------------------------------------------ bags


@pytest.mark.parametrize(
    "layout, combiner, weighted, kind",
    [
        pytest.param(
            *("segments", "sqrtn", True, AxisType.Explicit), marks=pytest.mark.window
        ),
        ("padded", "max", False, AxisType.Explicit),
        ("segments", "logsumexp", False, AxisType.Auto),
    ],
)
def test_embedding_bag(layout, combiner, weighted, kind):
    mesh, axis = _mesh("4", kind)
    rng = np.random.default_rng(4)
    shape = (6, 3) if layout == "padded" else (10,)
    ids = rng.integers(-1, V, shape).astype(np.int32)
    ids.flat[:3] = -1  # a bag of padding
    bags = () if layout == "padded" else (np.sort(rng.integers(-1, 4, 10)), 4)
    w = jnp.asarray(rng.normal(size=shape).astype(np.float32)) if weighted else None
    options: dict[str, Any] = dict(combiner=combiner, padding_id=-1, mode="zero")

    def loss(bag, t, w):
        return jnp.sum(jnp.sin(bag(t, ids, *bags, weights=w, **options)))

    plain = functools.partial(loss, sj.embedding_bag)
    which = (0, 1) if weighted else (0,)
    dense = jax.jit(jax.value_and_grad(plain, which))
    want, want_g = dense(jnp.asarray(_table()), w)
    with jax.set_mesh(mesh):
        table = sj.parallel.shard_rows(_table(), mesh, axis)
        ours = functools.partial(loss, sj.embedding_bag)
        got, g = jax.jit(sj.value_and_grad(ours, which))(table, w)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        np.testing.assert_allclose(whole(g)[0], want_g[0], rtol=1e-4, atol=1e-5)
        if weighted:
            np.testing.assert_allclose(g[1], want_g[1], rtol=1e-4, atol=1e-5)


@pytest.mark.window
@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_sqrtn_of_any_weights(size):
    mesh, axis = _mesh("4")
    table = sj.parallel.shard_rows(_table(), mesh, axis)
    # Bag 1 lies on three devices, and its largest weight is not on the first one.
    ids, bags = np.arange(8, dtype=np.int32), np.array([0, 1, 1, 1, 1, 1, 4, 2])
    w = jnp.array([1.0, 1e-3, 2.0, 0.5, 3.0, 1.0, 9.0, 0.0])

    def loss(size, t, w):
        x = sj.embedding_bag(t, ids, bags, 4, weights=size * w, combiner="sqrtn")
        return jnp.sum(jnp.sin(x))

    want = jax.value_and_grad(functools.partial(loss, 1.0), (0, 1))
    want, slopes = jax.jit(want)(jnp.asarray(_table()), w)
    value_and_grad = sj.value_and_grad(functools.partial(loss, size), (0, 1))
    got, grads = jax.jit(value_and_grad)(table, w)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(whole(grads)[0], slopes[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads[1], slopes[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_bags_of_complex_rows(combiner):
    mesh, axis = _mesh("4")
    table = (_table() + 1j * _table(1)).astype(np.complex64)
    ids, bags = np.arange(8), np.arange(8) // 3
    sharded, w = sj.parallel.shard_rows(table, mesh, axis), np.arange(8.0, dtype="f")
    bag = lambda t: sj.embedding_bag(t, ids, bags, 3, weights=w, combiner=combiner)
    want = np.stack([w[bags == k] @ table[:8][bags == k] for k in range(3)])
    by = w if combiner == "mean" else w * w
    by = np.array([by[bags == k].sum() for k in range(3)])
    want = want / (by if combiner == "mean" else np.sqrt(by))[:, None]
    np.testing.assert_allclose(jax.jit(bag)(sharded), want, rtol=1e-5)
    np.testing.assert_allclose(bag(table), want, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 0), (3, 0), (0, 4)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_bags_without_elements(kind, shape):
    mesh, axis = _mesh("4", kind)
    ids = np.zeros(shape, np.int32)
    every = ("sum", "mean", "max", "none")
    bags = lambda t: {c: sj.embedding_bag(t, ids, combiner=c) for c in every}
    want = bags(jnp.asarray(_table()))
    with jax.set_mesh(mesh):
        table = sj.parallel.shard_rows(_table(), mesh, axis)
        chex.assert_trees_all_equal(jax.jit(bags)(table), want)
        total = lambda t: sum(jnp.sum(x) for x in bags(t).values())
        grad = jax.jit(sj.grad(total, tables=True))(table)
    np.testing.assert_array_equal(whole(grad), np.zeros_like(_table()))


@pytest.mark.slow
def test_embedding_bag_of_segment_tensor():
    mesh, axis = _mesh("4")
    table = sj.parallel.shard_rows(_table(), mesh, axis)
    bags = sj.SegmentTensor.from_lists([[3, 5, 3], [], [7]])
    out, metrics = jax.jit(
        lambda t: (sj.embedding_bag(t, bags), sj.parallel.exchange_metrics(t, bags))
    )(table)
    want = [2 * _table()[3] + _table()[5], np.zeros(D), _table()[7]]
    np.testing.assert_allclose(out, want, rtol=1e-6)
    assert int(metrics.rows) <= 4


# ------------------------------------------------------------------ the table


@pytest.mark.parametrize(
    "where, layout, kind",
    [
        ("4", "mod", AxisType.Auto),
        ("4", "block", AxisType.Explicit),
        ("2x2, rows over both", "mod", AxisType.Explicit),
        ("2x2, rows over both", "block", AxisType.Auto),
    ],
)
def test_positions(where, layout, kind):
    mesh, axis = _mesh(where, kind)
    table = _table()
    with jax.set_mesh(mesh):
        sharded = sj.parallel.shard_rows(table, mesh, axis, layout=layout)
        by_ids = sj.parallel.shard_rows(
            lambda ids: table[ids], mesh, axis, layout=layout, height=V
        )
        inside = jax.jit(
            lambda t: sj.parallel.shard_rows(t, mesh, axis, layout=layout)
        )(table)
        for other in (by_ids, inside):
            np.testing.assert_array_equal(other.values, sharded.values)
            assert other.values.sharding == sharded.values.sharding
        np.testing.assert_array_equal(whole(sharded), table)
        ids = np.arange(-2, V + 3)
        position = np.asarray(sharded.position(ids))
        named = (ids >= 0) & (ids < V)
        np.testing.assert_array_equal(
            np.asarray(sharded.values)[position[named]], table
        )
        assert (position[~named] == sharded.values.shape[0]).all()
        back = np.asarray(sharded.ids_at(position))
        np.testing.assert_array_equal(back, np.where(named, ids, V))
    # No device holds more than its own rows.
    for shard in sharded.values.addressable_shards:
        assert shard.data.shape == (26, D)


@pytest.mark.window
def test_abstract_table():
    mesh, axis = _mesh("4")
    spec = jax.ShapeDtypeStruct((V, D), jnp.float32)
    table = sj.parallel.shard_rows(spec, mesh, axis)
    assert (table.shape, table.dtype, table.ndim) == ((V, D), jnp.float32, 2)
    assert table.values.shape == (104, D)
    assert "4 x 26 rows over 'x'" in repr(table)
    loss = lambda t: jnp.sum(sj.lookup(t, IDS))
    g = jax.eval_shape(sj.grad(loss), table)
    assert isinstance(g.values, sj.parallel.ShardedRows)
    assert (g.shape, g.values.capacity) == ((V, D), 24)
