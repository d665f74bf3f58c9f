"""segment_*: derivatives, vmap, and elements outside all segments."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import reductions
import sparsejax as sj
from helpers import assert_trees_close
from reductions import SMOOTH, WEIGHTED, ours


# Small, since the cost of compiling grows with each doubling of N.
S, N = 3, 7
IDS = np.array([2, -1, 0, 2, 5, 0, 2], np.int32)  # 1 is empty


def floats(shape, seed=0, dtype: Any = np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def garbage(x, ids):
    """`x` with NaN and infinity in the elements of no segment."""
    outside = ((ids < 0) | (ids >= S)).reshape(-1, *(1,) * (x.ndim - 1))
    bad = np.where(np.arange(len(x)) % 2 == 0, np.nan, np.inf).astype(x.dtype)
    return np.where(outside, bad.reshape(outside.shape), x)


def smooth(x, w, ids, is_sorted=False):
    """All that is differentiable, of data and weights."""
    out = {name: ours(name)(x, ids, S, indices_are_sorted=is_sorted) for name in SMOOTH}
    for name in WEIGHTED:
        out[f"weighted {name}"] = ours(name)(
            x, ids, S, indices_are_sorted=is_sorted, weights=w
        )
    out["top_k"] = sj.segment_top_k(x, ids, S, indices_are_sorted=is_sorted, k=2)[0]
    # An empty segment's maximum is infinite, and no difference of it a number.
    return jax.tree.map(lambda y: jnp.where(jnp.isfinite(y), y, 0), out)


def loss(x, w, ids, is_sorted=False):
    """One number of them all."""
    return sum(jnp.sum(jnp.sin(y)) for y in smooth(x, w, ids, is_sorted).values())


@functools.partial(jax.jit, static_argnames="is_sorted")
def gradients(x, w, ids, is_sorted=False):
    return jax.grad(loss, (0, 1))(x, w, ids, is_sorted)


@jax.jit
def all_orders(x, w, ids):
    """Gradients, their derivative in some direction, and the results."""
    f = lambda x, w: jax.grad(loss, (0, 1))(x, w, ids)
    return *jax.jvp(f, (x, w), (jnp.cos(x), jnp.sin(w))), smooth(x, w, ids)


# ------------------------------------------------------------------ derivatives


@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_of_first_and_second_order(order, x64):
    f = jax.jit(functools.partial(smooth, ids=IDS))
    args = floats((N, 1)), floats((N,), 1) + 3
    modes = ["fwd", "rev"] if order == 1 else ["rev"]
    check_grads(f, args, order=order, modes=modes, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_elements_of_no_segment_never_show(x64):
    x, w = np.asarray(floats((N, 2))), np.asarray(floats((N,), 1)) + 3
    outside = (IDS < 0) | (IDS >= S)
    x, w = np.where(outside[:, None], 0, x), np.where(outside, 0, w)
    bad_x, bad_w = garbage(x, IDS), garbage(w, IDS)
    expected = all_orders(x, w, IDS)
    assert_trees_close(all_orders(bad_x, bad_w, IDS), expected)
    # Sorted, the same elements have the same gradients.
    order = np.argsort(IDS, kind="stable")
    got = gradients(bad_x[order], bad_w[order], IDS[order], is_sorted=True)
    assert_trees_close(got, jax.tree.map(lambda y: np.asarray(y)[order], expected[0]))


def test_products_with_zeros_have_all_derivatives(x64):
    # No zero, one, two, and the elements of a segment apart from one another.
    ids = np.array([0, 1, 1, 2, 0, 2, 2, -1])
    x = jnp.array([2.0, 0.0, 3.0, 0.0, 5.0, 0.0, 7.0, 0.0])

    def apart(x):
        return jnp.stack([jnp.prod(x[np.flatnonzero(ids == s)]) for s in range(3)])

    def derivatives(f):
        all_of = (jax.jacrev, jax.jacfwd, jax.hessian)
        return [derivative(f)(x) for derivative in all_of]

    ours_ = functools.partial(sj.segment_prod, segment_ids=ids, num_segments=3)
    assert_trees_close(*jax.jit(lambda: (derivatives(ours_), derivatives(apart)))())


def test_ties_share_the_gradient_evenly_as_in_jnp():
    x = np.array([1.0, 5.0, 5.0, 2.0, 5.0, 2.0], np.float32)
    ids = jnp.array([0, 0, 0, 1, 0, 1])
    whole = lambda x: sj.segment_max(x, np.zeros(6, np.int32), 1)[0]
    first = lambda x: sj.segment_max(x, ids, 2)[0]

    @jax.jit
    def run(x, with_nan):
        jacobians = []
        for name, sign in (("max", 1), ("min", -1)):
            f = lambda x, g=ours(name), s=sign: s * g(s * x, ids, 2)
            jacobians += [jax.jacrev(f)(x), jax.jacfwd(f)(x)]
        pair = jax.grad(whole)(x), jax.grad(jnp.max)(x)
        return jacobians, pair, jax.grad(first)(with_nan)

    jacobians, (of_one, of_jnp), nan = run(x, np.array([np.nan, *x[1:]], x.dtype))
    expected = [[0, 1 / 3, 1 / 3, 0, 1 / 3, 0], [0, 0, 0, 0.5, 0, 0.5]]
    assert len(jacobians) == 4
    for jacobian in jacobians:
        np.testing.assert_allclose(jacobian, expected, rtol=1e-6)
    np.testing.assert_allclose(of_one, of_jnp, rtol=1e-6)
    assert nan.tolist() == [1, 0, 0, 0, 0, 0]


def test_segments_of_minus_infinity_have_no_gradient():
    x = jnp.array([-np.inf, -np.inf, 1.0, -np.inf])
    ids = jnp.array([0, 0, 1, 1])
    names = "logsumexp", "logmeanexp", "softmax"

    @jax.jit
    def run(x, ones):
        found = {}
        for name in names:
            f = lambda x, g=ours(name): (
                g(x, ids, 3) @ jnp.arange(1.0, len(g(x, ids, 3)) + 1)
            )
            found[name] = jax.jvp(jax.grad(f), (x,), (ones,))
        return found

    for name, (gradient, curved) in run(x, np.ones(4, np.float32)).items():
        np.testing.assert_array_equal(np.asarray(gradient)[:2], [0, 0], err_msg=name)
        assert np.isfinite(gradient).all() and np.isfinite(curved).all(), name


def test_a_deviation_of_zero_has_gradient_zero():
    ids, ones = jnp.array([0, 0, 1]), np.ones(3, np.float32)
    f = lambda x: jnp.sum(sj.segment_std(x, ids, 3))
    assert jax.jit(jax.grad(f))(jnp.array([2.0, 2.0, 5.0])).tolist() == [0, 0, 0]
    f = lambda w: jnp.sum(sj.segment_sqrtn(ones, ids, 3, weights=w))
    assert jax.jit(jax.grad(f))(jnp.array([1.0, 1.0, 0.0])).tolist()[2] == 0


def test_top_k_hands_its_gradient_to_what_it_took():
    x, ids = floats((N, 2), dtype=np.float32), jnp.asarray(IDS)
    _, positions = reductions.top_k(x, IDS, S, 2)
    f = lambda x: jnp.sum(sj.segment_top_k(x, ids, S, k=2)[0])
    gradient = jax.jit(jax.grad(f))(x)
    expected = np.zeros(x.shape, np.float32)
    for s, where in enumerate(reductions.members(IDS, S)):
        for c in range(2):
            taken = positions[s, :, c]
            expected[where[taken[taken >= 0]], c] = 1
    np.testing.assert_array_equal(gradient, expected)


# ------------------------------------------------------------------ vmap, shard_map


@pytest.mark.parametrize("axes", [(0, None), (None, 1), (1, 0)])
def test_vmap_over_data_ids_and_both(axes):
    x_axis, ids_axis = axes
    x = [garbage(floats((N, 2), seed, np.float32), IDS) for seed in range(3)]
    ids = [np.roll(IDS, k) for k in range(3)]
    x = x if x_axis is not None else [x[0]] * 3
    ids = ids if ids_axis is not None else [ids[0]] * 3
    w = np.ones(N, np.float32)
    f = lambda x, ids, w: (reductions.all_of(S, False)(x, ids, w), gradients(x, w, ids))
    together = jax.jit(jax.vmap(f, in_axes=(*axes, None)))(
        x[0] if x_axis is None else np.stack(x, x_axis),
        ids[0] if ids_axis is None else np.stack(ids, ids_axis),
        w,
    )
    one_by_one = [f(x, ids, w) for x, ids in zip(x, ids)]
    expected = jax.tree.map(lambda *ys: np.stack(ys), *one_by_one)
    assert_trees_close(together, expected, rtol=1e-5, atol=1e-5)


def over_eight(f, in_specs, out_specs):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@pytest.mark.usefixtures("eight_devices")
def test_parts_of_segments_are_put_together_inside_shard_map():
    x = floats((32, 2), dtype=np.float32)
    ids = np.random.default_rng(1).integers(-1, S + 1, 32).astype(np.int32)

    def parts(x, ids):
        total = jax.lax.psum(sj.segment_sum(x, ids, S), "i")
        top = jax.lax.pmax(jax.lax.stop_gradient(sj.segment_max(x, ids, S)), "i")
        return total, top

    def plain(x, ids):
        return sj.segment_sum(x, ids, S), sj.segment_max(x, ids, S)

    def with_gradient(f):
        square = lambda x, ids: jnp.sum(jnp.square(f(x, ids)[0]))
        return jax.jit(lambda x, ids: (f(x, ids), jax.grad(square)(x, ids)))(x, ids)

    found = with_gradient(over_eight(parts, (P("i"), P("i")), (P(), P())))
    expected = with_gradient(plain)
    assert_trees_close(found[0], expected[0], atol=1e-6)
    assert_trees_close(found[1], expected[1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("eight_devices")
def test_columns_are_reduced_apart_inside_shard_map():
    x = floats((N, 8), dtype=np.float32)
    f = lambda x, ids: (
        sj.segment_top_k(x, ids, S, k=2),
        sj.segment_softmax(x, ids, S)[None],
    )
    columns = over_eight(f, (P(None, "i"), P()), P(None, None, "i"))
    assert_trees_close(jax.jit(columns)(x, IDS), jax.jit(f)(x, IDS))


@pytest.mark.usefixtures("eight_devices")
def test_mesh_axes_that_types_carry():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    x, w = floats((16, 2), dtype=np.float32), floats((16,), 1, np.float32)
    ids = np.arange(16, dtype=np.int32) % S
    with jax.set_mesh(mesh):
        laid_out = [jax.device_put(y, jax.NamedSharding(mesh, P("i"))) for y in (x, w)]

        @jax.jit
        def f(x, w, ids):
            out = sj.segment_sum(x, ids, S, weights=w, out_sharding=P())
            return out, sj.segment_max(x, ids, S, out_sharding=P())

        total, top = f(*laid_out, jax.device_put(ids, jax.NamedSharding(mesh, P("i"))))
    assert_trees_close(total, sj.segment_sum(x, ids, S, weights=w), atol=1e-6)
    assert_trees_close(top, sj.segment_max(x, ids, S))


# ------------------------------------------------------------------ with tables


@pytest.mark.parametrize("name", ["mean", "max", "logsumexp"])
def test_a_table_read_through_a_reduction_has_a_sparse_gradient(name):
    table = floats((101, 3), dtype=np.float32)
    ids, segment_ids = jnp.array([3, 9, 3, 50, 2, 100, 1]), jnp.asarray(IDS)

    def loss(table):
        rows = sj.lookup(table, ids)
        out = ours(name)(rows, segment_ids, S, empty=0.5)
        return jnp.sum(jnp.sin(out))

    @jax.jit
    def run(table):
        gradient = sj.grad(loss)(table)
        return gradient, gradient.to_dense(), jax.grad(loss)(table)

    gradient, dense, expected = run(table)
    assert isinstance(gradient, sj.SelectedRows)
    assert_trees_close(dense, expected, atol=1e-6)


def test_elements_in_no_segments():
    """No segments though there are elements: a gradient of zeros."""
    total = lambda x: sum(
        jnp.sum(y) for y in reductions.smooth_of(0)(x, 0 * IDS).values()
    )
    assert not jax.grad(total)(floats((N, 2), dtype=np.float32)).any()
