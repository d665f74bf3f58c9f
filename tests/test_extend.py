"""Rules of one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.extend.core import Primitive  # noqa: TID251
from jax.interpreters import mlir  # noqa: TID251

import sparsejax as sj


def _new_primitive(name):
    """`double_rows(table, ids) = 2 * table[ids]`, which JAX knows nothing of."""
    p = Primitive(name)
    impl = lambda table, ids: 2.0 * table[ids]
    p.def_impl(impl)
    p.def_abstract_eval(lambda t, i: ShapedArray(i.shape + t.shape[1:], t.dtype))
    mlir.register_lowering(p, mlir.lower_fun(impl, multiple_results=False))
    return p


TABLE, IDS = jnp.arange(80.0).reshape(40, 2), jnp.array([5, 1, 5])


def test_a_rule_that_reads():
    p = _new_primitive("double_rows")
    loss = lambda t: jnp.sum(p.bind(t, IDS) ** 2)
    with pytest.raises(sj.DensifyError, match='register_rule."double_rows"'):
        sj.grad(loss, tables=True)(TABLE)

    @sj.extend.register_rule(p)
    def rule(ctx, table, ids):
        return 2.0 * ctx.read(table, ids)

    g = jax.jit(sj.grad(loss, tables=True))(TABLE)
    want = jax.grad(lambda t: jnp.sum((2.0 * t[IDS]) ** 2))(TABLE)
    np.testing.assert_allclose(g.to_dense(), want)


def test_a_rule_by_name_that_declines():
    p = _new_primitive("maybe_rows")

    @sj.extend.register_rule("maybe_rows")
    def rule(ctx, table, ids):
        return NotImplemented

    with pytest.raises(sj.DensifyError, match="maybe_rows"):
        sj.grad(lambda t: jnp.sum(p.bind(t, IDS)), tables=True)(TABLE)


def test_wrong_rules_are_told():
    p = _new_primitive("wrong_rows")
    loss = lambda t: jnp.sum(p.bind(t, IDS))

    @sj.extend.register_rule(p)
    def wrong_shape(ctx, table, ids):
        return ctx.read(table, ids)[:1]

    with pytest.raises(TypeError, match=r"wrong_rows must return .* got \(1, 2\)"):
        sj.grad(loss)(TABLE)

    @sj.extend.register_rule(p)
    def late_no(ctx, table, ids):
        ctx.read(table, ids)
        return NotImplemented

    with pytest.raises(TypeError, match="Return NotImplemented before"):
        sj.grad(loss)(TABLE)


def test_wrong_registrations():
    with pytest.raises(TypeError, match="parentheses"):
        sj.extend.register_rule(lambda ctx: None)
    with pytest.raises(TypeError, match="at least one"):
        sj.extend.register_rule()
