"""Every way of reading rows gives the gradient `jax.grad` gives, sparse."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sparsejax as sj
from helpers import assert_no_dense, dense, eqns_of, is_rows, to_dense
from programs import DENSE, PROGRAMS, V, arguments
from sparsejax import _compat


pytestmark = pytest.mark.usefixtures("loose_promotion")

# One program for each kind of read and of control flow, to be transformed.
# `python -m tests.tools.fuzz programs` transforms others.
REPRESENTATIVE = [
    "index_out_of_range",
    "vmapped",
    "index/as_float32",
    "scaled_by_parameter",
    "index/scan_carries_the_table",
    "index/cond/scan",
    "index/rematerialized",
    "bag_ragged",
]
TRANSFORMED = [*REPRESENTATIVE, "powers", "checkpointed_and_passed_on"]
TRANSFORMED += ["lax_gather_windows_out_of_range"]

# These compute something of the table's size beside the reads.
MAKES_TABLES = {
    "stopped_beside",  # squares it
    "compared_beside",
    "while_beside",  # carries it
    "scaled_by_row_vector",  # JAX broadcasts the vector
    "powers",  # so too
    "nearest_codeword",
    "indexed_by_the_table",
}

# The gradient of one row here depends on a row out of range. JAX's gather drops the
# cotangent of that row, and its transpose reads the nearest row: JAX's Hessians by
# `jacfwd` and `jacrev` differ, so only the former is compared.
OUT_OF_RANGE = {"index_out_of_range_mixed", "lax_gather_windows_out_of_range"}


def close(a, b, *, narrow=False):
    # A GPU's programs differ in how they round what is computed in 32 bits.
    tolerance = 1e-5 if narrow and jax.default_backend() != "cpu" else 1e-9
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@functools.cache
def _sparse(name):
    """`sj.value_and_grad` of a program, traced once for all tests of it."""
    return jax.jit(sj.value_and_grad(PROGRAMS[name], (0, 1)))


@functools.cache
def _compiled(name):
    """Values and gradients of a program by sparsejax and by JAX."""
    jaxs = jax.value_and_grad(PROGRAMS[name], (0, 1))
    both = lambda *args: (_sparse(name)(*args), jaxs(*args))
    return jax.jit(both)(*arguments(dtype=jnp.float64))


def _assert_sparse_and_equal(ours, theirs):
    (value, (g, g_w)), (their_value, (their_g, their_g_w)) = ours, theirs
    assert isinstance(g, sj.SelectedRows)
    assert g.dtype == their_g.dtype and g.shape == their_g.shape
    close(value, their_value)
    close(dense(g.rows, g.values, g.height), their_g)
    close(g_w, their_g_w)
    # Empty slots come out as zeros.
    assert not np.any(np.asarray(g.values)[np.asarray(g.rows) == V])


@pytest.mark.window
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_jax_grad(name, x64):
    _assert_sparse_and_equal(*_compiled(name))


@pytest.mark.window
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_outside_of_jit_and_before_data(name, x64):
    args = arguments(dtype=jnp.float64)
    fun = sj.value_and_grad(PROGRAMS[name], (0, 1))
    ours = fun(*args)
    _assert_sparse_and_equal(ours, _compiled(name)[1])
    abstract = jax.eval_shape(fun, *args)
    assert jax.tree.structure(abstract) == jax.tree.structure(ours)
    for x, y in zip(*map(jax.tree.leaves, (abstract, ours))):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    with _compat.enable_x64(False):
        g = jax.eval_shape(sj.grad(PROGRAMS[name]), *arguments())
        assert (g.dtype, g.rows.dtype) == (jnp.float32, jnp.int32)
        assert g.capacity == ours[1][0].capacity


@pytest.mark.window
@pytest.mark.parametrize("name", TRANSFORMED)
def test_under_vmap_and_scan_and_differentiated_again(name, x64):
    fun, (table, w, _) = PROGRAMS[name], arguments(dtype=jnp.float64)
    tables = np.stack([table, 2 * table, -table])
    batch = np.stack([arguments(seed)[2] for seed in range(3)])
    sparse = sj.grad(fun, tables=True)

    def second(grad, table):
        """The gradient of a function of the gradient."""
        if name in OUT_OF_RANGE:
            return jax.jvp(grad, (table,), (jnp.cos(table),))[1]
        return jax.grad(lambda t: jnp.sum(jnp.sin(grad(t))))(table)

    @jax.jit
    def ours(tables, w, batch):
        step = lambda carry, xs: (carry, sparse(xs[0], w, xs[1]))
        vmapped = jax.vmap(sparse, (0, None, 0))(tables, w, batch)
        scanned = lax.scan(step, 0, (tables, batch))[1]
        twice = second(lambda t: to_dense(sparse(t, w, batch[0])), tables[0])
        return jax.vmap(to_dense)(vmapped), jax.vmap(to_dense)(scanned), twice

    @jax.jit
    def jaxs(table, w, ids):
        grad = lambda t: jax.grad(fun)(t, w, ids)
        return grad(table), second(grad, table)

    vmapped, scanned, twice = ours(tables, w, batch)
    theirs, theirs_twice = zip(*[jaxs(t, w, i) for t, i in zip(tables, batch)])
    for got, right in (
        (vmapped, np.stack(theirs)),
        (scanned, np.stack(theirs)),
        (twice, theirs_twice[0]),
    ):
        close(got, right, narrow="float32" in name)


@pytest.mark.window
@pytest.mark.parametrize("name", [x for x in PROGRAMS if x not in MAKES_TABLES])
def test_no_array_of_the_tables_size(name, x64):
    assert_no_dense(_sparse(name), *arguments(dtype=jnp.float64))


@pytest.mark.window
@pytest.mark.parametrize("name", DENSE)
def test_dense_uses(name, x64):
    fun, args = DENSE[name], arguments(dtype=jnp.float64)
    g, theirs = jax.jit(lambda *xs: (sj.grad(fun)(*xs), jax.grad(fun)(*xs)))(*args)
    assert isinstance(g, jax.Array)
    close(g, theirs)
    with pytest.raises(
        sj.DensifyError, match=r"(programs|fuzz_models)\.py:\d+"
    ) as error:
        sj.grad(fun, tables=True)(*args)
    assert isinstance(error.value, NotImplementedError)
    for part in ("table", "Two ways out", "register_rule", "tables="):
        assert part in str(error.value)


# -- reads -----------------------------------------------------------------------------

TABLE = jnp.asarray(np.ones((40, 3), np.float32))


def _both(loss, *args, **options):
    """`sj.grad` and `jax.grad` in one program: the rows, the dense arrays of both."""

    @jax.jit
    def run(*args):
        g: Any = sj.grad(loss, **options)(*args)
        return g, g.to_dense(), jax.grad(loss)(*args)

    return run(*args)


def test_capacity_is_the_number_of_reads():
    ids = jnp.array([0, 1, 2, 3])
    loop = lambda t, f, n: lax.scan(lambda c, i: (c + f(i), None), 0.0, n)[0]
    few, many = lambda t: t[ids[:1]].sum(), lambda t: t[ids].sum() + t[0].sum()
    choose = lambda t: lax.cond(ids[0] > 0, few, many, t)
    for count, fun in {
        8: lambda t: t[ids].sum() + t[3].sum() + t[2:5].sum(),
        4: lambda t: loop(t, lambda i: t[i].sum(), ids),
        5: choose,
        10: lambda t: loop(t, lambda i: choose(t), jnp.arange(2)),
    }.items():
        assert sj.explain(fun)(TABLE)["t"].rows_read == count


def test_branch_not_taken_leaves_empty_slots():
    fun = lambda t, i: lax.cond(
        i > 0, lambda: t[jnp.arange(3)].sum(), lambda: t[7].sum()
    )
    grad = jax.jit(sj.grad(fun))
    g = grad(TABLE, 0)
    np.testing.assert_array_equal(g.rows, [7, 40, 40])
    np.testing.assert_array_equal(np.asarray(g.values)[1:], 0)
    np.testing.assert_array_equal(grad(TABLE, 1).rows, [0, 1, 2])


def test_auto_mode_stops_at_half():
    fun = lambda t, ids: t[ids].sum()
    shape = lambda count, **options: jax.eval_shape(
        sj.grad(fun, **options), TABLE, jnp.arange(count)
    )
    assert is_rows(shape(20)) and not is_rows(shape(21))
    assert shape(21, tables=True).capacity == 21
    assert "half" in sj.explain(fun)(TABLE, jnp.arange(21)).leaves[0].reason


@pytest.mark.parametrize(
    "fun",
    [
        lambda t: jnp.float32(0.0),
        lambda t: lax.stop_gradient(t).sum(),
        lambda t: lax.stop_gradient(t[3]).sum(),
        lambda t: t[jnp.zeros((0,), int)].sum(),
        lambda t: (t[jnp.array([1])] > 0).sum().astype(float),
    ],
)
def test_no_differentiated_read(fun):
    dense, g = jax.jit(lambda t: (sj.grad(fun)(t), sj.grad(fun, tables=True)(t)))(TABLE)
    np.testing.assert_array_equal(dense, np.zeros((40, 3)))
    assert is_rows(g) and g.capacity == 0 and g.shape == (40, 3)


def test_aux_is_not_differentiated():
    def fun(t, ids):
        return t[ids].sum(), {"norm": jnp.sum(t**2), "table": t, "name": "x", "k": None}

    g, aux = sj.grad(fun, has_aux=True, tables=True)(TABLE, np.array([1, 1]))
    assert g.capacity == 2 and aux["name"] == "x" and aux["k"] is None
    np.testing.assert_allclose(aux["norm"], 120.0)
    np.testing.assert_array_equal(aux["table"], TABLE)


def test_rows_that_are_returned_were_read_before_the_update():
    table = np.asarray(arguments()[0])

    @jax.jit
    def step(table, ids):
        loss = lambda t: (jnp.sum(t[ids] ** 2), t[ids])
        (_, rows), grads = sj.value_and_grad(loss, has_aux=True)(table)
        return rows, table + (-0.5) * grads, table.at[ids].add(-table[ids])

    for ids in np.array([3, 3, V - 1]), np.array([0, 7, 8]):
        rows, new, expected = step(table, ids)
        np.testing.assert_array_equal(rows, table[ids])
        np.testing.assert_allclose(new, expected, atol=1e-6)


@pytest.mark.window
def test_a_gradient_inside_of_another_reads_once():
    """And names no row that was not read: an id out of range is an empty slot there."""
    table, _, ids = arguments()
    read = lambda t: sj.lookup(t, ids, mode="zero", padding_id=-1)
    loss = lambda t: jnp.sum(read(t) ** 2)
    penalty = lambda grad, norm: lambda t: norm(grad(loss)(t)) ** 2
    ids = jnp.asarray(np.append(ids, [-1, V + 5]), jnp.int32)
    sparse = sj.grad(penalty(sj.grad, sj.optim.global_norm))
    dense = jax.grad(penalty(jax.grad, jnp.linalg.norm))
    run = jax.jit(lambda t: (sparse(t), sparse(t).to_dense(), dense(t)))
    got, whole, theirs = run(table)
    np.testing.assert_allclose(whole, theirs, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(got.rows, [*ids[:-2].tolist(), V, V])
    assert str(jax.make_jaxpr(sparse)(table)).count("= read_rows") == 1


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((30,), "float32"),
        ((30, 2, 3), "float32"),
        *(((30, 3), dtype) for dtype in ("float32", "bfloat16", "float16")),
    ],
)
def test_tables_of_any_rank_and_type(shape, dtype):
    table = np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))
    loss = lambda t: jnp.sum(t[jnp.array([4, 4])].astype(jnp.float32) ** 2)
    g, got, theirs = _both(loss, table, tables=True)
    assert g.dtype == dtype and g.values.shape == (2, *shape[1:])
    np.testing.assert_array_equal(got, theirs)
    assert is_rows(jax.eval_shape(sj.grad(loss), table)) == (len(shape) > 1)


@pytest.mark.window
@pytest.mark.parametrize("mode", ["fill", "clip", "zero"])
def test_every_lookup_mode_is_a_read(mode):
    ids = jnp.array([[3, -1, 39], [40, 3, 5]])
    read = lambda t: sj.lookup(t, ids, mode=mode, padding_id=5, max_norm=1.0)
    g, got, theirs = _both(lambda t: jnp.nansum(read(t) ** 3), TABLE, tables=True)
    assert g.capacity == 6 and 5 not in np.asarray(g.rows)
    np.testing.assert_allclose(got, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.window
def test_a_branch_may_return_a_table_that_is_not_differentiated():
    table, w, ids = arguments()

    def loss(table):
        read = lambda: (jnp.sum(table[ids] @ w), 2 * table)
        return lax.cond(ids[0] > 0, read, lambda: (jnp.sum(w), -table))

    both = lambda t: [f(loss, has_aux=True)(t) for f in (sj.grad, jax.grad)]
    (g, whole), (theirs, their_whole) = jax.jit(both)(table)
    np.testing.assert_allclose(g.to_dense(), theirs, rtol=1e-6)
    np.testing.assert_array_equal(whole, their_whole)


@pytest.mark.window
@pytest.mark.usefixtures("eight_devices")
def test_shardings_of_a_nested_jit_are_kept():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    kwargs: Any
    for kwargs in ({"in_shardings": (None, sharding)}, {"out_shardings": sharding}):
        read = jax.jit(lambda t, ids: t[ids], **kwargs)
        loss = lambda t, ids, read=read: jnp.sum(read(t, ids) ** 2)
        eqns = eqns_of(sj.grad(loss, tables=True), arguments()[0], jnp.arange(8))
        kept = [e for e in eqns if e.primitive.name == "sharding_constraint"]
        assert any(e.params["sharding"] == sharding for e in kept), kwargs


@pytest.mark.window
def test_effects_and_randomness_are_kept(capfd):
    def fun(t, key):
        jax.debug.print("seen {x}", x=t[3, 0])
        keep = jax.random.bernoulli(key, 0.5, (3,))
        return jnp.sum(t[jnp.array([1])] * keep)

    key = jax.random.key(3)
    g = jax.jit(sj.grad(fun))(TABLE, key)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen 1.0") == 1
    np.testing.assert_array_equal(g.to_dense(), jax.jit(jax.grad(fun))(TABLE, key))


@pytest.mark.slow
def test_equations_that_no_table_reaches_are_bound_once_more(monkeypatch):
    """For the trace, and for the gradient."""
    bound, bind = [], lax.sin_p.bind
    count = lambda *xs, **kwargs: bound.append(xs) or bind(*xs, **kwargs)
    monkeypatch.setattr(lax.sin_p, "bind", count)
    sin = lambda x: lax.sin(x)  # new, so that nothing is found in a cache

    def fun(t, ids, x, key):
        # Types that a placeholder must have: ids that depend on x, keys, loops.
        ids = ids + sin(x).astype(ids.dtype)
        noise = jax.random.normal(jax.random.split(key)[0], (3,))
        step = lambda c, i: (c + sin(c) + t[i], sin(noise))
        c, ys = lax.scan(step, noise, ids)
        branch = lambda f: lambda: jnp.sum(f(c) * t[ids[0]])
        many = lax.cond(x > 0, branch(sin), branch(jnp.cos))
        return many + jnp.sum(jax.checkpoint(lambda y: sin(y))(ys))

    args = TABLE, jnp.array([3, 1]), jnp.float32(2.0), jax.random.key(0)
    jax.make_jaxpr(fun)(*args)
    traced = len(bound)
    bound.clear()
    assert sj.explain(fun)(*args).leaves[0].rows_read == 3
    assert len(bound) == traced >= 5
    _, got, theirs = _both(fun, *args)
    np.testing.assert_allclose(got, theirs, rtol=1e-5)


def test_a_large_table_that_is_not_read_has_no_rows():
    def loss(params):
        is_constant = lambda x: jnp.sum(lax.stop_gradient(x))
        return jnp.sum(params["other"]) + sum(map(is_constant, params["t"]))

    shapes = {(10_000, 2): False, (10_001, 2): True, (99_999,): False}
    params = {
        "t": [np.ones(s, "f") for s in shapes],
        "other": np.ones((2, 20_000), "f"),
    }
    grads, told = jax.jit(sj.grad(loss))(params), sj.explain(loss)(params)
    assert not is_rows(grads["other"])
    for k, (g, (shape, has_rows)) in enumerate(zip(grads["t"], shapes.items())):
        assert is_rows(g) == told[f"params['t'][{k}]"].sparse == has_rows
        if has_rows:
            assert g.capacity == 0
            np.testing.assert_array_equal(g.to_dense(), np.zeros(shape))
    none_required = sj.grad(loss, tables={"t": False, "other": None})
    assert not any(map(is_rows, jax.eval_shape(none_required, params)["t"]))
