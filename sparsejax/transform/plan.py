"""The plan of a call: the leaves that get a sparse gradient, and the reads of each.

A leaf gets a SelectedRows gradient if every differentiated use of it is a read of rows
and, unless `tables=` requires it, if few enough rows are read (`max_reads`). To find
out, the program is walked once without computing anything, with all leaves that may be
tables. The number of a table is the position of its leaf, so leaves drop out of the
result without another walk.

The rows of a leaf `[K, V, ...]` may be its K rows `[V, ...]`, or it may be a stack of K
tables that is read at (k, v), with K * V rows. If the walk finds uses other than reads
of the K rows, or if K is less than V, a second walk takes such leaves for stacks. A
leaf remains a stack if all its uses are then reads, of fewer numbers than before.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments, _compat, _mesh
from sparsejax._rows import SelectedRows
from sparsejax.transform.interpreter import Reads, Run, has_rule, walk
from sparsejax.transform.liveness import Liveness
from sparsejax.transform.table import TableRef
from sparsejax.transform.trace import Call, Leaf, observer


# The half rule: a sparse step reads and writes few rows at random, a dense one all of
# them in order, which is faster a number if rows are narrow. Measured on CPU for SGD,
# Adagrad and Adam, 65,536 to 1,000,000 rows of 2 to 64 numbers, 1/32 to 1/2 of them
# read: this rule takes the slower way in 15 of 144 cases (by more than 1.1), half of
# the rows in 55, and half never loses with 64 numbers a row. See benchmarks/NOTES.md.
# Tables of fewer numbers take microseconds either way: half.
_SMALL_TABLE = 1 << 16

# A leaf with more rows that is not read gets no rows, not zeros: an optimizer would
# walk them all.
_MAX_UNREAD_ROWS = 10_000


# `explain` tells of vectors of this length that are read like tables.
_LONG_VECTOR = 100_000


class DensifyError(NotImplementedError):
    """A table whose gradient must be sparse is used in a way that needs all its rows.

    Raised by `sparsejax.value_and_grad` and `sparsejax.grad` for a leaf that `tables=`
    requires to be sparse, and only for such a leaf: any other leaf gets the dense
    gradient of `jax.grad`, and `sparsejax.explain` says why.

    Args:
      message: the table, the primitive, its source line, and what to do.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> try:
      ...     sj.grad(lambda t: jnp.sum(t), tables=True)(jnp.ones((3, 2)))
      ... except sj.DensifyError as e:
      ...     print("reduce_sum" in str(e))
      True
    """


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tables of a call, and the reads and dense uses of these tables.

    Args:
      call: the traced call.
      tables: the leaves that are walked as tables; the number of a table is the
        position of its leaf.
      run: the result of the collecting walk.
    """

    call: Call
    tables: Sequence[Leaf]
    run: Run

    def walk(self, inputs: Sequence[Any], reads: Reads) -> list[Any]:
        """Runs the program on `inputs`, with the tables as TableRefs."""
        flat, inputs = self.call.flat, list(inputs)
        for leaf in self.tables:
            array = inputs[leaf.position]
            inputs[leaf.position] = TableRef.of(leaf.position, array, leaf.stacked)
        # The loss is differentiated, aux is not.
        live = (True,) + (False,) * (len(flat.jaxpr.outvars) - 1)
        outs = walk(self.run, reads, flat.jaxpr, [*flat.consts, *inputs], live)
        return [x.materialize() if isinstance(x, TableRef) else x for x in outs]

    def zero_deltas(self) -> list[jax.Array]:
        """Makes a zero for each read, to be planted there."""
        leaves = {leaf.position: leaf for leaf in self.tables}
        deltas = []
        for site in self.run.sites:
            leaf = leaves[site.table]
            zeros = jnp.zeros(site.lead + leaf.row_shape, jnp.result_type(leaf.value))
            zeros = _compat.to_varying(zeros, site.axes)
            deltas.append(_mesh.reshard(zeros, site.spec, site.mesh))
        return deltas

    def only(self, tables: Sequence[Leaf]) -> "Plan":
        """Returns the plan of some of the tables, without another walk."""
        run = self.run.only({leaf.position for leaf in tables})
        return Plan(self.call, tables, run)


def collect(call: Call, tables: Sequence[Leaf], liveness: Liveness) -> Plan:
    """Walks the program, without computing anything, for its reads and dense uses."""
    heights = {leaf.position: leaf.height for leaf in tables}
    plan = Plan(call, tables, Run(heights, liveness))
    reads = Reads()
    if tables:
        jax.eval_shape(lambda inputs: plan.walk(inputs, reads), call.flat.inputs)
    plan.run.sites = tuple(reads.sites)
    for leaf in tables:
        leaf.sites = [s for s in reads.sites if s.table == leaf.position and s.num_rows]
        leaf.dense = [use for use in plan.run.dense if use.table == leaf.position]
    return plan


def find_tables(call: Call) -> Plan:
    """Finds the leaves that are read by rows alone, however many rows."""
    leaves = [leaf for leaf in call.leaves if _may_be_table(leaf, False)]
    plan = collect(call, leaves, Liveness())
    return plan.only([leaf for leaf in leaves if leaf.sites and not leaf.dense])


def make_plan(call: Call, strict: bool = True, stacks: bool = True) -> Plan:
    """Decides for each leaf if its gradient is sparse.

    Args:
      call: the traced call.
      strict: True if a leaf that cannot be what `tables=` requires raises; else it only
        gets a reason.
      stacks: True if a leaf may be a stack of tables.

    Returns:
      The plan whose tables are the sparse leaves.

    Raises:
      DensifyError: a leaf that `tables=` requires to be sparse cannot be.
    """
    leaves = [leaf for leaf in call.leaves if _may_be_table(leaf, strict)]
    liveness = Liveness()
    plan = collect(call, leaves, liveness)
    tried = [leaf for leaf in leaves if stacks and _may_be_stack(leaf)]
    if tried:
        plan = _try_stacks(plan, tried)
    for leaf in leaves:
        leaf.sparse = _is_sparse(leaf, strict)
    if observer.value is not None:
        observer.value.leaves += call.leaves
    return plan.only([leaf for leaf in leaves if leaf.sparse])


def _may_be_stack(leaf: Leaf) -> bool:
    """Returns True if a second walk may find that a leaf is a stack of tables."""
    shape = jnp.shape(leaf.value)
    if len(shape) < 3 or not isinstance(shape[1], int):
        return False
    height = shape[0] * shape[1]
    if not height or not _arguments.has_index_dtype(height):
        return False
    if leaf.dense:  # the rule of a product only explains why it is not a read
        names = {use.primitive for use in leaf.dense}
        return "dot_general" not in names and all(map(has_rule, names))
    # Worth trying only if the leaf has few, long rows.
    return shape[0] < shape[1] and any(not site.kind for site in leaf.sites)


def _try_stacks(plan: Plan, tried: Sequence[Leaf]) -> Plan:
    """Walks with some leaves as stacks; the others are walked by their first axis."""
    before = [(leaf.dense, leaf.rows_read) for leaf in tried]
    for leaf in tried:
        leaf.stacked = True
    stacks = collect(plan.call, plan.tables, plan.run.liveness)
    for leaf, (was_dense, was_read) in zip(tried, before):
        # Reads of the stack must touch fewer numbers than reads of the first axis.
        width = was_read * jnp.shape(leaf.value)[1]
        is_less = not leaf.dense and _arguments.may_exceed(width, leaf.rows_read)
        leaf.stacked = bool(was_dense) or is_less
    if all(leaf.stacked for leaf in tried):
        return stacks
    return collect(plan.call, plan.tables, plan.run.liveness)


def _may_be_table(leaf: Leaf, strict: bool) -> bool:
    if isinstance(leaf.value, SelectedRows):
        leaf.reason = "is a SelectedRows: its gradient has the same rows"
        return False
    dtype, shape = jnp.result_type(leaf.value), jnp.shape(leaf.value)
    if not shape:
        leaf.reason = "a scalar has no rows"
    elif not _arguments.is_float_array(leaf.value, kind=jnp.floating):
        leaf.reason = "not real floating point"
    elif not isinstance(shape[0], int):
        leaf.reason = f"the number of its rows, {shape[0]}, is not a constant"
    elif not _arguments.has_index_dtype(shape[0]):
        leaf.reason = f"{shape[0]} rows need 64-bit ids (jax_enable_x64)"
    if leaf.required and leaf.reason and strict:
        raise DensifyError(
            f"tables= marks {leaf.name} ({dtype.name} of shape {shape}) as a table, "
            f"but it cannot be one: {leaf.reason}. Set it to False or None in tables=."
        )
    if leaf.required is False:
        leaf.reason = "tables= says so"
    elif leaf.required is None and len(shape) < 2:
        is_long = not leaf.reason and leaf.height >= _LONG_VECTOR
        leaf.reason = "rank below 2"
        return is_long and observer.value is not None
    elif leaf.required is None and len(shape) == 2 and shape[0] == 1:
        leaf.reason = "has one row"
    return not leaf.reason


def _is_sparse(leaf: Leaf, strict: bool) -> bool:
    shape, uses = jnp.shape(leaf.value), leaf.dense
    if uses and leaf.required and strict:
        use = uses[0]
        raise DensifyError(
            f"tables= requires a sparse gradient for {leaf.name} (shape {shape}), but "
            f"`{use.primitive}` at {use.where} {use.why}, so its gradient has all "
            f"{leaf.height} rows.\nTwo ways out:\n"
            f"  - leave {leaf.name} out of tables= (or set it to False there) and take "
            "the dense gradient;\n"
            "  - if only rows are needed there, read them with sparsejax.lookup(table, "
            "ids) or table[ids], or teach sparsejax this primitive: "
            f'sparsejax.extend.register_rule("{use.primitive}").'
        )
    if uses and not leaf.reason:
        leaf.reason = "; ".join(f"`{u.primitive}` at {u.where} {u.why}" for u in uses)
    elif leaf.required:
        return True
    elif leaf.reason:  # a long vector, which only `explain` walks
        leaf.reason += ", but read by rows alone" if leaf.sites else ""
    elif not leaf.sites:
        if leaf.height > _MAX_UNREAD_ROWS:
            return True
        leaf.reason = "no differentiated read"
    elif all(site.kind for site in leaf.sites):
        return True
    else:
        leaf.reason = _too_many(leaf.rows_read, leaf.height, math.prod(leaf.row_shape))
    return not leaf.reason


def _too_many(rows_read: Any, height: int, width: Any) -> str:
    """Returns why this many reads make a gradient dense, or an empty string."""
    reads, limit = f"reads {rows_read} of {height} rows", "half"
    try:
        if max_reads(height, width) < height // 2:
            limit = f"{max_reads(height, width)}, as rows of {width} numbers are narrow"
        many = rows_read > max_reads(height, width)
    except _compat.InconclusiveDimensionOperation:  # a symbolic shape, in an export
        return f"{reads}, which may be more than {limit}; tables= decides"
    return f"{reads}, more than {limit}, where dense is cheaper" if many else ""


def max_reads(height: int, width: Any) -> int:
    """Returns the half rule: the most reads for which a gradient is sparse.

    Half of the rows, and of a large table with rows of fewer than 60 numbers
    `height * (width + 4) / 128`.
    """
    is_narrow = width < 60 and height * width >= _SMALL_TABLE
    return height * (width + 4) // 128 if is_narrow else height // 2
