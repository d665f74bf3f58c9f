"""Programs that read a table by rows, each in a way JAX users do.

A program is `fun(table [V, D], w, ids int[n]) -> scalar`; `w` is a dense parameter of
shape [D]. `PROGRAMS` must come out sparse; `DENSE` must come out dense, and
raise a `DensifyError` with `tables=`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import sparsejax as sj


V, D, N = 211, 4, 5


def _loss(rows, w):
    return jnp.sum(jnp.sin(rows * w))


PROGRAMS = {}
DENSE = {}


def sparse(fun):
    PROGRAMS[fun.__name__] = fun
    return fun


def dense(fun):
    DENSE[fun.__name__] = fun
    return fun


# -- every form of gather --------------------------------------------------------------

PROGRAMS |= {
    "index": lambda table, w, ids: _loss(table[ids], w),
    "index_out_of_range": lambda table, w, ids: _loss(table[ids * 60], w),
    # The gradient of a row that was read depends on one that was out of range.
    "index_out_of_range_mixed": lambda table, w, ids: (
        jnp.tanh(_loss(table[ids * 60], w)) ** 2
    ),
    "index_negative": lambda table, w, ids: _loss(table[ids - 3], w),
    "index_2d": lambda table, w, ids: _loss(table[jnp.stack([ids, ids[::-1]])], w),
    "index_scalar": lambda table, w, ids: _loss(table[ids[0]], w),
    "index_python_int": lambda table, w, ids: _loss(table[5] + table[-1], w),
    "index_slices": lambda table, w, ids: (
        _loss(table[3:9:2], w) + _loss(table[:2], w) + _loss(table[ids, :], w)
    ),
    "index_none": lambda table, w, ids: (
        _loss(table[None, ids], w) + _loss(table[ids, None], w)
    ),
    "index_numpy": lambda table, w, ids: _loss(table[np.array([1, 1, 7])], w),
    "index_uint8": lambda table, w, ids: _loss(table[ids.astype(jnp.uint8)], w),
    "index_int16": lambda table, w, ids: _loss(table[ids.astype(jnp.int16)], w),
    "take": lambda table, w, ids: _loss(jnp.take(table, ids, axis=0), w),
    "vmapped_index": lambda table, w, ids: _loss(jax.vmap(lambda i: table[i])(ids), w),
    "dynamic_index": lambda table, w, ids: _loss(
        lax.dynamic_index_in_dim(table, ids[1], 0), w
    ),
    "lax_map": lambda table, w, ids: jnp.sum(
        lax.map(lambda i: _loss(table[i], w), ids)
    ),
    "lax_map_batched": lambda table, w, ids: jnp.sum(
        lax.map(lambda i: _loss(table[i], w), ids, batch_size=2)
    ),
}


@sparse
def take_modes(table, w, ids):
    far = ids * 60 - 20
    return sum(
        _loss(jnp.take(table, far, axis=0, mode=mode, fill_value=0.0), w)
        for mode in ("fill", "clip", "wrap")
    )


@sparse
def at_get(table, w, ids):
    far = ids * 60 - 20
    out = table.at[far].get(mode="fill", fill_value=2.0)
    return _loss(out, w) + _loss(table.at[far].get(mode="promise_in_bounds"), w)


@sparse
def at_get_drop_negative(table, w, ids):
    out = table.at[ids - 3].get(
        mode="fill", fill_value=0.0, wrap_negative_indices=False
    )
    return _loss(out, w)


@sparse
def lax_gather_windows(table, w, ids):
    dims = lax.GatherDimensionNumbers(
        offset_dims=(0, 2), collapsed_slice_dims=(), start_index_map=(0,)
    )
    out = lax.gather(table, ids[:, None] * 30, dims, slice_sizes=(3, D), mode="clip")
    return _loss(out, w) + _loss(
        lax.gather(
            table,
            ids[:, None] * 30,
            dims,
            slice_sizes=(3, D),
            mode="fill",
            fill_value=1.0,
        ),
        w,
    )


@sparse
def lax_gather_two_starts(table, w, ids):
    dims = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(1, 0)
    )
    starts = jnp.stack([(ids > 20).astype(ids.dtype), ids], axis=1)
    a = lax.gather(table, starts, dims, (1, D), mode="fill", fill_value=0.5)
    return _loss(a, w) + _loss(lax.gather(table, starts, dims, (1, D), mode="clip"), w)


@sparse
def lax_gather_windows_out_of_range(table, w, ids):
    dims = lax.GatherDimensionNumbers(
        offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,)
    )
    mode = "promise_in_bounds"
    read = lambda t: lax.gather(t, ids[:, None] * 60, dims, (3, D), mode=mode)
    return jnp.tanh(_loss(read(table), w)) ** 2 + _loss(read(table * w), w)


@sparse
def vmapped_vmapped_index(table, w, ids):
    two = jnp.stack([ids, ids + 1])
    return _loss(jax.vmap(jax.vmap(lambda i: table[i]))(two), w)


@sparse
def vmapped_out_axis(table, w, ids):
    out = jax.vmap(lambda i: table[i], out_axes=1)(ids)
    return _loss(out.T, w)


@sparse
def vmapped_take(table, w, ids):
    two = jnp.stack([ids, ids + 1])
    return _loss(jax.vmap(lambda i: jnp.take(table, i, axis=0))(two), w)


@sparse
def vmapped_dynamic_slice(table, w, ids):
    out = jax.vmap(lambda i: lax.dynamic_slice(table, (i * 30, i * 0), (2, D)))(ids)
    return _loss(out, w)


@sparse
def dynamic_slice(table, w, ids):
    out = lax.dynamic_slice(table, (ids[0] * 30, ids[0]), (3, D))
    return _loss(out, w) + _loss(lax.dynamic_slice_in_dim(table, 209, 4, 0), w)


# -- the table passed on ---------------------------------------------------------------

PROGRAMS |= {
    "cast": lambda table, w, ids: _loss(
        table.astype(jnp.float32)[ids].astype(w.dtype), w
    ),
    "cast_bfloat16_take": lambda table, w, ids: _loss(
        jnp.take(table.astype(jnp.bfloat16), ids, axis=0).astype(w.dtype), w
    ),
    "scaled": lambda table, w, ids: (
        _loss((table * 3.0)[ids], w) + _loss((2.0 * table / jnp.sum(w))[ids], w)
    ),
    "scaled_by_parameter": lambda table, w, ids: _loss(
        (table * w[0])[ids] + (-table)[ids], w
    ),
    "scaled_by_row_vector": lambda table, w, ids: _loss((table * w + w)[ids], w),
    "expanded": lambda table, w, ids: (
        _loss(table[None][0, ids], w) + _loss(table[:, None, :][ids][:, 0], w)
    ),
    "squeezed": lambda table, w, ids: _loss(jnp.squeeze(table[:, None], 1)[ids], w),
    "transposed": lambda table, w, ids: (
        _loss(table.T[:, ids].T, w) + _loss(table.T.T[ids], w)
    ),
    "elementwise": lambda table, w, ids: (
        _loss(jnp.tanh(table)[ids], w) + _loss((table**2)[ids], w)
    ),
    "copied": lambda table, w, ids: (
        _loss(table.copy()[ids], w) + _loss(jnp.array(table)[ids], w)
    ),
    "named": lambda table, w, ids: _loss(checkpoint_name(table, "t")[ids], w),
    "rows_stopped": lambda table, w, ids: (
        _loss(table[ids], w) + jnp.sum(lax.stop_gradient(table[ids + 1]))
    ),
    "jitted": lambda table, w, ids: jax.jit(lambda t: _loss(t[ids], w))(table),
    "jitted_cast_out": lambda table, w, ids: _loss(
        jax.jit(lambda t: t * 2.0)(table)[ids], w
    ),
}


@sparse
def scaled_out_of_range(table, w, ids):
    far = ids * 60 - 20
    stopped = lax.stop_gradient(table)
    modes = "fill", "clip", "promise_in_bounds"
    return sum(
        _loss((x * w + w[0]).at[far].get(mode=mode, fill_value=0.5), w)
        for mode in modes
        for x in (table, stopped)
    )


@sparse
def powers(table, w, ids):
    a = (1.5 + jnp.tanh(table)) ** (2.0 + w) + 3.0 ** jnp.tanh(table)
    return _loss(a[ids], w) + _loss(jnp.arctan2(table, 3.0 + w[0])[ids], w)


@sparse
def broadcast_to_more(table, w, ids):
    a = w[:3, None, None] * table
    b = table[:, None] - table[ids][None]
    c = jnp.clip(jnp.ones((2, 1, 1)) - table, -0.5, w[0])
    return _loss(a[:, ids], w) + _loss(b[ids[:2]], w) + _loss(c[:, ids], w)


@sparse
def broadcast_vector(table, w, ids):
    # A row of the view has more axes than a row of the table.
    view = jnp.maximum(table[:, :, None], w[:3]) + w[None, None, :1]
    return jnp.sum(jnp.sin(view[ids]))


@sparse
def vmapped_scale(table, w, ids):
    rows = jax.vmap(lambda s: (table * s)[ids])(w)
    return _loss(rows, w) + _loss(jax.vmap(lambda s: (s - table).T[:, 3])(w), w)


@sparse
def vmapped_scale_and_index(table, w, ids):
    read = lambda s, i: jnp.clip(table * s, -1.0, s)[i]
    return _loss(jax.vmap(read)(w, ids[:D]), w) + _loss(
        jax.vmap(read, (None, 1), out_axes=1)(w, jnp.stack([ids, ids + 1])), w
    )


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


@sparse
def reshaped(table, w, ids):
    out = table.reshape(V, 2, D // 2)[ids]
    return _loss(out.reshape(N, D), w)


@sparse
def barrier(table, w, ids):
    table, w = lax.optimization_barrier((table, w))
    return _loss(table[ids], w)


@sparse
def stopped_beside(table, w, ids):
    stopped = lax.stop_gradient(table)
    return _loss(table[ids], w) + jnp.sum(stopped**2) + _loss(stopped[ids], w)


@sparse
def compared_beside(table, w, ids):
    big = jnp.sum(table > 0.5)
    return _loss(table[ids], w) * big + jnp.argmax(table)


@sparse
def jitted_twice(table, w, ids):
    inner = jax.jit(lambda t, i: t[i])
    return jax.jit(lambda t: _loss(inner(t, ids) + inner(t, ids + 1), w))(table)


@sparse
def named_scope(table, w, ids):
    with jax.named_scope("embed"):
        return _loss(table[ids], w)


# -- control flow ----------------------------------------------------------------------

PROGRAMS |= {
    "scanned": lambda table, w, ids: lax.scan(
        lambda c, i: (c + _loss(table[i], w), None), 0.0, ids
    )[0],
    "branch": lambda table, w, ids: lax.cond(
        ids[0] > 50,
        lambda: _loss(table[ids], w),
        lambda: _loss(table[ids[:2]], w) + _loss(table[ids[0]] * 2.0, w),
    ),
    "branch_without": lambda table, w, ids: lax.cond(
        ids[0] > 10, lambda t: _loss(t[ids], w), lambda t: 0.0 * w[0], table
    ),
    "checkpointed": lambda table, w, ids: jax.checkpoint(lambda t, w: _loss(t[ids], w))(
        table, w
    ),
    "custom_jvp_rows": lambda table, w, ids: (
        _loss(twice(table[ids]), w) + _loss(jax.nn.relu(table[ids]), w)
    ),
    "custom_vjp_rows": lambda table, w, ids: _loss(half(table[ids]), w),
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
def scanned_chain(table, w, ids):
    def step(h, i):
        return jnp.tanh(h * w + table[i]), None

    return jnp.sum(lax.scan(step, jnp.zeros((D,), w.dtype), ids)[0])


@sparse
def scanned_nested(table, w, ids):
    def outer(c, i):
        def inner(c, j):
            return c + _loss(table[i + j], w), None

        return lax.scan(inner, c, jnp.arange(3))[0] + _loss(table[i], w), None

    return lax.scan(outer, jnp.zeros((), w.dtype), ids)[0]


@sparse
def fori(table, w, ids):
    def body(k, c):
        return c + _loss(table[ids[k]], w)

    return lax.fori_loop(0, N, body, jnp.zeros((), w.dtype))


@sparse
def switch(table, w, ids):
    branches = [
        lambda t: _loss(t[ids[:1]], w),
        lambda t: jnp.sum(w),
        lambda t: lax.scan(lambda c, i: (c + _loss(t[i], w), None), w[0], ids)[0],
    ]
    return sum(lax.switch(ids[k] % 3, branches, table) for k in range(3))


@sparse
def branch_in_scan(table, w, ids):
    def step(c, i):
        add = lax.cond(
            i % 2 == 0, lambda: _loss(table[i], w), lambda: _loss(table[i] ** 2, w)
        )
        return c + add, None

    return lax.scan(step, jnp.zeros((), w.dtype), ids)[0]


@sparse
def scan_in_branch(table, w, ids):
    def loop():
        return lax.scan(lambda c, i: (c + _loss(table[i], w), None), w[0], ids)[0]

    return lax.cond(jnp.sum(ids) > 0, loop, lambda: w[1])


@sparse
def checkpointed_policy(table, w, ids):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(lambda t: _loss(t[ids] @ jnp.outer(w, w), w), policy=policy)(
        table
    )


@sparse
def checkpointed_scan(table, w, ids):
    @jax.checkpoint
    def step(c, i):
        return c + _loss(table[i], w) * c, None

    return lax.scan(step, jnp.ones((), w.dtype), ids)[0]


@sparse
def gradient_of_a_checkpointed_scan(table, w, ids):
    """JAX hoists values that do not change out of the scan, into a call."""

    def total(scale):
        @jax.checkpoint
        def outer(c, i):
            inner = lambda c, j: (c + _loss(table[j], scale * w), None)
            same = lax.scan(inner, jnp.zeros((), w.dtype), ids)[0]
            return c * jnp.tanh(same) + _loss(table[i], scale * w), jnp.sin(c)

        last, each = lax.scan(outer, jnp.ones((), w.dtype), ids)
        return last + jnp.sum(each)

    return sum(jax.value_and_grad(total)(jnp.ones((), w.dtype)))


@sparse
def checkpointed_and_passed_on(table, w, ids):
    total, same = jax.checkpoint(lambda t: (_loss(t[ids], w), t))(table)
    return total + _loss(same[ids + 1], w)


@sparse
def checkpointed_view_passed_on(table, w, ids):
    @jax.checkpoint
    def body(t, w):
        view = jnp.tanh(w) * t
        return _loss(view[ids], w), view.T, jax.checkpoint(lambda t: t)(t)

    total, view, same = body(table * 2.0, w)
    return total + _loss(view[:, ids].T, w) + _loss(same[ids + 1], w)


@sparse
def branch_and_passed_on(table, w, ids):
    def branch(scale):
        return lambda t: (scale * _loss(t[ids], w), t)

    total, same = lax.cond(ids[0] > 20, branch(1.0), branch(2.0), table)
    return total + _loss(same[ids + 1], w)


@sparse
def while_beside(table, w, ids):
    k, _ = lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + jnp.sum(c[1])), (0, table)
    )
    return _loss(table[ids], w) * k


@jax.custom_jvp
def twice(x):
    return 2.0 * x


twice.defjvps(lambda t, ans, x: 3.0 * t)


@jax.custom_vjp
def half(x):
    return 0.5 * x


half.defvjp(lambda x: (0.5 * x, None), lambda _, g: (0.25 * g,))


@sparse
def many_reads(table, w, ids):
    a, b = table[ids], jnp.take(table, ids + 1, axis=0)
    return _loss(a, w) + jnp.sum(a * b) + _loss(table[ids[0]] * 1.5, w)


# -- bags ------------------------------------------------------------------------------


def _pairs(ids):
    """Two bags a row, some ids of which are padding or out of range."""
    return jnp.stack([ids, ids + 1, jnp.where(ids > 50, -1, ids)], axis=1)


@sparse
def bag_fixed(table, w, ids):
    weights = jnp.tanh(w[0] * jnp.arange(1, 16)).reshape(5, 3)
    kwargs: dict[str, Any] = dict(mode="zero", weights=weights, combiner="sqrtn")
    return _loss(sj.embedding_bag(table, _pairs(ids), **kwargs), w)


@sparse
def bag_ragged(table, w, ids):
    st = sj.SegmentTensor.from_padded(_pairs(ids), filler=-1, capacity=15)
    return _loss(sj.embedding_bag(table, st, combiner="mean"), w)


@sparse
def bag_max(table, w, ids):
    kwargs: dict[str, Any] = dict(padding_id=-1, combiner="max", max_norm=0.5)
    return _loss(sj.embedding_bag(table, _pairs(ids), **kwargs), w)


@sparse
def bag_vmapped(table, w, ids):
    one = lambda i, v: sj.embedding_bag(table, i, i % 2, 2, weights=v)
    weights = jnp.tanh(w[0] * jnp.arange(1, 16)).reshape(5, 3)
    return _loss(jax.vmap(one)(jnp.abs(_pairs(ids)), weights), w)


@sparse
def bag_of_a_view(table, w, ids):
    view = (2.0 * table).reshape(V, 2, D // 2)
    out = sj.embedding_bag(view, _pairs(ids), mode="zero", weights=jnp.ones((5, 3)))
    return _loss(out.reshape(N, D), w)


@sparse
def bag_in_control_flow(table, w, ids):
    def step(total, i):
        small = lambda: sj.embedding_bag(table, i[None], mode="zero")
        large = lambda: sj.embedding_bag(table, i, i % 2, 1)
        return total + _loss(lax.cond(i[0] > 20, small, large), w), None

    body = jax.checkpoint(step)
    return lax.scan(body, jnp.zeros((), w.dtype), _pairs(ids))[0]


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
    "written": lambda table, w, ids: _loss(table.at[ids].set(0.0)[ids + 1], w),
    "one_hot": lambda table, w, ids: _loss(
        jax.nn.one_hot(ids, V, dtype=table.dtype) @ table, w
    ),
}


@dense
def carried_and_changed(table, w, ids):
    def step(t, i):
        return t * 0.9, _loss(t[i], w)

    return jnp.sum(lax.scan(step, table, ids)[1])


@dense
def masked_gradient(table, w, ids):
    mask = (jnp.arange(V) % 2 == 0)[:, None]
    return _loss(jnp.where(mask, lax.stop_gradient(table), table)[ids], w)


@dense
def merged_rows(table, w, ids):
    both = jnp.concatenate([jnp.zeros((1, D), table.dtype), table])
    return _loss(both[ids], w)


@dense
def through_reference(table, w, ids):
    ref = jax.new_ref(table)
    return _loss(ref[...][ids], w)


@dense
def returned_by_branch(table, w, ids):
    t = lax.cond(ids[0] > 50, lambda: table, lambda: 2.0 * table)
    return _loss(t[ids], w)


def arguments(seed=0, dtype=jnp.float32):
    """`(table, w, ids)` with duplicates among the ids."""
    k1, k2 = jax.random.split(jax.random.key(seed))
    table = jax.random.normal(k1, (V, D), dtype)
    w = jax.random.normal(k2, (D,), dtype)
    ids = (jnp.array([11, 60, 11, 3, 90]) + 7 * seed) % (V - 1)
    return table, w, ids.astype(jnp.int32)
