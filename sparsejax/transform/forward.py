"""Runs a function whose program has views of tables, without a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from sparsejax import _arguments, _compat
from sparsejax.transform import rules
from sparsejax.transform.interpreter import Reads, Run, walk
from sparsejax.transform.table import TableRef
from sparsejax.transform.trace import makes_views


del rules  # imported for the rules that it registers

T = TypeVar("T")


def run_forward(fun: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`fun(*args, **kwargs)`, traced and walked, so that views of tables read rows.

    Arguments that are not arrays are passed through unchanged.
    """
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    is_input = [_arguments.is_array(x) for x in leaves]
    inputs = [x for x, dynamic in zip(leaves, is_input) if dynamic]
    out_tree: Any = None
    out_leaves: list[Any] = []  # None in place of each array

    def flat(*xs):
        nonlocal out_tree
        arrays = iter(xs)
        full = [next(arrays) if d else x for x, d in zip(leaves, is_input)]
        args, kwargs = jax.tree_util.tree_unflatten(tree, full)
        found, out_tree = jax.tree_util.tree_flatten(fun(*args, **kwargs))
        out_leaves[:] = [None if _arguments.is_array(x) else x for x in found]
        return [x for x in found if _arguments.is_array(x)]

    with makes_views(True):
        jaxpr, consts = _compat.trace(flat, *inputs)
    live = (True,) * len(jaxpr.outvars)
    # `Reads` without deltas, so that the walk runs all equations.
    outs = walk(Run({}), Reads(()), jaxpr, [*consts, *inputs], live)
    arrays = (x.materialize() if isinstance(x, TableRef) else x for x in outs)
    full = [next(arrays) if x is None else x for x in out_leaves]
    return jax.tree_util.tree_unflatten(out_tree, full)
