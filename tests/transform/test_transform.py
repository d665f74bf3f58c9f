"""Every way of reading rows gives the gradient `jax.grad` gives, sparse."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from helpers import assert_no_dense, dense as dense_of, eqns_of, slow_but
from programs import DENSE, PROGRAMS, V, arguments
from sparsejax import _compat


pytestmark = pytest.mark.usefixtures("loose_promotion")


def close(a, b, *, narrow=False):
    # A GPU's programs differ in how they round what is computed in 32 bits.
    tolerance = 1e-5 if narrow and jax.default_backend() != "cpu" else 1e-9
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def to_dense(g):
    """The arrays that a batch of sparse gradients stands for."""
    assert isinstance(g, sj.SelectedRows)
    return np.stack([dense_of(r, v, V) for r, v in zip(g.rows, g.values)])


# One program for each kind of read and of control flow: `make test` runs these under
# every transformation, and the others as they are and jitted.
REPRESENTATIVE = [
    "index_out_of_range",
    "vmapped_index",
    "cast",
    "scaled_by_parameter",
    "scanned_carry",
    "branch_in_scan",
    "checkpointed",
    "bag_ragged",
]


# These compile for a second and more, and under a transformation for several. Others
# take the same paths.
COSTLY = {
    "lax_gather_windows",
    "lax_map_batched",
    "scanned_nested",
    "switch",
    "bag_fixed",
    "bag_max",
    "bag_vmapped",
    "bag_of_a_view",
    "bag_in_control_flow",
    "vmapped_scale_and_index",
    "vmapped_take_of_scaled",
    "broadcast_to_more",
    "gradient_of_a_checkpointed_scan",
}


_CHEAP = [name for name in PROGRAMS if name not in COSTLY]
# `python -m tests.tools.fuzz programs` transforms programs at random.
TRANSFORMED = [x for n, x in enumerate(_CHEAP) if n % 12 == 0 or x in REPRESENTATIVE]


# The gradient of one row here depends on a row out of range. JAX's gather drops the
# cotangent of that row, and its transpose reads the nearest row: JAX's Hessians by
# `jacfwd` and `jacrev` differ, so only the former is compared.
OUT_OF_RANGE = {"index_out_of_range_mixed", "lax_gather_windows_out_of_range"}


@functools.cache
def _eager(name):
    """`sj.value_and_grad` of a program, one operation at a time."""
    args = arguments(dtype=jnp.float64)
    return sj.value_and_grad(PROGRAMS[name], (0, 1))(*args)


@functools.cache
def _sparse(name):
    """`sj.value_and_grad` of a program, traced once for all tests of it."""
    return jax.jit(sj.value_and_grad(PROGRAMS[name], (0, 1)))


@functools.cache
def _compiled(name):
    """Values and gradients of a program by sparsejax and by JAX."""
    dense = jax.value_and_grad(PROGRAMS[name], (0, 1))
    both = lambda *args: (_sparse(name)(*args), dense(*args))
    return jax.jit(both)(*arguments(dtype=jnp.float64))


@functools.cache
def _transformed(name):
    """Gradients under vmap and scan, and of the gradient: one program for each side."""
    fun = PROGRAMS[name]
    sparse = sj.grad(fun, tables=True)

    def second(grad, table):
        """The gradient of a function of the gradient."""
        if name in OUT_OF_RANGE:
            return jax.jvp(grad, (table,), (jnp.cos(table),))[1]
        return jax.grad(lambda t: jnp.sum(jnp.sin(grad(t))))(table)

    @jax.jit
    def ours(table, w, ids, tables, batch):
        def step(carry, xs):
            return carry, sparse(xs[0], w, xs[1])

        return {
            "vmap": jax.vmap(sparse, (0, None, 0))(tables, w, batch),
            "scan": jax.lax.scan(step, 0, (tables, batch))[1],
            "second": second(lambda t: sparse(t, w, ids).to_dense(), table),
        }

    @jax.jit
    def jaxs(table, w, ids):
        return {
            "grad": jax.grad(fun)(table, w, ids),
            "second": second(lambda t: jax.grad(fun)(t, w, ids), table),
        }

    table, w, ids = arguments(dtype=jnp.float64)
    batch = np.stack([arguments(seed)[2] for seed in range(3)])
    tables = np.stack([table, 2 * np.asarray(table), -np.asarray(table)])
    found = ours(table, w, ids, tables, batch)
    want, *others = [jaxs(t, w, i) for t, i in zip(tables, batch)]
    np.testing.assert_array_equal(batch[0], ids)
    return {
        "vmap": (
            to_dense(found["vmap"]),
            to_dense(found["scan"]),
            np.stack([x["grad"] for x in (want, *others)]),
        ),
        "second": (found["second"], want["second"]),
    }


@pytest.mark.window
@pytest.mark.parametrize("name", slow_but(PROGRAMS, *(PROGRAMS.keys() - COSTLY)))
def test_equals_jax_grad(name, x64):
    found, want = _compiled(name)
    _assert_sparse_and_equal(found, want)


# The walk is the same there.
@pytest.mark.window
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_equals_jax_grad_outside_of_jit(name, x64):
    _assert_sparse_and_equal(_eager(name), _compiled(name)[1])


def _assert_sparse_and_equal(found, want):
    (value, (g, g_w)), (want_value, (want, want_w)) = found, want
    assert isinstance(g, sj.SelectedRows)
    assert g.dtype == want.dtype and g.shape == want.shape
    close(value, want_value)
    close(dense_of(g.rows, g.values, g.height), want)
    close(g_w, want_w)
    # Empty slots come out as zeros.
    assert not np.any(np.asarray(g.values)[np.asarray(g.rows) == V])


@pytest.mark.window
@pytest.mark.parametrize("name", slow_but(TRANSFORMED, *REPRESENTATIVE))
def test_under_vmap_and_scan(name, x64):
    vmapped, scanned, want = _transformed(name)["vmap"]
    close(vmapped, want, narrow=name == "cast")
    close(scanned, want, narrow=name == "cast")


@pytest.mark.window
@pytest.mark.parametrize("name", slow_but(TRANSFORMED, *REPRESENTATIVE))
def test_second_order(name, x64):
    close(*_transformed(name)["second"], narrow=name == "cast")


@pytest.mark.window
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_array_of_the_tables_size(name, x64):
    if name in MAKES_TABLES:
        pytest.skip(MAKES_TABLES[name])
    assert_no_dense(_sparse(name), *arguments(dtype=jnp.float64))


# Programs that themselves compute something of the table's size beside the reads.
MAKES_TABLES = {
    "stopped_beside": "squares the whole stopped table",
    "compared_beside": "compares the whole table",
    "while_beside": "carries the whole table through a while loop",
    "scaled_by_row_vector": "JAX broadcasts the vector to the table's shape",
    "nearest_codeword": "compares with the whole table",
    "indexed_by_the_table": "takes an index from each row",
}


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_shapes_are_known_before_data(name):
    with _compat.enable_x64(True):
        (_, (got, _)), _ = _compiled(name)
        wide = jax.eval_shape(sj.grad(PROGRAMS[name]), *arguments(dtype=jnp.float64))
    # And with 32-bit types: as many rows, by which only the types differ.
    spec = jax.eval_shape(sj.grad(PROGRAMS[name]), *arguments())
    assert isinstance(wide, sj.SelectedRows) and isinstance(spec, sj.SelectedRows)
    assert spec.dtype == jnp.float32 and spec.rows.dtype == jnp.int32
    for a in (wide, spec):
        assert a.height == got.height and a.capacity == got.capacity
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(a))
    for a, b, c in zip(*map(jax.tree.leaves, (wide, got, spec))):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert c.shape == b.shape


@pytest.mark.window
@pytest.mark.parametrize("name", DENSE)
def test_dense_uses(name, x64):
    fun = DENSE[name]
    args = arguments(dtype=jnp.float64)
    g, want = jax.jit(lambda *args: (sj.grad(fun)(*args), jax.grad(fun)(*args)))(*args)
    assert isinstance(g, jax.Array)
    close(g, want)
    with pytest.raises(sj.DensifyError, match=r"programs\.py:\d+") as error:
        sj.grad(fun, tables=True)(*args)
    for part in ("table", "Two ways out", "register_rule", "tables="):
        assert part in str(error.value)


# -- reads -----------------------------------------------------------------------------


def _both(loss, *args, **options):
    """`sj.grad` and `jax.grad` in one program: the rows, the dense arrays of both."""

    @jax.jit
    def run(*args):
        g = sj.grad(loss, **options)(*args)
        assert isinstance(g, sj.SelectedRows)
        return g, g.to_dense(), jax.grad(loss)(*args)

    return run(*args)


def _rows_read(fun, *args, **kwargs):
    (leaf, *_) = sj.explain(fun, **kwargs)(*args).leaves
    return leaf.rows_read


TABLE = jnp.asarray(np.ones((40, 3), np.float32))


def test_capacity_is_the_number_of_reads():
    ids = jnp.array([0, 1, 2, 3])

    def loop(t):
        return jax.lax.scan(lambda c, i: (c + t[i].sum(), None), 0.0, ids)[0]

    def choose(t):
        few = lambda: t[ids[:1]].sum()
        many = lambda: t[ids].sum() + t[0].sum()
        return jax.lax.cond(ids[0] > 0, few, many)

    def nested(t):
        return jax.lax.scan(lambda c, i: (c + choose(t), None), 0.0, jnp.arange(2))[0]

    assert _rows_read(lambda t: t[ids].sum() + t[3].sum() + t[2:5].sum(), TABLE) == 8
    assert _rows_read(loop, TABLE) == 4
    assert _rows_read(choose, TABLE) == 5
    assert _rows_read(nested, TABLE) == 10


def test_branch_not_taken_leaves_empty_slots():
    def fun(t, i):
        return jax.lax.cond(i > 0, lambda: t[jnp.arange(3)].sum(), lambda: t[7].sum())

    grad = jax.jit(sj.grad(fun))
    g = grad(TABLE, 0)
    np.testing.assert_array_equal(g.rows, [7, 40, 40])
    np.testing.assert_array_equal(np.asarray(g.values)[1:], 0)
    np.testing.assert_array_equal(grad(TABLE, 1).rows, [0, 1, 2])


def test_auto_mode_stops_at_half():
    fun = lambda t, ids: t[ids].sum()
    twenty, more = np.arange(20, dtype=np.int32), np.arange(21, dtype=np.int32)
    auto, forced = sj.grad(fun), sj.grad(fun, tables=True)
    few, many, g = jax.jit(
        lambda t, few, many: (auto(t, few), auto(t, many), forced(t, many))
    )(TABLE, twenty, more)
    assert isinstance(few, sj.SelectedRows)
    assert isinstance(many, jax.Array)
    assert isinstance(g, sj.SelectedRows) and g.capacity == 21
    assert "half" in sj.explain(fun)(TABLE, more).leaves[0].reason


@pytest.mark.parametrize(
    "fun",
    [
        lambda t: jnp.float32(0.0),
        lambda t: jax.lax.stop_gradient(t).sum(),
        lambda t: jax.lax.stop_gradient(t[3]).sum(),
        lambda t: t[jnp.zeros((0,), int)].sum(),
        lambda t: (t[jnp.array([1])] > 0).sum().astype(float),
    ],
)
def test_no_differentiated_read(fun):
    np.testing.assert_array_equal(sj.grad(fun)(TABLE), np.zeros((40, 3)))
    g = sj.grad(fun, tables=True)(TABLE)
    assert isinstance(g, sj.SelectedRows)
    assert g.capacity == 0 and g.shape == (40, 3)


def test_aux_is_not_differentiated():
    def fun(t, ids):
        return t[ids].sum(), {"norm": jnp.sum(t**2), "table": t, "name": "x", "k": 3}

    g, aux = sj.grad(fun, has_aux=True, tables=True)(TABLE, jnp.array([1, 1]))
    assert g.capacity == 2
    assert aux["name"] == "x" and aux["k"] == 3
    np.testing.assert_allclose(aux["norm"], 120.0)
    np.testing.assert_array_equal(aux["table"], TABLE)


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
    g, got, want = _both(loss, table, tables=True)
    assert g.dtype == dtype and g.values.shape == (2, *shape[1:])
    np.testing.assert_array_equal(got, want)
    auto = jax.eval_shape(sj.grad(loss), table)
    assert isinstance(auto, sj.SelectedRows) == (len(shape) > 1)


@pytest.mark.window
def test_every_lookup_mode_is_a_read():
    ids = jnp.array([[3, -1, 39], [40, 3, 5]])

    def loss(t, mode):
        rows = sj.lookup(t, ids, mode=mode, padding_id=5, max_norm=1.0)
        return jnp.nansum(rows**3)

    for mode in ("fill", "clip", "zero"):
        g, got, want = _both(functools.partial(loss, mode=mode), TABLE, tables=True)
        assert g.capacity == 6 and 5 not in np.asarray(g.rows)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.window
def test_forward_over_reverse(x64):
    table, w, ids = arguments(dtype=jnp.float64)
    fun = PROGRAMS["scanned_chain"]
    sparse = lambda t: sj.grad(fun, tables=True)(t, w, ids).to_dense()
    dense = lambda t: jax.grad(fun)(t, w, ids)

    @jax.jit
    def run(table):
        return [jax.jvp(f, (table,), (jnp.sin(table),)) for f in (sparse, dense)]

    for a, b in zip(*run(table), strict=True):
        close(a, b)


@pytest.mark.window
def test_sparse_gradient_of_a_sparse_gradient(x64):
    table, w, ids = arguments(dtype=jnp.float64)
    fun = PROGRAMS["index"]
    penalty = lambda t: jnp.sum(sj.grad(fun, tables=True)(t, w, ids).values ** 3)
    rows = lambda r: jnp.sum(jnp.sin(r * w))
    plain = jax.grad(lambda t: jnp.sum(jax.grad(rows)(t[ids]) ** 3))

    @jax.jit
    def run(table):
        g = sj.grad(penalty, tables=True)(table)
        return g, g.to_dense(), plain(table)

    g, got, want = run(table)
    assert isinstance(g, sj.SelectedRows)
    close(got, want)


@pytest.mark.window
def test_a_branch_may_return_a_table_that_is_not_differentiated():
    table, w, ids = arguments()

    def loss(table):
        read = lambda: (jnp.sum(table[ids] @ w), 2 * table)
        total, whole = jax.lax.cond(ids[0] > 0, read, lambda: (jnp.sum(w), -table))
        return total, whole

    @jax.jit
    def run(table):
        grad, whole = sj.grad(loss, has_aux=True)(table)
        return grad, grad.to_dense(), whole, jax.grad(loss, has_aux=True)(table)

    grad, got, whole, (want, expected) = run(table)
    assert isinstance(grad, sj.SelectedRows)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_array_equal(whole, expected)


@pytest.mark.window
@pytest.mark.usefixtures("eight_devices")
def test_shardings_of_a_nested_jit_are_kept():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    table, _, _ = arguments()
    kwargs: Any
    for kwargs in ({"in_shardings": (None, sharding)}, {"out_shardings": sharding}):
        read = jax.jit(lambda t, ids: t[ids], **kwargs)
        loss = lambda t, ids, read=read: jnp.sum(read(t, ids) ** 2)
        found = eqns_of(sj.grad(loss, tables=True), table, jnp.arange(8))
        kept = [e for e in found if e.primitive.name == "sharding_constraint"]
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
    want = jax.jit(jax.grad(fun))(TABLE, key)
    np.testing.assert_array_equal(dense_of(g.rows, g.values, 40), want)


@pytest.mark.slow
def test_equations_that_no_table_reaches_are_bound_once_more(monkeypatch):
    """For the trace, and for the gradient."""
    bound = []
    bind = jax.lax.sin_p.bind
    monkeypatch.setattr(
        jax.lax.sin_p, "bind", lambda *xs, **kw: bound.append(xs) or bind(*xs, **kw)
    )
    sin = lambda x: jax.lax.sin(x)  # new, so that nothing is found in a cache

    def fun(t, ids, x, key):
        # Types that a placeholder must have: ids that depend on x, keys, loops.
        ids = ids + sin(x).astype(ids.dtype)
        noise = jax.random.normal(jax.random.split(key)[0], (3,))
        step = lambda c, i: (c + sin(c) + t[i], sin(noise))
        c, ys = jax.lax.scan(step, noise, ids)
        branch = lambda f: lambda: jnp.sum(f(c) * t[ids[0]])
        many = jax.lax.cond(x > 0, branch(sin), branch(jnp.cos))
        rows = jax.jit(lambda t: sin(t[ids] @ c))(t)
        return jnp.sum(rows) + many + jnp.sum(jax.checkpoint(lambda y: sin(y))(ys))

    args = TABLE, jnp.array([3, 1]), jnp.float32(2.0), jax.random.key(0)
    jax.make_jaxpr(fun)(*args)
    traced = len(bound)
    bound.clear()
    assert sj.explain(fun)(*args).leaves[0].rows_read == 5
    assert len(bound) == traced >= 6
    g, want = jax.jit(lambda *xs: (sj.grad(fun)(*xs), jax.grad(fun)(*xs)))(*args)
    np.testing.assert_allclose(g.to_dense(), want, rtol=1e-5)


@pytest.mark.window
def test_pulled_rows_as_a_table():
    pulled = sj.SelectedRows(jnp.array([7, 2, 40]), jnp.ones((3, 2)), 40)

    def loss(params, ids):
        return jnp.sum(sj.lookup(params["t"], ids, mode="zero") ** 2)

    g = sj.grad(loss)({"t": pulled}, jnp.array([2, 7, 2]))["t"]
    assert isinstance(g, sj.SelectedRows)
    np.testing.assert_array_equal(g.rows, pulled.rows)
    np.testing.assert_array_equal(g.values, [[2.0, 2.0], [4.0, 4.0], [0.0, 0.0]])


@pytest.mark.parametrize(
    "shape, has_rows", [((10_000, 2), False), ((10_001, 2), True), ((99_999,), False)]
)
def test_a_large_table_that_is_not_read_has_no_rows(shape, has_rows):
    table, other = jnp.ones(shape), jnp.ones((2, 20_000))
    fun = lambda p: jnp.sum(p["other"]) + jnp.sum(jax.lax.stop_gradient(p["t"]))
    g = sj.grad(fun)({"t": table, "other": other})
    assert isinstance(g["t"], sj.SelectedRows) == has_rows
    assert isinstance(g["other"], jax.Array)
    if has_rows:
        assert g["t"].capacity == 0
        np.testing.assert_array_equal(g["t"].to_dense(), jnp.zeros(shape))
    dense = sj.grad(fun, tables={"t": False, "other": None})
    assert isinstance(dense({"t": table, "other": other})["t"], jax.Array)
    assert sj.explain(fun)({"t": table, "other": other})["p['t']"].sparse == has_rows
