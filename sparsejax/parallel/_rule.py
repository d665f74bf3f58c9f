"""A read of rows over devices as one equation that the transformation knows.

`read_rows(reading, values, positions)` is a jitted function with a name of its own,
under which its rule is registered: `sparsejax.value_and_grad` sees a read of rows and
looks no further. Plain `jax.grad` looks inside, where a `custom_vjp` gives the dense
gradient, of the table's size; it is the oracle.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from sparsejax import _compat
from sparsejax._rows import indexing
from sparsejax.parallel import _exchange
from sparsejax.parallel._owners import Owners
from sparsejax.parallel._rows import ShardedRows, concatenate
from sparsejax.parallel._table import gathered, laid_out
from sparsejax.transform.rules.calls import register_call
from sparsejax.transform.table import lay_out


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is static about a read.

    Args:
      owners: who owns which rows.
      slots: C, for each device and owner in each round.
    """

    owners: Owners
    slots: int

    def package(
        self,
        row: Sequence[int],
        dtype: Any,
        ids: Sequence[jax.Array],
        cotangents: Sequence[jax.Array],
        sites: Sequence[Any],
    ) -> ShardedRows:
        """The gradient of a table: all of its reads, each slot where its id was."""
        owners, parts = self.owners, []
        for i, c, site in zip(ids, cotangents, sites):
            # A loop has put its length in front of the devices' parts.
            here = i.shape[-1]
            loops = i.size // max(1, here)
            rows = _by_device(owners, i.reshape(loops, here))
            values = _by_device(owners, c.reshape(loops, here, *row))
            values = indexing.zero_unless(
                indexing.in_range(rows, owners.height), values
            )
            slots = site.kind.slots * loops
            parts.append(ShardedRows.make(rows, values.astype(dtype), owners, slots))
        return concatenate(parts)


def _by_device(owners: Owners, x: jax.Array) -> jax.Array:
    """`[loops, n, ...]` as `[loops * n, ...]`, each device's parts staying there."""
    if x.shape[0] == 1:
        # Said aloud: left to itself, XLA may gather what a jitted gradient returns.
        return laid_out(x[0], owners.mesh, *owners.batch_spec)
    flat = lambda part: part.reshape(math.prod(part.shape[:2]), *part.shape[2:])
    spec = PartitionSpec(None, *owners.batch_spec)
    return owners.run(flat, x, into=(spec,), out=owners.batch_spec)


def read_rows(reading: Reading, values: jax.Array, positions: jax.Array) -> Any:
    """`(rows [n, ...], Metrics)`; `positions [n]`, n a multiple of the devices."""
    return _call(reading)(values, positions)


@functools.cache
def _call(reading: Reading) -> Callable:
    """One jitted function for each way of reading, with its rule."""
    owners, slots = reading.owners, reading.slots

    @jax.custom_vjp
    def read(values, positions):
        return _exchange.read(owners, slots, values, positions)

    @jax.custom_vjp
    def spread(cotangent, positions):
        return _exchange.spread(owners, slots, cotangent, positions)

    # The two are linear, and each is the other's transpose, so that second derivatives
    # work as well.
    def read_fwd(values, positions):
        return read(values, positions), positions

    def read_bwd(positions, cotangents):
        return spread(cotangents[0], positions), None

    def spread_fwd(cotangent, positions):
        return spread(cotangent, positions), positions

    def spread_bwd(positions, table):
        return read(table, positions)[0], None

    read.defvjp(read_fwd, read_bwd)
    spread.defvjp(spread_fwd, spread_bwd)

    def call(values, positions):
        return read(values, positions)

    call.__name__ = call.__qualname__ = f"read_sharded_rows_{next(_numbers)}"
    register_call(call.__name__)(functools.partial(_rule, reading))
    return jax.jit(call)


def _counter():
    number = 0
    while True:
        yield number
        number += 1


_numbers = _counter()


def _rule(reading: Reading, ctx: Any, ref: Any, positions: jax.Array) -> Any:
    if not hasattr(ref, "steps") or ref.row_axis != 0:
        return NotImplemented
    read = functools.partial(read_rows, reading)
    spread, shape = (lambda cotangent: cotangent), positions.shape
    for _ in shape[1:]:  # under vmap
        read, spread = jax.vmap(read, in_axes=(None, 0)), gathered
    rows, metrics = read(ref.array, positions)
    layout = _compat.explicit_spec(rows) if len(shape) > 1 else ()
    if layout:  # of which one axis cannot be made
        rows, positions = gathered(rows), gathered(positions)
    rows = ctx.combine(ref, positions, rows, spread, kind=reading)
    rows = lay_out(rows, layout, reading.owners.mesh)
    if ref.steps:
        rows = ref.view(rows.reshape(positions.size, *rows.shape[len(shape) :]))
        rows = rows.reshape(*shape, *rows.shape[1:])
    return [rows, *metrics]
