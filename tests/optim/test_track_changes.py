"""track_changes and take_changes: the rows that changed, against the tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import sparsejax as sj
from helpers import (
    assert_same_bits,
    assert_written_in_place,
    compile_as_users_do,
)
from optimizers import step
from sparsejax.optim import lazy, take_changes, track_changes


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D = 50, 3
ADAM, SGD = lazy(optax.adam(0.1)), lazy(optax.sgd(0.1))


def model():
    table = np.random.default_rng(0).normal(size=(V, D)).astype(np.float32)
    return {"items": jnp.asarray(table), "bias": jnp.ones(D), "w": jnp.ones((D, 2))}


def loss(params, ids):
    rows = sj.lookup(params["items"], ids)
    return jnp.sum(rows**3) + jnp.sum((rows @ params["w"]) ** 2) + params["bias"].sum()


grad = jax.jit(sj.grad(loss, tables={"items": True, "bias": False, "w": False}))


def train(tx, params, state, ids):
    return step(tx, params, state, grad(params, ids))


def ones(*rows):
    return sj.SelectedRows(np.array(rows), np.ones((len(rows), D), np.float32), V)


# ------------------------------------------------------------------ which rows


CLIPPED = lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))
EAGER = lambda f: f  # noqa: E731


@pytest.mark.parametrize("inner, ways", [(SGD, [EAGER, jax.jit]), (CLIPPED, [jax.jit])])
def test_ids_are_the_rows_that_differ(inner, ways):
    """Eager and jitted, with duplicates, over several calls of take_changes."""
    tx, params, rng = track_changes(inner), model(), np.random.default_rng(0)
    plain = params, inner.init(params)
    state, before = tx.init(params), params
    for jit in ways:
        run, run_plain = (jit(functools.partial(train, x)) for x in (tx, inner))
        for ids in rng.integers(0, V, (2, 6), np.int32):
            params, state = run(params, state, ids)
            plain = run_plain(*plain, ids)
        found, state = take_changes(params, state)
        assert found["bias"] is None  # of rank 1
        assert found["items"].dtype == np.int32
        for name in ("items", "w"):
            changed = np.any(np.asarray(before[name]) != params[name], axis=1)
            np.testing.assert_array_equal(found[name], np.flatnonzero(changed))
        assert 0 < found["items"].size < V
        found, state = take_changes(params, state)
        assert not found["items"].size
        before = params
    jax.tree.map(assert_same_bits, (params, state.inner_state), plain)


def test_in_a_scan_in_place():
    tx, table = track_changes(ADAM), jnp.ones((1_000_000, 2))

    def run(table, state, ids):
        def one(carry, ids):
            table, state = carry
            grads = sj.grad(lambda t: jnp.sum(t[ids] ** 2), tables=True)(table)
            return step(tx, table, state, grads), None

        return jax.lax.scan(one, (table, state), ids)[0]

    ids = np.array([[3, 999_999, 3], [7, 3, 0]])
    state = tx.init(table)
    lowered = jax.jit(run, donate_argnums=(0, 1)).lower(table, state, ids)
    written = [table] * 3 + [state.changed]
    # A byte a row.
    assert_written_in_place(compile_as_users_do(lowered), written, state.changed.nbytes)
    found, _ = take_changes(*jax.jit(run)(table, state, ids))
    assert found.tolist() == [0, 3, 7, 999_999]


def test_rows_that_accumulate_are_marked_when_they_are_applied():
    tx = track_changes(sj.optim.accumulate(SGD, 2, capacity=20))
    params, seen = model()["items"], []
    state, run = tx.init(params), jax.jit(functools.partial(step, tx))
    for row in (3, 5, 7, 9):
        params, state = run(params, state, ones(row))
        found, state = take_changes(params, state)
        seen.append(found.tolist())
    assert seen == [[], [3, 5], [], [7, 9]]


# Parameters, the options and gradients of one step, and the rows that it changes.
KINDS = {
    "rank one": lambda: (
        track_changes(SGD, tables=True),
        jnp.zeros(V),
        sj.SelectedRows(np.array([4, V, 2]), np.ones(3, np.float32), V),
        [2, 4],
    ),
    "quantized": lambda: (
        track_changes(sj.optim.rounding(SGD, key=0)),
        sj.quantize(model()["items"]),
        ones(4, 2),
        [2, 4],
    ),
    "complex": lambda: (
        track_changes(SGD),
        np.ones((V, D), np.complex64),
        np.where(np.arange(V)[:, None] == 3, 1j, np.zeros((V, D), np.complex64)),
        [3],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tables_of_other_kinds(kind):
    tx, table, grads, changed = KINDS[kind]()
    carry = jax.jit(functools.partial(step, tx))(table, tx.init(table), grads)
    assert take_changes(*carry)[0].tolist() == changed


def test_rows_that_are_reset_have_changed():
    tx, params = track_changes(ADAM), model()
    rows = {"items": jnp.array([3, V])}
    carry = sj.optim.reset_rows(tx, tx.init(params), params, rows)
    found, _ = take_changes(*carry)
    assert found["items"].tolist() == [3] and not found["w"].size


def test_a_state_inside_of_another(tmp_path):
    tx = optax.chain(track_changes(SGD))
    params = model()["items"]
    _, state = tx.update(ones(4), tx.init(params), params)
    sj.parallel.save(tmp_path / "run", state)
    state = sj.parallel.restore(tmp_path / "run", tx.init(params))
    found, state = take_changes(params, state)
    assert found.tolist() == [4] and isinstance(state, tuple)


# ------------------------------------------------------------------ over devices


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["mod", "block"])
@pytest.mark.usefixtures("eight_devices")
def test_sharded_tables_give_the_same_ids(layout):
    kind = AxisType.Auto if layout == "mod" else AxisType.Explicit
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    tx, ids = (
        track_changes(SGD),
        np.random.default_rng(1).integers(0, V, (3, 8), np.int32),
    )
    items = sj.parallel.shard_rows(model()["items"], mesh, "x", layout=layout)
    params = model() | {"items": items}
    run = jax.jit(functools.partial(train, tx), donate_argnums=(0, 1))
    carry = jax.tree.map(jnp.copy, params), tx.init(params)
    for batch in ids:
        carry = run(*carry, batch)
    found, state = take_changes(*carry)
    assert found["items"].tolist() == np.unique(ids).tolist()
    assert found["w"].tolist() == [0, 1, 2]
    new, state = run(carry[0], state, ids[0])  # the cleared state fits the step
    found, state = take_changes(new, state=state)
    assert found["items"].tolist() == np.unique(ids[0]).tolist()
    assert run._cache_size() <= 2
    flags = state.changed["items"].values
    assert flags.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P("x")), 1)
    if kind == AxisType.Auto:  # outside of jit
        tx = track_changes(optax.identity())
        _, state = tx.update(grad(params, ids[0]), tx.init(params), params)
        found, _ = take_changes(params, state)
        assert found["items"].tolist() == np.unique(ids[0]).tolist()
