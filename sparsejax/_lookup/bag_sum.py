"""bag_sum: weighted sums of a table's rows, one primitive, lowered for the platform.

It knows two layouts of bags. *Fixed*: `ids` are `[B, L]`, a bag a row. *Segmented*:
`ids` are `[n]` and a second array says in which bag each element is. The rows read,
`[n, ...]`, are not an array of the program in either; whether they are one of the
compiled program is up to the platform's lowering.

The primitive is linear in the table and in the weights, and is differentiated as
itself: forward mode is another bag, the transpose scatters the bags' cotangents.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments, _compat
from sparsejax._lookup.lowerings import cpu_bag, xla
from sparsejax._rows import indexing


def bag_sum(
    table: jax.Array,
    ids: jax.Array,
    weights: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    num_bags: int | None = None,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """`out[b] = sum_{i in bag b} weights[i] * table[ids[i]]`.

    Args:
      table: `[V, ...]`.
      ids: integers, `[B, L]`, or `[n]` with `segment_ids`. Those out of range add
        nothing, whatever their weight.
      weights: of the shape of `ids` and the accumulator's type, or None for ones.
      segment_ids: integers `[n]`; those out of range are in no bag.
      num_bags: with `segment_ids`, static.
      indices_are_sorted: whether `segment_ids` ascend.

    Returns:
      `[B or num_bags, ...]`, in the accumulator's type: float32 for narrower floats.
    """
    static: dict[str, Any] = dict(
        segmented=segment_ids is not None,
        weighted=weights is not None,
        num_bags=ids.shape[0] if num_bags is None else num_bags,
        indices_are_sorted=indices_are_sorted,
    )
    args = [table, ids]
    args += [] if segment_ids is None else [segment_ids]
    args += [] if weights is None else [weights]
    # Arrays that a mesh lays out carry it in their types, which XLA's gather knows.
    laid_out = any(_compat.is_laid_out(x) for x in args)
    plain = laid_out or not jnp.issubdtype(table.dtype, jnp.floating)
    if plain or 0 in (table.shape[0], ids.size, static["num_bags"]):
        return xla.bag_sum(*args, **static)
    return bag_sum_p.bind(*args, **static)


def spread(
    cotangent: jax.Array,
    ids: jax.Array,
    *rest: jax.Array,
    segmented: bool,
    weighted: bool,
    **_: Any,
) -> jax.Array:
    """The cotangent of each row read, `[*ids.shape, ...]`, from those of the bags."""
    if segmented:
        out = indexing.take_rows(cotangent, rest[0])
    else:
        shape = (*ids.shape, *cotangent.shape[1:])
        out = jnp.broadcast_to(jnp.expand_dims(cotangent, 1), shape)
    if weighted:
        out *= indexing.append_axes(rest[-1], out.ndim)
    return out


# ------------------------------------------------------------------ derivatives


def _table_transpose(ct, like, _, ids, *rest, segmented, **static):
    table = jnp.zeros(like.shape, like.dtype)
    if segmented:
        rows = spread(ct, ids, *rest, segmented=True, **static)
        return indexing.add_rows(table, ids, rows.astype(like.dtype))

    # A column of the bags at a time: no array of all the rows read.
    def add(j, table):
        column = lambda x: lax.dynamic_index_in_dim(x, j, 1)
        parts = [column(x) for x in (ids, *rest)]
        rows = spread(ct, *parts, segmented=False, **static)
        return indexing.add_rows(table, parts[0], rows.astype(like.dtype))

    return lax.fori_loop(0, ids.shape[1], add, table)


def _weights_transpose(ct, like, table, ids, *rest, segmented, num_bags, **_):
    del num_bags
    axes = tuple(range(ids.ndim, ids.ndim + table.ndim - 1))
    bags = rest[:1] if segmented else ()
    each = spread(ct, ids, *bags, segmented=segmented, weighted=False)
    rows = indexing.take_rows(table, ids).astype(ct.dtype)
    return jnp.sum(each * rows, axis=axes).astype(like.dtype)


# ------------------------------------------------------------------ vmap


def _batch(bind, args, axes, *, segmented, num_bags, **static):
    """A batch of bags of one table is one larger set of bags of it."""
    if axes[0] is not None:  # tables of their own
        one = lambda *xs: xla.bag_sum(
            *xs, segmented=segmented, num_bags=num_bags, **static
        )
        return jax.vmap(one, in_axes=tuple(axes))(*args)
    size = next(x.shape[a] for x, a in zip(args, axes) if a is not None)
    table, *rest = args
    rest = [_in_front(x, a, size) for x, a in zip(rest, axes[1:])]
    if segmented:
        rest = _number_bags(*rest, num_bags=num_bags, height=table.shape[0])
    rest = [x.reshape(-1, *x.shape[2:]) for x in rest]
    total = size * num_bags
    out = bind(table, *rest, segmented=segmented, num_bags=total, **static)
    return out.reshape(size, num_bags, *out.shape[1:])


def _in_front(x: jax.Array, axis: int | None, size: int) -> jax.Array:
    if axis is None:
        return jnp.broadcast_to(x, (size, *x.shape))
    return jnp.moveaxis(x, axis, 0)


def _number_bags(
    ids: jax.Array,
    segment_ids: jax.Array,
    *weights: jax.Array,
    num_bags: int,
    height: int,
) -> Sequence[jax.Array]:
    """Numbers the bags through; what was in none is in one of them, and reads nothing.

    So ids that ascend in each example ascend over all of them.
    """
    inside = indexing.in_range(segment_ids, num_bags)
    ids = jnp.where(inside, ids, _arguments.scalar(height, ids))
    first = np.arange(ids.shape[0]) * num_bags
    wide = _arguments.index_dtype(ids.shape[0] * num_bags, segment_ids.dtype)
    last = max(num_bags - 1, 0)
    bags = jnp.clip(
        segment_ids,
        _arguments.scalar(0, segment_ids),
        _arguments.scalar(last, segment_ids),
    )
    bags = bags.astype(wide) + first.astype(wide)[:, None]
    return ids, bags, *weights


bag_sum_p = _compat.multilinear_primitive(
    "bag_sum",
    xla.bag_sum,
    {"cpu": cpu_bag.bag_sum},
    {0: _table_transpose, 2: _weights_transpose, 3: _weights_transpose},
    _batch,
)
