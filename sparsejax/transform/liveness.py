"""Liveness: the variables of a program that the loss is differentiated through.

A use of a table counts only if its result reaches the loss along floating-point values:
a use under `stop_gradient`, in a comparison or for aux alone is not differentiated. The
analysis runs backwards over a jaxpr and is conservative: a dead variable has a zero
gradient; a live variable may have a zero gradient.

`Registry` has the functions for primitives: flows here, rules in `interpreter.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from sparsejax import _compat


# -- functions by primitive


class Registry:
    """Functions by the name of a primitive; the latest comes first."""

    def __init__(self):
        self._entries: dict[str, list[Any]] = {}

    def add(self, primitive: Any, entry: Any) -> None:
        """Registers a function for a primitive, or for a name.

        It replaces a function of the same module and name, so that a cell of a notebook
        can be run again.
        """
        entries = self._entries.setdefault(getattr(primitive, "name", primitive), [])
        name_of = lambda f: (getattr(f, "__module__", 0), getattr(f, "__qualname__", f))
        entries[:] = [entry, *(e for e in entries if name_of(e) != name_of(entry))]

    def find(self, name: str) -> Sequence[Any]:
        """Returns the functions for primitives of that name, the latest first."""
        return self._entries.get(name, ())


# -- flows

# A function of (liveness, eqn, out) that returns for each input True if it is live.
Flow = Callable[["Liveness", Any, tuple[bool, ...]], Sequence[bool]]
_FLOWS = Registry()


def register_flow(*primitives: Any) -> Callable[[Flow], Flow]:
    """Registers, as a decorator, a primitive's live inputs, given its outputs.

    By default all inputs are live if any output is. That is always correct, but may
    count a use of a table that is not differentiated.

    Args:
      *primitives: primitive objects, or their names. The function is called as
        `flow(liveness, eqn, out)`, with a bool for each output, and returns a bool for
        each input; `liveness.inputs(jaxpr, out)` does the same for a nested jaxpr.

    Returns:
      A decorator that returns the function unchanged.

    Example:
      >>> import sparsejax as sj
      >>> @sj.extend.register_flow("my_masked_lookup")
      ... def only_the_table(liveness, eqn, out):
      ...     return (any(out), False)
    """

    def register(flow: Flow) -> Flow:
        for primitive in primitives:
            _FLOWS.add(primitive, flow)
        return flow

    return register


# -- the analysis


class Liveness:
    """The live variables, cached, of all jaxprs of one traced program."""

    def __init__(self):
        self._known: dict[Any, tuple[Any, set[Any]]] = {}

    def variables(self, jaxpr: Any, out: Sequence[bool]) -> set[Any]:
        """Returns the live variables of `jaxpr`, given a bool for each output."""
        key = id(jaxpr), tuple(out)
        if key not in self._known:
            # The jaxpr is kept, so that no other jaxpr can reuse its id.
            self._known[key] = jaxpr, self._walk(jaxpr, out)
        return self._known[key][1]

    def inputs(self, jaxpr: Any, out: Sequence[bool]) -> tuple[bool, ...]:
        """Returns True for each input of `jaxpr` that is live."""
        live = self.variables(jaxpr, out)
        return tuple(v in live for v in jaxpr.invars)

    def _walk(self, jaxpr: Any, out: Sequence[bool]) -> set[Any]:
        pairs = zip(jaxpr.outvars, out)
        live = {v for v, is_live in pairs if is_live and _can_be_live(v)}
        for eqn in reversed(jaxpr.eqns):
            outs = tuple(v in live for v in eqn.outvars)
            if any(_compat.is_ref_type(v.aval) for v in (*eqn.invars, *eqn.outvars)):
                outs = (True,) * len(outs)  # later equations may read the reference
            elif not any(outs):
                continue
            flows = _FLOWS.find(eqn.primitive.name)
            ins = flows[0](self, eqn, outs) if flows else (True,) * len(eqn.invars)
            pairs = zip(eqn.invars, ins)
            live |= {v for v, is_live in pairs if is_live and _can_be_live(v)}
        return live


def _can_be_live(v: Any) -> bool:
    if isinstance(v, _compat.Literal):
        return False
    dtype = getattr(v.aval, "dtype", None)
    return dtype is None or jnp.issubdtype(dtype, jnp.inexact)
