"""The plan of a call: which leaves get a sparse gradient, and the reads of each.

A leaf gets a SelectedRows gradient if every differentiated use of it is a read of rows
and, unless `tables=` requires it, if at most a quarter of its rows are read. To find
out, the program is walked once without computing anything.

The rows of a leaf `[K, V, ...]` may be its K rows `[V, ...]`, or it may be a stack of K
tables that is read at (k, v), with K * V rows. Where the first walk finds other uses
than reads of the K rows, or K is less than V, another one takes such leaves for stacks.
A leaf remains one if all its uses are then reads, of fewer numbers than before.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import _arguments, _compat
from sparsejax._rows import SelectedRows
from sparsejax.transform import rules
from sparsejax.transform.interpreter import (
    DenseUse,
    Reads,
    Run,
    Site,
    knows_stacks,
    walk,
)
from sparsejax.transform.liveness import Liveness
from sparsejax.transform.table import TableRef, reshard, vary
from sparsejax.transform.trace import Call, Leaf


del rules  # imported for the rules that it registers

# Measured on CPU: a sorted, merged row update and a dense one cost about the same where
# a quarter of the rows is read. See benchmarks/NOTES.md.
MAX_FRACTION = 0.25


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
    """The tables of a call, and what a walk with exactly these tables finds.

    Args:
      call: the traced call.
      tables: the leaves that are walked as tables; a table's number is its place here.
      run: what the collecting walk found.
    """

    call: Call
    tables: Sequence[Leaf]
    run: Run

    def walk(self, inputs: Sequence[Any], reads: Reads) -> list[Any]:
        """The outputs of the program on `inputs`, with the tables as TableRefs."""
        call, inputs = self.call, list(inputs)
        for number, leaf in enumerate(self.tables):
            array = inputs[leaf.position]
            inputs[leaf.position] = TableRef.of(number, array, leaf.stacked)
        # The loss is differentiated, aux is not.
        live = (True,) + (False,) * (len(call.jaxpr.outvars) - 1)
        outs = walk(self.run, reads, call.jaxpr, [*call.consts, *inputs], live)
        return [x.materialize() if isinstance(x, TableRef) else x for x in outs]

    def zero_deltas(self) -> list[jax.Array]:
        """A zero for each read, to be planted there."""
        deltas = []
        for site in self.run.sites:
            leaf = self.tables[site.table]
            zeros = jnp.zeros(site.lead + leaf.row_shape, jnp.result_type(leaf.value))
            deltas.append(reshard(vary(zeros, site.axes), site.spec, site.mesh))
        return deltas

    def uses(self) -> dict[int, "Uses"]:
        """The uses of each table, by the leaf's position."""
        run = self.run
        return {
            leaf.position: Uses(
                [s for s in run.sites if s.table == number and s.num_rows],
                [use for use in run.dense if use.table == number],
            )
            for number, leaf in enumerate(self.tables)
        }


class Uses(NamedTuple):
    """What a walk finds about one table: reads of rows, and dense uses."""

    sites: list[Site]
    dense: list[DenseUse]

    @property
    def num_rows(self) -> Any:
        """Number of rows read."""
        return sum(site.num_rows for site in self.sites)


def collect(call: Call, tables: Sequence[Leaf], liveness: Liveness) -> Plan:
    """Walks the program, without computing anything, for its reads and dense uses."""
    plan = Plan(call, tables, Run([leaf.height for leaf in tables], liveness))
    reads = Reads()
    if tables:
        jax.eval_shape(lambda inputs: plan.walk(inputs, reads), call.inputs)
    plan.run.sites = tuple(reads.sites)
    return plan


def find_tables(call: Call) -> Plan:
    """The leaves that are read by rows and used in no other way, however many rows."""
    liveness = Liveness()
    leaves = [leaf for leaf in call.leaves if _may_be_table(leaf, False)]
    plan = collect(call, leaves, liveness)
    uses = plan.uses()
    is_table = lambda leaf: uses[leaf.position].sites and not uses[leaf.position].dense
    return collect(call, [leaf for leaf in leaves if is_table(leaf)], liveness)


def make_plan(call: Call, strict: bool = True, stacks: bool = True) -> Plan:
    """Decides which leaves are sparse.

    Args:
      call: the traced call.
      strict: whether a leaf that cannot be what `tables=` requires raises, or only gets
        a reason.
      stacks: whether a leaf may be a stack of tables.

    Returns:
      The plan whose tables are the sparse leaves.

    Raises:
      DensifyError: a leaf that `tables=` requires to be sparse cannot be.
    """
    tables = [leaf for leaf in call.leaves if _may_be_table(leaf, strict)]
    liveness = Liveness()
    plan = collect(call, tables, liveness)
    uses = plan.uses()
    tried = [leaf for leaf in tables if _may_be_stack(leaf, uses[leaf.position])]
    if stacks and tried:
        plan = _try_stacks(call, tables, tried, uses, liveness)
    while True:
        for leaf in tables:
            leaf.sites = uses[leaf.position].sites
            leaf.sparse = _is_sparse(leaf, uses[leaf.position].dense, strict)
        kept = [leaf for leaf in tables if leaf.sparse]
        if plan is not None and len(kept) == len(plan.tables):
            return plan
        tables = kept  # walk again: the numbers of tables and reads have changed
        plan = collect(call, tables, liveness)
        uses = plan.uses()


def _may_be_stack(leaf: Leaf, uses: Uses) -> bool:
    """Whether a second look at a leaf may find that it is a stack of tables."""
    shape = jnp.shape(leaf.value)
    if len(shape) < 3 or not isinstance(shape[1], int):
        return False
    height = shape[0] * shape[1]
    if not height or not _arguments.has_index_dtype(height):
        return False
    if uses.dense:
        return all(knows_stacks(use.primitive) for use in uses.dense)
    # Parts of few long rows may be read; of many short ones it would hardly matter.
    return shape[0] < shape[1] and any(not site.kind for site in uses.sites)


def _try_stacks(
    call: Call,
    tables: Sequence[Leaf],
    tried: Sequence[Leaf],
    uses: dict[int, Uses],
    liveness: Liveness,
) -> Plan | None:
    """Walks with leaves as stacks, and decides which are.

    Args:
      call: the traced call.
      tables: the leaves that were walked as tables.
      tried: those of them that may be stacks.
      uses: what was found about each leaf; for stacks it is replaced.
      liveness: of the program.

    Returns:
      The plan of that walk, if all that were tried are stacks.
    """
    for leaf in tried:
        leaf.stacked = True
    walked = [t for t in tables if t.stacked or not uses[t.position].dense]
    plan = collect(call, walked, liveness)
    found = plan.uses()
    for leaf in tried:
        was, now = uses[leaf.position], found[leaf.position]
        if was.dense or not now.dense and _reads_less(leaf, now, was):
            uses[leaf.position] = now
        else:
            leaf.stacked = False
    return plan if all(leaf.stacked for leaf in tried) else None


def _reads_less(leaf: Leaf, now: Uses, was: Uses) -> bool:
    """Whether a leaf is read for fewer numbers as a stack than by its first axis."""
    try:
        return now.num_rows < was.num_rows * jnp.shape(leaf.value)[1]
    except _compat.InconclusiveDimensionOperation:  # a symbolic shape, in an export
        return True


def _may_be_table(leaf: Leaf, strict: bool) -> bool:
    if isinstance(leaf.value, SelectedRows):
        leaf.reason = "is a SelectedRows: its gradient has the same rows"
        return False
    dtype, shape = jnp.result_type(leaf.value), jnp.shape(leaf.value)
    if not jnp.issubdtype(dtype, jnp.floating):
        leaf.reason = "not real floating point"
    elif not shape:
        leaf.reason = "a scalar has no rows"
    elif not isinstance(shape[0], int):
        leaf.reason = f"the number of its rows, {shape[0]}, is not a constant"
    elif not _arguments.has_index_dtype(shape[0]):
        leaf.reason = f"{shape[0]} rows need 64-bit ids (jax_enable_x64)"
    if leaf.required and leaf.reason and strict:
        raise DensifyError(
            f"sparsejax.value_and_grad: tables= marks {leaf.name} ({dtype.name} of "
            f"shape {shape}) as a table, but it cannot be one: {leaf.reason}. Leave "
            "it out of tables= (or set it to False there)."
        )
    if leaf.required is False:
        leaf.reason = "tables= says so"
    elif leaf.required is None and len(shape) < 2:
        leaf.reason = "rank below 2"
    return not leaf.reason


def _is_sparse(leaf: Leaf, uses: Sequence[DenseUse], strict: bool) -> bool:
    shape = jnp.shape(leaf.value)
    if uses and leaf.required and strict:
        use = uses[0]
        raise DensifyError(
            "sparsejax.value_and_grad: tables= requires a sparse gradient for "
            f"{leaf.name} (shape {shape}), but `{use.primitive}` at {use.where} "
            f"{use.why}, so its gradient has all {leaf.height} rows.\n"
            "Two ways out:\n"
            f"  - leave {leaf.name} out of tables= (or set it to False there) and take "
            "the dense gradient;\n"
            "  - if only rows are needed there, read them with sparsejax.lookup(table, "
            "ids) or table[ids], or teach sparsejax this primitive: "
            f'sparsejax.extend.register_rule("{use.primitive}").'
        )
    if uses:
        leaf.reason = "; ".join(f"`{u.primitive}` at {u.where} {u.why}" for u in uses)
    elif leaf.required:
        return True
    elif not leaf.sites:
        leaf.reason = "no differentiated read"
    elif all(site.kind for site in leaf.sites):
        return True
    else:
        leaf.reason = _too_many(leaf.rows_read, leaf.height)
    return not leaf.reason


def _too_many(rows_read: Any, height: int) -> str:
    """Why so many reads make a gradient dense; empty if they do not."""
    reads = f"reads {rows_read} of {height} rows"
    try:
        many = rows_read > int(MAX_FRACTION * height)
    except _compat.InconclusiveDimensionOperation:  # a symbolic shape, in an export
        return f"{reads}, which may be more than a quarter; tables= decides"
    return f"{reads}, more than a quarter, where dense is cheaper" if many else ""
