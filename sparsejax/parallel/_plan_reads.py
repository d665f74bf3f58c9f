"""The reads of each table in a step: given by the user, or found in the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax.parallel._table import ShardedTable
from sparsejax.transform.forward import ids_program
from sparsejax.transform.plan import find_tables
from sparsejax.transform.trace import trace_call


@dataclasses.dataclass(frozen=True)
class Read:
    """One read of a table in a step, on all devices together.

    Args:
      count: the number of ids.
      ids: the ids, in the order of the batch, or None if they are not known.
      length: the number of ids that are combined into one row.
    """

    count: int
    ids: np.ndarray | None = None
    length: float = 1


Reads = tuple[list[Any], Any, list[str], list[list[Read] | None]]


def reads_of_ids(tables: PyTree, batch: PyTree) -> Reads:
    """Returns each table's reads from its ids, or their number; as `reads_in_loss`."""
    is_shape = lambda x: isinstance(x, tuple) and all(isinstance(n, int) for n in x)
    is_leaf = lambda x: isinstance(x, ShardedTable) or is_shape(x)
    named, treedef = jax.tree_util.tree_flatten_with_path(tables, is_leaf=is_leaf)
    leaves = [
        jax.ShapeDtypeStruct(x, jnp.float32) if is_shape(x) else x for _, x in named
    ]
    names = ["tables" + jax.tree_util.keystr(path) for path, _ in named]
    if isinstance(batch, int) or hasattr(batch, "dtype"):
        batch = treedef.unflatten([batch] * len(leaves))

    def read(ids):
        if ids is None or isinstance(ids, int):
            return None if ids is None else [Read(ids)]
        ids = np.asarray(_arguments.as_integers(ids))
        return [Read(ids.size, ids.reshape(-1))]

    return leaves, treedef, names, list(map(read, treedef.flatten_up_to(batch)))


def reads_in_loss(loss: Callable[..., Any], params: PyTree, batch: PyTree) -> Reads:
    """Traces `loss(params, batch)` and finds the parameters that it reads by rows.

    Returns:
      The leaves of `params` with their tree and names; and for each of them its reads,
      or None if it is not a table.
    """
    first = lambda out: out[0] if isinstance(out, tuple) else out
    fun = lambda params, batch: first(loss(params, batch))
    is_sharded = lambda x: isinstance(x, ShardedTable)
    as_array = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_sharded(x) else x
    params = jax.tree.map(as_array, params, is_leaf=is_sharded)
    traced = trace_call(fun, 0, False, None, (params, batch), {})
    plan = find_tables(traced)
    by_leaf: dict[int, list[Read]] = {leaf.position: [] for leaf in plan.tables}
    ids = _ids_of(plan)
    for number, site in enumerate(plan.run.sites):
        if site.num_rows:
            own_ids = None if ids is None else ids[number]
            by_leaf[site.table].append(Read(site.num_rows, own_ids, site.per_output))
    leaves = [leaf.value for leaf in traced.leaves]
    names = [leaf.name for leaf in traced.leaves]
    reads = [by_leaf.get(leaf.position) or None for leaf in traced.leaves]
    return leaves, traced.tree, names, reads


def _ids_of(plan: Any) -> list[np.ndarray] | None:
    """Returns the ids of each read, or None if they depend on abstract inputs.

    Only the equations that make ids are run, so that tables may be abstract.
    """
    inputs = plan.call.flat.inputs
    deltas = jax.eval_shape(plan.zero_deltas)
    program = ids_program(plan.walk, deltas, inputs)
    inputs = [x for x, needed in zip(inputs, program.needs_input) if needed]
    values = *program.consts, *inputs
    if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in values):
        return None
    zeros = [
        jnp.zeros(x.shape, x.dtype)
        for x, needed in zip(deltas, program.needs_delta)
        if needed
    ]
    return [np.asarray(x) for x in jax.jit(program.run)(zeros, inputs)]
