"""K tables in one array, `[K * V, D]` or `[K, V, D]`, read by two numbers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sparsejax as sj
from helpers import assert_no_dense, is_rows


pytestmark = pytest.mark.usefixtures("loose_promotion")

K, V, D = 3, 37, 4
IDS, FAR = np.array([3, 1, 3]), np.array([3, -1, 500, 36, -40])
EACH = np.stack([IDS, IDS + 1, IDS * 11])  # ids for each of the tables


def _scan(step, t, xs=None, **options):
    """The outputs of a loop over the tables, and the sum of what it carries."""
    total, ys = lax.scan(step, jnp.zeros(()), t if xs is None else (t, xs), **options)
    return total if ys is None else total + ys


def _bag(table, ids):
    return sj.embedding_bag(table, ids[None], mode="zero")


# A program of the stack, and how many rows it reads.
PROGRAMS = {
    "number_and_ids": (lambda t: t[2, IDS], 3),
    "out_of_range": (lambda t: t[2, FAR], 5),
    "dynamic_table": (lambda t: t[jnp.array(5)][FAR], 5),
    "take": (lambda t: jnp.take(t[1], FAR, axis=0, fill_value=0.5), 5),
    "some_tables": (lambda t: t[1:3][:, FAR], 10),
    "every_other_table": (lambda t: t[::2, 3], 2),
    "block": (lambda t: t[1:3, 2:6], 8),
    "dynamic_block": (lambda t: lax.dynamic_slice(t, (1, 90, 0), (2, 3, D)), 6),
    "vmap": (lambda t: jax.vmap(lambda a, i: a[i])(t, EACH), 9),
    "vmap_same_ids": (lambda t: jax.vmap(lambda a: a[FAR])(t), 15),
    "vmap_take": (
        lambda t: jax.vmap(lambda a, i: jnp.take(a, i, 0, mode="clip"))(t, EACH),
        9,
    ),
    "vmap_twice": (
        lambda t: jax.vmap(jax.vmap(lambda a, i: a[i], (None, 0)))(t, EACH),
        9,
    ),
    "vmap_another_axis": (
        lambda t: jax.vmap(lambda a, i: a[i], (1, 0))(jnp.swapaxes(t, 0, 1), EACH),
        9,
    ),
    "vmap_bag": (lambda t: jax.vmap(_bag)(t, EACH), 9),
    "scan": (lambda t: _scan(lambda c, a: (c, a[FAR]), t), 15),
    "scan_reverse": (
        lambda t: _scan(
            lambda c, x: (jnp.tanh(c + jnp.sum((2.0 * x[0])[x[1]])), c),
            t,
            EACH,
            reverse=True,
        ),
        9,
    ),
    "scan_checkpoint": (
        lambda t: _scan(
            jax.checkpoint(lambda c, x: (c + jnp.sum(jnp.sin(x[0][x[1]])), None)),
            t,
            EACH,
        ),
        9,
    ),
    "loop": (
        lambda t: lax.fori_loop(
            0, K, lambda k, c: c + jnp.sin(t[k][IDS]), jnp.zeros((3, D))
        ),
        9,
    ),
    "branch": (
        lambda t: lax.cond(jnp.array(3) > 2, lambda: t[1, IDS], lambda: t[2, :3]),
        3,
    ),
    "returned_by_checkpoint": (
        lambda t: jax.checkpoint(lambda t: (t[1], t[2, IDS]))(t)[0][IDS + 1],
        3,
    ),
    "transposed": (lambda t: t.T[:, IDS, 2], 3),
    "back_to_one": (lambda t: t.reshape(K * V, D)[FAR], 5),
    "split_otherwise": (lambda t: t.reshape(V, K, 2, 2)[IDS, 2], 3),
    "row_functions": (lambda t: ((t + jnp.arange(4.0)) * jnp.tanh(t))[2, FAR], 5),
    "outer": (lambda t: (t[0, IDS][:, None] - t[2])[:, IDS], 6),
}

# Whole tables of the stack, or numbers of each table, are not rows.
DENSE = {
    "sum_of_a_table": lambda t: jnp.sum(t[1] ** 2),
    "number_of_a_table": lambda t: (t * jnp.arange(3.0)[:, None, None])[1, IDS],
    "columns": lambda t: t[1, IDS, :2],
    "sum_of_tables": lambda t: jnp.sum(t, axis=0)[IDS],
}


def _table(form="table"):
    table = np.random.default_rng(0).normal(size=(K * V, D))
    return table if form == "table" else table.reshape(K, V, D)


def _loss(read):
    return lambda table: jnp.sum(jnp.sin(read(table.reshape(K, V, D))))


def _close(a, b, name=""):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=name)


# The parameter is one table of all rows, or the stack.
FORMS = "table", "stack"
QUICK = ["out_of_range", "dynamic_table", "some_tables", "vmap", "scan_checkpoint"]
OTHERS = [name for name in PROGRAMS if name not in QUICK]
# One for each kind of view, of vmap and of control flow.
_TRANSFORMED = [*QUICK, "block", "vmap_bag", "scan_reverse", "branch", "row_functions"]
TRANSFORMED = [*zip(_TRANSFORMED, itertools.cycle(FORMS))]


@pytest.mark.parametrize(
    "names, form",
    [(QUICK, "stack"), pytest.param(OTHERS, "table", marks=pytest.mark.slow)],
)
def test_equals_jax_grad(names, form, x64):
    """One program for all: most of the time goes into compiling."""
    losses = [_loss(PROGRAMS[name][0]) for name in names]

    @jax.jit
    def run(table):
        sparse = [sj.grad(loss, tables=True)(table) for loss in losses]
        assert all(map(is_rows, sparse))
        return [g.to_dense() for g in sparse], [jax.grad(f)(table) for f in losses]

    for name, got, dense in zip(names, *run(_table(form)), strict=True):
        _close(got, dense, name)


@pytest.mark.window
@pytest.mark.parametrize("name, form", TRANSFORMED)
def test_under_vmap_and_differentiated_again(name, form, x64):
    loss, table = _loss(PROGRAMS[name][0]), _table(form)
    sparse = lambda t: sj.grad(loss, tables=True)(t).to_dense()
    dense, two = jax.grad(loss), np.stack([table, -table])

    @jax.jit
    def run(table, two):
        twice = jax.grad(lambda t: jnp.sum(jnp.sin(sparse(t))))(table)
        # Forward: jaxlib 0.7.2 compiles two of jax.grad to other numbers.
        slope = jax.jvp(dense, (table,), (jnp.cos(dense(table)),))[1]
        return (jax.vmap(sparse)(two), twice), (jax.vmap(dense)(two), slope)

    for got, expected in zip(*run(table, two), strict=True):
        _close(got, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.window
@pytest.mark.parametrize("name", PROGRAMS)
def test_reads_rows_only(name, form, x64):
    read, rows = PROGRAMS[name]
    loss, table = _loss(read), _table(form)
    # A reshape of the whole stack is free, in a compiled program.
    allow = ["reshape"] if form == "stack" else []
    assert_no_dense(sj.value_and_grad(loss), table, allow=allow, heights=[V, K * V])
    g = jax.eval_shape(sj.grad(loss), table)
    assert (g.shape, g.capacity, g.height) == (table.shape, rows, K * V)
    assert g.stack == ((K,) if form == "stack" else ())


@pytest.mark.window
@pytest.mark.parametrize("name", DENSE)
def test_dense_uses(name, x64):
    loss = _loss(DENSE[name])
    g, dense = jax.jit(lambda t: (sj.grad(loss)(t), jax.grad(loss)(t)))(_table())
    assert isinstance(g, jax.Array)
    _close(g, dense)


# -- the parameter is the stack --------------------------------------------------------


# How a parameter of shape `[9, 40, 4]` is read decides its rows.
KINDS = {
    "whole_rows": (lambda t: t[:1] * t[0], (9,), 2),
    "rows_of_a_table": (lambda t: t[3][IDS], (9, 40), 3),
    "two_ids": (lambda t: t[IDS, IDS + 1], (9, 40), 3),
    "part_of_a_row": (lambda t: t[IDS, :2], (9, 40), 6),
    "both": (lambda t: t[IDS[:1]].sum() + t[1, IDS], (9, 40), 43),
    "a_table_at_a_traced_place": (
        lambda t: jnp.take(t[jnp.argmax(t[0, 0])], IDS, axis=0),
        (9, 40),
        3,
    ),
    "every_table": (lambda t: t[:, 7], (9, 40), 9),
}


@pytest.mark.window
def test_what_the_rows_are(x64):
    """Reads of whole `[40, 4]` rows keep them, if no part of them is read."""
    table = np.random.default_rng(1).normal(size=(9, 40, 4))
    losses = [lambda t, k=kind: jnp.sum(jnp.sin(k[0](t))) for kind in KINDS.values()]

    @jax.jit
    def run(table):
        sparse = [sj.grad(loss)(table) for loss in losses]
        dense = [g.to_dense() for g in sparse]
        return sparse, dense, [jax.grad(loss)(table) for loss in losses]

    for (_, row_shape, rows), g, got, dense in zip(KINDS.values(), *run(table)):
        assert (g.row_shape, g.capacity) == (row_shape, rows)
        _close(got, dense)
    # Parts of many short rows are read as before.
    many = jax.eval_shape(sj.grad(lambda t: jnp.sum(t[3][IDS])), table.swapaxes(0, 1))
    assert (many.row_shape, many.capacity) == ((40,), 1)


@pytest.mark.slow
@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_stack_in_a_shard_map(check_vma, x64):
    """Every device reads rows of its own copy, or of one table of it."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    ids, table = np.arange(16) % 7, np.ones((K, 290, D))
    table[1] *= np.pi
    whole, split = jax.P(), jax.P("x")

    def body(t, one, ids):
        add = lambda total, table: (total + jnp.sin(table[ids]), None)
        return lax.scan(add, one[ids] * t[2, ids], t)[0]

    specs: dict = dict(in_specs=(whole, whole, split), out_specs=split)
    run = jax.shard_map(body, mesh=mesh, check_vma=check_vma, **specs)
    loss = lambda t: jnp.sum(run(t, t[1], ids))
    g, dense = jax.jit(lambda t: (sj.grad(loss)(t), jax.grad(loss)(t)))(table)
    assert g.stack == (K,) and g.capacity == 16 * (2 + K)
    _close(g.to_dense(), dense)


def test_the_rows_of_all_tables_count(x64):
    """Half of the rows, and not of the tables."""
    loss = lambda t, ids: jnp.sum(t[1, ids])
    ids = lambda count: jnp.zeros(count, int)
    grad = lambda count: jax.eval_shape(sj.grad(loss), _table("stack"), ids(count))
    most = K * V // 2
    assert is_rows(grad(most)) and not is_rows(grad(most + 1))
    told = sj.explain(loss)(_table("stack"), ids(most + 1))["t"]
    assert told.reason.startswith(f"reads {most + 1} of {K * V} rows")


def test_dense_kernels_in_a_stack(x64):
    """For example layers in a scan: the error says why their rows are not read."""

    def loss(params, x):
        step = lambda x, layer: (jnp.tanh(x @ layer["w"]) + layer["t"][IDS, 0], None)
        return jnp.sum(lax.scan(step, x, params)[0])

    params = {"w": np.ones((4, 3, 3)), "t": np.ones((4, 50, 3))}
    told = sj.explain(loss)(params, np.ones(3))
    assert "`dot_general`" in told["params['w']"].reason
    assert "`gather`" in told["params['t']"].reason  # single numbers of a row
    whole = lambda t: jnp.sum(t[1] ** 2) + jnp.sum(t[0, IDS])
    with pytest.raises(sj.DensifyError, match=f"has all {K * V} rows"):
        sj.grad(whole, tables=True)(_table("stack"))
    g = jax.jit(sj.grad(lambda t: jnp.sum(t[0, IDS]), tables=False))(_table("stack"))
    assert isinstance(g, jax.Array)
