"""Equations that come again, as those of a model's layers do, are differentiated once.

JAX remembers the derivative of a nested `jit`, and most functions of jax.numpy are one.
So it differentiates twelve like layers at hardly more than the cost of one. A jaxpr has
the equations of such functions inlined, and each of them would be differentiated anew.
The walk therefore binds an equation that was met before as a nested `jit`, which is
inlined again: the program is the same, and is traced sooner.

Only where an equation is differentiated and the result is staged: outside of a `jit`
JAX would run each nested one as a compiled program of its own.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sparsejax import _compat


# By what an equation computes: None if it was met once, or cannot be a nested `jit`;
# later the parameters of that. As with JAX's own, calls and threads share them.
_nested: dict[Any, dict[str, Any] | None] = {}
_MOST = 4096  # then all are forgotten; a large model has some hundred


def bind(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Runs one equation on other inputs, as `_compat.bind` does."""
    params = None
    if any(map(_compat.is_staged_derivative, inputs)) and _has_numbers_only(eqn):
        params = _params(eqn)
    if params is None:
        return _compat.bind(eqn, inputs)
    variables = {
        v: x for v, x in zip(eqn.invars, inputs) if not isinstance(v, _compat.Literal)
    }
    return _compat.primitives.jit_p.bind(*variables.values(), **params)


def _params(eqn: Any) -> dict[str, Any] | None:
    """The parameters of a nested `jit` of the equation, if it was met before."""
    key = _what_it_computes(eqn)
    try:
        is_new = key not in _nested
    except TypeError:  # up to jax 0.8 parameters need no hash
        return None
    if is_new:
        if len(_nested) >= _MOST:
            _nested.clear()
        _nested[key] = None
        return None
    params = _nested.get(key)
    if params is None and not _has_more(eqn):
        params = _nested[key] = _compat.nested(eqn)
    return params


def _has_numbers_only(eqn: Any) -> bool:
    """Whether no literal of an equation is an array, which it would be hard to know."""
    return not any(
        isinstance(v, _compat.Literal)
        and (isinstance(v.val, jax.Array) or v.aval.shape)
        for v in eqn.invars
    )


def _what_it_computes(eqn: Any) -> Any:
    """Alike for equations that compute the same of inputs of the same types."""
    numbers: dict[Any, int] = {}
    inputs = [
        (type(v.val), np.asarray(v.val).tobytes(), v.aval)
        if isinstance(v, _compat.Literal)
        else (numbers.setdefault(v, len(numbers)), v.aval)
        for v in eqn.invars
    ]
    context = eqn.ctx, _compat.get_concrete_mesh()
    return eqn.primitive, tuple(inputs), tuple(eqn.params.items()), context


def _has_more(eqn: Any) -> bool:
    """Whether an equation has effects, or programs or functions as parameters."""
    return bool(eqn.effects) or any(map(_is_program, eqn.params.values()))


def _is_program(param: Any) -> bool:
    if isinstance(param, (tuple, list)):
        return any(map(_is_program, param))
    return callable(param) or hasattr(param, "jaxpr") or hasattr(param, "eqns")
