"""choose_hot: the hot rows with which a step sends the fewest bytes.

The cold rows lie at N owners, over the other axes of the mesh they are replicated r
times, so there are M = r N devices. With rows of d bytes, K hot rows, S reads of the
table in a step, and C(K) the most distinct cold rows that a device requests from one
owner in one of the reads, a device sends

    cold    (d + 4) S C (2 (N - 1) + (r - 1) N)     rows, gradients, their replicas
    hot     (d + 1) K 2 (M - 1) / M                 an all-reduce, of 16-bit numbers
                                                    as float32: 2 d

A cold row that all devices read takes 1 / N of a slot in C. So for S = r = 1 it sends
as much as a hot row, but for the ids, since a device requests a row once however often
it reads it. A row that only some devices read sends less when it is cold. Hot rows send
less where rows are short, where a table is replicated or is read several times, or
where owners are asked for unequal numbers of rows.

Ids are ranked by the number of devices that read them, and the K first are tried, for K
the powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsejax._rows import indexing
from sparsejax.parallel._hot_reads import count_dtype
from sparsejax.parallel._lookup import owners_of
from sparsejax.parallel._table import ShardedTable


class HotChoice(NamedTuple):
    """Which rows to make hot, and what a step then sends.

    Args:
      hot_ids: int64 `[K]`, ascending; empty if no hot rows are best.
      capacity: C, the most distinct cold rows that a device requests from one owner.
      wire: bytes that a device sends in a step: lookup, gradient and update.
    """

    hot_ids: np.ndarray
    capacity: int
    wire: int


def choose_hot(
    table: ShardedTable,
    samples: Sequence[Any],
    row_bytes: int,
    *,
    id_bytes: int = 4,
) -> HotChoice:
    """Chooses hot rows for batches like this one.

    Args:
      table: how the rows would be sharded; its values may be abstract.
      samples: for each read of the table in a step its ids: integers, those of a batch
        of all devices, device after device.
      row_bytes: d, the bytes of a row.
      id_bytes: of an id.

    Returns:
      HotChoice, the one that sends the least; of several, the one with fewest hot rows.
    """
    owners = owners_of(table)
    devices, count = owners.devices, owners.count
    replicas = devices // count
    # Each id that a device reads in one read, once.
    asked = [_distinct_by_device(table, ids, devices) for ids in samples]
    every = np.concatenate([ids for _, ids in asked])
    distinct, on_devices = np.unique(every, return_counts=True)
    times = np.bincount(np.searchsorted(distinct, _in_range(table, samples)))
    order = np.lexsort((-times, -on_devices))
    rank = np.empty_like(order)
    rank[order] = np.arange(distinct.size)
    groups = [device * count + table.row_layout.owner_of(ids) for device, ids in asked]
    ranks = [rank[np.searchsorted(distinct, ids)] for _, ids in asked]

    wide = indexing.accumulator_dtype(table.dtype).itemsize // table.dtype.itemsize
    summed = row_bytes * wide + count_dtype(owners).itemsize
    sizes = [0, *(2**k for k in range(distinct.size.bit_length()))]
    best = None
    for size in sizes:
        capacity = 1
        for group, rank in zip(groups, ranks):
            requests = np.bincount(group[rank >= size], minlength=1)
            capacity = max(capacity, int(requests.max()))
        sent = len(samples) * capacity * (2 * (count - 1) + (replicas - 1) * count)
        cold = (row_bytes + id_bytes) * sent
        hot = round(2 * size * summed * (devices - 1) / devices)
        if best is None or cold + hot < best.wire:
            best = HotChoice(np.sort(distinct[order[:size]]), capacity, cold + hot)
    assert best is not None
    return best


def _in_range(table: ShardedTable, samples: Sequence[Any]) -> np.ndarray:
    ids = np.concatenate([np.asarray(ids).reshape(-1) for ids in samples])
    return ids[(ids >= 0) & (ids < table.height)].astype(np.int64)


def _distinct_by_device(
    table: ShardedTable, ids: Any, devices: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of a device and an id that it reads, each once."""
    ids = np.asarray(ids).reshape(-1)
    device = np.arange(ids.size) // max(1, -(-ids.size // devices))
    valid = (ids >= 0) & (ids < table.height)
    height = max(1, table.height)
    pairs = np.unique(device[valid] * height + ids[valid].astype(np.int64))
    return np.divmod(pairs, height)
