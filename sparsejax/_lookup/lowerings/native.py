"""Lowerings for CPUs that call the kernels of sparsejax-native, where it is installed.

Where it is not, or has no kernel for the arrays, they are those of cpu.py.
"""

from typing import Any

import jax

from sparsejax import _arguments, _native
from sparsejax._lookup.lowerings import cpu
from sparsejax._rows import indexing


def read_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`xla.read_rows`."""
    if not _native.enabled() or not _native.can_read(table, ids):
        return cpu.read_rows(table, ids)
    return _native.read_rows(table, ids)


def bag_sum(
    table: jax.Array,
    ids: jax.Array,
    *rest: jax.Array,
    segmented: bool,
    weighted: bool,
    num_bags: int,
    indices_are_sorted: bool,
    bits: int | None = None,
) -> jax.Array:
    """`xla.bag_sum`, to rounding."""
    weights: Any = rest[-1] if weighted else None
    segment_ids: Any = None
    if segmented:
        segment_ids = _arguments.as_ids("bag_sum", rest[0], num_bags)
        id_type = max(ids.dtype, segment_ids.dtype, key=lambda kind: kind.itemsize)
        ids, segment_ids = ids.astype(id_type), segment_ids.astype(id_type)
    if not _native.enabled() or not _native.can_sum(table, ids):
        return cpu.bag_sum(
            table,
            ids,
            *rest,
            segmented=segmented,
            weighted=weighted,
            num_bags=num_bags,
            indices_are_sorted=indices_are_sorted,
            bits=bits,
        )
    if segmented and not indices_are_sorted:
        ids, segment_ids, weights = cpu.sort_by_bag(ids, segment_ids, weights, num_bags)
    dtype: Any = indexing.accumulator_dtype(table.dtype) if bits is None else "float32"
    return _native.sum_bags(table, ids, segment_ids, weights, num_bags, dtype, bits)
