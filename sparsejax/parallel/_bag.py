"""embedding_bag: rows of a table that is spread over devices, reduced bag by bag.

The rows are looked up as `sparsejax.parallel.lookup` does, each distinct one once a
device, and are then a small table of their own, which `sparsejax.embedding_bag` reduces
where they are. Bags that are a row of ids each lie on one device whole. Bags by segment
ids may reach over several: their sums are added up over the devices.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sparsejax import _arguments, _compat
from sparsejax._lookup import embedding_bag as _bag, lookup
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor
from sparsejax._segments.reduce.sums import segment_sum
from sparsejax.parallel._lookup import beside, check_table, gather, owners_of
from sparsejax.parallel._owners import Owners
from sparsejax.parallel._table import ShardedTable, gathered


_CALL = "sparsejax.parallel.embedding_bag"
_SUMS = ("sum", "mean", "sqrtn")

_NO_BAGS = (
    "{call}: ids of shape {found} {what}. Pass ids [n] with segment_ids and "
    "num_segments, a SegmentTensor, or ids padded to [..., L], a bag a row, alone."
)


def embedding_bag(
    table: ShardedTable,
    ids: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    weights: Any = None,
    combiner: str = "sum",
    mode: str = "fill",
    padding_id: int | None = None,
    max_norm: float | None = None,
    capacity: int | str | None = None,
    return_metrics: bool = False,
) -> Any:
    """Rows of a table whose rows are spread over devices, reduced to one row a bag.

    With `x_i = table[ids[i]]` and weights `w_i`, what `sparsejax.embedding_bag` gives:
    `out[b] = sum w_i x_i` over the i of bag b, or their mean, sqrtn, max, min or
    logsumexp. The rows travel as in `sparsejax.parallel.lookup`, each distinct one once
    for each device, and are reduced where they arrive.

    Bags that are a row of ids each (`[..., L]`) need no more than that. With segment
    ids, sums of the devices are added up, `[num_segments, ...]`, and for the combiners
    max, min and logsumexp the rows are gathered on every device.

    Args:
      table: from `shard_rows`.
      ids: integers. `[n]`, with `segment_ids`; or `[..., L]`, each row a bag, filled up
        with `padding_id`; or a SegmentTensor of ids. Those of the whole batch.
      segment_ids: integers `[n]`, the bag of each id; out of `[0, num_segments)` an id
        is in no bag, and is not read.
      num_segments: int, the number of bags.
      weights: real numbers of the shape of `ids` (of its values), for sum, mean and
        sqrtn.
      combiner: how a bag is reduced, as in `sparsejax.embedding_bag`.
      mode: what an id out of range reads: `"fill"` (NaN), `"clip"`, `"zero"` or
        `"error"`.
      padding_id: int, an id that is in no bag.
      max_norm: positive number, as in `sparsejax.lookup`.
      capacity: as in `sparsejax.parallel.lookup`.
      return_metrics: also return what the lookup took, as `Metrics`.

    Returns:
      `[num_segments, *table.shape[1:]]`, or `[..., *table.shape[1:]]` for padded ids;
      or `(bags, metrics)`. Over Explicit axes bags that are a row of ids are laid out
      as `ids` are, sums over segments on every device.

    Raises:
      TypeError: `table` is no ShardedTable, or arguments of a wrong kind.
      ValueError: unknown `combiner` or `mode`, or shapes that do not go together.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.arange(6.0).reshape(3, 2), mesh, "x")
      >>> ids = jnp.array([[0, 2], [1, -1]])
      >>> sj.parallel.embedding_bag(table, ids, padding_id=-1, combiner="mean")
      Array([[2., 3.],
             [2., 3.]], dtype=float32)

    References:
      TorchRec, row-wise sharded `EmbeddingBagCollection`; Caffe2, `SparseLengthsSum`.
    """
    check_table(_CALL, table, "embedding_bag")
    if isinstance(ids, SegmentTensor):
        if segment_ids is not None or num_segments is not None:
            what = "are a SegmentTensor, which has its own segments"
            found = np.shape(ids.values)
            raise ValueError(_NO_BAGS.format(call=_CALL, found=found, what=what))
        ids, segment_ids, num_segments = ids.values, ids.segment_ids, ids.num_segments
    ids = beside(_CALL, table, _arguments.as_integers(_CALL, ids))
    lookup.check_mode(_CALL, mode)
    if weights is not None:
        weights = _arguments.to_array(_CALL, weights, "weights")
        _check_shape("weights", weights, ids)
    if segment_ids is not None:
        segment_ids = jnp.asarray(
            _arguments.as_integers(_CALL, segment_ids, "segment_ids")
        )
        _check_shape("segment_ids", segment_ids, ids)
        num_segments = _arguments.static_int(
            _CALL, "num_segments", num_segments, hint=" It is the number of bags."
        )
    if (ids.ndim == 1) == (segment_ids is None) or ids.ndim == 0:
        what = "without segment_ids" if ids.ndim < 2 else "with segment_ids"
        raise ValueError(_NO_BAGS.format(call=_CALL, found=ids.shape, what=what))

    max_norm = lookup.check_max_norm(_CALL, max_norm, table.dtype)
    skip = lookup.padding_mask(_CALL, ids, padding_id)
    ids = _arguments.as_ids(_CALL, ids, table.height)
    if segment_ids is not None:
        outside = ~indexing.in_range(segment_ids, num_segments or 0)
        skip = outside if skip is None else skip | outside
    skip = jnp.zeros_like(ids, bool) if skip is None else skip

    # All of it so long that each device gets as many bags, or as many elements.
    owners, lead = owners_of(table), ids.shape[:-1]
    layout = _compat.explicit_spec(ids)[: len(lead) + (combiner == "none")]
    fill = lambda x, value: None if x is None else _fill_up(owners, x, value)
    ids, skip, weights = fill(ids, -1), fill(skip, True), fill(weights, 0)
    rows, metrics = gather(_CALL, table, ids, skip, mode, capacity)
    if max_norm is not None:
        rows = lookup.clip_rows(rows, max_norm, table.ndim - 1)
    if segment_ids is None:
        out = _padded_bags(owners, rows, skip, weights, combiner)
        if combiner == "none":
            lead = (*lead, ids.shape[-1])
        out = _first(out, math.prod(lead))
        if len(lead) != 1:
            out = gathered(out).reshape(*lead, *table.shape[1:])
        if owners.is_explicit:
            rest = (None,) * (out.ndim - len(layout))
            out = jax.reshard(out, owners.sharding(PartitionSpec(*layout, *rest)))
    else:
        segments = fill(segment_ids, -1), num_segments
        out = _segment_bags(owners, rows, skip, weights, segments, combiner)
        out = _first(out, segment_ids.size) if combiner == "none" else out
    return (out, metrics) if return_metrics else out


def _check_shape(name: str, x: jax.Array, ids: Any) -> None:
    if x.shape != ids.shape:
        raise ValueError(
            f"{_CALL}: {name} must have the shape of ids, {ids.shape}, one for each, "
            f"got {x.shape}."
        )


def _fill_up(owners: Owners, x: jax.Array, value: Any) -> jax.Array:
    """`[n]`, or `[..., L]` as `[B, L]`, its length a multiple of the devices."""
    lead = math.prod(x.shape[:-1]) if x.ndim > 1 else x.size
    beyond = -lead % owners.devices
    if beyond or x.ndim > 2:
        x = gathered(x)
    x = x.reshape(lead, *x.shape[-1:]) if x.ndim > 1 else x
    if beyond:
        around = [(0, beyond), *((0, 0) for _ in x.shape[1:])]
        x = jnp.pad(x, around, constant_values=value)
    want = owners.sharding(owners.batch_spec)
    return jax.reshard(x, want) if owners.is_explicit else x


def _first(x: jax.Array, count: int) -> jax.Array:
    """Without what was filled up."""
    return x if x.shape[0] == count else gathered(x)[:count]


def _padded_bags(owners, rows, skip, weights, combiner: str) -> jax.Array:
    """`[B, ...]` of rows `[B, L, ...]`, each device its own bags."""

    def body(rows, skip, *weights):
        flat = rows.reshape(math.prod(rows.shape[:2]), *rows.shape[2:])
        return _reduce(flat, skip, weights, combiner)

    args = [rows, skip, *([] if weights is None else [weights])]
    if not skip.size:
        return body(*args)
    spec = owners.batch_spec
    out = owners.run(body, *args, into=(spec,) * len(args), out=spec)
    return out.reshape(skip.size, *rows.shape[2:]) if combiner == "none" else out


def _segment_bags(owners, rows, skip, weights, segments, combiner: str) -> jax.Array:
    """`[num_segments, ...]` of rows `[n, ...]`."""
    ids, count = segments
    args = [rows, skip, ids, *([] if weights is None else [weights])]
    if combiner not in _SUMS or not skip.size:
        rows, skip, ids, *weights = (gathered(x) for x in args)
        return _reduce(rows, skip, weights, combiner, ids, count)

    def body(rows, skip, ids, *weights):
        # Sums of this device's elements, and what they are divided by.
        wide = indexing.accumulator_dtype(_float_if(combiner != "sum", rows.dtype))
        total = _reduce(rows.astype(wide), skip, weights, "sum", ids, count)
        by = weights[0].astype(total.dtype) if weights else jnp.ones(ids.shape, wide)
        by = by * by if combiner == "sqrtn" else by
        by = segment_sum(indexing.zero_unless(~skip, by), ids, count)
        return jax.lax.psum((total, by), owners.mesh.axis_names)

    spec = owners.batch_spec
    into, out = (spec,) * len(args), PartitionSpec()
    total, by = owners.run(body, *args, into=into, out=out, vma=True)
    if combiner != "sum":
        by = by.reshape(-1, *(1 for _ in total.shape[1:]))
        some = by != 0
        by = jnp.where(some, by, jnp.ones((), by.dtype))
        by = jnp.sqrt(by) if combiner == "sqrtn" else by
        total = jnp.where(some, total / by, jnp.zeros((), total.dtype))
    floats = jnp.issubdtype(rows.dtype, jnp.floating)
    return total.astype(rows.dtype) if floats else total


def _float_if(wanted: bool, dtype: Any) -> Any:
    floats = jnp.issubdtype(dtype, jnp.floating)
    return dtype if floats or not wanted else jnp.dtype(jnp.float32)


def _reduce(rows, skip, weights, combiner, segment_ids=None, count=None) -> jax.Array:
    """`sparsejax.embedding_bag` of rows that each element has one of, in order."""
    here = jax.lax.iota(jnp.int32, skip.size).reshape(skip.shape)
    return _bag.embedding_bag(
        rows,
        jnp.where(skip, np.int32(-1), here),
        segment_ids,
        count,
        weights=weights[0] if weights else None,
        combiner=combiner,
        padding_id=-1,
    )
