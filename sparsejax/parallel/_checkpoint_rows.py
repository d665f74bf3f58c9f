"""Rows of a saved table, in the order that another layout wants them.

A checkpoint holds a table as it lay on its N devices. Device m of the M devices that it
is restored to owns the ids `first + i * step`; those of them that one saved part holds
lie there at equal distances too. So what a device needs is a few strided reads of the
file, and no device ever holds more than its own part:

    from "block"            1 read
    from "mod" to "block"   N reads
    from "mod" to "mod"     N / gcd(N, M) reads

The file keeps each saved part as one chunk, which is read whole. From N to M devices
of "mod", a device therefore reads `N / gcd(N, M)` saved parts, and all devices together
read the table `M / gcd(N, M)` times: once when the number of devices is halved, twice
when it is doubled, M times between "mod" and "block". Chunks up to a gigabyte are kept
in memory meanwhile, and read once by all devices of a process.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sparsejax.parallel._table import rows_per_shard


_CACHE_BYTES = 1 << 30
_READS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Which row of a table lies where. A plain array is one part, in blocks.

    Args:
      height: V, the number of rows.
      shards: N, the number of parts.
      layout: `"mod"` or `"block"`.
    """

    height: int
    shards: int
    layout: str

    @property
    def per_shard(self) -> int:
        """R, the number of rows of each part."""
        return rows_per_shard(self.height, self.shards)

    def progression(self, start: int, stop: int) -> Iterator[tuple[int, range]]:
        """The ids at positions `[start, stop)`: for each part, where the first of them
        goes, counted from `start`, and the ids, which lie at equal distances."""
        rows = self.per_shard
        for shard in range(start // rows, -(-stop // rows)):
            low = max(start, shard * rows)
            high = min(stop, (shard + 1) * rows)
            at = low - shard * rows
            first, step = (
                (shard + self.shards * at, self.shards)
                if self.layout == "mod"
                else (low, 1)
            )
            ids = range(first, first + step * (high - low), step)
            named = max(0, -(-(self.height - first) // step))
            yield low - start, ids[:named]

    def runs(self, ids: range) -> Iterator[tuple[slice, slice]]:
        """Where ids of equal distances lie: slices of `ids`, and of positions."""
        if not ids:
            return
        if self.layout == "block" or self.shards == 1:
            yield slice(0, len(ids), 1), slice(ids.start, ids[-1] + 1, ids.step)
            return
        # Every `turn`-th of the ids lies on the same part, `distance` rows further.
        turn = self.shards // math.gcd(ids.step, self.shards)
        distance = ids.step * turn // self.shards
        for k, first in enumerate(ids[:turn]):
            count = len(range(k, len(ids), turn))
            at = first % self.shards * self.per_shard + first // self.shards
            end = at + distance * (count - 1) + 1
            yield slice(k, len(ids), turn), slice(at, end, distance)


def open_array(directory: str, name: str) -> Any:
    """The tensorstore of one array of an orbax checkpoint."""
    import tensorstore

    base = directory if "://" in directory else f"file://{directory}"
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec = {"driver": "zarr", "kvstore": kvstore, "recheck_cached_data": "open"}
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    return tensorstore.open(spec, read=True, context=context).result()


def read_part(
    stored: Any,
    source: RowLayout,
    target: RowLayout,
    index: Sequence[slice],
    shape: Sequence[int],
) -> np.ndarray:
    """What belongs at `index` of the table laid out as `target`, padding as zeros.

    Args:
      stored: what can be cut by slices and then `.read()`, in the order of `source`.
      source: how it was saved.
      target: how it is to lie.
      index: one slice for each axis, of an array of `shape`.
      shape: of the table as `target` stores it.
    """
    bounds = [s.indices(n) for s, n in zip(index, shape)]
    rows, *others = (slice(start, stop) for start, stop, _ in bounds)
    sizes = [stop - start for start, stop, _ in bounds]
    out = np.zeros(sizes, stored.dtype.numpy_dtype)
    wanted = [
        (out[at : at + len(ids)][into], where)
        for at, ids in target.progression(rows.start, rows.stop)
        for into, where in source.runs(ids)
    ]
    # Only so many at once: what is read lies beside `out` until it is copied there.
    for k in range(0, len(wanted), _READS_AT_ONCE):
        some = wanted[k : k + _READS_AT_ONCE]
        reads = [stored[(where, *others)].read() for _, where in some]
        for (into, _), read in zip(some, reads):
            into[...] = read.result()
    return out
