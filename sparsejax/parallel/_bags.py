"""Bags of the rows of a sharded table: which device reduces which bag.

Rows are read first, each distinct row once per device (`_read.py`). They form a small
table, which `sparsejax.embedding_bag` reduces on each device. A bag of padded ids is
on one device, so that nothing else is sent. A bag of segment ids may span several
devices. Then the devices' sums `[num_segments, ...]` are all-reduced, and for the
combiners max, min and logsumexp the rows are gathered on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sparsejax._lookup import embedding_bag as _bag
from sparsejax._mesh import explicit_spec, replicate
from sparsejax._rows import arithmetic, indexing
from sparsejax._segments.reduce.segments import Segments
from sparsejax._segments.reduce.sums import segment_sum
from sparsejax.parallel._exchange import Owners


_SUMS = ("sum", "mean", "sqrtn")


def reduce_bags(
    owners: Owners,
    read_rows: Callable[[jax.Array, jax.Array], jax.Array],
    ids: jax.Array,
    skip: jax.Array | None,
    weights: jax.Array | None,
    segments: tuple[jax.Array, Any] | None,
    combiner: str,
) -> jax.Array:
    """Reduces the bags of `sparsejax.embedding_bag`, from checked arguments.

    Over Explicit axes bags of padded ids are sharded like `ids`, and bags of segment
    ids are on every device.

    Args:
      owners: which device owns which rows.
      read_rows: `f(ids, skip)`, the rows of ids; `skip` marks ids that are not read.
      ids, skip, weights, segments, combiner: as in `reduce_row_table`.
    """
    segment_ids, num_segments = segments or (None, None)
    skip = jnp.zeros_like(ids, bool) if skip is None else skip

    # Pad so that every device gets the same number of bags, or elements.
    count = ids.shape[0]
    spec = explicit_spec(ids)[: 2 if combiner == "none" else 1]
    ids, skip = pad_examples(owners, ids, -1), pad_examples(owners, skip, True)
    weights = None if weights is None else pad_examples(owners, weights, 0)
    rows = read_rows(ids, skip)
    if segment_ids is None:
        out = _padded_bags(owners, rows, skip, weights, combiner)
        out = remove_padding(out, count)
        if owners.is_explicit:
            unsharded = (None,) * (out.ndim - len(spec))
            out = jax.sharding.reshard(
                out, owners.sharding(PartitionSpec(*spec, *unsharded))
            )
    else:
        segments = pad_examples(owners, segment_ids, -1), num_segments
        out = _segment_bags(owners, rows, skip, weights, segments, combiner)
        if combiner == "none":
            out = remove_padding(out, count)
    return out


def pad_examples(owners: Owners, x: jax.Array, value: Any) -> jax.Array:
    """Pads `[n]` or `[B, L]` to a multiple of the devices."""
    padding = -x.shape[0] % owners.devices
    if padding:
        widths = [(0, padding), *((0, 0) for _ in x.shape[1:])]
        x = jnp.pad(replicate(x), widths, constant_values=value)
    batch = owners.sharding(owners.batch_spec)
    return jax.sharding.reshard(x, batch) if owners.is_explicit else x


def remove_padding(x: jax.Array, count: int) -> jax.Array:
    """Returns the first `count` of padded examples."""
    return x if x.shape[0] == count else replicate(x)[:count]


def _padded_bags(owners, rows, skip, weights, combiner: str) -> jax.Array:
    """Returns the bags of rows `[B, L, ...]`; each device reduces its own."""

    def body(rows, skip, *weights):
        return _reduce(indexing.merge_axes(rows, 2), skip, weights, combiner)

    args = [rows, skip, *([] if weights is None else [weights])]
    if not skip.size:
        return body(*map(replicate, args))
    spec = owners.batch_spec
    return owners.shard_map(body, *args, in_specs=(spec,) * len(args), out_specs=spec)


def _segment_bags(owners, rows, skip, weights, segments, combiner: str) -> jax.Array:
    """Reduces rows `[n, ...]` to bags `[num_segments, ...]`."""
    ids, count = segments
    dtype = rows.dtype if combiner == "sum" else indexing.float_dtype(rows.dtype)
    args = [rows, skip, ids, *([] if weights is None else [weights])]
    if combiner not in _SUMS or not skip.size:
        rows, skip, ids, *weights = (replicate(x) for x in args)
        return _reduce(rows, skip, weights, combiner, ids, count)

    def body(rows, skip, ids, *weights):
        # This device's sums, and the divisors of the mean and of sqrtn.
        wide = indexing.accumulator_dtype(dtype)
        total = _reduce(rows.astype(wide), skip, weights, "sum", ids, count)
        by = weights[0].astype(total.dtype) if weights else jnp.ones(ids.shape, wide)
        by, unit = indexing.zero_unless(~skip, by), jnp.ones((), wide)
        if weights and combiner == "sqrtn":
            by, unit = Segments(ids, count).in_units(by, axes=owners.mesh.axis_names)
            by = by * by
        by = segment_sum(by, ids, count)
        # One by one: jax 0.7.2 cannot transpose a sum of which only a part is used.
        sums = (jax.lax.psum(x, owners.mesh.axis_names) for x in (total, by))
        return *sums, unit

    total, by, unit = owners.shard_map(
        body,
        *args,
        in_specs=(owners.batch_spec,) * len(args),
        out_specs=PartitionSpec(),
        check_vma=True,
    )
    if combiner == "sqrtn":
        by = unit * arithmetic.root(by)
    if combiner != "sum":
        total = arithmetic.safe_divide(total, by)
    is_float = jnp.issubdtype(rows.dtype, jnp.inexact)
    return total.astype(rows.dtype) if is_float else total


def _reduce(rows, skip, weights, combiner, segment_ids=None, count=None) -> jax.Array:
    """Calls `sparsejax.embedding_bag` on `rows`; element k of the bags is row k."""
    here = jax.lax.iota(jnp.int32, skip.size).reshape(skip.shape)
    return _bag.embedding_bag(
        rows,
        jnp.where(skip, np.int32(-1), here),
        segment_ids,
        count,
        # Weights of complex rows are real numbers of a complex dtype.
        weights=weights[0].real if weights else None,
        combiner=combiner,
        padding_id=-1,
    )
