"""Equations that come again, as those of a model's layers do, are differentiated once.

JAX remembers the derivative of a nested `jit`, and most functions of jax.numpy are one.
So it differentiates twelve like layers at hardly more than the cost of one. A jaxpr has
the equations of such functions inlined, and each of them would be differentiated anew.
The walk therefore binds an equation as a nested `jit`, which is inlined again. What is
computed is the same, and is traced sooner.

Only where an equation is differentiated and the result is staged: outside of a `jit`
JAX would run each nested one as a compiled program of its own. And from the first time
on, since a program must not depend on what was traced before it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sparsejax import _compat


# By what an equation computes, the parameters of its nested `jit`, or None if it cannot
# be one. As with JAX's own, calls and threads share them. They hold no arrays.
_nested: dict[Any, dict[str, Any] | None] = {}
_MOST = 4096  # then all are forgotten; a large model has some hundred


def bind(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Runs one equation on other inputs, as `_compat.bind` does."""
    params = None
    if any(map(_compat.is_staged_derivative, inputs)) and _is_plain(eqn):
        params = _params(eqn)
    if params is None:
        return _compat.bind(eqn, inputs)
    variables = {
        v: x for v, x in zip(eqn.invars, inputs) if not isinstance(v, _compat.Literal)
    }
    return _compat.primitives.jit_p.bind(*variables.values(), **params)


def _params(eqn: Any) -> dict[str, Any] | None:
    """The parameters of the equation's nested `jit`."""
    key = _what_it_computes(eqn)
    try:
        is_new = key not in _nested
    except TypeError:  # up to jax 0.8 parameters need no hash
        return None
    if not is_new:
        return _nested.get(key)
    if len(_nested) >= _MOST:
        _nested.clear()
    params = _nested[key] = _compat.nested(eqn)
    return params


def _what_it_computes(eqn: Any) -> Any:
    """Alike for equations that compute the same of inputs of the same types."""
    numbers: dict[Any, int] = {}
    inputs = [
        (type(v.val), np.asarray(v.val).tobytes(), v.aval)
        if isinstance(v, _compat.Literal)
        else (numbers.setdefault(v, len(numbers)), v.aval)
        for v in eqn.invars
    ]
    params = [(name, _exactly(value)) for name, value in eqn.params.items()]
    outputs = [v.aval for v in eqn.outvars]
    context = eqn.ctx, _compat.get_concrete_mesh()
    return eqn.primitive, tuple(inputs), tuple(params), tuple(outputs), context


def _exactly(param: Any) -> Any:
    """A key of a parameter, other for numbers that Python says are equal: 0.0, -0.0."""
    if isinstance(param, (tuple, list)):
        return type(param), tuple(map(_exactly, param))
    if isinstance(param, (int, float, complex, np.generic)):
        return type(param), repr(param)
    return param


def _is_plain(eqn: Any) -> bool:
    """Whether an equation has no effects, no arrays as literals, and no programs."""
    if eqn.effects or any(map(_is_program, eqn.params.values())):
        return False
    return not any(
        isinstance(v, _compat.Literal)
        and (isinstance(v.val, jax.Array) or np.ndim(v.val))
        for v in eqn.invars
    )


def _is_program(param: Any) -> bool:
    """Whether a parameter is or has a program or a function, which may hold arrays.

    A type is neither: a dtype may be given as one.
    """
    if isinstance(param, (tuple, list)):
        return any(map(_is_program, param))
    if isinstance(param, type) or param is None:
        return False
    return callable(param) or hasattr(param, "jaxpr") or hasattr(param, "eqns")
