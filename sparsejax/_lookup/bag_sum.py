"""bag_sum: weighted sums of a table's rows, one primitive with a lowering per platform.

There are two layouts of bags. *Fixed*: `ids` are `[B, L]`, one bag per row.
*Segmented*: `ids` are `[n]`, and a second array has the bag of each element. In both
layouts, the rows read, `[n, ...]`, are not an array of the traced program; the
platform's lowering decides whether they are an array of the compiled program.

The primitive is linear in the table and in the weights. Its JVP is the primitive again;
its transpose scatters the cotangents of the bags.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments, _compat
from sparsejax._lookup.lowerings import cpu, xla
from sparsejax._lookup.lowerings.xla import BagSpec
from sparsejax._rows import indexing, merge_cuda, quantized
from sparsejax._rows.quantized import QuantizedTable


def bag_sum(
    table: jax.Array,
    ids: jax.Array,
    weights: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    num_bags: int | None = None,
    *,
    indices_are_sorted: bool = False,
    bits: int | None = None,
) -> jax.Array:
    """`out[b] = sum_{i in bag b} weights[i] * table[ids[i]]`.

    Args:
      table: `[V, ...]`.
      ids: integers, `[B, L]`, or `[n]` with `segment_ids`. An id out of range adds
        nothing, even if its weight is inf or NaN.
      weights: with the shape of `ids` and the accumulator dtype, or None for ones.
      segment_ids: integers `[n]`; an element whose segment is out of range is dropped.
      num_bags: static, with `segment_ids`.
      indices_are_sorted: a promise that `segment_ids` ascend.
      bits: of a code if the table is the codes of a QuantizedTable. The weights are
        then `[..., 2]`, a factor of the codes and a term that is added to them, both 0
        if an id is out of range.

    Returns:
      `[B or num_bags, ...]`, in the accumulator's dtype: float32 for narrower floats.
      For codes, the sums of each plane, `[..., 8 // bits, bytes]`, in the dtype of the
      weights.
    """
    spec = BagSpec(
        segmented=segment_ids is not None,
        weighted=weights is not None,
        num_bags=ids.shape[0] if num_bags is None else num_bags,
        indices_are_sorted=indices_are_sorted,
        bits=bits,
    )
    args = [table, ids]
    args += [] if segment_ids is None else [segment_ids]
    args += [] if weights is None else [weights]
    # If the types of these arrays have a mesh, XLA's gather propagates it.
    laid_out = any(_compat.has_mesh(x) for x in args)
    is_float = bits is not None or jnp.issubdtype(table.dtype, jnp.floating)
    plain = laid_out or not is_float
    if plain or 0 in (table.shape[0], ids.size, spec.num_bags):
        return xla.bag_sum(*args, spec=spec)
    return bag_sum_p.bind(*args, spec=spec)


def quantized_bag_sum(
    table: QuantizedTable,
    ids: jax.Array,
    weights: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    num_bags: int | None = None,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns `bag_sum` of a quantized table, in the accumulator's dtype.

    `sum w (scale codes + bias) = sum (w scale) codes + sum w bias`: a sum of codes with
    other weights, plus one number for each bag.
    """
    height, wide = table.codes.shape[0], indexing.accumulator_dtype(table.dtype)
    if not height:  # JAX cannot gather from an empty axis
        count = ids.shape[0] if num_bags is None else num_bags
        return jnp.zeros((count, *table.row_shape), wide)
    pair = quantized.read_pairs(table, ids, fill=0).astype(wide)
    if weights is not None:
        weights = xla.in_range_only(weights.astype(pair.dtype), ids, height)
        pair = pair * weights[..., None]
    total = bag_sum(
        table.codes,
        ids,
        pair,
        segment_ids,
        num_bags,
        indices_are_sorted=indices_are_sorted,
        bits=table.bits,
    )
    total = quantized.join_planes(total, math.prod(table.row_shape))
    return total.reshape(-1, *table.row_shape)


def bags_with(
    is_true: jax.Array,
    segment_ids: jax.Array,
    num_bags: int,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns bool `[num_bags]`: True for each segmented bag with a true element."""
    static: dict[str, Any] = dict(
        num_bags=num_bags, indices_are_sorted=indices_are_sorted
    )
    if any(map(_compat.has_mesh, (is_true, segment_ids))):
        return xla.bags_with(is_true, segment_ids, **static)[0]
    return _bags_with_p.bind(is_true, segment_ids, **static)[0]


# ------------------------------------------------------------------ derivatives


def _table_transpose(ct, like, _, ids, *rest, spec):
    wide = indexing.accumulator_dtype(like.dtype)  # an id may be read many times
    ct = ct.astype(wide)
    table = _add_bags_p.bind(ct, ids, *rest, height=like.shape[0], spec=spec)
    return table.astype(like.dtype)


def _weights_transpose(ct, like, table, ids, *rest, spec):
    bags = rest[:1] if spec.segmented else ()
    plain = dataclasses.replace(spec, weighted=False)
    each = xla.row_cotangents(ct, ids, *bags, spec=plain)
    rows = indexing.take_rows(table, ids)
    bits: Any = spec.bits
    if bits is not None:
        rows = quantized.planes(rows, bits)
    axes = tuple(range(ids.ndim, rows.ndim))
    of_rows = jnp.sum(each * rows.astype(ct.dtype), axis=axes)
    if bits is not None:
        of_rows = jnp.stack([of_rows, jnp.sum(each, axis=axes)], axis=-1)
    return of_rows.astype(like.dtype)


def _sums_transpose(ct, like, _, ids, *rest, height, spec):
    del height, like
    return bag_sum_p.bind(ct, ids, *rest, spec=spec)


def _sums_weights_transpose(ct, like, sums, ids, *rest, height, spec):
    del height
    return _weights_transpose(sums, like, ct, ids, *rest, spec=spec)


# ------------------------------------------------------------------ vmap


def _batch(bind, args, axes, *, spec):
    """Batches the primitive: batched bags of one table are more bags of that table."""
    if axes[0] is not None:  # a table for each example
        one = functools.partial(xla.bag_sum, spec=spec)
        return jax.vmap(one, in_axes=tuple(axes))(*args)
    table, *others = args
    others = indexing.batch_in_front(others, axes[1:])
    size = others[0].shape[0]
    if spec.segmented:
        others = _join_examples(*others, num_bags=spec.num_bags, height=table.shape[0])
    others = [indexing.merge_axes(x, 2) for x in others]
    joined = dataclasses.replace(spec, num_bags=size * spec.num_bags)
    out = bind(table, *others, spec=joined)
    return out.reshape(size, spec.num_bags, *out.shape[1:])


def _join_examples(
    ids: jax.Array,
    segment_ids: jax.Array,
    *weights: jax.Array,
    num_bags: int,
    height: int,
) -> Sequence[jax.Array]:
    """Joins the segmented bags of all examples to one batch of bags.

    An element outside all bags of its example moves to the nearest bag, with an id that
    is out of range. Segment ids that ascend in each example therefore ascend overall.
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


bag_sum_p = _compat.primitive(
    "bag_sum",
    xla.bag_sum,
    {"cpu": cpu.bag_sum},
    transposes={0: _table_transpose, 2: _weights_transpose, 3: _weights_transpose},
    batch=_batch,
)


def add_merged_bags(
    sums: jax.Array,
    ids: jax.Array,
    *rest: jax.Array,
    height: int,
    spec: BagSpec,
) -> jax.Array:
    """Computes `xla.add_bags` on CUDA, where adding floats to equal rows takes atomics.

    It merges duplicates first, so the order of additions is fixed.
    """
    rows = xla.row_cotangents(sums, ids, *rest, spec=spec)
    rows = indexing.merge_axes(rows, ids.ndim)
    empty = _arguments.scalar(height, ids)
    ids = jnp.where(indexing.in_range(ids, height), ids, empty).reshape(-1)
    distinct, at, total, _ = merge_cuda.merge_rows(ids, rows, height)
    zeros = jnp.zeros((height, *sums.shape[1:]), sums.dtype)
    total = indexing.take_rows(total, at)
    return indexing.set_distinct_rows(zeros, distinct, total)


# The transpose of `bag_sum`: adds the cotangent of each bag to the bag's rows.
_add_bags_p = _compat.primitive(
    "add_bags",
    xla.add_bags,
    {"cuda": add_merged_bags},
    transposes={
        0: _sums_transpose,
        2: _sums_weights_transpose,
        3: _sums_weights_transpose,
    },
    batch=lambda _, args, axes, **static: jax.vmap(
        functools.partial(xla.add_bags, **static), in_axes=tuple(axes)
    )(*args),
)

_bags_with_p = _compat.primitive(
    "bags_with",
    xla.bags_with,
    {"cpu": cpu.bags_with},
    types=lambda *_, num_bags, **static: [((num_bags,), jnp.bool_)],
    multiple_results=True,
)
