"""A jitted step with donated buffers costs as much as the read rows.

Plain optimizers: tests/transform/test_compiled.py.
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
    IN_PLACE,
    assert_no_dense,
    assert_written_in_place,
    compile_as_users_do,
    compile_step,
    slow_but,
)
from optimizers import step
from sparsejax.optim import dynamic_loss_scale, lazy, rounding, weight_decay
from sparsejax.optim._lazy import gather_scatter
from sparsejax.optim._optimizers import base


V, D, N, SLOTS = 200_003, 64, 1024, 3001

ADAM, ADAMW = lazy(optax.adam(0.1)), lazy(optax.adamw(0.1))
accumulated = lambda tx: sj.optim.accumulate(tx, 4, {"table": SLOTS, "bias": None})
# The update is added outside of a wrapper: its pass must not write the table, though
# these read the weights of a row, not only its gradient and state.
TXS = {
    # It writes the same two numbers into each row that is read.
    "weight_decay": lambda: lazy(optax.chain(optax.adam(0.1), weight_decay(0.01))),
    "accumulate adamw": lambda: accumulated(ADAMW),
    "accumulate weight_decay": lambda: accumulated(
        lazy(optax.chain(optax.adam(0.1), weight_decay(0.1)))
    ),
    "accumulate ftrl": lambda: accumulated(sj.optim.ftrl(0.1)),
    "tracked": lambda: sj.optim.track_changes(dynamic_loss_scale(ADAMW)),
    "float16": lambda: dynamic_loss_scale(rounding(ADAM, 0)),
    "float16 master": lambda: dynamic_loss_scale(rounding(ADAMW, 0, master=True)),
}
QUICK = [name for name in TXS if "accumulate" in name or name == "weight_decay"]


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", slow_but(TXS, *QUICK))
def test_in_place(name):
    """Neither tables nor buffers are copied, on either branch of the step."""
    tx = TXS[name]()
    # Not bfloat16: XLA:CPU of jaxlib 0.10.2 scatters into a float32 copy of that.
    dtype = jnp.float16 if "float16" in name else jnp.float32

    def run(params, state, rows, values):
        grads = {"table": sj.SelectedRows(rows, values, V), "bias": jnp.ones(D)}
        return step(tx, params, state, grads)

    like = jax.ShapeDtypeStruct
    params = {"table": like((V, D), dtype), "bias": like((D,), jnp.float32)}
    rows, values = like((N,), jnp.int32), like((N, D), dtype)
    args = params, jax.eval_shape(tx.init, params), rows, values
    assert_no_dense(run, *args, allow=(*IN_PLACE, "scatter-max"), heights={V})
    compiled = compile_as_users_do(jax.jit(run, donate_argnums=(0, 1)).lower(*args))
    # All tables, of weights and of state, are the buffers that were passed in.
    leaves = [x for x in jax.tree.leaves(args[:2]) if x.ndim == 2]
    tables = [x for x in leaves if x.shape[0] in (V, SLOTS)]
    table_bytes = np.dtype(dtype).itemsize * V * D
    assert_written_in_place(compiled, tables, 0.1 * table_bytes)


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
        ("sgd", False, "take"),
        ("adam", True, "lookup"),
        ("sgd", False, "clip"),
    ],
)
def test_the_rows_read_and_their_cotangents_share_memory(name, keeps_rows, read):
    """Unless the gradient of the loss needs the rows, however they are read."""
    n = 49_152  # of more than half of the rows, the gradient would be dense

    def loss(params, ids, clicked):
        rows = READS[read](params["table"], ids)
        logits = (rows**2 if keeps_rows else rows) @ params["weights"]
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, clicked))

    tx = lazy({"sgd": optax.sgd, "adam": optax.adam}[name](0.1))
    clicked = jax.ShapeDtypeStruct((n,), jnp.float32)
    params = {"table": (V, D), "weights": (D,)}
    memory = compile_step(loss, tx, params, (n,), clicked).memory_analysis()
    assert memory.temp_size_in_bytes < (2.3 if keeps_rows else 1.3) * (4 * n * D)


@pytest.mark.usefixtures("loose_promotion", "cpu_backend")
def test_the_cotangents_of_the_largest_read_take_the_place_of_its_rows():
    """Skip-gram: the cotangents of the words need the rows of the negatives."""
    pairs = 8_192

    def loss(params, words, negatives):
        scores = jnp.einsum("bd,bkd->bk", params["a"][words], params["b"][negatives])
        return jnp.mean(jax.nn.softplus(scores))

    shapes = dict.fromkeys("ab", (V, D))
    compiled = compile_step(loss, lazy(optax.sgd(0.1)), shapes, (pairs,), (pairs, 5))
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1.5 * (4 * 6 * pairs * D)


# ------------------------------------------------------------------ promises to XLA


def test_the_scatter_is_of_unique_sorted_rows():
    """`scatter_rows`: its promises about the ids reach the compiled program."""

    def write(table, ids, values):
        rows = sj.SelectedRows(ids, values, 40)
        return gather_scatter.scatter_rows(rows, table, values)

    args = jnp.ones((40, 8)), jnp.arange(8), jnp.ones((8, 8))
    text = compile_as_users_do(jax.jit(write).lower(*args)).as_text()
    (scatter,) = re.findall(r"= f32\[40,8\]\S* scatter\(.*", text)
    assert "unique_indices=true" in scatter and "indices_are_sorted=true" in scatter


def test_no_select_follows_a_guarded_division():
    """`divide` and `root`: with a select around the result they are not vectorised."""
    f = jax.jit(lambda a, b: base.divide(base.root(a), b))
    text = compile_as_users_do(f.lower(jnp.ones(64), jnp.ones(64))).as_text()
    assert re.search(r"ROOT \S+ = f32\[64\]\S* divide\(", text), text
    of_divisor = re.findall(r"= f32\[64\]\S* select\(", text)
    assert len(of_divisor) == 1
