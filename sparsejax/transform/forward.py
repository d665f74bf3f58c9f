"""Runs a function whose program has views of tables, without a gradient."""

from collections.abc import Callable
from typing import Any, TypeVar

from sparsejax.transform import rules
from sparsejax.transform.interpreter import Reads, Run, walk
from sparsejax.transform.table import TableRef
from sparsejax.transform.trace import trace_flat


del rules  # imported for the rules that it registers

T = TypeVar("T")


def run_forward(fun: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`fun(*args, **kwargs)`, traced and walked, so that views of tables read rows.

    Arguments that are not arrays are passed through unchanged.
    """
    flat = trace_flat(fun, args, kwargs)
    live = (True,) * len(flat.jaxpr.outvars)
    # `Reads` without deltas, so that the walk runs all equations.
    outs = walk(Run({}), Reads(()), flat.jaxpr, [*flat.consts, *flat.inputs], live)
    arrays = [x.materialize() if isinstance(x, TableRef) else x for x in outs]
    return flat.unflatten(arrays)
