"""Rules of one's own."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive  # noqa: TID251
from jax.interpreters import mlir  # noqa: TID251
from jax.sharding import AxisType

import sparsejax as sj
from sparsejax.transform import interpreter, liveness


TABLE, IDS = jnp.arange(80.0).reshape(40, 2), jnp.array([5, 1, 5])


def _new_primitive(name):
    """`name(table, ids) = 2 * table[ids]`, of which JAX knows nothing, and a loss."""
    p = Primitive(name)
    impl = lambda table, ids: 2.0 * table[ids]
    p.def_impl(impl)
    p.def_abstract_eval(lambda t, i: ShapedArray(i.shape + t.shape[1:], t.dtype))
    mlir.register_lowering(p, mlir.lower_fun(impl, multiple_results=False))
    return p, lambda t: jnp.sum(p.bind(t, IDS) ** 2)


def _read(ctx, table, ids):
    return 2.0 * ctx.read(table, ids)


def _is_sparse(loss):
    return sj.explain(loss, tables=True)(TABLE)["t"].sparse


def _assert_gradient(loss, dense):
    g = jax.jit(sj.grad(loss, tables=True))(TABLE)
    np.testing.assert_allclose(g.to_dense(), jax.jit(jax.grad(dense))(TABLE))


def test_a_rule_that_reads():
    p, loss = _new_primitive("double_rows")
    with pytest.raises(sj.DensifyError, match='register_rule."double_rows"'):
        sj.grad(loss, tables=True)(TABLE)
    assert sj.extend.register_rule(p)(_read) is _read
    _assert_gradient(loss, lambda t: jnp.sum((2.0 * t[IDS]) ** 2))


def test_a_rule_of_the_same_name_in_another_module_stays():
    """And is called if the later one declines; a rule is replaced in its own module."""
    p, loss = _new_primitive("two_modules")

    def register(reads, module=__name__):
        def rule(ctx, table, ids):
            return _read(ctx, table, ids) if reads else NotImplemented

        rule.__module__ = module
        sj.extend.register_rule(p.name)(rule)

    register(True)
    assert _is_sparse(loss)
    register(False)  # a cell that is run again
    assert not _is_sparse(loss)
    register(True, "another_package")
    register(False)
    assert _is_sparse(loss)


def test_a_rule_that_combines_a_part_of_a_table():
    p, loss = _new_primitive("combined_rows")
    of_a_part = lambda t: loss(t.reshape(2, 20, 2)[1])

    def combine(ctx, table, ids, check):
        if check and not table.has_all_rows:
            return NotImplemented
        out = p.bind(table.array, ids)
        return ctx.combine(table, ids, out, lambda cotangent: 2.0 * cotangent)

    sj.extend.register_rule(p)(lambda *args: combine(*args, check=True))
    assert _is_sparse(loss) and not _is_sparse(of_a_part)
    sj.extend.register_rule(p)(lambda *args: combine(*args, check=False))
    with pytest.raises(TypeError, match="unless ref.has_all_rows"):
        sj.grad(of_a_part)(TABLE)


def test_a_program_is_walked_twice():
    """However many leaves turn out dense; once more if a leaf may be a stack."""
    p, _ = _new_primitive("walked_rows")
    walks = []

    @sj.extend.register_rule(p)
    def rule(ctx, table, ids):
        walks.append(ctx.reads.planting)
        return _read(ctx, table, ids)

    def loss(params):
        rows = p.bind(params["read"], IDS) @ params["weights"]
        return jnp.sum(rows) + jnp.sum(params["often"][jnp.arange(40)])

    params = {"read": TABLE, "weights": np.ones((2, 2), "f"), "often": TABLE}
    grads = jax.eval_shape(sj.grad(loss), params)
    kinds = {k: isinstance(g, sj.SelectedRows) for k, g in grads.items()}
    assert kinds == {"read": True, "weights": False, "often": False}
    assert walks == [False, True]
    walks.clear()
    with_stack = lambda params, stack: loss(params) + jnp.sum(stack[1, IDS] ** 2)
    stack = np.ones((3, 40, 2), "f")
    grads = jax.eval_shape(sj.grad(with_stack, (0, 1)), params, stack)
    assert grads[1].stack == (3,) and walks == [False, False, True]


@contextlib.contextmanager
def _restored(registry):
    """Rules that are registered inside are forgotten afterwards."""
    before = {name: list(entries) for name, entries in registry._entries.items()}
    try:
        yield
    finally:
        registry._entries = before


def test_a_rule_before_jaxs_own():
    """The rule for "gather" that a DensifyError suggests; other gathers as before."""
    columns, rows = (lambda t: jnp.sum(t[IDS, :1] ** 2), lambda t: jnp.sum(t[IDS] ** 2))
    with pytest.raises(sj.DensifyError, match=r'register_rule\("gather"\)'):
        sj.grad(columns, tables=True)(TABLE)

    def rule(ctx, table, ids, *, slice_sizes, **params):
        if table.row_axis != 0 or slice_sizes != (1, 1):
            return NotImplemented
        return ctx.read(table, ids[:, 0])[:, :1]

    with _restored(interpreter._RULES):
        sj.extend.register_rule("gather")(rule)
        _assert_gradient(columns, columns)
        _assert_gradient(rows, rows)
        # Registered for the primitive itself, and later: it comes first.
        whole = lambda ctx, table, ids, **params: ctx.dense(table)[:3, :1]
        sj.extend.register_rule(lax.gather_p)(whole)
        assert not _is_sparse(columns)


def test_a_flow_by_name_comes_before_jaxs_own():
    loss = lambda t: jnp.sum(jax.jit(jnp.sin)(t[IDS]))
    assert sj.explain(loss)(TABLE)["t"].rows_read == 3
    with _restored(liveness._FLOWS):
        sj.extend.register_flow("jit")(lambda liveness, eqn, out: (False,))
        assert sj.explain(loss)(TABLE)["t"].rows_read == 0


def test_rows_out_of_range_give_nothing_to_what_a_view_is_made_of():
    """Neither for ids, nor for ids that a rule marks as not valid."""
    p, _ = _new_primitive("masked_rows")
    loss = lambda t, w: jnp.sum(p.bind(t * w[None], jnp.array([3, 70, -1, 5])))

    @sj.extend.register_rule(p)
    def rule(ctx, table, ids):
        return 2.0 * ctx.read(table, ids, valid=ids != 5)

    grad = jax.jit(sj.grad(loss, (0, 1), tables=(True, False)))
    g, g_w = grad(TABLE, np.ones(2, np.float32))
    np.testing.assert_array_equal(g.rows, [3, 40, 40, 40])
    np.testing.assert_allclose(g_w, 2.0 * TABLE[3])


@pytest.mark.usefixtures("eight_devices")
def test_ids_out_of_range_read_the_nearest_row():
    """Also of a table on several devices, and of a table of a store."""
    p, _ = _new_primitive("nearest_rows")
    sj.extend.register_rule(p)(_read)
    loss = lambda t: jnp.sum(p.bind(jnp.asarray(t), jnp.array([3, 70, -1])))
    find = jax.jit(sj.value_and_grad(loss, tables=True))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    store = sj.store.KVStore()
    store.init("t", np.asarray(TABLE), optax.sgd(1.0))
    for value, grad in (
        find(TABLE),
        find(sj.parallel.shard_rows(TABLE, mesh, "x")),
        store.value_and_grad(loss)(store["t"]),
    ):
        assert value == 2.0 * np.sum(np.asarray(TABLE)[[3, 39, 0]])
        np.testing.assert_array_equal(np.flatnonzero(grad.to_dense()), [6, 7])


def test_a_rule_for_stacks():
    """It sees that the view is a stack, and is right for every view of one."""
    seen, stack = [], np.arange(444, dtype=np.float32).reshape(3, 37, 4)
    loss = lambda t: jnp.sum(jnp.flip(t.reshape(3, 37, 4), 2)[1, IDS] * stack[0, :3])

    def reverse_content(ctx, table, *, dimensions):
        seen.append((table.shape, table.row_axis, table.has_all_rows))
        if set(dimensions) & set(table.row_axes):
            return NotImplemented
        content = [d for d in range(table.ndim) if d not in table.row_axes]
        along = tuple(1 + content.index(d) for d in dimensions)
        return table.then(lambda rows: jnp.flip(rows, along))

    with _restored(interpreter._RULES):
        sj.extend.register_rule("rev")(reverse_content)
        assert sj.explain(loss)(stack.reshape(111, 4))["t"].sparse
        assert {*seen} == {((3, 37, 4), None, False)}
        g = jax.jit(sj.grad(loss))(stack)
        assert g.stack == (3,) and g.capacity == IDS.size
        np.testing.assert_allclose(g.to_dense(), jax.jit(jax.grad(loss))(stack))
        seen.clear()
        rows_reversed = lambda t: jnp.sum(jnp.flip(t, 0)[IDS])
        assert not sj.explain(rows_reversed)(stack.reshape(111, 4))["t"].sparse
        assert {*seen} == {((111, 4), 0, True)}
