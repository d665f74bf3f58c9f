"""The kernels of `sparsejax-native`, where that package is installed.

They read, sum, add and find rows on a CPU as XLA's loops do, but ask for rows ahead and
use all threads. What they compute is what the lowerings in plain XLA compute: sums to
rounding, all else to the last bit (but XLA may read subnormal numbers as zeros).

Without the package, or with `SPARSEJAX_NATIVE=0` in the environment, everything is
plain XLA. The variable is read when a program is traced and compiled.
"""

import functools
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


_INTERFACE = 2  # of the handlers; the package has the same number
_PREFIX = "sparsejax_"


def enabled() -> bool:
    """Whether programs may call the kernels."""
    return os.environ.get("SPARSEJAX_NATIVE", "1") != "0" and _register()


@functools.cache
def _register() -> bool:
    """Tells XLA of the kernels, once; whether there are any."""
    try:
        import sparsejax_native  # pyright: ignore[reportMissingImports]
    except ImportError as e:
        if e.name != "sparsejax_native":  # it is installed
            warnings.warn(
                f"sparsejax: sparsejax-native is not used: its import failed ({e}). "
                "Install it anew on this machine, or remove it.",
                stacklevel=2,
            )
        return False
    found = getattr(sparsejax_native, "INTERFACE", None)
    if found != _INTERFACE:
        warnings.warn(
            "sparsejax: sparsejax-native is not used: its kernels have interface "
            f"{found}, and this release of sparsejax takes {_INTERFACE}. Install the "
            "sparsejax-native of this release, or remove it.",
            stacklevel=2,
        )
        return False
    for name, handler in sparsejax_native.handlers().items():
        jax.ffi.register_ffi_target(_PREFIX + name, handler, platform="cpu")
    return True


def can_read(table: jax.Array, ids: jax.Array) -> bool:
    """Whether `read_rows` takes this table and these ids."""
    return _has_ids(table, ids) and _row_bytes(table) > 4  # a number is soon read


def can_add(table: jax.Array, ids: jax.Array) -> bool:
    """Whether `add_rows` does, and gains more than threads cost."""
    if table.dtype not in (jnp.float32, jnp.float64) or not _has_ids(table, ids):
        return False
    return _row_bytes(table) >= 256 and ids.size * _row_bytes(table) >= 1 << 22


def can_sum(table: jax.Array, ids: jax.Array) -> bool:
    """Whether `sum_bags` does: it adds 16 columns at a time."""
    return _has_ids(table, ids) and table.size >= 16 * table.shape[0]


def _has_ids(table: jax.Array, ids: jax.Array) -> bool:
    return table.size > 0 and ids.size > 0 and ids.dtype in (jnp.int32, jnp.int64)


def _row_bytes(table: jax.Array) -> int:
    return table.size // table.shape[0] * table.dtype.itemsize


def read_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`table[ids]` for flat ids; those out of range read the nearest row."""
    out = jax.ShapeDtypeStruct(ids.shape + table.shape[1:], table.dtype)
    return _call("read_rows", out)(table, ids)


def add_rows(table: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """`table` with `values` added to rows `ids`, in place where the table may be lost.

    An id out of range adds nothing.

    Args:
      table: float32 or float64 `[V, ...]`.
      ids: int32 or int64 `[n]`.
      values: `[n, ...]`, of the table's dtype.
    """
    flat = table.reshape(table.shape[0], -1)
    out = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
    add = _call("add_rows", out, input_output_aliases={0: 0})
    return add(flat, ids, values.reshape(ids.size, -1)).reshape(table.shape)


def sum_bags(
    table: jax.Array,
    ids: jax.Array,
    segment_ids: jax.Array | None,
    weights: jax.Array | None,
    num_bags: int,
    dtype: Any,
    bits: int | None,
) -> jax.Array:
    """Weighted sums of rows, as `sparsejax._lookup.bag_sum` has them.

    Args:
      table: floats `[V, ...]`, or codes `[V, bytes]`.
      ids: int32 or int64, `[B, L]`, or `[n]` with `segment_ids`.
      segment_ids: `[n]`, of the type of `ids`, ascending, or None.
      weights: with the shape of `ids`, of type `dtype`, or None; for codes `[..., 2]`.
      num_bags: static.
      dtype: of the sums, float64 for a table of float64, else float32.
      bits: of a code, or None.
    """
    flat = table.reshape(table.shape[0], -1)
    planes = () if bits is None else (8 // bits,)
    out = jax.ShapeDtypeStruct((num_bags, *planes, flat.shape[1]), dtype)
    none = lambda x, kind: jnp.zeros((0,), kind) if x is None else x
    total = _call("sum_bags", out)(
        flat,
        ids,
        none(segment_ids, jnp.int32),
        none(weights, dtype),
        bits=np.int64(bits or 0),
    )
    return total.reshape(num_bags, *planes, *table.shape[1:])


def find_rows(
    slots: jax.Array, buckets: list[jax.Array], words: list[jax.Array]
) -> jax.Array:
    """The row beside each key in its buckets, uint32; the largest number for none.

    Args:
      slots: uint32 `[S, words + 1]`, 8 of them a bucket: the words of a key, its row.
      buckets: two of int32 `[n]`, those in which each key may be.
      words: one or two of uint32 `[n]`, of the keys.
    """
    out = jax.ShapeDtypeStruct(words[0].shape, jnp.uint32)
    lines = slots.reshape(-1, 8 * slots.shape[1])
    return _call("find_rows", out)(lines, jnp.stack(buckets), jnp.stack(words))


def _call(name: str, out: Any, **how: Any) -> Any:
    return jax.ffi.ffi_call(_PREFIX + name, out, **how)


# At import: an executable that another process compiled may call the kernels.
enabled()
