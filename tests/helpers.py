"""Checks and helpers that several test files use."""

import contextlib
import functools
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from sparsejax._rows import row_ids


# ------------------------------------------------------------------ numbers

_TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-5, "float64": 1e-12}


def as_numpy(leaf):
    """A leaf of a tree as NumPy has it; row ids as integers, scales as floats."""
    return np.asarray(row_ids.PAIRS.unseal(row_ids.IDS.unseal(leaf, 0)))


@jax.jit
def whole(tree):
    """The tree with plain arrays in place of sharded tables and sparse gradients.

    In one program: of an eager `to_dense`, JAX compiles each operation for all devices.
    """
    # By type: a variable of nnx has the attributes of its value.
    kinds = sj.SelectedRows, sj.parallel.ShardedTable
    is_leaf = lambda x: isinstance(x, kinds)
    dense = lambda x: x.to_dense() if is_leaf(x) else x
    return jax.tree.map(dense, tree, is_leaf=is_leaf)


def assert_trees_close(actual, expected, *, rtol=None, atol=None):
    """Equal trees: structure, shapes and dtypes exactly, floats to rounding.

    NaN equals NaN. Tolerances follow from the dtype unless they are given.
    """
    chex.assert_trees_all_equal_structs(actual, expected)
    actual, expected = (
        {
            jax.tree_util.keystr(path): as_numpy(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (actual, expected)
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for dtype in {x.dtype for x in actual.values()}:
        # Compared in float64, so that no difference is rounded away.
        tolerance = _TOLERANCE.get(dtype.name)
        cast = (lambda x: x.astype(np.float64)) if tolerance else (lambda x: x)
        pair = [
            {k: cast(x) for k, x in tree.items() if x.dtype == dtype}
            for tree in (actual, expected)
        ]
        if tolerance is None:  # integers and booleans
            chex.assert_trees_all_equal(*pair)
            continue
        chex.assert_trees_all_close(
            *pair,
            rtol=tolerance if rtol is None else rtol,
            atol=tolerance if atol is None else atol,
        )


def assert_same_bits(actual, expected):
    """Equal arrays bit by bit: dtype, shape, signs of zeros and NaN."""
    actual, expected = as_numpy(actual), as_numpy(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


# ------------------------------------------------------------------ processes

ROOT = pathlib.Path(__file__).parent.parent


def run_python(*command, timeout=300, cwd=ROOT, **options):
    """The output of `python COMMAND...`, which must exit with 0 within `timeout` s."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_together(*command, directory, count=2, timeout=300):
    """Runs `python COMMAND... PORT PROCESS DIRECTORY` in several processes at once.

    Shows their output if one fails or does not end.
    """
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, *map(str, (*command, port, process, directory))],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(count)
    ]
    said = []
    for process in running:
        try:
            said.append(process.communicate(timeout=timeout)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            said.append(f"no end after {timeout} s: {process.communicate()[0]}")
    codes = [process.returncode for process in running]
    assert codes == [0] * count, "\n\n".join(map(str, [codes, *said]))


# ------------------------------------------------------------------ which tests


def slow_but(names, *quick):
    """Parameters of a test: all are marked slow but those that `make test` runs."""
    assert set(quick) <= set(names), set(quick) - set(names)
    values = lambda x: x if isinstance(x, tuple) else (x,)
    slow = lambda x: pytest.param(*values(x), marks=pytest.mark.slow)
    return [x if x in quick else slow(x) for x in names]


# ------------------------------------------------------------------ rows


def ones(*shape):
    """An array of NumPy, float32."""
    return np.ones(shape, np.float32)


def in_range(rows, height):
    rows = np.asarray(rows).astype(object)  # Python's ints, which never wrap
    return ((rows >= 0) & (rows < height)).astype(bool)


def is_rows(x):
    return isinstance(x, sj.SelectedRows)


def to_dense(tree):
    """The tree with each SelectedRows as the array it stands for."""
    return jax.tree.map(
        lambda x: x.to_dense() if is_rows(x) else x, tree, is_leaf=is_rows
    )


def assert_gradients(loss, params, capacities, rtol=1e-4, atol=1e-5):
    """The gradients of `sj.value_and_grad` are those of JAX; returns the loss.

    Args:
      capacities: of the gradients that are sparse, by their paths.
    """
    value, grads = jax.jit(sj.value_and_grad(loss))(params)
    expected, dense = jax.jit(jax.value_and_grad(loss))(params)
    leaves = jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_rows)
    sparse = {jax.tree_util.keystr(p): x.capacity for p, x in leaves if is_rows(x)}
    assert sparse == capacities
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for found, g in zip(*map(jax.tree.leaves, (to_dense(grads), dense)), strict=True):
        np.testing.assert_allclose(found, g, rtol=rtol, atol=atol)
    return value


def dense(rows, values, height):
    """The dense array of SelectedRows(rows, values, height), by NumPy in float64."""
    rows, values = np.asarray(rows), np.asarray(values)
    wide = np.float64 if jnp.issubdtype(values.dtype, jnp.floating) else values.dtype
    out = np.zeros((height, *values.shape[1:]), wide)
    keep = in_range(rows, height)
    np.add.at(out, rows[keep].astype(np.int64), values[keep].astype(wide))
    return out


def dense_rows(array, ids):
    """Rows of a NumPy array; an id out of range reads zeros."""
    ids = np.asarray(ids)
    keep = in_range(ids, array.shape[0])
    out = np.zeros((*ids.shape, *array.shape[1:]), array.dtype)
    out[keep] = array[ids[keep].astype(np.int64)]
    return out


def make_rows(rows, height, row_shape=(3,), dtype=np.float32, seed=0, garbage=np.nan):
    """A SelectedRows with values that float32 sums exactly, NaN in its empty slots."""
    rows = np.asarray(rows)
    rng = np.random.default_rng(seed)
    values = rng.integers(-8, 9, (len(rows), *row_shape)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        values[~in_range(rows, height)] = garbage
    return sj.SelectedRows(rows, jnp.asarray(values), height), values


# ------------------------------------------------------------------ programs


@functools.cache
def jitted(f):
    """`jax.jit(f)`, the same one each time, so that it compiles once for a shape."""
    return jax.jit(f)


def run_jitted(f, ids, *args):
    """`f(ids, *args)` under jit, which cuts ids of 64 bits that are an argument."""
    if ids.itemsize == 8 and jnp.zeros(()).itemsize == 4:  # not under x64
        return jax.jit(lambda *args: f(ids, *args))(*args)
    return jitted(f)(ids, *args)


def _inner_jaxprs(eqn):
    """The jaxprs among an equation's parameters, open ones, on every JAX release."""
    is_jaxpr = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    leaves = jax.tree.leaves(eqn.params, is_leaf=is_jaxpr)
    return [getattr(x, "jaxpr", x) for x in leaves if is_jaxpr(x)]


def all_eqns(jaxpr):
    """Every equation of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _inner_jaxprs(eqn):
            yield from all_eqns(inner)


def eqns_of(f, *args):
    """Every equation of `f`'s program, as `jax.make_jaxpr` shows it."""
    jaxpr = jax.make_jaxpr(f)(*args)
    return list(all_eqns(getattr(jaxpr, "jaxpr", jaxpr)))


# Primitives that write in place if their operand is donated.
IN_PLACE = ("scatter", "scatter-add", "update_rows")


def assert_no_dense(f, *args, allow=(), heights=None):
    """The program of `f(*args)` makes no array of a table's size.

    It has a table's height among its axes, or as many elements as an argument with that
    number of rows. Choose a height that is a prime and larger than all other sizes.

    Args:
      f: traced by `jax.make_jaxpr`.
      *args: its arguments.
      allow: names of primitives that may make one; see `IN_PLACE`.
      heights: of the tables; by default the longest first axis among `args`.
    """
    if heights is None:
        leaves = jax.tree.leaves(args, is_leaf=lambda x: hasattr(x, "height"))
        first = lambda x: x.height if hasattr(x, "height") else (*np.shape(x), 0)[0]
        heights = {max(map(first, leaves))}
    heights = {*heights}
    assert heights and min(heights) > 0, "no table among the arguments"
    shapes = [np.shape(x) for x in jax.tree.leaves(args)]
    sizes = {int(np.prod(s)) for s in shapes if s and s[0] in heights}

    def is_dense(shape):
        return bool(heights & set(shape)) or int(np.prod(shape)) in sizes

    for eqn in eqns_of(f, *args):
        if eqn.primitive.name in allow:
            continue
        # The results of a call, a loop or a branch are checked in its inner jaxpr.
        # Those that a loop stacks have another shape.
        seen = {v.aval.shape for j in _inner_jaxprs(eqn) for v in j.outvars}
        for var in eqn.outvars:
            shape = getattr(var.aval, "shape", ())
            assert not is_dense(shape) or shape in seen, (
                f"{eqn.primitive.name} makes {var.aval}, which is of a table's size "
                f"(heights {sorted(heights)}):\n{eqn}"
            )


def compile_as_users_do(lowered) -> Any:
    """`lowered.compile()` with XLA's defaults, for tests that read memory or copies.

    It does not use the loop emitters that tests/conftest.py sets.
    """
    is_set = "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", "")
    options = {"xla_cpu_use_fusion_emitters": True} if is_set else None
    return lowered.compile(compiler_options=options)


def compile_step(loss, tx, shapes, *batch) -> Any:
    """A donated training step of float32 parameters, compiled as users do.

    `loss(params, *batch)` takes parameters of these `shapes` by name; `batch` are the
    shapes of ids, or other abstract arrays.
    """
    like = jax.ShapeDtypeStruct
    params = {name: like(shape, jnp.float32) for name, shape in shapes.items()}
    batch = [like(x, jnp.int32) if isinstance(x, tuple) else x for x in batch]

    def step(params, state, *batch):
        value, grads = sj.value_and_grad(loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    jitted = jax.jit(step, donate_argnums=(0, 1))
    return compile_as_users_do(
        jitted.lower(params, jax.eval_shape(tx.init, params), *batch)
    )


def assert_in_place(f, *args, donate=0):
    """Compiled, `f` has no array of argument `donate`'s shape but it and the result."""
    table = args[donate]
    compiled = compile_as_users_do(jax.jit(f, donate_argnums=donate).lower(*args))
    assert_written_in_place(compiled, [table], table.nbytes)


def assert_written_in_place(compiled, arrays, temporaries):
    """A compiled program writes the arrays in place: donated, and not copied.

    All of its temporaries have fewer than `temporaries` bytes.
    """
    memory, text = compiled.memory_analysis(), compiled.as_text()
    num_bytes = sum(np.dtype(x.dtype).itemsize * x.size for x in arrays)
    assert memory.alias_size_in_bytes >= num_bytes, "not all are donated"
    assert memory.temp_size_in_bytes < temporaries, memory
    for array in arrays:
        assert_no_copies(text, array)


def assert_no_copies(text, array):
    """A compiled program, as text, copies nothing of the array's shape."""
    shape = f"[{','.join(map(str, array.shape))}]"
    copies = [
        line.strip()
        for line in text.splitlines()
        if shape in line.split("(")[0] and " copy(" in line
    ]
    assert not copies, copies


class count_traces:  # lower case: it is called like a function
    """`f` with `.count`, the number of its Python calls: under jit, one a trace."""

    def __init__(self, f):
        self.f = f
        self.count = 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.f(*args, **kwargs)


def drawn(specs, scale=1.0, seed=0):
    """The tree with normal random numbers of NumPy in place of abstract arrays."""
    rng = np.random.default_rng(seed)
    is_abstract = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    draw = lambda x: jnp.array(rng.normal(0, scale, x.shape), x.dtype)
    return jax.tree.map(lambda x: draw(x) if is_abstract(x) else x, specs)
