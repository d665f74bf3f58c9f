"""The plan of a call: which leaves get a sparse gradient, and the reads of each.

A leaf gets a SelectedRows gradient if every differentiated use of it is a read of rows
and, unless `tables=` requires it, if at most a quarter of its rows are read. To find
out, the program is walked once without computing anything.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax._rows import SelectedRows
from sparsejax.transform import rules
from sparsejax.transform.interpreter import DenseUse, Reads, Run, walk
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
            inputs[leaf.position] = TableRef.of(number, inputs[leaf.position])
        # The loss is differentiated, aux is not.
        live = (True,) + (False,) * (len(call.jaxpr.outvars) - 1)
        outs = walk(self.run, reads, call.jaxpr, [*call.consts, *inputs], live)
        return [x.materialize() if isinstance(x, TableRef) else x for x in outs]

    def zero_deltas(self) -> list[jax.Array]:
        """A zero for each read, to be planted there."""
        deltas = []
        for site in self.run.sites:
            table = self.tables[site.table].value
            zeros = jnp.zeros(site.lead + jnp.shape(table)[1:], jnp.result_type(table))
            deltas.append(reshard(vary(zeros, site.axes), site.spec, site.mesh))
        return deltas


def collect(
    call: Call, tables: Sequence[Leaf], liveness: Liveness | None = None
) -> Plan:
    """Walks the program, without computing anything, for its reads and dense uses."""
    heights = [jnp.shape(leaf.value)[0] for leaf in tables]
    plan = Plan(call, tables, Run(heights, liveness or Liveness()))
    reads = Reads()
    if tables:
        jax.eval_shape(lambda inputs: plan.walk(inputs, reads), call.inputs)
    plan.run.sites = tuple(reads.sites)
    return plan


def make_plan(call: Call, strict: bool = True) -> Plan:
    """Decides which leaves are sparse.

    Args:
      call: the traced call.
      strict: whether a leaf that cannot be what `tables=` requires raises, or only gets
        a reason.

    Returns:
      The plan whose tables are the sparse leaves.

    Raises:
      DensifyError: a leaf that `tables=` requires to be sparse cannot be.
    """
    tables = [leaf for leaf in call.leaves if _may_be_table(leaf, strict)]
    while True:
        plan = collect(call, tables)
        for number, leaf in enumerate(tables):
            sites = [s for s in plan.run.sites if s.table == number]
            leaf.sites = [s for s in sites if s.num_rows]
            uses = [use for use in plan.run.dense if use.table == number]
            leaf.sparse = _is_sparse(leaf, uses, strict)
        kept = [leaf for leaf in tables if leaf.sparse]
        if len(kept) == len(tables):
            return plan
        tables = kept  # walk again: the numbers of tables and reads have changed


def _may_be_table(leaf: Leaf, strict: bool) -> bool:
    if isinstance(leaf.value, SelectedRows):
        leaf.reason = "is a SelectedRows: its gradient has the same rows"
        return False
    dtype, shape = jnp.result_type(leaf.value), jnp.shape(leaf.value)
    if not jnp.issubdtype(dtype, jnp.floating):
        leaf.reason = "not real floating point"
    elif not shape:
        leaf.reason = "a scalar has no rows"
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
            f"{use.why}, so its gradient has all {shape[0]} rows.\n"
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
    elif leaf.rows_read > MAX_FRACTION * shape[0]:
        leaf.reason = (
            f"reads {leaf.rows_read} of {shape[0]} rows, more than a quarter, where "
            "dense is cheaper"
        )
    return not leaf.reason
