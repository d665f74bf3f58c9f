"""Programs that read a table by rows, each in a way JAX users do.

A program is `fun(table [V, D], w, ids int[n]) -> scalar`; `w` is a dense parameter of
shape [D]. `PROGRAMS` must come out sparse; `DENSE` must come out dense, and
raise a `DensifyError` with `tables=`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import sparsejax as sj
from fuzz_models import READS, WRAPPERS


V, D, N = 211, 4, 5


def _loss(rows, w):
    return jnp.sum(jnp.sin(rows * w))


def _sum_of(reads, w):
    return sum(_loss(rows, w) for rows in reads)


def _program(read, *wrappers):
    """A read and its wrappers, of `fuzz_models`; the last one is the outermost."""
    f = READS[read]
    for name in wrappers:
        f = functools.partial(WRAPPERS[name], f)
    return lambda table, w, ids: jnp.sum(
        jnp.sin(f(table, ids).astype(w.dtype)) * jnp.sum(w)
    )


def _programs(names):
    return {name: _program(*name.split("/")) for name in names.split()}


PROGRAMS = _programs("""
    index constant_list python_int slice take take_clip take_last take_along
    dynamic_slice vmapped vmapped_twice bag_max index/tanh index/as_float32
    take/as_bfloat16 index/moved index/rematerialized index/custom_vjp_of_rows
    index/custom_jvp_of_rows index/scan_of_state index/scan_carries_the_table
    index/mapped_in_batches index/fori_loop_by_step index/cond_closure index/switch
    take/tanh/vmapped_ids index/scan/scan index/cond/scan index/scan/cond_closure
    index/rematerialized/scan bag_sum/doubled/vmapped_ids
    bag_sum/cond_closure/scan/rematerialized
""")
DENSE = _programs("""
    index_columns index_both take_flat one_hot index/twice index/set index/masked
    index/custom_vjp index/custom_jvp index/scan_over_the_rows
    index/scan_changes_the_table index/vmapped_branch
""")


def sparse(fun):
    PROGRAMS[fun.__name__] = fun
    return fun


# -- forms of gather -------------------------------------------------------------------

PROGRAMS |= {
    "index_out_of_range": lambda table, w, ids: _loss(table[ids * 60], w),
    # The gradient of a row that was read depends on one that was out of range.
    "index_out_of_range_mixed": lambda table, w, ids: (
        jnp.tanh(_loss(table[ids * 60], w)) ** 2
    ),
    "index_types": lambda table, w, ids: _sum_of(
        [table[i] for i in (ids.astype(jnp.uint8), ids.astype(jnp.int16), ids - 9)], w
    ),
    "vmapped_dynamic_slice": lambda table, w, ids: _loss(
        jax.vmap(lambda i: lax.dynamic_slice(table, (i * 30, i * 0), (2, D)))(ids), w
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
    "powers": lambda table, w, ids: _sum_of(
        [
            ((1.5 + jnp.tanh(table)) ** (2.0 + w) + 3.0 ** jnp.tanh(table))[ids],
            jnp.arctan2(table, 3.0 + w[0])[ids],
        ],
        w,
    ),
    "copied": lambda table, w, ids: _sum_of(
        [jnp.array(table)[ids], checkpoint_name(table, "t")[ids]], w
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
}


@sparse
def broadcast_to_more(table, w, ids):
    a = w[:3, None, None] * table
    b = table[:, None] - table[ids][None]
    c = jnp.clip(jnp.ones((2, 1, 1)) - table, -0.5, w[0])
    # A row of this view has more axes than a row of the table.
    view = jnp.maximum(table[:, :, None], w[:3]) + w[None, None, :1]
    return _sum_of([a[:, ids], b[ids[:2]], c[:, ids]], w) + jnp.sum(jnp.sin(view[ids]))


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
    @jax.checkpoint
    def body(t, w):
        view = jnp.tanh(w) * t
        return _loss(view[ids], w), view.T, jax.checkpoint(lambda t: t)(t)

    total, view, same = body(table * 2.0, w)
    return total + _sum_of([view[:, ids].T, same[ids + 1]], w)


@sparse
def while_beside(table, w, ids):
    k, _ = lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + jnp.sum(c[1])), (0, table)
    )
    return _loss(table[ids], w) * k


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
    "bag_vmapped": lambda table, w, ids: _loss(
        jax.vmap(lambda i, v: sj.embedding_bag(table, i, i % 2, 2, weights=v))(
            jnp.abs(_pairs(ids)), _weights(w)
        ),
        w,
    ),
}


# -- dense uses ------------------------------------------------------------------------

DENSE |= {
    "tied": lambda table, w, ids: jnp.sum(table[ids] @ table.T),
    "summed": lambda table, w, ids: jnp.sum(table**2) + _loss(table[ids], w),
    "through_reference": lambda table, w, ids: _loss(jax.new_ref(table)[...][ids], w),
    "returned_by_branch": lambda table, w, ids: _loss(
        lax.cond(ids[0] > 50, lambda: table, lambda: 2.0 * table)[ids], w
    ),
}


def arguments(seed=0, dtype=jnp.float32):
    """`(table, w, ids)` with duplicates among the ids."""
    rng = np.random.default_rng(seed)
    table, w = (jnp.asarray(rng.normal(size=s), dtype) for s in ((V, D), (D,)))
    ids = (np.array([11, 60, 11, 3, 90]) + 7 * seed) % (V - 1)
    return table, w, jnp.asarray(ids, jnp.int32)
