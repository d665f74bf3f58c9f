"""Tables inside `shard_map` and on Explicit axes, and `sj.grad` in `shard_map`."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj
from sparsejax import _compat
from tests.helpers import (
    assert_trees_close,
    assert_written_in_place,
    compile_as_users_do,
)


pytestmark = [
    pytest.mark.usefixtures("eight_devices", "loose_promotion"),
    pytest.mark.window,
]
IDS = jnp.array([3, 7, 3, 9, 11, 150, 7, 1])
W = jnp.arange(1.0, 5.0)


def _table():
    return jax.random.normal(jax.random.key(0), (200, 4))


def _psum(mesh, vma):
    def body(t, i):
        return lax.psum(jnp.sum(jnp.sin(t[i] * W)), "x")

    return body, (P(), P("x")), P()


def _psum_both(mesh, vma):
    def body(t, i):
        return lax.psum(jnp.sum(jnp.sin(t[i] * W)), ("x", "y"))

    return body, (P(), P(("x", "y"))), P()


def _rows_out(mesh, vma):
    def body(t, i):
        return jnp.sin((2 * t.astype(jnp.float32))[i] * W)

    return body, (P(), P("x")), P("x")


def _control_flow(mesh, vma):
    def body(t, i):
        @jax.checkpoint
        def step(c, k):
            even = lambda: jnp.sum(jnp.sin(t[k] * W))
            return c + lax.cond(k % 2 == 0, even, lambda: jnp.sum(t[k] ** 2)), None

        start = jnp.sum(i) * 0.0
        return lax.psum(lax.scan(step, start, i)[0], "x")

    return body, (P(), P("x")), P()


@pytest.mark.parametrize(
    "vma, axis_type", [(True, AxisType.Auto), (False, AxisType.Explicit)]
)
@pytest.mark.parametrize("case", [_psum, _psum_both, _rows_out, _control_flow])
def test_replicated_table(case, vma, axis_type):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    body, in_specs, out_specs = case(mesh, vma)

    def loss(t, ids):
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=vma
        )
        return jnp.sum(mapped(3.0 * t, ids) ** 2)

    with jax.set_mesh(mesh):
        t = jax.device_put(_table(), NamedSharding(mesh, P()))
        ids = jax.device_put(IDS, NamedSharding(mesh, in_specs[1]))
        want = jax.jit(jax.grad(loss))(t, ids)
        g = jax.jit(sj.grad(loss, tables=True))(t, ids)
        assert isinstance(g, sj.SelectedRows)
        np.testing.assert_allclose(g.to_dense(), want, rtol=2e-5, atol=1e-5)
        # With vma types a read counts once, however many devices repeat it.
        assert g.capacity == (8 if vma or case is _psum_both else 16)


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
def test_reshard(spec):
    """A table that does not move is still a table; one that moves is dense."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))

    def loss(t, ids):
        whole = jax.sharding.reshard(3.0 * t, NamedSharding(mesh, P()))
        return jnp.sum(jnp.sin(whole[ids] * W))

    with jax.set_mesh(mesh):
        t = jax.device_put(_table(), NamedSharding(mesh, spec))
        want = jax.jit(jax.grad(loss))(t, IDS)
        g = jax.jit(sj.grad(loss))(t, IDS)
        assert isinstance(g, sj.SelectedRows) == (spec == P())
        g = g.to_dense() if isinstance(g, sj.SelectedRows) else g
        np.testing.assert_allclose(g, want, rtol=2e-5, atol=1e-5)


def _sharded_rows(t, ids):
    return t.at[ids].get(out_sharding=P("x"))


_tanh_of_rows: Any = jax.sharding.auto_axes(
    lambda t, ids: jnp.tanh(sj.lookup(t, ids)), axes="x", out_sharding=P("x")
)
_READS = {
    "rows": lambda p, ids: _sharded_rows(p["t"], ids),
    "cast": lambda p, ids: _sharded_rows(p["t"].astype(jnp.bfloat16), ids),
    "scaled": lambda p, ids: _sharded_rows(p["w"] * p["t"], ids),
    "nested": lambda p, ids: jax.checkpoint(jax.jit(_sharded_rows))(p["t"], ids),
    "auto_axes": lambda p, ids: _tanh_of_rows(p["t"], ids),
}


@pytest.mark.parametrize("read", _READS.values(), ids=_READS)
def test_a_step_that_reads_where_explicit_axes_are_auto(read):
    """`jax.make_mesh` makes Explicit axes by default on the newest JAX."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))

    def loss(p, ids):
        return jnp.sum(jnp.sin(read(p, ids).astype(jnp.float32) * p["w"]))

    def train(grad, tx):
        def run(p, state, ids):
            updates, state = tx.update(grad(p, ids), state, p)
            return optax.apply_updates(p, updates), state

        step: Any = jax.jit(run, donate_argnums=(0, 1))
        p = {"t": jax.random.normal(jax.random.key(0), (1009, 4)), "w": 1.0 * W}
        specs = {"t": P(None, None), "w": P(None)}  # P() would compile again
        p = jax.device_put(p, {k: NamedSharding(mesh, x) for k, x in specs.items()})
        state = jax.jit(tx.init)(p)
        for ids in (IDS, IDS[::-1] + 1):
            ids = jax.device_put(ids, NamedSharding(mesh, P("x")))
            lowered = step.lower(p, state, ids)
            p, state = step(p, state, ids)
        assert step._cache_size() == 1
        return (p, state), compile_as_users_do(lowered)

    tx = optax.adagrad(0.1)
    with jax.set_mesh(mesh):
        sparse = sj.grad(loss, tables={"t": True, "w": False})
        got, compiled = train(sparse, sj.optim.lazy(tx))
        want, _ = train(jax.grad(loss), tx)
    assert_trees_close(got, want)
    table = got[0]["t"]
    assert_written_in_place(compiled, [table], table.nbytes)


@pytest.mark.parametrize("inside", [True, False], ids=["in the loss", "argument"])
def test_a_table_whose_cotangents_are_unreduced(inside):
    """Each device has the table, and JAX sums gradients over `x` later."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    if not hasattr(P(), "reduced"):
        pytest.skip("this release has no reduced axes")
    spec = P(None, None, reduced=frozenset("x"))

    def loss(t, ids):
        whole = jax.sharding.reshard(t, spec) if inside else t
        return jnp.sum(jnp.sin(2.0 * whole.at[ids].get(out_sharding=P("x"))))

    with jax.set_mesh(mesh):
        t = jax.sharding.reshard(_table(), P(None, None) if inside else spec)
        ids = jax.device_put(IDS, NamedSharding(mesh, P("x")))
        want = jax.jit(jax.grad(loss))(t, ids)
        g = jax.jit(sj.grad(loss))(t, ids)
        assert isinstance(g, sj.SelectedRows) and g.capacity == IDS.size
        np.testing.assert_allclose(
            g.to_dense(), jax.sharding.reshard(want, P()), rtol=2e-5, atol=1e-5
        )
        if inside:  # JAX cannot index or update an argument with such a type
            tx = sj.optim.lazy(optax.adam(0.1))
            step = lambda t, state: tx.update(sj.grad(loss)(t, ids), state, t)[0]
            moved = jax.jit(step)(t, jax.jit(tx.init)(t)).to_dense()
            rows = np.flatnonzero(np.any(np.asarray(moved) != 0, axis=1))
            assert rows.tolist() == np.unique(IDS).tolist()


_CALLS = {
    "lookup": lambda t, ids: sj.lookup(t, ids, mode="zero", padding_id=3),
    "norm": lambda t, ids: sj.lookup(t, ids, mode="clip", max_norm=0.5),
    "codes": lambda t, ids: sj.lookup(sj.quantize(t), ids, mode="zero"),
    "sums": lambda t, ids: sj.embedding_bag(t, ids, mode="zero"),
    "weights": lambda t, ids: sj.embedding_bag(
        t, ids, weights=jnp.sin(ids), combiner="sqrtn", mode="zero", padding_id=3
    ),
    "maxima": lambda t, ids: sj.embedding_bag(t, ids, combiner="max", mode="zero"),
    "none": lambda t, ids: sj.embedding_bag(t, ids, combiner="none", mode="zero"),
    "layer": lambda t, ids: sj.nn.EmbeddingBag(200, 4)({"embedding": t}, ids),
}


@pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)
@pytest.mark.parametrize("in_context", [True, False], ids=["set_mesh", "no context"])
def test_reads_are_sharded_like_ids_on_explicit_axes(call, in_context):
    """JAX's own gather asks for an out_sharding there."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    ids = jnp.stack([IDS, IDS + 60, IDS + 500 * (IDS < 9) - 500 * (IDS == 11)], axis=1)
    ids = jnp.clip(ids, 0, 199) if call is _CALLS["layer"] else ids
    t = _table()
    rows, given = call(t, ids), jax.device_put(ids, NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        table = jax.device_put(t, NamedSharding(mesh, P()))
        got = jax.jit(call)(table, given)
        assert tuple(got.sharding.spec) == ("x",) + (None,) * (got.ndim - 1)
        np.testing.assert_allclose(got, rows, rtol=1e-6, atol=1e-6)
        if call is _CALLS["codes"]:
            return  # rounding has no gradient
        loss = lambda t, ids: jnp.sum(jnp.sin(call(t, ids)))
        g = jax.jit(sj.grad(loss, tables=True))(table, given)
        want = jax.grad(loss)(t, ids)
        np.testing.assert_allclose(g.to_dense(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_context", [True, False], ids=["set_mesh", "no context"])
def test_rows_of_a_branch_are_on_every_device_of_explicit_axes(in_context):
    if in_context and jax.__version_info__ < (0, 8):
        pytest.skip("JAX itself raises for such a branch")
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))

    def loss(t, ids):
        read = lambda: jnp.sum(jnp.sin(sj.lookup(t, ids) * W))
        return lax.cond(jnp.sum(ids) > 0, read, lambda: jnp.float32(0))

    t, want = _table(), jax.grad(loss)(_table(), IDS)
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        table = jax.device_put(t, NamedSharding(mesh, P()))
        ids = jax.device_put(IDS, NamedSharding(mesh, P("x")))
        g = jax.jit(sj.grad(loss))(table, ids)
    assert g.rows.sharding.is_fully_replicated
    assert g.values.sharding.is_fully_replicated
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(g.to_dense(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("on_mesh", [True, False], ids=["on the mesh", "on no mesh"])
def test_sampled_softmax_of_labels_sharded_over_explicit_axes(on_mesh):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    sampler = sj.losses.NegativeSampler.from_counts(np.arange(1, 201))
    x, labels = jnp.sin(jnp.arange(32.0)).reshape(8, 4), IDS

    def loss(t, sampler, x, labels):
        negatives = sampler.sample(jax.random.key(0), 16, labels)
        return jnp.mean(sj.losses.sampled_softmax_loss(t, x, labels, negatives))

    want = jax.grad(loss)(_table(), sampler, x, labels)
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    with jax.set_mesh(mesh):
        t = jax.device_put(_table(), everywhere)
        sampler = jax.device_put(sampler, everywhere) if on_mesh else sampler
        g = jax.jit(sj.grad(loss))(t, sampler, *jax.device_put((x, labels), split))
        np.testing.assert_allclose(g.to_dense(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", [P("x"), None], ids=["sharded", "on no mesh"])
def test_other_tables_are_dense_on_explicit_axes(spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))

    def loss(t, ids):
        rows = _sharded_rows(t.astype(jnp.bfloat16), ids)
        return jnp.sum(jnp.sin(rows.astype(jnp.float32) * W))

    with jax.set_mesh(mesh):
        t = _table()
        t = jax.device_put(t, NamedSharding(mesh, spec)) if spec else np.asarray(t)
        want = jax.jit(jax.grad(loss))(t, IDS)
        np.testing.assert_allclose(jax.jit(sj.grad(loss))(t, IDS), want, rtol=2e-5)
        with pytest.raises(sj.DensifyError, match="reshard"):
            jax.jit(sj.grad(loss, tables=True))(t, IDS)


@pytest.mark.parametrize("vma", [True, False])
def test_inside_shard_map(vma):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def body(t, i):
        t = _compat.to_varying(t, ("x",)) if vma else t
        g = sj.grad(lambda t: jnp.sum(jnp.sin(t[i] * W)), tables=True)(t)
        return g.rows, g.values

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"), check_vma=vma
    )
    g = sj.SelectedRows(*jax.jit(mapped)(_table(), IDS), height=200)
    want = jax.grad(lambda t: jnp.sum(jnp.sin(t[IDS] * W)))(_table())
    np.testing.assert_allclose(g.to_dense(), want, rtol=1e-5)


@pytest.mark.slow
def test_sharded_table_is_dense_use():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def loss(t):
        body = lambda t: lax.psum(jnp.sum(t[:2] ** 2), "x")
        return jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())(t)

    np.testing.assert_allclose(sj.grad(loss)(_table()), jax.grad(loss)(_table()))
    with pytest.raises(sj.DensifyError, match="splits it over devices"):
        sj.grad(loss, tables=True)(_table())
