"""Row ids and scales through trees: moved by any of JAX's means, not computed with."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnusedExpression=false

import copy
import functools
import inspect
import operator
import pathlib
import pickle
import re
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import fuzz_trees
import sparsejax as sj
from fuzz import search
from helpers import assert_trees_close, to_dense
from sparsejax._compat import enable_x64


V = 1000
IDS = [3, 7, 400]
G = sj.SelectedRows(jnp.array(IDS), jnp.arange(6.0).reshape(3, 2), V)
H = sj.SelectedRows(jnp.array([3, 9, 400]), jnp.ones((3, 2)), V)
LAZY = sj.optim.lazy(optax.adam(0.1))
PARAMS = {"t": jnp.ones((V, 2))}
P = jax.sharding.PartitionSpec

# Also an assert in `lax.dot_general`.
REFUSED = (TypeError, ValueError, NotImplementedError, AssertionError)

# Other words of an error. Outside of programs some of JAX's errors do not name the
# dtype. The last of these is the compiler's, when only the shape of the words differs.
REFUSAL = (
    "row_ids|row ids|Cannot call abstract method|not 'PRNGKeyArray'|"
    "cannot be converted to a NumPy array|Operation creation failed"
)


@functools.cache
def kinds():
    """Two trees of each kind, and the right call that errors about them name."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    table = sj.parallel.shard_rows(jnp.ones((9, 2)), mesh, "x")
    sharded = sj.grad(lambda t: jnp.sum(sj.lookup(t, jnp.array([3, 3, 1]))))(table)
    calls = "parallel.psum", "optim.global_norm", "optim.lazy"
    of_rows = ".*".join(rf"sparsejax\.{call}" for call in calls)
    rng = np.random.default_rng(0)
    quantized = lambda dtype: [
        sj.quantize(rng.normal(size=(9, 6)).astype("f"), 4, scale_dtype=dtype)
        for _ in range(2)
    ]
    return {
        "rows": ((G, H), of_rows),
        "sharded": ((sharded.values,) * 2, of_rows),
        "float16": (quantized("float16"), r"table\.requantize\(array\)"),
        "float32": (quantized("float32"), r"table\.requantize\(array\)"),
    }


def step(tx, g, h):
    del h
    return tx.update({"t": g}, tx.init(PARAMS), PARAMS)


def each(f):
    """`f` on every leaf, as one writes it."""
    return lambda *gs: jax.tree.map(f, *gs)


def opaque(g):
    """The leaf of ids, or of scales."""
    is_opaque = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.extended)
    (leaf,) = filter(is_opaque, jax.tree.leaves(g))
    return leaf


ONE = {  # of one gradient
    "abs": jnp.abs,
    "astype": lambda x: x.astype(jnp.bfloat16),
    "clip": lambda x: jnp.clip(x, -1, 1),
    "cumsum": jnp.cumsum,
    "divide": lambda x: x / 2,
    "lax.neg": lax.neg,
    "max": jnp.max,
    "mean": lambda x: jnp.mean(x, 0),
    "method astype": lambda x: x.astype("float32") * 0.5,
    "method clip": lambda x: x.clip(-1, 1),
    "method sum": lambda x: x.sum(),
    "minus": operator.neg,
    "negative": jnp.negative,
    "one minus": lambda x: 1 - x,
    "plus one": lambda x: x + 1,
    "power": lambda x: x**2,
    "scale": lambda x: 0.5 * x,
    "scale by a tracer": lambda x: x * jnp.sum(jnp.ones(2)),
    "scale by an int": lambda x: 2 * x,
    "sign": jnp.sign,
    "sort": jnp.sort,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "sum": jnp.sum,
}
TWO = {  # of two gradients
    "add": jnp.add,
    "average": lambda x, y: 0.9 * x + 0.1 * y,
    "lax.add": lax.add,
    "maximum": jnp.maximum,
    "multiply": operator.mul,
    "operator add": operator.add,
    "subtract": operator.sub,
}
TREES = {  # functions on whole trees
    "optax.chain(clip, lazy)": functools.partial(
        step, optax.chain(optax.clip(1), LAZY)
    ),
    "optax.chain(clip_by_global_norm, lazy)": functools.partial(
        step, optax.chain(optax.clip_by_global_norm(1.0), LAZY)
    ),
    "optax.chain(lazy, scale)": functools.partial(
        step, optax.chain(LAZY, optax.scale(-1.0))
    ),
    "optax.global_norm": lambda g, h: optax.global_norm(g),
    "optax.tree_utils": lambda g, h: optax.tree_utils.tree_mul(g, h),
    "optax.incremental_update": lambda g, h: optax.incremental_update(g, h, 0.1),
    "optax.sgd": functools.partial(step, optax.sgd(0.1)),
    "optax.tree.add": optax.tree.add,
    "optax.tree.cast": lambda g, h: optax.tree.cast(g, jnp.bfloat16),
    "optax.tree.norm": lambda g, h: optax.tree.norm(g),
    "optax.tree.scale": lambda g, h: optax.tree.scale(2, g),
    "optax.tree.sub": optax.tree.sub,
    "optax.tree.sum": lambda g, h: optax.tree.sum(g),
    "optax.tree.vdot": optax.tree.vdot,
}
LEAVES = {  # of that leaf
    "at[].set": lambda x: x.at[0].set(3),
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "convert_element_type": lambda x: lax.convert_element_type(x, jnp.int32),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(
        x, jnp.array([[3]]), (0, 0)
    ),
    "float": lambda x: float(x[0, 0]),
    "less": lambda x: x < 5,
    "jnp.int32": jnp.int32,
    "np.asarray": np.asarray,
    "pad": lambda x: jnp.pad(x, (0, 1)),
    "psum": lambda x: jax.vmap(
        lambda x: lax.psum(x, "x"), axis_name="x", axis_size=2, in_axes=None
    )(x),
    "random bits": lambda x: jax.random.bits(x[0, 0]),
    "vdot": lambda x: jnp.vdot(x, x),
    "view": lambda x: x.view(jnp.int32),
    "where with a number": lambda x: jnp.where(True, x, 0),
}
COMPUTE = {
    **{name: lambda g, h, f=f: each(f)(g) for name, f in ONE.items()},
    **{name: lambda g, h, f=f: f(opaque(g)) for name, f in LEAVES.items()},
    **{name: lambda g, h, f=f: each(f)(g, h) for name, f in TWO.items()},
    **TREES,
}
# Scales are floats beside codes, so fewer functions raise because of them.
OF_SCALES = (
    "abs,add,astype,average,maximum,operator add,minus,scale by an int,subtract,sum,"
    "where with a number,optax.global_norm,optax.incremental_update,optax.tree.add,"
    "optax.tree.scale,optax.tree.norm,optax.tree.vdot"
).split(",")


def _of_kinds():
    for name in COMPUTE:
        if name != "optax.tree.vdot":  # among IDIOMS
            yield name, "rows"
        if name in ONE | LEAVES:
            yield name, "sharded"
        if name in OF_SCALES:
            yield from ((name, "float16"), (name, "float32"))


@pytest.mark.window
@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")
@pytest.mark.parametrize("name, kind", list(_of_kinds()))
def test_arithmetic_is_refused(name, kind):
    """Eagerly and traced; the error names the call to write instead."""
    f, (trees, right) = COMPUTE[name], kinds()[kind]
    errors, words = REFUSED, right
    if name in LEAVES:  # the compiler raises for some
        errors, words = Exception, f"{right}|{REFUSAL}"
    # Outside of programs JAX refuses methods before it sees the dtype.
    with pytest.raises(Exception, match=f"{words}|Cannot call abstract method"):
        f(*trees)
    # jax 0.7.2 has no text for this one in `jit`.
    is_bare = name == "jnp.int32" and jax.__version_info__ < (0, 8)
    with pytest.raises(errors, match=None if is_bare else words):
        jax.jit(f).lower(*trees)
    if kind == "rows" and name not in LEAVES:
        with pytest.raises((TypeError, ValueError), match=right):
            jax.jit(jax.vmap(f)).lower(stack(G, H), stack(H, G))


COLLECTIVES = {
    "psum": lambda g: lax.psum(g, "x"),
    "pmean": lambda g: lax.pmean(g, "x"),
    "psum_scatter": lambda g: lax.psum_scatter(g, "x", tiled=True),
    "pmax": lambda g: lax.pmax(g, "x"),
    "psum of leaves": each(lambda x: lax.psum(x, "x")),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_reductions_over_devices_are_refused(name):
    """The error names `sparsejax.parallel.psum`."""
    f = COLLECTIVES[name]
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    over = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False
    )
    for run, g in (over(f), G), (jax.vmap(f, axis_name="x"), stack(G, H)):
        with pytest.raises((TypeError, ValueError), match=r"sparsejax\.parallel\.psum"):
            run(g)
    if name in ("psum", "pmean"):  # and that call does it
        total = over(lambda g: getattr(sj.parallel, name)(g, "x"))
        np.testing.assert_array_equal(total(G).to_dense(), G.to_dense())


def test_numpy_functions_are_refused():
    for f in (np.add, np.multiply, np.maximum):
        for a, b in (G, H), (jax.device_get(G), jax.device_get(H)):
            with pytest.raises(TypeError, match="cannot be converted to a NumPy array"):
                jax.tree.map(f, a, b)
    with pytest.raises(REFUSED):
        jax.tree.map(np.sum, G)


def through(tx):
    return lambda g, h: tx.update(g, tx.init(g), h)[0]


def filtered(g, h):
    """The values scaled by a filter of equinox."""
    eqx = pytest.importorskip("equinox")
    moving, fixed = eqx.partition(g, eqx.is_inexact_array)
    return eqx.combine(jax.tree.map(lambda x: 2 * x, moving), fixed)


KEY = jax.random.key(0)
IDIOMS = {
    "add_scale": lambda g, h: optax.tree.add_scale(g, 2.0, h),
    "allclose": optax.tree.allclose,
    "bias_correction": lambda g, h: optax.tree.bias_correction(g, 0.9, 2),
    "clip": lambda g, h: optax.tree.clip(g, -1.0, 1.0),
    "conj": lambda g, h: optax.tree.conj(g),
    "div": optax.tree.div,
    "max": lambda g, h: optax.tree.max(g),
    "random_like": lambda g, h: optax.tree.random_like(KEY, g),
    "random_like of floats": lambda g, h: optax.tree.random_like(
        KEY, g, dtype=jnp.float32
    ),
    "real": lambda g, h: optax.tree.real(g),
    "update_infinity_moment": lambda g, h: optax.tree.update_infinity_moment(
        g, h, 0.9, 1e-8
    ),
    "update_moment": lambda g, h: optax.tree.update_moment(g, h, 0.9, 2),
    "vdot": optax.tree.vdot,
    "where": lambda g, h: optax.tree.where(jnp.array(False), g, h),
    "zeros_like": lambda g, h: optax.tree.zeros_like(g),
    "zeros_like of floats": lambda g, h: optax.tree.zeros_like(g, dtype=jnp.float32),
    "zeros_like of ints": lambda g, h: optax.tree.zeros_like(g, dtype=jnp.int32),
    "add_noise": through(optax.add_noise(0.1, 0.5, KEY)),
    "apply_if_finite": through(optax.apply_if_finite(optax.identity(), 3)),
    "centralize": through(optax.centralize()),
    "ema of updates": through(optax.ema(0.9)),
    "set_to_zero": through(optax.set_to_zero()),
    "trace": through(optax.trace(0.9)),
    "zero_nans": through(optax.zero_nans()),
    "apply_updates": lambda g, h: optax.apply_updates(jnp.ones((V, 2)), g),
    "equinox.partition": filtered,
    "microbatches": lambda g, h: jax.tree.map(
        lambda x, y: jnp.mean(jnp.stack([x, y]), 0), g, h
    ),
    "sum of leaves": lambda g, h: sum(jnp.sum(x**2) for x in jax.tree.leaves(g)),
    "all finite": lambda g, h: jax.tree.reduce(
        jnp.logical_and, jax.tree.map(lambda x: jnp.isfinite(x).all(), g), True
    ),
    "only finite": lambda g, h: jax.tree.map(
        lambda x: jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)), g
    ),
    "vdot of leaves": lambda g, h: sum(
        map(jnp.vdot, jax.tree.leaves(g), jax.tree.leaves(h))
    ),
    "unravel": lambda g, h: (lambda flat: flat[1](flat[0]))(
        jax.flatten_util.ravel_pytree(g)
    ),
}


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", IDIOMS)
def test_idioms_are_right_or_refused(name):
    """The result is that of the dense arrays; or there is an error."""
    f = IDIOMS[name]
    for run in f, jax.jit(f):
        try:
            found = to_dense(run(G, H))
        except REFUSED as error:
            assert re.search(f"{REFUSAL}|integers|computed", str(error))
            continue
        assert_trees_close(found, run(G.to_dense(), H.to_dense()))


@pytest.mark.slow
def test_no_function_of_jax_computes_with_ids():
    """All of jax.numpy and lax, on ids, on ids with ids, and on ids with a number."""
    ids = jax.tree.leaves(G)[0]
    # Queries about an array, and calls that XLA refuses only in compilation.
    about = "lexsort ndim shape size nonzero flatnonzero shape_as_value".split()
    about += "tril_indices_from triu_indices_from".split()
    late = "argmax argmin argsort nanargmax nanargmin top_k rng_bit_generator".split()
    wrong = []
    for module in (jnp, lax):
        for name, f in inspect.getmembers(module, callable):
            if isinstance(f, type) or name in (*about, *late) or name[0] == "_":
                continue
            if name.startswith(("atleast_", "broadcast_")):
                continue  # each argument gives a result of its own
            for args in (ids,), (ids, ids), (ids, 2), (ids, 2.0):
                call = lambda x, f=f, more=args[1:]: f(
                    x, *(x if a is ids else a for a in more)
                )
                try:
                    out = jax.eval_shape(call, ids)
                except Exception:
                    continue  # refused, or not a function of arrays
                for leaf in jax.tree.leaves(out):
                    if getattr(leaf, "dtype", bool) not in (bool, ids.aval.dtype):
                        wrong.append((module.__name__, name, args[1:], leaf))
    assert not wrong


# Functions of `fuzz_trees.py` that work.
PASSED_LEAF = (
    "where at_set flip_last concatenate roll_rows cond index repeat_rows "
    "reverse_last split stack_and_index stack_last slice_last zeros_like where_mask"
).split()


@pytest.mark.window
@pytest.mark.parametrize("name", PASSED_LEAF)
def test_passed(name):
    for tree in "gradient", "sharded":
        for how in "eager", "jitted":
            assert fuzz_trees.check((tree, (name,), "none"), how) != "refused"


# Cases that were silently wrong: a tree, functions, arithmetic.
WERE_WRONG = [
    ("gradient", ("flip_last",), "none"),
    ("gradient", ("roll_last",), "none"),
    ("gradient", ("take",), "none"),
    ("gradient", ("take_beyond",), "none"),
    ("gradient", ("get_beyond",), "none"),
    ("gradient", ("zeros_of_int",), "none"),
    ("gradient", ("randint",), "none"),
    ("numbers", ("zeros_of_int",), "none"),
    ("numbers", ("equal",), "twice"),
    ("gradient", ("equal",), "twice"),
    ("gradient", ("isfinite",), "twice"),
    ("square", ("transpose",), "none"),
    ("square", ("vmap_to_last",), "none"),
    ("one_column", ("delete",), "none"),
    ("one_column", ("append",), "none"),
    ("one_column", ("repeat",), "none"),
]


@pytest.mark.parametrize("case", WERE_WRONG, ids=str)
def test_functions_that_were_silently_wrong(case):
    for how in "eager", "jitted":
        fuzz_trees.check(case, how)


def test_functions_mapped_over_trees():
    counts, failure = search("trees", seed=0, examples=12)
    assert not failure and counts.total() >= 12


def test_functions_that_are_not_noticed():
    """The page that explains gradients names them."""
    text = pathlib.Path(__file__, "../../../docs/explain/gradient.md").resolve()
    for name, f in fuzz_trees.UNNOTICED.items():
        jax.tree.map(f, G, H).to_dense()
        assert f"`jnp.{name}`" in text.read_text()
    for make in jnp.ones_like, functools.partial(jnp.full_like, fill_value=jnp.inf):
        assert not jax.tree.map(make, G).num_rows()


@pytest.mark.usefixtures("loose_promotion")
def test_leaves_that_do_not_fit():
    """The error says what happened and what to write instead."""
    leaves = jax.tree.leaves(G)
    for f, error in (
        (lambda x: x.T, ValueError),
        (lambda x: x[..., 0], ValueError),
        (lambda x: jnp.tile(x, 2), ValueError),
        (lambda x: jnp.zeros(x.shape, int), TypeError),
        (lambda x: 2 * (x == x), TypeError),
    ):
        for got in jax.tree.map(f, G), jax.jit(lambda g, f=f: jax.tree.map(f, g))(G):
            assert "SelectedRows" in repr(got)
            for use in (
                lambda g: g.rows,
                lambda g: g.to_dense(),
                lambda g: g + g,
                lambda g: g.coalesce(),
                lambda g: jnp.ones(g.shape) + g,
            ):
                with pytest.raises(error, match=r"jax\.tree\.map.*\.to_dense\(\)"):
                    use(got)
    nothing = jax.tree.unflatten(jax.tree.structure(G), [None, leaves[1]])
    with pytest.raises(TypeError, match="got None"):
        nothing.to_dense()


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", ["adam", "adagrad"])
def test_a_step_with_zeros_like_moves_no_row(name):
    """A way to skip a step, also of row 0, and from inside a program."""
    tx = {"adam": LAZY, "adagrad": sj.optim.adagrad(0.1)}[name]
    updates, state = tx.update({"t": G}, tx.init(PARAMS), PARAMS)
    params = optax.apply_updates(PARAMS, updates)

    def step(skip, params, state, grads):
        zeros = jax.tree.map(jnp.zeros_like, grads)
        grads = jax.tree.map(functools.partial(jnp.where, skip), zeros, grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates)["t"]

    for run in step, jax.jit(step):
        got = run(jnp.array(True), params, state, {"t": G})
        np.testing.assert_array_equal(got, params["t"])
        moved = run(jnp.array(False), params, state, {"t": G}) != params["t"]
        assert np.flatnonzero(moved.any(1)).tolist() == IDS
    zeros = optax.tree.zeros_like({"t": G})["t"]
    assert not zeros.num_rows() and not zeros.to_dense().any()


INTS = {
    "int8": 127,
    "uint8": 255,
    "int16": 2**15 - 1,
    "uint16": 2**16 - 1,
    "int32": 2**31 - 1,
    "uint32": 2**32 - 1,
    "int64": 2**63 - 1,
    "uint64": 2**64 - 1,
}


@pytest.mark.parametrize("name", INTS)
def test_every_integer_dtype(name, x64):
    """Heights beyond 2**31; zeros are empty slots; no id is lost."""
    height = INTS[name]
    if name in ("uint32", "uint64"):
        height -= 1  # two ids are empty slots
    ids = np.array([0, 5, height - 1, height], name)
    g = sj.SelectedRows(jnp.asarray(ids), jnp.ones((4, 2)), height)
    step = jax.jit(lambda g: sj.SelectedRows(g.rows, g.values, g.height))
    for got in (jax.tree.map(jnp.copy, g), step(g), pickle.loads(pickle.dumps(g))):
        assert got.rows.dtype == name
        np.testing.assert_array_equal(got.rows, ids)
    spec = jax.eval_shape(step, g)
    assert spec.rows.dtype == jax.eval_shape(step, spec).rows.dtype == name
    zeros = lambda g: jax.tree.map(jnp.zeros_like, g)
    assert not zeros(g).num_rows() and not jax.jit(zeros)(g).num_rows()


@pytest.mark.window
def test_compiled_programs_do_not_convert_ids():
    step = jax.jit(lambda g: sj.SelectedRows(g.rows, g.values, g.height))
    text = str(step.lower(G).compile().as_text())
    assert not re.search(r" (not|add|subtract|bitcast-convert)\(", text)
    loop = lambda g: lax.scan(lambda c, _: (c * 2.0, None), g, length=3)[0]
    assert " not(" not in str(jax.jit(loop).lower(G).compile().as_text())


def test_words_of_callbacks_are_recognized(x64):
    """JAX calls the host with the words of a leaf, in any batch."""
    wide = sj.SelectedRows(jnp.array([1, 2**40]), jnp.ones((2, 3)), height=2**41)
    for g in (G, wide, stack(G, H), stack(stack(G, H), stack(H, G))):
        seen = []
        jax.jit(functools.partial(jax.debug.callback, seen.append))(g)
        jax.effects_barrier()
        np.testing.assert_array_equal(seen[0].rows, g.rows)
    # Plain ids of a batch are not words.
    ids, structure = np.array([[3, 7, 9]], np.uint32), jax.tree.structure(G)
    plain = jax.tree.unflatten(structure, [ids, np.ones((1, 3, 2))])
    assert plain.rows.dtype == np.uint32 and plain.rows.tolist() == [[3, 7, 9]]


def test_wide_ids_where_x64_is_enabled_only_around_them():
    with enable_x64(True):
        ids = jnp.array([1, 2**40])
        g = sj.SelectedRows(ids, jnp.ones((2, 1)), height=2**41)
        g = jax.jit(lambda g: g)(g)
    assert g.rows.dtype == jnp.int64 and np.asarray(g.rows).tolist() == [1, 2**40]


# ------------------------------------------------------------------ allowed uses


def stack(*gs):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *gs)


# ------------------------------------------------------------------ moves

MOVES = {
    "identity": lambda g: jax.tree.map(lambda x: x, g),
    "asarray": lambda g: jax.tree.map(jnp.asarray, g),
    "method copy": lambda g: jax.tree.map(lambda x: x.copy(), g),
    "select": lambda g: jax.tree.map(
        lambda x, y: lax.select(jnp.ones(x.shape, bool), x, y), g, H
    ),
    "switch": lambda g: lax.switch(jnp.array(1), [lambda: H, lambda: g]),
    "while": lambda g: lax.fori_loop(0, 3, lambda i, c: (c[1], c[0]), (H, g))[0],
    "scan carry": lambda g: lax.scan(lambda c, _: (c, None), g, None, length=2)[0],
    "scan out": lambda g: jax.tree.map(
        lambda x: x[1], lax.scan(lambda c, _: (c, c), g, None, length=2)[1]
    ),
    "scan in": lambda g: lax.scan(lambda c, x: (x, None), H, stack(H, g))[0],
    "vmap": lambda g: jax.tree.map(lambda x: x[1], jax.vmap(lambda x: x)(stack(H, g))),
    "vmapped cond": lambda g: jax.tree.map(
        lambda x: x[0],
        jax.vmap(lambda p, a: lax.cond(p, lambda: a, lambda: H))(
            jnp.array([True, False]), stack(g, H)
        ),
    ),
    "map": lambda g: jax.tree.map(lambda x: x[0], lax.map(lambda x: x, stack(g, H))),
    "checkpoint": jax.checkpoint(lambda g: g),
    "jit of jit": jax.jit(lambda g: jax.jit(lambda x: x)(g)),
    "optimization_barrier": lax.optimization_barrier,
    "stop_gradient": lax.stop_gradient,
    "auxiliary output": lambda g: jax.grad(lambda s: (s * s, g), has_aux=True)(1.0)[1],
    "device_put": jax.device_put,
    "block_until_ready": jax.block_until_ready,
}


def assert_same(got: Any, want: sj.SelectedRows = G) -> None:
    assert type(got) is type(want) and got.height == want.height
    np.testing.assert_array_equal(np.asarray(got.rows), np.asarray(want.rows))
    np.testing.assert_array_equal(np.asarray(got.values), np.asarray(want.values))


@pytest.mark.parametrize("name", MOVES)
def test_moves(name):
    f = MOVES[name]
    assert_same(f(G))
    assert_same(jax.jit(f)(G))
    spec = jax.eval_shape(f, G)
    assert spec.rows.dtype == jnp.int32 and spec.rows.shape == (3,)


def test_moves_out_of_programs_and_back():
    leaves, treedef = jax.tree.flatten(G)
    on_host = jax.tree.unflatten(treedef, [np.array(IDS), np.asarray(G.values)])
    for got in (
        pickle.loads(pickle.dumps(G)),
        jax.tree.unflatten(treedef, pickle.loads(pickle.dumps(leaves))),
        copy.deepcopy(jax.jit(lambda g: g)(G)),
        jax.tree.map(copy.deepcopy, G),
        jax.device_get(G),
        jax.device_put(jax.device_get(G)),
        on_host,
        jax.jit(lambda g: g)(on_host),
        jax.tree.map(lambda x: x[0], stack(jax.device_get(G), H)),
        jax.jit(lambda: G)(),
        jax.jit(lambda: jax.tree.unflatten(treedef, leaves))(),
        jax.jit(lambda g: jax.tree.map(lambda x, y: jnp.where(True, x, y), g, H))(G),
        jax.jit(lambda g: g, donate_argnums=0)(jax.tree.map(jnp.copy, G)),
    ):
        assert_same(got)
    assert [x.shape for x in leaves] == [(3, 1), (3, 2)]
    zeros = jax.jit(lambda g: jax.tree.map(jnp.zeros_like, g))(G)
    assert not zeros.to_dense().any() and zeros.num_rows() == 0
    assert not jax.tree.map(jnp.zeros_like, G).to_dense().any()


def test_shapes_before_data():
    spec = jax.eval_shape(lambda g: g, G)
    assert [spec.rows.dtype, spec.values.dtype] == [jnp.int32, jnp.float32]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), G)
    for s in spec, like:
        assert_same(jax.jit(lambda g: g).lower(s).compile()(G))
        assert jax.eval_shape(lambda g: g + g, s).capacity == 6


def test_moves_through_callbacks_and_derivatives():
    seen = []
    jax.jit(lambda g: jax.debug.callback(seen.append, g))(G)
    jax.effects_barrier()
    assert_same(seen[0])
    loss = lambda g, scale: jnp.sum((g * scale).to_dense() ** 2)
    want = 2 * jnp.sum(G.values**2)
    for f in (loss, jax.jit(loss), jax.checkpoint(loss)):
        assert_trees_close(jax.grad(f, argnums=1)(G, 1.0), want)
    out, transpose = jax.vjp(lambda g: jnp.sum(g.to_dense() * 3), G)
    del out
    cotangent = transpose(1.0)[0]
    assert cotangent.values.tolist() == [[3.0, 3.0]] * 3
    assert "rows=" in repr(cotangent)  # whose rows are float0, as of any integers


@pytest.mark.window
@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_moves_between_devices(kind):
    kind = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    sharded = jax.sharding.NamedSharding(mesh, P("x"))
    ids = np.arange(8, dtype=np.int32)
    g = sj.SelectedRows(ids, np.ones((8, 2), np.float32), V)
    put = jax.device_put(g, sharded)
    assert put.rows.sharding.is_equivalent_to(sharded, 1)
    got = jax.jit(lambda g: g * 1.0)(put)  # the compiler decides how it is sharded
    assert_same(got, g)
    assert got.rows.sharding.is_equivalent_to(sharded, 1)
    assert_same(jax.jit(lambda g: g, out_shardings=sharded)(g), g)
    assert_same(
        jax.jit(lambda g: lax.scan(lambda c, _: (c, None), g, length=2)[0])(put), g
    )
    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"))
    turn = [(k, (k + 1) % 4) for k in range(4)]
    moved = over(lambda g: lax.ppermute(g, "x", turn), out_specs=P("x"))(put)
    assert moved.rows.tolist() == np.roll(ids, 2).tolist()
    gather = lambda g: lax.all_gather(g, "x", tiled=True)
    assert_same(over(gather, out_specs=P(), check_vma=False)(put), g)
    with pytest.raises((TypeError, ValueError), match="row_ids"):
        over(lambda g: lax.psum(g, "x"), out_specs=P())(put)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_leaf_has_the_sharding_of_its_ids(devices):
    """Outside of `jit` too: checkpoints restore a leaf by its sharding."""
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} devices")
    explicit = (jax.sharding.AxisType.Explicit,)
    own = jax.devices()[:devices]
    mesh = jax.make_mesh((devices,), ("x",), axis_types=explicit, devices=own)
    place = jax.NamedSharding(mesh, jax.P("x"))
    ids, values = jnp.array([4, 0]), jnp.ones((2, 3))
    with jax.set_mesh(mesh):
        rows = sj.SelectedRows(*jax.device_put((ids, values), place), height=9)
        leaf, _ = jax.tree.leaves(rows)
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
        assert len(leaf.sharding.spec) <= leaf.ndim
