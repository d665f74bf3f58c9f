"""`explain`: for each leaf its reads, and why its gradient is not sparse."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax.transform.plan import make_plan
from sparsejax.transform.trace import Leaf, check_fun, trace_call


@dataclasses.dataclass(frozen=True)
class LeafExplanation:
    """One leaf in an `Explanation`.

    Args:
      name: the leaf as the user would write it, e.g. `params['table']`.
      shape, dtype: of the leaf.
      sparse: True if its gradient is a SelectedRows.
      rows_read: number of rows read, duplicates counted; the gradient's capacity.
      reads: `(number of rows, "file:line")` of each read.
      reason: why it is not sparse; empty if it is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sparse: bool
    rows_read: int
    reads: tuple[tuple[int, str], ...]
    reason: str


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The result of `explain`; prints as a table, with `leaves` as data."""

    leaves: tuple[LeafExplanation, ...]

    def __getitem__(self, name: str) -> LeafExplanation:
        for leaf in self.leaves:
            if leaf.name == name:
                return leaf
        known = ", ".join(leaf.name for leaf in self.leaves)
        raise KeyError(f"sparsejax.explain: there is no leaf {name}, only {known}.")

    def __repr__(self) -> str:
        head = ("leaf", "shape", "gradient", "rows read", "where, or why not")
        table: list[tuple[str, ...]] = [head]
        for leaf in self.leaves:
            notes = [f"{rows} at {where}" for rows, where in leaf.reads]
            if not leaf.sparse:
                notes = [f"not sparse: {leaf.reason}"] + [
                    f"reads {note}" for note in notes
                ]
            shape = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
            kind = "sparse" if leaf.sparse else "dense"
            share = f"{leaf.rows_read}" if leaf.reads or leaf.sparse else "-"
            table.append((leaf.name, shape, kind, share, notes[0] if notes else ""))
            table += [("", "", "", "", note) for note in notes[1:]]
        return _arguments.show_table(table)


def explain(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    tables: PyTree = None,
) -> Callable[..., Explanation]:
    """Explains how `value_and_grad(fun)` treats each leaf; computes nothing.

    If a table's gradient is dense but should not be, the last column shows the
    operation that needs all rows, and its line. Read rows there instead, register a
    rule for that primitive (`sparsejax.extend.register_rule`), or, if more than half
    of the rows are read, require a sparse gradient with `tables=`.

    Args:
      fun: the loss, as for `sparsejax.value_and_grad`.
      argnums: int or tuple of ints, the arguments to differentiate.
      has_aux: True if `fun` returns `(loss, aux)`.
      tables: which leaves are tables, as for `sparsejax.value_and_grad`. A
        required leaf that cannot be sparse is explained, and nothing is raised.

    Returns:
      A function of the same arguments that returns an `Explanation`. It prints
      as a table: each leaf, the kind of its gradient (sparse or dense), the number
      of rows read at each file:line, and why the gradient is not sparse.
      `found["params['table']"]` (and `found.leaves` for all leaves) hold the same as
      data: `name`, `shape`, `dtype`, `sparse`, `rows_read`, `reads`, `reason`.
      Arguments may be `jax.ShapeDtypeStruct`.

    Raises:
      TypeError: a leaf cannot be differentiated, or the output is not a scalar.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> def loss(params, ids):
      ...     rows = params["table"][ids]
      ...     return jnp.sum(rows @ params["w"])
      >>> params = {"table": jnp.ones((100, 2)), "w": jnp.ones((2, 3))}
      >>> found = sj.explain(loss)(params, jnp.array([1, 2]))
      >>> found["params['table']"].sparse, found["params['table']"].rows_read
      (True, 2)
      >>> found["params['w']"].reason.split(" at ")[0]
      '`dot_general`'

    References:
      `torch._dynamo.explain`, which lists where and why a graph breaks.
    """
    numbers = check_fun("sparsejax.explain", fun, argnums, has_aux)

    @functools.wraps(fun)
    def explain_fun(*args: Any, **kwargs: Any) -> Explanation:
        call = trace_call(
            fun, numbers, has_aux, tables, args, kwargs, "sparsejax.explain"
        )
        make_plan(call, strict=False)
        return Explanation(tuple(map(_describe, call.leaves)))

    return explain_fun


def _describe(leaf: Leaf) -> LeafExplanation:
    return LeafExplanation(
        leaf.name,
        tuple(jnp.shape(leaf.value)),
        jnp.result_type(leaf.value).name,
        leaf.sparse,
        leaf.rows_read,
        tuple((site.num_rows, site.where) for site in leaf.sites),
        leaf.reason,
    )
