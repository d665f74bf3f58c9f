"""Compares the programs of an update for different numbers of rows.

Both are traced from the same function, so they have the same equations in the same
order, unless the function looks at the number of rows. An axis that differs in length
is an axis of rows.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax import _compat
from sparsejax.optim._lazy.row_program import NotByRows


BY_NUMBER = (
    "what it computes depends on the number of rows; in place of a function that "
    "decides by shape, pass the tree that it returns: mask=mask_fn(params)"
)


def pairs(
    a: Any, b: Any, path: tuple[Any, ...] = (), *, is_exact: bool = True
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the equations of two programs in pairs, and those inside of them.

    Args:
      a, b: programs of the same arguments, as `(open jaxpr, consts)`.
      path: the equations that call the programs.
      is_exact: False accepts constants that differ.

    Yields:
      An equation of `a`, after the equations that call its program; and one of `b`.

    Raises:
      NotByRows: the programs do not have the same equations.
    """
    (a, a_consts), (b, b_consts) = a, b
    same = dict(zip((*a.constvars, *a.invars), (*b.constvars, *b.invars)))

    def are_same(vs, ws):
        is_same = lambda v, w: (
            isinstance(w, _compat.Literal)
            if isinstance(v, _compat.Literal)
            else same.get(v) is w
        )
        return len(vs) == len(ws) and all(map(is_same, vs, ws))

    if is_exact and not all(map(_equal, a_consts, b_consts)):
        raise NotByRows("it holds an array that depends on the number of rows", path)
    for x, y in zip(a.eqns, b.eqns):
        here, inner, others = (*path, x), _bodies(x), _bodies(y)
        if (
            x.primitive is not y.primitive
            or len(x.outvars) != len(y.outvars)
            or len(inner) != len(others)
            or not are_same(x.invars, y.invars)
        ):
            longer = x if len(a.eqns) >= len(b.eqns) else y
            raise NotByRows(BY_NUMBER, (*path, longer))
        same.update(zip(x.outvars, y.outvars))
        for body, other in zip(inner, others):
            yield from pairs(body, other, here, is_exact=is_exact)
        yield here, y
    more = max(a.eqns, b.eqns, key=len)[min(len(a.eqns), len(b.eqns)) :]
    if more or not are_same(a.outvars, b.outvars):
        raise NotByRows(BY_NUMBER, (*path, *more[:1]))


def are_equal(a: Any, b: Any) -> bool:
    """Returns True if two programs do the same."""
    try:
        return all(
            differing_number(path[-1], eqn) is None
            and same_params(path[-1].params, eqn.params)
            for path, eqn in pairs(a, b)
        )
    except NotByRows:
        return False


def _bodies(eqn: Any) -> list[tuple[Any, list[Any]]]:
    """Returns the programs among the parameters of an equation."""
    bodies = []
    for value in eqn.params.values():
        values = value if isinstance(value, (tuple, list)) else (value,)
        bodies += [_compat.open_jaxpr(x) for x in values if hasattr(x, "eqns")]
    return bodies


def differing_number(a: Any, b: Any, is_exact: bool = True) -> str | None:
    """Returns the fault of equations with other numbers; integers only `is_exact`."""
    for v, w in zip(a.invars, b.invars):
        if isinstance(v, _compat.Literal) and not _equal(v.val, w.val):
            if is_exact or type(np.asarray(v.val).item()) is not int:
                return (
                    f"{a.primitive.name} by a number that depends on the number of rows"
                )
    return None


def same_params(a: Any, b: Any) -> bool:
    """Returns True if parameters are equal, as far as functions can be compared."""
    return a.keys() == b.keys() and all(
        key == "sharding"
        or callable(x)
        and not hasattr(x, "eqns")
        or str(x) == str(b[key])
        for key, x in a.items()
    )


def row_axes(v: Any, w: Any) -> int | None:
    """Counts the axes over rows, from a value's types in both programs."""
    a, b = v.aval.shape, w.aval.shape
    if a == b:
        return 0
    count = 1 + len(b) - len(a)
    return count if count in (1, 2) and a[1:] == b[count:] else None


def _equal(x: Any, y: Any) -> bool:
    """Returns True if two constants are equal."""
    if x is y:
        return True
    if isinstance(x, Tracer) or isinstance(y, Tracer):
        return False
    if jnp.issubdtype(getattr(x, "dtype", type(x)), jax.dtypes.extended):
        return False
    x, y = np.asarray(x), np.asarray(y)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
