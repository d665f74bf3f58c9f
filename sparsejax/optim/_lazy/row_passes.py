"""The passes over the rows of one gradient that a step in `row_update` consists of.

They are on one device by default, those of `block_pass`. `passes_over` uses
`functools.singledispatch`, so that a subclass of SelectedRows, like that of a sharded
table, can register passes of its own.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from sparsejax import _arguments, _compat
from sparsejax._rows import SelectedRows, indexing, with_slots
from sparsejax._rows.order_after import order_after
from sparsejax.optim._lazy import block_pass


class Passes(Protocol):
    """Passes over the rows of a gradient.

    Their arguments are explained at `block_pass.update_rows` and `reduce_rows`.
    """

    def after(self, others: Sequence[jax.Array]) -> "Passes":
        """The same passes, run after `others` are computed."""
        ...

    def reduce(
        self,
        tables: Sequence[jax.Array],
        fresh: Sequence[jax.Array],
        operands: Sequence[Any],
        program: block_pass.Program,
        kinds: Sequence[tuple[str, tuple[int, ...]]],
    ) -> list[jax.Array]:
        """Reduces functions of the rows, or raises NotByRows."""
        ...

    def update(
        self,
        tables: Sequence[jax.Array],
        operands: Sequence[Any],
        program: block_pass.Program,
        writes: Sequence[int],
    ) -> tuple[list[jax.Array], SelectedRows]:
        """The tables that were written, and the update."""
        ...

    def scale(self, function: Any) -> SelectedRows | None:
        """The update `function(row)` of each row of the gradient, which is linear.

        None where `update` serves as well.
        """
        ...


@functools.singledispatch
def passes_over(grad: SelectedRows, table: Any) -> Passes | None:
    """The passes over a gradient's rows in `table`, or None if there are none."""
    arrays = grad.rows, grad.values, table
    runs = (
        type(grad) is SelectedRows
        and is_traced(grad, table)
        and all(map(is_plain, arrays))
    )
    return _OneDevice(grad) if runs else None


def is_plain(x: Any) -> bool:
    """Whether `x` is an array whose type has no mesh."""
    return isinstance(x, jax.Array) and not _compat.is_laid_out(x)


def is_traced(grad: SelectedRows, table: Any) -> bool:
    """Whether they are in a `jit`, and of the types that passes are for."""
    return (
        grad.capacity > 0
        and grad.height > 0
        and not _arguments.is_concrete(table)
        and jnp.issubdtype(table.dtype, jnp.floating)
        and jnp.issubdtype(grad.dtype, jnp.floating)
    )


class _OneDevice:
    """The passes of `block_pass`, over a gradient whose duplicates are merged once."""

    def __init__(self, grad: SelectedRows):
        self._grad = grad

    def after(self, others):
        grad = self._grad
        values = order_after(grad.values, others)
        return _OneDevice(with_slots(grad, grad.rows, values))

    @functools.cached_property
    def _merged(self) -> tuple[jax.Array, ...]:
        rows = self._grad.safe_rows()
        return block_pass.merge_rows(rows, self._grad.values, self._grad.height)

    def reduce(self, tables, fresh, operands, program, kinds):
        return block_pass.reduce_rows(
            self._merged, tables, fresh, operands, program, kinds
        )

    def update(self, tables, operands, program, writes):
        new, rows = block_pass.update_rows(
            self._merged, tables, operands, program, writes
        )
        slots = min(self._grad.capacity, self._grad.height)
        ids, values = _ascending(self._merged[0], rows, slots=slots)
        return new, SelectedRows(ids, values, self._grad.height)

    def scale(self, function):
        """Duplicates may stay."""
        grad = self._grad
        values = indexing.zero_unless(grad.filled(), jax.vmap(function)(grad.values))
        return SelectedRows(grad.safe_rows(), values, grad.height)


@functools.partial(jax.jit, static_argnames="slots")
def _ascending(rows, values, *, slots):
    """Distinct rows in ascending order; nothing is computed if nobody looks at them."""
    order = jnp.argsort(rows)[:slots]
    return rows[order], values[order]
