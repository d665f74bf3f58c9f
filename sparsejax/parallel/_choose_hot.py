"""choose_hot: the hot rows with which a step sends the fewest bytes.

The cold rows lie at N owners, over the other axes of the mesh they are replicated r
times, so there are M = r N devices. With rows of d bytes, K hot rows, S reads of the
table in a step, and C(K) the most distinct cold rows that a device requests from one
owner in one of the reads, a device sends

    cold    (d + 4) S C (2 (N - 1) + (r - 1) N)     rows, gradients, their replicas
    hot     (d + 1) K 2 (M - 1) / M                 an all-reduce

A cold row that all devices read takes 1 / N of a slot in C. So for S = r = 1 it sends
as much as a hot row, but for the ids, since a device requests a row once however often
it reads it. A row that only some devices read sends less when it is cold. Hot rows send
less where rows are short, where a table is replicated or is read several times, or
where owners are asked for unequal numbers of rows.

Ids are ranked by the number of devices that read them, and the K first are tried, for K
the powers of two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

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
    sample_ids: Any,
    row_bytes: int,
    *,
    id_bytes: int = 4,
    reads: int = 1,
) -> HotChoice:
    """Chooses hot rows for batches like this one.

    Args:
      table: how the rows would be sharded; its values may be abstract.
      sample_ids: integers, the ids of a batch of all devices, device after device.
      row_bytes: d, the bytes of a row.
      id_bytes: of an id.
      reads: S, how often a step reads the table for ids like these.

    Returns:
      HotChoice, the one that sends the least; of several, the one with fewest hot rows.
    """
    owners = owners_of(table)
    devices, count = owners.devices, owners.count
    replicas = devices // count
    ids = np.asarray(sample_ids).reshape(-1)
    # Each pair of a device and an id that it reads, once.
    device = np.arange(ids.size) // max(1, -(-ids.size // devices))
    valid = (ids >= 0) & (ids < table.height)
    ids, device = ids[valid].astype(np.int64), device[valid]
    distinct, which, times = np.unique(ids, return_inverse=True, return_counts=True)
    pairs = np.unique(device * max(1, distinct.size) + which)
    device, which = np.divmod(pairs, max(1, distinct.size))
    on_devices = np.bincount(which, minlength=distinct.size)
    order = np.lexsort((-times, -on_devices))
    rank = np.empty_like(order)
    rank[order] = np.arange(distinct.size)

    of = distinct % count if table.layout == "mod" else distinct // owners.rows
    group, rank = device * count + of[which], rank[which]
    summed = row_bytes + count_dtype(owners).itemsize
    sizes = [0, *(2**k for k in range(distinct.size.bit_length()))]
    best = None
    for size in sizes:
        asked = np.bincount(group[rank >= size], minlength=1)
        capacity = max(1, int(asked.max()))
        sent = reads * capacity * (2 * (count - 1) + (replicas - 1) * count)
        cold = (row_bytes + id_bytes) * sent
        hot = round(2 * size * summed * (devices - 1) / devices)
        if best is None or cold + hot < best.wire:
            best = HotChoice(np.sort(distinct[order[:size]]), capacity, cold + hot)
    assert best is not None
    return best
