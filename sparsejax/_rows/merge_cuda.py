"""Merging duplicates on CUDA without atomic additions.

XLA compiles a scatter-add of floats to a compare-and-swap loop for each number, unless
it knows that the ids are unique (openxla/xla#46225). The order of such additions, and
so the last bits of sums, differ from run to run. So duplicates are merged first,
without a scatter. benchmarks/NOTES.md shows the compiled programs.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._rows import indexing


# Powers of two: elements of a chunk, and sums of chunks of a chunk.
_CHUNK, _CHUNK_OF_SUMS = 8, 32
# Elements of a gradient up to which the launches take longer than a copy of it.
_MAX_STACKED = 2**20


def merge_rows(
    rows: jax.Array, values: jax.Array, height: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Sums the values of equal row ids; see `optim._lazy.block_pass.merge_rows`.

    Ids are sorted with their positions, the values are gathered in that order, and each
    run of equal ids is added up, always in the same order. `height` may be traced.
    """
    return _merge(rows, values, height)[0]


def merge_each(
    gradients: Sequence[tuple[jax.Array, jax.Array, int]],
) -> list[tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
    """Merges several gradients; small ones of equal shapes share kernels.

    A merge is about 20 kernels; stacking large gradients costs more than that.
    """
    alike = collections.defaultdict(list)
    for k, (rows, values, _) in enumerate(gradients):
        alone = k if values.size > _MAX_STACKED else None
        alike[rows.shape, rows.dtype, values.shape, values.dtype, alone].append(k)
    merged: dict[int, Any] = {}
    for group in alike.values():
        if len(group) == 1:
            merged[group[0]] = merge_rows(*gradients[group[0]])
            continue
        rows, values, heights = zip(*(gradients[k] for k in group))
        ids = jnp.stack(rows)
        limits = jnp.asarray(heights, ids.dtype)
        stacked = jax.vmap(merge_rows)(ids, jnp.stack(values), limits)
        merged |= {k: tuple(x[i] for x in stacked) for i, k in enumerate(group)}
    return [merged[k] for k in range(len(gradients))]


def merge(
    rows: jax.Array, values: jax.Array, *, height: int, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns distinct rows, slots, sums and their number; see `merge.coalesce`."""
    (distinct, at, total, count), slot = _merge(rows, values, height)
    more = (0, max(capacity - rows.shape[0], 0))
    empty = _arguments.scalar(height, rows)
    distinct = jnp.pad(distinct, more, constant_values=empty)[:capacity]
    at = jnp.pad(at, more, constant_values=np.int32(rows.shape[0]))[:capacity]
    slot = jnp.minimum(slot, np.int32(capacity))
    return distinct, slot, indexing.take_rows(total, at), count


def _merge(rows: jax.Array, values: jax.Array, height: Any) -> tuple[Any, jax.Array]:
    """Returns `merge_rows`, and the place of each row among the distinct ones."""
    n = rows.shape[0]
    height, slots = jnp.asarray(height, rows.dtype), lax.iota(jnp.int32, n)
    ids, order = lax.sort((rows, slots), num_keys=1, is_stable=True)
    follows = jnp.pad(ids[1:] == ids[:-1], (1, 0))
    wide = indexing.accumulator_dtype(values.dtype)
    total = run_sums(values[order].astype(wide), follows, _CHUNK).astype(values.dtype)
    # These are `indexing.positions`, but with unique ids: no write is atomic. The
    # others go to different places beyond the end.
    is_filled = ids < height
    first = is_filled & ~follows
    place = jnp.cumsum(first, dtype=jnp.int32) - np.int32(1)
    to = jnp.where(first, place, slots + np.int32(n))
    at = jnp.full((n,), np.int32(n))
    at = at.at[to].set(slots, mode="drop", unique_indices=True)
    count = place[-1] + np.int32(1)
    distinct = jnp.where(slots < count, ids[jnp.minimum(at, np.int32(n - 1))], height)
    place = jnp.where(is_filled, place, np.iinfo(np.int32).max)
    return (distinct, at, total, count), slots.at[order].set(place, unique_indices=True)


def run_sums(values: jax.Array, follows: jax.Array, chunk: int) -> jax.Array:
    """Sums from each element to the end of its run.

    `sums[i] = values[i] + (sums[i + 1] if follows[i + 1] else 0)`. Inside a chunk the
    sums of 1, 2, 4, ... elements are added to the sums behind them, which XLA fuses
    into one kernel. The sums of whole chunks are added up in the same way.

    Args:
      values: `[n, ...]`.
      follows: bool `[n]`, True if an element is in the run of the element before it.
      chunk: a power of two.

    Returns:
      `[n, ...]`.
    """
    n = values.shape[0]
    chunks = -(-n // chunk)
    pad = chunks * chunk - n
    v = jnp.pad(values, ((0, pad),) + ((0, 0),) * (values.ndim - 1))
    v = v.reshape(chunks, chunk, *values.shape[1:])
    f = jnp.pad(follows, (0, pad)).reshape(chunks, chunk)

    sums, step = v, 1
    same = _shift(f, 1, False)  # the next `step` elements are in the run
    ends = _shift(f, 1, True)  # the run goes on to the end of the chunk
    while step < chunk:
        sums = sums + indexing.zero_unless(same, _shift(sums, step, 0))
        same &= _shift(same, step, False)
        ends &= _shift(ends, step, True)
        step *= 2
    if chunks > 1:
        goes_on = f[1:, 0]
        firsts = jnp.pad(goes_on & ends[:-1, 0], (1, 0))
        later = indexing.zero_unless(
            goes_on, run_sums(sums[:, 0], firsts, _CHUNK_OF_SUMS)[1:]
        )
        later = jnp.pad(later, ((0, 1),) + ((0, 0),) * (later.ndim - 1))
        sums = sums + indexing.zero_unless(ends, later[:, None])
    return sums.reshape(chunks * chunk, *values.shape[1:])[:n]


def _shift(x: jax.Array, by: int, fill: Any) -> jax.Array:
    """Returns `x[:, by:]`, padded at the end with `fill`."""
    widths = ((0, 0), (0, by)) + ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x[:, by:], widths, constant_values=fill)
