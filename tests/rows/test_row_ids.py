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
from helpers import assert_same_bits, assert_trees_close, to_dense
from sparsejax._compat import enable_x64


V = 1000
IDS = [3, 7, 400]
G = sj.SelectedRows(np.array(IDS), np.arange(6, dtype="f").reshape(3, 2), V)
H = sj.SelectedRows(np.array([3, 9, 400]), np.ones((3, 2), "f"), V)
LAZY = sj.optim.lazy(optax.adam(0.1))
PARAMS = {"t": jnp.ones((V, 2))}
P = jax.sharding.PartitionSpec

# The last is an assert in `lax.dot_general`.
REFUSED = (TypeError, ValueError, NotImplementedError, AssertionError)


def each(f):
    """`f` on every leaf, as one writes it."""
    return lambda *gs: jax.tree.map(f, *gs)


def first(f):
    """`f` on every leaf of the first of two trees."""
    return lambda g, h: jax.tree.map(f, g)


def stack(*gs):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *gs)


def unstack(gs):
    return jax.tree.map(lambda x: x[0], gs)


# ------------------------------------------------------------------ arithmetic


@functools.cache
def kinds():
    """Two trees of each kind, and the right call that errors about them name."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    table = sj.parallel.shard_rows(np.ones((9, 2), np.float32), mesh, "x")
    loss = lambda t: jnp.sum(sj.lookup(t, jnp.array([3, 3, 1])))
    sharded = jax.jit(sj.grad(loss))(table)
    calls = "parallel.psum", "optim.global_norm", "optim.lazy"
    of_rows = ".*".join(rf"sparsejax\.{call}" for call in calls)
    rows = np.random.default_rng(0).normal(size=(2, 9, 6)).astype("f")
    quantized = lambda dtype: [sj.quantize(x, 4, scale_dtype=dtype) for x in rows]
    return {
        "rows": ((G, H), of_rows),
        "sharded": ((sharded.values,) * 2, of_rows),
        "float16": (quantized("float16"), r"table\.requantize\(array\)"),
        "float32": (quantized("float32"), r"table\.requantize\(array\)"),
    }


def step(tx):
    return lambda g, h: tx.update({"t": g}, tx.init(PARAMS), PARAMS)


def over_axis(f):
    """The collective `f` of a batch of two gradients."""
    return lambda g, h: jax.vmap(lambda g: f(g, "x"), axis_name="x")(stack(g, h))


ARITHMETIC = {
    "abs": first(jnp.abs),
    "astype": lambda g, h: optax.tree.cast(g, jnp.bfloat16),
    "max": first(jnp.max),
    "method clip": first(lambda x: x.clip(-1, 1)),
    "method sum": first(lambda x: x.sum()),
    "minus": first(operator.neg),
    "one minus": first(lambda x: 1 - x),
    "power": first(lambda x: x**2),
    "scale": first(lambda x: jnp.sum(jnp.ones(2)) * x),
    "scale by an int": lambda g, h: optax.tree.scale(2, g),
    "sum": first(jnp.sum),
    "where with a number": first(lambda x: jnp.where(jnp.array(True), x, 0)),
    "add": each(jnp.add),
    "average": lambda g, h: optax.incremental_update(g, h, 0.1),
    "lax.add": each(lax.add),
    "operator add": each(operator.add),
    "optax.chain(clip, lazy)": step(optax.chain(optax.clip(1), LAZY)),
    "optax.chain(lazy, scale)": step(optax.chain(LAZY, optax.scale(-1.0))),
    "optax.global_norm": lambda g, h: optax.tree.norm(g),
    "optax.sgd": step(optax.sgd(0.1)),
    "optax.tree.vdot": optax.tree.vdot,
    "psum": over_axis(lax.psum),
    "pmean": over_axis(lax.pmean),
    "psum_scatter": over_axis(lax.psum_scatter),
    "pmax of leaves": over_axis(lambda g, x: jax.tree.map(lambda v: lax.pmax(v, x), g)),
}
# Scales are floats beside codes, so fewer functions raise because of them.
OF_SCALES = {"abs", "add", "astype", "average", "minus", "scale by an int", "sum"}
OF_SCALES |= {"where with a number", "optax.global_norm", "optax.tree.vdot"}


def _of_kinds():
    for name in ARITHMETIC:
        if name != "optax.tree.vdot":  # among IDIOMS
            yield name, "rows"
        if name in ("abs", "one minus", "method sum"):
            yield name, "sharded"
        if name in OF_SCALES:
            yield from ((name, "float16"), (name, "float32"))


@pytest.mark.window
@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name, kind", list(_of_kinds()))
def test_arithmetic_is_refused(name, kind):
    """Eagerly and traced; the error names the call to write instead."""
    f, (trees, right) = ARITHMETIC[name], kinds()[kind]
    # Outside of programs JAX refuses methods before it sees the dtype.
    with pytest.raises(REFUSED, match=f"{right}|Cannot call abstract method"):
        f(*trees)
    with pytest.raises(REFUSED, match=right):
        jax.jit(f).lower(*trees)
    if kind == "rows":
        with pytest.raises((TypeError, ValueError), match=right):
            jax.jit(jax.vmap(f)).lower(stack(G, H), stack(H, G))


def test_ids_are_no_random_key():
    with pytest.raises(TypeError, match="A random key is needed"):
        jax.random.bits(jax.tree.leaves(G)[0][0, 0])


def through(tx):
    return lambda g, h: tx.update(g, tx.init(g), h)[0]


def filtered(g, h):
    """The values scaled by a filter of equinox."""
    eqx = pytest.importorskip("equinox")
    moving, fixed = eqx.partition(g, eqx.is_inexact_array)
    return eqx.combine(jax.tree.map(lambda x: 2 * x, moving), fixed)


KEY = jax.random.key(0)
IDIOMS = {
    "allclose": optax.tree.allclose,
    "random_like": lambda g, h: optax.tree.random_like(KEY, g),
    "update_moment": lambda g, h: optax.tree.update_moment(g, h, 0.9, 2),
    "vdot": optax.tree.vdot,
    "add_noise": through(optax.add_noise(0.1, 0.5, KEY)),
    "apply_if_finite": through(optax.apply_if_finite(optax.identity(), 3)),
    "ema of updates": through(optax.ema(0.9)),
    "set_to_zero": through(optax.set_to_zero()),
    "trace": through(optax.trace(0.9)),
    "zero_nans": through(optax.zero_nans()),
    "apply_updates": lambda g, h: optax.apply_updates(jnp.ones((V, 2)), g),
    "equinox.partition": filtered,
    "microbatches": each(lambda x, y: jnp.mean(jnp.stack([x, y]), 0)),
    "only finite": first(lambda x: jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))),
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
            assert re.search("row_ids|row ids|integers|computed", str(error))
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
            for args in (ids,), (ids, ids), (ids, 2.0):
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


# Functions of `fuzz_trees.py`.
PASSED = """
    where at_set flip_last concatenate roll_rows cond index repeat_rows reverse_last
    split stack_and_index stack_last slice_last zeros_like where_mask identity copy
    select optimization_barrier stop_gradient device_put
""".split()
LEAF_REFUSED = sorted(fuzz_trees.REFUSED - {"top_k"})


@pytest.mark.window
@pytest.mark.parametrize("name", [*PASSED[:2], *LEAF_REFUSED, *PASSED[2:]])
def test_functions_of_a_leaf(name):
    for tree, how in ("gradient", "eager"), ("sharded", "jitted"):
        found = fuzz_trees.check((tree, (name,), "none"), how)
        assert (found == "refused") == (name in fuzz_trees.REFUSED)


# Cases that were silently wrong: a tree, functions, arithmetic.
WERE_WRONG = [
    ("gradient", "flip_last roll_last take take_beyond get_beyond", "none"),
    ("gradient", "zeros_of_int randint", "none"),
    ("one_column", "delete append repeat", "none"),
    ("numbers", "zeros_of_int", "none"),
    ("numbers", "equal", "twice"),
    ("gradient", "equal isfinite", "twice"),
    ("square", "transpose vmap_to_last", "none"),
]


@pytest.mark.parametrize("tree, names, arithmetic", WERE_WRONG)
def test_functions_that_were_silently_wrong(tree, names, arithmetic):
    for name in names.split():
        for how in "eager", "jitted":
            fuzz_trees.check((tree, (name,), arithmetic), how)


def test_functions_mapped_over_trees():
    counts, failure = search("trees", seed=0, examples=12)
    assert not failure and counts.total() >= 12


def test_functions_that_are_not_noticed():
    """The page that explains gradients names them."""
    text = pathlib.Path(__file__, "../../../docs/explain/gradient.md").resolve()
    for name, f in fuzz_trees.UNNOTICED.items():
        jax.jit(lambda *gs, f=f: jax.tree.map(f, *gs).to_dense())(G, H)
        assert f"`jnp.{name}`" in text.read_text()
    for make in jnp.ones_like, functools.partial(jnp.full_like, fill_value=jnp.inf):
        assert not jax.tree.map(make, G).num_rows()


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize(
    "f, error",
    [
        (lambda x: x[..., 0], ValueError),
        (lambda x: jnp.tile(x, 2), ValueError),
        (lambda x: 2 * (x == x), TypeError),
    ],
)
def test_leaves_that_do_not_fit(f, error):
    """The error says what happened and what to write instead."""
    uses = (
        lambda g: g.rows,
        lambda g: g.to_dense(),
        lambda g: g + g,
        lambda g: g.coalesce(),
        lambda g: jnp.ones(g.shape) + g,
    )
    for got in jax.tree.map(f, G), jax.jit(each(f))(G):
        assert "SelectedRows" in repr(got)
        for use in uses:
            with pytest.raises(error, match=r"jax\.tree\.map.*\.to_dense\(\)"):
                use(got)
    nothing = jax.tree.unflatten(jax.tree.structure(G), [None, G.values])
    with pytest.raises(TypeError, match="got None"):
        nothing.to_dense()


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("tx", [LAZY, sj.optim.adagrad(0.1)], ids=["adam", "adagrad"])
def test_a_step_with_zeros_like_moves_no_row(tx):
    """A way to skip a step, also of row 0, and from inside a program."""
    update = jax.jit(lambda g: tx.update({"t": g}, tx.init(PARAMS), PARAMS))
    updates, state = update(G)
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


# ------------------------------------------------------------------ ids


@pytest.mark.parametrize("kind", ["int", "uint"])
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_every_integer_dtype(kind, bits, x64):
    """Heights beyond 2**31; zeros are empty slots; no id is lost."""
    name = f"{kind}{bits}"
    height = np.iinfo(name).max - (name in ("uint32", "uint64"))  # two empty slots
    ids = np.array([0, 5, height - 1, height], name)
    g = sj.SelectedRows(ids, np.ones((4, 2), np.float32), int(height))
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
        assert_same(seen[0], g)
    # Plain ids of a batch are not words.
    ids, structure = np.array([[3, 7, 9]], np.uint32), jax.tree.structure(G)
    plain = jax.tree.unflatten(structure, [ids, np.ones((1, 3, 2))])
    assert plain.rows.dtype == np.uint32 and plain.rows.tolist() == [[3, 7, 9]]


def test_wide_ids_where_x64_is_enabled_only_around_them():
    with enable_x64(True):
        g = sj.SelectedRows(jnp.array([1, 2**40]), jnp.ones((2, 1)), height=2**41)
        g = jax.jit(lambda g: g)(g)
    assert g.rows.dtype == jnp.int64 and np.asarray(g.rows).tolist() == [1, 2**40]


# ------------------------------------------------------------------ moves


MOVES = {
    "switch": lambda g, h: lax.switch(jnp.array(1), [lambda: h, lambda: g]),
    "while": lambda g, h: lax.fori_loop(0, 3, lambda i, c: (c[1], c[0]), (h, g))[0],
    "scan in": lambda g, h: lax.scan(lambda c, x: (x, None), h, stack(h, g))[0],
    "scan out": lambda g, h: unstack(lax.scan(lambda c, x: (x, c), g, stack(h, h))[1]),
    "vmapped cond": lambda g, h: unstack(
        jax.vmap(lambda p, a: lax.cond(p, lambda: a, lambda: h))(
            jnp.array([True, False]), stack(g, h)
        )
    ),
    "checkpoint": lambda g, h: jax.checkpoint(jax.jit(lambda x: x))(g),
    "auxiliary output": lambda g, h: jax.vjp(lambda s: (s, g), 1.0, has_aux=True)[2],
    "block_until_ready": lambda g, h: jax.block_until_ready(g),
    "roll": first(lambda x: jnp.roll(jnp.roll(x, 1, axis=0)[::-1], 1, axis=0)[::-1]),
    "split": first(lambda x: jnp.concatenate(jnp.split(x, [1]))),
    "where": each(lambda x, y: jnp.where(jnp.array(True), jnp.stack([x, y])[0], y)),
}


def assert_same(got: Any, want: sj.SelectedRows = G) -> None:
    assert type(got) is type(want) and got.height == want.height
    np.testing.assert_array_equal(np.asarray(got.rows), np.asarray(want.rows))
    np.testing.assert_array_equal(np.asarray(got.values), np.asarray(want.values))


@pytest.mark.parametrize("name", MOVES)
def test_moves(name):
    f, trees = MOVES[name], [kinds()[k][0] for k in ("rows", "float16", "float32")]
    run = lambda trees: [f(g, h) for g, h in trees]
    for results in run(trees), jax.jit(run)(trees):
        for got, (g, _) in zip(results, trees, strict=True):
            assert repr(got) == repr(g)
            jax.tree.map(assert_same_bits, got, g)
    specs = jax.eval_shape(lambda trees: [g for g, _ in trees], trees)
    assert repr(jax.eval_shape(run, trees)) == repr(specs)


def test_moves_out_of_programs_and_back():
    """tests/transform/test_export.py has files and copies."""
    leaves, treedef = jax.tree.flatten(G)
    assert [x.shape for x in leaves] == [(3, 1), (3, 2)]
    on_host = jax.tree.unflatten(treedef, [np.array(IDS), np.asarray(G.values)])
    for got in (
        jax.tree.unflatten(treedef, pickle.loads(pickle.dumps(leaves))),
        jax.tree.map(copy.deepcopy, G),
        on_host,
        jax.jit(lambda g: g)(on_host),
        unstack(stack(jax.device_get(G), H)),
        jax.jit(lambda: G)(),
        jax.jit(lambda: jax.tree.unflatten(treedef, leaves))(),
        jax.jit(lambda g: jax.tree.map(lambda x, y: jnp.where(True, x, y), g, H))(G),
        jax.jit(lambda g: g, donate_argnums=0)(jax.tree.map(jnp.copy, G)),
    ):
        assert_same(got)


def test_shapes_before_data():
    spec = jax.eval_shape(lambda g: g, G)
    assert [spec.rows.dtype, spec.values.dtype] == [jnp.int32, jnp.float32]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), G)
    for s in spec, like:
        assert_same(jax.jit(lambda g: g).lower(s).compile()(G))
        assert jax.eval_shape(lambda g: g + g, s).capacity == 6


def test_moves_through_derivatives():
    loss = lambda g, scale: jnp.sum((g * scale).to_dense() ** 2)
    slopes = [jax.grad(f, 1) for f in (loss, jax.jit(loss), jax.checkpoint(loss))]
    want = 2 * np.sum(np.asarray(G.values) ** 2)
    for slope in jax.jit(lambda g: [slope(g, 1.0) for slope in slopes])(G):
        assert_trees_close(slope, want)
    _, transpose = jax.vjp(jax.jit(lambda g: jnp.sum(g.to_dense() * 3)), G)
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
