"""The promises of the library, read off the compiled training step.

Tables and optimizer state are updated in place, nothing of the table's size is made on
the way, and new ids do not compile anew. The lowerings for the CPU rely
on one property of XLA: it fuses a gather with the arithmetic next to it, and with
nothing else.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import (
    assert_no_copies,
    compile_as_users_do,
    compile_step,
    count_traces,
)
from sparsejax._lookup.bag_sum import bag_sum
from sparsejax._lookup.lookup import read_rows


# Dense optax and JAX's own models promote types.
pytestmark = [pytest.mark.usefixtures("loose_promotion"), pytest.mark.window]

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adagrad": optax.adagrad(0.1),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(1e-3),
    "clipped adam": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
}


def _squares(params, ids, _=None):
    return jnp.sum(params["t"][ids] ** 2)


# By name: the loss, its parameters, the optimizer, and the most arrays of the
# rows' size that a step has.
STEPS = {
    "sgd": (_squares, "t", "sgd", 2.2),
    "adagrad": (_squares, "t", "adagrad", 2.2),
    "adamw": (_squares, "t", "adamw", 2.2),
    "clipped adam": (_squares, "t", "clipped adam", 2.3),
    "dots": (
        lambda p, i, j: jnp.sum(jnp.sum(p["t"][i] * p["t"][j], 1) ** 2),
        *("t", "sgd", 4.5),
    ),
    "pairs": (lambda p, i, j: jnp.sum(p["t"][i] * p["u"][j]), "tu", "adam", 4.6),
    "penalty": (
        lambda p, i, j: jnp.sum(p["t"][i] @ p["w"]) + jnp.sum(p["u"][j] ** 2),
        *("tuw", "sgd", 4.6),
    ),
    "bags": (
        lambda p, i, j: jnp.sum(
            sj.embedding_bag(p["t"], i, j % 999, 999, combiner="mean") ** 2
        ),
        *("t", "sgd", 1.3),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_in_place_and_small(name):
    """It makes no array of a table's size, and few of the size of the rows."""
    v, d, n = 200_003, 64, 20_000
    loss, uses, optimizer, most = STEPS[name]
    tx = OPTIMIZERS[optimizer]
    shapes = {name: (d,) if name == "w" else (v, d) for name in uses}
    compiled = compile_step(loss, sj.optim.lazy(tx), shapes, (n,), (n,))
    memory: Any = compiled.memory_analysis()
    table = jax.ShapeDtypeStruct((v, d), jnp.float32)
    params = {name: jax.ShapeDtypeStruct(shapes[name], jnp.float32) for name in uses}
    leaves = jax.tree.leaves((params, jax.eval_shape(tx.init, params)))
    tables = sum(x.shape == (v, d) for x in leaves)
    # Weights and every table-shaped state are handed over, not copied ...
    assert memory.alias_size_in_bytes >= tables * 4 * v * d
    is_cpu = jax.default_backend() == "cpu"
    # A GPU's scatter reads the rows of the other table: each has to come first.
    if name != "pairs" or is_cpu:
        assert_no_copies(compiled.as_text(), table)
        # ... and nothing in the program makes an array of that shape but the scatters,
        # or the kernel that is one.
        shaped = rf"= f32\[{v},{d}\]\S* (\w[\w-]*)\("
        made = re.findall(shaped, str(compiled.as_text()))
        writes = {"scatter", "fusion", "custom-call"}
        assert set(made) <= {"parameter", "get-tuple-element", *writes}, made
        assert sum(op in writes for op in made) <= 2 * tables
    rows = memory.temp_size_in_bytes / (4 * n * d)
    if is_cpu or loss is _squares:
        assert rows < (most if is_cpu else 6), rows


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_new_ids_do_not_recompile_and_buffers_are_reused(name):
    tx = sj.optim.lazy(OPTIMIZERS[name])

    @count_traces
    def step(params, state, ids):
        updates, state = tx.update(sj.grad(_squares)(params, ids), state, params)
        return optax.apply_updates(params, updates), state

    jitted: Any = jax.jit(step, donate_argnums=(0, 1))
    params = {"t": jnp.ones((1000, 8))}
    state = tx.init(params)
    where = lambda tree: {
        x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.ndim == 2
    }
    before, rng = where((params, state)), np.random.default_rng(0)
    for k in range(10):
        # Few or many distinct ids, out of range now and then: one program.
        ids = jnp.asarray(rng.integers(-2, 5 + 100 * k, 32), jnp.int32)
        params, state = jitted(params, state, ids)
    assert where((params, state)) == before
    assert step.count == jitted._cache_size() == 1


# ------------------------------------------------------------------ lowerings


def _loops_with_a_gather(f, *args):
    """For each computation of the compiled program that gathers, its operations.

    `f`'s result goes into a root and a division, as an optimizer's rows do. A loop
    with a gather and one of these is not vectorised (see benchmarks/NOTES.md).
    """
    if jax.default_backend() != "cpu":
        pytest.skip("is about the lowerings for the CPU")
    user = jax.jit(lambda *args: jnp.sqrt(f(*args) + 1.0) / 3.0)
    text = str(compile_as_users_do(user.lower(*args)).as_text())
    assert "sqrt" in text
    # A computation is a name, its instructions in braces, and a last line "}".
    computations = [
        re.findall(r" = (?:\([^)]*\)|\S+) ([\w-]+)\(", computation)
        for computation in text.split("\n}")
    ]
    return [ops for ops in computations if "gather" in ops]


_TABLE = jax.ShapeDtypeStruct((100_003, 64), jnp.float32)


def _ids(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def test_a_read_is_fused_with_its_multiplication_only():
    """XLA must not find out that the factor is one, nor that the condition is true."""
    (ops,) = _loops_with_a_gather(read_rows, _TABLE, _ids(8192))
    assert ops.count("gather") == 1
    assert "multiply" in ops
    assert not {"sqrt", "divide", "add"} & set(ops), ops


@pytest.mark.parametrize("length, loops", [(5, {5}), (32, {16}), (37, {5, 16})])
def test_a_fixed_bag_is_one_loop_of_gathers(length, loops):
    """The conditional keeps uses of the sums out of that loop."""
    found = _loops_with_a_gather(bag_sum, _TABLE, _ids(512, length))
    assert {ops.count("gather") for ops in found} == loops
    assert len(found) == 2 * len(loops)  # ids all in range, or not
    for ops in found:
        assert ops.count("add") >= ops.count("gather") - 1
        assert not {"sqrt", "divide"} & set(ops), ops


def test_a_segmented_bag_is_one_loop_of_pieces():
    add = lambda table, ids, bags: bag_sum(
        table, ids, None, bags, 512, indices_are_sorted=True
    )
    found = _loops_with_a_gather(add, _TABLE, _ids(8192), _ids(8192))
    loops = [ops for ops in found if ops.count("gather") >= 8]
    assert len(loops) == 2  # for as many pieces as is usual, and as there can be
    for pieces in loops:
        assert pieces.count("add") >= 7
        assert not {"sqrt", "divide", "scatter"} & set(pieces), pieces


@pytest.mark.usefixtures("cpu_backend")
def test_ids_out_of_range_are_counted_only_if_there_are_any():
    """On a CPU, for the scatter takes a tenth of the time of a ragged bag."""
    bags = lambda table, ids, segments: sj.embedding_bag(table, ids, segments, 512)
    lowered = jax.jit(bags).lower(_TABLE, _ids(8192), _ids(8192))
    text = str(compile_as_users_do(lowered).as_text())
    counts = r"s32\[512\]\S* scatter\("
    assert re.search(counts, text)
    entry = text[text.index("\nENTRY") :]
    called = re.findall(r"calls=%([\w.-]+)", entry[: entry.index("\n}")])
    bodies = [text[text.index(f"\n%{name} (") :] for name in called]
    assert not any(re.search(counts, body[: body.index("\n}")]) for body in bodies)
