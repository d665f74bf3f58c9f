"""Facts about the values of a traced step: rows, sources, and known numbers.

Two traces of the same function, for one row and for several, are walked at once. An
axis that differs between them is an axis of rows, and an equation that differs in
another way depends on the number of rows. See `judge`, which explains what is refused.

The known numbers are those of two kinds of rows: a row *at rest*, which has no
gradient and any weights and state, and an *empty* slot of a gradient, which looks like
a row that was never touched. Zero times an unknown number is zero, so that Adam's step
of an empty slot is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax import _compat, _primitives
from sparsejax.optim._lazy import parts
from sparsejax.optim._lazy.parts import Part, Reason
from sparsejax.optim._lazy.primitives import REDUCTIONS, row_params


class Same(NamedTuple):
    """The value that a leaf of the state had before the step."""

    leaf: int
    dtype: Any


class Fact(NamedTuple):
    """The facts about a value of the program.

    Attributes:
      rows: True if it has one entry per row.
      table: the table whose rows these are; None if all rows have the same entry.
      sources: kinds of arguments that its rows were computed from: "gradient",
        "weights", "state", or "update" for the result of an earlier part of a chain.
      at_rest: the known number in a row without a gradient, whatever its weights and
        state are, or `Same`, or None.
      empty: the known number in an empty slot, or None.
      sign: 1 if it is known not to be negative, -1 if not positive, else 0.
      partial: the tables that it depends on by a reduction over only the rows read.
      tables: all tables that it was computed from, for messages.
      part: the part of the transformation that computed it, None for an argument.
    """

    rows: bool = False
    table: int | None = None
    sources: frozenset[str] = frozenset()
    at_rest: Any = None
    empty: Any = None
    sign: int = 0
    partial: frozenset[int] = frozenset()
    tables: frozenset[int] = frozenset()
    part: tuple[Part, ...] | None = None


def argument(kind: str, table: int, at_rest: Any, empty: Any) -> Fact:
    """A fact about rows of a table among the arguments."""
    own = frozenset([table])
    return Fact(True, table, frozenset([kind]), at_rest, empty, tables=own)


class _Refused(Exception):
    """Raised at an equation that cannot be lifted.

    Args:
      why: the fault.
      tables: the tables that it concerns; empty if these are not known.
      is_proved: False if the equation may be row by row, but is not known to be.
    """

    def __init__(
        self, why: str, tables: frozenset[int] = frozenset(), is_proved: bool = True
    ):
        super().__init__(why)
        self.why, self.tables, self.is_proved = why, tables, is_proved


class RefusedForAll(Exception):
    """Raised if a reason to refuse cannot be attributed to a table."""

    def __init__(self, reason: Reason):
        super().__init__(str(reason))
        self.reason = reason


# ------------------------------------------------------------------ the program

DEPENDS = (
    "what it computes depends on the number of rows; in place of a function that "
    "decides by shape, pass the tree that it returns"
)


def difference(
    tx: Any,
    a: Any,
    b: Any,
    numbers: bool = False,
    part: tuple[Part, ...] = (),
    line: str = "",
) -> Reason | None:
    """Why two programs differ in more than their sizes, or None.

    Args:
      tx: the transformation.
      a, b: programs of the same arguments, as `(open jaxpr, consts)`.
      numbers: True compares the numbers in them too, except integers, which may be
        sizes.
      part: the part of the transformation that calls them.
      line: of the call, for equations without one.
    """

    def depends(part, line):
        return parts.reason(DEPENDS, part or (parts.innermost((), tx),), line)

    (a, _), (b, _) = a, b
    same = dict(zip((*a.constvars, *a.invars), (*b.constvars, *b.invars)))

    def is_same(v, w):
        if not isinstance(v, _compat.Literal):
            return same.get(v) is w
        if not isinstance(w, _compat.Literal):
            return False
        is_size = type(np.asarray(v.val).item()) is int
        return not numbers or is_size or _equal(v.val, w.val)

    def are_same(vs, ws):
        return len(vs) == len(ws) and all(map(is_same, vs, ws))

    longer = max(a, b, key=lambda j: len(j.eqns)).eqns
    for k, eqn in enumerate(longer):
        own, where = parts.of_equation(eqn, part), parts.line_of(eqn, part, line)
        if k >= min(len(a.eqns), len(b.eqns)):
            return depends(own, where)
        x, y = a.eqns[k], b.eqns[k]
        inner, others = _bodies(x), _bodies(y)
        if (
            x.primitive.name != y.primitive.name
            or len(x.outvars) != len(y.outvars)
            or len(inner) != len(others)
            or not are_same(x.invars, y.invars)
        ):
            return depends(own, where)
        for body, other in zip(inner, others):
            found = difference(tx, body, other, numbers, own, where)
            if found is not None:
                return found
        same.update(zip(x.outvars, y.outvars))
    if not are_same(a.outvars, b.outvars):
        return depends(part, line)
    return None


def _bodies(eqn: Any) -> list[tuple[Any, list[Any]]]:
    """The programs among the parameters of an equation."""
    found = []
    for value in eqn.params.values():
        values = value if isinstance(value, (tuple, list)) else (value,)
        found += [_compat.open_jaxpr(x) for x in values if hasattr(x, "eqns")]
    return found


class Walk:
    """Walks both traces of a program at once.

    Args:
      rows: the axes of rows of tables in the second trace.
    """

    def __init__(self, rows: frozenset[tuple[int, ...]]):
        self.rows = rows
        self.refused: dict[int, Reason] = {}

    def program(
        self,
        one: Any,
        many: Any,
        facts: Sequence[Fact],
        part: tuple[Part, ...] = (),
        line: str = "",
    ) -> list[Fact]:
        """Facts about the outputs of a program, from those about its arguments.

        Both traces have the same equations, see `difference`.

        Args:
          one: the program for one row, as `(open jaxpr, consts)`.
          many: the program for many rows.
          facts: about its arguments.
          part: the part of the transformation that calls it.
          line: of the call, for equations without one.
        """
        (jaxpr, consts), (other, other_consts) = one, many
        env = dict(zip(jaxpr.invars, facts))
        for v, x, y in zip(jaxpr.constvars, consts, other_consts):
            if not _equal(x, y):
                why = "it holds an array that depends on the number of rows"
                raise RefusedForAll(Reason(why, parts.innermost(part).name))
            env[v] = _constant(x)

        def read(v):
            return _constant(v.val) if isinstance(v, _compat.Literal) else env[v]

        for a, b in zip(jaxpr.eqns, other.eqns):
            env.update(
                zip(a.outvars, self._step(a, b, [*map(read, a.invars)], part, line))
            )
        return [read(v) for v in jaxpr.outvars]

    def _step(self, a, b, ins, part, line):
        """Facts about the outputs of an equation."""
        part = parts.of_equation(a, part)
        line = parts.line_of(a, part, line)
        name = a.primitive.name
        body = _primitives.called(a)
        if body is not None:
            return self.program(body, _primitives.called(b), ins, part, line)
        try:
            if name == "cond":
                return self._cond(a, b, ins, part, line)
            return _fact(a, b, ins, part, self.rows)
        except _Refused as refused:
            reason = parts.reason(refused.why, part, line, refused.is_proved)
            own = frozenset(f.table for f in ins if f.rows and f.table is not None)
            tables = refused.tables or own or _union(f.tables for f in ins)
            if not tables:
                raise RefusedForAll(reason) from None
            for t in tables:
                self.refused.setdefault(t, reason)
            # Equations that use the result have no other fault to report.
            has_rows = [v.aval.shape != w.aval.shape for v, w in _outs(a, b)]
            table = min(tables)
            return [Fact(r, table if r else None, tables=tables) for r in has_rows]

    def _cond(self, a, b, ins, part, line):
        index, *ins = ins
        branches = zip(a.params["branches"], b.params["branches"])
        found = [
            self.program(_compat.open_jaxpr(x), _compat.open_jaxpr(y), ins, part, line)
            for x, y in branches
        ]
        outs = []
        for k, (v, facts) in enumerate(zip(a.outvars, zip(*found))):
            known = _select(index.at_rest, [f.at_rest for f in facts])
            empty = _select(index.empty, [f.empty for f in facts])
            first = max(facts, key=lambda f: f.table is not None)
            own = {f.table for f in facts} - {None}
            if len(own) > 1:
                raise _Refused("cond of rows of two tables", frozenset(own))
            outs.append(
                Fact(
                    first.rows,
                    first.table,
                    _union(f.sources for f in facts),
                    known,
                    empty,
                    _common_sign(facts),
                    _union(f.partial for f in facts),
                    _union(f.tables for f in facts),
                    first.part,
                )
            )
        return outs


def _outs(a, b):
    return list(zip(a.outvars, b.outvars))


def _union(sets: Any) -> frozenset:
    return frozenset().union(*sets)


def _fact(a, b, ins, part, axes) -> list[Fact]:
    """Facts about the outputs of an equation without a program in it."""
    primitive = a.primitive.name
    for v, w in zip(a.invars, b.invars):
        if isinstance(v, _compat.Literal) and not _equal(v.val, w.val):
            raise _Refused(
                f"{primitive} by a number that depends on the number of rows"
            )
    shapes = [_rows_of(v, w, axes) for v, w in _outs(a, b)]
    count = max(shapes, default=0)
    partial, tables = _union(f.partial for f in ins), _union(f.tables for f in ins)
    if not count and not any(f.rows for f in ins):
        if not _same_params(a.params, b.params):
            raise _Refused(f"{primitive} that depends on the number of rows")
        return [
            Fact(
                at_rest=value,
                empty=value,
                sign=_sign(a, ins, value),
                partial=frozenset() if v.aval.dtype == bool else partial,
                tables=tables,
                part=part,
            )
            for v in a.outvars
            for value in [_value(a, [f.at_rest for f in ins], ins)]
        ]
    # A result of another part of the chain is an update here.
    ins = [_received(f, part) for f in ins]
    own = {f.table for f in ins if f.rows and f.table is not None}
    if len(own) > 1:
        raise _Refused(f"{primitive} of rows of two tables", frozenset(own))
    (table,) = own or {None}
    if not count:
        return [_reduced(a, ins[0], table, part)]
    rows = [f.rows for f in ins]
    if not all(shapes):
        raise _Refused(f"{primitive} of rows", is_proved=False)
    if not any(rows) and primitive != "broadcast_in_dim":
        raise _Refused(f"{primitive} of a number for each row")
    one, many = row_params(a, rows), row_params(b, rows, count)
    if one is None or many is None:
        raise _Refused(f"{primitive} of rows", is_proved=False)
    if not _same_params(one, many):
        raise _Refused(f"{primitive} that depends on the number of rows")
    at_rest = _value(a, [f.at_rest for f in ins], ins)
    empty = _value(a, [f.empty for f in ins], ins)
    return [
        Fact(
            True,
            table,
            _union(f.sources for f in ins),
            at_rest,
            empty,
            _sign(a, ins, at_rest),
            partial,
            tables,
            part,
        )
    ] * len(a.outvars)


def _rows_of(v: Any, w: Any, axes: frozenset[tuple[int, ...]]) -> int:
    """The number of axes that run over rows, from a value's types in both traces."""
    a, b = v.aval.shape, w.aval.shape
    if a == b:
        return 0
    for first in axes:
        if a[:1] == (1,) and b == (*first, *a[1:]):
            return len(first)
    raise _Refused("rows in another axis than the first")


def _received(fact: Fact, part: tuple[Part, ...]) -> Fact:
    """A value in a part: if a part beside it computed the value, it is an update."""
    if not fact.part or not fact.sources & {"weights", "state"}:
        return fact
    n = min(len(fact.part), len(part))
    if fact.part[:n] == part[:n]:  # the same part, or one that holds the other
        return fact
    return fact._replace(sources=frozenset(["update"]))


def _reduced(eqn: Any, fact: Fact, table: int | None, part: tuple[Part, ...]) -> Fact:
    """The facts about a reduction over all rows."""
    kind = eqn.primitive.name
    if kind not in REDUCTIONS:
        raise _Refused(f"{kind} over all rows", is_proved=False)
    is_bool = eqn.outvars[0].aval.dtype == bool

    def adds_nothing(value):
        if kind in ("reduce_max", "reduce_min"):
            return kind == "reduce_max" and is_number(value, 0) and fact.sign > 0
        return is_number(value, _NEUTRAL[kind])

    partial = fact.partial
    if not adds_nothing(fact.at_rest):
        if table is None:
            raise _Refused(f"{kind} that counts the rows of a table")
        if "weights" in fact.sources:
            raise _Refused(f"{kind} of weights over all rows, even those not read")
        if is_bool:
            partial = frozenset()
        elif "state" in fact.sources:
            raise _Refused(f"{kind} of state over all rows, even those not read")
        elif not adds_nothing(fact.empty):
            raise _Refused(
                f"{kind} of updates over all rows, after a part that moves rows that "
                "were never read"
            )
        else:
            partial |= {table}
    if is_bool:
        partial = frozenset()
    own = frozenset() if table is None else frozenset([table])
    return Fact(sign=fact.sign, partial=partial, tables=fact.tables | own, part=part)


_NEUTRAL = {"reduce_sum": 0, "reduce_prod": 1, "reduce_and": True, "reduce_or": False}


# ------------------------------------------------------------------ known numbers


def _constant(x: Any) -> Fact:
    """A constant of the program."""
    value = None
    if np.ndim(x) == 0 and not isinstance(x, Tracer):
        if not jnp.issubdtype(getattr(x, "dtype", type(x)), jax.dtypes.extended):
            value = np.asarray(x).item()
    return Fact(at_rest=value, empty=value, sign=_sign_of(value))


def _known(x: Any) -> bool:
    return isinstance(x, (bool, int, float))


def is_number(x: Any, number: Any) -> bool:
    return _known(x) and x == number


def _select(index: Any, values: Sequence[Any]) -> Any:
    if _known(index):
        return values[int(index)]
    first = values[0]
    return first if all(x == first for x in values) else None


_AS_IT_IS = frozenset(
    "copy copy_p stop_gradient broadcast_in_dim reshape squeeze transpose slice rev "
    "sort split concatenate reduce_max reduce_min reduce_and reduce_or cummax "
    "cummin".split()
)
_ZERO_AT_ZERO = frozenset(
    "abs neg sign sqrt cbrt square sin sinh tan tanh expm1 log1p floor ceil round erf "
    "reduce_sum cumsum reduce_precision".split()
)
_OF_NUMBERS: Mapping[str, Callable] = {
    "add": lambda x, y: x + y,
    "add_any": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "max": max,
    "min": min,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "and": lambda x, y: x and y,
    "or": lambda x, y: x or y,
    "not": lambda x: not x,
    "is_finite": np.isfinite,
    "clamp": lambda low, x, high: min(max(low, x), high),
}


def _value(eqn: Any, xs: Sequence[Any], ins: Sequence[Fact]) -> Any:
    """The result of an equation on known numbers, `Same`, or None for unknown."""
    name, params = eqn.primitive.name, eqn.params
    if name == "convert_element_type":
        return _converted(xs[0], params["new_dtype"])
    if name == "select_n":
        return _select(xs[0], xs[1:])
    if name in _AS_IT_IS:
        value = _select(None, xs) if xs else None
        # A row of state that is reversed or sorted is not the row that it was.
        moves = isinstance(value, Same) and name not in _KEEPS_STATE
        return None if moves else value
    if name == "dot_general":
        return 0 if is_number(xs[0], 0) else None
    if name == "integer_pow":
        return 0 if is_number(xs[0], 0) and params["y"] > 0 else None
    if name in _ZERO_AT_ZERO and is_number(xs[0], 0):
        return xs[0]
    if all(map(_known, xs)) and name in _OF_NUMBERS:
        if name == "not" and not isinstance(xs[0], bool):
            return None
        result = _OF_NUMBERS[name](*xs)
        return bool(result) if isinstance(result, np.bool_) else result
    if len(xs) != 2:
        return None
    x, y = xs
    if name == "mul":
        if is_number(x, 0) or is_number(y, 0):
            return 0
        return y if is_number(x, 1) else x if is_number(y, 1) else None
    if name == "div":
        return 0 if is_number(x, 0) and not is_number(y, 0) else None
    if name in ("add", "add_any"):
        return y if is_number(x, 0) else x if is_number(y, 0) else None
    if name == "sub":
        return x if is_number(y, 0) else None
    if name == "and":
        return False if x is False or y is False else None
    if name == "or":
        return True if x is True or y is True else None
    if name in ("max", "min"):
        if isinstance(x, Same) and x == y:
            return x
        bound = -1 if name == "max" else 1  # a sign that leaves zero as it is
        for value, other in ((x, ins[1]), (y, ins[0])):
            if is_number(value, 0) and other.sign == bound:
                return value
    return None


def _converted(x: Any, dtype: Any) -> Any:
    if isinstance(x, Same):  # a cast to a dtype that lacks some values loses them
        return x if jnp.promote_types(x.dtype, dtype) == dtype else None
    if dtype.kind == "b" and _known(x):
        return bool(x)
    return x


# Operations that leave the entries of a row in their places.
_KEEPS_STATE = frozenset(
    "copy copy_p stop_gradient broadcast_in_dim reshape squeeze".split()
)
_POSITIVE = frozenset("abs square sqrt exp exp2 logistic".split())
_KEEPS_SIGN = frozenset(
    "add add_any max min clamp broadcast_in_dim reshape squeeze transpose slice copy "
    "copy_p convert_element_type reduce_sum reduce_max reduce_min stop_gradient "
    "reduce_precision select_n".split()
)


def _sign(eqn: Any, ins: Sequence[Fact], value: Any) -> int:
    """The sign of an equation's result, see `Fact.sign`."""
    name, params = eqn.primitive.name, eqn.params
    if _known(value):
        return _sign_of(value)
    if name in _POSITIVE or (name == "integer_pow" and params["y"] % 2 == 0):
        return 1
    if name == "pow":  # of a negative number it is NaN
        y = ins[1].at_rest
        return int(_known(y) and y != int(y))
    if name == "mul" and eqn.invars[0] is eqn.invars[1]:
        return 1
    if name in ("mul", "div"):
        return ins[0].sign * ins[1].sign
    if name == "neg":
        return -ins[0].sign
    if name == "max" and any(f.sign > 0 for f in ins):
        return 1
    if name == "select_n":
        ins = ins[1:]
    return _common_sign(ins) if name in _KEEPS_SIGN else 0


def _sign_of(value: Any) -> int:
    return 0 if not _known(value) else 1 if value >= 0 else -1


def _common_sign(facts: Sequence[Fact]) -> int:
    signs = {f.sign for f in facts}
    return signs.pop() if len(signs) == 1 else 0


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


def _same_params(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Returns True if parameters are equal, as far as functions can be compared."""
    if a.keys() != b.keys():
        return False
    for key, x in a.items():
        if key == "sharding" or callable(x) and not hasattr(x, "eqns"):
            continue
        if str(x) != str(b[key]):
            return False
    return True
