"""One step of a transformation, in passes over the rows of each table.

Inside `jit`, `lazy` runs a transformation that is proved to work row by row in this
way. The function of one row that it computes (see `row_program`) is run over blocks of
rows (see `block_pass`), in three kinds of passes over the rows of a gradient:

- merge: sum duplicates, once for each table;
- reduce: a number that the step needs first, like a global norm;
- update: new rows of weights and state, written in place.

A table whose update is linear in the gradient and has no state, as with SGD, has no
pass at all: its duplicates may stay, and are added when the update is.
`optax.apply_updates` stays as it is: the rows of weights are written in the update
pass, and adding the update to the same parameters gives the table that was written.

The passes are on one device by default. `passes_over` uses `functools.singledispatch`,
so that a subclass of SelectedRows, such as ShardedRows, can register its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments, _compat
from sparsejax._rows import SelectedRows, indexing, with_known_sum, with_slots
from sparsejax._rows.order_after import order_after
from sparsejax.optim._lazy import block_pass
from sparsejax.optim._lazy.row_program import Node, NotByRows, RowFunction, Runner


if TYPE_CHECKING:
    from sparsejax.optim._lazy.lazy import Step


# ------------------------------------------------------------------ a step


def run(
    tx: Any, step: Step, extra_args: dict[str, Any]
) -> tuple[list[Any], Any] | None:
    """Returns updates and new state, or None if the step cannot be run in passes."""
    grads, weights, owners = step.grads, step.weights, step.owners
    if weights is None:
        return None
    dense = [x for i, x in enumerate(grads) if i not in step.tables and is_plain(x)]
    passes = {i: passes_over(grads[i], weights[i], dense) for i in step.tables}
    if any(row_passes is None for row_passes in passes.values()):
        return None
    on_one = [x for x in passes.values() if isinstance(x, _OneDevice)]
    merge = functools.cache(
        lambda: block_pass.merge_rows(*(x.gradient() for x in on_one))
    )
    for k, row_passes in enumerate(on_one):
        row_passes.merged = lambda k=k: merge()[k]
    state, state_treedef = jax.tree.flatten(step.state)
    tables, programs = {}, {}
    for i, row_passes in passes.items():
        followers = {k: state[k] for k, owner in enumerate(owners) if owner == i}
        tables[i] = _Table(grads[i], row_passes, weights[i], followers, i, programs)
    inputs = [node for table in tables.values() for node in table.nodes]
    out_treedef = None

    def update(*rows):
        nonlocal out_treedef
        rows = iter(rows)
        g, w, s = list(grads), list(weights), list(state)
        for i, table in tables.items():
            g[i], w[i] = next(rows), next(rows)
            for k in table.state:
                s[k] = next(rows)
        g, w = map(step.treedef.unflatten, (g, w))
        updates, new = tx.update(g, state_treedef.unflatten(s), w, **extra_args)
        out, out_treedef = jax.tree.flatten((step.treedef.flatten_up_to(updates), new))
        return out

    @functools.cache
    def fresh():
        """Returns the state's leaves for tables of one row that was never touched."""
        rows = [
            jnp.zeros((1, *x.shape[1:]), x.dtype) if i in tables else x
            for i, x in enumerate(weights)
        ]
        return jax.tree.leaves(tx.init(step.treedef.unflatten(rows)))

    def reduce(group):
        return tables[group[0].table].reduce(group, fresh)

    try:
        jaxpr, consts = _compat.trace(update, *(node.aval for node in inputs))
        runner = Runner(reduce)
        outs = map(runner.value, runner.run(jaxpr, consts, inputs))
        updates, new_state = jax.tree.unflatten(out_treedef, outs)
        new_leaves = state_treedef.flatten_up_to(new_state)
        for i, table in tables.items():
            updates[i], followers = table.finish(updates[i], new_leaves)
            for k, leaf in followers.items():
                new_leaves[k] = leaf
    except NotByRows:
        return None
    return updates, state_treedef.unflatten(new_leaves)


class _Table:
    """One table in the step: its nodes, and the functions of its rows.

    Args:
      grad: its gradient.
      passes: over the rows of the gradient.
      weights: the table.
      state: the leaves of the state that follow it, by their index.
      index: of the table.
      programs: those traced so far, for tables with equal rows.
    """

    def __init__(
        self,
        grad: SelectedRows,
        passes: Any,
        weights: Any,
        state: dict[int, Any],
        index: int,
        programs: dict[Any, block_pass.Program],
    ):
        self.passes, self.weights, self.state = passes, weights, state
        self.programs = programs
        row = lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
        self.gradient = Node(index, row(grad))
        self.weight = Node(index, row(weights))
        self.follower = {k: Node(index, row(x)) for k, x in state.items()}
        self.arrays = {self.weight: weights}
        self.arrays |= {self.follower[k]: x for k, x in state.items()}
        self.nodes = [self.gradient, *self.arrays]

    def reduce(self, group, fresh) -> list[jax.Array]:
        """Reduces functions of the rows."""
        function = RowFunction([r.node for r in group], self.nodes)
        read = {n: x for n, x in self.arrays.items() if n in function.inputs}
        leaves = fresh() if read else []
        zero = jnp.zeros(self.weight.aval.shape, self.weights.dtype)
        untouched = {n: leaves[k] for k, n in self.follower.items() if n in read}
        return self.passes.reduce(
            list(read.values()),
            [untouched.get(n, zero) for n in read],
            function.operands,
            self._trace(function, list(read)),
            [(r.kind, r.axes) for r in group],
        )

    def finish(self, update: Any, leaves: Sequence[Any]) -> tuple[Any, dict[int, Any]]:
        """Returns the update of the table, and its leaves of the new state."""
        new = {k: leaves[k] for k, old in self.follower.items() if leaves[k] is not old}
        function = RowFunction([update, *new.values()], self.nodes)
        operands = function.operands
        if not new and function.is_linear(self.gradient):
            change = lambda row: function([row[None]], operands)[0][0]
            scaled = self.passes.scale(change)
            if scaled is not None:
                return scaled, self.state
        written = [self.weight, *(self.follower[k] for k in new)]
        used = [*written, *function.inputs]
        read = {n: x for n, x in self.arrays.items() if n in used}
        nodes = list(read)
        writes = [nodes.index(n) for n in written]
        program = self._trace(function, nodes, adds_to=writes[0])
        (table, *state), out = self.passes.update(
            list(read.values()), operands, program, writes
        )
        state = {**self.state, **dict(zip(new, state))}
        return with_known_sum(out, self.weights, table), state

    def _trace(
        self, function: RowFunction, nodes: Sequence[Node], adds_to: int | None = None
    ) -> block_pass.Program:
        """Traces the function: a program `(gradient, *nodes, *operands)` of one row.

        The program of an earlier table with an equal function is used again.

        Args:
          function: of a row.
          nodes: the rows that are read.
          adds_to: the number of the node to which the first output is added; then the
            program returns this sum, the other outputs, and the first one.
        """
        rows = [self.gradient, *nodes]
        key = function.key(rows), adds_to
        if key in self.programs:
            return self.programs[key]

        def program(*args):
            values = dict(zip(rows, args))
            ins = [values[n] for n in function.inputs]
            outs = function(ins, args[len(rows) :])
            if adds_to is None:
                return outs
            change, *state = outs
            return [_add(values[nodes[adds_to]], change), *state, change]

        specs = [n.aval for n in rows]
        specs += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in function.operands]
        traced = block_pass.Program(*_compat.trace(program, *specs), key)
        return self.programs.setdefault(key, traced)


def _add(rows: jax.Array, change: jax.Array) -> jax.Array:
    """Adds the update to rows, as `optax.apply_updates` does."""
    dtype = indexing.accumulator_dtype(indexing.promote(rows.dtype, change.dtype))
    return (rows.astype(dtype) + change.astype(dtype)).astype(rows.dtype)


# ------------------------------------------------------------------ passes


@functools.singledispatch
def passes_over(grad: SelectedRows, table: Any, others: Sequence[jax.Array]) -> Any:
    """Returns the passes over a gradient's rows in `table`, or None if it has none.

    The result has three methods:

    - `reduce(tables, fresh, operands, program, kinds)`, see `block_pass.reduce_rows`;
    - `update(tables, operands, program, writes)`, see `block_pass.update_rows`: the
      tables that were written, and the update;
    - `scale(function)`: the update `function(row)` of each row of the gradient, which
      is linear; None if `update` is to be used.

    The first two may raise NotByRows.

    Args:
      grad: a gradient.
      table: its table.
      others: arrays that are computed before the passes begin.
    """
    arrays = grad.rows, grad.values, table
    if type(grad) is not SelectedRows or not is_traced(grad, table):
        return None
    if not all(map(is_plain, arrays)):
        return None
    return _OneDevice(with_slots(grad, grad.rows, order_after(grad.values, others)))


def is_plain(x: Any) -> bool:
    """Returns True if `x` is an array whose type has no mesh."""
    return isinstance(x, jax.Array) and not _compat.has_mesh(x)


def is_traced(grad: SelectedRows, table: Any) -> bool:
    """Returns True inside a `jit`, for the types and sizes that passes accept."""
    return (
        not _compat.is_symbolic_dim(grad.capacity)  # blocks have static sizes
        and grad.capacity > 0
        and grad.height > 0
        and not _arguments.is_concrete(table)
        and jnp.issubdtype(table.dtype, jnp.floating)
        and jnp.issubdtype(grad.dtype, jnp.floating)
    )


class _OneDevice:
    """The passes of `block_pass`.

    Attributes:
      merged: a function that returns the result of `block_pass.merge_rows`, for the
        gradients of all tables in one call, which on CUDA shares kernels.
    """

    merged: Callable[[], tuple[jax.Array, ...]]

    def __init__(self, grad: SelectedRows):
        self._grad = grad

    def gradient(self) -> tuple[jax.Array, jax.Array, int]:
        rows, height = self._grad.safe_rows(), self._grad.height
        if jnp.issubdtype(rows.dtype, jnp.unsignedinteger):
            # The lowering for CPUs needs a number below 0 for an empty slot.
            rows = rows.astype(_arguments.index_dtype(height))
        return rows, self._grad.values, height

    def reduce(self, tables, fresh, operands, program, kinds):
        merged = self.merged()
        return block_pass.reduce_rows(merged, tables, fresh, operands, program, kinds)

    def update(self, tables, operands, program, writes):
        merged = self.merged()
        new, rows = block_pass.update_rows(merged, tables, operands, program, writes)
        slots = min(self._grad.capacity, self._grad.height)
        ids, values = _ascending(merged[0], rows, slots=slots)
        ids = ids.astype(self._grad.rows.dtype)
        return new, SelectedRows(ids, values, self._grad.height)

    def scale(self, function):
        """Duplicates may stay."""
        grad = self._grad
        values = indexing.zero_unless(grad.filled(), jax.vmap(function)(grad.values))
        return SelectedRows(grad.safe_rows(), values, grad.height)


@functools.partial(jax.jit, static_argnames="slots")
def _ascending(rows, values, *, slots):
    """Returns distinct rows in ascending order; XLA drops an unused sort."""
    order = jnp.argsort(rows)[:slots]
    return rows[order], values[order]
