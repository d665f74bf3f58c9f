"""HotRows: the gradient of rows that are on every device, and how they are updated.

Every device has all its slots, and all of weights and state. So each runs the whole
update on its own copies, in a `shard_map` whose arrays are all replicated: the same
numbers in the same order, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
from jax.sharding import PartitionSpec

from sparsejax._arguments import ArrayLike
from sparsejax._rows import SelectedRows
from sparsejax.optim._lazy import block_pass, row_passes
from sparsejax.optim._lazy.row_program import NotByRows
from sparsejax.parallel._exchange import Owners


@jax.tree_util.register_pytree_with_keys_class
class HotRows(SelectedRows):
    """A SelectedRows over the hot rows of a HotColdTable, the same on every device.

    Args:
      rows: places among the hot rows, `height` for an empty slot.
      values: a row for each slot.
      height: K.
      stack: `()`.
      owners: which device owns which cold rows; their mesh is that of the hot rows.
    """

    owners: Owners

    @classmethod
    def make(
        cls, rows: ArrayLike, values: ArrayLike, height: int, owners: Owners
    ) -> Any:
        """Builds it from its parts, without checks."""
        return cls.tree_unflatten((height, owners), (rows, values))

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Children with their keys."""
        children, height = super().tree_flatten_with_keys()
        return children, (height, self.owners)

    def tree_flatten(self) -> tuple[Any, Any]:
        """The children."""
        children, height = super().tree_flatten()
        return children, (height, self.owners)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Self:
        """Rebuilds without checks, since JAX may pass any objects as children."""
        self = super().tree_unflatten(static[0], children)
        vars(self).update(owners=static[1])
        return self

    def map(self, f: Callable[[jax.Array], jax.Array]) -> HotRows:
        """The same rows with `f(values)`."""
        return self._like(super().map(f))

    def __add__(self, other: Any) -> Any:
        out = super().__add__(other)
        return self._like(out) if isinstance(other, HotRows) else out

    def _like(self, slots: SelectedRows) -> HotRows:
        return HotRows.make(slots.rows, slots.values, self.height, self.owners)


@row_passes.passes_over.register
def _passes_over(grad: HotRows, table: Any) -> row_passes.Passes | None:
    return _EverywherePasses(grad) if row_passes.is_traced(grad, table) else None


class _EverywherePasses:
    """The passes, run by every device; a `row_passes.Passes`.

    Args:
      grad: their gradient.
    """

    def __init__(self, grad: HotRows):
        self._grad = grad

    def after(self, others: Sequence[jax.Array]) -> _EverywherePasses:
        """The same: hot rows are few."""
        del others
        return self

    def scale(self, function: Callable) -> None:
        """None: `update` serves as well."""
        del function

    def reduce(
        self,
        tables: Sequence[jax.Array],
        fresh: Sequence[jax.Array],
        operands: Sequence[Any],
        program: block_pass.Program,
        kinds: Sequence[tuple[str, tuple[int, ...]]],
    ) -> list[jax.Array]:
        """Reductions over the rows."""

        def body(merged, tables, consts, fresh, operands):
            local = program.with_consts(consts)
            return block_pass.reduce_rows(merged, tables, fresh, operands, local, kinds)

        return self._everywhere(body, program, tables, fresh, operands)

    def update(
        self,
        tables: Sequence[jax.Array],
        operands: Sequence[Any],
        program: block_pass.Program,
        writes: Sequence[int],
    ) -> tuple[list[jax.Array], SelectedRows]:
        """The tables that were written, and the update."""

        def body(merged, tables, consts, operands):
            local = program.with_consts(consts)
            new, values = block_pass.update_rows(
                merged, tables, operands, local, writes
            )
            return new, merged[0], values

        new, rows, values = self._everywhere(body, program, tables, operands)
        return new, HotRows.make(rows, values, self._grad.height, self._grad.owners)

    def _everywhere(
        self, body: Callable, program: block_pass.Program, tables: Any, *others: Any
    ) -> Any:
        """`body(merged rows, tables, constants of the program, *others)`."""
        if program.has_branches:  # whose equations keep a mesh that is not a device's
            raise NotByRows("a conditional, on every device")
        grad = self._grad

        def on_device(rows, values, tables, *others):
            merged = block_pass.merge_rows(rows, values, grad.height)
            return body(merged, tables, *others)

        everywhere = PartitionSpec()
        lists = [list(x) for x in (tables, program.consts, *others)]
        return grad.owners.shard_map(
            on_device,
            grad.safe_rows(),
            grad.values,
            *lists,
            in_specs=(everywhere,) * (2 + len(lists)),
            out_specs=everywhere,
        )
