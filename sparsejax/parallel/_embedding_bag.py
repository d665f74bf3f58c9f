"""embedding_bag: reads rows of a row-sharded table and reduces them bag by bag.

The rows are read as in `sparsejax.parallel.lookup`, each distinct row once per device.
They form a small table, which `sparsejax.embedding_bag` reduces on each device. A bag
of padded ids lies on one device. A bag of segment ids may span several devices, whose
sums are then added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike
from sparsejax._lookup import embedding_bag as _bag, lookup
from sparsejax._rows import indexing, reduce_row_table
from sparsejax._segments import SegmentTensor
from sparsejax._segments.reduce.sums import segment_sum
from sparsejax.parallel._exchange import Metrics, Owners
from sparsejax.parallel._lookup import (
    check_table,
    gather,
    owners_of,
    put_on_mesh,
)
from sparsejax.parallel._over_devices import TableOverDevices
from sparsejax.transform.table import replicate


_CALL = "sparsejax.parallel.embedding_bag"
_SUMS = ("sum", "mean", "sqrtn")


def embedding_bag(
    table: TableOverDevices,
    ids: ArrayLike | SegmentTensor,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    weights: ArrayLike | None = None,
    combiner: str = "sum",
    mode: str = "fill",
    padding_id: int | None = None,
    max_norm: float | None = None,
    capacity: int | str | None = None,
    return_metrics: bool = False,
) -> Any:
    """Reads rows of a table that is sharded by rows, and reduces each bag to one row.

    Returns the same bags as `sparsejax.embedding_bag`. With `x_i = table[ids[i]]` and
    weights `w_i`, `out[b] = sum w_i x_i` over the i of bag b, or their mean, sqrtn,
    max, min or logsumexp. The rows are sent as in `sparsejax.parallel.lookup`, each
    distinct row once per device, and reduced where they arrive.

    For padded ids `[..., L]` nothing else is sent. With segment ids the devices' sums
    `[num_segments, ...]` are all-reduced; for the combiners max, min and logsumexp the
    rows are gathered on every device.

    Args:
      table: from `shard_rows`.
      ids: integers, those of the whole batch: `[n]` with `segment_ids`; or `[..., L]`,
        each row a bag padded with `padding_id`; or a SegmentTensor of ids.
      segment_ids: integers `[n]`, the bag of each id; an id whose segment id is outside
        `[0, num_segments)` is in no bag, and is not read.
      num_segments: int, the number of bags.
      weights: real numbers with the shape of `ids` (or of its values), for the
        combiners sum, mean and sqrtn.
      combiner: how a bag is reduced, as in `sparsejax.embedding_bag`.
      mode: what an id out of range reads: `"fill"` (NaN), `"clip"`, `"zero"`,
        `"raise"` or `"error"`, as in `sparsejax.lookup`.
      padding_id: int, an id that does not count in any bag.
      max_norm: positive number, as in `sparsejax.lookup`.
      capacity: as in `sparsejax.parallel.lookup`.
      return_metrics: whether to also return the `Metrics` of the exchange.

    Returns:
      `[num_segments, *table.shape[1:]]`, or `[..., *table.shape[1:]]` for padded ids;
      or `(bags, metrics)`. Over Explicit axes bags of padded ids are sharded like
      `ids`, and bags of segment ids are on every device.

    Raises:
      TypeError: `table` is not a ShardedTable, or an argument has the wrong type.
      ValueError: `combiner` or `mode` is unknown, or shapes do not match.

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
            raise ValueError(
                f"{_CALL}: segment_ids and num_segments must be left out if ids is a "
                "SegmentTensor, which has its own segments. Leave them out, or pass "
                "ids.values with them."
            )
        ids, segment_ids, num_segments = ids.values, ids.segment_ids, ids.num_segments
    ids = put_on_mesh(_CALL, table, _arguments.as_integers(_CALL, ids))
    mode = lookup.check_mode(_CALL, mode)
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
        raise ValueError(
            f"{_CALL}: ids of shape {ids.shape} "
            f"{'without' if ids.ndim < 2 else 'with'} segment_ids. Pass ids [n] with "
            "segment_ids and num_segments, a SegmentTensor, or only ids padded to "
            "[..., L], one bag per row."
        )

    max_norm = lookup.check_max_norm(_CALL, max_norm, table.dtype)
    skip = lookup.padding_mask(_CALL, ids, padding_id)
    ids = _arguments.as_ids(_CALL, ids, table.height)
    if segment_ids is not None:
        outside = ~indexing.in_range(segment_ids, num_segments or 0)
        skip = outside if skip is None else skip | outside
    out, metrics = _reduce_sharded(
        _CALL,
        table,
        ids,
        skip,
        weights,
        None if segment_ids is None else (segment_ids, num_segments),
        combiner,
        mode,
        max_norm,
        capacity,
    )
    return (out, metrics) if return_metrics else out


@reduce_row_table.register
def _reduce_row_table(
    table: TableOverDevices,
    call: str,
    ids: Any,
    skip: jax.Array | None,
    weights: jax.Array | None,
    segments: tuple[jax.Array, int] | None,
    *,
    combiner: str,
    mode: str,
    max_norm: float | None = None,
) -> jax.Array:
    """The bags of a table over devices for `sparsejax.embedding_bag` and the layers."""
    check_table(call, table, "embedding_bag")
    ids, how = put_on_mesh(call, table, ids), (combiner, mode, max_norm, None)
    return _reduce_sharded(call, table, ids, skip, weights, segments, *how)[0]


def _reduce_sharded(
    call: str,
    table: TableOverDevices,
    ids: jax.Array,
    skip: jax.Array | None,
    weights: jax.Array | None,
    segments: tuple[jax.Array, Any] | None,
    combiner: str,
    mode: str,
    max_norm: float | None,
    capacity: int | str | None,
) -> tuple[jax.Array, Metrics]:
    """`embedding_bag`, from checked arguments."""
    segment_ids, num_segments = segments or (None, None)
    skip = jnp.zeros_like(ids, bool) if skip is None else skip

    # Pad so that every device gets the same number of bags, or elements.
    owners, lead = owners_of(table), ids.shape[:-1]
    spec = _compat.explicit_spec(ids)[: len(lead) + (combiner == "none")]
    ids, skip = pad_examples(owners, ids, -1), pad_examples(owners, skip, True)
    weights = None if weights is None else pad_examples(owners, weights, 0)
    rows, metrics = gather(call, table, ids, skip, mode, capacity)
    if max_norm is not None:
        rows = lookup.clip_rows(rows, max_norm, table.ndim - 1)
    if segment_ids is None:
        out = _padded_bags(owners, rows, skip, weights, combiner)
        if combiner == "none":
            lead = (*lead, ids.shape[-1])
        out = remove_padding(out, math.prod(lead))
        if len(lead) != 1:
            out = replicate(out).reshape(*lead, *table.shape[1:])
        if owners.is_explicit:
            rest = (None,) * (out.ndim - len(spec))
            out = jax.sharding.reshard(
                out, owners.sharding(PartitionSpec(*spec, *rest))
            )
    else:
        segments = pad_examples(owners, segment_ids, -1), num_segments
        out = _segment_bags(owners, rows, skip, weights, segments, combiner)
        if combiner == "none":
            out = remove_padding(out, segment_ids.size)
    return out, metrics


def sum_bags(
    owners: Owners,
    read_rows: Callable[[jax.Array], jax.Array],
    height: int,
    ids: jax.Array,
    weights: jax.Array | None,
    segment_ids: jax.Array | None,
    num_bags: int,
) -> jax.Array:
    """`sparsejax._lookup.bag_sum` of rows that are sharded over devices.

    Args:
      owners: which device owns which rows.
      read_rows: reads the rows of ids, sharded like them.
      height: ids out of `[0, height)` add nothing.
      ids, weights, segment_ids, num_bags: as in `bag_sum`.
    """
    ids = pad_examples(owners, ids, -1)
    skip = ~indexing.in_range(ids, height)
    weights = None if weights is None else pad_examples(owners, weights, 0)
    rows = read_rows(ids)
    rows = rows.astype(indexing.accumulator_dtype(rows.dtype))
    if segment_ids is None:
        out = _padded_bags(owners, rows, skip, weights, "sum")
        return remove_padding(out, num_bags)
    segments = pad_examples(owners, segment_ids, -1), num_bags
    return _segment_bags(owners, rows, skip, weights, segments, "sum")


def _check_shape(name: str, x: jax.Array, ids: Any) -> None:
    if x.shape != ids.shape:
        raise ValueError(
            f"{_CALL}: {name} must have the shape of ids, {ids.shape}, got {x.shape}."
        )


def pad_examples(owners: Owners, x: jax.Array, value: Any) -> jax.Array:
    """`[n]`, or `[..., L]` as `[B, L]`, padded to a multiple of the devices."""
    lead = math.prod(x.shape[:-1]) if x.ndim > 1 else x.size
    padding = -lead % owners.devices
    if padding or x.ndim > 2:
        x = replicate(x)
    x = x.reshape(lead, *x.shape[-1:]) if x.ndim > 1 else x
    if padding:
        widths = [(0, padding), *((0, 0) for _ in x.shape[1:])]
        x = jnp.pad(x, widths, constant_values=value)
    batch = owners.sharding(owners.batch_spec)
    return jax.sharding.reshard(x, batch) if owners.is_explicit else x


def remove_padding(x: jax.Array, count: int) -> jax.Array:
    """The first `count` of padded examples."""
    return x if x.shape[0] == count else replicate(x)[:count]


def _padded_bags(owners, rows, skip, weights, combiner: str) -> jax.Array:
    """`[B, ...]` of rows `[B, L, ...]`; each device reduces its own bags."""

    def body(rows, skip, *weights):
        flat = rows.reshape(math.prod(rows.shape[:2]), *rows.shape[2:])
        return _reduce(flat, skip, weights, combiner)

    args = [rows, skip, *([] if weights is None else [weights])]
    if not skip.size:
        return body(*args)
    spec = owners.batch_spec
    out = owners.shard_map(body, *args, in_specs=(spec,) * len(args), out_specs=spec)
    return out.reshape(skip.size, *rows.shape[2:]) if combiner == "none" else out


def _segment_bags(owners, rows, skip, weights, segments, combiner: str) -> jax.Array:
    """`[num_segments, ...]` of rows `[n, ...]`."""
    ids, count = segments
    args = [rows, skip, ids, *([] if weights is None else [weights])]
    if combiner not in _SUMS or not skip.size:
        rows, skip, ids, *weights = (replicate(x) for x in args)
        return _reduce(rows, skip, weights, combiner, ids, count)

    def body(rows, skip, ids, *weights):
        # This device's sums, and the divisors of the mean and of sqrtn.
        is_float = jnp.issubdtype(rows.dtype, jnp.floating)
        dtype = rows.dtype if is_float or combiner == "sum" else jnp.float32
        wide = indexing.accumulator_dtype(dtype)
        total = _reduce(rows.astype(wide), skip, weights, "sum", ids, count)
        by = weights[0].astype(total.dtype) if weights else jnp.ones(ids.shape, wide)
        by = by * by if combiner == "sqrtn" else by
        by = segment_sum(indexing.zero_unless(~skip, by), ids, count)
        # One by one: jax 0.7.2 cannot transpose a sum of which only a part is used.
        return tuple(jax.lax.psum(x, owners.mesh.axis_names) for x in (total, by))

    total, by = owners.shard_map(
        body,
        *args,
        in_specs=(owners.batch_spec,) * len(args),
        out_specs=PartitionSpec(),
        check_vma=True,
    )
    if combiner != "sum":
        by = by.reshape(-1, *(1 for _ in total.shape[1:]))
        some = by != 0
        by = jnp.where(some, by, jnp.ones((), by.dtype))
        by = jnp.sqrt(by) if combiner == "sqrtn" else by
        total = jnp.where(some, total / by, jnp.zeros((), total.dtype))
    is_float = jnp.issubdtype(rows.dtype, jnp.floating)
    return total.astype(rows.dtype) if is_float else total


def _reduce(rows, skip, weights, combiner, segment_ids=None, count=None) -> jax.Array:
    """`sparsejax.embedding_bag` of `rows`, where element k of the bags is row k."""
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
