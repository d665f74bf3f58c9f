"""Compares the programs of an update for different numbers of rows.

Both are traced from the same function, so they have the same equations in the same
order, unless the function looks at the number of rows. An axis that differs in length
is an axis of rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax import _compat, _primitives
from sparsejax.optim._lazy.row_program import REDUCTIONS, NotByRows, row_params


BY_NUMBER = (
    "what it computes depends on the number of rows; in place of a function that "
    "decides by shape, pass the tree that it returns: mask=mask_fn(params)"
)


def key_of(path: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(id, path))


def differences(
    a: Any,
    b: Any,
    over_rows: set[Any] | None = None,
    path: tuple[Any, ...] = (),
    *,
    is_exact: bool = True,
) -> Iterator[NotByRows]:
    """Returns where two programs differ in more than their number of rows.

    Args:
      a, b: programs of the same arguments, as `(open jaxpr, consts)`; `a` has fewer
        rows, and one axis of rows.
      over_rows: gets the keys of the equations that reduce rows.
      path: the equations that call the programs.
      is_exact: False accepts integers and sizes that differ, as in a loop over rows.
    """
    (a, a_consts), (b, b_consts) = a, b
    same = dict(zip((*a.constvars, *a.invars), (*b.constvars, *b.invars)))

    def is_same(v, w):
        if not isinstance(v, _compat.Literal):
            return same.get(v) is w
        return isinstance(w, _compat.Literal)

    def are_same(vs, ws):
        return len(vs) == len(ws) and all(map(is_same, vs, ws))

    if is_exact and not all(map(_equal, a_consts, b_consts)):
        why = "it holds an array that depends on the number of rows"
        yield NotByRows(why, path)
    for k, eqn in enumerate(max(a.eqns, b.eqns, key=len)):
        if k >= min(len(a.eqns), len(b.eqns)):
            yield NotByRows(BY_NUMBER, (*path, eqn))
            return
        x, y = a.eqns[k], b.eqns[k]
        here, inner, others = (*path, x), _bodies(x), _bodies(y)
        if (
            x.primitive is not y.primitive
            or len(x.outvars) != len(y.outvars)
            or len(inner) != len(others)
            or not are_same(x.invars, y.invars)
        ):
            yield NotByRows(BY_NUMBER, (*path, eqn))
            return
        same.update(zip(x.outvars, y.outvars))
        for body, other in zip(inner, others):
            yield from differences(body, other, over_rows, here, is_exact=is_exact)
        why = _difference(x, y, inner, is_exact)
        if why is not None:
            yield NotByRows(why, here)
        elif over_rows is not None and x.primitive.name in REDUCTIONS:
            if _axes(x.invars[0], y.invars[0]) and not _axes(
                x.outvars[0], y.outvars[0]
            ):
                over_rows.add(key_of(here))
    if not are_same(a.outvars, b.outvars):
        yield NotByRows(BY_NUMBER, path)


def _difference(a: Any, b: Any, bodies: Sequence[Any], is_exact: bool) -> str | None:
    """Explains why an equation differs in more than its number of rows, or None."""
    name = a.primitive.name
    for v, w in zip(a.invars, b.invars):
        if isinstance(v, _compat.Literal) and not _equal(v.val, w.val):
            if is_exact or type(np.asarray(v.val).item()) is not int:
                return f"{name} by a number that depends on the number of rows"
    if bodies or not is_exact:
        return None
    rows = [_axes(v, w) for v, w in zip(a.invars, b.invars)]
    outs = [_axes(v, w) for v, w in zip(a.outvars, b.outvars)]
    count = max((k for k in (*rows, *outs) if k is not None), default=0)
    if None in (*rows, *outs):
        return f"{name} of rows in another axis than the first"
    if not count:
        same = _same_params(a.params, b.params)
        return None if same else f"{name} that depends on the number of rows"
    if not any(outs):
        return None  # a reduction, which `row_program` knows or refuses
    if not any(rows) and name != "broadcast_in_dim":
        return f"{name} of a number for each row"
    has_rows = [bool(k) for k in rows]
    one = row_params(a, has_rows)
    many = row_params(b, has_rows, count)
    if one is None or many is None or _same_params(one, many):
        return None  # None is refused by `row_program`
    return f"{name} that depends on the number of rows"


def _axes(v: Any, w: Any) -> int | None:
    """Counts the axes over rows, from a value's types in both programs."""
    a, b = v.aval.shape, w.aval.shape
    if a == b:
        return 0
    count = 1 + len(b) - len(a)
    return count if count in (1, 2) and a[1:] == b[count:] else None


def _bodies(eqn: Any) -> list[tuple[Any, list[Any]]]:
    """Returns the programs among the parameters of an equation."""
    bodies = []
    for value in eqn.params.values():
        values = value if isinstance(value, (tuple, list)) else (value,)
        bodies += [_compat.open_jaxpr(x) for x in values if hasattr(x, "eqns")]
    return bodies


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


def _same_params(a: Any, b: Any) -> bool:
    """Returns True if parameters are equal, as far as functions can be compared."""
    return a.keys() == b.keys() and all(
        key == "sharding"
        or callable(x)
        and not hasattr(x, "eqns")
        or str(x) == str(b[key])
        for key, x in a.items()
    )


def reached(
    jaxpr: Any, inputs: Iterable[bool], placeholders: Iterator[bool]
) -> list[bool]:
    """Returns, for each output of a program, True if a marked value reaches it.

    Booleans pass nothing on.

    Args:
      jaxpr: an open jaxpr.
      inputs: which of its arguments are marked.
      placeholders: which of its placeholders are marked.
    """
    marked = dict(zip(jaxpr.invars, inputs))
    read = lambda v: not isinstance(v, _compat.Literal) and marked.get(v, False)
    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        body = _primitives.called(eqn)
        if eqn.primitive.name == "placeholder":
            outs = [next(placeholders)]
        elif body is not None:
            outs = reached(body[0], ins, placeholders)
        elif eqn.primitive.name == "cond" and not ins[0]:
            bodies = [_compat.open_jaxpr(x)[0] for x in eqn.params["branches"]]
            outs = map(any, zip(*(reached(x, ins[1:], placeholders) for x in bodies)))
        else:
            outs = [any(ins)] * len(eqn.outvars)
        for v, is_marked in zip(eqn.outvars, outs):
            marked[v] = is_marked and v.aval.dtype != bool
    return [read(v) for v in jaxpr.outvars]
