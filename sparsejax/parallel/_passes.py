"""The optimizer's passes over the rows of a gradient that are still to be sent.

A row's step needs the sum of its parts from all devices, and must be taken once. So the
owners work through their rows in ascending ranges: of a range every part arrives in one
round (`_exchange.receive_by_ranges`), is merged, and is applied to weights and state.
No owner then holds more than a round carries, instead of all rows that could arrive,
`min(R, ids of the whole batch)`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from sparsejax import _arguments
from sparsejax._rows import indexing
from sparsejax.optim._lazy import block_pass
from sparsejax.optim._lazy.row_program import NotByRows
from sparsejax.parallel import _exchange


# With this many rounds or more, the rows that could arrive are not held together.
_MIN_ROUNDS = 8


class RangePasses:
    """The passes, by ranges of the owners' rows; see `passes.passes_over`.

    A reduction over all rows, like a global norm, must be known before the first row is
    applied. With many rounds, rows are then sent twice, once for each pass. With few
    rounds `reduce` raises `NotByRows`: the rows are sent once, and held.

    Args:
      grad: a ShardedRows, not merged.
    """

    def __init__(self, grad: Any):
        self._grad, self._owners, self._slots = grad, grad.owners, grad.slots
        self._most = grad.owners.max_received(grad.slots, grad.rows)

    def scale(self, function: Callable) -> None:
        """Returns None: in `update` a row is added once, after its parts."""
        del function

    def reduce(
        self,
        tables: Sequence[jax.Array],
        fresh: Sequence[jax.Array],
        operands: Sequence[Any],
        program: block_pass.Program,
        kinds: Sequence[tuple[str, tuple[int, ...]]],
    ) -> list[jax.Array]:
        """Sums functions of the rows."""
        axes = self._owners.axes
        if self._most < _MIN_ROUNDS * self._owners.devices * self._slots:
            raise NotByRows("a reduction over rows that can be held")
        if any(kind != "reduce_sum" for kind, _ in kinds):
            raise NotByRows("a reduction that is not a sum")

        def body(receive, tables, others):
            consts, fresh, operands = others
            local = program.with_consts(consts)

            def add(merged, total):
                sums = block_pass.reduce_rows(
                    merged, tables, fresh, operands, local, kinds
                )
                return [a + b for a, b in zip(total, sums)]

            zeros = []
            for aval, (_, summed) in zip(program.outputs, kinds):
                shape = [s for k, s in enumerate(aval.shape) if k not in summed]
                zeros.append(jnp.zeros(shape, aval.dtype))
            return lax.psum(receive(add, zeros), axes)

        others = program.consts, fresh, operands
        return self._at_owners(body, tables, others, PartitionSpec())

    def update(
        self,
        tables: Sequence[jax.Array],
        operands: Sequence[Any],
        program: block_pass.Program,
        writes: Sequence[int],
    ) -> tuple[list[jax.Array], Any]:
        """Returns the written tables and the update, a merged ShardedRows."""
        owners, most = self._owners, self._most
        ids = jax.ShapeDtypeStruct((), self._grad.rows.dtype)
        change = program.outputs[-1]

        def body(receive, tables, others):
            consts, operands = others
            local = program.with_consts(consts)

            def write(merged, carry):
                written, count, rows, updates = carry
                now = list(tables)
                for k, table in zip(writes, written):
                    now[k] = table
                written, new = block_pass.update_rows(
                    merged, now, operands, local, writes
                )
                # XLA removes the rest if the program does not use the update.
                order = jnp.argsort(merged[0])
                here = merged[0][order]
                at = count + lax.iota(jnp.int32, here.shape[0])
                at = jnp.where(indexing.in_range(here, owners.rows), at, np.int32(most))
                rows = indexing.set_rows(rows, at, here)
                updates = indexing.set_rows(updates, at, new[order])
                return written, count + merged[3], rows, updates

            written = [tables[k] for k in writes]
            none = _arguments.scalar(owners.rows, ids)
            rows = jnp.full((most,), none, ids.dtype)
            updates = jnp.zeros((most, *change.shape[1:]), change.dtype)
            start = written, jnp.zeros((), jnp.int32), rows, updates
            written, _, rows, updates = receive(write, start)
            return written, owners.to_positions(rows), updates

        others = program.consts, operands
        new, positions, values = self._at_owners(
            body, tables, others, owners.table_spec
        )
        return new, self._grad.make(positions, values, owners, None)

    def _at_owners(
        self, body: Callable, tables: Sequence[jax.Array], others: Any, out_spec: Any
    ) -> Any:
        """Runs `body(receive, tables, others)` at each owner.

        `receive(apply, carry)` is `carry = apply(merged, carry)` for each range, with
        the result of `block_pass.merge_rows` as `merged`.

        Args:
          body: a function.
          tables: arrays that are sharded as tables are.
          others: arrays that every owner has.
          out_spec: how the results are sharded.
        """
        owners, dtype = self._owners, self._grad.dtype

        def at_owner(positions, values, tables, others):
            def receive(apply, carry):
                def merge(rows, values, carry):
                    ((rows, at, values, count),) = block_pass.merge_rows(
                        (rows, values, owners.rows)
                    )
                    return apply((rows, at, values.astype(dtype), count), carry)

                return _exchange.receive_by_ranges(
                    owners, self._slots, positions, values, merge, carry
                )

            return body(receive, tables, others)

        batch, everywhere = owners.batch_spec, PartitionSpec()
        return owners.shard_map(
            at_owner,
            self._grad.safe_rows(),
            self._grad.values,
            list(tables),
            tuple(map(list, others)),
            in_specs=(batch, batch, owners.table_spec, everywhere),
            out_specs=out_spec,
        )
