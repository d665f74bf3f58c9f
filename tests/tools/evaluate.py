"""Evaluates a jaxpr operation by operation, with NumPy if it can, else with XLA.

To compile a program takes a hundred times as long as to trace it. Here XLA compiles
single operations only, each once for all programs; loops and branches are Python's.
"""

# pyright: reportAttributeAccessIssue=false

import numpy as np

from sparsejax import _compat
from sparsejax._compat import primitives as p


def evaluate(jaxpr, args):
    """The values that a jaxpr, open or closed, returns for `args`."""
    jaxpr, consts = _compat.open_jaxpr(jaxpr)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def value(v):
        is_literal = isinstance(v, _compat.Literal)
        return np.asarray(v.val, v.aval.dtype) if is_literal else env[v]

    for eqn in _needed(jaxpr):
        out = _apply(eqn, [value(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, out, strict=True))
    return [value(v) for v in jaxpr.outvars]


def _needed(jaxpr):
    """The equations that the results depend on."""
    used = {v for v in jaxpr.outvars if not isinstance(v, _compat.Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if not used.isdisjoint(eqn.outvars):
            kept.append(eqn)
            used.update(v for v in eqn.invars if not isinstance(v, _compat.Literal))
    return kept[::-1]


def _apply(eqn, args):
    run = RULES.get(eqn.primitive)
    if run is not None:
        return run(args, **eqn.params)
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        args = map(np.asarray, args)
        return [np.asarray(ELEMENTWISE[name](*args), eqn.outvars[0].aval.dtype)]
    if name in SHAPES:
        aval = eqn.outvars[0].aval
        if all(aval.shape):
            return [SHAPES[name](aval, *map(np.asarray, args), **eqn.params)]
    return _compat.bind(eqn, args)


# -- equations that hold a program -----------------------------------------------------


def _call(args, *, jaxpr, **_):
    return evaluate(jaxpr, args)


def _cond(args, *, branches, **_):
    which = np.clip(int(args[0]), 0, len(branches) - 1)
    return evaluate(branches[which], args[1:])


def _scan(args, **params):
    num_consts, num_carry = _compat.scan_split(params)
    first_xs = num_consts + num_carry
    consts, carry, xs = args[:num_consts], args[num_consts:first_xs], args[first_xs:]
    outs = []
    steps = range(params["length"])
    for k in reversed(steps) if params["reverse"] else steps:
        out = evaluate(params["jaxpr"], [*consts, *carry, *(x[k] for x in xs)])
        carry = out[:num_carry]
        outs.append(out[num_carry:])
    if not outs:
        avals = params["jaxpr"].out_avals[num_carry:]
        return [*carry, *(np.zeros((0, *x.shape), x.dtype) for x in avals)]
    ys = zip(*(outs[::-1] if params["reverse"] else outs))
    return [*carry, *(np.stack(y) for y in ys)]


def _while(args, *, cond_nconsts, body_nconsts, cond_jaxpr, body_jaxpr, **_):
    first_of_carry = cond_nconsts + body_nconsts
    consts, body = args[:cond_nconsts], args[cond_nconsts:first_of_carry]
    carry = args[first_of_carry:]
    while evaluate(cond_jaxpr, [*consts, *carry])[0]:
        carry = evaluate(body_jaxpr, [*body, *carry])
    return carry


RULES = {
    p.jit_p: _call,
    _compat.remat_p: _call,
    p.cond_p: _cond,
    p.scan_p: _scan,
    p.while_p: _while,
}


# -- operations ------------------------------------------------------------------------

# Names of operations, those that NumPy calls otherwise with its name.
_NAMES = """
    abs add add_any:add and:bitwise_and atan2:arctan2 copy:asarray cos eq:equal exp
    ge:greater_equal gt:greater is_finite:isfinite le:less_equal log lt:less max:maximum
    min:minimum mul:multiply name:asarray ne:not_equal neg:negative not:invert
    or:bitwise_or sign sin sqrt square sub:subtract tanh
""".split()
ELEMENTWISE = {
    **{x.partition(":")[0]: getattr(np, x.rpartition(":")[2]) for x in _NAMES},
    "div": lambda x, y: np.trunc(x / y) if x.dtype.kind in "iu" else x / y,
    "select_n": lambda which, *cases: np.choose(which.astype(np.int32), cases),
}


def _broadcast(aval, x, *, shape, broadcast_dimensions, **_):
    wide = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape):
        wide[axis] = size
    return np.broadcast_to(x.reshape(wide), shape)


def _convert(aval, x, **_):
    is_cut = x.dtype.kind == "c" and aval.dtype.kind != "c"
    return (x.real if is_cut else x).astype(aval.dtype)


def _slice(aval, x, *, start_indices, limit_indices, strides):
    strides = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


SHAPES = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda aval, *xs, dimension: np.concatenate(xs, dimension),
    "convert_element_type": _convert,
    "integer_pow": lambda aval, x, y: x**y,
    "reduce_max": lambda aval, x, axes, **_: np.max(x, tuple(axes)),
    "reduce_min": lambda aval, x, axes, **_: np.min(x, tuple(axes)),
    "reduce_sum": lambda aval, x, axes, **_: np.sum(x, tuple(axes), dtype=x.dtype),
    "reshape": lambda aval, x, dimensions, **_: x.reshape(aval.shape),
    "rev": lambda aval, x, dimensions: np.flip(x, dimensions),
    "slice": _slice,
    "squeeze": lambda aval, x, dimensions: x.reshape(aval.shape),
    "transpose": lambda aval, x, permutation: np.transpose(x, permutation),
}
