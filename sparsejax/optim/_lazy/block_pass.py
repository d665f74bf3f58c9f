"""Runs an update over the rows of a table in blocks that stay in the cache.

Two primitives, each with a reference in plain XLA, and a lowering for CPUs
(`merge_rows` also has a lowering for CUDA):

- `merge_rows` sums duplicates into their first slot. On a CPU it finds them by hashing
  and adds them up in place, so no second array of the size of the gradient is made.
- `update_rows` computes new rows of weights and state, and writes them.

On a CPU the second is a loop over blocks of the distinct rows. A block's gradient,
weights and state are read, used and written while they are in the cache, no array of
the size of the gradient is made, and the number of turns follows the number of distinct
rows. Tables that are donated are updated in place; tests/optim/test_memory.py checks
the compiled program. `reduce_rows`, for a global norm, is a function in plain XLA.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments, _compat
from sparsejax._lookup.lowerings import cpu, xla
from sparsejax._rows import SelectedRows, indexing, merge, merge_cuda
from sparsejax._rows.order_after import order_after


# Elements of one array in a block: several blocks of this size stay in a core's cache.
_BLOCK_ELEMENTS, _MAX_ROWS = 2**16, 2048


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of one row, as a static parameter.

    Programs with equal keys are equal, so tables that do the same are lowered once.

    Args:
      jaxpr: an open jaxpr: `(gradient, *rows of the tables, *operands) -> rows`, rows
        having a first axis of length 1.
      consts: its constants.
      key: identifies the function, see `RowFunction.key`.
    """

    jaxpr: Any = dataclasses.field(compare=False)
    consts: Sequence[Any] = dataclasses.field(compare=False)
    key: Any = dataclasses.field(repr=False)

    def with_consts(self, consts: Sequence[Any]) -> "Program":
        """Returns the same program with other constants, as in a `shard_map`."""
        return dataclasses.replace(self, consts=consts)

    def with_outputs(self, kept: Sequence[bool]) -> "Program":
        """Returns the same program with some of its results."""
        if all(kept):
            return self
        outs = [v for v, is_kept in zip(self.jaxpr.outvars, kept) if is_kept]
        jaxpr = self.jaxpr.replace(outvars=outs)
        return Program(jaxpr, self.consts, (self.key, tuple(kept)))

    def depends(self, result: int, argument: int) -> bool:
        """Returns True if a result is computed from an argument, by their numbers."""
        wanted = [k == result for k in range(len(self.jaxpr.outvars))]
        _, _, is_used = _compat.only_needed(self.jaxpr, self.consts, wanted)
        return is_used[argument]

    @property
    def outputs(self) -> list[Any]:
        """The types of the results."""
        return [v.aval for v in self.jaxpr.outvars]

    def on_rows(self, num_rows: int) -> Callable:
        """Makes the function of many rows: `[n, ...]` for each `[1, ...]`.

        Args:
          num_rows: how many of the arguments are rows.
        """

        def one(*args):
            rows = (x[None] for x in args[:num_rows])
            others = args[num_rows:]
            consts = others[: len(self.consts)]
            operands = others[len(self.consts) :]
            outs = _compat.eval_in_own_mesh(self.jaxpr, consts, *rows, *operands)
            return [x[0] for x in outs]

        def many(*args):
            axes = (0,) * num_rows + (None,) * (len(args) - num_rows)
            return jax.vmap(one, in_axes=axes)(*args)

        return many


# ------------------------------------------------------------------ merge_rows


def merge_rows(
    *gradients: tuple[jax.Array, jax.Array, int],
) -> list[tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
    """Sums the values of equal row ids, in each of some gradients.

    Args:
      *gradients: `(rows, values, height)`: integer `[n]`, in `[0, height]`, where
        `height` is an empty slot; `[n, ...]`; number of rows of the table.

    Returns:
      For each `(rows [n], at int32[n], values [n, ...], count int32[])`: the distinct
      rows, padded with `height`; where the sum for each of them is among the values
      returned; how many there are.
    """
    rows, values, heights = zip(*gradients)
    outs = _merge_rows_p.bind(*rows, *values, heights=heights)
    return [tuple(outs[k : k + 4]) for k in range(0, len(outs), 4)]


def _one_by_one(merge):
    """Lowers `merge_rows` by merging each gradient by itself."""

    def merge_each(*arrays, heights):
        return [x for args in _gradients(arrays, heights) for x in merge(*args)]

    return merge_each


def _gradients(arrays, heights):
    """Returns the gradients `(rows, values, height)` in the primitive's arguments."""
    rows, values = arrays[: len(heights)], arrays[len(heights) :]
    return list(zip(rows, values, heights))


def _merge_by_sorting(rows, values, height):
    n = rows.shape[0]
    capacity = max(1, min(n, height))
    merged = SelectedRows(rows, values, height).coalesce(capacity)
    more = n - capacity
    empty = _arguments.scalar(height, merged.rows)
    padding = ((0, more),) + ((0, 0),) * (values.ndim - 1)
    return (
        jnp.pad(merged.rows, (0, more), constant_values=empty),
        lax.iota(jnp.int32, n),
        jnp.pad(merged.values, padding),
        merged.num_rows(),
    )


def _merge_on_cuda(*arrays, heights):
    merged = merge_cuda.merge_each(_gradients(arrays, heights))
    return [x for results in merged for x in results]


def _merge_by_hashing(rows, values, height):
    n = rows.shape[0]
    first = merge.first_slots(rows, height)
    slots = lax.iota(jnp.int32, n)
    at, count = indexing.positions(first == slots, n)
    again, duplicates = indexing.positions(first < slots, n)
    block = _block_rows(n, values.shape[1:])
    again = _pad(again, block, np.int32(n))
    wide = indexing.accumulator_dtype(values.dtype)

    def add(k, total):
        here = lax.dynamic_slice_in_dim(again, k * np.int32(block), block)
        to = jnp.where(here < n, first[jnp.minimum(here, np.int32(n - 1))], np.int32(n))
        return indexing.add_rows(total, to, cpu.read_rows(total, here))

    total = values.astype(wide)
    total = lax.fori_loop(np.int32(0), _turns(duplicates, block), add, total)
    distinct = jnp.where(slots < count, rows[jnp.minimum(at, np.int32(n - 1))], height)
    return distinct.astype(rows.dtype), at, total.astype(values.dtype), count


# ------------------------------------------------------------------ update_rows


def update_rows(
    merged: Sequence[jax.Array],
    tables: Sequence[jax.Array],
    operands: Sequence[Any],
    program: Program,
    writes: Sequence[int],
) -> tuple[list[jax.Array], jax.Array]:
    """Writes new rows into some tables.

    Args:
      merged: the result of `merge_rows`.
      tables: arrays `[V, ...]` that are read by rows.
      operands: other arrays that the function needs.
      program: computes `(*new rows, update)` for a row.
      writes: for each of the new rows, the table that it is written to.

    Returns:
      The tables that were written, and the update `[n, ...]` in the order of the
      distinct rows.
    """
    *new, update = _update_rows_p.bind(
        *merged,
        *tables,
        *program.consts,
        *operands,
        program=program,
        num_tables=len(tables),
        writes=tuple(writes),
    )
    return new, update


def _update_at_once(rows, at, values, count, *rest, program, num_tables, writes):
    """Reads all rows, computes and writes; the reference."""
    tables, others = rest[:num_tables], rest[num_tables:]
    height = tables[0].shape[0]
    filled = indexing.in_range(rows, height)
    gradient = indexing.take_rows(values, at)
    function = program.on_rows(num_tables + 1)
    *new, update = function(
        gradient, *(xla.read_rows(t, rows) for t in tables), *others
    )
    new = [indexing.set_distinct_rows(tables[k], rows, x) for k, x in zip(writes, new)]
    return *new, indexing.zero_unless(filled, update)


def _update_by_blocks(rows, at, values, count, *rest, program, num_tables, writes):
    tables, others = rest[:num_tables], rest[num_tables:]
    height, n = tables[0].shape[0], rows.shape[0]
    block = _block_rows(n, values.shape[1:])
    rows = _pad(rows, block, _arguments.scalar(height, rows))
    at = _pad(at, block, np.int32(n))
    function = program.on_rows(num_tables + 1)
    kept = {k: tables[k] for k in range(num_tables) if k not in writes}
    is_free = [not program.depends(i, 1 + j) for i, j in enumerate(writes)]

    spec = program.outputs[-1]
    updates = jnp.zeros((rows.shape[0], *spec.shape[1:]), spec.dtype)

    def turn(k, carry):
        written, updates = carry
        start = k * np.int32(block)
        here = lax.dynamic_slice_in_dim(rows, start, block)
        gradient = cpu.read_rows(values, lax.dynamic_slice_in_dim(at, start, block))
        now = {**kept, **dict(zip(writes, written))}
        read = [cpu.read_rows(now[j], here) for j in range(num_tables)]
        *new, update = function(gradient, *read, *others)
        # Read the old rows before the new ones are written, or XLA copies the table.
        new = [
            order_after(x, [read[j]]) if free else x
            for x, j, free in zip(new, writes, is_free)
        ]
        written = [indexing.set_distinct_rows(t, here, x) for t, x in zip(written, new)]
        update = indexing.zero_unless(indexing.in_range(here, height), update)
        return written, lax.dynamic_update_slice_in_dim(updates, update, start, 0)

    written = [tables[k] for k in writes]
    written, updates = lax.fori_loop(
        np.int32(0), _turns(count, block), turn, (written, updates)
    )
    return *written, updates[:n]


# ------------------------------------------------------------------ reduce_rows


_REDUCE = {
    "reduce_sum": jnp.sum,
    "reduce_prod": jnp.prod,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_and": jnp.all,
    "reduce_or": jnp.any,
}


def reduce_rows(
    merged: Sequence[jax.Array],
    tables: Sequence[jax.Array],
    fresh: Sequence[jax.Array],
    operands: Sequence[Any],
    program: Program,
    kinds: Sequence[tuple[str, tuple[int, ...]]],
) -> list[jax.Array]:
    """Reduces functions of the rows over the distinct rows and the empty slots.

    For a norm of gradients XLA reads the merged values once, where they are.

    Args:
      merged: the result of `merge_rows`.
      tables: arrays `[V, ...]` that are read by rows.
      fresh: for each of them a row `[1, ...]` that takes its place in empty slots.
      operands: other arrays that the function needs.
      program: computes the operands of the reductions from a row.
      kinds: for each of them the name of the reduction, and its axes, with 0 among
        them.

    Returns:
      The reductions.
    """
    rows, at, values, count = merged
    n = rows.shape[0]
    at = jnp.where(lax.iota(jnp.int32, n) < count, at, np.int32(n))
    is_first = indexing.set_rows(jnp.zeros(n, bool), at, jnp.ones(n, bool))
    ids = indexing.set_rows(jnp.zeros_like(rows), at, rows)
    function = program.on_rows(len(tables) + 1)
    others = *program.consts, *operands
    outs = function(values, *(xla.read_rows(x, ids) for x in tables), *others)
    untouched = (new.astype(x.dtype) for new, x in zip(fresh, tables))
    empty = function(jnp.zeros_like(values[:1]), *untouched, *others)
    totals = []
    for x, other, (kind, axes) in zip(outs, empty, kinds):
        # First within the rows: XLA:CPU would write a mask of whole rows to memory.
        within = tuple(axis for axis in axes if axis)
        by_row, other = (_REDUCE[kind](y, axis=within) for y in (x, other))
        by_row = jnp.where(indexing.append_axes(is_first, by_row.ndim), by_row, other)
        totals.append(_REDUCE[kind](by_row, axis=0).astype(x.dtype))
    return totals


# ------------------------------------------------------------------ rows


def _block_rows(n: int, shape: Sequence[int]) -> int:
    rows = _BLOCK_ELEMENTS // max(math.prod(shape), 1)
    return max(1, min(n, max(16, min(rows, _MAX_ROWS))))


def _pad(x: jax.Array, block: int, value: Any) -> jax.Array:
    """Pads `x` to whole blocks."""
    return jnp.pad(x, (0, -x.shape[0] % block), constant_values=value)


def _turns(count: jax.Array, block: int) -> jax.Array:
    """Returns the number of blocks that hold `count` entries."""
    return (count + np.int32(block - 1)) // np.int32(block)


# ------------------------------------------------------------------ primitives


def _merge_types(*arrays, heights):
    types = []
    for rows, values, _ in _gradients(arrays, heights):
        types += [(rows.shape, rows.dtype), (rows.shape, jnp.int32)]
        types += [(values.shape, values.dtype), ((), jnp.int32)]
    return types


def _update_types(rows, at, values, count, *rest, program, num_tables, writes):
    update = program.outputs[-1]
    update = ((rows.shape[0], *update.shape[1:]), update.dtype)
    return [*((rest[k].shape, rest[k].dtype) for k in writes), update]


def _write_only_used(used, program, writes, **static):
    """Leaves out tables whose new rows are not used, and keeps the update.

    A loop that reads and writes a table would have to copy it, if the caller goes on
    with the old one.
    """
    kept = [*used[:-1], True]
    writes = tuple(k for k, is_kept in zip(writes, kept) if is_kept)
    return kept, {**static, "program": program.with_outputs(kept), "writes": writes}


_merge_rows_p = _compat.primitive(
    "merge_rows",
    _one_by_one(_merge_by_sorting),
    {"cpu": _one_by_one(_merge_by_hashing), "cuda": _merge_on_cuda},
    types=_merge_types,
    multiple_results=True,
)
_update_rows_p = _compat.primitive(
    "update_rows",
    _update_at_once,
    {"cpu": _update_by_blocks},
    types=_update_types,
    multiple_results=True,
    drop_unused=_write_only_used,
)
