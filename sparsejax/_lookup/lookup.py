"""lookup: reads rows of a table by id; every embedding goes through it.

One rule for ids: an id outside `[0, height)` is out of range. It never wraps; `mode`
decides what it reads.

Invariant: the table is read by exactly one `gather`, whose operand is the table itself,
and an id that reads no row (out of range, or padding) is also out of range for that
gather. A walk over the jaxpr therefore sees which rows are read, and nothing except the
table itself has the table's size.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike
from sparsejax._lookup.lowerings import cpu, xla
from sparsejax._rows import (
    RowTable,
    SelectedRows,
    Table,
    arithmetic,
    as_table,
    indexing,
    is_quantized,
    quantized,
    read_row_table,
)


_MODES = ("fill", "clip", "zero", "error")


# ------------------------------------------------------------------ public


def lookup(
    table: ArrayLike | Table,
    ids: ArrayLike,
    *,
    mode: str = "fill",
    padding_id: int | None = None,
    max_norm: float | None = None,
) -> jax.Array:
    """Reads rows of `table`, by id.

    `out[i] = table[ids[i]]`. With `max_norm` c, a row whose Euclidean norm exceeds c is
    scaled: `out[i] *= c / norm(out[i])`. Differentiable in `table`; under
    `sparsejax.grad` the gradient is a SelectedRows.

    Args:
      table: `[V, ...]`, any dtype; or a SelectedRows of pulled rows, in which a row
        that is not stored counts as out of range; a QuantizedTable; or a
        `sparsejax.parallel.ShardedTable`.
      ids: integers of any type, shape and rank. Negative ids are out of range;
        they never wrap.
      mode: the result for an id out of range. `"fill"`: NaN; for non-float dtypes, the
        fill value of `jnp.take`. `"clip"`: the nearest row, 0 or V - 1, or as `"fill"`
        if a SelectedRows does not store it. `"zero"`: zeros. `"error"`: raises through
        `jax.experimental.checkify`; for a jitted function, write
        `jax.jit(checkify.checkify(f))`.
      padding_id: int, an id that reads zeros and gets no gradient in any mode. It can
        be any int (-1, V, the id of a row).
      max_norm: positive number. A row with a larger norm, over all its axes, is scaled
        to it. Gradients flow through the norm. (PyTorch renormalizes the table.)

    Returns:
      `[*ids.shape, *table.shape[1:]]`, of the table's dtype. If Explicit mesh axes
      shard the ids and not the table, they shard the rows in the same way.

    Raises:
      TypeError, ValueError: an argument is not as described, or a program with mode
        `"error"` is compiled without `checkify`.
      checkify.JaxRuntimeError: ids are out of range, under mode `"error"`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> sj.lookup(table, jnp.array([1, 5, -1]), padding_id=-1)
      Array([[ 3.,  4.],
             [nan, nan],
             [ 0.,  0.]], dtype=float32)
      >>> sj.lookup(table, jnp.array([1]), max_norm=1.0)
      Array([[0.6, 0.8]], dtype=float32)

    References:
      PaddlePaddle, `lookup_table` (`padding_idx`, `is_sparse`); TensorFlow,
      `tf.nn.embedding_lookup` (`max_norm`); Caffe2, `Gather`.
    """
    table = as_table(table)
    ids = _arguments.as_integers(ids)
    mode = check_mode(mode)
    padding = padding_mask(ids, padding_id)
    max_norm = check_max_norm(max_norm, table.dtype)
    ids = _arguments.as_ids(ids, table.shape[0])
    rows = read(table, ids, padding, mode)
    return rows if max_norm is None else clip_rows(rows, max_norm, table.ndim - 1)


# ------------------------------------------------------------------ checks
# Shared with `embedding_bag` and the layers.


def check_mode(mode: Any) -> str:
    """Returns `mode` as `read` accepts it, or raises if it is unknown."""
    hint = "'fill' reads NaN for ids out of range, as jnp.take does."
    if isinstance(mode, str) and mode in ("sum", "mean", "max"):  # as in PyTorch
        hint = f"To reduce bags, pass combiner={mode!r} to an embedding bag."
    return _arguments.check_mode(mode, _MODES, hint)


def as_padding_id(padding_id: Any) -> int | None:
    """Returns `padding_id` as an int or None; raises for anything else."""
    if padding_id is None:
        return None
    return _arguments.static_int("padding_id", padding_id, None)


def padding_mask(ids: Any, padding_id: Any) -> jax.Array | None:
    """Compares unconverted `ids` with `padding_id`; None if `padding_id` is None."""
    padding = as_padding_id(padding_id)
    if padding is None:
        return None
    limits = jnp.iinfo(ids.dtype)
    if not limits.min <= padding <= limits.max:
        return jnp.zeros(ids.shape, bool)  # an id of this dtype never equals it
    return jnp.asarray(ids == _arguments.scalar(padding, ids))


def check_max_norm(max_norm: Any, dtype: Any) -> float | None:
    """Returns `max_norm` as a positive float or None, or raises."""
    if max_norm is None:
        return None
    norm = float(max_norm)
    if not norm > 0:
        raise ValueError(f"max_norm must be a positive number, got {max_norm}.")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"max_norm needs a table of floats, got {dtype}. Cast the table."
        )
    return norm


# ------------------------------------------------------------------ reading


def read(table: Any, ids: jax.Array, padding: jax.Array | None, mode: str) -> jax.Array:
    """Reads the rows for `lookup`, from arguments checked by the functions above."""
    if isinstance(table, RowTable):
        return read_row_table(table, ids, padding, mode)
    run = functools.partial(_read, mode)
    return indexing.sharded_like_ids(run, table, ids, padding, ndim=ids.ndim)


def _read(
    mode: str, table: Any, ids: jax.Array, padding: jax.Array | None
) -> jax.Array:
    height = table.shape[0]
    safe = clip_ids(table, ids) if mode == "clip" else ids
    if padding is not None:
        safe = jnp.where(padding, _arguments.scalar(height, ids), safe)

    is_pulled = isinstance(table, SelectedRows)
    is_one_gather = mode in ("clip", "fill") and padding is None
    if is_one_gather and not is_pulled and height and ids.ndim:
        # The gather fills by itself; our own mask could cost another pass over rows.
        if is_quantized(table):
            return quantized.read(table, safe, np.nan)
        # JAX's own fill value; one of NaN in the call would compile again each time.
        return table.at[safe].get(mode=mode, wrap_negative_indices=False)
    if is_pulled:
        rows, is_valid = table.find(safe)
    else:
        is_array = not is_quantized(table)
        rows = indexing.take_rows(table, safe) if is_array else table.get(safe)
        is_valid = indexing.in_range(safe, height)
    if mode == "zero" or (mode == "clip" and not is_pulled):
        return rows  # with zeros for ids that read no row
    bad = ~is_valid if padding is None else ~(is_valid | padding)
    if mode == "error":
        check_none(table, bad, ids)
    bad = indexing.append_axes(bad, rows.ndim)
    return jnp.where(bad, indexing.fill_value(rows.dtype), rows)


def clip_ids(table: Any, ids: jax.Array) -> jax.Array:
    """Replaces ids out of range by the nearest row of `table`."""
    height = table.shape[0]
    if height == 0 and ids.size:
        raise ValueError(
            "mode='clip' needs a table with at least one row, got shape "
            f"{table.shape}. Use mode='zero', or a larger table."
        )
    return jnp.clip(ids, 0, max(height - 1, 0))


def check_none(table: Any, bad: jax.Array, ids: jax.Array) -> None:
    """Raises, through `checkify`, if any of `ids` is `bad`."""
    if ids.size == 0:
        return  # argmax below needs at least one
    # checkify fills in the braces when the program runs.
    is_pulled = isinstance(table, SelectedRows)
    not_stored = "rows that the SelectedRows does not store"
    fault = not_stored if is_pulled else "out of range"
    checkify.check(
        ~jnp.any(bad),
        f"sparsejax, mode='error': {{bad}} of {{total}} ids are {fault}; the first is "
        "{first} and the table has {height} rows. Correct the ids or pull their rows, "
        "pass a padding_id, or use another mode.",
        bad=jnp.sum(bad, dtype=jnp.int32),
        total=np.array(ids.size, _arguments.index_dtype(ids.size)),
        first=ids.reshape(-1)[jnp.argmax(bad.reshape(-1))],
        height=np.array(table.shape[0], _arguments.index_dtype(table.shape[0])),
    )


def clip_rows(rows: jax.Array, max_norm: float, row_ndim: int) -> jax.Array:
    """Scales rows to `max_norm` if the norm over their last axes exceeds it.

    Every division and square root gets a safe argument, even if its result is not used:
    the gradient of `where` multiplies the unused branch's gradient by zero, and 0 * inf
    is NaN.
    """
    axes = tuple(range(rows.ndim - row_ndim, rows.ndim))
    x = rows.astype(indexing.accumulator_dtype(rows.dtype))
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)), axes, keepdims=True, initial=0)
    unit = arithmetic.power_of_two(largest)
    x /= unit
    norm = arithmetic.root(jnp.sum(x * x, axis=axes, keepdims=True))
    over = norm > max_norm / unit  # False for zeros and for NaN
    scale = max_norm / jnp.where(over, norm, 1)
    return jnp.where(over, (x * scale).astype(rows.dtype), rows)


# ------------------------------------------------------------------ flat ids

# Rows by flat ids: a primitive with a lowering per platform.
read_rows_p = _compat.primitive(
    "read_rows",
    xla.read_rows,
    {"cpu": cpu.read_rows},
    types=lambda table, ids, fill: [(ids.shape + table.shape[1:], table.dtype)],
)


def read_rows(
    table: jax.Array, ids: jax.Array, *, fill: bytes | None = None
) -> jax.Array:
    """Returns `table[ids]` for flat ids.

    Args:
      table: `[V, ...]`.
      ids: integers `[n]`.
      fill: the bytes of the number, of the table's dtype, that an id out of range
        reads; if None, it reads the nearest row.

    Returns:
      `[n, ...]`, of the table's dtype.
    """
    table = jnp.asarray(table)
    ids = _arguments.as_ids(ids, table.shape[0])
    # If the types of these arrays have a mesh, XLA's gather propagates it.
    if _compat.has_mesh(table) or _compat.has_mesh(ids):
        return xla.read_rows(table, ids, fill=fill)
    if not jnp.issubdtype(table.dtype, jnp.floating) or table.shape[0] == 0:
        return xla.read_rows(table, ids, fill=fill)
    return read_rows_p.bind(
        table, jnp.maximum(ids, _arguments.scalar(-1, ids)), fill=fill
    )
