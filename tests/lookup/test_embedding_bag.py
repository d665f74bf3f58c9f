"""embedding_bag: every combiner and layout, against rows and masks."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import sparsejax as sj
from helpers import (
    assert_in_place,
    assert_no_dense,
    assert_trees_close,
    compile_as_users_do,
    eqns_of,
    jitted,
)
from sparsejax._lookup.bag_sum import bag_sum
from sparsejax._lookup.lowerings import cpu, xla


COMBINERS = ("sum", "mean", "sqrtn", "max", "min", "logsumexp")
V, D = 23, 3


def _oracle(table, ids, member, weights, combiner):
    """Ids `[n]` and `member[b, i]`, which is True if element i is in bag b."""
    rows = jnp.take(table, ids, axis=0, mode="fill")[None]
    w = jnp.ones(ids.shape, table.dtype) if weights is None else weights
    w = jnp.where(member, w[None], 0)
    mask = member[:, :, None]
    some = jnp.any(member, 1)[:, None]
    if combiner in ("max", "min", "logsumexp"):
        reduce = {"max": jnp.max, "min": jnp.min, "logsumexp": jax.nn.logsumexp}
        lowest = np.inf if combiner == "min" else -np.inf
        x = jnp.where(mask | ~some[:, :, None], rows, lowest)
        return jnp.where(some, reduce[combiner](x, axis=1), 0)
    total = jnp.sum(jnp.where(mask, w[:, :, None] * rows, 0), axis=1)
    if combiner == "sum":
        return total
    by = jnp.sum(w if combiner == "mean" else w * w, axis=1, keepdims=True)
    by = jnp.where(by == 0, 1, by)
    return total / (by if combiner == "mean" else jnp.sqrt(by))


def _table(dtype=jnp.float64):
    table = np.random.default_rng(0).normal(size=(V, D))
    return jnp.asarray(table.astype(dtype))


def _layouts():
    """`name -> (call(table, weights, **options), ids [n], member [B, n])`."""
    rng = np.random.default_rng(1)
    found = {}
    padded = rng.integers(0, V, (4, 11)).astype(np.int32)
    padded[2, 3:], padded[3], padded[0, 1] = -1, -1, padded[0, 0]
    member = np.repeat(np.eye(4, dtype=bool), 11, axis=1) & (padded.reshape(-1) >= 0)

    def fixed(table, weights, **options):
        w = None if weights is None else weights.reshape(4, 11)
        return sj.embedding_bag(table, padded, weights=w, padding_id=-1, **options)

    found["fixed"] = fixed, padded.reshape(-1), member
    ids = rng.integers(0, V, 60).astype(np.int32)
    for name, bags, kwargs in (
        ("sorted", np.sort(rng.integers(-2, 6, 60)), {"indices_are_sorted": True}),
        ("unsorted", rng.integers(-2, 6, 60), {}),
        ("tiny", np.sort(rng.integers(0, 60, 60)), {"indices_are_sorted": True}),
    ):
        count = 60 if name == "tiny" else 5
        bags = bags.astype(np.int32)

        def segmented(table, weights, bags=bags, count=count, kwargs=kwargs, **options):
            return sj.embedding_bag(
                table, ids, bags, count, weights=weights, **kwargs, **options
            )

        found[name] = segmented, ids, bags == np.arange(count)[:, None]
    lengths = np.array([9, 0, 20, 1])
    st = sj.SegmentTensor.from_lengths(ids[:30], lengths, capacity=40)
    member = np.asarray(st.segment_ids) == np.arange(4)[:, None]

    def segments(table, weights, **options):
        return sj.embedding_bag(table, st, weights=weights, **options)

    found["segments"] = segments, np.resize(ids[:30], 40), member
    return found


LAYOUTS = _layouts()


# These layouts only change the order or the count of the elements that are combined.
FEW = {
    "unsorted": ("mean", "min", "logsumexp"),
    "tiny": ("sum", "max"),
    "segments": ("sqrtn", "logsumexp"),
}


def _loss(out, factors):
    return sum(f * jnp.sum(jnp.sin(x)) for f, x in zip(factors, out)), out


@functools.cache
def _oracle_step(weighted):
    """The oracles' values and gradients, one program for all the layouts."""

    def loss(table, weights, ids, member, factors):
        combiners = COMBINERS[:3] if weighted else COMBINERS
        out = [_oracle(table, ids, member, weights, c) for c in combiners]
        return _loss(out, factors)

    return jax.jit(jax.value_and_grad(loss, (0, 1)[: 1 + weighted], has_aux=True))


# ------------------------------------------------------------------ values, gradients


@pytest.mark.parametrize(
    ("layout", "weighted"),
    [(layout, False) for layout in LAYOUTS]
    + [(layout, True) for layout in ("fixed", "sorted")],
)
def test_equals_the_oracle(layout, weighted, x64):
    call, ids, member = LAYOUTS[layout]
    count, n = member.shape
    table, weights = _table(), None
    if weighted:
        weights = np.random.default_rng(2).normal(size=ids.shape)
        weights = np.where(member.any(0), weights, np.nan)  # never used
    every = COMBINERS[:3] if weighted else COMBINERS
    combiners = FEW.get(layout, every)
    factors = np.array([c in combiners for c in every], float)

    # For the oracle, elements of no bag and bags of no element up to one shape.
    more = (0, 60 - n)
    padded = np.pad(np.maximum(ids, 0), more), np.pad(member, ((0, 60 - count), more))
    clean = None
    if weights is not None:
        clean = np.pad(np.where(member.any(0), weights, 0), more)
    (_, out), grads = _oracle_step(weighted)(table, clean, *padded, factors)
    out = [x for c, x in zip(every, out, strict=True) if c in combiners]
    grads = [grads[0], *(g[:n] for g in map(np.asarray, grads[1:]))]

    def loss(table, weights):
        out = [call(table, weights, combiner=c) for c in combiners]
        return _loss(out, [1.0] * len(out))

    wrt = (0, 1)[: 1 + weighted]
    dense_step = jax.value_and_grad(loss, wrt, has_aux=True)
    tables: Any = (True, False)[: 1 + weighted]
    sparse_step = sj.value_and_grad(loss, wrt, has_aux=True, tables=tables)

    @jax.jit
    def run(table, weights):
        found = sparse_step(table, weights)
        return dense_step(table, weights), found, found[1][0].to_dense()

    *both, sparse_grad = run(table, weights)
    for (_, got), (g, *g_weights) in both:
        for a, b in zip(got, out, strict=True):
            assert a.dtype == jnp.float64
            assert a.shape == (count, D)
            np.testing.assert_allclose(a, np.asarray(b)[:count], rtol=1e-10, atol=1e-10)
        if isinstance(g, sj.SelectedRows):
            assert g.capacity == len(combiners) * ids.size
            g = sparse_grad
        for a, b in zip((g, *g_weights), grads, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    assert isinstance(both[1][1][0], sj.SelectedRows)


@pytest.mark.slow
def test_derivatives(x64):
    """Forward and reverse, and both of the gradient, as of `table[ids]`."""
    ids, bags = jnp.array([3, 0, 3, 9]), jnp.array([1, 0, 1, 1])
    args = _table(), jnp.linspace(0.5, 1.5, 4)

    def bag(table, weights):
        flat = sj.embedding_bag(table, ids, bags, 2, weights=weights, combiner="mean")
        return flat + sj.embedding_bag(
            table, ids.reshape(2, 2), weights=weights.reshape(2, 2)
        )

    def plain(table, weights):
        member = jnp.array([[0.0, 1, 0, 0], [1, 0, 1, 1]]) * weights[None]
        mean = member @ table[ids] / member.sum(axis=1, keepdims=True)
        return mean + (table[ids] * weights[:, None]).reshape(2, 2, D).sum(1)

    def derivatives(f):
        gradient = jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1))
        along = lambda *args: sum(map(jnp.vdot, gradient(*args), args))
        return (
            jax.jvp(f, args, args),
            jax.jvp(gradient, args, args),
            jax.grad(along, (0, 1))(*args),
        )

    got, want = jax.jit(lambda: (derivatives(bag), derivatives(plain)))()
    assert_trees_close(got, want, rtol=1e-10)


@pytest.mark.slow
def test_weights_that_are_a_parameter_of_their_own(x64):
    """Such weights might be a table: nothing comes between them and the sum."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 40, (3, 2))
    params = {"table": rng.normal(size=(40, 3)), "weights": rng.normal(size=(3, 2))}

    def loss(p, bag):
        return jnp.sum(jnp.sin(bag(p["table"], p["weights"])))

    ours = lambda t, w: sj.embedding_bag(t, ids, weights=w)
    jaxs = lambda t, w: jnp.sum(t[ids] * w[..., None], axis=1)
    got = jax.jit(lambda p: sj.grad(loss)(p, ours))(params)
    want = jax.jit(lambda p: jax.grad(loss)(p, jaxs))(params)
    assert isinstance(got["table"], sj.SelectedRows)
    np.testing.assert_allclose(got["table"].to_dense(), want["table"], rtol=1e-12)
    np.testing.assert_allclose(got["weights"], want["weights"], rtol=1e-12)


def test_lowerings_give_what_the_reference_gives():
    rng = np.random.default_rng(3)
    table = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)

    cases = []

    def add(ids, bags=None, count: Any = None, is_sorted=False):
        ids = ids.astype(np.int32)
        for weights in (None, rng.normal(size=ids.shape).astype(np.float32)):
            spec = xla.BagSpec(
                segmented=bags is not None,
                weighted=weights is not None,
                num_bags=len(ids) if bags is None else count,
                indices_are_sorted=is_sorted,
            )
            cases.append((spec, [x for x in (ids, bags, weights) if x is not None]))

    for length in (1, 17):
        add(rng.integers(-3, V + 3, (5, length)))
    # Pieces of 8 elements, of 2, and of 8 of a single bag.
    for n, count in ((40, 3), (100, 30), (30, 1)):
        ids = rng.integers(-3, V + 3, n)
        bags = rng.integers(-1, count + 2, n).astype(np.int32)
        add(ids, np.sort(bags), count, is_sorted=True)
        if count == 3:
            add(ids, bags, count)

    @jax.jit
    def run(table, arrays):
        return [
            (cpu.bag_sum(table, *args, spec=spec), xla.bag_sum(table, *args, spec=spec))
            for (spec, _), args in zip(cases, arrays, strict=True)
        ]

    for (spec, _), (a, b) in zip(cases, run(table, [x for _, x in cases]), strict=True):
        assert a.shape == b.shape == (spec.num_bags, D) and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_types_are_summed_in_float32(dtype):
    table = np.full((4, 2), 0.01, dtype)
    ids = np.zeros((1, 3000), np.int32)
    totals = {"sum": 3000, "mean": 1, "sqrtn": 3000**0.5}

    @jax.jit
    def run(table, ids):
        both = (ids,), (ids[0], ids[0], 1)
        bag = functools.partial(sj.embedding_bag, table)
        return {c: [bag(*args, combiner=c) for args in both] for c in totals}

    for combiner, outs in run(table, ids).items():
        for out in outs:
            assert out.dtype == dtype
            exact = float(table[0, 0]) * totals[combiner]
            error = 2 * float(jnp.finfo(dtype).eps) + 1e-4
            np.testing.assert_allclose(np.float32(out), exact, rtol=error)


def test_float32_stays_float32_under_x64(x64):
    table = _table(jnp.float32)
    ids = jnp.asarray(np.zeros((4, 11), np.int64))
    weights = jnp.asarray(np.ones((4, 11), np.float64))
    assert ids.dtype == jnp.int64
    assert weights.dtype == jnp.float64
    for combiner in COMBINERS:
        w = weights if combiner in COMBINERS[:3] else None
        bag = functools.partial(sj.embedding_bag, combiner=combiner)
        out = jax.eval_shape(
            lambda t, i, w, bag=bag: bag(t, i, weights=w), table, ids, w
        )
        assert out.dtype == jnp.float32
    assert sj.embedding_bag(table, ids, weights=weights).dtype == jnp.float32


def test_integer_tables():
    table = np.arange(12, dtype=np.int32).reshape(6, 2)
    ids, bags = jnp.array([5, 0, 3]), jnp.array([1, 1, 0])
    bag = lambda table, **options: sj.embedding_bag(table, ids, bags, 3, **options)
    out, top, half, mean = jax.jit(
        lambda table, weights: (
            bag(table),
            bag(table, combiner="max"),
            bag(table, weights=weights),
            bag(table, combiner="mean"),
        )
    )(table, np.full(3, 0.5, np.float32))
    np.testing.assert_array_equal(out, [[6, 7], [10, 12], [0, 0]])
    np.testing.assert_array_equal(bag(table), out)
    assert out.dtype == top.dtype == jnp.int32
    np.testing.assert_array_equal(top, [[6, 7], [10, 11], [0, 0]])
    assert half.dtype == mean.dtype == jnp.float32
    np.testing.assert_array_equal(half, [[3, 3.5], [5, 6], [0, 0]])


@pytest.mark.parametrize("shape", [(7,), (7, 2, 3)])
def test_tables_of_other_ranks(shape):
    table = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    ids = jnp.array([[0, 6], [2, 2]])
    want = table[np.asarray(ids)].sum(1)
    np.testing.assert_allclose(sj.embedding_bag(table, ids), want, rtol=1e-6)

    @jax.jit
    def run(table):
        flat = sj.embedding_bag(table, ids.reshape(-1), jnp.array([0, 0, 1, 1]), 2)
        grad = sj.grad(lambda t: jnp.sum(sj.embedding_bag(t, ids) ** 2), tables=True)
        dense = jax.grad(lambda t: jnp.sum(t[ids].sum(1) ** 2))
        return flat, grad(table).to_dense(), dense(table)

    flat, sparse, dense = run(table)
    np.testing.assert_allclose(flat, want, rtol=1e-6)
    np.testing.assert_allclose(sparse, dense, rtol=1e-6)


def test_more_axes_of_bags():
    table = _table(jnp.float32)
    ids = np.arange(24, dtype=np.int32).reshape(2, 3, 4) % V
    weights = np.linspace(0, 1, 24, dtype=np.float32).reshape(2, 3, 4)
    out, rows = jax.jit(
        lambda table, weights: (
            sj.embedding_bag(table, ids, weights=weights),
            sj.embedding_bag(table, ids, combiner="none"),
        )
    )(table, weights)
    want = np.einsum("abld,abl->abd", np.asarray(table)[ids], weights)
    np.testing.assert_allclose(out, want, rtol=1e-5)
    assert rows.shape == (2, 3, 4, D)


# ------------------------------------------------------------------ modes, padding


def test_modes():
    table = np.arange(1.0, 9.0, dtype=np.float32).reshape(4, 2)
    ids = jnp.array([[0, 9], [1, -2], [2, 3]])
    bags = jnp.array([0, 0, 1, 1, 2, 2])
    cases: dict[str, dict[str, Any]] = {
        "fill": {},
        "zero": {"mode": "zero"},
        "clip": {"mode": "clip"},
        "mean of zeros": {"mode": "zero", "combiner": "mean"},
        "padded": {"padding_id": 9, "combiner": "max"},
    }

    @jax.jit
    def run(table, ids):
        bag = functools.partial(sj.embedding_bag, table, ids)
        flat = functools.partial(sj.embedding_bag, table, ids.reshape(-1), bags, 3)
        return (
            {name: bag(**options) for name, options in cases.items()},
            {c: (flat(combiner=c), bag(combiner=c)) for c in COMBINERS},
        )

    named, combined = run(table, ids)
    nan = [[np.nan] * 2] * 2
    np.testing.assert_array_equal(sj.embedding_bag(table, ids), [*nan, [12, 14]])
    np.testing.assert_array_equal(named["fill"], [*nan, [12, 14]])
    np.testing.assert_array_equal(named["zero"], [[1, 2], [3, 4], [12, 14]])
    np.testing.assert_array_equal(named["clip"], [[8, 10], [4, 6], [12, 14]])
    # an element that reads zeros still counts
    mean = named["mean of zeros"]
    np.testing.assert_array_equal(mean, [[0.5, 1], [1.5, 2], [6, 7]])
    np.testing.assert_array_equal(np.asarray(named["padded"])[0], [1, 2])
    for flat, fixed in combined.values():
        np.testing.assert_allclose(flat, fixed, rtol=1e-6)
        flat = np.asarray(flat)
        assert np.isnan(flat[:2]).all() and np.isfinite(flat[2]).all()


def test_a_row_out_of_range_leaves_the_others_their_gradients():
    table = np.arange(1.0, 9.0, dtype=np.float32).reshape(4, 2)
    loss = lambda t: jnp.sum(sj.embedding_bag(t, jnp.array([[0, 9], [2, 3]])))
    plain = lambda t: jnp.sum(jnp.take(t, jnp.array([0, 9, 2, 3]), axis=0))

    @jax.jit
    def run(table):
        sparse = sj.grad(loss, tables=True)(table)
        return jax.grad(plain)(table), jax.grad(loss)(table), sparse, sparse.to_dense()

    want, got, sparse, dense = run(table)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(dense, want)
    np.testing.assert_array_equal(sparse.rows, [0, 4, 2, 3])


@pytest.mark.slow
def test_mode_error():
    table = jnp.asarray(np.ones((4, 2), np.float32))
    call = lambda ids: sj.embedding_bag(table, ids, mode="error", padding_id=-1)
    np.testing.assert_array_equal(call(jnp.array([[0, -1]])), [[1, 1]])
    with pytest.raises(checkify.JaxRuntimeError, match="1 of 2 ids"):
        call(jnp.array([[0, 4]]))

    @jax.jit
    def run(table, ids):
        bag = functools.partial(sj.embedding_bag, mode="error")
        bags = [functools.partial(bag, combiner=c) for c in ("sum", "max")]
        return [checkify.checkify(bag)(table, ids)[0] for bag in bags]

    for error in run(table, jnp.array([[0, 4]])):
        assert "the first is 4 and the table has 4 rows" in error.get()
    bags = jnp.array([0, 1])  # an id of no bag is not read
    sj.embedding_bag(table, jnp.array([3, 99]), bags, 1, mode="error")


def test_what_is_skipped_may_hold_anything():
    table = np.ones((4, 2), np.float32)
    table[3] = np.nan
    weights = jnp.array([[2.0, np.nan, np.inf]])
    ids = jnp.array([[0, -1, -1]])

    def loss(table, weights):
        out = [
            sj.embedding_bag(
                table, ids, weights=weights, padding_id=-1, combiner=combiner
            )
            for combiner in ("sum", "mean", "sqrtn")
        ]
        return sum(jnp.sum(x) for x in out)

    value, (g, g_w) = jax.jit(jax.value_and_grad(loss, (0, 1)))(table, weights)
    np.testing.assert_allclose(value, 4 + 2 + 2)
    assert np.isfinite(g).all() and np.isfinite(g_w).all()


@pytest.mark.slow
def test_nothing_to_reduce():
    table = np.ones((4, 2), np.float32)
    none = np.zeros((0,), np.int32)
    calls = {
        (none.shape, 3): lambda bag: bag(none, none, 3),
        (none.shape, 0): lambda bag: bag(none, none),
        ((2, 0), 2): lambda bag: bag(none.reshape(2, 0)),
        ((0, 2), 0): lambda bag: bag(none.reshape(0, 2)),
        # ids, but no bag
        ((2,), 0): lambda bag: bag(jnp.array([1, 2]), np.array([-1, -1], np.int32)),
    }

    @jax.jit
    def run(table):
        bags = [
            functools.partial(sj.embedding_bag, table, combiner=c) for c in COMBINERS
        ]
        return [[call(bag) for bag in bags] for call in calls.values()]

    for (_, count), outs in zip(calls, run(table), strict=True):
        for out in outs:
            assert out.shape == (count, 2)
            np.testing.assert_array_equal(out, np.zeros((count, 2)))
    for (_, count), call in calls.items():  # outside of jit too
        out = call(functools.partial(sj.embedding_bag, table))
        np.testing.assert_array_equal(out, np.zeros((count, 2)))
    empty = np.ones((0, 2), np.float32)
    out = sj.embedding_bag(empty, jnp.array([[3, 4]]), mode="zero")
    np.testing.assert_array_equal(out, [[0, 0]])


def test_max_norm_and_pulled_rows():
    table = np.asarray(_table(jnp.float32))
    ids, bags = jnp.array([1, 7, 7, 20]), jnp.array([0, 0, 1, 1])
    options: dict[str, Any] = dict(max_norm=0.7, combiner="mean")
    norm = lambda t: sj.embedding_bag(t, ids, bags, 2, **options)
    loss = lambda t: jnp.sum(norm(t) ** 2)
    rows = np.array([20, 1, 7, V], np.int32)
    pulled = sj.SelectedRows(rows, table[[20, 1, 7, 0]], V)

    @jax.jit
    def run(table, pulled):
        read = sj.lookup(table, ids, max_norm=0.7)
        g = sj.grad(loss)(pulled)
        return read, norm(table), norm(pulled), g, g.to_dense(), jax.grad(loss)(table)

    read, of_table, of_pulled, g, sparse, dense = run(table, pulled)
    read = np.asarray(read)
    want = np.stack([read[:2].mean(0), read[2:].mean(0)])
    np.testing.assert_allclose(of_table, want, rtol=1e-5)
    np.testing.assert_allclose(of_pulled, want, rtol=1e-5)
    np.testing.assert_array_equal(g.rows, pulled.rows)
    np.testing.assert_allclose(sparse, dense, rtol=1e-4)


# ------------------------------------------------------------------ vmap, programs


def _both_layouts(table, ids, bags, weights):
    return (
        sj.embedding_bag(table, ids, bags, 3, weights=weights, indices_are_sorted=True),
        sj.embedding_bag(table, ids.reshape(4, 5), weights=weights.reshape(4, 5)),
    )


@pytest.mark.window
@pytest.mark.parametrize(
    "axes", [(None, 0, 0, 0), (0, 0, None, None), (None, 0, None, 0)]
)
def test_under_vmap(axes):
    rng = np.random.default_rng(5)
    table = rng.normal(size=(3, V, D)).astype(np.float32)
    ids = rng.integers(0, V, (3, 20)).astype(np.int32)
    bags = np.sort(rng.integers(-1, 4, (3, 20)), axis=1).astype(np.int32)
    weights = rng.normal(size=(3, 20)).astype(np.float32)
    args = [x if a == 0 else x[0] for x, a in zip((table, ids, bags, weights), axes)]
    outs = jax.jit(jax.vmap(_both_layouts, axes))(*args)
    for k in range(3):
        ones = jitted(_both_layouts)(
            *(x[k] if a == 0 else x for x, a in zip(args, axes))
        )
        for got, one in zip(outs, ones, strict=True):
            np.testing.assert_allclose(np.asarray(got)[k], one, rtol=1e-5, atol=1e-5)


@pytest.mark.window
@pytest.mark.usefixtures("eight_devices")
def test_under_shard_map():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    table = _table(jnp.float32)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, V, (8, 4)), jnp.int32)

    def loss(t):
        local = lambda t, i: sj.embedding_bag(t, i, combiner="mean")
        split = jax.shard_map(
            local, mesh=mesh, in_specs=(spec(), spec("x")), out_specs=spec("x")
        )
        out = split(t, ids)
        return jnp.sum(jnp.sin(out))

    plain = lambda t: jnp.sum(jnp.sin(t[ids].mean(1)))
    want = jax.jit(jax.grad(plain))(table)
    got = jax.jit(sj.grad(loss, tables=True))(table)
    np.testing.assert_allclose(got.to_dense(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.window
def test_the_rows_read_are_no_array():
    table = jnp.asarray(np.ones((5000, 16), np.float32))
    ids = jnp.asarray(np.zeros((32, 24), np.int32))
    rows = ids.size * 16

    def largest(f, *args):
        return max(
            (np.prod(v.aval.shape) for e in eqns_of(f, *args) for v in e.outvars),
            default=0,
        )

    def temporaries(f, *args):
        memory = compile_as_users_do(jax.jit(f).lower(*args)).memory_analysis()
        # A GPU keeps rows as few as these, and fuses larger bags.
        is_cpu = jax.default_backend() == "cpu"
        return memory.temp_size_in_bytes if memory and is_cpu else 0

    ones = jnp.asarray(np.ones(ids.shape, np.float32))
    for combiner, weights in (("sum", None), ("mean", None), ("sqrtn", ones)):
        bag = functools.partial(sj.embedding_bag, weights=weights, combiner=combiner)
        assert largest(bag, table, ids) < rows
        assert temporaries(bag, table, ids) < rows

    def loss(table, ids, weights):
        return jnp.sum(sj.embedding_bag(table, ids, weights=weights) ** 2)

    # The sparse gradient has a row for each id, but is an output, no temporary.
    for transform in (sj.value_and_grad, jax.value_and_grad):
        assert temporaries(transform(loss), table, ids, ones) < rows
    assert_no_dense(sj.value_and_grad(loss), table, ids, ones)


@pytest.mark.window
def test_a_step_is_in_place_and_compiles_once():
    tx = sj.optim.lazy(optax.sgd(0.1))
    table = jnp.ones((4000, 8))

    def loss(table, ids, bags):
        return jnp.sum(sj.embedding_bag(table, ids, bags, 6, combiner="mean") ** 2)

    def step(table, ids, bags):
        g = sj.grad(loss)(table, ids, bags)
        updates, _ = tx.update(g, tx.init(table), table)
        return optax.apply_updates(table, updates)

    batch = np.arange(30, dtype=np.int32) * 7, np.arange(30, dtype=np.int32) // 5
    assert_in_place(step, table, *batch)
    compiled = jax.jit(chex.assert_max_traces(step, 1))
    for shift in range(3):
        table = compiled(table, batch[0] + shift, batch[1] % (shift + 1))


@pytest.mark.window
@pytest.mark.usefixtures("eight_devices")
def test_bag_sum_of_a_laid_out_table_is_plain():
    """Explicit meshes carry layouts in types, which the primitive does not know."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec
    with jax.set_mesh(mesh):
        ids = jnp.zeros((4, 3), jnp.int32)
        table = jax.device_put(jnp.ones((6, 2)), jax.NamedSharding(mesh, spec()))
        names = {e.primitive.name for e in eqns_of(bag_sum, table, ids)}
    assert "bag_sum" not in names


@pytest.mark.parametrize("combiner", ["sum", "max", "none"])
def test_numpy_ids_beyond_32_bits(combiner):
    """JAX would cut them to 32 bits, to ids in range."""
    table = jnp.arange(6.0).reshape(3, 2)
    ids = np.array([2**32 + 1, 1, 2**40, -(2**32) + 2])
    near, bags = np.array([3, 1, -1, -1]), np.arange(4)
    bag = functools.partial(sj.embedding_bag, table, combiner=combiner, mode="zero")
    want = bag(near, bags, 4)
    np.testing.assert_array_equal(bag(ids, bags, 4), want)
    np.testing.assert_array_equal(bag(ids[:, None]).reshape(4, 2), want)
    # The padding id is compared with the ids as they were given.
    padded = functools.partial(bag, mode="fill", padding_id=2**40)
    want = padded(near, bags, 4, padding_id=-1).at[3].set(np.nan)
    for got in padded(ids, bags, 4), padded(ids[:, None]).reshape(4, 2):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("weighted", [False, True])
def test_ids_in_no_bags(weighted):
    """No bags though there are ids: an empty result, and a gradient of zeros."""
    table, ids, none = jnp.ones((V, D)), jnp.array([1, 2, 2]), jnp.zeros(3, jnp.int32)
    w = jnp.ones(3) if weighted else None
    combiners = COMBINERS[:3] if weighted else COMBINERS
    pulled = sj.SelectedRows(ids, jnp.ones((3, D)), V)

    def bags(table):
        bag = functools.partial(sj.embedding_bag, table, ids, none, 0, weights=w)
        return [bag(combiner=c) for c in combiners]

    for some in (table, pulled, sj.quantize(table, 4)):
        for out in (*bags(some), *jax.jit(bags)(some)):
            assert out.shape == (0, D)
    total = lambda t: sum(x.sum() for x in bags(t))
    for grad in (jax.grad, sj.grad, lambda f: sj.grad(f, tables=True)):
        g = jax.jit(grad(total))(table)
        g = g if isinstance(g, jax.Array) else g.to_dense()
        np.testing.assert_array_equal(g, jnp.zeros((V, D)))
    offsets = sj.SegmentTensor.from_offsets(ids, [0])
    assert not jax.grad(lambda t: sj.embedding_bag(t, offsets).sum())(table).any()
