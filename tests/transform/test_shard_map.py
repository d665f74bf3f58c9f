"""Tables inside `shard_map` and on Explicit axes, and `sj.grad` in `shard_map`."""

import contextlib
import itertools
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
    is_rows,
    to_dense,
)


pytestmark = [
    pytest.mark.usefixtures("eight_devices", "loose_promotion"),
    pytest.mark.window,
]
IDS = np.array([3, 7, 3, 9, 11, 150, 7, 1], np.int32)
W = np.arange(1.0, 5.0, dtype=np.float32)
TABLE = np.asarray(jax.random.normal(jax.random.key(0), (200, 4)))


def _mesh(*sizes, kind=AxisType.Explicit):
    return jax.make_mesh(
        sizes, ("x", "y")[: len(sizes)], axis_types=(kind,) * len(sizes)
    )


def _put(mesh, spec, x):
    return jax.device_put(x, NamedSharding(mesh, spec))


def _sines(rows):
    return jnp.sum(jnp.sin(rows.astype(jnp.float32) * W))


def _assert_gradient(loss, *args, like=None, rtol=2e-5, atol=1e-5, **options):
    """`sj.grad` equals `jax.grad` of `like`, by default of the same arguments."""
    dense = jax.jit(jax.grad(loss))(*(args if like is None else like))
    g = jax.jit(sj.grad(loss, **options))(*args)
    np.testing.assert_allclose(to_dense(g), dense, rtol=rtol, atol=atol)
    return g


def _control_flow(t, i):
    @jax.checkpoint
    def step(c, k):
        even = lambda: _sines(t[k])
        return c + lax.cond(k % 2 == 0, even, lambda: jnp.sum(t[k] ** 2)), None

    return lax.psum(lax.scan(step, jnp.sum(i) * 0.0, i)[0], "x")


def _sum_of_bags(t, i):
    bags = sj.embedding_bag(t, i, i % 2, 2, weights=jnp.sin(i), combiner="mean")
    return lax.psum(_sines(bags), "x")


_BOTH = ("x", "y")
_CASES = {  # a function of a shard, and how ids and result are sharded
    "psum": (lambda t, i: lax.psum(_sines(t[i]), "x"), P("x"), P()),
    "psum_both": (lambda t, i: lax.psum(_sines(t[i]), _BOTH), P(_BOTH), P()),
    "bags": (_sum_of_bags, P("x"), P()),
    "rows_out": (lambda t, i: jnp.sin((2 * t)[i] * W), P("x"), P("x")),
    "control_flow": (_control_flow, P("x"), P()),
}


@pytest.mark.parametrize(
    "case, vma",
    [*((name, True) for name in _CASES), ("psum", False), ("control_flow", False)],
)
def test_replicated_table(case, vma):
    mesh = _mesh(2, 2, kind=AxisType.Auto if vma else AxisType.Explicit)
    body, split, out = _CASES[case]
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), split), out_specs=out, check_vma=vma
    )
    loss = lambda t, ids: jnp.sum(run(3.0 * t, ids) ** 2)
    with jax.set_mesh(mesh):
        args = _put(mesh, P(), TABLE), _put(mesh, split, IDS)
        g = _assert_gradient(loss, *args, tables=True)
    # With vma types a read counts once, however many devices repeat it.
    assert g.capacity == (8 if vma else 16)


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
def test_reshard(spec):
    """A table that does not move is still a table; one that moves is dense."""
    mesh = _mesh(2)
    move = lambda t: jax.sharding.reshard(3.0 * t, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        loss = lambda t, ids: _sines(move(t)[ids])
        g = _assert_gradient(loss, _put(mesh, spec, TABLE), IDS)
        assert is_rows(g) == (spec == P())


def _sharded_rows(t, ids):
    return t.at[ids].get(out_sharding=P("x"))


_tanh_of_rows: Any = jax.sharding.auto_axes(
    lambda t, ids: jnp.tanh(sj.lookup(t, ids)), axes="x", out_sharding=P("x")
)
_READS = {
    "cast": lambda p, ids: _sharded_rows(p["t"].astype(jnp.bfloat16), ids),
    "scaled": lambda p, ids: _sharded_rows(p["w"] * p["t"], ids),
    "nested": lambda p, ids: jax.checkpoint(jax.jit(_sharded_rows))(p["t"], ids),
    "auto_axes": lambda p, ids: _tanh_of_rows(p["t"], ids),
}


@pytest.mark.parametrize("read", _READS.values(), ids=_READS)
def test_a_step_that_reads_where_explicit_axes_are_auto(read):
    """`jax.make_mesh` makes Explicit axes by default on the newest JAX."""
    mesh = _mesh(4)
    loss = lambda p, ids: _sines(read(p, ids) * p["w"])

    def train(grad, tx):
        def run(p, state, ids):
            updates, state = tx.update(grad(p, ids), state, p)
            return optax.apply_updates(p, updates), state

        step: Any = jax.jit(run, donate_argnums=(0, 1))
        # P() would compile again
        p = {"t": _put(mesh, P(None, None), TABLE), "w": _put(mesh, P(None), W)}
        state = jax.jit(tx.init)(p)
        for ids in (IDS, IDS[::-1] + 1):
            ids = _put(mesh, P("x"), ids)
            lowered = step.lower(p, state, ids)
            p, state = step(p, state, ids)
        assert step._cache_size() == 1
        return (p, state), lowered

    tx = optax.adagrad(0.1)
    with jax.set_mesh(mesh):
        sparse = sj.grad(loss, tables={"t": True, "w": False})
        got, lowered = train(sparse, sj.optim.lazy(tx))
        assert_trees_close(got, train(jax.grad(loss), tx)[0])
        table = got[0]["t"]
        assert_written_in_place(compile_as_users_do(lowered), [table], table.nbytes)


@pytest.mark.parametrize("inside", [True, False], ids=["in the loss", "argument"])
def test_a_table_whose_cotangents_are_unreduced(inside):
    """Each device has the table, and JAX sums gradients over `x` later."""
    mesh = _mesh(4)
    if not hasattr(P(), "reduced"):
        pytest.skip("this release has no reduced axes")
    spec = P(None, None, reduced=frozenset("x"))

    def loss(t, ids):
        whole = jax.sharding.reshard(t, spec) if inside else t
        return jnp.sum(jnp.sin(2.0 * _sharded_rows(whole, ids)))

    with jax.set_mesh(mesh):
        t = jax.sharding.reshard(TABLE, P(None, None) if inside else spec)
        ids = _put(mesh, P("x"), IDS)
        dense = jax.jit(jax.grad(loss))(t, ids)
        g = jax.jit(sj.grad(loss))(t, ids)
        assert is_rows(g) and g.capacity == IDS.size
        np.testing.assert_allclose(
            g.to_dense(), jax.sharding.reshard(dense, P()), rtol=2e-5, atol=1e-5
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
    "layer": lambda t, ids: sj.nn.EmbeddingBag(200, 4)(
        {"embedding": t}, jnp.clip(ids, 0, 199)
    ),
}
_CONTEXTS = [jax.set_mesh, contextlib.nullcontext]


@pytest.mark.parametrize(
    "name, context",
    [*zip(_CALLS, itertools.cycle(_CONTEXTS)), ("lookup", _CONTEXTS[1])],
)
def test_reads_are_sharded_like_ids_on_explicit_axes(name, context):
    """JAX's own gather asks for an out_sharding there."""
    call, mesh = _CALLS[name], _mesh(2, 2)
    far = np.where(IDS < 9, IDS + 500, np.where(IDS == 11, IDS - 500, IDS))
    ids = np.stack([IDS, IDS + 60, far], axis=1)
    with context(mesh):
        args = _put(mesh, P(), TABLE), _put(mesh, P("x"), ids)
        run = jax.jit(call)
        got = run(*args)
        assert tuple(got.sharding.spec) == ("x",) + (None,) * (got.ndim - 1)
        np.testing.assert_allclose(got, run(TABLE, ids), rtol=1e-6, atol=1e-6)
        if name != "codes":  # rounding has no gradient
            loss = lambda t, ids: jnp.sum(jnp.sin(call(t, ids)))
            plain, tight = (TABLE, ids), dict(rtol=1e-5, atol=1e-6)
            _assert_gradient(loss, *args, like=plain, tables=True, **tight)


@pytest.mark.parametrize("context", _CONTEXTS)
def test_rows_of_a_branch_are_on_every_device_of_explicit_axes(context):
    if context is jax.set_mesh and jax.__version_info__ < (0, 8):
        pytest.skip("JAX itself raises for such a branch")
    mesh = _mesh(4)
    read = lambda t, ids: _sines(sj.lookup(t, ids))
    loss = lambda t, ids: lax.cond(
        jnp.sum(ids) > 0, lambda: read(t, ids), lambda: jnp.float32(0)
    )
    dense = jax.jit(jax.grad(loss))(TABLE, IDS)
    with context(mesh):
        g = jax.jit(sj.grad(loss))(_put(mesh, P(), TABLE), _put(mesh, P("x"), IDS))
    assert g.rows.sharding.is_fully_replicated
    assert g.values.sharding.is_fully_replicated
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(g.to_dense(), dense, rtol=1e-5, atol=1e-6)


def test_sampled_softmax_of_labels_sharded_over_explicit_axes():
    """The sampler is on no mesh."""
    mesh = _mesh(4)
    sampler = sj.losses.NegativeSampler.from_counts(np.arange(1, 201))
    x = np.sin(np.arange(32, dtype=np.float32)).reshape(8, 4)

    def loss(t, sampler, x, labels):
        negatives = sampler.sample(jax.random.key(0), 16, labels)
        return jnp.mean(sj.losses.sampled_softmax_loss(t, x, labels, negatives))

    dense = jax.jit(jax.grad(loss))(TABLE, sampler, x, IDS)
    with jax.set_mesh(mesh):
        args = _put(mesh, P(), TABLE), sampler, *_put(mesh, P("x"), (x, IDS))
        g = jax.jit(sj.grad(loss))(*args)
        np.testing.assert_allclose(g.to_dense(), dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", [P("x"), None], ids=["sharded", "on no mesh"])
def test_other_tables_are_dense_on_explicit_axes(spec):
    mesh = _mesh(2)
    loss = lambda t, ids: _sines(_sharded_rows(t.astype(jnp.bfloat16), ids))
    with jax.set_mesh(mesh):
        t = _put(mesh, spec, TABLE) if spec else TABLE
        assert not is_rows(_assert_gradient(loss, t, IDS, atol=0))
        with pytest.raises(sj.DensifyError, match="reshard"):
            jax.jit(sj.grad(loss, tables=True))(t, IDS)


@pytest.mark.parametrize("vma", [True, False])
def test_inside_shard_map(vma):
    def body(t, i):
        t = _compat.to_varying(t, ("x",)) if vma else t
        g = sj.grad(lambda t: _sines(t[i]), tables=True)(t)
        return g.rows, g.values

    specs: Any = dict(in_specs=(P(), P("x")), out_specs=P("x"))
    mesh = _mesh(4, kind=AxisType.Auto)
    mapped = jax.shard_map(body, mesh=mesh, check_vma=vma, **specs)
    g = sj.SelectedRows(*jax.jit(mapped)(TABLE, IDS), height=200)
    dense = jax.jit(jax.grad(lambda t: _sines(t[IDS])))(TABLE)
    np.testing.assert_allclose(g.to_dense(), dense, rtol=1e-5)


@pytest.mark.slow
def test_sharded_table_is_dense_use():
    mesh = _mesh(4, kind=AxisType.Auto)
    body = lambda t: lax.psum(jnp.sum(t[:2] ** 2), "x")
    loss = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())
    assert not is_rows(_assert_gradient(loss, TABLE, rtol=1e-7, atol=0))
    with pytest.raises(sj.DensifyError, match="splits it over devices"):
        sj.grad(loss, tables=True)(TABLE)
