"""Reading and writing rows of arrays by id, and accumulator dtypes.

Reading an id out of range (outside `[0, height)`) gives zeros; writing it does nothing.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from sparsejax import _arguments, _compat, _mesh


def in_range(ids: jax.Array, height: int) -> jax.Array:
    """Returns which ids are in `[0, height)`."""
    return _in_range(ids, _arguments.scalar(height, ids))


# Jitted so that JAX traces it once for tables of all heights.
@functools.partial(jax.jit, inline=True)
def _in_range(ids: jax.Array, height: Any) -> jax.Array:
    return (ids >= 0) & (ids < height)


def append_axes(x: jax.Array, ndim: int) -> jax.Array:
    """Appends axes of length 1 to `x`, up to rank `ndim`."""
    return reshape(x, x.shape + (1,) * (ndim - x.ndim))


def reshape(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reshapes `x`, without the copy that JAX traces if `x` has this shape."""
    return x if x.shape == shape else x.reshape(shape)


def merge_axes(x: Any, count: int) -> Any:
    """Merges the first `count` axes of `x` into one.

    Unlike `x.reshape(-1, ...)`, it works if another axis has length 0.
    """
    return x.reshape(math.prod(x.shape[:count]), *x.shape[count:])


@functools.partial(jax.jit, inline=True)
def zero_unless(keep: jax.Array, values: jax.Array) -> jax.Array:
    """Zeros the `values` whose mask `keep`, over the leading axes, is false."""
    keep = append_axes(keep, values.ndim)
    return jnp.where(keep, values, jnp.zeros((), values.dtype))


def batch_in_front(args: Sequence[jax.Array], axes: Sequence[int | None]) -> list[Any]:
    """Moves batch axes to the front; broadcasts arguments that have none."""
    size = next(x.shape[a] for x, a in zip(args, axes) if a is not None)
    return [
        jnp.broadcast_to(x, (size, *x.shape)) if a is None else jnp.moveaxis(x, a, 0)
        for x, a in zip(args, axes)
    ]


def fill_value(dtype: Any) -> np.ndarray:
    """Returns the value that `jnp.take` gives for an index out of range."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(np.nan, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.array(True)
    limits = jnp.iinfo(dtype)
    unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
    return np.array(limits.max if unsigned else limits.min, dtype)


def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns `table[ids]`, zeros for ids out of range."""
    if table.shape[0] == 0:  # JAX cannot gather from an empty axis
        return jnp.zeros((*ids.shape, *table.shape[1:]), table.dtype)
    table = jnp.asarray(table)  # outside jit it may be a NumPy array
    return table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def sharded_like_ids(
    read: Callable[..., jax.Array], table: Any, ids: jax.Array, *rest: Any, ndim: int
) -> jax.Array:
    """Returns `read(table, ids, *rest)`, even if Explicit mesh axes shard `ids`.

    JAX's gather raises a ShardingTypeError there, unless it is given the sharding of
    the result. If every device has the whole table, the rows are sharded like the ids.

    Args:
      read: a function that reads rows.
      table: an array, or a tree of arrays.
      ids: integers.
      *rest: arrays or None.
      ndim: how many axes of the result are axes of `ids`, the first ones.
    """
    spec = _mesh.explicit_spec(ids)
    if not spec or any(map(_mesh.explicit_spec, jax.tree.leaves(table))):
        return read(table, ids, *rest)
    mesh = jax.typeof(ids).sharding.mesh
    out = NamedSharding(mesh, PartitionSpec(*spec[:ndim]))
    run: Any = jax.sharding.auto_axes(read, out_sharding=out)
    return run(table, ids, *rest)


def add_rows(table: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """Adds `values` to rows `ids` of `table`; duplicates are summed.

    The sum of booleans is their logical or, as with `+` on arrays.
    """
    table = jnp.asarray(table)  # outside jit it may be a NumPy array
    if table.shape[0] == 0:  # JAX cannot differentiate a scatter to an empty axis
        return table
    add = table.at[ids].max if table.dtype == jnp.bool_ else table.at[ids].add
    return add(values, mode="drop", wrap_negative_indices=False)


def set_rows(table: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """Replaces rows `ids` of `table`; ids in range must be unique."""
    table = jnp.asarray(table)  # outside jit it may be a NumPy array
    if table.shape[0] == 0:  # as in `add_rows`
        return table
    return table.at[ids].set(values, mode="drop", wrap_negative_indices=False)


def set_distinct_rows(
    table: jax.Array,
    rows: jax.Array,
    values: jax.Array,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Replaces distinct rows; any number of `rows` may be the height (empty slots).

    Each empty slot gets a different id beyond the end. So XLA can be told that the ids
    are unique, and a parallel scatter needs no atomic writes.
    """
    height, slots = table.shape[0], rows.shape[0]
    unique = height + slots <= jnp.iinfo(rows.dtype).max
    if unique:
        beyond = jnp.arange(slots, dtype=rows.dtype)
        filled = in_range(rows, height)
        rows = rows + jnp.where(filled, _arguments.scalar(0, rows), beyond)
    return table.at[rows].set(
        values.astype(table.dtype),
        mode="drop",
        wrap_negative_indices=False,
        indices_are_sorted=indices_are_sorted,
        unique_indices=unique,
    )


def search_sorted(ascending: jax.Array, x: jax.Array, side: str = "left") -> jax.Array:
    """Computes `jnp.searchsorted` as int32, for `ascending` of symbolic length too."""
    n = ascending.shape[0]
    if not _compat.is_symbolic_dim(n):
        return jnp.searchsorted(ascending, x, side=side).astype(jnp.int32)

    def halve(_, limits):
        low, high = limits
        middle = low + ((high - low) >> 1)
        at_middle = ascending.at[middle].get(mode="clip", wrap_negative_indices=False)
        is_before = (at_middle < x if side == "left" else at_middle <= x) & (low < high)
        one = np.int32(1)
        return jnp.where(is_before, middle + one, low), jnp.where(
            is_before, high, middle
        )

    low = jnp.zeros(x.shape, jnp.int32)
    high = jnp.full(x.shape, _arguments.scalar(n, low))
    return lax.fori_loop(0, 32, halve, (low, high))[0]  # a size has at most 31 bits


def running_count(mask: jax.Array) -> jax.Array:
    """Computes `jnp.cumsum(mask)` of booleans `[n]`, as int32.

    Counts the bits of words of 32 booleans, which takes half of the time on a CPU.
    """
    n = mask.shape[0]
    words = -(-n // 32)
    flags = jnp.pad(mask, (0, 32 * words - n)).reshape(words, 32)
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)[None]
    word = jnp.sum(jnp.where(flags, bits, np.uint32(0)), axis=1, dtype=jnp.uint32)
    count = lax.population_count(word)
    before = jnp.cumsum(count, dtype=jnp.uint32) - count
    up_to = word[:, None] & ((bits << np.uint32(1)) - np.uint32(1))
    counts = before[:, None] + lax.population_count(up_to)
    return counts.astype(jnp.int32).reshape(-1)[:n]


def positions(mask: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Finds the true elements of a mask `[n]`, n at least 1.

    Returns:
      `(positions, count)`: int32 `[size]`, ascending and padded with n, without the
      positions that do not fit; and the number of true elements.
    """
    n = mask.shape[0]
    count = running_count(mask)
    to = jnp.where(mask, count - np.int32(1), np.int32(size))
    none = jnp.full((size,), np.int32(n))
    return set_rows(none, to, lax.iota(jnp.int32, n)), count[-1]


def accumulator_dtype(dtype: Any) -> Any:
    """Returns the dtype for sums of `dtype`: at least float32 for floats."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(dtype)


def float_dtype(dtype: Any) -> Any:
    """Returns the dtype of a mean: `dtype` itself for floats, else float32."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(jnp.float32)


def float_accumulator_dtype(dtype: Any) -> Any:
    """Returns the dtype that a mean of `dtype` accumulates in."""
    return accumulator_dtype(float_dtype(dtype))


def promote(*dtypes: Any) -> Any:
    """Returns the common type of `dtypes`, even under strict dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)
