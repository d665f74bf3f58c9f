"""Programs that read a table by rows, each in a way JAX users do.

A program is `fun(table [V, D], w, ids int[n]) -> scalar`; `w` is a dense parameter of
shape [D]. `PROGRAMS` must come out sparse; `DENSE` must come out dense, and
raise a `DensifyError` with `tables=`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import sparsejax as sj


V, D, N = 211, 4, 5
PROGRAMS = {}
DENSE = {}


def sparse(fun):
    PROGRAMS[fun.__name__] = fun
    return fun


def dense(fun):
    DENSE[fun.__name__] = fun
    return fun


def _loss(rows, w):
    return jnp.sum(jnp.sin(rows * w))


def _sum_of(reads, w):
    return sum(_loss(rows, w) for rows in reads)


# -- every form of gather --------------------------------------------------------------

PROGRAMS |= {
    "index": lambda table, w, ids: _loss(table[ids], w),
    "index_out_of_range": lambda table, w, ids: _loss(table[ids * 60], w),
    # The gradient of a row that was read depends on one that was out of range.
    "index_out_of_range_mixed": lambda table, w, ids: (
        jnp.tanh(_loss(table[ids * 60], w)) ** 2
    ),
    "index_shapes": lambda table, w, ids: _sum_of(
        [table[jnp.stack([ids, ids[::-1]])], table[ids[0]], table[5], table[-1]]
        + [table[None, ids], table[ids, None], table[ids, :], table[3:9:2], table[:2]],
        w,
    ),
    "index_types": lambda table, w, ids: _sum_of(
        [table[i] for i in (ids.astype(jnp.uint8), ids.astype(jnp.int16), ids - 3)]
        + [table[np.array([1, 1, 7])]],
        w,
    ),
    "take": lambda table, w, ids: _loss(jnp.take(table, ids, axis=0), w),
    "take_modes": lambda table, w, ids: _sum_of(
        [
            jnp.take(table, ids * 60 - 20, axis=0, mode=mode, fill_value=0.0)
            for mode in ("fill", "clip", "wrap")
        ],
        w,
    ),
    "at_get": lambda table, w, ids: _sum_of(
        [
            table.at[ids * 60 - 20].get(mode="fill", fill_value=2.0),
            table.at[ids * 60 - 20].get(mode="promise_in_bounds"),
            table.at[ids - 9].get(
                mode="fill", fill_value=0.0, wrap_negative_indices=False
            ),
        ],
        w,
    ),
    "vmapped_index": lambda table, w, ids: _loss(jax.vmap(lambda i: table[i])(ids), w),
    "vmapped_otherwise": lambda table, w, ids: _sum_of(
        [
            jax.vmap(jax.vmap(lambda i: table[i]))(jnp.stack([ids, ids + 1])),
            jax.vmap(lambda i: table[i], out_axes=1)(ids).T,
            jax.vmap(lambda i: jnp.take(table, i, axis=0))(jnp.stack([ids, ids + 1])),
            jax.vmap(lambda i: lax.dynamic_slice(table, (i * 30, i * 0), (2, D)))(ids),
        ],
        w,
    ),
    "dynamic_slice": lambda table, w, ids: _sum_of(
        [
            lax.dynamic_index_in_dim(table, ids[1], 0),
            lax.dynamic_slice(table, (ids[0] * 30, ids[0]), (3, D)),
            lax.dynamic_slice_in_dim(table, 209, 4, 0),
        ],
        w,
    ),
    "lax_map": lambda table, w, ids: jnp.sum(
        lax.map(lambda i: _loss(table[i], w), ids)
    ),
    "lax_map_batched": lambda table, w, ids: jnp.sum(
        lax.map(lambda i: _loss(table[i], w), ids, batch_size=2)
    ),
}


@sparse
def lax_gather_windows(table, w, ids):
    dims = lax.GatherDimensionNumbers(
        offset_dims=(0, 2), collapsed_slice_dims=(), start_index_map=(0,)
    )
    read = lambda mode: lax.gather(
        table, ids[:, None] * 30, dims, (3, D), mode=mode, fill_value=1.0
    )
    return _sum_of([read("clip"), read("fill")], w)


@sparse
def lax_gather_windows_out_of_range(table, w, ids):
    dims = lax.GatherDimensionNumbers(
        offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,)
    )
    mode = "promise_in_bounds"
    read = lambda t: lax.gather(t, ids[:, None] * 60, dims, (3, D), mode=mode)
    return jnp.tanh(_loss(read(table), w)) ** 2 + _loss(read(table * w), w)


@sparse
def lax_gather_two_starts(table, w, ids):
    dims = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(1, 0)
    )
    starts = jnp.stack([(ids > 20).astype(ids.dtype), ids], axis=1)
    read = lambda mode: lax.gather(
        table, starts, dims, (1, D), mode=mode, fill_value=0.5
    )
    return _sum_of([read("clip"), read("fill")], w)


# -- the table passed on ---------------------------------------------------------------

PROGRAMS |= {
    "cast": lambda table, w, ids: _loss(
        table.astype(jnp.float32)[ids].astype(w.dtype), w
    ),
    "cast_bfloat16_take": lambda table, w, ids: _loss(
        jnp.take(table.astype(jnp.bfloat16), ids, axis=0).astype(w.dtype), w
    ),
    "scaled": lambda table, w, ids: _sum_of(
        [(table * 3.0)[ids], (2.0 * table / jnp.sum(w))[ids]], w
    ),
    "scaled_by_parameter": lambda table, w, ids: _loss(
        (table * w[0])[ids] + (-table)[ids], w
    ),
    "scaled_by_row_vector": lambda table, w, ids: _loss((table * w + w)[ids], w),
    "scaled_out_of_range": lambda table, w, ids: _sum_of(
        [
            (x * w + w[0]).at[ids * 60 - 20].get(mode=mode, fill_value=0.5)
            for mode in ("fill", "clip", "promise_in_bounds")
            for x in (table, lax.stop_gradient(table))
        ],
        w,
    ),
    "reshaped": lambda table, w, ids: _sum_of(
        [
            table.reshape(V, 2, D // 2)[ids].reshape(N, D),
            table[None][0, ids],
            table[:, None, :][ids][:, 0],
            jnp.squeeze(table[:, None], 1)[ids],
            table.T[:, ids].T,
            table.T.T[ids],
        ],
        w,
    ),
    "elementwise": lambda table, w, ids: _sum_of(
        [
            jnp.tanh(table)[ids],
            (table**2)[ids],
            ((1.5 + jnp.tanh(table)) ** (2.0 + w) + 3.0 ** jnp.tanh(table))[ids],
            jnp.arctan2(table, 3.0 + w[0])[ids],
        ],
        w,
    ),
    "unchanged": lambda table, w, ids: _sum_of(
        [
            table.copy()[ids],
            jnp.array(table)[ids],
            checkpoint_name(table, "t")[ids],
            lax.optimization_barrier((table, w))[0][ids],
            jax.named_call(lambda t: t)(table)[ids],
        ],
        w,
    ),
    "stopped_beside": lambda table, w, ids: (
        _loss(table[ids], w)
        + jnp.sum(lax.stop_gradient(table[ids + 1]))
        + jnp.sum(lax.stop_gradient(table) ** 2)
        + _loss(lax.stop_gradient(table)[ids], w)
    ),
    "compared_beside": lambda table, w, ids: (
        _loss(table[ids], w) * jnp.sum(table > 0.5) + jnp.argmax(table)
    ),
    "vmapped_scale": lambda table, w, ids: _sum_of(
        [
            jax.vmap(lambda s: (table * s)[ids])(w),
            jax.vmap(lambda s: (s - table).T[:, 3])(w),
        ],
        w,
    ),
}


@sparse
def jitted(table, w, ids):
    inner = jax.jit(lambda t, i: t[i])
    outer = jax.jit(lambda t: _loss(inner(t, ids) + inner(t, ids + 1), w))
    return outer(table) + _loss(jax.jit(lambda t: t * 2.0)(table)[ids], w)


@sparse
def broadcast_to_more(table, w, ids):
    a = w[:3, None, None] * table
    b = table[:, None] - table[ids][None]
    c = jnp.clip(jnp.ones((2, 1, 1)) - table, -0.5, w[0])
    # A row of this view has more axes than a row of the table.
    view = jnp.maximum(table[:, :, None], w[:3]) + w[None, None, :1]
    return _sum_of([a[:, ids], b[ids[:2]], c[:, ids]], w) + jnp.sum(jnp.sin(view[ids]))


@sparse
def vmapped_scale_and_index(table, w, ids):
    read = lambda s, i: jnp.clip(table * s, -1.0, s)[i]
    both = jax.vmap(read, (None, 1), out_axes=1)(w, jnp.stack([ids, ids + 1]))
    return _sum_of([jax.vmap(read)(w, ids[:D]), both], w)


@sparse
def vmapped_take_of_scaled(table, w, ids):
    far = jnp.stack([ids[:D] * 60, ids[:D] - 20], axis=1)
    read = lambda s, i: jnp.take(s + table, i, axis=0, fill_value=0.5)
    return _loss(jax.vmap(read)(w, far), w)


@sparse
def nearest_codeword(table, w, ids):
    x = jnp.stack([w, w + 1.0])
    distances = jnp.sum((x[:, None] - table[None]) ** 2, axis=-1)
    codes = table[jnp.argmin(distances, axis=1)]
    return jnp.sum((x - codes) ** 2) + _loss(table[ids], w)


@sparse
def indexed_by_the_table(table, w, ids):
    codes = jnp.clip(table[:, 0], 0.0, 3.0).astype(jnp.int32)
    return _loss(w[codes][:, None], w) + _loss(table[ids], w)


# -- control flow ----------------------------------------------------------------------


def _scanned(table, w, ids, start=0.0, **options):
    step = lambda c, i: (c + _loss(table[i], w), None)
    return lax.scan(step, start + 0.0 * w[0], ids, **options)[0]


PROGRAMS |= {
    "scanned": _scanned,
    "scanned_chain": lambda table, w, ids: jnp.sum(
        lax.scan(lambda h, i: (jnp.tanh(h * w + table[i]), None), 0.0 * w, ids)[0]
    ),
    "scanned_nested": lambda table, w, ids: lax.scan(
        lambda c, i: (_scanned(table, w, i + jnp.arange(3), c) * 1.1, None), w[0], ids
    )[0],
    "fori": lambda table, w, ids: lax.fori_loop(
        0, N, lambda k, c: c + _loss(table[ids[k]], w), 0.0 * w[0]
    ),
    "branch": lambda table, w, ids: lax.cond(
        ids[0] > 50,
        lambda: _loss(table[ids], w),
        lambda: _loss(table[ids[:2]], w) + _loss(table[ids[0]] * 2.0, w),
    ),
    "branch_without": lambda table, w, ids: lax.cond(
        ids[0] > 10, lambda t: _loss(t[ids], w), lambda t: 0.0 * w[0], table
    ),
    "scan_in_branch": lambda table, w, ids: lax.cond(
        jnp.sum(ids) > 0, lambda: _scanned(table, w, ids), lambda: w[1]
    ),
    "checkpointed": lambda table, w, ids: jax.checkpoint(lambda t, w: _loss(t[ids], w))(
        table, w
    ),
    "checkpointed_policy": lambda table, w, ids: jax.checkpoint(
        lambda t: _loss(t[ids] @ jnp.outer(w, w), w),
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    )(table),
    "custom_rules": lambda table, w, ids: _sum_of(
        [twice(table[ids]), half(table[ids]), jax.nn.relu(table[ids])], w
    ),
}


@sparse
def scanned_reverse_outputs(table, w, ids):
    def step(c, i):
        row = table[i] * c
        return c * 0.9 + 0.01 * jnp.sum(row), row

    c, rows = lax.scan(step, jnp.ones((), w.dtype), ids, reverse=True, unroll=2)
    return c + _loss(rows, w)


@sparse
def scanned_carry(table, w, ids):
    def step(carry, i):
        total, t = carry
        return (total + _loss(t[i], w), t), None

    return lax.scan(step, (jnp.zeros((), w.dtype), table), ids)[0][0]


@sparse
def switch(table, w, ids):
    branches = [
        lambda t: _loss(t[ids[:1]], w),
        lambda t: jnp.sum(w),
        lambda t: _scanned(t, w, ids, w[0]),
    ]
    return sum(lax.switch(ids[k] % 3, branches, table) for k in range(3))


@sparse
def branch_in_scan(table, w, ids):
    def step(c, i):
        even, odd = lambda: _loss(table[i], w), lambda: _loss(table[i] ** 2, w)
        return c + lax.cond(i % 2 == 0, even, odd), None

    return lax.scan(step, jnp.zeros((), w.dtype), ids)[0]


@sparse
def checkpointed_scan(table, w, ids):
    step = jax.checkpoint(lambda c, i: (c + _loss(table[i], w) * c, None))
    return lax.scan(step, jnp.ones((), w.dtype), ids)[0]


@sparse
def gradient_of_a_checkpointed_scan(table, w, ids):
    """JAX hoists values that do not change out of the scan, into a call."""

    def total(scale):
        @jax.checkpoint
        def outer(c, i):
            same = _scanned(table, scale * w, ids)
            return c * jnp.tanh(same) + _loss(table[i], scale * w), jnp.sin(c)

        last, each = lax.scan(outer, jnp.ones((), w.dtype), ids)
        return last + jnp.sum(each)

    return sum(jax.value_and_grad(total)(jnp.ones((), w.dtype)))


@sparse
def checkpointed_and_passed_on(table, w, ids):
    @jax.checkpoint
    def body(t, w):
        view = jnp.tanh(w) * t
        return _loss(view[ids], w), view.T, jax.checkpoint(lambda t: t)(t)

    total, view, same = body(table * 2.0, w)
    return total + _sum_of([view[:, ids].T, same[ids + 1]], w)


@sparse
def branch_and_passed_on(table, w, ids):
    branch = lambda scale: lambda t: (scale * _loss(t[ids], w), t)
    total, same = lax.cond(ids[0] > 20, branch(1.0), branch(2.0), table)
    return total + _loss(same[ids + 1], w)


@sparse
def while_beside(table, w, ids):
    k, _ = lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + jnp.sum(c[1])), (0, table)
    )
    return _loss(table[ids], w) * k


# Rules that are not the derivative.
twice = jax.custom_jvp(lambda x: 2.0 * x)
twice.defjvps(lambda t, ans, x: 3.0 * t)
half = jax.custom_vjp(lambda x: 0.5 * x)
half.defvjp(lambda x: (0.5 * x, None), lambda _, g: (0.25 * g,))


# -- bags ------------------------------------------------------------------------------


def _pairs(ids):
    """Three ids a bag, some of which are padding or out of range."""
    return jnp.stack([ids, ids + 1, jnp.where(ids > 50, -1, ids)], axis=1)


def _weights(w):
    return jnp.tanh(w[0] * jnp.arange(1, 16)).reshape(5, 3)


PROGRAMS |= {
    "bag_fixed": lambda table, w, ids: _loss(
        sj.embedding_bag(
            table, _pairs(ids), mode="zero", weights=_weights(w), combiner="sqrtn"
        ),
        w,
    ),
    "bag_ragged": lambda table, w, ids: _loss(
        sj.embedding_bag(
            table,
            sj.SegmentTensor.from_padded(_pairs(ids), filler=-1, capacity=15),
            combiner="mean",
        ),
        w,
    ),
    "bag_max": lambda table, w, ids: _loss(
        sj.embedding_bag(
            table, _pairs(ids), padding_id=-1, combiner="max", max_norm=0.5
        ),
        w,
    ),
    "bag_vmapped": lambda table, w, ids: _loss(
        jax.vmap(lambda i, v: sj.embedding_bag(table, i, i % 2, 2, weights=v))(
            jnp.abs(_pairs(ids)), _weights(w)
        ),
        w,
    ),
    "bag_of_a_view": lambda table, w, ids: _loss(
        sj.embedding_bag(
            (2.0 * table).reshape(V, 2, D // 2),
            _pairs(ids),
            mode="zero",
            weights=jnp.ones((5, 3)),
        ).reshape(N, D),
        w,
    ),
}


@sparse
def bag_in_control_flow(table, w, ids):
    @jax.checkpoint
    def step(total, i):
        small = lambda: sj.embedding_bag(table, i[None], mode="zero")
        large = lambda: sj.embedding_bag(table, i, i % 2, 1)
        return total + _loss(lax.cond(i[0] > 20, small, large), w), None

    return lax.scan(step, jnp.zeros((), w.dtype), _pairs(ids))[0]


# -- dense uses ------------------------------------------------------------------------

DENSE |= {
    "tied": lambda table, w, ids: jnp.sum(table[ids] @ table.T),
    "summed": lambda table, w, ids: jnp.sum(table**2) + _loss(table[ids], w),
    "columns": lambda table, w, ids: jnp.sum(table[ids, :2]),
    "elements": lambda table, w, ids: jnp.sum(jnp.sin(table[ids, ids % D])),
    "custom_jvp_table": lambda table, w, ids: _loss(twice(table)[ids], w),
    "custom_vjp_table": lambda table, w, ids: _loss(half(table)[ids], w),
    "scanned_over": lambda table, w, ids: lax.scan(
        lambda c, row: (c + _loss(row, w), None), 0.0 * w[0], table
    )[0],
    "carried_and_changed": lambda table, w, ids: jnp.sum(
        lax.scan(lambda t, i: (t * 0.9, _loss(t[i], w)), table, ids)[1]
    ),
    "written": lambda table, w, ids: _loss(table.at[ids].set(0.0)[ids + 1], w),
    "one_hot": lambda table, w, ids: _loss(
        jax.nn.one_hot(ids, V, dtype=table.dtype) @ table, w
    ),
    "merged_rows": lambda table, w, ids: _loss(
        jnp.concatenate([jnp.zeros((1, D), table.dtype), table])[ids], w
    ),
    "through_reference": lambda table, w, ids: _loss(jax.new_ref(table)[...][ids], w),
    "returned_by_branch": lambda table, w, ids: _loss(
        lax.cond(ids[0] > 50, lambda: table, lambda: 2.0 * table)[ids], w
    ),
}


@dense
def masked_gradient(table, w, ids):
    mask = (jnp.arange(V) % 2 == 0)[:, None]
    return _loss(jnp.where(mask, lax.stop_gradient(table), table)[ids], w)


def arguments(seed=0, dtype=jnp.float32):
    """`(table, w, ids)` with duplicates among the ids."""
    k1, k2 = jax.random.split(jax.random.key(seed))
    table = jax.random.normal(k1, (V, D), dtype)
    w = jax.random.normal(k2, (D,), dtype)
    ids = (jnp.array([11, 60, 11, 3, 90]) + 7 * seed) % (V - 1)
    return table, w, ids.astype(jnp.int32)
