"""The rule for `bag_sum`: the program uses only sums of a table's rows.

The cotangent of a row is the cotangent of its bag, times the weight. So the rows need
not be an array, and the gradient of the table is the ids with these cotangents.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax._lookup.bag_sum import bag_sum, bag_sum_p
from sparsejax._lookup.lowerings import xla
from sparsejax._rows import indexing
from sparsejax.transform.interpreter import RuleContext, register_rule
from sparsejax.transform.table import TableRef


@register_rule(bag_sum_p)
def bag_sum_rule(
    ctx: RuleContext,
    ref: Any,
    ids: jax.Array,
    *rest: Any,
    spec: xla.BagSpec,
) -> Any:
    """Sums rows; readers also call it with the array that has their rows."""
    if not isinstance(ref, TableRef):
        return NotImplemented  # the ids or weights are a table
    ids = ctx.dense(ids, live=False)
    rest = tuple(ctx.dense(x, "takes the whole array, as weights") for x in rest)
    assert spec.bits is None  # quantized codes are integers, which have no gradient
    weights, segment_ids = spec.weights(rest), spec.segment_ids(rest)
    add = functools.partial(
        bag_sum,
        weights=weights,
        segment_ids=segment_ids,
        num_bags=spec.num_bags,
        indices_are_sorted=spec.indices_are_sorted,
    )
    if not ref.steps and ref.has_all_rows:
        out = add(ref.array, ids)
        transpose = functools.partial(xla.row_cotangents, spec=spec)
        return ctx.combine(ref, ids, out, transpose, ids, *rest)
    if ref.row_axes != (0,):
        return NotImplemented
    if ref.reader is not None:
        return ref.reader.bag_sum(ctx, ref, ids, rest, spec)
    # The rows of any other view are read first, and are then a small table.
    rows = indexing.merge_axes(ctx.read(ref, ids, drop=False), ids.ndim)
    positions = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
    positions = jnp.where(indexing.in_range(ids, ref.height), positions, ids.size)
    return add(rows, positions)
