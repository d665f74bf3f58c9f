"""`lazy` inside jit: one pass over the rows of a table, in blocks.

Its results, and the buffers of the compiled program.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import (
    assert_trees_close,
    compile_as_users_do,
    dense,
    eqns_of,
    is_rows,
    ones,
)
from optimizers import check_steps
from sparsejax._rows import merge
from sparsejax.optim import lazy


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D, N = 211, 6, 90
close = partial(assert_trees_close, rtol=2e-5, atol=2e-6)


def clipped(norm=0.1):
    return optax.chain(optax.clip_by_global_norm(norm), optax.adam(0.1))


def halved_if_large(norm=0.1):
    """A conditional that is given a sum over all rows, among its operands."""

    def update(updates, state, params=None):
        del params
        total = sum(jnp.sum(u * u) for u in jax.tree.leaves(updates))
        scale = lambda total, count: jnp.where(total > norm, 0.5, 1.0) / count
        by = jax.lax.cond(
            state > 0, scale, lambda total, count: 1.0 + 0 * total, total, state
        )
        return jax.tree.map(lambda u: u * by, updates), state + 1.0

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def after_one_step(tx):
    return optax.conditionally_transform(tx, lambda step, **_: step > 0)


ADAM = optax.adam(0.1)
# test_lazy.py has a transformation of each kind without conditionals.
IN_PASSES = {
    "clip between": optax.chain(clipped(), optax.clip_by_global_norm(0.01)),
    "a sum in two conditionals": optax.chain(
        after_one_step(after_one_step(optax.clip_by_global_norm(0.1))), ADAM
    ),
    "a conditional on a sum": optax.chain(halved_if_large(), ADAM),
    "parts": optax.partition(
        {"row": optax.adagrad(0.1), "all": optax.sgd(0.1)},
        {"table": "row", "b": "all", "one": "all"},
    ),
    "rowwise_adagrad": sj.optim.rowwise_adagrad(0.1),
    "weights of 0": optax.chain(optax.zero_nans(), optax.lion(0.1)),
}


def problem(tx, dim=D):
    """Parameters, the state, ids of rows and their values."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(V, dim)).astype(np.float32)
    # Arrays made of scalars for "one", such as Adagrad's zeros, look like a row's.
    params = {"b": ones(D), "one": ones(1), "table": table}
    rows = rng.integers(-1, V + 2, N).astype(np.int32)
    rows[: N // 3] = rows[0] = 7  # one row many times, and some out of range
    values = rng.normal(size=(N, dim)).astype(np.float32)
    return jax.tree.map(jnp.asarray, (params, tx.init(params), rows, values))


def gradient(rows, values):
    return {"b": ones(D), "one": ones(1), "table": sj.SelectedRows(rows, values, V)}


def step(tx, params, state, rows, values):
    updates, state = tx.update(gradient(rows, values), state, params)
    return optax.apply_updates(params, updates), state, updates


CLIPPED = lazy(clipped())
CLIPPED_STEP = jax.jit(partial(step, CLIPPED))


def primitives(tx, *args):
    return {eqn.primitive.name for eqn in eqns_of(partial(step, tx), *args)}


# ------------------------------------------------------------------ results


def test_equals_the_dense_run():
    for name, tx in IN_PASSES.items():
        params, state, rows, values = problem(tx)
        assert "update_rows" in primitives(lazy(tx), params, state, rows, values), name
    steps = [gradient(np.roll(rows, k), values) for k in range(2)]
    check_steps(IN_PASSES, params, steps, 2e-5)


def test_many_blocks_and_few_of_them_used():
    """A row is so wide that a block has sixteen."""
    params, _, rows, values = problem(ADAM, dim=4096)
    ids = rows, np.full_like(rows, 3), np.full_like(rows, V)
    steps = [gradient(x, values) for x in ids]
    check_steps({"clipped": clipped()}, params, steps, 2e-5)


def test_rows_that_nothing_reads_are_not_updated():
    args = problem(ADAM)
    for name, is_read in {"table": True, "b": False}.items():
        run = jax.jit(lambda *args, name=name: step(lazy(ADAM), *args)[0][name])
        assert ("stablehlo.while" in run.lower(*args).as_text()) == is_read


def test_a_linear_update_needs_no_merging():
    schedule = optax.linear_schedule(0.1, 0.0, 5)
    linear = optax.sgd(0.1), optax.sgd(schedule), optax.chain(optax.scale(-1.0))
    for tx in linear:
        params, state, rows, values = problem(tx)
        names = primitives(lazy(tx), params, state, rows, values)
        assert not names & {"update_rows", "merge_rows", "sort", "while"}
    check_steps(dict(enumerate(linear)), params, [gradient(rows, values)])
    for tx in (ADAM, optax.sgd(0.1, momentum=0.9), optax.sign_sgd(0.1)):
        assert "merge_rows" in primitives(lazy(tx), *problem(tx))


@pytest.mark.window
@pytest.mark.parametrize("tx", [ADAM, clipped()])
def test_what_is_not_checked_runs_over_all_rows_at_once(tx):
    args, unchecked = problem(tx), lazy(tx, check=False)
    assert "update_rows" not in primitives(unchecked, *args)
    run = lambda tx: jax.jit(partial(step, tx))(*args)[:2]
    close(run(unchecked), run(lazy(tx)))


def test_equal_input_gives_equal_bits():
    first, second = (CLIPPED_STEP(*problem(CLIPPED)) for _ in range(2))
    assert_trees_close(first, second, rtol=0, atol=0)


# ------------------------------------------------------------------ transformations


@pytest.mark.window
def test_under_vmap_and_in_a_scan():
    *carry, rows, values = problem(CLIPPED)
    batch = np.stack([rows, rows[::-1]])
    run = lambda carry, ids: CLIPPED_STEP(*carry, ids, values)[:2]
    alone = jax.tree.map(lambda *x: np.stack(x), *(run(carry, ids) for ids in batch))
    close(jax.jit(jax.vmap(run, in_axes=(None, 0)))(carry, batch), alone)
    body = lambda carry, ids: (run(carry, ids), None)
    scanned, _ = jax.jit(lambda c: jax.lax.scan(body, c, batch))(tuple(carry))
    for ids in batch:
        carry = run(carry, ids)
    close(scanned, carry)


@pytest.mark.slow
def test_an_update_is_differentiable():
    params, state, rows, values = problem(ADAM)

    def loss(tx, values, table):
        new, _, _ = step(tx, {**params, "table": table}, state, rows, values)
        return jnp.sum(new["table"] ** 2)

    grads = [
        jax.jit(jax.grad(partial(loss, tx), (0, 1)))(values, params["table"])
        for tx in (lazy(ADAM), lazy(ADAM, check=False))
    ]
    close(*grads, rtol=1e-3, atol=1e-4)  # Adam divides by numbers near zero


@pytest.mark.window
@pytest.mark.usefixtures("eight_devices")
def test_on_several_devices():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    args = problem(CLIPPED)
    placed = jax.device_put(args, jax.NamedSharding(mesh, jax.P()))
    close(CLIPPED_STEP(*placed)[:2], CLIPPED_STEP(*args)[:2])


# ------------------------------------------------------------------ the update


def test_adding_the_update_to_the_same_parameters_gives_what_was_written():
    tx = lazy(ADAM)
    params, state, rows, values = problem(tx)

    @jax.jit
    def both(params, state):
        written, _, updates = step(tx, params, state, rows, values)
        other = jax.tree.map(lambda x: x + 0, params)
        return (
            written,
            optax.apply_updates(other, updates),
            optax.apply_updates(params, jax.tree.map(lambda x: x, updates)),
            params["table"] + updates["table"] * 2,
            updates,
        )

    written, added, copied, twice, updates = both(params, state)
    for other in (added, copied, optax.apply_updates(params, updates)):
        close(other, written)
    close(twice - params["table"], 2 * (written["table"] - params["table"]), atol=1e-5)


# ------------------------------------------------------------------ merging

MOMENTUM = lazy(optax.sgd(1.0, momentum=0.9))
# Ids `[n]` of a table of `height` rows.
IDS = {
    "random": lambda rng, height: rng.integers(-3, height + 3, 5_000),
    "equal": lambda rng, height: np.full(33, height - 1),
    "strided": lambda rng, height: np.arange(600) * 1024 % height,
    "few": lambda rng, height: rng.integers(0, 9, 32),
    "distinct": lambda rng, height: rng.permutation(100)[:31],
    "one": lambda rng, height: np.array([height // 2]),
}


@pytest.mark.parametrize(
    "kind, dtype",
    [*((kind, jnp.int32) for kind in IDS), ("random", jnp.uint8), ("few", jnp.int16)],
)
def test_duplicates_are_merged(kind, dtype):
    """Into distinct rows, ascending, with empty slots at the end."""
    rng, most = np.random.default_rng(0), np.iinfo(dtype).max
    height = int(min(1 << 20, most))
    ids = np.clip(IDS[kind](rng, height), np.iinfo(dtype).min, most).astype(dtype)
    values = rng.integers(-8, 9, (ids.size, 1)).astype(np.float32)
    tx, table = MOMENTUM, np.zeros((height, 1), np.float32)
    grads = sj.SelectedRows(ids, values, height)
    update, _ = jax.jit(tx.update)(grads, tx.init(table), table)
    named = np.unique(ids[(ids >= 0) & (ids < height)])
    empty = np.full(update.capacity - named.size, height)
    np.testing.assert_array_equal(update.rows, [*named, *empty])
    sums = -dense(ids, values, height)[named]
    np.testing.assert_array_equal(np.asarray(update.values)[: named.size], sums)


def test_duplicates_of_64_bit_ids(x64):
    """No array has so many rows."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 9, 300) * (1 << 33) + rng.integers(0, 9, 300)
    found = jax.jit(merge.first_slots, static_argnums=1)(jnp.asarray(ids), 1 << 40)
    np.testing.assert_array_equal(found, [ids.tolist().index(i) for i in ids.tolist()])


# ------------------------------------------------------------------ the program


@pytest.mark.window
@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("name", ["adam", "clip", "looked at"])
def test_no_array_of_the_gradients_size_but_itself(name):
    tx, n, height, dim = (
        lazy(clipped() if name == "clip" else ADAM),
        65_536,
        200_003,
        64,
    )

    def run(params, state, rows, values):
        grads = {"table": sj.SelectedRows(rows, values, height)}
        updates, state = tx.update(grads, state, params)
        if name == "looked at":
            updates = jax.tree.map(lambda u: u * 0.5, updates, is_leaf=is_rows)
        return optax.apply_updates(params, updates), state

    like = jax.ShapeDtypeStruct
    params = {"table": like((height, dim), jnp.float32)}
    rows, values = like((n,), jnp.int32), like((n, dim), jnp.float32)
    args = params, jax.eval_shape(tx.init, params), rows, values
    compiled = compile_as_users_do(jax.jit(run, donate_argnums=(0, 1)).lower(*args))
    # A copy of the argument, in which duplicates are summed; blocks; ids. Before
    # jax 0.8, XLA does not fuse the squares of a norm into their sum: one array more.
    is_old = jax.__version_info__ < (0, 8) and name == "clip"
    bound = 6 if name == "looked at" else 2.3 if is_old else 1.3
    assert compiled.memory_analysis().temp_size_in_bytes < bound * 4 * n * dim
    assert not re.findall(r"= f32\[200003,64\]\S* copy\(", compiled.as_text())


def _programs(tx, grads, params):
    return [
        id(eqn.params["program"])
        for eqn in eqns_of(tx.update, grads, tx.init(params), params)
        if eqn.primitive.name == "update_rows"
    ]


@pytest.mark.window
def test_tables_with_equal_rows_share_one_program():
    """It is traced once, however many rows each of them has."""
    heights = {"a": 9, "b": 9, "c": 12}
    rows = np.arange(3), ones(3, 2)
    grads = {k: sj.SelectedRows(*rows, height) for k, height in heights.items()}
    params = {k: ones(height, 2) for k, height in heights.items()}
    found = _programs(lazy(ADAM), grads, params)
    assert len(found) == 3 and len(set(found)) == 1


def test_tables_with_other_updates_have_programs_of_their_own():
    """Equal rows too: a rate, a sign or the order makes the updates different."""
    decay = optax.add_decayed_weights(0.1)
    ways = {
        "a": ADAM,
        "b": optax.adam(0.2),
        "c": optax.adam(-0.1),
        "d": optax.chain(ADAM, decay),
        "e": optax.chain(decay, ADAM),
    }
    tx = optax.partition(ways, {k: k for k in ways})
    params = {k: np.linspace(0.5, 1.5, 18, dtype="f").reshape(9, 2) for k in ways}
    rows = sj.SelectedRows(np.array([5, 3, 5]), ones(3, 2), 9)
    grads = dict.fromkeys(ways, rows)
    assert len(set(_programs(lazy(tx), grads, params))) == len(ways)
    check_steps({"ways": tx}, params, [grads])
