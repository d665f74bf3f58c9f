"""embedding_bag, against rows and masks in plain JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import sparsejax as sj
from helpers import (
    assert_no_dense,
    assert_trees_close,
    compile_as_users_do,
    eqns_of,
    jitted,
)


COMBINERS = ("sum", "mean", "sqrtn", "max", "min", "logsumexp")
V, D = 23, 3
TABLE = np.random.default_rng(0).normal(size=(V, D))


def _oracle(rows, member, weights, combiner):
    """Rows `[n, D]` and `member[b, i]`, which is True if element i is in bag b."""
    w = jnp.ones(len(rows), rows.dtype) if weights is None else weights
    w, rows = jnp.where(member, w[None], 0), rows[None]
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


def _layouts():
    """Arguments, options, ids, the bag of each id, the number of bags."""
    rng = np.random.default_rng(1)
    padded = rng.integers(0, V, (4, 11))
    padded[2, 3:], padded[3], padded[0, 1] = -1, -1, padded[0, 0]
    of_padded = np.where(padded < 0, -1, np.arange(4)[:, None])
    ids, some = rng.integers(0, V, 60), rng.integers(-2, 6, 60)
    tiny = np.sort(rng.integers(0, 60, 60))
    ascend = {"indices_are_sorted": True}
    st = sj.SegmentTensor.from_lengths(ids[:30], [9, 0, 20, 1], capacity=40)
    return {
        "fixed": ((padded,), {"padding_id": -1}, padded, of_padded, 4),
        "sorted": ((ids, np.sort(some), 5), ascend, ids, np.sort(some), 5),
        "unsorted": ((ids, some, 5), {}, ids, some, 5),
        "tiny": ((ids, tiny, 60), ascend, ids, tiny, 60),
        "segments": ((st,), {}, np.resize(ids[:30], 40), st.segment_ids, 4),
    }


LAYOUTS = _layouts()
# These layouts only change the order or the count of the elements that are combined.
FEW = {
    "unsorted": ("mean", "min", "logsumexp"),
    "tiny": ("sum", "max"),
    "segments": ("sqrtn", "logsumexp"),
}


# ------------------------------------------------------------------ values, gradients


@pytest.mark.parametrize(
    ("layout", "weighted"),
    [(layout, False) for layout in LAYOUTS] + [("fixed", True), ("sorted", True)],
)
def test_equals_the_oracle(layout, weighted, x64):
    args, options, ids, bags, count = LAYOUTS[layout]
    member = np.ravel(bags) == np.arange(count)[:, None]
    weights, wrt, combiners = None, 0, FEW.get(layout, COMBINERS)
    if weighted:
        weights = np.random.default_rng(2).normal(size=ids.shape)
        weights[~member.any(0).reshape(ids.shape)] = np.nan  # never used
        wrt, combiners = (0, 1), COMBINERS[:3]

    def ours(table, weights):
        bag = functools.partial(sj.embedding_bag, table, *args, **options)
        return [bag(weights=weights, combiner=c) for c in combiners]

    def oracle(table, weights):
        flat, rows = None if weights is None else weights.ravel(), table[ids.ravel()]
        return [_oracle(rows, member, flat, c) for c in combiners]

    def step(transform, f, params, **options):
        def loss(*params):
            out = f(*params)
            return sum(jnp.sum(jnp.sin(x)) for x in out), out

        (_, out), grads = transform(loss, wrt, has_aux=True, **options)(*params)
        return out, *(grads if weighted else (grads,))

    @jax.jit
    def run(*params):
        tables = (True, None) if weighted else True
        out, sparse, *grads = step(sj.value_and_grad, ours, params, tables=tables)
        both = (out, sparse.to_dense(), *grads), step(jax.value_and_grad, ours, params)
        return both, sparse, step(jax.value_and_grad, oracle, params)

    both, sparse, want = run(TABLE, weights)
    assert isinstance(sparse, sj.SelectedRows)
    assert sparse.capacity == len(combiners) * ids.size
    for found in both:
        assert_trees_close(found[0], want[0], rtol=1e-10, atol=1e-10)
        assert_trees_close(found[1:], want[1:], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_derivatives(x64):
    """Forward and reverse, and both of the gradient, as of `table[ids]`."""
    ids, bags = jnp.array([3, 0, 3, 9]), jnp.array([1, 0, 1, 1])
    args = jnp.asarray(TABLE), jnp.linspace(0.5, 1.5, 4)

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


def test_narrow_types_are_summed_in_float32():
    dtype = jnp.bfloat16
    table, ids = np.full((4, 2), 0.01, dtype), np.zeros((1, 3000), np.int32)

    @jax.jit
    def run(table, ids):
        bag = functools.partial(sj.embedding_bag, table)
        layouts = (ids,), (ids[0], ids[0], 1)
        return [[bag(*args, combiner=c) for args in layouts] for c in COMBINERS[:3]]

    for outs, total in zip(run(table, ids), (3000, 1, 3000**0.5), strict=True):
        for out in outs:
            assert out.dtype == dtype
            exact = float(table[0, 0]) * total
            np.testing.assert_allclose(np.float32(out), exact, rtol=2**-7)


def test_float32_stays_float32_under_x64(x64):
    table, ids = TABLE.astype(np.float32), jnp.zeros((4, 11), jnp.int64)
    for combiner in COMBINERS:
        w = jnp.ones((4, 11)) if combiner in COMBINERS[:3] else None
        bag = functools.partial(sj.embedding_bag, combiner=combiner, weights=w)
        assert jax.eval_shape(bag, table, ids).dtype == jnp.float32


def test_integer_tables():
    table = np.arange(12, dtype=np.int32).reshape(6, 2)
    ids, bags = jnp.array([5, 0, 3]), jnp.array([1, 1, 0])
    half = np.full(3, 0.5, np.float32)
    options: Any
    for options, want in (
        ({}, np.array([[6, 7], [10, 12], [0, 0]], np.int32)),
        ({"combiner": "max"}, np.array([[6, 7], [10, 11], [0, 0]], np.int32)),
        ({"weights": half}, np.array([[3, 3.5], [5, 6], [0, 0]], np.float32)),
        ({"combiner": "mean"}, np.array([[6, 7], [5, 6], [0, 0]], np.float32)),
    ):
        bag = lambda table, o=options: sj.embedding_bag(table, ids, bags, 3, **o)
        assert_trees_close(bag(table), want)
        assert_trees_close(jax.jit(bag)(table), want)


@pytest.mark.parametrize(
    "row_shape, ids_shape", [((), (2, 2)), ((2, 3), (2, 2)), ((D,), (2, 3, 4))]
)
def test_tables_of_other_ranks_and_more_axes_of_bags(row_shape, ids_shape):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(7, *row_shape)).astype(np.float32)
    ids = rng.integers(0, 7, ids_shape)
    weights = rng.normal(size=ids_shape).astype(np.float32)
    count = ids.size // ids_shape[-1]
    bags = np.repeat(np.arange(count), ids_shape[-1])

    def outputs(table):
        bag = functools.partial(sj.embedding_bag, table)
        of_flat = bag(ids.ravel(), bags, count)
        rows = bag(ids, combiner="none")
        return bag(ids), of_flat, rows, bag(ids, weights=weights)

    def plain(table):
        rows = table[ids]
        total = jnp.sum(rows, ids.ndim - 1)
        weighted = rows * weights.reshape(*ids_shape, *[1] * len(row_shape))
        of_flat = total.reshape(count, *row_shape)
        return total, of_flat, rows, jnp.sum(weighted, ids.ndim - 1)

    @jax.jit
    def run(table):
        losses = [lambda t, f=f: jnp.sum(f(t)[0] ** 2) for f in (outputs, plain)]
        grad = sj.grad(losses[0], tables=True)(table).to_dense()
        return (outputs(table), grad), (plain(table), jax.grad(losses[1])(table))

    assert_trees_close(*run(table), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ modes, padding


FAR = V + 4
READS: list[dict[str, Any]] = [
    {},
    {"mode": "zero"},
    {"mode": "clip", "padding_id": 7},
    {"padding_id": FAR, "max_norm": 0.7},
]


@pytest.mark.parametrize("kind", ["array", "pulled"])
@pytest.mark.parametrize("options", READS, ids=str)
def test_reads_rows_as_lookup_does(options, kind):
    """In both layouts; gradients too, of which a row out of range takes none away."""
    table: Any = TABLE.astype(np.float32)
    if kind == "pulled":
        rows = np.array([20, 1, 7, V])
        table = sj.SelectedRows(rows, table[rows % V], V)
    combiners = COMBINERS[kind == "pulled" :: 2]
    ids = np.array([[1, 7, 7], [20, FAR, 1], [7, -2, 20], [1, 20, 20]])
    bags = np.repeat(np.arange(4), 3)
    is_read = ids.ravel() != options.get("padding_id")
    member = (bags == np.arange(4)[:, None]) & is_read

    def oracle(table, combiner):
        rows = sj.lookup(table, ids.ravel(), **options)
        return _oracle(rows, member, None, combiner)

    def fixed(table, combiner):
        return sj.embedding_bag(table, ids, combiner=combiner, **options)

    def flat(table, combiner):
        bag = functools.partial(sj.embedding_bag, combiner=combiner, **options)
        return bag(table, ids.ravel(), bags, 4)

    @jax.jit
    def run(table):
        found = []
        for f in (oracle, fixed, flat):
            loss = lambda t, f=f: jnp.sum(f(t, "sum") + f(t, "mean"))
            tables = {"tables": True} if kind == "array" else {}
            grads = sj.grad(loss, **tables)(table)
            found.append(([f(table, c) for c in combiners], grads.to_dense()))
        return found

    want, *both = run(table)
    assert options or np.isnan(want[0][0]).any()
    for found in both:
        assert_trees_close(found, want)


@pytest.mark.slow
def test_mode_error():
    """Ids of padding and of no bag are not read."""
    table = np.ones((4, 2), np.float32)
    bag = functools.partial(sj.embedding_bag, table, mode="error")
    np.testing.assert_array_equal(bag(np.array([[0, -1]]), padding_id=-1), [[1, 1]])
    bag(np.array([3, 99]), np.array([0, 1]), 1)
    with pytest.raises(checkify.JaxRuntimeError, match="1 of 2 ids"):
        bag(np.array([[0, 4]]))

    @jax.jit
    def run(ids):
        bags = [functools.partial(bag, combiner=c) for c in ("sum", "max")]
        return [checkify.checkify(bag)(ids)[0] for bag in bags]

    for error in run(jnp.array([[0, 4]])):
        assert "the first is 4 and the table has 4 rows" in error.get()


def test_what_is_skipped_may_hold_anything():
    table = np.array([[1, 1], [np.nan] * 2] * 2, np.float32)
    weights, ids = np.array([[2, np.nan, np.inf]], "f"), np.array([[0, -1, -1]])
    bag = functools.partial(sj.embedding_bag, padding_id=-1)

    def loss(table, weights):
        outs = [bag(table, ids, weights=weights, combiner=c) for c in COMBINERS[:3]]
        return sum(map(jnp.sum, outs))

    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(table, weights)
    np.testing.assert_allclose(value, 4 + 2 + 2)
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_to_reduce(weighted):
    """Bags without ids are zeros; without bags no row has a gradient."""
    table, ids, none = np.ones((V, D), "f"), np.array([1, 2, 2]), np.zeros(0, np.int32)
    no_bags: Any = [(ids, 0 * ids, 0), (sj.SegmentTensor.from_offsets(ids, [0]),)]
    no_ids: Any = [(none, none, 3), (none.reshape(2, 0),), (none.reshape(0, 2),)]
    combiners = COMBINERS[:3] if weighted else COMBINERS

    def bags(table, calls=no_bags, combiners: Any = combiners):
        sizes = [np.shape(getattr(args[0], "values", args[0])) for args in calls]
        weights = [jnp.ones(size) if weighted else None for size in sizes]
        return [
            sj.embedding_bag(table, *args, weights=w, combiner=c)
            for args, w in zip(calls, weights, strict=True)
            for c in combiners
        ]

    pulled = sj.SelectedRows(ids, table[:3], V)
    for some in (table, pulled, sj.quantize(table, 4)):
        assert all(x.shape == (0, D) for x in jax.jit(bags)(some))
    assert all(x.shape == (0, D) for x in bags(table, combiners=["sum"]))
    total = lambda t: sum(x.sum() for x in bags(t))
    grads = jax.grad(total), lambda t: sj.grad(total, tables=True)(t).to_dense()
    for g in jax.jit(lambda t: [grad(t) for grad in grads])(table):
        assert g.shape == (V, D) and not g.any()
    of_no_ids = functools.partial(bags, calls=no_ids)
    for found in of_no_ids(table, combiners=["sum"]), jax.jit(of_no_ids)(table):
        each = len(found) // 3
        for k, count in enumerate((3, 2, 0)):
            for out in found[k * each : (k + 1) * each]:
                np.testing.assert_array_equal(out, np.zeros((count, D)))
    empty = sj.embedding_bag(table[:0], jnp.array([[3, 4]]), mode="zero")
    np.testing.assert_array_equal(empty, np.zeros((1, D)))


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
        of_one = [x[k] if a == 0 else x for x, a in zip(args, axes)]
        for got, one in zip(outs, jitted(_both_layouts)(*of_one), strict=True):
            np.testing.assert_allclose(got[k], one, rtol=1e-5, atol=1e-5)


@pytest.mark.window
def test_the_rows_read_are_no_array():
    table, ids = jnp.ones((5000, 16)), jnp.zeros((32, 24), jnp.int32)
    ones, num_numbers = jnp.ones(ids.shape), ids.size * 16

    def largest(f, *args):
        shapes = [v.aval.shape for e in eqns_of(f, *args) for v in e.outvars]
        return max(map(np.prod, shapes))

    def temporaries(f, *args):
        memory = compile_as_users_do(jax.jit(f).lower(*args)).memory_analysis()
        # A GPU keeps rows as few as these, and fuses larger bags.
        is_cpu = jax.default_backend() == "cpu"
        return memory.temp_size_in_bytes if memory and is_cpu else 0

    for combiner, weights in (("sum", None), ("mean", None), ("sqrtn", ones)):
        bag = functools.partial(sj.embedding_bag, weights=weights, combiner=combiner)
        assert largest(bag, table, ids) < num_numbers
        assert temporaries(bag, table, ids) < num_numbers

    def loss(table, ids, weights):
        return jnp.sum(sj.embedding_bag(table, ids, weights=weights) ** 2)

    # The sparse gradient has a row for each id, but is an output, no temporary.
    for transform in (sj.value_and_grad, jax.value_and_grad):
        assert temporaries(transform(loss), table, ids, ones) < num_numbers
    assert_no_dense(sj.value_and_grad(loss), table, ids, ones)


@pytest.mark.parametrize("combiner", ["sum", "max", "none"])
def test_numpy_ids_beyond_32_bits(combiner):
    """JAX would cut them to 32 bits, to ids in range."""
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    ids = np.array([2**32 + 1, 1, 2**40, -(2**32) + 2])
    near, bags = np.array([3, 1, -1, -1]), np.arange(4)
    bag = functools.partial(sj.embedding_bag, table, combiner=combiner)
    options: Any
    # The padding id is compared with the ids as they were given.
    for options, expected in (
        ({"mode": "zero"}, bag(near, bags, 4, mode="zero")),
        ({"padding_id": 2**40}, bag(near, bags, 4).at[2].set(0)),
    ):
        both = lambda o=options: (bag(ids, bags, 4, **o), bag(ids[:, None], **o))
        for got in jax.jit(both)():
            np.testing.assert_array_equal(got.reshape(4, 2), expected)
