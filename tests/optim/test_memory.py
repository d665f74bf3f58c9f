"""A jitted step with donated buffers costs as much as the read rows."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import IN_PLACE, assert_no_dense, compile_as_users_do
from sparsejax.optim import dynamic_loss_scale, lazy, weight_decay
from sparsejax.optim._lazy import gather_scatter
from sparsejax.optim._optimizers import base
from sparsejax.optim._wrappers import rounding


V, D, N = 200_003, 64, 1024

TXS = {
    "adam": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "adagrad": lambda: optax.adagrad(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
}


def _program(tx):
    return _step_of(lazy(tx))


def _step_of(lifted, dtype=jnp.float32):
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, rows, values):
        grads = {"table": sj.SelectedRows(rows, values, V), "bias": jnp.ones(D)}
        updates, state = lifted.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    table = jax.ShapeDtypeStruct((V, D), dtype)
    params = {"table": table, "bias": jax.ShapeDtypeStruct((D,), jnp.float32)}
    rows = jax.ShapeDtypeStruct((N,), jnp.int32)
    values = jax.ShapeDtypeStruct((N, D), jnp.float32)
    return step, (params, jax.eval_shape(lifted.init, params), rows, values)


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", TXS)
def test_in_place(name):
    step, args = _program(TXS[name]())
    compiled = compile_as_users_do(step.lower(*args))
    copies = re.findall(rf"= f32\[{V},{D}\]\S* copy\(", compiled.as_text())
    assert not copies
    memory = compiled.memory_analysis()
    assert memory is not None
    table_bytes = 4 * V * D
    assert memory.temp_size_in_bytes < 0.05 * table_bytes
    # All tables, of weights and of state, are the buffers that were passed in.
    tables = sum(x.shape == (V, D) for x in jax.tree.leaves(args))
    assert memory.alias_size_in_bytes >= tables * table_bytes


@pytest.mark.usefixtures("loose_promotion")
def test_state_that_does_not_depend_on_old_state_is_in_place():
    """`weight_decay` writes the same two numbers into each row that is read."""
    step, args = _program(optax.chain(optax.adam(0.1), weight_decay(0.01)))
    text = step.lower(*args).compile().as_text()
    assert f"f32[{V},2]" in text
    assert not re.findall(rf"= f32\[{V},\d+\]\S* copy\(", text)


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", TXS)
def test_nothing_of_the_tables_size_arises(name):
    step, args = _program(TXS[name]())
    assert_no_dense(step, *args, allow=IN_PLACE, heights={V})


READS = {
    "index": lambda table, ids: table[ids],
    "take": lambda table, ids: jnp.take(table, ids, axis=0),
    "lookup": sj.lookup,
    "clip": partial(sj.lookup, mode="clip"),
}


@pytest.mark.usefixtures("loose_promotion", "cpu_backend")
@pytest.mark.parametrize(
    "name, keeps_rows, read",
    [
        ("sgd", False, "index"),
        ("adam", True, "take"),
        ("adam", True, "lookup"),
        ("sgd", False, "clip"),
    ],
)
def test_the_rows_read_and_their_cotangents_share_memory(name, keeps_rows, read):
    """Unless the gradient of the loss needs the rows, however they are read."""
    tx = lazy({"sgd": optax.sgd, "adam": optax.adam}[name](0.1))
    n = 49_152  # of more than half of the rows, the gradient would be dense

    def loss_fn(params, ids, clicked):
        rows = READS[read](params["table"], ids)
        logits = (rows**2 if keeps_rows else rows) @ params["weights"]
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, clicked))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, *batch):
        loss, grads = sj.value_and_grad(loss_fn)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = {
        "table": jax.ShapeDtypeStruct((V, D), jnp.float32),
        "weights": jax.ShapeDtypeStruct((D,), jnp.float32),
    }
    args = params, jax.eval_shape(tx.init, params)
    ids = jax.ShapeDtypeStruct((n,), jnp.int32)
    clicked = jax.ShapeDtypeStruct((n,), jnp.float32)
    compiled = compile_as_users_do(step.lower(*args, ids, clicked))
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < (2.3 if keeps_rows else 1.3) * (4 * n * D)


@pytest.mark.usefixtures("loose_promotion", "cpu_backend")
def test_the_cotangents_of_the_largest_read_take_the_place_of_its_rows():
    """Skip-gram: the cotangents of the words need the rows of the negatives."""
    pairs, tx = 8_192, lazy(optax.sgd(0.1))

    def loss_fn(params, words, negatives):
        scores = jnp.einsum("bd,bkd->bk", params["a"][words], params["b"][negatives])
        return jnp.mean(jax.nn.softplus(scores))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, *batch):
        loss, grads = sj.value_and_grad(loss_fn)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    like = jax.ShapeDtypeStruct
    params = dict.fromkeys("ab", like((V, D), jnp.float32))
    batch = like((pairs,), jnp.int32), like((pairs, 5), jnp.int32)
    lowered = step.lower(params, jax.eval_shape(tx.init, params), *batch)
    memory = compile_as_users_do(lowered).memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1.5 * (4 * 6 * pairs * D)


# ------------------------------------------------------------------ promises to XLA


# Each reads the weights of a row, not only its gradient and state.
READERS = {
    "adamw": lambda: lazy(optax.adamw(0.1)),
    "ema": lambda: lazy(optax.chain(optax.adam(0.1), sj.optim.ema(0.9))),
    "weight_decay": lambda: lazy(optax.chain(optax.adam(0.1), weight_decay(0.1))),
    "ftrl": lambda: sj.optim.ftrl(0.1),
}
AROUND = {
    "accumulate": lambda tx: sj.optim.accumulate(tx, 4, {"table": N, "bias": None}),
    "dynamic_loss_scale": dynamic_loss_scale,
    "rounding": lambda tx: sj.optim.rounding(tx, master=True),
    "track_changes": lambda tx: sj.optim.track_changes(dynamic_loss_scale(tx)),
}


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize(
    "reader, around",
    [
        *((reader, "accumulate") for reader in READERS),
        *(pytest.param("adamw", a, marks=pytest.mark.slow) for a in list(AROUND)[1:]),
    ],
)
def test_a_wrapped_step_that_reads_weights_is_in_place(reader, around):
    """The update is added outside of the wrapper: the pass must not write the table."""
    dtype = jnp.float16 if around == "rounding" else jnp.float32
    step, args = _step_of(AROUND[around](READERS[reader]()), dtype)
    memory = compile_as_users_do(step.lower(*args)).memory_analysis()
    assert memory is not None
    tables = [x for x in jax.tree.leaves(args) if x.shape[:1] == (V,)]
    assert memory.temp_size_in_bytes < 0.1 * tables[0].dtype.itemsize * V * D
    num_bytes = sum(np.dtype(x.dtype).itemsize * x.size for x in tables)
    assert memory.alias_size_in_bytes >= num_bytes


def test_the_scatter_is_of_unique_sorted_rows():
    """`scatter_rows`: its promises about the ids reach the compiled program."""

    def write(table, ids, values):
        rows = sj.SelectedRows(ids, values, 40)
        return gather_scatter.scatter_rows(rows, table, values)

    args = jnp.ones((40, 8)), jnp.arange(8), jnp.ones((8, 8))
    text = compile_as_users_do(jax.jit(write).lower(*args)).as_text()
    scatters = re.findall(r"= f32\[40,8\]\S* scatter\(.*", text)
    assert len(scatters) == 1
    assert "unique_indices=true" in scatters[0]
    assert "indices_are_sorted=true" in scatters[0]


def test_no_select_follows_a_guarded_division():
    """`divide` and `root`: with a select around the result they are not vectorised."""
    f = jax.jit(lambda a, b: base.divide(base.root(a), b))
    text = compile_as_users_do(f.lower(jnp.ones(64), jnp.ones(64))).as_text()
    assert re.search(r"ROOT \S+ = f32\[64\]\S* divide\(", text), text
    of_divisor = re.findall(r"= f32\[64\]\S* select\(", text)
    assert len(of_divisor) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rounding_to_16_bits_and_back_is_kept(dtype):
    """`rounding`: XLA must not drop float32 -> 16 bits -> float32, though it may where
    excess precision is allowed: the update would not be that of rounded weights."""

    def apply(weights, update):
        return rounding._apply(weights, weights.astype(jnp.float32), update, None)[0]

    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.standard_normal((64, 8)), dtype)
    update = jnp.asarray(rng.standard_normal((64, 8)), jnp.float32)
    compiled = compile_as_users_do(jax.jit(apply).lower(weights, update))
    new = np.asarray(weights, np.float32) + np.asarray(update)
    rounded = np.asarray(jnp.asarray(new).astype(dtype)).astype(np.float32)
    expected = rounded - np.asarray(weights, np.float32)
    np.testing.assert_array_equal(compiled(weights, update), expected)


def test_a_sum_of_two_floats_keeps_both():
    """`weight_decay`: XLA must not simplify (a + b) - a, nor reorder the sum."""
    rng = np.random.default_rng(0)
    high = rng.uniform(1, 100, 500).astype(np.float32)
    low = (high * rng.uniform(-(2**-25), 2**-25, 500)).astype(np.float32)
    x = (10.0 ** rng.uniform(-7, 0, 500)).astype(np.float32)
    total = jnp.stack([jnp.asarray(high), jnp.asarray(low)])
    add = jax.jit(jax.vmap(base.add_as_two, in_axes=(1, 0)))
    compiled = compile_as_users_do(add.lower(total, jnp.asarray(x)))
    got = np.asarray(compiled(total, jnp.asarray(x)), np.float64).sum(axis=1)
    wide = [a.astype(np.float64) for a in (high, low, x)]
    np.testing.assert_allclose(got, sum(wide), rtol=2.0**-46)
