"""Walks without a gradient: a function run forward, or cut to the ids that it reads.

A walk that plants deltas returns the ids of its reads. Without the equations that no id
needs, a large model shrinks to the few equations that make ids. That program runs
before the rows are there: `sparsejax.parallel.plan` counts ids with it, a
`sparsejax.store.KVStore` pulls the rows, and `sparsejax.optim.exact_value_and_grad`
catches them up.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sparsejax import _compat
from sparsejax.transform.interpreter import Reads, Run, walk
from sparsejax.transform.table import TableRef
from sparsejax.transform.trace import trace_flat


T = TypeVar("T")


def run_forward(fun: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Runs `fun(*args, **kwargs)`, walked, so that views of tables read rows.

    Arguments that are not arrays are passed through unchanged.
    """
    flat = trace_flat(fun, args, kwargs)
    live = (True,) * len(flat.jaxpr.outvars)
    # `Reads` without deltas, so that the walk runs all equations.
    outs = walk(Run({}), Reads(()), flat.jaxpr, [*flat.consts, *flat.inputs], live)
    arrays = [x.materialize() if isinstance(x, TableRef) else x for x in outs]
    return flat.unflatten(arrays)


@dataclasses.dataclass(frozen=True)
class IdsProgram:
    """A program of the deltas and inputs of a walk that returns the ids of its reads.

    Args:
      needs_delta: for each delta, True if an id depends on the rows read there.
      needs_input: for each input of the walk, True if an id depends on it.
      jaxpr, consts: the program, of those deltas and inputs.
    """

    needs_delta: tuple[bool, ...]
    needs_input: tuple[bool, ...]
    jaxpr: Any
    consts: list[Any]

    def run(self, deltas: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Computes the ids of each read, from what they depend on."""
        return _compat.eval_jaxpr(self.jaxpr, self.consts, *deltas, *inputs)

    def behind(self, number: int) -> tuple[list[int], list[int]]:
        """Returns the reads and inputs that the ids of read `number` depend on.

        A read counts if they depend on the rows read there.
        """
        only = [k == number for k in range(len(self.jaxpr.outvars))]
        _, _, is_used = _compat.only_needed(self.jaxpr, self.consts, only)
        used = iter(is_used)
        reads = [k for k, kept in enumerate(self.needs_delta) if kept and next(used)]
        inputs = [k for k, kept in enumerate(self.needs_input) if kept and next(used)]
        return reads, inputs


def ids_program(
    walk: Callable[[Sequence[Any], Reads], Any],
    deltas: Sequence[Any],
    inputs: Sequence[Any],
) -> IdsProgram:
    """Cuts the program of the ids out of a walk.

    Args:
      walk: `walk(inputs, reads)` runs the walk.
      deltas: for each read of the walk an array or a spec, in the order of the reads.
      inputs: arrays, numbers or specs.
    """

    def collect(deltas, inputs):
        reads = Reads(deltas)
        walk(inputs, reads)
        return list(reads.ids)

    traced = _compat.trace(collect, list(deltas), list(inputs))
    jaxpr, consts, is_used = _compat.only_needed(*traced)
    count = len(deltas)
    return IdsProgram(tuple(is_used[:count]), tuple(is_used[count:]), jaxpr, consts)
