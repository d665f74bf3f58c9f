"""Resharding: reads rows of a saved table in the order of another layout.

A checkpoint stores a table as it was sharded over N devices. Each of the M devices that
restore it owns the ids `first + i * step`, and within one saved part its rows are
equally spaced. A device therefore needs a few strided reads of the file, and never
holds more than its own part:

    from "block"            1 read
    from "mod" to "block"   N reads
    from "mod" to "mod"     N / gcd(N, M) reads

The file keeps each saved part as one chunk, and a chunk is read whole. From N to M
devices of "mod", a device therefore reads `N / gcd(N, M)` saved parts, and all devices
together read the table `M / gcd(N, M)` times: once if the number of devices is halved,
twice if it is doubled, M times between "mod" and "block". Up to a gigabyte of chunks is
cached, so that the devices of a process read each chunk once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsejax.parallel._row_layout import RowLayout


_CACHE_BYTES = 1 << 30
_READS_AT_ONCE = 16


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
    """The part at `index` of a table in the layout `target`, with zeros for padding.

    Args:
      stored: the table in the layout `source`; `stored[slices].read()` is a future.
      source: the saved layout.
      target: the requested layout.
      index: one slice for each axis of `shape`.
      shape: of the array that stores the table in the layout `target`.
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
    # Limited, because each read takes memory until it is copied into `out`.
    for k in range(0, len(wanted), _READS_AT_ONCE):
        some = wanted[k : k + _READS_AT_ONCE]
        reads = [stored[(where, *others)].read() for _, where in some]
        for (into, _), read in zip(some, reads):
            into[...] = read.result()
    return out
